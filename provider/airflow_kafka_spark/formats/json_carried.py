"""Values that other types carry: Connect's and Debezium's logical types, as numbers and base64 in JSON.

``Carried`` stands in the place of a column's type where the readers are made (:mod:`.json_reference`, :mod:`.json_worker`); the
columns themselves keep their types (:func:`plain`).
"""

from __future__ import annotations

import decimal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from airflow_kafka_spark.formats.ddl import Array, Column, DataType, Decimal, Map, Primitive, Struct
from airflow_kafka_spark.formats.json_values import (
    MAX_MICRO,
    MIN_DATE,
    MIN_MICRO,
    PRIMITIVES,
    BadValue,
    Reader,
    decimal_reader,
    from_base64,
    match_integer,
    micros,
    read_string,
    short,
    unexpected,
)

Unit = Literal["days", "millis", "micros", "nanos", "unscaled", "text"]
"""What a number counts, from 1970 on; ``unscaled`` is a decimal's unscaled value in base64; ``text``: numbers are refused."""

_PER_MICRO = {"millis": (1000, 1), "micros": (1, 1), "nanos": (1, 1000)}
MAX_DATE = 2_932_896


@dataclass(frozen=True)
class Carried(Primitive):
    """A date, a timestamp, a wall clock or a decimal that comes as another type.

    Dates and timestamps are taken as ISO texts, too; decimals as plain numbers.

    :param of: what the column is.
    :param unit: what the number means.
    :param scale: of an unscaled decimal, as its sender has it.
    """

    of: DataType = Primitive("bigint")
    unit: Unit = "text"
    scale: int = 0

    @property
    def factor(self) -> tuple[int, int]:
        """A number in microseconds: by what to multiply, and by what to divide."""
        return _PER_MICRO[self.unit]


def carried(of: DataType, unit: Unit, scale: int = 0) -> Carried:
    """A type that is carried."""
    return Carried(str(of), of, unit, scale)


def plain(data_type: DataType) -> DataType:
    """The column's own type."""
    if isinstance(data_type, Carried):
        return data_type.of
    if isinstance(data_type, Array):
        return replace(data_type, element=plain(data_type.element))
    if isinstance(data_type, Map):
        return replace(data_type, value=plain(data_type.value))
    if isinstance(data_type, Struct):
        return Struct(tuple(plain_columns(data_type.fields)))
    return data_type


def plain_columns(columns: Sequence[Column]) -> list[Column]:
    """The same columns, each of its own type."""
    return [replace(c, type=plain(c.type)) for c in columns]


def carry(data_type: DataType, change: Callable[[DataType], DataType]) -> DataType:
    """A type with its innermost parts changed."""
    if isinstance(data_type, Array):
        return replace(data_type, element=carry(data_type.element, change))
    if isinstance(data_type, Map):
        return replace(data_type, value=carry(data_type.value, change))
    if isinstance(data_type, Struct):
        return Struct(tuple(replace(f, type=carry(f.type, change)) for f in data_type.fields))
    return change(data_type)


def carried_reader(kind: Carried, seen: Callable[[bool], None]) -> Reader:
    """Reads one value.

    :param seen: told whether it came as a number.
    """
    if kind.unit == "unscaled":
        return _unscaled(kind, seen)
    name = str(kind.of)
    from_text = PRIMITIVES["date"] if name == "date" else _instant_text(name)
    from_number = _from_number(kind)

    def read(text: str, i: int) -> tuple[Any, int]:
        if text[i] == '"':
            seen(False)
            return from_text(text, i)
        match = match_integer(text, i)
        if match is None or kind.unit == "text":
            raise unexpected(text, i, name)
        seen(True)
        return from_number(match.group()), match.end()

    return read


def _instant_text(name: str) -> Reader:
    def read(text: str, i: int) -> tuple[Any, int]:
        found, end = read_string(text, i)
        return micros(found, name, zoned=name == "timestamp"), end

    return read


def _from_number(kind: Carried) -> Callable[[str], int]:
    if kind.unit == "text":
        return int
    times, per = (1, 1) if kind.unit == "days" else kind.factor
    low, high = (MIN_DATE, MAX_DATE) if kind.unit == "days" else (MIN_MICRO, MAX_MICRO)
    what = {"days": "days", "millis": "milliseconds", "micros": "microseconds", "nanos": "nanoseconds"}[kind.unit]

    def convert(found: str) -> int:
        number = int(found) * times if len(found) <= 20 else None
        if number is None or not low <= number // per <= high:
            raise BadValue(f"found {short(found)}, expected {kind.of}: {what} since 1970, in the years 0001 to 9999")
        if number % per:
            raise BadValue(f"found {found}, expected {kind.of}: whole microseconds")
        return number // per

    return convert


def _unscaled(kind: Carried, seen: Callable[[bool], None]) -> Reader:
    assert isinstance(kind.of, Decimal)
    as_number, convert = decimal_reader(kind.of), unscaled(kind)

    def read(text: str, i: int) -> tuple[Any, int]:
        if text[i] != '"':
            seen(True)
            return as_number(text, i)
        seen(False)
        found, end = read_string(text, i)
        return convert(found), end

    return read


def unscaled(kind: Carried) -> Callable[[str], decimal.Decimal]:
    """From base64 of a big-endian two's complement, Connect's Decimal, to the column's decimal."""
    assert isinstance(kind.of, Decimal)
    scale = kind.of.scale
    shift, limit = scale - kind.scale, 10**kind.of.precision

    def convert(found: str) -> decimal.Decimal:
        try:
            data = from_base64(found)
        except BadValue:
            raise BadValue(f'found "{short(found)}", expected {kind.of}: base64 of its unscaled value') from None
        if len(data) > 64:
            raise BadValue(f'found "{short(found)}", expected {kind.of}: it has too many digits')
        number = int.from_bytes(data, "big", signed=True)
        if shift < 0 and number % 10**-shift:
            raise BadValue(f'found "{short(found)}" with {kind.scale} digits after the point, expected {kind.of}')
        number = number * 10**shift if shift >= 0 else number // 10**-shift
        if not -limit < number < limit:
            raise BadValue(f'found "{short(found)}", expected {kind.of}: it has too many digits')
        return decimal.Decimal((number < 0, tuple(map(int, str(abs(number)))), -scale))

    return convert
