"""What Spark's tasks do between two topics: read a partition's range, decode it where that is wanted, and publish it.

Runs on executors: imports neither Airflow nor pyspark. Where records are only copied, one task does all of it. Where Spark's SQL
filters or computes, :class:`ReadTask` feeds it and :class:`RelayTask` takes what it makes; a last row, which every filter lets
pass, carries the account of what was read from one to the other, and with it the bad records that are tolerated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_kafka_spark.errors import KafkaSparkError, RowsCutOff
from airflow_kafka_spark.formats.internal_columns import END
from airflow_kafka_spark.road.tasks.rejected import Bad, sent
from airflow_kafka_spark.road.tasks.write_rows import add
from airflow_kafka_spark.sinks.kafka.tasks.encode import KeyValueEncoder
from airflow_kafka_spark.sinks.kafka.tasks.incoming import Incoming
from airflow_kafka_spark.sinks.tasks.dead_letters import DeadLetterBuffer
from airflow_kafka_spark.windows.codec import encode_error, encode_result
from airflow_kafka_spark.windows.model import BadRecord, PackedSplits, Split, SplitResult

if TYPE_CHECKING:
    from airflow_kafka_spark.road.columns import Layout
    from airflow_kafka_spark.road.tasks.relay_transformed import Sorting
    from airflow_kafka_spark.road.tasks.tolerance import Tolerance
    from airflow_kafka_spark.sinks.kafka.tasks.publish import Publisher
    from airflow_kafka_spark.sources.kafka.tasks.read import Records

KEY, VALUE, TIMESTAMP, HEADERS, PARTITION, TOMBSTONE = (
    f"__kafka_{name}" for name in ("key", "value", "timestamp", "headers", "partition", "tombstone")
)
"""Columns that carry a record past Spark's SQL; no column of a user's may be named so."""


@dataclass(frozen=True)
class ReadTask:
    """The function that Spark maps over the numbers of splits (``mapInArrow``): their rows, and one more that ends them.

    :param splits: those that are left to publish.
    :param layout: how records become rows.
    :param config: the consumer's configuration. Travels to the executors inside the pickled task only.
    :param skip_lost: pass over records that were deleted meanwhile.
    :param patience: seconds without progress after which the broker is given up.
    :param tolerance: what becomes of bad records; None: with one of them the split cannot be published.
    """

    splits: PackedSplits
    layout: Layout
    config: Mapping[str, Any] = field(repr=False)
    skip_lost: bool = False
    patience: float = 300.0
    tolerance: Tolerance | None = None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for at in batch.column(0).to_pylist():
                yield from self.rows(self.splits[at])

    @property
    def schema(self) -> pa.Schema:
        """Return the schema of the batches: the layout's columns, the flag of tombstones, and :data:`END`."""
        names = [f.with_nullable(True) for f in self.layout.schema]
        return pa.schema([*names, pa.field(TOMBSTONE, pa.bool_()), pa.field(END, pa.string())])

    def rows(self, split: Split) -> Iterator[pa.RecordBatch]:
        """Yield a split's rows, and the row that ends them. The last row also carries an error of this package, because the
        traceback of a worker is no message for a user.
        """
        from airflow_kafka_spark.sources.kafka.tasks.read import KafkaSplitReader

        reader = KafkaSplitReader(
            self.config,
            split.range,
            self.skip_lost,
            self.layout.wants_headers,
            self.patience,
            self.layout.wants_keys,
            with_messages=self.tolerance is not None and self.tolerance.keep,
            epoch=split.epoch,
        )
        result, letters = SplitResult(split.index), DeadLetterBuffer()
        try:
            for records in reader:
                batch, ignored, bad = self._batch(records, letters)
                result = add(result, records, ignored, bad)
                # With a bad record that is not tolerated nothing is published: the rest is only read to count what is bad.
                if batch.num_rows and not (result.rejected and self.tolerance is None):
                    yield batch
            end = encode_result(replace(result, gaps=tuple(reader.gaps), letters=letters.to_bytes()))
        except KafkaSparkError as error:
            end = encode_error(error)
        yield pa.RecordBatch.from_pylist([{END: end}], schema=self.schema)

    def _batch(self, records: Records, letters: DeadLetterBuffer) -> tuple[pa.RecordBatch, int, tuple[BadRecord, ...]]:
        lines = self.layout.rows(records)
        if self.tolerance is not None:
            lines = self.tolerance.take(records, lines, letters)
        rows = lines.rows.batch
        count = rows.num_rows
        tombstones = lines.rows.tombstones if lines.rows.tombstones is not None else pa.array([False] * count, pa.bool_())
        arrays = [*rows.columns, tombstones, pa.nulls(count, pa.string())]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema), lines.ignored, tuple(lines.bad)


@dataclass(frozen=True)
class CopyTask:
    """The function that Spark maps over the numbers of splits where records stay as they are: read and publish, in one task.

    :param read: reads them; its layout has what is kept of a record, under the names above.
    :param publisher: publishes them; None: they are only counted.
    """

    read: ReadTask
    publisher: Publisher | None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from airflow_kafka_spark.sinks.kafka.tasks.publish import publish_split

        for batch in batches:
            for at in batch.column(0).to_pylist():
                split = self.read.splits[at]
                yield publish_split(self.publisher, split.index, Incoming(map(as_records, self.read.rows(split))))


@dataclass(frozen=True)
class RelayTask:
    """The function that Spark maps over what its SQL has made of records: partition ``i`` is split ``splits[i]``.

    :param splits: those that are left to publish.
    :param publisher: publishes them; None: they are only counted.
    :param sorting: where transforms were on the way, what tells their records from bad ones.
    :param encoder: where none were, what makes bytes of keys and values that arrive as rows.
    :param tolerance: and what becomes of records that cannot be written.
    """

    splits: PackedSplits
    publisher: Publisher | None
    sorting: Sorting | None = None
    encoder: KeyValueEncoder = field(default_factory=lambda: KeyValueEncoder({}))
    tolerance: Tolerance | None = None

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from airflow_kafka_spark.sinks.kafka.tasks.publish import partition_id, publish_split

        split = self.splits[partition_id()]
        if self.sorting is not None:
            incoming = self.sorting.of(split, batches)
        else:
            incoming = Filtered(batches, from_spark=True, split=split, encoder=self.encoder, tolerance=self.tolerance)
        yield publish_split(self.publisher, split.index, incoming)


@dataclass
class Filtered(Incoming):
    """Records behind a filter: those that are missing at the end were left out by it, and are counted.

    :param split: which split they are.
    :param encoder: makes bytes of keys and values that arrive as rows.
    :param tolerance: what becomes of those that cannot be written.
    """

    split: Split = field(kw_only=True)
    encoder: KeyValueEncoder = field(kw_only=True)
    tolerance: Tolerance | None = field(default=None, kw_only=True)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        passed, bad = 0, Bad(self.split, self.tolerance)
        for batch in super().__iter__():
            passed += batch.num_rows
            rows = bad.encoded(batch, self.encoder)
            if rows.num_rows and not bad.ends_it:
                yield sent(rows)
        if self.result is None:
            raise RowsCutOff
        self.result = bad.account(replace(self.result, filtered=self.result.handed_over - passed))


def as_records(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Return rows of carried columns under the names that a publisher expects."""
    names = {KEY: "key", VALUE: "value", TIMESTAMP: "timestamp", HEADERS: "headers", PARTITION: "partition", END: END}
    columns = {names[name]: column for name, column in zip(rows.schema.names, rows.columns, strict=True) if name in names}
    if "timestamp" in columns:
        columns["timestamp"] = columns["timestamp"].cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
    return pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
