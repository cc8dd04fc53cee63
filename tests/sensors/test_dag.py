"""Sensors in a DAG, run by Airflow itself; and what a DAG file full of them costs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import datetime, timezone

import pytest
from airflow.sdk import DAG

from airflow_kafka_spark.provider_info import get_provider_info
from airflow_kafka_spark.sensors import KafkaIntervalSensor, KafkaLagSensor
from tests.support.lag import commit, produce

FILE = """
from datetime import datetime
from airflow.sdk import DAG
{imports}

with DAG("many", schedule=None, start_date=datetime(2026, 1, 1)):
    for number in range(50):
        {task}
"""
EMPTY = ("from airflow.providers.standard.operators.empty import EmptyOperator", 'EmptyOperator(task_id=f"t{number}")')
OURS = (
    """
from airflow_kafka_spark.operators import KafkaToKafkaOperator
from airflow_kafka_spark.sensors import KafkaIntervalSensor, KafkaLagSensor, KafkaWindowSensor

KINDS = (
    lambda name: KafkaLagSensor(task_id=name, group_id="g", topics="t", at_most_records=0, deferrable=True),
    lambda name: KafkaIntervalSensor(task_id=name, topics="t"),
    lambda name: KafkaWindowSensor(task_id=name, pipeline="p"),
    lambda name: KafkaToKafkaOperator(task_id=name, topics="t", group_id="g", topic="u"),
)
""",
    'KINDS[number % 4](f"t{number}")',
)
PARSE = """if True:
    import sys, time
    from airflow.dag_processing.dagbag import DagBag
    begun = time.process_time()
    bag = DagBag(dag_folder=sys.argv[1], bundle_name="testing")
    assert not bag.import_errors, bag.import_errors
    print(len(bag.dags["many"].tasks), time.process_time() - begun, begun)
"""


@pytest.mark.parametrize("kind", ["sensors", "triggers"])
def test_airflow_is_told_of_every_module_that_has_one(kind):
    from importlib import import_module

    listed = [name for entry in get_provider_info()[kind] for name in entry["python-modules"]]
    assert len(listed) == 3
    for name in listed:
        assert [each for each in vars(import_module(name)) if each.startswith("Kafka") and each.endswith(kind[:-1].title())]


@pytest.mark.airflow
@pytest.mark.parametrize("deferrable", [False, True], ids=["poke", "deferred"])
def test_a_sensor_waits_in_a_dag_and_hands_on_what_it_saw(kafka, topic, run_dag, unique, deferrable):
    produce(kafka, topic, 4)
    later = threading.Timer(5, lambda: commit(kafka, topic, topic, 4))
    with DAG(unique("dag"), schedule=None, start_date=datetime(2026, 1, 1, tzinfo=timezone.utc)) as dag:
        options = {"topics": "{{ dag_run.conf.topic }}", "at_most_records": "{{ 0 }}", "poke_interval": 0.5}
        KafkaLagSensor(task_id="wait", group_id=topic, deferrable=deferrable, timeout=600, **options)
    later.start()
    dag_run = run_dag(dag, run_conf={"topic": topic})
    later.join()
    assert dag_run.state == "success"
    (ti,) = dag_run.get_task_instances()
    value = ti.xcom_pull(task_ids="wait", run_id=dag_run.run_id)
    assert value["records"] == 0
    assert value["partitions"][f"{topic}-0"]["committed"] == 4


@pytest.mark.airflow
def test_a_sensor_that_times_out_softly_is_skipped_in_a_dag(kafka, topic, run_dag, unique):
    produce(kafka, topic, 4)
    with DAG(unique("dag"), schedule=None, start_date=datetime(2026, 1, 1, tzinfo=timezone.utc)) as dag:
        common = {"group_id": topic, "topics": topic, "at_most_records": 0, "poke_interval": 0.5, "timeout": 1}
        KafkaLagSensor(task_id="soft", soft_fail=True, deferrable=True, **common)
        KafkaLagSensor(task_id="hard", deferrable=True, **common)
        KafkaIntervalSensor(task_id="no_interval", topics=topic)
    dag_run = run_dag(dag)
    states = {ti.task_id: str(ti.state) for ti in dag_run.get_task_instances()}
    assert states == {"soft": "skipped", "hard": "failed", "no_interval": "failed"}


def test_a_dag_file_with_many_of_them_is_parsed_nearly_as_fast_as_one_with_empty_ones(tmp_path):
    """In processes of their own: what a file's imports cost is part of it, apart from Airflow's own, which tell how fast the
    machine is."""
    seconds, airflow = {}, []
    for name, (imports, task) in (("empty", EMPTY), ("ours", OURS)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "many.py").write_text(FILE.format(imports=imports, task=task))
        env = {**os.environ, "AIRFLOW_HOME": os.environ["AIRFLOW_HOME"]}
        took = []
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-c", PARSE, str(folder)], env=env, capture_output=True, text=True, timeout=400, check=True
            )
            tasks, elapsed, before = done.stdout.split()[-3:]
            assert int(tasks) == 50
            took.append(float(elapsed))
            airflow.append(float(before))
        seconds[name] = min(took)
    assert seconds["ours"] - seconds["empty"] < min(airflow) / 2, (seconds, airflow)
