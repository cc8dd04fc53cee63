"""The driver's side of transforms between a source and a topic: rows become records, and these others, as Spark expressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.formats.base import Format, Part, as_struct, spark_column
from airflow_kafka_spark.road.rewriting import BYTES, MADE, transformed, with_bytes

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from airflow_kafka_spark.road.tasks.publish_transformed import Origin, ShapedTask
    from airflow_kafka_spark.sinks.kafka.sink import KafkaSink
    from airflow_kafka_spark.sinks.kafka.tasks.publish import Publisher
    from airflow_kafka_spark.transforms.chain import TransformLike


@dataclass(frozen=True)
class RowShaping:
    """What transforms make of the records that a source's rows would have become.

    What comes to the first one is a record as the sink's options make it of a row: ``value`` has its columns, ``key`` is the
    value of one column, or has those of several, ``topic``, ``partition``, ``timestamp`` and ``headers`` are where it would go.
    What comes out of the last one is written.

    :param transforms: in the order in which they apply.
    :param sink: how rows become records, and how these are written.
    :param reserved: topics that no record is sent to.
    :param origin: what is told of rows that a filter sends elsewhere.
    """

    transforms: tuple[TransformLike, ...]
    sink: KafkaSink
    reserved: tuple[str, ...] = ()
    origin: Origin | None = None

    def telling(self, pipeline: str, source: str, window: str) -> RowShaping:
        """Return a copy that knows the origin of rows, which a filter writes on the rows that it sends elsewhere."""
        from airflow_kafka_spark.road.tasks.publish_transformed import Origin

        return replace(self, origin=Origin(pipeline, source, window))

    def check(self, rows: DataFrame) -> None:
        """Ask Spark, which reads nothing for it.

        :param rows: of the source.
        :raises ValidationError: a transform does not fit what comes to it, or what comes out cannot be written.
        """
        _ = self.records(rows, keep=False).schema

    def records(self, rows: DataFrame, *, keep: bool) -> DataFrame:
        """Return the frame that tasks publish: keys and values in binary, or as rows if tasks encode them, and the columns that
        are counted.

        :param keep: whether bad rows are wanted as dead letters.
        :raises ValidationError: as :meth:`check`.
        """
        from pyspark.sql import functions as F

        from airflow_kafka_spark.formats.internal_columns import ERROR, LEFT_OUT, ROUTE
        from airflow_kafka_spark.road.tasks.publish_transformed import GIVEN
        from airflow_kafka_spark.transforms.chain import chain_routes

        routed = bool(chain_routes(self.transforms))
        given = {GIVEN[name]: column for name, column in self._given(rows).items()} if keep or routed else {}
        made, changed = transformed(self._record_frame(rows, given), self.transforms)
        aside = F.col(ERROR).isNotNull() | F.col(ROUTE).isNotNull() if routed else F.col(ERROR).isNotNull()
        fine = ~aside & ~F.col(LEFT_OUT)
        parts: list[tuple[Part, str, Format | None]] = [
            ("value", "sink.value", self.sink.value_writer),
            ("key", "sink.key_format", self._key_writer(changed)),
        ]
        for part, where, format in parts:
            if part == "key" and not self.sink.key_columns and "key" not in changed:
                made = made.withColumn(BYTES + part, F.lit(None).cast("binary"))
                continue
            made = with_bytes(made, part, where, fine, format, None)
        # Only what is set aside is looked at again, which is known here where no task encodes.
        wanted = F.lit(True) if self._encodes_in_tasks(changed) else aside
        columns = [F.when(wanted, F.col(name)).alias(name) for name in given]
        columns += [
            F.col(ERROR),
            F.col(LEFT_OUT),
            *([F.col(ROUTE)] if routed else []),
            *(F.col(BYTES + part).alias(part) for part in ("key", "value")),
        ]
        if self.sink.topic_column or "topic" in changed:
            columns.append(F.col(MADE + "topic").alias("topic"))
        if self.sink.partition or "partition" in changed:
            columns.append(F.col(MADE + "partition").alias("partition"))
        if self.sink.timestamp or "timestamp" in changed:
            columns.append(F.unix_millis(F.col(MADE + "timestamp")).alias("timestamp"))
        if self.sink.headers or "headers" in changed:
            columns.append(F.col(MADE + "headers").alias("headers"))
        return made.select(*columns)

    def task(self, records: DataFrame, publisher: Publisher | None, left: tuple[int, ...]) -> ShapedTask:
        """Return the task that publishes the records, or only counts them.

        :raises KafkaSparkError: the columns cannot be written.
        """
        from airflow_kafka_spark.road.tasks.publish_transformed import Origin, ShapedTask
        from airflow_kafka_spark.sinks.kafka.sink import struct_encoders
        from airflow_kafka_spark.sinks.kafka.tasks.encode import KeyValueEncoder

        encoders = struct_encoders(records, self.sink.value_writer, self.sink.key_writer)
        return ShapedTask(publisher, left, KeyValueEncoder(encoders), self.reserved, self.origin or Origin())

    # --- a record, as the options make it of a row ---

    def _record_frame(self, rows: DataFrame, more: Mapping[str, Column]) -> DataFrame:
        from pyspark.sql import functions as F

        from airflow_kafka_spark.formats.internal_columns import LEFT_OUT

        sink = self.sink
        parts: dict[str, Any] = {
            "key": self._key(),
            "value": as_struct(self._value_columns(rows)),
            "topic": sink.topic_of_row(),
            "partition": sink.partition_of_row(),
            # It gets one when it is written.
            "offset": F.lit(None).cast("bigint"),
            "timestamp": F.timestamp_millis(sink.milliseconds_of_row(rows)),
            "headers": self._headers(),
            LEFT_OUT: F.lit(False),
            **more,
        }
        return rows.select(*(column.alias(name) for name, column in parts.items()))

    def _key(self) -> Column:
        from pyspark.sql import functions as F

        if not self.sink.key_columns:
            return F.lit(None)
        return spark_column(self.sink.key_columns[0]) if self._is_bare else as_struct(self.sink.key_columns)

    @property
    def _is_bare(self) -> bool:
        """Return True if a key is the value of its column, not a struct of one, as its format writes it."""
        from airflow_kafka_spark.formats import Raw, String

        return len(self.sink.key_columns) == 1 and isinstance(self.sink.key_writer, (String, Raw))

    def _headers(self) -> Column:
        from pyspark.sql import functions as F

        from airflow_kafka_spark.transforms.record import FIXED

        return (self.sink.headers_of_row() if self.sink.headers else F.array()).cast(FIXED["headers"])

    def _value_columns(self, rows: DataFrame) -> Sequence[str]:
        return tuple(self.sink.value_columns or rows.columns)

    def _key_writer(self, changed: frozenset[str]) -> Format | None:
        """Return the format of keys; None if a transform makes them and no format is given: then their type decides."""
        if self.sink.key_format is not None or (self.sink.key_columns and "key" not in changed):
            return self.sink.key_writer
        return None

    def _encodes_in_tasks(self, changed: frozenset[str]) -> bool:
        key = self._key_writer(changed)
        return self.sink.value_writer.encodes_in_tasks or (key is not None and key.encodes_in_tasks)

    def _given(self, rows: DataFrame) -> dict[str, Column]:
        """Return the columns that a dead letter shows: the row before all transforms."""
        from pyspark.sql import functions as F

        sink = self.sink
        key: Column = F.lit(None).cast("binary")
        if sink.key_columns:
            key = as_struct(sink.key_columns) if sink.key_writer.encodes_in_tasks else sink.key_writer.encode(sink.key_columns)
        return {
            "key": key,
            "value": as_struct(self._value_columns(rows)),
            "timestamp": sink.milliseconds_of_row(rows),
            "headers": self._headers(),
        }
