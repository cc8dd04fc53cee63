"""A running Spark job: report its progress, cancel it, and translate its errors."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from airflow_kafka_spark import errors
from airflow_kafka_spark.errors import ExecutorUnfit, KafkaSparkError, SparkJobFailed
from airflow_kafka_spark.errors.base import RETRY
from airflow_kafka_spark.errors.sinks import AFTER_REMEDY
from airflow_kafka_spark.hooks.databases import SESSION_ENDED, is_session_ended
from airflow_kafka_spark.hooks.kafka.client import find_missing_right_in_java
from airflow_kafka_spark.hooks.spark.health import call_driver, get_context
from airflow_kafka_spark.hooks.spark.tasks.executor_check import explain
from airflow_kafka_spark.jobs.stalls import SilenceReporter, StallReporter, find_stopped_processes, list_running_tasks
from airflow_kafka_spark.windows.model import Split, Window

if TYPE_CHECKING:
    from pyspark import RDD, SparkContext
    from pyspark.sql import DataFrame, SparkSession

    from airflow_kafka_spark.hooks.spark.hook import SparkHook
    from airflow_kafka_spark.jobs.tasks.read import Task

log = logging.getLogger(__name__)

_JDBC_ERROR = re.compile(r"java\.sql\.SQL|PSQLException")
_SQL_ERROR = re.compile(
    r"org\.apache\.spark\.Spark(?:Arithmetic|NumberFormat|DateTime|ArrayIndexOutOfBounds)Exception\b|SQLSTATE: 22"
)
# Spark quotes the user's SQL after its error, with a ruler of carets.
_QUOTED_SQL = re.compile(r"\n== SQL\b[^\n]*\n(.*?)\n\s*\^+", re.DOTALL)
_OUR_ERROR = re.compile(r"^airflow_kafka_spark\.errors\.\w+\.(\w+): (.+(?:\n  \S.*)*)", re.MULTILINE)
"""Pattern of the class and the message of an error that a task of this package has raised, with the samples below it."""
WORKER_EXITED = "Python worker exited unexpectedly"
"""A text in Spark's stack trace. The message of the error itself may be about a socket."""
_EXECUTOR_LOST = re.compile(r"\((\S+) executor (\S+)\): ExecutorLostFailure .*? Reason: ([^\n]+)")
_OUT_OF_HEAP = re.compile(r"code 52\b")
"""The exit code of an executor whose JVM ran out of memory."""
_KILLED = re.compile(r"code 137\b|exceeding (?:physical )?memory limits|OOMKilled")
PROGRESS_SECONDS = 10.0
"""Seconds between two lines in the log."""

POLL_SECONDS = 2.0
"""Seconds between two polls of a job; its follower is called after each of them."""

ANSWER_SECONDS = 10.0
"""Maximum number of seconds to wait for an answer of Spark's driver while an attempt ends. A stopped one never answers."""


class Follower(Protocol):
    """Receives the progress of a window's Spark job. Must not raise: an exception ends the window."""

    def on_start(self, context: SparkContext | None) -> None:
        """Called when a job is about to start. The context is None for a client of Spark Connect."""

    def on_progress(self, finished: int, tasks: int) -> None:
        """Called with the number of finished tasks, about every two seconds, from one thread beside the job's."""

    def on_success(self) -> None:
        """Called when a job has succeeded, with all of its tasks."""


_follower: ContextVar[Follower | None] = ContextVar("follower", default=None)


@contextmanager
def follow_jobs(follower: Follower) -> Iterator[None]:
    """Follow the jobs that this thread watches inside of this context."""
    token = _follower.set(follower)
    try:
        yield
    finally:
        _follower.reset(token)


