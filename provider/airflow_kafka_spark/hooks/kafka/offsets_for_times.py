"""Find the first record of an instant in each partition, also behind records whose timestamps lie in the future."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import KafkaUnavailable, TimestampsInFuture
from airflow_kafka_spark.hooks.kafka.client import ClientEvents
from airflow_kafka_spark.hooks.kafka.values import RecordAt
from airflow_kafka_spark.windows.instants import iso, now_ms
from airflow_kafka_spark.windows.model import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterable

    from confluent_kafka import Message

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

log = logging.getLogger(__name__)

TOLERANCE_SECONDS = 300.0
"""How far the clocks of producers may be ahead of the clock of this machine."""
SCAN_SECONDS = 300.0
"""How long the records behind a record from the future are read before the search is given up."""


def first_offsets(
    hook: KafkaHook,
    partitions: Iterable[TopicPartition],
    instant: int,
    *,
    floors: MutableMapping[TopicPartition, int] | None = None,
    pause: Callable[[float], object] = time.sleep,
) -> dict[TopicPartition, int | None]:
    """Return the offset of the first committed record at or after an instant, by partition; None where there is no such record.

    Brokers answer with the first record whose timestamp is large enough. A timestamp that is more than :data:`TOLERANCE_SECONDS`
    later than now (or than the instant, if that is later) is wrong: a clock was wrong, or its unit. Such a record would be the
    answer for every instant before its timestamp. So it is passed over, and the records behind it are read until one is found.

    :param partitions: the partitions.
    :param instant: milliseconds since the epoch.
    :param floors: per partition, the offset at which reading behind a record from the future begins at the earliest. The
        function raises it to the offset that it has read to, so that no record is read twice for the same instant.
    :param pause: called with 0 seconds while records are read; an exception that it raises ends the reading.
    :raises TimestampsInFuture: the records behind such a record could not be read in :data:`SCAN_SECONDS`.
    """
    latest = max(now_ms(), instant) + round(TOLERANCE_SECONDS * 1000)
    answered = hook.records_for_times(partitions, instant)
    found = {tp: there.offset if there else None for tp, there in answered.items()}
    future = {tp: there for tp, there in answered.items() if there and there.timestamp > latest}
    if future:
        for tp, there in sorted(future.items()):
            log.warning(
                "%s has a timestamp in the future, %s, at offset %d: looking behind it", tp, iso(there.timestamp), there.offset
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
    """Return the offset of the first record with one of the wanted timestamps, by partition; None if the log ends before.

    :param future: the records that are passed over.
    :param reached: the offsets at which reading begins; on return, those at which it ended.
    :param wanted: timestamps, milliseconds since the epoch.
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
            for message in consumer.consume(10_000, timeout=0.1):
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
    """Return True if a message says that the partition ends here for a reader of committed records."""
    from confluent_kafka import KafkaError

    error: Any = message.error()
    if error is not None and error.code() != KafkaError._PARTITION_EOF:
        raise KafkaUnavailable(hook.conn_id, f"reading {tp}", error.str())
    return error is not None
