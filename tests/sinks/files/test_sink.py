"""The files sink: names and places, partitions, mistakes, and refused options."""

from __future__ import annotations

import dataclasses
import datetime as dt
import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import BadRecords, Fenced, SinkUnavailable, WindowConflict
from airflow_kafka_spark.sinks.base import Shape
from airflow_kafka_spark.sinks.files.directory import RECORD
from airflow_kafka_spark.sinks.files.sink import FilesSink
from airflow_kafka_spark.sinks.storage.staging import Staging
from airflow_kafka_spark.sinks.storage.store import escape, make_pipeline_slug, to_safe_name
from airflow_kafka_spark.sinks.storage.tasks.formats import FileSpec
from airflow_kafka_spark.windows.model import OffsetRange, Split, Window
from tests.sinks.attempt import Victim, apply, result_of, travelled, write_all, write_split
from tests.sinks.cases import FilesCase, tree
from tests.sinks.feed import SCHEMA, Feed, Job, rows_of
from tests.sinks.oracle import same_multiset


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lake" / "orders"


def names(path: Path) -> list[str]:
    """Return the relative paths of the files below."""
    return sorted(os.path.relpath(p, path) for p in path.rglob("*") if p.is_file())


def job_of(schema: pa.Schema, lines: list[dict], batch_rows: int = 10_000, topic: str = "orders") -> Job:
    """Return the first window of a pipeline, of one split with these rows."""
    split = Split(0, OffsetRange(topic, 0, 100, 100 + len(lines)))
    window = Window("p", 1, (split.range,), run="r", planned_at="2026-11-20T00:00:00+00:00")
    batches = [
        rows_of(schema, lines[i : i + batch_rows], range(100 + i, 100 + i + len(lines[i : i + batch_rows])))
        for i in range(0, len(lines), batch_rows)
    ]
    return Job(window, (split,), Shape("p", schema), {0: batches})


# --- names and places -----------------------------------------------------------------------------------------------


def test_the_layout_is_the_documented_one(path):
    feed = Feed()
    apply(FilesSink(str(path)), feed.next())
    apply(FilesSink(str(path)), feed.next(1, 0, 0))
    returns = to_safe_name("_returns", 99)
    assert returns.startswith("returns~")
    assert names(path.parent) == sorted(
        [
            "orders/window=shop.orders_to_warehouse-0000000001/_window",
            f"orders/window=shop.orders_to_warehouse-0000000001/{returns}-0-{0:020d}-{37:020d}.parquet",
            f"orders/window=shop.orders_to_warehouse-0000000001/orders-0-{0:020d}-{45:020d}.parquet",
            f"orders/window=shop.orders_to_warehouse-0000000001/orders-1-{0:020d}-{28:020d}.parquet",
            "orders/window=shop.orders_to_warehouse-0000000002/_window",
            f"orders/window=shop.orders_to_warehouse-0000000002/orders-0-{45:020d}-{47:020d}.parquet",
        ]
    )


def test_the_record_describes_the_window_for_people(path):
    feed = Feed()
    job = feed.next(3, 2, 0)
    apply(FilesSink(str(path)), job)
    record = json.loads((path / "window=shop.orders_to_warehouse-0000000001" / RECORD).read_text())
    assert (record["pipeline"], record["number"]) == ("shop.orders_to_warehouse", 1)
    assert record["ranges"] == [[r.topic, r.partition, r.start, r.end] for r in job.window.ranges]
    assert record["rows"] == 5
    assert [(f["path"], f["rows"]) for f in record["files"]] == [
        (f"orders-0-{0:020d}-{4:020d}.parquet", 3),
        (f"orders-1-{0:020d}-{3:020d}.parquet", 2),
    ]
    files = path / "window=shop.orders_to_warehouse-0000000001"
    assert all((files / f["path"]).stat().st_size == f["bytes"] for f in record["files"])


@pytest.mark.parametrize("options", [{}, {"partition_by": ("flag",), "options": {"max_open_files": 1}}, {"format": "json"}])
def test_names_are_a_function_of_the_window_and_its_offsets_only(tmp_path, options):
    jobs = [Feed(), Feed()]
    for n, feed in enumerate(jobs):
        apply(FilesSink(str(tmp_path / str(n) / "t"), **options), feed.next())
    assert names(tmp_path / "0") == names(tmp_path / "1")
    assert len(names(tmp_path / "0")) > 3


@settings(max_examples=300)
@given(st.text(min_size=1), st.text(min_size=1))
def test_different_names_have_different_slugs_that_are_safe_and_seen(one, other):
    a, b = to_safe_name(one, 140), to_safe_name(other, 140)
    assert (a == b) == (one == other)
    assert len(a) <= 153 and "/" not in a and a.isascii() and a[0] not in "._"
    assert a == one or "~" in a


