"""Sessions of the server: positions of its binary log, and the stream of its events.

The stream is the protocol's ``COM_BINLOG_DUMP`` over PyMySQL, from a file and a position on. It does not block, but ends at the
end of the log.
"""

from __future__ import annotations

import math
import random
import re
import struct
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from airflow_kafka_spark.errors import LogLost, SourceRejected, SourceUnavailable
from airflow_kafka_spark.hooks.databases import find_access_remedy
from airflow_kafka_spark.sources.jdbc.mysql import SEND_SECONDS, MySqlDatabase, MySqlServer, fetch_rows, get_error_code
from airflow_kafka_spark.sources.mysql_cdc.tasks import binlog
from airflow_kafka_spark.sources.mysql_cdc.tasks.binlog import LogEvent, LogUnreadable, Transactions, parse_event
from airflow_kafka_spark.sources.mysql_cdc.tasks.packets import receive_packets

if TYPE_CHECKING:
    from pymysql.connections import Connection

FIRST = 4
"""The position of the first event of a file."""

HEAD_BYTES = 1 << 12
"""Bytes at the beginning of a file whose checksum identifies it."""

SENT_SECONDS = 30.0
"""Seconds to wait until the server sends its log up to the end that it has reported."""

TABLE_CHANGED = 1412
"""The server's error for a table that is newer than a snapshot: it was truncated, or rebuilt."""

_DUMP, _NON_BLOCKING = 0x12, 1
DRIVER_PARTS = ("_execute_command", "_force_close", "_next_seq_id", "_result", "_rfile")
"""The attributes of PyMySQL's connections that its documentation does not name, and that the log and chunks are read with."""
_CANNOT_READ = 1236

_PIECE_BYTES, _PIECE_EVENTS = 1 << 20, 8192
"""Maximum size in bytes, and number, of events that are received together."""

NEW_PIPELINE = "To start over, use a new pipeline, and copy the tables again"


class LogCoordinates(NamedTuple):
    """Coordinates in the binary log: a file and a position in it.

    :param file: the name of the file.
    :param position: the position in it, in bytes.
    """

    file: str
    position: int

    @property
    def order(self) -> tuple[int, int]:
        """The coordinates as numbers; files are numbered by the ends of their names."""
        return int(self.file.rpartition(".")[2] or 0), self.position

    def __str__(self) -> str:
        return f"{self.file}:{self.position}"

    @classmethod
    def parse(cls, text: str) -> LogCoordinates:
        """Return the coordinates of a text ``file:position``.

        :raises ValueError: it is no such text.
        """
        file, _, position = text.rpartition(":")
        if not file or not file.rpartition(".")[2].isdigit():
            raise ValueError(f"`{text}` is not of the form `file:position`")
        return cls(file, int(position))


class Located(NamedTuple):
    """An event and its place in the log.

    :param start: its beginning.
    :param end: the beginning of the next event.
    :param is_compressed: True for an event of a compressed transaction, which has the place of the whole. The log cannot be cut
        behind it.
    """

    event: LogEvent
    start: LogCoordinates
    end: LogCoordinates
    is_compressed: bool = False

    def reaches(self, end: LogCoordinates) -> bool:
        """Return True if the log is read up to ``end`` with this event, and can be cut behind it."""
        return self.end.order >= end.order and not self.is_compressed


