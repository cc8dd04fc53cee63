"""Rows of a snapshot, read from the packets of a query's result: their values, and whole columns of them as JSON."""

from __future__ import annotations

from typing import Any, NoReturn

import pyarrow as pa
import pytest

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.sources.cdc.tasks.columns import format_column
from airflow_kafka_spark.sources.cdc.tasks.events import ValueRefused
from airflow_kafka_spark.sources.mysql_cdc.tasks import read as reading
from airflow_kafka_spark.sources.mysql_cdc.tasks.catalog import read_table_shape
from airflow_kafka_spark.sources.mysql_cdc.tasks.read import read_chunk_rows
from airflow_kafka_spark.sources.mysql_cdc.tasks.values import ValueForm, read_column
from airflow_kafka_spark.sources.mysql_cdc.windows import read_charsets
from tests.sources.mysql_cdc.kit import Binlog

ORDINARY = 200
"""Rows with values that whole columns are formatted with."""

_INSTANT = "'1970-01-01' + INTERVAL n * 98765432 + n / 7 SECOND"
# type, an expression of ordinary values, and unusual ones
TYPES: list[tuple[str, str, list[str]]] = [
    ("tinyint", "n % 128", ["-128"]),
    ("int", "(RAND() - 0.5) * 4e9", []),
    ("int(8) zerofill", "n", []),
    ("bigint unsigned", "n * 1e15", ["18446744073709551615"]),
    ("year", "2000 + n % 100", ["0"]),
    ("float", "n / 8", ["RAND()", "1e-5", "33554432", "1e20"]),
    ("double", "n / 16", ["RAND()", "1e15", "1e16", "1e-5", "-0.0001"]),
    ("decimal(12,2)", "(RAND() - 0.5) * 1e10", ["0"]),
    ("decimal(5,0)", "n", ["-99999"]),
    ("decimal(3,3)", "RAND()", ["-0.001"]),
    ("decimal(8,2) zerofill", "n / 3", []),
    ("decimal(40,10)", "n / 7", ["-123456789012345678901234567890.5"]),
    ("date", f"DATE({_INSTANT})", ["'0000-00-00'", "'9999-12-31'", "'2026-02-30'", "'0000-01-01'"]),
    ("datetime", _INSTANT, ["'0000-00-00'"]),
    ("datetime(3)", _INSTANT, ["'1969-12-31 23:59:59.999'"]),
    ("datetime(6)", _INSTANT, ["'1969-12-31 23:59:59.999999'"]),
    ("timestamp null", "FROM_UNIXTIME(n * 9876543)", ["0"]),
    ("timestamp(4) null", "FROM_UNIXTIME(n * 9876543 + n / 7)", ["0"]),
    ("time", "SEC_TO_TIME(n * 400)", ["'838:59:59'", "'-00:00:01'"]),
    ("time(6)", "SEC_TO_TIME(n * 400 + n / 7)", ["'24:00:00'"]),
    ("varchar(300)", "CONCAT(REPEAT('ü', n), '\"')", ["''", "'\\\\'", "'😀'"]),
    ("longtext", "REPEAT('x', n * 700)", ["''"]),
    ("json", "JSON_OBJECT('a', n)", []),
    ("enum('a','ü')", "'ü'", []),
    ("set('a','b')", "'a,b'", ["''"]),
    ("varchar(9) character set latin1", "CHAR(n + 32)", []),
    ("varbinary(9)", "n", []),
    ("binary(9)", "n", []),
    ("bit(1)", "n % 2", []),
    ("bit(12)", "n", []),
]  # fmt: skip
BY_VALUE = ("varchar(9) character set latin1", "varbinary(9)", "binary(9)", "bit(1)", "bit(12)")
"""The types that are formatted value by value."""

FORMS: list[dict[str, Any]] = [
    {"decimals": "precise", "zero_dates": "null", "unsigned": "precise"},
    {"decimals": "string", "times": "connect"},
    {"decimals": "double"},
]


def fail(raw: bytes) -> NoReturn:
    raise AssertionError(f"{raw!r} was converted by itself")


def formatted(array: pa.Array, form: Any, convert: Any) -> list[str | None] | str:
    try:
        found: list[str | None] = format_column(array, form, convert).as_json().to_pylist()
    except ValueRefused as error:
        return str(error)
    return found


