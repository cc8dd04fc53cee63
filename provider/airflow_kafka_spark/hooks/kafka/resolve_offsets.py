"""Resolve the start and the stop of a window to offsets, and find the first record of an instant."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import BoundRefused, KafkaUnavailable, PlanError, TimestampsInFuture
from airflow_kafka_spark.hooks.kafka.client_errors import ClientEvents, consume_messages
from airflow_kafka_spark.hooks.kafka.requests import RecordAt
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
from airflow_kafka_spark.windows.plan import Log, PartitionLog
from airflow_kafka_spark.windows.times import format_instant, get_current_milliseconds

if TYPE_CHECKING:
    from confluent_kafka import Message

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

logger = logging.getLogger(__name__)

ResolvedOffsets = dict[TopicPartition, int]

TOLERANCE_SECONDS = 300.0
"""Maximum seconds by which clocks of producers may be ahead of this machine's clock."""
SCAN_SECONDS = 300.0
"""Maximum seconds for reading the records after one with a timestamp in the future."""


def resolve_start(hook: KafkaHook, start: Start, log: Log, group_id: str) -> ResolvedOffsets:
    """Return the start of a new pipeline, for every partition of the log.

    Committed offsets are returned unchecked; the planner compares them with the log.

    :param hook: the cluster.
    :param start: the user's start.
    :param log: the log of the subscribed topics, from which all ends are taken.
    :param group_id: the pipeline's own group.
    :raises BoundRefused: a partition is not named, or an offset is not in the log.
    :raises PlanError: a partition has neither a committed offset nor a fallback.
    """
    if isinstance(start, CommittedOffsets):
        return _resolve_committed(hook, start, log, start.group_id or group_id)
    if isinstance(start, SpecificOffsets):
        _check_all_named(start, log.partitions, "begin")
        return check_in_log(_resolve_specific(start, log), log)
    if isinstance(start, Timestamp):
        return _resolve_timestamp(hook, start, log)
    return {tp: _find_end(start, partition) for tp, partition in log.partitions.items()}


def resolve_stop(hook: KafkaHook, stop: Stop, log: Log, position: Mapping[TopicPartition, int] | None = None) -> ResolvedOffsets:
    """Return the upper bound of a window's end, for every partition of the log that has one. It may lie after the last stable
    offset, or before the start.

    :param hook: the cluster.
    :param stop: the user's stop.
    :param log: the log of the subscribed topics.
    :param position: position of the pipeline, if it has one. A search for a timestamp begins there.
    :raises BoundRefused: a partition is not named.
    :raises TimestampsInFuture: the stop is a time, and the records after one with a timestamp in the future could not be read in
        :data:`SCAN_SECONDS`.
    """
    if isinstance(stop, CommittedOffsets):
        assert stop.group_id is not None, "a window does not stop at its own group's offsets"
        found = hook.committed(stop.group_id, log.partitions)
        return {tp: there.offset if (there := found[tp]) else 0 for tp in log.partitions}
    if isinstance(stop, SpecificOffsets):
        _check_all_named(stop, log.partitions, "stop")
        return _resolve_specific(stop, log)
    if isinstance(stop, Timestamp):
        return _resolve_timestamp(hook, stop, log, position)
    # No bound: the window ends at the last stable offsets anyway, and later records are held back, not left out.
    return {}


