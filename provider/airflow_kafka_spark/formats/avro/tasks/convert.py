"""Scalars of whole batches: from what stands on the wire to what the column holds."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.formats.avro.resolution import recounted, symbols_for
from airflow_kafka_spark.formats.avro.schema import Enum, Fixed, Leaf, Logical
from airflow_kafka_spark.formats.avro.tasks.values import MAX_DATE, MAX_MICRO, MIN_DATE, MIN_MICRO, day_factor_of, factor_of
from airflow_kafka_spark.formats.tasks.batch_decoder import Doubt

Change = Callable[[pa.Array], pa.Array]


class NoFastPath(Exception):
    """Only the reference reads this."""


def long_of(n: int) -> bytes:
    """An integer as Avro writes it."""
    n = (n << 1) ^ (n >> 63)
    out = bytearray()
    while n > 0x7F:
        out.append(n & 0x7F | 0x80)
        n >>= 7
    out.append(n)
    return bytes(out)


def scalar_change(writer: Leaf | Fixed | Enum, reader: Leaf | Fixed | Enum) -> Change:
    """From what polars gave of a scalar to the reader's column."""
    if isinstance(writer, Enum):
        assert isinstance(reader, Enum)
        return _symbols(symbols_for(writer, reader))
    assert not isinstance(reader, Enum)
    if writer.kind == "boolean":
        return _booleans
    if recounted(writer, reader) is not None:
        raise NoFastPath
    if writer.kind in ("int", "long"):
        return _number(writer, reader)
    if writer.kind in ("float", "double"):
        wanted = pa.float32() if reader.kind == "float" else pa.float64()
        return lambda array: array.cast(wanted)
    if reader.logical and reader.logical.name == "decimal":
        other = writer.logical if writer.logical and writer.logical.name == "decimal" else None
        return _decimals(reader.logical, other.scale if other else reader.logical.scale)
    if reader.logical and reader.logical.name == "uuid" and isinstance(reader, Fixed):
        return lambda array: pa.array([None if v is None else str(uuid.UUID(bytes=v)) for v in array.to_pylist()], pa.string())
    return _text if reader.kind == "string" else _binary


def _text(array: pa.Array) -> pa.Array:
    return array.cast(pa.string())


def _binary(array: pa.Array) -> pa.Array:
    return array.cast(pa.binary())


def _number(writer: Leaf | Fixed, reader: Leaf | Fixed) -> Change:
    narrow = writer.kind == "int"
    finish = _finish_number(writer.logical, reader)

    def change(array: pa.Array) -> pa.Array:
        if narrow:
            _within(array, -(1 << 31), (1 << 31) - 1)
        return finish(array)

    return change


def _finish_number(writer: Logical | None, reader: Leaf | Fixed) -> Change:
    logical = reader.logical
    if logical is not None and logical.per_day:
        return _times(day_factor_of(writer, logical), logical.per_day, pa.int32() if reader.kind == "int" else pa.int64())
    if logical is None:
        if reader.kind in ("float", "double"):
            wanted = pa.float32() if reader.kind == "float" else pa.float64()
            return lambda array: array.cast(wanted, safe=False)
        return (lambda array: array.cast(pa.int32())) if reader.kind == "int" else lambda array: array
    if logical.name == "date":
        return _dates
    return _timestamps(factor_of(writer, logical), pa.timestamp("us", None if logical.name.startswith("local-") else "UTC"))


def _within(array: pa.Array, low: int, high: int) -> None:
    ends = pc.min_max(array)
    smallest, largest = ends["min"].as_py(), ends["max"].as_py()
    if smallest is not None and not low <= smallest <= largest <= high:
        raise Doubt


def _dates(array: pa.Array) -> pa.Array:
    _within(array, MIN_DATE, MAX_DATE)
    return array.cast(pa.int32()).view(pa.date32())


def _times(factor: int, limit: int, wanted: pa.DataType) -> Change:
    def change(array: pa.Array) -> pa.Array:
        _within(array, 0, limit // factor - 1)
        return pc.multiply(array.cast(pa.int64()), factor).cast(wanted)

    return change


def _timestamps(factor: int, wanted: pa.DataType) -> Change:
    def change(array: pa.Array) -> pa.Array:
        _within(array, -(-MIN_MICRO // factor), MAX_MICRO // factor)
        return (pc.multiply(array, factor) if factor != 1 else array).view(wanted)

    return change


def _symbols(seen: list[str | None]) -> Change:
    symbols = pa.array(seen, pa.string())

    def change(array: pa.Array) -> pa.Array:
        _within(array, 0, len(symbols) - 1)
        taken = symbols.take(array)
        if taken.null_count != array.null_count:
            raise Doubt
        return taken

    return change


def _booleans(array: pa.Array) -> pa.Array:
    present = pc.fill_null(array, b"\0") if array.null_count else array
    _, data = content(present)
    if (data > 1).any():
        raise Doubt
    mask = array.is_null().to_numpy(zero_copy_only=False) if array.null_count else None
    return pa.array(data.astype(bool), mask=mask)


def content(array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and bytes of binary values, from the first one on."""
    if not len(array):
        return np.zeros(1, np.int64), np.zeros(0, np.uint8)
    _, ends, data = array.buffers()
    offsets = np.frombuffer(ends, np.int64)[array.offset : array.offset + len(array) + 1]
    inside = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if data else np.zeros(0, np.uint8)
    return offsets - offsets[0], inside


def _decimals(wanted: Logical, scale: int) -> Change:
    kind = pa.decimal128(wanted.precision, wanted.scale)

    def change(array: pa.Array) -> pa.Array:
        offsets, data = content(pc.fill_null(array, b"\0") if array.null_count else array)
        sizes = np.diff(offsets)
        longest = int(sizes.max(initial=0))
        if longest > 16:
            raise Doubt
        out = np.zeros((len(array), 16), np.uint8)
        if len(data):
            # Sign first, then the bytes from the last one on: Arrow's are little-endian.
            first = data[np.minimum(offsets[:-1], len(data) - 1)]
            out[(first > 127) & (sizes > 0)] = 255
            for place in range(longest):
                has = sizes > place
                at = offsets[1:] - 1 - place
                out[:, place] = np.where(has, data[np.where(has, at, 0)], out[:, place])
        # The one number that has no opposite in 128 bits: Arrow does not see that it has too many digits.
        if longest == 16 and ((out[:, 15] == 128) & ~out[:, :15].any(axis=1)).any():
            raise Doubt
        validity = array.is_valid() if array.null_count else None
        unscaled = pa.Array.from_buffers(
            pa.decimal128(38, scale) if scale != wanted.scale else kind,
            len(array),
            [validity.buffers()[1] if validity is not None else None, pa.py_buffer(out)],
        )
        unscaled.validate(full=True)
        return unscaled if scale == wanted.scale else unscaled.cast(kind)

    return change
