"""Rows that the target refuses (a constraint, a number too large): found by trying, in the window's transaction, and left out.

Only where bad records are tolerated, and at no cost while nothing is refused: all rows of a stage are put into the target behind
a savepoint. If that fails, halves of them are, and halves of these, until what fails is one row: PostgreSQL alone knows its
constraints, domains, triggers and casts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import SinkRejected
from airflow_kafka_spark.hooks.postgres import run
from airflow_kafka_spark.sinks.postgres import sql
from airflow_kafka_spark.sinks.postgres.server import is_refusal, message_of
from airflow_kafka_spark.windows.model import TASK_PUT, BadRecord

if TYPE_CHECKING:
    import psycopg

    from airflow_kafka_spark.sinks.postgres.attempt import Attempt
    from airflow_kafka_spark.sinks.postgres.merge import Stage

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

    def __init__(self, attempt: Attempt, session: psycopg.Connection) -> None:
        self.attempt = attempt
        self.session = session
        self.refused: dict[int, dict[int, str]] = {}
        """By split: offset -> why."""
        self._stages: dict[int, Stage] = {}
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

    def append(self, split: int, stage: Stage) -> int:
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

    def _retry(self, put: Callable[[Stage], int], known: Mapping[int, Set[int]]) -> dict[int, int]:
        """Put what was refused again, until nothing more is taken; rows that were, by split.

        :param known: what is left out of that.
        """
        import psycopg

        taken: dict[int, int] = {}
        left = -1
        while left != self.count:
            left = self.count
            for split, rows in self.refused.items():
                for offset in sorted(rows.keys() - known.get(split, set())):
                    try:
                        count = put(replace(self._stages[split], span=(offset, offset + 1)))
                    except psycopg.Error as error:
                        if not is_refusal(error):
                            raise
                        continue
                    del rows[offset]
                    taken[split] = taken.get(split, 0) + count
        return taken

    def upsert(self, stages: Sequence[tuple[int, Stage]], put: Callable[[Sequence[Stage]], tuple[int, int]]) -> tuple[int, int]:
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
        self, stages: Sequence[tuple[int, Stage]], put: Callable[[Sequence[Stage]], tuple[int, int]], *, again: bool
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

    def _put_one(self, part: Stage, put: Callable[[Sequence[Stage]], tuple[int, int]]) -> int:
        with self.session.transaction():
            return sum(put([part]))

    def _behind_savepoint(self, statement: str) -> int:
        with self.session.transaction():
            return run(self.session, statement)

    def _sift(self, split: int, stage: Stage, put: Callable[[Stage], int]) -> int:
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
