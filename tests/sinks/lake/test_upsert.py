"""Upsert and delete by key in lake tables: which row is left, and that nothing else is lost or doubled."""

from __future__ import annotations

import datetime as dt
import random
from collections import Counter
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from deltalake import convert_to_deltalake, write_deltalake

from airflow_kafka_spark.errors import BadRecords, Fenced
from airflow_kafka_spark.sinks.base import OFFSET_COLUMNS, Shape
from tests.sinks.attempt import Victim, apply, travelled, write_all
from tests.sinks.delta.cases import DeltaCase
from tests.sinks.iceberg.cases import IcebergCase
from tests.sinks.postgres.kit import DEAD, EVENTS_OF_KEYS, Pipeline, dead, names, write

KEYED = pa.schema([("id", pa.int64()), ("v", pa.string())])
Lake = DeltaCase | IcebergCase


@pytest.fixture
def make(new_lake) -> Any:
    def make(schema: pa.Schema = KEYED, **options: Any) -> Lake:
        return new_lake(schema, **{"mode": "upsert", "key": "id", **options})

    return make


@pytest.fixture
def lake(make: Any) -> Lake:
    return make()


def rows(lake: Lake) -> dict[int, Any]:
    found = [(line["id"], line["v"]) for line in lake.read("id", "v")]
    assert len(found) == len(dict(found)), "a key is there twice"
    return dict(found)


# --- which row is left ----------------------------------------------------------------------------------------------------


def test_the_last_offset_of_a_key_wins_within_and_between_windows(lake):
    pipeline = Pipeline(KEYED)
    first = write(lake.sink, pipeline, [{"id": i % 3, "v": f"a{i}"} for i in range(10)], [{"id": 7, "v": "x"}])
    assert rows(lake) == {0: "a9", 1: "a7", 2: "a8", 7: "x"}
    assert first.written == 4
    before = lake.commits()
    second = write(lake.sink, pipeline, [{"id": 1, "v": "b"}, {"id": 9, "v": None}], [])
    assert rows(lake) == {0: "a9", 1: "b", 2: "a8", 7: "x", 9: None}
    assert (second.written, second.deleted) == (2, 0)
    assert lake.commits() == before + 1, "one commit takes the old row away and adds the new one"
    assert lake.leftovers() == []


def test_pieces_of_one_partition_keep_the_order_of_their_offsets(lake):
    """Splits are numbered across partitions, and a partition may have several."""
    job = Pipeline(KEYED).job([{"id": 1, "v": "first"}], [{"id": 2, "v": "x"}], [{"id": 1, "v": "last"}])
    ranges = [job.splits[0].range, job.splits[1].range, replace(job.splits[0].range, start=1, end=2)]
    data = {0: job.rows[2], 1: job.rows[1], 2: job.rows[0]}
    # Split 0 is given the later half: [1, 2) with the last value; split 2 the earlier one.
    order = (ranges[2], ranges[1], ranges[0])
    splits = tuple(replace(split, range=r) for split, r in zip(job.splits, order, strict=True))
    for index, at in ((0, 1), (2, 0)):
        data[index] = [replace(data[index][0], offsets=pa.array([at], pa.int64()))]
    window = replace(job.window, ranges=(replace(ranges[0], end=2), ranges[1]))
    apply(lake.sink, replace(job, window=window, splits=splits, rows=data))
    assert rows(lake) == {1: "last", 2: "x"}


def test_between_partitions_the_higher_one_wins(lake):
    write(lake.sink, Pipeline(KEYED), [{"id": 1, "v": "low"}] * 5, [{"id": 1, "v": "high"}])
    assert rows(lake) == {1: "high"}


