"""The task's side of the PostgreSQL sink: one split, in one transaction of its own, into a stage that only the driver reads.

Runs in Spark's tasks. :mod:`~airflow_kafka_spark.sinks.postgres_split_worker` loads into the target itself.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.errors import Fenced, KafkaSparkError, SinkRejected, SinkUnavailable
from airflow_kafka_spark.hooks.postgres import Name
from airflow_kafka_spark.sinks import postgres_sql as sql
from airflow_kafka_spark.sinks.base import Rows, SplitWriter
from airflow_kafka_spark.sinks.files_text_worker import json_values
from airflow_kafka_spark.sinks.postgres_connection import Server
from airflow_kafka_spark.sinks.postgres_load_worker import Session, Stream, open_session
from airflow_kafka_spark.sinks.postgres_refusals_worker import refusals
from airflow_kafka_spark.sinks.postgres_types import StageColumn
from airflow_kafka_spark.windows.model import BadRecord, Split

SAMPLES = 5
REMEMBERED_BATCHES = 32
"""Batches whose offsets are kept, to name the record that the server refused some moments later."""

_UNDEFINED_TABLE = "42P01"


@dataclass(frozen=True)
class Load:
    """What all splits of an attempt have in common.

    :param server: where to, with the password.
    :param application_name: by which a later attempt finds this one's sessions.
    :param window: for people.
    :param target: the table, for people.
    :param columns: the rows' columns.
    :param key: those that must not be null.
    :param offset: name of the column that takes each row's offset, or None.
    :param tombstone: name of the column that marks deletes, or None.
    """

    server: Server
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
        """Names and types of a stage's columns."""
        return [(c.name, c.sql) for c in self.columns] + [(name, kind) for name, kind, _ in self._hidden]

    @property
    def _hidden(self) -> list[tuple[str, str, pa.DataType]]:
        known = ((self.offset, "bigint", pa.int64()), (self.tombstone, "boolean", pa.bool_()))
        return [(name, kind, arrow) for name, kind, arrow in known if name]

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([(c.name, c.arrow) for c in self.columns] + [(name, arrow) for name, _, arrow in self._hidden])

    def encode(self, rows: Rows) -> pa.RecordBatch:
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
        return json_values(array)
    if array.type == column.arrow:
        return array
    plain = array.storage if isinstance(array, pa.ExtensionArray) else array
    # Digits below a microsecond go; anything else that would be lost is an error.
    return pc.cast(plain, options=pc.CastOptions(target_type=column.arrow, allow_time_truncate=True))


@dataclass
class _Progress:
    """How far one split is.

    :param there: what is known of a split that needs no writing any more.
    :param seen: rows handed over.
    :param recent: the first row's number, and the offsets, of the batches sent last.
    """

    split: Split
    session: Session
    there: Mapping[str, Any] | None = None
    stream: Stream | None = None
    seen: int = 0
    tombstones: int = 0
    without_key: int = 0
    samples: list[BadRecord] = field(default_factory=list)
    recent: deque[tuple[int, pa.Array]] = field(default_factory=lambda: deque(maxlen=REMEMBERED_BATCHES))


