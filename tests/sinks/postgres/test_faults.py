"""Faults of the PostgreSQL sink beyond the contract: lost answers, a crashed server, zombies, hostile settings."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import CountMismatch, Fenced, KafkaSparkError, SinkRejected, SinkUnavailable, WindowConflict
from airflow_kafka_spark.hooks.databases import SESSION_ENDED, Name
from airflow_kafka_spark.sinks.postgres import sql
from airflow_kafka_spark.sinks.postgres.attempt import make_stage_prefix
from airflow_kafka_spark.sinks.postgres.server import make_lock_key, make_pipeline_key
from airflow_kafka_spark.sinks.postgres.sink import PostgresSink
from airflow_kafka_spark.testing import EmbeddedPostgres
from airflow_kafka_spark.windows.codec import ranges_to_json
from airflow_kafka_spark.windows.model import Applied, OffsetRange, Split, SplitResult
from tests.sinks.attempt import Victim, apply, travelled, write_all, write_split
from tests.sinks.feed import Job, recut
from tests.sinks.oracle import same_multiset
from tests.sinks.postgres.kit import DEAD, Pipeline, Place, new_place, write
from tests.sinks.postgres.proxy import CommitLosingProxy

KEYED = pa.schema([("id", pa.int64()), ("v", pa.string())])
# One of each way in which rows get from a stage into the table. The contract suite has the plain append and the plain split.
WAYS: dict[str, dict[str, Any]] = {
    "append": {},
    "append after": {"merge": "after"},
    "delete": {"mode": "upsert", "key": ["id"], "delete_enabled": True},
    "split upsert": {"atomic": "split", "mode": "upsert", "key": ["id"], "offset_columns": True},
}
every_way = pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)


def lines(first: int, count: int) -> list[dict[str, Any]]:
    return [{"id": i, "v": f"value {i}"} for i in range(first, first + count)]


def pipeline(**options: Any) -> Pipeline:
    return Pipeline(KEYED, **options)


def check(place: Place, expected: list[dict[str, Any]]) -> None:
    assert same_multiset(expected, ({"id": i, "v": v} for i, v in place.rows("SELECT id, v FROM t"))) == len(expected)


# --- no answer to COMMIT ---


@pytest.fixture
def proxy(place: Place) -> Iterator[CommitLosingProxy]:
    server = place.server
    with CommitLosingProxy(server.host, server.port) as found:
        extra = {"sslmode": "disable", "gssencmode": "disable"}
        place.connect_with(json.dumps({**json.loads(server.connection_json()), "port": found.port, "extra": extra}))
        yield found


def arm_at(point: str, proxy: CommitLosingProxy, loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "reached", lambda reached: proxy.arm(loss) if reached == point else None)


@every_way
def test_a_commit_whose_answer_is_lost_is_found_by_its_window(
    place: Place, proxy: CommitLosingProxy, options: Any, monkeypatch: pytest.MonkeyPatch
):
    sink, orders = place.sink(auto_create=True, **options), pipeline()
    first, second = orders.job(lines(0, 20), lines(20, 5)), orders.job(lines(25, 10), [])
    apply(sink, first)
    with monkeypatch.context() as patch:
        arm_at("sink.in_transaction", proxy, "the answer", patch)
        applied = apply(sink, second)
    assert proxy.lost.is_set()
    assert applied == Applied("dag.task", 2, second.window.ranges, written=10)
    check(place, lines(0, 35))
    assert apply(sink, second) == applied
    check(place, lines(0, 35))


@every_way
def test_a_commit_that_never_arrived_is_an_error_and_the_retry_applies_the_window(
    place: Place, proxy: CommitLosingProxy, options: Any, monkeypatch: pytest.MonkeyPatch
):
    sink, orders = place.sink(auto_create=True, **options), pipeline()
    job = orders.job(lines(0, 20), lines(20, 5))
    with monkeypatch.context() as patch:
        arm_at("sink.in_transaction", proxy, "the request", patch)
        with pytest.raises(SinkUnavailable) as caught:
            apply(sink, job)
    assert proxy.lost.is_set() and caught.value.retryable
    assert sink.find_applied(job.window) is None
    assert apply(sink, job).written == 25
    check(place, lines(0, 25))


@pytest.mark.parametrize("loss", ["the answer", "the request"])
@every_way
def test_a_task_that_lost_its_commit_is_repeated_and_writes_its_split_once(
    place: Place, proxy: CommitLosingProxy, options: Any, loss: Any, driver: str
):
    sink, orders = place.sink(auto_create=True, **options), pipeline()
    job = orders.job(lines(0, 20), lines(20, 5))
    with sink.begin(job.window, job.splits, job.shape) as writer:
        task = travelled(writer.make_split_writer())
        task.open(job.splits[0])
        task.write(job.rows[0][0])
        proxy.arm(loss)
        if loss == "the answer":
            assert task.close()["rows"] == 20, "it looks whether it happened"
        else:
            with pytest.raises(SinkUnavailable):
                task.close()
            task.abort()
        assert proxy.lost.is_set()
        # Spark runs the task again either way.
        assert writer.commit(write_all(writer, job)).written == 25
    check(place, lines(0, 25))


# --- a server that crashes ---


@pytest.fixture(scope="module")
def fragile() -> Iterator[EmbeddedPostgres]:
    """A server that tests may kill."""
    with EmbeddedPostgres() as server:
        yield server


@pytest.mark.faults
@pytest.mark.parametrize("when", ["between two tasks", "before the commit", "in the transaction"])
@every_way
def test_a_server_that_crashes_loses_and_doubles_nothing(
    fragile: EmbeddedPostgres, unique: Callable[[str], str], options: Any, when: str, monkeypatch: pytest.MonkeyPatch
):
    place = Place(fragile, unique("crash"))
    sink, orders = place.sink(auto_create=True, **options), pipeline()
    first, job = orders.job(lines(0, 10), []), orders.job(lines(10, 20), lines(30, 5))
    apply(sink, first)

    def crash() -> None:
        fragile.kill()
        fragile.restart()

    def attempt() -> None:
        with sink.begin(job.window, job.splits, job.shape) as writer:
            results = [write_split(travelled(writer.make_split_writer()), job.splits[0], job.rows[0])]
            if when == "between two tasks":
                crash()
            results += [write_split(travelled(writer.make_split_writer()), job.splits[1], job.rows[1])]
            if when == "before the commit":
                crash()
            writer.commit(results)

    with monkeypatch.context() as patch:
        if when == "in the transaction":
            patch.setattr(faults, "reached", lambda point: crash() if point == "sink.in_transaction" else None)
        # Splits that committed themselves are still there, so a window may succeed.
        survives = options.get("atomic") == "split" and when != "in the transaction"
        with contextlib.nullcontext() if survives else pytest.raises(KafkaSparkError) as caught:
            attempt()
    if not survives:
        assert caught.value.retryable
    place.connection.close()
    place.connection = fragile.connect(autocommit=True)
    place.connection.execute(f"SET search_path = {place.quoted}".encode())
    if not survives:
        assert sink.find_applied(job.window) is None
    assert apply(sink, job).written == 25
    check(place, lines(0, 35))
    assert [name for name in place.tables() if "stage" in name] == []
    place.close()


@every_way
def test_a_session_that_is_ended_fails_its_task_and_the_retry_is_right(place: Place, options: Any, driver: str):
    sink, orders = place.sink(auto_create=True, **options), pipeline()
    job = orders.job(lines(0, 5000), lines(5000, 5))
    with sink.begin(job.window, job.splits, job.shape) as writer:
        task = travelled(writer.make_split_writer())
        task.open(job.splits[0])
        task.write(job.rows[0][0])
        key = make_pipeline_key(Name(place.schema, "airflow_windows"), "dag.task")
        of_tasks = "application_name = %s AND query NOT LIKE '%%rows, tombstones%%'"
        query = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {of_tasks}"
        assert place.connection.execute(query, [f"airflow-kafka-spark {key}"]).fetchall()
        with pytest.raises(SinkUnavailable, match=f"of window dag.task#1: {SESSION_ENDED}. The task may simply be retried"):
            for rows in job.rows[0][1:]:
                task.write(rows)
            task.close()
        task.abort()
    assert apply(sink, job).written == 5005
    check(place, lines(0, 5005))


# --- killed and stopped processes ---


def with_tombstones(orders: Pipeline) -> tuple[Job, list[dict[str, Any]]]:
    """Return a window that follows lines(0, 30), and the rows after both are applied."""
    dead = [{"id": i, DEAD: True} for i in range(0, 30, 3)]
    return orders.job([*dead, *lines(100, 10)], [{"id": 1, "v": "changed"}]), [
        *({"id": i, "v": "changed" if i == 1 else f"value {i}"} for i in range(30) if i % 3),
        *lines(100, 10),
    ]


@pytest.mark.faults
@pytest.mark.parametrize(
    "atomic, action, point",
    [
        ("window", "kill", "sink.in_transaction"),
        ("window", "stop", "sink.in_transaction"),
        ("split", "kill", "sink.committed"),
        ("split", "stop", "split.mid"),
    ],
)
def test_deletes_are_applied_once_whatever_is_killed_or_stopped(
    place: Place, point: str, action: str, atomic: str, tmp_path: Path
):
    options = {"mode": "upsert", "key": ["id"], "delete_enabled": True, "offset_columns": True, "atomic": atomic}
    sink, orders = place.sink(auto_create=True, **options), pipeline(tombstones=True)
    apply(sink, orders.job(lines(0, 30), []))
    job, expected = with_tombstones(orders)
    with Victim(sink, job, f"{point}:{action}", tmp_path) as victim:
        assert victim.died() if action == "kill" else victim.stopped()
        applied = apply(sink, job)
        assert (applied.written, applied.deleted) == (11, 10)
        check(place, expected)
        before = place.rows("SELECT * FROM t ORDER BY id"), place.rows("SELECT * FROM airflow_windows ORDER BY number")
        if action == "stop":
            victim.wake()
    assert apply(sink, job) == applied
    assert before == (place.rows("SELECT * FROM t ORDER BY id"), place.rows("SELECT * FROM airflow_windows ORDER BY number"))


@every_way
def test_tasks_of_an_attempt_that_was_overtaken_are_fenced(place: Place, options: Any):
    """A zombie job goes on after a newer attempt has begun: what is open fails, what it opens anew fails or writes nothing."""
    sink, orders = place.sink(auto_create=True, **options), pipeline()
    job = orders.job(lines(0, 2000), lines(2000, 5))
    with sink.begin(job.window, job.splits, job.shape) as zombie:
        opened, late = travelled(zombie.make_split_writer()), travelled(zombie.make_split_writer())
        opened.open(job.splits[0])
        opened.write(job.rows[0][0])
        assert apply(sink, job).written == 2005
        with pytest.raises(KafkaSparkError) if options.get("atomic") != "split" else contextlib.suppress(KafkaSparkError):
            for rows in job.rows[0][1:]:
                opened.write(rows)
            opened.close()
        opened.abort()
        if options.get("atomic") == "split":
            assert write_split(late, job.splits[1], job.rows[1]).token["rows"] == 5
        else:
            with pytest.raises(Fenced):
                late.open(job.splits[1])
        # Every session sees the window.
        assert zombie.commit(fake_results(job)).written == 2005
    check(place, lines(0, 2005))


def fake_results(job: Job) -> list[SplitResult]:
    """Return results of an attempt whose tasks have succeeded."""
    counts = {s.index: sum(r.batch.num_rows for r in job.rows[s.index]) for s in job.splits}
    return [SplitResult(index, records=n, token={"rows": n}) for index, n in counts.items()]


def test_a_task_of_a_window_two_back_writes_nothing_though_its_marker_is_gone(place: Place):
    sink, orders = place.sink(auto_create=True, atomic="split"), pipeline()
    jobs = [orders.job(lines(n * 10, 10)) for n in range(3)]
    with sink.begin(jobs[0].window, jobs[0].splits, jobs[0].shape) as zombie:
        late = [travelled(zombie.make_split_writer()) for _ in range(2)]
        for job in jobs:
            apply(sink, job)
        assert place.rows("SELECT DISTINCT number FROM airflow_window_splits") == [(3,)]
        for task in late:
            assert write_split(task, jobs[0].splits[0], jobs[0].rows[0]).token == {"rows": 10}
        assert zombie.commit(fake_results(jobs[0])).written == 10
    check(place, lines(0, 30))


# --- side by side ---


@every_way
def test_attempts_that_race_apply_the_window_once(place: Place, options: Any):
    sink, orders = place.sink(auto_create=True, **{"lock_timeout": 20, **options}), pipeline()
    apply(sink, orders.job(lines(0, 10), lines(10, 10)))
    job = orders.job(lines(20, 300), lines(320, 40))
    start = threading.Barrier(4)

    def attempt(_: int) -> Applied | KafkaSparkError:
        start.wait()
        try:
            return apply(sink, job)
        except KafkaSparkError as error:
            return error

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(attempt, range(4)))
    assert all(error.retryable for error in found if isinstance(error, KafkaSparkError)), found
    assert apply(sink, job) == Applied("dag.task", 2, job.window.ranges, written=340)
    assert all(one == apply(sink, job) for one in found if isinstance(one, Applied))
    check(place, lines(0, 360))


@every_way
def test_two_ledgers_that_plan_the_same_offsets_under_other_numbers_apply_them_once(place: Place, options: Any):
    """Two environments share a pipeline's name and a sink: the second learns it, and nothing is written twice."""
    sink, orders = place.sink(auto_create=True, **options), pipeline()
    apply(sink, orders.job(lines(0, 10)))
    job = orders.job(lines(10, 10))
    other = replace(job, window=replace(job.window, number=7))
    with sink.begin(job.window, job.splits, job.shape) as one:
        results = write_all(one, job)
        with contextlib.ExitStack() as stack, contextlib.suppress(KafkaSparkError):
            two = stack.enter_context(sink.begin(other.window, other.splits, other.shape))
            two.commit(write_all(two, other))
        with contextlib.suppress(KafkaSparkError):
            one.commit(results)
    if options.get("atomic") == "split":
        # The second one ended the first, before it found that its offsets are in the table: a retry of the first goes on.
        apply(sink, job)
    check(place, lines(0, 20))
    assert place.one("SELECT count(*) FROM airflow_windows") == 2
    with pytest.raises(WindowConflict):
        apply(sink, other if sink.find_applied(job.window) else job)


