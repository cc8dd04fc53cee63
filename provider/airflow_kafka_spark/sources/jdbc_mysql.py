"""MariaDB and MySQL, as JdbcSource needs them: PyMySQL on the driver, MariaDB's JDBC driver in Spark."""

from __future__ import annotations

import re
import ssl
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_kafka_spark.errors import ConnectionInvalid, KafkaSparkError, Problem, SourceRejected, SourceUnavailable
from airflow_kafka_spark.hooks.postgres import parse_name
from airflow_kafka_spark.sources.jdbc_database import Column, Database, Dialect, Missing, Reader, Relation, Session
from airflow_kafka_spark.sources.jdbc_mysql_types import Facts, column

if TYPE_CHECKING:
    from airflow_kafka_spark.sources.jdbc_settings import JdbcSettings

DRIVER = "org.mariadb.jdbc:mariadb-java-client:3.5.6"
OLDEST = {"MariaDB": (10, 3), "MySQL": (8, 0)}

# Keys of the extra that are meant for other users of the connection.
_IGNORED = frozenset({"charset", "cursor", "client", "local_infile", "connect_timeout"})
_TLS_MODES = {
    "disabled": "disable",
    "preferred": "disable",
    "required": "trust",
    "verify_ca": "verify-ca",
    "verify_identity": "verify-full",
}


class MysqlDialect(Dialect):
    """Values cross as text: numbers and times as they are written, texts and bytes in hexadecimal, so that no mode of the server
    (``NO_BACKSLASH_ESCAPES``, ``ANSI_QUOTES``) changes what they mean."""

    def quote(self, name: str) -> str:
        if not name or "\x00" in name:
            raise ValueError(f"Not a name in MySQL: {name!r}")
        return "`" + name.replace("`", "``") + "`"

    def text(self, column: Column, name: str) -> str:
        kind = column.literal.split(" ")[0]
        if kind == "text":
            # The bytes as they are stored; a query's texts all arrive in one character set.
            return f"HEX({name})" if " " in column.literal else f"HEX(CONVERT({name} USING utf8mb4))"
        if kind == "binary":
            return f"HEX({name})"
        return f"CAST({name}{_NUMBERS.get(kind, '')} AS CHAR)"

    def literal(self, column: Column, value: str) -> str:
        kind, charset, collation = (column.literal.split(" ") + ["", ""])[:3]
        if kind in ("text", "binary"):
            plain = _checked(value, r"[0-9A-Fa-f]*")
            if kind == "binary":
                return f"X'{plain}'"
            return f"_{charset} X'{plain}' COLLATE {collation}" if charset else f"_utf8mb4 X'{plain}'"
        if kind in ("number", "ordinal"):
            return _checked(value, r"-?[0-9]+(\.[0-9]+)?")
        if kind == "double":
            number = _checked(value, r"-?[0-9.]+(e[-+]?[0-9]+)?")
            return number if "e" in number else f"{number}e0"
        if kind == "uuid":
            return f"CAST('{_checked(value, '[0-9A-Fa-f-]+')}' AS UUID)"
        prefix = {"datetime": "TIMESTAMP", "timestamp": "TIMESTAMP", "date": "DATE", "time": "TIME"}[kind]
        return f"{prefix}'{_checked(value, '-?[0-9: .-]+')}'"

    def after(self, names: Sequence[str], literals: Sequence[str]) -> str:
        return _compare(names, literals, ">", ">")

    def upto(self, names: Sequence[str], literals: Sequence[str]) -> str:
        return _compare(names, literals, "<", "<=")

    def clock(self, column: Column, instant: datetime) -> str:
        form = "%Y-%m-%d" if column.clock == "date" else "%Y-%m-%d %H:%M:%S.%f"
        return self.literal(column, instant.strftime(form))


_NUMBERS = {"ordinal": " + 0", "double": " + 0e0"}


def _checked(value: str, pattern: str) -> str:
    if not re.fullmatch(pattern, value):
        raise ValueError(f"Not a bound that was written here: {value!r}")
    return value


