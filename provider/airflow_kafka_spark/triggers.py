"""Triggers of the sensors, and the trigger that starts a DAG when a backlog is large enough.

Triggers only read metadata and offsets; they join no group and commit nothing. A :class:`Probe` checks the cluster once, and
blocks. A trigger calls it in a thread of its own, so the triggerer's event loop never waits for a broker. A sensor that pokes
calls the same probe in its task.
"""

from __future__ import annotations

import asyncio
import contextvars
import hashlib
import json
import time
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, Generic, NoReturn, ParamSpec, Protocol, TypeVar

from airflow.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent

from airflow_kafka_spark import errors
from airflow_kafka_spark.arguments import find_choice_problems
from airflow_kafka_spark.errors import ConsumerUnhealthy, KafkaSparkError, Problem, TopicMissing, ValidationError
from airflow_kafka_spark.hooks.kafka.log import TOLERANCE_SECONDS
from airflow_kafka_spark.ledger.lag import LagMeter
from airflow_kafka_spark.ledger.topic import LedgerReader, refuse_renamed
from airflow_kafka_spark.sources.kafka.topics import Subscription
from airflow_kafka_spark.windows.lag import Lag, Per, Status, Threshold, Verdict, find_worst_verdict
from airflow_kafka_spark.windows.memory import WindowCriteria, find_completed
from airflow_kafka_spark.windows.times import get_current_milliseconds, parse_iso

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.windows.model import TopicPartition


T = TypeVar("T")
P = ParamSpec("P")

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

    def find_problems(self) -> list[Problem]:
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

    def find_problems(self) -> list[Problem]:
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
    def get_arguments(self) -> dict[str, Any]:
        """Return the arguments beside those of :class:`Polling`, as JSON."""

    @abstractmethod
    def probe(self) -> ProbeT:
        """Return a new probe, which has checked nothing yet."""

    # --- for Airflow ---

    def serialize(self) -> tuple[str, dict[str, Any]]:
        kind = type(self)
        return f"{kind.__module__}.{kind.__qualname__}", {**asdict(self.polling), **self.get_arguments()}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent(await self.wait())

    async def wait(self) -> dict[str, Any]:
        """Wait until there is an event, and return its payload."""
        hook: KafkaHook | None = None
        polling, budget = self.polling, RetryBudget.of(self.polling)
        line = "nothing was checked yet"
        try:
            probe = self.make_probe()
            while True:
                pause = polling.poll_interval
                try:
                    hook = hook or await open_hook(polling.kafka_conn_id)
                    observed = await run_in_thread(probe.check, hook)
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
                    hook = await drop_hook(hook, error)
                    pause = min(pause, RETRY_SECONDS)
                left = float("inf") if polling.give_up_at is None else polling.give_up_at - time.time()
                if left <= 0:
                    return {"status": "timeout", "line": line}
                # The last check comes when the time is over, as with a sensor that pokes.
                await asyncio.sleep(min(pause, left))
        except KafkaSparkError as error:
            return {"status": "error", **describe_failure(error)}
        finally:
            if hook is not None:
                await run_in_thread(hook.close)

    def make_probe(self) -> ProbeT:
        """Return a new probe.

        :raises ValidationError: the arguments have problems; the message names all of them.
        """
        probe = self.probe()
        raise_problems([*self.polling.find_problems(), *probe.find_problems()])
        return probe


def raise_problems(problems: Sequence[Problem]) -> None:
    """Raise an error that names all problems, if there are any.

    :raises ValidationError: there are problems.
    """
    if problems:
        raise ValidationError(problems)


# --- threads and connections --------------------------------------------------------------------------------------------


async def run_in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a blocking function in another thread, and return its result. Its log lines keep the context of the caller."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_POOL, lambda: context.run(function, *args, **kwargs))


async def open_hook(conn_id: str) -> KafkaHook:
    """Return a hook whose connection was looked up asynchronously, as a triggerer requires.

    :raises ConnectionInvalid: there is no such connection.
    """
    from airflow.providers.common.compat.sdk import BaseHook

    from airflow_kafka_spark.hooks.connections import require_connection

    with require_connection(conn_id, "`kafka`", option="kafka_conn_id"):
        connection = await BaseHook.aget_connection(conn_id)
    return await run_in_thread(_make_hook, conn_id, connection)