@dataclass
class CopyWriter(SplitWriter):
    """What both writers share: the session, the stream of batches, and errors that name the record."""

    load: Load
    _split: Split | None = field(default=None, init=False, repr=False)
    _progress: _Progress | None = field(default=None, init=False, repr=False)

    durable = True

    @abstractmethod
    def _begin(self, session: Session) -> Mapping[str, Any] | None:
        """Look whether the split is there already, and what it holds then."""

    @abstractmethod
    def _known(self, session: Session) -> Mapping[str, Any] | None:
        """The same, and nothing else."""

    @abstractmethod
    def _start(self, session: Session) -> Stream:
        """Where the rows go."""

    @abstractmethod
    def _end(self, session: Session, rows: int) -> Mapping[str, Any]:
        """Everything is loaded: commit."""

    def _encode(self, rows: Rows) -> pa.RecordBatch:
        return self.load.encode(rows)

    def refusals(self, rows: Rows) -> Mapping[int, str]:
        """Rows that not even a stage can hold, or that nobody could find again."""
        return refusals(rows.batch, self.load.key)

    @property
    def split(self) -> Split:
        assert self._split is not None, "open() comes first"
        return self._split

    @property
    def progress(self) -> _Progress:
        assert self._progress is not None, "open() comes first"
        return self._progress

    def open(self, split: Split) -> None:
        self._split, self._progress = split, None
        with self._explained("opening"):
            session = self._open_session()
        self._progress = _Progress(split, session)
        try:
            with self._explained("opening"):
                self.progress.there = self._begin(session)
        except BaseException:
            self.abort()
            raise
        if self.progress.there is not None:
            session.close()

    def _open_session(self) -> Session:
        arrays = any(c.holds == "array" for c in self.load.columns)
        return open_session(self.load.server, self.load.application_name, durable=self.durable, arrays=arrays)

    def write(self, rows: Rows) -> None:
        now = self.progress
        if not rows.batch.num_rows:
            return
        first, now.seen = now.seen, now.seen + rows.batch.num_rows
        now.tombstones += 0 if rows.tombstones is None else pc.sum(rows.tombstones).as_py() or 0
        if now.there is not None or self._refuses(rows):
            return
        now.recent.append((first, rows.offsets))
        with self._explained("loading"):
            self._put(rows)

    def _put(self, rows: Rows) -> None:
        now = self.progress
        if now.stream is None:
            now.stream = self._start(now.session)
        now.stream.put(self._encode(rows))

    def close(self) -> Mapping[str, Any]:
        now = self.progress
        if now.there is not None:
            return {"rows": now.seen, **now.there}
        if now.without_key:
            raise self._key_error()
        try:
            with self._explained("flushing"):
                token = self._flush()
        except SinkUnavailable:
            # Perhaps the answer to COMMIT was lost, or another task had this split ready first and ended this one's session.
            now.session.close()
            if (there := self._look_again()) is None:
                raise
            return there
        now.session.close()
        return token

    def _flush(self) -> Mapping[str, Any]:
        now = self.progress
        stream, now.stream = now.stream, None
        return self._end(now.session, stream.finish() if stream is not None else 0)

    def _look_again(self) -> Mapping[str, Any] | None:
        """What is known of the split, asked in a new session."""
        with suppress(KafkaSparkError), self._explained("looking for"):
            session = self._open_session()
            try:
                return self._known(session)
            finally:
                session.close()
        return None

    def abort(self) -> None:
        if self._progress is not None:
            if self._progress.stream is not None:
                self._progress.stream.abandon()
            self._progress.session.close()
            self._progress = None

    # --- what can be wrong ---

    def _refuses(self, rows: Rows) -> bool:
        """A row without a key cannot be found again. The rest of the split is only read to count such rows."""
        now, names = self.progress, rows.batch.schema.names
        keys = [rows.batch.column(names.index(k)) for k in self.load.key]
        if not now.without_key and not any(k.null_count for k in keys):
            return False
        for index in range(rows.batch.num_rows):
            missing = [name for name, k in zip(self.load.key, keys, strict=True) if not k[index].is_valid]
            if missing:
                now.without_key += 1
                if len(now.samples) < SAMPLES:
                    reason = f"{', '.join(f'`{name}`' for name in missing)} is null, and is part of the key"
                    now.samples.append(self._bad(rows.offsets[index].as_py(), reason))
        return True

    def _key_error(self) -> KafkaSparkError:
        n = self.progress.without_key
        return SinkRejected(
            self.load.target,
            self.load.window,
            f"{n} record{'s' if n != 1 else ''} of {self.split.range} {'have' if n != 1 else 'has'} no key",
            "Correct the records, or choose other columns; where the record's own key has them, give the operator a `key=`",
            self.progress.samples,
        )

    @contextmanager
    def _explained(self, doing: str) -> Iterator[None]:
        """Errors of the driver become ours; the session is of no use after one."""
        try:
            yield
        except KafkaSparkError:
            raise
        except Exception as error:
            if not self._ours(error):
                raise
            raised = self._explain(error, f"{doing} split {self.split.index} of window {self.load.window}")
            raise raised from self.load.server.cause(error)

    def _ours(self, error: Exception) -> bool:
        errors = self._progress.session.errors if self._progress is not None else ()
        return isinstance(error, (*errors, pa.ArrowException)) or hasattr(error, "sqlstate")

    def _explain(self, error: Exception, doing: str) -> KafkaSparkError:
        if not hasattr(error, "sqlstate"):
            detail = f"{self.split.range} holds a value that has no place in PostgreSQL: {error}"
            return SinkRejected(self.load.target, self.load.window, detail)
        found = self.load.server.explain(error, self.load.window, doing, self.load.target)
        if isinstance(found, SinkRejected) and (offset := self._offset_of(str(error))) is not None:
            return SinkRejected(
                found.sink, found.window, found.detail, found.action, [self._bad(offset, "the record it is about")]
            )
        return found

    def _offset_of(self, message: str) -> int | None:
        """The offset of the line of a COPY that an error names."""
        found = re.search(r"COPY .*, line (\d+)", message)
        if found and self._progress is not None:
            row = int(found[1]) - 1
            for first, offsets in self._progress.recent:
                if first <= row < first + len(offsets):
                    return offsets[row - first].as_py()
        return None

    def _bad(self, offset: int, reason: str) -> BadRecord:
        return BadRecord(self.split.range.topic, self.split.range.partition, offset, reason)


