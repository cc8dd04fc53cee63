"""One attempt at one window of a Delta table, on the driver."""

from __future__ import annotations

import logging
import random
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import Fenced, SinkUnavailable, WindowConflict
from airflow_kafka_spark.sinks.base import Shape, SplitWriter
from airflow_kafka_spark.sinks.delta.log import DataFile, DeltaLog, PipelineVersion
from airflow_kafka_spark.sinks.delta.records import RECORD, Records
from airflow_kafka_spark.sinks.delta.table import open_table
from airflow_kafka_spark.sinks.storage.attempts import ATTEMPTS, AttemptWindowWriter, TableAttempt, marker_name
from airflow_kafka_spark.sinks.storage.window_record import TableChange, WindowRecord, commit_metadata, files_of
from airflow_kafka_spark.windows.continuity import refuse_gap, refuse_other
from airflow_kafka_spark.windows.model import Applied, Split, SplitResult, Window

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from airflow_kafka_spark.sinks.delta.options import DeltaSinkOptions
    from airflow_kafka_spark.sinks.delta.tasks.data_files import DeltaSplitWriter
    from airflow_kafka_spark.sinks.lake.tasks.upsert import Upsert

log = logging.getLogger(__name__)

_TRIES = 500
"""Commits of other writers that one commit may lose against."""
_FAILURES = 4
"""Tries of a commit that fail although no other writer has committed."""


_REPLACED = "its rows in the files that it was written to, or in a `window_column`, which a replay replaces"
_SUSPECT = "VACUUM with a retention shorter than this window"


def begin_attempt(sink: DeltaSinkOptions, window: Window, splits: Sequence[Split], shape: Shape) -> DeltaWindowWriter:
    """Begin an attempt. See :meth:`.DeltaSink.begin`."""
    records = Records(DeltaLog(sink.store))
    rows = sink.rows(shape)
    table = open_table(sink, records.log, rows.schema)
    base = records.sweep(window.pipeline)
    return DeltaWindowWriter(sink, window, splits, rows, records, base, table)


def replaced_files(table: DeltaTable, window: Window, found: WindowRecord | None) -> list[DataFile]:
    """Return the files of a window that a replay removes.

    :param found: the record of the window; None if it is not applied.
    :raises WindowConflict: others have rewritten them, so that the window's rows are no longer in files of their own.
    """
    if found is None:
        return []
    import pyarrow as pa

    live = {urllib.parse.unquote(path) for path in pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist()}
    files = [DataFile.of(file) for file in found.files]
    gone = [file.path for file in files if file.path not in live]
    if gone or sum(file.rows for file in files) != found.applied.written:
        what = f"{len(gone)} of its {len(files)} files are no longer in the table: OPTIMIZE, DELETE or MERGE has rewritten them"
        raise WindowConflict(str(window), what, _REPLACED)
    return files


