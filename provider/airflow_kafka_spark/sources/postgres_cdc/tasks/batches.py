"""Events of a batch of messages of the log, whole columns at a time.

Arrow reads and writes the changes of a table that have the same kinds of rows: inserts, and updates for which the server sends no
old row; updates with the whole old row; deletes. All others are left to
:class:`~airflow_kafka_spark.sources.postgres_cdc.tasks.events.PostgresEventWriter`, one by one: changes of keys, and all changes
of one kind of a table in a batch if one of their rows is not whole, for instance because the server has left out a long value.

While the chunks of a table are read, its changes are decoded one by one, and those that a chunk includes are left out. The others
are written as those of other tables. The filter's answers hold for one moment of the log, so it is asked in the order of the log,
up to the next definition or truncate of a table.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.formats.tasks.kernels import if_else
from airflow_kafka_spark.formats.tasks.text import ValueTexts
from airflow_kafka_spark.sources.cdc.tasks.columns import format_members, frame_objects, put_positions, take_ranges, take_texts
from airflow_kafka_spark.sources.cdc.tasks.events import Event
from airflow_kafka_spark.sources.cdc.tasks.reader import BATCH_BYTES, SCHEMA, make_batch
from airflow_kafka_spark.sources.postgres_cdc.tasks.events import PostgresEventWriter, PostgresTableWriter, TransactionParts
from airflow_kafka_spark.sources.postgres_cdc.tasks.pgoutput import BeginMessage, ChangeMessage, Message, RelationMessage
from airflow_kafka_spark.sources.postgres_cdc.tasks.snapshot import PostgresChunkFilter


class RowKinds(NamedTuple):
    """The rows that a change has."""

    has_old: bool
    has_new: bool

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.has_old + self.has_new


class LogMessages(NamedTuple):
    """Messages of the log, in their order.

    :param data: their bytes, perhaps with other ones between them, and with some more behind the last one.
    :param begins: the index of the first byte of each message.
    :param ends: the index after its last byte.
    :param lsns: their LSNs.
    """

    data: bytes
    begins: np.ndarray
    ends: np.ndarray
    lsns: np.ndarray

    @property
    def raw(self) -> np.ndarray:
        """The bytes as numbers."""
        return np.frombuffer(self.data, np.uint8)

    def list_messages(self, numbers: np.ndarray | slice = slice(None)) -> Iterator[tuple[int, bytes]]:
        """Yield LSNs and bytes of some messages; of all by default."""
        data, places = self.data, (column[numbers].tolist() for column in (self.lsns, self.begins, self.ends))
        for lsn, begin, end in zip(*places, strict=True):
            yield lsn, data[begin:end]


@dataclass
class ChangedRows:
    """Changes of a table that have the same kinds of rows.

    :param table: the table.
    :param kinds: their rows.
    :param numbers: of their messages, ascending.
    :param transactions: of each change, the number of its transaction.
    """

    table: PostgresTableWriter
    kinds: RowKinds
    numbers: np.ndarray
    transactions: np.ndarray

    def select(self, which: np.ndarray | slice) -> ChangedRows:
        """Return some of the changes."""
        return replace(self, numbers=self.numbers[which], transactions=self.transactions[which])


class BatchWriter:
    """Turns messages of a window of the log into batches of events.

    :param writer: knows tables and transactions, and writes single changes.
    :param decode: returns a message, or None if it changes no row.
    """

    _messages: LogMessages
    """The messages that are being written."""

    def __init__(self, writer: PostgresEventWriter, decode: Callable[[int, bytes], Message | None]) -> None:
        self._writer, self._decode, self._chunks = writer, decode, writer.filter
        # Of the messages that are being written: the transactions, and the events that are written one by one.
        self._transactions: list[TransactionParts] = []
        self._single: list[tuple[int, Event]] = []

    def write(self, messages: LogMessages) -> Iterator[pa.RecordBatch]:
        """Yield the events of messages, in their order.

        :raises SourceRejected: a value cannot be written.
        """
        self._messages, self._transactions, self._single = messages, [self._writer.parts], []
        kinds, rows = find_kinds(messages), list[ChangedRows]()
        # The definition of a table is a message of its own, and holds for the changes behind it. A truncate changes what is
        # left out behind it.
        first = messages.raw[messages.begins]
        is_border = (kinds < 0) & ((first == _RELATION) | ((first == _TRUNCATE) & (self._chunks is not None)))
        begin = 0
        for end in (*np.flatnonzero(is_border).tolist(), len(kinds)):
            rows += self._write_span(kinds, begin, end)
            begin = end
        yield from self._write_batches(rows)

    def _write_span(self, kinds: np.ndarray, begin: int, end: int) -> Iterator[ChangedRows]:
        """Write the messages that are not read column by column, and yield the changes of the others.

        :param kinds: as :func:`find_kinds` returns them.
        :param begin: the number of the first message. Only this one may define a table.
        """
        filtered = self._look_ahead(begin, end) if self._chunks is not None else {}
        begins, numbers, inside = [begin], [len(self._transactions) - 1], [self._writer.is_inside]
        others = np.flatnonzero(kinds[begin:end] < 0) + begin
        for number, (lsn, data) in zip(others.tolist(), self._messages.list_messages(others), strict=True):
            if (message := self._decode(lsn, data)) is None:
                continue
            if not self._writer.note(message):
                self._write_single(number, lsn, message)
                continue
            self._single += [(number, mark) for mark in self._writer.mark(message)]
            if isinstance(message, BeginMessage):
                self._transactions.append(self._writer.parts)
                begins.append(number)
                numbers.append(len(self._transactions) - 1)
                inside.append(self._writer.is_inside)
        changes = np.flatnonzero(kinds[begin:end] >= 0) + begin
        owners = np.searchsorted(begins, changes, side="right") - 1
        is_inside = np.array(inside)[owners]
        changes, transactions = changes[is_inside], np.array(numbers)[owners[is_inside]]
        groups = self._read_oids(changes) << 8 | kinds[changes]
        for group in np.unique(groups).tolist():
            which = groups == group
            table, of_rows = self._writer.find_table(group >> 8), _ROW_KINDS[group & 255]
            found = changes[which], transactions[which]
            if table is None or (table.is_taken and not self._writer.takes_rows(table, *of_rows)):
                self._write_one_by_one(table, *found)
            elif table.is_taken:
                if self._chunks is not None and self._chunks.watches(group >> 8):
                    found = self._leave_out(self._chunks, table, *found, filtered)
                yield ChangedRows(table, of_rows, *found)

    def _look_ahead(self, begin: int, end: int) -> dict[int, ChangeMessage]:
        """Let the filter find the chunks of the changes of some messages. Return those of its tables by their number."""
        assert self._chunks is not None
        numbers = np.arange(begin, end)
        first = self._messages.raw[self._messages.begins[numbers]]
        for lsn, data in self._messages.list_messages(numbers[:1][first[:1] == _RELATION]):
            if isinstance(message := self._decode(lsn, data), RelationMessage):
                self._chunks.define(message)
        changes = numbers[np.isin(first, _CHANGES) & (self._messages.ends - self._messages.begins > _FIRST_ROW)[numbers]]
        oids = self._read_oids(changes)
        changes = changes[np.isin(oids, [oid for oid in np.unique(oids).tolist() if self._chunks.watches(oid)])]
        found: dict[int, ChangeMessage] = {}
        for number, (lsn, data) in zip(changes.tolist(), self._messages.list_messages(changes), strict=True):
            if isinstance(message := self._decode(lsn, data), ChangeMessage):
                found[number] = message
        self._chunks.look_ahead(found.values())
        return found

    def _leave_out(
        self,
        chunks: PostgresChunkFilter,
        table: PostgresTableWriter,
        numbers: np.ndarray,
        transactions: np.ndarray,
        found: Mapping[int, ChangeMessage],
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of the changes that no chunk includes, and of their transactions.

        Rows that move to another key, and perhaps to another chunk, are written one by one.

        :param found: the changes by their number.
        :raises SourceRejected: the log does not hold the key of a row.
        """
        kept, moved, of_filter = np.zeros(len(numbers), bool), np.zeros(len(numbers), bool), -1
        for at, (number, transaction) in enumerate(zip(numbers.tolist(), transactions.tolist(), strict=True)):
            change = found[number]
            if change.op != "I":
                table.refuse_missing_values(change.old, change.is_full)
            if chunks.is_moved(table.relation, change):
                moved[at] = True
                continue
            if transaction != of_filter:
                self._writer.enter_filter(self._transactions[transaction])
                of_filter = transaction
            row = change.old if change.new is None else change.new
            assert row is not None
            kept[at] = not chunks.includes(table.relation, row, change.old)
        self._writer.enter_filter(self._writer.parts)
        self._write_one_by_one(table, numbers[moved], transactions[moved])
        return numbers[kept], transactions[kept]

    def _read_oids(self, changes: np.ndarray) -> np.ndarray:
        """Return the OIDs of the tables of changes."""
        raw, at = self._messages.raw, self._messages.begins[changes]
        oids = np.zeros(len(changes), np.int64)
        for byte in range(1, 5):
            oids = oids << 8 | raw[at + byte]
        return oids

    def _write_single(self, number: int, lsn: int, message: Message) -> None:
        self._single += [(number, event) for event in self._writer.write(lsn, message)]

    def _write_one_by_one(
        self, table: PostgresTableWriter | None, numbers: np.ndarray, transactions: np.ndarray, *, is_filtered: bool = False
    ) -> None:
        """Write changes of a table.

        :param table: as it was when they were made; None: as it is now.
        :param is_filtered: True if no chunk includes them.
        """
        found = zip(numbers.tolist(), self._messages.list_messages(numbers), transactions.tolist(), strict=True)
        for number, (lsn, data), transaction in found:
            message = self._decode(lsn, data)
            assert message is not None
            with self._writer.enter_earlier_transaction(self._transactions[transaction], table, is_filtered=is_filtered):
                self._write_single(number, lsn, message)

    # --- batches ---

    def _write_batches(self, rows: Sequence[ChangedRows]) -> Iterator[pa.RecordBatch]:
        """Yield the events of changes, and those that are written by themselves, in batches of a few megabytes."""
        sizes = np.zeros(len(self._messages.lsns) + 1, np.int64)
        lengths = self._messages.ends - self._messages.begins
        for changed in rows:
            table = changed.table
            around = (*table.split_value_record(*changed.kinds), *table.split_key_record())
            source = self._writer.parts.split_source(table)
            sizes[changed.numbers] = lengths[changed.numbers] + sum(map(len, (*around, *source)))
        for number, event in self._single:
            sizes[number] += len(event.value or b"") + len(event.key or b"")
        size = np.cumsum(sizes)
        first = 0
        for last in (*np.searchsorted(size, np.arange(BATCH_BYTES, size[-1], BATCH_BYTES)).tolist(), len(lengths)):
            if last > first:
                parts = [changed.select(slice(*np.searchsorted(changed.numbers, (first, last)))) for changed in rows]
                yield from self._write_batch([changed for changed in parts if len(changed.numbers)], last)
                first = last

    def _write_batch(self, rows: Sequence[ChangedRows], last: int) -> Iterator[pa.RecordBatch]:
        """Yield a batch of changes, and of events that are written by themselves.

        :param last: the number after the last message of the batch.
        """
        parts, numbers = list[pa.RecordBatch](), list[np.ndarray]()
        for changed in rows:
            try:
                of_rows = read_rows(self._messages, changed.numbers, len(changed.table.columns), changed.kinds.rows)
                changes = self._write_moved(changed, of_rows)
            except NotWhole:
                self._write_one_by_one(changed.table, changed.numbers, changed.transactions, is_filtered=True)
                continue
            for batch in self._format(changes, of_rows):
                parts.append(batch)
                numbers.append(changes.numbers)
        self._single.sort(key=itemgetter(0))
        count = bisect_left(self._single, last, key=itemgetter(0))
        single, self._single = self._single[:count], self._single[count:]
        if single:
            parts.append(make_batch([event for _, event in single]))
            numbers.append(np.array([number for number, _ in single]))
        if len(parts) > 1:
            # A delete and its tombstone have one number, and stay in their order.
            order = pa.array(np.argsort(np.concatenate(numbers), kind="stable"))
            yield pa.Table.from_batches(parts).take(order).combine_chunks().to_batches()[0]
        else:
            yield from parts

    def _write_moved(self, rows: ChangedRows, of_rows: list[list[pa.Array]]) -> ChangedRows:
        """Write changes of keys one by one, and return the other ones.

        :param of_rows: the columns of each row. Those of changes of keys are removed.
        :raises NotWhole: a value of an old key is null.
        """
        if not rows.kinds.has_old:
            return rows
        keys = rows.table.key_indexes
        if any(of_rows[0][at].null_count for at in keys):
            raise NotWhole
        if not rows.kinds.has_new:
            return rows
        moved = np.zeros(len(rows.numbers), bool)
        for at in keys:
            moved |= np.asarray(pc.fill_null(pc.not_equal(of_rows[0][at], of_rows[1][at]), True))
        if not moved.any():
            return rows
        self._write_one_by_one(rows.table, rows.numbers[moved], rows.transactions[moved], is_filtered=True)
        left = pa.array(~moved)
        of_rows[:] = [[column.filter(left) for column in columns] for columns in of_rows]
        return rows.select(~moved)

    def _format(self, rows: ChangedRows, of_rows: Sequence[Sequence[pa.Array]]) -> Iterator[pa.RecordBatch]:
        """Yield the events of changes, and their tombstones.

        :param of_rows: the columns of each row as texts (binary).
        """
        table, kinds, count = rows.table, rows.kinds, len(rows.numbers)
        if not count:
            return
        topics = pa.repeat(pa.scalar(table.topic, pa.string()), count)
        used, which = np.unique(rows.transactions, return_inverse=True)
        transactions = [self._transactions[index] for index in used.tolist()]
        timestamps = pa.array(np.array([parts.timestamp for parts in transactions], np.int64)[which])
        members = [format_members(table, columns) for columns in of_rows]
        before_key, after_key = table.split_key_record()
        of_key = [members[-1][at] for at in table.key_indexes]
        keys = frame_objects((f"{before_key}{{", f"}}{after_key}"), of_key, count).cast(pa.binary())
        if kinds.has_new or self._writer.form.writes_deletes:
            values = self._format_values(rows, members, [parts.split_source(table) for parts in transactions], which)
            yield pa.RecordBatch.from_arrays([topics, keys, values, timestamps], schema=SCHEMA)
        if not kinds.has_new and self._writer.form.tombstones:
            yield pa.RecordBatch.from_arrays([topics, keys, pa.nulls(count, pa.binary()), timestamps], schema=SCHEMA)

    def _format_values(
        self,
        rows: ChangedRows,
        members: Sequence[Sequence[tuple[str, ValueTexts]]],
        sources: Sequence[Sequence[str]],
        which: np.ndarray,
    ) -> pa.Array:
        """Return the values of the records of changes (binary).

        :param members: the names and values of each row that a change has.
        :param sources: of each transaction, the texts around the LSNs in ``source``.
        :param which: of each change, the index of its transaction there.
        """
        table, kinds, count = rows.table, rows.kinds, len(rows.numbers)
        *before_rows, before_source, before_op, last = table.split_value_record(*kinds)
        operations: pa.Array | str = "u" if kinds.has_new else "d"
        if not kinds.has_old:
            is_insert = self._messages.raw[self._messages.begins[rows.numbers]] == _INSERT
            operations = take_texts(("u", "c"), is_insert.astype(np.int64))
        at = pa.array(self._messages.lsns[rows.numbers]).cast(pa.string())
        parts = put_positions([table.split_source_members(texts) for texts in sources], which, at)
        # A row is published as its object, to which members are added; an event has both objects whole.
        shown, end = (members, "}") if table.unwrap is None else (members[-1:], "")
        return pc.binary_join_element_wise(
            *(frame_objects((f"{text}{{", end), row, count) for text, row in zip(before_rows, shown, strict=True)),
            before_source, *parts, before_op, operations if table.names_operation else "", last, "",
        ).cast(pa.binary())  # fmt: skip


