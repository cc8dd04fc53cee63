"""Contents of the pages as JSON: the list of pipelines, and one pipeline with its windows, partitions, changes and charts.

The functions are pure. :class:`UserView` applies them to the current data, as far as one user may see it.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

from airflow_kafka_spark.ui.access import Access, find_access
from airflow_kafka_spark.ui.airflow_metadata import (
    FAILED,
    RUNNING,
    AirflowState,
    FailedTask,
    LedgerName,
    PipelineTask,
    TaskError,
    TaskInstanceState,
    read_configuration,
    read_paused_dags,
    read_task_states,
)
from airflow_kafka_spark.ui.lag_monitor import LagMeasurement
from airflow_kafka_spark.ui.ledger_snapshot import (
    PipelineSnapshot,
    PipelineSummary,
    find_status,
    format_endpoint,
    get_entry_name,
    parse_completion_time,
    parse_start_time,
)
from airflow_kafka_spark.ui.previews import TopicFormats, find_topic_formats
from airflow_kafka_spark.ui.responses import RequestRefused, redact_text
from airflow_kafka_spark.ui.watcher import LedgerWatch, Watcher
from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.dead_letters import DeadLetters, find_dead_letters
from airflow_kafka_spark.windows.interval import find_missing_intervals
from airflow_kafka_spark.windows.lag import Verdict
from airflow_kafka_spark.windows.memory import Memory, WindowEntry
from airflow_kafka_spark.windows.model import Landed, State, TaskInstanceKey, TopicPartition
from airflow_kafka_spark.windows.times import format_instant

if TYPE_CHECKING:
    from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
    from sqlalchemy.orm import Session

JsonObject: TypeAlias = "dict[str, Any]"
"""A JSON object of the API. The script in ``static/`` reads its keys."""

STATUSES = ("OK", "WARN", "STALL", "STOP", "REWIND", "UNKNOWN")
ACTIVITIES = ("running", "failed", "paused", "conflict", "idle", "new", "unknown")
OUTAGE_SECONDS = 60.0
"""Seconds after which the last status of a pipeline whose ledger cannot be reached is no longer shown as its status."""
SORTS = ("pipeline", "status", "activity", "dag_id", "lag", "lag_records", "lag_seconds", "rate", "last_window", "ledger")


@dataclass(frozen=True)
class PipelineItem:
    """A pipeline with everything that the list shows of it.

    :param ledger: ledger of the pipeline.
    :param pipeline: name of the pipeline.
    :param summary: summary of its records; None if it has not planned a window yet, or if the ledger was not read.
    :param measured: last measurement of its lag; None if there was none.
    :param verdict: verdict on its lag; None if the lag is unknown.
    :param tasks: tasks whose DAG files name the pipeline.
    :param stored_configuration: the configuration that the run of its newest window has stored, as that of a mapped task; empty
        where a DAG file has it.
    :param is_read: False if the ledger could not be read yet, so that a pipeline without a summary may have windows.
    :param outage: seconds since the ledger was last read, if it cannot be reached now; None if it can.
    """

    ledger: LedgerName
    pipeline: str
    summary: PipelineSummary | None = None
    measured: LagMeasurement | None = None
    verdict: Verdict | None = None
    tasks: tuple[PipelineTask, ...] = ()
    stored_configuration: str = ""
    is_read: bool = True
    outage: float | None = None

    @property
    def dag_ids(self) -> tuple[str, ...]:
        """The DAGs whose tasks name the pipeline, or else the DAG whose run planned its newest window."""
        if self.tasks:
            return tuple(dict.fromkeys(task.dag_id for task in self.tasks))
        owner = self.summary.owner if self.summary else None
        return (owner.dag_id,) if owner else ()

    @property
    def task(self) -> tuple[str | None, str | None]:
        """DAG and task of the pipeline; None for unknown ones."""
        if self.tasks:
            return self.tasks[0].dag_id, self.tasks[0].task_id
        owner = self.summary.owner if self.summary else None
        return (owner.dag_id, owner.task_id) if owner else (None, None)

    @property
    def running_tasks(self) -> tuple[TaskInstanceKey, ...]:
        """The task instances whose states determine the activity of the pipeline."""
        if self.summary is None or self.summary.open is None:
            return ()
        planner = TaskInstanceKey.parse(self.summary.open.window.run)
        return tuple(dict.fromkeys([*self.summary.running_tasks, *([planner] if planner else [])]))


# --- a row --------------------------------------------------------------------------------------------------------------


def make_pipeline_row(item: PipelineItem, airflow: AirflowState, access: Access, now: float) -> JsonObject:
    """Return a row of the list.

    :param item: the pipeline.
    :param airflow: states of its tasks and DAGs.
    :param access: permissions of the user.
    :param now: seconds since the epoch.
    """
    summary = item.summary
    dag_id, task_id = item.task
    status, reason = _find_status(item)
    activity, why = _find_activity(item, airflow)
    measured, lag = item.measured, item.measured.lag if item.measured else None
    first = item.tasks[0] if item.tasks else None
    topics = list(dict.fromkeys([*(summary.topics if summary else ()), *(first.topics if first else ())]))
    pause = summary.pause if summary else None
    report = summary.get_report_value if summary else lambda name, default=None: default
    reads_rows = summary.has_source if summary and not summary.problem else _reads_rows(first)
    source, sink = (report(name) or (getattr(first, name) if first else "") or None for name in ("source", "sink"))
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
        "reads_rows": reads_rows,
        "source": source,
        "source_name": format_endpoint(source, first.source if first else ""),
        "sink": sink,
        "sink_name": format_endpoint(_find_published_uri(sink, report("published")), first.sink if first else ""),
        "guarantee": report("guarantee") or None,
        "lag_records": lag.count_records() if lag else None,
        "lag_seconds": measured.seconds if measured and lag else None,
        "lag_age": round(now - measured.at, 1) if measured else None,
        "log_bytes_behind": report("source_bytes_behind"),
        "source_progress": report("source_progress"),
        "rate": report("rate"),
        "last_window": _describe_last_window(summary.last) if summary and summary.last else None,
        "running": _describe_running(item, airflow, now) if activity in ("running", "conflict") else None,
        "failure": _describe_failure(item, airflow) if activity == "failed" else None,
        "may_edit": access.may_edit(item.dag_ids),
        "actions": _list_actions(item),
        "is_paused": pause is not None,
        "pause": {"who": pause.who, "why": pause.why, "at": pause.at} if pause else None,
        "dag_paused": any(airflow.paused.get(dag) for dag in item.dag_ids),
        "intervals": bool(summary and summary.has_intervals),
    }


def _reads_rows(task: PipelineTask | None) -> bool:
    """Return True if the DAG file says that a task reads rows of a source, and no topics."""
    return task is not None and not task.topics and bool(task.source) and not task.source.startswith("kafka://")


def _find_published_uri(sink: str | None, published: Sequence[Mapping[str, Any]] | None) -> str | None:
    """Return the URI of a sink; for one whose rows name their topics (``*``), those of the last window's topics if it had any."""
    if not sink or not sink.endswith("/*") or not published:
        return sink
    return ", ".join(f"{sink[:-1]}{quote(topic, safe='')}" for topic in dict.fromkeys(part["topic"] for part in published))


