"""Values of MariaDB's and MySQL's rows, read from the bytes of the log, as Debezium writes them in JSON."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any, Literal

from airflow_kafka_spark.sources.cdc.options import DecimalHandling, TimePrecision
from airflow_kafka_spark.sources.cdc.tasks.values import (
    DAY_SECONDS,
    MICROS,
    POINT_SCHEMA,
    ValueRefused,
    base64_json,
    day_number,
    decimal_schema,
    enum_schema,
    named,
    point_json,
    unscaled_integer_json,
)
from airflow_kafka_spark.sources.mysql_cdc.tasks import binlog
from airflow_kafka_spark.sources.mysql_cdc.tasks.binlog import LogColumn

UnsignedHandling = Literal["long", "precise"]
ZeroDates = Literal["fail", "null"]

Read = Callable[[bytes, int], "tuple[str, int]"]
"""Reads a value at a place of the bytes of a row; returns it as JSON, and the place behind it."""

_BINARY = 63

CODECS: Mapping[str, str] = {
    "utf8mb4": "utf-8", "utf8mb3": "utf-8", "utf8": "utf-8", "ascii": "ascii", "latin1": "latin1", "ucs2": "utf-16-be",
    "utf16": "utf-16-be", "utf16le": "utf-16-le", "utf32": "utf-32-be", "latin2": "iso8859-2", "latin5": "iso8859-9",
    "koi8r": "koi8-r", "cp850": "cp850",
    "cp852": "cp852", "cp1250": "cp1250", "cp1251": "cp1251",
}  # fmt: skip
"""Character sets, and Python's names of the codecs that give equal texts."""


@dataclass(frozen=True)
class ValueForm:
    """The form of values; options have Debezium's names.

    :param charsets: the character set of each collation, by its number.
    """

    decimals: DecimalHandling = "precise"
    times: TimePrecision = "adaptive"
    unsigned: UnsignedHandling = "long"
    zero_dates: ZeroDates = "fail"
    charsets: Mapping[int, str] = field(default_factory=dict, repr=False)


class ColumnRefused(ValueError):
    """Raised for a column whose values cannot be read."""


@dataclass(frozen=True)
class ReadColumn:
    """How a column's values are read, and the Connect schema of what comes out."""

    read: Read
    schema: Mapping[str, Any]


def read_column(column: LogColumn, form: ValueForm) -> ReadColumn:
    """Return how a column's values are read.

    :raises ColumnRefused: they cannot be read.
    """
    kind = column.kind
    if kind in _INTEGERS:
        return _integer(column, form)
    if kind == binlog.NEWDECIMAL:
        return _decimal(column.meta[0], column.meta[1], form)
    if kind in (binlog.DATE, binlog.TIME2, binlog.DATETIME2, binlog.TIMESTAMP2):
        return _time(column, form)
    if kind in (binlog.VARCHAR, binlog.VAR_STRING, binlog.STRING, binlog.BLOB):
        return _characters(column, form)
    if kind in (binlog.ENUM, binlog.SET):
        return _chosen(column, form)
    if kind == binlog.BIT:
        return _bits(column.meta[1] * 8 + column.meta[0])
    simple = {binlog.FLOAT: _FLOAT, binlog.DOUBLE: _DOUBLE, binlog.YEAR: _YEAR}
    if kind in simple:
        return simple[kind]
    if kind == binlog.GEOMETRY:
        return _geometry(column.meta[0], is_point=column.geometry == 1)
    raise ColumnRefused(_REFUSED.get(kind, f"values of the log's type {kind} cannot be read"))


_REFUSED = {
    7: "it is a TIMESTAMP of the format before release 5.6", 11: "it is a TIME of the format before release 5.6",
    12: "it is a DATETIME of the format before release 5.6", 140: "it is COMPRESSED", 141: "it is COMPRESSED",
    binlog.JSON: "values of MySQL's type JSON cannot be read",
}  # fmt: skip


def _packed(form: struct.Struct, text: Callable[[Any], str]) -> Read:
    size, unpack = form.size, form.unpack_from

    def read(data: bytes, at: int) -> tuple[str, int]:
        return text(unpack(data, at)[0]), at + size

    return read


# --- numbers ------------------------------------------------------------------------------------------------------------

# Per type: the format of its bytes, signed and unsigned, and Connect's type, signed and unsigned.
_INTEGERS: Mapping[int, tuple[str, str, str, str]] = {
    binlog.TINY: ("<b", "<B", "int16", "int16"),
    binlog.SHORT: ("<h", "<H", "int16", "int32"),
    binlog.INT24: ("", "", "int32", "int32"),
    binlog.LONG: ("<i", "<I", "int32", "int64"),
    binlog.LONGLONG: ("<q", "<Q", "int64", "int64"),
}


