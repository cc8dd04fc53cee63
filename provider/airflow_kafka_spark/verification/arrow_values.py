"""Values of Arrow columns in the forms in which they are compared."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.verification.forms import Family, Form, Row, of_value

if TYPE_CHECKING:
    import pyarrow as pa

_SINCE_2000 = 946_684_800_000_000
"""Microseconds from 1970 to 2000."""
_FRACTION_ZEROS = (r"(\.[0-9]*[1-9])0+$|\.0*$", r"\1")


def family_of(kind: pa.DataType) -> Family:
    """Return what the values of a column are."""
    import pyarrow as pa

    is_a = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return "uuid" if kind.extension_name == "arrow.uuid" else family_of(kind.storage_type)
    if is_a.is_dictionary(kind):
        return family_of(kind.value_type)
    if is_a.is_timestamp(kind):
        return "zoned" if kind.tz else "local"
    tests: tuple[tuple[Any, Family], ...] = (
        (is_a.is_integer, "integer"),
        (is_a.is_boolean, "boolean"),
        (is_a.is_decimal, "decimal"),
        (is_a.is_float32, "single"),
        (is_a.is_float64, "double"),
        (is_a.is_string, "text"),
        (is_a.is_large_string, "text"),
        (is_a.is_string_view, "text"),
        (is_a.is_binary, "binary"),
        (is_a.is_large_binary, "binary"),
        (is_a.is_binary_view, "binary"),
        (is_a.is_fixed_size_binary, "binary"),
        (is_a.is_date, "date"),
        (is_a.is_time, "time"),
    )
    return next((family for holds, family in tests if holds(kind)), "nested")


def rows_of(batch: pa.RecordBatch, columns: Sequence[str], forms: Sequence[Form]) -> Iterator[Row]:
    """Yield the rows of a batch, each with its values in their forms."""
    values = [_column(batch.column(name), form) for name, form in zip(columns, forms, strict=True)]
    return zip(*values, strict=True)


def _column(column: pa.Array, form: Form) -> list[str | None]:
    import pyarrow as pa
    import pyarrow.compute as pc

    column = _plain(column)
    family = family_of(column.type)
    if form == "instant":
        micros = column.cast(pa.timestamp("us", getattr(column.type, "tz", None)), safe=False).cast(pa.int64())
        return [None if value is None else struct.pack(">q", value - _SINCE_2000).hex() for value in micros.to_pylist()]
    if form == "date":
        days = column.cast(pa.date32()).cast(pa.int32())
        return [None if value is None else struct.pack(">i", value - 10_957).hex() for value in days.to_pylist()]
    if form in ("single", "double", "json"):
        return [of_value(form, value) for value in column.to_pylist()]
    if form == "binary":
        return [None if value is None else value.hex() for value in column.to_pylist()]
    if family == "decimal":
        return [None if value is None else _decimal(value) for value in column.to_pylist()]
    if family == "boolean":
        column = column.cast(pa.int8())
    text = column.cast(pa.string())
    if form in ("decimal", "time") and family not in ("integer", "boolean"):
        text = pc.replace_substring_regex(text, *_FRACTION_ZEROS)
    elif form == "uuid":
        text = pc.utf8_lower(text)
    elif form == "trimmed":
        text = pc.utf8_rtrim(text, " ")
    return text.to_pylist()


def _plain(column: pa.Array) -> pa.Array:
    """Return a column without dictionary encoding, and without extension types: a UUID as text."""
    import pyarrow as pa

    if isinstance(column.type, pa.BaseExtensionType):
        storage = column.storage
        if column.type.extension_name != "arrow.uuid":
            return _plain(storage)
        return pa.array([None if value is None else str(uuid.UUID(bytes=value)) for value in storage.to_pylist()], pa.string())
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _decimal(value: Decimal) -> str:
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
