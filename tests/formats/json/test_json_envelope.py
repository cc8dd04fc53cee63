"""Connect's envelopes: how the record's own schema changes a value's meaning; written envelopes are read again."""

from __future__ import annotations

import base64
import datetime as dt
import json
import random
from collections.abc import Callable
from decimal import Decimal as D
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_kafka_spark.formats import Debezium, Json, JsonEnvelope
from airflow_kafka_spark.formats.base import Decoded, Kind
from airflow_kafka_spark.formats.json.tasks.envelope import EnvelopeDecoder
from tests.formats.budget import MANY, examples
from tests.formats.contract import CHECKS, Case

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

UTC = dt.timezone.utc
CONNECT, DEBEZIUM = "org.apache.kafka.connect.data.", "io.debezium.time."


def struct(*fields: dict[str, Any], optional: bool = True, **types: Any) -> dict[str, Any]:
    """Return a schema of Connect."""
    named = [{"field": name, "optional": True} | (t if isinstance(t, dict) else {"type": t}) for name, t in types.items()]
    return {"type": "struct", "fields": [*fields, *named], "optional": optional, "name": "rows.Value"}


def record(schema: Any, payload: Any) -> bytes:
    return json.dumps({"schema": schema, "payload": payload}, separators=(",", ":")).encode()


def decimal(scale: int) -> dict[str, Any]:
    return {"type": "bytes", "name": f"{CONNECT}Decimal", "version": 1, "parameters": {"scale": str(scale)}}


