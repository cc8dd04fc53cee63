"""The DAG of docs/testing.md, where it is `dags/orders.py`."""

from airflow.sdk import DAG

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToSinkOperator
from airflow_kafka_spark.sinks import PostgresSink

with DAG("orders", schedule=None) as dag:
    KafkaToSinkOperator(
        task_id="orders_to_warehouse",
        topics="orders",
        group_id="orders-warehouse",
        value=Json(schema="id bigint, customer string"),
        sink=PostgresSink(conn_id="warehouse", table="orders", mode="upsert", key=["id"]),
    )
