"""Writing Avro: both implementations write the same bytes; written values are read by this package and by fastavro."""

from __future__ import annotations

import io
import json
import pickle
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import Any

import fastavro
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_kafka_spark.errors import RowRejected, ValidationError
from airflow_kafka_spark.formats import Avro
from airflow_kafka_spark.formats.avro.schema import derive_record, list_columns, parse
from airflow_kafka_spark.formats.avro.tasks.encode import AvroEncoder
from airflow_kafka_spark.formats.base import Encoded
from airflow_kafka_spark.formats.registry import make_wire_header
from airflow_kafka_spark.formats.types import parse_ddl, to_arrow_schema
from tests.formats.avro.random_avro import RandomAvro, bare, encoded
from tests.formats.avro.test_avro_meaning import GOOD, field, logical
from tests.formats.budget import examples

SEEDS = st.integers(0, 1 << 40)
SOME = settings(max_examples=examples(25), derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


class Watched(AvroEncoder):
    """An encoder that counts how often it used the reference."""

    asked = 0

    def encode_row_wise(self, *args: Any) -> Encoded:
        self.asked += 1
        return super().encode_row_wise(*args)


def encode(schema: Any, rows: pa.RecordBatch, ddl: str = "") -> list[bytes]:
    """The rows by both ways, which say the same; of the columns that the schema is read as, or others."""
    parsed = parse(json.dumps(schema))
    columns = parse_ddl(ddl) if ddl else list_columns(parsed)  # type: ignore[arg-type]
    encoder = Watched(parsed, columns)
    given_rows = dict(zip(rows.schema.names, rows.columns, strict=True))
    fast = encoder.encode(given_rows)
    fast.validate(full=True)
    assert encoder.asked == 0 and fast.null_count == 0
    assert encoder.encode_row_wise(given_rows, range(rows.num_rows)) == Encoded(fast)
    return fast.to_pylist()


def batch(ddl: str, *rows: dict[str, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(list(rows), schema=to_arrow_schema(parse_ddl(ddl)))


def refusal(schema: Any, ddl: str, *rows: dict[str, Any]) -> str:
    parsed = parse(json.dumps(schema))
    made = batch(ddl, *rows)
    with pytest.raises(RowRejected) as caught:
        AvroEncoder(parsed, parse_ddl(ddl)).encode(dict(zip(made.schema.names, made.columns, strict=True)))
    return f"{caught.value.row}: {caught.value.detail}"


# --- what is written is read again ---------------------------------------------------------------------------------------


@SOME
@given(SEEDS)
def test_every_value_that_is_read_is_written_as_fastavro_wrote_it_and_read_again(seed: int) -> None:
    """This holds for any part of a batch. Only the order and the number of a map's entries may differ."""
    made = RandomAvro(seed)
    schema = made.record()
    values = [encoded(bare(schema), made.value(schema)) for _ in range(20)]
    decoder = Avro(json.dumps(schema)).make_decoder()
    rows = decoder.decode(values).batch
    for start, stop in ((0, 20), (7, 20), (3, 4), (0, 0)):
        part = rows.slice(start, stop - start)
        written = encode(schema, part)
        again = decoder.decode(written)
        assert again.bad == () and repr(again.batch.to_pylist()) == repr(part.to_pylist())
        if '"map"' not in json.dumps(schema):
            assert written == values[start:stop]


@pytest.mark.parametrize("name", GOOD)
def test_a_value_that_is_read_is_written_as_it_was(name: str) -> None:
    type_, written, _ = GOOD[name]
    values = [encoded(field(type_), {"x": written})] * 3
    assert (
        encode(field(type_), Avro(json.dumps(field(type_))).make_decoder().decode(values).batch) == values or "union of" in name
    )


TYPES = (
    "tiny tinyint, small smallint, number int, large bigint, f float, d double, yes boolean, text string, short varchar(9), "
    "raw binary, day date, at timestamp, local timestamp_ntz, amount decimal(38,9), few decimal(3,0), "
    "numbers array<bigint>, by map<string,struct<a: string, n: array<double>>>, "
    "deep struct<a: struct<b: struct<c: array<struct<d: int>>>>>, must bigint NOT NULL"
)


def some_rows() -> st.SearchStrategy[list[dict[str, Any]]]:
    text = st.text(st.characters(exclude_categories=("Cs",)), max_size=8)
    moment = st.datetimes(datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999999))

    def number(bits: int) -> st.SearchStrategy[int]:
        return st.integers(-(1 << bits - 1), (1 << bits - 1) - 1)

    def decimals(digits: int, places: int) -> st.SearchStrategy[Decimal]:
        return st.integers(1 - 10**digits, 10**digits - 1).map(lambda n: Decimal(f"{n}e-{places}"))

    item = st.fixed_dictionaries({"a": st.none() | text, "n": st.none() | st.lists(st.none() | st.floats(), max_size=3)})
    deep = st.none() | st.lists(st.none() | st.fixed_dictionaries({"d": st.none() | number(32)}), max_size=3)
    columns = {
        "tiny": number(8), "small": number(16), "number": number(32), "large": number(64), "f": st.floats(width=32),
        "d": st.floats(), "yes": st.booleans(), "text": text, "short": text, "raw": st.binary(max_size=40), "day": st.dates(),
        "at": moment.map(lambda t: t.replace(tzinfo=timezone.utc)), "local": moment, "amount": decimals(38, 9),
        "few": decimals(3, 0), "numbers": st.lists(st.none() | number(64), max_size=4),
        "by": st.dictionaries(text, st.none() | item, max_size=3).map(lambda d: list(d.items())),
        "deep": st.fixed_dictionaries({"a": st.none() | st.fixed_dictionaries(
            {"b": st.none() | st.fixed_dictionaries({"c": deep})})}),
    }  # fmt: skip
    row = st.fixed_dictionaries({**{name: st.none() | values for name, values in columns.items()}, "must": number(64)})
    return st.lists(row, max_size=6)


@settings(max_examples=examples(20), deadline=None, suppress_health_check=list(HealthCheck))
@given(some_rows())
def test_columns_of_every_type_with_a_schema_made_of_them_are_read_again_and_by_fastavro(rows: list[dict[str, Any]]) -> None:
    text = derive_record(parse_ddl(TYPES), "shop.Order")
    made = batch(TYPES, *rows)
    values = encode(json.loads(text), made, TYPES)
    decoded = Avro(text).make_decoder().decode(values)
    assert decoded.bad == () and repr(decoded.batch.to_pylist()) == repr(made.to_pylist())
    parsed = fastavro.parse_schema(json.loads(text))
    found: list[dict[str, Any]] = [fastavro.schemaless_reader(io.BytesIO(v), parsed, None) for v in values]  # type: ignore[misc]
    shown = batch(TYPES, *({**f, "by": list(f["by"].items()) if f["by"] is not None else None} for f in found))
    assert repr(shown.to_pylist()) == repr(made.to_pylist())


def test_a_schema_made_of_columns_says_what_may_be_null_and_names_records_by_their_place() -> None:
    ddl = "id bigint NOT NULL, a struct<b: struct<a: date>> NOT NULL, b array<struct<a: int>>, m map<string,decimal(5,2)>"
    assert json.loads(derive_record(parse_ddl(ddl), "shop.Order")) == {
        "type": "record", "name": "Order", "namespace": "shop", "fields": [
            {"name": "id", "type": "long"},
            {"name": "a", "type": {"type": "record", "name": "a", "namespace": "shop.Order", "fields": [
                {"name": "b", "type": ["null", {"type": "record", "name": "b", "namespace": "shop.Order.a", "fields": [
                    {"name": "a", "type": ["null", {"type": "int", "logicalType": "date"}], "default": None}]}],
                    "default": None}]}},
            {"name": "b", "type": ["null", {"type": "array", "items": ["null", {
                "type": "record", "name": "b", "namespace": "shop.Order",
                "fields": [{"name": "a", "type": ["null", "int"], "default": None}]}]}], "default": None},
            {"name": "m", "type": ["null", {"type": "map", "values": ["null", {
                "type": "bytes", "logicalType": "decimal", "precision": 5, "scale": 2}]}], "default": None},
        ],
    }  # fmt: skip


def test_a_large_value_and_many_small_ones() -> None:
    schema = {"type": "record", "name": "R", "fields": [{"name": "x", "type": ["null", "string"]}]}
    large = "é" * (4 << 20)
    (one,) = encode(schema, batch("x string", {"x": large}))
    assert fastavro.schemaless_reader(io.BytesIO(one), fastavro.parse_schema(schema), None) == {"x": large}
    many = encode(schema, batch("x string", *({"x": None if n % 3 else str(n)} for n in range(5000))))
    assert len(many) == 5000 and many[1:4] == [b"\0", b"\0", b"\2\x023"]


def test_records_may_be_nested_deep() -> None:
    ddl, row = "int", 7
    for _ in range(20):
        ddl, row = f"struct<x: {ddl}>", {"x": row}  # type: ignore[assignment]
    schema = json.loads(derive_record(parse_ddl(f"x {ddl}"), "R"))
    (value, nothing) = encode(schema, batch(f"x {ddl}", {"x": row}, {"x": None}), f"x {ddl}")
    assert fastavro.schemaless_reader(io.BytesIO(value), fastavro.parse_schema(schema), None) == {"x": row}
    assert value == b"\x02" * 21 + b"\x0e" and nothing == b"\0"


# --- to a schema that is given -------------------------------------------------------------------------------------------


def test_fields_are_found_by_name_and_those_without_a_column_have_their_defaults() -> None:
    schema = {"type": "record", "name": "R", "fields": [
        {"name": "b", "type": "string"},
        {"name": "added", "type": {"type": "array", "items": "int"}, "default": [1, 2]},
        {"name": "a", "type": "long"},
        {"name": "none", "type": ["null", "string"], "default": None},
        {"name": "cents", "type": logical("bytes", "decimal", precision=5, scale=2), "default": "\u0001\u0000"},
        {"name": "rate", "type": "double", "default": 1},
    ]}  # fmt: skip
    (value,) = encode(schema, batch("a int, b string", {"a": 7, "b": "x"}), "a int, b string")
    read = fastavro.schemaless_reader(io.BytesIO(value), fastavro.parse_schema(schema), None)
    assert read == {"b": "x", "added": [1, 2], "a": 7, "none": None, "cents": Decimal("2.56"), "rate": 1.0}


WIDER: list[tuple[Any, str, Any, Any]] = [
    ("int", "bigint", -(1 << 31), -(1 << 31)),
    (["null", "long"], "tinyint", None, None),
    ("double", "float", 1.5, 1.5),
    (logical("bytes", "decimal", precision=9, scale=4), "decimal(12,2)", Decimal("-12345.67"), Decimal("-12345.6700")),
    (logical("bytes", "decimal", precision=5, scale=1), "decimal(12,3)", Decimal("1.500"), Decimal("1.5")),
    ({"type": "fixed", "name": "F", "size": 20, "logicalType": "decimal", "precision": 5, "scale": 0}, "decimal(5,0)",
     Decimal("-1"), Decimal("-1")),
    (logical("long", "timestamp-millis"), "timestamp", datetime(1969, 12, 31, 23, 59, 59, 999000, timezone.utc),
     datetime(1969, 12, 31, 23, 59, 59, 999000, timezone.utc)),
    (["null", "string", "long"], "bigint", 7, 7),
    (["long", "string"], "string", "x", "x"),
    ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "string", "B", "B"),
    (logical("int", "date"), "date", date(2026, 1, 2), date(2026, 1, 2)),
    ({"type": "map", "values": "long"}, "map<string,int>", [("k", 1)], {"k": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("type_", "ddl", "value", "read"), WIDER, ids=str)
def test_a_column_of_another_type_is_written_where_each_value_fits(type_: Any, ddl: str, value: Any, read: Any) -> None:
    Avro(json.dumps(field(type_))).to_write("orders", "value").make_struct_encoder(parse_ddl(f"x {ddl}"))  # the types fit
    (written,) = encode(field(type_), batch(f"x {ddl}", {"x": value}), f"x {ddl}")
    assert fastavro.schemaless_reader(io.BytesIO(written), fastavro.parse_schema(field(type_)), None) == {"x": read}


REFUSED: list[tuple[Any, str, Any, str]] = [
    ("string", "string", None, "column `x`: found null, expected string"),
    ("int", "bigint", 1 << 31, "column `x`: found 2147483648, expected an int of 32 bits"),
    (logical("bytes", "decimal", precision=5, scale=2), "decimal(9,2)", Decimal("1000.00"), "1000.00, expected decimal(5,2)"),
    (logical("bytes", "decimal", precision=5, scale=1), "decimal(12,2)", Decimal("0.01"), "found 0.01, expected decimal(5,1)"),
    ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "string", "C", "column `x`: found 'C', expected one of A, B"),
    ({"type": "fixed", "name": "F", "size": 2}, "binary", b"abc", "column `x`: found 3 bytes, expected 2"),
    ({"type": "fixed", "name": "F", "size": 16, "logicalType": "uuid"}, "string", "no", "found 'no', expected a UUID"),
    (logical("string", "uuid"), "string", "123e4567-e89b-12d3-a456-42661417400\n", "expected a UUID"),
    (logical("int", "time-millis"), "int", -1, "column `x`: found -1, expected a time of day: 0 to 86399999"),
    (logical("long", "time-micros"), "bigint", 86_400_000_000, "expected a time of day: 0 to 86399999999"),
    (logical("long", "timestamp-millis"), "timestamp", datetime(2026, 1, 1, 0, 0, 0, 1, timezone.utc), "whole milliseconds"),
    ({"type": "array", "items": "long"}, "array<bigint>", [1, None], "column `x[1]`: found null, expected long"),
    ({"type": "map", "values": "int"}, "map<string,bigint>", [("k", 1 << 40)], "column `x['k']`: found 1099511627776"),
    (["null", "string", "long"], "struct<member0: string, member1: bigint>", {"member0": "a", "member1": 1}, "found 2 members"),
]  # fmt: skip


@pytest.mark.parametrize(("type_", "ddl", "value", "message"), REFUSED, ids=str)
def test_a_value_that_does_not_fit_names_row_and_column(type_: Any, ddl: str, value: Any, message: str) -> None:
    fine = {str: "A", int: 1, list: [], bytes: b"ab", dict: {"member0": "a", "member1": None}}.get(type(value))
    fine = {"string": "A"}.get(ddl, fine) if value is None else fine
    fine = {"map<string,bigint>": [], "array<bigint>": []}.get(ddl, fine)
    if "uuid" in str(type_):
        fine = "123e4567-e89b-12d3-a456-426614174000"
    if isinstance(value, Decimal):
        fine = Decimal(1)
    if isinstance(value, datetime):
        fine = value.replace(microsecond=0)
    found = refusal(field(type_), f"x {ddl}", {"x": fine}, {"x": value}, {"x": fine})
    assert found.startswith("row 2: ") and message in found


def test_times_that_no_reader_takes_are_refused() -> None:
    late = pa.array([0, 253_402_300_800_000_000], pa.timestamp("us", "UTC"))
    encoder = AvroEncoder(parse(json.dumps(field(logical("long", "timestamp-micros")))), parse_ddl("x timestamp"))
    with pytest.raises(RowRejected, match="Row 2 .*expected a time in the years 1 to 9999"):
        encoder.encode({"x": late})
    encoder = AvroEncoder(parse(json.dumps(field(logical("int", "date")))), parse_ddl("x date"))
    with pytest.raises(RowRejected, match="expected one in the years 1 to 9999"):
        encoder.encode({"x": pa.array([2_932_897], pa.date32())})


def test_a_string_that_is_not_utf8_is_refused() -> None:
    broken = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\x01\0\0\0"), pa.py_buffer(b"\xff")])
    with pytest.raises(RowRejected, match="not UTF-8: byte 0xff"):
        AvroEncoder(parse(json.dumps(field("string"))), parse_ddl("x string")).encode({"x": broken})


def test_all_rows_that_do_not_fit_are_reported_and_the_others_are_written() -> None:
    ddl = "x bigint"
    encoder = pickle.loads(pickle.dumps(AvroEncoder(parse(json.dumps(field("int"))), parse_ddl(ddl), make_wire_header(7))))
    made = batch(ddl, {"x": 1}, {"x": 2})
    struct = pa.StructArray.from_arrays(made.columns, fields=list(made.schema), mask=pa.array([True, False]))
    assert encoder.encode_struct(struct) == Encoded(pa.array([None, b"\0\0\0\0\x07\x04"], pa.binary()))
    some = pa.array([None, {"x": 1 << 40}, {"x": 2}, {"x": None}, None, {"x": 1}], struct.type)
    found = encoder.encode_struct(some)
    found.values.validate(full=True)
    assert found.values.to_pylist() == [None, None, b"\0\0\0\0\x07\x04", None, None, b"\0\0\0\0\x07\x02"]
    expected = "found 1099511627776, expected an int of 32 bits"
    assert found.bad == ((1, f"column `x`: {expected}"), (3, "column `x`: found null, expected int"))
    assert [at for at, _ in encoder.encode_struct(some.slice(2)).bad] == [1]


def test_of_a_large_batch_only_the_parts_with_rows_that_do_not_fit_are_written_one_by_one() -> None:
    encoder = Watched(parse(json.dumps(field("int"))), parse_ddl("x bigint"))
    wrong, there = {3, 1500, 2999}, [n % 7 != 1 for n in range(3000)]
    values = pa.array([1 << 40 if n in wrong else n for n in range(3000)], pa.int64())
    found = encoder.encode_struct(pa.StructArray.from_arrays([values], ["x"], mask=pa.array([not here for here in there])))
    assert {at for at, _ in found.bad} == {n for n in wrong if there[n]} and found.bad == tuple(sorted(found.bad))
    assert 0 < encoder.asked <= len(wrong)
    (fine,) = encode(field("int"), batch("x bigint", {"x": 2000}))
    assert found.values[2000].as_py() == fine
    assert found.values.is_valid().to_pylist() == [here and n not in wrong for n, here in enumerate(there)]


@pytest.mark.parametrize("type_", ["string", {"type": "enum", "name": "E", "symbols": ["fine"]}])
def test_a_text_that_is_not_utf8_is_one_bad_row_among_others(type_: Any) -> None:
    texts = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\x01\0\0\0\x05\0\0\0"), pa.py_buffer(b"\xfffine")]
    )
    found = AvroEncoder(parse(json.dumps(field(type_))), parse_ddl("x string")).encode_struct(
        pa.StructArray.from_arrays([texts], ["x"])
    )
    assert [at for at, _ in found.bad] == [0] and "byte 0xff at position 0" in found.bad[0][1]
    assert found.values.is_null().to_pylist() == [True, False]


def test_a_type_that_is_no_record_is_one_column_and_a_null_is_no_value() -> None:
    encoder = AvroEncoder(parse('"long"'), parse_ddl("id bigint"), make_wire_header(1))
    assert encoder.encode({"id": pa.array([5, None, -1])}).to_pylist() == [b"\0\0\0\0\x01\x0a", None, b"\0\0\0\0\x01\x01"]
    rows = pa.array([{"id": None}, None, {"id": 1}], pa.struct([("id", pa.int64())]))
    assert encoder.encode_struct(rows).values.to_pylist() == [None, None, b"\0\0\0\0\x01\x02"]
    with pytest.raises(RowRejected, match="Row 7 of the split.*column `id`"):
        AvroEncoder(parse('"int"'), parse_ddl("id bigint")).encode({"id": pa.array([None] * 6 + [1 << 40])})


# --- problems that are reported before anything is written -----------------------------------------------------------------


RECORD = json.dumps(
    {"type": "record", "name": "R", "fields": [{"name": "x", "type": "int"}, {"name": "y", "type": "long", "default": 0}]}
)


@pytest.mark.parametrize(
    ("avro", "columns", "messages"),
    [
        (Avro(RECORD), ["x"], []),
        (Avro(RECORD), ["x", "z"], ["record R has no field for column `z`"]),
        (Avro(RECORD), ["y"], ["there is no column for field `x`, which has no default"]),
        (Avro('"long"'), ["x", "y"], ["the schema is long, which needs one column; found `x`, `y`"]),
        (Avro("{"), ["x"], ["it is no JSON"]),
        (Avro(), ["x"], ["found neither `schema` nor `registry`"]),
        (Avro(registry="r", subject_name_strategy="Odd"), ["x"], ["found 'Odd'"]),  # type: ignore[arg-type]
        (Avro(registry="r", auto_register_schemas=False), ["x"], ["has to be registered"]),
        (Avro(registry="r", use_latest_version=True, auto_register_schemas=True), ["x"], ["beside `auto_register_schemas`"]),
        (Avro(registry="r", record_name="a-b"), ["x"], ["`orders.a-b` is no name in Avro"]),
        (Avro(registry="r"), ["x", "größe", "1st"], ["`größe` is no name in Avro", "`1st` is no name in Avro"]),
        (Avro(registry="r", use_latest_version=True, subject_name_strategy="RecordNameStrategy"), ["x"], ["name is unknown"]),
    ],
    ids=str,
)  # fmt: skip
def test_columns_that_cannot_be_written_are_reported(avro: Avro, columns: list[str], messages: list[str]) -> None:
    found = avro.to_write("orders", "value").find_encoding_problems("value", columns)
    assert len(found) == len(messages)
    assert all(what in problem.what for problem, what in zip(found, messages, strict=True))


def test_avro_is_not_written_without_a_place_for_its_schema() -> None:
    (problem,) = Avro(RECORD).find_encoding_problems("value", ["x"])
    assert "the topic to which Avro is written" in problem.what


@pytest.mark.parametrize(
    ("type_", "ddl", "message"),
    [
        ("int", "x string", "column `x` is string, and the schema has int"),
        ("float", "x double", "column `x` is double, and the schema has float"),
        (logical("long", "timestamp-micros"), "x timestamp_ntz", "is timestamp_ntz, and the schema has timestamp-micros"),
        (["null", "int", "string"], "x date", "column `x` is date"),
        ({"type": "array", "items": "int"}, "x array<string>", "column `x[]` is string"),
        ({"type": "map", "values": "int"}, "x map<int,int>", "column `x` is map<int,int>"),
        ({"type": "record", "name": "S", "fields": [{"name": "a", "type": "int"}]}, "x struct<b: int>", "for column `x.b`"),
    ],
    ids=str,
)  # fmt: skip
def test_columns_whose_types_do_not_fit_are_reported_by_name(type_: Any, ddl: str, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Avro(json.dumps(field(type_))).to_write("orders", "value").make_struct_encoder(parse_ddl(ddl))
    assert message in str(caught.value)
