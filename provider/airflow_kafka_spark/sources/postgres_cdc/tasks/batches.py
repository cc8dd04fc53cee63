"""Events of a batch of messages of the log, whole columns at a time.

Arrow reads and writes the changes of a table that have the same kinds of rows: inserts, and updates for which the server sends no
old row; updates with the whole old row; deletes. All others are left to
:class:`~airflow_kafka_spark.sources.postgres_cdc.tasks.events.PostgresEventWriter`, one by one: changes of keys, and all changes
of one kind of a table in a batch if one of their rows is not whole, for instance because the server has left out a long value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.sources.cdc.tasks.columns import format_members, frame_objects, take_ranges, take_texts
from airflow_kafka_spark.sources.cdc.tasks.events import Event
from airflow_kafka_spark.sources.cdc.tasks.reader import BATCH_BYTES, SCHEMA, make_batch
from airflow_kafka_spark.sources.postgres_cdc.tasks.events import PostgresEventWriter, PostgresTableWriter
from airflow_kafka_spark.sources.postgres_cdc.tasks.pgoutput import BeginMessage, Message, RelationMessage


class RowKinds(NamedTuple):
    """The rows that a change has."""

    has_old: bool
    has_new: bool

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.has_old + self.has_new


ChangeRow = tuple[int, int, int, bytes]
"""The number of a change in its batch, its LSN, the index of its transaction, and its message."""


@dataclass
class ChangedRows:
    """Changes of a table that have the same kinds of rows.

    :param table: the table.
    :param kinds: their rows.
    :param frame_size: characters of an event beside its rows.
    """

    table: PostgresTableWriter
    kinds: RowKinds
    frame_size: int
    changes: list[ChangeRow] = field(default_factory=list)


class BatchWriter:
    """Turns messages of a window of the log into batches of events.

    :param writer: knows tables and transactions, and writes single changes. It filters no events, and publishes no transactions.
    :param decode: returns a message, or None if it changes no row.
    """

    def __init__(self, writer: PostgresEventWriter, decode: Callable[[int, bytes], Message | None]) -> None:
        self._writer, self._decode = writer, decode
        self._open: dict[tuple[int, RowKinds], ChangedRows] = {}
        self._begin()

    def _begin(self) -> None:
        """Begin a batch."""
        self._rows: list[ChangedRows] = []
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
            kinds = find_kinds(data) if is_inside else None
            table = None if kinds is None else self._writer.find_table(int.from_bytes(data[1:5], "big"))
            if table is not None and not table.is_taken:
                continue
            if table is not None and kinds is not None and (rows := self._find_rows(table, kinds)) is not None:
                rows.changes.append((number, lsn, len(self._transactions) - 1, data))
                self._size += len(data) + rows.frame_size
            elif (message := self._decode(lsn, data)) is not None:
                self._write_single(number, lsn, message)
                if isinstance(message, BeginMessage):
                    self._transactions.append(writer.parts)
                    is_inside = writer.is_inside
                elif isinstance(message, RelationMessage):
                    self._open = {key: rows for key, rows in self._open.items() if key[0] != message.oid}
            if self._size > BATCH_BYTES:
                yield from self._flush()
        yield from self._flush()

    def _find_rows(self, table: PostgresTableWriter, kinds: RowKinds) -> ChangedRows | None:
        """Return the changes of a table to which a change is added; None if it has to be written by itself."""
        oid = table.relation.oid
        if (rows := self._open.get((oid, kinds))) is None:
            if not self._writer.takes_rows(table, *kinds):
                return None
            around = (*table.split_value_record(*kinds), *table.split_key_record(), *self._writer.parts.split_source(table))
            rows = self._open[oid, kinds] = ChangedRows(table, kinds, sum(map(len, around)))
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
                of_rows = read_rows([data for *_, data in rows.changes], len(rows.table.columns), rows.kinds.rows)
                changes = self._write_moved(rows, of_rows)
            except NotWhole:
                self._write_one_by_one(rows.table, rows.changes)
                continue
            for batch in self._format(rows, changes, of_rows):
                parts.append(batch)
                numbers += [number for number, *_ in changes]
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

    def _write_moved(self, rows: ChangedRows, of_rows: list[list[pa.Array]]) -> Sequence[ChangeRow]:
        """Write changes of keys one by one, and return the other ones.

        :param of_rows: the columns of each row. Those of changes of keys are removed.
        :raises NotWhole: a value of an old key is null.
        """
        if not rows.kinds.has_old:
            return rows.changes
        keys = rows.table.key_indexes
        if any(of_rows[0][at].null_count for at in keys):
            raise NotWhole
        if not rows.kinds.has_new:
            return rows.changes
        moved = np.zeros(len(rows.changes), bool)
        for at in keys:
            moved |= np.asarray(pc.fill_null(pc.not_equal(of_rows[0][at], of_rows[1][at]), True))
        if not moved.any():
            return rows.changes
        self._write_one_by_one(rows.table, [rows.changes[at] for at in np.flatnonzero(moved)])
        left = pa.array(~moved)
        of_rows[:] = [[column.filter(left) for column in columns] for columns in of_rows]
        return [rows.changes[at] for at in np.flatnonzero(~moved)]

    def _write_one_by_one(self, table: PostgresTableWriter, changes: Sequence[ChangeRow]) -> None:
        for number, lsn, transaction, data in changes:
            message = self._decode(lsn, data)
            assert message is not None
            with self._writer.going_back(self._transactions[transaction], table):
                self._write_single(number, lsn, message)

    def _format(
        self, rows: ChangedRows, changes: Sequence[ChangeRow], of_rows: Sequence[Sequence[pa.Array]]
    ) -> Iterator[pa.RecordBatch]:
        """Yield the events of changes, and their tombstones.

        :param of_rows: the columns of each row as texts (binary).
        """
        if not changes:
            return
        table, kinds, count = rows.table, rows.kinds, len(changes)
        _, lsns, of_transactions, messages = zip(*changes, strict=True)
        members = [format_members(table, columns) for columns in of_rows]
        *before_rows, before_source, before_op, last = table.split_value_record(*kinds)
        operations: pa.Array | str = "u" if kinds.has_new else "d"
        if not kinds.has_old:
            is_insert = np.frombuffer(b"".join([data[:1] for data in messages]), np.uint8) == 73
            operations = take_texts(("u", "c"), is_insert.astype(np.int64))
        used, which = np.unique(np.array(of_transactions), return_inverse=True)
        transactions = [self._transactions[index] for index in used.tolist()]
        of_source = zip(*(parts.split_source(table) for parts in transactions), strict=True)
        before_lsn, between, behind = (take_texts(texts, which) for texts in of_source)
        at = pa.array(lsns, pa.int64()).cast(pa.string())
        values = pc.binary_join_element_wise(
            *(frame_objects((text, ""), row, count) for text, row in zip(before_rows, members, strict=True)),
            before_source, before_lsn, at, between, at, behind, before_op, operations, last, "",
        )  # fmt: skip
        topics = pa.repeat(pa.scalar(table.topic, pa.string()), count)
        keys = frame_objects(table.split_key_record(), [members[-1][at] for at in table.key_indexes], count).cast(pa.binary())
        timestamps = pa.array(np.array([parts.timestamp for parts in transactions], np.int64)[which])
        yield pa.RecordBatch.from_arrays([topics, keys, values.cast(pa.binary()), timestamps], schema=SCHEMA)
        if not kinds.has_new and self._writer.form.tombstones:
            yield pa.RecordBatch.from_arrays([topics, keys, pa.nulls(count, pa.binary()), timestamps], schema=SCHEMA)


# --- rows, column by column ---------------------------------------------------------------------------------------------


class NotWhole(ValueError):
    """Raised for rows that cannot be read column by column."""


MOST_BYTES = 64 << 20
"""Maximum size in bytes of rows that are read column by column."""
_FIRST_ROW = 6
"""Index of the first row in a message."""
_KINDS = {
    (73, 78): RowKinds(has_old=False, has_new=True), (85, 78): RowKinds(has_old=False, has_new=True),
    (85, 79): RowKinds(has_old=True, has_new=True), (68, 75): RowKinds(has_old=True, has_new=False),
    (68, 79): RowKinds(has_old=True, has_new=False),
}  # fmt: skip
"""The kinds of a message's rows, by its first byte and the byte before its first row."""


