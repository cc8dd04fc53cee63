"""Data files of a Delta table: writing them in a Spark task, their statistics, and reading those that may hold a key.

Also columns that have another name in the files (column mapping), and columns that the table computes.
"""

from __future__ import annotations

import datetime as dt
import json
import re
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from airflow_kafka_spark.sinks.base import Rows
from airflow_kafka_spark.sinks.delta.log import DataFile
from airflow_kafka_spark.sinks.lake.tasks.rewrite import READ_PARQUET, TableFile, Upsert, group_small_files
from airflow_kafka_spark.sinks.storage.store import LONGEST_NAME, TableStore, make_partition_directory
from airflow_kafka_spark.sinks.storage.tasks.write import (
    PartitionKey,
    StoreFile,
    StoreSplitWriter,
    StoreTarget,
    format_partition_values,
    read_footer,
)
from airflow_kafka_spark.windows.times import MICROSECONDS_OF_DAY

if TYPE_CHECKING:
    import pyarrow.dataset
    from deltalake import DeltaTable


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


@dataclass(frozen=True, kw_only=True)
class DeltaTarget(StoreTarget):
    """The part of an attempt that tasks need. Files leave out the columns that partition the table.

    :param partition_columns: these columns.
    :param partition_fields: their names in Delta's log.
    :param statistics: the columns that have statistics, by their names in the files.
    :param mapped: the files' columns by the names that they have in the files; None if these are the columns' own names.
    :param generated: columns that are computed from those of the rows.
    """

    partition_columns: tuple[str, ...] = ()
    partition_fields: tuple[str, ...] = ()
    statistics: frozenset[str] = field(default_factory=frozenset)
    mapped: pa.Schema | None = None
    generated: tuple[GeneratedColumn, ...] = ()

    @property
    def written_schema(self) -> pa.Schema:
        """The files' columns by the names that they have in the files."""
        return self.mapped if self.mapped is not None else self.file_schema

    @property
    def partition_by(self) -> tuple[str, ...]:
        """The columns that partition the table."""
        return self.partition_columns


class DeltaDataFile(StoreFile):
    """A data file that knows which of its columns hold a NaN."""

    def __init__(self, target: DeltaTarget, path: str) -> None:
        self.nan: set[str] = set()
        self.mapped = target.mapped
        super().__init__(target, path)

    def add(self, batch: pa.RecordBatch) -> None:
        batch = batch if self.mapped is None else rename_columns(batch, self.mapped)
        super().add(batch)
        self.nan |= find_columns_with_nan(batch)


class DeltaSplitWriter(StoreSplitWriter[DeltaDataFile]):
    """Writes one split into data files of a Delta table."""

    target: DeltaTarget

    def open_new_file(self, path: str) -> DeltaDataFile:
        return DeltaDataFile(self.target, path)

    def _with_origin(self, rows: Rows) -> Rows:
        """Return rows with the columns of their origin, and those that the table computes."""
        rows = super()._with_origin(rows)
        names, columns = list(rows.batch.schema.names), list(rows.batch.columns)
        for column in self.target.generated:
            # Rows of files that are rewritten have it.
            if column.field.name not in names:
                columns.append(column.compute(rows.batch))
                names.append(column.field.name)
        return replace(rows, batch=pa.RecordBatch.from_arrays(columns, names=names))

    def describe(self, file: DeltaDataFile, key: PartitionKey) -> Mapping[str, Any]:
        """Return partition values and Delta's statistics."""
        statistics = collect_file_statistics(read_footer(file), self.target.written_schema, self.target.statistics, file.nan)
        partition = dict(zip(self.target.partition_fields, key, strict=True))
        return {"partition": partition, "stats": json.dumps(statistics, ensure_ascii=False)}

    def list_directories(self, key: PartitionKey) -> Sequence[str]:
        """Return a directory for each partition value, as Spark has them, because polars reads values from their names. All
        other readers take them from the log, so that a file has none if a value would be too long for a name, or if a column
        would have another name there.
        """
        if self.target.mapped is not None:
            return ()
        columns = self.target.partition_by
        # deltalake escapes `~` in one place and not in another.
        found = [make_partition_directory(name, value).replace("~", "%7E") for name, value in zip(columns, key, strict=True)]
        pairs = zip(columns, found, strict=True)
        return found if all(d.startswith(f"{name}=") and len(d.encode()) <= LONGEST_NAME for name, d in pairs) else ()

    def name_partitions(self, column: str, values: pa.Array) -> tuple[Sequence[str | None], np.ndarray]:
        """Return the values of a partition column as Delta's log has them. Delta takes an empty text for a null."""
        encoded = values.dictionary_encode(null_encoding="encode")
        names = [value or None for value in format_partition_values(encoded.dictionary)]
        return names, encoded.indices.to_numpy(zero_copy_only=False)


