"""Writing one split in a Spark task, into files of its own that no reader sees."""

from __future__ import annotations

import os
import shutil
import socket
import uuid
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_kafka_spark.errors import BadRecords, Fenced, SinkUnavailable
from airflow_kafka_spark.sinks.base import Rows, SplitWriter
from airflow_kafka_spark.sinks.files.directory import LONGEST_NAME, TASKS, file_stem, flush, make_below, partition_directory
from airflow_kafka_spark.sinks.files.tasks.formats import FileSpec
from airflow_kafka_spark.windows.model import BadRecord, Split

_MOST_BUFFERED = 128 << 20
_MOST_SAMPLES = 10


@dataclass(frozen=True)
class FilesTarget:
    """The part of an attempt that tasks need.

    :param sink: the sink's URI, for messages.
    :param attempt: the attempt's directory, on a file system that all tasks share with the driver.
    :param pipeline: the pipeline's name.
    :param window: the window, for messages.
    :param schema: the rows' schema.
    :param partition_by: columns that become directories.
    :param spec: how files are written.
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
        return self.spec.stored(pa.schema([f for f in self.schema if f.name not in self.partition_by]))


@dataclass
class _File:
    """A file that is being written, and the rows that are buffered for it."""

    path: Path
    spec: FileSpec
    schema: pa.Schema
    rows: int = 0
    waiting: list[pa.RecordBatch] = field(default_factory=list)
    waiting_rows: int = 0
    waiting_bytes: int = 0

    def __post_init__(self) -> None:
        self.stream = pa.OSFile(str(self.path), "wb")
        self.writer = self.spec.writer(self.stream, self.schema, self.spec)

    def add(self, batch: pa.RecordBatch) -> None:
        self.waiting.append(batch)
        self.rows += batch.num_rows
        self.waiting_rows += batch.num_rows
        self.waiting_bytes += batch.nbytes

    def write(self) -> None:
        if self.waiting:
            self.writer.write(pa.Table.from_batches(self.waiting, self.schema))
            self.waiting, self.waiting_rows, self.waiting_bytes = [], 0, 0

    def finish(self) -> None:
        self.write()
        self.writer.close()
        self.stream.close()
        flush(self.path)

    def drop(self) -> None:
        self.waiting = []
        for closing in (self.writer, self.stream):
            try:
                closing.close()
            except Exception:  # the file is removed anyway
                continue


class FilesSplitWriter(SplitWriter):
    """Writes one split into a directory of this task attempt alone. Other task attempts at the same split write into directories
    of their own; the driver takes the files of the attempt whose result Spark returns.

    :param target: where and how to write.
    """

    def __init__(self, target: FilesTarget) -> None:
        self.target = target
        self.place: Path | None = None

    def __repr__(self) -> str:
        return f"FilesSplitWriter({self.target.window}, {self.target.attempt})"

    def __getstate__(self) -> dict[str, Any]:
        return {"target": self.target, "place": None}

    def open(self, split: Split) -> None:
        """Begin a split.

        :raises Fenced: a newer attempt at the window has removed this attempt's directory.
        :raises SinkUnavailable: the directory cannot be written on this machine.
        """
        self.split = split
        self.schema = self.target.file_schema
        self.token = uuid.uuid4().hex
        self.files: OrderedDict[tuple[str, ...], _File] = OrderedDict()
        self.parts: dict[tuple[str, ...], int] = {}
        self.finished: list[dict[str, Any]] = []
        self.rows = 0
        place = Path(self.target.attempt, TASKS, self.token)
        try:
            os.mkdir(place)
        except OSError as error:
            raise self._failed(error) from error
        self.place = place

    def unwritable(self, rows: Rows) -> Mapping[int, str]:
        """Return rows with a value that the format cannot hold, or that is too long for the name of a directory."""
        found: dict[int, str] = {}
        for row, reason in self.target.spec.unfit(rows.batch.select(self.schema.names)):
            found.setdefault(row, reason)
        for column in self.target.partition_by:
            names, codes = _directories(column, rows.batch.column(column))
            for code in (code for code, name in enumerate(names) if len(name.encode()) > LONGEST_NAME):
                for row in np.flatnonzero(codes == code).tolist():
                    found.setdefault(row, _too_long(names[code]))
        return found

    def write(self, rows: Rows) -> None:
        """Write the next rows.

        :raises BadRecords: the format cannot hold a value, and :meth:`unwritable` was not called for its row.
        """
        batch = rows.batch
        if batch.num_rows:
            stored = self._stored(rows)
            try:
                for key, group in self._groups(batch, stored, rows.offsets):
                    self._file(key).add(group)
                self._write_waiting()
            except OSError as error:
                raise self._failed(error) from error
            self.rows += batch.num_rows

    def close(self) -> Mapping[str, Any]:
        """Flush all files to disk.

        :return: ``rows``, the task's ``token`` and its ``files``: path below the window, rows and bytes of each.
        """
        assert self.place is not None
        try:
            while self.files:
                self._finish(next(iter(self.files)))
            directories = {self.place.joinpath(*key[:depth]) for key in self.parts for depth in range(len(key) + 1)}
            for directory in directories | {self.place.parent}:
                flush(directory)
        except OSError as error:
            raise self._failed(error) from error
        self.place = None
        return {"rows": self.rows, "token": self.token, "files": self.finished}

    def abort(self) -> None:
        if self.place is not None:
            for file in self.files.values():
                file.drop()
            self.files.clear()
            shutil.rmtree(self.place, ignore_errors=True)
            self.place = None

    # --- files --------------------------------------------------------------------------------------------------------

    def _file(self, key: tuple[str, ...]) -> _File:
        """Return the open file of a partition directory. If too many are open, finish the least recently used one first."""
        if key in self.files:
            self.files.move_to_end(key)
            return self.files[key]
        assert self.place is not None
        while len(self.files) >= max(self.target.spec.max_open_files, 1):
            self._finish(next(iter(self.files)))
        part = self.parts.get(key, 0)
        self.parts[key] = part + 1
        name = file_stem(self.split.range, part) + self.target.spec.suffix
        self.files[key] = _File(make_below(self.place, key) / name, self.target.spec, self.schema)
        return self.files[key]

    def _finish(self, key: tuple[str, ...]) -> None:
        file = self.files[key]
        file.finish()
        del self.files[key]
        self.finished.append({"path": "/".join([*key, file.path.name]), "rows": file.rows, "bytes": file.path.stat().st_size})

    def _write_waiting(self) -> None:
        """Write the files whose groups are full, and the larger half of the files if too much is buffered in all of them."""
        spec = self.target.spec
        for file in self.files.values():
            if file.waiting_rows >= spec.group_rows or file.waiting_bytes >= spec.group_bytes:
                file.write()
        waiting = sum(f.waiting_bytes for f in self.files.values())
        if waiting > _MOST_BUFFERED:
            for file in sorted(self.files.values(), key=lambda f: -f.waiting_bytes)[: len(self.files) // 2 + 1]:
                file.write()

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _stored(self, rows: Rows) -> pa.RecordBatch:
        """Return the columns of the files, in the types that the files have."""
        batch = rows.batch.select(self.schema.names)
        self._refuse([(int(rows.offsets[row].as_py()), reason) for row, reason in self.target.spec.unfit(batch)])
        columns = [c if c.type == f.type else c.cast(f.type) for c, f in zip(batch.columns, self.schema, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _groups(
        self, batch: pa.RecordBatch, stored: pa.RecordBatch, offsets: pa.Array
    ) -> Iterator[tuple[tuple[str, ...], pa.RecordBatch]]:
        """Yield the rows of each partition directory, in offset order."""
        if not self.target.partition_by:
            yield (), stored
            return
        codes = np.zeros(batch.num_rows, np.int64)
        names: list[list[str]] = []
        per_column: list[np.ndarray] = []
        for column in self.target.partition_by:
            values, places = _directories(column, batch.column(column))
            names.append(values)
            per_column.append(places)
            codes = np.unique(codes * max(len(names[-1]), 1) + per_column[-1], return_inverse=True)[1]
        order = np.argsort(codes, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
            key = tuple(names[i][per_column[i][rows[0]]] for i in range(len(names)))
            if long := [n for n in key if len(n.encode()) > LONGEST_NAME]:
                self._refuse([(int(offsets[rows[0]].as_py()), _too_long(long[0]))])
            # Copied, so that a row that is buffered for a rarely used file does not keep its whole batch in memory.
            yield key, stored.take(pa.array(rows))

    def _refuse(self, bad: list[tuple[int, str]]) -> None:
        if bad:
            topic, partition = self.split.range.topic_partition
            samples = [BadRecord(topic, partition, offset, reason) for offset, reason in bad[:_MOST_SAMPLES]]
            raise BadRecords(self.target.window, len(bad), samples)

    def _failed(self, error: OSError) -> Exception:
        """Return the error to raise for an error of the file system."""
        attempt = Path(self.target.attempt)
        directory = attempt.parent.parent
        doing = f"writing split {self.split.index} ({self.split.range})"
        if not isinstance(error, FileNotFoundError) or attempt.exists():
            return SinkUnavailable(self.target.sink, doing, str(error))
        if directory.exists():
            return Fenced(self.target.pipeline, doing)
        shared = "the Airflow worker and all of Spark's executors must share the file system"
        return SinkUnavailable(self.target.sink, doing, f"there is no {directory} on {socket.gethostname()}; {shared}")


def _directories(column: str, values: pa.Array) -> tuple[list[str], np.ndarray]:
    """Return the directories of a partition column's values, and the index of the directory of each row."""
    encoded = values.dictionary_encode(null_encoding="encode")
    names = [partition_directory(column, value) for value in partition_values(encoded.dictionary)]
    return names, encoded.indices.to_numpy(zero_copy_only=False)


def _too_long(name: str) -> str:
    return f"the partition directory {name[:40]}... has more than {LONGEST_NAME} bytes"


def partition_values(values: pa.Array) -> list[str | None]:
    """Return partition values as Spark writes them into a path, before escaping."""
    if pa.types.is_boolean(values.type):
        return [None if v is None else str(v).lower() for v in values.to_pylist()]
    if pa.types.is_decimal(values.type):
        return [None if v is None else format(v, "f") for v in values.to_pylist()]
    return [None if v is None else str(v) for v in values.to_pylist()]
