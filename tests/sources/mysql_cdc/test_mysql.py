"""Tests of features that only MySQL has. ``make mysql`` runs them, and the other tests of this directory, on MySQL."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from airflow_kafka_spark.errors import LogLost, SourceUnavailable
from airflow_kafka_spark.sources.mysql_cdc.tasks import snapshot
from tests.sources.mysql_cdc.kit import CONN, Binlog
from tests.sources.postgres_cdc.kit import Copy, Windows, changes, take_transactions
from tests.support.mariadb import is_mysql

pytestmark = pytest.mark.skipif(not is_mysql(), reason="MYSQLD names no server of MySQL")

DOCUMENTS = [
    "'null'", "'true'", "'[]'", "'{}'", "'\"\"'", "'32768'", "'-32769'", "'65536'", "'-2147483649'", "'4294967296'",
    "'18446744073709551615'", "'-9223372036854775808'", "'[1.0, -0.0, 1e15, 1e16, 123456789012345680, 1e-14, 1e-15, 1.5e300]'",
    "CAST(12345678901234567890.1234567890 AS JSON)", "CAST(CAST(-1.5 AS DECIMAL(3,1)) AS JSON)",
    "CAST(DATE'2026-01-02' AS JSON)", "CAST(TIME'-838:59:59' AS JSON)", "CAST(CAST('00:00:00.000001' AS TIME(6)) AS JSON)",
    "CAST(TIMESTAMP'1000-01-01 23:59:59.5' AS JSON)", "CAST(x'00ff' AS JSON)", "CAST(REPEAT(x'61', 100) AS JSON)",
    "CAST(b'101' AS JSON)",
    "CAST(ST_GeomFromText('POINT(1 2)') AS JSON)",
    "JSON_OBJECT('b', 1, 'aa', NULL, 'ü', 'q\\\"\\\\\\\\/\\n\\t\\b\\f\\r\\u0001')",
    "JSON_ARRAY(JSON_OBJECT('k', REPEAT('x', 70000)), 7, 70000, -70000, 5000000000, TRUE)",
    "JSON_OBJECT('list', JSON_ARRAY(1, JSON_ARRAY(2, JSON_OBJECT('deep', 3))))",
    "JSON_ARRAY(REPEAT('y', 200), REPEAT('z', 20000))",
]  # fmt: skip


def test_json_is_the_text_that_the_server_shows(shop: Binlog) -> None:
    shop.execute("CREATE TABLE t (id int PRIMARY KEY AUTO_INCREMENT, j json, f double)")
    windows, own = shop.windows(), random.Random(3)
    shop.execute(*(f"INSERT INTO t (j) VALUES ({document})" for document in DOCUMENTS))
    numbers = [own.choice((-1, 1)) * own.random() * 10.0 ** own.randint(-30, 30) for _ in range(300)]
    shop.execute(
        f"INSERT INTO t (j, f) SELECT CAST(v AS JSON), v FROM (VALUES {', '.join(f'ROW({n!r})' for n in numbers)}) AS s (v)"
    )
    shop.execute("UPDATE t SET j = JSON_SET(j, '$.b', 'c') WHERE id = 24")
    expected = dict(shop.rows("SELECT id, CAST(j AS CHAR CHARACTER SET utf8mb4) FROM t"))
    found = {record["key"]["id"]: record["value"]["after"]["j"] for record in windows.next()}
    assert found == expected
    read = shop.windows(snapshot="initial").drain()
    assert {record["key"]["id"]: record["value"]["after"]["j"] for record in read} == expected


def test_vectors_are_arrays_of_numbers_and_the_texts_beside_them_keep_their_character_set(shop: Binlog) -> None:
    shop.execute(
        "CREATE TABLE t (id int PRIMARY KEY, a text CHARACTER SET latin1, v vector(3), b text CHARACTER SET latin2, g geometry, "
        "c varchar(9) CHARACTER SET utf16)"
    )
    windows = shop.windows()
    shop.execute("INSERT INTO t VALUES (1, 'ä', TO_VECTOR('[1, -2.5, 0.1]'), 'ł', NULL, 'ü'), (2, NULL, NULL, NULL, NULL, NULL)")
    rows = [{"id": 1, "a": "ä", "v": [1.0, -2.5, 0.1], "b": "ł", "g": None, "c": "ü"}]
    rows += [{"id": 2, "a": None, "v": None, "b": None, "g": None, "c": None}]
    assert [after for _, _, after in changes(windows.next())] == rows
    assert [after for _, _, after in changes(shop.windows(snapshot="initial").drain())] == rows


def test_generated_and_invisible_columns_and_keys_are_captured(shop: Binlog) -> None:
    shop.execute("SET SESSION sql_generate_invisible_primary_key = ON", "CREATE TABLE t (n int, hidden int INVISIBLE DEFAULT 7)")
    shop.execute("SET GLOBAL show_gipk_in_create_table_and_information_schema = OFF")
    try:
        windows = shop.windows()
        shop.execute("INSERT INTO t VALUES (5)", "UPDATE t SET n = 6")
        found = windows.next()
        row = {"my_row_id": 1, "n": 6, "hidden": 7}
        assert changes(found)[1] == ("u", {**row, "n": 5}, row) and found[0]["key"] == {"my_row_id": 1}
        [read] = shop.windows(snapshot="initial", snapshot_chunk_rows=1).drain()
        assert (read["key"], read["value"]["after"]) == ({"my_row_id": 1}, row)
    finally:
        shop.execute("SET GLOBAL show_gipk_in_create_table_and_information_schema = ON")


def test_rows_that_foreign_keys_change_have_events_unless_innodb_changes_them(shop: Binlog) -> None:
    """MySQL logs such changes since 9.6."""
    shop.execute(
        "CREATE TABLE parent (id int PRIMARY KEY)",
        "CREATE TABLE child (id int PRIMARY KEY, p int, q int, "
        "FOREIGN KEY (p) REFERENCES parent (id) ON DELETE CASCADE ON UPDATE CASCADE, "
        "FOREIGN KEY (q) REFERENCES parent (id) ON DELETE SET NULL)",
        "INSERT INTO parent VALUES (1), (2), (3)",
        "INSERT INTO child VALUES (10, 1, 2), (11, 2, 3)",
    )
    if shop.rows("SHOW VARIABLES LIKE 'innodb_native_foreign_keys'") != (off := [("innodb_native_foreign_keys", "OFF")]):
        assert [problem.where for problem in shop.source().validate()] == ["source.tables"] * 2, off
        return
    windows, copy = shop.windows(), Copy()
    shop.execute("UPDATE parent SET id = 4 WHERE id = 1", "DELETE FROM parent WHERE id = 2", "DELETE FROM parent WHERE id = 4")
    copy.apply(windows.next())
    assert copy.tables == {"parent": {(3,): {"id": 3}}, "child": {}} and copy.count["d"] == 5


def test_compressed_transactions_give_the_same_events(orders: Binlog) -> None:
    windows, found = orders.windows(provide_transaction_metadata=True), list[list[Any]]()
    for setting in ("OFF", "ON"):
        orders.execute(f"SET SESSION binlog_transaction_compression = {setting}", "DELETE FROM orders")
        windows.next()
        orders.execute(
            "START TRANSACTION",
            "INSERT INTO orders SELECT seq, repeat(seq, 100) FROM seq_1_to_3000",
            "UPDATE orders SET id = -id WHERE id < 10",
            "COMMIT",
            "INSERT INTO orders VALUES (0, 'last')",
        )
        found.append(changes(take_transactions(windows.next())))
        assert (windows.position or {})["place"] == orders.end()
    assert found[0] == found[1] and len(found[1]) == 3000 + 9 * 3 + 1


def test_a_cut_within_compressed_transactions_is_clean(orders: Binlog) -> None:
    orders.execute("SET SESSION binlog_transaction_compression = ON")
    orders.execute(*(f"INSERT INTO orders SELECT seq, SHA2(RAND(), 256) FROM seq_{n}000_to_{n}999" for n in range(1, 9)))
    windows = orders.windows(max_binlog_bytes=1 << 16)
    sizes = []
    while records := windows.next():
        sizes.append(len(records))
    assert sum(sizes) == 8000 and len(sizes) > 3 and {size % 1000 for size in sizes} == {0}


def test_logins_by_passwords_of_sha2_need_no_other_option(shop: Binlog, monkeypatch: pytest.MonkeyPatch) -> None:
    """First with an empty cache of the server, which asks for the password itself, encrypted by its public key."""
    server = shop.server
    shop.execute(
        "DROP USER IF EXISTS sha", "CREATE USER sha IDENTIFIED WITH caching_sha2_password BY 'hush'", "GRANT ALL ON *.* TO sha"
    )
    shop.execute("FLUSH PRIVILEGES")
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONN.upper()}", f"mysql://sha:hush@{server.host}:{server.port}/shop")
    shop.execute("CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    assert len(shop.windows().next()) == 1


def test_another_server_of_the_same_number_is_refused_by_its_uuid(orders: Binlog) -> None:
    windows = orders.windows()
    windows.close(windows.freeze())
    other = Windows(windows.source)
    position = dict(windows.position or {})
    assert position["log"]["server_uuid"] == orders.rows("SELECT @@server_uuid")[0][0]
    other.position = {**position, "log": {**position["log"], "server_uuid": "00000000-0000-0000-0000-000000000000"}}
    with pytest.raises(Exception, match="its server_uuid is"):
        other.freeze()


def test_a_log_without_gtids_is_captured_and_continues_with_them(orders: Binlog) -> None:
    """It has to be read before the last step, after which the server no longer sends transactions without GTIDs."""
    modes = ("ON_PERMISSIVE", "OFF_PERMISSIVE", "OFF")
    orders.execute(*(f"SET GLOBAL gtid_mode = {mode}" for mode in modes), "SET GLOBAL enforce_gtid_consistency = OFF")
    orders.place = orders.end()
    windows, events = orders.windows(provide_transaction_metadata=True), list[Any]()
    try:
        orders.execute("INSERT INTO orders VALUES (1, 'a')", "START TRANSACTION", "INSERT INTO orders VALUES (2, 'b')")
        orders.execute("INSERT INTO orders VALUES (3, 'c')", "ROLLBACK", "INSERT INTO orders VALUES (4, 'd')")
        events += take_transactions(windows.next())
        orders.execute("SET GLOBAL gtid_mode = OFF_PERMISSIVE", "INSERT INTO orders VALUES (6, 'f')")
    finally:
        orders.execute("SET GLOBAL enforce_gtid_consistency = ON")
        orders.execute(*(f"SET GLOBAL gtid_mode = {mode}" for mode in ("OFF_PERMISSIVE", "ON_PERMISSIVE", "ON")))
    unread = windows.position
    with pytest.raises(LogLost, match="Cannot replicate anonymous transaction when @@GLOBAL.GTID_MODE = ON"):
        windows.next()
    orders.execute("SET GLOBAL gtid_mode = ON_PERMISSIVE")
    try:
        events += take_transactions(windows.next())
    finally:
        orders.execute("SET GLOBAL gtid_mode = ON")
    assert windows.position != unread
    orders.execute("INSERT INTO orders VALUES (5, 'e')")
    events = [record["value"] for record in (*events, *take_transactions(windows.next()))]
    assert [event["after"]["id"] for event in events] == [1, 4, 6, 5]
    assert [bool(event["source"]["gtid"]) for event in events] == [False, False, False, True]
    assert events[0]["transaction"]["id"].startswith("file=bin.")


def test_a_chunk_waits_for_transactions_that_have_changed_its_table_and_names_the_table(
    orders: Binlog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "OPEN_SECONDS", 0)
    orders.execute("INSERT INTO orders VALUES (1, 'one')")
    windows = orders.windows(snapshot="initial")
    window = windows.freeze()
    with orders.server.connect(autocommit=False) as other, other.cursor() as cursor:
        cursor.execute("UPDATE orders SET note = 'two'")
        with pytest.raises(SourceUnavailable, match=r"snapshot of shop.orders: a transaction that has changed it does not end"):
            windows.read(window)
        other.commit()
    assert [json.dumps(change) for change in changes(windows.drain())] == ['["r", null, {"id": 1, "note": "two"}]']


def test_the_right_to_lock_tables_is_named_if_it_is_missing(orders: Binlog, monkeypatch: pytest.MonkeyPatch) -> None:
    server = orders.server
    orders.execute("CREATE OR REPLACE USER reader IDENTIFIED BY 'hush'")
    orders.execute("GRANT REPLICATION SLAVE, REPLICATION CLIENT ON *.* TO reader", "GRANT SELECT ON shop.* TO reader")
    monkeypatch.setenv(f"AIRFLOW_CONN_{CONN.upper()}", f"mysql://reader:hush@{server.host}:{server.port}")
    source = orders.source(tables=["shop.orders"], snapshot="initial")
    [problem] = source.validate()
    assert problem.where == "source.snapshot" and problem.action == "GRANT SELECT, LOCK TABLES ON `shop`.* TO 'reader'@'%'"
    orders.execute("GRANT LOCK TABLES ON shop.* TO reader")
    assert source.validate() == []
