"""CSV decoded in tasks: whole batches with Arrow, everything else row by row.

Arrow reads one row per record for these reasons. The records are joined by newlines, and their quotes are checked before Arrow
reads. Counted from the beginning, every first quote of a pair stands at the beginning of a field or directly after the second
quote of the previous pair, and every second one at the end of a field or directly before the next pair. No quote is open between
records, and the only line breaks outside of quotes are those between records. This is the whole grammar, so no field and no
record can extend into the next one.

Arrow only splits records into fields: it would read ``0x1F`` as an integer and ``inf`` as a number. The fields are checked
column by column; if a check fails, the batch is divided, see :class:`.BatchDecoder`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from airflow_kafka_spark.formats.tasks.base import (
    FEW_RECORDS,
    BatchDecoder,
    NeedsRowWise,
    check_length,
    check_within,
    parse_dates,
    parse_timestamps,
)
from airflow_kafka_spark.formats.text_values import (
    MAX_MICRO,
    MIN_MICRO,
    BadValue,
    CsvDialect,
    make_field_reader,
)
from airflow_kafka_spark.formats.types import Column, DataType, Decimal, Text, to_arrow_schema, to_arrow_type

FromText = Callable[[pa.Array], pa.Array]
"""Converts a column of texts to the column's own type; raises :class:`.NeedsRowWise` if the result might differ from the row-wise
reader's.
"""


class CsvDecoder(BatchDecoder):
    """The decoder of :class:`~airflow_kafka_spark.formats.csv.format.Csv`.

    :param columns: the columns, in the order of the fields.
    :param dialect: how the fields are written.
    :param timestamp_format: the pattern of timestamps; None for ISO 8601.
    :param encoding: the encoding of the records, by Python's name.
    :param few: up to this many records (and 64 KiB) are read row by row, which is faster than starting Arrow's reader.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        dialect: CsvDialect,
        timestamp_format: str | None = None,
        encoding: str = "utf-8",
        few: int = FEW_RECORDS,
    ) -> None:
        self._columns, self._dialect, self._timestamp_format, self._encoding = tuple(columns), dialect, timestamp_format, encoding
        super().__init__(to_arrow_schema(self._columns), CsvRowReader(columns, dialect, timestamp_format, encoding).read, few)
        self._converts = [_add_null_check(c, _make_text_conversion(c.type, timestamp_format)) for c in columns]
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

    def __reduce__(self) -> tuple[type[CsvDecoder], tuple[tuple[Column, ...], CsvDialect, str | None, str, int]]:
        return type(self), (self._columns, self._dialect, self._timestamp_format, self._encoding, self._few)

    def _read_batch(self, records: Sequence[bytes]) -> pa.RecordBatch | None:
        try:
            if self._encoding != "utf-8":
                records = [record.decode(self._encoding).encode() for record in records]
            return self._read(_join(records, self._dialect, len(self._names)), len(records))
        except (NeedsRowWise, BadValue, pa.ArrowException, OverflowError, UnicodeError):
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
    """Return the records as one buffer, each of them one row."""
    count = len(records)
    buffer = b"\n".join(records)
    if buffer.count(b"\n") != count - 1 or b"\r" in buffer:
        records = [r[:-2] if r.endswith(b"\r\n") else r.removesuffix(b"\n") for r in records]
        buffer = b"\n".join(records)
    if fields > 1 and b"" in records:
        # Arrow reads an empty line as a record with all fields.
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
    """Check that quotes stand around whole fields; the last byte is a newline.

    :raises NeedsRowWise: they do not.
    """
    first, second = quotes[::2], quotes[1::2]
    before, after = view[first - 1], view[second + 1]
    apart = (ord(dialect.delimiter), 10, *((ord(dialect.quote),) if dialect.doubled else ()))
    # Index -1 for a quote at the very beginning is the last byte, a newline.
    if not (np.isin(before, apart).all() and np.isin(after, apart).all()):
        raise NeedsRowWise


# --- columns --------------------------------------------------------------------------------------------------------------


def _add_null_check(column: Column, convert: FromText) -> FromText:
    def check_and_convert(array: pa.Array) -> pa.Array:
        if array.null_count and not column.nullable:
            raise NeedsRowWise
        return convert(array)

    return check_and_convert


def _make_text_conversion(data_type: DataType, timestamp_format: str | None) -> FromText:
    """Return the conversion of a column of texts to a type."""
    name = str(data_type)
    if isinstance(data_type, Text):
        return (lambda array: array) if data_type.max_length is None else check_length(data_type.max_length)
    if isinstance(data_type, Decimal):
        whole, scale = data_type.precision - data_type.scale, data_type.scale
        digits = f"(?:0|[0-9]{{1,{whole}}})" if whole else "0"
        fraction = rf"(?:\.[0-9]{{1,{scale}}})?" if scale else ""
        return _make_cast(data_type, f"^-?{digits}{fraction}$")
    if name in ("tinyint", "smallint", "int", "bigint"):
        return _make_cast(data_type, "^-?[0-9]+$")
    if name in ("float", "double"):
        return _make_float_conversion(name)
    if name == "timestamp" and timestamp_format is None:
        return _convert_instants
    if name == "boolean":
        return _convert_booleans
    if name in ("date", "timestamp_ntz"):
        return parse_dates if name == "date" else parse_timestamps
    convert, wanted = make_field_reader(data_type, timestamp_format), to_arrow_type(data_type)
    return lambda array: pa.array([None if v is None else convert(v) for v in array.to_pylist()], wanted)


def _check_all(array: pa.Array, pattern: str) -> None:
    """Check that all texts match a pattern."""
    if pc.all(pc.match_substring_regex(array, pattern)).as_py() is False:
        raise NeedsRowWise


