"""The metrics of a window (statsd, OpenTelemetry), and its progress while the task runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from airflow_kafka_spark.windows.interval import Interval
from airflow_kafka_spark.windows.times import compute_move_seconds

if TYPE_CHECKING:
    from pyspark import SparkContext

    from airflow_kafka_spark.hooks.task_state import TaskStateStore
    from airflow_kafka_spark.windows.model import Window
    from airflow_kafka_spark.windows.report import Report


log = logging.getLogger(__name__)

PREFIX = "kafka_spark.window."


def collect_metrics(report: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a report, given as JSON: name -> value."""
    found: dict[str, float] = {
        name: report[name]
        for name in ("records_read", "records_written", "records_deleted", "records_ignored", "records_rejected", "bytes", "rate")
    }
    optional = (
        "records_filtered",
        "records_routed",
        "records_removed",
        "records_out_of_interval",
        "out_of_interval_seconds",
        "source_bytes_behind",
    )
    found |= {name: report[name] for name in optional if name in report}
    found["attempts"] = report["attempts"]
    found |= {f"{step}_seconds": seconds for step, seconds in report["timings"].items()}
    found |= {f"latency_{name}_seconds": seconds for name, seconds in (report.get("latency") or {}).items()}
    consumption = report.get("consumption") or {}
    if "over" in consumption:
        found |= {"over_consumption": consumption["over"], "under_consumption": consumption["under"]}
    if (follows := report.get("follows")) is not None and follows["records"] is not None:
        missing = follows["records"] - report["records_read"]
        found |= {"over_consumption": max(-missing, 0), "under_consumption": max(missing, 0)}
    return found


def emit(report: Mapping[str, Any]) -> None:
    """Send the metrics of a report, each as a gauge tagged with its pipeline, and count the window. Never raises."""
    try:
        # Not `airflow.sdk.observability`, which Airflow 3.0 and 3.1 do not have.
        from airflow.providers.common.compat.sdk import Stats

        tags = {"pipeline": report["pipeline"]}
        for name, value in collect_metrics(report).items():
            Stats.gauge(f"{PREFIX}{name}", value, tags=tags)
        Stats.incr(f"{PREFIX}completed", tags=tags)
    except Exception as error:
        log.warning("The metrics of window %s of %s were not sent: %s", report.get("window"), report.get("pipeline"), error)


KEY = "kafka_spark.progress"
"""The key of the progress in the task state store."""

ERROR_KEY = "kafka_spark.error"
"""The key of the last error in the task state store."""

CONFIGURATION_KEY = "kafka_spark.configuration"
"""The key of the configuration in the task state store."""

ERROR_LINES, ERROR_CHARACTERS = 12, 1500
"""Maximum length of an error's message that is stored, in characters."""

PAUSE_SECONDS = 30.0
"""After a failure the store is not used for this time."""

Step = Literal["plan", "move", "commit", "close"]