async def drop_hook(hook: KafkaHook | None, error: KafkaSparkError) -> KafkaHook | None:
    """Close a hook after a failure, and return None: the next check looks its connection up again, which may have been edited.
    Return the hook if only a topic is missing.
    """
    if hook is None or isinstance(error, TopicMissing):
        return hook
    await run_in_thread(hook.close)
    return None


def _make_hook(conn_id: str, connection: Connection) -> KafkaHook:
    # Called in a thread, because importing the client takes some time.
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

    class Connected(KafkaHook):
        @classmethod
        def get_connection(cls, conn_id: str) -> Connection:
            return connection

    return Connected(conn_id)


# --- failures that a trigger passes to its sensor --------------------------------------------------------------------------


def describe_failure(error: KafkaSparkError) -> dict[str, Any]:
    """Return an error as JSON."""
    facts = {name: value for name, value in vars(error).items() if _is_json(value)}
    return {"kind": type(error).__name__, "message": str(error), "facts": facts}


def raise_failure(event: Mapping[str, Any]) -> NoReturn:
    """Raise an error of the class and with the message that :func:`describe_failure` has described.

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
    if value is None or _is_rendered_to_nothing(value):
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
    if value is None or _is_rendered_to_nothing(value):
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
    if value is None or _is_rendered_to_nothing(value):
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


def _is_rendered_to_nothing(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() in _RENDERED_NONE


_THRESHOLDS = ("at_most_records", "at_most_seconds", "at_least_records", "at_least_seconds")


@dataclass(frozen=True)
class LagOptions:
    """The consumer whose lag is measured, and the thresholds. The fields are the arguments of :class:`KafkaLagTrigger`."""

    group_id: str | None = None
    pipeline: str | None = None
    topics: str | Sequence[str] | None = None
    at_most_records: Count = None
    at_most_seconds: Duration = None
    at_least_records: Count = None
    at_least_seconds: Duration = None
    per: Per = "total"
    schedule: Duration = None
    fail_on: str | Sequence[str] = ()
    ledger_topic: str = "airflow-windows"

    def normalize(self) -> LagOptions:
        """Return the options with JSON values only: seconds for a ``timedelta``, a list for any other sequence."""
        return LagOptions(**{name: as_json(value) for name, value in vars(self).items()})


class LagProbe:
    """Checks the lag of a consumer.

    :param options: options with rendered templates.
    """

    def __init__(self, options: LagOptions) -> None:
        self._problems: list[Problem] = []
        self.threshold = Threshold(
            parse_count("at_most_records", options.at_most_records, self._problems),
            parse_seconds("at_most_seconds", options.at_most_seconds, self._problems),
            parse_count("at_least_records", options.at_least_records, self._problems),
            parse_seconds("at_least_seconds", options.at_least_seconds, self._problems),
            options.per,
        )
        fail_on = options.fail_on
        self.fail_on = (fail_on,) if isinstance(fail_on, str) else tuple(fail_on)
        subscription = Subscription.of(options.topics, None)
        self._problems += subscription.validate() if subscription.topics else []
        self._problems += self._find_argument_problems(options.group_id, options.pipeline, subscription)
        self._meter = LagMeter(
            subscription.topics,
            options.group_id or None,
            options.pipeline or None,
            options.ledger_topic,
            parse_seconds("schedule", options.schedule, self._problems) or None,
        )
        self.lag: Lag | None = None
        """The lag at the last check."""

    def _find_argument_problems(self, group_id: str | None, pipeline: str | None, subscription: Subscription) -> list[Problem]:
        problems = find_choice_problems("per", self.threshold.per, ("total", "partition"))
        for name, value in (("group_id", group_id), ("pipeline", pipeline)):
            if value is not None and (not isinstance(value, str) or value != value.strip()):
                problems.append(Problem(name, f"`{value}` is not a name"))
        if not group_id and not pipeline:
            problems.append(Problem("group_id", "neither `group_id` nor `pipeline` is given", "Name the group or the pipeline"))
        if not pipeline and not subscription.topics:
            problems.append(Problem("topics", "a group's lag is that in certain topics", "Name them"))
        limits = {name: getattr(self.threshold, name) for name in _THRESHOLDS}
        most = [name for name, limit in limits.items() if limit is not None and name.startswith("at_most")]
        least = [name for name, limit in limits.items() if limit is not None and name.startswith("at_least")]
        if most and least:
            action = "Wait until a consumer has caught up, or until there is enough to start a batch"
            problems.append(Problem(most[0], f"`{most[0]}` and `{least[0]}` are given together", action))
        if not most and not least and not self._problems:
            problems.append(Problem("at_most_records", "nothing to wait for is given", f"Give one of {', '.join(_THRESHOLDS)}"))
        for status in self.fail_on:
            problems += find_choice_problems("fail_on", status, tuple(s.value for s in Status if s is not Status.OK))
        return problems

    def find_problems(self) -> list[Problem]:
        return self._problems

    def check(self, hook: KafkaHook) -> ProbeResult:
        """Measure the lag, and compare it with the threshold.

        :raises ConsumerUnhealthy: the threshold is not reached, and the consumer's status is one of ``fail_on``.
        """
        lag, verdicts = self._meter.measure(hook)
        self.lag, verdict, done = lag, find_worst_verdict(verdicts), self.threshold.is_reached(lag)
        line = f"{lag.line}, status {verdict.status.value}{f' ({verdict.reason})' if verdict.reason else ''}"
        if not done and verdict.status.value in self.fail_on:
            raise ConsumerUnhealthy(lag.of, verdict.status.value, verdict.reason, lag.line)
        reached = "this is" if done else "waiting for"
        return ProbeResult(done, self._make_payload(lag, verdict, verdicts), f"{line}; {reached} {self.threshold}")

    def _make_payload(self, lag: Lag, verdict: Verdict, verdicts: Mapping[TopicPartition, Verdict]) -> dict[str, Any]:
        return {
            "group_id": self._meter.group_id,
            "pipeline": self._meter.pipeline,
            "records": lag.count_records(),
            "records_in_one_partition": lag.count_records("partition"),
            "seconds": lag.seconds,
            "status": verdict.status.value,
            "reason": verdict.reason,
            "active": lag.active,
            "measured_at": datetime.fromtimestamp(lag.now, timezone.utc).isoformat(),
            "partitions": {
                str(tp): {**state.to_dict(), "status": verdicts[tp].status.value} for tp, state in sorted(lag.partitions.items())
            },
        }


class KafkaLagTrigger(KafkaTrigger[LagProbe], BaseEventTrigger):
    """Fires when a consumer's lag reaches a threshold: once for a sensor, repeatedly for an ``AssetWatcher``.

    In an ``AssetWatcher`` one backlog fires once. The next event comes

    - if the backlog was below the threshold in between, and reaches it again; or
    - if the backlog is at the threshold, the consumer has moved since the last event, and ``cooldown`` is over; or
    - if ``remind_after`` is set and over, although the consumer has not moved: the run that was started may have failed.

    The last event is kept in the asset's state store (Airflow 3.3), one check after the event: a triggerer that is restarted does
    not fire again, one that is killed right after an event may. So events are delivered at least once: let the DAG begin at its
    pipeline's position, as the operators here do, not at the offsets in the event. Without a state store, the last event is kept
    as long as the trigger runs. Failures never end a watcher: it logs them, and checks again.

    The event's payload is the return value of :class:`~airflow_kafka_spark.sensors.KafkaLagSensor`.

    :param group_id: consumer group whose committed offsets are compared with the topics; default None.
    :param pipeline: pipeline whose position in the ledger is compared with the topics. If ``group_id`` is given, too, the group
        is used until the ledger has the pipeline. Default None.
    :param topics: topic, or several; required for a group. Default None: for a pipeline, all topics that it has read.
    :param at_most_records: maximum number of unread records; default None.
    :param at_most_seconds: maximum age of the oldest unread record (seconds or a ``timedelta``); if both maxima are given,
        both have to hold. Default None.
    :param at_least_records: minimum number of unread records; default None.
    :param at_least_seconds: minimum age of the oldest unread record (seconds or a ``timedelta``); if both minima are given, one
        is enough. Default None.
    :param per: ``total`` (default) compares the sum of all partitions; ``partition`` compares each partition: none of them may
        exceed a maximum, and one that reaches a minimum is enough.
    :param schedule: time from one run of the consumer to the next (seconds or a ``timedelta``). A consumer that waits for its
        next run is not reported as stopped. Default for a pipeline: its usual interval, for a group: unknown.
    :param fail_on: statuses (``WARN``, ``STALL``, ``STOP``, ``REWIND``) that fail the sensor; with others it continues to wait.
        Default none. Only with ``once``.
    :param ledger_topic: topic that contains the ledger of the pipeline; default ``airflow-windows``.
    :param cooldown: seconds between two events for a backlog that stays although the consumer moves; default 60.
    :param remind_after: seconds after which a backlog fires again although the consumer has not moved; default None: never.
    :param once: True fires once, and also for a failure, as a sensor needs it; default False.
    :param kafka_conn_id: Airflow connection of type ``kafka``; default ``kafka_default``.
    :param poll_interval: seconds between two checks; default 60.
    :param retry_timeout: seconds for which brokers may be down, or refuse for a temporary reason, before that is a failure;
        default 300.
    :param wait_for_topic: True waits for a topic that does not exist; default False: such a topic is a failure at once.
    :param give_up_at: time at which to stop waiting, in seconds since the epoch; None (default) never stops.
    :param silent: True retries after every failure, as a sensor's ``silent_fail`` does; default False.
    """

    def __init__(
        self,
        *,
        group_id: str | None = None,
        pipeline: str | None = None,
        topics: str | Sequence[str] | None = None,
        at_most_records: Count = None,
        at_most_seconds: Duration = None,
        at_least_records: Count = None,
        at_least_seconds: Duration = None,
        per: Per = "total",
        schedule: Duration = None,
        fail_on: str | Sequence[str] = (),
        ledger_topic: str = "airflow-windows",
        cooldown: float | timedelta = 60.0,
        remind_after: float | timedelta | None = None,
        once: bool = False,
        kafka_conn_id: str = "kafka_default",
        poll_interval: float = 60.0,
        retry_timeout: float = 300.0,
        wait_for_topic: bool = False,
        give_up_at: float | None = None,
        silent: bool = False,
    ) -> None:
        super().__init__(Polling(kafka_conn_id, poll_interval, retry_timeout, wait_for_topic, give_up_at, silent))
        given = LagOptions(
            group_id, pipeline, topics, at_most_records, at_most_seconds, at_least_records, at_least_seconds, per, schedule,
            fail_on, ledger_topic,
        )  # fmt: skip
        # As JSON, because a trigger that is made from the result of `serialize` must serialize to an equal one.
        self.options = given.normalize()
        self.cooldown = float(as_json(cooldown))
        self.remind_after = None if remind_after is None else float(as_json(remind_after))
        self.once = once

    def get_arguments(self) -> dict[str, Any]:
        return {**vars(self.options), "cooldown": self.cooldown, "remind_after": self.remind_after, "once": self.once}

    def probe(self) -> LagProbe:
        return LagProbe(self.options)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        if self.once:
            yield TriggerEvent(await self.wait())
            return
        last_event, saved = await self._load_last_event(), True
        probe = self.make_probe()
        hook: KafkaHook | None = None
        logged = ""
        try:
            while True:
                try:
                    hook = hook or await open_hook(self.polling.kafka_conn_id)
                    observed = await run_in_thread(probe.check, hook)
                    if not saved:
                        saved = await self._save_last_event(last_event)
                    now, committed = time.time(), probe.lag.committed if probe.lag else {}
                    if not observed.done:
                        last_event, saved = {}, saved and not last_event
                    elif should_fire(last_event, committed, now, self.cooldown, self.remind_after):
                        self.log.info("%s: firing", observed.line)
                        last_event, saved = {"committed": committed, "at": now}, False
                        yield TriggerEvent(observed.value)
                except KafkaSparkError as error:
                    if str(error) != logged:
                        logged = str(error)
                        self.log.warning("Checking again: %s", error)
                    hook = await drop_hook(hook, error)
                await asyncio.sleep(self.polling.poll_interval)
        finally:
            if hook is not None:
                await run_in_thread(hook.close)

    # --- the last event ---

    @property
    def _key(self) -> str:
        digest = hashlib.sha256(json.dumps([self.polling.kafka_conn_id, vars(self.options)], sort_keys=True).encode()).hexdigest()
        return f"kafka-lag-{digest[:16]}"

    async def _load_last_event(self) -> dict[str, Any]:
        store = getattr(self, "asset_state_store", None)
        if store is None:
            return {}
        try:
            found = await store.aget(self._key)
            return found if isinstance(found, dict) else {}
        except Exception as error:
            # A trigger of several assets has no store. An error of the store must not end the checks.
            self.log.warning("The last event cannot be read from the asset's state store: %s", error)
            return {}

    async def _save_last_event(self, last_event: dict[str, Any]) -> bool:
        """Save the last event, and return True, even if it cannot be saved: it is then kept in memory only."""
        store = getattr(self, "asset_state_store", None)
        if store is not None:
            try:
                await store.aset(self._key, last_event)
            except Exception as error:
                self.log.warning("The last event cannot be saved in the asset's state store: %s", error)
        return True


def should_fire(
    last_event: Mapping[str, Any], committed: Mapping[str, int | None], now: float, cooldown: float, remind_after: float | None
) -> bool:
    """Return True if the existing backlog should fire an event.

    :param last_event: the consumer's position at the last event (``committed``) and its time (``at``); empty without an event, or
        if the backlog has been below the threshold since.
    :param committed: the consumer's position now.
    :param now: seconds since the epoch.
    """
    if not last_event:
        return True
    silence = now - float(last_event.get("at", 0.0))
    if dict(committed) != last_event.get("committed"):
        return silence >= cooldown
    return remind_after is not None and silence >= remind_after


def as_json(value: object) -> Any:
    """Return a value as JSON: seconds for a ``timedelta``, a list for any other sequence."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return value


