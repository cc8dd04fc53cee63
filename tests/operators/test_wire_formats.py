"""Protobuf and JSON Schema in Confluent's wire format, with a real registry: values that Confluent's clients write are read, they
read the written values, and schemas that the registry refuses are reported before anything starts.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow.dataset as ds
import pytest
from confluent_kafka import Producer
from confluent_kafka.schema_registry import Schema, SchemaReference, SchemaRegistryClient
from confluent_kafka.serialization import MessageField, SerializationContext

from airflow_kafka_spark.errors import ValidationError
from airflow_kafka_spark.formats import Avro, JsonSchema, Protobuf
from airflow_kafka_spark.formats.protobuf.schema import compile_schemas, find_message
from airflow_kafka_spark.formats.registry import SchemaDocument
from airflow_kafka_spark.formats.types import parse_ddl
from tests.support.dead_letters import decode_headers, letters
from tests.support.oracle import committed_records, same_multiset
from tests.support.pipelines import Pipeline
from tests.support.shop import shop

CONN = "schema_registry_default"
UTC = datetime.timezone.utc
PROTO = ('syntax = "proto3"; package shop; message Order { int32 id = 1; string old = 2; }',
         'syntax = "proto3"; package shop; message Line { int32 n = 1; } '
         'message Order { int64 id = 1; optional string note = 3; repeated Line lines = 4; Line first = 5; }')  # fmt: skip
JSON = tuple(
    json.dumps({"title": "Order", "type": "object", "properties": properties, "required": ["id"], "additionalProperties": True})
    for properties in (
        {"id": {"type": "integer"}, "old": {"type": "string"}},
        {
            "id": {"type": "integer"},
            "note": {"type": "string"},
            "lines": {
                "type": "array",
                "items": {"type": "object", "properties": {"n": {"type": "integer", "connect.type": "int32"}}},
            },
            "first": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]},
        },
    )
)
KEY = (
    'syntax = "proto3"; message Key { int64 key_id = 1; }',
    json.dumps({"title": "Key", "type": "object", "properties": {"key_id": {"type": "integer"}}}),
)


@pytest.fixture
def client(registry, monkeypatch) -> SchemaRegistryClient:
    monkeypatch.setenv("AIRFLOW_CONN_SCHEMA_REGISTRY_DEFAULT", registry.connection())
    return SchemaRegistryClient({"url": registry.url})


def own_class(text: str, name: str = "") -> Any:
    """Return protobuf's class of a message, like generated code."""
    from google.protobuf.message_factory import GetMessageClass

    (files,) = compile_schemas([SchemaDocument(text, (), "it")])
    assert isinstance(files, bytes), files
    return GetMessageClass(find_message(files, name, "it"))


def protobuf_serializer(client: SchemaRegistryClient, text: str, name: str, field: str) -> Callable[[str, dict[str, Any]], bytes]:
    """Return Confluent's serializer, which takes a topic and a message."""
    from confluent_kafka.schema_registry.protobuf import ProtobufSerializer

    made = own_class(text, name)
    write = ProtobufSerializer(made, client, {"auto.register.schemas": True})
    return lambda topic, value: write(made(**value), SerializationContext(topic, field))


def json_serializer(client: SchemaRegistryClient, text: str, name: str, field: str) -> Callable[[str, dict[str, Any]], bytes]:
    """Return Confluent's serializer, which takes a topic and an object."""
    from confluent_kafka.schema_registry.json_schema import JSONSerializer

    write = JSONSerializer(text, client)
    return lambda topic, value: write(value, SerializationContext(topic, field))


# --- Kafka -> sink -------------------------------------------------------------------------------------------------------

KINDS = {
    "protobuf": (Protobuf, protobuf_serializer, PROTO, KEY[0], {"message": "Order"}, []),
    "json": (JsonSchema, json_serializer, JSON, KEY[1], {}, None),
}


