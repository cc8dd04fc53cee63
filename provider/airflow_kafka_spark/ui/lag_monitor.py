"""Measures the lag of all pipelines of a cluster in rounds. A round sends a few requests for all pipelines together."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import RightMissing
from airflow_kafka_spark.ledger.lag import NextRecords, add_record_age, compute_lags
from airflow_kafka_spark.windows.lag import BacklogHead, Lag, PartitionLag
from airflow_kafka_spark.windows.model import TopicPartition

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.hooks.kafka.requests import PartitionOffsets, TopicDescription

MAX_PEEKS = 200
"""Maximum number of partitions whose next record one round reads for its timestamp."""
MAX_GROUPS = 50
"""Maximum number of groups whose committed offsets one round fetches, with one request each."""
NOT_FETCHED = "the offsets of its group have not been fetched yet"
"""The problem of a measurement of data intervals before the first round that fetches the group."""
REFUSED_SECONDS = 300.0
"""Seconds after which a topic is asked for again that the connection's user may not describe."""


@dataclass(frozen=True)
class ReadPosition:
    """The offsets up to which a pipeline has read.

    :param offsets: the next offset to read, by partition.
    :param topic_ids: ids of the topics when the pipeline read them.
    :param topics: all topics of the pipeline, including those that it has not read yet.
    :param group: its consumer group; None if it is unknown.
    :param by_group: True if only the group's committed offsets show its position, as with data intervals.
    :param due_until: end of the last data interval that is due, in milliseconds since the epoch. Later records are no lag yet.
        None if all records are due.
    """

    offsets: Mapping[TopicPartition, int]
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    topics: tuple[str, ...] = ()
    group: str | None = None
    by_group: bool = False
    due_until: int | None = None

    @property
    def all_topics(self) -> set[str]:
        """All topics of the pipeline."""
        return {*self.topics, *(tp.topic for tp in self.offsets)}


@dataclass(frozen=True)
class LagMeasurement:
    """Lag of one pipeline as one round has measured it.

    :param lag: the lag; None if it could not be measured.
    :param offsets: the first and last offsets of the partitions.
    :param at: time of the measurement, seconds since the epoch.
    :param committed: committed offsets of the group; None if they were not fetched.
    :param problem: the reason why the lag could not be measured, or only partly; "" if it was.
    :param estimated: True if the timestamps of some next records are unknown. Then ``seconds`` covers only the others.
    """

    lag: Lag | None
    offsets: Mapping[TopicPartition, PartitionOffsets]
    at: float
    committed: Mapping[TopicPartition, int | None] | None = None
    problem: str = ""
    estimated: bool = False

    @property
    def seconds(self) -> float | None:
        """The age of the oldest unread record with a known timestamp, in seconds; None if there is no such record."""
        if self.lag is None:
            return None
        ages = [s.seconds for s in self.lag.partitions.values() if s.seconds is not None and (s.behind or not self.estimated)]
        return max(ages, default=None if self.lag.count_records() else 0.0)


@dataclass(frozen=True)
class _Round:
    """The cluster's answers in one round.

    :param described: the topics that exist and that the user may describe.
    :param offsets: the offsets of their partitions.
    :param due_ends: the first offset that is not due yet, by partition and ``due_until``.
    """

    described: Mapping[str, TopicDescription]
    offsets: Mapping[TopicPartition, PartitionOffsets]
    due_ends: Mapping[tuple[TopicPartition, int], int]