def _find_status(item: PipelineItem) -> tuple[str, str]:
    """Return the status of a pipeline, and the reason. Without its ledger, the last status holds for a minute."""
    status, reason = _find_last_status(item)
    if status == "UNKNOWN" or item.outage is None or item.outage < OUTAGE_SECONDS:
        return status, reason
    why = f" ({reason})" if reason else ""
    return "UNKNOWN", f"its ledger cannot be reached; when it was last read, the status was {status}{why}"


def _find_last_status(item: PipelineItem) -> tuple[str, str]:
    if item.summary is None:
        return "UNKNOWN", "it has not moved a window yet" if item.is_read else "its ledger has not been read"
    return find_status(item.summary, item.measured, item.verdict)


def _find_activity(item: PipelineItem, airflow: AirflowState) -> tuple[str, str]:
    """Return the activity of a pipeline, and the reason if it needs attention."""
    summary = item.summary
    if summary is None:
        if _is_paused(item, airflow):
            return "paused", ""
        failed = _find_failure_before_window(item, airflow)
        return ("failed", _explain(failed)) if failed else ("new" if item.is_read else "unknown", "")
    states = {task: found for task in item.running_tasks if (found := airflow.states.get(task))}
    running = [task for task, found in states.items() if found.state in RUNNING]
    entry = summary.open
    if entry is not None and running:
        planner, worker = TaskInstanceKey.parse(entry.window.run), TaskInstanceKey.parse(entry.attempt.run)
        if planner != worker and {planner, worker} <= set(running):
            return "conflict", f"two runs work on window {get_entry_name(entry)}: {entry.window.run} and {entry.attempt.run}"
        return "running", ""
    if _is_paused(item, airflow):
        return "paused", ""
    if entry is not None:
        worker = TaskInstanceKey.parse(entry.attempt.run)
        found = states.get(worker) if worker else None
        ended = found is None or found.state in FAILED or found.state in ("success", "skipped", "removed", None)
        if ended:
            state = f"its task is {found.state}" if found and found.state else "Airflow no longer has its task instance"
            return "failed", f"window {get_entry_name(entry)} is open, and {state}"
    if entry is None and (failed := _find_failure_before_window(item, airflow)):
        return "failed", _explain(failed)
    return ("new" if summary.last is None and entry is None and not summary.problem else "idle"), ""


def _explain(failed: FailedTask) -> str:
    retried = ", and waits for its retry" if failed.state == "up_for_retry" else ""
    return f"its task failed before it planned a window{retried}"


