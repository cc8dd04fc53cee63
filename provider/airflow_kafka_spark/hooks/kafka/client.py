"""Requests to a cluster, with a timeout, and with errors that name the cause.

librdkafka retries in the background without end. It reports the cause only to ``error_cb`` and its log, while the call itself
times out; :class:`ClientEvents` collects the causes, and ``KafkaCalls`` adds them to the error of a call. A refused request does
not name its resource ("Group authorization failed", without the group): the caller passes resource and right, and
:func:`find_missing_right` makes an error that names both.

This module imports neither Airflow nor pyspark, because Spark's tasks use it, too.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar, cast

from airflow_kafka_spark.errors import (
    ConnectionInvalid,
    KafkaRefused,
    KafkaSparkError,
    KafkaUnavailable,
    RightMissing,
    TopicMissing,
)
from airflow_kafka_spark.hooks.kafka.config import ALL_BROKERS, describe_identity, make_admin_config

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, Message, ThrottleEvent
    from confluent_kafka.admin import AdminClient


CONNECTION_LOG = "log"
"""Name under which failed connections that only the log reports are stored."""
REFUSED_LOGIN = frozenset(
    {"_AUTHENTICATION", "_SSL", "SASL_AUTHENTICATION_FAILED", "UNSUPPORTED_SASL_MECHANISM", "ILLEGAL_SASL_STATE"}
)
"""Names of the errors with which a broker refuses a login or a TLS handshake."""
THROTTLED = "; the brokers delay their answers, because of a quota of the user or the client id"
"""The end of the message of an error, if brokers throttle the client."""
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
    module's logger at debug level instead of stderr, and ``find_reason()`` returns the reason for missing answers. With
    ``throttle_cb=events.on_throttle``, too, ``describe_throttling()`` says if a quota delays answers.

    :param error_cb: a callback of the connection, which is called with every error, too.
    """

    def __init__(self, error_cb: Callable[[KafkaError], None] | None = None) -> None:
        self._error_cb = error_cb
        self._seen: dict[str, _Seen] = {}
        self._throttled_at = 0.0

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

    def on_throttle(self, event: ThrottleEvent) -> None:
        """Record that a broker delays its answers. The client also reports when a broker does so no longer."""
        if event.throttle_time > 0:
            self._throttled_at = time.monotonic()

    def describe_throttling(self, since: float = 0.0) -> str:
        """Return that brokers have delayed their answers because of a quota, as the end of a message; "" if they have not.

        :param since: time on the monotonic clock; earlier delays are ignored. Default: none is.
        """
        return THROTTLED if self._throttled_at and self._throttled_at >= since else ""

    def _note(self, name: str, text: str) -> None:
        now = time.monotonic()
        self._seen[name] = _Seen(self._seen[name].first if name in self._seen else now, now, text)

    def find_first(self, names: Collection[str], since: float) -> float | None:
        """Return the time of the first error with one of these names since ``since`` (monotonic clock); None without one."""
        begun = [max(seen.first, since) for name, seen in list(self._seen.items()) if name in names and seen.last >= since]
        return min(begun, default=None)

    def find_refused_login(self, since: float) -> str:
        """Return why the brokers have refused the login for :data:`REFUSED_PATIENCE_SECONDS`; "" if they have not.

        :param since: time on the monotonic clock; earlier refusals are ignored.
        """
        refused_at = self.find_first(REFUSED_LOGIN, since)
        is_over = refused_at is not None and time.monotonic() - refused_at > REFUSED_PATIENCE_SECONDS
        return self.find_reason(since)[1] if is_over else ""

    def find_reason(self, since: float = 0.0) -> tuple[str, str]:
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
        code = next((known for known in _CODES if events.find_first({known}, 0.0) is not None), "")
    if code not in _CODES:
        return None
    resource = _CODES[code]
    needed = next((right for right in rights if right.resource == resource), Right(resource, ""))
    named = "kafka-cluster" if resource == "cluster" else needed.name or name
    return RightMissing(user.conn_id, doing, code, user.identity, resource, named, [needed.operation] if needed.operation else [])


