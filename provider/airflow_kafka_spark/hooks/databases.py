"""Servers of databases: their addresses from Airflow connections, names and values in statements, and sessions that have
ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow_kafka_spark.errors import ConnectionInvalid
from airflow_kafka_spark.errors.base import quote_names

if TYPE_CHECKING:
    import psycopg
    from airflow.sdk import Connection


APPLICATION = "airflow-kafka-spark"
"""Name of the database sessions, or the prefix of their names."""

_CANCELED = "57014"
"""SQLSTATE of a statement that a timeout, or another session, has ended."""

_NOT_LIBPQ = frozenset(
    {"cursor", "redshift", "redshift-serverless", "cluster-identifier", "workgroup-name", "aws_conn_id", "sqlalchemy_scheme"}
    | {"sqlalchemy_query", "enable_log_db_messages"}
)
"""Keys of the extra that other users of the connection need, and libpq does not know."""
_TOKENS = frozenset({"iam", "azure_conn_id"})
"""Keys of the extra that ask for a login by short-lived tokens, which is not supported."""
_DEFAULTS = {
    "host": "localhost",
    "port": "5432",
    "connect_timeout": "10",
    "keepalives_idle": "30",
    "keepalives_interval": "10",
    "keepalives_count": "3",
}
"""Options of libpq for a connection that does not give them."""

OLDEST_POSTGRES = 12
"""The oldest supported major release of PostgreSQL."""


@dataclass(frozen=True)
class PostgresServer:
    """A database to connect to. It is sent to the tasks, because executors have no Airflow connections.

    :param conn_id: the Airflow connection that it was made from.
    :param where: ``host:port/database``, for display.
    """

    conn_id: str
    where: str
    host: str
    port: int
    database: str
    conninfo: str = field(repr=False)
    password: str = field(default="", repr=False)

    def make_connection_string(self, application_name: str) -> str:
        """Return the connection string of libpq, for psycopg and for ADBC. It contains the password."""
        return f"{self.conninfo} application_name={_quote(application_name)}"

    def scrub(self, text: str) -> str:
        """Return ``text`` without the password, which libpq may quote in its errors."""
        return text.replace(self.password, "***") if self.password else text

    def get_safe_cause(self, error: BaseException) -> BaseException | None:
        """Return ``error`` if a traceback may show it; None if its text contains the password."""
        return None if self.password and self.password in str(error) else error


def read_server(connection: Connection) -> PostgresServer:
    """Return the server of a connection of type ``postgres``.

    :raises ConnectionInvalid: the connection has options that are not supported.
    """
    fields = {"host": connection.host, "port": connection.port, "dbname": connection.schema}
    fields |= {"user": connection.login, "password": connection.password}
    options: dict[str, Any] = {**_DEFAULTS, **_list_libpq_options(connection.conn_id, connection.extra_dejson)}
    options |= {name: value for name, value in fields.items() if value}
    require_address(connection.conn_id, options["host"], options["port"])
    # Defaults of libpq.
    host, port, database = str(options["host"]), options["port"], str(options.get("dbname") or options.get("user") or "")
    return PostgresServer(
        conn_id=connection.conn_id,
        where=f"{host}:{port}/{database}",
        host=host,
        port=int(port),
        database=database,
        conninfo=" ".join(f"{name}={_quote(str(value))}" for name, value in options.items()),
        password=str(options.get("password") or ""),
    )


def require_address(conn_id: str, host: object, port: object) -> None:
    """Check that host and port of a connection are a name and a number.

    :raises ConnectionInvalid: the host is a URL or has a port, or the port is no number.
    """
    name = str(host)
    if not str(port).isdecimal():
        raise ConnectionInvalid(conn_id, f"its port is `{port}`; expected a number")
    if "://" in name or re.fullmatch(r"[^:/]+:[0-9]+", name):
        found = f"its host is `{name}`; expected the name or the address of a server alone"
        raise ConnectionInvalid(conn_id, found, "The connection has a field of its own for the port")


def _list_libpq_options(conn_id: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    from psycopg.pq import Conninfo

    known = {option.keyword.decode() for option in Conninfo.get_defaults()} - {"application_name", "fallback_application_name"}
    if tokens := sorted(name for name in _TOKENS if extra.get(name)):
        raise ConnectionInvalid(
            conn_id, f"its extra asks for `{tokens[0]}`, a login by short-lived tokens", "Use a login with a password"
        )
    unknown = sorted(set(extra) - known - _NOT_LIBPQ - _TOKENS - {"application_name", "fallback_application_name"})
    if unknown:
        names = quote_names(unknown)
        raise ConnectionInvalid(
            conn_id, f"its extra holds {names}, which libpq does not know", "Remove it, or correct its spelling"
        )
    return {name: value for name, value in extra.items() if name in known and value not in (None, "")}


def _quote(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def run(connection: psycopg.Connection, statement: str) -> int:
    """Run a statement, and return the number of rows that it has written."""
    return connection.execute(statement.encode()).rowcount


def fetch_rows(connection: psycopg.Connection, statement: str) -> list[tuple]:
    """Run a query, and return its rows."""
    return connection.execute(statement.encode()).fetchall()


def prefer_indexes(*, is_local: bool) -> str:
    """Return the query after which PostgreSQL steps along an index rather than sorting rows.

    Without statistics the planner expects few rows in a range, and would read and sort the whole table for each step.

    :param is_local: True: until the end of the transaction; False: until the end of the session.
    """
    names = ("enable_seqscan", "enable_bitmapscan", "enable_sort")
    settings = ", ".join(f"set_config('{name}', 'off', {is_local})" for name in names)
    return f"SELECT {settings}"


READ_MEMORY = 64 << 20
"""Bytes of the server's memory (``work_mem``) that a session may use which reads ranges of a key; more if the server allows more.

