"""The compare of a sink's compare-and-set: does a window continue the last one that the sink has recorded?

Offsets are compared only where they mean the same records: those of another cluster, or of a topic that was deleted and created
again, are refused (:func:`refuse_foreign`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from airflow_kafka_spark.errors import ForeignOffsets, WindowConflict
from airflow_kafka_spark.windows.model import Applied, Gap, OffsetRange, TopicPartition, Window


def continues(previous: Applied, window: Window) -> list[str]:
    """Return the reasons why ``window`` cannot be the pipeline's next window after ``previous``; an empty list if it can.

    Each partition has to start where the previous window ended, or behind it if the window's own gaps account for every offset
    between. A partition that ``previous`` did not have may start anywhere, and a topic may be left out as a whole. A window that
    begins where a manual change has put the pipeline (offset control) may start anywhere; only its plan says so.

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


def refuse_gap(previous: Applied, window: Window, place: str) -> None:
    """Compare a window with the one that its sink took last.

    Topics that were created anew in between are not compared: to go on with such a topic was decided when the window was
    planned. To go on with another cluster is decided by moving the pipeline, which the window's plan says.

    :param previous: the last window in the sink's record, but for this one.
    :param place: names the record in messages.
    :raises ForeignOffsets: it is of another cluster, and the pipeline was not moved since.
    :raises WindowConflict: the window does not continue it.
    """
    if not window.moved and _differ(previous.cluster_id, window.cluster_id):
        refuse_foreign(previous, window.cluster_id, window.topic_ids)
    if reasons := continues(without_recreated(previous, window), window):
        expected = f"a window that follows #{previous.number}, the newest in {place}"
        raise WindowConflict(str(window), "; ".join(reasons), expected)


def refuse_other(applied: Applied, window: Window, place: str) -> None:
    """Compare a window with the sink's record of the same pipeline and number: whether it is of this very window.

    :param place: names the record in messages.
    :raises ForeignOffsets: it is of another cluster, or of another topic of the same name.
    :raises WindowConflict: it is of other offsets.
    """
    refuse_foreign(applied, window.cluster_id, window.topic_ids)
    if not same_ranges(applied.ranges, window.ranges):
        there = ", ".join(map(str, applied.ranges))
        raise WindowConflict(str(window), f"{place} has {there} under this number", ", ".join(map(str, window.ranges)))


def refuse_foreign(applied: Applied, cluster_id: str, topic_ids: Mapping[str, str]) -> None:
    """Make sure that the offsets in a sink's record mean the records that these ids stand for. Ids that either side does not
    know are not compared.

    :param cluster_id: the cluster that is read.
    :param topic_ids: the ids of its topics.
    :raises ForeignOffsets: they do not.
    """
    topics = {
        topic: (applied.topic_ids[topic], topic_ids[topic])
        for topic in sorted(applied.topic_ids.keys() & topic_ids.keys())
        if _differ(applied.topic_ids[topic], topic_ids[topic])
    }
    if topics or _differ(applied.cluster_id, cluster_id):
        raise ForeignOffsets(applied.pipeline, applied.number, applied.cluster_id, cluster_id, topics)


def without_recreated(previous: Applied, window: Window) -> Applied:
    """Return ``previous`` without the topics that were deleted and created again since. Offsets of these topics mean other
    records now.
    """
    kept = tuple(r for r in previous.ranges if not _differ(previous.topic_ids.get(r.topic), window.topic_ids.get(r.topic)))
    return replace(previous, ranges=kept)


def same_ranges(one: Iterable[OffsetRange], other: Iterable[OffsetRange]) -> bool:
    """Return True if two windows of the same number are the same window."""
    return sorted(one) == sorted(other)


def _differ(one: str | None, other: str | None) -> bool:
    return bool(one and other and one != other)


def _covers(gaps: Sequence[Gap], tp: TopicPartition, start: int, end: int) -> bool:
    """Return True if gaps of one partition account for every offset of ``[start, end)``."""
    for gap in sorted((g for g in gaps if (g.topic, g.partition) == tp), key=lambda g: g.start):
        if gap.start <= start:
            start = max(start, gap.end)
    return start >= end
