"""Transforms that leave records out of the window, or choose their topic or sink."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.formats.base import LEFT_OUT, make_spark_column
from airflow_kafka_spark.transforms.base import (
    MEETS,
    PARTS,
    ColumnTransform,
    RecordSchema,
    Transform,
    list_carried_columns,
    make_condition,
    mark_matching,
)
from airflow_kafka_spark.transforms.conversions import find_date_format_problems, format_timestamp
from airflow_kafka_spark.transforms.options import (
    find_java_regex_problems,
    find_name_problems,
    find_regex_problems,
    find_replacement_problems,
    match_at_start,
    match_whole,
)
from airflow_kafka_spark.transforms.predicates import Condition
from airflow_kafka_spark.windows.model import TOPIC_NAME

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from airflow_kafka_spark.sinks.base import Sink


@dataclass(frozen=True)
class Filter(ColumnTransform):
    """Leaves out the records that meet the predicate; without a predicate, all records.

    With ``to`` these records are written to a topic or another sink, in the same window, instead of to the operator's sink. Later
    transforms do not change them, and they do not count as errors.

    Guarantee, with a topic: a ``read_committed`` reader sees each of these records exactly once, as it was read: key, value,
    timestamp and headers, with the reason in additional headers. A row of a source is shown in JSON, as the source gave it.

    Guarantee, with a sink (``KafkaToSinkOperator`` only): each of these records is in it exactly once, with the changes of the
    transforms before this one, and in no other sink or topic. Both sinks commit the window as a whole; the operator's own sink is
    the last one.

    :param to: a topic of the same cluster, created with one partition if it is missing; or a sink that commits windows as a
        whole, other than the operator's. Default None.
    :param reason: the reason in the headers of each record in the topic; default: the predicate.
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
            problems.append(Problem(f"{where}.reason", "found a reason, but no topic whose records could contain it", action))
        if not self._is_valid_target:
            what = f"found {self.to!r}; expected a sink, or a topic's name: up to 249 letters, digits, `.`, `_` and `-`"
            problems.append(Problem(f"{where}.to", what, "Correct it"))
        return problems

    @property
    def _is_valid_target(self) -> bool:
        from airflow_kafka_spark.sinks.base import Sink

        if isinstance(self.to, str):
            return bool(TOPIC_NAME.fullmatch(self.to))
        return self.to is None or isinstance(self.to, Sink)

    def make_changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        if self.to is None:
            return {"keep": F.lit(False)}
        if not isinstance(self.to, str):
            # The operator has to take this filter out of the chain. To apply it would lose the records.
            raise ValidationError([Problem("to", "a chain by itself sends nothing to a sink", "Leave `to` out")])
        return {"route": F.lit(encode_route(self.to, self.reason or self._default_reason))}

    @property
    def _default_reason(self) -> str:
        if self.predicate is None:
            return "all records are left out"
        if isinstance(self.predicate, Condition):
            return f"`{self.predicate.sql}` {'does not hold' if self.negate else 'holds'}"
        return f"it {'does not meet' if self.negate else 'meets'} {self.predicate!r}"


@dataclass(frozen=True)
class Capture(Transform):
    """Writes the rows of records that a ``Filter(to=<sink>)`` takes out to a column. Later transforms ignore these records.

    :param column: the column's name. It is null in all other rows.
    :param row: returns the columns of a row, of a record frame.
    """

    column: str
    row: Callable[[DataFrame], Mapping[str, Column]]

    @property
    def name(self) -> str:
        return "Filter"

    def apply(self, frame: DataFrame) -> DataFrame:
        return self.apply_guarded(frame)

    def apply_guarded(self, frame: DataFrame) -> DataFrame:
        """Return the frame with the column.

        :param frame: has the column :data:`~airflow_kafka_spark.formats.base.LEFT_OUT`.
        """
        from pyspark.sql import functions as F

        frame = mark_matching(frame, self.predicate, self.negate)
        row = F.struct(*(column.alias(name) for name, column in self.row(frame).items()))
        taken = frame.select("*", F.when(make_condition(frame), row).alias(self.column))
        kept = [name for name in list_carried_columns(taken) if name not in (MEETS, LEFT_OUT)]
        left_out = F.col(LEFT_OUT) | F.col(self.column).isNotNull()
        return taken.select(*PARTS, *map(make_spark_column, kept), left_out.alias(LEFT_OUT))


def encode_route(topic: str, reason: str) -> str:
    """Return the topic and the reason as JSON, for the column that marks a record as routed."""
    return json.dumps([topic, reason])


@dataclass(frozen=True)
class RegexRouter(ColumnTransform):
    """Changes the topic of records if its whole name matches. Other topics stay unchanged.

    :param regex: a Java regular expression.
    :param replacement: the new name; ``$1`` is the first group. As in Connect it replaces the first match only: with ``a|ab`` the
        ``b`` of ``ab`` is unchanged.
    """

    regex: str
    replacement: str

    def validate(self, where: str) -> list[Problem]:
        return [
            *super().validate(where),
            *find_regex_problems(f"{where}.regex", self.regex),
            *find_replacement_problems(f"{where}.replacement", self.regex, self.replacement),
        ]

    def make_changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        if problems := find_java_regex_problems("regex", self.regex):
            raise ValidationError(problems)
        # If the whole name matches, the first match is at its beginning.
        first, topic = match_at_start(self.regex), F.col("topic")
        routed = F.regexp_replace(topic, F.lit(first), F.lit(self.replacement))
        return {"topic": F.when(topic.rlike(match_whole(self.regex)), routed).otherwise(topic)}


@dataclass(frozen=True)
class TimestampRouter(ColumnTransform):
    """Derives a record's new topic from its topic and timestamp (UTC). A record without a timestamp has an error.

    :param topic_format: the new name, with ``${topic}`` and ``${timestamp}`` as placeholders; default
        ``${topic}-${timestamp}``.
    :param timestamp_format: a date pattern, as :class:`~airflow_kafka_spark.transforms.TimestampConverter` writes; default
        ``yyyyMMdd``.
    """

    topic_format: str = "${topic}-${timestamp}"
    timestamp_format: str = "yyyyMMdd"

    def validate(self, where: str) -> list[Problem]:
        given = re.findall(r"\$\{.*?\}", self.topic_format) if isinstance(self.topic_format, str) else []
        unknown = [name for name in given if name not in ("${topic}", "${timestamp}")]
        return [
            *super().validate(where),
            *find_name_problems(f"{where}.topic_format", self.topic_format),
            *(
                Problem(f"{where}.topic_format", f"found `{name}`; expected `${{topic}}` or `${{timestamp}}`", "Correct it")
                for name in unknown
            ),
            *find_date_format_problems(f"{where}.timestamp_format", self.timestamp_format),
        ]

    def make_changes(self, record: RecordSchema) -> Mapping[str, Column]:
        from pyspark.sql import functions as F

        known = {"${topic}": F.col("topic"), "${timestamp}": format_timestamp(F.col("timestamp"), self.timestamp_format)}
        pieces = [piece for piece in re.split(r"(\$\{topic\}|\$\{timestamp\})", self.topic_format) if piece]
        name = F.concat(*(known[piece] if piece in known else F.lit(piece) for piece in pieces))
        missing = F.col("timestamp").isNull()
        error = F.when(missing, F.lit("found a record without a timestamp, expected one to name the topic by"))
        return {"topic": F.when(missing, F.col("topic")).otherwise(name), "error": error}
