"""Events of whole batches of the log are those that are written one by one."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.formats.debezium.format import DeleteHandling
from airflow_kafka_spark.sources.cdc.options import ExtractNewRecordState
from airflow_kafka_spark.sources.cdc.tasks.reader import make_batch
from airflow_kafka_spark.sources.cdc.tasks.snapshot import Key, ReadChunk, TableSnapshot
from airflow_kafka_spark.sources.cdc.tasks.transactions import TransactionWriter
from airflow_kafka_spark.sources.postgres_cdc.tasks import batches
from airflow_kafka_spark.sources.postgres_cdc.tasks.batches import BatchWriter, LogMessages, NotWhole, find_kinds, read_rows
from airflow_kafka_spark.sources.postgres_cdc.tasks.events import PostgresEventForm, PostgresEventWriter
from airflow_kafka_spark.sources.postgres_cdc.tasks.pgoutput import UNCHANGED, decode
from airflow_kafka_spark.sources.postgres_cdc.tasks.snapshot import PostgresChunkFilter
from tests.sources.postgres_cdc.kit import ROW_FIELDS, decoded, extract_rows, number_events
from tests.sources.postgres_cdc.test_pgoutput import values
from tests.support.distribution import extended

TYPES = {23: (b"-7", b"123456"), 25: (b"", b'x"y\n\\', "ü".encode()), 1114: (b"2024-02-29 12:00:00.5", b"infinity")}
"""By OID, texts of values. The last one is a time that is not written in a column."""


def relation(oid: int, name: str, types: list[int], identity: bytes = b"d") -> bytes:
    out = b"R" + struct.pack(">I", oid) + b"public\0" + name.encode() + b"\0" + identity + struct.pack(">H", len(types) + 1)
    out += b"\1id\0" + struct.pack(">Ii", 20, -1)
    return out + b"".join(b"\0c%d\0" % at + struct.pack(">Ii", kind, -1) for at, kind in enumerate(types))


def make_log(seed: int) -> Iterator[tuple[int, bytes]]:
    """Yield LSNs and messages: transactions, some of them outside of the window, in which tables also change."""
    r = random.Random(seed)
    tables: dict[int, list[int]] = {}
    lsn = 0

    def row(oid: int, *, may_lack: bool = True, key: int | None = None) -> bytes:
        cells: list[object] = [b"%d" % (r.randrange(5) if key is None else key)]
        for kind in tables[oid]:
            chosen = r.random()
            lacks = may_lack and chosen < 0.02
            cells.append(UNCHANGED if lacks else None if chosen < 0.2 else r.choice(TYPES[kind]))
        return values(*cells)

    for commit in range(10, 400, 10):
        yield lsn, b"B" + struct.pack(">qqI", commit, commit * 1000, commit)
        for _ in range(r.randrange(12)):
            lsn += r.randrange(1, 3)
            oid = r.choice((1, 2, 3))
            if oid not in tables or r.random() < 0.03:
                tables[oid] = [r.choice(list(TYPES)) for _ in range(r.randrange(4))]
                yield 0, relation(oid, f"t{oid}", tables[oid], b"f" if r.random() < 0.2 else b"d")
            head, key = struct.pack(">I", oid), r.randrange(5)
            yield (
                lsn,
                r.choice(
                    (
                        b"I" + head + b"N" + row(oid, may_lack=False),
                        b"U" + head + b"N" + row(oid),
                        b"U" + head + b"K" + row(oid, may_lack=False) + b"N" + row(oid),
                        b"U" + head + b"O" + row(oid, may_lack=False, key=key) + b"N" + row(oid, key=key),
                        b"U" + head + b"O" + row(oid, may_lack=r.random() < 0.1) + b"N" + row(oid),
                        b"D" + head + r.choice((b"K", b"O")) + row(oid, may_lack=False),
                        b"D" + head + b"O" + values(None, *([b"1"] * len(tables[oid]))) if r.random() < 0.005 else b"M...",
                        b"T" + struct.pack(">IBI", 1, 0, oid),
                        b"M...",
                    )
                ),
            )
        lsn = max(lsn, commit)
        yield lsn, b"C" + bytes(25)


def join(log: Sequence[tuple[int, bytes]]) -> LogMessages:
    """Return messages with some bytes before each of them, and behind the last one."""
    ends = np.cumsum([3 + len(data) for _, data in log])
    data = b"".join(b"..." + data for _, data in log) + bytes(8)
    return LogMessages(data, ends - [len(data) for _, data in log], ends, np.array([lsn for lsn, _ in log]))


def normalize(event: dict[str, Any]) -> dict[str, Any]:
    value = event["value"] and re.sub(rb'"ts_ms":\d+,"ts_us":\d+,"ts_ns":\d+\}', b"}", event["value"])
    return {**event, "value": value}


class Chunks(PostgresChunkFilter):
    """Chunks of tables with the keys 0 to 4. Compares keys without a server.

    0 is done, 1 and 2 are a chunk that has seen transactions before 150, 3 is one that has seen those before 250, 4 is not read.
    """

    def __init__(self, options: PostgresEventForm) -> None:
        read = (ReadChunk(("2",), "150:150:"), ReadChunk(("3",), "250:250:"))
        names = [("public", name) for name in ("t1", "t2")]
        tables = {name: TableSnapshot(name, ("id",), ("0",), read) for name in names}
        server: Any = None
        truncates = "t" not in options.skipped
        super().__init__(tables=tables, publishes_truncates=truncates, server=server, connection=server, publication="p")
        self.waits = set[int]()

    def _find(self, table: TableSnapshot, keys: list[Key]) -> None:
        for key in keys:
            self.note_chunk(table.table, key, sum(int(end[0]) < int(key[0]) for end in table.bounds))

    def leave_to_chunk(self) -> None:
        self.waits.add(self._xid)


FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "schemas": {"schemas": True, "skipped": frozenset()},
    "keys": {"keys": {("public", "t1"): ("id",)}, "skipped": frozenset("u")},
    "transactions": {"transactions": True, "skipped": frozenset()},
    "rows": {"unwrap": ExtractNewRecordState()},
    "rows and fields": {
        "schemas": True,
        "unwrap": ExtractNewRecordState("rewrite-with-tombstone", ["lsn", "op", "sequence:before", "source.ts_ms"]),
    },
    "tables": {"tables": frozenset({("public", "t1"), ("public", "t2")}), "skipped": frozenset("d")},
}


PIECE = 64


def write_one_by_one(
    writer: PostgresEventWriter, chunks: Chunks | None, log: Sequence[tuple[int, bytes]]
) -> Iterator[dict[str, Any]]:
    for start in range(0, len(log), PIECE):
        read = ((lsn, decode(data)) for lsn, data in log[start : start + PIECE])
        messages = [(lsn, message) for lsn, message in read if message is not None]
        if chunks is not None:
            chunks.look_ahead(message for _, message in messages)
        for lsn, message in messages:
            if events := list(writer.write(lsn, message)):
                yield from make_batch(events).to_pylist()


def write_batches(writer: BatchWriter, log: Sequence[tuple[int, bytes]]) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(log), PIECE):
        yield from writer.write(join(log[start : start + PIECE]))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("most", "in_snapshot"), [extended(1 << 20, False), (3000, False), extended(3000, True)])
def test_batches_have_the_events_that_are_written_one_by_one(form, most, in_snapshot, monkeypatch):
    monkeypatch.setattr(batches, "BATCH_BYTES", most)
    count = 0
    for seed in (*range(8), *((11, 29, 37) if in_snapshot else ())):
        keys = {("public", f"t{oid}"): ("id",) for oid in (1, 2, 3)}
        options = PostgresEventForm(prefix="p", primary_keys=keys, **FORMS[form])
        filters = [Chunks(options) if in_snapshot else None for _ in range(2)]
        single, whole = (PostgresEventWriter(options, 30, 370, {}, chunks) for chunks in filters)
        batch_writer = BatchWriter(whole, lambda _, data: decode(data))
        log = list(make_log(seed))
        expected: list[dict[str, Any]] = []
        found: list[dict[str, Any]] = []
        failures: list[str] = []
        of_single, batched = write_one_by_one(single, filters[0], log), write_batches(batch_writer, log)
        if options.transactions:
            of_single, batched = number_events(of_single, "p"), TransactionWriter(options).write(batched)
        of_batches = (row for batch in batched for row in batch.to_pylist())
        for out, events in ((expected, of_single), (found, of_batches)):
            try:
                out += events
            except Exception as error:
                failures.append(str(error))
        assert len(failures) in (0, 2) and len(set(failures)) < 2, failures
        if not failures:
            assert list(map(normalize, found)) == list(map(normalize, expected))
            count += len(found)
            left = [(chunks.truncated, chunks.waits) for chunks in filters if chunks is not None]
            assert left[:1] == left[1:]
            assert whole.last == single.last and whole.parts.begin == single.parts.begin
    assert count > (30 if in_snapshot else 300), count


@pytest.mark.parametrize("mode", get_args(DeleteHandling))
def test_unwrapped_rows_have_the_values_of_their_events(mode):
    unwrap = ExtractNewRecordState(mode, ROW_FIELDS)
    count = refused = 0
    for seed in range(8):
        keys = {("public", f"t{oid}"): ("id",) for oid in (1, 2, 3)}
        left_out = frozenset({"t", "d"} if mode == "drop" else {"t"})
        of_rows = {"unwrap": unwrap, "tombstones": unwrap.has_tombstones, "skipped": left_out}
        found: list[list[dict[str, Any]]] = []
        for given in ({}, of_rows):
            options = PostgresEventForm(prefix="p", primary_keys=keys, **given)
            writer = BatchWriter(PostgresEventWriter(options, 30, 370, {}), lambda _, data: decode(data))
            try:
                found.append([row for batch in write_batches(writer, list(make_log(seed))) for row in batch.to_pylist()])
            except SourceRejected as error:
                # An event has a placeholder in the place of a value that the log does not hold. A row does not.
                assert "does not hold" in str(error), error
                refused += 1
                break
        if len(found) == 2:
            events, rows = found
            assert [{**row, "value": decoded(row["value"])} for row in rows] == extract_rows(events, mode)
            count += len(rows)
    assert count > 100 and refused > 0, (count, refused)


@pytest.mark.parametrize("added", [{"add_fields": ["op:c0"]}, {"add_fields": ["lsn:c0"]}, {"add_fields_prefix": "__"}])
def test_a_column_with_the_name_of_an_added_field_is_refused(added):
    """By each writer: that of rows in columns, and that of single messages."""
    deletes = {"delete_tombstone_handling_mode": "rewrite"} if "add_fields" not in added else {}
    unwrap = ExtractNewRecordState(**{"add_fields_prefix": "", **deletes, **added})
    named = relation(1, "t1", [23]) if "add_fields" in added else relation(1, "t1", [23]).replace(b"c0\0", b"__deleted\0")
    changes = [(12 + at, b"I" + struct.pack(">I", 1) + b"N" + values(b"%d" % at, b"1")) for at in range(3)]
    log = [(0, b"B" + struct.pack(">qqI", 40, 40, 40)), (0, named), *changes, (40, b"C" + bytes(25))]
    options = PostgresEventForm(prefix="p", primary_keys={("public", "t1"): ("id",)}, unwrap=unwrap)
    single = PostgresEventWriter(options, 30, 370, {})
    whole = BatchWriter(PostgresEventWriter(options, 30, 370, {}), lambda _, data: decode(data))
    for write in (lambda: list(write_batches(whole, log)), lambda: [list(single.write(lsn, decode(data))) for lsn, data in log]):
        with pytest.raises(SourceRejected, match="`(c0|__deleted)` has the name of a field that `unwrap` adds.*_prefix"):
            write()


def test_rows_that_are_cut_off_or_not_whole_are_not_read_in_columns():
    head, row, other = struct.pack(">I", 1), values(b"1", None, b"xyz"), values(b"1", UNCHANGED, b"")
    full = b"I" + head + b"N" + row

    def read(messages: Sequence[bytes], rows: int = 1) -> list[list[Any]]:
        found = read_rows(join([(0, data) for data in messages]), np.arange(len(messages)), 3, rows)
        return [[column.to_pylist() for column in columns] for columns in found]

    def kinds(*messages: bytes) -> list[int]:
        found: list[int] = find_kinds(join([(0, data) for data in messages])).tolist()
        return found

    assert read([full, full])[0] == [[b"1"] * 2, [None] * 2, [b"xyz"] * 2]
    both = b"U" + head + b"O" + values(b"1", b"2", b"xyz") + b"N"
    assert read([both + row, both + other], 2)[1] == [[b"1"] * 2, [None, b"2"], [b"xyz", b""]]
    for message, rows, first in ((full, 1, 7), (both + row, 2, len(both) - 10), (both + other, 2, len(both) + 1)):
        for end in range(first, len(message)):
            assert kinds(message[:end]) == [rows - 1]
            for messages in ([message[:end]], [message[:end], message], [message, message[:end]]):
                with pytest.raises(NotWhole):
                    read(messages, rows)
    for data in (b"I" + head + b"N" + other, b"I" + head + b"N" + values(b"1", None)):
        with pytest.raises(NotWhole):
            read([full, data])
    with pytest.raises(NotWhole):
        read([b"U" + head + b"O" + row + b"N" + other], 2)
    assert set(kinds(b"", b"I", b"U", full[:6], b"U" + head + b"K" + row, b"T" + full[1:])) == {-1}
    assert kinds(b"D" + head + b"K" + row) == [2]
