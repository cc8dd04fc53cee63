from __future__ import annotations

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from tests.support.piped import BASE, Piped


@pytest.fixture(scope="module")
def hook(kafka):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AIRFLOW_CONN_KAFKA_CONTROL", kafka.connection_json())
        with KafkaHook("kafka_control") as hook:
            yield hook


@pytest.fixture
def piped(kafka, hook, unique):
    """A pipeline of two partitions of 20 records, a second apart; the first two records of partition 0 are deleted."""
    made = Piped(kafka, hook, unique("pipe"), unique("orders"), unique("ledger"))
    kafka.create_topic(made.topic, 2)
    producer = Producer(kafka.connection_extra())
    for offset in range(20):
        for partition in range(2):
            producer.produce(made.topic, b"v" * 90, b"k" * 10, partition, timestamp=BASE + 1000 * offset)
    producer.flush(60)
    hook.delete_records({made.tp(0): 2})
    return made


@pytest.fixture
def moved(piped):
    """Return the pipeline after a window up to offset 10 of both partitions."""
    piped.move(10, 10)
    return piped