class DeltaWindowWriter(AttemptWindowWriter):
    """One attempt: files that no commit names yet, and the commit that names them. Made by :meth:`.DeltaSink.begin`.

    :param base: the pipeline's transaction version when the attempt began. If another attempt of the pipeline commits or fences,
        it is another one, and this attempt commits nothing.
    """

    def __init__(
        self,
        sink: DeltaSinkOptions,
        window: Window,
        splits: Sequence[Split],
        shape: Shape,
        records: Records,
        base: PipelineVersion,
        table: DeltaTable,
    ) -> None:
        self.version = base.after(window.number)
        super().__init__(TableAttempt(window, marker_name(window.pipeline, int(self.version)), records.store, records.store))
        self.sink, self.splits, self.shape = sink, splits, shape
        self.records, self.base = records, base
        self.properties = dict(table.metadata().configuration)
        self._deletion: Upsert | None = None
        try:
            self.attempt.begin()
        except OSError as error:
            raise SinkUnavailable(sink.uri, f"beginning window {window}", str(error)) from error

    def split_writer(self) -> SplitWriter:
        if not self.sink.upserts:
            return self._data_writer(None, of_rows=True)
        from airflow_kafka_spark.sinks.lake.tasks.upsert import StageTarget, UpsertStageWriter, staged_schema

        schema = staged_schema(self.sink.spec().stored(self.shape.schema))
        key = tuple(self.sink.key)
        filled = tuple(name for name in key if name in self.sink.partition_by)
        return UpsertStageWriter(StageTarget(**self._common(schema, of_rows=True), key=key, filled=filled))

    def _data_writer(self, columns: pa.Schema | None, of_rows: bool = False) -> DeltaSplitWriter:
        """Return a writer of data files for rows with these columns; None: those of the window's rows.

        :param of_rows: True: the rows have no columns yet that say where they came from.
        """
        import pyarrow as pa

        from airflow_kafka_spark.sinks.delta.tasks.data_files import DeltaSplitWriter, DeltaTarget, skipping_columns

        schema, partition_by = columns or self.shape.schema, tuple(self.sink.partition_by)
        file_schema = self.sink.spec().stored(pa.schema([f for f in schema if f.name not in partition_by]))
        statistics = skipping_columns(file_schema, self.properties)
        common = self._common(file_schema, of_rows)
        return DeltaSplitWriter(DeltaTarget(**common, partition_columns=partition_by, statistics=statistics))

    def _common(self, file_schema: pa.Schema, of_rows: bool) -> dict[str, Any]:
        return {
            **self.attempt.target(self.sink.uri),
            "file_schema": file_schema,
            "spec": self.sink.spec(),
            "offset_columns": self.sink.offset_columns and of_rows,
            "window_column": self.sink.window_column if of_rows else None,
        }

    def commit(self, results: Sequence[SplitResult]) -> Applied:
        """Commit the window, as :meth:`WindowWriter.commit`. Only the files that ``results`` name are committed.

        If the answer to a commit is lost, or another writer was faster, the log is read again. Either it has this commit, or the
        commit is tried again after those of the others.

        :raises Fenced: a newer attempt has taken over and has not committed yet.
        """
        faults.reached("sink.staged")
        window = self.window
        failures, error, tried = 0, None, -1
        upsert = self._upsert(results) if self.sink.upserts else None
        for again in range(_TRIES):
            table = self._table()
            found = self.records.find(table, window.pipeline, window.number)
            version = self.records.log.version(table, window.pipeline)
            if found is not None:
                refuse_other(found.applied, window, self.sink.uri)
            if found is not None and found.applied.replay >= window.replay:
                return self._done(found, version)
            if table.version() > tried:
                # Another writer has taken the entry of the log that was tried, so that the try can no longer succeed.
                self.in_doubt, failures = False, 0
            if version != self.base:
                raise Fenced(window.pipeline, f"committing window {window.number}")
            self._refuse_conflict(table, version)
            change = self._appended(table, found, results) if upsert is None else self._merged(table, upsert)
            record = self._prepare(change)
            faults.reached("sink.in_transaction")
            self.in_doubt, tried = True, table.version()
            metadata = commit_metadata(window, change.written, change.deleted)
            error = self.records.log.try_commit(table, window.pipeline, self.version, change.added, change.removed, metadata)
            if error is None:
                faults.reached("sink.committed")
                return self._done(record, self.version, durable=True)
            failures += 1
            if failures > _FAILURES:
                break
            time.sleep(random.random() * min(0.02 * again, 1.0))
        raise SinkUnavailable(self.sink.uri, f"committing window {window}", str(error))

    # --- steps of a commit ----------------------------------------------------------------------------------------------

    def _table(self) -> DeltaTable:
        table = self.records.log.load(f"committing window {self.window}")
        if table is None:
            raise SinkUnavailable(self.sink.uri, f"committing window {self.window}", "the table is gone")
        return table

    def _refuse_conflict(self, table: DeltaTable, version: PipelineVersion) -> None:
        if self.window.replay:
            return
        newest = self.records.find(table, self.window.pipeline, version.newest) if version.newest else None
        if version.newest and newest is None:
            name = f"{self.window.pipeline}#{version.newest}"
            raise WindowConflict(name, f"{self.sink.uri} has its rows, but no record of its offsets", "a record in `_airflow`")
        refuse_gap(newest.applied if newest else None, self.window, self.sink.uri)

    def _upsert(self, results: Sequence[SplitResult]) -> Upsert:
        """Return the upsert of the staged rows."""
        from airflow_kafka_spark.sinks.lake.tasks.upsert import Upsert

        staged = [str(file["path"]) for file in files_of(results)]
        key, guarded = tuple(self.sink.key), self.sink.offset_columns
        with self._reading():
            self.attempt.refuse_missing(staged, self.sink.uri, _SUSPECT)
            return Upsert(self.window, key, guarded, self.records.store, results, self.splits, self._data_writer)

    def _merged(self, table: DeltaTable, upsert: Upsert) -> TableChange[DataFile, DataFile]:
        """Return the change that upserts the window in the table as it was loaded."""
        from airflow_kafka_spark.sinks.delta.tasks.data_files import table_files

        with self._reading():
            found, schema = table_files(table, upsert) if upsert.events.num_rows else ([], None)
            merged = upsert.merge(found, schema)
        added = [DataFile.of(file) for file in merged.added]
        return TableChange(added, [file.file for file in merged.removed], merged.written, merged.deleted)

    def _appended(
        self, table: DeltaTable, found: WindowRecord | None, results: Sequence[SplitResult]
    ) -> TableChange[DataFile, DataFile]:
        """Return the change that appends the window and, for a replay, removes its earlier rows."""
        added = [DataFile.of(file) for file in files_of(results)]
        with self._reading():
            self.attempt.refuse_missing((file.path for file in added), self.sink.uri, _SUSPECT)
            kept, removed = self._replaced(table, found)
        return TableChange([*added, *kept], removed, sum(int(result.token.get("rows", 0)) for result in results))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Raise an error of the store as one of the sink."""
        import pyarrow as pa

        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise SinkUnavailable(self.sink.uri, f"committing window {self.window}", str(error)) from error

    def _prepare(self, change: TableChange[DataFile, DataFile]) -> WindowRecord:
        """Write the record of the window beside the attempt. The commit's transaction version names the attempt."""
        window = self.window
        applied = Applied.of(window, change.written, change.deleted)
        facts = {"run": window.run, "prepared_at": datetime.now(timezone.utc).isoformat()}
        files = tuple(file.recorded() for file in change.added)
        record = WindowRecord(applied, files, "delta", tuple(self.sink.partition_by), facts)
        try:
            self.records.store.put(f"{ATTEMPTS}/{self.marker}/{RECORD}", record.dump())
        except FileNotFoundError as error:
            raise Fenced(window.pipeline, f"committing window {window.number}") from error
        except OSError as error:
            raise SinkUnavailable(self.sink.uri, f"committing window {window}", str(error)) from error
        return record

    def _replaced(self, table: DeltaTable, found: WindowRecord | None) -> tuple[list[DataFile], list[DataFile]]:
        """Return what a replay does to the rows of the window: the files that it adds for rows of other windows, and those that
        it removes.

        :raises WindowConflict: others have rewritten the window's files, and no column says which rows are of it.
        """
        try:
            return [], replaced_files(table, self.window, found)
        except WindowConflict:
            if not self.sink.window_column:
                raise
            from airflow_kafka_spark.sinks.delta.tasks.data_files import table_files
            from airflow_kafka_spark.sinks.lake.tasks.upsert import Upsert

            if self._deletion is None:
                store, column = self.records.store, self.sink.window_column
                self._deletion = Upsert.deletion(self.window, column, store, self.splits, self._data_writer)
            merged = self._deletion.merge(*table_files(table, self._deletion))
            if not merged.deleted:
                raise
            return [DataFile.of(file) for file in merged.added], [file.file for file in merged.removed]

    def _done(self, record: WindowRecord, version: PipelineVersion, durable: bool = False) -> Applied:
        """Clean up after the window was committed, by this attempt or by another one."""
        mine = self.attempt.directory
        self.committed = version == self.version or any(file["path"].startswith(f"{mine}/") for file in record.files)
        self.in_doubt = False
        if self.committed:
            try:
                self.records.keep(self.window.pipeline, self.version, durable)
                self.records.finish(self.marker, record)
            except OSError as error:
                log.warning("Window %s is committed; the next attempt removes what it has left: %s", self.window, error)
        return record.applied
