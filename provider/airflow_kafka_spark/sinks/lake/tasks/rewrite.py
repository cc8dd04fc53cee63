"""Rewriting the files of a lake table: upserts and deletes by key, and compaction.

Tasks stage the rows of an upsert, and the driver rewrites the files that hold one of their keys. Nothing is changed in place. The
files that lose rows are replaced by files without these rows, and the last row of each key goes to further files (copy on write).
The commit that names them is refused if anything was committed since the table was loaded. So an upsert needs no other fence than
an append. A compaction selects small files and replaces them in the same way.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from airflow_kafka_spark import faults
from airflow_kafka_spark.sinks.base import OFFSET_COLUMNS, Rows
from airflow_kafka_spark.sinks.storage.store import TableStore
from airflow_kafka_spark.sinks.storage.tasks.write import PartitionKey, StoreFile, StoreSplitWriter, StoreTarget
from airflow_kafka_spark.windows.model import OffsetRange, Split, SplitResult, Window

if TYPE_CHECKING:
    from airflow_kafka_spark.sinks.storage.attempts import TableAttempt


DELETED = "__airflow_deleted"
"""The column of staged rows that marks tombstones."""

_ROW, _FILE, _AT = "__airflow_row", "__airflow_file", "__airflow_at"
_JOINED_ROWS = 4_000_000
"""Rows of a table whose keys are compared at a time."""
_BATCH_ROWS = 131_072
"""Rows of a file that are read at a time."""
READ_PARQUET: Mapping[str, Any] = {"coerce_int96_timestamp_unit": "us"}
"""Options for reading files of other writers. Spark writes timestamps as INT96, which Arrow reads as nanoseconds by default.
Nanoseconds cannot hold years before 1678 or after 2261, so that such a timestamp would change."""
_THREADS = min(4, os.cpu_count() or 1)
"""Threads that look for keys in files."""


# --- tasks --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StageTarget(StoreTarget):
    """The part of an upsert that tasks need.

    :param key: the columns of the key.
    :param filled: those of them in which the table takes an empty text for a null.
    """

    key: tuple[str, ...]
    filled: tuple[str, ...] = ()


def make_staged_schema(rows: pa.Schema) -> pa.Schema:
    """Return the columns of staged files: those of the rows, which are null in a tombstone, and its mark.

    :param rows: the columns of the rows, in the types that the table's files have.
    """
    return pa.schema([*(field.with_nullable(True) for field in rows), pa.field(DELETED, pa.bool_())])


class UpsertStageWriter(StoreSplitWriter[StoreFile]):
    """Writes the rows of one split into a file that is read by the driver and is never a part of the table."""

    target: StageTarget

    def open_new_file(self, path: str) -> StoreFile:
        return StoreFile(self.target, path)

    def describe(self, file: StoreFile, key: PartitionKey) -> Mapping[str, Any]:
        """Return nothing: the driver reads the file as a whole."""
        return {}

    def name_partitions(self, column: str, values: pa.Array) -> NoReturn:
        raise AssertionError("a staged file is not partitioned")

    def find_unwritable(self, rows: Rows) -> Mapping[int, str]:
        """Return the rows whose key has a null, or a text that is too long for its column."""
        found = dict(super().find_unwritable(rows))
        for name in self.target.key:
            column = rows.batch.column(name)
            for at in pc.indices_nonzero(column.is_null()).to_pylist():
                found.setdefault(at, f"`{name}` is null, and is part of the key")
            if name in self.target.filled and pa.types.is_string(column.type):
                for at in pc.indices_nonzero(pc.equal(column, "")).to_pylist():
                    found.setdefault(at, f"`{name}` is empty, which is a null in a column that partitions the table")
        return found

    def write(self, rows: Rows) -> None:
        bad = sorted(self.find_unwritable(rows).items())
        self._refuse([(int(rows.offsets[at].as_py()), reason) for at, reason in bad])
        dead = rows.tombstones if rows.tombstones is not None else pa.repeat(False, rows.batch.num_rows)
        columns = [*rows.batch.columns, dead]
        batch = pa.RecordBatch.from_arrays(columns, names=[*rows.batch.schema.names, DELETED])
        super().write(Rows(batch, rows.offsets))


# --- the table as loaded ------------------------------------------------------------------------------------------------


class TableFile(ABC):
    """A data file of the table. Files of equal identity have equal rows.

    :ivar identity: its path, and those of the files that delete rows of it.
    """

    identity: tuple[str, ...]

    @abstractmethod
    def read_batches(self, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        """Yield its rows, in the same order each time.

        :param columns: only these columns; None: all columns of the table.
        """


@dataclass(frozen=True)
class Merged:
    """The change that an upsert makes to the table.

    :param added: the files that are added, as :meth:`.StoreSplitWriter.close` describes them.
    :param removed: the files that are removed.
    :param written: number of rows that were inserted or updated.
    :param deleted: number of rows that were deleted by tombstones.
    """

    added: Sequence[Mapping[str, Any]]
    removed: Sequence[Any]
    written: int
    deleted: int


@dataclass
class _Matches:
    """The rows of a file whose key has an event.

    :param at: their positions.
    :param row: the events' row numbers.
    :param newer: True where the file's row has the higher offset.
    :param rows: number of rows of the file.
    """

    at: np.ndarray
    row: np.ndarray
    newer: np.ndarray
    rows: int


MakeDataWriter: TypeAlias = Callable[[], StoreSplitWriter[Any]]
"""Returns a writer of data files that is not open yet."""


@dataclass
class Upsert:
    """The upsert of one window on the driver. If its commit is refused, :meth:`merge` is called again with the files of the table
    as it is then; the results for files that are still there are used again.

    :param window: the window.
    :param key: the columns of the key.
    :param guarded: True if rows hold their offsets, so that an older row never overwrites a newer one.
    :param store: the store of the staged files.
    :param results: the results of the tasks.
    :param splits: the window's splits.
    :param make_row_writer: returns a writer of data files with the columns of the window's rows; None if no row is written.
    """

    window: Window
    key: tuple[str, ...]
    guarded: bool
    store: TableStore | None
    results: Sequence[SplitResult]
    splits: Sequence[Split]
    make_row_writer: MakeDataWriter | None
    staged: list[str] = field(default_factory=list)
    _matches: dict[tuple[str, ...], _Matches] = field(default_factory=dict)
    _kept: dict[tuple[str, ...], tuple[bytes, Sequence[Mapping[str, Any]]]] = field(default_factory=dict)
    _fresh: tuple[bytes, Sequence[Mapping[str, Any]]] | None = None

    def __post_init__(self) -> None:
        if not self.results:
            self.events, self.rows = pa.table({}), 0
            return
        places = {place.topic_partition: order for order, place in enumerate(self.window.ranges)}
        by_index = {split.index: split.range for split in self.splits}
        ordered = sorted(
            self.results,
            key=lambda r: (places[by_index[r.index].topic_partition], by_index[r.index].start) if r.index in by_index else (0, 0),
        )
        # Later rows have higher numbers: within a partition by their offsets, else by the order of the partitions.
        self.staged = [file["path"] for result in ordered for file in result.token.get("files", ())]
        self.events = self._find_last_events()

    @classmethod
    def make_deletion(
        cls,
        window: Window,
        column: str,
        text: str,
        store: TableStore | None = None,
        splits: Sequence[Split] = (),
        make_row_writer: MakeDataWriter | None = None,
    ) -> Upsert:
        """Return an upsert that only deletes: the rows that have a text in a column."""
        found = cls(window, (column,), False, store, (), splits, make_row_writer)
        found.rows = 1
        found.events = pa.table({column: [text], DELETED: [True], _ROW: pa.array([0], pa.int64())})
        return found

    def is_met(self, files: Iterable[TableFile]) -> bool:
        """Return True if one of these files has a row of one of the keys."""
        for file in files:
            self._match([file])
            if len(self._matches[file.identity].at):
                return True
        return False

    def _find_last_events(self) -> pa.Table:
        """Return the last event of each key, with its row number."""
        names = [*self.key, *(OFFSET_COLUMNS if self.guarded else ()), DELETED]
        tables, count = [], 0
        for path in self.staged:
            with self._open(path) as source:
                read = pa.parquet.read_table(source, columns=names, partitioning=None)
            table = pa.table({name: _unwrap_column(read.column(name)) for name in names})
            tables.append(table.append_column(_ROW, pa.array(np.arange(count, count + table.num_rows))))
            count += table.num_rows
        self.rows = count
        if not tables:
            return pa.table({})
        found = pa.concat_tables(tables)
        last = found.group_by(list(self.key)).aggregate([(_ROW, "max")]).column(f"{_ROW}_max")
        return found.take(pa.array(np.sort(last.to_numpy())))

    def find_bounds(self, name: str) -> tuple[Any, Any]:
        """Return the lowest and the highest value of a column of the key among the events."""
        found = pc.min_max(self.events.column(name)).as_py()
        return found["min"], found["max"]

    def merge(self, files: Iterable[TableFile], make_writer: MakeDataWriter) -> Merged:
        """Write the files that the upsert adds to the table as it was loaded.

        :param files: the table's files that may hold one of the keys.
        :param make_writer: returns a writer of data files with the table's columns, for the rows of these files that are kept.
        :raises OSError: a store did not answer.
        """
        if not self.events.num_columns or not self.events.num_rows:
            return Merged((), (), 0, 0)
        there = list(files)
        self._match([file for file in there if file.identity not in self._matches])
        found = [(file, self._matches[file.identity]) for file in there]
        # An event with a newer row of its key in the table has no effect.
        lost = np.zeros(self.rows, bool)
        for _, matches in found:
            lost[matches.row[matches.newer]] = True
        gone = [(file, matches, matches.at[~lost[matches.row]]) for file, matches in found]
        gone = [one for one in gone if len(one[2])]
        dead = np.zeros(self.rows, bool)
        numbers = self.events.column(_ROW).to_numpy()
        tombstones = self.events.column(DELETED).to_numpy(zero_copy_only=False)
        dead[numbers[tombstones]] = True
        last = np.zeros(self.rows, bool)
        last[numbers] = True
        put = last & ~dead & ~lost
        added = list(self._put(put))
        with ThreadPoolExecutor(_THREADS) as pool:
            for kept in pool.map(lambda one: self._keep(one[0], one[1].rows, one[2], make_writer), gone):
                added += kept
        deleted = sum(int((dead & ~lost)[matches.row].sum()) for _, matches in found)
        return Merged(added, [file for file, *_ in gone], int(put.sum()), deleted)

    def _open(self, path: str) -> pa.NativeFile:
        assert self.store is not None
        return self.store.open_input(path)

    # --- matches ----------------------------------------------------------------------------------------------------

    def _match(self, files: Sequence[TableFile]) -> None:
        waiting: list[pa.Table] = []
        sizes: list[tuple[TableFile, int]] = []
        for file in files:
            names = [*self.key, *(OFFSET_COLUMNS if self.guarded else ())]
            table = self._make_table(file.read_batches(names), names)
            numbers = {_FILE: pa.array(np.full(table.num_rows, len(sizes))), _AT: pa.array(np.arange(table.num_rows))}
            for name, values in numbers.items():
                table = table.append_column(name, values)
            waiting.append(table)
            sizes.append((file, table.num_rows))
            if sum(t.num_rows for t in waiting) >= _JOINED_ROWS:
                self._join(waiting, sizes)
                waiting, sizes = [], []
        if waiting:
            self._join(waiting, sizes)

    def _make_table(self, batches: Iterable[pa.RecordBatch], names: Sequence[str]) -> pa.Table:
        """Return columns of a file in the types of the events."""
        wanted = pa.schema([self.events.schema.field(name) for name in names])
        cast = [
            pa.RecordBatch.from_arrays([_unwrap_column(batch.column(n)).cast(wanted.field(n).type) for n in names], schema=wanted)
            for batch in batches
        ]
        return pa.Table.from_batches(cast, wanted)

    def _join(self, tables: Sequence[pa.Table], sizes: Sequence[tuple[TableFile, int]]) -> None:
        events = self.events.drop_columns([DELETED])
        rows = pa.concat_tables(tables)
        found = rows.join(events, list(self.key), join_type="inner", right_suffix="_event")
        newer = pa.array(np.zeros(found.num_rows, bool))
        if self.guarded:
            topic, partition, offset = OFFSET_COLUMNS
            same = pc.and_(
                pc.equal(found.column(topic), found.column(f"{topic}_event")),
                pc.equal(found.column(partition), found.column(f"{partition}_event")),
            )
            later = (pc.greater if self.window.replay else pc.greater_equal)(
                found.column(offset), found.column(f"{offset}_event")
            )
            newer = pc.fill_null(pc.and_(same, later), False)
        columns = [found.column(name).to_numpy() for name in (_FILE, _AT, _ROW)]
        known = np.asarray(newer, bool)
        order = np.lexsort((columns[1], columns[0]))
        of, at, row = (column[order] for column in columns)
        known = known[order]
        limits = np.searchsorted(of, np.arange(len(sizes) + 1))
        for number, (file, count) in enumerate(sizes):
            part = slice(limits[number], limits[number + 1])
            self._matches[file.identity] = _Matches(at[part], row[part], known[part], count)

    # --- files ------------------------------------------------------------------------------------------------------

    def _keep(self, file: TableFile, rows: int, gone: np.ndarray, make_writer: MakeDataWriter) -> Sequence[Mapping[str, Any]]:
        """Write the rows of a file that are kept."""
        kept = np.ones(rows, bool)
        kept[gone] = False
        digest = np.packbits(kept).tobytes()
        known = self._kept.get(file.identity)
        if known is None or known[0] != digest:
            written = self._write(file.read_batches(None), kept, make_writer) if kept.any() else ()
            self._kept[file.identity] = known = (digest, written)
        return known[1]

    def _put(self, put: np.ndarray) -> Sequence[Mapping[str, Any]]:
        """Write the last row of each key."""
        digest = np.packbits(put).tobytes()
        if self._fresh is None or self._fresh[0] != digest:
            assert self.make_row_writer is not None
            written = self._write(self._read_staged_batches(), put, self.make_row_writer) if put.any() else ()
            self._fresh = (digest, written)
        return self._fresh[1]

    def _read_staged_batches(self) -> Iterator[pa.RecordBatch]:
        for path in self.staged:
            with self._open(path) as source:
                for batch in pa.parquet.ParquetFile(source).iter_batches(_BATCH_ROWS):
                    yield batch.drop_columns([DELETED])

    def _write(
        self, batches: Iterator[pa.RecordBatch], kept: np.ndarray, make_writer: MakeDataWriter
    ) -> Sequence[Mapping[str, Any]]:
        """Write some of the rows into data files.

        :param kept: True for each row that is written.
        :param make_writer: returns a writer of data files with their columns.
        """
        writer: StoreSplitWriter[Any] | None = None
        at = 0
        for batch in batches:
            wanted = kept[at : at + batch.num_rows]
            at += batch.num_rows
            if writer is None:
                writer = make_writer()
                writer.open(self.splits[0])
            if wanted.any():
                some = batch if wanted.all() else batch.filter(pa.array(wanted))
                try:
                    writer.write(Rows(some, pa.array(np.zeros(some.num_rows, np.int64))))
                except BaseException:
                    writer.abort()
                    raise
        return writer.close()["files"] if writer is not None else ()


ColumnT = TypeVar("ColumnT", pa.Array, pa.ChunkedArray)


def _unwrap_column(column: ColumnT) -> ColumnT:
    """Return a column whose values can be compared: UUIDs as their bytes."""
    return column.cast(column.type.storage_type) if isinstance(column.type, pa.BaseExtensionType) else column


_SMALL = 0.75
"""Files smaller than this share of the target size are joined, as Spark's rewrite_data_files does."""

