"""Record frames: the columns of a record in Spark, their types, and their names in expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.formats.base import spark_column
from airflow_kafka_spark.formats.internal_columns import END, ERROR, LEFT_OUT, ROUTE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType


PARTS = ("key", "value", "topic", "partition", "offset", "timestamp", "headers")
"""The columns of a record frame, in order. Every other one begins with :data:`CARRIED`."""

FIXED = {
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "headers": "array<struct<key:string,value:binary>>",
}
"""The types of the parts that no transform may change."""

CARRIED = "__kafka_"
"""Prefix of the columns that are carried past all transforms."""

MEETS = "__kafka_meets"
"""The column that says whether a record meets the current predicate."""

SCOPE = "record"
"""The name by which SQL reaches all parts of a record, even if a field of the value has the name of a part."""


@dataclass(frozen=True)
class RecordSchema:
    """The types of a record's parts, from Spark's analyzer, before the job runs.

    :param schema: the schema of the record frame.
    """

    schema: StructType

    def type_of(self, part: str) -> DataType:
        """Return the type of a part."""
        return self.schema[part].dataType

    def fields(self, part: str, option: str) -> dict[str, DataType]:
        """Return the fields of the key or value, in order.

        :param option: the transform's option that needs them, for the message.
        :raises ValidationError: the key or value is no struct.
        """
        from pyspark.sql.types import StructType

        found = self.type_of(part)
        if not isinstance(found, StructType):
            what = f"found a {part} of type {found.simpleString()}; expected a struct, whose fields can be named"
            raise ValidationError(
                [Problem(option, what, "Decode it with a format that has columns, or hoist it with HoistField")]
            )
        return {field.name: field.dataType for field in found}

    def require_fields(self, part: str, option: str, names: Sequence[str]) -> dict[str, DataType]:
        """Return the fields of the key or value, which must include these.

        :raises ValidationError: it is no struct; or some fields are missing, all of which are named.
        """
        fields = self.fields(part, option)
        listed = quote_names(fields) or "none"
        problems = [
            Problem(option, f"the {part} has no field `{name}`; its fields are {listed}", "Correct the name")
            for name in names
            if name not in fields
        ]
        if problems:
            raise ValidationError(problems)
        return fields


def carried_columns(frame: DataFrame) -> list[str]:
    """Return the names of the columns that are not parts of a record."""
    return [name for name in frame.columns if name not in PARTS]


def is_record(frame: DataFrame) -> Column:
    """Return the condition for rows that transforms may change: records without an error, neither left out nor routed."""
    from pyspark.sql import functions as F

    fine = F.col(ERROR).isNull() if ERROR in frame.columns else F.lit(True)
    fine = fine & F.col(ROUTE).isNull() if ROUTE in frame.columns else fine
    fine = fine & ~F.col(LEFT_OUT) if LEFT_OUT in frame.columns else fine
    return fine & F.col(END).isNull() if END in frame.columns else fine


def applies_to(frame: DataFrame) -> Column:
    """Return the condition for rows that the current transform changes: records that also meet its predicate."""
    from pyspark.sql import functions as F

    return is_record(frame) & F.col(MEETS) if MEETS in frame.columns else is_record(frame)


def with_scope(frame: DataFrame) -> DataFrame:
    """Return a frame with the columns that users name in SQL.

    These are the value's fields, the parts of the record whose names no field has, and all parts below :data:`SCOPE`.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    found = frame.schema["value"].dataType
    fields = [f.name for f in found] if isinstance(found, StructType) else []
    taken = {name.lower() for name in fields}
    return frame.select(
        *(spark_column(name) for name in carried_columns(frame)),
        F.struct(*PARTS).alias(SCOPE),
        *(F.col("value").getField(f).alias(f) for f in fields if f.lower() != SCOPE and not f.lower().startswith(CARRIED)),
        *(F.col(part) for part in PARTS if part not in taken),
    )


def without_scope(frame: DataFrame) -> list[Column]:
    """Return the columns of a frame, as expressions over the result of :func:`with_scope`."""
    from pyspark.sql import functions as F

    return [
        *(F.col(SCOPE).getField(part).alias(part) for part in PARTS),
        *(spark_column(name) for name in carried_columns(frame)),
    ]


def rebuild_struct(column: Column, fields: Mapping[str, Column]) -> Column:
    """Return a struct with other fields; null if it was null."""
    from pyspark.sql import functions as F

    return F.when(column.isNotNull(), F.struct(*(field.alias(name) for name, field in fields.items())))


def same_type(one: DataType, other: DataType) -> bool:
    """Return True if two types differ at most in nullability."""
    return one.simpleString() == other.simpleString()


def common_type(new: DataType, old: DataType, path: str) -> DataType:
    """Return the type that holds values of both types. A struct gets the fields of both, those of the new type first.

    :param path: the field's path, for the message.
    :raises ValidationError: the types of a field differ.
    """
    from pyspark.sql.types import NullType, StructField, StructType

    if same_type(new, old) or isinstance(old, NullType):
        return new
    if isinstance(new, NullType):
        return old
    if isinstance(new, StructType) and isinstance(old, StructType):
        kept = {f.name: f.dataType for f in old}
        fields = [
            StructField(f.name, common_type(f.dataType, kept[f.name], f"{path}.{f.name}") if f.name in kept else f.dataType)
            for f in new
        ]
        made = {f.name for f in new}
        return StructType([*fields, *(StructField(f.name, f.dataType) for f in old if f.name not in made)])
    what = (
        f"`{path}` is {new.simpleString()} in the records that meet the predicate, but {old.simpleString()} in the others; "
        "expected one type for all records"
    )
    action = "Leave the predicate out, or write to another field"
    raise ValidationError([Problem("predicate", what, action)])


def conform(column: Column, have: DataType, want: DataType) -> Column:
    """Return a value in another type, structs field by field; null if the types do not agree.

    :param column: a plain column or a field of one, because the result uses it more than once.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    if same_type(have, want):
        return column
    if isinstance(have, StructType) and isinstance(want, StructType):
        known = {f.name: f.dataType for f in have}
        fields = {
            f.name: conform(column.getField(f.name), known[f.name], f.dataType)
            if f.name in known
            else F.lit(None).cast(f.dataType)
            for f in want
        }
        return rebuild_struct(column, fields)
    return F.lit(None).cast(want)
