"""Decodes CSV records inside a Spark task: whole batches by Arrow, what does not fit there record by record.

Why a batch that Arrow reads holds one row per record. The records are joined by newlines, and the quotes are looked at before
Arrow reads: counted from the beginning, every first one of a pair stands at the beginning of a field or right behind the second
one of the pair before, every second one at the end of a field or right before the next pair; between records none is open; and
no line breaks are outside of quotes but those between records. That is the whole grammar, so no field, and no record, can end in
another one.

Arrow only takes the fields apart: it would read ``0x1F`` as an integer and ``inf`` as a number. What stands in them is looked at
column by column, and on any doubt the batch is divided (:mod:`.tasks.batch_decoder`), until the reference decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from airflow_kafka_spark.formats.csv.dialect import CsvDialect
from airflow_kafka_spark.formats.csv.tasks.row_wise import CsvRowReader, field_reader
from airflow_kafka_spark.formats.tasks.batch_decoder import (
    FEW_RECORDS,
    BatchDecoder,
    NeedsRowWise,
    check_length,
    check_within,
    dates_from_text,
    timestamps_from_text,
)
from airflow_kafka_spark.formats.text import MAX_MICRO, MIN_MICRO, BadValue
from airflow_kafka_spark.formats.types import Column, DataType, Decimal, Text, arrow_schema, arrow_type

FromText = Callable[[pa.Array], pa.Array]
"""From a column of texts to the column's own type; raises :class:`.NeedsRowWise` when the meaning might be another one."""


class CsvDecoder(BatchDecoder):
    """See :class:`airflow_kafka_spark.formats.csv.format.Csv`.

    :param columns: the columns, in the order of the fields.
    :param dialect: how the fields stand in a record.
    :param timestamp_format: how timestamps are written; None for ISO 8601.
    :param few: up to this many records (and 64 KiB) the reference is faster than starting Arrow's reader.
    """

    def __init__(
        self, columns: Sequence[Column], dialect: CsvDialect, timestamp_format: str | None = None, few: int = FEW_RECORDS
    ) -> None:
        self._columns, self._dialect, self._timestamp_format = tuple(columns), dialect, timestamp_format
        super().__init__(arrow_schema(self._columns), CsvRowReader(columns, dialect, timestamp_format).read, few)
        self._converts = [_required(c, _from_text(c.type, timestamp_format)) for c in columns]
        names = [f"f{n}" for n in range(len(columns))]
        self._parse = pcsv.ParseOptions(
            delimiter=dialect.delimiter,
            quote_char=dialect.quote,
            double_quote=dialect.doubled,
            newlines_in_values=True,
            ignore_empty_lines=False,
        )
        self._convert = pcsv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            null_values=[dialect.null],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        )
        self._names = names

    def __reduce__(self) -> tuple[type[CsvDecoder], tuple[tuple[Column, ...], CsvDialect, str | None, int]]:
        return type(self), (self._columns, self._dialect, self._timestamp_format, self._few)

    def _read_batch(self, records: Sequence[bytes]) -> pa.RecordBatch | None:
        try:
            return self._read(_join(records, self._dialect, len(self._names)), len(records))
        except (NeedsRowWise, BadValue, pa.ArrowException, OverflowError, UnicodeDecodeError):
            return None

    def _read(self, buffer: bytes, count: int) -> pa.RecordBatch:
        options = pcsv.ReadOptions(use_threads=False, block_size=len(buffer) + 1, column_names=self._names)
        table = pcsv.read_csv(pa.BufferReader(buffer), options, self._parse, self._convert)
        if table.num_rows != count:
            raise NeedsRowWise
        arrays = []
        for convert, column in zip(self._converts, table.columns, strict=True):
            arrays.append(convert(column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()))
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _join(records: Sequence[bytes], dialect: CsvDialect, fields: int) -> bytes:
    """The records as one buffer, each of them one row."""
    count = len(records)
    buffer = b"\n".join(records)
    if buffer.count(b"\n") != count - 1 or b"\r" in buffer:
        records = [r[:-2] if r.endswith(b"\r\n") else r.removesuffix(b"\n") for r in records]
        buffer = b"\n".join(records)
    if fields > 1 and b"" in records:
        # To Arrow an empty line has all fields.
        raise NeedsRowWise
    if b"\0" in buffer or b"\xef\xbb\xbf" in buffer or (not dialect.doubled and dialect.escape.encode() in buffer):
        raise NeedsRowWise
    if not buffer.isascii():
        buffer.decode("utf-8")
    buffer += b"\n"
    if dialect.quote.encode() not in buffer:
        if buffer.count(b"\n") != count or b"\r" in buffer:
            raise NeedsRowWise
        return buffer
    view = np.frombuffer(buffer, np.uint8)
    quotes = np.flatnonzero(view == ord(dialect.quote))
    ends = np.cumsum(np.fromiter(map(len, records), np.int64, count) + 1) - 1
    breaks = np.flatnonzero(view == 10)
    if b"\r" in buffer:
        breaks = np.union1d(breaks, np.flatnonzero(view == 13))
    outside = breaks[np.searchsorted(quotes, breaks) % 2 == 0]
    if len(outside) != count or (outside != ends).any() or len(quotes) % 2:
        raise NeedsRowWise
    _check_quotes(view, quotes, dialect)
    return buffer


