"""Loading Arrow batches into a PostgreSQL table, in one transaction of one session.

ADBC's binary COPY is the fastest way, and needs no encoder here. If ADBC is not installed, or its release is too old to be
correct, psycopg loads at half the rate.
"""

from __future__ import annotations

import importlib.util
import logging
import queue
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from airflow_kafka_spark.hooks.databases import APPLICATION, Name, make_settings, quote
from airflow_kafka_spark.sinks.postgres import sql
from airflow_kafka_spark.sinks.postgres.server import SinkServer

if TYPE_CHECKING:
    import adbc_driver_manager

log = logging.getLogger(__name__)

ADBC = (1, 12)
"""The first release whose decimals are correct: 1.11 writes -6998001000.00 for -6998000000.10, without an error."""
ADBC_ARRAYS = (1, 13)
"""The first release that keeps a NULL inside of an array: 1.12 writes 0, false or an empty text."""

version = lru_cache(metadata.version)
"""Return the version of an installed package. Reading a package's files takes as long as opening a session."""

BUFFERED_BATCHES = 2
"""Maximum number of batches that wait for the server while the next one is read and decoded. It bounds a task's memory."""


class LoadSession(ABC):
    """A session that always has a transaction open."""

    errors: tuple[type[BaseException], ...] = ()
    """The exceptions of its driver."""

    @abstractmethod
    def run(self, statement: str) -> int:
        """Run a statement and return how many rows it wrote."""

    @abstractmethod
    def rows(self, statement: str) -> list[tuple]:
        """Run a query and return its rows."""

    @abstractmethod
    def load(self, table: Name | str, batches: pa.RecordBatchReader, types: Sequence[str]) -> int:
        """Copy batches into a table and return how many rows it took. Blocks until the last batch is there.

        :param table: the table; a plain string is the name of a temporary one.
        :param types: the PostgreSQL types of the batches' columns.
        """

    @abstractmethod
    def commit(self) -> None:
        """Commit the transaction."""

    @abstractmethod
    def rollback(self) -> None:
        """Roll back the transaction."""

    @abstractmethod
    def close(self) -> None:
        """Roll back the transaction and close the session. Never raises."""


def open_session(server: SinkServer, application_name: str, *, durable: bool, arrays: bool = False) -> LoadSession:
    """Open a session of ADBC if a correct release of it is installed, else of psycopg.

    :param application_name: the name of the session, by which a later attempt finds it.
    :param durable: False if a commit may be lost in a crash of the server, because that is detected and repaired.
    :param arrays: True if any column is an array.
    """
    # All pipelines use one connection string, so that they share one ADBC database. A session does nothing before it has its
    # name: a session of an overtaken attempt then finds the attempt's tables gone, like a task that begins late.
    session = (AdbcSession if can_use_adbc(arrays) else PsycopgSession)(server.named(APPLICATION))
    try:
        settings = sql.set_session_settings(server.lock_timeout, durable=durable, application_name=application_name)
        make_settings(settings, session.run, session.rows, session.rollback)
        session.commit()
    except BaseException:
        session.close()
        raise
    return session


def can_use_adbc(arrays: bool) -> bool:
    """Return True if a release of ADBC is installed that writes these values correctly.

    :param arrays: True if any column is an array.
    """
    if importlib.util.find_spec("adbc_driver_postgresql") is None:
        return False
    release = tuple(map(int, re.findall(r"\d+", version("adbc-driver-postgresql"))[:2]))
    needed = ADBC_ARRAYS if arrays else ADBC
    if release < needed:
        found, wanted = (".".join(map(str, r)) for r in (release, needed))
        log.warning(
            "adbc-driver-postgresql %s writes wrong values; expected %s. psycopg loads instead, at half the rate", found, wanted
        )
    return release >= needed


class AdbcSession(LoadSession):
    """A session that loads Arrow batches by ADBC.

    :param conninfo: libpq's connection string, with the password.
    """

    def __init__(self, conninfo: str) -> None:
        import adbc_driver_manager
        import adbc_driver_postgresql.dbapi as adbc

        self.errors = (adbc_driver_manager.Error, pa.ArrowException)
        connection = adbc_driver_manager.AdbcConnection(_open_database(conninfo, threading.get_ident()))
        kept: Any = _KeptDatabase()
        self._connection = adbc.Connection(kept, connection)
        self._cursor = self._connection.cursor()

    def run(self, statement: str) -> int:
        self._cursor.execute(statement)
        return self._cursor.rowcount

    def rows(self, statement: str) -> list[tuple]:
        self._cursor.execute(statement)
        return self._cursor.fetchall()

    def load(self, table: Name | str, batches: pa.RecordBatchReader, types: Sequence[str]) -> int:
        if isinstance(table, str):
            return self._cursor.adbc_ingest(table, batches, mode="append", temporary=True)
        return self._cursor.adbc_ingest(table.table, batches, mode="append", db_schema_name=table.schema)

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        self._connection.rollback()

    def close(self) -> None:
        for step in (self.rollback, self._cursor.close, self._connection.close):
            with suppress(Exception):
                step()


