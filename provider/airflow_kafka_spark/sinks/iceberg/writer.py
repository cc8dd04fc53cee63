"""One attempt at one window of an Iceberg table, on the driver."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import Fenced, KafkaSparkError, SinkUnavailable, WindowConflict
from airflow_kafka_spark.sinks.base import Shape, SplitWriter
from airflow_kafka_spark.sinks.iceberg.catalog import IcebergStore, IcebergTable
from airflow_kafka_spark.sinks.iceberg.fencing import Attempts
from airflow_kafka_spark.sinks.iceberg.snapshots import (
    PipelineSnapshots,
    Recorded,
    SnapshotCommit,
    data_files,
    head,
    make_commit,
    metadata_files,
    new_snapshot_id,
    tag_name,
)
from airflow_kafka_spark.sinks.iceberg.table import file_columns, match, open_table, table_columns
from airflow_kafka_spark.sinks.storage.attempts import AttemptWindowWriter, TableAttempt, data_directory, marker_name
from airflow_kafka_spark.sinks.storage.store import flush
from airflow_kafka_spark.sinks.storage.window_record import TableChange, files_of
from airflow_kafka_spark.windows.continuity import refuse_gap, refuse_other
from airflow_kafka_spark.windows.model import Applied, Split, SplitResult, Window

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.manifest import DataFile
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table

    from airflow_kafka_spark.sinks.iceberg.options import IcebergSinkOptions
    from airflow_kafka_spark.sinks.iceberg.tasks.data_files import IcebergSplitWriter
    from airflow_kafka_spark.sinks.lake.tasks.upsert import Merged, Upsert

log = logging.getLogger(__name__)

_TRIES = 500
"""Commits of other writers that one commit may lose against."""
_FAILURES = 4
"""Tries of a commit that fail although no other writer has committed."""


def begin_attempt(sink: IcebergSinkOptions, window: Window, splits: Sequence[Split], shape: Shape) -> IcebergWindowWriter:
    """Begin an attempt. See :meth:`.IcebergSink.begin`."""
    lake = sink.open()
    try:
        rows = sink.rows(shape)
        table = open_table(sink, lake, rows.schema)
        base = Attempts(lake).sweep(window.pipeline)
        return IcebergWindowWriter(sink, window, splits, rows, lake, base, table)
    except BaseException:
        lake.close()
        raise


def replaced_files(table: Table, branch: str, window: Window, found: Recorded | None) -> list[DataFile]:
    """Return the files of a window that a replay removes.

    :param branch: the branch that the sink writes to.
    :param found: the record of the window; None if it is not applied.
    :raises WindowConflict: others have rewritten them, so that the window's rows are no longer in files of their own.
    """
    if found is None or not found.applied.written:
        return []
    directory = data_directory(marker_name(window.pipeline, found.snapshot_id))
    files = data_files(table, [table.metadata.snapshot_by_name(branch)], directory)
    rows = sum(file.record_count for file in files)
    if rows != found.applied.written:
        what = (
            f"branch `{branch}` has {rows:,} of its {found.applied.written:,} rows in the files that they were written to: "
            "rewrite_data_files, DELETE or MERGE has rewritten the others, or the window is on another branch"
        )
        expected = "its rows in the files that it was written to, or in a `window_column`, which a replay replaces"
        raise WindowConflict(str(window), what, expected)
    return files


class IcebergWindowWriter(AttemptWindowWriter):
    """One attempt: files that no snapshot names yet, and the commit of the snapshot. Made by :meth:`.IcebergSink.begin`.

    :param base: the snapshot that the pipeline's tag named when the attempt began. If another attempt of the pipeline commits or
        fences, it names another one, and this attempt commits nothing.
    :param table: the table when the attempt began. Its partition spec is the one that files are written for.
    """

    def __init__(
        self,
        sink: IcebergSinkOptions,
        window: Window,
        splits: Sequence[Split],
        shape: Shape,
        lake: IcebergTable,
        base: int | None,
        table: Table,
    ) -> None:
        self.snapshot_id = new_snapshot_id()
        self.store, self.data = lake.store(table), lake.data_store(table)
        super().__init__(TableAttempt(window, marker_name(window.pipeline, self.snapshot_id), self.store, self.data))
        self.sink, self.splits, self.shape = sink, splits, shape
        self.lake, self.base, self.table = lake, base, table
        self.written: list[str] = []
        self.added: list[str] = []
        self._deletion: Upsert | None = None
        try:
            self.attempt.begin(base=base or 0)
        except OSError as error:
            raise lake.unavailable(f"beginning window {window}", error) from error

    def __repr__(self) -> str:
        return f"IcebergWindowWriter({self.window}, {self.sink.uri})"

    def split_writer(self) -> SplitWriter:
        if not self.sink.upserts:
            return self._data_writer(None, of_rows=True)
        from airflow_kafka_spark.sinks.lake.tasks.upsert import StageTarget, UpsertStageWriter, staged_schema

        schema = staged_schema(self._row_columns()[0])
        return UpsertStageWriter(StageTarget(**self._common(schema, of_rows=True), key=tuple(self.sink.key)))

    def _data_writer(self, table: Table | None, of_rows: bool = False) -> IcebergSplitWriter:
        """Return a writer of data files for rows with the columns of a table; None: with those of the window's rows.

        :param of_rows: True: the rows have no columns yet that say where they came from.
        """
        from airflow_kafka_spark.sinks.iceberg.tasks.data_files import IcebergSplitWriter, IcebergTarget

        file_schema, columns = self._row_columns() if table is None else table_columns(table.metadata)
        properties = {name: value for name, value in self.table.properties.items() if name.startswith("write.metadata.metrics.")}
        target = IcebergTarget(
            **self._common(file_schema, of_rows),
            columns=columns,
            partitions=self.table.spec(),
            order=self.table.sort_order(),
            properties=properties,
        )
        return IcebergSplitWriter(target)

    def _row_columns(self) -> tuple[pa.Schema, Schema]:
        try:
            return file_columns(self.shape.schema, self.table.metadata)
        except ValueError as error:  # another writer has removed a column since
            raise self.lake.unavailable(f"beginning window {self.window}", error) from error

    def _common(self, file_schema: pa.Schema, of_rows: bool) -> dict[str, Any]:
        return {
            **self.attempt.target(self.sink.uri),
            "file_schema": file_schema,
            "spec": self.sink.table_spec(self.table),
            "offset_columns": self.sink.offset_columns and of_rows,
            "window_column": self.sink.window_column if of_rows else None,
        }

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
            raise self.lake.unavailable(f"committing window {self.window}", error) from error

    def _commit(self, results: Sequence[SplitResult]) -> Applied:
        window = self.window
        files = files_of(results)
        upsert: Upsert | None = None
        failures = 0
        error: Exception | None = None
        tried: tuple[str, int | None] = ("", None)
        for again in range(_TRIES):
            table = self.lake.loaded(f"committing window {window}")
            state = PipelineSnapshots.of(table.metadata, window.pipeline)
            found = state.find(window.number)
            if found is not None:
                refuse_other(found.applied, window, self.sink.uri)
                if found.applied.replay >= window.replay:
                    return self._done(table, found)
            seen = (table.metadata_location, head(table.metadata, self.sink.branch))
            if seen[1] != tried[1] and table.snapshot_by_id(self.snapshot_id) is None:
                # The try requires a head that the branch no longer has, so that it can no longer succeed.
                self.in_doubt = False
            failures = failures if seen == tried else 0
            self._refuse_conflict(table, state, found)
            if not again:
                suspect = "did remove_orphan_files take files that are so young"
                self.attempt.refuse_missing((file["path"] for file in files), self.sink.uri, suspect)
            if self.sink.upserts:
                upsert = upsert or self._upsert(results)
                merged = self._merge(table, upsert)
                removed = [file.file for file in merged.removed]
                change = TableChange(merged.added, removed, merged.written, merged.deleted)
            else:
                kept, gone = self._replaced(table, found)
                change = TableChange([*files, *kept], gone, sum(int(result.token.get("rows", 0)) for result in results))
            commit = self._prepare(table, state, change)
            faults.reached("sink.in_transaction")
            self.in_doubt, tried = True, seen
            error = self.lake.try_commit(table, commit.requirements, commit.updates)
            if error is None:
                faults.reached("sink.committed")
                continue  # the table that is loaded next has it
            failures += 1
            if failures > _FAILURES:
                break
            time.sleep(random.random() * min(0.02 * again, 1.0))
        raise self.lake.unavailable(f"committing window {window}", error or "the window is not in the table")

    def discard(self) -> None:
        self._remove_written(())
        super().discard()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        self.lake.close()

    # --- steps of a commit ----------------------------------------------------------------------------------------------

    def _refuse_conflict(self, table: Table, state: PipelineSnapshots, found: Recorded | None) -> None:
        if state.tag != self.base:
            raise Fenced(self.window.pipeline, f"committing window {self.window.number}")
        newest = state.newest
        refuse_gap(newest.applied if newest else None, self.window, self.sink.uri)
        # A replay may find its rows by keys or by the window's column instead of the record.
        known = found is not None or self.sink.upserts or self.sink.window_column
        if newest is not None and not known and self.window.number <= newest.applied.number:
            what = f"{self.sink.uri} has its rows, but its snapshot has expired, so that it is not known which they are"
            raise WindowConflict(str(self.window), what, "a snapshot with its record, which a replay needs")
        if table.metadata.default_spec_id != self.table.metadata.default_spec_id:
            what = "its partition spec was changed while the window was written: the next attempt writes for the new one"
            raise SinkUnavailable(self.sink.uri, f"committing window {self.window}", what)

    def _upsert(self, results: Sequence[SplitResult]) -> Upsert:
        """Return the upsert of the staged rows."""
        from airflow_kafka_spark.sinks.lake.tasks.upsert import Upsert

        key, guarded = tuple(self.sink.key), self.sink.offset_columns
        return Upsert(self.window, key, guarded, self.data, results, self.splits, self._data_writer)

    def _merge(self, table: Table, upsert: Upsert) -> Merged:
        """Write the files of an upsert for the table as it was loaded."""
        from airflow_kafka_spark.sinks.iceberg.tasks.data_files import table_files

        matched = match(self.shape.schema, table.metadata)
        names = {found.row.name: found.column.name for found in matched if found.column is not None}
        return upsert.merge(table_files(table, self.sink.branch, upsert, names), table)

    def _prepare(
        self, table: Table, state: PipelineSnapshots, change: TableChange[Mapping[str, Any], DataFile]
    ) -> SnapshotCommit:
        """Write the manifests of the window's snapshot."""
        from airflow_kafka_spark.sinks.iceberg.tasks.data_files import data_file

        spec_id = self.table.metadata.default_spec_id
        self.added = [file["path"] for file in change.added]
        added = [data_file(file, self.data.named(file["path"]), spec_id) for file in change.added]
        record = Recorded.of(self.window, change.written, change.deleted, self.snapshot_id)
        summary = state.summary(self.window.pipeline, record)
        tag = tag_name(self.window.pipeline)
        commit = make_commit(table, self.snapshot_id, summary, self.sink.branch, tag, added, change.removed)
        self.written += commit.written
        if self.store.place.is_local:
            for path in commit.written:
                store = IcebergStore.of(path, table.io.properties)
                flush(store.place.path)
        return commit

    def _replaced(self, table: Table, found: Recorded | None) -> tuple[Sequence[Mapping[str, Any]], Sequence[DataFile]]:
        """Return what a replay does to the rows of the window: the files that it adds for rows of other windows, and those that
        it removes.

        :raises WindowConflict: others have rewritten the window's files, and no column says which rows are of it.
        """
        column = self.sink.window_column if self.window.replay else None
        try:
            if found is not None or not column:
                return [], replaced_files(table, self.sink.branch, self.window, found)
        except WindowConflict:
            if not column:
                raise
        from airflow_kafka_spark.sinks.lake.tasks.upsert import Upsert

        if self._deletion is None:
            self._deletion = Upsert.deletion(self.window, column, self.data, self.splits, self._data_writer)
        merged = self._merge(table, self._deletion)
        if found is not None and not merged.deleted:
            what = "others have rewritten its files, and no row has its name in that column"
            raise WindowConflict(str(self.window), what, f"its rows, with its name in `{column}`")
        return merged.added, [file.file for file in merged.removed]

    def _done(self, table: Table, record: Recorded) -> Applied:
        """Clean up after the window was committed, by this attempt or by another one."""
        self.committed = record.snapshot_id == self.snapshot_id
        self.in_doubt = False
        if self.committed:
            with suppress(Exception):  # the next attempt removes what is left
                self._remove_written(metadata_files(table, self.snapshot_id) or self.written)
            with suppress(OSError):
                self.attempt.keep_only(self.added)
            self.attempt.finish()
        return record.applied

    def _remove_written(self, kept: Iterable[str]) -> None:
        """Remove the manifests of tries that failed."""
        for path in {*self.written} - {*kept}:
            parent, _, name = path.rpartition("/")
            IcebergStore.of(parent, self.table.io.properties).remove(name)
        self.written.clear()
