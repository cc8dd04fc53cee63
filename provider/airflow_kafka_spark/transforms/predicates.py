"""Predicates: the predicates of Connect, and conditions in Spark's SQL."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from airflow_kafka_spark.arguments import OptionsType
from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.transforms.options import (
    find_java_regex_problems,
    find_name_problems,
    find_regex_problems,
    find_sql_problems,
    match_whole,
)

if TYPE_CHECKING:
    from pyspark.sql import Column


@dataclass(frozen=True)
class Predicate(metaclass=OptionsType):
    """A condition on a record. Subclasses are frozen dataclasses of options."""

    over_fields: ClassVar[bool] = False
    """True if :meth:`test` names the value's fields without a prefix, as a user's SQL does."""

    def validate(self, where: str) -> list[Problem]:
        """Return all problems of the options, without Spark."""
        return []

    @abstractmethod
    def test(self) -> Column:
        """Return a boolean expression over the columns of a record frame; null counts as false. Computed for records only."""


@dataclass(frozen=True)
class TopicNameMatches(Predicate):
    """Meets records of topics whose whole name matches.

    :param pattern: a Java regular expression.
    """

    pattern: str

    def validate(self, where: str) -> list[Problem]:
        return find_regex_problems(f"{where}.pattern", self.pattern)

    def test(self) -> Column:
        from pyspark.sql import functions as F

        if problems := find_java_regex_problems("predicate.pattern", self.pattern):
            raise ValidationError(problems)
        return F.col("topic").rlike(match_whole(self.pattern))


@dataclass(frozen=True)
class HasHeaderKey(Predicate):
    """Meets records with at least one header of this name.

    :param name: the name of the header.
    """

    name: str

    def validate(self, where: str) -> list[Problem]:
        return find_name_problems(f"{where}.name", self.name)

    def test(self) -> Column:
        from pyspark.sql import functions as F

        return F.exists("headers", lambda header: header.getField("key") == self.name)


@dataclass(frozen=True)
class RecordIsTombstone(Predicate):
    """Meets records whose value is null."""

    def test(self) -> Column:
        from pyspark.sql import functions as F

        return F.col("value").isNull()


@dataclass(frozen=True)
class Condition(Predicate):
    """Meets records for which a condition in Spark's SQL is true; null counts as false.

    The condition names the value's fields, and the record's parts: ``key``, ``value``, ``topic``, ``partition``, ``offset``,
    ``timestamp`` and ``headers``, unless a field of the value has that name; ``record.topic`` and so on are always the parts.
    An error in it (a division by zero) fails the job: ``try_divide``, ``try_cast`` and the like give null instead.

    :param sql: the condition.
    """

    sql: str
    over_fields: ClassVar[bool] = True

    def validate(self, where: str) -> list[Problem]:
        return find_sql_problems(f"{where}.sql", self.sql, "a condition, for instance `amount > 10`")

    def test(self) -> Column:
        from pyspark.sql import functions as F

        return F.expr(self.sql)
