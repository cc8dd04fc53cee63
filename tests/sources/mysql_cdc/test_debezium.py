"""Events compared with those of Debezium's engine on the same tables and changes."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_kafka_spark.sources import ExtractNewRecordState, MySqlCdcSource
from tests.sources.mysql_cdc.kit import CONN
from tests.sources.postgres_cdc.kit import ROW_FIELDS, Windows
from tests.support.debezium import mariadb as tables
from tests.support.debezium.compare import differences, of_engine, unexplained
from tests.support.debezium.record import change_mariadb, make_mariadb
from tests.support.mariadb import EmbeddedMariaDB, is_mysql

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "connect": {
        "decimal_handling_mode": "string",
        "time_precision_mode": "connect",
        "skipped_operations": (),
        "tombstones_on_delete": False,
        "provide_transaction_metadata": True,
        "bigint_unsigned_handling_mode": "precise",
    },
    "adaptive": {"decimal_handling_mode": "double", "time_precision_mode": "adaptive_time_microseconds"},
    "rows": {"unwrap": ExtractNewRecordState("rewrite-with-tombstone", ROW_FIELDS)},
}


@pytest.fixture(scope="module")
def place(mariadb: EmbeddedMariaDB) -> str:
    """The coordinates in the log after which the changes are."""
    with mariadb.connect() as connection, connection.cursor() as cursor:
        make_mariadb(connection)
        cursor.execute("SHOW BINARY LOG STATUS" if is_mysql() else "SHOW MASTER STATUS")
        file, position, *_ = cursor.fetchone()
        change_mariadb(connection)
    return f"{file}:{position}"


KNOWN = {
    r"schema\.fields\..*default: missing": "the log does not hold defaults",
    r"<float\(7,3\)>\.type: 'float', expected 'double'": "nor the digits of a FLOAT",
    r"<year>: 0, expected 1900": "the engine takes the year 0 for 1900",
    r"<enum\(.*: 'a,b', expected": "the engine writes values as they stand in the schema, with commas escaped",
    r"<time.*>: -?\d+, expected None": "Connect's Time cannot be negative, or a day or longer, and the engine writes null",
    r"changes 12 value\.schema\.fields": "a truncate in the log does not name the columns",
}
"""Differences that stay, and why."""

OF_MYSQL = {
    r"source\.thread: None, expected": "the number of the session is left out",
    r"<json>: ": "the text is that of the server; the engine writes no spaces, and all digits of a double",
    r"changes 12 value\.payload\.transaction: .*, expected None": "a truncate is in a transaction of its own",
}


def without_truncates(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Leave out begin and end of transactions that truncate: the engine publishes no end."""
    payloads = [(record["value"] or {}).get("payload") or {} for record in records]
    truncates = {payload["transaction"]["id"] for payload in payloads if payload.get("op") == "t"}
    return [r for r, payload in zip(records, payloads, strict=True) if payload.get("id") not in truncates]


def test_events_are_equal_to_those_of_debeziums_engine(place):
    found = []
    for options, more in OPTIONS.items():
        keys = {f"shop.{table}": key for table, key in tables.KEYS.items()}
        given = {"message_key_columns": keys, "schemas_enable": True, "starting_position": place, **more}
        ours = Windows(MySqlCdcSource(CONN, "shop", **given)).next()
        found += differences(without_truncates(ours), of_engine("mysql" if is_mysql() else "mariadb", options))
    known, types = ({**KNOWN, **OF_MYSQL}, tables.TYPES_OF_MYSQL) if is_mysql() else (KNOWN, tables.TYPES)
    assert unexplained(found, known, types) == []
