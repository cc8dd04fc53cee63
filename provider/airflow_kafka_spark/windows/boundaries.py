"""Boundaries: which offset of each partition an instant stands for, decided once for all who ask.

A boundary is a record of the ledger topic. Whoever needs one that is not there yet looks it up in Kafka and *proposes* it, by
writing it down; the order of the log says which proposal came first, and :func:`settle` gives every reader the same boundaries.
So nobody has to be shut out while several decide at once, and neighbouring windows share what lies between them: windows tile
the log, whatever the order in which they are planned, and however Kafka's answers change meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from airflow_kafka_spark.errors import BeginningDeleted, DataLoss, TopicRecreated
from airflow_kafka_spark.windows.instants import iso
from airflow_kafka_spark.windows.interval import IntervalState, what_others_leave
from airflow_kafka_spark.windows.model import Gap, OffsetRange, TopicPartition
from airflow_kafka_spark.windows.plan import DataLossPolicy, Log, Position, Ranges

VERSION = 1


@dataclass(frozen=True)
class Boundary:
    """Which offsets an instant stands for in one topic.

    :param topic: the topic.
    :param topic_id: its id when this was decided.
    :param instant: milliseconds since the epoch.
    :param offsets: per partition, the first offset that does not belong to what is before the instant. A partition that is
        missing was created later: all of its records lie behind.
    :param by: who decided it.
    :param earliest: of partitions that had lost their beginning when this was decided, where nothing older than the instant was
        left to tell where it lay: the lowest offset that it may stand for. Empty where that is not known.
    :param decided_at: milliseconds since the epoch; 0 where that is not known.
    """

    topic: str
    topic_id: str
    instant: int
    offsets: Mapping[int, int]
    by: str = ""
    earliest: Mapping[int, int] = field(default_factory=dict)
    decided_at: int = 0


def propose(
    topic: str,
    topic_id: str,
    instant: int,
    found: Mapping[int, int],
    lows: Mapping[int, int],
    settled: Mapping[int, Boundary],
    *,
    by: str,
    now: int,
) -> Boundary:
    """A boundary to propose, with what is not known of it.

    Where the log begins at or behind it, records that were deleted may have been older than the instant, or not. An older record
    that is left shows that they were, as far as timestamps ascend. It is known, too, if nothing has ever been deleted, or if an
    earlier boundary is at the beginning of the log already: one whose place is known, or one that was decided before this
    instant came.

    :param found: per partition, the first offset at or behind the instant.
    :param lows: the first offset that is left in each partition, asked for after ``found``.
    :param settled: what is decided, by instant.
    :param now: milliseconds since the epoch.
    """
    proposal = Boundary(topic, topic_id, instant, dict(found), by, decided_at=now)
    below, _ = _around(instant, settled)
    earliest = {}
    for partition, offset in place(proposal, settled).offsets.items():
        low = lows.get(partition, 0)
        known = below.offsets.get(partition, 0) if below else 0
        is_exact = below is not None and (partition not in below.earliest or 0 < below.decided_at < instant)
        if offset > low or (is_exact and known == offset):
            continue
        lowest = below.earliest.get(partition, known) if below else 0
        if lowest < offset:
            earliest[partition] = lowest
    return replace(proposal, earliest=earliest)


def place(proposal: Boundary, settled: Mapping[int, Boundary]) -> Boundary:
    """Where a proposal of an instant that is not settled would stand, if it were the next one."""
    return _fit(proposal, *_around(proposal.instant, settled))


def _around(instant: int, settled: Mapping[int, Boundary]) -> tuple[Boundary | None, Boundary | None]:
    """The nearest boundaries before and after an instant."""
    below = max((i for i in settled if i < instant), default=None)
    above = min((i for i in settled if i > instant), default=None)
    return None if below is None else settled[below], None if above is None else settled[above]


def settle(proposals: Iterable[Boundary]) -> dict[int, Boundary]:
    """The boundaries of one topic that count, by instant: of each instant the first proposal, kept between its neighbours.

    An instant that is decided late may find records that others have already been decided past: a record may come late, or its
    timestamp lie in the future. It then stands for what is left between its neighbours, perhaps for nothing.

    Guarantee: offsets never descend as instants ascend, and a proposal that follows changes nothing that is settled. Settling
    what is settled gives the same. The cost is n log n in the number of proposals, times their partitions.

    :param proposals: of one topic (and one topic id), in the order of the log.
    :return: in the order of the log.
    """
    return _fold(proposals)[0]


def _fold(proposals: Iterable[Boundary]) -> tuple[dict[int, Boundary], dict[int, set[int]]]:
    """What :func:`settle` gives; and per instant those without which it would stand elsewhere: a neighbour that has moved it, or
    the instant from which it has a partition."""
    first: dict[int, Boundary] = {}
    for proposal in proposals:
        first.setdefault(proposal.instant, proposal)
    settled: dict[int, Boundary] = {}
    leans: dict[int, set[int]] = {}
    known_from: dict[int, int] = {}
    for (instant, proposal), (below, above) in zip(first.items(), _neighbours(list(first)), strict=True):
        inherited = {
            partition: since for partition, since in known_from.items() if since < instant and partition not in proposal.offsets
        }
        boundary = _fit(
            proposal, settled[below] if below is not None else None, settled[above] if above is not None else None, inherited
        )
        settled[instant] = boundary
        leans[instant] = {n for n in (below, above) if n is not None and _moves(settled[n], proposal, boundary)}
        leans[instant].update(inherited.values())
        for partition in boundary.offsets:
            known_from[partition] = min(instant, known_from.get(partition, instant))
    return settled, leans


def _neighbours(instants: Sequence[int]) -> list[tuple[int | None, int | None]]:
    """Of each instant the next lower and the next higher one among those before it in the sequence.

    Found backwards: the last one has its neighbours among all; without it, the one before it has; and so on.
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


