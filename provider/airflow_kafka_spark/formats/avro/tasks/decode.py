"""Avro decoded in tasks: whole batches with polars, everything else row by row.

The values of a batch become the one block of an Avro file that is built around them in memory. The file's schema has the
writer's types by their encoding: enums and ints are longs, booleans are single bytes, decimals and timestamps are bytes and
longs, maps are arrays of key and value. Arrow and NumPy convert them to columns by the rules of :mod:`.avro.tasks.row_decode`;
a value that might have another result there raises :class:`.NeedsRowWise`.

Row n holds exactly value n for this reason: every value is followed by a nonce of 8 random bytes, created after the values, and
the file's schema ends in a field for it. Every row has to end in the nonce. There are as many rows as nonces, and rows follow
each other without a gap, so each row ends exactly where its value does.

polars does not check the branch numbers of unions: it takes anything but 0 for the second branch. If a schema has optional
fields, the positions of these numbers are computed from the sizes of the values before them, and the numbers are compared.
Sizes are those of the ordinary encoding: integers as short as possible, arrays and maps in one block. Values in another
encoding have other sizes, and are read row by row.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import sys
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.formats import types
from airflow_kafka_spark.formats.avro.schema import (
    AvroArray,
    AvroEnum,
    AvroField,
    AvroFixed,
    AvroLogicalType,
    AvroMap,
    AvroPrimitive,
    AvroRecord,
    AvroSchema,
    AvroUnion,
    find_branch_to_read,
    find_reader_field,
    find_unit_ratio,
    is_readable_as,
    list_columns,
    read_symbols,
)
from airflow_kafka_spark.formats.avro.tasks.encode import compute_varint_sizes
from airflow_kafka_spark.formats.avro.tasks.row_decode import (
    AvroRowReader,
    compute_smallest_size,
    get_micros_per_unit,
    get_time_of_day_factor,
    read_default,
    remove_logical_type,
)
from airflow_kafka_spark.formats.avro.tasks.row_encode import encode_long
from airflow_kafka_spark.formats.registry import HEADER_BYTES, describe_unknown_schema_id, read_schema_id
from airflow_kafka_spark.formats.tasks.base import (
    DIVIDED_BYTES,
    ArrayFunction,
    BatchDecoder,
    DecodedPart,
    NeedsRowWise,
    check_within,
    refuse_nulls,
)
from airflow_kafka_spark.formats.text_values import MAX_DATE, MAX_MICRO, MIN_DATE, MIN_MICRO, BadValue
from airflow_kafka_spark.formats.types import to_arrow_schema

_FEW_VALUES, _CHUNK_VALUES = 32, 20_480


class AvroDecoder(BatchDecoder):
    """The decoder of :class:`~airflow_kafka_spark.formats.avro.format.Avro`. For each schema of a writer it decides once whether
    batches can be read.

    :param reader: the schema of the columns.
    :param writers: by id, the schema of a writer, or the reason why it cannot be used; without the wire format only id 0.
    :param framed: True if values begin with a header.
    :param known: ids, subjects and versions of the schemas, for messages.
    :param few: up to this many values are read row by row, which is faster.
    """

    def __init__(
        self, reader: AvroRecord, writers: Mapping[int, AvroRecord | str], framed: bool, known: str = "", few: int = _FEW_VALUES
    ) -> None:
        self._reader, self._writers, self._framed, self._known = reader, dict(writers), framed, known
        self._row_readers: dict[int, AvroRowReader] = {}
        self._plans: dict[bytes, BatchReader | None] = {}
        self._header = HEADER_BYTES if framed else 0
        super().__init__(to_arrow_schema(list_columns(reader)), self._read_value, few)

    def __reduce__(self) -> tuple[type[AvroDecoder], tuple[AvroRecord, dict[int, AvroRecord | str], bool, str, int]]:
        return type(self), (self._reader, self._writers, self._framed, self._known, self._few)

    # --- value by value ----------------------------------------------------------------------------------------------

    def _read_value(self, value: bytes) -> list[Any]:
        number = read_schema_id(value) if self._framed else 0
        row_reader = self._row_readers.get(number)
        if row_reader is None:
            row_reader = self._row_readers[number] = AvroRowReader(self._get_writer(number), self._reader)
        return row_reader.read(value, self._header)

    def _get_writer(self, number: int) -> AvroRecord:
        writer = self._writers.get(number)
        if isinstance(writer, AvroRecord):
            return writer
        raise BadValue(describe_unknown_schema_id(number, self._known, {} if writer is None else {number: writer}))

    # --- whole batches -----------------------------------------------------------------------------------------------

    def _split_into_chunks(self, records: Sequence[bytes]) -> Iterator[DecodedPart]:
        # Larger chunks than for texts: finding a bad value rereads fewer of the others.
        step = math.ceil(len(records) / math.ceil(len(records) / _CHUNK_VALUES)) if records else 1
        size = sum(map(len, records))
        for at in range(0, len(records), step):
            yield from self._divide(records[at : at + step], at, size)

    def _read_batch(self, records: Sequence[bytes]) -> pa.RecordBatch | None:
        if sum(map(len, records)) > DIVIDED_BYTES * 4:
            return None
        head = records[0][: self._header]
        alike = all(records[at][: self._header] == head for at in (len(records) // 2, -1))
        # Comparing all headers here would take half as long as reading; the batch reader compares them.
        if alike and (read := self._try(head, records)) is not None:
            return read
        heads = [r[: self._header] for r in records] if self._framed else []
        kinds = set(heads)
        return self._read_mixed(kinds, heads, records) if len(kinds) > 1 else None

    def _try(self, head: bytes, records: Sequence[bytes]) -> pa.RecordBatch | None:
        plan = self._plan(head)
        try:
            return plan.read(records, head) if plan else None
        except NeedsRowWise:
            return None

    def _read_mixed(self, kinds: set[bytes], heads: list[bytes], records: Sequence[bytes]) -> pa.RecordBatch | None:
        order, pieces = [], []
        for head in kinds:
            positions = [at for at, h in enumerate(heads) if h == head]
            piece = self._try(head, [records[at] for at in positions])
            if piece is None:
                return None
            pieces.append(piece)
            order += positions
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        columns = [pa.concat_arrays([p.column(n) for p in pieces]).take(pa.array(back)) for n in range(len(self._schema))]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _plan(self, head: bytes) -> BatchReader | None:
        if head not in self._plans:
            self._plans[head] = self._make_batch_reader(head)
        return self._plans[head]

    def _make_batch_reader(self, head: bytes) -> BatchReader | None:
        try:
            return BatchReader(self._get_writer(read_schema_id(head) if self._framed else 0), self._reader, self._header)
        except (BadValue, OnlyRowWise):
            return None


# --- whole batches --------------------------------------------------------------------------------------------------------


NONCE_BYTES = 8
_SYNC = bytes(16)
_stderr_lock = threading.Lock()


@dataclass(frozen=True)
class FieldReader:
    """The layout of values of one type, and their conversion to a column.

    :param schema: the type in the file, as JSON.
    :param layout: the positions of values in their bytes.
    :param change: the conversion from polars' array to the column.
    """

    schema: Any
    layout: WireLayout
    change: ArrayFunction


class BatchReader:
    """Reads batches of one writer.

    :param writer: the schema they were written with.
    :param reader: the schema of the columns.
    :param header: the number of bytes before each value.
    :raises OnlyRowWise: the schemas contain something that only the row-wise reader reads.
    """

    def __init__(self, writer: AvroRecord, reader: AvroRecord, header: int) -> None:
        self._schema = types.to_arrow_schema(list_columns(reader))
        self._header = header
        self._names = 0
        compiled = self._make_field_readers(writer, reader)
        self._steps, self._build = compiled
        ahead = [{"name": "h", "type": self._make_fixed(header)}] if header else []
        fields = [{"name": f"f{n}", "type": step.schema} for n, (step, _) in enumerate(self._steps)]
        last = {"name": "z", "type": self._make_fixed(NONCE_BYTES)}
        text = json.dumps({"type": "record", "name": "T", "fields": [*ahead, *fields, last]}).encode()
        meta = encode_long(1) + encode_long(11) + b"avro.schema" + encode_long(len(text)) + text + encode_long(0)
        self._head = b"Obj\x01" + meta + _SYNC
        self._layout = AvroRecordLayout([step.layout for step, _ in self._steps])

    def read(self, values: Sequence[bytes], head: bytes) -> pa.RecordBatch:
        """Return one row per value.

        :param head: the header that every value must have.
        :raises NeedsRowWise: one of them may be bad.
        """
        nonce = os.urandom(NONCE_BYTES)
        body = nonce.join(values) + nonce
        file = b"".join((self._head, encode_long(len(values)), encode_long(len(body)), body, _SYNC))
        try:
            with _suppress_stderr():
                frame = pl.read_avro(io.BytesIO(file))
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError, OverflowError):
            raise NeedsRowWise from None
        if frame.height != len(values) or get_offsets_and_bytes(_to_arrow(frame["z"]))[1].tobytes() != nonce * len(values):
            raise NeedsRowWise
        if head and get_offsets_and_bytes(_to_arrow(frame["h"]))[1].tobytes() != head * len(values):
            raise NeedsRowWise
        columns = [_to_arrow(frame[f"f{n}"]) for n in range(len(self._steps))]
        if self._layout.has_branches:
            self._check(columns, values, body)
        try:
            return pa.RecordBatch.from_arrays(self._build(columns, len(values)), schema=self._schema)
        except (pa.ArrowException, OverflowError, UnicodeDecodeError):
            raise NeedsRowWise from None

    def _check(self, columns: list[pa.Array], values: Sequence[bytes], body: bytes) -> None:
        lengths = np.fromiter(map(len, values), np.int64, len(values))
        starts = np.cumsum(lengths + NONCE_BYTES) - lengths - NONCE_BYTES + self._header
        sizes = self._layout.compute_sizes_of(columns)
        if not np.array_equal(sum(sizes) + self._header, lengths):
            raise NeedsRowWise
        self._layout.check_of(columns, sizes, starts, np.frombuffer(body, np.uint8))

    # --- types -------------------------------------------------------------------------------------------------------

    def _make_fixed(self, size: int) -> dict[str, Any]:
        return {"type": "fixed", "name": self._name(), "size": size}

    def _name(self) -> str:
        self._names += 1
        return f"N{self._names}"

    def _make_reader(self, writer: AvroSchema, reader: AvroSchema) -> FieldReader:
        """Return the reading of the writer's type as the reader's."""
        if isinstance(writer, AvroUnion):
            return self._make_optional_reader(writer, reader)
        if isinstance(reader, AvroUnion):
            if (
                len(reader.present) != 1
                or (at := find_branch_to_read(writer, reader)) is None
                or reader.branches[at].kind == "null"
            ):
                raise OnlyRowWise
            reader = reader.branches[at]
        if not is_readable_as(writer, reader):
            raise OnlyRowWise
        if isinstance(writer, AvroRecord):
            return self._make_record_reader(writer, cast(AvroRecord, reader))
        if isinstance(writer, AvroArray):
            return self._make_array_reader(writer, cast(AvroArray, reader))
        if isinstance(writer, AvroMap):
            return self._make_map_reader(writer, cast(AvroMap, reader))
        return self._make_leaf_reader(writer, cast("AvroPrimitive | AvroFixed | AvroEnum", reader))

    def _make_leaf_reader(
        self, writer: AvroPrimitive | AvroFixed | AvroEnum, reader: AvroPrimitive | AvroFixed | AvroEnum
    ) -> FieldReader:
        change = make_scalar_conversion(writer, reader)
        if isinstance(writer, AvroFixed):
            return FieldReader(self._make_fixed(writer.size), FixedSizeLayout(writer.size), change)
        if writer.kind == "boolean":
            return FieldReader(self._make_fixed(1), FixedSizeLayout(1), change)
        if writer.kind in ("enum", "int", "long"):
            return FieldReader("long", LongLayout(), change)
        if writer.kind in ("bytes", "string"):
            return FieldReader(writer.kind, BinaryLayout(), change)
        if writer.kind == "null":
            raise OnlyRowWise
        return FieldReader(writer.kind, FixedSizeLayout(4 if writer.kind == "float" else 8), change)

    def _make_optional_reader(self, writer: AvroUnion, reader: AvroSchema) -> FieldReader:
        if not writer.optional:
            raise OnlyRowWise
        if isinstance(reader, AvroUnion) and (not reader.optional):
            raise OnlyRowWise
        step = self._make_reader(writer.present[0], reader)
        first = writer.branches[0].kind == "null"
        change = step.change if isinstance(reader, AvroUnion) else refuse_nulls(step.change)
        schema = ["null", step.schema] if first else [step.schema, "null"]
        return FieldReader(schema, OptionalLayout(step.layout, 2 if first else 0, 0 if first else 2), change)

    def _make_array_reader(self, writer: AvroArray, reader: AvroArray) -> FieldReader:
        # Items without bytes may be more than fit into memory.
        if not compute_smallest_size(writer.items):
            raise OnlyRowWise
        item, wanted = self._make_reader(writer.items, reader.items), _find_type(reader)

        def change(array: pa.Array) -> pa.Array:
            return pa.ListArray.from_arrays(_get_offsets(array), item.change(array.flatten()), type=wanted)

        return FieldReader({"type": "array", "items": item.schema}, ArrayLayout(item.layout), change)

    def _make_map_reader(self, writer: AvroMap, reader: AvroMap) -> FieldReader:
        key, item = (
            self._make_leaf_reader(AvroPrimitive("string"), AvroPrimitive("string")),
            self._make_reader(writer.values, reader.values),
        )
        wanted = cast(pa.MapType, _find_type(reader))

        def change(array: pa.Array) -> pa.Array:
            entries = array.flatten()
            keys, values = key.change(entries.field(0)), item.change(entries.field(1))
            _refuse_duplicate_keys(array, keys)
            made = pa.MapArray.from_arrays(_get_offsets(array), keys, values)
            return made if made.type == wanted else made.cast(wanted)

        fields = [{"name": "k", "type": key.schema}, {"name": "v", "type": item.schema}]
        schema = {"type": "array", "items": {"type": "record", "name": self._name(), "fields": fields}}
        return FieldReader(schema, ArrayLayout(AvroRecordLayout([key.layout, item.layout])), change)

    def _make_record_reader(self, writer: AvroRecord, reader: AvroRecord) -> FieldReader:
        if not writer.fields:
            raise OnlyRowWise
        steps, build = self._make_field_readers(writer, reader)
        wanted = _find_type(reader)

        def change(array: pa.Array) -> pa.Array:
            children = build([array.field(n) for n in range(len(steps))], len(array))
            return pa.StructArray.from_arrays(children, fields=list(wanted), mask=array.is_null())

        fields = [{"name": f"f{n}", "type": step.schema} for n, (step, _) in enumerate(steps)]
        return FieldReader(
            {"type": "record", "name": self._name(), "fields": fields}, AvroRecordLayout([s.layout for s, _ in steps]), change
        )

    def _make_field_readers(
        self, writer: AvroRecord, reader: AvroRecord
    ) -> tuple[list[tuple[FieldReader, AvroField | None]], Callable[[Sequence[pa.Array], int], list[pa.Array]]]:
        """Return the reading of the writer's fields, and the function that builds the reader's columns from them."""
        steps: list[tuple[FieldReader, AvroField | None]] = []
        for written in writer.fields:
            field = find_reader_field(written, writer, reader)
            bare = remove_logical_type(written.type)
            steps.append((self._make_reader(bare, bare) if field is None else self._make_reader(written.type, field.type), field))
        taken = {field.name for _, field in steps if field}
        constants: dict[str, pa.Array] = {}
        for f in reader.fields:
            if f.name not in taken:
                if not f.default:
                    raise OnlyRowWise
                constants[f.name] = pa.array([read_default(f)], _find_type(f.type))

        def build(arrays: Sequence[pa.Array], rows: int) -> list[pa.Array]:
            # Fields without a column are converted, too, since their values have to be valid.
            made = {f.name if f else n: s.change(a) for n, ((s, f), a) in enumerate(zip(steps, arrays, strict=True))}
            none = pa.array(np.zeros(rows, np.int64))
            return [made[f.name] if f.name in made else constants[f.name].take(none) for f in reader.fields]

        return steps, build


def _find_type(schema: AvroSchema) -> pa.DataType:
    return types.to_arrow_schema(list_columns(AvroRecord("one", (AvroField("x", schema),)))).field(0).type


def _to_arrow(series: pl.Series) -> pa.Array:
    array = series.to_arrow(compat_level=pl.CompatLevel.oldest())
    return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array


def _get_offsets(array: pa.Array) -> pa.Array:
    """Return the offsets of lists among all items, null where a list is null."""
    counts = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    ends = np.zeros(len(array) + 1, np.int64)
    np.cumsum(counts, out=ends[1:])
    if ends[-1] > np.iinfo(np.int32).max:
        raise NeedsRowWise
    mask = np.append(array.is_null().to_numpy(zero_copy_only=False), False) if array.null_count else None
    return pa.array(ends.astype(np.int32), mask=mask)


def _refuse_duplicate_keys(array: pa.Array, keys: pa.Array) -> None:
    """Refuse maps with a key that occurs twice, of which the row-wise reader takes the last value.

    :raises NeedsRowWise: there are some.
    """
    if not len(keys):
        return
    counts = pc.fill_null(pc.list_value_length(array), 0).to_numpy()
    codes = pc.dictionary_encode(keys)
    pairs = np.repeat(np.arange(len(counts)), counts) * len(codes.dictionary) + codes.indices.to_numpy()
    if len(np.unique(pairs)) != len(pairs):
        raise NeedsRowWise


@contextlib.contextmanager
def _suppress_stderr() -> Iterator[None]:
    """Suppress standard error: polars writes a message for each value that ends too early."""
    # One thread at a time: another one would save the redirected descriptor as the original.
    with _stderr_lock:
        sys.stderr.flush()
        kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nowhere, 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(nowhere)


# --- scalars of whole batches ---------------------------------------------------------------------------------------------


class OnlyRowWise(Exception):
    """Raised when only the row-wise reader reads a schema."""


def make_scalar_conversion(
    writer: AvroPrimitive | AvroFixed | AvroEnum, reader: AvroPrimitive | AvroFixed | AvroEnum
) -> ArrayFunction:
    """Return the conversion of a scalar from polars' array to the reader's column."""
    if isinstance(writer, AvroEnum):
        assert isinstance(reader, AvroEnum)
        return _make_symbol_conversion(read_symbols(writer, reader))
    assert not isinstance(reader, AvroEnum)
    if writer.kind == "boolean":
        return _convert_booleans
    if find_unit_ratio(writer, reader) is not None:
        raise OnlyRowWise
    if writer.kind in ("int", "long"):
        return _make_number_conversion(writer, reader)
    if writer.kind in ("float", "double"):
        wanted = pa.float32() if reader.kind == "float" else pa.float64()
        return lambda array: array.cast(wanted)
    if reader.logical and reader.logical.name == "decimal":
        other = writer.logical if writer.logical and writer.logical.name == "decimal" else None
        return _make_decimal_conversion(reader.logical, other.scale if other else reader.logical.scale)
    if reader.logical and reader.logical.name == "uuid" and isinstance(reader, AvroFixed):
        return lambda array: pa.array([None if v is None else str(uuid.UUID(bytes=v)) for v in array.to_pylist()], pa.string())
    return _convert_text if reader.kind == "string" else _convert_binary


def _convert_text(array: pa.Array) -> pa.Array:
    return array.cast(pa.string())


def _convert_binary(array: pa.Array) -> pa.Array:
    return array.cast(pa.binary())


def _make_number_conversion(writer: AvroPrimitive | AvroFixed, reader: AvroPrimitive | AvroFixed) -> ArrayFunction:
    narrow = writer.kind == "int"
    finish = _finish_number(writer.logical, reader)

    def change(array: pa.Array) -> pa.Array:
        if narrow:
            check_within(array, -(1 << 31), (1 << 31) - 1)
        return finish(array)

    return change


def _finish_number(writer: AvroLogicalType | None, reader: AvroPrimitive | AvroFixed) -> ArrayFunction:
    logical = reader.logical
    if logical is not None and logical.per_day:
        return _make_time_conversion(
            get_time_of_day_factor(writer, logical), logical.per_day, pa.int32() if reader.kind == "int" else pa.int64()
        )
    if logical is None:
        if reader.kind in ("float", "double"):
            wanted = pa.float32() if reader.kind == "float" else pa.float64()
            return lambda array: array.cast(wanted, safe=False)
        return (lambda array: array.cast(pa.int32())) if reader.kind == "int" else lambda array: array
    if logical.name == "date":
        return _convert_dates
    return _make_timestamp_conversion(
        get_micros_per_unit(writer, logical), pa.timestamp("us", None if logical.name.startswith("local-") else "UTC")
    )


def _convert_dates(array: pa.Array) -> pa.Array:
    check_within(array, MIN_DATE, MAX_DATE)
    return array.cast(pa.int32()).view(pa.date32())


def _make_time_conversion(factor: int, limit: int, wanted: pa.DataType) -> ArrayFunction:
    def change(array: pa.Array) -> pa.Array:
        check_within(array, 0, limit // factor - 1)
        return pc.multiply(array.cast(pa.int64()), factor).cast(wanted)

    return change


def _make_timestamp_conversion(factor: int, wanted: pa.DataType) -> ArrayFunction:
    def change(array: pa.Array) -> pa.Array:
        check_within(array, -(-MIN_MICRO // factor), MAX_MICRO // factor)
        return (pc.multiply(array, factor) if factor != 1 else array).view(wanted)

    return change


def _make_symbol_conversion(seen: list[str | None]) -> ArrayFunction:
    symbols = pa.array(seen, pa.string())

    def change(array: pa.Array) -> pa.Array:
        check_within(array, 0, len(symbols) - 1)
        taken = symbols.take(array)
        if taken.null_count != array.null_count:
            raise NeedsRowWise
        return taken

    return change


def _convert_booleans(array: pa.Array) -> pa.Array:
    present = pc.fill_null(array, b"\0") if array.null_count else array
    _, data = get_offsets_and_bytes(present)
    if (data > 1).any():
        raise NeedsRowWise
    mask = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    return pa.array(data.astype(bool), mask=mask)


def get_offsets_and_bytes(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets and bytes of binary values, from the first value on."""
    if not len(array):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    _, ends, data = array.buffers()
    offsets = np.frombuffer(ends, np.int64)[array.offset : array.offset + len(array) + 1]
    inside = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if data else np.zeros(0, np.uint8)
    return offsets - offsets[0], inside


