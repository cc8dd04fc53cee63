"""Events of the log that are written in columns are those that are written one by one."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import Any, get_args

import pytest

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.formats.debezium.format import DeleteHandling
from airflow_kafka_spark.sources.cdc.options import ExtractNewRecordState
from airflow_kafka_spark.sources.cdc.tasks import reader
from airflow_kafka_spark.sources.cdc.tasks.reader import batch_events
from airflow_kafka_spark.sources.cdc.tasks.transactions import TransactionWriter
from airflow_kafka_spark.sources.jdbc.mysql import MySqlServer
from airflow_kafka_spark.sources.mysql_cdc.tasks import binlog, events
from airflow_kafka_spark.sources.mysql_cdc.tasks.batches import LogParser
from airflow_kafka_spark.sources.mysql_cdc.tasks.binlog import LogEvent
from airflow_kafka_spark.sources.mysql_cdc.tasks.events import MySqlEventForm, MySqlEventWriter
from airflow_kafka_spark.sources.mysql_cdc.tasks.session import Located, LogCoordinates, LogServer
from airflow_kafka_spark.sources.mysql_cdc.tasks.values import ValueForm
from tests.sources.postgres_cdc.kit import ROW_FIELDS, decoded, extract_rows, number_events
from tests.support.distribution import extended

UTF8_ID = 45


def make_map(number: int, name: str, is_wide: bool) -> bytes:
    """Return the body of a TABLE_MAP event of a table with an integer as its key, and one or two texts."""
    kinds = [binlog.LONG, *[binlog.VARCHAR] * (1 + is_wide)]
    names = b"".join(b"\2c%d" % at for at in range(len(kinds)))
    metadata = b"\4" + bytes([len(names)]) + names + b"\2\1" + bytes([UTF8_ID]) + b"\x08\1\0"
    sizes = b"\x14\0" * (len(kinds) - 1)
    head = number.to_bytes(6, "little") + b"\0\0\4shop\0" + bytes([len(name)]) + name.encode() + b"\0"
    return head + bytes([len(kinds), *kinds, len(sizes)]) + sizes + b"\xff" + metadata


def make_row(r: random.Random, key: int, is_wide: bool) -> bytes:
    nulls, out = 0, key.to_bytes(4, "little")
    for at in range(1 + is_wide):
        if r.random() < 0.2:
            nulls |= 2 << at
        else:
            text = r.choice((b"", b'a"\n', "ü".encode()))
            out += bytes([len(text)]) + text
    return bytes([nulls]) + out


def make_statement(text: bytes) -> bytes:
    return bytes(8) + b"\4\0\0\0\0shop\0" + text


def make_log(seed: int) -> Iterator[tuple[int, bytes]]:
    """Yield kinds and bodies of events: transactions, some of them with savepoints that are gone back to."""
    r, wide = random.Random(seed), {1: False, 2: True, 3: False}
    for number in range(r.randrange(5, 40)):
        yield binlog.GTID_MARIADB, number.to_bytes(8, "little") + bytes(5)
        savepoints: list[bytes] = []
        for _ in range(r.randrange(8)):
            table = r.choice((1, 2, 3))
            if r.random() < 0.05:
                wide[table] = not wide[table]
            if r.random() < 0.2:
                savepoints.append(r.choice((b"s", b"t")))
                yield binlog.QUERY, make_statement(b"SAVEPOINT " + savepoints[-1])
            if savepoints and r.random() < 0.2:
                yield binlog.QUERY, make_statement(b"ROLLBACK TO " + r.choice(savepoints))
            yield binlog.TABLE_MAP, make_map(table, f"t{table}" if table < 3 else "other", wide[table])
            for _ in range(r.randrange(1, 3)):
                kind = r.choice((*binlog.WRITE_ROWS, *binlog.UPDATE_ROWS, *binlog.DELETE_ROWS))
                head = table.to_bytes(6, "little") + b"\0\0" + (b"\2\0" if kind in binlog.ROWS_WITH_EXTRA else b"")
                head += bytes([2 + wide[table]]) + b"\xff" * (1 + (kind in binlog.UPDATE_ROWS))
                rows = []
                for _ in range(r.randrange(5)):
                    key = r.randrange(5)
                    rows.append(make_row(r, key, wide[table]))
                    if kind in binlog.UPDATE_ROWS:
                        rows.append(make_row(r, key if r.random() < 0.95 else r.randrange(5), wide[table]))
                yield kind, head + b"".join(rows)
        yield r.choice(((binlog.XID, bytes(8)), (binlog.QUERY, make_statement(b"COMMIT"))))
        if r.random() < 0.05:
            yield binlog.ROTATE, (4).to_bytes(8, "little") + b"bin.000002"


def locate(log: Iterator[tuple[int, bytes]], r: random.Random) -> Iterator[Located]:
    at, seconds = LogCoordinates("bin.000001", 4), 1_700_000_000
    for kind, body in log:
        seconds += r.randrange(2)
        end = at._replace(position=at.position + 19 + len(body))
        yield Located(LogEvent(kind, seconds, 7, end.position, body), at, end)
        at = LogCoordinates("bin.000002", 4) if kind == binlog.ROTATE else end


def normalize(event: dict[str, Any]) -> dict[str, Any]:
    value = event["value"] and re.sub(rb'"ts_ms":\d+,"ts_us":\d+,"ts_ns":\d+\}', b"}", event["value"])
    return {**event, "value": value}


FORMS: dict[str, dict[str, Any]] = {
    "default": {},
    "schemas": {"schemas": True, "skipped": frozenset("d")},
    "transactions": {"transactions": True},
    "rows": {"unwrap": ExtractNewRecordState()},
    "rows and fields": {"tombstones": False, "unwrap": ExtractNewRecordState("rewrite", ["pos", "op", "row", "source.ts_ms"])},
    "no tombstones": {"tombstones": False, "skipped": frozenset("u")},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("held", [extended(16 << 20), 0])
def test_events_in_columns_are_those_that_are_written_one_by_one(form, held, monkeypatch):
    monkeypatch.setattr(events, "HELD_BYTES", held)
    monkeypatch.setattr(reader, "BATCH_ROWS", 50)
    count = ranges = 0
    for seed in range(20):
        tables = frozenset({("shop", "t1"), ("shop", "t2")})
        values = ValueForm(charsets={UTF8_ID: "utf8mb4"})
        options = MySqlEventForm(prefix="p", database="shop", tables=tables, values=values, **FORMS[form])
        log = list(locate(make_log(seed), random.Random(seed)))
        found: list[list[dict[str, Any]]] = []
        failures = []
        for in_columns in (False, True):
            server = LogServer(MySqlServer("", "h", 1, "", ""))
            writer = MySqlEventWriter(server, options)
            parser = LogParser(server, options, writer)
            if not in_columns:
                monkeypatch.setattr(parser, "_write_columns", lambda *_: iter(()))
            parts = []
            try:
                for start in range(0, len(log), 60):
                    piece = log[start : start + 60]
                    for located, parsed in zip(piece, parser.parse(piece), strict=True):
                        parts += list(writer.write(located, parsed))
            except Exception as error:
                failures.append(str(error))
            ranges += sum(isinstance(part, reader.EventRange) for part in parts)
            batches = batch_events(parts)
            if options.transactions and in_columns:
                batches = TransactionWriter(options).write(batches)
            rows = (row for batch in batches for row in batch.to_pylist())
            if options.transactions and not in_columns:
                rows = number_events(rows, "p")
            found.append(list(map(normalize, rows)))
        assert found[0] == found[1], seed
        assert len(failures) in (0, 2) and len(set(failures)) < 2, failures
        count += len(found[0])
    assert count > 500 and ranges > 200, (count, ranges)


@pytest.mark.parametrize("mode", get_args(DeleteHandling))
def test_unwrapped_rows_have_the_values_of_their_events(mode):
    unwrap = ExtractNewRecordState(mode, ROW_FIELDS)
    count = 0
    for seed in range(8):
        log = list(locate(make_log(seed), random.Random(seed)))
        left_out = frozenset({"t", "d"} if mode == "drop" else {"t"})
        of_rows = {"unwrap": unwrap, "tombstones": unwrap.has_tombstones, "skipped": left_out}
        found = []
        for given in ({}, of_rows):
            values = ValueForm(charsets={UTF8_ID: "utf8mb4"})
            tables = frozenset({("shop", "t1"), ("shop", "t2")})
            options = MySqlEventForm(prefix="p", database="shop", tables=tables, values=values, **given)
            server = LogServer(MySqlServer("", "h", 1, "", ""))
            writer = MySqlEventWriter(server, options)
            parser = LogParser(server, options, writer)
            parts: list[Any] = []
            try:
                for located, parsed in zip(log, parser.parse(log), strict=True):
                    parts += writer.write(located, parsed)
            except SourceRejected:
                pass
            found.append([row for batch in batch_events(parts) for row in batch.to_pylist()])
        events, rows = found
        assert [{**row, "value": decoded(row["value"])} for row in rows] == extract_rows(events, mode), seed
        count += len(rows)
    assert count > 100, count
