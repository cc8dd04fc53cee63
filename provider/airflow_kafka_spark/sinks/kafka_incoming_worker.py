"""What a task is given to publish: batches of records, and for those read from Kafka the account of the reading."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from airflow_kafka_spark.errors import RowsCutOff
from airflow_kafka_spark.formats.marks import END
from airflow_kafka_spark.hooks.tasks.end_of_stream import require_end_of_stream
from airflow_kafka_spark.windows.codec import decode_result
from airflow_kafka_spark.windows.model import SplitResult


@dataclass
class Incoming:
    """What is to be published, on its way in.

    :param batches: of records; where they were read from Kafka, with the column :data:`END`.
    :param from_spark: Spark hands them over: it wants all of them taken, and their end has to be looked at.
    :param result: once they are through, the account of what was read; None for rows of a source.
    """

    batches: Iterator[pa.RecordBatch]
    from_spark: bool = False
    result: SplitResult | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """:raises RowsCutOff: what feeds this has failed in the middle.
        :raises KafkaSparkError: the error that ended the reading.
        """
        ends_itself = False
        for batch in require_end_of_stream(self.batches) if self.from_spark else self.batches:
            if END not in batch.schema.names:
                yield batch
                continue
            ends_itself = True
            ends = batch.column(batch.schema.get_field_index(END))
            told = ends.drop_null().to_pylist()
            rows = batch.drop_columns([END])
            if told:
                self.result = decode_result(told[-1])
                rows = rows.filter(ends.is_null())
            if rows.num_rows:
                yield rows
        if ends_itself and self.result is None:
            raise RowsCutOff

    def drain(self) -> None:
        """Take what is left, where that has to be."""
        if self.from_spark:
            for _ in self.batches:
                pass


class Rejected(Exception):
    """Bad records were read: the split must not be published. Ends as a result, so that the driver hears of all of them."""

    def __init__(self, result: SplitResult) -> None:
        super().__init__(f"{result.rejected} bad records")
        self.result = result