def _compare(names: Sequence[str], literals: Sequence[str], strict: str, last: str) -> str:
    """Row by row, column by column: comparisons of whole rows do not use an index here. The first condition is for the index."""
    first, value = names[0], literals[0]
    if len(names) == 1:
        return f"{first} {last} {value}"
    rest = _compare(names[1:], literals[1:], strict, last)
    return f"{first} {strict}= {value} AND ({first} {strict} {value} OR ({rest}))"


@dataclass(frozen=True)
class MysqlServer:
    """Where a connection of type ``mysql`` leads."""

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
        return f"{self.host}:{self.port}/{self.database}"

    def connect(self) -> Any:
        import pymysql

        context: ssl.SSLContext | None = None
        if self.tls != "disable":
            context = ssl.create_default_context(cafile=self.ca or None)
            context.check_hostname = self.tls == "verify-full"
            context.verify_mode = ssl.CERT_NONE if self.tls == "trust" else ssl.CERT_REQUIRED
        return pymysql.connect(
            host=self.host,
            port=self.port,
            user=self.user,
            password=self.password,
            database=self.database or None,
            charset="utf8mb4",
            connect_timeout=self.connect_timeout,
            autocommit=True,
            ssl=context,
            ssl_disabled=context is None,
            init_command=f"SET {TIME_ZONE}",
        )


TIME_ZONE = "time_zone = '+00:00'"
READ_ONLY = "SET SESSION TRANSACTION READ ONLY"


@dataclass
class MysqlSession(Session):
    connection: Any
    server: MysqlServer
    dialect = MysqlDialect()

    def rows(self, statement: str) -> list[tuple]:
        with self.connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def now(self) -> datetime:
        found: datetime = self.rows("SELECT UTC_TIMESTAMP(6)")[0][0]
        return found.replace(tzinfo=timezone.utc)

    @property
    def _version(self) -> tuple[str, tuple[int, ...]]:
        text = str(self.rows("SELECT VERSION()")[0][0])
        numbers = re.findall(r"\d+", text)[:2]
        return ("MariaDB" if "mariadb" in text.lower() else "MySQL"), tuple(map(int, numbers))

    def place_problems(self) -> Iterator[Problem]:
        product, version = self._version
        if version < OLDEST[product]:
            found, wanted = (".".join(map(str, numbers)) for numbers in (version, OLDEST[product]))
            what = f"connection `{self.server.conn_id}` leads to {product} {found}; expected {wanted} or newer"
            yield Problem("source.conn_id", what)

    # --- the catalog ---

    def relation(self, source: JdbcSettings) -> Relation | Missing:
        if source.query is not None:
            return self._query(source.query)
        schema, table = parse_name(source.table or "")
        return self._table(schema or self.server.database, table)

    def _table(self, schema: str, table: str) -> Relation | Missing:
        name = f"{self.dialect.quote(schema)}.{self.dialect.quote(table)}" if schema else self.dialect.quote(table)
        if not schema:
            return Missing(name, "; the connection names no database (its `schema`)")
        place = f"table_schema = {_text(schema)}"
        tables = [row[0] for row in self.rows(f"SELECT table_name FROM information_schema.tables WHERE {place}")]
        if table not in tables:
            alike = [other for other in tables if other.casefold() == table.casefold()]
            return Missing(name, f"; there is `{alike[0]}`, and names are compared exactly" if alike else "")
        place += f" AND table_name = {_text(table)}"
        columns = {
            row[0]: column(
                Facts(
                    name=row[0], kind=row[1].lower(), declared=row[2], nullable=row[3] == "YES", unsigned="unsigned" in row[2],
                    precision=int(row[4] or 0), scale=int(row[5] or 0), charset=row[6] or "", collation=row[7] or "",
                    readable="select" in row[8].lower(),
                )
            )
            for row in self.rows(_COLUMNS.format(place=place))
        }  # fmt: skip
        parts: dict[str, list[tuple]] = {}
        for index, *facts in self.rows(_INDEXES.format(place=place)):
            parts.setdefault(index, []).append(tuple(facts))
        # The primary key first, then the unique index of the fewest columns that takes no NULL.
        found = sorted(parts.items(), key=lambda item: (item[0] != "PRIMARY", len(item[1]), item[0]))
        keys, indexes = (
            tuple(tuple(name for name, *_ in part) for _, part in found if all(holds(*facts) for _, *facts in part))
            for holds in (lambda unique, nulls, upwards: unique and not nulls, lambda unique, nulls, upwards: upwards)
        )
        return Relation(name, name, columns, keys, indexes)

    def _query(self, query: str) -> Relation:
        # A line of its own: the query may end with a comment.
        sql = f"({query.strip().rstrip(';')}\n) AS __query"
        with self.connection.cursor() as cursor:
            cursor.execute(f"SELECT * FROM {sql} LIMIT 0")
            # The cursor's public description leaves out whether a number is unsigned and a text made of bytes.
            fields = cursor._result.fields
        return Relation(sql, "the query", {f.name: column(_facts(f)) for f in fields})

    # --- cursors ---

    def cursor_problems(self, relation: Relation, column: Column) -> Iterator[Problem]:
        # AUTO_INCREMENT only grows.
        return iter(())

    def restarted(self, relation: Relation, column: Column, value: str) -> str:
        # The catalog's counter may be a day old.
        return ""

    def wait_for_writers(self, relation: Relation, seconds: float) -> str:
        # Who writes is told to nobody without the right PROCESS.
        return ""


