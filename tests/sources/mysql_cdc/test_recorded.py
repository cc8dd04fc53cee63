"""Bytes that a MySQL server has logged, decoded without one: values of the type JSON, GTIDs with tags, compressed transactions.

``recorded.json.gz`` has them. ``make mysql`` compares them with what its server logs; ``RECORD=1 make mysql`` writes them again.
"""

from __future__ import annotations

import gzip
import json
import os
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import pytest

from airflow_kafka_spark.sources.mysql_cdc.tasks import binlog, session, values
from airflow_kafka_spark.sources.mysql_cdc.tasks.binlog import LogEvent, LogUnreadable, parse_event, parse_gtid, read_payload
from airflow_kafka_spark.sources.mysql_cdc.tasks.json_binary import format_json_binary
from airflow_kafka_spark.sources.mysql_cdc.tasks.session import LogCoordinates
from tests.sources.mysql_cdc.kit import Binlog
from tests.sources.mysql_cdc.test_mysql import DOCUMENTS
from tests.support.mariadb import is_mysql

FILE = Path(__file__).with_name("recorded.json.gz")
RECORDED: dict[str, Any] = json.loads(gzip.decompress(FILE.read_bytes()))


def read_events() -> list[LogEvent]:
    return [parse_event(b64decode(data), checked=True) for data in RECORDED["events"]]


def test_json_is_the_text_that_the_server_has_shown() -> None:
    shown = [text for _, text in RECORDED["documents"]]
    assert [format_json_binary(b64decode(raw), values._format_json_decimal) for raw, _ in RECORDED["documents"]] == shown
    assert len(shown) == len(DOCUMENTS)


def test_json_that_is_cut_off_or_of_an_unknown_type_is_refused() -> None:
    raw = next(b64decode(raw) for raw, text in RECORDED["documents"] if text.startswith('{"list"'))
    with pytest.raises(LogUnreadable, match="is cut off"):
        format_json_binary(raw[:9], values._format_json_decimal)
    with pytest.raises(LogUnreadable, match="has the type 14"):
        format_json_binary(b"\x0e" + raw[1:], values._format_json_decimal)


def test_a_compressed_transaction_has_the_events_of_its_changes() -> None:
    gtid, payload = read_events()
    assert (gtid.kind, payload.kind) == (binlog.GTID_TAGGED, binlog.PAYLOAD)
    assert parse_gtid(gtid) == RECORDED["gtid"]
    inner = list(read_payload(payload.body))
    assert [event.kind for event in inner] == RECORDED["kinds"] and set(RECORDED["kinds"]) & set(binlog.ROWS)


def test_a_compressed_transaction_that_is_cut_off_and_a_changed_event_are_refused() -> None:
    payload = read_events()[1]
    with pytest.raises((LogUnreadable, OSError)):
        list(read_payload(payload.body[:-20]))
    data = bytearray(b64decode(RECORDED["events"][0]))
    data[-6] ^= 1
    with pytest.raises(LogUnreadable, match="the checksum of an event"):
        parse_event(bytes(data), checked=True)


@pytest.mark.skipif(not is_mysql(), reason="MYSQLD names no server of MySQL")
def test_what_is_recorded_is_what_the_server_logs(shop: Binlog, monkeypatch: pytest.MonkeyPatch) -> None:
    found = record(shop, monkeypatch)
    if os.environ.get("RECORD"):
        FILE.write_bytes(gzip.compress(json.dumps(found).encode(), mtime=0))
    for name in ("documents", "kinds"):
        assert found[name] == RECORDED[name]


def record(shop: Binlog, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the server logs for `DOCUMENTS`, and for a compressed transaction whose GTID has a tag."""
    raw: list[bytes] = []
    with monkeypatch.context() as patch:
        patch.setattr(values, "format_json_binary", lambda data, _: raw.append(bytes(data)) or "null")
        shop.execute("CREATE TABLE t (id int PRIMARY KEY AUTO_INCREMENT, j json)")
        windows = shop.windows()
        shop.execute(*(f"INSERT INTO t (j) VALUES ({document})" for document in DOCUMENTS))
        assert len(windows.next()) == len(raw) == len(DOCUMENTS)
    shown = [text for (text,) in shop.rows("SELECT CAST(j AS CHAR CHARACTER SET utf8mb4) FROM t ORDER BY id")]
    start = LogCoordinates.parse(shop.end())
    shop.execute("SET SESSION binlog_transaction_compression = ON", "SET gtid_next = 'AUTOMATIC:recorded'")
    shop.execute("DELETE FROM t WHERE id < 4", "SET gtid_next = 'AUTOMATIC'", "SET SESSION binlog_transaction_compression = OFF")
    server = shop.server_log()
    lines: list[bytes] = []
    list_events = session._list_events

    def keep(connection: Any) -> Any:
        for data in list_events(connection):
            lines.append(data)
            yield data

    with monkeypatch.context() as patch, server.open_session("recording") as connection:
        patch.setattr(session, "_list_events", keep)
        events = [located.event for located in server.read_events(connection, start)]
    wanted = (binlog.GTID_TAGGED, binlog.PAYLOAD)
    kinds = [event.kind for event in events if event.kind != binlog.PAYLOAD]
    return {
        "documents": [[b64encode(data).decode(), text] for data, text in zip(raw, shown, strict=True)],
        "gtid": next(parse_gtid(event) for event in events if event.kind == binlog.GTID_TAGGED),
        "kinds": kinds[kinds.index(binlog.GTID_TAGGED) + 1 :],
        "events": [b64encode(data).decode() for data in lines if data[4] in wanted],
    }
