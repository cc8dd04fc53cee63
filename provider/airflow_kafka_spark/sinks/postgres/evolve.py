"""Columns that the rows have and the table lacks: added with ``auto_evolve``, reported otherwise."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import Problem, SinkRejected
from airflow_kafka_spark.hooks.postgres import Name, quote, run
from airflow_kafka_spark.sinks.postgres import sql
from airflow_kafka_spark.sinks.postgres.catalog import Table, read_table
from airflow_kafka_spark.sinks.postgres.server import lock_key
from airflow_kafka_spark.sinks.postgres.types import StageColumn, created_type, misfit, stage_column

if TYPE_CHECKING:
    import psycopg

    from airflow_kafka_spark.sinks.base import Shape
    from airflow_kafka_spark.sinks.postgres.options import PostgresOptions

log = logging.getLogger(__name__)

SYSTEM = frozenset({"ctid", "xmin", "cmin", "xmax", "cmax", "tableoid"})
"""Names of columns that PostgreSQL reserves in every table."""


def wanted_columns(sink: PostgresOptions, columns: Sequence[StageColumn]) -> list[tuple[str, str]]:
    """Return names and types of the columns that a table needs: those of the rows, and those that the sink fills."""
    wanted = [(column.name, created_type(column)) for column in columns]
    given = {name for name, _ in wanted}
    if sink.offset_columns:
        wanted += [c for c in zip(sql.OFFSET_COLUMNS, sql.OFFSET_TYPES, strict=True) if c[0] not in given]
    if sink.window_column:
        wanted.append((sink.window_column, "text"))
    return wanted


def missing_columns(sink: PostgresOptions, columns: Sequence[StageColumn], table: Table) -> list[tuple[str, str]]:
    """Return names and types of the wanted columns that the table lacks."""
    return [column for column in wanted_columns(sink, columns) if column[0] not in table.columns]


def evolve(connection: psycopg.Connection, sink: PostgresOptions, name: Name, shape: Shape) -> None:
    """Add the missing columns, nullable, in one statement that commits by itself: all of them or none, and once, however many
    attempts do so at the same time. No column is ever dropped, renamed or given another type.
    """
    columns = [stage_column(f.name, f.type) for f in shape.schema]
    with connection.transaction():
        # The attempt that comes second finds the columns of the first. Their types are compared afterwards (refuse_misfits).
        run(connection, sql.lock(lock_key("evolve", str(name))))
        table = read_table(connection, name)
        added = missing_columns(sink, columns, table) if table is not None else []
        if added:
            run(connection, sql.add_columns(name, added, "IF NOT EXISTS"))
    if added:
        log.info("Added to %s: %s", name, ", ".join(f"{quote(column)} {kind}" for column, kind in added))


def refuse_misfits(table: Table, columns: Sequence[StageColumn], window: str) -> None:
    """Compare the rows with the table again: it may have been changed since ``validate``.

    :raises SinkRejected: a column is missing, or of a type that the rows do not fit into.
    """
    if lacking := [c.name for c in columns if c.name not in table.columns]:
        raise SinkRejected(str(table.name), window, f"it has no column {', '.join(f'`{m}`' for m in lacking)}")
    for column in columns:
        if reason := misfit(column, table.columns[column.name]):
            found = f"column `{column.name}` is {table.columns[column.name].type}, {reason}"
            raise SinkRejected(str(table.name), window, found)


# --- problems that are reported before anything runs
# ---------------------------------------------------------------------------------------------


def problems(sink: PostgresOptions, columns: Sequence[StageColumn], table: Table, role: str) -> Iterator[Problem]:
    """Yield a problem for each missing column without ``auto_evolve``, and with it for each that cannot be added."""
    absent = [column for column in columns if column.name not in table.columns]
    if not sink.auto_evolve:
        yield from (_refused(column, table) for column in absent)
        return
    for column in absent:
        yield from _cannot_be_added(column, sink, table)
    lacking = missing_columns(sink, columns, table)
    if lacking and not table.owned:
        named = ", ".join(f"`{name}`" for name, _ in lacking)
        what = f"role `{role}` does not own {table.name}, which lacks {named}; expected its owner, who alone may add columns"
        yield Problem("sink.auto_evolve", what, f"Have the owner run: {sql.add_columns(table.name, lacking)}")


def _refused(column: StageColumn, table: Table) -> Problem:
    kind = created_type(column)
    there = ", ".join(f"`{name}`" for name in table.columns) or "none"
    alike = _alike(column.name, table)
    what = f"{table.name} has no such column{alike}; found {there}; expected `{column.name}` {kind}"
    # A name that differs by case only is refused with the option, too.
    first = "Rename one of them" if alike else "Set `auto_evolve=True` on the sink"
    action = f"{first}, or run: {sql.add_columns(table.name, [(column.name, kind)])}"
    return Problem(f"sink.table column `{column.name}`", what, f"{action}; or leave it out of the schema")


def _cannot_be_added(column: StageColumn, sink: PostgresOptions, table: Table) -> Iterator[Problem]:
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
    """Return the problem of a column that has another type. The sink never changes a type."""
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
