"""Columns that the rows have and the table has not: added on request (``auto_evolve``), named otherwise."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem, SinkRejected
from airflow_kafka_spark.hooks.postgres import Name, quote, run
from airflow_kafka_spark.sinks import postgres_sql as sql
from airflow_kafka_spark.sinks.postgres_catalog import Table, read_table
from airflow_kafka_spark.sinks.postgres_connection import lock_key
from airflow_kafka_spark.sinks.postgres_types import StageColumn, created_type, misfit, stage_column

if TYPE_CHECKING:
    import psycopg

    from airflow_kafka_spark.sinks.base import Shape
    from airflow_kafka_spark.sinks.postgres_settings import PostgresSettings

log = logging.getLogger(__name__)

SYSTEM = frozenset({"ctid", "xmin", "cmin", "xmax", "cmax", "tableoid"})
"""Columns that PostgreSQL has in every table."""


def missing(sink: PostgresSettings, columns: Sequence[StageColumn], table: Table) -> list[tuple[str, str]]:
    """Names and types of what the table lacks: columns of the rows, and those that the sink fills."""
    wanted = [(column.name, created_type(column)) for column in columns]
    given = {name for name, _ in wanted}
    if sink.offset_columns:
        wanted += [c for c in zip(sql.OFFSET_COLUMNS, sql.OFFSET_TYPES, strict=True) if c[0] not in given]
    if sink.window_column:
        wanted.append((sink.window_column, "text"))
    return [column for column in wanted if column[0] not in table.columns]


def evolve(connection: psycopg.Connection, sink: PostgresSettings, name: Name, shape: Shape) -> None:
    """Add what is missing, nullable, in one statement that commits by itself: all of it or nothing, and once, however many
    attempts want it at the same time. Nothing is ever dropped, renamed or given another type.
    """
    columns = [stage_column(f.name, f.type) for f in shape.schema]
    with connection.transaction():
        # Who comes second finds the first one's columns; their types are compared when the window is planned into the table.
        run(connection, sql.lock(lock_key("evolve", str(name))))
        table = read_table(connection, name)
        added = missing(sink, columns, table) if table is not None else []
        if added:
            run(connection, sql.add_columns(name, added, "IF NOT EXISTS"))
    if added:
        log.info("Added to %s: %s", name, ", ".join(f"{quote(column)} {kind}" for column, kind in added))


def refuse_misfits(table: Table, columns: Sequence[StageColumn], window: str) -> None:
    """Once more, behind ``validate``: somebody else may have added a column, or changed one, since.

    :raises SinkRejected: a column is missing, or of a type that the rows do not fit into.
    """
    if lacking := [c.name for c in columns if c.name not in table.columns]:
        raise SinkRejected(str(table.name), window, f"it has no column {', '.join(f'`{m}`' for m in lacking)}")
    for column in columns:
        if reason := misfit(column, table.columns[column.name]):
            found = f"column `{column.name}` is {table.columns[column.name].type}, {reason}"
            raise SinkRejected(str(table.name), window, found)


# --- what is told beforehand ---------------------------------------------------------------------------------------------


def problems(sink: PostgresSettings, columns: Sequence[StageColumn], table: Table, role: str) -> Iterator[Problem]:
    """What keeps the missing columns from being there when rows come: each of them without ``auto_evolve``, and with it
    those that cannot be added."""
    absent = [column for column in columns if column.name not in table.columns]
    if not sink.auto_evolve:
        yield from (_refused(column, table) for column in absent)
        return
    for column in absent:
        yield from _cannot_be_added(column, sink, table)
    lacking = missing(sink, columns, table)
    if lacking and not table.owned:
        named = ", ".join(f"`{name}`" for name, _ in lacking)
        what = f"role `{role}` does not own {table.name}, which lacks {named}; expected its owner, who alone may add columns"
        yield Problem("sink.auto_evolve", what, f"Have the owner run: {sql.add_columns(table.name, lacking)}")


def _refused(column: StageColumn, table: Table) -> Problem:
    kind = created_type(column)
    there = ", ".join(f"`{name}`" for name in table.columns) or "none"
    alike = _alike(column.name, table)
    what = f"{table.name} has no such column{alike}; found {there}; expected `{column.name}` {kind}"
    # With the option it would be refused, too.
    first = "Rename one of them" if alike else "Set `auto_evolve=True` on the sink"
    action = f"{first}, or run: {sql.add_columns(table.name, [(column.name, kind)])}"
    return Problem(f"sink.table column `{column.name}`", what, f"{action}; or leave it out of the schema")


def _cannot_be_added(column: StageColumn, sink: PostgresSettings, table: Table) -> Iterator[Problem]:
    where = f"sink.table column `{column.name}`"
    if column.name in SYSTEM:
        yield Problem(where, "PostgreSQL has a column of that name in every table", "Give it another name")
    if column.holds == "nothing":
        yield Problem(where, "nothing is known of its type (Arrow's null), so it cannot be added", "Give it a type in the schema")
    if alike := _alike(column.name, table):
        what = f"{table.name} has no such column{alike}; a second one beside it is not added by itself"
        yield Problem(where, what, f"Rename one of them, or run: {sql.add_columns(table.name, [_of(column)])}")
    if column.name in sink.key:
        what = f"it is part of the key, and {table.name} does not have it; expected a column with a unique index"
        yield Problem(where, what, "Add it and the index by hand: the rows that are there need a value in it")


def changed_type(column: StageColumn, table: Table, reason: str) -> Problem:
    """A column whose type is another one: never changed by itself."""
    kind, name = created_type(column), quote(column.name)
    using = f"to_jsonb({name})" if column.holds == "json" else f"{name}::{kind}"
    action = f"Correct the schema, or run: ALTER TABLE {table.name} ALTER COLUMN {name} TYPE {kind} USING {using}"
    what = f"{table.name} has {table.columns[column.name].type}, {reason}"
    return Problem(f"sink.table column `{column.name}`", what, action)


def _of(column: StageColumn) -> tuple[str, str]:
    return column.name, created_type(column)


def _alike(name: str, table: Table) -> str:
    alike = [c for c in table.columns if c.casefold() == name.casefold()]
    return f", only `{alike[0]}`: names are compared exactly" if alike else ""
