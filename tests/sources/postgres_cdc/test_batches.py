"""Events of whole batches of the log are those that are written one by one."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from airflow_kafka_spark.sources.cdc.tasks.reader import make_batch
from airflow_kafka_spark.sources.postgres_cdc.tasks import batches
from airflow_kafka_spark.sources.postgres_cdc.tasks.batches import BatchWriter, NotWhole, has_new_row_only, read_columns
from airflow_kafka_spark.sources.postgres_cdc.tasks.events import EventOptions, EventWriter
from airflow_kafka_spark.sources.postgres_cdc.tasks.pgoutput import UNCHANGED, decode
from tests.sources.postgres_cdc.test_pgoutput import values

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

    def row(oid: int, *, may_lack: bool = True) -> bytes:
        cells: list[object] = [b"%d" % r.randrange(5)]
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
            head = struct.pack(">I", oid)
            yield (
                lsn,
                r.choice(
                    (
                        b"I" + head + b"N" + row(oid, may_lack=False),
                        b"U" + head + b"N" + row(oid),
                        b"U" + head + b"K" + row(oid, may_lack=False) + b"N" + row(oid),
                        b"D" + head + b"K" + row(oid, may_lack=False),
                        b"T" + struct.pack(">IBI", 1, 0, oid),
                        b"M...",
                    )
                ),
            )
        lsn = max(lsn, commit)
        yield lsn, b"C" + bytes(25)


def normalize(event: dict[str, Any]) -> dict[str, Any]:
    value = event["value"] and re.sub(rb'"ts_ms":\d+,"ts_us":\d+,"ts_ns":\d+\}', b"}", event["value"])
    return {**event, "value": value}


FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "schemas": {"schemas": True, "skipped": frozenset()},
    "keys": {"keys": {("public", "t1"): ("id",)}, "skipped": frozenset("u")},
    "tables": {"tables": frozenset({("public", "t1"), ("public", "t2")}), "skipped": frozenset("d")},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("most", [1 << 20, 3000])
def test_batches_have_the_events_that_are_written_one_by_one(form, most, monkeypatch):
    monkeypatch.setattr(batches, "BATCH_BYTES", most)
    count = 0
    for seed in range(8):
        keys = {("public", f"t{oid}"): ("id",) for oid in (1, 2, 3)}
        options = EventOptions(prefix="p", primary_keys=keys, **FORMS[form])
        single, whole = (EventWriter(options, 30, 370, {}) for _ in range(2))
        batch_writer = BatchWriter(whole, lambda _, data: decode(data))
        log = list(make_log(seed))
        expected: list[dict[str, Any]] = []
        found: list[dict[str, Any]] = []
        failures: list[str] = []
        for out, write in ((expected, single), (found, batch_writer)):
            try:
                for start in range(0, len(log), 64):
                    if isinstance(write, BatchWriter):
                        for batch in write.write(log[start : start + 64]):
                            out += batch.to_pylist()
                    else:
                        for lsn, data in log[start : start + 64]:
                            message = decode(data)
                            events = [] if message is None else list(write.write(lsn, message))
                            out += make_batch(events).to_pylist() if events else []
            except Exception as error:
                failures.append(str(error))
        assert len(failures) in (0, 2) and len(set(failures)) < 2, failures
        if not failures:
            assert list(map(normalize, found)) == list(map(normalize, expected))
            count += len(found)
        assert whole.last == single.last and whole.parts.begin == single.parts.begin
    assert count > 300, count


def test_rows_that_are_cut_off_or_not_whole_are_not_read_in_columns():
    head = b"I" + struct.pack(">I", 1) + b"N"
    full = head + values(b"1", None, b"xyz")
    assert [column.to_pylist() for column in read_columns([full, full], 3)] == [[b"1"] * 2, [None] * 2, [b"xyz"] * 2]
    for end in range(7, len(full)):
        assert has_new_row_only(full[:end])
        for messages in ([full[:end]], [full[:end], full], [full, full[:end]]):
            with pytest.raises(NotWhole):
                read_columns(messages, 3)
    for other in (head + values(b"1", UNCHANGED, b"xyz"), head + values(b"1", None)):
        with pytest.raises(NotWhole):
            read_columns([full, other], 3)
    assert not any(map(has_new_row_only, (b"", b"I", b"U", full[:6], b"U" + full[1:5] + b"K" + full[6:], b"D" + full[1:])))
