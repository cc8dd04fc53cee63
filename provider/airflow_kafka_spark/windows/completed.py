"""The search for a complete window, for sensors that wait for one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from airflow_kafka_spark.windows.instants import parse_iso
from airflow_kafka_spark.windows.memory import Memory, WindowEntry
from airflow_kafka_spark.windows.model import State


@dataclass(frozen=True)
class WindowCriteria:
    """The criteria for a window that a sensor waits for. A window has to meet all that are given.

    :param run: the run that planned it, ``<dag_id>/<run_id>/<task_id>``. Runs of two DAGs match if their ids contain the same
        moment: ``scheduled__2026-01-01T00:00:00+00:00`` and ``manual__2026-01-01T00:00:00+00:00_x7Qa`` do.
    :param after: lower bound of its number, exclusive.
    :param since: lower bound of its completion time, inclusive, in seconds since the epoch.
    """

    run: str | None = None
    after: int | None = None
    since: float | None = None

    def __str__(self) -> str:
        parts = (
            f"planned by run {self.run}" if self.run else "",
            f"numbered above {self.after}" if self.after is not None else "",
            f"completed since {datetime.fromtimestamp(self.since, timezone.utc).isoformat()}" if self.since is not None else "",
        )
        return "a window " + " and ".join(part for part in parts if part)


@dataclass(frozen=True)
class Completed:
    """A complete window that meets the criteria.

    :param window: its number within the pipeline as text; for a window of a data interval, the name of the interval.
    :param run: the run that planned it.
    :param report: its report; empty if the ledger holds none for it.
    """

    window: str
    run: str
    report: Mapping[str, Any]


def find_completed(memory: Memory, wanted: WindowCriteria) -> Completed | None:
    """Return the newest complete window that matches, or None.

    :param memory: the pipeline's state in the ledger. Windows that it no longer contains are not found.
    """
    for entry in sorted(memory.entries.values(), key=lambda e: e.window.number, reverse=True):
        if entry.state is State.COMPLETE and entry.report is not None and _is_wanted(entry, wanted):
            return Completed(entry.window.id, entry.window.run, entry.report)
    if wanted.run and wanted.after is None and wanted.since is None:
        for name, state in memory.intervals.newest_first:
            if state.state is State.COMPLETE and is_same_run(state.run, wanted.run):
                return Completed(name, state.run, {})
    return None


def _is_wanted(entry: WindowEntry, wanted: WindowCriteria) -> bool:
    if wanted.run is not None and not is_same_run(entry.window.run, wanted.run):
        return False
    if wanted.after is not None and entry.window.number <= wanted.after:
        return False
    return wanted.since is None or _completed_at(entry) >= wanted.since


def _completed_at(entry: WindowEntry) -> float:
    text = str((entry.report or {}).get("completed_at") or "")
    return parse_iso(text).timestamp() if text else 0.0


_MOMENT = re.compile(r"\d{4}-\d\d-\d\dT[0-9:.]+(?:Z|[+-]\d\d:?\d\d)?")


def is_same_run(known: str, wanted: str) -> bool:
    """Return True if two names denote one run, or runs of two DAGs for the same moment."""
    if known == wanted:
        return True
    known_dag, known_run, known_task = _parts(known)
    dag, run, task = _parts(wanted)
    if (known_dag, known_task) != (dag, task):
        return False
    if known_run == run:
        return True
    moments = [_moment(text) for text in (known_run, run)]
    return None not in moments and moments[0] == moments[1]


def _parts(run: str) -> tuple[str, str, str]:
    """Return DAG, run id and task of a run's name. The task includes the map index. Only the run id may contain slashes."""
    dag, _, rest = run.partition("/")
    run_id, _, task = rest.rpartition("/")
    if task.isdecimal() and "/" in run_id:
        run_id, _, name = run_id.rpartition("/")
        task = f"{name}/{task}"
    return dag, run_id, task


def _moment(run_id: str) -> datetime | None:
    """Return the moment in the id of a run; None if the id contains none."""
    found = _MOMENT.search(run_id)
    try:
        moment = parse_iso(found.group()) if found else None
    except ValueError:
        return None
    return moment.replace(tzinfo=timezone.utc) if moment and moment.tzinfo is None else moment
