"""Types, literals and casts of Spark's, as Arrow has them."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa

from airflow_kafka_spark.road.arrow.building import Unknown

TEXT, LONG, INSTANT = pa.string(), pa.int64(), pa.timestamp("us", "UTC")


def is_plain(kind: pa.DataType) -> bool:
    """Return True if values of a type compare in Arrow as in Spark."""
    t = pa.types
    return bool(
        t.is_integer(kind) or t.is_floating(kind) or t.is_boolean(kind) or t.is_decimal(kind)
        or kind in (TEXT, pa.binary(), pa.date32(), pa.timestamp("us", "UTC"), pa.timestamp("us"))
    )  # fmt: skip


def cast_of(had: pa.DataType, wanted: pa.DataType, tries: Callable[[], bool]) -> str | None:
    """Return the function that casts as Spark does; None if no function is proven to.

    :param tries: whether it is a ``try_cast``. Other casts fail for a row that does not fit, which nothing here does.
    """
    if _fits_all(had, wanted):
        return "widened"
    t = pa.types
    if wanted == TEXT and (t.is_integer(had) or t.is_boolean(had)):
        return "as_text"
    if had == TEXT and wanted == pa.binary():
        return "as_bytes"
    if had == pa.date32() and wanted == INSTANT:
        return "midnight_of"
    if t.is_integer(wanted):
        trying = "narrowed" if t.is_integer(had) else "cut_off" if t.is_floating(had) else "whole_number" if had == TEXT else None
        return trying if trying and tries() else None
    return None


def _fits_all(had: pa.DataType, wanted: pa.DataType) -> bool:
    """Return True if a type holds all numbers of another one, or rounds them."""
    t = pa.types
    if t.is_decimal(wanted):
        before = _DIGITS[had.bit_width] if t.is_integer(had) else had.precision - had.scale if t.is_decimal(had) else None
        behind = had.scale if t.is_decimal(had) else 0
        return before is not None and wanted.precision - wanted.scale >= before and wanted.scale >= behind
    if t.is_integer(had):
        return t.is_floating(wanted) or (t.is_integer(wanted) and wanted.bit_width > had.bit_width)
    return had == pa.float32() and wanted == pa.float64()


_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}


def whole_literal(value: Any, kind: pa.DataType) -> Any:
    """Return a whole number, or the number of a text, in a numeric type that holds it; None for anything else."""
    t = pa.types
    if isinstance(value, str) and re.fullmatch("-?[0-9]{1,18}", value):
        value = int(value)
    if type(value) is not int:
        return None
    if t.is_integer(kind):
        return value if -(2 ** (kind.bit_width - 1)) <= value < 2 ** (kind.bit_width - 1) else None
    if t.is_decimal(kind):
        return Decimal(value) if len(str(abs(value))) <= kind.precision - kind.scale else None
    return float(value) if t.is_floating(kind) and abs(value) <= 2 ** (53 if kind == pa.float64() else 24) else None


def type_of(told: Any) -> pa.DataType:
    """Return a type of Spark as an Arrow type.

    :raises Unknown: none that is read from Kafka.
    """
    from pyspark.sql.pandas.types import to_arrow_type
    from pyspark.sql.types import StructField

    if told == "void":
        return pa.null()
    field = {"name": "it", "type": told, "nullable": True, "metadata": {}}
    try:
        return to_arrow_type(StructField.fromJson(field).dataType)
    except Exception:
        raise Unknown(f"the type {told}") from None


def value_of(told: str | None, kind: pa.DataType) -> Any:
    """Return the value of a literal.

    :raises Unknown: of a type whose text is not plain.
    """
    t = pa.types
    if told is None:
        return None
    if t.is_boolean(kind):
        return told == "true"
    if t.is_integer(kind):
        return int(told)
    if kind == TEXT:
        return told
    if t.is_decimal(kind):
        return Decimal(told)
    if t.is_floating(kind):
        return float(told)
    raise Unknown(f"a literal of type {kind}")