@pytest.mark.parametrize("kind", KINDS)
def test_old_and_new_records_and_keys_of_confluents_serializers_come_out_alike_and_what_is_none_is_a_dead_letter(
    files: Pipeline, client, kind
):
    format, serializer, texts, key_text, options, none = KINDS[kind]
    old, new = (serializer(client, text, "Order", MessageField.VALUE) for text in texts)
    key, dead = serializer(client, key_text, "", MessageField.KEY), f"dead-{files.topic}"
    producer, expected = Producer(files.kafka.connection_extra()), []
    old(files.topic, {"id": 0})  # registered first
    for number in range(90):
        if number % 2:
            value, row = old(files.topic, {"id": number, "old": "x"}), (number, number, None, none, None)
        else:
            first = {"first": {"n": 7}} if number % 3 else {}
            value = new(files.topic, {"id": number, "note": "é😀", "lines": [{"n": 1}, {"n": number}], **first})
            row = (number, number, "é😀", [{"n": 1}, {"n": number}], first.get("first"))
        expected.append(row)
        producer.produce(files.topic, value, key(files.topic, {"key_id": number}))
    good_key, good = key(files.topic, {"key_id": 1}), new(files.topic, {"id": 1})
    bad = [b"", b"\x01" + good[1:], b"\x00\x7f\xff\xff\xff\x02", good[:-1], good_key]
    for value in bad:
        producer.produce(files.topic, value, good_key)
    producer.produce(files.topic, new(files.topic, {"id": 1}), b"not framed")
    assert producer.flush(60) == 0
    report = files.run(
        "run1", value=format(registry=CONN, **options), key=format(registry=CONN), errors_tolerance="all",
        errors_deadletterqueue_topic_name=dead,
    )  # fmt: skip
    table = ds.dataset(files.place, format="parquet", partitioning="hive").to_table()
    rows = [(row["id"], row["key_id"], row["note"], row["lines"], row["first"]) for row in table.to_pylist()]
    assert same_multiset(map(repr, expected), map(repr, rows)) == 90
    there = letters(files.kafka.connection_extra(), dead)
    assert len(there) == 6 == report["records_rejected"]
    assert any("2147483647" in decode_headers(headers)["exception.message"] for *_, headers in there), "the unknown id is named"


# --- source -> Kafka -----------------------------------------------------------------------------------------------------

COLUMNS = "id bigint, customer string, amount decimal(12,2), placed_at timestamp"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_published_for_confluents_deserializers(kafka, postgres, unique, tmp_path, client, kind):
    from confluent_kafka.schema_registry.json_schema import JSONDeserializer
    from confluent_kafka.schema_registry.protobuf import ProtobufDeserializer

    format = KINDS[kind][0]
    with shop(kafka, postgres, unique, tmp_path) as orders:
        orders.sell(150)
        value = format(registry=CONN, schema=COLUMNS, subject=f"{orders.topic}-value")
        key = format(registry=CONN, schema="id bigint", subject=f"{orders.topic}-key")
        report = orders.run(value=value, key_format=key)
        assert report["records_written"] == 150
        values, keys = (client.get_latest_version(f"{orders.topic}-{part}").schema for part in ("value", "key"))
        assert values.schema_type == {"protobuf": "PROTOBUF", "json": "JSON"}[kind]

        def reader(field: str, text: str) -> Callable[[bytes], dict[str, Any]]:
            context = SerializationContext(orders.topic, field)
            if kind == "json":
                from_json = JSONDeserializer(text, schema_registry_client=client)
                return lambda data: from_json(data, context)
            from_protobuf = ProtobufDeserializer(own_class(text), {"use.deprecated.format": False})

            def read(data: bytes) -> dict[str, Any]:
                message = from_protobuf(data, context)
                return {f.name: getattr(message, f.name) for f in message.DESCRIPTOR.fields}

            return read

        read_key, read_value = reader(MessageField.KEY, keys.schema_str), reader(MessageField.VALUE, values.schema_str)
        found = []
        for _, _, key_bytes, data in committed_records(kafka.connection_extra(), orders.topic):
            event = read_value(data)
            assert read_key(key_bytes) == {"id": event["id"]}
            if kind == "json":
                amount, placed_at = f"{event['amount']:.2f}", event["placed_at"]
            else:
                unscaled = int.from_bytes(event["amount"].value, "big", signed=True)
                amount = str(Decimal(unscaled).scaleb(-event["amount"].scale))
                placed_at = event["placed_at"].ToDatetime().strftime("%Y-%m-%dT%H:%M:%S.%fZ")
            found.append((event["id"], event["customer"], amount, placed_at))
        assert same_multiset([(*r[:3], _seconds(r[3])) for r in orders.rows()], [(*r[:3], _seconds(r[3])) for r in found]) == 150
        # And by this package, with the registry.
        decoded = format(registry=CONN).of_topics([orders.topic], "value").make_decoder().decode(
            [data for *_, data in committed_records(kafka.connection_extra(), orders.topic)]
        )  # fmt: skip
        assert decoded.bad == ()
        ours = [(r["id"], r["customer"], str(r["amount"]), r["placed_at"].timestamp()) for r in decoded.batch.to_pylist()]
        assert same_multiset([(*r[:3], _seconds(r[3])) for r in orders.rows()], ours) == 150