def test_a_tombstone_deletes_and_the_last_event_of_a_key_wins(make):
    lake, pipeline = make(delete_enabled=True), Pipeline(KEYED, tombstones=True)
    assert lake.sink.takes_tombstones
    assert write(lake.sink, pipeline, [{"id": i, "v": "old"} for i in range(6)]).deleted == 0
    applied = write(lake.sink, pipeline, EVENTS_OF_KEYS)
    assert rows(lake) == {2: "again", 3: "b", 4: "old", 5: "old", 8: "x"}
    assert (applied.written, applied.deleted) == (3, 2)
    assert write(lake.sink, pipeline, [dead(i) for i in (2, 3, 4, 5, 8, 8)]).deleted == 5
    assert rows(lake) == {} and lake.files() == set()
    assert lake.sink.find_last_applied("dag.task").deleted == 5
    assert write(lake.sink, pipeline, [{"id": 1, "v": "anew"}]).written == 1
    assert rows(lake) == {1: "anew"}


def test_a_null_in_the_key_is_refused_with_its_offsets(lake):
    pipeline = Pipeline(KEYED)
    write(lake.sink, pipeline, [{"id": 1, "v": "a"}])
    with pytest.raises(BadRecords) as caught:
        write(lake.sink, pipeline, [{"id": 2}, {"id": None}, {"id": 3}, {"id": None}])
    assert "`id` is null" in str(caught.value)
    assert [s.offset for s in caught.value.samples] == [2, 4]
    assert rows(lake) == {1: "a"}


KEYS = {
    "string": (pa.string(), ["", "a", "ü" * 40, "ü" * 40 + "x", "z"]),
    "date": (pa.date32(), [dt.date(1900, 1, 1) + dt.timedelta(days=9999 * i) for i in range(5)]),
    "timestamp": (pa.timestamp("us", "UTC"), [dt.datetime(2026, 1, 1, 0, 0, 0, us, dt.timezone.utc) for us in range(5)]),
    "decimal": (pa.decimal128(12, 2), [Decimal("1.00"), Decimal("1.10"), Decimal("-1.10"), Decimal("0.00"), Decimal("9.99")]),
    "binary": (pa.binary(), [b"", b"\0", b"\0\0", b"\xff", b"\xff\0"]),
    "int32": (pa.int32(), [0, -1, 2**31 - 1, -(2**31), 7]),
    "bool": (pa.bool_(), [True, False]),
}
"""Values of each type. The last one has too few for five rows, so that an upsert by it leaves two."""


def test_keys_of_all_types_are_compared_by_their_values(make):
    """One table, whose rows are replaced by the value of each column in turn."""
    lake = make(pa.schema([*((name, kind) for name, (kind, _) in KEYS.items()), ("n", pa.int64())]), key="string")
    pipeline, values = Pipeline(lake.schema), {name: found for name, (_, found) in KEYS.items()}
    lines = [{name: found[i % len(found)] for name, found in values.items()} | {"n": i} for i in range(5)]
    assert write(lake.sink, pipeline, lines).written == 5
    for turn, name in enumerate(KEYS, 1):
        sink = replace(lake.sink, key=name)
        assert sink.validate(pipeline.shape) == []
        lines = [line | {"n": 10 * turn + i} for i, line in enumerate(lines[: len(values[name])])]
        assert write(sink, pipeline, lines).written == len(lines)
        assert sorted(lake.read(), key=lambda line: line["n"]) == lines, name


def test_a_key_of_several_columns_in_a_partitioned_table_and_rows_that_move_to_another_partition(make):
    schema = pa.schema([("a", pa.int64()), ("b", pa.string()), ("p", pa.string()), ("v", pa.string())])
    lake, pipeline = make(schema, key=["b", "a"], partition_by=["p"]), Pipeline(schema)
    awkward = ["Di/Tu=?", "Fr 100%", "Sá~", None]
    lines = [{"a": a, "b": b, "p": awkward[a], "v": "old"} for a in range(4) for b in "xy"]
    write(lake.sink, pipeline, lines)
    moved = [{"a": a, "b": "x", "p": awkward[a - 1], "v": "new"} for a in range(4)]
    write(lake.sink, pipeline, moved)
    expected = [line for line in lines if line["b"] == "y"] + moved
    order = lambda line: (line["a"], line["b"])  # noqa: E731
    assert sorted(lake.read(), key=order) == sorted(expected, key=order)
    assert lake.leftovers() == []


