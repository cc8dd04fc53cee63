"""Reading splits of Parquet files of a file system as Arrow.

Runs on executors: imports neither Airflow nor pyspark. A row group belongs to the slice of its file that has the group's middle
byte, as in Spark's reader (parquet-java's ``filterFileMetaDataByMidpoint``), so that both read the same rows of a split.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from airflow_kafka_spark.errors import SourceRejected, SourceUnavailable, SparkReadRequired
from airflow_kafka_spark.formats.base import Kind
from airflow_kafka_spark.formats.tasks.text import format_plain_decimals
from airflow_kafka_spark.formats.types import MAX_PRECISION
from airflow_kafka_spark.sources.base import SplitReader
from airflow_kafka_spark.sources.files.partitions import PartitionColumns, PartitionValue
from airflow_kafka_spark.sources.files.splits import FileSlice, FileSplit
from airflow_kafka_spark.sources.files.store import REPLACE_DAMAGED, ListedFile
from airflow_kafka_spark.windows.times import MICROSECONDS_OF_DAY

BATCH_ROWS = 20_000
"""Number of rows that are decoded at once."""

_FIRST_DAY = -141_427
"""1582-10-15, the first day that old writers of Hive and Spark 2 write as Spark does now."""
_FIRST_MOMENT = -25_567 * MICROSECONDS_OF_DAY
"""1900-01-01, for timestamps: time zones had odd offsets before."""

_TYPES: dict[Kind, pa.DataType] = {
    "integer": pa.int64(),
    "boolean": pa.bool_(),
    "text": pa.string(),
    "zoned": pa.timestamp("us", "UTC"),
    "local": pa.timestamp("us"),
    "date": pa.date32(),
}
_PLAIN: dict[str, Kind] = {
    **dict.fromkeys(("INT32", "INT64"), "integer"), **dict.fromkeys(("FLOAT", "DOUBLE"), "other"),
    "BOOLEAN": "boolean", "INT96": "zoned",
}  # fmt: skip
_ANNOTATED: dict[str, Kind] = {"STRING": "text", "DATE": "date"}
_LEGACY = (b"org.apache.spark.legacyDateTime", b"org.apache.spark.legacyINT96")
_SPARK_VERSION = b"org.apache.spark.version"


def find_column_kinds(file: pq.ParquetFile, names: Sequence[str] | None) -> tuple[tuple[str, Kind], ...] | str:
    """Return names and kinds of a file's columns, or a clause with the reason why only Spark can read them.

    :param names: the needed columns; None for all.
    """
    known = file.metadata.metadata or {}
    if any(name in known for name in _LEGACY) or known.get(_SPARK_VERSION, b"3").split(b".")[0] in (b"1", b"2"):
        return "its files have dates of an old calendar"
    found: dict[str, Kind] = {}
    for column in map(file.schema.column, range(len(file.schema))):
        if names is not None and column.path.partition(".")[0] not in names:
            continue
        kind = _find_kind(column) if "." not in column.path and not column.max_repetition_level else None
        if kind is None:
            described = column.physical_type if column.logical_type.type == "NONE" else column.logical_type
            return f"column `{column.path}` is {described}"
        found[column.name] = kind
    # An unknown column is an error of Spark's, which says so.
    missing = [name for name in names or () if name not in found]
    return f"it finds no column `{missing[0]}`" if missing else tuple((name, found[name]) for name in names or found)


def _find_kind(column: pq.ColumnSchema) -> Kind | None:
    """Return the kind of a column that is not nested; None if Spark's settings decide about its type, or Arrow has another."""
    logical, physical = column.logical_type.type, column.physical_type
    details = json.loads(column.logical_type.to_json())
    if logical == "NONE":
        return _PLAIN.get(physical)
    if logical == "INT":
        return "integer" if details["isSigned"] or details["bitWidth"] < 64 else None
    if logical == "DECIMAL" and column.precision <= MAX_PRECISION:
        return "decimal" if column.scale <= 6 else "fine decimal"
    if logical == "TIMESTAMP" and details["timeUnit"] in ("milliseconds", "microseconds"):
        return "zoned" if details["isAdjustedToUTC"] else "local"
    return _ANNOTATED.get(logical)


