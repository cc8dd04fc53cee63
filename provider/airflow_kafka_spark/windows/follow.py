"""Windows that follow another pipeline: they read exactly what that pipeline (upstream) has published, and compare the counts.

The expected number of records is found in one of two ways. If the position was reached by following, it is the difference between
the upstream's totals then and now. This holds for any number of windows, even if the ledger no longer holds them or some were
given up. If the position was reached in another way (the pipeline is new, was moved by hand, or has read on without following),
it is the number of upstream records at or after the position.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from airflow_kafka_spark.errors import FollowBroken, NotYetStable
from airflow_kafka_spark.windows.memory import Memory
from airflow_kafka_spark.windows.model import Followed, FollowedWindow, Landed, Published, TopicPartition
from airflow_kafka_spark.windows.plan import Log, Position


def follow(
    upstream: Memory,
    reached: FollowedWindow | None,
    topics: Collection[str],
    starts: Mapping[TopicPartition, int],
    recreated: Collection[str] = (),
) -> tuple[Followed, dict[TopicPartition, int]]:
    """Return the windows that the upstream pipeline has published since it was last followed. Windows that were given up count,
    too, because their records stay in the topics.

    :param upstream: the complete state of that pipeline in the ledger.
    :param reached: the last window that was followed; None if the position was not reached by following this pipeline.
    :param topics: topics that are read. Records that the upstream published to other topics are ignored.
    :param starts: start of the window in each partition of these topics; 0 expects all records that were ever published there.
    :param recreated: topics that were deleted and recreated since they were read. Their expected count is unknown.
    :return: the windows after ``reached`` with their number of records, and the end of the last of them in each partition.
    :raises FollowBroken: the ledger does not contain the pipeline, the pipeline has another name now, it does not publish, or it
        sends only dead letters or routed records to a topic.
    """
    published = _get_published(upstream)
    _refuse_uncounted(upstream, topics, {tp.topic for tp in published})
    totals = {topic: sum(p.records for tp, p in published.items() if tp.topic == topic) for topic in sorted(topics)}
    ends = {tp: p.end for tp, p in published.items() if tp.topic in topics}
    if reached is not None and any(totals.get(topic, 0) < count for topic, count in reached.totals.items() if topic in topics):
        # The totals of the upstream pipeline start from zero again.
        reached = None
    counts: list[int | None] = []
    for topic in totals:
        if topic in recreated:
            counts.append(None)
        elif reached is not None and topic in reached.totals:
            counts.append(totals[topic] - reached.totals[topic])
        else:
            counts += [
                count_published_behind(upstream, published, tp, start) for tp, start in starts.items() if tp.topic == topic
            ]
    known = [count for count in counts if count is not None]
    records = sum(known) if len(known) == len(counts) else None
    after = reached.number if reached is not None else _find_number_before(upstream, starts)
    return Followed(upstream.pipeline, after + 1, max(after, upstream.last_used), records, totals), ends


def find_followed_window(upstream: Memory, position: Position) -> FollowedWindow | None:
    """Return the last window that was followed of a pipeline, under its present name or under one of its earlier names."""
    names = [upstream.pipeline, *(c.name for _, c in sorted(upstream.changes.items(), reverse=True) if c.action == "rename")]
    return next((position.followed[name] for name in names if name in position.followed), None)


def resolve_starts(
    log: Log, position: Position, starts: Mapping[TopicPartition, int], *, expects_all: bool
) -> dict[TopicPartition, int]:
    """Return the offsets at which a window that follows another pipeline begins: the position, else the configured starts.

    :param expects_all: True if a pipeline without a position expects all records that were ever published. Deleted ones then
        count as data loss.
    """
    found = {}
    for tp, there in log.partitions.items():
        if position.offsets:
            found[tp] = max(position.offsets.get(tp, 0), there.low)
        else:
            start = max(starts.get(tp, 0), there.low)
            found[tp] = 0 if expects_all and start == there.low else start
    return found


def _get_published(upstream: Memory) -> Mapping[TopicPartition, Published]:
    name, published = upstream.pipeline, upstream.published
    if (renamed := upstream.renamed_to) is not None:
        raise FollowBroken(name, f"it was renamed to `{renamed.name}`", f'Set `follows="{renamed.name}"`')
    if not upstream.exists:
        raise FollowBroken(name, "the ledger has no record of it", "Correct `follows`, or run that pipeline first")
    if published is None and not (upstream.is_blank and upstream.forgotten):
        raise FollowBroken(name, "it does not publish to Kafka", "Set `follows` to a pipeline that does, or leave it out")
    return published or {}


def _refuse_uncounted(upstream: Memory, topics: Iterable[str], published: Collection[str]) -> None:
    """Refuse topics of records that do not count as published. A window that follows would never read any of them.

    :param published: the topics that have records of the pipeline that count.
    """
    aside = upstream.binding.destination.details if upstream.binding is not None else {}
    kinds = (("dead_letters", "dead letters"), ("routes", "records that a `Filter` takes out"))
    for topic in sorted(set(topics) - set(published)):
        for name, kind in kinds:
            if topic in aside.get(name, "").split(", "):
                detail = f"it sends {kind} to topic `{topic}`, which are not counted as published"
                raise FollowBroken(upstream.pipeline, detail, "Leave `follows` out for this topic")


def count_published_behind(
    upstream: Memory, published: Mapping[TopicPartition, Published], tp: TopicPartition, start: int
) -> int | None:
    """Return the number of records that a pipeline has published to a partition at or after an offset. None if that is unknown:
    the offset lies within a window, or the ledger no longer holds the windows there.
    """
    total = published[tp].records if tp in published else 0
    if start == 0:
        return total
    windows, count = upstream.landed, 0
    newer: Landed | None = None
    for number in range(upstream.last_used, 0, -1):
        if number not in windows:
            break
        for part in windows[number]:
            if part.topic_partition != tp:
                continue
            # Offsets grow from window to window; if they do not, this window was published to an earlier topic of this name.
            if part.last < start or (newer is not None and part.last >= newer.first):
                return count
            if part.first < start:
                return None
            count, newer = count + part.records, part
            if part.first == start:
                return count
    return count if count == total else None


def _find_number_before(upstream: Memory, starts: Mapping[TopicPartition, int]) -> int:
    """Return the number of the last window in the ledger that has no record at or after these offsets."""
    if not any(starts.values()):
        return 0
    behind = [
        number
        for number, parts in upstream.landed.items()
        if any(part.last >= starts.get(part.topic_partition, part.last + 1) for part in parts)
    ]
    return min(behind) - 1 if behind else upstream.last_used


def limit_log(
    ends: Mapping[TopicPartition, int],
    log: Log,
    position: Position,
    starts: Mapping[TopicPartition, int],
    recreated: Collection[str] = (),
) -> Log:
    """Return the log as if it ended with the followed records. Partitions without any end at the pipeline's position.

    :param starts: the offsets at which a pipeline without a position would begin.
    :param recreated: topics that were deleted and recreated. The position, and ends after the end of the log, do not refer to
        their present logs.
    :raises NotYetStable: an open transaction still hides some of the published records.
    """
    partitions = {}
    for tp, found in log.partitions.items():
        end, current = ends.get(tp, 0), position.offsets.get(tp, starts.get(tp, 0))
        if tp.topic in recreated:
            end, current = (end if end <= found.high else 0), 0
        end = max(end, current, found.low)
        if found.lso < end:
            raise NotYetStable(str(tp), found.lso, end)
        partitions[tp] = replace(found, lso=end, high=end)
    return replace(log, partitions=partitions)
