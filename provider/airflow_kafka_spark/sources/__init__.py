"""Where windows are read from: topics, tables and files. Cheap to import."""

from __future__ import annotations

from airflow_kafka_spark.sources.base import RowSource
from airflow_kafka_spark.sources.files import FilesSource
from airflow_kafka_spark.sources.jdbc import JdbcSource

__all__ = ["FilesSource", "JdbcSource", "RowSource"]
