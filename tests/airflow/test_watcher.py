"""A DAG that a backlog starts, through a real Airflow: triggerer, asset watcher, scheduler; and a sensor that defers there."""

from __future__ import annotations

import json

import pytest

from airflow_kafka_spark.testing import EmbeddedAirflow
from tests.support.lag import commit, end_of, produce, wait_for

DAG = """
from datetime import datetime
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

with DAG("waits", schedule=None):
    options = dict(group_id="loader", topics="{topic}", at_most_records=0, poke_interval=0.5, timeout=120)
    KafkaLagSensor(task_id="deferred", deferrable=True, **options)
    KafkaLagSensor(task_id="poked", **options)
    KafkaLagSensor(task_id="rescheduled", mode="reschedule", **options)
"""


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


def value(airflow, *what):
    found = airflow.xcom(*what)
    return json.loads(found) if isinstance(found, str) else found


@pytest.mark.airflow
@pytest.mark.timeout(600)
def test_a_backlog_starts_a_dag_once_until_it_has_moved(airflow, kafka):
    produce(kafka, airflow.topic, 4)
    produce(kafka, airflow.topic, 3)
    (run,) = wait_for(lambda: runs(airflow), 120)
    assert airflow.wait("loads", run["dag_run_id"]) == "success"
    assert value(airflow, "loads", run["dag_run_id"], "load") in (5, 6, 7)
    produce(kafka, airflow.topic, 1)
    commit(kafka, "loader", airflow.topic, 2)
    assert len(wait_for(lambda: len(found := runs(airflow)) > 1 and found, 60)) == 2


@pytest.mark.airflow
@pytest.mark.timeout(600)
def test_sensors_wait_in_the_triggerer_and_in_workers(airflow, kafka):
    produce(kafka, airflow.topic, 1)
    run_id = airflow.trigger("waits")
    wait_for(lambda: airflow.task("waits", run_id, "deferred")["state"] == "deferred", 60)
    wait_for(lambda: airflow.task("waits", run_id, "rescheduled")["state"] == "up_for_reschedule", 60)
    commit(kafka, "loader", airflow.topic, end_of(kafka, airflow.topic))
    assert airflow.wait("waits", run_id) == "success", airflow.log("triggerer").read_text()[-3000:]
    for task in ("deferred", "poked", "rescheduled"):
        assert value(airflow, "waits", run_id, task)["records"] == 0
