"""Wait for a lag, or start a DAG when a backlog is large enough."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_kafka_spark.errors import ConsumerUnhealthy, KafkaSparkError, Problem
from airflow_kafka_spark.errors.arguments import choice_problems
from airflow_kafka_spark.ledger.lag import LagMeter
from airflow_kafka_spark.sources.kafka.topics import Subscription
from airflow_kafka_spark.triggers.base import (
    Count,
    Duration,
    KafkaTrigger,
    Polling,
    ProbeResult,
    connect,
    in_thread,
    parse_count,
    parse_seconds,
)
from airflow_kafka_spark.windows.lag import Lag, Per, Status, Threshold, Verdict, worst_verdict

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.windows.model import TopicPartition

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

    def normalized(self) -> LagOptions:
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
        self._problems += self._argument_problems(options.group_id, options.pipeline, subscription)
        self._meter = LagMeter(
            subscription.topics,
            options.group_id or None,
            options.pipeline or None,
            options.ledger_topic,
            parse_seconds("schedule", options.schedule, self._problems) or None,
        )
        self.lag: Lag | None = None
        """The lag at the last check."""

    def _argument_problems(self, group_id: str | None, pipeline: str | None, subscription: Subscription) -> list[Problem]:
        problems = choice_problems("per", self.threshold.per, ("total", "partition"))
        for name, value in (("group_id", group_id), ("pipeline", pipeline)):
            if value is not None and (not isinstance(value, str) or value != value.strip()):
                problems.append(Problem(name, f"`{value}` is not a name"))
        if not group_id and not pipeline:
            problems.append(Problem("group_id", "neither `group_id` nor `pipeline` is given", "Say whose lag it is"))
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
            problems += choice_problems("fail_on", status, tuple(s.value for s in Status if s is not Status.OK))
        return problems

    def problems(self) -> list[Problem]:
        return self._problems

    def check(self, hook: KafkaHook) -> ProbeResult:
        """Measure the lag, and compare it with the threshold.

        :raises ConsumerUnhealthy: the threshold is not reached, and the consumer's status is one of ``fail_on``.
        """
        lag, verdicts = self._meter.measure(hook)
        self.lag, verdict, done = lag, worst_verdict(verdicts), self.threshold.reached(lag)
        line = f"{lag.line}, status {verdict.status.value}{f' ({verdict.reason})' if verdict.reason else ''}"
        if not done and verdict.status.value in self.fail_on:
            raise ConsumerUnhealthy(lag.of, verdict.status.value, verdict.reason, lag.line)
        return ProbeResult(done, self._payload(lag, verdict, verdicts), f"{line}; waiting for {self.threshold}")

    def _payload(self, lag: Lag, verdict: Verdict, verdicts: Mapping[TopicPartition, Verdict]) -> dict[str, Any]:
        return {
            "group_id": self._meter.group_id,
            "pipeline": self._meter.pipeline,
            "records": lag.records(),
            "records_in_one_partition": lag.records("partition"),
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
        self.options = given.normalized()
        self.cooldown = float(as_json(cooldown))
        self.remind_after = None if remind_after is None else float(as_json(remind_after))
        self.once = once

    def arguments(self) -> dict[str, Any]:
        return {**vars(self.options), "cooldown": self.cooldown, "remind_after": self.remind_after, "once": self.once}

    def probe(self) -> LagProbe:
        return LagProbe(self.options)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        if self.once:
            yield TriggerEvent(await self.wait())
            return
        last_event, saved = await self._load_last_event(), True
        probe = self.valid_probe()
        hook: KafkaHook | None = None
        logged = ""
        try:
            while True:
                try:
                    hook = hook or await connect(self.polling.kafka_conn_id)
                    observed = await in_thread(probe.check, hook)
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
                await asyncio.sleep(self.polling.poll_interval)
        finally:
            if hook is not None:
                await in_thread(hook.close)

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
