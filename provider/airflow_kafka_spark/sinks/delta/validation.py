"""Validation of a Delta sink: the reasons why no window could be committed, found before anything runs."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import ConnectionInvalid, KafkaSparkError, Problem
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.hooks.object_stores import describe_store_error, find_provider_problem, find_uncreatable_problem
from airflow_kafka_spark.sinks.base import Shape
from airflow_kafka_spark.sinks.lake.options import ComparedColumn, find_column_problems, find_doubled_names

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable

    from airflow_kafka_spark.sinks.delta.options import DeltaSinkOptions

_FEATURES = {
    "appendOnly",
    "changeDataFeed",
    "checkConstraints",
    "columnMapping",
    "generatedColumns",
    "invariants",
    "timestampNtz",
}
"""Features of a table that deltalake writes for, and that do not matter to an append, or whose use in a column is checked."""
_WITH_IDENTITIES = 6
"""The version of writers that has the feature `identityColumns` without naming it."""
_MAPPING = "delta.columnMapping.mode"
_FORBIDDEN = ("delta.setTransactionRetentionDuration", _MAPPING, "delta.enableDeletionVectors")
_REFUSED: dict[str, tuple[Sequence[str], str]] = {
    "delta.setTransactionRetentionDuration": ((), "the table forgets which windows it has"),
    _MAPPING: (("none", "name"), "columns of files that others have added are known by their ids only"),
    "delta.enableDeletionVectors": (("false",), "deletion vectors are not supported"),
}
DELETION_VECTORS_REMEDY = (
    "Copy the table, or run `ALTER TABLE ... DROP FEATURE deletionVectors` in Spark. Delta 4 then leaves `checkpointProtection`, "
    "which `ALTER TABLE ... DROP FEATURE checkpointProtection TRUNCATE HISTORY` removes a day later"
)
_REFUSED_BY_UPSERTS: dict[str, tuple[Sequence[str], str]] = {
    "delta.appendOnly": (("false",), "it takes no upserts"),
    "delta.enableChangeDataFeed": (("false",), "an upsert rewrites files, so that its feed would have rows that did not change"),
}
"""Properties of a table, the values that are accepted, and why no other one is."""
_RECENT = 50
"""Number of commits that are checked for other writers."""
_UNNAMEABLE = frozenset(" ,;{}()\n\t=")


def find_delta_sink_problems(sink: DeltaSinkOptions, shape: Shape) -> list[Problem]:
    """Return the problems of options, columns and table. See :meth:`.DeltaSink.validate`."""
    schema = sink.add_own_columns(shape).schema
    table, found = _open(sink)
    options = [
        *_find_column_problems(sink, schema, table),
        *sink.find_row_problems(shape.schema),
        *sink.find_problems(),
        *_find_property_problems(sink, is_new=table is None),
    ]
    if table is not None:
        found += [*find_problems_of(sink, table), *_find_type_problems(sink, table, schema)]
    elif not found and not sink.auto_create:
        found.append(Problem("sink.path", f"there is no Delta table at {sink.uri}", "Create it, or set `auto_create=True`"))
    return [*found, *options]


def find_table_problems(sink: DeltaSinkOptions) -> list[Problem]:
    """Return the problems of location, connection, table and options. See :meth:`.DeltaSink.find_target_problems`."""
    table, found = _open(sink)
    found += find_problems_of(sink, table) if table is not None else ()
    return [*found, *sink.find_problems(), *_find_property_problems(sink, is_new=table is None)]


def find_removal_problems(sink: DeltaSinkOptions) -> list[Problem]:
    """Return the problem of a table that allows no removals. See :meth:`.DeltaSink.find_replay_problems`."""
    table, _ = _open(sink)
    if table is None or table.metadata().configuration.get("delta.appendOnly", "").lower() != "true":
        return []
    return [Problem("on_rerun", f"{sink.uri} has `delta.appendOnly`, so that nothing can be replaced", "Unset that property")]


# --- location -----------------------------------------------------------------------------------------------------------


def _open(sink: DeltaSinkOptions) -> tuple[DeltaTable | None, list[Problem]]:
    """Return the table and the problems of reading it. The table is None if it does not exist or cannot be read."""
    from airflow_kafka_spark.sinks.delta.log import DeltaLog

    if importlib.util.find_spec("deltalake") is None:
        action = 'Install "airflow-provider-kafka-spark[delta]" on the Airflow worker'
        return None, [Problem("sink", "the package `deltalake` is not installed", action)]
    try:
        location = sink.location
    except ValueError as error:
        what = f"{error}. Expected an absolute path, a file:// URI or s3://bucket/prefix"
        return None, [Problem("sink.path", what)]
    found: list[Problem] = []
    if location.is_local:
        found += _find_right_problems(Path(location.path))
        if sink.conn_id:
            found.append(Problem("sink.conn_id", "a mounted directory needs no connection", "Leave it out"))
    elif missing := find_provider_problem("sink.conn_id", location.scheme, sink.conn_id):
        return None, [missing]
    if found:
        return None, found
    try:
        return DeltaLog(sink.store).load("opening the table"), []
    except ConnectionInvalid as error:
        return None, [Problem.of("sink.conn_id", error)]
    except KafkaSparkError as error:
        if "catalog version" in error.found:
            what = "it has the feature `catalogManaged`: its commits go through a catalog, and those of deltalake do not"
            return None, [Problem(f"sink.path table {sink.uri}", what, "Name another table")]
        is_too_new = "Unsupported: " in error.found
        return None, [Problem.of("sink.path", error, None if is_too_new else "Check path, `conn_id` and its rights")]


def _find_right_problems(directory: Path) -> Iterator[Problem]:
    if problem := find_uncreatable_problem("sink.path", directory):
        yield problem
    elif directory.is_dir() and not (directory / "_delta_log").is_dir() and _has_files(directory):
        yield Problem("sink.path", f"{directory} is not empty, and no Delta table", "Name an empty directory, or a Delta table")


def _has_files(directory: Path) -> bool:
    return any(path.name[0] not in "._" for path in directory.iterdir())


def _find_property_problems(sink: DeltaSinkOptions, *, is_new: bool) -> Iterator[Problem]:
    """Yield the problems of the properties of a table.

    :param is_new: True if the table does not exist, so that it would be created with them.
    """
    if forbidden := sorted(n for n in sink.table_properties if n in _FORBIDDEN):
        what = f"`{'`, `'.join(forbidden)}` cannot be set on a table of this sink"
        yield Problem("sink.table_properties", what, "Leave it out")
    elif is_new and (unknown := [n for n, value in sink.table_properties.items() if not _is_known_property(n, value)]):
        what = f"deltalake knows no property {quote_names(unknown)}"
        yield Problem("sink.table_properties", what, "Correct its name, upper and lower case included, or leave it out")


def _is_known_property(name: str, value: str) -> bool:
    """Return True if deltalake creates a table with a property. It is tried on one in memory."""
    if importlib.util.find_spec("deltalake") is None:
        return True
    import pyarrow as pa
    from deltalake import DeltaTable
    from deltalake.exceptions import DeltaError

    try:
        DeltaTable.create("memory:///", schema=pa.schema([("id", pa.int64())]), configuration={name: str(value)})
    except DeltaError as error:
        return "Error parsing property" not in str(error)
    return True


# --- table --------------------------------------------------------------------------------------------------------------


def find_problems_of(sink: DeltaSinkOptions, table: DeltaTable) -> Iterator[Problem]:
    """Yield the problems of a table, without those of the rows' columns."""
    import pyarrow as pa

    from airflow_kafka_spark.sinks.delta.tasks.data_files import names_other_tables

    where, metadata, protocol = f"sink.path table {sink.uri}", table.metadata(), table.protocol()
    used = {*(protocol.writer_features or ()), *(protocol.reader_features or ())}
    used |= {"identityColumns"} if protocol.min_writer_version == _WITH_IDENTITIES else set()
    if others := sorted(used - _FEATURES):
        what = f"it has the features `{'`, `'.join(others)}`; expected none but {', '.join(sorted(_FEATURES))}"
        of_vectors = not {"deletionVectors", "checkpointProtection"}.isdisjoint(others)
        action = "Drop these features (`ALTER TABLE ... DROP FEATURE`), or name another table"
        yield Problem(where, what, DELETION_VECTORS_REMEDY if of_vectors else action)
    properties = metadata.configuration
    refused = {**_REFUSED, **(_REFUSED_BY_UPSERTS if sink.upserts else {})}
    for name, (allowed, why) in refused.items():
        if name in properties and properties[name].lower() not in allowed:
            yield Problem(where, f"its property `{name}` is `{properties[name]}`: {why}", "Unset it, or name another table")
    if constraints := sorted(name for name in properties if name.startswith("delta.constraints.")):
        what = f"it has constraints that Spark's tasks do not check: {', '.join(constraints)}"
        yield Problem(where, what, "Drop them, or load another table and merge from there")
    yield from _find_special_problems(where, table)
    if list(metadata.partition_columns) != list(sink.partition_by):
        there = ", ".join(metadata.partition_columns) or "nothing"
        what = f"the table is partitioned by {there}; found {', '.join(sink.partition_by) or 'nothing'}"
        yield Problem("sink.partition_by", what, f"Set `partition_by={list(metadata.partition_columns)}`")
    if sink.upserts and names_other_tables(pa.table(table.get_add_actions(flatten=True))):
        what = "it has files of another table (a shallow clone), which an upsert cannot rewrite"
        yield Problem(where, what, "Copy it (`CREATE TABLE ... AS SELECT`), or append")
    if not sink.location.is_local:
        yield from _find_unsafe_writer_problems(where, table)


