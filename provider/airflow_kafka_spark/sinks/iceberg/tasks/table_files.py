"""Data files of an Iceberg table on the driver: their layout for tasks, their entries in a commit, and reading those that may
hold a key."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.dataset
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression, GreaterThanOrEqual, LessThanOrEqual, Reference
from pyiceberg.expressions.literals import literal
from pyiceberg.io.pyarrow import (
    ArrowAccessor,
    ArrowProjectionVisitor,
    MetricModeTypes,
    _combine_positional_deletes,
    _get_column_projection_values,
    _read_all_delete_files,
    compute_statistics_plan,
    parquet_path_to_id_mapping,
    pyarrow_to_schema,
)
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent
from pyiceberg.schema import Schema, prune_columns, visit_with_partner
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.sorting import NullOrder, SortDirection
from pyiceberg.typedef import Record
from pyiceberg.types import DecimalType, ListType, MapType

from airflow_kafka_spark.formats.tasks.kernels import if_else
from airflow_kafka_spark.sinks.iceberg.tasks.data_files import BOUNDS, COUNTS, ColumnMetrics, TransformedColumn
from airflow_kafka_spark.sinks.lake.tasks.rewrite import READ_PARQUET, TableFile, Upsert

# --- what tasks need --------------------------------------------------------------------------------------------------


def describe_layout(table: Table, columns: Schema) -> dict[str, Any]:
    """Return the parameters of an :class:`.IcebergTarget` that describe the table's files.

    :param columns: the files' columns with the table's ids.
    """
    order = table.sort_order()
    return {
        "names": {found.field_id: found.name for found in columns.fields},
        "partitions": tuple(TransformedColumn(found.source_id, str(found.transform)) for found in table.spec().fields),
        "order": tuple(
            TransformedColumn(
                found.source_id,
                str(found.transform),
                found.direction == SortDirection.DESC,
                found.null_order == NullOrder.NULLS_FIRST,
            )
            for found in order.fields
        ),
        "order_id": order.order_id,
        "metrics": make_column_metrics(columns, table.properties),
    }


def make_column_metrics(columns: Schema, properties: Mapping[str, str]) -> dict[str, ColumnMetrics]:
    """Return the metadata that files have for each column, by its path in Parquet's schema.

    :param columns: the files' columns with the table's ids.
    :param properties: the table's properties, which select the columns with bounds (``write.metadata.metrics``). If they are
        invalid, no column has bounds.
    """
    try:
        plan = compute_statistics_plan(columns, dict(properties))
    except ValueError:
        plan = compute_statistics_plan(columns, {"write.metadata.metrics.default": "counts"})
    found = {}
    for path, field_id in parquet_path_to_id_mapping(columns).items():
        kind, mode = plan[field_id].iceberg_type, plan[field_id].mode
        found[path] = ColumnMetrics(
            field_id,
            "decimal" if isinstance(kind, DecimalType) else str(kind),
            kind.scale if isinstance(kind, DecimalType) else 0,
            mode.type != MetricModeTypes.NONE,
            mode.type in (MetricModeTypes.TRUNCATE, MetricModeTypes.FULL),
            mode.length,
        )
    return found


# --- what a commit names ----------------------------------------------------------------------------------------------


def _partition_from_json(values: Sequence[Any]) -> list[Any]:
    return [
        v if not isinstance(v, dict) else Decimal(v["decimal"]) if "decimal" in v else bytes.fromhex(v["bytes"]) for v in values
    ]


def make_data_file(value: Mapping[str, Any], path: str, spec_id: int) -> DataFile:
    """Return the data file that a token names.

    :param path: its path in Iceberg's metadata.
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
        **{name: {int(key): number for key, number in statistics[name].items()} for name in COUNTS},
        **{name: {int(key): bytes.fromhex(text) for key, text in statistics[name].items()} for name in BOUNDS},
    )
    made = DataFile.from_args(**facts)
    made.spec_id = spec_id
    return made


# --- reading, for upserts ---------------------------------------------------------------------------------------------


