"""Which records a transform is for: Connect's predicates, and conditions of Spark's SQL."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.transforms.patterns import java_problems, regex_problems, whole_match

if TYPE_CHECKING:
    from pyspark.sql import Column


@dataclass(frozen=True)
class Predicate(ABC):
    """A condition of a record. Subclasses are frozen dataclasses of options."""

    over_fields: ClassVar[bool] = False
    """Whether :meth:`test` names the value's fields bare, as SQL of a user's does."""

    def validate(self, where: str) -> list[Problem]:
        """What is wrong with the options, all at once, without Spark; an empty list when nothing is."""
        return []

    @abstractmethod
    def test(self) -> Column:
        """A boolean expression over the columns of a record frame; null counts as false. Computed for records only."""


@dataclass(frozen=True)
class TopicNameMatches(Predicate):
    """Records of topics whose whole name matches.

    :param pattern: a regular expression of Java's.
    """

    pattern: str

    def validate(self, where: str) -> list[Problem]:
        return regex_problems(f"{where}.pattern", self.pattern)

    def test(self) -> Column:
        from pyspark.sql import functions as F

        if problems := java_problems("predicate.pattern", self.pattern):
            raise ValidationError(problems)
        return F.col("topic").rlike(whole_match(self.pattern))


@dataclass(frozen=True)
class HasHeaderKey(Predicate):
    """Records with at least one header of this name.

    :param name: the header's.
    """

    name: str

    def validate(self, where: str) -> list[Problem]:
        return name_problems(f"{where}.name", self.name)

    def test(self) -> Column:
        from pyspark.sql import functions as F

        return F.exists("headers", lambda header: header.getField("key") == self.name)


@dataclass(frozen=True)
class RecordIsTombstone(Predicate):
    """Records whose value is null."""

    def test(self) -> Column:
        from pyspark.sql import functions as F

        return F.col("value").isNull()


@dataclass(frozen=True)
class Condition(Predicate):
    """Records for which a condition of Spark's SQL holds; null counts as not.

    The value's fields are reached by their names. The record's parts are ``key``, ``value``, ``topic``, ``partition``,
    ``offset``, ``timestamp`` and ``headers``, unless a field of the value is called so; ``record.topic`` and so on are always
    the parts.
    An error in it (a division by zero) fails the job: ``try_divide``, ``try_cast`` and the like give null instead.

    :param sql: the condition.
    """

    sql: str
    over_fields: ClassVar[bool] = True

    def validate(self, where: str) -> list[Problem]:
        return name_problems(f"{where}.sql", self.sql, "a condition, for instance `amount > 10`")

    def test(self) -> Column:
        from pyspark.sql import functions as F

        return F.expr(self.sql)


def name_problems(where: str, name: object, expected: str = "a name") -> list[Problem]:
    """What is wrong with an option that has to be a text that is not empty."""
    if isinstance(name, str) and name.strip():
        return []
    return [Problem(where, f"found {name!r}; expected {expected}", "Correct it")]
