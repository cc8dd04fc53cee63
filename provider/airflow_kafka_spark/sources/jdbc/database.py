"""The base of the databases that JdbcSource reads: relations as values, sessions, and how Spark connects."""

from __future__ import annotations

import re
import urllib.parse
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, ClassVar, Generic, Literal, NamedTuple, Protocol, TypeVar

from airflow_kafka_spark.errors import Problem, SourceRejected, SourceUnavailable
from airflow_kafka_spark.formats.base import Kind
from airflow_kafka_spark.hooks.databases import SESSION_ENDED, find_access_remedy

if TYPE_CHECKING:
    from airflow_kafka_spark.sources.base import SplitReader

SplitKey = tuple[str, ...]
"""A row's values in the split columns, as text of the server, which is stored in JSON and used in literals."""

LOCK_SECONDS = 0.2
"""Seconds between two tries to take the lock of a session."""

REFUSED_SQLSTATES = ("22", "23", "25", "28", "3D", "3F", "42", "44", "0A", "0L", "P0")
"""Classes of SQLSTATE with which PostgreSQL would refuse the statement again. All others may pass."""

_UNHELD = re.compile(
    r'invalid input syntax for type [^:"]+: "(column ".*" holds .*)"'
    r"|(column `.*` holds (?:an invalid date, such as 0000-00-00|a character of \w+ that Unicode does not have))"
)
UNHELD_ACTION = "Correct the row, leave the column out with `include_columns=`, or cast it with `query=`"


def find_unheld_value(message: str) -> str:
    """Return the clause about a value that Spark cannot hold, from the error with which a statement of a column refused it; empty
    for other errors."""
    found = _UNHELD.search(message)
    return (found[1] or found[2]) if found else ""


def escape_template(text: str) -> str:
    """Return the text with braces doubled, for use in a template of :class:`SourceColumn`."""
    return text.replace("{", "{{").replace("}", "}}")


@dataclass(frozen=True)
class SourceColumn:
    """A column of a relation, and how its values are read.

    :param name: exactly as the server has it.
    :param type: the server's name of the type, for messages.
    :param nullable: True if it may hold NULL; a column of a query always may.
    :param literal: the type of a literal that is compared with it; empty if values of this type have no order.
    :param clock: ``zoned``, ``local`` or ``date`` if it can be compared with the database's clock, else empty.
    :param clock_digits: number of digits of a second's fraction that it holds, 0 to 6.
    :param increases: True if an incrementing cursor can be of this type.
    :param select: the SQL expression that Spark's JDBC reader reads, with ``{c}`` for the column.
    :param spark: the Spark expression that makes the value of what was read, with ``{c}`` for it.
    :param kind: the kind of values that a Spark task reads by itself; None if they might differ from Spark's.
    :param task: the SQL expression that such a task reads, with ``{c}`` for the column.
    :param problem: the reason why it cannot be read; empty if it can.
    :param readable: True if the role may read it.
    :param collation: the order of its texts, if it differs from the database's and ``literal`` does not name it; the declaration
        of an ENUM or SET, which orders its values.
    """

    name: str
    type: str
    nullable: bool
    literal: str
    clock: str = ""
    clock_digits: int = 6
    increases: bool = False
    select: str = "{c}"
    spark: str = "{c}"
    kind: Kind | None = None
    task: str = "{c}"
    problem: str = ""
    readable: bool = True
    collation: str = ""

    @property
    def ordered_as(self) -> str:
        """The kind of its order. A column whose type has changed has its values in the same order if this stays the same."""
        order = SAME_ORDER.get(self.literal, self.literal)
        return f"{order} {self.collation}" if order and self.collation else order


def keeps_order(was: str, now: str) -> bool:
    """Return True if rows that were ordered in one way are in the same order now: an ENUM or SET may get values behind its last.

    :param was: as :attr:`SourceColumn.ordered_as` was; ``now`` the same.
    """
    return now == was or now.startswith(f"{was.removesuffix(')')},")


SAME_ORDER = {
    **dict.fromkeys(("smallint", "integer", "bigint", "numeric", "oid", "real", "double precision", "double"), "number"),
    "character varying": "text",
}
"""Types whose literals are also accepted by other types with an equal order."""


