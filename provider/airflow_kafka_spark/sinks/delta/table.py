"""The table's columns: creating, comparing and evolving them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from airflow_kafka_spark.errors import SinkUnavailable
from airflow_kafka_spark.hooks.object_stores import describe_store_error
from airflow_kafka_spark.sinks.delta.log import LOG, DeltaLog

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable, Field, Schema

    from airflow_kafka_spark.sinks.delta.options import DeltaSinkOptions

_TRIES = 20
"""Maximum number of tries to create or change the table. A try fails if another program has changed it."""
DeltaType: TypeAlias = "str | Mapping[str, Any]"
"""A type in the JSON of Delta's schema: the name of a primitive type, or an object for a structure, an array or a map."""


def list_column_types(schema: Schema) -> dict[str, DeltaType]:
    """Return names and types of the columns of a Delta schema, without the properties that concern nulls."""
    return {field["name"]: _remove_nullability(field["type"]) for field in json.loads(schema.to_json())["fields"]}


def format_type(kind: DeltaType) -> str:
    """Return a type in Spark's DDL, for messages."""
    if isinstance(kind, str):
        return kind
    if kind["type"] == "array":
        return f"array<{format_type(kind['elementType'])}>"
    if kind["type"] == "map":
        return f"map<{format_type(kind['keyType'])},{format_type(kind['valueType'])}>"
    return f"struct<{','.join(f['name'] + ':' + format_type(f['type']) for f in kind['fields'])}>"


_WIDER = {"byte": ("short", "integer", "long"), "short": ("integer", "long"), "integer": ("long",), "float": ("double",)}
_DECIMAL = re.compile(r"decimal\((\d+),(\d+)\)")


def merge_types(row: DeltaType, table: DeltaType) -> DeltaType | None:
    """Return the type of a column that takes the values of the rows as well as those of the table: the table's type, with the
    members of structures that it lacks. None if a value of the rows would change.

    :param row: a type as Delta's schema has it.
    """
    if isinstance(row, str) or isinstance(table, str):
        return table if row == table or _is_wider(row, table) else None
    if row["type"] != table["type"]:
        return None
    if row["type"] == "struct":
        return _merge_members(row, table)
    merged: dict[str, DeltaType] = {}
    for part in ("elementType",) if row["type"] == "array" else ("keyType", "valueType"):
        found = merge_types(row[part], table[part])
        if found is None:
            return None
        merged[part] = found
    return {**table, **merged}


def _is_wider(row: DeltaType, table: DeltaType) -> bool:
    if not (isinstance(row, str) and isinstance(table, str)):
        return False
    narrow, wide = _DECIMAL.fullmatch(row), _DECIMAL.fullmatch(table)
    if narrow and wide:
        return narrow[2] == wide[2] and int(narrow[1]) <= int(wide[1])
    return table in _WIDER.get(row, ())


def _merge_members(row: Mapping[str, Any], table: Mapping[str, Any]) -> DeltaType | None:
    there = {member["name"]: member for member in table["fields"]}
    given = {member["name"] for member in row["fields"]}
    if any(not member["nullable"] for name, member in there.items() if name not in given):
        return None
    for member in row["fields"]:
        old = there.get(member["name"])
        if old is None and member["name"].casefold() in {name.casefold() for name in there}:
            return None
        merged = merge_types(member["type"], old["type"]) if old is not None else member["type"]
        if merged is None:
            return None
        there[member["name"]] = {**(old or {**member, "nullable": True}), "type": merged}
    return {**table, "fields": list(there.values())}


def _read_types(schema: Schema) -> dict[str, DeltaType]:
    return {field["name"]: field["type"] for field in json.loads(schema.to_json())["fields"]}


def find_fitting_columns(schema: Schema, table: Schema) -> set[str]:
    """Return the columns of the rows whose values the table's columns take, perhaps with further members of structures.

    :param schema: the columns of the rows.
    """
    rows, there = _read_types(schema), _read_types(table)
    return {name for name in rows.keys() & there.keys() if merge_types(rows[name], there[name]) is not None}


def find_strict_members(schema: Schema, table: Schema) -> list[str]:
    """Return the members of the table's columns in which it takes no null and rows may have one: `place.city` of a structure,
    `tags.element` of a list, `counts.value` of a map.

    :param schema: the columns of the rows.
    """
    rows, there = _read_types(schema), _read_types(table)
    return [path for name in rows if name in there for path in _list_strict_members(name, rows[name], there[name])]


def _list_strict_members(path: str, row: DeltaType, table: DeltaType) -> Iterator[str]:
    if isinstance(row, str) or isinstance(table, str) or row["type"] != table["type"]:
        return
    if row["type"] == "struct":
        given = {member["name"]: member for member in row["fields"]}
        members = [(m["name"], given[m["name"]], m) for m in table["fields"] if m["name"] in given]
        parts = [(name, row["nullable"], own["nullable"], row["type"], own["type"]) for name, row, own in members]
    elif row["type"] == "array":
        parts = [("element", row["containsNull"], table["containsNull"], row["elementType"], table["elementType"])]
    else:
        parts = [("value", row["valueContainsNull"], table["valueContainsNull"], row["valueType"], table["valueType"])]
    for name, may_be_null, takes_null, kind, own in parts:
        if may_be_null and not takes_null:
            yield f"{path}.{name}"
        yield from _list_strict_members(f"{path}.{name}", kind, own)


