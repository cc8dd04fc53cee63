"""Writing one split in a Spark task, in one transaction.

:class:`StageWriter` loads a stage that only the driver reads (``atomic="window"``). :class:`SplitAtomicWriter` loads the target
itself (``atomic="split"``). Rows that not even a stage can hold are found before they are sent (:func:`find_unstorable_rows`).

ADBC's binary COPY is the fastest way to load Arrow batches, and needs no encoder here. If ADBC is not installed, or its release
is too old to be correct, psycopg loads at half the rate.
"""

from __future__ import annotations

import importlib.util
import logging
import queue
import re
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.errors import Fenced, KafkaSparkError, SinkRejected, SinkUnavailable
from airflow_kafka_spark.formats.tasks.text import format_json_values
from airflow_kafka_spark.hooks.databases import APPLICATION, Name, apply_session_settings, quote
from airflow_kafka_spark.sinks.base import Rows, SplitWriter
from airflow_kafka_spark.sinks.postgres import sql
from airflow_kafka_spark.sinks.postgres.columns import StageColumn
from airflow_kafka_spark.sinks.postgres.server import SinkServer, is_refusal, make_lock_key
from airflow_kafka_spark.sinks.postgres.sql import Merge, StagedSplit
from airflow_kafka_spark.windows.model import BadRecord, Split

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
    def fetch_rows(self, statement: str) -> list[tuple]:
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
    session = (AdbcSession if can_use_adbc(arrays) else PsycopgSession)(server.make_connection_string(APPLICATION))
    try:
        settings = sql.set_session_settings(server.lock_timeout, durable=durable, application_name=application_name)
        apply_session_settings(settings, session.run, session.fetch_rows, session.rollback)
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

    def fetch_rows(self, statement: str) -> list[tuple]:
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

    def fetch_rows(self, statement: str) -> list[tuple]:
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
                self._loaded = session.load(table, pa.RecordBatchReader.from_batches(schema, self._yield_batches()), types)
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

    def _yield_batches(self) -> Iterator[pa.RecordBatch]:
        while (item := self._waiting.get()) is not None:
            if isinstance(item, Exception):
                raise item
            yield item


SAMPLES = 5
"""Maximum number of refused records that a task names."""
REMEMBERED_BATCHES = 32
"""Number of batches whose offsets are kept, to name a record that the server refuses some moments after it was sent."""

_UNDEFINED_TABLE = "42P01"


@dataclass(frozen=True)
class LoadSettings:
    """The settings that all splits of an attempt share.

    :param server: the server, with the password.
    :param application_name: the name of the sessions, by which a later attempt finds them.
    :param pipeline: the pipeline's name.
    :param number: the window's number.
    :param window: the window, for messages.
    :param target: the table, for messages.
    :param columns: the columns of the rows.
    :param key: the columns that must not be null.
    :param offset: the name of the column for each row's offset, or None.
    :param tombstone: the name of the column that marks deletes, or None.
    """

    server: SinkServer
    application_name: str
    pipeline: str
    number: int
    window: str
    target: str
    columns: tuple[StageColumn, ...]
    key: tuple[str, ...] = ()
    offset: str | None = None
    tombstone: str | None = None

    @property
    def definitions(self) -> list[tuple[str, str]]:
        """Names and PostgreSQL types of a stage's columns."""
        return [(c.name, c.sql) for c in self.columns] + [(name, kind) for name, kind, _ in self._hidden]

    @property
    def _hidden(self) -> list[tuple[str, str, pa.DataType]]:
        known = ((self.offset, "bigint", pa.int64()), (self.tombstone, "boolean", pa.bool_()))
        return [(name, kind, arrow) for name, kind, arrow in known if name]

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of a stage's columns."""
        return pa.schema([(c.name, c.arrow) for c in self.columns] + [(name, arrow) for name, _, arrow in self._hidden])

    def encode(self, rows: Rows) -> pa.RecordBatch:
        """Return the rows in :attr:`schema`."""
        arrays = [_encode(array, column) for array, column in zip(rows.batch.columns, self.columns, strict=True)]
        if self.offset:
            arrays.append(rows.offsets)
        if self.tombstone:
            dead = rows.tombstones
            arrays.append(pa.repeat(pa.scalar(False), rows.batch.num_rows) if dead is None else dead)
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


def _encode(array: pa.Array, column: StageColumn) -> pa.Array:
    try:
        return _as_sent(array, column)
    except pa.ArrowException as error:
        raise type(error)(f"column `{column.name}`: {error}") from error


