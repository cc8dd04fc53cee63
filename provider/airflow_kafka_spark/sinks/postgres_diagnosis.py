"""Which column a value did not fit into, where PostgreSQL does not say."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.hooks.postgres import quote, rows, run
from airflow_kafka_spark.sinks import postgres_sql as sql

if TYPE_CHECKING:
    import psycopg

    from airflow_kafka_spark.sinks.postgres_attempt import Attempt

log = logging.getLogger(__name__)

_SECONDS = 30
_PROBE = "airflow_probe"


def culprit(attempt: Attempt, error: psycopg.Error) -> str | None:
    """Try the staged rows column by column, into a temporary table with the target's types, until one fails as the window did.

    :return: the column's name; None when it cannot be found, or the error names it itself.
    """
    if (error.sqlstate or "")[:2] not in ("22", "23", "42") or error.diag.column_name:
        return None
    try:
        with (
            attempt.server.session("looking for the column at fault in", str(attempt.window)) as connection,
            connection.transaction(force_rollback=True),
        ):
            run(connection, f"SET LOCAL statement_timeout = '{_SECONDS}s'")
            return _search(connection, attempt, error.sqlstate)
    except KafkaSparkError as failure:
        log.debug("The column at fault was not found: %s", failure)
        return None


def _search(connection: psycopg.Connection, attempt: Attempt, state: str | None) -> str | None:
    import psycopg

    registered = rows(connection, sql.registered(attempt.registry))
    stages = [attempt.stage(split, stage) for split, stage, _, _ in registered if stage]
    names = ", ".join(quote(c.name) for c in attempt.merge.columns)
    run(connection, f"CREATE TEMP TABLE {quote(_PROBE)} ON COMMIT DROP AS SELECT {names} FROM {attempt.target} WITH NO DATA")
    for column in attempt.merge.columns:
        for stage in stages:
            try:
                with connection.transaction():
                    into = f"INSERT INTO {quote(_PROBE)} ({quote(column.name)})"
                    run(connection, f"{into} SELECT {column.value} FROM {stage.table} AS s")
                    raise psycopg.Rollback
            except psycopg.Error as error:
                if error.sqlstate == state:
                    return column.name
                raise
    return None
