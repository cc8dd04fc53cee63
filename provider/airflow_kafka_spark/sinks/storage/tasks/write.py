"""Write one split in a Spark task, into files below the table that no commit names yet.

Rows are buffered for several open files, one for each combination of partition values.
"""

from __future__ import annotations

import uuid
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from airflow_kafka_spark.errors import BadRecords, Fenced, Problem, SinkUnavailable
from airflow_kafka_spark.sinks.base import OFFSET_COLUMNS, Rows, SplitWriter
from airflow_kafka_spark.sinks.storage.attempts import ATTEMPTS, BEGUN
from airflow_kafka_spark.sinks.storage.store import TableStore, flush, make_file_stem, remove_tildes
from airflow_kafka_spark.sinks.storage.tasks.formats import FileSpec, ParquetFile
from airflow_kafka_spark.windows.model import BadRecord, Split

_MOST_BUFFERED = 128 << 20
"""Bytes of buffered rows in all files of a task, above which the larger half of the files is written."""
_MOST_SAMPLES = 10
"""Maximum number of bad records that a task names."""

PartitionKey = tuple[Any, ...]
"""The partition values of a file, as the writer names them."""


class FilesTargetLike(Protocol):
    """The part of a target that decides which rows go into which file."""

    @property
    def window(self) -> str: ...

    @property
    def partition_by(self) -> tuple[str, ...]: ...

    @property
    def spec(self) -> FileSpec: ...

    @property
    def file_schema(self) -> pa.Schema: ...


