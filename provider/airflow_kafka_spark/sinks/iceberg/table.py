"""The table of an Iceberg sink: creating and evolving it, its columns, and its partition fields.

Iceberg knows a column by its id. A column of the rows is the table's column of that name. If the table has none, it is the column
that had this name in an older schema of the table and was renamed since.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import SinkUnavailable
from airflow_kafka_spark.sinks.iceberg.catalog import IcebergTable
from airflow_kafka_spark.sinks.iceberg.options import MAIN
from airflow_kafka_spark.sinks.iceberg.snapshots import (
    NewSnapshot,
    find_head,
    make_commit,
    make_snapshot_id,
    require_ref,
    set_ref,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.partitioning import PartitionSpec
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.transforms import Transform
    from pyiceberg.types import IcebergType, NestedField, StructType

    from airflow_kafka_spark.sinks.iceberg.options import IcebergSinkOptions


_TRIES = 20
"""Maximum number of tries to create or change the table. A try fails if another program has changed it."""


def open_table(sink: IcebergSinkOptions, lake: IcebergTable, schema: pa.Schema) -> Table:
    """Return the table, which is created, or gets the columns and the branch that it lacks, if the options say so.

    A table without snapshots gets a snapshot without data, because in a table without snapshots, requirements on a tag are not
    checked.

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
            elif missing := find_missing_columns(schema, table.metadata):
                if not sink.auto_evolve:
                    names = "`, `".join(".".join(path) for path, _ in missing)
                    raise lake.make_unavailable_error(doing, f"it has no columns `{names}`, and `auto_evolve` is False")
                error = _add_columns(lake, table, schema) or error
            elif not table.metadata.snapshots:
                empty = make_commit(table, NewSnapshot(make_snapshot_id(), {}, MAIN))
                error = lake.try_commit(table, empty.requirements, empty.updates) or error
            elif find_head(table.metadata, sink.branch) is None and (start := find_head(table.metadata, MAIN)) is not None:
                absent = require_ref(sink.branch, None)
                begun = set_ref(table.metadata, sink.branch, SnapshotRefType.BRANCH, start)
                error = lake.try_commit(table, (absent,), (begun,)) or error
            else:
                return table
        except SinkUnavailable:
            raise
        except Exception as failed:  # perhaps another writer was faster: load the table again
            error = failed
            lake.close()  # as `IcebergTable.try_commit` does
    raise lake.make_unavailable_error(doing, error)


def _add_columns(lake: IcebergTable, table: Table, schema: pa.Schema) -> Exception | None:
    from pyiceberg.table import Transaction
    from pyiceberg.table.update.schema import UpdateSchema

    change = UpdateSchema(Transaction(table), name_mapping=table.metadata.name_mapping())
    for path, kind in find_missing_columns(schema, table.metadata):
        change.add_column(path, kind)
    updates, requirements = change._commit()
    return lake.try_commit(table, requirements, updates)


def _create(sink: IcebergSinkOptions, lake: IcebergTable, schema: pa.Schema, doing: str) -> None:
    from pyiceberg.exceptions import NamespaceAlreadyExistsError

    if not sink.auto_create:
        raise lake.make_unavailable_error(doing, "it does not exist, and `auto_create` is False")
    namespace = tuple(sink.table.split(".")[:-1])
    with suppress(NamespaceAlreadyExistsError):
        if not lake.catalog.namespace_exists(namespace):
            lake.catalog.create_namespace(namespace)
    columns = make_iceberg_schema(schema)
    spec = make_spec([PartitionField.parse(text) for text in sink.partition_by], columns)
    properties = {"format-version": "2", **sink.table_properties}
    lake.catalog.create_table(sink.table, columns, partition_spec=spec, properties=properties)


# --- columns ----------------------------------------------------------------------------------------------------------

FIELD_ID = b"PARQUET:field_id"
_WITHOUT_TYPE = re.compile(r"uint|duration|dictionary|halffloat|time32|month_interval|_view|union|run_end|\[ns")


