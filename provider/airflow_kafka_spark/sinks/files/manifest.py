"""The table of a files sink in an object store, where no directory can be renamed: one conditional write commits a window.

::

    <table>/_data/<window column>=<pipeline>-<number>/[column=value/]<file>   data files, hidden from readers that list
    <table>/_windows/<pipeline>/<number>/<replay>.json                        the windows that readers see, with their files
    <table>/_windows/<pipeline>/log/<sequence>.json                           the commits of a pipeline, one after the other
    <table>/_windows/<pipeline>/log/newest                                    a sequence number, at most that of the newest commit
    <table>/_windows/<pipeline>.json                                          format and columns of the newest window of all
    <table>/_airflow/attempts/<attempt>/attempt.json                          an attempt has begun, and was not cleaned up after

An attempt reads the newest commit of its pipeline when it begins, and commits under the next sequence number, by a write that
fails if that object exists (``If-None-Match: *`` in S3, ``link(2)`` on a file system). So one of several attempts commits. An
attempt that finds others before it takes a sequence number itself first: a fence, after which none of them can commit, and then
removes their files. The object of a window is written after its commit. If the driver dies in between, the next read of the log
writes it.
"""

from __future__ import annotations

import json
import logging
import random
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import cached_property
from typing import TYPE_CHECKING

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import Fenced, SinkUnavailable, WindowConflict
from airflow_kafka_spark.hooks.object_stores import OBJECT_STORES
from airflow_kafka_spark.sinks.base import Shape, SplitWriter
from airflow_kafka_spark.sinks.files.directory import FilesTable, make_window_directory, merge_columns
from airflow_kafka_spark.sinks.storage.attempts import (
    ATTEMPTS,
    BEGUN,
    AttemptWindowWriter,
    TableAttempt,
    make_marker_name,
    sweep_attempts,
)
from airflow_kafka_spark.sinks.storage.store import (
    TableLocation,
    TableStore,
    UploadsGone,
    UploadStore,
    make_pipeline_slug,
    open_objects,
)
from airflow_kafka_spark.sinks.storage.window_record import WindowRecord, list_files
from airflow_kafka_spark.windows.continuity import refuse_gap, refuse_other
from airflow_kafka_spark.windows.interval import remove_interval
from airflow_kafka_spark.windows.model import Applied, SplitResult, Window

if TYPE_CHECKING:
    from airflow_kafka_spark.sinks.files.options import FilesSinkOptions
    from airflow_kafka_spark.sinks.files.tasks.write import ObjectsTarget

log = logging.getLogger(__name__)

DATA = "_data"
WINDOWS = "_windows"
SYMLINKS = "_symlink_format_manifest"

_NEWEST = "newest"
_NONCE_BITS = 20
_TRIES = 100
_ENTRY = re.compile(r"(\d{20})\.json")
_REPLAY = re.compile(r"(\d+)\.json")
_READERS = 32
_FAILURES = 4
"""Maximum number of tries of a commit whose outcome is unknown."""


