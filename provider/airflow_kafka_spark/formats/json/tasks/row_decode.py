"""JSON decoded row by row: this module defines what a JSON record means; :mod:`.json.tasks.decode` has to agree with it.

Plain Python, without Arrow. :class:`JsonRowReader` returns one Python value per column, in the form that
``pyarrow.array(values, type)`` takes, or raises :class:`.BadValue` with the reason. The table of meanings is in
:class:`.Json`. The readers of values take the record's text and the index at which a value begins; at the end of the text they
raise IndexError, which :meth:`JsonRowReader.read` expects. msgspec is no replacement: it accepts other notations of dates and
numbers, keeps the last of two equal names, and its errors do not name the value that was found.
"""

from __future__ import annotations

import decimal
import re
from collections.abc import Callable, Sequence
from itertools import accumulate
from json.decoder import JSONDecodeError, JSONDecoder, scanstring  # type: ignore[attr-defined]
from typing import Any, cast

from airflow_kafka_spark.formats.json.connect_schema import VARIABLE_SCALE_DECIMAL, LogicalType
from airflow_kafka_spark.formats.text_values import (
    MAX_DATE,
    MAX_MICRO,
    MAX_SECOND,
    MIN_DATE,
    MIN_MICRO,
    MIN_SECOND,
    NO_FINITE,
    BadValue,
    _parse_exact_decimal,
    decode_base64,
    match_decimal,
    parse_day,
    parse_float,
    parse_micros,
    shorten,
)
from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Struct, Text

MAX_NESTING = 500
"""The greatest depth of nested objects and arrays, also in fields that are skipped."""


JsonReader = Callable[[str, int], tuple[Any, int]]
"""Reads the value that begins at an index; returns it with the index after it."""


_SPACE = " \t\n\r"
_OTHER_BEGINNINGS = {
    "\x00": "it looks like Confluent's wire format, which formats with `registry=` read",
    "\ufeff": "a byte order mark, which JSON does not have",
}
"""Beginnings of values that are no JSON, and their descriptions."""
skip_space = cast("Callable[..., re.Match[str]]", re.compile(r"[ \t\n\r]*").match)
_number = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?").match
match_integer = re.compile(r"-?(?:0|[1-9][0-9]*)(?![.eE0-9])").match
_strings = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.S)
_all_but_brackets = bytes(set(range(256)) - set(b"[]{}"))
_steps = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_scan_once: JsonReader = JSONDecoder(parse_float=str, parse_int=str, strict=True).scan_once  # type: ignore[attr-defined]


def is_too_deep(value: bytes) -> bool:
    """Return True if objects and arrays are nested deeper than :data:`MAX_NESTING`."""
    if value.count(b"{") + value.count(b"[") <= MAX_NESTING:
        return False
    brackets = _strings.sub(b"", value).translate(None, _all_but_brackets)
    return max(accumulate(map(_steps.__getitem__, brackets)), default=0) > MAX_NESTING


def find_token(text: str, i: int) -> int:
    """Return the index of the next character that is not white space."""
    return skip_space(text, i).end() if text[i] in _SPACE else i


def make_syntax_error(text: str, i: int, expected: str) -> BadValue:
    """Return the error for a character that JSON's grammar does not allow at an index."""
    return BadValue(f"not JSON: found {describe_token(text, i)} at character {i + 1}, expected {expected}")


def read_key(text: str, i: int) -> tuple[str, int]:
    """Return the key at an index, and the index of its value."""
    if text[i] != '"':
        raise make_syntax_error(text, i, "a name in double quotes")
    name, i = read_string(text, i)
    i = find_token(text, i)
    if text[i] != ":":
        raise make_syntax_error(text, i, "`:`")
    return name, find_token(text, i + 1)


def find_next_item(text: str, i: int, closing: str) -> int:
    """Return the index of the next value after an index, or of the closing bracket."""
    i = find_token(text, i)
    if text[i] == ",":
        i = find_token(text, i + 1)
        if text[i] == closing:
            raise make_syntax_error(text, i, "another value after `,`")
    elif text[i] != closing:
        raise make_syntax_error(text, i, f"`,` or `{closing}`")
    return i


