"""Rows that PostgreSQL cannot even hold in a stage, found before they are sent. Runs in Spark's tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

_FIRST_DAY = -2_440_588
"""Days from the epoch back to 24 November of 4714 BC, in the calendar that PostgreSQL counts back with."""
_FIRST_MICROSECOND = _FIRST_DAY * 86_400_000_000
NUL = "\x00"


def refusals(batch: pa.RecordBatch, key: Sequence[str]) -> dict[int, str]:
    """Where they are in the batch, and why.

    :param key: columns that name a row: one without them could not be found again.
    """
    found: dict[int, str] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for wrong, reason in _checks(column, name in key):
            if pc.any(wrong).as_py():
                for at in pc.indices_nonzero(wrong.fill_null(False)).to_pylist():
                    found.setdefault(at, f"column `{name}` {reason}")
    return found


def _checks(column: pa.Array, of_key: bool) -> Iterator[tuple[Any, str]]:
    kind = column.type
    if of_key and column.null_count:
        yield column.is_null(), "is null, and is part of the key"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        yield pc.match_substring(column, NUL), "has a NUL character, which PostgreSQL cannot hold"
    elif (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_string(kind.value_type):
        yield _within(column), "has a NUL character, which PostgreSQL cannot hold"
    elif pa.types.is_date32(kind):
        yield pc.less(column.cast(pa.int32()), _FIRST_DAY), "is before the first day that PostgreSQL knows, in 4714 BC"
    elif pa.types.is_timestamp(kind) and kind.unit == "us":
        yield pc.less(column.cast(pa.int64()), _FIRST_MICROSECOND), "is before the first day that PostgreSQL knows, in 4714 BC"


def _within(lists: pa.ListArray) -> pa.BooleanArray:
    """Which lists have a text with it."""
    texts = pc.list_flatten(lists)
    wrong = pc.match_substring(texts, NUL).fill_null(False)
    parents: Mapping[int, None] = dict.fromkeys(pc.list_parent_indices(lists).filter(wrong).to_pylist())
    return pa.array([at in parents for at in range(len(lists))], pa.bool_())
