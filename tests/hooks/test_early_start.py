"""A session that is started in a thread beside the validation, without Spark."""

from __future__ import annotations

import threading

import pytest

from airflow_kafka_spark.errors import SparkUnavailable
from airflow_kafka_spark.hooks.early_start import EarlyStart


@pytest.fixture
def started():
    return []


@pytest.fixture
def start(started):
    def make():
        started.append(threading.current_thread())
        return "session"

    return make


def test_a_session_that_is_needed_is_started_in_another_thread_and_waited_for(start, started):
    go, decided = threading.Event(), threading.Event()

    def slow():
        decided.set()
        assert go.wait(60)
        return start()

    early = EarlyStart(slow, lambda: True)
    assert decided.wait(60)
    go.set()
    assert early.result() == "session"
    assert started != [threading.current_thread()]


@pytest.mark.parametrize("answer", [lambda: False, lambda: 1 / 0])
def test_nothing_is_started_for_a_window_without_records_or_one_that_cannot_be_foreseen(start, started, answer):
    early = EarlyStart(start, answer)
    early._thread.join(60)
    assert early.result() is None
    assert started == []


@pytest.mark.parametrize("end", ["give_up", "result"])
def test_a_start_that_has_not_begun_when_the_validation_fails_or_the_session_is_wanted_never_begins(start, started, end):
    go = threading.Event()
    early = EarlyStart(start, lambda: go.wait(60))
    getattr(early, end)()
    go.set()
    early._thread.join(60)
    assert early.result() is None
    assert started == []


def test_the_error_of_the_start_is_raised_where_the_session_is_wanted():
    begun = threading.Event()

    def fails():
        begun.set()
        raise SparkUnavailable("spark_default", "local[2]", "no memory")

    early = EarlyStart(fails, lambda: True)
    assert begun.wait(60)
    with pytest.raises(SparkUnavailable, match="no memory"):
        early.result()
