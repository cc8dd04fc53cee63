"""Data files of an Iceberg table: writing them in a Spark task, and their metadata.

Tasks do not import pyiceberg: that takes longer than writing a small window. The driver translates the table's types, partitions
and sort order for them (``table_files.py``).
"""

from __future__ import annotations

import datetime as dt
import decimal
import re
import struct
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet

from airflow_kafka_spark.sinks.storage.tasks.write import PartitionKey, StoreFile, StoreSplitWriter, StoreTarget, read_footer
from airflow_kafka_spark.windows.times import MICROSECONDS_OF_DAY


@dataclass(frozen=True)
class TransformedColumn:
    """A column of the table and a transform of its values: a partition field, or a part of the sort order.

    :param source_id: the column's id.
    :param transform: the transform as Iceberg's metadata has it, for instance ``bucket[16]``.
    :param descending: of a sort order: greater values first.
    :param nulls_first: of a sort order: nulls before all values.
    """

    source_id: int
    transform: str
    descending: bool = False
    nulls_first: bool = False


@dataclass(frozen=True)
class ColumnMetrics:
    """The metadata that a file has for a column that is no structure.

    :param field_id: the column's id.
    :param kind: its type as Iceberg's metadata has it, without precision or length.
    :param scale: decimal places of a decimal.
    :param counts: True if its values and nulls are counted.
    :param bounds: True if there are a lower and an upper bound.
    :param length: the characters of a text, or the bytes of a binary, that a bound keeps; None for all.
    """

    field_id: int
    kind: str
    scale: int = 0
    counts: bool = True
    bounds: bool = True
    length: int | None = None


@dataclass(frozen=True, kw_only=True)
class IcebergTarget(StoreTarget):
    """The part of an attempt that tasks need. The columns of the files have the table's ids.

    :param names: the files' columns by their ids.
    :param partitions: the fields of the table's partition spec.
    :param order: the fields of the table's sort order; none if it is not sorted.
    :param order_id: the id of the sort order.
    :param metrics: the metadata of each column by its path in Parquet's schema.
    """

    names: Mapping[int, str]
    partitions: tuple[TransformedColumn, ...] = ()
    order: tuple[TransformedColumn, ...] = ()
    order_id: int = 0
    metrics: Mapping[str, ColumnMetrics] = field(default_factory=dict, repr=False)

    @property
    def partition_by(self) -> tuple[str, ...]:
        """A name for each partition field, which no column has."""
        return tuple(f"\0{number}" for number in range(len(self.partitions)))

    def compute_values(self, batch: pa.RecordBatch | pa.Table, wanted: TransformedColumn) -> pa.Array:
        """Return the result of a transform of a column; nulls if the rows do not have it."""
        name = self.names.get(wanted.source_id)
        if name is None:
            return pa.nulls(batch.num_rows, pa.int32())
        column = batch.column(name)
        column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        return apply_transform(column, wanted.transform)


class IcebergDataFile(StoreFile):
    """A data file of the table. The rows of each of its row groups are sorted as the table is."""

    target: IcebergTarget

    def __init__(self, target: IcebergTarget, path: str) -> None:
        self.target = target
        self.groups = 0
        super().__init__(target, path)

    def write(self) -> None:
        if self.waiting:
            self.groups += 1
            if self.target.order:
                self.waiting = _sort_rows(pa.Table.from_batches(self.waiting, self.schema), self.target).to_batches()
        super().write()

    @property
    def sort_order(self) -> int | None:
        """The id of the sort order that the file keeps from beginning to end."""
        return self.target.order_id if self.groups == 1 and self.target.order else None


def _sort_rows(table: pa.Table, target: IcebergTarget) -> pa.Table:
    """Return rows in the table's sort order; equal ones stay in offset order."""
    keys: dict[str, pa.Array] = {}
    order: list[tuple[str, str]] = []
    for number, wanted in enumerate(target.order):
        values = target.compute_values(table, wanted)
        keys[f"null {number}"], keys[f"value {number}"] = values.is_null(), values
        order += [
            (f"null {number}", "descending" if wanted.nulls_first else "ascending"),
            (f"value {number}", "descending" if wanted.descending else "ascending"),
        ]
    keys["row"] = pa.array(np.arange(table.num_rows))
    return table.take(pc.sort_indices(pa.table(keys), sort_keys=[*order, ("row", "ascending")]))


class IcebergSplitWriter(StoreSplitWriter[IcebergDataFile]):
    """Writes one split into data files of an Iceberg table."""

    target: IcebergTarget

    def open_new_file(self, path: str) -> IcebergDataFile:
        return IcebergDataFile(self.target, path)

    def describe(self, file: IcebergDataFile, key: PartitionKey) -> Mapping[str, Any]:
        """Return partition values, sort order and statistics."""
        statistics = collect_file_statistics(read_footer(file), self.target.metrics)
        return {"partition": partition_to_json(key), "sort_order": file.sort_order, "statistics": statistics}

    def _group_rows(
        self, batch: pa.RecordBatch, stored: pa.RecordBatch, offsets: pa.Array
    ) -> Iterator[tuple[PartitionKey, pa.RecordBatch]]:
        values = [self.target.compute_values(stored, wanted) for wanted in self.target.partitions]
        if values:
            batch = pa.RecordBatch.from_arrays(values, names=list(self.target.partition_by))
        return super()._group_rows(batch, stored, offsets)

    def name_partitions(self, column: str, values: pa.Array) -> tuple[Sequence[Any], np.ndarray]:
        """Return the partition values in the form of Iceberg's metadata."""
        encoded = values.dictionary_encode(null_encoding="encode")
        return encoded.dictionary.to_pylist(), encoded.indices.to_numpy(zero_copy_only=False)