def read_string(text: str, i: int) -> tuple[str, int]:
    """Return the string whose opening quote is at an index, and the index after it. It may contain lone surrogates."""
    try:
        return scanstring(text, i + 1, True)
    except JSONDecodeError as e:
        raise BadValue(f"not JSON: {e.msg} (character {e.pos + 1})") from None


def skip_value(text: str, i: int) -> int:
    """Return the index after a value of any type. The value must be JSON, or NaN, Infinity or -Infinity."""
    try:
        return _scan_once(text, i)[1]
    except JSONDecodeError as e:
        raise BadValue(f"not JSON: {e.msg} (character {e.pos + 1})") from None
    except StopIteration as e:
        raise make_syntax_error(text, int(e.value), "a value") from None


def describe_token(text: str, i: int) -> str:
    """Return the token at an index, for a message."""
    if i >= len(text):
        return "nothing"
    try:
        return shorten(text[i : _scan_once(text, i)[1]])
    except (ValueError, StopIteration):
        return f"{ascii(text[i])}"


def make_type_error(text: str, i: int, expected: str) -> BadValue:
    """Return the error for a value whose type is not that of its column, or for a missing value."""
    end = skip_value(text, i)
    if end < len(text) and text[end] not in " \t\n\r,]}":
        return make_syntax_error(text, end, f"the end of the value {shorten(text[i:end])}")
    return BadValue(f"found {shorten(text[i:end])}, expected {expected}")