class IntervalProbe:
    """Checks that every partition has passed the end of an interval. Arguments are those of :class:`KafkaIntervalTrigger`."""

    def __init__(self, *, topics: str | Sequence[str] | None, end: Instant, grace: Duration = 60.0) -> None:
        self._problems: list[Problem] = []
        subscription = Subscription.of(topics, None)
        self.topics = subscription.topics
        self._problems += (
            subscription.validate() if self.topics else [Problem("topics", "no topic is given", "Name one, or several")]
        )
        self.end = parse_instant("end", end, self._problems)
        if self.end is None and not self._problems:
            self._problems.append(Problem("end", "there is no end to wait for"))
        self.grace = parse_seconds("grace", grace, self._problems) or 0.0
        self._passed: dict[TopicPartition, int] = {}
        self._topic_ids: dict[str, str] = {}

    def find_problems(self) -> list[Problem]:
        return self._problems

    def check(self, hook: KafkaHook) -> ProbeResult:
        assert self.end is not None
        # Read the clock first, so that records written during the requests do not count as late.
        over = time.time() >= self.end.timestamp() + self.grace
        described = hook.describe_topics(self.topics)
        partitions = [tp for topic in described.values() for tp in topic.topic_partitions]
        ids = {name: topic.topic_id for name, topic in described.items()}
        # Records of a topic that was deleted since say nothing about the new one.
        self._passed = {tp: o for tp, o in self._passed.items() if self._topic_ids[tp.topic] == ids[tp.topic]}
        self._topic_ids = ids
        left = [tp for tp in partitions if tp not in self._passed]
        end_ms = round(self.end.timestamp() * 1000)
        # A timestamp in the future proves nothing: a partition with only such records is idle once ``grace`` is over.
        latest = max(get_current_milliseconds(), end_ms) + round(TOLERANCE_SECONDS * 1000)
        for tp, there in (hook.find_records_for_times(left, end_ms) if left else {}).items():
            if there is not None and there.timestamp <= latest:
                self._passed[tp] = there.offset
        waiting = [tp for tp in left if tp not in self._passed]
        idle: list[TopicPartition] = []
        if over and waiting:
            # A partition with an open transaction is not idle: its records may still belong to the interval.
            offsets = hook.read_offsets(waiting)
            idle = [tp for tp in waiting if offsets[tp].held_back == 0]
        waiting = [tp for tp in waiting if tp not in idle]
        value = {
            "end": self.end.astimezone(timezone.utc).isoformat(),
            "offsets": {str(tp): self._passed[tp] for tp in sorted(self._passed) if tp in partitions},
            "idle": [str(tp) for tp in sorted(idle)],
            "waiting": [str(tp) for tp in sorted(waiting)],
        }
        passed = len(partitions) - len(waiting) - len(idle)
        line = f"{passed} of {len(partitions)} partitions have passed {value['end']}, {len(idle)} are idle"
        if waiting:
            held = " (an open transaction keeps them back)" if over else ""
            line += f"; waiting for {', '.join(map(str, sorted(waiting)[:5]))}{'...' if len(waiting) > 5 else ''}{held}"
        return ProbeResult(not waiting, value, line)


