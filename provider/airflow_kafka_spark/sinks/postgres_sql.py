"""Every statement the PostgreSQL sink runs, as pure functions of names and values.

The same text runs through psycopg on the driver and through ADBC in the tasks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from airflow_kafka_spark.hooks.postgres import Name, literal, quote

OFFSET_COLUMNS = ("__connect_topic", "__connect_partition", "__connect_offset")
"""Where a row came from; the names of the JDBC sink's ``pk.mode=kafka``."""
OFFSET_TYPES = ("text", "integer", "bigint")


def jsonb(value: Any) -> str:
    return f"{literal(json.dumps(value))}::jsonb"


# --- sessions -----------------------------------------------------------------------------------------------------------


def session_settings(lock_timeout: float, *, durable: bool = True) -> str:
    """Make a session mean the same whatever server, database and role set, and notice a client that is gone.

    :param lock_timeout: seconds to wait for another session's lock.
    :param durable: False where losing the commit in a crash of the server is noticed and repaired.
    """
    settings = {
        "client_encoding": "UTF8",
        "client_min_messages": "warning",
        "TimeZone": "UTC",
        "extra_float_digits": "1",
        "default_transaction_isolation": "read committed",
        # A policy that hides rows would make counts and deletes silently wrong: it becomes an error.
        "row_security": "off",
        "lock_timeout": str(round(lock_timeout * 1000)),
        # The statements are simple, and long: compiling them only costs.
        "jit": "off",
        "statement_timeout": "0",
        "transaction_timeout": "0",
        "idle_in_transaction_session_timeout": "0",
        "idle_session_timeout": "0",
        "tcp_keepalives_idle": "30",
        "tcp_keepalives_interval": "10",
        "tcp_keepalives_count": "3",
    }
    values = ", ".join(f"({literal(name)}, {literal(value)})" for name, value in settings.items())
    # An acknowledged commit has to be one, and a server that waits for its standbys goes on doing so.
    commit = "CASE s.setting WHEN 'off' THEN 'on' ELSE s.setting END" if durable else "'off'"
    return (
        "SELECT set_config(s.name, CASE s.name WHEN 'synchronous_commit' THEN "
        f"{commit} ELSE v.value END, false) FROM pg_catalog.pg_settings s "
        f"JOIN (VALUES {values}, ('synchronous_commit', '')) v(name, value) ON v.name = s.name"
    )


def set_lock_timeout(seconds: float) -> str:
    """For the rest of the transaction."""
    return f"SET LOCAL lock_timeout = {round(seconds * 1000)}"


def sessions_named(application_name: str) -> str:
    """Other sessions of that name in this database."""
    return (
        "SELECT pid FROM pg_catalog.pg_stat_activity WHERE datname = current_database() "
        f"AND application_name = {literal(application_name)} AND pid <> pg_backend_pid()"
    )


def terminate(pid: int) -> str:
    return f"SELECT pg_terminate_backend({int(pid)})"


def lock(key: int) -> str:
    """Wait for, and hold until the transaction ends, a lock that is only a number."""
    return f"SELECT pg_advisory_xact_lock({int(key)})"


def try_lock(key: int) -> str:
    """The same without waiting."""
    return f"SELECT pg_try_advisory_xact_lock({int(key)})"


def end_holder(key: int) -> str:
    """End the session that holds such a lock."""
    high, low = (int(key) >> 32) & 0xFFFFFFFF, int(key) & 0xFFFFFFFF
    return (
        "SELECT pg_terminate_backend(pid) FROM pg_catalog.pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 "
        f"AND database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = current_database()) "
        f"AND classid::bigint = {high} AND objid::bigint = {low}"
    )


# --- the sink's own tables ----------------------------------------------------------------------------------------------


def create_windows(windows: Name) -> str:
    return (
        f"CREATE TABLE IF NOT EXISTS {windows} (pipeline text NOT NULL, number bigint NOT NULL, ranges jsonb NOT NULL, "
        "written bigint NOT NULL DEFAULT 0, deleted bigint NOT NULL DEFAULT 0, target text NOT NULL, run text NOT NULL, "
        "cluster_id text NOT NULL, topic_ids jsonb NOT NULL, applied_at timestamptz NOT NULL DEFAULT now(), "
        "replay integer NOT NULL DEFAULT 0, "
        "PRIMARY KEY (pipeline, number))"
    )


def add_replay(windows: Name) -> str:
    """For a table of before there were replays."""
    return f"ALTER TABLE {windows} ADD COLUMN IF NOT EXISTS replay integer NOT NULL DEFAULT 0"


