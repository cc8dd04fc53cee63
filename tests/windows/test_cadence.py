"""When a run is expected, and from when on it is late: by a period, by a timetable, and by what a ledger tells."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from airflow_kafka_spark.windows.lag import (
    LATE_SECONDS,
    CompletedWindow,
    Observation,
    Periodic,
    Status,
    Timetabled,
    Unscheduled,
    derive_cadence,
    find_usual_period,
    judge_partition,
)

HOUR = 3600.0
MONDAY = datetime(2026, 1, 5, tzinfo=timezone.utc).timestamp()


def next_hour(instant):
    return (instant // HOUR + 1) * HOUR


def next_working_day(instant):
    """09:00 UTC from Monday to Friday."""
    day = datetime.fromtimestamp(instant, timezone.utc).replace(hour=9, minute=0, second=0, microsecond=0)
    while day.timestamp() <= instant or day.weekday() > 4:
        day += timedelta(days=1)
    return day.timestamp()


def windows(count, *, kind="scheduled", hours=1, seconds=10.0, interval=False):
    """Windows that a catch-up has moved within seconds of each other."""
    found = []
    for n in range(count):
        at = datetime.fromtimestamp(MONDAY, timezone.utc) + timedelta(hours=n * hours)
        span = (round(at.timestamp() * 1000), round((at.timestamp() + hours * HOUR) * 1000)) if interval else None
        found.append(CompletedWindow(MONDAY + n * seconds, f"dag/{kind}__{at.isoformat()}/task", span))
    return found


@pytest.mark.parametrize("given", [windows(6), windows(6, interval=True), windows(6, kind="manual", interval=True)])
def test_a_catch_up_does_not_say_how_often_a_pipeline_runs(given):
    assert derive_cadence(given) == Periodic(HOUR)
    # Six hourly intervals were moved in a minute; five minutes later there are new records.
    past = [Observation(window.completed_at, 60 + n, active=True) for n, window in enumerate(given)]
    now = Observation(past[-1].time + 216, past[-1].committed, 15, 216.0)
    assert judge_partition([*past, now], derive_cadence(given)).status is Status.OK
    assert judge_partition([*past, now], Periodic(10.0)).status is Status.STOP


def test_runs_that_nobody_schedules_have_none_to_miss():
    for kind in ("manual", "asset_triggered", "backfill"):
        assert derive_cadence(windows(6, kind=kind)) == Unscheduled()
    silent = [Observation(0.0, 7, active=True), Observation(900 * HOUR, 7, 50, 800 * HOUR)]
    assert judge_partition(silent, Unscheduled()).status is Status.OK


def test_names_of_another_kind_tell_by_the_time_between_completions():
    known = [CompletedWindow(at, "dag/run/task") for at in (0.0, 10.0, 30.0, 35.0)]
    assert derive_cadence(known) == Periodic(20.0)
    assert derive_cadence(known[:2]) is None
    assert derive_cadence(windows(1)) is None
    assert derive_cadence([]) is None


def test_the_usual_period_is_the_longest_one_once_there_are_enough():
    assert find_usual_period([0.0, 10.0]) is None
    assert find_usual_period([0.0, 10.0, 30.0, 35.0]) == 20.0


def test_a_run_by_a_timetable_is_late_after_half_of_the_time_to_the_next_one():
    hourly = Timetabled(next_hour)
    assert hourly.deadline(MONDAY + 300) == MONDAY + 1.5 * HOUR
    friday = MONDAY + 4 * 24 * HOUR + 9.1 * HOUR
    working_days = Timetabled(next_working_day)
    assert working_days.due_after(friday) == MONDAY + 7 * 24 * HOUR + 9 * HOUR, "no run is due at a weekend"
    assert working_days.deadline(friday) == MONDAY + 7 * 24 * HOUR + 21 * HOUR
    last = Timetabled(lambda instant: MONDAY if instant < MONDAY else None)
    assert last.deadline(MONDAY - 100) == MONDAY + LATE_SECONDS
    assert last.deadline(MONDAY) is None


def test_a_run_that_was_due_and_did_not_come_is_a_stop_that_says_so():
    history = [Observation(MONDAY + 300, 7, active=True), Observation(MONDAY + 2 * HOUR, 7, 9, 1.8 * HOUR)]
    verdict = judge_partition(history, Timetabled(next_hour))
    assert verdict.status is Status.STOP
    assert verdict.reason == "no sign of life for 6,480 s; a run was due 3,600 s ago"
    assert judge_partition([history[0], Observation(MONDAY + HOUR + 60, 7, 9, 1000.0)], Timetabled(next_hour)).status is Status.OK