@dataclass
class Watch:
    """Watches the Spark job of one window.

    :param spark: the hook that made the session.
    :param window: the window.
    :param line: returns the line for the log, of the number of finished tasks and the seconds since the job began.
    :param name_task: returns the name of a task of the job for users, by its number.
    """

    spark: SparkHook
    window: Window
    line: Callable[[int, float], str]
    name_task: Callable[[int], str]
    _spark: SparkContext | SparkSession | None = field(default=None, repr=False)
    _is_cancelled: bool = field(default=False, repr=False)

    @contextmanager
    def report_progress(self, spark: SparkContext | SparkSession) -> Iterator[None]:
        """Log and report the progress of the job that runs inside of this context, and let :meth:`cancel` reach it.

        :param spark: the context or the session of the job.
        :raises SparkJobFailed: the job was cancelled.
        """
        self._spark, follower, context = spark, _follower.get(), get_context(spark)
        try:
            if follower:
                follower.on_start(context)
            reporter = _ProgressReporter(self.line, follower)
            if context is None:
                watched = self._follow_by_handler(cast("SparkSession", spark), reporter)
            else:
                watched = self._follow_by_thread(context, reporter)
            with watched:
                yield
            if follower:
                follower.on_success()
        except Exception as error:
            if self._is_cancelled:
                raise SparkJobFailed(
                    str(self.window), "Airflow ended the task, and the job was cancelled", cancelled=True
                ) from error
            raise
        except BaseException:
            # Airflow's `execution_timeout` raises here, and calls `on_kill` only when this context is left.
            self.cancel()
            raise
        finally:
            self._spark = None

    @contextmanager
    def _follow_by_thread(self, context: SparkContext, reporter: _ProgressReporter) -> Iterator[None]:
        self.spark.begin_jobs(context, self._group, f"window {self.window}")
        # Spark still lists the jobs of an earlier attempt in a warm process. They are not part of this attempt's progress.
        earlier = frozenset(context.statusTracker().getJobIdsForGroup(self._group))
        done, driver = threading.Event(), SilenceReporter(self.window)
        watcher = threading.Thread(target=self._report_progress, args=(context, earlier, done, reporter, driver), daemon=True)
        watcher.start()
        threading.Thread(target=self._report_silence, args=(done, driver), daemon=True).start()
        try:
            yield
        finally:
            done.set()
            watcher.join(ANSWER_SECONDS)

    @contextmanager
    def _follow_by_handler(self, session: SparkSession, reporter: _ProgressReporter) -> Iterator[None]:
        """Follow the progress that the server reports by itself, about every two seconds, while its answer is awaited."""
        stalls = StallReporter(self.window, self.name_task)

        def handle(stages: Any, **_: object) -> None:
            known = list(stages or ())
            finished, tasks = sum(stage.num_completed_tasks for stage in known), sum(stage.num_tasks for stage in known)
            reporter(finished, tasks)
            # Only the server's own pages name the tasks that are running.
            stalls.check(finished, tasks, lambda: None, list)

        session.registerProgressHandler(handle)
        try:
            yield
        finally:
            session.removeProgressHandler(handle)

    def cancel(self) -> None:
        """Make a running job fail, from another thread or a signal handler; without one, nothing happens.

        The caller does not wait for a driver of Spark that does not answer: then nothing is cancelled.
        """
        spark = self._spark
        if spark is None or self._is_cancelled:
            return
        self._is_cancelled = True
        log.warning("Cancelling the Spark job of window %s", self.window)
        if not call_driver(partial(self._cancel, spark), ANSWER_SECONDS):
            log.warning("Spark's driver has not answered for %.0f s: the job was not cancelled", ANSWER_SECONDS)

    def _cancel(self, spark: SparkContext | SparkSession) -> None:
        try:
            if (context := get_context(spark)) is None:
                cast("SparkSession", spark).interruptAll()
            else:
                context.cancelJobGroup(self._group)
        except Exception as error:
            # A signal to the whole process group has ended the JVM, too.
            log.debug("Spark's driver cancels no job any more: %s", error)

    @property
    def _group(self) -> str:
        return f"airflow-kafka-spark {self.window}"

    def _report_silence(self, done: threading.Event, driver: SilenceReporter) -> None:
        while not done.wait(POLL_SECONDS):
            driver.check()

    def _report_progress(
        self,
        context: SparkContext,
        earlier: frozenset[int],
        done: threading.Event,
        reporter: _ProgressReporter,
        driver: SilenceReporter,
    ) -> None:
        try:
            self._poll_until(done, context, earlier, reporter, driver)
        except Exception as error:
            # The thread of the job reports what happened.
            log.debug("The job is no longer watched: %s", error)
            done.set()

    def _poll_until(
        self,
        done: threading.Event,
        context: SparkContext,
        earlier: frozenset[int],
        reporter: _ProgressReporter,
        driver: SilenceReporter,
    ) -> None:
        tracker, stalls = context.statusTracker(), StallReporter(self.window, self.name_task)
        while not done.wait(min(POLL_SECONDS, PROGRESS_SECONDS)):
            numbers = set(tracker.getJobIdsForGroup(self._group)) - earlier
            jobs = filter(None, map(tracker.getJobInfo, numbers))
            stages = [info for job in jobs for stage in job.stageIds if (info := tracker.getStageInfo(stage))]
            finished, tasks = sum(stage.numCompletedTasks for stage in stages), sum(stage.numTasks for stage in stages)
            reporter(finished, tasks)
            running = [stage for stage in stages if stage.numActiveTasks]
            stalls.check(finished, tasks, partial(list_running_tasks, context, running), partial(find_stopped_processes, context))
            driver.note_answer()


