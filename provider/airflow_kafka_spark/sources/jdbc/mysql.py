"""MariaDB and MySQL for JdbcSource: PyMySQL on the driver, MariaDB's JDBC driver in Spark.

Each type is read by an expression with which no value changes on its way into Spark (:func:`describe_column`).
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from airflow_kafka_spark.errors import ConnectionInvalid, Problem
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.formats.types import MAX_PRECISION
from airflow_kafka_spark.hooks.databases import describe_driver_message, require_address
from airflow_kafka_spark.sources.jdbc.database import (
    LOCK_SECONDS,
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

if TYPE_CHECKING:
    from airflow.sdk import Connection as AirflowConnection
    from pymysql.connections import Connection
    from pymysql.protocol import FieldDescriptorPacket

DRIVER = "org.mariadb.jdbc:mariadb-java-client:3.5.6"
OLDEST = {"MariaDB": (10, 3), "MySQL": (8, 0)}
"""The oldest release of each product that can be read."""
_DENIED = (1142, 1143)
"""Errors of a user that may not read all columns of a table."""
_NO_DATABASE = re.compile(r"Access denied for user ('.*'@'.*') to database '(.*?)'")
"""Error 1044 of a user that has no right in the database of its connection."""
_NO_VIEW = 1347
"""Error of a table that is no view."""
_NO_REPLICA_STATUS = (1064, 1227)
"""Errors of ``SHOW REPLICA STATUS``: of releases before 8.0.22, and of a user without the right ``REPLICATION CLIENT``."""
_NO_FUNCTION = (1305, 1370)
"""Errors of a function that does not exist, and of one that the user may not look up."""
_HIDDEN = "*"
"""Stands for the columns that the catalog does not show to the user."""

LOCK_NAME = "airflow-kafka-spark-"
"""The beginning of the names of the locks that limit the sessions of tasks; a number from 1 follows."""

# Keys of the connection's extra that only other users of the connection need.
_IGNORED = frozenset({"charset", "cursor", "client", "local_infile", "connect_timeout"})
_TLS_MODES = {
    "disabled": "disable",
    "preferred": "disable",
    "required": "trust",
    "verify_ca": "verify-ca",
    "verify_identity": "verify-full",
}


class MySqlDialect(SqlDialect):
    """Values are transferred as text: numbers and times as they are written, texts and bytes in hexadecimal, so that no mode of
    the server (``NO_BACKSLASH_ESCAPES``, ``ANSI_QUOTES``) changes what they mean.
    """

    def quote(self, name: str) -> str:
        if not name or "\x00" in name:
            raise ValueError(f"Not a name in MySQL: {name!r}")
        return "`" + name.replace("`", "``") + "`"

    def make_text(self, column: SourceColumn, name: str) -> str:
        kind = column.literal.split(" ")[0]
        if kind == "text":
            # The bytes as they are stored; a query's texts all arrive in one character set.
            return f"HEX({name})" if " " in column.literal else f"HEX(CONVERT({name} USING utf8mb4))"
        if kind == "binary":
            return f"HEX({name})"
        if kind == "double":
            # MySQL cuts the text of a CAST to 22 characters, but none within JSON. Without the addition, a float has six digits.
            return f"IF({name} IS NULL, NULL, JSON_UNQUOTE(JSON_EXTRACT(JSON_ARRAY({name} + 0e0), '$[0]')))"
        return f"CAST({name}{' + 0' if kind == 'ordinal' else ''} AS CHAR)"

    def make_literal(self, column: SourceColumn, value: str) -> str:
        kind, charset, collation = (column.literal.split(" ") + ["", ""])[:3]
        if kind in ("text", "binary"):
            plain = _check_value(value, r"[0-9A-Fa-f]*")
            if kind == "binary":
                return f"X'{plain}'"
            return f"_{charset} X'{plain}' COLLATE {collation}" if charset else f"_utf8mb4 X'{plain}'"
        if kind in ("number", "ordinal"):
            return _check_value(value, r"-?[0-9]+(\.[0-9]+)?")
        if kind == "double":
            number = _check_value(value, r"-?[0-9.]+(e[-+]?[0-9]+)?")
            return number if "e" in number else f"{number}e0"
        if kind == "uuid":
            return f"CAST('{_check_value(value, '[0-9A-Fa-f-]+')}' AS UUID)"
        prefix = {"datetime": "TIMESTAMP", "timestamp": "TIMESTAMP", "date": "DATE", "time": "TIME"}[kind]
        return f"{prefix}'{_check_value(value, '-?[0-9: .-]+')}'"

    def make_after_condition(self, names: Sequence[str], literals: Sequence[str]) -> str:
        return _compare(names, literals, ">", ">")

    def make_up_to_condition(self, names: Sequence[str], literals: Sequence[str]) -> str:
        return _compare(names, literals, "<", "<=")

    def make_clock_literal(self, column: SourceColumn, instant: datetime) -> str:
        form = "%Y-%m-%d" if column.clock == "date" else "%Y-%m-%d %H:%M:%S.%f"
        return self.make_literal(column, instant.strftime(form))


def _check_value(value: str, pattern: str) -> str:
    if not re.fullmatch(pattern, value):
        raise ValueError(f"Not a value that this dialect has written: {value!r}")
    return value


def _compare(names: Sequence[str], literals: Sequence[str], strict: str, last: str) -> str:
    """Return a comparison of rows, column by column: unlike one of whole rows, it uses an index."""
    first, value = names[0], literals[0]
    if len(names) == 1:
        return f"{first} {last} {value}"
    rest = _compare(names[1:], literals[1:], strict, last)
    return f"{first} {strict}= {value} AND ({first} {strict} {value} OR ({rest}))"


@dataclass(frozen=True)
class MySqlServer:
    """The server that a connection of type ``mysql`` leads to, and how to log in.

    :param connect_timeout: seconds to wait for the connection and for the server's greeting.
    :param tls: the JDBC driver's ``sslMode``: ``disable``, ``trust``, ``verify-ca`` or ``verify-full``.
    :param ca: the file of the certificate authority; empty for those of the system.
    """

    conn_id: str
    host: str
    port: int
    database: str
    user: str
    password: str = field(default="", repr=False)
    connect_timeout: int = 10
    tls: str = "disable"
    ca: str = ""

    @property
    def where(self) -> str:
        """``host:port/database``, for messages."""
        return f"{self.host}:{self.port}/{self.database}"

    def connect(self) -> Connection:
        """Open a connection.

        :raises ConnectionInvalid: the file of certificates cannot be read, or the login needs a package that is missing.
        :raises pymysql.Error: the server does not answer, or refuses the login.
        """
        import pymysql

        context: ssl.SSLContext | None = None
        if self.tls != "disable":
            try:
                context = ssl.create_default_context(cafile=self.ca or None)
            except OSError as error:
                found = (
                    f"`ca` of `ssl` in its extra is {self.ca}, which cannot be read on {socket.gethostname()}: {error.strerror}"
                )
                raise ConnectionInvalid(self.conn_id, found, "Name a file of certificates (PEM)") from None
            context.check_hostname = self.tls == "verify-full"
            context.verify_mode = ssl.CERT_NONE if self.tls == "trust" else ssl.CERT_REQUIRED
        try:
            connection: Any = pymysql.connect(
                host=self.host,
                port=self.port,
                user=self.user,
                password=self.password,
                database=self.database or None,
                charset="utf8mb4",
                connect_timeout=self.connect_timeout,
                # A server that accepts the connection may not greet. Behind the greeting, queries take as long as they take.
                read_timeout=self.connect_timeout,
                autocommit=True,
                ssl=context,
                ssl_disabled=context is None,
                init_command=f"SET {SETTINGS}",
            )
        except RuntimeError as error:  # PyMySQL imports the packages of some kinds of login when it needs them
            found = f"the login of its user needs a package that is missing on {socket.gethostname()}: {error}"
            action = "Install it where tasks run; `caching_sha2_password` needs none over TLS (`ssl_mode`)"
            raise ConnectionInvalid(self.conn_id, found, action) from None
        connection._read_timeout = None
        made: Connection = connection
        return made


SETTINGS = (
    "time_zone = '+00:00', sql_select_limit = 18446744073709551615 "
    "/*M!100100 , max_statement_time = 0 */ /*!80000 , max_execution_time = 0 */"
)
"""The settings of all sessions, whatever server and user set: a limit of rows would cut each split. MariaDB skips the last
comment, and MySQL the one before it."""
SEND_SECONDS = 600
"""Seconds for which a reader may take no rows before the server ends its session, for example while Kafka's brokers are slow."""


