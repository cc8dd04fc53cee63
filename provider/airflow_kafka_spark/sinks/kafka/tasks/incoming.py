"""Records on their way into a task that publishes them, with the account of what was read.

:class:`Incoming` is for records that were read from Kafka, :class:`SourceRows` for the rows of a source. A row that cannot be
encoded is no record yet, so its dead letter shows it as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from airflow_kafka_spark.errors import RowsCutOff
from airflow_kafka_spark.formats.internal_columns import END
from airflow_kafka_spark.formats.tasks.text import rows_as_json
from airflow_kafka_spark.hooks.tasks.end_of_stream import require_end_of_stream
from airflow_kafka_spark.sinks.kafka.tasks.encode import BadRows, KeyValueEncoder, drop_rows
from airflow_kafka_spark.sinks.kafka.tasks.headers import HEADERS
from airflow_kafka_spark.sinks.tasks.dead_letters import SCHEMA, DeadLetterBuffer, Envelope
from airflow_kafka_spark.windows.codec import decode_result
from airflow_kafka_spark.windows.model import SAMPLES, BadRecord, SplitResult

ROW_PREFIX = "__kafka_spark.errors."


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


@dataclass
class SourceRows(Incoming):
    """The rows of a source, encoded as records. Rows that cannot be encoded are counted and, if wanted, kept as dead letters.

    The account of the split is :attr:`result`. A bad row is identified by its split and its position there, from 1.

    :param split: the split's index.
    :param encoder: encodes keys and values.
    :param keep: True where bad rows are kept as dead letters.
    :param tolerant: True where the other rows are published without them. Otherwise nothing is yielded after the first bad row,
        and the rest of the split is only counted.
    """

    split: int = field(kw_only=True)
    encoder: KeyValueEncoder = field(kw_only=True)
    keep: bool = field(default=False, kw_only=True)
    tolerant: bool = field(default=False, kw_only=True)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        read = rejected = filtered = routed = 0
        samples: list[BadRecord] = []
        letters = DeadLetterBuffer()
        for batch in super().__iter__():
            made, misfits = self.made(batch)
            bad = [BadRecord("", self.split, read + at + 1, reason, stage) for at, (stage, reason) in misfits.items()]
            samples += bad[: SAMPLES - len(samples)]
            if self.keep and bad:
                at = pa.array(misfits, pa.int64())
                letters.add(letters_of_rows(*self.shown(batch.take(at), made.take(at)), bad))
            good, away = self.records(drop_rows(made, misfits)), self.elsewhere(batch, read)
            read += batch.num_rows
            rejected += len(bad)
            routed += away.num_rows
            filtered += batch.num_rows - len(bad) - good.num_rows - away.num_rows
            yield from (records for records in (good, away) if records.num_rows and (self.tolerant or not rejected))
        self.result = SplitResult(
            self.split,
            read,
            rejected=rejected,
            filtered=filtered,
            samples=tuple(samples),
            letters=letters.to_bytes(),
            routed=routed,
        )

    # --- what a source with transforms overrides ---

    def made(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, BadRows]:
        """Return the rows with keys and values in binary, and the bad ones among them in order."""
        return self.encoder.encode(batch)

    def records(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Return the records that good rows become."""
        return rows

    def elsewhere(self, batch: pa.RecordBatch, read: int) -> pa.RecordBatch:
        """Return the records that transforms route to another topic, each with its topic.

        :param read: how many rows of the split came before this batch.
        """
        return _NONE

    def shown(self, rows: pa.RecordBatch, made: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Return the two batches that dead letters are made of: the bad rows, and what could be encoded of them."""
        return rows, made


_NONE = pa.RecordBatch.from_pylist([], schema=pa.schema([]))


# --- dead letters of rows ---------------------------------------------------------------------------------------------


def letters_of_rows(rows: pa.RecordBatch, records: pa.RecordBatch, bad: Sequence[BadRecord]) -> pa.RecordBatch:
    """Return the dead letters of rows that cannot be encoded, with the columns of :data:`SCHEMA`.

    :param rows: the rows as the source has them.
    :param records: what could be encoded of them.
    :param bad: why each of them is bad.
    """
    given, made = (dict(zip(batch.schema.names, batch.columns, strict=True)) for batch in (rows, records))
    nothing = pa.nulls(len(bad), pa.string())
    columns = {
        "topic": nothing,
        "partition": pa.array([b.partition for b in bad], pa.int32()),
        "offset": pa.array([b.offset for b in bad], pa.int64()),
        "timestamp": made.get("timestamp", pa.nulls(len(bad), pa.int64())).fill_null(-1),
        "key": made["key"],
        "value": _texts(given["key"], given["value"]),
        "headers": made["headers"].cast(HEADERS) if "headers" in made else pa.nulls(len(bad), HEADERS),
        "stage": pa.array([b.stage for b in bad], pa.string()),
        "reason": pa.array([b.reason for b in bad], pa.string()),
    }
    return pa.RecordBatch.from_pydict(columns, schema=SCHEMA)


def _texts(keys: pa.Array, values: pa.Array) -> pa.Array:
    """Return rows as JSON: the columns of the value, and those of the key that the value lacks. A binary value stays as it is."""
    if not pa.types.is_struct(values.type):
        return values
    columns = [(f.name, values.field(at)) for at, f in enumerate(values.type)]
    if pa.types.is_struct(keys.type):
        known = {name for name, _ in columns}
        columns += [(f.name, keys.field(at)) for at, f in enumerate(keys.type) if f.name not in known]
    return pa.array(rows_as_json(columns), pa.binary())


@dataclass(frozen=True)
class RowEnvelope(Envelope):
    """Adds headers to the dead letters of a source: those of Connect, with source, window, split and row in place of topic,
    partition and offset.

    :param source: the source's URI.
    :param window: the window's name.
    """

    source: str = ""
    window: str = ""

    def place(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {ROW_PREFIX + name: value for name, value in row_place(self.source, self.window, row).items()}


def row_place(source: str, window: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that identify rows of a source: its URI, the window, the split and each row's position there, from 1.

    :param row: the columns of a batch of dead letters.
    """
    return {"source": source, "window": window, "split": row["partition"], "row": row["offset"]}