def unscaled(number: int) -> str:
    return base64.b64encode(number.to_bytes(number.bit_length() // 8 + 1, "big", signed=True)).decode()


ORDERS = struct(id="int64", customer="string", amount=decimal(2), placed_at={"type": "int64", "name": f"{CONNECT}Timestamp"})
PLACED = 1_793_862_489_123

CASES = {
    "envelope": Case(
        JsonEnvelope("id bigint NOT NULL, customer string, amount decimal(12,2), placed_at timestamp"),
        (
            record(ORDERS, {"id": 1, "customer": "a", "amount": unscaled(1234), "placed_at": PLACED}),
            record(ORDERS, {"id": 2, "amount": unscaled(-1), "placed_at": None}),
            record(None, {"id": 3, "amount": "0.5", "placed_at": "2026-11-05T07:08:09Z"}),
            record(struct(id="int32"), {"id": 4}),
            b' { "payload" : {"id":5}, "schema" : {"type":"struct","fields":[]}}\n',
        ),
        (
            record(ORDERS, {"id": "x"}),
            record(ORDERS, {"customer": "a"}),
            record(struct(id="int64", optional=False), None),
            record(struct(id="int64", placed_at="int64"), {"id": 1}),
            record({"type": "string"}, "a"),
            b'{"id":1}',
            b"",
            b"null",
            record(ORDERS, {"id": 1})[:-1],
            record(ORDERS, {"id": 1})[:-1] + b',"x":1}',
            record(ORDERS, {"id": 1}) + b"}",
            record(ORDERS, {"id": 1, "amount": unscaled(10**13)}),
        ),
    ),
}


def both(format: JsonEnvelope, *values: bytes | None) -> Decoded:
    """Return the results of both decoders, which must be equal."""
    decoder = EnvelopeDecoder(format.columns, few=0, defaults=format.replace_null_with_default)
    fast, reference = decoder.decode(values), decoder.decode_row_wise(values)
    again = decoder.decode(values)
    for other in (reference, again):
        assert repr(fast.batch.to_pylist()) == repr(other.batch.to_pylist())
        assert fast.bad == other.bad and fast.deleted == other.deleted
    return fast


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_contract(case: Case, check: Callable[[Case], None]) -> None:
    assert case.format.validate("value") == []
    check(case)


def test_both_ways_agree_on_good_and_bad_ones_in_any_order() -> None:
    case, chance, compared = CASES["envelope"], random.Random(4), 0
    assert isinstance(case.format, JsonEnvelope)
    for _ in range(60):
        values = chance.choices([*case.good, *case.bad, None, record(ORDERS, None)], k=chance.randrange(1, 30))
        both(case.format, *values)
        compared += len(values)
    assert compared > 500


VARIABLE = struct(scale="int32", value="bytes") | {"name": "io.debezium.data.VariableScaleDecimal", "optional": True}
GOOD: list[tuple[str, dict[str, Any], Any, Any]] = [
    ("decimal(5,2)", decimal(2), unscaled(12345), D("123.45")),
    ("decimal(5,2)", decimal(2), unscaled(-1), D("-0.01")),
    ("decimal(5,2)", decimal(0), unscaled(7), D("7.00")),
    ("decimal(5,2)", decimal(4), unscaled(-123400), D("-12.34")),
    ("decimal(5,2)", decimal(-1), unscaled(12), D("120.00")),
    ("decimal(5,2)", decimal(2), 1.5, D("1.50")),
    ("decimal(5,2)", decimal(2), "", D("0.00")),
    ("decimal(38,10)", decimal(10), unscaled(10**38 - 1), D("9" * 28 + "." + "9" * 10)),
    ("decimal(5,2)", {"type": "double"}, 1.5, D("1.50")),
    ("date", {"type": "int32", "name": f"{CONNECT}Date"}, 20762, dt.date(2026, 11, 5)),
    ("date", {"type": "int32", "name": f"{DEBEZIUM}Date"}, -719162, dt.date(1, 1, 1)),
    ("date", {"type": "string"}, "2026-11-05", dt.date(2026, 11, 5)),
    ("timestamp", {"type": "int64", "name": f"{CONNECT}Timestamp"}, PLACED, dt.datetime(2026, 11, 5, 7, 8, 9, 123000, UTC)),
    ("timestamp", {"type": "int64", "name": f"{DEBEZIUM}Timestamp"}, -1, dt.datetime(1969, 12, 31, 23, 59, 59, 999000, UTC)),
    ("timestamp_ntz", {"type": "int64", "name": f"{DEBEZIUM}MicroTimestamp"}, -1, dt.datetime(1969, 12, 31, 23, 59, 59, 999999)),
    ("timestamp_ntz", {"type": "int64", "name": f"{DEBEZIUM}NanoTimestamp"}, 7000, dt.datetime(1970, 1, 1, 0, 0, 0, 7)),
    ("timestamp_ntz", {"type": "int64", "name": f"{CONNECT}Timestamp"}, 1000, dt.datetime(1970, 1, 1, 0, 0, 1)),
    ("timestamp", {"type": "string", "name": f"{DEBEZIUM}ZonedTimestamp"}, "2026-11-05T07:08:09.1Z",
     dt.datetime(2026, 11, 5, 7, 8, 9, 100000, UTC)),
    ("date", {"type": "string", "name": f"{DEBEZIUM}IsoDate"}, "2026-11-05Z", dt.date(2026, 11, 5)),
    ("timestamp_ntz", {"type": "string", "name": f"{DEBEZIUM}IsoTimestamp"}, "2026-11-05T07:08:09.1Z",
     dt.datetime(2026, 11, 5, 7, 8, 9, 100000)),
    ("timestamp_ntz", {"type": "string", "name": f"{DEBEZIUM}IsoTimestamp"}, "2026-11-05", dt.datetime(2026, 11, 5)),
    ("timestamp", {"type": "string", "name": f"{DEBEZIUM}IsoTimestamp"}, "2026-11-05T07:08Z",
     dt.datetime(2026, 11, 5, 7, 8, tzinfo=UTC)),
    ("decimal(5,2)", VARIABLE, {"scale": 1, "value": unscaled(-15)}, D("-1.50")),
    ("decimal(5,2)", VARIABLE, {"value": unscaled(3), "scale": -1, "more": 1}, D("30.00")),
    ("struct<scale:int,value:binary>", VARIABLE, {"scale": 1, "value": "AQ=="}, {"scale": 1, "value": b"\1"}),
    ("int", {"type": "int32", "name": f"{CONNECT}Time"}, 14_400_000, 14_400_000),
    ("bigint", {"type": "int64", "name": f"{CONNECT}Timestamp"}, PLACED, PLACED),
    ("binary", {"type": "bytes"}, "aGk=", b"hi"),
    ("double", {"type": "double"}, "NaN", "nan"),
    ("array<date>", {"type": "array", "items": {"type": "int32", "name": f"{CONNECT}Date"}}, [0, None],
     [dt.date(1970, 1, 1), None]),
    ("map<string,decimal(3,1)>", {"type": "map", "keys": {"type": "string"}, "values": decimal(1)}, {"é": unscaled(5)},
     [("é", D("0.5"))]),
    ("struct<at:timestamp,x:int>", struct(at={"type": "int64", "name": f"{CONNECT}Timestamp"}), {"at": 0},
     {"at": dt.datetime(1970, 1, 1, tzinfo=UTC), "x": None}),
]  # fmt: skip


@pytest.mark.parametrize(("data_type", "schema", "value", "expected"), GOOD, ids=[f"{t}={v}" for t, _, v, _ in GOOD])
def test_what_a_column_takes(data_type: str, schema: dict[str, Any], value: Any, expected: Any) -> None:
    whole = struct(a=schema, z="int32")
    decoded = both(JsonEnvelope(f"a {data_type}, z int"), *(record(whole, {"a": v, "z": 1}) for v in (None, value, None)))
    assert decoded.bad == ()
    assert [row["z"] for row in decoded.batch.to_pylist()] == [1, 1, 1]
    found = decoded.batch.to_pylist()[1]["a"]
    assert found == expected or str(found) == expected


@pytest.mark.parametrize(("data_type", "schema", "value", "expected"), GOOD, ids=[f"{t}={v}" for t, _, v, _ in GOOD])
def test_a_default_stands_in_for_a_null_and_for_a_missing_field(
    data_type: str, schema: dict[str, Any], value: Any, expected: Any
) -> None:
    """Connect's ``replace.null.with.default``; a default is written as a value is."""
    whole = struct(a=schema | {"default": value}, z={"type": "int32", "default": 7})
    values = [record(whole, payload) for payload in ({"z": 1}, {"a": None}, {"a": value, "z": None})]
    values.append(record(struct(a=schema), {"a": None}))
    for null in ("", " NOT NULL"):
        decoded = both(JsonEnvelope(f"a {data_type}{null}, z int", replace_null_with_default=True), *values[: 3 if null else 4])
        assert decoded.bad == ()
        rows = decoded.batch.to_pylist()
        assert [row["z"] for row in rows] == [1, 7, 7, None][: len(rows)]
        for row in rows[:3]:
            assert row["a"] == expected or str(row["a"]) == expected
        assert null or rows[3]["a"] is None
    assert both(JsonEnvelope(f"a {data_type}, z int"), values[1]).batch.to_pylist() == [{"a": None, "z": None}], (
        "not unless asked"
    )


def test_defaults_of_parts_replace_missing_values_and_one_that_does_not_fit_is_reported() -> None:
    inner = struct(x={"type": "int32", "default": 5}, y="string", optional=True)
    listed = {"type": "array", "items": inner}
    mapped = {"type": "map", "keys": {"type": "string"}, "values": {"type": "int64", "default": 9}}
    whole = struct(s=inner, d=inner | {"default": {"y": "d"}}, l=listed, m=mapped)
    kind = "struct<x:int,y:string>"
    format = JsonEnvelope(
        f"s {kind}, d struct<x:int NOT NULL,y:string> NOT NULL, l array<{kind}>, m map<string,bigint>",
        replace_null_with_default=True,
    )
    payloads = [
        {"s": {"y": "a"}, "l": [{}, None, {"x": 1}], "m": {"k": None, "j": 1}},
        {"s": None, "d": {"x": None, "y": None}, "l": None, "m": None},
        {"s": {"x": 2}, "d": {"x": 3}, "l": [], "m": {}},
    ]
    decoded = both(format, *(record(whole, payload) for payload in payloads), record(None, {"s": {}, "d": {"x": 1}}))
    assert decoded.bad == ()
    five = {"x": 5, "y": None}
    assert decoded.batch.to_pylist() == [
        {"s": {"x": 5, "y": "a"}, "d": {"x": 5, "y": "d"}, "l": [five, None, {"x": 1, "y": None}], "m": [("k", 9), ("j", 1)]},
        {"s": None, "d": five, "l": None, "m": None},
        {"s": {"x": 2, "y": None}, "d": {"x": 3, "y": None}, "l": [], "m": []},
        {"s": five | {"x": None}, "d": {"x": 1, "y": None}, "l": None, "m": None},
    ]
    wrong = struct(s=struct(x={"type": "int32", "default": "five"}))
    (bad,) = both(format, record(wrong, {"s": {"x": 1}})).bad
    assert "its schema's default does not fit" in bad[1] and "`s.x`" in bad[1]
    with_debezium = Debezium(JsonEnvelope("id bigint NOT NULL, n int", replace_null_with_default=True))
    row = struct(id="int64", n={"type": "int32", "default": 3})
    event = record(struct(before=row, after=row, op="string"), {"before": None, "after": {"id": 1, "n": None}, "op": "c"})
    assert with_debezium.make_decoder().decode([event]).batch.to_pylist() == [{"id": 1, "n": 3}]
    assert [p.where for p in JsonEnvelope("id int", replace_null_with_default="yes").validate("value")] == [  # type: ignore[arg-type]
        "value.replace_null_with_default"
    ]


def test_no_digit_of_a_default_is_lost() -> None:
    """Return a record as Connect writes it with ``decimal.format=NUMERIC``."""
    schema = b'{"type":"struct","fields":[{"type":"bytes","field":"a","name":"%s","parameters":{"scale":"9"},"default":%s}]}'
    kind = f"{CONNECT}Decimal".encode()
    for written in (b"12345678901234567890.123456789", b"1.000000001E+19", b"-0.000000001"):
        value = b'{"schema":%s,"payload":{}}' % (schema % (kind, written))
        decoded = both(JsonEnvelope("a decimal(38,9)", replace_null_with_default=True), value)
        assert decoded.bad == () and decoded.batch.to_pylist() == [{"a": D(written.decode())}]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (b'{"type":"struct","fields":5}', ""),
        (b'{"type":"struct","fields":[5,{"type":"int32","field":"z","default":%s}]}' % (b"1" * 5000), ""),
        (b'{"type":"struct","fields":[{"type":"int32","field":"a","default":%s}]}' % (b"1" * 5000), "default does not fit"),
        (
            b'{"type":"struct","fields":[{"type":"string","field":"a","default":%s}]}' % (b'{"a":' * 480 + b"1" + b"}" * 480),
            "default is nested too deep",
        ),
    ],
    ids=["fields", "other", "digits", "deep"],
)
def test_a_schema_that_makes_no_sense_is_a_bad_record_at_most_and_never_raises(schema: bytes, expected: str) -> None:
    format = JsonEnvelope("a string" if b"string" in schema else "a int", replace_null_with_default=True)
    decoded = both(format, b'{"schema":%s,"payload":{}}' % schema)
    assert [expected in reason for _, reason in decoded.bad] == ([True] if expected else [])