def test_windows_of_one_pipeline_are_compared_and_applied_one_after_the_other(place: Place):
    """Numbers differ, so that the rows do not collide: what is compared with must not change until the commit."""
    sink, orders = place.sink(auto_create=True, lock_timeout=30), pipeline()
    apply(sink, orders.job(lines(0, 10)))
    job = orders.job(lines(10, 10))
    windows = Name(place.schema, "airflow_windows")
    with place.server.connect() as other, ThreadPoolExecutor(1) as pool:
        # A session that cannot be ended is about to apply the same offsets as number 7.
        other.execute(sql.lock(make_lock_key("window", str(windows), "dag.task")).encode())
        facts = {"pipeline": "dag.task", "number": 7, "run": "", "cluster_id": "", "topic_ids": {}, "replay": 0}
        other.execute(sql.claim_window(windows, {**facts, "ranges": ranges_to_json(job.window.ranges)}, "t").encode())
        attempt = pool.submit(apply, sink, job)
        ours = "application_name LIKE 'airflow-kafka-spark %'"
        while not attempt.done() and not place.one(
            f"SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory' AND {ours}"
        ):
            time.sleep(0.01)
        assert not attempt.done(), attempt.exception()
        other.commit()
        with pytest.raises(WindowConflict):
            attempt.result()
    check(place, lines(0, 10))


