"""The Iceberg sink: other writers, maintenance of the table, replays, evolution, partitions, branches, and refusals."""

from __future__ import annotations

import datetime as dt
import json
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet
import pytest
from pyiceberg.expressions import EqualTo, GreaterThanOrEqual
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.sorting import NullOrder, SortDirection
from pyiceberg.transforms import (
    BucketTransform,
    DayTransform,
    HourTransform,
    IdentityTransform,
    MonthTransform,
    TruncateTransform,
    YearTransform,
)
from pyiceberg.types import (
    BinaryType,
    DateType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    TimestampType,
    TimestamptzType,
    TimeType,
    UUIDType,
)

from airflow_kafka_spark.errors import SinkUnavailable, WindowConflict
from airflow_kafka_spark.hooks.databases import SESSION_ENDED
from airflow_kafka_spark.sinks.base import Shape
from airflow_kafka_spark.sinks.delta.sink import DeltaSink
from airflow_kafka_spark.sinks.iceberg.catalog import find_catalog_access
from airflow_kafka_spark.sinks.iceberg.hooks import IcebergHook
from airflow_kafka_spark.sinks.iceberg.sink import IcebergSink
from airflow_kafka_spark.sinks.iceberg.snapshots import PIPELINE, WINDOW, make_tag_name
from airflow_kafka_spark.sinks.iceberg.table import PartitionField, make_file_columns
from airflow_kafka_spark.sinks.iceberg.tasks.data_files import apply_transform, collect_file_statistics
from airflow_kafka_spark.sinks.iceberg.tasks.table_files import make_column_metrics
from airflow_kafka_spark.windows.binding import compare_endpoints, compare_locations
from airflow_kafka_spark.windows.codec import ranges_to_json
from airflow_kafka_spark.windows.interval import Interval
from airflow_kafka_spark.windows.model import ELSEWHERE, Window
from tests.sinks.attempt import Victim, apply, write_all
from tests.sinks.feed import INSTANTS, SCHEMA, TEXTS, Feed, replayed, row
from tests.sinks.iceberg.cases import NAME, IcebergCase
from tests.sinks.iceberg.catalogs import LockedFile, LostAnswers, LostRequests, RestServer
from tests.sinks.oracle import same_multiset
from tests.sinks.postgres.kit import Pipeline, write
from tests.support.distribution import extended

SMALL = pa.schema([("id", pa.int64()), ("name", pa.string()), ("ratio", pa.float64())])


@pytest.fixture
def lake(tmp_path: Path) -> IcebergCase:
    found = IcebergCase(tmp_path / "lake")
    found.schema = SMALL
    return found


@pytest.fixture
def feed() -> Feed:
    return Feed(SMALL)


def current(lake: IcebergCase) -> Table:
    found = lake.table()
    assert found is not None
    return found


# --- other writers --------------------------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("noted", [True, False], ids=["as it was", "a part of its marker is gone"])
def test_files_of_a_window_stay_though_its_attempt_was_not_cleaned_up_before_its_snapshot_expired(lake, feed, tmp_path, noted):
    first, job = feed.next(), feed.next()
    apply(lake.sink, first)
    with Victim(lake.sink, job, "sink.committed", tmp_path / "victim") as victim:
        assert victim.died()
    with lake.catalog() as catalog:
        catalog.load_table(NAME).manage_snapshots().remove_tag(make_tag_name(feed.pipeline)).commit()
    lake.of_others(-1)
    lake.expire()
    assert len(current(lake).snapshots()) == 1
    (marker,) = lake.path.glob("warehouse/shop/orders/_airflow/attempts/*/attempt.json")
    if not noted:
        marker.unlink()
    with lake.sink.begin(job.window, job.splits, job.shape):
        pass
    assert Counter(lake.ids()) == Counter([*first.ids, *job.ids, -1])
    assert not list(lake.path.glob("warehouse/shop/orders/_airflow/attempts/*"))


def test_an_interval_that_is_still_open_when_its_tag_has_expired_is_known_by_its_files(lake, feed):
    """The attempt died between the commit and the close, and was not repeated for 90 days."""
    job, unmoved = (replace(found, window=_make_open(found.window)) for found in (feed.next(), feed.next()))
    assert lake.sink.find_applied(job.window) is None, "there is no table"
    apply(lake.sink, job)
    lake.of_others(-1)
    assert lake.sink.find_applied(unmoved.window) is None, "all snapshots are there"
    assert (lake.sink.has_lost(job.window), lake.sink.has_lost(unmoved.window)) == (False, True)
    with lake.catalog() as catalog:
        catalog.load_table(NAME).manage_snapshots().remove_tag(make_tag_name(job.window.pipeline)).commit()
    lake.expire()
    assert not lake.sink.has_lost(unmoved.window), "its record may have expired"
    found = lake.sink.find_applied(job.window)
    assert found is not None and (found.written, found.ranges) == (len(job.ids), job.window.ranges)
    recent = dt.datetime.now(dt.timezone.utc).isoformat()
    again = lake.sink.find_applied(replace(job.window, planned_at=recent))
    assert again is not None and again.written == len(job.ids), "`forget` has removed its interval, and its DAG run was cleared"
    lake.maintain()
    for window in (job.window, unmoved.window):
        with pytest.raises(WindowConflict, match="the snapshots since then have expired.*rebind <pipeline> --not-running"):
            lake.sink.find_applied(window)
        assert lake.sink.find_applied(replace(window, after=ELSEWHERE)) is None
    assert lake.sink.find_applied(replace(unmoved.window, planned_at=recent)) is None


def _make_open(window: Window) -> Window:
    """Return a window as that of a data interval that was planned long ago."""
    planned = dt.datetime.now(dt.timezone.utc) - dt.timedelta(days=100)
    interval = Interval(planned - dt.timedelta(hours=1), planned)
    bounds, name = (interval.start_ms, interval.end_ms), interval.make_ledger_name(f"p{window.number}")
    return replace(window, pipeline=name, interval=bounds, planned_at=planned.isoformat())


