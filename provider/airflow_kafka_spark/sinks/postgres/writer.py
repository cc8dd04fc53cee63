"""The driver's part of writing a window: from the rows that tasks have written to a commit whose outcome is certain.

:class:`StagedWindowWriter` moves stages into the target in one transaction that claims the window's row first, so that a reader
sees the whole window or nothing of it. :class:`SplitsWindowWriter` closes a window whose splits were committed one by one.

Only PostgreSQL knows which rows it refuses (constraints, domains, triggers, casts). Where bad records are tolerated,
:class:`RefusedRowFinder` finds these rows by trying: all rows of a stage are inserted after a savepoint. If that fails, halves of
them are inserted, and halves of these, until the part that fails is one row. If no row is refused, this has no cost.
"""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import CountMismatch, Fenced, KafkaSparkError, SinkRejected, SinkUnavailable
from airflow_kafka_spark.errors.base import SMALLER_WINDOW
from airflow_kafka_spark.hooks.databases import Name, fetch_rows, quote, run
from airflow_kafka_spark.sinks.base import SplitWriter, WindowWriter
from airflow_kafka_spark.sinks.postgres import attempt as record
from airflow_kafka_spark.sinks.postgres import sql
from airflow_kafka_spark.sinks.postgres.attempt import WindowAttempt, create_stage_registry, drop_attempt_tables
from airflow_kafka_spark.sinks.postgres.server import format_message, is_refusal
from airflow_kafka_spark.sinks.postgres.sql import StagedSplit
from airflow_kafka_spark.windows.model import TASK_PUT, Applied, BadRecord, OffsetRange, Split, SplitResult

if TYPE_CHECKING:
    import psycopg
    from typing_extensions import Self


log = logging.getLogger(__name__)


_NO_MERGE = ("0A", "42")
"""Classes of SQLSTATE with which PostgreSQL refuses a MERGE for a table or a role, as for a table with rules."""


