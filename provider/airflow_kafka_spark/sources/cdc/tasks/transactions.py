"""The records of transactions, and the field ``transaction`` of events, a batch of events at a time.

A source marks where a transaction begins and ends by rows of their own, and leaves the field open in each event. Events are
counted here because a source does not know their order, or which of them are rolled back, while it writes them in columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from json.encoder import encode_basestring

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_kafka_spark.sources.cdc.tasks.columns import take_texts
from airflow_kafka_spark.sources.cdc.tasks.events import OPEN_FIELD, Event, EventForm, format_json
from airflow_kafka_spark.sources.cdc.tasks.reader import SCHEMA, make_batch

_MARK = ""
"""The topic of a mark: no topic has this name."""


def mark_begin(id: str) -> Event:
    """Return the row that stands before the events of a transaction.

    :param id: its name.
    """
    return Event(_MARK, id.encode(), None, 0)


def mark_end(timestamp: int) -> Event:
    """Return the row that stands after the events of a transaction.

    :param timestamp: of its end, milliseconds since 1970.
    """
    return Event(_MARK, None, None, timestamp)


@dataclass
class _OpenTransaction:
    """A transaction whose end is not read.

    :param id: its name as JSON.
    :ivar count: the number of its events so far.
    :ivar counts: the number of its events per table, whose name is JSON.
    """

    id: str
    count: int = 0
    counts: dict[str, int] = field(default_factory=dict)


class TransactionWriter:
    """Completes the events of a window of the log, and writes the records of its transactions.

    :param form: the form of events.
    """

    def __init__(self, form: EventForm) -> None:
        self._form = form
        self._open: _OpenTransaction | None = None

    def write(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yield batches with complete events, and with the records of transactions in place of their marks.

        Transactions without events have no records.
        """
        for batch in batches:
            if (found := self._write_batch(batch)).num_rows:
                yield found

    def _write_batch(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        topics, keys, values, timestamps = batch.columns
        is_mark = np.asarray(pc.equal(topics, _MARK))
        marks, kept = np.flatnonzero(is_mark), np.flatnonzero(~is_mark)
        is_event = np.asarray(pc.is_valid(values))
        rows, owners = np.flatnonzero(is_event), np.cumsum(is_mark)[is_event]
        given = (None if id is None else encode_basestring(id.decode()) for id in keys.take(marks).to_pylist())
        ids = [None if self._open is None else self._open.id, *given]
        boundaries = dict[int, Event]()
        if len(rows):
            parts = pc.list_flatten(pc.split_pattern(values.take(rows).cast(pa.string()), OPEN_FIELD))
            before, names, after = (parts.take(np.arange(part, len(parts), 3)) for part in range(3))
            counted = self._count(names, owners)
            texts = _complete(before, ids, owners, *counted, after)
            places = np.full(batch.num_rows, -1)
            places[rows] = np.arange(len(rows))
            new = texts.take(pa.array(places[kept], mask=places[kept] < 0)).cast(pa.binary())
        else:
            names, new = pa.array([], pa.string()), values.take(kept)
        for place, event in self._move_on(ids, marks, rows, owners, names, timestamps.to_numpy()):
            boundaries[place] = event
        events = pa.RecordBatch.from_arrays([topics.take(kept), keys.take(kept), new, timestamps.take(kept)], schema=SCHEMA)
        if not boundaries:
            return events
        # A begin stands directly before the row of its place, an end in its place.
        order = np.argsort(np.concatenate([2 * kept + 1, list(boundaries)]), kind="stable")
        both = pa.Table.from_batches([events, make_batch(list(boundaries.values()))])
        return both.take(pa.array(order)).combine_chunks().to_batches()[0]

    def _count(self, names: pa.Array, owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of each event within its transaction, and among those of its table in it.

        :param names: the table of each event.
        :param owners: the number of its transaction, ascending; 0 is that of before.
        """
        encoded = names.dictionary_encode()
        tables, codes = encoded.dictionary.to_pylist(), np.asarray(encoded.indices)
        base = self._open or _OpenTransaction("")
        total = _rank(owners) + np.where(owners == 0, base.count, 0)
        bases = np.array([base.counts.get(table, 0) for table in tables], np.int64)
        return total, _rank(owners * len(tables) + codes) + np.where(owners == 0, bases[codes], 0)

    def _move_on(
        self,
        ids: list[str | None],
        marks: np.ndarray,
        rows: np.ndarray,
        owners: np.ndarray,
        names: pa.Array,
        timestamps: np.ndarray,
    ) -> Iterator[tuple[int, Event]]:
        """Yield the records of transactions and their places, and count the events of the transaction that stays open."""
        firsts = dict(zip(*(found.tolist() for found in np.unique(owners, return_index=True)), strict=True))
        bounds = np.searchsorted(owners, np.arange(len(ids) + 1)).tolist()
        found = names.to_pylist()
        for number, id in enumerate(ids):
            if number:
                mark = int(marks[number - 1])
                if id is not None:
                    self._open = _OpenTransaction(id)
                else:
                    if self._open is not None and self._open.count:
                        yield 2 * mark + 1, self._make_end(self._open, int(timestamps[mark]))
                    self._open = None
            if self._open is None or number not in firsts:
                continue
            first = int(rows[firsts[number]])
            if not self._open.count:
                yield 2 * first, self._make_record("BEGIN", self._open.id, "null", "null", int(timestamps[first]))
            for name in found[bounds[number] : bounds[number + 1]]:
                self._open.counts[name] = self._open.counts.get(name, 0) + 1
            self._open.count += bounds[number + 1] - bounds[number]

    def _make_end(self, ended: _OpenTransaction, timestamp: int) -> Event:
        counts = ",".join(f'{{"data_collection":{table},"event_count":{count}}}' for table, count in ended.counts.items())
        return self._make_record("END", ended.id, str(ended.count), f"[{counts}]", timestamp)

    def _make_record(self, status: str, id: str, count: str, tables: str, timestamp: int) -> Event:
        key = f'{{"id":{id}}}'
        value = f'{{"status":"{status}","id":{id},"event_count":{count},"data_collections":{tables},"ts_ms":{timestamp}}}'
        if self._form.schemas:
            key = f'{{"schema":{_KEY_SCHEMA},"payload":{key}}}'
            value = f'{{"schema":{_VALUE_SCHEMA},"payload":{value}}}'
        return Event(f"{self._form.prefix}.transaction", key.encode(), value.encode(), timestamp)


def _rank(groups: np.ndarray) -> np.ndarray:
    """Return the number of each element among those that are equal to it, from 1 on."""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    found = np.empty(len(groups), np.int64)
    found[order] = np.arange(1, len(groups) + 1) - np.searchsorted(ordered, ordered)
    return found


def _complete(
    before: pa.Array, ids: list[str | None], owners: np.ndarray, total: np.ndarray, of_table: np.ndarray, after: pa.Array
) -> pa.Array:
    """Return the values of events.

    :param before: their texts before the field `transaction`.
    :param ids: the names of transactions as JSON.
    :param owners: of each event, the index of its transaction.
    :param total: its number in the transaction.
    :param of_table: its number among those of its table.
    :param after: the texts after the field.
    """
    begins = [f'{{"id":{id},"total_order":' for id in ids]
    first, second = (pa.array(column).cast(pa.string()) for column in (total, of_table))
    return pc.binary_join_element_wise(
        before, take_texts(begins, owners), first, ',"data_collection_order":', second, "}", after, ""
    )


def _make_schemas() -> tuple[str, str]:
    """Return the schemas of key and value of the records of transactions, as JSON."""
    name, id = "io.debezium.connector.common.TransactionMetadata", {"type": "string", "optional": False, "field": "id"}
    of_table = [{"type": "string", "optional": False, "field": "data_collection"}]
    of_table.append({"type": "int64", "optional": False, "field": "event_count"})
    items = {"type": "struct", "fields": of_table, "optional": True, "name": "event.collection", "version": 1}
    fields = [
        {"type": "string", "optional": False, "field": "status"},
        id,
        {"type": "int64", "optional": True, "field": "event_count"},
        {"type": "array", "items": items, "optional": True, "field": "data_collections"},
        {"type": "int64", "optional": False, "field": "ts_ms"},
    ]
    key, value = (
        {"type": "struct", "fields": given, "optional": False, "name": f"{name}{part}", "version": 1}
        for part, given in (("Key", [id]), ("Value", fields))
    )
    return format_json(key), format_json(value)


_KEY_SCHEMA, _VALUE_SCHEMA = _make_schemas()
