"""Records that librdkafka takes from Arrow's memory arrive as those that confluent-kafka takes one by one."""

from __future__ import annotations

import importlib.metadata
import time

import numpy as np
import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, Producer

from airflow_kafka_spark.librdkafka.tasks.produce import QueuedRecords, RecordArray, find_obstacle
from tests.support.oracle import committed_messages

KEYS = [b"a", None, b"", b"\x00\xff", "schlüssel".encode(), b"k" * 300]
VALUES = [b"1", b"", None, b"\x00", None, b"v" * 100_000]


@pytest.fixture
def topic(kafka, unique):
    name = unique("columns")
    kafka.create_topic(name, 3)
    return name


@pytest.fixture
def producer(kafka):
    made = Producer({"bootstrap.servers": kafka.bootstrap_servers, "enable.idempotence": True})
    yield made
    assert made.flush(30) == 0


def read(kafka, topic):
    """Return the records of each partition in their order: partition, key and value. All have the time of sending."""
    found = sorted(committed_messages(kafka.connection_extra(), topic), key=lambda m: (m.partition(), m.offset()))
    assert all(abs(m.timestamp()[1] / 1000 - time.time()) < 300 for m in found)
    return [(m.partition(), m.key(), m.value()) for m in found]


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_keys_values_and_nulls_are_those_of_one_call_per_record(kafka, unique, topic, producer, kind):
    expected = unique("one_by_one")
    kafka.create_topic(expected, 3)
    partitions = np.array([0, 0, 1, 1, 1, 2])
    order = np.array([5, 0, 1, 4, 3, 2])
    for partition, at in zip(partitions.tolist(), order.tolist(), strict=True):
        producer.produce(expected, VALUES[at], KEYS[at], partition)
    # The columns are parts of longer ones, as slices of a batch are.
    keys, values = (pa.array([b"before", *column, b"behind"], kind).slice(1, len(column)) for column in (KEYS, VALUES))
    assert RecordArray(keys, values, order, partitions).produce(producer, topic) == QueuedRecords(6, None)
    producer.flush(30)
    assert read(kafka, topic) == read(kafka, expected)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_texts_and_columns_without_a_byte_are_sent(kafka, topic, producer, kind):
    empty = pa.array(["", None], kind)
    for values in (pa.array(["ä", "b"], kind), empty):
        RecordArray(empty, values, np.arange(2), np.zeros(2, int)).produce(producer, topic)
    producer.flush(30)
    assert [record[1:] for record in read(kafka, topic)] == [(b"", "ä".encode()), (None, b"b"), (b"", b""), (None, None)]


def test_a_full_queue_takes_the_records_before_it_and_none_behind_so_that_the_order_is_kept(kafka, topic):
    config = {"bootstrap.servers": kafka.bootstrap_servers, "enable.idempotence": True, "queue.buffering.max.messages": 700}
    producer = Producer(config)
    texts = pa.array([str(n) for n in range(5000)])
    records = RecordArray(texts, texts, np.arange(5000), np.repeat([0, 1, 2], [1500, 2500, 1000]))
    start = refusals = 0
    while True:
        queued = records.produce(producer, topic, start)
        start += queued.count
        if queued.error is None:
            break
        assert queued.error.code() == KafkaError._QUEUE_FULL
        refusals += 1
        producer.poll(0.05)
    assert start == 5000 and refusals > 0 and producer.flush(30) == 0
    assert [int(record[1]) for record in read(kafka, topic)] == list(range(5000))


def test_the_first_record_that_is_refused_is_named(topic, producer):
    values = pa.array([b"x", b"y", b"z" * 2_000_000, b"x"])
    queued = RecordArray(values, values, np.arange(4), np.array([0, 1, 1, 2])).produce(producer, topic)
    assert (queued.count, queued.error.name()) == (2, "MSG_SIZE_TOO_LARGE")
    producer.flush(30)
    few = pa.array([b"x", b"y"])
    queued = RecordArray(few, few, np.arange(2), np.array([2, 3])).produce(producer, topic)
    assert (queued.count, queued.error.name()) == (1, "_UNKNOWN_PARTITION")


def test_a_column_of_another_type_is_refused():
    with pytest.raises(TypeError, match="a column is int64; expected binary or string"):
        RecordArray(pa.array([b"k"]), pa.array([1]), np.arange(1), np.zeros(1, int))


@pytest.mark.parametrize(
    "release, is_known", [("2.9.0", False), ("2.10.1", True), ("2.16.1", True), ("2.17.0rc1", False), ("3.0", False)]
)
def test_the_memory_of_a_client_that_was_not_tried_is_not_touched(monkeypatch, release, is_known):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: release)
    find_obstacle.cache_clear()
    try:
        expected = "" if is_known else f"confluent-kafka is {release}; expected 2.10 or newer, and older than 2.17"
        assert find_obstacle() == expected
    finally:
        find_obstacle.cache_clear()


def test_the_installed_release_of_the_client_is_known():
    """If this fails with a new release: see whether `rk` is still the first field of its `Handle`, and raise `BEFORE`."""
    assert find_obstacle() == ""