@dataclass
class MySqlSession(DatabaseSession):
    """An open session of MariaDB or MySQL.

    :param connection: the driver's connection, in autocommit mode.
    :param server: the server, for messages.
    """

    connection: Connection
    server: MySqlServer
    dialect = MySqlDialect()

    def begin(self, statement: str) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(statement)

    def close(self) -> None:
        self.connection.close()

    def fetch_rows(self, statement: str) -> list[tuple]:
        return fetch_rows(self.connection, statement)

    def stream_rows(self, statement: str) -> Iterator[tuple]:
        from pymysql.cursors import SSCursor

        with self.connection.cursor(SSCursor) as cursor:
            cursor.execute(statement)
            yield from cursor

    def estimate_rows(self, relation: str) -> int:
        # The default form of MySQL 9 is a text, and MariaDB does not know the name of its only table.
        form = "FORMAT=TRADITIONAL " if self.is_mysql else ""
        with self.connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN {form}SELECT 1 FROM {relation}")
            at = [field[0].lower() for field in cursor.description].index("rows")
            return max((int(row[at] or 0) for row in cursor.fetchall()), default=0)

    def get_text_order(self, relation: Relation, column: SourceColumn) -> str:
        return column.literal if " " in column.literal else f"unknown, of {self.server.where}"

    def read_clock(self) -> datetime:
        found: datetime = self.fetch_rows("SELECT UTC_TIMESTAMP(6)")[0][0]
        return found.replace(tzinfo=timezone.utc)

    @property
    def _version(self) -> tuple[str, tuple[int, ...]]:
        text = str(self.fetch_rows("SELECT VERSION()")[0][0])
        numbers = re.findall(r"\d+", text)[:2]
        return ("MariaDB" if "mariadb" in text.lower() else "MySQL"), tuple(map(int, numbers))

    @property
    def is_mysql(self) -> bool:
        """True if the server is MySQL, not MariaDB."""
        return self._version[0] == "MySQL"

    def read_role(self) -> str:
        return read_account(self.connection)

    def find_server_problems(self) -> Iterator[Problem]:
        product, version = self._version
        if version < OLDEST[product]:
            found, wanted = (".".join(map(str, numbers)) for numbers in (version, OLDEST[product]))
            what = f"connection `{self.server.conn_id}` leads to {product} {found}; expected {wanted} or newer"
            yield Problem("source.conn_id", what)

    # --- the catalog ---

    def find_table(self, schema: str | None, table: str) -> Relation | MissingRelation:
        schema = schema or self.server.database
        name = f"{self.dialect.quote(schema)}.{self.dialect.quote(table)}" if schema else self.dialect.quote(table)
        if not schema:
            return MissingRelation(name, "; the connection names no database (its `schema`)")
        condition = f"table_schema = {quote_literal(schema)}"
        tables = [row[0] for row in self.fetch_rows(f"SELECT table_name FROM information_schema.tables WHERE {condition}")]
        if table not in tables:
            similar = [other for other in tables if other.casefold() == table.casefold()]
            hint = f"; there is `{similar[0]}`, and names are compared exactly" if similar else ""
            return MissingRelation(name, f" that the user may see{hint}", f"GRANT SELECT ON {name} TO {self.read_role()}")
        condition += f" AND table_name = {quote_literal(table)}"
        columns = {
            row[0]: describe_column(
                ColumnMetadata(
                    name=row[0], kind=row[1].lower(), declared=row[2], nullable=row[3] == "YES", unsigned="unsigned" in row[2],
                    precision=int(row[4] or 0), scale=int(row[5] or 0), charset=row[6] or "", collation=row[7] or "",
                    readable="select" in row[8].lower(),
                )
            )
            for row in self.fetch_rows(_COLUMNS.format(condition=condition))
        }  # fmt: skip
        if all(column.readable for column in columns.values()) and self._hides_columns(name):
            columns[_HIDDEN] = describe_column(ColumnMetadata(_HIDDEN, "", "unknown", nullable=True, readable=False))
        parts: dict[str, list[tuple]] = {}
        for index, *facts in self.fetch_rows(_INDEXES.format(condition=condition)):
            parts.setdefault(index, []).append(tuple(facts))
        # The primary key first, then the unique index of the fewest columns that takes no NULL.
        found = sorted(parts.items(), key=lambda item: (item[0] != "PRIMARY", len(item[1]), item[0]))
        keys, indexes = (
            tuple(tuple(name for name, *_ in part) for _, part in found if all(holds(*facts) for _, *facts in part))
            for holds in (lambda unique, nulls, upwards: unique and not nulls, lambda unique, nulls, upwards: upwards)
        )
        return Relation(name, name, columns, keys, indexes)

    def _hides_columns(self, relation: str) -> bool:
        """Return True if the catalog does not show all columns, because the user has rights on some of them only."""
        import pymysql

        try:
            self.fetch_rows(f"SELECT * FROM {relation} LIMIT 0")
        except pymysql.err.MySQLError as error:
            return get_error_code(error) in _DENIED
        return False

    def read_view_definition(self, relation: Relation) -> str:
        import pymysql

        try:
            return str(self.fetch_rows(f"SHOW CREATE VIEW {relation.name}")[0][1])
        except pymysql.err.MySQLError as error:
            if get_error_code(error) in (*_DENIED, _NO_VIEW):
                return ""
            raise

    def query(self, query: str, name: str) -> Relation:
        # On a separate line, because the query may end with a comment.
        sql = f"({query.strip().rstrip(';')}\n) AS __query"
        with self.connection.cursor() as cursor:
            cursor.execute(f"SELECT * FROM {sql} LIMIT 0")
            # The cursor's public description does not say whether a number is unsigned or a text is binary.
            fields = cursor._result.fields
        return Relation(sql, "the query", {f.name: describe_column(_describe_result_column(f)) for f in fields})

    # --- cursors ---

    def find_cursor_problems(self, relation: Relation, column: SourceColumn) -> Iterator[Problem]:
        # AUTO_INCREMENT only grows.
        return iter(())

    def explain_sequence_reset(self, relation: Relation, column: SourceColumn, value: str) -> str:
        following = self._read_next_number(relation, column)
        if following is None or following > int(value):
            return ""
        return (
            f"the next AUTO_INCREMENT of `{column.name}` is {following}, and rows up to {value} were read: it was set back, or "
            "the table was emptied or created again"
        )

    def _read_next_number(self, relation: Relation, column: SourceColumn) -> int | None:
        """Return the number that the next row gets in a column; None if it is not AUTO_INCREMENT, or may not be seen."""
        import pymysql

        if relation.sql != relation.name or column.literal != "number":
            return None
        try:
            # The catalog of MySQL has a counter, too, but one that may be a day old.
            statement = str(self.fetch_rows(f"SHOW CREATE TABLE {relation.sql}")[0][1])
        except pymysql.err.MySQLError as error:
            if get_error_code(error) in _DENIED:
                return None
            raise
        # Names stay as they are, texts become empty.
        plain = re.sub(r"(`(?:[^`]|``)*`)|'(?:[^'\\]|\\.|'')*'", lambda found: found[1] or "''", statement)
        line = next((line for line in plain.splitlines() if line.startswith(f"  {self.dialect.quote(column.name)} ")), "")
        if " AUTO_INCREMENT" not in line:
            return None
        found = re.search(r" AUTO_INCREMENT=(\d+)", plain[plain.rindex("\n)") :])
        return int(found[1]) if found else 1

    def has_md5(self) -> bool:
        import pymysql

        try:
            return bool(self.fetch_rows("SELECT MD5('')"))
        except pymysql.err.MySQLError as error:
            if get_error_code(error) in _NO_FUNCTION:
                return False  # MySQL 9.6 and later, without a component
            raise

    def find_hidden_writers(self, relation: Relation) -> str:
        # Not each replica is read-only.
        found = (f"CAST(@@global.{name} AS CHAR) NOT IN ('0', 'OFF')" for name in ("read_only", "innodb_read_only"))
        ((is_read_only,),) = self.fetch_rows(f"SELECT {' OR '.join(found)}")
        if not is_read_only and not self._is_replicating():
            return ""
        return "the server is a replica, which does not show the transactions that write on its primary, and may be behind it"

    def _is_replicating(self) -> bool:
        """Return True if the server is a replica; False also if it is MySQL and the user may not see this."""
        import pymysql

        if not self.is_mysql:
            return any(int(count) for _, count in self.fetch_rows("SHOW GLOBAL STATUS LIKE 'Slaves_running'"))
        try:
            return bool(self.fetch_rows("SHOW REPLICA STATUS"))
        except pymysql.err.MySQLError as error:
            if get_error_code(error) in _NO_REPLICA_STATUS:
                return False
            raise

    def wait_for_writers(self, relation: Relation, seconds: float) -> str:
        # Only a role with the right PROCESS may see the transactions of others.
        return ""