class Transaction:
    """The transaction of a window, on one connection: claim, compare, write, count, commit."""

    def __init__(self, attempt: WindowAttempt) -> None:
        self.attempt = attempt
        self.connection: psycopg.Connection | None = None
        self.merged: dict[int, int] = {}
        """Splits that are in the target: index -> rows."""
        self.finder: RefusedRowFinder | None = None
        """Leaves out the rows that the target refuses; None where bad records are not tolerated."""
        self._merges = attempt.merge.merges

    @property
    def session(self) -> psycopg.Connection:
        """The open connection."""
        assert self.connection is not None
        return self.connection

    def begin(self) -> bool:
        """Open the connection and claim the window.

        :return: False if another attempt has applied the window.
        :raises WindowConflict: it cannot follow the sink's last window.
        """
        attempt = self.attempt
        self.connection = attempt.server.connect(attempt.application_name)
        self.session.autocommit = False
        # One window of a pipeline at a time, whatever their numbers: the comparison below then holds until the commit.
        run(self.session, sql.lock(attempt.lock))
        is_new = record.claim_window(self.session, attempt.windows, attempt.window, str(attempt.target))
        if is_new is None:
            self.session.rollback()
            return False
        record.refuse_conflict(self.session, attempt.windows, attempt.window)
        if attempt.tolerates:
            # A deferred constraint would report its violation at the commit only, which is too late.
            run(self.session, "SET CONSTRAINTS ALL IMMEDIATE")
            self.finder = RefusedRowFinder(attempt, self.session)
        if attempt.window.replay and attempt.merge.window and not attempt.merge.key:
            self._remove(*attempt.merge.window, is_known=not is_new)
        return True

    def _remove(self, column: str, name: str, *, is_known: bool) -> None:
        """Delete the rows that the window wrote before, so that a replay writes them again in the same transaction.

        :param is_known: True if the sink's record has their number; the record may have been removed as too old.
        :raises SinkRejected: some of these rows do not have the window's name.
        """
        attempt = self.attempt
        removed = run(self.session, sql.delete_window(attempt.target, column, name))
        before = record.count_written_before(self.session, attempt.windows, attempt.window)
        wrote = f"it wrote {before} rows" if is_known else "its row in the sink's record is gone; it wrote rows"
        if (removed < before or not is_known) and fetch_rows(self.session, sql.has_unmarked_rows(attempt.target, column))[0][0]:
            raise SinkRejected(
                str(attempt.target),
                str(attempt.window),
                f"{wrote}, of which {removed} have its name in `{column}`, and there are rows with none",
                f"Fill `{column}` in the rows that were written before the sink did, or delete the window's rows by hand",
            )
        log.info("Removed %s rows of window %s: they are written again", f"{removed:,}", attempt.window)

    def list_stages(self) -> list[tuple[int, str | None, int, int]]:
        """Return the stages that tasks have registered by now: split, stage, rows, tombstones."""
        return fetch_rows(self.session, sql.select_stages(self.attempt.registry))

    def append_new(self) -> None:
        """Append the rows of every stage that is complete and not in the target yet."""
        for split, stage, expected, _ in self.list_stages():
            if split in self.merged:
                continue
            written = self._append(split, self.attempt.find_stage(split, stage)) if stage else 0
            refused = len(self.finder.refused.get(split, ())) if self.finder else 0
            if written != expected - refused:
                detail = f"{expected - refused:,} rows became {written:,}"
                action = "See the table's triggers and rules: a row that they leave out is neither written nor refused"
                raise SinkRejected(str(self.attempt.target), str(self.attempt.window), detail, action)
            self.merged[split] = written

    def _append(self, split: int, stage: StagedSplit) -> int:
        if self.finder is not None:
            return self.finder.append(split, stage)
        return run(self.session, self.attempt.merge.insert(stage))

    def retry_refused_rows(self) -> None:
        """Try refused rows again, now that all others are there. Those that still fail stay refused."""
        if self.finder is not None:
            for split, taken in self.finder.retry_refused().items():
                self.merged[split] += taken

    def upsert(self) -> tuple[int, int]:
        """Upsert all stages in one statement. Return the numbers of rows that were written and deleted."""
        found = [entry for entry in self.list_stages() if entry[1]]
        stages = {split: self.attempt.find_stage(split, stage) for split, stage, _, _ in found if stage}
        if not stages:
            return 0, 0
        merge = self.attempt.merge

        def put(some: Sequence[StagedSplit]) -> tuple[int, int]:
            if not any(tombstones for *_, tombstones in found):
                return self._upsert(some), 0
            written, deleted = fetch_rows(self.session, merge.upsert_and_delete(some))[0]
            return written, deleted

        return self.finder.upsert(list(stages.items()), put) if self.finder else put(list(stages.values()))

    def _upsert(self, stages: Sequence[StagedSplit]) -> int:
        """Upsert rows by MERGE if it may be used, and return how many were written. If it fails, ON CONFLICT decides, also about
        all later rows."""
        import psycopg

        if self._merges:
            try:
                with self.session.transaction():
                    run(self.session, sql.join_in_order())
                    return run(self.session, self.attempt.merge.merge(stages))
            except psycopg.Error as error:
                if not (is_refusal(error) or (error.sqlstate or "")[:2] in _NO_MERGE):
                    raise
                log.info("MERGE into %s failed (%s): ON CONFLICT writes instead", self.attempt.target, error.sqlstate)
                self._merges = False
        return run(self.session, self.attempt.merge.upsert(stages))

    def put_staged(self) -> tuple[int, int]:
        """Move all staged rows into the target, except those that are refused. Return rows written and rows deleted."""
        if self.attempt.merge.key:
            return self.upsert()
        self.append_new()
        self.retry_refused_rows()
        return sum(self.merged.values()), 0

    def drop_stages(self) -> None:
        """Drop the attempt's registry and stages, whose rows are in the target."""
        attempt, stages = self.attempt, self.list_stages()
        run(self.session, sql.drop_tables([attempt.registry]))
        for _, stage, _, _ in stages:
            if stage:
                run(self.session, sql.drop_tables([Name(attempt.stage_schema, stage)]))

    def close(self) -> None:
        """Close the connection. An open transaction is rolled back. Never raises."""
        if self.connection is not None:
            with suppress(Exception):
                self.connection.close()


