"""A DAG that a backlog starts, and sensors: in the triggerer, in a worker, and rescheduled; and a window after a sensor."""

import os
from datetime import timedelta

from airflow.sdk import DAG, Asset, AssetWatcher, task

from airflow_kafka_spark.sensors import KafkaIntervalSensor, KafkaLagSensor
from airflow_kafka_spark.triggers import KafkaLagTrigger
from tests.support.pipelines import make

TOPIC = "watched-orders"

backlog = KafkaLagTrigger(group_id="loader", topics=TOPIC, at_least_records=5, poll_interval=1, cooldown=0)
orders = Asset(name="orders-backlog", uri="kafka-backlog://orders", watchers=[AssetWatcher(name="orders", trigger=backlog)])

with DAG("loads", schedule=orders):

    @task
    def load(triggering_asset_events=None):
        (event,) = triggering_asset_events[orders]
        return event.extra["payload"]["records"]

    load()

# Airflow 3.3 fails a task that resumes before its executor has reported its deferral (apache/airflow#71172). On a busy machine
# that report takes seconds, so such a task may run again.
AGAIN = {"retries": 3, "retry_delay": timedelta(seconds=1)}

with DAG("waits", schedule=None, default_args=AGAIN):
    options = dict(group_id="loader", topics="{{ dag_run.conf.topic }}", at_most_records="{{ 0 }}", timeout=1800)
    KafkaLagSensor(task_id="deferred", deferrable=True, poke_interval=0.5, **options)
    KafkaLagSensor(task_id="poked", poke_interval=0.5, **options)
    KafkaLagSensor(task_id="rescheduled", mode="reschedule", poke_interval=10, **options)

with DAG("gives_up", schedule=None):
    behind = dict(group_id="nobody", topics="behind", at_most_records=0, poke_interval=1, timeout=10, deferrable=True)
    KafkaLagSensor(task_id="soft", soft_fail=True, **AGAIN, **behind)
    KafkaLagSensor(task_id="hard", **behind)
    KafkaIntervalSensor(task_id="no_interval", topics="behind")

with DAG("waits_and_loads", schedule=None, default_args=AGAIN):
    names = dict.fromkeys(("topics", "group_id", "pipeline"), "awaited")
    enough = dict(group_id="awaited", topics="awaited", at_least_records=700, poke_interval=0.5, timeout=1800)
    moved = make("files", f"{os.environ['SITE_FILES']}/awaited", ledger_topic="ledger-awaited", **names)
    KafkaLagSensor(task_id="enough", deferrable=True, **enough) >> moved
