"""Which window somebody waits for."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from airflow_kafka_spark.windows.interval import Interval, IntervalState
from airflow_kafka_spark.windows.interval_archive import Intervals
from airflow_kafka_spark.windows.memory import Attempt, Memory, WindowCriteria, WindowEntry, find_completed, is_same_run
from airflow_kafka_spark.windows.model import State, Window


def entry(number, run="dag/run1/task", state=State.COMPLETE, at="2026-01-01T00:00:00+00:00"):
    report = {"completed_at": at, "records_read": number} if state is State.COMPLETE else None
    return WindowEntry(Window("p", number, (), run, at), state, Attempt(1, "x", run, at), report)


def memory(*entries):
    return Memory("p", entries={e.window.number: e for e in entries}, exists=True)


def test_nothing_is_complete_in_an_empty_ledger():
    assert find_completed(Memory("p"), WindowCriteria(after=0)) is None


def test_the_window_of_a_run_is_found_by_who_planned_it_not_by_who_finished_it():
    found = find_completed(memory(entry(1, "dag/run1/task"), entry(2, "dag/run2/task"), entry(3, "dag/run3/task")),
                      WindowCriteria(run="dag/run2/task"))  # fmt: skip
    assert (found.window, found.run, found.report["records_read"]) == ("0000000002", "dag/run2/task", 2)


def test_an_open_window_is_not_complete():
    assert find_completed(memory(entry(1), entry(2, state=State.PLANNED)), WindowCriteria(after=1)) is None


def test_after_a_number_the_newest_window_counts():
    assert find_completed(memory(entry(4), entry(5), entry(6)), WindowCriteria(after=4)).window == "0000000006"
    assert find_completed(memory(entry(4)), WindowCriteria(after=4)) is None


def test_since_a_moment_counts_when_it_was_completed():
    entries = memory(entry(1, at="2026-01-01T00:00:00+00:00"), entry(2, at="2026-01-02T00:00:00+00:00"))
    moment = 1767312000.0
    assert find_completed(entries, WindowCriteria(since=moment)).window == "0000000002"
    assert find_completed(entries, WindowCriteria(since=moment + 1)) is None


def test_all_that_is_given_has_to_hold():
    entries = memory(entry(1, "dag/a/task"), entry(2, "dag/b/task"))
    assert find_completed(entries, WindowCriteria(run="dag/a/task", after=1)) is None
    assert find_completed(entries, WindowCriteria(run="dag/b/task", after=1)).window == "0000000002"


def test_a_data_interval_is_found_by_its_run():
    interval = Interval(datetime(2026, 1, 1, tzinfo=timezone.utc), datetime(2026, 1, 2, tzinfo=timezone.utc))
    for state in (State.PLANNED, State.COMPLETE):
        known = IntervalState(interval, state, (), run="dag/run1/task")
        found = find_completed(
            Memory("p", exists=True, intervals=Intervals({interval.name: known})), WindowCriteria(run="dag/run1/task")
        )
        assert (found is not None) == (state is State.COMPLETE)
    assert (found.window, found.run) == (interval.name, "dag/run1/task")


@pytest.mark.parametrize(
    ("known", "wanted", "same"),
    [
        ("d/r/t", "d/r/t", True),
        ("d/r/t", "d/r/u", False),
        ("d/r/t", "e/r/t", False),
        ("d/scheduled__2026-01-01T00:00:00+00:00/t", "d/manual__2026-01-01T00:00:00+00:00_x7Qa/t", True),
        ("d/scheduled__2026-01-01T00:00:00+00:00/t", "d/scheduled__2026-01-01T01:00:00+01:00/t", True),
        ("d/scheduled__2026-01-01T00:00:00+00:00/t", "d/scheduled__2026-01-01T01:00:00+00:00/t", False),
        ("d/by hand/t", "d/also by hand/t", False),
        ("d/r/t/3", "d/r/t/3", True),
        ("d/r/t/3", "d/r/t/4", False),
    ],
)
def test_runs_of_the_same_moment_are_the_same(known, wanted, same):
    assert is_same_run(known, wanted) is same