def find_unstorable_reason(kind: pa.DataType) -> str:
    """Return the reason why Iceberg has no type for a type of Arrow; "" if it has one."""
    import pyarrow as pa
    from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids

    if "timestamp[ns" in str(kind):
        return "expected microseconds, which is what Iceberg has"
    if _WITHOUT_TYPE.search(str(kind)) or "null" in str(kind) and pa.types.is_null(kind):
        return f"Iceberg has no type for {kind}"
    try:
        _pyarrow_to_schema_without_ids(pa.schema([pa.field("column", find_stored_type(kind))]), format_version=2)
    except Exception as error:  # pyiceberg raises various errors for a type
        return f"Iceberg has no type for {kind}: {error}"
    return ""


def find_stored_type(kind: pa.DataType) -> pa.DataType:
    """Return the type in which files have a type of rows: instants in microseconds and UTC, small integers as ``int``."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_int8(kind) or pa.types.is_int16(kind):
        return pa.int32()
    if pa.types.is_struct(kind):
        # Parquet's writer takes a null struct as a null of each member, so that each takes nulls.
        return pa.struct([pa.field(f.name, find_stored_type(f.type)) for f in kind])
    if pa.types.is_map(kind):
        return pa.map_(find_stored_type(kind.key_type), kind.item_field.with_type(find_stored_type(kind.item_type)))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(kind.value_field.with_type(find_stored_type(kind.value_type)))
    return kind


def make_iceberg_schema(schema: pa.Schema) -> Schema:
    """Return the columns of a table that is created for rows, with ids from 1. All columns take nulls."""
    import pyarrow as pa
    from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids
    from pyiceberg.schema import assign_fresh_schema_ids

    nullable = pa.schema([pa.field(f.name, find_stored_type(f.type)) for f in schema])
    return assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(nullable, format_version=2))


def format_type(kind: IcebergType) -> str:
    """Return a type for messages, without ids."""
    return re.sub(r"-?\d+: ", "", str(kind)).replace(": optional ", ": ")


@dataclass(frozen=True)
class Matched:
    """A column of the rows, and the table's column that takes it.

    :param row: the column of the rows.
    :param kind: its type in Iceberg.
    :param column: the table's column; None if it has none.
    """

    row: pa.Field
    kind: IcebergType
    column: NestedField | None


def match_columns(schema: pa.Schema, metadata: TableMetadata) -> list[Matched]:
    """Return each column of the rows with the table's column that takes it. Types are not compared."""
    now = metadata.schema()
    by_name = {field.name: field for field in now.fields}
    by_id = {field.field_id: field for field in now.fields}
    taken = {by_name[name].field_id for name in schema.names if name in by_name}
    kinds = {field.name: field.field_type for field in make_iceberg_schema(schema).fields}
    found = []
    for row in schema:
        column = by_name.get(row.name)
        if column is None:
            for older in sorted(metadata.schemas, key=lambda s: -s.schema_id):
                ids = [field.field_id for field in older.fields if field.name == row.name]
                if ids:
                    column = by_id.get(ids[0]) if ids[0] not in taken else None
                    break
            if column is not None:
                taken.add(column.field_id)
        found.append(Matched(row, kinds[row.name], column))
    return found


def fits(row: IcebergType, table: IcebergType, grows: bool = False) -> bool:
    """Return True if a column of the table takes values of a type: an equal type, or one that Iceberg may promote it to.
    Structures of the rows may lack members.

    :param grows: True: the table's structures may lack members, too, which are going to be added.
    """
    from pyiceberg.types import (
        DecimalType,
        DoubleType,
        FloatType,
        IntegerType,
        ListType,
        LongType,
        MapType,
        StructType,
    )

    if isinstance(row, ListType) and isinstance(table, ListType):
        return not table.element_required and fits(row.element_type, table.element_type, grows)
    if isinstance(row, MapType) and isinstance(table, MapType):
        return fits(row.key_type, table.key_type) and not table.value_required and fits(row.value_type, table.value_type, grows)
    if isinstance(row, StructType) and isinstance(table, StructType):
        return _members_fit(row, table, grows)
    if isinstance(row, DecimalType) and isinstance(table, DecimalType):
        return row.scale == table.scale and row.precision <= table.precision
    wider: dict[type[Any], type[Any]] = {IntegerType: LongType, FloatType: DoubleType}
    return row == table or wider.get(type(row)) is type(table)


