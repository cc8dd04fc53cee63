"""Avro decoded row by row: this module defines what an Avro value means; :mod:`.avro.tasks.decode` has to agree with it.

Plain Python, without Arrow. A pair of schemas is compiled into functions that read at a position and return the value, in the
form that ``pyarrow.array(values, type)`` takes, and the next position. The rules are those of Avro's schema resolution, but a
number or a text never becomes another value silently, see :class:`.Avro`.

fastavro is no replacement, though the tests write with it: it accepts bytes left over, booleans other than 0 and 1, and ints
beyond 32 bits; it neither converts the units of two versions nor reads the times of Debezium; and its errors name neither the
column nor the value.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable
from dataclasses import replace
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np

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
    merge_number_types,
    read_symbols,
)
from airflow_kafka_spark.formats.text_values import MAX_DATE, MAX_MICRO, MIN_DATE, MIN_MICRO, BadValue

_MANY = 1 << 20


class AvroRowReader:
    """Reads values of one writer.

    :param writer: the schema they were written with.
    :param reader: the schema of the columns.
    """

    def __init__(self, writer: AvroRecord, reader: AvroRecord) -> None:
        self._read = make_value_reader(writer, reader)
        self._names = [f.name for f in reader.fields]

    def read(self, value: bytes, start: int = 0) -> list[Any]:
        """Return one value per field of the reader.

        :param start: the position in ``value`` at which it begins.
        :raises BadValue: it does not fit the writer's schema, or not the reader's.
        """
        try:
            row, end = self._read(value, start)
        except (IndexError, struct.error):
            raise BadValue(f"it ends too early, after {len(value)} bytes") from None
        if end != len(value):
            raise BadValue(f"{len(value) - end} of {len(value)} bytes are left after the last field")
        return [row[name] for name in self._names]


# --- a writer's type as a reader's ---------------------------------------------------------------------------------------


def make_value_reader(writer: AvroSchema, reader: AvroSchema) -> ReadValue:
    """Return the function that reads values of the writer's type as the reader's; if the types are incompatible, it raises for
    every value.
    """
    if isinstance(writer, AvroUnion):
        return _make_union_reader([make_value_reader(branch, reader) for branch in writer.branches])
    if isinstance(reader, AvroUnion):
        at = find_branch_to_read(writer, reader)
        if at is None:
            return _make_incompatible_reader(writer, reader)
        return _make_member_reader(make_value_reader(writer, reader.branches[at]), reader, at)
    if not is_readable_as(writer, reader):
        return _make_incompatible_reader(writer, reader)
    if isinstance(writer, AvroRecord) and isinstance(reader, AvroRecord):
        return _make_record_reader(writer, reader)
    if isinstance(writer, AvroArray) and isinstance(reader, AvroArray):
        return _make_array_reader(writer, reader)
    if isinstance(writer, AvroMap) and isinstance(reader, AvroMap):
        return _make_map_reader(writer, reader)
    if isinstance(writer, AvroEnum) and isinstance(reader, AvroEnum):
        return _make_enum_reader(writer, reader)
    assert isinstance(writer, AvroPrimitive | AvroFixed) and isinstance(reader, AvroPrimitive | AvroFixed)
    return make_scalar_reader(writer, reader)


def _make_incompatible_reader(writer: AvroSchema, reader: AvroSchema) -> ReadValue:
    was, wanted = str(writer), str(reader)
    if was == wanted:
        was, wanted = f"{was} on {writer.kind}", f"{wanted} on {reader.kind}"

    def read(b: bytes, i: int) -> tuple[Any, int]:
        raise BadValue(f"it was written as {was}, expected {wanted}")

    return read


def _make_union_reader(reads: list[ReadValue]) -> ReadValue:
    def read(b: bytes, i: int) -> tuple[Any, int]:
        at, i = read_long(b, i)
        if not 0 <= at < len(reads):
            raise BadValue(f"found branch {at} of a union that has {len(reads)}")
        return reads[at](b, i)

    return read


def _make_member_reader(read_value: ReadValue, union: AvroUnion, at: int) -> ReadValue:
    """Return the reader of one branch's values in the form of the reader's union."""
    if union.branches[at].kind == "null" or len(union.present) == 1:
        return read_value
    if kind := merge_number_types(union):
        return promote(read_value, union.branches[at].kind, kind)
    names = [f"member{n}" for n in range(len(union.present))]
    own = names[sum(b.kind != "null" for b in union.branches[:at])]
    blank = dict.fromkeys(names)

    def read(b: bytes, i: int) -> tuple[Any, int]:
        value, i = read_value(b, i)
        return {**blank, own: value}, i

    return read


def _make_record_reader(writer: AvroRecord, reader: AvroRecord) -> ReadValue:
    steps: list[tuple[str, ReadValue, bool]] = []
    taken: set[str] = set()
    for written in writer.fields:
        field = find_reader_field(written, writer, reader)
        if field is None:
            bare = remove_logical_type(written.type)
            steps.append((written.name, make_value_reader(bare, bare), False))
        else:
            taken.add(field.name)
            steps.append((field.name, make_value_reader(written.type, field.type), True))
    missing = [f for f in reader.fields if f.name not in taken]
    defaults = {f.name: read_default(f) for f in missing if f.default}
    lacking = [f for f in missing if not f.default]

    def read(b: bytes, i: int) -> tuple[dict[str, Any], int]:
        for f in lacking:
            raise BadValue(f"the writer's schema has no such field, expected {f.type}").prepend(f".{f.name}")
        row = dict(defaults)
        for name, read_value, wanted in steps:
            try:
                value, i = read_value(b, i)
            except BadValue as e:
                raise e.prepend(f".{name}") from None
            except (IndexError, struct.error):
                raise BadValue(f"it ends too early, after {len(b)} bytes").prepend(f".{name}") from None
            if wanted:
                row[name] = value
        return row, i

    return read


def _read_block_header(b: bytes, i: int, smallest: int) -> tuple[int, int]:
    """Return the number of items of the next block, and the position after it."""
    count, i = read_long(b, i)
    if count < 0:
        count = -count
        _, i = read_long(b, i)
    if count > (len(b) - i if smallest else _MANY):
        raise BadValue(f"found a block of {count} items where {len(b) - i} bytes are left")
    return count, i


def _make_array_reader(writer: AvroArray, reader: AvroArray) -> ReadValue:
    read_item, smallest = make_value_reader(writer.items, reader.items), compute_smallest_size(writer.items)

    def read(b: bytes, i: int) -> tuple[list[Any], int]:
        items: list[Any] = []
        while True:
            count, i = _read_block_header(b, i, smallest)
            if not count:
                return items, i
            for _ in range(count):
                try:
                    item, i = read_item(b, i)
                except BadValue as e:
                    raise e.prepend(f"[{len(items)}]") from None
                items.append(item)
            if len(items) > _MANY and not smallest:
                raise BadValue(f"found an array of more than {_MANY} items without bytes")

    return read


def _make_map_reader(writer: AvroMap, reader: AvroMap) -> ReadValue:
    read_item = make_value_reader(writer.values, reader.values)

    def read(b: bytes, i: int) -> tuple[list[tuple[str, Any]], int]:
        entries: dict[str, Any] = {}
        while True:
            count, i = _read_block_header(b, i, 1)
            if not count:
                return list(entries.items()), i
            for _ in range(count):
                key, i = read_string(b, i)
                try:
                    entries[key], i = read_item(b, i)
                except BadValue as e:
                    raise e.prepend(f"[{key!r}]") from None

    return read


def remove_logical_type(schema: AvroSchema) -> AvroSchema:
    """Return the underlying type, which a field without a column has to fit."""
    if isinstance(schema, AvroRecord):
        return replace(schema, fields=tuple(replace(f, type=remove_logical_type(f.type)) for f in schema.fields))
    if isinstance(schema, AvroArray):
        return AvroArray(remove_logical_type(schema.items))
    if isinstance(schema, AvroMap):
        return AvroMap(remove_logical_type(schema.values))
    if isinstance(schema, AvroUnion):
        return AvroUnion(tuple(map(remove_logical_type, schema.branches)))
    return replace(schema, logical=None) if isinstance(schema, (AvroPrimitive, AvroFixed)) else schema


def _make_enum_reader(writer: AvroEnum, reader: AvroEnum) -> ReadValue:
    seen = read_symbols(writer, reader)

    def read(b: bytes, i: int) -> tuple[str, int]:
        at, i = read_long(b, i)
        if not 0 <= at < len(seen):
            raise BadValue(f"found symbol {at} of {writer}, which has {len(seen)}")
        symbol = seen[at]
        if symbol is None:
            raise BadValue(f"found `{writer.symbols[at]}`, expected one of {', '.join(reader.symbols)}")
        return symbol, i

    return read


# --- defaults and sizes --------------------------------------------------------------------------------------------------


class BadDefault(Exception):
    """Raised when a default does not fit its field.

    :param name: the field.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def read_default(field: AvroField) -> Any:
    """Return the value of a field that the writer does not have.

    :raises BadDefault: the default is not of the field's type.
    """
    try:
        return _convert_default(field.type, field.default[0])
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError, BadValue):
        raise BadDefault(field.name) from None


