"""The task's process, or a worker of it, dies or sleeps while a window is published to Kafka; then it is retried and cleared.

After each: every row is there exactly once, for a read_committed reader that read all the while and for one at the end, no
transaction of ours is open, and a further attempt writes nothing.
"""

from __future__ import annotations

import pytest

from airflow_kafka_spark import faults
from tests.support.shop import shop

IN_A_TASK = tuple(point for point in faults.PUBLISHING if point.startswith("publish."))
# What happens to the ledger alone is tested with a sink (test_kill.py); where it matters here, too.
POINTS = tuple(point for point in faults.PUBLISHING if point not in ("fenced", "close.begin", "close.committed"))


@pytest.fixture
def orders(kafka, postgres, unique, tmp_path):
    with shop(kafka, postgres, unique, tmp_path) as made, made.watched():
        yield made


@pytest.mark.faults
@pytest.mark.parametrize("point", POINTS)
def test_killed_then_retried_and_cleared_every_row_is_published_exactly_once(orders, point):
    orders.sell(300)
    orders.run("run0")
    orders.sell(900)
    victim = orders.victim("run1", fault=point)
    code = victim.wait()
    assert victim.fired, victim.tail()
    assert code == (1 if point in IN_A_TASK else -9), victim.tail()
    retried = orders.run("run1")
    assert (retried["window"], retried["records_written"]) == ("0000000002", 900)
    assert orders.check() == 1200
    assert orders.run("run1") == retried, "a cleared task does nothing and returns the same report"
    assert orders.check() == 1200
    orders.sell(10)
    assert orders.run("run2")["records_written"] == 10
    assert orders.check() == 1210


@pytest.mark.faults
@pytest.mark.parametrize("point", ["planned", "publish.mid", "publish.marked"])
def test_a_zombie_that_wakes_after_the_retry_has_finished_publishes_nothing(orders, point):
    orders.sell(900)
    zombie = orders.victim("run1", fault=f"{point}:stop")
    zombie.wait_stopped()
    zombie.freeze()
    report = orders.run("run1")
    assert report["records_written"] == 900
    orders.sell(10)
    orders.run("run2")
    zombie.wake()
    zombie.wait()
    assert orders.check() == 910
    orders.run("run3")
    assert orders.check() == 910
    assert report["attempts"] == 2


@pytest.mark.faults
def test_rows_that_change_between_two_attempts_are_not_published_twice(orders):
    orders.sell(900)
    victim = orders.victim("run1", fault="publish.committed")
    assert victim.wait() == 1 and victim.fired, victim.tail()
    before = orders.records()
    with orders.postgres.connect(autocommit=True) as connection:
        connection.execute(f"UPDATE \"{orders.table}\" SET customer = 'somebody else'")
    orders.run("run1")
    after = orders.records()
    assert before and len(after) == len({record[0] for record in after}) == 900
    assert set(before) <= set(after), "what was published once stays as it is"