class Progress:
    """Publishes the progress of a window in the task state store of Airflow 3.3 and later: at each step, and about every two
    seconds while its Spark job runs. An older Airflow has no store, and nothing is published.

    Guarantee: an error of the store never fails the window. After an error, the store is not used for half a minute.

    It is a :class:`~airflow_kafka_spark.jobs.watch.Follower` of the window's job. Its methods are called by a thread of the job,
    while the task's own thread waits for Spark. A task's channel to its supervisor has a lock.

    :param store: ``context["task_state_store"]``; None without one.
    :param on_job: called with the context of the job before that starts. A client of Spark Connect has none.
    """

    def __init__(self, store: TaskStateStore | None = None, on_job: Callable[[SparkContext], None] | None = None) -> None:
        self._store = store
        self._on_job = on_job
        self._window: Window | None = None
        self._step: Step = "plan"
        self._splits = self._done = 0
        self._started_at = 0.0
        self._move_began = 0.0
        self._job_began = 0.0
        self._jobs: list[tuple[float, float]] = []
        self._again = 0.0

    def begin(self, window: Window) -> None:
        """Begin a window that was planned now or by an earlier attempt."""
        self._window, self._step, self._started_at = window, "plan", time.time()
        self._splits, self._done = _count_splits(window), 0
        self._jobs = []
        self._publish()

    def begin_step(self, step: Step) -> None:
        """Begin the window's next step."""
        self._step = step
        if step == "move":
            self._move_began = time.time()
        if step == "close":
            self._done = self._splits
        self._publish()

    # --- called by the job ---

    def on_start(self, context: SparkContext | None) -> None:
        self._job_began = time.time()
        if self._on_job is not None and context is not None:
            self._on_job(context)

    def on_progress(self, finished: int, tasks: int) -> None:
        # An attempt before this one may have published some of the splits: then the job has the others only.
        self._splits = max(self._splits, tasks)
        self._done = min(self._splits - tasks + finished, self._splits)
        self._publish()

    def on_success(self) -> None:
        self._jobs.append((self._job_began, time.time()))
        self._done = self._splits
        self.begin_step("commit")

    def measure_parts_of_move(self, move: float, report: Report) -> dict[str, float]:
        """Return the seconds of the parts of the step ``move``.

        :param move: seconds of the whole step.
        :param report: the report of the window.
        """
        return compute_move_seconds(move, self._jobs, self._move_began, report.work, report.work_began)

    # --- the store ---

    def to_dict(self) -> dict[str, Any]:
        """Return the progress as JSON.

        ``records_total`` is the largest number of records that the window may have; 0 if a source has not counted its rows.
        ``records_done`` is the share of them in splits that are finished.
        """
        window = self._window
        assert window is not None
        total = (window.source.rows or 0) if window.source else window.span
        all_done = self._step in ("commit", "close")
        return {
            "window": window.number,
            "name": get_window_name(window),
            "splits": self._splits,
            "splits_done": self._done,
            "records_total": total,
            "records_done": total if all_done else total * self._done // self._splits if self._splits else 0,
            "started_at": round(self._started_at, 3),
            "updated_at": round(time.time(), 3),
            "step": self._step,
        }

    def publish_configuration(self, configuration: str) -> None:
        """Publish the configuration of the task, for the pages.

        :param configuration: the text of a JSON object.
        """
        if self._store is None:
            return
        try:
            self._store.set(CONFIGURATION_KEY, configuration)
        except Exception as failure:
            log.debug("The configuration of this task was not published for the pages: %s", failure)

    def publish_error(self, error: BaseException) -> None:
        """Publish the error that ends the attempt, for the pages: class, first lines of the message, and time."""
        if self._store is None:
            return
        try:
            self._store.set(ERROR_KEY, error_to_dict(error, time.time()))
        except Exception as failure:
            log.warning("The error of this attempt was not published for the pages: %s", failure)

    def _publish(self) -> None:
        if self._store is None or self._window is None or time.monotonic() < self._again:
            return
        try:
            self._store.set(KEY, self.to_dict())
        except Exception as error:
            self._again = time.monotonic() + PAUSE_SECONDS
            log.warning("The progress of window %s was not published, which does not affect the window: %s", self._window, error)


def error_to_dict(error: BaseException, at: float) -> dict[str, Any]:
    """Return an error as JSON.

    :param at: seconds since the epoch.
    """
    lines = str(error).strip().splitlines()
    text = "\n".join(lines[:ERROR_LINES])
    cut = len(lines) > ERROR_LINES or len(text) > ERROR_CHARACTERS
    return {"class": type(error).__name__, "message": text[:ERROR_CHARACTERS], "cut": cut, "at": round(at, 3)}


def get_window_name(window: Window) -> str:
    """Return the name of a window on the pages: its number, or its data interval."""
    return Interval.of_ms(*window.interval).name if window.interval else str(window.number)


def _count_splits(window: Window) -> int:
    """Return the number of splits; 0 if it depends on the sink, so that only the job knows it."""
    if window.source is not None:
        return len(window.source.splits)
    return sum(1 for r in window.ranges if r.span) if window.target is not None else 0