_COLUMNS = """
SELECT column_name, data_type, column_type, is_nullable, numeric_precision, COALESCE(numeric_scale, datetime_precision),
    character_set_name, collation_name, privileges
FROM information_schema.columns WHERE {condition} ORDER BY ordinal_position
"""

# A prefix of a column makes an index neither a key nor an order.
_INDEXES = """
SELECT index_name, column_name, non_unique = 0 AND sub_part IS NULL, nullable = 'YES', collation = 'A' AND sub_part IS NULL
FROM information_schema.statistics WHERE {condition} AND index_type = 'BTREE' AND column_name IS NOT NULL
ORDER BY index_name, seq_in_index
"""

# The protocol's numbers of types.
_KINDS = {
    0: "decimal", 1: "tinyint", 2: "smallint", 3: "int", 4: "float", 5: "double", 7: "timestamp", 8: "bigint", 9: "mediumint",
    10: "date", 11: "time", 12: "datetime", 13: "year", 15: "varchar", 16: "bit", 245: "json", 246: "decimal", 247: "enum",
    248: "set", 249: "text", 250: "text", 251: "text", 252: "text", 253: "varchar", 254: "char", 255: "geometry",
}  # fmt: skip
_UNSIGNED, _ENUM, _SET, _BINARY = 32, 256, 2048, 63