@dataclass(frozen=True)
class LogServer:
    """A server whose log is read. It is sent to the tasks, with the password.

    :param server: its address and login.
    """

    server: MySqlServer

    @property
    def where(self) -> str:
        """The server's address, for messages."""
        return f"{self.server.host}:{self.server.port}"

    @contextmanager
    def open_session(self, doing: str) -> Iterator[Connection]:
        """Open a session, and yield its connection.

        :raises SourceUnavailable: the server does not answer, or ends the session.
        :raises LogLost: the server no longer has the part of the log that is asked for.
        :raises SourceRejected: the server refuses a statement.
        """
        import pymysql

        database = MySqlDatabase(self.server)
        try:
            connection = self.server.connect()
            try:
                self._refuse_other_driver(connection)
                _show_generated_keys(connection)
                yield connection
            finally:
                connection.close()
        except database.list_driver_errors() as error:
            detail, is_refused = database.describe_error(error)
            cause = database.get_shown_cause(error)
            code = get_error_code(error) if isinstance(error, pymysql.Error) else 0
            if code == _CANNOT_READ:
                found = f"the server does not send its log, {doing}: {detail}"
                raise LogLost(self.where, found, NEW_PIPELINE) from cause
            if is_refused and code != TABLE_CHANGED:
                raise SourceRejected(self.where, f"{doing}: {detail}", find_access_remedy(detail)) from cause
            raise SourceUnavailable(self.where, doing, detail) from cause

    def _refuse_other_driver(self, connection: Connection) -> None:
        """Refuse a release of PyMySQL by which the log cannot be read.

        :raises SourceRejected: its connections lack an attribute.
        """
        import pymysql

        missing = [name for name in DRIVER_PARTS if not hasattr(connection, name)]
        if missing:
            found = f"connections of PyMySQL {pymysql.VERSION_STRING} have no `{missing[0]}`, with which the log is read"
            raise SourceRejected(self.where, f"{found}; expected `pymysql>=1.1,<2`", "Install it, on the executors, too")

    def read_events(self, connection: Connection, start: LogCoordinates) -> Iterator[Located]:
        """Yield the events from ``start`` on, up to the end of the log. Afterwards, the connection cannot be used for anything
        else.

        Events of the server that are in no file have the present position of the reader as ``start`` and ``end``.

        :raises SourceRejected: an event cannot be read.
        """
        for name in ("master_binlog_checksum", "source_binlog_checksum"):
            fetch_rows(connection, f"SET @{name} = @@global.binlog_checksum")
        fetch_rows(connection, "SET @mariadb_slave_capability = 4")
        fetch_rows(connection, f"SET SESSION net_write_timeout = {SEND_SECONDS}")
        # Two readers with one number would end each other.
        number = random.SystemRandom().randrange(1 << 31, (1 << 32) - 1)
        command = struct.pack("<IHI", start.position, _NON_BLOCKING, number) + start.file.encode()
        connection._execute_command(_DUMP, command)
        coordinates, checked = start, False
        for data in _list_events(connection):
            try:
                event = parse_event(data, checked)
            except LogUnreadable as error:
                raise self.make_unreadable_error(coordinates, error) from None
            before = coordinates
            if event.log_pos:
                # Positions in headers have 32 bits only.
                moved = event.log_pos - coordinates.position & 0xFFFFFFFF
                coordinates = LogCoordinates(coordinates.file, coordinates.position + moved)
            if event.kind == binlog.FORMAT:
                checked = binlog.has_checksums(event.body)
            elif event.kind == binlog.ROTATE:
                file, position = binlog.parse_rotate(event.body)
                coordinates = LogCoordinates(file, position if not event.log_pos else FIRST)
            elif event.kind == binlog.PAYLOAD:
                # Its events have the place of the whole. The event itself follows them, and ends the place.
                try:
                    for inner in binlog.read_payload(event.body):
                        yield Located(inner, before, before, is_compressed=True)
                except LogUnreadable as error:
                    raise self.make_unreadable_error(before, error) from None
                event = event._replace(body=b"")
            yield Located(event, before, coordinates)

    def read_events_up_to(self, start: LogCoordinates, end: LogCoordinates) -> Iterator[Located]:
        """Yield the events from ``start`` on, at least up to ``end``.

        The server may report the end of its log a moment before it sends the events up to it.

        :raises SourceUnavailable: the server does not answer, or does not send so much.
        :raises LogLost: the server no longer has this part of the log.
        :raises SourceRejected: an event cannot be read.
        """
        doing, coordinates, transactions = f"reading the log from {start} to {end}", start, Transactions()
        deadline = time.monotonic() + SENT_SECONDS
        while True:
            with self.open_session(doing) as connection:
                for located in self.read_events(connection, coordinates):
                    transactions.enter(located.event)
                    coordinates = located.end
                    yield located
            if transactions.is_open or time.monotonic() > deadline:
                raise SourceUnavailable(self.where, doing, f"the server sent its log up to {coordinates} only")
            time.sleep(0.05)

    def make_unreadable_error(self, coordinates: LogCoordinates, error: LogUnreadable) -> SourceRejected:
        """Return the error for a part of the log that cannot be decoded."""
        return SourceRejected(self.where, f"the log at {coordinates} cannot be read: {error}", NEW_PIPELINE)

    # --- positions ---

    def read_end(self, connection: Connection) -> LogCoordinates:
        """Return the end of the log: every transaction before it is complete.

        :raises SourceRejected: the server writes no log.
        """
        found = fetch_rows(connection, self.make_status_statement(connection))
        if not found:
            raise SourceRejected(self.where, "the server writes no binary log", "Set `log_bin`, and restart the server")
        return LogCoordinates(str(found[0][0]), int(found[0][1]))

    def make_status_statement(self, connection: Connection) -> str:
        """Return the statement that returns the end of the log."""
        is_new = not is_mariadb(connection) and read_version(connection) >= (8, 4)
        return "SHOW BINARY LOG STATUS" if is_new else "SHOW MASTER STATUS"

    def list_files(self, connection: Connection) -> list[LogCoordinates]:
        """Return the files of the log, each with its size as position."""
        return [LogCoordinates(str(row[0]), int(row[1])) for row in fetch_rows(connection, "SHOW BINARY LOGS")]

    def read_identity(self, connection: Connection) -> dict[str, Any]:
        """Return the facts that identify this server: its ``server_id``, and MySQL's ``server_uuid``."""
        names = ("server_id",) if is_mariadb(connection) else ("server_id", "server_uuid")
        found = fetch_rows(connection, f"SELECT {', '.join(f'@@global.{name}' for name in names)}")[0]
        return dict(zip(names, found, strict=True))

    def read_beginning(self, at: LogCoordinates) -> dict[str, Any]:
        """Return the facts that identify a file of the log, beside its name: the time at which it was begun (``created``, seconds
        since 1970), and a checksum of its first events (``head``), because it may be begun again within a second.

        :param at: an end of an event in the file. Later events are not read.
        :raises LogLost: the server does not have the file.
        """
        created, checksum, end = None, 0, FIRST
        with self.open_session(f"reading the beginning of {at.file}") as connection:
            for found in self.read_events(connection, LogCoordinates(at.file, FIRST)):
                if found.event.kind == binlog.FORMAT:
                    created = found.event.seconds
                if created is not None and found.end.file == at.file and FIRST < found.end.position <= at.position:
                    if found.event.kind != binlog.FORMAT:  # that one changes when the file is closed
                        checksum = zlib.crc32(found.event.body, checksum ^ found.event.seconds)
                    end = found.end.position
                if created is not None and (end >= min(at.position, HEAD_BYTES) or found.end.order > at.order):
                    break
        if created is None:
            raise SourceRejected(self.where, f"its file {at.file} has no beginning", NEW_PIPELINE)
        return {"created": created, "head": [end, checksum]}

    def refuse_other(self, connection: Connection, start: LogCoordinates, log: dict[str, Any]) -> list[LogCoordinates]:
        """Return the files of the log, after a check that the server has the log from ``start`` on.

        :param log: the identity of the log for which ``start`` was recorded.
        :raises SourceRejected: it is another server.
        :raises LogLost: the log no longer contains ``start``, because it was purged, was reset, or has lost its end.
        """
        found = self.read_identity(connection)
        for name, value in found.items():
            if log.get(name) not in (None, value):
                detail = f"its {name} is `{value}`, and the windows so far were read with `{log[name]}`"
                raise SourceRejected(self.where, detail, f"Connect to the server of before. {NEW_PIPELINE}")
        files = self.list_files(connection)
        there = {file.file: file.position for file in files}
        if start.file not in there:
            names = f"{files[0].file} to {files[-1].file}" if files else "no files"
            raise LogLost(
                self.where,
                f"it no longer has the log at {start}, where the last window ended: there are {names}. The log was purged or "
                "reset, or this is another server",
                f"Keep the log for longer (`binlog_expire_logs_seconds`), or run more often. {NEW_PIPELINE}",
            )
        self.refuse_other_file(start, there[start.file], log)  # first: another file may be shorter, too
        if start.position > there[start.file]:
            raise LogLost(
                self.where,
                f"its file {start.file} ends at {there[start.file]:,}, before {start.position:,}, where the last window ended: "
                "the server lost the end of its log in a crash, or this is another server",
                f"Set `sync_binlog = 1`. {NEW_PIPELINE}",
            )
        return files

    def refuse_other_file(self, at: LogCoordinates, size: int, log: Mapping[str, Any]) -> None:
        """Refuse a file of the log that is not the file that was read before.

        :param at: the end of what was read of it.
        :param size: the present size of the file.
        :param log: the identity of the log that was recorded then; without ``head`` by an earlier release.
        :raises LogLost: it is another file of this name.
        """
        if log.get("created") is None:
            return
        end, _ = log.get("head", (FIRST, 0))
        found = self.read_beginning(LogCoordinates(at.file, min(end, size)))
        if any(name in log and log[name] != value for name, value in found.items()):
            raise LogLost(
                self.where,
                f"its file {at.file} was begun at another time than the one that was read before: the log was reset, or this is "
                "another server",
                f"Connect to the server of before. {NEW_PIPELINE}",
            )


