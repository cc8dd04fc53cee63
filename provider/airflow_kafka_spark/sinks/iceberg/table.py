"""The table of an Iceberg sink: creating it, adding columns, and creating its branch."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import SinkUnavailable
from airflow_kafka_spark.sinks.iceberg.catalog import IcebergTable
from airflow_kafka_spark.sinks.iceberg.columns import iceberg_schema, missing_columns
from airflow_kafka_spark.sinks.iceberg.options import MAIN
from airflow_kafka_spark.sinks.iceberg.partitions import PartitionField, make_spec
from airflow_kafka_spark.sinks.iceberg.snapshots import head, make_commit, new_snapshot_id, ref_is, set_ref

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.table import Table

    from airflow_kafka_spark.sinks.iceberg.options import IcebergSinkOptions

_TRIES = 20


def open_table(sink: IcebergSinkOptions, lake: IcebergTable, schema: pa.Schema) -> Table:
    """Return the table, which is created, or gets the columns and the branch that it lacks, if the options say so.

    A table without snapshots gets one without data: a requirement on a tag means nothing in a table that has no snapshot.

    :param schema: the rows' columns.
    :raises SinkUnavailable: catalog or store did not answer, or refused it.
    """
    from pyiceberg.table.refs import SnapshotRefType

    doing = "opening the table"
    error: Exception | str = ""
    for _ in range(_TRIES):
        table = lake.load(doing)
        try:
            if table is None:
                _create(sink, lake, schema, doing)
            elif missing := missing_columns(schema, table.metadata):
                if not sink.auto_evolve:
                    names = "`, `".join(found.row.name for found in missing)
                    raise lake.unavailable(doing, f"it has no columns `{names}`, and `auto_evolve` is False")
                error = _add_columns(lake, table, schema) or error
            elif not table.metadata.snapshots:
                empty = make_commit(table, new_snapshot_id(), {}, MAIN)
                error = lake.try_commit(table, empty.requirements, empty.updates) or error
            elif head(table.metadata, sink.branch) is None and (start := head(table.metadata, MAIN)) is not None:
                absent = ref_is(sink.branch, None)
                begun = set_ref(table.metadata, sink.branch, SnapshotRefType.BRANCH, start)
                error = lake.try_commit(table, (absent,), (begun,)) or error
            else:
                return table
        except SinkUnavailable:
            raise
        except Exception as failed:  # perhaps another writer was faster: look again
            error = failed
    raise lake.unavailable(doing, error)


def _add_columns(lake: IcebergTable, table: Table, schema: pa.Schema) -> Exception | None:
    from pyiceberg.table import Transaction
    from pyiceberg.table.update.schema import UpdateSchema

    change = UpdateSchema(Transaction(table), name_mapping=table.metadata.name_mapping())
    for found in missing_columns(schema, table.metadata):
        change.add_column((found.row.name,), found.kind)
    updates, requirements = change._commit()
    return lake.try_commit(table, requirements, updates)


def _create(sink: IcebergSinkOptions, lake: IcebergTable, schema: pa.Schema, doing: str) -> None:
    from pyiceberg.exceptions import NamespaceAlreadyExistsError

    if not sink.auto_create:
        raise lake.unavailable(doing, "it does not exist, and `auto_create` is False")
    namespace = tuple(sink.table.split(".")[:-1])
    with suppress(NamespaceAlreadyExistsError):
        if not lake.catalog.namespace_exists(namespace):
            lake.catalog.create_namespace(namespace)
    columns = iceberg_schema(schema)
    spec = make_spec([PartitionField.parse(text) for text in sink.partition_by], columns)
    properties = {"format-version": "2", **sink.table_properties}
    lake.catalog.create_table(sink.table, columns, partition_spec=spec, properties=properties)
