"""The Delta sink: other writers, maintenance of the table, replays, evolution, statistics, and refused tables and options."""

from __future__ import annotations

import datetime as dt
import json
import shutil
import urllib.parse
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet
import pytest
from deltalake import DeltaTable, Field, Schema, TableFeatures, write_deltalake
from deltalake.schema import PrimitiveType

from airflow_kafka_spark.errors import BadRecords, SinkUnavailable
from airflow_kafka_spark.sinks.base import Shape
from airflow_kafka_spark.sinks.delta.log import METADATA, PipelineVersion, make_app_id
from airflow_kafka_spark.sinks.delta.sink import DeltaSink
from airflow_kafka_spark.sinks.delta.tasks.data_files import LONGEST_TEXT, list_generated_columns
from airflow_kafka_spark.sinks.delta.validation import _FEATURES
from airflow_kafka_spark.sinks.storage.store import TableLocation
from airflow_kafka_spark.windows.codec import ranges_to_json
from tests.sinks.attempt import apply, write_all
from tests.sinks.delta.cases import MAPPED, DeltaCase, create_mapped_table, mapped_row, read_mapped_table
from tests.sinks.feed import SCHEMA, Feed, replayed, row, rows_of
from tests.sinks.oracle import same_multiset
from tests.sinks.postgres.kit import Pipeline, dead, write

SMALL = pa.schema([("id", pa.int64()), ("name", pa.string()), ("ratio", pa.float64())])


@pytest.fixture
def lake(tmp_path: Path) -> DeltaCase:
    found = DeltaCase(tmp_path / "lake" / "orders")
    found.schema = SMALL
    return found


@pytest.fixture
def feed() -> Feed:
    return Feed(SMALL)


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
    case.of_others(-1)
    DeltaTable(case.path).create_checkpoint()
    DeltaTable(case.path).cleanup_metadata()
    assert len(list(case.path.glob("_delta_log/*.json"))) < 3
    assert [case.sink.find_applied(job.window).number for job in jobs[:6]] == [1, 2, 3, 4, 5, 6]
    assert case.sink.find_last_applied(feed.pipeline).ranges == jobs[5].window.ranges
    apply(case.sink, jobs[6])
    assert Counter(case.ids()) == Counter([*(i for job in jobs for i in job.ids), -1])


def test_a_table_that_was_copied_without_its_records_has_them_in_its_history(lake, feed):
    jobs = [feed.next() for _ in range(3)]
    records = [apply(lake.sink, job) for job in jobs[:2]]
    shutil.rmtree(lake.path / "_airflow")
    assert lake.sink.find_last_applied(feed.pipeline) == records[1]
    assert [lake.sink.find_applied(job.window) for job in jobs] == [*records, None]
    apply(lake.sink, jobs[2])
    same_multiset([line for job in jobs for line in job.expected], lake.read())


def test_a_pipelines_version_grows_with_each_of_its_commits():
    version, seen = PipelineVersion.unpack(None), [-1]
    for number in (1, None, 1, 2, None, None, 10**9):
        version = version.make_next(number)
        assert PipelineVersion.unpack(int(version)) == version
        seen.append(int(version))
    assert seen == sorted(set(seen)) and seen[-1] < 1 << 63
    assert version.newest == 10**9
    with pytest.raises(OverflowError):
        PipelineVersion(1, (1 << 14) - 1, 0).make_next()


# --- replays --------------------------------------------------------------------------------------------------------


def test_a_table_that_only_takes_appends_says_so_before_a_replay_is_planned(lake, feed):
    sink = replace(lake.sink, table_properties={"delta.appendOnly": "true"})
    job = feed.next()
    apply(sink, job)
    assert sink.validate(feed.shape) == []
    (problem,) = sink.find_replay_problems()
    assert "delta.appendOnly" in problem.what


def test_a_property_that_no_table_is_created_with_is_found_before_the_window(lake, feed):
    sink = replace(lake.sink, table_properties={"delta.appendonly": "true", "delta.logRetentionDuration": "interval 7 days"})
    (problem,) = sink.validate(feed.shape)
    assert (problem.where, problem.what) == ("sink.table_properties", "deltalake knows no property `delta.appendonly`")
    # A table that exists is not created.
    apply(lake.sink, feed.next())
    assert sink.validate(feed.shape) == []


