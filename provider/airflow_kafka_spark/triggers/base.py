"""The base of all triggers: polling a cluster in a thread until a condition holds.

A :class:`Probe` checks the cluster once, and blocks. A trigger calls it in a thread of its own, so that the triggerer's event
loop never waits for a broker. A sensor that pokes calls the same probe in its task.
"""

from __future__ import annotations

import asyncio
import contextvars
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Generic, NoReturn, Protocol, TypeVar

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_kafka_spark import errors
from airflow_kafka_spark.errors import KafkaSparkError, Problem, TopicMissing, ValidationError
from airflow_kafka_spark.windows.instants import parse_iso

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

T = TypeVar("T")

RETRY_SECONDS = 5.0
"""Maximum seconds to wait after a failure. A request to brokers that are down takes some seconds by itself."""

# Not asyncio's default pool, because brokers that do not answer must not block threads that other triggers need.
_POOL = ThreadPoolExecutor(32, thread_name_prefix="airflow-kafka-spark")


@dataclass(frozen=True)
class ProbeResult:
    """The result of one check.

    :param done: True if the condition holds.
    :param value: the return value of a sensor and the payload of an event; JSON.
    :param line: one line for the log.
    """

    done: bool
    value: dict[str, Any] = field(default_factory=dict)
    line: str = ""


class Probe(Protocol):
    """Checks a condition at a cluster. A probe may cache facts that cannot change between two checks."""

    def problems(self) -> list[Problem]:
        """Return the problems of the arguments, without a request to the cluster."""
        ...

    def check(self, hook: KafkaHook) -> ProbeResult:
        """Return the result of a check now. This blocks the thread.

        :raises KafkaSparkError: the cluster did not answer, or refused.
        """
        ...


@dataclass(frozen=True)
class Polling:
    """The settings of polling: connection, intervals and limits.

    :param kafka_conn_id: connection of type ``kafka``.
    :param poll_interval: seconds between two checks.
    :param retry_timeout: seconds for which brokers may be down, or refuse for a temporary reason, before that is a failure.
    :param wait_for_topic: True to wait for a topic that does not exist; otherwise that is a failure at once.
    :param give_up_at: time at which to stop waiting, seconds since the epoch; None never stops.
    :param silent: True to retry after every failure, as a sensor's ``silent_fail`` does.
    """

    kafka_conn_id: str = "kafka_default"
    poll_interval: float = 60.0
    retry_timeout: float = 300.0
    wait_for_topic: bool = False
    give_up_at: float | None = None
    silent: bool = False

    def problems(self) -> list[Problem]:
        """Return the problems of the values."""
        return [
            Problem(name, f"`{value}` is not a number of seconds of at least 0")
            for name, value in (("poll_interval", self.poll_interval), ("retry_timeout", self.retry_timeout))
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0
        ]


class RetryBudget:
    """Decides if a check is repeated after a failure, because brokers may be down for a moment.

    :param seconds: maximum seconds for which temporary failures are retried.
    :param wait_for_topic: True to retry without end while a topic is missing.
    :param silent: True to retry without end after every failure.
    """

    def __init__(self, seconds: float, *, wait_for_topic: bool = False, silent: bool = False) -> None:
        self.seconds = seconds
        self.wait_for_topic = wait_for_topic
        self.silent = silent
        self._since: float | None = None

    @classmethod
    def of(cls, polling: Polling) -> RetryBudget:
        """Return the budget that a trigger's arguments allow."""
        return cls(polling.retry_timeout, wait_for_topic=polling.wait_for_topic, silent=polling.silent)

    def allows(self, error: KafkaSparkError) -> bool:
        """Return True if the check should be repeated after this failure."""
        if self.silent or isinstance(error, TopicMissing):
            return self.silent or self.wait_for_topic
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        return error.retryable and now - self._since < self.seconds

    def reset(self) -> None:
        """Restart the time, after a check without a failure."""
        self._since = None


ProbeT = TypeVar("ProbeT", bound=Probe)


