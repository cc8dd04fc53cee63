"""The task side of the files sink: writes one split into files of its own, in a place where no reader looks."""

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
from airflow_kafka_spark.sinks.files.layout import LONGEST_NAME, TASKS, file_stem, flush, make_below, partition_directory
from airflow_kafka_spark.sinks.files.tasks.formats import FileSpec
from airflow_kafka_spark.windows.model import BadRecord, Split

_MOST_BUFFERED = 128 << 20
_MOST_SAMPLES = 10


@dataclass(frozen=True)
class FilesTarget:
    """What tasks need to know of a window, a sink and an attempt.

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
        """What the files hold: all columns that are not in the path."""
        return self.spec.stored(pa.schema([f for f in self.schema if f.name not in self.partition_by]))


@dataclass
class _File:
    """A file being written, and the rows that wait for it."""

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
            except Exception:  # the file goes anyway
                continue


class FilesSplitWriter(SplitWriter):
    """Writes one split into a directory named by nobody but this task attempt. What another attempt at the same split writes,
    now or later, is in another directory; the driver takes the files of the attempt whose result Spark gave it.

    :param target: what to write, and where.
    """

    def __init__(self, target: FilesTarget) -> None:
        self.target = target
        self.place: Path | None = None

    def __repr__(self) -> str:
        return f"FilesSplitWriter({self.target.window}, {self.target.attempt})"

    def __getstate__(self) -> dict[str, Any]:
        return {"target": self.target, "place": None}

    def open(self, split: Split) -> None:
        """:raises Fenced: a newer attempt at the window has taken this attempt's directory away.
        :raises SinkUnavailable: the directory cannot be written here."""
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
        """Rows with a value that the format cannot hold, or that no directory can be named after."""
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
        """:raises BadRecords: a value that the format cannot hold, of a row that :meth:`unwritable` was not asked about."""
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
        """:returns: ``rows``, the task's ``token`` and its ``files``: path below the window, rows and bytes of each."""
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
        """The open file of a partition directory; the one unused for longest gives way when there are too many."""
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
        """Write full groups, and the largest ones as long as too much waits in all files together."""
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
        """The columns that go into the files, in the types they have there."""
        batch = rows.batch.select(self.schema.names)
        self._refuse([(int(rows.offsets[row].as_py()), reason) for row, reason in self.target.spec.unfit(batch)])
        columns = [c if c.type == f.type else c.cast(f.type) for c, f in zip(batch.columns, self.schema, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _groups(
        self, batch: pa.RecordBatch, stored: pa.RecordBatch, offsets: pa.Array
    ) -> Iterator[tuple[tuple[str, ...], pa.RecordBatch]]:
        """The rows of each partition directory, in offset order."""
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
            # Copied, so that a row that waits in a rarely used file does not keep its whole batch in memory.
            yield key, stored.take(pa.array(rows))

    def _refuse(self, bad: list[tuple[int, str]]) -> None:
        if bad:
            topic, partition = self.split.range.topic_partition
            samples = [BadRecord(topic, partition, offset, reason) for offset, reason in bad[:_MOST_SAMPLES]]
            raise BadRecords(self.target.window, len(bad), samples)

    def _failed(self, error: OSError) -> Exception:
        """Why the file system refused."""
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
    """The directories of a partition column's values, and which one each row goes to."""
    encoded = values.dictionary_encode(null_encoding="encode")
    names = [partition_directory(column, value) for value in partition_values(encoded.dictionary)]
    return names, encoded.indices.to_numpy(zero_copy_only=False)


def _too_long(name: str) -> str:
    return f"the partition directory {name[:40]}... has more than {LONGEST_NAME} bytes"


def partition_values(values: pa.Array) -> list[str | None]:
    """Partition values as Spark writes them into a path, before escaping."""
    if pa.types.is_boolean(values.type):
        return [None if v is None else str(v).lower() for v in values.to_pylist()]
    if pa.types.is_decimal(values.type):
        return [None if v is None else format(v, "f") for v in values.to_pylist()]
    return [None if v is None else str(v) for v in values.to_pylist()]
