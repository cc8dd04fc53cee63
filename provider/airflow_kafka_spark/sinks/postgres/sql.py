"""The statements of the PostgreSQL sink, as pure functions of names and values. Every name in them is quoted.

They run through psycopg on the driver and through ADBC in the tasks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from airflow_kafka_spark.hooks.databases import Name, quote, quote_literal
from airflow_kafka_spark.sinks.base import OFFSET_COLUMNS

OFFSET_TYPES = ("text", "integer", "bigint")


def quote_jsonb(value: object) -> str:
    """Return a value as a literal of type ``jsonb``."""
    return f"{quote_literal(json.dumps(value))}::jsonb"


# --- sessions -----------------------------------------------------------------------------------------------------------


def set_session_settings(lock_timeout: float, *, durable: bool = True, application_name: str = "") -> str:
    """Set a session's parameters, so that its behaviour does not depend on settings of server, database and role, and so that it
    detects a lost client.

    :param lock_timeout: seconds to wait for another session's lock.
    :param durable: False if a commit may be lost in a crash of the server, because that is detected and repaired.
    :param application_name: the session's new name; empty keeps the one of the connection string.
    """
    settings = {
        "client_encoding": "UTF8",
        "client_min_messages": "warning",
        "TimeZone": "UTC",
        "extra_float_digits": "1",
        "default_transaction_isolation": "read committed",
        # A policy that hides rows would make counts and deletes silently wrong. With this it is an error.
        "row_security": "off",
        "lock_timeout": str(round(lock_timeout * 1000)),
        # The statements are simple but long, so that compiling them costs more time than it saves.
        "jit": "off",
        "statement_timeout": "0",
        "transaction_timeout": "0",
        "idle_in_transaction_session_timeout": "0",
        "idle_session_timeout": "0",
        "tcp_keepalives_idle": "30",
        "tcp_keepalives_interval": "10",
        "tcp_keepalives_count": "3",
    }
    if application_name:
        settings["application_name"] = application_name
    values = ", ".join(f"({quote_literal(name)}, {quote_literal(value)})" for name, value in settings.items())
    # An acknowledged commit has to be durable. Stronger settings, such as waiting for standbys, stay.
    commit = "CASE s.setting WHEN 'off' THEN 'on' ELSE s.setting END" if durable else "'off'"
    return (
        "SELECT set_config(s.name, CASE s.name WHEN 'synchronous_commit' THEN "
        f"{commit} ELSE v.value END, false) FROM pg_catalog.pg_settings s "
        f"JOIN (VALUES {values}, ('synchronous_commit', '')) v(name, value) ON v.name = s.name"
    )


def set_lock_timeout(seconds: float) -> str:
    """Set the lock timeout for the rest of the transaction."""
    return f"SET LOCAL lock_timeout = {round(seconds * 1000)}"


def select_sessions(application_name: str) -> str:
    """Select the process ids of other sessions of that name in this database."""
    return (
        "SELECT pid FROM pg_catalog.pg_stat_activity WHERE datname = current_database() "
        f"AND application_name = {quote_literal(application_name)} AND pid <> pg_backend_pid()"
    )


def terminate(pid: int) -> str:
    """End a session."""
    return f"SELECT pg_terminate_backend({int(pid)})"


def lock(key: int) -> str:
    """Take an advisory lock and hold it until the transaction ends. Waits for it."""
    return f"SELECT pg_advisory_xact_lock({int(key)})"


def try_lock(key: int) -> str:
    """Take an advisory lock if it is free; return True if it was."""
    return f"SELECT pg_try_advisory_xact_lock({int(key)})"


def terminate_lock_holder(key: int) -> str:
    """End the session that holds an advisory lock."""
    high, low = (int(key) >> 32) & 0xFFFFFFFF, int(key) & 0xFFFFFFFF
    return (
        "SELECT pg_terminate_backend(pid) FROM pg_catalog.pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
        f"AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database()) "
        f"AND classid::bigint = {high} AND objid::bigint = {low}"
    )


# --- the sink's own tables ----------------------------------------------------------------------------------------------


def create_windows(windows: Name) -> str:
    """Create the table of windows, unless it exists."""
    return (
        f"CREATE TABLE IF NOT EXISTS {windows} (pipeline text NOT NULL, number bigint NOT NULL, ranges jsonb NOT NULL, "
        "written bigint NOT NULL DEFAULT 0, deleted bigint NOT NULL DEFAULT 0, target text NOT NULL, run text NOT NULL, "
        "cluster_id text NOT NULL, topic_ids jsonb NOT NULL, applied_at timestamptz NOT NULL DEFAULT now(), "
        "replay integer NOT NULL DEFAULT 0, "
        "PRIMARY KEY (pipeline, number))"
    )


def add_replay(windows: Name) -> str:
    """Add the column ``replay`` to a table that was created before replays existed."""
    return f"ALTER TABLE {windows} ADD COLUMN IF NOT EXISTS replay integer NOT NULL DEFAULT 0"


def claim_window(windows: Name, facts: Mapping[str, Any], target: str) -> str:
    """Insert the window's row, or for a replay update the row of the previous run. Waits for another transaction that does this.

    Returns True if the row is new, False if it was updated, and no row if another attempt has applied the window.
    """
    return (
        f"INSERT INTO {windows} AS w (pipeline, number, ranges, target, run, cluster_id, topic_ids, replay) VALUES ("
        f"{quote_literal(facts['pipeline'])}, {quote_literal(facts['number'])}, {quote_jsonb(facts['ranges'])}, "
        f"{quote_literal(target)}, "
        f"{quote_literal(facts['run'])}, {quote_literal(facts['cluster_id'])}, {quote_jsonb(facts['topic_ids'])}, "
        f"{quote_literal(facts['replay'])}) "
        "ON CONFLICT (pipeline, number) DO UPDATE SET target = excluded.target, run = excluded.run, replay = excluded.replay "
        "WHERE w.replay < excluded.replay RETURNING (xmax = 0)"
    )


def count_window(windows: Name, pipeline: str, number: int, written: int, deleted: int) -> str:
    """Set the counts of the window's row, and its time, which is that of the commit rather than of the claim."""
    return (
        f"UPDATE {windows} SET written = {quote_literal(written)}, deleted = {quote_literal(deleted)}, applied_at = "
        "clock_timestamp() "
        f"WHERE pipeline = {quote_literal(pipeline)} AND number = {quote_literal(number)}"
    )


