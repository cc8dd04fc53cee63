"""Order events from Kafka into a PostgreSQL table and into Parquet files, each event exactly once.

Needs three connections: ``kafka_default`` (extra: ``{"bootstrap.servers": ...}``), ``spark_default`` (host ``local[*]`` will do)
and ``warehouse`` (PostgreSQL), and the variable ``lake`` (a directory). ``make demo`` brings all of them.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToSinkOperator
from airflow_kafka_spark.sinks import FilesSink, PostgresSink

ORDER = Json(schema="id bigint, customer string, amount decimal(12,2), placed_at timestamp")

with DAG(
    "orders",
    schedule=None,
    catchup=False,
    default_args={"retries": 3, "retry_delay": timedelta(seconds=5)},
    tags=["kafka", "spark", "exactly-once"],
    doc_md=__doc__,
):
    KafkaToSinkOperator(
        task_id="orders_to_warehouse",
        topics="orders",
        group_id="orders-warehouse",
        value=ORDER,
        sink=PostgresSink(conn_id="warehouse", table="sales.orders", mode="upsert", key=["id"]),
        kafka_conn_id="kafka_default",
        spark_conn_id="spark_default",
    )

    KafkaToSinkOperator(
        task_id="orders_to_lake",
        topics="orders",
        group_id="orders-lake",
        value=ORDER,
        metadata_columns={"timestamp": "event_time"},
        sink=FilesSink(path="{{ var.value.lake }}/orders", format="parquet"),
    )