def _describe_result_column(result: FieldDescriptorPacket) -> ColumnMetadata:
    """Return the description of a query's column from the protocol."""
    kind = _KINDS.get(result.type_code, "")
    if kind in ("text", "varchar", "char"):
        if result.charsetnr == _BINARY:
            kind = "blob"
        elif result.flags & (_ENUM | _SET):
            kind = "enum" if result.flags & _ENUM else "set"
    unsigned = bool(result.flags & _UNSIGNED)
    precision = result.length
    if kind == "decimal":
        # The length is the display width, with a point and a sign.
        precision -= (result.scale > 0) + (not unsigned)
    return ColumnMetadata(result.name, kind, kind or f"number {result.type_code}", True, unsigned, precision, result.scale)


def get_error_code(error: Exception) -> int:
    """Return the number of an error of the server or of PyMySQL; 0 if it has none."""
    code = error.args[0] if error.args else 0
    return code if isinstance(code, int) else 0


def fetch_rows(connection: Connection, statement: str) -> list[tuple]:
    """Run a query, and return its rows."""
    with connection.cursor() as cursor:
        cursor.execute(statement)
        return list(cursor.fetchall())


def read_account(connection: Connection) -> str:
    """Return the account of a session, as GRANT takes it. One user may have several, and without a host GRANT takes that of all
    hosts.
    """
    parts = str(fetch_rows(connection, "SELECT CURRENT_USER()")[0][0]).rpartition("@")[::2]
    return "@".join("'" + part.replace("\\", "\\\\").replace("'", "''") + "'" for part in parts)