class IcebergFile(TableFile):
    """A data file of an Iceberg table, without the rows that delete files remove from it.

    :param table: the table as it was loaded.
    :param task: the file, and its delete files.
    :param names: the table's columns by the names that the rows have for them.
    """

    def __init__(self, table: Table, task: FileScanTask, names: Mapping[str, str]) -> None:
        self.identity = (task.file.file_path, *sorted(file.file_path for file in task.delete_files))
        self.table, self.task, self.names, self.file = table, task, names, task.file

    def read_batches(self, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        schema, io = self.table.schema(), self.table.io
        if columns is not None:
            schema = schema.select(*(self.names[name] for name in columns))
        # Not `to_record_batches`, which reads a file as a whole.
        deletes = _read_all_delete_files(io, [self.task]).get(self.file.file_path)
        for batch in self._read_projected(schema, deletes):
            if columns is None:
                yield batch
            else:
                found = [batch.column(self.names[name]) for name in columns]
                yield pa.RecordBatch.from_arrays(found, names=list(columns))

    def _read_projected(self, schema: Schema, deletes: list[pa.ChunkedArray] | None) -> Iterator[pa.RecordBatch]:
        """Yield columns of the table from the file, as pyiceberg's scans do.

        :param deletes: the positions of rows that are deleted.
        """
        metadata = self.table.metadata
        reading = {**READ_PARQUET, "pre_buffer": True, "buffer_size": 8 << 20}
        with self.table.io.new_input(self.file.file_path).open() as source:
            fragment = pyarrow.dataset.ParquetFileFormat(**reading).make_fragment(source)
            names, version = metadata.name_mapping(), metadata.format_version
            of_file = pyarrow_to_schema(fragment.physical_schema, names, True, format_version=version)
            spec = metadata.specs().get(self.file.spec_id)
            missing = _get_column_projection_values(self.file, schema, metadata.schema(), spec, of_file.field_ids)
            leaves = {i for i in schema.field_ids if not isinstance(schema.find_type(i), (ListType, MapType))}
            read = prune_columns(of_file, leaves, select_full_types=False)
            projection = _Projection(read, True, projected_missing_fields=missing, allow_timestamp_tz_mismatch=True)
            at = 0
            for batch in fragment.scanner(fragment.physical_schema, columns=[c.name for c in read.columns]).to_batches():
                first, at = at, at + batch.num_rows
                if deletes:
                    batch = batch.take(_combine_positional_deletes(deletes, first, at))
                if batch.num_rows:
                    yield pa.RecordBatch.from_struct_array(visit_with_partner(schema, batch, projection, ArrowAccessor(read)))


class _Projection(ArrowProjectionVisitor):
    """Keeps the nulls of lists and maps of structures, which pyiceberg 0.12 reads as empty ones."""

    def list(self, list_type: ListType, list_array: pa.Array | None, value_array: pa.Array | None) -> pa.Array | None:
        return _restore_nulls(super().list(list_type, list_array, value_array), list_array)

    def map(
        self, map_type: MapType, map_array: pa.Array | None, key_result: pa.Array | None, value_result: pa.Array | None
    ) -> pa.Array | None:
        return _restore_nulls(super().map(map_type, map_array, key_result, value_result), map_array)


def _restore_nulls(found: pa.Array | None, like: pa.Array | None) -> pa.Array | None:
    """Return values, null where ``like`` is."""
    if found is None or like is None or found.null_count == like.null_count:
        return found
    return if_else(like.is_valid(), found, pa.scalar(None, found.type))


def find_equality_deletes(table: Table, snapshot: Snapshot | None) -> str | None:
    """Return the path of a file of a snapshot that deletes rows by their values; None if there is no such file.

    :raises Exception: the store did not answer.
    """
    for manifest in snapshot.manifests(table.io) if snapshot is not None else ():
        if manifest.content == ManifestContent.DELETES:
            for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
                if entry.data_file.content == DataFileContent.EQUALITY_DELETES:
                    return entry.data_file.file_path
    return None


def list_table_files(table: Table, snapshot_id: int | None, upsert: Upsert, names: Mapping[str, str]) -> list[IcebergFile]:
    """Return the files of a snapshot that may hold a key of an upsert, by their partition values and statistics.

    :param names: the table's columns by the names that the rows have for them.
    :raises ValueError: the snapshot has files that delete rows by their values.
    :raises Exception: the store did not answer.
    """
    if snapshot_id is None or not upsert.events.num_rows:
        return []
    # The scan refuses such a file only if it may delete one of the keys. A file that is rewritten holds other rows, too.
    if (path := find_equality_deletes(table, table.metadata.snapshot_by_id(snapshot_id))) is not None:
        raise ValueError(f"{path} deletes rows by their values, which pyiceberg cannot apply")
    within: BooleanExpression = AlwaysTrue()
    for name in upsert.key:
        low, high = (_to_json_value(bound) for bound in upsert.find_bounds(name))
        if isinstance(low, (int, str)) and not isinstance(low, bool):
            column = Reference(names[name])
            bounds: tuple[Any, Any] = (literal(low), literal(high))
            within = And(within, GreaterThanOrEqual(term=column, value=bounds[0]), LessThanOrEqual(term=column, value=bounds[1]))
    tasks = table.scan(row_filter=within, snapshot_id=snapshot_id).plan_files()
    return [IcebergFile(table, task, names) for task in tasks]


def _to_json_value(value: object) -> Any:
    return value.isoformat() if isinstance(value, dt.date) and not isinstance(value, dt.datetime) else value
