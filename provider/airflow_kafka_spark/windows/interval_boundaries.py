"""Boundaries: the offset of each partition that corresponds to an instant, decided once for all pipelines.

A boundary is a record of the ledger topic. A pipeline that needs a missing boundary looks it up in Kafka and *proposes* it, by
writing such a record. The order of the log decides which proposal came first, and :func:`resolve_proposals` returns equal
boundaries to every reader. So several pipelines may propose concurrently without a fence, and neighbouring windows share the
boundary between them: windows tile the log, independent of the order in which they are planned and of changes of Kafka's answers.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from airflow_kafka_spark.errors import BeginningDeleted, DataLoss, IntervalCut, LogTruncated
from airflow_kafka_spark.windows.codec import encode_json, pack_values, unpack_values
from airflow_kafka_spark.windows.interval import IntervalState, exclude_other_intervals
from airflow_kafka_spark.windows.model import Gap, OffsetRange, TopicPartition
from airflow_kafka_spark.windows.plan import DataLossPolicy, Log, Position, Ranges
from airflow_kafka_spark.windows.times import format_instant

VERSION = 1
"""Version of the records' format. A record of a newer version is refused."""


@dataclass(frozen=True)
class Boundary:
    """The offsets of one topic that correspond to an instant.

    :param topic: the topic.
    :param topic_id: id of the topic at the time of the decision.
    :param instant: milliseconds since the epoch.
    :param offsets: by partition, the first offset that belongs to the time from the instant on. A missing partition was created
        later: all of its records belong to that time.
    :param by: the run that decided it.
    :param earliest: lower bounds of uncertain offsets, by partition. An offset is uncertain if the beginning of the log was
        deleted before the decision, and no record older than the instant was left.
    :param decided_at: time of the decision, milliseconds since the epoch; 0 if unknown.
    :param epochs: by partition, the leader epoch under which the log reached the offset; unknown for missing partitions.
    """

    topic: str
    topic_id: str
    instant: int
    offsets: Mapping[int, int]
    by: str = ""
    earliest: Mapping[int, int] = field(default_factory=dict)
    decided_at: int = 0
    epochs: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class InstantInLog:
    """The offsets at which an instant lies in the log of a topic.

    :param instant: milliseconds since the epoch.
    :param offsets: by partition, the first offset whose timestamp is at or after the instant.
    :param lows: by partition, the first offset that is left in the log, read after ``offsets``.
    :param epochs: by partition, the leader epoch of its offset, if known.
    """

    topic: str
    topic_id: str
    instant: int
    offsets: Mapping[int, int]
    lows: Mapping[int, int]
    epochs: Mapping[int, int] = field(default_factory=dict)


def propose_boundary(found: InstantInLog, settled: Mapping[int, Boundary], *, by: str, now: int) -> Boundary:
    """Return the boundary to propose for an instant, with the partitions in which its offset is uncertain (``earliest``).

    If the log begins at or after the boundary, the deleted records may have been older than the instant, or not. The offset is
    certain if a record before it is left (provided that timestamps ascend), if nothing was ever deleted, or if an earlier
    boundary lies at the beginning of the log and is itself certain, or was decided before this instant had come.

    :param settled: the settled boundaries of the topic, by instant.
    :param by: the run that proposes it.
    :param now: the current time, milliseconds since the epoch.
    """
    proposal = Boundary(
        found.topic, found.topic_id, found.instant, dict(found.offsets), by, decided_at=now, epochs=dict(found.epochs)
    )
    below, _ = _find_neighbours(found.instant, settled)
    earliest = {}
    for partition, offset in fit_proposal(proposal, settled).offsets.items():
        low = found.lows.get(partition, 0)
        known = below.offsets.get(partition, 0) if below else 0
        is_exact = below is not None and (partition not in below.earliest or 0 < below.decided_at < found.instant)
        if offset > low or (is_exact and known == offset):
            continue
        lowest = below.earliest.get(partition, known) if below else 0
        if lowest < offset:
            earliest[partition] = lowest
    return replace(proposal, earliest=earliest)


def fit_proposal(proposal: Boundary, settled: Mapping[int, Boundary]) -> Boundary:
    """Return the boundary that a proposal for an instant without a boundary would become."""
    return _fit_between(proposal, *_find_neighbours(proposal.instant, settled))


