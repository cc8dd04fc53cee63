"""Spark is started during the validation if the ledger and the topics already show that the window will have records."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from pyspark import SparkContext

from airflow_kafka_spark.hooks.spark.health import discard_ended
from airflow_kafka_spark.hooks.spark.hook import SparkHook
from airflow_kafka_spark.operators.binding import Run
from tests.support.control import pause, resume
from tests.support.oracle import wait_stable
from tests.support.pipelines import make
from tests.support.runs import context, fails_at


def foresees(pipeline, run_id, **options):
    """Return an attempt's prediction for a run; None if it makes none."""
    wait_stable(pipeline.kafka.connection_extra(), f"ledger-{pipeline.name}")
    operator = make(**{**pipeline.arguments, **options})
    look = operator.make_records_check(Run.of(context(run_id)))
    return look and look()


def test_spark_is_started_early_only_for_a_window_that_will_have_records(files):
    files.produce(30)
    assert foresees(files, "run1") is False, "where a new pipeline begins is the plan's affair"
    assert files.run("run1")["records_read"] == 30
    assert foresees(files, "run1") is False, "the window of this run is complete"
    assert foresees(files, "run2") is False, "there is nothing new"
    files.produce(10)
    assert foresees(files, "run2") is True
    assert foresees(files, "run2", read_with="spark") is None, "its session needs jars"
    with_control = {"ledger_topic": f"ledger-{files.name}", "why": "test", "who": "ann"}
    with files_hook() as hook:
        pause(hook, files.name, **with_control)
    assert foresees(files, "run2") is False, "the pipeline is paused"
    with files_hook() as hook:
        resume(hook, files.name, **with_control)
    with fails_at("planned"):
        files.run("run2")
    assert foresees(files, "run2") is True, "the open window has records"
    assert files.run("run2")["records_read"] == 10
    assert files.check() == 40


def files_hook():
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

    return KafkaHook()


class WatchedLock:
    """The lock on contexts. Sets an event before it is acquired.

    :param lock: the lock.
    """

    def __init__(self, lock):
        self.lock, self.wanted = lock, threading.Event()

    def __enter__(self):
        self.wanted.set()
        return self.lock.__enter__()

    def __exit__(self, *error):
        return self.lock.__exit__(*error)


def test_a_context_that_another_task_is_still_making_is_waited_for(files, monkeypatch):
    with SparkHook().open_without_sql() as context, ThreadPoolExecutor(1) as pool:
        watched = WatchedLock(SparkContext._lock)
        monkeypatch.setattr(SparkContext, "_lock", watched)
        with watched.lock:
            # As SparkContext.getOrCreate does: the context is active before it is made.
            SparkContext._active_spark_context = object.__new__(SparkContext)
            found = pool.submit(discard_ended)
            found.add_done_callback(lambda _: watched.wanted.set())
            assert watched.wanted.wait(60)
            SparkContext._active_spark_context = context
        assert found.result(60) == ""