@pytest.mark.parametrize("merge", ["overlap", "after"])
def test_a_split_that_two_tasks_wrote_leaves_one_stage_and_then_none(place: Place, merge: str):
    sink, orders = place.sink(auto_create=True, merge=merge), pipeline()
    job = orders.job(lines(0, 10))
    with sink.begin(job.window, job.splits, job.shape) as writer:
        tasks = [travelled(writer.make_split_writer()) for _ in range(3)]
        for task in tasks:
            task.open(job.splits[0])
            task.write(job.rows[0][0])
        tokens = [task.close() for task in tasks]
        assert tokens[0] == tokens[1] == tokens[2], "every connection names the same stage"
        assert [name for name in place.tables() if "stage" in name] == sorted([tokens[0]["stage"], writer.attempt.registry.table])
        late = travelled(writer.make_split_writer())
        assert write_split(late, job.splits[0], job.rows[0]).token == tokens[0], "it looks before it loads"
        assert writer.commit([SplitResult(0, records=10, token=tokens[0])]).written == 10
        assert place.tables() == ["airflow_windows", "t"]
    check(place, lines(0, 10))


def test_a_split_written_under_another_cut_or_another_promise_is_refused(place: Place):
    split, whole = place.sink(auto_create=True, atomic="split"), place.sink(auto_create=True)
    orders = pipeline()
    job = orders.job(lines(0, 10), lines(10, 10))
    with split.begin(job.window, job.splits, job.shape) as writer:
        write_split(travelled(writer.make_split_writer()), job.splits[0], job.rows[0])
    with pytest.raises(SinkRejected, match="atomic"):
        whole.begin(job.window, job.splits, job.shape)
    cut = tuple(replace(s, range=OffsetRange(s.range.topic, s.range.partition, s.range.start, 5)) for s in job.splits)
    with pytest.raises(SinkRejected, match="not a split of this attempt"):
        split.begin(job.window, cut, job.shape)
    assert apply(split, job).written == 20
    check(place, lines(0, 20))


