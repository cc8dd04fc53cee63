"""A table that the task reads in Arrow batches as one side of a comparison by buckets. Its sink says how it is read."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.sinks.base import ComparedTable, ReadPiece
from airflow_kafka_spark.verification.buckets import Buckets, BucketSums, add_sums
from airflow_kafka_spark.verification.forms import CanonicalRow, Comparable, Family, Form, Sums, compute_row_checksum, to_form

if TYPE_CHECKING:
    import pyarrow as pa


_SINCE_2000 = 946_684_800_000_000
"""Microseconds from 1970 to 2000."""
_FRACTION_ZEROS = (r"(\.[0-9]*[1-9])0+$|\.0*$", r"\1")


def find_family(kind: pa.DataType) -> Family:
    """Return the family of a column's type."""
    import pyarrow as pa

    is_a = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return "uuid" if kind.extension_name == "arrow.uuid" else find_family(kind.storage_type)
    if is_a.is_dictionary(kind):
        return find_family(kind.value_type)
    if is_a.is_timestamp(kind):
        return "zoned" if kind.tz else "local"
    tests: tuple[tuple[Any, Family], ...] = (
        (is_a.is_integer, "integer"),
        (is_a.is_boolean, "boolean"),
        (is_a.is_decimal, "decimal"),
        (is_a.is_float32, "single"),
        (is_a.is_float64, "double"),
        (is_a.is_string, "text"),
        (is_a.is_large_string, "text"),
        (is_a.is_string_view, "text"),
        (is_a.is_binary, "binary"),
        (is_a.is_large_binary, "binary"),
        (is_a.is_binary_view, "binary"),
        (is_a.is_fixed_size_binary, "binary"),
        (is_a.is_date, "date"),
        (is_a.is_time, "time"),
    )
    return next((family for holds, family in tests if holds(kind)), "nested")


def format_rows(batch: pa.RecordBatch, columns: Sequence[str], forms: Sequence[Form]) -> Iterator[CanonicalRow]:
    """Return the rows of a batch, with each value in its form."""
    values = [_format_column(batch.column(name), form) for name, form in zip(columns, forms, strict=True)]
    return zip(*values, strict=True)


def _format_column(column: pa.Array, form: Form) -> list[str | None]:
    import pyarrow as pa
    import pyarrow.compute as pc

    column = _unwrap_column(column)
    family = find_family(column.type)
    if form == "instant":
        micros = column.cast(pa.timestamp("us", getattr(column.type, "tz", None)), safe=False).cast(pa.int64())
        return [None if value is None else struct.pack(">q", value - _SINCE_2000).hex() for value in micros.to_pylist()]
    if form == "date":
        days = column.cast(pa.date32()).cast(pa.int32())
        return [None if value is None else struct.pack(">i", value - 10_957).hex() for value in days.to_pylist()]
    if form in ("single", "double", "json"):
        return [to_form(form, value) for value in column.to_pylist()]
    if form == "binary":
        return [None if value is None else value.hex() for value in column.to_pylist()]
    if family == "decimal":
        return [None if value is None else _format_decimal(value) for value in column.to_pylist()]
    if family == "boolean":
        column = column.cast(pa.int8())
    text = column.cast(pa.string())
    if form in ("decimal", "numeral", "time") and family not in ("integer", "boolean"):
        text = pc.replace_substring_regex(text, *_FRACTION_ZEROS)
    elif form == "uuid":
        text = pc.utf8_lower(text)
    elif form == "trimmed":
        text = pc.utf8_rtrim(text, " ")
    return text.to_pylist()


def _unwrap_column(column: pa.Array) -> pa.Array:
    """Return a column without dictionary encoding and extension types. A UUID becomes text."""
    import pyarrow as pa

    if isinstance(column.type, pa.BaseExtensionType):
        storage = column.storage
        if column.type.extension_name != "arrow.uuid":
            return _unwrap_column(storage)
        return pa.array([None if value is None else str(uuid.UUID(bytes=value)) for value in storage.to_pylist()], pa.string())
    return column.dictionary_decode() if pa.types.is_dictionary(column.type) else column