def test_a_key_that_partitions_the_table_is_found_in_its_partition_alone(make, kind):
    schema = pa.schema([("p", pa.string()), ("id", pa.int64()), ("v", pa.string())])
    lake, pipeline = make(schema, key=["p", "id"], partition_by=["p"]), Pipeline(schema)
    write(lake.sink, pipeline, [{"p": p, "id": i, "v": "old"} for p in ("a", "b%20/=", "c") for i in range(3)])
    before = lake.files()
    write(lake.sink, pipeline, [{"p": "b%20/=", "id": 1, "v": "new"}])
    assert len(before - lake.files()) == 1
    assert Counter((line["p"], line["v"]) for line in lake.read()) == {
        ("a", "old"): 3,
        ("b%20/=", "old"): 2,
        ("b%20/=", "new"): 1,
        ("c", "old"): 3,
    }
    if kind == "delta":
        with pytest.raises(BadRecords, match="is empty"):
            write(lake.sink, pipeline, [{"p": "", "id": 1}])


def test_many_windows_of_random_events_leave_what_a_dictionary_has(make):
    lake, pipeline = make(delete_enabled=True), Pipeline(KEYED, tombstones=True)
    chance, known = random.Random(5), {}
    for turn in range(12):
        events: list[list[dict[str, Any]]] = [[], [], []]
        for n in range(chance.randrange(60)):
            key = chance.randrange(40)
            line = dead(key) if chance.random() < 0.3 else {"id": key, "v": f"{turn}.{n}"}
            events[key % 3].append(line)
            known[key] = None if DEAD in line else line["v"]
        write(lake.sink, pipeline, *events)
        assert rows(lake) == {key: value for key, value in known.items() if value is not None}, turn
    assert lake.leftovers() == []


# --- other writers, kills, zombies ----------------------------------------------------------------------------------------


@pytest.mark.faults
@pytest.mark.parametrize("point", ["sink.in_transaction", "sink.committed"])
def test_an_attempt_that_dies_is_repeated_and_deletes_and_updates_once(make, tmp_path, point):
    lake, pipeline = make(delete_enabled=True), Pipeline(KEYED, tombstones=True)
    write(lake.sink, pipeline, [{"id": i, "v": "old"} for i in range(8)])
    job = pipeline.job([dead(0), {"id": 1, "v": "new"}], [{"id": 9, "v": "more"}])
    with Victim(lake.sink, job, point, tmp_path / "victim") as victim:
        assert victim.died()
    after = {**{i: "old" for i in range(2, 8)}, 1: "new", 9: "more"}
    assert rows(lake) == (after if point == "sink.committed" else dict.fromkeys(range(8), "old"))
    lake.of_others(-1)
    assert (apply(lake.sink, job).written, apply(lake.sink, job).deleted) == (2, 1)
    assert rows(lake) == {**after, -1: None}
    write(lake.sink, pipeline, [dead(1)])
    assert 1 not in rows(lake)
    assert lake.leftovers() == []


@pytest.mark.faults
def test_rows_that_others_commit_between_look_and_commit_are_seen(lake, tmp_path):
    """Others commit a key of the window in a new file, or rewrite the files that the window is about to replace."""
    pipeline = Pipeline(KEYED)
    write(lake.sink, pipeline, [{"id": i, "v": "old"} for i in range(8)])
    job = pipeline.job([{"id": i, "v": "new"} for i in (1, 2, 77)])
    with Victim(lake.sink, job, "sink.in_transaction:stop", tmp_path / "victim") as attempt:
        assert attempt.stopped()
        lake.of_others(77, 88)
        lake.compact()
        assert attempt.wake() == 0, attempt.log.read_text()[-2000:]
    expected = {**{i: "old" for i in (0, 3, 4, 5, 6, 7)}, 1: "new", 2: "new", 77: "new", 88: None}
    assert rows(lake) == expected


