"""Avro encoded in tasks: whole batches with Arrow and NumPy; rows that do not fit are found by :mod:`.avro.tasks.row_encode`.

Every part of a value is a column of bytes (an integer, a length, the bytes of a text); the concatenated parts of a row are its
value. So only the last step, the concatenation, touches every row, and Arrow does it. The items of arrays are contiguous
already: the bytes of an array are found by its offsets among them.

Values that might not fit raise :class:`.NeedsRowWise`.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.formats.avro.schema import (
    AvroArray,
    AvroEnum,
    AvroFixed,
    AvroLogicalType,
    AvroMap,
    AvroPrimitive,
    AvroRecord,
    AvroSchema,
    AvroUnion,
    find_branch_to_write,
    is_member_struct,
)
from airflow_kafka_spark.formats.avro.tasks.row_decode import UUID
from airflow_kafka_spark.formats.avro.tasks.row_encode import encode_default, encode_long, make_record_writer, make_value_writer
from airflow_kafka_spark.formats.base import Encoded, Encoder
from airflow_kafka_spark.formats.tasks.base import NeedsRowWise, describe_invalid_utf8, get_values_or_raise
from airflow_kafka_spark.formats.text_values import MAX_DATE, MAX_MICRO, MIN_DATE, MIN_MICRO, BadValue
from airflow_kafka_spark.formats.types import Array, Column, DataType, Map, Struct

DIVIDED_ROWS = 512
"""The size of the parts in which a batch is tried again. Smaller parts cost more than they save."""


class AvroEncoder(Encoder):
    """The encoder of :class:`~airflow_kafka_spark.formats.avro.format.Avro`.

    :param schema: the schema to write: a record whose fields are the columns, or another type for one column.
    :param columns: the columns and their types, which the schema accepts.
    :param header: the bytes before each value; empty without Confluent's wire format.
    """

    def __init__(self, schema: AvroSchema, columns: tuple[Column, ...], header: bytes = b"") -> None:
        self.schema, self.columns = schema, columns
        self._header = header
        if isinstance(schema, AvroRecord):
            self._pieces, self._write = make_record_encoder(schema, columns), make_record_writer(schema, columns)
            return
        (column,) = columns
        parts, write = make_value_encoder(schema, column.type), make_value_writer(schema, column.type)
        self._pieces, self._write = lambda rows: parts(rows[column.name]), lambda out, row: write(out, row[column.name])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.schema, self.columns, self._header)

    def encode(self, rows: Mapping[str, pa.Array]) -> pa.Array:
        """Return the rows' values. If the schema is no record, a null has no value.

        :raises RowRejected: a row does not fit the schema.
        """
        columns = {c.name: rows[c.name] for c in self.columns}
        return get_values_or_raise(self._encode(columns, np.ones(len(columns[self.columns[0].name]), bool)))

    def encode_struct(self, rows: pa.StructArray) -> Encoded:
        """Encode the rows of a struct column whose fields are in the order of the columns; a null has no value."""
        present = rows.drop_null()
        columns = {c.name: present.field(n) for n, c in enumerate(self.columns)}
        return self._encode(columns, rows.is_valid().to_numpy(zero_copy_only=False))

    def _encode(self, columns: Mapping[str, pa.Array], there: np.ndarray) -> Encoded:
        """Encode columns that hold only some of the rows.

        :param there: True for each row that the columns hold.
        """
        if not isinstance(self.schema, AvroRecord):
            ((name, column),) = columns.items()
            there = there.copy()
            there[there] = column.is_valid().to_numpy(zero_copy_only=False)
            columns = {name: column.drop_null()}
        positions = np.flatnonzero(there)
        parts = list(self._encode_in_parts(columns, positions))
        found = parts[0] if len(parts) == 1 else _concatenate_parts(parts)
        if len(positions) == len(there):
            return found
        there, values = there.copy(), found.values.drop_null() if found.bad else found.values
        there[[at for at, _ in found.bad]] = False
        return Encoded(scatter_values(values, there, nulls=True), found.bad)

    def _encode_in_parts(self, columns: Mapping[str, pa.Array], positions: np.ndarray) -> Iterator[Encoded]:
        """Yield all rows encoded as a batch; if that fails, in parts, so that a row that does not fit affects only a few
        others.
        """
        try:
            yield Encoded(join_parts([self._header, *self._pieces(columns)], len(positions)))
        except NeedsRowWise:
            if len(positions) <= DIVIDED_ROWS:
                yield self.encode_row_wise(columns, positions.tolist())
                return
            for at in range(0, len(positions), DIVIDED_ROWS):
                yield from self._encode_in_parts(
                    {name: c.slice(at, DIVIDED_ROWS) for name, c in columns.items()}, positions[at : at + DIVIDED_ROWS]
                )

    def encode_row_wise(self, columns: Mapping[str, pa.Array], positions: Sequence[int]) -> Encoded:
        """Encode rows one by one, with the reasons of those that do not fit.

        :param positions: the position of each row among all rows.
        """
        made: list[bytes | None] = []
        bad: list[tuple[int, str]] = []
        for at, position in enumerate(positions):
            out = bytearray(self._header)
            try:
                self._write(out, {name: column[at] for name, column in columns.items()})
                made.append(bytes(out))
            except BadValue as e:
                if not isinstance(self.schema, AvroRecord):
                    e.prepend(f".{self.columns[0].name}")
                made.append(None)
                bad.append((position, e.reason))
            except UnicodeDecodeError as e:
                made.append(None)
                bad.append((position, describe_invalid_utf8(e)))
        return Encoded(pa.array(made, pa.binary()), tuple(bad))


def _concatenate_parts(parts: Sequence[Encoded]) -> Encoded:
    return Encoded(pa.concat_arrays([part.values for part in parts]), tuple(bad for part in parts for bad in part.bad))


# --- whole batches --------------------------------------------------------------------------------------------------------


BytesPart: TypeAlias = "bytes | pa.Array"
"""Bytes that all rows share, or a column of bytes without nulls."""
WriteParts = Callable[[pa.Array], list[BytesPart]]
"""Returns the parts of a column's values; the column holds nulls only if the type is a union."""


