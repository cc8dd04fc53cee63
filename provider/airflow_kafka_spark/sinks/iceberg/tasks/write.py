"""Writing one split of an Iceberg table in a Spark task."""

from __future__ import annotations

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

from airflow_kafka_spark.sinks.iceberg.tasks.data_file import file_statistics, partition_to_json
from airflow_kafka_spark.sinks.iceberg.tasks.transforms import transformed
from airflow_kafka_spark.sinks.lake.tasks.write import LakeFile, LakeSplitWriter, LakeTarget, footer_of
from airflow_kafka_spark.sinks.tasks.buffered_files import PartitionKey


@dataclass(frozen=True, kw_only=True)
class IcebergTarget(LakeTarget):
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


class IcebergDataFile(LakeFile):
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


class IcebergSplitWriter(LakeSplitWriter[IcebergDataFile]):
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
