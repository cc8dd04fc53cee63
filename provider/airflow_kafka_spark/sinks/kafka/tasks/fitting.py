"""Keys and values that arrive as rows become bytes; those that do not fit their format are set apart. Runs in Spark's tasks.

A row of a source that does not fit is no record yet, so its dead letter shows it as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from airflow_kafka_spark.formats.base import StructEncoder
from airflow_kafka_spark.formats.shown_write_worker import shown
from airflow_kafka_spark.sinks.kafka.tasks.headers import HEADERS
from airflow_kafka_spark.sinks.kafka.tasks.incoming import Incoming
from airflow_kafka_spark.sinks.tasks.dead_letters import SCHEMA, Envelope, Letters
from airflow_kafka_spark.windows.model import KEY_CONVERTER, SAMPLES, VALUE_CONVERTER, BadRecord, SplitResult

ROW_PREFIX = "__kafka_spark.errors."

Misfits = Mapping[int, tuple[str, str]]
"""Where among rows those are that do not fit: stage and reason of each."""


@dataclass(frozen=True)
class Fitting:
    """Makes bytes of rows.

    :param encoders: of ``key`` and ``value``, where these arrive as rows.
    """

    encoders: Mapping[str, StructEncoder]

    def of(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Misfits]:
        """The batch with keys and values in binary, and what of it cannot be written: null where it is."""
        found: dict[int, tuple[str, str]] = {}
        # The key first, as Connect does it: of a row that fits neither way it is the key that is told.
        for part, stage, called in (("key", KEY_CONVERTER, "key: "), ("value", VALUE_CONVERTER, "")):
            if part not in self.encoders:
                continue
            at = batch.schema.get_field_index(part)
            made = self.encoders[part].encode_struct(batch.column(at))
            batch = batch.set_column(at, part, made.values)
            for row, reason in made.bad:
                found.setdefault(row, (stage, called + reason))
        return batch, dict(sorted(found.items()))


def without(batch: pa.RecordBatch, misfits: Misfits) -> pa.RecordBatch:
    """The rows that fit."""
    if not misfits:
        return batch
    return batch.filter(pa.array([at not in misfits for at in range(batch.num_rows)], pa.bool_()))


@dataclass
class Rows(Incoming):
    """A source's rows on their way in, encoded; those that do not fit are counted and, where that is wanted, kept as letters.

    The account of them is :attr:`result`; a bad one is told by its split and its place there.

    :param split: which split they are.
    :param fitting: makes records of them.
    :param keep: whether those that do not fit are wanted as dead letters.
    :param tolerant: whether the others are published without them; else nothing is, and the rest is only counted.
    """

    split: int = field(kw_only=True)
    fitting: Fitting = field(kw_only=True)
    keep: bool = field(default=False, kw_only=True)
    tolerant: bool = field(default=False, kw_only=True)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        read = rejected = filtered = routed = 0
        samples: list[BadRecord] = []
        letters = Letters()
        for batch in super().__iter__():
            made, misfits = self.made(batch)
            bad = [BadRecord("", self.split, read + at + 1, reason, stage) for at, (stage, reason) in misfits.items()]
            samples += bad[: SAMPLES - len(samples)]
            if self.keep and bad:
                at = pa.array(misfits, pa.int64())
                letters.add(letters_of(*self.shown(batch.take(at), made.take(at)), bad))
            good, away = self.records(without(made, misfits)), self.elsewhere(batch, read)
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

    # --- what is different behind transforms ---

    def made(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Misfits]:
        """Rows with keys and values in binary, and which of them are bad, in order."""
        return self.fitting.of(batch)

    def records(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """What is sent of good rows."""
        return rows

    def elsewhere(self, batch: pa.RecordBatch, read: int) -> pa.RecordBatch:
        """What goes to another topic instead, as records, with the topic of each.

        :param read: how many rows came before these.
        """
        return _NONE

    def shown(self, rows: pa.RecordBatch, made: pa.RecordBatch) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """What dead letters are made of: bad rows, and what of them could be written."""
        return rows, made


_NONE = pa.RecordBatch.from_pylist([], schema=pa.schema([]))


def letters_of(rows: pa.RecordBatch, records: pa.RecordBatch, bad: Sequence[BadRecord]) -> pa.RecordBatch:
    """Dead letters of rows that do not fit.

    :param rows: the rows.
    :param records: what was made of them.
    :param bad: why each is bad.
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
    """What can be shown of rows: columns of the value, and those of the key that it lacks; or the value, where it is bytes."""
    if not pa.types.is_struct(values.type):
        return values
    columns = [(f.name, values.field(at)) for at, f in enumerate(values.type)]
    if pa.types.is_struct(keys.type):
        known = {name for name, _ in columns}
        columns += [(f.name, keys.field(at)) for at, f in enumerate(keys.type) if f.name not in known]
    return pa.array(shown(columns), pa.binary())


@dataclass(frozen=True)
class RowEnvelope(Envelope):
    """What is written on dead letters of a source: Connect's headers, but for those that say where a record was read; in their
    place the source, the window, the split and the row's place there.

    :param source: its URI.
    :param window: the window.
    """

    source: str = ""
    window: str = ""

    def place(self, row: Mapping[str, Any]) -> dict[str, Any]:
        return {ROW_PREFIX + name: value for name, value in row_place(self.source, self.window, row).items()}


def row_place(source: str, window: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Where rows come from: the source, the window, the split and each row's place there, from 1.

    :param row: the columns of many letters.
    """
    return {"source": source, "window": window, "split": row["partition"], "row": row["offset"]}
