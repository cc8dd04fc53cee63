"""Writing the rows of a split to a sink.

Runs on executors: imports neither Airflow nor pyspark. If no transform needs Spark's SQL, the same task also reads the split, so
that rows are not sent from Python to the JVM and back.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import KafkaSparkError, RowsCutOff
from airflow_kafka_spark.formats.base import LEFT_OUT, OFFSET, ORIGINAL, TOMBSTONE, NullValues
from airflow_kafka_spark.hooks.spark.tasks.executor_check import CheckedOnExecutors
from airflow_kafka_spark.jobs.tasks.account import SplitAccount, Tolerance
from airflow_kafka_spark.jobs.tasks.read import ReadTask, SplitRows, get_partition_id
from airflow_kafka_spark.jobs.tasks.sort import RecordOrigin, Sorter
from airflow_kafka_spark.sinks.base import Rows, SplitWriter
from airflow_kafka_spark.sinks.kafka.tasks.publish import RecordBatches
from airflow_kafka_spark.windows.codec import encode_error, encode_result
from airflow_kafka_spark.windows.dead_letters import OffsetSet
from airflow_kafka_spark.windows.model import TASK_PUT, PackedSplits, Split, SplitResult
from airflow_kafka_spark.windows.times import Timed, compute_split_seconds

if TYPE_CHECKING:
    from airflow_kafka_spark.jobs.tasks.arrow import Program

OTHERS = "others"
"""Key of a token: the results of the other sinks, in their order."""

TAKEN, REFUSED = "captured", "captured_refused"
"""Keys of a token: the offsets of rows that were written, and of rows that cannot be written."""


@dataclass(frozen=True)
class OtherSink:
    """A sink that takes the rows in one column.

    :param column: the column; null in rows for other sinks.
    :param schema: the sink's columns.
    :param writer: the sink's writer.
    :param null_values: handling of records without a value.
    """

    column: str
    schema: pa.Schema
    writer: SplitWriter
    null_values: NullValues


@dataclass
class CapturingWriter(SplitWriter):
    """Passes rows on to a sink's writer and records their offsets.

    :param writer: the sink's writer; None if the sink has applied the window already, so that only the offsets are recorded.
    """

    writer: SplitWriter | None
    _taken: OffsetSet = field(default_factory=OffsetSet, init=False, repr=False)
    _refused: OffsetSet = field(default_factory=OffsetSet, init=False, repr=False)

    def open(self, split: Split) -> None:
        self._taken, self._refused = OffsetSet(), OffsetSet()
        if self.writer is not None:
            self.writer.open(split)

    def find_unwritable(self, rows: Rows) -> Mapping[int, str]:
        found = self.writer.find_unwritable(rows) if self.writer is not None else {}
        self._refused.add(rows.offsets.take(pa.array(sorted(found), pa.int64())).to_pylist())
        return found

    def write(self, rows: Rows) -> None:
        self._taken.add(rows.offsets.to_pylist())
        if self.writer is not None:
            self.writer.write(rows)

    def close(self) -> Mapping[str, Any]:
        token = self.writer.close() if self.writer is not None else {"rows": len(self._taken)}
        return {**token, TAKEN: self._taken.to_text(), REFUSED: self._refused.to_text()}

    def abort(self) -> None:
        if self.writer is not None:
            self.writer.abort()


@dataclass(frozen=True)
class WriteTask(CheckedOnExecutors):
    """The function that Spark maps over the splits of a window (``mapInArrow``). It passes each split to the sink's writer.

    With ``read`` the task reads the splits: Spark passes their numbers, or the records of its Kafka source. Without ``read``,
    Spark passes the rows of split ``splits[i]`` in partition ``i``.

    :param splits: all splits of the window.
    :param schema: the sink's columns.
    :param writer: the sink's writer. Every call uses its own copy, because this object is unpickled once per task.
    :param null_values: handling of records without a value, if transforms may have changed the value.
    :param tolerance: handling of bad records; None: a window with a bad record cannot be committed.
    :param names: the names of columns that arrive under other names.
    :param read: reads and decodes a split.
    :param program: the transforms, if Arrow computes them; None without transforms.
    :param from_spark: True if Spark's Kafka source reads.
    :param others: other sinks that take some of the rows. Their results are in the token of the split's result
        (:data:`OTHERS`).
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
    others: tuple[OtherSink, ...] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        return ("kafka",) if self.read is not None and not self.from_spark else ()

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for result in self._write_splits(batches):
            yield pa.RecordBatch.from_arrays([pa.array([result], pa.string())], ["result"])

    def _write_splits(self, batches: Iterable[pa.RecordBatch]) -> Iterator[str]:
        if self.read is None:
            yield self._write(self.splits[get_partition_id()], RecordBatches(iter(batches), from_spark=True), RecordOrigin())
        elif self.from_spark:
            # A range without records. This task cannot know its split, so the driver writes it as an empty split.
            if (rows := self.read.read_from_spark(iter(batches))) is not None:
                yield self.write(rows)
        else:
            for split in self.read.iterate_splits(batches):
                yield self.write(self.read.read(split))

    def write(self, rows: SplitRows) -> str:
        """Write a split that this task reads, and return the result as JSON, or the error that ended it."""
        if self.program is not None:
            batches = self.program.run(rows, rows.split.range.topic_partition)
            return self._write(rows.split, RecordBatches(batches), RecordOrigin())
        return self._write(rows.split, RecordBatches(iter(rows)), RecordOrigin(rows.get_originals))

    def _write(self, split: Split, incoming: RecordBatches, origin: RecordOrigin) -> str:
        # Spark would show users the traceback of a worker, so errors of this package are returned as results.
        try:
            return encode_result(self._move(split, incoming, origin))
        except KafkaSparkError as error:
            return encode_error(error)

    def _move(self, split: Split, incoming: RecordBatches, origin: RecordOrigin) -> SplitResult:
        account = SplitAccount(split.index, split.range.topic_partition, self.tolerance)
        sorter = Sorter(account, origin, self.null_values)
        arriving, begun = Timed(incoming), time.monotonic()
        with ExitStack() as opened:
            own = RowWriter(sorter, self.schema, opened.enter_context(SplitOutput(self.writer, split)))
            others = {other.column: self._open_other(other, split, origin, opened) for other in self.others}
            for batch in map(self._name_columns, arriving):
                if others:
                    for column, other in others.items():
                        account.add_routed(_write_captured(batch, column, other))
                    batch = batch.filter(pc.invert(batch.column(LEFT_OUT)))
                good, routed = sorter.sort(batch)
                account.add_routed(routed.num_rows, routed)
                own.write(good)
            if incoming.result is None:
                raise RowsCutOff
            account.add_read(incoming.result)
            written = [encode_result(other.close(account)) for other in others.values()]
            result = own.close(account)
        faults.reached("split.flushed")
        seconds = compute_split_seconds(
            time.monotonic() - begun,
            arriving.seconds,
            own.output.seconds + sum(other.output.seconds for other in others.values()),
            incoming.result.seconds,
            is_one_stage=self.read is not None,
        )
        token = {**result.token, OTHERS: written} if written else result.token
        return replace(result, token=token, seconds=seconds)

    def _open_other(self, other: OtherSink, split: Split, origin: RecordOrigin, opened: ExitStack) -> RowWriter:
        account = SplitAccount(split.index, split.range.topic_partition, self.tolerance)
        output = opened.enter_context(SplitOutput(other.writer, split))
        return RowWriter(Sorter(account, origin, other.null_values), other.schema, output)

    def _name_columns(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if not self.names:
            return batch
        return pa.RecordBatch.from_arrays(batch.columns, [self.names.get(name, name) for name in batch.schema.names])


def _write_captured(batch: pa.RecordBatch, column: str, writer: RowWriter) -> int:
    """Write the rows that a column holds for another sink, and return how many there are."""
    rows = batch.column(column)
    count = len(rows) - rows.null_count
    if count:
        taken = batch.filter(rows.is_valid())
        found = taken.column(column)
        arrays = dict(zip((f.name for f in found.type), found.flatten(), strict=True))
        arrays |= {name: taken.column(name) for name in (OFFSET, *ORIGINAL.values()) if name in taken.schema.names}
        writer.sorter.account.add_rows(count)
        writer.write(pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays)))
    return count


