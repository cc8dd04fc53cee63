"""A DAG that a backlog starts, through a real Airflow: triggerer, asset watcher, scheduler; and sensors that wait in it."""

from __future__ import annotations

import json
from functools import partial

import pytest

from airflow_kafka_spark.testing._processes import wait_until
from tests.support.lag import commit, end_of, produce
from tests.support.waiting import eventually

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1800)]

PATIENCE = 300
TOPIC = "watched-orders"


@pytest.fixture(scope="module")
def airflow(site):
    return site.airflow


@pytest.fixture(scope="module", autouse=True)
def given_up(airflow, kafka):
    """The run of a DAG whose sensors wait in vain, from the beginning of these tests."""
    kafka.create_topic("behind", 2)
    produce(kafka, "behind", 4)
    return airflow.trigger("gives_up")


def runs(airflow):
    return airflow.api("GET", "/dags/loads/dagRuns")["dag_runs"]


def is_in(airflow, run_id, task, state):
    return airflow.task("waits", run_id, task)["state"] == state


def test_a_backlog_starts_a_dag_once_until_it_has_moved(site, airflow, kafka):
    produce(kafka, TOPIC, 4)
    produce(kafka, TOPIC, 3)
    (run,) = eventually(lambda: runs(airflow), PATIENCE)
    assert airflow.wait("loads", run["dag_run_id"], 2 * PATIENCE) == "success", airflow.account("loads", run["dag_run_id"])
    assert site.value("loads", run["dag_run_id"], "load") in (5, 6, 7)
    produce(kafka, TOPIC, 1)
    commit(kafka, "loader", TOPIC, 2)
    assert len(eventually(lambda: len(found := runs(airflow)) > 1 and found, PATIENCE)) == 2


def test_sensors_wait_in_the_triggerer_and_in_workers_and_hand_on_what_they_saw(site, airflow, kafka):
    produce(kafka, TOPIC, 1)
    run_id = airflow.trigger("waits", conf={"topic": TOPIC})
    for task, state in (("deferred", "deferred"), ("rescheduled", "up_for_reschedule")):
        reached = partial(is_in, airflow, run_id, task, state)
        assert wait_until(reached, PATIENCE), airflow.account("waits", run_id)
    end = end_of(kafka, TOPIC)
    commit(kafka, "loader", TOPIC, end)
    assert airflow.wait("waits", run_id, 2 * PATIENCE) == "success", airflow.account("waits", run_id)
    for task in ("deferred", "poked", "rescheduled"):
        value = site.value("waits", run_id, task)
        assert (value["records"], value["partitions"][f"{TOPIC}-0"]["committed"]) == (0, end)
        if airflow.task("waits", run_id, task)["try_number"] > 1:
            assert "task-state-changed-externally" in airflow.account("waits", run_id)


def test_a_sensor_that_times_out_softly_is_skipped_and_one_without_an_interval_fails(airflow, given_up):
    assert airflow.wait("gives_up", given_up, 2 * PATIENCE) == "failed"
    states = {task: airflow.task("gives_up", given_up, task)["state"] for task in ("soft", "hard", "no_interval")}
    assert states == {"soft": "skipped", "hard": "failed", "no_interval": "failed"}, airflow.account("gives_up", given_up)
    for task, reason in (("hard", "AirflowSensorTimeout"), ("no_interval", "CronDataIntervalTimetable")):
        log = airflow.api("GET", f"/dags/gives_up/dagRuns/{given_up}/taskInstances/{task}/logs/1?full_content=true")
        assert reason in json.dumps(log), task