def _seconds(text: str) -> float:
    return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


# --- the registry --------------------------------------------------------------------------------------------------------


def test_protobufs_references_are_imports_by_their_names(client, unique):
    topic, money = unique("orders"), 'syntax = "proto3"; package b; message Money { int64 units = 1; }'
    text = 'syntax = "proto3"; package a; import "b/money.proto"; message Order { b.Money price = 1; }'
    client.register_schema(f"{topic}-money", Schema(money, "PROTOBUF"))
    reference = SchemaReference("b/money.proto", f"{topic}-money", 1)
    number = client.register_schema(f"{topic}-value", Schema(text, "PROTOBUF", [reference]))
    format = Protobuf(registry=CONN).of_topics([topic], "value")
    assert format.validate("value") == []
    found = format.make_decoder().decode([b"\0" + number.to_bytes(4, "big") + b"\0" + b"\x0a\x02\x08\x05"])
    assert (found.batch.to_pylist(), found.bad) == ([{"price": {"units": 5}}], ())


def test_json_schemas_references_are_put_together_by_their_names(client, unique):
    topic, money = unique("orders"), json.dumps({"type": "object", "properties": {"units": {"type": "integer", "minimum": 0}}})
    text = json.dumps({"type": "object", "properties": {"price": {"$ref": "money.json"}}})
    client.register_schema(f"{topic}-money", Schema(money, "JSON"))
    reference = SchemaReference("money.json", f"{topic}-money", 1)
    number = client.register_schema(f"{topic}-value", Schema(text, "JSON", [reference]))
    format = JsonSchema(registry=CONN, check_values=True).of_topics([topic], "value")
    assert format.validate("value") == []
    begin = b"\0" + number.to_bytes(4, "big")
    found = format.make_decoder().decode([begin + b'{"price":{"units":5}}', begin + b'{"price":{"units":-5}}'])
    assert found.batch.to_pylist() == [{"price": {"units": 5}}, {"price": None}] and [at for at, _ in found.bad] == [1]


def test_a_version_that_would_be_misread_makes_its_records_bad_and_spoils_no_other(client, unique):
    topic = unique("orders")
    old, new = (f'syntax = "proto3"; message Order {{ {kind} id = 1; }}' for kind in ("string", "int64"))
    values = [protobuf_serializer(client, t, "", MessageField.VALUE)(topic, {"id": v}) for t, v in ((old, "x"), (new, 5))]
    found = Protobuf(registry=CONN).of_topics([topic], "value").make_decoder().decode(values)
    assert found.batch.to_pylist() == [{"id": None}, {"id": 5}]
    ((at, reason),) = found.bad
    assert at == 0 and "field 1 (`id`) was of type string, which is not read as int64" in reason


