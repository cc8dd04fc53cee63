"""The driver's side of transforms between two topics: records of one become records of the other, as Spark expressions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.formats import Json, Raw, String
from airflow_kafka_spark.formats.base import Format, Part, spark_column
from airflow_kafka_spark.road.settings import SETTINGS, sql_settings

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType

    from airflow_kafka_spark.hooks.spark import SparkHook
    from airflow_kafka_spark.road.relay_shaping_worker import Routing
    from airflow_kafka_spark.road.shaping import Shaping
    from airflow_kafka_spark.sinks.kafka_worker import Publisher
    from airflow_kafka_spark.windows.model import Split

_MADE, _BYTES = "__kafka_made_", "__kafka_bytes_"


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
    """

    shaping: Shaping
    routing: Routing
    value: Format | None = None
    key: Format | None = None
    timestamps: bool = True
    headers: bool = True
    partitions: bool = False

    def check(self, spark: SparkHook) -> None:
        """Ask Spark, which reads nothing for it.

        :raises ValidationError: a transform does not fit what comes to it, or what comes out cannot be written.
        """
        with spark.session() as session, sql_settings(session, SETTINGS):
            touched = self._touched(session)
            _ = self._records(_empty(session, self.shaping), touched).schema

    def results(
        self,
        numbers: DataFrame,
        splits: tuple[Split, ...],
        config: Mapping[str, Any],
        publisher: Publisher | None,
        options: Mapping[str, Any],
    ) -> DataFrame:
        """What tasks tell of their splits, as :meth:`~airflow_kafka_spark.road.relay.Change.results` does.

        :raises ValidationError: a transform does not fit.
        """
        from pyspark.sql.pandas.types import from_arrow_schema

        from airflow_kafka_spark.road.relay_shaping_worker import Sorting
        from airflow_kafka_spark.road.relay_worker import RelayTask
        from airflow_kafka_spark.sinks.kafka import struct_encoders
        from airflow_kafka_spark.sinks.kafka_fitting_worker import Fitting

        touched = self._touched(numbers.sparkSession)
        read = self.shaping.reading(splits, config, **options)
        rows = self._records(numbers.mapInArrow(cast(Any, read), from_arrow_schema(read.schema)), touched)
        routing = self.routing if "topic" in touched else None
        fitting = Fitting(struct_encoders(rows, self.value, self.key))
        sorting = Sorting(self.shaping.null_values, options.get("tolerance"), routing, fitting)
        return rows.mapInArrow(cast(Any, RelayTask(splits, publisher, sorting)), "result string")

    def _touched(self, session: SparkSession) -> frozenset[str]:
        """The parts of a record that a transform may change."""
        from airflow_kafka_spark.transforms import ByColumns, Record, chain
        from airflow_kafka_spark.transforms.record import PARTS

        frame, found = _empty(session, self.shaping), set[str]()
        chain(frame, self.shaping.transforms)  # Says which one is wrong, by its place.
        for transform in self.shaping.transforms:
            if not isinstance(transform, ByColumns):
                return frozenset(PARTS)
            found |= set(transform.changes(Record(frame.schema)))
            frame = chain(frame, [transform])
        return frozenset(found)

    def _records(self, frame: DataFrame, touched: frozenset[str]) -> DataFrame:
        """What is published of what the transforms make, and what is carried to those who tell good from bad."""
        from pyspark.sql import functions as F

        from airflow_kafka_spark.road.shaping_worker import ABSENT, ORIGINAL
        from airflow_kafka_spark.transforms import chain

        frame = chain(frame, self.shaping.transforms)
        kept = [name for name in frame.columns if name.startswith("__kafka_")]
        named = {name: _MADE + name for name in ("key", "value", "topic", "partition", "timestamp", "headers")}
        frame = frame.select(*(F.col(name).alias(alias) for name, alias in named.items()), *map(spark_column, kept))
        columns = [F.col(named["value"]).isNull().alias(ABSENT), *map(spark_column, kept)]
        parts: list[tuple[Part, Format | None, Format | None]] = [
            ("value", self.value, self.shaping.value),
            ("key", self.key, self.shaping.key),
        ]
        for part, format, read in parts:
            if part in touched:
                frame = _written(frame, part, format, read)
            columns.append(F.col(_BYTES + part if part in touched else ORIGINAL[part]).alias(part))
        if "topic" in touched:
            columns.append(F.col(named["topic"]).alias("topic"))
        if self.timestamps:
            columns.append(F.unix_millis(F.col(named["timestamp"])).alias("timestamp"))
        if self.headers:
            columns.append(F.col(named["headers"]).alias("headers"))
        if self.partitions:
            columns.append(F.col(named["partition"]).alias("partition"))
        return frame.select(*columns)


def _written(frame: DataFrame, part: Part, format: Format | None, read: Format | None) -> DataFrame:
    """The frame with the bytes of a key or a value.

    :param read: how it was read: what still is one column of bytes or text is written so.
    :raises ValidationError: it cannot be written so.
    """
    from pyspark.sql import functions as F
    from pyspark.sql.types import ArrayType, MapType, StructType

    from airflow_kafka_spark.road.shaping_worker import END, ERROR

    whole, found = F.col(_MADE + part), frame.schema[_MADE + part].dataType
    where = f"output_{part}" if part == "value" else "output_key_format"
    names = found.names if isinstance(found, StructType) else [part]
    if isinstance(found, (ArrayType, MapType)):
        what = f"behind the transforms the {part} is {found.simpleString()}; expected fields, or one number, text or binary"
        raise ValidationError([Problem("transforms", what, "Give it a name with HoistField")])
    writer = format or _fitting(found, read)
    if problems := writer.encoding_problems(where, names):
        raise ValidationError(problems)
    before = [spark_column(name) for name in frame.columns]
    fields: list[Column] = [whole.getField(n).alias(n) for n in names] if isinstance(found, StructType) else [whole.alias(part)]
    fine = F.col(END).isNull() & F.col(ERROR).isNull() & whole.isNotNull()
    # In two steps, so that a field is named as the format names it, whatever else is called so.
    return frame.select(*before, *fields).select(*before, F.when(fine, writer.encode(names)).alias(_BYTES + part))


def _fitting(found: DataType, read: Format | None) -> Format:
    """The format that Connect would write a type in."""
    from pyspark.sql.types import BinaryType, StructType

    if isinstance(found, StructType):
        return read if isinstance(read, (Raw, String)) and found.names == [read.column] else Json()
    return Raw() if isinstance(found, BinaryType) else String()


def _empty(session: SparkSession, shaping: Shaping) -> DataFrame:
    from pyspark.sql.pandas.types import from_arrow_schema

    return session.createDataFrame([], from_arrow_schema(shaping.reading((), {}).schema))