def _convert_default(schema: AvroSchema, value: Any) -> Any:
    if isinstance(schema, AvroUnion):
        return _convert_union_default(schema, value)
    if isinstance(schema, AvroRecord):
        return {f.name: _convert_default(f.type, value[f.name]) if f.name in value else read_default(f) for f in schema.fields}
    if isinstance(schema, AvroArray):
        if not isinstance(value, list):
            raise TypeError
        return [_convert_default(schema.items, v) for v in value]
    if isinstance(schema, AvroMap):
        return [(k.encode().decode(), _convert_default(schema.values, v)) for k, v in value.items()]
    if isinstance(schema, AvroEnum):
        if value not in schema.symbols:
            raise ValueError
        return value
    return _convert_scalar_default(schema, value)


def _convert_union_default(schema: AvroUnion, value: object) -> Any:
    # Up to Avro 1.11 a default is of the first branch, since 1.12 of any.
    for at, branch in enumerate(schema.branches):
        try:
            found = _convert_default(branch, value)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, BadValue, BadDefault):
            continue
        return _make_member_reader(_make_constant_reader(found), schema, at)(b"", 0)[0]
    raise ValueError


def _make_constant_reader(value: object) -> ReadValue:
    return lambda b, i: (value, i)


_BITS = {"int": 31, "long": 63}
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "null": (type(None),),
    "boolean": (bool,),
    "int": (int,),
    "long": (int,),
    "float": (int, float, str),
    "double": (int, float, str),
    "bytes": (str,),
    "string": (str,),
    "fixed": (str,),
}


