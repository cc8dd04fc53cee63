"""Records that are transformed on their way, and what becomes of bad ones: what operators that read from Kafka share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.operators.decoding import DecodingOperator
from airflow_kafka_spark.operators.tolerance import ErrorOptions, topic_problems
from airflow_kafka_spark.operators.tolerant import TolerantOperator
from airflow_kafka_spark.windows.binding import Endpoint
from airflow_kafka_spark.windows.model import KEY_CONVERTER, TRANSFORMATION, VALUE_CONVERTER

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.transforms.chaining import TransformLike


def routes_of(transforms: Sequence[TransformLike]) -> dict[str, str]:
    """The topics that transforms send records to, by the argument that names each."""
    if not transforms:
        return {}
    from airflow_kafka_spark.transforms.chaining import routes

    return routes(transforms)


def routed_to(routes: Mapping[str, str]) -> Endpoint:
    """The topics of :func:`routes_of`, as part of where a window goes."""
    return Endpoint(details={"routes": ", ".join(sorted(set(routes.values())))})


def route_problems(
    hook: KafkaHook, routes: Mapping[str, str], errors: ErrorOptions, taken: Callable[[str], Sequence[str]]
) -> list[Problem]:
    """Why records cannot be sent to the topics that a ``Filter`` names.

    :param routes: these topics, by the argument that names each.
    :param taken: the topics that a topic must not be.
    """
    problems = []
    for where, topic in routes.items():
        if topic == errors.topic and errors.tolerates:
            problems.append(Problem(where, f"`{topic}` is the dead letter topic, too", "Name another topic"))
        else:
            problems += topic_problems(hook, where, topic, taken(topic), "records")
    return problems


def target_problems(target: str | None, errors: ErrorOptions, routes: Mapping[str, str], what: str = "records") -> list[Problem]:
    """Topics that records are set aside in, and which are where the good ones go.

    :param routes: those that transforms send records to, by the argument that names each.
    :param what: the records, for the message.
    """
    aside = {"errors_deadletterqueue_topic_name": errors.topic, **routes}
    found = f"`{target}` is where good {what} go"
    return [Problem(where, found, "Name another topic") for where, topic in aside.items() if topic and topic == target]


class TransformingOperator(TolerantOperator, DecodingOperator):
    """Connect's ``transforms`` as an argument, and what is bad of records that are read.

    :param transforms: what becomes of records, in order.
    """

    def __init__(self, *, transforms: Sequence[TransformLike] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.transforms = transforms

    captures_records = False
    """Whether ``Filter(to=...)`` may hand what it takes out to another sink."""

    def error_problems(self) -> list[Problem]:
        """What is wrong with the options for bad records, by themselves and as the brokers see it; and with the topics that
        transforms send records to.
        """
        problems = self.errors.problems() or self.errors.server_problems(self.kafka, self.taken(self.errors.topic))
        return [*problems, *route_problems(self.kafka, self.routes(), self.errors, self.taken)]

    def destinations(self) -> Endpoint:
        """Its sink's, the topic that bad records go to, and those that transforms send records to."""
        return super().destinations() | routed_to(self.routes())

    def routes(self) -> dict[str, str]:
        """The topics that transforms send records to, by the argument that names each."""
        return routes_of(self.transforms)

    def taken(self, topic: str | None) -> tuple[str, ...]:
        """Topics that nothing is set aside in: those that are read, and the ledger."""
        read = self.subscription.topics or ((topic,) if topic and self.subscription.matches(topic) else ())
        return (*read, self.ledger_topic)

    def transform_problems(self) -> list[Problem]:
        """What is wrong with the transforms' options, without Spark."""
        if not self.transforms:
            return []
        from airflow_kafka_spark.transforms import problems

        found = problems(self.transforms, capturing=self.captures_records)
        if self.read_with == "spark":
            found.append(Problem("read_with", "on the way to transforms tasks read by themselves", "Leave it out"))
        return found

    def error_classes(self) -> dict[str, str]:
        """The class that a bad record failed at, by stage."""
        formats = {VALUE_CONVERTER: self.value, KEY_CONVERTER: self.key}
        classes = {TRANSFORMATION: "airflow_kafka_spark.transforms"} if self.transforms else {}
        return classes | {stage: f"{type(f).__module__}.{type(f).__name__}" for stage, f in formats.items() if f is not None}
