"""The contract of a transform, and the record frames that it changes.

Transforms are the single message transforms of Kafka Connect, as Spark expressions. A record frame has the columns of a record
in Spark.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from airflow_kafka_spark.arguments import OptionsType
from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.formats.base import END, ERROR, LEFT_OUT, ROUTE, make_spark_column
from airflow_kafka_spark.transforms.predicates import Predicate

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

    from airflow_kafka_spark.sinks.base import Sink


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
"""The column that is true if a record meets the current predicate."""

SCOPE = "record"
"""The name by which SQL reaches all parts of a record, even if a field of the value has the name of a part."""


@dataclass(frozen=True)
class RecordSchema:
    """The types of a record's parts, from Spark's analyzer, before the job runs.

    :param schema: the schema of the record frame.
    """

    schema: StructType

    def get_type_of(self, part: str) -> DataType:
        """Return the type of a part."""
        return self.schema[part].dataType

    def list_fields(self, part: str, option: str) -> dict[str, DataType]:
        """Return the fields of the key or value, in order.

        :param option: the transform's option that needs them, for the message.
        :raises ValidationError: the key or value is no struct.
        """
        from pyspark.sql.types import StructType

        found = self.get_type_of(part)
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
        fields = self.list_fields(part, option)
        listed = quote_names(fields) or "none"
        problems = [
            Problem(option, f"the {part} has no field `{name}`; its fields are {listed}", "Correct the name")
            for name in names
            if name not in fields
        ]
        if problems:
            raise ValidationError(problems)
        return fields


def list_carried_columns(frame: DataFrame) -> list[str]:
    """Return the names of the columns that are not parts of a record."""
    return [name for name in frame.columns if name not in PARTS]


def is_record(frame: DataFrame) -> Column:
    """Return the condition for rows that transforms may change: records without an error, neither left out nor routed."""
    from pyspark.sql import functions as F

    fine = F.col(ERROR).isNull() if ERROR in frame.columns else F.lit(True)
    fine = fine & F.col(ROUTE).isNull() if ROUTE in frame.columns else fine
    fine = fine & ~F.col(LEFT_OUT) if LEFT_OUT in frame.columns else fine
    return fine & F.col(END).isNull() if END in frame.columns else fine


def make_condition(frame: DataFrame) -> Column:
    """Return the condition for rows that the current transform changes: records that also meet its predicate."""
    from pyspark.sql import functions as F

    return is_record(frame) & F.col(MEETS) if MEETS in frame.columns else is_record(frame)


def add_scope(frame: DataFrame) -> DataFrame:
    """Return a frame with the columns that users name in SQL.

    These are the value's fields, the parts of the record whose names no field has, and all parts below :data:`SCOPE`.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    found = frame.schema["value"].dataType
    fields = [f.name for f in found] if isinstance(found, StructType) else []
    taken = {name.lower() for name in fields}
    return frame.select(
        *(make_spark_column(name) for name in list_carried_columns(frame)),
        F.struct(*PARTS).alias(SCOPE),
        *(F.col("value").getField(f).alias(f) for f in fields if f.lower() != SCOPE and not f.lower().startswith(CARRIED)),
        *(F.col(part) for part in PARTS if part not in taken),
    )


def remove_scope(frame: DataFrame) -> list[Column]:
    """Return the columns of a frame, as expressions over the result of :func:`add_scope`."""
    from pyspark.sql import functions as F

    return [
        *(F.col(SCOPE).getField(part).alias(part) for part in PARTS),
        *(make_spark_column(name) for name in list_carried_columns(frame)),
    ]


def rebuild_struct(column: Column, fields: Mapping[str, Column]) -> Column:
    """Return a struct with other fields; null if it was null."""
    from pyspark.sql import functions as F

    return F.when(column.isNotNull(), F.struct(*(field.alias(name) for name, field in fields.items())))


def is_same_type(one: DataType, other: DataType) -> bool:
    """Return True if two types differ at most in nullability."""
    return one.simpleString() == other.simpleString()


