"""Values that other types carry: Connect's and Debezium's logical types, as numbers and base64 in JSON.

``Carried`` stands in the place of a column's type where decoders are built; the columns themselves keep their types
(:func:`plain`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Primitive, Struct

Unit = Literal["days", "millis", "micros", "nanos", "unscaled", "variable", "text", "iso"]
"""What a number counts, from 1970 on; ``unscaled`` is a decimal's unscaled value in base64, ``variable`` the same beside its
scale; ``text``: numbers are refused, ``iso``: so are they, and what has no zone may end in ``Z``."""

VARIABLE = (Column("scale", Primitive("int"), nullable=False), Column("value", Primitive("binary"), nullable=False))
"""Debezium's VariableScaleDecimal: of a column without a scale."""

_PER_MICRO = {"millis": (1000, 1), "micros": (1, 1), "nanos": (1, 1000)}


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