BAD: list[tuple[str, dict[str, Any], Any, str]] = [
    ("decimal(5,2)", decimal(2), unscaled(100_000), "too many digits"),
    ("decimal(5,2)", decimal(3), unscaled(1), "with 3 digits after the point"),
    ("decimal(5,2)", decimal(2), "1.5", "base64 of its unscaled value"),
    ("decimal(5,2)", decimal(2), "A" * 400, "too many digits"),
    ("decimal(5,2)", decimal(2) | {"parameters": {}}, "AA==", "Decimal without a scale"),
    ("decimal(5,2)", {"type": "bytes"}, "AA==", "its schema says bytes"),
    ("date", {"type": "int32"}, 20762, "its schema says int32"),
    (
        "date",
        {"type": "int64", "name": f"{CONNECT}Timestamp"},
        0,
        "its schema says int64 (org.apache.kafka.connect.data.Timestamp)",
    ),
    ("date", {"type": "int32", "name": f"{CONNECT}Date"}, 2_932_897, "days since 1970, in the years 0001 to 9999"),
    ("timestamp", {"type": "int64"}, 0, "its schema says int64"),
    ("timestamp", {"type": "int64", "name": f"{CONNECT}Timestamp"}, 10**15, "milliseconds since 1970"),
    ("timestamp", {"type": "int64", "name": f"{CONNECT}Timestamp"}, 1.5, "found 1.5, expected timestamp"),
    ("timestamp", {"type": "int64", "name": f"{DEBEZIUM}NanoTimestamp"}, 7001, "whole microseconds"),
    ("timestamp", {"type": "string"}, 7, "found 7, expected timestamp"),
    ("timestamp_ntz", {"type": "string"}, "2026-11-05T07:08:09Z", "no time zone"),
    ("timestamp_ntz", {"type": "string", "name": f"{DEBEZIUM}IsoTimestamp"}, "2026-11-05Z", 'found "2026-11-05Z"'),
    ("timestamp_ntz", {"type": "string", "name": f"{DEBEZIUM}IsoTimestamp"}, "2026-11-05T07:08:09+02:00", "no time zone"),
    ("timestamp_ntz", {"type": "string", "name": f"{DEBEZIUM}IsoTimestamp"}, 7, "found 7, expected timestamp_ntz"),
    ("date", {"type": "string", "name": f"{DEBEZIUM}IsoDate"}, "2026-11-05ZZ", 'found "2026-11-05Z"'),
    ("decimal(5,2)", VARIABLE, {"scale": 3, "value": unscaled(1)}, "with 3 digits after the point, expected decimal(5,2)"),
    ("decimal(5,2)", VARIABLE, {"scale": 0, "value": unscaled(1000)}, "too many digits"),
    ("decimal(5,2)", VARIABLE, {"scale": 10_000, "value": "AQ=="}, "found a scale of 10000"),
    ("decimal(5,2)", VARIABLE, {"scale": 1}, "column `a.value`: missing"),
    ("binary", {"type": "string"}, "aGk=", "its schema says string"),
    ("string", {"type": "bytes"}, "aGk=", "its schema says bytes"),
    ("int", {"type": "int32"}, 2**31, "expected int"),
    ("array<int>", {"type": "int32"}, 1, "its schema says int32"),
    ("map<string,int>", {"type": "map", "keys": {"type": "int32"}, "values": {"type": "int32"}}, [], "keys of type int32"),
    ("struct<x:date>", struct(x="int32"), {"x": 1}, "column `a.x`: its schema says int32"),
    ("int", {"name": "x"}, 1, "expected a type of Connect"),
]


