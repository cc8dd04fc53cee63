"""Tables and queries of a database."""

from __future__ import annotations

from airflow_kafka_spark.sources.jdbc.source import JdbcSource

__all__ = ["JdbcSource"]
