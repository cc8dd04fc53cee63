"""Planning of the next window: pure functions from the log and the pipeline's position to frozen offset ranges.

The functions send no requests: :class:`Log` is the state that was read from Kafka, :class:`Position` the state in the ledger.
Equal arguments always give equal plans.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

from airflow_kafka_spark.errors import (
    ClusterChanged,
    DataLoss,
    LogTruncated,
    OffsetsWentBack,
    PartitionsVanished,
    PlanError,
    TopicRecreated,
)
from airflow_kafka_spark.windows.model import FollowedWindow, Gap, OffsetRange, Published, Split, TopicPartition, Window

DataLossPolicy = Literal["fail", "skip"]

KEPT_ROWS = (
    "A replay would remove their rows from the sink, whatever `data_loss` says; they stay there. To give up a replay that is "
    "open already: `airflow kafka-spark skip <pipeline> --not-running --why ...`"
)
"""The action of the error if the records of a window that is replayed are gone."""

RESTORED = (
    "Correct `bootstrap.servers`. Or, because its topics have the ids that the ledger names: if this is the same Kafka, restored "
    "with another cluster id, set `cluster.id` in the `meta.properties` of its brokers back, and windows continue as planned. To "
    "keep the new id, if no record is missing: `airflow kafka-spark reset <pipeline> --to committed:<group> --discard-open --why "
    "...`; dead letters of an open window are then sent again"
)
"""The action of the error if the cluster has another id, and its topics have the same ids."""


@dataclass(frozen=True)
class PartitionLog:
    """The log of one partition as the brokers describe it: ``low <= lso <= high``.

    :param low: the first offset that is left in the log.
    :param lso: last stable offset, at which a read_committed reader has to stop.
    :param high: high watermark.
    :param epoch: epoch of the leader that returned these offsets; -1 if unknown.
    """

    low: int
    lso: int
    high: int
    epoch: int = -1


@dataclass(frozen=True)
class Log:
    """The log of all partitions at one moment.

    :param cluster_id: id of the cluster.
    :param topic_ids: id of each subscribed topic that exists.
    :param partitions: all partitions of these topics.
    :param diverged: for partitions that were truncated below an offset that was read, and have grown again: the offset from which
        on the records differ from those that were read. Other partitions are missing.
    """

    cluster_id: str
    topic_ids: Mapping[str, str]
    partitions: Mapping[TopicPartition, PartitionLog]
    diverged: Mapping[TopicPartition, int] = field(default_factory=dict)

    def get_lows(self, topic: str) -> dict[int, int]:
        """Return the first offset that is left in each partition of a topic."""
        return {tp.partition: there.low for tp, there in self.partitions.items() if tp.topic == topic}


@dataclass(frozen=True)
class Position:
    """The position of a pipeline: the end of its last window.

    :param offsets: the next offset to read, for every partition that the pipeline has ever read.
    :param topic_ids: ids of their topics.
    :param cluster_id: id of the cluster that the offsets refer to; empty if unknown.
    :param source: position of its source of rows, in a form that the source defines (JSON); None without one.
    :param followed: the last window that was followed, by pipeline; empty if the position was not reached by following one.
    :param moved: number of the manual change that set the position; 0 if it was reached by windows.
    :param published: totals of what the pipeline has published itself; None if it publishes nothing, or if they are unknown.
    :param epochs: leader epoch of each partition when its offset was reached; unknown for missing partitions.
    :param passed: offsets that windows without records have skipped since the last window with records.
    :param began: offsets at which the pipeline's first window began, which has moved none before them. 0 for missing partitions.
    """

    offsets: Mapping[TopicPartition, int] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    cluster_id: str = ""
    source: Mapping[str, Any] | None = None
    followed: Mapping[str, FollowedWindow] = field(default_factory=dict)
    moved: int = 0
    published: Mapping[TopicPartition, Published] | None = None
    epochs: Mapping[TopicPartition, int] = field(default_factory=dict)
    passed: tuple[Gap, ...] = ()
    began: Mapping[TopicPartition, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Ranges:
    """The offsets of a window that is being planned."""

    ranges: tuple[OffsetRange, ...]
    gaps: tuple[Gap, ...]
    held_back: int


def plan_ranges(
    log: Log,
    position: Position,
    topics: Sequence[str],
    *,
    starts: Mapping[TopicPartition, int] | None = None,
    stops: Mapping[TopicPartition, int] | None = None,
    data_loss: DataLossPolicy = "fail",
    max_records: int | None = None,
) -> Ranges:
    """Return the offsets of the next window: from the pipeline's position to the last stable offsets, or to the given stops.

    Windows tile the log: each starts at the end of the previous one. A new partition starts at its earliest record. If the stop
    of a partition lies before its start, its range is empty.

    :param log: the present log.
    :param position: position of the pipeline; empty for a new pipeline.
    :param topics: the subscribed topics, each in ``log``.
    :param starts: start of a new pipeline, by partition; the earliest record in partitions that are missing.
    :param stops: upper bound of the window's end, by partition; the last stable offset in partitions that are missing.
    :param data_loss: ``fail`` refuses to skip deleted records; ``skip`` records them as gaps.
    :param max_records: maximum number of offsets in all, distributed over the partitions by their backlogs; None for no limit.
    :raises PlanError: log and position contradict each other; one of its subclasses.
    """
    _refuse_other_cluster(position.cluster_id, position.topic_ids, log)
    recreated = {t for t in topics if is_recreated(t, log, position)}
    if recreated and data_loss == "fail":
        topic = min(recreated)
        raise TopicRecreated(topic, position.topic_ids[topic], log.topic_ids[topic])
    _check_partitions(log, position, set(topics) - recreated)

    first_window = not position.offsets
    ranges, gaps, held_back = [], [], 0
    for tp, partition in sorted(log.partitions.items()):
        if tp.topic not in topics:
            continue
        remembered = None if tp.topic in recreated else position.offsets.get(tp)
        if remembered is not None:
            start = remembered
        elif first_window:
            start = (starts or {}).get(tp, partition.low)
        else:
            start = partition.low
        cut = log.diverged.get(tp) if remembered is not None else None
        if lost := _find_lost(tp, start, partition, cut):
            if data_loss == "fail":
                others = sum(
                    1 for other, offset in position.offsets.items()
                    if other != tp and other.topic in topics and other in log.partitions and offset < log.partitions[other].low
                )  # fmt: skip
                raise _make_loss_error(lost, start, partition, position.epochs.get(tp, -1), others)
            gaps.append(lost)
            start = lost.end
        if partition.lso < start:
            raise OffsetsWentBack(*tp, start, partition.lso)
        stop = (stops or {}).get(tp, partition.high)
        ranges.append(OffsetRange(*tp, start, max(start, min(stop, partition.lso))))
        held_back += max(0, min(stop, partition.high) - partition.lso)
    return Ranges(tuple(limit_ranges(ranges, max_records)), tuple(gaps), held_back)


def _find_lost(tp: TopicPartition, start: int, partition: PartitionLog, cut: int | None) -> Gap | None:
    """Return the offsets that are lost: deleted ones, and those below a start at which the log has other records now. None if
    there are none.

    :param cut: offset at which the log was truncated, if that is below an offset that was read; otherwise None.
    """
    if start < partition.low:
        return Gap(*tp, start, partition.low)
    return Gap(*tp, max(cut, partition.low), start) if cut is not None and max(cut, partition.low) < start else None


def _make_loss_error(lost: Gap, start: int, partition: PartitionLog, epoch: int, others: int) -> PlanError:
    if lost.start == start:
        return DataLoss(lost.topic, lost.partition, start, lost.end, others=others)
    return LogTruncated(lost.topic, lost.partition, start, epoch, lost.start, partition.epoch)


def find_epochs(log: Log, ranges: Iterable[OffsetRange]) -> dict[TopicPartition, int]:
    """Return the known leader epochs under which the log reaches the ends of these ranges, by partition."""
    found = {r.topic_partition: log.partitions[r.topic_partition].epoch for r in ranges if r.topic_partition in log.partitions}
    return {tp: epoch for tp, epoch in found.items() if epoch >= 0}


def refuse_recreated(
    known: Mapping[str, Sequence[str]], topic_ids: Mapping[str, str], topics: Iterable[str], data_loss: DataLossPolicy
) -> None:
    """Refuse topics that were recreated since the pipeline has read them: records that it had not read are lost.

    :param known: by topic, every id under which the pipeline has read it, the latest one last.
    :param topic_ids: the present ids of the topics.
    :param topics: the topics that are read.
    :param data_loss: ``skip`` accepts recreated topics.
    :raises TopicRecreated: a topic was recreated; the error names the first one.
    """
    for topic in sorted(topics):
        ids, found = known.get(topic), topic_ids.get(topic)
        if ids and found and found not in ids and data_loss == "fail":
            raise TopicRecreated(topic, ids[-1], found)


def is_recreated(topic: str, log: Log, position: Position) -> bool:
    """Return True if a topic was deleted and recreated since the pipeline has read it."""
    known, found = position.topic_ids.get(topic), log.topic_ids.get(topic)
    return bool(known and found and known != found)


def _check_partitions(log: Log, position: Position, topics: Iterable[str]) -> None:
    """Refuse a log with fewer partitions than before. Kafka never removes partitions, so the metadata are incomplete, and missing
    partitions would be taken for new ones later.
    """
    for topic in sorted(topics):
        known = sum(1 for tp in position.offsets if tp.topic == topic)
        found = sum(1 for tp in log.partitions if tp.topic == topic)
        if found < known or found == 0:
            raise PartitionsVanished(topic, max(known, 1), found)


def limit_ranges(ranges: Sequence[OffsetRange], max_records: int | None) -> list[OffsetRange]:
    """Return ranges shortened to at most ``max_records`` offsets in all, each in proportion to its backlog.

    Starts are unchanged. If there is a backlog, at least one range is not empty.

    :param max_records: at least 1; None returns the ranges unchanged.
    """
    backlog = sum(r.span for r in ranges)
    if max_records is None or backlog <= max_records:
        return list(ranges)
    shares = [r.span * max_records // backlog for r in ranges]
    rest = max_records - sum(shares)
    # The offsets lost by rounding down go to the largest remainders, so that even max_records=1 makes progress.
    for i in sorted(range(len(ranges)), key=lambda i: (-(ranges[i].span * max_records % backlog), i))[:rest]:
        shares[i] += 1
    return [
        OffsetRange(r.topic, r.partition, r.start, r.start + min(share, r.span)) for r, share in zip(ranges, shares, strict=True)
    ]


def _refuse_other_cluster(known: str, topic_ids: Mapping[str, str], log: Log) -> None:
    """Make sure that offsets refer to the cluster of a log.

    :param known: id of the cluster that the offsets refer to; empty if unknown.
    :param topic_ids: ids of the topics that they refer to.
    :raises ClusterChanged: the log is of another cluster.
    """
    if not known or known == log.cluster_id:
        return
    is_copy = bool(topic_ids) and all(found and log.topic_ids.get(topic) == found for topic, found in topic_ids.items())
    raise ClusterChanged(known, log.cluster_id, RESTORED if is_copy else "")


def check_readable(window: Window, log: Log, data_loss: DataLossPolicy) -> None:
    """Refuse a planned window that can no longer be read: another cluster, recreated topics, deleted records, or a log that is
    shorter than before or was replaced.

    :raises PlanError: one of its subclasses. With ``data_loss="skip"`` deleted records and recreated topics pass, and the reader
        records them as gaps; unless the window is replayed, because a replay would remove their rows from the sink.
    """
    keeps_all = data_loss == "fail" or window.replay > 0
    action = KEPT_ROWS if window.replay else ""
    _refuse_other_cluster(window.cluster_id, window.topic_ids, log)
    for topic, known in sorted(window.topic_ids.items()):
        found = log.topic_ids.get(topic)
        if found and known and found != known and keeps_all:
            raise TopicRecreated(topic, known, found, action)
    lost = set(find_lost_topics(window, log))
    for r in window.ranges:
        if r.span == 0 or r.topic in lost:
            continue
        partition = log.partitions.get(r.topic_partition)
        if partition is None:
            raise PartitionsVanished(r.topic, r.partition + 1, sum(1 for tp in log.partitions if tp.topic == r.topic))
        if r.start < partition.low and keeps_all:
            raise DataLoss(r.topic, r.partition, r.start, partition.low, action)
        if partition.lso < r.end:
            raise OffsetsWentBack(r.topic, r.partition, r.end, partition.lso)
        cut = log.diverged.get(r.topic_partition, r.end)
        if cut < r.end and keeps_all:
            epoch = window.epochs.get(r.topic_partition, -1)
            raise LogTruncated(r.topic, r.partition, r.end, epoch, cut, partition.epoch, is_open=True, action=action)


def find_lost_topics(window: Window, log: Log) -> tuple[str, ...]:
    """Return the topics of the window that were deleted, and perhaps recreated, so that the planned records no longer exist."""
    return tuple(topic for topic, known in sorted(window.topic_ids.items()) if known and log.topic_ids.get(topic, "") != known)


def find_unread_gaps(window: Window, read: Iterable[OffsetRange]) -> tuple[Gap, ...]:
    """Return the offsets of a window that were not read, because their topics were deleted.

    :param read: the ranges that were read.
    """
    left, gaps = {r.topic_partition: r for r in window.ranges}, []
    for r in sorted(read):
        gaps.append(Gap(*r.topic_partition, left[r.topic_partition].start, r.start))
        left[r.topic_partition] = replace(left[r.topic_partition], start=r.end)
    gaps += [Gap(r.topic, r.partition, r.start, r.end) for r in left.values()]
    return tuple(gap for gap in gaps if gap.start < gap.end)


def make_splits(window: Window, split_span: int, *, without: Iterable[str] = ()) -> tuple[Split, ...]:
    """Return the splits of a window, one for each task. They cover the window exactly, and are equal at every attempt.

    The range of a partition is divided into equal parts of about ``split_span`` offsets, at most 1.5 times as many. The first
    parts of all partitions are numbered first, so that concurrent tasks read from different partitions.

    :param split_span: number of offsets per split, at least 1.
    :param without: topics that can no longer be read.
    """
    skipped = set(without)
    pieces = []
    for r in window.ranges:
        count = 0 if r.topic in skipped or r.span == 0 else max(1, round(r.span / split_span))
        bounds = [r.start + r.span * turn // count for turn in range(count + 1)] if count else []
        for turn, (start, end) in enumerate(pairwise(bounds)):
            pieces.append((turn, OffsetRange(r.topic, r.partition, start, end)))
    return tuple(
        Split(index, piece, window.epochs.get(piece.topic_partition, -1), window.interval)
        for index, (_, piece) in enumerate(sorted(pieces))
    )


def make_whole_splits(window: Window, *, without: Iterable[str] = ()) -> tuple[Split, ...]:
    """Return one split for each partition with offsets to read, so that the order within the partition is kept. The index of a
    split is the index of its range in the window, whether or not other ranges are left out.

    :param without: topics that can no longer be read.
    """
    skipped = set(without)
    return tuple(
        Split(index, r, window.epochs.get(r.topic_partition, -1), window.interval)
        for index, r in enumerate(window.ranges)
        if r.span and r.topic not in skipped
    )


def find_next_position(position: Position, window: Window) -> Position:
    """Return the pipeline's position after ``window``."""
    moved = {t for t, known in window.topic_ids.items() if position.topic_ids.get(t, known) != known}
    kept = {tp: offset for tp, offset in position.offsets.items() if tp.topic not in moved}
    return Position(
        offsets={**kept, **window.ends},
        topic_ids={**position.topic_ids, **window.topic_ids},
        cluster_id=window.cluster_id or position.cluster_id,
        source=window.source.position if window.source else position.source,
        followed=_find_followed_after(position, window),
        # An empty window never reaches a sink, so the next window is still the sink's first one after the manual change.
        moved=position.moved if window.is_empty else 0,
        published=position.published,
        epochs={**{tp: epoch for tp, epoch in position.epochs.items() if tp in kept and tp not in window.ends}, **window.epochs},
        passed=_merge_gaps(g for g in (*position.passed, *window.gaps) if g.topic not in moved) if window.is_empty else (),
        began={**{tp: offset for tp, offset in position.began.items() if tp in kept}, **window.began},
    )


