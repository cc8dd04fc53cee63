"""Values of MariaDB's and MySQL's rows, as Debezium writes them in JSON: from the bytes of the log, and from query results."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from airflow_kafka_spark.sources.cdc.options import DecimalHandling, TimePrecision
from airflow_kafka_spark.sources.cdc.tasks.events import (
    DAY_SECONDS,
    DOUBLE_FORM,
    FLOAT_FORM,
    MICROS,
    POINT_SCHEMA,
    ColumnForm,
    ValueConverter,
    ValueRefused,
    count_days,
    format_base64,
    format_point,
    format_unscaled_integer,
    make_decimal_schema,
    make_enum_schema,
    make_named_schema,
)
from airflow_kafka_spark.sources.mysql_cdc.options import UnsignedHandling, ZeroDateHandling
from airflow_kafka_spark.sources.mysql_cdc.tasks import binlog
from airflow_kafka_spark.sources.mysql_cdc.tasks.binlog import LogColumn
from airflow_kafka_spark.sources.mysql_cdc.tasks.json_binary import format_json_binary

ValueReader = Callable[[bytes, int], "tuple[str, int]"]
"""Reads a value at an index of a row's bytes; returns it as JSON, and the index after it."""

BINARY = 63
"""The number of the collation of bytes."""

UTF8 = ("utf8mb4", "utf8mb3", "utf8")
"""The character sets whose bytes are those of UTF-8."""

CODECS: Mapping[str, str] = {
    "utf8mb4": "utf-8", "utf8mb3": "utf-8", "utf8": "utf-8", "ascii": "ascii", "latin1": "latin1", "ucs2": "utf-16-be",
    "utf16": "utf-16-be", "utf16le": "utf-16-le", "utf32": "utf-32-be", "latin2": "iso8859-2", "latin5": "iso8859-9",
    "koi8r": "koi8-r", "cp850": "cp850",
    "cp852": "cp852", "cp1250": "cp1250", "cp1251": "cp1251",
}  # fmt: skip
"""Character sets, and Python's names of the codecs that give equal texts."""


@dataclass(frozen=True)
class ValueForm:
    """The form of values.

    :param decimals: the form of decimals (``decimal_handling_mode``).
    :param times: the form of dates and times (``time_precision_mode``).
    :param unsigned: the form of BIGINT UNSIGNED (``bigint_unsigned_handling_mode``).
    :param zero_dates: the treatment of dates that are no days (``zero_date_handling_mode``).
    :param charsets: the character set of each collation, by its number.
    :param is_key: True for a column of the key, whose values must not become null.
    """

    decimals: DecimalHandling = "precise"
    times: TimePrecision = "adaptive"
    unsigned: UnsignedHandling = "long"
    zero_dates: ZeroDateHandling = "fail"
    charsets: Mapping[int, str] = field(default_factory=dict, repr=False)
    is_key: bool = False


class ColumnRefused(ValueError):
    """Raised for a column whose values cannot be read."""


@dataclass(frozen=True)
class ReadColumn:
    """The reading of a column's values, and the Connect schema of the result.

    :param read: reads a value of the log.
    :param schema: the Connect schema of its JSON.
    :param of_query: returns a value of a query's result as JSON: texts in the character set of the column.
    :param key: returns a value of the log as :class:`~airflow_kafka_spark.sources.jdbc.mysql.MySqlDialect` writes it; None: rows
        are not cut into chunks by the column.
    :param compared: how the server compares such values, for a column that has ``key``.
    :param form: how whole columns of a query's result become JSON; None if only ``of_query`` knows it.
    :param of_log: returns a value of the log, without its size, as JSON, of a type that a query shows otherwise; None for others.
    """

    read: ValueReader
    schema: Mapping[str, Any]
    of_query: ValueConverter
    key: ValueConverter | None = None
    compared: str = ""
    form: ColumnForm | None = None
    of_log: ValueConverter | None = None


