"""Values that other types carry: Connect's and Debezium's logical types, as numbers and base64 in JSON.

``Carried`` stands in the place of a column's type where decoders are built; the columns themselves keep their types
(:func:`sql_type`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Primitive, Struct

Representation = Literal["days", "millis", "micros", "nanos", "unscaled", "variable", "text", "iso"]
"""What a number counts, from 1970 on; ``unscaled`` is a decimal's unscaled value in base64, ``variable`` the same beside its
scale; ``text``: numbers are refused, ``iso``: so are they, and what has no zone may end in ``Z``."""

VARIABLE_SCALE_DECIMAL = (Column("scale", Primitive("int"), nullable=False), Column("value", Primitive("binary"), nullable=False))
"""Debezium's VariableScaleDecimal: of a column without a scale."""

_PER_MICRO = {"millis": (1000, 1), "micros": (1, 1), "nanos": (1, 1000)}


@dataclass(frozen=True)
class LogicalType(Primitive):
    """A date, a timestamp, a wall clock or a decimal that comes as another type.

    Dates and timestamps are taken as ISO texts, too; decimals as plain numbers.

    :param of: what the column is.
    :param unit: what the number means.
    :param scale: of an unscaled decimal, as its sender has it.
    """

    of: DataType = Primitive("bigint")
    unit: Representation = "text"
    scale: int = 0

    @property
    def factor(self) -> tuple[int, int]:
        """A number in microseconds: by what to multiply, and by what to divide."""
        return _PER_MICRO[self.unit]


def logical_type(of: DataType, unit: Representation, scale: int = 0) -> LogicalType:
    """A type that is carried."""
    return LogicalType(str(of), of, unit, scale)


def sql_type(data_type: DataType) -> DataType:
    """The column's own type."""
    if isinstance(data_type, LogicalType):
        return data_type.of
    if isinstance(data_type, Array):
        return replace(data_type, element=sql_type(data_type.element))
    if isinstance(data_type, Map):
        return replace(data_type, value=sql_type(data_type.value))
    if isinstance(data_type, Struct):
        return Struct(tuple(sql_columns(data_type.fields)))
    return data_type


def sql_columns(columns: Sequence[Column]) -> list[Column]:
    """The same columns, each of its own type."""
    return [replace(c, type=sql_type(c.type)) for c in columns]


def with_writer_types(wanted: Sequence[Column], sent: Sequence[Column]) -> tuple[Column, ...]:
    """Columns, with what their values are carried by in another schema: the same number may mean something else there."""
    known = {c.name: c.type for c in sent}
    return tuple(replace(c, type=_with_writer_type(c.type, known[c.name])) if c.name in known else c for c in wanted)


def _with_writer_type(wanted: DataType, sent: DataType) -> DataType:
    if isinstance(wanted, Struct) and isinstance(sent, Struct):
        return Struct(with_writer_types(wanted.fields, sent.fields))
    if isinstance(wanted, Array) and isinstance(sent, Array):
        return replace(wanted, element=_with_writer_type(wanted.element, sent.element))
    if isinstance(wanted, Map) and isinstance(sent, Map):
        return replace(wanted, value=_with_writer_type(wanted.value, sent.value))
    if isinstance(sent, LogicalType) and _kind(sql_type(wanted)) == _kind(sent.of):
        return logical_type(sql_type(wanted), sent.unit, sent.scale)
    return wanted


def _kind(data_type: DataType) -> str:
    if isinstance(data_type, Decimal):
        return "decimal"
    return "timestamp" if str(data_type) == "timestamp_ntz" else str(data_type)


def map_leaf_types(data_type: DataType, change: Callable[[DataType], DataType]) -> DataType:
    """A type with its innermost parts changed."""
    if isinstance(data_type, Array):
        return replace(data_type, element=map_leaf_types(data_type.element, change))
    if isinstance(data_type, Map):
        return replace(data_type, value=map_leaf_types(data_type.value, change))
    if isinstance(data_type, Struct):
        return Struct(tuple(replace(f, type=map_leaf_types(f.type, change)) for f in data_type.fields))
    return change(data_type)
