"""A Spark job while it runs: what a person sees of it, how it is stopped, and how its end is told."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import KafkaSparkError, SparkJobFailed
from airflow_kafka_spark.windows.model import Split, Window

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from airflow_kafka_spark.hooks.spark import SparkHook

log = logging.getLogger(__name__)

PROGRESS_SECONDS = 10.0


@dataclass
class Watch:
    """Watches the Spark job of one window.

    :param spark: made the session.
    :param window: the window.
    :param tell: the log line for so many finished tasks after so many seconds.
    """

    spark: SparkHook
    window: Window
    tell: Callable[[int, float], str]
    _session: SparkSession | None = field(default=None, repr=False)

    @contextmanager
    def over(self, session: SparkSession) -> Iterator[None]:
        """While the job runs in here, its progress is logged and :meth:`cancel` reaches it."""
        self._session = session
        try:
            if self.spark.is_connect:
                yield
                return
            session.sparkContext.setJobGroup(self._group, f"window {self.window}", interruptOnCancel=True)
            done = threading.Event()
            watcher = threading.Thread(target=self._tell_progress, args=(session, done), daemon=True)
            watcher.start()
            try:
                yield
            finally:
                done.set()
                watcher.join()
        finally:
            self._session = None

    def cancel(self) -> None:
        """Make a running job fail, from another thread or a signal handler; without one, nothing happens."""
        session = self._session
        if session is None:
            return
        log.warning("Cancelling the Spark job of window %s", self.window)
        if self.spark.is_connect:
            session.interruptAll()
        else:
            session.sparkContext.cancelJobGroup(self._group)

    @property
    def _group(self) -> str:
        return f"airflow-kafka-spark {self.window}"

    def _tell_progress(self, session: SparkSession, done: threading.Event) -> None:
        tracker, started = session.sparkContext.statusTracker(), time.monotonic()
        while not done.wait(PROGRESS_SECONDS):
            jobs = filter(None, map(tracker.getJobInfo, tracker.getJobIdsForGroup(self._group)))
            stages = filter(None, (tracker.getStageInfo(stage) for job in jobs for stage in job.stageIds))
            log.info("%s", self.tell(sum(stage.numCompletedTasks for stage in stages), time.monotonic() - started))


def progress_line(window: Window, splits: Sequence[Split], finished: int, seconds: float) -> str:
    """How far a window is, for the log."""
    share = sum(s.range.span for s in splits) * finished / len(splits)
    rate = share / seconds if seconds else 0.0
    remaining = f", about {(window.span - share) / rate:,.0f} s to go" if rate else ""
    return (
        f"Window {window}: {finished} of {len(splits)} splits done after {seconds:.0f} s, about {share:,.0f} of at most "
        f"{window.span:,} records ({rate:,.0f}/s){remaining}"
    )


def collect(results: DataFrame, window: Window) -> list[str]:
    """Run the job: the column ``result`` of all its rows.

    :raises SparkJobFailed: when Spark gave up, or was told to.
    """
    try:
        return [row["result"] for row in results.collect()]
    except KafkaSparkError:
        raise
    except Exception as error:
        raise SparkJobFailed(str(window), _reason(error)) from error


def _reason(error: Exception) -> str:
    """The line of a Spark error that tells what happened; the whole of it stays in the log."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if not line.startswith(("at ", "File ", "Traceback", "...", "^"))]
    python = [line for line in causes if ".Error" in line or "Error:" in line or "Exception:" in line]
    return (python or causes or [type(error).__name__])[-1][:500]
