"""Prepare an attempt at a window on the driver, and keep the sink's own record of windows.

An attempt ends earlier attempts, removes the tables that they have left, and looks up the target. The record is a table beside
the target with one row per window, written in the window's transaction.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from airflow_kafka_spark.errors import SinkRejected, WindowConflict
from airflow_kafka_spark.hooks.databases import APPLICATION, Name, fetch_rows, parse_name, quote_literal, resolve_table, run
from airflow_kafka_spark.sinks.base import ABANDONED_DAYS
from airflow_kafka_spark.sinks.postgres import sql
from airflow_kafka_spark.sinks.postgres.columns import (
    StageColumn,
    add_missing_columns,
    can_copy_directly,
    list_wanted_columns,
    make_stage_column,
    merge_column,
    refuse_misfits,
)
from airflow_kafka_spark.sinks.postgres.server import SinkServer, Table, make_lock_key, make_pipeline_key, read_table
from airflow_kafka_spark.sinks.postgres.sql import Merge, StagedSplit
from airflow_kafka_spark.windows.codec import ranges_from_json, ranges_to_json
from airflow_kafka_spark.windows.continuity import refuse_gap, refuse_other
from airflow_kafka_spark.windows.model import ELSEWHERE, Applied, Split, TopicPartition, Window

if TYPE_CHECKING:
    import psycopg

    from airflow_kafka_spark.sinks.base import Shape
    from airflow_kafka_spark.sinks.postgres.options import PostgresSinkOptions
    from airflow_kafka_spark.sinks.postgres.tasks.write import LoadSettings


def has_table(connection: psycopg.Connection, table: Name) -> bool:
    """Return True if there is such a table."""
    return fetch_rows(connection, f"SELECT to_regclass({quote_literal(str(table))}) IS NOT NULL")[0][0]


def find_last_record(
    connection: psycopg.Connection, windows: Name, pipeline: str, *, but: int | None = None, target: Name | None = None
) -> Applied | None:
    """Return the pipeline's window with the highest number, other than ``but``.

    :param target: the table that it is looked for; its ``elsewhere`` then names the table that has its rows, if that is another
        one. Tables of one schema have one record of windows.
    """
    return _parse_recorded(pipeline, fetch_rows(connection, sql.select_last_window(windows, pipeline, but=but, target=target)))


def find_last_records_of(
    connection: psycopg.Connection, windows: Name, target: Name, topics: Iterable[str]
) -> dict[str, Applied]:
    """Return the window of each of some topics that any pipeline has written last into a target."""
    found = fetch_rows(connection, sql.select_last_windows_of(windows, target, topics))
    return {topic: applied for topic, pipeline, *row in found if (applied := _parse_recorded(pipeline, [tuple(row)]))}


def find_record(connection: psycopg.Connection, windows: Name, window: Window) -> Applied | None:
    """Return the row of this window, or None. A replay that is not applied yet has none.

    :raises ForeignOffsets: a window of this number is there, of another cluster or of another topic of the same name.
    :raises WindowConflict: a window of this number is there, but of other offsets.
    """
    found = _parse_recorded(window.pipeline, fetch_rows(connection, sql.select_window(windows, window.pipeline, window.number)))
    if found is None:
        return None
    refuse_other(found, window, str(windows))
    return found if found.replay >= window.replay else None


def find_elsewhere(connection: psycopg.Connection, windows: Name, window: Window, target: Name) -> str:
    """Return the table that has the rows of a recorded window, if it is not the target; else an empty text. Tables
    of one schema have one record of windows."""
    found = fetch_rows(connection, sql.select_window_elsewhere(windows, window.pipeline, window.number, target))
    return found[0][0] if found else ""


def claim_window(connection: psycopg.Connection, windows: Name, window: Window, target: str) -> bool | None:
    """Insert the window's row, or for a replay update the row of the previous run. Only one transaction can do so.

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
    found = fetch_rows(connection, sql.claim_window(windows, facts, target))
    return bool(found[0][0]) if found else None


def refuse_conflict(connection: psycopg.Connection, windows: Name, window: Window) -> None:
    """Check that the window follows the sink's last window of the pipeline. A replay need not.

    :raises WindowConflict: it does not follow that window, or the record of that window is gone.
    :raises ForeignOffsets: the sink's last window is of another cluster.
    """
    refuse_gap(find_last_record(connection, windows, window.pipeline, but=window.number), window, str(windows))


def count_written_before(connection: psycopg.Connection, windows: Name, window: Window) -> int:
    """Return the number of rows that the window has written when it was applied before."""
    found = fetch_rows(connection, sql.select_window(windows, window.pipeline, window.number))
    return int(found[0][2]) if found else 0


