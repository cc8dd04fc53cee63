"""Reading the splits of a window from Kafka, as rows for the next step of the pipeline.

Runs on executors: imports neither Airflow nor pyspark. The rows of a split are followed by one more row, which every filter and
transform lets pass. It carries the account of the records that were read, or the error that ended the reading, to the task that
writes the rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.formats.base import END, OFFSET
from airflow_kafka_spark.hooks.spark.tasks.executor_check import CheckedOnExecutors
from airflow_kafka_spark.hooks.spark.tasks.worker import keep_freed_memory
from airflow_kafka_spark.jobs.tasks.account import SplitAccount, Tolerance
from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import make_dead_letters
from airflow_kafka_spark.windows.codec import encode_error, encode_result
from airflow_kafka_spark.windows.model import BadRecord, Gap, PackedSplits, Split, TopicPartition
from airflow_kafka_spark.windows.times import Timed

if TYPE_CHECKING:
    from airflow_kafka_spark.jobs.tasks.layout import Layout
    from airflow_kafka_spark.sources.kafka.tasks.read import KafkaRecords

SENT = "it was sent to the dead letter topic by an earlier attempt at this window"


@dataclass(frozen=True)
class Reading:
    """The options of reading the splits of a window from Kafka. They are independent of the layout of the rows.

    :param config: the consumer's configuration. Travels to the executors inside the pickled task only.
    :param skip_lost: pass over records that were deleted meanwhile.
    :param patience: seconds without progress after which reading fails.
    :param tolerance: handling of bad records; None: with one of them nothing of the split is written.
    :param routed: the records that earlier attempts at the window have sent to other topics. They stay routed, even if a filter
        would let them pass now.
    :param remedy: the action of the error if records are lost, for a window that is replayed; "" for other windows.
    """

    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    skip_lost: bool = False
    patience: float = 300.0
    tolerance: Tolerance | None = None
    routed: Mapping[TopicPartition, Set[int]] = field(default_factory=dict)
    remedy: str = ""

    @property
    def keeps(self) -> bool:
        """True if the bytes of bad records are kept as they were read."""
        return self.tolerance is not None and self.tolerance.keep


@dataclass(frozen=True)
class ReadTask(CheckedOnExecutors):
    """The function that Spark maps over the numbers of splits (``mapInArrow``). It reads and decodes them.

    :param splits: the splits of the window that are left.
    :param layout: how records become rows.
    :param reading: the options of reading.
    """

    splits: PackedSplits
    layout: Layout
    reading: Reading

    @property
    def needs(self) -> tuple[str, ...]:
        return ("kafka",)

    @property
    def schema(self) -> pa.Schema:
        """The schema of the batches: the layout's columns and :data:`END`."""
        return self.layout.row_schema.append(pa.field(END, pa.string()))

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for split in self.iterate_splits(batches):
            yield from self.read(split)

    def iterate_splits(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Split]:
        """Yield the splits of the numbers that Spark passes to this task."""
        for batch in batches:
            for at in batch.column(0).to_pylist():
                yield self.splits[at]

    def read(self, split: Split) -> SplitRows:
        """Return the rows of a split. They are read during the iteration."""
        from airflow_kafka_spark.sources.kafka.tasks.read import KafkaSplitReader

        keep_freed_memory()
        reader = KafkaSplitReader(
            self.reading.config,
            split.range,
            self.reading.skip_lost,
            self.layout.wants_headers,
            self.reading.patience,
            self.layout.wants_keys,
            with_messages=self.reading.keeps,
            epoch=split.epoch,
            remedy=self.reading.remedy,
        )
        return SplitRows(self, split, reader, reader.gaps)

    def read_from_spark(self, batches: Iterator[pa.RecordBatch]) -> SplitRows | None:
        """Return the rows of the split that Spark's Kafka source has read; None if it has no records."""
        from airflow_kafka_spark.sources.kafka.tasks.read import read_spark_records

        records = read_spark_records(batches)
        first = next(records, None)
        if first is None:
            return None
        split = next(s for s in self.splits if (s.range.topic, s.range.partition) == (first.topic, first.partition))
        return SplitRows(self, split, chain((first,), records))


class Task(Protocol):
    """A task of ``jobs/tasks``."""

    @property
    def needs(self) -> tuple[str, ...]:
        """See :class:`~airflow_kafka_spark.hooks.spark.tasks.executor_check.CheckedOnExecutors`."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read the splits with the numbers in the first column of the batches, and return a batch of results for each."""