DROPPED_WINDOWS = 1000
"""Maximum number of old rows that one transaction removes from the windows table."""


def delete_old_windows(windows: Name, pipeline: str, number: int, keep: int) -> str:
    """Delete the oldest rows of a pipeline, those before its last ``keep`` windows."""
    mine = f"pipeline = {quote_literal(pipeline)}"
    old = f"SELECT number FROM {windows} WHERE {mine} AND number <= {quote_literal(number - keep)}"
    return f"DELETE FROM {windows} WHERE {mine} AND number IN ({old} ORDER BY number LIMIT {DROPPED_WINDOWS})"


def select_window(windows: Name, pipeline: str, number: int) -> str:
    """Select the row of a window."""
    return f"{_select_windows(windows)} WHERE pipeline = {quote_literal(pipeline)} AND number = {quote_literal(number)}"


def _is_elsewhere(there: str, target: Name) -> str:
    """Return the condition that a record belongs to another table than the target. A table that is gone counts as renamed to
    it.
    """
    return f"{there} <> {quote_literal(str(target))} AND to_regclass({there}) IS NOT NULL"


def _is_window(pipeline: str, number: int) -> str:
    return f"pipeline = {quote_literal(pipeline)} AND number = {quote_literal(number)}"


def select_window_elsewhere(windows: Name, pipeline: str, number: int, target: Name) -> str:
    """Select the table that has the window's rows, if it is not the target."""
    return f"SELECT target FROM {windows} WHERE {_is_window(pipeline, number)} AND {_is_elsewhere('target', target)}"


