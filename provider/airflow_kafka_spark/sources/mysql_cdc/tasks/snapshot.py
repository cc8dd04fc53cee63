"""Chunks of a table's snapshot: how they are opened, their coordinates in the log, and the chunks of keys of the log.

A chunk is read in ``START TRANSACTION WITH CONSISTENT SNAPSHOT``: the rows include exactly the transactions before its
coordinates in the log. MariaDB reports these. MySQL does not: there, the table is locked until the snapshot is taken and the end
of the log is read, so that no transaction on the table is between its commit in the log and its commit in the engine.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import SourceRejected, SourceUnavailable
from airflow_kafka_spark.sources.cdc.tasks.events import TableName
from airflow_kafka_spark.sources.cdc.tasks.snapshot import ChunkFilter, Key, TableSnapshot
from airflow_kafka_spark.sources.jdbc.database import SourceColumn
from airflow_kafka_spark.sources.jdbc.mysql import SEND_SECONDS, fetch_rows, get_error_code
from airflow_kafka_spark.sources.mysql_cdc.tasks import binlog
from airflow_kafka_spark.sources.mysql_cdc.tasks.binlog import Transactions
from airflow_kafka_spark.sources.mysql_cdc.tasks.catalog import DIALECT, MySqlTableShape, read_table_shape
from airflow_kafka_spark.sources.mysql_cdc.tasks.session import (
    TABLE_CHANGED,
    LogCoordinates,
    LogServer,
    is_mariadb,
)
from airflow_kafka_spark.sources.mysql_cdc.tasks.values import ValueForm, remove_prefixes

if TYPE_CHECKING:
    from pymysql.connections import Connection

OPEN_SECONDS = 60.0
"""Maximum seconds for taking a snapshot repeatedly, while the table is changed or the last transactions are not visible."""

KEYS_AT_ONCE = 2000
"""Maximum number of keys in a query that compares them with the ends of chunks."""

LOCK_SECONDS = 1
"""Seconds for which an attempt to lock a table of MySQL waits for open transactions. New writers of the table wait meanwhile."""

LOCK_PAUSE_SECONDS = 2.0
"""Seconds between two such attempts, in which writers go on."""

_LOCK_TIMEOUT = 1205

_SESSION = (
    "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
    f"SET SESSION sql_mode = 'ALLOW_INVALID_DATES', net_write_timeout = {SEND_SECONDS}, wait_timeout = 28800",
)
_SESSION_OF_MARIADB = "SET SESSION max_statement_time = 0, idle_transaction_timeout = 0, idle_readonly_transaction_timeout = 0"
_SESSION_OF_MYSQL = "SET SESSION max_execution_time = 0"


def prepare_session(connection: Connection) -> None:
    """Give a session the settings of all sessions of snapshots. A transaction has a snapshot at REPEATABLE READ only."""
    for statement in (*_SESSION, _SESSION_OF_MARIADB if is_mariadb(connection) else _SESSION_OF_MYSQL):
        fetch_rows(connection, statement)


BEGIN = "START TRANSACTION WITH CONSISTENT SNAPSHOT"


@dataclass(frozen=True)
class MySqlOpenChunk:
    """A chunk in the transaction that reads it.

    :param shape: the table.
    :param coordinates: those of the snapshot in the log.
    :param now_us: the time of the snapshot, microseconds since 1970.
    """

    shape: MySqlTableShape
    coordinates: LogCoordinates
    now_us: int


def take_snapshot(server: LogServer, connection: Connection, name: Sequence[str]) -> LogCoordinates | None:
    """Begin a transaction, and return the coordinates of the log up to which it sees changes of a table.

    :return: None if transactions that have changed the table do not end (MySQL).
    """
    prepare_session(connection)
    if not is_mariadb(connection):
        return _take_snapshot_of_locked(server, connection, name)
    fetch_rows(connection, BEGIN)
    found = {str(name).casefold(): value for name, value in fetch_rows(connection, "SHOW STATUS LIKE 'binlog_snapshot_%'")}
    return LogCoordinates(str(found["binlog_snapshot_file"]), int(found["binlog_snapshot_position"]))


def _take_snapshot_of_locked(server: LogServer, connection: Connection, name: Sequence[str]) -> LogCoordinates | None:
    import pymysql

    with server.open_session("locking a table") as locking:
        fetch_rows(locking, f"SET SESSION lock_wait_timeout = {LOCK_SECONDS}")
        try:
            fetch_rows(locking, f"LOCK TABLES {DIALECT.quote(name[0])}.{DIALECT.quote(name[1])} READ")
        except pymysql.Error as error:
            if get_error_code(error) == _LOCK_TIMEOUT:
                return None
            raise
        fetch_rows(connection, BEGIN)
        return server.read_end(connection)


def open_chunk(server: LogServer, connection: Connection, chunk: Mapping[str, Any], form: ValueForm) -> MySqlOpenChunk:
    """Take the snapshot in which a chunk is read.

    The snapshot is taken again if the table was changed before the transaction has read it; afterwards the server keeps its
    definition. It is also taken again if it does not include all changes that windows of the log have left to the chunk.

    :param chunk: a split.
    :raises SourceRejected: the table is gone, or has another key.
    :raises SourceUnavailable: there is no such snapshot for :data:`OPEN_SECONDS`.
    """
    name, start = tuple(chunk["table"]), LogCoordinates.parse(chunk["start"])
    deadline = time.monotonic() + OPEN_SECONDS
    while True:
        seen = take_snapshot(server, connection, name)
        if seen is not None and _is_usable(server, connection, seen, start, name):
            break
        fetch_rows(connection, "ROLLBACK")
        if time.monotonic() > deadline:
            detail = f"its definition changes all the time, or the transactions before {start} are not visible"
            if seen is None:
                detail = "a transaction that has changed it does not end, so that the table cannot be locked for a moment"
            raise SourceUnavailable(server.where, f"taking a snapshot of {'.'.join(name)}", detail)
        # Writers go on between two attempts to lock the table.
        time.sleep(0.05 if seen is not None else LOCK_PAUSE_SECONDS)
    (now,) = fetch_rows(connection, "SELECT CAST(UNIX_TIMESTAMP(SYSDATE(6)) * 1000000 AS SIGNED)")[0]
    shape = read_table_shape(server, connection, name, form)
    if shape is None:
        action = "Create it again; or give up this window with `skip`, which leaves out its rows of other tables, too"
        raise SourceRejected(".".join(name), "it is no table any more", action)
    shape.refuse_other_key(tuple(chunk["key"]), tuple(chunk.get("types", ())))
    return MySqlOpenChunk(shape, seen, int(now))


def _is_usable(
    server: LogServer, connection: Connection, seen: LogCoordinates, start: LogCoordinates, name: Sequence[str]
) -> bool:
    """Return True if a snapshot includes all that windows of the log have left to it, and the table as it is now."""
    return _includes(server, seen, start) and _lock_table(connection, name) and not _is_changed(server, connection, seen, name)


def _includes(server: LogServer, coordinates: LogCoordinates, start: LogCoordinates) -> bool:
    """Return True if a snapshot includes all transactions before ``start``.

    :param coordinates: those of the snapshot; the server's own events may follow them.
    """
    if coordinates.order >= start.order:
        return True
    transactions = Transactions()
    for located in server.read_events_up_to(coordinates, start):
        if transactions.enter(located.event):
            return False
        if located.end.order >= start.order:
            break
    return True


def _lock_table(connection: Connection, name: Sequence[str]) -> bool:
    """Read a row of a table, so that it cannot be changed from now on; return False if it is newer than the snapshot."""
    import pymysql

    try:
        fetch_rows(connection, f"SELECT 1 FROM {DIALECT.quote(name[0])}.{DIALECT.quote(name[1])} LIMIT 1")
    except pymysql.Error as error:
        if get_error_code(error) == TABLE_CHANGED:
            return False
        raise
    return True


def _is_changed(server: LogServer, connection: Connection, coordinates: LogCoordinates, name: Sequence[str]) -> bool:
    """Return True if there may be a statement on a table between some coordinates and the end of the log, as a RENAME."""
    end = server.read_end(connection)
    if end.order <= coordinates.order:
        return False
    named = _match_name(name[1])
    for located in server.read_events_up_to(coordinates, end):
        if located.event.kind == binlog.QUERY and named.search(binlog.parse_query(located.event.body)[1]):
            return True
        if located.end.order >= end.order:
            break
    return False


_RENAMES = re.compile(
    r"RENAME\s+TABLES?\b|ALTER\b.*?\bTABLE\b.*?\bRENAME\b(?!\s+(?:COLUMN|INDEX|KEY)\b)", re.IGNORECASE | re.DOTALL
)


def may_rename(body: bytes, table: TableName) -> bool:
    """Return True if a statement of the log (QUERY) may give a table another name."""
    database, text = binlog.parse_query(body)
    text = remove_prefixes(text)
    if not _RENAMES.match(text):
        return False
    return all(_match_name(name).search(text) for name in (table[1:] if database == table[0] else table))


def _match_name(name: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w$]){re.escape(name.replace('`', '``'))}(?![\w$])", re.IGNORECASE)


def make_chunk_token(coordinates: LogCoordinates) -> dict[str, Any]:
    """Return the token of a chunk that was read.

    :param coordinates: of its snapshot in the log.
    """
    return {"seen": str(coordinates), "behind": str(coordinates)}


def format_literals(types: Sequence[str], key: Key) -> list[str]:
    """Return the values of a key as SQL.

    :param types: the forms in which values of each column are written and compared.
    """
    return [DIALECT.make_literal(make_typed_column(kind), value) for kind, value in zip(types, key, strict=True)]


def make_typed_column(kind: str) -> SourceColumn:
    """Return a column whose values are written and compared in this form."""
    return SourceColumn(name="", type="", nullable=False, literal=kind)


@dataclass(kw_only=True)
class MySqlChunkFilter(ChunkFilter):
    """Decides which events of the log the chunks of a snapshot include.

    Keys are compared by the server: :meth:`look_ahead` asks for many at once.

    :param connection: a session, in which queries may run while the log is read.
    :ivar renamed: tables that statements of the log may have given other names.
    """

    connection: Connection
    renamed: list[TableName] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._seen = {chunk.seen: LogCoordinates.parse(chunk.seen).order for t in self.tables.values() for chunk in t.read}
        self._at = (0, 0)
        prepare_session(self.connection)

    def enter(self, coordinates: LogCoordinates) -> None:
        """Record the place of the event of the log whose changes come next."""
        self._at = coordinates.order

    def has_seen(self, seen: str) -> bool:
        """Return True if a chunk includes the event of :meth:`enter`. See :meth:`ChunkFilter.has_seen`."""
        return self._at < self._seen[seen]

    def note_statement(self, body: bytes) -> None:
        """Note the tables of snapshots that a statement of the log (QUERY) may have renamed."""
        self.renamed += [name for name in self.tables if name not in self.renamed and may_rename(body, name)]

    def look_ahead(self, keys: Iterable[tuple[TableName, Key]]) -> None:
        """Find the chunks of some keys, which :meth:`is_included` is asked about next."""
        wanted: dict[TableName, dict[Key, None]] = {}
        for name, key in keys:
            wanted.setdefault(name, {})[key] = None
        self.forget_chunks()
        for name, found in wanted.items():
            table = self.find_table(name)
            if table is not None and table.bounds:
                # A row whose key has a null is in no chunk: while a table has such rows, none of its chunks is read.
                self.note_chunk(name, (), 0)
                keys_of = [key for key in found if key]
                for at in range(0, len(keys_of), KEYS_AT_ONCE):
                    self._find(table, keys_of[at : at + KEYS_AT_ONCE])

    def _find(self, table: TableSnapshot, keys: list[Key]) -> None:
        """Record the number of ends of chunks before each key."""
        names = [f"c{number}" for number in range(len(table.key))]
        row = "" if is_mariadb(self.connection) else "ROW"
        values = ", ".join(f"{row}({n}, {', '.join(format_literals(table.types, key))})" for n, key in enumerate(keys))
        before = " + ".join(f"({DIALECT.make_after_condition(names, format_literals(table.types, end))})" for end in table.bounds)
        query = f"WITH k (n, {', '.join(names)}) AS (VALUES {values}) SELECT n, {before} FROM k"
        for number, count in fetch_rows(self.connection, query):
            self.note_chunk(table.table, keys[int(number)], int(count))
