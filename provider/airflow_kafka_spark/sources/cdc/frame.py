"""Events of a log as a DataFrame, where Spark has to have the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from airflow_kafka_spark.sources.base import SplitReader

COLUMNS = ("topic", "key", "value", "timestamp")
"""The columns of an event."""

SPARK_SCHEMA = "topic string, key binary, value binary, timestamp bigint"


def empty_events(spark: SparkSession) -> DataFrame:
    """Return a DataFrame without rows that has the columns of an event."""
    return spark.createDataFrame([], SPARK_SCHEMA)


def read_events(spark: SparkSession, splits: Sequence[Mapping[str, Any]], reader: SplitReader) -> DataFrame:
    """Return the events of splits, read by Spark's Python workers; partition ``i`` is split ``i``.

    :param reader: reads these splits.
    """
    from airflow_kafka_spark.sources.cdc.tasks.frame import ReadSplits

    numbers = spark.range(0, len(splits), 1, len(splits))
    return numbers.mapInArrow(cast(Any, ReadSplits(reader)), SPARK_SCHEMA)
