"""The driver's side of the PostgreSQL sink: the transaction that makes a window visible.

:class:`StagedWindowWriter` merges stages in one transaction that claims the window's row first, so that a reader sees the window
whole or not at all. :class:`SplitsWindowWriter` only closes a window whose splits have committed themselves.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import CountMismatch, Fenced, KafkaSparkError, SinkRejected, SinkUnavailable
from airflow_kafka_spark.hooks.postgres import rows, run
from airflow_kafka_spark.hooks.postgres_names import Name
from airflow_kafka_spark.sinks import postgres_sql as sql
from airflow_kafka_spark.sinks import postgres_windows as record
from airflow_kafka_spark.sinks.base import SplitWriter, WindowWriter
from airflow_kafka_spark.sinks.postgres_attempt import Attempt, drop_tables
from airflow_kafka_spark.sinks.postgres_diagnosis import culprit
from airflow_kafka_spark.sinks.postgres_merge import Stage
from airflow_kafka_spark.sinks.postgres_sieve import Sieve, is_refusal
from airflow_kafka_spark.windows.model import Applied, BadRecord, SplitResult

if TYPE_CHECKING:
    import psycopg
    from typing_extensions import Self

log = logging.getLogger(__name__)

POLL_SECONDS = 0.05


class _Transaction:
    """The window's transaction: claim, compare, write, count, commit; on one connection."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.connection: psycopg.Connection | None = None
        self.merged: dict[int, int] = {}
        """Splits that are in the target, with their rows."""
        self.sieve: Sieve | None = None
        """Where rows that are refused are left out."""

    @property
    def session(self) -> psycopg.Connection:
        assert self.connection is not None
        return self.connection

    def begin(self) -> bool:
        """False: the window is applied already, by another attempt.

        :raises WindowConflict: it cannot follow the sink's last window.
        """
        attempt = self.attempt
        self.connection = attempt.server.connect(attempt.application_name)
        self.session.autocommit = False
        # Windows of a pipeline one after the other, whatever their numbers: the comparison below then holds until the commit.
        run(self.session, sql.lock(attempt.lock))
        if not record.claim(self.session, attempt.windows, attempt.window, str(attempt.target)):
            self.session.rollback()
            return False
        record.refuse_conflict(self.session, attempt.windows, attempt.window)
        if attempt.tolerates:
            # What a constraint says at the commit only would come too late.
            run(self.session, "SET CONSTRAINTS ALL IMMEDIATE")
            self.sieve = Sieve(attempt, self.session)
        if attempt.window.replay and attempt.merge.window and not attempt.merge.key:
            self._remove(*attempt.merge.window)
        return True

    def _remove(self, column: str, name: str) -> None:
        """Delete what the window wrote the time before, so that it can be written again in the same transaction.

        :raises SinkRejected: some of it cannot be told from other rows.
        """
        attempt = self.attempt
        removed = run(self.session, sql.delete_window(attempt.target, column, name))
        before = record.written_before(self.session, attempt.windows, attempt.window)
        if removed < before and rows(self.session, sql.unmarked(attempt.target, column))[0][0]:
            raise SinkRejected(
                str(attempt.target),
                str(attempt.window),
                f"it wrote {before} rows, of which {removed} have its name in `{column}`, and there are rows with none",
                f"Fill `{column}` in the rows that were written before the sink did, or delete the window's rows by hand",
            )
        log.info("Removed %s rows of window %s: they are written again", f"{removed:,}", attempt.window)

    def stages(self) -> list[tuple[int, str | None, int, int]]:
        """What tasks have registered by now: split, stage, rows, tombstones."""
        return rows(self.session, sql.registered(self.attempt.registry))

    def append_new(self) -> None:
        """Add the rows of every stage that is complete and not in the target yet."""
        for split, stage, expected, _ in self.stages():
            if split in self.merged:
                continue
            written = self._append(split, self.attempt.stage(split, stage)) if stage else 0
            refused = len(self.sieve.refused.get(split, ())) if self.sieve else 0
            if written != expected - refused:
                raise CountMismatch(str(self.attempt.window), expected - refused, written)
            self.merged[split] = written

    def _append(self, split: int, stage: Stage) -> int:
        if self.sieve is not None:
            return self.sieve.append(split, stage)
        return run(self.session, self.attempt.merge.insert(stage))

    def settle(self) -> None:
        """What is refused is refused for good."""
        if self.sieve is not None:
            for split, taken in self.sieve.settle().items():
                self.merged[split] += taken

    def upsert(self) -> tuple[int, int]:
        """All stages in one statement. Returns rows written and rows deleted."""
        found = [entry for entry in self.stages() if entry[1]]
        stages = {split: self.attempt.stage(split, stage) for split, stage, _, _ in found if stage}
        if not stages:
            return 0, 0
        merge = self.attempt.merge

        def put(some: Sequence[Stage]) -> tuple[int, int]:
            if not any(tombstones for *_, tombstones in found):
                return run(self.session, merge.upsert(some)), 0
            written, deleted = rows(self.session, merge.upsert_and_delete(some))[0]
            return written, deleted

        return self.sieve.upsert(list(stages.items()), put) if self.sieve else put(list(stages.values()))

    def close(self) -> None:
        if self.connection is not None:
            with suppress(Exception):
                self.connection.close()


