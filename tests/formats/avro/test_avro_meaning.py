"""The meaning of Avro values: a table of cases, each decoded both ways; refused schemas; and the contract of formats."""

from __future__ import annotations

import json
import pickle
import struct
from collections.abc import Callable
from datetime import date, datetime, time, timezone
from decimal import Decimal
from functools import reduce
from typing import Any

import pyarrow as pa
import pytest

from airflow_kafka_spark.formats import Avro
from airflow_kafka_spark.formats.avro.schema import find_derivation_problems, find_differences, parse
from airflow_kafka_spark.formats.avro.tasks.decode import AvroDecoder
from airflow_kafka_spark.formats.types import parse_ddl
from tests.formats.avro.random_avro import encoded
from tests.formats.contract import CHECKS, Case, rows

UTC = timezone.utc


def field(type_: Any, **more: Any) -> dict[str, Any]:
    """Return a record of one field `x`."""
    return {"type": "record", "name": "R", "fields": [{"name": "x", "type": type_, **more}]}


def logical(type_: str, name: str, **more: Any) -> dict[str, Any]:
    return {"type": type_, "logicalType": name, **more}


def decode(schema: Any, values: list[bytes | None], reader: Any = None) -> tuple[list[Any], dict[int, str]]:
    """Return the rows and the bad records, which are equal in both decoders."""
    made = Avro(json.dumps(schema), reader_schema=json.dumps(reader) if reader else "latest").make_decoder()
    assert isinstance(made, AvroDecoder)
    fast = AvroDecoder(made._reader, made._writers, False, few=0)
    decoded, row_wise = fast.decode(values), made.decode_row_wise(values)
    assert rows(decoded) == rows(row_wise) and decoded.bad == row_wise.bad
    return decoded.batch.to_pylist(), dict(decoded.bad)


DEBEZIUM = "io.debezium.time."
DECIMAL = logical("bytes", "decimal", precision=38, scale=10)
MOST = Decimal(f"{'9' * 28}.{'9' * 10}")
GOOD: dict[str, tuple[Any, Any, Any]] = {
    "boolean": ("boolean", True, True),
    "least int": ("int", -(1 << 31), -(1 << 31)),
    "least long": ("long", -(1 << 63), -(1 << 63)),
    "greatest long": ("long", (1 << 63) - 1, (1 << 63) - 1),
    "text": ("string", "é😀\x00", "é😀\x00"),
    "a megabyte of text": ("string", "x" * (1 << 20), "x" * (1 << 20)),
    "bytes": ("bytes", b"\xff\x00", b"\xff\x00"),
    "infinity": ("double", float("-inf"), float("-inf")),
    "float": ("float", 1.5, 1.5),
    "fixed": ({"type": "fixed", "name": "F", "size": 2}, b"ab", b"ab"),
    "enum": ({"type": "enum", "name": "E", "symbols": ["A", "B"]}, "B", "B"),
    "greatest decimal": (DECIMAL, MOST, MOST),
    "least decimal": (DECIMAL, MOST.copy_negate(), MOST.copy_negate()),
    "negative decimal": (logical("bytes", "decimal", precision=5, scale=2), Decimal("-1.50"), Decimal("-1.50")),
    "date before 1970": (logical("int", "date"), date(1, 1, 1), date(1, 1, 1)),
    "last date": (logical("int", "date"), date(9999, 12, 31), date(9999, 12, 31)),
    "millis before 1970": (
        logical("long", "timestamp-millis"),
        datetime(1969, 12, 31, 23, 59, 59, 999000, UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999000, UTC),
    ),
    "micros before 1970": (
        logical("long", "timestamp-micros"),
        datetime(1900, 1, 1, 0, 0, 0, 1, UTC),
        datetime(1900, 1, 1, 0, 0, 0, 1, UTC),
    ),
    "wall clock": (logical("long", "local-timestamp-micros"), datetime(2026, 3, 29, 2, 30), datetime(2026, 3, 29, 2, 30)),
    "uuid": (
        logical("string", "uuid"),
        "123e4567-e89b-12d3-a456-426614174000",
        "123e4567-e89b-12d3-a456-426614174000",
    ),
    "time of day": (logical("int", "time-millis"), time(23, 59, 59, 999000), 86_399_999),
    "fine time of day": (logical("long", "time-micros"), time(0, 0, 0, 1), 1),
    "duration": ({"type": "fixed", "name": "D", "size": 12, "logicalType": "duration"}, bytes(range(12)), bytes(range(12))),
    "nanoseconds": (logical("long", "timestamp-nanos"), 7, 7),
    "Debezium's date": ({"type": "int", "connect.name": f"{DEBEZIUM}Date"}, 1, date(1970, 1, 2)),
    "Debezium's millis": (
        {"type": "long", "connect.name": f"{DEBEZIUM}Timestamp"},
        -1,
        datetime(1969, 12, 31, 23, 59, 59, 999000),
    ),
    "Debezium's micros": (
        ["null", {"type": "long", "connect.version": 1, "connect.name": f"{DEBEZIUM}MicroTimestamp"}],
        1,
        datetime(1970, 1, 1, 0, 0, 0, 1),
    ),
    "Debezium's nanos": ({"type": "long", "connect.name": f"{DEBEZIUM}NanoTimestamp"}, 1, 1),
    "null": (["null", "string"], None, None),
    "null behind": (["string", "null"], None, None),
    "array": ({"type": "array", "items": ["null", "int"]}, [1, None], [1, None]),
    "map": ({"type": "map", "values": "int"}, {"a": 1}, [("a", 1)]),
    "map without entries": ({"type": "map", "values": "int"}, {}, []),
    "no decimals": ({"type": "array", "items": DECIMAL}, [], []),
    "union of numbers": (["int", "long"], 1 << 40, 1 << 40),
    "union": (["null", "string", "boolean"], True, {"member0": None, "member1": True}),
}


