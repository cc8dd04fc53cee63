"""Where values stand in their bytes: sizes of what was read, and whether the numbers of union branches are what they have to be.

Sizes are those of the ordinary encoding: integers as short as they can be, arrays and maps in one block. Values that are encoded
in another way have other sizes than their bytes, and go the way of the reference.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.formats.tasks.batch_decoder import Doubt


class Layout(ABC):
    """How values of a type stand in their bytes."""

    looks: bool = False
    """Whether there is something to check."""

    @abstractmethod
    def sizes(self, array: pa.Array) -> np.ndarray:
        """The bytes of each value; anything for nulls."""

    def check(self, array: pa.Array, starts: np.ndarray, body: np.ndarray) -> None:
        """Look at the numbers of branches.

        :param starts: where in ``body`` each value begins.
        :raises Doubt: one of them is another one.
        """
        return None


def lengths(numbers: np.ndarray) -> np.ndarray:
    """The bytes of integers, which are not negative."""
    sizes = np.ones(len(numbers), np.int64)
    largest = int(numbers.max(initial=0))
    for bits in range(7, 64, 7):
        if largest < 1 << bits:
            break
        sizes += numbers >= np.uint64(1 << bits)
    return sizes


class Sized(Layout):
    def __init__(self, size: int) -> None:
        self._size = size

    def sizes(self, array: pa.Array) -> np.ndarray:
        return np.full(len(array), self._size, np.int64)


class Long(Layout):
    def sizes(self, array: pa.Array) -> np.ndarray:
        numbers = (pc.fill_null(array, 0) if array.null_count else array).to_numpy()
        return lengths(((numbers << 1) ^ (numbers >> 63)).view(np.uint64))


class Binary(Layout):
    def sizes(self, array: pa.Array) -> np.ndarray:
        counts = pc.fill_null(pc.binary_length(array), 0).to_numpy().astype(np.int64)
        return counts + lengths((counts << 1).astype(np.uint64))


class Optional(Layout):
    """A union of null and one other.

    :param present: the byte that says that there is a value; ``absent``: that it is null.
    """

    looks = True

    def __init__(self, value: Layout, present: int, absent: int) -> None:
        self._value, self._present, self._absent = value, present, absent

    def sizes(self, array: pa.Array) -> np.ndarray:
        own = self._value.sizes(array)
        if array.null_count:
            own = np.where(array.is_valid().to_numpy(zero_copy_only=False), own, 0)
        return own + 1

    def check(self, array: pa.Array, starts: np.ndarray, body: np.ndarray) -> None:
        valid = array.is_valid()
        there = valid.to_numpy(zero_copy_only=False)
        if (body[starts] != np.where(there, self._present, self._absent)).any():
            raise Doubt
        if self._value.looks:
            self._value.check(array.filter(valid), starts[there] + 1, body)


class Row(Layout):
    """Values one after the other."""

    def __init__(self, parts: Sequence[Layout]) -> None:
        self._parts = list(parts)
        self.looks = any(p.looks for p in parts)

    def sizes(self, array: pa.Array) -> np.ndarray:
        return sum(self.sizes_of(self._fields(array)), np.zeros(len(array), np.int64))

    def check(self, array: pa.Array, starts: np.ndarray, body: np.ndarray) -> None:
        fields = self._fields(array)
        self.check_of(fields, self.sizes_of(fields), starts, body)

    def _fields(self, array: pa.Array) -> list[pa.Array]:
        return [array.field(n) for n in range(len(self._parts))]

    def sizes_of(self, arrays: Sequence[pa.Array]) -> list[np.ndarray]:
        """The sizes of each part."""
        return [p.sizes(a) for p, a in zip(self._parts, arrays, strict=True)]

    def check_of(self, arrays: Sequence[pa.Array], sizes: Sequence[np.ndarray], starts: np.ndarray, body: np.ndarray) -> None:
        """The same where the parts are no struct yet, and their sizes are known."""
        for part, array, size in zip(self._parts, arrays, sizes, strict=True):
            if part.looks:
                part.check(array, starts, body)
            starts = starts + size


class Items(Layout):
    """An array in one block."""

    def __init__(self, item: Layout) -> None:
        self._item = item
        self.looks = item.looks

    def sizes(self, array: pa.Array) -> np.ndarray:
        counts, before = self._counts(array)
        ends = np.append(0, np.cumsum(self._item.sizes(array.flatten())))
        last = np.cumsum(counts)
        return before + ends[last] - ends[last - counts] + (counts > 0)

    def check(self, array: pa.Array, starts: np.ndarray, body: np.ndarray) -> None:
        items = array.flatten()
        counts, before = self._counts(array)
        sizes = self._item.sizes(items)
        ahead = np.cumsum(sizes) - sizes
        first = np.append(ahead, 0)[np.minimum(np.cumsum(counts) - counts, len(ahead))]
        self._item.check(items, ahead + np.repeat(starts + before - first, counts), body)

    def _counts(self, array: pa.Array) -> tuple[np.ndarray, np.ndarray]:
        """How many items each has, and the bytes of that number."""
        counts = pc.fill_null(pc.list_value_length(array), 0).to_numpy().astype(np.int64)
        return counts, lengths((counts << 1).astype(np.uint64))
