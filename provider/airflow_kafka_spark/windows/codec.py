"""Windows and their parts as JSON, for the ledger, for the sinks' own records, and for the results of tasks."""

from __future__ import annotations

import base64
import json
import pickle
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.windows.binding import binding_from_json, binding_to_json
from airflow_kafka_spark.windows.dead_letters import (
    dead_letters_from_json,
    dead_letters_to_json,
    decode_offsets,
    encode_offsets,
)
from airflow_kafka_spark.windows.interval import NUMBER, Interval, IntervalState
from airflow_kafka_spark.windows.model import (
    BadRecord,
    Followed,
    FollowedWindow,
    Gap,
    Landed,
    Marker,
    OffsetRange,
    Published,
    RowsAhead,
    SourcePlan,
    SplitResult,
    State,
    TargetTopic,
    TopicPartition,
    Window,
    tries_from_json,
    tries_to_json,
)
from airflow_kafka_spark.windows.plan import Position
from airflow_kafka_spark.windows.times import TimestampHistogram


def encode_json(value: object) -> bytes:
    """Return a value as compact JSON in UTF-8, the form of keys and values in the ledger."""
    return _encode(value).encode()


_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode


def pack_values(values: Sequence[Any]) -> str:
    """Return JSON values as one compressed text, for records whose values most readers do not need."""
    return base64.b64encode(zlib.compress(encode_json(values), 6)).decode()


