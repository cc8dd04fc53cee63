"""Splits that are published without Spark: a ledger with a planned window, and the publisher of its splits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa

from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.ledger.attempt import Ledger, format_utc_now
from airflow_kafka_spark.sinks.kafka.tasks.publish import Publisher
from airflow_kafka_spark.testing import EmbeddedKafka
from airflow_kafka_spark.windows.model import SourcePlan, Window
from tests.support.oracle import committed_records, same_multiset
from tests.support.reader import Reader, same_log
from tests.support.waiting import settled

ROWS = 500


def rows(split: int) -> pa.RecordBatch:
    """Return the records of a split; each call returns equal records."""
    keys = pa.array([b"%d" % n for n in range(split * ROWS, (split + 1) * ROWS)], pa.binary())
    return pa.RecordBatch.from_pydict({"key": keys, "value": keys})


@dataclass
class Splits:
    """A window of some splits, its topic, and a reader of the topic in the background."""

    kafka: EmbeddedKafka
    hook: KafkaHook
    ledger: Ledger
    publisher: Publisher
    reader: Reader
    count: int

    def wait_settled(self, seconds: float = 45) -> None:
        """Wait until no transaction is open in the topic and the ledger."""
        settled(self.reader.topic, self.ledger.topic.name, seconds=seconds)

    def check(self) -> int:
        """Check that every row of all splits is there once, for both readers, and that no transaction is open."""
        self.wait_settled()
        there = committed_records(self.kafka.connection_extra(), self.reader.topic)
        assert len(self.ledger.read_published()) == self.count
        keys = [key for split in range(self.count) for key in rows(split).column("key").to_pylist()]
        compared = same_multiset(keys, (key for _, _, key, _ in there))
        assert same_log(there, self.reader.caught_up()) == compared
        return compared


@contextmanager
def splits(kafka: EmbeddedKafka, unique: Callable[[str], str], count: int, transaction_timeout: float = 60) -> Iterator[Splits]:
    """A planned and claimed window of this many splits."""
    topic = unique("splits")
    kafka.create_topic(topic, 3)
    os.environ["AIRFLOW_CONN_KAFKA_DEFAULT"] = kafka.connection_json()
    with (
        KafkaHook() as hook,
        Ledger(hook, unique("pipe"), "dag/run1/task", topic=unique("ledger")) as ledger,
        Reader(kafka.connection_extra(), topic) as reader,
    ):
        plan = SourcePlan(tuple({"n": n} for n in range(count)))
        ledger.plan(Window(ledger.pipeline, 1, (), "dag/run1/task", format_utc_now(), source=plan))
        publisher = Publisher(
            config=hook.make_producer_config(),
            reading=hook.make_consumer_config(),
            ledger=ledger.ledger_claim,
            prefix=ledger.split_prefix,
            topic=topic,
            partitions={topic: 3},
            transaction_timeout=transaction_timeout,
        )
        yield Splits(kafka, hook, ledger, publisher, reader, count)
