"""Records that are transformed on their way, and what becomes of bad ones: what operators that read from Kafka share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.operators.decoding import DecodingOperator
from airflow_kafka_spark.operators.tolerant import TolerantOperator
from airflow_kafka_spark.windows.model import KEY_CONVERTER, TRANSFORMATION, VALUE_CONVERTER

if TYPE_CHECKING:
    from airflow_kafka_spark.transforms.base import TransformLike


class TransformingOperator(TolerantOperator, DecodingOperator):
    """Connect's ``transforms`` as an argument, and what is bad of records that are read.

    :param transforms: what becomes of records, in order.
    """

    def __init__(self, *, transforms: Sequence[TransformLike] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.transforms = transforms

    routes_records = False
    """Whether ``Filter(to=...)`` may send what it takes out to another topic."""

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
