"""Values of PostgreSQL as Debezium writes them in JSON.

A converter takes the text that PostgreSQL writes (``DateStyle`` ISO, ``IntervalStyle`` iso_8601, UTC) and returns a piece of
JSON. A Connect schema goes with each.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from functools import partial
from json.encoder import encode_basestring
from math import isfinite, isnan
from typing import Any

from airflow_kafka_spark.sources.cdc.options import DecimalHandling, TimePrecision
from airflow_kafka_spark.sources.cdc.tasks.events import (
    DAY_SECONDS,
    DOUBLE_FORM,
    MICROS,
    POINT_SCHEMA,
    ColumnForm,
    ValueConverter,
    ValueRefused,
    count_days,
    format_base64,
    format_point,
    format_unscaled,
    format_unscaled_integer,
    make_decimal_schema,
    make_enum_schema,
    make_named_schema,
)

_US = MICROS
_DAY_US = DAY_SECONDS * _US
_MONTH_US = round(365.25 / 12 * _DAY_US)
_LONG = 2**63
INFINITY, MINUS_INFINITY = 9_223_372_036_825_200_000, -9_223_372_036_832_400_000
"""Debezium's numbers for infinite timestamps."""


@dataclass(frozen=True)
class UserType:
    """A type that is not built in.

    :param kind: ``typtype`` of the catalog.
    :param base: of a domain, the OID of its base type.
    :param modifier: of a domain, the modifier of its base type.
    :param element: of an array, the OID of its elements' type.
    :param labels: of an enumeration, its values.
    """

    kind: str
    base: int = 0
    modifier: int = -1
    element: int = 0
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Converted:
    """A converter and the Connect schema of what it writes.

    :param form: how whole columns are converted; None if only single values are.
    """

    convert: ValueConverter
    schema: Mapping[str, Any]
    form: ColumnForm | None = None


@dataclass(frozen=True)
class ValueTypes:
    """The converters of types.

    :param decimals: Debezium's ``decimal.handling.mode``.
    :param times: Debezium's ``time.precision.mode``.
    :param user_types: types that are not built in, by OID.
    :param money_digits: number of decimal places of `money`, which depends on the locale of the server.
    """

    decimals: DecimalHandling = "precise"
    times: TimePrecision = "adaptive"
    user_types: Mapping[int, UserType] = field(default_factory=dict)
    money_digits: int = 2

    def find_converter(self, oid: int, modifier: int) -> Converted:
        """Return the converter of a type. Types without one of their own are written as PostgreSQL's text."""
        found = self.user_types.get(oid)
        if found is not None and found.kind == "d":
            return self.find_converter(found.base, found.modifier)
        if found is not None and found.kind == "e":
            return Converted(_convert_text, make_enum_schema("Enum", found.labels), _TEXT)
        element = found.element if found is not None else _ARRAYS.get(oid, 0)
        if element:
            return _make_array_conversion(self.find_converter(element, modifier))
        if oid in _SIMPLE:
            return _SIMPLE[oid]
        if oid in (1700, 790):
            return self._make_decimal(oid, modifier)
        if oid in (1082, 1083, 1114, 1184):
            return self._make_time(oid, modifier)
        if oid in (1560, 1562):
            length = modifier if oid == 1560 or modifier > 0 else 2**31 - 1
            bits = Converted(_convert_bits, make_named_schema("bytes", "io.debezium.data.Bits", length=length))
            return _BIT if length == 1 and oid == 1560 else bits
        return _STRING

    def _make_decimal(self, oid: int, modifier: int) -> Converted:
        parse = partial(_convert_money, digits=self.money_digits) if oid == 790 else _convert_plain
        if self.decimals == "string":
            form = ColumnForm("quoted") if oid == 1700 else None
            return Converted(lambda raw: encode_basestring(parse(raw)), {"type": "string"}, form)
        if self.decimals == "double":
            form = DOUBLE_FORM if oid == 1700 else None
            return Converted(lambda raw: _convert_double(parse(raw).encode()), {"type": "double"}, form)
        if oid == 1700 and modifier < 4:
            form = ColumnForm("variable decimal")
            return Converted(lambda raw: _convert_variable_scale(parse(raw)), _VARIABLE_SCALE, form)
        scale = 2 if oid == 790 else ((modifier - 4) & 0x7FF ^ 1024) - 1024
        precision = (modifier - 4) >> 16 & 0xFFFF if oid == 1700 else None
        form = ColumnForm("decimal", scale) if oid == 1700 and scale >= 0 else None
        return Converted(lambda raw: _convert_unscaled(parse(raw), scale), make_decimal_schema(scale, precision), form)

    def _make_time(self, oid: int, modifier: int) -> Converted:
        if oid == 1184:
            schema = make_named_schema("string", "io.debezium.time.ZonedTimestamp")
            digits = modifier if modifier >= 0 else 6
            return Converted(lambda raw: _convert_zoned(raw, digits), schema, ColumnForm("zoned", digits))
        connect = self.times == "connect"
        if oid == 1082:
            name = "org.apache.kafka.connect.data.Date" if connect else "io.debezium.time.Date"
            return Converted(_convert_days, make_named_schema("int32", name), ColumnForm("days"))
        millis = connect or 0 <= modifier <= 3
        if oid == 1083:
            name = "org.apache.kafka.connect.data.Time" if connect else "io.debezium.time.Time"
            micros = make_named_schema("int64", "io.debezium.time.MicroTime")
            if millis and self.times != "adaptive_time_microseconds":
                return Converted(_convert_time_to_millis, make_named_schema("int32", name), ColumnForm("clock", 1000))
            return Converted(_convert_time_to_micros, micros, ColumnForm("clock", 1))
        name = "org.apache.kafka.connect.data.Timestamp" if connect else "io.debezium.time.Timestamp"
        micros = make_named_schema("int64", "io.debezium.time.MicroTimestamp")
        if millis:
            return Converted(_convert_millis, make_named_schema("int64", name), ColumnForm("instant", 1000))
        return Converted(_convert_micros, micros, ColumnForm("instant", 1))


