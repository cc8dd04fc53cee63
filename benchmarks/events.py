"""The order events that the benchmarks move."""

from __future__ import annotations

from typing import Any

TOPIC = "orders"
PARTITIONS = 4


def produce(config: dict[str, Any], first: int, count: int, topic: str = TOPIC, step: int = 1) -> None:
    """Put orders ``first`` to ``first + count - 1`` on a topic.

    :param step: their ids are multiples of it.
    """
    from confluent_kafka import Producer

    producer = Producer({**config, "compression.type": "lz4", "linger.ms": 20, "queue.buffering.max.messages": 1_000_000})
    for start in range(first, first + count, 10_000):
        numbers = range(start, min(start + 10_000, first + count))
        producer.produce_batch(topic, [{"key": b"%d" % (n * step), "value": order(n * step)} for n in numbers])
        producer.poll(0)
    producer.flush(120)


def order(n: int) -> bytes:
    return b'{"id":%d,"customer":"customer-%05d","amount":"%d.%02d","placed_at":"2026-11-%02dT%02d:%02d:%02dZ"}' % (
        n, n * 7919 % 50_000, n % 900 + 1, n % 100, n % 28 + 1, n % 24, n % 60, n * 7 % 60,
    )  # fmt: skip