@dataclass
class LagMonitor:
    """Measures all pipelines of one cluster, one round after the other.

    Each round fetches the topics and the offsets of all their partitions. It reads at most :data:`MAX_PEEKS` next records and
    fetches at most :data:`MAX_GROUPS` groups; those that it leaves out come first in the next round.
    """

    _next_records: NextRecords = field(default_factory=NextRecords)
    _group_asked: dict[str, float] = field(default_factory=dict)
    _committed: dict[str, dict[TopicPartition, int | None]] = field(default_factory=dict)
    _due_ends: dict[tuple[str, TopicPartition, int], int] = field(default_factory=dict)
    _refused_topics: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Topics that the user may not describe: when to ask again, and the error."""
    _refused_groups: dict[str, str] = field(default_factory=dict)

    def measure(
        self, hook: KafkaHook, positions: Mapping[str, ReadPosition], interest: Iterable[str] = ()
    ) -> dict[str, LagMeasurement]:
        """Return the lag of each pipeline.

        A topic or group for which the user lacks a right hides the lag of its own pipelines only.

        :param positions: position of each pipeline.
        :param interest: pipelines whose pages are open. They are measured first, and their groups are fetched.
        :raises KafkaSparkError: the cluster does not answer.
        """
        first = [name for name in dict.fromkeys(interest) if name in positions]
        names = [*first, *(name for name in positions if name not in set(first))]
        topics = {topic for position in positions.values() for topic in position.all_topics}
        described = self._describe(hook, topics)
        self._ask_groups(hook, {name: positions[name] for name in names}, set(first), described)
        partitions = [tp for topic in described.values() for tp in topic.topic_partitions]
        offsets = hook.read_offsets(partitions) if partitions else {}
        answers = _Round(described, offsets, self._ask_due_ends(hook, positions.values(), described))
        states = {name: self._measure_partitions(positions[name], answers) for name in names}
        ids = {name: topic.topic_id for name, topic in described.items()}
        # Stable sort: lags with later ends come first, because their results hold for shorter ranges of a partition, too.
        lags = sorted((item for each in states.values() for item in each.items()), key=lambda item: -item[1].end)
        # Without records, because they cannot be read or were deleted meanwhile, ages are unknown. The lag in records is known.
        heads, now = self._next_records.find(hook, lags, ids, most=MAX_PEEKS, tolerate=True), time.time()
        return {name: self._make_measurement(name, positions[name], states[name], answers, heads, now) for name in names}

    def _describe(self, hook: KafkaHook, topics: set[str]) -> Mapping[str, TopicDescription]:
        """Return the topics that exist and that the user may describe."""
        now = time.monotonic()
        self._refused_topics = {topic: kept for topic, kept in self._refused_topics.items() if kept[0] > now}
        while asked := sorted(topics - self._refused_topics.keys()):
            try:
                return hook.describe_topics(asked, missing="omit")
            except RightMissing as error:
                if error.name not in asked:
                    raise
                self._refused_topics[error.name] = now + REFUSED_SECONDS, str(error)
        return {}

    # --- groups ---

    def _ask_groups(
        self, hook: KafkaHook, positions: Mapping[str, ReadPosition], first: set[str], described: Mapping[str, TopicDescription]
    ) -> None:
        wanted = [
            (name not in first, self._group_asked.get(position.group, 0.0), position.group, position)
            for name, position in positions.items()
            if position.group and (position.by_group or name in first)
        ]
        for _, _, group, position in sorted(wanted, key=lambda item: item[:3])[:MAX_GROUPS]:
            assert group is not None
            there = [described[topic] for topic in position.topics if topic in described]
            partitions = [tp for topic in there for tp in topic.topic_partitions] or list(position.offsets)
            self._group_asked[group] = time.monotonic()
            try:
                found = hook.read_committed_offsets(group, partitions, stable=False) if partitions else {}
            except RightMissing as error:
                self._committed.pop(group, None)
                self._refused_groups[group] = str(error)
                continue
            self._refused_groups.pop(group, None)
            self._committed[group] = {tp: offset.offset if offset else None for tp, offset in found.items()}

    # --- data intervals ---

    def _ask_due_ends(
        self, hook: KafkaHook, positions: Iterable[ReadPosition], described: Mapping[str, TopicDescription]
    ) -> dict[tuple[TopicPartition, int], int]:
        """Return the first offset that is not due yet, by partition and ``due_until``. Partitions without one are missing.

        Offsets are cached, because the instant lies in the past, so that they do not change.
        """
        wanted = {
            (described[topic].topic_id, tp, position.due_until)
            for position in positions
            if position.due_until is not None
            for topic in position.all_topics & described.keys()
            for tp in described[topic].topic_partitions
        }
        self._due_ends = {key: end for key, end in self._due_ends.items() if key in wanted}
        asked: dict[int, list[tuple[str, TopicPartition]]] = {}
        for topic_id, tp, until in wanted - self._due_ends.keys():
            asked.setdefault(until, []).append((topic_id, tp))
        for until, partitions in asked.items():
            found = hook.find_offsets_for_times([tp for _, tp in partitions], until)
            for topic_id, tp in partitions:
                if (end := found[tp]) is not None:
                    self._due_ends[topic_id, tp, until] = end
        return {(tp, until): end for (_, tp, until), end in self._due_ends.items()}

    # --- positions ---

    def _measure_partitions(self, position: ReadPosition, answers: _Round) -> dict[TopicPartition, PartitionLag]:
        reads = position.all_topics
        committed = self._committed.get(position.group or "", {}) if position.by_group else position.offsets
        there = {topic: answers.described[topic] for topic in sorted(reads & answers.described.keys())}
        states = compute_lags(committed, position.topic_ids, there, answers.offsets)
        if position.due_until is None:
            return states
        due = answers.due_ends
        ends = {tp: min(state.end, due.get((tp, position.due_until), state.end)) for tp, state in states.items()}
        return {tp: replace(state, end=ends[tp]) for tp, state in states.items()}

    def _make_measurement(
        self,
        name: str,
        position: ReadPosition,
        states: Mapping[TopicPartition, PartitionLag],
        answers: _Round,
        heads: Mapping[tuple[TopicPartition, int], BacklogHead | None],
        now: float,
    ) -> LagMeasurement:
        committed = self._committed.get(position.group or "")
        absent = position.all_topics - answers.described.keys()
        refused = [error for topic, (_, error) in sorted(self._refused_topics.items()) if topic in absent]
        gone = sorted(absent - self._refused_topics.keys())
        bounds = {tp: answers.offsets[tp] for tp in states}
        if position.by_group and committed is None:
            reason = self._refused_groups.get(position.group or "", NOT_FETCHED)
            return LagMeasurement(None, bounds, now, committed, reason)
        if not states:
            problem = f"there is no topic {', '.join(f'`{t}`' for t in gone)}" if gone else "its topics are unknown"
            problem = refused[0] if refused else problem
            return LagMeasurement(None, bounds, now, committed, problem)
        found, estimated = {}, False
        for tp, state in states.items():
            if state.start >= state.end:
                found[tp] = state
                continue
            is_known = (tp, state.start) in heads
            estimated = estimated or not is_known
            # A record that was not read counts, but its age is unknown. One after the end is not due yet.
            head = heads[tp, state.start] if is_known else BacklogHead(state.start, None)
            found[tp] = add_record_age(state, head if head and head.offset < state.end else None, now)
        problem = f"there is no topic {', '.join(f'`{t}`' for t in gone)} any more" if gone else "".join(refused[:1])
        return LagMeasurement(Lag(name, found, now), bounds, now, committed, problem, estimated)
