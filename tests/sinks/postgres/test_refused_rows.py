"""Rows that the table refuses are found one by one and left out; the other rows are taken, each exactly once."""

from __future__ import annotations

import datetime as dt
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from airflow_kafka_spark.errors import SinkRejected
from airflow_kafka_spark.sinks.base import WindowWriter
from airflow_kafka_spark.sinks.postgres.sink import PostgresSink
from airflow_kafka_spark.sinks.postgres.tasks.write import find_unstorable_rows
from airflow_kafka_spark.windows.model import Applied, BadRecord, SplitResult
from tests.sinks.attempt import apply, travelled, write_all, write_split
from tests.sinks.feed import Job
from tests.sinks.postgres.kit import DEAD, Pipeline, Place
from tests.support.waiting import eventually

ROW = pa.schema([("id", pa.int64()), ("v", pa.string()), ("n", pa.int64())])


def take(sink: PostgresSink, pipeline: Pipeline, *partitions: Sequence[Mapping[str, Any]]) -> tuple[Applied, list[BadRecord]]:
    """Apply the next window like an operator that tolerates bad records."""
    job = pipeline.job(*partitions, batch_rows=7)
    with sink.begin(job.window, job.splits, replace(job.shape, tolerates=True)) as writer:
        return finish(writer, job, write_all(writer, job))


def finish(writer: WindowWriter, job: Job, results: list[SplitResult]) -> tuple[Applied, list[BadRecord]]:
    """Do the work of an operator after its Spark job."""
    again = {
        s.index: write_split(travelled(writer.make_split_writer()), s, job.rows[s.index]) for s in writer.list_deferred(results)
    }
    results = [again.get(result.index, result) for result in results]
    bad = list(writer.find_refused_records(results))
    lost = {result.index: sum(b.partition == result.index for b in bad) for result in results}
    less = [replace(r, rejected=lost[r.index], token={**r.token, "rows": r.token["rows"] - lost[r.index]}) for r in results]
    return writer.commit(less), bad


def offsets(bad: Sequence[BadRecord]) -> set[tuple[int, int]]:
    assert {b.stage for b in bad} <= {"TASK_PUT"}
    return {(b.partition, b.offset) for b in bad}


@pytest.mark.parametrize("options", [{}, {"merge": "after"}, {"atomic": "split"}], ids=["overlap", "after", "split"])
def test_each_kind_of_refusal_is_found_and_the_other_rows_are_appended_once(place: Place, options: Any):
    place.execute("CREATE TABLE parent (id bigint PRIMARY KEY); INSERT INTO parent SELECT generate_series(0, 199)")
    place.execute("CREATE DOMAIN positive AS integer CHECK (VALUE > 0)")
    place.execute(
        "CREATE TABLE t (id bigint UNIQUE DEFERRABLE INITIALLY DEFERRED REFERENCES parent DEFERRABLE INITIALLY DEFERRED, "
        "v varchar(5) NOT NULL CHECK (v <> 'bad'), n positive)"
    )
    place.execute("INSERT INTO t VALUES (199, 'there', 1)")
    rows = [[{"id": p * 50 + i, "v": f"v{i}", "n": i + 1} for i in range(50)] for p in range(4)]
    wrong = {
        (0, 3): {"v": "bad"}, (0, 4): {"v": None}, (0, 49): {"n": 2**31}, (1, 0): {"v": "too long"},
        (1, 20): {"id": 60}, (2, 30): {"n": -1}, (2, 31): {"id": 10_000}, (3, 49): {},
    }  # fmt: skip
    for (partition, at), change in wrong.items():
        rows[partition][at] = {**rows[partition][at], **change}
    applied, bad = take(place.sink(**options), Pipeline(ROW), *rows)
    assert offsets(bad) == set(wrong)
    why = {(b.partition, b.offset): b.reason for b in bad}
    for at, says in {(0, 3): "t_v_check", (0, 4): "`v`", (0, 49): "integer out of range", (2, 31): "parent"}.items():
        assert says in why[at] or says.strip("`") in why[at]
    good = [(r["id"], r["v"], r["n"]) for p, part in enumerate(rows) for i, r in enumerate(part) if (p, i) not in wrong]
    assert sorted(place.rows("SELECT id, v, n FROM t")) == sorted([*good, (199, "there", 1)])
    assert (applied.written, place.one("SELECT written FROM airflow_windows")) == (192, 192)
    assert not [name for name in place.tables() if name.startswith("airflow_stage")]


