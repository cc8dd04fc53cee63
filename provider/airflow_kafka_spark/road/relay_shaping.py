"""The driver's side of transforms between two topics: records of one become records of the other, as Spark expressions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from airflow_kafka_spark.formats.base import Format, Part, spark_column
from airflow_kafka_spark.road.rewriting import BYTES, MADE, transformed, with_bytes
from airflow_kafka_spark.road.settings import SETTINGS, sql_settings

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from airflow_kafka_spark.hooks.spark import SparkHook
    from airflow_kafka_spark.road.shaping import Shaping
    from airflow_kafka_spark.road.tasks.relay_transformed import Routing
    from airflow_kafka_spark.sinks.kafka.tasks.publish import Publisher
    from airflow_kafka_spark.windows.model import Split


@dataclass(frozen=True)
class Reshaping:
    """What transforms make of records, and how that is written.

    A key or a value that no transform changes keeps its bytes. Others are written in the formats given, by default as Connect
    would: structs as JSON, numbers and texts as text, bytes as they are.

    :param shaping: how records are decoded, and the transforms.
    :param routing: where records go whose topic a transform changes.
    :param value: how values are written; None: by their type.
    :param key: how keys are; None: by their type.
    :param timestamps: whether records keep the time that they have behind the transforms.
    :param headers: whether they keep the headers.
    :param partitions: whether they keep the partition's number.
    :param pipeline: the pipeline's name, for records that a filter sends elsewhere.
    """

    shaping: Shaping
    routing: Routing
    value: Format | None = None
    key: Format | None = None
    timestamps: bool = True
    headers: bool = True
    partitions: bool = False
    pipeline: str = ""

    def check(self, spark: SparkHook) -> None:
        """Ask Spark, which reads nothing for it.

        :raises ValidationError: a transform does not fit what comes to it, or what comes out cannot be written.
        """
        from pyspark.sql.pandas.types import from_arrow_schema

        with spark.session() as session, sql_settings(session, SETTINGS):
            empty = session.createDataFrame([], from_arrow_schema(self.shaping.reading((), {}).schema))
            _ = self._records(empty)[0].schema

    def results(
        self,
        numbers: DataFrame,
        splits: tuple[Split, ...],
        config: Mapping[str, Any],
        publisher: Publisher | None,
        options: Mapping[str, Any],
    ) -> DataFrame:
        """Return the frame of the tasks' results, as :meth:`~airflow_kafka_spark.road.relay.SqlRelay.results` does.

        :raises ValidationError: a transform does not fit.
        """
        from pyspark.sql.pandas.types import from_arrow_schema

        from airflow_kafka_spark.road.tasks.relay import RelayTask
        from airflow_kafka_spark.road.tasks.relay_transformed import Sorting
        from airflow_kafka_spark.sinks.kafka.sink import struct_encoders
        from airflow_kafka_spark.sinks.kafka.tasks.encode import KeyValueEncoder

        read = self.shaping.reading(splits, config, **options)
        rows, changed = self._records(numbers.mapInArrow(cast(Any, read), from_arrow_schema(read.schema)))
        routing = self.routing if "topic" in changed else None
        encoder = KeyValueEncoder(struct_encoders(rows, self.value, self.key))
        sorting = Sorting(self.shaping.null_values, options.get("tolerance"), routing, encoder, self.pipeline)
        return rows.mapInArrow(cast(Any, RelayTask(read.splits, publisher, sorting)), "result string")

    def _records(self, frame: DataFrame) -> tuple[DataFrame, frozenset[str]]:
        """Return the frame of the records that are published, with the columns that tell good records from bad ones, and the
        names of the parts that the transforms may have changed.
        """
        from pyspark.sql import functions as F

        from airflow_kafka_spark.formats.internal_columns import END, ERROR, ROUTE
        from airflow_kafka_spark.road.tasks.transform_rows import ABSENT, ORIGINAL

        frame, changed = transformed(frame, self.shaping.transforms)
        kept = [name for name in frame.columns if not name.startswith(MADE)]
        columns = [F.col(MADE + "value").isNull().alias(ABSENT), *map(spark_column, kept)]
        fine = F.col(END).isNull() & F.col(ERROR).isNull()
        if ROUTE in kept:
            fine = fine & F.col(ROUTE).isNull()
        parts: list[tuple[Part, str, Format | None, Format | None]] = [
            ("value", "sink.value", self.value, self.shaping.value),
            ("key", "sink.key_format", self.key, self.shaping.key),
        ]
        for part, where, format, read in parts:
            if part in changed:
                frame = with_bytes(frame, part, where, fine, format, read)
            columns.append(F.col(BYTES + part if part in changed else ORIGINAL[part]).alias(part))
        if "topic" in changed:
            columns.append(F.col(MADE + "topic").alias("topic"))
        if self.timestamps:
            columns.append(F.unix_millis(F.col(MADE + "timestamp")).alias("timestamp"))
        if self.headers:
            columns.append(F.col(MADE + "headers").alias("headers"))
        if self.partitions:
            columns.append(F.col(MADE + "partition").alias("partition"))
        return frame.select(*columns), changed
