"""From a table to a topic, once an hour. Needs `kafka_default`, `spark_default` and `shop`."""

from airflow.sdk import DAG

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import SourceToKafkaOperator
from airflow_kafka_spark.sinks import KafkaSink
from airflow_kafka_spark.sources import JdbcSource

with DAG("publish_orders", schedule="@hourly", catchup=False, default_args={"retries": 3}):
    SourceToKafkaOperator(
        task_id="publish",
        source=JdbcSource(conn_id="shop", table="shop.orders", cursor="id"),
        sink=KafkaSink(topic="orders", auto_create=True, partitions=4, key="id", value=Json()),
    )