@pytest.mark.parametrize("name", GOOD)
def test_a_value_is_what_was_written(name: str) -> None:
    type_, written, wanted = GOOD[name]
    value = encoded(field(type_), {"x": written})
    found, bad = decode(field(type_), [value, None, value] * 3)
    assert bad == {}
    assert found == [{"x": wanted}, {"x": None}, {"x": wanted}] * 3


def test_nan_and_minus_zero_stay_what_they_are() -> None:
    values = [struct.pack("<d", float("nan")), struct.pack("<d", -0.0)]
    assert repr(decode(field("double"), values)[0]) == "[{'x': nan}, {'x': -0.0}]"


def test_records_may_be_nested_deep() -> None:
    schema, value, wanted = "long", 7, 7
    for depth in range(20):
        schema = {"type": "record", "name": f"R{depth}", "fields": [{"name": "x", "type": ["null", schema]}]}  # type: ignore[assignment]
        value, wanted = {"x": value}, {"x": wanted}  # type: ignore[assignment]
    assert decode(schema, [encoded(schema, value)] * 3) == ([wanted] * 3, {})


BAD: dict[str, tuple[Any, bytes, str]] = {
    "nothing": ("long", b"", "column `x`: it ends too early"),
    "cut off": ("double", b"\0" * 7, "column `x`: it ends too early"),
    "more": ("long", b"\2\2", "1 of 2 bytes are left"),
    "text cut off": ("string", b"\x08abc", "a length of 4 bytes where 3 are left"),
    "negative length": ("string", b"\x01", "a length of -1 bytes"),
    "endless length": ("bytes", b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01", "a length of 9223372036854775807 bytes"),
    "no text": ("string", b"\x02\xff", "not UTF-8: byte 0xff at position 0"),
    "half a character": ("string", b"\x06\xed\xa0\x80", "not UTF-8"),
    "boolean": ("boolean", b"\2", "found the byte 0x02, expected a boolean"),
    "int": ("int", b"\x80\x80\x80\x80\x10", "found 2147483648, expected an int"),
    "long": ("long", b"\xff" * 10 + b"\0", "more than 10 bytes"),
    "branch": (["null", "long"], b"\4\2", "found branch 2 of a union that has 2"),
    "branch behind": (["long", "null"], b"\4", "found branch 2 of a union that has 2"),
    "negative branch": (["null", "long"], b"\1\2", "found branch -1"),
    "symbol": ({"type": "enum", "name": "E", "symbols": ["A"]}, b"\2", "found symbol 1 of enum E"),
    "items": ({"type": "array", "items": "long"}, b"\xfe\xff\xff\xff\x0f\0", "a block of 2147483647 items"),
    "decimal": (logical("bytes", "decimal", precision=2, scale=1), b"\x02\x64", "found 100e-1, expected decimal"),
    "long decimal": (logical("bytes", "decimal", precision=2, scale=1), b"\x22\x01" + bytes(16), "expected decimal(2,1)"),
    "least of 16 bytes": (logical("bytes", "decimal", precision=38), b"\x20\x80" + bytes(15), "expected decimal(38,0)"),
    "date": (logical("int", "date"), b"\x80\x80\x80\x80\x08", "expected one in the years 1 to 9999"),
    "timestamp": (logical("long", "timestamp-millis"), b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f", "years 1 to 9999"),
    "time before the day": (logical("int", "time-millis"), b"\x01", "found -1, expected a time of day: 0 to 86399999"),
    "time after the day": (
        logical("long", "time-micros"),
        b"\x80\x80\xbb\xdd\x83\x05",
        "found 86400000000, expected a time of day",
    ),
    "fixed cut off": ({"type": "fixed", "name": "F", "size": 3}, b"ab", "column `x`: it ends too early"),
    "inside a map": ({"type": "map", "values": "boolean"}, b"\2\2k\7\0", "column `x['k']`: found the byte 0x07"),
    "inside": ({"type": "array", "items": ["null", "boolean"]}, b"\4\0\2\7\0", "column `x[1]`: found the byte 0x07"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit_is_bad_and_says_why(name: str) -> None:
    type_, value, reason = BAD[name]
    found, bad = decode(field(type_), [None, value])
    assert found == [{"x": None}] * 2
    assert list(bad) == [1] and reason in bad[1]


def test_bad_values_are_found_among_many_good_ones() -> None:
    good = [encoded(field(["null", "string"]), {"x": f"v{n}" if n % 3 else None}) for n in range(5000)]
    values = list(good)
    places = [0, 17, 2500, 4999]
    for at in places:
        values[at] = b"\x02\x08abc"
    found, bad = decode(field(["null", "string"]), values)
    assert list(bad) == places
    assert sum(row["x"] is not None for row in found) == sum(n % 3 > 0 for n in range(5000) if n not in places) > 3000


def test_bad_values_leave_no_trace_on_standard_error(capfd: pytest.CaptureFixture[str]) -> None:
    _, bad = decode(field("string"), [b"\x08abc", b"\xfe\xff\xff\xff\x0fa"] * 50)
    assert len(bad) == 100
    assert capfd.readouterr().err == ""


def test_arrays_in_blocks_with_sizes_are_read() -> None:
    # Two items in a block of two bytes, then one in a block without its size.
    blocks = b"\x03\x04\x02\x04" + b"\x02\x06" + b"\x00"
    assert decode(field({"type": "array", "items": "long"}), [blocks] * 2)[0] == [{"x": [1, 2, 3]}] * 2
    assert decode(field({"type": "array", "items": ["null", "long"]}), [b"\x01\x04\x02\x04\x00"] * 2)[0] == [{"x": [2]}] * 2


def test_of_a_key_that_a_map_has_twice_the_last_value_counts() -> None:
    twice = b"\x04\x02k\x02\x02k\x04\x00"
    assert decode(field({"type": "map", "values": "int"}), [twice] * 2) == ([{"x": [("k", 2)]}] * 2, {})


def test_a_decimal_of_no_bytes_is_zero() -> None:
    decimal = logical("bytes", "decimal", precision=5, scale=2)
    assert decode(field(decimal), [b"\0"] * 3) == ([{"x": Decimal("0.00")}] * 3, {})


# --- other versions ------------------------------------------------------------------------------------------------------

OLD = {
    "type": "record",
    "name": "shop.Order",
    "fields": [
        {"name": "id", "type": "int"},
        {"name": "who", "type": "string"},
        {"name": "at", "type": logical("long", "timestamp-millis")},
        {"name": "gone", "type": {"type": "map", "values": "bytes"}},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}},
    ],
}
NEW = {
    "type": "record",
    "name": "shop.Order",
    "fields": [
        {"name": "note", "type": ["null", "string"], "default": None},
        {"name": "at", "type": logical("long", "timestamp-micros")},
        {"name": "customer", "type": ["null", "string"], "aliases": ["who"], "default": None},
        {"name": "id", "type": "double"},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["PAID", "OTHER"], "default": "OTHER"}},
        {"name": "amount", "type": logical("bytes", "decimal", precision=6, scale=2), "default": "\u0001\u0000"},
    ],
}