def _as_sent(array: pa.Array, column: StageColumn) -> pa.Array:
    if column.holds == "json":
        return format_json_values(array)
    if array.type == column.arrow:
        return array
    plain = array.storage if isinstance(array, pa.ExtensionArray) else array
    # Digits below a microsecond are cut. Any other loss is an error.
    return pc.cast(plain, options=pc.CastOptions(target_type=column.arrow, allow_time_truncate=True))


@dataclass
class _OpenSplit:
    """The state of one split that is being written.

    :param there: the token of a split that is written or deferred already: its rows are only counted.
    :param seen: number of rows that were passed on.
    :param recent: number of the first row, and offsets, of the batches sent last.
    """

    split: Split
    session: LoadSession
    there: Mapping[str, Any] | None = None
    stream: Stream | None = None
    seen: int = 0
    tombstones: int = 0
    without_key: int = 0
    samples: list[BadRecord] = field(default_factory=list)
    recent: deque[tuple[int, pa.Array]] = field(default_factory=lambda: deque(maxlen=REMEMBERED_BATCHES))


@dataclass
class CopyWriter(SplitWriter):
    """Loads a split by COPY: keeps the session and the stream of batches, and finds the record that an error is about."""

    load: LoadSettings
    _split: Split | None = field(default=None, init=False, repr=False)
    _open_split: _OpenSplit | None = field(default=None, init=False, repr=False)

    durable = True

    @abstractmethod
    def _begin(self, session: LoadSession) -> Mapping[str, Any] | None:
        """Begin the split, and return its token if another task has written it already."""

    @abstractmethod
    def _find_token(self, session: LoadSession) -> Mapping[str, Any] | None:
        """Return the split's token if it is written already. Changes nothing."""

    @abstractmethod
    def _start(self, session: LoadSession) -> Stream:
        """Start the COPY."""

    @abstractmethod
    def _end(self, session: LoadSession, rows: int) -> Mapping[str, Any]:
        """Commit, when everything is loaded, and return the token.

        :param rows: number of rows that the COPY has loaded.
        """

    def _encode(self, rows: Rows) -> pa.RecordBatch:
        return self.load.encode(rows)

    def find_unwritable(self, rows: Rows) -> Mapping[int, str]:
        """Return rows that not even a stage can hold, or whose key has a null."""
        return find_unstorable_rows(rows.batch, self.load.key)

    @property
    def split(self) -> Split:
        assert self._split is not None, "open() comes first"
        return self._split

    @property
    def open_split(self) -> _OpenSplit:
        assert self._open_split is not None, "open() comes first"
        return self._open_split

    def open(self, split: Split) -> None:
        self._split, self._open_split = split, None
        with self._explain_errors("opening"):
            session = self._open_session()
        self._open_split = _OpenSplit(split, session)
        try:
            with self._explain_errors("opening"):
                self.open_split.there = self._begin(session)
        except BaseException:
            self.abort()
            raise
        if self.open_split.there is not None:
            session.close()

    def _open_session(self) -> LoadSession:
        arrays = any(c.holds == "array" for c in self.load.columns)
        return open_session(self.load.server, self.load.application_name, durable=self.durable, arrays=arrays)

    def write(self, rows: Rows) -> None:
        now = self.open_split
        if not rows.batch.num_rows:
            return
        first, now.seen = now.seen, now.seen + rows.batch.num_rows
        now.tombstones += 0 if rows.tombstones is None else pc.sum(rows.tombstones).as_py() or 0
        if now.there is not None or self._has_keyless_rows(rows):
            return
        now.recent.append((first, rows.offsets))
        with self._explain_errors("loading"):
            self._put(rows)

    def _put(self, rows: Rows) -> None:
        now = self.open_split
        if now.stream is None:
            now.stream = self._start(now.session)
        now.stream.put(self._encode(rows))

    def close(self) -> Mapping[str, Any]:
        now = self.open_split
        if now.there is not None:
            return {"rows": now.seen, **now.there}
        if now.without_key:
            raise self._make_key_error()
        try:
            with self._explain_errors("flushing"):
                token = self._flush()
        except SinkUnavailable:
            # The answer to COMMIT may be lost, or another task was faster with this split and has ended this session.
            now.session.close()
            if (there := self._read_outcome()) is None:
                raise
            return there
        now.session.close()
        return token

    def _flush(self) -> Mapping[str, Any]:
        now = self.open_split
        stream, now.stream = now.stream, None
        return self._end(now.session, stream.finish() if stream is not None else 0)

    def _read_outcome(self) -> Mapping[str, Any] | None:
        """Return the split's token if it is written, read in a new session."""
        with suppress(KafkaSparkError), self._explain_errors("looking for"):
            session = self._open_session()
            try:
                return self._find_token(session)
            finally:
                session.close()
        return None

    def abort(self) -> None:
        if self._open_split is not None:
            if self._open_split.stream is not None:
                self._open_split.stream.cancel()
            self._open_split.session.close()
            self._open_split = None

    # --- errors ---

    def _has_keyless_rows(self, rows: Rows) -> bool:
        """Return True if the split holds rows without a key, which fail the window. The rest of the split is then only read to
        count them."""
        now, names = self.open_split, rows.batch.schema.names
        keys = [rows.batch.column(names.index(k)) for k in self.load.key]
        if not now.without_key and not any(k.null_count for k in keys):
            return False
        for index in range(rows.batch.num_rows):
            missing = [name for name, k in zip(self.load.key, keys, strict=True) if not k[index].is_valid]
            if missing:
                now.without_key += 1
                if len(now.samples) < SAMPLES:
                    reason = f"{', '.join(f'`{name}`' for name in missing)} is null, and is part of the key"
                    now.samples.append(self._make_bad_record(rows.offsets[index].as_py(), reason))
        return True

    def _make_key_error(self) -> KafkaSparkError:
        n = self.open_split.without_key
        return SinkRejected(
            self.load.target,
            self.load.window,
            f"{n} record{'s' if n != 1 else ''} of {self.split.range} {'have' if n != 1 else 'has'} no key",
            "Correct the records, or choose other columns; where the record's own key has them, give the operator a `key=`",
            self.open_split.samples,
        )

    @contextmanager
    def _explain_errors(self, doing: str) -> Iterator[None]:
        """Raise errors of the driver as errors of this package. The session cannot be used after one."""
        try:
            yield
        except KafkaSparkError:
            raise
        except Exception as error:
            if not self._is_ours(error):
                raise
            raised = self._explain(error, f"{doing} split {self.split.index} of window {self.load.window}")
            raise raised from self.load.server.get_safe_cause(error)

    def _is_ours(self, error: Exception) -> bool:
        errors = self._open_split.session.errors if self._open_split is not None else ()
        return isinstance(error, (*errors, pa.ArrowException)) or hasattr(error, "sqlstate")

    def _explain(self, error: Exception, doing: str) -> KafkaSparkError:
        if not hasattr(error, "sqlstate"):
            detail = f"{self.split.range} holds a value that has no place in PostgreSQL: {error}"
            return SinkRejected(self.load.target, self.load.window, detail)
        found = self.load.server.explain(error, self.load.window, doing, self.load.target)
        if isinstance(found, SinkRejected) and (offset := self._find_offset_of(str(error))) is not None:
            return SinkRejected(
                found.sink, found.window, found.detail, found.action, [self._make_bad_record(offset, "the record it is about")]
            )
        return found

    def _find_offset_of(self, message: str) -> int | None:
        """Return the offset of the row whose line of the COPY an error names, if it names one."""
        found = re.search(r"COPY .*, line (\d+)", message)
        if found and self._open_split is not None:
            row = int(found[1]) - 1
            for first, offsets in self._open_split.recent:
                if first <= row < first + len(offsets):
                    return offsets[row - first].as_py()
        return None

    def _make_bad_record(self, offset: int, reason: str) -> BadRecord:
        return BadRecord(self.split.range.topic, self.split.range.partition, offset, reason)