def check_unicode(text: str) -> None:
    """Raise BadValue for lone surrogates, which JSON can write and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise BadValue(f"found the lone surrogate {ascii(text[e.start])}, which is no character") from None


def make_text_reader(data_type: Text) -> JsonReader:
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
            raise BadValue(f"found {shorten(found)} ({len(found)} characters), expected {data_type}")
        return found, end

    return read


def _make_integer_reader(name: str, bits: int) -> JsonReader:
    low, high = -(1 << bits - 1), (1 << bits - 1) - 1

    def read(text: str, i: int) -> tuple[Any, int]:
        match = match_integer(text, i)
        if match is None:
            raise make_type_error(text, i, name)
        # More digits exceed every range, and Python refuses to convert thousands of them.
        number = int(match.group()) if len(match.group()) <= 20 else None
        if number is None or not low <= number <= high:
            raise BadValue(f"found {shorten(match.group())}, expected {name}: {low} to {high}")
        return number, match.end()

    return read


def make_decimal_reader(data_type: Decimal) -> JsonReader:
    def read(text: str, i: int) -> tuple[Any, int]:
        if text[i] == '"':
            found, end = read_string(text, i)
            fits = match_decimal(found)
        else:
            fits = _number(text, i)
            found, end = (fits.group(), fits.end()) if fits else ("", i)
        if fits is None:
            raise make_type_error(text, i, f"{data_type}, a number or a numeric string")
        return _parse_exact_decimal(found, data_type), end

    return read


def _make_float_reader(name: str, single: bool) -> JsonReader:
    def read(text: str, i: int) -> tuple[Any, int]:
        if text[i] == '"':
            found, end = read_string(text, i)
            if found not in NO_FINITE:
                raise make_type_error(text, i, f"{name}, a number or one of the strings NaN, Infinity, -Infinity")
            return NO_FINITE[found], end
        match = _number(text, i)
        if match is None:
            end = skip_value(text, i)
            if text[i:end] in NO_FINITE:
                return NO_FINITE[text[i:end]], end
            raise make_type_error(text, i, name)
        return parse_float(match.group(), name, single), match.end()

    return read


def _read_boolean(text: str, i: int) -> tuple[Any, int]:
    if text.startswith("true", i):
        return True, i + 4
    if text.startswith("false", i):
        return False, i + 5
    raise make_type_error(text, i, "boolean")


def _read_binary(text: str, i: int) -> tuple[Any, int]:
    if text[i] != '"':
        raise make_type_error(text, i, "binary, as a base64 string")
    found, end = read_string(text, i)
    return decode_base64(found), end


def _read_day(text: str, i: int) -> tuple[Any, int]:
    if text[i] != '"':
        raise make_type_error(text, i, "date")
    found, end = read_string(text, i)
    return parse_day(found), end


def _read_wall_clock(text: str, i: int) -> tuple[Any, int]:
    if text[i] != '"':
        raise make_type_error(text, i, "timestamp_ntz")
    found, end = read_string(text, i)
    return parse_micros(found, "timestamp_ntz", zoned=False), end


PRIMITIVES: dict[str, JsonReader] = {
    "tinyint": _make_integer_reader("tinyint", 8),
    "smallint": _make_integer_reader("smallint", 16),
    "int": _make_integer_reader("int", 32),
    "bigint": _make_integer_reader("bigint", 64),
    "float": _make_float_reader("float", single=True),
    "double": _make_float_reader("double", single=False),
    "boolean": _read_boolean,
    "binary": _read_binary,
    "date": _read_day,
    "timestamp_ntz": _read_wall_clock,
}


class JsonRowReader:
    """Reads records of one schema.

    :param columns: the columns; their types may be logical types.
    """

    def __init__(self, columns: Sequence[Column]) -> None:
        self.as_numbers: list[bool] = []
        """For each ``timestamp`` and each logical type, in order, True if its last value was a number; the next one probably is,
        too.
        """
        self._names = [c.name for c in columns]
        self._read = self._make_object_reader(columns)

    def read(self, value: bytes) -> list[Any]:
        """Return one value per column of a record.

        :raises BadValue: the record is not one JSON object, or a value in it does not fit its column.
        """
        try:
            text = value.decode("utf-8")
        except UnicodeDecodeError as e:
            raise BadValue(f"not UTF-8: byte 0x{value[e.start]:02x} at position {e.start}") from None
        start = skip_space(text).end()
        if is_too_deep(value):
            raise BadValue(f"objects and arrays nested more than {MAX_NESTING} deep")
        if not text.startswith("{", start):
            hint = next((f" ({what})" for begin, what in _OTHER_BEGINNINGS.items() if text.startswith(begin)), "")
            raise BadValue(f"expected a JSON object, found {describe_token(text, start)}{hint}")
        try:
            row, end = self._read(text, start)
        except IndexError:
            raise BadValue(f"not JSON: it ends too early, after {len(text)} characters") from None
        end = skip_space(text, end).end()
        if end != len(text):
            raise BadValue(f"expected one JSON object, found {describe_token(text, end)} after it, at character {end + 1}")
        return [row[name] for name in self._names]

    # --- values of any type ------------------------------------------------------------------------------------------

    def _make_value_reader(self, data_type: DataType, nullable: bool) -> JsonReader:
        """Return the reader of a value that may be null."""
        read = self._make_type_reader(data_type)

        def read_value(text: str, i: int) -> tuple[Any, int]:
            if not text.startswith("null", i):
                return read(text, i)
            if nullable:
                return None, i + 4
            raise BadValue(f"found null, expected {data_type} NOT NULL")

        return read_value

    def _make_type_reader(self, data_type: DataType) -> JsonReader:
        if isinstance(data_type, Struct):
            return self._make_object_reader(data_type.fields)
        if isinstance(data_type, Array):
            return self._make_array_reader(data_type)
        if isinstance(data_type, Map):
            return self._map(data_type)
        if isinstance(data_type, Text):
            return make_text_reader(data_type)
        if isinstance(data_type, Decimal):
            return make_decimal_reader(data_type)
        if isinstance(data_type, LogicalType):
            return self._make_wire_reader(data_type)
        if data_type.name == "timestamp":
            return self._make_instant_reader()
        return PRIMITIVES[data_type.name]

    def _make_wire_reader(self, kind: LogicalType) -> JsonReader:
        read = make_logical_reader(kind, self._note_numbers())
        if kind.unit not in ("unscaled", "variable"):
            return read
        read_parts = self._make_object_reader(VARIABLE_SCALE_DECIMAL)

        def read_decimal(text: str, i: int) -> tuple[Any, int]:
            if text[i] != "{":
                return read(text, i)
            parts, end = read_parts(text, i)
            return convert_variable_scale(parts["value"], parts["scale"], kind), end

        return read_decimal

    def _make_object_reader(self, columns: Sequence[Column]) -> JsonReader:
        readers = {c.name: self._make_value_reader(c.type, c.nullable) for c in columns}
        required = {c.name: c.type for c in columns if not c.nullable}
        blank = dict.fromkeys(readers)

        def read(text: str, i: int) -> tuple[Any, int]:
            if text[i] != "{":
                raise make_type_error(text, i, "a JSON object")
            row: dict[str, Any] = {}
            i = find_token(text, i + 1)
            while text[i] != "}":
                name, i = read_key(text, i)
                reader = readers.get(name)
                if reader is None:
                    i = skip_value(text, i)
                elif name in row:
                    raise BadValue("found twice in one object, expected once").prepend(f".{name}")
                else:
                    try:
                        row[name], i = reader(text, i)
                    except BadValue as e:
                        raise e.prepend(f".{name}") from None
                i = find_next_item(text, i, "}")
            for name in required:
                if name not in row:
                    raise BadValue(f"missing, expected {required[name]} NOT NULL").prepend(f".{name}")
            return blank | row, i + 1

        return read

    def _make_array_reader(self, data_type: Array) -> JsonReader:
        read_element = self._make_value_reader(data_type.element, data_type.contains_null)

        def read(text: str, i: int) -> tuple[Any, int]:
            if text[i] != "[":
                raise make_type_error(text, i, str(data_type))
            items: list[Any] = []
            i = find_token(text, i + 1)
            while text[i] != "]":
                try:
                    item, i = read_element(text, i)
                except BadValue as e:
                    raise e.prepend(f"[{len(items)}]") from None
                items.append(item)
                i = find_next_item(text, i, "]")
            return items, i + 1

        return read

    def _map(self, data_type: Map) -> JsonReader:
        read_value = self._make_value_reader(data_type.value, data_type.value_contains_null)

        def read(text: str, i: int) -> tuple[Any, int]:
            if text[i] != "{":
                raise make_type_error(text, i, str(data_type))
            entries: dict[str, Any] = {}
            i = find_token(text, i + 1)
            while text[i] != "}":
                name, i = read_key(text, i)
                try:
                    if name in entries:
                        raise BadValue("found twice in one object, expected once")
                    check_unicode(name)
                    entries[name], i = read_value(text, i)
                except BadValue as e:
                    raise e.prepend(f"[{shorten(ascii(name))}]") from None
                i = find_next_item(text, i, "}")
            return list(entries.items()), i + 1

        return read

    def _note_numbers(self) -> Callable[[bool], None]:
        """Return a function that notes whether a value was a number."""
        index = len(self.as_numbers)
        self.as_numbers.append(False)

        def note(number: bool) -> None:
            self.as_numbers[index] = number

        return note

    def _make_instant_reader(self) -> JsonReader:
        seen = self._note_numbers()

        def read(text: str, i: int) -> tuple[Any, int]:
            if text[i] == '"':
                seen(False)
                found, end = read_string(text, i)
                return parse_micros(found, "timestamp", zoned=True), end
            match = match_integer(text, i)
            if match is None:
                raise make_type_error(text, i, "timestamp")
            seen(True)
            if len(match.group()) > 20 or not MIN_SECOND <= int(match.group()) <= MAX_SECOND:
                expected = "timestamp: an integer is seconds since 1970, in the years 0001 to 9999"
                raise BadValue(f"found {shorten(match.group())}, expected {expected}")
            return int(match.group()) * 1_000_000, match.end()

        return read


_LARGEST_SCALE = 1000


def make_logical_reader(kind: LogicalType, seen: Callable[[bool], None]) -> JsonReader:
    """Return the reader of a logical type.

    :param seen: called with True if a value was a number, else with False.
    """
    if kind.unit in ("unscaled", "variable"):
        return _make_unscaled_reader(kind, seen)
    name = str(kind.of)
    from_text = (
        _make_iso_reader(name) if kind.unit == "iso" else PRIMITIVES["date"] if name == "date" else _make_instant_reader(name)
    )
    from_number = _make_number_conversion(kind)

    def read(text: str, i: int) -> tuple[Any, int]:
        if text[i] == '"':
            seen(False)
            return from_text(text, i)
        match = match_integer(text, i)
        if match is None or kind.unit in ("text", "iso"):
            raise make_type_error(text, i, name)
        seen(True)
        return from_number(match.group()), match.end()

    return read


def _make_instant_reader(name: str) -> JsonReader:
    def read(text: str, i: int) -> tuple[Any, int]:
        found, end = read_string(text, i)
        return parse_micros(found, name, zoned=name == "timestamp"), end

    return read


def _make_iso_reader(name: str) -> JsonReader:
    """Return the reader of dates and local timestamps that Debezium writes with ``time.precision.mode=isostring``, as if in
    UTC.
    """

    def read(text: str, i: int) -> tuple[Any, int]:
        found, end = read_string(text, i)
        if name == "date":
            return parse_day(found.removesuffix("Z")), end
        return parse_micros(found, name, zoned=found.endswith("Z")), end

    return read


def _make_number_conversion(kind: LogicalType) -> Callable[[str], int]:
    if kind.unit in ("text", "iso"):
        return int
    times, per = (1, 1) if kind.unit == "days" else kind.factor
    low, high = (MIN_DATE, MAX_DATE) if kind.unit == "days" else (MIN_MICRO, MAX_MICRO)
    what = {"days": "days", "millis": "milliseconds", "micros": "microseconds", "nanos": "nanoseconds"}[kind.unit]

    def convert(found: str) -> int:
        number = int(found) * times if len(found) <= 20 else None
        if number is None or not low <= number // per <= high:
            raise BadValue(f"found {shorten(found)}, expected {kind.of}: {what} since 1970, in the years 0001 to 9999")
        if number % per:
            raise BadValue(f"found {found}, expected {kind.of}: whole microseconds")
        return number // per

    return convert


def _make_unscaled_reader(kind: LogicalType, seen: Callable[[bool], None]) -> JsonReader:
    assert isinstance(kind.of, Decimal)
    as_number, convert = make_decimal_reader(kind.of), make_unscaled_conversion(kind)

    def read(text: str, i: int) -> tuple[Any, int]:
        if text[i] != '"':
            seen(True)
            return as_number(text, i)
        seen(False)
        found, end = read_string(text, i)
        return convert(found), end

    return read


def make_unscaled_conversion(kind: LogicalType) -> Callable[[str], decimal.Decimal]:
    """Return the conversion from base64 of Connect's Decimal (big-endian two's complement) to the column's decimal."""
    assert isinstance(kind.of, Decimal)
    wanted, scale = kind.of, kind.scale

    def convert(found: str) -> decimal.Decimal:
        try:
            data = decode_base64(found)
        except BadValue:
            raise BadValue(f'found "{shorten(found)}", expected {wanted}: base64 of its unscaled value') from None
        return _rescale(data, scale, wanted, f'"{shorten(found)}"')

    return convert


