"""Runs a verification from its plan to its report, and saves the state from which a retry continues."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Sized
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from airflow_kafka_spark.verification.buckets import BucketComparison
from airflow_kafka_spark.verification.database_side import DatabaseSide
from airflow_kafka_spark.verification.plan import VerificationOptions, VerificationPlan
from airflow_kafka_spark.verification.ranges import RangeComparison, ScanState
from airflow_kafka_spark.verification.report import Findings, VerificationReport
from airflow_kafka_spark.verification.work import Work

log = logging.getLogger(__name__)

C = TypeVar("C", bound=Sized)

STATE_KEY = "kafka_spark.verification"
"""Key of the state in Airflow's task state store."""
SAVE_SECONDS = 10.0


class StateStore(Protocol):
    """Airflow's task state store."""

    def get(self, key: str) -> Any: ...

    def set(self, key: str, value: Any) -> None: ...

    def delete(self, key: str) -> None: ...


@dataclass
class SavedState:
    """The state of a scan in Airflow's store, for a retry of the task.

    Guarantee: an error of the store never fails the task. A retry then starts from the beginning.

    :param store: Airflow's task state store; None before Airflow 3.3, which introduced it.
    :param fingerprint: the hash of tables and columns. The state of another comparison is not used.
    """

    store: StateStore | None
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


def verify(plan: VerificationPlan, options: VerificationOptions, work: Work, store: StateStore | None) -> VerificationReport:
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
    plan: VerificationPlan, options: VerificationOptions, work: Work, store: StateStore | None, findings: Findings
) -> ChunkCounts:
    assert isinstance(plan.sink, DatabaseSide)
    comparison = RangeComparison(plan.source, plan.sink, work, options.chunk_rows)
    saved = SavedState(store, _compute_fingerprint(plan.source, plan.sink, options))
    state = saved.load()
    comparison.scan(state, saved.save)
    left = _recheck_chunks(options, work, state.differing, comparison.find_differing)
    comparison.name_differences(left, findings)
    saved.forget()
    settled = len(state.differing) - len(left)
    return ChunkCounts(state.source_rows, state.sink_rows, state.chunks, len(state.differing), settled)


def _compare_by_buckets(plan: VerificationPlan, options: VerificationOptions, work: Work, findings: Findings) -> ChunkCounts:
    comparison = BucketComparison(plan.source, plan.sink, work)
    found = comparison.scan()
    left = _recheck_chunks(options, work, found.differing, lambda some: comparison.find_differing(found.buckets, some))
    uncounted = comparison.name_differences(found.buckets, left, findings)
    differing, settled = len(found.differing), len(found.differing) - len(left)
    return ChunkCounts(found.source_rows, found.sink_rows, found.buckets.count, differing, settled, uncounted)


def _recheck_chunks(options: VerificationOptions, work: Work, chunks: C, differing: Callable[[C], C]) -> C:
    """Return the chunks that differ each time they are compared again."""
    for number in range(options.rechecks):
        if not chunks:
            break
        log.info("Recheck %d: %d chunks differ, compared again in %g s", number + 1, len(chunks), options.recheck_delay)
        work.wait(options.recheck_delay)
        chunks = differing(chunks)
    return chunks


def _compute_fingerprint(source: DatabaseSide, sink: DatabaseSide, options: VerificationOptions) -> str:
    sides = [
        [side.database.uri, side.name, side.where, [column.name for column in side.columns], list(side.forms)]
        for side in (source, sink)
    ]
    return hashlib.sha256(json.dumps([sides, options.chunk_rows]).encode()).hexdigest()