def _fit(proposal: Boundary, below: Boundary | None, above: Boundary | None, inherited: Iterable[int] = ()) -> Boundary:
    """A proposal, moved to where it passes neither neighbour.

    The nearest ones are enough: offsets ascend with instants among those that are settled. A partition that a boundary does not
    know was created after it was decided: it stands at its beginning there.
    """
    offsets = {}
    for partition in sorted({*proposal.offsets, *inherited}):
        lowest = below.offsets.get(partition, 0) if below else 0
        offset = max(proposal.offsets.get(partition, 0), lowest)
        offsets[partition] = min(offset, above.offsets.get(partition, 0)) if above else offset
    return replace(proposal, offsets=offsets)


def _moves(neighbour: Boundary, proposal: Boundary, settled: Boundary) -> bool:
    """Whether a proposal stands where this neighbour stands, in a partition for which it said something else."""
    return any(
        offset != proposal.offsets.get(partition, 0) and offset == neighbour.offsets.get(partition, 0)
        for partition, offset in settled.offsets.items()
    )


def beyond_retention(settled: Mapping[int, Boundary], lows: Mapping[int, int]) -> Boundary | None:
    """The last boundary that has nothing before it any more: no record below it is left in any partition. None without one.

    :param settled: of one topic, by instant.
    :param lows: the first offset that is left in each of its partitions.
    """
    if not lows:
        return None
    gone = (b for b in settled.values() if all(b.offsets.get(partition, 0) <= low for partition, low in lows.items()))
    return max(gone, key=lambda b: b.instant, default=None)


def prunable(proposals: Sequence[Boundary], topic_id: str, lows: Mapping[int, int]) -> list[int]:
    """Which proposals of a topic nobody needs any more: they may be removed in this order, one after the other.

    Needed are the last boundary that has nothing before it any more, those after it, and whatever these lean on. Not needed are
    older ones, those of a topic of this name that was replaced, and those that came second.

    Guarantee: at every moment of the removal, and whatever is proposed meanwhile, those that are needed stay where they are.
    A boundary leans only on those before it in the log, so the newest go first. A boundary that is removed and asked for once
    more stands below what is left of the log, as it did before.

    :param proposals: of one topic, in the order of the log.
    :param topic_id: the topic's id now.
    :param lows: the first offset that is left in each of its partitions now.
    :return: indexes into ``proposals``.
    """
    mine = [index for index, proposal in enumerate(proposals) if proposal.topic_id == topic_id]
    # A stale answer may name the id of a topic that is gone: its proposals are not followed by those of the one before it.
    others = [i for i, proposal in enumerate(proposals) if proposal.topic_id != topic_id and mine and i < mine[0]]
    settled, leans = _fold(proposals[index] for index in mine)
    horizon = beyond_retention(settled, lows)
    kept = {instant for instant in settled if horizon is None or instant >= horizon.instant}
    pending = list(kept)
    while pending:
        more = leans[pending.pop()] - kept
        kept |= more
        pending += more
    first: set[int] = set()
    removed = []
    for index in mine:
        instant = proposals[index].instant
        if instant in first or instant not in kept:
            removed.append(index)
        first.add(instant)
    return sorted([*others, *removed], reverse=True)


