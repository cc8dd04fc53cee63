"""Values of all types as Debezium writes them, and the rows that this package's Debezium format reads from them."""

from __future__ import annotations

import base64
import json
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.formats import Debezium, Json, JsonEnvelope
from airflow_kafka_spark.sources.cdc.tasks.events import ValueRefused
from airflow_kafka_spark.sources.postgres_cdc.tasks.values import ValueTypes
from tests.sources.postgres_cdc.kit import Windows, log_of


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


# type, literal, what Debezium writes by default, the Connect type
CASES: list[tuple[str, str, Any, str]] = [
    ("smallint", "-7", -7, "int16"),
    ("int", "7", 7, "int32"),
    ("bigint", "9223372036854775807", 2**63 - 1, "int64"),
    ("boolean", "true", True, "boolean"),
    ("real", "1.5", 1.5, "float"),
    ("double precision", "'NaN'", "NaN", "double"),
    ("double precision", "0.1", 0.1, "double"),
    ("numeric(10,2)", "-123.45", b64((-12345).to_bytes(2, "big", signed=True)), "bytes"),
    ("numeric(10,2)", "1.28", b64(b"\x00\x80"), "bytes"),
    ("numeric(3,-2)", "-12300", b64((-123).to_bytes(1, "big", signed=True)), "bytes"),
    ("numeric", "12.345", {"scale": 3, "value": b64((12345).to_bytes(2, "big"))}, "struct"),
    ("money", "-1234.5", b64((-123450).to_bytes(3, "big", signed=True)), "bytes"),
    ("text", "E'\"\\u00e9\\u0001\\n\\\\ x'", '"é\x01\n\\ x', "string"),
    ("varchar(5)", "'abc'", "abc", "string"),
    ("char(5)", "'abc'", "abc  ", "string"),
    ("bytea", "'\\x00ff'", b64(b"\x00\xff"), "bytes"),
    ("json", '\'{"a": 1}\'', '{"a": 1}', "string"),
    ("jsonb", '\'{"a":1}\'', '{"a": 1}', "string"),
    ("uuid", "'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'", "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11", "string"),
    ("inet", "'10.0.0.1/8'", "10.0.0.1/8", "string"),
    ("bit(1)", "B'1'", True, "boolean"),
    ("bit(10)", "B'1000000001'", b64(b"\x01\x02"), "bytes"),
    ("date", "'1969-12-31'", -1, "int32"),
    ("date", "'0044-03-15 BC'", (date(357, 3, 15) - date(1970, 1, 1)).days - 146097, "int32"),
    ("date", "'20000-01-01'", (date(2000, 1, 1) - date(1970, 1, 1)).days + 45 * 146097, "int32"),
    ("timestamp", "'1969-12-31 23:59:59.999999'", -1, "int64"),
    ("timestamp(3)", "'1970-01-01 00:00:01.234'", 1234, "int64"),
    ("timestamp", "'infinity'", 9223372036825200000, "int64"),
    ("timestamp", "'-infinity'", -9223372036832400000, "int64"),
    ("timestamptz", "'2026-01-02 03:04:05.6+02'", "2026-01-02T01:04:05.600000Z", "string"),
    ("timestamptz", "'0001-01-01 00:00:00+00 BC'", "0000-01-01T00:00:00.000000Z", "string"),
    ("time", "'12:34:56.789012'", 45296789012, "int64"),
    ("time(3)", "'12:34:56.789'", 45296789, "int32"),
    ("timetz", "'01:00:00.5+02'", "23:00:00.5Z", "string"),
    ("interval", "'1 year 2 mons 3 days 04:05:06.7'", 36827406700000, "int64"),
    ("interval", "'-00:00:00.5'", -500000, "int64"),
    ("int[]", "'{1,NULL,3}'", [1, None, 3], "array"),
    ("text[]", "ARRAY['a,b', '\"', 'NULL', NULL, '{}', E'\\\\']", ["a,b", '"', "NULL", None, "{}", "\\"], "array"),
    ("numeric(6,1)[]", "'{1.5}'", [b64(b"\x0f")], "array"),
    ("mood", "'happy'", "happy", "string"),
    ("amount", "1.5", b64(b"\x00\x96"), "bytes"),
    ("mood[]", "'{happy,sad}'", ["happy", "sad"], "array"),
    ("tsrange", "'[2026-01-01,)'", '["2026-01-01 00:00:00",)', "string"),
    ("text", "NULL", None, "string"),
]  # fmt: skip


