"""Windows of the log: their ends, the slot, their readers in tasks, and the chunks of a snapshot into which tables are cut.

A window is a range of LSNs, ``[start, end)``. A transaction is in the window that holds the LSN at which the record of its commit
begins. This is the server's own rule: it sends the transactions whose commit begins at the slot's LSN or later. So
each transaction is in one window, complete, wherever windows are cut; one that is open at the end is in a later window.

The slot is advanced to the end of a window only after its COMPLETE record: by the attempt itself, or, if the attempt has died,
before the next window is frozen. So until a window is complete each attempt reads the same changes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import KafkaSparkError, LogLost, SourceUnavailable
from airflow_kafka_spark.hooks.databases import PostgresServer, fetch_rows, prefer_indexes, quote
from airflow_kafka_spark.sources.base import FrozenWindow
from airflow_kafka_spark.sources.cdc.options import has_tombstones, list_skipped_operations, parse_table_name
from airflow_kafka_spark.sources.cdc.snapshot import (
    ChunkPlanner,
    SnapshotState,
    advance_snapshot,
    find_added_tables,
    note_tables,
)
from airflow_kafka_spark.sources.cdc.tasks.events import TableName
from airflow_kafka_spark.sources.cdc.tasks.snapshot import Key, TableSnapshot
from airflow_kafka_spark.sources.postgres_cdc.options import DEFAULT_SCHEMA, PostgresCdcOptions
from airflow_kafka_spark.sources.postgres_cdc.tasks.pgoutput import BeginMessage
from airflow_kafka_spark.sources.postgres_cdc.tasks.session import (
    SlotServer,
    SlotState,
    format_lsn,
    format_publication_names,
    parse_lsn,
    read_flushed_lsn,
)
from airflow_kafka_spark.sources.postgres_cdc.tasks.snapshot import make_snapshot_token, read_table_shape, refuse_renamed
from airflow_kafka_spark.windows.report import PassProgress

if TYPE_CHECKING:
    import psycopg

    from airflow_kafka_spark.sources.base import SplitReader
    from airflow_kafka_spark.sources.postgres_cdc.tasks.events import KeyedTable


def begin_snapshot(connection: psycopg.Connection[Any], options: PostgresCdcOptions, names: Iterable[TableName]) -> SnapshotState:
    """Return the state of a new snapshot.

    :param names: the tables; those that do not exist are left out.
    """
    tables, estimates = [], {}
    for name in sorted(names):
        shape = read_table_shape(connection, options.publication, name)
        if shape is not None:
            tables.append(TableSnapshot(name, shape.key_names, types=shape.orders, id=shape.relation.oid))
            estimates[name] = _estimate_rows(connection, shape.source)
    return SnapshotState(tuple(tables), progress=PassProgress.begin(time.time(), estimates.values(), options.snapshot_chunk_rows))


def _read_wanted(connection: psycopg.Connection[Any], options: PostgresCdcOptions) -> frozenset[TableName]:
    """Return the tables that are captured."""
    if options.named_tables is not None:
        return options.named_tables
    found = connection.execute(
        "SELECT schemaname, tablename FROM pg_catalog.pg_publication_tables WHERE pubname = %s", [options.publication]
    ).fetchall()
    return frozenset((schema, table) for schema, table in found)


def _leave_out_unwanted(
    connection: psycopg.Connection[Any], options: PostgresCdcOptions, snapshot: SnapshotState
) -> SnapshotState:
    """Return the snapshot without the tables that are not captured any more.

    :raises SourceRejected: a table of the publication has another name than when its snapshot was begun.
    """
    if not snapshot.tables:
        return snapshot
    wanted = _read_wanted(connection, options)
    if options.named_tables is None:
        for table in snapshot.tables:
            if table.table not in wanted:
                refuse_renamed(connection, table)
    return snapshot.keep_only(lambda table: table.table in wanted)


def _read_table_ids(connection: psycopg.Connection[Any], names: Sequence[TableName]) -> dict[TableName, int]:
    """Return the OIDs of the tables that have these names."""
    found = connection.execute(
        "SELECT n.nspname, c.relname, c.oid::bigint FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n "
        "ON n.oid = c.relnamespace WHERE (n.nspname, c.relname) IN (SELECT * FROM unnest(%s::text[], %s::text[]))",
        [[schema for schema, _ in names], [table for _, table in names]],
    ).fetchall()
    return {(schema, table): oid for schema, table, oid in found}


_OLDEST_CHANGE = (
    "SELECT 'session ' || pid || coalesce(' of role ' || usename, ''), "
    "extract(epoch FROM pg_catalog.clock_timestamp() - xact_start)::int FROM pg_catalog.pg_stat_activity "
    "WHERE backend_xid IS NOT NULL UNION ALL SELECT 'prepared transaction ' || gid, "
    "extract(epoch FROM pg_catalog.clock_timestamp() - prepared)::int FROM pg_catalog.pg_prepared_xacts "
    "ORDER BY 2 DESC NULLS LAST LIMIT 1"
)
"""Returns the transaction that has made changes and is open for the longest time, in seconds."""


def _describe_open(connection: psycopg.Connection[Any], error: Exception) -> str:
    """Return a text that names the transaction for which the creation of a slot waits, or the error if it has ended."""
    for who, seconds in fetch_rows(connection, _OLDEST_CHANGE):
        since = f" for {seconds:,} s" if seconds is not None else ""
        return f"it waits until all transactions that have made changes have ended, and {who} is open{since}"
    return str(error)


def _estimate_rows(connection: psycopg.Connection[Any], source: str) -> int:
    found = connection.execute(f"EXPLAIN (FORMAT JSON) SELECT 1 FROM {source}".encode()).fetchone()
    assert found is not None
    return int(found[0][0]["Plan"]["Plan Rows"])


@dataclass(kw_only=True)
class PostgresChunkPlanner(ChunkPlanner):
    """Cuts the next chunks.

    :param connection: a session.
    :param options: the source's options.
    """

    connection: psycopg.Connection[Any]
    options: PostgresCdcOptions

    def make_token(self) -> dict[str, Any]:
        """Return the token of a chunk that would be read now."""
        return make_snapshot_token(self.connection)

    def find_ends(self, table: TableSnapshot, most: int) -> list[Key] | None:
        """Return the last keys of the next chunks. See :meth:`ChunkPlanner.find_ends`."""
        shape = read_table_shape(self.connection, self.options.publication, table.table)
        if shape is None:
            refuse_renamed(self.connection, table)
            return None
        shape.refuse_other_key(table.key, table.types)
        if not table.key:
            return []
        texts = ", ".join(f"{quote(name)}::text" for name in table.key)
        after, found = table.upto, list[Key]()
        with self.connection.transaction():
            fetch_rows(self.connection, prefer_indexes(is_local=True))
            while len(found) < most:
                where = f"WHERE {shape.compare_key('>', after)} " if after is not None else ""
                row = f"SELECT {shape.ordering} FROM {shape.source} {where}ORDER BY {shape.ordering}"
                last = fetch_rows(self.connection, f"SELECT {texts} FROM ({row} LIMIT 1 OFFSET {self.chunk_rows - 1}) AS k")
                if not last:
                    break
                after = tuple(last[0])
                found.append(after)
            behind = f"SELECT 1 FROM {shape.source} WHERE {shape.compare_key('>', after)} LIMIT 1" if after is not None else ""
            if found and not fetch_rows(self.connection, behind):
                found.pop()  # the last chunk has as many rows as the others, and no end
        return found


log = logging.getLogger(__name__)

CREATE_SECONDS = 60
"""Seconds that a new slot, and the snapshot of a new table, may wait for the transactions that are open."""

READ_OPEN = (
    "SELECT pg_catalog.txid_snapshot_xmin(s), pg_catalog.txid_snapshot_xmax(s) FROM pg_catalog.txid_current_snapshot() AS s"
)
"""Returns the oldest transaction that is open, and the first one that has not begun."""


@dataclass(frozen=True)
class PostgresLogWindowPlanner:
    """Freezes windows of the log of one slot.

    :param options: the source's options.
    :param server: host, database and login.
    """

    options: PostgresCdcOptions
    server: PostgresServer

    @property
    def slot(self) -> SlotServer:
        """The server and its slot."""
        return SlotServer(self.server, self.options.slot)

    def freeze(self, position: Mapping[str, Any] | None, *, may_restart: bool = True) -> FrozenWindow:
        """Return the window after ``position``; see :meth:`LogWindowPlanner.freeze`."""
        slot = self.slot
        with slot.open_session("freezing a window of the log") as connection:
            if position is not None and position.get("finished"):
                self._drop_slot(connection, slot.read_state(connection))
                return FrozenWindow((), position)
            position = self._find_usable_position(connection, position, may_restart)
            if position is None:
                self._create_slot(connection)
                start = slot.refuse_other(connection, 2**64, {}).confirmed
                snapshot = SnapshotState()
                if self.options.snapshot != "never":
                    snapshot = begin_snapshot(connection, self.options, _read_wanted(connection, self.options))
            else:
                start, snapshot = parse_lsn(position["lsn"]), SnapshotState.from_json(position)
                snapshot = _leave_out_unwanted(connection, self.options, snapshot)
                snapshot = self._begin_exchanged_again(connection, snapshot)
                if self.options.snapshot != "never":
                    snapshot = snapshot.add(self._begin_added(connection, position))
            slot.release(connection)
            self._advance(connection, start)
            flushed, identity = read_flushed_lsn(connection), slot.read_identity(connection)
            if position is not None and "last" in position["log"]:
                identity["last"] = position["log"]["last"]
            if snapshot.tables and snapshot.is_caught_up:
                return self._cut_chunks(connection, start, flushed, identity, snapshot)
            first = self._find_first_commit(connection, flushed)
            if first is None and snapshot.tables:
                start, snapshot = flushed, snapshot.advance_past_log(flushed, parse_lsn)
                if snapshot.tables and snapshot.is_caught_up:
                    return self._cut_chunks(connection, start, flushed, identity, snapshot)
        return self._make_log_window(start, flushed, first, identity, snapshot)

    def _begin_added(self, connection: psycopg.Connection[Any], position: Mapping[str, Any]) -> SnapshotState:
        """Return the state of a snapshot of the tables that were added to the options. See :meth:`_begin_new`."""
        added = find_added_tables(position, self.options.named_tables)
        if not added:
            return SnapshotState()
        log.info("The rows of tables that were added are read: %s", ", ".join(sorted(map(".".join, added))))
        return self._begin_new(connection, added)

    def _begin_exchanged_again(self, connection: psycopg.Connection[Any], snapshot: SnapshotState) -> SnapshotState:
        """Return the snapshot with the tables from their beginning whose names other tables of the publication have now. See
        :meth:`_begin_new`.

        Events of the tables that had these names may be about rows that are published, so that none is left out. They come
        before the rows of the new tables: no chunk of these is read before the log has caught up.
        """
        if not snapshot.tables:
            return snapshot
        ids = _read_table_ids(connection, [table.table for table in snapshot.tables])
        exchanged = {table.table for table in snapshot.tables if table.id and ids.get(table.table, table.id) != table.id}
        again = self._begin_new(connection, exchanged).tables if exchanged else ()
        if not again:
            return snapshot
        shown = ", ".join(table.shown for table in again)
        log.warning("Other tables have these names now, and are read from their beginning: %s", shown)
        kept = tuple(table for table in snapshot.tables if table.table not in {other.table for other in again})
        ends = [read_flushed_lsn(connection), *([parse_lsn(snapshot.behind)] if snapshot.behind else [])]
        return replace(snapshot, tables=(*kept, *again), behind=format_lsn(max(ends)), repeats=True)

    def _begin_new(self, connection: psycopg.Connection[Any], names: Iterable[TableName]) -> SnapshotState:
        """Return the state of a snapshot of tables that may be new in the publication.

        :raises SourceUnavailable: a transaction stays open that may have changed such a table before the publication had it: the
            log would not have that change, and a chunk that is read now would not include it.
        """
        deadline, open_now = time.monotonic() + CREATE_SECONDS, fetch_rows(connection, READ_OPEN)[0]
        while (oldest := fetch_rows(connection, READ_OPEN)[0][0]) < open_now[1]:
            if time.monotonic() > deadline:
                detail = f"transaction {oldest} is open for {CREATE_SECONDS} s"
                raise SourceUnavailable(self.server.where, "waiting for transactions that may have changed a new table", detail)
            time.sleep(0.05)
        return begin_snapshot(connection, self.options, names)

    def _find_usable_position(
        self, connection: psycopg.Connection[Any], position: Mapping[str, Any] | None, may_restart: bool
    ) -> Mapping[str, Any] | None:
        """Return the position if the slot has the log after it; None if the snapshot has to begin, or to begin again.

        :raises LogLost: the slot does not have that log, and the snapshot may not begin again: ``snapshot`` is not
            ``when_needed``, or ``may_restart`` is False.
        """
        start, log_of = (parse_lsn(position["lsn"]), dict(position["log"])) if position else (2**64, {})
        found = self.slot.read_state(connection)
        try:
            if position is not None or found is not None:
                state = self.slot.refuse_other(connection, start, log_of)
                self.slot.refuse_other_rows(connection, SnapshotState.from_json(position or {}).behind)
                self.slot.release(connection)
                publication = format_publication_names(self.options.publication)
                self.slot.refuse_other_history(connection, publication, state, start, log_of)
        except LogLost as error:
            if self.options.snapshot != "when_needed" or not may_restart:
                raise
            log.warning("All tables are read again: %s", error)
            self._drop_slot(connection, found)
            return None
        return position

    def _cut_chunks(
        self, connection: psycopg.Connection[Any], start: int, flushed: int, identity: Mapping[str, Any], snapshot: SnapshotState
    ) -> FrozenWindow:
        """Return a window of the next chunks of the snapshot. The position in the log does not move."""
        bounds = {"start": format_lsn(start), "log": dict(identity)}
        most = self.options.snapshot_chunks_per_window
        chunks = PostgresChunkPlanner(
            most=most,
            chunk_rows=self.options.snapshot_chunk_rows,
            bounds=bounds,
            connection=connection,
            options=self.options,
        )
        snapshot = chunks.cut(snapshot)
        return FrozenWindow(tuple(chunks.splits), self._make_position(start, flushed, identity, snapshot), remaining=True)

    def _make_log_window(
        self, start: int, flushed: int, first: int | None, identity: Mapping[str, Any], snapshot: SnapshotState
    ) -> FrozenWindow:
        """Return a window of the log.

        :param first: the LSN of the first commit; None if no transaction was committed, so that the window has no splits.
        """
        end = flushed
        if first is not None:
            # A window has at least one transaction, so that windows always make progress.
            end = min(flushed, max(start + self.options.max_wal_bytes, first + 1))
        if first is not None:
            # A task will say which transaction is the last one.
            identity = {name: value for name, value in identity.items() if name != "last"}
        bounds: dict[str, Any] = {"start": format_lsn(start), "end": format_lsn(end), "log": dict(identity)}
        if snapshot.filter:
            bounds["snapshot"] = snapshot.filter
        if behind := flushed - end:
            log.info("%s bytes of the log lie after this window", f"{behind:,}")
        after = snapshot.advance_past_log(end, parse_lsn)
        remaining = behind > 0 or bool(after.tables)
        return FrozenWindow(
            (bounds,) if first is not None else (), self._make_position(end, flushed, identity, after), remaining=remaining
        )

    def _make_position(self, lsn: int, flushed: int, identity: Mapping[str, Any], snapshot: SnapshotState) -> dict[str, Any]:
        behind = flushed - lsn
        known = {} if self.options.snapshot == "never" else note_tables(self.options.named_tables)
        position = {"lsn": format_lsn(lsn), "log": dict(identity), "bytes_behind": behind, **known, **snapshot.to_json()}
        return {**position, "finished": True} if self.options.snapshot == "only" and not snapshot.tables else position

    def compute_position_after(
        self, splits: Sequence[Mapping[str, Any]], position: Mapping[str, Any], tokens: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Return the position behind a window, with the snapshots of its chunks, or with the last transaction of a window of the
        log. See :meth:`RowSource.compute_position_after`."""
        found = advance_snapshot(position, splits, tokens, parse_lsn)
        last = tokens[0].get("last") if tokens else None
        return {**found, "log": {**found["log"], "last": last}} if last else found

    def count_bytes_behind(self, position: Mapping[str, Any]) -> int:
        """Return the bytes of the log after a window. See :meth:`RowSource.count_bytes_behind`."""
        if position.get("finished"):
            return 0
        start = parse_lsn(position["lsn"])
        with self.slot.open_session("reading the length of the log") as connection:
            self.slot.refuse_other(connection, start, dict(position["log"]))
            return max(0, read_flushed_lsn(connection) - start)

    def finish_window(self, position: Mapping[str, Any]) -> None:
        """Advance the slot to the end of a complete window. A failure is only logged: the next window does it."""
        start = parse_lsn(position["lsn"])
        faults.reached("cdc.advance")
        try:
            with self.slot.open_session("advancing the slot") as connection:
                if position.get("finished"):
                    self._drop_slot(connection, self.slot.read_state(connection))
                    return
                self.slot.refuse_other(connection, start, dict(position["log"]))
                self.slot.release(connection)
                self._advance(connection, start)
        except KafkaSparkError as error:
            log.warning("The slot `%s` is not advanced before the next window: %s", self.options.slot, error)

    def _create_slot(self, connection: psycopg.Connection[Any]) -> None:
        """Create the slot if it is missing."""
        if self.slot.read_state(connection) is not None:
            return
        from psycopg.errors import QueryCanceled

        connection.execute(f"SET statement_timeout = '{CREATE_SECONDS}s'")
        try:
            connection.execute(
                "SELECT pg_catalog.pg_create_logical_replication_slot(%s::name, 'pgoutput'::name)", [self.options.slot]
            )
        except QueryCanceled as error:
            raise SourceUnavailable(self.server.where, "creating the slot", _describe_open(connection, error)) from None
        connection.execute("SET statement_timeout = 0")
        log.info("The slot `%s` is created: windows begin here", self.options.slot)

    def _drop_slot(self, connection: psycopg.Connection[Any], found: SlotState | None) -> None:
        """Drop the slot, whose log is not needed or not complete any more, if it is there.

        :param found: the slot as it was when that was decided. Meanwhile a newer attempt may have created another slot of this
            name, at a later LSN, which is kept.
        """
        if found is None:
            return
        self.slot.release(connection)
        dropped = connection.execute(
            "SELECT pg_catalog.pg_drop_replication_slot(slot_name) FROM pg_catalog.pg_replication_slots "
            "WHERE slot_name = %s AND coalesce(confirmed_flush_lsn, '0/0') = %s::pg_lsn",
            [self.options.slot, format_lsn(found.confirmed)],
        ).fetchall()
        if dropped:
            log.info("The slot `%s` is dropped", self.options.slot)

    def _advance(self, connection: psycopg.Connection[Any], to: int) -> None:
        """Advance the slot; never backwards."""
        state = self.slot.read_state(connection)
        if state is not None and state.confirmed < to:
            connection.execute(
                "SELECT pg_catalog.pg_replication_slot_advance(%s::name, %s::pg_lsn)", [self.options.slot, format_lsn(to)]
            )

    def _find_first_commit(self, connection: psycopg.Connection[Any], end: int) -> int | None:
        """Return the LSN of the commit of the first transaction with changes before ``end``; None without such a transaction.

        Before PostgreSQL 15 the server names transactions without changes of published tables, too.
        """
        from airflow_kafka_spark.sources.postgres_cdc.tasks.read import decode_message

        refuse_missing_publication = self.slot.watch_publication(connection, self.options.publication)
        found = connection.execute(
            "SELECT (lsn - '0/0')::bigint, data FROM pg_catalog.pg_logical_slot_peek_binary_changes(%s, %s::pg_lsn, 1, "
            "'proto_version', '1', 'publication_names', %s) LIMIT 1",
            [self.options.slot, format_lsn(end), format_publication_names(self.options.publication)],
            binary=True,
        ).fetchone()
        refuse_missing_publication()
        if found is None:
            return None
        begin = decode_message(self.server.where, *found)
        assert isinstance(begin, BeginMessage), begin
        return begin.commit_lsn if begin.commit_lsn < end else None

    def make_reader(self, splits: Sequence[Mapping[str, Any]], needed: Sequence[str] | None) -> SplitReader:
        """Return the reader with which tasks read these splits."""
        from airflow_kafka_spark.sources.cdc.tasks.reader import list_needed_columns
        from airflow_kafka_spark.sources.postgres_cdc.tasks.events import PostgresEventForm
        from airflow_kafka_spark.sources.postgres_cdc.tasks.read import PostgresLogReader

        given = self.options
        keys = {parse_table_name(table, DEFAULT_SCHEMA): tuple(columns) for table, columns in given.message_key_columns.items()}
        with self.slot.open_session("reading the catalog") as connection:
            primary_keys, keyed = read_primary_keys(connection, given.publication), read_keyed_tables(connection, keys)
        form = PostgresEventForm(
            prefix=given.topic_prefix,
            database=self.server.database,
            tables=given.named_tables,
            keys=keys,
            primary_keys=primary_keys,
            keyed=keyed,
            schemas=given.schemas_enable,
            tombstones=has_tombstones(given),
            skipped=list_skipped_operations(given),
            unwrap=given.unwrap,
            transactions=given.provide_transaction_metadata,
            placeholder=given.unavailable_value_placeholder,
            decimals=given.decimal_handling_mode,
            times=given.time_precision_mode,
        )
        lag = given.max_replica_lag
        return PostgresLogReader(tuple(splits), list_needed_columns(needed), self.slot, given.publication, form, lag)


