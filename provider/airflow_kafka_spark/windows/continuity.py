"""The comparison in a sink's compare-and-set: a window has to continue the last one that the sink has recorded.

Offsets can be compared only if they refer to one log. Those of another cluster, or of a topic that was deleted and recreated, are
refused (:func:`refuse_foreign`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from airflow_kafka_spark.errors import ForeignOffsets, RecordElsewhere, SinkRecordMissing, WindowConflict
from airflow_kafka_spark.windows.model import ELSEWHERE, Applied, Gap, OffsetRange, TopicPartition, Window

SHOWN_PARTITIONS = 100
"""Maximum number of partitions in a command that a message names."""


def find_contradictions(previous: Applied, window: Window) -> list[str]:
    """Return the reasons why ``window`` cannot be the pipeline's next window after ``previous``; an empty list if it can.

    Each partition has to start where the previous window ended, or after it if the gaps of the window, and of windows without
    records before it, account for every offset in between. If the offsets in between went elsewhere (``window.after``), it may
    start anywhere after it. A partition that ``previous`` does not have may start anywhere, and a topic may be left out as a
    whole. A window that begins at a position set by a manual change (``window.moved``) may start anywhere.

    :param previous: the last window of this pipeline in the sink's record.
    :param window: the window to apply now.
    :return: one sentence per contradiction, in the order of topic and partition.
    """
    if previous.number >= window.number:
        return [f"window #{previous.number} of this pipeline was applied already, and #{window.number} does not come after it"]
    if window.moved:
        return []
    starts = {r.topic_partition: r.start for r in window.ranges}
    topics = {tp.topic for tp in starts}
    gaps, went_elsewhere = (*window.passed, *window.gaps), window.after == ELSEWHERE
    found = []
    for r in sorted(previous.ranges):
        start = starts.get(r.topic_partition)
        if start is None:
            if r.topic in topics:
                found.append(f"{r.topic_partition} is not part of it, though its last window ended there at offset {r.end}")
        elif start < r.end:
            found.append(f"{r.topic_partition} starts at offset {start}, though everything below {r.end} was applied already")
        elif start > r.end and not (went_elsewhere or _covers(gaps, r.topic_partition, r.end, start)):
            found.append(f"{r.topic_partition} starts at offset {start}, though its last window ended at {r.end}")
    return found


def refuse_gap(previous: Applied | None, window: Window, place: str) -> None:
    """Refuse a window that does not continue the last one in its sink's record. A replay need not.

    Topics that were recreated in between are not compared: the decision to continue with them was made when the window was
    planned. A change of the cluster is allowed only for a pipeline that was moved by hand (``window.moved``).

    :param previous: the last other window in the sink's record; None if it has none of the pipeline.
    :param place: name of the record, for messages.
    :raises SinkRecordMissing: it has none, although an earlier window was committed to this destination (``window.after``).
    :raises ForeignOffsets: it belongs to another cluster, and the pipeline was not moved since.
    :raises WindowConflict: the window does not continue it.
    """
    if window.replay:
        return
    if previous is None:
        if window.after > 0 and not window.moved:
            raise SinkRecordMissing(window.pipeline, window.number, window.after, place)
        return
    if not window.moved and _differ(previous.cluster_id, window.cluster_id):
        refuse_foreign(previous, window.cluster_id, window.topic_ids)
    if reasons := find_contradictions(drop_recreated_topics(previous, window), window):
        expected = f"a window that follows #{previous.number}, the newest in {place}"
        raise WindowConflict(str(window), "; ".join(reasons), expected, _make_reset_command(previous, window))


def _make_reset_command(previous: Applied, window: Window) -> str:
    """Return the command that moves a pipeline back to the end of the sink's last window, which may have been restored from a
    backup; "" if the window does not only leave out offsets behind that one."""
    starts = {r.topic_partition: r.start for r in window.ranges}
    ends: dict[str, dict[str, int]] = {}
    if previous.number >= window.number or window.interval is not None:
        return ""
    for r in sorted(previous.ranges):
        if starts.get(r.topic_partition, r.end) < r.end:
            return ""
        if starts.get(r.topic_partition, r.end) > r.end:
            ends.setdefault(r.topic, {})[str(r.partition)] = r.end
    reset = f"airflow kafka-spark reset {shlex.quote(window.pipeline)}"
    if sum(map(len, ends.values())) > SHOWN_PARTITIONS:
        return f"{reset} --to <the offsets that are named above> --discard-open --why ..."
    to = json.dumps(ends)
    return f"{reset} --to '{to}' --discard-open --why ..." if ends else ""


def refuse_other(applied: Applied, window: Window, place: str) -> None:
    """Refuse a window if the sink's record with its number belongs to a different window.

    :param place: name of the record, for messages.
    :raises ForeignOffsets: the record belongs to another cluster, or to another topic of the same name.
    :raises WindowConflict: the record has other offsets.
    """
    refuse_foreign(applied, window.cluster_id, window.topic_ids)
    if not has_same_ranges(applied.ranges, window.ranges):
        there = ", ".join(map(str, applied.ranges))
        raise WindowConflict(str(window), f"{place} has {there} under this number", ", ".join(map(str, window.ranges)))


def refuse_foreign(applied: Applied, cluster_id: str, topic_ids: Mapping[str, str]) -> None:
    """Refuse a sink's record whose offsets refer to another cluster or to other topics. Unknown ids are not compared.

    :param cluster_id: id of the cluster that is read.
    :param topic_ids: ids of its topics.
    :raises ForeignOffsets: an id differs.
    """
    topics = {
        topic: (applied.topic_ids[topic], topic_ids[topic])
        for topic in sorted(applied.topic_ids.keys() & topic_ids.keys())
        if _differ(applied.topic_ids[topic], topic_ids[topic])
    }
    if topics or _differ(applied.cluster_id, cluster_id):
        raise ForeignOffsets(applied.pipeline, applied.number, applied.cluster_id, cluster_id, topics)


def refuse_elsewhere(applied: Applied) -> None:
    """Refuse a sink's record whose rows are in another target. It does not show which records this one has.

    :raises RecordElsewhere: it is of another target.
    """
    if applied.elsewhere:
        raise RecordElsewhere(applied.pipeline, applied.number, applied.elsewhere)


def find_foreign_topics(applied: Applied, cluster_id: str, topic_ids: Mapping[str, str]) -> frozenset[str]:
    """Return the topics of a sink's record whose offsets refer to another cluster or to other topics. Unknown ids are not
    compared.

    :param cluster_id: id of the cluster that is read.
    :param topic_ids: ids of its topics.
    """
    if _differ(applied.cluster_id, cluster_id):
        return frozenset(topic_ids)
    return frozenset(topic for topic, known in topic_ids.items() if _differ(applied.topic_ids.get(topic), known))


def drop_recreated_topics(previous: Applied, window: Window) -> Applied:
    """Return ``previous`` without topics that were deleted and recreated since: their offsets refer to other records now."""
    kept = tuple(r for r in previous.ranges if not _differ(previous.topic_ids.get(r.topic), window.topic_ids.get(r.topic)))
    return replace(previous, ranges=kept)


def has_same_ranges(one: Iterable[OffsetRange], other: Iterable[OffsetRange]) -> bool:
    """Return True if both contain equal ranges, in any order."""
    return sorted(one) == sorted(other)


def _differ(one: str | None, other: str | None) -> bool:
    return bool(one and other and one != other)


def _covers(gaps: Sequence[Gap], tp: TopicPartition, start: int, end: int) -> bool:
    """Return True if gaps of one partition account for every offset of ``[start, end)``."""
    for gap in sorted((g for g in gaps if (g.topic, g.partition) == tp), key=lambda g: g.start):
        if gap.start <= start:
            start = max(start, gap.end)
    return start >= end
