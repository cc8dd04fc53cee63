"""From an Airflow connection to the database it leads to."""

from __future__ import annotations

from airflow_kafka_spark.hooks.connections import kind_of, look_up
from airflow_kafka_spark.sources.jdbc.database import Database


def read_database(conn_id: str) -> Database:
    """Look an Airflow connection up.

    :raises ConnectionInvalid: it is not defined, of another type, or has options that mean nothing here.
    """
    connection = look_up(conn_id, "postgres", "mysql")
    if kind_of(connection) == "postgres":
        from airflow_kafka_spark.hooks import postgres
        from airflow_kafka_spark.sources.jdbc.postgres import PostgresDatabase

        return PostgresDatabase(postgres.read_server(connection))
    import pymysql  # noqa: F401

    from airflow_kafka_spark.sources.jdbc.mysql import MysqlDatabase, read_server

    return MysqlDatabase(read_server(connection))