def join_parts(parts: Sequence[BytesPart], rows: int) -> pa.Array:
    """Return the concatenated parts of each row."""
    # Consecutive constants are merged: each part costs a step for every row.
    fewer: list[BytesPart] = []
    for part in parts:
        if isinstance(part, bytes) and fewer and isinstance(fewer[-1], bytes):
            fewer.append(fewer.pop() + part)
        else:
            fewer.append(part)
    if len(fewer) == 1 and isinstance(fewer[0], bytes):
        return pa.array(fewer * rows, pa.binary())
    return fewer[0] if len(fewer) == 1 else pc.binary_join_element_wise(*fewer, b"")


def make_value_encoder(schema: AvroSchema, column: DataType) -> WriteParts:
    """Return the function that writes a column as a type that accepts it, see :func:`.avro.schema.find_column_mismatches`."""
    if isinstance(schema, AvroUnion):
        return _make_union_encoder(schema, column)
    if isinstance(schema, AvroRecord):
        assert isinstance(column, Struct)
        fields = make_record_encoder(schema, column.fields)
        names = [f.name for f in column.fields]
        return _refuse_nulls(lambda array: fields({name: array.field(n) for n, name in enumerate(names)}))
    if isinstance(schema, AvroArray):
        assert isinstance(column, Array)
        return _refuse_nulls(_make_array_encoder(make_value_encoder(schema.items, column.element)))
    if isinstance(schema, AvroMap):
        assert isinstance(column, Map)
        return _refuse_nulls(_make_map_encoder(make_value_encoder(schema.values, column.value)))
    return _refuse_nulls(_make_scalar_encoder(schema))


def make_record_encoder(schema: AvroRecord, columns: Sequence[Column]) -> Callable[[Mapping[str, pa.Array]], list[BytesPart]]:
    """Return the function that writes columns, given by name, as the fields of a record."""
    types = {c.name: c.type for c in columns}
    steps = [(f.name, make_value_encoder(f.type, types[f.name]) if f.name in types else encode_default(f)) for f in schema.fields]

    def write(rows: Mapping[str, pa.Array]) -> list[BytesPart]:
        parts: list[BytesPart] = []
        for name, step in steps:
            parts += [step] if isinstance(step, bytes) else step(rows[name])
        return parts

    return write