def _find_neighbours(instant: int, settled: Mapping[int, Boundary]) -> tuple[Boundary | None, Boundary | None]:
    """Return the nearest boundaries before and after an instant."""
    below = max((i for i in settled if i < instant), default=None)
    above = min((i for i in settled if i > instant), default=None)
    return None if below is None else settled[below], None if above is None else settled[above]


def resolve_proposals(proposals: Iterable[Boundary]) -> dict[int, Boundary]:
    """Return the boundaries of one topic, by instant: the first proposal of each instant, moved between its neighbours.

    Records may arrive late, and timestamps may lie in the future. So a late proposal may have offsets beyond those of a boundary
    that was decided before. It is then limited to the offsets between its neighbours.

    Guarantee: offsets never descend as instants ascend, and a later proposal does not change settled boundaries. Settling settled
    boundaries returns them unchanged. The cost is n log n in the number of proposals, times their partitions.

    :param proposals: proposals of one topic (and one topic id), in the order of the log.
    :return: the boundaries, in the order of the log.
    """
    return _fold(proposals)[0]


def _fold(proposals: Iterable[Boundary]) -> tuple[dict[int, Boundary], dict[int, set[int]]]:
    """Return the result of :func:`resolve_proposals`, and for each instant the instants that its boundary depends on.

    A boundary depends on a neighbour that has moved it, and on the instant from which it has inherited a partition.
    """
    first: dict[int, Boundary] = {}
    for proposal in proposals:
        first.setdefault(proposal.instant, proposal)
    settled: dict[int, Boundary] = {}
    dependencies: dict[int, set[int]] = {}
    known_from: dict[int, int] = {}
    for (instant, proposal), (below, above) in zip(first.items(), _list_neighbours(list(first)), strict=True):
        inherited = {
            partition: since for partition, since in known_from.items() if since < instant and partition not in proposal.offsets
        }
        boundary = _fit_between(
            proposal, settled[below] if below is not None else None, settled[above] if above is not None else None, inherited
        )
        settled[instant] = boundary
        dependencies[instant] = {n for n in (below, above) if n is not None and _has_moved(settled[n], proposal, boundary)}
        dependencies[instant].update(inherited.values())
        for partition in boundary.offsets:
            known_from[partition] = min(instant, known_from.get(partition, instant))
    return settled, dependencies


def _list_neighbours(instants: Sequence[int]) -> list[tuple[int | None, int | None]]:
    """Return, for each instant, the next lower and the next higher one among those before it in the sequence.

    They are found backwards, in a linked list of the sorted instants: the last one has its neighbours in the whole list, the one
    before it in the list without the last one, and so on.
    """
    ordered = sorted(instants)
    lower: dict[int, int | None] = dict(zip(ordered, [None, *ordered], strict=False))
    higher: dict[int, int | None] = dict(zip(ordered, [*ordered[1:], None], strict=False))
    found: list[tuple[int | None, int | None]] = []
    for instant in reversed(instants):
        below, above = lower[instant], higher[instant]
        found.append((below, above))
        if below is not None:
            higher[below] = above
        if above is not None:
            lower[above] = below
    return found[::-1]


def _fit_between(proposal: Boundary, below: Boundary | None, above: Boundary | None, inherited: Iterable[int] = ()) -> Boundary:
    """Return a proposal with its offsets limited to those between its neighbours.

    The nearest neighbours are enough, because offsets of settled boundaries ascend with their instants. A partition that a
    boundary does not have was created after its decision, so that its offset there is 0.
    """
    offsets = {}
    for partition in sorted({*proposal.offsets, *inherited}):
        lowest = below.offsets.get(partition, 0) if below else 0
        offset = max(proposal.offsets.get(partition, 0), lowest)
        offsets[partition] = min(offset, above.offsets.get(partition, 0)) if above else offset
    if offsets == proposal.offsets:
        return proposal
    # Under this epoch, the log may never have reached an offset that another proposal has decided.
    epochs = {
        partition: epoch for partition, epoch in proposal.epochs.items() if offsets[partition] == proposal.offsets[partition]
    }
    return replace(proposal, offsets=offsets, epochs=epochs)


def _has_moved(neighbour: Boundary, proposal: Boundary, settled: Boundary) -> bool:
    """Return True if a neighbour has moved a proposal: in some partition it has the neighbour's offset instead of its own."""
    return any(
        offset != proposal.offsets.get(partition, 0) and offset == neighbour.offsets.get(partition, 0)
        for partition, offset in settled.offsets.items()
    )


