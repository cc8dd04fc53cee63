"""What transforms have made of records, keys and values as bytes again: what they change, and the format it is written in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.formats import Json, Raw, String
from airflow_kafka_spark.formats.base import Format, Part, spark_column

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

    from airflow_kafka_spark.transforms.chain import TransformLike

MADE, BYTES = "__kafka_made_", "__kafka_bytes_"
"""How the names of columns begin that hold a part as the transforms have made it, and as it is written."""


def transformed(frame: DataFrame, transforms: Sequence[TransformLike]) -> tuple[DataFrame, frozenset[str]]:
    """Return the frame that a chain makes of a record frame, and the parts that it may have changed.

    :return: the parts under names that begin with :data:`MADE`, since fields of a value may be called like them, and what is
        carried.
    :raises ValidationError: a transform does not fit, named by its place.
    """
    from pyspark.sql import functions as F

    from airflow_kafka_spark.transforms import apply_chain

    changed: set[str] = set()
    frame = apply_chain(frame, transforms, changed=changed)
    kept = [name for name in frame.columns if name.startswith("__kafka_")]
    named = ("key", "value", "topic", "partition", "timestamp", "headers")
    return frame.select(*(F.col(name).alias(MADE + name) for name in named), *map(spark_column, kept)), frozenset(changed)


def with_bytes(frame: DataFrame, part: Part, where: str, fine: Column, format: Format | None, read: Format | None) -> DataFrame:
    """Return the frame of :func:`transformed` with the bytes of a key or a value.

    :param where: the operator's argument that says how it is written.
    :param fine: which rows are written at all.
    :param format: how; None: as Connect would by its type: a struct as JSON, a number or a text as text, bytes as they are.
    :param read: how it was read: what still is one column of bytes or text is written so.
    :raises ValidationError: it cannot be written so.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, MapType, StructType

    whole, found = F.col(MADE + part), frame.schema[MADE + part].dataType
    names = found.names if isinstance(found, StructType) else [part]
    if isinstance(found, (ArrayType, MapType)):
        what = f"behind the transforms the {part} is {found.simpleString()}; expected fields, or one number, text or binary"
        raise ValidationError([Problem("transforms", what, "Give it a name with HoistField")])
    writer = format or _fitting(found, read)
    if problems := writer.encoding_problems(where, names):
        raise ValidationError(problems)
    before = [spark_column(name) for name in frame.columns]
    fields: list[Column] = [whole.getField(n).alias(n) for n in names] if isinstance(found, StructType) else [whole.alias(part)]
    # In two steps, so that a field is named as the format names it, whatever else is called so.
    written = F.when(fine & whole.isNotNull(), writer.encode(names))
    return frame.select(*before, *fields).select(*before, written.alias(BYTES + part))


def _fitting(found: DataType, read: Format | None) -> Format:
    """Return the format in which Connect would write a type."""
    from pyspark.sql.types import BinaryType, StructType

    if isinstance(found, StructType):
        return read if isinstance(read, (Raw, String)) and found.names == [read.column] else Json()
    return Raw() if isinstance(found, BinaryType) else String()