def read_column(column: LogColumn, form: ValueForm) -> ReadColumn:
    """Return the reading of a column's values.

    :raises ColumnRefused: they cannot be read.
    """
    kind = column.kind
    if kind in _INTEGERS:
        return _make_integer_column(column, form)
    if kind == binlog.NEWDECIMAL:
        return _make_decimal_column(column.meta[0], column.meta[1], form)
    if kind in (binlog.DATE, binlog.TIME2, binlog.DATETIME2, binlog.TIMESTAMP2):
        return _make_time_column(column, form)
    if kind in (binlog.VARCHAR, binlog.VAR_STRING, binlog.STRING, binlog.BLOB):
        return _make_characters_column(column, form)
    if kind in (binlog.ENUM, binlog.SET):
        return _make_choice_column(column, form)
    if kind == binlog.BIT:
        return _make_bits_column(column.meta[1] * 8 + column.meta[0])
    simple = {binlog.FLOAT: _FLOAT, binlog.DOUBLE: _DOUBLE, binlog.YEAR: _YEAR}
    if kind in simple:
        return simple[kind]
    if kind in (binlog.GEOMETRY, binlog.JSON, binlog.VECTOR):
        return _make_sized_column(column)
    raise ColumnRefused(_REFUSED.get(kind, f"values of the log's type {kind} cannot be read"))


_REFUSED = {
    7: "it is a TIMESTAMP of the format before release 5.6", 11: "it is a TIME of the format before release 5.6",
    12: "it is a DATETIME of the format before release 5.6", 140: "it is COMPRESSED", 141: "it is COMPRESSED",
}  # fmt: skip


def _make_packed_reader(form: struct.Struct, text: Callable[[Any], str]) -> ValueReader:
    size, unpack = form.size, form.unpack_from

    def read(data: bytes, at: int) -> tuple[str, int]:
        return text(unpack(data, at)[0]), at + size

    return read


# --- numbers ------------------------------------------------------------------------------------------------------------

_INTEGER = ColumnForm("integer")  # ZEROFILL

# Per type: the format of its bytes, signed and unsigned, and Connect's type, signed and unsigned.
_INTEGERS: Mapping[int, tuple[str, str, str, str]] = {
    binlog.TINY: ("<b", "<B", "int16", "int16"),
    binlog.SHORT: ("<h", "<H", "int16", "int32"),
    binlog.INT24: ("", "", "int32", "int32"),
    binlog.LONG: ("<i", "<I", "int32", "int64"),
    binlog.LONGLONG: ("<q", "<Q", "int64", "int64"),
}


def _make_integer_column(column: LogColumn, form: ValueForm) -> ReadColumn:
    signed, unsigned, schema, of_unsigned = _INTEGERS[column.kind]

    def format_key(raw: bytes) -> str:
        return str(int.from_bytes(raw, "little", signed=not column.is_unsigned))

    if column.kind == binlog.INT24:
        is_signed = not column.is_unsigned

        def read_three(data: bytes, at: int) -> tuple[str, int]:
            return str(int.from_bytes(data[at : at + 3], "little", signed=is_signed)), at + 3

        return ReadColumn(read_three, {"type": schema}, lambda raw: str(int(raw)), format_key, "number", _INTEGER)
    text: Callable[[int], str] = str
    column_form, packed = _INTEGER, struct.Struct(unsigned if column.is_unsigned else signed)
    found = {"type": of_unsigned if column.is_unsigned else schema}
    if column.kind == binlog.LONGLONG and column.is_unsigned:
        text = _format_long
        if form.unsigned == "precise":
            text, found, column_form = format_unscaled_integer, make_decimal_schema(0, 20), ColumnForm("decimal")
    return ReadColumn(_make_packed_reader(packed, text), found, lambda raw: text(int(raw)), format_key, "number", column_form)


def _format_long(value: int) -> str:
    if value >= 1 << 63:
        action = 'Set `bigint_unsigned_handling_mode="precise"`'
        raise ValueRefused(f"it is {value}, which 64 bits with a sign cannot hold", action)
    return str(value)


def _format_float(value: float) -> str:
    """Return the shortest text that gives the same number of 32 bits."""
    for digits in range(6, 10):
        text = f"{value:.{digits}g}"
        if struct.unpack("<f", struct.pack("<f", float(text)))[0] == value:
            break
    return repr(float(text))


