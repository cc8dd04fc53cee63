"""Validation of an Iceberg sink: the reasons why no window could be committed, found before anything runs."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import ConnectionInvalid, KafkaSparkError, Problem
from airflow_kafka_spark.hooks.object_stores import (
    find_uncreatable_problem,
    find_unwritable_directory_problem,
    make_local_path,
    parse_scheme,
)
from airflow_kafka_spark.sinks.base import Shape
from airflow_kafka_spark.sinks.iceberg.options import MAIN
from airflow_kafka_spark.sinks.iceberg.table import EXPECTED, PartitionField, list_partition_fields
from airflow_kafka_spark.sinks.lake.options import ComparedColumn, find_column_problems, find_doubled_names

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.table import Table

    from airflow_kafka_spark.sinks.iceberg.catalog import IcebergTable
    from airflow_kafka_spark.sinks.iceberg.options import IcebergSinkOptions

_VERSIONS = (1, 2)
_FORBIDDEN = {"format-version": {"1", "2"}, "write.format.default": {"parquet"}}
"""Properties of a table, and the values that a sink can write for."""

EQUALITY_DELETES = "deletes rows by their values (an equality delete, as of Flink), which pyiceberg cannot apply to files"
"""The problem of a file of a table."""
EQUALITY_DELETES_REMEDY = (
    "Rewrite them in Spark: rewrite_data_files with the options `rewrite-all` and `remove-dangling-deletes`, twice if the table "
    "has no partitions (the first run leaves the files that delete)"
)


def find_iceberg_sink_problems(sink: IcebergSinkOptions, shape: Shape) -> list[Problem]:
    """Return the problems of options, columns and table. See :meth:`.IcebergSink.validate`."""
    if importlib.util.find_spec("pyiceberg") is None:
        return [_make_uninstalled_problem(), *sink.find_problems(), *_find_property_problems(sink)]
    schema = sink.add_own_columns(shape).schema
    options = [
        *_find_column_problems(sink, schema),
        *sink.find_row_problems(shape.schema),
        *sink.find_problems(),
        *_find_property_problems(sink),
    ]
    table, found = _open(sink)
    if table is not None:
        found += [*_find_table_problems(sink, table), *_find_type_problems(sink, table, schema)]
    elif not found and not sink.auto_create:
        what = f"there is no Iceberg table `{sink.table}` in the catalog"
        found.append(Problem("sink.table", what, "Create it, or set `auto_create=True`"))
    return [*found, *options]


def find_table_problems(sink: IcebergSinkOptions) -> list[Problem]:
    """Return the problems of connection, catalog, table and options. See :meth:`.IcebergSink.find_target_problems`."""
    options = [*sink.find_problems(), *_find_property_problems(sink)]
    if importlib.util.find_spec("pyiceberg") is None:
        return [_make_uninstalled_problem(), *options]
    table, found = _open(sink)
    return [*found, *(_find_table_problems(sink, table) if table is not None else ()), *options]


def _make_uninstalled_problem() -> Problem:
    action = 'Install "airflow-provider-kafka-spark[iceberg]" on the Airflow worker and on Spark\'s executors'
    return Problem("sink", "the package `pyiceberg` is not installed", action)


# --- catalog and table ----------------------------------------------------------------------------------------------------


def _open(sink: IcebergSinkOptions) -> tuple[Table | None, list[Problem]]:
    """Return the table and the problems of reading it. The table is None if it does not exist or cannot be read."""
    found = [*_find_name_problems(sink)]
    try:
        lake = sink.open()
    except ConnectionInvalid as error:
        return None, [*found, Problem("sink.conn_id", error.detail, error.action)]
    if found:
        return None, found
    with lake:
        try:
            table = lake.load("opening the table")
            if table is None:
                return None, [*_find_location_problems(sink, lake), *_find_warehouse_problems(sink, lake)]
        except KafkaSparkError as error:
            return None, [Problem.of("sink.conn_id", error, "Check the connection, and the rights that it gives")]
        try:
            store = lake.get_data_store(table)
            there = store.exists("")
            local = Path(store.location.path) if there and store.location.is_local else None
            if local and (problem := find_unwritable_directory_problem("sink.table", local)):
                return table, [problem]
            if sink.upserts and (problem := _find_equality_delete_problem(sink, table)):
                return table, [problem]
        except Exception as error:  # each store has errors of its own
            what = f"its location {table.location()} cannot be reached: {lake.access.hide_secrets(str(error))}"
            return None, [Problem("sink.table", what, "Check the options of its store in the connection's extra")]
        return table, []


def _find_equality_delete_problem(sink: IcebergSinkOptions, table: Table) -> Problem | None:
    """Return a problem if an upsert would bring back rows that another engine has deleted by their values."""
    from airflow_kafka_spark.sinks.iceberg.tasks.table_files import find_equality_deletes

    metadata = table.metadata
    head = metadata.snapshot_by_name(sink.branch) or metadata.snapshot_by_name(MAIN)
    if (path := find_equality_deletes(table, head)) is None:
        return None
    return Problem(f"sink.table {sink.table}", f"{path} {EQUALITY_DELETES}", f"{EQUALITY_DELETES_REMEDY}; or append")


def _find_location_problems(sink: IcebergSinkOptions, lake: IcebergTable) -> Iterator[Problem]:
    """Yield a problem if a table that is created would have no location. A REST catalog chooses one itself."""
    if not sink.auto_create or "warehouse" in lake.access.properties or lake.access.properties.get("type") not in ("sql", "hive"):
        return
    if not lake.has_location():
        what = "its extra has no `warehouse`, so that there is no place for a table that is created"
        yield Problem("sink.conn_id", what, "Add it, for instance `file:///mnt/lake` or `s3://lake`")


def _find_warehouse_problems(sink: IcebergSinkOptions, lake: IcebergTable) -> Iterator[Problem]:
    """Yield a problem if the store of a table that is created does not answer, has no such bucket, or is a directory in which
    nothing can be created.

    A user without the right to list the whole bucket may have it for the table. A REST catalog's store is its own.
    """
    from airflow_kafka_spark.sinks.iceberg.catalog import IcebergStore, find_end_of_path

    options = lake.access.properties
    warehouse = str(options.get("warehouse", ""))
    if sink.auto_create and (found := find_end_of_path(f"{warehouse}/{sink.table}")):
        where = "sink.table" if found in sink.table else "sink.conn_id"
        what = f"`{sink.table}` below the `warehouse` {warehouse} has `{found}` in its location, at which pyiceberg ends a path"
        yield Problem(where, what, "Name another one")
        return
    if sink.auto_create and options.get("type", "rest") != "rest" and warehouse and parse_scheme(warehouse) == "file":
        try:
            problem = find_uncreatable_problem("sink.conn_id", Path(make_local_path(warehouse)))
        except ValueError as error:
            problem = Problem("sink.conn_id", f"its `warehouse`: {error}", "Write an absolute path, or `file:///path`")
        if problem:
            yield problem
        return
    if not sink.auto_create or not warehouse.startswith(("s3://", "s3a://")) or options.get("type", "rest") == "rest":
        return
    try:
        store = IcebergStore.of(warehouse, options)
        reason = "" if store.has_bucket() else "there is no such bucket"
    except Exception as error:  # of Arrow's client
        reason = "" if "AWS Error ACCESS_DENIED" in str(error) else lake.access.hide_secrets(str(error))
    if reason:
        what = f"its `warehouse` {warehouse} cannot be reached: {reason}"
        yield Problem("sink.conn_id", what, "Check `warehouse` and the `s3.` options in the connection's extra")


def _find_name_problems(sink: IcebergSinkOptions) -> Iterator[Problem]:
    if len(parts := sink.table.split(".")) < 2 or not all(parts):
        yield Problem("sink.table", f"`{sink.table}` is not a namespace and a name, joined by dots", "Name it `shop.orders`")
    if not sink.branch or sink.branch.startswith("airflow."):
        yield Problem("sink.branch", f"`{sink.branch}` cannot be a branch of this sink", f"Name another one, or `{MAIN}`")


def _find_property_problems(sink: IcebergSinkOptions) -> Iterator[Problem]:
    for name, values in _FORBIDDEN.items():
        if str(sink.table_properties.get(name, next(iter(values)))).lower() not in values:
            what = f"`{name}` is `{sink.table_properties[name]}`; expected {' or '.join(sorted(values))}"
            yield Problem("sink.table_properties", what, "Leave it out")


def _find_table_problems(sink: IcebergSinkOptions, table: Table) -> Iterator[Problem]:
    from pyiceberg.table.refs import SnapshotRefType

    where, metadata = f"sink.table {sink.table}", table.metadata
    if metadata.format_version not in _VERSIONS:
        what = f"it has format version {metadata.format_version}; expected 1 or 2"
        yield Problem(where, what, "Name another table")
    for name, values in _FORBIDDEN.items():
        if name in table.properties and table.properties[name].lower() not in values:
            what = f"its property `{name}` is `{table.properties[name]}`; expected {' or '.join(sorted(values))}"
            yield Problem(where, what, "Change it, or name another table")
    if (ref := metadata.refs.get(sink.branch)) is not None and ref.snapshot_ref_type != SnapshotRefType.BRANCH:
        yield Problem("sink.branch", f"`{sink.branch}` is a tag of the table; expected a branch", "Name another one")
    yield from _find_layout_problems(sink, table, where)


def _find_layout_problems(sink: IcebergSinkOptions, table: Table, where: str) -> Iterator[Problem]:
    """Yield the problems of the table's partition spec and sort order."""
    top = {field.field_id for field in table.schema().fields}
    for field in table.spec().fields:
        kind = str(field.transform)
        if field.source_id not in top or kind.startswith("unknown"):
            what = f"its partition field `{field.name}` is {kind} of a column within a struct or list, or of an unknown kind"
            yield Problem(where, what, "Drop that partition field, or name another table")
    for sorted_by in table.sort_order().fields:
        if sorted_by.source_id not in top:
            yield Problem(where, "it is sorted by a column within a struct, which is not supported", "Change its sort order")
    if sink.partition_by:
        wanted, there = list(_parse_partition_fields(sink)), list_partition_fields(table.spec(), table.schema())
        if wanted != there:
            named = ", ".join(map(str, there)) or "nothing"
            what = f"the table is partitioned by {named}; found {', '.join(map(str, wanted))}"
            yield Problem("sink.partition_by", what, f"Set `partition_by={list(map(str, there))}`, or leave it out")