def test_old_records_come_out_as_the_new_schema_has_them() -> None:
    at = datetime(2026, 1, 2, tzinfo=UTC)
    old = encoded(OLD, {"id": 7, "who": "ann", "at": at, "gone": {"k": b"v"}, "state": "NEW"})
    row = {"note": None, "at": at, "customer": "ann", "id": 7.0, "state": "OTHER", "amount": Decimal("2.56")}
    assert decode(OLD, [old, None], NEW)[0][0] == row


def test_new_records_come_out_as_an_old_schema_has_them() -> None:
    narrow = {**OLD, "fields": [{"name": "at", "type": "long"}, {"name": "state", "type": NEW["fields"][4]["type"]}]}  # type: ignore[index]
    at = datetime(2026, 1, 2, tzinfo=UTC)
    new = encoded(NEW, {"note": "n", "at": at, "customer": "c", "id": 1.5, "state": "PAID", "amount": Decimal("1.00")})
    assert decode(NEW, [new] * 2, narrow)[0] == [{"at": int(at.timestamp()) * 1_000_000, "state": "PAID"}] * 2


@pytest.mark.parametrize(("writer", "reader", "wanted"), [("bytes", "string", "é"), ("string", "bytes", "é".encode())])
def test_texts_are_read_as_bytes_and_bytes_as_texts(writer: str, reader: str, wanted: Any) -> None:
    found, bad = decode(field(writer), [b"\x04\xc3\xa9", b"\x02\xff"], field(reader))
    assert found == [{"x": wanted}, {"x": None}]
    assert list(bad) == [1] and "not UTF-8" in bad[1]