class _Writer(WindowWriter):
    """What both writers share: the way from results to a commit whose outcome is certain."""

    def __init__(self, attempt: Attempt) -> None:
        self.attempt = attempt
        self.transaction = _Transaction(attempt)
        self.committed = False

    @abstractmethod
    def _apply(self, results: Sequence[SplitResult]) -> Applied | None:
        """Everything but the commit. None: another attempt has applied the window."""

    def commit(self, results: Sequence[SplitResult]) -> Applied:
        """See :meth:`WindowWriter.commit`.

        :raises CountMismatch: reader and sink counted different rows.
        :raises SinkRejected: a value does not fit, a constraint is violated; nothing of the window is visible.
        :raises Fenced: a newer attempt took over.
        """
        import psycopg

        try:
            applied = self._apply(results)
            if applied is not None:
                faults.reached("sink.in_transaction")
                self.transaction.session.commit()
        except psycopg.Error as error:
            # The answer to COMMIT may be lost, or another attempt may have ended this one: what the sink remembers tells.
            if not is_refusal(error) and (there := self._look()) is not None:
                return there
            raise self._explain(error) from self.attempt.server.cause(error)
        if applied is not None:
            self.committed = True
            faults.reached("sink.committed")
            return applied
        if (there := self._look()) is None:
            raise Fenced(self.attempt.window.pipeline, f"committing window {self.attempt.window.number}")
        return there

    def _look(self) -> Applied | None:
        """The window's row, if it is there and the server answers."""
        self.transaction.close()
        with suppress(SinkUnavailable):
            return self._find()
        return None

    def _find(self) -> Applied | None:
        """The window's row, in a session of its own, once nobody is about to write it any more."""
        attempt = self.attempt
        with attempt.server.session("looking for window", str(attempt.window)) as connection, connection.transaction():
            run(connection, sql.lock(attempt.lock))
            return record.recorded(connection, attempt.windows, attempt.window)

    def _check(self, results: Sequence[SplitResult], found: Mapping[int, int]) -> None:
        """Every split is there, with the rows its task told of, and they are those that were read.

        :param found: rows per split, as the server has them.
        """
        expected = {split.index for split in self.attempt.splits}
        if missing := sorted(expected - found.keys()):
            detail = f"split {missing[0]} (of {len(missing)}) is not there, as after a crash of the server"
            raise SinkUnavailable(str(self.attempt.target), f"committing window {self.attempt.window}", detail)
        told = sum(int(result.token.get("rows", 0)) for result in results)
        read = sum(result.handed_over for result in results)
        flushed = sum(found[index] for index in expected)
        for count in (told, flushed):
            if count != read:
                raise CountMismatch(str(self.attempt.window), read, count)

    # --- errors ---

    def _explain(self, error: psycopg.Error) -> KafkaSparkError:
        attempt, window = self.attempt, self.attempt.window
        self.transaction.close()
        if not is_refusal(error) and self._is_superseded():
            return Fenced(window.pipeline, f"committing window {window.number}")
        found = attempt.server.explain(error, str(window), f"committing window {window}", str(attempt.target))
        if isinstance(found, SinkRejected) and (column := self._culprit(error)) is not None:
            return SinkRejected(found.sink, found.window, f"column `{column}`: {found.detail}", found.action)
        return found

    def _is_superseded(self) -> bool:
        """Whether a newer attempt cleared this one away."""
        return False

    def _culprit(self, error: psycopg.Error) -> str | None:
        return None

    # --- life ---

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.transaction.close()


