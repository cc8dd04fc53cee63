"""The columns of rows and of a table: which is which, what fits, and how files have them.

Iceberg knows a column by its id. A column of the rows is the table's column of that name. If the table has none, it is the column
that had this name in an older schema of the table and was renamed since.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from pyiceberg.schema import Schema
    from pyiceberg.table.metadata import TableMetadata
    from pyiceberg.types import IcebergType, NestedField

FIELD_ID = b"PARQUET:field_id"
_WITHOUT_TYPE = re.compile(r"uint|duration|dictionary|halffloat|time32|month_interval|_view|union|run_end|\[ns")


def unstorable(kind: pa.DataType) -> str:
    """Return why Iceberg has no type for a type of Arrow; "" if it has one."""
    import pyarrow as pa
    from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids

    if "timestamp[ns" in str(kind):
        return "expected microseconds, which is what Iceberg has"
    if _WITHOUT_TYPE.search(str(kind)) or "null" in str(kind) and pa.types.is_null(kind):
        return f"Iceberg has no type for {kind}"
    try:
        _pyarrow_to_schema_without_ids(pa.schema([pa.field("column", stored(kind))]), format_version=2)
    except Exception as error:  # whatever pyiceberg makes of a type
        return f"Iceberg has no type for {kind}: {error}"
    return ""


def stored(kind: pa.DataType) -> pa.DataType:
    """Return the type in which files have a type of rows: instants in microseconds and UTC, small integers as ``int``."""
    import pyarrow as pa

    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_int8(kind) or pa.types.is_int16(kind):
        return pa.int32()
    if pa.types.is_struct(kind):
        # Parquet's writer takes a null struct as a null of each member, so that each takes nulls.
        return pa.struct([pa.field(f.name, stored(f.type)) for f in kind])
    if pa.types.is_map(kind):
        return pa.map_(stored(kind.key_type), kind.item_field.with_type(stored(kind.item_type)))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(kind.value_field.with_type(stored(kind.value_type)))
    return kind


def iceberg_schema(schema: pa.Schema) -> Schema:
    """Return the columns of a table that is created for rows, with ids from 1. All columns take nulls."""
    import pyarrow as pa
    from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids
    from pyiceberg.schema import assign_fresh_schema_ids

    nullable = pa.schema([pa.field(f.name, stored(f.type)) for f in schema])
    return assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(nullable, format_version=2))


def type_name(kind: IcebergType) -> str:
    """Return a type for messages, without ids."""
    return re.sub(r"-?\d+: ", "", str(kind)).replace(": optional ", ": ")


@dataclass(frozen=True)
class Matched:
    """A column of the rows, and the table's column that takes it.

    :param row: the column of the rows.
    :param kind: its type in Iceberg's terms.
    :param column: the table's column; None if it has none.
    """

    row: pa.Field
    kind: IcebergType
    column: NestedField | None


def match(schema: pa.Schema, metadata: TableMetadata) -> list[Matched]:
    """Return each column of the rows with the table's column that takes it. Types are not compared."""
    now = metadata.schema()
    by_name = {field.name: field for field in now.fields}
    by_id = {field.field_id: field for field in now.fields}
    taken = {by_name[name].field_id for name in schema.names if name in by_name}
    kinds = {field.name: field.field_type for field in iceberg_schema(schema).fields}
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


def fits(row: IcebergType, table: IcebergType) -> bool:
    """Return True if a column of the table takes values of a type: an equal type, or one that Iceberg may promote it to."""
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
        return not table.element_required and fits(row.element_type, table.element_type)
    if isinstance(row, MapType) and isinstance(table, MapType):
        return fits(row.key_type, table.key_type) and not table.value_required and fits(row.value_type, table.value_type)
    if isinstance(row, StructType) and isinstance(table, StructType):
        there = {field.name: field for field in table.fields}
        return there.keys() == {field.name for field in row.fields} and all(
            not there[f.name].required and fits(f.field_type, there[f.name].field_type) for f in row.fields
        )
    if isinstance(row, DecimalType) and isinstance(table, DecimalType):
        return row.scale == table.scale and row.precision <= table.precision
    wider = {IntegerType: LongType, FloatType: DoubleType}
    return row == table or wider.get(type(row)) is type(table)  # type: ignore[call-overload]