def _find_failure_before_window(item: PipelineItem, airflow: AirflowState) -> FailedTask | None:
    """Return the last task instance of a pipeline, if it failed before it planned a window: after the last complete one."""
    last, newest = item.summary.last if item.summary else None, _find_last_failure(item, airflow)
    return newest if newest and (last is None or newest.ended_at > parse_completion_time(last)) else None


def _find_failure_since(item: PipelineItem, airflow: AirflowState, entry: WindowEntry) -> FailedTask | None:
    """Return the last task instance of a pipeline, if it is of another run and began after the last attempt at an open window.

    A run of another data interval has another window.
    """
    newest = _find_last_failure(item, airflow)
    if newest is None or entry.window.interval or newest.key == TaskInstanceKey.parse(entry.attempt.run):
        return None
    return newest if (newest.started_at or newest.ended_at) > parse_start_time(entry) else None


def _find_last_failure(item: PipelineItem, airflow: AirflowState) -> FailedTask | None:
    found = [failed for task in item.tasks if (failed := airflow.failed.get((task.dag_id, task.task_id)))]
    return max(found, key=lambda failed: failed.ended_at, default=None)


def _describe_failure(item: PipelineItem, airflow: AirflowState) -> JsonObject | None:
    """Return the last attempt of a failed pipeline, with its error and the task instance that has the log.

    A run that failed before it took an open window over, as one with another destination, comes after the window's last attempt.
    """
    entry = item.summary.open if item.summary else None
    later = _find_failure_since(item, airflow, entry) if entry is not None else None
    if entry is not None and later is None:
        task, attempt = TaskInstanceKey.parse(entry.attempt.run), entry.attempt
        found = airflow.states.get(task) if task else None
        # An error of an earlier attempt at the same task instance does not explain the end of this one.
        error = found.error if found and found.error and found.error.at >= parse_start_time(entry) else None
        facts = {"name": get_entry_name(entry), "number": entry.window.number, "attempt": attempt.number}
        facts |= {"started_at": attempt.started_at, "run": attempt.run, "task_state": found.state if found else None}
        # A run that was deleted has no page.
        task = task if found else None
    elif failed := later or _find_failure_before_window(item, airflow):
        task, error = failed.key, failed.error
        if error and failed.started_at and error.at < failed.started_at:
            error = None
        run = "/".join(map(str, task if task.map_index >= 0 else task[:3]))
        facts = {
            "name": get_entry_name(entry) if entry else None,
            "number": entry.window.number if entry else None,
            "attempt": None,
        }
        facts |= {"started_at": failed.started_at or failed.ended_at, "run": run, "task_state": failed.state}
    else:
        return None
    return {
        **facts,
        "error": _convert_error(error) if error else None,
        "url": task.url if task and task.dag_id in airflow.paused else None,
    }


def _convert_error(error: TaskError) -> JsonObject:
    return {"class": error.name, "message": redact_text(error.message), "at": error.at}


def _list_actions(item: PipelineItem) -> list[str]:
    """Return the actions that this kind of pipeline allows. The others would be refused with any arguments."""
    summary = item.summary
    if summary is None or summary.problem:
        return []
    found = ["resume" if summary.pause else "pause"]
    if not summary.has_source:
        found += ["replay", "resend"]
    if not summary.has_intervals and (summary.open or not summary.has_source):
        found.append("skip")
    if not summary.has_intervals and not summary.has_source:
        found.append("reset")
    return found


def _is_paused(item: PipelineItem, airflow: AirflowState) -> bool:
    by_hand = item.summary is not None and item.summary.pause is not None
    return by_hand or any(airflow.paused.get(dag) for dag in item.dag_ids)


def _describe_last_window(entry: WindowEntry) -> JsonObject:
    report = entry.report or {}
    return {
        "number": entry.window.number,
        "name": get_entry_name(entry),
        "completed_at": report.get("completed_at"),
        "records_read": report.get("records_read"),
        "seconds": (report.get("timings") or {}).get("total"),
    }


def _describe_running(item: PipelineItem, airflow: AirflowState, now: float) -> JsonObject | None:
    entry = item.summary.open if item.summary else None
    if entry is None:
        return None
    task = TaskInstanceKey.parse(entry.attempt.run)
    state = airflow.states.get(task) if task else None
    return {
        "number": entry.window.number,
        "name": get_entry_name(entry),
        "dag_id": task.dag_id if task else None,
        "run_id": task.run_id if task else None,
        "task_id": task.task_id if task else None,
        "map_index": task.map_index if task else -1,
        "started_at": entry.attempt.started_at,
        "attempt": entry.attempt.number,
        **_describe_progress(entry, state, now),
    }