@pytest.mark.parametrize("begun", [True, False], ids=["opened before", "opened after"])
def test_tasks_that_commit_splits_are_fenced_by_an_attempt_that_takes_the_window_whole(place: Place, driver: str, begun: bool):
    """`atomic` is switched in the middle of a window, while tasks of the attempt before still live."""
    split, whole = place.sink(auto_create=True, atomic="split"), place.sink(auto_create=True, merge="after")
    job = pipeline().job(lines(0, 10), lines(10, 10))
    with split.begin(job.window, job.splits, job.shape) as zombie:
        tasks = [travelled(zombie.make_split_writer()) for _ in job.splits]
        if begun:
            tasks[0].open(job.splits[0])
        with whole.begin(job.window, job.splits, job.shape) as writer:
            results = write_all(writer, job)
            with pytest.raises(SinkUnavailable if begun else Fenced):
                if not begun:
                    tasks[0].open(job.splits[0])
                tasks[0].write(job.rows[0][0])
                tasks[0].close()
            tasks[0].abort()
            with pytest.raises(Fenced):
                write_split(tasks[1], job.splits[1], job.rows[1])
            with pytest.raises(Fenced):
                zombie.commit(fake_results(job))
            assert writer.commit(results).written == 20
    assert place.rows("SELECT * FROM airflow_window_splits") == []
    check(place, lines(0, 20))


