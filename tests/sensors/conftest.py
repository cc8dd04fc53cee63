from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_kafka_spark.hooks.kafka import KafkaHook


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
    """As much of Airflow's context as a sensor needs: ``context(run_id, data_interval_start=...)``."""

    def make(run_id: str = "run1", dag_id: str = "dag", **dag_run: Any) -> dict[str, Any]:
        ti = SimpleNamespace(dag_id=dag_id, run_id=run_id, task_id="task", map_index=-1)
        return {"ti": ti, "dag_run": SimpleNamespace(**dag_run)}

    return make


@pytest.fixture(scope="session")
def airflow_db():
    """Airflow's own tables, in the home of this test run."""
    from airflow.utils.db import initdb

    initdb()


@pytest.fixture
def run_dag(airflow_db):
    """Run a DAG as ``dag.test()`` does, its triggers in line; the DAG run."""
    from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db
    from airflow.models.dagbundle import DagBundleModel
    from airflow.utils.session import create_session

    def go(dag: Any, **options: Any) -> Any:
        with create_session() as session:
            if not session.get(DagBundleModel, "testing"):
                session.add(DagBundleModel(name="testing"))
        bag = DagBag(dag_folder=os.devnull, bundle_name="testing")
        bag.bag_dag(dag)
        sync_bag_to_db(bag, "testing", None)
        return dag.test(**options)

    return go
