"""Wait for a lag, or start a DAG when a backlog has grown."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_kafka_spark.errors import ConsumerUnhealthy, KafkaSparkError, Problem
from airflow_kafka_spark.ledger.lag import LagMeter
from airflow_kafka_spark.sources.kafka import Subscription
from airflow_kafka_spark.triggers import casting
from airflow_kafka_spark.triggers.base import KafkaTrigger, Sight, connect, in_thread, raise_for
from airflow_kafka_spark.windows.lag import Lag, Per, Status, Threshold, Verdict, worst

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.windows.model import TopicPartition

_THRESHOLDS = ("at_most_records", "at_most_seconds", "at_least_records", "at_least_seconds")


class LagWatch:
    """Looks how far a consumer is behind. Arguments as :class:`KafkaLagTrigger`, templates rendered."""

    def __init__(
        self,
        *,
        group_id: str | None = None,
        pipeline: str | None = None,
        topics: str | Sequence[str] | None = None,
        at_most_records: Any = None,
        at_most_seconds: Any = None,
        at_least_records: Any = None,
        at_least_seconds: Any = None,
        per: Per = "total",
        schedule: Any = None,
        fail_on: str | Sequence[str] = (),
        ledger_topic: str = "airflow-windows",
    ) -> None:
        self._problems: list[Problem] = []
        self.threshold = Threshold(
            casting.whole("at_most_records", at_most_records, self._problems),
            casting.seconds("at_most_seconds", at_most_seconds, self._problems),
            casting.whole("at_least_records", at_least_records, self._problems),
            casting.seconds("at_least_seconds", at_least_seconds, self._problems),
            per,
        )
        self.fail_on = (fail_on,) if isinstance(fail_on, str) else tuple(fail_on)
        subscription = Subscription.of(topics, None)
        self._problems += subscription.validate() if subscription.topics else []
        self._problems += self._check(group_id, pipeline, subscription)
        self._meter = LagMeter(
            subscription.topics,
            group_id or None,
            pipeline or None,
            ledger_topic,
            casting.seconds("schedule", schedule, self._problems) or None,
        )
        self.lag: Lag | None = None
        """What the last look found."""

    def _check(self, group_id: str | None, pipeline: str | None, subscription: Subscription) -> list[Problem]:
        problems = casting.one_of("per", self.threshold.per, ("total", "partition"))
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
            problems += casting.one_of("fail_on", status, tuple(s.value for s in Status if s is not Status.OK))
        return problems

    def problems(self) -> list[Problem]:
        return self._problems

    def look(self, hook: KafkaHook) -> Sight:
        """
        :raises ConsumerUnhealthy: the status is one of ``fail_on``, and the lag is not what is waited for.
        """
        lag, verdicts = self._meter.measure(hook)
        self.lag, verdict, done = lag, worst(verdicts), self.threshold.reached(lag)
        line = f"{lag.line}, status {verdict.status.value}{f' ({verdict.reason})' if verdict.reason else ''}"
        if not done and verdict.status.value in self.fail_on:
            raise ConsumerUnhealthy(lag.of, verdict.status.value, verdict.reason, lag.line)
        return Sight(done, self._told(lag, verdict, verdicts), f"{line}; waiting for {self.threshold}")

    def _told(self, lag: Lag, verdict: Verdict, verdicts: Mapping[TopicPartition, Verdict]) -> dict[str, Any]:
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


class KafkaLagTrigger(KafkaTrigger, BaseEventTrigger):
    """Fires when a consumer's lag is what is waited for: for a sensor once, for an ``AssetWatcher`` again and again.

    In an ``AssetWatcher`` one backlog fires once. The next event comes

    - when the backlog had been smaller in between, and is there again; or
    - when it is still, or again, there, the consumer has moved since the last event, and ``cooldown`` is over; or
    - when ``remind_after`` is set and over, though the consumer has not moved: the run that was started has failed, say.

    What it has fired for is kept in the asset's state store (Airflow 3.3), one look after the event: a triggerer that is
    restarted does not fire again, one that is killed right after an event may. So the event is at least once: let the DAG
    begin where its pipeline stands, as the operators here do, not with what the event tells. Without a state store it
    remembers as long as it runs. Failures never end a watcher: it says why in the log, and goes on looking.

    The event's payload is what :class:`~airflow_kafka_spark.sensors.KafkaLagSensor` returns.

    :param group_id: the consumer group whose committed offsets count.
    :param pipeline: the pipeline whose ledger counts; with ``group_id`` too, that counts until the ledger knows the pipeline.
    :param topics: whose partitions count; may be left out for a pipeline: all that it has read.
    :param at_most_records: fire when at most so many records are left.
    :param at_most_seconds: fire when the oldest of them is at most so old; given both, both have to hold.
    :param at_least_records: fire when so many records are waiting.
    :param at_least_seconds: fire when the oldest of them has waited so long; given both, one is enough.
    :param per: count records in ``total`` (default), or by ``partition``: at most in each, at least in one.
    :param schedule: how often the consumer runs, for the status; see the guide.
    :param fail_on: for a sensor: statuses that are a failure.
    :param ledger_topic: where pipelines have their ledger.
    :param cooldown: seconds between two events for a backlog that stays although the consumer moves; default 60.
    :param remind_after: seconds after which a backlog that nobody has touched fires again; default None: never.
    :param once: as a sensor wants it: fire once, and also for a failure.
    :param options: ``kafka_conn_id``, ``poll_interval``, ``retry_timeout``, ``wait_for_topic``, as :class:`KafkaTrigger`.
    """

    def __init__(
        self,
        *,
        group_id: str | None = None,
        pipeline: str | None = None,
        topics: str | Sequence[str] | None = None,
        at_most_records: int | None = None,
        at_most_seconds: float | timedelta | None = None,
        at_least_records: int | None = None,
        at_least_seconds: float | timedelta | None = None,
        per: Per = "total",
        schedule: float | timedelta | None = None,
        fail_on: str | Sequence[str] = (),
        ledger_topic: str = "airflow-windows",
        cooldown: float | timedelta = 60.0,
        remind_after: float | timedelta | None = None,
        once: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        watched = {
            "group_id": group_id, "pipeline": pipeline, "topics": topics, "at_most_records": at_most_records,
            "at_most_seconds": at_most_seconds, "at_least_records": at_least_records, "at_least_seconds": at_least_seconds,
            "per": per, "schedule": schedule, "fail_on": fail_on, "ledger_topic": ledger_topic,
        }  # fmt: skip
        # As JSON: what `serialize` gives must be what it was made of.
        self.watched = {name: plain(value) for name, value in watched.items()}
        self.cooldown = float(plain(cooldown))
        self.remind_after = None if remind_after is None else float(plain(remind_after))
        self.once = once

    def options(self) -> dict[str, Any]:
        return {**self.watched, "cooldown": self.cooldown, "remind_after": self.remind_after, "once": self.once}

    def watch(self) -> LagWatch:
        return LagWatch(**self.watched)

    def checked_watch(self) -> LagWatch:
        watch = self.watch()
        raise_for(watch.problems())
        return watch

    async def run(self) -> AsyncIterator[TriggerEvent]:
        if self.once:
            yield TriggerEvent(await self.fired())
            return
        fired, saved = await self._recall(), True
        watch = self.checked_watch()
        hook: KafkaHook | None = None
        said = ""
        try:
            while True:
                try:
                    hook = hook or await connect(self.kafka_conn_id)
                    sight = await in_thread(watch.look, hook)
                    if not saved:
                        saved = await self._remember(fired)
                    now, committed = time.time(), watch.lag.committed if watch.lag else {}
                    if not sight.done:
                        fired, saved = {}, saved and not fired
                    elif fires(fired, committed, now, self.cooldown, self.remind_after):
                        self.log.info("%s: firing", sight.line)
                        fired, saved = {"committed": committed, "at": now}, False
                        yield TriggerEvent(sight.value)
                except KafkaSparkError as error:
                    if str(error) != said:
                        said = str(error)
                        self.log.warning("Looking again: %s", error)
                await asyncio.sleep(self.poll_interval)
        finally:
            if hook is not None:
                await in_thread(hook.close)

    # --- what it has fired for ---

    @property
    def _key(self) -> str:
        digest = hashlib.sha256(json.dumps([self.kafka_conn_id, self.watched], sort_keys=True).encode()).hexdigest()
        return f"kafka-lag-{digest[:16]}"

    async def _recall(self) -> dict[str, Any]:
        store = getattr(self, "asset_state_store", None)
        if store is None:
            return {}
        try:
            found = await store.aget(self._key)
            return found if isinstance(found, dict) else {}
        except Exception as error:
            # A trigger that several assets watch has no store of its own; and none is worth not looking at all.
            self.log.warning("What was fired for cannot be read from the asset's state store: %s", error)
            return {}

    async def _remember(self, fired: dict[str, Any]) -> bool:
        """Always true: what cannot be kept is remembered here at least."""
        store = getattr(self, "asset_state_store", None)
        if store is not None:
            try:
                await store.aset(self._key, fired)
            except Exception as error:
                self.log.warning("What was fired for cannot be kept in the asset's state store: %s", error)
        return True


def fires(
    fired: Mapping[str, Any], committed: Mapping[str, int | None], now: float, cooldown: float, remind_after: float | None
) -> bool:
    """Whether a backlog that is there is to be told.

    :param fired: what the last event was for: where the consumer stood (``committed``), and when (``at``); empty when there was
        none, or the backlog was gone since.
    :param committed: where the consumer stands.
    """
    if not fired:
        return True
    silence = now - float(fired.get("at", 0.0))
    if dict(committed) != fired.get("committed"):
        return silence >= cooldown
    return remind_after is not None and silence >= remind_after


def plain(value: Any) -> Any:
    """As JSON: seconds for a ``timedelta``, a list for any other sequence."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return list(value)
    return value
