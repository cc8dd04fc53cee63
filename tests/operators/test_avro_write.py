"""Avro end to end: rows of tables and topics are published with schemas of a registry, and read by Confluent's deserializer."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from decimal import Decimal

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from airflow_kafka_spark.errors import ValidationError
from airflow_kafka_spark.formats import Avro, Json
from airflow_kafka_spark.hooks.schema_registry import SchemaRegistryHook
from airflow_kafka_spark.transforms import ReplaceField, ValueToKey
from tests.support.oracle import committed_records, same_multiset
from tests.support.pipelines import SCHEMA
from tests.support.registry import EmbeddedRegistry
from tests.support.relay import Relay, decoded, relay
from tests.support.shop import Shop, shop

CONN = "schema_registry_default"
AVRO = Avro(registry=CONN)


@pytest.fixture(autouse=True)
def connection(registry: EmbeddedRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SCHEMA_REGISTRY_DEFAULT", registry.connection())


@pytest.fixture
def orders(kafka, postgres, unique, tmp_path):
    with shop(kafka, postgres, unique, tmp_path, value=AVRO, key_format=AVRO) as made:
        yield made


@pytest.fixture
def topics(kafka, unique, tmp_path):
    with relay(kafka, unique, tmp_path) as made:
        yield made


def reading(registry: EmbeddedRegistry, topic: str, field: str):
    read = AvroDeserializer(SchemaRegistryClient({"url": registry.url}))
    return lambda value: read(value, SerializationContext(topic, field))


def published(orders: Shop, registry: EmbeddedRegistry) -> list[tuple]:
    """Return every committed record as Confluent's deserializer reads it, with the id of its schema."""
    key, value = (reading(registry, orders.topic, field) for field in (MessageField.KEY, MessageField.VALUE))
    found = []
    for _, _, key_bytes, value_bytes in committed_records(orders.kafka.connection_extra(), orders.topic):
        row = value(value_bytes)
        assert key(key_bytes) == row["id"]
        found.append((int.from_bytes(value_bytes[1:5], "big"), row))
    return found


def table(orders: Shop) -> list[dict]:
    with orders.postgres.connect(autocommit=True) as connection:
        cursor = connection.execute(f'SELECT * FROM "{orders.table}"')
        names = [column.name for column in cursor.description]
        return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def items(row: dict) -> tuple:
    return tuple(sorted(row.items()))


def execute(orders: Shop, statement: str) -> None:
    with orders.postgres.connect(autocommit=True) as connection:
        connection.execute(statement.format(table=f'"{orders.table}"'))


def test_windows_are_read_by_confluents_deserializer_also_after_a_change_of_the_table_and_one_not_compatible_is_refused(
    orders, registry
):
    orders.sell(300)
    execute(orders, "UPDATE {table} SET customer = NULL, amount = -9999999999.99 WHERE id = 7")
    orders.run("run1")
    execute(orders, "ALTER TABLE {table} ADD note text")
    with orders.postgres.connect(autocommit=True) as connection:
        connection.execute(f"INSERT INTO \"{orders.table}\" VALUES (1000, 'é😀', 0.01, '1969-12-31T23:59:59.999999Z', 'new')")
    orders.run("run2")
    found = published(orders, registry)
    hook, subject = SchemaRegistryHook(), f"{orders.topic}-value"
    versions = hook.list_versions(subject)
    assert [version.version for version in versions] == [1, 2]
    assert {number for number, _ in found} == {version.id for version in versions}
    late = [row for number, row in found if number == versions[1].id]
    assert late == [{
        "id": 1000, "customer": "é😀", "amount": Decimal("0.01"), "note": "new",
        "placed_at": datetime(1969, 12, 31, 23, 59, 59, 999999, timezone.utc),
    }]  # fmt: skip
    rows = [{"note": None, **row} for _, row in found]
    assert same_multiset(map(items, table(orders)), map(items, rows)) == 301
    # The registry refuses this schema: nothing is published.
    hook.client.set_compatibility(subject, "BACKWARD")
    execute(orders, "ALTER TABLE {table} ALTER customer TYPE bigint USING 1")
    execute(orders, "INSERT INTO {table} VALUES (2000, 1, 1, now())")
    with pytest.raises(ValidationError, match=f"subject `{subject}` does not take .*`customer` was string, is long"):
        orders.run("run3")
    assert len(published(orders, registry)) == 301 and len(hook.list_versions(subject)) == 2
    # No window was planned: the next one has the row that was inserted since.
    execute(orders, "ALTER TABLE {table} ALTER customer TYPE text")
    execute(orders, "INSERT INTO {table} VALUES (2001, 'later', 1, now())")
    orders.run("run3")
    assert len(published(orders, registry)) == 303


