"""Pipelines that the pages show: with and without past windows, with awkward names, and with a task that reports progress."""

import json
import os
import time

from airflow.sdk import DAG, task

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToKafkaOperator, KafkaToSinkOperator
from airflow_kafka_spark.sinks import FilesSink, KafkaSink
from tests.support.pipelines import SCHEMA
from tests.ui.past import AWKWARD

RELEASE = f"{os.environ['SITE_FILES']}/release"
value = Json(schema=SCHEMA)

with DAG("shop", schedule=None):
    for name, place in (("orders", f"{os.environ['SITE_LAKE']}/orders"), ("never_ran", "/tmp/lake/never_ran")):
        sink = FilesSink(path=place)
        KafkaToSinkOperator(task_id=name, topics=["ui-orders"], group_id=f"ui-{name}", value=value, sink=sink)

with DAG("billing", schedule=None):
    KafkaToKafkaOperator(
        task_id="copy", topics=["ui-orders"], group_id="ui-copy", sink=KafkaSink(topic="ui-copied"), pipeline="billing/copy"
    )

with DAG("odd", schedule=None):
    for number, name in enumerate(AWKWARD):
        KafkaToSinkOperator(
            task_id=f"odd_{number}",
            topics=["ui-odd"],
            group_id=f"ui-odd-{number}",
            value=value,
            pipeline=name,
            sink=FilesSink(path="/tmp/lake/odd"),
        )

with DAG("states", schedule=None):

    @task
    def hold(**context):
        # A mapped task says how it is configured, since its DAG file does not.
        configuration = {"operator": "KafkaToSinkOperator", "arguments": {"value": {"class": "String", "arguments": {}}}}
        context["task_state_store"].set("kafka_spark.configuration", json.dumps(configuration))
        # What an operator says while its job runs.
        now = time.time()
        said = {
            "window": 2, "name": "2", "splits": 4, "splits_done": 1, "records_total": 30, "records_done": 8,
            "started_at": now - 10, "updated_at": now, "step": "move",
        }  # fmt: skip
        context["task_state_store"].set("kafka_spark.progress", said)
        while not os.path.exists(RELEASE):
            time.sleep(0.1)
        raise ValueError("it was released")

    hold()

with DAG("hours", schedule=None):
    KafkaToSinkOperator(
        task_id="load",
        topics="ui-hours",
        group_id="ui-hours",
        value=Json(schema="id bigint"),
        sink=FilesSink(path=f"{os.environ['SITE_LAKE']}/hours"),
        window="interval",
        grace=0,
    )

with DAG("broken", schedule=None):
    # There is no such topic: it fails before it plans a window.
    KafkaToSinkOperator(
        task_id="load", topics="ui-no-such-topic", group_id="ui-broken", value=value, sink=FilesSink(path="/tmp/lake/broken")
    )
