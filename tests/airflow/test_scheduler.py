"""Through a real Airflow: scheduler, LocalExecutor, task processes; killed, retried by Airflow itself, and cleared."""

from __future__ import annotations

import json

import pytest

from airflow_kafka_spark import faults
from airflow_kafka_spark.testing import EmbeddedAirflow
from tests.support.connect import AIRFLOW_PATH
from tests.support.pipelines import COLUMNS, SPARK, Pipeline

DAG = """
from datetime import timedelta
from airflow.sdk import DAG
from tests.support.pipelines import make

for kind, place, topic, name in {flows!r}:
    with DAG(name, schedule=None, default_args={{"retries": 2, "retry_delay": timedelta(seconds=1)}}):
        make(kind, place, topics=topic, group_id=name, pipeline=name, ledger_topic="ledger-" + name)
"""

PATIENCE = 900


@pytest.fixture(scope="module")
def airflow(kafka, postgres, tmp_path_factory):
    """Airflow with one DAG per sink; a fault at ``close.begin`` fires whenever its file is removed."""
    directory = tmp_path_factory.mktemp("airflow")
    flows = []
    for kind in ("files", "postgres"):
        topic, name, place = f"scheduled-{kind}", f"scheduled_{kind}", str(directory / "table")
        kafka.create_topic(topic, 3)
        if kind == "postgres":
            place = name
            with postgres.connect(autocommit=True) as connection:
                connection.execute(f"CREATE TABLE {place} ({COLUMNS})")
        flows.append((kind, place, topic, name))
    (directory / "dags").mkdir()
    (directory / "dags" / "flows.py").write_text(DAG.format(flows=flows))
    once = directory / "fault"
    once.touch()
    connections = {"kafka_default": kafka.connection_json(), "spark_default": SPARK, "warehouse": postgres.connection_uri()}
    env = {faults.FAULT: "close.begin", faults.ONCE: str(once), "PYTHONPATH": AIRFLOW_PATH}
    with EmbeddedAirflow(directory / "dags", connections=connections, env=env) as server:
        server.flows = {
            kind: Pipeline(kafka=kafka, postgres=postgres, kind=kind, name=name, topic=topic, place=place, directory=directory)
            for kind, place, topic, name in flows
        }
        server.once = once
        yield server


def report_of(airflow, flow, run_id):
    value = airflow.xcom(flow.name, run_id, "task")
    return json.loads(value) if isinstance(value, str) else value


@pytest.mark.airflow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("kind", ["files", "postgres"])
def test_killed_retried_by_airflow_and_cleared_every_record_is_there_exactly_once(airflow, kind):
    flow = airflow.flows[kind]
    # Whatever an earlier try at this test has left.
    before = flow._produced
    flow.reports.clear()
    airflow.once.touch()
    flow.produce(500)
    run_id, state = airflow.run(flow.name, PATIENCE)
    assert state == "success", airflow.account(flow.name, run_id)
    first = report_of(airflow, flow, run_id)
    flow.reports.append(first)
    assert flow.check() == before + 500

    flow.produce(700)
    airflow.once.unlink()
    run_id, state = airflow.run(flow.name, PATIENCE)
    assert airflow.once.exists(), "nothing was killed"
    assert state == "success", airflow.account(flow.name, run_id)
    assert airflow.task(flow.name, run_id, "task")["try_number"] == 2
    report = report_of(airflow, flow, run_id)
    assert (int(report["window"]), report["attempts"]) == (int(first["window"]) + 1, 2)
    flow.reports.append(report)
    assert flow.check() == before + 1200

    airflow.clear(flow.name, run_id, "task")
    assert airflow.wait(flow.name, run_id, PATIENCE) == "success", airflow.account(flow.name, run_id)
    assert airflow.task(flow.name, run_id, "task")["try_number"] == 3
    assert report_of(airflow, flow, run_id) == report
    assert flow.check() == before + 1200
    assert "is complete already" in airflow.task_log(flow.name, run_id, "task", 3)


@pytest.mark.airflow
@pytest.mark.timeout(1200)
def test_the_log_of_a_task_is_readable(airflow):
    flow = airflow.flows["files"]
    flow.produce(100)
    run_id, state = airflow.run(flow.name, PATIENCE)
    assert state == "success", airflow.account(flow.name, run_id)
    log = airflow.task_log(flow.name, run_id, "task")
    assert "100 records read" in log
    assert f"{flow.topic}-0[" in log
    for secret in ("password", "sasl.jaas"):
        assert secret not in log