@pytest.mark.parametrize("cut", [(0, 4), (4, 6), (0, 10), (3, 5)], ids=str)
def test_a_split_that_shares_offsets_with_another_one_is_refused_when_it_commits(place: Place, driver: str, cut: tuple[int, int]):
    """Even where both are said to be of one attempt."""
    sink, job = place.sink(auto_create=True, atomic="split"), pipeline().job(lines(0, 10))
    halves = recut(job, 0.5)
    with sink.begin(halves.window, halves.splits, halves.shape) as writer:
        results = write_all(writer, halves)
        r = job.splits[0].range
        wrong = Split(7, OffsetRange(r.topic, r.partition, *cut))
        with pytest.raises(SinkRejected, match="as one split, this one has"):
            write_split(travelled(writer.make_split_writer()), wrong, job.rows[0])
        assert writer.commit(results).written == 10
    check(place, lines(0, 10))


def test_a_split_window_that_was_given_up_keeps_no_later_one_from_its_offsets(place: Place):
    """A user has moved the pipeline back, so the records are read again."""
    sink, orders = place.sink(auto_create=True, atomic="split"), pipeline()
    job = orders.job(lines(0, 10), lines(10, 10))
    with sink.begin(job.window, job.splits, job.shape) as writer:
        write_split(travelled(writer.make_split_writer()), job.splits[0], job.rows[0])
    again = replace(job, window=replace(job.window, number=2))
    with pytest.raises(WindowConflict, match="window #1, which is not complete"):
        apply(sink, again)
    moved = replace(again, window=replace(again.window, moved=1))
    assert apply(sink, moved).written == 20
    check(place, [*lines(0, 10), *lines(0, 20)])