# --- statistics, from the footers of files ----------------------------------------------------------------------------

# Readers skip files by them, so an uncertain bound is left out, or widened.

LONGEST_TEXT = 32
"""Characters of a text that are kept, as Spark does."""
_EXACT_DIGITS = 15
"""Digits of a decimal that readers keep if they read a bound as a floating point number."""
_LAST_CHARACTER = "\U0010ffff"


def collect_file_statistics(
    footer: pyarrow.parquet.FileMetaData, schema: pa.Schema, columns: Set[str], unbounded: Set[str]
) -> dict[str, Any]:
    """Return ``numRecords``, ``minValues``, ``maxValues`` and ``nullCount`` of a file.

    :param footer: the file's footer.
    :param schema: the file's columns.
    :param columns: the columns that have statistics.
    :param unbounded: columns that hold a NaN, which Parquet's bounds leave out and which is greater than all other numbers.
    """
    lows: dict[str, Any] = {}
    highs: dict[str, Any] = {}
    nulls: dict[str, Any] = {}
    paths = [footer.schema.column(index).path for index in range(footer.num_columns)]
    for index, dotted in enumerate(paths):
        path = dotted.split(".")
        kind = _find_leaf_type(schema, path)
        # A column `a.b` and the member `b` of a column `a` have the same path.
        if kind is None or path[0] not in columns or paths.count(dotted) > 1:
            continue
        chunks = [footer.row_group(group).column(index) for group in range(footer.num_row_groups)]
        found = [chunk.statistics for chunk in chunks if chunk.num_values]
        if any(one is None or not one.has_null_count for one in found):
            continue
        _put(nulls, path, sum(one.null_count for one in found))
        filled = [one for one, chunk in zip(found, (c for c in chunks if c.num_values), strict=True) if one.num_values]
        if not filled or not all(one.has_min_max for one in filled) or path[0] in unbounded:
            continue
        low, high = _format_bounds(kind, filled)
        if low is not None and high is not None:
            _put(lows, path, low)
            _put(highs, path, high)
    return {"numRecords": footer.num_rows, "minValues": lows, "maxValues": highs, "nullCount": nulls}


def find_columns_with_nan(batch: pa.RecordBatch) -> set[str]:
    """Return the columns of floating point numbers, at any depth, that hold a NaN or are nested."""
    found = set()
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_floating(column.type):
            if pc.any(pc.is_nan(column)).as_py():
                found.add(name)
        elif "float" in str(column.type) or "double" in str(column.type):
            found.add(name)
    return found


def _find_leaf_type(schema: pa.Schema, path: list[str]) -> pa.DataType | None:
    """Return the type of a column that is not within a list or a map, else None."""
    index = schema.get_field_index(path[0])
    if index < 0:
        return None
    kind = schema.field(index).type
    for name in path[1:]:
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(kind.get_field_index(name)).type
    return None if pa.types.is_nested(kind) else kind


def _put(into: dict[str, Any], path: list[str], value: object) -> None:
    for name in path[:-1]:
        into = into.setdefault(name, {})
    into[path[-1]] = value


Statistic: TypeAlias = str | int | float | None
"""A minimum or maximum of a column, as the log writes it in JSON. It is None if the column has no such bound."""