def find_database_grant(found: str) -> str:
    """Return the statement after which the user of an error may use a database; "" for other errors."""
    refused = _NO_DATABASE.search(found)
    return f"GRANT SELECT ON {MySqlDialect().quote(refused[2])}.* TO {refused[1]}" if refused else ""


def quote_literal(value: str) -> str:
    """Return a text as a literal of SQL, independent of the session's character set."""
    return f"_utf8mb4 X'{value.encode().hex()}'"


@dataclass(frozen=True)
class MySqlDatabase(SourceDatabase[MySqlServer]):
    """The server of a connection of type ``mysql``."""

    scheme: ClassVar[Literal["mysql"]] = "mysql"
    packages: ClassVar[tuple[str, ...]] = (DRIVER,)
    driver: ClassVar[str] = "org.mariadb.jdbc.Driver"
    default_schema: ClassVar[str] = ""
    session_statement: ClassVar[str] = "SET SESSION TRANSACTION READ ONLY"

    def find_problems(self) -> list[Problem]:
        return []

    def connect(self) -> MySqlSession:
        return MySqlSession(self.server.connect(), self.server)

    def begin_and_wait(self, limits: ReadLimits) -> str:
        # The driver sends one statement.
        return f"BEGIN NOT ATOMIC {self.session_statement}; {' '.join(self.list_waiting_statements(limits))} END"

    def list_waiting_statements(self, limits: ReadLimits) -> list[str]:
        if limits.max_sessions is None:
            return []
        taken = f"GET_LOCK(CONCAT('{LOCK_NAME}', slot), 0) = 1"
        return [
            f"waiting: LOOP FOR slot IN 1..{limits.max_sessions} DO IF {taken} THEN LEAVE waiting; END IF; END FOR; "
            f"DO SLEEP({LOCK_SECONDS}); END LOOP;"
        ]

    def find_limit_problems(self, session: DatabaseSession, limits: ReadLimits) -> Iterator[Problem]:
        assert isinstance(session, MySqlSession)
        if limits.max_replica_lag is not None:
            found = "a statement of MariaDB and MySQL cannot ask for the lag of replicas"
            yield Problem("source.max_replica_lag", found, "Leave it out, and limit `max_sessions`")
        if session.is_mysql and limits.max_sessions is not None:
            found = "MySQL has no statement that waits for one of several locks"
            yield Problem("source.max_sessions", found, "Limit the cores of Spark with `spark_conf`")

    def list_driver_errors(self) -> tuple[type[Exception], ...]:
        import pymysql

        return pymysql.Error, OSError

    def describe_error(self, error: Exception) -> tuple[str, bool]:
        if isinstance(error, OSError):
            return str(error), False
        code = get_error_code(error)
        message = " ".join(str(error.args[-1] if error.args else error).split())
        detail = message.replace(self.server.password, "***") if self.server.password else message
        # Errors of the client itself, and those that pass: too many connections (of all users, of one, in an hour), shutdown,
        # lock wait, deadlock, killed, time-out.
        passing = code == 0 or 2000 <= code < 3000 or code in (1040, 1053, 1203, 1205, 1213, 1226, 1317, 1927, 1969, 3024)
        return describe_driver_message(detail), not passing

    def get_shown_cause(self, error: Exception) -> BaseException | None:
        return error if isinstance(error, OSError) else None

    def find_grant(self, found: str) -> str:
        return find_database_grant(found)

    def make_jdbc_url(self) -> str:
        # With a URL of this scheme Spark quotes names in backticks; in double quotes they would be texts.
        database = urllib.parse.quote(self.server.database, safe="")
        return f"jdbc:mysql://{bracket_ipv6(self.server.host)}:{self.server.port}/{database}?permitMysqlScheme=true"

    def make_jdbc_properties(self) -> dict[str, str]:
        properties = {
            "initSql": f"SET {SETTINGS}, net_write_timeout = {SEND_SECONDS}",
            "sslMode": self.server.tls,
            "connectTimeout": str(self.server.connect_timeout * 1000),
            "serverSslCert": self.server.ca,
            "user": self.server.user,
            "password": self.server.password,
        }
        return {name: value for name, value in properties.items() if value}


