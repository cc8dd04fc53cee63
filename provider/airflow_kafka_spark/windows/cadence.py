"""The times at which a consumer is expected to run, and the time from which it counts as stopped.

Pure functions. Instants are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from typing import Protocol

PERIODS = 1.5
"""Periods of the schedule that a consumer may be silent: one, and half of one for a run that starts late or takes long."""
LATE_SECONDS = 60.0
"""A run by a timetable is not late before so many seconds are over, however short its period is."""
ENOUGH_GAPS = 2
"""Times between two windows that are needed to estimate how often a pipeline runs."""

_SCHEDULED = "scheduled__"
_UNSCHEDULED = ("manual__", "asset_triggered__", "dataset_triggered__", "operator_triggered__", "backfill__")


class Cadence(Protocol):
    """When the runs of a consumer are due."""

    def due_after(self, since: float) -> float | None:
        """Return when the first run behind ``since`` is due; None if no run is planned."""
        ...

    def deadline(self, since: float) -> float | None:
        """Return until when a consumer that was last active at ``since`` may be silent; None for ever."""
        ...


@dataclass(frozen=True)
class Periodic:
    """Runs that come once in a period, at no known instant.

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

    :param next_run: returns the first run behind an instant, or None.
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
    """Runs without a schedule, which come when they are triggered: none is ever missed."""

    def due_after(self, since: float) -> float | None:
        return None

    def deadline(self, since: float) -> float | None:
        return None


@dataclass(frozen=True)
class CompletedWindow:
    """The part of a window's ledger record that concerns the schedule.

    :param completed_at: when it was completed.
    :param run: the run that planned it, ``<dag_id>/<run_id>/<task_id>``.
    :param interval: its data interval in milliseconds since the epoch, if it has one.
    """

    completed_at: float
    run: str = ""
    interval: tuple[int, int] | None = None


def cadence_of_windows(windows: Iterable[CompletedWindow]) -> Cadence | None:
    """Return the cadence that the windows of a ledger tell, or None if they do not tell any.

    The speed of a catch-up is none. So the first that is known counts: the length of the data intervals; the time between the
    instants that scheduled runs are named after; the time between completions, if runs have names of another kind. Runs that
    were all triggered by hand or by assets have no cadence.

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
    """Return the longest time from one window of a pipeline to the next, in seconds; None if it has completed too few windows to
    tell.

    :param times: when it completed windows, ascending.
    """
    gaps = [after - before for before, after in pairwise(times)]
    return max(gaps) if len(gaps) >= ENOUGH_GAPS else None


def _run_id(run: str) -> str:
    """Return the run id in the name of a run; a run id may contain slashes, the other ids may not."""
    return run.partition("/")[2]


def _scheduled_at(run_id: str) -> float | None:
    """Return the instant after which Airflow has named a scheduled run; None for another run."""
    if not run_id.startswith(_SCHEDULED):
        return None
    text = run_id.removeprefix(_SCHEDULED).partition("/")[0]
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found.timestamp() if found.tzinfo else None
