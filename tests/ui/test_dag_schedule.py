"""When runs are due, by Airflow's own timetables, without a server."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from airflow.sdk import DAG, Asset, CronPartitionTimetable
from airflow.serialization.serialized_objects import DagSerialization
from airflow.timetables.events import EventsTimetable
from airflow.timetables.interval import CronDataIntervalTimetable
from airflow.timetables.trigger import CronTriggerTimetable, MultipleCronTriggerTimetable

from airflow_kafka_spark.ui.airflow_metadata import DagSchedule, find_end_date, load_timetable
from airflow_kafka_spark.windows.lag import Timetabled, Unscheduled

HOUR = 3600.0


def at(text):
    return datetime.fromisoformat(text).replace(tzinfo=timezone.utc).timestamp()


def schedule_of(schedule, next_run="2026-01-07T11:00", interval=("2026-01-07T10:00", "2026-01-07T11:00"), **facts):
    """Return the schedule of a DAG, from its serialized form and its row in the metadata database."""
    timetable = load_timetable(
        DagSerialization.to_dict(DAG("d", schedule=schedule, start_date=datetime(2026, 1, 1), max_active_runs=1))
    )
    given = {"next_run": at(next_run), "next_interval": tuple(map(at, interval)) if interval else None, **facts}
    return DagSchedule(timetable=timetable, **given)


HOURLY = "0 * * * *"


@pytest.mark.parametrize(
    "schedule",
    [
        HOURLY,
        CronDataIntervalTimetable(HOURLY, timezone="UTC"),
        CronTriggerTimetable(HOURLY, timezone="UTC", interval=timedelta(hours=1)),
        MultipleCronTriggerTimetable(HOURLY, "0 6 * * *", timezone="UTC"),
        CronPartitionTimetable(HOURLY, timezone="UTC"),
    ],
    ids=lambda schedule: type(schedule).__name__,
)
def test_a_run_is_due_at_the_next_hour_and_late_half_an_hour_after_it(schedule):
    found = schedule_of(schedule)
    assert found.run_after(at("2026-01-07T08:20")) == at("2026-01-07T09:00")
    assert found.run_after(at("2026-01-07T09:00")) == at("2026-01-07T10:00")
    assert found.cadence.compute_deadline(at("2026-01-07T08:20")) == at("2026-01-07T09:30")


def test_a_timedelta_is_due_when_airflow_says_and_never_earlier():
    found = schedule_of(timedelta(hours=1), next_run="2026-01-07T10:25")
    assert found.run_after(at("2026-01-07T10:20")) == at("2026-01-07T10:25")
    assert found.run_after(at("2026-01-07T05:00")) == at("2026-01-07T06:00")


def test_nothing_is_due_at_a_weekend():
    found = schedule_of(CronTriggerTimetable("0 9 * * 1-5", timezone="UTC"), next_run="2026-01-12T09:00", interval=None)
    friday = at("2026-01-09T09:04")
    assert found.run_after(friday) == at("2026-01-12T09:00")
    assert found.cadence.compute_deadline(friday) == at("2026-01-12T21:00")


@pytest.mark.parametrize("schedule", [None, [Asset("a")], "@once"])
def test_a_dag_that_is_only_triggered_has_no_run_to_miss(schedule):
    found = schedule_of(schedule, interval=None)
    assert DagSchedule(next_run=None, timetable=found.timetable).cadence == Unscheduled()
    assert DagSchedule(next_run=None, timetable=found.timetable).find_due_end(at("2026-01-07T10:10")) is None


def test_a_paused_dag_has_no_run_to_miss_and_one_that_runs_all_the_time_no_cadence():
    assert schedule_of(HOURLY, is_paused=True).cadence == Unscheduled()
    assert isinstance(schedule_of(HOURLY).cadence, Timetabled)
    assert schedule_of("@continuous").cadence is None
    assert DagSchedule(next_run=1.0).cadence is None, "its timetable cannot be loaded here"
    over = schedule_of(EventsTimetable([datetime(2026, 1, 1, tzinfo=timezone.utc)]))
    assert over.run_after(at("2026-02-01T00:00")) is None


def test_the_interval_that_is_being_filled_is_not_due():
    hourly = schedule_of(CronDataIntervalTimetable(HOURLY, timezone="UTC"))
    assert hourly.find_due_end(at("2026-01-07T10:40")) == at("2026-01-07T10:00")
    # Runs are created later than they are due while others of the DAG are active.
    assert hourly.find_due_end(at("2026-01-07T15:40")) == at("2026-01-07T15:00")
    # What was due stays due where no further run is planned.
    assert replace(hourly, next_run=None, next_interval=None).find_due_end(at("2026-01-07T15:40")) == at("2026-01-07T15:00")
    by_trigger = schedule_of(CronTriggerTimetable(HOURLY, timezone="UTC", interval=timedelta(hours=1)))
    assert by_trigger.find_due_end(at("2026-01-07T15:40")) == at("2026-01-07T15:00")
    assert schedule_of(HOURLY, interval=("2026-01-07T11:00", "2026-01-07T11:00")).find_due_end(at("2026-01-07T10:40")) is None


@pytest.mark.parametrize(
    "schedule, end, last",
    [
        (CronDataIntervalTimetable(HOURLY, timezone="UTC"), "2026-01-07T08:00", "2026-01-07T09:00"),
        (CronDataIntervalTimetable(HOURLY, timezone="UTC"), "2026-01-07T08:30", "2026-01-07T09:00"),
        (CronTriggerTimetable(HOURLY, timezone="UTC", interval=timedelta(hours=1)), "2026-01-07T08:00", "2026-01-07T08:00"),
        (timedelta(hours=1), "2026-01-07T08:00", "2026-01-07T09:00"),
    ],
)
def test_behind_the_end_of_a_dag_no_interval_is_due_however_much_time_passes(schedule, end, last):
    over = schedule_of(schedule, end=at(end))
    over = replace(over, next_run=None, next_interval=None)
    for now in ("2026-01-07T09:30", "2026-01-07T10:02", "2026-01-09T15:40"):
        assert over.find_due_end(at(now)) == at(last)
    # Before that it is due as ever.
    assert over.find_due_end(at("2026-01-07T07:10")) == replace(over, end=None).find_due_end(at("2026-01-07T07:10"))


def test_the_end_of_a_dag_is_that_of_its_serialized_form():
    dag = DAG("d", schedule=HOURLY, start_date=datetime(2026, 1, 1), end_date=datetime(2026, 1, 7, 8, tzinfo=timezone.utc))
    assert find_end_date(DagSerialization.to_dict(dag)) == at("2026-01-07T08:00")
    assert find_end_date(DagSerialization.to_dict(DAG("d", schedule=HOURLY))) is None
    assert find_end_date({}) is None


def test_a_timetable_that_cannot_be_loaded_is_left_out():
    assert load_timetable({"dag": {"timetable": {"__type": "nowhere.Timetable", "__var": {}}}}) is None
    assert load_timetable({}) is None


class Broken:
    periodic = True

    def infer_manual_data_interval(self, *, run_after):
        raise RuntimeError("a user's own code")


def test_a_timetable_that_fails_leaves_what_airflow_has_planned():
    found = DagSchedule(next_run=100.0, timetable=Broken())
    assert (found.run_after(50.0), found.run_after(100.0)) == (100.0, None)
