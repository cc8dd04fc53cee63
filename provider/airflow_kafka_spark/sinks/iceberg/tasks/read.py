"""The data files of an Iceberg table, as an upsert reads them."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, GreaterThanOrEqual, LessThanOrEqual, Reference
from pyiceberg.expressions.literals import literal
from pyiceberg.io.pyarrow import ArrowScan, _read_all_delete_files
from pyiceberg.table import FileScanTask, Table

from airflow_kafka_spark.sinks.lake.tasks.upsert import TableFile, Upsert


class IcebergFile(TableFile):
    """A data file of an Iceberg table, without the rows that delete files take from it.

    :param table: the table at the look.
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
    within: BooleanExpression = AlwaysTrue()
    for name in upsert.key:
        low, high = (_plain(bound) for bound in upsert.bounds(name))
        if isinstance(low, (int, str)) and not isinstance(low, bool):
            column = Reference(names[name])
            bounds: tuple[Any, Any] = (literal(low), literal(high))
            within = And(within, GreaterThanOrEqual(term=column, value=bounds[0]), LessThanOrEqual(term=column, value=bounds[1]))
    if snapshot_id is None:
        return []
    tasks = table.scan(row_filter=within, snapshot_id=snapshot_id).plan_files()
    return [IcebergFile(table, task, names) for task in tasks]


def _plain(value: Any) -> Any:
    return value.isoformat() if isinstance(value, dt.date) and not isinstance(value, dt.datetime) else value
