"""Writing one split in a Spark task, into files that no reader sees: in a staging directory, or hidden in an object store."""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from airflow_kafka_spark.errors import Fenced, SinkUnavailable
from airflow_kafka_spark.sinks.base import Rows
from airflow_kafka_spark.sinks.storage.staging import TASKS, make_below
from airflow_kafka_spark.sinks.storage.store import LONGEST_NAME, UploadStore, flush, make_file_stem, make_partition_directory
from airflow_kafka_spark.sinks.storage.tasks.formats import FileSpec
from airflow_kafka_spark.sinks.storage.tasks.write import (
    BufferedFile,
    BufferedFilesWriter,
    PartitionKey,
    StoreFile,
    StoreSplitWriter,
    StoreTarget,
    format_partition_values,
)
from airflow_kafka_spark.windows.model import Split


@dataclass(frozen=True)
class FilesTarget:
    """The part of an attempt that tasks need.

    :param sink: the sink's URI, for messages.
    :param attempt: the attempt's directory, on a file system that all tasks share with the driver.
    :param pipeline: the pipeline's name.
    :param window: the window, for messages.
    :param schema: the rows' schema.
    :param partition_by: columns that become directories.
    :param spec: the form of the files.
    """

    sink: str
    attempt: str
    pipeline: str
    window: str
    schema: pa.Schema
    partition_by: tuple[str, ...]
    spec: FileSpec

    @property
    def file_schema(self) -> pa.Schema:
        """The schema of the files: all columns that are not in the path."""
        return self.spec.make_stored_schema(pa.schema([f for f in self.schema if f.name not in self.partition_by]))


class _LocalFile(BufferedFile):
    """A file on a local or shared file system."""

    def __init__(self, path: Path, spec: FileSpec, schema: pa.Schema) -> None:
        self.path = path
        super().__init__(pa.OSFile(str(path), "wb"), spec, schema)

    def finish(self) -> None:
        super().finish()
        flush(self.path)


class FilesSplitWriter(BufferedFilesWriter[_LocalFile]):
    """Writes one split into a directory of this task attempt alone. Other task attempts at the same split write into directories
    of their own; the driver takes the files of the attempt whose result Spark returns.

    :param target: the attempt that the split belongs to.
    """

    def __init__(self, target: FilesTarget) -> None:
        self.target: FilesTarget = target
        self.directory: Path | None = None

    def __repr__(self) -> str:
        return f"FilesSplitWriter({self.target.window}, {self.target.attempt})"

    def __getstate__(self) -> dict[str, Any]:
        return {"target": self.target, "directory": None}

    def open(self, split: Split) -> None:
        """Begin a split.

        :raises Fenced: a newer attempt at the window has removed this attempt's directory.
        :raises SinkUnavailable: the directory cannot be written on this machine.
        """
        self.begin_split(split)
        self.token = uuid.uuid4().hex
        directory = Path(self.target.attempt, TASKS, self.token)
        try:
            os.mkdir(directory)
        except OSError as error:
            raise self.make_write_error(error) from error
        self.directory = directory

    def find_unwritable(self, rows: Rows) -> Mapping[int, str]:
        """Return rows with a value that the format cannot hold, or that is too long for the name of a directory."""
        return find_unfit_rows(self.target.spec, self.schema, self.target.partition_by, rows)

    def close(self) -> Mapping[str, Any]:
        """Flush all files to disk.

        :return: ``rows``, the task's ``token`` and its ``files``: path below the window, rows and bytes of each.
        """
        assert self.directory is not None
        try:
            self.finish_all()
            directories = {self.directory.joinpath(*key[:depth]) for key in self.parts for depth in range(len(key) + 1)}
            for changed in directories | {self.directory.parent}:
                flush(changed)
        except OSError as error:
            raise self.make_write_error(error) from error
        self.directory = None
        return {"rows": self.rows, "token": self.token, "files": self.finished}

    def abort(self) -> None:
        if self.directory is not None:
            self.drop_all()
            shutil.rmtree(self.directory, ignore_errors=True)
            self.directory = None

    # --- files --------------------------------------------------------------------------------------------------------

    def open_file(self, key: PartitionKey, part: int) -> _LocalFile:
        assert self.directory is not None
        name = make_file_stem(self.split.range, part) + self.target.spec.suffix
        return _LocalFile(make_below(self.directory, key) / name, self.target.spec, self.schema)

    def finish_file(self, file: _LocalFile, key: PartitionKey) -> Mapping[str, Any]:
        file.finish()
        return {"path": "/".join([*key, file.path.name]), "rows": file.rows, "bytes": file.path.stat().st_size}

    def name_partitions(self, column: str, values: pa.Array) -> tuple[Sequence[str], np.ndarray]:
        """Return the directories of a partition column's values, and the index of the directory of each row."""
        return make_directory_names(column, values)

    def find_misplacement(self, key: PartitionKey) -> str:
        return find_misplaced_reason(key)

    def make_write_error(self, error: OSError) -> Exception:
        """Return the error to raise for an error of the file system."""
        attempt = Path(self.target.attempt)
        directory = attempt.parent.parent
        doing = f"writing split {self.split.index} ({self.split.range})"
        if not isinstance(error, FileNotFoundError) or attempt.exists():
            return SinkUnavailable(self.target.sink, doing, error)
        if directory.exists():
            return Fenced(self.target.pipeline, doing)
        shared = "the Airflow worker and all of Spark's executors must share the file system"
        return SinkUnavailable(self.target.sink, doing, f"there is no {directory} on {socket.gethostname()}; {shared}")


