"""Real servers for tests: an embedded Kafka, an embedded PostgreSQL and an embedded Airflow.

Kafka needs Java 17 or newer; PostgreSQL and TLS need ``airflow-provider-kafka-spark[testing]``. The servers listen on free ports
of the loopback interface, and end with the process that started them, even if it is killed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow_kafka_spark.testing.airflow import EmbeddedAirflow
    from airflow_kafka_spark.testing.kafka import Broker, EmbeddedKafka, KafkaSecurity
    from airflow_kafka_spark.testing.postgres import EmbeddedPostgres

__all__ = ["Broker", "EmbeddedAirflow", "EmbeddedKafka", "EmbeddedPostgres", "KafkaSecurity"]

_HOMES = {
    "Broker": "kafka",
    "EmbeddedAirflow": "airflow",
    "EmbeddedKafka": "kafka",
    "EmbeddedPostgres": "postgres",
    "KafkaSecurity": "kafka",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
