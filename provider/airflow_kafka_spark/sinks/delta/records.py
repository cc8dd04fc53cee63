"""The sink's record of windows, and the removal of files that ended attempts have left.

::

    <table>/_airflow/windows/<pipeline>/<number>/<replay>.json   the record of a window
    <table>/_airflow/attempts/<attempt>/record.json              the record of an attempt's window, written before the commit

Readers of Delta read only files that the log names, and VACUUM skips directories whose names begin with an underscore.

The transaction version in Delta's log says which attempt has committed last. That attempt had written the record of its window
before (``record.json``), and the first read of the log after the commit copies it to ``_airflow/windows``. A new attempt reads
the log before it begins, so that the record of each window exists before the pipeline's next commit.
"""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import SinkUnavailable, WindowConflict
from airflow_kafka_spark.hooks.object_stores import describe_store_error
from airflow_kafka_spark.sinks.delta.log import METADATA, DataFile, DeltaLog, PipelineVersion
from airflow_kafka_spark.sinks.lake.sink import REPLACED, LoadedTable
from airflow_kafka_spark.sinks.storage.attempts import (
    ATTEMPTS,
    keep_only,
    make_data_directory,
    make_marker_name,
    sweep_attempts,
)
from airflow_kafka_spark.sinks.storage.store import TableStore, make_pipeline_slug
from airflow_kafka_spark.sinks.storage.window_record import WindowRecord, parse_recorded_window
from airflow_kafka_spark.windows.model import Applied, Window

if TYPE_CHECKING:
    from deltalake import DeltaTable

    from airflow_kafka_spark.sinks.lake.tasks.rewrite import TableFile, Upsert

WINDOWS = "_airflow/windows"
"""The directory of the records of windows, below the table."""
RECORD = "record.json"
"""The file of an attempt's record of its window."""

_TRIES = 100
"""Maximum number of tries to fence earlier attempts. A try fails if another program has committed to the table."""


@dataclass(frozen=True)
class Records:
    """The records of a table's windows, and its attempts.

    :param log: the table's log.
    """

    log: DeltaLog

    @property
    def store(self) -> TableStore:
        """The table's files."""
        return self.log.store

    def load(self, doing: str) -> LoadedDelta | None:
        """Return the newest version of the table; None if there is no table.

        :param doing: for messages.
        :raises SinkUnavailable: the log cannot be read.
        """
        table = self.log.load(doing)
        return LoadedDelta(table, self) if table is not None else None

    def find(self, table: DeltaTable, pipeline: str, number: int) -> WindowRecord | None:
        """Return the record of the newest replay of a window. See :meth:`.LoadedTable.find`."""
        version = self.log.read_version(table, pipeline)
        if number > version.newest:
            return None
        try:
            self.keep(pipeline, version)
            directory = f"{WINDOWS}/{make_pipeline_slug(pipeline)}/{number:010d}"
            replays = [int(name[:-5]) for name in self.store.list_names(directory) if re.fullmatch(r"\d+\.json", name)]
            text = self.store.get(f"{directory}/{max(replays)}.json") if replays else None
        except OSError as error:
            raise SinkUnavailable(self.store.location.uri, "reading the record of a window", error) from error
        return self._load(text, directory) if text is not None else self._find_in_history(table, pipeline, number)

    def keep(self, pipeline: str, version: PipelineVersion, durable: bool = False) -> WindowRecord | None:
        """Copy the record of the attempt that has committed a version to the records of windows.

        :param durable: True if the entry of Delta's log is known to be durable.
        :return: the record, or None if the attempt has been cleaned up.
        :raises OSError: the store did not answer.
        """
        text = self.store.get(f"{ATTEMPTS}/{make_marker_name(pipeline, int(version))}/{RECORD}")
        if text is None:
            return None
        record = self._load(text, make_marker_name(pipeline, int(version)))
        directory = f"{WINDOWS}/{make_pipeline_slug(pipeline)}/{record.applied.number:010d}"
        self.store.make(directory)
        path = f"{directory}/{record.applied.replay}.json"
        if self.store.get(path) != text:
            # The attempt may have died before its commit was durable, and the caller is going to commit Kafka's offsets past it.
            if not durable:
                self.log.flush_recent()
            self.store.put(path, text)
        return record

    def finish(self, marker: str, record: WindowRecord) -> None:
        """Remove the remains of a committed attempt: files of tasks whose result was not used, and its record.

        :param record: the attempt's record, which :meth:`keep` has copied.
        :raises OSError: the store did not answer.
        """
        keep_only(self.store, make_data_directory(marker), (file["path"] for file in record.files))
        self.store.remove_all(f"{ATTEMPTS}/{marker}")

    def fence(self, pipeline: str, markers: Iterable[str]) -> PipelineVersion:
        """Remove ended attempts of a pipeline.

        Guarantee: none of them commits anything afterwards, and no file of a committed window is removed.

        :param markers: their names, listed before this is called.
        :return: the pipeline's transaction version, after which the next attempt commits.
        :raises SinkUnavailable: the store did not answer.
        """
        left = set(markers)
        error: Exception = OSError("others commit all the time")
        for _ in range(_TRIES):
            table = self.log.load("looking for earlier attempts")
            if table is None:
                raise SinkUnavailable(self.store.location.uri, "looking for earlier attempts", "the table is gone")
            version = self.log.read_version(table, pipeline)
            try:
                committed = make_marker_name(pipeline, int(version))
                if committed in left:
                    record = self.keep(pipeline, version)
                    if record is not None:
                        self.finish(committed, record)
                    else:  # the attempt has removed everything except this
                        self.store.remove_all(f"{ATTEMPTS}/{committed}")
                    left.discard(committed)
            except OSError as failed:
                raise SinkUnavailable(self.store.location.uri, "keeping the record of a window", failed) from failed
            if not left:
                return version
            fenced = version.make_next()
            failed_commit = self.log.try_commit(table, pipeline, fenced, metadata={"pipeline": pipeline, "fenced": sorted(left)})
            if failed_commit is None:
                self._remove(left, table)
                return fenced
            error = failed_commit
        raise SinkUnavailable(self.store.location.uri, "fencing earlier attempts", describe_store_error(error))

    def _remove(self, markers: Iterable[str], table: DeltaTable) -> None:
        """Remove attempts that can no longer commit, except for files that the table names.

        An attempt that has committed, but whose record could not be removed, looks like an attempt that has not committed.

        :param table: the table as it was loaded before the fence.
        :raises SinkUnavailable: the store did not answer.
        """
        import pyarrow as pa

        paths = pa.table(table.get_add_actions(flatten=True)).column("path").to_pylist()
        live = [urllib.parse.unquote(path) for path in paths]
        for marker in markers:
            directory = make_data_directory(marker)
            try:
                keep_only(self.store, directory, (path for path in live if path.startswith(f"{directory}/")))
            except OSError as error:
                raise SinkUnavailable(self.store.location.uri, "removing earlier attempts", error) from error
            # The attempt's record is removed last, because without it nothing would find the rest.
            self.store.remove_all(f"{ATTEMPTS}/{marker}")

    def sweep(self, pipeline: str) -> PipelineVersion:
        """Fence and remove all earlier attempts of a pipeline, and abandoned ones of other pipelines.

        :return: the pipeline's transaction version, after which the new attempt commits.
        """
        return sweep_attempts(self.store, pipeline, self.fence)

    def _load(self, text: str, name: str) -> WindowRecord:
        try:
            return WindowRecord.load(text)
        except ValueError as error:
            raise WindowConflict(name, f"{self.store.make_full_path(name)} cannot be understood: {error}", "a record") from error

    def _find_in_history(self, table: DeltaTable, pipeline: str, number: int) -> WindowRecord | None:
        """Return the record that is in the information of a commit, without its files: for a table that was copied without the
        directory of records."""
        found = (f for f in list_commits(table) if (f["pipeline"], f["number"]) == (pipeline, number))
        return next((WindowRecord(parse_recorded_window(facts)) for facts in found), None)