_FLOAT = ReadColumn(
    _make_packed_reader(struct.Struct("<f"), _format_float),
    {"type": "float"},
    lambda raw: _format_float(float(raw)),
    form=FLOAT_FORM,
)
_DOUBLE = ReadColumn(
    _make_packed_reader(struct.Struct("<d"), repr), {"type": "double"}, lambda raw: repr(float(raw)), form=DOUBLE_FORM
)
_YEAR = ReadColumn(
    _make_packed_reader(struct.Struct("<B"), lambda value: str(1900 + value if value else 0)),
    make_named_schema("int32", "io.debezium.time.Year"),
    lambda raw: str(int(raw)),
    form=_INTEGER,
)

_DIGIT_BYTES = (0, 1, 1, 2, 2, 3, 3, 4, 4, 4)


def list_decimal_groups(precision: int, scale: int) -> list[tuple[int, int]]:
    """Return the bytes and the digits of each group of digits of a DECIMAL, in order."""
    whole_groups, whole_rest = divmod(precision - scale, 9)
    part_groups, part_rest = divmod(scale, 9)
    groups = [(_DIGIT_BYTES[whole_rest], whole_rest), *[(4, 9)] * whole_groups, *[(4, 9)] * part_groups]
    return [*groups, (_DIGIT_BYTES[part_rest], part_rest)]


def _make_decimal_column(precision: int, scale: int, form: ValueForm) -> ReadColumn:
    groups = list_decimal_groups(precision, scale)
    size = sum(count for count, _ in groups)

    def read_unscaled(data: bytes, at: int) -> int:
        raw = bytearray(data[at : at + size])
        is_negative = not raw[0] & 0x80
        raw[0] ^= 0x80
        if is_negative:
            raw = bytearray(byte ^ 0xFF for byte in raw)
        number = at = 0
        for count, digits in groups:
            number = number * 10**digits + int.from_bytes(raw[at : at + count], "big")
            at += count
        return -number if is_negative else number

    def format_decimal(number: int) -> str:
        digits, sign = str(abs(number)).rjust(scale + 1, "0"), "-" if number < 0 else ""
        return f"{sign}{digits[: len(digits) - scale]}.{digits[len(digits) - scale :]}" if scale else f"{sign}{digits}"

    shown: Callable[[int], str] = format_unscaled_integer
    schema = make_decimal_schema(scale, precision)
    column_form: ColumnForm | None = ColumnForm("decimal", scale)
    if form.decimals == "string":
        shown, schema, column_form = (lambda number: f'"{format_decimal(number)}"'), {"type": "string"}, None
    elif form.decimals == "double":
        shown, schema, column_form = (lambda number: repr(float(format_decimal(number)))), {"type": "double"}, DOUBLE_FORM
    return ReadColumn(
        lambda data, at: (shown(read_unscaled(data, at)), at + size),
        schema,
        lambda raw: shown(int(raw.replace(b".", b""))),
        lambda raw: format_decimal(read_unscaled(raw, 0)),
        "number",
        column_form,
    )


def _format_json_decimal(raw: bytes) -> str:
    """Return a DECIMAL within a value of JSON: two bytes of precision and scale, then those of the number."""
    column = _make_decimal_column(raw[0], raw[1], ValueForm(decimals="string"))
    return column.read(raw, 2)[0].strip('"')


def _make_sized_column(column: LogColumn) -> ReadColumn:
    prefix = column.meta[0]
    if column.kind == binlog.GEOMETRY:
        return _make_geometry_column(prefix, is_point=column.geometry == 1)
    return _make_json_column(prefix) if column.kind == binlog.JSON else _make_vector_column(prefix)


def _make_json_column(prefix: int) -> ReadColumn:
    """Return the reading of MySQL's type JSON: the text that the server shows."""

    def format_log(raw: bytes) -> str:
        return encode_basestring(format_json_binary(raw, _format_json_decimal))

    schema, text = make_named_schema("string", "io.debezium.data.Json"), ColumnForm("text")
    read = _make_sized_reader(prefix, format_log)
    return ReadColumn(read, schema, lambda raw: encode_basestring(raw.decode()), form=text, of_log=format_log)