def find_grown_columns(schema: Schema, table: Schema) -> list[dict[str, Any]]:
    """Return the columns of the table whose structures lack members that the rows have, with these members.

    :param schema: the columns of the rows.
    """
    rows, found = _read_types(schema), []
    for field in json.loads(table.to_json())["fields"]:
        merged = merge_types(rows[field["name"]], field["type"]) if field["name"] in rows else None
        if merged is not None and _remove_nullability(merged) != _remove_nullability(field["type"]):
            found.append({**field, "type": merged})
    return found


def make_file_schema(stored: pa.Schema, columns: pa.Schema) -> pa.Schema:
    """Return the columns of the rows as the table's files have them: in the table's types, where these differ.

    :param stored: the columns of the rows.
    :param columns: the table's columns.
    """
    import pyarrow as pa
    from deltalake import Schema

    now, there = list_column_types(Schema.from_arrow(stored)), list_column_types(Schema.from_arrow(columns))
    return pa.schema(
        [
            field.with_type(columns.field(field.name).type)
            if there.get(field.name, now[field.name]) != now[field.name]
            else field
            for field in stored
        ]
    )


def _remove_nullability(kind: object) -> Any:
    if isinstance(kind, dict):
        left_out = ("nullable", "containsNull", "valueContainsNull", "metadata")
        return {name: _remove_nullability(value) for name, value in kind.items() if name not in left_out}
    return [_remove_nullability(value) for value in kind] if isinstance(kind, list) else kind


def read_columns(table: DeltaTable) -> pa.Schema:
    """Return the table's columns for Arrow, with Delta's properties of each as its metadata."""
    import pyarrow as pa

    return pa.schema(table.schema().to_arrow())


def find_changed_column(before: pa.Schema, now: pa.Schema, names: Sequence[str]) -> str:
    """Return the name of a column for which files that tasks have written no longer fit; "" if all files do. Columns that were
    only renamed fit, and so do tables with further columns, unless these take no null or are computed.

    :param before: the table's columns when the tasks began.
    :param names: the columns of the files, computed ones and those of partitions included.
    """
    from airflow_kafka_spark.sinks.delta.tasks.data_files import find_physical_name, is_generated

    there = {find_physical_name(field): field for field in now}
    for field in before:
        found = there.pop(find_physical_name(field), None)
        if field.name in names and (found is None or not field.equals(found.with_name(field.name), check_metadata=True)):
            return str(field.name)
    return next((field.name for field in there.values() if not field.nullable or is_generated(field)), "")


_DECLARED = b"__CHAR_VARCHAR_TYPE_STRING"
_OF_LENGTH = re.compile(r"(?:var)?char\((\d+)\)")


def find_declared_type(column: pa.Field) -> str:
    """Return the type with which Spark declared a column that holds a VARCHAR(n) or CHAR(n); "" for other columns.

    :param column: a column of the table, with Delta's properties as its metadata.
    """
    return (column.metadata or {}).get(_DECLARED, b"").decode()


def find_text_length(column: pa.Field) -> int | None:
    """Return the maximum number of characters of a VARCHAR(n) or CHAR(n); None for other columns.

    :param column: a column of the table, with Delta's properties as its metadata.
    """
    found = _OF_LENGTH.fullmatch(find_declared_type(column))
    return int(found[1]) if found else None


def open_table(sink: DeltaSinkOptions, log: DeltaLog, schema: pa.Schema) -> DeltaTable:
    """Return the table, which is created, or gets the columns that it lacks, if the options say so.

    :param schema: the rows' columns.
    :raises SinkUnavailable: the store did not answer, or refused it.
    """
    from deltalake import CommitProperties, DeltaTable, Schema
    from deltalake.exceptions import DeltaError

    from airflow_kafka_spark.sinks.delta.tasks.data_files import is_mapped

    # A retry of deltalake would create the table again, in the log entry after that of another attempt.
    once = CommitProperties(max_commit_retries=0)
    doing, stored = "opening the table", Schema.from_arrow(sink.make_spec().make_stored_schema(schema))
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
                    mode="error",
                    partition_by=list(sink.partition_by),
                    configuration=dict(sink.table_properties),
                    storage_options=dict(log.store.storage_options),
                    commit_properties=once,
                )
            elif missing := _find_missing_columns(stored, table.schema()):
                names = "`, `".join(field.name for field in missing)
                if not sink.auto_evolve:
                    raise SinkUnavailable(sink.uri, doing, f"it has no columns `{names}`, and `auto_evolve` is False")
                if is_mapped(read_columns(table)):
                    raise SinkUnavailable(sink.uri, doing, f"it has no columns `{names}`, and column mapping")
                table.alter.add_columns(missing, commit_properties=once)
            else:
                return table
        except (DeltaError, OSError) as failed:
            error = failed  # perhaps another writer was faster: load the table again
    raise SinkUnavailable(sink.uri, doing, describe_store_error(error))


def _find_missing_columns(schema: Schema, table: Schema) -> list[Field]:
    """Return the columns of the rows that the table lacks, and those with members of structures that it lacks."""
    from deltalake import Schema

    there = list_column_types(table)
    added = [field for field in _make_nullable(schema).fields if field.name not in there]
    grown = find_grown_columns(schema, table)
    return [*added, *(Schema.from_json(json.dumps({"type": "struct", "fields": grown})).fields if grown else ())]


def _make_nullable(schema: Schema) -> Schema:
    """Return a schema whose columns take nulls. Nested members are unchanged."""
    from deltalake import Schema

    value = json.loads(schema.to_json())
    for field in value["fields"]:
        field["nullable"] = True
    return Schema.from_json(json.dumps(value))