def complete_window(
    connection: psycopg.Connection, windows: Name, window: Window, written: int, deleted: int, keep: int
) -> Applied:
    """Set the counts of the row in the transaction that claimed it, and remove old rows.

    Only the newest rows are needed: an open window follows the newest one, and a late attempt or task is refused because of any
    newer row.
    """
    run(connection, sql.delete_old_windows(windows, window.pipeline, window.number, keep))
    run(connection, sql.count_window(windows, window.pipeline, window.number, written, deleted))
    return Applied.of(window, written, deleted)


def _parse_recorded(pipeline: str, found: list[tuple]) -> Applied | None:
    if not found:
        return None
    number, ranges, written, deleted, topic_ids, replay, cluster_id, *elsewhere = found[0]
    # A table that the sink did not create may hold nulls.
    ids = (cluster_id or "", topic_ids or {})
    return Applied(pipeline, number, ranges_from_json(ranges), written, deleted, replay or 0, *ids, *elsewhere)


log = logging.getLogger(__name__)

OFFSET, TOMBSTONE = "__airflow_offset", "__airflow_tombstone"
KEEP_SPLITS = "Set `split_records`, and other options that decide the size of splits, back until this window is complete"
STAGES = "airflow_stage_"
"""The beginning of the names of all stages."""
_POLL = 0.02
_DROPPED_AT_ONCE = 50

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class WindowAttempt:
    """One attempt at a window: its tables, and the statements that move rows into the target.

    :param server: the server, with the password.
    :param target: the table.
    :param windows: the sink's record of windows.
    :param markers: the table of splits that are committed one by one.
    :param stage_schema: the schema of the stages.
    :param key: identifies the pipeline in names of tables and sessions.
    :param token: identifies this attempt.
    :param columns: the columns of the rows.
    :param merge: the statements that move rows into the target.
    :param direct: True if COPY may write into the target itself.
    :param tolerates: True if rows that the target refuses are left out and reported.
    :param keep_windows: number of rows of the pipeline that the sink's record keeps.
    """

    server: SinkServer
    window: Window
    splits: tuple[Split, ...]
    target: Name
    windows: Name
    markers: Name
    stage_schema: str
    key: str
    token: str
    columns: tuple[StageColumn, ...]
    merge: Merge
    direct: bool
    tolerates: bool = False
    keep_windows: int = 1000

    @property
    def application_name(self) -> str:
        return make_application_name(self.key)

    @property
    def prefix(self) -> str:
        """The beginning of the names of this attempt's tables, which have at most 63 bytes in all."""
        return f"{make_stage_prefix(self.key)}{self.window.number:x}_{self.token}"

    @property
    def registry(self) -> Name:
        """The attempt's list of stages."""
        return Name(self.stage_schema, f"{self.prefix}_r")

    @property
    def owner(self) -> int:
        """The token as a number, for the owner's row of the splits table."""
        return int(self.token, 16)

    @property
    def lock(self) -> int:
        """The advisory lock that is held while a window of this pipeline is applied."""
        return make_lock_key("window", str(self.windows), self.window.pipeline)

    def add_offset_column(self) -> WindowAttempt:
        """Return this attempt with stages that have a column of offsets, for splits that were deferred and are now staged."""
        return replace(self, merge=replace(self.merge, offset=OFFSET))

    def load(self) -> LoadSettings:
        """Return the part of the attempt that tasks need."""
        from airflow_kafka_spark.sinks.postgres.tasks.write import LoadSettings

        return LoadSettings(
            server=self.server,
            application_name=self.application_name,
            pipeline=self.window.pipeline,
            number=self.window.number,
            window=str(self.window),
            target=str(self.target),
            columns=self.columns,
            key=self.merge.key,
            offset=self.merge.offset,
            tombstone=self.merge.tombstone,
        )

    def find_stage(self, split: int, table: str) -> StagedSplit:
        """Return a registered stage, with the position of its partition among the window's partitions."""
        place = self._places[split]
        return StagedSplit(str(Name(self.stage_schema, table)), place.topic, place.partition, self._numbers[place])

    @cached_property
    def _places(self) -> dict[int, TopicPartition]:
        """Return the partition of each split."""
        return {split.index: split.range.topic_partition for split in self.splits}

    @cached_property
    def _numbers(self) -> dict[TopicPartition, int]:
        """Return the position of each partition among the window's partitions."""
        return {place: number for number, place in enumerate(sorted(set(self._places.values())))}


