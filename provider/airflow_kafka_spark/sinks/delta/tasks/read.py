"""The data files of a Delta table, as an upsert reads them."""

from __future__ import annotations

import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from airflow_kafka_spark.sinks.delta.log import DataFile
from airflow_kafka_spark.sinks.lake.tasks.upsert import TableFile, Upsert
from airflow_kafka_spark.sinks.tasks.buffered_files import partition_values


class DeltaFile(TableFile):
    """A data file of a Delta table.

    :param fragment: the file, as Arrow reads it.
    :param schema: the table's columns.
    :param file: the file, as a commit removes it.
    """

    def __init__(self, fragment: Any, schema: pa.Schema, file: DataFile) -> None:
        self.identity = (file.path,)
        self.fragment, self.schema, self.file = fragment, schema, file

    def batches(self, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        wanted = list(columns) if columns is not None else self.schema.names
        yield from self.fragment.to_batches(schema=self.schema, columns=wanted, batch_readahead=4)


def table_files(table: DeltaTable, upsert: Upsert) -> tuple[list[DeltaFile], pa.Schema]:
    """Return the files of a table that may hold a key of an upsert, by their partition values and statistics, and its columns."""
    found = table.to_pyarrow_dataset()
    named = _data_files(table, upsert)
    return [DeltaFile(f, found.schema, named[f.path]) for f in found.get_fragments() if f.path in named], found.schema


def _data_files(table: DeltaTable, upsert: Upsert) -> dict[str, DataFile]:
    """Return files of a table by their paths, without the escapes that Delta's log has in them."""
    actions = pa.table(table.get_add_actions(flatten=True))
    columns = table.metadata().partition_columns
    values = {name: partition_values(actions.column(f"partition.{name}").combine_chunks()) for name in columns}
    paths, sizes, rows = (actions.column(name).to_pylist() for name in ("path", "size_bytes", "num_records"))
    files: dict[str, DataFile] = {}
    for at in np.flatnonzero(_within(actions, upsert)):
        path = urllib.parse.unquote(paths[at])
        files[path] = DataFile(path, sizes[at], rows[at] or 0, {name: values[name][at] for name in columns})
    return files


def _within(actions: pa.Table, upsert: Upsert) -> np.ndarray:
    """Return which files may hold a key. A file without a bound may, and so may one whose bound is not exact.

    deltalake's own filter passes over the files that have no bound for a column that has one in others.
    """
    found = np.ones(actions.num_rows, bool)
    for name in upsert.key:
        low, high = upsert.bounds(name)
        for prefix, compare, wanted in (
            ("max", pc.greater_equal, low),
            ("min", pc.less_equal, high),
            ("partition", pc.greater_equal, low),
            ("partition", pc.less_equal, high),
        ):
            if f"{prefix}.{name}" not in actions.schema.names:
                continue
            bound = actions.column(f"{prefix}.{name}")
            if pa.types.is_integer(bound.type) or pa.types.is_string(bound.type) or pa.types.is_date(bound.type):
                inside = compare(bound, pa.scalar(wanted, bound.type))
                found &= np.asarray(pc.fill_null(inside, True), bool)
    return found