# --- columns ------------------------------------------------------------------------------------------------------------


def _parse_partition_fields(sink: IcebergSinkOptions) -> Iterator[PartitionField]:
    for text in sink.partition_by:
        try:
            yield PartitionField.parse(text)
        except ValueError:
            continue


def _find_column_problems(sink: IcebergSinkOptions, schema: pa.Schema) -> Iterator[Problem]:
    from airflow_kafka_spark.sinks.iceberg.table import find_unstorable_reason

    yield from find_doubled_names(schema.names)
    for field in schema:
        if not field.name or "\0" in field.name or "." in field.name:
            what = f"column `{field.name}` has no name, or a dot in it, which Iceberg has between a struct and its member"
            yield Problem("schema", what, "Rename it")
        elif why := find_unstorable_reason(field.type):
            yield Problem(f"sink.table column `{field.name}`", f"it is {field.type}: {why}", "Leave it out, or convert it")
    for text in sink.partition_by:
        try:
            PartitionField.parse(text)
        except ValueError:
            yield Problem("sink.partition_by", f"`{text}` is not understood; expected {EXPECTED}")
    wanted = list(_parse_partition_fields(sink))
    for name, count in Counter(field.name for field in wanted).items():
        if count > 1:
            yield Problem("sink.partition_by", f"{count} fields are called `{name}`", "Leave out all but one")
    for field in wanted:
        yield from _find_partition_field_problems(field, schema)


