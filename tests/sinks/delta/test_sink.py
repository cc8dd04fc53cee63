"""The Delta sink: other writers, maintenance of the table, replays, evolution, statistics, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema, write_deltalake

from airflow_kafka_spark.errors import SinkUnavailable, WindowConflict
from airflow_kafka_spark.sinks.base import Shape
from airflow_kafka_spark.sinks.delta.log import METADATA, PipelineVersion, app_id
from airflow_kafka_spark.sinks.delta.place import TablePlace
from airflow_kafka_spark.sinks.delta.sink import DeltaSink
from airflow_kafka_spark.sinks.delta.tasks.statistics import LONGEST_TEXT
from airflow_kafka_spark.windows.codec import ranges_to_json
from tests.sinks.attempt import Victim, apply, write_all
from tests.sinks.delta.cases import DeltaCase
from tests.sinks.feed import SCHEMA, Feed, Job, row
from tests.sinks.oracle import same_multiset

SMALL = pa.schema([("id", pa.int64()), ("name", pa.string()), ("ratio", pa.float64())])


@pytest.fixture
def lake(tmp_path: Path) -> DeltaCase:
    found = DeltaCase(tmp_path / "lake" / "orders")
    found.schema = SMALL
    return found


@pytest.fixture
def feed() -> Feed:
    return Feed(SMALL)


def of_others(lake: DeltaCase, *ids: int) -> None:
    """Another writer appends."""
    write_deltalake(lake.path, pa.table({"id": pa.array(ids, pa.int64())}), mode="append", schema_mode="merge")


def maintain(lake: DeltaCase) -> None:
    """OPTIMIZE, and VACUUM of all that the log does not name."""
    DeltaTable(lake.path).optimize.compact()
    DeltaTable(lake.path).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True)


def replayed(job: Job, replay: int = 1, first: int = 0) -> Job:
    """A replay of a window: other rows of the same offsets."""
    data = {
        n: [replace(rows, batch=rows.batch.slice(0, max(rows.batch.num_rows - first, 0))) for rows in batches]
        for n, batches in job.rows.items()
    }
    data = {n: [replace(r, offsets=r.offsets.slice(0, r.batch.num_rows)) for r in batches] for n, batches in data.items()}
    return replace(job, window=replace(job.window, replay=replay), rows=data)


# --- other writers --------------------------------------------------------------------------------------------------


@pytest.mark.faults
def test_an_append_of_others_between_look_and_commit_loses_and_doubles_nothing(lake, feed, tmp_path):
    first, job = feed.next(), feed.next()
    apply(lake.sink, first)
    with Victim(lake.sink, job, "sink.in_transaction:stop", tmp_path / "victim") as attempt:
        assert attempt.stopped()
        of_others(lake, -1, -2)
        of_others(lake, -3)
        assert attempt.wake() == 0
    assert Counter(lake.ids()) == Counter([*first.ids, *job.ids, -1, -2, -3])
    assert lake.leftovers() == []
    assert apply(lake.sink, job).number == 2


@pytest.mark.faults
def test_an_attempt_whose_files_were_removed_commits_nothing_though_nobody_else_has(lake, feed, tmp_path):
    """The attempt that has removed them gave up, so that the window is still open when the zombie wakes."""
    first, job = feed.next(), feed.next()
    apply(lake.sink, first)
    with Victim(lake.sink, job, "sink.in_transaction:stop", tmp_path / "victim") as zombie:
        assert zombie.stopped()
        with lake.sink.begin(job.window, job.splits, job.shape):
            pass
        assert zombie.wake() == 1
        assert "Fenced" in zombie.log.read_text()
    assert lake.sink.applied(job.window) is None
    same_multiset(first.expected, lake.read())
    apply(lake.sink, job)
    same_multiset(first.expected + job.expected, lake.read())
    assert lake.leftovers() == []


@pytest.mark.faults
@pytest.mark.parametrize("point", ["sink.staged", "sink.in_transaction", "sink.committed"])
def test_optimize_vacuum_and_other_writers_between_two_attempts_lose_nothing(lake, feed, tmp_path, point):
    first, job, third = feed.next(), feed.next(), feed.next()
    apply(lake.sink, first)
    with Victim(lake.sink, job, point, tmp_path / "victim") as victim:
        assert victim.died()
    of_others(lake, -1)
    maintain(lake)
    of_others(lake, -2)
    for one in (job, third, job):
        apply(lake.sink, one)
    assert Counter(lake.ids()) == Counter([*first.ids, *job.ids, *third.ids, -1, -2])
    assert pl.read_delta(str(lake.path)).height == len(lake.ids())


def test_a_vacuum_that_takes_the_files_of_a_running_attempt_is_noticed_before_its_commit(lake, feed):
    apply(lake.sink, feed.next())
    before, job = lake.ids(), feed.next()
    with lake.sink.begin(job.window, job.splits, job.shape) as writer:
        results = write_all(writer, job)
        maintain(lake)
        with pytest.raises(SinkUnavailable, match="VACUUM"):
            writer.commit(results)
    assert sorted(lake.ids()) == sorted(before)
    apply(lake.sink, job)
    assert Counter(lake.ids()) == Counter([*before, *job.ids])


# --- what the table remembers ---------------------------------------------------------------------------------------


def test_the_commit_holds_the_window_for_those_who_read_the_history(lake, feed):
    job = feed.next()
    apply(lake.sink, job)
    (commit,) = [c for c in DeltaTable(lake.path).history() if METADATA in c]
    found, window = commit[METADATA], job.window
    assert (found["pipeline"], found["number"], found["rows"]) == (window.pipeline, 1, len(job.ids))
    assert found["ranges"] == ranges_to_json(window.ranges)
    assert (found["cluster_id"], found["topic_ids"]) == (window.cluster_id, dict(window.topic_ids))


def test_windows_are_remembered_when_delta_has_removed_its_old_entries(tmp_path, feed):
    short = {"delta.logRetentionDuration": "interval 0 seconds", "delta.checkpointInterval": "5"}
    case = DeltaCase(tmp_path / "lake" / "orders", table_properties=short)
    case.schema = SMALL
    jobs = [feed.next(2, 1, 0) for _ in range(7)]
    for job in jobs[:6]:
        apply(case.sink, job)
    of_others(case, -1)
    DeltaTable(case.path).create_checkpoint()
    DeltaTable(case.path).cleanup_metadata()
    assert len(list(case.path.glob("_delta_log/*.json"))) < 3
    assert [case.sink.applied(job.window).number for job in jobs[:6]] == [1, 2, 3, 4, 5, 6]
    assert case.sink.last_applied(feed.pipeline).ranges == jobs[5].window.ranges
    apply(case.sink, jobs[6])
    assert Counter(case.ids()) == Counter([*(i for job in jobs for i in job.ids), -1])


def test_a_table_that_was_copied_without_its_records_has_them_in_its_history(lake, feed):
    jobs = [feed.next() for _ in range(3)]
    records = [apply(lake.sink, job) for job in jobs[:2]]
    shutil.rmtree(lake.path / "_airflow")
    assert lake.sink.last_applied(feed.pipeline) == records[1]
    assert [lake.sink.applied(job.window) for job in jobs] == [*records, None]
    apply(lake.sink, jobs[2])
    same_multiset([line for job in jobs for line in job.expected], lake.read())


def test_a_pipelines_version_grows_with_each_of_its_commits():
    version, seen = PipelineVersion.unpack(None), [-1]
    for number in (1, None, 1, 2, None, None, 10**9):
        version = version.after(number)
        assert PipelineVersion.unpack(int(version)) == version
        seen.append(int(version))
    assert seen == sorted(set(seen)) and seen[-1] < 1 << 63
    assert version.newest == 10**9
    with pytest.raises(OverflowError):
        PipelineVersion(1, (1 << 14) - 1, 0).after()


# --- replays --------------------------------------------------------------------------------------------------------


def test_a_replay_replaces_the_rows_of_its_window_in_one_commit(lake, feed):
    jobs = [feed.next() for _ in range(3)]
    for job in jobs:
        apply(lake.sink, job)
    of_others(lake, -1)
    again = replayed(jobs[1], first=5)
    assert 0 < len(again.ids) < len(jobs[1].ids)
    assert lake.sink.applied(again.window) is None
    version = DeltaTable(lake.path).version()
    assert apply(lake.sink, again).replay == 1
    assert DeltaTable(lake.path).version() == version + 1
    assert Counter(lake.ids()) == Counter([*jobs[0].ids, *again.ids, *jobs[2].ids, -1])
    assert lake.sink.last_applied(feed.pipeline).number == 3
    twice = replayed(jobs[1], replay=2)
    for one in (twice, again, twice):
        apply(lake.sink, one)
    assert Counter(lake.ids()) == Counter([*(i for job in jobs for i in job.ids), -1])
    fourth = feed.next()
    apply(lake.sink, fourth)
    assert lake.sink.last_applied(feed.pipeline).number == 4


@pytest.mark.faults
@pytest.mark.parametrize("point", ["sink.in_transaction", "sink.committed"])
def test_a_replay_that_dies_is_repeated_and_a_zombie_of_it_changes_nothing(lake, feed, tmp_path, point):
    job, second = feed.next(), feed.next()
    apply(lake.sink, job)
    apply(lake.sink, second)
    again = replayed(job, first=3)
    with Victim(lake.sink, again, point, tmp_path / "victim") as victim:
        assert victim.died()
    with Victim(lake.sink, again, "sink.in_transaction:stop", tmp_path / "zombie") as zombie:
        stopped = zombie.stopped()
        assert stopped == (point == "sink.in_transaction")
        apply(lake.sink, again)
        if stopped:
            zombie.wake()
    assert Counter(lake.ids()) == Counter([*again.ids, *second.ids])
    apply(lake.sink, feed.next())
    assert not list(lake.path.glob("_airflow/attempts/*"))


def test_a_replay_of_a_window_whose_files_were_rewritten_is_refused(lake, feed):
    job = feed.next()
    apply(lake.sink, job)
    again = replayed(job)
    assert lake.sink.window_replay_problems(again.window) == []
    maintain(lake)
    (problem,) = lake.sink.window_replay_problems(again.window)
    assert problem.where == "on_rerun" and "OPTIMIZE" in problem.what, "it is said before a replay is planned, too"
    with pytest.raises(WindowConflict, match="OPTIMIZE"):
        apply(lake.sink, again)
    assert Counter(lake.ids()) == Counter(job.ids)


def test_a_replay_that_was_committed_needs_no_files_and_an_unknown_window_is_not_replayed(lake, feed):
    job, unknown = feed.next(), feed.next()
    again = replayed(job)
    assert "no record" in lake.sink.window_replay_problems(again.window)[0].what, "there is no table yet"
    apply(lake.sink, job)
    assert "no record" in lake.sink.window_replay_problems(replayed(unknown).window)[0].what
    apply(lake.sink, again)
    maintain(lake)
    assert lake.sink.window_replay_problems(again.window) == [], "its attempt died before the close: only that is left"


def test_a_table_that_only_takes_appends_says_so_before_a_replay_is_planned(lake, feed):
    sink = replace(lake.sink, table_properties={"delta.appendOnly": "true"})
    job = feed.next()
    apply(sink, job)
    assert sink.validate(feed.shape) == []
    (problem,) = sink.replay_problems()
    assert "delta.appendOnly" in problem.what


# --- columns --------------------------------------------------------------------------------------------------------


def test_new_columns_are_added_to_the_table_and_older_rows_have_none(lake, feed):
    apply(lake.sink, feed.next(3, 0, 0))
    wider = replace(feed, schema=SCHEMA)
    (*_, problem) = lake.sink.validate(wider.shape)
    assert "it is new" in problem.what and "auto_evolve" in problem.action
    sink = replace(lake.sink, auto_evolve=True)
    assert sink.validate(wider.shape) == []
    job = wider.next()
    apply(sink, job)
    apply(sink, replace(wider, schema=SMALL).next(1, 1, 1))
    found = pl.read_delta(str(lake.path)).sort("id")
    assert found["id"].to_list() == list(range(len(found))) and len(found) == 3 + len(job.ids) + 3
    assert found["place"].null_count() >= 6
    assert sink.validate(feed.shape) == [], "rows may lack columns of the table"


def test_columns_of_another_type_or_spelling_are_refused(lake, feed):
    apply(lake.sink, feed.next())
    schema = pa.schema([("id", pa.string()), ("NAME", pa.string()), ("ratio", pa.float64())])
    found = {p.where: p.what for p in lake.sink.validate(Shape("p", schema))}
    assert found.keys() == {"sink.path column `id`", "sink.path column `NAME`"}
    assert "found string; expected long" in found["sink.path column `id`"]


def test_a_column_that_takes_no_null_is_refused_unless_the_rows_have_none(lake):
    strict = pa.schema([pa.field("id", pa.int64(), nullable=False)])
    DeltaTable.create(str(lake.path), Schema.from_arrow(strict))
    (problem,) = lake.sink.validate(Shape("p", pa.schema([("id", pa.int64())])))
    assert "takes no null" in problem.what
    assert lake.sink.validate(Shape("p", strict)) == []


@pytest.mark.parametrize(
    ("properties", "said"),
    [
        ({"delta.enableDeletionVectors": "true"}, "eletionVectors"),
        ({"delta.setTransactionRetentionDuration": "interval 30 days"}, "forgets which windows"),
        ({"delta.columnMapping.mode": "name", "delta.minReaderVersion": "2", "delta.minWriterVersion": "5"}, "columnMapping"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_tables_with_unsupported_features_are_refused_before_anything_runs(lake, feed, properties, said):
    DeltaTable.create(str(lake.path), Schema.from_arrow(SMALL), configuration=properties, raise_if_key_not_exists=False)
    problems = [str(problem) for problem in lake.sink.validate(feed.shape)]
    assert problems and any(said in problem for problem in problems)
    assert problems == [str(problem) for problem in lake.sink.target_problems()]


def test_constraints_and_other_partitions_are_refused(lake, feed):
    DeltaTable.create(str(lake.path), Schema.from_arrow(SMALL), partition_by=["name"])
    DeltaTable(lake.path).alter.add_constraint({"positive": "id >= 0"})
    wheres = [p.where for p in lake.sink.validate(feed.shape)]
    assert wheres == [f"sink.path table {lake.sink.uri}", "sink.partition_by"]


def test_paths_that_are_no_table_are_refused(tmp_path, feed):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    for path in ("relative", "gs://bucket/table", "s3://bucket", "s3://user@bucket/table", "/", str(tmp_path / "full")):
        (problem,) = DeltaSink(path).validate(feed.shape)
        assert problem.where == "sink.path", path
    (problem,) = DeltaSink(str(tmp_path / "none"), auto_create=False).validate(feed.shape)
    assert "no Delta table" in problem.what
    assert TablePlace.parse("s3a://bucket/a/b/").uri == "s3://bucket/a/b"
    assert TablePlace.parse("file:///tmp/a%20b").path == "/tmp/a b"


# --- statistics -----------------------------------------------------------------------------------------------------


def test_statistics_bound_every_value_and_readers_skip_files_by_them(tmp_path):
    """Values are compared as readers compare them; a column without a sure bound has none."""
    case = DeltaCase(tmp_path / "lake" / "orders")
    feed = Feed(SCHEMA)
    jobs = [feed.next(60, 1, 11) for _ in range(2)]
    for job in jobs:
        apply(case.sink, job)
    bounded: set[str] = set()
    for line in pa.table(DeltaTable(case.path).get_add_actions(flatten=True)).to_pylist():
        rows = pl.read_parquet(case.path / line["path"])
        assert line["num_records"] == rows.height
        for name in SCHEMA.names:
            if f"null_count.{name}" in line and line[f"null_count.{name}"] is not None:
                assert line[f"null_count.{name}"] == rows[name].null_count(), name
            low, high = line.get(f"min.{name}"), line.get(f"max.{name}")
            values = [value for value in rows[name].to_list() if value is not None]
            if low is not None and values:
                bounded.add(name)
                assert low <= min(values) and max(values) <= high, name
    assert {"id", "name", "amount", "placed_at", "wall_clock", "day", "tiny", "small", "medium"} <= bounded
    assert not {"raw", "tags", "counts", "wide"} & bounded
    wanted = [line["id"] for job in jobs for line in job.expected if line["ratio"] is not None and not line["ratio"] <= 1e299]
    found = pl.scan_delta(str(case.path)).filter(pl.col("ratio") > 1e299).select("id").collect()["id"].to_list()
    assert Counter(found) == Counter(wanted), "NaN is greater than every number"


def test_long_texts_have_short_bounds(lake, feed):
    apply(lake.sink, feed.next(3, 0, 0, values=lambda i: row(i) | {"name": "ü" * 40 + str(i)}))
    log = [json.loads(line) for line in (lake.path / "_delta_log" / f"{1:020d}.json").read_text().splitlines()]
    (stats,) = [json.loads(entry["add"]["stats"]) for entry in log if "add" in entry]
    assert stats["minValues"]["name"] == "ü" * LONGEST_TEXT
    assert stats["maxValues"]["name"] == "ü" * LONGEST_TEXT + "\U0010ffff"


def test_the_transaction_is_the_pipelines(lake, feed):
    apply(lake.sink, feed.next())
    table: Any = DeltaTable(lake.path)
    assert PipelineVersion.unpack(table.transaction_version(app_id(feed.pipeline))).newest == 1
    assert table.transaction_version(app_id("another")) is None
