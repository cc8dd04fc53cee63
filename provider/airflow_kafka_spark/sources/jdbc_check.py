"""Everything that would keep windows of a table or query from being frozen and read, found before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from airflow_kafka_spark.errors import ConnectionInvalid, KafkaSparkError, Problem
from airflow_kafka_spark.hooks.postgres import parse_name
from airflow_kafka_spark.sources.jdbc_connection import read_database
from airflow_kafka_spark.sources.jdbc_database import Column, Database, Missing, Relation, Session

if TYPE_CHECKING:
    from airflow_kafka_spark.sources.jdbc_settings import JdbcSettings

MODES = ("bulk", "incrementing", "timestamp", "timestamp+incrementing")


def problems(source: JdbcSettings) -> list[Problem]:
    """See :meth:`JdbcSource.validate`."""
    found = [problem for check in (_relation_options, _mode_options, _list_options, _number_options) for problem in check(source)]
    try:
        database = read_database(source.conn_id)
    except ConnectionInvalid as error:
        return [*found, Problem("source.conn_id", error.found, error.action)]
    except ImportError as error:
        package = error.name or str(error)
        what = f"the package `{package}` is not installed"
        return [*found, Problem("source", what, f"Install it with `pip install '{database_extra(package)}'`")]
    found += database.problems()
    found += _Look(source, database, options_hold=not found).problems()
    # A column may be in the way both as one to read and as one to cut by.
    return list(dict.fromkeys(found))


def database_extra(package: str) -> str:
    """What to install for a driver."""
    extra = "mysql" if "mysql" in package else "postgres"
    return f"airflow-provider-kafka-spark[{extra}]"


# --- what can be said without the server ----------------------------------------------------------------------------------


def _relation_options(source: JdbcSettings) -> Iterator[Problem]:
    if (source.table is None) == (source.query is None):
        given = "both are given" if source.table is not None else "neither is given"
        yield Problem("source", f"{given}; expected either `table` or `query`", "Name a table, or write a query")
    elif source.query is not None and not source.query.strip().rstrip(";"):
        yield Problem("source.query", "it is empty; expected a SELECT")
    elif source.table is not None:
        try:
            parse_name(source.table)
        except ValueError as error:
            yield Problem("source.table", str(error), 'Write `table`, `schema.table` or `"My schema"."my.table"`')


def _mode_options(source: JdbcSettings) -> Iterator[Problem]:
    mode = source.effective_mode
    if mode not in MODES:
        yield Problem("source.mode", f"it is {mode!r}; expected one of {', '.join(MODES)}")
        return
    if source.cursor and source.incrementing_column and source.cursor != source.incrementing_column:
        what = f"it is `{source.cursor}`, and `incrementing_column` is `{source.incrementing_column}`; both are the same option"
        yield Problem("source.cursor", what, "Leave one of them out")
    for part, option, value in _cursors(source):
        if part in mode.split("+") and not value:
            yield Problem(f"source.{option}", f'it is empty; `mode="{mode}"` needs it')
        if part not in mode.split("+") and value:
            yield Problem(f"source.{option}", f'it is `{value}`, which means nothing with `mode="{mode}"`', "Leave it out")
    if source.timestamp_column and source.timestamp_column == source.incrementing:
        what = f"`{source.timestamp_column}` is the incrementing column too"
        yield Problem("source.timestamp_column", what, "Name another column, or leave one of them out")
    if source.key and "incrementing" in mode:
        yield Problem("source.key", f'rows are cut by the cursor with `mode="{mode}"`', "Leave it out")
    if source.delay and "timestamp" not in mode:
        yield Problem("source.delay", f'it means nothing with `mode="{mode}"`; expected a timestamp to wait for', "Leave it out")


def _cursors(source: JdbcSettings) -> Iterator[tuple[str, str, str | None]]:
    """Part of the mode, option, and the column it names."""
    yield "timestamp", "timestamp_column", source.timestamp_column
    yield "incrementing", "incrementing_column" if source.incrementing_column else "cursor", source.incrementing


def _list_options(source: JdbcSettings) -> Iterator[Problem]:
    for option, names in (("key", source.key), ("include_columns", source.include_columns or ())):
        twice = sorted({str(name) for name in names if list(names).count(name) > 1})
        if twice:
            yield Problem(f"source.{option}", f"it names {_names(twice)} twice")
    if source.include_columns is not None and not source.include_columns:
        yield Problem("source.include_columns", "it is empty; expected columns, or None for all")
    try:
        ZoneInfo(source.db_timezone)
    except (ValueError, OSError, KeyError, TypeError):
        yield Problem("source.db_timezone", f"{source.db_timezone!r} is not a time zone; expected one as `Europe/Berlin`")


def _number_options(source: JdbcSettings) -> Iterator[Problem]:
    counts = {"split_records": source.split_records, "max_records": source.max_records, "fetchsize": source.fetchsize}
    for option, value in counts.items():
        if value is None and option == "max_records":
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Problem(f"source.{option}", f"it is {value!r}; expected a whole number of at least 1")
    for option, seconds in (("delay", source.delay), ("writers_timeout", source.writers_timeout)):
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool) or not 0 <= seconds < 1e9:
            yield Problem(f"source.{option}", f"it is {seconds!r}; expected seconds, at least 0")


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


# --- what only the server can say ------------------------------------------------------------------------------------------


@dataclass
class _Look:
    """One look at the server."""

    source: JdbcSettings
    database: Database
    options_hold: bool

    def problems(self) -> list[Problem]:
        found, failed = self._ask("source.conn_id", "connecting", lambda session: list(session.place_problems()))
        if failed or found:
            return [*failed, *(found or [])]
        where = "source.query" if self.source.query is not None else "source.table"
        if list(_relation_options(self.source)):
            return []
        relation, failed = self._ask(where, "looking for the table", lambda session: session.relation(self.source))
        if relation is None:
            return failed
        if isinstance(relation, Missing):
            return [Problem(where, f"there is no table {relation.name}{relation.hint}", "Create it, or correct its name")]
        found = [*self._column_problems(relation), *self._case_problems(relation), *self._cursor_problems(relation)]
        found += self._key_problems(relation)
        if not found and self.options_hold:
            _, found = self._ask(where, "trying to read it", lambda session: self._try(session, relation))
        return found

    def _ask(self, where: str, doing: str, question: Callable[[Session], Any]) -> tuple[Any, list[Problem]]:
        """The answer; None and a problem when the server gave none."""
        try:
            with self.database.session(doing) as session:
                return question(session), []
        except KafkaSparkError as error:
            return None, [Problem(where, error.found, getattr(error, "action", "") if where != "source.conn_id" else _SEE)]

    def _try(self, session: Session, relation: Relation) -> list[Problem]:
        from airflow_kafka_spark.sources.jdbc_read import statement
        from airflow_kafka_spark.sources.jdbc_window import cut_columns, selected

        order = cut_columns(self.source, relation)
        session.rows(f"SELECT * FROM {statement(session, relation, selected(self.source, relation), order)} LIMIT 0")
        return []

    # --- columns ---

    def _column_problems(self, relation: Relation) -> Iterator[Problem]:
        names = relation.columns if self.source.include_columns is None else self.source.include_columns
        if not relation.columns:
            yield Problem("source", f"{relation.name} has no columns")
        for name in names:
            column = relation.columns.get(name)
            if column is None:
                yield _missing("source.include_columns", relation, name)
            elif not column.readable:
                yield _unreadable(relation, column)
            elif column.problem:
                action = "Leave it out with `include_columns=`, or cast it with `query=`"
                yield Problem(f"source column `{name}`", f"{column.problem} ({column.type})", action)

    def _case_problems(self, relation: Relation) -> Iterator[Problem]:
        names = list(relation.columns if self.source.include_columns is None else self.source.include_columns)
        for number, name in enumerate(names):
            alike = [other for other in names[:number] if other.casefold() == name.casefold() and other != name]
            if alike:
                what = f"{relation.name} has `{alike[0]}` too, and Spark does not tell upper from lower case"
                action = "Leave one out with `include_columns=`, or rename it with `query=`"
                yield Problem(f"source column `{name}`", what, action)

    def _cursor_problems(self, relation: Relation) -> Iterator[Problem]:
        mode = self.source.effective_mode.split("+")
        for part, option, name in _cursors(self.source):
            if part not in mode or not name:
                continue
            column = relation.columns.get(name)
            where = f"source.{option}"
            if column is None:
                yield _missing(where, relation, name)
                continue
            yield from self._order_problems(where, relation, column)
            if column.nullable and self.source.validate_non_null and self.source.query is None:
                what = f"`{name}` takes NULL, and rows without a cursor are never read"
                yield Problem(where, what, "Make it NOT NULL, or accept that with `validate_non_null=False`")
            if part == "timestamp" and not column.clock:
                what = f"`{name}` is of type {column.type}; expected a timestamp or a date"
                yield Problem(where, what, "Name another column, or use `incrementing_column`")
            elif part == "incrementing" and column.literal:
                yield from self._incrementing_problems(where, relation, column)

    def _incrementing_problems(self, where: str, relation: Relation, column: Column) -> Iterator[Problem]:
        if not column.increases:
            what = f"`{column.name}` is of type {column.type}, whose values do not grow with every row"
            yield Problem(where, what, "Name a column that is filled from a sequence, or use another mode")
            return
        found, failed = self._ask(where, "looking at its sequence", lambda open_: list(open_.cursor_problems(relation, column)))
        yield from found or failed

    def _order_problems(self, where: str, relation: Relation, column: Column) -> Iterator[Problem]:
        if not column.readable:
            yield _unreadable(relation, column)
        if not column.literal:
            yield Problem(where, f"`{column.name}` is of type {column.type}, whose values are in no order", "Name another column")

    def _key_problems(self, relation: Relation) -> Iterator[Problem]:
        mode = self.source.effective_mode
        for name in self.source.key:
            column = relation.columns.get(name)
            if column is None:
                yield _missing("source.key", relation, name)
            else:
                yield from self._order_problems("source.key", relation, column)
        if mode != "bulk" or self.source.key:
            return
        if not relation.key:
            what = f"{relation.name} has no primary key, nor a unique index that takes no NULL, to cut it by"
            yield Problem("source.key", what, "Name columns to order its rows by with `key=`; they need not be unique")
        for name in relation.key:
            yield from self._order_problems("source.key", relation, relation.columns[name])


_SEE = "Correct the connection, or see to the server"


def _missing(where: str, relation: Relation, name: str) -> Problem:
    alike = [c for c in relation.columns if c.casefold() == name.casefold()]
    hint = f"only `{alike[0]}`: names are compared exactly" if alike else f"it has {_names(relation.columns)}"
    return Problem(where, f"{relation.name} has no column `{name}`; {hint}", "Correct the name")


def _unreadable(relation: Relation, column: Column) -> Problem:
    what = f"the connection's role may not read it in {relation.name}"
    return Problem(f"source column `{column.name}`", what, f"GRANT SELECT ON {relation.name} TO ...")
