"""One attempt at a window, prepared on the driver: earlier attempts ended, their leftovers gone, the target looked up."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING
from uuid import uuid4

from airflow_kafka_spark.errors import SinkRejected, WindowConflict
from airflow_kafka_spark.hooks.postgres import APPLICATION, Name, parse_name, resolve, rows, run
from airflow_kafka_spark.sinks import postgres_evolve as evolution
from airflow_kafka_spark.sinks import postgres_sql as sql
from airflow_kafka_spark.sinks.postgres_catalog import Table, read_table
from airflow_kafka_spark.sinks.postgres_connection import Server, lock_key, pipeline_key
from airflow_kafka_spark.sinks.postgres_merge import Merge, Stage
from airflow_kafka_spark.sinks.postgres_types import StageColumn, copies_directly, created_type, merge_column, stage_column
from airflow_kafka_spark.sinks.postgres_windows import exists, recorded, refuse_conflict
from airflow_kafka_spark.windows.model import Split, Window

if TYPE_CHECKING:
    import psycopg

    from airflow_kafka_spark.sinks.base import Shape
    from airflow_kafka_spark.sinks.postgres_settings import PostgresSettings
    from airflow_kafka_spark.sinks.postgres_worker import Load

log = logging.getLogger(__name__)

OFFSET, TOMBSTONE = "__airflow_offset", "__airflow_tombstone"
KEEP_SPLITS = "Set back what decides the size of splits until this window is complete"
STAGES = "airflow_stage_"
"""What the names of all stages begin with."""
ABANDONED_DAYS = 7.0
"""So old are the tables of an attempt, at least, that another pipeline's attempt removes."""
_POLL = 0.02
_DROPPED_AT_ONCE = 50


