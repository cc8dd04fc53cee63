"""A backlog of a topic starts a DAG. Needs `kafka_default`, `spark_default` and `warehouse`."""

from airflow.sdk import DAG, Asset, AssetWatcher

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToSinkOperator
from airflow_kafka_spark.sinks import PostgresSink
from airflow_kafka_spark.triggers import KafkaLagTrigger

backlog = KafkaLagTrigger(pipeline="orders", topics="orders", at_least_records=100_000, at_least_seconds=900, poll_interval=30)
orders = Asset(name="orders-backlog", uri="kafka-backlog://orders", watchers=[AssetWatcher(name="orders", trigger=backlog)])

with DAG("orders_on_backlog", schedule=orders, max_active_runs=1):
    KafkaToSinkOperator(
        task_id="load",
        pipeline="orders",
        topics="orders",
        group_id="orders",
        value=Json(schema="id bigint, customer string"),
        sink=PostgresSink(conn_id="warehouse", table="sales.orders"),
    )
