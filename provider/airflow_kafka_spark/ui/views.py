"""Pipelines as the pages show them: pure functions from what is known to the JSON of the list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_kafka_spark.ui.access import Access
from airflow_kafka_spark.ui.catalog import LedgerName, Task
from airflow_kafka_spark.ui.lags import Measured
from airflow_kafka_spark.ui.summary import Summary, window_name
from airflow_kafka_spark.ui.tasks import FAILED, RUNNING, TaskId, Tasks, TaskState, task_of
from airflow_kafka_spark.windows.lag import Verdict
from airflow_kafka_spark.windows.memory import Entry

STATUSES = ("OK", "WARN", "STALL", "STOP", "REWIND", "UNKNOWN")
ACTIVITIES = ("running", "failed", "paused", "conflict", "idle", "new")
SORTS = ("pipeline", "status", "activity", "dag_id", "lag", "lag_records", "lag_seconds", "rate", "last_window", "ledger")


@dataclass(frozen=True)
class Item:
    """All that is known of a pipeline.

    :param summary: None for one that has not moved a window yet.
    :param measured: its lag; None before it was measured.
    :param tasks: of whose DAG files name it.
    """

    ledger: LedgerName
    pipeline: str
    summary: Summary | None = None
    measured: Measured | None = None
    verdict: Verdict | None = None
    tasks: tuple[Task, ...] = ()

    @property
    def dag_ids(self) -> tuple[str, ...]:
        """The DAGs it belongs to: those whose tasks name it, or else that of its newest window's run."""
        if self.tasks:
            return tuple(dict.fromkeys(task.dag_id for task in self.tasks))
        owner = self.summary.owner if self.summary else None
        return (owner.dag_id,) if owner else ()

    @property
    def task(self) -> tuple[str | None, str | None]:
        """DAG and task, as far as they are known."""
        if self.tasks:
            return self.tasks[0].dag_id, self.tasks[0].task_id
        owner = self.summary.owner if self.summary else None
        return (owner.dag_id, owner.task_id) if owner else (None, None)

    @property
    def running_tasks(self) -> tuple[TaskId, ...]:
        """Whose states have to be known to tell what it does."""
        if self.summary is None or self.summary.open is None:
            return ()
        planner = task_of(self.summary.open.window.run)
        return tuple(dict.fromkeys([*self.summary.running_tasks, *([planner] if planner else [])]))


# --- one row ------------------------------------------------------------------------------------------------------------


def row(item: Item, tasks: Tasks, access: Access, now: float) -> dict[str, Any]:
    """A row of the list.

    :param now: seconds since the epoch.
    """
    summary = item.summary
    dag_id, task_id = item.task
    status, reason = _status(item)
    activity, why = _activity(item, tasks)
    measured, lag = item.measured, item.measured.lag if item.measured else None
    first = item.tasks[0] if item.tasks else None
    topics = list(dict.fromkeys([*(summary.topics if summary else ()), *(first.topics if first else ())]))
    pause = summary.pause if summary else None
    report = summary.report if summary else lambda name, default=None: default
    reads_rows = bool(summary and summary.has_source)
    return {
        "ledger": str(item.ledger),
        "pipeline": item.pipeline,
        "dag_id": dag_id,
        "task_id": task_id,
        "status": status,
        "reason": why or reason,
        "activity": activity,
        "topics": topics,
        "group": None if reads_rows else report("group_id") or (first.group if first else None),
        "source": report("source") or (first.source if first else "") or None,
        "sink": report("sink") or (first.sink if first else "") or None,
        "guarantee": report("guarantee") or None,
        "lag_records": lag.records() if lag else None,
        "lag_seconds": measured.seconds if measured and lag else None,
        "lag_age": round(now - measured.at, 1) if measured else None,
        "rate": report("rate"),
        "last_window": _last_window(summary.last) if summary and summary.last else None,
        "running": _running(item, tasks, now) if activity in ("running", "conflict") else None,
        "may_edit": access.may_edit(item.dag_ids),
        "is_paused": pause is not None,
        "pause": {"who": pause.who, "why": pause.why, "at": pause.at} if pause else None,
        "dag_paused": any(tasks.paused.get(dag) for dag in item.dag_ids),
        "intervals": bool(summary and summary.has_intervals),
    }