@dataclass
class StageWriter(CopyWriter):
    """Loads a split into a stage of its own and enters it into the attempt's registry. The first task attempt at a split wins;
    the others leave nothing.

    :param schema: the schema of stages.
    :param attempt: the beginning of the names of this attempt's tables.
    :param registry: the attempt's list of stages.
    """

    schema: str
    attempt: str
    registry: Name
    _stage: Name | None = field(default=None, init=False, repr=False)

    # A crash of the server empties stages anyway. The driver detects this, because it counts their rows before it commits.
    durable = False

    def _begin(self, session: LoadSession) -> Mapping[str, Any] | None:
        there = self._find_token(session)
        # No lock on the registry is held while the split loads, so that the next attempt can drop it.
        session.commit()
        return there

    def _find_token(self, session: LoadSession) -> Mapping[str, Any] | None:
        found = session.fetch_rows(sql.select_stages(self.registry, self.split.index))
        return self._make_token(*found[0]) if found else None

    def _start(self, session: LoadSession) -> Stream:
        self._stage = Name(self.schema, f"{self.attempt}_{self.split.index}_{uuid4().hex[:6]}")
        session.run(sql.create_stage(self.load.definitions, self._stage))
        return Stream(session, self._stage, self.load.schema, [kind for _, kind in self.load.definitions])

    def _end(self, session: LoadSession, rows: int) -> Mapping[str, Any]:
        now = self.open_split
        mine = (self.split.index, self._stage.table if rows and self._stage else None, rows, now.tombstones)
        if rows != now.seen:
            raise SinkUnavailable(self.load.target, f"loading {self.split.range}", f"it took {rows} of {now.seen} rows")
        if session.run(sql.register_stage(self.registry, *mine)) == 1:
            session.commit()
            return self._make_token(*mine)
        # Another task attempt at this split was faster. This stage is rolled back.
        return self._make_token(*session.fetch_rows(sql.select_stages(self.registry, self.split.index))[0])

    def _make_token(self, split: int, stage: str | None, rows: int, tombstones: int) -> Mapping[str, Any]:
        return {"rows": rows, "stage": stage, "tombstones": tombstones}

    def _explain(self, error: Exception, doing: str) -> KafkaSparkError:
        if getattr(error, "sqlstate", None) == _UNDEFINED_TABLE:
            return Fenced(self.load.pipeline, doing)
        return super()._explain(error, doing)


