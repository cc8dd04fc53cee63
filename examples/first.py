"""From a topic into a table, once an hour. Needs the connections `kafka_default`, `spark_default` and `warehouse`."""

from airflow.sdk import DAG

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToSinkOperator
from airflow_kafka_spark.sinks import PostgresSink

with DAG("orders", schedule="@hourly", catchup=False):
    KafkaToSinkOperator(
        task_id="orders_to_warehouse",
        topics="orders",  # a name, a list, or topics_pattern=
        group_id="orders-warehouse",
        value=Json(schema="id bigint, customer string, amount decimal(12,2), placed_at timestamp"),
        sink=PostgresSink(conn_id="warehouse", table="sales.orders", mode="upsert", key=["id"]),
        kafka_conn_id="kafka_default",
        spark_conn_id="spark_default",
    )
