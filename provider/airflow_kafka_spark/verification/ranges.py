"""Comparison by ranges of the key, where both databases sort its values the same way and have an index for it.

The key range of the source is divided into chunks along its index, while earlier chunks are compared. A chunk whose sums differ
is divided further, until it is small enough to be read from both sides.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from airflow_kafka_spark.verification.database_side import Chunk, DatabaseSide
from airflow_kafka_spark.verification.forms import Sums
from airflow_kafka_spark.verification.report import Findings
from airflow_kafka_spark.verification.work import ProgressLog, Work

log = logging.getLogger(__name__)

FAN_OUT = 16
"""Number of parts into which a differing chunk is divided."""
READ_ROWS = 10_000
"""Maximum number of rows of a chunk that is read without a further division."""


@dataclass
class ScanState:
    """The progress of a comparison along the key.

    :param after: the last key of the last chunk up to which all chunks are compared.
    :param source_rows: number of the source's rows in these chunks.
    :param sink_rows: number of the sink's rows in these chunks.
    :param chunks: number of these chunks.
    :param differing: the chunks that differ.
    """

    after: tuple[str, ...] | None = None
    source_rows: int = 0
    sink_rows: int = 0
    chunks: int = 0
    differing: list[Chunk] = field(default_factory=list)

    def add(self, chunk: Chunk, source: Sums, sink: Sums) -> None:
        """Count a chunk that is compared."""
        self.after = chunk.upto
        self.source_rows += source.rows
        self.sink_rows += sink.rows
        self.chunks += 1
        if source != sink:
            self.differing.append(chunk)

    def to_json(self) -> dict[str, Any]:
        """Return the progress as JSON, for the saved state of a task."""
        return {
            "after": self.after and list(self.after),
            "source_rows": self.source_rows,
            "sink_rows": self.sink_rows,
            "chunks": self.chunks,
            "differing": [chunk.to_json() for chunk in self.differing],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ScanState:
        """Return the progress from the result of :meth:`to_json`."""
        differing = [Chunk.from_json(chunk) for chunk in value["differing"]]
        after = value["after"]
        return cls(None if after is None else tuple(after), value["source_rows"], value["sink_rows"], value["chunks"], differing)


@dataclass(frozen=True)
class RangeComparison:
    """Compares two tables by ranges of the key.

    :param source: the table with the expected rows.
    :param sink: the table that is compared with it.
    :param work: runs the comparisons.
    :param chunk_rows: number of rows of a chunk.
    """

    source: DatabaseSide
    sink: DatabaseSide
    work: Work
    chunk_rows: int

    def scan(self, state: ScanState, saved: Callable[[ScanState], None]) -> None:
        """Compare the chunks that follow those of ``state``, and update the state.

        :param saved: called from time to time with the state, from which a later attempt can continue.
        """
        with self.source.session("asking for the number of rows") as session:
            progress = ProgressLog(self.source.estimate_rows(session), state.source_rows)
        for chunk, (source, sink) in self.work.map_concurrently(self.compute_sums, self._list_chunks(state)):
            state.add(chunk, source, sink)
            progress.add(source.rows)
            if source != sink:
                log.info("Rows differ behind %s up to %s: %s, %s", chunk.after, chunk.upto, source, sink)
            if state.after is not None:
                saved(state)

    def _list_chunks(self, state: ScanState) -> Iterator[Chunk]:
        if (self.source.has_nulls() or self.sink.has_nulls()) and state.after is None:
            yield Chunk(nulls=True)
        yield from self._cut(Chunk(state.after), self.source, self.chunk_rows)

    def _cut(self, chunk: Chunk, side: DatabaseSide, size: int) -> Iterator[Chunk]:
        """Yield chunks of that many rows of ``side``. The last chunk has no upper bound."""
        after = chunk.after
        while True:
            rest = Chunk(after, chunk.upto)
            end = self.work.run_with_retries(partial(self._end, side, rest, size))
            if end is None or end == chunk.upto:
                yield rest
                return
            yield Chunk(after, end)
            after = end

    @staticmethod
    def _end(side: DatabaseSide, chunk: Chunk, size: int) -> tuple[str, ...] | None:
        with side.session("cutting a chunk") as session:
            return side.end_of(session, chunk, size)

    def compute_sums(self, chunk: Chunk) -> tuple[Sums, Sums]:
        """Return the sums of a chunk in the source and in the sink."""
        with self.source.session("adding up a chunk of the source") as session:
            source = self.source.compute_sums(session, chunk)
        with self.sink.session("adding up a chunk of the sink") as session:
            return source, self.sink.compute_sums(session, chunk)

    def find_differing(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return the chunks that still differ."""
        return [chunk for chunk, (source, sink) in self.work.map_concurrently(self.compute_sums, chunks) if source != sink]

    def name_differences(self, chunks: list[Chunk], findings: Findings) -> None:
        """Find the rows that differ in these chunks."""
        for chunk in chunks:
            self._name(chunk, findings)

    def _name(self, chunk: Chunk, findings: Findings) -> None:
        source, sink = self.work.run_with_retries(lambda: self.compute_sums(chunk))
        if source == sink:
            return
        larger, rows = (self.source, source.rows) if source.rows >= sink.rows else (self.sink, sink.rows)
        if rows > READ_ROWS and not chunk.nulls:
            pieces = list(self._cut(chunk, larger, max(READ_ROWS // 2, -(-rows // FAN_OUT))))
            # Rows with equal keys cannot be divided.
            if len(pieces) > 1:
                self.name_differences(self.find_differing(pieces), findings)
                return
        self.work.run_with_retries(lambda: self._read(chunk, findings))

    def _read(self, chunk: Chunk, findings: Findings) -> None:
        with self.source.session("reading a chunk of the source") as session:
            source = list(self.source.read_rows(session, chunk))
        with self.sink.session("reading a chunk of the sink") as session:
            sink = list(self.sink.read_rows(session, chunk))
        findings.compare(source, sink)