@dataclass(frozen=True)
class Relation:
    """A table, a view or a query.

    :param sql: the text after FROM.
    :param name: its name in messages.
    :param columns: its columns, in order.
    :param keys: the columns of the primary key, and of each unique index that takes no NULL.
    :param indexes: the columns of each index that holds all rows in order.
    :param writers: the server's ids of the tables whose locks its writers hold.
    :param table_id: the server's id of the table, which a table that is created again does not have; 0 if the server has none.
    :param is_foreign: True if another server holds its rows, or those of one of its partitions.
    :param has_children: True if other tables inherit from it, whose rows its keys and indexes do not hold.
    :param closed_schema: its schema, quoted, if the role may not use that; else empty.
    """

    sql: str
    name: str
    columns: Mapping[str, SourceColumn]
    keys: tuple[tuple[str, ...], ...] = ()
    indexes: tuple[tuple[str, ...], ...] = ()
    writers: tuple[int, ...] = ()
    table_id: int = 0
    is_foreign: bool = False
    has_children: bool = False
    closed_schema: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        """The primary key, else the unique index of the fewest columns; empty if the table has neither."""
        return self.keys[0] if self.keys else ()


class MissingRelation(NamedTuple):
    """The result of looking up a table that does not exist.

    :param hint: a clause with a similar table that exists; empty without one.
    :param grant: the statement after which the role sees the table, if the server hides tables that it may not read; else empty.
    """

    name: str
    hint: str = ""
    grant: str = ""


@dataclass(frozen=True)
class ReadLimits:
    """The conditions under which a session of a task may read.

    :param max_sessions: sessions that read at a time; None for any number.
    :param max_replica_lag: seconds that a replica may be behind; None if it is not checked.
    """

    max_sessions: int | None = None
    max_replica_lag: float | None = None

    @property
    def wait(self) -> bool:
        """True if a session may have to wait."""
        return self.max_sessions is not None or self.max_replica_lag is not None


@dataclass(frozen=True)
class JdbcReaderOptions:
    """The arguments of Spark's JDBC reader.

    :param url: without credentials.
    :param driver: the driver's class.
    :param options: of reader and driver; holds the password.
    """

    url: str
    driver: str
    options: Mapping[str, str] = field(repr=False)


class SqlDialect(ABC):
    """Writes a database's SQL. Names are always quoted, values are always literals."""

    @abstractmethod
    def quote(self, name: str) -> str:
        """Return a name as SQL."""

    @abstractmethod
    def make_text(self, column: SourceColumn, name: str) -> str:
        """Return an expression that writes the value of ``name`` so that :meth:`make_literal` gives it back exactly."""

    @abstractmethod
    def make_literal(self, column: SourceColumn, value: str) -> str:
        """Return a value as a literal of the column's type.

        :param value: as :meth:`make_text` writes it.
        """

    @abstractmethod
    def make_after_condition(self, names: Sequence[str], literals: Sequence[str]) -> str:
        """Return the condition for rows after these values. ``names`` are expressions that are never NULL."""

    @abstractmethod
    def make_up_to_condition(self, names: Sequence[str], literals: Sequence[str]) -> str:
        """Return the condition for rows at or before these values."""

    @abstractmethod
    def make_clock_literal(self, column: SourceColumn, instant: datetime) -> str:
        """Return a literal of the column's type.

        :param instant: a wall clock's time without zone: in UTC, or in the zone of the column's values.
        """


