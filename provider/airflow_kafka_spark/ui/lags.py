"""The lag of all pipelines of a cluster in rounds: a few requests for all of them together, never one for each."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_kafka_spark.ledger.lag import NextRecords, aged, lags_of
from airflow_kafka_spark.windows.lag import Head, Lag, PartitionLag
from airflow_kafka_spark.windows.model import TopicPartition

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.hooks.kafka.requests import PartitionOffsets, TopicDescription

PEEKS = 200
"""Partitions whose next record is read in one round, to know how old it is."""
GROUPS = 50
"""Groups whose committed offsets are asked for in one round: that takes one request each."""


@dataclass(frozen=True)
class Stand:
    """Where a pipeline stands.

    :param offsets: the next offset to read, by partition.
    :param topic_ids: the ids of the topics when it read them.
    :param topics: all that it reads, also those that it has not read yet.
    :param group: its group; None when that is not known.
    :param by_group: whether its group alone says where it stands, as for one that moves data intervals.
    """

    offsets: Mapping[TopicPartition, int]
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    topics: tuple[str, ...] = ()
    group: str | None = None
    by_group: bool = False


@dataclass(frozen=True)
class Measured:
    """What a round has found of one pipeline.

    :param lag: how far it is behind; None where that cannot be told, and ``problem`` says why.
    :param offsets: the bounds of the log.
    :param committed: of its group, where that was asked for.
    :param at: when, seconds since the epoch.
    :param estimated: whether some of the records were not looked at: then seconds are those of the others.
    """

    lag: Lag | None
    offsets: Mapping[TopicPartition, PartitionOffsets]
    at: float
    committed: Mapping[TopicPartition, int | None] | None = None
    problem: str = ""
    estimated: bool = False

    @property
    def seconds(self) -> float | None:
        """Age of the oldest unread record that was looked at; None when none of those that wait was."""
        if self.lag is None:
            return None
        ages = [s.seconds for s in self.lag.partitions.values() if s.seconds is not None and (s.behind or not self.estimated)]
        return max(ages, default=None if self.lag.records() else 0.0)


@dataclass
class LagRounds:
    """Measures all pipelines of one cluster together, again and again.

    Asked per round, for all pipelines at once: the topics, and the bounds of their partitions. Bounded per round: the next
    records that are looked at, and the groups. Whoever was left out comes first in the next round.
    """

    _next: NextRecords = field(default_factory=NextRecords)
    _group_asked: dict[str, float] = field(default_factory=dict)
    _committed: dict[str, dict[TopicPartition, int | None]] = field(default_factory=dict)

    def measure(self, hook: KafkaHook, stands: Mapping[str, Stand], interest: Iterable[str] = ()) -> dict[str, Measured]:
        """The lag of each pipeline.

        :param stands: by pipeline.
        :param interest: pipelines that somebody looks at closely: they come first, and their groups are asked for.
        :raises KafkaSparkError: the cluster does not answer.
        """
        first = [name for name in dict.fromkeys(interest) if name in stands]
        names = [*first, *(name for name in stands if name not in set(first))]
        topics = {topic for stand in stands.values() for topic in (*stand.topics, *(tp.topic for tp in stand.offsets))}
        described = hook.describe_topics(sorted(topics), missing="omit") if topics else {}
        self._ask_groups(hook, {name: stands[name] for name in names}, set(first), described)
        partitions = [tp for topic in described.values() for tp in topic.topic_partitions]
        offsets = hook.offsets(partitions) if partitions else {}
        states = {name: self._states(stands[name], described, offsets) for name in names}
        ids = {name: topic.topic_id for name, topic in described.items()}
        # Records that cannot be read, or were deleted meanwhile, have no age; their number is known all the same.
        every = (item for each in states.values() for item in each.items())
        heads, now = self._next.find(hook, every, ids, most=PEEKS, tolerate=True), time.time()
        return {name: self._measured(name, stands[name], states[name], heads, offsets, now, described) for name in names}

    # --- groups ---

    def _ask_groups(
        self, hook: KafkaHook, stands: Mapping[str, Stand], first: set[str], described: Mapping[str, TopicDescription]
    ) -> None:
        wanted = [
            (name not in first, self._group_asked.get(stand.group, 0.0), stand.group, stand)
            for name, stand in stands.items()
            if stand.group and (stand.by_group or name in first)
        ]
        for _, _, group, stand in sorted(wanted, key=lambda item: item[:3])[:GROUPS]:
            assert group is not None
            there = [described[topic] for topic in stand.topics if topic in described]
            partitions = [tp for topic in there for tp in topic.topic_partitions] or list(stand.offsets)
            found = hook.committed(group, partitions, stable=False) if partitions else {}
            self._committed[group] = {tp: offset.offset if offset else None for tp, offset in found.items()}
            self._group_asked[group] = time.monotonic()

    # --- where everybody stands ---

    def _states(
        self, stand: Stand, described: Mapping[str, TopicDescription], offsets: Mapping[TopicPartition, PartitionOffsets]
    ) -> dict[TopicPartition, PartitionLag]:
        reads = {*stand.topics, *(tp.topic for tp in stand.offsets)}
        committed = self._committed.get(stand.group or "", {}) if stand.by_group else stand.offsets
        there = {topic: described[topic] for topic in sorted(reads & described.keys())}
        return lags_of(committed, stand.topic_ids, there, offsets)

    def _measured(
        self,
        name: str,
        stand: Stand,
        states: Mapping[TopicPartition, PartitionLag],
        heads: Mapping[tuple[TopicPartition, int], Head | None],
        offsets: Mapping[TopicPartition, PartitionOffsets],
        now: float,
        described: Mapping[str, TopicDescription],
    ) -> Measured:
        committed = self._committed.get(stand.group or "")
        reads = {*stand.topics, *(tp.topic for tp in stand.offsets)}
        gone = sorted(reads - described.keys())
        bounds = {tp: offsets[tp] for tp in states}
        if stand.by_group and committed is None:
            return Measured(None, bounds, now, committed, "its group has not been asked yet")
        if not states:
            problem = f"there is no topic {', '.join(f'`{t}`' for t in gone)}" if gone else "it is not known what it reads"
            return Measured(None, bounds, now, committed, problem)
        found, estimated = {}, False
        for tp, state in states.items():
            if state.start >= state.end:
                found[tp] = state
                continue
            is_known = (tp, state.start) in heads
            estimated = estimated or not is_known
            # A record that was not looked at counts, but its age is not known.
            found[tp] = aged(state, heads[tp, state.start] if is_known else Head(state.start, None), now)
        problem = f"there is no topic {', '.join(f'`{t}`' for t in gone)} any more" if gone else ""
        return Measured(Lag(name, found, now), bounds, now, committed, problem, estimated)
