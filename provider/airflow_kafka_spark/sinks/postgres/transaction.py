"""The transaction that makes a window visible, and the search for rows that the target refuses in it.

The transaction claims the window's row first, so that only one attempt can. Where bad records are tolerated, PostgreSQL alone
knows which rows it refuses (constraints, domains, triggers, casts), so they are found by trying: all rows of a stage are inserted
behind a savepoint. If that fails, halves of them are, and halves of these, until the part that fails is one row. While nothing is
refused this costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import SinkRejected
from airflow_kafka_spark.hooks.postgres import Name, rows, run
from airflow_kafka_spark.sinks.postgres import sql
from airflow_kafka_spark.sinks.postgres import windows_table as record
from airflow_kafka_spark.sinks.postgres.attempt import WindowAttempt
from airflow_kafka_spark.sinks.postgres.server import is_refusal, message_of
from airflow_kafka_spark.sinks.postgres.sql import StagedSplit
from airflow_kafka_spark.windows.model import TASK_PUT, BadRecord

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger(__name__)


class Transaction:
    """The transaction of a window, on one connection: claim, compare, write, count, commit."""

    def __init__(self, attempt: WindowAttempt) -> None:
        self.attempt = attempt
        self.connection: psycopg.Connection | None = None
        self.merged: dict[int, int] = {}
        """Splits that are in the target: index -> rows."""
        self.finder: RefusedRowFinder | None = None
        """Leaves out the rows that the target refuses; None where bad records are not tolerated."""

    @property
    def session(self) -> psycopg.Connection:
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
        is_new = record.claim(self.session, attempt.windows, attempt.window, str(attempt.target))
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

        :param is_known: True if the sink's record says how many they were; it may have been removed as too old.
        :raises SinkRejected: some of these rows do not have the window's name.
        """
        attempt = self.attempt
        removed = run(self.session, sql.delete_window(attempt.target, column, name))
        before = record.written_before(self.session, attempt.windows, attempt.window)
        wrote = f"it wrote {before} rows" if is_known else "its row in the sink's record is gone; it wrote rows"
        if (removed < before or not is_known) and rows(self.session, sql.has_unmarked_rows(attempt.target, column))[0][0]:
            raise SinkRejected(
                str(attempt.target),
                str(attempt.window),
                f"{wrote}, of which {removed} have its name in `{column}`, and there are rows with none",
                f"Fill `{column}` in the rows that were written before the sink did, or delete the window's rows by hand",
            )
        log.info("Removed %s rows of window %s: they are written again", f"{removed:,}", attempt.window)

    def stages(self) -> list[tuple[int, str | None, int, int]]:
        """Return the stages that tasks have registered by now: split, stage, rows, tombstones."""
        return rows(self.session, sql.select_stages(self.attempt.registry))

    def append_new(self) -> None:
        """Append the rows of every stage that is complete and not in the target yet."""
        for split, stage, expected, _ in self.stages():
            if split in self.merged:
                continue
            written = self._append(split, self.attempt.stage(split, stage)) if stage else 0
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

    def settle(self) -> None:
        """Try refused rows again, now that all others are there. Those that still fail stay refused."""
        if self.finder is not None:
            for split, taken in self.finder.retry_refused().items():
                self.merged[split] += taken

    def upsert(self) -> tuple[int, int]:
        """Upsert all stages in one statement. Return the numbers of rows that were written and deleted."""
        found = [entry for entry in self.stages() if entry[1]]
        stages = {split: self.attempt.stage(split, stage) for split, stage, _, _ in found if stage}
        if not stages:
            return 0, 0
        merge = self.attempt.merge

        def put(some: Sequence[StagedSplit]) -> tuple[int, int]:
            if not any(tombstones for *_, tombstones in found):
                return run(self.session, merge.upsert(some)), 0
            written, deleted = rows(self.session, merge.upsert_and_delete(some))[0]
            return written, deleted

        return self.finder.upsert(list(stages.items()), put) if self.finder else put(list(stages.values()))

    def put_staged(self) -> tuple[int, int]:
        """Move all staged rows into the target, except those that are refused. Returns rows written and rows deleted."""
        if self.attempt.merge.key:
            return self.upsert()
        self.append_new()
        self.settle()
        return sum(self.merged.values()), 0

    def drop_stages(self) -> None:
        """Drop the attempt's registry and stages, whose rows are in the target."""
        attempt, stages = self.attempt, self.stages()
        run(self.session, sql.drop_tables([attempt.registry]))
        for _, stage, _, _ in stages:
            if stage:
                run(self.session, sql.drop_tables([Name(attempt.stage_schema, stage)]))

    def close(self) -> None:
        if self.connection is not None:
            with suppress(Exception):
                self.connection.close()


# --- rows that the target refuses --------------------------------------------------------------------------------------


MAX_REFUSED = 1000
"""Maximum number of refused rows of a window. With more the window fails: its rows were probably not made for this table."""
MAX_REASON = 500
"""Maximum length of a reason, in characters. A few are logged, all are kept in memory."""
UPSERT_TRIES = 4
"""How often an upsert is repeated: without a refused row, the row before it of the same key is upserted, and may be refused
too."""


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
        return sum(map(len, self.refused.values()))

    def append(self, split: int, stage: StagedSplit) -> int:
        """Append the rows of a stage, without those that are refused, and return how many were written.

        :raises SinkRejected: more than :data:`MAX_REFUSED` rows of the window are refused.
        :raises psycopg.Error: the error is not about a row.
        """
        import psycopg

        try:
            return self._behind_savepoint(self.attempt.merge.insert(stage))
        except psycopg.Error as error:
            if not is_refusal(error):
                raise
        return self._bisect(split, stage, lambda part: self._behind_savepoint(self.attempt.merge.insert(part)))

    def retry_refused(self) -> dict[int, int]:
        """Try refused rows again, now that all others are there: rows may refer to other rows of the table.

        :return: the rows that were written, by split.
        """
        return self._retry(lambda part: self._behind_savepoint(self.attempt.merge.insert(part)), {})

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

    def _behind_savepoint(self, statement: str) -> int:
        with self.session.transaction():
            return run(self.session, statement)

    def _bisect(self, split: int, stage: StagedSplit, put: Callable[[StagedSplit], int]) -> int:
        """Write the rows of a stage in the order of their offsets, and note those that are refused. Returns how many were
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
                    raise self._too_many(error) from None
                middle = (low + high) // 2
                if high - low > 1:
                    # The lower half is on top: it comes first.
                    left += [(middle, high), (low, middle)]
                else:
                    known[low] = self._why(error)
        return written

    def _too_many(self, error: BaseException) -> SinkRejected:
        detail = f"more than {MAX_REFUSED:,} of its rows are refused, the last one found since {self._why(error)}"
        action = "If so many are, correct the table, or the format. Else read less at once: lower `max_records`"
        return SinkRejected(str(self.attempt.target), str(self.attempt.window), detail, action)

    def _why(self, error: BaseException) -> str:
        """Return the server's message, shortened, because it may contain a whole value."""
        said = self.attempt.server.scrub(message_of(error))
        return said if len(said) <= MAX_REASON else f"{said[:MAX_REASON]}..."