def _members_fit(row: StructType, table: StructType, grows: bool) -> bool:
    there = {field.name: field for field in table.fields}
    new = {field.name.casefold() for field in row.fields if field.name not in there}
    if any(field.required for field in table.fields) or new and not grows or new & {name.casefold() for name in there}:
        return False
    return all(fits(f.field_type, there[f.name].field_type, grows) for f in row.fields if f.name in there)


def _list_new_members(
    path: tuple[str, ...], row: IcebergType, table: IcebergType
) -> Iterator[tuple[tuple[str, ...], IcebergType]]:
    """Yield path and type of the members that the rows' structures have, and those of the table lack."""
    from pyiceberg.types import ListType, MapType, StructType

    if isinstance(row, ListType) and isinstance(table, ListType):
        yield from _list_new_members((*path, "element"), row.element_type, table.element_type)
    elif isinstance(row, MapType) and isinstance(table, MapType):
        yield from _list_new_members((*path, "value"), row.value_type, table.value_type)
    elif isinstance(row, StructType) and isinstance(table, StructType):
        there = {field.name: field.field_type for field in table.fields}
        for field in row.fields:
            if field.name in there:
                yield from _list_new_members((*path, field.name), field.field_type, there[field.name])
            else:
                yield (*path, field.name), field.field_type


def make_file_columns(schema: pa.Schema, metadata: TableMetadata) -> tuple[pa.Schema, Schema]:
    """Return the columns of data files for Arrow and for pyiceberg: the rows' names, the table's ids and types.

    :raises ValueError: the table lacks a column.
    """
    import pyarrow as pa
    from pyiceberg.schema import Schema
    from pyiceberg.types import NestedField

    arrow, iceberg = [], []
    for found in match_columns(schema, metadata):
        if found.column is None:
            raise ValueError(f"it has no column `{found.row.name}`")
        kind = found.column.field_type
        arrow.append(_add_id(found.row.with_type(_add_ids(find_stored_type(found.row.type), kind)), found.column.field_id))
        iceberg.append(NestedField(found.column.field_id, found.row.name, kind, required=False))
    return pa.schema(arrow), Schema(*iceberg)


def make_table_columns(metadata: TableMetadata) -> tuple[pa.Schema, Schema]:
    """Return all columns of a table, as data files have them, for Arrow and for pyiceberg."""
    from pyiceberg.io.pyarrow import _pyarrow_schema_ensure_small_types, schema_to_pyarrow

    plain = _pyarrow_schema_ensure_small_types(schema_to_pyarrow(metadata.schema(), include_field_ids=False))
    return make_file_columns(plain, metadata)[0], metadata.schema()


def _add_id(field: pa.Field, number: int) -> pa.Field:
    return field.with_metadata({FIELD_ID: str(number).encode()})


