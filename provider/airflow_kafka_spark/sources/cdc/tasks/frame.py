"""Reading splits of the log as the partitions of a DataFrame, where Spark has to have the rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from airflow_kafka_spark.hooks.spark.tasks.executor_check import CheckedOnExecutors
from airflow_kafka_spark.sources.base import SplitReader


@dataclass(frozen=True)
class ReadSplits(CheckedOnExecutors):
    """The function that Spark maps over the numbers of splits (``mapInArrow``).

    :param reader: reads a split.
    """

    reader: SplitReader

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self.reader.read(number)