def delete_window_elsewhere(windows: Name, pipeline: str, number: int, target: Name) -> str:
    """Delete the row of a window whose rows are in another table than the target."""
    return f"DELETE FROM {windows} WHERE {_is_window(pipeline, number)} AND {_is_elsewhere('target', target)}"


def select_last_window(windows: Name, pipeline: str, *, but: int | None = None, target: Name | None = None) -> str:
    """Select the pipeline's row with the highest number, other than ``but``.

    :param target: if given, a last column has the table that has the window's rows, if that is another one; else an empty text.
    """
    others = "" if but is None else f"AND number <> {quote_literal(but)} "
    place = f"CASE WHEN {_is_elsewhere('target', target)} THEN target ELSE '' END" if target else ""
    return f"{_select_windows(windows, place)} WHERE pipeline = {quote_literal(pipeline)} {others}ORDER BY number DESC LIMIT 1"


def select_last_windows_of(windows: Name, target: Name, topics: Iterable[str]) -> str:
    """Select the newest row of a target, of any pipeline, with each of some topics: the topic and the pipeline come first."""
    names = ", ".join(map(quote_literal, topics))
    return (
        f"SELECT DISTINCT ON (topic) topic, pipeline, {_WINDOW_COLUMNS} "
        f"FROM {windows} AS w, jsonb_object_keys(topic_ids) AS topic "
        f"WHERE target = {quote_literal(str(target))} AND topic IN ({names}) ORDER BY topic, applied_at DESC"
    )


# Through JSON: a table that was created before replays existed has no such column, and is only read here.
_WINDOW_COLUMNS = "number, ranges, written, deleted, topic_ids, (to_jsonb(w)->>'replay')::integer, cluster_id"


def _select_windows(windows: Name, *more: str) -> str:
    return f"SELECT {', '.join(filter(None, (_WINDOW_COLUMNS, *more)))} FROM {windows} AS w"


def delete_window(target: Name, column: str, window: str) -> str:
    """Delete the rows of one window."""
    return f"DELETE FROM {target} WHERE {quote(column)} = {quote_literal(window)}"


def has_unmarked_rows(target: Name, column: str) -> str:
    """Select true if there are rows without a window's name."""
    return f"SELECT EXISTS (SELECT 1 FROM {target} WHERE {quote(column)} IS NULL)"


def create_splits(splits: Name) -> str:
    """Create the table of splits, unless it exists."""
    return (
        f"CREATE TABLE IF NOT EXISTS {splits} (pipeline text NOT NULL, number bigint NOT NULL, topic text NOT NULL, "
        "partition integer NOT NULL, start_offset bigint NOT NULL, end_offset bigint NOT NULL, rows bigint NOT NULL DEFAULT 0, "
        "written bigint NOT NULL DEFAULT 0, deleted bigint NOT NULL DEFAULT 0, PRIMARY KEY (pipeline, number, topic, partition, "
        "start_offset))"
    )


OWNER = "number = 0"
"""The owner's row of the splits table; the rows of splits have the number of their window, from 1. Its ``end_offset`` names the
attempt whose tasks may commit splits of the pipeline's windows. A row with the negative number of a window has, as its topic, the
table that has the window's splits."""

DEFERRED = -1
"""Used instead of the number of rows of a split that is left to the driver. No task may commit this split any more."""


class SplitRow(NamedTuple):
    """A split's row in the splits table (its marker). It exists if, and only if, the split's rows are in the target, or the split
    is deferred."""

    topic: str
    partition: int
    start: int
    end: int
    rows: int = 0
    written: int = 0
    deleted: int = 0

    @property
    def is_deferred(self) -> bool:
        return self.rows == DEFERRED

    @property
    def text(self) -> str:
        return f"{self.topic}-{self.partition}[{self.start},{self.end})"


def claim_split(splits: Name, pipeline: str, number: int, marker: SplitRow) -> str:
    """Insert the split's marker."""
    values = ", ".join(quote_literal(value) for value in (pipeline, number, *marker[:4]))
    return f"INSERT INTO {splits} (pipeline, number, topic, partition, start_offset, end_offset) VALUES ({values})"


