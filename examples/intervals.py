"""Each hour of a topic, complete, into a table: catch-up, backfills and replays. Needs `kafka_default` and `warehouse`."""

from datetime import datetime, timedelta

from airflow.sdk import DAG
from airflow.timetables.interval import CronDataIntervalTimetable

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToSinkOperator
from airflow_kafka_spark.sinks import PostgresSink

with DAG(
    "orders_by_hour",
    schedule=CronDataIntervalTimetable("0 * * * *", timezone="UTC"),
    start_date=datetime(2026, 1, 1),
    catchup=True,
    max_active_runs=8,
):
    KafkaToSinkOperator(
        task_id="load",
        topics="orders",
        group_id="orders-by-hour",
        window="interval",
        grace=timedelta(minutes=1),
        value=Json(schema="id bigint, customer string, amount decimal(12,2)"),
        sink=PostgresSink(conn_id="warehouse", table="sales.orders", window_column="window"),
    )