def test_columns_that_cannot_be_written_are_reported_before_spark_starts(orders, monkeypatch, registry):
    orders.sell(1)
    down = json.dumps({"conn_type": "schema_registry", "host": "127.0.0.1", "port": 1, "extra": {"max.retries": 0}})
    monkeypatch.setenv("AIRFLOW_CONN_DOWN", down)
    narrow = json.dumps({"type": "record", "name": "N", "fields": [{"name": "id", "type": "long"}]})
    cases = [
        (Avro(registry="down"), "did not answer"),
        (Avro(), "found neither `schema` nor `registry`"),
        (Avro(narrow), "record N has no field for column `customer`"),
        (Avro(narrow, registry=CONN, auto_register_schemas=False), "record N has no field"),
        (Avro(registry=CONN, use_latest_version=True), f"{orders.topic}-value.*HTTP 404"),
        (Avro(registry=CONN, use_latest_version=True, auto_register_schemas=True), "beside `auto_register_schemas`"),
    ]
    for avro, message in cases:
        with pytest.raises(ValidationError, match=message):
            orders.run("run1", value=avro)


def test_records_of_a_topic_are_written_anew_with_tombstones_and_in_order(topics: Relay, registry):
    topics.send(500)
    topics.records_in([(b"customer-1", None, None)])
    columns = {"id": "id", "amount": "amount", "who": "named_struct('name', customer)"}
    topics.run(value=Json(schema=SCHEMA), columns=columns, filter="amount >= 100", output_value=AVRO)
    read = reading(registry, topics.output, MessageField.VALUE)
    expected = [(r.key, None) if r.value is None else (r.key, (e["id"], Decimal(e["amount"]), {"name": e["customer"]}))
                for r in topics.read(topics.topic) for e in [decoded(r) if r.value is not None else {}]
                if r.value is None or Decimal(e["amount"]) >= 100]  # fmt: skip
    found = [(r.key, None if r.value is None else tuple(read(r.value).values())) for r in topics.read(topics.output)]
    assert same_multiset(map(repr, expected), map(repr, found)) > 100
    assert (b"customer-1", None) in found
    of_key: dict = {}
    for key, row in found:
        if row is not None:
            of_key.setdefault(key, []).append(row[0])
    assert all(ids == sorted(ids) for ids in of_key.values())


def test_another_format_alone_writes_all_columns_anew_and_not_bytes_that_are_not_read(topics: Relay, registry):
    topics.send(50)
    with pytest.raises(ValidationError, match="sink.value: values are read as bytes"):
        topics.run(output_value=AVRO)
    topics.records_in([(b"customer-1", None, None)])
    topics.run(value=Json(schema=SCHEMA), output_value=AVRO)
    # A schema that the registry refuses is found before a window is planned: the next window has both records.
    SchemaRegistryHook().client.set_compatibility(f"{topics.output}-value", "BACKWARD")
    topics.send(1)
    with pytest.raises(ValidationError, match="does not take .*`id` was long, is string"):
        topics.run("run2", value=Json(schema=SCHEMA), columns={"id": "string(id)"}, output_value=AVRO)
    topics.send(1)
    topics.run("run2", value=Json(schema=SCHEMA), output_value=AVRO)
    read = reading(registry, topics.output, MessageField.VALUE)
    found = [(r.key, None if r.value is None else tuple(read(r.value).values())) for r in topics.read(topics.output)]
    expected = [(r.key, None) for r in topics.read(topics.topic) if r.value is None]
    for record in topics.read(topics.topic):
        if record.value is not None:
            row = decoded(record)
            at = datetime.fromisoformat(row["placed_at"].replace("Z", "+00:00"))
            expected.append((record.key, (row["id"], row["customer"], Decimal(row["amount"]), at)))
    assert same_multiset(map(repr, expected), map(repr, found)) == 53


def test_what_transforms_make_is_written_too(topics: Relay, registry):
    topics.send(50)
    options = {"transforms": [ReplaceField(exclude="placed_at"), ValueToKey(fields="customer")], "output_key_format": AVRO}
    topics.run(value=Json(schema=SCHEMA), output_value=AVRO, **options)
    value, key = (reading(registry, topics.output, field) for field in (MessageField.VALUE, MessageField.KEY))
    found = [(key(r.key), *value(r.value).values()) for r in topics.read(topics.output)]
    rows = [decoded(r) for r in topics.read(topics.topic)]
    expected = [(row["customer"], row["id"], row["customer"], Decimal(row["amount"])) for row in rows]
    assert same_multiset(expected, found) == 50