@pytest.mark.parametrize("catalog", [LostAnswers, LostRequests, LockedFile])
def test_a_commit_whose_answer_was_lost_is_looked_up_and_not_repeated(lake, feed, monkeypatch, catalog):
    first, job = feed.next(), feed.next()
    apply(lake.sink, first)
    options = {name: value for name, value in lake.options.items() if name != "type"}
    lake.connect(**options, **{"py-catalog-impl": f"{catalog.__module__}.{catalog.__name__}"})
    monkeypatch.setattr(catalog, "lost", 1)
    assert apply(lake.sink, job).written == len(job.ids)
    assert catalog.lost == 0
    same_multiset(first.expected + job.expected, lake.read())
    assert lake.leftovers() == []


def test_manifests_of_a_commit_that_fails_while_it_is_prepared_are_removed(lake, feed, monkeypatch):
    apply(lake.sink, feed.next())
    job = feed.next()

    def fail(*_args, **_options):
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        # The manifest list is written behind the manifests that it names.
        patched.setattr("pyiceberg.table.update.snapshot.write_manifest_list", fail)
        with pytest.raises(SinkUnavailable, match="no space left"):
            apply(lake.sink, job)
    assert lake.leftovers() == []
    assert apply(lake.sink, job).ranges == job.window.ranges
    assert lake.leftovers() == []


@pytest.fixture
def rest(lake: IcebergCase) -> Iterator[RestServer]:
    """Let the sink reach the case's catalog by HTTP only."""
    with RestServer(dict(lake.options)) as server:
        lake.connect(type="rest", uri=f"http://127.0.0.1:{server.server_port}")
        yield server


def test_a_rest_catalog_that_fails_at_every_request_in_turn_loses_and_doubles_nothing(lake, feed, rest):
    jobs = [feed.next(2, 1, 0) for _ in range(2)]
    assert lake.sink.validate(feed.shape) == []
    apply(lake.sink, jobs[0])
    rest.lose(None)
    apply(lake.sink, jobs[1])
    count, failed = rest.requests, 0
    assert count > 5
    for number in range(count):
        for handled in (False, True):
            jobs.append(feed.next(1, 1, 0))
            rest.lose(number, handled)
            try:
                apply(lake.sink, jobs[-1])
            except SinkUnavailable as error:
                failed += 1
                assert "503" in str(error) or "try again" in str(error)
                apply(lake.sink, jobs[-1])
            assert rest.requests > number
            assert Counter(lake.ids()) == Counter(i for job in jobs for i in job.ids), (number, handled)
    assert failed > count
    rest.lose(None)
    jobs.append(feed.next(1, 0, 0))
    apply(lake.sink, jobs[-1])
    same_multiset([line for job in jobs for line in job.expected], lake.read())
    assert lake.leftovers() == [], "what could not be removed behind a commit, the next attempt has removed"


def test_two_attempts_at_a_rest_catalog_commit_one_window(lake, feed, rest, tmp_path):
    first, job = feed.next(), feed.next()
    apply(lake.sink, first)
    with Victim(lake.sink, job, "sink.in_transaction:stop", tmp_path / "zombie") as zombie:
        assert zombie.stopped()
        lake.of_others(-1)
        apply(lake.sink, job)
        zombie.wake()
    assert Counter(lake.ids()) == Counter([*first.ids, *job.ids, -1])
    assert lake.leftovers() == []


def test_a_partition_spec_that_others_change_meanwhile_makes_the_next_attempt_write_for_it(lake, feed):
    first, job = feed.next(), feed.next()
    apply(lake.sink, first)
    with lake.sink.begin(job.window, job.splits, job.shape) as writer:
        results = write_all(writer, job)
        with lake.catalog() as catalog, catalog.load_table(NAME).update_spec() as update:
            update.add_field("id", BucketTransform(2), "shard")
        with pytest.raises(SinkUnavailable, match="partition spec"):
            writer.commit(results)
    apply(lake.sink, job)
    same_multiset(first.expected + job.expected, lake.read())
    assert current(lake).inspect.partitions().num_rows == 3


def test_a_table_that_others_create_again_meanwhile_gets_no_files_with_the_ids_of_the_old_columns(lake, feed):
    """The window is the first of its pipeline, as each data interval is: there is no tag that would have moved."""
    job = feed.next()
    with lake.sink.begin(job.window, job.splits, job.shape) as writer:
        results = write_all(writer, job)
        with lake.catalog() as catalog:
            columns = reversed(catalog.load_table(NAME).schema().as_arrow())
            catalog.purge_table(NAME)
            catalog.create_table(NAME, pa.schema([field.remove_metadata() for field in columns]))
        lake.of_others(-1)
        with pytest.raises(SinkUnavailable, match="dropped and created again"):
            writer.commit(results)
    assert lake.ids() == [-1]
    apply(lake.sink, job)
    same_multiset([*job.expected, {"id": -1, "name": None, "ratio": None}], lake.read())
    assert lake.leftovers() == []


# --- what the table remembers ---------------------------------------------------------------------------------------


def test_the_snapshot_holds_the_window_and_the_pipelines_tag_names_it(lake, feed):
    job = feed.next()
    apply(lake.sink, job)
    table, window = current(lake), job.window
    summary = table.current_snapshot().summary.additional_properties
    assert summary[PIPELINE] == window.pipeline
    found = json.loads(summary[WINDOW])
    assert (found["number"], found["rows"], found["ranges"]) == (1, len(job.ids), ranges_to_json(window.ranges))
    assert (found["cluster_id"], found["topic_ids"]) == (window.cluster_id, dict(window.topic_ids))
    tag = table.refs()[make_tag_name(window.pipeline)]
    assert (tag.snapshot_id, tag.snapshot_ref_type) == (table.current_snapshot().snapshot_id, "tag")
    assert tag.max_ref_age_ms == 2**63 - 1, "no property of the table lets it expire"
    assert summary["added-records"] == str(len(job.ids)) == summary["total-records"]