# --- rows that not even a stage can hold --------------------------------------------------------------------------------


_FIRST_DAY = -2_440_588
"""Days from the epoch back to 24 November of 4714 BC, in the calendar that PostgreSQL counts back with."""
_FIRST_MICROSECOND = _FIRST_DAY * 86_400_000_000
NUL = "\x00"


def find_unstorable_rows(batch: pa.RecordBatch, key: Sequence[str]) -> dict[int, str]:
    """Return the rows that PostgreSQL cannot hold even in a stage: their positions in the batch, with the reasons.

    :param key: the columns that identify a row and must not be null.
    """
    found: dict[int, str] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for wrong, reason in _list_checks(column, name in key):
            if pc.any(wrong).as_py():
                for at in pc.indices_nonzero(wrong.fill_null(False)).to_pylist():
                    found.setdefault(at, f"column `{name}` {reason}")
    return found


def _list_checks(column: pa.Array, of_key: bool) -> Iterator[tuple[Any, str]]:
    kind = column.type
    if of_key and column.null_count:
        yield column.is_null(), "is null, and is part of the key"
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        yield pc.match_substring(column, NUL), "has a NUL character, which PostgreSQL cannot hold"
    elif (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and pa.types.is_string(kind.value_type):
        yield _find_nul_lists(column), "has a NUL character, which PostgreSQL cannot hold"
    elif pa.types.is_date32(kind):
        yield pc.less(column.cast(pa.int32()), _FIRST_DAY), "is before the first day that PostgreSQL knows, in 4714 BC"
    elif pa.types.is_timestamp(kind) and kind.unit == "us":
        yield pc.less(column.cast(pa.int64()), _FIRST_MICROSECOND), "is before the first day that PostgreSQL knows, in 4714 BC"


def _find_nul_lists(lists: pa.ListArray) -> pa.BooleanArray:
    """Return a boolean per list: True if it holds a text with a NUL character."""
    texts = pc.list_flatten(lists)
    wrong = pc.match_substring(texts, NUL).fill_null(False)
    parents: Mapping[int, None] = dict.fromkeys(pc.list_parent_indices(lists).filter(wrong).to_pylist())
    return pa.array([at in parents for at in range(len(lists))], pa.bool_())


# --- splits that commit one by one --------------------------------------------------------------------------------------


DEFERRED = "deferred"
"""Key of a token: the split is deferred."""

_TEMPORARY = "airflow_split"
"""The temporary table of a split that is not copied into the target directly."""
_POLL_SECONDS = 0.05
"""Seconds between two tries to take the lock of a split."""
_IN_THE_WAY = ("40P01", "55P03")
"""SQLSTATEs of a deadlock and of a lock timeout: other splits may hold uncommitted rows that exclude rows of this one."""


@dataclass
class SplitAtomicWriter(CopyWriter):
    """Loads a split into the target, in one transaction with its marker, so that the split is there once or not at all.

    Only the task that holds the split's lock may write its marker. The first task takes the lock, writes the marker and loads.
    Another task loads a temporary table meanwhile and, when that is complete, waits for the lock. If the holder has not finished
    after the lock timeout, its session is ended.

    Where bad records are tolerated, a split is deferred if it holds some, or if the target refuses some of its rows: nothing of
    it is written, and its marker keeps all tasks from writing it. The driver then commits it (:class:`.SplitsWindowWriter`), once
    these records are known and handled.

    :param windows: the sink's record of windows.
    :param splits: the table of markers.
    :param merge: the statements that move rows from a temporary table into the target.
    :param direct: True if COPY may write into the target itself.
    :param owner: the attempt that these tasks belong to. Once another attempt owns the pipeline's splits, none of them commits.
    :param tolerates: True if bad records are tolerated.
    """

    windows: Name
    splits: Name
    merge: Merge
    direct: bool
    owner: int
    tolerates: bool = False
    _claimed: bool = field(default=False, init=False, repr=False)

    def _begin(self, session: LoadSession) -> Mapping[str, Any] | None:
        self._claimed = session.fetch_rows(sql.try_lock(self._lock))[0][0]
        return self._claim(session) if self._claimed else None

    def _claim(self, session: LoadSession) -> Mapping[str, Any] | None:
        """Write the marker while holding the lock, and return the split's token if it is written already.

        :raises Fenced: another attempt owns the pipeline's splits.
        :raises SinkRejected: another split is there that has some of the same offsets.
        """
        # First lock the owner's row, until this transaction ends. An attempt that takes the window over waits for that and then
        # sees the marker; or it was faster, and this task sees that.
        owners = session.fetch_rows(sql.lock_owner(self.splits, self.load.pipeline))
        if (there := self._find_token(session)) is not None:
            return there
        # Its markers are deleted when the next window is applied. A task that comes even later must not write the split again.
        if session.fetch_rows(sql.select_applied_since(self.windows, self.load.pipeline, self.load.number)):
            return {}
        if [owner for (owner,) in owners] != [self.owner]:
            raise Fenced(self.load.pipeline, f"writing {self.split.range} of window {self.load.number}")
        self._refuse_overlap(session)
        session.run(sql.claim_split(self.splits, self.load.pipeline, self.load.number, self._marker))
        return None

    def _find_token(self, session: LoadSession) -> Mapping[str, Any] | None:
        there = next((marker for marker in self._read_markers(session) if marker[:4] == self._marker[:4]), None)
        return None if there is None else _make_token(there)

    def _refuse_overlap(self, session: LoadSession) -> None:
        mine = self._marker
        for there in self._read_markers(session):
            shares = there.start == mine.start or (there.start < mine.end and mine.start < there.end)
            if there[:2] == mine[:2] and shares:
                detail = f"an earlier attempt wrote {there.text} as one split, this one has {self.split.range}"
                raise SinkRejected(self.load.target, self.load.window, detail, "Keep the splits of a window until it is complete")

    def _read_markers(self, session: LoadSession) -> list[sql.SplitRow]:
        found = session.fetch_rows(sql.select_splits(self.splits, self.load.pipeline, self.load.number))
        return [sql.SplitRow(*row) for row in found]

    def _start(self, session: LoadSession) -> Stream:
        if self._copies:
            filled = [sql.OFFSET_TYPES[sql.OFFSET_COLUMNS.index(name)] for name in self.merge.filled]
            return Stream(session, self.merge.target, self._schema, [*(c.sql for c in self.load.columns), *filled])
        session.run(sql.create_temporary(self.load.definitions, _TEMPORARY))
        return Stream(session, _TEMPORARY, self._schema, [kind for _, kind in self.load.definitions])

    def _end(self, session: LoadSession, rows: int) -> Mapping[str, Any]:
        copied = self._copies
        if not self._claimed:
            self._wait(session)
            self._claimed = True
            if (there := self._claim(session)) is not None:
                return {"rows": rows, **there}
        written, deleted = (rows, 0) if copied or not rows else self._merge(session)
        if rows != self.open_split.seen or (not self.merge.key and written != rows):
            detail = f"{self.open_split.seen} rows of {self.split.range} became {written}"
            raise SinkRejected(self.load.target, self.load.window, detail, "See the table's triggers")
        marker = self._marker._replace(rows=rows, written=written, deleted=deleted)
        session.run(sql.count_split(self.splits, self.load.pipeline, self.load.number, marker))
        session.commit()
        return _make_token(marker)

    def defer(self) -> None:
        """Defer the commit of the split, as :meth:`SplitWriter.defer`."""
        if self.tolerates and self.open_split.there is None:
            with self._explain_errors("putting off"):
                self.open_split.there = self._defer_split()

    def _put(self, rows: Rows) -> None:
        try:
            super()._put(rows)
        except Exception as error:
            if not self._can_defer(error):
                raise
            self.open_split.there = self._defer_split()

    def _flush(self) -> Mapping[str, Any]:
        try:
            return super()._flush()
        except Exception as error:
            if not self._can_defer(error):
                raise
            return {"rows": self.open_split.seen, **self._defer_split()}

    def _can_defer(self, error: Exception) -> bool:
        return self.tolerates and (is_refusal(error) or getattr(error, "sqlstate", None) in _IN_THE_WAY)

    def _defer_split(self) -> Mapping[str, Any]:
        """Roll back the split and write the marker that keeps all tasks from writing it. Another task may have been faster, with
        this marker or with the split. Return the token."""
        if self.open_split.stream is not None:
            # First end the thread of the COPY: to close a session that it uses would crash the process.
            self.open_split.stream.cancel()
            self.open_split.stream = None
        self.open_split.session.close()
        session = self.open_split.session = self._open_session()
        self._wait(session)
        if (there := self._claim(session)) is None:
            marker = self._marker._replace(rows=sql.DEFERRED)
            session.run(sql.count_split(self.splits, self.load.pipeline, self.load.number, marker))
            session.commit()
            there = _make_token(marker)
        session.close()
        return there

    def _wait(self, session: LoadSession) -> None:
        """Take the split's lock. Ends the session of its holder after the lock timeout."""
        deadline = time.monotonic() + self.load.server.lock_timeout
        # Polled, since a lock timeout would be an error and roll back what is loaded.
        while not session.fetch_rows(sql.try_lock(self._lock))[0][0]:
            if time.monotonic() > deadline:
                session.fetch_rows(sql.terminate_lock_holder(self._lock))
            time.sleep(_POLL_SECONDS)

    def _merge(self, session: LoadSession) -> tuple[int, int]:
        stage = StagedSplit(quote(_TEMPORARY), self.split.range.topic, self.split.range.partition)
        if not self.merge.key:
            return session.run(self.merge.insert(stage)), 0
        if not self.open_split.tombstones:
            return session.run(self.merge.upsert([stage])), 0
        written, deleted = session.fetch_rows(self.merge.upsert_and_delete([stage]))[0]
        return written, deleted

    @property
    def _copies(self) -> bool:
        """True if COPY writes into the target itself."""
        return self.direct and self._claimed

    @property
    def _marker(self) -> sql.SplitRow:
        r = self.split.range
        return sql.SplitRow(r.topic, r.partition, r.start, r.end)

    @property
    def _lock(self) -> int:
        r = self.split.range
        return make_lock_key(
            "split", str(self.windows), self.load.pipeline, str(self.load.number), r.topic, str(r.partition), str(r.start)
        )

    @property
    def _schema(self) -> pa.Schema:
        if not self._copies:
            return self.load.schema
        kinds = dict(zip(sql.OFFSET_COLUMNS, (pa.string(), pa.int32(), pa.int64()), strict=True))
        own = [(c.name, c.arrow) for c in self.load.columns]
        return pa.schema([*own, *((name, kinds[name]) for name in self.merge.filled)])

    def _encode(self, rows: Rows) -> pa.RecordBatch:
        batch, n, r = self.load.encode(rows), rows.batch.num_rows, self.split.range
        if not self._copies:
            return batch
        known = (pa.repeat(pa.scalar(r.topic), n), pa.repeat(pa.scalar(r.partition, pa.int32()), n), rows.offsets)
        origin = dict(zip(sql.OFFSET_COLUMNS, known, strict=True))
        own = batch.columns[: len(self.load.columns)]
        return pa.RecordBatch.from_arrays([*own, *(origin[name] for name in self.merge.filled)], schema=self._schema)


def _make_token(marker: sql.SplitRow) -> Mapping[str, Any]:
    if marker.is_deferred:
        return {DEFERRED: True}
    return {"rows": marker.rows, "written": marker.written, "deleted": marker.deleted}
