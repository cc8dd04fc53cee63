"""Sessions of the server that an Airflow connection of type ``postgres`` leads to, the translation of its errors, and its
catalog: tables, their columns and indexes, and the rights of the connection's role.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import KafkaSparkError, SinkRejected, SinkUnavailable
from airflow_kafka_spark.hooks.connections import look_up
from airflow_kafka_spark.hooks.databases import (
    APPLICATION,
    Name,
    PostgresServer,
    apply_session_settings,
    describe_driver_message,
    fetch_rows,
    find_access_remedy,
    quote_literal,
    read_server,
    run,
)
from airflow_kafka_spark.sinks.postgres import sql

if TYPE_CHECKING:
    import psycopg


@dataclass(frozen=True)
class SinkServer(PostgresServer):
    """The server of a sink.

    :param lock_timeout: seconds that a session waits for another one's lock.
    """

    lock_timeout: float = 60.0

    def connect(self, application_name: str = APPLICATION) -> psycopg.Connection:
        """Open a session in autocommit mode, with the parameters of ``sql.set_session_settings``."""
        import psycopg

        # No prepared statements: they would outlive the stages that they refer to.
        connection = psycopg.connect(self.make_connection_string(application_name), autocommit=True, prepare_threshold=None)
        try:
            settings = sql.set_session_settings(self.lock_timeout)
            apply_session_settings(settings, partial(run, connection), partial(fetch_rows, connection))
        except BaseException:
            connection.close()
            raise
        return connection

    @contextmanager
    def open_session(self, doing: str, window: str) -> Iterator[psycopg.Connection]:
        """Open a session whose errors are raised as errors of this package.

        :param doing: the purpose of the session, for messages.
        :param window: the window, or the pipeline, in messages.
        :raises SinkUnavailable: the server cannot be reached, or the connection broke.
        :raises SinkRejected: the server refused a statement.
        """
        import psycopg

        try:
            connection = self.connect()
            try:
                yield connection
            finally:
                connection.close()
        except psycopg.Error as error:
            raise self.explain(error, window, f"{doing} {window}") from self.get_safe_cause(error)

    def explain(self, error: BaseException, window: str, doing: str, target: str = "") -> KafkaSparkError:
        """Translate an error of psycopg or ADBC: :class:`SinkRejected` if trying again would fail again, else
        :class:`SinkUnavailable`."""
        state = getattr(error, "sqlstate", None) or ""
        detail = describe_driver_message(self.scrub(format_message(error)))
        place = target or self.where
        if state == "55P03":
            detail += (
                f" after {self.lock_timeout:g} s: another session holds a lock on what this one needs. "
                f"Sessions of this pipeline have an application_name that begins with `{APPLICATION}`, see pg_stat_activity"
            )
        if state == "55000" or state[:2] in ("42", "44", "0A", "0L", "28") or is_refusal(error):
            return SinkRejected(place, window, detail, _find_action(state) or (_DEAD_LETTERS if is_refusal(error) else ""))
        return SinkUnavailable(place, doing, detail, _REMEDIES.get(state) or find_access_remedy(str(error)) or None)


_KNOWN = re.compile(r"(0[0-389ABFLPZ]|10|2[0-8BDF]|3[489BDF]|4[024]|5[34578]|72|F0|HV|P0|XX)...")
"""The classes of PostgreSQL's own error codes. Other codes were chosen by a function (``ERRCODE``)."""


_REMEDIES = {
    "53100": "Make room on the server's disk, or in the tablespace",
    "53400": "Raise the limit of the server that the message names",
}
_DEAD_LETTERS = (
    "Correct the target or the records, or send such records to a dead letter topic (`errors_tolerance`), and run the task "
    "again: it moves the same window"
)


def is_refusal(error: BaseException) -> bool:
    """Return True if the error is about the content of rows: a value, a constraint, a text too long for its index, or an error
    that a trigger's function raises (class P0 or 38, or a code of its own)."""
    state = getattr(error, "sqlstate", None) or ""
    is_chosen = len(state) == 5 and state.isalnum() and not _KNOWN.fullmatch(state)
    return is_chosen or state[:2] in ("22", "23", "38", "P0") or state == "54000"


def read_connection(conn_id: str, lock_timeout: float = 60.0) -> SinkServer:
    """Return the server of an Airflow connection.

    :param lock_timeout: seconds that its sessions wait for locks.
    :raises ConnectionInvalid: the connection is not defined, of another type, or has options that are not known.
    """
    return SinkServer(**vars(read_server(look_up(conn_id, "postgres"))), lock_timeout=lock_timeout)


def make_pipeline_key(windows: Name, pipeline: str) -> str:
    """Return 12 hex digits that identify a pipeline among all that share a database."""
    return hashlib.sha256(f"{windows}\0{pipeline}".encode()).hexdigest()[:12]


