"""The configuration of a task that Airflow stores with its DAG: equal at each parse, and without secrets."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from airflow.sdk import DAG
from airflow.serialization.serialized_objects import DagSerialization

from airflow_kafka_spark.formats import Avro, Json
from airflow_kafka_spark.operators import KafkaToKafkaOperator, KafkaToSinkOperator, SourceToKafkaOperator
from airflow_kafka_spark.operators.binding import Run
from airflow_kafka_spark.operators.visibility.progress import CONFIGURATION_KEY
from airflow_kafka_spark.sinks import FilesSink, KafkaSink, PostgresSink
from airflow_kafka_spark.sources import FilesSource
from airflow_kafka_spark.transforms import Filter
from airflow_kafka_spark.ui.airflow_metadata import _list_tasks


def made():
    with DAG("shop", schedule=None) as dag:
        KafkaToSinkOperator(
            task_id="load",
            topics=["orders"],
            group_id="warehouse",
            value=Avro(registry="registry_eu"),
            key=Json(schema="id bigint"),
            sink=PostgresSink("warehouse", "public.orders"),
            spark_conf={"spark.hadoop.fs.s3a.secret.key": "geheim", "spark.executor.cores": "2"},
            transforms=[lambda frame: frame],
            retries=3,
        )
        KafkaToKafkaOperator(
            task_id="copy",
            topics="orders",
            group_id="copy",
            sink=KafkaSink(topic="eu", producer_config={"sasl.password": "geheim"}),
        )
        SourceToKafkaOperator(task_id="publish", source=FilesSource("s3a://me:geheim@lake/x"), sink=KafkaSink(topic="orders"))
    return dag


def test_the_configuration_has_arguments_connections_and_guarantee_without_secrets():
    text = made().get_task("load").configuration
    found = json.loads(text)
    assert (found["operator"], found["guarantee"]) == ("KafkaToSinkOperator", "exactly-once")
    assert found["connections"] == {
        "kafka_conn_id": "kafka_default", "sink.conn_id": "warehouse", "spark_conn_id": "spark_default",
        "value.registry": "registry_eu",
    }  # fmt: skip
    arguments = found["arguments"]
    assert arguments["key"] == {"class": "Json", "arguments": {"schema": "id bigint"}}
    assert arguments["spark_conf"] == {"spark.hadoop.fs.s3a.secret.key": "***", "spark.executor.cores": "2"}
    assert "retries" not in arguments and "max_errors" not in arguments
    assert json.loads(made().get_task("copy").configuration)["arguments"]["sink"]["arguments"]["producer_config"] == {
        "sasl.password": "***"
    }
    assert all("geheim" not in task.configuration for task in made().tasks)


def test_it_is_the_same_at_each_parse_and_comes_out_of_airflows_serialized_dag():
    one, two = (DagSerialization.to_dict(made()) for _ in range(2))
    assert one == two
    assert DagSerialization.from_dict(one).get_task("load").configuration == made().get_task("load").configuration
    tasks = {task.task_id: task for task in _list_tasks("shop", one)}
    assert json.loads(tasks["publish"].configuration)["arguments"]["source"] == {
        "class": "FilesSource", "arguments": {"path": "s3a://***@lake/x"},
    }  # fmt: skip


@pytest.mark.parametrize(("map_index", "pipeline", "stored"), [(-1, "p", False), (1, "p", True), (-1, "p-{{ ds }}", True)])
def test_a_task_that_no_dag_file_names_stores_its_configuration_when_it_runs(map_index, pipeline, stored):
    with DAG("mapped", schedule=None):
        common = {"group_id": "g", "value": Json(schema="id bigint"), "sink": FilesSink(path="/x")}
        mapped = KafkaToSinkOperator.partial(task_id="load", **common).expand(topics=["a", "b"], pipeline=[pipeline])
    task = mapped.unmap({"topics": "b", "pipeline": pipeline})
    store = {}
    context = {"task_state_store": SimpleNamespace(set=store.__setitem__)}
    task.show(context, Run("mapped", "run1", "load", map_index))
    assert store.keys() == ({CONFIGURATION_KEY} if stored else set())
    if not stored:
        return
    arguments = json.loads(store[CONFIGURATION_KEY])["arguments"]
    assert (arguments["topics"], arguments["value"]) == ("b", {"class": "Json", "arguments": {"schema": "id bigint"}})


def test_options_of_transforms_are_described():
    with DAG("other", schedule=None):
        task = KafkaToSinkOperator(
            task_id="load",
            topics="a",
            group_id="g",
            value=Json(schema="id bigint"),
            sink=FilesSink(path="/x"),
            transforms=[Filter()],
        )
    assert json.loads(task.configuration)["arguments"]["transforms"] == [{"class": "Filter", "arguments": {}}]