def _convert_scalar_default(schema: AvroPrimitive | AvroFixed, json_value: object) -> Any:
    if not isinstance(json_value, _JSON_TYPES[schema.kind]) or (isinstance(json_value, bool) and schema.kind != "boolean"):
        raise TypeError
    value: Any = json_value
    if schema.kind in _BITS and not -(1 << _BITS[schema.kind]) <= value < 1 << _BITS[schema.kind]:
        raise ValueError
    if schema.kind == "string":
        value.encode()
    if schema.kind in ("float", "double"):
        value = float(value)
        if schema.kind == "float":
            struct.pack("<f", value)
    if schema.kind in ("bytes", "fixed"):
        value = value.encode("latin-1")
        if isinstance(schema, AvroFixed) and len(value) != schema.size:
            raise ValueError
    change = make_logical_conversion(None, schema.logical, isinstance(schema, AvroFixed))
    return change(value) if change else value


def find_bad_defaults(schema: AvroSchema, path: str = "") -> list[str]:
    """Return the paths of the fields whose defaults do not fit them."""
    if isinstance(schema, AvroUnion):
        return [bad for b in schema.branches for bad in find_bad_defaults(b, path)]
    if isinstance(schema, (AvroArray, AvroMap)):
        return find_bad_defaults(schema.items if isinstance(schema, AvroArray) else schema.values, f"{path}[]")
    found: list[str] = []
    for f in schema.fields if isinstance(schema, AvroRecord) else ():
        here = f"{path}.{f.name}" if path else f.name
        try:
            if f.default:
                read_default(f)
        except BadDefault:
            found.append(here)
        found += find_bad_defaults(f.type, here)
    return found