def make_lock_key(*parts: str) -> int:
    """Return the number of an advisory lock."""
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big", signed=True)


def format_message(error: BaseException) -> str:
    """Return the server's message in one line."""
    diagnosis = getattr(error, "diag", None)
    if diagnosis is None or not diagnosis.message_primary:
        # ADBC puts the server's message between its own text and the statement.
        text = " ".join(str(error).split())
        said = re.search(r"(?:ERROR|FATAL): (.*?)(?: (?:LINE \d+: .*?)?\^? ?Query was: .*| ?[.] SQLSTATE: \w+)?$", text)
        return said[1] if said else text
    parts = [diagnosis.message_primary]
    if diagnosis.column_name and f'"{diagnosis.column_name}"' not in parts[0]:
        parts.append(f"column `{diagnosis.column_name}`")
    parts += [part for part in (diagnosis.message_detail, diagnosis.context) if part]
    return "; ".join(" ".join(part.split()).rstrip(".") for part in parts)


def _find_action(state: str) -> str:
    if state == "23505":
        return 'For rows that replace earlier ones use `mode="upsert"` with `key=`; else the records hold a key twice'
    if state == "42501":
        return "Grant the connection's role what is missing"
    return ""


@dataclass(frozen=True)
class TargetColumn:
    """A column of the target table, as the catalog describes it.

    :param type: the type as users write it, ``character varying(5)``.
    :param base: the type without domain and modifier, as a cast takes it: ``character varying``.
    :param category: PostgreSQL's category of ``base``: ``S`` string, ``A`` array, ``E`` enum, ``U`` user-defined, ...
    :param scale: digits after the point of a ``numeric`` that limits them, or of the elements of an array.
    :param precise: the type with its modifier but without its domain: ``numeric(12,2)``.
    :param element: the type of an array's elements; else empty.
    :param element_category: the category of ``element``.
    :param domain: True if the type is a domain over ``base``.
    :param collation: an explicit collation, quoted; empty for the type's own.
    :param required: True if it takes no NULL and has no default.
    :param generated: True if its values are computed (``GENERATED ALWAYS``).
    """

    name: str
    type: str
    base: str
    category: str
    scale: int | None = None
    precise: str = ""
    element: str = ""
    element_category: str = ""
    domain: bool = False
    collation: str = ""
    required: bool = False
    generated: bool = False


@dataclass(frozen=True)
class Table:
    """A relation as the catalog describes it.

    :param kind: ``r`` table, ``p`` partitioned table, ``v`` view, ``m`` materialized view, ``f`` foreign table.
    :param logged: False for one that a crash of the server empties.
    :param hides_rows: True if a row-level policy applies to this role.
    :param filters: True if a trigger may change or drop rows before they are inserted.
    :param rights: those of SELECT, INSERT, UPDATE and DELETE that this role has.
    :param columns: the columns by name, in their order.
    :param unique: the column sets of unique indexes that ON CONFLICT can use: valid, not partial, not deferrable, no expressions.
    :param deferrable: the column sets of deferrable constraints, with which ON CONFLICT fails even beside a usable index.
    :param owned: True if this role may do what only the owner may, such as adding columns.
    """

    name: Name
    kind: str
    logged: bool
    hides_rows: bool
    filters: bool
    rights: frozenset[str]
    columns: Mapping[str, TargetColumn] = field(default_factory=dict)
    unique: tuple[frozenset[str], ...] = ()
    deferrable: tuple[frozenset[str], ...] = ()
    owned: bool = True


@dataclass(frozen=True)
class ServerFacts:
    """Properties of the server and of the session's role.

    :param version: ``server_version_num``, for instance 160014.
    :param release: the version as users know it, ``16.14``.
    :param role: the session's role.
    :param standby: True if the server is a standby.
    :param read_only: True if transactions are read-only by default.
    :param may_create_temporary: True if the role may create temporary tables.
    :param sessions: maximum number of sessions of the role, or in the database for a role that is no superuser; None without one.
    """

    version: int
    release: str
    role: str
    standby: bool
    read_only: bool
    may_create_temporary: bool
    sessions: int | None = None


def read_server_facts(connection: psycopg.Connection) -> ServerFacts:
    """Return the properties of the server and of the session's role."""
    found = fetch_rows(
        connection,
        "SELECT current_setting('server_version_num')::int, current_setting('server_version'), current_user::text, "
        "pg_is_in_recovery(), current_setting('transaction_read_only') = 'on', "
        "has_database_privilege(current_database(), 'TEMPORARY'), "
        "(SELECT least(nullif(rolconnlimit, -1), nullif(datconnlimit, -1)) FROM pg_catalog.pg_roles, pg_catalog.pg_database "
        "WHERE rolname = session_user AND datname = current_database() AND NOT rolsuper)",
    )
    return ServerFacts(*found[0])