The rows of a range may lie on pages all over the table. The server lists these pages, some 64 bytes for each, and reads them in
their order. Where the list does not fit (into 4 MiB by default), it compares all rows of most pages with the range. The list has
one item per row at most.
"""


def make_settings_query(settings: Mapping[str, str]) -> str:
    """Return the query that makes these settings of a session, those that the server knows, and gives it :data:`READ_MEMORY`."""
    values = ", ".join(f"({quote_literal(name)}, {quote_literal(value)})" for name, value in settings.items())
    memory = f"CASE s.name WHEN 'work_mem' THEN greatest(s.setting::bigint, {READ_MEMORY >> 10})::text ELSE v.value END"
    return (
        f"SELECT set_config(s.name, {memory}, false) FROM pg_catalog.pg_settings s "
        f"JOIN (VALUES {values}, ('work_mem', '')) v(name, value) ON v.name = s.name"
    )


def apply_session_settings(
    settings: str, run: Callable[[str], object], rows: Callable[[str], object], recover: Callable[[], object] = lambda: None
) -> None:
    """Apply the settings of a new session of PostgreSQL, which switch off the timeouts of server, database and role.

    Until then a `statement_timeout` of the role holds, which a busy server may exceed. If it does, it is switched off first,
    by a statement that reads nothing.

    :param settings: the query that applies them.
    :param run: runs a statement.
    :param rows: runs a query, and takes all of its rows.
    :param recover: ends a transaction that has failed; default: the session has none open.
    """
    try:
        rows(settings)
    except Exception as error:
        if getattr(error, "sqlstate", None) != _CANCELED:
            raise
        recover()
        run("SET statement_timeout = 0")
        rows(settings)


def read_system_identifier(connection: psycopg.Connection) -> str:
    """Return the server's own identifier, which does not depend on its address; empty if the role may not read it."""
    import psycopg

    try:
        return str(fetch_rows(connection, "SELECT system_identifier FROM pg_catalog.pg_control_system()")[0][0])
    except psycopg.errors.InsufficientPrivilege:
        return ""


# --- names and values in statements -------------------------------------------------------------------------------------

NAME_BYTES = 63
"""Maximum size in bytes of a name that PostgreSQL does not truncate."""


