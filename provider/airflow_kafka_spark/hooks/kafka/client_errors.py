"""Errors of Kafka clients: their causes, and refusals by an authorizer.

librdkafka retries in the background without end. It reports the cause only to ``error_cb`` and its log, while the call itself
times out; :class:`ClientEvents` collects the causes. A refused request does not name its resource ("Group authorization failed",
without the group): the caller passes resource and right, and :func:`find_missing_right` makes an error that names both.

This module imports neither Airflow nor pyspark, because Spark's tasks use it, too.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from airflow_kafka_spark.errors import RightMissing
from airflow_kafka_spark.hooks.kafka.config import describe_identity

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message

log = logging.getLogger(__name__)

CONNECTION_LOG = "log"
"""Name under which failed connections that only the log reports are stored."""
REFUSED_LOGIN = frozenset(
    {"_AUTHENTICATION", "_SSL", "SASL_AUTHENTICATION_FAILED", "UNSUPPORTED_SASL_MECHANISM", "ILLEGAL_SASL_STATE"}
)
"""Names of the errors with which a broker refuses a login or a TLS handshake."""
_NOISE = re.compile(
    r"(?<=\d)/(?:bootstrap|\d+)(?=: )|(?<=: )Connect to ipv[46]#\S+ failed: "
    r"| \(after \d+ms in state \w+(?:, \d+ identical error\(s\) suppressed)?\)$"
)
"""Parts of librdkafka's texts that say nothing to a user: a broker's number, its address once more, and states of the client."""
_NO_KAFKA = re.compile(r"Invalid response size -?\d+ \(0\.\.\d+\): increase receive\.message\.max\.bytes")
_OTHER_PROTOCOL = "what answers there is no Kafka broker, or its listener expects another `security.protocol`"
_REFUSED_RIGHT = re.compile(r"\b[A-Z_]+_AUTHORIZATION_FAILED\b")


@dataclass(frozen=True)
class _Seen:
    first: float
    last: float
    text: str


class ClientEvents:
    """Collects what a client of librdkafka reports besides its answers: errors and log lines.

    Pass it as ``logger=events`` and ``error_cb=events.on_error`` to a client of confluent-kafka. Log lines then go to this
    module's logger at debug level instead of stderr, and ``reason()`` returns the reason for missing answers.

    :param error_cb: a callback of the connection, which is called with every error, too.
    """

    def __init__(self, error_cb: Callable[[KafkaError], None] | None = None) -> None:
        self._error_cb = error_cb
        self._seen: dict[str, _Seen] = {}

    def log(self, level: int, message: str, *args: object) -> None:
        """Record a log line of librdkafka."""
        log.debug("librdkafka: " + message, *args)
        if args and args[0] == "FAIL":
            self._note(CONNECTION_LOG, str(args[-1]).partition("]: ")[2])
        # Only the log names the reason of a failed transaction: its records fail as "purged in queue", or by the client's state.
        elif args and args[0] == "TXNERR" and (refused := _REFUSED_RIGHT.search(str(args[-1]))):
            self._note(refused[0], str(args[-1]))

    def on_error(self, error: KafkaError) -> None:
        """Record an error that belongs to no request."""
        # A broker that rejects the client's certificate sends a TLS alert, which librdkafka reports as a lost connection.
        self._note("_SSL" if "SSL alert number" in error.str() else error.name(), error.str())
        if self._error_cb:
            self._error_cb(error)

    def _note(self, name: str, text: str) -> None:
        now = time.monotonic()
        self._seen[name] = _Seen(self._seen[name].first if name in self._seen else now, now, text)

    def first(self, names: Collection[str], since: float) -> float | None:
        """Return the time of the first error with one of these names since ``since`` (monotonic clock); None without one."""
        begun = [max(seen.first, since) for name, seen in list(self._seen.items()) if name in names and seen.last >= since]
        return min(begun, default=None)

    def reason(self, since: float = 0.0) -> tuple[str, str]:
        """Return Kafka's name and the text of the most specific error; ("", "") without errors.

        :param since: time on the monotonic clock; earlier errors are ignored.
        """
        seen = {name: (error.last, error.text) for name, error in list(self._seen.items()) if error.last >= since}
        for names in (REFUSED_LOGIN, {"_RESOLVE"}, {"_TRANSPORT"}, {CONNECTION_LOG}, seen.keys()):
            found = [(seen[name], name) for name in names & seen.keys()]
            if found:
                (_, text), name = max(found)
                return name, _NO_KAFKA.sub(_OTHER_PROTOCOL, _NOISE.sub("", text))
        return "", ""


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


@dataclass(frozen=True)
class KafkaUser:
    """The user of a client, for errors.

    :param conn_id: the connection; "" (default) if unknown, as in a Spark task.
    :param identity: see :func:`~airflow_kafka_spark.hooks.kafka.config.describe_identity`; "" (default) if unknown.
    """

    conn_id: str = ""
    identity: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any], conn_id: str = "") -> KafkaUser:
        """Return the user of a client with this configuration."""
        return cls(conn_id, describe_identity(config))


def find_missing_right(
    error: KafkaError | None,
    user: KafkaUser,
    doing: str,
    rights: Sequence[Right],
    name: str = "",
    events: ClientEvents | None = None,
) -> RightMissing | None:
    """Return the exception for a client's error; None if it is no refusal because of a missing right.

    :param error: the error; None to check ``events`` only.
    :param user: the user of the client.
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
    return RightMissing(user.conn_id, doing, code, user.identity, resource, named, needed.operation)


def find_missing_right_in_java(text: str, doing: str) -> RightMissing | None:
    """Return the exception for a message of Spark's Java client; None if it is no refusal because of a missing right."""
    found = _JAVA.search(text)
    if found is None:
        return None
    resource: Resource = "topic" if found[1] == "topics" else "group"
    code = "TOPIC_AUTHORIZATION_FAILED" if resource == "topic" else _GROUP
    return RightMissing("", doing, code, "", resource, found[2].rstrip(","), "Read" if resource == "topic" else "Describe")


@contextmanager
def name_missing_rights(
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
        found = find_missing_right(said, KafkaUser.of(config, conn_id), doing, rights, events=events)
        if found is None:
            raise
        raise found from None


def consume_messages(
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
    return drop_group_refusals(messages, config, doing, conn_id=conn_id)


def drop_group_refusals(messages: list[Message], config: Mapping[str, Any], doing: str, *, conn_id: str = "") -> list[Message]:
    """Return messages without refusals of the group's coordinator; see :func:`consume_messages`.

    :raises RightMissing: the user may not read a topic.
    """
    codes = {error.name() for message in messages if (error := message.error()) is not None} & _CODES.keys()
    if not codes:
        return messages
    for message in messages:
        error = message.error()
        if error is not None and error.name() != _GROUP:
            topic = message.topic() or ""
            found = find_missing_right(error, KafkaUser.of(config, conn_id), doing, [Right("topic", "Read", topic)])
            if found is not None:
                raise found
    return [message for message in messages if (error := message.error()) is None or error.name() != _GROUP]