# --- columns --------------------------------------------------------------------------------------------------------


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
        ({"delta.columnMapping.mode": "id", "delta.minReaderVersion": "2", "delta.minWriterVersion": "5"}, "by their ids"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_tables_with_unsupported_features_are_refused_before_anything_runs(lake, feed, properties, said):
    DeltaTable.create(str(lake.path), Schema.from_arrow(SMALL), configuration=properties, raise_if_key_not_exists=False)
    problems = [str(problem) for problem in lake.sink.validate(feed.shape)]
    assert problems and any(said in problem for problem in problems)
    assert problems == [str(problem) for problem in lake.sink.find_target_problems()]


def create_table(path: Path, columns: Sequence[tuple[str, Any, str]], *features: str, writer: int = 2) -> None:
    """Write the first entry of the log of a table, as Spark does.

    :param columns: name, type in Delta's JSON, and Spark's declaration of a VARCHAR or CHAR ("" for other types).
    :param features: of readers and writers.
    :param writer: the version of writers of a table without features.
    """
    fields = [
        {"name": name, "type": kind, "nullable": True, "metadata": {"__CHAR_VARCHAR_TYPE_STRING": declared} if declared else {}}
        for name, kind, declared in columns
    ]
    protocol: dict[str, Any] = {"minReaderVersion": 1, "minWriterVersion": writer}
    if features:
        protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": [], "writerFeatures": list(features)}
        protocol["readerFeatures"] = [name for name in features if name in OF_READERS]
    form = {"id": "x", "format": {"provider": "parquet", "options": {}}, "partitionColumns": [], "configuration": {}}
    metadata = {**form, "schemaString": json.dumps({"type": "struct", "fields": fields})}
    (log := path / "_delta_log").mkdir(parents=True)
    (log / f"{0:020d}.json").write_text("\n".join(map(json.dumps, [{"protocol": protocol}, {"metaData": metadata}])))


OF_READERS = {
    "columnMapping",
    "timestampNtz",
    "vacuumProtocolCheck",
    "v2Checkpoint",
    "typeWidening",
    "variantType",
    "catalogManaged",
}
OF_SPARK = {
    "allowColumnDefaults", "catalogManaged", "checkpointProtection", "clustering", "domainMetadata", "icebergCompatV1",
    "identityColumns", "inCommitTimestamp", "materializePartitionColumns", "rowTracking", "typeWidening", "v2Checkpoint",
    "vacuumProtocolCheck", "variantType",
}  # fmt: skip


@pytest.mark.parametrize("feature", sorted(_FEATURES | OF_SPARK))
def test_a_table_with_a_feature_is_written_or_refused_by_its_name_before_anything_runs(tmp_path, feature):
    create_table(path := tmp_path / "t", [("id", "long", ""), ("name", "string", "")], feature)
    sink, job = DeltaSink(str(path)), (feed := Feed(SMALL.remove(2))).next(2, 1, 0)
    problems = sink.validate(feed.shape)
    assert all(f"`{feature}`" in problem.what for problem in problems) and bool(problems) == (feature in OF_SPARK)
    if not problems:
        assert apply(sink, job).written == len(job.ids)


def test_versions_of_writers_that_have_features_without_naming_them(tmp_path):
    for writer in range(2, 7):
        create_table(path := tmp_path / f"t{writer}", [("id", "long", ""), ("name", "string", "")], writer=writer)
        sink, job = DeltaSink(str(path)), (feed := Feed(SMALL.remove(2))).next(2, 1, 0)
        said = " ".join(problem.what for problem in sink.validate(feed.shape))
        assert ("identityColumns" in said) == (writer == 6)
        if not said:
            assert apply(sink, job).written == len(job.ids)


STRICT = [
    ({"type": "struct", "fields": [{"name": "a", "type": "long", "nullable": False, "metadata": {}}]}, pa.struct, "c.a"),
    ({"type": "array", "elementType": "long", "containsNull": False}, lambda f: pa.list_(f[0].with_name("element")), "c.element"),
    (
        {"type": "map", "keyType": "string", "valueType": "long", "valueContainsNull": False},
        lambda f: pa.map_(pa.string(), f[0].with_name("value")),
        "c.value",
    ),
]


@pytest.mark.parametrize(("kind", "make", "where"), STRICT, ids=[where for *_, where in STRICT])
def test_members_that_take_no_null_are_refused_unless_the_rows_have_none(tmp_path, kind, make, where):
    """A structure of the rows may be null as a whole, and files then have a null of each member."""
    create_table(path := tmp_path / "t", [("id", "long", ""), ("c", kind, "")])
    for nullable in (True, False):
        shape = Shape("p", pa.schema([("id", pa.int64()), ("c", make([pa.field("a", pa.int64(), nullable)]))]))
        found = [problem.where for problem in DeltaSink(str(path)).validate(shape)]
        assert found == ([f"sink.path column `{where}`"] if nullable or where == "c.a" else [])


@pytest.mark.parametrize("mode", [{}, {"mode": "upsert", "key": ["id"]}], ids=["append", "upsert"])
def test_texts_that_are_too_long_for_a_varchar_are_bad_records(tmp_path, mode):
    """Spark checks the length of each text that it writes, also when it rewrites a file with texts of others."""
    create_table(path := tmp_path / "t", [("id", "long", ""), ("name", "string", "varchar(3)")])
    sink, pipeline = DeltaSink(str(path), **mode), Pipeline(SMALL.remove(2))
    lines = [{"id": 1, "name": "äöü"}, {"id": 2, "name": "abcd"}, {"id": 3, "name": None}]
    with pytest.raises(BadRecords, match="`name` has 4 characters; the table's column takes 3"):
        write(sink, pipeline, lines)
    assert write(sink, Pipeline(SMALL.remove(2), "next"), [lines[0], lines[2]]).written == 2
    create_table(path := tmp_path / "w", [("id", "long", ""), ("name", "string", "varchar(3)"), ("at", "string", "varchar(99)")])
    named = replace(sink, path=str(path), window_column="at")
    assert write(named, Pipeline(SMALL.remove(2), "named"), [lines[0]]).written == 1
    create_table(path := tmp_path / "nested", [("id", "long", ""), ("c", STRICT[0][0], "struct<a:varchar(3)>")])
    (problem,) = DeltaSink(str(path)).find_target_problems()
    assert "column `c` is struct<a:varchar(3)>" in problem.what


def test_constraints_and_other_partitions_are_refused(lake, feed):
    DeltaTable.create(str(lake.path), Schema.from_arrow(SMALL), partition_by=["name"])
    DeltaTable(lake.path).alter.add_constraint({"positive": "id >= 0"})
    wheres = [p.where for p in lake.sink.validate(feed.shape)]
    assert wheres == [f"sink.path table {lake.sink.uri}", "sink.partition_by"]


def _overwrite(path: Path, partition_by: str | None = None, **columns: Any) -> None:
    write_deltalake(path, pa.table(columns), mode="overwrite", schema_mode="overwrite", partition_by=partition_by)


CHANGES: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: DeltaTable(path).alter.add_constraint({"positive": "id >= 0"}), "constraints .*positive"),
    (lambda path: DeltaTable(path).alter.add_feature(TableFeatures.DeletionVectors, True), "`deletionVectors`"),
    (lambda path: _overwrite(path, "name", id=pa.array([1]), name=pa.array(["a"]), ratio=pa.array([1.0])), "by name"),
    (lambda path: _overwrite(path, id=pa.array([1]), name=pa.array([1.0]), ratio=pa.array([1.0])), "`name` is ano"),
    (lambda path: _overwrite(path, id=pa.array([1]), ratio=pa.array([1.0])), "`name` is another one"),
    (lambda path: DeltaTable(path).alter.add_columns([Field("more", PrimitiveType("string"))]), ""),
    (lambda path: DeltaTable(path).alter.set_table_properties({"delta.logRetentionDuration": "interval 3 days"}), ""),
]