@dataclass
class RowWriter:
    """Writes good rows of one split to one sink, and counts those that the sink cannot write.

    :param sorter: sorts and counts the split's rows for this sink.
    :param schema: the sink's columns.
    :param output: the sink's writer for the split.
    :param written: the number of rows that were written.
    """

    sorter: Sorter
    schema: pa.Schema
    output: SplitOutput
    written: int = 0

    def write(self, good: pa.RecordBatch) -> None:
        """Write the rows, without those that the sink cannot write if bad records are tolerated."""
        account, rows = self.sorter.account, self._select_rows(good)
        if account.is_lost:
            self.output.give_up()
        elif account.tolerance is not None and (refused := self.output.find_unwritable(rows)):
            rows = self._select_rows(self.sorter.refuse(good, {at: (TASK_PUT, refused[at]) for at in sorted(refused)}))
        self.written += rows.batch.num_rows
        self.output.write(rows)

    def close(self, split: SplitAccount) -> SplitResult:
        """Flush, unless the split is lost, and return the account of this sink's rows.

        :param split: the account of the whole split.
        """
        if split.is_lost:
            self.output.give_up()
        elif split.is_undecided:
            self.output.defer()
        return replace(self.sorter.account.make_result(self.written), token=self.output.close())

    def _select_rows(self, batch: pa.RecordBatch) -> Rows:
        """Return the rows for the sink."""
        arrays = [_convert_type(batch.column(batch.schema.get_field_index(f.name)), f.type) for f in self.schema]
        flags = batch.column(TOMBSTONE)
        tombstones = flags if self.sorter.null_values in (None, "delete") and flags.true_count else None
        return Rows(pa.RecordBatch.from_arrays(arrays, schema=self.schema), batch.column(OFFSET), tombstones)