SmallFileT = TypeVar("SmallFileT")


def group_small_files(
    files: Iterable[SmallFileT], partition: Callable[[SmallFileT], Hashable], size: Callable[[SmallFileT], int], target: int
) -> Iterator[list[SmallFileT]]:
    """Yield groups of small files of one partition, none larger than the target size together.

    :param partition: returns the partition of a file.
    :param size: returns its size in bytes.
    :param target: the target size in bytes.
    """
    small: dict[Hashable, list[SmallFileT]] = defaultdict(list)
    for file in files:
        if size(file) < _SMALL * target:
            small[partition(file)].append(file)
    for of_partition in small.values():
        group: list[SmallFileT] = []
        total = 0
        for file in of_partition:
            if group and total + size(file) > target:
                if len(group) > 1:
                    yield group
                group, total = [], 0
            group.append(file)
            total += size(file)
        if len(group) > 1:
            yield group


@contextmanager
def run_compaction(attempt: TableAttempt, **facts: object) -> Iterator[None]:
    """Begin the attempt of a compaction, and finish it once its commit has succeeded.

    The next attempt at a window removes the files of a failed compaction.

    :param facts: further facts for the attempt's record.
    """
    try:
        attempt.begin(**facts)
        yield
        faults.reached("sink.compacted")
        attempt.finish()
    finally:
        attempt.release()


def join_files(
    writer: StoreSplitWriter[Any], files: Sequence[TableFile], rows: int | None, window: int
) -> Sequence[Mapping[str, Any]]:
    """Write the rows of files into one file.

    :param rows: the number of rows that they have; None if unknown.
    :param window: the number of the window after which it is done, for the file's name.
    :return: the files, as the writer describes them.
    :raises ValueError: another number of rows was read.
    :raises OSError: the store did not answer.
    """
    writer.open(Split(0, OffsetRange("compacted", 0, 0, window)))
    try:
        for file in files:
            for batch in file.read_batches(None):
                writer.write(Rows(batch, pa.array(np.zeros(batch.num_rows, np.int64))))
    except BaseException:
        writer.abort()
        raise
    token = writer.close()
    if rows is not None and token["rows"] != rows:
        raise ValueError(f"{token['rows']:,} rows were read of files that have {rows:,}")
    return list(token["files"])