@pytest.mark.parametrize(("data_type", "schema", "value", "expected"), BAD, ids=[f"{t}={str(v)[:20]}" for t, _, v, _ in BAD])
def test_what_makes_a_record_bad(data_type: str, schema: dict[str, Any], value: Any, expected: str) -> None:
    fine = record(None, {"z": 1})
    decoded = both(JsonEnvelope(f"a {data_type}, z int"), fine, record(struct(a=schema), {"a": value}), fine)
    ((at, reason),) = decoded.bad
    assert at == 1 and expected in reason and reason.startswith("column `a")


def test_a_payload_that_is_null_is_a_record_without_a_value() -> None:
    decoded = both(JsonEnvelope("a int"), record(struct(a="int32"), None), record(struct(a="int32"), {"a": 1}), None,
                   b'{"schema":null,"payload": null }', record(struct(a="int32", optional=False), None))  # fmt: skip
    assert decoded.deleted is not None and decoded.deleted.to_pylist() == [True, False, False, True, False]
    assert decoded.batch.column("a").to_pylist() == [None, 1, None, None, None]
    assert decoded.bad == ((4, "its payload is null, and its schema is not optional"),)
    assert both(JsonEnvelope("a int"), record(None, {"a": 1})).deleted is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b'{"schema":null}', "`payload` is missing"),
        (b'{"payload":{"a":1}}', "`schema` is missing"),
        (b'{"schema":null,"payload":{"a":1},"x":1}', "found 'x' beside"),
        (b'{"schema":null,"payload":{"a":1},"payload":{"a":1}}', "'payload' twice"),
        (b'{"schema":null,"payload":{"a":1}}}', "found '}' after it"),
        (b'{"schema":null,"payload":{"a":1}', "ends too early"),
        (b'{"schema":null,"payload":[]}', "expected a JSON object, found []"),
        (b'{"schema":5,"payload":{"a":1}}', "expected a type of Connect"),
        (b'{"schema":{"type":"struct","fields":[{"field":["a"],"type":"x"},{"field":"a"}]},"payload":{}}', "a type of Connect"),
        (b'{"schema":{"type":"struct","version":' + b"1" * 5000 + b'},"payload":{"a":"x"}}', "column `a`"),
        (b'{"schema":null,"payload":{"a":"\xff"}}', "not UTF-8"),
        (b'{"schema":null,"payload":{"a":' + b"[" * 600 + b"]" * 600 + b"}}", "nested more than 500 deep"),
        (b"[]", "expected an object with `schema` and `payload`, found []"),
    ],
    ids=lambda v: repr(v)[:50],
)
def test_what_is_no_envelope(value: bytes, expected: str) -> None:
    fine = b'{"schema":null,"payload":{"a":1}}'
    decoded = both(JsonEnvelope("a int"), fine, value, fine)
    ((at, reason),) = decoded.bad
    assert at == 1 and expected in reason
    assert decoded.batch.column("a").to_pylist() == [1, None, 1]


