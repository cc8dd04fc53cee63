"""Write and read the metadata of the offsets of a consumer group that mirrors a pipeline.

The metadata of each committed offset contain the name of the pipeline, the window, the topic id, and the place in the ledger
topic at which the pipeline's records begin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.ledger.topic import Hint
from airflow_kafka_spark.windows.codec import encode_json
from airflow_kafka_spark.windows.interval import Interval
from airflow_kafka_spark.windows.model import TopicPartition, Window
from airflow_kafka_spark.windows.plan import Position

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.requests import CommittedOffset


LARGEST_SOURCE = 2048
"""Maximum size in bytes of a source's position in a group's metadata. Brokers accept 4,096 bytes of metadata by default."""


def make_offset_metadata(window: Window, topic: str, hint: Hint) -> str:
    """Return the metadata of a group's committed offset: its origin, and the hint at the pipeline's records in the ledger."""
    facts: dict[str, object] = {
        "pipeline": window.pipeline,
        "window": window.id,
        "topic_id": window.topic_ids.get(topic, ""),
        "ledger": str(hint),
    }
    if window.source is not None:
        facts |= _list_source_facts(window.source.position)
    return encode_json(facts).decode()


def make_planned_metadata(window: Window, topic: str, position: Mapping[str, object] | None) -> str:
    """Return the metadata of the offset that is committed when a window of a source is planned.

    :param position: the source's position before the window.
    """
    facts = {"pipeline": window.pipeline, "window": window.id, "topic_id": window.topic_ids.get(topic, ""), "planned": True}
    return encode_json(facts | _list_source_facts(position)).decode()


def _list_source_facts(position: Mapping[str, object] | None) -> dict[str, object]:
    return {"source": position} if len(encode_json({"source": position})) <= LARGEST_SOURCE else {}


@dataclass(frozen=True)
class SourceWindow:
    """The newest window of a pipeline that reads a source, according to the metadata of its group's offsets.

    :param number: the window's number.
    :param is_planned: True if the window is not known to be complete, so that any part of it may be published.
    :param knows_position: True if the metadata contain the position; a long one is left out.
    :param position: position of the source after the window, or before it if ``is_planned``; None at the source's beginning.
    """

    number: int
    is_planned: bool = False
    knows_position: bool = False
    position: Mapping[str, Any] | None = None


def find_source_window(
    pipeline: str, committed: Mapping[TopicPartition, CommittedOffset | None], topic_ids: Mapping[str, str]
) -> SourceWindow | None:
    """Return the newest window of a source in the metadata of a group's offsets; None if they name none.

    :param pipeline: the pipeline's name.
    :param committed: committed offsets of the group.
    :param topic_ids: the present ids of the topics; offsets of topics that were recreated since are ignored.
    """
    found = []
    for tp, there in committed.items():
        facts = _parse_facts(there.metadata) if there else {}
        number, topic_id = str(facts.get("window", "")), facts.get("topic_id")
        is_other = topic_id and topic_ids.get(tp.topic) not in (None, "", topic_id)
        if facts.get("pipeline") == pipeline and number.isdecimal() and not is_other:
            position = facts.get("source")
            assert position is None or isinstance(position, dict)
            found.append(SourceWindow(int(number), bool(facts.get("planned")), "source" in facts, position))
    return max(found, key=lambda window: (window.number, not window.is_planned), default=None)


def find_group_position(pipeline: str, committed: Mapping[TopicPartition, CommittedOffset | None]) -> tuple[Position, int]:
    """Return the position of a pipeline from its group's offsets alone, if the pipeline has committed any of them itself. Such a
    pipeline is not new; its ledger was lost.

    :param pipeline: its name.
    :param committed: committed offsets of the group.
    :return: the position and the number of its last window; an empty position and 0 if the pipeline has committed no offset.
    """
    own = {
        tp: facts
        for tp, there in committed.items()
        if there and (facts := _parse_facts(there.metadata)).get("pipeline") == pipeline
    }
    if not own:
        return Position(), 0
    offsets = {tp: there.offset for tp, there in committed.items() if there}
    topic_ids = {tp.topic: str(facts["topic_id"]) for tp, facts in own.items() if facts.get("topic_id")}
    numbers = [int(window) for facts in own.values() if (window := str(facts.get("window", ""))).isdecimal()]
    epochs = {tp: there.epoch for tp in own if (there := committed[tp]) and there.epoch >= 0}
    return Position(offsets, topic_ids, epochs=epochs), max(numbers, default=0)


def is_committed_by(pipeline: str, committed: CommittedOffset, topic_id: str) -> bool:
    """Return True if a pipeline itself has committed an offset of its group, for the present topic.

    :param topic_id: the present id of the topic; "" if it is unknown.
    """
    facts = _parse_facts(committed.metadata)
    return facts.get("pipeline") == pipeline and (not topic_id or facts.get("topic_id") in ("", None, topic_id))


def list_window_numbers(pipeline: str, committed: Mapping[TopicPartition, CommittedOffset | None]) -> dict[TopicPartition, int]:
    """Return the numbers of a pipeline's windows in the metadata of a group's offsets, by partition. Offsets of data intervals
    and of other clients are left out.

    :param pipeline: its name.
    :param committed: committed offsets of the group.
    """
    found = {}
    for tp, there in committed.items():
        facts = _parse_facts(there.metadata) if there else {}
        number = str(facts.get("window", ""))
        if facts.get("pipeline") == pipeline and number.isdecimal():
            found[tp] = int(number)
    return found


@dataclass(frozen=True)
class FollowedIntervals:
    """The progress of a group over a pipeline's data intervals, according to the metadata of its offsets.

    :param interval: the last interval in the metadata.
    :param offsets: the offsets that were committed with intervals of this pipeline.
    :param last: those of them that were committed with the last interval.
    """

    interval: Interval
    offsets: Mapping[TopicPartition, int]
    last: Mapping[TopicPartition, int]


def find_followed_intervals(
    pipeline: str, committed: Mapping[TopicPartition, CommittedOffset | None], topic_ids: Mapping[str, str]
) -> FollowedIntervals | None:
    """Return the progress of a group over a pipeline's data intervals; None if its metadata name none of them.

    :param pipeline: its name.
    :param committed: committed offsets of the group.
    :param topic_ids: the present ids of the topics; offsets of topics that were recreated since are ignored.
    """
    found: dict[TopicPartition, tuple[Interval, int]] = {}
    for tp, there in committed.items():
        facts = _parse_facts(there.metadata) if there else {}
        interval = Interval.from_name(str(facts.get("window", "")))
        is_other = facts.get("topic_id") and topic_ids.get(tp.topic) not in (None, "", facts["topic_id"])
        if there and interval is not None and facts.get("pipeline") == pipeline and not is_other:
            found[tp] = interval, there.offset
    if not found:
        return None
    last = max((interval for interval, _ in found.values()), key=lambda interval: interval.end)
    offsets = {tp: offset for tp, (_, offset) in found.items()}
    return FollowedIntervals(last, offsets, {tp: offset for tp, (interval, offset) in found.items() if interval == last})


def list_ledger_ids(pipeline: str, committed: Mapping[TopicPartition, CommittedOffset | None]) -> frozenset[str]:
    """Return the ids of the ledger topics with which a pipeline has committed its group's offsets.

    :param pipeline: its name.
    :param committed: committed offsets of the group.
    """
    hints = (Hint.from_metadata(there.metadata, pipeline) for there in committed.values() if there)
    return frozenset(hint.topic_id for hint in hints if hint)


def find_group_owner(pipeline: str, committed: Mapping[TopicPartition, CommittedOffset | None]) -> str | None:
    """Return the other pipeline that a group mirrors; None if it mirrors this one or none.

    :param committed: committed offsets of the group, whose metadata name the pipeline.
    """
    names = (_parse_facts(there.metadata).get("pipeline") for there in committed.values() if there)
    return min((str(name) for name in names if name and name != pipeline), default=None)


def _parse_facts(metadata: str) -> dict[str, object]:
    try:
        found = json.loads(metadata)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
