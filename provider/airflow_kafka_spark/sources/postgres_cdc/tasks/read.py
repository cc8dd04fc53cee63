"""Reading splits inside a Spark task: a window of the log, and a chunk of a snapshot as columns of texts, both by COPY."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.hooks.databases import fetch_rows, quote, wait_for_replicas
from airflow_kafka_spark.sources.cdc.tasks.columns import PIECE_BYTES, PIECE_ROWS, format_events
from airflow_kafka_spark.sources.cdc.tasks.reader import EventReader
from airflow_kafka_spark.sources.cdc.tasks.snapshot import TableSnapshot
from airflow_kafka_spark.sources.cdc.tasks.transactions import TransactionWriter
from airflow_kafka_spark.sources.postgres_cdc.tasks.batches import BatchWriter, LogMessages
from airflow_kafka_spark.sources.postgres_cdc.tasks.events import PostgresEventForm, PostgresEventWriter
from airflow_kafka_spark.sources.postgres_cdc.tasks.pgoutput import Message, NotPgoutput, decode
from airflow_kafka_spark.sources.postgres_cdc.tasks.session import SlotServer, format_lsn, format_publication_names, parse_lsn
from airflow_kafka_spark.sources.postgres_cdc.tasks.snapshot import (
    PostgresChunkFilter,
    PostgresTableShape,
    make_chunk_token,
    open_chunk,
)
from airflow_kafka_spark.sources.postgres_cdc.tasks.values import UserType

if TYPE_CHECKING:
    import psycopg


_DELIMITER = "\x1f"
"""Separates the values of a row. Values that have this character are in quotes, so that it should be a rare one."""


def read_chunk_rows(
    connection: psycopg.Connection[Any], chunk: Mapping[str, Any], shape: PostgresTableShape
) -> Generator[list[pa.Array], None, None]:
    """Yield the rows of a chunk, some at a time: per column, the texts of its values as PostgreSQL writes them (binary).

    :param chunk: a split.
    """
    ends = ((">", chunk["after"]), ("<=", chunk["upto"]))
    conditions = [shape.compare_key(operator, key) for operator, key in ends if key is not None]
    if shape.row_filter:
        conditions.append(f"({shape.row_filter})")
    columns = ", ".join(quote(column.name) for column in shape.relation.columns)
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    options = f"(FORMAT csv, DELIMITER '{_DELIMITER}')"
    with (
        connection.cursor() as cursor,
        cursor.copy(f"COPY (SELECT {columns} FROM {shape.source}{where}) TO STDOUT WITH {options}".encode()) as copy,
    ):
        for lines, _ in _read_lines(copy, _make_header(len(shape.relation.columns))):
            yield parse_lines(lines)


def _make_header(width: int) -> bytes:
    """Return the line of names before the lines of a table."""
    return (_DELIMITER.join(map(str, range(width))) + "\n").encode()


def _read_lines(copy: psycopg.Copy, header: bytes) -> Iterator[tuple[bytearray, list[int]]]:
    """Yield the lines of a COPY, some at a time, each time behind a header, and their sizes in bytes."""
    from psycopg.errors import error_from_result
    from psycopg.pq import ExecStatus

    libpq, is_complete = copy.connection.pgconn, False
    read = libpq.get_copy_data
    while not is_complete and (line := copy.read()):
        # The lines are copied at once: many objects that live for a while would keep Python's garbage collector busy.
        lines, sizes, left = bytearray(header), [len(line)], PIECE_BYTES - len(line)
        lines += line
        for _ in range(PIECE_ROWS - 1):
            # Copy.read() waits for the network before each line; libpq has many lines by then.
            count, line = read(1)
            if count <= 0:
                is_complete = count < 0
                if is_complete or not (line := copy.read()):
                    break
                count = len(line)
            lines += line
            sizes.append(count)
            left -= count
            if left <= 0:
                break
        if is_complete:
            # Before the last lines: if these are refused, the session is in a state in which psycopg can end the COPY.
            for result in list(iter(libpq.get_result, None)):
                if result.status != ExecStatus.COMMAND_OK:
                    raise error_from_result(result)
        yield lines, sizes


def parse_lines(lines: bytearray) -> list[pa.Array]:
    """Return the values of lines of COPY's format `csv`, per column (binary).

    :param lines: complete lines, at least one, behind a line of names: Arrow takes some bytes at the beginning for a mark of the
        encoding.
    """
    names = lines[: lines.index(b"\n")].decode().split(_DELIMITER)
    table = csv.read_csv(
        pa.BufferReader(lines),
        read_options=csv.ReadOptions(use_threads=False, block_size=len(lines)),
        parse_options=csv.ParseOptions(delimiter=_DELIMITER, newlines_in_values=True, ignore_empty_lines=False),
        convert_options=csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.binary()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    return [column.combine_chunks() for column in table.columns]


PEEK = (
    "COPY (SELECT (lsn - '0/0')::bigint, data FROM pg_catalog.pg_logical_slot_peek_binary_changes(%s, %s::pg_lsn, NULL, "
    "'proto_version', '1', 'publication_names', %s)) TO STDOUT (FORMAT binary)"
)
_COPY_HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
"""Before the first row of a binary COPY."""
_LSN_AT, _MESSAGE_AT = 6, 18
"""Indexes of the first bytes of the LSN and of the message in a row. A row begins with the number of its values, each value with
its size."""


def parse_messages(lines: bytearray, sizes: Sequence[int]) -> LogMessages:
    """Return the messages of some rows of :data:`PEEK`.

    :param lines: the rows.
    :param sizes: of the rows, in bytes. The first one may have the header before it, and the last one may be the end.
    """
    begins = np.cumsum([0, *sizes])
    if lines.startswith(_COPY_HEADER):
        begins[0] = len(_COPY_HEADER)
    if begins[-1] - begins[-2] < _MESSAGE_AT:
        begins = begins[:-1]
    # Some bytes behind the last message.
    data, begins, ends = bytes(lines) + bytes(8), begins[:-1], begins[1:]
    places = (begins + _LSN_AT)[:, None] + np.arange(8)
    lsns = np.frombuffer(data, np.uint8)[places].view(">i8").reshape(-1).astype(np.int64)
    return LogMessages(data, begins + _MESSAGE_AT, ends, lsns)


@dataclass(frozen=True)
class PostgresLogReader(EventReader):
    """Reads windows of the log, and chunks of snapshots.

    The token of a chunk is its snapshot. That of a window of the log has its last transaction, and the tables whose snapshot has
    to begin again.

    :param server: the server and the slot.
    :param publication: the publication.
    :param form: the form of events.
    :param max_replica_lag: seconds that a replica may be behind when a chunk is read; None if it is not checked.
    :param splits: per split its bounds and the identity of the log (JSON).
    """

    server: SlotServer
    publication: str
    form: PostgresEventForm
    max_replica_lag: float | None = None

    @property
    def has_schemas(self) -> bool:
        """True if keys and values carry their schema."""
        return self.form.schemas

    # --- the log ---

    def _read_log(self, split: int, bounds: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        start, end = parse_lsn(bounds["start"]), parse_lsn(bounds["end"])
        with ExitStack() as stack:
            chunks = self._make_filter(stack, bounds)
            doing = f"reading the log from {bounds['start']} to {bounds['end']}"
            connection = stack.enter_context(self.server.open_session(doing))
            self.server.refuse_other(connection, start, dict(bounds["log"]), end)
            self.server.release(connection)
            writer = PostgresEventWriter(
                self.form, start, end, read_user_types(connection), chunks, read_money_digits(connection)
            )
            # Closed before the session: a session whose COPY is not read to its end would wait for it forever.
            found = stack.enter_context(closing(self._find_messages(connection, bounds["end"])))
            batches = self._write_batches(writer, found)
            yield from TransactionWriter(self.form).write(batches) if self.form.transactions else batches
        again = {"truncated": [list(table) for table in chunks.truncated]} if chunks is not None and chunks.truncated else {}
        last = {"last": [format_lsn(writer.last.commit_lsn), writer.last.xid]} if writer.last is not None else {}
        self._tokens[split] = {**last, **again}

    def _write_batches(self, writer: PostgresEventWriter, found: Iterable[LogMessages]) -> Iterator[pa.RecordBatch]:
        batches = BatchWriter(writer, self._decode_message)
        for messages in found:
            yield from batches.write(messages)
            if writer.is_past:
                break

    def _make_filter(self, stack: ExitStack, bounds: Mapping[str, Any]) -> PostgresChunkFilter | None:
        """Return the filter of events that chunks of a snapshot include; None without a snapshot.

        :param stack: to which its session is added. The session of the log is busy while messages are read.
        """
        tables = [TableSnapshot.from_json(value) for value in bounds.get("snapshot", ())]
        if not tables:
            return None
        connection = stack.enter_context(self.server.open_session("comparing keys with the chunks of a snapshot"))
        return PostgresChunkFilter(
            tables={table.table: table for table in tables},
            publishes_truncates="t" not in self.form.skipped,
            server=self.server,
            connection=connection,
            publication=self.publication,
        )

    def _find_messages(self, connection: psycopg.Connection[Any], end: str) -> Generator[LogMessages, None, None]:
        """Yield messages, several at a time. The server keeps the result, in a file if it is large."""
        refuse_missing_publication = self.server.watch_publication(connection, self.publication)
        given = [self.server.slot, end, format_publication_names(self.publication)]
        with connection.cursor() as cursor, cursor.copy(PEEK, given) as copy:
            for lines, sizes in _read_lines(copy, b""):
                refuse_missing_publication()
                if len((found := parse_messages(lines, sizes)).lsns):
                    yield found
            refuse_missing_publication()

    def _decode_message(self, lsn: int, data: bytes) -> Message | None:
        return decode_message(self.server.server.where, lsn, data)

    # --- snapshots ---

    def _read_rows(self, split: int, chunk: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        with self.server.open_session(f"reading rows of {'.'.join(chunk['table'])}") as connection:
            self.server.refuse_other(connection, parse_lsn(chunk["start"]), dict(chunk["log"]))
            writer = PostgresEventWriter(self.form, 0, 0, read_user_types(connection), money_digits=read_money_digits(connection))
            if self.max_replica_lag is not None:
                connection.execute(wait_for_replicas(self.max_replica_lag).encode())
            connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            opened = open_chunk(connection, self.publication, chunk)
            table = writer.begin_rows(opened.shape.relation, opened.now_us)
            # Closed before the session: a session whose COPY is not read to its end would wait for it forever.
            with closing(read_chunk_rows(connection, chunk, opened.shape)) as pieces:
                for columns in pieces:
                    yield from format_events(table, writer.make_frame(table, opened.lsn), columns)
        self._tokens[split] = make_chunk_token(opened)


def decode_message(where: str, lsn: int, data: bytes) -> Message | None:
    """Return a message of the log; None if it changes no row.

    :param where: the server, for messages.
    :raises SourceRejected: the message cannot be decoded.
    """
    try:
        return decode(data)
    except NotPgoutput as error:
        raise SourceRejected(where, f"the log at {format_lsn(lsn)} is not understood: {error}") from None


def read_user_types(connection: psycopg.Connection[Any]) -> dict[int, UserType]:
    """Return the types that are not built in: domains and their base types, arrays and their elements, enumerations."""
    found = fetch_rows(
        connection,
        "SELECT oid::bigint, typtype::text, typbasetype::bigint, typtypmod, "
        # Arrays with another separator, as those of PostGIS, are written as PostgreSQL's text.
        "CASE WHEN typcategory = 'A' AND typtype = 'b' AND typdelim = ',' THEN typelem::bigint ELSE 0 END, "
        "ARRAY(SELECT enumlabel::text FROM pg_catalog.pg_enum WHERE enumtypid = t.oid ORDER BY enumsortorder) "
        "FROM pg_catalog.pg_type t WHERE oid >= 16384 AND (typtype IN ('d', 'e') OR typcategory = 'A')",
    )
    return {oid: UserType(kind, base, modifier, element, tuple(labels)) for oid, kind, base, modifier, element, labels in found}


def read_money_digits(connection: psycopg.Connection[Any]) -> int:
    """Return the number of decimal places that `money` has in the locale of the database."""
    return len(re.sub(r"\D", "", fetch_rows(connection, "SELECT 1::int4::money::text")[0][0])) - 1