def find_last_expired_boundary(settled: Mapping[int, Boundary], lows: Mapping[int, int]) -> Boundary | None:
    """Return the last boundary before which no record is left in any partition; None if records are left before all boundaries.

    :param settled: the boundaries of one topic, by instant.
    :param lows: the first offset that is left in each of its partitions.
    """
    gone = (b for b in settled.values() if _is_gone(b, lows))
    return max(gone, key=lambda b: b.instant, default=None)


def _find_removable(proposals: Sequence[Boundary], topic_id: str, lows: Mapping[int, int]) -> tuple[list[int], set[int]]:
    """Return the indexes of the proposals that may be removed, and the instants that are kept."""
    mine = [index for index, proposal in enumerate(proposals) if proposal.topic_id == topic_id]
    # Only proposals before the first one with this id: if the id is stale, those of the present topic come later, and are kept.
    others = [i for i, proposal in enumerate(proposals) if proposal.topic_id != topic_id and mine and i < mine[0]]
    settled, dependencies = _fold(proposals[index] for index in mine)
    horizon = find_last_expired_boundary(settled, lows)
    kept = {instant for instant in settled if horizon is None or instant >= horizon.instant}
    pending = list(kept)
    while pending:
        more = dependencies[pending.pop()] - kept
        kept |= more
        pending += more
    first: set[int] = set()
    removed = []
    for index in mine:
        instant = proposals[index].instant
        if instant in first or instant not in kept:
            removed.append(index)
        first.add(instant)
    return sorted([*others, *removed], reverse=True), kept


# --- archives ----------------------------------------------------------------------------------------------------------

ARCHIVE_AFTER = 400
"""Number of a topic's boundaries with records of their own above which the older ones are archived."""
UNARCHIVED = 200
"""Number of newest boundaries that keep records of their own."""
MAX_ARCHIVE_BYTES = 400_000
"""Maximum size of an archive's boundaries in bytes, before compression."""


@dataclass(frozen=True)
class BoundaryArchive:
    """Settled boundaries of one topic, as one record of the ledger.

    Settled boundaries never change. So an archive is treated as if its boundaries had been proposed before all others, wherever
    its record lies in the log. A second copy, or an archive beside the records that it was made of, changes nothing.

    :param first: the earliest boundary.
    :param last: the latest boundary.
    :param count: number of boundaries.
    :param text: all boundaries, compressed.
    :param offset: offset of its record; -1 if unknown.
    """

    first: Boundary
    last: Boundary
    count: int
    text: str = field(repr=False)
    offset: int = field(default=-1, compare=False)

    @classmethod
    def of(cls, settled: Sequence[Boundary]) -> BoundaryArchive:
        """Return the archive of some boundaries.

        :param settled: settled boundaries of one topic, in ascending order.
        """
        return cls(settled[0], settled[-1], len(settled), pack_values([[b.instant, _to_json(b)] for b in settled]))

    @cached_property
    def boundaries(self) -> tuple[Boundary, ...]:
        """All boundaries, in ascending order."""
        return tuple(_parse_boundary(self.first.topic, instant, value) for instant, value in unpack_values(self.text))

    @cached_property
    def _instants(self) -> list[int]:
        return [boundary.instant for boundary in self.boundaries]

    def find_near(self, instant: int) -> Iterator[Boundary]:
        """Yield the boundary of an instant, if the archive has it, and its neighbours in the archive.

        The archive is decompressed only if the instant lies within it.
        """
        if instant > self.last.instant:
            yield self.last
        elif instant < self.first.instant:
            yield self.first
        else:
            below, above = bisect_left(self._instants, instant), bisect_right(self._instants, instant)
            yield from self.boundaries[max(below - 1, 0) : above + 1]

    def find_last_expired(self, lows: Mapping[int, int]) -> Boundary | None:
        """Return the last boundary before which no record is left; None without such a boundary."""
        if _is_gone(self.last, lows):
            return self.last
        return find_last_expired_boundary({b.instant: b for b in self.boundaries}, lows) if _is_gone(self.first, lows) else None


