"""What JdbcSource needs to know of a database: its relations as values, and the few things in which servers differ."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.formats.base import Kind

if TYPE_CHECKING:
    from airflow_kafka_spark.sources.base import SplitReader
    from airflow_kafka_spark.sources.jdbc.options import JdbcSettings

Values = tuple[str, ...]
"""A row's values in the columns of an order, as the server writes them: they survive JSON, and come back as literals."""


@dataclass(frozen=True)
class Column:
    """A column that can be read, and how.

    :param name: exactly as the server has it.
    :param type: as the server calls it, for people.
    :param nullable: whether a NULL can be in it; a query's columns always can.
    :param literal: the type of a literal that is compared with it; empty: values of this type are in no order.
    :param clock: ``zoned``, ``local`` or ``date`` where it can be compared with the database's clock, else empty.
    :param increases: whether an incrementing cursor can be of this type.
    :param select: the expression that is read, with ``{c}`` for the column.
    :param spark: the Spark expression that makes the value of what was read, with ``{c}`` for it.
    :param kind: what a task gets that reads it by itself; None where its values would not be certain to be Spark's.
    :param task: the expression that such a task reads, with ``{c}`` for the column.
    :param problem: why it cannot be read, empty where it can.
    :param readable: whether the role may read it.
    """

    name: str
    type: str
    nullable: bool
    literal: str
    clock: str = ""
    increases: bool = False
    select: str = "{c}"
    spark: str = "{c}"
    kind: Kind | None = None
    task: str = "{c}"
    problem: str = ""
    readable: bool = True


@dataclass(frozen=True)
class Relation:
    """A table, a view or a query.

    :param sql: what stands behind FROM.
    :param name: for people.
    :param columns: in their order.
    :param keys: what tells rows apart: the columns of the primary key and of each unique index that takes no NULL.
    :param indexes: the columns of each index that has all rows in order.
    :param writers: what the server needs to find who is writing it.
    """

    sql: str
    name: str
    columns: Mapping[str, Column]
    keys: tuple[tuple[str, ...], ...] = ()
    indexes: tuple[tuple[str, ...], ...] = ()
    writers: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, ...]:
        """The primary key, else the unique index of the fewest columns; empty where there is none."""
        return self.keys[0] if self.keys else ()


class Missing(NamedTuple):
    """There is no such table.

    :param hint: what there is instead, empty or a clause.
    """

    name: str
    hint: str = ""


@dataclass(frozen=True)
class Reader:
    """What Spark's JDBC reader connects with.

    :param url: without credentials.
    :param driver: the driver's class.
    :param options: of reader and driver; holds the password.
    """

    url: str
    driver: str
    options: Mapping[str, str] = field(repr=False)


class Dialect(ABC):
    """How a database's SQL is written. Names are always quoted, values are always literals."""

    @abstractmethod
    def quote(self, name: str) -> str: ...

    @abstractmethod
    def text(self, column: Column, name: str) -> str:
        """An expression that writes ``name``'s value so that :meth:`literal` gives it back exactly."""

    @abstractmethod
    def literal(self, column: Column, value: str) -> str: ...

    @abstractmethod
    def after(self, names: Sequence[str], literals: Sequence[str]) -> str:
        """Rows that come later in the order than these values. ``names`` are expressions that are never NULL."""

    @abstractmethod
    def upto(self, names: Sequence[str], literals: Sequence[str]) -> str:
        """These values, and rows that come earlier."""

    @abstractmethod
    def clock(self, column: Column, instant: datetime) -> str:
        """A literal of the column's type. ``instant`` is a wall clock's: in UTC, or in the zone of the column's values."""


class Session(ABC):
    """An open session of the server."""

    dialect: Dialect

    @abstractmethod
    def rows(self, statement: str) -> list[tuple]: ...

    @abstractmethod
    def now(self) -> datetime:
        """The database's clock, in UTC."""

    @abstractmethod
    def relation(self, source: JdbcSettings) -> Relation | Missing: ...

    @abstractmethod
    def place_problems(self) -> Iterator[Problem]:
        """What is wrong with where the connection leads."""

    @abstractmethod
    def cursor_problems(self, relation: Relation, column: Column) -> Iterator[Problem]:
        """Why the values of an incrementing column do not only grow, as far as the catalog tells."""

    @abstractmethod
    def restarted(self, relation: Relation, column: Column, value: str) -> str:
        """Why values after ``value`` will not come, as far as the catalog tells; empty where it does not."""

    def identity(self) -> str:
        """What the server calls itself, the same by whatever address it is reached; empty where it does not say."""
        return ""

    def unread_by_tasks(self) -> str:
        """Why tasks cannot read this server by themselves, as a clause; empty where they can."""
        return "it is no PostgreSQL"

    @abstractmethod
    def wait_for_writers(self, relation: Relation, seconds: float) -> str:
        """Wait until transactions that are writing the relation now have ended.

        :return: empty, or who is still writing after that time.
        """


class Database(ABC):
    """Where an Airflow connection leads."""

    packages: ClassVar[tuple[str, ...]]
    conn_id: str

    @property
    @abstractmethod
    def uri(self) -> str:
        """``scheme://host:port/database``."""

    default_schema: ClassVar[str]
    """Stands for the schema of a table without one in the URI; empty where the database's name does."""

    @abstractmethod
    def problems(self) -> list[Problem]:
        """What can be said of the connection without using it."""

    @abstractmethod
    def session(self, doing: str) -> AbstractContextManager[Session]:
        """
        :raises SourceUnavailable: the server cannot be reached, or broke off.
        :raises SourceRejected: it refused.
        """

    @abstractmethod
    def reader(self, fetchsize: int) -> Reader: ...

    def split_reader(self, table: str, columns: Sequence[Column], statements: Sequence[str]) -> SplitReader:
        """What a task reads with.

        :param statements: per split, the SELECT of its rows' ``columns``.
        """
        raise NotImplementedError