class DatabaseSession(ABC):
    """An open session of the server.

    :cvar dialect: writes the server's SQL.
    """

    dialect: SqlDialect

    @abstractmethod
    def begin(self, statement: str) -> None:
        """Run the statement with which a session begins."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection."""

    @abstractmethod
    def fetch_rows(self, statement: str) -> list[tuple]:
        """Return the rows of a query."""

    @abstractmethod
    def stream_rows(self, statement: str) -> Iterator[tuple]:
        """Yield the rows of a query, which the server sends a few thousand at a time. Read to the end, or close the session."""

    def prefer_indexes(self) -> None:  # noqa: B027
        """Let the planner prefer indexes for the rest of the session, also in tables without statistics, whose size it does not
        know. Does nothing by default."""

    def find_pages_obstacle(self, relation: Relation) -> str:
        """Return the reason why a table cannot be read by its pages, as a clause; empty if it can."""
        return "the server is no PostgreSQL; InnoDB stores rows in the order of the primary key, so that its ranges are pages"

    @abstractmethod
    def estimate_rows(self, relation: str) -> int:
        """Return the number of rows that the server's planner estimates, without reading the table.

        :param relation: the text after FROM, with its conditions.
        """

    @abstractmethod
    def get_text_order(self, relation: Relation, column: SourceColumn) -> str:
        """Return a name of the order of a text column; columns with the same name, in any databases, are in the same order."""

    @abstractmethod
    def read_clock(self) -> datetime:
        """Return the time of the database's clock, in UTC."""

    @abstractmethod
    def find_table(self, schema: str | None, name: str) -> Relation | MissingRelation:
        """Look up a table or view in the catalog.

        :param schema: None for the connection's default.
        """

    @abstractmethod
    def read_view_definition(self, relation: Relation) -> str:
        """Return the query of a view; empty for a table, and if the user may not see it."""

    @abstractmethod
    def query(self, query: str, name: str) -> Relation:
        """Describe the columns of a SELECT without running it.

        :param name: the query's name in messages.
        :raises SourceRejected: two of its columns have one name.
        """

    @abstractmethod
    def read_role(self) -> str:
        """Return the session's role or account, as GRANT takes it."""

    @abstractmethod
    def find_server_problems(self) -> Iterator[Problem]:
        """Yield the problems of the server itself, such as its version."""

    @abstractmethod
    def find_cursor_problems(self, relation: Relation, column: SourceColumn) -> Iterator[Problem]:
        """Yield the reasons why the values of an incrementing column may decrease, as far as the catalog shows."""

    @abstractmethod
    def explain_sequence_reset(self, relation: Relation, column: SourceColumn, value: str) -> str:
        """Return the reason why new rows will get values at or below ``value``, as far as the catalog shows; empty if they will
        not.
        """

    def read_identity(self) -> str:
        """Return the server's own identifier, which does not depend on the address; empty if the server has none."""
        return ""

    def find_foreign_encoding(self) -> str:
        """Return the encoding in which the database computes with texts; empty if that is UTF-8."""
        return ""

    def has_md5(self) -> bool:
        """Return True if the server has the function MD5."""
        return True

    def find_task_read_obstacle(self) -> str:
        """Return the reason why Spark tasks cannot read this server by themselves, as a clause; empty if they can."""
        return "it is no PostgreSQL"

    def find_hidden_writers(self, relation: Relation) -> str:
        """Return the reason why the server does not show the transactions that write a relation: they run on another server.
        Return an empty text if it does.
        """
        return ""

    @abstractmethod
    def wait_for_writers(self, relation: Relation, seconds: float) -> str:
        """Wait until the transactions that are writing the relation now have ended.

        :return: empty; or which transactions are still writing after that time.
        """


class DatabaseServer(Protocol):
    """The server that an Airflow connection leads to.

    :param where: ``host:port/database``, for messages.
    """

    @property
    def conn_id(self) -> str: ...

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...

    @property
    def database(self) -> str: ...

    @property
    def where(self) -> str: ...


ServerT = TypeVar("ServerT", bound=DatabaseServer)


def bracket_ipv6(host: str) -> str:
    """Return a host for a URI: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def format_server_uri(scheme: str, server: DatabaseServer) -> str:
    """Return ``scheme://host:port``."""
    return f"{scheme}://{bracket_ipv6(server.host)}:{server.port}"


