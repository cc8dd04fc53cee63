"""The table's columns: creating, comparing and evolving them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import SinkUnavailable
from airflow_kafka_spark.hooks.storage import store_error
from airflow_kafka_spark.sinks.delta.log import LOG, DeltaLog

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable, Schema

    from airflow_kafka_spark.sinks.delta.options import DeltaSinkOptions

_TRIES = 20


def list_column_types(schema: Schema) -> dict[str, Any]:
    """Return names and types of the columns of a Delta schema, without the properties that concern nulls."""
    return {field["name"]: _remove_nullability(field["type"]) for field in json.loads(schema.to_json())["fields"]}


def format_type(kind: str | Mapping[str, Any]) -> str:
    """Return a type as Spark's DDL has it, for messages."""
    if isinstance(kind, str):
        return kind
    if kind["type"] == "array":
        return f"array<{format_type(kind['elementType'])}>"
    if kind["type"] == "map":
        return f"map<{format_type(kind['keyType'])},{format_type(kind['valueType'])}>"
    return f"struct<{','.join(f['name'] + ':' + format_type(f['type']) for f in kind['fields'])}>"


def _remove_nullability(kind: object) -> Any:
    if isinstance(kind, dict):
        left_out = ("nullable", "containsNull", "valueContainsNull", "metadata")
        return {name: _remove_nullability(value) for name, value in kind.items() if name not in left_out}
    return [_remove_nullability(value) for value in kind] if isinstance(kind, list) else kind


def read_columns(table: DeltaTable) -> pa.Schema:
    """Return the table's columns for Arrow, with Delta's properties of each as its metadata."""
    import pyarrow as pa

    return pa.schema(table.schema().to_arrow())


def open_table(sink: DeltaSinkOptions, log: DeltaLog, schema: pa.Schema) -> DeltaTable:
    """Return the table, which is created, or gets the columns that it lacks, if the options say so.

    :param schema: the rows' columns.
    :raises SinkUnavailable: the store did not answer, or refused it.
    """
    from deltalake import DeltaTable, Schema
    from deltalake.exceptions import DeltaError

    from airflow_kafka_spark.sinks.delta.tasks.columns import is_mapped

    doing, stored = "opening the table", Schema.from_arrow(sink.spec().stored(schema))
    error: Exception = OSError("others change it all the time")
    for _ in range(_TRIES):
        table = log.load(doing)
        try:
            if table is None:
                if not sink.auto_create:
                    raise SinkUnavailable(sink.uri, doing, "it does not exist, and `auto_create` is False")
                log.store.make(LOG)
                DeltaTable.create(
                    log.store.location.path_or_uri,
                    _make_nullable(stored),
                    mode="ignore",
                    partition_by=list(sink.partition_by),
                    configuration=dict(sink.table_properties),
                    storage_options=dict(log.store.storage_options),
                )
            elif missing := [
                field for field in _make_nullable(stored).fields if field.name not in list_column_types(table.schema())
            ]:
                if not sink.auto_evolve:
                    names = "`, `".join(field.name for field in missing)
                    raise SinkUnavailable(sink.uri, doing, f"it has no columns `{names}`, and `auto_evolve` is False")
                if is_mapped(read_columns(table)):
                    raise SinkUnavailable(sink.uri, doing, f"it has column mapping, and no columns `{names}`")
                table.alter.add_columns(missing)
            else:
                return table
        except (DeltaError, OSError) as failed:
            error = failed  # perhaps another writer was faster: look again
    raise SinkUnavailable(sink.uri, doing, store_error(error))


def _make_nullable(schema: Schema) -> Schema:
    """Return a schema whose columns take nulls. Its nested members keep what they say."""
    from deltalake import Schema

    value = json.loads(schema.to_json())
    for field in value["fields"]:
        field["nullable"] = True
    return Schema.from_json(json.dumps(value))