def count_split(splits: Name, pipeline: str, number: int, marker: SplitRow) -> str:
    """Set the counts of the split's marker."""
    return (
        f"UPDATE {splits} SET rows = {marker.rows}, written = {marker.written}, deleted = {marker.deleted} WHERE "
        f"pipeline = {quote_literal(pipeline)} AND number = {quote_literal(number)} AND topic = {quote_literal(marker.topic)} "
        f"AND partition = {quote_literal(marker.partition)} AND start_offset = {quote_literal(marker.start)}"
    )


def select_splits(splits: Name, pipeline: str, number: int) -> str:
    """Select the markers of a window: partition, range and counts of each split."""
    return (
        f"SELECT topic, partition, start_offset, end_offset, rows, written, deleted FROM {splits} "
        f"WHERE pipeline = {quote_literal(pipeline)} AND number = {quote_literal(number)}"
    )


def select_open_splits(splits: Name, windows: Name, pipeline: str, number: int) -> str:
    """Select number and place of the splits of the pipeline's other windows that are not complete, being newer than the last one
    applied."""
    last = f"SELECT max(number) FROM {windows} WHERE pipeline = {quote_literal(pipeline)}"
    return (
        f"SELECT number, topic, partition, start_offset, end_offset FROM {splits} WHERE pipeline = {quote_literal(pipeline)} "
        f"AND number <> {quote_literal(number)} AND number > COALESCE(({last}), 0) AND rows <> {DEFERRED}"
    )


def set_owner(splits: Name, pipeline: str, owner: int) -> str:
    """Make an attempt the owner: only its tasks may commit splits of a pipeline. Waits for tasks of the previous owner that are
    committing."""
    values = ", ".join(quote_literal(value) for value in (pipeline, 0, "", 0, 0, owner))
    return (
        f"INSERT INTO {splits} (pipeline, number, topic, partition, start_offset, end_offset) VALUES ({values}) "
        "ON CONFLICT (pipeline, number, topic, partition, start_offset) DO UPDATE SET end_offset = excluded.end_offset"
    )


def remove_owner(splits: Name, pipeline: str, owner: int | None = None) -> str:
    """Remove the owner, so that no task may commit splits of a pipeline. Waits for tasks that are committing.

    :param owner: remove it only if it is this attempt.
    """
    mine = "" if owner is None else f" AND end_offset = {quote_literal(owner)}"
    return f"DELETE FROM {splits} WHERE pipeline = {quote_literal(pipeline)} AND {OWNER}{mine}"


def leave_splits(splits: Name, pipeline: str, number: int, owner: int) -> str:
    """Remove an attempt as the owner, and the row that names the table of its window's splits if there are no splits. Does
    nothing if a later attempt is the owner, which has named its table."""
    return (
        f"WITH left_owner AS ({remove_owner(splits, pipeline, owner)} RETURNING 1) "
        f"{unname_target(splits, pipeline, number)} AND EXISTS (SELECT 1 FROM left_owner) "
        f"AND NOT EXISTS (SELECT 1 FROM {splits} WHERE {_is_window(pipeline, number)})"
    )


def lock_owner(splits: Name, pipeline: str) -> str:
    """Select the attempt whose tasks may commit splits. It stays the owner until this transaction ends."""
    return f"SELECT end_offset FROM {splits} WHERE pipeline = {quote_literal(pipeline)} AND {OWNER} FOR SHARE"


def delete_old_splits(splits: Name, pipeline: str, number: int) -> str:
    """Delete the rows of earlier windows, of deferred splits, and of the owner."""
    old = f"number < {quote_literal(number)} OR rows = {DEFERRED}"
    return f"DELETE FROM {splits} WHERE pipeline = {quote_literal(pipeline)} AND ({old})"


