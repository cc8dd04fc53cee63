"""The demo's order events, and the question whether a sink holds each of them once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

TOPIC = "orders"
PARTITIONS = 4


def produce(config: dict[str, Any], first: int, count: int) -> None:
    """Put orders ``first`` to ``first + count - 1`` on the topic."""
    from confluent_kafka import Producer

    producer = Producer({**config, "compression.type": "lz4", "linger.ms": 20, "queue.buffering.max.messages": 1_000_000})
    for start in range(first, first + count, 10_000):
        numbers = range(start, min(start + 10_000, first + count))
        producer.produce_batch(TOPIC, [{"key": b"%d" % n, "value": order(n)} for n in numbers])
        producer.poll(0)
    producer.flush(120)


def order(n: int) -> bytes:
    return b'{"id":%d,"customer":"customer-%05d","amount":"%d.%02d","placed_at":"2026-11-%02dT%02d:%02d:%02dZ"}' % (
        n, n * 7919 % 50_000, n % 900 + 1, n % 100, n % 28 + 1, n % 24, n % 60, n * 7 % 60,
    )  # fmt: skip


def compare(ids: Iterable[int], total: int) -> str:
    """In words: whether these are exactly the ids 0 to total - 1, each once."""
    counts = Counter(ids)
    missing = total - sum(1 for n in counts if 0 <= n < total)
    doubled = sum(1 for c in counts.values() if c > 1)
    if missing or doubled or len(counts) != total:
        return f"WRONG: {missing:,} missing, {doubled:,} doubled"
    return f"all {total:,} events, each exactly once"