@pytest.fixture
def types(place):
    place.execute("CREATE TYPE mood AS ENUM ('sad', 'happy'); CREATE DOMAIN amount AS numeric(8,2)")
    columns = ", ".join(f"c{n} {case[0]}" for n, case in enumerate(CASES))
    place.execute(f"CREATE TABLE types (id int PRIMARY KEY, {columns})")
    with log_of(place, "types") as log:
        yield log


def test_values_of_every_type_are_written_as_debezium_does_and_the_schema_says_so(types):
    windows = Windows(types.source(schemas_enable=True))
    windows.next()
    types.place.execute(f"INSERT INTO types VALUES (1, {', '.join(case[1] for case in CASES)})")
    [record] = windows.next()
    payload, after = record["value"]["payload"], record["value"]["payload"]["after"]
    fields = {f["field"]: f for f in record["value"]["schema"]["fields"][1]["fields"]}
    wrong = {
        f"{n} {kind} {literal}": (after[f"c{n}"], expected)
        for n, (kind, literal, expected, _) in enumerate(CASES)
        if after[f"c{n}"] != expected and kind != "interval"
    }
    assert wrong == {}
    assert [fields[f"c{n}"]["type"] for n in range(len(CASES))] == [case[3] for case in CASES]
    month = round(365.25 / 12 * 86_400_000_000)
    intervals = [after[f"c{n}"] for n, case in enumerate(CASES) if case[0] == "interval"]
    assert intervals == [14 * month + 3 * 86_400_000_000 + (4 * 3600 + 5 * 60 + 6) * 1_000_000 + 700_000, -500_000]
    assert record["key"]["payload"] == {"id": 1} and record["key"]["schema"]["fields"][0]["optional"] is False
    assert payload["op"] == "c" and payload["source"]["snapshot"] == "false"


