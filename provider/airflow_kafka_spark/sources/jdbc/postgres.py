"""PostgreSQL for JdbcSource: psycopg on the driver, pgjdbc in Spark's JDBC reader, ADBC in Spark's tasks.

Each type is read by an expression with which no value changes on its way into Spark (:func:`describe_column`). Timestamps are
transferred as microseconds and dates as days, because ``java.sql.Timestamp`` would make them depend on the JVM's zone and
calendar. Values for which Spark has no type are transferred as the text that the database itself writes.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from airflow_kafka_spark.errors import Problem, SourceRejected
from airflow_kafka_spark.formats.base import Kind
from airflow_kafka_spark.formats.types import MAX_PRECISION
from airflow_kafka_spark.hooks.databases import (
    APPLICATION,
    OLDEST_POSTGRES,
    SEES_LAG,
    PostgresServer,
    apply_session_settings,
    describe_driver_message,
    fetch_rows,
    hint_at_similar_table,
    is_login_refused,
    make_settings_query,
    prefer_indexes,
    quote,
    quote_literal,
    read_system_identifier,
    resolve_table,
    run,
    wait_for_replicas,
)
from airflow_kafka_spark.sources.jdbc.database import (
    LOCK_SECONDS,
    REFUSED_SQLSTATES,
    DatabaseSession,
    MissingRelation,
    ReadLimits,
    Relation,
    SourceColumn,
    SourceDatabase,
    SqlDialect,
    bracket_ipv6,
    escape_template,
)
from airflow_kafka_spark.sources.jdbc.pages import find_pages_obstacle

if TYPE_CHECKING:
    import psycopg

    from airflow_kafka_spark.sources.base import SplitReader

DRIVER = "org.postgresql:postgresql:42.7.8"
STREAMED_ROWS = 5_000
"""Rows that the server sends at a time."""
LOCK_CLASS = 0x616B73
"""The first number of the advisory locks that limit the sessions of tasks; the second one counts from 1."""
OLDEST_ADBC = (1, 13)
"""The first release of adbc-driver-postgresql whose values were compared with Spark's."""

# Gives all sessions equal settings, whatever server, database, role and JVM set, because bounds and values are transferred as
# text.
SESSION = make_settings_query(
    {
        "TimeZone": "UTC",
        "DateStyle": "ISO, MDY",
        "IntervalStyle": "postgres",
        "extra_float_digits": "1",
        "bytea_output": "hex",
        "xmlbinary": "base64",
        "client_min_messages": "warning",
        "standard_conforming_strings": "on",
        "statement_timeout": "0",
        "transaction_timeout": "0",
        "idle_in_transaction_session_timeout": "0",
        "idle_session_timeout": "0",
        "default_transaction_isolation": "read committed",
        "default_transaction_read_only": "on",
        "transaction_read_only": "on",
    }
)

# libpq's options and pgjdbc's properties; an empty name: the driver needs none.
_PROPERTIES = {
    "user": "user",
    "password": "password",
    "sslmode": "sslmode",
    "sslrootcert": "sslrootcert",
    "sslcert": "sslcert",
    "sslkey": "sslkey",
    "sslpassword": "sslpassword",
    "sslnegotiation": "sslNegotiation",
    "channel_binding": "channelBinding",
    "gssencmode": "gssEncMode",
    "krbsrvname": "kerberosServerName",
    "options": "options",
    "connect_timeout": "connectTimeout",
    "target_session_attrs": "targetServerType",
    "host": "",
    "port": "",
    "dbname": "",
    "client_encoding": "",
    "keepalives": "",
    "keepalives_idle": "",
    "keepalives_interval": "",
    "keepalives_count": "",
    "tcp_user_timeout": "",
    "sslcompression": "",
    "sslsni": "",
    "replication": "",
}
_QUESTION_MARK = re.compile(
    r"""(?<![\w$])[eE]'(?:[^'\\]|\\.|'')*'|'[^']*'|"[^"]*"|--[^\n]*|/\*.*?\*/|(?<![\w$])\$(\w*)\$.*?\$\1\$|\?""", re.DOTALL
)
"""A question mark, as the operators of jsonb have it; or a text, a name or a comment, which may contain some."""
_TARGETS = {
    "any": "any",
    "read-write": "primary",
    "primary": "primary",
    "read-only": "secondary",
    "standby": "secondary",
    "prefer-standby": "preferSecondary",
}