def _describe_progress(entry: WindowEntry, state: TaskInstanceState | None, now: float) -> JsonObject:
    """Return the progress of an open window. A task's report is used only if it is valid, and belongs to this window."""
    reported = state.progress if state and state.progress else {}
    if reported.get("window") != entry.window.number:
        reported = {}
    total = (
        _parse_number(reported.get("records_total"))
        or entry.window.span
        or (entry.window.source.rows if entry.window.source else None)
    )
    done, splits, finished = (_parse_number(reported.get(name)) for name in ("records_done", "splits", "splits_done"))
    fraction = finished / splits if splits and finished is not None else done / total if total and done is not None else None
    fraction = None if fraction is None else min(max(fraction, 0.0), 1.0)
    elapsed = now - began if (began := _parse_number(reported.get("started_at"))) else None
    remaining = elapsed * (1 - fraction) / fraction if elapsed and elapsed > 0 and fraction else None
    return {
        "records_total": int(total) if total else None,
        "records_done": int(done) if done is not None else None,
        "fraction": None if fraction is None else round(fraction, 4),
        "remaining_seconds": None if remaining is None else round(remaining, 1),
        "step": reported.get("step") if reported.get("step") in ("plan", "move", "commit", "close") else None,
    }


def _parse_number(value: object) -> float | None:
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e18 else None


def find_task_configuration(item: PipelineItem) -> JsonObject:
    """Return the configuration of the pipeline's task, empty if unknown; ``of_run`` is True if its last run has stored it."""
    for text, of_run in [*((task.configuration, False) for task in item.tasks), (item.stored_configuration, True)]:
        try:
            found = json.loads(text) if text else None
        except ValueError:
            continue
        if isinstance(found, dict) and found:
            return {**found, "of_run": of_run}
    return {}


def find_browsable_topics(item: PipelineItem) -> dict[str, TopicFormats]:
    """Return the topics of a pipeline whose records its page shows, with their formats."""
    summary, published = item.summary, item.summary.get_report_value("published") if item.summary else None
    read = [*(summary.topics if summary else ()), *(topic for task in item.tasks for topic in task.topics)]
    written = [part["topic"] for part in published or ()]
    known = find_topic_formats(find_task_configuration(item), list(dict.fromkeys(read)))
    return {**{topic: TopicFormats() for topic in written if topic not in known}, **known}


# --- the list -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ListQuery:
    """Filter, order and page of the list.

    :param q: parts of names (pipeline, DAG, task, topic, group, source, sink, ledger), separated by blanks. All must occur.
    :param status: statuses or activities, separated by commas. Default: all.
    :param dag_id: DAG of the pipelines. Default: any.
    :param task_id: task of the pipelines. Default: any.
    :param sort: one of :data:`SORTS`, with ``-`` before it in descending order.
    :param limit: number of rows, 500 at most.
    :param offset: number of rows before the page.
    """

    q: str = ""
    status: str = ""
    dag_id: str = ""
    task_id: str = ""
    sort: str = "pipeline"
    limit: int = 50
    offset: int = 0


def is_of_task(item: PipelineItem, query: ListQuery) -> bool:
    """Return True if the pipeline belongs to the DAG and the task of the query."""
    if query.dag_id and query.dag_id not in item.dag_ids:
        return False
    tasks = {task.task_id for task in item.tasks} or {item.task[1] or ""}
    return not query.task_id or query.task_id in tasks


def list_page(rows: Iterable[JsonObject], query: ListQuery) -> JsonObject:
    """Return a page of the list, and counts by status and activity of all rows that match ``query.q``."""
    words = query.q.casefold().split()
    found = [r for r in rows if all(word in _make_search_text(r) for word in words)]
    counts, activities = Counter(r["status"] for r in found), Counter(r["activity"] for r in found)
    wanted = {name.strip().casefold() for name in query.status.split(",") if name.strip()}
    if wanted:
        found = [r for r in found if r["status"].casefold() in wanted or r["activity"] in wanted]
    found = _sort_rows(found, query.sort)
    begin, limit = max(query.offset, 0), min(max(query.limit, 1), 500)
    return {
        "pipelines": found[begin : begin + limit],
        "total": len(found),
        "counts": {status: counts.get(status, 0) for status in STATUSES},
        "activities": {activity: activities.get(activity, 0) for activity in ACTIVITIES},
    }


def _make_search_text(row: Mapping[str, Any]) -> str:
    fields = ("pipeline", "dag_id", "task_id", "group", "source", "sink", "ledger")
    return " ".join([*(str(row[name] or "") for name in fields), *row["topics"]]).casefold()


_WORST_FIRST = {status: -rank for rank, status in enumerate(("UNKNOWN", "OK", "WARN", "STALL", "STOP", "REWIND"))}
_BUSY_FIRST = {
    activity: rank for rank, activity in enumerate(("conflict", "failed", "running", "paused", "unknown", "new", "idle"))
}
_KEYS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "pipeline": lambda r: r["pipeline"].casefold(),
    "ledger": lambda r: r["ledger"],
    "dag_id": lambda r: r["dag_id"],
    # Pipelines that need attention come first, independent of their lag.
    "status": lambda r: (r["activity"] not in ("conflict", "failed"), _WORST_FIRST[r["status"]]),
    "activity": lambda r: _BUSY_FIRST[r["activity"]],
    "lag": lambda r: r["lag_records"],
    "lag_records": lambda r: r["lag_records"],
    "lag_seconds": lambda r: r["lag_seconds"],
    "rate": lambda r: r["rate"],
    "last_window": lambda r: r["last_window"] and r["last_window"]["completed_at"],
}


