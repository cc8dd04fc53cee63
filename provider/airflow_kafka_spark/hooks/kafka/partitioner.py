"""Kafka's default partitioner (murmur2), for one key or for an Arrow array of keys.

It runs on the driver and in Spark's tasks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import pyarrow as pa

_SEED, _M = np.uint32(0x9747B28C), np.uint32(0x5BD1E995)
_TAILS = np.array([0, 0xFF, 0xFFFF, 0xFFFFFF], np.uint32)


@lru_cache(maxsize=1024)
def choose_partition(key: bytes, partitions: int) -> int:
    """Return the partition of one key, as chosen by the Java client's default partitioner.

    :param partitions: number of partitions of the topic.
    """
    text = np.frombuffer(key, np.uint8) if key else np.zeros(0, np.uint8)
    hashed = _hash(text, np.zeros(1, np.int64), np.array([len(key)]))
    return int(hashed[0] & np.uint32(0x7FFFFFFF)) % partitions


def choose_partitions(keys: pa.BinaryArray, count: int, turn: int) -> np.ndarray:
    """Return the partition of each key, as chosen by the Java client's default partitioner: ``toPositive(murmur2(key)) % count``.

    All records without a key get ``turn % count``. The caller changes ``turn`` from batch to batch, like a sticky partitioner.

    :param keys: the keys; null for a record without one.
    :param count: number of partitions of the topic.
    :param turn: number from which the partition of records without a key follows.
    """
    hashed = compute_murmur2(keys) & np.uint32(0x7FFFFFFF)
    partitions = (hashed % np.uint32(count)).astype(np.int32)
    if keys.null_count:
        partitions[np.asarray(keys.is_null())] = turn % count
    return partitions


def compute_murmur2(keys: pa.BinaryArray) -> np.ndarray:
    """Return ``org.apache.kafka.common.utils.Utils.murmur2`` of each key, as uint32. The hash of a null is undefined."""
    keys = keys.cast("binary")
    n = len(keys)
    if not n:
        return np.empty(0, np.uint32)
    offsets = np.frombuffer(keys.buffers()[1], np.int32)[keys.offset : keys.offset + n + 1].astype(np.int64)
    data = keys.buffers()[2]
    text = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    lengths = np.diff(offsets)
    order = np.argsort(-lengths, kind="stable")
    result = np.empty(n, np.uint32)
    result[order] = _hash(text[: offsets[-1]], offsets[order], lengths[order])
    return result


def _hash(text: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the hashes of keys.

    :param starts: the position of each key in the text.
    :param lengths: descending, so that the keys that have a further word are the first ones.
    """
    # For each position of the text, the four bytes from there as one number.
    padded = np.concatenate([text, np.zeros(4, np.uint8)])
    words = np.ndarray(len(text) + 1, "<u4", padded.data, strides=(1,))
    with np.errstate(over="ignore"):
        h = _SEED ^ lengths.astype(np.uint32)
        fewer = -(lengths // 4)
        for column in range(-int(fewer[0])):
            more = slice(np.searchsorted(fewer, -column))
            k = words[starts[more] + 4 * column] * _M
            k ^= k >> np.uint32(24)
            h[more] = h[more] * _M ^ k * _M
        over = lengths % 4
        rest = words[starts + lengths - over] & _TAILS[over]
        h = np.where(over > 0, (h ^ rest) * _M, h)
        h ^= h >> np.uint32(13)
        h = h * _M
        return h ^ (h >> np.uint32(15))
