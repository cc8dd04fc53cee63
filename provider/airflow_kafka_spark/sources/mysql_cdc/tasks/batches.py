"""The changes of some events of the log together: as events of their rows, whole columns at a time, or as rows.

Arrow writes inserts, updates that keep the key, and deletes. All others are left to
:class:`~airflow_kafka_spark.sources.mysql_cdc.tasks.events.MySqlEventWriter`, one by one: changes of keys, operations that are
skipped, and all changes of a table whose chunks are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.sources.cdc.tasks.columns import put_positions
from airflow_kafka_spark.sources.cdc.tasks.reader import SCHEMA, EventRange
from airflow_kafka_spark.sources.mysql_cdc.tasks import binlog
from airflow_kafka_spark.sources.mysql_cdc.tasks.binlog import LogUnreadable
from airflow_kafka_spark.sources.mysql_cdc.tasks.events import (
    MySqlEventForm,
    MySqlEventWriter,
    MySqlTableWriter,
    ParsedRows,
    RowChange,
    RowTexts,
)
from airflow_kafka_spark.sources.mysql_cdc.tasks.session import Located, LogServer
from airflow_kafka_spark.sources.mysql_cdc.tasks.snapshot import MySqlChunkFilter

_OPERATIONS = {
    **dict.fromkeys(binlog.WRITE_ROWS, "c"), **dict.fromkeys(binlog.UPDATE_ROWS, "u"), **dict.fromkeys(binlog.DELETE_ROWS, "d"),
}  # fmt: skip


class RowsEvent(NamedTuple):
    """An event of rows.

    :param number: its number among the events that are parsed together.
    :param located: the event.
    :param gtid: the GTID of its transaction; "" if it has none.
    """

    number: int
    located: Located
    gtid: str

    @property
    def op(self) -> str:
        """The operation of its changes, as events name it."""
        return _OPERATIONS[self.located.event.kind]


class LogParser:
    """Reads the rows of events of the log.

    :param server: for messages.
    :param form: the form of events.
    :param writer: the writer to which the results are passed, in the order of the log.
    :param filter: decides which events the chunks of a snapshot include; None: there is no snapshot.
    """

    def __init__(
        self, server: LogServer, form: MySqlEventForm, writer: MySqlEventWriter, filter: MySqlChunkFilter | None = None
    ) -> None:
        self._server, self._form, self._writer, self._filter = server, form, writer, filter
        self._tables: dict[int, MySqlTableWriter | None] = {}
        self._maps: dict[int, bytes] = {}
        self._gtid = ""

    def parse(self, piece: Sequence[Located]) -> list[ParsedRows | EventRange | None]:
        """Return the changes of each of some events of the log; None for an event without rows of a captured table.

        :raises SourceRejected: the log, or a value in it, cannot be read or written.
        """
        found: list[ParsedRows | EventRange | None] = [None] * len(piece)
        of_tables: dict[MySqlTableWriter, list[RowsEvent]] = {}
        for number, located in enumerate(piece):
            event = located.event
            if event.kind == binlog.ROTATE:
                self._tables.clear()
                self._maps.clear()
            elif event.kind == binlog.TABLE_MAP:
                self._map(located)
            elif event.kind in binlog.GTIDS:
                self._gtid = binlog.parse_gtid(event)
            elif event.kind in binlog.ROWS and (table := self._tables.get(binlog.parse_rows_table(event.body))) is not None:
                of_tables.setdefault(table, []).append(RowsEvent(number, located, self._gtid))
            elif event.kind in binlog.UNREADABLE_ROWS and self._tables.get(binlog.parse_rows_table(event.body)) is not None:
                reason = LogUnreadable(binlog.UNREADABLE_ROWS[event.kind])
                raise self._server.make_unreadable_error(located.start, reason)
        for table, events in of_tables.items():
            for number, part in self._parse_rows(table, events).items():
                found[number] = part
        return found

    def _parse_rows(self, table: MySqlTableWriter, events: Sequence[RowsEvent]) -> dict[int, ParsedRows | EventRange]:
        """Return the changes of some events of a table, by the number of the event."""
        rows, found = self._read_rows(events, table), dict[int, ParsedRows | EventRange]()
        is_filtered = self._filter is not None and self._filter.find_table(table.table) is not None
        if not is_filtered:
            found |= {events[at].number: part for at, part in self._write_columns(table, events, rows)}
        if len(found) < len(events):
            changes = zip(events, _list_changes(events, rows), strict=True)
            found |= {event.number: ParsedRows(table, rows) for event, rows in changes if event.number not in found}
        return found

    def _map(self, located: Located) -> None:
        body = located.event.body
        number, *name = binlog.parse_table_names(body)
        if self._maps.get(number) == body:
            return
        self._maps[number] = body
        self._tables[number] = None
        if self._form.takes((name[0], name[1])):
            try:
                snapshot = self._filter.find_table((name[0], name[1])) if self._filter is not None else None
                table = binlog.parse_table_map(body, self._form.is_mariadb)
                if not table.is_sequence:
                    self._tables[number] = MySqlTableWriter(table, self._form, snapshot)
            except LogUnreadable as error:
                raise self._server.make_unreadable_error(located.start, error) from None

    def _read_rows(self, events: Sequence[RowsEvent], table: MySqlTableWriter) -> RowTexts:
        located = events[0].located
        try:
            images = []
            for _, located, _ in events:
                images.append(table.find_images(located.event))
            return table.read_rows(images)
        except LogUnreadable as error:
            raise self._server.make_unreadable_error(located.start, error) from None

    # --- whole columns ---

    def _write_columns(
        self, table: MySqlTableWriter, events: Sequence[RowsEvent], rows: RowTexts
    ) -> Iterator[tuple[int, EventRange]]:
        """Yield the events of changes of a table, for each event of the log that is written so: its index, and its events."""
        counts = np.array(rows.counts, np.int64)
        begins = np.cumsum(counts) - counts
        operations = np.array([event.op for event in events])
        for op in {*operations.tolist()} - self._form.skipped:
            chosen = np.flatnonzero((operations == op) & (counts > 0))
            if op == "u":
                chosen = chosen[~_find_moved(rows.keys, begins[chosen], counts[chosen])]
            if len(chosen):
                named = [events[at] for at in chosen.tolist()]
                batch = self._write_operation(table, op, named, rows, begins[chosen], counts[chosen])
                # A delete and its tombstone are two events, an update is one event of two rows.
                sizes = counts[chosen] * batch.num_rows // counts[chosen].sum()
                size, ends = batch.nbytes // batch.num_rows, np.cumsum(sizes)
                for at, start, stop in zip(chosen.tolist(), (ends - sizes).tolist(), ends.tolist(), strict=True):
                    yield at, EventRange(batch, start, stop, size)

    def _write_operation(
        self,
        table: MySqlTableWriter,
        op: str,
        events: Sequence[RowsEvent],
        rows: RowTexts,
        begins: np.ndarray,
        counts: np.ndarray,
    ) -> pa.RecordBatch:
        """Return the events of changes of one operation, and the tombstones of deletes.

        :param begins: of each event of the log, the index of its first row.
        :param counts: the number of its rows.
        """
        indexes = _list_indexes(begins, counts)
        old, new = (indexes[::2], indexes[1::2]) if op == "u" else (indexes, indexes)
        owners = np.repeat(np.arange(len(events)), counts // 2 if op == "u" else counts)
        numbers = (new - begins[owners]) // (2 if op == "u" else 1)
        count = len(owners)
        shown = [_take_rows(rows.texts, of) for of in {"c": [new], "u": [old, new], "d": [old]}[op]]
        if table.unwrap is not None:
            # A row is published as its object, to which members are added.
            shown = [pc.binary_replace_slice(shown[-1], -1, _END, "")]
        *before_rows, before_source, before_op, last = table.split_value_record(op != "c", op != "d")
        parts = [self._writer.make_event_parts(event.located, event.gtid) for event in events]
        places = zip(parts, events, strict=True)
        sources = [of.split_source(table, event.located.start.position) for of, event in places]
        members = [table.split_source_members(texts) for texts in sources]
        source = put_positions(members, owners, pa.array(numbers).cast(pa.string()))
        values = pc.binary_join_element_wise(
            *(part for pair in zip(before_rows, shown, strict=True) for part in pair),
            before_source, *source, before_op + (op if table.names_operation else "") + last, "",
        ).cast(pa.binary())  # fmt: skip
        before_key, after_key = table.split_key_record()
        keys = _take_rows(rows.keys, new)
        if before_key or after_key:
            keys = pc.binary_join_element_wise(before_key, keys, after_key, "")
        topics = pa.repeat(pa.scalar(table.topic, pa.string()), count)
        timestamps = pa.array(np.array([of.timestamp for of in parts], np.int64)[owners])
        batch = pa.RecordBatch.from_arrays([topics, keys.cast(pa.binary()), values, timestamps], schema=SCHEMA)
        if op != "d" or not self._form.tombstones:
            return batch
        tombstones = batch.set_column(2, "value", pa.nulls(count, pa.binary()))
        if not self._form.writes_deletes:
            return tombstones
        order = pa.array(np.stack([np.arange(count), np.arange(count, 2 * count)], axis=1).reshape(-1))
        return pa.Table.from_batches([batch, tombstones]).take(order).combine_chunks().to_batches()[0]


_END = (1 << 31) - 1
"""The index after the end of every text."""


def _list_indexes(begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the indexes of some ranges of rows, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1]) + np.repeat(begins - (ends - counts), counts)


def _take_rows(texts: pa.Array, indexes: np.ndarray) -> pa.Array:
    """Return texts by their indexes, which ascend."""
    return texts if len(indexes) == len(texts) else texts.take(pa.array(indexes))


def _find_moved(keys: pa.Array, begins: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return True for each event of updates of which one changes a key.

    :param begins: of each event, the index of its first row; old and new rows take turns.
    :param counts: the number of its rows.
    """
    found = np.zeros(len(begins), bool)
    if not len(begins):
        return found
    indexes = _list_indexes(begins, counts)
    old, new = (keys.take(pa.array(indexes[first::2])) for first in (0, 1))
    moved = np.asarray(pc.not_equal(old, new))
    if moved.any():
        found[np.repeat(np.arange(len(begins)), counts // 2)[moved]] = True
    return found


def _list_changes(events: Sequence[RowsEvent], rows: RowTexts) -> Iterator[list[RowChange]]:
    """Yield the changes of each of some events of a table."""
    for event, found in zip(events, rows.list_rows(), strict=True):
        if event.op == "u":
            yield list(map(RowChange, found[::2], found[1::2]))
        elif event.op == "c":
            yield [RowChange(None, row) for row in found]
        else:
            yield [RowChange(row, None) for row in found]
