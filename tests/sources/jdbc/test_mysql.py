"""JdbcSource on MariaDB, or on MySQL: the same windows, with its own quoting, collations and types."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_kafka_spark.errors import SourceRejected, SourceUnavailable
from airflow_kafka_spark.hooks.databases import SESSION_ENDED
from airflow_kafka_spark.jobs.watch import find_reason
from airflow_kafka_spark.sources.jdbc.mysql import LOCK_NAME, MySqlDialect, MySqlSession
from airflow_kafka_spark.sources.jdbc.source import JdbcSource
from airflow_kafka_spark.sources.mysql_cdc.source import MySqlCdcSource
from airflow_kafka_spark.windows.binding import compare_endpoints
from tests.sources.jdbc.kit import (
    KeyedTable,
    Types,
    check_types,
    depth,
    every_row,
    keyed_tables,
    read,
    same,
    through_json,
    type_names,
)
from tests.sources.jdbc.spark_process import JdbcSpark
from tests.support.mariadb import EmbeddedMariaDB, is_mysql, missing
from tests.support.waiting import eventually

pytest.importorskip("pymysql")
pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a server")

CONN = "maria_shop"


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedMariaDB]:
    with EmbeddedMariaDB("--skip-log-bin") as started:
        os.environ[f"AIRFLOW_CONN_{CONN.upper()}"] = started.connection_uri()
        yield started
        del os.environ[f"AIRFLOW_CONN_{CONN.upper()}"]


@pytest.fixture
def spark(server: EmbeddedMariaDB, jdbc_spark: JdbcSpark) -> JdbcSpark:
    return jdbc_spark


class Shop:
    """An empty database."""

    def __init__(self, server: EmbeddedMariaDB) -> None:
        self.server = server
        self.connection = server.connect()
        self.execute("DROP DATABASE shop")
        self.execute("CREATE DATABASE shop CHARACTER SET utf8mb4")
        self.execute("USE shop")

    def execute(self, statement: str, *values: Any) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(statement, values or None)

    def rows(self, statement: str) -> list[tuple]:
        with self.connection.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def fill(self, columns: str, rows: list[tuple]) -> None:
        self.execute("DROP TABLE IF EXISTS t")
        self.execute(f"CREATE TABLE t (n bigint, {columns})")
        with self.connection.cursor() as cursor:
            for number, row in enumerate(rows):
                cursor.execute(f"INSERT INTO t VALUES ({', '.join(['%s'] * (len(row) + 1))})", (number, *row))


@pytest.fixture
def shop(server: EmbeddedMariaDB) -> Iterator[Shop]:
    made = Shop(server)
    yield made
    made.connection.close()


quote = MySqlDialect().quote
TIME_LIMIT = "@@max_execution_time" if is_mysql() else "@@max_statement_time"

TEXT = st.text(st.sampled_from("aAbB'\"\\%_ éßÄ"), max_size=4)
MOMENT = st.datetimes(datetime(1000, 1, 1), datetime(9999, 12, 30))
KEYS: dict[str, st.SearchStrategy[Any]] = {
    "int": st.integers(-3, 3) | st.integers(-(2**31), 2**31 - 1),
    "bigint unsigned": st.integers(0, 2**64 - 1),
    "varchar(10)": TEXT,
    "varchar(10) CHARACTER SET latin1": TEXT,
    "varchar(10) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin": TEXT | st.sampled_from(["𝄞", "日本"]),
    "varchar(10) CHARACTER SET utf8mb4 COLLATE utf8mb4_german2_ci": TEXT,
    "char(5)": TEXT.map(str.rstrip),
    "decimal(12,3)": st.decimals(-1000, 1000, places=3),
    "double": st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False).filter(
        lambda x: x == 0 or 1e-300 < abs(x) < 1e300
    ),
    "float": st.floats(-1000, 1000, width=32, allow_subnormal=False),
    "varbinary(5)": st.binary(max_size=3),
    "date": st.dates(date(1000, 1, 1)),
    "datetime(6)": MOMENT,
    "datetime": MOMENT.map(lambda m: m.replace(microsecond=0)),
    "timestamp(6) DEFAULT '2020-01-01'": st.datetimes(datetime(1971, 1, 1), datetime(2037, 1, 1)),
    "time(6)": st.timedeltas(timedelta(hours=-800), timedelta(hours=800)),
    "enum('zoo','it''s','apple')": st.sampled_from(["zoo", "it's", "apple"]),
    **({} if is_mysql() else {"uuid": st.uuids().map(str)}),
    "bit(5)": st.integers(0, 31),
    "year": st.integers(1950, 2100),
}


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(keyed_tables(KEYS, quote, never_null=("timestamp",)), st.integers(1, 20), st.none() | st.integers(1, 25), st.booleans())
def test_splits_tile_the_table(shop: Shop, table: KeyedTable, split_records: int, max_records: int | None, indexed: bool) -> None:
    shop.execute("SET time_zone = '+00:00'")
    shop.fill(table.columns, table.rows)
    if indexed:
        shop.execute(f"CREATE INDEX i ON t ({table.index})")
    source = JdbcSource(CONN, "t", key=table.key, include_columns=["n"], split_records=split_records, max_records=max_records)
    found, _ = every_row(source)
    assert sorted(found) == [(n,) for n in range(len(table.rows))]


def test_incrementing_and_timestamp_windows_follow_each_other(shop: Shop) -> None:
    shop.execute(
        "CREATE TABLE t (id bigint AUTO_INCREMENT PRIMARY KEY, at datetime(3) NOT NULL, ts timestamp(6) NOT NULL DEFAULT now(6))"
    )
    for number in range(25):
        shop.execute(
            "INSERT INTO t (at, ts) VALUES (utc_timestamp() - interval %s second, now(6) - interval %s second)",
            number // 4,
            number // 4,
        )
    for options in (
        {"cursor": "id"},
        {"timestamp_column": "at"},
        {"timestamp_column": "ts"},
        {"timestamp_column": "at", "cursor": "id"},
    ):
        source = JdbcSource(CONN, "shop.t", include_columns=["id"], split_records=3, max_records=10, **options)
        assert source.validate() == []
        shop.execute("UPDATE t SET at = at - interval 5 second, ts = ts - interval 5 second")
        found, seen = every_row(source)
        assert sorted(found) == [(n,) for n in range(1, 26)]
        assert [frozen.rows for frozen in seen] == [10, 10, 5]
        assert source.freeze(seen[-1].position).splits == ()
    # Until a millisecond is over, rows may get its timestamp; here, a second.
    shop.execute("ALTER TABLE t MODIFY at datetime NOT NULL")
    moment = datetime(2026, 1, 1, 10, 0, 10, tzinfo=timezone.utc)
    shop.execute("UPDATE t SET at = '2026-01-01 10:00:10' WHERE id <= 3")
    shop.execute("UPDATE t SET at = '2026-01-01 10:00:11' WHERE id > 3")
    source = JdbcSource(CONN, "shop.t", timestamp_column="at")
    for seconds, rows in ((0.9, None), (1, 3), (1.9, 3), (2, 25)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MySqlSession, "read_clock", lambda session, later=seconds: moment + timedelta(seconds=later))
            assert source.freeze(None).rows == rows or not rows
    shop.execute("UPDATE t SET at = utc_timestamp() - interval 600 second WHERE id < 5")
    shop.execute("UPDATE t SET at = utc_timestamp() WHERE id >= 5")
    assert JdbcSource(CONN, "t", timestamp_column="at", delay=300).freeze(None).rows == 4
    assert JdbcSource(CONN, "t", timestamp_column="at", delay=300, db_timezone="Asia/Tokyo").freeze(None).rows == 25


def test_a_pass_by_an_enum_is_refused_once_its_values_have_another_order(shop: Shop) -> None:
    shop.execute("CREATE TABLE t (kind enum('a','b','c','d') PRIMARY KEY)")
    shop.execute("INSERT INTO t VALUES ('a'), ('b'), ('c'), ('d')")
    source = JdbcSource(CONN, "t", max_records=3, split_records=2)
    frozen = through_json(source.freeze(None))
    shop.execute("ALTER TABLE t MODIFY kind enum('a','b','c','d','e')")
    assert source.freeze(frozen.position).rows == 1 and len(read(source, frozen.splits)[0]) == 2
    shop.execute("ALTER TABLE t MODIFY kind enum('d','a','b','c')")
    for stale in (lambda: source.freeze(frozen.position), lambda: read(source, frozen.splits)):
        with pytest.raises(SourceRejected, match="is of type enum.*expected the order of .*'a','b','c','d'.*Change the"):
            stale()


def test_a_counter_that_was_set_back_is_refused_and_one_behind_deleted_rows_is_not(shop: Shop) -> None:
    shop.execute(
        "CREATE TABLE t (`it's` varchar(9) COMMENT '`id` AUTO_INCREMENT', id int AUTO_INCREMENT PRIMARY KEY) COMMENT='x'"
    )
    source = JdbcSource(CONN, "shop.t", cursor="id")
    shop.execute("INSERT INTO t (`it's`) VALUES ('a'), ('b'), ('c')")
    position = through_json(source.freeze(None)).position
    shop.execute("DELETE FROM t WHERE id > 1")
    assert source.freeze(position).rows == 0
    shop.execute("INSERT INTO t (`it's`) VALUES ('d')")
    assert source.freeze(position).rows == 1
    shop.execute("TRUNCATE t")
    with pytest.raises(SourceRejected, match="next AUTO_INCREMENT of `id` is 1, and rows up to 3"):
        source.freeze(position)
    shop.execute("INSERT INTO t (`it's`) VALUES ('e'), ('f')")
    with pytest.raises(SourceRejected, match="is 3, and rows up to 3"):
        source.freeze(position)
    shop.execute("INSERT INTO t (`it's`, id) VALUES ('g', 7)")
    assert source.freeze(position).rows == 1, "rows up to its position count as read"


# The values as PyMySQL takes them.
TYPES: Types = [
    ("tinyint", "tinyint", [(-128, -128)]),
    ("tinyint(1)", "tinyint", [(2, 2), (1, 1)]),
    ("tinyint unsigned", "smallint", [(255, 255)]),
    ("smallint", "smallint", [(-32768, -32768)]),
    ("smallint unsigned", "int", [(65535, 65535)]),
    ("mediumint unsigned", "int", [(16777215, 16777215)]),
    ("int", "int", [(-(2**31), -(2**31))]),
    ("int unsigned", "bigint", [(2**32 - 1, 2**32 - 1)]),
    ("bigint", "bigint", [(-(2**63), -(2**63)), (2**63 - 1, 2**63 - 1)]),
    ("bigint unsigned", "decimal(20,0)", [(2**64 - 1, Decimal(2**64 - 1))]),
    ("decimal(38,10)", "decimal(38,10)", [(Decimal("-9999999999999999999999999999.9999999999"),) * 2]),
    (
        "decimal(65,30)",
        "string",
        [("12345678901234567890123456789012345.1", "12345678901234567890123456789012345.100000000000000000000000000000")],
    ),
    ("float", "float", [(16777216.0, 16777216.0), (0.5, 0.5)]),
    ("double", "double", [(0.1, 0.1), (1.7976931348623157e308, 1.7976931348623157e308)]),
    ("bit(1)", "boolean", [(1, True), (0, False)]),
    ("bit(64)", "decimal(20,0)", [(2**64 - 1, Decimal(2**64 - 1))]),
    ("char(4)", "string", [("ab", "ab")]),
    ("varchar(20)", "string", [("é𝄞'\"\\", "é𝄞'\"\\"), ("", "")]),
    ("varchar(20) CHARACTER SET latin1", "string", [("éß", "éß")]),
    ("varchar(20) CHARACTER SET cp1250", "string", [("ž?", "ž?"), ("", "")]),
    ("longtext", "string", [("x" * 70000, "x" * 70000)]),
    ("json", "string", [('{"a": [1, "é"]}',) * 2]),
    ("enum('a','it''s')", "string", [("it's", "it's")]),
    ("set('a','b')", "string", [("a,b", "a,b")]),
    ("binary(3)", "binary", [(b"\x00\xff", b"\x00\xff\x00")]),
    ("varbinary(3)", "binary", [(b"\x00\xff'", b"\x00\xff'")]),
    ("longblob", "binary", [(b"\x00\xff", b"\x00\xff"), (b"", b"")]),
    ("date", "date", [("0001-01-01", date(1, 1, 1)), ("9999-12-31", date(9999, 12, 31)), ("1582-10-10", date(1582, 10, 10))]),
    (
        "datetime(6)",
        "timestamp_ntz",
        [
            ("0001-01-01 00:00:00.000001", datetime(1, 1, 1, 0, 0, 0, 1)),
            ("9999-12-31 23:59:59.999999", datetime(9999, 12, 31, 23, 59, 59, 999999)),
            ("2026-03-29 02:30:00.123456", datetime(2026, 3, 29, 2, 30, 0, 123456)),
        ],
    ),
    ("datetime", "timestamp_ntz", [("2026-03-29 02:30:00", datetime(2026, 3, 29, 2, 30))]),
    (
        "timestamp(6) NULL",
        "timestamp",
        [("2026-03-29 02:30:00.123456", datetime(2026, 3, 29, 2, 30, 0, 123456, tzinfo=timezone.utc))],
    ),
    ("time(3)", "string", [("-837:59:59.123", "-837:59:59.123")]),
    ("year", "int", [(2026, 2026)]),
]
if not is_mysql():
    TYPES.append(("uuid", "string", [("6f9619ff-8b86-d011-b42d-00c04fc964ff",) * 2]))
    TYPES.append(("inet6", "string", [("::1", "::1")]))


def test_every_type_survives_by_value(shop: Shop, spark: JdbcSpark) -> None:
    """All types are read from a table, and most of them from a query, too, for which the catalog has no types."""
    shop.execute("SET time_zone = '+00:00'")
    columns = ", ".join(f"{quote(name)} {kind}" for name, (kind, _, _) in zip(type_names(TYPES), TYPES, strict=True))
    shop.execute(f"CREATE TABLE t (id int PRIMARY KEY, {columns})")
    for number in range(depth(TYPES) + 1):
        row = [values[number][0] if number < len(values) else None for _, _, values in TYPES]
        shop.execute(f"INSERT INTO t VALUES ({', '.join(['%s'] * (len(row) + 1))})", number, *row)
    for source in (JdbcSource(CONN, "t", split_records=2), JdbcSource(CONN, query="SELECT * FROM t", key="id", split_records=2)):
        assert source.validate() == []
        check_types(spark.read(source, source.freeze(None).splits), TYPES)


def test_a_day_that_is_none_and_a_character_that_unicode_does_not_have_are_refused(shop: Shop, spark: JdbcSpark) -> None:
    day, text = "an invalid date, such as 0000-00-00", "a character of cp1250 that Unicode does not have"
    for kind, value, found in (
        ("date", "0000-00-00", day),
        ("datetime", "0000-00-00 00:00:00", day),
        ("date", "2026-02-00", day),
        ("varchar(9) CHARACTER SET cp1250", b"?\x81", text),
    ):
        shop.execute("DROP TABLE IF EXISTS t")
        shop.execute(f"CREATE TABLE t (id int PRIMARY KEY, `born \\'{{x}}` {kind})")
        shop.execute("INSERT INTO t VALUES (1, %s)", value)
        source = JdbcSource(CONN, "t")
        explained = source.explain(RuntimeError(spark.read(source, source.freeze(None).splits).error))
        assert explained is not None and f"column `born \\'{{x}}` holds {found}. Correct the row" in str(explained), value


def test_partition_i_is_split_i(shop: Shop, spark: JdbcSpark) -> None:
    shop.fill("a varchar(9) CHARACTER SET latin1, b int NOT NULL", [("äéA"[n % 3] if n % 7 else None, n % 5) for n in range(100)])
    source = JdbcSource(CONN, "t", key=("a", "b"), include_columns=["n"], split_records=9)
    frozen = through_json(source.freeze(None))
    answer = spark.read(source, frozen.splits)
    same([row for part in answer.parts for row in part], [{"n": n} for n in range(100)])  # type: ignore[arg-type]
    expected = [sorted(row[0] for row in part) for part in read(source, frozen.splits)]
    assert [sorted(row["n"] for row in part) for part in answer.parts] == expected
    patient = JdbcSource(CONN, query=f"SELECT 1 AS id, @@net_write_timeout AS seconds, {TIME_LIMIT} AS time_limit", key="id")
    shop.execute("SET GLOBAL sql_select_limit = 5")
    shop.execute(f"SET GLOBAL {TIME_LIMIT.removeprefix('@@')} = 100")
    try:
        ((row,),) = spark.read(patient, patient.freeze(None).splits).parts
        assert row == {"id": 1, "seconds": 600, "time_limit": 0}, "the server ends no session whose rows are taken slowly"
        assert [len(part) for part in read(source, frozen.splits)] == list(map(len, expected)), "a limit of rows would cut splits"
        assert [len(part) for part in spark.read(source, frozen.splits).parts] == list(map(len, expected))
    finally:
        shop.execute("SET GLOBAL sql_select_limit = DEFAULT")
        shop.execute(f"SET GLOBAL {TIME_LIMIT.removeprefix('@@')} = DEFAULT")
    assert server_password(shop) not in spark.traces + answer.plan + repr(source.find_database())


def test_tasks_wait_while_max_sessions_sessions_read(shop: Shop, spark: JdbcSpark) -> None:
    shop.fill("a int NOT NULL", [(n,) for n in range(40)])
    source = JdbcSource(CONN, "t", key="n", split_records=10, max_sessions=2)
    if is_mysql():
        assert "MySQL has no statement that waits" in source.validate()[0].what
        return
    assert source.validate() == []
    splits = source.freeze(None).splits
    with ThreadPoolExecutor(1) as pool:
        assert shop.rows(f"SELECT GET_LOCK('{LOCK_NAME}1', 0), GET_LOCK('{LOCK_NAME}2', 0)") == [(1, 1)]
        try:
            found = pool.submit(spark.read, source, splits)
            waiting = "SELECT count(*) FROM information_schema.processlist WHERE info LIKE 'DO SLEEP%'"
            assert eventually(lambda: shop.rows(waiting)[0][0] >= 1)
            assert not found.done()
            shop.execute(f"DO RELEASE_LOCK('{LOCK_NAME}2')")
            answer = found.result(120)
        finally:
            shop.execute("DO RELEASE_ALL_LOCKS()")
    assert not answer.error and sorted(row["n"] for part in answer.parts for row in part) == list(range(40))


def server_password(shop: Shop) -> str:
    return shop.server.password


def test_problems_of_mysql_are_reported(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.execute("CREATE TABLE bare (x int, p point, s varchar(3), UNIQUE (s))")
    shop.execute("CREATE TABLE `Case` (id int)")

    def validate(source: JdbcSource) -> dict[str, str]:
        return {problem.where: f"{problem.what}. {problem.action}" for problem in source.validate()}

    assert set(validate(JdbcSource(CONN, "bare"))) == {"source.key", "source column `p`"}
    assert "takes NULL" in validate(JdbcSource(CONN, "bare", cursor="x", include_columns=["x"]))["source.cursor"]
    assert "in no order" in validate(JdbcSource(CONN, "bare", key="p", include_columns=["x"]))["source.key"]
    assert "there is `Case`" in validate(JdbcSource(CONN, "case"))["source.table"]
    assert "syntax" in validate(JdbcSource(CONN, query="SELEC 1", key="x"))["source.query"]
    assert (
        "syntax" in validate(JdbcSource(CONN, query="SELECT 1 AS x) AS y; DROP TABLE bare; SELECT (1", key="x"))["source.query"]
    )
    monkeypatch.setenv("AIRFLOW_CONN_DOWN", "mysql://u:s3cr3t@127.0.0.1:1/db")
    down = validate(JdbcSource("down", "t"))["source.conn_id"]
    assert "127.0.0.1:1/db" in down and "s3cr3t" not in down
    with pytest.raises(SourceUnavailable):
        JdbcSource("down", "t").freeze(None)
    server = shop.server
    monkeypatch.setenv("AIRFLOW_CONN_WRONG", f"mysql://{server.user}:s3cr3t@{server.host}:{server.port}/shop")
    assert "Access denied" in validate(JdbcSource("wrong", "t"))["source.conn_id"]
    monkeypatch.setenv("AIRFLOW_CONN_ODD", f"{server.connection_uri()}?sll=1")
    assert "`sll`" in validate(JdbcSource("odd", "t"))["source.conn_id"]
    with pytest.raises(SourceRejected, match="there is no table"):
        JdbcSource(CONN, "t").freeze(None)


def test_missing_rights_of_mysql_are_reported(shop: Shop, spark: JdbcSpark, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.execute("CREATE TABLE t (id int PRIMARY KEY, secret int)")
    shop.execute("DROP USER IF EXISTS reader")
    shop.execute("CREATE USER reader IDENTIFIED BY 's3cr3t'")
    shop.execute("GRANT SELECT (id), INSERT ON shop.t TO reader")
    monkeypatch.setenv("AIRFLOW_CONN_READER", f"mysql://reader:s3cr3t@{shop.server.host}:{shop.server.port}/shop")
    (hidden,) = JdbcSource("reader", "t").validate()
    assert hidden.where == "source.table" and "role 'reader'@'%' may not read column `secret` of " in hidden.what
    assert JdbcSource("reader", "t", include_columns=["id"]).validate() == []
    # With rights on other columns alone, the catalog shows none but these: `*` stands for the others.
    shop.execute("REVOKE INSERT ON shop.t FROM reader")
    (unseen,) = JdbcSource("reader", "t").validate()
    assert unseen.what == hidden.what.replace("`secret`", "`*`")
    assert (source := JdbcSource("reader", "t", include_columns=["id"])).validate() == []
    # No other right is needed to read.
    shop.execute("INSERT INTO t VALUES (1, 2)")
    assert [list(map(dict, part)) for part in spark.read(source, source.freeze(None).splits).parts] == [[{"id": 1}]]
    # A window is read by one query, also where it is that of a view, if the user may see it.
    shop.execute("CREATE VIEW v AS SELECT id FROM t")
    shop.execute("GRANT SELECT ON shop.v TO reader")
    first = [JdbcSource(user, "v", key="id").find_origin() for user in (CONN, "reader")]
    shop.execute("CREATE OR REPLACE VIEW v AS SELECT -id AS id FROM t")
    then = [JdbcSource(user, "v", key="id").find_origin() for user in (CONN, "reader")]
    assert [[other.what for other in compare_endpoints(*origins)] for origins in zip(first, then, strict=True)] == [["view"], []]


def test_a_cursor_is_refused_on_a_replica_whose_clock_says_nothing_of_rows_that_it_has_not_got(shop: Shop) -> None:
    shop.execute("CREATE TABLE t (id int PRIMARY KEY, at timestamp(6) NOT NULL)")
    shop.execute("INSERT INTO t VALUES (1, now(6))")
    cursor = {"conn_id": CONN, "table": "t", "timestamp_column": "at"}
    assert JdbcSource(**cursor).validate() == []
    shop.execute("SET GLOBAL read_only = 1")
    try:
        assert [problem.where for problem in JdbcSource(**cursor).validate()] == ["source.writers_timeout"]
        with pytest.raises(SourceRejected, match=r"the server is a replica.*the lag of a replica together"):
            JdbcSource(**cursor).freeze(None)
        assert JdbcSource(**cursor, writers_timeout=0).freeze(None).rows == JdbcSource(CONN, "t").freeze(None).rows == 1
    finally:
        shop.execute("SET GLOBAL read_only = 0")


def test_a_file_of_certificates_that_cannot_be_read_is_named_with_its_option(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {"ssl_mode": "verify_ca", "ssl": {"ca": "/no/such.pem"}}
    connection = {"conn_type": "mysql", "host": "127.0.0.1", "login": "u", "password": "p", "schema": "shop", "extra": extra}
    monkeypatch.setenv("AIRFLOW_CONN_SECURE", json.dumps(connection))
    (problem, *_) = JdbcSource("secure", "orders").validate()
    assert problem.where == "source.conn_id" and not problem.retryable
    assert "`ca` of `ssl` in its extra is /no/such.pem, which cannot be read on " in problem.what


def test_uris() -> None:
    os.environ["AIRFLOW_CONN_URIS"] = "mysql://u:p@db.example/shop"
    try:
        assert JdbcSource("uris", "orders").uri == "mysql://db.example:3306/shop/orders"
        assert JdbcSource("uris", "other.orders").uri == "mysql://db.example:3306/other/orders"
        assert "mariadb" in JdbcSource("uris", "orders").packages[0]
    finally:
        del os.environ["AIRFLOW_CONN_URIS"]


def test_a_session_of_the_driver_that_is_killed_is_worth_another_try(shop: Shop) -> None:
    with (
        pytest.raises(SourceUnavailable) as caught,
        JdbcSource(CONN, "t").find_database().open_session("counting rows") as session,
    ):
        shop.execute(f"KILL {session.fetch_rows('SELECT CONNECTION_ID()')[0][0]}")
        session.fetch_rows("SELECT 1")
    assert caught.value.retryable and f"while counting rows: {SESSION_ENDED}. The task may simply be retried" in str(caught.value)


def test_a_limit_of_sessions_that_is_reached_is_worth_another_try(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    shop.execute("DROP USER IF EXISTS single")
    shop.execute("CREATE USER single IDENTIFIED BY 's3cr3t' WITH MAX_USER_CONNECTIONS 1")
    monkeypatch.setenv("AIRFLOW_CONN_SINGLE", f"mysql://single:s3cr3t@{shop.server.host}:{shop.server.port}/")
    database = JdbcSource("single", "t").find_database()
    with database.open_session("a"), pytest.raises(SourceUnavailable, match="max_user_connections"), database.open_session("b"):
        pass


def test_a_session_of_spark_that_is_killed_is_one_sentence_and_worth_another_try(shop: Shop, spark: JdbcSpark) -> None:
    shop.execute("CREATE TABLE t (id int PRIMARY KEY)")
    shop.execute("INSERT INTO t VALUES (0), (60)")
    source = JdbcSource(CONN, query="SELECT id, SLEEP(id) AS asleep FROM t", key="id")
    splits = through_json(source.freeze(None)).splits
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(spark.read, source, splits)
        # Its first row is read, and the second one takes a minute.
        running = "SELECT id FROM information_schema.processlist WHERE info LIKE '%SLEEP%' AND id <> CONNECTION_ID()"
        shop.execute(f"KILL {eventually(lambda: shop.rows(running), 120)[0][0]}")
        error = answer.result(120).error
    assert find_reason(RuntimeError(error)) == f"{SESSION_ENDED}, while Spark read a split", error


def test_changes_of_a_server_without_a_binary_log_are_refused(shop: Shop):
    shop.execute("CREATE TABLE t (id int PRIMARY KEY)")
    problems = MySqlCdcSource(CONN, "p", tables=["t", "absent"]).validate()
    assert "the server writes no binary log" in str(problems[0]) and "Set `log_bin`" in problems[0].action
    assert "there is no table shop.absent" in str(problems[-1])
