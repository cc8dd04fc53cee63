"""Read the logs of topics: their offsets, ranges of their records, and leader epochs; and resolve the start and the stop of a
window to offsets.

Leader epochs are compared to detect logs that were truncated since they were read (KIP-320).
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import BoundRefused, KafkaUnavailable, PlanError, RightMissing, TimestampsInFuture
from airflow_kafka_spark.hooks.kafka.client import ClientEvents, ConsumedMessage, consume_messages
from airflow_kafka_spark.hooks.kafka.requests import RecordAt
from airflow_kafka_spark.hooks.kafka.transactions import make_abort_command
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
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


logger = logging.getLogger(__name__)

LOST_AFTER_SECONDS = 900.0
"""Seconds after which an open transaction is reported as perhaps lost: the brokers' default of ``transaction.max.timeout.ms``."""
FIRST_RECORD_SECONDS = 10.0
"""Maximum seconds for reading the first records of open transactions."""
PARTITIONS_PER_CONSUMER = 200
"""Maximum number of partitions per consumer. Brokers may send a batch of records for each of them, which is not needed."""
PROMPT: Mapping[str, Any] = {"fetch.wait.max.ms": 20, "fetch.error.backoff.ms": 50}
"""Settings of consumers that read a few records and wait for each."""
_EPOCH_SETTINGS: Mapping[str, Any] = {
    **PROMPT,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
    "fetch.message.max.bytes": 16_384,
    "queued.max.messages.kbytes": 4096,
}
"""Settings of consumers that read one record of each partition, or ask for the end of an epoch's log."""
_FETCH_BYTES = 4 << 20
"""Maximum size in bytes of the answer to one fetch of a range of records."""
RECORDS_PER_CALL = 200
"""Maximum number of records that one call takes from the client."""

_END = re.compile(r"broker end offset is (\d+)")


def read_log(hook: KafkaHook, topics: Iterable[str]) -> Log:
    """Return the present log of topics: their ids, and low watermark, last stable offset and high watermark of every partition.

    :param topics: names of topics; those that do not exist are left out of the answer.
    """
    described = hook.describe_topics(sorted(topics), missing="omit")
    offsets = hook.read_offsets_of_existing([tp for topic in described.values() for tp in topic.topic_partitions])
    return Log(
        cluster_id=hook.read_cluster_id(),
        topic_ids={name: topic.topic_id for name, topic in described.items()},
        partitions={tp: PartitionLog(o.low, o.lso, o.high, o.epoch) for tp, o in offsets.items()},
    )


def warn_of_lost_transactions(hook: KafkaHook, log: Log, offsets: Mapping[TopicPartition, int] | None = None) -> None:
    """Log a warning for each partition whose first open transaction is older than the brokers let a transaction be by default.

    The brokers may have lost it (a hanging transaction, KIP-664). Then no window ever gets past it, and no window fails.

    :param log: the present log of the topics that are read.
    :param offsets: where the next window begins. Partitions with committed records after that offset are left out. Default: none.
    """
    import confluent_kafka

    held = ((tp, there.lso) for tp, there in log.partitions.items() if there.lso < there.high)
    stuck = ((tp, lso) for tp, lso in held if offsets is None or offsets.get(tp) == lso)
    left = dict(islice(stuck, PARTITIONS_PER_CONSUMER))
    if not left:
        return
    config = {**hook.make_consumer_config(**_EPOCH_SETTINGS), "isolation.level": "read_uncommitted"}
    consumer = confluent_kafka.Consumer(config, logger=ClientEvents())
    deadline, now = time.monotonic() + FIRST_RECORD_SECONDS, time.time()
    try:
        consumer.assign([confluent_kafka.TopicPartition(*tp, offset) for tp, offset in left.items()])
        while left and time.monotonic() < deadline:
            for message in consume_messages(
                consumer, RECORDS_PER_CALL, 0.1, hook.config, "reading open transactions", conn_id=hook.conn_id
            ):
                tp = TopicPartition(message.topic() or "", message.partition() or 0)
                offset, (_, timestamp) = left.pop(tp, None), message.timestamp()
                if offset is None or message.error() is not None or now - timestamp / 1000 < LOST_AFTER_SECONDS:
                    continue
                logger.warning(
                    "A transaction in %s is open since offset %d, which was written %.0f minutes ago: no window gets past it. If "
                    "`kafka-transactions.sh find-hanging` lists it, the brokers have lost it: %s ends it",
                    tp, offset, (now - timestamp / 1000) / 60, make_abort_command(tp, offset),
                )  # fmt: skip
    except (KafkaUnavailable, RightMissing) as error:
        logger.info("The age of open transactions is not known: %s", error)
    finally:
        consumer.close()


def compare_epochs(
    hook: KafkaHook,
    log: Log,
    offsets: Mapping[TopicPartition, int],
    epochs: Mapping[TopicPartition, int],
    topic_ids: Mapping[str, str],
) -> Log:
    """Return the log with ``Log.diverged`` set for partitions that were truncated below an offset and have grown again.

    Only partitions whose leader epoch has changed are requested, because a log is truncated only by an election.

    :param log: the present log.
    :param offsets: the offsets up to which the log was read, or planned.
    :param epochs: the leader epochs at that time; a missing partition is not compared.
    :param topic_ids: the ids of the topics at that time; a recreated topic is not compared.
    :raises KafkaUnavailable: the brokers do not answer in time.
    """
    wanted = [
        (tp, offset, epochs[tp])
        for tp, offset in sorted(offsets.items())
        if tp in epochs
        and (there := log.partitions.get(tp)) is not None
        and there.epoch not in (-1, epochs[tp])
        and there.low < offset <= there.high
        and topic_ids.get(tp.topic, log.topic_ids.get(tp.topic)) == log.topic_ids.get(tp.topic)
    ]
    found: dict[TopicPartition, int] = {}
    for first in range(0, len(wanted), PARTITIONS_PER_CONSUMER):
        found |= find_truncations(
            hook.make_consumer_config(), wanted[first : first + PARTITIONS_PER_CONSUMER], hook.timeout, hook.conn_id
        )
    return replace(log, diverged={**log.diverged, **found})