# --- metadata of files, as JSON ---------------------------------------------------------------------------------------

COUNTS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts")
BOUNDS = ("lower_bounds", "upper_bounds")
_NUMBERS = {"boolean": "?", "int": "<i", "long": "<q", "float": "<f", "double": "<d"}
_EXACT = decimal.Context(prec=76)
_EPOCH = dt.datetime(1970, 1, 1)
_MICROSECOND = dt.timedelta(microseconds=1)


def collect_file_statistics(footer: pyarrow.parquet.FileMetaData, metrics: Mapping[str, ColumnMetrics]) -> dict[str, Any]:
    """Return counts and bounds of a file's columns, as values of JSON: column ids are texts, and bounds are hexadecimal.

    :param footer: the file's footer.
    :param metrics: the metadata that each column has, by its path in Parquet's schema.
    """
    found: dict[str, dict[str, Any]] = {name: {} for name in (*COUNTS, *BOUNDS)}
    groups = [footer.row_group(number) for number in range(footer.num_row_groups)]
    for at in range(footer.num_columns):
        wanted = metrics[footer.schema.column(at).path]
        chunks, key = [group.column(at) for group in groups], str(wanted.field_id)
        found["column_sizes"][key] = sum(chunk.total_compressed_size for chunk in chunks)
        if not wanted.counts:
            continue
        found["value_counts"][key] = sum(chunk.num_values for chunk in chunks)
        statistics = [chunk.statistics for chunk in chunks]
        if any(one is None or not one.has_null_count for one in statistics):
            continue
        found["null_value_counts"][key] = sum(one.null_count for one in statistics)
        filled = [one for one in statistics if one.num_values]
        # A row group without a bound (a long text, a NaN in each row) may hold any value.
        if not wanted.bounds or not filled or not all(one.has_min_max for one in filled):
            continue
        try:
            low = _encode_bound(wanted, min(one.min for one in filled), above=False)
            high = _encode_bound(wanted, max(one.max for one in filled), above=True)
        except (OverflowError, ValueError):  # an instant outside of Python's years
            continue
        if low is not None and high is not None:
            found["lower_bounds"][key], found["upper_bounds"][key] = low.hex(), high.hex()
    return {**found, "split_offsets": sorted(_begin_of(group.column(0)) for group in groups)}


