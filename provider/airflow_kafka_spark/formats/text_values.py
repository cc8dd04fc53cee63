"""Parse numbers, dates, timestamps and bytes from text, with the reason why a value is bad (JSON); fields of any type (CSV, by
:func:`make_field_reader`), and CSV's dialect."""

from __future__ import annotations

import base64
import binascii
import datetime
import decimal
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from airflow_kafka_spark.formats.types import INTEGER_BITS, DataType, Decimal, Text

MIN_DATE = datetime.date.min.toordinal() - datetime.date(1970, 1, 1).toordinal()
MAX_DATE = datetime.date.max.toordinal() - datetime.date(1970, 1, 1).toordinal()
MIN_SECOND = MIN_DATE * 86_400
MAX_SECOND = 253_402_300_799
MIN_MICRO, MAX_MICRO = MIN_SECOND * 1_000_000, MAX_SECOND * 1_000_000 + 999_999
"""Dates and timestamps lie in the years 0001 to 9999."""


_SHOWN = 60
EPOCH_ORDINAL = datetime.date(1970, 1, 1).toordinal()
"""Number of 1970-01-01 among the days since 0001-01-01, as :meth:`datetime.date.toordinal` counts them."""
match_decimal = re.compile(r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?").fullmatch
_whole = re.compile(r"[-+]?[0-9]+").fullmatch
_date = re.compile(r"([0-9]{4})-([0-9]{2})-([0-9]{2})").fullmatch
_timestamp = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
    r"(?:[T ]([01][0-9]|2[0-3])(?::([0-5][0-9])(?::([0-5][0-9])(?:\.([0-9]+))?)?)?"
    r"(?:(Z)|([-+])([01][0-9]|2[0-3])(?::?([0-5][0-9]))?)?)?"
).fullmatch
_malformed = decimal.Context(traps=[decimal.InvalidOperation])
NO_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class BadValue(Exception):
    """Raised when a record does not fit its columns; ``path`` leads to the column, outermost step first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.path: list[str] = []

    def prepend(self, step: str) -> BadValue:
        """Prepend a step to the path, and return the error."""
        self.path.insert(0, step)
        return self

    @property
    def reason(self) -> str:
        """The reason with the path to the column, for users."""
        path = "".join(self.path).removeprefix(".")
        return f"column `{path}`: {self.what}" if path else self.what


# --- the grammar of JSON ------------------------------------------------------------------------------------------------


def shorten(text: str) -> str:
    """Return the beginning of a value for a message, without characters that would garble a log."""
    shown = text[:_SHOWN]
    if not shown.isprintable():
        shown = shown.encode("unicode_escape").decode("ascii")
    return shown if len(text) <= _SHOWN else f"{shown}... ({len(text)} characters)"


# --- values of one type -------------------------------------------------------------------------------------------------


def to_decimal(found: str, data_type: Decimal) -> decimal.Decimal:
    """Return the decimal of a numeric text.

    :raises BadValue: it is no number, or the type cannot hold it exactly.
    """
    if match_decimal(found) is None:
        raise BadValue(f'found "{shorten(found)}", expected {data_type}')
    return _parse_exact_decimal(found, data_type)


def _parse_exact_decimal(found: str, data_type: Decimal) -> decimal.Decimal:
    """Return a number's text as a decimal of this precision and scale, without rounding."""
    precision, scale = data_type.precision, data_type.scale
    try:
        sign, digits, exponent = decimal.Decimal(found, _malformed).as_tuple()
    except decimal.InvalidOperation:
        raise BadValue(f"found {shorten(found)}, expected {data_type}: such an exponent fits no decimal") from None
    assert isinstance(exponent, int)
    significant = "".join(map(str, digits)).lstrip("0")
    trimmed = significant.rstrip("0")
    exponent += len(significant) - len(trimmed)
    if not trimmed:
        return decimal.Decimal((0, (0,), -scale))
    if exponent < -scale:
        raise BadValue(f"found {shorten(found)}, expected {data_type}: at most {scale} digits after the point")
    if len(trimmed) + exponent > precision - scale:
        raise BadValue(f"found {shorten(found)}, expected {data_type}: at most {precision - scale} digits before the point")
    return decimal.Decimal((sign, tuple(map(int, trimmed + "0" * (exponent + scale))), -scale))


def parse_float(found: str, name: str, single: bool) -> float:
    """Return the floating point number nearest to a number's text.

    :raises BadValue: it is too large for the type.
    """
    number = float(found)
    try:
        if single:
            number = struct.unpack("<f", struct.pack("<f", _round_to_odd(number, found)))[0]
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise BadValue(f"found {shorten(found)}, expected {name}: it is too large for one")
    return number