class KafkaTrigger(BaseTrigger, Generic[ProbeT]):
    """A trigger that polls a cluster until a condition holds, and then fires once.

    Its event contains ``status``: ``success`` with the ``value`` of the last check; ``timeout`` with its ``line``; or ``error``
    with the arguments of :func:`raise_failure`. Temporary failures are retried for ``retry_timeout`` seconds.

    :param polling: settings of polling. Subclasses have an argument for each of its fields, because a triggerer makes them from
        JSON.
    """

    def __init__(self, polling: Polling) -> None:
        super().__init__()
        self.polling = polling

    # --- for subclasses ---

    @abstractmethod
    def arguments(self) -> dict[str, Any]:
        """Return the arguments beside those of :class:`Polling`, as JSON."""

    @abstractmethod
    def probe(self) -> ProbeT:
        """Return a new probe, which has checked nothing yet."""

    # --- for Airflow ---

    def serialize(self) -> tuple[str, dict[str, Any]]:
        kind = type(self)
        return f"{kind.__module__}.{kind.__qualname__}", {**asdict(self.polling), **self.arguments()}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent(await self.wait())

    async def wait(self) -> dict[str, Any]:
        """Wait until there is an event, and return its payload."""
        hook: KafkaHook | None = None
        polling, budget = self.polling, RetryBudget.of(self.polling)
        line = "nothing was checked yet"
        try:
            probe = self.valid_probe()
            while True:
                pause = polling.poll_interval
                try:
                    hook = hook or await connect(polling.kafka_conn_id)
                    observed = await in_thread(probe.check, hook)
                    budget.reset()
                    line = observed.line
                    self.log.info("%s", line)
                    if observed.done:
                        return {"status": "success", "value": observed.value}
                except KafkaSparkError as error:
                    line = str(error)
                    if not budget.allows(error):
                        raise
                    self.log.warning("Checking again: %s", error)
                    pause = min(pause, RETRY_SECONDS)
                left = float("inf") if polling.give_up_at is None else polling.give_up_at - time.time()
                if left <= 0:
                    return {"status": "timeout", "line": line}
                # The last check comes when the time is over, as with a sensor that pokes.
                await asyncio.sleep(min(pause, left))
        except KafkaSparkError as error:
            return {"status": "error", **failure_of(error)}
        finally:
            if hook is not None:
                await in_thread(hook.close)

    def valid_probe(self) -> ProbeT:
        """Return a new probe.

        :raises ValidationError: the arguments have problems; the message names all of them.
        """
        probe = self.probe()
        raise_problems([*self.polling.problems(), *probe.problems()])
        return probe


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise an error that names all problems, if there are any.

    :raises ValidationError: there are problems.
    """
    if problems:
        raise ValidationError(problems)


# --- threads and connections --------------------------------------------------------------------------------------------


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Call a blocking function in another thread, and return its result. Its log lines keep the context of the caller."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_POOL, lambda: context.run(function, *args))


async def connect(conn_id: str) -> KafkaHook:
    """Return a hook whose connection was looked up asynchronously, as a triggerer requires.

    :raises ConnectionInvalid: there is no such connection.
    """
    from airflow.providers.common.compat.sdk import BaseHook

    from airflow_kafka_spark.hooks.connections import require_connection

    with require_connection(conn_id, "`kafka`", option="kafka_conn_id"):
        connection = await BaseHook.aget_connection(conn_id)
    return await in_thread(_hook_of, conn_id, connection)


def _hook_of(conn_id: str, connection: object) -> KafkaHook:
    # Called in a thread, because importing the client takes some time.
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

    class Connected(KafkaHook):
        def get_connection(self, conn_id: str) -> Any:  # type: ignore[override]
            return connection

    return Connected(conn_id)


# --- failures that a trigger hands to its sensor ---------------------------------------------------------------------------


def failure_of(error: KafkaSparkError) -> dict[str, Any]:
    """Return an error as JSON."""
    facts = {name: value for name, value in vars(error).items() if _is_json(value)}
    return {"kind": type(error).__name__, "message": str(error), "facts": facts}


def raise_failure(event: Mapping[str, Any]) -> NoReturn:
    """Raise the error that :func:`failure_of` was given, as one of the same class.

    :raises KafkaSparkError: always.
    """
    kind = getattr(errors, str(event.get("kind")), KafkaSparkError)
    if not (isinstance(kind, type) and issubclass(kind, KafkaSparkError)):
        kind = KafkaSparkError
    error = kind.__new__(kind)
    error.args = (event.get("message", "the trigger failed"),)
    vars(error).update({"found": "", "expected": "", "action": "", **event.get("facts", {})})
    raise error


def _is_json(value: object) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_json(item) for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return all(map(_is_json, value))
    return value is None or isinstance(value, (str, int, float, bool))


# --- arguments of sensors and triggers ----------------------------------------------------------------------------------

Count = int | str | None
"""Type of a number of records or windows, which a template may render to text."""

Duration = float | timedelta | str | None
"""Type of a duration: seconds or a ``timedelta``, which a template may render to text."""

Instant = datetime | str | float | None
"""Type of an instant: a ``datetime``, text in ISO 8601, or seconds since the epoch."""

_RENDERED_NONE = ("", "none")


def parse_count(where: str, value: Count, problems: list[Problem]) -> int | None:
    """Return a whole number of at least 0; None for None, and for a template that rendered nothing.

    :param problems: list to which any other value adds a problem; the result is then None.
    """
    if value is None or _rendered_nothing(value):
        return None
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    problems.append(Problem(where, f"`{value}` is not a whole number of at least 0"))
    return None


def parse_seconds(where: str, value: Duration, problems: list[Problem]) -> float | None:
    """Return seconds of at least 0; None for None, and for a template that rendered nothing.

    :param problems: list to which any other value adds a problem; the result is then None.
    """
    if value is None or _rendered_nothing(value):
        return None
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if not isinstance(value, bool):
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = -1.0
        if 0 <= number < float("inf"):
            return number
    problems.append(Problem(where, f"`{value}` is not a number of seconds or a timedelta of at least 0"))
    return None


def parse_instant(where: str, value: Instant, problems: list[Problem]) -> datetime | None:
    """Return an instant, in UTC if it has no zone; None for None, and for a template that rendered nothing.

    :param problems: list to which any other value adds a problem; the result is then None.
    """
    if value is None or _rendered_nothing(value):
        return None
    found: datetime | None = None
    try:
        if isinstance(value, datetime):
            found = value
        elif isinstance(value, str) and not value.strip().replace(".", "", 1).isdecimal():
            found = parse_iso(value.strip())
        elif not isinstance(value, bool):
            found = datetime.fromtimestamp(float(value), timezone.utc)
    except (TypeError, ValueError, OverflowError, OSError):
        found = None
    if found is None:
        problems.append(Problem(where, f"`{value}` is not a moment", "Give a datetime, or text as `2026-01-31T00:00:00+00:00`"))
        return None
    return found if found.tzinfo else found.replace(tzinfo=timezone.utc)


def _rendered_nothing(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() in _RENDERED_NONE