def claim_window(windows: Name, facts: Mapping[str, Any], target: str) -> str:
    """Insert the window's row; for a replay, take that of the time before. Returns whether the row is new; no row comes back when
    it is there already. Waits for whoever is about to insert it."""
    return (
        f"INSERT INTO {windows} AS w (pipeline, number, ranges, target, run, cluster_id, topic_ids, replay) VALUES ("
        f"{literal(facts['pipeline'])}, {literal(facts['number'])}, {jsonb(facts['ranges'])}, {literal(target)}, "
        f"{literal(facts['run'])}, {literal(facts['cluster_id'])}, {jsonb(facts['topic_ids'])}, {literal(facts['replay'])}) "
        "ON CONFLICT (pipeline, number) DO UPDATE SET target = excluded.target, run = excluded.run, replay = excluded.replay "
        "WHERE w.replay < excluded.replay RETURNING (xmax = 0)"
    )


def count_window(windows: Name, pipeline: str, number: int, written: int, deleted: int) -> str:
    """Complete the row with what was written, and with the time of its commit rather than of its claim."""
    return (
        f"UPDATE {windows} SET written = {literal(written)}, deleted = {literal(deleted)}, applied_at = clock_timestamp() "
        f"WHERE pipeline = {literal(pipeline)} AND number = {literal(number)}"
    )


DROPPED_WINDOWS = 1000
"""Old rows of the windows table that one transaction removes at most."""


def drop_old_windows(windows: Name, pipeline: str, number: int, keep: int) -> str:
    """The oldest rows of a pipeline, of windows before the ``keep`` last ones."""
    mine = f"pipeline = {literal(pipeline)}"
    old = f"SELECT number FROM {windows} WHERE {mine} AND number <= {literal(number - keep)}"
    return f"DELETE FROM {windows} WHERE {mine} AND number IN ({old} ORDER BY number LIMIT {DROPPED_WINDOWS})"


def window_row(windows: Name, pipeline: str, number: int) -> str:
    return f"{_select_windows(windows)} WHERE pipeline = {literal(pipeline)} AND number = {literal(number)}"


def last_window(windows: Name, pipeline: str, *, but: int | None = None) -> str:
    """The row with the highest number, ``but`` left aside."""
    others = "" if but is None else f"AND number <> {literal(but)} "
    return f"{_select_windows(windows)} WHERE pipeline = {literal(pipeline)} {others}ORDER BY number DESC LIMIT 1"


def _select_windows(windows: Name) -> str:
    # Through JSON: the table may be of before there were replays, and is only read here.
    replay = "(to_jsonb(w)->>'replay')::integer"
    return f"SELECT number, ranges, written, deleted, topic_ids, {replay}, cluster_id FROM {windows} AS w"


def delete_window(target: Name, column: str, window: str) -> str:
    """The rows of one window."""
    return f"DELETE FROM {target} WHERE {quote(column)} = {literal(window)}"


def unmarked(target: Name, column: str) -> str:
    """Whether there are rows that do not say which window they are of."""
    return f"SELECT EXISTS (SELECT 1 FROM {target} WHERE {quote(column)} IS NULL)"


def create_splits(splits: Name) -> str:
    return (
        f"CREATE TABLE IF NOT EXISTS {splits} (pipeline text NOT NULL, number bigint NOT NULL, topic text NOT NULL, "
        "partition integer NOT NULL, start_offset bigint NOT NULL, end_offset bigint NOT NULL, rows bigint NOT NULL DEFAULT 0, "
        "written bigint NOT NULL DEFAULT 0, deleted bigint NOT NULL DEFAULT 0, PRIMARY KEY (pipeline, number, topic, partition, "
        "start_offset))"
    )


OWNER = "number = 0"
"""What tells the owner's row of the splits table from markers, of which windows are numbered from 1: its ``end_offset`` names the
attempt whose tasks may commit splits of the pipeline's windows."""

PUT_OFF = -1
"""Instead of a number of rows: the target refuses some of the split's. No task may commit it any more."""


class Marker(NamedTuple):
    """A split's row in the splits table: present when, and only when, its rows are in the target, or it is put off."""

    topic: str
    partition: int
    start: int
    end: int
    rows: int = 0
    written: int = 0
    deleted: int = 0

    @property
    def put_off(self) -> bool:
        return self.rows == PUT_OFF

    @property
    def text(self) -> str:
        return f"{self.topic}-{self.partition}[{self.start},{self.end})"


