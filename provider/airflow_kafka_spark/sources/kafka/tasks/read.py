"""Reading one split of a Kafka window inside a Spark task. Runs on executors: imports neither Airflow nor pyspark."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, cast

import numpy as np
import pyarrow as pa
from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME, Consumer, KafkaError, KafkaException, Message
from confluent_kafka import TopicPartition as KafkaTopicPartition

from airflow_kafka_spark.errors import DataLoss, HeaderNameInvalid, KafkaUnavailable, LogCorrupt, LogTruncated, OffsetsWentBack
from airflow_kafka_spark.formats.base import get_metadata_type
from airflow_kafka_spark.hooks.kafka.client import (
    ClientEvents,
    ConsumedMessage,
    KafkaUser,
    Right,
    drop_group_refusals,
    find_missing_right,
)
from airflow_kafka_spark.hooks.kafka.log import find_truncations
from airflow_kafka_spark.hooks.spark.tasks.worker import require_end_of_stream
from airflow_kafka_spark.windows.model import Gap, OffsetRange

BATCH_RECORDS = 20_000
BATCH_BYTES = 32 << 20
"""Maximum number of records that are decoded together, and approximate size in bytes of their values and keys."""
CONSUMED_RECORDS = 2_000
"""Number of records that are taken from the client at once. Their parts are read while they are in the processor's cache. With
20,000 at once, the reader took a tenth more time."""
POLL_SECONDS = 0.05
"""Seconds to wait for records at a time."""
SILENT_SECONDS = 3.0
"""Seconds without a record or an event after which a reader asks whether the user may still see the topic, and those to the next
such request."""

_SMALL_QUOTA = (
    "Raise `consumer_byte_rate` or `request_percentage` (`kafka-configs.sh --describe --entity-type users`, and `clients`), or "
    "let fewer readers share it, and then run the task again. A broker never sends a batch of records that is larger than the "
    "quota of ten seconds"
)
"""The action if a quota is too small for a batch. Ten seconds are the brokers' default: `quota.window.num` - 1 windows."""

TUNING: Mapping[str, Any] = {
    "fetch.message.max.bytes": 8 << 20,
    "fetch.wait.max.ms": 50,
    "fetch.queue.backoff.ms": 5,
    "queued.min.messages": 100_000,
    "queued.max.messages.kbytes": 65_536,
}
"""Consumer settings under the connection's own: measured in benchmarks/."""


@dataclass(frozen=True)
class KafkaRecords:
    """Consecutive records of one partition, column by column.

    :param offsets: int64, ascending, with gaps where control records, aborted or compacted records lie.
    :param timestamps: int64, milliseconds since the epoch; -1 where the record has none.
    :param timestamp_types: int32, 0 = the producer's time, 1 = the broker's. They differ where the topic's setting was changed.
    :param keys: the keys; None if they were not requested.
    :param value_bytes: of all values, where that is known.
    :param headers: per record a list of (name, value), or None; None as a whole if they were not requested.
    :param messages: the records themselves, where they are kept.
    """

    topic: str
    partition: int
    offsets: pa.Int64Array
    timestamps: pa.Int64Array
    timestamp_types: pa.Int32Array
    keys: Sequence[bytes | None] | None
    values: Sequence[bytes | None]
    headers: Sequence[list[tuple[str, bytes | None]] | None] | None = None
    value_bytes: int | None = None
    messages: Sequence[ConsumedMessage] | None = field(default=None, repr=False)

    def get_originals(self, at: Sequence[int]) -> dict[str, pa.Array]:
        """Return ``key``, ``value``, ``headers`` and ``timestamp`` of some records, even those parts that were not asked for.

        :param at: the positions of the records, at least one.
        """
        keys, values, headers = zip(*map(self._get_original, at), strict=True)
        return {
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "headers": make_header_column([one or None for one in headers]),
            "timestamp": self.timestamps.take(pa.array(at, pa.int64())),
        }

    def _get_original(self, index: int) -> tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]] | None]:
        if self.messages is not None:
            message = self.messages[index]
            return message.key(), message.value(), _read_headers([message])[0]
        key = self.keys[index] if self.keys is not None else None
        return key, self.values[index], self.headers[index] if self.headers is not None else None

    @property
    def bytes(self) -> int:
        """Size of the values, and of the keys that were requested."""
        of_values = _compute_size(self.values) if self.value_bytes is None else self.value_bytes
        return of_values + (_compute_size(self.keys) if self.keys is not None else 0)

    def __len__(self) -> int:
        return len(self.values)