# --- texts and numbers --------------------------------------------------------------------------------------------------


def _convert_number(raw: bytes) -> str:
    return raw.decode()


def _convert_boolean(raw: bytes) -> str:
    return "true" if raw == b"t" else "false"


def _convert_text(raw: bytes) -> str:
    return encode_basestring(raw.decode())


def _convert_double(raw: bytes) -> str:
    number = float(raw)
    return repr(number) if isfinite(number) else '"NaN"' if isnan(number) else '"Infinity"' if number > 0 else '"-Infinity"'


def _convert_bytes(raw: bytes) -> str:
    return format_base64(bytes.fromhex(raw[2:].decode()))


def _convert_bit(raw: bytes) -> str:
    return "true" if raw == b"1" else "false"


def _convert_bits(raw: bytes) -> str:
    length = (len(raw) + 7) // 8
    return format_base64(int(raw or b"0", 2).to_bytes(length, "little").rstrip(b"\0"))


def _convert_plain(raw: bytes) -> str:
    return raw.decode()


def _convert_money(raw: bytes, digits: int) -> str:
    """Return the number of a `money`. Locales have different points: `$1,234.50`, `1.234,50 €`."""
    text = raw.decode()
    number = Decimal(int(re.sub(r"\D", "", text))).scaleb(-digits)
    return f"-{number:f}" if "-" in text or text.startswith("(") else f"{number:f}"


def _parse_exact(text: str) -> Decimal:
    try:
        value = Decimal(text)
    except InvalidOperation:
        value = Decimal("NaN")
    if not value.is_finite():
        action = 'Set `decimal_handling_mode="string"`'
        raise ValueRefused(f"it is {text}, which an exact decimal cannot hold", action)
    return value


def _convert_unscaled(text: str, scale: int) -> str:
    _, _, part = text.partition(".")
    if len(part) == scale:
        with suppress(ValueError):  # NaN and infinities are no whole numbers
            return format_unscaled_integer(int(text.replace(".", "")))
    return format_unscaled(_parse_exact(text), scale)


def _convert_variable_scale(text: str) -> str:
    _, _, exponent = _parse_exact(text).as_tuple()
    assert isinstance(exponent, int)
    scale = max(0, -exponent)
    return f'{{"scale":{scale},"value":{_convert_unscaled(text, scale)}}}'


# --- dates and times ----------------------------------------------------------------------------------------------------

_DATE = re.compile(r"(\d{4,})-(\d\d)-(\d\d)(?: (\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?)?([+-]\d\d(?::\d\d)*)?( BC)?")
_CLOCK = re.compile(r"(\d\d):(\d\d):(\d\d)(?:\.(\d{1,6}))?([+-]\d\d(?::\d\d)*)?")
_INTERVAL = re.compile(r"P(?:(-?\d+)Y)?(?:(-?\d+)M)?(?:(-?\d+)D)?(?:T(?:(-?\d+)H)?(?:(-?\d+)M)?(?:(-?)(\d+)(?:\.(\d{1,6}))?S)?)?")


