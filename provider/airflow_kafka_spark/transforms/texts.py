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
    from pyspark.sql import types as t

    if isinstance(type_, t.BinaryType):
        return F.translate(F.base64(column), "\r\n", "")  # some Sparks break long lines
    if isinstance(type_, (t.TimestampType, t.TimestampNTZType)):
        return F.date_format(column, INSTANT)
    if isinstance(type_, (t.ArrayType, t.MapType, t.StructType)):
        return F.to_json(column, {"ignoreNullFields": "false"})
    if isinstance(type_, (t.FloatType, t.DoubleType)):
        return _plain(column)
    return column.cast("string")


def _plain(number: Column) -> Column:
    """A float as Java writes it, but up to 10^15 without an exponent: ``63521704.02``, as Connect's documentation has it."""
    from pyspark.sql import functions as F

    text = number.cast("string")
    # From Java's digits, which tell the number: not from the number itself, which is not exact.
    digits = F.regexp_replace(text.try_cast("decimal(38,20)").cast("string"), r"(\.[0-9]+?)0+$", "$1")
    return F.when((F.abs(number) >= 1e7) & (F.abs(number) < 1e15), digits).otherwise(text)


def shown(column: Column, type_: DataType) -> Column:
    """A value in a message: cut to 100 characters."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StringType

    text = F.substring(as_text(column, type_), 1, 100)
    return F.concat(F.lit('"'), text, F.lit('"')) if isinstance(type_, StringType) else text
