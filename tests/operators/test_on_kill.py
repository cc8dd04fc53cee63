"""SIGTERM raises nothing in an Airflow task, it only calls ``on_kill``. ``execution_timeout`` raises first, then calls it.

Both cancel the Spark job."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support.pipelines import make
from tests.support.victim import TIMEOUT


@pytest.mark.parametrize(
    ("ends", "jvm", "error"),
    [
        (signal.SIGTERM, False, "SparkJobFailed"),
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