def _round_to_odd(number: float, found: str) -> float:
    """Return the double next to a number's text, on the side where its last bit is one.

    Rounding this double to fewer bits gives the same number as rounding the text directly, because no such double lies midway
    between two numbers of fewer bits.
    """
    if number == 0 or math.isinf(number):
        return number
    exact = decimal.Decimal(found)
    if exact == decimal.Decimal(number) or struct.unpack("<q", struct.pack("<d", number))[0] % 2:
        return number
    return math.nextafter(number, math.inf if exact > decimal.Decimal(number) else -math.inf)


def decode_base64(found: str) -> bytes:
    """Return the bytes of a base64 text: standard alphabet, with padding, nothing else in it."""
    try:
        if len(found) % 4 == 0:
            return base64.b64decode(found, validate=True)
    except (binascii.Error, ValueError):
        pass
    raise BadValue(f'found "{shorten(found)}", expected binary: base64 with padding')


def parse_day(found: str) -> int:
    """Return an ISO 8601 date as days since 1970."""
    match = _date(found)
    try:
        if match:
            return datetime.date(*map(int, match.groups())).toordinal() - EPOCH_ORDINAL
    except ValueError:
        pass
    raise BadValue(f'found "{shorten(found)}", expected date: yyyy-MM-dd')


def parse_micros(found: str, name: str, zoned: bool) -> int:
    """Return an ISO 8601 date and time as microseconds since 1970.

    :param name: the column's type, for messages.
    :param zoned: True if a zone is allowed; without one it is UTC.
    """
    match = _timestamp(found)
    if match is None:
        raise BadValue(f'found "{shorten(found)}", expected {name}: yyyy-MM-ddTHH:mm:ss[.ffffff]{"[Z|+HH:mm]" if zoned else ""}')
    year, month, day, hour, minute, second, fraction, zulu, sign, zone_hour, zone_minute = match.groups(default="")
    if not zoned and (zulu or sign):
        raise BadValue(f'found "{found}", expected {name}: no time zone')
    if fraction[6:].strip("0"):
        raise BadValue(f'found "{shorten(found)}", expected {name}: at most 6 digits of a second')
    offset = int(zone_hour or 0) * 3600 + int(zone_minute or 0) * 60
    try:
        days = datetime.date(int(year), int(month), int(day)).toordinal() - EPOCH_ORDINAL
    except ValueError:
        raise BadValue(f'found "{found}", expected {name}: there is no such day') from None
    seconds = days * 86_400 + int(hour or 0) * 3600 + int(minute or 0) * 60 + int(second or 0)
    seconds += offset if sign == "-" else -offset
    result = seconds * 1_000_000 + int(fraction[:6].ljust(6, "0"))
    if not MIN_MICRO <= result <= MAX_MICRO:
        raise BadValue(f'found "{found}", expected {name}: the years 0001 to 9999 in UTC')
    return result


# --- fields ------------------------------------------------------------------------------------------------------------------

FromField = Callable[[str], Any]
"""Returns the column's value of a field's text; raises :class:`.BadValue`."""
_PARTS = {"yyyy": "[0-9]{4}", "X": "Z|[-+][0-9]{2}(?:[0-9]{2})?", "XX": "Z|[-+][0-9]{4}", "XXX": "Z|[-+][0-9]{2}:[0-9]{2}"}
_PARTS |= dict.fromkeys(("MM", "dd", "HH", "mm", "ss"), "[0-9]{2}")
_PATTERN = re.compile(r"'((?:[^']|'')*)'|(([A-Za-z])\3*)|([^A-Za-z'\[\]{}#\"\\])", re.S)


@dataclass(frozen=True)
class CsvDialect:
    """The characters of a CSV record.

    :param delimiter: the character between fields.
    :param quote: the character around fields.
    :param escape: the character before a quote within quotes; the quote itself if quotes are doubled.
    :param null: the unquoted text of a null.
    """

    delimiter: str = ","
    quote: str = '"'
    escape: str = '"'
    null: str = ""

    @property
    def doubled(self) -> bool:
        """True if a quote within quotes is doubled."""
        return self.escape == self.quote

    def quote_text(self, text: str) -> str:
        """Return a text in quotes."""
        if not self.doubled:
            text = text.replace(self.escape, self.escape * 2)
        return f"{self.quote}{text.replace(self.quote, self.escape + self.quote)}{self.quote}"