# --- rows that the target refuses --------------------------------------------------------------------------------------


MAX_REFUSED = 1000
"""Maximum number of refused rows of a window. With more the window fails: its rows were probably not made for this table."""
MAX_REASON = 500
"""Maximum length of a reason, in characters. A few are logged, all are kept in memory."""
UPSERT_TRIES = 4
"""Maximum number of times that an upsert is repeated. Without a refused row, the row before it with this key is upserted, and may
be refused, too.
"""


class RefusedRowFinder:
    """Finds the rows of a window that the target refuses.

    :param attempt: the attempt; its stages have a column of offsets.
    :param session: the session of the window's transaction.
    """

    def __init__(self, attempt: WindowAttempt, session: psycopg.Connection) -> None:
        self.attempt = attempt
        self.session = session
        self.refused: dict[int, dict[int, str]] = {}
        """Split -> offset -> reason."""
        self._stages: dict[int, StagedSplit] = {}
        self._indexed: set[int] = set()

    @property
    def records(self) -> list[BadRecord]:
        """The refused rows, as bad records."""
        ranges = {split.index: split.range for split in self.attempt.splits}
        found = [(ranges[split], offset, why) for split, rows in self.refused.items() for offset, why in sorted(rows.items())]
        return [BadRecord(r.topic, r.partition, offset, why, TASK_PUT) for r, offset, why in found]

    @property
    def count(self) -> int:
        """The number of refused rows."""
        return sum(map(len, self.refused.values()))

    def append(self, split: int, stage: StagedSplit) -> int:
        """Append the rows of a stage, without those that are refused, and return how many were written.

        :raises SinkRejected: more than :data:`MAX_REFUSED` rows of the window are refused.
        :raises psycopg.Error: the error is not about a row.
        """
        import psycopg

        try:
            return self._run_in_savepoint(self.attempt.merge.insert(stage))
        except psycopg.Error as error:
            if not is_refusal(error):
                raise
        return self._bisect(split, stage, lambda part: self._run_in_savepoint(self.attempt.merge.insert(part)))

    def retry_refused(self) -> dict[int, int]:
        """Try refused rows again, now that all others are there: rows may refer to other rows of the table.

        :return: the rows that were written, by split.
        """
        return self._retry(lambda part: self._run_in_savepoint(self.attempt.merge.insert(part)), {})

    def _retry(self, put: Callable[[StagedSplit], int], known: Mapping[int, Set[int]]) -> dict[int, int]:
        """Write refused rows one by one, as long as one of them succeeds.

        :param known: refused rows that are not tried again, by split.
        :return: the rows that were written, by split.
        """
        import psycopg

        taken: dict[int, int] = {}
        left = -1
        while left != self.count:
            left = self.count
            for split, refused in self.refused.items():
                for offset in sorted(refused.keys() - known.get(split, set())):
                    try:
                        count = put(replace(self._stages[split], span=(offset, offset + 1)))
                    except psycopg.Error as error:
                        if not is_refusal(error):
                            raise
                        continue
                    del refused[offset]
                    taken[split] = taken.get(split, 0) + count
        return taken

    def upsert(
        self, stages: Sequence[tuple[int, StagedSplit]], put: Callable[[Sequence[StagedSplit]], tuple[int, int]]
    ) -> tuple[int, int]:
        """Upsert the rows of all stages in one statement, without those that are refused. These are deleted from the stages.

        :param put: upserts stages; returns rows written and rows deleted.
        :raises psycopg.Error: as :meth:`append`.
        """
        import psycopg

        for tries in range(UPSERT_TRIES + 1):
            try:
                with self.session.transaction():
                    return put([stage for _, stage in stages])
            except psycopg.Error as error:
                if not is_refusal(error) or tries == UPSERT_TRIES or not self._bisect_all(stages, put, again=not tries):
                    raise
        raise AssertionError("the last try returns or raises")

    def _bisect_all(
        self, stages: Sequence[tuple[int, StagedSplit]], put: Callable[[Sequence[StagedSplit]], tuple[int, int]], *, again: bool
    ) -> bool:
        """Find refused rows by upserting parts of the stages in order. All of that is rolled back, so that the statement that
        follows writes, and counts, each key once.

        :param again: True to try refused rows again when all others are there, since rows may refer to later ones.
        :return: True if more rows were refused.
        """
        before, known = self.count, {split: set(rows) for split, rows in self.refused.items()}
        with self.session.transaction(force_rollback=True):
            for split, stage in sorted(stages, key=lambda pair: (pair[1].order, pair[0])):
                self._bisect(split, stage, lambda part: self._put_one(part, put))
            refused = self.count
            if again:
                # It does not matter that an older version of a row may be written here: it is rolled back.
                self._retry(lambda part: self._put_one(part, put), known)
        # The indexes went with what was rolled back.
        self._indexed.clear()
        for split, stage in stages:
            if gone := self.refused.get(split):
                run(self.session, sql.delete_offsets(stage.table, self._offset, gone))
        return refused > before

    @property
    def _offset(self) -> str:
        assert self.attempt.merge.offset
        return self.attempt.merge.offset

    def _put_one(self, part: StagedSplit, put: Callable[[Sequence[StagedSplit]], tuple[int, int]]) -> int:
        with self.session.transaction():
            return sum(put([part]))

    def _run_in_savepoint(self, statement: str) -> int:
        with self.session.transaction():
            return run(self.session, statement)

    def _bisect(self, split: int, stage: StagedSplit, put: Callable[[StagedSplit], int]) -> int:
        """Write the rows of a stage in the order of their offsets, and note those that are refused. Return how many were
        written."""
        import psycopg

        if split not in self._indexed:
            run(self.session, sql.index_offsets(stage.table, self._offset))
            self._indexed.add(split)
        self._stages[split] = stage
        # A statement that fails without any row, as with a statement trigger, does not fail because of a row.
        put(replace(stage, span=(0, 0)))
        known = self.refused.setdefault(split, {})
        r = next(s.range for s in self.attempt.splits if s.index == split)
        left, written = [(r.start, r.end)], 0
        while left:
            low, high = left.pop()
            try:
                written += put(replace(stage, span=(low, high)))
            except psycopg.Error as error:
                if not is_refusal(error):
                    raise
                if self.count >= MAX_REFUSED:
                    raise self._make_too_many_error(error) from None
                middle = (low + high) // 2
                if high - low > 1:
                    # The lower half is on top: it comes first.
                    left += [(middle, high), (low, middle)]
                else:
                    known[low] = self._describe_refusal(error)
        return written

    def _make_too_many_error(self, error: BaseException) -> SinkRejected:
        detail = f"more than {MAX_REFUSED:,} of its rows are refused, the last one found since {self._describe_refusal(error)}"
        action = "If so many are, correct the table, or the format. Otherwise read less at once: lower `max_records`. "
        action += SMALLER_WINDOW
        return SinkRejected(str(self.attempt.target), str(self.attempt.window), detail, action)

    def _describe_refusal(self, error: BaseException) -> str:
        """Return the server's message, shortened, because it may contain a whole value."""
        said = self.attempt.server.scrub(format_message(error))
        return said if len(said) <= MAX_REASON else f"{said[:MAX_REASON]}..."


