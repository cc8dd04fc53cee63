"""From an Airflow connection of type ``postgres`` to what libpq connects with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import ConnectionInvalid

if TYPE_CHECKING:
    import psycopg
    from airflow.sdk import Connection

APPLICATION = "airflow-kafka-spark"
"""What sessions are called, or what their names begin with."""

# Keys of the extra that are meant for other users of the connection, not for libpq.
_NOT_LIBPQ = frozenset(
    {"cursor", "redshift", "redshift-serverless", "cluster-identifier", "workgroup-name", "aws_conn_id", "sqlalchemy_scheme"}
    | {"sqlalchemy_query", "enable_log_db_messages"}
)
_TOKENS = frozenset({"iam", "azure_conn_id"})
_DEFAULTS = {
    "host": "localhost",
    "port": "5432",
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
}


@dataclass(frozen=True)
class PostgresServer:
    """A database to connect to. Travels to the tasks: an executor has no Airflow connections.

    :param conn_id: the Airflow connection it comes from.
    :param where: ``host:port/database``, for people.
    """

    conn_id: str
    where: str
    host: str
    port: int
    database: str
    conninfo: str = field(repr=False)
    password: str = field(default="", repr=False)

    def named(self, application_name: str) -> str:
        """What libpq connects with, for psycopg and ADBC alike; holds the password."""
        return f"{self.conninfo} application_name={_quoted(application_name)}"

    def scrub(self, text: str) -> str:
        """``text`` without the password: libpq quotes what it cannot parse."""
        return text.replace(self.password, "***") if self.password else text

    def cause(self, error: BaseException) -> BaseException | None:
        """``error`` where a traceback may show it."""
        return None if self.password and self.password in str(error) else error


def read_server(connection: Connection) -> PostgresServer:
    """Where a connection of type ``postgres`` leads.

    :raises ConnectionInvalid: it has options that mean nothing here.
    """
    fields = {"host": connection.host, "port": connection.port, "dbname": connection.schema}
    fields |= {"user": connection.login, "password": connection.password}
    options: dict[str, Any] = {**_DEFAULTS, **_libpq_options(connection.conn_id, connection.extra_dejson)}
    options |= {name: value for name, value in fields.items() if value}
    # As libpq has it, where nothing is said.
    host, port, database = str(options["host"]), options["port"], str(options.get("dbname") or options.get("user") or "")
    return PostgresServer(
        conn_id=connection.conn_id,
        where=f"{host}:{port}/{database}",
        host=host,
        port=int(port),
        database=database,
        conninfo=" ".join(f"{name}={_quoted(str(value))}" for name, value in options.items()),
        password=str(options.get("password") or ""),
    )


def _libpq_options(conn_id: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    from psycopg.pq import Conninfo

    known = {option.keyword.decode() for option in Conninfo.get_defaults()} - {"application_name", "fallback_application_name"}
    if tokens := sorted(name for name in _TOKENS if extra.get(name)):
        raise ConnectionInvalid(
            conn_id, f"its extra asks for `{tokens[0]}`, a login by short-lived tokens", "Use a login with a password"
        )
    unknown = sorted(set(extra) - known - _NOT_LIBPQ - _TOKENS - {"application_name", "fallback_application_name"})
    if unknown:
        names = ", ".join(f"`{name}`" for name in unknown)
        raise ConnectionInvalid(
            conn_id, f"its extra holds {names}, which libpq does not know", "Remove it, or correct its spelling"
        )
    return {name: value for name, value in extra.items() if name in known and value not in (None, "")}


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def run(connection: psycopg.Connection, statement: str) -> int:
    """Run a statement; how many rows it wrote."""
    return connection.execute(statement.encode()).rowcount


def rows(connection: psycopg.Connection, statement: str) -> list[tuple]:
    """Run a query."""
    return connection.execute(statement.encode()).fetchall()


def system_identifier(connection: psycopg.Connection) -> str:
    """What the server calls itself, the same by whatever address it is reached; empty where the role may not ask."""
    import psycopg

    try:
        return str(rows(connection, "SELECT system_identifier FROM pg_catalog.pg_control_system()")[0][0])
    except psycopg.errors.InsufficientPrivilege:
        return ""
