"""One attempt at one window of a lake table, on the driver: load the table, check, write, and try one commit of that version."""

from __future__ import annotations

import logging
import random
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import KafkaSparkError, SinkUnavailable, WindowConflict
from airflow_kafka_spark.sinks.base import Shape, SplitWriter
from airflow_kafka_spark.sinks.lake.sink import LoadedFileT, LoadedTable, RecordT
from airflow_kafka_spark.sinks.storage.attempts import AttemptWindowWriter, TableAttempt
from airflow_kafka_spark.sinks.storage.window_record import TableChange, list_files
from airflow_kafka_spark.windows.continuity import refuse_gap, refuse_other
from airflow_kafka_spark.windows.interval import remove_interval
from airflow_kafka_spark.windows.model import Applied, Split, SplitResult

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_kafka_spark.sinks.lake.options import LakeSinkOptions
    from airflow_kafka_spark.sinks.lake.tasks.rewrite import Merged, Upsert
    from airflow_kafka_spark.sinks.storage.tasks.formats import FileSpec
    from airflow_kafka_spark.sinks.storage.tasks.write import StoreSplitWriter

log = logging.getLogger(__name__)

_TRIES = 500
"""Maximum number of commits of other writers after which one commit is tried again."""
_FAILURES = 4
"""Maximum number of tries of a commit that fail although no other writer has committed."""

TableT = TypeVar("TableT", bound=LoadedTable[Any, Any])
TryCommit = Callable[[], "Exception | None"]
"""Tries one commit and returns None if it is committed. After an error the outcome is unknown."""