def test_rows_that_refer_to_later_rows_of_the_same_table_are_not_refused_because_of_others(place: Place):
    place.execute("CREATE TABLE t (id bigint PRIMARY KEY, v text, n bigint REFERENCES t)")
    rows = [{"id": i, "n": i + 1 if i < 39 else None} for i in range(40)]
    rows[20] = {"id": 20, "v": "child of nobody", "n": 777}
    _, bad = take(place.sink(), Pipeline(ROW), rows)
    # Its parent is refused, so are those that lead to it.
    assert offsets(bad) == {(0, at) for at in range(21)}
    _, bad = take(
        place.sink(),
        Pipeline(ROW, "other"),
        [{"id": 100 + i, "n": 101 + i if i < 9 else 5000 * (i == 11) or None} for i in range(12)],
    )
    assert offsets(bad) == {(0, 11)}


@pytest.mark.parametrize("atomic", ["window", "split"])
def test_of_a_key_the_last_row_counts_that_is_not_refused(place: Place, atomic: str):
    place.execute("CREATE TABLE t (id bigint PRIMARY KEY, v text CHECK (v <> 'bad'), n smallint UNIQUE)")
    place.execute("INSERT INTO t VALUES (1, 'old', 1), (2, 'old', 2), (3, 'old', 3), (4, 'old', 4)")
    pipeline = Pipeline(ROW, tombstones=True)
    sink = place.sink(mode="upsert", key=["id"], delete_enabled=True, atomic=atomic)
    rows = [
        {"id": 1, "v": "first", "n": 1}, {"id": 1, "v": "second", "n": 10}, {"id": 1, "v": "bad", "n": 11},
        {"id": 2, DEAD: True}, {"id": 2, "v": "bad"},
        {"id": 3, "v": "bad"}, {"id": 3, DEAD: True},
        {"id": 4, "v": "x", "n": 99_999}, {"id": 5, "v": "new", "n": 50},
    ]  # fmt: skip
    applied, bad = take(sink, pipeline, rows, [{"id": 6, "v": "also", "n": 50}, {"id": 7, "v": "fine", "n": 70}])
    # Of the two rows with 50 that of the first partition; or that of the split that commits by itself.
    also = (5, "new", 50) if atomic == "window" else (6, "also", 50)
    assert offsets(bad) == {(0, 2), (0, 4), (0, 5), (0, 7), (1, 0) if atomic == "window" else (0, 8)}
    assert place.rows("SELECT * FROM t ORDER BY id") == [(1, "second", 10), (4, "old", 4), also, (7, "fine", 70)]
    assert (applied.written, applied.deleted) == (3, 2)


def test_a_window_without_refusals_is_taken_as_ever(place: Place):
    place.execute("CREATE TABLE t (id bigint PRIMARY KEY, v text, n bigint)")
    for options in ({}, {"mode": "upsert", "key": ["id"]}, {"atomic": "split"}):
        applied, bad = take(place.sink(**options), Pipeline(ROW, str(options)), [{"id": len(str(options))}], [])
        assert (bad, applied.written) == ([], 1)


def test_more_refusals_than_are_looked_for_fail_the_window_with_what_the_table_says(place: Place, monkeypatch):
    from airflow_kafka_spark.sinks.postgres import writer

    monkeypatch.setattr(writer, "MAX_REFUSED", 5)
    place.execute("CREATE TABLE t (id bigint, v text CONSTRAINT not_so CHECK (v <> 'bad'), n bigint)")
    for options in ({"merge": "after"}, {}, {"atomic": "split"}):
        with pytest.raises(SinkRejected, match="not_so"):
            take(place.sink(**options), Pipeline(ROW), [{"id": i, "v": "bad"} for i in range(9)])
        assert place.one("SELECT count(*) FROM t") == 0


RULE = """
CREATE TABLE t (id bigint, v text, n bigint);
CREATE FUNCTION rule() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
IF NEW.n > 100 THEN RAISE EXCEPTION 'too large: %', NEW.n; END IF;
IF NEW.n < 0 THEN RAISE EXCEPTION 'too small' USING ERRCODE = 'P0777'; END IF;
RETURN NEW; END $$
"""


