"""Values as Connect writes them in text."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType

INSTANT = "yyyy-MM-dd'T'HH:mm:ss.SSS'Z'"


def as_text(column: Column, type_: DataType) -> Column:
    """A value in text: binaries in base64, timestamps in ISO 8601 (UTC, milliseconds), arrays, maps and structs in JSON."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType, TimestampNTZType, TimestampType

    if isinstance(type_, BinaryType):
        return F.translate(F.base64(column), "\r\n", "")  # some Sparks break long lines
    if isinstance(type_, (TimestampType, TimestampNTZType)):
        return F.date_format(column, INSTANT)
    if isinstance(type_, (ArrayType, MapType, StructType)):
        return F.to_json(column)
    return column.cast("string")


def shown(column: Column, type_: DataType) -> Column:
    """A value in a message: cut to 100 characters."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType

    text = F.substring(as_text(column, type_), 1, 100)
    return F.concat(F.lit('"'), text, F.lit('"')) if isinstance(type_, StringType) else text
