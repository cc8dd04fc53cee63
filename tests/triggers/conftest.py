from __future__ import annotations

import pytest

from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


@pytest.fixture(autouse=True)
def connection(kafka, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", kafka.connection_json())


@pytest.fixture
def hook():
    with KafkaHook(timeout=20) as hook:
        yield hook


@pytest.fixture
def topic(kafka, unique):
    """A new topic of two partitions."""
    topic = unique("lag")
    kafka.create_topic(topic, 2)
    return topic
