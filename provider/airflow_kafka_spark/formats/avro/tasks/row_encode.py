"""Avro encoded row by row: this module defines how a value is written; :mod:`.avro.tasks.encode` has to agree with it.

Plain Python. A schema and a column's type are compiled into a function that appends a value's bytes. Values are Arrow scalars,
which hold timestamps before year 1 and decimals of 38 digits exactly. A value that does not fit raises :class:`.BadValue` with
the path to the column; nothing is rounded, cut off or changed. fastavro is no replacement: it cuts timestamps to milliseconds,
accepts integers for doubles, and does not name the column.
"""

from __future__ import annotations

import decimal
import re
import struct
import uuid
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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
    find_branch_to_write,
    is_member_struct,
    list_columns,
)
from airflow_kafka_spark.formats.avro.tasks.row_decode import UUID, read_default
from airflow_kafka_spark.formats.text_values import MAX_DATE, MAX_MICRO, MIN_DATE, MIN_MICRO, BadValue
from airflow_kafka_spark.formats.types import Array, Column, DataType, Map, Struct, to_arrow_schema

if TYPE_CHECKING:
    import pyarrow as pa


def encode_long(n: int) -> bytes:
    """Return an integer in Avro's encoding."""
    n = (n << 1) ^ (n >> 63)
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


WriteValue = Callable[[bytearray, Any], None]
"""Appends the bytes of a scalar, which is null only if the type is a union."""

_EXACT = decimal.Context(prec=100)
_SHOWN = 60


def make_value_writer(schema: AvroSchema, column: DataType) -> WriteValue:
    """Return the function that writes a column as a type that accepts it, see :func:`.avro.schema.find_column_mismatches`."""
    if isinstance(schema, AvroUnion):
        return _make_union_writer(schema, column)
    if isinstance(schema, AvroRecord):
        assert isinstance(column, Struct)
        return _make_struct_writer(schema, column)
    if isinstance(schema, AvroArray):
        assert isinstance(column, Array)
        return _make_array_writer(make_value_writer(schema.items, column.element))
    if isinstance(schema, AvroMap):
        assert isinstance(column, Map)
        return _make_map_writer(make_value_writer(schema.values, column.value))
    return _refuse_null(_make_scalar_writer(schema), schema)


def encode_default(field: AvroField) -> bytes:
    """Return a field's default in Avro's encoding."""
    import pyarrow as pa

    (column,) = list_columns(AvroRecord("one", (field,)))
    out = bytearray()
    make_value_writer(field.type, column.type)(out, pa.array([read_default(field)], to_arrow_schema([column]).field(0).type)[0])
    return bytes(out)


def _refuse_null(write_value: WriteValue, schema: AvroSchema) -> WriteValue:
    def write(out: bytearray, scalar: pa.Scalar) -> None:
        if not scalar.is_valid:
            raise BadValue(f"found null, expected {schema}")
        write_value(out, scalar)

    return write


def _make_union_writer(schema: AvroUnion, column: DataType) -> WriteValue:
    null = next((at for at, b in enumerate(schema.branches) if b.kind == "null"), None)
    write_value = (
        _make_members_writer(schema, column) if is_member_struct(schema, column) else _make_branch_writer(schema, column)
    )

    def write(out: bytearray, scalar: pa.Scalar) -> None:
        if scalar.is_valid:
            write_value(out, scalar)
        elif null is None:
            raise BadValue(f"found null, expected one of {schema}")
        else:
            out += encode_long(null)

    return write


def _make_branch_writer(schema: AvroUnion, column: DataType) -> WriteValue:
    at = find_branch_to_write(schema, column)
    assert at is not None
    number, write_value = encode_long(at), make_value_writer(schema.branches[at], column)

    def write(out: bytearray, scalar: pa.Scalar) -> None:
        out += number
        write_value(out, scalar)

    return write


