"""The dead letters of a window, as the ledger stores them, and compact sets of offsets. A record is decided to be a dead
letter once.
"""

from __future__ import annotations

import base64
import hashlib
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from airflow_kafka_spark.windows.model import Landed, TopicPartition, merge_landed

CONNECT_ERROR_PREFIX = "__connect.errors."
"""Prefix of the headers of dead letters, as Kafka Connect names them (KIP-298)."""

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
        return base64.b64encode(zlib.compress(self._to_bytes(), 1)).decode() if self else ""

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

    def _to_bytes(self) -> bytes:
        """Return bytes that are equal for equal sets."""
        found = ((number, block) for number, block in sorted(self._blocks.items()) if any(block))
        return b"".join(number.to_bytes(_NUMBER, "big") + block for number, block in found)


def compute_digest(sets: Mapping[TopicPartition, OffsetSet]) -> str:
    """Return 32 hexadecimal digits that are equal if the offsets are, by partition."""
    made = hashlib.sha256()
    for tp, offsets in sorted(sets.items()):
        if offsets:
            made.update(f"{tp.topic}\0{tp.partition}\0{len(offsets)}\0".encode())
            made.update(offsets._to_bytes())
    return made.hexdigest()[:32]


Runs = tuple[tuple[int, int], ...]
"""Offsets as half-open runs in ascending order: ``((3, 5), (9, 10))`` are 3, 4 and 9."""


def group_into_runs(offsets: Iterable[int]) -> Runs:
    """Return offsets as runs.

    :param offsets: offsets in any order, without duplicates.
    """
    ordered = sorted(set(offsets))
    runs = []
    for _, members in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0]):
        found = [offset for _, offset in members]
        runs.append((found[0], found[-1] + 1))
    return tuple(runs)


def list_run_offsets(runs: Runs) -> frozenset[int]:
    """Return all offsets in these runs."""
    return frozenset(offset for start, end in runs for offset in range(start, end))


@dataclass(frozen=True)
class Batch:
    """The dead letters, or the routed records, of one transaction.

    :param replay: number of the replay that sent them; 0 for the first move of the window.
    :param token: token of the attempt that sent them.
    :param offsets: offsets of the records, by the partition that they were read from.
    :param landed: offsets of their copies in the target topic; empty if no dead letters were needed
        (:attr:`has_earlier_letters`).
    :param routed: topic to which a transform routed the records instead of the sink; empty for dead letters.
    :param topic_id: id of the target topic when they were sent; "" if unknown.
    """

    replay: int
    token: str
    offsets: Mapping[TopicPartition, Runs]
    landed: tuple[Landed, ...] = ()
    routed: str = ""
    topic_id: str = ""

    @property
    def records(self) -> int:
        return sum(end - start for runs in self.offsets.values() for start, end in runs)

    @property
    def has_earlier_letters(self) -> bool:
        """True if a replay has left out the records without sending dead letters, because those were sent before: by an earlier
        replay, or again to the topics that the records came from."""
        return not (self.landed or self.routed)


@dataclass(frozen=True)
class Captured:
    """The records of a window that are routed to another sink. They are fixed before any sink commits.

    :param replay: number of the replay; 0 for the first move of the window.
    :param name: name of the other sink within the pipeline.
    :param sink: its URI.
    :param records: number of records that it takes.
    :param digest: digest of their offsets (:func:`~airflow_kafka_spark.windows.dead_letters.compute_digest`).
    """

    replay: int
    name: str
    sink: str
    records: int
    digest: str