# --- rows, column by column ---------------------------------------------------------------------------------------------


class NotWhole(ValueError):
    """Raised for rows that cannot be read column by column."""


MOST_BYTES = 64 << 20
"""Maximum size in bytes of rows that are read column by column."""
_FIRST_ROW = 6
"""Index of the first row in a message."""
_RELATION, _TRUNCATE, _INSERT, _CHANGES = 82, 84, 73, (73, 85, 68)
"""First bytes of the messages that define a table, of truncates, of inserts, and of all changes of rows."""
_ROW_KINDS = (
    RowKinds(has_old=False, has_new=True), RowKinds(has_old=True, has_new=True), RowKinds(has_old=True, has_new=False),
)  # fmt: skip
_KINDS = {(73, 78): 0, (85, 78): 0, (85, 79): 1, (68, 75): 2, (68, 79): 2}
"""The kinds of a message's rows, as an index of them, by its first byte and the byte before its first row."""


def _make_lookup() -> np.ndarray:
    found = np.full((256, 256), -1, np.int64)
    for (first, before_row), kinds in _KINDS.items():
        found[first, before_row] = kinds
    return found


_KINDS_OF_BYTES = _make_lookup()


def find_kinds(messages: LogMessages) -> np.ndarray:
    """Return the rows of each message that can be read column by column, as an index of the kinds of rows; -1 for other messages,
    and for changes of a key.
    """
    raw, begins = messages.raw, messages.begins
    found = _KINDS_OF_BYTES[raw[begins], raw[np.minimum(begins + _FIRST_ROW - 1, len(raw) - 1)]]
    found[messages.ends - begins <= _FIRST_ROW] = -1
    return found


def read_rows(messages: LogMessages, numbers: np.ndarray, width: int, rows: int = 1) -> list[list[pa.Array]]:
    """Return the rows of messages: for each row of a message its columns (binary).

    :param numbers: of messages of one table, at least one, whose :func:`find_kinds` are equal.
    :param width: the number of columns of the table.
    :param rows: the number of rows of a message: 1, or 2 for the old and the new one.
    :raises NotWhole: a row has another number of columns, or a value that the server has not sent, or cannot be read, or all of
        them are too large.
    """
    raw, begins, ends = messages.raw, messages.begins[numbers], messages.ends[numbers]
    if (ends - begins).sum() > MOST_BYTES:
        raise NotWhole
    at = begins + _FIRST_ROW
    found: list[list[pa.Array]] = []
    for _ in range(rows):
        if found:
            if (raw[at] != 78).any():  # N
                raise NotWhole
            at = at + 1
        columns, at = _read_row(raw, at, ends, width, found[0] if found else None)
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
            column = if_else(pa.array(is_unchanged), old[index], column)
        columns.append(column)
    return columns, at
