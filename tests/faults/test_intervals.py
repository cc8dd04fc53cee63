"""An attempt at a data interval, or at the replay of one, dies by SIGKILL; then Airflow retries it."""

from __future__ import annotations

import pytest

from tests.support.distribution import extended
from tests.support.intervals import Intervals, ends

FIRST = [("files", "planned"), extended("files", "close.committed"), ("files", "group.in_transaction")]
AGAIN = [
    ("files", "sink.in_transaction"),
    extended("postgres", "planned"),
    ("postgres", "sink.committed"),
]


@pytest.fixture
def intervals(flow):
    made = Intervals(flow, table=flow.kind == "postgres")
    made.fill()
    return made


@pytest.mark.faults
@pytest.mark.parametrize("kind, point", FIRST)
def test_an_interval_whose_attempt_was_killed_is_moved_once_and_the_group_follows(intervals, kind, point):
    first = intervals.run(0)
    victim = intervals.victim(1, fault=point)
    assert (victim.wait(), victim.fired) == (-9, True), victim.tail()
    # The interval of another run does not wait for it.
    third = intervals.run(2)
    second = intervals.run(1)
    assert "replay" not in second
    assert intervals.check([first, second, third]) >= 15
    assert intervals.pipeline.committed() == ends(third)
    assert intervals.run(1) == second


@pytest.mark.faults
@pytest.mark.parametrize("kind, point", AGAIN)
def test_a_replay_that_was_killed_has_replaced_all_rows_of_the_window_or_none(intervals, kind, point):
    reports = [intervals.run(number) for number in (0, 1)]
    group = intervals.pipeline.committed()
    victim = intervals.victim(0, fault=point, cleared=1)
    assert (victim.wait(), victim.fired) == (-9, True), victim.tail()
    # A reader sees each row once, no matter when the attempt died.
    assert intervals.check(reports) >= 10
    again = intervals.run(0, cleared=1)
    assert again["replay"] == 1, "a retry goes on with the replay that is open"
    assert intervals.check([again, reports[1]]) >= 10
    assert intervals.run(0, cleared=1) == again, "a retry after the close does nothing"
    assert intervals.pipeline.committed() == group