def _add_ids(kind: pa.DataType, table: Any) -> pa.DataType:
    """Return a type of Arrow with the table's ids and, where the table has a wider one, the table's type."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        there = {field.name: field for field in table.fields}
        members = [(f, there[f.name]) for f in kind]
        return pa.struct([_add_id(f.with_type(_add_ids(f.type, t.field_type)), t.field_id) for f, t in members])
    if pa.types.is_map(kind):
        key = _add_id(kind.key_field.with_type(_add_ids(kind.key_type, table.key_type)), table.key_id)
        return pa.map_(key, _add_id(kind.item_field.with_type(_add_ids(kind.item_type, table.value_type)), table.value_id))
    if pa.types.is_list(kind):
        return pa.list_(_add_id(kind.value_field.with_type(_add_ids(kind.value_type, table.element_type)), table.element_id))
    return _widen_type(kind, table)


def _widen_type(kind: pa.DataType, table: IcebergType) -> pa.DataType:
    import pyarrow as pa
    from pyiceberg.types import DecimalType, DoubleType, LongType

    if isinstance(table, LongType) and pa.types.is_int32(kind):
        return pa.int64()
    if isinstance(table, DoubleType) and pa.types.is_float32(kind):
        return pa.float64()
    return pa.decimal128(table.precision, table.scale) if isinstance(table, DecimalType) else kind


def find_missing_columns(schema: pa.Schema, metadata: TableMetadata) -> list[tuple[tuple[str, ...], IcebergType]]:
    """Return path and type of the columns of the rows that the table lacks, and of such members of structures."""
    missing: list[tuple[tuple[str, ...], IcebergType]] = []
    for found in match_columns(schema, metadata):
        if found.column is None:
            missing.append(((found.row.name,), found.kind))
        elif fits(found.kind, found.column.field_type, grows=True):
            missing += _list_new_members((found.column.name,), found.kind, found.column.field_type)
    return missing


def find_required_columns(schema: pa.Schema, metadata: TableMetadata) -> Iterator[tuple[str, bool]]:
    """Yield the table's columns that take no null, where rows may have one.

    :return: the column's name, and True if the rows have it.
    """
    rows = {found.column.field_id: found.row for found in match_columns(schema, metadata) if found.column is not None}
    for field in metadata.schema().fields:
        if field.required and (field.field_id not in rows or rows[field.field_id].nullable):
            yield field.name, field.field_id in rows


# --- partition fields, as users write them: `day`, `bucket(16, id)`, `hour(placed_at)` --------------------------------

_FIELD = re.compile(r"([A-Za-z]+)\(\s*(?:(?P<first>\d+)\s*,\s*)?(?P<column>[^(),]+?)\s*(?:,\s*(?P<last>\d+)\s*)?\)")
_PARAMETRIC = ("bucket", "truncate")
_TIMES = ("year", "month", "day", "hour")
EXPECTED = "a column, `bucket(N, column)`, `truncate(N, column)`, or `year`, `month`, `day` or `hour` of `(column)`"


@dataclass(frozen=True)
class PartitionField:
    """A column, and the transform that computes partition values from it.

    :param column: name of the column.
    :param transform: Iceberg's name of the transform: ``identity``, ``bucket[16]``, ``day``.
    """

    column: str
    transform: str = "identity"

    @classmethod
    def parse(cls, text: str) -> PartitionField:
        """Return the field that a text names.

        :raises ValueError: the text has parentheses, and is no transform of a column.
        """
        if "(" not in text:
            return cls(text)
        found = _FIELD.fullmatch(text.strip())
        name = found[1].lower().removesuffix("s") if found else ""
        width = (found["first"] or found["last"]) if found else None
        if found and name in _PARAMETRIC and width and int(width) > 0:
            return cls(found["column"], f"{name}[{int(width)}]")
        if found and name in _TIMES and width is None:
            return cls(found["column"], name)
        raise ValueError(f"`{text}` is not understood; expected {EXPECTED}")

    @property
    def name(self) -> str:
        """The name that Spark would give to the partition field."""
        transform, _, _ = self.transform.partition("[")
        if transform == "identity":
            return self.column
        return f"{self.column}_{'trunc' if transform == 'truncate' else transform}"

    def __str__(self) -> str:
        if self.transform == "identity":
            return self.column
        name, _, width = self.transform.rstrip("]").partition("[")
        return f"{name}({width}, {self.column})" if width else f"{name}({self.column})"

    def make_transform(self) -> Transform[Any, Any]:
        """Return the transform as pyiceberg has it."""
        from pyiceberg.transforms import parse_transform

        return parse_transform(self.transform)


def list_partition_fields(spec: PartitionSpec, schema: Schema) -> list[PartitionField]:
    """Return the fields of a table's spec, without those that were removed from a table of format version 1."""
    found = [PartitionField(schema.find_column_name(f.source_id) or f.name, str(f.transform)) for f in spec.fields]
    return [field for field in found if field.transform != "void"]


def make_spec(fields: list[PartitionField], schema: Schema) -> PartitionSpec:
    """Return the spec of a table that is created.

    :raises ValueError: the schema has no such column.
    """
    from pyiceberg import partitioning

    first = 1000
    made = [
        partitioning.PartitionField(schema.find_field(f.column).field_id, first + i, f.make_transform(), f.name)
        for i, f in enumerate(fields)
    ]
    return partitioning.PartitionSpec(*made)
