"""Records on their way into a task that publishes them, with the account of what was read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from airflow_kafka_spark.errors import RowsCutOff
from airflow_kafka_spark.formats.internal_columns import END
from airflow_kafka_spark.hooks.tasks.end_of_stream import require_end_of_stream
from airflow_kafka_spark.windows.codec import decode_result
from airflow_kafka_spark.windows.model import SplitResult


class Rejected(Exception):
    """The split holds bad records and must not be published. Reported as a result, so that the driver counts those of all splits.

    :param result: the account of the split, with samples of its bad records.
    """

    def __init__(self, result: SplitResult) -> None:
        super().__init__(f"{result.rejected} bad records")
        self.result = result


@dataclass
class Incoming:
    """The batches of records that a task is to publish.

    :param batches: of records; where they were read from Kafka, with the column :data:`END`.
    :param from_spark: True where Spark hands them over. All of them then have to be taken, and their end is checked.
    :param result: the account of what was read, once all batches are through; None for rows of a source.
    """

    batches: Iterator[pa.RecordBatch]
    from_spark: bool = False
    result: SplitResult | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """:raises RowsCutOff: the task that reads the records has failed before their end.
        :raises KafkaSparkError: the error that ended the reading.
        """
        ends_itself = False
        for batch in require_end_of_stream(self.batches) if self.from_spark else self.batches:
            if END not in batch.schema.names:
                yield batch
                continue
            ends_itself = True
            ends = batch.column(batch.schema.get_field_index(END))
            accounts = ends.drop_null().to_pylist()
            rows = batch.drop_columns([END])
            if accounts:
                self.result = decode_result(accounts[-1])
                rows = rows.filter(ends.is_null())
            if rows.num_rows:
                yield rows
        if ends_itself and self.result is None:
            raise RowsCutOff

    def drain(self) -> None:
        """Take the batches that are left and drop them. Spark requires a task to take all of its input."""
        if self.from_spark:
            for _ in self.batches:
                pass