def test_a_number_of_another_unit_stays_the_same_time() -> None:
    millis, micros = ({"type": "long", "connect.name": f"{DEBEZIUM}{name}"} for name in ("Timestamp", "MicroTimestamp"))
    at = datetime(1970, 1, 1, 0, 0, 0, 7000)
    assert decode(field(millis), [b"\x0e"] * 2, field(micros))[0] == [{"x": at}] * 2
    assert decode(field(millis), [b"\x0e"] * 2, field("long"))[0] == [{"x": 7}] * 2
    times = field(logical("int", "time-millis")), field(logical("long", "time-micros"))
    assert decode(times[0], [b"\x0e"] * 2, times[1])[0] == [{"x": 7000}] * 2


@pytest.mark.parametrize("many", [2, 100])
@pytest.mark.parametrize(
    ("writer", "reader", "factor"),
    [
        (("int", "Time"), ("long", "MicroTime"), 1000),
        (("int", "Time"), ("long", "NanoTime"), 1_000_000),
        (("long", "MicroTime"), ("long", "NanoTime"), 1000),
        (("long", "Timestamp"), ("long", "NanoTimestamp"), 1_000_000),
        (("int", "time-millis"), ("long", "MicroTime"), 1000),
        (("long", "timestamp-micros"), ("long", "timestamp-nanos"), 1000),
        (("long", "NanoTime"), ("long", "long"), 1),
    ],
)
def test_a_number_that_stays_a_number_has_the_unit_of_the_readers_schema(
    writer: tuple[str, str], reader: tuple[str, str], factor: int, many: int
) -> None:
    assert decode(counted(*writer), [b"\x0e"] * many, counted(*reader)) == ([{"x": 7 * factor}] * many, {})


