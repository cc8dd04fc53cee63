"""The plan of a verification: options, compared columns with their forms, and the problems that prevent a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from airflow_kafka_spark.errors import KafkaSparkError, Problem, Unchecked
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.sinks.base import Sink, SqlTable
from airflow_kafka_spark.sources.jdbc.database import DatabaseSession, Relation, SourceDatabase
from airflow_kafka_spark.sources.jdbc.source import JdbcSource
from airflow_kafka_spark.sources.jdbc.windows import find_relation
from airflow_kafka_spark.verification.arrow_side import ArrowSide, ArrowTable
from airflow_kafka_spark.verification.database_side import (
    LEAST_ROWS,
    CanonicalSql,
    DatabaseSide,
    MySqlCanonicalSql,
    PostgresCanonicalSql,
)
from airflow_kafka_spark.verification.forms import RANGE_FORMS, Comparable, Form, find_form


@dataclass(frozen=True)
class VerificationOptions:
    """The arguments of :class:`~airflow_kafka_spark.operators.VerifyOperator`, which documents them."""

    source: JdbcSource
    sink: Sink | JdbcSource
    columns: Mapping[str, str] = field(default_factory=dict)
    exclude_columns: Sequence[str] = ()
    where: str = ""
    sink_where: str = ""
    chunk_rows: int | None = None
    parallel: int = 4
    rechecks: int = 0
    recheck_delay: float = 30.0
    max_keys: int = 100
    on_difference: Literal["fail", "warn"] = "fail"

    def find_problems(self) -> list[Problem]:
        """Return the problems of these options that need no server."""
        least = {"chunk_rows": 1, "parallel": 1, "rechecks": 0, "max_keys": 1}
        found = [
            Problem(where, f"`{given}` is not a whole number of at least {number}")
            for where, number in least.items()
            if (given := getattr(self, where)) is not None and given < number
        ]
        if not 0 <= self.recheck_delay < 1e9:
            found.append(Problem("recheck_delay", f"it is {self.recheck_delay!r}; expected seconds, at least 0"))
        if self.on_difference not in ("fail", "warn"):
            found.append(Problem("on_difference", f"`{self.on_difference}` is not one of fail, warn"))
        return found


@dataclass(frozen=True)
class VerificationPlan:
    """The two tables that are compared, and the method.

    :param source: the source's table.
    :param sink: the sink's table.
    :param ranges: True if both tables can be divided into ranges of the key. Then the sink is a database table, too.
    """

    source: DatabaseSide
    sink: DatabaseSide | ArrowSide
    ranges: bool


def make_plan(options: VerificationOptions) -> tuple[VerificationPlan | None, list[Problem]]:
    """Return the plan; or None, and all problems."""
    source = options.source
    if not isinstance(source, JdbcSource):
        return None, [Problem("source", f"it is of type {type(source).__name__}; expected a JdbcSource")]
    left_out = {f"source column `{name}`" for name in options.exclude_columns}
    problems = [problem for problem in source.validate() if problem.where not in left_out]
    theirs, of_sink = _find_sink_table(options.sink, options.sink_where)
    problems += of_sink
    if problems or theirs is None:
        named = {"columns": options.columns, "exclude_columns": options.exclude_columns}
        waiting = [Unchecked(where, problems[0].where) for where, value in named.items() if value]
        return None, [*problems, *waiting]
    database = source.find_database()
    with database.open_session("reading the catalog") as session:
        ours = DatabaseTable.of(database, session, source)
        problems = [*_find_encoding_problems("source", session)]
    found_plan, wrong = _Planning(options, ours, theirs).plan()
    return (None if problems else found_plan), [*problems, *wrong]


def _find_sink_table(sink: Sink | JdbcSource, condition: str) -> tuple[DatabaseTable | ArrowTable | None, list[Problem]]:
    """Return the sink's table; or None, and the reasons why it cannot be compared.

    :param condition: the condition for its rows.
    """
    if isinstance(sink, JdbcSource):
        return _find_database_table(sink)
    table = sink.find_compared_table()
    if table is None:
        found = f"rows of a {type(sink).__name__} cannot be compared: its `find_compared_table` returns None"
        return None, [Problem("sink", found, "Name a JdbcSource that reads its table, or define that method")]
    if isinstance(table, SqlTable):
        return _find_database_table(JdbcSource(table.conn_id, table.table))
    try:
        if problems := table.find_problems(condition) or sink.find_target_problems():
            return None, problems
        if (loaded := ArrowTable.load(table)) is not None:
            return loaded, []
    except KafkaSparkError as error:
        return None, [Problem.of("sink", error)]
    return None, [Problem("sink", f"there is no table {table.name}", "Correct its name")]


def _find_database_table(table: JdbcSource) -> tuple[DatabaseTable | None, list[Problem]]:
    """Return the table of a sink; or None, and the reasons why it cannot be compared."""
    # The sink needs no key, and it may have columns that are not compared.
    problems = [problem for problem in table.validate() if problem.where != "source.key"]
    problems = [_make_sink_problem(problem) for problem in problems if not problem.where.startswith("source column ")]
    if problems:
        return None, problems
    database = table.find_database()
    with database.open_session("reading the catalog") as session:
        return DatabaseTable.of(database, session, table), list(_find_encoding_problems("sink", session))


def _make_sink_problem(problem: Problem) -> Problem:
    """Return a problem of the sink's table under the sink's argument. The table is read by a source."""
    if isinstance(problem, Unchecked):
        return Unchecked(problem.where.replace("source", "sink", 1), problem.what.replace("source", "sink", 1))
    return replace(problem, where=problem.where.replace("source", "sink", 1))


@dataclass(frozen=True)
class DatabaseTable:
    """A table of a database.

    :param database: the server.
    :param relation: the table or query.
    :param sql: the database's expressions.
    """

    database: SourceDatabase
    relation: Relation
    sql: CanonicalSql

    @classmethod
    def of(cls, database: SourceDatabase, session: DatabaseSession, table: JdbcSource) -> DatabaseTable:
        """Return the table that a source reads."""
        return cls(database, find_relation(table, session), make_canonical_sql(database, session))

    @property
    def name(self) -> str:
        return self.relation.name

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.relation.columns)

    @property
    def is_postgres(self) -> bool:
        """True if the server is PostgreSQL."""
        return self.database.scheme == "postgres"

    def find_column(self, name: str) -> Comparable | None:
        """Return the column of this name, or None if the table has no such column."""
        column = self.relation.columns.get(name)
        return None if column is None else Comparable(name, self.sql.find_family(column), column.type)

    def make_side(
        self, names: Sequence[str], forms: tuple[Form, ...], key: int, where: str, piece_rows: int | None
    ) -> DatabaseSide:
        """Return the table with the columns that are compared."""
        columns = tuple(self.relation.columns[name] for name in names)
        return DatabaseSide(self.database, self.relation, columns, forms, key, where, self.sql, piece_rows)


def make_canonical_sql(database: SourceDatabase, session: DatabaseSession) -> CanonicalSql:
    """Return the expressions of a database."""
    if database.scheme != "postgres":
        return MySqlCanonicalSql()
    ((version,),) = session.fetch_rows("SELECT current_setting('server_version_num')")
    return PostgresCanonicalSql(trims=int(version) >= 130_000)


@dataclass(frozen=True)
class _Planning:
    """Compares the columns of both tables.

    :param options: the arguments.
    :param ours: the source's table.
    :param theirs: the sink's table.
    """

    options: VerificationOptions
    ours: DatabaseTable
    theirs: DatabaseTable | ArrowTable

    def plan(self) -> tuple[VerificationPlan | None, list[Problem]]:
        key = tuple(self.options.source.key) or self.ours.relation.key
        problems = list(self._find_naming_problems(key))
        pairs, wrong = self._pair_columns(self._select_names(key))
        problems += wrong
        if problems:
            return None, problems
        names, others, forms = [a for a, _, _ in pairs], [b for _, b, _ in pairs], tuple(form for _, _, form in pairs)
        # A row that is on its way makes its chunk differ at each recheck.
        size = self.options.chunk_rows or (LEAST_ROWS if self.options.rechecks else None)
        source = self.ours.make_side(names, forms, len(key), self.options.where, size)
        sink = self.theirs.make_side(others, forms, len(key), self.options.sink_where, size)
        for where, side in (("where", source), ("sink_where", sink)):
            try:
                side.explain()
            except KafkaSparkError as error:
                problems.append(Problem.of(where, error, ""))
        ranges = not problems and isinstance(sink, DatabaseSide) and self._can_compare_by_ranges(source, sink)
        return (None if problems else VerificationPlan(source, sink, ranges)), problems

    def _select_names(self, key: Sequence[str]) -> tuple[str, ...]:
        """Return the source's columns that are compared, the key's columns first."""
        names = self.options.source.include_columns
        names = self.ours.columns if names is None else names
        return (*key, *(name for name in names if name not in key and name not in self.options.exclude_columns))

    def _find_naming_problems(self, key: Sequence[str]) -> Iterator[Problem]:
        ours = self.ours
        for where, names in {"columns": self.options.columns, "exclude_columns": self.options.exclude_columns}.items():
            if unknown := [name for name in names if name not in ours.columns]:
                yield Problem(where, f"{ours.name} has no column {quote_names(unknown)}; it has {quote_names(ours.columns)}")
        if left_out := [name for name in key if name in self.options.exclude_columns]:
            yield Problem("exclude_columns", f"{quote_names(left_out)} is part of the key, by which rows are compared")

    def _pair_columns(self, names: Sequence[str]) -> tuple[list[tuple[str, str, Form]], list[Problem]]:
        """Return for each column its name in the source, its name in the sink, and the form in which both are compared."""
        problems: list[Problem] = []
        pairs: list[tuple[str, str, Form]] = []
        in_postgres = self.ours.is_postgres and self.theirs.is_postgres
        for name in names:
            other = self.options.columns.get(name, name)
            a, b = self.ours.find_column(name), self.theirs.find_column(other)
            if a is None:
                continue
            if b is None:
                found, action = (
                    f"the sink's table {self.theirs.name} has no column `{other}`",
                    'Name it with `columns={"source": "sink"}`',
                )
                problems.append(Problem(f"source column `{name}`", found, f"{action}, or leave it out with `exclude_columns=`"))
            elif (form := find_form(a, b, in_postgres=in_postgres)) is None:
                found = (
                    f"it is {a.type}, and `{other}` of {self.theirs.name} is {b.type}; values of these types cannot be compared"
                )
                action = "Leave it out with `exclude_columns=`, or cast it with `query=` of the source"
                problems.append(Problem(f"source column `{name}`", found, action))
            else:
                pairs.append((name, other, form))
        return pairs, problems

    def _can_compare_by_ranges(self, source: DatabaseSide, sink: DatabaseSide) -> bool:
        """Return True if indexes of both databases return the rows in the same order of the key."""
        return source.is_indexed and sink.is_indexed and all(self._compare_orders(source, sink))

    def _compare_orders(self, source: DatabaseSide, sink: DatabaseSide) -> Iterator[bool]:
        for n, form in enumerate(source.forms[: source.key]):
            pair = source.columns[n], sink.columns[n]
            families = source.sql.find_family(pair[0]), sink.sql.find_family(pair[1])
            is_same_server = source.database.scheme == sink.database.scheme
            if form in RANGE_FORMS:
                # Each side has to accept the other side's values as literals. PostgreSQL accepts no fraction as an integer.
                mixed = [
                    side.database.scheme for side, family in zip((source, sink), families, strict=True) if family == "integer"
                ]
                yield (
                    families[0] == families[1] != "boolean"
                    or set(families) == {"zoned", "local"}
                    or (set(families) == {"integer", "decimal"} and mixed == ["mysql"])
                )
            elif form == "uuid" and is_same_server:
                yield families == ("uuid", "uuid")
            elif form == "text" and is_same_server and families == ("text", "text"):
                yield _make_text_order(source, n) == _make_text_order(sink, n)
            else:
                yield False


def _make_text_order(side: DatabaseSide, n: int) -> str:
    with side.open_session("asking for the order of a column") as session:
        return session.get_text_order(side.relation, side.columns[n])


def _find_encoding_problems(where: str, session: DatabaseSession) -> Iterator[Problem]:
    if encoding := session.find_foreign_encoding():
        found = f"the database's texts are in {encoding}; expected UTF8"
        yield Problem(f"{where}.conn_id", found, "Checksums of its rows cannot be compared with those of other databases")
    if not session.has_md5():
        action = "INSTALL COMPONENT 'file://component_classic_hashing'"
        yield Problem(f"{where}.conn_id", "the server has no function MD5, with which checksums of rows are made", action)