def _find_partition_field_problems(field: PartitionField, schema: pa.Schema) -> Iterator[Problem]:
    import pyarrow as pa

    from airflow_kafka_spark.sinks.iceberg.table import find_unstorable_reason, make_iceberg_schema

    if field.column not in schema.names:
        known = ", ".join(f"`{n}`" for n in schema.names)
        yield Problem("sink.partition_by", f"there is no column `{field.column}`; there are {known}", "Name one of these")
        return
    kind, fine = schema.field(field.column).type, False
    if not find_unstorable_reason(kind) and not pa.types.is_nested(kind) and not pa.types.is_floating(kind):
        source = make_iceberg_schema(pa.schema([("column", kind)])).fields[0].field_type
        fine = field.make_transform().can_transform(source)
    if fine:
        return
    yield Problem("sink.partition_by", f"`{field}` cannot partition: column `{field.column}` is {kind}", "Name another column")


def _find_type_problems(sink: IcebergSinkOptions, table: Table, schema: pa.Schema) -> Iterator[Problem]:
    """Yield a problem for each column that the table does not take."""
    import pyarrow as pa

    from airflow_kafka_spark.sinks.iceberg.table import (
        find_required_columns,
        find_unstorable_reason,
        fits,
        format_type,
        match_columns,
    )

    storable = pa.schema([field for field in schema if not find_unstorable_reason(field.type)])
    there = {field.name: format_type(field.field_type) for field in table.schema().fields}
    rows = []
    for found in match_columns(storable, table.metadata):
        taker = found.column.field_type if found.column is not None else None
        expected = format_type(taker) if taker is not None else None
        fine, grows = (taker is not None and fits(found.kind, taker, grows) for grows in (False, True))
        rows.append(ComparedColumn(found.row.name, format_type(found.kind), expected, fine, grows))
    required = find_required_columns(storable, table.metadata)
    yield from find_column_problems("table", rows, there, required, sink.auto_evolve)