def _find_special_problems(where: str, table: DeltaTable) -> Iterator[Problem]:
    """Yield the problems of column mapping, and of columns that tasks cannot compute or check."""
    from airflow_kafka_spark.sinks.delta.table import find_declared_type, find_text_length, read_columns
    from airflow_kafka_spark.sinks.delta.tasks.data_files import is_mapped, list_generated_columns

    columns = read_columns(table)
    if not is_mapped(columns) and table.metadata().configuration.get(_MAPPING, "none") != "none":
        yield Problem(where, f"it has `{_MAPPING}`, but its columns have no names in files (physical names)", "Unset it in Spark")
    for field in columns:
        names = (name.decode() for name in field.metadata or {})
        if computed := sorted(name for name in names if name.startswith(("delta.identity", "delta.invariants"))):
            what = f"column `{field.name}` has {', '.join(computed)}, which Spark's tasks do not compute or check"
            yield Problem(where, what, "Name another table")
        if (declared := find_declared_type(field)) and find_text_length(field) is None:
            what = f"column `{field.name}` is {declared}: Spark's tasks do not check the lengths of texts within it"
            yield Problem(where, what, "Name another table")
    try:
        list(list_generated_columns(columns))
    except ValueError as error:
        yield Problem(where, f"it generates a column by an expression that tasks cannot compute: {error}", "Name another table")