def _make_vector_column(prefix: int) -> ReadColumn:
    """Return the reading of MySQL's type VECTOR: numbers of 32 bits."""

    def format_vector(raw: bytes) -> str:
        return f"[{','.join(_format_float(number) for (number,) in struct.iter_unpack('<f', raw))}]"

    schema = {
        "type": "array",
        "items": {"type": "float", "optional": False},
        "name": "io.debezium.data.FloatVector",
        "version": 1,
    }
    return ReadColumn(_make_sized_reader(prefix, format_vector), schema, format_vector)


def _make_bits_column(length: int) -> ReadColumn:
    size = (length + 7) // 8
    if length == 1:
        return ReadColumn(
            lambda data, at: ("true" if data[at] else "false", at + 1),
            {"type": "boolean"},
            lambda raw: "true" if raw[0] else "false",
        )

    def read(data: bytes, at: int) -> tuple[str, int]:
        return format_base64(data[at : at + size][::-1]), at + size

    schema = make_named_schema("bytes", "io.debezium.data.Bits", length=length)
    return ReadColumn(read, schema, lambda raw: format_base64(raw.rjust(size, b"\0")[::-1]))


# --- texts and bytes ----------------------------------------------------------------------------------------------------


def _make_sized_reader(prefix: int, text: Callable[[bytes], str]) -> ValueReader:
    """Return the reading of values that follow their length.

    :param prefix: bytes of the length.
    """

    def read(data: bytes, at: int) -> tuple[str, int]:
        begin = at + prefix
        end = begin + int.from_bytes(data[at:begin], "little")
        return text(data[begin:end]), end

    return read


def _make_characters_column(column: LogColumn, form: ValueForm) -> ReadColumn:
    prefix = column.meta[0] if column.kind == binlog.BLOB else 1 if column.width < 256 else 2
    width = 0 if column.kind in (binlog.BLOB, binlog.VARCHAR) else column.width
    if column.collation == BINARY:

        def format_binary(raw: bytes) -> str:
            # The log leaves out the zeros at the end of a BINARY.
            return format_base64(raw.ljust(width, b"\0"))

        return ReadColumn(
            _make_sized_reader(prefix, format_binary),
            {"type": "bytes"},
            format_binary,
            lambda raw: raw[prefix:].ljust(width, b"\0").hex(),
            "binary",
        )
    decode = make_decoder(column.collation, form)

    def format_text(raw: bytes) -> str:
        return encode_basestring(decode(raw))

    compared = f"text {form.charsets[column.collation]}"
    return ReadColumn(
        _make_sized_reader(prefix, format_text),
        {"type": "string"},
        format_text,
        lambda raw: raw[prefix:].hex(),
        compared,
        _find_text_form(column.collation, form),
    )


def _find_text_form(collation: int, form: ValueForm) -> ColumnForm | None:
    return ColumnForm("text") if form.charsets.get(collation) in UTF8 else None


def make_decoder(collation: int, form: ValueForm) -> Callable[[bytes], str]:
    """Return the function that decodes texts of a collation.

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

    return _decode_latin1 if charset == "latin1" else decode


_WINDOWS = {byte: bytes([byte]).decode("cp1252", "ignore") or chr(byte) for byte in range(0x80, 0xA0)}


def _decode_latin1(raw: bytes) -> str:
    """Return a text of the servers' latin1: cp1252, in which no byte is undefined."""
    return raw.decode("latin1").translate(_WINDOWS)


def _make_choice_column(column: LogColumn, form: ValueForm) -> ReadColumn:
    """Return the reading of an ENUM (the number of its value) or a SET (a bit for each of its values)."""
    size = column.meta[1]
    decode = (lambda raw: raw.decode("latin1")) if column.collation == BINARY else make_decoder(column.collation, form)
    values = [decode(raw) for raw in column.values]

    def read_member(data: bytes, at: int) -> tuple[str, int]:
        number = int.from_bytes(data[at : at + size], "little")
        return encode_basestring(values[number - 1] if number else ""), at + size

    def read_members(data: bytes, at: int) -> tuple[str, int]:
        bits = int.from_bytes(data[at : at + size], "little")
        return encode_basestring(",".join(value for n, value in enumerate(values) if bits >> n & 1)), at + size

    def format_queried(raw: bytes) -> str:
        return encode_basestring(decode(raw))

    text_form = _find_text_form(column.collation, form)
    if column.kind == binlog.ENUM:
        return ReadColumn(read_member, make_enum_schema("Enum", values), format_queried, form=text_form)
    return ReadColumn(read_members, make_enum_schema("EnumSet", values), format_queried, form=text_form)


