"""Comparisons of a sink's rows with a topic's records, by value and as multisets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import OffsetSpec

from airflow_kafka_spark.hooks.kafka.config import ALL_BROKERS
from airflow_kafka_spark.testing._processes import wait_until
from tests.support.clients import find_admin_client


class RecordsDiffer(AssertionError):
    """Raised when records are lost, doubled or different. A test that fails with this error is never run a second time."""


def same_multiset(expected: Iterable[Any], found: Iterable[Any]) -> int:
    """Assert that both hold the same items the same number of times, in any order. Return the number of items.

    :raises RecordsDiffer: naming the missing items and the additional ones.
    :raises AssertionError: there was nothing to compare.
    """
    want, have = Counter(expected), Counter(found)
    missing, surplus = want - have, have - want
    if missing or surplus:
        raise RecordsDiffer(
            f"{sum(missing.values())} missing, {sum(surplus.values())} too many; "
            f"missing {_list_first(missing)}, too many {_list_first(surplus)}"
        )
    assert want, "nothing was compared"
    return sum(want.values())


def _list_first(items: Counter[Any]) -> str:
    shown = [f"{text[:400]}{'...' * (len(text) > 400)}" for text in map(repr, list(items)[:6])]
    return f"[{', '.join(shown)}{', ...' * (len(items) > 6)}]"


def wait_stable(config: dict[str, Any], topic: str, seconds: float = 45.0) -> bool:
    """Wait until read_committed readers get to the present end of the log: a commit is acknowledged before all partitions have
    it.

    :return: False if they do not within so many seconds, because a transaction was left open.
    """
    admin = find_admin_client(config)

    def ends(level: IsolationLevel) -> dict[int, int]:
        partitions = [TopicPartition(topic, p) for p in admin.list_topics(topic, timeout=60).topics[topic].partitions]
        if not partitions:
            return {}
        asked = admin.list_offsets(dict.fromkeys(partitions, OffsetSpec.latest()), isolation_level=level, request_timeout=60)
        return {tp.partition: answer.result(60).offset for tp, answer in asked.items()}

    high: dict[int, int] = {}

    def reached() -> bool:
        try:
            high.update({} if high else ends(IsolationLevel.READ_UNCOMMITTED))
            stable = ends(IsolationLevel.READ_COMMITTED)
        except KafkaException:  # a broker that is just coming back
            return False
        return all(stable[partition] >= end for partition, end in high.items())

    return wait_until(reached, seconds)


def committed_messages(config: dict[str, Any], topic: str, *, stable: bool = True) -> list[Message]:
    """Return every committed record of a topic, each partition in order. The provider's code is not used.

    :param stable: False if a transaction is open on purpose and must not be awaited.
    """
    if stable:
        wait_stable(config, topic)
    consumer = Consumer(
        {
            **ALL_BROKERS,
            **config,
            "group.id": "oracle",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,  # the broker tells of the end only after it has waited this long for more
            "enable.auto.commit": False,
        }
    )
    try:
        partitions = list(consumer.list_topics(topic, timeout=60).topics[topic].partitions)
        bounds = {p: consumer.get_watermark_offsets(TopicPartition(topic, p), timeout=60) for p in partitions}
        consumer.assign([TopicPartition(topic, p, low) for p, (low, _) in bounds.items()])
        left, messages = {p for p, (low, high) in bounds.items() if low < high}, []
        while left:
            for message in (*consumer.consume(1, 0.1), *consumer.consume(1000, 0)):
                if message.error() is None:
                    messages.append(message)
                elif message.error().code() == KafkaError._PARTITION_EOF:
                    left.discard(message.partition())
                else:
                    raise AssertionError(message.error().str())
        return messages
    finally:
        consumer.close()


def committed_records(
    config: dict[str, Any], topic: str, *, stable: bool = True
) -> list[tuple[int, int, bytes | None, bytes | None]]:
    """Return (partition, offset, key, value) of every committed record of a topic.

    :param stable: as for :func:`committed_messages`.
    """
    return [(m.partition(), m.offset(), m.key(), m.value()) for m in committed_messages(config, topic, stable=stable)]


def windows_tile(ranges_of_windows: Iterable[Iterable[dict[str, Any]]], first: dict[tuple[str, int], int] | None = None) -> int:
    """Assert that the ranges of consecutive reports join without gap or overlap. Return the number of joints."""
    ends: dict[tuple[str, int], int] = dict(first or {})
    joints = 0
    for ranges in ranges_of_windows:
        for r in ranges:
            place = (r["topic"], r["partition"])
            if place in ends:
                if r["start"] != ends[place]:
                    raise RecordsDiffer(f"{place}: a window starts at {r['start']}, the one before ended at {ends[place]}")
                joints += 1
            ends[place] = r["end"]
    assert joints, "nothing was compared"
    return joints
