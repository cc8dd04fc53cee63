"""Changes of PostgreSQL tables become topics, and a copy of one table follows its topic."""

from __future__ import annotations

from datetime import datetime

from airflow.sdk import DAG

from airflow_kafka_spark.formats import Debezium, Json, Raw
from airflow_kafka_spark.operators import KafkaToSinkOperator, SourceToKafkaOperator
from airflow_kafka_spark.sinks import KafkaSink, PostgresSink
from airflow_kafka_spark.sources import PostgresCdcSource

with DAG("capture_changes", schedule="*/10 * * * *", start_date=datetime(2026, 1, 1), catchup=False):
    capture = SourceToKafkaOperator(
        task_id="capture",
        pipeline="shop-changes",
        source=PostgresCdcSource(
            conn_id="shop",
            publication="airflow",
            slot="airflow_shop",
            topic_prefix="shop",
            tables=["public.orders", "public.customers"],
            snapshot="initial",
        ),
        sink=KafkaSink(topic_column="topic", key="key", key_format=Raw(), value_columns=["value"], value=Raw()),
    )
    copy = KafkaToSinkOperator(
        task_id="copy",
        pipeline="orders-copy",
        group_id="orders-copy",
        topics=["shop.public.orders"],
        key=Json(schema="id bigint"),
        value=Debezium(
            Json(schema="id bigint, customer string, amount decimal(12,2), placed_at timestamp"),
            timestamps="micros",
            decimals="unscaled",
        ),
        sink=PostgresSink(conn_id="warehouse", table="orders", mode="upsert", key=["id"], delete_enabled=True),
    )
    capture >> copy