def test_nanoseconds_are_read_as_microseconds_or_bad_never_as_another_time() -> None:
    nanos, micros = counted("long", "NanoTimestamp"), counted("long", "MicroTimestamp")
    rows, bad = decode(nanos, [b"\xb0\x6d", b"\x0e"] * 50, micros)
    assert rows == [{"x": datetime(1970, 1, 1, 0, 0, 0, 7)}, {"x": None}] * 50
    assert list(bad) == list(range(1, 100, 2)) and "column `x`: found 7, which is no whole number in the unit" in bad[1]
    assert "found 4611686018427387904" in decode(micros, [encoded(field("long"), {"x": 1 << 62})], nanos)[1][0], "beyond 64 bits"


def counted(kind: str, name: str) -> dict[str, Any]:
    """Return a field of this logical type, or of Debezium's type of this name."""
    if name == kind:
        return field(kind)
    return field(logical(kind, name) if "-" in name else {"type": kind, "connect.name": f"{DEBEZIUM}{name}"})


@pytest.mark.parametrize(
    ("writer", "reader", "reason"),
    [
        (
            field(logical("int", "date")),
            field(logical("long", "timestamp-micros")),
            "column `x`: it was written as date, expected timestamp-micros",
        ),
        (field("string"), field("long"), "column `x`: it was written as string, expected long"),
        (field({"type": "array", "items": "long"}), field("long"), "it was written as array of long, expected long"),
        (
            field("long"),
            {**field("long"), "fields": [{"name": "y", "type": "long"}]},
            "column `y`: the writer's schema has no such",
        ),
        (field(["null", "string"]), field("string"), "column `x`: it was written as null, expected string"),
        (
            field({"type": "enum", "name": "E", "symbols": ["A"]}),
            field({"type": "enum", "name": "E", "symbols": ["B"]}),
            "column `x`: found `A`, expected one of B",
        ),
        (
            field(logical("bytes", "decimal", precision=5, scale=2)),
            field(logical("bytes", "decimal", precision=5, scale=1)),
            "column `x`: found 5e-2, expected decimal(5,1)",
        ),
        (
            field(logical("bytes", "decimal", precision=5, scale=2)),
            field("string"),
            "column `x`: it was written as decimal(5,2), expected string",
        ),
        (
            field("string"),
            field(logical("bytes", "decimal", precision=5, scale=2)),
            "column `x`: it was written as string, expected decimal(5,2)",
        ),
        (
            field(logical("bytes", "decimal", precision=5, scale=2)),
            field({"type": "fixed", "name": "F", "size": 4, "logicalType": "decimal", "precision": 5, "scale": 2}),
            "column `x`: it was written as decimal(5,2) on bytes, expected decimal(5,2) on fixed",
        ),
        (
            field(logical("int", "date")),
            field({"type": "long", "connect.name": f"{DEBEZIUM}NanoTimestamp"}),
            "column `x`: it was written as date, expected local-timestamp-nanos",
        ),
    ],
)
def test_what_a_reader_cannot_take_is_bad(writer: Any, reader: Any, reason: str) -> None:
    value = {"string": b"\x02a", "long": b"\2"}.get(
        writer["fields"][0]["type"] if isinstance(writer["fields"][0]["type"], str) else ""
    )
    if value is None:
        value = b"\x02\x05" if "decimal" in str(writer) else b"\0"
    _, bad = decode(writer, [value] * 2, reader)
    assert list(bad) == [0, 1] and reason in bad[0]