def one_by_one(array: pa.Array, convert: Any) -> list[str | None] | str:
    try:
        return [None if raw is None else convert(raw) for raw in array.to_pylist()]
    except ValueRefused as error:
        return str(error)


def test_whole_columns_become_the_json_that_single_values_become(shop: Binlog, monkeypatch):
    columns = ", ".join(f"c{at} {kind}" for at, (kind, _, _) in enumerate(TYPES))
    shop.execute("SET SESSION sql_mode = 'ALLOW_INVALID_DATES', time_zone = '+00:00'")
    shop.execute(f"CREATE TABLE many (id int PRIMARY KEY, {columns})")
    ordinary = ", ".join(f"CASE WHEN n % 10 > 0 THEN {found} END" for _, found, _ in TYPES)
    shop.execute(f"INSERT IGNORE INTO many SELECT n, {ordinary} FROM (SELECT seq AS n FROM seq_1_to_{ORDINARY}) AS s")
    for at, (_, _, unusual) in enumerate(TYPES):
        for number, literal in enumerate(unusual):
            shop.execute(f"INSERT INTO many (id, c{at}) VALUES ({1000 + at * 100 + number}, {literal})")
    server, wrong = shop.server_log(), dict[Any, Any]()
    for given in FORMS:
        with server.open_session("reading") as connection:
            form = ValueForm(**given, charsets=read_charsets(connection))
            shape = read_table_shape(server, connection, ("shop", "many"), form)
            assert shape is not None
            pieces = list(read_chunk_rows(connection, {"after": None, "upto": None}, shape))
        arrays = [pa.concat_arrays(parts) for parts in zip(*pieces, strict=True)]
        for (kind, _, _), column, array in zip(TYPES, shape.table.columns[1:], arrays[1:], strict=True):
            found = read_column(column, form)
            part = array.slice(0, ORDINARY)
            for these in (array, part):
                whole, single = formatted(these, found.form, found.of_query), one_by_one(these, found.of_query)
                if whole != single:
                    wrong[form.decimals, kind] = whole, single
            if kind not in BY_VALUE and not (form.decimals != "precise" and kind.startswith("decimal")):
                formatted(part, found.form, fail)
    assert wrong == {}
    monkeypatch.setattr(reading, "PIECE_ROWS", 7)
    with server.open_session("reading") as connection:
        again = list(read_chunk_rows(connection, {"after": None, "upto": None}, shape))
    assert [pa.concat_arrays(parts) for parts in zip(*again, strict=True)] == arrays and len(again) > 30


def test_rows_of_several_packets_are_read_and_errors_behind_some_rows_are_raised(shop: Binlog):
    [(before,)] = shop.rows("SELECT @@global.max_allowed_packet")
    shop.execute(f"SET GLOBAL max_allowed_packet = {64 << 20}", "CREATE TABLE wide (id int PRIMARY KEY, raw longblob)")
    try:
        server = shop.server_log()
        sizes = [3, (1 << 24) - 1 - 6, 1 << 24, 20_000_000, 5]  # the second one fills a packet
        with server.open_session("writing") as connection, connection.cursor() as cursor:
            for number, size in enumerate(sizes):
                cursor.execute(f"INSERT INTO wide VALUES ({number}, REPEAT('{number}', {size}))")
        with server.open_session("reading") as connection:
            shape = read_table_shape(server, connection, ("shop", "wide"), ValueForm())
            assert shape is not None
            pieces = list(read_chunk_rows(connection, {"after": None, "upto": None}, shape))
        values = [raw for piece in pieces for raw in piece[1].to_pylist()]
        assert [(len(raw), set(raw)) for raw in values] == [(size, {48 + n}) for n, size in enumerate(sizes)]
    finally:
        shop.execute(f"SET GLOBAL max_allowed_packet = {before}")
    shop.execute("CREATE TABLE few (id int PRIMARY KEY)", "INSERT INTO few SELECT seq FROM seq_1_to_50000")
    shop.execute(
        "CREATE FUNCTION fails(n int) RETURNS int DETERMINISTIC NO SQL "
        "BEGIN IF n = 49000 THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'too many'; END IF; RETURN n; END"
    )
    read = list[int]()
    with pytest.raises(SourceRejected, match="reading: too many"), server.open_session("reading") as connection:
        connection.query("SELECT fails(id) FROM few", unbuffered=True)
        for _, starts in reading.read_packets(connection):
            read.append(len(starts) - 1)
    assert sum(read) >= reading.PIECE_ROWS