def read_schema_rights(connection: psycopg.Connection, schema: str) -> frozenset[str] | None:
    """Return those of USAGE and CREATE that this role has in a schema, or None if there is no such schema."""
    found = fetch_rows(
        connection,
        "SELECT has_schema_privilege(oid, 'USAGE'), has_schema_privilege(oid, 'CREATE') "
        f"FROM pg_catalog.pg_namespace WHERE nspname = {quote_literal(schema)}",
    )
    if not found:
        return None
    return frozenset(right for right, has in zip(("USAGE", "CREATE"), found[0], strict=True) if has)


_RELATION = """
SELECT c.oid::bigint, c.relkind::text, c.relpersistence = 'p', c.relkind IN ('r', 'p') AND row_security_active(c.oid),
    EXISTS (SELECT FROM pg_catalog.pg_trigger g WHERE g.tgrelid = c.oid AND NOT g.tgisinternal AND g.tgtype & 7 = 7),
    array_remove(ARRAY[
        CASE WHEN has_table_privilege(c.oid, 'SELECT') THEN 'SELECT' END,
        CASE WHEN has_table_privilege(c.oid, 'INSERT') THEN 'INSERT' END,
        CASE WHEN has_table_privilege(c.oid, 'UPDATE') THEN 'UPDATE' END,
        CASE WHEN has_table_privilege(c.oid, 'DELETE') THEN 'DELETE' END], NULL),
    pg_has_role(c.relowner, 'USAGE')
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = {schema} AND c.relname = {table} AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
"""

# format_type(oid, -1), not NULL: that would call char(5) "character", which as a cast means char(1).
_COLUMNS = """
WITH RECURSIVE base AS (
    SELECT attnum, atttypid AS oid, atttypmod AS modifier
    FROM pg_catalog.pg_attribute WHERE attrelid = {oid} AND attnum > 0 AND NOT attisdropped
    UNION ALL
    SELECT b.attnum, t.typbasetype, t.typtypmod
    FROM base b JOIN pg_catalog.pg_type t ON t.oid = b.oid WHERE t.typtype = 'd')
SELECT a.attname, format_type(a.atttypid, a.atttypmod), format_type(t.oid, -1), t.typcategory::text,
    CASE WHEN 1700 IN (t.oid, t.typelem) AND b.modifier >= 0 THEN (((b.modifier - 4) & 2047) # 1024) - 1024 END,
    format_type(t.oid, b.modifier),
    coalesce(format_type(e.oid, -1), ''), coalesce(e.typcategory::text, ''),
    a.atttypid <> t.oid,
    CASE WHEN a.attcollation NOT IN (0, t.typcollation) THEN
        (SELECT quote_ident(n.nspname) || '.' || quote_ident(l.collname)
         FROM pg_catalog.pg_collation l JOIN pg_catalog.pg_namespace n ON n.oid = l.collnamespace WHERE l.oid = a.attcollation)
    ELSE '' END,
    a.attnotnull AND NOT a.atthasdef AND a.attidentity = '',
    a.attgenerated <> '' OR a.attidentity = 'a'
FROM base b JOIN pg_catalog.pg_type t ON t.oid = b.oid AND t.typtype <> 'd'
JOIN pg_catalog.pg_attribute a ON a.attrelid = {oid} AND a.attnum = b.attnum
LEFT JOIN pg_catalog.pg_type e ON e.oid = t.typelem AND t.typcategory = 'A'
ORDER BY a.attnum
"""

_UNIQUE = """
SELECT (SELECT array_agg(a.attname::text) FROM unnest(i.indkey::int2[]) WITH ORDINALITY AS k(attnum, place)
        JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum WHERE k.place <= i.indnkeyatts),
    i.indimmediate
FROM pg_catalog.pg_index i
WHERE i.indrelid = {oid} AND i.indisunique AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
"""


def read_table(connection: psycopg.Connection, name: Name) -> Table | None:
    """Return a relation as the catalog describes it; None if no relation has this name."""
    found = fetch_rows(connection, _RELATION.format(schema=quote_literal(name.schema), table=quote_literal(name.table)))
    if not found:
        return None
    oid, kind, logged, hides_rows, filters, rights, owned = found[0]
    columns = [TargetColumn(*row) for row in fetch_rows(connection, _COLUMNS.replace("{oid}", str(oid)))]
    indexes = [(frozenset(names), immediate) for names, immediate in fetch_rows(connection, _UNIQUE.replace("{oid}", str(oid)))]
    unique, deferrable = (tuple(names for names, immediate in indexes if immediate is wanted) for wanted in (True, False))
    named = {c.name: c for c in columns}
    return Table(name, kind, logged, hides_rows, filters, frozenset(rights), named, unique, deferrable, owned)