@pytest.mark.parametrize(
    ("text", "digits", "cents"),
    [
        ("-$1,234.50", 2, -123450),
        ("-1.234,50 €", 2, -123450),
        ("(1 234,50)", 2, -123450),
        ("￥1,234", 0, 123400),
        ("0,00 €", 2, 0),
    ],
)
def test_money_of_every_locale_has_its_value(text, digits, cents):
    converted = ValueTypes(money_digits=digits).find_converter(790, -1)
    assert json.loads(converted.convert(text.encode())) == b64(
        cents.to_bytes((cents + (cents < 0)).bit_length() // 8 + 1, "big", signed=True)
    )


LONG, LONG_CENTS = "9" * 5000 + ".25", (10**5000 - 1) * 100 + 25


@pytest.mark.parametrize(
    ("oid", "options", "text", "expected"),
    [
        (1700, {}, LONG, {"scale": 2, "value": b64(LONG_CENTS.to_bytes(LONG_CENTS.bit_length() // 8 + 1, "big"))}),
        (1700, {"decimals": "double"}, LONG, "Infinity"),
        (1700, {"decimals": "double"}, "-" + LONG, "-Infinity"),
        (1700, {"decimals": "string"}, LONG, LONG),
        (701, {}, "-Infinity", "-Infinity"),
        (1186, {}, "infinity", 2**63 - 1),
        (1186, {}, "-infinity", -(2**63)),
        (1186, {}, "P178000000Y", None),
        (1114, {}, "294276-12-31 23:59:59.999999", None),
        (1114, {"times": "connect"}, "294276-12-31 23:59:59.999999", 9_224_318_015_999_999),
    ],
)
def test_numbers_beyond_those_of_json_readers_are_exact_infinite_or_refused(oid, options, text, expected):
    convert = ValueTypes(**options).find_converter(oid, -1).convert
    if expected is None:
        with pytest.raises(ValueRefused, match="64 bits cannot hold"):
            convert(text.encode())
    else:
        assert json.loads(convert(text.encode())) == expected


@pytest.mark.parametrize("schemas", [False, True])
def test_our_debezium_format_reads_the_values_again(place, schemas):
    columns = "id bigint PRIMARY KEY, amount numeric(12,2), at timestamptz, local timestamp, day date, note text, raw bytea"
    place.execute(f"CREATE TABLE t ({columns})")
    schema = "id bigint, amount decimal(12,2), at timestamp, local timestamp_ntz, day date, note string, raw binary"
    inner = JsonEnvelope(schema) if schemas else Json(schema=schema)
    form = Debezium(inner) if schemas else Debezium(inner, timestamps="micros", decimals="unscaled")
    with log_of(place, "t") as log:
        source = log.source(schemas_enable=schemas)
        windows = Windows(source)
        windows.next()
        times = "'2026-01-01 00:00:00.000001+00', '1960-05-05 05:05:05.5', '0099-01-01'"
        place.execute(f"INSERT INTO t VALUES (1, -0.05, {times}, 'ö', '\\x01')")
        place.execute("DELETE FROM t")
        window = windows.freeze()
        reader = source.make_reader(window.splits, None)
        raw = [value for batch in reader.read(0) for value in batch.column("value").to_pylist()]
    decoded = form.make_decoder().decode(raw)
    assert decoded.bad == ()
    row = decoded.batch.to_pylist()[0]
    assert (row["id"], row["amount"], row["note"], row["raw"]) == (1, Decimal("-0.05"), "ö", b"\x01")
    assert row["at"] == datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(microseconds=1)
    assert (row["local"], row["day"]) == (datetime(1960, 5, 5, 5, 5, 5, 500_000), date(99, 1, 1))
    assert decoded.deleted is not None and decoded.deleted.to_pylist() == [False, True, False]
    assert raw[2] is None


def test_nan_that_an_exact_decimal_cannot_hold_is_refused_by_name_and_written_as_text(orders, caplog):
    place = orders.place
    place.execute("ALTER TABLE orders ADD COLUMN amount numeric(8,2)")
    exact, text, double = (Windows(orders.source(decimal_handling_mode=mode)) for mode in ("precise", "string", "double"))
    exact.next()
    place.execute("INSERT INTO orders VALUES (1, 'n', 'NaN'), (2, 'n', 1.50)")
    window = exact.freeze()
    with pytest.raises(SourceRejected, match=r"column `amount`.*NaN") as refused:
        exact.read(window)
    assert 'decimal_handling_mode="string"' in refused.value.action
    assert [record for record in caplog.records if record.name.startswith("psycopg")] == [], "the session is ended in silence"
    assert [r["value"]["after"]["amount"] for r in text.read(window)] == ["NaN", "1.50"]
    assert [r["value"]["after"]["amount"] for r in double.read(window)] == ["NaN", 1.5]


def test_connect_precision_writes_milliseconds(place):
    place.execute("CREATE TABLE t (id int PRIMARY KEY, at timestamp, clock time, day date)")
    with log_of(place, "t") as log:
        windows = Windows(log.source(time_precision_mode="connect"))
        windows.next()
        place.execute("INSERT INTO t VALUES (1, '1970-01-01 00:00:01.234567', '00:00:01.5', '1970-01-02')")
        [record] = windows.next()
    assert record["value"]["after"] == {"id": 1, "at": 1234, "clock": 1500, "day": 1}


def test_arrays_of_a_type_with_another_separator_are_the_servers_text(place):
    """As those of PostGIS, whose geometries are separated by colons."""
    place.execute("CREATE TYPE shape")
    for name, argument, result in (("textin", "cstring", "shape"), ("textout", "shape", "cstring")):
        made = f"{place.quoted}.{name}({argument}) RETURNS {result} AS '{name}'"
        place.execute(f"CREATE FUNCTION {made} LANGUAGE internal IMMUTABLE STRICT")
    functions = f"INPUT = {place.quoted}.textin, OUTPUT = {place.quoted}.textout"
    place.execute(f"CREATE TYPE shape ({functions}, LIKE = text, DELIMITER = ':')")
    place.execute("CREATE TABLE t (id int PRIMARY KEY, one shape, many shape[])")
    with log_of(place, "t") as log:
        windows = Windows(log.source())
        windows.next()
        place.execute("INSERT INTO t VALUES (1, 'a,b', '{a,b:c}')")
        [record] = windows.next()
    assert record["value"]["after"] == {"id": 1, "one": "a,b", "many": "{a,b:c}"}