def _integer(column: LogColumn, form: ValueForm) -> ReadColumn:
    signed, unsigned, schema, of_unsigned = _INTEGERS[column.kind]
    if column.kind == binlog.INT24:
        is_signed = not column.is_unsigned

        def read_three(data: bytes, at: int) -> tuple[str, int]:
            return str(int.from_bytes(data[at : at + 3], "little", signed=is_signed)), at + 3

        return ReadColumn(read_three, {"type": schema})
    if column.kind == binlog.LONGLONG and column.is_unsigned:
        packed = struct.Struct(unsigned)
        if form.unsigned == "precise":
            return ReadColumn(_packed(packed, unscaled_integer_json), decimal_schema(0, 20))
        return ReadColumn(_packed(packed, _long), {"type": "int64"})
    return ReadColumn(
        _packed(struct.Struct(unsigned if column.is_unsigned else signed), str),
        {"type": of_unsigned if column.is_unsigned else schema},
    )


def _long(value: int) -> str:
    if value >= 1 << 63:
        action = 'Set `bigint_unsigned_handling_mode="precise"`'
        raise ValueRefused(f"it is {value}, which 64 bits with a sign cannot hold", action)
    return str(value)


def _float_text(value: float) -> str:
    """Return the shortest text that gives the same number of 32 bits."""
    for digits in range(6, 10):
        text = f"{value:.{digits}g}"
        if struct.unpack("<f", struct.pack("<f", float(text)))[0] == value:
            break
    return repr(float(text))


_FLOAT = ReadColumn(_packed(struct.Struct("<f"), _float_text), {"type": "float"})
_DOUBLE = ReadColumn(_packed(struct.Struct("<d"), repr), {"type": "double"})
_YEAR = ReadColumn(
    _packed(struct.Struct("<B"), lambda value: str(1900 + value if value else 0)), named("int32", "io.debezium.time.Year")
)

_DIGIT_BYTES = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)


def _decimal(precision: int, scale: int, form: ValueForm) -> ReadColumn:
    whole_groups, whole_rest = divmod(precision - scale, 9)
    part_groups, part_rest = divmod(scale, 9)
    # Bytes and digits of each group, in order.
    groups = [(_DIGIT_BYTES[whole_rest], whole_rest), *[(4, 9)] * whole_groups, *[(4, 9)] * part_groups]
    groups.append((_DIGIT_BYTES[part_rest], part_rest))
    size = sum(count for count, _ in groups)

    def unscaled(data: bytes, at: int) -> int:
        raw = bytearray(data[at : at + size])
        is_negative = not raw[0] & 0x80
        raw[0] ^= 0x80
        if is_negative:
            raw = bytearray(byte ^ 0xFF for byte in raw)
        number = place = 0
        for count, digits in groups:
            number = number * 10**digits + int.from_bytes(raw[place : place + count], "big")
            place += count
        return -number if is_negative else number

    def text(data: bytes, at: int) -> str:
        number = unscaled(data, at)
        digits, sign = str(abs(number)).rjust(scale + 1, "0"), "-" if number < 0 else ""
        return f"{sign}{digits[: len(digits) - scale]}.{digits[len(digits) - scale :]}" if scale else f"{sign}{digits}"

    if form.decimals == "string":
        return ReadColumn(lambda data, at: (f'"{text(data, at)}"', at + size), {"type": "string"})
    if form.decimals == "double":
        return ReadColumn(lambda data, at: (repr(float(text(data, at))), at + size), {"type": "double"})
    return ReadColumn(lambda data, at: (unscaled_integer_json(unscaled(data, at)), at + size), decimal_schema(scale, precision))


def _bits(length: int) -> ReadColumn:
    size = (length + 7) // 8
    if length == 1:
        return ReadColumn(lambda data, at: ("true" if data[at] else "false", at + 1), {"type": "boolean"})

    def read(data: bytes, at: int) -> tuple[str, int]:
        return base64_json(data[at : at + size][::-1]), at + size

    return ReadColumn(read, named("bytes", "io.debezium.data.Bits", length=length))


# --- texts and bytes ----------------------------------------------------------------------------------------------------


def _sized(prefix: int, text: Callable[[bytes], str]) -> Read:
    """Return how values with their length before them are read.

    :param prefix: bytes of the length.
    """

    def read(data: bytes, at: int) -> tuple[str, int]:
        begin = at + prefix
        end = begin + int.from_bytes(data[at:begin], "little")
        return text(data[begin:end]), end

    return read