@dataclass(frozen=True, kw_only=True)
class ObjectsTarget(StoreTarget):
    """The part of an attempt that tasks need. Files leave out the columns that become directories.

    :param directories: these columns.
    :param attempt_id: the part of a file's name that identifies its attempt.
    """

    directories: tuple[str, ...] = ()
    attempt_id: str = ""

    @property
    def partition_by(self) -> tuple[str, ...]:
        """The columns that become directories."""
        return self.directories


ObjectT = TypeVar("ObjectT", bound=StoreFile)


class HiddenFilesWriter(StoreSplitWriter[ObjectT]):
    """Writes one split into data files whose names hold the attempt and the task attempt."""

    target: ObjectsTarget

    def find_unwritable(self, rows: Rows) -> Mapping[int, str]:
        """Return rows with a value that the format cannot hold, or that is too long for the name of a directory."""
        return find_unfit_rows(self.target.spec, self.target.file_schema, self.target.directories, rows)

    def open_file(self, key: PartitionKey, part: int) -> ObjectT:
        name = f"{make_file_stem(self.split.range, part)}-{self.target.attempt_id}-{self.token[:12]}{self.target.spec.suffix}"
        directory = "/".join([self.target.attempt, *key])
        self.target.store.make(directory)
        return self.open_new_file(f"{directory}/{name}")

    def describe(self, file: ObjectT, key: PartitionKey) -> Mapping[str, Any]:
        """Return no further facts, because the directories of a file hold its partition values."""
        return {}

    def name_partitions(self, column: str, values: pa.Array) -> tuple[Sequence[str], np.ndarray]:
        """Return the directories of a partition column's values, and the index of the directory of each row."""
        return make_directory_names(column, values)

    def find_misplacement(self, key: PartitionKey) -> str:
        return find_misplaced_reason(key)


class ObjectsSplitWriter(HiddenFilesWriter[StoreFile]):
    """Writes one split into files that readers do not list."""

    def open_new_file(self, path: str) -> StoreFile:
        return StoreFile(self.target, path)


class UploadFile(StoreFile):
    """A file in an object store. Its parts are sent while it is written; it exists once the driver completes its upload.

    :param target: where and how to write.
    :param path: its path, below the table.
    :param uploads: the uploads below the table.
    """

    def __init__(self, target: StoreTarget, path: str, uploads: UploadStore) -> None:
        self.store, self.path = target.store, path
        self.upload = uploads.open(path)
        BufferedFile.__init__(self, self.upload.open_stream(), target.spec, target.file_schema)

    def finish(self) -> None:
        BufferedFile.finish(self)

    def drop(self) -> None:
        BufferedFile.drop(self)
        self.upload.abort()


class UploadsSplitWriter(HiddenFilesWriter[UploadFile]):
    """Writes one split into uploads that are not completed."""

    def open(self, split: Split) -> None:
        super().open(split)
        self.uploads = UploadStore(self.target.store)

    def open_new_file(self, path: str) -> UploadFile:
        return UploadFile(self.target, path, self.uploads)

    def finish_file(self, file: UploadFile, key: PartitionKey) -> Mapping[str, Any]:
        file.finish()
        upload = file.upload
        return {"path": file.path, "rows": file.rows, "bytes": upload.size, "upload": upload.id, "parts": upload.parts}

    def abort(self) -> None:
        if self.token:
            self.drop_all()
            self.uploads.abort({file["upload"]: file["path"] for file in self.finished})
            self.token = ""


def make_directory_names(column: str, values: pa.Array) -> tuple[list[str], np.ndarray]:
    """Return the directories of a partition column's values, and the index of the directory of each row."""
    encoded = values.dictionary_encode(null_encoding="encode")
    names = [make_partition_directory(column, value) for value in format_partition_values(encoded.dictionary)]
    return names, encoded.indices.to_numpy(zero_copy_only=False)


def find_misplaced_reason(key: PartitionKey) -> str:
    """Return the reason why there can be no file below these directories; "" if there can."""
    return next((_describe_too_long(name) for name in key if len(name.encode()) > LONGEST_NAME), "")


def find_unfit_rows(spec: FileSpec, schema: pa.Schema, partition_by: Sequence[str], rows: Rows) -> dict[int, str]:
    """Return rows with a value that the format cannot hold, or that is too long for the name of a directory.

    :param schema: the columns of the files.
    :param partition_by: the columns that become directories.
    :return: positions in the batch, with the reasons.
    """
    found: dict[int, str] = {}
    for row, reason in spec.find_unfit(rows.batch.select(schema.names)):
        found.setdefault(row, reason)
    for column in partition_by:
        names, codes = make_directory_names(column, rows.batch.column(column))
        for code in (code for code, name in enumerate(names) if len(name.encode()) > LONGEST_NAME):
            for row in np.flatnonzero(codes == code).tolist():
                found.setdefault(row, _describe_too_long(names[code]))
    return found


def _describe_too_long(name: str) -> str:
    return f"the partition directory {name[:40]}... has more than {LONGEST_NAME} bytes"
