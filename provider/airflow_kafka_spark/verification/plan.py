"""Which columns of which tables are compared, and in which forms; and everything that keeps them from being compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from airflow_kafka_spark.errors import KafkaSparkError, Problem, Unchecked
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.sinks import PostgresSink
from airflow_kafka_spark.sources.jdbc.database import DatabaseSession, Relation, SourceColumn, SourceDatabase
from airflow_kafka_spark.sources.jdbc.source import JdbcSource
from airflow_kafka_spark.sources.jdbc.windows import find_relation
from airflow_kafka_spark.verification.canonical_sql import CanonicalSql, MysqlCanonicalSql, PostgresCanonicalSql
from airflow_kafka_spark.verification.database_side import DatabaseSide
from airflow_kafka_spark.verification.forms import RANGE_FORMS, Comparable, Form, form_of
from airflow_kafka_spark.verification.options import VerificationOptions


@dataclass(frozen=True)
class VerificationPlan:
    """What is compared.

    :param source: the source's table.
    :param sink: the sink's table.
    :param ranges: True if both tables can be cut by ranges of the key.
    """

    source: DatabaseSide
    sink: DatabaseSide
    ranges: bool


def make_plan(options: VerificationOptions) -> tuple[VerificationPlan | None, list[Problem]]:
    """Return what is compared; or None, and all problems."""
    problems, source = [], options.source
    if not isinstance(source, JdbcSource):
        problems.append(Problem("source", f"it is of type {type(source).__name__}; expected a JdbcSource"))
    sink = _table_of(options.sink)
    if sink is None:
        found = f"it is of type {type(options.sink).__name__}; expected a PostgresSink, or a JdbcSource"
        problems.append(Problem("sink", found))
    if problems:
        return None, problems
    assert sink is not None
    left_out = {f"source column `{name}`" for name in options.exclude_columns}
    problems = [problem for problem in source.validate() if problem.where not in left_out]
    # A sink needs no key of its own, and it may have columns that are not compared.
    others = (problem for problem in sink.validate() if problem.where != "source.key")
    problems += [of_sink(problem) for problem in others if not problem.where.startswith("source column ")]
    if problems:
        named = {"columns": options.columns, "exclude_columns": options.exclude_columns}
        waiting = [Unchecked(where, problems[0].where) for where, value in named.items() if value]
        return None, [*problems, *waiting]
    return _Planning(options, sink).plan()


def _table_of(sink: object) -> JdbcSource | None:
    """Return a sink as a table to read; None if it cannot be."""
    if isinstance(sink, PostgresSink):
        return JdbcSource(sink.conn_id, sink.table)
    return sink if isinstance(sink, JdbcSource) else None


def of_sink(problem: Problem) -> Problem:
    """Return a problem of a table that is read as a source, as one of the sink."""
    if isinstance(problem, Unchecked):
        return Unchecked(problem.where.replace("source", "sink", 1), problem.what.replace("source", "sink", 1))
    return replace(problem, where=problem.where.replace("source", "sink", 1))


def canonical_sql(database: SourceDatabase) -> CanonicalSql:
    """Return the expressions of a database."""
    return PostgresCanonicalSql() if database.scheme == "postgres" else MysqlCanonicalSql()


@dataclass(frozen=True)
class _Planning:
    """Compares the columns of both tables. Their connections and names are sound.

    :param options: the arguments.
    :param table: the sink's table.
    """

    options: VerificationOptions
    table: JdbcSource

    def plan(self) -> tuple[VerificationPlan | None, list[Problem]]:
        source, sink = self.options.source, self.table
        with source.database().session("reading the catalog") as session:
            ours, problems = find_relation(source, session), list(_encoding_problems("source", session))
        with sink.database().session("reading the catalog") as session:
            theirs = find_relation(sink, session)
            problems += _encoding_problems("sink", session)
        key = tuple(source.key) or ours.key
        names = self._names(ours, key)
        problems += self._naming_problems(ours, key)
        found, wrong = self._sides(ours, theirs, key, names)
        problems += wrong
        if found is None or problems:
            return None, problems
        problems += self._condition_problems("where", found.source)
        problems += self._condition_problems("sink_where", found.sink)
        return (None if problems else found), problems

    def _names(self, ours: Relation, key: Sequence[str]) -> tuple[str, ...]:
        """Return the source's columns that are compared, those of the key first."""
        source = self.options.source
        names = ours.columns if source.include_columns is None else source.include_columns
        return (*key, *(name for name in names if name not in key and name not in self.options.exclude_columns))

    def _naming_problems(self, ours: Relation, key: Sequence[str]) -> Iterator[Problem]:
        given = {"columns": self.options.columns, "exclude_columns": self.options.exclude_columns}
        for where, names in given.items():
            unknown = [name for name in names if name not in ours.columns]
            if unknown:
                yield Problem(where, f"{ours.name} has no column {quote_names(unknown)}; it has {quote_names(ours.columns)}")
        if left_out := [name for name in key if name in self.options.exclude_columns]:
            yield Problem("exclude_columns", f"{quote_names(left_out)} is part of the key, by which rows are compared")

    def _sides(
        self, ours: Relation, theirs: Relation, key: Sequence[str], names: Sequence[str]
    ) -> tuple[VerificationPlan | None, list[Problem]]:
        databases = self.options.source.database(), self.table.database()
        source_sql, sink_sql = canonical_sql(databases[0]), canonical_sql(databases[1])
        in_postgres = all(database.scheme == "postgres" for database in databases)
        problems: list[Problem] = []
        pairs: list[tuple[SourceColumn, SourceColumn, Form]] = []
        for name in names:
            other = self.options.columns.get(name, name)
            column, counterpart = ours.columns.get(name), theirs.columns.get(other)
            if column is None:
                continue
            if counterpart is None:
                found, action = f"{theirs.name} has no column `{other}`", 'Name it with `columns={"source": "sink"}`'
                problems.append(Problem(f"source column `{name}`", found, f"{action}, or leave it out with `exclude_columns=`"))
                continue
            a = Comparable(name, source_sql.family(column), column.type)
            b = Comparable(other, sink_sql.family(counterpart), counterpart.type)
            form = form_of(a, b, in_postgres=in_postgres)
            if form is None:
                found = f"it is {a.type}, and `{other}` of {theirs.name} is {b.type}; values of these types cannot be compared"
                action = "Leave it out with `exclude_columns=`, or cast it with `query=` of the source"
                problems.append(Problem(f"source column `{name}`", found, action))
                continue
            pairs.append((column, counterpart, form))
        if problems:
            return None, problems
        forms, size = tuple(form for _, _, form in pairs), self.options.chunk_rows
        columns, counterparts = tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)
        source = DatabaseSide(databases[0], ours, columns, forms, len(key), self.options.where, source_sql, size)
        sink = DatabaseSide(databases[1], theirs, counterparts, forms, len(key), self.options.sink_where, sink_sql, size)
        return VerificationPlan(source, sink, self._by_ranges(source, sink)), []

    def _by_ranges(self, source: DatabaseSide, sink: DatabaseSide) -> bool:
        """Return True if both databases have the rows in one order of the key, by an index."""
        return source.is_indexed and sink.is_indexed and all(self._in_one_order(source, sink))

    def _in_one_order(self, source: DatabaseSide, sink: DatabaseSide) -> Iterator[bool]:
        for n, form in enumerate(source.forms[: source.key]):
            pair = source.columns[n], sink.columns[n]
            families = source.sql.family(pair[0]), sink.sql.family(pair[1])
            is_same_server = source.database.scheme == sink.database.scheme
            if form in RANGE_FORMS and "boolean" not in families and "text" not in families:
                yield True
            elif form == "uuid" and is_same_server:
                yield families == ("uuid", "uuid")
            elif form == "text" and is_same_server and families == ("text", "text"):
                yield _text_order(source, n) == _text_order(sink, n)
            else:
                yield False

    def _condition_problems(self, where: str, side: DatabaseSide) -> list[Problem]:
        """Return why a statement with the condition fails."""
        try:
            with side.session("trying the statement") as session:
                side.explain(session)
        except KafkaSparkError as error:
            return [Problem(where, error.found)]
        return []


def _text_order(side: DatabaseSide, n: int) -> str:
    with side.session("asking for the order of a column") as session:
        return session.text_order(side.relation, side.columns[n])


def _encoding_problems(where: str, session: DatabaseSession) -> Iterator[Problem]:
    if encoding := session.foreign_encoding():
        found = f"the database's texts are in {encoding}; expected UTF8"
        yield Problem(f"{where}.conn_id", found, "Checksums of its rows cannot be compared with those of other databases")
