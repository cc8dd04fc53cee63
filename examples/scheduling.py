"""A window when enough records wait, with retries and a pool. Needs `warehouse` and the pool `spark`."""

from datetime import timedelta

from airflow.sdk import DAG

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToSinkOperator
from airflow_kafka_spark.sensors import KafkaLagSensor
from airflow_kafka_spark.sinks import PostgresSink

with DAG(
    "orders_when_worth_it",
    schedule="*/15 * * * *",
    catchup=False,
    max_active_runs=1,
    default_args={
        "retries": 4,
        "retry_delay": timedelta(seconds=30),
        "retry_exponential_backoff": True,
        "max_retry_delay": timedelta(minutes=10),
        "execution_timeout": timedelta(hours=2),
    },
):
    enough = KafkaLagSensor(
        task_id="enough",
        pipeline="orders_when_worth_it.load",
        group_id="orders-warehouse",
        topics="orders",
        at_least_records=100_000,
        at_least_seconds=3600,
        deferrable=True,
        timeout=600,
        soft_fail=True,
    )
    load = KafkaToSinkOperator(
        task_id="load",
        topics="orders",
        group_id="orders-warehouse",
        max_records=5_000_000,
        value=Json(schema="id bigint, customer string, amount decimal(12,2), placed_at timestamp"),
        sink=PostgresSink(conn_id="warehouse", table="sales.orders", mode="upsert", key=["id"]),
        pool="spark",
    )
    enough >> load