@dataclass(frozen=True)
class ParquetSplitReader(SplitReader):
    """Reads splits of Parquet files.

    :param source: the source's URI, for messages.
    :param directory: the directory of the files.
    :param columns: names and kinds of the columns.
    :param splits: the splits.
    :param partitions: the columns that directories give; default none.
    """

    source: str
    directory: str
    columns: tuple[tuple[str, Kind], ...]
    splits: tuple[FileSplit, ...]
    partitions: PartitionColumns = PartitionColumns()

    def read(self, split: int) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a split.

        :raises SparkReadRequired: a file or a value can be read by Spark only.
        :raises SourceRejected: a file is gone, has changed or is damaged.
        :raises SourceUnavailable: a file cannot be opened.
        """
        given = dict(self.partitions.kinds)
        wanted = tuple(column for column in self.columns if column[0] not in given)
        names = [name for name, _ in wanted]
        for part in self.splits[split]:
            values = dict(zip(given, self.partitions.parse(part.file.name), strict=True)) if given else {}
            with self._open(part) as file:
                if (kinds := find_column_kinds(file, names)) != wanted:
                    reason = kinds if isinstance(kinds, str) else "its columns have other types than those of other files"
                    raise SparkReadRequired(self.source, f"`{part.file.name}`: {reason}")
                groups = [at for at in range(file.num_row_groups) if _is_within(file.metadata.row_group(at), part)]
                # One thread: Spark runs one task on each core.
                for batch in file.iter_batches(BATCH_ROWS, groups, columns=names, use_threads=False) if groups else ():
                    yield self._convert(batch, part.file.name, values)

    @contextmanager
    def _open(self, part: FileSlice) -> Iterator[pq.ParquetFile]:
        name = part.file.name
        try:
            with open(os.path.join(self.directory, name), "rb") as opened:
                if ListedFile.of(name, os.fstat(opened.fileno())) != part.file:
                    detail = f"`{name}` changed while the window was read"
                    raise SourceRejected(self.source, detail, "Put the file back as it was, with its modification time")
                with pq.ParquetFile(opened, coerce_int96_timestamp_unit="us") as file:
                    yield file
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, FileNotFoundError):
                detail = f"`{name}` is gone, or Spark's machine {platform.node()} has not mounted the directory"
                raise SourceRejected(self.source, detail, "Put it back, or mount the directory") from error
            if isinstance(error, OSError) and error.errno is not None:
                raise SourceUnavailable(self.source, f"reading `{name}`", str(error)) from error
            detail = " ".join(str(error).split())
            raise SourceRejected(self.source, f"`{name}` cannot be read: {detail}", REPLACE_DAMAGED) from error

    def _convert(self, batch: pa.RecordBatch, file: str, values: Mapping[str, PartitionValue]) -> pa.RecordBatch:
        """Return the columns as their kinds have them.

        :param values: of the columns that directories give.
        :raises SparkReadRequired: a text is not UTF-8, or a date is in the old calendar.
        """
        arrays = []
        for name, kind in self.columns:
            if name in values:
                arrays.append(pa.repeat(pa.scalar(values[name], _TYPES[kind]), batch.num_rows))
                continue
            try:
                column = _convert_column(batch.column(name), kind)
            except pa.ArrowInvalid as error:
                raise SparkReadRequired(self.source, f"column `{name}` of `{file}`: {error}") from None
            if kind in ("date", "zoned", "local") and _is_old(column, kind):
                raise SparkReadRequired(self.source, f"column `{name}` of `{file}` has dates of an old calendar")
            arrays.append(column)
        return pa.RecordBatch.from_arrays(arrays, [name for name, _ in self.columns])


def _convert_column(column: pa.Array, kind: Kind) -> pa.Array:
    """Return the values in the type of their kind.

    :raises pyarrow.ArrowInvalid: a text is not UTF-8, or a timestamp does not fit microseconds.
    """
    if kind in ("decimal", "fine decimal"):
        return format_plain_decimals(column)
    wanted = _TYPES.get(kind, column.type)
    if column.type == pa.timestamp("us"):
        column = column.view(wanted)  # an INT96 is in UTC, which its type does not say
    elif column.type != wanted:
        column = column.cast(wanted)
    if kind == "text":
        column.validate(full=True)
    return column


def _is_old(column: pa.Array, kind: Kind) -> bool:
    """Return True if a value is before the days for which all writers agree."""
    first = pc.min(column.cast(pa.int32()) if kind == "date" else column.cast(pa.int64())).as_py()
    return first is not None and first < (_FIRST_DAY if kind == "date" else _FIRST_MOMENT)


def _is_within(group: pq.RowGroupMetaData, part: FileSlice) -> bool:
    """Return True if the middle byte of a row group lies in the slice of its file."""
    columns = [group.column(at) for at in range(group.num_columns)]
    first = columns[0]
    start = first.data_page_offset
    if first.has_dictionary_page and first.dictionary_page_offset is not None:
        start = min(start, first.dictionary_page_offset)
    middle = start + sum(column.total_compressed_size for column in columns) // 2
    return bool(part.start <= middle < part.start + part.length)