POLL_SECONDS = 0.05
"""Seconds between two looks for stages that are complete, with ``merge="overlap"``."""


class DriverWriter(WindowWriter):
    """Commits the rows that tasks have written, and resolves an unknown outcome.

    :ivar stages: True if tasks load stages.
    """

    def __init__(self, attempt: WindowAttempt, *, stages: bool) -> None:
        self.attempt = attempt
        self.transaction = Transaction(attempt)
        self.stages = stages
        self.committed = False
        self._gathered: tuple[int, int] | None = None
        self._presence: psycopg.Connection | None = None

    @abstractmethod
    def _count_stored(self) -> Mapping[int, int]:
        """Return the rows that the server has of each split, by index."""

    def _begin(self) -> bool:
        """Begin the transaction. Return False if another attempt has applied the window."""
        return self.transaction.begin()

    def _count_written(self) -> tuple[int, int]:
        """Return the number of rows that the tasks themselves have written into the target, and the number of deleted ones."""
        return 0, 0

    def find_refused_records(self, results: Sequence[SplitResult]) -> Sequence[BadRecord]:
        """Return the records that the table refuses, as :meth:`WindowWriter.find_refused_records`. Staged rows are put into the
        target, in the transaction that :meth:`commit` commits.

        :raises SinkRejected: too many rows are refused.
        """
        import psycopg

        if not (self.attempt.tolerates and self.stages):
            return ()
        try:
            self._gather(results)
        except psycopg.Error as error:
            raise self._explain(error) from self.attempt.server.get_safe_cause(error)
        return self.transaction.finder.records if self.transaction.finder else ()

    def commit(self, results: Sequence[SplitResult]) -> Applied:
        """Commit the window, as :meth:`WindowWriter.commit`.

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
            # The answer to COMMIT may be lost, or another attempt may have ended this session: read the sink's record.
            if not is_refusal(error) and (there := self._read_outcome()) is not None:
                return there
            raise self._explain(error) from self.attempt.server.get_safe_cause(error)
        if applied is not None:
            self.committed = True
            faults.reached("sink.committed")
            return applied
        if (there := self._read_outcome()) is None:
            raise Fenced(self.attempt.window.pipeline, f"committing window {self.attempt.window.number}")
        return there

    def _read_outcome(self) -> Applied | None:
        """Return the sink's record of the window; None if it has no record, or the server does not answer."""
        self.transaction.close()
        with suppress(SinkUnavailable):
            return self._find()
        return None

    def _find(self) -> Applied | None:
        """Return the sink's record of the window, read in a session of its own when no transaction is about to write it."""
        attempt = self.attempt
        with attempt.server.open_session("looking for window", str(attempt.window)) as connection, connection.transaction():
            run(connection, sql.lock(attempt.lock))
            return record.find_record(connection, attempt.windows, attempt.window)

    def _check(self, results: Sequence[SplitResult], found: Mapping[int, int]) -> None:
        """Check that every split is there, and that reader, tasks and server have counted the same rows.

        :param found: the rows that the server has of each split.
        """
        expected = {split.index for split in self.attempt.splits}
        if missing := sorted(expected - found.keys()):
            detail = f"split {missing[0]} (of {len(missing)}) is not there, as after a crash of the server"
            raise SinkUnavailable(str(self.attempt.target), f"committing window {self.attempt.window}", detail)
        counted = sum(int(result.token.get("rows", 0)) for result in results)
        read = sum(result.handed_over for result in results)
        flushed = sum(found[index] for index in expected)
        for count in (counted, flushed):
            if count != read:
                raise CountMismatch(str(self.attempt.window), read, count)

    def _gather(self, results: Sequence[SplitResult]) -> tuple[int, int] | None:
        """Begin the transaction, check the counts and move staged rows into the target.

        :return: rows written and rows deleted, those by tasks included; None if another attempt has applied the window.
        """
        if not self._begin():
            return None
        self._check(results, self._count_stored())
        faults.reached("sink.staged")
        written, deleted = self._count_written()
        more, gone = self.transaction.put_staged() if self.stages else (0, 0)
        self._gathered = written + more, deleted + gone
        return self._gathered

    def _apply(self, results: Sequence[SplitResult]) -> Applied | None:
        """Run all steps before the commit. Return None if another attempt has applied the window."""
        attempt, transaction = self.attempt, self.transaction
        gathered = self._gathered or self._gather(results)
        if gathered is None:
            return None
        if self.stages:
            transaction.drop_stages()
        return record.complete_window(transaction.session, attempt.windows, attempt.window, *gathered, keep=attempt.keep_windows)

    # --- errors ---

    def _explain(self, error: psycopg.Error) -> KafkaSparkError:
        attempt, window = self.attempt, self.attempt.window
        self.transaction.close()
        if not is_refusal(error) and self._is_superseded():
            return Fenced(window.pipeline, f"committing window {window.number}")
        found = attempt.server.explain(error, str(window), f"committing window {window}", str(attempt.target))
        if isinstance(found, SinkRejected) and (column := self._find_column_at_fault(error)) is not None:
            return SinkRejected(found.sink, found.window, f"column `{column}`: {found.detail}", found.action)
        return found

    def _is_superseded(self) -> bool:
        """Return True if a newer attempt has removed this one's tables."""
        if self.stages:
            with (
                suppress(KafkaSparkError),
                self.attempt.server.open_session("looking for the registry of", str(self.attempt.window)) as connection,
            ):
                return not record.has_table(connection, self.attempt.registry)
        return False

    def _find_column_at_fault(self, error: psycopg.Error) -> str | None:
        return find_failing_column(self.attempt, error) if self.stages else None

    # --- life ---

    def __enter__(self) -> Self:
        return self

    def show_presence(self) -> None:
        """Open a session under the attempt's name and keep it for as long as the attempt lives, so that its stages do not count
        as abandoned (:func:`~airflow_kafka_spark.sinks.postgres.attempt.clear_abandoned`).

        :raises SinkUnavailable: the server cannot be reached.
        """
        import psycopg

        try:
            self._presence = self.attempt.server.connect(self.attempt.application_name)
        except psycopg.Error as error:
            raise self._explain(error) from self.attempt.server.get_safe_cause(error)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._presence is not None:
            with suppress(Exception):
                self._presence.close()
        self.transaction.close()
        if self.committed or not self.stages:
            return
        # Tables that cannot be dropped now are dropped by the pipeline's next attempt.
        try:
            with self.attempt.server.open_session("clearing up", str(self.attempt.window)) as connection:
                run(connection, "SET lock_timeout = '2s'")
                drop_attempt_tables(connection, self.attempt)
        except KafkaSparkError as failure:
            log.info("Stages of window %s are left to the next attempt: %s", self.attempt.window, failure)

    def make_stage_writer(self) -> SplitWriter:
        """Return a writer for tasks that load stages."""
        from airflow_kafka_spark.sinks.postgres.tasks.write import StageWriter

        return StageWriter(self.attempt.load(), self.attempt.stage_schema, self.attempt.prefix, self.attempt.registry)


