from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


@pytest.fixture(autouse=True)
def connection(kafka, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", kafka.connection_json())


@pytest.fixture
def hook():
    with KafkaHook(timeout=20) as hook:
        yield hook


@pytest.fixture
def topic(kafka, unique):
    """A new topic of two partitions."""
    topic = unique("lag")
    kafka.create_topic(topic, 2)
    return topic


@pytest.fixture
def context():
    """Return the part of Airflow's context that a sensor needs: ``context(run_id, data_interval_start=...)``."""

    def make(run_id: str = "run1", dag_id: str = "dag", **dag_run: Any) -> dict[str, Any]:
        ti = SimpleNamespace(dag_id=dag_id, run_id=run_id, task_id="task", map_index=-1)
        return {"ti": ti, "dag_run": SimpleNamespace(**dag_run)}

    return make