class StagedWindowWriter(_Writer):
    """One attempt at a window that is applied whole.

    :param overlap: merge stages as they appear, while other splits are still loading: the transaction then begins at once.
    """

    def __init__(self, attempt: Attempt, *, overlap: bool) -> None:
        super().__init__(attempt)
        self.overlap = _Overlap(self.transaction) if overlap else None
        self._gathered: tuple[int, int] | None = None

    def refused(self, results: Sequence[SplitResult]) -> Sequence[BadRecord]:
        """See :meth:`WindowWriter.refused`: all rows are put into the target, in the transaction that :meth:`commit` commits.

        :raises SinkRejected: more rows are refused than are looked for.
        """
        import psycopg

        if not self.attempt.tolerates:
            return ()
        try:
            self._gather(results)
        except psycopg.Error as error:
            raise self._explain(error) from self.attempt.server.cause(error)
        return self.transaction.sieve.records if self.transaction.sieve else ()

    def split_writer(self) -> SplitWriter:
        from airflow_kafka_spark.sinks.postgres_worker import StageWriter

        return StageWriter(self.attempt.load(), self.attempt.stage_schema, self.attempt.prefix, self.attempt.registry)

    def __enter__(self) -> Self:
        if self.overlap:
            self.overlap.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.overlap:
            self.overlap.abandon()
        self.transaction.close()
        if self.committed:
            return
        # The tables are unlogged and nobody's: what cannot be dropped now, the next attempt of this pipeline drops.
        try:
            with self.attempt.server.session("clearing up", str(self.attempt.window)) as connection:
                run(connection, "SET lock_timeout = '2s'")
                drop_tables(connection, self.attempt)
        except KafkaSparkError as failure:
            log.info("Stages of window %s are left to the next attempt: %s", self.attempt.window, failure)

    def _gather(self, results: Sequence[SplitResult]) -> tuple[int, int] | None:
        """Put the rows of all stages into the target: rows written and deleted. None: another attempt has applied the window."""
        transaction = self.transaction
        if not (self.overlap.stop() if self.overlap else transaction.begin()):
            return None
        self._check(results, {split: count for split, _, count, _ in transaction.stages()})
        faults.reached("sink.staged")
        if self.attempt.merge.key:
            self._gathered = transaction.upsert()
        else:
            transaction.append_new()
            transaction.settle()
            self._gathered = sum(transaction.merged.values()), 0
        return self._gathered

    def _apply(self, results: Sequence[SplitResult]) -> Applied | None:
        attempt, transaction = self.attempt, self.transaction
        gathered = self._gathered or self._gather(results)
        if gathered is None:
            return None
        written, deleted = gathered
        stages = transaction.stages()
        run(transaction.session, sql.drop([attempt.registry]))
        for _, stage, _, _ in stages:
            if stage:
                run(transaction.session, sql.drop([Name(attempt.stage_schema, stage)]))
        return record.count(transaction.session, attempt.windows, attempt.window, written, deleted)

    def _is_superseded(self) -> bool:
        with (
            suppress(KafkaSparkError),
            self.attempt.server.session("looking for the registry of", str(self.attempt.window)) as connection,
        ):
            return not record.exists(connection, self.attempt.registry)
        return False

    def _culprit(self, error: psycopg.Error) -> str | None:
        return culprit(self.attempt, error)


class _Overlap(threading.Thread):
    """Merges stages as tasks register them."""

    def __init__(self, transaction: _Transaction) -> None:
        super().__init__(name="postgres-merge", daemon=True)
        self._transaction = transaction
        self._done = threading.Event()
        self._claimed = False
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._claimed = self._transaction.begin()
            while self._claimed and not self._done.wait(POLL_SECONDS):
                self._transaction.append_new()
        except BaseException as error:  # raised again by stop()
            self._error = error

    def stop(self) -> bool:
        """Wait for the stage at hand; the rest is the caller's. False: the window is applied already. Raises what went wrong."""
        self._done.set()
        self.join()
        if self._error is not None:
            raise self._error
        return self._claimed

    def abandon(self) -> None:
        """Stop, whatever is going on. Never raises."""
        self._done.set()
        while self.is_alive():
            if (connection := self._transaction.connection) is not None:
                with suppress(Exception):
                    connection.cancel_safe(timeout=5)
            self.join(timeout=1)


class SplitsWindowWriter(_Writer):
    """One attempt at a window whose splits commit one by one."""

    def split_writer(self) -> SplitWriter:
        from airflow_kafka_spark.sinks.postgres_split_worker import SplitAtomicWriter

        attempt = self.attempt
        return SplitAtomicWriter(attempt.load(), attempt.windows, attempt.markers, attempt.merge, attempt.direct)

    def _apply(self, results: Sequence[SplitResult]) -> Applied | None:
        attempt, transaction = self.attempt, self.transaction
        if not transaction.begin():
            return None
        pipeline, number = attempt.window.pipeline, attempt.window.number
        markers = [sql.Marker(*row) for row in rows(transaction.session, sql.markers(attempt.markers, pipeline, number))]
        index = {(*s.range.topic_partition, s.range.start, s.range.end): s.index for s in attempt.splits}
        found = {index[marker[:4]]: marker.rows for marker in markers if marker[:4] in index}
        self._check(results, found)
        faults.reached("sink.staged")
        run(transaction.session, sql.drop_old_markers(attempt.markers, pipeline, number))
        written, deleted = sum(m.written for m in markers), sum(m.deleted for m in markers)
        return record.count(transaction.session, attempt.windows, attempt.window, written, deleted)