def quote(name: str) -> str:
    """Return ``name`` as a quoted identifier.

    :raises ValueError: the name is empty, or contains NUL, which PostgreSQL does not allow.
    """
    if not name or "\x00" in name:
        raise ValueError(f"Not a name in PostgreSQL: {name!r}")
    return '"' + name.replace('"', '""') + '"'


def quote_literal(value: str | int | bool | None) -> str:
    """Return ``value`` as a literal that does not depend on the setting ``standard_conforming_strings``."""
    if value is None:
        return "NULL"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if "\x00" in value:
        raise ValueError("A text in PostgreSQL cannot hold a NUL")
    escaped = value.replace("'", "''")
    return f" E'{escaped.replace(chr(92), chr(92) * 2)}'" if "\\" in escaped else f"'{escaped}'"


class Name(NamedTuple):
    """The name of a table. ``str()`` returns it quoted, for a statement."""

    schema: str
    table: str

    def __str__(self) -> str:
        return f"{quote(self.schema)}.{quote(self.table)}"


def parse_name(text: str) -> tuple[str | None, str]:
    """Return schema and table of ``table`` or ``schema.table``. Case is kept; each part may be in double quotes.

    :return: the schema (None if the text names none) and the table.
    :raises ValueError: the text has neither form.
    """
    part = r'"(?:[^"\x00]|"")+"|[^".\x00]+'
    found = re.fullmatch(rf"\s*(?:({part})\s*\.\s*)?({part})\s*", text)
    if not found:
        raise ValueError(f"`{text}` is not the name of a table")
    schema, table = (_unquote(p) if p else None for p in found.groups())
    if not table or schema == "":
        raise ValueError(f"`{text}` is not the name of a table")
    return schema, table


def _unquote(part: str) -> str:
    part = part.strip()
    return part[1:-1].replace('""', '"') if part.startswith('"') else part


def resolve_table(connection: psycopg.Connection, schema: str | None, table: str) -> Name:
    """Return the full name of a table. Without a schema, it is the table that the server finds, or a new one in the current
    schema."""
    if schema is not None:
        return Name(schema, table)
    found = fetch_rows(
        connection,
        "SELECT n.nspname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        f"WHERE c.oid = to_regclass({quote_literal(quote(table))})",
    )
    current = found or fetch_rows(connection, "SELECT coalesce(current_schema(), 'public')")
    return Name(current[0][0], table)


def hint_at_similar_table(connection: psycopg.Connection, name: Name) -> str:
    """Return a hint at the table that was perhaps meant by a name that no table has, as the end of a sentence; "" without one.

    It is a table whose name differs in upper and lower case only, or one of the same name in another schema.
    """
    found = fetch_rows(
        connection,
        "SELECT n.nspname, c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        f"WHERE lower(c.relname) = lower({quote_literal(name.table)}) AND c.relkind IN ('r', 'p') "
        "AND n.nspname <> 'information_schema' AND n.nspname !~ '^pg_' "
        f"ORDER BY lower(n.nspname) <> lower({quote_literal(name.schema)}), 1, 2 LIMIT 1",
    )
    if not found:
        return ""
    similar = Name(*found[0])
    is_same_schema = similar.schema.lower() == name.schema.lower()
    return f"; there is {similar}" + (", and names are compared exactly" if is_same_schema else "")


# --- replicas -------------------------------------------------------------------------------------------------------------

LAG_SECONDS = 1
"""Seconds between two checks of the lag of replicas."""
SEES_LAG = "SELECT pg_catalog.pg_has_role(current_user, 'pg_read_all_stats', 'USAGE') OR pg_catalog.pg_is_in_recovery()"
"""Asks if the role sees the lag of replicas: a primary shows it to this role only, a replica shows its own to all."""


