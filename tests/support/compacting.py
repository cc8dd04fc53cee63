"""A compacted topic, and waiting until Kafka has really removed records from the middle of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

from tests.support.pipelines import order
from tests.support.waiting import eventually

HOUR_MS = 3_600_000
PARTITIONS, RECORDS = 3, 40
COMPACTED = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01", "segment.ms": "1000"}
SOON, LATER = {"log.cleaner.backoff.ms": "200"}, {"log.cleaner.backoff.ms": "15000"}
"""Pauses of a broker's cleaner, which looks at all logs after each. The second is Kafka's default."""


def alter_config(admin: AdminClient, kind: ResourceType, name: str, settings: Mapping[str, str]) -> None:
    """Change settings of a topic or of a broker."""
    entries = [ConfigEntry(key, value, incremental_operation=AlterConfigOpType.SET) for key, value in settings.items()]
    resource = ConfigResource(kind, name, incremental_configs=entries)
    for answer in admin.incremental_alter_configs([resource]).values():
        answer.result(60)


def set_cleaner(admin: AdminClient, settings: Mapping[str, str]) -> None:
    """Change settings of the log cleaner of all brokers."""
    for broker in admin.list_topics(timeout=60).brokers:
        alter_config(admin, ResourceType.BROKER, str(broker), settings)


def send(config: Mapping[str, Any], topic: str, first: int = 0) -> None:
    """Write :data:`RECORDS` orders to each partition, with timestamps an hour ago. Every second order has the same key, so that
    compaction removes all of these except the last one.

    :param first: number of the first order.
    """
    admin = AdminClient(dict(config))
    alter_config(admin, ResourceType.TOPIC, topic, COMPACTED)
    set_cleaner(admin, SOON)
    producer, began = Producer({**config, "enable.idempotence": True}), round(time.time() * 1000) - HOUR_MS
    for number in range(first, first + PARTITIONS * RECORDS):
        at = (number - first) // PARTITIONS
        key = str(number) if at % 2 else "again"
        producer.produce(topic, order(number), key, number % PARTITIONS, timestamp=began + at)
    assert producer.flush(60) == 0


def compact(config: Mapping[str, Any], topic: str, count: Callable[[], int], rounds: int = 1) -> None:
    """Write one more record to each partition, which rolls its segment, and wait until the older segments are compacted.

    :param count: how many committed records the topic holds.
    :param rounds: how often :func:`send` was called.
    """
    producer = Producer(dict(config))
    for partition in range(PARTITIONS):
        producer.produce(topic, order(10_000 + partition), "last", partition)
    assert producer.flush(60) == 0
    left = PARTITIONS * (rounds * RECORDS // 2 + 1 + 1)
    eventually(lambda: count() == left)
    set_cleaner(AdminClient(dict(config)), LATER)