def _make_decimal_conversion(wanted: AvroLogicalType, scale: int) -> ArrayFunction:
    kind = pa.decimal128(wanted.precision, wanted.scale)

    def change(array: pa.Array) -> pa.Array:
        offsets, data = get_offsets_and_bytes(pc.fill_null(array, b"\0") if array.null_count else array)
        sizes = np.diff(offsets)
        longest = int(sizes.max(initial=0))
        if longest > 16:
            raise NeedsRowWise
        out = np.zeros((len(array), 16), np.uint8)
        if len(data):
            # First the sign, then the bytes from the last one on: Arrow's decimals are little-endian.
            first = data[np.minimum(offsets[:-1], len(data) - 1)]
            out[(first > 127) & (sizes > 0)] = 255
            for byte in range(longest):
                has = sizes > byte
                at = offsets[1:] - 1 - byte
                out[:, byte] = np.where(has, data[np.where(has, at, 0)], out[:, byte])
        # The smallest number of 128 bits: Arrow does not notice that it has too many digits.
        if longest == 16 and ((out[:, 15] == 128) & ~out[:, :15].any(axis=1)).any():
            raise NeedsRowWise
        validity = array.is_valid() if array.null_count else None
        unscaled = pa.Array.from_buffers(
            pa.decimal128(38, scale) if scale != wanted.scale else kind,
            len(array),
            [validity.buffers()[1] if validity is not None else None, pa.py_buffer(out)],
        )
        unscaled.validate(full=True)
        return unscaled if scale == wanted.scale else unscaled.cast(kind)

    return change


