"""Read splits of a log, in a Spark task or as partitions of a DataFrame: events become Arrow batches of a few megabytes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from airflow_kafka_spark.formats.base import Kind
from airflow_kafka_spark.sources.base import SplitReader
from airflow_kafka_spark.sources.cdc.tasks.events import Event

COLUMNS: tuple[tuple[str, Kind], ...] = (("topic", "text"), ("key", "binary"), ("value", "binary"), ("timestamp", "integer"))
"""The columns of an event, and their kinds."""

SCHEMA = pa.schema([("topic", pa.string()), ("key", pa.binary()), ("value", pa.binary()), ("timestamp", pa.int64())])

BATCH_BYTES = 4 << 20
"""Approximate size in bytes of the values that a task holds in memory."""
BATCH_ROWS = 10_000


@dataclass(frozen=True)
class EventReader(SplitReader):
    """Reads splits whose rows are events.

    :param splits: per split its bounds (JSON).
    :param needed: the columns that are needed.
    """

    splits: tuple[Mapping[str, Any], ...]
    needed: tuple[str, ...]
    _tokens: dict[int, Mapping[str, Any]] = field(default_factory=dict, init=False, repr=False, compare=False)

    columns: tuple[tuple[str, Kind], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        kinds: Mapping[str, Kind] = {"key": "connect", "value": "connect"} if self.has_schemas else {}
        columns = tuple((name, kinds.get(name, kind)) for name, kind in COLUMNS if name in self.needed)
        object.__setattr__(self, "columns", columns)

    @property
    @abstractmethod
    def has_schemas(self) -> bool:
        """True if keys and values carry their schema."""

    @abstractmethod
    def _read_log(self, split: int, bounds: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        """Yield the events of a window of the log, with the columns of :data:`SCHEMA`. Sets the split's token in ``_tokens`` if
        the source needs one."""

    @abstractmethod
    def _read_rows(self, split: int, bounds: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        """Yield the events of a chunk of a table, with the columns of :data:`SCHEMA`. Sets the split's token in ``_tokens``."""

    def read(self, split: int) -> Iterator[pa.RecordBatch]:
        """Yield the events of a split, in the order of the log.

        :raises SourceUnavailable: the server does not answer, does not send the whole window, or its slot is in use.
        :raises SourceRejected: the server no longer has the window, or a value cannot be written.
        """
        names, bounds = [name for name, _ in self.columns], self.splits[split]
        found = self._read_rows(split, bounds) if "table" in bounds else self._read_log(split, bounds)
        for batch in found:
            yield batch.select(names)

    def get_token(self, split: int) -> Mapping[str, Any]:
        """Return the token that :meth:`read` has set for a split."""
        return self._tokens.get(split, {})


class EventRange(NamedTuple):
    """Consecutive events of a batch.

    :param batch: a batch with the columns of :data:`SCHEMA`.
    :param start: the index of the first event.
    :param stop: the index after the last one.
    :param size: the average size of an event in bytes.
    """

    batch: pa.RecordBatch
    start: int
    stop: int
    size: int

    @property
    def rows(self) -> int:
        """The number of events."""
        return self.stop - self.start


def batch_events(events: Iterable[Event | EventRange]) -> Iterator[pa.RecordBatch]:
    """Yield events in batches of a few megabytes, in their order."""
    parts: list[Event | EventRange] = []
    size = rows = 0
    for part in events:
        if isinstance(part, EventRange):
            last = parts[-1] if parts else None
            if isinstance(last, EventRange) and last.batch is part.batch and last.stop == part.start:
                parts[-1] = EventRange(last.batch, last.start, part.stop, last.size)
            else:
                parts.append(part)
            rows += part.rows
            size += part.rows * part.size
        else:
            parts.append(part)
            rows += 1
            size += len(part.value or b"") + len(part.key or b"")
        if size > BATCH_BYTES or rows >= BATCH_ROWS:
            yield _join_parts(parts)
            parts, size, rows = [], 0, 0
    if rows:
        yield _join_parts(parts)


def _join_parts(parts: Sequence[Event | EventRange]) -> pa.RecordBatch:
    """Return events as one batch."""
    single = [part for part in parts if isinstance(part, Event)]
    if len(single) == len(parts):
        return make_batch(single)
    if len(parts) == 1 and isinstance(parts[0], EventRange):
        return parts[0].batch.slice(parts[0].start, parts[0].rows)
    batches = [make_batch(single)] if single else []
    begins, indexes, rows, at = dict[int, int](), list[np.ndarray](), len(single), 0
    for part in parts:
        if isinstance(part, Event):
            indexes.append(np.arange(at, at + 1))
            at += 1
            continue
        if (begin := begins.get(id(part.batch))) is None:
            begin = begins[id(part.batch)] = rows
            batches.append(part.batch)
            rows += part.batch.num_rows
        indexes.append(np.arange(begin + part.start, begin + part.stop))
    order = pa.array(np.concatenate(indexes))
    return pa.Table.from_batches(batches).take(order).combine_chunks().to_batches()[0]


def make_batch(events: Sequence[Event]) -> pa.RecordBatch:
    """Return events as a batch with the columns of :data:`SCHEMA`."""
    columns = zip(*events, strict=True)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def list_needed_columns(needed: Sequence[str] | None) -> tuple[str, ...]:
    """Return the columns that are needed, in their order."""
    return tuple(name for name, _ in COLUMNS if needed is None or name in needed)
