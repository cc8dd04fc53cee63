"""Orders from the shop's database to a topic, and from there into a warehouse table and into Parquet files, each exactly once.

Needs four connections: ``shop`` and ``warehouse`` (PostgreSQL), ``kafka_default`` (extra: ``{"bootstrap.servers": ...}``) and
``spark_default`` (host ``local[*]`` will do), and the variable ``lake`` (a directory). ``make demo`` brings all of them.
"""

from __future__ import annotations

from datetime import timedelta

from airflow.sdk import DAG

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToSinkOperator, SourceToKafkaOperator
from airflow_kafka_spark.sinks import FilesSink, KafkaSink, PostgresSink
from airflow_kafka_spark.sources import JdbcSource

ORDER = Json(schema="id bigint, customer string, amount decimal(12,2), placed_at timestamp")

with DAG(
    "orders",
    schedule=None,
    catchup=False,
    default_args={"retries": 3, "retry_delay": timedelta(seconds=5)},
    tags=["kafka", "spark", "exactly-once"],
    doc_md=__doc__,
):
    publish = SourceToKafkaOperator(
        task_id="publish",
        source=JdbcSource(conn_id="shop", table="shop.orders", cursor="id"),
        sink=KafkaSink(topic="orders", auto_create=True, partitions=4, key="id", value=Json()),
    )

    load = KafkaToSinkOperator(
        task_id="orders_to_warehouse",
        topics="orders",
        group_id="orders-warehouse",
        follows="orders.publish",  # exactly what that has published: the counts have to agree
        value=ORDER,
        sink=PostgresSink(conn_id="warehouse", table="sales.orders", mode="upsert", key=["id"]),
        kafka_conn_id="kafka_default",
        spark_conn_id="spark_default",
    )

    archive = KafkaToSinkOperator(
        task_id="orders_to_lake",
        topics="orders",
        group_id="orders-lake",
        follows="orders.publish",
        value=ORDER,
        metadata_columns={"timestamp": "event_time"},
        sink=FilesSink(path="{{ var.value.lake }}/orders", format="parquet"),
    )

    publish >> [load, archive]
