"""Rights on a cluster with an authorizer: translate a refusal into an error that names the resource and the missing right.

Clients say neither: an error is "Group authorization failed", without the group. The caller knows what it has asked for. Imports
neither Airflow nor pyspark: Spark's tasks use it, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from airflow_kafka_spark.errors import RightMissing
from airflow_kafka_spark.hooks.kafka.config import identity

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message

    from airflow_kafka_spark.hooks.kafka.events import ClientEvents

Resource = Literal["topic", "group", "transactional id", "cluster"]

_CODES: Mapping[str, Resource] = {
    "TOPIC_AUTHORIZATION_FAILED": "topic",
    "GROUP_AUTHORIZATION_FAILED": "group",
    "TRANSACTIONAL_ID_AUTHORIZATION_FAILED": "transactional id",
    "CLUSTER_AUTHORIZATION_FAILED": "cluster",
}
"""Kafka's name of an error -> the kind of resource that it is about."""
_GROUP = "GROUP_AUTHORIZATION_FAILED"

_JAVA = re.compile(r"Not authorized to access (topics|group): \[?([^\]\s]+)\]?")


@dataclass(frozen=True)
class Right:
    """A right that a request needs.

    :param resource: the kind of resource.
    :param operation: Kafka's name of the right, as ``Describe``.
    :param name: the resource's name; empty where the request has several, and the caller says which one failed.
    """

    resource: Resource
    operation: str
    name: str = ""


def right_missing(
    error: KafkaError | None,
    conn_id: str,
    user: str,
    doing: str,
    rights: Sequence[Right],
    name: str = "",
    events: ClientEvents | None = None,
) -> RightMissing | None:
    """Return the exception for a client's error; None if that is not about rights.

    :param error: the error; None if only ``events`` are asked.
    :param conn_id: the connection; "" where it is not known, as in a Spark task.
    :param user: how the client introduces itself (:func:`~airflow_kafka_spark.hooks.kafka.config.identity`).
    :param doing: what was requested.
    :param rights: what the request needs.
    :param name: the resource that failed, where the right does not name one.
    :param events: what a producer reports besides: in a transaction that was refused, records fail with other errors.
    """
    code = error.name() if error is not None else ""
    if code not in _CODES and events is not None:
        code = next((known for known in _CODES if events.first({known}, 0.0) is not None), "")
    if code not in _CODES:
        return None
    resource = _CODES[code]
    needed = next((right for right in rights if right.resource == resource), Right(resource, ""))
    named = "kafka-cluster" if resource == "cluster" else needed.name or name
    return RightMissing(conn_id, doing, code, user, resource, named, needed.operation)


def right_missing_in_java(text: str, doing: str) -> RightMissing | None:
    """Return the exception for a message of the Java client inside Spark; None if that is not about rights."""
    found = _JAVA.search(text)
    if found is None:
        return None
    resource: Resource = "topic" if found[1] == "topics" else "group"
    code = "TOPIC_AUTHORIZATION_FAILED" if resource == "topic" else _GROUP
    return RightMissing("", doing, code, "", resource, found[2].rstrip(","), "Read" if resource == "topic" else "Describe")


@contextmanager
def named_rights(
    config: Mapping[str, Any], doing: str, *rights: Right, conn_id: str = "", events: ClientEvents | None = None
) -> Iterator[None]:
    """Raise :class:`RightMissing` in place of a client's error that is about rights.

    :param config: the client's configuration.
    :param doing: what is requested in here.
    :param rights: what that needs.
    :param conn_id: the connection, where it is known.
    :param events: what the client reports besides: a producer calls some refusals fatal, and says only there why.
    """
    from confluent_kafka import KafkaException

    try:
        yield
    except (KafkaException, SystemError) as error:
        said = error.args[0] if isinstance(error, KafkaException) and error.args else None
        found = right_missing(said, conn_id, identity(config), doing, rights, events=events)
        if found is None:
            raise
        raise found from None


def consume(
    consumer: Consumer, most: int, timeout: float, config: Mapping[str, Any], doing: str, *, conn_id: str = ""
) -> list[Message]:
    """Return the next messages of a consumer that reads assigned partitions.

    Such a consumer needs no right on its group: it neither joins it nor commits to it. librdkafka looks up the coordinator of the
    group all the same, and reports a refusal of that in place of a record. It is left out.

    :param most: at most so many messages.
    :param timeout: seconds to wait for them.
    :param config: the consumer's configuration, for the error.
    :param doing: what is read, for the error.
    :param conn_id: the connection, where it is known.
    :raises RightMissing: the user may not read a topic.
    """
    messages: list[Message] = consumer.consume(most, timeout)
    return checked(messages, config, doing, conn_id=conn_id)


def checked(messages: list[Message], config: Mapping[str, Any], doing: str, *, conn_id: str = "") -> list[Message]:
    """Return messages without refusals of the group's coordinator; see :func:`consume`.

    :raises RightMissing: the user may not read a topic.
    """
    codes = {error.name() for message in messages if (error := message.error()) is not None} & _CODES.keys()
    if not codes:
        return messages
    for message in messages:
        error = message.error()
        if error is not None and error.name() != _GROUP:
            topic = message.topic() or ""
            found = right_missing(error, conn_id, identity(config), doing, [Right("topic", "Read", topic)])
            if found is not None:
                raise found
    return [message for message in messages if (error := message.error()) is None or error.name() != _GROUP]
