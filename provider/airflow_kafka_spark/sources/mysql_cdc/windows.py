"""Windows of the log: their ends, their readers in tasks, and the chunks of a snapshot into which tables are cut.

A window is a range of the log, ``[start, end)``; coordinates are compared by file and position. ``start`` is the beginning of a
transaction. A transaction is in the window if it begins before ``end``. So each transaction is in one window, complete, wherever
windows are cut. If ``end`` is within a transaction, the marker of the window contains the end of that transaction, at which the
next window starts. If Spark has read the window, the marker does not contain it, and the log is read once more from ``start`` to
find it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import LogLost, SourceRejected, SourceUnavailable
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
from airflow_kafka_spark.sources.jdbc.mysql import fetch_rows, quote_literal
from airflow_kafka_spark.sources.mysql_cdc.options import MySqlCdcOptions
from airflow_kafka_spark.sources.mysql_cdc.tasks import binlog
from airflow_kafka_spark.sources.mysql_cdc.tasks.binlog import Transactions
from airflow_kafka_spark.sources.mysql_cdc.tasks.catalog import DIALECT, read_table_shape
from airflow_kafka_spark.sources.mysql_cdc.tasks.session import (
    FIRST,
    NEW_PIPELINE,
    LogCoordinates,
    LogServer,
    advance,
    compute_distance,
    is_mariadb,
    logs_cascades,
)
from airflow_kafka_spark.sources.mysql_cdc.tasks.snapshot import (
    format_literals,
    make_chunk_token,
    make_typed_column,
    may_rename,
    prepare_session,
)
from airflow_kafka_spark.sources.mysql_cdc.tasks.values import ValueForm
from airflow_kafka_spark.windows.report import PassProgress

if TYPE_CHECKING:
    from pymysql.connections import Connection

    from airflow_kafka_spark.sources.base import SplitReader
    from airflow_kafka_spark.sources.mysql_cdc.tasks.events import MySqlEventForm

log = logging.getLogger(__name__)

LOOKED_THROUGH_BYTES = 1 << 20
"""Maximum size in bytes of a window that is searched for changes when it is frozen. A window without changes needs no Spark."""

LAST_EVENT_BYTES = 1 << 10
"""Maximum size in bytes of the event at the end of a file, which names the next file."""

PREPARED_SECONDS = 60.0
"""Seconds that the first window, and the snapshot of a new table, wait for transactions that are prepared (XA)."""

UNDESCRIBED = ("uuid", "inet4", "inet6", "vector")
"""Types of MariaDB that the log describes as plain bytes. MySQL has one of them, which its log describes."""

_SYSTEM = "'mysql', 'information_schema', 'performance_schema', 'sys'"
"""The server's own databases, as a list in SQL."""


def begin_snapshot(
    server: LogServer, connection: Connection, form: ValueForm, names: Iterable[TableName], chunk_rows: int
) -> SnapshotState:
    """Return the state of a new snapshot.

    :param names: the tables; those that do not exist are left out.
    :param chunk_rows: number of rows of a chunk.
    """
    found = ((name, read_table_shape(server, connection, name, form)) for name in sorted(names))
    tables = tuple(TableSnapshot(name, shape.key, types=shape.types) for name, shape in found if shape is not None)
    estimates = {table.table: _estimate_rows(connection, table.table) for table in tables}
    return SnapshotState(tables, progress=PassProgress.begin(time.time(), estimates.values(), chunk_rows))


def _estimate_rows(connection: Connection, name: TableName) -> int:
    schema, table = map(quote_literal, name)
    query = f"SELECT table_rows FROM information_schema.tables WHERE table_schema = {schema} AND table_name = {table}"
    return int(fetch_rows(connection, query)[0][0] or 0)


