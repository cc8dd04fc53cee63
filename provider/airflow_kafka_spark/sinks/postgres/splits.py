"""The driver's side of ``atomic="split"``: a window whose splits commit one by one is closed.

Where bad records are tolerated, tasks put off splits that hold some, or rows that the target refuses. These are read once more,
into stages, and put into the target as a window is that is taken whole: in the transaction that closes it, and without the rows
that are refused, which are known before anything of these splits is committed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType

from airflow_kafka_spark.errors import Fenced, KafkaSparkError
from airflow_kafka_spark.hooks.postgres import rows, run
from airflow_kafka_spark.sinks.base import SplitWriter
from airflow_kafka_spark.sinks.postgres import sql
from airflow_kafka_spark.sinks.postgres.attempt import Attempt, create_registry
from airflow_kafka_spark.sinks.postgres.transaction import Transaction
from airflow_kafka_spark.sinks.postgres.writer import DriverWriter
from airflow_kafka_spark.windows.model import Applied, Split, SplitResult

log = logging.getLogger(__name__)


class SplitsWindowWriter(DriverWriter):
    """One attempt at a window whose splits commit one by one.

    Guarantee: a split is put into the target by a transaction of its own, with a marker that says so; or by the one that closes
    the window, and then a marker has kept all tasks off it since before it was read for that. Never by both. Only tasks of the
    attempt that owns the pipeline's splits commit: one that is overtaken, of whatever splits, commits nothing any more.
    """

    def __init__(self, attempt: Attempt) -> None:
        super().__init__(attempt, stages=False)

    def split_writer(self) -> SplitWriter:
        from airflow_kafka_spark.sinks.postgres.tasks.split import SplitAtomicWriter

        if self.stages:
            return self.stage_writer()
        attempt = self.attempt
        return SplitAtomicWriter(
            attempt.load(), attempt.windows, attempt.markers, attempt.merge, attempt.direct, attempt.owner, attempt.tolerates
        )

    def put_off(self, results: Sequence[SplitResult]) -> Sequence[Split]:
        """See :meth:`WindowWriter.put_off`.

        :raises SinkUnavailable: the server cannot be reached; SinkRejected: no stage can be made.
        """
        from airflow_kafka_spark.sinks.postgres.tasks.split import PUT_OFF

        indexes = {result.index for result in results if result.token.get(PUT_OFF)}
        if not indexes or not self.attempt.tolerates:
            return ()
        told = "%d of the %d splits of window %s hold bad records, or rows that the table refuses: they are read once more"
        log.info(told, len(indexes), len(self.attempt.splits), self.attempt.window)
        attempt = self.attempt = self.attempt.staged()
        self.transaction, self.stages = Transaction(attempt), True
        with attempt.server.session("staging splits of", str(attempt.window)) as connection:
            create_registry(connection, attempt.registry)
        self.stay()
        return tuple(split for split in attempt.splits if split.index in indexes)

    def _found(self) -> Mapping[int, int]:
        index = {(*s.range.topic_partition, s.range.start, s.range.end): s.index for s in self.attempt.splits}
        found = {index[marker[:4]]: marker.rows for marker in self._markers() if marker[:4] in index}
        staged = {split: count for split, _, count, _ in self.transaction.stages()} if self.stages else {}
        return {**found, **staged}

    def _written(self) -> tuple[int, int]:
        markers = self._markers()
        return sum(marker.written for marker in markers), sum(marker.deleted for marker in markers)

    def _markers(self) -> list[sql.Marker]:
        """Of splits that are in the target."""
        window = self.attempt.window
        found = rows(self.transaction.session, sql.markers(self.attempt.markers, window.pipeline, window.number))
        return [marker for marker in (sql.Marker(*row) for row in found) if not marker.put_off]

    def _begin(self) -> bool:
        """See :meth:`DriverWriter._begin`.

        :raises Fenced: another attempt owns the pipeline's splits, and has not applied the window yet.
        """
        if not super()._begin():
            return False
        window = self.attempt.window
        owners = rows(self.transaction.session, sql.owner_of(self.attempt.markers, window.pipeline))
        if [owner for (owner,) in owners] != [self.attempt.owner]:
            # Whoever owns them now need not wait for this one's locks.
            self.transaction.close()
            raise Fenced(window.pipeline, f"committing window {window.number}")
        return True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        if self.committed:
            return
        attempt, window = self.attempt, self.attempt.window
        # Its tasks commit nothing from here on. Where that cannot be said now, the next attempt at the window says it.
        with suppress(KafkaSparkError), attempt.server.session("leaving", str(window)) as connection:
            run(connection, "SET lock_timeout = '2s'")
            run(connection, sql.disown(attempt.markers, window.pipeline, attempt.owner))

    def _apply(self, results: Sequence[SplitResult]) -> Applied | None:
        applied, window = super()._apply(results), self.attempt.window
        if applied is not None:
            run(self.transaction.session, sql.drop_old_markers(self.attempt.markers, window.pipeline, window.number))
        return applied
