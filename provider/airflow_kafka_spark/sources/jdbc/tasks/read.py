"""Reading splits of a PostgreSQL table as Arrow, with ADBC (a binary COPY)."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

import adbc_driver_manager
import adbc_driver_postgresql.dbapi as adbc
import pyarrow as pa

from airflow_kafka_spark.errors import KafkaSparkError, SourceRejected, SourceUnavailable
from airflow_kafka_spark.formats.base import Kind
from airflow_kafka_spark.formats.tasks.text import concatenate_texts
from airflow_kafka_spark.hooks.databases import (
    APPLICATION,
    PostgresServer,
    apply_session_settings,
    describe_driver_message,
    find_access_remedy,
)
from airflow_kafka_spark.sources.base import SplitReader
from airflow_kafka_spark.sources.jdbc.database import REFUSED_SQLSTATES, UNHELD_ACTION, find_unheld_value

BATCH_BYTES = 2 << 20
"""Approximate number of bytes that are read ahead."""

KEPT_SECONDS = 2.0
"""Seconds for which a process keeps the session of a split that it has read, for the next split."""

_BATCH_SIZE_OPTION = "adbc.postgresql.batch_size_hint_bytes"
_DECIMAL_CHARACTERS = b"0123456789.-"


@dataclass(frozen=True)
class PostgresSplitReader(SplitReader):
    """Reads splits of a PostgreSQL table or query.

    :param server: host, database and login, with the password.
    :param session: the statement that makes the session's settings.
    :param table: its name in messages.
    :param columns: names and kinds of the columns.
    :param statements: per split, the SELECT of its rows, with the columns in this order.
    :param waiting: the statements that wait until the session may read.
    """

    server: PostgresServer
    session: str
    table: str
    columns: tuple[tuple[str, Kind], ...]
    statements: tuple[str, ...]
    waiting: tuple[str, ...] = ()

    def read(self, split: int) -> Iterator[pa.RecordBatch]:
        with self._translate_source_errors(f"reading split {split}"), self._open_cursor() as cursor:
            for statement in self.waiting:
                cursor.execute(statement)
            cursor.adbc_statement.set_options(**{_BATCH_SIZE_OPTION: str(BATCH_BYTES)})
            cursor.execute(self.statements[split])
            for batch in _read_batches(cursor):
                yield self._check_batch(batch)

    @contextmanager
    def _open_cursor(self) -> Iterator[adbc.Cursor]:
        """Open a cursor of a session that has its settings: of the session of the last split, if the process has kept it."""
        # Arrow takes texts for UTF-8, whatever encoding the connection asks for.
        login = f"{self.server.make_connection_string(APPLICATION)} client_encoding=UTF8"
        connection = self._take_kept(login)
        try:
            if connection is None:
                connection = adbc.connect(login)
                self._apply_settings(connection)
            cursor = connection.cursor()
            try:
                yield cursor
            finally:
                with suppress(Exception):
                    cursor.close()
            # A session that is limited in number holds a lock until it ends.
            if not self.waiting and _end_transaction(connection):
                _kept.put(login, connection)
                connection = None
        finally:
            _close(connection)

    def _take_kept(self, login: str) -> adbc.Connection | None:
        """Return the session that the process has kept, with its settings applied again; None if no kept session answers."""
        connection = None if self.waiting else _kept.take(login)
        if connection is not None:
            try:
                self._apply_settings(connection)
            except Exception:
                _close(connection)
                return None
        return connection

    def _apply_settings(self, connection: adbc.Connection) -> None:
        with connection.cursor() as cursor:
            apply_session_settings(self.session, cursor.execute, partial(_fetch_all, cursor), connection.rollback)

    def _check_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the batch under the columns' own names.

        :raises SourceRejected: a decimal is NaN, which Spark's decimals cannot hold.
        """
        for (name, kind), column in zip(self.columns, batch.columns, strict=True):
            if kind in ("decimal", "fine decimal") and concatenate_texts(column).to_pybytes().translate(
                None, _DECIMAL_CHARACTERS
            ):
                raise SourceRejected(self.table, f'column "{name}" holds NaN', UNHELD_ACTION)
        return pa.RecordBatch.from_arrays(batch.columns, [name for name, _ in self.columns])

    @contextmanager
    def _translate_source_errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except (adbc_driver_manager.Error, pa.ArrowException, OSError) as error:
            raise self._make_source_error(error, doing) from self.server.get_safe_cause(error)

    def _make_source_error(self, error: Exception, doing: str) -> KafkaSparkError:
        if unheld := find_unheld_value(str(error)):
            return SourceRejected(self.table, unheld, UNHELD_ACTION)
        detail = describe_driver_message(self.server.scrub(extract_server_message(error)))
        remedy = find_access_remedy(str(error))
        if remedy or (getattr(error, "sqlstate", None) or "")[:2] in REFUSED_SQLSTATES:
            return SourceRejected(self.table, f"{doing}: {detail}", remedy)
        return SourceUnavailable(self.server.where, doing, detail)


class KeptSession:
    """The session of the last split that this process has read. It is closed after :data:`KEPT_SECONDS` without another split.

    A new one takes 75 milliseconds of a core here and in the server (kept: 2), where a split of 250,000 rows takes 2,200: both
    sides prove that they know the password, and ADBC reads the catalog of types.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: tuple[str, adbc.Connection, threading.Timer] | None = None

    def take(self, login: str) -> adbc.Connection | None:
        """Return the session that was kept for a login, which belongs to the caller now; None if no session was kept."""
        with self._lock:
            if self._kept is None or self._kept[0] != login:
                return None
            (_, connection, timer), self._kept = self._kept, None
        timer.cancel()
        return connection

    def put(self, login: str, connection: adbc.Connection) -> None:
        """Keep a session, which has no open transaction, in place of the one before."""
        timer = threading.Timer(KEPT_SECONDS, self._end, [connection])
        timer.daemon = True
        with self._lock:
            before, self._kept = self._kept, (login, connection, timer)
        timer.start()
        if before is not None:
            before[2].cancel()
            _close(before[1])

    def _end(self, connection: adbc.Connection) -> None:
        with self._lock:
            if self._kept is None or self._kept[1] is not connection:
                return
            self._kept = None
        _close(connection)


_kept = KeptSession()


def _end_transaction(connection: adbc.Connection) -> bool:
    """Return False if the session cannot end its transaction."""
    try:
        connection.rollback()
    except Exception:
        return False
    return True


def _close(connection: adbc.Connection | None) -> None:
    if connection is not None:
        with suppress(Exception):
            connection.close()


def _fetch_all(cursor: adbc.Cursor, query: str) -> list[tuple]:
    cursor.execute(query)
    return cursor.fetchall()


def _read_batches(cursor: adbc.Cursor) -> Iterable[pa.RecordBatch]:
    """Return the batches of a result. An error in the middle has its SQLSTATE in ADBC's own reader, but not in pyarrow's."""
    own = getattr(getattr(cursor, "_results", None), "reader", None)
    return own if own is not None else cursor.fetch_record_batch()


def extract_server_message(error: BaseException) -> str:
    """Return the server's message from an error of ADBC, without ADBC's own text and the statement."""
    text = str(error)
    found = re.search(r"(?:ERROR|FATAL):\s+(.*)", text)
    return " ".join((found[1] if found else text.partition("Query was:")[0]).split())