@dataclass(frozen=True)
class DeadLetters:
    """All dead letters of one window, and its records that were routed to other topics and sinks, as the ledger stores them.

    :param window: the window's number.
    :param topic: the dead letter topic; empty without one.
    :param batches: batches that were sent, the oldest first.
    :param offset: offset of this record in the ledger partition; -1 if it was not read from there.
    :param captured: the records that are routed to other sinks.
    :param skipped: pairs of a replay and the number of bad records that it left out without a dead letter, because none was
        requested. Replays without such records are missing.
    """

    window: int
    topic: str
    batches: tuple[Batch, ...] = ()
    offset: int = -1
    captured: tuple[Captured, ...] = ()
    skipped: tuple[tuple[int, int], ...] = ()

    def list_sent(self, replay: int | None = None) -> dict[TopicPartition, frozenset[int]]:
        """Return the offsets of the records that are dead letters.

        :param replay: the replay that has left them out, whether it sent them or found them sent; None (default) for all.
        """
        return _list_offsets_by_partition(b for b in self.batches if not b.routed and replay in (None, b.replay))

    def list_routed(self, replay: int | None = None, topic: str | None = None) -> dict[TopicPartition, frozenset[int]]:
        """Return the offsets of the records that were routed to other topics.

        :param replay: the replay that sent them; None (default) for all.
        :param topic: the topic that they were routed to; None (default) for any.
        """
        return _list_offsets_by_partition(
            b for b in self.batches if b.routed and replay in (None, b.replay) and topic in (None, b.routed)
        )

    @property
    def for_replays(self) -> DeadLetters | None:
        """Return what later replays of the window have to know: the records in topics. None without any."""
        return replace(self, offset=-1, captured=(), skipped=()) if self.batches else None

    def exclude_topics(self, topic_ids: Collection[str]) -> DeadLetters:
        """Return a copy without the records in topics with these ids, so that they are sent again."""
        if not topic_ids:
            return self
        # It is not known which of these topics has the letters of a batch that needed none of its own.
        kept = (batch for batch in self.batches if batch.topic_id not in topic_ids and not batch.has_earlier_letters)
        return replace(self, batches=tuple(kept))

    def list_topic_ids(self, replay: int) -> list[tuple[str, str]]:
        """Return the topics that a replay has sent records to, each with the id that it had then."""
        mine = (batch for batch in self.batches if batch.replay == replay and not batch.has_earlier_letters)
        return [(batch.routed or self.topic, batch.topic_id) for batch in mine]

    @property
    def landed(self) -> tuple[Landed, ...]:
        """Return the offsets of the dead letters in their topic, by partition."""
        return merge_landed(part for batch in self.batches if not batch.routed for part in batch.landed)

    def list_letters_of(self, offsets: Mapping[TopicPartition, Set[int]]) -> tuple[Landed, ...]:
        """Return the offsets of the dead letters of some records in their topic, by partition. Other letters may lie between."""
        batches = (b for b in self.batches if not b.routed)
        having = (b for b in batches if any(offsets.get(tp, frozenset()) & list_run_offsets(r) for tp, r in b.offsets.items()))
        return merge_landed(part for batch in having for part in batch.landed)

    def find_absent(self, first: int, last: int) -> dict[TopicPartition, frozenset[int]]:
        """Return the offsets of the records that are dead letters, and not in the sink.

        :param first: the newest replay that is known to be in the sink.
        :param last: the newest replay. Those after ``first`` were given up, so that either may be in the sink: only records that
            all of them have left out are certainly absent.
        """
        found = self.list_sent(first)
        for replay in range(first + 1, last + 1):
            left_out = self.list_sent(replay)
            found = {tp: offsets & left_out.get(tp, frozenset()) for tp, offsets in found.items()}
        return {tp: offsets for tp, offsets in found.items() if offsets}

    @property
    def routes(self) -> tuple[Landed, ...]:
        """Return the offsets of routed records in their topics, by partition."""
        return merge_landed(part for batch in self.batches if batch.routed for part in batch.landed)

    def list_captured(self, replay: int) -> tuple[Captured, ...]:
        """Return the records that this replay routes to other sinks."""
        return tuple(found for found in self.captured if found.replay == replay)

    def add_captured(self, captured: Sequence[Captured]) -> DeadLetters:
        """Return a copy with the records that are routed to other sinks. They replace earlier ones of that sink and replay."""
        replays = {found.replay for found in captured}
        return replace(self, captured=(*(c for c in self.captured if c.replay not in replays), *captured))

    def count_skipped(self, replay: int) -> int:
        """Return the number of bad records that this replay leaves out without sending a dead letter."""
        return dict(self.skipped).get(replay, 0)

    def count_rejected(self, replay: int) -> int:
        """Return the number of bad records that this replay leaves out."""
        return sum(map(len, self.list_sent(replay).values())) + self.count_skipped(replay)

    def add_skipped(self, replay: int, count: int) -> DeadLetters:
        """Return a copy with the number of bad records that were left out. It replaces the count of the previous attempt."""
        counts = {**dict(self.skipped), replay: count}
        return replace(self, skipped=tuple((at, n) for at, n in sorted(counts.items()) if n))


