"""Files in a directory or below a prefix of an object store."""

from __future__ import annotations

from airflow_kafka_spark.sources.files.source import FilesSource

__all__ = ["FilesSource"]
