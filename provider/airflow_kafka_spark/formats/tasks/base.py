"""The bases of decoders and encoders.

A :class:`BatchDecoder` decodes whole batches, with a row-wise decoder for the records that the batch reader would decode
differently. A subclass reads a batch with Arrow or protobuf. If that raises :class:`NeedsRowWise`, the batch is divided into
smaller parts, and the parts that still fail are read row by row. The row-wise reader defines the meaning of a record, and both
ways return equal results.

A :class:`RowEncoder` writes row by row, in plain Python.
"""

from __future__ import annotations

import decimal
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.errors import RowRejected
from airflow_kafka_spark.formats.base import Decoded, Decoder, Encoded, Encoder
from airflow_kafka_spark.formats.text_values import MAX_MICRO, MIN_DATE, MIN_MICRO, BadValue
from airflow_kafka_spark.formats.types import Decimal

CHUNK_RECORDS, CHUNK_BYTES = 4096, 2 << 20
"""The largest chunks in which a batch is read. Chunks of more bytes do not fit into the processor's cache. With fewer records,
the time counts in which the reader is started for each chunk."""
DIVIDED_BYTES = 32 << 20
"""The size above which a chunk, whose records may be larger than those of others, is divided before it is read."""
MAX_BLOCK_BYTES = (1 << 31) - 16
"""The largest record in bytes that Arrow's readers take."""
FEW_RECORDS, FEW_BYTES = 8, 64 << 10
"""The largest part that is read row by row, which is faster than starting the batch reader."""
DIVISIONS = 8
"""Number of parts into which a chunk with a bad record is divided."""
FINDER_MIN_RECORDS = 64
"""The smallest part in which suspect finders look for bad records."""

DecodedPart = tuple[pa.RecordBatch, list[tuple[int, str]]]
"""The rows of the good records; position and reason of each bad one."""


class NeedsRowWise(Exception):
    """Raised when a batch reader cannot guarantee the result of the row-wise reader for these records."""


SuspectFinder = Callable[[Sequence[bytes]], Sequence[int]]
"""Returns the positions of records that are probably bad, ascending. A wrong guess costs time and changes no result."""

ArrayFunction = Callable[[pa.Array], pa.Array]
"""Converts or checks a column; raises :class:`NeedsRowWise` if the result might differ from the row-wise reader's."""


def refuse_nulls(change: ArrayFunction) -> ArrayFunction:
    """Return a conversion that raises :class:`NeedsRowWise` for a column with nulls."""

    def check_and_change(array: pa.Array) -> pa.Array:
        if array.null_count:
            raise NeedsRowWise
        return change(array)

    return check_and_change