@pytest.mark.parametrize("atomic", ["window", "split"])
def test_what_a_trigger_raises_by_itself_refuses_the_row_that_brings_it_about(place: Place, driver: str, atomic: str):
    place.execute(RULE)
    # Behind the rows COPY may write the table itself, before them it may not.
    for number, when in enumerate(("BEFORE", "AFTER"), start=1):
        place.execute(f"CREATE OR REPLACE TRIGGER rule {when} INSERT ON t FOR EACH ROW EXECUTE FUNCTION rule()")
        rows = [{"id": i, "n": i} for i in range(103)]
        _, bad = take(place.sink(atomic=atomic), Pipeline(ROW, when), rows, [{"id": 1, "n": -1}], [{"id": 1, "n": 5}])
        assert offsets(bad) == {(0, 101), (0, 102), (1, 0)}
        assert "too large: 101" in bad[0].reason and "too small" in bad[2].reason
        assert place.one("SELECT count(*) FROM t") == 102 * number


@pytest.mark.parametrize("options", [{}, {"atomic": "split"}, {"mode": "upsert", "key": ["id"]}], ids=str)
def test_what_a_trigger_raises_for_every_statement_is_not_about_a_row(place: Place, options: Any):
    place.execute(
        RULE.replace("NEW.n > 100", "TG_LEVEL = 'STATEMENT'").replace("NEW.n;", "'closed';") + "; CREATE UNIQUE INDEX ON t (id)"
    )
    place.execute("CREATE TRIGGER rule BEFORE INSERT ON t FOR EACH STATEMENT EXECUTE FUNCTION rule()")
    with pytest.raises(SinkRejected, match="closed"):
        take(place.sink(**options), Pipeline(ROW), [{"id": 1}, {"id": 2}])
    assert place.one("SELECT count(*) FROM t") == 0


def test_of_splits_that_exclude_each_other_in_both_directions_one_commits_and_the_other_waits_for_it(place: Place):
    place.execute("CREATE TABLE t (id bigint PRIMARY KEY, v text, n bigint)")
    here, there = ([1, *range(start, start + 2500), 2] for start in (10, 3000))
    job = Pipeline(ROW).job([{"id": i} for i in here], [{"id": i} for i in reversed(there)], batch_rows=100)
    with place.sink(atomic="split").begin(job.window, job.splits, replace(job.shape, tolerates=True)) as writer:
        with ThreadPoolExecutor() as pool:
            tasks = [pool.submit(write_split, travelled(writer.make_split_writer()), s, job.rows[s.index]) for s in job.splits]
        results = [task.result() for task in tasks]
        taken = place.one("SELECT count(*) FROM t")
        applied, bad = finish(writer, job, results)
    assert (taken, len({b.partition for b in bad}), len(bad), applied.written) == (2502, 1, 2, 5002)


def test_no_task_commits_a_split_any_more_of_which_rows_were_refused(place: Place):
    place.execute("CREATE TABLE t (id bigint, v text CONSTRAINT rule CHECK (v <> 'bad'), n bigint)")
    sink, job = place.sink(atomic="split"), Pipeline(ROW).job([{"id": 1}], [{"id": 2, "v": "bad"}, {"id": 3}])
    shape = replace(job.shape, tolerates=True)
    with sink.begin(job.window, job.splits, shape) as writer:
        late = travelled(writer.make_split_writer())
        results = write_all(writer, job)
        place.execute("ALTER TABLE t DROP CONSTRAINT rule")
        assert write_split(late, job.splits[1], job.rows[1]) == results[1]
        assert place.rows("SELECT id FROM t") == [(1,)]
    # The next attempt finds that, and nothing is refused any more.
    with sink.begin(job.window, job.splits, shape) as writer:
        again = write_all(writer, job)
        assert again[1] == results[1]
        applied, bad = finish(writer, job, again)
    assert (bad, applied.written) == ([], 3) and sorted(place.rows("SELECT id FROM t")) == [(1,), (2,), (3,)]
    assert not [name for name in place.tables() if name.startswith("airflow_stage")]


