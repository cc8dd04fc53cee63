"""Compact sets of offsets of one partition, for memory and for messages, even if the offsets are scattered."""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Iterable, Iterator, Mapping, Set

from airflow_kafka_spark.windows.model import TopicPartition

_SHIFT = 12
_MASK = (1 << _SHIFT) - 1
_SIZE = 1 << (_SHIFT - 3)
_NUMBER = 8


class OffsetSet(Set[int]):
    """A set of offsets that takes one bit for each, in blocks of 4096 offsets (512 bytes).

    :param offsets: the initial elements.
    """

    def __init__(self, offsets: Iterable[int] = ()) -> None:
        self._blocks: dict[int, bytearray] = {}
        self.add(offsets)

    def add(self, offsets: Iterable[int]) -> None:
        """Add offsets, in any order, duplicates allowed. Another :class:`OffsetSet` is added block by block."""
        if isinstance(offsets, OffsetSet):
            return self._join(offsets)
        blocks = self._blocks
        for offset in offsets:
            number = offset >> _SHIFT
            if number not in blocks:
                blocks[number] = bytearray(_SIZE)
            blocks[number][(offset & _MASK) >> 3] |= 1 << (offset & 7)

    def _join(self, other: OffsetSet) -> None:
        for number, block in other._blocks.items():
            mine = self._blocks.get(number, bytes(_SIZE))
            both = int.from_bytes(mine, "big") | int.from_bytes(block, "big")
            self._blocks[number] = bytearray(both.to_bytes(_SIZE, "big"))

    def discard(self, offsets: Iterable[int]) -> None:
        """Remove offsets that are in the set."""
        for offset in offsets:
            if (block := self._blocks.get(offset >> _SHIFT)) is not None:
                block[(offset & _MASK) >> 3] &= ~(1 << (offset & 7))

    def __contains__(self, offset: object) -> bool:
        assert isinstance(offset, int)
        block = self._blocks.get(offset >> _SHIFT)
        return block is not None and bool(block[(offset & _MASK) >> 3] >> (offset & 7) & 1)

    def __iter__(self) -> Iterator[int]:
        for number in sorted(self._blocks):
            for at, byte in enumerate(self._blocks[number]):
                if byte:
                    yield from ((number << _SHIFT) + at * 8 + bit for bit in range(8) if byte >> bit & 1)

    def __len__(self) -> int:
        return sum(int.from_bytes(block, "big").bit_count() for block in self._blocks.values())

    def __bool__(self) -> bool:
        return any(map(any, self._blocks.values()))

    # --- serialization ---

    def to_text(self) -> str:
        """Return the set as compressed, printable text; empty without offsets."""
        return base64.b64encode(zlib.compress(self._bytes(), 1)).decode() if self else ""

    @classmethod
    def from_text(cls, text: str) -> OffsetSet:
        """Return the set from the text that :meth:`to_text` has returned."""
        made = cls()
        data = zlib.decompress(base64.b64decode(text)) if text else b""
        for at in range(0, len(data), _NUMBER + _SIZE):
            number, block = data[at : at + _NUMBER], data[at + _NUMBER : at + _NUMBER + _SIZE]
            made._blocks[int.from_bytes(number, "big")] = bytearray(block)
        return made

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return OffsetSet.from_text, (self.to_text(),)

    def _bytes(self) -> bytes:
        """Return bytes that are equal for equal sets."""
        found = ((number, block) for number, block in sorted(self._blocks.items()) if any(block))
        return b"".join(number.to_bytes(_NUMBER, "big") + block for number, block in found)


def digest_of(sets: Mapping[TopicPartition, OffsetSet]) -> str:
    """Return 32 hexadecimal digits that are equal if the offsets are, by partition."""
    made = hashlib.sha256()
    for tp, offsets in sorted(sets.items()):
        if offsets:
            made.update(f"{tp.topic}\0{tp.partition}\0{len(offsets)}\0".encode())
            made.update(offsets._bytes())
    return made.hexdigest()[:32]