@dataclass(frozen=True)
class EachSplit(CheckedOnExecutors):
    """The function that Spark maps over the partitions of an RDD: it runs a task on the split with the partition's number.

    :param task: a task that reads splits by itself.
    """

    task: Task

    @property
    def needs(self) -> tuple[str, ...]:
        return self.task.needs

    def __call__(self, number: int, rows: Iterable[object]) -> Iterator[str]:
        # There are none, but Spark takes a worker for the next split only if its task has read its input to the end.
        deque(rows, maxlen=0)
        for batch in self.task(iter([pa.RecordBatch.from_arrays([pa.array([number], pa.int64())], ["id"])])):
            yield from batch.column("result").to_pylist()


@dataclass
class SplitRows:
    """The rows of one split, and the row that ends them.

    The last row also carries an error of this package, because Spark would show users the traceback of a worker instead.

    :param task: reads and decodes the split.
    :param split: the split.
    :param records: its records.
    :param gaps: offsets found deleted while reading.
    """

    task: ReadTask
    split: Split
    records: Iterable[KafkaRecords]
    gaps: list[Gap] = field(default_factory=list)
    _batch: KafkaRecords | None = field(default=None, init=False, repr=False)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        schema, split = self.task.schema, self.split
        account = SplitAccount(split.index, split.range.topic_partition, self.task.reading.tolerance, split.interval)
        reading, decoding, began = Timed(self.records), 0.0, time.time()
        try:
            for records in reading:
                self._batch, since = records, time.monotonic()
                rows = self._decode(records, account)
                decoding += time.monotonic() - since
                # Nothing is written after a bad record that is not tolerated: the rest is read only to count bad records.
                if rows.num_rows and not account.is_lost:
                    yield pa.RecordBatch.from_arrays([*rows.columns, pa.nulls(rows.num_rows, pa.string())], schema=schema)
            seconds = {"read": reading.seconds, "decode": decoding}
            end = encode_result(replace(account.make_result(), gaps=tuple(self.gaps), began=began, seconds=seconds))
        except KafkaSparkError as error:
            end = encode_error(error)
        yield pa.RecordBatch.from_pylist([{END: end}], schema=schema)

    def _decode(self, records: KafkaRecords, account: SplitAccount) -> pa.RecordBatch:
        """Count bad and ignored records, and return the rows of all others."""
        decoded, tp, tolerance = self.task.layout.decode(records), account.topic_partition, self.task.reading.tolerance
        routed = _find_positions(records, self.task.reading.routed.get(tp))
        sent = _find_positions(records, tolerance.sent.get(tp) if tolerance is not None else None)
        ignored = decoded.ignored - routed - sent
        bad = {at: why for at, why in sorted(decoded.bad.items()) if at not in routed and at not in sent}
        account.add_records(records.timestamps, records.bytes)
        account.add_routed(len(routed))
        account.add_ignored(len(ignored))
        if bad:
            found = [BadRecord(*tp, records.offsets[at].as_py(), reason, stage) for at, (stage, reason) in bad.items()]
            account.add_bad(found, lambda: make_dead_letters(found, records.get_originals(list(bad))))
        if sent:
            account.add_bad([BadRecord(*tp, records.offsets[at].as_py(), SENT) for at in sorted(sent)])
        left_out = [*bad, *ignored, *routed, *sent]
        if not left_out:
            return decoded.rows
        kept = np.ones(len(records), bool)
        kept[left_out] = False
        return decoded.rows.filter(pa.array(kept))

    def get_originals(self, rows: pa.RecordBatch) -> Mapping[str, pa.Array]:
        """Return the original parts of the records of some rows of the batch that was yielded last."""
        assert self._batch is not None
        offsets = rows.column(rows.schema.get_field_index(OFFSET))
        return self._batch.get_originals(pc.index_in(offsets, self._batch.offsets).to_pylist())


def _find_positions(records: KafkaRecords, offsets: Set[int] | None) -> frozenset[int]:
    """Return the positions of the records with the given offsets."""
    return frozenset(i for i, offset in enumerate(records.offsets.to_pylist()) if offset in offsets) if offsets else frozenset()


def get_partition_id() -> int:
    """Return the number of the partition that this Spark task works on."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    return context.partitionId()