class KafkaIntervalTrigger(KafkaTrigger[IntervalProbe]):
    """Fires once every partition has a record at or after the interval's end, or has been idle for ``grace`` seconds since then.

    :param topics: topic, or several.
    :param end: end of the interval: a ``datetime``, text in ISO 8601, or seconds since the epoch.
    :param grace: seconds (or a ``timedelta``) after the end from which a partition without a record at or after the end counts as
        idle; default 60.
    :param kafka_conn_id: Airflow connection of type ``kafka``; default ``kafka_default``.
    :param poll_interval: seconds between two checks; default 60.
    :param retry_timeout: seconds for which brokers may be down, or refuse for a temporary reason, before that is a failure;
        default 300.
    :param wait_for_topic: True waits for a topic that does not exist; default False: such a topic is a failure at once.
    :param give_up_at: time at which to stop waiting, in seconds since the epoch; None (default) never stops.
    :param silent: True retries after every failure, as a sensor's ``silent_fail`` does; default False.
    """

    def __init__(
        self,
        *,
        topics: str | Sequence[str],
        end: Instant,
        grace: Duration = 60.0,
        kafka_conn_id: str = "kafka_default",
        poll_interval: float = 60.0,
        retry_timeout: float = 300.0,
        wait_for_topic: bool = False,
        give_up_at: float | None = None,
        silent: bool = False,
    ) -> None:
        super().__init__(Polling(kafka_conn_id, poll_interval, retry_timeout, wait_for_topic, give_up_at, silent))
        self.topics = [topics] if isinstance(topics, str) else list(topics)
        self.end = end.isoformat() if isinstance(end, datetime) else end
        self.grace = grace.total_seconds() if isinstance(grace, timedelta) else grace

    def get_arguments(self) -> dict[str, Any]:
        return {"topics": self.topics, "end": self.end, "grace": self.grace}

    def probe(self) -> IntervalProbe:
        return IntervalProbe(topics=self.topics, end=self.end, grace=self.grace)