def find_common_type(new: DataType, old: DataType, path: str) -> DataType:
    """Return the type that holds values of both types. A struct gets the fields of both, those of the new type first.

    :param path: the field's path, for the message.
    :raises ValidationError: the types of a field differ.
    """
    from pyspark.sql.types import NullType, StructField, StructType

    if is_same_type(new, old) or isinstance(old, NullType):
        return new
    if isinstance(new, NullType):
        return old
    if isinstance(new, StructType) and isinstance(old, StructType):
        kept = {f.name: f.dataType for f in old}
        fields = [
            StructField(f.name, find_common_type(f.dataType, kept[f.name], f"{path}.{f.name}") if f.name in kept else f.dataType)
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


def conform_column(column: Column, have: DataType, want: DataType) -> Column:
    """Return a value in another type, structs field by field; null if the types do not agree.

    :param column: a plain column or a field of one, because the result uses it more than once.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import StructType

    if is_same_type(have, want):
        return column
    if isinstance(have, StructType) and isinstance(want, StructType):
        known = {f.name: f.dataType for f in have}
        fields = {
            f.name: conform_column(column.getField(f.name), known[f.name], f.dataType)
            if f.name in known
            else F.lit(None).cast(f.dataType)
            for f in want
        }
        return rebuild_struct(column, fields)
    return F.lit(None).cast(want)


_BEFORE, _AT, _NOW, _NEW = f"{CARRIED}before", f"{CARRIED}at", f"{CARRIED}now", f"{CARRIED}new_"
"""Columns of :meth:`Transform.apply_guarded`: the record before the transform, and the number of its row before and after it; and
the prefix of the columns with new parts."""


@dataclass(frozen=True)
class Transform(metaclass=OptionsType):
    """Changes records, one at a time. Subclasses are frozen dataclasses of options.

    A subclass of your own implements :meth:`apply`, or derives from :class:`ColumnTransform`, which is faster and safer. Records
    that do not meet the predicate, records with an error and the rows that end a split always stay unchanged.

    :param predicate: only records that meet it are transformed; the others stay unchanged. Default: all records are.
    :param negate: transform the records that do not meet the predicate instead; default False.
    """

    predicate: Predicate | None = field(default=None, kw_only=True)
    negate: bool = field(default=False, kw_only=True)

    @property
    def name(self) -> str:
        """The name of the transform in messages: the name of its class."""
        return type(self).__name__

    @property
    def routes_to(self) -> str | None:
        """The topic to which the transform routes records; None if it routes none to a topic."""
        return None

    @property
    def captured_by(self) -> Sink | None:
        """The sink to which the transform routes records; None if it routes none to a sink."""
        return None

    def validate(self, where: str) -> list[Problem]:
        """Return all problems of the options, without Spark.

        :param where: the name of the transform in messages: ``transforms[0] Cast``.
        """
        problems = []
        if not isinstance(self.negate, bool):  # the text "false" would be true
            problems.append(Problem(f"{where}.negate", f"found {self.negate!r}; expected True or False", "Correct it"))
        elif self.negate and self.predicate is None:
            what = "found `negate` without a predicate; expected one that is negated"
            problems.append(Problem(f"{where}.negate", what, "Give `predicate`, or leave `negate` out"))
        if self.predicate is None:
            return problems
        if not isinstance(self.predicate, Predicate):
            what = f"found {self.predicate!r}; expected a Predicate"
            action = 'Write for instance TopicNameMatches("orders-.*"), or Condition("amount > 10")'
            return [*problems, Problem(f"{where}.predicate", what, action)]
        return [*problems, *self.predicate.validate(f"{where}.predicate")]

    @abstractmethod
    def apply(self, frame: DataFrame) -> DataFrame:
        """Return the transformed record frame: one row for each row, in the same order and in the same partition.

        All columns whose names begin with ``__kafka_`` have to be kept; ``__kafka_error`` may be set. The rows that end a split
        are among the rows: their parts are null.

        :param frame: has the columns ``key``, ``value``, ``topic``, ``partition``, ``offset``, ``timestamp``, ``headers``, and
            the carried ones.
        :raises ValidationError: the types do not fit.
        """

    def apply_guarded(self, frame: DataFrame) -> DataFrame:
        """Return the frame with the transform applied to the records that meet the predicate.

        A violation of the contract of :meth:`apply` is detected here, or fails the job.

        :raises ValidationError: columns are missing, or of another type.
        """
        from pyspark.sql import functions as F

        frame = mark_matching(frame, self.predicate, self.negate)
        before = F.struct(*PARTS, make_spark_column(ERROR), make_condition(frame).alias("applies"))
        # The number of each row. A second count afterwards shows if a row was left out, added or moved.
        given = frame.select("*", before.alias(_BEFORE), F.monotonically_increasing_id().alias(_AT))
        made = self.apply(given)
        new, old = _check_schema(self.name, given, made), RecordSchema(frame.schema)
        counted = made.select("*", F.monotonically_increasing_id().alias(_NOW))
        message = (
            f"{self.name} left out, added or moved records (a filter, an explode, a join, a groupBy, a sort or a repartition). "
            "Expected one row for each row, in place. Leave records out with Filter or Sql(filter=...)."
        )
        in_place = F.when(F.col(_AT) == F.col(_NOW), F.lit(True)).otherwise(F.raise_error(F.lit(message)).cast("boolean"))
        rows = counted.where(in_place)
        was, changes = F.col(_BEFORE), F.col(_BEFORE).getField("applies")
        parts = []
        for part in PARTS:
            want = self._find_type(part, new.get_type_of(part), old.get_type_of(part))
            kept = conform_column(was.getField(part), old.get_type_of(part), want)
            made_of = conform_column(F.col(part), new.get_type_of(part), want)
            parts.append(F.when(changes, made_of).otherwise(kept).alias(part))
        error = F.when(changes, F.col(ERROR)).otherwise(was.getField(ERROR)).alias(ERROR)
        kept_names = [name for name in list_carried_columns(frame) if name not in (ERROR, MEETS)]
        return rows.select(*parts, *map(make_spark_column, kept_names), error)

    def _find_type(self, part: str, new: DataType, old: DataType) -> DataType:
        return new if self.predicate is None else find_common_type(new, old, part)


@dataclass(frozen=True)
class ColumnTransform(Transform):
    """A transform that consists of an expression for each part that it changes. It cannot change records in another way."""

    over_fields: ClassVar[bool] = False
    """True if its expressions name the value's fields without a prefix, as a user's SQL does."""

    @abstractmethod
    def make_changes(self, record: RecordSchema) -> Mapping[str, Column]:
        """Return the new expressions, by part. Other parts stay unchanged. Computed only for records that are to be transformed.

        Beside the parts there may be ``error`` (string: why a record cannot be transformed; null if it can), ``keep`` (boolean:
        false or null leaves the record out) and, if the transform :attr:`routes_to` a topic, ``route``
        (:func:`~airflow_kafka_spark.transforms.routing.encode_route`).

        :param record: the types of the records.
        :raises ValidationError: the types do not fit. Each problem's ``where`` is the option that it concerns.
        """

    def apply(self, frame: DataFrame) -> DataFrame:
        return self.apply_guarded(frame)

    def apply_guarded(self, frame: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        frame = mark_matching(frame, self.predicate, self.negate)
        old = RecordSchema(frame.schema)
        wanted = dict(self.make_changes(old))
        applies = make_condition(frame)
        stays = LEFT_OUT in frame.columns
        if "keep" in wanted and not stays:
            # Not deterministic, so that Spark leaves the filter in its place: moving it down through a chain would copy all
            # expressions at each step, and their number would grow exponentially.
            wanted["keep"] = F.when(F.monotonically_increasing_id() >= 0, wanted["keep"])
        new = [F.when(applies, column).alias(_NEW + name) for name, column in wanted.items()]
        # In two steps, so that an expression that occurs several times below is computed once.
        computed = add_scope(frame).select(*remove_scope(frame), *new) if self.over_fields else frame.select("*", *new)
        types = {name: computed.schema[_NEW + name].dataType for name in wanted}
        if "keep" in wanted and not stays:
            computed = computed.where(~applies | F.coalesce(F.col(_NEW + "keep"), F.lit(False)))
        parts = []
        for part in PARTS:
            if part not in wanted:
                parts.append(F.col(part))
                continue
            want = self._find_type(part, types[part], old.get_type_of(part))
            made = conform_column(F.col(_NEW + part), types[part], want)
            parts.append(F.when(applies, made).otherwise(conform_column(F.col(part), old.get_type_of(part), want)).alias(part))
        error = F.col(ERROR)
        if "error" in wanted:
            message = F.concat(F.lit(f"{self.name}: "), F.col(_NEW + "error"))
            error = F.coalesce(error, message)
        left_out = []
        if "keep" in wanted and stays:
            left_out = [(F.col(LEFT_OUT) | (applies & ~F.coalesce(F.col(_NEW + "keep"), F.lit(False)))).alias(LEFT_OUT)]
        named = (ERROR, MEETS, ROUTE, *([LEFT_OUT] if left_out else []))
        kept = [name for name in list_carried_columns(frame) if name not in named]
        routed = [F.col(name) for name in (ROUTE, _NEW + "route") if name in computed.columns]
        route = [F.coalesce(*routed).alias(ROUTE)] if routed else []
        return computed.select(*parts, *map(make_spark_column, kept), *left_out, *route, error.alias(ERROR))


@dataclass(frozen=True)
class KeyOrValueTransform(ColumnTransform):
    """A transform of the key or of the value (Connect's classes ``$Key`` and ``$Value``).

    :param of: ``key`` or ``value`` (default).
    """

    of: Literal["key", "value"] = field(default="value", kw_only=True)

    def validate(self, where: str) -> list[Problem]:
        problems = super().validate(where)
        if self.of not in ("key", "value"):
            problems.append(Problem(f"{where}.of", f'found {self.of!r}; expected "key" or "value"', "Correct it"))
        return problems

    def make_missing_value_error(self) -> Column:
        """Return the error of a record without key or value, as in Connect."""
        from pyspark.sql import functions as F

        hint = "" if self.of == "key" else " (a tombstone)"
        return F.when(F.col(self.of).isNull(), F.lit(f"found a null {self.of}{hint}, expected a struct"))


@dataclass(frozen=True)
class NullDefaultTransform(ColumnTransform):
    """A transform that has the option ``replace.null.with.default`` in Connect. Here nulls stay null: columns have no defaults.

    :param replace_null_with_default: only False (default) is accepted.
    """

    replace_null_with_default: bool = field(default=False, kw_only=True)

    def validate(self, where: str) -> list[Problem]:
        problems = super().validate(where)
        if self.replace_null_with_default is not False:
            what = f"found {self.replace_null_with_default!r}; expected False, since Spark's columns have no defaults"
            action = 'Replace nulls, for instance by Sql({"a": "coalesce(a, 0)"})'
            problems.append(Problem(f"{where}.replace_null_with_default", what, action))
        return problems


def mark_matching(frame: DataFrame, predicate: Predicate | None, negate: bool) -> DataFrame:
    """Return the frame with the column :data:`MEETS`; unchanged without a predicate."""
    from pyspark.sql import functions as F

    if predicate is None:
        return frame
    if predicate.over_fields:
        require_boolean(frame, predicate.test(), "predicate")
    asked = is_record(frame)
    meets = F.coalesce(F.when(asked, predicate.test()), F.lit(False))
    column = (asked & ~meets if negate else meets).alias(MEETS)
    if predicate.over_fields:
        return add_scope(frame).select(*remove_scope(frame), column)
    return frame.select("*", column)


def require_boolean(frame: DataFrame, condition: Column, where: str) -> None:
    """Check that a user's SQL is a boolean, before Spark casts it and fails at the first record that it cannot cast.

    :raises ValidationError: it is not.
    """
    found = add_scope(frame).select(condition.alias(MEETS)).schema[MEETS].dataType.simpleString()
    if found not in ("boolean", "void"):
        what = f"it is {found}; expected a condition, which is true or false"
        raise ValidationError([Problem(where, what, "Compare it with something, for instance `a = 'x'`")])


def _check_schema(name: str, given: DataFrame, made: object) -> RecordSchema:
    """Return the types of a frame that user code has returned.

    :param given: the original frame.
    :param made: the result of the user's code, which may be of any type.
    :raises ValidationError: it is not a frame, lacks columns or has further ones, or has changed a type that must not change.
    """
    from pyspark.sql import DataFrame

    if not isinstance(made, DataFrame) and not hasattr(made, "schema"):
        what = f"found {type(made).__name__}; expected that it returns a DataFrame"
        raise ValidationError([Problem("apply", what, "Return the frame that was made")])
    had, has = {f.name: f.dataType for f in given.schema}, {f.name: f.dataType for f in made.schema}
    free = ("key", "value")
    problems = [
        Problem("apply", f"the column `{n}` is gone; expected that it is kept", "Keep all columns, for instance by withColumn")
        for n in had
        if n not in has
    ]
    problems += [
        Problem("apply", f"the column `{n}` is new; expected changes of the record's parts only", "Put it into the value")
        for n in has
        if n not in had
    ]
    problems += [
        Problem("apply", f"`{n}` has become {has[n].simpleString()}; expected {t.simpleString()}", "Cast it")
        for n, t in had.items()
        if n in has and n not in free and not is_same_type(has[n], t)
    ]
    if problems:
        raise ValidationError(problems)
    return RecordSchema(made.schema)