def test_connects_decimals_of_64_digits_are_reported_with_their_subject_and_read_with_fewer(client, unique):
    topic = unique("orders")
    decimal = {"type": "bytes", "logicalType": "decimal", "precision": 64, "scale": 2, "connect.parameters": {"scale": "2"}}
    text = json.dumps({"type": "record", "name": "R", "fields": [{"name": "x", "type": decimal}]})
    number = client.register_schema(f"{topic}-value", Schema(text, "AVRO"))
    (problem,) = Avro(registry=CONN).of_topics([topic], "value").validate("value")
    assert f"subject `{topic}-value`, version 1" in problem.what and "`x` is decimal(64,2)" in problem.what
    assert "reader_schema" in problem.action
    narrow = Avro(registry=CONN, reader_schema=text.replace("64", "38")).of_topics([topic], "value")
    assert narrow.validate("value") == []
    found = narrow.make_decoder().decode([b"\0" + number.to_bytes(4, "big") + b"\2\x96"])
    assert (found.batch.to_pylist(), found.bad) == ([{"x": Decimal("-1.06")}], ())


@pytest.mark.parametrize("format", [Protobuf, JsonSchema])
def test_a_subject_that_is_not_there_or_of_another_kind_is_reported_before_anything_is_read(client, unique, format):
    topic = unique("orders")
    (problem,) = format(registry=CONN).of_topics([topic], "value").validate("value")
    assert problem.where == "value.registry" and f"{topic}-value" in problem.what
    client.register_schema(f"{topic}-value", Schema('{"type":"record","name":"R","fields":[{"name":"a","type":"int"}]}', "AVRO"))
    (problem,) = format(registry=CONN).of_topics([topic], "value").validate("value")
    assert f"it is of type AVRO, not {format.kind}" in problem.what


@pytest.mark.parametrize(
    ("format", "wrong"), [(Protobuf, "id string NOT NULL"), (JsonSchema, "id string NOT NULL")], ids=["protobuf", "json"]
)
def test_a_schema_is_registered_when_rows_are_written_and_only_if_it_is_compatible(client, unique, format, wrong):
    topic, columns = unique("orders"), parse_ddl("id bigint NOT NULL, note string")
    made = format(registry=CONN).to_write(topic, "value")
    assert made.find_encoding_problems("value", ["id", "note"]) == []
    subject = f"{topic}-value"
    assert subject not in client.get_subjects(), "to look changes nothing"
    assert (
        made.make_struct_encoder(columns).write({"id": 1, "note": None})[:5]
        == made.make_struct_encoder(columns).write({"id": 2})[:5]
    )
    assert client.get_versions(subject) == [1], "the same schema is registered once"
    client.set_compatibility(subject, "BACKWARD")
    with pytest.raises(ValidationError, match=f"subject `{subject}` does not take the schema of the columns of the value"):
        format(registry=CONN).to_write(topic, "value").make_struct_encoder(parse_ddl(wrong))
    (problem,) = format(registry=CONN, schema=wrong).to_write(topic, "value").find_encoding_problems("value", ["id"])
    assert "does not take the schema" in problem.what
    latest = format(registry=CONN, use_latest_version=True).to_write(topic, "value")
    assert latest.find_encoding_problems("value", ["id"]) == []
    (problem,) = latest.find_encoding_problems("value", ["id", "more"])
    assert "`more`" in problem.what
    (problem,) = (
        format(registry=CONN, schema="x int", auto_register_schemas=False)
        .to_write(unique("none"), "value")
        .find_encoding_problems("value", ["x"])
    )
    assert "is not registered" in problem.what
    assert client.get_versions(subject) == [1]


def test_other_strategies_name_subjects_after_the_record(client, unique):
    topic = unique("orders")
    for strategy, subject in (("RecordNameStrategy", f"a.O{topic[-1]}"), ("TopicRecordNameStrategy", f"{topic}-a.O{topic[-1]}")):
        format = Protobuf(registry=CONN, subject_name_strategy=strategy, message=f"a.O{topic[-1]}").to_write(topic, "value")
        value = format.make_struct_encoder(parse_ddl("id bigint NOT NULL")).write({"id": 7})
        assert subject in client.get_subjects()
        read = Protobuf(registry=CONN, subject_name_strategy=strategy, message=f"a.O{topic[-1]}").of_topics([topic], "value")
        assert read.make_decoder().decode([value]).batch.to_pylist() == [{"id": 7}]
