"""Iceberg's partition and sort transforms over Arrow arrays.

pyiceberg computes them for one value at a time, or by an extension in Rust that is not installed with it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg import transforms
from pyiceberg.types import DateType, IcebergType, IntegerType, LongType, TimestampType, TimestamptzType

_DAY = 86_400_000_000
_HOUR = 3_600_000_000


def transformed(values: pa.Array, transform: transforms.Transform[Any, Any], kind: IcebergType) -> pa.Array:
    """Return the result of a transform for each value: dates and instants as numbers, as Iceberg's metadata has them.

    :param values: a column of the rows, in the type that files have.
    :param kind: the column's type in Iceberg's terms.
    """
    plain = _plain(values)
    if isinstance(transform, transforms.IdentityTransform):
        return plain
    if isinstance(transform, transforms.VoidTransform):
        return pa.nulls(len(values), pa.int32())
    if isinstance(transform, transforms.TimeTransform):
        return _time(plain, transform, isinstance(kind, DateType))
    if isinstance(transform, transforms.TruncateTransform) and isinstance(kind, (IntegerType, LongType)):
        numbers = pc.fill_null(plain, 0).to_numpy(zero_copy_only=False)
        with np.errstate(over="ignore"):
            return _masked(numbers - numbers % numbers.dtype.type(transform.width), plain)
    hashed = (IntegerType, LongType, DateType, TimestampType, TimestamptzType)
    if isinstance(transform, transforms.BucketTransform) and isinstance(kind, hashed):
        longs = pc.fill_null(plain.cast(pa.int64()), 0).to_numpy(zero_copy_only=False)
        return _masked(((_murmur3(longs) & 0x7FFFFFFF) % transform.num_buckets).astype(np.int32), plain)
    encoded = plain.dictionary_encode()
    compute = transform.transform(kind)
    return pa.array([compute(value) for value in encoded.dictionary.to_pylist()]).take(encoded.indices)


def _plain(values: pa.Array) -> pa.Array:
    if pa.types.is_date32(values.type):
        return values.cast(pa.int32())
    return values.cast(pa.int64()) if pa.types.is_timestamp(values.type) else values


def _time(plain: pa.Array, transform: Any, is_date: bool) -> pa.Array:
    numbers = pc.fill_null(plain, 0).to_numpy(zero_copy_only=False).astype(np.int64)
    if isinstance(transform, transforms.HourTransform):
        return _masked((numbers // _HOUR).astype(np.int32), plain)
    days = numbers if is_date else numbers // _DAY
    if isinstance(transform, transforms.DayTransform):
        return _masked(days.astype(np.int32), plain)
    unit = "M" if isinstance(transform, transforms.MonthTransform) else "Y"
    return _masked(days.astype("datetime64[D]").astype(f"datetime64[{unit}]").astype(np.int32), plain)


def _masked(numbers: np.ndarray, like: pa.Array) -> pa.Array:
    """Return numbers, null where ``like`` is."""
    return pa.array(numbers, mask=like.is_null().to_numpy(zero_copy_only=False))


def _murmur3(longs: np.ndarray) -> np.ndarray:
    """Return the 32 bit Murmur3 hash of each number's eight bytes."""

    def turned(words: np.ndarray, by: int) -> np.ndarray:
        return (words << np.uint32(by)) | (words >> np.uint32(32 - by))

    bits = longs.astype(np.int64).view(np.uint64)
    found = np.zeros(len(bits), np.uint32)
    with np.errstate(over="ignore"):
        for words in ((bits & np.uint64(0xFFFFFFFF)).astype(np.uint32), (bits >> np.uint64(32)).astype(np.uint32)):
            found ^= turned(words * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
            found = turned(found, 13) * np.uint32(5) + np.uint32(0xE6546B64)
        found ^= np.uint32(8)
        found = (found ^ (found >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        found = (found ^ (found >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return found ^ (found >> np.uint32(16))
