"""Buffer rows in a Spark task for several open files, one for each combination of partition values."""

from __future__ import annotations

from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import pyarrow as pa

from airflow_kafka_spark.errors import BadRecords, Problem
from airflow_kafka_spark.sinks.base import Rows, SplitWriter
from airflow_kafka_spark.sinks.storage.tasks.formats import FileSpec
from airflow_kafka_spark.windows.model import BadRecord, Split

_MOST_BUFFERED = 128 << 20
_MOST_SAMPLES = 10

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

        :param part: how many files of this key were opened before.
        """

    @abstractmethod
    def finish_file(self, file: FileT, key: PartitionKey) -> Mapping[str, Any]:
        """Make a file durable, and return the facts about it that the driver needs."""

    @abstractmethod
    def partition_names(self, column: str, values: pa.Array) -> tuple[Sequence[Any], np.ndarray]:
        """Return the names of a partition column's values, and the index of the name of each row."""

    @abstractmethod
    def failed(self, error: OSError) -> Exception:
        """Return the error to raise for an error of the file system."""

    def misplaced(self, key: PartitionKey) -> str:
        """Return why no file can have this key; "" if a file can."""
        return ""

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
                raise self.failed(error) from error
            self.rows += batch.num_rows

    def finish_all(self) -> None:
        """Finish all files."""
        while self.files:
            self._finish(next(iter(self.files)))

    def drop_all(self) -> None:
        """Close all files without what is buffered for them."""
        for file in self.files.values():
            file.drop()
        self.files.clear()

    # --- files --------------------------------------------------------------------------------------------------------

    def _file(self, key: PartitionKey) -> FileT:
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

    def _stored(self, rows: Rows) -> pa.RecordBatch:
        """Return the columns of the files, in the types that the files have."""
        batch = rows.batch.select(self.schema.names)
        self._refuse([(int(rows.offsets[row].as_py()), reason) for row, reason in self.target.spec.unfit(batch)])
        columns = [c if c.type == f.type else c.cast(f.type) for c, f in zip(batch.columns, self.schema, strict=True)]
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)

    def _groups(
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
            values, places = self.partition_names(column, batch.column(column))
            names.append(values)
            per_column.append(places)
            codes = np.unique(codes * max(len(names[-1]), 1) + per_column[-1], return_inverse=True)[1]
        order = np.argsort(codes, kind="stable")
        for rows in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
            key = tuple(names[i][per_column[i][rows[0]]] for i in range(len(names)))
            if reason := self.misplaced(key):
                self._refuse([(int(offsets[rows[0]].as_py()), reason)])
            # Copied, so that a row that is buffered for a rarely used file does not keep its whole batch in memory.
            yield key, stored.take(pa.array(rows))

    def _refuse(self, bad: list[tuple[int, str]]) -> None:
        if bad:
            topic, partition = self.split.range.topic_partition
            samples = [BadRecord(topic, partition, offset, reason) for offset, reason in bad[:_MOST_SAMPLES]]
            raise BadRecords(self.target.window, len(bad), samples)


def partition_values(values: pa.Array) -> list[str | None]:
    """Return partition values as Spark writes them into a path, before escaping, and Delta into its log."""
    if pa.types.is_boolean(values.type):
        return [None if v is None else str(v).lower() for v in values.to_pylist()]
    if pa.types.is_decimal(values.type):
        return [None if v is None else format(v, "f") for v in values.to_pylist()]
    return [None if v is None else str(v) for v in values.to_pylist()]


def partition_type_problem(name: str, kind: pa.DataType) -> Problem | None:
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
