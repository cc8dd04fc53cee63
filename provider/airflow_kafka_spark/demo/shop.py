"""The demo's shop and warehouse, and the question whether each order has arrived once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

COLUMNS = "id bigint PRIMARY KEY, customer text, amount numeric(12,2), placed_at timestamptz"

CREATE = f"""
CREATE SCHEMA shop;
CREATE TABLE shop.orders ({COLUMNS});
CREATE SCHEMA sales;
CREATE TABLE sales.orders ({COLUMNS});
"""

SELL = """
INSERT INTO shop.orders
SELECT n, 'customer-' || n * 7919 %% 50000, n %% 900 + 1 + n %% 100 / 100.0,
    timestamptz '2026-11-01 00:00+00' + n * interval '7 s'
FROM generate_series(%s::bigint, %s::bigint) AS n
"""

DIFFERENT = """
SELECT count(*) FROM (
    (TABLE shop.orders EXCEPT ALL TABLE sales.orders) UNION ALL (TABLE sales.orders EXCEPT ALL TABLE shop.orders)
) AS different
"""


def compare(ids: Iterable[int], total: int) -> str:
    """Return a sentence that says whether these are exactly the ids 0 to total - 1, each once."""
    counts = Counter(ids)
    missing = total - sum(1 for n in counts if 0 <= n < total)
    doubled = sum(1 for c in counts.values() if c > 1)
    if missing or doubled or len(counts) != total:
        return f"WRONG: {missing:,} missing, {doubled:,} doubled"
    return f"all {total:,} orders, each exactly once"


def topic_ids(config: dict[str, Any], topic: str) -> list[int]:
    """Return the keys of all records that a ``read_committed`` reader sees. Uses none of this package's operators."""
    from confluent_kafka import Consumer, KafkaError, TopicPartition

    settings = {
        "group.id": "demo",
        "isolation.level": "read_committed",
        "enable.partition.eof": True,
        "enable.auto.commit": False,
    }
    consumer = Consumer({**config, **settings})
    try:
        partitions = list(consumer.list_topics(topic, timeout=30).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, p, 0) for p in partitions])
        left, found = len(partitions), []
        while left:
            for message in consumer.consume(10_000, 0.5):
                if (error := message.error()) is None:
                    found.append(int(message.key() or b"-1"))
                elif error.code() == KafkaError._PARTITION_EOF:
                    left -= 1
                else:
                    raise RuntimeError(error.str())
        return found
    finally:
        consumer.close()
