"""Headers of many records at once: ten on each dead letter are too many to make one by one. Runs in Spark's tasks, too."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


def extended(headers: pa.ListArray, facts: Mapping[str, Any]) -> pa.ListArray:
    """Headers, and behind those of each record one more for each fact.

    :param headers: of :data:`HEADERS`; null where a record has none.
    :param facts: by the header's name, an array with a value for each record, or one value for all of them.
    """
    count, width = len(headers), len(facts)
    own_names, own_values = headers.flatten().flatten()
    own = len(own_names)
    # Where the facts of each record begin: behind its own headers, and all that is before them.
    ends = np.cumsum(_lengths(headers)) + np.arange(count) * width
    places = ends[:, None] + np.arange(width)
    names = np.empty(own + count * width, np.int64)
    names[places] = own + np.arange(width)
    values = np.empty(len(names), np.int64)
    values[places] = own + np.arange(width) * count + np.arange(count)[:, None]
    kept = np.ones(len(names), bool)
    kept[places] = False
    names[kept] = values[kept] = np.arange(own)
    pairs = [
        pa.concat_arrays([own_names, pa.array(facts, pa.string())]).take(pa.array(names)),
        pa.concat_arrays([own_values, *(_binary(value, count) for value in facts.values())]).take(pa.array(values)),
    ]
    offsets = pa.array(np.concatenate([[0], ends + width]), pa.int32())
    return pa.ListArray.from_arrays(offsets, pa.StructArray.from_arrays(pairs, fields=list(HEADERS.value_type)), type=HEADERS)


def pairs_of(headers: pa.ListArray) -> list[list[tuple[str, bytes | None]]]:
    """The headers of each record, as a client takes them.

    :param headers: lists of structs with a ``key`` and a ``value``; null where a record has none.
    """
    each = headers.flatten()
    pairs = list(zip(*(pc.struct_field(each, name).to_pylist() for name in ("key", "value")), strict=True))
    return [pairs[start:end] for start, end in pairwise([0, *np.cumsum(_lengths(headers)).tolist()])]


def _lengths(headers: pa.ListArray) -> np.ndarray:
    return np.asarray(pc.list_value_length(headers).fill_null(0), np.int64)


def _binary(value: Any, count: int) -> pa.Array:
    if isinstance(value, pa.Array):
        return value.cast(pa.string()).cast(pa.binary())
    return pa.repeat(pa.scalar(str(value).encode(), pa.binary()), count)
