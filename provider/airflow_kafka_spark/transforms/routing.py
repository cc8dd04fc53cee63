"""Transforms that leave a record's content alone: whether it goes on, and to which topic."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.transforms import record as r
from airflow_kafka_spark.transforms.base import ByColumns
from airflow_kafka_spark.transforms.patterns import date_format_problems, regex_problems, replacement_problems, whole_match
from airflow_kafka_spark.transforms.predicates import name_problems

if TYPE_CHECKING:
    from pyspark.sql import Column


@dataclass(frozen=True)
class Filter(ByColumns):
    """Leaves records out: those that meet the predicate; without one, all."""

    def changes(self, record: r.Record) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        return {"keep": F.lit(False)}


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