def _sort_rows(rows: list[JsonObject], sort: str) -> list[JsonObject]:
    """Return the rows in the order of the query, equal rows by name. Unknown values come last in both directions."""
    backwards, name = sort.startswith("-"), sort.lstrip("-")
    key = _KEYS.get(name, _KEYS["pipeline"])
    by_name = sorted(rows, key=lambda r: (r["pipeline"].casefold(), r["ledger"]))
    known = [r for r in by_name if key(r) is not None]
    return [*sorted(known, key=key, reverse=backwards), *(r for r in by_name if key(r) is None)]


def describe_ledger(watch: LedgerWatch, pipelines: int, now: float) -> JsonObject:
    """Return a ledger as the pages show it.

    :param pipelines: number of its pipelines that the user may see.
    :param now: seconds since the epoch.
    """
    state, message = watch.state
    age = watch.compute_age(now)
    return {
        "ledger": str(watch.name),
        "connection": watch.name.connection,
        "topic": watch.name.topic,
        "state": state,
        "message": redact_text(message) if message else None,
        "age": None if age is None else round(age, 1),
        "pipelines": pipelines,
    }


# --- one pipeline -------------------------------------------------------------------------------------------------------

SERIES = 100
"""Maximum number of windows that the charts show, the newest ones."""
MAX_RANGES = 1_000
"""Maximum number of offset ranges of a window that are listed."""


class WindowView:
    """A window of a pipeline, with its dead letters."""

    def __init__(self, entry: WindowEntry, dead: DeadLetters | None) -> None:
        self.entry, self.dead = entry, dead
        self.name = get_entry_name(entry)
        self.task = TaskInstanceKey.parse(entry.window.run)

    @property
    def landed(self) -> tuple[Landed, ...]:
        """The topics of its dead letters, with their offsets."""
        return find_dead_letters(self.dead, self.report)

    @property
    def elsewhere(self) -> list[JsonObject]:
        """The topics and sinks to which transforms routed records, with the number of records."""
        counts: dict[str, int] = {}
        for part in self.report.get("routed") or ():
            counts[part["topic"]] = counts.get(part["topic"], 0) + part["records"]
        for part in self.report.get("captured") or ():
            counts[part["sink"]] = counts.get(part["sink"], 0) + part["records"]
        return [{"to": name, "records": records} for name, records in sorted(counts.items())]

    @property
    def report(self) -> Mapping[str, Any]:
        """Its report; empty while the window is not complete."""
        return (self.entry.report or {}) if self.entry.state is State.COMPLETE else {}

    @property
    def order(self) -> tuple[int, int | str]:
        """The sort key: progress windows by number, and before all of them data intervals by time."""
        return (1, self.entry.window.number) if self.name == str(self.entry.window.number) else (0, self.name)

    def is_of(self, run_id: str, task_id: str, map_index: int | None) -> bool:
        """Return True if this run and task planned the window; "" and None match any."""
        mine = self.task
        return mine is not None and (
            (not run_id or mine.run_id == run_id)
            and (not task_id or mine.task_id == task_id)
            and (map_index is None or mine.map_index == map_index)
        )


def list_stored_windows(snapshot: PipelineSnapshot) -> list[WindowView]:
    """Return the stored windows of a pipeline, the newest first.

    :raises ValueError: a record cannot be decoded.
    """
    memories: Iterable[Memory] = [
        snapshot.decode_memory(),
        *(snapshot.get_interval_memory(name) for name in snapshot.interval_names),
    ]
    found = [WindowView(entry, memory.dead.get(number)) for memory in memories for number, entry in memory.entries.items()]
    return sorted(found, key=lambda w: w.order, reverse=True)


def list_windows_before(windows: Sequence[WindowView], cursor: str) -> list[WindowView]:
    """Return the windows that follow ``cursor``, the number or the interval of a window; all of them if it is empty."""
    if not cursor:
        return list(windows)
    limit = (1, int(cursor)) if cursor.isdecimal() else (0, cursor)
    return [w for w in windows if w.order < limit]