def test_the_last_window_is_remembered_when_its_snapshot_is_old_and_when_its_tag_is_gone(lake, feed):
    jobs = [feed.next(2, 1, 0) for _ in range(4)]
    for job in jobs[:3]:
        apply(lake.sink, job)
    with lake.catalog() as catalog:
        catalog.load_table(NAME).manage_snapshots().remove_tag(make_tag_name(feed.pipeline)).commit()
    assert lake.sink.find_last_applied(feed.pipeline).number == 3
    apply(lake.sink, jobs[3])
    lake.of_others(-1)
    lake.expire()
    assert len(current(lake).snapshots()) == 2
    assert [lake.sink.find_applied(job.window) is not None for job in jobs] == [False, False, False, True]
    assert lake.sink.find_last_applied(feed.pipeline).ranges == jobs[3].window.ranges
    with pytest.raises(WindowConflict, match="expired"):
        apply(lake.sink, replayed(jobs[1]))
    apply(lake.sink, feed.next(1, 0, 0))
    assert len(lake.ids()) == 4 * 3 + 1 + 1


def test_no_snapshot_is_older_than_the_one_before_whatever_the_clocks_of_two_writers_say(lake, feed, monkeypatch):
    """Java's readers refuse such a table: "Expected sorted snapshot log entries"."""
    apply(lake.sink, feed.next(1, 0, 0))
    now = time.time
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time", lambda: now() + 3600)
        lake.of_others(-1)
    apply(lake.sink, feed.next(1, 0, 0))
    metadata = current(lake).metadata
    times = [entry.timestamp_ms for entry in metadata.snapshot_log]
    assert times == sorted(times) and times[-1] > (now() + 3000) * 1000
    assert metadata.last_updated_ms >= times[-1]


def test_manifests_of_many_windows_are_merged(lake, feed):
    jobs = [feed.next(1, 0, 0) for _ in range(6)]
    with lake.catalog() as catalog:
        apply(lake.sink, jobs[0])
        with catalog.load_table(NAME).transaction() as change:
            change.set_properties({"commit.manifest.min-count-to-merge": "3"})
    for job in jobs[1:]:
        apply(lake.sink, job)
    table = current(lake)
    assert len(table.current_snapshot().manifests(table.io)) < 4
    assert lake.leftovers() == [], "a manifest that was merged at once is removed"
    assert Counter(lake.ids()) == Counter(i for job in jobs for i in job.ids)
    again = replayed(jobs[1])
    apply(lake.sink, again)
    assert Counter(lake.ids()) == Counter(i for job in jobs for i in job.ids)


# --- replays --------------------------------------------------------------------------------------------------------


def test_a_replay_of_an_interval_whose_tag_was_dropped_is_refused_and_would_be_there_twice(lake, feed):
    """Tags of intervals may be dropped, as the documentation advises; then their snapshots expire."""
    job = feed.next()
    again = replayed(job)
    assert "no record" in lake.sink.find_window_replay_problems(again.window)[0].what, "there is no table yet"
    apply(lake.sink, job)
    with lake.catalog() as catalog:
        catalog.load_table(NAME).manage_snapshots().remove_tag(make_tag_name(feed.pipeline)).commit()
    lake.of_others(-1)
    assert lake.sink.find_window_replay_problems(again.window) == [], "its snapshot is still there"
    lake.expire()
    (problem,) = lake.sink.find_window_replay_problems(again.window)
    assert problem.where == "on_rerun" and "no record" in problem.what
    apply(lake.sink, again)
    assert Counter(lake.ids()) == Counter([*job.ids, *again.ids, -1]), "the sink alone cannot know better"
    assert lake.sink.find_window_replay_problems(again.window) == [], "this replay is there"


# --- columns --------------------------------------------------------------------------------------------------------


def test_a_column_that_others_have_renamed_or_widened_still_gets_its_values(lake, feed):
    narrow = pa.schema([("id", pa.int32()), ("name", pa.string()), ("ratio", pa.float32())])
    feed = Feed(narrow)
    few = {"values": lambda i: {**row(i), "ratio": float(i)}}
    first, second = feed.next(4, 0, 0, **few), feed.next(3, 0, 1, **few)
    apply(lake.sink, first)
    with lake.catalog() as catalog, catalog.load_table(NAME).update_schema() as update:
        update.rename_column("name", "full_name")
        update.update_column("id", LongType())
        update.update_column("ratio", DoubleType())
        update.add_column("note", StringType())
    assert lake.sink.validate(feed.shape) == []
    apply(lake.sink, second)
    found = current(lake).scan().to_arrow().to_pylist()
    expected = [line["name"] for line in first.expected + second.expected]
    assert Counter(line["full_name"] for line in found) == Counter(expected)
    assert sorted(line["ratio"] for line in found) == [float(i) for i in range(8)]
    # A column that takes the old name is another one.
    with lake.catalog() as catalog, catalog.load_table(NAME).update_schema() as update:
        update.add_column("name", StringType())
    apply(lake.sink, third := feed.next(1, 0, 0, **few))
    (line,) = current(lake).scan(EqualTo("id", third.ids[0])).to_arrow().to_pylist()
    assert (line["name"], line["full_name"]) == (third.expected[0]["name"], None)
    fourth = feed.next(1, 0, 0, **few)
    with lake.sink.begin(fourth.window, fourth.splits, fourth.shape) as writer:
        results = write_all(writer, fourth)
        with lake.catalog() as catalog:
            with catalog.load_table(NAME).update_schema(allow_incompatible_changes=True) as update:
                update.delete_column("name")
            with catalog.load_table(NAME).update_schema() as update:
                update.add_column("name", StringType())
        with pytest.raises(SinkUnavailable, match="column `name` is another one"):
            writer.commit(results)
    apply(lake.sink, fourth)
    (line,) = current(lake).scan(EqualTo("id", fourth.ids[0])).to_arrow().to_pylist()
    assert line["name"] == fourth.expected[0]["name"]