def _match(pattern: re.Pattern[str], raw: bytes) -> re.Match[str]:
    found = pattern.fullmatch(raw.decode())
    if found is None:
        raise ValueRefused(f"{raw.decode()!r} is not written as expected")
    return found


def _compute_clock_micros(hour: str, minute: str, second: str, fraction: str | None) -> int:
    return (int(hour) * 3600 + int(minute) * 60 + int(second)) * _US + int((fraction or "").ljust(6, "0"))


def _count_days(found: re.Match[str]) -> int:
    year = int(found[1])
    return count_days(1 - year if found[9] else year, int(found[2]), int(found[3]))


def _find_infinity(raw: bytes) -> int | None:
    return {b"infinity": INFINITY, b"-infinity": MINUS_INFINITY}.get(raw)


def _convert_days(raw: bytes) -> str:
    if (infinite := _find_infinity(raw)) is not None:
        return str(2**31 - 1 if infinite > 0 else -(2**31))
    return str(_count_days(_match(_DATE, raw)))


def _convert_timestamp(raw: bytes) -> int:
    found = _match(_DATE, raw)
    return _count_days(found) * _DAY_US + _compute_clock_micros(found[4], found[5], found[6], found[7])


def _format_long(value: int, raw: bytes) -> str:
    """Return microseconds as JSON."""
    if not -_LONG <= value < _LONG:
        raise ValueRefused(f"it is {raw.decode()}, whose microseconds 64 bits cannot hold")
    return str(value)


def _convert_micros(raw: bytes) -> str:
    infinite = _find_infinity(raw)
    return _format_long(_convert_timestamp(raw), raw) if infinite is None else str(infinite)


