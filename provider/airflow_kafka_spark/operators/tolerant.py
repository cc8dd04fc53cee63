"""Records that are transformed on their way, and what becomes of bad ones: what operators that read from Kafka share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.operators.decoding import DecodingOperator
from airflow_kafka_spark.operators.tolerance import ErrorOptions
from airflow_kafka_spark.windows.model import KEY_CONVERTER, TRANSFORMATION, VALUE_CONVERTER

if TYPE_CHECKING:
    from airflow_kafka_spark.transforms.base import TransformLike


class TolerantOperator(DecodingOperator):
    """Connect's ``transforms`` and ``errors.*`` as arguments.

    :param transforms: what becomes of records, in order.
    :param errors_tolerance: ``none`` (default) or ``all``.
    :param errors_deadletterqueue_topic_name: with ``all``, the topic that bad records go to.
    :param errors_deadletterqueue_topic_replication_factor: of a topic that is created; default -1, the brokers' default.
    :param errors_deadletterqueue_context_headers_enable: whether dead letters carry Connect's headers (KIP-298); default True.
    :param errors_skip: with ``all`` and without a topic: bad records are left out for good, and only counted.
    :param max_errors: how many records of a window may be bad: a number, or a share of its records below 1; None: any.
    """

    def __init__(
        self,
        *,
        transforms: Sequence[TransformLike] = (),
        errors_tolerance: Literal["none", "all"] = "none",
        errors_deadletterqueue_topic_name: str | None = None,
        errors_deadletterqueue_topic_replication_factor: int = -1,
        errors_deadletterqueue_context_headers_enable: bool = True,
        errors_skip: bool = False,
        max_errors: int | float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.transforms = transforms
        self.errors_tolerance = errors_tolerance
        self.errors_deadletterqueue_topic_name = errors_deadletterqueue_topic_name
        self.errors_deadletterqueue_topic_replication_factor = errors_deadletterqueue_topic_replication_factor
        self.errors_deadletterqueue_context_headers_enable = errors_deadletterqueue_context_headers_enable
        self.errors_skip = errors_skip
        self.max_errors = max_errors

    routes_records = False
    """Whether ``Filter(to=...)`` may send what it takes out to another topic."""

    @property
    def errors(self) -> ErrorOptions:
        """What becomes of bad records."""
        return ErrorOptions(
            self.errors_tolerance,
            self.errors_deadletterqueue_topic_name or None,
            self.errors_deadletterqueue_topic_replication_factor,
            self.errors_deadletterqueue_context_headers_enable,
            self.errors_skip,
            self.max_errors,
        )

    def error_problems(self) -> list[Problem]:
        """What is wrong with the options for bad records, by themselves and as the brokers see it."""
        if problems := self.errors.problems():
            return problems
        return self.errors.server_problems(self.kafka, self.taken(self.errors.topic))

    def taken(self, topic: str | None) -> tuple[str, ...]:
        """Topics that nothing is set aside in: those that are read, and the ledger."""
        read = self.subscription.topics or ((topic,) if topic and self.subscription.matches(topic) else ())
        return (*read, self.ledger_topic)

    def transform_problems(self) -> list[Problem]:
        """What is wrong with the transforms' options, without Spark."""
        if not self.transforms:
            return []
        from airflow_kafka_spark.transforms import problems

        found = problems(self.transforms, routing=self.routes_records)
        if self.read_with == "spark":
            found.append(Problem("read_with", "on the way to transforms tasks read by themselves", "Leave it out"))
        return found

    def error_classes(self) -> dict[str, str]:
        """The class that a bad record failed at, by stage."""
        formats = {VALUE_CONVERTER: self.value, KEY_CONVERTER: self.key}
        classes = {TRANSFORMATION: "airflow_kafka_spark.transforms"} if self.transforms else {}
        return classes | {stage: f"{type(f).__module__}.{type(f).__name__}" for stage, f in formats.items() if f is not None}