def test_only_the_last_rows_of_a_pipeline_are_remembered_and_older_windows_are_not_written_again(place: Place):
    options = {"auto_create": True, "window_column": "w", "keep_windows": 2}
    sink, orders, others = place.sink(**options), pipeline(), pipeline(name="another")
    jobs = [orders.job(lines(n * 10, 10)) for n in range(5)]
    with sink.begin(jobs[0].window, jobs[0].splits, jobs[0].shape) as zombie:
        apply(sink, others.job(lines(900, 1)))
        for job in jobs:
            apply(sink, job)
        with pytest.raises(KafkaSparkError):
            zombie.commit(fake_results(jobs[0]))
    remembered = "SELECT number FROM airflow_windows WHERE pipeline = 'dag.task' ORDER BY number"
    assert place.rows(remembered) == [(4,), (5,)]
    assert place.one("SELECT count(*) FROM airflow_windows") == 3, "another pipeline's row stays"
    for job in (jobs[0], jobs[2]):
        with pytest.raises(WindowConflict):
            apply(sink, job)
    # A replay finds the rows of its window though its own row is gone.
    again = replace(jobs[1], window=replace(jobs[1].window, replay=1))
    assert apply(sink, again).written == 10
    # But it is unknown whether it wrote rows without offsets.
    place.execute("UPDATE t SET w = NULL WHERE id = 25")
    with pytest.raises(SinkRejected, match="row in the sink's record is gone"):
        apply(sink, replace(jobs[2], window=replace(jobs[2].window, replay=1)))
    check(place, [*lines(0, 50), *lines(900, 1)])
    assert "sink.keep_windows" in {problem.where for problem in place.sink(keep_windows=0).validate(orders.shape)}


def test_counts_that_disagree_are_never_committed(place: Place):
    for atomic in ("window", "split"):
        sink, orders = place.sink(auto_create=True, atomic=atomic), pipeline(name=atomic)
        job = orders.job(lines(0, 10))
        with sink.begin(job.window, job.splits, job.shape) as writer:
            (result,) = write_all(writer, job)
            with pytest.raises(CountMismatch):
                writer.commit([replace(result, records=11)])
        assert sink.find_applied(job.window) is None
        with sink.begin(job.window, job.splits, job.shape) as writer:
            (result,) = write_all(writer, job)
            # A tombstone that was ignored never reached the sink.
            assert writer.commit([replace(result, records=12, ignored=2)]).written == 10


# --- locks, rights and settings ---


@every_way
def test_a_table_that_another_session_has_locked_is_a_clear_error_after_the_lock_timeout(place: Place, options: Any):
    sink, orders = place.sink(auto_create=True, **{**options, "lock_timeout": 0.5}), pipeline()
    apply(sink, orders.job(lines(0, 10)))
    job = orders.job(lines(10, 10))
    with place.server.connect() as other:
        other.execute(f"LOCK TABLE {place.quoted}.t IN ACCESS EXCLUSIVE MODE".encode())
        begun = time.monotonic()
        with pytest.raises(SinkUnavailable, match="0.5 s: another session holds a lock") as caught:
            apply(sink, job)
        assert time.monotonic() - begun < 60 and caught.value.retryable
    assert apply(sink, job).written == 10
    check(place, lines(0, 20))


def test_an_attempt_of_another_role_that_cannot_be_ended_is_a_clear_error(place: Place):
    place.execute("CREATE TABLE t (id bigint, v text)")
    apply(place.sink(), pipeline().job(lines(0, 10)))
    orders = pipeline()
    orders.job(lines(0, 10))
    job = orders.job(lines(10, 10))
    with place.make_role("a secret") as role:
        place.execute(f"GRANT USAGE, CREATE ON SCHEMA {place.quoted} TO {role}")
        place.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA {place.quoted} TO {role}")
        # The superuser's attempt holds the window, and the role may not end it.
        with place.sink().begin(job.window, job.splits, job.shape) as holder:
            results = write_all(holder, job)
            place.connect_as(role, "a secret")
            sink = place.sink(lock_timeout=0.5)
            with pytest.raises(SinkUnavailable, match="airflow-kafka-spark"):
                apply(sink, job)
            assert holder.commit(results).written == 10
        assert sink.find_applied(job.window).written == 10
        check(place, lines(0, 20))


HOSTILE = {
    "TimeZone": "America/New_York",
    "DateStyle": "SQL, DMY",
    "standard_conforming_strings": "off",
    "bytea_output": "escape",
    "extra_float_digits": "-15",
    "client_encoding": "LATIN1",
    "default_transaction_isolation": "serializable",
    "statement_timeout": "1s",
    "lock_timeout": "1ms",
    "idle_in_transaction_session_timeout": "50ms",
    "synchronous_commit": "off",
    "search_path": "nowhere",
    "row_security": "on",
}


