"""The contract of a transform: Connect's single message transforms as Spark expressions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.formats.base import spark_column
from airflow_kafka_spark.transforms import record as r
from airflow_kafka_spark.transforms.predicates import Predicate

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

    from airflow_kafka_spark.sinks.base import Sink

_BEFORE, _AT, _NOW, _NEW = f"{r.CARRIED}before", f"{r.CARRIED}at", f"{r.CARRIED}now", f"{r.CARRIED}new_"


@dataclass(frozen=True)
class Transform(ABC):
    """What becomes of records, one at a time. Subclasses are frozen dataclasses of options.

    A subclass of your own implements :meth:`apply` (or derives from :class:`ByColumns`, which is faster and safer). Records that
    do not meet the predicate, records with an error and the rows that end a split keep what they had, whatever it does.

    :param predicate: only records that meet it are transformed; the others keep what they had.
    :param negate: only records that do not meet it are.
    """

    predicate: Predicate | None = field(default=None, kw_only=True)
    negate: bool = field(default=False, kw_only=True)

    @property
    def name(self) -> str:
        """What messages call it: its class's name."""
        return type(self).__name__

    @property
    def routes_to(self) -> str | None:
        """The topic that records go to which it takes out of the window; None where it takes none out."""
        return None

    @property
    def captured_by(self) -> Sink | None:
        """The same, where it is a sink."""
        return None

    def validate(self, where: str) -> list[Problem]:
        """What is wrong with the options, all at once, without Spark; an empty list when nothing is.

        :param where: what names the transform in messages: ``transforms[0] Cast``.
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
        """What becomes of a record frame: one row for each row, in the same order and in the same partition.

        All columns whose names begin with ``__kafka_`` have to be kept; ``__kafka_error`` may be set. A row that ends a split is
        among the rows: its parts are null.

        :param frame: of the columns ``key``, ``value``, ``topic``, ``partition``, ``offset``, ``timestamp``, ``headers``, and
            those that are carried.
        :raises ValidationError: what its types do not allow.
        """

    def guarded(self, frame: DataFrame) -> DataFrame:
        """The same, with the predicate, and for records only. What it may not do is found out, at the latest when the job runs.

        :raises ValidationError: columns are missing, or of another type.
        """
        from pyspark.sql import functions as F

        frame = marked(frame, self.predicate, self.negate)
        before = F.struct(*r.PARTS, spark_column(r.ERROR), r.applies(frame).alias("applies"))
        # A row's place: a second count of the rows afterwards tells whether any was left out, added or moved.
        given = frame.select("*", before.alias(_BEFORE), F.monotonically_increasing_id().alias(_AT))
        made = self.apply(given)
        new, old = _types_after(self.name, given, made), r.Record(frame.schema)
        counted = made.select("*", F.monotonically_increasing_id().alias(_NOW))
        message = (
            f"{self.name} left out, added or moved records (a filter, an explode, a join, a groupBy, a sort or a repartition). "
            "Expected one row for each row, in place. Leave records out with Filter or Sql(filter=...)."
        )
        in_place = F.when(F.col(_AT) == F.col(_NOW), F.lit(True)).otherwise(F.raise_error(F.lit(message)).cast("boolean"))
        rows = counted.where(in_place)
        was, changes = F.col(_BEFORE), F.col(_BEFORE).getField("applies")
        parts = []
        for part in r.PARTS:
            want = self._type(part, new.type_of(part), old.type_of(part))
            kept = r.conformed(was.getField(part), old.type_of(part), want)
            made_of = r.conformed(F.col(part), new.type_of(part), want)
            parts.append(F.when(changes, made_of).otherwise(kept).alias(part))
        error = F.when(changes, F.col(r.ERROR)).otherwise(was.getField(r.ERROR)).alias(r.ERROR)
        kept_names = [name for name in r.carried(frame) if name not in (r.ERROR, r.MEETS)]
        return rows.select(*parts, *map(spark_column, kept_names), error)

    def _type(self, part: str, new: DataType, old: DataType) -> DataType:
        return new if self.predicate is None else r.both(new, old, part)


@dataclass(frozen=True)
class ByColumns(Transform):
    """A transform that says for each part what it becomes: nothing else can happen to the records."""

    over_fields: ClassVar[bool] = False
    """Whether its expressions name the value's fields bare, as SQL of a user's does."""

    @abstractmethod
    def changes(self, record: r.Record) -> Mapping[str, Column]:
        """New expressions for parts; of those that are not named nothing changes. They are computed for no row but the records
        that are to be transformed. Beside the parts there may be ``error`` (string: why a record cannot be transformed, after
        the transform's name; null where it can), ``keep`` (boolean: false or null leaves the record out) and, of a transform
        that :attr:`routes_to` a topic, ``route`` (:func:`~airflow_kafka_spark.transforms.routing.route`).

        :param record: the types of what comes.
        :raises ValidationError: they do not allow it. Each problem's ``where`` is the option that it concerns.
        """

    def apply(self, frame: DataFrame) -> DataFrame:
        return self.guarded(frame)

    def guarded(self, frame: DataFrame) -> DataFrame:
        from pyspark.sql import functions as F

        frame = marked(frame, self.predicate, self.negate)
        old = r.Record(frame.schema)
        wanted = dict(self.changes(old))
        applies = r.applies(frame)
        stays = r.LEFT_OUT in frame.columns
        if "keep" in wanted and not stays:
            # Not deterministic, so that Spark leaves the filter where it is: on its way down through a chain it would take a copy
            # of all expressions with it at each step, and their number would grow exponentially.
            wanted["keep"] = F.when(F.monotonically_increasing_id() >= 0, wanted["keep"])
        new = [F.when(applies, column).alias(_NEW + name) for name, column in wanted.items()]
        # In two steps, so that an expression is computed once however often it is named below.
        computed = r.scoped(frame).select(*r.unscoped(frame), *new) if self.over_fields else frame.select("*", *new)
        types = {name: computed.schema[_NEW + name].dataType for name in wanted}
        if "keep" in wanted and not stays:
            computed = computed.where(~applies | F.coalesce(F.col(_NEW + "keep"), F.lit(False)))
        parts = []
        for part in r.PARTS:
            if part not in wanted:
                parts.append(F.col(part))
                continue
            want = self._type(part, types[part], old.type_of(part))
            made = r.conformed(F.col(_NEW + part), types[part], want)
            parts.append(F.when(applies, made).otherwise(r.conformed(F.col(part), old.type_of(part), want)).alias(part))
        error = F.col(r.ERROR)
        if "error" in wanted:
            told = F.concat(F.lit(f"{self.name}: "), F.col(_NEW + "error"))
            error = F.coalesce(error, told)
        left_out = []
        if "keep" in wanted and stays:
            left_out = [(F.col(r.LEFT_OUT) | (applies & ~F.coalesce(F.col(_NEW + "keep"), F.lit(False)))).alias(r.LEFT_OUT)]
        named = (r.ERROR, r.MEETS, r.ROUTE, *([r.LEFT_OUT] if left_out else []))
        kept = [name for name in r.carried(frame) if name not in named]
        routed = [F.col(name) for name in (r.ROUTE, _NEW + "route") if name in computed.columns]
        route = [F.coalesce(*routed).alias(r.ROUTE)] if routed else []
        return computed.select(*parts, *map(spark_column, kept), *left_out, *route, error.alias(r.ERROR))


@dataclass(frozen=True)
class OfPart(ByColumns):
    """A transform of the key or of the value (Connect's classes ``$Key`` and ``$Value``).

    :param of: which of the two.
    """

    of: Literal["key", "value"] = field(default="value", kw_only=True)

    def validate(self, where: str) -> list[Problem]:
        problems = super().validate(where)
        if self.of not in ("key", "value"):
            problems.append(Problem(f"{where}.of", f'found {self.of!r}; expected "key" or "value"', "Correct it"))
        return problems

    def no_value(self) -> Column:
        """The error of a record without the key or value that is wanted, as Connect has it."""
        from pyspark.sql import functions as F

        hint = "" if self.of == "key" else " (a tombstone)"
        return F.when(F.col(self.of).isNull(), F.lit(f"found a null {self.of}{hint}, expected a struct"))


def marked(frame: DataFrame, predicate: Predicate | None, negate: bool) -> DataFrame:
    """The frame, with whether a record meets a predicate; as it is without one."""
    from pyspark.sql import functions as F

    if predicate is None:
        return frame
    if predicate.over_fields:
        refuse_no_condition(frame, predicate.test(), "predicate")
    asked = r.is_record(frame)
    meets = F.coalesce(F.when(asked, predicate.test()), F.lit(False))
    column = (asked & ~meets if negate else meets).alias(r.MEETS)
    if predicate.over_fields:
        return r.scoped(frame).select(*r.unscoped(frame), column)
    return frame.select("*", column)


def refuse_no_condition(frame: DataFrame, condition: Column, where: str) -> None:
    """Before Spark takes a user's SQL for a boolean, and fails at the first record for which it cannot.

    :raises ValidationError: it is none.
    """
    found = r.scoped(frame).select(condition.alias(r.MEETS)).schema[r.MEETS].dataType.simpleString()
    if found not in ("boolean", "void"):
        what = f"it is {found}; expected a condition, which is true or false"
        raise ValidationError([Problem(where, what, "Compare it with something, for instance `a = 'x'`")])


def _types_after(name: str, given: DataFrame, made: Any) -> r.Record:
    """The types of what somebody's code has made of a frame.

    :raises ValidationError: it is none, lacks columns or has more, or has changed a type that must not change.
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
        if n in has and n not in free and not r.same(has[n], t)
    ]
    if problems:
        raise ValidationError(problems)
    return r.Record(made.schema)