class _KeptDatabase:
    """Replaces the database handle of an ADBC connection, so that closing the connection does not close the database."""

    def close(self) -> None:
        """Leave it open."""


@lru_cache(maxsize=8)
def _open_database(conninfo: str, thread: int) -> adbc_driver_manager.AdbcDatabase:
    """Return ADBC's database, which holds no session. It reads the server's whole catalog of types and columns when it is made,
    which takes longer than a small split. So all splits that a Python worker loads into a server share one.

    A type that is created later is unknown to it. Loading needs none: COPY is encoded by the types of Arrow.

    :param thread: the thread that uses it: it counts its connections without a lock.
    """
    import adbc_driver_postgresql

    return adbc_driver_postgresql.connect(conninfo)


class PsycopgSession(LoadSession):
    """A session that loads Arrow batches by ADBC.

    :param conninfo: libpq's connection string, with the password.
    """

    def __init__(self, conninfo: str) -> None:
        import psycopg

        self.errors = (psycopg.Error, pa.ArrowException, OverflowError, ValueError)
        self._connection = psycopg.connect(conninfo, prepare_threshold=None)

    def run(self, statement: str) -> int:
        return self._connection.execute(statement.encode()).rowcount

    def rows(self, statement: str) -> list[tuple]:
        return self._connection.execute(statement.encode()).fetchall()

    def load(self, table: Name | str, batches: pa.RecordBatchReader, types: Sequence[str]) -> int:
        columns = ", ".join(map(quote, batches.schema.names))
        place = quote(table) if isinstance(table, str) else str(table)
        count = 0
        statement = f"COPY {place} ({columns}) FROM STDIN (FORMAT BINARY)"
        with self._connection.cursor() as cursor, cursor.copy(statement.encode()) as copy:
            copy.set_types([_remove_modifier(t) for t in types])
            for batch in batches:
                for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
                    copy.write_row(row)
                count += batch.num_rows
        return count

    def commit(self) -> None:
        self._connection.commit()

    def rollback(self) -> None:
        self._connection.rollback()

    def close(self) -> None:
        for step in (self.rollback, self._connection.close):
            with suppress(Exception):
                step()


def _remove_modifier(kind: str) -> str:
    name, _, rest = kind.partition("(")
    return name + ("[]" if rest.endswith("[]") else "")


class Abandoned(Exception):
    """Raised to end a COPY whose task has given up its split."""


class Stream:
    """A COPY in a thread of its own, which gets its batches one by one. The task reads and decodes the next ones meanwhile.

    :param session: must not be used elsewhere until :meth:`finish` or :meth:`cancel` has returned.
    """

    def __init__(self, session: LoadSession, table: Name | str, schema: pa.Schema, types: Sequence[str]) -> None:
        self._waiting: queue.Queue[pa.RecordBatch | Exception | None] = queue.Queue(BUFFERED_BATCHES)
        self._error: BaseException | None = None
        self._loaded = 0

        def load() -> None:
            try:
                self._loaded = session.load(table, pa.RecordBatchReader.from_batches(schema, self._batches()), types)
            except BaseException as error:  # raised again in the task's own thread
                self._error = error

        self._thread = threading.Thread(target=load, name="postgres-copy", daemon=True)
        self._thread.start()

    def put(self, batch: pa.RecordBatch) -> None:
        """Pass a batch to the COPY. Waits while the server is slower than the task. Raises the error that ended the COPY."""
        self._put(batch)

    def finish(self) -> int:
        """Wait until everything is loaded and return the number of rows. Raises the error that ended the COPY."""
        self._put(None)
        self._thread.join()
        self._raise()
        return self._loaded

    def cancel(self) -> None:
        """Make the COPY fail, and wait for that. Never raises."""
        with suppress(BaseException):
            self._put(Abandoned("the split is given up"))
        # If the server has disappeared, the session's keepalives detect it.
        self._thread.join(timeout=120)

    def _put(self, item: pa.RecordBatch | Exception | None) -> None:
        while self._thread.is_alive():
            try:
                self._waiting.put(item, timeout=0.1)
                return
            except queue.Full:
                continue
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _batches(self) -> Iterator[pa.RecordBatch]:
        while (item := self._waiting.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item
