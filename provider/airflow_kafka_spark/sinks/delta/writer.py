"""One attempt at one window of a Delta table, on the driver."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import Fenced, SinkUnavailable, WindowConflict
from airflow_kafka_spark.sinks.base import Shape, SplitWriter, WindowWriter
from airflow_kafka_spark.sinks.delta.log import DataFile, DeltaLog, PipelineVersion
from airflow_kafka_spark.sinks.delta.place import ATTEMPTS, BEGUN, RECORD
from airflow_kafka_spark.sinks.delta.records import Records, commit_metadata, data_directory, marker_name
from airflow_kafka_spark.sinks.delta.table import open_table
from airflow_kafka_spark.sinks.files.directory import AttemptLock, WindowRecord
from airflow_kafka_spark.windows.continuity import refuse_gap, refuse_other
from airflow_kafka_spark.windows.model import Applied, SplitResult, Window

if TYPE_CHECKING:
    from deltalake import DeltaTable
    from typing_extensions import Self

    from airflow_kafka_spark.sinks.delta.options import DeltaSinkOptions

log = logging.getLogger(__name__)

_TRIES = 500
"""Commits of other writers that one commit may lose against."""
_FAILURES = 4
"""Tries of a commit that fail although no other writer has committed."""


def begin_attempt(sink: DeltaSinkOptions, window: Window, shape: Shape) -> DeltaWindowWriter:
    """Begin an attempt. See :meth:`.DeltaSink.begin`."""
    records = Records(DeltaLog(sink.store))
    table = open_table(sink, records.log, shape.schema)
    base = records.sweep(window.pipeline)
    return DeltaWindowWriter(sink, window, shape, records, base, table)


def replaced_files(table: DeltaTable, window: Window, found: WindowRecord | None) -> list[DataFile]:
    """Return the files of a window that a replay removes.

    :param found: the record of the window; None if it is not applied.
    :raises WindowConflict: others have rewritten them, so that the window's rows are no longer in files of their own.
    """
    if found is None:
        return []
    import pyarrow as pa

    live = set(pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist())
    files = [DataFile.of(file) for file in found.files]
    gone = [file.path for file in files if file.path not in live]
    if gone or sum(file.rows for file in files) != found.applied.written:
        what = f"{len(gone)} of its {len(files)} files are no longer in the table: OPTIMIZE, DELETE or MERGE has rewritten them"
        raise WindowConflict(str(window), what, "its rows in the files that it was written to, which a replay replaces")
    return files


class DeltaWindowWriter(WindowWriter):
    """One attempt: files that no commit names yet, and the commit that names them. Made by :meth:`.DeltaSink.begin`.

    :param base: the pipeline's transaction version when the attempt began. If another attempt of the pipeline commits or fences,
        it is another one, and this attempt commits nothing.
    """

    def __init__(
        self, sink: DeltaSinkOptions, window: Window, shape: Shape, records: Records, base: PipelineVersion, table: DeltaTable
    ) -> None:
        self.sink, self.window, self.shape, self.records, self.base = sink, window, shape, records, base
        self.version = base.after(window.number)
        self.marker = marker_name(window.pipeline, self.version)
        self.properties = dict(table.metadata().configuration)
        self.committed = False
        self.in_doubt = False
        self._lock: AttemptLock | None = None
        store = records.store
        try:
            directory = f"{ATTEMPTS}/{self.marker}"
            store.make(directory)
            if store.place.is_local:
                # On a file system without locks, attempts of other pipelines are taken for dead when they are old.
                with suppress(OSError):
                    self._lock = AttemptLock(Path(store.full(directory)))
            begun = {"pipeline": window.pipeline, "window": window.number, "replay": window.replay, "run": window.run}
            store.put(f"{directory}/{BEGUN}", json.dumps(begun, ensure_ascii=False))
            store.make(data_directory(self.marker))
        except OSError as error:
            raise SinkUnavailable(sink.uri, f"beginning window {window}", str(error)) from error

    def split_writer(self) -> SplitWriter:
        from airflow_kafka_spark.sinks.delta.tasks.statistics import skipping_columns
        from airflow_kafka_spark.sinks.delta.tasks.write import DeltaSplitWriter, DeltaTarget

        target = DeltaTarget(
            store=self.records.store,
            attempt=data_directory(self.marker),
            marker=self.marker,
            pipeline=self.window.pipeline,
            window=str(self.window),
            schema=self.shape.schema,
            partition_by=tuple(self.sink.partition_by),
            spec=self.sink.spec,
        )
        statistics = skipping_columns(target.file_schema, self.properties)
        return DeltaSplitWriter(DeltaTarget(**{**target.__dict__, "statistics": statistics}))

    def commit(self, results: Sequence[SplitResult]) -> Applied:
        """Commit the window, as :meth:`WindowWriter.commit`. Only the files that ``results`` name are committed.

        A commit whose answer is lost, or that loses against another writer, is followed by a look at the log: it is there, or it
        is tried again behind what was committed meanwhile.

        :raises Fenced: a newer attempt has taken over and has not committed yet.
        """
        faults.reached("sink.staged")
        window = self.window
        files = [DataFile.of(file) for result in results for file in result.token.get("files", ())]
        rows = sum(int(result.token.get("rows", 0)) for result in results)
        failures, error, tried = 0, None, -1
        record: WindowRecord | None = None
        for again in range(_TRIES):
            table = self._table()
            found = self.records.find(table, window.pipeline, window.number)
            version = self.records.log.version(table, window.pipeline)
            if found is not None:
                refuse_other(found.applied, window, self.sink.uri)
            if found is not None and found.applied.replay >= window.replay:
                return self._done(found, version)
            if table.version() > tried:
                # The log entry that was tried is another writer's, so that the try can never succeed any more.
                self.in_doubt, failures = False, 0
            if version != self.base:
                raise Fenced(window.pipeline, f"committing window {window.number}")
            self._refuse_conflict(table, version)
            if record is None:
                record = self._prepare(files, rows)
            removed = replaced_files(table, window, found)
            faults.reached("sink.in_transaction")
            self.in_doubt, tried = True, table.version()
            metadata = commit_metadata(window, rows)
            error = self.records.log.try_commit(table, window.pipeline, self.version, files, removed, metadata)
            if error is None:
                faults.reached("sink.committed")
                return self._done(record, self.version, durable=True)
            failures += 1
            if failures > _FAILURES:
                break
            time.sleep(random.random() * min(0.02 * again, 1.0))
        raise SinkUnavailable(self.sink.uri, f"committing window {window}", str(error))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.in_doubt and not self.committed:
            # The commit may still arrive, and it names these files. The next attempt fences it before it removes them.
            log.warning("It is not known whether window %s was committed: the next attempt finds out", self.window)
        elif not self.committed:
            self.records.store.remove_all(data_directory(self.marker))
            self.records.store.remove_all(f"{ATTEMPTS}/{self.marker}")
        if self._lock is not None:
            self._lock.release()

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

    def _prepare(self, files: Sequence[DataFile], rows: int) -> WindowRecord:
        """Write the record of the window beside the attempt, where the commit's transaction version leads to it."""
        window, store = self.window, self.records.store
        applied = Applied.of(window, rows)
        facts = {"run": window.run, "prepared_at": datetime.now(timezone.utc).isoformat()}
        record = WindowRecord(applied, tuple(file.recorded() for file in files), "delta", tuple(self.sink.partition_by), facts)
        try:
            there = {f"{data_directory(self.marker)}/{i.base_name}" for i in store.children(data_directory(self.marker))}
            if gone := [file.path for file in files if file.path not in there]:
                if not store.exists(f"{ATTEMPTS}/{self.marker}/{BEGUN}"):
                    raise Fenced(window.pipeline, f"committing window {window.number}")
                detail = (
                    f"{len(gone)} of its files are gone, {gone[0]} the first: VACUUM with a retention shorter than this window?"
                )
                raise SinkUnavailable(self.sink.uri, f"committing window {window}", detail)
            store.put(f"{ATTEMPTS}/{self.marker}/{RECORD}", record.dump())
        except FileNotFoundError as error:
            raise Fenced(window.pipeline, f"committing window {window.number}") from error
        except OSError as error:
            raise SinkUnavailable(self.sink.uri, f"committing window {window}", str(error)) from error
        return record

    def _done(self, record: WindowRecord, version: PipelineVersion, durable: bool = False) -> Applied:
        """Clean up behind a window that is committed, by this attempt or by another one."""
        mine = data_directory(self.marker)
        self.committed = version == self.version or any(file["path"].startswith(f"{mine}/") for file in record.files)
        self.in_doubt = False
        if self.committed:
            try:
                self.records.keep(self.window.pipeline, self.version, durable)
                self.records.finish(self.marker, record)
            except OSError as error:
                log.warning("Window %s is committed; the next attempt cleans up behind it: %s", self.window, error)
        return record.applied