def test_the_schema_is_read_once_and_payloads_go_the_fast_way() -> None:
    values = [record(ORDERS, {"id": n, "customer": "c", "amount": unscaled(n), "placed_at": PLACED}) for n in range(MANY)]
    decoder = CASES["envelope"].format.make_decoder()
    assert isinstance(decoder, EnvelopeDecoder)
    assert decoder.decode(values).batch.column("id").to_pylist() == list(range(MANY))
    (plan,) = decoder._plans.values()
    assert plan.decoder is not None and plan.decoder.row_wise_count <= 1


def test_schemas_that_change_with_every_record_are_read_as_well() -> None:
    schemas = [struct(a="int32", **{f"x{n}": "string"}) for n in range(300)]
    values = [record(schema, {"a": n}) for n, schema in enumerate(schemas)]
    decoded = both(JsonEnvelope("a int"), *values)
    # If the payload comes first, or spaces differ, no record begins like another.
    for n in range(60, 80):
        values[n] = json.dumps({"payload": {"a": n}, "schema": schemas[n]}).encode()
    values[100:] = [b'{"schema":null,' + b" " * n + b'"payload":{"a":%d}}' % n for n in range(100, 300)]
    assert both(JsonEnvelope("a int"), *values).batch == decoded.batch
    assert decoded.bad == () and decoded.batch.column("a").to_pylist() == list(range(300))


