"""Through Airflow's scheduler and the LocalExecutor: a task that is killed, retried by Airflow itself, and cleared."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_kafka_spark.windows.memory import LedgerRecord, fold_records
from airflow_kafka_spark.windows.model import Tries
from tests.support.alarms import alarms
from tests.support.oracle import committed_records
from tests.support.pipelines import Pipeline

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(1200)]

PATIENCE = 900
DAG = "scheduled"


@pytest.fixture(scope="module")
def flow(site, kafka):
    kafka.create_topic(DAG, 3)
    place = str(site.files / DAG)
    return Pipeline(kafka=kafka, postgres=None, kind="files", name=DAG, topic=DAG, place=place, directory=site.files)


@pytest.fixture(scope="module")
def ran(site, flow):
    """Return the id of a first run over 500 records."""
    flow.produce(500)
    run_id, state = site.airflow.run(DAG, PATIENCE)
    assert state == "success", site.airflow.account(DAG, run_id)
    flow.reports.append(site.value(DAG, run_id, "task"))
    return run_id


def counted(flow, window):
    """Return Airflow's counters at the attempts at a window, as the ledger holds them."""
    ledger = committed_records(flow.kafka.connection_extra(), f"ledger-{DAG}")
    memory = fold_records(DAG, (LedgerRecord(key, value, offset) for _, offset, key, value in ledger))
    return memory.entries[window].tries


def test_the_log_of_a_task_is_readable(site, flow, ran):
    assert flow.check() == 500
    log = site.airflow.read_task_log(DAG, ran, "task")
    assert "500 records read" in log
    assert f"{flow.topic}-0[" in log
    path = f"/dags/{DAG}/dagRuns/{ran}/taskInstances/task/logs/1?full_content=true"
    lines = [line for line in site.airflow.api("GET", path)["content"] if isinstance(line, dict)]
    assert len(lines) > 5 and [line for line in lines if line.get("level") in ("warning", "error", "critical")] == []
    assert alarms(log) == []
    for secret in ("password", "sasl.jaas"):
        assert secret not in log


def test_killed_retried_by_airflow_and_cleared_every_record_is_there_exactly_once(site, flow, ran):
    airflow, fault = site.airflow, Path(site.files, "fault")
    before = flow._produced
    flow.produce(700)
    fault.unlink()
    run_id, state = airflow.run(DAG, PATIENCE)
    assert fault.exists(), "nothing was killed"
    assert state == "success", airflow.account(DAG, run_id)
    assert airflow.task(DAG, run_id, "task")["try_number"] == 2
    report = site.value(DAG, run_id, "task")
    assert (int(report["window"]), report["attempts"]) == (int(flow.reports[-1]["window"]) + 1, 2)
    flow.reports.append(report)
    assert flow.check() == before + 700
    assert counted(flow, int(report["window"])) == {f"{DAG}/{run_id}/task": Tries(2, 2, 0)}

    airflow.clear(DAG, run_id, "task")
    assert airflow.wait(DAG, run_id, PATIENCE) == "success", airflow.account(DAG, run_id)
    cleared = airflow.task(DAG, run_id, "task")
    assert (cleared["try_number"], cleared["max_tries"]) == (3, 2 + 2), "the last try's number and its retries"
    assert site.value(DAG, run_id, "task") == report
    assert flow.check() == before + 700
    assert "is complete already" in airflow.read_task_log(DAG, run_id, "task", 3)