def make_application_name(key: str) -> str:
    return f"{APPLICATION} {key}"


def make_stage_prefix(key: str) -> str:
    return f"{STAGES}{key}_"


def prepare_attempt(sink: PostgresSinkOptions, window: Window, splits: Sequence[Split], shape: Shape) -> WindowAttempt:
    """End earlier attempts, remove their tables, create the tables that are missing, and look up the target.

    :raises WindowConflict: the window cannot follow the sink's last one.
    :raises SinkRejected: the target does not take these rows.
    :raises SinkUnavailable: the server cannot be reached, or an earlier attempt cannot be ended.
    """
    server = sink.find_server()
    with server.open_session("beginning window", str(window)) as connection:
        schema, table = parse_name(sink.table)
        name = resolve_table(connection, schema, table)
        windows, markers = Name(name.schema, sink.windows_table), Name(name.schema, sink.splits_table)
        key = make_pipeline_key(windows, window.pipeline)
        stage_schema = sink.stage_schema or name.schema
        earlier = _EarlierSessions(connection, key, server.lock_timeout)
        _clear(earlier, stage_schema)
        clear_abandoned(connection, stage_schema)
        _create_missing(connection, sink, name, windows, markers, shape)
        if sink.auto_evolve:
            # Before anything is staged, and never undone: if this attempt is killed, the next one finds the columns.
            add_missing_columns(connection, sink, name, shape)
        if window.after == ELSEWHERE:
            # It is moved again, because the rows of the earlier target stay there.
            run(connection, sql.delete_window_elsewhere(windows, window.pipeline, window.number, name))
        token = uuid4().hex[:8]
        if find_record(connection, windows, window) is None:
            refuse_conflict(connection, windows, window)
            # Take over before comparing, so that no task of an earlier attempt can add a marker afterwards.
            owner = int(token, 16) if sink.atomic == "split" else None
            _take_over(earlier, markers, window.pipeline, owner)
            has_markers = has_table(connection, markers)
            if window.after == ELSEWHERE and has_markers:
                run(connection, sql.delete_splits_elsewhere(markers, window.pipeline, window.number, name))
            if not window.replay:
                _refuse_open_markers(connection, windows, markers, window, splits)
                _compare_markers(connection, sink, markers, window, splits, tolerates=shape.tolerates)
            if sink.atomic == "split":
                run(connection, sql.name_target(markers, window.pipeline, window.number, name))
            elif has_markers:
                run(connection, sql.unname_target(markers, window.pipeline, window.number))
        target = read_table(connection, name)
        if target is None:
            raise SinkRejected(str(name), str(window), "there is no such table", "Create it, or set `auto_create=True`")
        columns, merge, direct = _plan_merge(sink, target, shape, window)
        merge = replace(merge, merges=bool(merge.key) and _can_merge(connection, target))
        attempt = WindowAttempt(
            server, window, tuple(splits), name, windows, markers, stage_schema, key, token, columns, merge, direct,
            tolerates=shape.tolerates, keep_windows=sink.keep_windows,
        )  # fmt: skip
        if sink.atomic == "window":
            create_stage_registry(connection, attempt.registry)
        return attempt


# --- earlier attempts ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _EarlierSessions:
    """The sessions of earlier attempts of a pipeline, which may hold locks that a new attempt needs.

    :param connection: the session of the new attempt.
    :param key: the pipeline's key, which is part of the names of sessions.
    :param patience: seconds for which the new attempt waits for a lock.
    """

    connection: psycopg.Connection
    key: str
    patience: float

    def end(self, deadline: float) -> None:
        """End these sessions. Return when none is left, or at the deadline."""
        from psycopg import errors

        asked: set[int] = set()
        not_ours: set[int] = set()
        query = sql.select_sessions(make_application_name(self.key))
        while others := {pid for (pid,) in fetch_rows(self.connection, query)} - not_ours:
            for pid in others - asked:
                asked.add(pid)
                try:
                    run(self.connection, sql.terminate(pid))
                except errors.InsufficientPrivilege:
                    # A session of another role. If it holds a lock that is needed here, the lock timeout reports it.
                    not_ours.add(pid)
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL)

    def run_with_short_locks(self, deadline: float, step: Callable[[], _Result]) -> _Result:
        """Run a step in a transaction of its own. While another session holds a lock that it needs, end the sessions of earlier
        attempts and run it again.

        :raises psycopg.errors.LockNotAvailable: the lock is still held after the deadline.
        """
        from psycopg import errors

        while True:
            try:
                with self.connection.transaction():
                    # A short timeout: a session of an earlier attempt may have begun since, and holds its locks until it is
                    # ended.
                    run(self.connection, sql.set_lock_timeout(min(self.patience, 1.0)))
                    return step()
            except errors.LockNotAvailable:
                if time.monotonic() > deadline:
                    raise
                self.end(deadline)