def list_commits(table: DeltaTable) -> Iterator[Mapping[str, Any]]:
    """Yield the information of the commits of windows, the newest first, as far as the log contains them."""
    for commit in table.history():
        found = commit.get(METADATA)
        if isinstance(found, dict) and "pipeline" in found and "number" in found:
            yield found


@dataclass(frozen=True)
class LoadedDelta(LoadedTable[WindowRecord, DataFile]):
    """A Delta table as it was loaded once.

    :param table: the handle of deltalake.
    :param records: the records of its windows.
    """

    table: DeltaTable
    records: Records

    @property
    def columns(self) -> Sequence[str]:
        return [field.name for field in self.table.schema().fields]

    def read_version(self, pipeline: str) -> PipelineVersion:
        """Return the pipeline's transaction version."""
        return self.records.log.read_version(self.table, pipeline)

    def find(self, pipeline: str, number: int) -> WindowRecord | None:
        return self.records.find(self.table, pipeline, number)

    def find_newest(self, pipeline: str) -> WindowRecord | None:
        number = self.read_version(pipeline).newest
        found = self.find(pipeline, number) if number else None
        if number and found is None:
            what = f"{self.records.store.location.uri} has its rows, but no record of its offsets"
            raise WindowConflict(f"{pipeline}#{number}", what, "a record in `_airflow`")
        return found

    def list_windows(self) -> Iterator[Applied]:
        with self.records.log.translate_errors("reading the history"):
            commits = list(list_commits(self.table))
        yield from map(parse_recorded_window, commits)

    def list_files_of(self, window: Window, found: WindowRecord) -> list[DataFile]:
        import pyarrow as pa

        paths = pa.table(self.table.get_add_actions(flatten=True)).column("path").to_pylist()
        live = {urllib.parse.unquote(path) for path in paths}
        files = [DataFile.of(file) for file in found.files]
        gone = [file.path for file in files if file.path not in live]
        if gone or sum(file.rows for file in files) != found.applied.written:
            what = (
                f"{len(gone)} of its {len(files)} files are no longer in the table: OPTIMIZE, DELETE or MERGE has rewritten them"
            )
            raise WindowConflict(str(window), what, REPLACED)
        return files

    def find_files_with(self, upsert: Upsert) -> Sequence[TableFile]:
        from airflow_kafka_spark.sinks.delta.tasks.data_files import list_table_files

        return list_table_files(self.records.store, self.table, upsert)[0]

    def flush(self) -> None:
        """Do nothing: :meth:`find` has made the commit durable before it has copied its record."""