def _list_events(connection: Connection) -> Iterator[bytes]:
    """Yield the events that the server sends, from their headers on."""
    for data, starts in receive_packets(connection, _PIECE_BYTES, _PIECE_EVENTS, is_eager=True):
        with memoryview(data) as view:
            found = [bytes(view[start + 1 : end - 4]) for start, end in pairwise(starts)]
        yield from found


def is_mariadb(connection: Connection) -> bool:
    """Return True if the server is MariaDB, False if it is MySQL."""
    return "mariadb" in connection.get_server_info().lower()


def read_version(connection: Connection) -> tuple[int, int]:
    """Return the first two numbers of the server's release."""
    first, second = re.findall(r"\d+", connection.get_server_info().removeprefix("5.5.5-"))[:2]
    return int(first), int(second)


def _show_generated_keys(connection: Connection) -> None:
    """Let the catalog show the primary keys that MySQL generates, which the log always has."""
    if not is_mariadb(connection):
        name = "show_gipk_in_create_table_and_information_schema"
        for _ in fetch_rows(connection, f"SHOW VARIABLES WHERE variable_name = '{name}' AND value = 'OFF'"):
            fetch_rows(connection, f"SET SESSION {name} = ON")


def compute_distance(files: Sequence[LogCoordinates], start: LogCoordinates, end: LogCoordinates) -> int:
    """Return the bytes of the log between two coordinates.

    :param files: of the log, with their sizes.
    """
    sizes = {file.order[0]: file.position for file in files}
    (first, at), (last, to) = start.order, end.order
    return sum(sizes[number] for number in sizes if first <= number < last) - at + to if (first, at) < (last, to) else 0


