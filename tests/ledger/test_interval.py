"""The ledger of data intervals on a real broker."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark import faults
from airflow_kafka_spark.bad_records.dead_letters import find_known_dead_letters, find_resent
from airflow_kafka_spark.control import base as control_base
from airflow_kafka_spark.control.pipelines import read_pipeline, show
from airflow_kafka_spark.errors import Fenced, IntervalOverlaps, ResendRefused
from airflow_kafka_spark.hooks.kafka.log import read_log
from airflow_kafka_spark.ledger import topic as ledger_topic
from airflow_kafka_spark.ledger.attempt import Ledger
from airflow_kafka_spark.ledger.interval import NUMBER, IntervalLedger
from airflow_kafka_spark.ledger.topic import LedgerTopic
from airflow_kafka_spark.windows import interval_archive
from airflow_kafka_spark.windows.binding import Binding, Endpoint, Writer
from airflow_kafka_spark.windows.interval import Interval
from airflow_kafka_spark.windows.memory import make_binding_record, make_group_key, make_key_prefix
from airflow_kafka_spark.windows.model import BadRecord, OffsetRange, TopicPartition, Window
from tests.support.control import forget, replay, resend
from tests.support.dead_letters import send_dead_letters

NEW_YEAR = datetime(2026, 1, 1, tzinfo=timezone.utc)


def window(ledger: IntervalLedger) -> Window:
    bounds = (ledger.interval.start_ms, ledger.interval.end_ms)
    return Window(ledger.pipeline, NUMBER, (OffsetRange("t", 0, 0, 10),), ledger.run, "", "c", {"t": "id"}, interval=bounds)


def test_of_two_overlapping_intervals_that_are_planned_at_once_the_later_one_is_withdrawn(hook, unique):
    name, topic = unique("pipeline"), unique("ledger")
    hour, day = (Interval(NEW_YEAR, NEW_YEAR + timedelta(hours=hours)) for hours in (1, 24))
    with (
        IntervalLedger(hook, name, "hourly", hour, topic=topic) as first,
        IntervalLedger(hook, name, "daily", day, topic=topic) as second,
    ):
        # Both have read the ledger by now, and neither has seen the other one's plan.
        first.plan(window(first))
        with pytest.raises(IntervalOverlaps):
            second.plan(window(second))
    with IntervalLedger(hook, name, "daily", day, topic=topic) as later:
        assert later.memory.entries == {}
        assert [state.interval for state in later.parent_memory.intervals.values()] == [hour]


class Hourly:
    """A pipeline of hourly intervals of ten offsets each; its records are not moved."""

    def __init__(self, kafka, hook, name, topic, ledger):
        self.hook, self.name, self.topic, self.ledger = hook, name, topic, ledger
        kafka.create_topic(topic, 1)
        producer = Producer({**kafka.connection_extra(), "linger.ms": 5})
        for _ in range(200):
            producer.produce(topic, b"v", b"k", 0)
        assert producer.flush(60) == 0

    def hour(self, number):
        return Interval(NEW_YEAR + timedelta(hours=number), NEW_YEAR + timedelta(hours=number + 1))

    def attempt(self, number, run=None):
        return IntervalLedger(self.hook, self.name, run or f"run-{number}", self.hour(number), topic=self.ledger, keep_windows=2)

    def log(self):
        return read_log(self.hook, [self.topic])

    def move(self, number, bad=()):
        """Move an interval.

        :param bad: offsets of records that become dead letters.
        """
        with self.attempt(number) as ledger:
            bounds, ranges = (
                (ledger.interval.start_ms, ledger.interval.end_ms),
                (OffsetRange(self.topic, 0, number * 10, number * 10 + 10),),
            )
            ids = self.log().topic_ids
            ledger.plan(Window(ledger.pipeline, NUMBER, ranges, ledger.run, "", "c", ids, interval=bounds))
            if bad:
                self.send_dead(ledger, bad)
            ledger.close({"completed_at": "2026-01-01T00:00:00.000Z"}, {})
            ledger.follow(self.name, lambda: ({}, self.log()), None)

    def send_dead(self, ledger, bad):
        places = [BadRecord(self.topic, 0, offset, "no number", "VALUE_CONVERTER") for offset in bad]
        return send_dead_letters(self.hook, ledger, f"{self.topic}-dead", places)

    @property
    def intervals(self):
        return read_pipeline(self.hook, self.name, self.ledger).memory.intervals


@pytest.fixture
def hourly(kafka, hook, unique, monkeypatch):
    monkeypatch.setattr(interval_archive, "ARCHIVE_AFTER", 5)
    return Hourly(kafka, hook, unique("hourly"), unique("orders"), unique("ledger"))


class TestArchives:
    def test_old_intervals_are_archived_and_count_as_before(self, hook, hourly):
        for number in range(10):
            hourly.move(number)
        found = hourly.intervals
        assert [archive.count for archive in found.archives] == [6]
        assert len(found.recent) == 4
        assert [found[hourly.hour(n).name].ranges[0].start for n in range(10)] == [10 * n for n in range(10)]
        assert show(hook, hourly.name, ledger_topic=hourly.ledger).intervals == (10, 10)
        # Archived intervals are complete for every reader.
        with hourly.attempt(1, "again") as ledger:
            entry = ledger.find_completed("again")
            assert entry is not None
            assert (entry.window.run, entry.window.ranges) == ("run-1", (OffsetRange(hourly.topic, 0, 10, 20),))
        # And its instants are taken.
        day = Interval(NEW_YEAR, NEW_YEAR + timedelta(days=1))
        with IntervalLedger(hook, hourly.name, "daily", day, topic=hourly.ledger) as ledger, pytest.raises(IntervalOverlaps):
            ledger.refuse_overlaps()

    def test_the_group_follows_intervals_whether_they_are_archived_or_not(self, kafka, hook, hourly):
        for number in (*range(3), *range(4, 10)):
            hourly.move(number)
        tp = TopicPartition(hourly.topic, 0)
        committed = hook.read_committed_offsets(hourly.name, [tp], stable=True)
        assert committed[tp].offset == 30, "the fourth hour is missing"
        hourly.move(3)
        assert hook.read_committed_offsets(hourly.name, [tp], stable=True)[tp].offset == 100
        assert sum(archive.count for archive in hourly.intervals.archives) >= 4

    def test_an_archived_interval_is_moved_once_more_and_then_has_a_record_of_its_own(self, hook, hourly):
        for number in range(10):
            hourly.move(number)
        name = hourly.hour(1).name
        replay(hook, hourly.name, name=name, why="test", ledger_topic=hourly.ledger)
        with hourly.attempt(1, "again") as ledger:
            entry = ledger.find_completed("again")
            assert ledger.parent_memory.replay_asked(entry.window) is not None
            assert ledger.replay(entry).window.replay == 1
            ledger.close({"completed_at": "2026-01-01T00:00:00.000Z"}, {})
        for number in range(10, 14):
            hourly.move(number)
        found = hourly.intervals
        assert (found.recent[name].replay, found[name].replay, len(found)) == (1, 1, 14)

    def test_the_dead_letters_of_an_old_interval_are_not_sent_once_more(self, hook, hourly, monkeypatch):
        monkeypatch.setattr(control_base, "KEEP_CONTROLS", 1)
        tp, name = TopicPartition(hourly.topic, 0), hourly.hour(1).name
        hourly.move(0)
        hourly.move(1, bad=(13, 15, 17))
        options = {"why": "test", "ledger_topic": hourly.ledger}
        assert resend(hook, hourly.name, name=name, **options).changed
        for number in range(2, 5):
            hourly.move(number)
        assert hourly.intervals.recent[name].forgotten

        def replay_again(number, *bad):
            assert replay(hook, hourly.name, name=name, **options).changed
            with hourly.attempt(1, f"again-{number}") as ledger:
                ledger.replay(ledger.find_completed("again"))
                known = find_known_dead_letters(ledger)
                assert known.list_sent()[tp] >= {13, 15, 17} and find_resent(ledger)[tp] == {13, 15, 17}
                sent = hourly.send_dead(ledger, bad) if bad else known
                ledger.close({"completed_at": "2026-01-01T00:00:00.000Z", "replay": number}, {})
            return sum(part.records for part in sent.landed)

        assert replay_again(1, 13, 18) == 4, "only the letter of 18 is new"
        for number in range(5, 12):
            hourly.move(number)
        assert name not in hourly.intervals.recent and hourly.intervals[name].dead.list_sent(1)[tp] == {13, 15, 17, 18}
        # The record of the resend is no longer needed: the interval has its offsets.
        memory = read_pipeline(hook, hourly.name, hourly.ledger).memory
        assert [c.action for c in memory.controls.values()] == ["replay"]
        assert replay_again(2) == 4
        # This replay has written all records but those that were sent again.
        with pytest.raises(ResendRefused, match="replay 2 has left out none"):
            resend(hook, hourly.name, name=name, **options)

    @pytest.mark.parametrize("begins", ["before", "after"])
    def test_an_old_interval_that_is_just_being_moved_again_keeps_its_records(self, hook, hourly, monkeypatch, begins):
        """The replay begins before or after those who remove the records have fenced its plans."""
        tp = TopicPartition(hourly.topic, 0)
        for number in range(2):
            hourly.move(number, bad=(3,) if number == 0 else ())
        replaying = hourly.attempt(0, "again")

        def begin_replay(point):
            if point == "group.fenced" and begins == "before":
                replaying.__enter__()
            if point == "old.fenced":
                monkeypatch.undo()
                if begins == "after":
                    replaying.__enter__()
                    replaying.replay(replaying.find_completed("again"))
                    hourly.send_dead(replaying, (3, 5))
                else:
                    with pytest.raises(Fenced):
                        replaying.replay(replaying.find_completed("again"))

        monkeypatch.setattr(faults, "reached", begin_replay)
        hourly.move(2)
        # The attempt has died. Its retry knows what it has sent.
        with hourly.attempt(0, "again") as ledger:
            assert ledger.known.forgotten == (begins == "before")
            if begins == "after":
                ledger.reopen(ledger.memory.open_entry)
            assert ledger.memory.dead[NUMBER].list_sent()[tp] == ({3, 5} if begins == "after" else {3})

    def test_a_pipeline_that_is_forgotten_leaves_no_archive(self, hook, hourly):
        for number in range(10):
            hourly.move(number)
        forget(hook, hourly.name, why="test", ledger_topic=hourly.ledger)
        topic = LedgerTopic(hook, hourly.ledger)
        topic.ensure()
        mine = (make_key_prefix(hourly.name),)
        left = [r.key for p in topic.partitions for r in topic.read_newest(p, 0, mine, mine) if r.value is not None]
        assert [key.split(b",")[1] for key in left] == [b'"change"']


def test_an_attempt_reads_each_record_of_the_ledger_once(hourly, monkeypatch):
    for number in range(3):
        hourly.move(number)
    read: list[int] = []
    of_kafka = ledger_topic.read_span

    def counted(*arguments, **options):
        for record in of_kafka(*arguments, **options):
            read.append(record.offset)
            yield record

    monkeypatch.setattr(ledger_topic, "read_span", counted)
    ledger = hourly.attempt(3)
    ledger.peek()
    seen = list(read)
    assert len(seen) > 5
    with ledger:
        window = Window(ledger.pipeline, NUMBER, (OffsetRange(hourly.topic, 0, 30, 40),), "r", "", interval=ledger._bounds)
        ledger.plan(window)
        ledger.read()
        assert len(read) == len(set(read)), "some were read twice"
        assert read[len(seen) :], "and what came since was read"
        planned_at = ledger.parent_memory.intervals.recent[hourly.hour(2).name].offset
        read.clear()
        last = ledger.find_last_complete()
        assert last is not None and last.window.run == "run-2"
        assert min(read) >= planned_at > min(seen), "the latest window is sought behind its plan"


@pytest.mark.parametrize("by_interval", [False, True], ids=["windows", "intervals"])
def test_a_pipeline_of_an_earlier_release_looks_for_the_owner_of_its_group_once(kafka, hook, unique, monkeypatch, by_interval):
    name, topic, looked = unique("pipeline"), unique("ledger"), []
    of_kafka = LedgerTopic.read_newest

    def counted(self, partition, start, prefixes, *arguments, **options):
        looked.extend([prefixes] if prefixes == (make_group_key("g"),) else [])
        return of_kafka(self, partition, start, prefixes, *arguments, **options)

    monkeypatch.setattr(LedgerTopic, "read_newest", counted)
    # It has bound the pipeline, and has not recorded who uses the group.
    binding = Binding(Writer("dag", "task"), origin=Endpoint(details={"group": "g"}))
    found = LedgerTopic(hook, topic)
    found.ensure()
    producer = Producer(kafka.connection_extra())
    record = make_binding_record(name, binding)
    producer.produce(topic, record.value, record.key, partition=found.find_partition(name))
    assert producer.flush(60) == 0
    searches = []
    for number in (1, 2):
        looked.clear()
        hour = Interval(NEW_YEAR + timedelta(hours=number), NEW_YEAR + timedelta(hours=number + 1))
        made = IntervalLedger(hook, name, f"r{number}", hour, topic=topic) if by_interval else None
        with made or Ledger(hook, name, f"r{number}", topic=topic) as ledger:
            ledger.bind(lambda whole: replace(binding, owns=False))
            ledger.refuse_taken()
            bounds = (hour.start_ms, hour.end_ms) if by_interval else None
            ledger.plan(Window(ledger.pipeline, NUMBER if by_interval else number, (), ledger.run, "", interval=bounds))
            ledger.close({}, {})
        searches.append(len(looked))
    assert searches[0] and not searches[1]