@dataclass(frozen=True)
class Attempt:
    """What driver and tasks of one attempt need to know.

    :param key: names the pipeline in names of tables and sessions.
    :param token: names this attempt.
    :param columns: the rows' columns.
    :param merge: how they get into the target.
    :param direct: whether COPY may write the target itself.
    :param tolerates: whether rows that the target refuses are left out, and told.
    :param keep_windows: rows of the sink's record that are kept of the pipeline.
    """

    server: Server
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
        return application_name(self.key)

    @property
    def prefix(self) -> str:
        """Begins the names of all tables of this attempt: at most 63 bytes with what follows."""
        return f"{stage_prefix(self.key)}{self.window.number:x}_{self.token}"

    @property
    def registry(self) -> Name:
        return Name(self.stage_schema, f"{self.prefix}_r")

    @property
    def owner(self) -> int:
        """The token, as the splits table holds it."""
        return int(self.token, 16)

    @property
    def lock(self) -> int:
        """Held by whoever applies a window of this pipeline."""
        return lock_key("window", str(self.windows), self.window.pipeline)

    def staged(self) -> Attempt:
        """The same, where splits that commit by themselves were put off and are staged: each row can be found by its offset."""
        return replace(self, merge=replace(self.merge, offset=OFFSET))

    def load(self) -> Load:
        from airflow_kafka_spark.sinks.postgres_worker import Load

        return Load(
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

    def stage(self, split: int, table: str) -> Stage:
        """A registered stage, with the place of its partition among the window's."""
        r = next(s.range for s in self.splits if s.index == split)
        partitions = sorted({s.range.topic_partition for s in self.splits})
        return Stage(str(Name(self.stage_schema, table)), r.topic, r.partition, partitions.index(r.topic_partition))


def application_name(key: str) -> str:
    return f"{APPLICATION} {key}"


def stage_prefix(key: str) -> str:
    return f"{STAGES}{key}_"


def prepare(sink: PostgresSettings, window: Window, splits: Sequence[Split], shape: Shape) -> Attempt:
    """End earlier attempts, clear what they left, make the tables that are missing, and look up the target.

    :raises WindowConflict: the window cannot follow the sink's last one.
    :raises SinkRejected: the target does not take these rows.
    :raises SinkUnavailable: the server cannot be reached, or an earlier attempt cannot be ended.
    """
    server = sink.server()
    with server.session("beginning window", str(window)) as connection:
        schema, table = parse_name(sink.table)
        name = resolve(connection, schema, table)
        windows, markers = Name(name.schema, sink.windows_table), Name(name.schema, sink.splits_table)
        key = pipeline_key(windows, window.pipeline)
        stage_schema = sink.stage_schema or name.schema
        _clear(connection, key, stage_schema, server.lock_timeout)
        clear_abandoned(connection, stage_schema)
        _create_missing(connection, sink, name, windows, markers, shape)
        if sink.auto_evolve:
            # Before anything is staged, and never undone: a killed attempt leaves columns that the next one finds.
            evolution.evolve(connection, sink, name, shape)
        token = uuid4().hex[:8]
        if recorded(connection, windows, window) is None:
            refuse_conflict(connection, windows, window)
            # In this order: from here on no task of an earlier attempt can add a marker to those that are compared.
            _take_over(connection, sink, markers, window, key, int(token, 16), server.lock_timeout)
            if not window.replay:
                _refuse_open_markers(connection, windows, markers, window, splits)
                _compare_markers(connection, sink, markers, window, splits, tolerates=shape.tolerates)
        target = read_table(connection, name)
        if target is None:
            raise SinkRejected(str(name), str(window), "there is no such table", "Create it, or set `auto_create=True`")
        columns, merge, direct = _plan(sink, target, shape, window)
        attempt = Attempt(
            server, window, tuple(splits), name, windows, markers, stage_schema, key, token, columns, merge, direct,
            tolerates=shape.tolerates, keep_windows=sink.keep_windows,
        )  # fmt: skip
        if sink.atomic == "window":
            create_registry(connection, attempt.registry)
        return attempt


# --- earlier attempts ----------------------------------------------------------------------------------------------------


def _clear(connection: psycopg.Connection, key: str, schema: str, patience: float) -> None:
    """End the sessions of earlier attempts, whatever they are doing, and drop their tables.

    A paused attempt that wakes up finds its session closed; a task of it that opens a new one finds its registry gone.
    """
    from psycopg import errors

    deadline = time.monotonic() + patience
    while True:
        _end_sessions(connection, key, deadline)
        try:
            with connection.transaction():
                # Short: a session that began after the last look holds the lock for as long as it lives.
                run(connection, sql.set_lock_timeout(min(patience, 1.0)))
                left = [Name(schema, row[0]) for row in rows(connection, sql.tables_like(schema, stage_prefix(key)))]
                if left:
                    run(connection, sql.drop(left[:_DROPPED_AT_ONCE]))
            if len(left) <= _DROPPED_AT_ONCE:
                return
        except errors.LockNotAvailable:
            if time.monotonic() > deadline:
                raise


def clear_abandoned(connection: psycopg.Connection, schema: str) -> None:
    """Drop up to 50 tables of attempts whose pipeline nobody runs any more, so that nobody else clears them away.

    Guarantee: nothing that a live attempt needs is dropped. Only tables of attempts count that began more than
    :data:`ABANDONED_DAYS` days ago, and whose pipeline has no session here: an attempt has one for as long as it lives. Never
    waits for anybody, and never fails an attempt.
    """
    from psycopg import Error

    with suppress(Error), connection.transaction():
        run(connection, sql.set_lock_timeout(0.1))
        query = sql.abandoned_tables(schema, STAGES, APPLICATION, ABANDONED_DAYS, _DROPPED_AT_ONCE)
        left = [Name(schema, row[0]) for row in rows(connection, query)]
        if left:
            log.info("Dropping %d tables of attempts that were abandoned in schema %s", len(left), schema)
            run(connection, sql.drop(left))


def create_registry(connection: psycopg.Connection, registry: Name) -> None:
    """An attempt's list of stages, and when it began."""
    with connection.transaction():
        run(connection, sql.create_registry(registry))
        run(connection, sql.stamp(registry, rows(connection, sql.now())[0][0]))


def _end_sessions(connection: psycopg.Connection, key: str, deadline: float) -> None:
    from psycopg import errors

    asked: set[int] = set()
    not_ours: set[int] = set()
    while others := {pid for (pid,) in rows(connection, sql.sessions_named(application_name(key)))} - not_ours:
        for pid in others - asked:
            asked.add(pid)
            try:
                run(connection, sql.terminate(pid))
            except errors.InsufficientPrivilege:
                # Another role's. If it holds what is needed here, the lock timeout says so.
                not_ours.add(pid)
        if time.monotonic() > deadline:
            return
        time.sleep(_POLL)


def _take_over(
    connection: psycopg.Connection,
    sink: PostgresSettings,
    markers: Name,
    window: Window,
    key: str,
    owner: int,
    patience: float,
) -> None:
    """Make this attempt the only one whose tasks may commit splits of the pipeline by themselves; with ``atomic="window"`` none
    may.

    A task holds the owner's row from its look until it commits: so what it commits was allowed, and is there before this returns.
    """
    from psycopg import errors

    if not exists(connection, markers):
        return
    statement = sql.own(markers, window.pipeline, owner) if sink.atomic == "split" else sql.disown(markers, window.pipeline)
    deadline = time.monotonic() + patience
    while True:
        try:
            with connection.transaction():
                run(connection, sql.set_lock_timeout(min(patience, 1.0)))
                run(connection, statement)
            return
        except errors.LockNotAvailable:
            # A task of an earlier attempt has begun since its sessions were ended.
            if time.monotonic() > deadline:
                raise
            _end_sessions(connection, key, deadline)


def drop_tables(connection: psycopg.Connection, attempt: Attempt) -> None:
    """Everything of one attempt."""
    while left := rows(connection, sql.tables_like(attempt.stage_schema, f"{attempt.prefix}_")):
        run(connection, sql.drop(Name(attempt.stage_schema, row[0]) for row in left[:_DROPPED_AT_ONCE]))


# --- the tables that have to be there ------------------------------------------------------------------------------------


def _create_missing(
    connection: psycopg.Connection, sink: PostgresSettings, name: Name, windows: Name, markers: Name, shape: Shape
) -> None:
    statements = {windows: sql.create_windows(windows)}
    if sink.atomic == "split":
        statements[markers] = sql.create_splits(markers)
    if sink.auto_create:
        statements[name] = creation(sink, name, shape)
    for table, statement in statements.items():
        # IF NOT EXISTS asks for the right to create before it looks, and two of them at once can still collide.
        if exists(connection, table):
            continue
        with connection.transaction():
            run(connection, sql.lock(lock_key("create", str(table))))
            run(connection, statement)
    there = read_table(connection, windows)
    if there is not None and "replay" not in there.columns:
        run(connection, sql.add_replay(windows))


def creation(sink: PostgresSettings, name: Name, shape: Shape) -> str:
    """The statement of `auto_create`."""
    columns = [(f.name, created_type(stage_column(f.name, f.type))) for f in shape.schema]
    if sink.offset_columns:
        given = {column for column, _ in columns}
        columns += [c for c in zip(sql.OFFSET_COLUMNS, sql.OFFSET_TYPES, strict=True) if c[0] not in given]
    if sink.window_column:
        columns.append((sink.window_column, "text"))
    return sql.create_target(name, columns, sink.key)


# --- from the rows' columns to the target's ------------------------------------------------------------------------------


def _plan(sink: PostgresSettings, target: Table, shape: Shape, window: Window) -> tuple[tuple[StageColumn, ...], Merge, bool]:
    columns = tuple(stage_column(f.name, f.type) for f in shape.schema)
    evolution.refuse_misfits(target, columns, str(window))
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
        and all(copies_directly(c, target.columns[c.name]) for c in columns)
        and all(target.columns[n].type == sql.OFFSET_TYPES[sql.OFFSET_COLUMNS.index(n)] for n in filled)
    )
    return columns, merge, direct


