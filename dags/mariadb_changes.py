"""Changes of MariaDB tables become topics, and a copy of one table in PostgreSQL follows its topic.

The rows that are there come first, in chunks; windows of the log go on in between. Needs the connections ``shop_log`` (MariaDB,
type ``mysql``), ``warehouse`` (PostgreSQL), ``kafka_default`` and ``spark_default``, and the topics ``shop.shop.orders`` and
``shop.shop.customers``.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from airflow.sdk import DAG

from airflow_kafka_spark.formats import Debezium, Json, Raw
from airflow_kafka_spark.operators import KafkaToSinkOperator, SourceToKafkaOperator
from airflow_kafka_spark.sinks import KafkaSink, PostgresSink
from airflow_kafka_spark.sources import MySqlCdcSource

with DAG(
    "mariadb_changes",
    schedule="*/10 * * * *",
    start_date=datetime(2026, 1, 1),
    catchup=False,
    max_active_runs=1,
    default_args={"retries": 3, "retry_delay": timedelta(seconds=30)},
    tags=["kafka", "spark", "exactly-once", "cdc"],
    doc_md=__doc__,
):
    capture = SourceToKafkaOperator(
        task_id="capture",
        pipeline="mariadb-shop-changes",
        source=MySqlCdcSource(
            conn_id="shop_log",
            topic_prefix="shop",
            tables=["shop.orders", "shop.customers"],
            snapshot="initial",
        ),
        sink=KafkaSink(topic_column="topic", key="key", key_format=Raw(), value_columns=["value"], value=Raw()),
    )
    copy = KafkaToSinkOperator(
        task_id="copy",
        pipeline="mariadb-orders-copy",
        group_id="mariadb-orders-copy",
        topics=["shop.shop.orders"],
        key=Json(schema="id bigint"),
        value=Debezium(
            Json(schema="id bigint, customer string, amount decimal(12,2), placed_at timestamp_ntz"),
            timestamps="micros",  # placed_at is a DATETIME(6); up to DATETIME(3) they are "millis"
            decimals="unscaled",
        ),
        sink=PostgresSink(conn_id="warehouse", table="orders", mode="upsert", key=["id"], delete_enabled=True),
    )
    capture >> copy
