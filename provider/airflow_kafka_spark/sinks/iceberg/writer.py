"""One attempt at one window of an Iceberg table, on the driver."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import Fenced, KafkaSparkError, SinkUnavailable, WindowConflict
from airflow_kafka_spark.sinks.base import Shape, SplitWriter, WindowWriter
from airflow_kafka_spark.sinks.delta.place import ATTEMPTS, BEGUN
from airflow_kafka_spark.sinks.delta.records import data_directory, marker_name
from airflow_kafka_spark.sinks.files.directory import AttemptLock, flush
from airflow_kafka_spark.sinks.iceberg.attempts import Attempts
from airflow_kafka_spark.sinks.iceberg.catalog import IcebergStore, IcebergTable
from airflow_kafka_spark.sinks.iceberg.columns import file_columns
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
from airflow_kafka_spark.sinks.iceberg.table import open_table
from airflow_kafka_spark.windows.continuity import refuse_gap, refuse_other
from airflow_kafka_spark.windows.model import Applied, SplitResult, Window

if TYPE_CHECKING:
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table
    from typing_extensions import Self

    from airflow_kafka_spark.sinks.iceberg.options import IcebergSinkOptions

log = logging.getLogger(__name__)

_TRIES = 500
"""Commits of other writers that one commit may lose against."""
_FAILURES = 4
"""Tries of a commit that fail though nobody else has committed."""


def begin_attempt(sink: IcebergSinkOptions, window: Window, shape: Shape) -> IcebergWindowWriter:
    """Begin an attempt. See :meth:`.IcebergSink.begin`."""
    lake = sink.open()
    try:
        table = open_table(sink, lake, shape.schema)
        base = Attempts(lake).sweep(window.pipeline)
        return IcebergWindowWriter(sink, window, shape, lake, base, table)
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
        raise WindowConflict(str(window), what, "its rows in the files that it was written to, which a replay replaces")
    return files


class IcebergWindowWriter(WindowWriter):
    """One attempt: files that no snapshot names yet, and the commit of the snapshot. Made by :meth:`.IcebergSink.begin`.

    :param base: the snapshot that the pipeline's tag named when the attempt began. If another attempt of the pipeline commits or
        fences, it names another one, and this attempt commits nothing.
    :param table: the table when the attempt began. Its partition spec is the one that files are written for.
    """

    def __init__(
        self, sink: IcebergSinkOptions, window: Window, shape: Shape, lake: IcebergTable, base: int | None, table: Table
    ) -> None:
        self.sink, self.window, self.shape, self.lake, self.base, self.table = sink, window, shape, lake, base, table
        self.snapshot_id = new_snapshot_id()
        self.marker = marker_name(window.pipeline, self.snapshot_id)
        self.attempts = Attempts(lake)
        self.store, self.data = lake.store(table), lake.data_store(table)
        self.committed = False
        self.in_doubt = False
        self.written: list[str] = []
        self._lock: AttemptLock | None = None
        try:
            directory = f"{ATTEMPTS}/{self.marker}"
            self.store.make(directory)
            if self.store.place.is_local:
                # On a file system without locks, attempts of other pipelines are taken for dead when they are old.
                with suppress(OSError):
                    self._lock = AttemptLock(Path(self.store.full(directory)))
            begun = {
                "pipeline": window.pipeline,
                "window": window.number,
                "replay": window.replay,
                "run": window.run,
                "base": base or 0,
            }
            self.store.put(f"{directory}/{BEGUN}", json.dumps(begun, ensure_ascii=False))
            self.data.make(data_directory(self.marker))
        except OSError as error:
            raise lake.unavailable(f"beginning window {window}", error) from error

    def __repr__(self) -> str:
        return f"IcebergWindowWriter({self.window}, {self.sink.uri})"

    def split_writer(self) -> SplitWriter:
        from airflow_kafka_spark.sinks.iceberg.tasks.write import IcebergSplitWriter, IcebergTarget

        try:
            file_schema, columns = file_columns(self.shape.schema, self.table.metadata)
        except ValueError as error:  # another writer has removed a column since
            raise self.lake.unavailable(f"beginning window {self.window}", error) from error
        properties, spec = self.table.properties, self.table.spec()
        target = IcebergTarget(
            uri=self.sink.uri,
            store=self.data,
            home=self.store,
            attempt=data_directory(self.marker),
            marker=self.marker,
            pipeline=self.window.pipeline,
            window=str(self.window),
            file_schema=file_schema,
            columns=columns,
            partitions=spec,
            order=self.table.sort_order(),
            spec=self.sink.spec(properties, bool(spec.fields)),
            properties={name: value for name, value in properties.items() if name.startswith("write.metadata.metrics.")},
        )
        return IcebergSplitWriter(target)

    def commit(self, results: Sequence[SplitResult]) -> Applied:
        """Commit the window, as :meth:`WindowWriter.commit`. Only the files that ``results`` name are committed.

        A commit whose answer is lost, or that loses against another writer, is followed by a look at the table: it is there, or
        it is tried again behind what was committed meanwhile.

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
        files = [file for result in results for file in result.token.get("files", ())]
        record = Recorded.of(window, sum(int(result.token.get("rows", 0)) for result in results), self.snapshot_id)
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
                    return self._done(table, found, files)
            seen = (table.metadata_location, head(table.metadata, self.sink.branch))
            if seen[1] != tried[1] and table.snapshot_by_id(self.snapshot_id) is None:
                # The try requires a head that is gone, so that it can never succeed any more.
                self.in_doubt = False
            failures = failures if seen == tried else 0
            self._refuse_conflict(table, state, found)
            if not again:
                self._check_files(files)
            commit = self._prepare(table, state, record, files, replaced_files(table, self.sink.branch, window, found))
            faults.reached("sink.in_transaction")
            self.in_doubt, tried = True, seen
            error = self.lake.try_commit(table, commit.requirements, commit.updates)
            if error is None:
                faults.reached("sink.committed")
                continue  # the look finds it
            failures += 1
            if failures > _FAILURES:
                break
            time.sleep(random.random() * min(0.02 * again, 1.0))
        raise self.lake.unavailable(f"committing window {window}", error or "the window is not in the table")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.in_doubt and not self.committed:
            # The commit may still arrive, and it names these files. The next attempt fences it before it removes them.
            log.warning("It is not known whether window %s was committed: the next attempt finds out", self.window)
        elif not self.committed:
            self._remove_written(())
            self.data.remove_all(data_directory(self.marker))
            self.store.remove_all(f"{ATTEMPTS}/{self.marker}")
        if self._lock is not None:
            self._lock.release()
        self.lake.close()

    # --- steps of a commit ----------------------------------------------------------------------------------------------

    def _refuse_conflict(self, table: Table, state: PipelineSnapshots, found: Recorded | None) -> None:
        if state.tag != self.base:
            raise Fenced(self.window.pipeline, f"committing window {self.window.number}")
        newest = state.newest
        refuse_gap(newest.applied if newest else None, self.window, self.sink.uri)
        if newest is not None and found is None and self.window.number <= newest.applied.number:
            what = f"{self.sink.uri} has its rows, but its snapshot has expired, so that it is not known which they are"
            raise WindowConflict(str(self.window), what, "a snapshot with its record, which a replay needs")
        if table.metadata.default_spec_id != self.table.metadata.default_spec_id:
            what = "its partition spec was changed while the window was written: the next attempt writes for the new one"
            raise SinkUnavailable(self.sink.uri, f"committing window {self.window}", what)

    def _check_files(self, files: Sequence[Mapping[str, Any]]) -> None:
        """Refuse a window whose files are gone.

        :raises Fenced: a newer attempt has removed this one.
        :raises SinkUnavailable: others have removed some of the files.
        """
        window, directory = self.window, data_directory(self.marker)
        there = {f"{directory}/{info.base_name}" for info in self.data.children(directory)}
        if gone := [file["path"] for file in files if file["path"] not in there]:
            if not self.store.exists(f"{ATTEMPTS}/{self.marker}/{BEGUN}"):
                raise Fenced(window.pipeline, f"committing window {window.number}")
            what = (
                f"{len(gone)} of its files are gone, {gone[0]} the first: did remove_orphan_files take files that are so young?"
            )
            raise SinkUnavailable(self.sink.uri, f"committing window {window}", what)

    def _prepare(
        self,
        table: Table,
        state: PipelineSnapshots,
        record: Recorded,
        files: Sequence[Mapping[str, Any]],
        removed: Sequence[DataFile],
    ) -> SnapshotCommit:
        """Write the manifests of the window's snapshot."""
        from airflow_kafka_spark.sinks.iceberg.tasks.data_file import data_file

        spec_id = self.table.metadata.default_spec_id
        added = [data_file(file, self.data.named(file["path"]), spec_id) for file in files]
        summary = state.summary(self.window.pipeline, record)
        tag = tag_name(self.window.pipeline)
        commit = make_commit(table, self.snapshot_id, summary, self.sink.branch, tag, added, removed)
        self.written += commit.written
        if self.store.place.is_local:
            for path in commit.written:
                store = IcebergStore.of(path, table.io.properties)
                flush(store.place.path)
        return commit

    def _done(self, table: Table, record: Recorded, files: Sequence[Mapping[str, Any]]) -> Applied:
        """Clean up behind a window that is committed, by this attempt or by another one."""
        self.committed = record.snapshot_id == self.snapshot_id
        self.in_doubt = False
        if self.committed:
            with suppress(Exception):  # what is left here is found by the next attempt
                self._remove_written(metadata_files(table, self.snapshot_id) or self.written)
            named = {file["path"] for file in files}
            directory = data_directory(self.marker)
            with suppress(OSError):
                for info in self.data.children(directory):
                    if f"{directory}/{info.base_name}" not in named:
                        self.data.remove(f"{directory}/{info.base_name}")
            if not named:
                self.data.remove_all(directory)
            self.store.remove_all(f"{ATTEMPTS}/{self.marker}")
        return record.applied

    def _remove_written(self, kept: Any) -> None:
        """Remove the manifests of tries that failed."""
        for path in {*self.written} - {*kept}:
            parent, _, name = path.rpartition("/")
            IcebergStore.of(parent, self.table.io.properties).remove(name)
        self.written.clear()