def check_in_log(offsets: Mapping[TopicPartition, int], log: Log) -> ResolvedOffsets:
    """Return the offsets after a check that all of them lie in the log or at its end.

    :raises BoundRefused: an offset does not.
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


def _resolve_committed(hook: KafkaHook, start: CommittedOffsets, log: Log, group_id: str) -> ResolvedOffsets:
    committed = hook.committed(group_id, log.partitions)
    missing = sorted(tp for tp, there in committed.items() if there is None)
    if missing and start.fallback == "none":
        raise PlanError(
            f"Group `{group_id}` has no committed offset to begin at for {format_partitions(missing)}",
            expected="committed offsets, since there is no fallback",
            action='Begin "earliest" or "latest", or commit offsets for the group first',
        )
    return {
        tp: there.offset if (there := committed[tp]) else _find_end(_make_fallback(start.fallback), partition)
        for tp, partition in log.partitions.items()
    }


def _make_fallback(name: Fallback) -> Earliest | Latest:
    return Earliest() if name == "earliest" else Latest()


def _find_end(bound: Earliest | Latest, partition: PartitionLog) -> int:
    return partition.low if isinstance(bound, Earliest) else partition.lso


def _resolve_timestamp(
    hook: KafkaHook, bound: Timestamp, log: Log, floors: Mapping[TopicPartition, int] | None = None
) -> ResolvedOffsets:
    found = find_first_offsets(hook, log.partitions, bound.ms, floors=dict(floors or {}))
    # None means the end of the log, and so does an offset after it, so that start and stop use one end.
    return {
        tp: min(max(there, partition.low), partition.lso) if (there := found[tp]) is not None else partition.lso
        for tp, partition in log.partitions.items()
    }


def _resolve_specific(bound: SpecificOffsets, log: Log) -> ResolvedOffsets:
    ends = {tp: {EARLIEST: p.low, LATEST: p.lso} for tp, p in log.partitions.items()}
    return {tp: ends[tp].get(offset, offset) for tp, offset in bound.offsets.items()}


def _check_all_named(bound: SpecificOffsets, partitions: Collection[TopicPartition], verb: str) -> None:
    missing = sorted(set(partitions) - set(bound.offsets))
    unknown = sorted(set(bound.offsets) - set(partitions))
    if missing:
        raise BoundRefused(
            f"No offset is given to {verb} at for {format_partitions(missing)}",
            expected="an offset for every partition of the subscribed topics",
            action="Name them too; -2 stands for the first record, -1 for the last stable offset",
        )
    if unknown:
        raise BoundRefused(
            f"Offsets are given for {format_partitions(unknown)}, which is not read",
            expected="partitions of the subscribed topics",
            action="Leave them out, or correct the names",
        )


def format_partitions(partitions: Collection[TopicPartition], limit: int = 20) -> str:
    """Return the names of partitions as text, for a sentence."""
    names = [str(tp) for tp in sorted(partitions)]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")


# --- the first record of an instant ------------------------------------------------------------------------------------


def find_first_offsets(
    hook: KafkaHook,
    partitions: Iterable[TopicPartition],
    instant: int,
    *,
    floors: MutableMapping[TopicPartition, int] | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> dict[TopicPartition, int | None]:
    """Return the offset of the first committed record at or after an instant, by partition; None if there is no such record.

    Brokers return the first record whose timestamp is large enough. A timestamp more than :data:`TOLERANCE_SECONDS` later than
    now (or than the instant, if that is later) is wrong: a clock was wrong, or its unit. Such a record would be the result for
    every instant before its timestamp. So it is skipped, and the records after it are read until one is found.

    :param partitions: the partitions.
    :param instant: milliseconds since the epoch.
    :param floors: lower bounds of the offsets to read after such a record, by partition. The function raises them to the offsets
        that it has read, so that no record is read twice for one instant.
    :param pause: called with 0 seconds while records are read; an exception that it raises ends the reading.
    :raises TimestampsInFuture: the records after such a record could not be read in :data:`SCAN_SECONDS`.
    """
    latest = max(get_current_milliseconds(), instant) + round(TOLERANCE_SECONDS * 1000)
    answered = hook.find_records_for_times(partitions, instant)
    found = {tp: there.offset if there else None for tp, there in answered.items()}
    future = {tp: there for tp, there in answered.items() if there and there.timestamp > latest}
    if future:
        for tp, there in sorted(future.items()):
            logger.warning(
                "%s has a timestamp in the future, %s, at offset %d: reading the records after it",
                tp,
                format_instant(there.timestamp),
                there.offset,
            )
        reached = {tp: max(there.offset + 1, (floors or {}).get(tp, 0)) for tp, there in future.items()}
        found.update(_scan(hook, future, reached, range(instant, latest + 1), pause))
        if floors is not None:
            floors.update(reached)
    return found


def _scan(
    hook: KafkaHook,
    future: Mapping[TopicPartition, RecordAt],
    reached: dict[TopicPartition, int],
    wanted: range,
    pause: Callable[[float], object],
) -> dict[TopicPartition, int | None]:
    """Return the offset of the first record with one of the wanted timestamps, by partition; None if the log has none.

    :param future: the records that are skipped.
    :param reached: the offsets at which reading begins; on return, those at which it has ended.
    :param wanted: timestamps in milliseconds since the epoch.
    """
    import confluent_kafka

    found: dict[TopicPartition, int | None] = {}
    deadline = time.monotonic() + SCAN_SECONDS
    consumer = confluent_kafka.Consumer(hook.consumer_config(), logger=ClientEvents())
    try:
        consumer.assign([confluent_kafka.TopicPartition(*tp, offset) for tp, offset in reached.items()])
        while left := future.keys() - found.keys():
            if time.monotonic() > deadline:
                tp = min(left)
                raise TimestampsInFuture(*tp, future[tp].offset, future[tp].timestamp, reached[tp], SCAN_SECONDS)
            pause(0)
            for message in consume_messages(consumer, 10_000, 0.1, hook.config, "looking for timestamps", conn_id=hook.conn_id):
                tp = TopicPartition(message.topic() or "", message.partition() or 0)
                if tp in found:
                    continue
                at_end = _is_end(hook, tp, message)
                reached[tp] = message.offset() or 0
                if at_end or message.timestamp()[1] in wanted:
                    found[tp] = None if at_end else reached[tp]
                    consumer.incremental_unassign([confluent_kafka.TopicPartition(*tp)])
    finally:
        consumer.close()
    return found


def _is_end(hook: KafkaHook, tp: TopicPartition, message: Message) -> bool:
    """Return True if a message marks the end of the partition for a reader of committed records."""
    from confluent_kafka import KafkaError

    error: Any = message.error()
    if error is not None and error.code() != KafkaError._PARTITION_EOF:
        raise KafkaUnavailable(hook.conn_id, f"reading {tp}", error.str())
    return error is not None
