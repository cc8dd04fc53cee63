"""MySQL's type JSON in the log: the text that the server shows for its binary form."""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Callable, Sequence

from airflow_kafka_spark.sources.mysql_cdc.tasks import binlog
from airflow_kafka_spark.sources.mysql_cdc.tasks.binlog import LogUnreadable

_OBJECTS, _ARRAYS, _LARGE = (0, 1), (2, 3), (1, 3)
_LITERAL, _TEXT, _OPAQUE = 4, 12, 15
_NUMBERS = {5: "<h", 6: "<H", 7: "<i", 8: "<I", 9: "<q", 10: "<Q"}
_DOUBLE = 11
_LITERALS = ("null", "true", "false")
_INLINE, _INLINE_IF_LARGE = (_LITERAL, 5, 6), (7, 8)
"""The types whose values stand in the place of their offset."""

_ESCAPED = {'"': r"\"", "\\": r"\\", "\b": r"\b", "\f": r"\f", "\n": r"\n", "\r": r"\r", "\t": r"\t"}
_SPECIAL = re.compile(r'["\\\x00-\x1f]')
_LONGEST_FRACTION, _LONGEST_NUMBER = -14, 15
"""The place of the point in the digits of a double down to and up to which it has no exponent."""

_BASE64_LINE = 76


def format_json_binary(data: bytes, format_decimal: Callable[[bytes], str]) -> str:
    """Return the text of a value of the type JSON, equal to the text that a query returns.

    :param data: its binary form; empty for the null of JSON.
    :param format_decimal: returns a number of the type DECIMAL as text: two bytes of precision and scale, then its bytes.
    :raises LogUnreadable: it is not of this form.
    """
    if not data:
        return "null"
    try:
        return _format(data[0], data[1:], format_decimal)
    except (IndexError, struct.error, UnicodeDecodeError) as error:
        raise LogUnreadable(f"a value of JSON is cut off: {error}") from None


def _format(kind: int, data: bytes, format_decimal: Callable[[bytes], str]) -> str:
    if kind in _OBJECTS or kind in _ARRAYS:
        return _format_container(kind, data, format_decimal)
    if kind == _LITERAL:
        return _LITERALS[data[0]]
    if kind in _NUMBERS:
        return str(struct.unpack_from(_NUMBERS[kind], data)[0])
    if kind == _DOUBLE:
        return format_double(struct.unpack_from("<d", data)[0])
    if kind == _TEXT:
        size, at = _read_size(data, 0)
        return _quote(data[at : at + size].decode())
    if kind == _OPAQUE:
        size, at = _read_size(data, 1)
        return _format_opaque(data[0], data[at : at + size], format_decimal)
    raise LogUnreadable(f"a value of JSON has the type {kind}")


def _format_container(kind: int, data: bytes, format_decimal: Callable[[bytes], str]) -> str:
    is_large, is_object = kind in _LARGE, kind in _OBJECTS
    number, width = ("<I", 4) if is_large else ("<H", 2)
    (count,) = struct.unpack_from(number, data)
    at, names = 2 * width, list[str]()
    for _ in range(count if is_object else 0):
        (begin,), (size,) = struct.unpack_from(number, data, at), struct.unpack_from("<H", data, at + width)
        names.append(_quote(data[begin : begin + size].decode()))
        at += width + 2
    values = []
    for _ in range(count):
        of = data[at]
        is_inline = of in _INLINE or (is_large and of in _INLINE_IF_LARGE)
        begin = at + 1 if is_inline else struct.unpack_from(number, data, at + 1)[0]
        values.append(_format(of, data[begin:], format_decimal))
        at += 1 + width
    if is_object:
        return "{" + ", ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True)) + "}"
    return "[" + ", ".join(values) + "]"


def _read_size(data: bytes, at: int) -> tuple[int, int]:
    """Return a size of seven bits per byte, and the index after it."""
    size = shift = 0
    while True:
        byte = data[at]
        size |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return size, at


def _quote(text: str) -> str:
    return '"' + _SPECIAL.sub(lambda found: _ESCAPED.get(found[0], f"\\u{ord(found[0]):04x}"), text) + '"'


def format_double(value: float) -> str:
    """Return a double as MySQL's type JSON shows it."""
    if value == 0:
        return "-0.0" if math.copysign(1, value) < 0 else "0.0"
    sign, digits, exponent = "-" if value < 0 else "", *repr(abs(value)).partition("e")[::2]
    whole, _, part = digits.partition(".")
    given = whole + part
    digits = given.strip("0")
    place = int(exponent or 0) + len(whole) - (len(given) - len(given.lstrip("0")))  # of the point in the digits
    if place < _LONGEST_FRACTION or (place > _LONGEST_NUMBER and place >= len(digits)):
        return f"{sign}{digits[0]}{digits[1:] and '.' + digits[1:]}e{place - 1}"
    if place <= 0:
        return f"{sign}0.{'0' * -place}{digits}"
    return f"{sign}{digits[:place].ljust(place, '0')}.{digits[place:] or '0'}"


def _format_opaque(kind: int, data: bytes, format_decimal: Callable[[bytes], str]) -> str:
    """Return a value of one of SQL's types."""
    if kind == binlog.NEWDECIMAL:
        return format_decimal(data)
    if kind in _TIMES:
        return f'"{_TIMES[kind](int.from_bytes(data[:8], "little", signed=True))}"'
    encoded = base64.b64encode(data).decode()
    lines = [encoded[at : at + _BASE64_LINE] for at in range(0, len(encoded), _BASE64_LINE)]
    return _quote(f"base64:type{kind}:" + "\n".join(lines))


def _format_clock(packed: int) -> str:
    sign, packed = ("-", -packed) if packed < 0 else ("", packed)
    clock = packed >> 24
    return f"{sign}{clock >> 12 & 0x3FF:02}:{clock >> 6 & 63:02}:{clock & 63:02}.{packed & 0xFFFFFF:06}"


def _list_date_parts(packed: int) -> Sequence[int]:
    day = packed >> 41
    months, clock = day >> 5, packed >> 24 & 0x1FFFF
    return months // 13, months % 13, day & 31, clock >> 12, clock >> 6 & 63, clock & 63, packed & 0xFFFFFF


_TIMES: dict[int, Callable[[int], str]] = {
    10: lambda packed: "{:04}-{:02}-{:02}".format(*_list_date_parts(packed)[:3]),
    11: _format_clock,
    **dict.fromkeys((7, 12), lambda packed: "{:04}-{:02}-{:02} {:02}:{:02}:{:02}.{:06}".format(*_list_date_parts(packed))),
}
"""DATE, TIME, TIMESTAMP and DATETIME, packed into 64 bits."""
