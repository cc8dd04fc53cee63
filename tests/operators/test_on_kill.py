"""SIGTERM raises nothing in an Airflow task, it only calls ``on_kill``. ``execution_timeout`` raises first, then calls it.

Both cancel the Spark job. Without them, an attempt waits for a task that hangs, and the log names it."""

from __future__ import annotations

import logging
import os
import re
import signal

import pytest

from airflow_kafka_spark.jobs import stalls, watch
from tests.support import workers
from tests.support.distribution import extended
from tests.support.pipelines import make
from tests.support.victim import TIMEOUT


@pytest.mark.parametrize(
    ("ends", "jvm", "error"),
    [
        extended(signal.SIGTERM, False, "SparkJobFailed"),
        (signal.SIGTERM, True, "Airflow ended the task, and the job was cancelled"),
        (signal.SIGALRM, False, "AirflowTaskTimeout"),
    ],
    ids=["on_kill", "on_kill_of_the_process_group", "timeout"],
)
def test_an_attempt_that_is_ended_cancels_its_spark_job_and_the_retry_finishes_the_window(files, monkeypatch, ends, jvm, error):
    monkeypatch.setenv(TIMEOUT, "600")  # the alarm comes earlier, from here
    files.produce(1000)
    # A worker that stops in the middle of its split: without the cancel the job would never end.
    attempt = files.victim("run1", fault="split.mid:stop", jvm=jvm)
    attempt.wait_stopped()
    if jvm:
        os.killpg(attempt.process.pid, ends)
    else:
        os.kill(attempt.process.pid, ends)
    assert attempt.wait() == 1, attempt.tail()
    # Not its tail: a JVM that goes down writes many lines more.
    log = attempt.log.read_text()
    assert "Cancelling the Spark job" in log and error in log
    assert "master went away" not in log
    assert files.rows() == []
    files.run("run1")
    assert files.check() == 1000


def test_without_a_running_job_on_kill_does_nothing(files):
    make(**files.arguments).on_kill()


def test_an_attempt_whose_spark_driver_is_stopped_ends_at_its_timeout_and_the_retry_finishes_the_window(files, monkeypatch):
    monkeypatch.setenv(TIMEOUT, "600")
    files.produce(100)
    attempt = files.victim("run1", fault="split.mid:stop", jvm=True)
    attempt.wait_stopped()
    worker = workers.wait_stopped(attempt.once, above=attempt.process.pid)
    jvm = next(pid for pid in workers.ancestors(worker) if "java" in os.path.basename(os.readlink(f"/proc/{pid}/exe")))
    os.kill(jvm, signal.SIGSTOP)
    os.kill(attempt.process.pid, signal.SIGALRM)
    assert attempt.wait(90) == 1, attempt.tail()
    log = attempt.log.read_text()
    assert "the job was not cancelled" in log and "AirflowTaskTimeout" in log
    files.run("run1")
    assert files.check() == 100


def test_a_worker_that_is_stopped_is_named_with_its_split_and_the_window_ends_once_it_continues(files, monkeypatch, caplog):
    monkeypatch.setattr(stalls, "STALLED_SECONDS", 0.5)
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.1)
    files.produce(100)

    class Waker(logging.Handler):
        def emit(self, record):
            # Spark may name the running tasks later than the process is found.
            if (found := re.search(r"`kill -CONT (\d+)`", record.getMessage())) and "Running: split" in record.getMessage():
                workers.wake(int(found[1]))

    waker = Waker()
    logging.getLogger(stalls.__name__).addHandler(waker)
    try:
        with workers.fault_in_tasks("split.mid:stop", files.directory / "fault"):
            files.run("run1")
    finally:
        logging.getLogger(stalls.__name__).removeHandler(waker)
    assert files.check() == 100
    line = next(line for line in caplog.messages if "Stopped processes" in line and "Running: split" in line)
    split = re.escape(f"({files.topic}-")
    assert re.search(rf"\d of \d+ tasks of its Spark job have ended, and none for \d+ s. Running: split \d {split}", line), line
    assert "(executor driver)" in line and "`execution_timeout`" in line


def test_a_job_without_a_running_task_is_said_to_have_no_executor_unless_that_is_not_known(monkeypatch, caplog):
    monkeypatch.setattr(stalls, "STALLED_SECONDS", 0.0)
    for list_tasks in (lambda: None, list):
        caplog.clear()
        reporter = stalls.StallReporter("7", str)
        for _ in range(2):
            reporter.check(0, 4, list_tasks, list)
        assert "Window 7: 0 of 4 tasks of its Spark job have ended" in caplog.text
        assert ("No task is running: Spark has no free cores." in caplog.text) == (list_tasks is list)