class StagedWindowWriter(DriverWriter):
    """One attempt at a window that is applied in one transaction.

    :param overlap: True to move stages into the target while other splits are still loading. The transaction then begins at once.
    """

    def __init__(self, attempt: WindowAttempt, *, overlap: bool) -> None:
        super().__init__(attempt, stages=True)
        self.overlap = _MergeThread(self.transaction) if overlap else None

    def make_split_writer(self) -> SplitWriter:
        return self.make_stage_writer()

    def _begin(self) -> bool:
        return self.overlap.stop() if self.overlap else super()._begin()

    def _count_stored(self) -> Mapping[int, int]:
        return {split: count for split, _, count, _ in self.transaction.list_stages()}

    def __enter__(self) -> Self:
        if self.overlap:
            # The session of its transaction shows that the attempt lives.
            self.overlap.start()
        else:
            self.show_presence()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.overlap:
            self.overlap.cancel()
        super().__exit__(kind, error, trace)


class _MergeThread(threading.Thread):
    """Appends stages to the target as tasks register them."""

    def __init__(self, transaction: Transaction) -> None:
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
        """Wait until the current stage is appended; the caller appends the others. Raises the error that ended the thread.

        :return: False if another attempt has applied the window.
        """
        self._done.set()
        self.join()
        if self._error is not None:
            raise self._error
        return self._claimed

    def cancel(self) -> None:
        """Cancel the current statement and stop. Never raises."""
        self._done.set()
        while self.is_alive():
            if (connection := self._transaction.connection) is not None:
                with suppress(Exception):
                    connection.cancel_safe(timeout=5)
            self.join(timeout=1)