def make_window_json(view: WindowView, airflow: AirflowState) -> JsonObject:
    """Return a window as the pages show it."""
    entry, window = view.entry, view.entry.window
    complete = entry.state is State.COMPLETE
    report = view.report
    timings = report.get("timings") or {}
    task = view.task
    state = airflow.states.get(task) if task else None
    gaps = report.get("gaps") if complete else [vars(gap) for gap in window.gaps]
    return {
        "number": window.number,
        "name": view.name,
        "replay": window.replay,
        "state": entry.state.value,
        "interval": [format_instant(window.interval[0]), format_instant(window.interval[1])] if window.interval else None,
        "ranges": [
            {"topic": r.topic, "partition": r.partition, "start": r.start, "end": r.end} for r in window.ranges[:MAX_RANGES]
        ],
        "splits": len(window.source.splits) if window.source else None,
        "records_read": report.get("records_read"),
        "records_written": report.get("records_written"),
        "records_deleted": report.get("records_deleted"),
        "records_rejected": report.get("records_rejected"),
        "records_filtered": report.get("records_filtered", 0) if complete else None,
        "records_routed": report.get("records_routed", 0) if complete else None,
        "routed": view.elsewhere,
        "records_out_of_interval": report.get("records_out_of_interval", 0) if complete and window.interval else None,
        "out_of_interval_seconds": report.get("out_of_interval_seconds"),
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
            for p in view.landed
        ],
        "task_state": state.state if state else None,
        # Another Airflow may have moved the window: its DAGs have no page here. Nor has a run that was deleted.
        "url": task.url if task and state and task.dag_id in airflow.paused else None,
    }


def describe_partitions(measured: LagMeasurement | None, position: Mapping[TopicPartition, int]) -> list[JsonObject]:
    """Return the position of a pipeline in each partition."""
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


def describe_change(found: Change) -> JsonObject:
    """Return a manual change."""
    offsets = {name: [[*tp, offset] for tp, offset in sorted(getattr(found, name).items())] for name in ("before", "after")}
    facts = {name: getattr(found, name) for name in ("number", "action", "who", "why", "at", "window", "name")}
    return {**facts, **offsets, "discarded": list(found.discarded)}


def count_dead_letters(windows: Iterable[WindowView]) -> JsonObject:
    """Return the number of dead letters, in all and by window."""
    counts = [
        {
            "number": w.entry.window.number,
            "name": w.name,
            "records": sum(part.records for part in landed),
            "topic": w.dead.topic if w.dead and w.dead.topic else landed[0].topic,
        }
        for w in windows
        if (landed := w.landed)
    ]
    return {"total": sum(count["records"] for count in counts), "windows": counts}


def make_series(windows: Iterable[WindowView], samples: Iterable[tuple[float, int, float | None]]) -> JsonObject:
    """Return the points of the charts, the oldest first; of data intervals in the order of the intervals."""
    complete = [w for w in windows if w.entry.state is State.COMPLETE and w.entry.report]
    newest = sorted(complete, key=lambda w: parse_completion_time(w.entry))[-SERIES:]
    newest.sort(key=lambda w: w.entry.window.interval or (0, 0))
    lag = [{"at": round(at, 1), "records": records, "seconds": seconds} for at, records, seconds in samples]
    return {"windows": [_make_point(w) for w in newest], "lag": lag}


def _make_point(view: WindowView) -> JsonObject:
    report = view.report
    latency = report.get("latency") or {}
    published = report.get("published")
    return {
        "number": view.entry.window.number,
        "name": view.name,
        "completed_at": report.get("completed_at"),
        "published": _count_upstream(report) if published is None else sum(p.get("records", 0) for p in published),
        "read": report.get("records_read"),
        "written": report.get("records_written"),
        "rejected": report.get("records_rejected"),
        "bytes": report.get("bytes"),
        "gaps": sum(gap["end"] - gap["start"] for gap in report.get("gaps") or ()),
        "p50": latency.get("p50"),
        "p95": latency.get("p95"),
        "timings": report.get("timings") or {},
    }


def _count_upstream(report: Mapping[str, Any]) -> int | None:
    """Return the number of records that upstream pipelines or producers report for a window; None if they report none."""
    follows, consumption = report.get("follows") or {}, report.get("consumption") or {}
    if follows.get("records") is not None:
        return int(follows["records"])
    buckets = [bucket[2] for bucket in consumption.get("buckets") or () if len(bucket) > 2]
    return sum(buckets) if buckets else None


# --- windows as CSV ---------------------------------------------------------------------------------------------------

CSV_FACTS = (
    "records_read",
    "records_written",
    "records_deleted",
    "records_rejected",
    "records_filtered",
    "records_routed",
    "records_out_of_interval",
    "out_of_interval_seconds",
    "bytes",
    "rate",
)
"""Names of the facts of a report that have a column in the CSV file of windows."""
_CSV_LATENCY = ("min", "p50", "p95", "max")


def format_windows_as_csv(windows: Iterable[WindowView]) -> str:
    """Return windows as CSV (RFC 4180, UTF-8) with a header, the newest first. Instants are UTC in ISO 8601.

    A text that a spreadsheet would take for a formula begins with an apostrophe.
    """
    found = list(windows)
    steps = list(dict.fromkeys(step for w in found for step in w.report.get("timings") or () if step != "total"))
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(
        [
            *("window", "interval_start", "interval_end", "state", "replay", "attempts", "planned_at", "completed_at"),
            *CSV_FACTS,
            *(f"latency_{name}_seconds" for name in _CSV_LATENCY),
            *(f"{step}_seconds" for step in steps),
            *("total_seconds", "dead_letters", "guarantee", "run", "offsets"),
        ]
    )
    writer.writerows([_format_csv_cell(value) for value in _make_csv_row(w, steps)] for w in found)
    return out.getvalue()


