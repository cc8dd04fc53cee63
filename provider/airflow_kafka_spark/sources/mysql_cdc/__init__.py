"""Changes of MariaDB and MySQL tables, from the binary log, as events of Debezium's form."""

from __future__ import annotations

from airflow_kafka_spark.sources.mysql_cdc.source import MySqlCdcSource

__all__ = ["MySqlCdcSource"]