def test_columns_that_do_not_fit_are_refused_all_at_once(lake):
    columns = [
        NestedField(1, "id", IntegerType(), required=True),
        NestedField(2, "NAME", StringType()),
        NestedField(3, "ratio", StringType()),
        NestedField(4, "amount", DecimalType(10, 2)),
    ]
    with lake.catalog() as catalog:
        catalog.create_namespace("shop")
        catalog.create_table(NAME, Schema(*columns))
    shape = Shape("p", SMALL.append(pa.field("amount", pa.decimal128(12, 2))))
    found = {problem.where: problem for problem in lake.sink.validate(shape)}
    expected = {f"sink.table column `{name}`" for name in ("id", "name", "ratio", "amount")}
    assert expected <= set(found)
    assert "decimal(10, 2)" in found["sink.table column `amount`"].what
    fitting = pa.schema([pa.field("id", pa.int16(), nullable=False), ("NAME", pa.string()), ("amount", pa.decimal128(9, 2))])
    assert lake.sink.validate(Shape("p", fitting)) == []
    narrow = Feed(fitting)
    job = narrow.next(3, 0, 0, values=lambda i: {"id": i, "NAME": "x", "amount": Decimal(i)})
    apply(lake.sink, job)
    assert sorted(lake.ids()) == job.ids


