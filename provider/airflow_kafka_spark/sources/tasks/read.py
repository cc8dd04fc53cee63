"""Read the splits of any source as partitions of a DataFrame, in Spark's Python workers instead of Spark's readers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.formats.base import END
from airflow_kafka_spark.hooks.spark.tasks.executor_check import CheckedOnExecutors
from airflow_kafka_spark.sources.base import SplitReader
from airflow_kafka_spark.windows.codec import encode_error, encode_result
from airflow_kafka_spark.windows.model import SplitResult

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def make_frame(spark: SparkSession, schema: pa.Schema, reader: SplitReader | None, splits: int) -> DataFrame:
    """Return the rows that a reader reads. Partition ``i`` is split ``i``; its last row has the split's token.

    Called on the driver.

    :param schema: the columns of the rows.
    :param reader: reads all of these columns; None without splits.
    :param splits: the number of splits that the reader was made for.
    """
    from pyspark.sql.pandas.types import from_arrow_schema

    with_end = schema.append(pa.field(END, pa.string()))
    columns = from_arrow_schema(with_end, prefer_timestamp_ntz=True)
    if reader is None:
        return spark.createDataFrame([], columns)
    return spark.range(0, splits, 1, splits).mapInArrow(ReadSplits(reader, with_end), columns)


@dataclass(frozen=True)
class ReadSplits(CheckedOnExecutors):
    """The function that Spark maps over the numbers of splits (``mapInArrow``).

    The last row of a split is no row of the source. It has the token of the split, or the error that ended the reading, in the
    column :data:`~airflow_kafka_spark.formats.base.END`. So the task that publishes the rows records the token of exactly these
    rows, even if Spark computes a split twice.

    :param reader: reads a split.
    :param schema: the columns, :data:`END` last.
    """

    reader: SplitReader
    schema: pa.Schema

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self._split(number)

    def _split(self, number: int) -> Iterator[pa.RecordBatch]:
        try:
            for rows in self.reader.read(number):
                yield pa.RecordBatch.from_arrays([*rows.columns, pa.nulls(rows.num_rows, pa.string())], schema=self.schema)
            end = encode_result(SplitResult(number, token=self.reader.get_token(number)))
        except KafkaSparkError as error:
            end = encode_error(error)
        yield pa.RecordBatch.from_pylist([{END: end}], schema=self.schema)
