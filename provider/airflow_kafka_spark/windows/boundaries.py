"""Boundaries: which offset of each partition an instant stands for, decided once for all who ask.

A boundary is a record of the ledger topic. Whoever needs one that is not there yet looks it up in Kafka and *proposes* it, by
writing it down; the order of the log says which proposal came first, and :func:`settle` gives every reader the same boundaries.
So nobody has to be shut out while several decide at once, and neighbouring windows share what lies between them: windows tile
the log, whatever the order in which they are planned, and however Kafka's answers change meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from airflow_kafka_spark.errors import DataLoss
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
    """

    topic: str
    topic_id: str
    instant: int
    offsets: Mapping[int, int]
    by: str = ""


def settle(proposals: Iterable[Boundary]) -> dict[int, Boundary]:
    """What counts of one topic's proposals, by instant: of each instant the first, kept between those that counted before it.

    An instant that is decided late may find records that others have already been decided past: a record may come late, or its
    timestamp lie in the future. It then stands for what is left between its neighbours, perhaps for nothing.

    :param proposals: of one topic (and one topic id), in the order of the log.
    """
    settled: dict[int, Boundary] = {}
    for proposal in proposals:
        if proposal.instant not in settled:
            settled[proposal.instant] = fit(proposal, settled)
    return settled


def fit(proposal: Boundary, settled: Mapping[int, Boundary]) -> Boundary:
    """A proposal, moved to where it does not pass any boundary that counts already."""
    earlier = [b for instant, b in settled.items() if instant < proposal.instant]
    later = [b for instant, b in settled.items() if instant > proposal.instant]
    offsets = {}
    for partition in sorted({*proposal.offsets, *(p for b in earlier for p in b.offsets)}):
        # A partition that a later boundary does not know was created after it was decided: it stands at its beginning there.
        highest = min((b.offsets.get(partition, 0) for b in later), default=None)
        lowest = max((b.offsets.get(partition, 0) for b in earlier), default=0)
        offset = max(proposal.offsets.get(partition, 0), lowest)
        offsets[partition] = offset if highest is None else min(offset, highest)
    return Boundary(proposal.topic, proposal.topic_id, proposal.instant, offsets, proposal.by)


def interval_ranges(
    topics: Iterable[str],
    starts: Mapping[str, Boundary],
    ends: Mapping[str, Boundary],
    log: Log,
    position: Position,
    data_loss: DataLossPolicy,
) -> Ranges:
    """The offsets between two boundaries, per partition.

    :param starts: per topic, the boundary of the interval's start.
    :param ends: per topic, that of its end.
    :param log: what Kafka holds now.
    :param position: what windows that belong to no interval have moved already: it is not moved again.
    :param data_loss: ``fail`` refuses to pass over records that were deleted before they were read; ``skip`` records a gap.
    :raises DataLoss: records of the interval are gone.
    """
    ranges, gaps = [], []
    for topic in sorted(topics):
        known, found = position.topic_ids.get(topic), log.topic_ids.get(topic)
        for partition, end in sorted(ends[topic].offsets.items()):
            tp = TopicPartition(topic, partition)
            passed = position.offsets.get(tp, 0) if known in (None, "", found) else 0
            start = min(max(starts[topic].offsets.get(partition, 0), passed), max(end, passed))
            end = max(end, start)
            low = log.partitions[tp].low if tp in log.partitions else 0
            if start < low and start < end:
                if data_loss == "fail":
                    raise DataLoss(*tp, start, min(low, end))
                gaps.append(Gap(*tp, start, min(low, end)))
                start = min(low, end)
            ranges.append(OffsetRange(topic, partition, start, end))
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
    }
    return _dump([None, "boundary", boundary.topic, boundary.instant, token]), _dump(value)


def boundary_from_record(key: bytes, value: bytes) -> Boundary:
    """:raises ValueError: a later release wrote it."""
    _, _, topic, instant, _ = json.loads(key)
    found = json.loads(value)
    if found["v"] > VERSION:
        raise ValueError(f"a boundary of version {found['v']}")
    return Boundary(topic, found["topic_id"], instant, {p: o for p, o in found["offsets"]}, found.get("by", ""))


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()