@pytest.mark.parametrize(("change", "said"), CHANGES, ids=range(len(CHANGES)))
def test_files_that_were_written_for_a_table_that_others_have_changed_meanwhile_are_not_committed(lake, feed, change, said):
    """A file without the partition value that the table has now would have a null there, and rows that break a constraint."""
    first, job = feed.next(2, 0, 0), feed.next(3, 0, 0)
    apply(lake.sink, first)
    with lake.sink.begin(job.window, job.splits, job.shape) as writer:
        results = write_all(writer, job)
        change(lake.path)
        if not said:
            assert writer.commit(results).number == 2
            return
        with pytest.raises(SinkUnavailable, match=f"others have changed the table while the window was written: .*{said}"):
            writer.commit(results)
    assert lake.sink.find_last_applied(feed.pipeline).number == 1 and lake.leftovers() == []
    assert lake.sink.validate(feed.shape), "the next attempt is refused before it begins"


def test_an_attempt_does_not_commit_to_a_table_that_others_create_again_meanwhile(lake, feed):
    apply(lake.sink, feed.next(2, 0, 0))
    job = feed.next(3, 0, 0)
    with lake.sink.begin(job.window, job.splits, job.shape) as writer:
        results = write_all(writer, job)
        shutil.rmtree(lake.path)
        write_deltalake(lake.path, rows_of(SMALL, [row(1)], (0,)).batch)
        with pytest.raises(SinkUnavailable, match="dropped and created again"):
            writer.commit(results)
    apply(lake.sink, job)
    assert Counter(lake.ids()) == Counter([1, *job.ids])