def _clear(earlier: _EarlierSessions, schema: str) -> None:
    """End the sessions of earlier attempts in any state, and drop their tables.

    A paused attempt that wakes up finds its session closed; a task of it that opens a new one finds its registry gone.
    """

    def drop_some() -> bool:
        found = fetch_rows(earlier.connection, sql.select_tables_like(schema, make_stage_prefix(earlier.key)))
        left = [Name(schema, row[0]) for row in found]
        if left:
            run(earlier.connection, sql.drop_tables(left[:_DROPPED_AT_ONCE]))
        return len(left) > _DROPPED_AT_ONCE

    deadline = time.monotonic() + earlier.patience
    earlier.end(deadline)
    while earlier.run_with_short_locks(deadline, drop_some):
        earlier.end(deadline)


def clear_abandoned(connection: psycopg.Connection, schema: str) -> None:
    """Drop up to 50 tables of abandoned attempts, whose pipelines no longer run and so do not remove them.

    Guarantee: nothing that a live attempt needs is dropped. An attempt is abandoned if it began more than :data:`.ABANDONED_DAYS`
    days ago and its pipeline has no session on the server; a live attempt has one. Never waits for a lock, and never fails an
    attempt.
    """
    from psycopg import Error

    with suppress(Error), connection.transaction():
        run(connection, sql.set_lock_timeout(0.1))
        query = sql.select_abandoned_tables(schema, STAGES, APPLICATION, ABANDONED_DAYS, _DROPPED_AT_ONCE)
        left = [Name(schema, row[0]) for row in fetch_rows(connection, query)]
        if left:
            log.info("Dropping %d tables of attempts that were abandoned in schema %s", len(left), schema)
            run(connection, sql.drop_tables(left))


def create_stage_registry(connection: psycopg.Connection, registry: Name) -> None:
    """Create an attempt's list of stages, and record when the attempt began."""
    with connection.transaction():
        run(connection, sql.create_registry(registry))
        run(connection, sql.stamp_registry(registry, fetch_rows(connection, sql.select_server_time())[0][0]))


def _take_over(earlier: _EarlierSessions, markers: Name, pipeline: str, owner: int | None) -> None:
    """Make this attempt the only one whose tasks may commit splits of the pipeline one by one.

    A task locks the owner's row from its check until it commits, so a split that it commits is visible before this function
    returns.

    :param owner: the attempt; None with ``atomic="window"``, so that no task may commit splits.
    """
    if not has_table(earlier.connection, markers):
        return
    statement = sql.remove_owner(markers, pipeline) if owner is None else sql.set_owner(markers, pipeline, owner)
    earlier.run_with_short_locks(time.monotonic() + earlier.patience, lambda: run(earlier.connection, statement))


def drop_attempt_tables(connection: psycopg.Connection, attempt: WindowAttempt) -> None:
    """Drop all tables of an attempt."""
    while left := fetch_rows(connection, sql.select_tables_like(attempt.stage_schema, f"{attempt.prefix}_")):
        run(connection, sql.drop_tables(Name(attempt.stage_schema, row[0]) for row in left[:_DROPPED_AT_ONCE]))


# --- the tables that have to be there ------------------------------------------------------------------------------------


def _create_missing(
    connection: psycopg.Connection, sink: PostgresSinkOptions, name: Name, windows: Name, markers: Name, shape: Shape
) -> None:
    statements = {windows: sql.create_windows(windows)}
    if sink.atomic == "split":
        statements[markers] = sql.create_splits(markers)
    if sink.auto_create:
        statements[name] = create_table_statement(sink, name, shape)
    for table, statement in statements.items():
        # CREATE ... IF NOT EXISTS needs the right to create even if the table is there, and two at once can still collide.
        if has_table(connection, table):
            continue
        with connection.transaction():
            run(connection, sql.lock(make_lock_key("create", str(table))))
            run(connection, statement)
    there = read_table(connection, windows)
    if there is not None and "replay" not in there.columns:
        run(connection, sql.add_replay(windows))


def create_table_statement(sink: PostgresSinkOptions, name: Name, shape: Shape) -> str:
    """Return the statement that ``auto_create`` runs."""
    columns = [make_stage_column(f.name, f.type) for f in shape.schema]
    return sql.create_target(name, list_wanted_columns(sink, columns), sink.key)