def select_near_boundaries(
    archives: Iterable[BoundaryArchive], instants: Iterable[int], lows: Mapping[int, int]
) -> list[Boundary]:
    """Return the archived boundaries that affect the boundaries of some instants, in ascending order.

    Guarantee: for proposals of these instants, :func:`resolve_proposals` returns equal results with these boundaries as with all
    archived ones, because only the neighbours of a proposal affect it.

    :param archives: archives of one topic and one topic id.
    :param instants: the instants that are looked up, and those of all proposals that are not archived.
    :param lows: the first offset that is left in each partition.
    """
    archives = tuple(archives)
    found: dict[int, Boundary] = {}
    for instant in sorted(set(instants)):
        near = [boundary for archive in archives for boundary in archive.find_near(instant)]
        below = max((b for b in near if b.instant < instant), key=lambda b: b.instant, default=None)
        above = min((b for b in near if b.instant > instant), key=lambda b: b.instant, default=None)
        same = next((b for b in near if b.instant == instant), None)
        found |= {b.instant: b for b in (below, same, above) if b is not None}
    gone = [boundary for archive in archives if (boundary := archive.find_last_expired(lows)) is not None]
    if gone:
        last = max(gone, key=lambda b: b.instant)
        found[last.instant] = last
    return [found[instant] for instant in sorted(found)]


def to_archive(near: Iterable[Boundary], proposals: Sequence[Boundary]) -> list[BoundaryArchive]:
    """Return new archives of the older boundaries, once there are more than :data:`ARCHIVE_AFTER` with records of their own.

    :param near: the archived boundaries that affect these proposals (:func:`select_near_boundaries`).
    :param proposals: the boundaries of one topic and topic id that are not archived, in the order of the log.
    """
    if len(proposals) <= ARCHIVE_AFTER:
        return []
    settled = resolve_proposals([*near, *proposals])
    mine = sorted({proposal.instant for proposal in proposals})[:-UNARCHIVED]
    made: list[BoundaryArchive] = []
    part: list[Boundary] = []
    size = 0
    for boundary in (settled[instant] for instant in mine):
        own = len(encode_json(_to_json(boundary)))
        if part and size + own > MAX_ARCHIVE_BYTES:
            made.append(BoundaryArchive.of(part))
            part, size = [], 0
        part.append(boundary)
        size += own
    return [*made, BoundaryArchive.of(part)] if part else made


@dataclass(frozen=True)
class RemovableBoundaries:
    """The boundaries of a topic that may be removed.

    :param proposals: indexes of proposals, in the order in which they may be removed one by one.
    :param archives: indexes of archives.
    :param near: the archived boundaries that affect the proposals.
    """

    proposals: list[int]
    archives: list[int]
    near: list[Boundary]


def find_removable_boundaries(
    archives: Sequence[BoundaryArchive], proposals: Sequence[Boundary], topic_id: str, lows: Mapping[int, int]
) -> RemovableBoundaries:
    """Return the proposals and archives of a topic that are no longer needed.

    The last boundary before which no record is left is needed, all boundaries after it, and those that these depend on. Not
    needed are older ones, those of an earlier topic of this name, second proposals of an instant, and second copies of archives.

    Guarantee: at every moment of the removal, and whatever is proposed meanwhile, the needed boundaries keep their offsets. A
    boundary depends only on those before it in the log, so the newest are removed first. If a removed boundary is looked up
    again, its offsets lie below the beginning of the log, as before.

    :param archives: archives of one topic, in the order of the log.
    :param proposals: the boundaries that are not archived, in the order of the log.
    :param topic_id: the present id of the topic.
    :param lows: the first offset that is left in each of its partitions.
    """
    mine = [index for index, archive in enumerate(archives) if archive.first.topic_id == topic_id]
    near = select_near_boundaries([archives[index] for index in mine], (p.instant for p in proposals), lows)
    removable, kept = _find_removable([*near, *proposals], topic_id, lows)
    horizon = find_last_expired_boundary({b.instant: b for b in near}, lows)
    gone: list[int] = []
    seen: set[str] = set()
    for index, archive in enumerate(archives):
        is_old = horizon is not None and archive.last.instant < horizon.instant
        if index not in mine:
            removed = bool(mine) and index < mine[0]
        elif archive.text in seen:
            removed = True
        else:
            removed = is_old and not any(archive.first.instant <= instant <= archive.last.instant for instant in kept)
            seen.add(archive.text)
        if removed:
            gone.append(index)
    return RemovableBoundaries([index - len(near) for index in removable if index >= len(near)], gone, near)


