"""Boundaries on a real broker: decided once for all, whoever asks meanwhile, and removed when nothing before them is left."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.hooks.boundaries import Boundaries
from airflow_kafka_spark.hooks.ledger_topic import LedgerTopic
from airflow_kafka_spark.sources.kafka import read_log
from airflow_kafka_spark.windows.model import TopicPartition

BEGIN = 1_750_000_000_000
MINUTE = 60_000


class Topic:
    """A topic with timestamps, and the boundaries that a ledger of its own holds of it."""

    def __init__(self, kafka, hook, name, ledger_name, partitions=2, config=None):
        self.kafka, self.hook, self.name, self.partitions = kafka, hook, name, partitions
        kafka.create_topic(name, partitions, **({"config": config} if config else {}))
        self.ledger = LedgerTopic(hook, ledger_name)
        self.ledger.ensure()
        self.boundaries = Boundaries(hook, self.ledger, "a test")

    def produce(self, *stamps, partition=0):
        """One record for each, with a timestamp so many minutes after the beginning, or given in milliseconds."""
        producer = Producer({**self.kafka.connection_extra(), "enable.idempotence": True})
        failed = []
        for stamp in stamps:
            at = stamp if stamp > BEGIN else BEGIN + round(stamp * MINUTE)
            told = lambda error, _: failed.append(error) if error else None  # noqa: E731
            producer.produce(self.name, b"v", b"k", partition, timestamp=at, on_delivery=told)
        producer.flush(30)
        assert not failed

    def tp(self, partition):
        return TopicPartition(self.name, partition)

    def decide(self, *minutes, **options):
        """The offsets of instants so many minutes after the beginning, by minute."""
        instants = {minute: BEGIN + minute * MINUTE for minute in minutes}
        found = self.boundaries.decide(
            [self.name], instants.values(), lambda: read_log(self.hook, [self.name]), **{"grace": 0, **options}
        )
        return {minute: dict(found[self.name][instant].offsets) for minute, instant in instants.items()}

    def settled(self):
        """What the ledger holds, by minute."""
        topic_id = read_log(self.hook, [self.name]).topic_ids[self.name]
        settled = self.boundaries.settled(self.name, topic_id)
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

    def test_whoever_decides_and_reads_while_others_remove_finds_the_same(self, topic):
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
