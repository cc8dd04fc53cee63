"""Hooks of connections of the types ``postgres`` and ``mysql``, where the official providers are not installed.

If no provider declares a type, ``airflow connections add --conn-type postgres`` stores a connection of the type ``generic``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from airflow.providers.common.compat.sdk import BaseHook

from airflow_kafka_spark.errors import ConnectionInvalid, KafkaSparkError
from airflow_kafka_spark.hooks.connections import TEST_SECONDS, ServerKind, name_other_server, run_within
from airflow_kafka_spark.sources.jdbc.source import make_missing_driver_problem, open_database

if TYPE_CHECKING:
    from airflow_kafka_spark.sources.jdbc.database import SourceDatabase


class DatabaseHook(BaseHook):
    """A connection to a database, with the connection test of Airflow's UI.

    :param conn_id: the Airflow connection.
    """

    conn_name_attr = "conn_id"
    kind: ServerKind

    def __init__(self, conn_id: str) -> None:
        super().__init__()
        self.conn_id = conn_id

    def get_conn(self) -> NoReturn:
        """Raise an error: sinks and sources open their own sessions.

        :raises ConnectionInvalid: always.
        """
        action = "For a hook that runs statements, install Airflow's provider of the database"
        raise ConnectionInvalid(self.conn_id, "this hook only tests the connection", action)

    def test_connection(self) -> tuple[bool, str]:
        """Open a session, and return True and the server's address, or False and the reason, for Airflow's UI.

        It takes some ten seconds at most.
        """
        try:
            database = open_database(self.conn_id)
        except ImportError as error:
            return False, str(make_missing_driver_problem(error))
        except KafkaSparkError as error:
            return False, error.found
        server = database.server
        done, found = run_within(TEST_SECONDS, server.where, lambda: _test_database(database))
        return done, found if done else name_other_server(found, server.host, server.port, self.kind)


def _test_database(database: SourceDatabase) -> tuple[bool, str]:
    try:
        with database.open_session("testing the connection") as session:
            problems = list(session.find_server_problems())
    except KafkaSparkError as error:
        return False, error.found
    return not problems, " ".join(map(str, problems)) or f"Connected to {database.server.where}."


class PostgresHook(DatabaseHook):
    """A connection of the type ``postgres``, with the connection test of Airflow's UI."""

    conn_type = "postgres"
    kind = "postgres"
    default_conn_name = "postgres_default"
    hook_name = "Postgres"


class MySqlHook(DatabaseHook):
    """A connection of the type ``mysql``, with the connection test of Airflow's UI."""

    conn_type = "mysql"
    kind = "mysql"
    default_conn_name = "mysql_default"
    hook_name = "MySQL"