def limit_start(boundary: Boundary, offsets: Mapping[TopicPartition, int]) -> Boundary:
    """Return the start of an interval that directly follows another one, which ended at these offsets.

    Usually the boundary has these offsets. If the ledger has lost it, it was decided again, and may have later ones: records that
    arrived after the previous interval was moved would then belong to no interval.
    """
    lower = {p: o for p, at in boundary.offsets.items() if (o := offsets.get(TopicPartition(boundary.topic, p), at)) < at}
    epochs = {p: epoch for p, epoch in boundary.epochs.items() if p not in lower}
    return replace(boundary, offsets={**boundary.offsets, **lower}, epochs=epochs) if lower else boundary


def find_known_epochs(boundaries: Iterable[Boundary]) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Return offsets and leader epochs of the boundaries of several topics, for the partitions whose epoch is known."""
    offsets: dict[TopicPartition, int] = {}
    epochs: dict[TopicPartition, int] = {}
    for boundary in boundaries:
        for partition, epoch in boundary.epochs.items():
            tp = TopicPartition(boundary.topic, partition)
            offsets[tp], epochs[tp] = boundary.offsets[partition], epoch
    return offsets, epochs


def _is_gone(boundary: Boundary, lows: Mapping[int, int]) -> bool:
    return bool(lows) and all(boundary.offsets.get(partition, 0) <= low for partition, low in lows.items())


def plan_interval_ranges(
    topics: Iterable[str],
    starts: Mapping[str, Boundary],
    ends: Mapping[str, Boundary],
    log: Log,
    position: Position,
    data_loss: DataLossPolicy,
    others: Iterable[IntervalState] = (),
) -> Ranges:
    """Return the offsets between two boundaries, per partition, without those that other windows of the pipeline have moved.

    :param starts: by topic, the boundary of the interval's start.
    :param ends: by topic, the boundary of the interval's end.
    :param log: the present log.
    :param position: position of the pipeline by windows without an interval. Offsets between the beginning of the first of them
        and this position are not moved again.
    :param data_loss: ``fail`` refuses an interval whose records were deleted before they were read; ``skip`` records a gap.
    :param others: the other intervals of the pipeline, whose offsets are not moved again either.
    :raises IntervalCut: the interval has records on both sides of these windows, and ``data_loss`` is ``fail``.
    :raises LogTruncated: the log was truncated below the interval's start or end, and has grown again.
    :raises DataLoss: records of the interval were deleted, or (:class:`~airflow_kafka_spark.errors.BeginningDeleted`) may have
        been.
    """
    natural: list[OffsetRange] = []
    cut_off: list[OffsetRange] = []
    passed_by: dict[TopicPartition, int] = {}
    for topic in sorted(topics):
        known, found = position.topic_ids.get(topic), log.topic_ids.get(topic)
        for partition, end in sorted(ends[topic].offsets.items()):
            tp, begin = TopicPartition(topic, partition), starts[topic].offsets.get(partition, 0)
            passed = position.offsets.get(tp, 0) if known in (None, "", found) else 0
            began = position.began.get(tp, 0)
            if begin < began and end <= passed:
                # It begins before the pipeline's first window without an interval.
                natural.append(OffsetRange(topic, partition, begin, max(begin, min(end, began))))
                continue
            if passed and begin < began:
                cut_off.append(OffsetRange(topic, partition, begin, began))
            start = min(max(begin, passed), max(end, passed))
            natural.append(OffsetRange(topic, partition, start, max(end, start)))
            passed_by[tp] = passed
    others = tuple(others)
    gaps = _find_cut_off(exclude_other_intervals(cut_off, log.topic_ids, others), log, position, data_loss)
    ranges = []
    for r in exclude_other_intervals(natural, log.topic_ids, others):
        tp, boundary = r.topic_partition, starts[r.topic]
        cut = log.diverged.get(tp, r.start)
        if tp in log.diverged and data_loss == "fail":
            epochs = boundary.epochs.get(r.partition, -1), log.partitions[tp].epoch
            raise LogTruncated(*tp, max(r.start, cut + 1), epochs[0], cut, epochs[1], format_instant(boundary.instant))
        if cut < r.start:
            gaps.append(Gap(*tp, max(cut, log.partitions[tp].low), r.start))
        low = min(log.partitions[tp].low if tp in log.partitions else 0, r.end)
        # If the start is uncertain, the interval may have begun before the first offset that is left.
        is_known = r.start > boundary.offsets.get(r.partition, 0) or r.partition not in boundary.earliest
        wanted = r.start if is_known else max(passed_by.get(tp, 0), boundary.earliest[r.partition])
        if wanted < low:
            if data_loss == "fail":
                raise (
                    DataLoss(*tp, wanted, low)
                    if is_known
                    else BeginningDeleted(*tp, wanted, low, format_instant(boundary.instant))
                )
            gaps.append(Gap(*tp, wanted, low))
            r = replace(r, start=max(r.start, low))
        ranges.append(r)
    return Ranges(tuple(ranges), tuple(gaps), 0)


def _find_cut_off(ranges: Iterable[OffsetRange], log: Log, position: Position, data_loss: DataLossPolicy) -> list[Gap]:
    """Return the offsets of an interval that its window cannot have, because windows without an interval have moved offsets
    between these and its others. Deleted ones are left out.

    :raises IntervalCut: there are some, and ``data_loss`` is ``fail``.
    """
    gaps = []
    for r in ranges:
        tp = r.topic_partition
        start = max(r.start, log.partitions[tp].low if tp in log.partitions else 0)
        if start >= r.end:
            continue
        if data_loss == "fail":
            raise IntervalCut(*tp, start, position.began[tp], position.offsets[tp])
        gaps.append(Gap(*tp, start, r.end))
    return gaps


# --- records of the ledger ---------------------------------------------------------------------------------------------


def make_boundary_prefix(topic: str) -> bytes:
    """Return the prefix of the keys of a topic's boundaries. No key of a pipeline has this prefix."""
    return encode_json([None, "boundary", topic])[:-1] + b","


