"""Append, upsert and delete; rows that the target refuses; the table and the record of windows."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from airflow_kafka_spark.errors import KafkaSparkError, SinkRejected, WindowConflict
from airflow_kafka_spark.sinks.postgres.sink import PostgresSink
from airflow_kafka_spark.testing import EmbeddedPostgres
from airflow_kafka_spark.testing._processes import wait_until
from tests.sinks.attempt import apply, write_all
from tests.sinks.oracle import same_multiset
from tests.sinks.postgres.kit import DEAD, EVENTS_OF_KEYS, Pipeline, Place, dead, new_place, write

ATOMIC = ["window", "split"]
UTC = dt.timezone.utc


# --- upsert ---------------------------------------------------------------------------------------------------------------

KEYED = pa.schema([("id", pa.int64()), ("v", pa.string())])
UPSERT = {"mode": "upsert", "key": ["id"], "auto_create": True}


def rows_by_id(place: Place) -> dict[int, Any]:
    return dict(place.rows("SELECT id, v FROM t"))


@pytest.mark.parametrize("atomic", ATOMIC)
def test_the_last_offset_of_a_key_wins_within_and_between_windows(place: Place, driver: str, atomic: str):
    sink, pipeline = place.sink(**UPSERT, atomic=atomic), Pipeline(KEYED)
    first = write(sink, pipeline, [{"id": i % 3, "v": f"a{i}"} for i in range(10)], [{"id": 7, "v": "x"}])
    assert rows_by_id(place) == {0: "a9", 1: "a7", 2: "a8", 7: "x"}
    assert first.written == 4
    second = write(sink, pipeline, [{"id": 1, "v": "b"}, {"id": 9, "v": None}], [])
    assert rows_by_id(place) == {0: "a9", 1: "b", 2: "a8", 7: "x", 9: None}
    assert second.written == 2


def test_a_key_that_another_session_inserts_while_the_window_commits_is_updated(place: Place):
    """MERGE then fails with a unique violation, and ON CONFLICT has to write."""
    place.execute("CREATE TABLE t (id bigint PRIMARY KEY, v text)")
    with place.server.connect() as other, ThreadPoolExecutor(1) as pool:
        other.execute(f"INSERT INTO {place.quoted}.t VALUES (2, 'theirs')".encode())
        writing = pool.submit(write, place.sink(**UPSERT), Pipeline(KEYED), [{"id": i, "v": "ours"} for i in range(4)])
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'transactionid' "
            "AND application_name LIKE 'airflow-kafka-spark %'"
        )
        assert wait_until(lambda: writing.done() or bool(place.one(waiting)), 180)
        assert not writing.done(), writing.exception()
        other.commit()
        assert writing.result().written == 4
    assert rows_by_id(place) == dict.fromkeys(range(4), "ours")


@pytest.mark.parametrize(
    "more, left",
    [
        ("CREATE TABLE heirs () INHERITS (t); INSERT INTO heirs VALUES (1, 'of an heir')", {1: "new", 2: "new"}),
        ("CREATE RULE keeps AS ON DELETE TO t DO INSTEAD NOTHING", {1: "new", 2: "new"}),
        (
            "INSERT INTO t VALUES (1, 'old'); CREATE FUNCTION shout() RETURNS trigger LANGUAGE plpgsql AS "
            "'BEGIN NEW.v := upper(NEW.v); RETURN NEW; END'; "
            "CREATE TRIGGER shouts BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION shout()",
            {1: "NEW", 2: "NEW"},
        ),
    ],
    ids=["heirs", "rule", "trigger"],
)
def test_an_upsert_writes_as_on_conflict_does_where_merge_does_not(place: Place, more: str, left: dict[int, str]):
    place.execute(f"CREATE TABLE t (id bigint PRIMARY KEY, v text); {more}")
    assert write(place.sink(**UPSERT), Pipeline(KEYED), [{"id": i, "v": "new"} for i in (1, 2)]).written == 2
    assert dict(place.rows("SELECT id, v FROM ONLY t")) == left
    assert place.rows("SELECT v FROM t EXCEPT SELECT v FROM ONLY t") == ([("of an heir",)] if "heirs" in more else [])


def test_pieces_of_one_partition_keep_the_order_of_their_offsets(place: Place):
    """Splits are numbered across partitions, and a partition may have several."""
    job = Pipeline(KEYED).job([{"id": 1, "v": "first"}], [{"id": 2, "v": "x"}], [{"id": 1, "v": "last"}])
    ranges = [replace(job.splits[0].range), job.splits[1].range, replace(job.splits[0].range, start=1, end=2)]
    splits = tuple(replace(split, range=r) for split, r in zip(job.splits, ranges, strict=True))
    rows = {0: job.rows[2], 1: job.rows[1], 2: job.rows[0]}
    # Split 0 is given the later half: [1, 2) with the last value; split 2 the earlier one.
    splits = (replace(splits[0], range=ranges[2]), splits[1], replace(splits[2], range=ranges[0]))
    for index, at in ((0, 1), (2, 0)):
        object.__setattr__(rows[index][0], "offsets", pa.array([at], pa.int64()))
    window = replace(job.window, ranges=(replace(ranges[0], end=2), ranges[1]))
    apply(place.sink(**UPSERT), replace(job, window=window, splits=splits, rows=rows))
    assert rows_by_id(place) == {1: "last", 2: "x"}


def test_between_partitions_the_higher_one_wins(place: Place):
    write(place.sink(**UPSERT), Pipeline(KEYED), [{"id": 1, "v": "low"}] * 5, [{"id": 1, "v": "high"}])
    assert rows_by_id(place) == {1: "high"}


@pytest.mark.parametrize("atomic", ATOMIC)
def test_a_table_of_nothing_but_key_columns(place: Place, atomic: str):
    schema = pa.schema([("a", pa.int64()), ("b", pa.string())])
    sink, pipeline = place.sink(mode="upsert", key=["b", "a"], auto_create=True, atomic=atomic), Pipeline(schema)
    assert write(sink, pipeline, [{"a": i % 2, "b": "x"} for i in range(6)]).written == 2
    assert write(sink, pipeline, [{"a": i % 3, "b": "x"} for i in range(6)]).written == 1
    assert sorted(place.rows("SELECT a, b FROM t")) == [(0, "x"), (1, "x"), (2, "x")]


@pytest.mark.parametrize(
    "kind, arrow, values, left",
    [
        ("char(5)", pa.string(), ["a", "a ", "b"], 2),
        ("uuid", pa.string(), ["A0EEBC99-9C0B-4EF8-BB6D-6BB9BD380A11", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"], 1),
        ("timestamp(3)", pa.timestamp("us"), [dt.datetime(2026, 1, 1, 0, 0, 0, us) for us in (1000, 1001, 2000)], 2),
        ("numeric", pa.decimal128(12, 2), [Decimal("1.00"), Decimal("1.10")], 2),
        ("double precision", pa.float64(), [0.0, -0.0, math.nan, -math.nan], 2),
        ("smallint", pa.int64(), [1, 2, 1], 2),
        ("jsonb", pa.string(), ['{"a":1,"b":2}', '{"b": 2, "a": 1}'], 1),
        ('text COLLATE "nobody_minds_case"', pa.string(), ["Straße", "STRASSE", "strasse", "x"], 2),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("atomic", ATOMIC)
def test_keys_that_are_equal_in_the_target_are_one_key(place: Place, kind: str, arrow: Any, values: list, left: int, atomic: str):
    if "COLLATE" in kind:
        try:
            place.execute(
                "CREATE COLLATION nobody_minds_case (provider = icu, locale = 'und-u-ks-level1', deterministic = false)"
            )
        except Exception:
            pytest.skip("this server has no ICU")
    place.execute(f"CREATE TABLE t (k {kind} PRIMARY KEY, n bigint)")
    pipeline = Pipeline(pa.schema([("k", arrow), ("n", pa.int64())]))
    sink = place.sink(mode="upsert", key=["k"], atomic=atomic)
    assert sink.validate(pipeline.shape) == []
    assert write(sink, pipeline, [{"k": k, "n": n} for n, k in enumerate(values)]).written == left
    assert place.one("SELECT count(*) FROM t") == left
    assert place.one("SELECT max(n) FROM t") == len(values) - 1
    assert write(sink, pipeline, [{"k": k, "n": 100 + n} for n, k in enumerate(values)]).written == left
    assert place.one("SELECT count(*) FROM t") == left


@pytest.mark.parametrize("atomic", ATOMIC)
def test_a_null_in_the_key_is_refused_with_count_and_offsets(place: Place, atomic: str):
    sink, pipeline = place.sink(**UPSERT, atomic=atomic), Pipeline(KEYED)
    write(sink, pipeline, [{"id": 1, "v": "a"}])
    with pytest.raises(SinkRejected) as caught:
        write(sink, pipeline, [{"id": 2}, {"id": None}, {"id": 3}, *[{"id": None}] * 9])
    assert "10 records" in str(caught.value) and "`id` is null" in str(caught.value)
    assert [(s.topic, s.partition, s.offset) for s in caught.value.samples] == [("orders", 0, o) for o in (2, 4, 5, 6, 7)]
    assert not caught.value.retryable
    assert rows_by_id(place) == {1: "a"}


# --- deletes --------------------------------------------------------------------------------------------------------------

DELETES = {**UPSERT, "delete_enabled": True}


@pytest.mark.parametrize("atomic", ATOMIC)
@pytest.mark.parametrize("offsets", [False, True], ids=["", "offset columns"])
def test_a_tombstone_deletes_and_the_last_event_of_a_key_wins(place: Place, driver: str, atomic: str, offsets: bool):
    sink, pipeline = place.sink(**DELETES, atomic=atomic, offset_columns=offsets), Pipeline(KEYED, tombstones=True)
    assert sink.takes_tombstones
    assert write(sink, pipeline, [{"id": i, "v": "old"} for i in range(6)]).deleted == 0
    applied = write(sink, pipeline, EVENTS_OF_KEYS, [])
    assert rows_by_id(place) == {2: "again", 3: "b", 4: "old", 5: "old", 8: "x"}
    assert (applied.written, applied.deleted) == (3, 2)
    assert write(sink, pipeline, [dead(i) for i in (2, 3, 4, 5, 8, 8)]).deleted == 5
    assert rows_by_id(place) == {}
    assert sink.find_last_applied("dag.task").deleted == 5


def test_deletes_by_a_key_of_several_columns_and_of_the_target_s_own_types(place: Place):
    place.execute("CREATE TABLE t (a uuid, b char(4), v text, PRIMARY KEY (a, b))")
    schema = pa.schema([("a", pa.string()), ("b", pa.string()), ("v", pa.string())])
    one, two = "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a12"
    sink = place.sink(mode="upsert", key=["a", "b"], delete_enabled=True)
    pipeline = Pipeline(schema, tombstones=True)
    write(sink, pipeline, [{"a": a, "b": b, "v": "x"} for a in (one, two) for b in ("x", "y")])
    applied = write(sink, pipeline, [{"a": one.upper(), "b": "x  ", DEAD: True}, {"a": two, "b": "y", "v": "new"}])
    assert (applied.written, applied.deleted) == (1, 1)
    assert sorted(place.rows("SELECT a::text, rtrim(b), v FROM t")) == [(one, "y", "x"), (two, "x", "x"), (two, "y", "new")]


@pytest.mark.parametrize("atomic", ATOMIC)
def test_older_offsets_never_overwrite_newer_ones_where_the_table_has_offset_columns(place: Place, atomic: str):
    """A second pipeline begins with the first offsets and reads the same records again."""
    sink = place.sink(**DELETES, offset_columns=True, atomic=atomic)
    history = [{"id": 1, "v": "a"}, {"id": 2, "v": "b"}, {"id": 1, "v": "c"}, {"id": 3, "v": "d"}, dead(2), {"id": 2, "v": "e"}]
    write(sink, Pipeline(KEYED, tombstones=True), history)
    assert rows_by_id(place) == {1: "c", 2: "e", 3: "d"}
    replay = Pipeline(KEYED, "another", tombstones=True)
    applied = write(sink, replay, history[:2])
    assert applied.written == 0
    assert write(sink, replay, history[2:5]).deleted == 0
    assert rows_by_id(place) == {1: "c", 2: "e", 3: "d"}
    assert dict(place.rows('SELECT id, "__connect_offset" FROM t')) == {1: 2, 2: 5, 3: 3}
    # A record that the first pipeline never read is written, and so is another topic's record: offsets of topics are not
    # comparable.
    assert write(sink, replay, [history[5], {"id": 3, "v": "new"}]).written == 1
    write(sink, Pipeline(KEYED, "third", tombstones=True, topic="other"), [{"id": 1, "v": "other"}])
    assert rows_by_id(place) == {1: "other", 2: "e", 3: "new"}


@pytest.mark.parametrize("atomic", ATOMIC)
def test_offset_columns_are_filled_where_the_table_has_them(place: Place, driver: str, atomic: str):
    place.execute('CREATE TABLE t (id bigint, v text, "__connect_offset" bigint, "__connect_partition" bigint)')
    write(place.sink(atomic=atomic), Pipeline(KEYED), [{"id": 1}, {"id": 2}], [{"id": 3}])
    assert sorted(place.rows('SELECT id, "__connect_partition", "__connect_offset" FROM t')) == [(1, 0, 0), (2, 0, 1), (3, 1, 0)]


# --- what the target refuses -------------------------------------------------------------------------------------------------

MISFITS = [
    ("varchar(3)", pa.string(), "abcd", "column `bad`"),
    ("smallint", pa.int64(), 40_000, "column `bad`"),
    ("numeric(4,2)", pa.decimal128(12, 2), Decimal("100.00"), "column `bad`"),
    ("text NOT NULL", pa.string(), None, 'column "bad"'),
    ("uuid", pa.string(), "no uuid", "column `bad`"),
    ("jsonb", pa.string(), "{", "column `bad`"),
    ("jsonb", pa.struct([("a", pa.string())]), {"a": "\x00"}, "column `bad`"),
    ("text CHECK (bad <> 'x')", pa.string(), "x", "t_bad_check"),
    ("bigint UNIQUE", pa.int64(), 1, "upsert"),
    ("text", pa.string(), "nul \x00 inside", "bad"),
    ("timestamp", pa.timestamp("s"), 2**50, "bad"),
]


# Every misfit where tasks merge early, and one of each kind of error (of the stage, of the table's rules) elsewhere.
CASES = [
    *(("window", "overlap", *misfit) for misfit in MISFITS),
    *((atomic, "after", *MISFITS[n]) for atomic in ATOMIC for n in (0, 7, 8)),
]


@pytest.mark.parametrize("atomic, merge, kind, arrow, value, named", CASES, ids=[f"{c[0]} {c[1]} {c[2]}" for c in CASES])
def test_a_value_that_does_not_fit_fails_the_window(
    place: Place, driver: str, atomic: str, merge: str, kind: str, arrow: Any, value: Any, named: str
):
    place.execute(f"CREATE TABLE t (id bigint, bad {kind})")
    schema = pa.schema([("id", pa.int64()), ("bad", arrow)])
    sink, pipeline = place.sink(atomic=atomic, merge=merge), Pipeline(schema)
    fine = {"id": 1, "bad": "1" if kind == "text NOT NULL" else None}
    assert sink.validate(pipeline.shape) == []
    write(sink, pipeline, [{**fine, "id": 0}])
    with pytest.raises(SinkRejected) as caught:
        write(sink, pipeline, [fine] * 50 + [{"id": 2, "bad": value}] * (2 if "UNIQUE" in kind else 1))
    assert not caught.value.retryable
    if atomic == "window" or named == "bad":
        assert named in str(caught.value), caught.value
    assert place.rows("SELECT id FROM t") == [(0,)]
    assert sink.find_last_applied("dag.task").number == 1
    assert [name for name in place.tables() if "stage" in name] == []


def test_a_value_refused_by_copy_is_named_by_its_offset(place: Place):
    sink, pipeline = place.sink(auto_create=True), Pipeline(KEYED)
    write(sink, pipeline, [{"id": i} for i in range(10)])
    with pytest.raises(SinkRejected) as caught:
        apply(sink, pipeline.job([{"id": 1, "v": "nul \x00" if i == 777 else "fine"} for i in range(1000)], batch_rows=100))
    (sample,) = caught.value.samples
    assert (sample.topic, sample.partition, sample.offset) == ("orders", 0, 787)


def test_rows_a_trigger_swallows_fail_the_window(place: Place):
    """Counted twice: what was read has to be in the table."""
    place.execute("CREATE TABLE t (id bigint, v text)")
    place.execute(
        "CREATE FUNCTION drop_odd() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN IF NEW.id = 7 THEN RETURN NULL; END IF; RETURN NEW; END'"
    )
    place.execute("CREATE TRIGGER swallows BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION drop_odd()")
    for atomic in ATOMIC:
        sink, pipeline = place.sink(atomic=atomic), Pipeline(KEYED, atomic)
        write(sink, pipeline, [{"id": i} for i in range(3)])
        with pytest.raises(KafkaSparkError):
            write(sink, pipeline, [{"id": i} for i in range(10)])
    assert sorted(place.rows("SELECT id FROM t")) == [(0,), (0,), (1,), (1,), (2,), (2,)]


# --- the table and the record ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("atomic", ATOMIC)
def test_defaults_identities_and_generated_columns_fill_themselves(place: Place, atomic: str):
    place.execute(
        "CREATE TABLE t (n bigint GENERATED ALWAYS AS IDENTITY, id bigint, v text, seen timestamptz NOT NULL DEFAULT now(), "
        "twice bigint GENERATED ALWAYS AS (id * 2) STORED, serial bigserial)"
    )
    pipeline = Pipeline(KEYED)
    sink = place.sink(atomic=atomic)
    assert sink.validate(pipeline.shape) == []
    write(sink, pipeline, [{"id": i} for i in range(5)])
    assert sorted(place.rows("SELECT id, twice FROM t WHERE n > 0 AND serial > 0 AND seen IS NOT NULL")) == [
        (i, 2 * i) for i in range(5)
    ]


@pytest.mark.parametrize(
    "options", [{}, {"atomic": "split"}, {"mode": "upsert", "key": ["id"]}], ids=["append", "split", "upsert"]
)
def test_partitioned_tables(place: Place, options: dict[str, Any]):
    place.execute("CREATE TABLE t (id bigint PRIMARY KEY, v text) PARTITION BY HASH (id)")
    for n in range(3):
        place.execute(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES WITH (MODULUS 3, REMAINDER {n})")
    sink, pipeline = place.sink(**options), Pipeline(KEYED)
    assert sink.validate(pipeline.shape) == []
    expected = [{"id": i, "v": str(i)} for i in range(100)]
    write(sink, pipeline, expected[:50], expected[50:])
    assert same_multiset(expected, ({"id": i, "v": v} for i, v in place.rows("SELECT id, v FROM t"))) == 100


def test_the_record_of_windows_holds_the_applied_windows(place: Place):
    sink, pipeline = place.sink(auto_create=True, windows_table="our windows"), Pipeline(KEYED)
    write(sink, pipeline, [{"id": 1}, {"id": 2}], [])
    write(sink, pipeline, [{"id": 3}], [{"id": 4}])
    facts = "pipeline, number, ranges, written, deleted, target, run, applied_at > now() - interval '1 minute'"
    query = f'SELECT {facts} FROM "our windows" ORDER BY number'
    target = f'{place.quoted}."t"'
    assert place.rows(query) == [
        ("dag.task", 1, [["orders", 0, 0, 2], ["orders", 1, 0, 0]], 2, 0, target, "dag/run/task", True),
        ("dag.task", 2, [["orders", 0, 2, 3], ["orders", 1, 0, 1]], 2, 0, target, "dag/run/task", True),
    ]


def test_markers_of_older_windows_are_deleted_by_the_next_one(place: Place):
    sink, pipeline = place.sink(auto_create=True, atomic="split", splits_table="markers"), Pipeline(KEYED)
    for _ in range(3):
        write(sink, pipeline, [{"id": 1}], [{"id": 2}])
    assert Counter(number for (number,) in place.rows("SELECT number FROM markers")) == {3: 2}


def test_a_topic_that_was_created_again_starts_anew(place: Place):
    sink = place.sink(auto_create=True)
    first, again = Pipeline(KEYED), Pipeline(KEYED)
    job = first.job([{"id": 1}, {"id": 2}])
    apply(sink, replace(job, window=replace(job.window, topic_ids={"orders": "old"})))
    job = again.job([{"id": 3}])
    with pytest.raises(WindowConflict):
        apply(sink, replace(job, window=replace(job.window, number=2, topic_ids={"orders": "old"})))
    apply(sink, replace(job, window=replace(job.window, number=2, topic_ids={"orders": "new"})))
    assert sorted(place.rows("SELECT id FROM t")) == [(1,), (2,), (3,)]


def test_a_table_without_a_schema_is_the_one_the_server_finds(place: Place, postgres: EmbeddedPostgres):
    options = {"options": "-c search_path=" + place.quoted.replace(" ", "\\ ")}
    place.connect_with(json.dumps({**json.loads(postgres.connection_json()), "extra": options}))
    place.execute("CREATE TABLE t (id bigint, v text)")
    sink = PostgresSink(place.conn_id, "t")
    pipeline = Pipeline(KEYED)
    assert sink.validate(pipeline.shape) == []
    write(sink, pipeline, [{"id": 1}])
    assert place.one("SELECT count(*) FROM t") == 1
    assert "airflow_windows" in place.tables()
    assert sink.uri.endswith("/public/t")


def test_stages_may_live_in_a_schema_of_their_own(place: Place, postgres: EmbeddedPostgres, unique: Callable[[str], str]):
    with new_place(postgres, unique("stages")) as other:
        sink, pipeline = place.sink(auto_create=True, stage_schema=other.schema), Pipeline(KEYED)
        job = pipeline.job([{"id": 1}])
        with sink.begin(job.window, job.splits, job.shape) as writer:
            results = write_all(writer, job)
            assert len(other.tables()) == 2 and all(name.startswith("airflow_stage_") for name in other.tables())
            assert place.tables() == ["airflow_windows", "t"]
            writer.commit(results)
        assert other.tables() == []
        assert place.one("SELECT count(*) FROM t") == 1


def test_many_pipelines_create_the_same_table_at_once(place: Place):
    """IF NOT EXISTS alone is a race in PostgreSQL."""
    sink = place.sink(auto_create=True, lock_timeout=30)

    def first_window(n: int) -> int:
        return write(sink, Pipeline(KEYED, f"pipeline {n}"), [{"id": n}]).written

    with ThreadPoolExecutor(6) as pool:
        assert sum(pool.map(first_window, range(6))) == 6
    assert sorted(place.rows("SELECT id FROM t")) == [(n,) for n in range(6)]