def _refuse_nulls(write_values: WriteParts) -> WriteParts:
    def write(array: pa.Array) -> list[BytesPart]:
        if array.null_count:
            raise NeedsRowWise
        return write_values(array)

    return write


def make_binary_array(sizes: np.ndarray, data: np.ndarray | pa.Buffer | None, there: np.ndarray | None = None) -> pa.Array:
    """Return contiguous bytes as a binary column.

    :param sizes: the size of each value.
    :param data: the bytes.
    :param there: False for nulls; None if there are no nulls.
    """
    ends = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=ends[1:])
    return _slice_at(ends, data, there)


def _slice_at(ends: np.ndarray, data: np.ndarray | pa.Buffer | None, there: np.ndarray | None = None) -> pa.Array:
    if ends[-1] > np.iinfo(np.int32).max:
        raise NeedsRowWise
    held = data if isinstance(data, pa.Buffer) else pa.py_buffer(b"" if data is None else np.ascontiguousarray(data))
    known = None if there is None else pa.array(there).buffers()[1]
    return pa.Array.from_buffers(pa.binary(), len(ends) - 1, [known, pa.py_buffer(ends.astype(np.int32)), held])


def scatter_values(dense: pa.Array, there: np.ndarray, nulls: bool = False) -> pa.Array:
    """Return a column with the values at the positions where ``there`` is True, and empty values (or nulls) elsewhere. Copies no
    values.

    :param dense: the values.
    """
    ends, data = _read_ends(dense)
    sizes = np.zeros(len(there), np.int64)
    sizes[there] = np.diff(ends)
    inside = data.slice(int(ends[0]), int(ends[-1] - ends[0])) if data is not None else None
    return make_binary_array(sizes, inside, there if nulls else None)


def _read_ends(column: pa.Array) -> tuple[np.ndarray, pa.Buffer | None]:
    if not len(column):
        return np.zeros(1, np.int64), None
    _, ends, data = column.buffers()
    return np.frombuffer(ends, np.int32)[column.offset : column.offset + len(column) + 1].astype(np.int64), data


# --- unions --------------------------------------------------------------------------------------------------------------


def _make_union_encoder(schema: AvroUnion, column: DataType) -> WriteParts:
    write_values = (
        _make_members_encoder(schema, column) if is_member_struct(schema, column) else _make_branch_encoder(schema, column)
    )
    null = next((at for at, b in enumerate(schema.branches) if b.kind == "null"), None)
    if null is None:
        return _refuse_nulls(write_values)
    absent = encode_long(null)

    def write(array: pa.Array) -> list[BytesPart]:
        if not array.null_count:
            return write_values(array)
        there = array.is_valid().to_numpy(zero_copy_only=False)
        present = array.drop_null()
        values = scatter_values(join_parts(write_values(present), len(present)), there)
        return [scatter_values(pa.array([absent] * (len(array) - len(present)), pa.binary()), ~there), values]

    return write


def _make_branch_encoder(schema: AvroUnion, column: DataType) -> WriteParts:
    at = find_branch_to_write(schema, column)
    assert at is not None
    number, write_values = encode_long(at), make_value_encoder(schema.branches[at], column)
    return lambda array: [number, *write_values(array)]


def _make_members_encoder(schema: AvroUnion, column: DataType) -> WriteParts:
    assert isinstance(column, Struct)
    writers = [
        (encode_long(schema.branches.index(branch)), make_value_encoder(branch, member.type))
        for branch, member in zip(schema.present, column.fields, strict=True)
    ]

    def write(array: pa.Array) -> list[BytesPart]:
        members = [array.field(n) for n in range(len(writers))]
        there = [m.is_valid().to_numpy(zero_copy_only=False) for m in members]
        if (np.sum(there, axis=0) != 1).any():
            raise NeedsRowWise
        parts: list[BytesPart] = []
        for (number, write_values), member, here in zip(writers, members, there, strict=True):
            present = member.drop_null()
            parts.append(scatter_values(join_parts([number, *write_values(present)], len(present)), here))
        return parts

    return write