def read_server(connection: AirflowConnection) -> MySqlServer:
    """Return the server of an Airflow connection of type ``mysql``.

    :raises ConnectionInvalid: it has options that mean nothing here.
    """
    conn_id, extra = connection.conn_id, dict(connection.extra_dejson)
    if extra.get("unix_socket"):
        raise ConnectionInvalid(conn_id, "it leads to a socket file; the JDBC driver connects by TCP", "Give it a host name")
    if extra.get("iam"):
        raise ConnectionInvalid(conn_id, "its extra asks for a login by short-lived tokens", "Use a login with a password")
    timeout = extra.get("connect_timeout", 10)
    if not str(timeout).isdecimal():
        raise ConnectionInvalid(conn_id, f"`connect_timeout` in its extra is `{timeout}`; expected seconds, a whole number")
    require_address(conn_id, connection.host or "localhost", connection.port or 3306)
    tls, ca = _find_tls_mode(conn_id, extra.get("ssl_mode"), extra.get("ssl"))
    unknown = quote_names(sorted(set(extra) - _IGNORED - {"unix_socket", "iam", "ssl_mode", "ssl"}))
    if unknown:
        raise ConnectionInvalid(
            conn_id, f"its extra holds {unknown}, which means nothing here", "Remove it, or correct its spelling"
        )
    return MySqlServer(
        conn_id=conn_id,
        host=connection.host or "localhost",
        port=int(connection.port or 3306),
        database=connection.schema or "",
        user=connection.login or "",
        password=connection.password or "",
        connect_timeout=int(timeout),
        tls=tls,
        ca=ca,
    )


