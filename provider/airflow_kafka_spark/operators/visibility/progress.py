"""How far a task's window is, where others can see it: in Airflow's task state store, while the task runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from airflow_kafka_spark.windows.interval import Interval

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from airflow_kafka_spark.windows.model import Window

log = logging.getLogger(__name__)

KEY = "kafka_spark.progress"
"""Of the task state store."""

PAUSE_SECONDS = 30.0
"""For so long a store is left alone that has just failed."""

Step = Literal["plan", "move", "commit", "close"]


class Progress:
    """Tells the task state store of Airflow 3.3 and later how far a window is: at each step, and about every two seconds while
    its Spark job runs. An older Airflow has no store, and nothing is told.

    Guarantee: a store that fails never fails the window; it is left alone for half a minute.

    It is a :class:`~airflow_kafka_spark.road.watch.Follower` of the window's job. That calls from a thread of its own, while the
    task's own thread waits for Spark; a task's channel to its supervisor has a lock besides.

    :param store: ``context["task_state_store"]``; None where there is none.
    :param on_session: is given the session of the job before that starts.
    """

    def __init__(self, store: Any = None, on_session: Callable[[SparkSession], None] | None = None) -> None:
        self._store = store
        self._on_session = on_session
        self._window: Window | None = None
        self._step: Step = "plan"
        self._splits = self._done = 0
        self._started_at = 0.0
        self._again = 0.0

    def begin(self, window: Window) -> None:
        """A window is planned, or taken up again."""
        self._window, self._step, self._started_at = window, "plan", time.time()
        self._splits, self._done = _splits(window), 0
        self._tell()

    def step(self, step: Step) -> None:
        """The window's next step begins."""
        self._step = step
        if step == "close":
            self._done = self._splits
        self._tell()

    # --- of its job ---

    def begun(self, session: SparkSession) -> None:
        if self._on_session is not None:
            self._on_session(session)

    def told(self, finished: int, tasks: int) -> None:
        # An attempt before this one may have published some of the splits: then the job has the others only.
        self._splits = max(self._splits, tasks)
        self._done = min(self._splits - tasks + finished, self._splits)
        self._tell()

    def done(self) -> None:
        self._done = self._splits
        self.step("commit")

    # --- the store ---

    def to_dict(self) -> dict[str, Any]:
        """As JSON: what the store is told.

        ``records_total`` is how many the window has at most; 0 where a source has not counted its rows. ``records_done`` is the
        share of them in splits that are finished.
        """
        window = self._window
        assert window is not None
        total = (window.source.rows or 0) if window.source else window.span
        all_done = self._step in ("commit", "close")
        return {
            "window": window.number,
            "name": window_name(window),
            "splits": self._splits,
            "splits_done": self._done,
            "records_total": total,
            "records_done": total if all_done else total * self._done // self._splits if self._splits else 0,
            "started_at": round(self._started_at, 3),
            "updated_at": round(time.time(), 3),
            "step": self._step,
        }

    def _tell(self) -> None:
        if self._store is None or self._window is None or time.monotonic() < self._again:
            return
        try:
            self._store.set(KEY, self.to_dict())
        except Exception as error:
            self._again = time.monotonic() + PAUSE_SECONDS
            log.warning("The progress of window %s was not told, which does it no harm: %s", self._window, error)


def window_name(window: Window) -> str:
    """What a window goes by on the pages: its number, or its data interval."""
    return Interval.of_ms(*window.interval).name if window.interval else str(window.number)


def store_of(context: Mapping[str, Any]) -> Any:
    """The task state store, None where Airflow has none (before 3.3)."""
    try:
        return context.get("task_state_store")
    except Exception:
        return None


def _splits(window: Window) -> int:
    """How many there are, as far as the window tells; else the job will: they depend on the sink."""
    if window.source is not None:
        return len(window.source.splits)
    return sum(1 for r in window.ranges if r.span) if window.target is not None else 0