@dataclass(frozen=True)
class SourceDatabase(ABC, Generic[ServerT]):
    """The database that an Airflow connection leads to.

    :param server: its address and login.
    :cvar scheme: the scheme of its URI.
    :cvar packages: Maven coordinates of its JDBC driver.
    :cvar driver: the driver's class.
    :cvar default_schema: the schema in the URI of a table that names none; empty if the database's name stands for it.
    :cvar session_statement: the statement with which each session begins; from then on it only reads.
    """

    server: ServerT
    scheme: ClassVar[Literal["postgres", "mysql"]]
    packages: ClassVar[tuple[str, ...]]
    driver: ClassVar[str]
    default_schema: ClassVar[str]
    session_statement: ClassVar[str]

    @property
    def conn_id(self) -> str:
        """The Airflow connection."""
        return self.server.conn_id

    @property
    def server_uri(self) -> str:
        """``scheme://host:port``."""
        return format_server_uri(self.scheme, self.server)

    @property
    def uri(self) -> str:
        """``scheme://host:port/database``, without the last part if the connection names no database."""
        name = urllib.parse.quote(self.server.database, safe="")
        return f"{self.server_uri}/{name}" if name else self.server_uri

    @abstractmethod
    def find_problems(self) -> list[Problem]:
        """Return the problems of the connection that can be found without connecting."""

    @abstractmethod
    def connect(self) -> DatabaseSession:
        """Open a session without running a statement."""

    def find_grant(self, found: str) -> str:
        """Return the statement that grants the right which a session lacks, from an error of the server; "" for other errors."""
        return ""

    @abstractmethod
    def list_driver_errors(self) -> tuple[type[Exception], ...]:
        """Return the errors that the Python driver raises."""

    @abstractmethod
    def describe_error(self, error: Exception) -> tuple[str, bool]:
        """Return the message of a driver's error without secrets, and True if the server would refuse the statement again."""

    def get_shown_cause(self, error: Exception) -> BaseException | None:
        """Return the error if a traceback may show it; None if it may quote the password."""
        return None

    @contextmanager
    def open_session(self, doing: str) -> Iterator[DatabaseSession]:
        """Open a session that only reads.

        :param doing: the purpose, for messages.
        :raises SourceUnavailable: the server cannot be reached, or has closed the connection.
        :raises SourceRejected: the server refused a statement.
        """
        is_open = False
        try:
            session = self.connect()
            try:
                session.begin(self.session_statement)
                is_open = True
                yield session
            finally:
                session.close()
        except self.list_driver_errors() as error:
            detail, is_refused = self.describe_error(error)
            cause = self.get_shown_cause(error)
            if is_refused:
                raise SourceRejected(self.server.where, f"{doing}: {detail}", find_access_remedy(str(error))) from cause
            if not is_open and detail == SESSION_ENDED:
                detail = "the connection was closed before the login, as by a server of another kind"
            raise SourceUnavailable(self.server.where, doing, detail) from cause

    @abstractmethod
    def make_jdbc_url(self) -> str:
        """Return the URL of the JDBC driver, without credentials."""

    @abstractmethod
    def make_jdbc_properties(self) -> dict[str, str]:
        """Return the properties of the JDBC driver, with the password."""

    def escape_question_marks(self, statement: str) -> str:
        """Return a statement in which the JDBC driver takes no question mark for a parameter. Unchanged by default."""
        return statement

    def list_waiting_statements(self, limits: ReadLimits) -> list[str]:
        """Return the statements that wait until a session may read.

        With ``max_sessions``, one of them takes one of that many locks. The server releases it whenever the session ends.
        """
        raise NotImplementedError

    def begin_and_wait(self, limits: ReadLimits) -> str:
        """Return one statement that begins a session, and waits."""
        return "; ".join([self.session_statement, *self.list_waiting_statements(limits)])

    def find_limit_problems(self, session: DatabaseSession, limits: ReadLimits) -> Iterator[Problem]:
        """Yield the reasons why the server cannot limit the reading of tasks."""
        return iter(())

    def make_reader_options(self, fetchsize: int, limits: ReadLimits) -> JdbcReaderOptions:
        """Return the options with which Spark's JDBC reader connects.

        :param fetchsize: rows per round trip.
        :param limits: the conditions under which a session may read.
        """
        begin = self.session_statement
        if limits.wait:
            begin = self.begin_and_wait(limits)
        settings = {"tcpKeepAlive": "true", "sessionInitStatement": begin, "fetchsize": str(fetchsize)}
        return JdbcReaderOptions(self.make_jdbc_url(), self.driver, {**self.make_jdbc_properties(), **settings})

    def make_split_reader(
        self, table: str, columns: Sequence[SourceColumn], statements: Sequence[str], limits: ReadLimits
    ) -> SplitReader:
        """Return the reader that Spark tasks use.

        :param table: its name in messages.
        :param statements: per split, the SELECT of its rows' ``columns``.
        :param limits: the conditions under which a session may read.
        """
        raise NotImplementedError
