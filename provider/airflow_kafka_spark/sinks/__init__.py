"""Sinks, the destinations of windows. Each applies a window whole or not at all, and keeps a record of the windows it applied.

Importing a sink loads no driver and no Arrow: DAG files import from here.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow_kafka_spark.sinks.base import Guarantee, Sink
    from airflow_kafka_spark.sinks.delta.sink import DeltaSink
    from airflow_kafka_spark.sinks.files.manifest import window_files, write_symlink_manifest
    from airflow_kafka_spark.sinks.files.sink import FilesSink
    from airflow_kafka_spark.sinks.iceberg.sink import IcebergSink
    from airflow_kafka_spark.sinks.kafka.sink import KafkaSink
    from airflow_kafka_spark.sinks.postgres.sink import PostgresSink

__all__ = [
    "DeltaSink",
    "FilesSink",
    "Guarantee",
    "IcebergSink",
    "KafkaSink",
    "PostgresSink",
    "Sink",
    "window_files",
    "write_symlink_manifest",
]

_MODULES = {
    "DeltaSink": "delta.sink",
    "FilesSink": "files.sink",
    "Guarantee": "base",
    "IcebergSink": "iceberg.sink",
    "KafkaSink": "kafka.sink",
    "PostgresSink": "postgres.sink",
    "Sink": "base",
    "window_files": "files.manifest",
    "write_symlink_manifest": "files.manifest",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
