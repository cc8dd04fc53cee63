"""Metadata of this package for Airflow's registry of providers (entry point group ``apache_airflow_provider``)."""

from __future__ import annotations

from importlib import metadata
from typing import Any

from airflow_kafka_spark import __version__

INTEGRATION = "Apache Kafka on Spark"


def get_provider_info() -> dict[str, Any]:
    """Return the metadata that ``airflow providers get airflow-provider-kafka-spark`` shows.

    The connection types are the official ones. For ``kafka`` Airflow uses the hook of this package, a subclass of the official
    hook whose connection test explains problems. ``spark``, ``spark_connect``, ``postgres`` and ``mysql`` are declared if the
    official providers are not installed.

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
                    "airflow_kafka_spark.operators.control",
                    "airflow_kafka_spark.operators.verify",
                ],
            },
        ],
        "sensors": [
            {
                "integration-name": INTEGRATION,
                "python-modules": [
                    "airflow_kafka_spark.sensors",
                ],
            },
        ],
        "triggers": [
            {
                "integration-name": INTEGRATION,
                "python-modules": [
                    "airflow_kafka_spark.triggers",
                ],
            },
        ],
        "cli": ["airflow_kafka_spark.cli.definition.get_cli_commands"],
        "hooks": [
            {
                "integration-name": INTEGRATION,
                "python-modules": [
                    "airflow_kafka_spark.hooks.kafka.hook",
                    "airflow_kafka_spark.hooks.schema_registry",
                    "airflow_kafka_spark.hooks.spark.hook",
                    "airflow_kafka_spark.sources.jdbc.hooks",
                    "airflow_kafka_spark.sinks.iceberg.hooks",
                ],
            },
        ],
        "connection-types": [
            _KAFKA,
            _SCHEMA_REGISTRY,
            *(kind for official, kinds in _UNLESS_OFFICIAL.items() if not is_installed(official) for kind in kinds),
        ],
        "extra-links": [
            f"airflow_kafka_spark.operators.visibility.links.{name}"
            for name in ("WindowLink", "TopicLink", "TableLink", "DeadLettersLink", "SparkLink")
        ],
        "plugins": [{"name": "airflow_kafka_spark", "plugin-class": "airflow_kafka_spark.ui.plugin.KafkaSparkPlugin"}],
        "config": {
            "kafka_spark": {
                "description": "airflow-provider-kafka-spark: pages, links, and the name of this deployment.",
                "options": _OPTIONS,
            }
        },
    }


# Airflow uses the hook of the first provider, by name, that declares the type. The form stays that of the official provider.
_KAFKA = {
    "connection-type": "kafka",
    "hook-name": "Apache Kafka",
    "hook-class-name": "airflow_kafka_spark.hooks.kafka.hook.KafkaHook",
}

_SCHEMA_REGISTRY = {
    "connection-type": "schema_registry",
    "hook-name": "Schema Registry",
    "hook-class-name": "airflow_kafka_spark.hooks.schema_registry.SchemaRegistryHook",
    "ui-field-behaviour": {
        "hidden-fields": [],
        "relabeling": {"host": "Address", "schema": "http or https"},
        "placeholders": {
            "host": "registry.example.org, or https://example.org/registry",
            "port": "8081",
            "schema": "http",
            "extra": '{"ssl.ca.location": "/etc/kafka/ca.pem", "timeout": 30}',
        },
    },
    "conn-fields": {
        "url": {
            "label": "Addresses",
            "description": "Several addresses of one registry, separated by commas, in place of the one above.",
            "schema": {"type": ["string", "null"]},
        }
    },
}

_SPARK = [
    {
        "connection-type": "spark",
        "hook-name": "Apache Spark",
        "hook-class-name": "airflow_kafka_spark.hooks.spark.hook.SparkHook",
        "ui-field-behaviour": {
            "hidden-fields": ["schema", "login", "password"],
            "relabeling": {"host": "Master"},
            "placeholders": {
                "host": "local[*], spark://host, yarn or k8s://https://host",
                "port": "7077",
                "extra": '{"spark.driver.memory": "4g"}',
            },
        },
    },
    {
        "connection-type": "spark_connect",
        "hook-name": "Apache Spark Connect",
        "hook-class-name": "airflow_kafka_spark.hooks.spark.hook.SparkConnectHook",
        "ui-field-behaviour": {
            "hidden-fields": ["schema"],
            "relabeling": {"login": "User ID", "password": "Token"},
            "placeholders": {"host": "host", "port": "15002"},
        },
        "conn-fields": {"use_ssl": {"label": "Use SSL", "schema": {"type": "boolean", "default": False}}},
    },
]

_DATABASE = {"hidden-fields": [], "relabeling": {"schema": "Database"}}

_POSTGRES = {
    "connection-type": "postgres",
    "hook-name": "Postgres",
    "hook-class-name": "airflow_kafka_spark.sources.jdbc.hooks.PostgresHook",
    "ui-field-behaviour": {**_DATABASE, "placeholders": {"port": "5432", "extra": '{"sslmode": "verify-full"}'}},
}

_MYSQL = {
    "connection-type": "mysql",
    "hook-name": "MySQL",
    "hook-class-name": "airflow_kafka_spark.sources.jdbc.hooks.MySqlHook",
    "ui-field-behaviour": {**_DATABASE, "placeholders": {"port": "3306", "extra": '{"ssl_mode": "verify_ca"}'}},
}

_ICEBERG = {
    "connection-type": "iceberg",
    "hook-name": "Iceberg",
    "hook-class-name": "airflow_kafka_spark.sinks.iceberg.hooks.IcebergHook",
    "ui-field-behaviour": {
        "hidden-fields": ["schema", "port"],
        "relabeling": {"host": "Catalog URI", "login": "Client ID or user", "password": "Client secret or password"},
        "placeholders": {
            "host": "https://catalog.example.org, or postgresql+psycopg://host:5432/lake",
            "extra": '{"type": "rest", "warehouse": "s3://lake"}',
        },
    },
}

# Airflow's command line stores a connection whose type no provider declares as ``generic``.
_UNLESS_OFFICIAL = {
    "apache-airflow-providers-apache-spark": _SPARK,
    "apache-airflow-providers-postgres": [_POSTGRES],
    "apache-airflow-providers-mysql": [_MYSQL],
    "apache-airflow-providers-apache-iceberg": [_ICEBERG],
}


def _make_option(description: str, example: str | None, default: str = "") -> dict[str, Any]:
    return {"description": description, "version_added": "0.1.0", "type": "string", "example": example, "default": default}


_OPTIONS = {
    "deployment": _make_option(
        "Name of this Airflow deployment among all deployments that share a Kafka cluster. The ledger records it with each\n"
        "pipeline. So the same DAGs in another deployment are refused, instead of taking windows from this one. It must be\n"
        "equal on all workers, and must not change. Default: `[api] base_url`. If neither is set, deployments are not\n"
        "distinguished.\n",
        "production-eu",
    ),
    "ledgers": _make_option(
        "Ledgers whose pipelines the page `Kafka pipelines` shows in addition to those of the DAGs: a list of\n"
        "`<connection>/<ledger topic>`, separated by commas.\n",
        "kafka_default/airflow-windows,kafka_east/airflow-windows",
        "kafka_default/airflow-windows",
    ),
    "topic_url": _make_option(
        "Address of the link `Topic` of a task, with the placeholders `{topic}` and `{connection}`. By default there is no such\n"
        "link.\n",
        "https://kafka-ui.example.org/ui/clusters/main/all-topics/{topic}",
    ),
    "table_url": _make_option(
        "Address of the link `Table` of a task, with the placeholders `{uri}`, `{scheme}`, `{host}`, `{path}`, `{name}` or\n"
        "`{table}`. By default there is no such link.\n",
        "https://catalog.example.org/tables/{name}",
    ),
    "history_server_url": _make_option(
        "Address of Spark's history server, to which the link `Spark UI` leads. By default the link leads to the UI of the\n"
        "session, if there is one.\n",
        "http://history.example.org:18080",
    ),
}


def is_installed(distribution: str) -> bool:
    """Return True if a distribution of this name is installed."""
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