def _characters(column: LogColumn, form: ValueForm) -> ReadColumn:
    width = 0
    if column.kind == binlog.BLOB:
        prefix = column.meta[0]
    elif column.kind == binlog.VARCHAR:
        prefix = 1 if int.from_bytes(column.meta, "little") < 256 else 2
    else:
        high, low = column.meta
        width = low if high & 0x30 == 0x30 else low | (high & 0x30 ^ 0x30) << 4
        prefix = 1 if width < 256 else 2
    if column.collation == _BINARY:
        # The log leaves out the zeros at the end of a BINARY.
        return ReadColumn(_sized(prefix, lambda raw: base64_json(raw.ljust(width, b"\0"))), {"type": "bytes"})
    decode = decoder(column.collation, form)
    return ReadColumn(_sized(prefix, lambda raw: encode_basestring(decode(raw))), {"type": "string"})


def decoder(collation: int, form: ValueForm) -> Callable[[bytes], str]:
    """Return how texts of a collation are decoded.

    :raises ColumnRefused: its character set is not known.
    """
    charset = form.charsets.get(collation, f"of collation {collation}")
    codec = CODECS.get(charset)
    if codec is None:
        raise ColumnRefused(f"texts of the character set {charset} cannot be read")

    def decode(raw: bytes) -> str:
        try:
            return raw.decode(codec)
        except UnicodeDecodeError as error:
            raise ValueRefused(f"it is no text in {charset}: {error.reason}") from None

    return _latin1 if charset == "latin1" else decode


_WINDOWS = {byte: bytes([byte]).decode("cp1252", "ignore") or chr(byte) for byte in range(0x80, 0xA0)}


def _latin1(raw: bytes) -> str:
    """Return a text of the servers' latin1: cp1252, in which no byte is undefined."""
    return raw.decode("latin1").translate(_WINDOWS)


def _chosen(column: LogColumn, form: ValueForm) -> ReadColumn:
    """Return how an ENUM (the number of its value) or a SET (a bit for each of its values) is read."""
    size = column.meta[1]
    if column.collation == _BINARY:
        values = [raw.decode("latin1") for raw in column.values]
    else:
        decode = decoder(column.collation, form)
        values = [decode(raw) for raw in column.values]

    def member(data: bytes, at: int) -> tuple[str, int]:
        number = int.from_bytes(data[at : at + size], "little")
        return encode_basestring(values[number - 1] if number else ""), at + size

    def members(data: bytes, at: int) -> tuple[str, int]:
        bits = int.from_bytes(data[at : at + size], "little")
        return encode_basestring(",".join(value for n, value in enumerate(values) if bits >> n & 1)), at + size

    if column.kind == binlog.ENUM:
        return ReadColumn(member, enum_schema("Enum", values))
    return ReadColumn(members, enum_schema("EnumSet", values))


def _geometry(prefix: int, *, is_point: bool) -> ReadColumn:
    struct_of = [{"field": "wkb", "type": "bytes", "optional": False}, {"field": "srid", "type": "int32", "optional": True}]
    name = "io.debezium.data.geometry.Geometry"
    schema = {"type": "struct", "name": name, "version": 1, "doc": "Geometry", "fields": struct_of}

    def text(raw: bytes) -> str:
        srid = int.from_bytes(raw[:4], "little")
        return f'{{"wkb":{base64_json(raw[4:])},"srid":{srid or "null"}}}'

    def point(raw: bytes) -> str:
        x, y = struct.unpack_from("<dd", raw, 9)
        return point_json(repr(x), repr(y), raw[4:], int.from_bytes(raw[:4], "little") or None)

    if is_point:
        return ReadColumn(_sized(prefix, point), POINT_SCHEMA)
    return ReadColumn(_sized(prefix, text), schema)


# --- dates and times ----------------------------------------------------------------------------------------------------

_FRACTIONS = ((0, 1), (1, 10_000), (1, 10_000), (2, 100), (2, 100), (3, 1), (3, 1))
"""Per precision, the bytes of a fraction, and the microseconds of its unit."""

_MONTH_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