def _find_tls_mode(conn_id: str, mode: str | None, options: Mapping[str, Any] | str | None) -> tuple[str, str]:
    """Return the JDBC driver's ``sslMode``, and the file of the certificate authority."""
    given = json.loads(options) if isinstance(options, str) else dict(options or {})
    known = str(mode or ("verify_ca" if given.get("ca") else "required" if given else "disabled")).lower()
    if known not in _TLS_MODES:
        raise ConnectionInvalid(conn_id, f"its `ssl_mode` is `{mode}`", f"Use one of {', '.join(_TLS_MODES).upper()}")
    if more := quote_names(sorted(set(given) - {"ca"})):
        raise ConnectionInvalid(conn_id, f"its `ssl` holds {more}, which the JDBC driver takes no file for", "Use `ca` only")
    return _TLS_MODES[known], str(given.get("ca", ""))


# --- types --------------------------------------------------------------------------------------------------------------

# Spark's type for an integer, signed and unsigned.
_INTEGERS = {
    "tinyint": ("tinyint", "smallint"),
    "smallint": ("smallint", "int"),
    "mediumint": ("int", "int"),
    "int": ("int", "bigint"),
    "bigint": ("bigint", "decimal(20,0)"),
}
_CHOSEN = ("enum", "set")
_CHARACTERS = frozenset({"char", "varchar", "tinytext", "text", "mediumtext", "longtext", "json", "enum", "set"})
_BYTES = frozenset({"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"})
_OTHERS = frozenset({"uuid", "inet4", "inet6"})
_INCREASING = frozenset({*_INTEGERS, "decimal", "char", "varchar", "datetime", "timestamp", "uuid"})
_CLOCKS = {"timestamp": "zoned", "datetime": "local", "date": "date"}
# Represents an invalid date: farther away than any day of these servers.
_INVALID_DATE = -(2**62)
_WITHIN_UNICODE = frozenset({"utf8mb4", "utf8mb3", "utf8", "utf16", "utf16le", "utf32", "ucs2", "latin1"})
"""Character sets with an equal in Unicode for each of their characters."""
_LOST_TEXT = "airflow-kafka-spark 4f0b8a52-0c1e-4f7e-9d0f-3a6c2f1f8e57"
"""Represents a text with a character that Unicode does not have."""
_EPOCH = "TIMESTAMP'1970-01-01 00:00:00'"


@dataclass(frozen=True)
class ColumnMetadata:
    """The server's description of a column.

    :param kind: the type's name in lower case, without sizes.
    :param declared: the type's name with sizes, for messages.
    :param scale: number of digits after the point, also those of a second's fraction.
    :param collation: of a text, if it is known.
    """

    name: str
    kind: str
    declared: str
    nullable: bool
    unsigned: bool = False
    precision: int = 0
    scale: int = 0
    charset: str = ""
    collation: str = ""
    readable: bool = True


def describe_column(metadata: ColumnMetadata) -> SourceColumn:
    """Return the column with the expressions that read it."""
    select, spark, problem = _read_expressions(metadata)
    return SourceColumn(
        name=metadata.name,
        type=metadata.declared,
        nullable=metadata.nullable,
        literal=_find_literal_form(metadata),
        clock=_CLOCKS.get(metadata.kind, ""),
        clock_digits=min(metadata.scale, 6) if metadata.kind in ("datetime", "timestamp") else 6,
        increases=metadata.kind in _INCREASING,
        select=select,
        spark=spark,
        problem=problem,
        readable=metadata.readable,
        collation=metadata.declared if metadata.kind in _CHOSEN else "",
    )


def _find_literal_form(metadata: ColumnMetadata) -> str:
    """Return the form in which values of the type are written and compared; see :class:`MySqlDialect`."""
    if metadata.kind in _INTEGERS or metadata.kind in ("decimal", "year"):
        return "number"
    if metadata.kind in (*_CHOSEN, "bit"):
        # The server sorts them by the number of the value, but compares them with a text as texts.
        return "ordinal"
    if metadata.kind in ("float", "double"):
        return "double"
    if metadata.kind in ("datetime", "timestamp", "date", "time", "uuid"):
        return metadata.kind
    if metadata.kind in _BYTES:
        return "binary"
    if metadata.kind in _CHARACTERS and metadata.kind != "json":
        return f"text {metadata.charset} {metadata.collation}".rstrip()
    return ""


