"""Columns of a Delta table that have another name in its files (column mapping), and columns that the table computes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.windows.times import MICROSECONDS_OF_DAY

# --- column mapping ---------------------------------------------------------------------------------------------------

_PHYSICAL_NAME, _MAPPING_ID = b"delta.columnMapping.physicalName", b"delta.columnMapping.id"
_FIELD_ID = b"PARQUET:field_id"


def find_physical_name(column: pa.Field) -> str:
    """Return the name that a column has in files, statistics and partition values.

    :param column: a column of the table, with Delta's properties as its metadata.
    """
    return (column.metadata or {}).get(_PHYSICAL_NAME, column.name.encode()).decode()


def is_mapped(columns: pa.Schema) -> bool:
    """Return True if the table has column mapping."""
    return any(_PHYSICAL_NAME in (column.metadata or {}) for column in columns)


def make_written_schema(schema: pa.Schema, columns: pa.Schema) -> pa.Schema:
    """Return columns by the names that they have in files, with the ids that the table has for them.

    :param schema: the files' columns.
    :param columns: the table's columns, with Delta's properties as metadata.
    """
    return pa.schema([_make_written_field(field, columns.field(columns.get_field_index(field.name))) for field in schema])


def _make_written_field(field: pa.Field, column: pa.Field) -> pa.Field:
    number = (column.metadata or {}).get(_MAPPING_ID)
    metadata = {_FIELD_ID: number} if number is not None else None
    return pa.field(find_physical_name(column), _make_written_type(field.type, column.type), field.nullable, metadata)


def _make_written_type(kind: pa.DataType, column: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        members = [kind.field(at) for at in range(kind.num_fields)]
        return pa.struct([_make_written_field(f, column.field(column.get_field_index(f.name))) for f in members])
    if pa.types.is_map(kind):
        key = _make_written_type(kind.key_type, column.key_type)
        return pa.map_(key, kind.item_field.with_type(_make_written_type(kind.item_type, column.item_type)))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_make_written_type(kind.value_type, column.value_type)))
    return kind


def rename_columns(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return rows with the names of a schema, also within structures.

    :param schema: as many columns of the same types.
    """
    if batch.schema.equals(schema):
        return batch
    # A view keeps the values of an array under other names of the members of structures.
    columns = [c if c.type.equals(f.type) else c.view(f.type) for c, f in zip(batch.columns, schema, strict=True)]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


# --- generated columns ------------------------------------------------------------------------------------------------

_EXPRESSION = b"delta.generationExpression"
_NAME = r"(?P<name>`[^`]+`|[A-Za-z_]\w*)"
_FORMS = {
    "date": rf"CAST\(\s*{_NAME}\s+AS\s+DATE\s*\)|DATE\(\s*(?P<other>`[^`]+`|[A-Za-z_]\w*)\s*\)",
    "part": rf"(?P<part>YEAR|MONTH|DAY|DAYOFMONTH|HOUR)\(\s*{_NAME}\s*\)",
    "format": rf"DATE_FORMAT\(\s*{_NAME}\s*,\s*'(?P<format>[^']*)'\s*\)",
    "text": rf"SUBSTR(?:ING)?\(\s*{_NAME}\s*,\s*(?P<start>\d+)\s*,\s*(?P<length>\d+)\s*\)",
}
_PARTS = {"YEAR": pc.year, "MONTH": pc.month, "DAY": pc.day, "DAYOFMONTH": pc.day, "HOUR": pc.hour}
_PATTERN = re.compile(r"yyyy|MM|dd|HH|[-_/.: ]")
_STRFTIME = {"yyyy": "%Y", "MM": "%m", "dd": "%d", "HH": "%H"}
UNDERSTOOD = (
    "CAST(x AS DATE), YEAR(x), MONTH(x), DAY(x), HOUR(x), DATE_FORMAT(x, 'yyyy-MM-dd-HH') or parts of it, SUBSTRING(x, 1, n)"
)


