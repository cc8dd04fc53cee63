"""Wait until an interval is complete in Kafka."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.hooks.kafka.resolve_offsets import TOLERANCE_SECONDS
from airflow_kafka_spark.sources.kafka.topics import Subscription
from airflow_kafka_spark.triggers.base import Duration, Instant, KafkaTrigger, Polling, ProbeResult, parse_instant, parse_seconds
from airflow_kafka_spark.windows.instants import now_ms

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.windows.model import TopicPartition


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

    def problems(self) -> list[Problem]:
        return self._problems

    def check(self, hook: KafkaHook) -> ProbeResult:
        assert self.end is not None
        # Read the clock first, so that records written during the requests do not count as late.
        over = time.time() >= self.end.timestamp() + self.grace
        partitions = [tp for topic in hook.describe_topics(self.topics).values() for tp in topic.topic_partitions]
        left = [tp for tp in partitions if tp not in self._passed]
        end_ms = round(self.end.timestamp() * 1000)
        # A timestamp in the future proves nothing: a partition with only such records is idle once ``grace`` is over.
        latest = max(now_ms(), end_ms) + round(TOLERANCE_SECONDS * 1000)
        for tp, there in (hook.records_for_times(left, end_ms) if left else {}).items():
            if there is not None and there.timestamp <= latest:
                self._passed[tp] = there.offset
        waiting = [tp for tp in left if tp not in self._passed]
        idle: list[TopicPartition] = []
        if over and waiting:
            # A partition with an open transaction is not idle: its records may still belong to the interval.
            offsets = hook.offsets(waiting)
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

    def arguments(self) -> dict[str, Any]:
        return {"topics": self.topics, "end": self.end, "grace": self.grace}

    def probe(self) -> IntervalProbe:
        return IntervalProbe(topics=self.topics, end=self.end, grace=self.grace)