def _refuse_open_markers(
    connection: psycopg.Connection, windows: Name, markers: Name, window: Window, splits: Sequence[Split]
) -> None:
    """Splits of another window that nobody has closed may be in the table already, as of a second ledger that counts otherwise.

    :raises WindowConflict: some hold offsets of this one, and nobody has moved the pipeline back.
    """
    if window.moved or not exists(connection, markers):
        return
    for number, *place in rows(connection, sql.open_markers(markers, windows, window.pipeline, window.number)):
        there = sql.Marker(*place)
        for r in (split.range for split in splits):
            if there[:2] == r.topic_partition and there.start < r.end and r.start < there.end:
                found = f"{there.text} is in the table already, a split of window #{number}, which is not complete"
                raise WindowConflict(str(window), found, "offsets that no other window has taken")


def _compare_markers(
    connection: psycopg.Connection,
    sink: PostgresSettings,
    markers: Name,
    window: Window,
    splits: Sequence[Split],
    *,
    tolerates: bool,
) -> None:
    """An earlier attempt may have written splits of this window already: then this one has to go on as that one began. What it
    has put off is not written: where this one does not go on like that, it is forgotten.

    :raises SinkRejected: it would not.
    """
    if not exists(connection, markers):
        return
    found = [sql.Marker(*row) for row in rows(connection, sql.markers(markers, window.pipeline, window.number))]
    known = [marker for marker in found if not marker.put_off]
    there = f"{len(known)} of its splits are in the table already, each committed on its own by an earlier attempt"
    if known and sink.atomic != "split":
        raise SinkRejected(sink.table, str(window), there, 'Keep `atomic="split"` until this window is complete')
    cut = {(s.range.topic, s.range.partition, s.range.start, s.range.end) for s in splits} if sink.atomic == "split" else set()
    if not tolerates or any(marker.put_off and marker[:4] not in cut for marker in found):
        run(connection, sql.drop_put_off(markers, window.pipeline, window.number))
    topics = {s.range.topic for s in splits}
    other = [m for m in known if m.topic in topics and m[:4] not in cut]
    if other:
        raise SinkRejected(sink.table, str(window), f"{there}; {other[0].text} is none of this attempt's splits", KEEP_SPLITS)