@dataclass
class StageWriter(CopyWriter):
    """Loads a split into a stage of its own, and enters it into the attempt's registry: the first task attempt of a split wins,
    the others leave nothing behind.

    :param schema: where stages live.
    :param attempt: begins the names of this attempt's tables.
    :param registry: the attempt's list of stages.
    """

    schema: str
    attempt: str
    registry: Name
    _stage: Name | None = field(default=None, init=False, repr=False)

    # Stages do not survive a crash of the server anyway: the driver counts before it commits.
    durable = False

    def _begin(self, session: Session) -> Mapping[str, Any] | None:
        there = self._known(session)
        # Nothing is held of the registry while the split loads: the next attempt can drop it.
        session.commit()
        return there

    def _known(self, session: Session) -> Mapping[str, Any] | None:
        found = session.rows(sql.registered(self.registry, self.split.index))
        return self._token(*found[0]) if found else None

    def _start(self, session: Session) -> Stream:
        self._stage = Name(self.schema, f"{self.attempt}_{self.split.index}_{uuid4().hex[:6]}")
        session.run(sql.create_stage(self.load.definitions, self._stage))
        return Stream(session, self._stage, self.load.schema, [kind for _, kind in self.load.definitions])

    def _end(self, session: Session, rows: int) -> Mapping[str, Any]:
        now = self.progress
        mine = (self.split.index, self._stage.table if rows and self._stage else None, rows, now.tombstones)
        if rows != now.seen:
            raise SinkUnavailable(self.load.target, f"loading {self.split.range}", f"it took {rows} of {now.seen} rows")
        if session.run(sql.register(self.registry, *mine)) == 1:
            session.commit()
            return self._token(*mine)
        # Another attempt at this split was faster. What is here goes with the transaction.
        return self._token(*session.rows(sql.registered(self.registry, self.split.index))[0])

    def _token(self, split: int, stage: str | None, rows: int, tombstones: int) -> Mapping[str, Any]:
        return {"rows": rows, "stage": stage, "tombstones": tombstones}

    def _explain(self, error: Exception, doing: str) -> KafkaSparkError:
        if getattr(error, "sqlstate", None) == _UNDEFINED_TABLE:
            return Fenced(self.load.pipeline, doing)
        return super()._explain(error, doing)