def _make_members_writer(schema: AvroUnion, column: DataType) -> WriteValue:
    assert isinstance(column, Struct)
    writers = [
        (name.name, encode_long(schema.branches.index(branch)), make_value_writer(branch, name.type))
        for branch, name in zip(schema.present, column.fields, strict=True)
    ]

    def write(out: bytearray, scalar: pa.StructScalar) -> None:
        there = [(name, number, write_value) for name, number, write_value in writers if scalar[name].is_valid]
        if len(there) != 1:
            raise BadValue(f"found {len(there)} members that are not null, expected one of {schema}")
        name, number, write_value = there[0]
        out += number
        write_value(out, scalar[name])

    return write


def _make_struct_writer(schema: AvroRecord, column: Struct) -> WriteValue:
    fields = make_record_writer(schema, column.fields)

    def write(out: bytearray, scalar: pa.StructScalar) -> None:
        if not scalar.is_valid:
            raise BadValue(f"found null, expected {schema}")
        fields(out, scalar)

    return write


def make_record_writer(schema: AvroRecord, columns: Sequence[Column]) -> WriteValue:
    """Return the function that writes a record's fields, of an object with values by name."""
    types = {c.name: c.type for c in columns}
    steps = [(f.name, make_value_writer(f.type, types[f.name]) if f.name in types else encode_default(f)) for f in schema.fields]

    def write(out: bytearray, row: Any) -> None:
        for name, step in steps:
            if isinstance(step, bytes):
                out += step
                continue
            try:
                step(out, row[name])
            except BadValue as e:
                raise e.prepend(f".{name}") from None

    return write


def _make_array_writer(write_item: WriteValue) -> WriteValue:
    def write(out: bytearray, scalar: pa.ListScalar) -> None:
        if not scalar.is_valid:
            raise BadValue("found null, expected an array")
        if len(scalar):
            out += encode_long(len(scalar))
        for at, item in enumerate(scalar):
            try:
                write_item(out, item)
            except BadValue as e:
                raise e.prepend(f"[{at}]") from None
        out += b"\0"

    return write


def _make_map_writer(write_value: WriteValue) -> WriteValue:
    def write(out: bytearray, scalar: pa.MapScalar) -> None:
        if not scalar.is_valid:
            raise BadValue("found null, expected a map")
        entries = scalar.values
        if len(entries):
            out += encode_long(len(entries))
        for entry in entries:
            _write_text(out, entry[0])
            try:
                write_value(out, entry[1])
            except BadValue as e:
                raise e.prepend(f"[{entry[0].as_py()!r}]") from None
        out += b"\0"

    return write


# --- scalars -------------------------------------------------------------------------------------------------------------


def _make_scalar_writer(schema: AvroPrimitive | AvroFixed | AvroEnum) -> WriteValue:
    if isinstance(schema, AvroEnum):
        return _make_enum_writer(schema)
    logical = schema.logical
    if logical is not None and logical.name == "decimal":
        return _make_decimal_writer(logical, schema.size if isinstance(schema, AvroFixed) else 0)
    if logical is not None and logical.name == "uuid" and isinstance(schema, AvroFixed):
        return _write_uuid
    if isinstance(schema, AvroFixed):
        return _make_fixed_writer(schema.size)
    if schema.kind in ("int", "long"):
        return _make_number_writer(schema.kind, logical)
    return _write_uuid_text if logical is not None and logical.name == "uuid" else _LEAVES[schema.kind]


def _write_boolean(out: bytearray, scalar: pa.Scalar) -> None:
    out.append(scalar.as_py())


def _write_float(out: bytearray, scalar: pa.Scalar) -> None:
    out += struct.pack("<f", scalar.as_py())


def _write_double(out: bytearray, scalar: pa.Scalar) -> None:
    out += struct.pack("<d", scalar.as_py())


def _write_bytes(out: bytearray, scalar: pa.Scalar) -> None:
    value = scalar.as_py()
    out += encode_long(len(value))
    out += value


def _write_text(out: bytearray, scalar: pa.Scalar) -> None:
    value = scalar.as_buffer().to_pybytes()
    try:
        value.decode("utf-8")
    except UnicodeDecodeError as e:
        raise BadValue(f"not UTF-8: byte 0x{value[e.start]:02x} at position {e.start}") from None
    out += encode_long(len(value))
    out += value


