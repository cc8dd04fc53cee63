"""Sensors as Airflow serializes them, and the cost of a DAG file with many sensors. tests/with_airflow has running DAGs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from airflow_kafka_spark.provider_info import get_provider_info

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
from airflow_kafka_spark.sinks import KafkaSink

KINDS = (
    lambda name: KafkaLagSensor(task_id=name, group_id="g", topics="t", at_most_records=0, deferrable=True),
    lambda name: KafkaIntervalSensor(task_id=name, topics="t"),
    lambda name: KafkaWindowSensor(task_id=name, pipeline="p"),
    lambda name: KafkaToKafkaOperator(task_id=name, topics="t", group_id="g", sink=KafkaSink(topic="u")),
)
""",
    'KINDS[number % 4](f"t{number}")',
)
PARSE = """if True:
    import json, sys, time
    from airflow.dag_processing.dagbag import DagBag
    seconds = [time.process_time()]
    for folder in sys.argv[1:]:
        bag = DagBag(dag_folder=folder, bundle_name="testing")
        assert not bag.import_errors, bag.import_errors
        assert len(bag.dags["many"].tasks) == 50
        seconds.append(time.process_time())
    print(json.dumps(seconds))
"""


@pytest.mark.parametrize(("kind", "classes"), [("sensors", 5), ("triggers", 4)])
def test_provider_info_names_every_module_that_has_one(kind, classes):
    from importlib import import_module

    listed = [name for entry in get_provider_info()[kind] for name in entry["python-modules"]]
    found = {
        each
        for name in listed
        for each in vars(import_module(name))
        if each.startswith(("Kafka", "Source")) and each.endswith(kind[:-1].title())
    }
    assert len(found) == classes, found


def test_a_dag_file_with_many_of_them_is_parsed_nearly_as_fast_as_one_with_empty_ones(tmp_path):
    """The files are parsed in a separate process, because imports count. The time of Airflow's own imports measures the machine's
    speed.
    """
    for name, (imports, task) in (("empty", EMPTY), ("ours", OURS)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "many.py").write_text(FILE.format(imports=imports, task=task))
    command = [sys.executable, "-c", PARSE, str(tmp_path / "empty"), str(tmp_path / "ours")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=True)
    airflow, empty, ours = json.loads(done.stdout.splitlines()[-1])
    assert (ours - empty) - (empty - airflow) < airflow / 2, (airflow, empty, ours)
