"""Data intervals of a fixed length in a time zone with summer time: what overlaps, and what is left out, is named in advance."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from airflow.sdk import CronDataIntervalTimetable, CronTriggerTimetable

from airflow_kafka_spark.operators.clock_changes import find_uneven_intervals, warn_of_clock_changes

NOW = datetime(2026, 1, 10, tzinfo=timezone.utc)


def by_trigger(cron: str, zone: str, hours: float) -> CronTriggerTimetable:
    return CronTriggerTimetable(cron, timezone=zone, interval=timedelta(hours=hours))


@pytest.mark.parametrize(
    "timetable",
    [
        by_trigger("0 * * * *", "Europe/Berlin", 1),
        by_trigger("*/5 * * * *", "Europe/Berlin", 1 / 12),
        by_trigger("0 0 * * *", "UTC", 24),
        by_trigger("0 0 * * *", "Asia/Tokyo", 24),
        by_trigger("0 0 * * *", "Europe/Berlin", 0),
        by_trigger("0 0 * * *", "Europe/Berlin", 23),
        by_trigger("0 0 * * 1-5", "Europe/Berlin", 24),
        CronDataIntervalTimetable("0 0 * * *", timezone="Europe/Berlin"),
    ],
)
def test_intervals_that_a_change_of_the_clock_does_not_make_uneven(timetable):
    assert list(find_uneven_intervals(timetable, NOW)) == []


@pytest.mark.parametrize(
    ("timetable", "days"),
    [
        (by_trigger("0 0 * * *", "Europe/Berlin", 24), [(3, 28, -1), (10, 24, 1)]),
        (by_trigger("0 */6 * * *", "America/New_York", 6), [(3, 8, -1), (11, 1, 1)]),
    ],
)
def test_an_hour_in_two_intervals_in_spring_and_in_none_in_autumn(timetable, days):
    found = [
        ((earlier.end.month, earlier.end.day), (later.start - earlier.end) / timedelta(hours=1))
        for earlier, later in find_uneven_intervals(timetable, NOW)
    ]
    assert found == [((month, day), hours) for month, day, hours in days]


def test_both_are_a_warning_that_names_the_remedy_and_a_schedule_that_fails_is_none(caplog):
    with caplog.at_level(logging.WARNING):
        warn_of_clock_changes(SimpleNamespace(timetable=by_trigger("0 0 * * *", "Europe/Berlin", 24)), NOW)
        warn_of_clock_changes(SimpleNamespace(timetable=object()), NOW)
        warn_of_clock_changes(None, NOW)
    (line,) = caplog.messages
    assert "[2026-03-28T22:00:00Z, 2026-03-29T22:00:00Z) overlap, so that the second one will be refused" in line
    assert "no interval has the records between 2026-10-24T22:00:00Z and 2026-10-24T23:00:00Z" in line
    assert "`CronDataIntervalTimetable`" in line