def test_the_bounds_of_a_file_are_right_for_readers_that_skip_files(tmp_path):
    lake = IcebergCase(tmp_path / "lake")
    feed = Feed(SCHEMA)
    jobs = [feed.next(40, 0, 0), feed.next(1, 1, 1)]
    for job in jobs:
        apply(lake.sink, job)
    lines = [line for job in jobs for line in job.expected]
    table = current(lake)
    for name in ("id", "name", "amount", "placed_at", "wall_clock", "day", "medium", "wide"):
        values = sorted(line[name] for line in lines if line[name] is not None)
        for value in (values[0], values[len(values) // 2], values[-1]):
            plain = value.isoformat() if isinstance(value, (dt.date, dt.datetime)) else value
            found = table.scan(EqualTo(name, plain)).to_arrow()["id"].to_pylist()
            assert Counter(found) == Counter(line["id"] for line in lines if line[name] == value), (name, value)
    assert table.scan(GreaterThanOrEqual("id", 40)).count() == 3
    assert len(list(table.scan(GreaterThanOrEqual("id", 40)).plan_files())) == 3, "the first window's file is skipped"


@pytest.mark.parametrize(
    "properties",
    [
        {},
        {"write.metadata.metrics.default": "counts", "write.metadata.metrics.column.name": "truncate(3)"},
        {"write.metadata.metrics.default": "full", "write.metadata.metrics.column.id": "none"},
    ],
    ids=["by default", "counts", "full"],
)
@pytest.mark.parametrize("integers", [False, True], ids=["decimals", "decimals as integers"])
def test_statistics_of_a_file_are_those_of_pyiceberg(lake, tmp_path, properties, integers):
    from pyiceberg.io.pyarrow import (
        compute_statistics_plan,
        data_file_statistics_from_parquet_metadata,
        parquet_path_to_id_mapping,
    )

    lake.schema, feed = SCHEMA, Feed(SCHEMA)
    apply(lake.sink, job := feed.next(60, 0, 0))
    arrow, columns = make_file_columns(SCHEMA, current(lake).metadata)
    lines = [{**line, "ratio": line["ratio"] or 1.5} for line in job.expected if line["name"] != TEXTS[-1]]
    with pyarrow.parquet.ParquetWriter(tmp_path / "file", arrow, store_decimal_as_integer=integers) as writer:
        for part in (lines[:30], lines[30:]):
            writer.write_table(pa.Table.from_pylist(part, arrow))
    footer = pyarrow.parquet.read_metadata(tmp_path / "file")
    plan, paths = compute_statistics_plan(columns, properties), parquet_path_to_id_mapping(columns)
    expected = data_file_statistics_from_parquet_metadata(footer, plan, paths).to_serialized_dict()
    found = collect_file_statistics(footer, make_column_metrics(columns, properties))
    assert found["split_offsets"] == expected["split_offsets"]
    for name in ("column_sizes", "value_counts", "null_value_counts"):
        assert found[name] == {str(key): count for key, count in expected[name].items()}, name
    for name in ("lower_bounds", "upper_bounds"):
        assert found[name] == {str(key): bound.hex() for key, bound in expected[name].items()}, name


# --- partitions and order ---------------------------------------------------------------------------------------------

_NUMBERS = [0, 1, -1, 34, 2**31 - 1, -(2**31) + 10, None, 7]
_LONGS = [*_NUMBERS, 2**63 - 1, -(2**63) + 100]
_DATES = [dt.date(1970, 1, 1), dt.date(1969, 12, 31), dt.date(2026, 2, 28), None, dt.date(1, 1, 1), dt.date(9999, 12, 31)]
_NAIVE = [at.replace(tzinfo=None) for at in INSTANTS]
_DECIMALS = [Decimal(text) for text in ("1.23", "-0.05", "0.00", "-1.28", "-1.29", "1.27", "1.28", "99999999.99")]
_WIDE = [Decimal("9" * 38), Decimal("-" + "9" * 38), None]
CASES = [
    (pa.int32(), IntegerType(), _NUMBERS, (BucketTransform(16), TruncateTransform(10), IdentityTransform())),
    (pa.int64(), LongType(), _LONGS, (BucketTransform(7), TruncateTransform(100), IdentityTransform())),
    (pa.date32(), DateType(), _DATES, (BucketTransform(5), YearTransform(), MonthTransform(), DayTransform())),
    (
        pa.timestamp("us", "UTC"),
        TimestamptzType(),
        [*INSTANTS, None],
        (BucketTransform(5), YearTransform(), MonthTransform(), DayTransform(), HourTransform(), IdentityTransform()),
    ),
    (pa.timestamp("us"), TimestampType(), [None, *_NAIVE], (BucketTransform(3), DayTransform(), HourTransform())),
    (pa.string(), StringType(), [*TEXTS, None], (BucketTransform(9), TruncateTransform(3), IdentityTransform())),
    (pa.binary(), BinaryType(), [b"", b"\0\xff\1\2", None], (BucketTransform(9), TruncateTransform(2))),
    (pa.decimal128(12, 2), DecimalType(12, 2), [*_DECIMALS, None], (BucketTransform(4), TruncateTransform(5))),
    (pa.uuid(), UUIDType(), [uuid.UUID(int=2**127 + 7), uuid.UUID(int=0), None], (BucketTransform(9),)),
    (pa.time64("us"), TimeType(), [dt.time(0, 0), dt.time(23, 59, 59, 999999), None], (BucketTransform(9), IdentityTransform())),
    (pa.decimal128(38, 0), DecimalType(38, 0), _WIDE, (BucketTransform(64), IdentityTransform())),
]


@pytest.mark.parametrize(("arrow", "kind", "values", "transforms"), CASES, ids=[str(case[0]) for case in CASES])
def test_partition_values_are_those_of_pyiceberg(arrow, kind, values, transforms):
    from pyiceberg.partitioning import _to_partition_representation

    for transform in transforms:
        found = apply_transform(pa.array(values, arrow), str(transform)).to_pylist()
        compute = transform.transform(kind)
        assert found == [compute(_to_partition_representation(kind, value)) for value in values], transform


def test_a_table_that_others_have_partitioned_and_sorted_gets_its_files_so(lake):
    columns = [
        NestedField(1, "id", LongType()),
        NestedField(2, "name", StringType()),
        NestedField(3, "placed_at", TimestamptzType()),
    ]
    schema = pa.schema([("id", pa.int64()), ("name", pa.string()), ("placed_at", pa.timestamp("us", "UTC"))])
    with lake.catalog() as catalog:
        catalog.create_namespace("shop")
        table = catalog.create_table(NAME, Schema(*columns))
        with table.update_spec() as update:
            update.add_field("placed_at", YearTransform(), "placed_year")
            update.add_field("name", TruncateTransform(1), "initial")
        with table.update_sort_order() as update:
            update.desc("name", IdentityTransform(), NullOrder.NULLS_FIRST)
            update.asc("id", BucketTransform(3), NullOrder.NULLS_LAST)
    assert current(lake).sort_order().fields[0].direction == SortDirection.DESC
    lake.schema, feed = schema, Feed(schema)
    jobs = [feed.next(60, 20, 0), feed.next(5, 0, 0)]
    for job in jobs:
        apply(lake.sink, job)
    same_multiset([line for job in jobs for line in job.expected], lake.read())
    table = current(lake)
    partitions = {(p["placed_year"], p["initial"]) for p in table.inspect.partitions()["partition"].to_pylist()}
    lines = [line for job in jobs for line in job.expected]
    assert partitions == {
        (at.year - 1970 if (at := line["placed_at"]) else None, line["name"] if line["name"] is None else line["name"][:1])
        for line in lines
    }
    bucket = BucketTransform(3).transform(LongType())
    for path in lake.files():
        for line_group in [pyarrow.parquet.ParquetFile(lake.path / "warehouse" / path).read().to_pylist()]:
            names = [line["name"] for line in line_group]
            expected = sorted(names, key=lambda n: (n is not None, [-b for b in (n or "").encode()] + [1]))
            assert names == expected
            same = [(line["name"], bucket(line["id"]), line["id"]) for line in line_group]
            assert all(one[1:] <= two[1:] for one, two in zip(same, same[1:], strict=False) if one[0] == two[0])
    found = table.scan(EqualTo("name", "plain")).to_arrow()["id"].to_pylist()
    assert Counter(found) == Counter(line["id"] for line in lines if line["name"] == "plain")
    with pytest.raises(AssertionError):
        assert lake.sink.validate(feed.shape), "how a table is partitioned is no problem unless the options name something else"
    (problem,) = replace(lake.sink, partition_by=["name"]).validate(feed.shape)
    assert "year(placed_at), truncate(1, name)" in problem.what
    assert replace(lake.sink, partition_by=["years(placed_at)", "truncate(name, 1)"]).validate(feed.shape) == []


@pytest.mark.parametrize("version", [extended("1"), "2"])
def test_each_window_is_written_for_the_partition_spec_of_its_time_and_replays_and_upserts_meet_all_of_them(lake, version):
    """Format version 1 keeps a field that was removed, with the transform `void`."""
    lake.schema = pa.schema([*SMALL, ("placed_at", pa.timestamp("us", "UTC")), ("day", pa.date32())])
    feed = Feed(lake.schema)
    sink = replace(lake.sink, partition_by=["year(placed_at)"], table_properties={"format-version": version})
    changes: list[Any] = [
        lambda update: update.add_field("id", BucketTransform(3), "shard").remove_field("placed_at_year"),
        lambda update: update.add_field("placed_at", HourTransform(), "hour").add_field("name", TruncateTransform(2), "begin"),
        lambda update: update.remove_field("shard").remove_field("begin").add_field("day", MonthTransform(), "month"),
        lambda update: update.remove_field("hour").remove_field("month").add_field("day", IdentityTransform(), "day_itself"),
        lambda update: update.remove_field("day_itself"),
    ]
    jobs = [feed.next(6, 2, 1)]
    apply(sink, jobs[0])
    plain = replace(sink, partition_by=())
    for change in changes:
        with lake.catalog() as catalog, catalog.load_table(NAME).update_spec() as update:
            change(update)
        assert plain.validate(feed.shape) == []
        jobs.append(feed.next(6, 2, 1))
        apply(plain, jobs[-1])
    assert len(current(lake).specs()) == 6
    same_multiset([line for job in jobs for line in job.expected], lake.read())
    jobs[1] = replayed(jobs[1], first=2)
    apply(plain, jobs[1])
    expected = [line for job in jobs for line in job.expected]
    same_multiset(expected, lake.read())
    for line in expected[::7]:
        found = current(lake).scan(EqualTo("id", line["id"])).to_arrow()["id"].to_pylist()
        assert found == [line["id"]]
    # A row of each window is updated, which rewrites files of all six specs.
    changed = {job.ids[-1]: {**job.expected[-1], "ratio": 7.0} for job in jobs}
    write(replace(plain, mode="upsert", key=["id"]), Pipeline(lake.schema, "upserts"), list(changed.values()))
    same_multiset([changed.get(line["id"], line) for line in expected], lake.read())
    apply(replace(plain, optimize=1), last := feed.next(2, 1, 0))
    same_multiset([*(changed.get(line["id"], line) for line in expected), *last.expected], lake.read())


@pytest.mark.parametrize("transform", [BucketTransform(3), IdentityTransform()], ids=str)
def test_uuids_partition_and_sort_a_table_and_are_keys_of_upserts(lake, transform):
    """Arrow neither sorts them nor compares them by their type."""
    columns = [NestedField(1, "id", LongType()), NestedField(2, "u", UUIDType()), NestedField(3, "at", TimeType())]
    with lake.catalog() as catalog:
        catalog.create_namespace("shop")
        table = catalog.create_table(NAME, Schema(*columns))
        with table.update_spec() as update:
            update.add_field("u", transform, "part").add_field("at", transform, "of_time")
        with table.update_sort_order() as update:
            update.asc("u", IdentityTransform())
    lake.schema = pa.schema([("id", pa.int64()), ("u", pa.uuid()), ("at", pa.time64("us"))])
    lines = [{"id": n, "u": uuid.UUID(int=n * 7919 << 90 | n), "at": dt.time(23, 59, n, n)} for n in range(6)]
    feed = Feed(lake.schema)
    assert lake.sink.validate(feed.shape) == []
    apply(lake.sink, feed.next(4, 0, 0, values=lines.__getitem__))
    changed = [{**lines[1], "id": 10}, lines[4], {**lines[0], "id": 11}]
    write(replace(lake.sink, mode="upsert", key=["u"]), Pipeline(lake.schema, "upserts"), changed)
    # Rows without these columns are written, too, and the others are rewritten.
    only = pa.schema([("id", pa.int64())])
    write(replace(lake.sink, mode="upsert", key=["id"], optimize=1), Pipeline(only, "ids"), [{"id": 2}, {"id": 12}])
    null = {"u": None, "at": None}
    same_multiset([changed[2], changed[0], lines[3], lines[4], {"id": 2, **null}, {"id": 12, **null}], lake.read())


@pytest.mark.parametrize("text", ["log(id)", "bucket(id)", "bucket(0, id)", "day(1, at)", "day(", "truncate(x, id)", "hour()"])
def test_partition_fields_that_are_not_understood(text):
    with pytest.raises(ValueError, match="expected a column"):
        PartitionField.parse(text)


@pytest.mark.faults
def test_files_and_manifests_lie_where_the_table_says_and_a_dead_attempts_are_removed_there(lake, feed, tmp_path):
    data, metadata = tmp_path / "data", tmp_path / "metadata"
    places = {"write.data.path": f"file://{data}", "write.metadata.path": f"file://{metadata}"}
    sink = replace(lake.sink, table_properties={**places, "format-version": "1"})
    first, job = feed.next(), feed.next()
    apply(sink, first)
    with Victim(sink, job, "sink.in_transaction", tmp_path / "victim") as victim:
        assert victim.died()
    assert len(list(data.iterdir())) == 2 and len(list(metadata.glob("*.avro"))) > 3
    with sink.begin(job.window, job.splits, job.shape):
        pass
    named = {path.removeprefix("file://") for path in lake.files(every=True)}
    assert {str(path) for path in [*data.rglob("*.parquet"), *metadata.glob("*.avro")]} == named
    apply(sink, job)
    apply(sink, replayed(first, first=3))
    assert current(lake).format_version == 1
    assert Counter(lake.ids()) == Counter([*replayed(first, first=3).ids, *job.ids])


def test_the_tag_of_a_data_interval_lets_its_snapshot_expire_some_day(lake):
    """Each interval has one: if they stayed, table metadata would grow with each hour for ever."""
    ages = {}
    for name in ("hours", "hours.20260101T000000Z-20260101T010000Z", "hours.20260101T010000Z-20260101T020000Z.to.orders"):
        job = Feed(SMALL, name).next(1, 0, 0)
        apply(lake.sink, job)
        ages[name] = current(lake).refs()[make_tag_name(name)].max_ref_age_ms
    assert list(ages.values()) == [2**63 - 1, *[90 * 86_400_000] * 2]


def test_an_upsert_is_refused_where_it_would_bring_back_rows_that_flink_has_deleted(lake, feed):
    """The deleted key is no key of the upsert, so that a scan for its keys does not look at the delete file."""
    first = feed.next(4, 0, 0)
    apply(lake.sink, first)
    lake.delete_by_value(first.ids[-1])
    upsert = replace(lake.sink, mode="upsert", key=["id"])
    for problems in (upsert.validate(feed.shape), upsert.find_target_problems()):
        assert ["deletes rows by their values" in problem.what for problem in problems] == [True]
    with pytest.raises(SinkUnavailable, match="deletes rows by their values"):
        write(upsert, Pipeline(SMALL, "upserts"), [first.expected[0]])
    assert lake.sink.validate(feed.shape) == []
    apply(lake.sink, feed.next())
    assert any(file.endswith(f"deletes-{first.ids[-1]}.parquet") for file in lake.files()), "an append leaves the deletes"


# --- branches -------------------------------------------------------------------------------------------------------


def test_windows_on_a_branch_are_seen_once_it_is_published(lake, feed):
    first, second, third = feed.next(), feed.next(), feed.next()
    apply(lake.sink, first)
    audit = replace(lake.sink, branch="audit")
    assert audit.validate(feed.shape) == []
    assert [d.what for d in compare_endpoints(lake.sink.find_destination(), audit.find_destination())] == ["branch"]
    assert [d.what for d in compare_locations(audit.find_destination(), lake.sink.find_destination())] == ["branch"]
    apply(audit, second)
    lake.of_others(-1)
    assert Counter(lake.ids()) == Counter([*first.ids, -1])
    assert apply(audit, second).number == 2
    apply(audit, third)
    table = current(lake)
    there = table.scan().use_ref("audit").to_arrow()["id"].to_pylist()
    assert Counter(there) == Counter([*first.ids, *second.ids, *third.ids])
    # A column that is new on the branch is one of the table; a replay of an older window, also of one of `main`, keeps it.
    evolving = replace(audit, auto_evolve=True)
    wider = replace(feed, schema=pa.schema([*feed.schema, SCHEMA.field("wide"), SCHEMA.field("place")])).next(3, 0, 0)
    apply(evolving, wider)
    for job in (second, first):
        apply(evolving, replayed(job))
    assert Counter(lake.ids()) == Counter([*first.ids, -1])
    with lake.catalog() as catalog:
        table = catalog.load_table(NAME)
        table.manage_snapshots().set_current_snapshot(table.refs()["audit"].snapshot_id).commit()
    moved = [*first.expected, *second.expected, *third.expected, *wider.expected]
    lake.schema = pa.schema([*feed.schema, SCHEMA.field("wide"), SCHEMA.field("place")])
    same_multiset([{**dict.fromkeys(lake.schema.names), **line} for line in moved], lake.read())
    tag = replace(lake.sink, branch=make_tag_name("another"))
    assert [problem.where for problem in tag.validate(feed.shape)] == ["sink.branch"]


def test_an_open_window_that_gets_another_branch_is_moved_to_it(lake, feed):
    """Both branches belong to one table, whose snapshots name the windows of all branches."""
    first, job = feed.next(), feed.next()
    apply(lake.sink, first)
    audit = replace(lake.sink, branch="audit")
    apply(audit, job)
    assert lake.ids() == first.ids
    moved = replace(job, window=replace(job.window, after=ELSEWHERE))
    assert lake.sink.find_applied(job.window) is not None, "without a rebind, the branch is that of the window"
    assert lake.sink.find_applied(moved.window) is None
    for _ in range(2):
        assert apply(lake.sink, moved).written == len(job.ids)
        assert lake.sink.find_applied(moved.window) is not None
        same_multiset([*first.expected, *job.expected], lake.read())
    apply(lake.sink, feed.next())
    # A branch that was published to another one has its windows there.
    other, later = replace(lake.sink, branch="other"), feed.next()
    apply(other, later)
    with lake.catalog() as catalog:
        table = catalog.load_table(NAME)
        table.manage_snapshots().create_branch(table.metadata.snapshot_by_name("other").snapshot_id, "next").commit()
    assert replace(lake.sink, branch="next").find_applied(replace(later.window, after=ELSEWHERE)) is not None


def test_a_branch_of_a_table_without_snapshots_begins_with_an_empty_one(lake, feed):
    job = feed.next()
    apply(replace(lake.sink, branch="audit"), job)
    assert lake.ids() == []
    assert Counter(current(lake).scan().use_ref("audit").to_arrow()["id"].to_pylist()) == Counter(job.ids)


# --- readers --------------------------------------------------------------------------------------------------------


def test_polars_and_duckdb_read_the_values_that_were_written(lake, feed):
    jobs = [feed.next(), feed.next()]
    for job in jobs:
        apply(lake.sink, job)
    lines = [line for job in jobs for line in job.expected]
    table = current(lake)
    same_multiset(lines, pl.scan_iceberg(table).collect().to_dicts())
    with table.scan().to_duckdb("orders") as connection:
        assert connection.sql("SELECT count(*), sum(id) FROM orders").fetchall() == [
            (len(lines), sum(line["id"] for line in lines))
        ]
    paths = [task.file.file_path.removeprefix("file://") for task in table.scan().plan_files()]
    same_multiset(lines, duckdb.read_parquet(paths).to_arrow_table().to_pylist())


# --- connections ----------------------------------------------------------------------------------------------------


def connect(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> str:
    monkeypatch.setenv("AIRFLOW_CONN_A_LAKE", json.dumps({"conn_type": "iceberg", **fields}))
    return "a_lake"


def test_the_connection_has_the_fields_of_airflows_iceberg_provider(monkeypatch):
    rest = {"host": "https://catalog.example.com/ws/v1/", "login": "me", "password": "hush", "extra": {"warehouse": "s3://lake"}}
    access = find_catalog_access(connect(monkeypatch, **rest))
    assert access.name == "a_lake" and "hush" not in repr(access)
    assert access.properties["uri"] == "https://catalog.example.com/ws/v1"
    assert (access.properties["type"], access.properties["credential"]) == ("rest", "me:hush")
    assert access.hide_secrets("401 for me:hush, hush") == "401 for ***, hush"
    sql = {
        "host": "postgresql+psycopg://db:5432/lake",
        "login": "me",
        "password": "h/ush",
        "extra": {"type": "sql", "name": "lake"},
    }
    access = find_catalog_access(connect(monkeypatch, **sql))
    assert access.properties["uri"] == "postgresql+psycopg://me:h%2Fush@db:5432/lake"
    assert (access.name, access.address) == ("lake", "postgresql+psycopg://db:5432/lake")
    assert access.hide_secrets("no: me:h%2Fush h/ush") == "no: me:*** ***"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"extra": {"type": "hadoop", "warehouse": "/lake"}}, "loses windows"),
        ({"extra": {"type": "dynamodb"}}, "expected one of rest, sql, glue, hive. pyiceberg cannot commit"),
        ({"extra": {"type": "in-memory"}}, "expected one of rest, sql"),
        ({"extra": {"type": "sql"}}, "has no host"),
        ({"host": "sqlite://", "extra": {"type": "sql"}}, "no `warehouse`"),
        ({"host": "sqlite:////nowhere/at/all.db", "extra": {"type": "sql"}}, "opening the catalog"),
        ({"host": "http://127.0.0.1:1"}, "opening the catalog: 127.0.0.1:1: Failed to establish a new connection: [Errno 111]"),
        ({"host": "catalog.example.org:8181"}, "is `catalog.example.org:8181`; expected the URL of a REST catalog"),
        ({"conn_type": "postgres", "host": "db"}, "it is of type `postgres`"),
    ],
)
def test_catalogs_that_cannot_be_used_are_refused_before_anything_runs(monkeypatch, fields, expected):
    sink = IcebergSink(NAME, connect(monkeypatch, **fields))
    (problem,) = sink.validate(Shape("p", SMALL))
    assert problem.where == "sink.conn_id" and expected in problem.what
    assert sink.find_target_problems() == [problem]