def test_a_type_that_is_no_record_is_one_column() -> None:
    made = Avro('"string"', column="key")
    assert made.get_arrow_schema() == pa.schema([pa.field("key", pa.string(), nullable=False)])
    assert made.make_decoder().decode([b"\x02a", None]).batch.to_pylist() == [{"key": "a"}, {"key": None}]


# --- schemas that are refused --------------------------------------------------------------------------------------------

TREE = {"type": "record", "name": "T", "fields": [{"name": "left", "type": ["null", "T"]}]}


def nest(items: Any, depth: int) -> Any:
    return {"type": "array", "items": items}


REFUSED: dict[str, tuple[str, str]] = {
    "no json": ("{", "it is no JSON"),
    "unknown type": ('"text"', "the type `text` is not defined"),
    "recursive": (json.dumps(TREE), "record `T` holds itself"),
    "null": (json.dumps(field("null")), "`x` is always null"),
    "no fields": ('{"type": "record", "name": "R", "fields": []}', "the record has no fields"),
    "large decimal": (json.dumps(field(logical("bytes", "decimal", precision=39))), "at most 38 digits"),
    "default": (json.dumps(field("int", default="a")), "the default of field `x` does not have its type"),
    "default beyond": (json.dumps(field("int", default=1 << 31)), "the default of field `x` does not have its type"),
    "default too large": (json.dumps(field("float", default=1e300)), "the default of field `x` does not have its type"),
    "default no text": (json.dumps(field("string", default="\ud800")), "the default of field `x` does not have its type"),
    "default no time": (json.dumps(field(logical("int", "time-millis"), default=-1)), "the default of field `x`"),
    "aliases": (json.dumps({**field("int"), "aliases": "old"}), 'the aliases of `R` are "old"; expected a list of names'),
    "aliases of a field": (json.dumps(field("int", aliases=[1])), "the aliases of `R.x` are [1]; expected a list"),
    "by case": (
        json.dumps({**field("int"), "fields": [{"name": "a", "type": "int"}, {"name": "A", "type": "int"}]}),
        "fields `a` and `A` differ only by case",
    ),
    "too deep": (json.dumps(field(reduce(nest, range(200), "int"))), "types are nested more than"),
    "no type": (json.dumps(field({"items": "int"})), 'found {"items": "int"}; expected a type'),
    "an empty union": (json.dumps(field([])), "the union [] is empty"),
    "a union in a union": (json.dumps(field(["null", ["int", "long"]])), "holds a union"),
    "a type twice": (json.dumps(field(["int", "int"])), "or holds a type twice"),
    "no name": (json.dumps({"type": "record", "fields": []}), "a record has no name"),
    "a name twice": (
        json.dumps(
            {
                "type": "record",
                "name": "R",
                "fields": [{"name": name, "type": {"type": "fixed", "name": "F", "size": 2}} for name in "ab"],
            }
        ),
        "`F` is defined twice",
    ),
    "fixed without a size": (json.dumps(field({"type": "fixed", "name": "F"})), "fixed `F` has the size None"),
    "a symbol twice": (json.dumps(field({"type": "enum", "name": "E", "symbols": ["A", "A"]})), "no symbols, or one twice"),
    "no such symbol": (
        json.dumps(field({"type": "enum", "name": "E", "symbols": ["A"], "default": "B"})),
        "the default of enum `E`",
    ),
    "a field without a type": (json.dumps({"type": "record", "name": "R", "fields": [{"name": "a"}]}), "no name or no type"),
    "a field twice": (
        json.dumps({"type": "record", "name": "R", "fields": [{"name": "a", "type": "int"}] * 2}),
        "record `R` has a field twice",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_schema_that_cannot_be_used_is_a_problem(name: str) -> None:
    schema, message = REFUSED[name]
    (problem,) = Avro(schema).validate("value")
    assert problem.where.startswith("value.") and message in problem.what and problem.action
    assert name != "large decimal" or "at most 38 digits there as `reader_schema`" in problem.action


@pytest.mark.parametrize(
    "kind",
    [
        logical("bytes", "decimal", precision=2, scale=3),
        {"type": "fixed", "name": "F", "size": 1, "logicalType": "decimal", "precision": 9},
        {"type": "fixed", "name": "F", "size": 8, "logicalType": "uuid"},
    ],
)
def test_a_logical_type_that_its_bytes_do_not_fit_is_read_as_bytes(kind: dict[str, Any]) -> None:
    """The specification of Avro says that readers ignore a logical type that is not valid."""
    assert Avro(json.dumps(field(kind))).get_arrow_schema().field("x").type == pa.binary()


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ({"type": "array", "items": "int"}, {"type": "array", "items": "long"}, ["`x[]` was int, is long"]),
        ({"type": "map", "values": "int"}, {"type": "map", "values": "long"}, ["`x[]` was int, is long"]),
        (["null", "int"], ["null", "long"], ["`x` was int, is long"]),
        ({"type": "map", "values": "int"}, {"type": "map", "values": "int"}, []),
    ],
)
def test_the_types_that_differ_between_two_versions_are_named_by_their_path(old: Any, new: Any, found: list[str]) -> None:
    assert find_differences(parse(json.dumps(field(old))), parse(json.dumps(field(new)))) == found