def interval_ranges(
    topics: Iterable[str],
    starts: Mapping[str, Boundary],
    ends: Mapping[str, Boundary],
    log: Log,
    position: Position,
    data_loss: DataLossPolicy,
    others: Iterable[IntervalState] = (),
) -> Ranges:
    """The offsets between two boundaries, per partition.

    :param starts: per topic, the boundary of the interval's start.
    :param ends: per topic, that of its end.
    :param log: what Kafka holds now.
    :param position: what windows that belong to no interval have moved already: it is not moved again.
    :param data_loss: ``fail`` refuses to pass over records that were deleted before they were read; ``skip`` records a gap.
    :param others: the other intervals of the pipeline: what they have is not moved again either.
    :raises DataLoss: records of the interval are gone, or (:class:`~airflow_kafka_spark.errors.BeginningDeleted`) may be.
    :raises TopicRecreated: the pipeline knows another topic of this name.
    """
    natural = []
    for topic in sorted(topics):
        known, found = position.topic_ids.get(topic), log.topic_ids.get(topic)
        if known and found and known != found and data_loss == "fail":
            raise TopicRecreated(topic, known, found)
        for partition, end in sorted(ends[topic].offsets.items()):
            passed = position.offsets.get(TopicPartition(topic, partition), 0) if known in (None, "", found) else 0
            start = min(max(starts[topic].offsets.get(partition, 0), passed), max(end, passed))
            natural.append(OffsetRange(topic, partition, start, max(end, start)))
    ranges, gaps = [], []
    for r in what_others_leave(natural, log.topic_ids, others):
        tp, boundary = r.topic_partition, starts[r.topic]
        low = min(log.partitions[tp].low if tp in log.partitions else 0, r.end)
        # Where its start is not known the interval may have begun before all that is left of the log.
        is_known = r.start > boundary.offsets.get(r.partition, 0) or r.partition not in boundary.earliest
        passed = position.offsets.get(tp, 0) if position.topic_ids.get(r.topic) in (None, "", log.topic_ids.get(r.topic)) else 0
        wanted = r.start if is_known else max(passed, boundary.earliest[r.partition])
        if wanted < low:
            if data_loss == "fail":
                raise DataLoss(*tp, wanted, low) if is_known else BeginningDeleted(*tp, wanted, low, iso(boundary.instant))
            gaps.append(Gap(*tp, wanted, low))
            r = replace(r, start=max(r.start, low))
        ranges.append(r)
    return Ranges(tuple(ranges), tuple(gaps), 0)


# --- as records of the ledger ------------------------------------------------------------------------------------------


def boundary_prefix(topic: str) -> bytes:
    """What the keys of a topic's boundaries begin with: no pipeline's do."""
    return _dump([None, "boundary", topic])[:-1] + b","


def boundary_to_record(boundary: Boundary, token: str) -> tuple[bytes, bytes]:
    """Key and value. Each proposal has a key of its own, so that compaction keeps the first one.

    :param token: unguessable.
    """
    value = {
        "v": VERSION,
        "topic_id": boundary.topic_id,
        "offsets": [[partition, offset] for partition, offset in sorted(boundary.offsets.items())],
        "by": boundary.by,
        **({"earliest": [[p, offset] for p, offset in sorted(boundary.earliest.items())]} if boundary.earliest else {}),
        **({"at": boundary.decided_at} if boundary.decided_at else {}),
    }
    return _dump([None, "boundary", boundary.topic, boundary.instant, token]), _dump(value)


def boundary_from_record(key: bytes, value: bytes) -> Boundary:
    """:raises ValueError: a later release wrote it."""
    _, _, topic, instant, _ = json.loads(key)
    found = json.loads(value)
    if found["v"] > VERSION:
        raise ValueError(f"a boundary of version {found['v']}")
    offsets, earliest = ({p: o for p, o in found.get(name, ())} for name in ("offsets", "earliest"))
    return Boundary(topic, found["topic_id"], instant, offsets, found.get("by", ""), earliest, found.get("at", 0))


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