def test_the_connection_test_asks_the_catalog(monkeypatch, tmp_path):
    extra = {"type": "sql", "warehouse": f"file://{tmp_path}"}
    hook = IcebergHook(connect(monkeypatch, conn_type="generic", host=f"sqlite:///{tmp_path}/catalog.db", extra=extra))
    assert hook.test_connection() == (True, f"Connected to the catalog at sqlite:///{tmp_path}/catalog.db.")
    assert hook.get_conn().list_namespaces() == []
    done, reason = IcebergHook(connect(monkeypatch, host="http://127.0.0.1:1")).test_connection()
    assert not done and "127.0.0.1:1: Failed to establish a new connection" in reason


@pytest.mark.parametrize(
    ("extra", "other"),
    [
        ({"type": "sql", "uri": "sqlite:///c.db", "name": "one"}, {"name": "two"}),
        ({"type": "rest", "uri": "http://127.0.0.1:1"}, {"warehouse": "two"}),
        ({"type": "glue", "glue.region": "eu-west-1"}, {"glue.id": "123456789012"}),
    ],
    ids=["sql", "rest", "glue"],
)
def test_a_window_does_not_move_to_another_catalog_at_one_address(monkeypatch, extra, other):
    """It may be committed in the first one already."""
    ends = [IcebergSink(NAME, connect(monkeypatch, extra=found)).find_destination() for found in (extra, extra | other)]
    for compare in (compare_endpoints, compare_locations):
        assert [difference.what for difference in compare(*ends)] == ["catalog"]