def _convert_millis(raw: bytes) -> str:
    infinite = _find_infinity(raw)
    return str((_convert_timestamp(raw) if infinite is None else infinite) // 1000)


def _convert_zoned(raw: bytes, digits: int) -> str:
    """Return an instant, with as many digits after the seconds as its column has."""
    if raw[4] == raw[7] == 45 and raw[-3:] == b"+00":  # a year of four digits, in UTC
        text = raw.decode()
        day, clock, part = text[:10], text[11:19], text[20:-3]
        return f'"{day}T{clock}.{part.ljust(digits, "0")}Z"' if digits else f'"{day}T{clock}Z"'
    if _find_infinity(raw) is not None:
        return f'"{raw.decode()}"'
    found = _match(_DATE, raw)  # the session's zone is UTC
    fraction = f".{(found[7] or '').ljust(digits, '0')}" if digits else ""
    return f'"{_format_iso_year(found)}-{found[2]}-{found[3]}T{found[4]}:{found[5]}:{found[6]}{fraction}Z"'


def _format_iso_year(found: re.Match[str]) -> str:
    """Return a year as ISO 8601 has it: the year before 1 is 0, and years of more than four digits have a sign."""
    if not found[9]:
        return f"+{found[1]}" if len(found[1]) > 4 else found[1]
    year = int(found[1]) - 1
    return f"-{year:04}" if year else "0000"


def _convert_time_to_micros(raw: bytes) -> str:
    found = _match(_CLOCK, raw)
    return str(_compute_clock_micros(found[1], found[2], found[3], found[4]))


def _convert_time_to_millis(raw: bytes) -> str:
    return str(int(_convert_time_to_micros(raw)) // 1000)


def _convert_zoned_time(raw: bytes) -> str:
    found = _match(_CLOCK, raw)
    parts = [int(part) for part in (found[5] or "+00")[1:].split(":")]
    offset = sum(part * size for part, size in zip(parts, (3600, 60, 1), strict=False)) * (-1 if found[5][0] == "-" else 1)
    micros = (_compute_clock_micros(found[1], found[2], found[3], found[4]) - offset * _US) % _DAY_US
    seconds, fraction = divmod(micros, _US)
    after = f".{fraction:06}".rstrip("0") if fraction else ""
    return f'"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}{after}Z"'


def _convert_interval(raw: bytes) -> str:
    if (infinite := _find_infinity(raw)) is not None:
        return str(_LONG - 1 if infinite > 0 else -_LONG)
    found = _match(_INTERVAL, raw)
    years, months, days, hours, minutes = (int(found[n] or 0) for n in range(1, 6))
    seconds = int(found[7] or 0) * _US + int((found[8] or "").ljust(6, "0"))
    clock = (hours * 60 + minutes) * 60 * _US + (-seconds if found[6] else seconds)
    return _format_long((years * 12 + months) * _MONTH_US + days * _DAY_US + clock, raw)


# --- points ---------------------------------------------------------------------------------------------------------------


def _convert_point(raw: bytes) -> str:
    x, y = raw.decode()[1:-1].split(",")
    return format_point(
        _convert_double(x.encode()), _convert_double(y.encode()), struct.pack("<BIdd", 1, 1, float(x), float(y)), None
    )


# --- arrays -------------------------------------------------------------------------------------------------------------


def _make_array_conversion(element: Converted) -> Converted:
    items = {**element.schema, "optional": element.schema.get("name") != "io.debezium.data.Enum"}
    return Converted(lambda raw: _convert_array(raw.decode(), element.convert), {"type": "array", "items": items})


_ITEM = re.compile(r'"((?:[^"\\]|\\.)*)"|([^,{}"]+)', re.DOTALL)


def _convert_array(text: str, convert: ValueConverter) -> str:
    """Return an array literal (``{1,NULL,"a b"}``) as JSON."""
    at = text.index("{")  # after bounds, as in [0:1]={1,2}
    out = []
    while at < len(text):
        mark = text[at]
        if mark in "{},":
            out.append({"{": "[", "}": "]", ",": ","}[mark])
            at += 1
            continue
        found = _ITEM.match(text, at)
        if found is None:
            raise ValueRefused(f"{text!r} is no array")
        if found[1] is None and found[2] == "NULL":
            out.append("null")
        else:
            item = re.sub(r"\\(.)", r"\1", found[1], flags=re.DOTALL) if found[1] is not None else found[2]
            out.append(convert(item.encode()))
        at = found.end()
    return "".join(out)


_VARIABLE_SCALE: Mapping[str, Any] = {
    "type": "struct",
    "fields": [
        {"type": "int32", "optional": False, "field": "scale"},
        {"type": "bytes", "optional": False, "field": "value"},
    ],
    "name": "io.debezium.data.VariableScaleDecimal",
    "version": 1,
    "doc": "Variable scaled decimal",
}
_TEXT, _NUMBER = ColumnForm("text"), ColumnForm("number")
_STRING = Converted(_convert_text, {"type": "string"}, _TEXT)
_BIT = Converted(_convert_bit, {"type": "boolean"})
_SIMPLE: Mapping[int, Converted] = {
    16: Converted(_convert_boolean, {"type": "boolean"}, ColumnForm("boolean")),
    17: Converted(_convert_bytes, {"type": "bytes"}),
    20: Converted(_convert_number, {"type": "int64"}, _NUMBER),
    21: Converted(_convert_number, {"type": "int16"}, _NUMBER),
    23: Converted(_convert_number, {"type": "int32"}, _NUMBER),
    26: Converted(_convert_number, {"type": "int64"}, _NUMBER),
    114: Converted(_convert_text, make_named_schema("string", "io.debezium.data.Json"), _TEXT),
    142: Converted(_convert_text, make_named_schema("string", "io.debezium.data.Xml"), _TEXT),
    600: Converted(_convert_point, POINT_SCHEMA),
    700: Converted(_convert_double, {"type": "float"}, DOUBLE_FORM),
    701: Converted(_convert_double, {"type": "double"}, DOUBLE_FORM),
    1186: Converted(_convert_interval, make_named_schema("int64", "io.debezium.time.MicroDuration")),
    1266: Converted(_convert_zoned_time, make_named_schema("string", "io.debezium.time.ZonedTime")),
    2950: Converted(_convert_text, make_named_schema("string", "io.debezium.data.Uuid"), _TEXT),
    3614: Converted(_convert_text, make_named_schema("string", "io.debezium.data.Tsvector"), _TEXT),
    3802: Converted(_convert_text, make_named_schema("string", "io.debezium.data.Json"), _TEXT),
}
_ARRAYS: Mapping[int, int] = {
    1000: 16, 1001: 17, 1005: 21, 1007: 23, 1016: 20, 1021: 700, 1022: 701, 1028: 26, 1231: 1700, 791: 790, 1182: 1082,
    1183: 1083, 1115: 1114, 1185: 1184, 1187: 1186, 1270: 1266, 2951: 2950, 199: 114, 3807: 3802, 143: 142, 1009: 25,
    1014: 1042, 1015: 1043, 1002: 18, 1003: 19, 1041: 869, 651: 650, 1040: 829, 775: 774, 1561: 1560, 1563: 1562,
}  # fmt: skip
"""The arrays of built-in types, and the types of their elements."""
