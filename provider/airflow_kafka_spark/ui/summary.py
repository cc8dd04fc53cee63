"""What a list of pipelines says of one of them, taken from its memory when that changes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from airflow_kafka_spark.ledger.lag import instant
from airflow_kafka_spark.ui.lags import Stand
from airflow_kafka_spark.ui.shelf import Shelf
from airflow_kafka_spark.ui.tasks import TaskId, task_of
from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.interval import parse_ledger_name
from airflow_kafka_spark.windows.lag import Observation, usual_period
from airflow_kafka_spark.windows.memory import Entry, Memory, NewerVersion
from airflow_kafka_spark.windows.model import State, TopicPartition

LOOKED_BACK = 12
"""Windows that a summary looks back on: as many as a verdict on lag needs."""


@dataclass(frozen=True)
class Summary:
    """A pipeline in short.

    :param problem: why its memory cannot be read, "" if it can.
    :param stand: where it stands, for the lag.
    :param last: its last complete window.
    :param open: its window that is planned and not complete; the newest of several intervals.
    :param running_tasks: of all windows that are open.
    :param owner: whose run planned its newest window.
    :param pause: who has paused it, None while it is not.
    :param period: the longest it took from one window to the next, in seconds; None when that cannot be told.
    :param past: when its windows were completed, for the verdict on its lag.
    :param topics: all that it has read.
    :param moved: the number of the change that has put it where it stands; 0 where its windows led there.
    """

    pipeline: str
    problem: str = ""
    stand: Stand = field(default_factory=lambda: Stand({}))
    last: Entry | None = None
    open: Entry | None = None
    running_tasks: tuple[TaskId, ...] = ()
    owner: TaskId | None = None
    pause: Change | None = None
    period: float | None = None
    past: Mapping[TopicPartition, Sequence[Observation]] = field(default_factory=dict)
    topics: tuple[str, ...] = ()
    moved: int = 0
    has_source: bool = False
    has_intervals: bool = False

    def report(self, name: str, default: Any = None) -> Any:
        """A fact of the last report."""
        told = self.last.report if self.last and self.last.report else {}
        return told.get(name, default)


def window_name(entry: Entry) -> str:
    """What people call a window: its number, or its data interval."""
    _, interval = parse_ledger_name(entry.window.pipeline)
    return interval or str(entry.window.number)


def summarize(shelf: Shelf) -> Summary:
    """Guarantee: never fails; a record that cannot be read is told in ``problem``."""
    try:
        memory = shelf.memory(LOOKED_BACK)
        lanes = shelf.newest_lanes(LOOKED_BACK) if shelf.lanes else []
        return _summary(shelf.pipeline, memory, lanes)
    except NewerVersion as error:
        problem = f"the ledger holds {error}: upgrade airflow-provider-kafka-spark to the release that wrote it"
        return Summary(shelf.pipeline, problem)
    except (ValueError, KeyError, TypeError) as error:
        return Summary(shelf.pipeline, f"the ledger holds {error}")
    finally:
        shelf.forget_answers()


def _summary(pipeline: str, memory: Memory, lanes: Sequence[Memory]) -> Summary:
    entries = [*memory.entries.values(), *(entry for lane in lanes for entry in lane.entries.values())]
    told = ((completed_at(e), e.window.number, e) for e in entries if _is_told(e))
    complete = sorted(told, key=lambda item: item[:2])
    unfinished = [e for e in entries if e.state is State.PLANNED]
    newest = max(entries, key=lambda e: (e.attempt.started_at, e.window.planned_at), default=None)
    times = [at for at, _, _ in complete]
    last = complete[-1][2] if complete else None
    has_source = memory.position.source is not None or any(e.window.source for e in entries)
    ranges = {r.topic for e in entries[-2:] for r in e.window.ranges}
    topics = tuple(sorted({*ranges, *(tp.topic for tp in memory.position.offsets)}))
    by_group = bool(memory.intervals) and not memory.position.offsets
    group = next((str(e.report["group_id"]) for _, _, e in reversed(complete) if e.report and e.report.get("group_id")), None)
    ids = memory.position.topic_ids or (newest.window.topic_ids if newest else {})
    stand = Stand({} if has_source else memory.position.offsets, ids, () if has_source else topics, group, by_group)
    tasks = (task_of(e.attempt.run) for e in unfinished)
    return Summary(
        pipeline,
        stand=stand,
        last=last,
        open=max(unfinished, key=lambda e: e.attempt.started_at, default=None),
        running_tasks=tuple(dict.fromkeys(task for task in tasks if task)),
        owner=task_of(newest.window.run) if newest else None,
        pause=memory.pause,
        period=usual_period(times),
        past={} if memory.position.moved else _past([e for _, _, e in complete], ids, in_order=not by_group),
        topics=topics,
        moved=memory.position.moved,
        has_source=has_source,
        has_intervals=bool(memory.intervals),
    )


def completed_at(entry: Entry) -> float:
    """Seconds since the epoch; 0 where that is not known."""
    try:
        return instant(str((entry.report or {}).get("completed_at") or ""))
    except ValueError:
        return 0.0


def _is_told(entry: Entry) -> bool:
    return entry.state is State.COMPLETE and entry.report is not None and completed_at(entry) > 0


def _past(complete: Sequence[Entry], ids: Mapping[str, str], *, in_order: bool) -> dict[TopicPartition, list[Observation]]:
    """What the ledger tells of the time before, for a verdict. What somebody has done by hand is no reproach: neither windows
    from before a reset nor replays tell where the pipeline stood.

    :param in_order: whether windows follow each other; data intervals need not.
    """
    moved = max((e.window.number for e in complete if e.window.moved), default=0)
    past: dict[TopicPartition, list[Observation]] = {}
    for entry in complete:
        tells = in_order and not entry.window.replay
        for tp, end in entry.window.ends.items():
            # Offsets of a topic that was deleted and created again mean other records.
            same = entry.window.topic_ids.get(tp.topic, "") in ("", ids.get(tp.topic, ""))
            if same and entry.window.number >= moved:
                seen = Observation(completed_at(entry), end if tells else None, active=True, tells=tells)
                past.setdefault(tp, []).append(seen)
    return past
