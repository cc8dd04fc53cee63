"""From an Airflow connection of type ``postgres`` to sessions of the server, and from the server's errors to ours."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import ConnectionInvalid, KafkaSparkError, SinkRejected, SinkUnavailable
from airflow_kafka_spark.sinks import postgres_sql as sql

if TYPE_CHECKING:
    import psycopg

APPLICATION = "airflow-kafka-spark"

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
class Server:
    """A database to connect to. Travels to the tasks: an executor has no Airflow connections.

    :param conn_id: the Airflow connection it comes from.
    :param where: ``host:port/database``, for people.
    :param lock_timeout: seconds a session waits for another one's lock.
    """

    conn_id: str
    where: str
    host: str
    port: int
    database: str
    conninfo: str = field(repr=False)
    password: str = field(default="", repr=False)
    lock_timeout: float = 60.0

    def named(self, application_name: str) -> str:
        """What libpq connects with, for psycopg and ADBC alike; holds the password."""
        return f"{self.conninfo} application_name={_quoted(application_name)}"

    def connect(self, application_name: str = APPLICATION) -> psycopg.Connection:
        """A new session in autocommit mode, with settings of its own (:func:`postgres_sql.session_settings`)."""
        import psycopg

        # Prepared statements would outlive the stages they were prepared for.
        connection = psycopg.connect(self.named(application_name), autocommit=True, prepare_threshold=None)
        try:
            run(connection, sql.session_settings(self.lock_timeout))
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def session(self, doing: str, window: str) -> Iterator[psycopg.Connection]:
        """A session whose errors become ours.

        :param doing: what it is for.
        :param window: the window, or the pipeline, that it is for.
        :raises SinkUnavailable: the server cannot be reached, or broke off.
        :raises SinkRejected: it refused.
        """
        import psycopg

        try:
            connection = self.connect()
            try:
                yield connection
            finally:
                connection.close()
        except psycopg.Error as error:
            raise self.explain(error, window, f"{doing} {window}") from self.cause(error)

    def scrub(self, text: str) -> str:
        """``text`` without the password: libpq quotes what it cannot parse."""
        return text.replace(self.password, "***") if self.password else text

    def cause(self, error: BaseException) -> BaseException | None:
        """``error`` where a traceback may show it."""
        return None if self.password and self.password in str(error) else error

    def explain(self, error: BaseException, window: str, doing: str, target: str = "") -> KafkaSparkError:
        """An error of psycopg or ADBC as one of ours: refused for good, or worth another try."""
        state = getattr(error, "sqlstate", None) or ""
        detail = self.scrub(_message(error))
        place = target or self.where
        if state == "55P03":
            detail += (
                f" after {self.lock_timeout:g} s: another session holds a lock on what this one needs. "
                f"Sessions of this pipeline have an application_name that begins with `{APPLICATION}`, see pg_stat_activity"
            )
        if state == "55000" or state[:2] in ("22", "23", "42", "44", "P0", "0A", "0L", "28"):
            return SinkRejected(place, window, detail, _action(state))
        return SinkUnavailable(place, doing, detail)


def read_connection(conn_id: str, lock_timeout: float = 60.0) -> Server:
    """Look an Airflow connection up.

    :raises ConnectionInvalid: it is not defined, of another type, or has options that mean nothing here.
    """
    from airflow.exceptions import AirflowNotFoundException
    from airflow.providers.common.compat.sdk import BaseHook

    try:
        connection = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        action = f"Add a connection `{conn_id}` of type `postgres`, or correct `conn_id`"
        raise ConnectionInvalid(conn_id, "it is not defined", action) from None
    if connection.conn_type not in ("postgres", "postgresql"):
        raise ConnectionInvalid(conn_id, f"it is of type `{connection.conn_type}`", "Use a connection of type `postgres`")
    fields = {"host": connection.host, "port": connection.port, "dbname": connection.schema}
    fields |= {"user": connection.login, "password": connection.password}
    options: dict[str, Any] = {**_DEFAULTS, **_libpq_options(conn_id, connection.extra_dejson)}
    options |= {name: value for name, value in fields.items() if value}
    # As libpq has it, where nothing is said.
    host, port, database = str(options["host"]), options["port"], str(options.get("dbname") or options.get("user") or "")
    return Server(
        conn_id=conn_id,
        where=f"{host}:{port}/{database}",
        host=host,
        port=int(port),
        database=database,
        conninfo=" ".join(f"{name}={_quoted(str(value))}" for name, value in options.items()),
        password=str(options.get("password") or ""),
        lock_timeout=lock_timeout,
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


def pipeline_key(windows: sql.Name, pipeline: str) -> str:
    """12 hex digits that name a pipeline among all that share a database."""
    return hashlib.sha256(f"{windows}\0{pipeline}".encode()).hexdigest()[:12]


def lock_key(*parts: str) -> int:
    """The number of an advisory lock."""
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big", signed=True)


def run(connection: psycopg.Connection, statement: str) -> int:
    """Run a statement; how many rows it wrote."""
    return connection.execute(statement.encode()).rowcount


def rows(connection: psycopg.Connection, statement: str) -> list[tuple]:
    """Run a query."""
    return connection.execute(statement.encode()).fetchall()


def _message(error: BaseException) -> str:
    diagnosis = getattr(error, "diag", None)
    if diagnosis is None or not diagnosis.message_primary:
        # ADBC puts the server's words between its own and the statement.
        text = " ".join(str(error).split())
        said = re.search(r"(?:ERROR|FATAL): (.*?)(?: (?:LINE \d+: .*?)?\^? ?Query was: .*| ?[.] SQLSTATE: \w+)?$", text)
        return said[1] if said else text
    parts = [diagnosis.message_primary]
    if diagnosis.column_name and f'"{diagnosis.column_name}"' not in parts[0]:
        parts.append(f"column `{diagnosis.column_name}`")
    parts += [part for part in (diagnosis.message_detail, diagnosis.context) if part]
    return "; ".join(" ".join(part.split()).rstrip(".") for part in parts)


def _action(state: str) -> str:
    if state == "23505":
        return 'For rows that replace earlier ones use `mode="upsert"` with `key=`; else the records hold a key twice'
    if state == "42501":
        return "Grant the connection's role what is missing"
    return ""
