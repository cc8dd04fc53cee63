"""One attempt at one window of an Iceberg table, on the driver, and the compaction after a window.

::

    <metadata>/<first half of an id>-*.avro               manifests of an attempt

An attempt fences earlier attempts and removes their files. Its name ends with the id of the snapshot that it is going to commit.

A compaction joins the small files of a branch. It is a separate attempt with a separate directory. Its snapshot moves the
pipeline's tag as that of a window does. So a compaction that died or was overtaken can no longer commit once the next attempt at
a window has begun, and that attempt removes its files.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import Fenced, SinkUnavailable, WindowConflict
from airflow_kafka_spark.sinks.base import Shape
from airflow_kafka_spark.sinks.iceberg.catalog import IcebergStore, IcebergTable
from airflow_kafka_spark.sinks.iceberg.snapshots import (
    FENCED,
    LoadedIceberg,
    NewSnapshot,
    PipelineSnapshots,
    Recorded,
    find_head,
    is_referenced,
    list_data_files,
    list_metadata_files,
    make_commit,
    make_manifest_prefix,
    make_snapshot_id,
    make_tag_name,
)
from airflow_kafka_spark.sinks.iceberg.table import make_file_columns, make_table_columns, match_columns, open_table
from airflow_kafka_spark.sinks.lake.writer import LakeWindowWriter, TryCommit
from airflow_kafka_spark.sinks.storage.attempts import (
    ATTEMPTS,
    BEGUN,
    TableAttempt,
    keep_only,
    make_data_directory,
    make_marker_name,
    sweep_attempts,
)
from airflow_kafka_spark.sinks.storage.store import flush
from airflow_kafka_spark.sinks.storage.window_record import TableChange
from airflow_kafka_spark.windows.model import Split, Window

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.manifest import DataFile
    from pyiceberg.schema import Schema
    from pyiceberg.table import FileScanTask, Table
    from pyiceberg.table.metadata import TableMetadata

    from airflow_kafka_spark.sinks.iceberg.options import IcebergSinkOptions
    from airflow_kafka_spark.sinks.iceberg.tasks.data_files import IcebergSplitWriter
    from airflow_kafka_spark.sinks.lake.tasks.rewrite import Merged, Upsert
    from airflow_kafka_spark.sinks.storage.tasks.formats import FileSpec


_TARGET_SIZE = "write.target-file-size-bytes"
_DEFAULT_SIZE = 512 << 20


@dataclass(frozen=True)
class Compaction:
    """A rewrite of one branch.

    :param lake: the table.
    :param branch: the branch.
    :param window: the window after which it is done.
    :param base: the snapshot of this window, which the pipeline's tag names.
    :param spec: the codec and options that files are written with.
    """

    lake: IcebergTable
    branch: str
    window: Window
    base: int
    spec: FileSpec

    def run(self) -> tuple[int, int]:
        """Join the small files, in one commit that is tried once.

        :return: the number of files that were joined, and the number of files that hold their rows now.
        :raises Fenced: another attempt of the pipeline has committed or fenced since the window.
        :raises Exception: another writer has committed meanwhile, or catalog or store did not answer. The next attempt at a
            window removes the files.
        """
        from airflow_kafka_spark.sinks.lake.tasks import rewrite

        pipeline = self.window.pipeline
        table = self.lake.load_newest("compacting")
        groups = list(list_small_files(table, find_head(table.metadata, self.branch)))
        if not groups:
            return 0, 0
        state = PipelineSnapshots.of(table.metadata, pipeline)
        if state.tag != self.base:
            raise Fenced(pipeline, "compacting")
        snapshot_id = make_snapshot_id()
        data = self.lake.get_data_store(table)
        attempt = TableAttempt(self.window, make_marker_name(pipeline, snapshot_id), self.lake.get_store(table), data)
        with rewrite.run_compaction(attempt, base=self.base):
            added, removed = [], [task.file for group in groups for task in group]
            for group in groups:
                added += self._join(table, group, attempt)
            faults.reached("sink.compacting")
            summary, tag = state.make_summary(pipeline), make_tag_name(pipeline)
            snapshot = NewSnapshot(snapshot_id, summary, self.branch, tag, added, removed, rewrites=True)
            commit = make_commit(table, snapshot)
            if (error := self.lake.try_commit(table, commit.requirements, commit.updates)) is not None:
                raise error
        return len(removed), len(added)

    def _join(self, table: Table, group: list[FileScanTask], attempt: TableAttempt) -> list[DataFile]:
        """Write the rows of files into one file."""
        from airflow_kafka_spark.sinks.iceberg.tasks.data_files import IcebergSplitWriter, IcebergTarget
        from airflow_kafka_spark.sinks.iceberg.tasks.table_files import IcebergFile, describe_layout, make_data_file
        from airflow_kafka_spark.sinks.lake.tasks import rewrite

        file_schema, columns = make_table_columns(table.metadata)
        common: dict[str, Any] = {**attempt.make_target(self.lake.uri), "file_schema": file_schema, "spec": self.spec}
        writer = IcebergSplitWriter(IcebergTarget(**common, **describe_layout(table, columns)))
        files, rows = [IcebergFile(table, task, {}) for task in group], sum(task.file.record_count for task in group)
        made = rewrite.join_files(writer, files, rows, self.window.number)
        store = self.lake.get_data_store(table)
        return [make_data_file(file, store.make_uri(file["path"]), table.metadata.default_spec_id) for file in made]


def list_small_files(table: Table, snapshot_id: int | None) -> Iterator[list[FileScanTask]]:
    """Yield groups of small files of one partition, none larger than the table's target size together.

    Files that others have deleted rows of are left as they are, and those of an older partition spec.

    :param snapshot_id: the snapshot whose files are read.
    :raises Exception: the store did not answer.
    """
    from airflow_kafka_spark.sinks.lake.tasks.rewrite import group_small_files

    if snapshot_id is None:
        return
    tasks = [
        task
        for task in table.scan(snapshot_id=snapshot_id).plan_files()
        if not task.delete_files and task.file.spec_id == table.metadata.default_spec_id
    ]
    fields, target = range(len(table.spec().fields)), int(table.properties.get(_TARGET_SIZE, _DEFAULT_SIZE))
    yield from group_small_files(
        tasks, lambda task: tuple(task.file.partition[at] for at in fields), lambda task: task.file.file_size_in_bytes, target
    )


_TRIES = 100


@dataclass(frozen=True)
class Attempts:
    """The attempts at one table.

    :param lake: the table.
    """

    lake: IcebergTable

    def sweep(self, pipeline: str) -> int | None:
        """Fence and remove all earlier attempts of a pipeline, and abandoned ones of other pipelines.

        :return: the snapshot that the pipeline's tag names, after which the new attempt commits.
        :raises SinkUnavailable: catalog or store did not answer.
        """
        store = self.lake.get_store(self.lake.load_newest("looking for earlier attempts"))
        return sweep_attempts(store, pipeline, self.fence)

    def fence(self, pipeline: str, markers: Iterable[str]) -> int | None:
        """Remove ended attempts of a pipeline.

        A snapshot without data moves the pipeline's tag, so that none of them can commit. No branch contains this snapshot. It is
        left out if all of the attempts have committed or were overtaken.

        :param markers: their names, listed before this is called.
        :return: the snapshot that the tag names afterwards.
        :raises SinkUnavailable: catalog or store did not answer.
        """
        left = set(markers)
        waiting: set[str] = set()
        error: Exception | None = None
        fence = make_snapshot_id()
        for _ in range(_TRIES):
            table = self.lake.load_newest("looking for earlier attempts")
            state = PipelineSnapshots.of(table.metadata, pipeline)
            committed = {marker for marker in left if table.snapshot_by_id(parse_snapshot_id(marker)) is not None}
            for marker in committed:
                self.finish(table, marker)
            left -= committed
            bases = {marker: self._find_base(table, marker) for marker in left}
            # The tag never returns to a snapshot that it has left.
            if state.tag == fence or all(base not in (None, state.tag or 0) for base in bases.values()):
                for marker in left:
                    self.remove(table, marker, sure=marker in waiting)
                return state.tag
            # The fence requires that the tag is still where it was when they began.
            waiting = {marker for marker, base in bases.items() if base == (state.tag or 0)}
            try:
                summary = {**state.make_summary(pipeline), FENCED: " ".join(sorted(left))}
                commit = make_commit(table, NewSnapshot(fence, summary, branch=None, tag=make_tag_name(pipeline)))
                error = self.lake.try_commit(table, commit.requirements, commit.updates)
            except Exception as failed:  # each catalog and store has errors of its own
                error = failed
        raise self.lake.make_unavailable_error("fencing earlier attempts", error or "")

    def finish(self, table: Table, marker: str) -> None:
        """Remove the remains of a committed attempt: files of tasks whose result was not used, and its record. Never raises; the
        next attempt removes the rest.

        :param table: the table, loaded after the commit.
        """
        directory, snapshot_id = make_data_directory(marker), parse_snapshot_id(marker)
        data = self.lake.get_data_store(table)
        try:
            files = list_data_files(table, [table.snapshot_by_id(snapshot_id)], directory)
            keep_only(data, directory, (f"{directory}/{file.file_path.rpartition('/')[2]}" for file in files))
            self._remove_manifests(table, snapshot_id)
        except Exception as error:  # each store has errors of its own
            log.warning("Files that attempt %s has left are not removed: %s", marker, self.lake.access.hide_secrets(str(error)))
            return
        self.lake.get_store(table).remove_all(f"{ATTEMPTS}/{marker}")

    def remove(self, table: Table, marker: str, sure: bool = False) -> None:
        """Remove an attempt that can no longer commit. Never raises; the next attempt removes the rest.

        :param sure: True if it is known that the attempt has not committed. Otherwise its files are kept if a snapshot names one
            of them, because it may have committed, and its snapshot may have expired since.
        """
        directory = make_data_directory(marker)
        try:
            if sure or not is_referenced(table, directory):
                self.lake.get_data_store(table).remove_all(directory)
                self._remove_manifests(table, parse_snapshot_id(marker))
        except Exception as error:  # each store has errors of its own
            log.warning("Attempt %s is not removed: %s", marker, self.lake.access.hide_secrets(str(error)))
            return
        # The attempt's record is removed last, because without it nothing would find the rest.
        self.lake.get_store(table).remove_all(f"{ATTEMPTS}/{marker}")

    def _find_base(self, table: Table, marker: str) -> int | None:
        """Return the snapshot that the pipeline's tag named when an attempt began, 0 if there was no tag; None if unknown."""
        try:
            text = self.lake.get_store(table).get(f"{ATTEMPTS}/{marker}/{BEGUN}")
            return int(json.loads(text)["base"]) if text else None
        except (ValueError, KeyError, TypeError):
            return None
        except OSError as error:
            raise self.lake.make_unavailable_error("looking for earlier attempts", error) from error

    def _remove_manifests(self, table: Table, snapshot_id: int) -> None:
        """Remove the manifests that were written for tries of a commit that failed.

        :param table: the table; if it has the snapshot, the manifests that this names are kept.
        :param snapshot_id: the snapshot that the tries were to commit.
        :raises Exception: catalog or store did not answer.
        """
        named = list_metadata_files(table, snapshot_id)
        store = self.lake.get_metadata_store(table)
        begins = make_manifest_prefix(snapshot_id)
        kept = {path.rpartition("/")[2] for path in named or ()}
        for name in store.list_names(""):
            if name.startswith(begins) and name not in kept:
                store.remove(name)