def name_target(splits: Name, pipeline: str, number: int, target: Name) -> str:
    """Insert the row that names the table of a window's splits, unless it is there."""
    values = ", ".join(quote_literal(value) for value in (pipeline, -number, str(target), 0, 0, 0))
    return (
        f"INSERT INTO {splits} (pipeline, number, topic, partition, start_offset, end_offset) VALUES ({values}) "
        "ON CONFLICT (pipeline, number, topic, partition, start_offset) DO NOTHING"
    )


def unname_target(splits: Name, pipeline: str, number: int) -> str:
    """Delete the row that names the table of a window's splits."""
    return f"DELETE FROM {splits} WHERE {_is_window(pipeline, -number)}"


def delete_splits_elsewhere(splits: Name, pipeline: str, number: int, target: Name) -> str:
    """Delete the rows of a window whose splits are in another table than the target."""
    there = f"SELECT 1 FROM {splits} WHERE {_is_window(pipeline, -number)} AND {_is_elsewhere('topic', target)}"
    window = f"{_is_window(pipeline, number)} OR {_is_window(pipeline, -number)}"
    return f"DELETE FROM {splits} WHERE ({window}) AND EXISTS ({there})"


def delete_deferred_splits(splits: Name, pipeline: str, number: int) -> str:
    """Delete the rows of deferred splits, so that tasks may commit them again."""
    window = f"pipeline = {quote_literal(pipeline)} AND number = {quote_literal(number)}"
    return f"DELETE FROM {splits} WHERE {window} AND rows = {DEFERRED}"


def select_applied_since(windows: Name, pipeline: str, number: int) -> str:
    """Select a row if the window, or a later one, is applied."""
    return f"SELECT 1 FROM {windows} WHERE pipeline = {quote_literal(pipeline)} AND number >= {quote_literal(number)} LIMIT 1"


# --- stages -------------------------------------------------------------------------------------------------------------


def create_registry(registry: Name) -> str:
    """Create an attempt's list of stages, which has at most one stage for a split."""
    return (
        f"CREATE UNLOGGED TABLE {registry} (split integer PRIMARY KEY, stage text, rows bigint NOT NULL, "
        "tombstones bigint NOT NULL) WITH (autovacuum_enabled = off)"
    )


def select_server_time() -> str:
    """Select the server's time in seconds since the epoch."""
    return "SELECT extract(epoch FROM clock_timestamp())::bigint"


def stamp_registry(registry: Name, began: int) -> str:
    """Store in the registry's comment when the attempt began, in seconds since the epoch."""
    return f"COMMENT ON TABLE {registry} IS {quote_literal(str(began))}"


def select_abandoned_tables(schema: str, prefix: str, application: str, days: float, most: int) -> str:
    """Select the tables of abandoned attempts: their registry says that they began more than ``days`` ago, and their pipeline has
    no session. Sorted by name, so that an attempt's registry comes last.

    :param prefix: the beginning of the names of all stages; the pipeline's key of 12 digits follows.
    :param application: the beginning of the names of all sessions; a blank and the key follow.
    :param most: maximum number of tables.
    """
    key = f"substr(c.relname, {len(prefix) + 1}, 12)"
    attempt = f"substring(c.relname FROM {quote_literal('^' + prefix + '[0-9a-f]{12}_[0-9a-f]+_[0-9a-f]{8}_')})"
    began = "substring(pg_catalog.obj_description(oid, 'pg_class') FROM '^[0-9]{1,12}$')::bigint"
    return (
        f"WITH stages AS (SELECT c.relname, c.oid, {key} AS key, {attempt} AS attempt FROM pg_catalog.pg_class c "
        "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        f"WHERE n.nspname = {quote_literal(schema)} AND c.relkind = 'r' AND starts_with(c.relname, {quote_literal(prefix)}) "
        "AND pg_has_role(c.relowner, 'USAGE')), "
        "old AS (SELECT attempt FROM stages WHERE relname = attempt || 'r' "
        f"AND {began} < extract(epoch FROM clock_timestamp()) - {days * 86400:.0f}) "
        "SELECT relname FROM stages s WHERE s.attempt IN (SELECT attempt FROM old) "
        "AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_stat_activity a WHERE a.datname = current_database() "
        f"AND a.application_name = {quote_literal(application + ' ')} || s.key) ORDER BY relname LIMIT {most:d}"
    )