def convert_variable_scale(data: bytes, scale: int, kind: LogicalType) -> decimal.Decimal:
    """Return the column's decimal of a VariableScaleDecimal.

    :param data: the unscaled value, in big-endian two's complement.
    :param scale: the number of its digits after the point.
    :raises BadValue: the column cannot hold it.
    """
    assert isinstance(kind.of, Decimal)
    if not -_LARGEST_SCALE < scale < _LARGEST_SCALE:
        raise BadValue(f"found a scale of {scale}, which no column has")
    return _rescale(data, scale, kind.of, f"an unscaled value of {len(data)} bytes")


def _rescale(data: bytes, sent: int, wanted: Decimal, found: str) -> decimal.Decimal:
    """Return an unscaled value of one scale as a decimal of another, without rounding."""
    if len(data) > 64:
        raise BadValue(f"found {found}, expected {wanted}: it has too many digits")
    number, shift = int.from_bytes(data, "big", signed=True), wanted.scale - sent
    if shift < 0 and number % 10**-shift:
        raise BadValue(f"found {found} with {sent} digits after the point, expected {wanted}")
    number = number * 10**shift if shift >= 0 else number // 10**-shift
    if abs(number) >= 10**wanted.precision:
        raise BadValue(f"found {found}, expected {wanted}: it has too many digits")
    return decimal.Decimal((number < 0, tuple(map(int, str(abs(number)))), -wanted.scale))