def _format_bounds(kind: pa.DataType, found: Iterable[Any]) -> tuple[Statistic, Statistic]:
    """Return the bounds of a column as values of JSON; None for an uncertain bound."""
    if pa.types.is_binary(kind) or pa.types.is_boolean(kind) or pa.types.is_large_binary(kind):
        return None, None
    if pa.types.is_decimal(kind) and kind.precision > _EXACT_DIGITS:
        return None, None
    try:
        low, high = min(one.min for one in found), max(one.max for one in found)
    except (OverflowError, ValueError, TypeError):  # an instant outside of Python's years
        return None, None
    return _format_lower_bound(low), _format_upper_bound(high)


def _format_lower_bound(value: object) -> Statistic:
    if isinstance(value, str):
        return value[:LONGEST_TEXT]
    if isinstance(value, dt.datetime):
        return _format_instant(value - dt.timedelta(microseconds=value.microsecond % 1000))
    return _format_plain(value)


def _format_upper_bound(value: object) -> Statistic:
    if isinstance(value, str):
        if len(value) <= LONGEST_TEXT:
            return value
        return None if value[LONGEST_TEXT] == _LAST_CHARACTER else value[:LONGEST_TEXT] + _LAST_CHARACTER
    if isinstance(value, dt.datetime):
        over = value.microsecond % 1000
        try:
            return _format_instant(value + dt.timedelta(microseconds=1000 - over if over else 0))
        except OverflowError:
            return None
    return _format_plain(value)


def _format_instant(value: dt.datetime) -> str:
    text = value.replace(tzinfo=None).isoformat(timespec="milliseconds")
    return text + "Z" if value.tzinfo else text


