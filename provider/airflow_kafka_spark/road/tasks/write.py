"""Writing the rows of a split to a sink.

Runs on executors: imports neither Airflow nor pyspark. Where no transform needs Spark's SQL, the same task reads the split, so
that rows never travel between Python and the JVM only to come back.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.hooks.tasks.executor_check import CheckedOnExecutors
from airflow_kafka_spark.road.columns import OFFSET, TOMBSTONE, NullValues
from airflow_kafka_spark.road.tasks.account import SplitAccount, Timed, Tolerance, split_seconds
from airflow_kafka_spark.road.tasks.read import ReadTask, SplitRows, partition_id
from airflow_kafka_spark.road.tasks.sort import RecordOrigin, Sorter
from airflow_kafka_spark.sinks.base import Rows
from airflow_kafka_spark.sinks.kafka.tasks.publish import Incoming
from airflow_kafka_spark.windows.codec import encode_error, encode_result
from airflow_kafka_spark.windows.model import TASK_PUT, PackedSplits, Split, SplitResult

if TYPE_CHECKING:
    from airflow_kafka_spark.road.arrow.tasks.program import Program
    from airflow_kafka_spark.sinks.base import SplitWriter


@dataclass(frozen=True)
class WriteTask(CheckedOnExecutors):
    """The function that Spark maps over the splits of a window (``mapInArrow``). It hands each to the sink's writer.

    With ``read`` it reads the splits by itself: Spark hands over their numbers, or the records of its Kafka source. Without
    ``read`` Spark hands over the rows of split ``splits[i]`` in partition ``i``.

    :param splits: all splits of the window.
    :param schema: the sink's columns.
    :param writer: the sink's; every call works on a copy of it, since this object is unpickled once per task.
    :param null_values: what a record without a value means, where transforms may have changed the value.
    :param tolerance: what becomes of bad records; None: with one of them the window cannot be committed.
    :param names: the names of columns that arrive under others.
    :param read: reads and decodes a split.
    :param program: the transforms, where Arrow computes them; None without transforms.
    :param from_spark: True if Spark's Kafka source reads.
    """

    splits: PackedSplits
    schema: pa.Schema
    writer: SplitWriter
    null_values: NullValues | None = None
    tolerance: Tolerance | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    read: ReadTask | None = None
    program: Program | None = None
    from_spark: bool = False

    @property
    def needs(self) -> tuple[str, ...]:
        return ("kafka",) if self.read is not None and not self.from_spark else ()

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for result in self._results(batches):
            yield pa.RecordBatch.from_arrays([pa.array([result], pa.string())], ["result"])

    def _results(self, batches: Iterator[pa.RecordBatch]) -> Iterator[str]:
        if self.read is None:
            yield self._write(self.splits[partition_id()], Incoming(batches, from_spark=True), RecordOrigin())
        elif self.from_spark:
            # A range without records: which split it is cannot be known here, so the driver writes it as an empty split.
            if (rows := self.read.read_from_spark(batches)) is not None:
                yield self.write(rows)
        else:
            for split in self.read.splits_of(batches):
                yield self.write(self.read.read(split))

    def write(self, rows: SplitRows) -> str:
        """Write a split that this task reads, and return the result as JSON, or the error that ended it."""
        if self.program is not None:
            return self._write(rows.split, Incoming(map(self.program, rows)), RecordOrigin())
        return self._write(rows.split, Incoming(iter(rows)), RecordOrigin(rows.originals_of))

    def _write(self, split: Split, incoming: Incoming, origin: RecordOrigin) -> str:
        # A traceback from a worker is no message for a user, so errors of this package travel as results.
        try:
            return encode_result(self._move(split, incoming, origin))
        except KafkaSparkError as error:
            return encode_error(error)

    def _move(self, split: Split, incoming: Incoming, origin: RecordOrigin) -> SplitResult:
        account = SplitAccount(split.index, split.range.topic_partition, self.tolerance)
        sorter, written = Sorter(account, origin, self.null_values, self.names), 0
        arriving, begun = Timed(incoming), time.monotonic()
        with Output(self.writer, split) as output:
            for batch in arriving:
                good, routed = sorter.sort(batch)
                account.add_routed(routed.num_rows, routed)
                rows = self._rows(good)
                if account.is_lost:
                    output.give_up()
                elif self.tolerance is not None and (refused := output.unwritable(rows)):
                    rows = self._rows(sorter.refuse(good, {at: (TASK_PUT, refused[at]) for at in sorted(refused)}))
                written += rows.batch.num_rows
                output.write(rows)
            assert incoming.result is not None
            account.add_read(incoming.result)
            if account.is_lost:
                output.give_up()
            elif account.is_undecided:
                output.defer()
            token = output.close()
        faults.reached("split.flushed")
        read = incoming.result.seconds
        seconds = split_seconds(
            time.monotonic() - begun, arriving.seconds, output.seconds, read, is_one_stage=self.read is not None
        )
        return account.result(written, token=token, seconds=seconds)

    def _rows(self, batch: pa.RecordBatch) -> Rows:
        """Return the rows for the sink."""
        arrays = [_as_type(batch.column(batch.schema.get_field_index(f.name)), f.type) for f in self.schema]
        flags = batch.column(TOMBSTONE)
        tombstones = flags if self.null_values in (None, "delete") and flags.true_count else None
        return Rows(pa.RecordBatch.from_arrays(arrays, schema=self.schema), batch.column(OFFSET), tombstones)


@dataclass
class Output:
    """The rows of one split on their way to the sink's writer. A context manager: an error in it aborts the split.

    :param writer: the sink's writer.
    :param split: the split.
    :param seconds: how long the writer has worked.
    """

    writer: SplitWriter
    split: Split
    seconds: float = 0.0
    _writing: bool = False

    def __enter__(self) -> Output:
        with self._timed():
            self.writer.open(self.split)
        self._writing = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.give_up()

    def unwritable(self, rows: Rows) -> Mapping[int, str]:
        """Return the rows that the sink cannot write: their positions, and the reasons."""
        return self.writer.unwritable(rows) if self._writing and rows.batch.num_rows else {}

    def write(self, rows: Rows) -> None:
        """Hand rows over, unless writing was given up."""
        if self._writing and rows.batch.num_rows:
            with self._timed():
                self.writer.write(rows)
            faults.reached("split.mid")

    def defer(self) -> None:
        """Leave the commit of the split to the driver, which still has to decide about some of the records."""
        if self._writing:
            self.writer.defer()

    def give_up(self) -> None:
        """Stop writing: the window cannot be committed any more. The rest of the split is only read to count bad records."""
        if self._writing:
            self._writing = False
            self.writer.abort()

    def close(self) -> Mapping[str, Any]:
        """Flush, and return the sink's token; an empty one for a split that was given up."""
        if not self._writing:
            return {}
        with self._timed():
            return self.writer.close()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.seconds += time.monotonic() - begun


def _as_type(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return a column that came through Spark in the announced type. Names within lists, and large types, may differ."""
    return column if column.type.equals(wanted) else column.cast(wanted)