def _status(item: Item) -> tuple[str, str]:
    summary = item.summary
    if summary is None:
        return "UNKNOWN", "it has not moved a window yet"
    if summary.problem:
        return "UNKNOWN", summary.problem
    if summary.has_source:
        return ("OK", "it reads rows: there is no lag to measure") if summary.last else ("UNKNOWN", "no window is complete yet")
    if item.verdict is not None:
        return item.verdict.status.value, item.verdict.reason
    return "UNKNOWN", item.measured.problem if item.measured else "its lag has not been measured yet"


def _activity(item: Item, tasks: Tasks) -> tuple[str, str]:
    """What it does, and why that is worth a word."""
    summary = item.summary
    if summary is None:
        return "paused" if _is_paused(item, tasks) else "new", ""
    states = {task: found for task in item.running_tasks if (found := tasks.states.get(task))}
    running = [task for task, found in states.items() if found.state in RUNNING]
    entry = summary.open
    if entry is not None and running:
        planner, worker = task_of(entry.window.run), task_of(entry.attempt.run)
        if planner != worker and {planner, worker} <= set(running):
            return "conflict", f"two runs are at work on window {window_name(entry)}: {entry.window.run} and {entry.attempt.run}"
        return "running", ""
    if _is_paused(item, tasks):
        return "paused", ""
    if entry is not None:
        worker = task_of(entry.attempt.run)
        found = states.get(worker) if worker else None
        ended = found is None or found.state in FAILED or found.state in ("success", "skipped", "removed", None)
        if ended:
            state = found.state if found and found.state else "not there any more"
            return "failed", f"window {window_name(entry)} is open, and its task is {state}"
    return ("new" if summary.last is None and entry is None and not summary.problem else "idle"), ""


def _is_paused(item: Item, tasks: Tasks) -> bool:
    by_hand = item.summary is not None and item.summary.pause is not None
    return by_hand or any(tasks.paused.get(dag) for dag in item.dag_ids)


def _last_window(entry: Entry) -> dict[str, Any]:
    report = entry.report or {}
    return {
        "number": entry.window.number,
        "name": window_name(entry),
        "completed_at": report.get("completed_at"),
        "records_read": report.get("records_read"),
        "seconds": (report.get("timings") or {}).get("total"),
    }


def _running(item: Item, tasks: Tasks, now: float) -> dict[str, Any] | None:
    entry = item.summary.open if item.summary else None
    if entry is None:
        return None
    task = task_of(entry.attempt.run)
    state = tasks.states.get(task) if task else None
    return {
        "number": entry.window.number,
        "name": window_name(entry),
        "dag_id": task.dag_id if task else None,
        "run_id": task.run_id if task else None,
        "task_id": task.task_id if task else None,
        "map_index": task.map_index if task else -1,
        "started_at": entry.attempt.started_at,
        "attempt": entry.attempt.number,
        **_progress(entry, state, now),
    }


def _progress(entry: Entry, state: TaskState | None, now: float) -> dict[str, Any]:
    """How far it is: by what its task says of this very window, since users may edit that."""
    said = state.progress if state and state.progress else {}
    if said.get("window") != entry.window.number:
        said = {}
    total = _number(said.get("records_total")) or entry.window.span or (entry.window.source.rows if entry.window.source else None)
    done, splits, finished = (_number(said.get(name)) for name in ("records_done", "splits", "splits_done"))
    fraction = finished / splits if splits and finished is not None else done / total if total and done is not None else None
    fraction = None if fraction is None else min(max(fraction, 0.0), 1.0)
    elapsed = now - began if (began := _number(said.get("started_at"))) else None
    remaining = elapsed * (1 - fraction) / fraction if elapsed and elapsed > 0 and fraction else None
    return {
        "records_total": int(total) if total else None,
        "records_done": int(done) if done is not None else None,
        "fraction": None if fraction is None else round(fraction, 4),
        "remaining_seconds": None if remaining is None else round(remaining, 1),
        "step": said.get("step") if said.get("step") in ("plan", "move", "commit", "close") else None,
    }


