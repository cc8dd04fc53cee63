"""The watch over ledgers: on a real broker, which goes away and comes back, and over topics that hold what nobody expects."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime, timezone

import pytest

from airflow_kafka_spark.control.reset import reset
from airflow_kafka_spark.ui import ledgers
from airflow_kafka_spark.ui.catalog import Catalog, LedgerName, Task
from airflow_kafka_spark.ui.details import before, dead_letters, win, windows_of
from airflow_kafka_spark.ui.ledgers import LedgerWatch
from airflow_kafka_spark.ui.shelf import KEEP, Shelf, Shelves
from airflow_kafka_spark.ui.summary import summarize
from airflow_kafka_spark.ui.tasks import Tasks
from airflow_kafka_spark.ui.watcher import Watcher
from airflow_kafka_spark.windows.interval import Interval, IntervalState, parse_ledger_name
from airflow_kafka_spark.windows.lag import Head, Lag, Observation, PartitionLag, Status
from airflow_kafka_spark.windows.memory import (
    Attempt,
    Entry,
    LedgerRecord,
    interval_record,
    window_key,
    window_record,
)
from airflow_kafka_spark.windows.model import OffsetRange, State, TopicPartition, Window
from tests.support.waiting import eventually
from tests.ui.past import Past, StaticHook

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def past(kafka):
    made = Past(kafka)
    kafka.create_topic("watched", 3)
    made.produce("watched", 300)
    return made


@pytest.fixture
def watch(kafka, unique, monkeypatch):
    """A watch over a ledger topic that is not there yet; it asks more often than in earnest."""
    monkeypatch.setattr(ledgers, "CHECK_SECONDS", 0.5)
    monkeypatch.setattr(ledgers, "LAG_SECONDS", 0.5)
    monkeypatch.setattr(ledgers, "RETRY_SECONDS", (0.2,))
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
    """The pulse that tells of so many records to read."""

    def look():
        with watch.lock:
            pulse = watch.pulses.get(pipeline)
            lag = pulse.measured.lag if pulse and len(pulse.samples) >= samples else None
        return pulse if lag and (records is None or lag.records() == records) else None

    return eventually(look)


def test_a_ledger_that_is_missing_appears_is_empty_and_fills(past, watch, kafka):
    assert "no topic" in state_is(watch, "missing")[1]
    kafka.create_topic(watch.name.topic, 4, config={"cleanup.policy": "compact"})
    state_is(watch, "empty")
    move(past, watch, "one", 4)
    move(past, watch, "two", 1, leave_open=True)
    state_is(watch, "ok")
    pulse = behind(watch, "one", 300 - 120)
    assert pulse.measured.seconds > 0
    eventually(lambda: pulse.verdict.status.value == "OK")
    assert complete(watch, "one", 4).period == pytest.approx(3600, abs=300)
    assert eventually(lambda: complete(watch, "two", 1).open).window.number == 2
    assert watch.age(time.time()) < 60


def test_records_that_nobody_can_read_hide_nothing_else(past, watch, kafka):
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
    past.write_record("newer", window_key("newer", 2), b'{"v":9,"state":"PLANNED"}', topic)
    past.write_record("broken", window_key("broken", 2), b'{"v":1,"state":"PLANNED","window":{}}', topic)
    state, message = state_is(watch, "unreadable")
    assert "cannot be read" in message
    newer = eventually(lambda: (s := watch.summaries.get("newer")) and s.problem and s)
    assert "version 9" in newer.problem
    broken = eventually(lambda: (s := watch.summaries.get("broken")) and s.problem and s)
    assert "cannot be read" in broken.problem
    assert complete(watch, "fine", 1).problem == ""
    eventually(lambda: len(watch.shelves.remarks) >= 5)


def test_while_the_broker_is_away_the_data_stays_with_its_age_and_it_comes_back(past, watch, kafka):
    kafka.create_topic(watch.name.topic, 1, config={"cleanup.policy": "compact"})
    move(past, watch, "steady")
    complete(watch, "steady", 1)
    kafka.pause()
    try:
        state, message = state_is(watch, "down")
        assert "kafka_default" in message
        first = watch.age(time.time())
        assert first > 1
        assert watch.summaries["steady"].last.window.number == 1
        assert eventually(lambda: watch.age(time.time()) > first + 1)
    finally:
        kafka.resume()
    state_is(watch, "ok")
    move(past, watch, "steady")
    complete(watch, "steady", 2)
    assert watch.age(time.time()) < 60


def test_a_ledger_that_is_deleted_and_created_again_is_read_from_its_beginning(past, watch, kafka):
    kafka.create_topic(watch.name.topic, 1, config={"cleanup.policy": "compact"})
    move(past, watch, "first", 2)
    complete(watch, "first", 2)
    kafka.delete_topic(watch.name.topic)
    kafka.create_topic(watch.name.topic, 1, config={"cleanup.policy": "compact"})
    move(past, watch, "second")
    complete(watch, "second", 1)
    eventually(lambda: "first" not in watch.summaries)


def test_the_watch_ends_when_nobody_asks_and_goes_on_where_it_was(past, kafka, unique):
    name = LedgerName("kafka_default", unique("ui-ledger"))
    task = Task("dag", "task", name, "dag.task", ("watched",))
    past.move("dag.task", 1, ["watched"], 10, run="dag/r{n}/task", group="g-idle", ledger_topic=name.topic)
    watcher = Watcher(
        catalog_of=lambda reader: Catalog((task,)),
        configured=lambda: (),
        hook_of=lambda conn: StaticHook(kafka.connection_extra(), 2.0),
        idle_seconds=2.0,
    )
    # On a busy machine the first catalog may take longer than anybody waits for it.
    eventually(lambda: watcher.touch() or ((w := watcher.ledgers.get(name)) and (s := w.summaries.get("dag.task")) and s.last))
    watch = watcher.ledgers[name]
    thread = watch._thread
    eventually(lambda: not watcher.is_watching and not thread.is_alive())
    read = watch.shelves.records
    past.move("dag.task", 2, ["watched"], 10, run="dag/r{n}/task", group="g-idle", ledger_topic=name.topic)
    eventually(lambda: watcher.touch() or watch.summaries["dag.task"].last.window.number == 3)
    # Only what has come meanwhile was read.
    assert read < watch.shelves.records <= read + 6
    watcher.stop()


def test_a_catalog_that_cannot_be_read_does_not_end_the_watch():
    calls = []

    def catalog_of(reader):
        calls.append(1)
        raise OSError("the database is away")

    watcher = Watcher(catalog_of=catalog_of, configured=lambda: (), hook_of=lambda conn: None, idle_seconds=60.0)
    watcher.touch()
    assert eventually(lambda: watcher.problem) == "Airflow's database does not answer"
    assert watcher.is_watching
    watcher.stop()


def test_a_clock_that_is_slow_makes_no_pipeline_go_back():
    tp = TopicPartition("t", 0)
    pulse = ledgers._Pulse()
    now = 10_000.0

    def seen(at, committed):
        return Lag("p", {tp: PartitionLag(committed, 0, 100, Head(committed, int((at - 5) * 1000)), seconds=5.0)}, at)

    assert pulse.judge(seen(now, 30), {tp: [Observation(now - 60, 30, active=True)]}).status is Status.OK
    # It was moved on from 30 to 40 behind our back; whoever did so has a clock that is two minutes slow, or two fast.
    for moved_at in (now - 110, now + 120):
        past = {tp: [Observation(now - 60, 30, active=True), Observation(moved_at, 40, active=True)]}
        assert pulse.judge(seen(now + 10, 40), past).status is Status.OK
    assert pulse.judge(seen(now + 20, 10), {}).status is Status.REWIND


def test_a_pipeline_that_is_moved_back_by_hand_is_not_reproached_with_it(past, watch):
    move(past, watch, "moved", 3)
    behind(watch, "moved", None, samples=2)
    reset(past.hook, "moved", "earliest", why="test", ledger_topic=watch.name.topic)
    pulse = behind(watch, "moved", 300, samples=4)
    assert pulse.moved == 1
    assert pulse.verdict.status is not Status.REWIND
    move(past, watch, "moved")
    behind(watch, "moved", 270)
    assert pulse.verdict.status is not Status.REWIND


def test_intervals_that_end_in_any_order_and_replays_do_not_go_back():
    shelves = Shelves()
    put(shelves, window_record(entry("p", 1)), 1)
    put(shelves, window_record(entry("p", 2)), 2)
    again = entry("p", 1)
    report = {"completed_at": "2026-01-01T01:00:00Z"}
    put(shelves, window_record(replace(again, report=report, window=replace(again.window, replay=1))), 3)
    seen = summarize(shelves.pipelines["p"]).past[TopicPartition("t", 0)]
    assert [s.committed for s in seen] == [3, None]


# --- what is kept ---------------------------------------------------------------------------------------------------------


def entry(pipeline, number, state=State.COMPLETE, interval=None):
    window = Window(
        pipeline, number, (OffsetRange("t", 0, number, number + 1),), "d/r/t", "2026-01-01T00:00:00Z", interval=interval
    )
    report = {"completed_at": f"2026-01-01T00:{number // 60 % 60:02d}:{number % 60:02d}Z"} if state is State.COMPLETE else None
    return Entry(window, state, Attempt(1, "x", "d/r/t", "2026-01-01T00:00:00Z"), report)


def put(shelves, record, offset):
    return shelves.add(0, replace_offset(record, offset))


def replace_offset(record, offset):
    return LedgerRecord(record.key, record.value, offset)


def test_of_many_windows_the_newest_are_kept_and_all_are_counted():
    shelves = Shelves()
    put(shelves, window_record(entry("p", 3, State.PLANNED)), 0)
    for number in range(4, 1004):
        put(shelves, window_record(entry("p", number)), number)
    shelf = shelves.pipelines["p"]
    assert shelf.windows_total == 1001
    told = windows_of(shelf)
    assert len(told) == KEEP
    # The one that is open is not let go of, however old it is.
    assert [t.entry.window.number for t in told] == [*range(1003, 1003 - KEEP + 1, -1), 3]
    assert [t.entry.window.number for t in before(told, "990")][:2] == [989, 988]
    for number in range(3, 1004):
        shelves.add(0, LedgerRecord(window_key("p", number), None, number + 2000))
    assert shelves.pipelines == {}


def test_dead_letters_and_what_went_elsewhere_of_a_window_that_was_published_are_known_by_its_report():
    """They went along with its other records: the ledger has no record of its own of them."""
    shelves, done = Shelves(), entry("p", 1)
    told = {
        **done.report,
        "dead_letters": [{"topic": "dead", "partition": n, "first": 5, "last": 9, "records": 2} for n in range(2)],
        "routed": [{"topic": "small", "partition": n, "first": 0, "last": 9, "records": 5} for n in range(2)],
        "captured": [{"sink": "file:///gone", "records": 3}],
        "records_routed": 13,
    }
    put(shelves, window_record(replace(done, report=told)), 1)
    put(shelves, window_record(entry("p", 2)), 2)
    second, first = windows_of(shelves.pipelines["p"])
    assert (second.landed, second.elsewhere) == ((), [])
    assert [(part.topic_partition, part.records) for part in first.landed] == [(("dead", 0), 2), (("dead", 1), 2)]
    assert dead_letters([second, first]) == {"total": 4, "windows": [{"number": 1, "name": "1", "records": 4, "topic": "dead"}]}
    shown = win(first, Tasks({}, {}))
    assert shown["records_routed"] == 13
    assert shown["routed"] == [{"to": "file:///gone", "records": 3}, {"to": "small", "records": 10}]
    assert [part["records"] for part in shown["dead_letters"]] == [2, 2]


def test_lanes_are_windows_of_their_pipeline():
    shelves = Shelves()
    for hour in range(3):
        interval = Interval(datetime(2026, 1, 1, hour, tzinfo=timezone.utc), datetime(2026, 1, 1, hour + 1, tzinfo=timezone.utc))
        state = State.PLANNED if hour == 2 else State.COMPLETE
        lane, told = interval.ledger_name("a.b"), {"completed_at": "2026-01-01T05:00:00Z"}
        assert parse_ledger_name(lane) == ("a.b", interval.name)
        bounds = (interval.start_ms, interval.end_ms)
        moved = entry(lane, 1, state, bounds)
        put(shelves, window_record(replace(moved, report=told if moved.report else None)), 2 * hour)
        put(shelves, interval_record("a.b", IntervalState(interval, state, ())), 2 * hour + 1)
    assert list(shelves.pipelines) == ["a.b"]
    shelf = shelves.pipelines["a.b"]
    assert shelf.intervals == (3, 2)
    assert [t.name for t in windows_of(shelf)] == [
        "20260101T020000Z-20260101T030000Z", "20260101T010000Z-20260101T020000Z", "20260101T000000Z-20260101T010000Z",
    ]  # fmt: skip
    assert [t.name for t in before(windows_of(shelf), "20260101T010000Z-20260101T020000Z")] == [
        "20260101T000000Z-20260101T010000Z"
    ]
    found = summarize(shelf)
    assert found.has_intervals
    assert found.open.window.interval is not None
    assert found.problem == ""


def test_names_that_only_look_like_lanes_are_pipelines():
    for name in ("a.b", "20260101T000000Z-20260101T010000Z", "a.20260101T000000Z", "x.20260101T000000Z-20260101T010000Z.y"):
        assert parse_ledger_name(name) == (name, None)


def test_a_shelf_forgets_what_it_has_taken_apart_when_a_record_comes():
    shelves = Shelves()
    put(shelves, window_record(entry("p", 1)), 1)
    shelf: Shelf = shelves.pipelines["p"]
    first = shelf.memory()
    assert shelf.memory() is first
    put(shelves, window_record(entry("p", 2)), 2)
    assert sorted(shelf.memory().entries) == [1, 2]
