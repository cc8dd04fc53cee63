"""One consumer reads range after range, as in a Spark task with several splits: each range gives exactly its own records."""

from __future__ import annotations

import random

import pytest
from confluent_kafka import Consumer

from airflow_kafka_spark.errors import DataLoss
from airflow_kafka_spark.hooks.kafka.config import consumer_config
from airflow_kafka_spark.sources.kafka.tasks import read
from airflow_kafka_spark.sources.kafka.tasks.read import KafkaSplitReader, kept_consumer
from airflow_kafka_spark.windows.model import OffsetRange
from tests.support.oracle import committed_records

PARTITIONS = 3


@pytest.fixture
def made(monkeypatch):
    """The consumers that readers make."""
    found = []

    class Counted(Consumer):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            found.append(self)

    monkeypatch.setattr(read, "Consumer", Counted)
    return found


@pytest.fixture
def topic(kafka, unique):
    """Records of committed and of aborted transactions, and control records between them."""
    from confluent_kafka import Producer

    name = unique("kept")
    kafka.create_topic(name, PARTITIONS)
    producer = Producer({**kafka.connection_extra(), "transactional.id": name, "linger.ms": 5})
    producer.init_transactions(60)
    number = 0
    for turn in range(12):
        producer.begin_transaction()
        for _ in range(40):
            producer.produce(name, b"v%d" % number, b"k%d" % number, number % PARTITIONS)
            number += 1
        producer.flush(60)
        (producer.abort_transaction if turn % 4 == 3 else producer.commit_transaction)(60)
    return name


def offsets_of(config, given, epoch=-1):
    return [o for records in KafkaSplitReader(config, given, epoch=epoch) for o in records.offsets.to_pylist()]


def test_a_kept_consumer_hands_over_each_range_exactly_in_any_order(kafka, topic, made):
    config = consumer_config(kafka.connection_extra())
    there = {p: [] for p in range(PARTITIONS)}
    for partition, offset, *_ in committed_records(kafka.connection_extra(), topic):
        there[partition].append(offset)
    order = random.Random(7)
    ranges = []
    for partition, offsets in there.items():
        end = offsets[-1] + 2  # the control record behind the last one
        cuts = sorted({0, end, *(order.randrange(end) for _ in range(8))})
        ranges += [OffsetRange(topic, partition, start, stop) for start, stop in zip(cuts, cuts[1:], strict=False)]
    order.shuffle(ranges)
    with kept_consumer():
        for given in [*ranges, *ranges[:5]]:
            wanted = [offset for offset in there[given.partition] if given.start <= offset < given.end]
            assert offsets_of(config, given) == wanted
    assert len(made) == 1
    with pytest.raises(RuntimeError):
        made[0].assignment()  # it is closed


def test_a_reader_that_fails_or_is_left_in_the_middle_leaves_no_consumer_to_the_next_one(kafka, topic, made):
    config = consumer_config(kafka.connection_extra())
    _delete(kafka, topic, 5)
    with kept_consumer():
        with pytest.raises(DataLoss):
            offsets_of(config, OffsetRange(topic, 0, 0, 20))
        reading = iter(KafkaSplitReader(config, OffsetRange(topic, 1, 0, 20)))
        next(reading)
        reading.close()
        first = offsets_of(config, OffsetRange(topic, 1, 0, 10))
        assert first and offsets_of(config, OffsetRange(topic, 1, 0, 10)) == first
    assert len(made) == 3


def test_another_configuration_gets_a_consumer_of_its_own(kafka, topic, made):
    config = consumer_config(kafka.connection_extra())
    with kept_consumer():
        first = offsets_of(config, OffsetRange(topic, 1, 0, 10))
        assert offsets_of({**config, "client.id": "another"}, OffsetRange(topic, 1, 0, 10)) == first
    assert len(made) == 2


def test_without_a_context_each_range_has_a_consumer_of_its_own(kafka, topic, made):
    config = consumer_config(kafka.connection_extra())
    assert offsets_of(config, OffsetRange(topic, 1, 0, 10)) == offsets_of(config, OffsetRange(topic, 1, 0, 10))
    assert len(made) == 2
    assert read._kept.made is None


def _delete(kafka, topic, before):
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    client = AdminClient(kafka.connection_extra())
    for future in client.delete_records([TopicPartition(topic, 0, before)]).values():
        future.result(60)