def _encode_bound(column: ColumnMetrics, value: Any, above: bool) -> bytes | None:
    """Return a bound in the form of Iceberg's metadata; None if no bound has the wanted length.

    :param above: True for an upper bound.
    """
    if isinstance(value, (str, bytes)):
        kept = value[: column.length]
        if above and len(kept) < len(value):
            return _find_next_text(kept) if isinstance(kept, str) else _find_next_bytes(kept)
        return kept.encode() if isinstance(kept, str) else kept
    if isinstance(value, uuid.UUID):
        return value.bytes
    if column.kind == "decimal":
        return _encode_signed(value if isinstance(value, int) else compute_unscaled(value, column.scale))
    if isinstance(value, dt.datetime):
        return struct.pack("<q", (value.replace(tzinfo=None) - _EPOCH) // _MICROSECOND)
    if isinstance(value, dt.date):
        return struct.pack("<i", value.toordinal() - _EPOCH.toordinal())
    if isinstance(value, dt.time):
        return struct.pack("<q", ((value.hour * 60 + value.minute) * 60 + value.second) * 1_000_000 + value.microsecond)
    return struct.pack(_NUMBERS[column.kind], value)


def _find_next_text(text: str) -> bytes | None:
    """Return the lowest text of at most this length that is greater than every text with the same beginning; None without one."""
    for end in range(len(text), 0, -1):
        code = ord(text[end - 1]) + 1
        if code < 0x110000:
            # Surrogates are no characters.
            return (text[: end - 1] + chr(0xE000 if 0xD800 <= code < 0xE000 else code)).encode()
    return None


def _find_next_bytes(value: bytes) -> bytes | None:
    short = value.rstrip(b"\xff")
    return short[:-1] + bytes([short[-1] + 1]) if short else None


def compute_unscaled(value: Decimal, scale: int) -> int:
    """Return the unscaled value of a decimal."""
    return int(value.scaleb(scale, _EXACT))


def _encode_signed(value: int) -> bytes:
    """Return a number in the fewest bytes of two's complement."""
    return value.to_bytes((~value if value < 0 else value).bit_length() // 8 + 1, "big", signed=True)


def _begin_of(chunk: pyarrow.parquet.ColumnChunkMetaData) -> int:
    if chunk.has_dictionary_page and chunk.dictionary_page_offset < chunk.data_page_offset:
        return int(chunk.dictionary_page_offset)
    return int(chunk.data_page_offset)


def partition_to_json(values: Sequence[Any]) -> list[Any]:
    """Return partition values as values of JSON."""
    return [{"decimal": str(v)} if isinstance(v, Decimal) else {"bytes": v.hex()} if isinstance(v, bytes) else v for v in values]


# --- partition and sort transforms over Arrow arrays ------------------------------------------------------------------

# pyiceberg computes them for one value at a time, or by an extension in Rust that is not installed with it.
# The tests compare each with pyiceberg's.

_HOUR = 3_600_000_000


def apply_transform(values: pa.Array, transform: str) -> pa.Array:
    """Return the result of a transform for each value: dates and instants as numbers, as Iceberg's metadata has them.

    :param values: a column of the rows, in the type that files have.
    :param transform: the transform as Iceberg's metadata has it.
    :raises ValueError: the transform is not known.
    """
    plain = _to_numbers(values)
    parts = re.fullmatch(r"(\w+)(?:\[(\d+)\])?", transform)
    name, number = (parts[1], int(parts[2] or 0)) if parts else ("", 0)
    if name == "identity":
        return plain
    if name == "void":
        return pa.nulls(len(values), pa.int32())
    if name in ("year", "month", "day", "hour"):
        return _convert_time(plain, name, pa.types.is_date(values.type))
    if name not in ("truncate", "bucket") or not number:
        raise ValueError(f"the transform `{transform}` is not known")
    if pa.types.is_integer(plain.type):
        numbers = pc.fill_null(plain, 0).to_numpy(zero_copy_only=False)
        if name == "bucket":
            return _mask_nulls(((_compute_murmur3(numbers) & 0x7FFFFFFF) % number).astype(np.int32), plain)
        with np.errstate(over="ignore"):
            return _mask_nulls(numbers - numbers % numbers.dtype.type(number), plain)
    encoded = plain.dictionary_encode()
    compute = _compute_bucket if name == "bucket" else _truncate
    scale = plain.type.scale if pa.types.is_decimal(plain.type) else 0
    found = [None if value is None else compute(value, number, scale) for value in encoded.dictionary.to_pylist()]
    return pa.array(found, pa.int32() if name == "bucket" else plain.type).take(encoded.indices)


def _compute_bucket(value: Any, count: int, scale: int) -> int:
    import mmh3

    if isinstance(value, Decimal):
        value = _encode_signed(compute_unscaled(value, scale))
    return (mmh3.hash(value) & 0x7FFFFFFF) % count


def _truncate(value: Any, width: int, scale: int) -> Any:
    if isinstance(value, Decimal):
        number = compute_unscaled(value, scale)
        return Decimal(number - number % width).scaleb(-scale, _EXACT)
    return value[:width]


def _to_numbers(values: pa.Array) -> pa.Array:
    """Return dates and times as numbers, UUIDs as their bytes, and other values unchanged."""
    if isinstance(values.type, pa.BaseExtensionType):
        return values.storage
    if pa.types.is_date32(values.type):
        return values.cast(pa.int32())
    return values.cast(pa.int64()) if pa.types.is_timestamp(values.type) or pa.types.is_time64(values.type) else values


def _convert_time(plain: pa.Array, unit: str, is_date: bool) -> pa.Array:
    numbers = pc.fill_null(plain, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    if unit == "hour":
        return _mask_nulls((numbers // _HOUR).astype(np.int32), plain)
    days = numbers if is_date else numbers // MICROSECONDS_OF_DAY
    if unit == "day":
        return _mask_nulls(days.astype(np.int32), plain)
    return _mask_nulls(days.astype("datetime64[D]").astype(f"datetime64[{unit[0].upper()}]").astype(np.int32), plain)


def _mask_nulls(numbers: np.ndarray, like: pa.Array) -> pa.Array:
    """Return numbers, null where ``like`` is."""
    return pa.array(numbers, mask=like.is_null().to_numpy(zero_copy_only=False))


def _compute_murmur3(longs: np.ndarray) -> np.ndarray:
    """Return the 32 bit Murmur3 hash of each number's eight bytes."""

    def rotate(words: np.ndarray, by: int) -> np.ndarray:
        return (words << np.uint32(by)) | (words >> np.uint32(32 - by))

    bits = longs.astype(np.int64).view(np.uint64)
    found = np.zeros(len(bits), np.uint32)
    with np.errstate(over="ignore"):
        for words in ((bits & np.uint64(0xFFFFFFFF)).astype(np.uint32), (bits >> np.uint64(32)).astype(np.uint32)):
            found ^= rotate(words * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
            found = rotate(found, 13) * np.uint32(5) + np.uint32(0xE6546B64)
        found ^= np.uint32(8)
        found = (found ^ (found >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        found = (found ^ (found >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return found ^ (found >> np.uint32(16))
