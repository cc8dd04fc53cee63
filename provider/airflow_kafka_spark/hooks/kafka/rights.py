"""Rights on a cluster with an authorizer: translate a refusal into an error that names the resource and the missing right.

Clients report neither: an error is "Group authorization failed", without the group. The caller passes both. This module imports
neither Airflow nor pyspark, because Spark's tasks use it, too.
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
"""Kind of the refused resource by Kafka's name of the error."""
_GROUP = "GROUP_AUTHORIZATION_FAILED"

_JAVA = re.compile(r"Not authorized to access (topics|group): \[?([^\]\s]+)\]?")


@dataclass(frozen=True)
class Right:
    """A right that a request needs.

    :param resource: the kind of resource.
    :param operation: Kafka's name of the right, as ``Describe``.
    :param name: the resource's name; empty for a request with several resources, whose caller names the one that failed.
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
    """Return the exception for a client's error; None if it is no refusal because of a missing right.

    :param error: the error; None to look at ``events`` only.
    :param conn_id: the connection; "" if unknown, as in a Spark task.
    :param user: identity of the client (:func:`~airflow_kafka_spark.hooks.kafka.config.identity`).
    :param doing: the refused action.
    :param rights: the rights that the request needs.
    :param name: the resource that failed, if the right does not name one.
    :param events: further errors of a producer, because records of a refused transaction fail with other errors.
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
    """Return the exception for a message of Spark's Java client; None if it is no refusal because of a missing right."""
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
    """Raise :class:`RightMissing` instead of a client's error if that is a refusal because of a missing right.

    :param config: the client's configuration.
    :param doing: the action in this block.
    :param rights: the rights that the action needs.
    :param conn_id: the connection; "" (default) if unknown.
    :param events: further errors of the client: a producer reports some refusals as fatal errors, and the reason only there.
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

    Such a consumer needs no right on its group, because it neither joins it nor commits to it. But librdkafka looks up the
    coordinator of the group, and returns a refusal of that request instead of a record. Such refusals are left out.

    :param most: maximum number of messages.
    :param timeout: maximum seconds to wait for them.
    :param config: the consumer's configuration, for the error.
    :param doing: the action, for the error.
    :param conn_id: the connection; "" (default) if unknown.
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
