"""A table of the shop against its copy in the warehouse, once a night. Needs `shop` and `warehouse` (PostgreSQL or MariaDB)."""

from datetime import timedelta

from airflow.sdk import DAG

from airflow_kafka_spark.operators import VerifyOperator
from airflow_kafka_spark.sinks import PostgresSink
from airflow_kafka_spark.sources import JdbcSource

with DAG("orders_verified", schedule="@daily", catchup=False, default_args={"retries": 2}):
    VerifyOperator(
        task_id="verify",
        source=JdbcSource("shop", "shop.orders"),
        sink=PostgresSink("warehouse", "orders"),
        # Rows of the day before no longer change in either table.
        where="placed_at < '{{ data_interval_start }}'",
        exclude_columns=["search_text"],
        rechecks=3,
        recheck_delay=60,
        execution_timeout=timedelta(hours=6),
    )