def _find_unsafe_writer_problems(where: str, table: DeltaTable) -> Iterator[Problem]:
    from deltalake.exceptions import DeltaError

    try:
        commits = table.history(_RECENT)
    except (DeltaError, OSError) as error:
        yield Problem(where, f"its history cannot be read: {describe_store_error(error)}", "Check path, `conn_id` and its rights")
        return
    for commit in commits:
        engine = str(commit.get("engineInfo", ""))
        if "spark" in engine.lower() or "databricks" in engine.lower():
            yield Problem(
                where,
                f"version {commit['version']} was written by {engine}. Spark's log stores for S3 overwrite an entry of the log "
                "that another writer has just put there, so that a window could be lost",
                "Let this sink and Spark write to different tables",
            )
            return


# --- columns ------------------------------------------------------------------------------------------------------------


def _find_column_problems(sink: DeltaSinkOptions, schema: pa.Schema, table: DeltaTable | None) -> Iterator[Problem]:
    import pyarrow as pa

    from airflow_kafka_spark.sinks.delta.table import read_columns
    from airflow_kafka_spark.sinks.delta.tasks.data_files import is_generated, is_mapped
    from airflow_kafka_spark.sinks.storage.tasks.write import find_partition_type_problem

    columns = read_columns(table) if table is not None else pa.schema([])
    yield from find_doubled_names(schema.names)
    for field in schema:
        if not field.name or _UNNAMEABLE & set(field.name) and not is_mapped(columns):
            yield Problem("schema", f"column `{field.name}` has a blank or one of ,;{{}}()= in its name", "Rename it")
        elif problem := _find_unstorable_problem(sink, field):
            yield problem
    computed = [field for field in columns if is_generated(field)]
    if given := [field.name for field in computed if field.name in schema.names]:
        what = f"the table computes the columns {quote_names(given)} itself, and the rows have them, too"
        yield Problem("schema", what, "Leave them out of the rows")
    schema = pa.schema([*schema, *(field for field in computed if field.name not in schema.names)])
    for name, count in Counter(sink.partition_by).items():
        if count > 1:
            yield Problem("sink.partition_by", f"`{name}` is named {count} times", "Name it once")
        if name not in schema.names:
            known = quote_names(schema.names)
            yield Problem("sink.partition_by", f"there is no column `{name}`; there are {known}", "Name one of these")
        elif problem := find_partition_type_problem(name, schema.field(name).type):
            yield problem
    if schema.names and set(schema.names) <= set(sink.partition_by):
        yield Problem("sink.partition_by", "it names all columns, so that none is left for the files", "Leave out at least one")