@every_way
def test_settings_of_the_role_change_nothing(place: Place, options: Any):
    import datetime as dt

    with place.connect_as_new_role("a secret") as role:
        place.execute(f"GRANT ALL ON SCHEMA {place.quoted} TO {role}")
        for name, value in HOSTILE.items():
            place.execute(f"ALTER ROLE {role} SET {name} = '{value}'")
        place.execute("CREATE TABLE t (id bigint PRIMARY KEY, v text, at timestamptz, wall timestamp, fs jsonb, b bytea)")
        place.execute(f"GRANT ALL ON t TO {role}")
        at = dt.datetime(2026, 7, 3, 12, 30, 1, 5, dt.timezone.utc)
        schema = pa.schema(
            [*KEYED, ("at", pa.timestamp("us")), ("wall", pa.timestamp("us", "UTC")), ("fs", pa.list_(pa.float64()))]
        )
        schema = schema.append(pa.field("b", pa.binary()))
        expected = [{"id": i, "v": "\\ 'é €", "fs": [0.1 + 0.2, 1 / 3], "b": b"\x00\\'"} for i in range(30)]
        rows = [{**line, "at": at.replace(tzinfo=None), "wall": at} for line in expected]
        sink = place.sink(**{**options, "offset_columns": False})
        orders = Pipeline(schema, "a 'quoted\\ name")
        assert sink.validate(orders.shape) == []
        job = orders.job(rows[:20], rows[20:])
        with sink.begin(job.window, job.splits, job.shape) as writer:
            results = write_all(writer, job)
            # Longer than the role lets a transaction idle: the merge has one open while tasks load.
            threading.Event().wait(0.3)
            assert writer.commit(results).written == 30
        place.execute("SET TimeZone = 'UTC'")
        found = [dict(zip(schema.names, row, strict=True)) for row in place.rows("SELECT * FROM t")]
        assert same_multiset([{**line, "at": at, "wall": at.replace(tzinfo=None)} for line in expected], found) == 30
        with sink.find_server().connect() as session:
            assert session.execute("SHOW synchronous_commit").fetchone() == ("on",), "an acknowledged window is durable"
            assert session.execute("SHOW statement_timeout").fetchone() == ("0",)
            assert session.execute("SHOW transaction_isolation").fetchone() == ("read committed",)


@pytest.mark.parametrize("of", ["driver", "adbc", "psycopg", "source"])
def test_a_session_is_opened_though_a_timeout_of_the_role_ends_the_statement_that_switches_it_off(
    place: Place, monkeypatch: pytest.MonkeyPatch, of: str
):
    from airflow_kafka_spark.sinks.postgres import sql
    from airflow_kafka_spark.sinks.postgres.tasks import write as sessions
    from airflow_kafka_spark.sources.jdbc.postgres import PostgresDatabase

    def slow(settings: str) -> str:
        # As long as a timeout is in force, the statement is canceled as by that timeout.
        cancel = "pg_cancel_backend(pg_backend_pid()) AND pg_sleep(30) IS NOT NULL"
        return (
            f"WITH slow AS MATERIALIZED (SELECT CASE current_setting('statement_timeout') WHEN '0' THEN true ELSE {cancel} END) "
            f"{settings} CROSS JOIN slow"
        )

    settings = sql.set_session_settings
    with place.connect_as_new_role("a secret") as role:
        place.execute(f"ALTER ROLE {role} SET statement_timeout = '60s'")
        monkeypatch.setattr(sql, "set_session_settings", lambda *args, **options: slow(settings(*args, **options)))
        monkeypatch.setattr(PostgresDatabase, "session_statement", slow(PostgresDatabase.session_statement))
        monkeypatch.setattr(sessions, "can_use_adbc", lambda arrays: of == "adbc")
        server = place.sink().find_server()
        timeout = "SELECT current_setting('statement_timeout')"
        if of == "driver":
            with server.connect() as connection:
                assert connection.execute(timeout).fetchone() == ("0",)
        elif of == "source":
            with PostgresDatabase(server).open_session("asking") as session:
                assert session.fetch_rows(timeout) == [("0",)]
        else:
            loading = sessions.open_session(server, "of a test", durable=True)
            assert loading.fetch_rows(timeout) == [("0",)]
            loading.close()


