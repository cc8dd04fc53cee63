"""From an Airflow connection to the database it leads to."""

from __future__ import annotations

from airflow_kafka_spark.errors import ConnectionInvalid
from airflow_kafka_spark.sources.jdbc_database import Database


def read_database(conn_id: str) -> Database:
    """Look an Airflow connection up.

    :raises ConnectionInvalid: it is not defined, of another type, or has options that mean nothing here.
    """
    from airflow.exceptions import AirflowNotFoundException
    from airflow.providers.common.compat.sdk import BaseHook

    try:
        connection = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        action = f"Add a connection `{conn_id}` of type `postgres` or `mysql`, or correct `conn_id`"
        raise ConnectionInvalid(conn_id, "it is not defined", action) from None
    kind = connection.conn_type
    if kind in ("postgres", "postgresql"):
        from airflow_kafka_spark.sinks.postgres_connection import read_connection
        from airflow_kafka_spark.sources.jdbc_postgres import PostgresDatabase

        return PostgresDatabase(read_connection(conn_id))
    if kind in ("mysql", "mariadb"):
        import pymysql  # noqa: F401

        from airflow_kafka_spark.sources.jdbc_mysql import MysqlDatabase, read_server

        return MysqlDatabase(read_server(connection))
    raise ConnectionInvalid(conn_id, f"it is of type `{kind}`", "Use a connection of type `postgres` or `mysql`")