def file_columns(schema: pa.Schema, metadata: TableMetadata) -> tuple[pa.Schema, Schema]:
    """Return the columns of data files for Arrow and for pyiceberg: the rows' names, the table's ids and types.

    :raises ValueError: the table lacks a column.
    """
    import pyarrow as pa
    from pyiceberg.schema import Schema
    from pyiceberg.types import NestedField

    arrow, iceberg = [], []
    for found in match(schema, metadata):
        if found.column is None:
            raise ValueError(f"it has no column `{found.row.name}`")
        kind = found.column.field_type
        arrow.append(_with_id(found.row.with_type(_with_ids(stored(found.row.type), kind)), found.column.field_id))
        iceberg.append(NestedField(found.column.field_id, found.row.name, kind, required=False))
    return pa.schema(arrow), Schema(*iceberg)


def table_columns(metadata: TableMetadata) -> tuple[pa.Schema, Schema]:
    """Return all columns of a table, as data files have them, for Arrow and for pyiceberg."""
    from pyiceberg.io.pyarrow import _pyarrow_schema_ensure_small_types, schema_to_pyarrow

    plain = _pyarrow_schema_ensure_small_types(schema_to_pyarrow(metadata.schema(), include_field_ids=False))
    return file_columns(plain, metadata)[0], metadata.schema()


def _with_id(field: pa.Field, number: int) -> pa.Field:
    return field.with_metadata({FIELD_ID: str(number).encode()})


def _with_ids(kind: pa.DataType, table: Any) -> pa.DataType:
    """Return a type of Arrow with the table's ids and, where the table has a wider one, the table's type."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        there = {field.name: field for field in table.fields}
        members = [(f, there[f.name]) for f in kind]
        return pa.struct([_with_id(f.with_type(_with_ids(f.type, t.field_type)), t.field_id) for f, t in members])
    if pa.types.is_map(kind):
        key = _with_id(kind.key_field.with_type(_with_ids(kind.key_type, table.key_type)), table.key_id)
        return pa.map_(key, _with_id(kind.item_field.with_type(_with_ids(kind.item_type, table.value_type)), table.value_id))
    if pa.types.is_list(kind):
        return pa.list_(_with_id(kind.value_field.with_type(_with_ids(kind.value_type, table.element_type)), table.element_id))
    return _widened(kind, table)


def _widened(kind: pa.DataType, table: Any) -> pa.DataType:
    import pyarrow as pa
    from pyiceberg.types import DecimalType, DoubleType, LongType

    if isinstance(table, LongType) and pa.types.is_int32(kind):
        return pa.int64()
    if isinstance(table, DoubleType) and pa.types.is_float32(kind):
        return pa.float64()
    return pa.decimal128(table.precision, table.scale) if isinstance(table, DecimalType) else kind


def missing_columns(schema: pa.Schema, metadata: TableMetadata) -> list[Matched]:
    """Return the columns of the rows that the table lacks."""
    return [found for found in match(schema, metadata) if found.column is None]


def required_columns(schema: pa.Schema, metadata: TableMetadata) -> Iterator[tuple[str, bool]]:
    """Yield the table's columns that take no null, where rows may have one.

    :return: the column's name, and True if the rows have it.
    """
    rows = {found.column.field_id: found.row for found in match(schema, metadata) if found.column is not None}
    for field in metadata.schema().fields:
        if field.required and (field.field_id not in rows or rows[field.field_id].nullable):
            yield field.name, field.field_id in rows