class BatchDecoder(Decoder):
    """Base of the decoders that read whole batches.

    :param schema: the columns.
    :param read: the row-wise reader: returns one value per column of one record, in the form that ``pyarrow.array(values,
        type)`` takes; raises :class:`.BadValue`.
    :param few: up to this many records (and 64 KiB) are read row by row, which is faster than starting the batch reader.
    :param row_wise_only: True if the batch reader cannot read this schema.
    :param suspect_finders: look for bad records in a part that the batch reader refused. The finder that was successful last is
        called first.
    """

    def __init__(
        self,
        schema: pa.Schema,
        read: Callable[[bytes], list[Any]],
        few: int = FEW_RECORDS,
        row_wise_only: bool = False,
        suspect_finders: Sequence[SuspectFinder] = (),
    ) -> None:
        self._few = few
        self._schema = schema
        self._read_one = read
        self._row_wise_only = row_wise_only
        self._suspect_finders = tuple(suspect_finders)
        self._recently_bad = False
        self.row_wise_count = 0
        """The number of records that were read row by row."""

    @abstractmethod
    def _read_batch(self, records: Sequence[bytes]) -> pa.RecordBatch | None:
        """Return one row per record, or None if the result might differ from the row-wise reader's."""

    def decode(self, values: Sequence[bytes | None]) -> Decoded:
        """Decode a batch of values; the format defines their meaning.

        :param values: the values, with less than 2 GiB of text per string column, the limit of an Arrow column.
        """
        records = [v for v in values if v is not None]
        parts: list[pa.RecordBatch] = []
        bad: list[tuple[int, str]] = []
        for part, wrong in self._split_into_chunks(records):
            parts.append(part)
            bad.extend(wrong)
        return self._assemble(parts, values, bad)

    def decode_row_wise(self, values: Sequence[bytes | None]) -> Decoded:
        """Decode the values row by row only. The result is equal to that of :meth:`decode`."""
        part, bad = self.read_row_wise([v for v in values if v is not None], 0)
        return self._assemble([part], values, bad)

    def _assemble(self, parts: list[pa.RecordBatch], values: Sequence[bytes | None], bad: list[tuple[int, str]]) -> Decoded:
        """Return one row per value; the parts hold the good records only."""
        if len(parts) == 1:
            good = parts[0]
        else:
            columns = [pa.concat_arrays([p.column(i) for p in parts]) for i in range(len(self._schema))] if parts else []
            good = pa.RecordBatch.from_arrays(columns or [pa.array([], f.type) for f in self._schema], schema=self._schema)
        if good.num_rows == len(values):
            return Decoded(good)
        present = np.ones(len(values), bool)
        if None in values:
            present[:] = [v is not None for v in values]
        places = np.flatnonzero(present)
        wrong = [int(places[at]) for at, _ in bad]
        present[wrong] = False
        rows = pa.array(np.cumsum(present) - 1, mask=~present)
        taken = [column.take(rows) for column in good.columns]
        return Decoded(
            pa.RecordBatch.from_arrays(taken, schema=self._schema), tuple(zip(wrong, (reason for _, reason in bad), strict=True))
        )

    def _split_into_chunks(self, records: Sequence[bytes]) -> Iterator[DecodedPart]:
        # Equal chunks: small, so that a bad record affects few others; large enough that starting the reader costs little.
        size = sum(map(len, records))
        parts = max(1, math.ceil(len(records) / CHUNK_RECORDS), math.ceil(size / CHUNK_BYTES))
        step = max(1, math.ceil(len(records) / parts))
        for at in range(0, len(records), step):
            yield from self._divide(records[at : at + step], at, size)

    def _divide(self, records: Sequence[bytes], start: int, most_bytes: int) -> Iterator[DecodedPart]:
        """Yield the records read as a batch; if that fails, in eight parts, so that a bad record costs little more than reading
        its chunk twice.

        :param most_bytes: a size in bytes that the records do not exceed.
        """
        count = len(records)
        # Adding up the lengths takes as long as joining the records.
        size = sum(map(len, records)) if count <= self._few or most_bytes > DIVIDED_BYTES else most_bytes
        if self._row_wise_only or (count <= self._few and size <= FEW_BYTES) or (count == 1 and size > MAX_BLOCK_BYTES):
            yield self.read_row_wise(records, start)
            return
        if size <= DIVIDED_BYTES or count == 1:
            found = self._read_part(records, start)
            if found is not None:
                yield found
                return
        if count == 1:
            yield self.read_row_wise(records, start)
            return
        step = math.ceil(count / DIVISIONS)
        for at in range(0, count, step):
            yield from self._divide(records[at : at + step], start + at, size)

    def _read_part(self, records: Sequence[bytes], start: int) -> DecodedPart | None:
        """Return all records read as a batch, without the bad ones that a suspect finder has found; None if they must be
        divided.
        """
        finders = self._suspect_finders if len(records) >= FINDER_MIN_RECORDS else ()
        # After a part with bad records the next one probably has some, too: look for them before reading the batch.
        first = finders[:1] if self._recently_bad else ()
        found = self._read_without_suspects(records, start, first)
        if found is None:
            batch = self._read_batch(records)
            if batch is not None:
                self._recently_bad = False
                return batch, []
            found = self._read_without_suspects(records, start, finders[len(first) :])
        return found

    def _read_without_suspects(
        self, records: Sequence[bytes], start: int, suspect_finders: Sequence[SuspectFinder]
    ) -> DecodedPart | None:
        for finder in suspect_finders:
            found = self._separate_suspects(records, finder(records), start)
            if found is not None:
                self._recently_bad = True
                self._suspect_finders = (finder, *(other for other in self._suspect_finders if other is not finder))
                return found
        return None

    def _separate_suspects(self, records: Sequence[bytes], suspects: Sequence[int], start: int) -> DecodedPart | None:
        """Return the suspects read row by row and the others as a batch; None if a suspect is good or the others cannot be
        read.
        """
        if not suspects or 2 * len(suspects) > len(records):
            return None
        wrong: list[tuple[int, str]] = []
        others: list[bytes] = []
        reached = 0
        for at in suspects:
            self.row_wise_count += 1
            try:
                self._read_one(records[at])
                return None
            except BadValue as e:
                wrong.append((start + at, e.reason))
            others += records[reached:at]
            reached = at + 1
        batch = self._read_batch([*others, *records[reached:]])
        return None if batch is None else (batch, wrong)

    def read_row_wise(self, records: Sequence[bytes], start: int) -> DecodedPart:
        """Read records row by row.

        :param start: the position of the first record in the whole batch.
        """
        rows: list[list[Any]] = []
        bad: list[tuple[int, str]] = []
        self.row_wise_count += len(records)
        for at, record in enumerate(records, start):
            try:
                rows.append(self._read_one(record))
            except BadValue as e:
                bad.append((at, e.reason))
        columns = list(zip(*rows, strict=True)) or [()] * len(self._schema)
        arrays = [pa.array(values, f.type) for f, values in zip(self._schema, columns, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema), bad


def check_within(array: pa.Array, low: int, high: int) -> None:
    """Check that all values, taken as integers, lie in a range.

    :raises NeedsRowWise: one does not.
    """
    kind = {32: pa.int32(), 64: pa.int64()}[array.type.bit_width]
    ends = pc.min_max(array.view(kind))
    smallest, largest = ends["min"].as_py(), ends["max"].as_py()
    if smallest is not None and not low <= smallest <= largest <= high:
        raise NeedsRowWise


def check_length(length: int) -> ArrayFunction:
    """Return a check that texts have at most this many characters."""

    def check(array: pa.Array) -> pa.Array:
        longest = pc.max(pc.utf8_length(array)).as_py()
        if longest is not None and longest > length:
            raise NeedsRowWise
        return array

    return check


def check_years(array: pa.Array) -> pa.Array:
    """Check that timestamps lie in the years 0001 to 9999."""
    check_within(array, MIN_MICRO, MAX_MICRO)
    return array


def parse_timestamps(array: pa.Array) -> pa.Array:
    """Return texts as timestamps without zone."""
    return check_years(array.cast(pa.timestamp("us")))


def parse_dates(array: pa.Array) -> pa.Array:
    """Return texts as dates."""
    dates = array.cast(pa.date32())
    check_within(dates, MIN_DATE, 1 << 30)
    return dates


UNFIT_ACTION = "Correct the row, or the schema: what does not fit is never written as something else"
"""The remedy for a row that does not fit."""


class ValueDoesNotFit(Exception):
    """Raised when a schema has no place for a value."""

    @staticmethod
    def of(path: str, found: object) -> ValueDoesNotFit:
        """Return the error with the column's path."""
        return ValueDoesNotFit(f"column `{path}`: {found}")


class RowEncoder(Encoder):
    """Encodes row by row.

    Values are Python objects, but timestamps are microseconds, and dates are days, since 1970; structs are dicts, maps are
    dicts or lists of pairs.

    :param columns: the names of the rows' columns, in order.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self._columns = tuple(columns)

    @abstractmethod
    def write(self, row: Mapping[str, Any]) -> bytes:
        """Return the bytes of one row; equal rows give equal bytes.

        :raises ValueDoesNotFit: the schema has no place for a value.
        """

    def encode(self, rows: Mapping[str, pa.Array]) -> pa.Array:
        """Return the rows' bytes.

        :raises RowRejected: a row does not fit the schema.
        """
        columns = [list_python_values(rows[name]) for name in self._columns]
        made = self._encode_rows([dict(zip(self._columns, row, strict=True)) for row in zip(*columns, strict=True)])
        return get_values_or_raise(made)

    def encode_struct(self, rows: pa.StructArray) -> Encoded:
        """Encode the rows of a struct column whose fields are in the order of the columns; a null has no value."""
        try:
            columns = [list_python_values(rows.field(at)) for at in range(len(self._columns))]
        except UnicodeDecodeError as e:
            if len(rows) == 1:
                return Encoded(pa.nulls(1, pa.binary()), ((0, describe_invalid_utf8(e)),))
            apart = [self.encode_struct(rows.slice(at, 1)) for at in range(len(rows))]
            bad = ((at, reason) for at, found in enumerate(apart) for _, reason in found.bad)
            return Encoded(pa.concat_arrays([found.values for found in apart]), tuple(bad))
        there = rows.is_valid().to_pylist()
        given = zip(*columns, strict=True)
        return self._encode_rows(
            [dict(zip(self._columns, row, strict=True)) if has else None for row, has in zip(given, there, strict=True)]
        )

    def _encode_rows(self, rows: Sequence[Mapping[str, Any] | None]) -> Encoded:
        made: list[bytes | None] = []
        bad: list[tuple[int, str]] = []
        for at, row in enumerate(rows):
            try:
                made.append(None if row is None else self.write(row))
            except ValueDoesNotFit as e:
                made.append(None)
                bad.append((at, str(e)))
        return Encoded(pa.array(made, pa.binary()), tuple(bad))


def get_values_or_raise(found: Encoded) -> pa.Array:
    """Return the encoded values if all rows fit.

    :raises RowRejected: a row does not.
    """
    for at, reason in found.bad:
        raise RowRejected(f"row {at + 1}", reason, UNFIT_ACTION)
    return found.values


def describe_invalid_utf8(error: UnicodeDecodeError) -> str:
    """Return the reason why a text cannot be written."""
    return f"a text is not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start}"


def list_map_items(found: Mapping[Any, Any] | Sequence[tuple[Any, Any]]) -> Iterable[tuple[Any, Any]]:
    """Return the keys and values of a map."""
    return found.items() if isinstance(found, Mapping) else found


def to_unscaled(value: decimal.Decimal, wanted: Decimal) -> int:
    """Return a decimal as an integer, in units of the last digit of its type.

    :raises ValueError: the type cannot hold it exactly.
    """
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise ValueError(f"found {value}, expected {wanted}")
    number, more = int("".join(map(str, digits))), exponent + wanted.scale
    found, rest = (number * 10**more, 0) if more >= 0 else divmod(number, 10**-more)
    if rest or found >= 10**wanted.precision:
        raise ValueError(f"found {value}, expected {wanted}")
    return -found if sign else found


def to_java_big_integer(number: int) -> bytes:
    """Return an integer as the bytes of Java's BigInteger: big-endian two's complement, as short as possible."""
    return number.to_bytes((number if number >= 0 else ~number).bit_length() // 8 + 1, "big", signed=True)


def list_python_values(column: pa.Array) -> list[Any]:
    """Return a column's values, as :class:`RowEncoder` describes them."""
    wanted = _find_python_type(column.type)
    return list((column if wanted.equals(column.type) else column.cast(wanted)).to_pylist())


def _find_python_type(found: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(found):
        return pa.int64()
    if pa.types.is_date32(found):
        return pa.int32()
    if pa.types.is_struct(found):
        return pa.struct([pa.field(f.name, _find_python_type(f.type), f.nullable) for f in found])
    if pa.types.is_map(found):
        return pa.map_(
            _find_python_type(found.key_type), pa.field("value", _find_python_type(found.item_type), found.item_field.nullable)
        )
    if pa.types.is_list(found):
        return pa.list_(pa.field(found.value_field.name, _find_python_type(found.value_type), found.value_field.nullable))
    return found