@pytest.mark.faults
def test_a_zombie_changes_nothing_behind_its_successor_nor_behind_one_that_gave_up(make, tmp_path):
    lake, pipeline = make(delete_enabled=True), Pipeline(KEYED, tombstones=True)
    write(lake.sink, pipeline, [{"id": i, "v": "old"} for i in range(4)])
    job = pipeline.job([dead(0), {"id": 1, "v": "zombie"}])
    with Victim(lake.sink, job, "sink.in_transaction:stop", tmp_path / "one") as zombie:
        assert zombie.stopped()
        with lake.sink.begin(job.window, job.splits, job.shape):
            pass
        assert zombie.wake() == 1
        assert "Fenced" in zombie.log.read_text()
    assert rows(lake) == dict.fromkeys(range(4), "old")
    with Victim(lake.sink, job, "sink.in_transaction:stop", tmp_path / "two") as zombie:
        assert zombie.stopped()
        apply(lake.sink, job)
        write(lake.sink, pipeline, [{"id": 0, "v": "back"}, {"id": 1, "v": "newest"}])
        zombie.wake()
    assert rows(lake) == {0: "back", 1: "newest", 2: "old", 3: "old"}
    assert lake.leftovers() == []


def test_a_task_of_an_attempt_that_was_overtaken_stages_nothing(lake):
    job = Pipeline(KEYED).job([{"id": 1, "v": "x"}])
    with lake.sink.begin(job.window, job.splits, job.shape) as writer:
        late = travelled(writer.make_split_writer())
        with lake.sink.begin(job.window, job.splits, job.shape) as newer:
            with pytest.raises(Fenced):
                late.open(job.splits[0])
            newer.commit(write_all(newer, job))
    assert rows(lake) == {1: "x"}
    assert lake.leftovers() == []


# --- offsets, replays -----------------------------------------------------------------------------------------------------


def test_older_offsets_never_overwrite_newer_ones_where_rows_hold_their_offsets(make):
    """A second pipeline begins with the first offsets and reads the same records again."""
    lake = make(offset_columns=True, delete_enabled=True)
    history = [{"id": 1, "v": "a"}, {"id": 2, "v": "b"}, {"id": 1, "v": "c"}, {"id": 3, "v": "d"}, dead(2), {"id": 2, "v": "e"}]
    write(lake.sink, Pipeline(KEYED, tombstones=True), history)
    assert rows(lake) == {1: "c", 2: "e", 3: "d"}
    again = Pipeline(KEYED, "another", tombstones=True)
    assert write(lake.sink, again, history[:2]).written == 0
    assert write(lake.sink, again, history[2:5]).deleted == 0
    assert rows(lake) == {1: "c", 2: "e", 3: "d"}
    lake.schema = pa.schema(
        [*KEYED, *(pa.field(n, t) for n, t in zip(OFFSET_COLUMNS, (pa.string(), pa.int32(), pa.int64()), strict=True))]
    )
    assert {line["id"]: line["__connect_offset"] for line in lake.read()} == {1: 2, 2: 5, 3: 3}
    assert {(line["__connect_topic"], line["__connect_partition"]) for line in lake.read()} == {("orders", 0)}
    window = again.job([]).window
    assert lake.sink.find_topics_in_rows(window, {"other", "orders"}) == ["orders"], (
        "if it is created again, its records would lose"
    )
    assert replace(lake.sink, offset_columns=False).find_topics_in_rows(window, {"orders"}) == []
    # A record that the first pipeline never read is written, and so is another topic's record: offsets of topics are not
    # comparable.
    assert write(lake.sink, again, [history[5], {"id": 3, "v": "new"}]).written == 1
    job = Pipeline(KEYED, "third", tombstones=True, topic="other").job([{"id": 1, "v": "other"}])
    apply(lake.sink, replace(job, window=replace(job.window, cluster_id="first", topic_ids={"other": "1"})))
    assert rows(lake) == {1: "other", 2: "e", 3: "new"}
    # A pipeline that has not read a topic before learns who has written its records last.
    (last,) = lake.sink.find_last_windows({"other", "unread"}).values()
    assert (last.pipeline, last.cluster_id, last.topic_ids) == ("third", "first", {"other": "1"})
    assert not replace(lake.sink, offset_columns=False).find_last_windows({"other"})


