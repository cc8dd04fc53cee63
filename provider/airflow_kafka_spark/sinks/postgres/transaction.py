"""The transaction that makes a window visible: it claims the window's row first, so that only one attempt can."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import SinkRejected
from airflow_kafka_spark.hooks.postgres import rows, run
from airflow_kafka_spark.hooks.postgres_names import Name
from airflow_kafka_spark.sinks.postgres import sql
from airflow_kafka_spark.sinks.postgres import windows_table as record
from airflow_kafka_spark.sinks.postgres.attempt import WindowAttempt
from airflow_kafka_spark.sinks.postgres.server import is_refusal, message_of
from airflow_kafka_spark.sinks.postgres.sql import StagedSplit
from airflow_kafka_spark.windows.model import TASK_PUT, BadRecord

if TYPE_CHECKING:
    import psycopg

    from airflow_kafka_spark.sinks.postgres.attempt import WindowAttempt
    from airflow_kafka_spark.sinks.postgres.sql import StagedSplit

log = logging.getLogger(__name__)


class Transaction:
    """The window's transaction: claim, compare, write, count, commit; on one connection."""

    def __init__(self, attempt: WindowAttempt) -> None:
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
        is_new = record.claim(self.session, attempt.windows, attempt.window, str(attempt.target))
        if is_new is None:
            self.session.rollback()
            return False
        record.refuse_conflict(self.session, attempt.windows, attempt.window)
        if attempt.tolerates:
            # What a constraint says at the commit only would come too late.
            run(self.session, "SET CONSTRAINTS ALL IMMEDIATE")
            self.sieve = Sieve(attempt, self.session)
        if attempt.window.replay and attempt.merge.window and not attempt.merge.key:
            self._remove(*attempt.merge.window, is_known=not is_new)
        return True

    def _remove(self, column: str, name: str, *, is_known: bool) -> None:
        """Delete what the window wrote the time before, so that it can be written again in the same transaction.

        :param is_known: whether the window's row tells how much that was; it may be too old to be remembered.
        :raises SinkRejected: some of it cannot be told from other rows.
        """
        attempt = self.attempt
        removed = run(self.session, sql.delete_window(attempt.target, column, name))
        before = record.written_before(self.session, attempt.windows, attempt.window)
        wrote = f"it wrote {before} rows" if is_known else "its row in the sink's record is gone; it wrote rows"
        if (removed < before or not is_known) and rows(self.session, sql.unmarked(attempt.target, column))[0][0]:
            raise SinkRejected(
                str(attempt.target),
                str(attempt.window),
                f"{wrote}, of which {removed} have its name in `{column}`, and there are rows with none",
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
                detail = f"{expected - refused:,} rows became {written:,}"
                action = "See the table's triggers and rules: a row that they leave out is neither written nor refused"
                raise SinkRejected(str(self.attempt.target), str(self.attempt.window), detail, action)
            self.merged[split] = written

    def _append(self, split: int, stage: StagedSplit) -> int:
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

        def put(some: Sequence[StagedSplit]) -> tuple[int, int]:
            if not any(tombstones for *_, tombstones in found):
                return run(self.session, merge.upsert(some)), 0
            written, deleted = rows(self.session, merge.upsert_and_delete(some))[0]
            return written, deleted

        return self.sieve.upsert(list(stages.items()), put) if self.sieve else put(list(stages.values()))

    def put_staged(self) -> tuple[int, int]:
        """Everything that is staged, as far as it is not refused. Returns rows written and rows deleted."""
        if self.attempt.merge.key:
            return self.upsert()
        self.append_new()
        self.settle()
        return sum(self.merged.values()), 0

    def drop_stages(self) -> None:
        """Their rows are in the target."""
        attempt, stages = self.attempt, self.stages()
        run(self.session, sql.drop([attempt.registry]))
        for _, stage, _, _ in stages:
            if stage:
                run(self.session, sql.drop([Name(attempt.stage_schema, stage)]))

    def close(self) -> None:
        if self.connection is not None:
            with suppress(Exception):
                self.connection.close()


# --- sieve --------------------------------------------------------------------------------


MOST = 1000
"""Refused rows of one window that are looked for; with more the window fails: then the rows are not the table's."""
LONGEST = 500
"""Characters of a reason: a few rows are shown in the log, all of them kept in memory."""
SIFTS = 4
"""How often an upsert is tried anew: without a refused row the one before it of the same key counts."""


class Sieve:
    """Finds refused rows of one window.

    :param attempt: whose stages have a column of offsets.
    :param session: the window's, within its transaction.
    """

    def __init__(self, attempt: WindowAttempt, session: psycopg.Connection) -> None:
        self.attempt = attempt
        self.session = session
        self.refused: dict[int, dict[int, str]] = {}
        """By split: offset -> why."""
        self._stages: dict[int, StagedSplit] = {}
        self._indexed: set[int] = set()

    @property
    def records(self) -> list[BadRecord]:
        """What was refused."""
        ranges = {split.index: split.range for split in self.attempt.splits}
        found = [(ranges[split], offset, why) for split, rows in self.refused.items() for offset, why in sorted(rows.items())]
        return [BadRecord(r.topic, r.partition, offset, why, TASK_PUT) for r, offset, why in found]

    @property
    def count(self) -> int:
        return sum(map(len, self.refused.values()))

    def append(self, split: int, stage: StagedSplit) -> int:
        """Add the rows of a stage; how many were taken.

        :raises SinkRejected: more rows are refused than are looked for.
        :raises psycopg.Error: it is not about a row.
        """
        import psycopg

        try:
            return self._behind_savepoint(self.attempt.merge.insert(stage))
        except psycopg.Error as error:
            if not is_refusal(error):
                raise
        return self._sift(split, stage, lambda part: self._behind_savepoint(self.attempt.merge.insert(part)))

    def settle(self) -> dict[int, int]:
        """Once more for what was refused, now that all others are there: rows may refer to rows of the same table.

        :return: rows that were taken, by split.
        """
        return self._retry(lambda part: self._behind_savepoint(self.attempt.merge.insert(part)), {})

    def _retry(self, put: Callable[[StagedSplit], int], known: Mapping[int, Set[int]]) -> dict[int, int]:
        """Put what was refused again, until nothing more is taken; rows that were, by split.

        :param known: what is left out of that.
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
        """Upsert the rows of all stages in one statement, without those that are refused: these are deleted from the stages.

        :param put: upserts stages; returns rows written and rows deleted.
        :raises psycopg.Error: as :meth:`append`.
        """
        import psycopg

        for sifts in range(SIFTS + 1):
            try:
                with self.session.transaction():
                    return put([stage for _, stage in stages])
            except psycopg.Error as error:
                if not is_refusal(error) or sifts == SIFTS or not self._sift_all(stages, put, again=not sifts):
                    raise
        raise AssertionError("the last try returns or raises")

    def _sift_all(
        self, stages: Sequence[tuple[int, StagedSplit]], put: Callable[[Sequence[StagedSplit]], tuple[int, int]], *, again: bool
    ) -> bool:
        """Piece by piece, in order, and what is taken goes again, so that each key is written, and counted, once.

        :param again: whether what is refused is tried once more when all others are there, as far as one statement for all of
            them may then succeed: rows may refer to later ones.
        :return: whether something more was refused.
        """
        before, known = self.count, {split: set(rows) for split, rows in self.refused.items()}
        with self.session.transaction(force_rollback=True):
            for split, stage in sorted(stages, key=lambda pair: (pair[1].order, pair[0])):
                self._sift(split, stage, lambda part: self._put_one(part, put))
            refused = self.count
            if again:
                # What an older version of a row leaves here is rolled back.
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

    def _sift(self, split: int, stage: StagedSplit, put: Callable[[StagedSplit], int]) -> int:
        """Put the rows of a stage that can be, in the order of their offsets; the others are noted. How many were."""
        import psycopg

        if split not in self._indexed:
            run(self.session, sql.index_offsets(stage.table, self._offset))
            self._indexed.add(split)
        self._stages[split] = stage
        # What refuses no rows at all, as a trigger of the statement may, is not about one of them.
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
                if self.count >= MOST:
                    raise self._too_many(error) from None
                middle = (low + high) // 2
                if high - low > 1:
                    # The lower half is on top: it comes first.
                    left += [(middle, high), (low, middle)]
                else:
                    known[low] = self._why(error)
        return written

    def _too_many(self, error: BaseException) -> SinkRejected:
        detail = f"more than {MOST:,} of its rows are refused, the last one found since {self._why(error)}"
        action = "If so many are, correct the table, or the format. Else read less at once: lower `max_records`"
        return SinkRejected(str(self.attempt.target), str(self.attempt.window), detail, action)

    def _why(self, error: BaseException) -> str:
        """What the server says; it may say all of a value."""
        said = self.attempt.server.scrub(message_of(error))
        return said if len(said) <= LONGEST else f"{said[:LONGEST]}..."