# --- positions of values in their bytes -----------------------------------------------------------------------------------


class WireLayout(ABC):
    """The positions of a type's values in their bytes."""

    has_branches: bool = False
    """True if there are branch numbers to check."""

    @abstractmethod
    def compute_sizes(self, array: pa.Array) -> np.ndarray:
        """Return the number of bytes of each value; any number for nulls."""

    def check(self, array: pa.Array, starts: np.ndarray, body: np.ndarray) -> None:
        """Check the branch numbers.

        :param starts: the position in ``body`` at which each value begins.
        :raises NeedsRowWise: one of them is another number.
        """
        return None


class FixedSizeLayout(WireLayout):
    """Values of equal size.

    :param size: number of bytes of a value.
    """

    def __init__(self, size: int) -> None:
        self._size = size

    def compute_sizes(self, array: pa.Array) -> np.ndarray:
        return np.full(len(array), self._size, np.int64)


class LongLayout(WireLayout):
    """Integers in zigzag encoding, of one to ten bytes."""

    def compute_sizes(self, array: pa.Array) -> np.ndarray:
        numbers = (pc.fill_null(array, 0) if array.null_count else array).to_numpy()
        return compute_varint_sizes(((numbers << 1) ^ (numbers >> 63)).view(np.uint64))


class BinaryLayout(WireLayout):
    """Bytes or texts, after their length."""

    def compute_sizes(self, array: pa.Array) -> np.ndarray:
        counts = pc.fill_null(pc.binary_length(array), 0).to_numpy().astype(np.int64)
        return counts + compute_varint_sizes((counts << 1).astype(np.uint64))


