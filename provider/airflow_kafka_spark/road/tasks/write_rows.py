"""What one Spark task does: read its split, decode it, hand it to the sink's writer, and tell the driver how it went.

Runs on executors: imports neither Airflow nor pyspark. The whole of it is one step for Spark, so that rows never travel between
Python and the JVM only to come back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.road.tasks.out_of_interval import count_out_of_interval
from airflow_kafka_spark.sinks.tasks.dead_letters import DeadLetterBuffer
from airflow_kafka_spark.windows.codec import encode_error, encode_result
from airflow_kafka_spark.windows.latency import Times, fitting_width
from airflow_kafka_spark.windows.model import SAMPLES, BadRecord, Gap, PackedSplits, Split, SplitResult

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_kafka_spark.road.columns import Layout
    from airflow_kafka_spark.road.tasks.tolerance import Tolerance
    from airflow_kafka_spark.sinks.base import Rows, SplitWriter
    from airflow_kafka_spark.sources.kafka.tasks.read import Records


@dataclass(frozen=True)
class SplitTask:
    """The function that Spark maps over a window's splits (``mapInArrow``).

    :param splits: all splits of the window.
    :param layout: how records become rows.
    :param writer: the sink's; every call works on a copy of it, since this object is unpickled once per task.
    :param config: the consumer's configuration. Travels to the executors inside the pickled task only.
    :param skip_lost: pass over records that were deleted meanwhile.
    :param patience: seconds without progress after which the broker is given up.
    :param from_spark: whether the batches are rows of Spark's Kafka source, else they name splits to read here.
    :param tolerance: what becomes of bad records; None: with one of them the window cannot be committed.
    """

    splits: PackedSplits
    layout: Layout
    writer: SplitWriter
    config: Mapping[str, Any] = field(repr=False)
    skip_lost: bool = False
    patience: float = 300.0
    from_spark: bool = False
    tolerance: Tolerance | None = None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        for result in self._read_by_spark(batches) if self.from_spark else self._read_here(batches):
            yield pa.RecordBatch.from_arrays([pa.array([result], pa.string())], ["result"])

    def _read_here(self, batches: Iterator[pa.RecordBatch]) -> Iterator[str]:
        from airflow_kafka_spark.sources.kafka.tasks.read import Reader

        for batch in batches:
            for index in batch.column(0).to_pylist():
                split = self.splits[index]
                reader = Reader(
                    self.config,
                    split.range,
                    self.skip_lost,
                    self.layout.wants_headers,
                    self.patience,
                    self.layout.wants_keys,
                    with_messages=self.tolerance is not None and self.tolerance.keep,
                    epoch=split.epoch,
                )
                yield self.run(split, reader, reader.gaps)

    def _read_by_spark(self, batches: Iterator[pa.RecordBatch]) -> Iterator[str]:
        from airflow_kafka_spark.sources.kafka.tasks.read import from_spark

        records = from_spark(batches)
        first = next(records, None)
        if first is None:
            return  # A range without records: the driver writes the split, empty, since nobody knows here which one it is.
        split = next(s for s in self.splits if (s.range.topic, s.range.partition) == (first.topic, first.partition))
        yield self.run(split, _chain(first, records), [])

    def run(self, split: Split, source: Iterable[Records], gaps: list[Gap]) -> str:
        """Move one split; the result as JSON, errors of ours included: a traceback from a worker is no message for a user."""
        try:
            return encode_result(self._move(split, source, gaps))
        except KafkaSparkError as error:
            return encode_error(error)

    def _move(self, split: Split, source: Iterable[Records], gaps: list[Gap]) -> SplitResult:
        result, letters = SplitResult(split.index, interval=split.interval), DeadLetterBuffer()
        with Output(self.writer, split) as output:
            for records in source:
                lines = self.layout.rows(records)
                if self.tolerance is not None:
                    lines = self.tolerance.take(records, lines, letters)
                    lines = self.tolerance.refuse(records, lines, output.unwritable(lines.rows), letters)
                    if lines.bad:
                        output.defer()
                elif lines.bad:
                    output.give_up()
                result = add(result, records, lines.ignored, lines.bad)
                output.write(lines.rows)
            token = output.close()
        faults.reached("split.flushed")
        return replace(result, gaps=tuple(gaps), token=token, letters=letters.to_bytes())


@dataclass
class Output:
    """What one split hands to the sink's writer: a context manager, left with an error it leaves nothing behind."""

    writer: SplitWriter
    split: Split
    _writing: bool = False

    def __enter__(self) -> Output:
        self.writer.open(self.split)
        self._writing = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.give_up()

    def unwritable(self, rows: Rows) -> Mapping[int, str]:
        """Return the rows that the sink cannot write: their places, and the reasons."""
        return self.writer.unwritable(rows) if self._writing and rows.batch.num_rows else {}

    def write(self, rows: Rows) -> None:
        """Hand rows over, unless it was given up."""
        if self._writing and rows.batch.num_rows:
            self.writer.write(rows)
            faults.reached("split.mid")

    def defer(self) -> None:
        """Leave the commit of the split to the driver: it has yet to decide about some of the records."""
        if self._writing:
            self.writer.defer()

    def give_up(self) -> None:
        """Stop writing: the window cannot be committed any more. The rest of the split is only read to count bad records."""
        if self._writing:
            self._writing = False
            self.writer.abort()

    def close(self) -> Mapping[str, Any]:
        """Flush; what the sink wants to be told, nothing of a split that was given up."""
        return self.writer.close() if self._writing else {}


def _chain(first: Records, rest: Iterator[Records]) -> Iterator[Records]:
    yield first
    yield from rest


def add(result: SplitResult, records: Records, ignored: int, bad: Iterable[BadRecord]) -> SplitResult:
    """Return the result of a split with one more batch."""
    import pyarrow.compute as pc

    stamps = pc.min_max(records.timestamps).as_py()
    times = result.times.plus(count_times(records.timestamps, stamps["min"], stamps["max"], result.times.width))
    bad = tuple(bad)
    outside, farthest = count_out_of_interval(records.timestamps, stamps["min"], stamps["max"], result.interval)
    return replace(
        result,
        out_of_interval=result.out_of_interval + outside,
        farthest=max(result.farthest, farthest),
        records=result.records + len(records),
        bytes=result.bytes + records.bytes,
        ignored=result.ignored + ignored,
        rejected=result.rejected + len(bad),
        samples=(result.samples + bad)[:SAMPLES],
        min_timestamp=stamps["min"] if result.min_timestamp is None else min(result.min_timestamp, stamps["min"]),
        max_timestamp=stamps["max"] if result.max_timestamp is None else max(result.max_timestamp, stamps["max"]),
        times=times,
    )


def count_times(timestamps: pa.Int64Array, oldest: int, newest: int, width: int) -> Times:
    """Return the number of records for each span of time.

    :param width: of a span, in milliseconds, at least: wider ones are counted where there would be too many.
    """
    import pyarrow.compute as pc

    width = fitting_width(oldest, newest, width)
    if oldest // width == newest // width:
        return Times(width, {oldest // width: len(timestamps)})
    buckets = pc.value_counts(pc.divide(timestamps, width))
    return Times(width, dict(zip(buckets.field(0).to_pylist(), buckets.field(1).to_pylist(), strict=True)))