def find_missing_right_in_java(text: str, doing: str) -> RightMissing | None:
    """Return the exception for a message of Spark's Java client; None if it is no refusal because of a missing right."""
    found = _JAVA.search(text)
    if found is None:
        return None
    resource: Resource = "topic" if found[1] == "topics" else "group"
    code = "TOPIC_AUTHORIZATION_FAILED" if resource == "topic" else _GROUP
    return RightMissing("", doing, code, "", resource, found[2].rstrip(","), ["Read" if resource == "topic" else "Describe"])


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


class ConsumedMessage(Protocol):
    """A record or an event, as a consumer returns it.

    The client's own type includes messages that a program makes, which may have no topic, no offset, and another form of headers.
    Here, only an error of the whole client has neither topic nor offset: look at :meth:`error` first.
    """

    def __len__(self) -> int: ...
    def error(self) -> KafkaError | None: ...
    def topic(self) -> str: ...
    def partition(self) -> int: ...
    def offset(self) -> int: ...
    def leader_epoch(self) -> int | None: ...
    def timestamp(self) -> tuple[int, int]: ...
    def key(self) -> bytes | None: ...
    def value(self) -> bytes | None: ...
    def headers(self) -> list[tuple[str, bytes | None]] | None: ...


def consume_messages(
    consumer: Consumer, most: int, timeout: float, config: Mapping[str, Any], doing: str, *, conn_id: str = ""
) -> list[ConsumedMessage]:
    """Return the next messages of a consumer that reads assigned partitions: the first one, and those that have come with it.

    Such a consumer needs no right on its group, because it neither joins it nor commits to it. But librdkafka looks up the
    coordinator of the group, and returns a refusal of that request instead of a record. Such refusals are left out.

    :param most: maximum number of messages.
    :param timeout: maximum seconds to wait for the first one.
    :param config: the consumer's configuration, for the error.
    :param doing: the action, for the error.
    :param conn_id: the connection; "" (default) if unknown.
    :raises RightMissing: the user may not read a topic.
    """
    # A call for several messages waits until it has as many, or for the whole of its time.
    messages = consumer.consume(1, timeout)
    if messages and most > 1:
        messages += consumer.consume(most - 1, 0)
    return drop_group_refusals(messages, config, doing, conn_id=conn_id)


def drop_group_refusals(
    messages: Sequence[Message] | Sequence[ConsumedMessage], config: Mapping[str, Any], doing: str, *, conn_id: str = ""
) -> list[ConsumedMessage]:
    """Return messages of a consumer without refusals of the group's coordinator; see :func:`consume_messages`.

    :raises RightMissing: the user may not read a topic.
    """
    consumed = cast("list[ConsumedMessage]", messages)
    codes = {error.name() for message in consumed if (error := message.error()) is not None} & _CODES.keys()
    if not codes:
        return consumed
    for message in consumed:
        error = message.error()
        if error is not None and error.name() != _GROUP:
            topic = message.topic()
            found = find_missing_right(error, KafkaUser.of(config, conn_id), doing, [Right("topic", "Read", topic)])
            if found is not None:
                raise found
    return [message for message in consumed if (error := message.error()) is None or error.name() != _GROUP]


K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

log = logging.getLogger(__name__)

# Seconds after which a first contact is given up once a connection has failed and no other broker has answered, or once a broker
# has refused the client. A client that was connected before waits for the whole timeout, since brokers may be restarting.
DOWN_PATIENCE_SECONDS = 5.0
REFUSED_PATIENCE_SECONDS = 1.0

FIRST_ATTEMPT_SECONDS = 5.0
NEVER_SECONDS = 3600.0

_SLICE_SECONDS = 0.05
_NUDGE_SECONDS = 2.0
_BACKOFF_SECONDS = (0.1, 0.2, 0.4, 0.8)

