"""Which offsets a start, or a stop, means: asked of the cluster once, and never again for the same window."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import BoundRefused, PlanError
from airflow_kafka_spark.hooks.kafka.offsets_for_times import first_offsets
from airflow_kafka_spark.windows.model import TopicPartition
from airflow_kafka_spark.windows.offset_specs import (
    EARLIEST,
    LATEST,
    CommittedOffsets,
    Earliest,
    Fallback,
    Latest,
    SpecificOffsets,
    Start,
    Stop,
    Timestamp,
)
from airflow_kafka_spark.windows.plan import Log, PartitionLog, Position

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.hooks.kafka.values import CommittedOffset

Offsets = dict[TopicPartition, int]


def resolve_start(hook: KafkaHook, start: Start, log: Log, group_id: str) -> Offsets:
    """Where a pipeline without a past begins, for every partition of the log.

    Committed offsets come as they are: that their records are still there is for the planner to judge.

    :param hook: the cluster.
    :param start: what the user said.
    :param log: what Kafka holds of the subscribed topics; every end in the answer is of this reading.
    :param group_id: the pipeline's own group.
    :raises BoundRefused: a partition that is not named, or an offset that is not in the log.
    :raises PlanError: no committed offset, and no fallback.
    """
    if isinstance(start, CommittedOffsets):
        return _committed(hook, start, log, start.group_id or group_id)
    if isinstance(start, SpecificOffsets):
        _check_all_named(start, log.partitions, "begin")
        return within(_specific(start, log), log)
    if isinstance(start, Timestamp):
        return _at(hook, start, log)
    return {tp: _end(start, partition) for tp, partition in log.partitions.items()}


def resolve_stop(hook: KafkaHook, stop: Stop, log: Log, position: Mapping[TopicPartition, int] | None = None) -> Offsets:
    """Where a window ends at the latest, for every partition of the log that has a bound; may lie beyond what can be read, or
    below the start.

    :param hook: the cluster.
    :param stop: what the user said.
    :param log: what Kafka holds of the subscribed topics.
    :param position: where the pipeline stands, as far as it has a position: what lies before does not matter.
    :raises BoundRefused: a partition that is not named.
    :raises TimestampsInFuture: a time, and too much lies behind a record from the future.
    """
    if isinstance(stop, CommittedOffsets):
        assert stop.group_id is not None, "a window does not stop at its own group's offsets"
        found = hook.committed(stop.group_id, log.partitions)
        return {tp: there.offset if (there := found[tp]) else 0 for tp in log.partitions}
    if isinstance(stop, SpecificOffsets):
        _check_all_named(stop, log.partitions, "stop")
        return _specific(stop, log)
    if isinstance(stop, Timestamp):
        return _at(hook, stop, log, position)
    # At the last stable offsets, wherever those are: what lies behind them is held back, not left out.
    return {}


def position_of_group(pipeline: str, committed: Mapping[TopicPartition, CommittedOffset | None]) -> tuple[Position, int]:
    """Where a pipeline stands by its group's offsets alone, if it has committed any of them itself: then it is not new, its
    ledger was lost.

    :param pipeline: its name.
    :param committed: what the group has committed.
    :return: the position, and the number of the last window that says so; empty, and 0, when it committed none of them.
    """
    own = {
        tp: facts for tp, there in committed.items() if there and (facts := _facts(there.metadata)).get("pipeline") == pipeline
    }
    if not own:
        return Position(), 0
    offsets = {tp: there.offset for tp, there in committed.items() if there}
    topic_ids = {tp.topic: str(facts["topic_id"]) for tp, facts in own.items() if facts.get("topic_id")}
    numbers = [int(window) for facts in own.values() if (window := str(facts.get("window", ""))).isdecimal()]
    return Position(offsets, topic_ids), max(numbers, default=0)


def windows_of(pipeline: str, committed: Mapping[TopicPartition, CommittedOffset | None]) -> dict[TopicPartition, int]:
    """The numbers of this pipeline's windows that a group's offsets were committed with, by partition; data intervals, and what
    others have committed, are left out.

    :param pipeline: its name.
    :param committed: what the group has committed.
    """
    found = {}
    for tp, there in committed.items():
        facts = _facts(there.metadata) if there else {}
        number = str(facts.get("window", ""))
        if facts.get("pipeline") == pipeline and number.isdecimal():
            found[tp] = int(number)
    return found


def owner_of(pipeline: str, committed: Mapping[TopicPartition, CommittedOffset | None]) -> str | None:
    """The other pipeline that a group mirrors; None where it mirrors none, or this one.

    :param committed: what the group has committed; the metadata says for whom.
    """
    names = (_facts(there.metadata).get("pipeline") for there in committed.values() if there)
    return min((str(name) for name in names if name and name != pipeline), default=None)


def within(offsets: Mapping[TopicPartition, int], log: Log) -> Offsets:
    """The same offsets, all of them in the log or at its end.

    :raises BoundRefused: some are not.
    """
    outside = [
        f"{tp} at {offset}, not in [{log.partitions[tp].low}, {log.partitions[tp].lso}]"
        for tp, offset in sorted(offsets.items())
        if not log.partitions[tp].low <= offset <= log.partitions[tp].lso
    ]
    if outside:
        raise BoundRefused(
            f"Offsets that the log does not hold: {', '.join(outside)}",
            expected="offsets from the first record that is still there up to the last stable offset",
            action="Correct them; -2 stands for the first, -1 for the last",
        )
    return dict(offsets)


def _facts(metadata: str) -> dict[str, object]:
    try:
        found = json.loads(metadata)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _committed(hook: KafkaHook, start: CommittedOffsets, log: Log, group_id: str) -> Offsets:
    committed = hook.committed(group_id, log.partitions)
    missing = sorted(tp for tp, there in committed.items() if there is None)
    if missing and start.fallback == "none":
        raise PlanError(
            f"Group `{group_id}` has no committed offset to begin at for {listed(missing)}",
            expected="committed offsets, since there is no fallback",
            action='Begin "earliest" or "latest", or commit offsets for the group first',
        )
    return {
        tp: there.offset if (there := committed[tp]) else _end(_fallback(start.fallback), partition)
        for tp, partition in log.partitions.items()
    }


def _fallback(name: Fallback) -> Earliest | Latest:
    return Earliest() if name == "earliest" else Latest()


def _end(bound: Earliest | Latest, partition: PartitionLog) -> int:
    return partition.low if isinstance(bound, Earliest) else partition.lso


def _at(hook: KafkaHook, bound: Timestamp, log: Log, floors: Mapping[TopicPartition, int] | None = None) -> Offsets:
    found = first_offsets(hook, log.partitions, bound.ms, floors=dict(floors or {}))
    # None is the end, and so is what came after the log was read: the end of that reading is the same for start and stop.
    return {
        tp: min(max(there, partition.low), partition.lso) if (there := found[tp]) is not None else partition.lso
        for tp, partition in log.partitions.items()
    }


def _specific(bound: SpecificOffsets, log: Log) -> Offsets:
    ends = {tp: {EARLIEST: p.low, LATEST: p.lso} for tp, p in log.partitions.items()}
    return {tp: ends[tp].get(offset, offset) for tp, offset in bound.offsets.items()}


def _check_all_named(bound: SpecificOffsets, partitions: Collection[TopicPartition], verb: str) -> None:
    missing = sorted(set(partitions) - set(bound.offsets))
    unknown = sorted(set(bound.offsets) - set(partitions))
    if missing:
        raise BoundRefused(
            f"No offset is given to {verb} at for {listed(missing)}",
            expected="an offset for every partition of the subscribed topics",
            action="Name them too; -2 stands for the first record, -1 for the last stable offset",
        )
    if unknown:
        raise BoundRefused(
            f"Offsets are given for {listed(unknown)}, which is not read",
            expected="partitions of the subscribed topics",
            action="Leave them out, or correct the names",
        )


def listed(partitions: Collection[TopicPartition], limit: int = 20) -> str:
    """Partitions in a sentence."""
    names = [str(tp) for tp in sorted(partitions)]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