def test_any_number_of_leftovers_is_cleared_and_nothing_else(place: Place):
    sink, orders = place.sink(auto_create=True), pipeline()
    apply(sink, orders.job(lines(0, 1)))
    prefix = make_stage_prefix(make_pipeline_key(Name(place.schema, "airflow_windows"), "dag.task"))
    foreign = ["airflow_stage_0123456789ab_1_00000000_r", prefix[:-1] + "x_other", "airflow_stage"]
    for name in [*(f"{prefix}2_0000000{n % 10}_{n}_abcdef" for n in range(170)), *foreign]:
        place.execute(f'CREATE UNLOGGED TABLE "{name}" (id bigint)')
    apply(sink, orders.job(lines(1, 1)))
    assert place.tables() == sorted(["airflow_windows", "t", *foreign])


def test_a_second_commit_of_a_window_writes_zero_rows(place: Place):
    """The server's own count of written rows shows it."""
    for way, options in WAYS.items():
        sink, orders = place.sink(f"t {way}", auto_create=True, **options), pipeline(name=way)
        job = orders.job(lines(0, 10), lines(10, 10))
        apply(sink, job)
        before = changes(place, f"t {way}")
        assert before[0] == 20
        with sink.begin(job.window, job.splits, job.shape) as writer:
            assert writer.commit(write_all(writer, job)).written == 20
        assert apply(sink, job).written == 20
        assert changes(place, f"t {way}") == before


def changes(place: Place, table: str) -> tuple[int, int, int]:
    """Return the rows inserted, updated and deleted in all transactions, once all sessions have reported theirs."""
    query = (
        "SELECT n_tup_ins, n_tup_upd, n_tup_del FROM pg_stat_user_tables WHERE relid = "
        "(SELECT oid FROM pg_class WHERE relname = %s AND relnamespace = %s::regnamespace)"
    )
    with psycopg.connect(place.server.dsn, autocommit=True) as fresh:
        deadline = time.monotonic() + 90
        while fresh.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'airflow-kafka-spark%'"
        ).fetchone()[0]:
            assert time.monotonic() < deadline
        fresh.execute("SELECT pg_stat_force_next_flush()")
        return fresh.execute(query, [table, place.quoted]).fetchone()


def test_an_overlapped_merge_shows_nothing_before_the_commit_and_goes_with_it(place: Place):
    """Rows are in the table, in a transaction that no other session sees, while other splits still load."""
    sink, orders = place.sink(auto_create=True), pipeline()
    job = orders.job(lines(0, 1000), lines(1000, 5))
    with sink.begin(job.window, job.splits, job.shape) as writer:
        first = write_split(travelled(writer.make_split_writer()), job.splits[0], job.rows[0])
        deadline = time.monotonic() + 90
        while not writer.transaction.merged:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert writer.transaction.merged == {0: 1000}
        assert place.one("SELECT count(*) FROM t") == 0
        assert sink.find_applied(job.window) is None
        second = write_split(travelled(writer.make_split_writer()), job.splits[1], job.rows[1])
        assert writer.commit([first, second]).written == 1005
    check(place, lines(0, 1005))


def test_sinks_of_one_pipeline_in_two_schemas_do_not_disturb_each_other(
    place: Place, postgres: EmbeddedPostgres, unique: Callable[[str], str]
):
    """Two environments, one database: the same DAG writes into a schema each."""
    with new_place(postgres, unique("prod")) as prod:
        one, two = place.sink(auto_create=True), prod.sink(auto_create=True)
        job = pipeline().job(lines(0, 10))
        with one.begin(job.window, job.splits, job.shape) as writer:
            results = write_all(writer, job)
            assert apply(two, job).written == 10
            assert writer.commit(results).written == 10
        check(place, lines(0, 10))
        check(prod, lines(0, 10))


def test_nothing_is_left_in_the_server_after_a_window(place: Place):
    for way, options in WAYS.items():
        write(place.sink(f"t {way}", auto_create=True, **options), pipeline(name=way), lines(0, 10))
        assert [name for name in place.tables() if "stage" in name] == []
        deadline = time.monotonic() + 90
        while place.one("SELECT count(*) FROM pg_stat_activity WHERE application_name LIKE 'airflow-kafka-spark%'"):
            assert time.monotonic() < deadline, way
    assert isinstance(place.sink(), PostgresSink)