def test_what_was_deferred_is_forgotten_by_an_attempt_that_does_not_tolerate_it_or_takes_windows_whole(place: Place):
    place.execute("CREATE TABLE t (id bigint, v text CONSTRAINT rule CHECK (v <> 'bad'), n bigint)")
    pipeline = Pipeline(ROW)
    for tolerates, atomic in ((False, "split"), (True, "window")):
        sink, job = place.sink(atomic="split"), pipeline.job([{"id": 2, "v": "bad"}])
        with sink.begin(job.window, job.splits, replace(job.shape, tolerates=True)) as writer:
            write_all(writer, job)
        with pytest.raises(SinkRejected, match="rule"):
            apply(sink, job)
        place.execute("ALTER TABLE t DROP CONSTRAINT rule")
        shape = replace(job.shape, tolerates=tolerates)
        with place.sink(atomic=atomic).begin(job.window, job.splits, shape) as writer:
            applied, bad = finish(writer, job, write_all(writer, job))
        assert (bad, applied.written) == ([], 1)
        place.execute("ALTER TABLE t ADD CONSTRAINT rule CHECK (v <> 'bad') NOT VALID")
    assert place.one("SELECT count(*) FROM t") == 2


def test_a_split_is_deferred_only_once_nothing_uses_its_session_any_more(place: Place):
    """If a session is closed in the middle of a COPY that waits for rows, the process may crash."""
    place.execute("CREATE TABLE t (id bigint, v text, n bigint)")
    job = Pipeline(ROW).job([{"id": i, "v": "x" * 1000, "n": i} for i in range(4000)], batch_rows=500)
    with place.sink(atomic="split").begin(job.window, job.splits, replace(job.shape, tolerates=True)) as writer:
        task = travelled(writer.make_split_writer())
        task.open(job.splits[0])
        for rows in job.rows[0][:5]:
            task.write(rows)
        eventually(task.open_split.stream._waiting.empty)
        task.defer()
        assert not [thread for thread in threading.enumerate() if thread.name == "postgres-copy"]
        assert task.close()["deferred"]
    assert place.one("SELECT count(*) FROM t") == 0


def test_what_no_stage_can_hold_is_found_before_it_is_sent():
    kinds = {"v": pa.string(), "tags": pa.list_(pa.string()), "day": pa.date32(), "at": pa.timestamp("us", "UTC")}
    schema = pa.schema({"id": pa.int64(), **kinds})
    lines: list[dict[str, Any]] = [{"id": i, "v": "plain", "tags": ["a", None], "day": dt.date(1, 1, 1)} for i in range(8)]
    lines[1]["v"] = "a\x00b"
    lines[2]["tags"] = ["fine", "\x00"]
    lines[3]["id"] = None
    batch = pa.RecordBatch.from_pylist([*lines, {"id": 9, "tags": []}], schema)
    days = pa.array([-2_440_589 if i == 4 else -2_440_588 for i in range(9)], pa.int32()).cast(pa.date32())
    stamps = pa.array([-210_866_803_200_000_001 if i == 5 else None for i in range(9)], pa.int64()).cast(schema.field("at").type)
    batch = batch.set_column(3, "day", days).set_column(4, "at", stamps)
    found = find_unstorable_rows(batch, ["id"])
    assert set(found) == {1, 2, 3, 4, 5}
    assert "NUL" in found[1] and "`tags`" in found[2] and "part of the key" in found[3] and "4714 BC" in found[4]


def test_the_first_day_and_microsecond_that_are_let_through_are_those_of_postgres(place: Place):
    schema = pa.schema([("id", pa.int64()), ("day", pa.date32()), ("at", pa.timestamp("us"))])
    place.execute("CREATE TABLE t (id bigint, day date, at timestamp)")
    pipeline = Pipeline(schema)
    job = pipeline.job([{"id": 1}])
    (rows,) = job.rows[0]
    batch = rows.batch.set_column(1, "day", pa.array([-2_440_588], pa.int32()).cast(pa.date32()))
    batch = batch.set_column(2, "at", pa.array([-210_866_803_200_000_000]).cast(pa.timestamp("us")))
    assert find_unstorable_rows(batch, ()) == {}
    job.rows[0][0] = replace(rows, batch=batch)  # type: ignore[index]
    apply(place.sink(), job)
    assert place.rows("SELECT day::text, at::text FROM t") == [("4714-11-24 BC", "4714-11-24 00:00:00 BC")]
