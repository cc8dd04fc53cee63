"""Between topics: a record that does not fit the schema of the output is bad, and its dead letter equals the original record."""

from __future__ import annotations

import io
import json
from decimal import Decimal

import fastavro
import pytest

from airflow_kafka_spark.errors import BadRecords, TooManyBadRecords
from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.transforms import Condition, ExtractField, Filter, ReplaceField, ValueToKey
from tests.support.dead_letters import decode_headers, is_bad
from tests.support.pipelines import SCHEMA
from tests.support.relay import Record, Relay, decoded, relay
from tests.support.unfit import avro

VALUE = {"type": "record", "name": "Short", "fields": [
    {"name": "id", "type": "long"},
    {"name": "amount", "type": {"type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2}},
]}  # fmt: skip
OUTPUT = {"value": Json(schema=SCHEMA), "output_value": avro(VALUE), "output_key_format": avro("int")}
COLUMNS = {**OUTPUT, "filter": "id % 2 = 0", "columns": {"id": "id", "amount": "amount"}, "output_key": "id"}
TRANSFORMS = {**OUTPUT, "transforms": [
    Filter(predicate=Condition("id % 2 = 1")), ReplaceField(include="id,amount"), ValueToKey("id"), ExtractField("id", of="key"),
]}  # fmt: skip
UNFIT = {
    b"unfit-key": {"id": 1 << 40, "amount": "1.00"},
    b"unfit-amount": {"id": 4, "amount": "12345.00"},
    b"unfit-null": {"id": 6},
}


@pytest.fixture
def orders(kafka, unique, tmp_path, partitions):
    with relay(kafka, unique, tmp_path, partitions=partitions) as made:
        yield made


def written(schema, value) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return out.getvalue()


def becomes(record: Record):
    order = decoded(record)
    if order["id"] % 2:
        return None
    value = {"id": order["id"], "amount": Decimal(order["amount"])}
    return written("int", order["id"]), written(VALUE, value), record.timestamp, record.headers


def wrong(record: Record) -> bool:
    return is_bad(record.value) or (record.key or b"").startswith(b"unfit")


@pytest.mark.parametrize("options", [COLUMNS, TRANSFORMS], ids=["columns", "transforms"])
def test_what_cannot_be_written_is_a_dead_letter_as_it_was_read_and_counted_before(orders: Relay, options) -> None:
    dead = f"dead-{orders.output}"
    bad = orders.send_mixed(200, 20)
    orders.records_in([(key, json.dumps(value).encode(), [("trace", key), ("trace", None)]) for key, value in UNFIT.items()])
    orders.records_in([(b"unfit but left out", json.dumps({"id": (1 << 40) + 1, "amount": "1"}).encode(), None)])
    out = lambda r: r.key != b"unfit but left out" and wrong(r)  # noqa: E731 - the filter comes first
    tolerant = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    with pytest.raises(TooManyBadRecords, match=rf"{bad + 3} of the {204 + bad} records.*are bad"):
        orders.run("run1", **options, **tolerant, max_errors=bad + 2)
    assert orders.read(orders.output) == [] == orders.read(dead)
    report = orders.run("run1", **options, **tolerant, max_errors=bad + 3)
    assert orders.check_sorted_out(dead, becomes, out) == (100, bad + 3)
    counts = ("records_read", "records_written", "records_rejected", "records_filtered")
    assert [report[name] for name in counts] == [204 + bad, 100, bad + 3, 101]
    facts = {record.key: decode_headers(list(record.headers)) for record in orders.read(dead)}
    for key, stage, reason in (
        (b"unfit-key", "KEY_CONVERTER", "cannot be written: key: column `"),
        (b"unfit-amount", "VALUE_CONVERTER", "cannot be written: column `amount`: found 12345.00, expected decimal(5,2)"),
        (b"unfit-null", "VALUE_CONVERTER", "cannot be written: column `amount`: found null"),
    ):
        assert facts[key]["stage"] == stage and facts[key]["exception.message"].startswith(reason), facts[key]
        assert facts[key]["class.name"] == "airflow_kafka_spark.formats.avro.format.Avro"
    assert "airflow_kafka_spark.formats.json.format.Json" in {found["class.name"] for found in facts.values()}


def test_without_a_topic_they_are_left_out_and_counted(orders: Relay) -> None:
    orders.send(20)
    orders.records_in([(key, json.dumps(value).encode(), None) for key, value in UNFIT.items()])
    with pytest.raises(BadRecords, match="cannot be written: column `amount`: found null"):
        orders.run("run1", **COLUMNS)
    report = orders.run("run1", **COLUMNS, errors_tolerance="all", errors_skip=True)
    assert (report["records_written"], report["records_rejected"], report["records_filtered"]) == (10, 3, 10)
    assert orders.check(lambda r: None if wrong(r) else becomes(r)) == 10