def _format_decimal(value: Decimal) -> str:
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@dataclass(frozen=True)
class ArrowTable:
    """A table that is read in Arrow batches.

    :param table: the table.
    :param schema: its columns.
    """

    table: ComparedTable
    schema: pa.Schema

    @classmethod
    def load(cls, table: ComparedTable) -> ArrowTable | None:
        """Return the table with its columns; None if it does not exist.

        :raises SinkUnavailable: store or catalog did not answer.
        """
        with _errors(table, "reading the table's columns"):
            schema = table.load_schema()
        return None if schema is None else cls(table, schema)

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.schema.names)

    @property
    def is_postgres(self) -> bool:
        """False: its values are formatted by this process, not by PostgreSQL."""
        return False

    def find_column(self, name: str) -> Comparable | None:
        """Return the column of this name, or None if the table has no such column."""
        if name not in self.schema.names:
            return None
        kind = self.schema.field(name).type
        return Comparable(name, find_family(kind), str(kind))

    def make_side(self, names: Sequence[str], forms: tuple[Form, ...], key: int, where: str, piece_rows: int | None) -> ArrowSide:
        """Return the table with the columns that are compared. Its own pieces are read, of any number of rows."""
        return ArrowSide(self.table, tuple(names), forms, key, where)


@dataclass(frozen=True)
class ArrowSide:
    """A table that is read in Arrow batches, with the columns and the forms in which its rows are compared. Each pass reads the
    newest version.

    :param table: the table.
    :param columns: the columns that are compared, the key's columns first.
    :param forms: the form of each column.
    :param key: the number of columns of the key.
    :param where: a condition, in the language of the table; empty for all rows.
    """

    table: ComparedTable
    columns: tuple[str, ...]
    forms: tuple[Form, ...]
    key: int
    where: str

    def estimate_row_count(self) -> int:
        return 0

    def explain(self) -> None:
        """Start reading, so that an invalid condition is reported before the comparison.

        :raises SinkUnavailable: the condition is wrong, or the store did not answer.
        """
        with _errors(self.table, "trying the condition"):
            for piece in self.read_pieces():
                next(piece(), None)
                return

    def read_pieces(self) -> Iterator[ReadPiece]:
        with _errors(self.table, "listing its files"):
            yield from self.table.read_pieces(self.columns, self.where)

    def sum_buckets(self, piece: ReadPiece, buckets: Buckets) -> BucketSums:
        total: BucketSums = {}
        for number, row in self._read_rows(piece, buckets):
            add_sums(total, number, Sums(1, compute_row_checksum(row, self.forms)))
        return total

    def read_bucket_rows(self, piece: ReadPiece, buckets: Buckets) -> list[CanonicalRow]:
        return [row for _, row in self._read_rows(piece, buckets)]

    def _read_rows(self, piece: ReadPiece, buckets: Buckets) -> Iterator[tuple[int, CanonicalRow]]:
        key = self.forms[: self.key]
        with _errors(self.table, "reading its rows"):
            for batch in piece():
                for row in format_rows(batch, self.columns, self.forms):
                    number = buckets.find(compute_row_checksum(row[: self.key], key))
                    if number is not None:
                        yield number, row


class _errors:  # noqa: N801 - used like `contextlib.suppress`
    """Converts the errors of a store to the errors of this package.

    :param table: the table.
    :param doing: the operation, for the message.
    """

    def __init__(self, table: ComparedTable, doing: str) -> None:
        self.table, self.doing = table, doing

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # Stores and catalogs have no common base class of errors.
        if isinstance(error, Exception) and not isinstance(error, KafkaSparkError):
            raise self.table.make_unavailable_error(self.doing, error) from error
