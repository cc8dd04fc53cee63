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
from airflow_kafka_spark.formats.internal_columns import ERROR
from airflow_kafka_spark.road.columns import NO_VALUE, NullValues
from airflow_kafka_spark.road.tasks.rejected import Bad, sent
from airflow_kafka_spark.road.tasks.transform_rows import ABSENT, OFFSET, parted
from airflow_kafka_spark.sinks.kafka.tasks.encode import KeyValueEncoder
from airflow_kafka_spark.sinks.kafka.tasks.incoming import Incoming
from airflow_kafka_spark.sinks.tasks.dead_letters import routed_records
from airflow_kafka_spark.windows.model import TRANSFORMATION, VALUE_CONVERTER, Split

if TYPE_CHECKING:
    from airflow_kafka_spark.road.tasks.tolerance import Tolerance
    from airflow_kafka_spark.sources.kafka.topics import Subscription


RESERVED = "the ledger, the dead letter topic, or one that a Filter sends records to"


@dataclass(frozen=True)
class Routing:
    """Where records go whose topic the transforms have changed; the others go to the pipeline's own.

    :param topic: the pipeline's own.
    :param read: what it reads: a record that went there would go round.
    :param reserved: its ledger, its dead letter topic, and those that a filter sends records to.
    """

    topic: str
    read: Subscription
    reserved: tuple[str, ...]

    def of(self, split: Split, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the rows with the topics that they are sent to.

        :raises RowRejected: one of them must not be written.
        """
        at = rows.schema.get_field_index("topic")
        changed = pc.not_equal(rows.column(at), split.range.topic)
        topics = pc.if_else(changed, rows.column(at), self.topic)
        for topic in pc.unique(rows.column(at).filter(changed)).to_pylist():
            if topic is not None and (self.read.matches(topic) or topic in self.reserved):
                first = rows.column(OFFSET)[pc.index(topics, pa.scalar(topic, topics.type)).as_py()].as_py()
                what = RESERVED if topic in self.reserved else "read: it would go round"
                found = f"the transforms send it to topic `{topic}`, which is {what}"
                raise RowRejected(f"record {split.range.topic_partition}@{first}", found, "Correct the transforms")
        return rows.set_column(at, "topic", topics)


@dataclass(frozen=True)
class Sorting:
    """How what the transforms made is told apart.

    :param null_values: what a record without a value means.
    :param tolerance: what becomes of records that could not be transformed, or cannot be written.
    :param routing: where transforms may change topics.
    :param encoder: makes bytes of keys and values that arrive as rows.
    :param pipeline: the pipeline's name, for records that a filter sends elsewhere.
    """

    null_values: NullValues
    tolerance: Tolerance | None = None
    routing: Routing | None = None
    encoder: KeyValueEncoder = field(default_factory=lambda: KeyValueEncoder({}))
    pipeline: str = ""

    def of(self, split: Split, batches: Iterator[pa.RecordBatch]) -> Incoming:
        """Return a split's records, to be published."""
        return _Shaped(batches, from_spark=True, split=split, rules=self)


@dataclass
class _Shaped(Incoming):
    """What comes out of the transforms: records, and the account of them with what turned out to be bad."""

    split: Split = field(kw_only=True)
    rules: Sorting = field(kw_only=True)
    _ignored: int = 0

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        passed, routed, bad = 0, 0, Bad(self.split, self.rules.tolerance)
        for batch in super().__iter__():
            stays, away = parted(self.split, batch)
            rows = bad.encoded(self._good(stays, bad), self.rules.encoder)
            passed += rows.num_rows
            routed += away.num_rows
            if rows.num_rows and not bad.ends_it:
                yield self._sent(rows)
            if away.num_rows and not bad.ends_it:
                yield self._elsewhere(away)
        if self.result is None:
            raise RowsCutOff
        read = bad.account(self.result)
        filtered = read.records - read.rejected - self._ignored - routed - passed
        self.result = replace(read, ignored=self._ignored, filtered=filtered, routed=routed)

    def _elsewhere(self, away: pa.RecordBatch) -> pa.RecordBatch:
        """Return records as they were read, each with the topic that a filter sends it to."""
        records = routed_records(pa.Table.from_batches([away]), self.rules.pipeline)
        return records.append_column("topic", away.column("to"))

    def _good(self, batch: pa.RecordBatch, bad: Bad) -> pa.RecordBatch:
        absent, errors = batch.column(ABSENT), batch.column(ERROR)
        if self.rules.null_values == "fail":
            errors = pc.if_else(pc.and_(absent, errors.is_null()), NO_VALUE, errors)
        fine = errors.is_null()
        if errors.null_count < len(errors):
            reasons = errors.drop_null().to_pylist()
            why = [(VALUE_CONVERTER if reason == NO_VALUE else TRANSFORMATION, reason) for reason in reasons]
            bad.add(batch.filter(errors.is_valid()), why)
        if self.rules.null_values == "ignore":
            self._ignored += pc.sum(pc.and_(fine, absent)).as_py() or 0
            fine = pc.and_(fine, pc.invert(absent))
        return batch.filter(fine)

    def _sent(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        if self.rules.routing is not None:
            rows = self.rules.routing.of(self.split, rows)
        return sent(rows)