def test_an_upsert_of_a_shallow_clone_is_refused_and_an_append_is_not(lake, feed, tmp_path):
    """Its log names files of another table by their URIs."""
    write_deltalake(tmp_path / "origin", rows_of(SMALL, [row(1)], (0,)).batch)
    (found,) = (tmp_path / "origin").glob("*.parquet")
    create_table(lake.path, [("id", "long", ""), ("name", "string", ""), ("ratio", "double", "")])
    add = {"path": found.as_uri(), "partitionValues": {}, "size": found.stat().st_size, "modificationTime": 1, "dataChange": True}
    (lake.path / "_delta_log" / f"{1:020d}.json").write_text(json.dumps({"add": add}))
    (problem,) = replace(lake.sink, mode="upsert", key=["id"]).find_target_problems()
    assert "shallow clone" in problem.what and lake.sink.validate(feed.shape) == []
    apply(replace(lake.sink, optimize=1), job := feed.next(3, 0, 0))
    # deltalake itself does not read it; Spark does.
    paths = pa.table(DeltaTable(lake.path).get_add_actions())["path"].to_pylist()
    assert sum(path == found.as_uri() for path in paths) == 1 and len(paths) == 1 + sum(rows != [] for rows in job.rows.values())


def test_paths_that_are_no_table_are_refused(tmp_path, feed):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("x")
    misread = ("/lake/a%41", "s3://bucket/a%20b", "/lake/a[1]", "/lake/a\\b", "/lake/a\tb")
    for path in ("relative", "gs://bucket/table", "s3://bucket", "s3://user@bucket/table", "/", str(tmp_path / "full"), *misread):
        (problem,) = DeltaSink(path).validate(feed.shape)
        assert problem.where == "sink.path", path
    (problem,) = DeltaSink(str(tmp_path / "none"), auto_create=False).validate(feed.shape)
    assert "no Delta table" in problem.what
    assert TableLocation.parse("s3a://bucket/a/b/").uri == "s3://bucket/a/b"
    assert TableLocation.parse("file:///tmp/a%20b").path == "/tmp/a b"
    column = {"name": "id", "type": "long", "nullable": True, "metadata": {}}
    schema = json.dumps({"type": "struct", "fields": [column]})
    table = {"schemaString": schema, "partitionColumns": [], "configuration": {}, "id": "x"}
    first = [{"protocol": {"minReaderVersion": 4, "minWriterVersion": 8}}]
    first.append({"metaData": {**table, "format": {"provider": "parquet", "options": {}}}})
    (log := tmp_path / "newer" / "_delta_log").mkdir(parents=True)
    (log / f"{0:020d}.json").write_text("\n".join(map(json.dumps, first)))
    (problem,) = DeltaSink(str(tmp_path / "newer")).validate(feed.shape)
    assert "Unsupported minimum reader version 4" in problem.what and not problem.retryable
    assert problem.action.startswith("Upgrade `deltalake` on the Airflow worker")


# --- column mapping, generated columns ------------------------------------------------------------------------------