@dataclass
class KafkaSplitReader:
    """Reads exactly the committed records of ``[start, end)``, in offset order.

    Reading is done when a record or the end of the partition is seen at or past ``end``, because the last offsets of a range may
    be control records, which consumers do not get.

    Guarantee: no record is returned that was written in place of a planned one. All records below a frozen end have the leader
    epoch of the plan or an earlier one. Records that are written after an unclean election, in place of records that it has cut
    off, have a later epoch. A record's own epoch therefore shows that it was planned, independent of the time at which the log
    was cut. librdkafka compares only the epoch of its position, when the partition is assigned and after an election. With an
    epoch for the start it would not detect a cut after the start, and would ask the broker once per split. Missing records
    without others in their place are found by the driver, which compares the end of the range before the window is committed.

    :param config: a consumer configuration (:func:`airflow_kafka_spark.hooks.kafka.config.make_consumer_config`).
    :param range: the offsets to read.
    :param skip_lost: True to skip records that were deleted or cut off meanwhile, and to record them in ``gaps``; False to raise
        an error.
    :param with_headers: True if headers are wanted.
    :param patience: seconds without any progress after which reading fails.
    :param with_keys: True if keys are wanted.
    :param with_messages: True if the records themselves are kept, for :meth:`KafkaRecords.get_originals`.
    :param epoch: the leader epoch of the partition when the range was planned; -1 (not known) compares nothing.
    :param remedy: the action of the error if records are lost, for a window that is replayed; "" for other windows.
    :param gaps: the offsets that were skipped so far.
    """

    config: Mapping[str, Any] = field(repr=False)
    range: OffsetRange
    skip_lost: bool = False
    with_headers: bool = False
    patience: float = 300.0
    with_keys: bool = True
    with_messages: bool = False
    epoch: int = -1
    remedy: str = ""
    gaps: list[Gap] = field(default_factory=list)

    def __iter__(self) -> Iterator[KafkaRecords]:
        if self.range.span == 0:
            return
        events = ClientEvents()
        own = {"error_cb": events.on_error, "throttle_cb": events.on_throttle}
        consumer = Consumer({**TUNING, **self.config, **own}, logger=events)
        try:
            with _collect_garbage_seldom():
                yield from self._read(consumer, events)
        finally:
            consumer.close()

    def _read(self, consumer: Consumer, events: ClientEvents) -> Iterator[KafkaRecords]:
        topic, partition, end = self.range.topic, self.range.partition, self.range.end
        position = self.range.start
        consumer.assign([KafkaTopicPartition(topic, partition, position)])
        pending, average = self._make_parts(), 1
        heard_at = asked_at = time.monotonic()
        done = False
        while not done:
            # No more than there can be: `consume` waits until it has as many, or for the whole of its time.
            room = min(BATCH_RECORDS - len(pending), (BATCH_BYTES - pending.size) // average)
            wanted = max(1, min(room, CONSUMED_RECORDS, end - position))
            messages = cast("list[ConsumedMessage]", consumer.consume(wanted, POLL_SECONDS))
            if not messages:
                if time.monotonic() - max(heard_at, asked_at) > min(SILENT_SECONDS, self.patience):
                    self._refuse_silence(consumer, heard_at, position, events)
                    asked_at = time.monotonic()
                continue
            heard_at = time.monotonic()
            # As few calls per record as possible: at a million records per second each of them counts.
            if any(map(_ERROR, messages)):
                messages = drop_group_refusals(messages, self.config, f"reading {self.range}")
                position, done = self._handle_events(consumer, messages, position)
                messages = [m for m in messages if m.error() is None]
            if messages:
                last = messages[-1].offset()
                position = max(before := position, last + 1)
                if last >= end - 1:
                    done = True
                    messages = [m for m in messages if m.offset() < end] if last >= end else messages
                # In one leader's log epochs ascend: that of the last record is the highest.
                if self.epoch >= 0 and messages and self._is_later(messages[-1]):
                    messages, done = self._keep_before_cut(messages, before), True
            pending.add(messages)
            if not len(pending):
                continue
            average = max(1, pending.size // len(pending))
            if done or len(pending) >= BATCH_RECORDS or pending.size >= BATCH_BYTES:
                records = pending.make_records(self.range)
                pending, messages = self._make_parts(), []
                yield records

    def _handle_events(self, consumer: Consumer, messages: Sequence[ConsumedMessage], position: int) -> tuple[int, bool]:
        """Handle the events between records: the end of the partition, deleted offsets, errors. Return the position, and True
        if the range has been read.
        """
        for message in messages:
            error = message.error()
            if error is None:
                position = max(position, message.offset() + 1)
                continue
            if error.code() == KafkaError._PARTITION_EOF:
                if message.offset() >= self.range.end:
                    return position, True
            elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                position = self._pass_lost(consumer, position)
                return position, position >= self.range.end
            elif error.code() in _CORRUPT:
                raise LogCorrupt(self.range.topic, self.range.partition, max(position, message.offset() or 0), error.str())
            elif error.fatal() or not error.retriable() and error.code() in _FATAL:
                raise KafkaException(error)
        return position, False

    def _refuse_silence(self, consumer: Consumer, since: float, position: int, events: ClientEvents) -> None:
        """Make sure that records may still come. A consumer whose metadata leave a topic out for want of a right returns neither
        records nor an error. One whose login is refused, as after a change of the password, tries again and again.

        :param since: when the last record or event has come, in seconds of the monotonic clock.
        :raises RightMissing: the user may not see the topic any more.
        :raises KafkaUnavailable: the brokers refuse the login, or nothing has come for too long.
        """
        topic, doing = self.range.topic, f"reading {self.range}"
        with suppress(KafkaException):
            error = consumer.list_topics(topic, timeout=1).topics[topic].error
            if missing := find_missing_right(error, KafkaUser.of(self.config), doing, [Right("topic", "Read", topic)]):
                raise missing
        servers = str(self.config.get("bootstrap.servers"))
        if refused := events.find_refused_login(since):
            raise KafkaUnavailable(servers, doing, refused)
        if time.monotonic() - since > self.patience:
            throttling = events.describe_throttling(since)
            reason = throttling or f"; {events.find_reason(since)[1] or 'librdkafka reports nothing'}"
            failure = KafkaUnavailable(servers, doing, f"nothing came for {self.patience:.0f} s at offset {position}{reason}")
            if throttling:
                failure.expected, failure.action = "records within the quota", _SMALL_QUOTA
            raise failure

    def _is_later(self, message: ConsumedMessage) -> bool:
        """Return True if a record was written after the log that was planned had been cut off."""
        return (message.leader_epoch() or 0) > self.epoch

    def _keep_before_cut(self, messages: Sequence[ConsumedMessage], position: int) -> list[ConsumedMessage]:
        """Return the records before the first one that was written after the log had been cut off. The rest of the range is a
        gap.

        :param position: where the first of these was expected.
        :raises LogTruncated: lost records are not to be skipped.
        :raises KafkaUnavailable: the log that was planned is back: two unclean elections, one after the other.
        """
        tp, end = self.range.topic_partition, self.range.end
        count = next(index for index, message in enumerate(messages) if self._is_later(message))
        if not self.skip_lost:
            servers = str(self.config.get("bootstrap.servers"))
            cut = find_truncations(self.config, [(tp, end, self.epoch)], self.patience, servers).get(tp)
            found = messages[count].leader_epoch() or 0
            if cut is None:
                said = f"offset {messages[count].offset()} held a record of leader epoch {found}, which the log has lost again"
                raise KafkaUnavailable(servers, f"reading {self.range}", said)
            raise LogTruncated(*tp, end, self.epoch, cut, found, is_open=True, action=self.remedy)
        kept = list(messages[:count])
        self.gaps.append(Gap(*tp, kept[-1].offset() + 1 if kept else position, end))
        return kept

    def _pass_lost(self, consumer: Consumer, position: int) -> int:
        topic, partition, end = self.range.topic, self.range.partition, self.range.end
        low, high = consumer.get_watermark_offsets(KafkaTopicPartition(topic, partition), timeout=30)
        if high < end:
            raise OffsetsWentBack(topic, partition, end, high)
        if low <= position:
            # The broker has the record (a stale leader had answered), or one of a later epoch in its place: ask again.
            consumer.assign([KafkaTopicPartition(topic, partition, position)])
            return position
        if not self.skip_lost:
            raise DataLoss(topic, partition, position, low, self.remedy)
        self.gaps.append(Gap(topic, partition, position, min(low, end)))
        if low < end:
            consumer.assign([KafkaTopicPartition(topic, partition, low)])
        return low

    def _make_parts(self) -> _Parts:
        return _Parts(self.with_keys, self.with_headers, self.with_messages)


class _Parts:
    """The parts of consecutive records, collected as the client hands them over.

    :param with_keys: True if keys are wanted.
    :param with_headers: True if headers are wanted.
    :param with_messages: True if the records themselves are kept.
    """

    def __init__(self, with_keys: bool, with_headers: bool, with_messages: bool) -> None:
        self.size = 0
        self._offsets: list[np.ndarray] = []
        self._timestamps: list[np.ndarray] = []  # the type and the time of each record, in turn
        self._values: list[bytes | None] = []
        self._keys: list[bytes | None] | None = [] if with_keys else None
        self._headers: list[list[tuple[str, bytes | None]] | None] | None = [] if with_headers else None
        self._messages: list[ConsumedMessage] | None = [] if with_messages else None

    def __len__(self) -> int:
        return len(self._values)

    def add(self, messages: Sequence[ConsumedMessage]) -> None:
        """Add records, none of which is an event."""
        if not messages:
            return
        first, last = messages[0].offset(), messages[-1].offset()
        contiguous = last - first == len(messages) - 1
        self._offsets.append(np.arange(first, last + 1) if contiguous else np.fromiter(map(_OFFSET, messages), np.int64))
        self._timestamps.append(np.fromiter(chain.from_iterable(map(_TIMESTAMP, messages)), np.int64, 2 * len(messages)))
        self._values += map(_VALUE, messages)
        self.size += sum(map(len, messages))
        if self._keys is not None:
            self._keys += map(_KEY, messages)
        if self._headers is not None:
            self._headers += _read_headers(messages)
        if self._messages is not None:
            self._messages += messages

    def make_records(self, range: OffsetRange) -> KafkaRecords:
        """Return the records, at least one.

        :param range: the range that they belong to.
        """
        types, timestamps = np.concatenate(self._timestamps).reshape(-1, 2).T
        return KafkaRecords(
            topic=range.topic,
            partition=range.partition,
            offsets=pa.array(np.concatenate(self._offsets), pa.int64()),
            timestamps=pa.array(np.ascontiguousarray(timestamps)),
            timestamp_types=pa.array((types == TIMESTAMP_LOG_APPEND_TIME).astype(np.int32)),
            keys=self._keys,
            values=self._values,
            headers=self._headers,
            value_bytes=self.size,
            messages=self._messages,
        )


# Methods of the class, which map() calls without looking them up for each record: that takes a third of the time.
_MESSAGE = cast("type[ConsumedMessage]", Message)
_ERROR, _OFFSET, _TIMESTAMP = _MESSAGE.error, _MESSAGE.offset, _MESSAGE.timestamp
_KEY, _VALUE, _HEADERS = _MESSAGE.key, _MESSAGE.value, _MESSAGE.headers


def _read_headers(messages: Sequence[ConsumedMessage]) -> list[list[tuple[str, bytes | None]] | None]:
    """Return the headers of records.

    :raises HeaderNameInvalid: a name is not UTF-8.
    """
    found: list[list[tuple[str, bytes | None]] | None] = []
    try:
        found += map(_HEADERS, messages)
    except (SystemError, UnicodeDecodeError):
        # The first one whose headers are missing. A second call for them would not fail.
        message = messages[len(found)]
        raise HeaderNameInvalid(message.topic() or "", message.partition() or 0, message.offset() or 0) from None
    return found


_HEADERS_TYPE = get_metadata_type("headers")


def make_header_column(headers: Sequence[list[tuple[str, bytes | None]] | None]) -> pa.ListArray:
    """Return headers as lists of structs; null for a record without headers. Arrow takes twice as long with a dictionary for each
    header.
    """
    missing = headers.count(None)
    if missing == len(headers):
        return pa.nulls(missing, _HEADERS_TYPE)
    pairs = list(chain.from_iterable(filter(None, headers)))
    names, values = zip(*pairs, strict=True) if pairs else ((), ())
    columns = [pa.array(names, pa.string()), pa.array(values, pa.binary())]
    each = pa.StructArray.from_arrays(columns, fields=list(_HEADERS_TYPE.value_type))
    ends = np.cumsum([0, *(len(one) if one else 0 for one in headers)], dtype=np.int32)
    mask = pa.array([one is None for one in headers]) if missing else None
    return pa.ListArray.from_arrays(pa.array(ends), each, type=_HEADERS_TYPE, mask=mask)


def _compute_size(values: Iterable[bytes | None]) -> int:
    return sum(map(len, filter(None, values)))


@contextmanager
def _collect_garbage_seldom() -> Iterator[None]:
    """Let the garbage collector run rarely. Messages come by the thousand and are freed without it; its runs took an eighth of
    the time.
    """
    threshold = gc.get_threshold()
    gc.set_threshold(1_000_000, *threshold[1:])
    try:
        yield
    finally:
        gc.set_threshold(*threshold)


_CORRUPT = frozenset({KafkaError._BAD_MSG, KafkaError._BAD_COMPRESSION})
_FATAL = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._AUTHENTICATION,
        KafkaError.UNSUPPORTED_VERSION,
    }
)


def read_spark_records(batches: Iterator[pa.RecordBatch]) -> Iterator[KafkaRecords]:
    """Yield the rows of Spark's own Kafka source, one task's partition, as :class:`KafkaRecords`.

    :raises RowsCutOff: the source has failed before its last row.
    """
    for batch in chain.from_iterable(_slice_batch(b) for b in require_end_of_stream(batches)):
        column = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
        headers = column.get("headers")
        yield KafkaRecords(
            topic=column["topic"][0].as_py(),
            partition=column["partition"][0].as_py(),
            offsets=column["offset"].cast(pa.int64()),
            timestamps=column["timestamp"].cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64()),
            timestamp_types=column["timestampType"],
            keys=column["key"].to_pylist(),
            values=column["value"].to_pylist(),
            headers=_list_pairs(headers) if headers is not None else None,
        )


def _list_pairs(headers: pa.ListArray) -> list[list[tuple[str, bytes | None]] | None]:
    return [None if one is None else [(h["key"], h["value"]) for h in one] for one in headers.to_pylist()]


def _slice_batch(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    for start in range(0, batch.num_rows, BATCH_RECORDS):
        yield batch.slice(start, BATCH_RECORDS)