@dataclass(kw_only=True)
class MySqlChunkPlanner(ChunkPlanner):
    """Cuts the next chunks.

    :param server: the server.
    :param connection: a session.
    :param form: the form of values.
    """

    server: LogServer
    connection: Connection
    form: ValueForm

    def __post_init__(self) -> None:
        prepare_session(self.connection)

    def make_token(self) -> dict[str, Any]:
        """Return the token of a chunk that would be read now."""
        return make_chunk_token(self.server.read_end(self.connection))

    def find_ends(self, table: TableSnapshot, most: int) -> list[Key] | None:
        """Return the last keys of the next chunks. See :meth:`ChunkPlanner.find_ends`."""
        shape = read_table_shape(self.server, self.connection, table.table, self.form)
        if shape is None:
            self._refuse_renamed(table)
            return None
        shape.refuse_other_key(table.key, table.types)
        names = [DIALECT.quote(name) for name in table.key]
        ordering, found, after = ", ".join(names), list[Key](), table.upto
        texts = ", ".join(DIALECT.make_text(make_typed_column(kind), name) for kind, name in zip(table.types, names, strict=True))

        def make_condition(key: Key | None) -> str:
            """Return the condition of the rows behind a key; "" without one."""
            if key is None:
                return ""
            return f"WHERE {DIALECT.make_after_condition(names, format_literals(table.types, key))} "

        while table.key and len(found) < most:
            query = (
                f"SELECT {texts} FROM {shape.source} {make_condition(after)}ORDER BY {ordering} LIMIT {self.chunk_rows - 1}, 1"
            )
            last = fetch_rows(self.connection, query)
            if not last:
                break
            after = tuple(str(value) for value in last[0])
            found.append(after)
        if found and not fetch_rows(self.connection, f"SELECT 1 FROM {shape.source} {make_condition(after)}LIMIT 1"):
            found.pop()  # the last chunk has as many rows as the others, and no end
        return found

    def _refuse_renamed(self, table: TableSnapshot) -> None:
        """Make sure that a table of which the catalog does not have the name was dropped.

        :raises SourceRejected: it may have another name now.
        """
        start, end = LogCoordinates.parse(self.bounds["start"]), self.server.read_end(self.connection)
        is_renamed = table.is_renamed
        for located in self.server.read_events_up_to(start, end) if start.order < end.order and not is_renamed else ():
            is_renamed = is_renamed or (located.event.kind == binlog.QUERY and may_rename(located.event.body, table.table))
            if located.end.order >= end.order:
                break
        if is_renamed:
            what = "it was renamed, and its snapshot is not complete: its other rows would never be read"
            raise SourceRejected(table.shown, what, f"Give it its name back until the snapshot is complete. {NEW_PIPELINE}")


def _get_order(coordinates: LogCoordinates) -> tuple[int, int]:
    return coordinates.order


def _parse_order(coordinates: str) -> tuple[int, int]:
    return LogCoordinates.parse(coordinates).order


@dataclass(frozen=True)
class _Cut:
    """The beginning of a window, and the log at that time.

    :param now: the end of the log.
    :param files: of the log.
    :param identity: of the server.
    :param gtid: the last GTID that was read; "" without GTIDs.
    """

    start: LogCoordinates
    now: LogCoordinates
    files: Sequence[LogCoordinates]
    identity: Mapping[str, Any]
    gtid: str


