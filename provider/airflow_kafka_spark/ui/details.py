"""One pipeline as its page shows it: windows, partitions, changes, dead letters, and how it went so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from airflow_kafka_spark.ui.lags import Measured
from airflow_kafka_spark.ui.shelf import Shelf
from airflow_kafka_spark.ui.summary import completed_at, window_name
from airflow_kafka_spark.ui.tasks import Tasks, task_of
from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.dead_letters import DeadLetters
from airflow_kafka_spark.windows.instants import iso
from airflow_kafka_spark.windows.memory import Entry, Memory
from airflow_kafka_spark.windows.model import Landed, State, TopicPartition

SERIES = 100
"""Windows whose figures are drawn."""
MOST_RANGES = 1_000
"""Partitions of a window that are listed."""


class Told:
    """A window of a pipeline, with what went wrong in it."""

    def __init__(self, entry: Entry, dead: DeadLetters | None) -> None:
        self.entry, self.dead = entry, dead
        self.name = window_name(entry)
        self.task = task_of(entry.window.run)

    @property
    def landed(self) -> tuple[Landed, ...]:
        """Where its dead letters lie. Those that went along with what was published are known by its report alone."""
        if self.dead and self.dead.landed:
            return self.dead.landed
        return tuple(Landed(**part) for part in self.report.get("dead_letters") or ())

    @property
    def elsewhere(self) -> list[dict[str, Any]]:
        """To which topics and sinks transforms have sent how many of its records."""
        counts: dict[str, int] = {}
        for part in self.report.get("routed") or ():
            counts[part["topic"]] = counts.get(part["topic"], 0) + part["records"]
        for part in self.report.get("captured") or ():
            counts[part["sink"]] = counts.get(part["sink"], 0) + part["records"]
        return [{"to": name, "records": records} for name, records in sorted(counts.items())]

    @property
    def report(self) -> Mapping[str, Any]:
        """What is told of it once it is complete."""
        return (self.entry.report or {}) if self.entry.state is State.COMPLETE else {}

    @property
    def order(self) -> tuple[int, Any]:
        """Data intervals by their time, windows of progress before them by their number."""
        return (1, self.entry.window.number) if self.name == str(self.entry.window.number) else (0, self.name)

    def is_of(self, run_id: str, task_id: str, map_index: int | None) -> bool:
        """Whether this run and task have planned it; "" and None for any."""
        mine = self.task
        return mine is not None and (
            (not run_id or mine.run_id == run_id)
            and (not task_id or mine.task_id == task_id)
            and (map_index is None or mine.map_index == map_index)
        )


def windows_of(shelf: Shelf) -> list[Told]:
    """All windows that are kept of a pipeline, the newest first.

    :raises ValueError: a record cannot be read.
    """
    memories: Iterable[Memory] = [shelf.memory(), *(shelf.lane(name) for name in shelf.lanes)]
    told = [Told(entry, memory.dead.get(number)) for memory in memories for number, entry in memory.entries.items()]
    return sorted(told, key=lambda t: t.order, reverse=True)


def before(told: Sequence[Told], cursor: str) -> list[Told]:
    """Those that come after the one that is named, by its number or its interval."""
    if not cursor:
        return list(told)
    limit = (1, int(cursor)) if cursor.isdecimal() else (0, cursor)
    return [t for t in told if t.order < limit]


def win(told: Told, tasks: Tasks) -> dict[str, Any]:
    """A window, as the pages show it."""
    entry, window = told.entry, told.entry.window
    complete = entry.state is State.COMPLETE
    report = told.report
    timings = report.get("timings") or {}
    task = told.task
    state = tasks.states.get(task) if task else None
    gaps = report.get("gaps") if complete else [vars(gap) for gap in window.gaps]
    return {
        "number": window.number,
        "name": told.name,
        "replay": window.replay,
        "state": entry.state.value,
        "interval": [iso(window.interval[0]), iso(window.interval[1])] if window.interval else None,
        "ranges": [
            {"topic": r.topic, "partition": r.partition, "start": r.start, "end": r.end} for r in window.ranges[:MOST_RANGES]
        ],
        "splits": len(window.source.splits) if window.source else None,
        "records_read": report.get("records_read"),
        "records_written": report.get("records_written"),
        "records_deleted": report.get("records_deleted"),
        "records_rejected": report.get("records_rejected"),
        "records_filtered": report.get("records_filtered", 0) if complete else None,
        "records_routed": report.get("records_routed", 0) if complete else None,
        "routed": told.elsewhere,
        "bytes": report.get("bytes"),
        "rate": report.get("rate"),
        "latency": report.get("latency"),
        "seconds": timings.get("total"),
        "timings": timings,
        "attempts": entry.attempt.number,
        "run": window.run,
        "dag_id": task.dag_id if task else None,
        "run_id": task.run_id if task else None,
        "task_id": task.task_id if task else None,
        "map_index": task.map_index if task else -1,
        "planned_at": window.planned_at,
        "completed_at": report.get("completed_at") or None,
        "guarantee": report.get("guarantee") or None,
        "held_back": window.held_back,
        "moved": window.moved,
        "gaps": gaps or [],
        "dead_letters": [
            {"topic": p.topic, "partition": p.partition, "first": p.first, "last": p.last, "records": p.records}
            for p in told.landed
        ],
        "task_state": state.state if state else None,
        # Only of a DAG that is there: another Airflow may have moved the window.
        "url": task.url if task and task.dag_id in tasks.paused else None,
    }


def partitions(measured: Measured | None, position: Mapping[TopicPartition, int]) -> list[dict[str, Any]]:
    """Where a pipeline stands in each partition."""
    states = measured.lag.partitions if measured and measured.lag else {}
    bounds = measured.offsets if measured else {}
    committed = (measured.committed or {}) if measured else {}
    found = []
    for tp in sorted({*position, *states}):
        there, state = bounds.get(tp), states.get(tp)
        found.append(
            {
                "topic": tp.topic,
                "partition": tp.partition,
                "low": there.low if there else None,
                "position": position.get(tp),
                "committed": committed.get(tp),
                "lso": there.lso if there else None,
                "high": there.high if there else None,
                "lag": state.records if state else None,
            }
        )
    return found


def change(found: Change) -> dict[str, Any]:
    """Something that was done by hand."""
    offsets = {name: [[*tp, offset] for tp, offset in sorted(getattr(found, name).items())] for name in ("before", "after")}
    facts = {name: getattr(found, name) for name in ("number", "action", "who", "why", "at", "window", "name")}
    return {**facts, **offsets, "discarded": list(found.discarded)}


def dead_letters(told: Iterable[Told]) -> dict[str, Any]:
    """How many there are, and of which windows."""
    windows = [
        {
            "number": t.entry.window.number,
            "name": t.name,
            "records": sum(part.records for part in landed),
            "topic": t.dead.topic if t.dead and t.dead.topic else landed[0].topic,
        }
        for t in told
        if (landed := t.landed)
    ]
    return {"total": sum(window["records"] for window in windows), "windows": windows}


def series(told: Iterable[Told], samples: Iterable[tuple[float, int, float | None]]) -> dict[str, Any]:
    """Figures over time, the oldest first."""
    complete = [t for t in told if t.entry.state is State.COMPLETE and t.entry.report]
    newest = sorted(complete, key=lambda t: completed_at(t.entry))[-SERIES:]
    lag = [{"at": round(at, 1), "records": records, "seconds": seconds} for at, records, seconds in samples]
    return {"windows": [_point(t) for t in newest], "lag": lag}


def _point(told: Told) -> dict[str, Any]:
    report = told.report
    latency = report.get("latency") or {}
    published = report.get("published")
    return {
        "number": told.entry.window.number,
        "name": told.name,
        "completed_at": report.get("completed_at"),
        "published": _upstream(report) if published is None else sum(p.get("records", 0) for p in published),
        "read": report.get("records_read"),
        "written": report.get("records_written"),
        "rejected": report.get("records_rejected"),
        "gaps": sum(gap["end"] - gap["start"] for gap in report.get("gaps") or ()),
        "p50": latency.get("p50"),
        "p95": latency.get("p95"),
        "timings": report.get("timings") or {},
    }


def _upstream(report: Mapping[str, Any]) -> int | None:
    """What those who wrote the records say that they were; None where nobody counted."""
    follows, consumption = report.get("follows") or {}, report.get("consumption") or {}
    if follows.get("records") is not None:
        return int(follows["records"])
    buckets = [bucket[2] for bucket in consumption.get("buckets") or () if len(bucket) > 2]
    return sum(buckets) if buckets else None
