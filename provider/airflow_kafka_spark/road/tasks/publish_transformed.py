"""Behind the transforms of a source's rows: what is a record, what was left out, and what is bad. Runs in Spark's tasks.

Imports neither Airflow nor pyspark.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.errors import RowRejected
from airflow_kafka_spark.formats.internal_columns import ERROR, LEFT_OUT, ROUTE
from airflow_kafka_spark.road.tasks.rejected import sent
from airflow_kafka_spark.road.tasks.relay_transformed import RESERVED
from airflow_kafka_spark.road.tasks.transform_rows import told_of
from airflow_kafka_spark.sinks.kafka.tasks.encode import BadRows
from airflow_kafka_spark.sinks.kafka.tasks.incoming import SourceRows, letters_of_rows, row_place
from airflow_kafka_spark.sinks.kafka.tasks.publish import PublishTask
from airflow_kafka_spark.sinks.tasks.dead_letters import routed_records
from airflow_kafka_spark.windows.model import TRANSFORMATION, BadRecord

GIVEN = {name: f"__kafka_given_{name}" for name in ("key", "value", "timestamp", "headers")}
"""What of the row as the source gave it is carried past the transforms, where bad rows are wanted as dead letters, or a filter
sends rows elsewhere. The key is bytes where it could be written, else columns, like the value."""


@dataclass(frozen=True)
class Origin:
    """What is told of rows that a filter sends elsewhere.

    :param pipeline: the pipeline's name.
    :param source: the source's URI.
    :param window: the window.
    """

    pipeline: str = ""
    source: str = ""
    window: str = ""

    def place_of(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the origin of rows, from the columns of many."""
        return row_place(self.source, self.window, row)


@dataclass(frozen=True)
class ShapedTask(PublishTask):
    """The function that Spark maps over what transforms have made of a source's rows.

    :param reserved: topics that no record is sent to: the pipeline's ledger, its dead letter topic, those of filters.
    :param origin: what is told of rows that a filter sends elsewhere.
    """

    reserved: tuple[str, ...] = ()
    origin: Origin = field(default_factory=Origin)

    def rows(self, batches: Iterator[pa.RecordBatch], split: int, keep: bool, tolerant: bool) -> SourceRows:
        return ShapedRows(
            batches,
            from_spark=True,
            split=split,
            encoder=self.encoder,
            keep=keep,
            tolerant=tolerant,
            reserved=self.reserved,
            origin=self.origin,
        )


@dataclass
class ShapedRows(SourceRows):
    """Rows of a source behind transforms: some have an error, some are left out, some go elsewhere."""

    reserved: tuple[str, ...] = field(kw_only=True)
    origin: Origin = field(kw_only=True)

    def made(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, BadRows]:
        made, misfits = super().made(batch)
        errors = batch.column(ERROR)
        if errors.null_count == len(errors):
            return made, misfits
        places = pc.indices_nonzero(errors.is_valid())
        reasons = errors.take(places).to_pylist()
        failed = {at: (TRANSFORMATION, reason) for at, reason in zip(places.to_pylist(), reasons, strict=True)}
        return made, dict(sorted({**misfits, **failed}.items()))

    def records(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        rows = rows.filter(pc.invert(rows.column(LEFT_OUT)))
        rows = sent(rows.filter(rows.column(ROUTE).is_null()) if ROUTE in rows.schema.names else rows)
        at = rows.schema.get_field_index("topic")
        if at >= 0:
            for topic in pc.unique(rows.column(at)).to_pylist():
                if topic in self.reserved:
                    found = f"the transforms send a row of it to topic `{topic}`, which is {RESERVED}"
                    raise RowRejected("a row", found, "Correct the transforms")
        return rows

    def elsewhere(self, batch: pa.RecordBatch, read: int) -> pa.RecordBatch:
        if ROUTE not in batch.schema.names or batch.column(ROUTE).null_count == batch.num_rows:
            return super().elsewhere(batch, read)
        places = pc.indices_nonzero(batch.column(ROUTE).is_valid())
        topics, reasons = told_of(batch.column(ROUTE).take(places))
        numbers = zip(places.to_pylist(), reasons.to_pylist(), strict=True)
        told = [BadRecord("", self.split, read + at + 1, reason) for at, reason in numbers]
        # As a dead letter shows it, which is what is known of a row that was never a record.
        rows = batch.take(places)
        shown = letters_of_rows(*self.shown(rows, rows), told)
        records = routed_records(pa.Table.from_batches([shown]), self.origin.pipeline, self.origin.place_of)
        return records.append_column("topic", topics)

    def shown(self, rows: pa.RecordBatch, made: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        given = {name: rows.column(column) for name, column in GIVEN.items()}
        key = given["key"]
        written = pa.types.is_binary(key.type) or pa.types.is_large_binary(key.type)
        could = {**given, "key": key if written else pa.nulls(len(key), pa.binary()), "value": pa.nulls(len(key), pa.binary())}
        return pa.RecordBatch.from_pydict(given), pa.RecordBatch.from_pydict(could)