def _time(column: LogColumn, form: ValueForm) -> ReadColumn:
    precision = column.meta[0] if column.meta else 0
    fraction, unit = _FRACTIONS[precision]
    connect = form.times == "connect"
    if column.kind == binlog.TIME2:
        micros, size = _duration(fraction, unit), 3 + fraction
        if connect:
            schema = named("int32", "org.apache.kafka.connect.data.Time")
            return ReadColumn(lambda data, at: (str(micros(data, at) // 1000), at + size), schema)
        return ReadColumn(lambda data, at: (str(micros(data, at)), at + size), named("int64", "io.debezium.time.MicroTime"))
    if column.kind == binlog.DATE:
        name = "org.apache.kafka.connect.data.Date" if connect else "io.debezium.time.Date"
        return ReadColumn(lambda data, at: (_date(data, at, form.zero_dates), at + 3), named("int32", name))
    if column.kind == binlog.TIMESTAMP2:
        return _timestamp(precision, form)
    millis = connect or precision <= 3
    name = "org.apache.kafka.connect.data.Timestamp" if connect else "io.debezium.time.Timestamp"

    def local(data: bytes, at: int) -> tuple[str, int]:
        packed = int.from_bytes(data[at : at + 5], "big") - 0x8000000000
        part = int.from_bytes(data[at + 5 : at + 5 + fraction], "big") * unit
        months, day = packed >> 22, packed >> 17 & 31
        year, month = divmod(months, 13)
        clock = (packed >> 12 & 31) * 3600 + (packed >> 6 & 63) * 60 + (packed & 63)
        days = _day(year, month, day, form.zero_dates)
        at += 5 + fraction
        if days is None:
            return "null", at
        value = (days * DAY_SECONDS + clock) * MICROS + part
        return str(value // 1000 if millis else value), at

    return ReadColumn(local, named("int64", name if millis else "io.debezium.time.MicroTimestamp"))


def _duration(fraction: int, unit: int) -> Callable[[bytes, int], int]:
    """Return how the microseconds of a TIME are read, which may be negative."""
    size, bits = 3 + fraction, 8 * fraction

    def micros(data: bytes, at: int) -> int:
        packed = int.from_bytes(data[at : at + size], "big") - (0x800000 << bits)
        sign, packed = (-1, -packed) if packed < 0 else (1, packed)
        clock, part = packed >> bits, packed & (1 << bits) - 1
        seconds = (clock >> 12 & 0x3FF) * 3600 + (clock >> 6 & 63) * 60 + (clock & 63)
        return sign * (seconds * MICROS + part * unit)

    return micros


def _day(year: int, month: int, day: int, zero_dates: ZeroDates) -> int | None:
    """Return the number of a day; None for a date that is none, as 0000-00-00."""
    is_day = 1 <= month <= 12 and 1 <= day <= _MONTH_DAYS[month - 1]
    if is_day and month == 2 and day == 29:
        is_day = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    if is_day:
        return day_number(year, month, day)
    if zero_dates == "null":
        return None
    action = 'Set `zero_date_handling_mode="null"`, which writes null for it'
    raise ValueRefused(f"{year:04}-{month:02}-{day:02} is no day", action)


def _date(data: bytes, at: int, zero_dates: ZeroDates) -> str:
    packed = int.from_bytes(data[at : at + 3], "little")
    days = _day(packed >> 9, packed >> 5 & 15, packed & 31, zero_dates)
    return "null" if days is None else str(days)


def _timestamp(precision: int, form: ValueForm) -> ReadColumn:
    fraction, unit = _FRACTIONS[precision]

    def read(data: bytes, at: int) -> tuple[str, int]:
        seconds = int.from_bytes(data[at : at + 4], "big")
        part = int.from_bytes(data[at + 4 : at + 4 + fraction], "big") * unit
        at += 4 + fraction
        if seconds == 0 and part == 0:
            return ("null" if _day(0, 0, 0, form.zero_dates) is None else ""), at
        return f'"{_instant(seconds, part, precision)}"', at

    return ReadColumn(read, named("string", "io.debezium.time.ZonedTimestamp"))


def _instant(seconds: int, micros: int, precision: int) -> str:
    from datetime import datetime, timedelta

    text = (datetime(1970, 1, 1) + timedelta(seconds=seconds)).isoformat()
    return f"{text}.{micros:06}"[: len(text) + 1 + precision].rstrip(".") + "Z"


# --- statements ---------------------------------------------------------------------------------------------------------

_NAME = r'(?:`((?:[^`]|``)+)`|"((?:[^"]|"")+)"|([^\s`".;/]+))'
_COMMENT = re.compile(r"\s+|/\*.*?\*/|--[^\n]*\n|#[^\n]*\n", re.DOTALL)
_TRUNCATE = re.compile(rf"TRUNCATE\s+(?:TABLE\s+)?{_NAME}(?:\s*\.\s*{_NAME})?", re.IGNORECASE)


def without_comments(text: str) -> str:
    """Return a statement without the spaces and comments at its beginning."""
    while found := _COMMENT.match(text):
        text = text[found.end() :]
    return text


def truncated_table(text: str, database: str) -> tuple[str, str] | None:
    """Return database and name of the table that a statement truncates; None if it is no such statement.

    :param database: the default database.
    """
    found = _TRUNCATE.match(without_comments(text))
    if found is None:
        return None
    parts = found.groups()
    names = [
        (ticked.replace("``", "`") if ticked else quoted.replace('""', '"') if quoted else plain or "")
        for ticked, quoted, plain in (parts[:3], parts[3:])
    ]
    return (names[0], names[1]) if names[1] else (database, names[0])
