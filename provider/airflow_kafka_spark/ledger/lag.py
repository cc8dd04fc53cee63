"""Measure lag on a real cluster: in records, and in seconds by the timestamp of the next record.

Only looked at, never consumed: no group is joined, nothing is committed or created.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import (
    ClusterChanged,
    KafkaRefused,
    KafkaSparkError,
    KafkaUnavailable,
    PipelineUnknown,
    Problem,
    TopicMissing,
    ValidationError,
)
from airflow_kafka_spark.hooks.kafka.events import ClientEvents
from airflow_kafka_spark.hooks.kafka.rights import consume
from airflow_kafka_spark.ledger.topic import PROMPT, TOPIC, LedgerReader
from airflow_kafka_spark.windows.cadence import CompletedWindow, Periodic, cadence_of_windows
from airflow_kafka_spark.windows.lag import Head, History, Lag, Observation, PartitionLag, Verdict
from airflow_kafka_spark.windows.memory import Memory
from airflow_kafka_spark.windows.model import State, TopicPartition

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.hooks.kafka.requests import PartitionOffsets, TopicDescription

log = logging.getLogger(__name__)

FETCH_BYTES, MOST_FETCH_BYTES = 64 << 10, 16 << 20
"""Bytes that one request may bring of a partition, at least, and of all partitions, about: one record of each is wanted."""
TRIES = 3
FRESH_SECONDS = 300.0
"""Seconds for which the next record of a consumer that does not move is taken for the one that was found."""

_ALIVE = frozenset({"Stable", "PreparingRebalance", "CompletingRebalance", "Assigning", "Reconciling"})


class LogMoved(Exception):
    """Retention deleted records between two looks at a partition: look again."""


@dataclass(frozen=True)
class Peeked:
    """The result of reading one span of offsets.

    :param head: the first record; None without one.
    :param until: with no record: no record lies below this offset.
    """

    head: Head | None
    until: int


def peek(hook: KafkaHook, spans: Mapping[TopicPartition, tuple[int, int]]) -> dict[TopicPartition, Peeked]:
    """Return the first committed record of each span of offsets. One consumer reads them all and stops as soon as it has them.

    Only the head of each span is read: its first committed record, and what lies before that.

    :param spans: half-open ``[start, end)``, not empty, below the last stable offset.
    :raises KafkaUnavailable: the brokers do not hand out the records in time.
    :raises RightMissing: they do not hand them out to this user.
    :raises TopicMissing: a topic was deleted meanwhile.
    :raises LogMoved: a start was deleted meanwhile.
    """
    import confluent_kafka

    if not spans:
        return {}
    fetch = max(FETCH_BYTES, min(1 << 20, MOST_FETCH_BYTES // len(spans)))
    events = ClientEvents(hook.config.get("error_cb"))
    settings = {"fetch.message.max.bytes": fetch, "queued.min.messages": 1, "error_cb": events.on_error}
    consumer = confluent_kafka.Consumer(hook.consumer_config(**PROMPT, **settings), logger=events)
    found: dict[TopicPartition, Peeked] = {}
    began = time.monotonic()
    try:
        consumer.assign([confluent_kafka.TopicPartition(*tp, start) for tp, (start, _) in spans.items()])
        while len(found) < len(spans):
            messages: list[Any] = consume(consumer, len(spans), 0.05, hook.config, "reading next records", conn_id=hook.conn_id)
            for message in messages:
                tp = TopicPartition(message.topic(), message.partition())
                if tp not in found and (peeked := _peeked(hook, tp, message, spans[tp][1])):
                    found[tp] = peeked
                    # Or the rest of the backlog would follow.
                    consumer.incremental_unassign([confluent_kafka.TopicPartition(*tp)])
            if len(found) < len(spans) and time.monotonic() - began > hook.timeout:
                missing = min(tp for tp in spans if tp not in found)
                raise KafkaUnavailable(
                    hook.conn_id, f"reading the next record of {missing}", events.reason(began)[1] or "no answer in time"
                )
    finally:
        consumer.close()
    return found


def _peeked(hook: KafkaHook, tp: TopicPartition, message: Any, end: int) -> Peeked | None:
    """Return what a message says about its span; None where it does not decide anything yet."""
    import confluent_kafka

    error = message.error()
    if error is None:
        kind, timestamp = message.timestamp()
        if message.offset() >= end:
            return Peeked(None, end)
        known = kind != confluent_kafka.TIMESTAMP_NOT_AVAILABLE and timestamp >= 0
        return Peeked(Head(message.offset(), timestamp if known else None), message.offset())
    if error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
        # The end of what is stable, which is never behind `end`: that was a last stable offset.
        return Peeked(None, end) if message.offset() >= end else None
    if error.name() in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"):
        raise LogMoved(str(tp))
    if error.name() in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_PARTITION", "_UNKNOWN_TOPIC", "UNKNOWN_TOPIC_ID"):
        raise TopicMissing(hook.conn_id, [str(tp)])
    if error.retriable() or error.name() in ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT"):
        return None
    raise KafkaRefused(hook.conn_id, f"reading the next record of {tp}", error.name(), error.str())


@dataclass(frozen=True)
class EarlierRead:
    """The result of an earlier read of a partition. It is valid as long as the topic is the same one.

    :param start: from where it looked on.
    :param at: when, on the monotonic clock: compaction may have removed the record since.
    """

    topic_id: str
    start: int
    peeked: Peeked
    at: float

    def covers(self, topic_id: str, start: int) -> bool:
        """Return True if no record lies between ``start`` and the record that was found."""
        fresh = time.monotonic() - self.at < FRESH_SECONDS
        return fresh and self.topic_id == topic_id and self.start <= start <= self.peeked.until


@dataclass
class NextRecords:
    """The next record of each consumer, which tells its age.

    A record that was found is not read again until the consumer has moved, the record is deleted, or :data:`FRESH_SECONDS` are
    over.
    """

    _known: dict[TopicPartition, EarlierRead] = field(default_factory=dict)

    def find(
        self,
        hook: KafkaHook,
        states: Iterable[tuple[TopicPartition, PartitionLag]],
        topic_ids: Mapping[str, str],
        *,
        most: int | None = None,
        tolerate: bool = False,
    ) -> dict[tuple[TopicPartition, int], Head | None]:
        """Return the next record by partition and starting offset; None if no record is left. Unread partitions are missing.

        :param states: consumers in partitions; several may stand at different offsets of one partition.
        :param topic_ids: the ids of the topics now.
        :param most: how many partitions are read at most; None (default) for all.
        :param tolerate: True leaves out what cannot be read; False (default) raises as :func:`peek` does.
        """
        found: dict[tuple[TopicPartition, int], Head | None] = {}
        spans: dict[TopicPartition, tuple[int, int]] = {}
        places: dict[TopicPartition, int] = {}
        for tp, state in states:
            start, known = state.start, self._known.get(tp)
            if start >= state.end or (tp, start) in found:
                continue
            if known and known.covers(topic_ids[tp.topic], start):
                start = known.peeked.until
                if start >= state.end or (known.peeked.head and state.low <= start):
                    found[tp, state.start] = known.peeked.head if start < state.end else None
                    continue
            if tp not in spans and (most is None or len(spans) < most):
                spans[tp], places[tp] = (start, state.end), state.start
        try:
            peeked = peek(hook, spans)
        except (LogMoved, KafkaSparkError):
            if not tolerate:
                raise
            peeked = {}
        for tp, there in peeked.items():
            self._known[tp] = EarlierRead(topic_ids[tp.topic], places[tp], there, time.monotonic())
            found[tp, places[tp]] = there.head
        return found


@dataclass
class LagMeter:
    """Measures the lag and the status of one consumer, again and again.

    A group is where it has committed. A pipeline is where its ledger says; the group's offsets only mirror that, so they are
    asked for a pipeline only if the ledger does not know it and a group is named as well. A consumer without a known position
    is behind by all records that are still there.

    Lag ends at the last stable offset. Transaction markers, aborted and compacted records are no lag: where only such lie
    between the committed offset and the end, the consumer is 0 records and 0 seconds behind. Seconds are the age of the record
    at the committed offset, or of the next one if that is none, by its own timestamp and this machine's clock.

    :param topics: whose partitions count; may be left out for a pipeline: all that its ledger knows.
    :param group_id: the consumer group.
    :param pipeline: the pipeline.
    :param ledger_topic: where its ledger is.
    :param schedule: seconds from one run of the consumer to the next; default for a pipeline: what the runs in its ledger tell
        (:func:`~airflow_kafka_spark.windows.cadence.cadence_of_windows`).
    """

    topics: tuple[str, ...] = ()
    group_id: str | None = None
    pipeline: str | None = None
    ledger_topic: str = TOPIC
    schedule: float | None = None
    _next: NextRecords = field(default_factory=NextRecords)
    _history: History = field(default_factory=History)
    _past: dict[TopicPartition, list[Observation]] = field(default_factory=dict)
    _ledger: LedgerReader | None = None

    def measure(self, hook: KafkaHook) -> tuple[Lag, dict[TopicPartition, Verdict]]:
        """Return the lag now, and the status of each partition as far as the measurements up to now tell it.

        :raises TopicMissing: a topic does not exist.
        :raises PipelineUnknown: the ledger does not know the pipeline, and no topics are given.
        :raises ValidationError: the pipeline moves data intervals, and no group is named.
        :raises ClusterChanged: the pipeline's offsets belong to another cluster.
        :raises KafkaSparkError: what the brokers have to say.
        """
        for left in reversed(range(TRIES)):
            try:
                lag = self._measure(hook)
                break
            except LogMoved:
                if not left:
                    raise KafkaUnavailable(hook.conn_id, "measuring lag", "records are deleted faster than looked at") from None
        verdicts = self._history.judge(lag, self._past)
        return lag, verdicts

    def _measure(self, hook: KafkaHook) -> Lag:
        # Where the consumer stands comes first: the other way round one that commits in between would be ahead of the log.
        memory = self._remembered(hook)
        described = hook.describe_topics(self._topics_of(memory))
        partitions = [tp for topic in described.values() for tp in topic.topic_partitions]
        ids = {name: topic.topic_id for name, topic in described.items()}
        self._look_back(memory, ids)
        at: dict[TopicPartition, int | None] = {}
        ids_then: Mapping[str, str] = {}
        active = False
        if memory is not None and memory.intervals and not (memory.position.offsets or self.group_id):
            problem = f"pipeline `{self.pipeline}` moves data intervals, in any order: it has no single position"
            raise ValidationError([Problem("group_id", problem, "Name its consumer group as well")])
        if memory is not None and memory.position.offsets:
            position = memory.position
            if position.cluster_id and position.cluster_id != (found := hook.cluster_id()):
                raise ClusterChanged(position.cluster_id, found)
            at, ids_then = dict(position.offsets), position.topic_ids
        elif self.group_id:
            # Not stable ones: an offset in an open transaction is not committed yet, and waiting for it would take its time.
            at = {tp: c.offset if c else None for tp, c in hook.committed(self.group_id, partitions, stable=False).items()}
            active = hook.group_state(self.group_id).state in _ALIVE
        states = lags_of(at, ids_then, described, hook.offsets(partitions))
        heads = self._next.find(hook, states.items(), ids)
        now = time.time()
        lags = {tp: aged(state, heads.get((tp, state.start)), now) for tp, state in states.items()}
        return Lag(self._name, lags, now, active)

    @property
    def _name(self) -> str:
        return f"pipeline {self.pipeline}" if self.pipeline else f"group {self.group_id}"

    # --- where a pipeline stands ---

    def _remembered(self, hook: KafkaHook) -> Memory | None:
        if not self.pipeline:
            return None
        if self._ledger is None:
            self._ledger = LedgerReader(self.pipeline, self.ledger_topic)
        return self._ledger.look(hook)

    def _look_back(self, memory: Memory | None, ids: Mapping[str, str]) -> None:
        """Take from the ledger which windows were completed and when; without a ``schedule``, how often they are due."""
        complete = [
            (instant(entry.report["completed_at"]), entry.window)
            for _, entry in sorted(memory.entries.items() if memory else ())
            if entry.state is State.COMPLETE and entry.report and entry.report.get("completed_at")
        ]
        self._past = {}
        for completed_at, window in complete:
            for tp, end in window.ends.items():
                if window.topic_ids.get(tp.topic, "") in ("", ids.get(tp.topic)):
                    self._past.setdefault(tp, []).append(Observation(completed_at, end, active=True))
        told = [CompletedWindow(completed_at, window.run, window.interval) for completed_at, window in complete]
        self._history.cadence = cadence_of_windows(told) if self.schedule is None else Periodic(self.schedule)

    def _topics_of(self, memory: Memory | None) -> Sequence[str]:
        if self.topics:
            return self.topics
        ranges = (r.topic for interval in memory.intervals.spans for r in interval.ranges) if memory else ()
        topics = sorted({*ranges, *(tp.topic for tp in memory.position.offsets)} if memory else ())
        if not topics:
            raise PipelineUnknown(str(self.pipeline), self.ledger_topic)
        return topics


def lags_of(
    committed: Mapping[TopicPartition, int | None],
    topic_ids: Mapping[str, str],
    described: Mapping[str, TopicDescription],
    offsets: Mapping[TopicPartition, PartitionOffsets],
) -> dict[TopicPartition, PartitionLag]:
    """Return the lag of a consumer in every partition of some topics, before its next records are looked at.

    :param committed: the next offset that it reads, by partition. A partition that is missing counts as not read yet.
    :param topic_ids: the ids of the topics when it read them. Offsets of a topic that was deleted and created again do not count.
        A topic whose id is not known counts as the same one.
    :param described: the topics now.
    :param offsets: the bounds of their partitions, read after ``committed``.
    """
    states = {}
    for topic, there in described.items():
        known = topic_ids.get(topic, "")
        is_same = not known or not there.topic_id or known == there.topic_id
        for tp in there.topic_partitions:
            bounds = offsets[tp]
            at = committed.get(tp) if is_same else None
            states[tp] = PartitionLag(at, bounds.low, bounds.lso, held_back=bounds.held_back)
    return states


def aged(state: PartitionLag, head: Head | None, now: float) -> PartitionLag:
    """Return the state with its next record, and how old that is."""
    if head is None:
        return state
    seconds = None if head.timestamp is None else round(max(0.0, now - head.timestamp / 1000), 3)
    return replace(state, head=head, seconds=seconds)


def instant(text: str) -> float:
    """Return the seconds since the epoch of a UTC instant in ISO 8601, as the ledger writes it."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
