"""What Spark's tasks do where they read a source by themselves: read a split, encode it, publish it, all in one Python stage.

Runs on executors: imports neither Airflow nor pyspark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_kafka_spark.sinks.kafka.tasks.incoming import Incoming
from airflow_kafka_spark.sinks.kafka.tasks.publish import Publisher, publish_split

if TYPE_CHECKING:
    from airflow_kafka_spark.sinks.kafka.tasks.encode import RecordEncoder
    from airflow_kafka_spark.sources.base import SplitReader


@dataclass(frozen=True)
class ReadAndPublishTask:
    """The function that Spark maps over the numbers of splits (``mapInArrow``).

    :param reader: reads them. It holds passwords: it travels to the executors inside the pickled task only.
    :param encoder: makes records of the rows.
    :param publisher: publishes them.
    :param splits: the indexes of the splits that are left to publish.
    """

    reader: SplitReader
    encoder: RecordEncoder
    publisher: Publisher
    splits: tuple[int, ...]

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for at in batch.column(0).to_pylist():
                records = map(self.encoder.encode, self.reader.read(at))
                yield publish_split(self.publisher, self.splits[at], Incoming(records))
