"""Shapes of records, Kafka -> Parquet: 100 fields, nested, 10 kB and 20 bytes, each beside plain Spark on the same topic."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks import events
from benchmarks.bench import Stand, compare, plain_spark


@dataclass(frozen=True)
class Shape:
    """One kind of record, and how many of the stand's records make about as many bytes."""

    name: str
    schema: str
    value: Callable[[int], bytes]
    share: int


def _wide(n: int) -> bytes:
    kinds: tuple[Callable[[int], object], ...] = (
        lambda i: n * i,
        lambda i: f"text-{n + i}",
        lambda i: (n + i) / 8,
        lambda i: n % 2 == 0,
    )
    return json.dumps({f"f{i}": kinds[i % 4](i) for i in range(100)}, separators=(",", ":")).encode()


def _nested(n: int) -> bytes:
    lines = [{"sku": f"sku-{n + i}", "quantity": i + 1, "price": (n % 900) / 4, "tags": ["a", f"t{i}"]} for i in range(n % 4 + 1)]
    buyer = {"id": n % 5000, "name": f"buyer {n}", "address": {"city": f"city {n % 70}", "zip": f"{n % 99999:05d}"}}
    return json.dumps(
        {"id": n, "buyer": buyer, "lines": lines, "attributes": {"a": "1", f"k{n % 9}": "2"}}, separators=(",", ":")
    ).encode()


TEXT = "".join(f"line {i} of a long text, as documents have it; " for i in range(230))

SHAPES = (
    Shape("100 fields", ", ".join(f"f{i} {('bigint', 'string', 'double', 'boolean')[i % 4]}" for i in range(100)), _wide, 16),
    Shape(
        "nested",
        "id bigint, buyer struct<id: bigint, name: string, address: struct<city: string, zip: string>>, "
        "lines array<struct<sku: string, quantity: int, price: double, tags: array<string>>>, attributes map<string, string>",
        _nested,
        4,
    ),
    Shape("10 kB", "id bigint, body string", lambda n: b'{"id":%d,"body":"%s"}' % (n, TEXT.encode()), 100),
    Shape("20 bytes", "id bigint, n int", lambda n: b'{"id":%d,"n":%d}' % (n, n % 100), 1),
)


def run(stand: Stand) -> None:
    for shape in SHAPES:
        _compare(stand, shape)


def _compare(stand: Stand, shape: Shape) -> None:
    from airflow_kafka_spark.formats import Json
    from airflow_kafka_spark.operators import KafkaToSinkOperator
    from airflow_kafka_spark.sinks import FilesSink
    from tests.support.runs import context

    topic, records = f"shape-{shape.name.replace(' ', '-')}", max(1, stand.records // shape.share)
    stand.kafka.create_topic(topic, events.PARTITIONS)
    _fill(stand, topic, shape, records)
    place = stand.directory / topic

    def plain(turn: int) -> None:
        shutil.rmtree(place, ignore_errors=True)
        plain_spark(stand, topic, shape.schema).write.parquet(str(place))

    def ours(turn: int) -> None:
        shutil.rmtree(place, ignore_errors=True)
        pipeline = f"{topic}-{turn}"
        operator = KafkaToSinkOperator(
            task_id="bench", topics=topic, group_id=pipeline, pipeline=pipeline, value=Json(schema=shape.schema),
            sink=FilesSink(path=str(place)), max_records=None,
        )  # fmt: skip
        report = operator.execute(context(f"run-{turn}"))
        assert report["records_written"] == records, report

    base = "plain Spark: from_json, write.parquet"
    size = len(shape.value(records // 2))
    title = f"{shape.name}: {records:,} records of about {size:,} bytes -> Parquet"
    compare(stand, title, {base: plain, "KafkaToSinkOperator, FilesSink": ours}, base=base, records=records)


def _fill(stand: Stand, topic: str, shape: Shape, records: int) -> None:
    from confluent_kafka import Producer

    config: dict[str, Any] = {"compression.type": "lz4", "linger.ms": 20, "queue.buffering.max.messages": 1_000_000}
    producer = Producer({**stand.kafka.connection_extra(), **config})
    for start in range(0, records, 1_000):
        numbers = range(start, min(start + 1_000, records))
        left = [{"key": b"%d" % n, "value": shape.value(n)} for n in numbers]
        # Those that the full queue refuses are asked for again: the 10 kB records fill it.
        while left:
            producer.produce_batch(topic, left)
            left = [{"key": m["key"], "value": m["value"]} for m in left if m.get("_error") is not None]
            producer.poll(0.1 if left else 0)
    assert producer.flush(120) == 0
