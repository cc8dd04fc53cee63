"""What Airflow's provider registry is told about this package (entry point group ``apache_airflow_provider``)."""

from __future__ import annotations

from typing import Any

from airflow_kafka_spark import __version__

INTEGRATION = "Apache Kafka on Spark"


def get_provider_info() -> dict[str, Any]:
    """Return the facts that ``airflow providers get airflow-provider-kafka-spark`` shows.

    Connection types are the official ones (``kafka``, ``spark``, ``spark_connect``, ``postgres``), so none is declared here.

    :return: a dictionary that is valid against Airflow's ``provider_info.schema.json``.
    """
    return {
        "package-name": "airflow-provider-kafka-spark",
        "name": INTEGRATION,
        "description": "Bounded, exactly-once windows between Kafka and other systems, run by Airflow on Spark.",
        "versions": [__version__],
        "integrations": [
            {
                "integration-name": INTEGRATION,
                "external-doc-url": "https://kafka.apache.org/documentation/",
                "tags": ["apache"],
            }
        ],
        "operators": [
            {
                "integration-name": INTEGRATION,
                "python-modules": [
                    "airflow_kafka_spark.operators.kafka_to_sink",
                    "airflow_kafka_spark.operators.source_to_kafka",
                    "airflow_kafka_spark.operators.kafka_to_kafka",
                    "airflow_kafka_spark.operators.pipeline_offsets",
                ],
            },
        ],
        "sensors": [
            {
                "integration-name": INTEGRATION,
                "python-modules": [
                    "airflow_kafka_spark.sensors.interval",
                    "airflow_kafka_spark.sensors.lag",
                    "airflow_kafka_spark.sensors.window",
                ],
            },
        ],
        "triggers": [
            {
                "integration-name": INTEGRATION,
                "python-modules": [
                    "airflow_kafka_spark.triggers.interval",
                    "airflow_kafka_spark.triggers.lag",
                    "airflow_kafka_spark.triggers.window",
                ],
            },
        ],
        "cli": ["airflow_kafka_spark.cli.definition.get_cli_commands"],
        "hooks": [
            {
                "integration-name": INTEGRATION,
                "python-modules": ["airflow_kafka_spark.hooks.kafka", "airflow_kafka_spark.hooks.spark"],
            },
        ],
    }
