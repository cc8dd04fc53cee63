"""Dead letters on their way: what a task keeps of a bad record, and what is sent of it. Imports neither Airflow nor pyspark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.errors import TooManyDeadLetters, TooManyRouted
from airflow_kafka_spark.sinks.kafka.tasks.headers import HEADERS, extended
from airflow_kafka_spark.windows.dead_letters import Runs, runs_of
from airflow_kafka_spark.windows.model import OUTPUT, TopicPartition

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
"""A bad record as it was read, and why it is bad; ``timestamp`` in milliseconds since the epoch, -1 for none."""

ROUTED = SCHEMA.append(pa.field("to", pa.string()))
"""A record that goes to another topic instead of the sink, and which one that is."""

LIMIT_BYTES = 64 << 20
"""Of one window's dead letters, and of what it routes elsewhere: they pass through the driver."""

PREFIX = "__connect.errors."
ROUTED_PREFIX = "__kafka_spark.routed."
EXCEPTION = "airflow_kafka_spark.errors.BadRecords"
LONGEST_REASON = 2000
"""Characters: what a database says of a value may hold all of it, and a letter has it twice."""


@dataclass
class DeadLetterBuffer:
    """Collects the dead letters of one split, in a task; or what it routes elsewhere.

    :param limit: bytes of keys, values and headers at most.
    :param schema: :data:`SCHEMA` or :data:`ROUTED`.
    """

    limit: int = LIMIT_BYTES
    size: int = 0
    schema: pa.Schema = SCHEMA
    _batches: list[pa.RecordBatch] = field(default_factory=list)

    def add(self, batch: pa.RecordBatch) -> None:
        """:raises TooManyDeadLetters: they are more than may pass through the driver; TooManyRouted likewise."""
        if not batch.num_rows:
            return
        self.size += batch.nbytes
        if self.size > self.limit:
            if "to" in self.schema.names:
                raise TooManyRouted(batch.column("to")[0].as_py(), self.limit)
            raise TooManyDeadLetters(batch.column("topic")[0].as_py() or "", self.limit)
        self._batches.append(batch)

    def to_bytes(self) -> bytes:
        """As an Arrow stream; empty without any."""
        return to_bytes(pa.Table.from_batches(self._batches, self.schema)) if self._batches else b""


def to_bytes(letters: pa.Table) -> bytes:
    stream = pa.BufferOutputStream()
    with pa.ipc.new_stream(stream, letters.schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(letters)
    return stream.getvalue().to_pybytes()


def from_bytes(streams: Iterable[bytes], schema: pa.Schema = SCHEMA) -> pa.Table:
    """The dead letters of several splits, in the order of topic, partition and offset.

    :param schema: theirs.
    """
    tables = [pa.ipc.open_stream(stream).read_all() for stream in streams if stream]
    if not tables:
        return schema.empty_table()
    return pa.concat_tables(tables).sort_by([("topic", "ascending"), ("partition", "ascending"), ("offset", "ascending")])


def joined(*streams: bytes) -> bytes:
    """Several streams as one; empty where all are."""
    found = [stream for stream in streams if stream]
    return to_bytes(from_bytes(found)) if len(found) > 1 else b"".join(found)


def without(letters: pa.Table, sent: Mapping[TopicPartition, frozenset[int]]) -> pa.Table:
    """Those that were not sent yet."""
    if not sent:
        return letters
    places = zip(*(letters[name].to_pylist() for name in ("topic", "partition", "offset")), strict=True)
    new = [offset not in sent.get(TopicPartition(topic, partition), ()) for topic, partition, offset in places]
    return letters.filter(pa.array(new, pa.bool_()))


def offsets_of(letters: pa.Table) -> dict[TopicPartition, Runs]:
    """Which records they are, by partition."""
    found: dict[TopicPartition, list[int]] = {}
    for topic, partition, offset in zip(*(letters[name].to_pylist() for name in ("topic", "partition", "offset")), strict=True):
        found.setdefault(TopicPartition(topic, partition), []).append(offset)
    return {tp: runs_of(offsets) for tp, offsets in found.items()}


@dataclass(frozen=True)
class Envelope:
    """What is written on every dead letter of a pipeline, in Connect's words (KIP-298).

    :param connector: the pipeline's name. It has one task, 0: each index of a mapped task is a pipeline of its own.
    :param classes: the class of the converter, transform or sink, by stage.
    :param with_context: whether anything is written on them.
    """

    connector: str
    classes: Mapping[str, str]
    with_context: bool = True

    def records(self, letters: pa.Table) -> pa.RecordBatch:
        """The records that are sent: key, value, headers and timestamp as they were, and the context behind the headers."""
        return _records(letters, self._context if self.with_context else None)

    def place(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The headers that say where a letter's record was read.

        :param row: the columns of many letters.
        :return: for each header an array, or one value for all letters.
        """
        return {PREFIX + name: value for name, value in place_of(row).items()}

    def _context(self, row: Mapping[str, Any]) -> dict[str, Any]:
        stages, reasons = row["stage"].dictionary_encode(), _shortened(row["reason"])
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
        return self.place(row) | {PREFIX + name: value for name, value in facts.items()}


def _shortened(reasons: pa.StringArray) -> pa.StringArray:
    long = pc.greater(pc.utf8_length(reasons), LONGEST_REASON)
    if not pc.any(long).as_py():
        return reasons
    cut = pc.utf8_slice_codeunits(reasons, 0, LONGEST_REASON)
    return pc.if_else(long, pc.binary_join_element_wise(cut, "...", ""), reasons)


def place_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Where a record was read."""
    return {name: row[name] for name in ("topic", "partition", "offset")}


def routed_records(
    routed: pa.Table, pipeline: str, place: Callable[[Mapping[str, Any]], dict[str, Any]] = place_of
) -> pa.RecordBatch:
    """The records that go elsewhere: as they were, and behind their headers why they are there.

    :param place: what says where they come from, of the columns of many.
    """

    def context(row: Mapping[str, Any]) -> dict[str, Any]:
        facts = place(row) | {"pipeline": pipeline, "reason": row["reason"]}
        return {ROUTED_PREFIX + name: value for name, value in facts.items()}

    return _records(routed, context)


def _records(letters: pa.Table, context: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None) -> pa.RecordBatch:
    batch = letters.combine_chunks().to_batches()[0]
    headers = batch.column("headers")
    if context is not None:
        headers = extended(headers, context(dict(zip(batch.schema.names, batch.columns, strict=True))))
    stamps = pc.if_else(pc.less(batch.column("timestamp"), 0), pa.scalar(None, pa.int64()), batch.column("timestamp"))
    return pa.RecordBatch.from_arrays(
        [batch.column("key"), batch.column("value"), stamps, headers], ["key", "value", "timestamp", "headers"]
    )