# --- from the rows' columns to the target's ------------------------------------------------------------------------------


def _plan_merge(
    sink: PostgresSinkOptions, target: Table, shape: Shape, window: Window
) -> tuple[tuple[StageColumn, ...], Merge, bool]:
    columns = tuple(make_stage_column(f.name, f.type) for f in shape.schema)
    refuse_misfits(target, columns, str(window))
    given = {c.name for c in columns}
    filled = tuple(name for name in sql.OFFSET_COLUMNS if name in target.columns and name not in given)
    upserts, finds = sink.mode == "upsert", shape.tolerates and sink.atomic == "window"
    merge = Merge(
        target=target.name,
        columns=tuple(merge_column(c, target.columns[c.name]) for c in columns),
        key=tuple(sink.key) if upserts else (),
        offset=OFFSET if upserts or sql.OFFSET_COLUMNS[2] in filled or finds else None,
        tombstone=TOMBSTONE if upserts and sink.delete_enabled and shape.has_tombstones else None,
        filled=filled,
        guarded=upserts and all(name in target.columns for name in sql.OFFSET_COLUMNS),
        again=window.replay > 0,
        window=(sink.window_column, str(window)) if sink.window_column else None,
    )
    direct = (
        not upserts
        and not sink.window_column
        and sink.atomic == "split"
        and target.kind == "r"
        and not target.filters
        and all(can_copy_directly(c, target.columns[c.name]) for c in columns)
        and all(target.columns[n].type == sql.OFFSET_TYPES[sql.OFFSET_COLUMNS.index(n)] for n in filled)
    )
    return columns, merge, direct


_MERGE_VERSION = 150000
"""The first version of the server that has MERGE, and of the client's library that counts its rows."""


def _can_merge(connection: psycopg.Connection, target: Table) -> bool:
    """Return True if MERGE and ON CONFLICT write equal rows into a table, unless another session writes equal keys."""
    from psycopg import pq

    is_known = min(connection.info.server_version, pq.version()) >= _MERGE_VERSION
    return is_known and target.kind == "r" and not target.filters


def _refuse_open_markers(
    connection: psycopg.Connection, windows: Name, markers: Name, window: Window, splits: Sequence[Split]
) -> None:
    """Refuse a window if the table has splits of another incomplete window with some of its offsets. This happens with a second
    ledger that numbers windows differently.

    :raises WindowConflict: there are such splits, and the pipeline was not moved back on purpose.
    """
    if window.moved or not has_table(connection, markers):
        return
    for number, *place in fetch_rows(connection, sql.select_open_splits(markers, windows, window.pipeline, window.number)):
        there = sql.SplitRow(*place)
        for r in (split.range for split in splits):
            if there[:2] == r.topic_partition and there.start < r.end and r.start < there.end:
                found = f"{there.text} is in the table already, a split of window #{number}, which is not complete"
                raise WindowConflict(str(window), found, "offsets that no other window has committed")


def _compare_markers(
    connection: psycopg.Connection,
    sink: PostgresSinkOptions,
    markers: Name,
    window: Window,
    splits: Sequence[Split],
    *,
    tolerates: bool,
) -> None:
    """Compare this attempt with the splits of the window that earlier attempts have committed: they must have equal ranges.

    Splits that an earlier attempt has deferred are not written. Their markers are deleted if this attempt handles them otherwise.

    :raises SinkRejected: this attempt has other splits, or does not commit them one by one.
    """
    if not has_table(connection, markers):
        return
    found = [sql.SplitRow(*row) for row in fetch_rows(connection, sql.select_splits(markers, window.pipeline, window.number))]
    known = [marker for marker in found if not marker.is_deferred]
    there = f"{len(known)} of its splits are in the table already, each committed on its own by an earlier attempt"
    if known and sink.atomic != "split":
        raise SinkRejected(sink.table, str(window), there, 'Keep `atomic="split"` until this window is complete')
    cut = {(s.range.topic, s.range.partition, s.range.start, s.range.end) for s in splits} if sink.atomic == "split" else set()
    if not tolerates or any(marker.is_deferred and marker[:4] not in cut for marker in found):
        run(connection, sql.delete_deferred_splits(markers, window.pipeline, window.number))
    topics = {s.range.topic for s in splits}
    other = [m for m in known if m.topic in topics and m[:4] not in cut]
    if other:
        raise SinkRejected(sink.table, str(window), f"{there}; {other[0].text} is not a split of this attempt", KEEP_SPLITS)
