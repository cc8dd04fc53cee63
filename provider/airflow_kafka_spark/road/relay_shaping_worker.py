"""Behind transforms, between two topics: what is a record of the target, and what is a bad one. Runs in Spark's tasks.

Imports neither Airflow nor pyspark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.errors import RowRejected, RowsCutOff
from airflow_kafka_spark.road.columns import NO_VALUE, NullValues
from airflow_kafka_spark.road.shaping_worker import ABSENT, ERROR, OFFSET, ORIGINAL
from airflow_kafka_spark.road.task import SAMPLES
from airflow_kafka_spark.sinks.dead_letters_worker import Letters, joined
from airflow_kafka_spark.sinks.kafka_incoming_worker import Incoming
from airflow_kafka_spark.sources.kafka_worker import Records
from airflow_kafka_spark.windows.model import TRANSFORMATION, VALUE_CONVERTER, BadRecord, Split

if TYPE_CHECKING:
    from airflow_kafka_spark.road.tolerance import Tolerance
    from airflow_kafka_spark.sources.kafka import Subscription

RECORD = ("key", "value", "topic", "timestamp", "headers", "partition")
"""What a record that is sent may have."""


@dataclass(frozen=True)
class Routing:
    """Where records go whose topic the transforms have changed; the others go to the pipeline's own.

    :param topic: the pipeline's own.
    :param read: what it reads: a record that went there would go round.
    :param reserved: its ledger, and its dead letter topic.
    """

    topic: str
    read: Subscription
    reserved: tuple[str, ...]

    def of(self, split: Split, rows: pa.RecordBatch) -> pa.RecordBatch:
        """The rows with the topics that they are sent to.

        :raises RowRejected: one of them must not be written.
        """
        at = rows.schema.get_field_index("topic")
        changed = pc.not_equal(rows.column(at), split.range.topic)
        topics = pc.if_else(changed, rows.column(at), self.topic)
        for topic in pc.unique(rows.column(at).filter(changed)).to_pylist():
            if topic is not None and (self.read.matches(topic) or topic in self.reserved):
                first = rows.column(OFFSET)[pc.index(topics, pa.scalar(topic, topics.type)).as_py()].as_py()
                what = "the ledger or the dead letter topic" if topic in self.reserved else "read: it would go round"
                found = f"the transforms send it to topic `{topic}`, which is {what}"
                raise RowRejected(f"record {split.range.topic_partition}@{first}", found, "Correct the transforms")
        return rows.set_column(at, "topic", topics)


@dataclass(frozen=True)
class Sorting:
    """How what the transforms made is told apart.

    :param null_values: what a record without a value means.
    :param tolerance: what becomes of records that could not be transformed.
    :param routing: where transforms may change topics.
    """

    null_values: NullValues
    tolerance: Tolerance | None = None
    routing: Routing | None = None

    def of(self, split: Split, batches: Iterator[pa.RecordBatch]) -> Incoming:
        """A split's records, to be published."""
        return _Shaped(batches, from_spark=True, split=split, rules=self)


@dataclass
class _Shaped(Incoming):
    """What comes out of the transforms: records, and the account of them with what turned out to be bad."""

    split: Split = field(kw_only=True)
    rules: Sorting = field(kw_only=True)
    _letters: Letters = field(default_factory=Letters)
    _samples: list[BadRecord] = field(default_factory=list)
    _bad: int = 0
    _ignored: int = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        passed = 0
        for batch in super().__iter__():
            rows = self._good(batch)
            passed += rows.num_rows
            # With a bad record that is not tolerated nothing is published: the rest is only counted.
            if rows.num_rows and not (self._bad and self.rules.tolerance is None):
                yield self._sent(rows)
        if (read := self.result) is None:
            raise RowsCutOff
        rejected = read.rejected + self._bad
        self.result = replace(
            read,
            ignored=self._ignored,
            rejected=rejected,
            filtered=read.records - rejected - self._ignored - passed,
            samples=(*read.samples, *self._samples)[:SAMPLES],
            letters=joined(read.letters, self._letters.to_bytes()),
        )

    def _good(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        absent, errors = batch.column(ABSENT), batch.column(ERROR)
        if self.rules.null_values == "fail":
            errors = pc.if_else(pc.and_(absent, errors.is_null()), NO_VALUE, errors)
        fine = errors.is_null()
        if errors.null_count < len(errors):
            self._bury(batch.filter(errors.is_valid()), errors.drop_null().to_pylist())
        if self.rules.null_values == "ignore":
            self._ignored += pc.sum(pc.and_(fine, absent)).as_py() or 0
            fine = pc.and_(fine, pc.invert(absent))
        return batch.filter(fine)

    def _bury(self, rows: pa.RecordBatch, reasons: list[str]) -> None:
        topic, partition = self.split.range.topic_partition
        bad = [
            BadRecord(topic, partition, offset, reason, VALUE_CONVERTER if reason == NO_VALUE else TRANSFORMATION)
            for offset, reason in zip(rows.column(OFFSET).to_pylist(), reasons, strict=True)
        ]
        self._bad += len(bad)
        self._samples += bad[: SAMPLES - len(self._samples)]
        tolerance = self.rules.tolerance
        if tolerance is not None and tolerance.keep:
            tolerance.bury(self._originals(rows), range(len(bad)), bad, self._letters)

    def _originals(self, rows: pa.RecordBatch) -> Records:
        """The records as they were read, from what was carried along."""
        stamps = rows.column(ORIGINAL["timestamp"]).cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
        pairs = [None if one is None else [(h["key"], h["value"]) for h in one] for one in self._list(rows, "headers")]
        keys, values = self._list(rows, "key"), self._list(rows, "value")
        place = self.split.range
        return Records(place.topic, place.partition, rows.column(OFFSET), stamps, 0, keys, values, pairs)

    def _list(self, rows: pa.RecordBatch, part: str) -> list:
        return rows.column(ORIGINAL[part]).to_pylist()

    def _sent(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if self.rules.routing is not None:
            rows = self.rules.routing.of(self.split, rows)
        return rows.select([name for name in rows.schema.names if name in RECORD])