def _list_offsets_by_partition(batches: Iterable[Batch]) -> dict[TopicPartition, frozenset[int]]:
    found: dict[TopicPartition, set[int]] = {}
    for batch in batches:
        for tp, runs in batch.offsets.items():
            found.setdefault(tp, set()).update(list_run_offsets(runs))
    return {tp: frozenset(offsets) for tp, offsets in found.items()}


def dead_letters_to_json(dead: DeadLetters) -> dict[str, Any]:
    captured = [[c.replay, c.name, c.sink, c.records, c.digest] for c in dead.captured]
    batches = [_batch_to_json(batch) for batch in dead.batches]
    skipped = {"skipped": [list(pair) for pair in dead.skipped]} if dead.skipped else {}
    return {"topic": dead.topic, "batches": batches, **({"captured": captured} if captured else {}), **skipped}


def dead_letters_from_json(window: int, value: Mapping[str, Any], offset: int = -1) -> DeadLetters:
    batches = tuple(_batch_from_json(batch) for batch in value["batches"])
    captured = tuple(Captured(*found) for found in value.get("captured", ()))
    skipped = tuple((replay, count) for replay, count in value.get("skipped", ()))
    return DeadLetters(window, value["topic"], batches, offset, captured, skipped)


def _batch_to_json(batch: Batch) -> dict[str, Any]:
    return {
        "replay": batch.replay,
        "token": batch.token,
        "offsets": encode_offsets(batch.offsets),
        "landed": [[p.topic, p.partition, p.first, p.last, p.records] for p in batch.landed],
        **({"routed": batch.routed} if batch.routed else {}),
        **({"topic_id": batch.topic_id} if batch.topic_id else {}),
    }


def _batch_from_json(value: Mapping[str, Any]) -> Batch:
    landed = tuple(Landed(*part) for part in value["landed"])
    offsets, routed = decode_offsets(value["offsets"]), value.get("routed", "")
    return Batch(value["replay"], value["token"], offsets, landed, routed, value.get("topic_id", ""))


def unite_offsets(
    first: Mapping[TopicPartition, frozenset[int]], second: Mapping[TopicPartition, frozenset[int]]
) -> dict[TopicPartition, frozenset[int]]:
    """Return the offsets that are in either of two maps."""
    return {**first, **{tp: offsets | first.get(tp, frozenset()) for tp, offsets in second.items()}}


def subtract_offsets(
    first: Mapping[TopicPartition, frozenset[int]], second: Mapping[TopicPartition, frozenset[int]]
) -> dict[TopicPartition, frozenset[int]]:
    """Return the offsets of the first map that are not in the second one, without partitions that have none left."""
    left = ((tp, offsets - second.get(tp, frozenset())) for tp, offsets in first.items())
    return {tp: offsets for tp, offsets in left if offsets}


def encode_offsets(offsets: Mapping[TopicPartition, Runs]) -> list[list[Any]]:
    """Return ``[[topic, partition, [distance, length, ...]], ...]``. Each run is written as its distance from the end of the
    previous one and its length."""
    return [[*tp, _encode_runs(runs)] for tp, runs in sorted(offsets.items())]


def decode_offsets(value: Iterable[Sequence[Any]]) -> dict[TopicPartition, Runs]:
    return {TopicPartition(topic, partition): _decode_runs(distances) for topic, partition, distances in value}


def _encode_runs(runs: Runs) -> list[int]:
    numbers, reached = [], 0
    for start, end in runs:
        numbers += [start - reached, end - start]
        reached = end
    return numbers


def _decode_runs(distances: Sequence[int]) -> Runs:
    runs, reached = [], 0
    for distance, length in zip(distances[::2], distances[1::2], strict=True):
        runs.append((reached + distance, reached + distance + length))
        reached += distance + length
    return tuple(runs)


def find_dead_letters(dead: DeadLetters | None, report: Mapping[str, Any] | None) -> tuple[Landed, ...]:
    """Return the offsets of a window's dead letters in their topic. If they were published with the window's records, only the
    report names them.

    :param dead: the ledger's record of them.
    :param report: the report of the window, once it is complete.
    """
    if dead and dead.landed:
        return dead.landed
    return tuple(Landed(**part) for part in (report or {}).get("dead_letters") or ())