class BufferedFile:
    """An open file and the rows that are buffered for it.

    :param stream: the stream of its bytes.
    :param spec: its format.
    :param schema: its columns.
    """

    def __init__(self, stream: pa.NativeFile, spec: FileSpec, schema: pa.Schema) -> None:
        self.stream, self.schema = stream, schema
        self.writer = spec.writer(stream, schema, spec)
        self.rows = 0
        self._clear()

    def _clear(self) -> None:
        self.waiting: list[pa.RecordBatch] = []
        self.waiting_rows = self.waiting_bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Buffer rows."""
        self.waiting.append(batch)
        self.rows += batch.num_rows
        self.waiting_rows += batch.num_rows
        self.waiting_bytes += batch.nbytes

    def write(self) -> None:
        """Write the buffered rows to the stream."""
        if self.waiting:
            self.writer.write(pa.Table.from_batches(self.waiting, self.schema))
            self._clear()

    def finish(self) -> None:
        """Write the buffered rows and the end of the file."""
        self.write()
        self.writer.close()
        self.stream.close()

    def drop(self) -> None:
        """Close the file without the buffered rows. Never raises; the caller removes the file."""
        self._clear()
        for closing in (self.writer, self.stream):
            try:
                closing.close()
            except Exception:  # the file is removed anyway
                continue


FileT = TypeVar("FileT", bound=BufferedFile)


class BufferedFilesWriter(SplitWriter, Generic[FileT]):
    """Writes one split into files of its own: buffers rows per file, and bounds open files and memory.

    A subclass opens, finishes and names the files.
    """

    target: FilesTargetLike

    def begin_split(self, split: Split) -> None:
        """Forget everything of an earlier split."""
        self.split = split
        self.schema = self.target.file_schema
        self.files: OrderedDict[PartitionKey, FileT] = OrderedDict()
        self.parts: dict[PartitionKey, int] = {}
        self.finished: list[dict[str, Any]] = []
        self.rows = 0

    @abstractmethod
    def open_file(self, key: PartitionKey, part: int) -> FileT:
        """Open a file.

        :param part: number of files of this key that were opened before.
        """

    @abstractmethod
    def finish_file(self, file: FileT, key: PartitionKey) -> Mapping[str, Any]:
        """Make a file durable, and return the facts about it that the driver needs."""

    @abstractmethod
    def name_partitions(self, column: str, values: pa.Array) -> tuple[Sequence[Any], np.ndarray]:
        """Return the names of a partition column's values, and the index of the name of each row."""

    @abstractmethod
    def make_write_error(self, error: OSError) -> Exception:
        """Return the error to raise for an error of the file system."""

    def find_misplacement(self, key: PartitionKey) -> str:
        """Return the reason why no file can have this key; "" if a file can."""
        return ""

    def write(self, rows: Rows) -> None:
        """Write the next rows.

        :raises BadRecords: the format cannot hold a value, and :meth:`find_unwritable` was not called for its row.
        """
        batch = rows.batch
        if batch.num_rows:
            stored = self._make_stored_batch(rows)
            try:
                for key, group in self._group_rows(batch, stored, rows.offsets):
                    self._get_file(key).add(group)
                self._write_waiting()
            except OSError as error:
                raise self.make_write_error(error) from error
            self.rows += batch.num_rows

    def finish_all(self) -> None:
        """Finish all files."""
        while self.files:
            self._finish(next(iter(self.files)))

    def drop_all(self) -> None:
        """Close all files without their buffered rows."""
        for file in self.files.values():
            file.drop()
        self.files.clear()

    # --- files --------------------------------------------------------------------------------------------------------

    def _get_file(self, key: PartitionKey) -> FileT:
        """Return the open file of a key. If too many are open, finish the least recently used one first."""
        if key in self.files:
            self.files.move_to_end(key)
            return self.files[key]
        while len(self.files) >= max(self.target.spec.max_open_files, 1):
            self._finish(next(iter(self.files)))
        part = self.parts.get(key, 0)
        self.parts[key] = part + 1
        self.files[key] = self.open_file(key, part)
        return self.files[key]

    def _finish(self, key: PartitionKey) -> None:
        finished = self.finish_file(self.files[key], key)
        del self.files[key]
        self.finished.append(dict(finished))

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

    def _make_stored_batch(self, rows: Rows) -> pa.RecordBatch:
        """Return the columns of the files, in the types that the files have."""
        batch = rows.batch.select(self.schema.names)
        self._refuse([(int(rows.offsets[row].as_py()), reason) for row, reason in self.target.spec.find_unfit(batch)])
        columns = [c if c.type == f.type else c.cast(f.type) for c, f in zip(batch.columns, self.schema, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _group_rows(
        self, batch: pa.RecordBatch, stored: pa.RecordBatch, offsets: pa.Array
    ) -> Iterator[tuple[PartitionKey, pa.RecordBatch]]:
        """Yield the rows of each file, in offset order."""
        if not self.target.partition_by:
            yield (), stored
            return
        codes = np.zeros(batch.num_rows, np.int64)
        names: list[Sequence[Any]] = []
        per_column: list[np.ndarray] = []
        for column in self.target.partition_by:
            values, places = self.name_partitions(column, batch.column(column))
            names.append(values)
            per_column.append(places)
            codes = np.unique(codes * max(len(names[-1]), 1) + per_column[-1], return_inverse=True)[1]
        order = np.argsort(codes, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
            key = tuple(names[i][per_column[i][rows[0]]] for i in range(len(names)))
            if reason := self.find_misplacement(key):
                self._refuse([(int(offsets[rows[0]].as_py()), reason)])
            # Copied, so that a row that is buffered for a rarely used file does not keep its whole batch in memory.
            yield key, stored.take(pa.array(rows))

    def _refuse(self, bad: list[tuple[int, str]]) -> None:
        if bad:
            topic, partition = self.split.range.topic_partition
            samples = [BadRecord(topic, partition, offset, reason) for offset, reason in bad[:_MOST_SAMPLES]]
            raise BadRecords(self.target.window, len(bad), samples)


def format_partition_values(values: pa.Array) -> list[str | None]:
    """Return partition values as Spark writes them into a path, before escaping, and Delta into its log."""
    if pa.types.is_boolean(values.type):
        return [None if v is None else str(v).lower() for v in values.to_pylist()]
    if pa.types.is_decimal(values.type):
        return [None if v is None else format(v, "f") for v in values.to_pylist()]
    return [None if v is None else str(v) for v in values.to_pylist()]


def find_partition_type_problem(name: str, kind: pa.DataType) -> Problem | None:
    """Return the problem of a partition column whose values cannot be in the names of directories and in Delta's log, else None.

    :param name: the column.
    :param kind: its type.
    """
    fine: tuple[Callable[[pa.DataType], bool], ...] = (
        pa.types.is_boolean,
        pa.types.is_integer,
        pa.types.is_decimal,
        pa.types.is_date,
        pa.types.is_string,
        pa.types.is_large_string,
    )
    if any(holds(kind) for holds in fine):
        return None
    what = f"column `{name}` is {kind}; expected a boolean, integer, decimal, date or string, whose text is the same everywhere"
    advice = "a date made of it" if pa.types.is_timestamp(kind) else "another column"
    return Problem("sink.partition_by", what, f"Partition by {advice}")


@dataclass(frozen=True, kw_only=True)
class StoreTarget:
    """The part of an attempt that tasks need.

    :param uri: the sink's URI, for messages.
    :param store: the store of data files.
    :param home: the table's location, below which attempts are recorded.
    :param attempt: the name of the attempt's directory of data files.
    :param marker: the name of the attempt below ``_airflow/attempts``. It is removed when the attempt has ended.
    :param pipeline: the pipeline's name.
    :param window: the window, for messages.
    :param file_schema: the files' columns.
    :param spec: the form of the files.
    :param offset_columns: True if rows get topic, partition and offset.
    :param window_column: the column that gets the window's name; None if the table has no such column.
    :param lengths: maximum number of characters of texts of the rows, by column; columns without a maximum are left out.
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
    lengths: Mapping[str, int] = field(default_factory=dict, hash=False)

    @property
    def written_schema(self) -> pa.Schema:
        """The files' columns by the names that they have in the files."""
        return self.file_schema

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
        super().__init__(self.store.open(path), target.spec, target.written_schema)

    def finish(self) -> None:
        super().finish()
        if self.store.location.is_local:
            flush(self.store.make_full_path(self.path))

    def drop(self) -> None:
        super().drop()
        self.store.remove(self.path)


LakeFileT = TypeVar("LakeFileT", bound=StoreFile)


def read_footer(file: StoreFile) -> pyarrow.parquet.FileMetaData:
    """Return the footer of a file that is finished."""
    assert isinstance(file.writer, ParquetFile)
    return file.writer.footer


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
        return f"{type(self).__name__}({self.target.window}, {self.target.store.location.uri}/{self.target.attempt})"

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
        if self.target.lengths:
            self._refuse([(int(rows.offsets[at].as_py()), reason) for at, reason in self.find_unwritable(rows).items()])
        super().write(self._with_origin(rows))

    def _with_origin(self, rows: Rows) -> Rows:
        """Return rows with the columns of their origin."""
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
            if self.target.store.location.is_local:
                for directory in sorted(self._list_used_directories()):
                    flush(self.target.store.make_full_path(directory))
        except OSError as error:
            raise self.make_write_error(error) from error
        # A process that removes the attempt may have listed its files before this one was created.
        self._refuse_ended()
        self.token = ""
        return {"rows": self.rows, "files": self.finished}

    def _list_used_directories(self) -> set[str]:
        """Return the attempt's directory, and those within it that have files of this writer."""
        found = {self.target.attempt}
        for file in self.finished:
            directory = file["path"].rpartition("/")[0]
            while directory not in found:
                found.add(directory)
                directory = directory.rpartition("/")[0]
        return found

    def abort(self) -> None:
        if self.token:
            self.drop_all()
            for file in self.finished:
                self.target.store.remove(file["path"])
            self.token = ""

    def find_unwritable(self, rows: Rows) -> Mapping[int, str]:
        """Return the rows with a text that is too long for its column. Parquet can hold all values of the types that ``validate``
        accepts."""
        found: dict[int, str] = {}
        for name, most in self.target.lengths.items():
            lengths = pc.utf8_length(rows.batch.column(name))
            for at in pc.indices_nonzero(pc.greater(lengths, most)).to_pylist():
                found.setdefault(at, f"`{name}` has {lengths[at]} characters; the table's column takes {most}")
        return dict(sorted(found.items()))

    # --- files --------------------------------------------------------------------------------------------------------

    def open_file(self, key: PartitionKey, part: int) -> LakeFileT:
        directory = self.target.attempt
        for name in self.list_directories(key):
            directory = f"{directory}/{name}"
            self.target.store.make_within(directory)
        number = len(self.finished) + len(self.files)
        return self.open_new_file(f"{directory}/{remove_tildes(make_file_stem(self.split.range, number))}-{self.token}.parquet")

    def list_directories(self, key: PartitionKey) -> Sequence[str]:
        """Return the names of the directories, one in the other, that the file of some partition values gets within the
        attempt's."""
        return ()

    @abstractmethod
    def open_new_file(self, path: str) -> LakeFileT:
        """Open the file of this path."""

    def finish_file(self, file: LakeFileT, key: PartitionKey) -> Mapping[str, Any]:
        file.finish()
        size = self.target.store.read_size(file.path)
        return {"path": file.path, "rows": file.rows, "bytes": size, **self.describe(file, key)}

    # --- errors -------------------------------------------------------------------------------------------------------

    def make_write_error(self, error: OSError) -> Exception:
        if isinstance(error, FileNotFoundError):
            self._refuse_ended()
        return SinkUnavailable(self.target.uri, self._doing, error)

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
            raise SinkUnavailable(target.uri, self._doing, error) from error
        # An object store has no directories: if the attempt's record is gone, the attempt was removed.
        if there or not target.home.location.is_local:
            raise Fenced(target.pipeline, self._doing)
        shared = "the Airflow worker and all of Spark's executors must share the file system"
        raise SinkUnavailable(target.uri, self._doing, f"{target.home.location.uri} is not the table's location here; {shared}")