_COLUMNS = """
SELECT column_name, data_type, column_type, is_nullable, numeric_precision, numeric_scale, character_set_name, collation_name,
    privileges
FROM information_schema.columns WHERE {place} ORDER BY ordinal_position
"""

# A prefix of a column makes an index neither a key nor an order.
_INDEXES = """
SELECT index_name, column_name, non_unique = 0 AND sub_part IS NULL, nullable = 'YES', collation = 'A' AND sub_part IS NULL
FROM information_schema.statistics WHERE {place} AND index_type = 'BTREE' AND column_name IS NOT NULL
ORDER BY index_name, seq_in_index
"""

# The protocol's numbers of types.
_KINDS = {
    0: "decimal", 1: "tinyint", 2: "smallint", 3: "int", 4: "float", 5: "double", 7: "timestamp", 8: "bigint", 9: "mediumint",
    10: "date", 11: "time", 12: "datetime", 13: "year", 15: "varchar", 16: "bit", 245: "json", 246: "decimal", 247: "enum",
    248: "set", 249: "text", 250: "text", 251: "text", 252: "text", 253: "varchar", 254: "char", 255: "geometry",
}  # fmt: skip
_UNSIGNED, _ENUM, _SET, _BINARY = 32, 256, 2048, 63


def _facts(result: Any) -> Facts:
    """A column of a query, from what the protocol says of it."""
    kind = _KINDS.get(result.type_code, "")
    if kind in ("text", "varchar", "char"):
        if result.charsetnr == _BINARY:
            kind = "blob"
        elif result.flags & (_ENUM | _SET):
            kind = "enum" if result.flags & _ENUM else "set"
    unsigned = bool(result.flags & _UNSIGNED)
    precision = result.length
    if kind == "decimal":
        # Its width on a screen, with a point and a sign.
        precision -= (result.scale > 0) + (not unsigned)
    return Facts(result.name, kind, kind or f"number {result.type_code}", True, unsigned, precision, result.scale)


def _text(value: str) -> str:
    return f"_utf8mb4 X'{value.encode().hex()}'"