class _ProgressReporter:
    """Reports the progress of a job to its follower, and every :data:`PROGRESS_SECONDS` to the log."""

    def __init__(self, line: Callable[[int, float], str], follower: Follower | None) -> None:
        self._line, self._follower = line, follower
        self._begun = self._logged = time.monotonic()

    def __call__(self, finished: int, tasks: int) -> None:
        if self._follower and tasks:
            self._follower.on_progress(finished, tasks)
        now = time.monotonic()
        if now - self._logged >= PROGRESS_SECONDS:
            self._logged = now
            log.info("%s", self._line(finished, now - self._begun))


def name_split(split: Split) -> str:
    """Return the name of a split's task for users."""
    return f"split {split.index} ({split.range})"


def format_job_progress(window: Window, splits: Sequence[Split], finished: int, seconds: float) -> str:
    """Return the progress of a window as a line for the log."""
    share = sum(s.range.span for s in splits) * finished / len(splits)
    rate = share / seconds if seconds else 0.0
    remaining = f", about {(window.span - share) / rate:,.0f} s to go" if rate else ""
    return (
        f"Window {window}: {finished} of {len(splits)} splits done after {seconds:.0f} s, about {share:,.0f} of at most "
        f"{window.span:,} records ({rate:,.0f}/s){remaining}"
    )


def run_per_split(spark: SparkContext | SparkSession, task: Task, splits: int) -> RDD[str] | DataFrame:
    """Return the results of a job without SQL, whose tasks read one split each. Nothing runs before :func:`collect`.

    Where the driver runs here this is an RDD. The first use of Spark's SQL in a JVM takes two CPU seconds, and no SQL is needed
    to hand a number to a task. A client of Spark Connect has no RDDs.

    :param spark: a context or a session.
    :param task: takes the numbers of splits from the first column of batches, and returns batches with a column ``result``.
    :param splits: the number of splits.
    """
    from airflow_kafka_spark.jobs.tasks.read import EachSplit

    context, none = get_context(spark), list[int]()
    if context is None:
        return cast("SparkSession", spark).range(0, splits, 1, splits).mapInArrow(task, "result string")
    return context.parallelize(none, splits).mapPartitionsWithIndex(EachSplit(task))


def collect(results: RDD[str] | DataFrame, window: Window) -> list[str]:
    """Run the job and return the column ``result`` of all its rows, or the texts of an RDD.

    :raises SparkJobFailed: the job failed or was cancelled.
    :raises ExecutorUnfit: an executor lacks packages.
    :raises RightMissing: Spark's Kafka source may not read a topic.
    """
    try:
        return [row if isinstance(row, str) else row["result"] for row in _collect_interruptibly(results)]
    except KafkaSparkError:
        raise
    except Exception as error:
        if missing := find_missing_right_in_java(str(error), f"reading window {window}"):
            raise missing from error
        if unfit := explain(str(error)):
            raise ExecutorUnfit(str(window), unfit) from error
        raise SparkJobFailed(str(window), find_reason(error), retryable=is_retryable(error)) from error