class WindowProbe:
    """Checks that a pipeline has completed a window. Arguments are those of :class:`KafkaWindowTrigger`."""

    def __init__(
        self,
        *,
        pipeline: str,
        run: str | None = None,
        after: Count = None,
        since: Instant = None,
        ledger_topic: str = "airflow-windows",
    ) -> None:
        self._problems: list[Problem] = []
        if not isinstance(pipeline, str) or not pipeline.strip():
            self._problems.append(Problem("pipeline", f"`{pipeline}` is not the name of a pipeline"))
        if run and (not isinstance(run, str) or run.count("/") < 2):
            expected = "Give it as `<dag_id>/<run_id>/<task_id>`"
            self._problems.append(Problem("run", f"`{run}` is not a task of a run", expected))
        moment = parse_instant("since", since, self._problems)
        number = parse_count("after", after, self._problems)
        self.wanted = WindowCriteria(run or None, number, moment.timestamp() if moment else None)
        if not self._problems and self.wanted == WindowCriteria():
            self._problems.append(Problem("run", "nothing to wait for is given", "Give `run`, `after` or `since`"))
        self._ledger = LedgerReader(pipeline, ledger_topic)

    def find_problems(self) -> list[Problem]:
        return self._problems

    def check(self, hook: KafkaHook) -> ProbeResult:
        memory = self._ledger.read(hook)
        refuse_renamed(memory)
        found = find_completed(memory, self.wanted)
        if found is None:
            if (
                memory.intervals
                and not memory.entries
                and (self.wanted.run is None or self.wanted != WindowCriteria(self.wanted.run))
            ):
                what = f"pipeline `{memory.pipeline}` moves data intervals, which have no numbers and no times of completion here"
                action = "Wait for the window of a run: give `run` or `external_task_id` only"
                raise ValidationError([Problem("after" if self.wanted.after is not None else "since", what, action)])
            unfinished = memory.open_entry
            state = f"its last complete window is {memory.last_number}" if memory.exists else "the ledger does not know it yet"
            state += f", window {unfinished.window.number} is open" if unfinished else ""
            if memory.is_unknown and memory.forgotten is not None:
                state = f"it was forgotten at {memory.forgotten.at}, by {memory.forgotten.who}"
            if memory.pause is not None:
                state += f". It is paused since {memory.pause.at}, by {memory.pause.who}: {memory.pause.why}"
            return ProbeResult(False, line=f"Pipeline {memory.pipeline} has not completed {self.wanted}: {state}")
        value = {"pipeline": memory.pipeline, "window": found.window, "run": found.run, "report": dict(found.report)}
        return ProbeResult(True, value, f"Window {found.window} of pipeline {memory.pipeline} is complete (run {found.run})")


