"""Where a key belongs: Kafka's own partitioner, for many keys at once. Runs in Spark's tasks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

_SEED, _M = np.uint32(0x9747B28C), np.uint32(0x5BD1E995)
_LONG = 512
"""Keys longer than this are hashed in a step of their own, so that one of them does not widen everybody's row."""


def partitions_of(keys: pa.BinaryArray, count: int, turn: int) -> np.ndarray:
    """The partition of each key, as the Java client's default partitioner places it: ``toPositive(murmur2(key)) % count``.

    Records without a key all get ``turn % count``: the caller changes ``turn`` from batch to batch, as a sticky partitioner does.

    :param keys: keys; null where a record has none.
    :param count: how many partitions the topic has.
    :param turn: where records without a key go.
    """
    hashed = murmur2(keys) & np.uint32(0x7FFFFFFF)
    places = (hashed % np.uint32(count)).astype(np.int32)
    if keys.null_count:
        places[np.asarray(keys.is_null())] = turn % count
    return places


def murmur2(keys: pa.BinaryArray) -> np.ndarray:
    """``org.apache.kafka.common.utils.Utils.murmur2`` of each key, as uint32; of a null, anything."""
    keys = keys.cast(pa.binary())
    n = len(keys)
    if not n:
        return np.empty(0, np.uint32)
    offsets = np.frombuffer(keys.buffers()[1], np.int32)[keys.offset : keys.offset + n + 1].astype(np.int64)
    data = keys.buffers()[2]
    text = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    lengths = np.diff(offsets)
    result = np.empty(n, np.uint32)
    short = lengths <= _LONG
    for rows in (np.flatnonzero(short), *(np.array([at]) for at in np.flatnonzero(~short))):
        if len(rows):
            result[rows] = _hash(text, offsets[rows], lengths[rows])
    return result


def _hash(text: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    width = (int(lengths.max()) + 3) // 4 * 4 + 4
    padded = np.concatenate([text, np.zeros(width, np.uint8)])
    places = starts[:, None] + np.arange(width)
    cells: Any = np.where(np.arange(width) < lengths[:, None], padded[np.minimum(places, len(padded) - 1)], 0).astype(np.uint8)
    words = cells.view("<u4")
    with np.errstate(over="ignore"):
        h = _SEED ^ lengths.astype(np.uint32)
        for column in range(width // 4 - 1):
            k = words[:, column] * _M
            k ^= k >> np.uint32(24)
            h = np.where(lengths >= 4 * (column + 1), h * _M ^ k * _M, h)
        rest = words[np.arange(len(lengths)), lengths // 4]
        h = np.where(lengths % 4 > 0, (h ^ rest) * _M, h)
        h ^= h >> np.uint32(13)
        h = h * _M
        return h ^ (h >> np.uint32(15))