def wait_for_replicas(seconds: float) -> str:
    """Return the statement that waits while a replica is more than some seconds behind.

    On a primary, the lag of all replicas that stream from it is checked; on a replica, its own lag. A replica that has streamed,
    and has no connection now, does not know its lag: it is waited for.
    """
    limit = f"interval '{seconds} seconds'"
    # Each statement of the block has a snapshot of its own: a session that waits holds no old rows back.
    return (
        "DO $lag$ BEGIN LOOP PERFORM pg_catalog.pg_stat_clear_snapshot(); IF pg_catalog.pg_is_in_recovery() THEN "
        "IF (pg_catalog.pg_last_wal_receive_lsn() IS NULL OR EXISTS (SELECT FROM pg_catalog.pg_stat_wal_receiver)) "
        "AND (pg_catalog.pg_last_wal_receive_lsn() IS NOT DISTINCT FROM pg_catalog.pg_last_wal_replay_lsn() OR "
        f"clock_timestamp() - pg_catalog.pg_last_xact_replay_timestamp() <= {limit}) THEN RETURN; END IF; "
        f"ELSIF NOT EXISTS (SELECT FROM pg_catalog.pg_stat_replication WHERE replay_lag > {limit}) THEN RETURN; END IF; "
        f"PERFORM pg_catalog.pg_sleep({LAG_SECONDS}); END LOOP; END $lag$"
    )


# --- sessions that end ----------------------------------------------------------------------------------------------------

SESSION_ENDED = "the database server ended the session, as an administrator, a shutdown or a newer attempt at this window does"
"""The reason for an error, if the server ended an open session."""

_ENDED = re.compile(
    # PostgreSQL itself, then libpq and its clients
    "terminating connection due to administrator command|server closed the connection unexpectedly"
    "|the connection is (?:lost|closed)|SSL connection has been closed unexpectedly|SSL SYSCALL error: EOF detected"
    # MariaDB and MySQL, then PyMySQL
    r"|Connection was killed|MySQL server has gone away|Lost connection to MySQL server during query(?! \(timed out)"
    # their JDBC drivers
    "|An I/O error occurred while sending to the backend|unexpected end of stream"
)
_NEVER_BEGAN = "connection to server at"
"""The beginning of libpq's message about a session that could not be opened."""


def is_session_ended(message: str) -> bool:
    """Return True if the message of a driver, or a stack trace with it, says that the server ended an open session."""
    return _NEVER_BEGAN not in message and _ENDED.search(message) is not None


_LOGIN_REFUSED = re.compile(
    r"FATAL: +(?:password authentication failed|no pg_hba\.conf entry|pg_hba\.conf rejects|database \S+ does not exist"
    r"|role \S+ (?:does not exist|is not permitted to log in)|permission denied for database"
    r"|unrecognized configuration parameter)|no password supplied"
    r"|server does not support SSL, but SSL was required|invalid sslmode value|certificate verify failed"
    r"|root certificate file \S+ does not exist"
)


def is_login_refused(message: str) -> bool:
    """Return True if PostgreSQL or libpq has refused a login, and would do so again. libpq has no SQLSTATE for it."""
    return _LOGIN_REFUSED.search(message) is not None


_OF_MYSQL = re.compile(r"Access denied for user \S+ \(using password")
_NO_RIGHT = re.compile(r"permission denied for|command denied to user|Access denied for user \S+ to database")


def find_access_remedy(message: str) -> str:
    """Return the action if a database server has refused a login, or a statement for want of a right; "" for other errors.

    :param message: the whole message of the driver.
    """
    if is_login_refused(message) or _OF_MYSQL.search(message):
        return "Correct the login of the Airflow connection, or let the server accept it from this machine"
    return "Grant the user of the connection what is missing" if _NO_RIGHT.search(message) else ""


_HINTS = re.compile(r"^connection failed: |\s*Is the server running on that host and accepting TCP/IP connections\?")
"""The text that libpq adds to the reason for which it has no connection."""


def describe_driver_message(message: str) -> str:
    """Return the message of a driver without its general hints; :data:`SESSION_ENDED` if the server ended the session."""
    return SESSION_ENDED if is_session_ended(message) else _HINTS.sub("", message)


def choose_action(found: str, otherwise: str) -> str:
    """Return the action for a problem that a validation has found: to run the task again, if the server ended the session."""
    return "Run the task again" if SESSION_ENDED in found else otherwise