def test_names_stay_legible_where_they_are_safe():
    assert make_pipeline_slug("dag.task") == "dag.task"
    assert make_pipeline_slug("a b") != make_pipeline_slug("a_b") == "a_b"
    assert to_safe_name("x" * 141, 140) != to_safe_name("x" * 142, 140)


def test_the_longest_topic_kafka_allows_fits_into_a_file_name(path):
    job = job_of(pa.schema([("id", pa.int64())]), [{"id": 1}], topic="t" * 249)
    apply(FilesSink(str(path)), job)
    assert len(names(path)) == 2


def test_staging_is_on_the_same_file_system_and_out_of_the_globs_of_readers(path):
    feed = Feed()
    sink, job = FilesSink(str(path)), feed.next()
    with sink.begin(job.window, job.splits, job.shape) as writer:
        write_all(writer, job)
        staged = [n for n in names(path.parent) if n.endswith(".parquet")]
        assert len(staged) == 3
        assert all(n.startswith(".orders.airflow-staging/shop.orders_to_warehouse-0000000001-") for n in staged)
        assert not path.exists()
        assert os.stat(path.parent / ".orders.airflow-staging").st_dev == os.stat(path.parent).st_dev


def test_a_file_uri_is_a_path(tmp_path):
    feed = Feed()
    sink = FilesSink((tmp_path / "my lake" / "t").as_uri())
    assert "%20" in sink.path
    assert sink.uri == sink.path == sink.asset_uri
    apply(sink, feed.next())
    assert FilesSink(str(tmp_path / "my lake" / "t")).find_last_applied(feed.pipeline).number == 1


def test_a_template_stays_a_template_in_the_asset_uri():
    assert FilesSink("/lake/{{ params.table }}").asset_uri == "/lake/{{ params.table }}"