def compute_smallest_size(schema: AvroSchema) -> int:
    """Return the smallest number of bytes of a value."""
    if isinstance(schema, AvroRecord):
        return sum(compute_smallest_size(f.type) for f in schema.fields)
    if isinstance(schema, AvroFixed):
        return schema.size
    return {"null": 0, "float": 4, "double": 8}.get(schema.kind, 1)


# --- scalars --------------------------------------------------------------------------------------------------------------


ReadValue = Callable[[bytes, int], tuple[Any, int]]
"""Reads at a position; returns the value and the next position."""

UUID = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
"""The notation of UUIDs in RFC 4122, which the specification of Avro requires."""
_MASK = (1 << 64) - 1


# --- numbers and lengths -------------------------------------------------------------------------------------------------


def read_long(b: bytes, i: int) -> tuple[int, int]:
    byte = b[i]
    i += 1
    n = byte & 0x7F
    shift = 7
    while byte & 0x80:
        byte = b[i]
        i += 1
        n |= (byte & 0x7F) << shift
        shift += 7
        if shift > 70:
            raise BadValue("found an integer of more than 10 bytes")
    n &= _MASK
    return (n >> 1) ^ -(n & 1), i


def _read_int(b: bytes, i: int) -> tuple[int, int]:
    n, i = read_long(b, i)
    if not -(1 << 31) <= n < 1 << 31:
        raise BadValue(f"found {n}, expected an int of 32 bits")
    return n, i


def _read_bytes(b: bytes, i: int) -> tuple[bytes, int]:
    n, i = read_long(b, i)
    if n < 0 or n > len(b) - i:
        raise BadValue(f"found a length of {n} bytes where {len(b) - i} are left")
    return b[i : i + n], i + n


def read_string(b: bytes, i: int) -> tuple[str, int]:
    data, i = _read_bytes(b, i)
    return _decode_text(data), i


def _decode_text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise BadValue(f"not UTF-8: byte 0x{data[e.start]:02x} at position {e.start}") from None


def _read_boolean(b: bytes, i: int) -> tuple[bool, int]:
    if b[i] > 1:
        raise BadValue(f"found the byte 0x{b[i]:02x}, expected a boolean: 0x00 or 0x01")
    return b[i] == 1, i + 1


def _read_float(b: bytes, i: int) -> tuple[float, int]:
    return struct.unpack_from("<f", b, i)[0], i + 4


def _read_double(b: bytes, i: int) -> tuple[float, int]:
    return struct.unpack_from("<d", b, i)[0], i + 8


def _read_null(b: bytes, i: int) -> tuple[None, int]:
    return None, i


def _make_fixed_reader(size: int) -> ReadValue:
    def read(b: bytes, i: int) -> tuple[bytes, int]:
        if size > len(b) - i:
            raise IndexError
        return b[i : i + size], i + size

    return read


_LEAVES: dict[str, ReadValue] = {
    "null": _read_null,
    "boolean": _read_boolean,
    "int": _read_int,
    "long": read_long,
    "float": _read_float,
    "double": _read_double,
    "bytes": _read_bytes,
    "string": read_string,
}


# --- scalars -------------------------------------------------------------------------------------------------------------


def make_scalar_reader(writer: AvroPrimitive | AvroFixed, reader: AvroPrimitive | AvroFixed) -> ReadValue:
    read_raw = _make_fixed_reader(writer.size) if isinstance(writer, AvroFixed) else _LEAVES[writer.kind]
    if writer.kind == "bytes" and reader.kind == "string":
        read_raw = read_string
    elif writer.kind == "string" and reader.kind == "bytes":
        # The writer wrote a text, so it has to be valid UTF-8.
        read_text = read_raw

        def read_raw(b: bytes, i: int) -> tuple[bytes, int]:
            text, i = read_text(b, i)
            return text.encode("utf-8"), i

    elif writer.kind != reader.kind:
        read_raw = promote(read_raw, writer.kind, reader.kind)
    if (by := find_unit_ratio(writer, reader)) is not None:
        read_raw = _convert_unit(read_raw, *by)
        change = make_logical_conversion(reader.logical, reader.logical, isinstance(reader, AvroFixed))
    else:
        change = make_logical_conversion(writer.logical, reader.logical, isinstance(reader, AvroFixed))
    if change is None:
        return read_raw

    def read(b: bytes, i: int) -> tuple[Any, int]:
        raw, i = read_raw(b, i)
        return change(raw), i

    return read