def merge_positions(before: Position, after: Position) -> Position:
    """Return a position with the higher offset of each partition. A topic with another id in ``after`` was created again: its
    offsets in ``before`` do not count."""
    again = {t for t, known in after.topic_ids.items() if before.topic_ids.get(t, known) != known}
    kept = {tp: offset for tp, offset in before.offsets.items() if tp.topic not in again}
    newer = {tp: offset for tp, offset in after.offsets.items() if offset >= kept.get(tp, 0)}
    return replace(
        before,
        offsets={**kept, **newer},
        topic_ids={**before.topic_ids, **after.topic_ids},
        cluster_id=before.cluster_id or after.cluster_id,
        epochs={
            **{tp: epoch for tp, epoch in before.epochs.items() if tp in kept and tp not in newer},
            **{tp: epoch for tp, epoch in after.epochs.items() if tp in newer},
        },
        began={**{tp: offset for tp, offset in before.began.items() if tp in kept}, **after.began},
    )


def _merge_gaps(gaps: Iterable[Gap]) -> tuple[Gap, ...]:
    """Return gaps of equal offsets, as few as possible, so that windows without records do not add up."""
    found: list[Gap] = []
    for gap in sorted(gaps, key=lambda g: (g.topic, g.partition, g.start)):
        last = found[-1] if found else None
        if last is not None and (last.topic, last.partition) == (gap.topic, gap.partition) and gap.start <= last.end:
            found[-1] = replace(last, end=max(last.end, gap.end))
        else:
            found.append(gap)
    return tuple(found)


def _find_followed_after(position: Position, window: Window) -> Mapping[str, FollowedWindow]:
    """Return the last window that was followed, by pipeline, after a window. A window that does not follow removes the entries,
    so that the next one that follows has to find its start again.
    """
    if window.follows is not None:
        return {window.follows.pipeline: FollowedWindow(window.follows.last, window.follows.totals)}
    return position.followed if window.is_empty else {}
