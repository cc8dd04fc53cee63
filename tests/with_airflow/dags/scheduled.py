"""A pipeline whose task is killed, retried by Airflow, and cleared."""

import os
from datetime import timedelta

from airflow.sdk import DAG

from tests.support.pipelines import make

with DAG("scheduled", schedule=None, default_args={"retries": 2, "retry_delay": timedelta(seconds=1)}):
    names = dict.fromkeys(("topics", "group_id", "pipeline"), "scheduled")
    make("files", f"{os.environ['SITE_FILES']}/scheduled", ledger_topic="ledger-scheduled", **names)
