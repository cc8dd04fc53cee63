"""Dead letters and routed records: the form in which tasks keep them, and the records that are sent."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.errors import TooManyDeadLetters, TooManyRouted
from airflow_kafka_spark.formats.tasks.kernels import if_else
from airflow_kafka_spark.sinks.kafka.tasks.encode import HEADERS, extend_headers
from airflow_kafka_spark.windows.dead_letters import CONNECT_ERROR_PREFIX, Runs, group_into_runs
from airflow_kafka_spark.windows.model import OUTPUT, BadRecord, TopicPartition

SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.int64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("headers", HEADERS),
        ("stage", pa.string()),
        ("reason", pa.string()),
    ]
)
"""A bad record as it was read, and the reason. ``timestamp`` is in milliseconds since the epoch, -1 for none."""

ROUTED = SCHEMA.append(pa.field("to", pa.string()))
"""A record that is routed to another topic instead of the sink, and the topic."""

LIMIT_BYTES = 64 << 20
"""Maximum size of a window's dead letters, and of its routed records, because they pass through the driver."""

ROUTED_PREFIX = "__kafka_spark.routed."
ROW_PREFIX = "__kafka_spark.errors."
EXCEPTION = "airflow_kafka_spark.errors.BadRecords"
LONGEST_REASON = 2000
"""Maximum length of a reason, in characters. A database's message may contain a whole value, and a letter has it twice."""


def make_dead_letters(bad: Sequence[BadRecord], record: Mapping[str, pa.Array]) -> pa.RecordBatch:
    """Return the dead letters of bad records, with the columns of :data:`SCHEMA`.

    :param bad: the place and the reason of each bad record.
    :param record: ``key``, ``value``, ``headers`` (null without headers) and ``timestamp`` (milliseconds, -1 for none, or a
        timestamp) of each as it was read.
    """
    stamps = record["timestamp"]
    if pa.types.is_timestamp(stamps.type):
        stamps = stamps.cast(pa.timestamp("ms", "UTC"), safe=False).cast(pa.int64())
    columns = {
        "topic": pa.array([b.topic or None for b in bad], pa.string()),
        "partition": pa.array([b.partition for b in bad], pa.int32()),
        "offset": pa.array([b.offset for b in bad], pa.int64()),
        "timestamp": stamps.fill_null(-1),
        "key": record["key"].cast(pa.binary()),
        "value": record["value"].cast(pa.binary()),
        "headers": record["headers"].cast(HEADERS),
        "stage": pa.array([b.stage for b in bad], pa.string()),
        "reason": pa.array([b.reason for b in bad], pa.string()),
    }
    return pa.RecordBatch.from_pydict(columns, schema=SCHEMA)


@dataclass
class DeadLetterBuffer:
    """Collects the dead letters, or the routed records, of one split in a task.

    :param limit: maximum size in bytes.
    :param schema: :data:`SCHEMA` or :data:`ROUTED`.
    """

    limit: int = LIMIT_BYTES
    size: int = 0
    schema: pa.Schema = SCHEMA
    _batches: list[pa.RecordBatch] = field(default_factory=list)

    def add(self, batch: pa.RecordBatch) -> None:
        """Add letters.

        :raises TooManyDeadLetters: their size exceeds the limit; TooManyRouted for routed records.
        """
        if not batch.num_rows:
            return
        self.size += batch.nbytes
        if self.size > self.limit:
            if "to" in self.schema.names:
                raise TooManyRouted(batch.column("to")[0].as_py(), self.limit)
            raise TooManyDeadLetters(batch.column("topic")[0].as_py() or "", self.limit)
        self._batches.append(batch)

    def to_bytes(self) -> bytes:
        """Return the letters as an Arrow stream; empty without any."""
        return to_bytes(pa.Table.from_batches(self._batches, self.schema)) if self._batches else b""


def to_bytes(letters: pa.Table) -> bytes:
    """Return letters as a compressed Arrow stream."""
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, letters.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(letters)
    return stream.getvalue().to_pybytes()


def read_letters(streams: Iterable[bytes], schema: pa.Schema = SCHEMA) -> pa.Table:
    """Return the letters of several splits, sorted by topic, partition and offset.

    :param schema: :data:`SCHEMA` or :data:`ROUTED`.
    """
    tables = [pa.ipc.open_stream(stream).read_all() for stream in streams if stream]
    if not tables:
        return pa.Table.from_batches([], schema)
    return pa.concat_tables(tables).sort_by([("topic", "ascending"), ("partition", "ascending"), ("offset", "ascending")])


def join_streams(*streams: bytes) -> bytes:
    """Return several streams as one; empty if all are."""
    found = [stream for stream in streams if stream]
    return to_bytes(read_letters(found)) if len(found) > 1 else b"".join(found)