def claim_split(splits: Name, pipeline: str, number: int, marker: Marker) -> str:
    """Insert the split's marker."""
    values = ", ".join(literal(value) for value in (pipeline, number, *marker[:4]))
    return f"INSERT INTO {splits} (pipeline, number, topic, partition, start_offset, end_offset) VALUES ({values})"


def count_split(splits: Name, pipeline: str, number: int, marker: Marker) -> str:
    return (
        f"UPDATE {splits} SET rows = {marker.rows}, written = {marker.written}, deleted = {marker.deleted} WHERE "
        f"pipeline = {literal(pipeline)} AND number = {literal(number)} AND topic = {literal(marker.topic)} "
        f"AND partition = {literal(marker.partition)} AND start_offset = {literal(marker.start)}"
    )


def markers(splits: Name, pipeline: str, number: int) -> str:
    return (
        f"SELECT topic, partition, start_offset, end_offset, rows, written, deleted FROM {splits} "
        f"WHERE pipeline = {literal(pipeline)} AND number = {literal(number)}"
    )


def open_markers(splits: Name, windows: Name, pipeline: str, number: int) -> str:
    """Number, and marker, of splits of the pipeline's other windows that are newer than the last one applied: of windows that
    nobody has closed."""
    last = f"SELECT max(number) FROM {windows} WHERE pipeline = {literal(pipeline)}"
    return (
        f"SELECT number, topic, partition, start_offset, end_offset FROM {splits} WHERE pipeline = {literal(pipeline)} "
        f"AND number <> {literal(number)} AND number > COALESCE(({last}), 0) AND rows <> {PUT_OFF}"
    )


def own(splits: Name, pipeline: str, owner: int) -> str:
    """Make an attempt the one whose tasks may commit splits of a pipeline. Waits for tasks of the one before that are about to
    commit theirs."""
    values = ", ".join(literal(value) for value in (pipeline, 0, "", 0, 0, owner))
    return (
        f"INSERT INTO {splits} (pipeline, number, topic, partition, start_offset, end_offset) VALUES ({values}) "
        "ON CONFLICT (pipeline, number, topic, partition, start_offset) DO UPDATE SET end_offset = excluded.end_offset"
    )


def disown(splits: Name, pipeline: str, owner: int | None = None) -> str:
    """Let no task commit splits of a pipeline. Waits for those that are about to commit theirs.

    :param owner: only if this attempt is the owner.
    """
    mine = "" if owner is None else f" AND end_offset = {literal(owner)}"
    return f"DELETE FROM {splits} WHERE pipeline = {literal(pipeline)} AND {OWNER}{mine}"


def owner_of(splits: Name, pipeline: str) -> str:
    """The attempt whose tasks may commit splits: it stays the owner until the transaction that asks has ended."""
    return f"SELECT end_offset FROM {splits} WHERE pipeline = {literal(pipeline)} AND {OWNER} FOR SHARE"


def drop_old_markers(splits: Name, pipeline: str, number: int) -> str:
    """Those of earlier windows, and of splits of this one that were put off; and the owner's row."""
    old = f"number < {literal(number)} OR rows = {PUT_OFF}"
    return f"DELETE FROM {splits} WHERE pipeline = {literal(pipeline)} AND ({old})"


def drop_put_off(splits: Name, pipeline: str, number: int) -> str:
    """Let tasks try again what was put off."""
    window = f"pipeline = {literal(pipeline)} AND number = {literal(number)}"
    return f"DELETE FROM {splits} WHERE {window} AND rows = {PUT_OFF}"


def applied_since(windows: Name, pipeline: str, number: int) -> str:
    """Whether the window, or one that follows it, is applied."""
    return f"SELECT 1 FROM {windows} WHERE pipeline = {literal(pipeline)} AND number >= {literal(number)} LIMIT 1"


# --- stages -------------------------------------------------------------------------------------------------------------


def create_registry(registry: Name) -> str:
    """One attempt's list of stages: a split has at most one."""
    return (
        f"CREATE UNLOGGED TABLE {registry} (split integer PRIMARY KEY, stage text, rows bigint NOT NULL, "
        "tombstones bigint NOT NULL) WITH (autovacuum_enabled = off)"
    )


def now() -> str:
    """Seconds since the epoch, by the server's clock."""
    return "SELECT extract(epoch FROM clock_timestamp())::bigint"


def stamp(registry: Name, began: int) -> str:
    """Note on an attempt's registry when the attempt began, in seconds since the epoch."""
    return f"COMMENT ON TABLE {registry} IS {literal(str(began))}"