# --- writing ----------------------------------------------------------------------------------------------------------------

COLUMNS: list[tuple[str, str, Kind]] = [
    ("id", "bigint NOT NULL", "integer"), ("yes", "boolean", "boolean"), ("text", "string", "text"), ("raw", "binary", "binary"),
    ("at", "timestamp", "zoned"), ("local", "timestamp_ntz", "local"), ("day", "date", "date"),
]  # fmt: skip
DDL = ", ".join(f"{name} {kind}" for name, kind, _ in COLUMNS)
MOMENT = st.datetimes(min_value=dt.datetime(1, 1, 1))
ROW = st.fixed_dictionaries(
    {
        "id": st.integers(-(2**63), 2**63 - 1), "yes": st.none() | st.booleans(), "raw": st.none() | st.binary(max_size=9),
        "text": st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
        "at": st.none() | MOMENT.map(lambda t: t.replace(tzinfo=UTC)), "local": st.none() | MOMENT,
        "day": st.none() | st.dates(),
    }
)  # fmt: skip


def by_task(format: JsonEnvelope, batch: pa.RecordBatch) -> list[bytes]:
    encoder = format.make_encoder([(name, kind) for name, _, kind in COLUMNS])
    assert encoder is not None
    return encoder.encode(dict(zip(batch.schema.names, batch.columns, strict=True))).to_pylist()


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(ROW, max_size=9))
def test_what_a_task_writes_is_read_again(rows: list[dict[str, Any]]) -> None:
    format = JsonEnvelope(DDL, timestamps="micros")
    batch = pa.RecordBatch.from_pylist(rows, schema=format.get_arrow_schema())
    decoded = format.make_decoder().decode(by_task(format, batch))
    assert decoded.bad == () and decoded.batch.to_pylist() == batch.to_pylist()


def test_the_written_schema_is_connects() -> None:
    rows = [{"id": 1, "yes": None, "text": "é", "raw": b"", "day": dt.date(1970, 1, 2), "local": dt.datetime(1969, 12, 31, 23),
             "at": dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)}]  # fmt: skip
    format = JsonEnvelope(DDL)
    (value,) = by_task(format, pa.RecordBatch.from_pylist(rows, schema=format.get_arrow_schema()))
    assert json.loads(value) == {
        "schema": {
            "type": "struct", "optional": False,
            "fields": [
                {"type": "int64", "optional": False, "field": "id"},
                {"type": "boolean", "optional": True, "field": "yes"},
                {"type": "string", "optional": True, "field": "text"},
                {"type": "bytes", "optional": True, "field": "raw"},
                {"type": "int64", "name": f"{CONNECT}Timestamp", "version": 1, "optional": True, "field": "at"},
                {"type": "int64", "name": f"{CONNECT}Timestamp", "version": 1, "optional": True, "field": "local"},
                {"type": "int32", "name": f"{CONNECT}Date", "version": 1, "optional": True, "field": "day"},
            ],
        },
        "payload": {"id": 1, "yes": None, "text": "é", "raw": "", "at": 1000, "local": -3_600_000, "day": 1},
    }  # fmt: skip