@pytest.mark.faults
def test_a_row_stays_if_a_newer_row_of_its_key_is_committed_between_look_and_commit(make, tmp_path):
    """The event then changes nothing. Its row was left out of the file that was written before the other commit."""
    lake, pipeline = make(offset_columns=True), Pipeline(KEYED)
    if not isinstance(lake, DeltaCase):
        pytest.skip("the code is common to both kinds of tables, and a row of another writer takes one line here")
    write(lake.sink, pipeline, [{"id": i, "v": "old"} for i in range(4)])
    job = pipeline.job([{"id": 1, "v": "new"}, {"id": 2, "v": "new"}])
    with Victim(lake.sink, job, "sink.in_transaction:stop", tmp_path / "victim") as attempt:
        assert attempt.stopped()
        newer = {"id": 1, "v": "newer"} | dict(zip(OFFSET_COLUMNS, ("orders", 0, 99), strict=True))
        types = zip(OFFSET_COLUMNS, (pa.string(), pa.int32(), pa.int64()), strict=True)
        schema = pa.schema([*KEYED, *(pa.field(*column) for column in types)])
        write_deltalake(lake.sink.path, pa.Table.from_pylist([newer], schema), mode="append")
        assert attempt.wake() == 0, attempt.log.read_text()[-2000:]
    found = sorted((line["id"], line["v"]) for line in lake.read("id", "v"))
    assert found == [(0, "old"), (1, "newer"), (1, "old"), (2, "new"), (3, "old")]


def test_a_replay_writes_its_rows_again_and_newer_ones_stay_also_after_maintenance(make):
    lake, pipeline = make(offset_columns=True), Pipeline(KEYED)
    assert lake.sink.find_replay_problems() == [] == lake.sink.find_unordered_problems()
    job = pipeline.job([{"id": i, "v": "first"} for i in range(4)])
    apply(lake.sink, job)
    write(lake.sink, pipeline, [{"id": 1, "v": "newer"}])
    lake.maintain()
    mended = [replace(b, batch=b.batch.set_column(1, "v", pa.array(["mended"] * b.batch.num_rows))) for b in job.rows[0]]
    again = replace(job, window=replace(job.window, replay=1), rows={0: mended})
    for _ in range(2):
        assert apply(lake.sink, again).written == 3
        assert rows(lake) == {0: "mended", 1: "newer", 2: "mended", 3: "mended"}
    assert lake.sink.find_last_applied("dag.task").number == 2
    assert lake.sink.find_applied(again.window).replay == 1


def test_replays_and_other_orders_that_would_leave_older_rows_are_refused(make):
    plain = make().sink
    assert [p.where for p in plain.find_replay_problems()] == ["on_rerun"]
    assert [p.where for p in plain.find_unordered_problems()] == ["window"]
    sink = replace(plain, offset_columns=True, delete_enabled=True)
    assert "deleted since" in sink.find_replay_problems()[0].what


# --- columns and refusals -------------------------------------------------------------------------------------------------


