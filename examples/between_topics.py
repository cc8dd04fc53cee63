"""Large orders from one topic to another, with bad records in a dead letter topic. Needs `kafka_default` and `spark_default`."""

from airflow.sdk import DAG

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToKafkaOperator
from airflow_kafka_spark.sinks import KafkaSink

with DAG("large_orders", schedule="@hourly", catchup=False, default_args={"retries": 3}):
    KafkaToKafkaOperator(
        task_id="copy",
        topics="orders",
        group_id="large-orders",
        value=Json(schema="id bigint, customer string, amount decimal(12,2)"),
        filter="amount >= 1000",
        sink=KafkaSink(topic="large-orders", key="customer", auto_create=True, partitions=4),
        errors_tolerance="all",
        errors_deadletterqueue_topic_name="large-orders-dead",
        max_errors=0.01,
    )
