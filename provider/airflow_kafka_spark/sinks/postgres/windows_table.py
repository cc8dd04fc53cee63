"""The sink's own record of windows: a table beside the target with one row per window, written in the window's transaction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.hooks.postgres import Name, literal, rows, run
from airflow_kafka_spark.sinks.postgres import sql
from airflow_kafka_spark.windows.codec import ranges_from_json, ranges_to_json
from airflow_kafka_spark.windows.continuity import refuse_gap, refuse_other
from airflow_kafka_spark.windows.model import Applied, Window

if TYPE_CHECKING:
    import psycopg


def exists(connection: psycopg.Connection, table: Name) -> bool:
    """Return True if there is such a table."""
    return rows(connection, f"SELECT to_regclass({literal(str(table))}) IS NOT NULL")[0][0]


def last_recorded(connection: psycopg.Connection, windows: Name, pipeline: str, *, but: int | None = None) -> Applied | None:
    """Return the pipeline's window with the highest number, other than ``but``."""
    return _recorded(pipeline, rows(connection, sql.select_last_window(windows, pipeline, but=but)))


def recorded(connection: psycopg.Connection, windows: Name, window: Window) -> Applied | None:
    """Return the row of this window, or None. A replay that is not applied yet has none.

    :raises ForeignOffsets: a window of this number is there, of another cluster or of another topic of the same name.
    :raises WindowConflict: a window of this number is there, but of other offsets.
    """
    found = _recorded(window.pipeline, rows(connection, sql.select_window(windows, window.pipeline, window.number)))
    if found is None:
        return None
    refuse_other(found, window, str(windows))
    return found if found.replay >= window.replay else None


def claim(connection: psycopg.Connection, windows: Name, window: Window, target: str) -> bool | None:
    """Insert the window's row, or for a replay update the row of the run before. Only one transaction can.

    :return: True for a new row, False for an updated one, None if another attempt has applied the window.
    """
    facts: dict[str, Any] = {
        "pipeline": window.pipeline,
        "number": window.number,
        "ranges": ranges_to_json(window.ranges),
        "run": window.run,
        "cluster_id": window.cluster_id,
        "topic_ids": dict(window.topic_ids),
        "replay": window.replay,
    }
    found = rows(connection, sql.claim_window(windows, facts, target))
    return bool(found[0][0]) if found else None


def refuse_conflict(connection: psycopg.Connection, windows: Name, window: Window) -> None:
    """Check that the window follows the sink's last window of the pipeline. A replay need not.

    :raises WindowConflict: it does not.
    :raises ForeignOffsets: the sink's last window is of another cluster.
    """
    last = last_recorded(connection, windows, window.pipeline, but=window.number)
    if last is not None and not window.replay:
        refuse_gap(last, window, str(windows))


def count_written_before(connection: psycopg.Connection, windows: Name, window: Window) -> int:
    """Return how many rows the window wrote when it was applied before."""
    found = rows(connection, sql.select_window(windows, window.pipeline, window.number))
    return int(found[0][2]) if found else 0


def complete_window(
    connection: psycopg.Connection, windows: Name, window: Window, written: int, deleted: int, keep: int
) -> Applied:
    """Set the counts of the row in the transaction that claimed it, and remove old rows.

    The newest rows stay, and they are all that is needed: an open window follows the newest one, and a late attempt or task is
    refused because of a newer row as it would be because of its own.
    """
    run(connection, sql.delete_old_windows(windows, window.pipeline, window.number, keep))
    run(connection, sql.count_window(windows, window.pipeline, window.number, written, deleted))
    return Applied.of(window, written, deleted)


def _recorded(pipeline: str, found: list[tuple]) -> Applied | None:
    if not found:
        return None
    number, ranges, written, deleted, topic_ids, replay, cluster_id = found[0]
    # A table that the sink did not create may hold nulls.
    ids = (cluster_id or "", topic_ids or {})
    return Applied(pipeline, number, ranges_from_json(ranges), written, deleted, replay or 0, *ids)
