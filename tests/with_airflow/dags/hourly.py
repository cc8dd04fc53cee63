"""Pipelines of data intervals: one that Airflow catches up, and two that are backfilled."""

import os
from datetime import datetime, timedelta

from airflow.sdk import DAG
from airflow.timetables.interval import CronDataIntervalTimetable

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToSinkOperator
from airflow_kafka_spark.sinks import FilesSink, PostgresSink
from tests.support.pipelines import SCHEMA

BEGIN, LAST = (datetime.fromisoformat(os.environ[name]) for name in ("SITE_BEGIN", "SITE_LAST"))

flows = {
    "catchup": PostgresSink(conn_id="warehouse", table="catchup", window_column="window"),
    "aside": PostgresSink(conn_id="warehouse", table="aside", window_column="window"),
    "backwards": FilesSink(path=f"{os.environ['SITE_FILES']}/backwards"),
}
for name, sink in flows.items():
    with DAG(
        name,
        schedule=CronDataIntervalTimetable("0 * * * *", timezone="UTC"),
        start_date=BEGIN,
        end_date=LAST,  # a full hour may strike meanwhile
        catchup=name == "catchup",
        max_active_runs=8,
        is_paused_upon_creation=True,
        default_args={"retries": 6, "retry_delay": timedelta(seconds=1)},
    ):
        KafkaToSinkOperator(
            task_id="task",
            topics="hours",
            group_id=name,
            pipeline=name,
            ledger_topic="ledger-hours",
            window="interval",
            grace=0,
            value=Json(schema=SCHEMA),
            sink=sink,
        )