def _find_unstorable_problem(sink: DeltaSinkOptions, field: pa.Field) -> Problem | None:
    import pyarrow as pa

    from airflow_kafka_spark.sinks.delta.table import list_column_types

    where = f"sink.path column `{field.name}`"
    kind = str(field.type)
    if "timestamp[ns" in kind:
        return Problem(where, f"it is {kind}; expected microseconds, which is what Delta has", "Cast it to timestamp[us]")
    if importlib.util.find_spec("deltalake") is None:
        return None
    from deltalake import Schema

    try:
        list_column_types(Schema.from_arrow(sink.make_spec().make_stored_schema(pa.schema([field]))))
    except Exception as error:  # whatever deltalake makes of a type
        return Problem(where, f"Delta has no type for {kind}: {error}", "Leave the column out, or convert it")
    if "uint" in kind or "time32" in kind or "time64" in kind or "duration" in kind or "dictionary" in kind:
        return Problem(where, f"Delta has no type for {kind}", "Leave the column out, or convert it")
    return None


def _find_type_problems(sink: DeltaSinkOptions, table: DeltaTable, schema: pa.Schema) -> Iterator[Problem]:
    """Yield a problem for each column that the table does not take."""
    import pyarrow as pa
    from deltalake import Schema

    from airflow_kafka_spark.sinks.delta.table import (
        find_fitting_columns,
        find_grown_columns,
        find_strict_members,
        format_type,
        list_column_types,
        read_columns,
    )
    from airflow_kafka_spark.sinks.delta.tasks.data_files import is_mapped, list_generated_columns

    storable = pa.schema([field for field in schema if _find_unstorable_problem(sink, field) is None])
    stored = Schema.from_arrow(sink.make_spec().make_stored_schema(storable))
    now, before = list_column_types(stored), list_column_types(table.schema())
    there = {name: format_type(kind) for name, kind in before.items()}
    grown = {field["name"] for field in find_grown_columns(stored, table.schema())}
    fitting = find_fitting_columns(stored, table.schema()) - grown
    rows = (
        ComparedColumn(name, format_type(kind), there.get(name), name in fitting, name in grown) for name, kind in now.items()
    )
    columns = read_columns(table)
    try:
        generated = {column.field.name: column.source for column in list_generated_columns(columns)}
    except ValueError:  # a problem of the table
        generated = {}
    for name, source in generated.items():
        if source not in now:
            what = f"the table computes `{name}` from it, and the rows do not have it"
            yield Problem(f"sink.path column `{source}`", what, "Add it to the schema")
    strict = sorted(field.name for field in table.schema().fields if not field.nullable and field.name not in generated)
    required = [(name, name in now) for name in strict if name not in now or schema.field(name).nullable]
    required += [(path, True) for path in find_strict_members(stored, table.schema())]
    new = [name for name in now if name not in before or name in grown]
    if new and sink.auto_evolve and is_mapped(columns):
        what = f"the table has column mapping, and no columns {quote_names(new)} of this type; deltalake gives new columns no ids"
        yield Problem("sink.auto_evolve", what, "Add them by ALTER TABLE in Spark")
    yield from find_column_problems("path", rows, there, required, sink.auto_evolve)
