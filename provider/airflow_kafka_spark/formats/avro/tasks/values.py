"""Scalars of Avro: how they stand in the bytes, and what columns hold of them. Plain Python."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from typing import Any

import numpy as np

from airflow_kafka_spark.formats.avro.resolution import recounted
from airflow_kafka_spark.formats.avro.schema import Fixed, Leaf, Logical
from airflow_kafka_spark.formats.text import BadValue

Read = Callable[[bytes, int], tuple[Any, int]]
"""Reads at a position; gives the value and the next position."""

UUID = "[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
"""A pattern, of what the specification of Avro wants: RFC 4122."""
MIN_DATE, MAX_DATE = -719_162, 2_932_896
MIN_MICRO, MAX_MICRO = MIN_DATE * 86_400_000_000, (MAX_DATE + 1) * 86_400_000_000 - 1
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


def _int(b: bytes, i: int) -> tuple[int, int]:
    n, i = read_long(b, i)
    if not -(1 << 31) <= n < 1 << 31:
        raise BadValue(f"found {n}, expected an int of 32 bits")
    return n, i


def _bytes(b: bytes, i: int) -> tuple[bytes, int]:
    n, i = read_long(b, i)
    if n < 0 or n > len(b) - i:
        raise BadValue(f"found a length of {n} bytes where {len(b) - i} are left")
    return b[i : i + n], i + n


def read_string(b: bytes, i: int) -> tuple[str, int]:
    data, i = _bytes(b, i)
    return _text(data), i


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise BadValue(f"not UTF-8: byte 0x{data[e.start]:02x} at position {e.start}") from None


def _boolean(b: bytes, i: int) -> tuple[bool, int]:
    if b[i] > 1:
        raise BadValue(f"found the byte 0x{b[i]:02x}, expected a boolean: 0x00 or 0x01")
    return b[i] == 1, i + 1


def _float(b: bytes, i: int) -> tuple[float, int]:
    return struct.unpack_from("<f", b, i)[0], i + 4


def _double(b: bytes, i: int) -> tuple[float, int]:
    return struct.unpack_from("<d", b, i)[0], i + 8


def _null(b: bytes, i: int) -> tuple[None, int]:
    return None, i


def _exactly(size: int) -> Read:
    def read(b: bytes, i: int) -> tuple[bytes, int]:
        if size > len(b) - i:
            raise IndexError
        return b[i : i + size], i + size

    return read


_LEAVES: dict[str, Read] = {
    "null": _null,
    "boolean": _boolean,
    "int": _int,
    "long": read_long,
    "float": _float,
    "double": _double,
    "bytes": _bytes,
    "string": read_string,
}


# --- scalars -------------------------------------------------------------------------------------------------------------


def scalar(writer: Leaf | Fixed, reader: Leaf | Fixed) -> Read:
    read_raw = _exactly(writer.size) if isinstance(writer, Fixed) else _LEAVES[writer.kind]
    if writer.kind == "bytes" and reader.kind == "string":
        read_raw = read_string
    elif writer.kind == "string" and reader.kind == "bytes":
        # Checked all the same: what was written is a text.
        read_text = read_raw

        def read_raw(b: bytes, i: int) -> tuple[bytes, int]:
            text, i = read_text(b, i)
            return text.encode("utf-8"), i

    elif writer.kind != reader.kind:
        read_raw = promoting(read_raw, writer.kind, reader.kind)
    if (by := recounted(writer, reader)) is not None:
        read_raw = _recounting(read_raw, *by)
        change = converting(reader.logical, reader.logical, isinstance(reader, Fixed))
    else:
        change = converting(writer.logical, reader.logical, isinstance(reader, Fixed))
    if change is None:
        return read_raw

    def read(b: bytes, i: int) -> tuple[Any, int]:
        raw, i = read_raw(b, i)
        return change(raw), i

    return read


def promoting(read_raw: Read, writer: str, reader: str) -> Read:
    if reader == "long" or writer == "float" or writer == reader:
        return read_raw
    to: Callable[[Any], float] = float if reader == "double" else lambda n: float(np.int64(n).astype(np.float32))

    def read(b: bytes, i: int) -> tuple[Any, int]:
        raw, i = read_raw(b, i)
        return to(raw), i

    return read


def _recounting(read_raw: Read, more: int, less: int) -> Read:
    """The same times by other units."""

    def read(b: bytes, i: int) -> tuple[int, int]:
        raw, i = read_raw(b, i)
        n, rest = divmod(raw * more, less)
        if rest or not -(1 << 63) <= n < 1 << 63:
            raise BadValue(f"found {raw}, which is no whole number in the unit of the reader's schema")
        return n, i

    return read


def converting(writer: Logical | None, reader: Logical | None, fixed: bool) -> Callable[[Any], Any] | None:
    """What makes a column's value of the bytes or the number that was written; None where that is it."""
    if reader is None:
        return None
    if reader.per_day:
        return partial(_of_day, factor=day_factor_of(writer, reader), limit=reader.per_day)
    if reader.name == "decimal":
        scale = writer.scale if writer and writer.name == "decimal" else reader.scale
        return partial(_decimal, scale=scale, wanted=reader)
    if reader.name == "uuid":
        return (lambda raw: str(uuid.UUID(bytes=raw))) if fixed else None
    if reader.name == "date":
        return _date
    return partial(_micros, factor=factor_of(writer, reader))


def factor_of(writer: Logical | None, reader: Logical) -> int:
    """How many microseconds the number that was written counts by: the writer's unit, where it has one."""
    return 1_000_000 // ((writer.per_second if writer else 0) or reader.per_second)


def day_factor_of(writer: Logical | None, reader: Logical) -> int:
    """By what the number that was written is multiplied, to be a time of day in the reader's unit."""
    return reader.per_day // ((writer.per_day if writer else 0) or reader.per_day)


def _of_day(n: int, factor: int, limit: int) -> int:
    if not 0 <= n * factor < limit:
        raise BadValue(f"found {n}, expected a time of day: 0 to {limit // factor - 1}")
    return n * factor


def _date(days: int) -> int:
    if not MIN_DATE <= days <= MAX_DATE:
        raise BadValue(f"found day {days} after 1970-01-01, expected one in the years 1 to 9999")
    return days


def _micros(n: int, factor: int) -> int:
    micros = n * factor
    if not MIN_MICRO <= micros <= MAX_MICRO:
        raise BadValue(f"found {n} {'ms' if factor == 1000 else 'µs'} after 1970, expected a time in the years 1 to 9999")
    return micros


def _decimal(raw: bytes, scale: int, wanted: Logical) -> Decimal:
    unscaled = int.from_bytes(raw, "big", signed=True)
    more = wanted.scale - scale
    quotient, rest = (unscaled * 10**more, 0) if more >= 0 else divmod(unscaled, 10**-more)
    if rest or abs(quotient) >= 10**wanted.precision:
        shown = f"{unscaled}e-{scale}" if len(raw) <= 40 else f"a number of {len(raw)} bytes"
        raise BadValue(f"found {shown}, expected decimal({wanted.precision},{wanted.scale})")
    return Decimal((quotient < 0, tuple(map(int, str(abs(quotient)))), -wanted.scale))