def advance(files: Sequence[LogCoordinates], start: LogCoordinates, bytes: int, end: LogCoordinates) -> LogCoordinates:
    """Return the coordinates a number of bytes after ``start``, at most ``end``."""
    coordinates, left = start, bytes
    for file in files:
        if not start.order[0] <= file.order[0] <= end.order[0]:
            continue
        begin = start.position if file.file == start.file else 0
        size = end.position if file.file == end.file else file.position
        if begin + left <= size:
            return LogCoordinates(file.file, max(FIRST, begin + left))
        left -= size - begin
        coordinates = LogCoordinates(file.file, size)
    return end if coordinates.order > end.order or left > 0 else coordinates


LAG_SECONDS = 1
"""Seconds between two checks of the lag of a replica."""


@dataclass(frozen=True)
class ReplicaLag:
    """The distance that replicas may be behind.

    :param replicas: the replicas.
    :param seconds: maximum lag of each of them, in seconds.
    """

    replicas: tuple[LogServer, ...] = ()
    seconds: float = 0

    def wait(self) -> None:
        """Wait while a replica is further behind, or while its replication has stopped.

        :raises SourceUnavailable: a replica does not answer.
        :raises SourceRejected: a server is no replica, or does not let its user see the lag.
        """
        for replica in self.replicas:
            with replica.open_session("asking for the lag of a replica") as connection:
                while read_replica_lag(replica, connection) > self.seconds:
                    time.sleep(LAG_SECONDS)


def read_replica_lag(replica: LogServer, connection: Connection) -> float:
    """Return the lag of a replica in seconds, the largest one of its channels; infinity if the replication of a channel has
    stopped, or is not connected.

    :raises SourceRejected: the server is no replica.
    """
    statement, column = ("SHOW ALL SLAVES STATUS", "Seconds_Behind_Master")
    if not is_mariadb(connection):
        statement, column = _make_replica_statement(connection), "Seconds_Behind_Source"
    with connection.cursor() as cursor:
        cursor.execute(statement)
        names = [field[0] for field in cursor.description]
        at = names.index(column if column in names else "Seconds_Behind_Master")
        found = [row[at] for row in cursor.fetchall()]
    if not found:
        raise SourceRejected(replica.where, "it is no replica", "Name replicas in `replica_conn_ids`")
    return max(math.inf if seconds is None else float(seconds) for seconds in found)


def _make_replica_statement(connection: Connection) -> str:
    """Return the statement of MySQL that returns the state of its replication."""
    return "SHOW REPLICA STATUS" if read_version(connection) >= (8, 4) else "SHOW SLAVE STATUS"


def logs_cascades(connection: Connection) -> bool:
    """Return True if the log holds changes of rows by foreign keys.

    MySQL makes them by itself since 9.6, unless this setting leaves them to InnoDB.
    """
    found = fetch_rows(connection, "SHOW GLOBAL VARIABLES LIKE 'innodb_native_foreign_keys'")
    return bool(found) and str(found[0][1]) == "OFF"


def is_replicating(connection: Connection) -> bool:
    """Return True if the server is a replica.

    :raises pymysql.Error: its user may not ask for it (MySQL).
    """
    if not is_mariadb(connection):
        return bool(fetch_rows(connection, _make_replica_statement(connection)))
    running = fetch_rows(connection, "SHOW GLOBAL STATUS LIKE 'Slave%running'")
    return any(str(value) not in ("0", "OFF") for _, value in running)