@dataclass
class SplitOutput:
    """The rows of one split on their way to the sink's writer. A context manager: an error in it aborts the split.

    :param writer: the sink's writer.
    :param split: the split.
    :param seconds: the time that the writer has taken.
    """

    writer: SplitWriter
    split: Split
    seconds: float = 0.0
    _writing: bool = False

    def __enter__(self) -> SplitOutput:
        with self._measure_time():
            self.writer.open(self.split)
        self._writing = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.give_up()

    def find_unwritable(self, rows: Rows) -> Mapping[int, str]:
        """Return the rows that the sink cannot write: their positions, and the reasons."""
        return self.writer.find_unwritable(rows) if self._writing and rows.batch.num_rows else {}

    def write(self, rows: Rows) -> None:
        """Pass rows to the sink's writer, unless writing was given up."""
        if self._writing and rows.batch.num_rows:
            with self._measure_time():
                self.writer.write(rows)
            faults.reached("split.mid")

    def defer(self) -> None:
        """Leave the commit of the split to the driver, which first has to decide about some of its records."""
        if self._writing:
            self.writer.defer()

    def give_up(self) -> None:
        """Stop writing, because the window cannot be committed any more. The rest of the split is read only to count bad
        records."""
        if self._writing:
            self._writing = False
            self.writer.abort()

    def close(self) -> Mapping[str, Any]:
        """Flush, and return the sink's token; an empty one for a split that was given up."""
        if not self._writing:
            return {}
        with self._measure_time():
            return self.writer.close()

    @contextmanager
    def _measure_time(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.seconds += time.monotonic() - begun


def _convert_type(column: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Return a column from Spark in the expected type. The names of list items, and large types, may differ."""
    return column if column.type.equals(wanted) else column.cast(wanted)
