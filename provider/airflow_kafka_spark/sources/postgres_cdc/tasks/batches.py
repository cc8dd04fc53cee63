"""Events of a batch of messages of the log, whole columns at a time.

Inserts, and updates for which the server sends no old row, are most of a log. Arrow reads and writes those of a table together.
All other changes are left to :class:`~airflow_kafka_spark.sources.postgres_cdc.tasks.events.EventWriter`, one by one, and so are
all changes of a table in a batch in which one row is not whole, for instance because the server has left out a long value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.sources.cdc.tasks.columns import format_members, frame_objects, take_ranges
from airflow_kafka_spark.sources.cdc.tasks.events import HOLE, Event, format_envelope
from airflow_kafka_spark.sources.cdc.tasks.reader import BATCH_BYTES, SCHEMA, make_batch
from airflow_kafka_spark.sources.postgres_cdc.tasks.events import EventWriter, RelationWriter
from airflow_kafka_spark.sources.postgres_cdc.tasks.pgoutput import BeginMessage, Message, RelationMessage


@dataclass
class NewRows:
    """Changes of a table that have only a new row.

    :param table: the table.
    :param frame_size: characters of an event beside its row.
    :ivar changes: per change, its number in the batch, its LSN, the index of its transaction, and its message.
    """

    table: RelationWriter
    frame_size: int
    changes: list[tuple[int, int, int, bytes]] = field(default_factory=list)


class BatchWriter:
    """Turns messages of a window of the log into batches of events.

    :param writer: knows tables and transactions, and writes single changes. It filters no events, and publishes no transactions.
    :param decode: returns a message, or None if it changes no row.
    """

    def __init__(self, writer: EventWriter, decode: Callable[[int, bytes], Message | None]) -> None:
        self._writer, self._decode = writer, decode
        self._open: dict[int, NewRows] = {}
        self._begin()

    def _begin(self) -> None:
        """Begin a batch."""
        self._rows: list[NewRows] = []
        self._single: list[tuple[int, Event]] = []
        self._transactions = [self._writer.parts]
        self._open.clear()
        self._size = 0

    def write(self, found: Sequence[tuple[int, bytes]]) -> Iterator[pa.RecordBatch]:
        """Yield the events of messages, in their order.

        :param found: LSNs and messages.
        :raises SourceRejected: a value cannot be written.
        """
        writer, is_inside = self._writer, self._writer.is_inside
        for number, (lsn, data) in enumerate(found):
            if is_inside and has_new_row_only(data) and (rows := self._find_rows(data)) is not None:
                rows.changes.append((number, lsn, len(self._transactions) - 1, data))
                self._size += len(data) + rows.frame_size
            elif (message := self._decode(lsn, data)) is not None:
                self._write_single(number, lsn, message)
                if isinstance(message, BeginMessage):
                    self._transactions.append(writer.parts)
                    is_inside = writer.is_inside
                elif isinstance(message, RelationMessage):
                    self._open.pop(message.oid, None)
            if self._size > BATCH_BYTES:
                yield from self._flush()
        yield from self._flush()

    def _find_rows(self, data: bytes) -> NewRows | None:
        """Return the rows of a table to which a change is added; None if it has to be written by itself."""
        oid = int.from_bytes(data[1:5], "big")
        if (rows := self._open.get(oid)) is None:
            table = self._writer.find_table(oid)
            if table is None or not self._writer.takes_new_rows(table):
                return None
            around = (*_split_envelope(table), *_split_key(table), *self._writer.parts.split_source(table))
            rows = self._open[oid] = NewRows(table, sum(map(len, around)))
            self._rows.append(rows)
        return rows

    def _write_single(self, number: int, lsn: int, message: Message) -> None:
        for event in self._writer.write(lsn, message):
            self._single.append((number, event))
            self._size += len(event.value or b"") + len(event.key or b"")

    def _flush(self) -> Iterator[pa.RecordBatch]:
        """Yield the events so far, and begin a batch."""
        parts, numbers = [], []
        for rows in self._rows:
            try:
                columns = read_columns([data for *_, data in rows.changes], len(rows.table.columns))
            except NotWhole:
                self._write_one_by_one(rows)
                continue
            parts.append(self._format(rows, columns))
            numbers += [number for number, *_ in rows.changes]
        if self._single:
            self._single.sort(key=itemgetter(0))
            parts.append(make_batch([event for _, event in self._single]))
            numbers += [number for number, _ in self._single]
        self._begin()
        if len(parts) > 1:
            # A delete and its tombstone have one number, and stay in their order.
            order = pa.array(np.argsort(np.array(numbers), kind="stable"))
            yield pa.Table.from_batches(parts).take(order).combine_chunks().to_batches()[0]
        else:
            yield from parts

    def _write_one_by_one(self, rows: NewRows) -> None:
        for number, lsn, transaction, data in rows.changes:
            message = self._decode(lsn, data)
            assert message is not None
            with self._writer.going_back(self._transactions[transaction], rows.table):
                self._write_single(number, lsn, message)

    def _format(self, rows: NewRows, columns: Sequence[pa.Array]) -> pa.RecordBatch:
        """Return the events of rows.

        :param columns: the values of each column as texts (binary).
        """
        table, count = rows.table, len(rows.changes)
        _, lsns, of_transactions, messages = zip(*rows.changes, strict=True)
        members = format_members(table, columns)
        first, before_source, before_op, last = _split_envelope(table)
        is_insert = np.frombuffer(b"".join([data[:1] for data in messages]), np.uint8) == 73
        used, which = np.unique(np.array(of_transactions), return_inverse=True)
        transactions = [self._transactions[index] for index in used.tolist()]
        of_source = zip(*(parts.split_source(table) for parts in transactions), strict=True)
        before_lsn, between, behind = (_take(texts, which) for texts in of_source)
        at = pa.array(lsns, pa.int64()).cast(pa.string())
        values = pc.binary_join_element_wise(
            frame_objects((first, before_source), members, count), before_lsn, at, between, at, behind, before_op,
            _take(("u", "c"), is_insert.astype(np.int64)), last, "",
        )  # fmt: skip
        return pa.RecordBatch.from_arrays(
            [
                pa.repeat(pa.scalar(table.topic, pa.string()), count),
                frame_objects(_split_key(table), [members[at] for at in table.key_indexes], count).cast(pa.binary()),
                values.cast(pa.binary()),
                pa.array(np.array([parts.timestamp for parts in transactions], np.int64)[which]),
            ],
            schema=SCHEMA,
        )


def _split_envelope(table: RelationWriter) -> list[str]:
    """Return the texts around row, source and operation of an event."""
    return table.make_value_record(format_envelope("null", HOLE, HOLE, "null", HOLE)).decode().split(HOLE)


def _split_key(table: RelationWriter) -> tuple[str, str]:
    """Return the texts around the key of an event."""
    before, _, after = (table.make_key_record(HOLE) or b"").decode().partition(HOLE)
    return before, after


def _take(texts: Sequence[str], which: np.ndarray) -> pa.Array | str:
    """Return one text per index; a single one if all are equal."""
    return texts[which[0]] if (which == which[0]).all() else pa.array(texts, pa.string()).take(pa.array(which))


# --- rows, column by column ---------------------------------------------------------------------------------------------


class NotWhole(ValueError):
    """Raised for rows that cannot be read column by column."""


MOST_BYTES = 64 << 20
"""Maximum size in bytes of rows that are read column by column."""
_NEW_ROW = 6
"""Index of the new row in an insert, and in an update without an old row."""


def has_new_row_only(data: bytes) -> bool:
    """Return True for an insert, and for an update without the row before it."""
    return len(data) > _NEW_ROW and (data[0] == 73 or (data[0] == 85 and data[5] == 78))


def read_columns(messages: Sequence[bytes], width: int) -> list[pa.Array]:
    """Return the new rows of messages, per column (binary).

    :param messages: at least one, each with :func:`has_new_row_only`, of one table.
    :param width: the number of columns of the table.
    :raises NotWhole: a row has another number of columns, or a value that the server has not sent, or cannot be read, or all of
        them are too large.
    """
    ends = np.cumsum(np.fromiter(map(len, messages), np.int64, len(messages)))
    if ends[-1] > MOST_BYTES:
        raise NotWhole
    # Behind the last row are some bytes, so that a row that is cut off is read, and then found to be too long.
    data = np.frombuffer(b"".join((*messages, bytes(8))), np.uint8)
    at = np.concatenate([[0], ends[:-1]]) + _NEW_ROW
    if (data[at].astype(np.int64) << 8 | data[at + 1] != width).any():
        raise NotWhole
    at += 2
    columns = []
    for _ in range(width):
        is_there = data[at] == 116  # t
        if not (is_there | (data[at] == 110)).all():  # n
            raise NotWhole
        length = np.zeros(len(messages), np.int64)
        for byte in range(4):
            length = length << 8 | data[at + 1 + byte]
        first, length = at + 5, np.where(is_there, length, 0)
        at = np.where(is_there, first + length, at + 1)
        if (at > ends).any():
            raise NotWhole
        columns.append(take_ranges(data, first, first + length, ~is_there))
    return columns
