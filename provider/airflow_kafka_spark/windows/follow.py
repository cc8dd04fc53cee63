"""Windows that follow another pipeline's: read exactly what it has published, and count that it is all there."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from airflow_kafka_spark.errors import FollowBroken, NotYetStable
from airflow_kafka_spark.windows.memory import Memory
from airflow_kafka_spark.windows.model import Followed, State, TopicPartition
from airflow_kafka_spark.windows.plan import Log, Position


def follow(upstream: Memory, after: int, topics: Collection[str]) -> tuple[Followed, dict[TopicPartition, int]]:
    """What the upstream pipeline has published since it was last followed.

    :param upstream: what the ledger holds of it.
    :param after: the number of the last window that was followed, 0 for none.
    :param topics: those that are read; what it published elsewhere is left out.
    :return: its complete windows behind ``after`` with their count of records, and where the last of these ends per partition.
    :raises FollowBroken: the ledger does not know the pipeline, or has forgotten windows in between.
    """
    if not upstream.exists:
        raise FollowBroken(upstream.pipeline, "the ledger has never heard of it", "Correct `follows`, or run that pipeline first")
    numbers = range(after + 1, upstream.last_number + 1)
    forgotten = [number for number in numbers if number not in upstream.entries]
    if forgotten:
        found = f"its window {forgotten[0]} is no longer in the ledger"
        raise FollowBroken(upstream.pipeline, found, "Follow it more often, or raise `keep_windows` there")
    count = 0
    ends: dict[TopicPartition, int] = {}
    for number in numbers:
        entry = upstream.entries[number]
        if entry.state is not State.COMPLETE or not (entry.window.source or entry.window.target):
            raise FollowBroken(upstream.pipeline, f"its window {number} does not publish to Kafka", "Follow a pipeline that does")
        for part in (entry.report or {}).get("published", ()):
            if part["topic"] in topics:
                tp = TopicPartition(part["topic"], part["partition"])
                ends[tp] = max(ends.get(tp, 0), part["last"] + 1)
                count += part["records"]
    return Followed(upstream.pipeline, after + 1, upstream.last_number, count), ends


def log_up_to(ends: dict[TopicPartition, int], log: Log, position: Position, starts: dict[TopicPartition, int]) -> Log:
    """The log as if it ended with what is followed; a partition that got nothing ends where the pipeline stands.

    :param starts: where a pipeline without a position would begin.
    :raises NotYetStable: an open transaction still hides some of what was published.
    """
    partitions = {}
    for tp, found in log.partitions.items():
        end = max(ends.get(tp, 0), position.offsets.get(tp, starts.get(tp, 0)), found.low)
        if found.lso < end:
            raise NotYetStable(str(tp), found.lso, end)
        partitions[tp] = replace(found, lso=end, high=end)
    return replace(log, partitions=partitions)