class KafkaWindowTrigger(KafkaTrigger[WindowProbe]):
    """Fires once a pipeline has completed a window that meets all given conditions.

    :param pipeline: name of the pipeline.
    :param run: run that planned the window, ``<dag_id>/<run_id>/<task_id>``; default None, any run.
    :param after: lower bound of the window's number, exclusive; default None.
    :param since: earliest time of completion, a ``datetime`` or text in ISO 8601; default None.
    :param ledger_topic: topic that contains the ledger of the pipeline; default ``airflow-windows``.
    :param kafka_conn_id: Airflow connection of type ``kafka``; default ``kafka_default``.
    :param poll_interval: seconds between two checks; default 60.
    :param retry_timeout: seconds for which brokers may be down, or refuse for a temporary reason, before that is a failure;
        default 300.
    :param wait_for_topic: True waits for a topic that does not exist; default False: such a topic is a failure at once.
    :param give_up_at: time at which to stop waiting, in seconds since the epoch; None (default) never stops.
    :param silent: True retries after every failure, as a sensor's ``silent_fail`` does; default False.
    """

    def __init__(
        self,
        *,
        pipeline: str,
        run: str | None = None,
        after: int | str | None = None,
        since: str | datetime | None = None,
        ledger_topic: str = "airflow-windows",
        kafka_conn_id: str = "kafka_default",
        poll_interval: float = 60.0,
        retry_timeout: float = 300.0,
        wait_for_topic: bool = False,
        give_up_at: float | None = None,
        silent: bool = False,
    ) -> None:
        super().__init__(Polling(kafka_conn_id, poll_interval, retry_timeout, wait_for_topic, give_up_at, silent))
        self.pipeline = pipeline
        self.run_id = run
        self.after = after
        self.since = since.isoformat() if isinstance(since, datetime) else since
        self.ledger_topic = ledger_topic

    def get_arguments(self) -> dict[str, Any]:
        return {
            "pipeline": self.pipeline, "run": self.run_id, "after": self.after, "since": self.since,
            "ledger_topic": self.ledger_topic,
        }  # fmt: skip

    def probe(self) -> WindowProbe:
        return WindowProbe(
            pipeline=self.pipeline, run=self.run_id, after=self.after, since=self.since, ledger_topic=self.ledger_topic
        )
