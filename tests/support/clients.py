"""The clients that a test process keeps for each broker. A fork must not touch those of its parent."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import AdminClient

from airflow_kafka_spark.hooks.kafka.config import ALL_BROKERS
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.testing import EmbeddedKafka

SETTINGS = {**ALL_BROKERS, "linger.ms": 20, "enable.idempotence": True, "log_level": 0}

_kept: dict[tuple[Any, ...], tuple[int | None, Producer]] = {}
"""By process and connection: the process id of the broker, and the producer."""


def find_admin_client(config: Mapping[str, Any]) -> AdminClient:
    """Return a client for requests, which logs nothing.

    :param config: the connection.
    """
    return _make_admin_client(os.getpid(), *sorted(config.items()))


@cache
def _make_admin_client(process: int, *config: tuple[str, Any]) -> AdminClient:
    return AdminClient({**ALL_BROKERS, **dict(config), "log_level": 0, "error_cb": lambda error: None})


def find_producer(kafka: EmbeddedKafka, topic: str) -> Producer:
    """Return an idempotent producer that knows the present partitions of a topic.

    The order of records stays, and none is there twice, even if a batch is sent twice. A new producer waits half a second for its
    id, so the one of a single broker is kept until that is restarted: then it may have lost what it knew of the producer.
    """
    connection = kafka.connection_extra()
    key, broker = (os.getpid(), *sorted(connection.items())), kafka.broker().pid

    def note_error(error: KafkaError) -> None:
        if error.fatal():
            _kept.pop(key, None)

    known, producer = _kept.get(key, (None, None))
    if producer is None or known != broker:
        producer = Producer({**SETTINGS, **connection, "error_cb": note_error})
        if "," not in kafka.bootstrap_servers:
            _kept[key] = broker, producer
    producer.list_topics(topic, timeout=60)
    return producer


@contextmanager
def open_hook(kafka: EmbeddedKafka, conn_id: str = "kafka_default") -> Iterator[KafkaHook]:
    """Define an Airflow connection to a cluster, and yield a hook of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(f"AIRFLOW_CONN_{conn_id.upper()}", kafka.connection_json())
        with KafkaHook(conn_id) as hook:
            yield hook
