"""Conversions with which Spark reads columns in the types of ``schema``, and which change values without an error.

Spark's reader of Parquet refuses most conversions. Its reader of ORC makes NULL, or another value, of a value that does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.formats.types import Array, Column, DataType, Decimal, Map, Struct, Text
from airflow_kafka_spark.sources.files.store import FileFooter, ListedFile

if TYPE_CHECKING:
    import pyarrow as pa

_INTEGERS = {"tinyint": 8, "smallint": 16, "int": 32, "bigint": 64}
"""Bits of Spark's integers."""
_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}
"""Maximum number of digits of an integer, by its bits."""


def require_unchanged_values(
    source: str, format: str, files: Sequence[ListedFile], found: Sequence[FileFooter], wanted: Sequence[Column]
) -> None:
    """Check that Spark reads the columns of all files in the types of ``schema`` without changing values.

    :param source: the source's URI, for the message.
    :param format: ``parquet`` or ``orc``.
    :param wanted: the columns of ``schema``.
    :raises SourceRejected: it does not.
    """
    types = {column.name.lower(): column.type for column in wanted}
    for file, footer in zip(files, found, strict=True):
        for field in footer.schema:
            if (kind := types.get(field.name.lower())) is not None and _changes_values(format, field.type, kind):
                raise SourceRejected(
                    source,
                    f"column `{field.name}` of `{file.name}` is {field.type}, and `schema` has {kind}: Spark makes NULL or "
                    "another value of what does not fit, without an error",
                    "Give the column in `schema` the type that it has in the files, and convert it with `transforms`",
                )


def _changes_values(format: str, kind: pa.DataType, wanted: DataType) -> bool:
    """Return True if a value of a column may be another one, or NULL, when Spark reads it in a type."""
    import pyarrow as pa

    types = pa.types
    if isinstance(wanted, Array | Map | Struct):
        return any(_changes_values(format, *pair) for pair in _list_inner(kind, wanted))
    if format == "parquet":
        # The digits are read without the point.
        return types.is_decimal(kind) and kind.scale > 0 and str(wanted) in _INTEGERS
    if isinstance(wanted, Text):
        return False
    if types.is_string(kind):
        return str(wanted) != "binary"
    if types.is_integer(kind):
        return _changes_integers(kind.bit_width, wanted)
    if types.is_floating(kind):
        return str(wanted) not in (("float", "double") if kind.bit_width <= 32 else ("double",))
    if types.is_decimal(kind):
        if not isinstance(wanted, Decimal):
            return True
        return wanted.scale < kind.scale or wanted.precision - wanted.scale < kind.precision - kind.scale
    return types.is_timestamp(kind) and str(wanted) != "timestamp"


def _list_inner(kind: pa.DataType, wanted: Array | Map | Struct) -> list[tuple[pa.DataType, DataType]]:
    """Return the types within a nested type, each with the one in which it is read; none for a type of another form."""
    import pyarrow as pa

    if isinstance(wanted, Array):
        return [(kind.value_type, wanted.element)] if pa.types.is_list(kind) else []
    if isinstance(wanted, Map):
        return [(kind.key_type, wanted.key), (kind.item_type, wanted.value)] if pa.types.is_map(kind) else []
    named = {column.name.lower(): column.type for column in wanted.fields}
    fields = list(kind) if pa.types.is_struct(kind) else []
    return [(field.type, named[field.name.lower()]) for field in fields if field.name.lower() in named]


def _changes_integers(bits: int, wanted: DataType) -> bool:
    """Return True if an integer of ORC may be another value in a type."""
    if isinstance(wanted, Decimal):
        return wanted.precision - wanted.scale < _DIGITS[bits]
    name = str(wanted)
    if name in _INTEGERS:
        return _INTEGERS[name] < bits
    # Spark writes a `timestamp_ntz` as an integer of 64 bits.
    return not ((name == "double" and bits <= 32) or (name == "timestamp_ntz" and bits == 64) or name == "boolean")