def promote(read_raw: ReadValue, writer: str, reader: str) -> ReadValue:
    if reader == "long" or writer == "float" or writer == reader:
        return read_raw
    to: Callable[[Any], float] = float if reader == "double" else lambda n: float(np.int64(n).astype(np.float32))

    def read(b: bytes, i: int) -> tuple[Any, int]:
        raw, i = read_raw(b, i)
        return to(raw), i

    return read


def _convert_unit(read_raw: ReadValue, more: int, less: int) -> ReadValue:
    """Return the reader of times in another unit."""

    def read(b: bytes, i: int) -> tuple[int, int]:
        raw, i = read_raw(b, i)
        n, rest = divmod(raw * more, less)
        if rest or not -(1 << 63) <= n < 1 << 63:
            raise BadValue(f"found {raw}, which is no whole number in the unit of the reader's schema")
        return n, i

    return read


def make_logical_conversion(
    writer: AvroLogicalType | None, reader: AvroLogicalType | None, fixed: bool
) -> Callable[[Any], Any] | None:
    """Return the conversion from the written bytes or number to the column's value; None if they are equal."""
    if reader is None:
        return None
    if reader.per_day:
        return partial(_convert_time_of_day, factor=get_time_of_day_factor(writer, reader), limit=reader.per_day)
    if reader.name == "decimal":
        scale = writer.scale if writer and writer.name == "decimal" else reader.scale
        return partial(_convert_decimal, scale=scale, wanted=reader)
    if reader.name == "uuid":
        return (lambda raw: str(uuid.UUID(bytes=raw))) if fixed else None
    if reader.name == "date":
        return _convert_date
    return partial(_to_micros, factor=get_micros_per_unit(writer, reader))


def get_micros_per_unit(writer: AvroLogicalType | None, reader: AvroLogicalType) -> int:
    """Return the microseconds in a unit of the written number: of the writer's type if that has a unit, else of the reader's."""
    return 1_000_000 // ((writer.per_second if writer else 0) or reader.per_second)


def get_time_of_day_factor(writer: AvroLogicalType | None, reader: AvroLogicalType) -> int:
    """Return the factor from the written number to the reader's unit of a time of day."""
    return reader.per_day // ((writer.per_day if writer else 0) or reader.per_day)


def _convert_time_of_day(n: int, factor: int, limit: int) -> int:
    if not 0 <= n * factor < limit:
        raise BadValue(f"found {n}, expected a time of day: 0 to {limit // factor - 1}")
    return n * factor


def _convert_date(days: int) -> int:
    if not MIN_DATE <= days <= MAX_DATE:
        raise BadValue(f"found day {days} after 1970-01-01, expected one in the years 1 to 9999")
    return days


def _to_micros(n: int, factor: int) -> int:
    micros = n * factor
    if not MIN_MICRO <= micros <= MAX_MICRO:
        raise BadValue(f"found {n} {'ms' if factor == 1000 else 'µs'} after 1970, expected a time in the years 1 to 9999")
    return micros


def _convert_decimal(raw: bytes, scale: int, wanted: AvroLogicalType) -> Decimal:
    unscaled = int.from_bytes(raw, "big", signed=True)
    more = wanted.scale - scale
    quotient, rest = (unscaled * 10**more, 0) if more >= 0 else divmod(unscaled, 10**-more)
    if rest or abs(quotient) >= 10**wanted.precision:
        shown = f"{unscaled}e-{scale}" if len(raw) <= 40 else f"a number of {len(raw)} bytes"
        raise BadValue(f"found {shown}, expected decimal({wanted.precision},{wanted.scale})")
    return Decimal((quotient < 0, tuple(map(int, str(abs(quotient)))), -wanted.scale))