def drop_sent(letters: pa.Table, sent: Mapping[TopicPartition, frozenset[int]]) -> pa.Table:
    """Return the letters that were not sent before."""
    if not sent:
        return letters
    places = zip(*(letters[name].to_pylist() for name in ("topic", "partition", "offset")), strict=True)
    new = [offset not in sent.get(TopicPartition(topic, partition), ()) for topic, partition, offset in places]
    return letters.filter(pa.array(new, pa.bool_()))


def collect_offsets(letters: pa.Table) -> dict[TopicPartition, Runs]:
    """Return the offsets of the letters' records, by partition."""
    found: dict[TopicPartition, list[int]] = {}
    for topic, partition, offset in zip(*(letters[name].to_pylist() for name in ("topic", "partition", "offset")), strict=True):
        found.setdefault(TopicPartition(topic, partition), []).append(offset)
    return {tp: group_into_runs(offsets) for tp, offsets in found.items()}


@dataclass(frozen=True)
class Envelope:
    """Adds the headers of a pipeline's dead letters, with the names that Kafka Connect uses (KIP-298).

    :param connector: the pipeline's name. Its ``task.id`` is always 0: each index of a mapped task is a pipeline of its own.
    :param classes: stage -> the class of the converter, transform or sink.
    :param with_context: False: add no headers.
    """

    connector: str
    classes: Mapping[str, str]
    with_context: bool = True

    def make_records(self, letters: pa.Table) -> pa.RecordBatch:
        """Return the records to send: key, value, timestamp and headers as they were read, followed by the context headers."""
        return _make_records(letters, self._make_context_headers if self.with_context else None)

    def make_origin_headers(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return the headers with the place at which the record of a letter was read.

        :param row: the columns of a batch of letters.
        :return: header name -> an array, or one value for all letters.
        """
        return {CONNECT_ERROR_PREFIX + name: value for name, value in locate_record(row).items()}

    def _make_context_headers(self, row: Mapping[str, Any]) -> dict[str, Any]:
        stages, reasons = row["stage"].dictionary_encode(), _shorten(row["reason"])
        known = stages.dictionary.to_pylist()
        facts = {
            "connector.name": self.connector,
            "task.id": 0,
            "stage": pa.array([stage.removesuffix(OUTPUT) for stage in known], pa.string()).take(stages.indices),
            "class.name": pa.array([self.classes.get(stage, "") for stage in known], pa.string()).take(stages.indices),
            "exception.class.name": EXCEPTION,
            "exception.message": reasons,
            "exception.stacktrace": pc.binary_join_element_wise(f"{EXCEPTION}:", reasons, " "),
        }
        return self.make_origin_headers(row) | {CONNECT_ERROR_PREFIX + name: value for name, value in facts.items()}


@dataclass(frozen=True)
class RowEnvelope(Envelope):
    """Adds headers to the dead letters of a source: those of Connect, with source, window, split and row in place of topic,
    partition and offset.

    :param source: the source's URI.
    :param window: the window's name.
    """

    source: str = ""
    window: str = ""

    def make_origin_headers(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {ROW_PREFIX + name: value for name, value in locate_row(self.source, self.window, row).items()}


def _shorten(reasons: pa.StringArray) -> pa.StringArray:
    long = pc.greater(pc.utf8_length(reasons), LONGEST_REASON)
    if not pc.any(long).as_py():
        return reasons
    cut = pc.utf8_slice_codeunits(reasons, 0, LONGEST_REASON)
    return if_else(long, pc.binary_join_element_wise(cut, "...", ""), reasons)


def locate_record(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return topic, partition and offset of records."""
    return {name: row[name] for name in ("topic", "partition", "offset")}


def locate_row(source: str, window: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that identify rows of a source: its URI, the window, the split and each row's position there, from 1.

    :param row: the columns of a batch of dead letters.
    """
    return {"source": source, "window": window, "split": row["partition"], "row": row["offset"]}


def make_routed_records(
    routed: pa.Table, pipeline: str, locate: Callable[[Mapping[str, Any]], dict[str, Any]] = locate_record
) -> pa.RecordBatch:
    """Return the records to send to other topics: unchanged, with further headers that have the reason.

    :param locate: returns the positions at which records were read, as headers, for the columns of a batch.
    """

    def make_context(row: Mapping[str, Any]) -> dict[str, Any]:
        facts = locate(row) | {"pipeline": pipeline, "reason": row["reason"]}
        return {ROUTED_PREFIX + name: value for name, value in facts.items()}

    return _make_records(routed, make_context)


def _make_records(letters: pa.Table, context: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None) -> pa.RecordBatch:
    batch = letters.combine_chunks().to_batches()[0]
    headers = batch.column("headers")
    if context is not None:
        headers = extend_headers(headers, context(dict(zip(batch.schema.names, batch.columns, strict=True))))
    stamps = if_else(pc.less(batch.column("timestamp"), 0), pa.scalar(None, pa.int64()), batch.column("timestamp"))
    return pa.RecordBatch.from_arrays(
        [batch.column("key"), batch.column("value"), stamps, headers], ["key", "value", "timestamp", "headers"]
    )
