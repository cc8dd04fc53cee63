"""Writing one split in a Spark task, into Parquet files below the table that no snapshot names yet."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.sorting import NullOrder, SortDirection, SortOrder

from airflow_kafka_spark.errors import Fenced, SinkUnavailable
from airflow_kafka_spark.sinks.base import Rows
from airflow_kafka_spark.sinks.delta.place import ATTEMPTS, BEGUN, plain
from airflow_kafka_spark.sinks.files.directory import file_stem, flush
from airflow_kafka_spark.sinks.files.tasks.formats import FileSpec
from airflow_kafka_spark.sinks.iceberg.catalog import IcebergStore
from airflow_kafka_spark.sinks.iceberg.tasks.data_file import file_statistics, partition_to_json
from airflow_kafka_spark.sinks.iceberg.tasks.transforms import transformed
from airflow_kafka_spark.sinks.tasks.buffered_files import BufferedFile, BufferedFilesWriter, PartitionKey
from airflow_kafka_spark.windows.model import Split


@dataclass(frozen=True)
class IcebergTarget:
    """The part of an attempt that tasks need.

    :param uri: the sink's URI, for messages.
    :param store: where data files lie.
    :param home: the table's location, below which attempts are noted.
    :param attempt: the name of the attempt's directory of data files.
    :param marker: the name of the attempt below ``_airflow/attempts``. It is removed when the attempt has ended.
    :param pipeline: the pipeline's name.
    :param window: the window, for messages.
    :param file_schema: the files' columns, with the table's ids.
    :param columns: the same in Iceberg's terms.
    :param partitions: the table's partition spec.
    :param order: the table's sort order.
    :param spec: how files are written.
    :param properties: the table's properties.
    """

    uri: str
    store: IcebergStore
    home: IcebergStore
    attempt: str
    marker: str
    pipeline: str
    window: str
    file_schema: pa.Schema
    columns: Schema
    partitions: PartitionSpec
    order: SortOrder
    spec: FileSpec
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def partition_by(self) -> tuple[str, ...]:
        """A name for each partition field, which no column has."""
        return tuple(f"\0{number}" for number in range(len(self.partitions.fields)))

    @cached_property
    def names(self) -> Mapping[int, str]:
        """The files' columns by their ids."""
        return {f.field_id: f.name for f in self.columns.fields}

    def values(self, batch: pa.RecordBatch | pa.Table, source_id: int, transform: Any) -> pa.Array:
        """Return the result of a transform of a column; nulls if the rows do not have it."""
        name = self.names.get(source_id)
        if name is None:
            return pa.nulls(batch.num_rows, pa.int32())
        column = batch.column(name)
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        return transformed(column, transform, self.columns.find_field(source_id).field_type)


class _OpenDataFile(BufferedFile):
    """A data file of the table. The rows of each of its row groups are sorted as the table is."""

    def __init__(self, target: IcebergTarget, path: str) -> None:
        self.target, self.path = target, path
        self.groups = 0
        super().__init__(target.store.open(path), target.spec, target.file_schema)

    def write(self) -> None:
        if self.waiting:
            self.groups += 1
            if not self.target.order.is_unsorted:
                self.waiting = _sorted(pa.Table.from_batches(self.waiting, self.schema), self.target).to_batches()
        super().write()

    def finish(self) -> None:
        super().finish()
        if self.target.store.place.is_local:
            flush(self.target.store.full(self.path))

    def drop(self) -> None:
        super().drop()
        self.target.store.remove(self.path)

    @property
    def sort_order(self) -> int | None:
        """The id of the sort order that the file keeps from beginning to end."""
        return self.target.order.order_id if self.groups == 1 and not self.target.order.is_unsorted else None


def _sorted(table: pa.Table, target: IcebergTarget) -> pa.Table:
    """Return rows in the table's sort order; equal ones stay in offset order."""
    keys: dict[str, pa.Array] = {}
    order: list[tuple[str, str]] = []
    for number, wanted in enumerate(target.order.fields):
        values = target.values(table, wanted.source_id, wanted.transform)
        keys[f"null {number}"], keys[f"value {number}"] = values.is_null(), values
        nulls = "descending" if wanted.null_order == NullOrder.NULLS_FIRST else "ascending"
        order += [
            (f"null {number}", nulls),
            (f"value {number}", "ascending" if wanted.direction == SortDirection.ASC else "descending"),
        ]
    keys["row"] = pa.array(np.arange(table.num_rows))
    return table.take(pc.sort_indices(pa.table(keys), sort_keys=[*order, ("row", "ascending")]))