def make_timestamp_reader(pattern: str) -> FromField:
    """Return the reader of timestamps in a Java pattern: ``yyyy MM dd HH mm ss``, up to nine ``S``, ``X`` to ``XXX``, texts in
    single quotes; without a zone it is UTC.

    :raises ValueError: the pattern has something else, one part twice, or no day.
    """
    if '"' in pattern or "\\" in pattern:
        raise ValueError("a double quote or a backslash")
    expression, seen, i = "", set(), 0
    while i < len(pattern):
        match = _PATTERN.match(pattern, i)
        if match is None:
            raise ValueError(f"`{pattern[i]}` at character {i + 1}")
        literal, letters, _, other = match.groups()
        if letters is not None:
            name = "S" if set(letters) == {"S"} and len(letters) <= 9 else "X" if letters in ("X", "XX", "XXX") else letters
            part = f"[0-9]{{{len(letters)}}}" if name == "S" else _PARTS.get(letters)
            if part is None or name in seen:
                raise ValueError(f"`{letters}` at character {i + 1}")
            seen.add(name)
            expression += f"(?P<{name}>{part})"
        else:
            expression += re.escape(other if other is not None else literal.replace("''", "'") or "'")
        i = match.end()
    if not {"yyyy", "MM", "dd"} <= seen:
        raise ValueError("no yyyy, MM and dd")
    fullmatch = re.compile(expression, re.S).fullmatch

    def convert(found: str) -> int:
        match = fullmatch(found)
        try:
            if match is None:
                raise BadValue("")
            part = {"HH": "00", "mm": "00", "ss": "00", "S": "0", "X": ""} | match.groupdict()
            day = f"{part['yyyy']}-{part['MM']}-{part['dd']}"
            return parse_micros(f"{day}T{part['HH']}:{part['mm']}:{part['ss']}.{part['S']}{part['X']}", "timestamp", zoned=True)
        except BadValue:
            raise BadValue(f'found "{shorten(found)}", expected timestamp: {pattern}') from None

    return convert


def make_field_reader(data_type: DataType, timestamp_format: str | None = None) -> FromField:
    """Return the function that parses the text of a field.

    :param data_type: the type of its column, which is not nested.
    :param timestamp_format: see :func:`make_timestamp_reader`; default None, ISO 8601.
    """
    if isinstance(data_type, Text):
        return _make_text_reader(data_type)
    if isinstance(data_type, Decimal):
        return lambda found: to_decimal(found, data_type)
    name = str(data_type)
    if name in INTEGER_BITS:
        return _make_whole_reader(name)
    if name in ("float", "double"):
        return _make_float_reader(name)
    if name == "timestamp" and timestamp_format:
        return make_timestamp_reader(timestamp_format)
    return {
        "boolean": _parse_boolean,
        "binary": decode_base64,
        "date": parse_day,
        "timestamp": lambda found: parse_micros(found, name, zoned=True),
        "timestamp_ntz": lambda found: parse_micros(found, name, zoned=False),
    }[name]


def _make_text_reader(data_type: Text) -> FromField:
    limit = data_type.max_length

    def convert(found: str) -> str:
        if limit is not None and len(found) > limit:
            raise BadValue(f'found "{shorten(found)}" ({len(found)} characters), expected {data_type}')
        return found

    return convert


def _make_whole_reader(name: str) -> FromField:
    low, high = -(1 << INTEGER_BITS[name] - 1), (1 << INTEGER_BITS[name] - 1) - 1

    def convert(found: str) -> int:
        if not _whole(found):
            raise BadValue(f'found "{shorten(found)}", expected {name}')
        digits = found.lstrip("+-").lstrip("0") or "0"
        number = int(digits) if len(digits) <= 20 else high + 1
        number = -number if found[0] == "-" and len(digits) <= 20 else number
        if not low <= number <= high:
            raise BadValue(f"found {shorten(found)}, expected {name}: {low} to {high}")
        return number

    return convert


def _make_float_reader(name: str) -> FromField:
    def convert(found: str) -> float:
        if found in NO_FINITE:
            return NO_FINITE[found]
        if not match_decimal(found):
            raise BadValue(f'found "{shorten(found)}", expected {name}')
        return parse_float(found, name, single=name == "float")

    return convert


def _parse_boolean(found: str) -> bool:
    if found in ("true", "false"):
        return found == "true"
    lower = found.lower() if found.isascii() else ""
    if lower not in ("true", "false"):
        raise BadValue(f'found "{shorten(found)}", expected boolean: true or false')
    return lower == "true"
