"""The transaction that makes a window visible: it claims the window's row first, so that only one attempt can."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import SinkRejected
from airflow_kafka_spark.hooks.postgres import Name, rows, run
from airflow_kafka_spark.sinks import postgres_sql as sql
from airflow_kafka_spark.sinks import postgres_windows as record
from airflow_kafka_spark.sinks.postgres_attempt import Attempt
from airflow_kafka_spark.sinks.postgres_merge import Stage
from airflow_kafka_spark.sinks.postgres_sieve import Sieve

if TYPE_CHECKING:
    import psycopg

log = logging.getLogger(__name__)


class Transaction:
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