# --- arrays and maps -----------------------------------------------------------------------------------------------------


def _make_array_encoder(write_items: WriteParts) -> WriteParts:
    def write(array: pa.Array) -> list[BytesPart]:
        ends = np.asarray(array.offsets).astype(np.int64)
        items = array.values.slice(int(ends[0]), int(ends[-1] - ends[0]))
        return _encode_blocks(ends - ends[0], join_parts(write_items(items), len(items)))

    return write


def _make_map_encoder(write_values: WriteParts) -> WriteParts:
    def write(array: pa.Array) -> list[BytesPart]:
        ends = np.asarray(array.offsets).astype(np.int64)
        first, count = int(ends[0]), int(ends[-1] - ends[0])
        entries = [*_encode_text(array.keys.slice(first, count)), *write_values(array.items.slice(first, count))]
        return _encode_blocks(ends - first, join_parts(entries, count))

    return write


def _encode_blocks(ends: np.ndarray, items: pa.Array) -> list[BytesPart]:
    """Return arrays as one block each, and the end of blocks.

    :param ends: the offsets of the arrays among the items, beginning with 0.
    """
    counts = np.diff(ends)
    there = counts > 0
    among, data = _read_ends(items)
    return [scatter_values(_encode_long(counts[there]), there), _slice_at(among[ends], data), b"\0"]


# --- scalars -------------------------------------------------------------------------------------------------------------


def _make_scalar_encoder(schema: AvroPrimitive | AvroFixed | AvroEnum) -> WriteParts:
    if isinstance(schema, AvroEnum):
        return _make_enum_encoder(schema)
    logical = schema.logical
    if logical is not None and logical.name == "decimal":
        return _make_decimal_encoder(logical, schema.size if isinstance(schema, AvroFixed) else 0)
    if isinstance(schema, AvroFixed):
        return _encode_uuid if logical is not None and logical.name == "uuid" else _make_fixed_encoder(schema.size)
    if schema.kind in ("int", "long"):
        return _make_number_encoder(schema.kind, logical)
    return _encode_uuid_text if logical is not None and logical.name == "uuid" else _LEAVES[schema.kind]


def _encode_long(numbers: np.ndarray) -> pa.Array:
    """Return integers in Avro's encoding."""
    signed = numbers.astype(np.int64)
    left = ((signed << 1) ^ (signed >> 63)).view(np.uint64)
    sizes = compute_varint_sizes(left)
    widest = int(sizes.max(initial=1))
    out = np.empty((len(left), widest), np.uint8)
    for digit in range(widest):
        out[:, digit] = (left & np.uint64(0x7F)) | np.where(sizes > digit + 1, np.uint64(0x80), np.uint64(0))
        left = left >> np.uint64(7)
    return make_binary_array(sizes, out[np.arange(widest) < sizes[:, None]] if widest > 1 else out)


def _encode_fixed_width(size: int, data: np.ndarray) -> pa.Array:
    return make_binary_array(np.full(len(data), size, np.int64), data)


def _encode_boolean(array: pa.Array) -> list[BytesPart]:
    return [_encode_fixed_width(1, np.asarray(array.cast(pa.uint8())))]


def _encode_float(array: pa.Array) -> list[BytesPart]:
    return [_encode_fixed_width(4, np.asarray(array.cast(pa.float32())).astype("<f4"))]


def _encode_double(array: pa.Array) -> list[BytesPart]:
    return [_encode_fixed_width(8, np.asarray(array.cast(pa.float64())).astype("<f8"))]


def _encode_bytes(array: pa.Array) -> list[BytesPart]:
    return [_encode_long(np.asarray(pc.binary_length(array))), array.cast(pa.binary())]


def _encode_text(array: pa.Array) -> list[BytesPart]:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        raise NeedsRowWise from None
    return _encode_bytes(array)


def _encode_uuid_text(array: pa.Array) -> list[BytesPart]:
    if not pc.all(pc.match_substring_regex(array.cast(pa.string()), f"^{UUID}$"), min_count=0).as_py():
        raise NeedsRowWise
    return _encode_text(array)


