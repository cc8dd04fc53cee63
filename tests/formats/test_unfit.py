"""Rows that a format refuses are reported one by one, and the others are written; the form of rows in messages."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from airflow_kafka_spark.formats import Avro, JsonSchema, Protobuf
from airflow_kafka_spark.formats.base import Format
from airflow_kafka_spark.formats.tasks.text import format_rows_as_json
from airflow_kafka_spark.formats.types import parse_ddl
from airflow_kafka_spark.sinks.kafka.tasks.encode import KeyValueEncoder
from airflow_kafka_spark.windows.model import KEY_CONVERTER, VALUE_CONVERTER

FIELDS = [{"name": "id", "type": "int"}, {"name": "name", "type": "string"}]
FORMATS = [
    Avro(json.dumps({"type": "record", "name": "R", "fields": FIELDS})),
    Protobuf(schema='syntax = "proto3"; message R { int32 id = 1; string name = 2; }'),
    JsonSchema(schema="id int NOT NULL, name string NOT NULL"),
]
ROWS = pa.struct([("id", pa.int64()), ("name", pa.string())])


def texts(*values: bytes) -> pa.Array:
    """Return an array of texts whose bytes are not checked."""
    ends = [sum(map(len, values[:n])) for n in range(len(values) + 1)]
    buffers = [None, pa.py_buffer(pa.array(ends, pa.int32()).buffers()[1]), pa.py_buffer(b"".join(values))]
    return pa.Array.from_buffers(pa.string(), len(values), buffers)


def rows(ids: list[int | None], *names: bytes) -> pa.StructArray:
    return pa.StructArray.from_arrays([pa.array(ids, pa.int64()), texts(*names)], fields=list(ROWS))


@pytest.mark.parametrize("format", FORMATS, ids=["avro", "protobuf", "json"])
def test_every_row_that_does_not_fit_is_reported_and_every_other_is_written(format: Format) -> None:
    encoder = format.to_write("orders", "value").make_struct_encoder(parse_ddl("id bigint, name string"))
    fine = encoder.encode_struct(rows([1, 2], b"a", b"\xc3\xa9"))
    assert fine.bad == () and fine.values.null_count == 0
    found = encoder.encode_struct(rows([1 << 40, 1, None, 2], b"a", b"a", b"b", b"\xc3\xa9"))
    assert [at for at, _ in found.bad] == [0, 2]
    assert all(reason.startswith("column `id`: ") for _, reason in found.bad)
    assert found.values.to_pylist() == [None, fine.values[0].as_py(), None, fine.values[1].as_py()]
    broken = encoder.encode_struct(rows([1, 5, 2], b"a", b"\xff", b"\xc3\xa9"))
    assert [at for at, _ in broken.bad] == [1] and "byte 0xff" in broken.bad[0][1]
    assert broken.values.to_pylist() == [fine.values[0].as_py(), None, fine.values[1].as_py()]


def test_of_a_row_whose_key_does_not_fit_either_the_key_is_reported_and_a_key_that_fits_is_kept_for_the_dead_letter() -> None:
    value = FORMATS[0].to_write("orders", "value").make_struct_encoder(parse_ddl("id bigint, name string"))
    key = Avro('"int"').to_write("orders", "key").make_struct_encoder(parse_ddl("id bigint"))
    ids = pa.array([1, 1 << 40, 3], pa.int64())
    keys = pa.StructArray.from_arrays([ids], ["id"])
    values = pa.StructArray.from_arrays([ids, pa.array(["a", "b", None])], ["id", "name"])
    records, misfits = KeyValueEncoder({"key": key, "value": value}).encode(
        pa.RecordBatch.from_arrays([keys, values], ["key", "value"])
    )
    assert {at: stage for at, (stage, _) in misfits.items()} == {1: KEY_CONVERTER, 2: VALUE_CONVERTER}
    assert misfits[1][1].startswith("key: column `id`")
    assert records.column("key").to_pylist() == [b"\x02", None, b"\x06"]
    assert records.column("value").is_null().to_pylist() == [False, True, True]


def one(value: Any, type_: pa.DataType) -> pa.Array:
    return pa.array([value], type_)


@pytest.mark.parametrize(
    ("column", "shown"),
    [
        (texts(b"\xffa"), '"\ufffda"'),
        (one(Decimal("1.10"), pa.decimal128(12, 2)), "1.10"),
        (one(Decimal("0.00000001"), pa.decimal128(38, 8)), "0.00000001"),
        (one(253_402_300_800_000_000, pa.timestamp("us", "UTC")), '"10000-01-01T00:00:00.000000Z"'),
        (one(0, pa.timestamp("us")), '"1970-01-01T00:00:00.000000"'),
        (one(2_932_897, pa.int32()).cast(pa.date32()), '"10000-01-01"'),
        (one(float("-inf"), pa.float64()), '"-Infinity"'),
        (one(0.1, pa.float32()), "0.1"),
        (one(b"\xff", pa.binary()), '"/w=="'),
        (one(True, pa.bool_()), "true"),
        (one(None, pa.string()), "null"),
        (one({"x": 1, "y": "é"}, pa.struct([("x", pa.int32()), ("y", pa.string())])), '{"x":1,"y":"é"}'),
        (one([(7, float("nan"))], pa.map_(pa.int32(), pa.float64())), '{"7":"NaN"}'),
        (one([1, None], pa.list_(pa.int64())), "[1,null]"),
        (one(1, pa.duration("us")), '"0:00:00.000001"'),
    ],
    ids=lambda found: found if isinstance(found, str) else "",
)
def test_what_is_shown_of_a_value_is_json_whatever_it_is(column: pa.Array, shown: str) -> None:
    (found,) = format_rows_as_json([("c", column)])
    assert found.decode() == f'{{"c":{shown}}}' and json.loads(found)