# --- splits that commit one by one --------------------------------------------------------------------------------------


class SplitsWindowWriter(DriverWriter):
    """One attempt at a window whose splits commit one by one.

    Where bad records are tolerated, tasks defer splits that hold some, or rows that the table refuses. These are read again, into
    stages, and moved into the target in the transaction that closes the window, without the refused rows, which are known before
    anything of these splits is committed.

    Guarantee: a split gets into the target either by a transaction of its own, together with its marker, or by the transaction
    that closes the window; in the second case a marker has kept all tasks from committing it since before it was read again.
    Never by both. Only tasks of the attempt that owns the pipeline's splits commit: those of an older attempt commit nothing any
    more.
    """

    def __init__(self, attempt: WindowAttempt) -> None:
        super().__init__(attempt, stages=False)
        self._kept: tuple[OffsetRange, ...] = ()

    def make_split_writer(self) -> SplitWriter:
        from airflow_kafka_spark.sinks.postgres.tasks.write import SplitAtomicWriter

        if self.stages:
            return self.make_stage_writer()
        attempt = self.attempt
        return SplitAtomicWriter(
            attempt.load(), attempt.windows, attempt.markers, attempt.merge, attempt.direct, attempt.owner, attempt.tolerates
        )

    def list_deferred(self, results: Sequence[SplitResult]) -> Sequence[Split]:
        """Return the splits whose commit was deferred, as :meth:`WindowWriter.list_deferred`. Their rows are staged from now on.

        :raises SinkUnavailable: the server cannot be reached; SinkRejected: no stage can be made.
        """
        from airflow_kafka_spark.sinks.postgres.tasks.write import DEFERRED

        indexes = {result.index for result in results if result.token.get(DEFERRED)}
        if not indexes or not self.attempt.tolerates:
            return ()
        message = "%d of the %d splits of window %s hold bad records, or rows that the table refuses: they are read once more"
        log.info(message, len(indexes), len(self.attempt.splits), self.attempt.window)
        attempt = self.attempt = self.attempt.add_offset_column()
        self.transaction, self.stages = Transaction(attempt), True
        with attempt.server.open_session("staging splits of", str(attempt.window)) as connection:
            create_stage_registry(connection, attempt.registry)
        self.show_presence()
        return tuple(split for split in attempt.splits if split.index in indexes)

    def _count_stored(self) -> Mapping[int, int]:
        index = {(*s.range.topic_partition, s.range.start, s.range.end): s.index for s in self.attempt.splits}
        found = {index[marker[:4]]: marker.rows for marker in self._read_markers() if marker[:4] in index}
        staged = {split: count for split, _, count, _ in self.transaction.list_stages()} if self.stages else {}
        return {**found, **staged}

    def list_kept_ranges(self) -> Sequence[OffsetRange]:
        return self._kept

    def _count_written(self) -> tuple[int, int]:
        markers, mine = self._read_markers(), {s.range for s in self.attempt.splits}
        self._kept = tuple(r for r in (OffsetRange(*marker[:4]) for marker in markers) if r not in mine)
        return sum(marker.written for marker in markers), sum(marker.deleted for marker in markers)

    def _read_markers(self) -> list[sql.SplitRow]:
        """Return the markers of splits that are in the target."""
        window = self.attempt.window
        found = fetch_rows(self.transaction.session, sql.select_splits(self.attempt.markers, window.pipeline, window.number))
        return [marker for marker in (sql.SplitRow(*row) for row in found) if not marker.is_deferred]

    def _begin(self) -> bool:
        """Begin the window, as :meth:`DriverWriter._begin`.

        :raises Fenced: another attempt owns the pipeline's splits, and has not applied the window yet.
        """
        if not super()._begin():
            return False
        window = self.attempt.window
        owners = fetch_rows(self.transaction.session, sql.lock_owner(self.attempt.markers, window.pipeline))
        if [owner for (owner,) in owners] != [self.attempt.owner]:
            # Closed at once, so that the owner does not wait for this session's locks.
            self.transaction.close()
            raise Fenced(window.pipeline, f"committing window {window.number}")
        return True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        if self.committed:
            return
        attempt, window = self.attempt, self.attempt.window
        # From here on its tasks commit nothing. If the server cannot be reached now, the next attempt does this.
        with suppress(KafkaSparkError), attempt.server.open_session("leaving", str(window)) as connection:
            run(connection, "SET lock_timeout = '2s'")
            run(connection, sql.leave_splits(attempt.markers, window.pipeline, window.number, attempt.owner))

    def _apply(self, results: Sequence[SplitResult]) -> Applied | None:
        applied, window = super()._apply(results), self.attempt.window
        if applied is not None:
            run(self.transaction.session, sql.delete_old_splits(self.attempt.markers, window.pipeline, window.number))
        return applied


