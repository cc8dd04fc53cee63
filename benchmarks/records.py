"""Measure the decoding of records, Kafka -> Parquet: Avro through a schema registry against Spark's bare ``from_avro``, ten
transforms against none, and tolerated errors against none."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from typing import Any

from benchmarks import events
from benchmarks.bench import SCHEMA, Stand, compare

AVRO, BAD = "orders-avro", "orders-bad"
ORDER = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "customer", "type": "string"},
        {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}},
        {"name": "placed_at", "type": {"type": "long", "logicalType": "timestamp-micros"}},
    ],
}
PARTITIONS = 4


def run(stand: Stand) -> None:
    _avro(stand)
    _transforms(stand)
    _errors(stand)


def _operate(stand: Stand, name: str, turn: int, topic: str, value: Any, **options: Any) -> dict[str, Any]:
    from airflow_kafka_spark.operators import KafkaToSinkOperator
    from airflow_kafka_spark.sinks import FilesSink
    from tests.support.runs import context

    place = stand.directory / name
    shutil.rmtree(place, ignore_errors=True)
    pipeline = f"{name}-{turn}"
    operator = KafkaToSinkOperator(
        task_id="bench",
        topics=topic,
        group_id=pipeline,
        pipeline=pipeline,
        value=value,
        sink=FilesSink(path=str(place)),
        **options,
    )
    return operator.execute(context(f"run-{turn}"))


def _avro(stand: Stand) -> None:
    from pyspark.sql import functions as F
    from pyspark.sql.avro.functions import from_avro

    from airflow_kafka_spark.formats import Avro
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from tests.support.registry import EmbeddedRegistry

    with EmbeddedRegistry() as registry:
        os.environ["AIRFLOW_CONN_SCHEMA_REGISTRY_DEFAULT"] = registry.connection()
        _fill_avro(stand, registry.url)
        with KafkaHook() as hook:
            ends = {str(tp.partition): o.lso for tp, o in hook.read_offsets([AVRO]).items()}

        def bare(turn: int) -> None:
            place = stand.directory / "bare"
            shutil.rmtree(place, ignore_errors=True)
            options = {
                "kafka.bootstrap.servers": stand.kafka.bootstrap_servers, "subscribe": AVRO,
                "startingOffsets": "earliest", "endingOffsets": json.dumps({AVRO: ends}),
            }  # fmt: skip
            frame = stand.spark.read.format("kafka").options(**options).load()
            payload = F.expr("substring(value, 6)")
            frame.select(from_avro(payload, json.dumps(ORDER)).alias("v")).select("v.*").write.parquet(str(place))

        def ours(turn: int) -> None:
            report = _operate(stand, "avro", turn, AVRO, Avro(registry="schema_registry_default"))
            assert report["records_written"] == stand.records, report

        compare(
            stand,
            "Avro -> Parquet",
            {"plain Spark: bare from_avro, write.parquet": bare, "KafkaToSinkOperator, Avro through the registry": ours},
            base="plain Spark: bare from_avro, write.parquet",
        )


def _fill_avro(stand: Stand, url: str) -> None:
    from datetime import datetime
    from decimal import Decimal
    from io import BytesIO

    import fastavro
    from confluent_kafka import Producer
    from confluent_kafka.schema_registry import Schema, SchemaRegistryClient

    number = SchemaRegistryClient({"url": url}).register_schema(f"{AVRO}-value", Schema(json.dumps(ORDER), "AVRO"))
    header, schema = b"\0" + number.to_bytes(4, "big"), fastavro.parse_schema(ORDER)
    stand.kafka.create_topic(AVRO, PARTITIONS)
    producer = Producer({**stand.kafka.connection_extra(), "linger.ms": 20, "compression.type": "lz4"})
    for n in range(stand.records):
        event = json.loads(events.order(n))
        at = datetime.fromisoformat(event["placed_at"].replace("Z", "+00:00"))
        out = BytesIO(header)
        out.seek(0, 2)
        fastavro.schemaless_writer(out, schema, {**event, "amount": Decimal(event["amount"]), "placed_at": at})
        while True:
            try:
                producer.produce(AVRO, out.getvalue(), b"%d" % n, n % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(120) == 0


def _transforms(stand: Stand) -> None:
    from airflow_kafka_spark.formats import Json
    from airflow_kafka_spark.transforms import Cast, Condition, Filter, InsertField, InsertHeader, MaskField, ReplaceField

    ten = (
        InsertField(static_field="by", static_value="us"),
        InsertField(offset_field="at"),
        InsertField(partition_field="part"),
        InsertField(topic_field="origin"),
        ReplaceField(renames="customer:buyer"),
        MaskField(fields="buyer", replacement="***"),
        Cast(spec="part:int64"),
        InsertHeader(header="seen", value_literal="yes"),
        ReplaceField(exclude="origin"),
        Filter(predicate=Condition("id < 0")),
    )

    def ours(turn: int, name: str, **options: Any) -> None:
        report = _operate(stand, name, turn, events.TOPIC, Json(schema=SCHEMA), **options)
        assert report["records_written"] == stand.records, report

    base = "no transform"
    compare(
        stand,
        "Ten transforms",
        {base: lambda turn: ours(turn, "none"), "ten transforms": lambda turn: ours(turn, "ten", transforms=ten)},
        base=base,
    )


def _errors(stand: Stand) -> None:
    from airflow_kafka_spark.formats import Json

    bad = stand.records // 100
    stand.kafka.create_topic(BAD, PARTITIONS)
    _fill_bad(stand)
    tolerant: dict[str, Any] = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": "orders-dead"}

    def ours(turn: int, name: str, topic: str = events.TOPIC, wrong: int = 0, **options: Any) -> None:
        report = _operate(stand, name, turn, topic, Json(schema=SCHEMA), **options)
        assert (report["records_written"], report["records_rejected"]) == (stand.records - wrong, wrong), report

    base = "errors_tolerance=none"
    contestants: dict[str, Callable[[int], None]] = {
        base: lambda turn: ours(turn, "strict"),
        "errors_tolerance=all, none bad": lambda turn: ours(turn, "tolerant", **tolerant),
        "errors_tolerance=all, 1 % dead letters": lambda turn: ours(turn, "dead", BAD, bad, **tolerant),
    }
    compare(stand, "Tolerated errors", contestants, base=base)


def _fill_bad(stand: Stand) -> None:
    """Fill a topic like the good one, except for one bad record in a hundred, evenly over the partitions."""
    from confluent_kafka import Producer

    config = {"linger.ms": 20, "compression.type": "lz4", "queue.buffering.max.messages": 1_000_000}
    producer = Producer({**stand.kafka.connection_extra(), **config})
    for start in range(0, stand.records, 10_000):
        numbers = range(start, min(start + 10_000, stand.records))
        values = (b"{" * (n % 100 == n // 100 % 100) + events.order(n) for n in numbers)
        producer.produce_batch(BAD, [{"key": b"%d" % n, "value": value} for n, value in zip(numbers, values, strict=True)])
        producer.poll(0)
    assert producer.flush(120) == 0
