"""Asking a cluster: answers within a time, and errors that say why.

librdkafka retries in the background for ever, and a call itself just times out. ``KafkaCalls`` adds the reason that
:class:`~airflow_kafka_spark.hooks.kafka.events.ClientEvents` has collected.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from airflow_kafka_spark.errors import ConnectionInvalid, KafkaRefused, KafkaSparkError, KafkaUnavailable, TopicMissing
from airflow_kafka_spark.hooks.kafka.events import CONNECTION_LOG, REFUSED_LOGIN, ClientEvents
from airflow_kafka_spark.hooks.kafka.rights import Right, right_missing

if TYPE_CHECKING:
    from confluent_kafka import KafkaError
    from confluent_kafka.admin import AdminClient

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

log = logging.getLogger(__name__)

# How long a first contact may go on once a connection failed and no other broker answered, or a broker refused the client.
# Somebody who was already connected waits for the whole timeout instead: then it is a restart, not a wrong setting.
DOWN_PATIENCE_SECONDS = 5.0
REFUSED_PATIENCE_SECONDS = 1.0

FIRST_ATTEMPT_SECONDS = 5.0
NEVER_SECONDS = 3600.0

_SLICE_SECONDS = 0.05
_NUDGE_SECONDS = 2.0
_BACKOFF_SECONDS = (0.1, 0.2, 0.4, 0.8)

_UNANSWERED = frozenset({"_TIMED_OUT", "_TRANSPORT", "_ALL_BROKERS_DOWN", "_RESOLVE", "_TIMED_OUT_QUEUE", "_DESTROY", "_NOENT"})
_MISSING = frozenset({"UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC_ID", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION"})
# Passing states of a healthy cluster: elections, restarts, a topic not yet known everywhere, a transaction about to end.
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
        "_TRANSPORT",
        "_WAIT_COORD",
        "_WAIT_CACHE",
        "_NODE_UPDATE",
        "_OUTDATED",
        "_RETRY",
    }
)
# The client's idea of a partition's leader is older than the brokers': asking again helps a new client only.
_OUTDATED = frozenset({"FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH"})


@dataclass
class _Batch(Generic[K, V]):
    """Keys on their way to an answer or an error; ``again`` holds those still open, with the reason."""

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

    @property
    def outdated(self) -> bool:
        """Return True if the client uses metadata from before an election. It keeps that for minutes, however often it is
        refused."""
        return any(not isinstance(error, str) and error.name() in _OUTDATED for error in self.again.values())

    def file(self, key: K, future: Future[V]) -> bool:
        """Sort one result in. Return True if a broker answered, False if librdkafka gave up by itself."""
        from confluent_kafka import KafkaException

        try:
            answer = future.result()
        except KafkaException as failed:
            error = failed.args[0]
            if passing(error, self.wait_for) or error.name() == "_TIMED_OUT":
                self.again[key] = error
            else:
                self.errors[key] = error
            # librdkafka's own names begin with an underscore.
            return not error.name().startswith("_")
        reason = self.check(answer)
        if reason:
            self.again[key] = reason
        else:
            self.answers[key] = answer
        return True


class KafkaCalls:
    """Requests to one cluster through one ``AdminClient``, made when it is needed.

    :param make_client: makes the client, which reports to the given events.
    :param events: what the client reports beside its answers.
    :param conn_id: the Airflow connection, for errors.
    :param identity: how the client introduces itself (user, mechanism, protocol), for errors; no secrets.
    :param timeout: seconds that any one call may take.
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

    @property
    def client(self) -> AdminClient:
        if self._client is None:
            self._client = self._make_client(self.events)
            self._let_go = keep(self._client, self)
        return self._client

    def discard_client(self) -> None:
        """Let go of the client with all that is still open in it; the next call makes a new one."""
        if self._client is not None:
            self._client = None
            self._let_go()

    def connect(self) -> str:
        """Ask for the cluster's id and return it.

        On a first contact a refused login or a failed TLS handshake is an error after about a second, and brokers that are all
        unreachable after about five, not after the whole timeout. That holds for every other call too.

        :raises ConnectionInvalid: when the brokers refuse the login, or TLS fails.
        :raises KafkaUnavailable: when no broker answers.
        """
        return self.one("connecting", lambda client, timeout: client.describe_cluster(request_timeout=timeout)).cluster_id

    def one(
        self,
        doing: str,
        submit: Callable[[AdminClient, float], Future[V]],
        *,
        check: Callable[[V], str] = lambda answer: "",
        coordinator: bool = False,
        rights: Sequence[Right] = (),
    ) -> V:
        """Return one answer to one request. Parameters and errors are those of :meth:`each`."""
        answers, _ = self.each(
            doing,
            [""],
            lambda client, keys, timeout: {"": submit(client, timeout)},
            check=check,
            coordinator=coordinator,
            rights=rights,
        )
        return answers[""]

    def each(
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
        """Return an answer for every key. Passing errors are asked again until the timeout.

        :param doing: what is being done, for errors ("reading offsets").
        :param keys: what to ask about.
        :param submit: sends one batch for the given keys, with a timeout in seconds.
        :param tolerate: Kafka's names of errors to return rather than raise.
        :param wait_for: Kafka's names of errors that will pass here, beside those that always may.
        :param check: says what is not yet right about an answer, "" if nothing; such an answer is asked for again.
        :param coordinator: whether the request goes to a group's coordinator. Should librdkafka give up such a request, it aborts
            the process once the coordinator is back (librdkafka issue 4605, pull request 5397); so it is not allowed to: when the
            time of an attempt is over, the client is thrown away instead.
        :param rights: what the request needs on each key, for :class:`RightMissing`.
        :return: the answers, and the tolerated errors.
        :raises KafkaUnavailable: when no answer came in time.
        :raises ConnectionInvalid: when the brokers refuse the login, or TLS fails.
        :raises TopicMissing: when the error is an unknown topic or partition; it names all of them.
        :raises RightMissing: when the user lacks a right.
        :raises KafkaRefused: for every other error.
        """
        batch: _Batch[K, V] = _Batch(
            doing, wait_for, check, coordinator, rights, time.monotonic(), self._timeout, again=dict.fromkeys(keys, "")
        )
        seconds = FIRST_ATTEMPT_SECONDS
        for attempt in count():
            began = time.monotonic()
            self._ask(batch, submit, seconds)
            if time.monotonic() - began > 0.9 * seconds:
                seconds *= 2  # nobody is down, they are slow
            self._raise_for(batch, {key: error for key, error in batch.errors.items() if error.name() not in tolerate})
            if not batch.again:
                break
            if batch.outdated:
                self.discard_client()
            backoff = _BACKOFF_SECONDS[min(attempt, len(_BACKOFF_SECONDS) - 1)]
            if batch.left < backoff + 0.1:
                raise self._exhausted(batch)
            self.client.poll(backoff)
        return batch.answers, batch.errors

    def _ask(
        self,
        batch: _Batch[K, V],
        submit: Callable[[AdminClient, list[K], float], Mapping[K, Future[V]]],
        seconds: float,
    ) -> None:
        if not batch.again:
            return
        # An attempt takes a part of the time only: librdkafka leaves a request that waits for a dead broker there.
        seconds = min(seconds, batch.left)
        futures = submit(self.client, list(batch.again), NEVER_SECONDS if batch.coordinator else seconds)
        answered = False
        try:
            answered = self._wait(futures.values(), batch, seconds)
        finally:
            if batch.coordinator and not answered:
                self.discard_client()
        if not answered:
            batch.again = dict.fromkeys(batch.again, self.reason(batch.started))
            return
        batch.again = {}
        for key, future in futures.items():
            if batch.file(key, future):
                self._connected = True

    def _raise_for(self, batch: _Batch[K, V], errors: Mapping[K, KafkaError]) -> None:
        missing = [str(key) for key, error in errors.items() if error.name() in _MISSING]
        if missing:
            raise TopicMissing(self.conn_id, missing)
        for key, error in errors.items():
            raise self.translate(batch.doing, error, key, batch.started, batch.rights)

    def _exhausted(self, batch: _Batch[K, V]) -> KafkaSparkError:
        key, reason = next(iter(batch.again.items()))
        if isinstance(reason, str):
            return self.unavailable(batch.doing, f"{key}: {reason}" if key else reason)
        return self.translate(batch.doing, reason, key, batch.started, batch.rights)

    def _wait(self, futures: Collection[Future[Any]], batch: _Batch[K, V], seconds: float) -> bool:
        """Return False if not all are done when the time is over."""
        pending: Collection[Future[Any]] = futures
        # librdkafka keeps the time, but for a coordinator's answer.
        over_at = time.monotonic() + seconds + (0 if batch.coordinator else 1)
        nudge_at = time.monotonic() + _NUDGE_SECONDS
        while True:
            # poll() serves error_cb, the log and token refreshes; results arrive on librdkafka's own thread.
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
        """Make librdkafka look for a living controller: it waits for the one it knows of, even when that broker is gone."""
        from confluent_kafka import KafkaException

        with suppress(KafkaException):
            self.client.list_topics(timeout=1)

    def _give_up_early(self, doing: str, started: float, now: float) -> None:
        refused_at = self.events.first(REFUSED_LOGIN, started)
        if refused_at is not None and now - refused_at > REFUSED_PATIENCE_SECONDS:
            raise self.refused_login(self.events.reason(started)[1])
        # Any failed connection counts: librdkafka does not always add that all of them failed.
        down_at = self.events.first({"_ALL_BROKERS_DOWN", "_TRANSPORT", "_RESOLVE", CONNECTION_LOG}, started)
        if down_at is not None and now - down_at > DOWN_PATIENCE_SECONDS:
            raise self.unavailable(doing, self.reason(started))

    def translate(
        self, doing: str, error: KafkaError, what: Any = "", since: float = 0.0, rights: Sequence[Right] = ()
    ) -> KafkaSparkError:
        """Return this package's error for one of Kafka's, with what the client has reported besides."""
        name, text = error.name(), error.str()
        if name in _UNANSWERED:
            self.client.poll(0)
            reason_name, reason = self.events.reason(since)
            return self.refused_login(reason) if reason_name in REFUSED_LOGIN else self.unavailable(doing, reason or text)
        if name in REFUSED_LOGIN:
            return self.refused_login(text)
        if name in _MISSING:
            return TopicMissing(self.conn_id, [str(what)])
        if passing(error):
            return self.unavailable(doing, passing(error))
        resource = str(getattr(what, "topic", what))
        if missing := right_missing(error, self.conn_id, self._identity, doing, rights, resource):
            return missing
        return KafkaRefused(self.conn_id, doing, name, f"{what}: {text}" if what else text)

    def reason(self, since: float) -> str:
        """Return in words why nothing was answered."""
        self.client.poll(0)
        return self.events.reason(since)[1] or f"no answer within {self._timeout:g} s"

    def unavailable(self, doing: str, detail: str) -> KafkaUnavailable:
        if not self._connected and "closed by peer" in detail and "?" not in detail:
            detail += "; perhaps this listener expects another `security.protocol`"
        return KafkaUnavailable(self.conn_id, doing, detail)

    def refused_login(self, detail: str) -> ConnectionInvalid:
        return ConnectionInvalid(
            self.conn_id,
            f"the brokers did not accept {self._identity}: {detail}",
            f"Check `security.protocol`, `sasl.*` and `ssl.*` in the extra of `{self.conn_id}`",
        )


def passing(error: KafkaError | None, wait_for: Collection[str] = ()) -> str:
    """Return the error in words if it passes by itself, else "".

    :param error: an error, or None.
    :param wait_for: names of errors that will pass here, beside those that always may.
    """
    return (
        f"{error.str()} ({error.name()})"
        if error is not None and (error.name() in _TRANSIENT or error.name() in wait_for)
        else ""
    )


# --- where a client ends ------------------------------------------------------------------------------------------------

_released: SimpleQueue[Any] = SimpleQueue()
_reaper: threading.Thread | None = None
_starting = threading.Lock()

_POLL_SECONDS = (0.1, 0.2, 0.5, 1.0, 5.0)


def keep(client: Any, owner: object) -> weakref.finalize:
    """Keep a client as long as its owner lives, or until the returned function is called; then until nothing else refers to it.

    :param client: of confluent-kafka.
    :param owner: the object that uses it; must not be reachable from it.
    :return: to be called to let go of the client; on any thread.
    """
    _start()
    letting_go = weakref.finalize(owner, _released.put, client)
    letting_go.atexit = False
    return letting_go


def _start() -> None:
    global _reaper
    with _starting:
        # Not alive, too, in a process that was forked from the one in which it was started.
        if _reaper is None or not _reaper.is_alive():
            _reaper = threading.Thread(target=_reap, name="airflow-kafka-spark-clients", daemon=True)
            _reaper.start()


def _reap() -> None:
    waiting: list[Any] = []
    looks = 0
    while True:
        try:
            waiting.append(_released.get(timeout=_POLL_SECONDS[min(looks, len(_POLL_SECONDS) - 1)] if waiting else None))
            looks = 0
        except Empty:
            looks += 1
        for at in reversed(range(len(waiting))):
            # This list's reference and that of the call itself: nothing else can come to refer to it any more.
            if sys.getrefcount(waiting[at]) <= 2:
                del waiting[at]
