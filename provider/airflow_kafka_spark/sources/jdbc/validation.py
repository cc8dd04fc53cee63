"""Checks of a JdbcSource that need its server: relation, columns and their types, cursor, key, rights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from airflow_kafka_spark.errors import ConnectionInvalid, KafkaSparkError, Problem, SourceUnavailable, Unchecked
from airflow_kafka_spark.errors.base import quote_names
from airflow_kafka_spark.hooks.connections import name_other_server
from airflow_kafka_spark.hooks.databases import choose_action
from airflow_kafka_spark.sources.jdbc.database import DatabaseSession, MissingRelation, Relation, SourceColumn, SourceDatabase
from airflow_kafka_spark.sources.jdbc.options import JdbcSourceOptions
from airflow_kafka_spark.sources.jdbc.windows import (
    HIDDEN_WRITERS,
    SHOW_WRITERS,
    list_selected_columns,
    list_split_columns,
    look_up_relation,
    select_statement,
)

T = TypeVar("T")

_CONNECTION_ACTION = "Correct the connection, or see to the server"


@dataclass(frozen=True)
class ServerValidation:
    """Checks the options of a source against its server. Each check opens its own session.

    :param options: the source's options.
    :param database: the server.
    :param options_valid: True if the checks without a server found nothing; only then a statement is tried.
    """

    options: JdbcSourceOptions
    database: SourceDatabase
    options_valid: bool

    def find_problems(self) -> list[Problem]:
        """Return all problems that would prevent a window from being frozen and read."""
        where = "source.query" if self.options.query is not None else "source.table"
        found, failed = self._ask("source.conn_id", "connecting", self._find_server_problems)
        if failed or found:
            return [*failed, *(found or []), *list_unchecked_arguments(self.options, "source.conn_id")]
        if list(self.options.find_relation_problems()):
            return list_unchecked_arguments(self.options, where)
        relation, failed = self._ask(where, "looking up the table", lambda session: look_up_relation(self.options, session))
        if relation is None:
            return [*failed, *list_unchecked_arguments(self.options, where)]
        if isinstance(relation, MissingRelation):
            what, action = f"there is no table {relation.name}{relation.hint}", "Create it, or correct its name"
            if relation.grant:
                action = f"Create it, correct its name, or {relation.grant}"
            return [Problem(where, what, action), *list_unchecked_arguments(self.options, where)]
        found = [
            *self._find_column_problems(relation),
            *self._find_case_problems(relation),
            *self._find_cursor_problems(relation),
            *self._find_pages_problems(relation),
        ]
        found += [*self._find_key_problems(relation), *self._find_writer_problems(relation)]
        if not found and self.options_valid:
            _, found = self._ask(where, "trying to read it", lambda session: self._try_statement(session, relation))
        return found

    def _find_server_problems(self, session: DatabaseSession) -> list[Problem]:
        limits = self.database.find_limit_problems(session, self.options.limits)
        return [*session.find_server_problems(), *limits]

    def _ask(self, where: str, doing: str, question: Callable[[DatabaseSession], T]) -> tuple[T | None, list[Problem]]:
        """Return the answer, or None and a problem if the server does not answer."""
        try:
            with self.database.open_session(doing) as session:
                return question(session), []
        except KafkaSparkError as error:
            is_own = where != "source.conn_id" or isinstance(error, ConnectionInvalid)
            action = getattr(error, "action", "") if is_own else _CONNECTION_ACTION
            grant = self.database.find_grant(error.found)
            problem = Problem.of(
                where, error, choose_action(error.found, f"{grant}, or correct the connection" if grant else action)
            )
            if where == "source.conn_id" and isinstance(error, SourceUnavailable):
                server = self.database.server
                problem = replace(problem, what=name_other_server(problem.what, server.host, server.port, self.database.scheme))
            return None, [problem]

    def _try_statement(self, session: DatabaseSession, relation: Relation) -> None:
        order = list_split_columns(self.options, relation)
        statement = select_statement(session, relation, list_selected_columns(self.options, relation), order)
        session.fetch_rows(f"SELECT * FROM {statement} LIMIT 0")

    # --- columns ---

    def _find_column_problems(self, relation: Relation) -> Iterator[Problem]:
        names = relation.columns if self.options.include_columns is None else self.options.include_columns
        if not relation.columns:
            yield Problem("source", f"{relation.name} has no columns")
        yield from self._find_unreadable_columns(relation, names)
        for name in names:
            column = relation.columns.get(name)
            if column is None:
                yield _make_missing_column_problem("source.include_columns", relation, name)
            elif column.problem and column.readable:
                action = "Leave it out with `include_columns=`, or cast it with `query=`"
                yield Problem(f"source column `{name}`", f"{column.problem} ({column.type})", action)

    def _find_unreadable_columns(self, relation: Relation, names: Iterable[str]) -> Iterator[Problem]:
        wanted = {*names, *self.options.key, *(name for _, _, name in self.options.cursor_options if name)}
        hidden = [name for name, column in relation.columns.items() if name in wanted and not column.readable]
        if not hidden and not relation.closed_schema:
            return
        where = "source.table" if self.options.query is None else "source.query"
        role, failed = self._ask(where, "asking for the role", lambda session: session.read_role())
        yield from failed
        lacking, grants = [], []
        if relation.closed_schema:
            lacking.append(f"may not use schema {relation.closed_schema}")
            grants.append(f"GRANT USAGE ON SCHEMA {relation.closed_schema} TO {role}")
        if hidden:
            lacking.append(f"may not read column{'s' if len(hidden) > 1 else ''} {quote_names(hidden)} of {relation.name}")
            grants.append(f"GRANT SELECT ON {relation.name} TO {role}, or leave out what it may not read")
        yield Problem(where, f"role {role} {' and '.join(lacking)}", "; ".join(grants))

    def _find_case_problems(self, relation: Relation) -> Iterator[Problem]:
        names = list(relation.columns if self.options.include_columns is None else self.options.include_columns)
        for number, name in enumerate(names):
            alike = [other for other in names[:number] if other.casefold() == name.casefold() and other != name]
            if alike:
                what = f"{relation.name} has `{alike[0]}` too, and Spark does not distinguish upper and lower case"
                action = "Leave one out with `include_columns=`, or rename it with `query=`"
                yield Problem(f"source column `{name}`", what, action)

    def _find_cursor_problems(self, relation: Relation) -> Iterator[Problem]:
        mode = self.options.effective_mode.split("+")
        for part, option, name in self.options.cursor_options:
            if part not in mode or not name:
                continue
            column = relation.columns.get(name)
            where = f"source.{option}"
            if column is None:
                yield _make_missing_column_problem(where, relation, name)
                continue
            yield from _find_order_problems(where, relation, column)
            if column.nullable and self.options.validate_non_null and self.options.query is None:
                what = f"`{name}` takes NULL, and rows without a cursor are never read"
                yield Problem(where, what, "Make it NOT NULL, or accept that with `validate_non_null=False`")
            if part == "timestamp" and not column.clock:
                what = f"`{name}` is of type {column.type}; expected a timestamp or a date"
                yield Problem(where, what, "Name another column, or use `incrementing_column`")
            elif part == "incrementing" and column.literal:
                yield from self._find_incrementing_problems(where, relation, column)

    def _find_incrementing_problems(self, where: str, relation: Relation, column: SourceColumn) -> Iterator[Problem]:
        if not column.increases:
            what = f"`{column.name}` is of type {column.type}, whose values do not grow with every row"
            yield Problem(where, what, "Name a column that is filled from a sequence, or use another mode")
            return
        found, failed = self._ask(where, "reading its sequence", lambda open_: list(open_.find_cursor_problems(relation, column)))
        yield from found or failed

    def _find_writer_problems(self, relation: Relation) -> Iterator[Problem]:
        if not self.options_valid or not self.options.waits_for_writers:
            return
        where = "source.writers_timeout"
        hidden, failed = self._ask(where, "asking for writers", lambda session: session.find_hidden_writers(relation))
        yield from failed
        if hidden:
            yield Problem(where, f"{hidden}: {HIDDEN_WRITERS}", SHOW_WRITERS)

    def _find_pages_problems(self, relation: Relation) -> Iterator[Problem]:
        if self.options.split_by != "pages" or self.options.query is not None:
            return
        obstacle, failed = self._ask("source.split_by", "asking for pages", lambda open_: open_.find_pages_obstacle(relation))
        yield from failed
        if obstacle:
            yield Problem("source.split_by", f"it is `pages`, and {obstacle}", 'Read it with `split_by="key"`')

    def _find_key_problems(self, relation: Relation) -> Iterator[Problem]:
        for name in self.options.key:
            column = relation.columns.get(name)
            if column is None:
                yield _make_missing_column_problem("source.key", relation, name)
            else:
                yield from _find_order_problems("source.key", relation, column)
        if self.options.effective_mode != "bulk" or self.options.key or self.options.split_by == "pages":
            return
        if not relation.key:
            what = f"{relation.name} has no primary key, nor a unique index that takes no NULL, to cut it by"
            yield Problem("source.key", what, "Name columns to order its rows by with `key=`; they need not be unique")
        for name in relation.key:
            yield from _find_order_problems("source.key", relation, relation.columns[name])


def _find_order_problems(where: str, relation: Relation, column: SourceColumn) -> Iterator[Problem]:
    if not column.literal:
        action = "Name another column, or have the schema of its type in the `search_path` of the role"
        yield Problem(
            where,
            f"`{column.name}` is of type {column.type}, whose values are in no order",
            action if "." in column.type else "Name another column",
        )


def _make_missing_column_problem(where: str, relation: Relation, name: str) -> Problem:
    alike = [c for c in relation.columns if c.casefold() == name.casefold()]
    hint = f"only `{alike[0]}`: names are compared exactly" if alike else f"it has {quote_names(relation.columns) or 'none'}"
    return Problem(where, f"{relation.name} has no column `{name}`; {hint}", "Correct the name")


def list_unchecked_arguments(options: JdbcSourceOptions, cause: str) -> list[Problem]:
    """Return the arguments that cannot be compared with the database because of a problem of another one.

    :param cause: the argument that has the problem: the connection, the table or the query.
    """
    given = {
        "source.query" if options.query is not None else "source.table": options.query or options.table,
        "source.include_columns": options.include_columns,
        **{f"source.{option}": name for _, option, name in options.cursor_options},
        "source.key": options.key,
        "source.split_by": options.split_by == "pages",
    }
    return [Unchecked(where, cause) for where, value in given.items() if value and where != cause]