def register_stage(registry: Name, split: int, stage: str | None, rows: int, tombstones: int) -> str:
    """Enter a split's stage in the registry. Inserts no row if another task attempt at this split was faster."""
    values = ", ".join(quote_literal(value) for value in (split, stage, rows, tombstones))
    return f"INSERT INTO {registry} (split, stage, rows, tombstones) VALUES ({values}) ON CONFLICT (split) DO NOTHING"


def select_stages(registry: Name, split: int | None = None) -> str:
    """Select the registered stages: split, stage, rows and tombstones.

    :param split: only this split; None (default) for all.
    """
    return f"SELECT split, stage, rows, tombstones FROM {registry}" + (
        "" if split is None else f" WHERE split = {quote_literal(split)}"
    )


def create_stage(columns: Iterable[tuple[str, str]], stage: Name) -> str:
    """Create an unlogged table for the rows of a split."""
    # Without autovacuum, because dropping the table would wait for it.
    return (
        f"CREATE UNLOGGED TABLE {stage} ({_format_definitions(columns)}) WITH (autovacuum_enabled = off, "
        "toast.autovacuum_enabled = off)"
    )


def create_temporary(columns: Iterable[tuple[str, str]], name: str) -> str:
    """Create a table that the end of the transaction drops."""
    return f"CREATE TEMP TABLE {quote(name)} ({_format_definitions(columns)}) ON COMMIT DROP"


def select_tables_like(schema: str, prefix: str) -> str:
    """Select the tables with this prefix that this role may drop. An attempt's registry comes after its stages."""
    return (
        "SELECT c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        f"WHERE n.nspname = {quote_literal(schema)} AND c.relkind = 'r' AND starts_with(c.relname, {quote_literal(prefix)}) "
        "AND pg_has_role(c.relowner, 'USAGE') ORDER BY c.relname"
    )


def index_offsets(stage: str, offset: str) -> str:
    """Create an index on the offsets of a stage.

    :param stage: the stage, quoted for a statement.
    """
    return f"CREATE INDEX ON {stage} ({quote(offset)})"


def delete_offsets(stage: str, offset: str, gone: Iterable[int]) -> str:
    """Delete the rows of a stage that have one of these offsets.

    :param stage: the stage, quoted for a statement.
    """
    return f"DELETE FROM {stage} WHERE {quote(offset)} IN ({', '.join(map(quote_literal, gone))})"


def drop_tables(tables: Iterable[Name]) -> str:
    """Drop tables, as far as they exist."""
    return f"DROP TABLE IF EXISTS {', '.join(map(str, tables))}"


def create_target(target: Name, columns: Sequence[tuple[str, str]], key: Sequence[str]) -> str:
    """Create the target, unless it exists.

    :param key: the columns of its primary key; empty for none.
    """
    primary = f", PRIMARY KEY ({', '.join(map(quote, key))})" if key else ""
    return f"CREATE TABLE IF NOT EXISTS {target} ({_format_definitions(columns)}{primary})"


def add_columns(target: Name, columns: Iterable[tuple[str, str]], where: str = "") -> str:
    """Add nullable columns.

    :param where: ``IF NOT EXISTS`` leaves existing columns unchanged.
    """
    add = f"ADD COLUMN {where}".strip()
    return f"ALTER TABLE {target} " + ", ".join(f"{add} {quote(name)} {kind}" for name, kind in columns)


