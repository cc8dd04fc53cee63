"""Spark jobs in which no task ends for a long time: which tasks are running, and which processes of Spark are stopped.

Spark ends no task because of its duration, and cannot know whether a Python worker is slow, hangs or was stopped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pyspark import SparkContext, SparkStageInfo

log = logging.getLogger(__name__)

STALLED_SECONDS = 120.0
"""Seconds without a finished task after which the log names the tasks that are running. The next lines follow after twice, four
times, eight times as many seconds."""

SHOWN_TASKS = 8
"""Maximum number of tasks and of processes in one line of the log."""

REMEDY = "Spark does not end a task that hangs. `execution_timeout` of the Airflow task ends the attempt"


_NONE_RUNNING = (
    "No task is running: Spark has no free cores. On a cluster, either other applications have all cores or memory, no worker "
    "has as much as `spark.executor.memory` and `spark.executor.cores`, or executors end while they start (see workers' logs). "
)


class RunningTask(NamedTuple):
    """A task of a Spark job that is running.

    :param number: its number within the job.
    :param seconds: the time since its start.
    :param executor: the id of its executor; ``driver`` if the master is local.
    :param host: the host of its executor.
    """

    number: int
    seconds: float
    executor: str
    host: str


class StallClock:
    """Measures the time without progress, and says when the log needs a line about it."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin to measure, after progress."""
        self._since, self._next = time.monotonic(), STALLED_SECONDS

    def take_due(self) -> float | None:
        """Return the seconds without progress if a line is due, and double the time to the next one; None if none is due."""
        seconds = time.monotonic() - self._since
        if seconds < self._next:
            return None
        self._next *= 2
        return seconds


@dataclass
class StallReporter:
    """Logs a warning if no task of a job ends.

    :param window: the window, for the log.
    :param name_task: returns the name of a task for users, by its number.
    """

    window: object
    name_task: Callable[[int], str]
    _finished: int = field(default=-1, init=False)
    _clock: StallClock = field(default_factory=StallClock, init=False)

    def check(
        self, finished: int, tasks: int, list_tasks: Callable[[], list[RunningTask] | None], find_stopped: Callable[[], list[int]]
    ) -> None:
        """Log the tasks that are running, if none has ended since the last line and the time has come.

        :param finished: the number of finished tasks.
        :param tasks: the number of all tasks.
        :param list_tasks: returns the tasks that are running; None if that is not known.
        :param find_stopped: returns the ids of stopped processes.
        """
        if finished != self._finished or finished >= tasks:
            self._finished = finished
            self._clock.restart()
        elif (seconds := self._clock.take_due()) is not None:
            try:
                details = _describe_tasks(list_tasks(), self.name_task) + _describe_stopped(find_stopped())
            except Exception as error:
                log.debug("Spark does not name the tasks that are running: %s", error)
                details = ""
            line = "Window %s: %d of %d tasks of its Spark job have ended, and none for %.0f s. %s%s"
            log.warning(line, self.window, finished, tasks, seconds, details, REMEDY)


class SilenceReporter:
    """Logs a warning if Spark's driver does not answer the thread that follows a job.

    :param window: the window, for the log.
    """

    def __init__(self, window: object) -> None:
        self._window, self._clock = window, StallClock()

    def note_answer(self) -> None:
        """Begin to wait for the next answer."""
        self._clock.restart()

    def check(self) -> None:
        """Log the time since the last answer, if it is time for a line."""
        if (seconds := self._clock.take_due()) is not None:
            line = "Window %s: Spark's driver has not answered for %.0f s: it hangs, or was stopped. %s"
            log.warning(line, self._window, seconds, REMEDY)


def _describe_tasks(running: list[RunningTask] | None, name_task: Callable[[int], str]) -> str:
    """Return the longest running tasks, as a sentence that ends with a space."""
    if running is None:
        return ""
    if not running:
        return _NONE_RUNNING
    shown = [
        f"{name_task(task.number)} for {task.seconds:.0f} s on {task.host} (executor {task.executor})"
        for task in sorted(running, key=lambda task: -task.seconds)[:SHOWN_TASKS]
    ]
    more = f" and {len(running) - SHOWN_TASKS} more" if len(running) > SHOWN_TASKS else ""
    return f"Running: {', '.join(shown)}{more}. "


def _describe_stopped(pids: list[int]) -> str:
    """Return the processes that are stopped, as sentences that end with a space."""
    if not pids:
        return ""
    shown = " ".join(map(str, pids[:SHOWN_TASKS]))
    return f"Stopped processes (SIGSTOP): {shown}. `kill -CONT {shown}` continues them, `kill -KILL {shown}` fails their tasks. "


def list_running_tasks(context: SparkContext, stages: list[SparkStageInfo]) -> list[RunningTask]:
    """Return the running tasks of some stages, at most a thousand of each."""
    jvm: Any = context._jvm
    # By their full names: Java would look for each package of a path as a class.
    status = getattr(jvm, "org.apache.spark.status.api.v1.TaskStatus").RUNNING
    order = getattr(jvm, "org.apache.spark.status.api.v1.TaskSorting").ID
    wanted = getattr(jvm, "java.util.ArrayList")()
    wanted.add(status)
    store: Any = context._jsc.sc().statusStore()
    now, found = time.time(), []
    for stage in stages:
        tasks = store.taskList(stage.stageId, stage.currentAttemptId, 0, 1_000, order, wanted)
        for at in range(tasks.size()):
            task = tasks.apply(at)
            seconds = max(0.0, now - task.launchTime().getTime() / 1000)
            found.append(RunningTask(task.index(), seconds, task.executorId(), task.host()))
    return found


def find_stopped_processes(context: SparkContext) -> list[int]:
    """Return the ids of processes below Spark's driver that are stopped: Python workers, and executors of a local cluster.

    Executors of other hosts are not found.
    """
    import psutil

    jvm: Any = context._jvm
    with suppress(psutil.Error):
        driver = psutil.Process(getattr(jvm, "java.lang.ProcessHandle").current().pid())
        return sorted(_find_stopped(driver))
    return []


def _find_stopped(root: Any) -> Iterator[int]:
    import psutil

    for process in root.children(recursive=True):
        with suppress(psutil.Error):
            if process.status() == psutil.STATUS_STOPPED:
                yield process.pid
