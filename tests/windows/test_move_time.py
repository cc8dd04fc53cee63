"""The parts of the time that moving a window takes."""

from __future__ import annotations

import pytest

from airflow_kafka_spark.windows.times import Timed, split_move_seconds, split_seconds

WORK = {"read": 6.0, "decode": 3.0, "write": 3.0, "wait": 0.0}


PARTS = ("session", "workers", "read", "decode", "write", "wait")


@pytest.mark.parametrize(
    ("move", "jobs", "work", "began", "parts"),
    [
        # A session takes 2 s, workers 1 s, and the rest of the job is divided as its tasks divide their time.
        (10.0, [(102.0, 109.0)], WORK, 103.0, (2, 1, 3, 1.5, 1.5, 1)),
        # Two jobs; what lies between them is waiting.
        (10.0, [(101.0, 102.0), (104.0, 107.0)], WORK, 101.0, (1, 0, 2, 1, 1, 5)),
        # Tasks that wait for Spark's SQL.
        (5.0, [(101.0, 105.0)], dict.fromkeys(WORK, 1.0), 0.0, (1, 0, 1, 1, 1, 1)),
        # Tasks that tell nothing, or only how long they have read.
        (5.0, [(101.0, 105.0)], {}, 0.0, (1, 0, 0, 0, 4, 0)),
        (5.0, [(101.0, 105.0)], {"read": 9.0}, 102.0, (1, 1, 0, 0, 3, 0)),
        # The clock of an executor that is ahead or behind.
        (5.0, [(101.0, 105.0)], WORK, 999.0, (1, 4, 0, 0, 0, 0)),
        (5.0, [(101.0, 105.0)], WORK, 5.0, (1, 0, 2, 1, 1, 0)),
    ],
)
def test_the_parts_of_a_move_add_up_to_it(move, jobs, work, began, parts):
    found = split_move_seconds(move, jobs, 100.0, work, began)
    assert found == pytest.approx(dict(zip(PARTS, parts, strict=True)))
    assert sum(found.values()) == pytest.approx(move)


def test_without_a_job_there_are_no_parts():
    assert split_move_seconds(0.0, [], 0.0, {}, 0.0) == {}


def test_a_task_that_reads_decodes_all_that_it_neither_reads_nor_writes():
    found = split_seconds(10.0, 7.0, 2.0, {"read": 4.0, "decode": 1.0}, is_one_stage=True)
    assert found == {"read": 4.0, "decode": 4.0, "write": 2.0, "wait": 0.0}


def test_a_task_behind_sparks_sql_waits_for_what_is_computed_there():
    found = split_seconds(10.0, 7.0, 2.0, {"read": 4.0, "decode": 1.0}, is_one_stage=False)
    assert found == {"read": 4.0, "decode": 2.0, "write": 2.0, "wait": 2.0}


def test_iterating_is_timed_and_ends_as_it_would():
    items = Timed(iter([1, 2]))
    assert list(items) == [1, 2] and items.seconds >= 0
    with pytest.raises(ZeroDivisionError):
        next(Timed(1 // zero for zero in [0]))
