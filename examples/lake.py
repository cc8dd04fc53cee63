"""From a topic into an Iceberg table, once an hour, and a query over it. Needs `kafka_default`, `spark_default` and `lake`.

`lake` is of type `iceberg`: a catalog in PostgreSQL, with login and password of the database's user. Host:
`postgresql+psycopg://catalog.example.com:5432/lake`; extra: `{"type": "sql", "name": "lake", "warehouse": "file:///mnt/lake"}`.
"""

from airflow.sdk import DAG, task

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToSinkOperator
from airflow_kafka_spark.sinks import IcebergSink

SINK = IcebergSink("shop.orders", conn_id="lake", partition_by=["day(placed_at)"], auto_evolve=True)

with DAG("orders_to_iceberg", schedule="@hourly", catchup=False, default_args={"retries": 3}):
    load = KafkaToSinkOperator(
        task_id="load",
        topics="orders",
        group_id="orders-iceberg",
        value=Json(schema="id bigint, customer string, amount decimal(12,2), placed_at timestamp"),
        sink=SINK,
    )

    @task
    def best_customers() -> None:
        """Print a query of DuckDB, which reads what pyiceberg scans."""
        with SINK.open() as lake:
            orders = lake.load_newest("reading").scan().to_duckdb("orders")
        print(
            orders.sql(
                "SELECT customer, count(*) AS orders, sum(amount) AS amount FROM orders GROUP BY 1 ORDER BY 3 DESC LIMIT 5"
            )
        )

    load >> best_customers()
