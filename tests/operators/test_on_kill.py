"""SIGTERM raises nothing in an Airflow task, it only calls ``on_kill``: that has to make the Spark job fail."""

from __future__ import annotations

import os
import signal

from tests.support.pipelines import make


def test_on_kill_cancels_the_spark_job_and_the_retry_finishes_the_window(files):
    files.produce(1000)
    # A worker that stops in the middle of its split: without the cancel the job would never end.
    attempt = files.victim("run1", fault="split.mid:stop")
    attempt.wait_stopped()
    os.kill(attempt.process.pid, signal.SIGTERM)
    assert attempt.wait() == 1, attempt.tail()
    # Not its tail: a JVM that goes down writes many lines more.
    log = attempt.log.read_text()
    assert "Cancelling the Spark job" in log and "SparkJobFailed" in log
    assert files.rows() == []
    files.run("run1")
    assert files.check() == 1000


def test_without_a_running_job_on_kill_does_nothing(files):
    make(**files.arguments).on_kill()
