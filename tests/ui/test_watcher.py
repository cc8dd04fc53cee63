"""The watcher of ledgers: on a real broker, which stops and starts again, and over topics with unexpected records."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from airflow.timetables.interval import CronDataIntervalTimetable

from airflow_kafka_spark.ui import watcher
from airflow_kafka_spark.ui.airflow_metadata import Catalog, DagSchedule, LedgerName, PipelineTask
from airflow_kafka_spark.ui.lag_monitor import LagMonitor, ReadPosition
from airflow_kafka_spark.ui.ledger_snapshot import PipelineSummary
from airflow_kafka_spark.ui.watcher import LedgerWatch, Watcher
from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.lag import BacklogHead, Lag, Observation, PartitionLag, Periodic, Status, Timetabled, Unscheduled
from airflow_kafka_spark.windows.memory import make_window_key
from airflow_kafka_spark.windows.model import TopicPartition
from tests.support.control import reset
from tests.support.waiting import eventually
from tests.ui.past import Past, StaticHook

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def past(kafka):
    with Past(kafka) as made:
        kafka.create_topic("watched", 3)
        made.produce("watched", 300)
        yield made


@pytest.fixture
def watch(kafka, unique, monkeypatch):
    """A watcher of a ledger topic that does not exist yet. It polls more often than in production."""
    monkeypatch.setattr(watcher, "CHECK_SECONDS", 0.5)
    monkeypatch.setattr(watcher, "LAG_SECONDS", 0.5)
    monkeypatch.setattr(watcher, "RETRY_SECONDS", (0.2,))
    made = LedgerWatch(LedgerName("kafka_default", unique("ui-ledger")), lambda conn: StaticHook(kafka.connection_extra(), 2.0))
    made.start()
    yield made
    made.stop()


def move(past, watch, pipeline, count=1, **options):
    given = {"run": f"dag/run_{{n}}/{pipeline}", "group": f"group-{pipeline}", "ledger_topic": watch.name.topic, **options}
    past.move(pipeline, count, ["watched"], 10, **given)


def state_is(watch, state):
    return eventually(lambda: watch.state if watch.state[0] == state else None)


def complete(watch, pipeline, number):
    """The summary in which this window is the last one that is complete: between any two records of it there is another one."""
    return eventually(lambda: (s := watch.summaries.get(pipeline)) and s.last and s.last.window.number == number and s)


def behind(watch, pipeline, records, samples=1):
    """Return the tracker that reports this number of records to read."""

    def look():
        with watch.lock:
            tracker = watch.lag_trackers.get(pipeline)
            lag = tracker.measured.lag if tracker and len(tracker.samples) >= samples else None
        return tracker if lag and (records is None or lag.count_records() == records) else None

    return eventually(look)


def test_a_ledger_that_is_missing_appears_is_empty_and_fills(past, watch, kafka):
    assert not watch.is_read
    assert "no topic" in state_is(watch, "missing")[1]
    assert watch.is_read, "its pipelines are new"
    kafka.create_topic(watch.name.topic, 4, config={"cleanup.policy": "compact"})
    state_is(watch, "empty")
    move(past, watch, "one", 4)
    move(past, watch, "two", 1, leave_open=True)
    state_is(watch, "ok")
    tracker = behind(watch, "one", 300 - 120)
    # A busy broker may return the oldest record too late for the first measurement.
    assert eventually(lambda: tracker.measured.seconds) > 0
    eventually(lambda: tracker.verdict.status.value == "OK")
    assert complete(watch, "one", 4).cadence.period == pytest.approx(3600, abs=300)
    assert eventually(lambda: complete(watch, "two", 1).open).window.number == 2
    assert watch.compute_age(time.time()) < 60


def test_unreadable_records_hide_nothing_else(past, watch, kafka):
    kafka.create_topic(watch.name.topic, 4, config={"cleanup.policy": "compact"})
    topic = watch.name.topic
    move(past, watch, "fine")
    move(past, watch, "newer")
    move(past, watch, "broken")
    past.write_record("fine", b"\xff no json", b"x", topic)
    past.write_record("fine", b'["fine"]', b"{}", topic)
    past.write_record("fine", b'["fine","window",-1]', b"{}", topic)
    past.write_record("fine", b'["fine","window",99999999999999999999]', b"{}", topic)
    past.write_record("fine", b'{"a":1}', b"{}", topic)
    past.write_record("fine", b'[null,"boundary","t",1,"k"]', b"{}", topic)
    past.write_record("newer", make_window_key("newer", 2), b'{"v":9,"state":"PLANNED"}', topic)
    past.write_record("broken", make_window_key("broken", 2), b'{"v":1,"state":"PLANNED","window":{}}', topic)
    state, message = state_is(watch, "unreadable")
    assert "cannot be read" in message
    newer = eventually(lambda: (s := watch.summaries.get("newer")) and s.problem and s)
    assert "version 9" in newer.problem
    broken = eventually(lambda: (s := watch.summaries.get("broken")) and s.problem and s)
    assert "cannot be read" in broken.problem
    assert complete(watch, "fine", 1).problem == ""
    eventually(lambda: len(watch.snapshot.problems) >= 5)


def test_while_the_broker_is_away_the_data_stays_with_its_age_and_it_comes_back(past, watch, kafka):
    kafka.create_topic(watch.name.topic, 1, config={"cleanup.policy": "compact"})
    move(past, watch, "steady")
    complete(watch, "steady", 1)
    kafka.pause()
    try:
        state, message = state_is(watch, "down")
        assert "kafka_default" in message
        first = watch.compute_age(time.time())
        assert first > 1
        assert watch.summaries["steady"].last.window.number == 1 and watch.is_read
        assert eventually(lambda: watch.compute_outage(time.time()) > first + 1)
    finally:
        kafka.resume()
    state_is(watch, "ok")
    assert watch.compute_outage(time.time()) is None
    move(past, watch, "steady")
    complete(watch, "steady", 2)
    assert watch.compute_age(time.time()) < 60


def test_a_ledger_that_is_deleted_and_created_again_is_read_from_its_beginning(past, watch, kafka):
    kafka.create_topic(watch.name.topic, 1, config={"cleanup.policy": "compact"})
    move(past, watch, "first", 2)
    complete(watch, "first", 2)
    kafka.delete_topic(watch.name.topic)
    kafka.create_topic(watch.name.topic, 1, config={"cleanup.policy": "compact"})
    move(past, watch, "second")
    complete(watch, "second", 1)
    eventually(lambda: "first" not in watch.summaries)


def test_the_watch_ends_without_requests_and_continues_at_its_position(past, kafka, unique):
    name = LedgerName("kafka_default", unique("ui-ledger"))
    task = PipelineTask("dag", "task", name, "dag.task", ("watched",))
    past.move("dag.task", 1, ["watched"], 10, run="dag/r{n}/task", group="g-idle", ledger_topic=name.topic)
    watcher = Watcher(
        catalog_of=lambda reader: Catalog((task,)),
        configured=lambda: (),
        hook_of=lambda conn: StaticHook(kafka.connection_extra(), 2.0),
        idle_seconds=2.0,
    )
    # On a busy machine the first catalog may take longer than its timeout.
    eventually(
        lambda: watcher.request_received() or ((w := watcher.ledgers.get(name)) and (s := w.summaries.get("dag.task")) and s.last)
    )
    watch = watcher.ledgers[name]
    thread = watch._thread
    eventually(lambda: not watcher.is_watching and not thread.is_alive())
    read = watch.snapshot.records
    past.move("dag.task", 2, ["watched"], 10, run="dag/r{n}/task", group="g-idle", ledger_topic=name.topic)
    eventually(lambda: watcher.request_received() or watch.summaries["dag.task"].last.window.number == 3)
    # Only what has come meanwhile was read.
    assert read < watch.snapshot.records <= read + 6
    watcher.stop()


def test_a_catalog_that_cannot_be_read_does_not_end_the_watch():
    calls = []

    def catalog_of(reader):
        calls.append(1)
        raise OSError("the database is away")

    watcher = Watcher(catalog_of=catalog_of, configured=lambda: (), hook_of=lambda conn: None, idle_seconds=60.0)
    watcher.request_received()
    assert eventually(lambda: watcher.problem) == "Airflow's database does not answer"
    assert watcher.is_watching
    watcher.stop()


def test_of_data_intervals_only_those_that_are_due_count_as_lag(past, kafka, unique):
    topic, group = unique("ui-due"), unique("group")
    kafka.create_topic(topic, 3)
    for hours_ago, count in ((3.0, 30), (2.0, 60), (1.0, 90)):
        past.produce(topic, count, hours_ago=hours_ago)
    monitor, before_last = LagMonitor(), int((time.time() - 1.5 * 3600) * 1000)
    past.hook.alter_committed(group, {TopicPartition(topic, p): 10 for p in range(3)})
    due = ReadPosition({}, topics=(topic,), group=group, by_group=True, due_until=before_last)
    given = {"due": due, "all": replace(due, due_until=None), "none": replace(due, due_until=before_last - 3_600_000)}
    for _ in range(2):  # what was found is remembered
        found = monitor.measure(past.hook, given)
        assert {name: measured.lag.count_records() for name, measured in found.items()} == {"due": 60, "all": 150, "none": 0}
        assert found["due"].seconds == pytest.approx(2 * 3600, abs=120)
        assert (found["none"].seconds, found["none"].offsets[TopicPartition(topic, 0)].lso) == (0.0, 60)


def test_the_timetable_of_its_dag_says_when_a_run_is_due_and_a_paused_pipeline_misses_none():
    late = PipelineSummary("p", cadence=Periodic(10.0))
    hourly = DagSchedule(next_run=time.time() + 60, timetable=CronDataIntervalTimetable("0 * * * *", timezone="UTC"))
    for schedule, expected in ((None, Periodic(10.0)), (DagSchedule(), Unscheduled()), (hourly, Timetabled(hourly.run_after))):
        watch = LedgerWatch(LedgerName("c", "t"), lambda conn: None, schedule_of=lambda pipeline, found=schedule: found)
        assert watch._find_cadence(late) == expected
        assert watch._find_cadence(replace(late, pause=Change(1, "pause", "somebody", "", ""))) == Unscheduled()


def test_a_clock_that_is_slow_makes_no_pipeline_go_back():
    tp = TopicPartition("t", 0)
    tracker = watcher.LagTracker()
    now = 10_000.0

    def seen(at, committed):
        return Lag("p", {tp: PartitionLag(committed, 0, 100, BacklogHead(committed, int((at - 5) * 1000)), seconds=5.0)}, at)

    assert tracker.judge(seen(now, 30), {tp: [Observation(now - 60, 30, active=True)]}).status is Status.OK
    # Another client has moved it from 30 to 40. Its clock is two minutes slow, or two minutes fast.
    for moved_at in (now - 110, now + 120):
        past = {tp: [Observation(now - 60, 30, active=True), Observation(moved_at, 40, active=True)]}
        assert tracker.judge(seen(now + 10, 40), past).status is Status.OK
    assert tracker.judge(seen(now + 20, 10), {}).status is Status.REWIND


def test_a_pipeline_that_is_moved_back_by_hand_is_not_reproached_with_it(past, watch):
    move(past, watch, "moved", 3)
    behind(watch, "moved", None, samples=2)
    reset(past.hook, "moved", "earliest", why="test", ledger_topic=watch.name.topic)
    tracker = behind(watch, "moved", 300, samples=4)
    assert tracker.moved == 1
    assert tracker.verdict.status is not Status.REWIND
    move(past, watch, "moved")
    behind(watch, "moved", 270)
    assert tracker.verdict.status is not Status.REWIND