def boundary_to_record(boundary: Boundary, token: str) -> tuple[bytes, bytes]:
    """Return key and value of a proposal. Each proposal has a key of its own, so that compaction keeps the first one.

    :param token: a random token that makes the key unique.
    """
    key = encode_json([None, "boundary", boundary.topic, boundary.instant, token])
    return key, encode_json({"v": VERSION, **_to_json(boundary)})


def boundary_from_record(key: bytes, value: bytes) -> Boundary:
    """Return the boundary that a ledger record contains.

    :raises ValueError: a later release wrote the record.
    """
    _, _, topic, instant, _ = json.loads(key)
    return _parse_boundary(topic, instant, _load_value(value))


def make_archive_prefix(topic: str) -> bytes:
    """Return the prefix of the keys of a topic's archives."""
    return encode_json([None, "boundaries", topic])[:-1] + b","


def archive_to_record(archive: BoundaryArchive, token: str) -> tuple[bytes, bytes]:
    """Return key and value of an archive.

    :param token: a random token that makes the key unique, so that no archive is overwritten.
    """
    ends = {name: [b.instant, _to_json(b)] for name, b in (("first", archive.first), ("last", archive.last))}
    value = {"v": VERSION, "count": archive.count, **ends, "boundaries": archive.text}
    return encode_json([None, "boundaries", archive.first.topic, token]), encode_json(value)


def archive_from_record(key: bytes, value: bytes, offset: int) -> BoundaryArchive:
    """Return the archive that a ledger record contains.

    :raises ValueError: a later release wrote the record.
    """
    _, _, topic, _ = json.loads(key)
    found = _load_value(value)
    first, last = (_parse_boundary(topic, *found[name]) for name in ("first", "last"))
    return BoundaryArchive(first, last, found["count"], found["boundaries"], offset)


def _load_value(value: bytes) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(value)
    if found["v"] > VERSION:
        raise ValueError(f"a boundary of version {found['v']}")
    return found


def _to_json(boundary: Boundary) -> dict[str, Any]:
    return {
        "topic_id": boundary.topic_id,
        "offsets": [[partition, offset] for partition, offset in sorted(boundary.offsets.items())],
        "by": boundary.by,
        **({"earliest": [[p, offset] for p, offset in sorted(boundary.earliest.items())]} if boundary.earliest else {}),
        **({"at": boundary.decided_at} if boundary.decided_at else {}),
        **({"epochs": [[p, epoch] for p, epoch in sorted(boundary.epochs.items())]} if boundary.epochs else {}),
    }


def _parse_boundary(topic: str, instant: int, found: Mapping[str, Any]) -> Boundary:
    offsets, earliest, epochs = ({p: o for p, o in found.get(name, ())} for name in ("offsets", "earliest", "epochs"))
    return Boundary(topic, found["topic_id"], instant, offsets, found.get("by", ""), earliest, found.get("at", 0), epochs)
