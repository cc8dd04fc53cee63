"""A DAG that a backlog starts, through a real Airflow: triggerer, asset watcher, scheduler; and a sensor that defers there."""

from __future__ import annotations

import json
from functools import partial

import pytest

from airflow_kafka_spark.testing import EmbeddedAirflow
from airflow_kafka_spark.testing._processes import wait_until
from tests.support.lag import commit, end_of, produce
from tests.support.waiting import eventually

DAG = """
from datetime import timedelta
from airflow.sdk import DAG, Asset, AssetWatcher, task
from airflow_kafka_spark.sensors import KafkaLagSensor
from airflow_kafka_spark.triggers.lag import KafkaLagTrigger

backlog = KafkaLagTrigger(group_id="loader", topics="{topic}", at_least_records=5, poll_interval=0.5, cooldown=0)
orders = Asset(name="orders-backlog", uri="kafka-backlog://orders", watchers=[AssetWatcher(name="orders", trigger=backlog)])

with DAG("loads", schedule=orders):

    @task
    def load(triggering_asset_events=None):
        (event,) = triggering_asset_events[orders]
        return event.extra["payload"]["records"]

    load()

# Airflow (3.3) fails a task that goes on before its executor has said that it had paused (apache/airflow#71172): on a busy
# machine that is said seconds later. So the pause is long, and what it fails nevertheless is tried again.
with DAG("waits", schedule=None, default_args={{"retries": 3, "retry_delay": timedelta(seconds=1)}}):
    options = dict(group_id="loader", topics="{topic}", at_most_records=0, timeout=1800)
    KafkaLagSensor(task_id="deferred", deferrable=True, poke_interval=0.5, **options)
    KafkaLagSensor(task_id="poked", poke_interval=0.5, **options)
    KafkaLagSensor(task_id="rescheduled", mode="reschedule", poke_interval=15, **options)
"""
PATIENCE = 300


@pytest.fixture(scope="module")
def airflow(kafka, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dags")
    topic = "watched-orders"
    kafka.create_topic(topic)
    (folder / "watching.py").write_text(DAG.format(topic=topic))
    connections = {"kafka_default": kafka.connection_json()}
    with EmbeddedAirflow(folder, connections=connections, components=("triggerer",), parallelism=3) as server:
        server.topic = topic
        yield server


def runs(airflow):
    return airflow.api("GET", "/dags/loads/dagRuns")["dag_runs"]


def is_in(airflow, run_id, task, state):
    return airflow.task("waits", run_id, task)["state"] == state


def value(airflow, *what):
    found = airflow.xcom(*what)
    return json.loads(found) if isinstance(found, str) else found


@pytest.mark.airflow
@pytest.mark.timeout(1800)
def test_a_backlog_starts_a_dag_once_until_it_has_moved(airflow, kafka):
    produce(kafka, airflow.topic, 4)
    produce(kafka, airflow.topic, 3)
    (run,) = eventually(lambda: runs(airflow), PATIENCE)
    assert airflow.wait("loads", run["dag_run_id"], 2 * PATIENCE) == "success", airflow.account("loads", run["dag_run_id"])
    assert value(airflow, "loads", run["dag_run_id"], "load") in (5, 6, 7)
    produce(kafka, airflow.topic, 1)
    commit(kafka, "loader", airflow.topic, 2)
    assert len(eventually(lambda: len(found := runs(airflow)) > 1 and found, PATIENCE)) == 2


@pytest.mark.airflow
@pytest.mark.timeout(1800)
def test_sensors_wait_in_the_triggerer_and_in_workers(airflow, kafka):
    produce(kafka, airflow.topic, 1)
    run_id = airflow.trigger("waits")
    for task, state in (("deferred", "deferred"), ("rescheduled", "up_for_reschedule")):
        reached = partial(is_in, airflow, run_id, task, state)
        assert wait_until(reached, PATIENCE), airflow.account("waits", run_id)
    commit(kafka, "loader", airflow.topic, end_of(kafka, airflow.topic))
    assert airflow.wait("waits", run_id, 2 * PATIENCE) == "success", airflow.account("waits", run_id)
    for task in ("deferred", "poked", "rescheduled"):
        assert value(airflow, "waits", run_id, task)["records"] == 0
        if airflow.task("waits", run_id, task)["try_number"] > 1:
            assert "task-state-changed-externally" in airflow.account("waits", run_id)