# --- the column at fault ------------------------------------------------------------------------------------------------


_PROBE_SECONDS = 30
"""Timeout in seconds of a statement that looks for the column at fault."""
_PROBE = "airflow_probe"


def find_failing_column(attempt: WindowAttempt, error: psycopg.Error) -> str | None:
    """Find the column that a value did not fit into, if PostgreSQL does not name it.

    Inserts the staged rows column by column into a temporary table with the target's types, until one fails as the window did.

    :return: the column's name; None if it is not found, or the error names it itself.
    """
    if (error.sqlstate or "")[:2] not in ("22", "23", "42") or error.diag.column_name:
        return None
    try:
        with (
            attempt.server.open_session("looking for the column at fault in", str(attempt.window)) as connection,
            connection.transaction(force_rollback=True),
        ):
            run(connection, f"SET LOCAL statement_timeout = '{_PROBE_SECONDS}s'")
            return _search_columns(connection, attempt, error.sqlstate)
    except KafkaSparkError as failure:
        log.debug("The column at fault was not found: %s", failure)
        return None


def _search_columns(connection: psycopg.Connection, attempt: WindowAttempt, state: str | None) -> str | None:
    import psycopg

    registered = fetch_rows(connection, sql.select_stages(attempt.registry))
    stages = [attempt.find_stage(split, stage) for split, stage, _, _ in registered if stage]
    names = ", ".join(quote(c.name) for c in attempt.merge.columns)
    run(connection, f"CREATE TEMP TABLE {quote(_PROBE)} ON COMMIT DROP AS SELECT {names} FROM {attempt.target} WITH NO DATA")
    for column in attempt.merge.columns:
        for stage in stages:
            try:
                with connection.transaction():
                    into = f"INSERT INTO {quote(_PROBE)} ({quote(column.name)})"
                    run(connection, f"{into} SELECT {column.value} FROM {stage.table} AS s")
                    raise psycopg.Rollback
            except psycopg.Error as error:
                if error.sqlstate == state:
                    return column.name
                raise
    return None
