"""Runs a verification from its plan to its report: by ranges of the key, or by buckets of its hash (``buckets.py``).

A comparison by ranges needs a key whose values both databases sort the same way, with an index. The key range of the source is
divided into chunks along its index, while earlier chunks are compared. A chunk whose sums differ is divided further, until it is
small enough to be read from both sides. The state of the comparison is saved, and a retry continues from it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from airflow_kafka_spark.hooks.task_state import TaskStateStore
from airflow_kafka_spark.verification.buckets import BucketComparison
from airflow_kafka_spark.verification.concurrency import ConcurrentWork, ProgressLog
from airflow_kafka_spark.verification.database_side import Chunk, DatabaseSide
from airflow_kafka_spark.verification.forms import Sums
from airflow_kafka_spark.verification.plan import VerificationOptions, VerificationPlan
from airflow_kafka_spark.verification.report import Findings, VerificationReport

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
    """

    source: DatabaseSide
    sink: DatabaseSide
    work: ConcurrentWork

    def scan(self, state: ScanState, saved: Callable[[ScanState], None]) -> None:
        """Compare the chunks that follow those of ``state``, and update the state.

        :param saved: called from time to time with the state, from which a later attempt can continue.
        """
        with self.source.open_session("asking for the number of rows") as session:
            rows = self.source.estimate_rows(session)
        progress, chunks = ProgressLog(rows, state.source_rows), self._list_chunks(state, self.source.choose_piece_rows(rows))
        for chunk, (source, sink) in self.work.map_concurrently(self.compute_sums, chunks):
            state.add(chunk, source, sink)
            progress.add(source.rows)
            if source != sink:
                log.info("A chunk differs: rows %s. The source has %d rows in it, the sink %d", chunk, source.rows, sink.rows)
            if state.after is not None:
                saved(state)

    def _list_chunks(self, state: ScanState, size: int) -> Iterator[Chunk]:
        if (self.source.has_nulls() or self.sink.has_nulls()) and state.after is None:
            yield Chunk(nulls=True)
        yield from self._cut(Chunk(state.after), self.source, size)

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
        with side.open_session("cutting a chunk") as session:
            return side.end_of(session, chunk, size)

    def compute_sums(self, chunk: Chunk) -> tuple[Sums, Sums]:
        """Return the sums of a chunk in the source and in the sink."""
        with self.source.open_session("adding up a chunk of the source") as session:
            source = self.source.compute_sums(session, chunk)
        with self.sink.open_session("adding up a chunk of the sink") as session:
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
        with self.source.open_session("reading a chunk of the source") as session:
            source = list(self.source.read_rows(session, chunk))
        with self.sink.open_session("reading a chunk of the sink") as session:
            sink = list(self.sink.read_rows(session, chunk))
        findings.compare(source, sink)


log = logging.getLogger(__name__)

C = TypeVar("C", bound=Sized)

STATE_KEY = "kafka_spark.verification"
"""Key of the state in Airflow's task state store."""
SAVE_SECONDS = 10.0


@dataclass
class SavedState:
    """The state of a scan in Airflow's store, for a retry of the task.

    Guarantee: an error of the store never fails the task. A retry then starts from the beginning.

    :param store: Airflow's task state store; None before Airflow 3.3, which introduced it.
    :param fingerprint: the hash of tables and columns. The state of another comparison is not used.
    """

    store: TaskStateStore | None
    fingerprint: str

    def __post_init__(self) -> None:
        self._saved = time.monotonic()

    def load(self) -> ScanState:
        """Return the state that an earlier attempt has saved; without one, the state of a new scan."""
        try:
            found = self.store.get(STATE_KEY) if self.store is not None else None
            if found and found["fingerprint"] == self.fingerprint:
                state = ScanState.from_json(found)
                log.info("An earlier attempt has compared %d chunks, up to %s", state.chunks, state.after)
                return state
        except Exception as error:
            log.warning("The state of an earlier attempt cannot be used: %s", error)
        return ScanState()

    def save(self, state: ScanState) -> None:
        """Save the state, every few seconds."""
        if self.store is None or time.monotonic() - self._saved < SAVE_SECONDS:
            return
        self._saved = time.monotonic()
        try:
            self.store.set(STATE_KEY, {"fingerprint": self.fingerprint, **state.to_json()})
        except Exception as error:
            log.warning("The state was not saved; a retry would start from the beginning: %s", error)

    def forget(self) -> None:
        """Remove the state, so that the next attempt starts from the beginning."""
        try:
            if self.store is not None:
                self.store.delete(STATE_KEY)
        except Exception as error:
            log.warning("The state was not removed: %s", error)


