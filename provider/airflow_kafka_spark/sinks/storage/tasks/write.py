"""Writing one split in a Spark task, into files below the table that no commit names yet."""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet

from airflow_kafka_spark.errors import Fenced, SinkUnavailable
from airflow_kafka_spark.sinks.base import OFFSET_COLUMNS, Rows
from airflow_kafka_spark.sinks.storage.attempts import ATTEMPTS, BEGUN
from airflow_kafka_spark.sinks.storage.store import TableStore, file_stem, flush, plain
from airflow_kafka_spark.sinks.storage.tasks.buffered_files import BufferedFile, BufferedFilesWriter, PartitionKey
from airflow_kafka_spark.sinks.storage.tasks.formats import FileSpec
from airflow_kafka_spark.windows.model import Split


@dataclass(frozen=True, kw_only=True)
class StoreTarget:
    """The part of an attempt that tasks need.

    :param uri: the sink's URI, for messages.
    :param store: where data files lie.
    :param home: the table's location, below which attempts are noted.
    :param attempt: the name of the attempt's directory of data files.
    :param marker: the name of the attempt below ``_airflow/attempts``. It is removed when the attempt has ended.
    :param pipeline: the pipeline's name.
    :param window: the window, for messages.
    :param file_schema: the files' columns.
    :param spec: how files are written.
    :param offset_columns: True: rows get topic, partition and offset.
    :param window_column: the column that gets the window's name; None if the table has no such column.
    """

    uri: str
    store: TableStore
    home: TableStore
    attempt: str
    marker: str
    pipeline: str
    window: str
    file_schema: pa.Schema
    spec: FileSpec
    offset_columns: bool = False
    window_column: str | None = None

    @property
    def partition_by(self) -> tuple[str, ...]:
        """The columns whose values decide which file a row goes to."""
        return ()


class StoreFile(BufferedFile):
    """A data file of the table.

    :param target: where and how to write.
    :param path: its path, below the place of data files.
    """

    def __init__(self, target: StoreTarget, path: str) -> None:
        self.store, self.path = target.store, path
        super().__init__(self.store.open(path), target.spec, target.file_schema)

    def finish(self) -> None:
        super().finish()
        if self.store.place.is_local:
            flush(self.store.full(self.path))

    def drop(self) -> None:
        super().drop()
        self.store.remove(self.path)


LakeFileT = TypeVar("LakeFileT", bound=StoreFile)


def footer_of(file: StoreFile) -> pyarrow.parquet.FileMetaData:
    """Return the footer of a file that is finished."""
    return file.writer.footer  # type: ignore[attr-defined]


class StoreSplitWriter(BufferedFilesWriter[LakeFileT]):
    """Writes one split into files of this task attempt alone. The driver commits the files of the task attempt whose result
    Spark returns, and removes the others.

    A subclass describes each file for the commit.

    :param target: where and how to write.
    """

    target: StoreTarget

    def __init__(self, target: StoreTarget) -> None:
        self.target = target
        self.token = ""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.target.window}, {self.target.store.place.uri}/{self.target.attempt})"

    def __getstate__(self) -> dict[str, Any]:
        return {"target": self.target, "token": ""}

    @abstractmethod
    def describe(self, file: LakeFileT, key: PartitionKey) -> Mapping[str, Any]:
        """Return partition values and statistics of a file that is finished."""

    def open(self, split: Split) -> None:
        """Begin a split.

        :raises Fenced: a newer attempt at the window has removed this attempt.
        :raises SinkUnavailable: the table's location cannot be read on this machine.
        """
        self.begin_split(split)
        self.token = uuid.uuid4().hex
        self._refuse_ended()

    def write(self, rows: Rows) -> None:
        super().write(self._with_origin(rows))

    def _with_origin(self, rows: Rows) -> Rows:
        """Return rows with the columns that say where they came from."""
        target, range, count = self.target, self.split.range, rows.batch.num_rows
        names, columns = list(rows.batch.schema.names), list(rows.batch.columns)
        if target.offset_columns:
            topic, partition = pa.scalar(range.topic), pa.scalar(range.partition, pa.int32())
            names += OFFSET_COLUMNS
            columns += [pa.repeat(topic, count), pa.repeat(partition, count), rows.offsets]
        if target.window_column:
            names.append(target.window_column)
            columns.append(pa.repeat(pa.scalar(target.window), count))
        return replace(rows, batch=pa.RecordBatch.from_arrays(columns, names=names))

    def close(self) -> Mapping[str, Any]:
        """Finish all files.

        :return: ``rows``, and ``files``: path, rows, bytes, partition values and statistics of each.
        :raises Fenced: a newer attempt at the window has removed this attempt.
        """
        try:
            self.finish_all()
            if self.target.store.place.is_local:
                flush(self.target.store.full(self.target.attempt))
        except OSError as error:
            raise self.failed(error) from error
        # A process that removes the attempt may have listed its files before this one was created.
        self._refuse_ended()
        self.token = ""
        return {"rows": self.rows, "files": self.finished}

    def abort(self) -> None:
        if self.token:
            self.drop_all()
            for file in self.finished:
                self.target.store.remove(file["path"])
            self.token = ""

    def unwritable(self, rows: Rows) -> Mapping[int, str]:
        """Parquet holds every value of the types that ``validate`` lets pass."""
        return {}

    # --- files --------------------------------------------------------------------------------------------------------

    def open_file(self, key: PartitionKey, part: int) -> LakeFileT:
        # Partition values are in the metadata only. In a path they would have to be escaped twice.
        number = len(self.finished) + len(self.files)
        path = f"{self.target.attempt}/{plain(file_stem(self.split.range, number))}-{self.token}.parquet"
        return self.new_file(path)

    @abstractmethod
    def new_file(self, path: str) -> LakeFileT:
        """Open the file of this path."""

    def finish_file(self, file: LakeFileT, key: PartitionKey) -> Mapping[str, Any]:
        file.finish()
        size = self.target.store.size(file.path)
        return {"path": file.path, "rows": file.rows, "bytes": size, **self.describe(file, key)}

    # --- errors -------------------------------------------------------------------------------------------------------

    def failed(self, error: OSError) -> Exception:
        if isinstance(error, FileNotFoundError):
            self._refuse_ended()
        return SinkUnavailable(self.target.uri, self._doing, str(error))

    @property
    def _doing(self) -> str:
        return f"writing split {self.split.index} ({self.split.range})"

    def _refuse_ended(self) -> None:
        target = self.target
        try:
            if target.home.exists(f"{ATTEMPTS}/{target.marker}/{BEGUN}"):
                return
            there = target.home.exists(ATTEMPTS)
        except OSError as error:
            raise SinkUnavailable(target.uri, self._doing, str(error)) from error
        # An object store has no directories: if the note is gone, the attempt was removed.
        if there or not target.home.place.is_local:
            raise Fenced(target.pipeline, self._doing)
        shared = "the Airflow worker and all of Spark's executors must share the file system"
        raise SinkUnavailable(target.uri, self._doing, f"{target.home.place.uri} is not the table's location here; {shared}")