@dataclass(frozen=True)
class GeneratedColumn:
    """A column that the table computes from another one. Parts of instants are those of UTC.

    :param field: the column.
    :param source: the other column.
    :param form: ``date``, ``part``, ``format`` or ``text``.
    :param options: the arguments of the function: the part, the format, or the first character and the number of characters.
    """

    field: pa.Field
    source: str
    form: str
    options: tuple[Any, ...] = ()

    @classmethod
    def parse(cls, field: pa.Field, columns: pa.Schema) -> GeneratedColumn:
        """Return the column that the metadata of a field describe.

        :param columns: the table's columns.
        :raises ValueError: its expression is not understood.
        """
        text = field.metadata[_EXPRESSION].decode().strip()
        for form, pattern in _FORMS.items():
            if found := re.fullmatch(pattern, text, re.IGNORECASE):
                parts = found.groupdict()
                named = (parts["name"] or parts.get("other", "")).strip("`").casefold()
                for source in columns:
                    made = cls(pa.field(field.name, field.type), source.name, form, _read_options(form, parts))
                    if source.name.casefold() == named and made._takes(source.type):
                        return made
        raise ValueError(f"`{text}` is not understood; expected {UNDERSTOOD}")

    def _takes(self, kind: pa.DataType) -> bool:
        if self.form == "text":
            return pa.types.is_string(kind) and pa.types.is_string(self.field.type) and self.options[0] >= 0
        timed = pa.types.is_timestamp(kind)
        if self.form == "date":
            return pa.types.is_date32(self.field.type) and (timed or pa.types.is_date(kind))
        if not timed and (not pa.types.is_date(kind) or "%H" in self.options[0] or self.options[0] == "HOUR"):
            return False
        return pa.types.is_string(self.field.type) if self.form == "format" else pa.types.is_integer(self.field.type)

    def compute(self, batch: pa.RecordBatch) -> pa.Array:
        """Return the column's values; null where the other column is null."""
        values = batch.column(self.source)
        if self.form == "text":
            start, length = self.options
            return pc.utf8_slice_codeunits(values, start, start + length).cast(self.field.type)
        if pa.types.is_timestamp(values.type):
            values = values.cast(pa.timestamp("us", "UTC" if values.type.tz else None)).cast(pa.int64())
            if self.form == "date":
                days = pc.fill_null(values, 0).to_numpy() // MICROSECONDS_OF_DAY
                return pa.array(days.astype(np.int32), mask=values.is_null().to_numpy(zero_copy_only=False)).cast(self.field.type)
            values = values.cast(pa.timestamp("us"))
        if self.form == "date":
            return values.cast(self.field.type)
        if self.form == "format":
            return pc.strftime(values, self.options[0]).cast(self.field.type)
        return _PARTS[self.options[0]](values).cast(self.field.type)


def _read_options(form: str, parts: dict[str, str]) -> tuple[Any, ...]:
    """Return the options of a function.

    :raises ValueError: a pattern of dates is not understood.
    """
    if form == "part":
        return (parts["part"].upper(),)
    if form == "text":
        # The first character is number 1, and number 0 as well.
        return max(int(parts["start"]) - 1, 0), int(parts["length"])
    if form == "format":
        pattern = parts["format"]
        if not pattern or "".join(_PATTERN.findall(pattern)) != pattern:
            raise ValueError(f"the pattern `{pattern}` is not understood; expected {UNDERSTOOD}")
        return ("".join(_STRFTIME.get(token, token) for token in _PATTERN.findall(pattern)),)
    return ()


def is_generated(column: pa.Field) -> bool:
    """Return True if the table computes a column."""
    return _EXPRESSION in (column.metadata or {})


def list_generated_columns(columns: pa.Schema) -> Iterator[GeneratedColumn]:
    """Yield the columns that a table computes.

    :param columns: the table's columns, with Delta's properties as metadata.
    :raises ValueError: an expression is not understood.
    """
    return (GeneratedColumn.parse(column, columns) for column in columns if is_generated(column))