def _make_cast(data_type: DataType, pattern: str) -> FromText:
    wanted = to_arrow_type(data_type)

    def convert(array: pa.Array) -> pa.Array:
        _check_all(array, pattern)
        return array.cast(wanted)

    return convert


def _make_float_conversion(name: str) -> FromText:
    def convert(array: pa.Array) -> pa.Array:
        _check_all(array, r"^(?:-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|NaN|-?Infinity)$")
        numbers = array.cast(pa.float32() if name == "float" else pa.float64())
        if pc.any(pc.and_(pc.is_inf(numbers), pc.invert(pc.ends_with(array, "y")))).as_py():
            raise NeedsRowWise
        return numbers

    return convert


def _convert_booleans(array: pa.Array) -> pa.Array:
    lower = pc.ascii_lower(array)
    if pc.all(pc.is_in(lower, pa.array(["true", "false", None]))).as_py() is False:
        raise NeedsRowWise
    return pc.equal(lower, "true")


def _convert_instants(array: pa.Array) -> pa.Array:
    """Return texts as timestamps: all with a zone, or all without one, which is UTC."""
    zoned = pa.timestamp("us", "UTC")
    try:
        found = array.cast(zoned)
    except pa.ArrowInvalid:
        found = array.cast(pa.timestamp("us")).view(pa.int64()).view(zoned)
    check_within(found, MIN_MICRO, MAX_MICRO)
    return found


# --- row by row ---
# This part defines the meaning of a CSV record; the batch reader above has to agree with it. Python's module ``csv`` is no
# replacement: it accepts quotes within unquoted fields and text after closing quotes.


class CsvRowReader:
    """Reads records of one schema.

    :param columns: the columns, in the order of the fields.
    :param dialect: how the fields are written.
    :param timestamp_format: see :func:`.make_timestamp_reader`.
    :param encoding: the encoding of the records, by Python's name.
    """

    def __init__(
        self, columns: Sequence[Column], dialect: CsvDialect, timestamp_format: str | None = None, encoding: str = "utf-8"
    ) -> None:
        self._columns = tuple(columns)
        self._encoding = encoding
        self._dialect = dialect
        self._converts = [make_field_reader(c.type, timestamp_format) for c in columns]
        q, e, d = (re.escape(c) for c in (dialect.quote, dialect.escape, dialect.delimiter))
        inside = f"[^{q}]*(?:{q}{q}[^{q}]*)*" if dialect.doubled else f"[^{q}{e}]*(?:{e}.[^{q}{e}]*)*"
        self._field = re.compile(f"(?:{q}({inside}){q}|([^{q}{d}\r\n]*))({d}|\\Z)", re.S).match
        # An escape is special only before a quote or another escape.
        self._unescape = re.compile(f"{e}([{q}{e}])").sub

    def read(self, value: bytes) -> list[Any]:
        """Return one value per column of a record.

        :raises BadValue: the record is not one line of CSV, has more or fewer fields, or a field does not fit its column.
        """
        try:
            text = value.decode(self._encoding)
            if self._encoding != "utf-8":
                text.encode()
        except UnicodeDecodeError as e:
            byte = value[e.start] if e.start < len(value) else 0
            raise BadValue(f"not {self._encoding.upper()}: byte 0x{byte:02x} at position {e.start}") from None
        except UnicodeEncodeError as e:
            raise BadValue(f"it holds the lone surrogate {ascii(e.object[e.start])}, which is no character") from None
        if text.startswith("\ufeff"):
            raise BadValue("it begins with a byte order mark, expected the first field")
        fields = self._split_fields(text[:-2] if text.endswith("\r\n") else text.removesuffix("\n"))
        if len(fields) > len(self._columns):
            raise BadValue(f"found {len(fields)} fields, expected {len(self._columns)}")
        if len(fields) < len(self._columns):
            missing = self._columns[len(fields)]
            raise BadValue(f"missing: found {_count(len(fields))}, expected {len(self._columns)}").prepend(f".{missing.name}")
        row = []
        for found, column, convert in zip(fields, self._columns, self._converts, strict=True):
            try:
                if found is None and not column.nullable:
                    raise BadValue(f"found a null, expected {column.type} NOT NULL")
                row.append(None if found is None else convert(found))
            except BadValue as e:
                raise e.prepend(f".{column.name}") from None
        return row

    def _split_fields(self, text: str) -> list[str | None]:
        """Return the texts of the fields; None for a null."""
        dialect, i = self._dialect, 0
        fields: list[str | None] = []
        while True:
            match = self._field(text, i)
            if match is None:
                raise self._make_bad_value(text, i, len(fields))
            quoted, bare, end = match.groups()
            if quoted is None:
                fields.append(None if bare == dialect.null else bare)
            else:
                fields.append(self._unescape(r"\1", quoted) if dialect.escape in quoted else quoted)
            i = match.end()
            if not end:
                return fields

    def _make_bad_value(self, text: str, i: int, field: int) -> BadValue:
        quote = self._dialect.quote
        if not text.startswith(quote, i):
            stop = re.compile(f"[{re.escape(quote)}\r\n]").search(text, i)
            assert stop is not None
            what = "a quote in a field without quotes" if stop.group() == quote else "a line break outside of quotes"
            error = BadValue(f"found {what}, at character {stop.start() + 1}")
        else:
            # The quote is never closed, or something follows the closing one.
            error = BadValue(
                "found quotes that do not end with the field, expected a closing quote before the delimiter or the end"
            )
        return error.prepend(f".{self._columns[field].name}") if field < len(self._columns) else error


def _count(fields: int) -> str:
    return "1 field" if fields == 1 else f"{fields} fields"
