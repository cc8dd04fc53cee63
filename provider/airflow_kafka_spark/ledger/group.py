"""The consumer group that mirrors a pipeline: the metadata of its committed offsets, written and read.

Each committed offset carries the name of the pipeline, the window, the topic id, and where in the ledger topic the pipeline's
records begin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.ledger.topic import Hint
from airflow_kafka_spark.windows.interval import Interval
from airflow_kafka_spark.windows.model import TopicPartition, Window
from airflow_kafka_spark.windows.plan import Position

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.requests import CommittedOffset


LARGEST_SOURCE = 2048
"""Bytes of a source's position that a group's metadata hold; brokers take 4,096 bytes of metadata by default."""


def offset_metadata(window: Window, topic: str, hint: Hint) -> str:
    """Return the metadata of a group's committed offset: where the offset comes from, and the hint where to read the ledger."""
    facts: dict[str, object] = {
        "pipeline": window.pipeline,
        "window": window.id,
        "topic_id": window.topic_ids.get(topic, ""),
        "ledger": str(hint),
    }
    if window.source is not None:
        facts |= _source_facts(window.source.position)
    return _compact(facts)


def planned_metadata(window: Window, topic: str, position: Mapping[str, object] | None) -> str:
    """Return the metadata of the offset that is committed when a window of a source is planned.

    :param position: the source's position before the window.
    """
    facts = {"pipeline": window.pipeline, "window": window.id, "topic_id": window.topic_ids.get(topic, ""), "planned": True}
    return _compact(facts | _source_facts(position))


def _source_facts(position: Mapping[str, object] | None) -> dict[str, object]:
    return {"source": position} if len(_compact({"source": position}).encode()) <= LARGEST_SOURCE else {}


def _compact(facts: Mapping[str, object]) -> str:
    return json.dumps(facts, separators=(",", ":"), ensure_ascii=False)


@dataclass(frozen=True)
class SourceWindow:
    """The newest window of a pipeline that reads a source, as the metadata of its group's offsets say.

    :param number: the window's number.
    :param is_planned: True if it is only known to be planned: any part of it may be published.
    :param knows_position: True if the metadata hold the position; a long one is left out.
    :param position: the source's position behind the window, or before it if it is only planned; None at the source's beginning.
    """

    number: int
    is_planned: bool = False
    knows_position: bool = False
    position: Mapping[str, Any] | None = None


def source_window_of(
    pipeline: str, committed: Mapping[TopicPartition, CommittedOffset | None], topic_ids: Mapping[str, str]
) -> SourceWindow | None:
    """Return the newest window of a source that a group's offsets were committed with; None if none of them names one.

    :param pipeline: the pipeline's name.
    :param committed: what the group has committed.
    :param topic_ids: the ids of topics: offsets of a topic that was created anew since are left out.
    """
    found = []
    for tp, there in committed.items():
        facts = _facts(there.metadata) if there else {}
        number, topic_id = str(facts.get("window", "")), facts.get("topic_id")
        is_other = topic_id and topic_ids.get(tp.topic) not in (None, "", topic_id)
        if facts.get("pipeline") == pipeline and number.isdecimal() and not is_other:
            position = facts.get("source")
            assert position is None or isinstance(position, dict)
            found.append(SourceWindow(int(number), bool(facts.get("planned")), "source" in facts, position))
    return max(found, key=lambda window: (window.number, not window.is_planned), default=None)


def position_of_group(pipeline: str, committed: Mapping[TopicPartition, CommittedOffset | None]) -> tuple[Position, int]:
    """Return the position of a pipeline by its group's offsets alone, if the pipeline has committed any of them itself. It is
    then not new: its ledger was lost.

    :param pipeline: its name.
    :param committed: what the group has committed.
    :return: the position, and the number of the last window that says so; empty, and 0, when it committed none of them.
    """
    own = {
        tp: facts for tp, there in committed.items() if there and (facts := _facts(there.metadata)).get("pipeline") == pipeline
    }
    if not own:
        return Position(), 0
    offsets = {tp: there.offset for tp, there in committed.items() if there}
    topic_ids = {tp.topic: str(facts["topic_id"]) for tp, facts in own.items() if facts.get("topic_id")}
    numbers = [int(window) for facts in own.values() if (window := str(facts.get("window", ""))).isdecimal()]
    return Position(offsets, topic_ids), max(numbers, default=0)


def windows_of(pipeline: str, committed: Mapping[TopicPartition, CommittedOffset | None]) -> dict[TopicPartition, int]:
    """Return the numbers of this pipeline's windows that a group's offsets were committed with, by partition. Data intervals and
    commits of others are left out.

    :param pipeline: its name.
    :param committed: what the group has committed.
    """
    found = {}
    for tp, there in committed.items():
        facts = _facts(there.metadata) if there else {}
        number = str(facts.get("window", ""))
        if facts.get("pipeline") == pipeline and number.isdecimal():
            found[tp] = int(number)
    return found


@dataclass(frozen=True)
class FollowedIntervals:
    """The data intervals up to which a group has followed a pipeline, by the metadata of its offsets.

    :param interval: the last interval that an offset was committed with.
    :param offsets: the offsets that were committed with this pipeline's intervals.
    :param last: those of them that were committed with the last interval.
    """

    interval: Interval
    offsets: Mapping[TopicPartition, int]
    last: Mapping[TopicPartition, int]


def intervals_of(
    pipeline: str, committed: Mapping[TopicPartition, CommittedOffset | None], topic_ids: Mapping[str, str]
) -> FollowedIntervals | None:
    """Return the data intervals up to which a group has followed a pipeline; None if none of its offsets names one.

    :param pipeline: its name.
    :param committed: what the group has committed.
    :param topic_ids: the ids of the topics: offsets of a topic that was created anew since are left out.
    """
    found: dict[TopicPartition, tuple[Interval, int]] = {}
    for tp, there in committed.items():
        facts = _facts(there.metadata) if there else {}
        interval = Interval.named(str(facts.get("window", "")))
        is_other = facts.get("topic_id") and topic_ids.get(tp.topic) not in (None, "", facts["topic_id"])
        if there and interval is not None and facts.get("pipeline") == pipeline and not is_other:
            found[tp] = interval, there.offset
    if not found:
        return None
    last = max((interval for interval, _ in found.values()), key=lambda interval: interval.end)
    offsets = {tp: offset for tp, (_, offset) in found.items()}
    return FollowedIntervals(last, offsets, {tp: offset for tp, (interval, offset) in found.items() if interval == last})


def owner_of(pipeline: str, committed: Mapping[TopicPartition, CommittedOffset | None]) -> str | None:
    """Return the other pipeline that a group mirrors; None where it mirrors none, or this one.

    :param committed: what the group has committed; the metadata says for whom.
    """
    names = (_facts(there.metadata).get("pipeline") for there in committed.values() if there)
    return min((str(name) for name in names if name and name != pipeline), default=None)


def _facts(metadata: str) -> dict[str, object]:
    try:
        found = json.loads(metadata)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