def _make_geometry_column(prefix: int, *, is_point: bool) -> ReadColumn:
    struct_of = [{"field": "wkb", "type": "bytes", "optional": False}, {"field": "srid", "type": "int32", "optional": True}]
    name = "io.debezium.data.geometry.Geometry"
    schema = {"type": "struct", "name": name, "version": 1, "doc": "Geometry", "fields": struct_of}

    def format_geometry(raw: bytes) -> str:
        srid = int.from_bytes(raw[:4], "little")
        return f'{{"wkb":{format_base64(raw[4:])},"srid":{srid or "null"}}}'

    def format_point_value(raw: bytes) -> str:
        x, y = struct.unpack_from("<dd", raw, 9)
        return format_point(repr(x), repr(y), raw[4:], int.from_bytes(raw[:4], "little") or None)

    if is_point:
        return ReadColumn(_make_sized_reader(prefix, format_point_value), POINT_SCHEMA, format_point_value)
    return ReadColumn(_make_sized_reader(prefix, format_geometry), schema, format_geometry)


# --- dates and times ----------------------------------------------------------------------------------------------------

FRACTIONS = ((0, 1), (1, 10_000), (1, 10_000), (2, 100), (2, 100), (3, 1), (3, 1))
"""Per precision, the bytes of a fraction, and the microseconds of its unit."""

_MONTH_DAYS = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)


_PARTS_OF_TIME = (slice(0, 4), slice(5, 7), slice(8, 10), slice(11, 13), slice(14, 16), slice(17, 19))
"""The numbers of a date and time as the server shows it, before the fraction."""


def _read_clock_micros(raw: bytes) -> int:
    """Return the microseconds of a TIME as the server shows it."""
    clock, _, part = raw.lstrip(b"-").partition(b".")
    hours, minutes, seconds = clock.split(b":")
    value = (int(hours) * 3600 + int(minutes) * 60 + int(seconds)) * MICROS + int(part.ljust(6, b"0"))
    return -value if raw[:1] == b"-" else value


def _make_time_column(column: LogColumn, form: ValueForm) -> ReadColumn:
    precision = column.meta[0] if column.meta else 0
    if column.kind == binlog.TIME2:
        return _make_clock_column(precision, form)
    if column.kind == binlog.DATE:
        return _make_date_column(form)
    if column.kind == binlog.TIMESTAMP2:
        return _make_timestamp_column(precision, form)
    return _make_datetime_column(precision, form)


