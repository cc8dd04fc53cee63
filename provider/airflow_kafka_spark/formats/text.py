"""The grammar of JSON, and what a value means in a column of a type without parts: the ground of :mod:`.json.tasks.row_wise`.

A reader takes the record's text and the index where a value begins. Running over the end is an IndexError, which the caller
expects.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import decimal
import math
import re
import struct
from collections.abc import Callable
from itertools import accumulate
from json.decoder import JSONDecodeError, JSONDecoder, scanstring  # type: ignore[attr-defined]
from typing import Any

from airflow_kafka_spark.formats.types import Decimal, Text

MAX_NESTING = 500
"""Objects and arrays may be nested this deep, also in fields that are not read."""

MIN_DATE = datetime.date.min.toordinal() - datetime.date(1970, 1, 1).toordinal()
MIN_SECOND = MIN_DATE * 86_400
MAX_SECOND = 253_402_300_799
MIN_MICRO, MAX_MICRO = MIN_SECOND * 1_000_000, MAX_SECOND * 1_000_000 + 999_999
"""Dates and timestamps lie in the years 0001 to 9999."""

Reader = Callable[[str, int], tuple[Any, int]]
"""Reads the value that begins at an index; returns it with the index after it."""

_SHOWN = 60
_EPOCH = datetime.date(1970, 1, 1).toordinal()
_SPACE = " \t\n\r"
skip_space = re.compile(r"[ \t\n\r]*").match
_number = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?").match
match_integer = re.compile(r"-?(?:0|[1-9][0-9]*)(?![.eE0-9])").match
_decimal = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?").fullmatch
_date = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})").fullmatch
_timestamp = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
    r"(?:[T ]([01][0-9]|2[0-3])(?::([0-5][0-9])(?::([0-5][0-9])(?:\.([0-9]+))?)?)?"
    r"(?:(Z)|([-+])([01][0-9]|2[0-3])(?::?([0-5][0-9]))?)?)?"
).fullmatch
_malformed = decimal.Context(traps=[decimal.InvalidOperation])
NO_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_strings = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.S)
_all_but_brackets = bytes(set(range(256)) - set(b"[]{}"))
_steps = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_scan_once: Reader = JSONDecoder(parse_float=str, parse_int=str, strict=True).scan_once  # type: ignore[attr-defined]


class BadValue(Exception):
    """A record that does not fit; ``path`` leads to the column, outermost first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.path: list[str] = []

    def within(self, step: str) -> BadValue:
        """The same, one step further out."""
        self.path.insert(0, step)
        return self

    @property
    def reason(self) -> str:
        """What to tell the user."""
        path = "".join(self.path).removeprefix(".")
        return f"column `{path}`: {self.what}" if path else self.what


def too_deep(value: bytes) -> bool:
    """True when objects and arrays are nested deeper than :data:`MAX_NESTING`."""
    if value.count(b"{") + value.count(b"[") <= MAX_NESTING:
        return False
    brackets = _strings.sub(b"", value).translate(None, _all_but_brackets)
    return max(accumulate(map(_steps.__getitem__, brackets)), default=0) > MAX_NESTING


# --- the grammar of JSON ------------------------------------------------------------------------------------------------


def after_space(text: str, i: int) -> int:
    """The index of what comes next."""
    return skip_space(text, i).end() if text[i] in _SPACE else i  # type: ignore[union-attr]


def not_json(text: str, i: int, expected: str) -> BadValue:
    """What stands at an index is not what JSON's grammar wants there."""
    return BadValue(f"not JSON: found {found_at(text, i)} at character {i + 1}, expected {expected}")


def read_key(text: str, i: int) -> tuple[str, int]:
    """A key; the index is that of its value."""
    if text[i] != '"':
        raise not_json(text, i, "a name in double quotes")
    name, i = read_string(text, i)
    i = after_space(text, i)
    if text[i] != ":":
        raise not_json(text, i, "`:`")
    return name, after_space(text, i + 1)


def next_item(text: str, i: int, closing: str) -> int:
    """Behind a value: the index of the next one, or of the closing bracket."""
    i = after_space(text, i)
    if text[i] == ",":
        i = after_space(text, i + 1)
        if text[i] == closing:
            raise not_json(text, i, "another value after `,`")
    elif text[i] != closing:
        raise not_json(text, i, f"`,` or `{closing}`")
    return i


def read_string(text: str, i: int) -> tuple[str, int]:
    """The string whose opening quote is at an index; it may hold lone surrogates."""
    try:
        return scanstring(text, i + 1, True)
    except JSONDecodeError as e:
        raise BadValue(f"not JSON: {e.msg} (character {e.pos + 1})") from None


