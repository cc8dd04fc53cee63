"""Measure the lag of consumers: in records, and in seconds by the timestamp of the next record.

Measuring joins no group, commits no offsets and creates no topics.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

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
from airflow_kafka_spark.hooks.kafka.client import ClientEvents, ConsumedMessage, consume_messages
from airflow_kafka_spark.hooks.kafka.log import PROMPT
from airflow_kafka_spark.ledger.topic import TOPIC, LedgerReader, refuse_renamed
from airflow_kafka_spark.windows.lag import (
    BacklogHead,
    CompletedWindow,
    History,
    Lag,
    Observation,
    PartitionLag,
    Periodic,
    Verdict,
    derive_cadence,
)
from airflow_kafka_spark.windows.memory import Memory
from airflow_kafka_spark.windows.model import State, TopicPartition
from airflow_kafka_spark.windows.times import parse_iso

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.hooks.kafka.requests import PartitionOffsets, TopicDescription

log = logging.getLogger(__name__)

FETCH_BYTES, MAX_FETCH_BYTES = 64 << 10, 16 << 20
"""Sizes in bytes of a fetch: minimum for one partition, and approximate maximum for all. One record of each is needed."""
TRIES = 3
"""Maximum number of tries of a measurement. A try fails if retention deletes a record that is being read."""
FRESH_SECONDS = 300.0
"""Seconds for which the next record of a consumer that does not move is cached."""

_ALIVE = frozenset({"Stable", "PreparingRebalance", "CompletingRebalance", "Assigning", "Reconciling"})


class LogMoved(Exception):
    """Raised when retention deleted records between two reads of a partition. The caller reads again."""


@dataclass(frozen=True)
class SpanSample:
    """The result of reading one span of offsets.

    :param head: the first record; None without one.
    :param until: where no record was found, the offset up to which the search went.
    """

    head: BacklogHead | None
    until: int


def peek_spans(hook: KafkaHook, spans: Mapping[TopicPartition, tuple[int, int]]) -> dict[TopicPartition, SpanSample]:
    """Return the first committed record of each span of offsets. One consumer reads all spans, each up to its first record.

    :param spans: half-open ``[start, end)``, not empty, below the last stable offset.
    :raises KafkaUnavailable: the brokers do not return the records in time.
    :raises RightMissing: the user may not read a topic.
    :raises TopicMissing: a topic was deleted meanwhile.
    :raises LogMoved: the start of a span was deleted meanwhile.
    """
    import confluent_kafka

    if not spans:
        return {}
    fetch = max(FETCH_BYTES, min(1 << 20, MAX_FETCH_BYTES // len(spans)))
    events = ClientEvents(hook.config.get("error_cb"))
    settings = {"fetch.message.max.bytes": fetch, "queued.min.messages": 1, "error_cb": events.on_error}
    consumer = confluent_kafka.Consumer(hook.make_consumer_config(**PROMPT, **settings), logger=events)
    found: dict[TopicPartition, SpanSample] = {}
    began = time.monotonic()
    try:
        consumer.assign([confluent_kafka.TopicPartition(*tp, start) for tp, (start, _) in spans.items()])
        while len(found) < len(spans):
            messages = consume_messages(consumer, len(spans), 0.05, hook.config, "reading next records", conn_id=hook.conn_id)
            for message in messages:
                tp = TopicPartition(message.topic(), message.partition())
                if tp not in found and (peeked := _make_sample(hook, tp, message, spans[tp][1])):
                    found[tp] = peeked
                    # Otherwise the consumer would fetch the rest of the backlog.
                    consumer.incremental_unassign([confluent_kafka.TopicPartition(*tp)])
            if len(found) < len(spans) and time.monotonic() - began > hook.timeout:
                missing = min(tp for tp in spans if tp not in found)
                raise KafkaUnavailable(
                    hook.conn_id, f"reading the next record of {missing}", events.find_reason(began)[1] or "no answer in time"
                )
    finally:
        consumer.close()
    return found


def _make_sample(hook: KafkaHook, tp: TopicPartition, message: ConsumedMessage, end: int) -> SpanSample | None:
    """Return the result for a span from a message of its partition; None if the message does not decide it."""
    import confluent_kafka

    error = message.error()
    if error is None:
        kind, timestamp = message.timestamp()
        offset = message.offset()
        if offset >= end:
            return SpanSample(None, end)
        known = kind != confluent_kafka.TIMESTAMP_NOT_AVAILABLE and timestamp >= 0
        return SpanSample(BacklogHead(offset, timestamp if known else None), offset)
    if error.code() == confluent_kafka.KafkaError._PARTITION_EOF:
        # The last stable offset was reached. It never goes back, so it is at or after `end`.
        return SpanSample(None, end) if message.offset() >= end else None
    if error.name() in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"):
        raise LogMoved(str(tp))
    if error.name() in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_PARTITION", "_UNKNOWN_TOPIC", "UNKNOWN_TOPIC_ID"):
        raise TopicMissing(hook.conn_id, [str(tp)])
    if error.retriable() or error.name() in ("_TRANSPORT", "_ALL_BROKERS_DOWN", "_TIMED_OUT"):
        return None
    raise KafkaRefused(hook.conn_id, f"reading the next record of {tp}", error.name(), error.str())


@dataclass(frozen=True)
class EarlierRead:
    """The result of an earlier read of a partition. It is valid until the topic is recreated.

    :param start: offset at which the read began.
    :param at: time of the read on the monotonic clock. Compaction may have removed the record since.
    """

    topic_id: str
    start: int
    peeked: SpanSample
    at: float

    def covers(self, topic_id: str, start: int) -> bool:
        """Return True if no record lies between ``start`` and the record that was found."""
        fresh = time.monotonic() - self.at < FRESH_SECONDS
        return fresh and self.topic_id == topic_id and self.start <= start <= self.peeked.until


@dataclass
class NextRecords:
    """Cache of the next record of each consumer, whose timestamp is the consumer's lag in seconds.

    A record is read again when the consumer has moved, when the record was deleted, and after :data:`FRESH_SECONDS`.
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
    ) -> dict[tuple[TopicPartition, int], BacklogHead | None]:
        """Return the next record by partition and starting offset; None if no record is left. Unread partitions are missing.

        :param states: consumers in partitions; several may have different offsets in one partition.
        :param topic_ids: the present ids of the topics.
        :param most: maximum number of partitions that are read; None (default) for all.
        :param tolerate: True leaves out partitions that cannot be read; False (default) raises the errors of :func:`peek_spans`.
        """
        found: dict[tuple[TopicPartition, int], BacklogHead | None] = {}
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
            peeked = peek_spans(hook, spans)
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
    """Measures the lag and the status of one consumer repeatedly.

    The position of a group is its committed offsets. The position of a pipeline is that in its ledger, which the group's offsets
    mirror; data intervals that continue it without a hole belong to it. So the group's offsets are used for a pipeline only if
    the ledger does not know it and a group is named, too. For a consumer without a known position all records in the log are lag.

    Lag ends at the last stable offset. Transaction markers, aborted and compacted records are no lag: if there is nothing else
    between the committed offset and the end, the consumer is 0 records and 0 seconds behind. Seconds are the age of the first
    record at or after the committed offset, by its own timestamp and this machine's clock.

    :param topics: the topics to measure; for a pipeline the default is all topics in its ledger.
    :param group_id: the consumer group.
    :param pipeline: the pipeline.
    :param ledger_topic: the topic of its ledger.
    :param schedule: seconds from one run of the consumer to the next; for a pipeline the default is derived from its windows
        (:func:`~airflow_kafka_spark.windows.lag.derive_cadence`).
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
        """Return the present lag, and the status of each partition according to all measurements so far.

        :raises TopicMissing: a topic does not exist.
        :raises PipelineUnknown: the ledger does not know the pipeline, and no topics are given.
        :raises PipelineRenamed: the pipeline has another name now, and no group is named.
        :raises ValidationError: the pipeline moves data intervals, and no group is named.
        :raises ClusterChanged: the pipeline's offsets belong to another cluster.
        :raises KafkaSparkError: the brokers do not answer, or refuse a request.
        """
        for left in reversed(range(TRIES)):
            try:
                lag = self._measure(hook)
                break
            except LogMoved:
                if not left:
                    raise KafkaUnavailable(
                        hook.conn_id, "measuring lag", "records are deleted faster than they are read"
                    ) from None
        verdicts = self._history.judge(lag, self._past)
        return lag, verdicts

    def _measure(self, hook: KafkaHook) -> Lag:
        # The position is read before the log. Otherwise a consumer that commits in between would be ahead of the log.
        memory = self._find_remembered(hook)
        if memory is not None and not self.group_id:
            refuse_renamed(memory)
        described = hook.describe_topics(self._list_topics_of(memory))
        partitions = [tp for topic in described.values() for tp in topic.topic_partitions]
        ids = {name: topic.topic_id for name, topic in described.items()}
        self._read_completions(memory, ids)
        at: dict[TopicPartition, int | None] = {}
        ids_then: Mapping[str, str] = {}
        active = False
        if memory is not None and memory.intervals and not (memory.position.offsets or self.group_id):
            problem = f"pipeline `{self.pipeline}` moves data intervals, in any order: it has no single position"
            raise ValidationError([Problem("group_id", problem, "Name its consumer group as well")])
        if memory is not None and memory.position.offsets:
            position = memory.position
            if position.cluster_id and position.cluster_id != (found := hook.read_cluster_id()):
                raise ClusterChanged(position.cluster_id, found)
            at, ids_then = dict(memory.read_offsets), position.topic_ids
        elif self.group_id:
            # Not stable: an offset in an open transaction is not committed yet, and its end is not awaited.
            at = {
                tp: c.offset if c else None
                for tp, c in hook.read_committed_offsets(self.group_id, partitions, stable=False).items()
            }
            active = hook.read_group_state(self.group_id).state in _ALIVE
        states = compute_lags(at, ids_then, described, hook.read_offsets(partitions))
        heads = self._next.find(hook, states.items(), ids)
        now = time.time()
        lags = {tp: add_record_age(state, heads.get((tp, state.start)), now) for tp, state in states.items()}
        return Lag(self._name, lags, now, active)

    @property
    def _name(self) -> str:
        return f"pipeline {self.pipeline}" if self.pipeline else f"group {self.group_id}"

    # --- position of a pipeline ---

    def _find_remembered(self, hook: KafkaHook) -> Memory | None:
        if not self.pipeline:
            return None
        if self._ledger is None:
            self._ledger = LedgerReader(self.pipeline, self.ledger_topic)
        return self._ledger.read(hook)

    def _read_completions(self, memory: Memory | None, ids: Mapping[str, str]) -> None:
        """Read the completion times of windows from the ledger, and, without a ``schedule``, derive one from them."""
        complete = [
            (parse_epoch_seconds(entry.report["completed_at"]), entry.window)
            for _, entry in sorted(memory.entries.items() if memory else ())
            if entry.state is State.COMPLETE and entry.report and entry.report.get("completed_at")
        ]
        self._past = {}
        for completed_at, window in complete:
            for tp, end in window.ends.items():
                if window.topic_ids.get(tp.topic, "") in ("", ids.get(tp.topic)):
                    self._past.setdefault(tp, []).append(Observation(completed_at, end, active=True))
        windows = [CompletedWindow(completed_at, window.run, window.interval) for completed_at, window in complete]
        self._history.cadence = derive_cadence(windows) if self.schedule is None else Periodic(self.schedule)

    def _list_topics_of(self, memory: Memory | None) -> Sequence[str]:
        if self.topics:
            return self.topics
        ranges = (r.topic for interval in memory.intervals.spans for r in interval.ranges) if memory else ()
        topics = sorted({*ranges, *(tp.topic for tp in memory.position.offsets)} if memory else ())
        if not topics:
            raise PipelineUnknown(str(self.pipeline), self.ledger_topic)
        return topics


def compute_lags(
    committed: Mapping[TopicPartition, int | None],
    topic_ids: Mapping[str, str],
    described: Mapping[str, TopicDescription],
    offsets: Mapping[TopicPartition, PartitionOffsets],
) -> dict[TopicPartition, PartitionLag]:
    """Return the lag of a consumer in every partition of some topics, without its next records.

    :param committed: the next offset to read, by partition. A missing partition counts as not read yet.
    :param topic_ids: the ids of the topics when the consumer read them. Offsets of recreated topics are ignored. A topic with an
        unknown id is assumed not to be recreated.
    :param described: the present topics.
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


def add_record_age(state: PartitionLag, head: BacklogHead | None, now: float) -> PartitionLag:
    """Return the state with its next record and the age of that record."""
    if head is None:
        return state
    seconds = None if head.timestamp is None else round(max(0.0, now - head.timestamp / 1000), 3)
    return replace(state, head=head, seconds=seconds)


def parse_epoch_seconds(text: str) -> float:
    """Return an instant of the ledger (UTC, ISO 8601) in seconds since the epoch."""
    return parse_iso(text).timestamp()