class PostgresDialect(SqlDialect):
    """Values are transferred as the text of their type's output function, and are converted back by a cast to the type."""

    def quote(self, name: str) -> str:
        return quote(name)

    def make_text(self, column: SourceColumn, name: str) -> str:
        return f"CAST({name} AS text)"

    def make_literal(self, column: SourceColumn, value: str) -> str:
        return f"CAST({quote_literal(value)} AS {column.literal})"

    def make_after_condition(self, names: Sequence[str], literals: Sequence[str]) -> str:
        return _compare(names, ">", literals)

    def make_up_to_condition(self, names: Sequence[str], literals: Sequence[str]) -> str:
        return _compare(names, "<=", literals)

    def make_clock_literal(self, column: SourceColumn, instant: datetime) -> str:
        zone = "+00" if column.clock == "zoned" else ""
        # As a timestamp first: a date takes no time of day.
        kind = "timestamp with time zone" if zone else "timestamp without time zone"
        return f"CAST(CAST({quote_literal(f'{instant:%Y-%m-%d %H:%M:%S.%f}{zone}')} AS {kind}) AS {column.literal})"


def _compare(names: Sequence[str], operator: str, literals: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{names[0]} {operator} {literals[0]}"
    return f"({', '.join(names)}) {operator} ({', '.join(literals)})"


@dataclass
class PostgresSession(DatabaseSession):
    """An open session of PostgreSQL.

    :param connection: the driver's connection, in autocommit mode.
    :param server: the server, for messages.
    """

    connection: psycopg.Connection
    server: PostgresServer
    dialect = PostgresDialect()

    def begin(self, statement: str) -> None:
        apply_session_settings(statement, partial(run, self.connection), self.fetch_rows)

    def close(self) -> None:
        self.connection.close()

    def fetch_rows(self, statement: str) -> list[tuple]:
        return fetch_rows(self.connection, statement)

    def stream_rows(self, statement: str) -> Iterator[tuple]:
        with self.connection.transaction(), self.connection.cursor("streamed") as cursor:
            cursor.itersize = STREAMED_ROWS
            cursor.execute(statement.encode())
            yield from cursor

    def prefer_indexes(self) -> None:
        self.fetch_rows(prefer_indexes(is_local=False))

    def estimate_rows(self, relation: str) -> int:
        plan = self.fetch_rows(f"EXPLAIN (FORMAT JSON) SELECT 1 FROM {relation}")[0][0]
        return int(plan[0]["Plan"]["Plan Rows"])

    def find_pages_obstacle(self, relation: Relation) -> str:
        return find_pages_obstacle(self, relation, self.connection.info.server_version // 10_000)

    def get_text_order(self, relation: Relation, column: SourceColumn) -> str:
        if not relation.writers:
            return f"unknown, of {self.server.where}"
        ((name, database),) = self.fetch_rows(_COLLATION.format(oid=relation.writers[0], column=quote_literal(column.name)))
        collation = name or database
        # Other collations depend on the libraries of the server's machine.
        return "bytes" if collation in ("C", "POSIX") else f"{collation}, of {self.read_identity() or self.server.where}"

    def read_clock(self) -> datetime:
        found: datetime = self.fetch_rows("SELECT clock_timestamp()")[0][0]
        return found.astimezone(timezone.utc)

    def read_identity(self) -> str:
        return read_system_identifier(self.connection)

    # --- the catalog ---

    def read_role(self) -> str:
        return quote(self.fetch_rows("SELECT current_user")[0][0])

    def find_server_problems(self) -> Iterator[Problem]:
        version, release = self.fetch_rows(
            "SELECT current_setting('server_version_num')::int, current_setting('server_version')"
        )[0]
        if version < OLDEST_POSTGRES * 10_000:
            what = f"connection `{self.server.conn_id}` leads to PostgreSQL {release}; expected {OLDEST_POSTGRES} or newer"
            yield Problem("source.conn_id", what)

    def find_table(self, schema: str | None, table: str) -> Relation | MissingRelation:
        name = resolve_table(self.connection, schema, table)
        found = self.fetch_rows(_OID.format(schema=quote_literal(name.schema), table=quote_literal(name.table)))
        if not found:
            return MissingRelation(str(name), hint_at_similar_table(self.connection, name))
        oid, kind, usage = found[0]
        attributes = self.fetch_rows(_ATTRIBUTES.format(oid=oid))
        tree = self.fetch_rows(_TREE.format(oid=oid)) if kind in "rpf" else []
        writers = tuple(row[0] for row in tree) if kind in "rp" else ()
        is_foreign = any(row[1] for row in tree)
        found = self.fetch_rows(_INDEXES.format(oid=oid))
        keys = tuple(tuple(columns) for columns, unique, _ in found if unique)
        indexes = tuple(tuple(columns) for columns, _, ordered in found if ordered)
        columns = self._read_columns(attributes)
        has_children = kind == "r" and len(tree) > 1
        closed = "" if usage else quote(name.schema)
        return Relation(str(name), str(name), columns, keys, indexes, writers, oid, is_foreign, has_children, closed)

    def query(self, query: str, name: str) -> Relation:
        # On a separate line, because the query may end with a comment.
        sql = f"({query.strip().rstrip(';')}\n) AS __query"
        attributes = [(*field, False, 0, True, None) for field in self._describe(f"SELECT * FROM {sql}")]
        names = [row[0] for row in attributes]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise SourceRejected(name, f"the query has two columns `{twice[0]}`", "Give one of them another name")
        return Relation(sql, "the query", self._read_columns(attributes))

    def _describe(self, statement: str) -> list[tuple[str, int, int]]:
        """Return name, type's oid and modifier of each column of a statement.

        The statement is prepared, not run: the server then accepts one statement only, so that a query cannot smuggle in another.
        """
        from psycopg.errors import error_from_result
        from psycopg.pq import ExecStatus

        libpq = self.connection.pgconn
        result = libpq.prepare(b"", statement.encode())
        if result.status == ExecStatus.COMMAND_OK:
            result = libpq.describe_prepared(b"")
        if result.status != ExecStatus.COMMAND_OK:
            raise error_from_result(result)
        return [((result.fname(i) or b"").decode(), result.ftype(i), result.fmod(i)) for i in range(result.nfields)]

    def _read_columns(self, attributes: Sequence[tuple]) -> Mapping[str, SourceColumn]:
        """Return the columns by name.

        :param attributes: per column its name, the type's oid and modifier, NOT NULL, declared dimensions, the right to read, and
            the collation (None: that of the database).
        """
        # Operators of other schemas are not found, and the server may use others instead: `>` of text for that of citext.
        visible = ", ".join(quote_literal(name) for name in self.fetch_rows("SELECT current_schemas(true)")[0][0])
        oids = ",".join(str(row[1]) for row in attributes)
        modifiers = ",".join(str(row[2]) for row in attributes)
        with self.connection.transaction():
            # Names of types then mean one type in every session, whatever its search_path.
            self.fetch_rows("SELECT set_config('search_path', '', true)")
            lists = {"oids": quote_literal(f"{{{oids}}}"), "modifiers": quote_literal(f"{{{modifiers}}}")}
            types = self.fetch_rows(_TYPES.format(**lists, visible=visible))
        micros = MICROS if self.connection.info.server_version >= 140_000 else MICROS_BEFORE_14
        columns = {}
        for (name, _, _, required, dimensions, readable, collation), facts in zip(attributes, types, strict=True):
            column = describe_column(name, facts, required=required, dimensions=dimensions, readable=readable, micros=micros)
            columns[name] = replace(column, collation=collation or "")
        return columns

    # --- cursors ---

    def find_cursor_problems(self, relation: Relation, column: SourceColumn) -> Iterator[Problem]:
        for name, increment, cycles, _ in self._read_sequences(relation, column):
            what = "runs downwards" if increment < 0 else "begins again when it is used up (CYCLE)" if cycles else ""
            if what:
                found = f"its sequence {name} {what}; expected values that only grow"
                yield Problem("source.incrementing_column", f"`{column.name}`: {found}", "Use a timestamp, or bulk")

    def read_view_definition(self, relation: Relation) -> str:
        query = (
            f"SELECT pg_catalog.pg_get_viewdef(oid) FROM pg_catalog.pg_class WHERE oid = {relation.table_id} AND relkind = 'v'"
        )
        return next((str(definition) for (definition,) in self.fetch_rows(query)), "")

    def explain_sequence_reset(self, relation: Relation, column: SourceColumn, value: str) -> str:
        for name, _, _, last in self._read_sequences(relation, column):
            if last is not None and last < int(value):
                return f"sequence {name} of `{column.name}` is at {last}, and rows up to {value} were read: it was set back"
        return ""

    def _read_sequences(self, relation: Relation, column: SourceColumn) -> list[tuple]:
        """Return the sequences that belong to the column: name, increment, CYCLE, and the last value if that may be seen."""
        if not relation.writers or column.type not in ("smallint", "integer", "bigint"):
            return []
        return self.fetch_rows(_SEQUENCES.format(oid=relation.writers[0], column=quote_literal(column.name)))

    def find_task_read_obstacle(self) -> str:
        if importlib.util.find_spec("adbc_driver_postgresql") is None:
            return "adbc-driver-postgresql is not installed"
        release = importlib.metadata.version("adbc-driver-postgresql")
        if tuple(map(int, re.findall(r"\d+", release)[:2])) < OLDEST_ADBC:
            return f"adbc-driver-postgresql {release} is older than {'.'.join(map(str, OLDEST_ADBC))}"
        encoding = self.find_foreign_encoding()
        return f"the database's texts are in {encoding}" if encoding else ""

    def find_foreign_encoding(self) -> str:
        encoding = self.connection.info.parameter_status("server_encoding") or ""
        return "" if encoding == "UTF8" else encoding

    # --- writers ---

    def find_hidden_writers(self, relation: Relation) -> str:
        tables, is_foreign = relation.writers, relation.is_foreign
        if self.fetch_rows("SELECT pg_catalog.pg_is_in_recovery()")[0][0]:
            return "the server is a standby, which does not show the transactions that write on its primary"
        if not tables and not is_foreign:
            tables, is_foreign = self._list_scanned_tables(relation)
        if is_foreign:
            return f"another server holds rows of {relation.name}, and this one does not show the transactions that write them"
        if tables and self.fetch_rows(_SUBSCRIPTIONS.format(tables=", ".join(map(str, tables)))):
            return f"a subscription writes {relation.name}, and this server does not show the transactions of its publisher"
        return ""

    def _list_scanned_tables(self, relation: Relation) -> tuple[tuple[int, ...], bool]:
        """Return the tables that a view or a query reads, and True if one of them is a foreign table."""
        names, kinds = set(), set()
        left = [self.fetch_rows(f"EXPLAIN (VERBOSE, FORMAT JSON) SELECT * FROM {relation.sql}")[0][0][0]["Plan"]]
        while left:
            node = left.pop()
            left += node.get("Plans", ())
            kinds.add(node["Node Type"])
            if "Relation Name" in node:
                names.add(f"({quote_literal(node['Schema'])}, {quote_literal(node['Relation Name'])})")
        found = self.fetch_rows(_OIDS.format(names=", ".join(sorted(names)))) if names else ()
        return tuple(oid for (oid,) in found), "Foreign Scan" in kinds

    def wait_for_writers(self, relation: Relation, seconds: float) -> str:
        tables = f"relation IN ({', '.join(map(str, relation.writers))})" if relation.writers else "relation >= 16384"
        writing = (
            "SELECT virtualtransaction, min(pid) FROM pg_catalog.pg_locks WHERE locktype = 'relation' AND granted "
            f"AND mode IN ({_WRITE_LOCKS}) AND pid IS DISTINCT FROM pg_backend_pid() "
            f"AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database()) AND {tables} GROUP BY 1"
        )
        # A virtual transaction id is never used again, so an id that is listed later belongs to a transaction of the first list.
        waiting = dict(self.fetch_rows(writing))
        until, pause = time.monotonic() + seconds, 0.005
        while waiting:
            if time.monotonic() >= until:
                pids = ", ".join(str(pid) if pid else "a prepared transaction" for pid in waiting.values())
                return f"transactions that write it (server process {pids})"
            time.sleep(pause)
            pause = min(pause * 2, 0.25)
            waiting = {key: pid for key, pid in self.fetch_rows(writing) if key in waiting}
        return ""


_WRITE_LOCKS = "'RowExclusiveLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock'"

_OID = """
SELECT c.oid::bigint, c.relkind::text, has_schema_privilege(n.oid, 'USAGE')
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = {schema} AND c.relname = {table} AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
"""

# From the catalog: a view may read tables of schemas that the role may not use.
_OIDS = """
SELECT c.oid::bigint FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE (n.nspname, c.relname) IN ({names})
"""

# A constraint that is NOT VALID (PostgreSQL 18) leaves rows with NULL in the table, and an outer join of a view makes NULL of a
# domain that takes none.
_ATTRIBUTES = """
SELECT a.attname, a.atttypid::bigint, a.atttypmod,
    a.attnotnull AND NOT EXISTS (SELECT FROM pg_catalog.pg_constraint n
        WHERE n.conrelid = a.attrelid AND n.contype = 'n' AND NOT n.convalidated AND a.attnum = ANY (n.conkey))
    OR t.typnotnull AND r.relkind NOT IN ('v', 'm'), a.attndims,
    has_column_privilege(a.attrelid, a.attnum, 'SELECT'),
    (SELECT c.collname::text FROM pg_catalog.pg_collation c WHERE c.oid = a.attcollation AND a.attcollation <> 100)
FROM pg_catalog.pg_attribute a JOIN pg_catalog.pg_type t ON t.oid = a.atttypid JOIN pg_catalog.pg_class r ON r.oid = a.attrelid
WHERE a.attrelid = {oid} AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum
"""

# The table itself first. Transactions that write a partition or child table hold their locks on that one.
_TREE = """
WITH RECURSIVE tree AS (
    SELECT {oid}::oid AS oid, 0 AS depth
    UNION ALL SELECT i.inhrelid, tree.depth + 1 FROM tree JOIN pg_catalog.pg_inherits i ON i.inhparent = tree.oid)
SELECT tree.oid::bigint, c.relkind = 'f' FROM tree JOIN pg_catalog.pg_class c ON c.oid = tree.oid ORDER BY tree.depth, tree.oid
"""

# A publisher may send rows of partitions as those of a partitioned table above them.
_SUBSCRIPTIONS = """
SELECT 1 FROM pg_catalog.pg_subscription_rel WHERE srrelid IN (
    SELECT unnest(ARRAY[{tables}])::oid
    UNION ALL SELECT relid::oid FROM unnest(ARRAY[{tables}]) AS t, pg_catalog.pg_partition_ancestors(t::oid::regclass)) LIMIT 1
"""

# The primary key first, then the index of the fewest columns. A key is unique at any time and takes no NULL; rows are in their
# own order in a btree that sorts upwards, by the column's collation and the type's usual order.
_INDEXES = """
SELECT k.columns, i.indisunique AND i.indimmediate AND k.required, m.amname = 'btree' AND k.usual
FROM pg_catalog.pg_index i
JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
JOIN pg_catalog.pg_am m ON m.oid = c.relam
CROSS JOIN LATERAL (
    SELECT array_agg(a.attname::text ORDER BY n) AS columns, bool_and(a.attnotnull) AS required,
        bool_and(i.indoption[n - 1] = 0 AND i.indcollation[n - 1] IN (0, a.attcollation) AND o.opcdefault) AS usual
    FROM generate_series(1, i.indnkeyatts) AS n
    JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[n - 1]
    JOIN pg_catalog.pg_opclass o ON o.oid = i.indclass[n - 1]) AS k
WHERE i.indrelid = {oid} AND i.indisvalid AND i.indpred IS NULL AND i.indexprs IS NULL
ORDER BY i.indisprimary DESC, i.indnkeyatts, i.indexrelid
"""

# format_type(oid, -1), not NULL: that would call char(5) "character", which as a cast means char(1).
_TYPES = """
WITH RECURSIVE declared AS (
    SELECT place, oid, modifier FROM unnest({oids}::oid[], {modifiers}::int[]) WITH ORDINALITY AS d(oid, modifier, place)),
base AS (
    SELECT place, oid, modifier FROM declared
    UNION ALL
    SELECT b.place, t.typbasetype, t.typtypmod FROM base b JOIN pg_catalog.pg_type t ON t.oid = b.oid WHERE t.typtype = 'd')
SELECT format_type(d.oid, d.modifier), format_type(t.oid, -1), b.modifier, t.typtype::text,
    CASE WHEN e.typbasetype = 1042 THEN 'bpchar' ELSE coalesce(format_type(e.oid, -1), '') END, coalesce(e.typtype::text, ''),
    t.typtype = 'e' OR t.oid IN (1042, 1043) OR EXISTS (
        SELECT FROM pg_catalog.pg_opclass o JOIN pg_catalog.pg_am m ON m.oid = o.opcmethod
        JOIN pg_catalog.pg_amop a ON a.amopfamily = o.opcfamily AND a.amoplefttype = t.oid AND a.amoprighttype = t.oid
        JOIN pg_catalog.pg_operator p ON p.oid = a.amopopr JOIN pg_catalog.pg_namespace n ON n.oid = p.oprnamespace
        WHERE m.amname = 'btree' AND o.opcdefault AND o.opcintype = t.oid AND p.oprname = '>' AND n.nspname IN ({visible}))
FROM declared d JOIN base b ON b.place = d.place
JOIN pg_catalog.pg_type t ON t.oid = b.oid AND t.typtype <> 'd'
LEFT JOIN pg_catalog.pg_type e ON e.oid = t.typelem AND t.typcategory = 'A'
ORDER BY d.place
"""

_COLLATION = """
SELECT CASE WHEN a.attcollation NOT IN (0, 100) THEN c.collname::text END, d.datcollate::text
FROM pg_catalog.pg_attribute a LEFT JOIN pg_catalog.pg_collation c ON c.oid = a.attcollation
JOIN pg_catalog.pg_database d ON d.datname = current_database()
WHERE a.attrelid = {oid} AND a.attname = {column}
"""

_SEQUENCES = """
SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname), s.seqincrement, s.seqcycle,
    CASE WHEN has_sequence_privilege(c.oid, 'SELECT,USAGE') THEN pg_sequence_last_value(c.oid) END
FROM pg_catalog.pg_depend d
JOIN pg_catalog.pg_class c ON c.oid = d.objid AND c.relkind = 'S'
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_sequence s ON s.seqrelid = c.oid
JOIN pg_catalog.pg_attribute a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid
WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass AND d.deptype IN ('a', 'i')
    AND d.refobjid = {oid} AND a.attname = {column}
"""


@dataclass(frozen=True)
class PostgresDatabase(SourceDatabase[PostgresServer]):
    """The server of a connection of type ``postgres``."""

    scheme: ClassVar[Literal["postgres"]] = "postgres"
    packages: ClassVar[tuple[str, ...]] = (DRIVER,)
    driver: ClassVar[str] = "org.postgresql.Driver"
    default_schema: ClassVar[str] = "public"
    session_statement: ClassVar[str] = SESSION

    @property
    def _options(self) -> dict[str, str]:
        from psycopg.conninfo import conninfo_to_dict

        return {name: str(value) for name, value in conninfo_to_dict(self.server.conninfo).items() if value is not None}

    def find_problems(self) -> list[Problem]:
        where = f"connection `{self.conn_id}`"
        unknown = sorted(set(self._options) - set(_PROPERTIES))
        found = [
            Problem("source.conn_id", f"{where} has `{name}`, for which the JDBC driver has nothing", "Remove it from its extra")
            for name in unknown
        ]
        if self.server.host.startswith("/"):
            what = f"{where} leads to a socket file, {self.server.host}; the JDBC driver connects by TCP"
            found.append(Problem("source.conn_id", what, "Give it a host name"))
        return found

    def connect(self) -> PostgresSession:
        import psycopg

        # With the encoding of a SQL_ASCII database, psycopg returns bytes for texts.
        conninfo = f"{self.server.make_connection_string(APPLICATION)} client_encoding=UTF8"
        connection = psycopg.connect(conninfo, autocommit=True, prepare_threshold=None)
        return PostgresSession(connection, self.server)

    def list_driver_errors(self) -> tuple[type[Exception], ...]:
        import psycopg

        return (psycopg.Error,)

    def describe_error(self, error: Exception) -> tuple[str, bool]:
        import psycopg

        assert isinstance(error, psycopg.Error)
        diagnosis = error.diag
        parts = [diagnosis.message_primary, diagnosis.message_detail, diagnosis.message_hint]
        message = "; ".join(" ".join(part.split()).rstrip(".") for part in parts if part) or " ".join(str(error).split())
        refused = (error.sqlstate or "")[:2] in REFUSED_SQLSTATES or is_login_refused(message)
        return describe_driver_message(self.server.scrub(message)), refused

    def get_shown_cause(self, error: Exception) -> BaseException | None:
        return self.server.get_safe_cause(error)

    def make_jdbc_url(self) -> str:
        options = self._options
        hosts = (options.get("host") or "localhost").split(",")
        ports = (options.get("port") or "5432").split(",")
        ports = ports * len(hosts) if len(ports) == 1 else ports
        addresses = ",".join(f"{bracket_ipv6(host)}:{port}" for host, port in zip(hosts, ports, strict=False))
        return f"jdbc:postgresql://{addresses}/{urllib.parse.quote(self.server.database, safe='')}"

    def make_jdbc_properties(self) -> dict[str, str]:
        properties = {_PROPERTIES[name]: value for name, value in self._options.items() if _PROPERTIES.get(name)}
        if "targetServerType" in properties:
            properties["targetServerType"] = _TARGETS.get(properties["targetServerType"], "any")
        return {**properties, "ApplicationName": APPLICATION}

    def escape_question_marks(self, statement: str) -> str:
        return _QUESTION_MARK.sub(lambda found: "??" if found[0] == "?" else found[0], statement)

    def list_waiting_statements(self, limits: ReadLimits) -> list[str]:
        found = []
        if limits.max_sessions is not None:
            # Each statement of the block has a snapshot of its own: a session that waits holds no old rows back.
            found.append(
                f"DO $wait$ BEGIN LOOP FOR slot IN 1..{limits.max_sessions} LOOP "
                f"IF pg_catalog.pg_try_advisory_lock({LOCK_CLASS}, slot) THEN RETURN; END IF; END LOOP; "
                f"PERFORM pg_catalog.pg_sleep({LOCK_SECONDS}); END LOOP; END $wait$"
            )
        if limits.max_replica_lag is not None:
            found.append(wait_for_replicas(limits.max_replica_lag))
        return found

    def find_limit_problems(self, session: DatabaseSession, limits: ReadLimits) -> Iterator[Problem]:
        if limits.max_replica_lag is not None and not session.fetch_rows(SEES_LAG)[0][0]:
            found = "the role may not see the lag of replicas"
            yield Problem("source.max_replica_lag", found, f"GRANT pg_read_all_stats TO {session.read_role()}")

    def make_split_reader(
        self, table: str, columns: Sequence[SourceColumn], statements: Sequence[str], limits: ReadLimits
    ) -> SplitReader:
        from airflow_kafka_spark.sources.jdbc.tasks.read import PostgresSplitReader

        named = tuple((column.name, column.kind) for column in columns if column.kind is not None)
        return PostgresSplitReader(
            self.server, SESSION, table, named, tuple(statements), tuple(self.list_waiting_statements(limits))
        )


# --- types --------------------------------------------------------------------------------------------------------------

ZONED, LOCAL, DATE = "timestamp with time zone", "timestamp without time zone", "date"

_PLAIN = {
    "smallint": "smallint",
    "integer": "int",
    "bigint": "bigint",
    "real": "float",
    "double precision": "double",
    "boolean": "boolean",
    "bytea": "binary",
}
_TEXTS = frozenset({"text", "character varying"})
_INCREASING = frozenset({"smallint", "integer", "bigint", "numeric", "oid", "uuid", "text", "character varying", ZONED, LOCAL})

# Exact for every timestamp there is. Before PostgreSQL 14, extract() gave a double, which holds no microseconds of far centuries.
MICROS = "CAST(extract(epoch FROM {c}) * 1000000 AS bigint)"
MICROS_BEFORE_14 = (
    "(CAST(date_part('epoch', date_trunc('second', {c})) AS bigint) * 1000000 "
    "+ CAST(date_part('microseconds', {c}) AS bigint) % 1000000)"
)
_CLOCKS = {ZONED: "zoned", LOCAL: "local", DATE: "date"}


def describe_column(name: str, facts: tuple, *, required: bool, dimensions: int, readable: bool, micros: str) -> SourceColumn:
    """Return a column of a relation or query with the expressions that read it.

    :param facts: a row of ``_TYPES``: the declared type, the base type of its domains with its modifier and kind, the type
        and kind of an array's elements, and whether a btree index can order it.
    :param micros: the expression for a timestamp's microseconds.
    """
    declared, base, modifier, _, element, element_kind, orders = facts
    kind: Kind | None = None
    if element:
        domain = element_kind == "d" and element != "bpchar"
        select, spark = _make_array_expressions(name, element, modifier, dimensions, micros, domain=domain)
        task, orders = select, False
        # Arrays of several dimensions are read as JSON that the server writes.
        kind = "text" if dimensions > 1 else None
    else:
        select, spark = _make_scalar_expressions(name, base, modifier, micros)
        kind, task = _find_task_scalar(name, base, modifier, select)
    return SourceColumn(
        name=name,
        type=declared,
        nullable=not required,
        literal=base if orders else "",
        clock=_CLOCKS.get(base, ""),
        clock_digits=modifier if base in (ZONED, LOCAL) and 0 <= modifier < 6 else 6,
        increases=base in _INCREASING,
        select=select,
        spark=spark,
        kind=kind,
        task=task,
        readable=readable,
    )


def _make_scalar_expressions(name: str, base: str, modifier: int, micros: str) -> tuple[str, str]:
    if base in _PLAIN or base in _TEXTS:
        return ("CAST({c} AS text)" if base in _TEXTS else "{c}"), "{c}"
    if base == "oid":
        return "CAST({c} AS bigint)", "{c}"
    if base == "bpchar":
        return _BLANK_PADDED, "{c}"
    if base == "numeric":
        return (_make_number_check(name, modifier) if _fits_decimal(modifier) else "CAST({c} AS text)"), "{c}"
    if base in _CLOCKS:
        return _make_clock_expressions(name, base, micros)
    return "CAST({c} AS text)", "{c}"


# A cast to text removes the blanks at the end of the value, which are part of it.
_BLANK_PADDED = "CAST(textin(bpcharout({c})) AS text)"


def _make_clock_expressions(name: str, base: str, micros: str) -> tuple[str, str]:
    if base == DATE:
        return _make_finite_check(name, "({c} - DATE '1970-01-01')", "integer"), "date_from_unix_date({c})"
    spark = "timestamp_micros({c})"
    return _make_finite_check(name, micros), spark if base == ZONED else f"CAST({spark} AS timestamp_ntz)"


def _make_number_check(name: str, modifier: int) -> str:
    """Return an expression that fails with a message on NaN, and has precision and scale of the column otherwise."""
    kind = f"numeric({(modifier - 4) >> 16},{(modifier - 4) & 2047})"
    message = escape_template(quote_literal(f'column "{name}" holds '))
    return f"CASE WHEN {{c}} = 'NaN' THEN CAST({message} || {{c}} AS {kind}) ELSE CAST({{c}} AS {kind}) END"


def _find_task_scalar(name: str, base: str, modifier: int, select: str) -> tuple[Kind | None, str]:
    """Return the kind and the expression by which a task reads: as the type itself, if Arrow has one for it."""
    if base in ("real", "double precision"):
        return None, select
    if base in ("smallint", "integer", "bigint", "boolean", "bytea"):
        kind: Kind = "boolean" if base == "boolean" else "binary" if base == "bytea" else "integer"
        return kind, f"CAST({{c}} AS {base})"
    if base == "oid":
        return "integer", select
    if base == "numeric" and _fits_decimal(modifier):
        # Reading it as text takes a quarter of the time.
        return ("decimal" if (modifier - 4) & 2047 <= 6 else "fine decimal"), "CAST({c} AS text)"
    if base in _LAST:
        return _KINDS[base], _make_range_check(name, base)
    return "text", select


# The last value of each type that fits into microseconds, as Spark and Arrow hold it. Beyond it, ADBC would wrap around.
_LAST = {ZONED: "294247-01-10 04:00:54.775807+00", LOCAL: "294247-01-10 04:00:54.775807", DATE: "5874897-12-31"}
_KINDS: dict[str, Kind] = {ZONED: "zoned", LOCAL: "local", DATE: "date"}


def _make_range_check(name: str, base: str) -> str:
    """Return an expression that fails with a message on a value that Arrow cannot hold."""
    message = escape_template(quote_literal(f'column "{name}" holds '))
    within = f"{{c}} > CAST('-infinity' AS {base}) AND {{c}} <= CAST('{_LAST[base]}' AS {base})"
    return f"CASE WHEN {within} THEN {{c}} WHEN {{c}} IS NULL THEN NULL ELSE CAST({message} || {{c}} AS {base}) END"


def _fits_decimal(modifier: int) -> bool:
    """Return True if ``numeric(p,s)`` is one of Spark's decimals."""
    if modifier < 0:
        return False
    precision, scale = (modifier - 4) >> 16, (((modifier - 4) & 2047) ^ 1024) - 1024
    return precision <= MAX_PRECISION and 0 <= scale <= precision


def _make_finite_check(name: str, expression: str, kind: str = "bigint") -> str:
    """Return an expression that fails with a message on infinity. It depends on the row: a constant would fail planning."""
    message = escape_template(quote_literal(f'column "{name}" holds '))
    return f"CASE WHEN isfinite({{c}}) THEN {expression} WHEN {{c}} IS NULL THEN NULL ELSE CAST({message} || {{c}} AS {kind}) END"


def _make_array_expressions(
    name: str, element: str, modifier: int, dimensions: int, micros: str, *, domain: bool
) -> tuple[str, str]:
    if dimensions > 1:
        return "CAST(array_to_json({c}) AS text)", "{c}"
    select, spark = _make_element_expressions(name, "" if domain else element, modifier, micros)
    message = escape_template(quote_literal(f'column "{name}" holds an array of more than one dimension: '))
    flat = f"CAST({message} || array_ndims({{c}}) AS integer)"
    return f"CASE WHEN array_ndims({{c}}) > 1 AND {flat} > 0 THEN NULL ELSE {select} END", spark


def _make_element_expressions(name: str, element: str, modifier: int, micros: str) -> tuple[str, str]:
    if element in _PLAIN and element != "bytea":
        return "{c}", "{c}"
    if element == "bpchar":
        return _map_array(_BLANK_PADDED), "{c}"
    if element in _CLOCKS:
        # As numbers: of a text, Spark would ignore the era, and make NULL of infinity where it is not in ANSI mode.
        select, spark = _make_clock_expressions(name, element, micros)
        return _map_array(select), f"transform({{c}}, x -> {spark.format(c='x')})"
    if element == "numeric" and _fits_decimal(modifier):
        kind = f"decimal({(modifier - 4) >> 16},{(modifier - 4) & 2047})"
        select = f"CAST({_make_number_check(name, modifier)} AS text)"
        return _map_array(select), f"transform({{c}}, x -> CAST(x AS {kind}))"
    return "CAST({c} AS text[])", "transform({c}, x -> unhex(substr(x, 3)))" if element == "bytea" else "{c}"


def _map_array(select: str) -> str:
    """Return the expression that applies one for a value to each element of an array of one dimension."""
    mapped = escape_template(select.format(c="x"))
    return f"CASE WHEN {{c}} IS NOT NULL THEN ARRAY(SELECT {mapped} FROM pg_catalog.unnest({{c}}) AS x) END"