def find_kinds(data: bytes) -> RowKinds | None:
    """Return the rows of a message that can be read column by column; None for other messages, and for changes of a key."""
    return _KINDS.get((data[0], data[5])) if len(data) > _FIRST_ROW else None


def read_rows(messages: Sequence[bytes], width: int, rows: int = 1) -> list[list[pa.Array]]:
    """Return the rows of messages: for each row of a message its columns (binary).

    :param messages: at least one, of one table, whose :func:`find_kinds` are equal.
    :param width: the number of columns of the table.
    :param rows: the number of rows of a message: 1, or 2 for the old and the new one.
    :raises NotWhole: a row has another number of columns, or a value that the server has not sent, or cannot be read, or all of
        them are too large.
    """
    ends = np.cumsum(np.fromiter(map(len, messages), np.int64, len(messages)))
    if ends[-1] > MOST_BYTES:
        raise NotWhole
    # Behind the last row are some bytes, so that a row that is cut off is read, and then found to be too long.
    data = np.frombuffer(b"".join((*messages, bytes(8))), np.uint8)
    at = np.concatenate([[0], ends[:-1]]) + _FIRST_ROW
    found: list[list[pa.Array]] = []
    for _ in range(rows):
        if found:
            if (data[at] != 78).any():  # N
                raise NotWhole
            at = at + 1
        columns, at = _read_row(data, at, ends, width, found[0] if found else None)
        found.append(columns)
    return found


def _read_row(
    data: np.ndarray, at: np.ndarray, ends: np.ndarray, width: int, old: Sequence[pa.Array] | None
) -> tuple[list[pa.Array], np.ndarray]:
    """Return the columns of a row of each message, and the indexes after these rows.

    :param at: the indexes at which they begin.
    :param ends: the indexes after the messages.
    :param old: the columns of the old rows, which have the values that an update has not changed.
    """
    if (data[at].astype(np.int64) << 8 | data[at + 1] != width).any():
        raise NotWhole
    at = at + 2
    columns = []
    for index in range(width):
        kind = data[at]
        is_there, is_unchanged = kind == 116, kind == 117  # t, u
        if not (is_there | (kind == 110) | (is_unchanged & (old is not None))).all():  # n
            raise NotWhole
        length = np.zeros(len(at), np.int64)
        for byte in range(4):
            length = length << 8 | data[at + 1 + byte]
        first, length = at + 5, np.where(is_there, length, 0)
        at = np.where(is_there, first + length, at + 1)
        if (at > ends).any():
            raise NotWhole
        column = take_ranges(data, first, first + length, ~is_there)
        if old is not None and is_unchanged.any():
            if (np.asarray(old[index].is_null()) & is_unchanged).any():
                raise NotWhole
            column = pc.if_else(pa.array(is_unchanged), old[index], column)
        columns.append(column)
    return columns, at
