"""Data files of an Iceberg table: writing them in a Spark task, their metadata, and reading those that may hold a key."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
from pyiceberg import transforms
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, GreaterThanOrEqual, LessThanOrEqual, Reference
from pyiceberg.expressions.literals import literal
from pyiceberg.io.pyarrow import (
    ArrowScan,
    _read_all_delete_files,
    compute_statistics_plan,
    data_file_statistics_from_parquet_metadata,
    parquet_path_to_id_mapping,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.sorting import NullOrder, SortDirection, SortOrder
from pyiceberg.typedef import Record
from pyiceberg.types import DateType, IcebergType, IntegerType, LongType, TimestampType, TimestamptzType

from airflow_kafka_spark.sinks.lake.tasks.upsert import TableFile, Upsert
from airflow_kafka_spark.sinks.storage.tasks.write import PartitionKey, StoreFile, StoreSplitWriter, StoreTarget, footer_of


@dataclass(frozen=True, kw_only=True)
class IcebergTarget(StoreTarget):
    """The part of an attempt that tasks need. The columns of the files have the table's ids.

    :param columns: the files' columns in Iceberg's terms.
    :param partitions: the table's partition spec.
    :param order: the table's sort order.
    :param properties: the table's properties that say which columns have statistics.
    """

    columns: Schema
    partitions: PartitionSpec
    order: SortOrder
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


class IcebergDataFile(StoreFile):
    """A data file of the table. The rows of each of its row groups are sorted as the table is."""

    target: IcebergTarget

    def __init__(self, target: IcebergTarget, path: str) -> None:
        self.target = target
        self.groups = 0
        super().__init__(target, path)

    def write(self) -> None:
        if self.waiting:
            self.groups += 1
            if not self.target.order.is_unsorted:
                self.waiting = _sorted(pa.Table.from_batches(self.waiting, self.schema), self.target).to_batches()
        super().write()

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


class IcebergSplitWriter(StoreSplitWriter[IcebergDataFile]):
    """Writes one split into data files of an Iceberg table."""

    target: IcebergTarget

    def new_file(self, path: str) -> IcebergDataFile:
        return IcebergDataFile(self.target, path)

    def describe(self, file: IcebergDataFile, key: PartitionKey) -> Mapping[str, Any]:
        """Return partition values, sort order and statistics."""
        statistics = file_statistics(footer_of(file), self.target.columns, self.target.properties)
        return {"partition": partition_to_json(key), "sort_order": file.sort_order, "statistics": statistics}

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


# --- data files as JSON, on their way from a task to the driver -------------------------------------------------------

_COUNTS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")
_BOUNDS = ("lower_bounds", "upper_bounds")


def file_statistics(footer: pyarrow.parquet.FileMetaData, schema: Schema, properties: Mapping[str, str]) -> dict[str, Any]:
    """Return counts and bounds of a file's columns, as JSON has them.

    :param footer: the file's footer.
    :param schema: the file's columns with the table's ids.
    :param properties: the table's properties, which say which columns have bounds (``write.metadata.metrics``).
    """
    found: dict[str, Any] = {}
    for wanted in (dict(properties), {"write.metadata.metrics.default": "counts"}):
        try:
            plan = compute_statistics_plan(schema, wanted)
            statistics = data_file_statistics_from_parquet_metadata(footer, plan, parquet_path_to_id_mapping(schema))
            found = statistics.to_serialized_dict()
            break
        except (OverflowError, ValueError, TypeError):  # an instant outside of Python's years: no bounds
            continue
    statistics_of = {name: {str(key): value for key, value in found.get(name, {}).items()} for name in _COUNTS}
    bounds = {name: {str(key): value.hex() for key, value in found.get(name, {}).items()} for name in _BOUNDS}
    return {**statistics_of, **bounds, "split_offsets": found.get("split_offsets", [])}


def partition_to_json(values: Sequence[Any]) -> list[Any]:
    """Return partition values as JSON has them."""
    return [{"decimal": str(v)} if isinstance(v, Decimal) else {"bytes": v.hex()} if isinstance(v, bytes) else v for v in values]


def _partition_from_json(values: Sequence[Any]) -> list[Any]:
    return [
        v if not isinstance(v, dict) else Decimal(v["decimal"]) if "decimal" in v else bytes.fromhex(v["bytes"]) for v in values
    ]


def data_file(value: Mapping[str, Any], path: str, spec_id: int) -> DataFile:
    """Return the data file that a token names.

    :param path: its path as Iceberg's metadata has it.
    :param spec_id: the partition spec that the task wrote for.
    """
    statistics = value["statistics"]
    facts: dict[str, Any] = dict(
        content=DataFileContent.DATA,
        file_path=path,
        file_format=FileFormat.PARQUET,
        partition=Record(*_partition_from_json(value["partition"])),
        record_count=value["rows"],
        file_size_in_bytes=value["bytes"],
        sort_order_id=value["sort_order"],
        equality_ids=None,
        key_metadata=None,
        split_offsets=statistics["split_offsets"],
        **{name: {int(key): number for key, number in statistics[name].items()} for name in _COUNTS},
        **{name: {int(key): bytes.fromhex(text) for key, text in statistics[name].items()} for name in _BOUNDS},
    )
    made = DataFile.from_args(**facts)
    made.spec_id = spec_id
    return made


# --- partition and sort transforms over Arrow arrays ------------------------------------------------------------------

# pyiceberg computes them for one value at a time, or by an extension in Rust that is not installed with it.

_DAY = 86_400_000_000
_HOUR = 3_600_000_000


def transformed(values: pa.Array, transform: transforms.Transform[Any, Any], kind: IcebergType) -> pa.Array:
    """Return the result of a transform for each value: dates and instants as numbers, as Iceberg's metadata has them.

    :param values: a column of the rows, in the type that files have.
    :param kind: the column's type in Iceberg's terms.
    """
    plain = _numbers(values)
    if isinstance(transform, transforms.IdentityTransform):
        return plain
    if isinstance(transform, transforms.VoidTransform):
        return pa.nulls(len(values), pa.int32())
    if isinstance(transform, transforms.TimeTransform):
        return _time(plain, transform, isinstance(kind, DateType))
    if isinstance(transform, transforms.TruncateTransform) and isinstance(kind, (IntegerType, LongType)):
        numbers = pc.fill_null(plain, 0).to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore"):
            return _masked(numbers - numbers % numbers.dtype.type(transform.width), plain)
    hashed = (IntegerType, LongType, DateType, TimestampType, TimestamptzType)
    if isinstance(transform, transforms.BucketTransform) and isinstance(kind, hashed):
        longs = pc.fill_null(plain.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
        return _masked(((_murmur3(longs) & 0x7FFFFFFF) % transform.num_buckets).astype(np.int32), plain)
    encoded = plain.dictionary_encode()
    compute = transform.transform(kind)
    return pa.array([compute(value) for value in encoded.dictionary.to_pylist()]).take(encoded.indices)


def _numbers(values: pa.Array) -> pa.Array:
    if pa.types.is_date32(values.type):
        return values.cast(pa.int32())
    return values.cast(pa.int64()) if pa.types.is_timestamp(values.type) else values


def _time(plain: pa.Array, transform: object, is_date: bool) -> pa.Array:
    numbers = pc.fill_null(plain, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    if isinstance(transform, transforms.HourTransform):
        return _masked((numbers // _HOUR).astype(np.int32), plain)
    days = numbers if is_date else numbers // _DAY
    if isinstance(transform, transforms.DayTransform):
        return _masked(days.astype(np.int32), plain)
    unit = "M" if isinstance(transform, transforms.MonthTransform) else "Y"
    return _masked(days.astype("datetime64[D]").astype(f"datetime64[{unit}]").astype(np.int32), plain)


def _masked(numbers: np.ndarray, like: pa.Array) -> pa.Array:
    """Return numbers, null where ``like`` is."""
    return pa.array(numbers, mask=like.is_null().to_numpy(zero_copy_only=False))


def _murmur3(longs: np.ndarray) -> np.ndarray:
    """Return the 32 bit Murmur3 hash of each number's eight bytes."""

    def turned(words: np.ndarray, by: int) -> np.ndarray:
        return (words << np.uint32(by)) | (words >> np.uint32(32 - by))

    bits = longs.astype(np.int64).view(np.uint64)
    found = np.zeros(len(bits), np.uint32)
    with np.errstate(over="ignore"):
        for words in ((bits & np.uint64(0xFFFFFFFF)).astype(np.uint32), (bits >> np.uint64(32)).astype(np.uint32)):
            found ^= turned(words * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
            found = turned(found, 13) * np.uint32(5) + np.uint32(0xE6546B64)
        found ^= np.uint32(8)
        found = (found ^ (found >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        found = (found ^ (found >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return found ^ (found >> np.uint32(16))


# --- reading, for upserts ---------------------------------------------------------------------------------------------


class IcebergFile(TableFile):
    """A data file of an Iceberg table, without the rows that delete files take from it.

    :param table: the table as it was loaded.
    :param task: the file, and its delete files.
    :param names: the table's columns by the names that the rows have for them.
    """

    def __init__(self, table: Table, task: FileScanTask, names: Mapping[str, str]) -> None:
        self.identity = (task.file.file_path, *sorted(file.file_path for file in task.delete_files))
        self.table, self.task, self.names, self.file = table, task, names, task.file

    def batches(self, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        schema, io = self.table.schema(), self.table.io
        if columns is not None:
            schema = schema.select(*(self.names[name] for name in columns))
        scan = ArrowScan(self.table.metadata, io, schema, AlwaysTrue())
        # Not `to_record_batches`, which reads a file as a whole.
        deletes = _read_all_delete_files(io, [self.task])
        for batch in scan._record_batches_from_scan_tasks_and_deletes([self.task], deletes):
            if columns is None:
                yield batch
            else:
                found = [batch.column(self.names[name]) for name in columns]
                yield pa.RecordBatch.from_arrays(found, names=list(columns))


def table_files(table: Table, snapshot_id: int | None, upsert: Upsert, names: Mapping[str, str]) -> list[IcebergFile]:
    """Return the files of a snapshot that may hold a key of an upsert, by their partition values and statistics.

    :param names: the table's columns by the names that the rows have for them.
    :raises Exception: the store did not answer.
    """
    if snapshot_id is None or not upsert.events.num_rows:
        return []
    within: BooleanExpression = AlwaysTrue()
    for name in upsert.key:
        low, high = (_json_value(bound) for bound in upsert.bounds(name))
        if isinstance(low, (int, str)) and not isinstance(low, bool):
            column = Reference(names[name])
            bounds: tuple[Any, Any] = (literal(low), literal(high))
            within = And(within, GreaterThanOrEqual(term=column, value=bounds[0]), LessThanOrEqual(term=column, value=bounds[1]))
    tasks = table.scan(row_filter=within, snapshot_id=snapshot_id).plan_files()
    return [IcebergFile(table, task, names) for task in tasks]


def _json_value(value: object) -> Any:
    return value.isoformat() if isinstance(value, dt.date) and not isinstance(value, dt.datetime) else value