def skip_value(text: str, i: int) -> int:
    """The index after a value of any kind, which must be JSON; also NaN, Infinity and -Infinity, as everywhere."""
    try:
        return _scan_once(text, i)[1]
    except JSONDecodeError as e:
        raise BadValue(f"not JSON: {e.msg} (character {e.pos + 1})") from None
    except StopIteration as e:
        raise not_json(text, int(e.value), "a value") from None


def short(text: str) -> str:
    """What a message shows of a value: its beginning, and nothing that would garble a log."""
    shown = text[:_SHOWN]
    if not shown.isprintable():
        shown = shown.encode("unicode_escape").decode("ascii")
    return shown if len(text) <= _SHOWN else f"{shown}... ({len(text)} characters)"


def found_at(text: str, i: int) -> str:
    """The token at an index, for a message."""
    if i >= len(text):
        return "nothing"
    try:
        return short(text[i : _scan_once(text, i)[1]])
    except (ValueError, StopIteration):
        return f"{ascii(text[i])}"


def unexpected(text: str, i: int, expected: str) -> BadValue:
    """The value at an index has another type than its column; or there is no value."""
    end = skip_value(text, i)
    if end < len(text) and text[end] not in " \t\n\r,]}":
        return not_json(text, end, f"the end of the value {short(text[i:end])}")
    return BadValue(f"found {short(text[i:end])}, expected {expected}")


def check_unicode(text: str) -> None:
    """Refuses lone surrogates: JSON can write them, UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise BadValue(f"found the lone surrogate {ascii(text[e.start])}, which is no character") from None


# --- values of one type -------------------------------------------------------------------------------------------------


def text_reader(data_type: Text) -> Reader:
    limit = data_type.max_length

    def read(text: str, i: int) -> tuple[Any, int]:
        if text[i] == '"':
            found, end = read_string(text, i)
            if not found.isascii():
                check_unicode(found)
        else:
            end = skip_value(text, i)
            found = text[i:end]
        if limit is not None and len(found) > limit:
            raise BadValue(f"found {short(found)} ({len(found)} characters), expected {data_type}")
        return found, end

    return read


def _integer_reader(name: str, bits: int) -> Reader:
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1

    def read(text: str, i: int) -> tuple[Any, int]:
        match = match_integer(text, i)
        if match is None:
            raise unexpected(text, i, name)
        # Longer ones are out of any range; Python refuses to convert thousands of digits.
        number = int(match.group()) if len(match.group()) <= 20 else None
        if number is None or not low <= number <= high:
            raise BadValue(f"found {short(match.group())}, expected {name}: {low} to {high}")
        return number, match.end()

    return read


def decimal_reader(data_type: Decimal) -> Reader:
    def read(text: str, i: int) -> tuple[Any, int]:
        if text[i] == '"':
            found, end = read_string(text, i)
            fits = _decimal(found)
        else:
            fits = _number(text, i)
            found, end = (fits.group(), fits.end()) if fits else ("", i)
        if fits is None:
            raise unexpected(text, i, f"{data_type}, a number or a numeric string")
        return _exact(found, data_type), end

    return read


def to_decimal(found: str, data_type: Decimal) -> decimal.Decimal:
    """The decimal of a numeric text."""
    if _decimal(found) is None:
        raise BadValue(f'found "{short(found)}", expected {data_type}')
    return _exact(found, data_type)


def _exact(found: str, data_type: Decimal) -> decimal.Decimal:
    """A number's text as a decimal of this precision and scale, without rounding."""
    precision, scale = data_type.precision, data_type.scale
    try:
        sign, digits, exponent = decimal.Decimal(found, _malformed).as_tuple()
    except decimal.InvalidOperation:
        raise BadValue(f"found {short(found)}, expected {data_type}: such an exponent fits no decimal") from None
    assert isinstance(exponent, int)
    significant = "".join(map(str, digits)).lstrip("0")
    trimmed = significant.rstrip("0")
    exponent += len(significant) - len(trimmed)
    if not trimmed:
        return decimal.Decimal((0, (0,), -scale))
    if exponent < -scale:
        raise BadValue(f"found {short(found)}, expected {data_type}: at most {scale} digits after the point")
    if len(trimmed) + exponent > precision - scale:
        raise BadValue(f"found {short(found)}, expected {data_type}: at most {precision - scale} digits before the point")
    return decimal.Decimal((sign, tuple(map(int, trimmed + "0" * (exponent + scale))), -scale))


