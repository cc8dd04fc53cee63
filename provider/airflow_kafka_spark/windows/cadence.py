"""The times at which a consumer is expected to run, and the time after which it counts as stopped.

Pure functions. Instants are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from airflow_kafka_spark.windows.instants import parse_iso

PERIODS = 1.5
"""Number of periods of the schedule for which a consumer may be silent: one, and half of one because a run may start late or
take long."""
LATE_SECONDS = 60.0
"""Minimum delay in seconds after which a run of a timetable counts as late, however short its period is."""
MIN_GAPS = 2
"""Minimum number of gaps between windows from which the period of a pipeline is estimated."""

_SCHEDULED = "scheduled__"
_UNSCHEDULED = ("manual__", "asset_triggered__", "dataset_triggered__", "operator_triggered__", "backfill__")


class Cadence(Protocol):
    """The schedule of a consumer: the times at which its runs are due."""

    def due_after(self, since: float) -> float | None:
        """Return the time at which the first run after ``since`` is due; None if no run is planned."""
        ...

    def deadline(self, since: float) -> float | None:
        """Return the time until which a consumer that was last active at ``since`` may be silent; None for no limit."""
        ...


@dataclass(frozen=True)
class Periodic:
    """Runs that come once per period, at an unknown instant within it.

    :param period: seconds from one run to the next.
    """

    period: float

    def due_after(self, since: float) -> float | None:
        return since + self.period

    def deadline(self, since: float) -> float | None:
        return since + PERIODS * self.period


@dataclass(frozen=True)
class Timetabled:
    """Runs at the instants of a timetable. A run is late once half of the time to the next run is over.

    :param next_run: returns the first run after an instant, or None.
    """

    next_run: Callable[[float], float | None]

    def due_after(self, since: float) -> float | None:
        return self.next_run(since)

    def deadline(self, since: float) -> float | None:
        due = self.next_run(since)
        if due is None:
            return None
        following = self.next_run(due)
        gap = (due - since) if following is None else (following - due)
        return due + max(LATE_SECONDS, (PERIODS - 1) * gap)


@dataclass(frozen=True)
class Unscheduled:
    """Runs without a schedule, which start when they are triggered. None of them can be missed."""

    def due_after(self, since: float) -> float | None:
        return None

    def deadline(self, since: float) -> float | None:
        return None


@dataclass(frozen=True)
class CompletedWindow:
    """The facts of a window's ledger record from which a schedule is derived.

    :param completed_at: time at which the window was completed.
    :param run: the run that planned it, ``<dag_id>/<run_id>/<task_id>``.
    :param interval: its data interval in milliseconds since the epoch; None without one.
    """

    completed_at: float
    run: str = ""
    interval: tuple[int, int] | None = None


def cadence_of_windows(windows: Iterable[CompletedWindow]) -> Cadence | None:
    """Return the cadence that can be derived from the windows of a ledger; None if there are too few.

    Windows that catch up follow each other faster than the schedule, so the time between completions is used last. The first
    value that is known counts: the length of the data intervals; the time between the instants in the ids of scheduled runs; the
    time between completions. Runs that were all triggered by hand or by assets have no cadence.

    :param windows: complete windows, in any order.
    """
    known = sorted(windows, key=lambda window: window.completed_at)
    lengths = [(window.interval[1] - window.interval[0]) / 1000 for window in known if window.interval]
    if lengths:
        return Periodic(max(lengths))
    named = [_run_id(window.run) for window in known]
    scheduled = sorted({at for run_id in named if (at := _scheduled_at(run_id)) is not None})
    if len(scheduled) > 1:
        return Periodic(max(after - before for before, after in pairwise(scheduled)))
    if scheduled:
        return None
    if named and all(run_id.startswith(_UNSCHEDULED) for run_id in named):
        return Unscheduled()
    period = usual_period([window.completed_at for window in known])
    return None if period is None else Periodic(period)


def usual_period(times: Sequence[float]) -> float | None:
    """Return the longest time between two successive windows of a pipeline, in seconds; None if there are fewer than
    :data:`MIN_GAPS` such times.

    :param times: completion times of its windows, ascending.
    """
    gaps = [after - before for before, after in pairwise(times)]
    return max(gaps) if len(gaps) >= MIN_GAPS else None


def _run_id(run: str) -> str:
    """Return the run id in the name of a run. Only the run id may contain slashes."""
    return run.partition("/")[2]


def _scheduled_at(run_id: str) -> float | None:
    """Return the instant in the id of a scheduled run; None for any other run."""
    if not run_id.startswith(_SCHEDULED):
        return None
    text = run_id.removeprefix(_SCHEDULED).partition("/")[0]
    try:
        found = parse_iso(text)
    except ValueError:
        return None
    return found.timestamp() if found.tzinfo else None