def _read_expressions(metadata: ColumnMetadata) -> tuple[str, str, str]:
    """Return the expression that is read, the Spark expression for the result, and the reason why the column cannot be read."""
    kind = metadata.kind
    if kind in _INTEGERS:
        spark = _INTEGERS[kind][metadata.unsigned]
        # Without a cast, tinyint(1) would become a boolean.
        select = "CAST({c} AS DECIMAL(20,0))" if spark.startswith("decimal") else "CAST({c} AS SIGNED)"
        return select, f"CAST({{c}} AS {spark})", ""
    if kind == "decimal":
        return ("{c}" if metadata.precision <= MAX_PRECISION else "CAST({c} AS CHAR)"), "{c}", ""
    if kind in ("float", "double"):
        # Without the addition, a float would be written with six digits.
        return "({c} + 0e0)", f"CAST({{c}} AS {kind})", ""
    if kind == "bit":
        return _make_bit_expressions(metadata.precision)
    if kind in _CLOCKS:
        return _make_timestamp_expressions(metadata)
    simple = {"year": ("CAST({c} AS SIGNED)", "CAST({c} AS int)", ""), "time": ("CAST({c} AS CHAR)", "{c}", "")}
    if kind in simple:
        return simple[kind]
    if kind in _CHARACTERS:
        return _make_text_expressions(metadata)
    if kind in _BYTES:
        return "{c}", "CAST({c} AS binary)", ""
    if kind in _OTHERS:
        return "CAST({c} AS CHAR)", "{c}", ""
    return "NULL", "{c}", "values of its type cannot be read"


def _make_text_expressions(metadata: ColumnMetadata) -> tuple[str, str, str]:
    text = "CONVERT({c} USING utf8mb4)"
    if not metadata.charset or metadata.charset in _WITHIN_UNICODE:
        return text, "{c}", ""
    # The server makes question marks of characters that Unicode does not have.
    lost = "INSTR(CONVERT(REPLACE({c}, '?', '') USING utf8mb4), '?') > 0"
    found = _raise(f"column `{metadata.name}` holds a character of {metadata.charset} that Unicode does not have")
    return f"CASE WHEN {lost} THEN '{_LOST_TEXT}' ELSE {text} END", f"if({{c}} = '{_LOST_TEXT}', {found}, {{c}})", ""


def _raise(message: str) -> str:
    """Return a template of the Spark expression that fails with a message."""
    quoted = message.replace("\\", "\\\\").replace("'", "\\'")
    return f"raise_error('{escape_template(quoted)}')"


def _make_bit_expressions(size: int) -> tuple[str, str, str]:
    if size == 1:
        return "CAST({c} AS SIGNED)", "CAST({c} AS boolean)", ""
    if size < 64:
        return "CAST({c} AS SIGNED)", "CAST({c} AS bigint)", ""
    return "CAST(CAST({c} AS UNSIGNED) AS DECIMAL(20,0))", "CAST({c} AS decimal(20,0))", ""


def _make_timestamp_expressions(metadata: ColumnMetadata) -> tuple[str, str, str]:
    if metadata.kind == "date":
        value, spark = "DATEDIFF({c}, DATE'1970-01-01')", "date_from_unix_date(CAST({c} AS int))"
    else:
        value = f"TIMESTAMPDIFF(MICROSECOND, {_EPOCH}, {{c}})"
        spark = (
            "timestamp_micros(CAST({c} AS bigint))"
            if metadata.kind == "timestamp"
            else "CAST(timestamp_micros(CAST({c} AS bigint)) AS timestamp_ntz)"
        )
    # An invalid date (0000-00-00) has no distance from another, and would silently become NULL.
    invalid = _raise(f"column `{metadata.name}` holds an invalid date, such as 0000-00-00")
    select = f"CASE WHEN {{c}} IS NULL THEN NULL ELSE COALESCE({value}, {_INVALID_DATE}) END"
    return select, f"if(CAST({{c}} AS bigint) = {_INVALID_DATE}, {invalid}, {spark})", ""