def _format_definitions(columns: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{quote(name)} {kind}" for name, kind in columns)


def join_in_order() -> str:
    """Let the transaction join rows with a table by its index, in the order of the rows. The planner does not know how many keys
    are staged, and might choose a hash join, which writes, and locks, the rows in no order.
    """
    return "SELECT set_config('enable_hashjoin', 'off', true), set_config('enable_seqscan', 'off', true)"


# --- from stages into the target --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MergeColumn:
    """The conversion of a column of a stage to the target's type.

    :param name: its name in stage and target.
    :param before: SQL in front of a reference to the stage's column; empty if assignment converts the value.
    :param after: SQL after the reference.
    :param key_after: SQL after a reference that is compared as a key: keys that are equal for the target's index have to be equal
        here.
    """

    name: str
    before: str = ""
    after: str = ""
    key_after: str = ""

    @property
    def value(self) -> str:
        return f"{self.before}s.{quote(self.name)}{self.after}"

    @property
    def key_value(self) -> str:
        return f"s.{quote(self.name)}{self.key_after}"


@dataclass(frozen=True)
class StagedSplit:
    """A table that holds the rows of one split.

    :param table: its name, quoted.
    :param order: the position of its partition among the window's partitions.
    :param span: use only the rows of these offsets, start inclusive and end exclusive; None: all rows.
    """

    table: str
    topic: str
    partition: int
    order: int = 0
    span: tuple[int, int] | None = None


@dataclass(frozen=True)
class Merge:
    """The statements that move rows from stages into the target.

    :param target: the table.
    :param columns: the columns of the rows.
    :param key: the columns of the key; empty if rows are only appended.
    :param offset: the stage's hidden column of offsets, if it has one.
    :param tombstone: the stage's hidden column that marks deletes, if it has one.
    :param filled: the :data:`OFFSET_COLUMNS` that the sink fills.
    :param guarded: True if the target has all of them, so that an older offset never overwrites a newer one.
    :param again: True if the target may have rows of equal offsets, which are written again, as in a replay.
    :param window: a column and its value in every row, the window's name.
    :param merges: True if MERGE writes the rows that ON CONFLICT writes, as :meth:`merge` describes.
    """

    target: Name
    columns: tuple[MergeColumn, ...]
    key: tuple[str, ...] = ()
    offset: str | None = None
    tombstone: str | None = None
    filled: tuple[str, ...] = ()
    guarded: bool = False
    again: bool = False
    window: tuple[str, str] | None = None
    merges: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of the target that get a value."""
        return (*(c.name for c in self.columns), *self.filled, *(self.window or ())[:1])

    def insert(self, stage: StagedSplit) -> str:
        """Append all rows of one stage."""
        selected = f"SELECT {', '.join(self._list_values())} FROM {self._select_rows([stage])}"
        return f"INSERT INTO {self.target} ({_list(self.names)}) {selected}"

    def upsert(self, stages: Sequence[StagedSplit]) -> str:
        """Insert or update the last row of each key: that with the highest offset in the last partition."""
        return f"{self._put(f'({self._select_last(stages)}) AS last')}"

    def merge(self, stages: Sequence[StagedSplit]) -> str:
        """Upsert as :meth:`upsert`, by MERGE, which takes two thirds of the time for rows that are new.

        It differs from ON CONFLICT in two ways. If another session inserts a key meanwhile, it fails with a unique violation. A
        trigger before INSERT does not see the rows that are updated; :attr:`merges` is False for a table that has one.
        """
        changed = [name for name in self.names if name not in self.key]
        update = "UPDATE SET " + ", ".join(f"{quote(name)} = last.{quote(name)}" for name in changed)
        matched = f"{self._make_guard('last', ' AND ')} THEN {update}" if changed else " THEN DO NOTHING"
        # ONLY: rows of tables that inherit from the target are not in its index, so ON CONFLICT does not find them.
        return (
            f"MERGE INTO ONLY {self.target} AS t USING ({self._select_last(stages)}) AS last ON {self._same_key} "
            f"WHEN MATCHED{matched} "
            f"WHEN NOT MATCHED THEN INSERT ({_list(self.names)}) VALUES ({', '.join(f'last.{quote(n)}' for n in self.names)})"
        )

    def upsert_and_delete(self, stages: Sequence[StagedSplit]) -> str:
        """Upsert with deletes: the last event of a key may be its deletion. Selects the numbers of written and of deleted rows.

        Both halves are one statement. Their keys differ, so that neither changes a row of the other.
        """
        assert self.tombstone
        dead = f"last.{quote(self.tombstone)}"
        guard = self._make_guard("last", " AND ")
        return (
            f"WITH last AS MATERIALIZED ({self._select_last(stages)}), "
            f"gone AS (DELETE FROM {self.target} AS t USING last WHERE {dead} AND {self._same_key}{guard} RETURNING 1), "
            f"put AS ({self._put('last', f' WHERE NOT {dead}')} RETURNING 1) "
            "SELECT (SELECT count(*) FROM put), (SELECT count(*) FROM gone)"
        )

    @property
    def _same_key(self) -> str:
        return " AND ".join(f"t.{quote(k)} = last.{quote(k)}" for k in self.key)

    def _list_values(self) -> list[str]:
        named = [f"{quote_literal(self.window[1])}::text"] if self.window else []
        return [*(c.value for c in self.columns), *(f"s.{quote(name)}" for name in self.filled), *named]

    def _select_rows(self, stages: Sequence[StagedSplit]) -> str:
        """Return a subquery ``s`` of the rows of all stages, with columns for the place of each row."""
        parts = []
        for stage in stages:
            offset = f"r.{quote(self.offset)}" if self.offset else "NULL::bigint"
            known = dict(zip(OFFSET_COLUMNS, (f"{quote_literal(stage.topic)}::text", f"{stage.partition}", offset), strict=True))
            origin = [f"{known[name]} AS {quote(name)}" for name in self.filled]
            within = f" WHERE {offset} >= {stage.span[0]} AND {offset} < {stage.span[1]}" if stage.span else ""
            values = ", ".join([*origin, f"{stage.order} AS {quote(_ORDER)}", "r.*"])
            parts.append(f"SELECT {values} FROM {stage.table} AS r{within}")
        return f"({' UNION ALL '.join(parts)}) AS s"

    def _select_last(self, stages: Sequence[StagedSplit]) -> str:
        assert self.offset
        by_name = {c.name: c for c in self.columns}
        keys = ", ".join(by_name[k].key_value for k in self.key)
        # A key is compared as the target compares it, and inserted as that value.
        values = [f"{c.key_value if c.name in self.key else c.value} AS {quote(c.name)}" for c in self.columns]
        values += [f"s.{quote(name)}" for name in self.filled]
        values += [f"{quote_literal(self.window[1])}::text AS {quote(self.window[0])}"] if self.window else []
        values += [f"s.{quote(self.tombstone)}"] if self.tombstone else []
        return (
            f"SELECT DISTINCT ON ({keys}) {', '.join(values)} FROM {self._select_rows(stages)} "
            f"ORDER BY {keys}, s.{quote(_ORDER)} DESC, s.{quote(self.offset)} DESC"
        )

    def _put(self, source: str, where: str = "") -> str:
        columns = ", ".join(f"last.{quote(name)}" for name in self.names)
        changed = [name for name in self.names if name not in self.key]
        if changed:
            assignments = ", ".join(f"{quote(name)} = excluded.{quote(name)}" for name in changed)
            action = f"DO UPDATE SET {assignments}{self._make_guard('excluded', ' WHERE ')}"
        else:
            action = "DO NOTHING"
        return (
            f"INSERT INTO {self.target} AS t ({_list(self.names)}) SELECT {columns} FROM {source}{where} "
            f"ON CONFLICT ({_list(self.key)}) {action}"
        )

    def _make_guard(self, new: str, word: str) -> str:
        if not self.guarded:
            return ""
        topic, partition, offset = map(quote, OFFSET_COLUMNS)
        return (
            f"{word}((t.{topic}, t.{partition}) IS DISTINCT FROM ({new}.{topic}, {new}.{partition}) "
            f"OR t.{offset} {'<=' if self.again else '<'} {new}.{offset})"
        )


_ORDER = "__airflow_partition_order"


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(quote, names))