@dataclass(frozen=True)
class MySqlLogWindowPlanner:
    """Freezes windows of the log of a server.

    :param options: the source's options.
    :param server: its address and login.
    :param replicas: the replicas whose lag is checked.
    """

    options: MySqlCdcOptions
    server: LogServer
    replicas: tuple[LogServer, ...] = ()

    def freeze(self, position: Mapping[str, Any] | None, *, may_restart: bool = True) -> FrozenWindow:
        """Return the window after ``position``; see :meth:`LogWindowPlanner.freeze`."""
        if position is not None and position.get("finished"):
            return FrozenWindow((), position)
        with self.server.open_session("freezing a window of the log") as connection:
            now = self.server.read_end(connection)
            form = self._make_form(connection)
            position, start, files = self._start(connection, position, now, may_restart)
            identity = self.server.read_identity(connection)
            state = self._read_state(connection, position, form)
            known = LogCoordinates.parse(position["begun"]) if position and "begun" in position else start
            if known != start:
                start, _ = self._find_end(known, start, form)
            now = max(now, start, key=_get_order)  # the log has grown while it was searched
            at = _Cut(start, now, files, identity, str((position or {}).get("gtid", "")))
            state = state.advance_past_log(start.order, _parse_order)
            if state.tables and state.is_caught_up:
                return self._cut_chunks(connection, at, state, form)
            if self._is_finished(state):
                return FrozenWindow((), self._make_position(at, start, state, self.server.read_beginning(start)))
            start = self._make_readable(files, start)
            end = advance(files, start, self.options.max_binlog_bytes, now)
            is_exact, has_changes = end == now, compute_distance(files, start, end) > 0
            if 0 < compute_distance(files, start, end) <= LOOKED_THROUGH_BYTES:
                end, has_changes = self._find_end(start, end, form, [table.table for table in state.tables])
                is_exact = True
            after = state.advance_past_log(end.order, _parse_order)
            if not has_changes and is_exact and after.tables and after.is_caught_up:
                return self._cut_chunks(connection, replace(at, start=end, now=max(now, end, key=_get_order)), after, form)
        begun = self.server.read_beginning(start)
        of_end = self.server.read_beginning(end) if end.file != start.file and is_exact else begun
        at = replace(at, start=start)
        found = self._make_position(at, end, after, of_end)
        if not is_exact:
            found["begun"] = str(start)
        if behind := found["bytes_behind"]:
            log.info("%s bytes of the log lie after this window", f"{behind:,}")
        bounds: dict[str, Any] = {"start": str(start), "end": str(end), "log": {**identity, **begun}}
        if state.filter:
            bounds["snapshot"] = state.filter
        is_left = behind > 0 or bool(after.tables)
        return FrozenWindow((bounds,) if has_changes else (), found, remaining=is_left)

    def _start(
        self, connection: Connection, position: Mapping[str, Any] | None, now: LogCoordinates, may_restart: bool
    ) -> tuple[Mapping[str, Any] | None, LogCoordinates, list[LogCoordinates]]:
        """Return the position, the coordinates at which the window begins, and the files of the log.

        The position is None if the server no longer has the log after it and the tables are read again.

        :raises LogLost: the server no longer has the log, and the snapshot may not begin again: ``snapshot`` is not
            ``when_needed``, or ``may_restart`` is False.
        :raises SourceUnavailable: a transaction stays prepared (XA) at the beginning of the first window.
        """
        if position is not None:
            start = LogCoordinates.parse(position["place"])
            known = LogCoordinates.parse(position["begun"]) if "begun" in position else start
            try:
                files = self.server.refuse_other(connection, known, dict(position["log"]))
                self._refuse_other_rows(position, now)
                return position, start, files
            except LogLost as error:
                if self.options.snapshot != "when_needed" or not may_restart:
                    raise
                log.warning("All tables are read again: %s", error)
        start = self._find_first(connection, now)
        if start == now:
            self._wait_for_prepared(connection)
        return None, start, self.server.refuse_other(connection, start, {})

    def _wait_for_prepared(self, connection: Connection) -> None:
        """Wait until the transactions that are prepared (XA) have ended. The log has their changes up to here, and only their
        COMMIT later. So they are before the first window, and in all chunks of a snapshot.

        :raises SourceUnavailable: one of them does not end for :data:`PREPARED_SECONDS`.
        """
        import pymysql

        try:
            prepared = set(fetch_rows(connection, "XA RECOVER"))
            deadline = time.monotonic() + PREPARED_SECONDS
            while prepared := prepared.intersection(fetch_rows(connection, "XA RECOVER")):
                if time.monotonic() > deadline:
                    name = min(prepared)[-1]
                    shown = name.decode("utf-8", "replace") if isinstance(name, bytes) else name
                    what = f"the transaction `{shown}` is prepared (XA), and the log has its changes already"
                    raise SourceUnavailable(self.server.where, "beginning to read the log", f"{what}: commit it, or roll it back")
                time.sleep(0.05)
        except pymysql.Error:
            return  # MySQL tells only users with XA_RECOVER_ADMIN

    def _refuse_other_rows(self, position: Mapping[str, Any], now: LogCoordinates) -> None:
        """Make sure that the log goes beyond the chunks of rows that are published.

        :param now: the end of the log.
        :raises LogLost: the log ends before them.
        """
        behind = SnapshotState.from_json(position).behind
        if behind and now.order < _parse_order(behind):
            found = f"its log ends at {now}, before {behind}, where rows were read: the server lost the end of its log in a crash"
            raise LogLost(self.server.where, f"{found}, or a backup was restored", f"Set `sync_binlog = 1`. {NEW_PIPELINE}")

    def _is_finished(self, state: SnapshotState) -> bool:
        return self.options.snapshot == "only" and not state.tables

    def _make_position(
        self, at: _Cut, coordinates: LogCoordinates, state: SnapshotState, begun: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the position after a window.

        :param coordinates: the end of the window.
        :param begun: the beginning of the file of these coordinates, or of ``begun`` of the position.
        """
        behind, gtid = compute_distance(at.files, coordinates, at.now), {"gtid": at.gtid} if at.gtid else {}
        found = {"place": str(coordinates), "log": {**at.identity, **begun}, "bytes_behind": behind, **gtid}
        known = {} if self.options.snapshot == "never" else note_tables(self._named)
        return {**found, **known, **state.to_json(), **({"finished": True} if self._is_finished(state) else {})}

    @property
    def _named(self) -> frozenset[TableName] | None:
        """Database and name of each table of ``tables``; None for all of the connection's database."""
        given = self.options.tables
        return None if given is None else frozenset(parse_table_name(name, self.server.server.database) for name in given)

    # --- snapshots ---

    def _read_state(self, connection: Connection, position: Mapping[str, Any] | None, form: MySqlEventForm) -> SnapshotState:
        """Return the state of the snapshot in a position, for the tables that are captured now."""
        state = SnapshotState.from_json(position or {}).keep_only(lambda table: form.takes(table.table))
        if self.options.snapshot == "never":
            return state
        if position is None:
            return self._begin_snapshot(connection, form)
        if added := find_added_tables(position, form.tables):
            self._wait_for_prepared(connection)
            log.info("The rows of tables that were added are read: %s", ", ".join(sorted(map(".".join, added))))
            rows = self.options.snapshot_chunk_rows
            return state.add(begin_snapshot(self.server, connection, form.values, added, rows))
        return state

    def _begin_snapshot(self, connection: Connection, form: MySqlEventForm) -> SnapshotState:
        """Return the state of a new snapshot."""
        names = form.tables
        if names is None:
            query = "SELECT table_name FROM information_schema.tables WHERE table_type = 'BASE TABLE' AND table_schema = "
            names = frozenset(
                (form.database, str(row[0])) for row in fetch_rows(connection, query + quote_literal(form.database))
            )
        return begin_snapshot(self.server, connection, form.values, names, self.options.snapshot_chunk_rows)

    def _cut_chunks(self, connection: Connection, at: _Cut, state: SnapshotState, form: MySqlEventForm) -> FrozenWindow:
        """Return a window of the next chunks of the snapshot. The position in the log does not move."""
        begun = self.server.read_beginning(at.start)
        bounds = {"start": str(at.start), "log": {**at.identity, **begun}}
        chunks = MySqlChunkPlanner(
            most=self.options.snapshot_chunks_per_window,
            bounds=bounds,
            server=self.server,
            connection=connection,
            chunk_rows=self.options.snapshot_chunk_rows,
            form=form.values,
        )
        state = chunks.cut(state)
        return FrozenWindow(tuple(chunks.splits), self._make_position(at, at.start, state, begun), remaining=True)

    def _find_first(self, connection: Connection, now: LogCoordinates) -> LogCoordinates:
        """Return the coordinates at which the first window begins.

        :raises SourceRejected: the log does not have the coordinates that the options name.
        """
        given = self.options.starting_position
        if given == "latest":
            return now
        if given == "earliest":
            return LogCoordinates(self.server.list_files(connection)[0].file, FIRST)
        coordinates = LogCoordinates.parse(given)
        if coordinates.order > now.order:
            found = f"`starting_position` is {coordinates}, and the log ends at {now}"
            raise SourceRejected(self.server.where, found, "Correct it")
        return coordinates

    def _make_readable(self, files: Sequence[LogCoordinates], start: LogCoordinates) -> LogCoordinates:
        """Return coordinates at which the server can begin to send its log. It accepts positions of 32 bits.

        After a transaction that is so long, the server begins a new file.

        :raises SourceRejected: the file contains further transactions after it.
        """
        if start.position < 1 << 32:
            return start
        size = next((file.position for file in files if file.file == start.file), start.position)
        behind = next((file for file in files if file.order > (start.order[0], size)), None)
        if behind is not None and size - start.position <= LAST_EVENT_BYTES:
            return LogCoordinates(behind.file, FIRST)
        raise SourceRejected(self.server.where, f"it sends no log from {start} on, which is beyond 4 GiB", NEW_PIPELINE)

    def _find_end(
        self, start: LogCoordinates, end: LogCoordinates, form: MySqlEventForm, tables: Sequence[TableName] = ()
    ) -> tuple[LogCoordinates, bool]:
        """Return the first coordinates from ``end`` on at which no transaction is open, and whether a captured table has changes
        before them.

        :param tables: tables whose snapshot is not complete.
        :raises SourceUnavailable: the server does not send its log so far.
        """
        transactions, has_changes, coordinates = Transactions(), False, start
        for located in self.server.read_events_up_to(start, end):
            event, coordinates = located.event, located.end
            transactions.enter(event)
            if event.kind == binlog.TABLE_MAP:
                _, database, name = binlog.parse_table_names(event.body)
                has_changes = has_changes or form.takes((database, name))
            elif event.kind in (binlog.QUERY, *binlog.UNREADABLE):
                has_changes = has_changes or event.kind != binlog.QUERY or self._concerns(event.body, form, tables)
            if located.reaches(end) and not transactions.is_open:
                break
        return coordinates, has_changes

    def _concerns(self, body: bytes, form: MySqlEventForm, tables: Sequence[TableName]) -> bool:
        """Return True if a statement may be one that a reader of the window publishes, notes or refuses."""
        from airflow_kafka_spark.sources.mysql_cdc.tasks.events import find_refusal, find_truncated_table

        is_published = find_truncated_table(body, form) is not None or bool(find_refusal(body, form))
        return is_published or any(may_rename(body, table) for table in tables)

    def compute_position_after(
        self, splits: Sequence[Mapping[str, Any]], position: Mapping[str, Any], tokens: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        """Return the position after a window: the end of its last transaction. See :meth:`RowSource.compute_position_after`."""
        found = dict(advance_snapshot(position, splits, tokens, _parse_order))
        if not tokens or "end" not in tokens[0]:
            return found
        token = tokens[0]
        coordinates, planned = LogCoordinates.parse(token["end"]), LogCoordinates.parse(position["place"])
        if coordinates.file == planned.file:
            found["bytes_behind"] = max(0, position["bytes_behind"] - (coordinates.position - planned.position))
        found["place"] = str(coordinates)
        found["log"] = {**position["log"], "created": token["created"] or position["log"]["created"]}
        if coordinates.file != LogCoordinates.parse(position.get("begun", position["place"])).file:
            found["log"].pop("head", None)
        found.pop("begun", None)
        if token.get("gtid"):
            found["gtid"] = token["gtid"]
        return found

    def count_bytes_behind(self, position: Mapping[str, Any]) -> int:
        """Return the bytes of the log after a window. See :meth:`RowSource.count_bytes_behind`."""
        if position.get("finished"):
            return 0
        start = LogCoordinates.parse(position["place"])
        known = LogCoordinates.parse(position.get("begun", position["place"]))
        with self.server.open_session("reading the length of the log") as connection:
            now = self.server.read_end(connection)
            return compute_distance(self.server.refuse_other(connection, known, dict(position["log"])), start, now)

    def make_reader(self, splits: Sequence[Mapping[str, Any]], needed: Sequence[str] | None) -> SplitReader:
        """Return the reader with which tasks read these splits."""
        from airflow_kafka_spark.sources.cdc.tasks.reader import list_needed_columns
        from airflow_kafka_spark.sources.mysql_cdc.tasks.read import MySqlLogReader
        from airflow_kafka_spark.sources.mysql_cdc.tasks.session import ReplicaLag

        with self.server.open_session("reading the catalog") as connection:
            form = self._make_form(connection)
        limit = ReplicaLag(self.replicas, self.options.max_replica_lag or 0)
        return MySqlLogReader(tuple(splits), list_needed_columns(needed), self.server, form, limit)

    def _make_form(self, connection: Connection) -> MySqlEventForm:
        """Return the form of events, with the facts that only the catalog has."""
        from airflow_kafka_spark.sources.mysql_cdc.tasks.events import MySqlEventForm
        from airflow_kafka_spark.sources.mysql_cdc.tasks.values import ValueForm

        given, database = self.options, self.server.server.database
        values = ValueForm(
            decimals=given.decimal_handling_mode,
            times=given.time_precision_mode,
            unsigned=given.bigint_unsigned_handling_mode,
            zero_dates=given.zero_date_handling_mode,
            charsets=read_charsets(connection),
        )
        return MySqlEventForm(
            prefix=given.topic_prefix,
            keys={parse_table_name(table, database): tuple(columns) for table, columns in given.message_key_columns.items()},
            schemas=given.schemas_enable,
            tombstones=has_tombstones(given),
            skipped=list_skipped_operations(given),
            unwrap=given.unwrap,
            transactions=given.provide_transaction_metadata,
            database=database,
            tables=self._named,
            values=values,
            unreadable=read_undescribed_columns(connection),
            is_mariadb=is_mariadb(connection),
            refuses_cascades=not given.ignore_cascades and not logs_cascades(connection),
        )


def read_charsets(connection: Connection) -> dict[int, str]:
    """Return the character set of each collation, by its number."""
    found = fetch_rows(connection, "SELECT id, character_set_name FROM information_schema.collations WHERE id IS NOT NULL")
    if is_mariadb(connection):
        names = fetch_rows(
            connection,
            "SELECT column_name FROM information_schema.columns WHERE table_schema = 'information_schema' "
            "AND table_name = 'COLLATION_CHARACTER_SET_APPLICABILITY'",
        )
        if any(str(row[0]).upper() == "ID" for row in names):
            query = "SELECT id, character_set_name FROM information_schema.collation_character_set_applicability"
            found += fetch_rows(connection, query)
    return {int(number): str(name) for number, name in found}


def read_undescribed_columns(connection: Connection) -> dict[tuple[str, str], dict[str, str]]:
    """Return per table the columns whose types the log describes as plain bytes, and these types."""
    if not is_mariadb(connection):
        return {}
    kinds = ", ".join(f"'{kind}'" for kind in UNDESCRIBED)
    found: dict[tuple[str, str], dict[str, str]] = {}
    for database, table, column, kind in fetch_rows(
        connection,
        "SELECT table_schema, table_name, column_name, data_type FROM information_schema.columns "
        f"WHERE data_type IN ({kinds}) AND table_schema NOT IN ({_SYSTEM})",
    ):
        found.setdefault((str(database), str(table)), {})[str(column)] = str(kind)
    return found