def _make_csv_row(w: WindowView, steps: Iterable[str]) -> list[object]:
    window, report = w.entry.window, w.report
    latency, timings = report.get("latency") or {}, report.get("timings") or {}
    interval = [format_instant(instant) for instant in window.interval] if window.interval else ["", ""]
    optional = 0 if w.entry.state is State.COMPLETE else None
    ranges = "; ".join(f"{r.topic}-{r.partition} [{r.start}, {r.end})" for r in window.ranges)
    facts = [report.get(name, optional if name.startswith("records_") else None) for name in CSV_FACTS]
    return [
        *(w.name, *interval, w.entry.state.value, window.replay, w.entry.attempt.number),
        *(window.planned_at, report.get("completed_at")),
        *facts,
        *(latency.get(name) for name in _CSV_LATENCY),
        *(timings.get(step) for step in steps),
        *(timings.get("total"), sum(part.records for part in w.landed), report.get("guarantee"), window.run, ranges),
    ]


def _format_csv_cell(value: object) -> object:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


# --- the view of one user -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UserView:
    """Current data, as far as one user may see it. Its methods answer the queries of the pages.

    :param watcher: the data of the ledgers.
    :param session: session of Airflow's database.
    :param access: permissions of the user.
    :param paused: for every DAG, True if it is paused.
    """

    watcher: Watcher
    session: Session
    access: Access
    paused: dict[str, bool]

    @classmethod
    def of(cls, user: BaseUser, session: Session, watcher: Watcher) -> UserView:
        """Return the view of a user.

        :raises RequestRefused: 403 if the user may see no pipeline.
        """
        paused = read_paused_dags(session)
        access = find_access(user, paused)
        watcher.request_received()
        return cls(watcher, session, access, paused)

    def release(self) -> None:
        """Return the database connection to the pool before a request to Kafka, which may take long."""
        self.session.commit()

    # --- all pipelines ---

    def list_items(self) -> list[PipelineItem]:
        """Return all pipelines that the user may see."""
        found = []
        tasks, now = dict(self.watcher.by_pipeline), time.time()
        for name, watch in self.watcher.ledgers.items():
            with watch.lock:
                outage = watch.compute_outage(now)
                for pipeline, summary in watch.summaries.items():
                    tracker = watch.lag_trackers.get(pipeline)
                    seen = (tracker.measured, tracker.verdict) if tracker else (None, None)
                    found.append(PipelineItem(name, pipeline, summary, *seen, tasks.pop((name, pipeline), ()), outage=outage))
        found += [
            PipelineItem(name, pipeline, tasks=named, is_read=self.watcher.ledgers[name].is_read)
            for (name, pipeline), named in tasks.items()
            if name in self.watcher.ledgers
        ]
        return [item for item in found if self.access.may_see(item.dag_ids)]

    def make_listing(self, query: ListQuery, run_id: str = "") -> JsonObject:
        """Return the page of all pipelines.

        :param run_id: only pipelines with windows that this run planned. Default: any run.
        """
        items = self.list_items()
        wanted = [item for item in items if is_of_task(item, query)]
        if run_id:
            wanted = [item for item in wanted if self._is_of_run(item, query, run_id)]
        airflow = self.read_airflow_state({task for item in wanted for task in item.running_tasks})
        now = time.time()
        answer = list_page([make_pipeline_row(item, airflow, self.access, now) for item in wanted], query)
        return {**answer, "ledgers": self.list_ledgers(items, now)}

    def list_ledgers(self, items: Iterable[PipelineItem], now: float) -> list[JsonObject]:
        """Return all ledgers, with the number of their pipelines among ``items``."""
        counts: dict[LedgerName, int] = {}
        for item in items:
            counts[item.ledger] = counts.get(item.ledger, 0) + 1
        return [describe_ledger(watch, counts.get(name, 0), now) for name, watch in self.watcher.ledgers.items()]

    def read_airflow_state(self, wanted: Iterable[TaskInstanceKey]) -> AirflowState:
        """Return the states of these task instances, and of all DAGs."""
        return AirflowState(read_task_states(self.session, list(wanted)), self.paused, self.watcher.catalog.failed)

    def _is_of_run(self, item: PipelineItem, query: ListQuery, run_id: str) -> bool:
        """Return True if a run planned windows of the pipeline. Searching the text of the records is faster than decoding."""
        watch = self.watcher.ledgers[item.ledger]
        begin = f"{query.dag_id or item.task[0]}/{run_id}/" + (query.task_id or "")
        needle = json.dumps(begin, ensure_ascii=False)[:-1].encode()
        with watch.lock:
            snapshot = watch.snapshot.pipelines.get(item.pipeline)
            return snapshot is not None and snapshot.mentions(needle)

    # --- one pipeline ---

    def find(self, ledger: str, pipeline: str) -> tuple[PipelineItem, LedgerWatch]:
        """Return a pipeline, and its ledger.

        :raises RequestRefused: 404 if the pipeline does not exist, or if the user may not see it, with the same message.
        """
        try:
            watch = self.watcher.ledgers.get(LedgerName.parse(ledger))
        except ValueError as error:
            raise RequestRefused(400, str(error).rstrip(".")) from None
        found = None
        if watch is not None:
            with watch.lock:
                summary, tracker = watch.summaries.get(pipeline), watch.lag_trackers.get(pipeline)
                seen = (tracker.measured, tracker.verdict) if tracker else (None, None)
                tasks = self.watcher.by_pipeline.get((watch.name, pipeline), ())
                outage = watch.compute_outage(time.time())
                found = PipelineItem(watch.name, pipeline, summary, *seen, tasks, is_read=watch.is_read, outage=outage)
        if watch is None or found is None or not (found.summary or found.tasks) or not self.access.may_see(found.dag_ids):
            raise RequestRefused(
                404, f"There is no pipeline `{pipeline}` in ledger `{ledger}` that you may see", action="See the list"
            )
        if not found.tasks and found.summary is not None and found.summary.owner is not None:
            found = replace(found, stored_configuration=read_configuration(self.session, found.summary.owner))
        return found, watch

    def make_detail(self, ledger: str, pipeline: str) -> JsonObject:
        """Return the page of a pipeline."""
        item, watch = self.find(ledger, pipeline)
        watch.mark_interest(pipeline)
        windows, snapshot, problem = self._list_windows(watch, pipeline)
        with watch.lock:
            memory = snapshot.decode_memory() if snapshot and not problem else None
            samples = list(watch.lag_trackers[pipeline].samples) if pipeline in watch.lag_trackers else []
        shown = windows[:50]
        airflow = self.read_airflow_state({*item.running_tasks, *(w.task for w in shown if w.task)})
        now = time.time()
        total, complete = snapshot.intervals if snapshot else (0, 0)
        is_unread = watch.compute_age(now) is None
        holes = find_missing_intervals(memory.intervals.spans) if memory else ()
        missing = [[format_instant(hole.start_ms), format_instant(hole.end_ms)] for hole in holes]
        return {
            "ledger": describe_ledger(watch, 1, now),
            "row": make_pipeline_row(item, airflow, self.access, now),
            "partitions": describe_partitions(item.measured, item.summary.read_position.offsets if item.summary else {}),
            "partitions_age": round(now - item.measured.at, 1) if item.measured else None,
            "windows": [make_window_json(w, airflow) for w in shown],
            "windows_total": snapshot.windows_total if snapshot else None if is_unread else 0,
            "windows_kept": len(windows),
            "changes": [describe_change(found) for found in memory.history] if memory else [],
            "intervals": {"total": total, "complete": complete, "missing": missing},
            "dead_letters": None if is_unread else count_dead_letters(windows),
            "series": make_series(windows, samples),
            "configuration": find_task_configuration(item),
            "topics": list(reversed(find_browsable_topics(item))),
        }

    def list_all_windows(self, ledger: str, pipeline: str) -> list[WindowView]:
        """Return all windows of a pipeline that the ledger holds, the newest first.

        :raises RequestRefused: 409 if the ledger cannot be read.
        """
        _, watch = self.find(ledger, pipeline)
        windows, _, problem = self._list_windows(watch, pipeline)
        if problem:
            raise RequestRefused(409, problem)
        return windows

    def list_windows(self, ledger: str, pipeline: str, before: str, limit: int, of: tuple[str, str, int | None]) -> JsonObject:
        """Return windows of a pipeline, the newest first.

        :param before: number or interval of a window; only windows that follow it in this order. "" for the newest ones.
        :param limit: number of windows, 200 at most.
        :param of: run, task and map index that planned the windows; "" and None match any.
        """
        _, watch = self.find(ledger, pipeline)
        windows, snapshot, problem = self._list_windows(watch, pipeline)
        if problem:
            raise RequestRefused(409, problem)
        mine = [w for w in windows if w.is_of(*of)] if any(part not in ("", None) for part in of) else windows
        shown = list_windows_before(mine, before)[: min(max(limit, 1), 200)]
        airflow = self.read_airflow_state({w.task for w in shown if w.task})
        total = len(mine) if mine is not windows else snapshot.windows_total if snapshot else 0
        return {"windows": [make_window_json(w, airflow) for w in shown], "total": total}

    @staticmethod
    def _list_windows(watch: LedgerWatch, pipeline: str) -> tuple[list[WindowView], PipelineSnapshot | None, str]:
        with watch.lock:
            snapshot = watch.snapshot.pipelines.get(pipeline)
            try:
                return (list_stored_windows(snapshot) if snapshot else []), snapshot, ""
            except (ValueError, KeyError, TypeError) as error:
                return [], snapshot, f"The ledger holds {error}"
