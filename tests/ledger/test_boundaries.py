"""Boundaries on a real broker: decided once, also by concurrent runs, and removed once no records before them are left."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME
from confluent_kafka.admin import AdminClient, ResourceType

from airflow_kafka_spark.errors import BeginningDeleted, DataLoss, TimestampsInFuture
from airflow_kafka_spark.hooks.kafka import log as first_records
from airflow_kafka_spark.hooks.kafka.log import read_log, resolve_stop
from airflow_kafka_spark.ledger.boundaries import Boundaries
from airflow_kafka_spark.ledger.topic import LedgerTopic
from airflow_kafka_spark.windows import interval_boundaries as boundaries
from airflow_kafka_spark.windows.interval_boundaries import plan_interval_ranges
from airflow_kafka_spark.windows.model import TopicPartition
from airflow_kafka_spark.windows.offset_specs import Timestamp
from airflow_kafka_spark.windows.plan import Position
from airflow_kafka_spark.windows.times import get_current_milliseconds
from tests.support.clients import find_producer
from tests.support.compacting import alter_config
from tests.support.oracle import committed_messages
from tests.support.runs import fails_at
from tests.support.waiting import eventually

BEGIN = 1_750_000_000_000
MINUTE = 60_000


class Topic:
    """A topic with timestamps, and the boundaries that a separate ledger holds of it."""

    def __init__(self, kafka, hook, name, ledger_name, partitions=2, config=None):
        self.kafka, self.hook, self.name, self.partitions = kafka, hook, name, partitions
        kafka.create_topic(name, partitions, **({"config": config} if config else {}))
        self.ledger = LedgerTopic(hook, ledger_name)
        self.ledger.ensure()
        self.boundaries = Boundaries(hook, self.ledger, "a test")

    def produce(self, *stamps, partition=0):
        """Produce one record for each item, with a timestamp that many minutes after the beginning, or given in milliseconds."""
        producer = find_producer(self.kafka, self.name)
        failed = []
        for stamp in stamps:
            at = stamp if stamp > BEGIN else BEGIN + round(stamp * MINUTE)
            note_failure = lambda error, _: failed.append(error) if error else None  # noqa: E731
            producer.produce(self.name, b"v", b"k", partition, timestamp=at, on_delivery=note_failure)
        producer.flush(60)
        assert not failed

    def tp(self, partition):
        return TopicPartition(self.name, partition)

    def decide(self, *minutes, **options):
        """Return the offsets of instants that many minutes after the beginning, by minute."""
        instants = {minute: BEGIN + minute * MINUTE for minute in minutes}
        found = self.boundaries.decide(
            [self.name], instants.values(), lambda: read_log(self.hook, [self.name]), **{"grace": 0, **options}
        )
        return {minute: dict(found[self.name][instant].offsets) for minute, instant in instants.items()}

    def settled(self):
        """Return the boundaries in the ledger, by minute."""
        topic_id = read_log(self.hook, [self.name]).topic_ids[self.name]
        settled = self.boundaries.list_settled(self.name, topic_id)
        return {(instant - BEGIN) // MINUTE: dict(b.offsets) for instant, b in settled.items()}


@pytest.fixture
def topic(kafka, hook, unique):
    return Topic(kafka, hook, unique("orders"), unique("ledger"))


class TestPruning:
    def test_boundaries_of_what_retention_has_removed_go_and_the_others_stay_where_they_are(self, topic):
        for partition in range(2):
            topic.produce(*range(0, 100, 5), partition=partition)
        # Backwards: each is decided before its neighbour.
        before = topic.decide(*reversed(range(0, 100, 10)))
        assert before[50] == {0: 10, 1: 10}
        topic.hook.delete_records({topic.tp(0): 11, topic.tp(1): 15})
        assert topic.decide(40, 50) == {40: before[40], 50: before[50]}
        assert topic.settled().keys() == before.keys(), "who decides nothing removes nothing"
        topic.decide(95)
        assert topic.settled() == {minute: before[minute] for minute in range(50, 100, 10)} | {95: {0: 19, 1: 19}}

    def test_decisions_and_reads_during_a_removal_find_equal_boundaries(self, topic):
        for partition in range(2):
            topic.produce(*range(100), partition=partition)
        before = topic.decide(*range(0, 100, 2))
        topic.hook.delete_records({topic.tp(0): 60, topic.tp(1): 60})
        stop, seen = threading.Event(), []

        def read():
            while not stop.is_set():
                seen.append(topic.settled())

        with ThreadPoolExecutor(6) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            deciders = [pool.submit(topic.decide, 61 + 2 * n, 63 + 2 * n) for n in range(4)]
            decided = [decider.result() for decider in deciders]
            stop.set()
            for reader in readers:
                reader.result()
        left = topic.settled()
        assert min(left) == 60
        assert all(left[minute] == offsets for found in decided for minute, offsets in found.items())
        assert len(seen) > 2
        for found in seen:
            assert all(found[minute] == before[minute] for minute in range(60, 100, 2))
            assert all(found[minute] == before[minute] for minute in found if minute in before)


class TestArchives:
    @pytest.fixture
    def topic(self, topic, monkeypatch):
        monkeypatch.setattr(boundaries, "ARCHIVE_AFTER", 6)
        monkeypatch.setattr(boundaries, "UNARCHIVED", 3)
        for partition in range(2):
            topic.produce(*range(100), partition=partition)
        return topic

    def kept(self, topic):
        found = topic.boundaries._read(topic.name)
        return len(found.proposals), [archive.count for _, archive in found.archives]

    def test_old_boundaries_are_archived_and_stand_where_they_stood(self, topic):
        before = {}
        for minute in range(0, 60, 2):
            before |= topic.decide(minute)
        singles, archives = self.kept(topic)
        assert singles <= 7
        assert sum(archives) + singles == 30
        assert topic.settled() == before
        # A boundary that is decided late stays between its neighbours, in an archive or not.
        assert topic.decide(*before, 11, 59) == {**before, 11: {0: 11, 1: 11}, 59: {0: 59, 1: 59}}
        topic.hook.delete_records({topic.tp(0): 40, topic.tp(1): 40})
        topic.decide(61, 63)
        assert {minute: b for minute, b in topic.settled().items() if minute >= 40}.items() >= {
            minute: b for minute, b in before.items() if minute >= 40
        }.items()
        assert sum(self.kept(topic)[1]) < sum(archives), "what lies before what is left was removed"

    def test_a_death_between_the_archive_and_the_removal_leaves_all_boundaries_where_they_are(self, topic):
        before = topic.decide(*range(0, 12, 2))
        with fails_at("boundaries.archived"):
            topic.decide(14)
        assert self.kept(topic) == (7, [4])
        assert topic.settled() == {**before, 14: {0: 14, 1: 14}}
        assert topic.decide(*range(0, 14, 2), 16) == {**before, 12: {0: 12, 1: 12}, 16: {0: 16, 1: 16}}
        assert self.kept(topic)[0] < 7, "who comes next removes what is archived"
        assert {m: b for m, b in topic.settled().items() if m in before} == before


class TestTimestampsInTheFuture:
    """A clock that is wrong, or microseconds that were written as milliseconds."""

    @pytest.fixture
    def topic(self, kafka, hook, unique):
        # Newer brokers refuse such records by default.
        config = {"message.timestamp.after.max.ms": 2**63 - 1}
        return Topic(kafka, hook, unique("orders"), unique("ledger"), config=config)

    @pytest.mark.parametrize("future", [BEGIN * 1000, get_current_milliseconds() + 86_400_000], ids=["microseconds", "tomorrow"])
    def test_a_record_from_the_future_decides_no_boundary(self, topic, future):
        topic.produce(0, 30, future, 59, 61, 90, 119, 125, partition=0)
        topic.produce(0, 61, 125, partition=1)
        assert topic.decide(0, 60) == {0: {0: 0, 1: 0}, 60: {0: 4, 1: 1}}
        assert topic.decide(60, 120) == {60: {0: 4, 1: 1}, 120: {0: 7, 1: 2}}
        # Beyond the newest record that says when it was written: the end.
        assert topic.decide(180) == {180: {0: 8, 1: 3}}
        topic.produce(170, 190, partition=0)
        topic.produce(190, partition=1)
        assert topic.decide(190) == {190: {0: 9, 1: 3}}

    def test_an_instant_that_nothing_but_the_future_is_behind_waits_for_grace(self, topic):
        topic.produce(0, BEGIN * 1000, partition=0)
        topic.produce(0, partition=1)
        minutes, waited = (get_current_milliseconds() - BEGIN) / MINUTE, []

        def pause(seconds):
            if seconds:
                waited.append(seconds)
                topic.produce(minutes, partition=1)

        topic.produce(minutes, minutes + 1, partition=0)
        at = int(minutes)
        assert topic.decide(at, grace=120, pause=pause) == {at: {0: 2, 1: 1}}
        assert waited, "partition 1 has nothing so late: decided without waiting"

    def test_a_topic_may_take_the_time_of_the_brokers_from_some_record_on(self, topic):
        def produce_and_look():
            topic.produce(5, partition=0)
            found = [m.timestamp() for m in committed_messages(topic.kafka.connection_extra(), topic.name) if not m.partition()]
            return found if [kind for kind, _ in found].count(TIMESTAMP_LOG_APPEND_TIME) > 1 else None

        topic.produce(0, 30, BEGIN * 1000, partition=0)
        topic.produce(30, partition=1)
        by_brokers = {"message.timestamp.type": "LogAppendTime"}
        alter_config(AdminClient(topic.kafka.connection_extra()), ResourceType.TOPIC, topic.name, by_brokers)
        stamps = eventually(produce_and_look)
        assert topic.decide(20) == {20: {0: 1, 1: 0}}
        times = [0 if at > get_current_milliseconds() else at for _, at in stamps]
        for kind, at in stamps:
            if kind == TIMESTAMP_LOG_APPEND_TIME:
                first = next(offset for offset, other in enumerate(times) if other >= at)
                assert topic.boundaries.decide([topic.name], [at], lambda: read_log(topic.hook, [topic.name]), grace=0)[
                    topic.name
                ][at].offsets == {0: first, 1: 1}

    def test_where_it_cannot_be_found_the_record_is_named(self, topic, monkeypatch):
        monkeypatch.setattr(first_records, "SCAN_SECONDS", 0.0)
        topic.produce(0, BEGIN * 1000, 59, 61, partition=0)
        with pytest.raises(TimestampsInFuture, match="offset 1 of .* has the timestamp 1750000000000000") as caught:
            topic.decide(60)
        assert (caught.value.topic, caught.value.partition, caught.value.offset) == (topic.name, 0, 1)
        assert caught.value.timestamp == BEGIN * 1000
        assert not topic.settled(), "nothing was decided"

    def test_neither_does_it_end_every_window_that_stops_at_a_time(self, topic):
        topic.produce(0, BEGIN * 1000, 59, 61, 90, partition=0)
        topic.produce(61, partition=1)
        log = read_log(topic.hook, [topic.name])
        stop = Timestamp(BEGIN + 60 * MINUTE)
        assert resolve_stop(topic.hook, stop, log) == {topic.tp(0): 3, topic.tp(1): 0}
        assert resolve_stop(topic.hook, stop, log, {topic.tp(0): 4}) == {topic.tp(0): 4, topic.tp(1): 0}


class TestWhatRetentionHasRemoved:
    """A backfill of intervals whose records were deleted is data loss, whether or not their boundaries were decided before."""

    def window(self, topic, begin, end, data_loss="fail"):
        instants = (BEGIN + begin * MINUTE, BEGIN + end * MINUTE)
        log = read_log(topic.hook, [topic.name])
        found = topic.boundaries.decide([topic.name], instants, lambda: log, grace=0)[topic.name]
        starts, ends = ({topic.name: found[instant]} for instant in instants)
        planned = plan_interval_ranges([topic.name], starts, ends, log, Position(), data_loss)
        return [(r.start, r.end) for r in planned.ranges], [(g.partition, g.start, g.end) for g in planned.gaps]

    @pytest.fixture
    def topic(self, topic):
        for partition in range(2):
            topic.produce(*range(0, 100, 5), partition=partition)
        return topic

    def test_an_interval_that_was_never_asked_for_has_lost_its_records(self, topic):
        topic.hook.delete_records({topic.tp(0): 10})
        for begin in (0, 20, 40):
            with pytest.raises(BeginningDeleted) as caught:
                self.window(topic, begin, begin + 20)
            assert (caught.value.partition, caught.value.low) == (0, 10)
        assert self.window(topic, 0, 20, "skip") == ([(10, 10), (0, 4)], [(0, 0, 10)])
        assert self.window(topic, 40, 60, "skip") == ([(10, 12), (8, 12)], [(0, 0, 10)])
        assert self.window(topic, 60, 80) == ([(12, 16), (12, 16)], [])

    def test_and_one_whose_boundaries_were_removed_as_well(self, topic):
        topic.decide(*range(0, 100, 10))
        topic.hook.delete_records({topic.tp(0): 10, topic.tp(1): 11})
        topic.decide(95)
        assert min(topic.settled()) == 50
        with pytest.raises(BeginningDeleted):
            self.window(topic, 20, 30)
        with pytest.raises(BeginningDeleted):
            self.window(topic, 40, 50)
        assert min(topic.settled()) == 50, "what lies below what is left is not written down"
        assert self.window(topic, 60, 70) == ([(12, 14), (12, 14)], [])
        with pytest.raises(DataLoss) as caught:
            self.window(topic, 50, 60)
        assert (caught.value.partition, caught.value.wanted, caught.value.low) == (1, 10, 11)

    def test_an_idle_partition_has_lost_nothing_once_its_pipelines_are_under_way(self, topic):
        topic.hook.delete_records({topic.tp(0): 20, topic.tp(1): 20})
        now = (get_current_milliseconds() - BEGIN) // MINUTE
        with pytest.raises(BeginningDeleted):
            self.window(topic, now - 2, now - 1)
        topic.boundaries.decide(
            [topic.name], [get_current_milliseconds() + 50], lambda: read_log(topic.hook, [topic.name]), grace=0
        )
        begun = get_current_milliseconds()
        while get_current_milliseconds() <= begun:
            pass
        found = topic.boundaries.decide(
            [topic.name], [get_current_milliseconds()], lambda: read_log(topic.hook, [topic.name]), grace=0
        )
        assert all(not b.earliest for b in found[topic.name].values())
