"""Read the splits of any source as partitions of a DataFrame, without Spark's readers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.formats.base import END
from airflow_kafka_spark.hooks.spark.tasks.executor_check import CheckedOnExecutors
from airflow_kafka_spark.sources.base import SplitReader
from airflow_kafka_spark.windows.codec import encode_error, encode_result
from airflow_kafka_spark.windows.model import SplitResult


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