@dataclass(frozen=True)
class MysqlDatabase(Database):
    """The server of a connection of type ``mysql``."""

    server: MysqlServer
    packages: ClassVar[tuple[str, ...]] = (DRIVER,)
    default_schema: ClassVar[str] = ""

    @property
    def conn_id(self) -> str:  # type: ignore[override]
        return self.server.conn_id

    @property
    def uri(self) -> str:
        database = f"/{urllib.parse.quote(self.server.database, safe='')}" if self.server.database else ""
        return f"mysql://{self.server.host}:{self.server.port}{database}"

    def problems(self) -> list[Problem]:
        return []

    @contextmanager
    def session(self, doing: str) -> Iterator[MysqlSession]:
        import pymysql

        try:
            connection = self.server.connect()
            try:
                session = MysqlSession(connection, self.server)
                session.rows(READ_ONLY)
                yield session
            finally:
                connection.close()
        except pymysql.Error as error:
            raise self._explain(error, doing) from None
        except (OSError, ssl.SSLError) as error:
            raise SourceUnavailable(self.server.where, doing, str(error)) from error

    def _explain(self, error: Exception, doing: str) -> KafkaSparkError:
        code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        told = " ".join(str(error.args[-1] if error.args else error).split())
        detail = told.replace(self.server.password, "***") if self.server.password else told
        # The client's own errors, and those that pass: too many connections, shutdown, lock wait, deadlock, killed, time-out.
        if code == 0 or 2000 <= code < 3000 or code in (1040, 1053, 1205, 1213, 1317, 1927, 1969, 3024):
            return SourceUnavailable(self.server.where, doing, detail)
        return SourceRejected(self.server.where, f"{doing}: {detail}")

    def reader(self, fetchsize: int) -> Reader:
        # In this way Spark quotes names as these servers do; with double quotes they would be texts.
        options = {"permitMysqlScheme": "true", "sessionVariables": TIME_ZONE, "sslMode": self.server.tls}
        options |= {"connectTimeout": str(self.server.connect_timeout * 1000), "tcpKeepAlive": "true"}
        if self.server.ca:
            options["serverSslCert"] = self.server.ca
        query = urllib.parse.urlencode({"permitMysqlScheme": options.pop("permitMysqlScheme")})
        host = f"[{self.server.host}]" if ":" in self.server.host else self.server.host
        credentials = {"user": self.server.user, "password": self.server.password}
        return Reader(
            url=f"jdbc:mysql://{host}:{self.server.port}/{urllib.parse.quote(self.server.database, safe='')}?{query}",
            driver="org.mariadb.jdbc.Driver",
            options={
                **options,
                **{name: value for name, value in credentials.items() if value},
                "sessionInitStatement": READ_ONLY,
                "fetchsize": str(fetchsize),
            },
        )


def read_server(connection: Any) -> MysqlServer:
    """From an Airflow connection of type ``mysql``.

    :raises ConnectionInvalid: it has options that mean nothing here.
    """
    conn_id, extra = connection.conn_id, dict(connection.extra_dejson)
    if extra.get("unix_socket"):
        raise ConnectionInvalid(conn_id, "it leads to a socket file; the JDBC driver connects by TCP", "Give it a host name")
    if extra.get("iam"):
        raise ConnectionInvalid(conn_id, "its extra asks for a login by short-lived tokens", "Use a login with a password")
    tls, ca = _tls(conn_id, extra.get("ssl_mode"), extra.get("ssl"))
    unknown = ", ".join(f"`{name}`" for name in sorted(set(extra) - _IGNORED - {"unix_socket", "iam", "ssl_mode", "ssl"}))
    if unknown:
        raise ConnectionInvalid(
            conn_id, f"its extra holds {unknown}, which means nothing here", "Remove it, or correct its spelling"
        )
    return MysqlServer(
        conn_id=conn_id,
        host=connection.host or "localhost",
        port=int(connection.port or 3306),
        database=connection.schema or "",
        user=connection.login or "",
        password=connection.password or "",
        connect_timeout=int(extra.get("connect_timeout", 10)),
        tls=tls,
        ca=ca,
    )


def _tls(conn_id: str, mode: str | None, options: Mapping[str, Any] | str | None) -> tuple[str, str]:
    """The JDBC driver's ``sslMode``, and the file of the certificate authority."""
    import json

    given = json.loads(options) if isinstance(options, str) else dict(options or {})
    known = str(mode or ("verify_ca" if given.get("ca") else "required" if given else "disabled")).lower()
    if known not in _TLS_MODES:
        raise ConnectionInvalid(conn_id, f"its `ssl_mode` is `{mode}`", f"Use one of {', '.join(_TLS_MODES).upper()}")
    if more := ", ".join(f"`{name}`" for name in sorted(set(given) - {"ca"})):
        raise ConnectionInvalid(conn_id, f"its `ssl` holds {more}, which the JDBC driver takes no file for", "Use `ca` only")
    return _TLS_MODES[known], str(given.get("ca", ""))
