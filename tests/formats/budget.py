"""The number of random examples in tests of formats."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

from airflow_kafka_spark.formats.tasks.base import CHUNK_RECORDS

T = TypeVar("T")

MANY = CHUNK_RECORDS * 3 // 2
"""Records of a batch that is decoded in two parts."""

_TIMES = int(os.environ.get("EXAMPLES", "1"))


def examples(count: int) -> int:
    """Return a number of examples, or a multiple of it for a longer search: ``EXAMPLES=10 pytest tests/formats``."""
    return count * _TIMES


def pairs(values: Sequence[T]) -> Iterator[tuple[T, T]]:
    """Yield each value before and after some of the values; all pairs if these are few."""
    chance = random.Random(1)
    for value in values:
        others = chance.sample(values, min(len(values), examples(3)))
        yield from ((value, other) for other in others)
        yield from ((other, value) for other in others)
