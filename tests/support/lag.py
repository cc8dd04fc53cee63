"""Records, groups and transactions for tests of code that measures lag."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, OffsetSpec

from airflow_kafka_spark.hooks.kafka.config import ALL_BROKERS
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.testing import EmbeddedKafka
from airflow_kafka_spark.windows.model import TopicPartition
from tests.support.clients import find_admin_client, find_producer
from tests.support.waiting import eventually

SECOND = 1000
OPEN = {"transaction.timeout.ms": 600_000}
"""Of a transaction that a test holds open, on a machine however slow."""


@pytest.fixture(autouse=True)
def connection(kafka: EmbeddedKafka, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", kafka.connection_json())


@pytest.fixture
def hook() -> Iterator[KafkaHook]:
    with KafkaHook(timeout=20) as hook:
        yield hook


@pytest.fixture
def topic(kafka: EmbeddedKafka, unique: Callable[[str], str]) -> str:
    """Create a topic with two partitions."""
    topic = unique("lag")
    kafka.create_topic(topic, 2)
    return topic


def now_ms() -> int:
    return int(time.time() * SECOND)


def produce(kafka: EmbeddedKafka, topic: str, count: int = 1, partition: int = 0, *, age: float = 0.0) -> int:
    """Produce records of this age in seconds, and return their timestamp in milliseconds."""
    producer = find_producer(kafka, topic)
    timestamp = now_ms() - int(age * SECOND)
    for _ in range(count):
        producer.produce(topic, b"v", partition=partition, timestamp=timestamp)
    assert producer.flush(60) == 0
    return timestamp


@contextmanager
def transaction(kafka: EmbeddedKafka, topic: str, count: int = 1, partition: int = 0) -> Iterator[Producer]:
    """Open a transaction with records in it. If the caller does not end it, the brokers abort it."""
    settings = {**ALL_BROKERS, **kafka.connection_extra(), "transactional.id": f"{topic}-{time.monotonic_ns()}", **OPEN}
    producer = Producer(settings)
    producer.init_transactions(60)
    producer.begin_transaction()
    for _ in range(count):
        producer.produce(topic, b"v", partition=partition)
    assert producer.flush(60) == 0
    ended = False
    try:
        yield producer
        ended = True
    finally:
        if not ended:
            producer.abort_transaction(60)


def transact(kafka: EmbeddedKafka, hook: KafkaHook, topic: str, count: int, outcome: str, partition: int = 0) -> None:
    """Run a transaction to its end, and wait until its marker is written."""
    before = hook.read_offsets([topic])[TopicPartition(topic, partition)].high
    with transaction(kafka, topic, count, partition) as producer:
        getattr(producer, f"{outcome}_transaction")(30)
    eventually(lambda: hook.read_offsets([topic])[TopicPartition(topic, partition)].lso == before + count + 1)


def commit(kafka: EmbeddedKafka, group: str, topic: str, offset: int, partition: int = 0) -> None:
    """Commit offsets like another consumer."""
    from confluent_kafka import TopicPartition as KafkaTopicPartition

    consumer = Consumer({**ALL_BROKERS, **kafka.connection_extra(), "group.id": group})
    try:
        consumer.commit(offsets=[KafkaTopicPartition(topic, partition, offset)], asynchronous=False)
    finally:
        consumer.close()


def end_of(kafka: EmbeddedKafka, topic: str, partition: int = 0) -> int:
    """Return the offset of the next record."""
    from confluent_kafka import TopicPartition as KafkaTopicPartition

    place = KafkaTopicPartition(topic, partition)
    return int(find_admin_client(kafka.connection_extra()).list_offsets({place: OffsetSpec.latest()})[place].result(60).offset)


def delete_group(kafka: EmbeddedKafka, group: str) -> None:
    admin = AdminClient(kafka.connection_extra())
    admin.delete_consumer_groups([group], request_timeout=60)[group].result(60)


@contextmanager
def consuming(kafka: EmbeddedKafka, group: str, topic: str, *, pause: float = 0.0) -> Iterator[list[int]]:
    """Run a live consumer of the group that commits every record it has read, and yield the offsets it has read so far.

    :param pause: seconds after each record.
    """
    stop, read = threading.Event(), list[int]()

    def work() -> None:
        settings = {"group.id": group, "auto.offset.reset": "earliest", "enable.auto.commit": False}
        consumer = Consumer({**kafka.connection_extra(), **settings})
        consumer.subscribe([topic])
        try:
            while not stop.is_set():
                message = consumer.poll(0.1)
                if message is not None and not message.error():
                    # Before: who sees the commit finds it here.
                    read.append(message.offset())
                    consumer.commit(message, asynchronous=False)
                    stop.wait(pause)
        finally:
            consumer.close()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield read
    finally:
        stop.set()
        thread.join(30)
