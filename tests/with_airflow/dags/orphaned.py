"""A pipeline whose first attempt stops before its sink commits, so that the scheduler can be killed meanwhile."""

import os

from airflow.sdk import DAG

from airflow_kafka_spark import faults
from tests.support.pipelines import make

# The process of the task reads this file before it begins the window.
os.environ[faults.FAULT] = "sink.staged:stop"
os.environ[faults.ONCE] = f"{os.environ['SITE_FILES']}/orphaned-stopped"

with DAG("orphaned", schedule=None, default_args={"retries": 2}):
    names = dict.fromkeys(("topics", "group_id", "pipeline"), "orphaned")
    make("files", f"{os.environ['SITE_FILES']}/orphaned", ledger_topic="ledger-orphaned", **names)
