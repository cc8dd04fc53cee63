"""Airflow's counters of a task instance, and whether it was cleared between two of its tries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

MOST_RUNS = 8
"""Runs of one window whose counters are kept."""


@dataclass(frozen=True)
class Tries:
    """Airflow's counters of a task instance, as one of its tries found them.

    :param number: number of the try (``try_number``), from 1; 0 where it is not known.
    :param allowed: number of the last try that is followed by a retry if it fails (``max_tries``). A retry leaves it unchanged;
        clearing the task sets it to the number of the last try plus the task's ``retries``.
    :param clears: how often tasks of the DAG run were cleared (``clear_number``); -1 where that is not known.
    """

    number: int = 0
    allowed: int = 0
    clears: int = -1

    def cleared_since(self, known: Tries, retries: int) -> bool:
        """Return True if the task was cleared after an earlier try of it.

        Another ``max_tries`` than before means that it was. The same one means a retry, with one exception: ``retries`` was
        lowered before the clear, by as much as the clear added. Then the DAG run has counted a clear, and the tries that are
        allowed now began after the earlier try. A task that is cleared while it runs keeps its ``max_tries``: that is a retry.

        :param known: the earlier try.
        :param retries: of the task, as it is now.
        """
        if self.allowed != known.allowed:
            return True
        run_was_cleared = self.clears > known.clears or -1 in (self.clears, known.clears)
        return run_was_cleared and 0 < known.number <= self.allowed - retries < self.number


def with_tries(known: Mapping[str, Tries], run: str, tries: Tries, *, keep: str) -> dict[str, Tries]:
    """Return the counters of the runs that have worked on a window, the newest last: those of the last :data:`MOST_RUNS`.

    :param known: those of its earlier attempts.
    :param run: the run that works on it now.
    :param tries: Airflow's counters of that run's task.
    :param keep: the run that planned it, which is kept beside them.
    """
    others = {name: seen for name, seen in known.items() if name != run}
    newest = list(others)[1 - MOST_RUNS :]
    return {**{name: seen for name, seen in others.items() if name == keep or name in newest}, run: tries}


def tries_to_json(tries: Mapping[str, Tries]) -> dict[str, list[int]]:
    """Return the counters by run, as JSON."""
    return {run: [seen.number, seen.allowed, seen.clears] for run, seen in tries.items()}


def tries_from_json(value: Mapping[str, list[int]]) -> dict[str, Tries]:
    return {run: Tries(*counters) for run, counters in value.items()}
