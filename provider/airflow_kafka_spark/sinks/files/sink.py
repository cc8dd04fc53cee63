"""The files sink: windows become Parquet, JSON, CSV or ORC files, published by one rename or by one conditional write."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import Fenced, Problem, SinkUnavailable
from airflow_kafka_spark.sinks.base import Guarantee, Shape, Sink, SplitWriter, WindowWriter
from airflow_kafka_spark.sinks.files.directory import (
    PUBLISH,
    RECORD,
    exchange_directories,
    explain_failed_exchange,
    merge_columns,
)
from airflow_kafka_spark.sinks.files.manifest import ManifestWindowWriter, find_records, open_manifests
from airflow_kafka_spark.sinks.files.options import FilesSinkOptions
from airflow_kafka_spark.sinks.storage.staging import TASKS, StagedAttempt, make_below
from airflow_kafka_spark.sinks.storage.store import flush
from airflow_kafka_spark.sinks.storage.window_record import WindowRecord
from airflow_kafka_spark.windows.binding import SERVER, Endpoint
from airflow_kafka_spark.windows.continuity import refuse_gap
from airflow_kafka_spark.windows.model import Applied, Split, SplitResult, Window

if TYPE_CHECKING:
    from typing_extensions import Self

    from airflow_kafka_spark.sinks.files.comparison import ComparedFiles

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FilesSink(FilesSinkOptions, Sink):
    """Writes each window as files below ``path``, on a file system or in S3.

    Guarantee: exactly-once. On a file system, a window's directory is written beside the table, on the same file system, and
    becomes visible by one ``rename(2)``, which is atomic and fails if the window is already there (POSIX). A replay exchanges the
    window's directory for another one in one step, too (``RENAME_EXCHANGE``, Linux; not on NFS). Spark, DuckDB, pandas and Arrow
    read ``path`` as an ordinary partitioned table: a listing shows complete windows only; the window is a partition column. The
    Airflow worker and all of Spark's executors have to share the file system: a local disk for ``local[*]``, else NFS or another
    mount.

    In an object store nothing can be renamed. There, a window's files are hidden below ``path/_data``, and one conditional write
    commits it (``If-None-Match`` in S3 and Azure, ``x-goog-if-generation-match`` in GCS). Readers get the files of complete
    windows from :func:`.window_files`, not from a listing. With ``visibility="listing"`` the guarantee is exactly-once, file
    by file: tasks begin uploads, and the driver completes them after the conditional write. If the driver dies, the next attempt
    completes the others.

    :param path: the table: an absolute path, a ``file://`` URI, ``s3://bucket/prefix``, ``gs://bucket/prefix`` or
        ``abfss://container@account.dfs.core.windows.net/prefix``. Created if it does not exist. Templated.
    :param format: ``parquet`` (default), ``json`` (one object per line), ``csv`` or ``orc``.
    :param partition_by: columns that become directories ``column=value`` within the window, as Spark writes them, and are left
        out of the files. They may be booleans, integers, decimals, dates and strings. Default: none.
    :param compression: parquet: ``none``, ``snappy`` (default), ``gzip``, ``zstd``, ``lz4``; orc: ``none``, ``zlib``,
        ``snappy``, ``lz4``, ``zstd`` (default); json and csv: ``none`` (default), ``gzip``.
    :param options: ``max_open_files`` per task if partitioned (default 64), ``max_rows_per_group`` (default 500,000) and
        ``max_bytes_per_group`` (default 64 MiB) of a row group; csv: ``delimiter`` (default ``,``), ``header`` (default True);
        orc: ``timestamps``, ``utc`` (default) or ``instant``, see docs/sinks.md. All others are passed to pyarrow's
        ``ParquetWriter`` or ``ORCWriter``, for instance ``compression_level``.
    :param window_column: the partition column that holds the window's name; default ``window``.
    :param auto_evolve: True: rows may have columns that earlier windows of the pipeline lack. Default False: such rows are
        refused before Spark starts. A column never changes its type.
    :param visibility: the way in which readers find complete windows: ``rename`` (default on a file system), ``manifest``
        (default in an object store; possible on a file system, too, for instance on NFS with replays), or in S3 ``listing``:
        readers list the table, and see the files of a window appear one by one. Needs ``boto3`` on the worker and on Spark's
        executors.
    :param conn_id: the Airflow connection: of type ``aws`` for S3, ``google_cloud_platform`` for GCS, ``wasb`` for Azure; default
        None, the credentials of the environment, for instance of a role. It needs the rights to get, put, list and delete objects
        below ``path``. Spark's executors get its credentials.
    """

    template_fields: ClassVar[Sequence[str]] = ("path", "conn_id")

    @property
    def guarantee(self) -> Guarantee:
        """Exactly-once, file by file with ``visibility="listing"``."""
        return Guarantee.EXACTLY_ONCE_PER_FILE if self.visibility == "listing" else Guarantee.EXACTLY_ONCE

    @property
    def asset_uri(self) -> str:
        """The URI of the table."""
        return self.uri

    def find_destination(self) -> Endpoint:
        """Return the table and the window column, which together decide the place of a window's files and the way in which it is
        published.

        A path with symbolic links has the directory that they lead to.
        """
        visibility = self.visibility or ("rename" if self.renames else "manifest")
        facts = {"window_column": self.window_column, "directory": self.location.directory, "visibility": visibility}
        server = None if self.renames else open_manifests(self).store.server
        return Endpoint({"path": self.uri, **({SERVER: server} if server else {})}, facts)

    def validate(self, shape: Shape) -> list[Problem]:
        """Return the problems of options, types, directory and rights. Writes nothing: rights are looked up, not tried."""
        from airflow_kafka_spark.sinks.files.validation import find_files_sink_problems

        return find_files_sink_problems(self, shape)

    def find_target_problems(self) -> list[Problem]:
        """Return the problems of the directory, of the rights to it, and of format, compression and options."""
        from airflow_kafka_spark.sinks.files.validation import find_target_problems

        return find_target_problems(self)

    def find_compared_table(self) -> ComparedFiles:
        """Return the files of complete windows, which the task reads."""
        from airflow_kafka_spark.sinks.files.comparison import ComparedFiles

        return ComparedFiles(self)

    def find_last_applied(self, pipeline: str) -> Applied | None:
        """Return the window with the highest number in the table.

        :raises WindowConflict: its directory has no record, or another pipeline's.
        """
        newest = find_records(self).find_newest_record(pipeline)
        return newest.applied if newest else None

    def find_applied(self, window: Window) -> Applied | None:
        """Return the table's record of the window, or None if the window is not published.

        :raises ForeignOffsets: a window of this number is there, of another cluster or of another topic of the same name.
        :raises WindowConflict: a window of this number is there, but of other offsets.
        """
        record = find_records(self).read_record(window)
        return record.applied if record and record.applied.replay >= window.replay else None

    def find_replay_problems(self) -> list[Problem]:
        """Return a problem if windows are published by renaming, and the file system cannot exchange two directories in one step
        (which is tried beside the table, without leaving anything there), or if readers list them in S3."""
        if self.visibility == "listing":
            found = f"readers list {self.uri}, where the files of a window cannot be replaced in one step"
            return [Problem("on_rerun", found, 'Leave `on_rerun` at "skip", or use `visibility="manifest"`')]
        try:
            if not self.renames:
                return []
            reason = explain_failed_exchange(self.directory)
        except ValueError:
            return []  # validate() refuses the path
        if reason is None:
            return []
        found = f"{self.directory} is on a file system on which a window cannot be replaced in one step: {reason}"
        action = 'Leave `on_rerun` at "skip", or move the table to a local file system of Linux (ext4, xfs, btrfs, tmpfs)'
        return [Problem("on_rerun", found, action)]

    def begin(self, window: Window, splits: Sequence[Split], shape: Shape) -> FilesWindowWriter | ManifestWindowWriter:
        """Begin an attempt, and remove the files of earlier ones, so that an earlier attempt that is still running can neither
        write nor publish, and fails with :class:`~airflow_kafka_spark.errors.Fenced`.

        The directories of earlier attempts are renamed before anything in them is removed. Where nothing can be renamed, the log
        of commits gets an entry that excludes these attempts."""
        if not self.renames:
            table = open_manifests(self)
            self._warn_of_orc()
            return ManifestWindowWriter(self, table, window, shape, table.sweep(window.pipeline))
        try:
            staged = StagedAttempt(self.directory, window)
        except OSError as error:
            raise SinkUnavailable(self.uri, f"beginning window {window}", error) from error
        self._warn_of_orc()
        return FilesWindowWriter(self, window, tuple(splits), shape, staged)

    def _warn_of_orc(self) -> None:
        if self.format == "orc" and self.options.get("timestamps", "utc") == "utc":
            log.info("ORC timestamps are written as UTC: Spark reads them right where its JVMs' time zone is UTC")


class FilesWindowWriter(WindowWriter):
    """One attempt: a directory that tasks write into, and the rename that publishes it. Made by :meth:`FilesSink.begin`."""

    def __init__(self, sink: FilesSink, window: Window, splits: Sequence[Split], shape: Shape, staged: StagedAttempt) -> None:
        self.sink = sink
        self.window = window
        self.splits = splits
        self.shape = shape
        self.staged = staged
        self.attempt = staged.directory

    def make_split_writer(self) -> SplitWriter:
        from airflow_kafka_spark.sinks.files.tasks.write import FilesSplitWriter, FilesTarget

        sink, window = self.sink, self.window
        target = FilesTarget(
            sink=sink.uri,
            attempt=str(self.attempt),
            pipeline=window.pipeline,
            window=str(window),
            schema=self.shape.schema,
            partition_by=tuple(sink.partition_by),
            spec=sink.spec,
        )
        return FilesSplitWriter(target)

    def commit(self, results: Sequence[SplitResult]) -> Applied:
        """Publish the window, as :meth:`WindowWriter.commit`. Only the files that ``results`` name are published, not those
        that other task attempts at a split have written or are still writing.

        :raises Fenced: a newer attempt has taken over and has not published yet.
        """
        faults.reached("sink.staged")
        if (done := self.sink.find_applied(self.window)) is not None:
            return done
        self._refuse_conflict()
        try:
            record = self._gather(results)
            faults.reached("sink.in_transaction")
            self._publish()
        except OSError as error:
            return self._resolve_failure(error)
        faults.reached("sink.committed")
        return record.applied

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.staged.leave()

    def _refuse_conflict(self) -> None:
        newest = self.sink.table.find_newest_record(self.window.pipeline)
        refuse_gap(newest.applied if newest else None, self.window, str(self.sink.directory))

    def _gather(self, results: Sequence[SplitResult]) -> WindowRecord:
        """Move the files of all splits into one directory, add the record, and flush all of it to disk."""
        publish = self.attempt / PUBLISH
        os.mkdir(publish)
        directories = {publish}
        files: list[Mapping[str, Any]] = []
        for token in (result.token for result in results):
            for file in token.get("files", ()):
                *parents, name = file["path"].split("/")
                directory = make_below(publish, parents)
                directories.update(publish.joinpath(*parents[:depth]) for depth in range(1, len(parents) + 1))
                os.rename(self.attempt / TASKS / token["token"] / file["path"], directory / name)
                files.append(file)
        record = self._make_record(sum(int(result.token.get("rows", 0)) for result in results), files)
        (publish / RECORD).write_text(record.dump(), encoding="utf-8")
        for path in (publish / RECORD, *directories):
            flush(path)
        return record

    def _make_record(self, rows: int, files: Sequence[Mapping[str, Any]]) -> WindowRecord:
        window = self.window
        facts = {"run": window.run, "committed_at": datetime.now(timezone.utc).isoformat()}
        applied = Applied.of(window, rows)
        latest = self.sink.table.find_latest_record(window.pipeline)
        columns = merge_columns(latest.columns if latest else {}, self.shape.schema)
        return WindowRecord(applied, tuple(files), self.sink.format, tuple(self.sink.partition_by), facts, columns)

    def _publish(self) -> None:
        self.sink.directory.mkdir(parents=True, exist_ok=True)
        target = self.sink.table.get_window_path(self.window)
        if self.window.replay and target.exists():
            # The old directory is now in the place of the attempt, and is removed with it.
            exchange_directories(self.attempt / PUBLISH, target)
        else:
            os.rename(self.attempt / PUBLISH, target)
        self.sink.table.flush()

    def _resolve_failure(self, error: OSError) -> Applied:
        """Return the window's record if another attempt has published it, else raise the error for the failed step."""
        if (done := self.sink.find_applied(self.window)) is not None:
            return done
        if isinstance(error, FileNotFoundError) and self.staged.is_fenced:
            raise Fenced(self.window.pipeline, f"publishing window {self.window.number}") from error
        raise SinkUnavailable(self.sink.uri, f"publishing window {self.window}", error) from error
