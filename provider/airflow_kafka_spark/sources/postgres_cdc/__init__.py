"""Changes of PostgreSQL tables, from the write-ahead log, as events of Debezium's form."""

from __future__ import annotations

from airflow_kafka_spark.sources.postgres_cdc.source import PostgresCdcSource

__all__ = ["PostgresCdcSource"]