class IcebergSplitWriter(BufferedFilesWriter):
    """Writes one split into files of this task attempt alone. The driver commits the files of the task attempt whose result
    Spark returns, and removes the others.

    :param target: where and how to write.
    """

    def __init__(self, target: IcebergTarget) -> None:
        self.target: IcebergTarget = target
        self.token = ""

    def __repr__(self) -> str:
        return f"IcebergSplitWriter({self.target.window}, {self.target.store.place.uri}/{self.target.attempt})"

    def __getstate__(self) -> dict[str, Any]:
        return {"target": self.target, "token": ""}

    def open(self, split: Split) -> None:
        """Begin a split.

        :raises Fenced: a newer attempt at the window has removed this attempt.
        :raises SinkUnavailable: the table's location cannot be read on this machine.
        """
        self.begin_split(split)
        self.token = uuid.uuid4().hex
        self._refuse_ended()

    def close(self) -> Mapping[str, Any]:
        """Finish all files.

        :return: ``rows``, and ``files``: path, rows, bytes, partition values, sort order and statistics of each.
        :raises Fenced: a newer attempt at the window has removed this attempt.
        """
        try:
            self.finish_all()
            if self.target.store.place.is_local:
                flush(self.target.store.full(self.target.attempt))
        except OSError as error:
            raise self.failed(error) from error
        # A process that removes the attempt may have listed its files before this one was there.
        self._refuse_ended()
        self.token = ""
        return {"rows": self.rows, "files": self.finished}

    def abort(self) -> None:
        if self.token:
            self.drop_all()
            for file in self.finished:
                self.target.store.remove(file["path"])
            self.token = ""

    # --- files --------------------------------------------------------------------------------------------------------

    def open_file(self, key: PartitionKey, part: int) -> _OpenDataFile:
        number = len(self.finished) + len(self.files)
        path = f"{self.target.attempt}/{plain(file_stem(self.split.range, number))}-{self.token}.parquet"
        return _OpenDataFile(self.target, path)

    def finish_file(self, file: _OpenDataFile, key: PartitionKey) -> Mapping[str, Any]:
        file.finish()
        footer = file.writer.footer  # type: ignore[attr-defined]
        return {
            "path": file.path,
            "rows": file.rows,
            "bytes": self.target.store.filesystem.get_file_info(self.target.store.full(file.path)).size,
            "partition": partition_to_json(key),
            "sort_order": file.sort_order,
            "statistics": file_statistics(footer, self.target.columns, self.target.properties),
        }

    def _groups(
        self, batch: pa.RecordBatch, stored: pa.RecordBatch, offsets: pa.Array
    ) -> Iterator[tuple[PartitionKey, pa.RecordBatch]]:
        fields = self.target.partitions.fields
        values = [self.target.values(stored, field.source_id, field.transform) for field in fields]
        if values:
            batch = pa.RecordBatch.from_arrays(values, names=list(self.target.partition_by))
        return super()._groups(batch, stored, offsets)

    def partition_names(self, column: str, values: pa.Array) -> tuple[Sequence[Any], np.ndarray]:
        """Return the partition values as Iceberg's metadata has them."""
        encoded = values.dictionary_encode(null_encoding="encode")
        return encoded.dictionary.to_pylist(), encoded.indices.to_numpy(zero_copy_only=False)

    def unwritable(self, rows: Rows) -> Mapping[int, str]:
        """Parquet holds every value of the types that ``validate`` lets pass."""
        return {}

    def failed(self, error: OSError) -> Exception:
        if isinstance(error, FileNotFoundError):
            self._refuse_ended()
        return SinkUnavailable(self.target.uri, f"writing split {self.split.index} ({self.split.range})", str(error))

    def _refuse_ended(self) -> None:
        target = self.target
        doing = f"writing split {self.split.index} ({self.split.range})"
        try:
            if target.home.exists(f"{ATTEMPTS}/{target.marker}/{BEGUN}"):
                return
            there = target.home.exists(ATTEMPTS)
        except OSError as error:
            raise SinkUnavailable(target.uri, doing, str(error)) from error
        if there or not target.home.place.is_local:
            raise Fenced(target.pipeline, doing)
        shared = "the Airflow worker and all of Spark's executors must share the file system"
        raise SinkUnavailable(target.uri, doing, f"{target.home.location} is not the table's location here; {shared}")