_LEAVES: dict[str, WriteValue] = {
    "boolean": _write_boolean,
    "float": _write_float,
    "double": _write_double,
    "bytes": _write_bytes,
    "string": _write_text,
}


def _make_number_writer(kind: str, logical: AvroLogicalType | None) -> WriteValue:
    if logical is not None and logical.name == "date":
        return _write_date
    if logical is not None and logical.per_second:
        return _make_instant_writer(logical)
    if logical is not None and logical.per_day:
        return _make_time_writer(logical.per_day)
    bits = 31 if kind == "int" else 63

    def write(out: bytearray, scalar: pa.Scalar) -> None:
        n = scalar.as_py()
        if not -(1 << bits) <= n < 1 << bits:
            raise BadValue(f"found {n}, expected an {kind} of {bits + 1} bits")
        out += encode_long(n)

    return write


def _write_date(out: bytearray, scalar: pa.Scalar) -> None:
    if not MIN_DATE <= scalar.value <= MAX_DATE:
        raise BadValue(f"found day {scalar.value} after 1970-01-01, expected one in the years 1 to 9999")
    out += encode_long(scalar.value)


def _make_time_writer(limit: int) -> WriteValue:
    def write(out: bytearray, scalar: pa.Scalar) -> None:
        if not 0 <= scalar.as_py() < limit:
            raise BadValue(f"found {scalar.as_py()}, expected a time of day: 0 to {limit - 1}")
        out += encode_long(scalar.as_py())

    return write


def _make_instant_writer(logical: AvroLogicalType) -> WriteValue:
    factor = 1_000_000 // logical.per_second

    def write(out: bytearray, scalar: pa.Scalar) -> None:
        micros = scalar.value
        if not MIN_MICRO <= micros <= MAX_MICRO:
            raise BadValue(f"found {micros} µs after 1970, expected a time in the years 1 to 9999")
        if micros % factor:
            raise BadValue(f"found {micros} µs after 1970, expected whole milliseconds ({logical.name})")
        out += encode_long(micros // factor)

    return write


def _make_decimal_writer(logical: AvroLogicalType, size: int) -> WriteValue:
    def write(out: bytearray, scalar: pa.Scalar) -> None:
        value = scalar.as_py()
        unscaled = value.scaleb(logical.scale, _EXACT)
        n = int(unscaled)
        if n != unscaled or abs(n) >= 10**logical.precision:
            raise BadValue(f"found {value}, expected decimal({logical.precision},{logical.scale})")
        data = n.to_bytes(size or (8 + (n + (n < 0)).bit_length()) // 8, "big", signed=True)
        out += data if size else encode_long(len(data)) + data

    return write


def _make_fixed_writer(size: int) -> WriteValue:
    def write(out: bytearray, scalar: pa.Scalar) -> None:
        value = scalar.as_py()
        if len(value) != size:
            raise BadValue(f"found {len(value)} bytes, expected {size}")
        out += value

    return write


def _write_uuid_text(out: bytearray, scalar: pa.Scalar) -> None:
    value = bytearray()
    _write_text(value, scalar)
    if not re.fullmatch(UUID, scalar.as_py()):
        raise BadValue(f"found {scalar.as_py()[:_SHOWN]!r}, expected a UUID")
    out += value


def _write_uuid(out: bytearray, scalar: pa.Scalar) -> None:
    try:
        out += uuid.UUID(scalar.as_py()).bytes
    except ValueError:
        raise BadValue(f"found {scalar.as_py()[:_SHOWN]!r}, expected a UUID") from None


def _make_enum_writer(schema: AvroEnum) -> WriteValue:
    numbers = {symbol: encode_long(n) for n, symbol in enumerate(schema.symbols)}

    def write(out: bytearray, scalar: pa.Scalar) -> None:
        symbol = scalar.as_py()
        if symbol not in numbers:
            raise BadValue(f"found {symbol[:_SHOWN]!r}, expected one of {', '.join(schema.symbols)}")
        out += numbers[symbol]

    return write
