"""Reading splits inside a Spark task: a window of the log by the protocol of replication, a chunk of a snapshot by a query.

PyMySQL reads a result value by value. For a chunk, only the beginning of each row is found so; the values of a column are found
for many rows at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from airflow_kafka_spark.errors import LogLost
from airflow_kafka_spark.sources.cdc.tasks.columns import PIECE_BYTES, PIECE_ROWS, format_events, take_ranges
from airflow_kafka_spark.sources.cdc.tasks.events import Event
from airflow_kafka_spark.sources.cdc.tasks.reader import EventRange, EventReader, batch_events
from airflow_kafka_spark.sources.cdc.tasks.snapshot import TableSnapshot
from airflow_kafka_spark.sources.cdc.tasks.transactions import TransactionWriter
from airflow_kafka_spark.sources.jdbc.mysql import fetch_rows
from airflow_kafka_spark.sources.mysql_cdc.tasks import binlog
from airflow_kafka_spark.sources.mysql_cdc.tasks.batches import LogParser
from airflow_kafka_spark.sources.mysql_cdc.tasks.binlog import Transactions
from airflow_kafka_spark.sources.mysql_cdc.tasks.catalog import DIALECT, MySqlTableShape
from airflow_kafka_spark.sources.mysql_cdc.tasks.events import MySqlEventForm, MySqlEventWriter, ParsedRows, RowPosition
from airflow_kafka_spark.sources.mysql_cdc.tasks.packets import Packets, receive_packets
from airflow_kafka_spark.sources.mysql_cdc.tasks.session import NEW_PIPELINE, Located, LogCoordinates, LogServer, ReplicaLag
from airflow_kafka_spark.sources.mysql_cdc.tasks.snapshot import MySqlChunkFilter, format_literals, make_chunk_token, open_chunk

if TYPE_CHECKING:
    from pymysql.connections import Connection


_NULL, _LENGTHS = 0xFB, {0xFC: 2, 0xFD: 3, 0xFE: 8}
"""First bytes of a value, which is its length if it is smaller: of NULL, and the bytes of the length that follows."""


def read_chunk_rows(connection: Connection, chunk: Mapping[str, Any], shape: MySqlTableShape) -> Iterator[list[pa.Array]]:
    """Yield the rows of a chunk, some at a time: per column, its values as bytes, of texts in the column's character set.

    :param chunk: a split.
    """
    key = [DIALECT.quote(column) for column in shape.key]
    conditions = []
    if chunk["after"] is not None:
        conditions.append(f"({DIALECT.make_after_condition(key, format_literals(shape.types, chunk['after']))})")
    if chunk["upto"] is not None:
        conditions.append(f"({DIALECT.make_up_to_condition(key, format_literals(shape.types, chunk['upto']))})")
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    fetch_rows(connection, "SET SESSION character_set_results = NULL")
    connection.query(f"SELECT {shape.expressions} FROM {shape.source}{where}", unbuffered=True)
    for data, starts in read_packets(connection):
        yield parse_rows(data, starts, len(shape.table.columns))


def read_packets(connection: Connection) -> Iterator[Packets]:
    """Yield the packets of the rows of an unbuffered query, some at a time. The connection is closed if not all are read."""
    is_complete = False
    try:
        yield from receive_packets(connection, PIECE_BYTES, PIECE_ROWS)
        is_complete = True
    finally:
        # The driver would read the other rows.
        connection._result.unbuffered_active = False
        if not is_complete:
            connection._force_close()


def parse_rows(data: bytes | bytearray, starts: Sequence[int], width: int) -> list[pa.Array]:
    """Return the values of rows of a result, per column (binary).

    :param data: packets of rows.
    :param starts: where each row begins; then where the packet behind the last one would begin its row.
    :param width: the number of columns.
    :raises ValueError: the packets do not have so many values.
    """
    raw = np.frombuffer(data, np.uint8)
    *begins, last = starts
    at = np.array(begins, np.int64)
    ends = np.append(at[1:], last) - 4
    columns = []
    for _ in range(width):
        first = raw[at]
        nulls = first == _NULL
        sizes, headers = np.where(nulls, 0, first).astype(np.int64), np.ones(len(at), np.int64)
        for mark, count in _LENGTHS.items():
            rows = np.flatnonzero(first == mark)
            if len(rows):
                places = at[rows, None] + 1 + np.arange(count)
                sizes[rows] = raw[places].astype(np.int64) @ (1 << 8 * np.arange(count))
                headers[rows] = 1 + count
        begin = at + headers
        at = begin + sizes
        columns.append(take_ranges(data, begin, at, nulls))
        if (at > ends).any():
            break
    if not (at == ends).all():
        raise ValueError(f"the packets of rows do not have {width} values each")
    return columns


PARSED_EVENTS, PARSED_BYTES = 5000, 1 << 20
"""Maximum number of events that are parsed together, and their maximum size in bytes."""


@dataclass(frozen=True)
class MySqlLogReader(EventReader):
    """Reads windows of the log, and chunks of snapshots.

    The token of a window of the log has the coordinates at which its last transaction ends, and the tables whose snapshot has to
    begin again, or that were renamed. The token of a chunk has the coordinates of its snapshot.

    :param server: the server.
    :param form: the form of events.
    :param limit: the maximum lag of replicas when a chunk is read.
    """

    server: LogServer
    form: MySqlEventForm
    limit: ReplicaLag = ReplicaLag()

    @property
    def has_schemas(self) -> bool:
        """True if keys and values carry their schema."""
        return self.form.schemas

    # --- the log ---

    def _read_log(self, split: int, bounds: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        batches = batch_events(self._read_events(split, bounds))
        return TransactionWriter(self.form).write(batches) if self.form.transactions else batches

    def _read_events(self, split: int, bounds: Mapping[str, Any]) -> Iterator[Event | EventRange]:
        tables = [TableSnapshot.from_json(value) for value in bounds.get("snapshot", ())]
        with ExitStack() as stack:
            chunks = None
            if tables:
                connection = stack.enter_context(self.server.open_session("comparing keys with the chunks of a snapshot"))
                by_name, publishes = {table.table: table for table in tables}, "t" not in self.form.skipped
                chunks = MySqlChunkFilter(tables=by_name, publishes_truncates=publishes, connection=connection)
            writer = MySqlEventWriter(self.server, self.form, chunks)
            parser = LogParser(self.server, self.form, writer, chunks)
            for piece in self._read_pieces(split, bounds):
                parsed = parser.parse(piece)
                if chunks is not None:
                    of_tables = (rows for rows in parsed if isinstance(rows, ParsedRows))
                    changes = ((rows.table.table, change) for rows in of_tables for change in rows.rows)
                    chunks.look_ahead((name, row.cut) for name, change in changes for row in change if row is not None)
                for located, rows in zip(piece, parsed, strict=True):
                    yield from writer.write(located, rows)
        noted = {"truncated": chunks.truncated, "renamed": chunks.renamed} if chunks is not None else {}
        changed = {name: [list(table) for table in tables] for name, tables in noted.items() if tables}
        self._tokens[split] = {**self._tokens[split], "gtid": writer.gtid, **changed}

    def _read_pieces(self, split: int, bounds: Mapping[str, Any]) -> Iterator[list[Located]]:
        """Yield the events of a window of the log, several at a time, and record the end of its last transaction."""
        start, end = LogCoordinates.parse(bounds["start"]), LogCoordinates.parse(bounds["end"])
        self.server.refuse_other_file(start, start.position, bounds["log"])
        transactions, created, piece, size = Transactions(), 0, list[Located](), 0
        coordinates = start
        for located in self.server.read_events_up_to(start, end):
            if located.end.file != coordinates.file:
                created = 0
            if located.event.kind == binlog.FORMAT:
                created = located.event.seconds
                if located.start == start and created != bounds["log"]["created"]:
                    found = f"its file {start.file} is another one than when the window was planned"
                    raise LogLost(self.server.where, found, NEW_PIPELINE)
            transactions.enter(located.event)
            coordinates = located.end
            piece.append(located)
            size += len(located.event.body)
            is_end = located.reaches(end) and not transactions.is_open and bool(created)
            if is_end or len(piece) >= PARSED_EVENTS or size >= PARSED_BYTES:
                yield piece
                piece, size = [], 0
            if is_end:
                self._tokens[split] = {"end": str(coordinates), "created": created}
                return

    # --- snapshots ---

    def _read_rows(self, split: int, chunk: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        self.limit.wait()
        with self.server.open_session(f"reading rows of {'.'.join(chunk['table'])}") as connection:
            self.server.refuse_other(connection, LogCoordinates.parse(chunk["start"]), dict(chunk["log"]))
            opened = open_chunk(self.server, connection, chunk, self.form.values)
            server_id = int(chunk["log"]["server_id"])
            writer = MySqlEventWriter(self.server, self.form)
            table = writer.begin_rows(opened.shape.table, opened.coordinates, server_id, opened.now_us)
            position = RowPosition(opened.coordinates.position, 0)
            for columns in read_chunk_rows(connection, chunk, opened.shape):
                yield from format_events(table, writer.make_frame(table, position), columns)
        self._tokens[split] = make_chunk_token(opened.coordinates)