def _check_quotes(view: np.ndarray, quotes: np.ndarray, dialect: CsvDialect) -> None:
    """Raises unless they stand around whole fields; the last byte is a newline."""
    first, second = quotes[::2], quotes[1::2]
    before, after = view[first - 1], view[second + 1]
    apart = (ord(dialect.delimiter), 10, *((ord(dialect.quote),) if dialect.doubled else ()))
    # The one at the very beginning has the last byte before it, which is a newline.
    if not (np.isin(before, apart).all() and np.isin(after, apart).all()):
        raise NeedsRowWise


# --- columns --------------------------------------------------------------------------------------------------------------


def _required(column: Column, convert: FromText) -> FromText:
    def checked(array: pa.Array) -> pa.Array:
        if array.null_count and not column.nullable:
            raise NeedsRowWise
        return convert(array)

    return checked


def _from_text(data_type: DataType, timestamp_format: str | None) -> FromText:
    """How Arrow makes a column of texts."""
    name = str(data_type)
    if isinstance(data_type, Text):
        return (lambda array: array) if data_type.max_length is None else check_length(data_type.max_length)
    if isinstance(data_type, Decimal):
        whole, scale = data_type.precision - data_type.scale, data_type.scale
        digits = f"(?:0|[0-9]{{1,{whole}}})" if whole else "0"
        fraction = rf"(?:\.[0-9]{{1,{scale}}})?" if scale else ""
        return _cast(data_type, f"^-?{digits}{fraction}$")
    if name in ("tinyint", "smallint", "int", "bigint"):
        return _cast(data_type, "^-?[0-9]+$")
    if name in ("float", "double"):
        return _floats(name)
    if name == "timestamp" and timestamp_format is None:
        return _instants
    if name == "boolean":
        return _booleans
    if name in ("date", "timestamp_ntz"):
        return dates_from_text if name == "date" else timestamps_from_text
    convert, wanted = field_reader(data_type, timestamp_format), arrow_type(data_type)
    return lambda array: pa.array([None if v is None else convert(v) for v in array.to_pylist()], wanted)


def _all(array: pa.Array, pattern: str) -> None:
    """Raises unless all texts are of a pattern."""
    if pc.all(pc.match_substring_regex(array, pattern)).as_py() is False:
        raise NeedsRowWise


def _cast(data_type: DataType, pattern: str) -> FromText:
    wanted = arrow_type(data_type)

    def convert(array: pa.Array) -> pa.Array:
        _all(array, pattern)
        return array.cast(wanted)

    return convert


def _floats(name: str) -> FromText:
    def convert(array: pa.Array) -> pa.Array:
        _all(array, r"^(?:-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|NaN|-?Infinity)$")
        numbers = array.cast(pa.float32() if name == "float" else pa.float64())
        if pc.any(pc.and_(pc.is_inf(numbers), pc.invert(pc.ends_with(array, "y")))).as_py():
            raise NeedsRowWise
        return numbers

    return convert


def _booleans(array: pa.Array) -> pa.Array:
    lower = pc.ascii_lower(array)
    if pc.all(pc.is_in(lower, pa.array(["true", "false", None]))).as_py() is False:
        raise NeedsRowWise
    return pc.equal(lower, "true")


def _instants(array: pa.Array) -> pa.Array:
    """All with a zone or all without one, which is UTC."""
    zoned = pa.timestamp("us", "UTC")
    try:
        found = array.cast(zoned)
    except pa.ArrowInvalid:
        found = array.cast(pa.timestamp("us")).view(pa.int64()).view(zoned)
    check_within(found, MIN_MICRO, MAX_MICRO)
    return found


# --- writing --------------------------------------------------------------------------------------------------------------