def test_a_table_with_column_mapping_and_generated_columns_gets_each_row_once(tmp_path):
    """Spark reads such a table in ``lake/test_readers.py``."""
    path = tmp_path / "orders"
    create_mapped_table(path)
    sink, feed = DeltaSink(str(path), partition_by=["day"]), Feed(MAPPED)
    assert sink.validate(feed.shape) == []
    jobs = [feed.next(20, 5, 9, values=mapped_row) for _ in range(3)]
    for job in jobs:
        apply(sink, job)
    same_multiset([line for job in jobs for line in job.expected], read_mapped_table(path))
    lines = pa.table(DeltaTable(path).get_add_actions(flatten=True)).to_pylist()
    days = {line["placed_at"] and line["placed_at"].date() for job in jobs for line in job.expected}
    assert {line["partition.day"] for line in lines} == days
    assert all(line["min.col-1"] is not None and line["null_count.col-4.col-6"] is not None for line in lines)
    file = pa.parquet.ParquetFile(path / urllib.parse.unquote(lines[0]["path"]))
    assert file.schema_arrow.field("col-4").type.field("col-6").metadata[b"PARQUET:field_id"] == b"6"
    again = replayed(jobs[1], first=5)
    apply(sink, again)
    expected = [line for job in (jobs[0], again, jobs[2]) for line in job.expected]
    same_multiset(expected, read_mapped_table(path))
    # An upsert reads the files, and writes them anew.
    upsert = replace(sink, mode="upsert", key=["id"], delete_enabled=True)
    pipeline = Pipeline(MAPPED, "upserts", tombstones=True)
    assert upsert.validate(pipeline.shape) == []
    first, second = expected[0], expected[1]
    changed = {**first, "full name": "new", "placed_at": None}
    applied = write(upsert, pipeline, [changed, dead(second["id"])])
    assert (applied.written, applied.deleted) == (1, 1)
    same_multiset([changed, *expected[2:]], read_mapped_table(path))
    initials = Counter()
    for line in pa.table(DeltaTable(path).get_add_actions(flatten=True)).to_pylist():
        names = pa.parquet.read_table(path / urllib.parse.unquote(line["path"]), columns=["col-2", "col-10"], partitioning=None)
        initials.update((name and name[:1]) == initial for name, initial in zip(*names.to_pydict().values(), strict=True))
    assert initials == {True: len(expected) - 1}
    DeltaTable(path).create_checkpoint()
    apply(replace(sink, optimize=4), last := feed.next(1, 0, 0, values=mapped_row))
    assert sink.find_last_applied(feed.pipeline).number == 4
    same_multiset([changed, *expected[2:], *last.expected], read_mapped_table(path))
    found = Counter(line["partition.day"] for line in pa.table(DeltaTable(path).get_add_actions(flatten=True)).to_pylist())
    assert set(found.values()) == {1}, "compacted"


def test_generated_columns_that_tasks_cannot_compute_and_changes_that_column_mapping_forbids_are_refused(tmp_path):
    path = tmp_path / "orders"
    create_mapped_table(path)
    sink = DeltaSink(str(path), partition_by=["day"])
    (given,) = sink.validate(Shape("p", MAPPED.append(pa.field("day", pa.date32()))))
    assert given.where == "schema" and "`day`" in given.what
    (missing,) = sink.validate(Shape("p", MAPPED.remove(2)))
    assert missing.where == "sink.path column `placed_at`" and "computes `day` from it" in missing.what
    wider = Shape("p", MAPPED.append(pa.field("more", pa.int64())))
    (problem,) = replace(sink, auto_evolve=True).validate(wider)
    assert problem.where == "sink.auto_evolve" and "`more`" in problem.what
    with pytest.raises(SinkUnavailable, match="column mapping"):
        apply(replace(sink, auto_evolve=True), Feed(wider.schema).next(1, 0, 0, values=lambda i: {**mapped_row(i), "more": i}))
    entry = path / "_delta_log" / f"{0:020d}.json"
    entry.write_text(entry.read_text().replace("CAST(placed_at AS DATE)", "CAST(placed_at + INTERVAL 1 DAY AS DATE)"))
    (problem,) = sink.find_target_problems()
    assert "cannot compute" in problem.what and "expected CAST(x AS DATE)" in problem.what
    with pytest.raises(SinkUnavailable, match="not understood"):
        apply(sink, Feed(MAPPED).next(1, 0, 0, values=mapped_row))


