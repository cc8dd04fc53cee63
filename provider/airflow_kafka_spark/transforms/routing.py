"""Transforms that leave a record's content alone: whether it goes on, and to which topic."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.transforms import record as r
from airflow_kafka_spark.transforms.base import ByColumns
from airflow_kafka_spark.transforms.patterns import date_format_problems, regex_problems, replacement_problems, whole_match
from airflow_kafka_spark.transforms.predicates import Condition, name_problems

if TYPE_CHECKING:
    from pyspark.sql import Column


_TOPIC = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")


@dataclass(frozen=True)
class Filter(ByColumns):
    """Leaves records out: those that meet the predicate; without one, all. With ``to`` they go to a topic instead of the sink.

    Guarantee, with ``to``: a ``read_committed`` reader of the topic sees each of them exactly once, as it was read: key, value,
    timestamp and headers, and behind those why it is there. Later transforms do not touch it; it is no error.

    :param to: a topic of the same cluster; created with one partition when it is missing.
    :param reason: what is told of each of them; default says which predicate it was.
    """

    to: str | None = field(default=None, kw_only=True)
    reason: str = field(default="", kw_only=True)

    @property
    def routes_to(self) -> str | None:
        return self.to

    def validate(self, where: str) -> list[Problem]:
        problems = super().validate(where)
        if self.reason and self.to is None:
            problems.append(Problem(f"{where}.reason", "found a reason, and no topic to tell it in", "Give `to`"))
        if self.to is not None and not (isinstance(self.to, str) and _TOPIC.fullmatch(self.to)):
            what = f"found {self.to!r}; expected a topic's name: up to 249 letters, digits, `.`, `_` and `-`"
            problems.append(Problem(f"{where}.to", what, "Correct it"))
        return problems

    def changes(self, record: r.Record) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        if self.to is None:
            return {"keep": F.lit(False)}
        return {"route": F.lit(route(self.to, self.reason or self._told))}

    @property
    def _told(self) -> str:
        if self.predicate is None:
            return "all records are left out"
        if isinstance(self.predicate, Condition):
            return f"`{self.predicate.sql}` {'does not hold' if self.negate else 'holds'}"
        return f"it {'does not meet' if self.negate else 'meets'} {self.predicate!r}"


def route(topic: str, reason: str) -> str:
    """What is told of a record that goes to a topic, in the column that carries it past the other transforms."""
    return json.dumps([topic, reason])


@dataclass(frozen=True)
class RegexRouter(ByColumns):
    """Another topic for records whose topic's whole name matches; the others keep theirs.

    :param regex: a regular expression of Java's.
    :param replacement: the new name; ``$1`` is what the first group matched.
    """

    regex: str
    replacement: str

    def validate(self, where: str) -> list[Problem]:
        return [
            *super().validate(where),
            *regex_problems(f"{where}.regex", self.regex),
            *replacement_problems(f"{where}.replacement", self.regex, self.replacement),
        ]

    def changes(self, record: r.Record) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        return {"topic": F.regexp_replace("topic", F.lit(whole_match(self.regex)), F.lit(self.replacement))}


@dataclass(frozen=True)
class TimestampRouter(ByColumns):
    """Another topic, made of the topic and the record's timestamp (UTC). A record without a timestamp has an error.

    :param topic_format: the new name; ``${topic}`` and ``${timestamp}`` stand for the two.
    :param timestamp_format: a datetime pattern of Spark's.
    """

    topic_format: str = "${topic}-${timestamp}"
    timestamp_format: str = "yyyyMMdd"

    def validate(self, where: str) -> list[Problem]:
        return [
            *super().validate(where),
            *name_problems(f"{where}.topic_format", self.topic_format),
            *date_format_problems(f"{where}.timestamp_format", self.timestamp_format),
        ]

    def changes(self, record: r.Record) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        known = {"${topic}": F.col("topic"), "${timestamp}": F.date_format("timestamp", self.timestamp_format)}
        pieces = [piece for piece in re.split(r"(\$\{topic\}|\$\{timestamp\})", self.topic_format) if piece]
        name = F.concat(*(known[piece] if piece in known else F.lit(piece) for piece in pieces))
        missing = F.col("timestamp").isNull()
        error = F.when(missing, F.lit("found a record without a timestamp, expected one to name the topic by"))
        return {"topic": F.when(missing, F.col("topic")).otherwise(name), "error": error}
