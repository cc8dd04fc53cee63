"""Transforms that leave a record's content alone: whether it goes on, and to which topic or sink."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.transforms import record as r
from airflow_kafka_spark.transforms.base import ByColumns
from airflow_kafka_spark.transforms.moments import written
from airflow_kafka_spark.transforms.patterns import (
    date_format_problems,
    java_problems,
    match_at_beginning,
    regex_problems,
    replacement_problems,
    whole_match,
)
from airflow_kafka_spark.transforms.predicates import Condition, name_problems
from airflow_kafka_spark.windows.model import TOPIC_NAME

if TYPE_CHECKING:
    from pyspark.sql import Column

    from airflow_kafka_spark.sinks.base import Sink


@dataclass(frozen=True)
class Filter(ByColumns):
    """Leaves records out: those that meet the predicate; without one, all. With ``to`` they go elsewhere, instead of to the sink
    of the operator, in the same window. Later transforms do not touch them; it is no error.

    Guarantee, with a topic: a ``read_committed`` reader of it sees each of them exactly once, as it was read: key, value,
    timestamp and headers, and behind those why it is there. A row of a source is shown as the source gave it, in JSON.

    Guarantee, with a sink (``KafkaToSinkOperator`` alone): each of them is in it exactly once, as the transforms before this one
    have left it, and in no other sink or topic. Both sinks take the window whole; the operator's own is the last one to do so.

    :param to: a topic of the same cluster, created with one partition when it is missing; or a sink, another one than the
        operator's, which takes windows whole.
    :param reason: what is told of each of them in a topic; default says which predicate it was.
    """

    to: str | Sink | None = field(default=None, kw_only=True)
    reason: str = field(default="", kw_only=True)

    @property
    def routes_to(self) -> str | None:
        return self.to if isinstance(self.to, str) else None

    @property
    def captured_by(self) -> Sink | None:
        return None if self.to is None or isinstance(self.to, str) else self.to

    def validate(self, where: str) -> list[Problem]:
        problems = super().validate(where)
        if self.reason and not isinstance(self.to, str):
            action = "Give `to` a topic" if self.to is None else "Leave it out: a sink gets the record's columns"
            problems.append(Problem(f"{where}.reason", "found a reason, and no topic to tell it in", action))
        if not self._goes_somewhere:
            what = f"found {self.to!r}; expected a sink, or a topic's name: up to 249 letters, digits, `.`, `_` and `-`"
            problems.append(Problem(f"{where}.to", what, "Correct it"))
        return problems

    @property
    def _goes_somewhere(self) -> bool:
        from airflow_kafka_spark.sinks.base import Sink

        if isinstance(self.to, str):
            return bool(TOPIC_NAME.fullmatch(self.to))
        return self.to is None or isinstance(self.to, Sink)

    def changes(self, record: r.Record) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        if self.to is None:
            return {"keep": F.lit(False)}
        if not isinstance(self.to, str):
            # Never a plain drop: the operator has to have taken it out of the chain.
            raise ValidationError([Problem("to", "a chain by itself sends nothing to a sink", "Leave `to` out")])
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
    :param replacement: the new name; ``$1`` is what the first group matched. As in Connect it stands for the first match: what
        ``a|ab`` leaves of ``ab`` stays behind it.
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

        if problems := java_problems("regex", self.regex):
            raise ValidationError(problems)
        # A name that matches as a whole has its first match at its beginning.
        first, topic = match_at_beginning(self.regex), F.col("topic")
        routed = F.regexp_replace(topic, F.lit(first), F.lit(self.replacement))
        return {"topic": F.when(topic.rlike(whole_match(self.regex)), routed).otherwise(topic)}


@dataclass(frozen=True)
class TimestampRouter(ByColumns):
    """Another topic, made of the topic and the record's timestamp (UTC). A record without a timestamp has an error.

    :param topic_format: the new name; ``${topic}`` and ``${timestamp}`` stand for the two.
    :param timestamp_format: a date pattern, as :class:`~airflow_kafka_spark.transforms.TimestampConverter` writes.
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

        known = {"${topic}": F.col("topic"), "${timestamp}": written(F.col("timestamp"), self.timestamp_format)}
        pieces = [piece for piece in re.split(r"(\$\{topic\}|\$\{timestamp\})", self.topic_format) if piece]
        name = F.concat(*(known[piece] if piece in known else F.lit(piece) for piece in pieces))
        missing = F.col("timestamp").isNull()
        error = F.when(missing, F.lit("found a record without a timestamp, expected one to name the topic by"))
        return {"topic": F.when(missing, F.col("topic")).otherwise(name), "error": error}