def test_microseconds_are_not_cut_off() -> None:
    format = JsonEnvelope("at timestamp")
    encoder = format.make_encoder([("at", "zoned")])
    assert encoder is not None
    with pytest.raises(ValueError, match="`at` holds microseconds"):
        encoder.encode({"at": pa.array([1], pa.timestamp("us", "UTC"))})
    assert b'"at":-1}' in encoder.encode({"at": pa.array([-1000], pa.timestamp("us", "UTC"))})[0].as_py()


def test_spark_writes_the_same_as_a_task_and_more_types(spark: SparkSession) -> None:
    rows = [
        {"id": -1, "yes": True, "text": 'a"\\\n\x01é😀', "raw": b"\xff\x00", "day": dt.date(1, 1, 1),
         "at": dt.datetime(2026, 1, 2, 3, 4, 5, 6000, UTC), "local": dt.datetime(999, 1, 2)},
        dict.fromkeys(name for name, _, _ in COLUMNS) | {"id": 2},
    ]  # fmt: skip
    names = [name for name, _, _ in COLUMNS]
    batch = pa.RecordBatch.from_pylist(rows, schema=JsonEnvelope(DDL).get_arrow_schema())
    given = spark.createDataFrame(pa.Table.from_batches([batch]))
    frame = given.selectExpr(*(f"CAST({name} AS {kind.split()[0]}) AS {name}" for name, kind, _ in COLUMNS))
    formats = [JsonEnvelope(DDL), JsonEnvelope(DDL, timestamps="micros")]
    found = frame.select(*(f.encode(names).alias(f"f{n}") for n, f in enumerate(formats))).toArrow()
    for n, format in enumerate(formats):
        assert format.find_encoding_problems("value", names) == []
        written = found.column(f"f{n}").to_pylist()
        assert written == by_task(format, batch)
        assert format.make_decoder().decode(written).batch.to_pylist() == batch.to_pylist()
    more = JsonEnvelope("n decimal(12,3), s struct<d:date,l:array<timestamp>>, m map<string,decimal(3,1)>, i int, f double")
    one = spark.sql(
        "SELECT 1.5BD AS n, named_struct('d', DATE'2026-11-05', 'l', array(TIMESTAMP'2026-11-05 07:08:09Z', NULL)) AS s,"
        " map('k', 2.5BD) AS m, 7L AS i, double('NaN') AS f"
    )
    (value,) = one.select(more.encode(["n", "s", "m", "i", "f"]).alias("v")).toArrow().column("v").to_pylist()
    decoded = more.make_decoder().decode([value])
    assert decoded.bad == ()
    (row,) = decoded.batch.to_pylist()
    assert row["n"] == D("1.500") and row["m"] == [("k", D("2.5"))] and row["i"] == 7 and str(row["f"]) == "nan"
    assert row["s"] == {"d": dt.date(2026, 11, 5), "l": [dt.datetime(2026, 11, 5, 7, 8, 9, tzinfo=UTC), None]}


def test_what_cannot_be_written_is_a_problem() -> None:
    (problem,) = JsonEnvelope("a int").find_encoding_problems("value", ["a", "b"])
    assert problem.where == "value.schema" and "`b` is not in it" in problem.what
    assert [p.where for p in JsonEnvelope("a int", timestamps="nanos").validate("value")] == ["value.timestamps"]  # type: ignore[arg-type]
    assert JsonEnvelope("a decimal(3,1)").make_encoder([("a", "decimal")]) is None
    assert (
        JsonEnvelope("a int").make_encoder([("a", "text")]) is None
        and JsonEnvelope("a int").make_encoder([("b", "integer")]) is None
    )
    assert Json("a int").get_arrow_schema() == JsonEnvelope("a int").get_arrow_schema()
