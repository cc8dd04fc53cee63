"""What a record looks like in Spark, and how its parts are reached: the ground that transforms and predicates stand on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem, ValidationError
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
"""How the names of columns begin that are carried past all transforms."""

MEETS = "__kafka_meets"
"""Whether a record meets the predicate at hand."""

SCOPE = "record"
"""The name by which SQL reaches all parts of a record, whatever the value's fields are called."""


@dataclass(frozen=True)
class Record:
    """The types of a record's parts, before the job runs.

    :param schema: the frame's.
    """

    schema: StructType

    def type_of(self, part: str) -> DataType:
        """The type of a part."""
        return self.schema[part].dataType

    def fields(self, part: str, option: str) -> dict[str, DataType]:
        """The fields of a key or a value, in order.

        :param option: what of the transform needs them, for the message.
        :raises ValidationError: it is no struct.
        """
        from pyspark.sql.types import StructType

        found = self.type_of(part)
        if not isinstance(found, StructType):
            what = f"found a {part} of type {found.simpleString()}; expected a struct, whose fields can be named"
            raise ValidationError(
                [Problem(option, what, "Decode it with a format that has columns, or hoist it with HoistField")]
            )
        return {field.name: field.dataType for field in found}

    def known(self, part: str, option: str, names: Sequence[str]) -> dict[str, DataType]:
        """The fields of a key or a value, of which these must be.

        :raises ValidationError: it is no struct, or some are missing: all of them are told at once.
        """
        fields = self.fields(part, option)
        listed = ", ".join(f"`{name}`" for name in fields) or "none"
        problems = [
            Problem(option, f"the {part} has no field `{name}`; its fields are {listed}", "Correct the name")
            for name in names
            if name not in fields
        ]
        if problems:
            raise ValidationError(problems)
        return fields


def carried(frame: DataFrame) -> list[str]:
    """The names of the columns that are no part of a record."""
    return [name for name in frame.columns if name not in PARTS]


def is_record(frame: DataFrame) -> Column:
    """The rows that a transform may look at: records, without an error so far, not left out and not sent elsewhere."""
    from pyspark.sql import functions as F

    fine = F.col(ERROR).isNull() if ERROR in frame.columns else F.lit(True)
    fine = fine & F.col(ROUTE).isNull() if ROUTE in frame.columns else fine
    fine = fine & ~F.col(LEFT_OUT) if LEFT_OUT in frame.columns else fine
    return fine & F.col(END).isNull() if END in frame.columns else fine


def applies(frame: DataFrame) -> Column:
    """The rows that the transform at hand changes: those that meet its predicate, too."""
    from pyspark.sql import functions as F

    return is_record(frame) & F.col(MEETS) if MEETS in frame.columns else is_record(frame)


def scoped(frame: DataFrame) -> DataFrame:
    """A frame over which SQL of a user's is understood: the value's fields by their names, a record's parts by theirs where no
    field of the value is called so, and all parts always below :data:`SCOPE`."""
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    found = frame.schema["value"].dataType
    fields = [f.name for f in found] if isinstance(found, StructType) else []
    taken = {name.lower() for name in fields}
    return frame.select(
        *(spark_column(name) for name in carried(frame)),
        F.struct(*PARTS).alias(SCOPE),
        *(F.col("value").getField(f).alias(f) for f in fields if f.lower() != SCOPE and not f.lower().startswith(CARRIED)),
        *(F.col(part) for part in PARTS if part not in taken),
    )


def unscoped(frame: DataFrame) -> list[Column]:
    """The columns of a frame, seen from what :func:`scoped` made of it."""
    from pyspark.sql import functions as F

    return [
        *(F.col(SCOPE).getField(part).alias(part) for part in PARTS),
        *(spark_column(name) for name in carried(frame)),
    ]


def rebuilt(column: Column, fields: Mapping[str, Column]) -> Column:
    """A struct with other fields; null where it was null."""
    from pyspark.sql import functions as F

    return F.when(column.isNotNull(), F.struct(*(field.alias(name) for name, field in fields.items())))


def same(one: DataType, other: DataType) -> bool:
    """Whether two types are the same but for what may be null."""
    return one.simpleString() == other.simpleString()


def both(new: DataType, old: DataType, path: str) -> DataType:
    """The type that holds values of two: a struct has the fields of both, those of the new one first.

    :param path: which field it is, for the message.
    :raises ValidationError: a type differs.
    """
    from pyspark.sql.types import NullType, StructField, StructType

    if same(new, old) or isinstance(old, NullType):
        return new
    if isinstance(new, NullType):
        return old
    if isinstance(new, StructType) and isinstance(old, StructType):
        kept = {f.name: f.dataType for f in old}
        fields = [
            StructField(f.name, both(f.dataType, kept[f.name], f"{path}.{f.name}") if f.name in kept else f.dataType) for f in new
        ]
        made = {f.name for f in new}
        return StructType([*fields, *(StructField(f.name, f.dataType) for f in old if f.name not in made)])
    what = (
        f"`{path}` is {new.simpleString()} in the records that meet the predicate, but {old.simpleString()} in the others; "
        "expected one type for all records"
    )
    action = "Leave the predicate out, or write to another field"
    raise ValidationError([Problem("predicate", what, action)])


def conformed(column: Column, have: DataType, want: DataType) -> Column:
    """A value in another type: by field, where a struct has others; null where the type is another.

    :param column: is named more than once in what is returned: a mere column, or a field of one.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    if same(have, want):
        return column
    if isinstance(have, StructType) and isinstance(want, StructType):
        known = {f.name: f.dataType for f in have}
        fields = {
            f.name: conformed(column.getField(f.name), known[f.name], f.dataType)
            if f.name in known
            else F.lit(None).cast(f.dataType)
            for f in want
        }
        return rebuilt(column, fields)
    return F.lit(None).cast(want)


def listed(names: str | Sequence[str]) -> tuple[str, ...]:
    """Names as Connect writes them (``a,b``) or in a list."""
    if isinstance(names, str):
        return tuple(name.strip() for name in names.split(",") if name.strip())
    return tuple(names)


def pairs(given: str | Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Pairs as Connect writes them (``a:b,c:d``) or in a mapping.

    :raises ValueError: they are no such pairs, one has no colon, or more than one; its message tells which.
    """
    if isinstance(given, Mapping):
        return dict(given)
    if not isinstance(given, (str, Sequence)):
        raise ValueError(f"found {given!r}; expected pairs of names")
    found = {}
    for pair in listed(given):
        left, colon, right = pair.partition(":") if isinstance(pair, str) else ("", "", "")
        if not (left.strip() and colon and right.strip()) or ":" in right:
            raise ValueError(f"found {pair!r}; expected two names with one colon between")
        found[left.strip()] = right.strip()
    return found
