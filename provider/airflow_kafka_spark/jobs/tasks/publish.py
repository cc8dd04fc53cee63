"""Publishing the rows of a split as records of a topic.

Runs on executors: imports neither Airflow nor pyspark. The rows are Kafka records that were copied, computed by SQL or
transformed, or the rows of a source.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.errors import RowRejected, RowsCutOff
from airflow_kafka_spark.formats.base import END, HEADERS, KEY, OFFSET, PARTITION, TIMESTAMP, VALUE, NullValues
from airflow_kafka_spark.formats.tasks.kernels import if_else
from airflow_kafka_spark.hooks.spark.tasks.executor_check import CheckedOnExecutors
from airflow_kafka_spark.jobs.tasks.account import SplitAccount, Tolerance
from airflow_kafka_spark.jobs.tasks.read import ReadTask, get_partition_id
from airflow_kafka_spark.jobs.tasks.sort import Origin, RecordOrigin, RowOrigin, Sorter, drop_rows
from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import make_routed_records
from airflow_kafka_spark.sinks.kafka.tasks.encode import KeyValueEncoder
from airflow_kafka_spark.sinks.kafka.tasks.publish import Publisher, RecordBatches, publish_split
from airflow_kafka_spark.windows.codec import encode_result
from airflow_kafka_spark.windows.model import OUTPUT, PackedSplits, Split, TopicPartition
from airflow_kafka_spark.windows.times import Timed

if TYPE_CHECKING:
    from airflow_kafka_spark.jobs.tasks.arrow import Program
    from airflow_kafka_spark.sinks.kafka.tasks.encode import RecordEncoder
    from airflow_kafka_spark.sources.base import SplitReader
    from airflow_kafka_spark.sources.kafka.topics import Subscription

RECORD = ("key", "value", "topic", "timestamp", "headers", "partition")
"""The columns of a record to send."""

_COPIED = {KEY: "key", VALUE: "value", TIMESTAMP: "timestamp", HEADERS: "headers", PARTITION: "partition"}

RESERVED = "the ledger, the dead letter topic, or one that a Filter sends records to"
"""The reserved topics of :class:`TopicRules`, for messages."""


@dataclass(frozen=True)
class TopicRules:
    """The topics that records may go to if transforms have changed their topic.

    :param reserved: topics that no record is sent to: the pipeline's ledger, its dead letter topic, and those of filters.
    :param topic: the target of records whose topic no transform has changed; None: the topic of their split.
    :param read: the topics that the pipeline reads, because a record that is sent there would be read again; None for a source.
    """

    reserved: tuple[str, ...] = ()
    topic: str | None = None
    read: Subscription | None = None

    def apply(self, rows: pa.RecordBatch, topic_partition: TopicPartition) -> pa.RecordBatch:
        """Return the rows with their target topics.

        :param topic_partition: the topic and partition of their split.
        :raises RowRejected: a row has a topic that must not be written to.
        """
        at = rows.schema.get_field_index("topic")
        if at < 0:
            return rows
        topics = wanted = rows.column(at)
        if self.topic is not None:
            changed = pc.not_equal(topics, topic_partition.topic)
            topics, wanted = if_else(changed, topics, self.topic), topics.filter(changed)
        for topic in pc.unique(wanted).to_pylist():
            is_read = topic is not None and self.read is not None and self.read.matches(topic)
            if is_read or topic in self.reserved:
                offset = rows.column(OFFSET)[pc.index(topics, pa.scalar(topic, topics.type)).as_py()].as_py()
                what = RESERVED if topic in self.reserved else "read: it would be read again"
                found = f"the transforms send it to topic `{topic}`, which is {what}"
                row = (
                    f"record {topic_partition}@{offset}"
                    if topic_partition.topic
                    else f"row {offset} of split {topic_partition.partition}"
                )
                raise RowRejected(row, found, "Correct the transforms")
        return rows.set_column(at, "topic", topics)


@dataclass(frozen=True)
class Sorting:
    """Sorting and encoding of the rows of all splits.

    :param encoder: encodes keys and values that arrive as structs.
    :param tolerance: handling of bad rows; None: a split that holds one is not published.
    :param null_values: handling of records without a value, if transforms may have changed the value.
    :param topics: the rules for records whose topic the transforms have changed; None: no transform changes a topic.
    :param pipeline: the pipeline's name, for records that a filter sends elsewhere.
    :param origin: the origin of the rows: Kafka records, or the rows of a source.
    """

    encoder: KeyValueEncoder = field(default_factory=lambda: KeyValueEncoder({}))
    tolerance: Tolerance | None = None
    null_values: NullValues | None = None
    topics: TopicRules | None = None
    pipeline: str = ""
    origin: Origin = field(default_factory=RecordOrigin)

    @property
    def is_of_source(self) -> bool:
        """True if the rows are those of a source, not Kafka records."""
        return isinstance(self.origin, RowOrigin)


@dataclass
class SortedRecords(RecordBatches):
    """The records of a split that are sent: its good rows, and those that a filter sends elsewhere.

    :param index: the split's index.
    :param topic_partition: the topic and partition of the split; for a source an empty topic and the split's index.
    :param sorting: sorts and encodes the rows.
    """

    index: int = field(kw_only=True)
    topic_partition: TopicPartition = field(kw_only=True)
    sorting: Sorting = field(kw_only=True)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield the records. After a bad row that is not tolerated, the rest of the split is only counted."""
        account, published, began = SplitAccount(self.index, self.topic_partition, self.sorting.tolerance), 0, time.time()
        sorter = Sorter(account, self.sorting.origin, self.sorting.null_values)
        for batch in super().__iter__():
            if self.sorting.is_of_source:
                batch = _number_rows(batch, account)
            good, routed = sorter.sort(batch)
            account.add_routed(routed.num_rows)
            records = self._encode(good, sorter)
            published += records.num_rows
            elsewhere = self._make_routed(routed) if routed.num_rows else routed
            yield from (found for found in (records, elsewhere) if found.num_rows and not account.is_lost)
        if not self.sorting.is_of_source:
            if self.result is None:
                raise RowsCutOff
            account.add_read(self.result)
            began = self.result.began
        # A source that is read by Spark may have noted something of its rows.
        token = self.result.token if self.sorting.is_of_source and self.result is not None else {}
        self.result = replace(account.make_result(published), began=began, token=token)

    def _encode(self, rows: pa.RecordBatch, sorter: Sorter) -> pa.RecordBatch:
        """Return rows as records, and count rows that do not fit their format as bad."""
        encoded, misfits = self.sorting.encoder.encode(rows)
        if misfits:
            reasons = misfits
            if not self.sorting.is_of_source:
                reasons = {at: (stage + OUTPUT, f"cannot be written: {reason}") for at, (stage, reason) in misfits.items()}
            sorter.refuse(rows, reasons, encoded)
            encoded = drop_rows(encoded, misfits)
        if self.sorting.topics is not None and encoded.num_rows:
            encoded = self.sorting.topics.apply(encoded, self.topic_partition)
        return to_records(encoded)

    def _make_routed(self, routed: pa.RecordBatch) -> pa.RecordBatch:
        """Return records as they were read, each with the topic that a filter sends it to."""
        records = make_routed_records(pa.Table.from_batches([routed]), self.sorting.pipeline, self.sorting.origin.locate)
        return records.append_column("topic", routed.column("to"))


