"""Wait until the records of an hour are complete in Kafka, then move them into a table. Needs `kafka_default` and `warehouse`."""

from datetime import datetime, timedelta

from airflow.sdk import DAG
from airflow.timetables.interval import CronDataIntervalTimetable

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToSinkOperator
from airflow_kafka_spark.sensors import KafkaIntervalSensor
from airflow_kafka_spark.sinks import PostgresSink

with DAG("hourly", schedule=CronDataIntervalTimetable("0 * * * *", timezone="UTC"), start_date=datetime(2026, 1, 1)):
    complete = KafkaIntervalSensor(task_id="complete", topics="orders", grace=timedelta(minutes=2), deferrable=True)
    load = KafkaToSinkOperator(
        task_id="load",
        topics="orders",
        group_id="orders-hourly",
        window="interval",
        value=Json(schema="id bigint, customer string"),
        sink=PostgresSink(conn_id="warehouse", table="sales.orders_by_hour", window_column="window"),
    )
    complete >> load