def read_keyed_tables(connection: psycopg.Connection[Any], names: Iterable[TableName]) -> dict[TableName, KeyedTable]:
    """Return what is known of tables whose key the options name."""
    from airflow_kafka_spark.sources.postgres_cdc.tasks.events import KeyedTable

    names = list(names)
    if not names:
        return {}
    found = connection.execute(
        "SELECT n.nspname, c.relname, c.relkind = 'p', coalesce(array_agg(a.attname::text) FILTER (WHERE a.attnotnull), '{}') "
        "FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        "JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped "
        "WHERE (n.nspname, c.relname) IN (SELECT * FROM unnest(%s::text[], %s::text[])) GROUP BY c.oid, 1, 2",
        [[schema for schema, _ in names], [table for _, table in names]],
    ).fetchall()
    return {(schema, table): KeyedTable(is_partitioned, frozenset(columns)) for schema, table, is_partitioned, columns in found}


def read_primary_keys(connection: psycopg.Connection[Any], publication: str) -> dict[TableName, tuple[str, ...]]:
    """Return the columns of primary keys of a publication's tables, in their order."""
    found = connection.execute(
        "SELECT n.nspname, c.relname, array_agg(a.attname::text ORDER BY k.position) FROM pg_catalog.pg_class c "
        "JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace "
        "JOIN pg_catalog.pg_index i ON i.indrelid = c.oid AND i.indisprimary AND i.indimmediate "
        "CROSS JOIN unnest((i.indkey::int2[])[0:i.indnkeyatts - 1]) WITH ORDINALITY AS k(number, position) "
        "JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum = k.number "
        "WHERE (n.nspname, c.relname) IN (SELECT p.schemaname, p.tablename FROM pg_catalog.pg_publication_tables p "
        "WHERE p.pubname = %s) GROUP BY 1, 2",
        [publication],
    ).fetchall()
    return {(schema, table): tuple(columns) for schema, table, columns in found}