_AT = [dt.datetime(1969, 12, 31, 23, 59, 59, 999_999), dt.datetime(1, 1, 3, 4), dt.datetime(1582, 10, 10, 5), None]


@pytest.mark.parametrize(
    ("kind", "expression", "expected"),
    [
        (pa.date32(), "CAST(at AS DATE)", [dt.date(1969, 12, 31), dt.date(1, 1, 3), dt.date(1582, 10, 10), None]),
        (pa.date32(), "date(`At`)", [dt.date(1969, 12, 31), dt.date(1, 1, 3), dt.date(1582, 10, 10), None]),
        (pa.int32(), "YEAR(at)", [1969, 1, 1582, None]),
        (pa.int32(), "month( at )", [12, 1, 10, None]),
        (pa.int32(), "DAY(at)", [31, 3, 10, None]),
        (pa.int32(), "HOUR(at)", [23, 4, 5, None]),
        (pa.string(), "DATE_FORMAT(at, 'yyyy-MM-dd-HH')", ["1969-12-31-23", "0001-01-03-04", "1582-10-10-05", None]),
        (pa.string(), "SUBSTRING(text, 0, 2)", ["äb", "", "🎉🎉", None]),
        (pa.string(), "SUBSTR(text, 2, 2)", ["bc", "", "🎉", None]),
    ],
    ids=str,
)
@pytest.mark.parametrize("zone", ["UTC", None])
def test_generated_columns_have_the_values_of_their_expressions(kind, expression, expected, zone):
    at = pa.array([one and (one.replace(tzinfo=dt.timezone.utc) if zone else one) for one in _AT], pa.timestamp("us", zone))
    batch = pa.RecordBatch.from_pydict({"at": at, "text": ["äbc", "", "🎉🎉", None]})
    made = pa.field("made", kind, metadata={"delta.generationExpression": expression})
    (column,) = list_generated_columns(pa.schema([*batch.schema, made]))
    assert column.compute(batch).to_pylist() == expected and column.compute(batch).type == kind


@pytest.mark.parametrize(
    "expression", ["at", "YEAR(text)", "DATE_FORMAT(at, 'YYYY')", "id * 2", "YEAR(nobody)", "SUBSTRING(text, -1, 2)"]
)
def test_generated_columns_of_other_expressions_are_not_understood(expression):
    made = pa.field("made", pa.string(), metadata={"delta.generationExpression": expression})
    with pytest.raises(ValueError, match="is not understood; expected CAST"):
        list(list_generated_columns(pa.schema([("at", pa.timestamp("us", "UTC")), ("text", pa.string()), made])))


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
    assert PipelineVersion.unpack(table.transaction_version(make_app_id(feed.pipeline))).newest == 1
    assert table.transaction_version(make_app_id("another")) is None


def test_an_upsert_finds_partition_values_of_all_kinds_and_polars_reads_them_from_the_names_of_directories(tmp_path):
    schema = pa.schema(
        [("id", pa.int64()), ("p", pa.string()), ("d", pa.decimal128(6, 2)), ("b", pa.bool_()), ("v", pa.string())]
    )
    lake = DeltaCase(tmp_path / "lake" / "orders", mode="upsert", key=["id"], partition_by=["p", "d", "b"])
    texts = ["a/b", "a b%20c", "=", "é" * 30, None, "x\ny", "~", "'\"", "\x01", ".."]
    amounts = [Decimal("-1.50"), None, Decimal("-0.05"), Decimal("3.00")]
    rows = [{"id": i, "p": text, "d": amounts[i % 4], "b": i % 2 == 0, "v": "old"} for i, text in enumerate(texts)]
    pipeline = Pipeline(schema)
    write(lake.sink, pipeline, rows)
    assert write(lake.sink, pipeline, [{**row, "v": "new"} for row in rows]).written == len(rows)
    expected = [{**row, "v": "new"} for row in rows]
    assert pl.read_delta(str(lake.path)).select(schema.names).sort("id").to_dicts() == expected
    assert lake.leftovers() == []
    # The value is too long for the name of a directory; readers of the log get it.
    write(lake.sink, pipeline, [{"id": 0, "p": "x" * 300, "d": None, "b": None, "v": "long"}])
    assert len([name for name in lake.files() if name.count("/") == 1]) == 1
