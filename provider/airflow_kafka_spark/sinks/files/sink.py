"""The files sink: windows become directories of Parquet, JSON, CSV or ORC files, each published by one rename."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import Fenced, Problem, SinkUnavailable
from airflow_kafka_spark.sinks.base import Guarantee, Shape, Sink, SplitWriter, WindowWriter
from airflow_kafka_spark.sinks.files.directory import (
    PUBLISH,
    RECORD,
    TASKS,
    AttemptLock,
    Staging,
    WindowRecord,
    exchange,
    flush,
    make_below,
    merged_columns,
    why_not_exchanged,
)
from airflow_kafka_spark.sinks.files.options import FilesSinkOptions
from airflow_kafka_spark.windows.binding import Endpoint
from airflow_kafka_spark.windows.continuity import refuse_gap
from airflow_kafka_spark.windows.model import Applied, Split, SplitResult, Window

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FilesSink(FilesSinkOptions, Sink):
    """Writes each window as a directory of files below ``path``. A listing of ``path`` shows complete windows only.

    Guarantee: exactly-once. A window's directory is written beside the table, on the same file system, and becomes visible by one
    ``rename(2)``, which is atomic and fails if the window is already there (POSIX). A replay exchanges the window's directory for
    another one in one step, too (``RENAME_EXCHANGE``, Linux; not on NFS). Spark, DuckDB, pandas and Arrow read ``path`` as an
    ordinary partitioned table; the window is a partition column of it. The Airflow worker and all of Spark's executors have to
    share the file system: a local disk for ``local[*]``, else NFS or another mount.

    :param path: the table's directory: an absolute path or a ``file://`` URI. Created if it does not exist. Templated.
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
    """

    template_fields: ClassVar[Sequence[str]] = ("path",)

    @property
    def guarantee(self) -> Guarantee:
        """Exactly-once."""
        return Guarantee.EXACTLY_ONCE

    @property
    def asset_uri(self) -> str:
        """The directory's ``file://`` URI."""
        return self.uri

    def destination(self) -> Endpoint:
        """Return the directory and the window column, which together decide where a window's directory is."""
        return Endpoint({"path": self.uri}, {"window_column": self.window_column})

    def validate(self, shape: Shape) -> list[Problem]:
        """Return the problems of options, types, directory and rights. Writes nothing: rights are looked up, not tried."""
        from airflow_kafka_spark.sinks.files.validation import files_sink_problems

        return files_sink_problems(self, shape)

    def target_problems(self) -> list[Problem]:
        """Return the problems of the directory, of the rights to it, and of format, compression and options."""
        from airflow_kafka_spark.sinks.files.validation import target_problems

        return target_problems(self)

    def last_applied(self, pipeline: str) -> Applied | None:
        """Return the window with the highest number among the directories of ``path``.

        :raises WindowConflict: that directory has no record, or another pipeline's.
        """
        newest = self.table.newest_record(pipeline)
        return newest.applied if newest else None

    def applied(self, window: Window) -> Applied | None:
        """Return the record in the window's directory, or None if the window is not published.

        :raises ForeignOffsets: a window of this number is there, of another cluster or of another topic of the same name.
        :raises WindowConflict: a window of this number is there, but of other offsets.
        """
        record = self.table.record(window)
        return record.applied if record and record.applied.replay >= window.replay else None

    def replay_problems(self) -> list[Problem]:
        """Return a problem if the file system cannot exchange two directories in one step. This is tried beside the table, where
        nothing is left."""
        try:
            reason = why_not_exchanged(self.directory)
        except ValueError:
            return []  # validate() refuses the path
        if reason is None:
            return []
        found = f"{self.directory} is on a file system on which a window cannot be replaced in one step: {reason}"
        action = 'Leave `on_rerun` at "skip", or move the table to a local file system of Linux (ext4, xfs, btrfs, tmpfs)'
        return [Problem("on_rerun", found, action)]

    def begin(self, window: Window, splits: Sequence[Split], shape: Shape) -> FilesWindowWriter:
        """Begin an attempt, and remove the directories of earlier ones. They are renamed first: an earlier attempt that is still
        running then finds none of its files, can neither write nor publish, and fails with
        :class:`~airflow_kafka_spark.errors.Fenced`."""
        staging = Staging.beside(self.directory)
        try:
            staging.sweep(window)
            staging.sweep_abandoned()
            attempt = staging.create(window)
        except OSError as error:
            raise SinkUnavailable(self.uri, f"beginning window {window}", str(error)) from error
        if self.format == "orc" and self.options.get("timestamps", "utc") == "utc":
            log.info("ORC timestamps are written as UTC: Spark reads them right where its JVMs' time zone is UTC")
        return FilesWindowWriter(self, window, tuple(splits), shape, staging, attempt)


class FilesWindowWriter(WindowWriter):
    """One attempt: a directory that tasks write into, and the rename that publishes it. Made by :meth:`FilesSink.begin`."""

    def __init__(
        self, sink: FilesSink, window: Window, splits: Sequence[Split], shape: Shape, staging: Staging, attempt: Path
    ) -> None:
        self.sink = sink
        self.window = window
        self.splits = splits
        self.shape = shape
        self.staging = staging
        self.attempt = attempt
        self._lock: AttemptLock | None = None
        # On a file system without locks, attempts of other pipelines are never removed, so none is needed.
        with suppress(OSError):
            self._lock = AttemptLock(attempt)

    def split_writer(self) -> SplitWriter:
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
        if (done := self.sink.applied(self.window)) is not None:
            return done
        self._refuse_conflict()
        try:
            record = self._gather(results)
            faults.reached("sink.in_transaction")
            self._publish()
        except OSError as error:
            return self._after(error)
        faults.reached("sink.committed")
        return record.applied

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.staging.discard(self.attempt)
        if self._lock is not None:
            self._lock.release()

    def _refuse_conflict(self) -> None:
        newest = self.sink.table.newest_record(self.window.pipeline)
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
        record = self._record(sum(int(result.token.get("rows", 0)) for result in results), files)
        (publish / RECORD).write_text(record.dump(), encoding="utf-8")
        for path in (publish / RECORD, *directories):
            flush(path)
        return record

    def _record(self, rows: int, files: Sequence[Mapping[str, Any]]) -> WindowRecord:
        window = self.window
        facts = {"run": window.run, "committed_at": datetime.now(timezone.utc).isoformat()}
        applied = Applied.of(window, rows)
        latest = self.sink.table.latest_record(window.pipeline)
        columns = merged_columns(latest.columns if latest else {}, self.shape.schema)
        return WindowRecord(applied, tuple(files), self.sink.format, tuple(self.sink.partition_by), facts, columns)

    def _publish(self) -> None:
        self.sink.directory.mkdir(parents=True, exist_ok=True)
        place = self.sink.table.window_path(self.window)
        if self.window.replay and place.exists():
            # The old directory takes the attempt's place and is removed with it.
            exchange(self.attempt / PUBLISH, place)
        else:
            os.rename(self.attempt / PUBLISH, place)
        self.sink.table.flush()

    def _after(self, error: OSError) -> Applied:
        """Return the window's record if another attempt has published it, else raise the error for the failed step."""
        if (done := self.sink.applied(self.window)) is not None:
            return done
        if isinstance(error, FileNotFoundError) and not self.attempt.exists():
            raise Fenced(self.window.pipeline, f"publishing window {self.window.number}") from error
        raise SinkUnavailable(self.sink.uri, f"publishing window {self.window}", str(error)) from error
