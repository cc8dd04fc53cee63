"""Wait for lag, for a backlog, for an interval to be complete in Kafka, for another pipeline's window, for a database's log."""

from __future__ import annotations

from airflow_kafka_spark.sensors.interval import KafkaIntervalSensor
from airflow_kafka_spark.sensors.lag import KafkaLagSensor
from airflow_kafka_spark.sensors.source import SourceLogSensor
from airflow_kafka_spark.sensors.window import KafkaWindowSensor

__all__ = ["KafkaIntervalSensor", "KafkaLagSensor", "KafkaWindowSensor", "SourceLogSensor"]