_LEAVES: dict[str, WriteParts] = {
    "boolean": _encode_boolean,
    "float": _encode_float,
    "double": _encode_double,
    "bytes": _encode_bytes,
    "string": _encode_text,
}


def _check_within(numbers: np.ndarray, low: int, high: int) -> None:
    if len(numbers) and (int(numbers.min()) < low or int(numbers.max()) > high):
        raise NeedsRowWise


def _make_number_encoder(kind: str, logical: AvroLogicalType | None) -> WriteParts:
    low, high, factor, wanted = -(1 << 63), (1 << 63) - 1, 1, pa.int64()
    if logical is not None and logical.name == "date":
        low, high, wanted = MIN_DATE, MAX_DATE, pa.int32()
    elif logical is not None and logical.per_second:
        low, high, factor = MIN_MICRO, MAX_MICRO, 1_000_000 // logical.per_second
    elif logical is not None and logical.per_day:
        low, high = 0, logical.per_day - 1
    elif kind == "int":
        low, high = -(1 << 31), (1 << 31) - 1

    def write(array: pa.Array) -> list[BytesPart]:
        numbers = np.asarray(array.cast(wanted))
        _check_within(numbers, low, high)
        if factor > 1:
            if (numbers % factor).any():
                raise NeedsRowWise
            numbers = numbers // factor
        return [_encode_long(numbers)]

    return write


def _make_decimal_encoder(logical: AvroLogicalType, size: int) -> WriteParts:
    wanted = pa.decimal128(logical.precision, logical.scale)

    def write(array: pa.Array) -> list[BytesPart]:
        try:
            cast = array.cast(wanted)
        except pa.ArrowInvalid:
            raise NeedsRowWise from None
        held = np.frombuffer(cast.buffers()[1], np.uint8).reshape(-1, 16)[cast.offset : cast.offset + len(cast)]
        # Arrow's decimals are little-endian, Avro's big-endian.
        out = held[:, ::-1]
        if size:
            sign = np.repeat(np.where(out[:, :1] > 127, 255, 0).astype(np.uint8), max(size - 16, 0), axis=1)
            return [_encode_fixed_width(size, np.concatenate([sign, out[:, max(16 - size, 0) :]], axis=1))]
        sizes = _count_needed_bytes(out)
        return [_encode_long(sizes), make_binary_array(sizes, out[np.arange(16) >= 16 - sizes[:, None]])]

    return write


def _count_needed_bytes(numbers: np.ndarray) -> np.ndarray:
    """Return the number of bytes that a number needs, of its 16: without those that only repeat its sign, and at least one."""
    bare = numbers ^ np.where(numbers[:, :1] > 127, 255, 0).astype(np.uint8)
    first = np.where(bare.any(axis=1), (bare != 0).argmax(axis=1), 15)
    # The first remaining bit has to be the sign.
    signed = (bare[np.arange(len(bare)), first] > 127) & (first > 0)
    return (16 - first + signed).astype(np.int64)


def _make_fixed_encoder(size: int) -> WriteParts:
    def write(array: pa.Array) -> list[BytesPart]:
        if (np.asarray(pc.binary_length(array)) != size).any():
            raise NeedsRowWise
        return [array.cast(pa.binary())]

    return write


def _encode_uuid(array: pa.Array) -> list[BytesPart]:
    try:
        return [pa.array([uuid.UUID(text).bytes for text in array.to_pylist()], pa.binary())]
    except ValueError:
        raise NeedsRowWise from None


def _make_enum_encoder(schema: AvroEnum) -> WriteParts:
    symbols = pa.array(schema.symbols, pa.string())

    def write(array: pa.Array) -> list[BytesPart]:
        numbers = pc.index_in(array, value_set=symbols)
        if numbers.null_count:
            raise NeedsRowWise
        return [_encode_long(np.asarray(numbers))]

    return write


def compute_varint_sizes(numbers: np.ndarray) -> np.ndarray:
    """Return the encoded sizes of unsigned integers."""
    sizes = np.ones(len(numbers), np.int64)
    largest = int(numbers.max(initial=0))
    for bits in range(7, 64, 7):
        if largest < 1 << bits:
            break
        sizes += numbers >= np.uint64(1 << bits)
    return sizes
