"""Windows and their parts as JSON values, for the ledger, for the sinks' own records, and for what tasks tell the driver."""

from __future__ import annotations

import base64
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.windows.binding import binding_from_json, binding_to_json
from airflow_kafka_spark.windows.latency import Times
from airflow_kafka_spark.windows.model import (
    BadRecord,
    Followed,
    Gap,
    Landed,
    Marker,
    OffsetRange,
    SourcePlan,
    SplitResult,
    Target,
    TopicPartition,
    Window,
)
from airflow_kafka_spark.windows.plan import Position


def ranges_to_json(ranges: Sequence[OffsetRange]) -> list[list[Any]]:
    """``[[topic, partition, start, end], ...]``"""
    return [[r.topic, r.partition, r.start, r.end] for r in ranges]


def ranges_from_json(value: Sequence[Sequence[Any]]) -> tuple[OffsetRange, ...]:
    return tuple(OffsetRange(*item) for item in value)


def window_to_json(window: Window) -> dict[str, Any]:
    return {
        "pipeline": window.pipeline,
        "number": window.number,
        "ranges": ranges_to_json(window.ranges),
        "run": window.run,
        "planned_at": window.planned_at,
        "cluster_id": window.cluster_id,
        "topic_ids": dict(window.topic_ids),
        "gaps": [[g.topic, g.partition, g.start, g.end] for g in window.gaps],
        "held_back": window.held_back,
        **({"source": _source_to_json(window.source)} if window.source else {}),
        **({"follows": vars(window.follows)} if window.follows else {}),
        **({"target": vars(window.target)} if window.target else {}),
        **({"interval": list(window.interval)} if window.interval else {}),
        **({"replay": window.replay} if window.replay else {}),
        **({"moved": window.moved} if window.moved else {}),
        **({"binding": binding_to_json(window.binding)} if window.binding else {}),
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
        gaps=tuple(Gap(*item) for item in value.get("gaps", ())),
        held_back=value.get("held_back", 0),
        source=_source_from_json(value["source"]) if value.get("source") else None,
        follows=Followed(**value["follows"]) if value.get("follows") else None,
        target=Target(**value["target"]) if value.get("target") else None,
        interval=tuple(value["interval"]) if value.get("interval") else None,
        replay=value.get("replay", 0),
        moved=value.get("moved", 0),
        binding=binding_from_json(value["binding"]) if value.get("binding") else None,
    )


def _source_to_json(source: SourcePlan) -> dict[str, Any]:
    return {
        "splits": [dict(split) for split in source.splits],
        "position": dict(source.position),
        "rows": source.rows,
        "remaining": source.remaining,
        "partitions": dict(source.partitions),
    }


def _source_from_json(value: Mapping[str, Any]) -> SourcePlan:
    return SourcePlan(
        splits=tuple(value["splits"]),
        position=value["position"],
        rows=value.get("rows"),
        remaining=value.get("remaining", False),
        partitions=value.get("partitions", {}),
    )


def marker_to_json(marker: Marker) -> dict[str, Any]:
    """``landed`` is ``[[topic, partition, first, last, records], ...]``."""
    places = {"landed": marker.landed, "dead_letters": marker.dead_letters, "routed": marker.routed}
    told = {name: [[p.topic, p.partition, p.first, p.last, p.records] for p in parts] for name, parts in places.items()}
    more = {
        **({"result": result_to_json(marker.result)} if marker.result else {}),
        **{name: parts for name, parts in told.items() if parts or name == "landed"},
    }
    return {"window": marker.window, "split": marker.split, "bytes": marker.bytes, **more}


def marker_from_json(value: Mapping[str, Any]) -> Marker:
    result = result_from_json(value["result"]) if value.get("result") else None
    places = {name: tuple(Landed(*part) for part in value.get(name, ())) for name in ("landed", "dead_letters", "routed")}
    return Marker(value["window"], value["split"], bytes=value.get("bytes", 0), result=result, **places)


_STREAMS = ("letters", "routes")
"""What a task tells of records themselves, in Arrow."""


def result_to_json(result: SplitResult) -> dict[str, Any]:
    """Without its dead letters: those travel once, beside it."""
    return {
        **{name: value for name, value in vars(result).items() if name not in _STREAMS},
        "samples": [list(vars(s).values()) for s in result.samples],
        "gaps": [list(vars(g).values()) for g in result.gaps],
        "times": [result.times.width, sorted(result.times.counts.items())],
        "token": dict(result.token),
    }


def result_from_json(value: Mapping[str, Any]) -> SplitResult:
    lists = {
        "samples": tuple(BadRecord(*s) for s in value["samples"]),
        "gaps": tuple(Gap(*g) for g in value["gaps"]),
        "times": Times(value["times"][0], {bucket: count for bucket, count in value["times"][1]})
        if "times" in value
        else Times(),
    }
    return SplitResult(**{**value, **lists})


def encode_result(result: SplitResult) -> str:
    """As a task tells it to the driver, with its dead letters."""
    streams = {name: base64.b64encode(stream).decode() for name in _STREAMS if (stream := getattr(result, name))}
    return json.dumps({**result_to_json(result), **streams})


def decode_result(text: str) -> SplitResult:
    """What a task told.

    :raises KafkaSparkError: the error that ended the split, as it was raised in the task.
    """
    facts = dict(decode_facts(text))
    streams: dict[str, Any] = {name: base64.b64decode(facts.pop(name, "")) for name in _STREAMS}
    return replace(result_from_json(facts), **streams)


def position_to_json(position: Position) -> dict[str, Any]:
    return {
        "offsets": [[tp.topic, tp.partition, offset] for tp, offset in sorted(position.offsets.items())],
        "topic_ids": dict(position.topic_ids),
        "cluster_id": position.cluster_id,
        **({"source": dict(position.source)} if position.source is not None else {}),
        **({"followed": dict(position.followed)} if position.followed else {}),
        **({"moved": position.moved} if position.moved else {}),
    }


def position_from_json(value: Mapping[str, Any]) -> Position:
    return Position(
        offsets={TopicPartition(topic, partition): offset for topic, partition, offset in value["offsets"]},
        topic_ids=value.get("topic_ids", {}),
        cluster_id=value.get("cluster_id", ""),
        source=value.get("source"),
        followed=value.get("followed", {}),
        moved=value.get("moved", 0),
    )


def encode_error(error: KafkaSparkError) -> str:
    """An error that a task ends with, as its result: a traceback from a worker is no message for a user."""
    return json.dumps({"error": base64.b64encode(pickle.dumps(error)).decode()})


def decode_facts(text: str) -> dict[str, Any]:
    """What a task told, as it stands.

    :raises KafkaSparkError: the error that ended it, as it was raised in the task.
    """
    facts: dict[str, Any] = json.loads(text)
    if "error" in facts:
        raise pickle.loads(base64.b64decode(facts["error"]))
    return facts
