"""Reading splits inside a Spark task: a window of the log by the protocol of replication, a chunk of a snapshot by a query."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from airflow_kafka_spark.errors import LogLost
from airflow_kafka_spark.sources.cdc.tasks.columns import format_events
from airflow_kafka_spark.sources.cdc.tasks.events import Event
from airflow_kafka_spark.sources.cdc.tasks.reader import EventReader, batch_events
from airflow_kafka_spark.sources.cdc.tasks.snapshot import TableSnapshot
from airflow_kafka_spark.sources.mysql_cdc.tasks import binlog
from airflow_kafka_spark.sources.mysql_cdc.tasks.binlog import Transactions
from airflow_kafka_spark.sources.mysql_cdc.tasks.events import LogEventWriter, MysqlEventForm, RowPosition
from airflow_kafka_spark.sources.mysql_cdc.tasks.rows import read_chunk_rows
from airflow_kafka_spark.sources.mysql_cdc.tasks.session import NEW_PIPELINE, Located, LogCoordinates, LogServer, ReplicaLag
from airflow_kafka_spark.sources.mysql_cdc.tasks.snapshot import BinlogFilter, make_chunk_token, open_chunk

PIECE_EVENTS, PIECE_BYTES = 1000, 1 << 20
"""Maximum number of events whose keys are looked up at once, and their maximum size in bytes."""


@dataclass(frozen=True)
class BinlogReader(EventReader):
    """Reads windows of the log, and chunks of snapshots.

    The token of a window of the log has the coordinates at which its last transaction ends, and the tables whose snapshot has to
    begin again, or that were renamed. The token of a chunk has the coordinates of its snapshot.

    :param server: the server.
    :param form: the form of events.
    :param limit: the maximum lag of replicas when a chunk is read.
    """

    server: LogServer
    form: MysqlEventForm
    limit: ReplicaLag = ReplicaLag()

    @property
    def has_schemas(self) -> bool:
        """True if keys and values carry their schema."""
        return self.form.schemas

    # --- the log ---

    def _changes(self, split: int, bounds: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        return batch_events(self._events(split, bounds))

    def _events(self, split: int, bounds: Mapping[str, Any]) -> Iterator[Event]:
        tables = [TableSnapshot.from_json(value) for value in bounds.get("snapshot", ())]
        with ExitStack() as stack:
            chunks = None
            if tables:
                connection = stack.enter_context(self.server.session("comparing keys with the chunks of a snapshot"))
                by_name, publishes = {table.table: table for table in tables}, "t" not in self.form.skipped
                chunks = BinlogFilter(tables=by_name, publishes_truncates=publishes, connection=connection)
            writer = LogEventWriter(self.server, self.form, chunks)
            for piece in self._pieces(split, bounds):
                parsed = [writer.parse(located) for located in piece]
                if chunks is not None:
                    changes = ((rows.table.table, change) for rows in parsed if rows is not None for change in rows.rows)
                    chunks.look_ahead((name, row.key) for name, change in changes for row in change if row is not None)
                for located, rows in zip(piece, parsed, strict=True):
                    yield from writer.write(located, rows)
        noted = {"truncated": chunks.truncated, "renamed": chunks.renamed} if chunks is not None else {}
        of_tables = {name: [list(table) for table in tables] for name, tables in noted.items() if tables}
        self._tokens[split] = {**self._tokens[split], "gtid": writer.gtid, **of_tables}

    def _pieces(self, split: int, bounds: Mapping[str, Any]) -> Iterator[list[Located]]:
        """Yield the events of a window of the log, several at a time, and record the end of its last transaction."""
        start, end = LogCoordinates.parse(bounds["start"]), LogCoordinates.parse(bounds["end"])
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
            is_end = coordinates.order >= end.order and not transactions.is_open and bool(created)
            if is_end or len(piece) >= PIECE_EVENTS or size >= PIECE_BYTES:
                yield piece
                piece, size = [], 0
            if is_end:
                self._tokens[split] = {"end": str(coordinates), "created": created}
                return

    # --- snapshots ---

    def _rows(self, split: int, chunk: Mapping[str, Any]) -> Iterator[pa.RecordBatch]:
        self.limit.wait()
        with self.server.session(f"reading rows of {'.'.join(chunk['table'])}") as connection:
            self.server.refuse_other(connection, LogCoordinates.parse(chunk["start"]), dict(chunk["log"]))
            opened = open_chunk(self.server, connection, chunk, self.form.values)
            server_id = int(chunk["log"]["server_id"])
            writer = LogEventWriter(self.server, self.form)
            table = writer.begin_rows(opened.shape.table, opened.coordinates, server_id, opened.now_us)
            position = RowPosition(opened.coordinates.position, 0)
            for columns in read_chunk_rows(connection, chunk, opened.shape):
                yield from format_events(table, writer.make_frame(table, position), columns)
        self._tokens[split] = make_chunk_token(opened.coordinates)