def unpack_values(text: str) -> list[Any]:
    """Return the values that :func:`pack_values` has packed."""
    values: list[Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    return values


def ranges_to_json(ranges: Sequence[OffsetRange]) -> list[list[Any]]:
    """Return ``[[topic, partition, start, end], ...]``."""
    return [[r.topic, r.partition, r.start, r.end] for r in ranges]


def ranges_from_json(value: Sequence[Sequence[Any]]) -> tuple[OffsetRange, ...]:
    # All ranges of a topic share its name: a ledger has tens of thousands of them.
    return tuple(OffsetRange(sys.intern(topic), *numbers) for topic, *numbers in value)


def window_to_json(window: Window) -> dict[str, Any]:
    return {
        "pipeline": window.pipeline,
        "number": window.number,
        "ranges": ranges_to_json(window.ranges),
        "run": window.run,
        "planned_at": window.planned_at,
        "cluster_id": window.cluster_id,
        "topic_ids": dict(window.topic_ids),
        "gaps": _gaps_to_json(window.gaps),
        "held_back": window.held_back,
        **({"source": _source_to_json(window.source)} if window.source else {}),
        **({"follows": vars(window.follows)} if window.follows else {}),
        **({"target": vars(window.target)} if window.target else {}),
        **({"interval": list(window.interval)} if window.interval else {}),
        **({"replay": window.replay} if window.replay else {}),
        **({"moved": window.moved} if window.moved else {}),
        **({"after": window.after} if window.after else {}),
        **({"passed": _gaps_to_json(window.passed)} if window.passed else {}),
        **({"binding": binding_to_json(window.binding)} if window.binding else {}),
        **_epochs_to_json([r.topic_partition for r in window.ranges], window.epochs),
        **({"lost_topic_ids": list(window.lost_topic_ids)} if window.lost_topic_ids else {}),
        **_began_to_json([r.topic_partition for r in window.ranges], window.began),
    }


def window_from_json(value: Mapping[str, Any]) -> Window:
    return Window(
        pipeline=value["pipeline"],
        number=value["number"],
        ranges=ranges_from_json(value["ranges"]),
        run=value["run"],
        planned_at=value["planned_at"],
        cluster_id=value.get("cluster_id", ""),
        topic_ids=value.get("topic_ids", {}),
        gaps=_gaps_from_json(value.get("gaps", ())),
        held_back=value.get("held_back", 0),
        source=_source_from_json(value["source"]) if value.get("source") else None,
        follows=Followed(**value["follows"]) if value.get("follows") else None,
        target=TargetTopic(**value["target"]) if value.get("target") else None,
        interval=tuple(value["interval"]) if value.get("interval") else None,
        replay=value.get("replay", 0),
        moved=value.get("moved", 0),
        after=value.get("after", 0),
        passed=_gaps_from_json(value.get("passed", ())),
        binding=binding_from_json(value["binding"]) if value.get("binding") else None,
        epochs=_epochs_from_json([TopicPartition(*item[:2]) for item in value["ranges"]], value),
        lost_topic_ids=tuple(value.get("lost_topic_ids", ())),
        began=_began_from_json([TopicPartition(*item[:2]) for item in value["ranges"]], value),
    )


def interval_to_json(state: IntervalState) -> dict[str, Any]:
    return {
        "interval": [state.interval.start_ms, state.interval.end_ms],
        "state": state.state.value,
        "ranges": ranges_to_json(state.ranges),
        "run": state.run,
        "replay": state.replay,
        "topic_ids": dict(state.topic_ids),
        "forgotten": state.forgotten,
        "first": state.offset,
        **({"gaps": _gaps_to_json(state.gaps)} if state.gaps else {}),
        **({"binding": binding_to_json(state.binding)} if state.binding is not None else {}),
        **({"tries": tries_to_json(state.tries)} if state.tries else {}),
        **({"dead": dead_letters_to_json(state.dead)} if state.dead is not None else {}),
        **({"resent": [state.resends, encode_offsets(state.resent)]} if state.resends else {}),
        **_epochs_to_json([r.topic_partition for r in state.ranges], state.epochs),
    }


def interval_from_json(value: Mapping[str, Any], offset: int = -1, leading: timedelta | None = None) -> IntervalState:
    """Return the state of a data interval that the ledger holds as JSON.

    :param offset: offset of the record; used if the value does not contain the offset of the interval's first record.
    :param leading: see :class:`~airflow_kafka_spark.windows.interval.IntervalState`.
    """
    resends, resent = value.get("resent", (0, ()))
    return IntervalState(
        interval=Interval.of_ms(*value["interval"]),
        state=State(value["state"]),
        ranges=ranges_from_json(value["ranges"]),
        run=value["run"],
        replay=value["replay"],
        topic_ids=value["topic_ids"],
        forgotten=value["forgotten"],
        offset=value["first"] if value["first"] >= 0 else offset,
        gaps=_gaps_from_json(value.get("gaps", ())),
        leading=leading,
        binding=binding_from_json(value["binding"]) if "binding" in value else None,
        tries=tries_from_json(value.get("tries", {})),
        dead=dead_letters_from_json(NUMBER, value["dead"]) if "dead" in value else None,
        resent=decode_offsets(resent),
        resends=resends,
        epochs=_epochs_from_json([TopicPartition(*item[:2]) for item in value["ranges"]], value) if "epochs" in value else {},
    )


def _gaps_to_json(gaps: Iterable[Gap]) -> list[list[str | int]]:
    return [[g.topic, g.partition, g.start, g.end] for g in gaps]


def _gaps_from_json(value: Iterable[Sequence[Any]]) -> tuple[Gap, ...]:
    return tuple(Gap(*item) for item in value)


def _source_to_json(source: SourcePlan) -> dict[str, Any]:
    return {
        "splits": [dict(split) for split in source.splits],
        "position": dict(source.position),
        "rows": source.rows,
        "remaining": source.remaining,
        "partitions": dict(source.partitions),
        **({"ahead": dict(vars(source.ahead))} if source.ahead is not None else {}),
    }


def _source_from_json(value: Mapping[str, Any]) -> SourcePlan:
    return SourcePlan(
        splits=tuple(value["splits"]),
        position=value["position"],
        rows=value.get("rows"),
        remaining=value.get("remaining", False),
        ahead=RowsAhead(**value["ahead"]) if value.get("ahead") else None,
        partitions=value.get("partitions", {}),
    )


PACKED_PARTS = 1_000
"""Number of partitions from which on a marker holds the offsets of its records in compressed form."""


def marker_to_json(marker: Marker) -> dict[str, Any]:
    """Return a marker as JSON; ``landed`` is ``[[topic, partition, first, last, records], ...]``.

    Tasks write the marker with the producer of their records, which compresses nothing by default, and whose records may have
    1 MB: the offsets of many partitions are packed.
    """
    fields = {"landed": marker.landed, "dead_letters": marker.dead_letters, "routed": marker.routed}
    landed = {name: landed_to_json(parts) for name, parts in fields.items()}
    more = {
        **({"result": result_to_json(marker.result)} if marker.result else {}),
        **{
            name: parts if len(parts) < PACKED_PARTS else pack_values(parts)
            for name, parts in landed.items()
            if parts or name == "landed"
        },
    }
    if ids := [list(pair) for pair in marker.topic_ids.items()]:
        more["topic_ids"] = ids if len(ids) < PACKED_PARTS else pack_values(ids)
    return {"window": marker.window, "split": marker.split, "bytes": marker.bytes, **more}


def marker_from_json(value: Mapping[str, Any]) -> Marker:
    fields = {}
    for name in ("landed", "dead_letters", "routed"):
        parts = value.get(name, ())
        fields[name] = landed_from_json(unpack_values(parts) if isinstance(parts, str) else parts)
    result = result_from_json(value["result"]) if value.get("result") else None
    ids = value.get("topic_ids", ())
    topic_ids = dict(unpack_values(ids) if isinstance(ids, str) else ids)
    return Marker(value["window"], value["split"], bytes=value.get("bytes", 0), result=result, topic_ids=topic_ids, **fields)


_STREAMS = ("letters", "routes")
"""Fields of a task's result that hold records, as Arrow streams."""
_OPTIONAL = ("began", "seconds", "interval", "out_of_interval", "farthest")
"""Fields that not every result has: the times of its task, and those of data intervals."""


def result_to_json(result: SplitResult) -> dict[str, Any]:
    """Return a split's result as JSON, without its records (:func:`encode_result` adds them)."""
    return {
        **{name: value for name, value in vars(result).items() if name not in (*_STREAMS, *_OPTIONAL)},
        **{name: value for name in _OPTIONAL if (value := getattr(result, name))},
        "samples": [list(vars(s).values()) for s in result.samples],
        "gaps": [list(vars(g).values()) for g in result.gaps],
        "times": [result.times.width, sorted(result.times.counts.items())],
        "token": dict(result.token),
    }


def result_from_json(value: Mapping[str, Any]) -> SplitResult:
    lists = {
        "samples": tuple(BadRecord(*s) for s in value["samples"]),
        "gaps": tuple(Gap(*g) for g in value["gaps"]),
        "times": TimestampHistogram(value["times"][0], {bucket: count for bucket, count in value["times"][1]})
        if "times" in value
        else TimestampHistogram(),
        "interval": tuple(value["interval"]) if value.get("interval") else None,
    }
    return SplitResult(**{**value, **lists})


def encode_result(result: SplitResult) -> str:
    """Return the text that a task sends to the driver: the split's result with its dead letters."""
    streams = {name: base64.b64encode(stream).decode() for name in _STREAMS if (stream := getattr(result, name))}
    return json.dumps({**result_to_json(result), **streams})


def decode_result(text: str) -> SplitResult:
    """Return the result that a task has sent, with its records.

    :raises KafkaSparkError: the error that ended the split, as it was raised in the task.
    """
    facts = dict(decode_facts(text))
    streams: dict[str, Any] = {name: base64.b64decode(facts.pop(name, "")) for name in _STREAMS}
    return replace(result_from_json(facts), **streams)


def position_to_json(position: Position) -> dict[str, Any]:
    return {
        "offsets": _offsets_to_json(position.offsets),
        "topic_ids": dict(position.topic_ids),
        "cluster_id": position.cluster_id,
        **({"source": dict(position.source)} if position.source is not None else {}),
        **({"followed": _followed_to_json(position.followed)} if position.followed else {}),
        **({"published": published_to_json(position.published)} if position.published is not None else {}),
        **({"moved": position.moved} if position.moved else {}),
        **({"passed": _gaps_to_json(position.passed)} if position.passed else {}),
        **_began_to_json(sorted(position.offsets), position.began),
        **_epochs_to_json(sorted(position.offsets), position.epochs),
    }


def position_from_json(value: Mapping[str, Any]) -> Position:
    return Position(
        offsets=_offsets_from_json(value["offsets"]),
        topic_ids=value.get("topic_ids", {}),
        cluster_id=value.get("cluster_id", ""),
        source=value.get("source"),
        followed=_followed_from_json(value.get("followed", {})),
        moved=value.get("moved", 0),
        published=published_from_json(value["published"]) if "published" in value else None,
        passed=_gaps_from_json(value.get("passed", ())),
        epochs=_epochs_from_json([TopicPartition(*item[:2]) for item in value["offsets"]], value),
        began=_began_from_json([TopicPartition(*item[:2]) for item in value["offsets"]], value),
    )


def landed_to_json(parts: Iterable[Landed]) -> list[list[Any]]:
    """Return ``[[topic, partition, first, last, records], ...]``."""
    return [[p.topic, p.partition, p.first, p.last, p.records] for p in parts]


def landed_from_json(value: Iterable[Sequence[Any]]) -> tuple[Landed, ...]:
    return tuple(Landed(*part) for part in value)


def published_to_json(published: Mapping[TopicPartition, Published]) -> list[list[Any]]:
    """Return ``[[topic, partition, end, records], ...]``."""
    return [[*tp, found.end, found.records] for tp, found in sorted(published.items())]


def published_from_json(value: Iterable[Sequence[Any]]) -> dict[TopicPartition, Published]:
    return {TopicPartition(topic, partition): Published(end, records) for topic, partition, end, records in value}


def _offsets_to_json(offsets: Mapping[TopicPartition, int]) -> list[list[Any]]:
    """Return ``[[topic, partition, offset], ...]``."""
    return [[tp.topic, tp.partition, offset] for tp, offset in sorted(offsets.items())]


def _offsets_from_json(value: Iterable[Sequence[Any]]) -> dict[TopicPartition, int]:
    return {TopicPartition(topic, partition): offset for topic, partition, offset in value}


def _followed_to_json(followed: Mapping[str, FollowedWindow]) -> dict[str, Any]:
    """Return ``{pipeline: [number, {topic: records}]}``."""
    return {pipeline: [reached.number, dict(reached.totals)] for pipeline, reached in followed.items()}


def _followed_from_json(value: Mapping[str, Any]) -> dict[str, FollowedWindow]:
    """Return the last window that was followed, by pipeline. Records of older releases hold only its number."""
    return {name: FollowedWindow(*found) if isinstance(found, list) else FollowedWindow(found) for name, found in value.items()}


def _epochs_to_json(partitions: Sequence[TopicPartition], epochs: Mapping[TopicPartition, int]) -> dict[str, list[int]]:
    """Return ``{"epochs": [3, -1, ...]}`` in the order of these partitions, -1 for an unknown epoch; empty if all are unknown."""
    known = [epochs.get(tp, -1) for tp in partitions]
    return {"epochs": known} if any(epoch >= 0 for epoch in known) else {}


def _epochs_from_json(partitions: Sequence[TopicPartition], value: Mapping[str, Any]) -> dict[TopicPartition, int]:
    found = value.get("epochs") or [-1] * len(partitions)
    return {tp: epoch for tp, epoch in zip(partitions, found, strict=True) if epoch >= 0}


def _began_to_json(partitions: Sequence[TopicPartition], began: Mapping[TopicPartition, int]) -> dict[str, list[int]]:
    """Return ``{"began": [700, 0, ...]}`` in the order of these partitions; empty if all are 0."""
    offsets = [began.get(tp, 0) for tp in partitions]
    return {"began": offsets} if any(offsets) else {}


def _began_from_json(partitions: Sequence[TopicPartition], value: Mapping[str, Any]) -> dict[TopicPartition, int]:
    found = value.get("began") or [0] * len(partitions)
    return {tp: offset for tp, offset in zip(partitions, found, strict=True) if offset}


def encode_error(error: KafkaSparkError) -> str:
    """Return the text with which a task reports the error that ended it, without a traceback of the worker."""
    return json.dumps({"error": base64.b64encode(pickle.dumps(error)).decode()})


def decode_facts(text: str) -> dict[str, Any]:
    """Return the decoded JSON that a task has sent.

    :raises KafkaSparkError: the error that ended it, as it was raised in the task.
    """
    facts: dict[str, Any] = json.loads(text)
    if "error" in facts:
        raise pickle.loads(base64.b64decode(facts["error"]))
    return facts
