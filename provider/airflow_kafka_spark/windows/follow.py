"""Windows that follow another pipeline: they read exactly what it has published, and compare the counts.

What is expected is counted in one of two ways. A pipeline that has come to where it stands by following counts by the difference
of what the other one had published in all then, and has now: so it does not matter how many windows that was, nor whether the
ledger still holds them, nor whether some were given up. One that has come there in another way (it is new, was moved by hand, or
has read on without following) asks which records of the other one lie behind its offsets.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from airflow_kafka_spark.errors import FollowBroken, NotYetStable
from airflow_kafka_spark.windows.memory import Memory
from airflow_kafka_spark.windows.model import Followed, Landed, Published, Reached, TopicPartition
from airflow_kafka_spark.windows.plan import Log, Position


def follow(
    upstream: Memory,
    reached: Reached | None,
    topics: Collection[str],
    starts: Mapping[TopicPartition, int],
    recreated: Collection[str] = (),
) -> tuple[Followed, dict[TopicPartition, int]]:
    """Return what the upstream pipeline has published since it was last followed. Windows that were given up count, too, because
    their records stay in the topics.

    :param upstream: what the ledger holds of it, all of it.
    :param reached: up to where it was followed; None where the position was not reached by following it.
    :param topics: those that are read; what it published elsewhere is left out.
    :param starts: where the window begins in each partition of these topics; 0 expects whatever was ever published there.
    :param recreated: topics that were deleted and created again since they were read: what is expected there is not known.
    :return: the windows behind ``reached`` with their count of records, and where the last of these ends per partition.
    :raises FollowBroken: the ledger does not know the pipeline, knows it by another name, or it does not publish.
    """
    published = _published(upstream)
    totals = {topic: sum(p.records for tp, p in published.items() if tp.topic == topic) for topic in sorted(topics)}
    ends = {tp: p.end for tp, p in published.items() if tp.topic in topics}
    if reached is not None and any(totals.get(topic, 0) < count for topic, count in reached.totals.items() if topic in topics):
        # The upstream pipeline counts from its beginning again.
        reached = None
    counts: list[int | None] = []
    for topic in totals:
        if topic in recreated:
            counts.append(None)
        elif reached is not None and topic in reached.totals:
            counts.append(totals[topic] - reached.totals[topic])
        else:
            counts += [published_behind(upstream, published, tp, start) for tp, start in starts.items() if tp.topic == topic]
    known = [count for count in counts if count is not None]
    records = sum(known) if len(known) == len(counts) else None
    after = reached.number if reached is not None else _number_before(upstream, starts)
    return Followed(upstream.pipeline, after + 1, max(after, upstream.last_used), records, totals), ends


def reached_of(upstream: Memory, position: Position) -> Reached | None:
    """Return how far a pipeline was followed, under this name or under a name that it had before it was renamed."""
    names = [upstream.pipeline, *(c.name for _, c in sorted(upstream.changes.items(), reverse=True) if c.action == "rename")]
    return next((position.followed[name] for name in names if name in position.followed), None)


def beginnings(
    log: Log, position: Position, starts: Mapping[TopicPartition, int], *, expects_all: bool
) -> dict[TopicPartition, int]:
    """Return where a window begins that follows another pipeline: at the position, or at the start of a pipeline that has no
    position.

    :param expects_all: a pipeline without a position that begins with the first record which is still there expects those before
        it, too: that they were deleted is loss of data.
    """
    found = {}
    for tp, there in log.partitions.items():
        if position.offsets:
            found[tp] = max(position.offsets.get(tp, 0), there.low)
        else:
            start = max(starts.get(tp, 0), there.low)
            found[tp] = 0 if expects_all and start == there.low else start
    return found


def _published(upstream: Memory) -> Mapping[TopicPartition, Published]:
    name, published = upstream.pipeline, upstream.published
    if (renamed := upstream.renamed_to) is not None:
        raise FollowBroken(name, f"it was renamed to `{renamed.name}`", f'Set `follows="{renamed.name}"`')
    if not upstream.exists:
        raise FollowBroken(name, "the ledger has never heard of it", "Correct `follows`, or run that pipeline first")
    if published is None and not (upstream.is_blank and upstream.forgotten):
        raise FollowBroken(name, "it does not publish to Kafka", "Set `follows` to a pipeline that does, or leave it out")
    return published or {}


def published_behind(
    upstream: Memory, published: Mapping[TopicPartition, Published], tp: TopicPartition, start: int
) -> int | None:
    """Return how many of the records that a pipeline has published to a partition lie at or behind an offset. None means that
    this is not known: a window lies on both sides of the offset, or the ledger no longer holds the windows there.
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
            # Of one topic, what was published later lies behind: else it lies in a topic of this name that is there no more.
            if part.last < start or (newer is not None and part.last >= newer.first):
                return count
            if part.first < start:
                return None
            count, newer = count + part.records, part
            if part.first == start:
                return count
    return count if count == total else None


def _number_before(upstream: Memory, starts: Mapping[TopicPartition, int]) -> int:
    """Return the number of the last window that has no record behind these offsets, as far as the ledger remembers."""
    if not any(starts.values()):
        return 0
    behind = [
        number
        for number, parts in upstream.landed.items()
        if any(part.last >= starts.get(part.topic_partition, part.last + 1) for part in parts)
    ]
    return min(behind) - 1 if behind else upstream.last_used


def log_up_to(
    ends: Mapping[TopicPartition, int],
    log: Log,
    position: Position,
    starts: Mapping[TopicPartition, int],
    recreated: Collection[str] = (),
) -> Log:
    """Return the log as if it ended with the records that are followed. A partition that got no records ends at the pipeline's
    position.

    :param starts: where a pipeline without a position would begin.
    :param recreated: topics that were deleted and created again: neither the position nor an end behind the log means them.
    :raises NotYetStable: an open transaction still hides some of what was published.
    """
    partitions = {}
    for tp, found in log.partitions.items():
        end, stands = ends.get(tp, 0), position.offsets.get(tp, starts.get(tp, 0))
        if tp.topic in recreated:
            end, stands = (end if end <= found.high else 0), 0
        end = max(end, stands, found.low)
        if found.lso < end:
            raise NotYetStable(str(tp), found.lso, end)
        partitions[tp] = replace(found, lso=end, high=end)
    return replace(log, partitions=partitions)