def _number_rows(batch: pa.RecordBatch, account: SplitAccount) -> pa.RecordBatch:
    """Count the rows of a source, and return them with their number in the split, from 1."""
    first = account.records + 1
    account.add_rows(batch.num_rows)
    return batch.append_column(OFFSET, pa.array(np.arange(first, first + batch.num_rows, dtype=np.int64)))


def to_records(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return the columns that a publisher sends, under the names that it expects."""
    columns = {}
    for name, column in zip(rows.schema.names, rows.columns, strict=True):
        if (part := _COPIED.get(name, name)) in RECORD:
            is_stamp = pa.types.is_timestamp(column.type)
            columns[part] = column.cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64()) if is_stamp else column
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))


class SplitSource(Protocol):
    """Reads splits in the task that publishes them."""

    def read(self, at: int, index: int) -> Iterable[pa.RecordBatch]:
        """Return the batches of a split, and after them one row with the account of the rows that were read.

        :param at: the position of the split among those that are left.
        :param index: its index in the window.
        """


@dataclass(frozen=True)
class KafkaSplits:
    """Reads the splits of a window from Kafka.

    :param task: reads and decodes them.
    :param program: the filter, expressions or transforms, if Arrow computes them; None: records stay as they are.
    """

    task: ReadTask
    program: Program | None = None

    def read(self, at: int, index: int) -> Iterable[pa.RecordBatch]:
        split = self.task.splits[at]
        rows = self.task.read(split)
        return rows if self.program is None else self.program.run(rows, split.range.topic_partition)


@dataclass(frozen=True)
class EncodedSplits:
    """Reads the splits of a source and encodes them.

    :param reader: reads them. It holds passwords: it travels to the executors inside the pickled task only.
    :param encoder: makes records of the rows.
    """

    reader: SplitReader
    encoder: RecordEncoder

    def read(self, at: int, index: int) -> Iterator[pa.RecordBatch]:
        began, rows = time.time(), Timed(self.reader.read(at))
        account = SplitAccount(index, TopicPartition("", index), None)
        for batch in rows:
            account.add_rows(batch.num_rows)
            yield self.encoder.encode(batch)
        result = replace(account.make_result(), token=self.reader.get_token(at), began=began, seconds={"read": rows.seconds})
        end = encode_result(result)
        yield pa.RecordBatch.from_pylist([{END: end}], schema=pa.schema([(END, pa.string())]))


@dataclass(frozen=True)
class PublishTask(CheckedOnExecutors):
    """The function that Spark maps over the splits that are left (``mapInArrow``).

    With ``source`` it reads them itself, and Spark passes their numbers only. Without it Spark passes the rows of split
    ``splits[i]`` in partition ``i``.

    :param publisher: publishes a split; None: its records are only counted.
    :param splits: the splits that are left; for a source their indexes.
    :param sorting: sorts and encodes the rows; None: the rows are records already, and none is bad.
    :param source: reads the splits; None: Spark does.
    """

    publisher: Publisher | None
    splits: PackedSplits | tuple[int, ...]
    sorting: Sorting | None = None
    source: SplitSource | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        return ("kafka",)

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if self.source is None:
            yield self._publish(get_partition_id(), iter(batches))
            return
        for batch in batches:
            for at in batch.column(0).to_pylist():
                yield self._publish(at)

    def _publish(self, at: int, from_spark: Iterator[pa.RecordBatch] | None = None) -> pa.RecordBatch:
        """Publish the split at a position among those that are left.

        :param from_spark: its rows, from Spark; None: this task reads them.
        """
        split = self.splits[at]
        if isinstance(split, Split):
            index, topic_partition = split.index, split.range.topic_partition
        else:
            index, topic_partition = split, TopicPartition("", split)
        if from_spark is None:
            assert self.source is not None
            batches = iter(self.source.read(at, index))
        else:
            batches = from_spark
        incoming = (
            RecordBatches(batches, from_spark is not None)
            if self.sorting is None
            else SortedRecords(
                batches, from_spark is not None, index=index, topic_partition=topic_partition, sorting=self.sorting
            )
        )
        return publish_split(self.publisher, index, incoming)
