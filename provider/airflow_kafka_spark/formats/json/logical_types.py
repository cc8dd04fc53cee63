"""Values that other types carry: Connect's and Debezium's logical types, as numbers and base64 in JSON.

``Carried`` stands in the place of a column's type where decoders are built; the columns themselves keep their types
(:func:`plain`).
"""

from __future__ import annotations

import decimal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from airflow_kafka_spark.formats.text import (
    MAX_MICRO,
    MIN_DATE,
    MIN_MICRO,
    PRIMITIVES,
    BadValue,
    Reader,
    day_number,
    decimal_reader,
    from_base64,
    match_integer,
    micros,
    read_string,
    short,
    unexpected,
)
from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Primitive, Struct

Unit = Literal["days", "millis", "micros", "nanos", "unscaled", "variable", "text", "iso"]
"""What a number counts, from 1970 on; ``unscaled`` is a decimal's unscaled value in base64, ``variable`` the same beside its
scale; ``text``: numbers are refused, ``iso``: so are they, and what has no zone may end in ``Z``."""

VARIABLE = (Column("scale", Primitive("int"), nullable=False), Column("value", Primitive("binary"), nullable=False))
"""Debezium's VariableScaleDecimal: of a column without a scale."""
_LARGEST_SCALE = 1000

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


def as_sent(wanted: Sequence[Column], sent: Sequence[Column]) -> tuple[Column, ...]:
    """Columns, with what their values are carried by in another schema: the same number may mean something else there."""
    known = {c.name: c.type for c in sent}
    return tuple(replace(c, type=_as_sent(c.type, known[c.name])) if c.name in known else c for c in wanted)


def _as_sent(wanted: DataType, sent: DataType) -> DataType:
    if isinstance(wanted, Struct) and isinstance(sent, Struct):
        return Struct(as_sent(wanted.fields, sent.fields))
    if isinstance(wanted, Array) and isinstance(sent, Array):
        return replace(wanted, element=_as_sent(wanted.element, sent.element))
    if isinstance(wanted, Map) and isinstance(sent, Map):
        return replace(wanted, value=_as_sent(wanted.value, sent.value))
    if isinstance(sent, Carried) and _kind(plain(wanted)) == _kind(sent.of):
        return carried(plain(wanted), sent.unit, sent.scale)
    return wanted


def _kind(data_type: DataType) -> str:
    if isinstance(data_type, Decimal):
        return "decimal"
    return "timestamp" if str(data_type) == "timestamp_ntz" else str(data_type)


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
    if kind.unit in ("unscaled", "variable"):
        return _unscaled(kind, seen)
    name = str(kind.of)
    from_text = _iso_text(name) if kind.unit == "iso" else PRIMITIVES["date"] if name == "date" else _instant_text(name)
    from_number = _from_number(kind)

    def read(text: str, i: int) -> tuple[Any, int]:
        if text[i] == '"':
            seen(False)
            return from_text(text, i)
        match = match_integer(text, i)
        if match is None or kind.unit in ("text", "iso"):
            raise unexpected(text, i, name)
        seen(True)
        return from_number(match.group()), match.end()

    return read


def _instant_text(name: str) -> Reader:
    def read(text: str, i: int) -> tuple[Any, int]:
        found, end = read_string(text, i)
        return micros(found, name, zoned=name == "timestamp"), end

    return read


def _iso_text(name: str) -> Reader:
    """What Debezium makes of dates and wall clocks with ``time.precision.mode=isostring``: as if they were in UTC."""

    def read(text: str, i: int) -> tuple[Any, int]:
        found, end = read_string(text, i)
        if name == "date":
            return day_number(found.removesuffix("Z")), end
        return micros(found, name, zoned=found.endswith("Z")), end

    return read


def _from_number(kind: Carried) -> Callable[[str], int]:
    if kind.unit in ("text", "iso"):
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
    wanted, scale = kind.of, kind.scale

    def convert(found: str) -> decimal.Decimal:
        try:
            data = from_base64(found)
        except BadValue:
            raise BadValue(f'found "{short(found)}", expected {wanted}: base64 of its unscaled value') from None
        return _scaled(data, scale, wanted, f'"{short(found)}"')

    return convert


def variable(data: bytes, scale: int, kind: Carried) -> decimal.Decimal:
    """The column's decimal of a VariableScaleDecimal.

    :param data: the unscaled value, in big-endian two's complement.
    :param scale: how many of its digits stand behind the point.
    :raises BadValue: the column does not take it.
    """
    assert isinstance(kind.of, Decimal)
    if not -_LARGEST_SCALE < scale < _LARGEST_SCALE:
        raise BadValue(f"found a scale of {scale}, which no column has")
    return _scaled(data, scale, kind.of, f"an unscaled value of {len(data)} bytes")


def _scaled(data: bytes, sent: int, wanted: Decimal, found: str) -> decimal.Decimal:
    """An unscaled value of one scale as a decimal of another, without rounding."""
    if len(data) > 64:
        raise BadValue(f"found {found}, expected {wanted}: it has too many digits")
    number, shift = int.from_bytes(data, "big", signed=True), wanted.scale - sent
    if shift < 0 and number % 10**-shift:
        raise BadValue(f"found {found} with {sent} digits after the point, expected {wanted}")
    number = number * 10**shift if shift >= 0 else number // 10**-shift
    if abs(number) >= 10**wanted.precision:
        raise BadValue(f"found {found}, expected {wanted}: it has too many digits")
    return decimal.Decimal((number < 0, tuple(map(int, str(abs(number)))), -wanted.scale))