@dataclass(frozen=True)
class Commit:
    """An entry in the log of a pipeline.

    :param sequence: its number in the log; 0 stands for the time before the first entry.
    :param newest: the highest number of a window that is committed.
    :param attempt: the attempt that wrote it.
    :param record: the window that it commits; None for a fence.
    :param fenced: the attempts that can no longer commit.
    """

    sequence: int
    newest: int = 0
    attempt: str = ""
    record: WindowRecord | None = None
    fenced: tuple[str, ...] = ()

    def dump(self) -> str:
        """Return the entry as JSON."""
        window = json.loads(self.record.dump()) if self.record else None
        return json.dumps(
            {"version": 1, "attempt": self.attempt, "newest": self.newest, "fenced": list(self.fenced), "window": window},
            ensure_ascii=False,
        )

    @classmethod
    def load(cls, sequence: int, text: str) -> Commit:
        """Return the entry that a JSON text holds.

        :raises ValueError: the text is no entry.
        """
        found = json.loads(text)
        try:
            record = WindowRecord.load(json.dumps(found["window"])) if found["window"] else None
            return cls(sequence, found["newest"], found["attempt"], record, tuple(found["fenced"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an entry of the log: {error!r}") from error

    def make_marker(self, pipeline: str) -> str:
        """Return the name of a new attempt that will commit after this entry."""
        return make_marker_name(pipeline, (self.sequence + 1) << _NONCE_BITS | secrets.randbelow(1 << _NONCE_BITS))


def parse_sequence(marker: str) -> int:
    """Return the sequence number under which an attempt commits."""
    return int(marker[-20:]) >> _NONCE_BITS


def make_attempt_id(marker: str) -> str:
    """Return the part of a data file's name that identifies its attempt."""
    return f"{int(marker[-20:]):x}"


@dataclass(frozen=True)
class ManifestTable:
    """A files table whose complete windows are listed in objects of their own.

    :param store: the table's files.
    :param window_column: the partition column that holds the windows' names.
    """

    store: TableStore
    window_column: str

    # --- windows ------------------------------------------------------------------------------------------------------

    def read_record(self, window: Window, newest: Commit | None = None) -> WindowRecord | None:
        """Return the record of a window, or None if it is not committed.

        :param newest: the newest commit of the pipeline, if the caller has read it; None: it is read now.
        :raises ForeignOffsets: a window of this number is there, of another cluster or of another topic of the same name.
        :raises WindowConflict: a window of this number is there, but of other offsets.
        :raises SinkUnavailable: the store did not answer.
        """
        record = self.find(window.pipeline, window.number, newest)
        if record:
            refuse_other(record.applied, window, self.store.location.uri)
        return record

    def find_newest_record(self, pipeline: str) -> WindowRecord | None:
        """Return the record of the pipeline's window with the highest number, or None without any.

        :raises SinkUnavailable: the store did not answer.
        """
        newest = self.find_newest_commit(pipeline)
        return self.find(pipeline, newest.newest, newest) if newest.newest else None

    def find_latest_record(self, pipeline: str) -> WindowRecord | None:
        """Return format and columns of the window that was committed last, of any data interval of the pipeline, or None without
        any. A window that is committed at the same moment may be missing.

        :raises SinkUnavailable: the store did not answer.
        """
        try:
            text = self.store.get(self._get_latest_path(pipeline))
        except OSError as error:
            raise self._make_unavailable_error("looking for the last window", error) from error
        return self._load(text, self._get_latest_path(pipeline)) if text is not None else None

    def find(self, pipeline: str, number: int, newest: Commit | None = None) -> WindowRecord | None:
        """Return the record of the newest replay of a window, or None if it is not committed.

        :param newest: the newest commit of the pipeline, if the caller has read it; None: it is read now.
        :raises SinkUnavailable: the store did not answer.
        """
        newest = newest or self.find_newest_commit(pipeline)
        if newest.record and newest.record.applied.number == number:
            return newest.record
        if number > newest.newest:
            return None
        directory = self._get_window_directory(pipeline, number)
        try:
            names = self.store.list_names(directory)
            replays = [int(found[1]) for name in names if (found := _REPLAY.fullmatch(name))]
            text = self.store.get(f"{directory}/{max(replays)}.json") if replays else None
        except OSError as error:
            raise self._make_unavailable_error("reading the record of a window", error) from error
        return self._load(text, directory) if text is not None else None

    # --- log ----------------------------------------------------------------------------------------------------------

    def find_newest_commit(self, pipeline: str) -> Commit:
        """Return the newest entry in the log of a pipeline, and write the object of its window if its attempt has not.

        The cost does not depend on the number of entries: those before the one that ``newest`` names are not listed.

        :raises SinkUnavailable: the store did not answer.
        """
        log = self._make_log_path(pipeline)
        try:
            known = int(self.store.get(f"{log}/{_NEWEST}") or 0)
            found = self._list_entries(log, f"{known - 1:020d}.json") if known else []
            # Entries may have been removed by hand.
            found = found or self._list_entries(log, "")
            if not found:
                return Commit(0)
            text = self.store.get(f"{log}/{max(found):020d}.json")
            commit = Commit.load(max(found), text or "{}")
            self.show(commit)
            if commit.sequence > known:
                self.store.put(f"{log}/{_NEWEST}", str(commit.sequence))
        except ValueError as error:
            raise WindowConflict(
                pipeline, f"{self.store.make_full_path(log)} cannot be understood: {error}", "entries of the log"
            ) from error
        except OSError as error:
            raise self._make_unavailable_error("looking for the last window", error) from error
        return commit

    def _list_entries(self, log: str, after: str) -> list[int]:
        """Return the sequence numbers of the entries whose names sort after a name."""
        return [int(match[1]) for name in self.store.list_names_after(log, after) if (match := _ENTRY.fullmatch(name))]

    def append(self, pipeline: str, commit: Commit) -> bool:
        """Write an entry of the log, unless its number is taken.

        :return: False if there is an entry with this number. It may be this entry, if the answer to its write was lost.
        :raises OSError: it is unknown if the entry was written.
        """
        created = self.store.create(f"{self._make_log_path(pipeline)}/{commit.sequence:020d}.json", commit.dump())
        if created:
            self.store.put(f"{self._make_log_path(pipeline)}/{_NEWEST}", str(commit.sequence))
        return created

    def show(self, commit: Commit) -> None:
        """Write the object of the window that a commit names, so that readers see the window.

        :raises OSError: the store refused it.
        """
        if commit.record is None:
            return
        applied, text = commit.record.applied, commit.record.dump()
        directory = self._get_window_directory(applied.pipeline, applied.number)
        path = f"{directory}/{applied.replay}.json"
        if not self.store.exists(path):
            self.complete(commit.record)
            self.store.make(directory)
            self.store.put(path, text)
            self.store.put(self._get_latest_path(applied.pipeline), text)

    def complete(self, record: WindowRecord) -> None:
        """Make a committed window visible to readers. It may be called repeatedly. Does nothing by default.

        :raises OSError: the store refused it.
        """

    # --- attempts -----------------------------------------------------------------------------------------------------

    def sweep(self, pipeline: str) -> Commit:
        """Fence and remove all earlier attempts of a pipeline, and abandoned ones of other pipelines.

        :return: the newest commit of the pipeline, after which the new attempt commits.
        :raises SinkUnavailable: the store did not answer.
        """
        return sweep_attempts(self.store, pipeline, self.fence)

    def fence(self, pipeline: str, markers: Iterable[str]) -> Commit:
        """Remove ended attempts of a pipeline.

        Guarantee: none of them commits anything afterwards, and no file of a committed window is removed.

        :param markers: their names, listed before this is called.
        :return: the newest commit of the pipeline.
        :raises SinkUnavailable: the store did not answer.
        """
        left = sorted(markers)
        for _ in range(_TRIES):
            newest = self.find_newest_commit(pipeline)
            try:
                # An attempt whose sequence number is taken cannot commit any more.
                if any(parse_sequence(marker) > newest.sequence for marker in left):
                    self.append(pipeline, Commit(newest.sequence + 1, newest.newest, fenced=tuple(left)))
                    continue
                for marker in left:
                    self.remove_attempt(marker)
            except OSError as error:
                raise self._make_unavailable_error("fencing earlier attempts", error) from error
            return newest
        raise self._make_unavailable_error("fencing earlier attempts", "others commit all the time")

    def remove_attempt(self, marker: str) -> None:
        """Remove the data files of an attempt that can no longer commit, except for those of a window that it has committed.

        The attempt's record is removed last, because without it nothing would find the files.

        :raises OSError: the store did not answer.
        """
        text = self.store.get(f"{ATTEMPTS}/{marker}/{BEGUN}")
        if text is not None:
            note = json.loads(text)
            path = f"{self._get_window_directory(note['pipeline'], note['window'])}/{note['replay']}.json"
            committed = self.store.get(path)
            named = {file["path"] for file in self._load(committed, path).files} if committed is not None else set()
            self.remove_unnamed(note["data"], marker, named)
            if committed is not None and note["replay"]:
                self._remove_replaced(note["pipeline"], note["window"], note["replay"])
            self.store.remove_empty(note["data"])
        self.store.remove_all(f"{ATTEMPTS}/{marker}")

    def _remove_replaced(self, pipeline: str, number: int, replay: int) -> None:
        """Remove the files and the records of a window that a replay has replaced."""
        directory = self._get_window_directory(pipeline, number)
        for name in self.store.list_names(directory):
            found = _REPLAY.fullmatch(name)
            if found and int(found[1]) < replay and (text := self.store.get(f"{directory}/{name}")) is not None:
                self.store.remove_files([file["path"] for file in self._load(text, directory).files])
                self.store.remove(f"{directory}/{name}")

    def list_files_of(self, directory: str, marker: str) -> list[str]:
        """Return the data files that an attempt has written below a directory.

        :raises OSError: the store did not answer.
        """
        of = f"-{make_attempt_id(marker)}-"
        return [path for path in self.store.list_files_below(directory) if of in path.rpartition("/")[2]]

    def remove_unnamed(self, directory: str, marker: str, named: Set[str]) -> None:
        """Remove the data files that an attempt has written below a directory, except for named ones.

        :raises OSError: the store did not answer.
        """
        self.store.remove_files([path for path in self.list_files_of(directory, marker) if path not in named])

    def get_data_directory(self, window: Window) -> str:
        """Return the directory of a window's data files, which all attempts at it share."""
        return f"{DATA}/{make_window_directory(self.window_column, window)}"

    def make_split_writer(self, target: ObjectsTarget) -> SplitWriter:
        """Return a writer for the tasks."""
        from airflow_kafka_spark.sinks.files.tasks.write import ObjectsSplitWriter

        return ObjectsSplitWriter(target)

    # --- readers ------------------------------------------------------------------------------------------------------

    def list_visible_records(self, pipelines: Sequence[str] = ()) -> list[WindowRecord]:
        """Return the records of all windows that readers see, in the order of pipelines and windows.

        :param pipelines: names of pipelines; none for all.
        :raises SinkUnavailable: the store did not answer.
        """
        try:
            newest: dict[tuple[str, str], int] = {}
            slugs = {make_pipeline_slug(name) for name in pipelines}
            for path in self.store.list_files_below(WINDOWS):
                slug, _, rest = path.removeprefix(f"{WINDOWS}/").partition("/")
                number, _, name = rest.partition("/")
                replay = _REPLAY.fullmatch(name)
                if replay and number.isdecimal() and (not slugs or slug in slugs):
                    newest[slug, number] = max(int(replay[1]), newest.get((slug, number), 0))
            paths = [f"{WINDOWS}/{slug}/{number}/{replay}.json" for (slug, number), replay in sorted(newest.items())]
            with ThreadPoolExecutor(_READERS) as readers:
                texts = list(readers.map(self.store.get, paths))
        except OSError as error:
            raise self._make_unavailable_error("listing windows", error) from error
        return [self._load(text, path) for path, text in zip(paths, texts, strict=True) if text is not None]

    # --- internals ----------------------------------------------------------------------------------------------------

    def _make_log_path(self, pipeline: str) -> str:
        return f"{WINDOWS}/{make_pipeline_slug(pipeline)}/log"

    def _get_window_directory(self, pipeline: str, number: int) -> str:
        return f"{WINDOWS}/{make_pipeline_slug(pipeline)}/{number:010d}"

    def _get_latest_path(self, pipeline: str) -> str:
        return f"{WINDOWS}/{make_pipeline_slug(remove_interval(pipeline))}.json"

    def _load(self, text: str, path: str) -> WindowRecord:
        try:
            return WindowRecord.load(text)
        except ValueError as error:
            raise WindowConflict(path, f"{self.store.make_full_path(path)} cannot be understood: {error}", "a record") from error

    def _make_unavailable_error(self, doing: str, error: str | OSError) -> SinkUnavailable:
        return SinkUnavailable(self.store.location.uri, doing, error)


@dataclass(frozen=True)
class ListedTable(ManifestTable):
    """A files table in S3 whose windows readers find by listing it.

    Tasks send the parts of files, which are invisible to readers. The entry of the log that commits a window names their uploads.
    The uploads are completed after that entry: by the attempt, or by the next operation on the table if the attempt dies. Nothing
    is committed after an entry before its window is shown, so only uploads of the newest entry can be left to complete.
    """

    @cached_property
    def uploads(self) -> UploadStore:
        """The uploads below the table."""
        return UploadStore(self.store)

    def complete(self, record: WindowRecord) -> None:
        try:
            self.uploads.complete(record.files)
        except UploadsGone as error:
            directory = self.store.make_full_path(record.files[0]["path"].partition("/")[0])
            log = self.store.make_full_path(self._make_log_path(record.applied.pipeline))
            action = f"Remove the newest entry of {log} and the objects below {directory}: the window is then written again"
            raise OSError(f"{error}. {action}") from error

    def list_files_of(self, directory: str, marker: str) -> list[str]:
        return list(self._list_uploads_of(directory, marker).values())

    def _list_uploads_of(self, directory: str, marker: str) -> dict[str, str]:
        of = f"-{make_attempt_id(marker)}-"
        return {upload: path for upload, path in self.uploads.list_pending(directory).items() if of in path.rpartition("/")[2]}

    def remove_unnamed(self, directory: str, marker: str, named: Set[str]) -> None:
        # The uploads of a commit are completed by now. If the answer to a begin was lost, an upload was begun twice, under one
        # path.
        self.uploads.abort(self._list_uploads_of(directory, marker))

    def get_data_directory(self, window: Window) -> str:
        return make_window_directory(self.window_column, window)

    def make_split_writer(self, target: ObjectsTarget) -> SplitWriter:
        from airflow_kafka_spark.sinks.files.tasks.write import UploadsSplitWriter

        return UploadsSplitWriter(target)


def open_manifests(sink: FilesSinkOptions) -> ManifestTable:
    """Return the table of a sink that publishes windows by a log of commits.

    :raises ValueError: ``path`` names no table.
    :raises Exception: the connection does not exist, or gives no credentials.
    """
    kind = ListedTable if sink.visibility == "listing" else ManifestTable
    return kind(open_objects(sink.location, sink.conn_id), sink.window_column)


def find_records(sink: FilesSinkOptions) -> FilesTable | ManifestTable:
    """Return the records of windows of a sink. Parameters and errors are those of :func:`open_manifests`."""
    return sink.table if sink.renames else open_manifests(sink)


class ManifestWindowWriter(AttemptWindowWriter):
    """One attempt: hidden files, and the conditional write that commits them. Made by :meth:`.FilesSink.begin`.

    :param base: the newest commit of the pipeline when the attempt began. If another attempt of the pipeline commits or fences,
        there is a newer one, and this attempt commits nothing.
    """

    def __init__(self, sink: FilesSinkOptions, table: ManifestTable, window: Window, shape: Shape, base: Commit) -> None:
        marker, directory = base.make_marker(window.pipeline), table.get_data_directory(window)
        super().__init__(TableAttempt(window, marker, table.store, table.store, directory))
        self.sink, self.table, self.shape, self.base = sink, table, shape, base
        try:
            self.attempt.begin(data=self.attempt.directory)
        except OSError as error:
            raise SinkUnavailable(sink.uri, f"beginning window {window}", error) from error

    def make_split_writer(self) -> SplitWriter:
        import pyarrow as pa

        from airflow_kafka_spark.sinks.files.tasks.write import ObjectsTarget

        sink, schema = self.sink, self.shape.schema
        target = ObjectsTarget(
            **self.attempt.make_target(sink.uri),
            file_schema=sink.spec.make_stored_schema(pa.schema([f for f in schema if f.name not in sink.partition_by])),
            spec=sink.spec,
            directories=tuple(sink.partition_by),
            attempt_id=make_attempt_id(self.marker),
        )
        return self.table.make_split_writer(target)

    def commit(self, results: Sequence[SplitResult]) -> Applied:
        """Commit the window, as :meth:`WindowWriter.commit`. Only the files that ``results`` name are committed.

        If the answer to a write is lost, the log is read again. Either it has the commit, or the write is tried again in the same
        place.

        :raises Fenced: a newer attempt has taken over and has not committed yet.
        """
        faults.reached("sink.staged")
        window, table = self.window, self.table
        commit: Commit | None = None
        error: str | OSError = "others commit all the time"
        for again in range(_FAILURES + 1):
            newest = table.find_newest_commit(window.pipeline)
            found = newest.record if newest.attempt == self.marker else table.read_record(window, newest)
            if found is not None and found.applied.replay >= window.replay:
                return self._finish(found)
            self.in_doubt = self.in_doubt and newest.sequence == self.base.sequence
            if newest.sequence != self.base.sequence:
                raise Fenced(window.pipeline, f"committing window {window.number}")
            before = table.find(window.pipeline, newest.newest, newest) if newest.newest else None
            refuse_gap(before.applied if before else None, window, self.sink.uri)
            commit = commit or self._prepare(results, newest)
            faults.reached("sink.in_transaction")
            self.in_doubt = True
            try:
                if table.append(window.pipeline, commit):
                    assert commit.record is not None
                    table.show(commit)
                    faults.reached("sink.committed")
                    return self._finish(commit.record)
            except OSError as failed:
                error = failed
            # Many attempts that try again at once would overload a store that has just refused them. Amazon also refuses
            # a conditional write while another one is under way, even if that one fails later.
            time.sleep(random.random() * 0.2 * (again + 1))
        raise SinkUnavailable(self.sink.uri, f"committing window {window}", error)

    # --- steps of a commit --------------------------------------------------------------------------------------------

    def _prepare(self, results: Sequence[SplitResult], newest: Commit) -> Commit:
        window, sink = self.window, self.sink
        files = list_files(results)
        try:
            there = self.table.list_files_of(self.attempt.directory, self.marker) if files else ()
            suspect = "a lifecycle rule of the bucket"
            self.attempt.refuse_missing([file["path"] for file in files], sink.uri, suspect, there)
        except OSError as error:
            raise SinkUnavailable(sink.uri, f"committing window {window}", error) from error
        rows = sum(int(result.token.get("rows", 0)) for result in results)
        facts = {"run": window.run, "committed_at": datetime.now(timezone.utc).isoformat()}
        latest = self.table.find_latest_record(window.pipeline)
        columns = merge_columns(latest.columns if latest else {}, self.shape.schema)
        applied = Applied.of(window, rows)
        record = WindowRecord(applied, tuple(files), sink.format, tuple(sink.partition_by), facts, columns)
        return Commit(newest.sequence + 1, max(newest.newest, window.number), self.marker, record)

    def _finish(self, record: WindowRecord) -> Applied:
        """Clean up after the window was committed, by this attempt or by another one."""
        self.in_doubt = False
        self.discard()
        self.committed = True
        return record.applied

    def discard(self) -> None:
        """Remove the files of the attempt, except for those of a window that it has committed. Never raises."""
        try:
            self.table.remove_attempt(self.marker)
        except OSError as error:
            log.warning("The next attempt removes the files that window %s has left: %s", self.window, error)


def write_symlink_manifest(path: str, conn_id: str | None = None, pipelines: Sequence[str] = ()) -> int:
    """Write the list of the files of a table's complete windows, in the form that Trino, Athena and Hive read
    (``SymlinkTextInputFormat``): files named ``manifest`` below ``<path>/_symlink_format_manifest``, as Delta writes them.

    A table without ``partition_by`` has one such file, which is replaced in one step: readers see whole windows. A table with
    ``partition_by`` has one for each combination of partition values, and each is replaced in one step. Call it after a window,
    for instance in a task after the operator's.

    :param path: the table's path, as given to :class:`.FilesSink`.
    :param conn_id: the Airflow connection, as that of the sink; None (default) for the credentials of the environment.
    :param pipelines: names of the pipelines whose windows are wanted; default all.
    :return: the number of data files.
    :raises ValueError: the path names no table.
    :raises SinkUnavailable: the store did not answer.
    """
    table = ManifestTable(open_objects(TableLocation.parse(path, OBJECT_STORES), conn_id), "")
    store, by_partition, count = table.store, defaultdict[str, list[str]](list), 0
    for record in table.list_visible_records(pipelines):
        for file in record.files:
            directories = file["path"].removeprefix(f"{DATA}/").split("/")[1:-1]
            by_partition["/".join([SYMLINKS, *directories])].append(f"{store.location.path_or_uri}/{file['path']}\n")
            count += 1
    try:
        there = [name for name in store.list_files_below(SYMLINKS) if name.endswith("/manifest")]
        for name in {*there, *(f"{directory}/manifest" for directory in by_partition)}:
            store.make(name.rpartition("/")[0])
            store.put(name, "".join(by_partition.get(name.rpartition("/")[0], ())))
    except OSError as error:
        raise SinkUnavailable(store.location.uri, "writing the symlink manifest", error) from error
    return count


def window_files(path: str, conn_id: str | None = None, pipelines: Sequence[str] = ()) -> list[str]:
    """Return the data files of all complete windows of a table that is published by manifests.

    Readers use this list instead of listing a directory. It contains whole windows only, and for a window that was replayed
    the files of its newest replay. Pass it to ``read_parquet`` of DuckDB, ``pyarrow.dataset.dataset`` or ``spark.read.parquet``;
    for the partition columns, the common directory is ``<path>/_data`` (``basePath`` of Spark).

    :param path: the table's path, as given to :class:`.FilesSink`.
    :param conn_id: the Airflow connection, as that of the sink; None (default) for the credentials of the environment.
    :param pipelines: names of the pipelines whose windows are wanted; default all.
    :return: URIs, or paths on a file system, in the order of pipelines and windows.
    :raises ValueError: the path names no table.
    :raises SinkUnavailable: the store did not answer.
    """
    store = open_objects(TableLocation.parse(path, OBJECT_STORES), conn_id)
    records = ManifestTable(store, "").list_visible_records(pipelines)
    return [f"{store.location.path_or_uri}/{file['path']}" for record in records for file in record.files]