class OptionalLayout(WireLayout):
    """A union of null and one other type.

    :param present: the byte before a value; ``absent``: the byte of a null.
    """

    has_branches = True

    def __init__(self, value: WireLayout, present: int, absent: int) -> None:
        self._value, self._present, self._absent = value, present, absent

    def compute_sizes(self, array: pa.Array) -> np.ndarray:
        own = self._value.compute_sizes(array)
        if array.null_count:
            own = np.where(array.is_valid().to_numpy(zero_copy_only=False), own, 0)
        return own + 1

    def check(self, array: pa.Array, starts: np.ndarray, body: np.ndarray) -> None:
        valid = array.is_valid()
        there = valid.to_numpy(zero_copy_only=False)
        if (body[starts] != np.where(there, self._present, self._absent)).any():
            raise NeedsRowWise
        if self._value.has_branches:
            self._value.check(array.filter(valid), starts[there] + 1, body)


class AvroRecordLayout(WireLayout):
    """Values one after the other."""

    def __init__(self, parts: Sequence[WireLayout]) -> None:
        self._parts = list(parts)
        self.has_branches = any(p.has_branches for p in parts)

    def compute_sizes(self, array: pa.Array) -> np.ndarray:
        return sum(self.compute_sizes_of(self._split_fields(array)), np.zeros(len(array), np.int64))

    def check(self, array: pa.Array, starts: np.ndarray, body: np.ndarray) -> None:
        fields = self._split_fields(array)
        self.check_of(fields, self.compute_sizes_of(fields), starts, body)

    def _split_fields(self, array: pa.Array) -> list[pa.Array]:
        return [array.field(n) for n in range(len(self._parts))]

    def compute_sizes_of(self, arrays: Sequence[pa.Array]) -> list[np.ndarray]:
        """Return the sizes of each field."""
        return [p.compute_sizes(a) for p, a in zip(self._parts, arrays, strict=True)]

    def check_of(self, arrays: Sequence[pa.Array], sizes: Sequence[np.ndarray], starts: np.ndarray, body: np.ndarray) -> None:
        """Check fields that are separate arrays, and whose sizes are known."""
        for part, array, size in zip(self._parts, arrays, sizes, strict=True):
            if part.has_branches:
                part.check(array, starts, body)
            starts = starts + size


class ArrayLayout(WireLayout):
    """An array in one block."""

    def __init__(self, item: WireLayout) -> None:
        self._item = item
        self.has_branches = item.has_branches

    def compute_sizes(self, array: pa.Array) -> np.ndarray:
        counts, before = self._count_items(array)
        ends = np.append(0, np.cumsum(self._item.compute_sizes(array.flatten())))
        last = np.cumsum(counts)
        return before + ends[last] - ends[last - counts] + (counts > 0)

    def check(self, array: pa.Array, starts: np.ndarray, body: np.ndarray) -> None:
        items = array.flatten()
        counts, before = self._count_items(array)
        sizes = self._item.compute_sizes(items)
        ahead = np.cumsum(sizes) - sizes
        first = np.append(ahead, 0)[np.minimum(np.cumsum(counts) - counts, len(ahead))]
        self._item.check(items, ahead + np.repeat(starts + before - first, counts), body)

    def _count_items(self, array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of items of each array, and the size of that number."""
        counts = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)
        return counts, compute_varint_sizes((counts << 1).astype(np.uint64))