def _format_plain(value: object) -> Statistic:
    if isinstance(value, dt.date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return float(value) if value % 1 else int(value)
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return None  # JSON has no such number
    return value if isinstance(value, (int, float)) else None


def list_skipping_columns(schema: pa.Schema, configuration: Mapping[str, str]) -> frozenset[str]:
    """Return the columns that have statistics by the table's properties; the first 32 by default.

    :param schema: the table's columns without those it is partitioned by.
    :param configuration: the table's properties.
    """
    if named := configuration.get("delta.dataSkippingStatsColumns"):
        return frozenset(name.strip().strip("`").partition(".")[0] for name in named.split(","))
    try:
        count = int(configuration.get("delta.dataSkippingNumIndexedCols", 32))
    except ValueError:
        count = 32
    return frozenset(schema.names if count < 0 else schema.names[:count])


# --- reading, for upserts ---------------------------------------------------------------------------------------------


class DeltaFile(TableFile):
    """A data file of a Delta table.

    :param fragment: the file, as Arrow reads it.
    :param schema: the table's columns.
    :param written: these columns by the names that they have in the files.
    :param file: the file, as a commit removes it.
    """

    def __init__(self, fragment: pyarrow.dataset.Fragment, schema: pa.Schema, written: pa.Schema, file: DataFile) -> None:
        self.identity = (file.path,)
        self.fragment, self.schema, self.written, self.file = fragment, schema, written, file

    def read_batches(self, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        wanted = list(columns) if columns is not None else self.schema.names
        names = [self.written.field(self.schema.get_field_index(name)).name for name in wanted]
        schema = pa.schema([self.schema.field(name) for name in wanted])
        for batch in self.fragment.to_batches(schema=self.written, columns=names, batch_readahead=4):
            yield rename_columns(batch, schema)


def names_other_tables(actions: pa.Table) -> bool:
    """Return True if a table has files by their full URIs, as a shallow clone has those of another table.

    :param actions: the table's files, as deltalake returns them.
    """
    return bool(pc.any(pc.match_substring_regex(actions.column("path"), "^([A-Za-z][A-Za-z0-9+.-]*:)?/")).as_py())


def list_table_files(store: TableStore, table: DeltaTable, upsert: Upsert | None) -> tuple[list[DeltaFile], pa.Schema]:
    """Return the files of a table that may hold a key of an upsert, by their partition values and statistics, and its columns.

    Not by deltalake's `to_pyarrow_dataset`, which cannot read negative decimals as partition values.

    :param store: the table's files.
    :param upsert: the upsert; None: all files are returned.
    :raises OSError: others have given the table deletion vectors since it was validated, so that its files have deleted rows; or
        it names files of another table.
    """
    from pyarrow.dataset import ParquetFileFormat

    if "deletionVectors" in (table.protocol().reader_features or ()):
        raise OSError("the table has deletion vectors, which are not supported")
    schema = pa.schema(table.schema().to_arrow())
    written = make_written_schema(schema, schema)
    parquet = ParquetFileFormat(**READ_PARQUET)
    actions = pa.table(table.get_add_actions(flatten=True))
    if names_other_tables(actions):
        raise OSError("the table names files of another table (a shallow clone)")
    columns = {name: actions.column(f"partition.{name}").combine_chunks() for name in table.metadata().partition_columns}
    texts = {name: format_partition_values(column) for name, column in columns.items()}
    paths, sizes, rows = (actions.column(name).to_pylist() for name in ("path", "size_bytes", "num_records"))
    files = []
    physical = {field.name: find_physical_name(field) for field in schema}
    wanted = np.ones(actions.num_rows, bool) if upsert is None else _find_candidates(actions, upsert, physical)
    for at in map(int, np.flatnonzero(wanted)):
        # Without the escapes that Delta's log has in paths.
        path = urllib.parse.unquote(paths[at])
        within = pc.scalar(True)
        for name, column in columns.items():
            of_file = pc.field(physical[name])
            within &= of_file == column[at].cast(schema.field(name).type) if column[at].is_valid else of_file.is_null()
        fragment = parquet.make_fragment(store.make_full_path(path), store.filesystem, within)
        file = DataFile(path, sizes[at], rows[at] or 0, {physical[name]: of_table[at] for name, of_table in texts.items()})
        files.append(DeltaFile(fragment, schema, written, file))
    return files, schema


_TARGET_SIZE = re.compile(r"(\d+)\s*([kmgt]?)b?", re.IGNORECASE)
_DEFAULT_SIZE = 100 << 20
"""The form of ``delta.targetFileSize``, and its default in bytes."""


def list_small_files(store: TableStore, table: DeltaTable) -> tuple[list[list[DeltaFile]], pa.Schema]:
    """Return groups of small files of one partition, none larger than ``delta.targetFileSize`` together, and the table's columns.

    :param store: the table's files.
    """
    found = _TARGET_SIZE.fullmatch(table.metadata().configuration.get("delta.targetFileSize", "").strip())
    target = int(found[1]) << (10 * " kmgt".index(found[2].lower() or " ")) if found else _DEFAULT_SIZE
    files, schema = list_table_files(store, table, None)
    groups = group_small_files(files, lambda file: tuple(file.file.partition.items()), lambda file: file.file.bytes, target)
    return list(groups), schema


def _find_candidates(actions: pa.Table, upsert: Upsert, physical: Mapping[str, str]) -> np.ndarray:
    """Return the files that may hold a key, files without a bound or with an inexact bound included.

    deltalake's own filter ignores files that have no bound for a column which has a bound in other files.

    :param physical: the names that the table's columns have in files and statistics.
    """
    found = np.ones(actions.num_rows, bool)
    for name in upsert.key:
        low, high = upsert.find_bounds(name)
        for prefix, compare, wanted in (
            ("max", pc.greater_equal, low),
            ("min", pc.less_equal, high),
            ("partition", pc.greater_equal, low),
            ("partition", pc.less_equal, high),
        ):
            column = f"{prefix}.{name if prefix == 'partition' else physical[name]}"
            if column not in actions.schema.names:
                continue
            bound = actions.column(column)
            if pa.types.is_integer(bound.type) or pa.types.is_string(bound.type) or pa.types.is_date(bound.type):
                inside = compare(bound, pa.scalar(wanted, bound.type))
                found &= np.asarray(pc.fill_null(inside, True), bool)
    return found
