"""Whether a window follows the one that a sink took last: the compare of a sink's compare-and-set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from airflow_kafka_spark.windows.model import Applied, Gap, OffsetRange, TopicPartition, Window


def continues(previous: Applied, window: Window) -> list[str]:
    """Why ``window`` cannot be the pipeline's next window after ``previous``; an empty list when it can.

    Each partition has to start where the previous window ended, or behind it if the window's own gaps account for every offset
    between. A partition that ``previous`` did not have may start anywhere, and a topic may be left out as a whole. A window that
    begins where somebody has moved the pipeline to (offset control) may start anywhere: its plan says so, and no other's does.

    :param previous: the last window a sink remembers of this pipeline.
    :param window: the one that is to be applied now.
    :return: one sentence per contradiction, in the order of topic and partition.
    """
    if previous.number >= window.number:
        return [f"window #{previous.number} of this pipeline was applied already, and #{window.number} does not come after it"]
    if window.moved:
        return []
    starts = {r.topic_partition: r.start for r in window.ranges}
    topics = {tp.topic for tp in starts}
    found = []
    for r in sorted(previous.ranges):
        start = starts.get(r.topic_partition)
        if start is None:
            if r.topic in topics:
                found.append(f"{r.topic_partition} is not part of it, though its last window ended there at offset {r.end}")
        elif start < r.end:
            found.append(f"{r.topic_partition} starts at offset {start}, though everything below {r.end} was applied already")
        elif start > r.end and not _covers(window.gaps, r.topic_partition, r.end, start):
            found.append(f"{r.topic_partition} starts at offset {start}, though its last window ended at {r.end}")
    return found


def without_recreated(previous: Applied, topic_ids: Mapping[str, str], window: Window) -> Applied:
    """``previous`` without the topics that were deleted and created again since: their offsets mean other records now.

    :param topic_ids: the ids of the topics when ``previous`` was applied, as far as they are known.
    """
    kept = tuple(r for r in previous.ranges if not _differ(topic_ids.get(r.topic), window.topic_ids.get(r.topic)))
    return replace(previous, ranges=kept)


def same_ranges(one: Iterable[OffsetRange], other: Iterable[OffsetRange]) -> bool:
    """Whether two windows of the same number are the same window."""
    return sorted(one) == sorted(other)


def _differ(one: str | None, other: str | None) -> bool:
    return bool(one and other and one != other)


def _covers(gaps: Sequence[Gap], tp: TopicPartition, start: int, end: int) -> bool:
    """Whether gaps of one partition account for every offset of ``[start, end)``."""
    for gap in sorted((g for g in gaps if (g.topic, g.partition) == tp), key=lambda g: g.start):
        if gap.start <= start:
            start = max(start, gap.end)
    return start >= end