def _float_reader(name: str, single: bool) -> Reader:
    def read(text: str, i: int) -> tuple[Any, int]:
        if text[i] == '"':
            found, end = read_string(text, i)
            if found not in NO_FINITE:
                raise unexpected(text, i, f"{name}, a number or one of the strings NaN, Infinity, -Infinity")
            return NO_FINITE[found], end
        match = _number(text, i)
        if match is None:
            end = skip_value(text, i)
            if text[i:end] in NO_FINITE:
                return NO_FINITE[text[i:end]], end
            raise unexpected(text, i, name)
        return nearest(match.group(), name, single), match.end()

    return read


def nearest(found: str, name: str, single: bool) -> float:
    """The floating point number next to a number's text."""
    number = float(found)
    try:
        if single:
            number = struct.unpack("<f", struct.pack("<f", _odd(number, found)))[0]
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise BadValue(f"found {short(found)}, expected {name}: it is too large for one")
    return number


def _odd(number: float, found: str) -> float:
    """The double next to a number's text or the one on its other side, whichever ends in a one: rounded again, to fewer bits, it
    gives what the text itself does, as no such double lies midway between two that have fewer."""
    if number == 0 or math.isinf(number):
        return number
    exact = decimal.Decimal(found)
    if exact == decimal.Decimal(number) or struct.unpack("<q", struct.pack("<d", number))[0] % 2:
        return number
    return math.nextafter(number, math.inf if exact > decimal.Decimal(number) else -math.inf)


def _boolean(text: str, i: int) -> tuple[Any, int]:
    if text.startswith("true", i):
        return True, i + 4
    if text.startswith("false", i):
        return False, i + 5
    raise unexpected(text, i, "boolean")


def _binary(text: str, i: int) -> tuple[Any, int]:
    if text[i] != '"':
        raise unexpected(text, i, "binary, as a base64 string")
    found, end = read_string(text, i)
    return from_base64(found), end


def from_base64(found: str) -> bytes:
    """The bytes of a base64 text: standard alphabet, padded, nothing else in it."""
    try:
        if len(found) % 4 == 0:
            return base64.b64decode(found, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise BadValue(f'found "{short(found)}", expected binary: base64 with padding')


def _day(text: str, i: int) -> tuple[Any, int]:
    if text[i] != '"':
        raise unexpected(text, i, "date")
    found, end = read_string(text, i)
    return day_number(found), end


def day_number(found: str) -> int:
    """Days since 1970 of an ISO 8601 date."""
    match = _date(found)
    try:
        if match:
            return datetime.date(*map(int, match.groups())).toordinal() - _EPOCH
    except ValueError:
        pass
    raise BadValue(f'found "{short(found)}", expected date: yyyy-MM-dd')


def _wall_clock(text: str, i: int) -> tuple[Any, int]:
    if text[i] != '"':
        raise unexpected(text, i, "timestamp_ntz")
    found, end = read_string(text, i)
    return micros(found, "timestamp_ntz", zoned=False), end


def micros(found: str, name: str, zoned: bool) -> int:
    """Microseconds since 1970 of an ISO 8601 date and time."""
    match = _timestamp(found)
    if match is None:
        raise BadValue(f'found "{short(found)}", expected {name}: yyyy-MM-ddTHH:mm:ss[.ffffff]{"[Z|+HH:mm]" if zoned else ""}')
    year, month, day, hour, minute, second, fraction, zulu, sign, zone_hour, zone_minute = match.groups(default="")
    if not zoned and (zulu or sign):
        raise BadValue(f'found "{found}", expected {name}: no time zone')
    if fraction[6:].strip("0"):
        raise BadValue(f'found "{short(found)}", expected {name}: at most 6 digits of a second')
    offset = int(zone_hour or 0) * 3600 + int(zone_minute or 0) * 60
    try:
        days = datetime.date(int(year), int(month), int(day)).toordinal() - _EPOCH
    except ValueError:
        raise BadValue(f'found "{found}", expected {name}: there is no such day') from None
    seconds = days * 86_400 + int(hour or 0) * 3600 + int(minute or 0) * 60 + int(second or 0)
    seconds += offset if sign == "-" else -offset
    result = seconds * 1_000_000 + int(fraction[:6].ljust(6, "0"))
    if not MIN_MICRO <= result <= MAX_MICRO:
        raise BadValue(f'found "{found}", expected {name}: the years 0001 to 9999 in UTC')
    return result


PRIMITIVES: dict[str, Reader] = {
    "tinyint": _integer_reader("tinyint", 8),
    "smallint": _integer_reader("smallint", 16),
    "int": _integer_reader("int", 32),
    "bigint": _integer_reader("bigint", 64),
    "float": _float_reader("float", single=True),
    "double": _float_reader("double", single=False),
    "boolean": _boolean,
    "binary": _binary,
    "date": _day,
    "timestamp_ntz": _wall_clock,
}
