"""Formats end to end: records of other producers are in the sink, each exactly once."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pyarrow.dataset as ds
import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.errors import ValidationError
from airflow_kafka_spark.formats import Avro, Debezium, Json
from airflow_kafka_spark.sinks import PostgresSink
from airflow_kafka_spark.transforms import InsertField, ReplaceField
from tests.support.clients import find_producer
from tests.support.dead_letters import decode_headers, letters
from tests.support.oracle import same_multiset
from tests.support.pipelines import Pipeline
from tests.support.registry import serializer

OLD = {"type": "record", "name": "shop.Order", "fields": [{"name": "id", "type": "int"}, {"name": "old", "type": "string"}]}
NEW = {
    "type": "record",
    "name": "shop.Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}, "default": "\u0000"},
        {"name": "note", "type": ["null", "string"], "default": None},
    ],
}


@pytest.fixture
def avro(registry, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_SCHEMA_REGISTRY_DEFAULT", registry.connection())
    return Avro(registry="schema_registry_default")


def test_avro_of_old_and_new_schemas_comes_out_transformed_as_the_latest_has_it_and_what_is_none_is_a_dead_letter(
    files: Pipeline, registry, avro
):
    """`test_schema_change.py` reads it without transforms."""
    transforms = [InsertField(static_field="by", static_value="us")]
    old, new, dead = serializer(registry.url, OLD), serializer(registry.url, NEW), f"dead-{files.topic}"
    producer, expected = Producer(files.kafka.connection_extra()), []
    old(files.topic, {"id": 0, "old": ""})  # registered first
    for number in range(90):
        if number % 2:
            value = old(files.topic, {"id": number, "old": "x"})
            expected.append((number, Decimal("0.00"), None))
        else:
            row = (number, Decimal(number).scaleb(-2), f"note {number}" if number % 4 else None)
            value = new(files.topic, {"id": row[0], "amount": row[1], "note": row[2]})
            expected.append(row)
        producer.produce(files.topic, value, b"%d" % number)
    cut_off = new(files.topic, {"id": 1, "amount": Decimal(1), "note": None})[:-1]
    bad = [b"", b"\x01\x00\x00\x00\x01", b"\x00\x7f\xff\xff\xff\x02", cut_off]
    for value in bad:
        producer.produce(files.topic, value)
    assert producer.flush(60) == 0
    report = files.run("run1", value=avro, transforms=transforms, errors_tolerance="all", errors_deadletterqueue_topic_name=dead)
    table = ds.dataset(files.place, format="parquet", partitioning="hive").to_table()
    rows = zip(*(table[name].to_pylist() for name in ("id", "amount", "note")), strict=True)
    assert same_multiset(expected, rows) == 90
    assert set(table["by"].to_pylist()) == {"us"}
    there = letters(files.kafka.connection_extra(), dead)
    assert same_multiset(bad, [value for _, value, *_ in there]) == 4 == report["records_rejected"]
    assert {decode_headers(headers)["class.name"] for *_, headers in there} == {"airflow_kafka_spark.formats.avro.format.Avro"}
    assert any("2147483647" in decode_headers(headers)["exception.message"] for *_, headers in there), "the unknown id is named"


def test_a_topic_without_a_schema_is_reported_before_anything_is_read(files: Pipeline, avro):
    with pytest.raises(ValidationError, match=f"{files.topic}-value"):
        files.run("run1", value=avro)


ROW = {
    "type": "record",
    "name": "shop.orders.Value",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "customer", "type": "string"},
        {"name": "amount", "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 12, "scale": 2}]},
        {"name": "placed_at", "type": {"type": "long", "connect.name": "io.debezium.time.MicroTimestamp"}},
        {"name": "more", "type": "string"},
    ],
}
EVENT = {
    "type": "record",
    "name": "shop.orders.Envelope",
    "fields": [
        {"name": "before", "type": ["null", ROW], "default": None},
        {"name": "after", "type": ["null", "shop.orders.Value"], "default": None},
        {"name": "source", "type": {"type": "record", "name": "Source", "fields": [{"name": "table", "type": "string"}]}},
        {"name": "op", "type": "string"},
        {"name": "ts_ms", "type": ["null", "long"], "default": None},
    ],
}
ROW_KEY = {"type": "record", "name": "shop.orders.Key", "fields": [{"name": "id", "type": "long"}]}


def event(op: str, number: int, amount: Any, placed_at: Any) -> dict[str, Any]:
    row = {"id": number, "customer": f"customer-{number}", "amount": amount, "placed_at": placed_at, "more": "x"}
    before, after = (row, None) if op == "d" else (None, row)
    return {"before": before, "after": after, "op": op, "source": {"table": "orders"}, "ts_ms": 1}


@pytest.mark.parametrize("how", ["json", "transformed avro"])
def test_change_events_of_debezium_make_a_table_equal_to_their_source(table: Pipeline, registry, avro, how):
    with table.postgres.connect(autocommit=True) as connection:
        connection.execute(f'ALTER TABLE "{table.place}" ADD PRIMARY KEY (id), ALTER COLUMN placed_at TYPE timestamp')
    sink = PostgresSink(conn_id="warehouse", table=table.place, mode="upsert", key=["id"], delete_enabled=True)
    schema = "id bigint, customer string, amount decimal(12,2), placed_at timestamp_ntz"
    options = {"value": Debezium(Json(schema=schema)), "key": Json(schema="id bigint"), "sink": sink}
    if how == "transformed avro":
        options |= {"value": Debezium(avro), "key": avro, "transforms": [ReplaceField(exclude="more")]}
    wire = {part: serializer(registry.url, schema, part) for part, schema in (("key", ROW_KEY), ("value", EVENT))}
    producer, state = find_producer(table.kafka, table.topic), {}

    def send(op: str, number: int, amount: str | None = None) -> None:
        if how == "transformed avro":
            exact = Decimal(amount) if amount else None
            key = wire["key"](table.topic, {"id": number})
            value = wire["value"](table.topic, event(op, number, exact, 1_767_225_600_000_000))
        else:
            key = json.dumps({"id": number}).encode()
            value = json.dumps(event(op, number, amount, "2026-01-01T00:00:00")).encode()
        producer.produce(table.topic, value, key, number % table.partitions)
        if op == "d":
            producer.produce(table.topic, None, key, number % table.partitions)
            state.pop(number, None)
        else:
            state[number] = amount

    for window in range(2):
        for number in range(60):
            send("r" if window == 0 else "c", number, f"{number}.00")
            if number % 3 == 0:
                send("u", number, f"{number}.50")
            if number % 5 == 0:
                send("d", number)
            if number % 10 == 0:
                send("c", number, "7.77")
        assert producer.flush(60) == 0
        report = table.run(f"run{window}", **options)
        assert same_multiset(state.items(), [(row[0], row[2]) for row in table.rows()]) == 54
        assert {row[3] for row in table.rows()} == {1_767_225_600}
        assert report["records_rejected"] == 0
