"""The account of one split: counts of the records that were read, by their outcome.

The task that reads a split begins its account and passes it on in the split's last row. The task that writes or publishes the
rows completes it. Every record is counted once: as written, ignored, filtered, routed elsewhere, or rejected.

Runs in Spark's tasks. Imports neither Airflow nor pyspark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import ROUTED, DeadLetterBuffer, join_streams
from airflow_kafka_spark.windows.model import SAMPLES, BadRecord, SplitResult, TopicPartition
from airflow_kafka_spark.windows.times import TimestampHistogram, choose_bucket_width


@dataclass(frozen=True)
class Tolerance:
    """The tolerance of a window for bad records. Without a Tolerance, a bad record ends the window.

    Operators make it from their ``ErrorOptions`` if ``errors_tolerance`` is ``all``.

    :param keep: True if bad records are sent as dead letters; False if they are only counted.
    :param sent: the records that earlier attempts at the window have sent as dead letters. They stay dead letters, even if they
        could be decoded now.
    """

    keep: bool = True
    sent: Mapping[TopicPartition, frozenset[int]] = field(default_factory=dict)


class SplitAccount:
    """Counts the records of one split, and keeps its dead letters and routed records.

    :param index: the split's index.
    :param topic_partition: the partition of its records. For rows of a source: an empty topic, and the split's index.
    :param tolerance: handling of bad records; None: with one of them nothing of the split is written.
    :param interval: the data interval in which its records are expected, in milliseconds since the epoch; None without one.
    """

    def __init__(
        self, index: int, topic_partition: TopicPartition, tolerance: Tolerance | None, interval: tuple[int, int] | None = None
    ) -> None:
        self.topic_partition = topic_partition
        self.tolerance = tolerance
        self._known = SplitResult(index, interval=interval)
        self._letters = DeadLetterBuffer()
        self._routes = DeadLetterBuffer(schema=ROUTED)

    @property
    def is_lost(self) -> bool:
        """True if the split has a bad record that is not tolerated, so that the rest of the split is only counted."""
        return self._known.rejected > 0 and self.tolerance is None

    @property
    def is_undecided(self) -> bool:
        """True if the split holds records that the driver still has to send elsewhere."""
        return self._known.rejected > 0 or self._known.routed > 0

    @property
    def records(self) -> int:
        """The number of records that were read until now."""
        return self._known.records

    def add_records(self, timestamps: pa.Int64Array, size: int) -> None:
        """Count records that were read.

        :param timestamps: milliseconds since the epoch.
        :param size: the bytes of their values, and of their keys where those are read.
        """
        known, stamps = self._known, pc.min_max(timestamps).as_py()
        oldest, newest = stamps["min"], stamps["max"]
        outside, farthest = count_out_of_interval(timestamps, oldest, newest, known.interval)
        self._known = replace(
            known,
            records=known.records + len(timestamps),
            bytes=known.bytes + size,
            min_timestamp=oldest if known.min_timestamp is None else min(known.min_timestamp, oldest),
            max_timestamp=newest if known.max_timestamp is None else max(known.max_timestamp, newest),
            out_of_interval=known.out_of_interval + outside,
            farthest=max(known.farthest, farthest),
            times=known.times.add(count_times(timestamps, oldest, newest, known.times.width)),
        )

    def add_rows(self, count: int) -> None:
        """Count rows of a source that were read."""
        self._known = replace(self._known, records=self._known.records + count)

    def add_ignored(self, count: int) -> None:
        """Count records that are ignored because of the user's options."""
        self._known = replace(self._known, ignored=self._known.ignored + count)

    def add_bad(self, bad: Sequence[BadRecord], letters: Callable[[], pa.RecordBatch] | None = None) -> None:
        """Count bad records, and keep them if they become dead letters.

        :param letters: returns their dead letters; None if these were sent already.
        :raises TooManyDeadLetters: the letters of the split exceed the limit.
        """
        known = self._known
        samples = (*known.samples, *bad[: SAMPLES - len(known.samples)])
        self._known = replace(known, rejected=known.rejected + len(bad), samples=samples)
        if bad and letters is not None and self.tolerance is not None and self.tolerance.keep:
            self._letters.add(letters())

    def add_routed(self, count: int, records: pa.RecordBatch | None = None) -> None:
        """Count records that go to another topic.

        :param records: the records, in the schema :data:`ROUTED`, if the driver has to send them.
        :raises TooManyRouted: the routed records of the split exceed the limit.
        """
        self._known = replace(self._known, routed=self._known.routed + count)
        if records is not None:
            self._routes.add(records)

    def add_read(self, read: SplitResult) -> None:
        """Add the account of the task that has read the split."""
        own = self._known
        self._known = replace(
            read,
            ignored=read.ignored + own.ignored,
            rejected=read.rejected + own.rejected,
            routed=read.routed + own.routed,
            samples=(*read.samples, *own.samples)[:SAMPLES],
        )

    def make_result(self, written: int | None = None) -> SplitResult:
        """Return the account.

        :param written: the number of records that were written or published; records without any other outcome count as filtered.
            None: the number is not known yet.
        """
        known = self._known
        return replace(
            known,
            filtered=known.handed_over - written if written is not None else 0,
            letters=join_streams(known.letters, self._letters.to_bytes()),
            routes=self._routes.to_bytes(),
        )


def count_times(timestamps: pa.Int64Array, oldest: int, newest: int, width: int) -> TimestampHistogram:
    """Return the number of records for each span of time.

    :param timestamps: milliseconds since the epoch.
    :param oldest: the smallest of them.
    :param newest: the largest of them.
    :param width: the smallest width of a span, in milliseconds. Spans are wider if there would be too many of them.
    """
    width = choose_bucket_width(oldest, newest, width)
    if oldest // width == newest // width:
        return TimestampHistogram(width, {oldest // width: len(timestamps)})
    buckets = pc.value_counts(pc.divide(timestamps, width))
    return TimestampHistogram(width, dict(zip(buckets.field(0).to_pylist(), buckets.field(1).to_pylist(), strict=True)))


def count_out_of_interval(
    timestamps: pa.Int64Array, oldest: int, newest: int, interval: tuple[int, int] | None
) -> tuple[int, int]:
    """Return the number of records outside of an interval, and the largest distance from it in milliseconds.

    :param timestamps: of the records, in milliseconds since the epoch; negative for a record without a timestamp.
    :param oldest: the smallest of them.
    :param newest: the largest of them.
    :param interval: start and end, half-open; None for a window without an interval, for which the result is 0.
    """
    if interval is None:
        return 0, 0
    start, end = interval
    if start <= oldest and newest < end:
        return 0, 0
    outside = timestamps.filter(pc.or_(pc.less(timestamps, start), pc.greater_equal(timestamps, end)))
    outside = outside.filter(pc.greater_equal(outside, 0))
    if not len(outside):
        return 0, 0
    bounds = pc.min_max(outside).as_py()
    return len(outside), max(start - bounds["min"], bounds["max"] - end)