def test_a_map_whose_keys_are_no_texts_is_named_wherever_it_is() -> None:
    columns = parse_ddl("a array<map<int,string>>, b map<string,map<date,int>>, c struct<d: map<int,int>>")
    found = [what.partition(" is a ")[0] for what, _ in find_derivation_problems(columns)]
    assert found == ["`a[]`", "`b[]`", "`c.d`"]


def test_options_that_contradict_each_other_are_problems() -> None:
    assert "neither of" in str(Avro().validate("value"))
    assert "both of" in str(Avro('"int"', registry="r").validate("value"))
    assert "found 'Topic'" in str(Avro(registry="r", subject="s", subject_name_strategy="Topic").validate("value"))  # type: ignore[arg-type]
    assert "the record's name is unknown" in str(
        Avro(registry="r", subject_name_strategy="RecordNameStrategy").of_topics(["t"], "value").validate("value")
    )
    assert Avro('"int"').find_encoding_problems("value", ["a"])


def test_a_format_is_a_value_and_cheap_to_construct() -> None:
    one = Avro("{").of_topics(["a"], "key")
    assert one == pickle.loads(pickle.dumps(one)) and hash(one) == hash(Avro("{", topics=("a",), part="key"))


# --- the contract --------------------------------------------------------------------------------------------------------

NESTED = {
    "type": "record",
    "name": "R",
    "fields": [
        {"name": "m", "type": {"type": "map", "values": {"type": "array", "items": ["null", "double"]}}},
        {"name": "r", "type": ["null", {"type": "record", "name": "S", "fields": [{"name": "d", "type": DECIMAL}]}]},
        {"name": "u", "type": ["string", "boolean"]},
    ],
}
FLAT = {**NESTED, "fields": NESTED["fields"][:2]}
SAMPLES = [
    {"m": {}, "r": None, "u": "a"},
    {"m": {"k": [1.5, None], "": []}, "r": {"d": Decimal("-1.5")}, "u": True},
]
CASES = {
    name: Case(
        Avro(json.dumps(schema)),
        tuple(encoded(schema, {f["name"]: s[f["name"]] for f in schema["fields"]}) for s in SAMPLES),  # type: ignore[index]
        (b"", b"\0\1", b"\0\4", b"\xff" * 30),
    )
    for name, schema in {"by reference": NESTED, "fast": FLAT}.items()
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda c: c.__name__.removeprefix("check_"))
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_contract(case: Case, check: Callable[[Case], None]) -> None:
    check(case)