def _collect_interruptibly(results: RDD[str] | DataFrame) -> list[Any]:
    """Return the rows of a job. An exception that a signal raises in this thread leaves the job at once.

    The job has a thread of its own. pyspark's own cleanup calls the JVM, and Py4J would let that call wait until the job of the
    same thread has ended. So an attempt that Airflow's ``execution_timeout`` interrupts would wait for a job that hangs.
    """
    if get_context(results.sparkSession if hasattr(results, "sparkSession") else results.context) is None:
        return results.collect()
    from pyspark import InheritableThread

    outcome: Future[list[Any]] = Future()

    def run() -> None:
        try:
            outcome.set_result(results.collect())
        except BaseException as error:  # raised again by result()
            outcome.set_exception(error)

    class JobThread(InheritableThread):
        def run(self) -> None:
            try:
                super().run()
            except BaseException as error:
                # The JVM has ended before `run` was called, or after it.
                if not outcome.done():
                    outcome.set_exception(error)

    JobThread(target=run, name="airflow-kafka-spark-job", daemon=True).start()
    return outcome.result()


def _is_session_ended(error: Exception) -> bool:
    return _JDBC_ERROR.search(str(error)) is not None and is_session_ended(str(error))


def _is_sql_error(error: Exception) -> bool:
    """Return True if an expression fails for a value, such as a division by 0."""
    from pyspark.errors import ArithmeticException, ArrayIndexOutOfBoundsException, DateTimeException, NumberFormatException

    of_values = ArithmeticException, ArrayIndexOutOfBoundsException, DateTimeException, NumberFormatException
    return isinstance(error, of_values) or _SQL_ERROR.search(str(error)) is not None


def is_retryable(error: Exception) -> bool:
    """Return False if a task of this package, or the user's SQL, has raised an error that a retry would raise again; True in all
    other cases.
    """
    if WORKER_EXITED in str(error) or _is_session_ended(error):
        return True  # the cause that `find_reason` names, not other parts of the trace
    if "[USER_RAISED_EXCEPTION]" in str(error):
        return False
    found = _OUR_ERROR.search(str(error))
    if found is None:
        return not _is_sql_error(error)
    return bool(getattr(getattr(errors, found[1], None), "retryable", True)) and AFTER_REMEDY not in found[2]


def find_reason(error: Exception) -> str:
    """Return the line of a Spark error that has the cause. The whole error stays in the log."""
    if WORKER_EXITED in str(error):
        return "a Python worker of Spark was killed or crashed while it worked on a split, perhaps because memory ran out"
    if _is_session_ended(error):
        return f"{SESSION_ENDED}, while Spark read a split"
    if lost := _EXECUTOR_LOST.search(str(error)):
        host, executor, reason = lost.groups()
        return f"executor {executor} on {host} ended: {reason[:300].rstrip('.')}{_explain_exit(reason)}"
    if ours := _OUR_ERROR.search(str(error)):
        # The action follows in the error of the job.
        return ours[2].strip().removesuffix(f" {RETRY}.")[:500]
    quoted = _QUOTED_SQL.search(str(error))
    text = re.sub(r"\n== SQL\b.*?\n\s*\^+|\n== DataFrame ==\n.*?was called from\n[^\n]*", "", str(error), flags=re.DOTALL)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.endswith("(most recent call last):")]
    causes = [line for line in lines if not line.startswith(("at ", "File ", "Traceback", "...", "^"))]
    python = [line for line in causes if ".Error" in line or "Error:" in line or "Exception:" in line]
    reason = (python or causes or [type(error).__name__])[-1][:500]
    return f"{reason.rstrip('.')}, in the SQL `{' '.join(quoted[1].split())[:200]}`" if quoted and quoted[1].strip() else reason


def _explain_exit(reason: str) -> str:
    """Return what the exit of an executor means and what to do, to follow Spark's reason; "" if that is not known."""
    if _OUT_OF_HEAP.search(reason):
        return " (its JVM ran out of memory; raise `spark.executor.memory`)"
    if _KILLED.search(reason):
        return " (it was killed, most likely because memory ran out; raise `spark.executor.memoryOverhead`)"
    return ""