def verify(
    plan: VerificationPlan, options: VerificationOptions, work: ConcurrentWork, store: TaskStateStore | None
) -> VerificationReport:
    """Compare both tables, and return the report.

    :param work: runs the comparisons.
    :param store: Airflow's task state store; None before Airflow 3.3.
    :raises SourceUnavailable: a server does not answer.
    :raises SourceRejected: a server refuses a statement.
    """
    began = time.monotonic()
    names = tuple(column.name for column in plan.source.columns)
    findings = Findings(names, plan.source.forms, plan.source.key, options.max_keys)
    counts = (
        _compare_by_ranges(plan, options, work, store, findings)
        if plan.ranges
        else _compare_by_buckets(plan, options, work, findings)
    )
    return VerificationReport(
        source=options.source.uri,
        sink=options.sink.uri,
        method="ranges" if plan.ranges else "buckets",
        columns=names,
        source_rows=counts.source_rows,
        sink_rows=counts.sink_rows,
        chunks=counts.chunks,
        differing_chunks=counts.differing,
        settled_chunks=counts.settled,
        counts=dict(findings.counts),
        differences=tuple(findings.kept),
        uncounted_chunks=counts.uncounted,
        seconds=time.monotonic() - began,
    )


@dataclass(frozen=True)
class ChunkCounts:
    """Counts of chunks, which both methods report."""

    source_rows: int
    sink_rows: int
    chunks: int
    differing: int
    settled: int
    uncounted: int = 0


def _compare_by_ranges(
    plan: VerificationPlan, options: VerificationOptions, work: ConcurrentWork, store: TaskStateStore | None, findings: Findings
) -> ChunkCounts:
    assert isinstance(plan.sink, DatabaseSide)
    comparison = RangeComparison(plan.source, plan.sink, work)
    saved = SavedState(store, _compute_fingerprint(plan.source, plan.sink, options))
    state = saved.load()
    comparison.scan(state, saved.save)
    left = _recheck_chunks(options, work, state.differing, comparison.find_differing)
    comparison.name_differences(left, findings)
    saved.forget()
    settled = len(state.differing) - len(left)
    return ChunkCounts(state.source_rows, state.sink_rows, state.chunks, len(state.differing), settled)


def _compare_by_buckets(
    plan: VerificationPlan, options: VerificationOptions, work: ConcurrentWork, findings: Findings
) -> ChunkCounts:
    comparison = BucketComparison(plan.source, plan.sink, work)
    found = comparison.scan()
    left = _recheck_chunks(options, work, found.differing, lambda some: comparison.find_differing(found.buckets, some))
    uncounted = comparison.name_differences(found.buckets, left, findings)
    differing, settled = len(found.differing), len(found.differing) - len(left)
    return ChunkCounts(found.source_rows, found.sink_rows, found.buckets.count, differing, settled, uncounted)


def _recheck_chunks(options: VerificationOptions, work: ConcurrentWork, chunks: C, differing: Callable[[C], C]) -> C:
    """Return the chunks that differ each time they are compared again."""
    for number in range(options.rechecks):
        if not chunks:
            break
        differ = "1 chunk differs, and is" if len(chunks) == 1 else f"{len(chunks):,} chunks differ, and are"
        log.info("Recheck %d of %d: %s compared again in %g s", number + 1, options.rechecks, differ, options.recheck_delay)
        work.wait(options.recheck_delay)
        chunks = differing(chunks)
    return chunks


def _compute_fingerprint(source: DatabaseSide, sink: DatabaseSide, options: VerificationOptions) -> str:
    sides = [
        [side.database.uri, side.name, side.where, [column.name for column in side.columns], list(side.forms), side.key]
        for side in (source, sink)
    ]
    return hashlib.sha256(json.dumps([sides, options.chunk_rows]).encode()).hexdigest()