def _number(value: Any) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e18 else None


# --- the list -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """What the list is asked for.

    :param q: a part of a name: of the pipeline, DAG, task, topic, group, source or sink.
    :param status: statuses or activities, separated by commas; all when empty.
    :param sort: one of :data:`SORTS`; with ``-`` before it the other way round.
    """

    q: str = ""
    status: str = ""
    dag_id: str = ""
    task_id: str = ""
    sort: str = "pipeline"
    limit: int = 50
    offset: int = 0


def is_wanted(item: Item, question: Question) -> bool:
    """Whether it belongs to the DAG and task that are asked for."""
    if question.dag_id and question.dag_id not in item.dag_ids:
        return False
    tasks = {task.task_id for task in item.tasks} or {item.task[1] or ""}
    return not question.task_id or question.task_id in tasks


def listing(rows: Iterable[dict[str, Any]], question: Question) -> dict[str, Any]:
    """A page of the list, and counts of all that the words ask for, whatever their status."""
    words = question.q.casefold().split()
    found = [r for r in rows if all(word in _text(r) for word in words)]
    counts, activities = Counter(r["status"] for r in found), Counter(r["activity"] for r in found)
    wanted = {name.strip().casefold() for name in question.status.split(",") if name.strip()}
    if wanted:
        found = [r for r in found if r["status"].casefold() in wanted or r["activity"] in wanted]
    found = _sorted(found, question.sort)
    begin, limit = max(question.offset, 0), min(max(question.limit, 1), 500)
    return {
        "pipelines": found[begin : begin + limit],
        "total": len(found),
        "counts": {status: counts.get(status, 0) for status in STATUSES},
        "activities": {activity: activities.get(activity, 0) for activity in ACTIVITIES},
    }


def _text(row: Mapping[str, Any]) -> str:
    fields = ("pipeline", "dag_id", "task_id", "group", "source", "sink", "ledger")
    return " ".join([*(str(row[name] or "") for name in fields), *row["topics"]]).casefold()


_WORST_FIRST = {status: -rank for rank, status in enumerate(("UNKNOWN", "OK", "WARN", "STALL", "STOP", "REWIND"))}
_BUSY_FIRST = {activity: rank for rank, activity in enumerate(("conflict", "failed", "running", "paused", "new", "idle"))}
_KEYS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "pipeline": lambda r: r["pipeline"].casefold(),
    "ledger": lambda r: r["ledger"],
    "dag_id": lambda r: r["dag_id"],
    "status": lambda r: _WORST_FIRST[r["status"]],
    "activity": lambda r: _BUSY_FIRST[r["activity"]],
    "lag": lambda r: r["lag_records"],
    "lag_records": lambda r: r["lag_records"],
    "lag_seconds": lambda r: r["lag_seconds"],
    "rate": lambda r: r["rate"],
    "last_window": lambda r: r["last_window"] and r["last_window"]["completed_at"],
}


def _sorted(rows: list[dict[str, Any]], sort: str) -> list[dict[str, Any]]:
    """By name where they are equal; what is not known comes last, whichever way round."""
    backwards, name = sort.startswith("-"), sort.lstrip("-")
    key = _KEYS.get(name, _KEYS["pipeline"])
    by_name = sorted(rows, key=lambda r: (r["pipeline"].casefold(), r["ledger"]))
    known = [r for r in by_name if key(r) is not None]
    return [*sorted(known, key=key, reverse=backwards), *(r for r in by_name if key(r) is None)]


def ledger_row(name: LedgerName, state: str, message: str | None, age: float | None, pipelines: int) -> dict[str, Any]:
    """A ledger, as the list shows it."""
    return {
        "ledger": str(name),
        "connection": name.connection,
        "topic": name.topic,
        "state": state,
        "message": message,
        "age": None if age is None else round(age, 1),
        "pipelines": pipelines,
    }
