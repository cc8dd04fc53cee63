"""Concurrent pieces of a verification: their order, their errors, and what is asked again."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from airflow_kafka_spark.errors import SourceRejected, SourceUnavailable
from airflow_kafka_spark.verification import concurrency
from airflow_kafka_spark.verification.concurrency import Cancelled, ConcurrentWork, ProgressLog


@pytest.fixture(autouse=True)
def _soon(monkeypatch):
    monkeypatch.setattr(concurrency, "RETRY_SECONDS", (0.0, 0.0, 0.0))


def test_results_come_in_the_order_of_the_pieces_however_long_each_takes():
    second = threading.Event()

    def do(piece: int) -> int:
        if piece == 1:
            second.set()
        assert second.wait(60)
        return piece * 2

    assert list(ConcurrentWork(2).map_concurrently(do, range(20))) == [(n, 2 * n) for n in range(20)]


def test_a_server_that_does_not_answer_is_asked_three_times_more():
    asked = []

    def fail(times: int):
        def do() -> str:
            asked.append(1)
            if len(asked) <= times:
                raise SourceUnavailable("db", "reading", "no answer")
            return "rows"

        return do

    assert ConcurrentWork(1).run_with_retries(fail(3)) == "rows" and len(asked) == 4
    asked.clear()
    with pytest.raises(SourceUnavailable):
        ConcurrentWork(1).run_with_retries(fail(4))
    assert len(asked) == 4


def test_the_error_of_the_first_piece_that_fails_ends_the_others():
    done = []

    def do(piece: int) -> int:
        if piece == 3:
            raise SourceRejected("t", "a value cannot be read")
        done.append(piece)
        return piece

    found = ConcurrentWork(2).map_concurrently(do, iter(range(1_000)))
    with pytest.raises(SourceRejected, match="cannot be read"):
        list(found)
    assert len(done) < 1_000


def test_a_task_that_is_stopped_asks_for_nothing_more():
    work = ConcurrentWork(1)
    work.stopped.set()
    with pytest.raises(Cancelled, match="stopped"):
        work.run_with_retries(lambda: pytest.fail("asked"))
    with pytest.raises(Cancelled, match="stopped"):
        work.wait(60)


def test_the_progress_names_the_remaining_time_where_the_number_of_rows_is_known(caplog, monkeypatch):
    caplog.set_level("INFO")
    clock = [0.0]
    monkeypatch.setattr(concurrency, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    progress, unknown = ProgressLog(1_000, done=100), ProgressLog(0)
    clock[0] = 60.0
    progress.add(300)
    unknown.add(5)
    assert caplog.messages == ["Compared 400 of about 1,000 rows; about 2 min remain", "Compared 5 rows"]
    clock[0] = 61.0
    progress.add(700)
    assert len(caplog.messages) == 2 and str(progress) == "Compared 1,100 rows"
