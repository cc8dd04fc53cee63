"""What all triggers here have in common: looking again and again, in a thread, until what is waited for has come.

A *watch* looks at the cluster once and says what it saw; it blocks. A trigger calls it in a thread of its own, so that the
triggerer's event loop never waits for a broker; a sensor that pokes calls the same watch in its task.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeVar

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_kafka_spark import errors
from airflow_kafka_spark.errors import KafkaSparkError, TopicMissing, ValidationError

if TYPE_CHECKING:
    from airflow_kafka_spark.errors import Problem
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

T = TypeVar("T")

RETRY_SECONDS = 5.0
"""How long after a failure the brokers are asked again, at most: a look at dead ones takes some seconds by itself."""

# Of our own: brokers that do not answer must not take the threads that other triggers of the process need.
_POOL = ThreadPoolExecutor(32, thread_name_prefix="airflow-kafka-spark")


@dataclass(frozen=True)
class Sight:
    """What one look gave.

    :param done: whether that is what is waited for.
    :param value: what a sensor returns and an event carries; JSON.
    :param line: one line a person can read.
    """

    done: bool
    value: dict[str, Any] = field(default_factory=dict)
    line: str = ""


class Watch(Protocol):
    """Looks at a cluster; remembers between two looks what helps it."""

    def problems(self) -> list[Problem]:
        """What is wrong with the options, without asking anybody."""
        ...

    def look(self, hook: KafkaHook) -> Sight:
        """What is there now. Blocks.

        :raises KafkaSparkError: it could not be found out.
        """
        ...


class Patience:
    """How long failures are borne: brokers that are down for a moment are no failure.

    :param seconds: how long.
    :param wait_for_topic: whether a missing topic is waited for, without end.
    :param silent: whether every failure is borne, without end.
    """

    def __init__(self, seconds: float, *, wait_for_topic: bool = False, silent: bool = False) -> None:
        self.seconds = seconds
        self.wait_for_topic = wait_for_topic
        self.silent = silent
        self._since: float | None = None

    def borne(self, error: KafkaSparkError) -> bool:
        """Whether to look again after this failure."""
        if self.silent or isinstance(error, TopicMissing):
            return self.silent or self.wait_for_topic
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        return error.retryable and now - self._since < self.seconds

    def well(self) -> None:
        """A look was answered: the time starts anew."""
        self._since = None


class KafkaTrigger(BaseTrigger):
    """A trigger that looks at a cluster until it sees what it waits for, and then fires once.

    Its event carries ``status``: ``success`` with the ``value`` of the last look; ``timeout`` with its ``line``; or ``error``
    with what :func:`raise_failure` needs. Failures that may pass are borne for ``retry_timeout`` seconds.

    :param kafka_conn_id: connection of type ``kafka``.
    :param poll_interval: seconds between two looks.
    :param retry_timeout: seconds that brokers may be down, or refuse for a passing reason, before that is a failure.
    :param wait_for_topic: wait for a topic that does not exist; else that is a failure at once.
    :param give_up_at: when to stop waiting, seconds since the epoch; None never stops.
    :param silent: bear every failure, as a sensor's ``silent_fail`` does.
    """

    def __init__(
        self,
        *,
        kafka_conn_id: str = "kafka_default",
        poll_interval: float = 60.0,
        retry_timeout: float = 300.0,
        wait_for_topic: bool = False,
        give_up_at: float | None = None,
        silent: bool = False,
    ) -> None:
        super().__init__()
        self.kafka_conn_id = kafka_conn_id
        self.poll_interval = poll_interval
        self.retry_timeout = retry_timeout
        self.wait_for_topic = wait_for_topic
        self.give_up_at = give_up_at
        self.silent = silent

    # --- what a concrete trigger says ---

    @abstractmethod
    def options(self) -> dict[str, Any]:
        """Its own arguments, as JSON, beside those of this class."""

    @abstractmethod
    def watch(self) -> Watch:
        """What looks; a new one, that has seen nothing yet."""

    # --- what Airflow asks ---

    def serialize(self) -> tuple[str, dict[str, Any]]:
        kind = type(self)
        return f"{kind.__module__}.{kind.__qualname__}", {
            "kafka_conn_id": self.kafka_conn_id,
            "poll_interval": self.poll_interval,
            "retry_timeout": self.retry_timeout,
            "wait_for_topic": self.wait_for_topic,
            "give_up_at": self.give_up_at,
            "silent": self.silent,
            **self.options(),
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent(await self.fired())

    async def fired(self) -> dict[str, Any]:
        """Wait until there is an event, and return what it carries."""
        hook: KafkaHook | None = None
        patience = Patience(self.retry_timeout, wait_for_topic=self.wait_for_topic, silent=self.silent)
        line = "nothing was seen yet"
        try:
            watch = self.checked_watch()
            while True:
                pause = self.poll_interval
                try:
                    hook = hook or await connect(self.kafka_conn_id)
                    sight = await in_thread(watch.look, hook)
                    patience.well()
                    line = sight.line
                    self.log.info("%s", line)
                    if sight.done:
                        return {"status": "success", "value": sight.value}
                except KafkaSparkError as error:
                    line = str(error)
                    if not patience.borne(error):
                        raise
                    self.log.warning("Looking again: %s", error)
                    pause = min(pause, RETRY_SECONDS)
                left = float("inf") if self.give_up_at is None else self.give_up_at - time.time()
                if left <= 0:
                    return {"status": "timeout", "line": line}
                # The last look comes when the time is over, as a sensor's that pokes.
                await asyncio.sleep(min(pause, left))
        except KafkaSparkError as error:
            return {"status": "error", **failure_of(error)}
        finally:
            if hook is not None:
                await in_thread(hook.close)

    def checked_watch(self) -> Watch:
        """:raises ValidationError: naming everything that is wrong with the options."""
        watch = self.watch()
        raise_for(watch.problems())
        return watch


def raise_for(problems: Sequence[Problem]) -> None:
    """:raises ValidationError: when there are any."""
    if problems:
        raise ValidationError(problems)


# --- threads and connections --------------------------------------------------------------------------------------------


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call something that blocks, while the event loop goes on; log lines find the task they belong to."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_POOL, lambda: context.run(function, *args))


async def connect(conn_id: str) -> KafkaHook:
    """A hook whose connection was looked up the asynchronous way: a triggerer has no other.

    :raises ConnectionInvalid: there is no such connection.
    """
    from airflow.providers.common.compat.sdk import BaseHook

    from airflow_kafka_spark.hooks.connections import defined

    with defined(conn_id, "`kafka`", option="kafka_conn_id"):
        connection = await BaseHook.aget_connection(conn_id)
    return await in_thread(_hook_of, conn_id, connection)


def _hook_of(conn_id: str, connection: Any) -> KafkaHook:
    # In a thread: importing the client takes its time.
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

    class Connected(KafkaHook):
        def get_connection(self, conn_id: str) -> Any:  # type: ignore[override]
            return connection

    return Connected(conn_id)


# --- failures, on their way from a trigger to its sensor -------------------------------------------------------------------


def failure_of(error: KafkaSparkError) -> dict[str, Any]:
    """An error as JSON."""
    facts = {name: value for name, value in vars(error).items() if _is_json(value)}
    return {"kind": type(error).__name__, "message": str(error), "facts": facts}


def raise_failure(event: Mapping[str, Any]) -> NoReturn:
    """Raise the error that :func:`failure_of` has told, as one of the same class.

    :raises KafkaSparkError: always.
    """
    kind = getattr(errors, str(event.get("kind")), KafkaSparkError)
    if not (isinstance(kind, type) and issubclass(kind, KafkaSparkError)):
        kind = KafkaSparkError
    error = kind.__new__(kind)
    error.args = (event.get("message", "the trigger failed"),)
    vars(error).update({"found": "", "expected": "", "action": "", **event.get("facts", {})})
    raise error


def _is_json(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (str, int, float, bool))