def abandoned_tables(schema: str, prefix: str, application: str, days: float, most: int) -> str:
    """Tables of attempts that nobody works on any more: their registry says that they began more than so many days ago, and no
    session of their pipeline is there. In the order of their names, in which an attempt's registry comes last.

    :param prefix: what the names of all stages begin with; the pipeline's key of 12 digits follows.
    :param application: what the names of sessions begin with; a blank and the key follow.
    """
    key = f"substr(c.relname, {len(prefix) + 1}, 12)"
    attempt = f"substring(c.relname FROM {literal('^' + prefix + '[0-9a-f]{12}_[0-9a-f]+_[0-9a-f]{8}_')})"
    began = "substring(pg_catalog.obj_description(oid, 'pg_class') FROM '^[0-9]{1,12}$')::bigint"
    return (
        f"WITH stages AS (SELECT c.relname, c.oid, {key} AS key, {attempt} AS attempt FROM pg_catalog.pg_class c "
        "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        f"WHERE n.nspname = {literal(schema)} AND c.relkind = 'r' AND starts_with(c.relname, {literal(prefix)}) "
        "AND pg_has_role(c.relowner, 'USAGE')), "
        "old AS (SELECT attempt FROM stages WHERE relname = attempt || 'r' "
        f"AND {began} < extract(epoch FROM clock_timestamp()) - {days * 86400:.0f}) "
        "SELECT relname FROM stages s WHERE s.attempt IN (SELECT attempt FROM old) "
        "AND NOT EXISTS (SELECT 1 FROM pg_catalog.pg_stat_activity a WHERE a.datname = current_database() "
        f"AND a.application_name = {literal(application + ' ')} || s.key) ORDER BY relname LIMIT {most:d}"
    )


def register(registry: Name, split: int, stage: str | None, rows: int, tombstones: int) -> str:
    """Writes no row when another task attempt of this split was faster."""
    values = ", ".join(literal(value) for value in (split, stage, rows, tombstones))
    return f"INSERT INTO {registry} (split, stage, rows, tombstones) VALUES ({values}) ON CONFLICT (split) DO NOTHING"


def registered(registry: Name, split: int | None = None) -> str:
    return f"SELECT split, stage, rows, tombstones FROM {registry}" + (
        "" if split is None else f" WHERE split = {literal(split)}"
    )


def create_stage(columns: Iterable[tuple[str, str]], stage: Name) -> str:
    # Autovacuum on a table that is about to be dropped would make the drop wait for it.
    return (
        f"CREATE UNLOGGED TABLE {stage} ({_definitions(columns)}) WITH (autovacuum_enabled = off, toast.autovacuum_enabled = off)"
    )


def create_temporary(columns: Iterable[tuple[str, str]], name: str) -> str:
    return f"CREATE TEMP TABLE {quote(name)} ({_definitions(columns)}) ON COMMIT DROP"


def tables_like(schema: str, prefix: str) -> str:
    """Tables whose names begin so, as far as this role may drop them; an attempt's registry comes after its stages."""
    return (
        "SELECT c.relname FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        f"WHERE n.nspname = {literal(schema)} AND c.relkind = 'r' AND starts_with(c.relname, {literal(prefix)}) "
        "AND pg_has_role(c.relowner, 'USAGE') ORDER BY c.relname"
    )


def index_offsets(stage: str, offset: str) -> str:
    """:param stage: as it stands in a statement."""
    return f"CREATE INDEX ON {stage} ({quote(offset)})"


def delete_offsets(stage: str, offset: str, gone: Iterable[int]) -> str:
    """:param stage: as it stands in a statement."""
    return f"DELETE FROM {stage} WHERE {quote(offset)} IN ({', '.join(map(literal, gone))})"


def drop(tables: Iterable[Name]) -> str:
    return f"DROP TABLE IF EXISTS {', '.join(map(str, tables))}"


def create_target(target: Name, columns: Sequence[tuple[str, str]], key: Sequence[str]) -> str:
    primary = f", PRIMARY KEY ({', '.join(map(quote, key))})" if key else ""
    return f"CREATE TABLE IF NOT EXISTS {target} ({_definitions(columns)}{primary})"


def add_columns(target: Name, columns: Iterable[tuple[str, str]], where: str = "") -> str:
    """Nullable ones.

    :param where: ``IF NOT EXISTS`` takes those that are there as they are.
    """
    add = f"ADD COLUMN {where}".strip()
    return f"ALTER TABLE {target} " + ", ".join(f"{add} {quote(name)} {kind}" for name, kind in columns)


def _definitions(columns: Iterable[tuple[str, str]]) -> str:
    return ", ".join(f"{quote(name)} {kind}" for name, kind in columns)