def test_rows_of_others_keep_all_their_columns_and_types(lake, kind):
    """Files of other writers are written anew with every column of the table."""
    pipeline = Pipeline(KEYED)
    write(lake.sink, pipeline, [{"id": 1, "v": "a"}])
    place = pa.struct([("zip", pa.int32())])
    columns = {"tags": pa.list_(pa.string()), "at": pa.timestamp("us"), "place": place}
    columns |= {"places": pa.list_(place), "by_name": pa.map_(pa.string(), place)}
    wide = pa.schema([*KEYED, *columns.items()])
    full = {"tags": ["x", None], "at": dt.datetime(2026, 1, 1), "place": {"zip": 7}, "places": [{"zip": 1}, None]}
    others = [
        {"id": 2, "v": "b", **dict.fromkeys(columns), "tags": []},
        {"id": 3, "v": "c", **full, "by_name": [("a", None)]},
        {"id": 4, "v": "d", **dict.fromkeys(columns)},
        {"id": 5, "v": "e", **dict.fromkeys(columns), "places": [], "by_name": []},
    ]
    more = pa.Table.from_pylist(others, wide)
    if kind == "delta":
        write_deltalake(lake.path, more, mode="append", schema_mode="merge")
    else:
        # Not by pyiceberg, which writes and reads a null list or map of structures as an empty one.
        write(replace(lake.sink, mode="append", key=(), auto_evolve=True), Pipeline(wide, "others"), others)
    write(lake.sink, pipeline, [{"id": 2, "v": "new"}, {"id": 1, "v": "newer"}])
    assert rows(lake) == {1: "newer", 2: "new", 3: "c", 4: "d", 5: "e"}
    base = lake.path / "warehouse" if kind == "iceberg" else lake.path
    files = (pa.parquet.read_table(base / name, partitioning=None).to_pylist() for name in lake.files())
    found = sorted((line for lines in files for line in lines if line["id"] > 2), key=lambda line: line["id"])
    assert found == others[1:]


def test_instants_of_any_year_that_spark_has_written_are_read_with_their_values(make, kind):
    """Spark writes timestamps as INT96, also when it compacts a table."""
    schema = pa.schema([*KEYED, ("at", pa.timestamp("us", "UTC"))])
    lake, pipeline = make(schema), Pipeline(schema)
    years = [1, 1582, 1677, 2026, 2262, 9999]
    others = [{"id": year, "v": "a", "at": dt.datetime(year, 1, 3, 0, 0, 0, 1, dt.timezone.utc)} for year in years]
    if kind == "delta":
        lake.path.mkdir()
        pa.parquet.write_table(
            pa.Table.from_pylist(others, schema), lake.path / "spark.parquet", use_deprecated_int96_timestamps=True
        )
        convert_to_deltalake(lake.path)
    else:
        write(replace(lake.sink, mode="append", key=()), Pipeline(schema, "others"), others)
        (name,) = lake.files()
        file = lake.path / "warehouse" / name
        pa.parquet.write_table(
            pa.parquet.read_table(file, partitioning=None), file, use_deprecated_int96_timestamps=True, store_schema=False
        )
    new = {"id": 2026, "v": "new", "at": None}
    write(lake.sink, pipeline, [new])
    found = sorted(lake.read("id", "v", "at"), key=lambda line: line["id"])
    assert found == [new if line["id"] == 2026 else line for line in others]


def test_mistakes_are_reported_before_anything_runs(lake):
    shape = Shape("p", pa.schema([("id", pa.int64()), ("ratio", pa.float64()), ("__connect_offset", pa.int64())]))
    assert names(replace(lake.sink, key=["nobody", "ratio"]).validate(shape)) == {"sink.key", "schema"}
    assert names(replace(lake.sink, key=[]).validate(Shape("p", KEYED))) == {"sink.key"}
    assert names(replace(lake.sink, mode="append", delete_enabled=True).validate(Shape("p", KEYED))) == {
        "sink.key",
        "sink.delete_enabled",
    }


def test_a_table_of_appends_may_be_upserted_from_a_window_on(make):
    lake, pipeline = make(), Pipeline(KEYED)
    append = replace(lake.sink, mode="append", key=())
    write(append, pipeline, [{"id": 1, "v": "a"}, {"id": 1, "v": "b"}, {"id": 2, "v": "c"}])
    write(lake.sink, pipeline, [{"id": 1, "v": "d"}])
    assert Counter(line["id"] for line in lake.read()) == {1: 1, 2: 1}