def test_files_are_durable_before_they_are_published_and_names_after(path, monkeypatch):
    steps: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename

    def flushed(fd):
        steps.append(("flush", os.readlink(f"/proc/self/fd/{fd}")))
        fsync(fd)

    def renamed(source, target):
        steps.append(("rename", str(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", flushed)
    monkeypatch.setattr(os, "rename", renamed)
    job = Feed().next(4, 3, 2)
    sink = FilesSink(str(path), partition_by=("flag",))
    with sink.begin(job.window, job.splits, job.shape) as writer:
        results = write_all(writer, job)
        written = {flushed for _, flushed in steps}
        files = [p for p in writer.attempt.rglob("*") if p.suffix == ".parquet"]
        assert len(files) > 3
        assert {str(place) for file in files for place in (file, file.parent, file.parent.parent)} <= written
        steps.clear()
        writer.commit(results)
        published = steps.index(("rename", str(sink.table.get_window_path(job.window))))
        before, after = steps[:published], steps[published + 1 :]
        publish = str(writer.attempt / "publish")
        flushed_before = [place for step, place in before if step == "flush"]
        assert {f"{publish}/{RECORD}", publish, f"{publish}/flag=true", f"{publish}/flag=false"} <= set(flushed_before)
        last_move = max(n for n, (step, _) in enumerate(before) if step == "rename")
        assert all(step == "flush" for step, _ in before[last_move + 1 :])
        assert after == [("flush", str(path)), ("flush", str(path.parent))]
        steps.clear()
        # A retry finds the window published. It must exist after a power cut, too, by whichever attempt it was published.
        sink.find_applied(job.window)
        assert steps == [("flush", str(path)), ("flush", str(path.parent))]


# --- partitions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["parquet", "json", "csv", "orc"])
def test_partition_columns_are_in_the_path_and_not_in_the_files(tmp_path, format):
    case = FilesCase(tmp_path / "lake" / "orders", format, partition_by=("day_of_week", "flag"))
    feed = Feed(case.schema)
    job = feed.next(200, 0, 3)
    apply(case.sink, job)
    window = "window=shop.orders_to_warehouse-0000000001"
    assert {len(n.split("/")) for n in names(case.path) if not n.endswith(RECORD)} == {4}
    assert f"{window}/day_of_week=Di%2FTu%3D%3F/flag=true" in tree(case.path)
    assert f"{window}/day_of_week=__HIVE_DEFAULT_PARTITION__/flag=false" in tree(case.path)
    if format == "parquet":
        for file in case.files():
            stored = pa.parquet.read_schema(file).names
            assert stored == [n for n in case.schema.names if n not in ("day_of_week", "flag")]
    else:
        assert not any(b"day_of_week" in file.read_bytes() for file in case.files())


def test_at_most_max_open_files_are_open_and_parts_are_numbered(path):
    schema = pa.schema([("k", pa.int64()), ("id", pa.int64())])
    job = job_of(schema, [{"k": i % 7, "id": i} for i in range(500)], batch_rows=50)
    sink = FilesSink(str(path), partition_by="k", options={"max_open_files": 3})
    assert sink.validate(job.shape) == []
    with sink.begin(job.window, job.splits, job.shape) as writer:
        task = writer.make_split_writer()
        task.open(job.splits[0])
        open_files = []
        for rows in job.rows[0]:
            task.write(rows)
            links = [_link(fd) for fd in os.listdir("/proc/self/fd")]
            open_files.append(len([link for link in links if "/.orders.airflow-staging/" in link and not link.endswith("/lock")]))
        assert max(open_files) == 3
        writer.commit([result_of(job.splits[0], 500, task.close())])
    found = pa.dataset.dataset(path, partitioning="hive").to_table(columns=["k", "id"]).to_pylist()
    assert same_multiset(job.expected, found) == 500
    parts = [n for n in names(path) if "/k=0/" in n]
    assert len(parts) == 10
    assert [n.rpartition("-part")[2] for n in parts[:-1]] == [f"{n:05d}.parquet" for n in range(1, 10)]


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:
        return ""


def test_rows_keep_their_offset_order_within_each_partition(path):
    schema = pa.schema([("k", pa.string()), ("id", pa.int64())])
    job = job_of(schema, [{"k": "abc"[i * i % 3], "id": i} for i in range(5000)], batch_rows=700)
    apply(FilesSink(str(path), partition_by=["k"]), job)
    files = [p for p in path.rglob("*.parquet")]
    stored = [pa.parquet.ParquetFile(p).read()["id"].to_pylist() for p in files]
    assert len(files) == 2 and all(ids == sorted(ids) for ids in stored)
    assert Counter(i for ids in stored for i in ids) == Counter(range(5000))


def test_a_partition_value_that_no_file_name_holds_names_its_record(path):
    schema = pa.schema([("k", pa.string()), ("id", pa.int64())])
    job = job_of(schema, [{"k": "fine", "id": 1}, {"k": "ü" * 128, "id": 2}])
    with pytest.raises(BadRecords, match="orders-0@101: the partition directory k=ü.* more than 255 bytes"):
        apply(FilesSink(str(path), partition_by="k"), job)
    assert tree(path.parent) == {".": "directory"}


# --- row groups, formats --------------------------------------------------------------------------------------------


def test_row_groups_are_written_as_they_come(path):
    schema = pa.schema([("id", pa.int64())])
    job = job_of(schema, [{"id": i} for i in range(1000)], batch_rows=30)
    apply(FilesSink(str(path), options={"max_rows_per_group": 100}), job)
    (file,) = path.rglob("*.parquet")
    groups = pa.parquet.ParquetFile(file).metadata
    assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [120] * 8 + [40]


def test_parquet_instants_are_microseconds_in_utc(path):
    schema = pa.schema([("at", pa.timestamp("ms", "Europe/Berlin")), ("wall", pa.timestamp("s"))])
    at = dt.datetime(2026, 7, 1, 12, tzinfo=dt.timezone.utc)
    apply(FilesSink(str(path)), job_of(schema, [{"at": at, "wall": at.replace(tzinfo=None)}]))
    (file,) = path.rglob("*.parquet")
    stored = pa.parquet.ParquetFile(file).schema
    types = [json.loads(stored.column(i).logical_type.to_json()) for i in range(2)]
    assert [(t["Type"], t["isAdjustedToUTC"], t["timeUnit"]) for t in types] == [
        ("Timestamp", True, "microseconds"),
        ("Timestamp", False, "microseconds"),
    ]
    assert pa.parquet.read_table(file).to_pylist()[0]["at"] == at


@pytest.mark.parametrize(
    ("at", "fits"),
    [
        (dt.datetime(2026, 1, 1, 0, 0, 0, 1), True),
        (dt.datetime(1969, 12, 31, 23, 59, 59), True),
        (dt.datetime(1969, 12, 31, 23, 59, 59, 999999), False),
        (dt.datetime(1600, 1, 1), False),
        (dt.datetime(9999, 12, 31), False),
    ],
)
@pytest.mark.parametrize("deep", [False, True])
def test_orc_refuses_timestamps_that_its_readers_fail_on(path, at, fits, deep):
    kind = pa.timestamp("us", "UTC")
    at = at.replace(tzinfo=dt.timezone.utc)
    value = [{"k": [("x", at)]}] if deep else at
    schema = pa.schema([("at", pa.list_(pa.struct([("k", pa.map_(pa.string(), kind))])) if deep else kind)])
    good = [{"k": [("x", dt.datetime(2026, 1, 1, tzinfo=dt.timezone.utc))]}] * 3 if deep else None
    job = job_of(schema, [{"at": good}, {"at": None}, {"at": value}])
    if fits:
        assert apply(FilesSink(str(path), format="orc"), job).written == 3
    else:
        with pytest.raises(BadRecords, match="orders-0@102: the timestamp in column `at` cannot be stored in ORC"):
            apply(FilesSink(str(path), format="orc"), job)
        assert tree(path.parent) == {".": "directory"}


def test_csv_refuses_a_null_that_would_be_an_empty_line(path):
    schema = pa.schema([("name", pa.string())])
    with pytest.raises(BadRecords, match="orders-0@101: a null in the only column is an empty line"):
        apply(FilesSink(str(path), format="csv"), job_of(schema, [{"name": "a"}, {"name": None}]))
    apply(FilesSink(str(path), format="csv"), job_of(schema, [{"name": "a"}, {"name": ""}]))
    (file,) = path.rglob("*.csv")
    assert file.read_bytes() == b'name\n"a"\n""\n'


@pytest.mark.parametrize("format", ["parquet", "json", "csv", "orc"])
def test_rows_of_nothing_but_nulls_are_rows(tmp_path, format):
    case = FilesCase(tmp_path / "lake" / "orders", format)
    nothing = dict.fromkeys(case.schema.names)
    job = job_of(case.schema, [nothing, {**nothing, "id": 1}, nothing])
    apply(case.sink, job)
    assert same_multiset(job.expected, case.read()) == 3


@pytest.mark.parametrize("format", ["parquet", "json", "orc"])
def test_a_struct_may_be_absent_whose_fields_are_never_null(path, format):
    inner = pa.struct([pa.field("n", pa.int32(), nullable=False), pa.field("at", pa.list_(pa.timestamp("us", "UTC")))])
    line = pa.struct([pa.field("inner", inner, nullable=False)])
    lines = [None, {"inner": {"n": 1, "at": None}}, {"inner": {"n": 2, "at": []}}]
    # As decoders make them: the fields of a null struct are null, too.
    inners = pa.StructArray.from_arrays(
        [pa.array([None, 1, 2], pa.int32()), pa.array([None, None, []], inner[1].type)], fields=list(inner)
    )
    made = pa.StructArray.from_arrays([inners], fields=list(line), mask=pa.array([True, False, False]))
    schema = pa.schema([pa.field("line", line), pa.field("lines", pa.list_(pa.field("item", line)))])
    job = job_of(schema, [{"line": each, "lines": [each]} for each in lines])
    (rows,) = job.rows[0]
    held = pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), made, type=schema.field("lines").type)
    job.rows[0] = [dataclasses.replace(rows, batch=pa.record_batch([made, held], schema=schema))]
    assert apply(FilesSink(str(path), format=format), job).written == 3
    if format == "parquet":
        (file,) = path.rglob("*.parquet")
        assert pa.parquet.read_table(file).to_pylist() == [{"line": each, "lines": [each]} for each in lines]


# --- attempts -------------------------------------------------------------------------------------------------------


def test_a_task_of_an_overtaken_attempt_is_fenced_wherever_it_is(path):
    feed, sink = Feed(), FilesSink(str(path), partition_by=("flag",))
    job = feed.next()
    split, rows = job.splits[0], job.rows[0]
    old = sink.begin(job.window, job.splits, job.shape)
    tasks = [travelled(old.make_split_writer()) for _ in range(4)]
    for task in tasks[1:]:
        task.open(split)
    for task in tasks[2:]:
        for batch in rows:
            task.write(batch)
    done = write_all(old, job)
    with sink.begin(job.window, job.splits, job.shape) as new:
        with pytest.raises(Fenced, match="newer attempt took over while this one was writing split 0"):
            tasks[0].open(split)
        with pytest.raises(Fenced):
            tasks[1].write(rows[0])
        with pytest.raises(Fenced):
            tasks[2].close()
        for task in tasks:
            task.abort()
        with pytest.raises(Fenced, match="while this one was publishing window 1"):
            old.commit(done)
        old.__exit__(None, None, None)
        applied = new.commit(write_all(new, job))
    assert old.commit(done) == applied, "what the other wrote is returned once it is there"
    assert [n for n in names(path.parent) if "staging" in n] == []


def test_of_two_attempts_that_publish_at_the_same_moment_one_wins_and_both_return_its_record(path, monkeypatch):
    """Both attempts began before either could remove the other's directory, and neither has found a window."""
    feed, sink = Feed(), FilesSink(str(path))
    job = feed.next()
    with monkeypatch.context() as patched:
        patched.setattr(Staging, "sweep", lambda *_: None)
        slow, fast = (sink.begin(job.window, job.splits, job.shape) for _ in range(2))
    results = [write_all(writer, job) for writer in (slow, fast)]
    meanwhile = []

    def reached(point):
        if point == "sink.in_transaction" and not meanwhile:
            meanwhile.append(None)
            meanwhile.append(fast.commit(results[1]))
            meanwhile.append(tree(path))

    monkeypatch.setattr("airflow_kafka_spark.sinks.files.sink.faults.reached", reached)
    assert slow.commit(results[0]) == meanwhile[1]
    assert tree(path) == meanwhile[2]
    for writer in (slow, fast):
        writer.__exit__(None, None, None)
    assert [n for n in names(path.parent) if "staging" in n] == []


def test_leftovers_are_taken_away_whole_before_anything_in_them_is_deleted(path, monkeypatch):
    """Otherwise an attempt that is still alive could publish the remaining files."""
    feed, sink = Feed(), FilesSink(str(path))
    job = feed.next()
    old = sink.begin(job.window, job.splits, job.shape)
    results = write_all(old, job)
    seen = []
    monkeypatch.setattr("shutil.rmtree", lambda gone, **_: seen.append((old.attempt.exists(), Path(gone))))
    new = sink.begin(job.window, job.splits, job.shape)
    monkeypatch.undo()
    assert [exists for exists, _ in seen] == [False]
    assert names(seen[0][1]), "not deleted yet"
    with pytest.raises(Fenced):
        old.commit(results)
    # The next removal finishes what this one has left.
    new.__exit__(None, None, None)
    with sink.begin(job.window, job.splits, job.shape):
        assert not seen[0][1].exists()
    assert tree(path.parent) == {".": "directory"}


def test_leftovers_of_other_pipelines_and_later_windows_stay(path):
    sink = FilesSink(str(path))
    feeds = [Feed(pipeline=name) for name in ("a", "a-0000000001", "b")]
    others = [feed.next() for feed in feeds]
    later = [feeds[0].next(), feeds[0].next()]
    begun = [sink.begin(j.window, j.splits, j.shape) for j in [*others, *later]]
    job = later[0]
    with sink.begin(job.window, job.splits, job.shape) as writer:
        alive = [w.attempt.exists() for w in begun]
        assert alive == [False, True, True, False, True]
        assert writer.attempt.exists()


def test_only_the_files_that_results_name_are_published(path):
    """The files of a speculative copy, and all that it writes later, are not published."""
    feed, sink = Feed(), FilesSink(str(path), partition_by=("flag",))
    job = feed.next()
    with sink.begin(job.window, job.splits, job.shape) as writer:
        twins = [write_all(writer, job) for _ in range(3)]
        late = travelled(writer.make_split_writer())
        late.open(job.splits[0])
        late.write(job.rows[0][0])
        writer.commit([twins[n][n] for n in range(3)])
        published = tree(path)
        late.write(job.rows[0][1])
        late.close()
        assert tree(path) == published
    record = sink.table.read_record(job.window)
    window = sink.table.get_window_path(job.window)
    assert {f["path"] for f in record.files} | {RECORD} == set(names(window))


@pytest.mark.faults
@pytest.mark.parametrize("point", ["split.mid", "split.flushed"])
def test_a_paused_task_that_outlives_its_window_changes_nothing(path, tmp_path, point):
    """Spark's task is a zombie, and the driver has published what another copy of it wrote."""
    feed, sink = Feed(), FilesSink(str(path))
    job = feed.next()
    writer = sink.begin(job.window, job.splits, job.shape)
    with Victim(_Task(writer.make_split_writer()), job, f"{point}:stop", tmp_path / "victim") as zombie:
        assert zombie.stopped()
        with writer:
            writer.commit(write_all(writer, job))
        before = tree(path.parent)
        zombie.wake()
        assert tree(path.parent) == before
    assert same_multiset(job.expected, FilesCase.read(_case(path))) == len(job.ids)


class _Task(FilesSink):
    """A single task in the form of a sink, for :class:`Victim`."""

    def __init__(self, writer):
        self.__dict__["writer"] = writer

    def find_applied(self, window):
        return None

    def begin(self, window, splits, shape):
        write_split(self.__dict__["writer"], splits[0], Feed().next().rows[0])


def _case(path: Path) -> FilesCase:
    case = FilesCase.__new__(FilesCase)
    case.path, case.sink, case.schema = path, FilesSink(str(path)), SCHEMA
    return case


def test_an_empty_directory_in_the_way_is_replaced_and_a_full_one_is_a_conflict(path):
    feed, sink = Feed(), FilesSink(str(path))
    first, second = feed.next(), feed.next()
    sink.table.get_window_path(first.window).mkdir(parents=True)
    with pytest.raises(WindowConflict, match="has no _window"):
        apply(sink, first)
    os.rmdir(sink.table.get_window_path(first.window))
    apply(sink, first)
    sink.table.get_window_path(second.window).mkdir()
    (sink.table.get_window_path(second.window) / "stray.parquet").write_text("not ours")
    before = tree(path)
    with pytest.raises(WindowConflict):
        apply(sink, second)
    assert tree(path) == before


def test_old_windows_may_be_deleted_by_retention(path):
    import shutil

    feed, sink = Feed(), FilesSink(str(path))
    jobs = [feed.next() for _ in range(4)]
    for job in jobs[:3]:
        apply(sink, job)
    for job in jobs[:2]:
        shutil.rmtree(sink.table.get_window_path(job.window))
    assert sink.find_last_applied(feed.pipeline).number == 3
    shutil.rmtree(sink.table.get_window_path(jobs[2].window))
    assert sink.find_last_applied(feed.pipeline) is None
    apply(sink, jobs[3])
    assert sink.find_last_applied(feed.pipeline).number == 4


def test_a_topic_that_was_recreated_may_begin_at_zero_again(path):
    from dataclasses import replace

    sink, feed = FilesSink(str(path)), Feed()
    first = feed.next()
    again = Feed(first_id=1000, number=1).next()
    apply(sink, replace(first, window=replace(first.window, topic_ids={"orders": "one", "_returns": "r1"})))
    with pytest.raises(WindowConflict, match="starts at offset 0"):
        apply(sink, replace(again, window=replace(again.window, topic_ids={"orders": "one", "_returns": "r2"})))
    apply(sink, replace(again, window=replace(again.window, topic_ids={"orders": "two", "_returns": "r2"})))


def test_executors_without_the_shared_file_system_get_an_error_that_names_it(path):
    feed, sink = Feed(), FilesSink(str(path))
    job = feed.next()
    with sink.begin(job.window, job.splits, job.shape) as writer:
        task = writer.make_split_writer()
        elsewhere = str(path.parent / "other-host" / "staging" / "attempt")
        task.target = type(task.target)(**{**vars(task.target), "attempt": elsewhere})
        with pytest.raises(SinkUnavailable, match="must share the file system"):
            task.open(job.splits[0])


def test_a_full_disk_is_an_error_of_ours_and_leaves_nothing(path, monkeypatch):
    feed, sink = Feed(), FilesSink(str(path))
    job = feed.next()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("airflow_kafka_spark.sinks.files.tasks.write.flush", full)
    with pytest.raises(SinkUnavailable, match="No space left"):
        apply(sink, job)
    monkeypatch.undo()
    assert tree(path.parent) == {".": "directory"}
    monkeypatch.setattr("airflow_kafka_spark.sinks.files.sink.flush", full)
    with pytest.raises(SinkUnavailable, match="publishing window shop.orders_to_warehouse#1 failed|No space left"):
        apply(sink, job)
    monkeypatch.undo()
    assert tree(path.parent) == {".": "directory"}


# --- validate -------------------------------------------------------------------------------------------------------

SHAPE = Shape("p", pa.schema([("id", pa.int64()), ("day", pa.date32()), ("at", pa.timestamp("us", "UTC")), ("raw", pa.binary())]))


@pytest.mark.parametrize(
    ("options", "where", "said"),
    [
        ({"path": "hdfs://nn/orders"}, "sink.path", "in a store that is not supported: hdfs"),
        ({"path": "dbfs:/orders"}, "sink.path", "not supported"),
        ({"path": "s3://bucket"}, "sink.path", "not of the form s3://bucket/prefix"),
        (
            {"path": "s3://bucket/orders", "visibility": "rename"},
            "sink.visibility",
            "nothing can be renamed in s3://bucket/orders",
        ),
        ({"visibility": "swap"}, "sink.visibility", "expected `rename`, `manifest` or `listing`"),
        ({"visibility": "swap", "path": "lake/orders"}, "sink.path", "not an absolute path"),
        ({"visibility": "listing"}, "sink.visibility", "is not in S3"),
        ({"visibility": "listing", "conn_id": "aws_default"}, "sink.conn_id", "needs no connection"),
        ({"conn_id": "aws_default"}, "sink.conn_id", "needs no connection"),
        ({"path": "lake/orders"}, "sink.path", "not an absolute path"),
        ({"path": "file://otherhost/lake"}, "sink.path", "names the host otherhost"),
        ({"path": "/"}, "sink.path", "root directory"),
        ({"path": "/proc"}, "sink.path", "root of a file system of its own"),
        ({"format": "avro"}, "sink.format", "`avro` is not known; expected one of parquet, json, csv, orc"),
        ({"compression": "brotli"}, "sink.compression", "expected one of none, snappy, gzip, zstd, lz4"),
        ({"format": "csv", "compression": "snappy"}, "sink.compression", "expected one of none, gzip"),
        ({"format": "csv"}, "sink.format", "csv cannot hold column `raw` of type binary"),
        ({"partition_by": "nobody"}, "sink.partition_by", "no column `nobody`; there are `id`, `day`, `at`, `raw`"),
        ({"partition_by": ("at",)}, "sink.partition_by", "Partition by a date made of it"),
        ({"partition_by": ("raw",)}, "sink.partition_by", "column `raw` is binary"),
        ({"partition_by": ("day", "day")}, "sink.partition_by", "`day` is named 2 times"),
        ({"partition_by": ("id", "day", "at", "raw")}, "sink.partition_by", "names all columns"),
        ({"window_column": "DAY"}, "sink.window_column", "the records have a column `day`"),
        ({"window_column": "_window"}, "sink.window_column", "readers skip directories"),
        ({"window_column": ""}, "sink.window_column", "cannot be the name"),
        ({"options": {"max_open_files": True}}, "sink.options", "expected a whole number from 1"),
        ({"options": {"max_rows_per_group": "many"}}, "sink.options", "expected a whole number from 1"),
        ({"options": {"version": "1.0"}}, "sink.options", "the sink sets it itself"),
        ({"options": {"compresion_level": 3}}, "sink.options", "does not take {'compresion_level': 3}"),
        ({"options": {"timestamps": "utc"}}, "sink.options", "with format orc"),
        ({"format": "orc", "options": {"timestamps": "local"}}, "sink.options", "expected `utc` or `instant`"),
        ({"format": "json", "options": {"pretty": True}}, "sink.options", "does not take"),
        ({"format": "csv", "options": {"delimiter": "||"}}, "sink.options", "one character"),
    ],
)
def test_each_mistake_is_found_and_explained(path, options, where, said):
    import re

    problems = FilesSink(**{"path": str(path), **options}).validate(SHAPE)
    assert [p.where for p in problems if re.search(said, str(p))] == [where], problems
    assert not path.parent.exists()


def test_a_path_that_is_a_file_or_lies_below_one_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below" / "it"):
        (problem,) = FilesSink(str(path)).validate(SHAPE)
        assert problem.what == f"{tmp_path / 'file'} is not a directory"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to become another user")
def test_a_place_without_the_right_to_write_is_refused(tmp_path):
    os.chmod(tmp_path, 0o755)
    # All code is imported before, since another user may not be able to read it.
    code = """if True:
        import os, pickle, sys
        sink, shape = pickle.load(sys.stdin.buffer)
        assert sink.validate(shape) == []
        os.setuid(65534)
        print(*sink.validate(shape))
    """
    # Directories above have to let it through.
    for parent in (p for p in tmp_path.parents if p.is_relative_to(tempfile.gettempdir())):
        os.chmod(parent, os.stat(parent).st_mode | 0o011)
    for path in (tmp_path / "new", tmp_path):
        command, env = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        given = pickle.dumps((FilesSink(str(path)), SHAPE))
        found = subprocess.run(command, input=given, capture_output=True, timeout=300, env=env, check=True)
        assert f"{tmp_path} cannot be written by user 65534" in found.stdout.decode()


def test_types_without_a_place_in_a_format_are_named_column_by_column(path):
    schema = pa.schema(
        [("id", pa.int64()), ("t", pa.time64("us")), ("i", pa.month_day_nano_interval()), ("n", pa.timestamp("ns"))]
    )
    found = {
        f: [str(p) for p in FilesSink(str(path), format=f).validate(Shape("p", schema))]
        for f in ("parquet", "orc", "json", "csv")
    }
    named = {f: {n for n in "tin" if any(f"column `{n}`" in p for p in problems)} for f, problems in found.items()}
    assert named == {"parquet": {"i", "n"}, "orc": {"t", "i", "n"}, "json": {"i", "n"}, "csv": {"i", "n"}}


def test_what_is_there_already_has_to_be_the_same_kind_of_table(path):
    feed = Feed()
    apply(FilesSink(str(path)), feed.next())
    (other_format,) = FilesSink(str(path), format="orc").validate(feed.shape)
    assert "holds parquet files of this pipeline, partitioned by []" in other_format.what
    (other_column,) = FilesSink(str(path), window_column="load").validate(feed.shape)
    assert "already partitioned by `window`" in other_column.what
    assert FilesSink(str(path), compression="zstd").validate(feed.shape) == []


def test_foreign_files_at_the_top_are_let_be(path):
    path.mkdir(parents=True)
    (path / "part-00000.parquet").write_text("somebody else's")
    feed, sink = Feed(), FilesSink(str(path))
    assert sink.validate(feed.shape) == []
    apply(sink, feed.next())
    assert (path / "part-00000.parquet").read_text() == "somebody else's"


# --- values ---------------------------------------------------------------------------------------------------------


def test_partition_by_may_be_one_name():
    assert FilesSink("/t", partition_by="day").partition_by == ("day",)
    assert FilesSink("/t", partition_by=["day"]) == FilesSink("/t", partition_by=("day",))


def test_exports_load_neither_arrow_nor_a_driver():
    code = """if True:
        import sys
        from airflow_kafka_spark.sinks import FilesSink, Guarantee, KafkaSink, Sink
        import airflow_kafka_spark.sinks as sinks
        assert KafkaSink("t", None).uri == "kafka://kafka_default/t"
        assert {"FilesSink", "KafkaSink", "PostgresSink", "Sink"} <= set(dir(sinks))
        try:
            sinks.NobodysSink
        except AttributeError as error:
            assert "NobodysSink" in str(error)
        sink = FilesSink("/lake/orders", partition_by="day")
        assert sink.uri == "file:///lake/orders" and sink.guarantee is Guarantee.EXACTLY_ONCE
        loaded = {"pyarrow", "psycopg", "adbc_driver_manager", "pandas", "numpy", "pyspark", "airflow"} & set(sys.modules)
        assert not loaded, loaded
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=300)


def test_the_defaults_of_compression():
    assert {f: FileSpec(f).codec for f in ("parquet", "orc", "json", "csv")} == {
        "parquet": "snappy", "orc": "zstd", "json": "none", "csv": "none",
    }  # fmt: skip


def test_escape_is_what_hive_has():
    assert escape("a b=c/d%é\x00") == "a b%3Dc%2Fd%25é%00"


def test_a_staging_directory_that_is_removed_meanwhile_is_made_again(tmp_path, monkeypatch):
    staging, made = Staging.of(tmp_path / "t"), []
    mkdir = os.mkdir

    def racing(path, *rest):
        if not made:
            os.rmdir(staging.root)
        made.append(path)
        mkdir(path, *rest)

    monkeypatch.setattr(os, "mkdir", lambda p, *a: racing(p, *a) if "0000000001" in str(p) else mkdir(p, *a))
    assert staging.create(Feed().next().window).is_dir()
    assert len(made) == 3


def test_a_window_that_is_published_just_before_the_rename_stays_as_it_is(path, tmp_path, monkeypatch):
    """Another attempt, which this one could not end, publishes between the last check and the rename."""
    job, sink, other = Feed().next(), FilesSink(str(path)), FilesSink(str(tmp_path / "other" / "orders"))
    applied = apply(other, job)
    published = []

    def overtaken(point):
        if point == "sink.in_transaction":
            shutil.copytree(other.table.get_window_path(job.window), sink.table.get_window_path(job.window))
            published.append(tree(path))

    monkeypatch.setattr(faults, "reached", overtaken)
    with sink.begin(job.window, job.splits, job.shape) as writer:
        assert writer.commit(write_all(writer, job)) == applied
    assert [tree(path)] == published


def test_where_there_are_no_locks_nothing_of_others_is_swept_away_and_windows_are_written(path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    old = Staging.of(path).create(Feed(pipeline="abandoned").next().window)
    os.utime(old, (0, 0))
    job, sink = Feed().next(), FilesSink(str(path))
    with monkeypatch.context() as patched:
        patched.setattr("fcntl.flock", flock)
        assert apply(sink, job).written == len(job.expected)
        assert old.exists()
    os.utime(old, (0, 0))
    sink.begin(job.window, job.splits, job.shape).__exit__(None, None, None)
    assert not old.exists()


def test_only_so_many_abandoned_attempts_are_swept_away_at_once(path):
    job, sink, staging = Feed().next(), FilesSink(str(path)), Staging.of(path)
    for number in range(45):
        os.utime(staging.create(Feed(pipeline=f"abandoned {number}").next().window), (0, 0))
    found = []
    for _ in range(3):
        with sink.begin(job.window, job.splits, job.shape):
            found.append(len(os.listdir(staging.root)) - 1)
    assert found == [25, 5, 0]


@pytest.mark.parametrize("exists", [True, False])
def test_a_file_system_on_which_directories_cannot_be_exchanged_is_found_without_leaving_a_trace(path, monkeypatch, exists):
    if exists:
        path.mkdir(parents=True)
    before = tree(path.parents[1])
    assert FilesSink(str(path)).find_replay_problems() == []
    # The kernel rejects an unknown flag with the error of a file system that does not support the real flag.
    monkeypatch.setattr("airflow_kafka_spark.sinks.files.directory._RENAME_EXCHANGE", 1 << 20)
    (problem,) = FilesSink(str(path)).find_replay_problems()
    assert problem.where == "on_rerun" and str(path) in problem.what and "in one step" in problem.what
    assert "skip" in problem.action
    assert tree(path.parents[1]) == before
    assert FilesSink("s3://bucket/table").find_replay_problems() == [], "that is for validate() to refuse"