def _make_clock_column(precision: int, form: ValueForm) -> ReadColumn:
    fraction, unit = FRACTIONS[precision]
    connect = form.times == "connect"
    micros, size, divisor = _make_duration_reader(fraction, unit), 3 + fraction, 1000 if connect else 1
    kind, name = ("int32", "org.apache.kafka.connect.data.Time") if connect else ("int64", "io.debezium.time.MicroTime")
    return ReadColumn(
        lambda data, at: (str(micros(data, at) // divisor), at + size),
        make_named_schema(kind, name),
        lambda raw: str(_read_clock_micros(raw) // divisor),
        form=ColumnForm("clock", divisor),
    )


def _make_date_column(form: ValueForm) -> ReadColumn:
    name = "org.apache.kafka.connect.data.Date" if form.times == "connect" else "io.debezium.time.Date"

    def format_days(year: int, month: int, day: int) -> str:
        days = _count_days(year, month, day, form)
        return "null" if days is None else str(days)

    return ReadColumn(
        lambda data, at: (format_days(*_read_date_parts(data, at)), at + 3),
        make_named_schema("int32", name),
        lambda raw: format_days(int(raw[:4]), int(raw[5:7]), int(raw[8:])),
        lambda raw: "{:04}-{:02}-{:02}".format(*_read_date_parts(raw, 0)),
        "date",
        ColumnForm("days"),
    )


def _make_datetime_column(precision: int, form: ValueForm) -> ReadColumn:
    fraction, unit = FRACTIONS[precision]
    connect = form.times == "connect"
    millis = connect or precision <= 3
    name = "org.apache.kafka.connect.data.Timestamp" if connect else "io.debezium.time.Timestamp"

    def read_parts(data: bytes, at: int) -> tuple[list[int], int]:
        packed = int.from_bytes(data[at : at + 5], "big") - 0x8000000000
        part = int.from_bytes(data[at + 5 : at + 5 + fraction], "big") * unit
        year, month = divmod(packed >> 22, 13)
        return [year, month, packed >> 17 & 31, packed >> 12 & 31, packed >> 6 & 63, packed & 63], part

    def format_instant(numbers: list[int], part: int) -> str:
        year, month, day, hours, minutes, seconds = numbers
        days = _count_days(year, month, day, form)
        if days is None:
            return "null"
        value = (days * DAY_SECONDS + hours * 3600 + minutes * 60 + seconds) * MICROS + part
        return str(value // 1000 if millis else value)

    def format_key(raw: bytes) -> str:
        numbers, part = read_parts(raw, 0)
        return "{:04}-{:02}-{:02} {:02}:{:02}:{:02}.{:06}".format(*numbers, part)

    return ReadColumn(
        lambda data, at: (format_instant(*read_parts(data, at)), at + 5 + fraction),
        make_named_schema("int64", name if millis else "io.debezium.time.MicroTimestamp"),
        lambda raw: format_instant([int(raw[part]) for part in _PARTS_OF_TIME], int(raw[20:].ljust(6, b"0"))),
        format_key,
        "datetime",
        ColumnForm("instant", 1000 if millis else 1),
    )


def _make_duration_reader(fraction: int, unit: int) -> Callable[[bytes, int], int]:
    """Return the reading of the microseconds of a TIME, which may be negative."""
    size, bits = 3 + fraction, 8 * fraction

    def read_micros(data: bytes, at: int) -> int:
        packed = int.from_bytes(data[at : at + size], "big") - (0x800000 << bits)
        sign, packed = (-1, -packed) if packed < 0 else (1, packed)
        clock, part = packed >> bits, packed & (1 << bits) - 1
        seconds = (clock >> 12 & 0x3FF) * 3600 + (clock >> 6 & 63) * 60 + (clock & 63)
        return sign * (seconds * MICROS + part * unit)

    return read_micros


def _count_days(year: int, month: int, day: int, form: ValueForm) -> int | None:
    """Return the number of a day; None for an invalid date, such as 0000-00-00."""
    is_day = 1 <= month <= 12 and 1 <= day <= _MONTH_DAYS[month - 1]
    if is_day and month == 2 and day == 29:
        is_day = year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    if is_day:
        return count_days(year, month, day)
    found = f"{year:04}-{month:02}-{day:02} is no day"
    if form.zero_dates == "null":
        if not form.is_key:
            return None
        action = "Name other columns in `message_key_columns`, or leave the table out"
        raise ValueRefused(f"{found}, and it belongs to the key: as null, two keys would become one", action)
    raise ValueRefused(found, 'Set `zero_date_handling_mode="null"`, which writes null for it')


def _read_date_parts(data: bytes, at: int) -> tuple[int, int, int]:
    """Return year, month and day of a DATE."""
    packed = int.from_bytes(data[at : at + 3], "little")
    return packed >> 9, packed >> 5 & 15, packed & 31


def _make_timestamp_column(precision: int, form: ValueForm) -> ReadColumn:
    fraction, unit = FRACTIONS[precision]

    def format_utc(raw: bytes) -> str:
        """Return a time as text, in UTC; "" for the zero date."""
        seconds = int.from_bytes(raw[:4], "big")
        part = int.from_bytes(raw[4:], "big") * unit
        return _format_instant(seconds, part, precision) if seconds or part else ""

    def quote(text: str) -> str:
        return f'"{text}"' if text else ("null" if _count_days(0, 0, 0, form) is None else "")

    def format_queried(raw: bytes) -> str:
        text = raw.decode()
        return quote("" if text.startswith("0000-") else f"{text.replace(' ', 'T')}Z")

    def format_key(raw: bytes) -> str:
        return format_utc(raw).replace("T", " ").rstrip("Z") or "0000-00-00 00:00:00"

    schema = make_named_schema("string", "io.debezium.time.ZonedTimestamp")
    size = 4 + fraction
    read: ValueReader = lambda data, at: (quote(format_utc(data[at : at + size])), at + size)  # noqa: E731
    return ReadColumn(read, schema, format_queried, format_key, "timestamp", ColumnForm("utc", precision))


def _format_instant(seconds: int, micros: int, precision: int) -> str:
    from datetime import datetime, timedelta

    text = (datetime(1970, 1, 1) + timedelta(seconds=seconds)).isoformat()
    return f"{text}.{micros:06}"[: len(text) + 1 + precision].rstrip(".") + "Z"


# --- statements ---------------------------------------------------------------------------------------------------------

_NAME = r'(?:`((?:[^`]|``)+)`|"((?:[^"]|"")+)"|([^\s`".;/]+))'
_PREFIX = re.compile(
    r"\s+|/\*.*?\*/|--[^\n]*\n|#[^\n]*\n|SET\s+STATEMENT\s.*?\sFOR\s|ANALYZE\s+(?:FORMAT\s*=\s*\S+\s+)?(?!.*\bTABLE\b)",
    re.DOTALL | re.IGNORECASE,
)
_TABLE = rf"{_NAME}(?:\s*\.\s*{_NAME})?"
_TRUNCATE = re.compile(rf"TRUNCATE\s+(?:TABLE\s+)?{_TABLE}", re.IGNORECASE)
_DEFINES = re.compile(
    rf"(?:CREATE(?:\s+OR\s+REPLACE)?|ALTER(?:\s+ONLINE)?(?:\s+IGNORE)?)\s+TABLE\s+(?:IF\s+(?:NOT\s+)?EXISTS\s+)?{_TABLE}",
    re.IGNORECASE,
)


def remove_prefixes(text: str) -> str:
    """Return a statement without spaces, comments, and the settings for its duration (``SET STATEMENT``) at its beginning."""
    while found := _PREFIX.match(text):
        text = text[found.end() :]
    return text


def parse_truncate(text: str, database: str) -> tuple[str, str] | None:
    """Return database and name of the table that a statement truncates; None if it is no such statement.

    :param database: the default database.
    """
    return _parse_table(_TRUNCATE, text, database)


def parse_defined_table(text: str, database: str) -> tuple[str, str] | None:
    """Return database and name of the table that a statement creates or alters; None if it is no such statement.

    :param database: the default database.
    """
    return _parse_table(_DEFINES, text, database)


def _parse_table(statement: re.Pattern[str], text: str, database: str) -> tuple[str, str] | None:
    found = statement.match(remove_prefixes(text))
    if found is None:
        return None
    names = _get_names(found, 1)
    return (names[0], names[1]) if names[1] else (database, names[0])


_SAVEPOINT = re.compile(rf"(SAVEPOINT|ROLLBACK\s+(?:WORK\s+)?TO(?:\s+SAVEPOINT)?)\s+{_NAME}", re.IGNORECASE)


def parse_savepoint(text: str) -> tuple[bool, str] | None:
    """Return True and the name of the savepoint to which a statement rolls back, False and the name if it sets one; None for
    other statements.
    """
    found = _SAVEPOINT.match(remove_prefixes(text))
    if found is None:
        return None
    return found[1].upper().startswith("ROLLBACK"), _get_names(found, 2)[0].casefold()


def _get_names(found: re.Match[str], first: int) -> list[str]:
    """Return the names in a match of :data:`_NAME`, from a group on."""
    parts = found.groups()[first - 1 :]
    return [
        (ticked.replace("``", "`") if ticked else quoted.replace('""', '"') if quoted else plain or "")
        for ticked, quoted, plain in (parts[at : at + 3] for at in range(0, len(parts), 3))
    ]