class LakeWindowWriter(AttemptWindowWriter, Generic[TableT, RecordT, LoadedFileT]):
    """One attempt: files that no commit names yet, and the commit that names them.

    :param attempt: the attempt, not begun yet.
    :param shape: the rows that the table gets.
    :param spec: the form of the files that tasks write.
    :param noted: further facts for the attempt's record.
    """

    suspect: ClassVar[str]
    """Text for messages: the possible causes of missing files of a running attempt."""

    def __init__(
        self,
        sink: LakeSinkOptions,
        uri: str,
        splits: Sequence[Split],
        shape: Shape,
        attempt: TableAttempt,
        spec: FileSpec,
        noted: Mapping[str, Any],
    ) -> None:
        super().__init__(attempt)
        self.options, self.uri, self.splits, self.shape, self.spec = sink, uri, splits, shape, spec
        self._deletion: Upsert | None = None
        try:
            self.attempt.begin(**noted)
        except OSError as error:
            raise self.make_unavailable_error(f"beginning window {self.window}", error) from error

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.window}, {self.uri})"

    @abstractmethod
    def make_unavailable_error(self, doing: str, error: Exception | str) -> SinkUnavailable:
        """Return the error to raise for an error of catalog or store, without secrets."""

    # --- tasks ----------------------------------------------------------------------------------------------------------

    def make_split_writer(self) -> SplitWriter:
        if not self.options.upserts:
            return self.make_data_writer(of_rows=True)
        from airflow_kafka_spark.sinks.lake.tasks.rewrite import StageTarget, UpsertStageWriter, make_staged_schema

        common = self.make_common_target(make_staged_schema(self.make_row_schema()), of_rows=True)
        return UpsertStageWriter(StageTarget(**common, key=tuple(self.options.key), filled=self.filled))

    @abstractmethod
    def make_row_schema(self) -> pa.Schema:
        """Return the columns of the window's rows in the form of the table's files."""

    @property
    def filled(self) -> tuple[str, ...]:
        """The columns of the key in which the table takes an empty text for a null."""
        return ()

    @property
    def lengths(self) -> Mapping[str, int]:
        """Maximum number of characters of texts of the rows, by column."""
        return {}

    @abstractmethod
    def make_data_writer(self, *, of_rows: bool = False) -> StoreSplitWriter[Any]:
        """Return a writer of data files with the columns of the window's rows.

        :param of_rows: True if the rows do not have the columns of their origin yet.
        """

    def make_common_target(self, file_schema: pa.Schema, of_rows: bool, attempt: TableAttempt | None = None) -> dict[str, Any]:
        """Return the parameters of a :class:`.StoreTarget`.

        :param attempt: the attempt that writes; None: this one.
        """
        return {
            **(attempt or self.attempt).make_target(self.uri),
            "file_schema": file_schema,
            "spec": self.spec,
            "offset_columns": self.options.offset_columns and of_rows,
            "window_column": self.options.window_column if of_rows else None,
            "lengths": self.lengths if of_rows else {},
        }

    # --- commit ---------------------------------------------------------------------------------------------------------

    def commit(self, results: Sequence[SplitResult]) -> Applied:
        """Commit the window, as :meth:`WindowWriter.commit`. Only the files that ``results`` name are committed.

        If the answer to a commit is lost, or another writer was faster, the table is loaded again. Either it has this commit, or
        the commit is tried again after those of the others.

        :raises Fenced: a newer attempt has taken over and has not committed yet.
        """
        faults.reached("sink.staged")
        try:
            return self._commit(results)
        except KafkaSparkError:
            raise
        except Exception as error:  # each catalog and store has errors of its own
            raise self.make_unavailable_error(self.committing, error) from error

    @property
    def committing(self) -> str:
        """The step, for messages."""
        return f"committing window {self.window}"

    def _commit(self, results: Sequence[SplitResult]) -> Applied:
        window, files = self.window, list_files(results)
        upsert: Upsert | None = None
        failures, error = 0, None
        tried: tuple[object, object] | None = None
        for again in range(_TRIES):
            table = self.load()
            found = table.find_window(window)
            if found is not None:
                refuse_other(found.applied, window, self.uri)
                if found.applied.replay >= window.replay:
                    return self._finish(found, table)
            seen = self.get_position(table)
            if tried is not None and seen[0] != tried[0]:
                failures = 0
            if tried is not None and seen[1] != tried[1]:
                # Another commit has taken the place that this try was for, so the try can no longer succeed.
                self.in_doubt = False
            self.refuse_overtaken(table)
            if not window.replay:
                newest = table.find_newest(window.pipeline)
                # If this window has a record that was not found, the record belongs to another target.
                is_other = newest is not None and newest.applied.number != window.number
                refuse_gap(newest.applied if newest is not None and is_other else None, window, self.uri)
            self.attempt.refuse_missing((str(file["path"]) for file in files), self.uri, self.suspect)
            if self.options.upserts:
                upsert = upsert or self._make_upsert(results)
                merged = self.merge(table, upsert)
                removed = [file.file for file in merged.removed]
                change = TableChange(merged.added, removed, merged.written, merged.deleted)
            else:
                kept, gone = self._plan_replacement(table, found)
                change = TableChange([*files, *kept], gone, sum(int(result.token.get("rows", 0)) for result in results))
            record, try_commit = self.prepare(table, change)
            faults.reached("sink.in_transaction")
            self.in_doubt, tried = True, seen
            error = try_commit()
            if error is None:
                faults.reached("sink.committed")
                return self._finish(record, None)
            failures += 1
            if failures > _FAILURES:
                break
            time.sleep(random.random() * min(0.02 * again, 1.0))
        raise self.make_unavailable_error(self.committing, error or "the window is not in the table")

    @abstractmethod
    def load(self) -> TableT:
        """Return the newest version of the table.

        :raises SinkUnavailable: catalog or store did not answer, or the table is gone.
        """

    @abstractmethod
    def get_position(self, table: TableT) -> tuple[object, object]:
        """Return a value that changes with every commit to the table, and a value that changes if the place of a commit is
        taken.
        """

    @abstractmethod
    def refuse_overtaken(self, table: TableT) -> None:
        """Refuse a commit that the attempt may no longer make.

        :raises Fenced: another attempt of the pipeline has committed or fenced since this one began.
        """

    @abstractmethod
    def merge(self, table: TableT, upsert: Upsert) -> Merged:
        """Write the files of an upsert for the table as it was loaded."""

    @abstractmethod
    def prepare(self, table: TableT, change: TableChange[Mapping[str, Any], LoadedFileT]) -> tuple[RecordT, TryCommit]:
        """Write the files that a commit needs before it is tried. Return the window's record, and the commit."""

    @abstractmethod
    def is_mine(self, record: RecordT, table: TableT) -> bool:
        """Return True if a record belongs to this attempt's commit."""

    @abstractmethod
    def clean(self, record: RecordT, table: TableT | None) -> None:
        """Remove the remains of this attempt, once it has committed. Never raises; the next attempt removes the rest."""

    @abstractmethod
    def compact(self) -> tuple[int, int]:
        """Join the table's small files.

        :return: the number of files that were joined, and the number of files that hold their rows now.
        :raises Exception: the files were not joined.
        """

    def optimize(self) -> None:
        """Join the table's small files, once per ``optimize`` windows. The window is committed already, and stays if this
        fails.
        """
        every, window = self.options.optimize, self.window
        if not every or window.replay or window.number % every or remove_interval(window.pipeline) != window.pipeline:
            return
        try:
            removed, added = self.compact()
        except Exception as error:  # each catalog and store has errors of its own
            why = error if isinstance(error, KafkaSparkError) else self.make_unavailable_error("compacting the table", error)
            log.warning("Window %s is committed; its table is not compacted: %s", window, why)
            return
        log.info("Compacted %s: %s files instead of %s", self.uri, added, removed)

    def _finish(self, record: RecordT, table: TableT | None) -> Applied:
        self.committed = table is None or self.is_mine(record, table)
        self.in_doubt = False
        if self.committed:
            self.clean(record, table)
        return record.applied

    def _make_upsert(self, results: Sequence[SplitResult]) -> Upsert:
        """Return the upsert of the staged rows."""
        from airflow_kafka_spark.sinks.lake.tasks.rewrite import Upsert

        key, guarded = tuple(self.options.key), self.options.offset_columns
        return Upsert(self.window, key, guarded, self.attempt.data, results, self.splits, self.make_data_writer)

    def _plan_replacement(
        self, table: TableT, found: RecordT | None
    ) -> tuple[Sequence[Mapping[str, Any]], Sequence[LoadedFileT]]:
        """Return the change that a replay makes to the rows of the window: the files that it adds for rows of other windows, and
        the files that it removes.

        :raises WindowConflict: others have rewritten the window's files, and no column identifies the rows of the window.
        """
        column = self.options.window_column if self.window.replay else None
        try:
            if found is not None:
                return [], table.list_files_of(self.window, found)
        except WindowConflict:
            if not column:
                raise
        if not column:
            return [], []
        from airflow_kafka_spark.sinks.lake.tasks.rewrite import Upsert

        if self._deletion is None:
            self._deletion = Upsert.make_deletion(
                self.window, column, str(self.window), self.attempt.data, self.splits, self.make_data_writer
            )
        merged = self.merge(table, self._deletion)
        if found is not None and not merged.deleted:
            what = "others have rewritten its files, and no row has its name in that column"
            raise WindowConflict(str(self.window), what, f"its rows, with its name in `{column}`")
        return merged.added, [file.file for file in merged.removed]