def test_wrong_options_are_found_where_the_columns_are_not_known(monkeypatch, tmp_path):
    connect(monkeypatch, host=f"sqlite:///{tmp_path}/catalog.db", extra={"type": "sql", "warehouse": f"file://{tmp_path}"})
    wrong = {"mode": "upsert", "compression": "zip", "options": {"max_open_files": 0}}
    for sink in (IcebergSink(NAME, "a_lake", **wrong), DeltaSink(str(tmp_path / "orders"), **wrong)):
        found = [problem.where for problem in sink.find_target_problems()]
        assert sorted(found) == ["sink.compression", "sink.key", "sink.options"]
    ends = "at which pyiceberg ends a path"
    places = {"file:///proc/lake": "no directory can be created in /proc", "lake": "not an absolute path"}
    for warehouse, said in {**places, f"file://{tmp_path}/a#b": ends, "s3://lake/a?b": ends}.items():
        connect(monkeypatch, host=f"sqlite:///{tmp_path}/other.db", extra={"type": "sql", "warehouse": warehouse})
        (problem,) = IcebergSink(NAME, "a_lake", auto_create=True).find_target_problems()
        assert problem.where == "sink.conn_id" and said in problem.what


def test_a_catalog_on_postgresql_with_the_connections_login(postgres, unique, tmp_path, monkeypatch, feed):
    database = unique("lake").replace("-", "_")
    with postgres.connect(autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{database}"')
        connection.execute(f"CREATE ROLE \"{database}\" LOGIN PASSWORD 'hush/hush' SUPERUSER")
    extra = {"type": "sql", "warehouse": f"file://{tmp_path}/warehouse"}
    host = postgres.connection_uri().rpartition("@")[2].partition("/")[0]
    login = {"login": database, "password": "hush/hush"}
    sink = IcebergSink(NAME, connect(monkeypatch, host=f"postgresql+psycopg://{host}/{database}", extra=extra, **login))
    jobs = [feed.next(), feed.next()]
    assert sink.validate(feed.shape) == []
    for job in jobs:
        apply(sink, job)
    assert sink.find_last_applied(feed.pipeline).number == 2
    with sink.open() as lake:
        found = lake.load_newest("reading").scan().to_arrow().to_pylist()
    same_multiset([line for job in jobs for line in job.expected], found)
    assert "hush" not in str(sink.find_destination())
    with postgres.connect(autocommit=True) as connection:
        with (
            pytest.raises(SinkUnavailable, match=f"while reading again: {SESSION_ENDED}. The task may simply"),
            sink.open() as lake,
        ):
            lake.load_newest("reading")
            connection.execute(f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE usename = '{database}'")
            lake.load_newest("reading again")
        connection.execute(f'ALTER ROLE "{database}" NOLOGIN')
    with pytest.raises(SinkUnavailable) as caught:
        sink.find_applied(jobs[0].window)
    assert "hush" not in str(caught.value)