_UNANSWERED = frozenset({"_TIMED_OUT", "_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_TIMED_OUT_QUEUE", "_DESTROY", "_NOENT"})
_MISSING = frozenset({"UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC_ID", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION"})
# Errors of temporary states: elections, restarts, a topic that some brokers do not know yet, a transaction that is ending.
# _DESTROY_BROKER: the metadata that librdkafka has just read do not name the broker (any more) that the request was waiting for.
_TRANSIENT = frozenset(
    {
        "BROKER_NOT_AVAILABLE",
        "CONCURRENT_TRANSACTIONS",
        "COORDINATOR_LOAD_IN_PROGRESS",
        "COORDINATOR_NOT_AVAILABLE",
        "FENCED_LEADER_EPOCH",
        "KAFKA_STORAGE_ERROR",
        "LEADER_NOT_AVAILABLE",
        "NETWORK_EXCEPTION",
        "NOT_CONTROLLER",
        "NOT_COORDINATOR",
        "NOT_LEADER_FOR_PARTITION",
        "OFFSET_NOT_AVAILABLE",
        "REBALANCE_IN_PROGRESS",
        "REPLICA_NOT_AVAILABLE",
        "REQUEST_TIMED_OUT",
        "THROTTLING_QUOTA_EXCEEDED",
        "UNKNOWN_LEADER_EPOCH",
        "UNSTABLE_OFFSET_COMMIT",
        "_DESTROY_BROKER",
        "_TRANSPORT",
        "_WAIT_COORD",
        "_WAIT_CACHE",
        "_NODE_UPDATE",
        "_OUTDATED",
        "_RETRY",
    }
)
# Errors of a client whose metadata are older than an election. Only a new client reads them again at once.
_OUTDATED = frozenset({"FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH"})
# "No leaders found": usual for a moment after a topic was created. A client was seen to return it for two minutes.
_NO_LEADERS, NO_LEADERS_TRIES = "_NOENT", 3


@dataclass
class _PendingKeys(Generic[K, V]):
    """The keys of one call, sorted into answers, errors, and keys to request again with the reason (``again``)."""

    doing: str
    wait_for: Collection[str]
    check: Callable[[V], str]
    coordinator: bool
    rights: Sequence[Right]
    started: float
    timeout: float
    answers: dict[K, V] = field(default_factory=dict)
    errors: dict[K, KafkaError] = field(default_factory=dict)
    again: dict[K, str | KafkaError] = field(default_factory=dict)

    @property
    def left(self) -> float:
        return self.started + self.timeout - time.monotonic()

    def is_outdated(self, tries: int) -> bool:
        """Return True if the client uses old metadata. It keeps these for minutes, even if it is refused.

        :param tries: number of tries so far.
        """
        names = {error.name() for error in self.again.values() if not isinstance(error, str)}
        return bool(names & _OUTDATED) or (_NO_LEADERS in names and tries >= NO_LEADERS_TRIES)

    def add_result(self, key: K, future: Future[V]) -> bool:
        """Add the result for one key. Return True if a broker has answered, False if librdkafka has given up by itself."""
        from confluent_kafka import KafkaException

        try:
            answer = future.result()
        except KafkaException as failed:
            error = failed.args[0]
            if describe_temporary_error(error, self.wait_for) or error.name() == "_TIMED_OUT":
                self.again[key] = error
            else:
                self.errors[key] = error
            # Names of errors that librdkafka itself raises begin with an underscore.
            return not error.name().startswith("_")
        reason = self.check(answer)
        if reason:
            self.again[key] = reason
        else:
            self.answers[key] = answer
        return True


def make_admin_client(config: Mapping[str, Any], events: ClientEvents) -> AdminClient:
    """Return a client of all brokers of a cluster.

    :param config: the extra of the ``kafka`` connection, or a configuration that was made of it.
    :param events: takes the errors and the log of the client.
    :raises KafkaException: librdkafka does not accept the settings.
    """
    from confluent_kafka.admin import AdminClient

    settings = {**ALL_BROKERS, **make_admin_config(config, **{"error_cb": events.on_error})}
    return AdminClient(settings, logger=events)


class KafkaCalls:
    """Requests to one cluster through one ``AdminClient``, made when it is needed.

    :param make_client: returns a client that reports to the given events.
    :param events: collector of the errors that the client reports beside its answers.
    :param conn_id: the Airflow connection, for errors.
    :param identity: identity of the client (user, mechanism, protocol) without secrets, for errors.
    :param timeout: maximum seconds that a call may take.
    """

    def __init__(
        self,
        make_client: Callable[[ClientEvents], AdminClient],
        events: ClientEvents,
        *,
        conn_id: str,
        identity: str,
        timeout: float,
    ) -> None:
        self.conn_id = conn_id
        self._make_client = make_client
        self._client: AdminClient | None = None
        self.events = events
        self._identity = identity
        self._timeout = timeout
        self._connected = False
        self.consumers = KeptConsumers()

    @property
    def client(self) -> AdminClient:
        if self._client is None:
            self._client = self._make_client(self.events)
            self._let_go = keep_client(self._client, self)
        return self._client

    def discard_client(self) -> None:
        """Release the client with its pending requests; the next call makes a new one."""
        if self._client is not None:
            self._client = None
            self._let_go()

    def connect(self) -> str:
        """Return the cluster's id.

        On a first contact, by this or any other call, a refused login or a failed TLS handshake is reported after about a second,
        and brokers that are all unreachable after about five, not after the whole timeout.

        :raises ConnectionInvalid: the brokers refuse the login, or TLS fails.
        :raises KafkaUnavailable: no broker answers.
        """
        return self.request_one("connecting", lambda client, timeout: client.describe_cluster(request_timeout=timeout)).cluster_id

    def ensure_connected(self) -> None:
        """Call :meth:`connect`, unless a broker has answered before. Use it before a call of a client that only times out."""
        if not self._connected:
            self.connect()

    def request_one(
        self,
        doing: str,
        submit: Callable[[AdminClient, float], Future[V]],
        *,
        check: Callable[[V], str] = lambda answer: "",
        coordinator: bool = False,
        rights: Sequence[Right] = (),
    ) -> V:
        """Return the answer to one request. Parameters and errors are those of :meth:`request_each`."""
        answers, _ = self.request_each(
            doing,
            [""],
            lambda client, keys, timeout: {"": submit(client, timeout)},
            check=check,
            coordinator=coordinator,
            rights=rights,
        )
        return answers[""]

    def request_each(
        self,
        doing: str,
        keys: Collection[K],
        submit: Callable[[AdminClient, list[K], float], Mapping[K, Future[V]]],
        *,
        tolerate: Collection[str] = (),
        wait_for: Collection[str] = (),
        check: Callable[[V], str] = lambda answer: "",
        coordinator: bool = False,
        rights: Sequence[Right] = (),
    ) -> tuple[dict[K, V], dict[K, KafkaError]]:
        """Return an answer for every key. Requests with temporary errors are repeated until the timeout.

        :param doing: the action, for errors ("reading offsets").
        :param keys: the keys to request: topics, partitions or groups.
        :param submit: sends one batch for the given keys, with a timeout in seconds.
        :param tolerate: Kafka's names of errors to return instead of raising them.
        :param wait_for: Kafka's names of further errors that are temporary for this request.
        :param check: returns why an answer is not final yet, or "". Such an answer is requested again.
        :param coordinator: True if the request goes to a group's coordinator. If such a request times out in librdkafka, the
            process is aborted once the coordinator is back (librdkafka issue 4605, pull request 5397). So the client is discarded
            before.
        :param rights: rights on each key that the request needs, for :class:`RightMissing`.
        :return: the answers, and the tolerated errors.
        :raises KafkaUnavailable: no answer came in time.
        :raises ConnectionInvalid: the brokers refuse the login, or TLS fails.
        :raises TopicMissing: topics or partitions are unknown; the error names all of them.
        :raises RightMissing: the user lacks a right.
        :raises KafkaRefused: any other error.
        """
        batch: _PendingKeys[K, V] = _PendingKeys(
            doing, wait_for, check, coordinator, rights, time.monotonic(), self._timeout, again=dict.fromkeys(keys, "")
        )
        seconds = FIRST_ATTEMPT_SECONDS
        for attempt in count():
            began = time.monotonic()
            self._ask(batch, submit, seconds)
            if time.monotonic() - began > 0.9 * seconds:
                seconds *= 2  # the brokers are slow, not down
            self._raise_for(batch, {key: error for key, error in batch.errors.items() if error.name() not in tolerate})
            if not batch.again:
                break
            if batch.is_outdated(attempt + 1):
                self.discard_client()
            backoff = _BACKOFF_SECONDS[min(attempt, len(_BACKOFF_SECONDS) - 1)]
            if batch.left < backoff + 0.1:
                raise self._make_exhausted_error(batch)
            self.client.poll(backoff)
        return batch.answers, batch.errors

    def _ask(
        self,
        batch: _PendingKeys[K, V],
        submit: Callable[[AdminClient, list[K], float], Mapping[K, Future[V]]],
        seconds: float,
    ) -> None:
        if not batch.again:
            return
        # An attempt may use only a part of the time, because librdkafka never redirects a request that waits for a dead broker.
        seconds = min(seconds, batch.left)
        futures = submit(self.client, list(batch.again), NEVER_SECONDS if batch.coordinator else seconds)
        answered = False
        try:
            answered = self._wait(futures.values(), batch, seconds)
        finally:
            if batch.coordinator and not answered:
                self.discard_client()
        if not answered:
            batch.again = dict.fromkeys(batch.again, self.find_reason(batch.started))
            return
        batch.again = {}
        for key, future in futures.items():
            if batch.add_result(key, future):
                self._connected = True

    def _raise_for(self, batch: _PendingKeys[K, V], errors: Mapping[K, KafkaError]) -> None:
        missing = [str(key) for key, error in errors.items() if error.name() in _MISSING]
        if missing:
            raise TopicMissing(self.conn_id, missing)
        for key, error in errors.items():
            raise self.translate(batch.doing, error, key, batch.started, batch.rights)

    def _make_exhausted_error(self, batch: _PendingKeys[K, V]) -> KafkaSparkError:
        key, reason = next(iter(batch.again.items()))
        if isinstance(reason, str):
            return self.make_unavailable_error(batch.doing, f"{key}: {reason}" if key else reason)
        return self.translate(batch.doing, reason, key, batch.started, batch.rights)

    def _wait(self, futures: Collection[Future[V]], batch: _PendingKeys[K, V], seconds: float) -> bool:
        """Wait for the futures. Return False if some are not done in time."""
        pending: Collection[Future[V]] = futures
        # librdkafka enforces the timeout of all requests except those to a coordinator.
        over_at = time.monotonic() + seconds + (0 if batch.coordinator else 1)
        nudge_at = time.monotonic() + _NUDGE_SECONDS
        while True:
            # poll() serves error_cb, the log and token refreshes. Results arrive on librdkafka's own thread.
            self.client.poll(0)
            pending = wait(pending, timeout=_SLICE_SECONDS).not_done
            if not pending:
                return True
            now = time.monotonic()
            if not self._connected:
                self._give_up_early(batch.doing, batch.started, now)
            if now > over_at:
                return False
            if self._connected and now > nudge_at:
                self._refresh_metadata()
                nudge_at = time.monotonic() + _NUDGE_SECONDS

    def _refresh_metadata(self) -> None:
        """Make librdkafka look up the controller again; otherwise it waits for the known one, even if that broker is down."""
        from confluent_kafka import KafkaException

        with suppress(KafkaException):
            self.client.list_topics(timeout=1)

    def _give_up_early(self, doing: str, started: float, now: float) -> None:
        if refused := self.events.find_refused_login(started):
            raise self.make_login_error(refused)
        # One failed connection is enough, because librdkafka does not always report that all of them failed.
        down_at = self.events.find_first({"_ALL_BROKERS_DOWN", "_TRANSPORT", "_RESOLVE", CONNECTION_LOG}, started)
        if down_at is not None and now - down_at > DOWN_PATIENCE_SECONDS:
            failure = self.make_unavailable_error(doing, self.find_reason(started))
            # librdkafka reports one error once in half a minute. The next call would wait for it with the same client.
            self.discard_client()
            raise failure

    def translate(
        self, doing: str, error: KafkaError, what: object = "", since: float = 0.0, rights: Sequence[Right] = ()
    ) -> KafkaSparkError:
        """Return this package's error for an error of Kafka, with the reason that the client has reported."""
        name, text = error.name(), error.str()
        if name in _UNANSWERED:
            self.client.poll(0)
            reason_name, reason = self.events.find_reason(since)
            return (
                self.make_login_error(reason)
                if reason_name in REFUSED_LOGIN
                else self.make_unavailable_error(doing, reason or text)
            )
        if name in REFUSED_LOGIN:
            return self.make_login_error(text)
        if name in _MISSING:
            return TopicMissing(self.conn_id, [str(what)])
        if describe_temporary_error(error):
            return self.make_unavailable_error(doing, describe_temporary_error(error))
        resource = str(getattr(what, "topic", what))
        if missing := find_missing_right(error, KafkaUser(self.conn_id, self._identity), doing, rights, resource):
            return missing
        return KafkaRefused(self.conn_id, doing, name, f"{what}: {text}" if what else text)

    def find_reason(self, since: float) -> str:
        """Return the reason for a missing answer, as text."""
        self.client.poll(0)
        return self.events.find_reason(since)[1] or f"no answer within {self._timeout:g} s"

    def make_unavailable_error(self, doing: str, detail: str) -> KafkaUnavailable:
        if not self._connected and "closed by peer" in detail and "?" not in detail:
            detail += "; perhaps this listener expects another `security.protocol`"
        return KafkaUnavailable(self.conn_id, doing, detail)

    def make_right_error(self, resource: Resource, name: str, missing: Sequence[str], needed: Sequence[str]) -> RightMissing:
        """Return the error for rights that the brokers do not name among those of the user.

        :param needed: all rights on the resource that its use needs.
        """
        code = next(code for code, known in _CODES.items() if known == resource)
        return RightMissing(self.conn_id, "checking rights", code, self._identity, resource, name, missing, needed)

    def make_login_error(self, detail: str) -> ConnectionInvalid:
        return ConnectionInvalid(
            self.conn_id,
            f"the brokers did not accept {self._identity}: {detail}",
            f"Check `security.protocol`, `sasl.*` and `ssl.*` in the extra of `{self.conn_id}`",
        )


def describe_temporary_error(error: KafkaError | None, wait_for: Collection[str] = ()) -> str:
    """Return the text of an error if it is temporary; otherwise "".

    :param error: an error, or None.
    :param wait_for: names of further errors that are temporary for this request.
    """
    return (
        f"{error.str()} ({error.name()})"
        if error is not None and (error.name() in _TRANSIENT or error.name() in wait_for)
        else ""
    )


# --- consumers that are used again ---------------------------------------------------------------------------------------

KEEP_SECONDS = 30.0
"""Seconds after its creation for which a consumer may be used again. Its metadata and its token stay valid for that long."""


@dataclass
class LentConsumer:
    """A consumer in use.

    :param consumer: the consumer, without an assignment when it is lent.
    :param created: when it was created, in seconds of the monotonic clock.
    :param let_go: releases the consumer (:func:`keep_client`).
    :param events: what the consumer reports besides its records.
    :param past: the offset after the last record that its users have read. The consumer is lent again only to read from there on:
        a record, or an end of the partition, that is left in its queue from an earlier use is then still correct.
    """

    consumer: Consumer
    created: float
    let_go: Callable[[], object]
    events: ClientEvents
    past: int = 0

    def close(self) -> None:
        """Close the consumer on this thread, and release it."""
        self.consumer.close()
        self.let_go()


class KeptConsumers:
    """The consumers of one cluster that are not in use, for the next request of their kind.

    A new consumer opens three connections, one of them to the coordinator of a group, and a window reads the ledger and the
    group's offsets several times. A consumer whose use has failed is closed.
    """

    def __init__(self) -> None:
        self._idle: dict[Hashable, LentConsumer] = {}
        self._lock = threading.Lock()

    @contextmanager
    def lend(
        self,
        kind: Hashable,
        make: Callable[[ClientEvents], Consumer],
        start: int = 0,
        error_cb: Callable[[KafkaError], None] | None = None,
    ) -> Iterator[LentConsumer]:
        """Lend the kept consumer of a kind, or a new one.

        :param kind: what identifies the settings of the consumer, and the partition that it reads.
        :param make: creates a consumer that reports to these events, or to others.
        :param start: the offset at which reading begins.
        :param error_cb: a callback of the connection, for the events of a new one.
        """
        lent = self._take(kind, start)
        if lent is None:
            events = ClientEvents(error_cb)
            consumer = make(events)
            lent = LentConsumer(consumer, time.monotonic(), keep_client(consumer, self), events)
        usable = False
        try:
            yield lent
            usable = True
        except GeneratorExit:
            usable = True  # a reader that wanted no more records
            raise
        finally:
            other = self._keep(kind, lent) if usable else lent
            if other is not None:
                other.close()

    def _take(self, kind: Hashable, start: int) -> LentConsumer | None:
        with self._lock:
            lent = self._idle.pop(kind, None)
        if lent is not None and (time.monotonic() - lent.created > KEEP_SECONDS or start < lent.past):
            lent.close()
            return None
        return lent

    def _keep(self, kind: Hashable, lent: LentConsumer) -> LentConsumer | None:
        """Keep a consumer; return the one that was kept before it, or None."""
        lent.consumer.unassign()
        with self._lock:
            before = self._idle.get(kind)
            self._idle[kind] = lent
        return before

    def close(self) -> None:
        """Close the kept consumers."""
        with self._lock:
            idle, self._idle = list(self._idle.values()), {}
        for lent in idle:
            lent.close()


# --- release of clients -------------------------------------------------------------------------------------------------

_released: SimpleQueue[object] = SimpleQueue()
_reaper: threading.Thread | None = None
_starting = threading.Lock()

_POLL_SECONDS = (0.1, 0.2, 0.5, 1.0, 5.0)


def keep_client(client: object, owner: object) -> weakref.finalize:
    """Keep a client alive until its owner is collected or the returned function is called, and no other reference to it is left.

    :param client: a client of confluent-kafka.
    :param owner: the object that uses the client, and that is not reachable from it.
    :return: a function that releases the client; it may be called on any thread.
    """
    _start()
    letting_go = weakref.finalize(owner, _released.put, client)
    letting_go.atexit = False
    return letting_go


def _start() -> None:
    global _reaper
    with _starting:
        # In a process that was forked from the one that started the thread, the thread is not alive.
        if _reaper is None or not _reaper.is_alive():
            _reaper = threading.Thread(target=_reap, name="airflow-kafka-spark-clients", daemon=True)
            _reaper.start()


def _reap() -> None:
    waiting: list[object] = []
    looks = 0
    while True:
        try:
            waiting.append(_released.get(timeout=_POLL_SECONDS[min(looks, len(_POLL_SECONDS) - 1)] if waiting else None))
            looks = 0
        except Empty:
            looks += 1
        for at in reversed(range(len(waiting))):
            # Two references are left, that of this list and that of the call itself, so no other one can be made.
            if sys.getrefcount(waiting[at]) <= 2:
                del waiting[at]
