"""Airflow's counters distinguish a clear from a retry, with any value of ``retries``."""

from __future__ import annotations

import random

import pytest

from airflow_kafka_spark.windows.model import MAX_RUNS, Tries, record_tries, tries_from_json, tries_to_json
from tests.support.runs import Counters


def begun(task: Counters) -> Tries:
    """The task's next try."""
    facts = task.attempt()
    return Tries(facts["try_number"], facts["max_tries"], facts["clears"])


def test_in_any_history_of_a_task_a_retry_is_no_clear_and_a_clear_is_one():
    """Tries, retries and clears of one task; ``retries`` is changed between two series of tries, and other tasks of the DAG run
    are cleared at any time."""
    rng, compared = random.Random(7), 0
    for _ in range(4_000):
        task = Counters(rng.randrange(4))
        known, cleared = begun(task), False
        for _ in range(8):
            task.clears += rng.randrange(3) == 0
            if not task.may_retry or rng.randrange(3) == 0:
                task.clear(retries=rng.randrange(4))
                cleared = True
            now = begun(task)
            assert now.cleared_since(known, task.retries) is cleared, (known, now, task)
            compared += cleared
            if rng.randrange(2):
                known, cleared = now, False
    assert compared > 5_000


@pytest.mark.parametrize("clears", [0, -1])
def test_a_clear_that_leaves_the_tries_as_they_were_is_known_by_what_retries_is_now(clears):
    """Three retries were allowed, and two are now: the clear adds one."""
    known, now = Tries(1, 3, clears), Tries(2, 3, clears + 1 if clears >= 0 else -1)
    assert now.cleared_since(known, retries=2) and not now.cleared_since(known, retries=3)


def test_lowering_retries_while_a_retry_waits_is_no_clear():
    assert not Tries(2, 3, 5).cleared_since(Tries(1, 3, 5), retries=2)


def test_a_task_that_is_cleared_while_it_runs_is_retried():
    assert not Tries(2, 1, 1).cleared_since(Tries(1, 1, 0), retries=1)


def test_counters_keep_their_values_on_the_way_through_the_ledger():
    tries = {"dag/run1/task": Tries(3, 4, 1), "dag/run2/task": Tries()}
    assert tries_from_json(tries_to_json(tries)) == tries


def test_the_counters_of_the_newest_runs_are_kept_and_those_of_the_one_that_planned_the_window():
    known = {}
    for number in range(20):
        known = record_tries(known, f"run{number}", Tries(number), keep="run3")
    assert list(known) == ["run3", *(f"run{number}" for number in range(20 - MAX_RUNS, 20))]
    assert record_tries(known, "run3", Tries(9), keep="run3")["run3"] == Tries(9)
