"""Sources of windows: topics, tables, logs of databases and files. Cheap to import."""

from __future__ import annotations

from airflow_kafka_spark.sources.base import RowSource
from airflow_kafka_spark.sources.cdc.options import ExtractNewRecordState
from airflow_kafka_spark.sources.files.source import FilesSource
from airflow_kafka_spark.sources.jdbc.source import JdbcSource
from airflow_kafka_spark.sources.mysql_cdc.source import MySqlCdcSource
from airflow_kafka_spark.sources.postgres_cdc.source import PostgresCdcSource

__all__ = ["ExtractNewRecordState", "FilesSource", "JdbcSource", "MySqlCdcSource", "PostgresCdcSource", "RowSource"]