def parse_snapshot_id(marker: str) -> int:
    """Return the id of the snapshot that an attempt commits."""
    return int(marker.rpartition("-")[2])


def begin_attempt(sink: IcebergSinkOptions, window: Window, splits: Sequence[Split], shape: Shape) -> IcebergWindowWriter:
    """Begin an attempt. See :meth:`.IcebergSink.begin`."""
    lake = sink.open()
    try:
        rows = sink.add_own_columns(shape)
        table = open_table(sink, lake, rows.schema)
        base = Attempts(lake).sweep(window.pipeline)
        return IcebergWindowWriter(sink, window, splits, rows, lake, base, table)
    except BaseException:
        lake.close()
        raise


log = logging.getLogger(__name__)


class IcebergWindowWriter(LakeWindowWriter[LoadedIceberg, Recorded, "DataFile"]):
    """One attempt, made by :meth:`.IcebergSink.begin`. Its commit is a snapshot whose id is known from the beginning.

    :param base: the snapshot that the pipeline's tag named when the attempt began. If another attempt of the pipeline commits or
        fences, the tag names another snapshot, and this attempt commits nothing.
    :param table: the table when the attempt began. Files are written for its partition spec.
    """

    suspect = "did remove_orphan_files take files that are so young"

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
        self.snapshot_id = make_snapshot_id()
        self.lake, self.branch, self.base, self.table = lake, sink.branch, base, table
        self.written: list[str] = []
        self.tried: tuple[str, ...] = ()
        self.added: list[str] = []
        self.data = lake.get_data_store(table)
        attempt = TableAttempt(window, make_marker_name(window.pipeline, self.snapshot_id), lake.get_store(table), self.data)
        super().__init__(sink, sink.uri, splits, shape, attempt, sink.make_table_spec(table), {"base": base or 0})

    def make_unavailable_error(self, doing: str, error: Exception | str) -> SinkUnavailable:
        return self.lake.make_unavailable_error(doing, error)

    def discard(self) -> None:
        # A commit that failed while it was prepared has not told which manifests it had written: they are found by their names.
        Attempts(self.lake).remove(self.table, self.marker, sure=True)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        super().__exit__(kind, error, trace)
        self.lake.close()

    # --- tasks ----------------------------------------------------------------------------------------------------------

    def make_row_schema(self) -> pa.Schema:
        return self._make_row_columns()[0]

    def _make_row_columns(self) -> tuple[pa.Schema, Schema]:
        try:
            return make_file_columns(self.shape.schema, self.table.metadata)
        except ValueError as error:  # another writer has removed a column since
            raise self.lake.make_unavailable_error(f"beginning window {self.window}", error) from error

    def make_data_writer(self, table: Table | None = None, *, of_rows: bool = False) -> IcebergSplitWriter:
        """Return a writer of data files.

        :param table: the table whose columns they get; None: the columns of the window's rows.
        :param of_rows: True if the rows do not have the columns of their origin yet.
        """
        from airflow_kafka_spark.sinks.iceberg.tasks.data_files import IcebergSplitWriter, IcebergTarget
        from airflow_kafka_spark.sinks.iceberg.tasks.table_files import describe_layout

        file_schema, written = self._make_row_columns() if table is None else make_table_columns(table.metadata)
        return IcebergSplitWriter(
            IcebergTarget(**self.make_common_target(file_schema, of_rows), **describe_layout(self.table, written))
        )

    # --- commit ---------------------------------------------------------------------------------------------------------

    def load(self) -> LoadedIceberg:
        return LoadedIceberg(self.lake.load_newest(self.committing), self.lake, self.branch)

    def get_position(self, table: LoadedIceberg) -> tuple[object, object]:
        return table.table.metadata_location, find_head(table.table.metadata, self.branch)

    def refuse_overtaken(self, table: LoadedIceberg) -> None:
        state, metadata = table.find_state(self.window.pipeline), table.table.metadata
        if metadata.table_uuid != self.table.metadata.table_uuid:
            # Its columns may have the ids of others. A pipeline that had no tag cannot see it by its tag.
            what = "the table was dropped and created again while the window was written: the next attempt writes for the new one"
            raise self.lake.make_unavailable_error(self.committing, what)
        if state.tag != self.base:
            raise Fenced(self.window.pipeline, self.committing)
        newest, number = state.newest, self.window.number
        # A replay may find its rows by keys or by the window's column instead of the record.
        known = state.find(number) is not None or self.options.upserts or self.options.window_column
        if self.window.replay and newest is not None and not known and number <= newest.applied.number:
            what = f"{self.uri} has its rows, but its snapshot has expired, so that it is not known which they are"
            raise WindowConflict(str(self.window), what, "a snapshot with its record, which a replay needs")
        if metadata.default_spec_id != self.table.metadata.default_spec_id:
            what = "its partition spec was changed while the window was written: the next attempt writes for the new one"
            raise self.lake.make_unavailable_error(self.committing, what)
        if metadata.current_schema_id != self.table.metadata.current_schema_id and (name := self._find_moved_column(metadata)):
            what = f"its column `{name}` is another one since the window was written: the next attempt writes for the new one"
            raise self.lake.make_unavailable_error(self.committing, what)

    def _find_moved_column(self, now: TableMetadata) -> str:
        """Return a column of the rows that another column of the table takes than when the files were written; "" if there is
        none. A column that was renamed, and one that is gone, keep their values under their ids."""
        before = match_columns(self.shape.schema, self.table.metadata)
        for old, new in zip(before, match_columns(self.shape.schema, now), strict=True):
            if old.column is not None and new.column is not None and old.column.field_id != new.column.field_id:
                return old.row.name
        return ""

    def merge(self, table: LoadedIceberg, upsert: Upsert) -> Merged:
        from airflow_kafka_spark.sinks.iceberg.tasks.table_files import list_table_files

        matched = match_columns(self.shape.schema, table.table.metadata)
        names = {found.row.name: found.column.name for found in matched if found.column is not None}
        files = list_table_files(table.table, find_head(table.table.metadata, self.branch), upsert, names)
        return upsert.merge(files, lambda: self.make_data_writer(table.table))

    def prepare(self, table: LoadedIceberg, change: TableChange[Mapping[str, Any], DataFile]) -> tuple[Recorded, TryCommit]:
        """Write the manifests of the window's snapshot."""
        from airflow_kafka_spark.sinks.iceberg.tasks.table_files import make_data_file

        spec_id = self.table.metadata.default_spec_id
        self.added = [file["path"] for file in change.added]
        added = [make_data_file(file, self.data.make_uri(file["path"]), spec_id) for file in change.added]
        record = Recorded.of(self.window, change.written, change.deleted, self.snapshot_id, self.branch)
        summary = table.find_state(self.window.pipeline).make_summary(self.window.pipeline, record)
        tag = make_tag_name(self.window.pipeline)
        snapshot = NewSnapshot(self.snapshot_id, summary, self.branch, tag, added, change.removed)
        commit = make_commit(table.table, snapshot)
        self.written += commit.written
        self.tried = commit.named
        if self.attempt.home.location.is_local:
            for path in commit.written:
                store = IcebergStore.of(path, table.table.io.properties)
                flush(store.location.path)
        return record, lambda: self.lake.try_commit(table.table, commit.requirements, commit.updates)

    def is_mine(self, record: Recorded, table: LoadedIceberg) -> bool:
        return record.snapshot_id == self.snapshot_id

    def clean(self, record: Recorded, table: LoadedIceberg | None) -> None:
        try:
            # The last try is the one that was answered.
            named = self.tried if table is None else list_metadata_files(table.table, self.snapshot_id)
            self._remove_written(named or self.written)
            self.attempt.keep_only(self.added)
        except Exception as error:  # each catalog and store has errors of its own
            detail = self.lake.access.hide_secrets(str(error))
            log.warning("Window %s is committed; the next attempt removes the files that it has left: %s", self.window, detail)
            return
        self.attempt.finish()
        self.optimize()

    def compact(self) -> tuple[int, int]:
        return Compaction(self.lake, self.branch, self.window, self.snapshot_id, self.spec).run()

    def _remove_written(self, kept: Iterable[str]) -> None:
        """Remove the manifests of tries that failed."""
        for path in {*self.written} - {*kept}:
            parent, _, name = path.rpartition("/")
            IcebergStore.of(parent, self.table.io.properties).remove(name)
        self.written.clear()