def find_truncations(
    config: Mapping[str, Any], wanted: Sequence[tuple[TopicPartition, int, int]], seconds: float, where: str
) -> dict[TopicPartition, int]:
    """Return the offsets at which logs were truncated, for partitions in which that is before the wanted offset.

    confluent-kafka has no call for this request. But a consumer that is assigned an offset with its leader epoch sends it before
    it reads, and returns an error about the truncation instead of a record.

    :param config: a consumer's configuration.
    :param wanted: offsets, each with the leader epoch under which the log reached it.
    :param seconds: timeout.
    :param where: name of the cluster, for an error.
    :raises KafkaUnavailable: the brokers do not answer in time.
    """
    import confluent_kafka

    answers = (
        confluent_kafka.KafkaError._PARTITION_EOF,
        confluent_kafka.KafkaError._AUTO_OFFSET_RESET,
        confluent_kafka.KafkaError.OFFSET_OUT_OF_RANGE,
    )
    left = {tp for tp, _, _ in wanted}
    found: dict[TopicPartition, int] = {}
    consumer = confluent_kafka.Consumer({**config, **_EPOCH_SETTINGS}, logger=ClientEvents())
    deadline, last = time.monotonic() + seconds, "nothing was answered"
    try:
        consumer.assign([confluent_kafka.TopicPartition(*tp, offset, leader_epoch=epoch) for tp, offset, epoch in wanted])
        while left:
            for message in consume_messages(consumer, 1000, 0.05, config, "comparing leader epochs", conn_id=where):
                tp, error = TopicPartition(message.topic() or "", message.partition() or 0), message.error()
                if error is not None and error.code() not in answers:
                    last = error.str()
                    continue
                if tp in left and error is not None and "truncation" in error.str():
                    end = _END.search(error.str())
                    found[tp] = int(end[1]) if end else 0
                left.discard(tp)
            if left and time.monotonic() > deadline:
                doing = f"comparing the leader epochs of {len(left)} partitions, {min(left)} among them"
                raise KafkaUnavailable(where, doing, last)
        return found
    finally:
        consumer.close()


def read_records(
    hook: KafkaHook, ranges: Mapping[TopicPartition, tuple[int, int]], doing: str, *, seconds: float, whole: bool = False
) -> Generator[ConsumedMessage, None, None]:
    """Yield the committed records of ranges of offsets, in the order of each partition.

    A range of a topic that does not exist, and offsets that are not there (any more, or yet), are left out.

    :param hook: the cluster.
    :param ranges: the first offset and the end of each partition.
    :param doing: the action, for errors.
    :param seconds: how long reading may take.
    :param whole: True to raise an error after ``seconds``; False to end.
    :raises KafkaUnavailable: Kafka does not answer.
    :raises RightMissing: the user may not read a topic.
    """
    import confluent_kafka

    described = hook.describe_topics({tp.topic for tp in ranges}, missing="omit")
    existing = [tp for tp in ranges if tp.topic in described and tp.partition in described[tp.topic].partitions]
    bounds = hook.read_offsets_of_existing(existing) if existing else {}
    starts = {tp: max(ranges[tp][0], bounds[tp].low) for tp in existing}
    left = {tp: end for tp in existing if starts[tp] < (end := min(ranges[tp][1], bounds[tp].lso))}
    if not left:
        return
    events = ClientEvents(hook.config.get("error_cb"))
    settings: dict[str, Any] = {
        "queued.max.messages.kbytes": 8192, "fetch.max.bytes": _FETCH_BYTES, "error_cb": events.on_error
    }  # fmt: skip
    consumer = confluent_kafka.Consumer(hook.make_consumer_config(**PROMPT, **settings), logger=events)
    deadline = time.monotonic() + seconds
    try:
        consumer.assign([confluent_kafka.TopicPartition(*tp, starts[tp]) for tp in left])
        while left:
            if time.monotonic() > deadline:
                if whole:
                    raise KafkaUnavailable(hook.conn_id, doing, f"it takes longer than {seconds:.0f} s")
                return
            for message in consume_messages(consumer, RECORDS_PER_CALL, 0.1, hook.config, doing, conn_id=hook.conn_id):
                error = message.error()
                topic, partition, offset = message.topic(), message.partition(), message.offset()
                if error is not None and error.code() != confluent_kafka.KafkaError._PARTITION_EOF:
                    raise KafkaUnavailable(hook.conn_id, doing, error.str())
                tp = TopicPartition(topic, partition)
                if error is None and offset < left.get(tp, 0):
                    yield message
                if offset + (error is None) >= left.get(tp, 0):
                    left.pop(tp, None)
    finally:
        consumer.close()


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
        found = hook.read_committed_offsets(stop.group_id, log.partitions)
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
    committed = hook.read_committed_offsets(group_id, log.partitions)
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
    consumer = confluent_kafka.Consumer(hook.make_consumer_config(), logger=ClientEvents())
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


def _is_end(hook: KafkaHook, tp: TopicPartition, message: ConsumedMessage) -> bool:
    """Return True if a message marks the end of the partition for a reader of committed records."""
    from confluent_kafka import KafkaError

    error: Any = message.error()
    if error is not None and error.code() != KafkaError._PARTITION_EOF:
        raise KafkaUnavailable(hook.conn_id, f"reading {tp}", error.str())
    return error is not None
