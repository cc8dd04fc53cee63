"""Windows of the binary log: their events and the order of these, equal at every attempt; refused tables and logs."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql import Row

from airflow_kafka_spark.errors import LogLost, SourceRejected, SourceUnavailable
from airflow_kafka_spark.sources.mysql_cdc.tasks import session
from airflow_kafka_spark.sources.mysql_cdc.tasks.session import LogCoordinates, LogServer, advance, compute_distance
from tests.sources.contract import RowSourceCase, WindowsContract
from tests.sources.mysql_cdc.kit import Binlog
from tests.sources.postgres_cdc.kit import Windows, changes
from tests.support.mariadb import is_mysql
from tests.support.waiting import eventually


def test_every_change_is_an_event_in_the_order_of_the_log_and_every_attempt_reads_the_same(orders: Binlog):
    windows = orders.windows()
    orders.execute(
        "INSERT INTO orders VALUES (1, 'one'), (2, NULL)",
        "UPDATE orders SET note = 'zwei' WHERE id = 2",
        "UPDATE orders SET id = 3 WHERE id = 2",
        "DELETE FROM orders WHERE id = 1",
    )
    window = windows.freeze()
    first, again = windows.read(window), windows.read(window)
    one, two = {"id": 1, "note": "one"}, {"id": 2, "note": None}
    assert changes(first) == [
        ("c", None, one),
        ("c", None, two),
        ("u", two, {"id": 2, "note": "zwei"}),
        ("d", {"id": 2, "note": "zwei"}, None),
        ("tombstone", {"id": 2}),
        ("c", None, {"id": 3, "note": "zwei"}),
        ("d", one, None),
        ("tombstone", {"id": 1}),
    ]
    assert changes(again) == changes(first)
    assert {record["topic"] for record in first} == {"p.shop.orders"}
    source = first[0]["value"]["source"]
    assert (source["connector"], source["db"], source["table"], source["server_id"]) == (shop_connector(), "shop", "orders", 7)
    gtid = orders.rows("SELECT @@server_uuid")[0][0] + ":" if is_mysql() else "0-7-"
    assert source["ts_ms"] == first[0]["timestamp"] and source["gtid"].startswith(gtid)
    assert LogCoordinates(source["file"], source["pos"]).order > LogCoordinates.parse(window.splits[0]["start"]).order
    windows.close(window)
    assert windows.next() == []
    assert (windows.position or {})["gtid"] == first[-2]["value"]["source"]["gtid"]
    other, reset = ("gtid_domain_id = 3", "gtid_domain_id = 0")
    if is_mysql():  # a tag
        other, reset = ("gtid_next = 'AUTOMATIC:of_test'", "gtid_next = 'AUTOMATIC'")
    orders.execute(f"SET SESSION {other}", "INSERT INTO orders VALUES (4, 'four')", f"SET SESSION {reset}")
    [fourth] = windows.next()
    expected = f"{gtid}of_test:1" if is_mysql() else "3-7-1"
    assert fourth["value"]["source"]["gtid"] == (windows.position or {})["gtid"] == expected
    if is_mysql():  # the longest form of a number
        orders.execute(f"SET SESSION gtid_next = '{gtid}of_test:{1 << 62}'", "DELETE FROM orders", f"SET SESSION {reset}")
        assert windows.next()[0]["value"]["source"]["gtid"] == f"{gtid}of_test:{1 << 62}"


def shop_connector() -> str:
    return "mysql" if is_mysql() else "mariadb"


class BinlogCase(RowSourceCase):
    """A table whose rows are inserted in transactions of 20."""

    def __init__(self, orders: Binlog) -> None:
        self.orders = orders
        self.source, self.limited = orders.source(), orders.source(max_binlog_bytes=1 << 16)
        self.next = 0

    def add(self, rows: int) -> list[Any]:
        first, self.next = self.next, self.next + rows
        for at in range(first, self.next, 20):
            numbers = f"seq_{at}_to_{min(at + 20, self.next) - 1}"
            self.orders.execute(f"INSERT INTO orders SELECT seq, repeat('x', 600) FROM {numbers}")
        return list(range(first, self.next))

    def identity(self, row: Row) -> Any:
        event = json.loads(row["value"])
        assert event["op"] == "c" and json.loads(row["key"]) == {"id": event["after"]["id"]}
        return event["after"]["id"]


class TestMySqlCdcSource(WindowsContract):
    @pytest.fixture
    def case(self, orders):
        return BinlogCase(orders)


def keys(records: list[dict[str, Any]]) -> list[int]:
    return [record["key"]["id"] for record in records]


def test_a_transaction_that_is_open_at_the_end_of_a_window_comes_later_and_complete(orders: Binlog):
    windows = orders.windows()
    with orders.server.connect(autocommit=False) as other, other.cursor() as cursor:
        cursor.execute("INSERT INTO orders VALUES (1, 'begun before')")
        orders.execute("INSERT INTO orders VALUES (2, 'committed')")
        assert keys(windows.next()) == [2]
        cursor.execute("INSERT INTO orders VALUES (4, 'after')")
        orders.execute("INSERT INTO orders VALUES (3, 'committed')")
        assert keys(windows.next()) == [3]
        other.commit()
        cursor.execute("INSERT INTO orders VALUES (5, 'rolled back')")
        other.rollback()
    assert keys(windows.next()) == [1, 4]


def test_the_first_window_waits_for_transactions_whose_changes_the_log_has_already(orders: Binlog, monkeypatch):
    """Behind the place at which windows begin, the log has only the COMMIT of a transaction that was prepared before (XA)."""
    with orders.server.connect() as other, other.cursor() as cursor:
        for statement in ("XA START 'x'", "INSERT INTO orders VALUES (1, 'prepared')", "XA END 'x'", "XA PREPARE 'x'"):
            cursor.execute(statement)
    latest = Windows(orders.source(snapshot="initial"))
    with ThreadPoolExecutor(1) as pool:
        try:
            with monkeypatch.context() as patched:
                patched.setattr("airflow_kafka_spark.sources.mysql_cdc.windows.PREPARED_SECONDS", 0.1)
                with pytest.raises(SourceUnavailable, match="the transaction `x` is prepared"):
                    latest.freeze()
            waiting = pool.submit(latest.freeze)
        finally:
            orders.execute("XA COMMIT 'x'")
        window = waiting.result()
    orders.execute("INSERT INTO orders VALUES (2, 'behind')")
    assert keys(latest.read(window)) == [1, 2]


def test_every_byte_of_the_log_is_a_clean_cut_across_files(orders: Binlog):
    """At each end of a window, a transaction is wholly in this window or in the next one, which begins where the marker says."""
    for id in range(4):
        orders.execute(f"INSERT INTO orders VALUES ({10 * id}, 'a'), ({10 * id + 1}, 'b')")
        if id == 1:
            orders.execute("FLUSH BINARY LOGS", *(["SET SESSION binlog_transaction_compression = ON"] if is_mysql() else []))
    windows = orders.windows()
    window = windows.freeze()
    whole = keys(windows.read(window))
    assert len(whole) == 8
    (bounds,) = window.splits
    files = orders.server_log().list_files(orders.connection)
    start, end = LogCoordinates.parse(bounds["start"]), LogCoordinates.parse(bounds["end"])
    size, seen = compute_distance(files, start, end), set()
    for part in range(1, 40):
        cut = advance(files, start, size * part // 40, end)
        before = replace(window, splits=({**bounds, "end": str(cut)},))
        first = keys(windows.read(before))
        behind = replace(window, splits=({**bounds, "start": windows.tokens[0]["end"]},))
        created = windows.tokens[0]["created"]
        behind.splits[0]["log"] = {**bounds["log"], "created": created, "head": [session.FIRST, 0]}
        assert first + (keys(windows.read(behind)) if len(first) < 8 else []) == whole
        assert len(first) % 2 == 0
        seen.add(len(first))
    assert len(seen) > 3


def test_a_window_that_ends_within_a_transaction_has_all_of_it_and_the_next_one_continues_behind_it(orders: Binlog):
    orders.execute("INSERT INTO orders SELECT seq, repeat('x', 1000) FROM seq_1_to_3000", "INSERT INTO orders VALUES (0, 'last')")
    for with_marker in (True, False):
        windows = orders.windows(max_binlog_bytes=3 << 19)
        window = windows.freeze()
        assert window.remaining and window.position["bytes_behind"] > 0
        assert len(windows.read(window)) == 3000
        if not with_marker:  # as Spark has read it
            windows.tokens.clear()
        windows.close(window)
        rest = windows.freeze()
        assert not rest.remaining and rest.position["bytes_behind"] == 0
        assert keys(windows.read(rest)) == [0]


def test_a_transaction_larger_than_what_is_held_is_handed_on_in_small_batches_also_to_a_slow_reader(orders: Binlog):
    windows, sizes = orders.windows(), list[int]()
    orders.execute("INSERT INTO orders SELECT seq, repeat('x', 20000) FROM seq_1_to_2000")
    window = windows.freeze()
    reader = windows.source.make_reader(window.splits, None)
    assert not isinstance(reader, str)
    orders.execute("SET GLOBAL net_write_timeout = 1")
    try:
        for batch in reader.read(0):
            if not sizes:
                time.sleep(3)  # the slow reader: longer than the server's own limit
            sizes.append(batch.num_rows)
    finally:
        orders.execute("SET GLOBAL net_write_timeout = DEFAULT")
    assert sum(sizes) == 2000 and max(sizes) < 300


# --- tables -------------------------------------------------------------------------------------------------------------


def test_changes_of_the_table_between_windows_and_within_one_show_in_the_rows_from_then_on(orders: Binlog):
    windows = orders.windows()
    orders.execute(
        "INSERT INTO orders VALUES (1, 'one')",
        "ALTER TABLE orders ADD COLUMN amount decimal(8,2) FIRST",
        "INSERT INTO orders VALUES (3.5, 2, 'two')",
        "ALTER TABLE orders DROP COLUMN note, CHANGE amount price varchar(10) CHARACTER SET latin1",
        "INSERT INTO orders VALUES ('ä', 3)",
        "DROP TABLE orders",
        "CREATE TABLE orders (id bigint unsigned, sort int, PRIMARY KEY (sort, id))",
        "INSERT INTO orders VALUES (4, 5)",
    )
    found = windows.next()
    assert [after for _, _, after in changes(found)] == [
        {"id": 1, "note": "one"}, {"amount": "AV4=", "id": 2, "note": "two"}, {"price": "ä", "id": 3}, {"id": 4, "sort": 5}
    ]  # fmt: skip
    assert found[-1]["key"] == {"sort": 5, "id": 4}


def test_truncates_are_left_out_as_by_debezium_or_events_of_their_own(orders: Binlog):
    quiet, loud = orders.windows(), orders.windows(skipped_operations=())
    orders.execute("INSERT INTO orders VALUES (1, 'one')", "TRUNCATE TABLE `shop`.`orders`", "TRUNCATE orders")
    orders.execute("SET STATEMENT max_statement_time = 9 FOR TRUNCATE orders")
    assert [change[0] for change in changes(quiet.next())] == ["c"]
    found = loud.next()
    assert [change for change in changes(found)][1:] == [("t", None, None)] * 3
    assert found[1]["key"] is None and found[1]["topic"] == "p.shop.orders"
    orders.execute("TRUNCATE orders")
    assert quiet.freeze().splits == () and loud.freeze().splits != ()


def test_tables_that_are_not_named_and_other_databases_are_left_out_and_a_window_without_changes_needs_no_spark(orders: Binlog):
    orders.execute("CREATE TABLE other (id int PRIMARY KEY)", "CREATE OR REPLACE DATABASE elsewhere")
    number = "1"
    if not is_mysql():
        orders.execute("CREATE SEQUENCE numbers")
        number = "NEXTVAL(numbers)"
    orders.execute("CREATE TABLE elsewhere.orders (id int PRIMARY KEY)")
    named, every = orders.windows(tables=["orders"]), orders.windows()
    orders.execute(f"INSERT INTO other VALUES ({number})", "INSERT INTO elsewhere.orders VALUES (2)")
    assert named.freeze().splits == ()
    assert [record["topic"] for record in every.next()] == ["p.shop.other"]
    position = named.freeze().position
    assert position["place"] == orders.end() and position["bytes_behind"] == 0
    # MariaDB keeps such a key in a column that users do not see, and that the log has. MySQL has none.
    orders.execute(f"ALTER TABLE orders ADD UNIQUE (note{'(9)' if is_mysql() else ''})", "INSERT INTO orders VALUES (3, '')")
    [record] = named.next()
    assert record["value"]["after"] == {"id": 3, "note": ""}


def test_message_key_columns_are_the_key_of_a_table_without_one(shop: Binlog):
    shop.execute("CREATE TABLE b (x int, y int)")
    [problem] = shop.source().validate()
    assert "has no primary key" in problem.what
    shop.execute("INSERT INTO b VALUES (5, 6)", "UPDATE b SET x = 7", "UPDATE b SET y = 8")
    with pytest.raises(SourceRejected, match="no primary key"):
        windows = Windows(shop.source())
        windows.next()
    found = shop.windows(message_key_columns={"shop.b": ["y"]}, tombstones_on_delete=False).next()
    assert [record["key"] for record in found] == [{"y": 6}, {"y": 6}, {"y": 6}, {"y": 8}]
    assert [change[0] for change in changes(found)] == ["c", "u", "d", "c"]
    shop.execute("UPDATE b SET y = NULL", "INSERT INTO b VALUES (1, NULL)", "DELETE FROM b WHERE x = 7")
    found = shop.windows(message_key_columns={"shop.b": ["y"]}, tombstones_on_delete=False).next()[4:]
    assert [(record["value"]["op"], record["key"]["y"]) for record in found] == [("d", 8), ("c", None), ("c", None), ("d", None)]
    [first, *_] = shop.windows(message_key_columns={"shop.b": ["y"]}, schemas_enable=True).next()
    assert first["key"]["schema"]["fields"] == [{"type": "int32", "optional": True, "field": "y"}]


def test_rows_of_other_engines_of_created_tables_and_of_files_are_captured_once(shop: Binlog):
    """Tables without transactions keep what a transaction wrote that was rolled back."""
    shop.execute("CREATE TABLE a (id int PRIMARY KEY) ENGINE=Aria")
    windows = shop.windows()
    shop.execute(
        "START TRANSACTION",
        "INSERT INTO a VALUES (1), (2)",
        "ROLLBACK",
        "CREATE TABLE b (PRIMARY KEY (id)) SELECT id + 10 AS id FROM a",
        "CREATE OR REPLACE TABLE b (PRIMARY KEY (id)) ENGINE=InnoDB SELECT id + 20 AS id FROM a",
        "CREATE TEMPORARY TABLE c (id int PRIMARY KEY)",
        "INSERT INTO c VALUES (99)",
        "INSERT INTO a SELECT id + 30 FROM b",
        "START TRANSACTION",
        "SAVEPOINT s",
        "INSERT INTO b VALUES (70)",
        "ROLLBACK TO s",
        "INSERT INTO b VALUES (71)",
        "COMMIT",
        "XA START 'x'",
        "INSERT INTO b VALUES (72)",
        "XA END 'x'",
        "XA COMMIT 'x' ONE PHASE",
    )
    assert keys(windows.next()) == [1, 2, 11, 12, 21, 22, 51, 52, 71, 72]


def test_changes_behind_a_savepoint_that_were_rolled_back_are_left_out_also_if_the_log_has_them(shop: Binlog, monkeypatch):
    """The log has them if the transaction also changes a table of an engine without transactions."""
    if is_mysql():
        pytest.skip("MySQL with GTIDs refuses such transactions")
    shop.execute("CREATE TABLE a (id int PRIMARY KEY) ENGINE=MyISAM", "CREATE TABLE b (id int PRIMARY KEY)")
    windows = shop.windows(provide_transaction_metadata=True)
    shop.execute(
        "START TRANSACTION",
        "INSERT INTO b VALUES (1)",
        "SAVEPOINT `s`",
        "INSERT INTO b VALUES (2)",
        "INSERT INTO a VALUES (3)",
        "SAVEPOINT t",
        "UPDATE b SET id = id + 10",
        "ROLLBACK TO s",
        "INSERT INTO b VALUES (4)",
        "COMMIT",
    )
    window = windows.freeze()
    found = [record for record in windows.read(window) if not record["topic"].endswith(".transaction")]
    ends = [record["value"] for record in windows.read(window) if record["value"].get("status") == "END"]
    assert [(change[0], record["key"]["id"]) for change, record in zip(changes(found), found, strict=True)] == [
        ("c", 3), ("c", 1), ("c", 4)
    ]  # fmt: skip
    assert [end["event_count"] for end in ends] == [1, 2]
    # What is published already cannot be left out.
    monkeypatch.setattr("airflow_kafka_spark.sources.mysql_cdc.tasks.events.HELD_BYTES", 10)
    with pytest.raises(SourceRejected, match="was rolled back, and is published already"):
        windows.read(window)


def test_a_place_beyond_the_servers_positions_continues_in_the_next_file(orders: Binlog):
    from airflow_kafka_spark.sources.mysql_cdc.windows import MySqlLogWindowPlanner

    made, end = MySqlLogWindowPlanner(orders.source(), orders.server_log()), (5 << 30) + 40
    files = [LogCoordinates("bin.000001", end), LogCoordinates("bin.000002", 500)]
    assert made._make_readable(files, LogCoordinates("bin.000001", 5 << 30)) == LogCoordinates("bin.000002", 4)
    assert made._make_readable(files, LogCoordinates("bin.000001", 7)) == LogCoordinates("bin.000001", 7)
    with pytest.raises(SourceRejected, match="beyond 4 GiB"):
        made._make_readable(files, LogCoordinates("bin.000001", (5 << 30) - 9000))


# --- what cannot be captured ---------------------------------------------------------------------------------------------


CASCADING = "FOREIGN KEY (id) REFERENCES parent (id) ON DELETE CASCADE"


@pytest.mark.parametrize(
    ("statements", "found"),
    [
        (["SET SESSION binlog_format = STATEMENT", "INSERT INTO orders VALUES (1, 'x')"], "changes as statements"),
        (
            ["SET SESSION binlog_format = STATEMENT", "SET STATEMENT sort_buffer_size = 9999 FOR INSERT orders VALUES (1, '')"],
            "changes as statements",
        ),
        (
            [
                "CREATE FUNCTION add_one() RETURNS int DETERMINISTIC BEGIN INSERT INTO orders VALUES (1, 'x'); RETURN 1; END",
                "SET SESSION binlog_format = STATEMENT",
                "SELECT add_one()",
            ],
            "changes as statements",
        ),
        (["SET SESSION binlog_row_image = MINIMAL", "INSERT INTO orders (id) VALUES (1)", "DELETE FROM orders"], "all columns"),
        (["XA START 'a'", "INSERT INTO orders VALUES (1, 'x')", "XA END 'a'", "XA PREPARE 'a'", "XA COMMIT 'a'"], "XA"),
        *(
            [
                (
                    [
                        "ALTER TABLE orders ADD COLUMN j json",
                        """INSERT INTO orders VALUES (1, 'x', '{"a": "long enough to be left out", "b": 1}')""",
                        "SET SESSION binlog_row_value_options = PARTIAL_JSON",
                        "UPDATE orders SET j = JSON_SET(j, '$.b', 2)",
                    ],
                    "partial updates of JSON",
                ),
            ]
            if is_mysql()
            else [
                (["ALTER TABLE orders ADD u uuid", "INSERT INTO orders VALUES (1, 'x', uuid())"], "`u` cannot be read.*uuid"),
                (["ALTER TABLE orders MODIFY note text COMPRESSED", "INSERT INTO orders VALUES (1, 'x')"], "`note`.*COMPRESSED"),
                (["SET GLOBAL log_bin_compress = ON", "INSERT INTO orders VALUES (1, repeat('x', 5000))"], "log_bin_compress"),
                (
                    [
                        "ALTER TABLE shop.`orders` ADD SYSTEM VERSIONING",
                        "INSERT INTO orders VALUES (1, 'x')",
                        "DELETE FROM orders",
                        "ALTER TABLE orders DROP SYSTEM VERSIONING",
                    ],
                    "shop.orders gets system versioning",
                ),
                (
                    [
                        "CREATE TABLE parent (id int PRIMARY KEY)",
                        f"/* a */ ALTER TABLE orders ADD CONSTRAINT c {CASCADING}",
                        "ALTER TABLE orders DROP CONSTRAINT c",
                    ],
                    "shop.orders gets a foreign key.*`ignore_cascades=True`",
                ),
            ]
        ),
        (["SET GLOBAL binlog_row_metadata = MINIMAL", "INSERT INTO orders VALUES (1, 'x')"], "binlog_row_metadata"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_the_log_does_not_hold_as_rows_is_refused_and_nothing_wrong_is_published(orders: Binlog, statements, found):
    windows = orders.windows()
    try:
        orders.execute(*statements)
        window = windows.freeze()
        with pytest.raises(SourceRejected, match=f"(?s){found}"):
            windows.read(window)
    finally:
        orders.execute("SET GLOBAL binlog_row_metadata = FULL", *([] if is_mysql() else ["SET GLOBAL log_bin_compress = OFF"]))


def test_statements_on_other_tables_and_rows_of_them_that_cannot_be_read_are_left_out(orders: Binlog):
    orders.execute("CREATE TABLE orders_2025 (id int PRIMARY KEY, j json)", "SET SESSION binlog_format = STATEMENT")
    windows = orders.windows(tables=["orders"], ignore_cascades=True)
    orders.execute("INSERT INTO orders_2025 VALUES (1, NULL)", "SET SESSION binlog_format = ROW")
    orders.execute("CREATE TABLE parent (id int PRIMARY KEY)", f"ALTER TABLE orders ADD CONSTRAINT c {CASCADING}")
    orders.execute("ALTER TABLE orders DROP CONSTRAINT c")
    if not is_mysql():
        orders.execute("CREATE TABLE orders_2024 (id int PRIMARY KEY) WITH SYSTEM VERSIONING", "DROP TABLE orders_2024")
    rows = "INSERT INTO orders_2025 SELECT seq, JSON_OBJECT('a', repeat('x', 999), 'b', 1) FROM seq_2_to_9"
    compressed = ("SET GLOBAL log_bin_compress = ON", rows, "SET GLOBAL log_bin_compress = OFF")
    of_mysql = (rows, "SET SESSION binlog_row_value_options = PARTIAL_JSON", "UPDATE orders_2025 SET j = JSON_SET(j, '$.b', 2)")
    orders.execute(*(of_mysql if is_mysql() else compressed), "INSERT INTO orders VALUES (2, '')")
    assert keys(windows.next()) == [2]


def test_a_transaction_that_the_server_has_not_finished_is_left_out():
    """The server crashed while it wrote it: the log goes on with the beginning of the next file."""
    from airflow_kafka_spark.sources.mysql_cdc.tasks.binlog import FORMAT, GTID_MARIADB, LogEvent, Transactions

    found = Transactions()
    begin = LogEvent(GTID_MARIADB, 0, 7, 100, bytes(13))
    assert [found.enter(begin), found.is_open] == ["begin", True]
    assert [found.enter(LogEvent(FORMAT, 0, 7, 0, b"\1")), found.is_open] == ["", True], "sent by the server as a preface"
    assert [found.enter(LogEvent(FORMAT, 0, 7, 200, b"\1")), found.is_open] == ["abandon", False]


# --- the server ---------------------------------------------------------------------------------------------------------


def test_another_server_and_a_log_that_was_purged_reset_or_lost_its_end_are_refused(orders: Binlog):
    windows = orders.windows()
    windows.close(windows.freeze())
    position = dict(windows.position or {})
    place = LogCoordinates.parse(position["place"])
    for changed, error, found in (
        ({"log": {**position["log"], "server_id": 8}}, SourceRejected, "its server_id is `7`"),
        ({"log": {**position["log"], "created": 1}}, LogLost, "was begun at another time"),
        ({"place": f"{place.file}:{10**12}"}, LogLost, "lost the end of its log"),
        ({"snapshot": {"behind": f"{place.file}:{10**12}", "tables": []}}, LogLost, "before .*, where rows were read"),
    ):
        other = Windows(windows.source)
        other.position = {**position, **changed}
        with pytest.raises(error, match=found):
            other.freeze()
    orders.execute("INSERT INTO orders VALUES (1, 'one')")
    window = windows.freeze()
    orders.execute("FLUSH BINARY LOGS")
    last = LogCoordinates.parse(orders.end()).file

    def is_purged() -> bool:
        """A file is kept until the server knows that its reader is gone, and that no crash needs it."""
        orders.execute(f"PURGE BINARY LOGS TO '{last}'")
        return orders.server_log().list_files(orders.connection)[0].file == last

    eventually(is_purged)
    with pytest.raises(LogLost, match="no longer has the log at"):
        windows.freeze()
    with pytest.raises(LogLost, match="does not send its log"):
        windows.read(window)
    # The log is reset before a window, or while it is read; the new file has the name of the old one if that was the first.
    for again in range(2):
        windows = Windows(replace(orders.source(), starting_position=orders.end()))
        windows.close(windows.freeze())
        orders.execute(f"INSERT INTO orders VALUES ({10 + again}, 'lost')")
        window = windows.freeze()
        orders.execute("RESET MASTER", f"INSERT INTO orders VALUES ({20 + again}, 'one')")
        for refused in (windows.freeze, lambda windows=windows, window=window: windows.read(window)):
            with pytest.raises(LogLost):
                refused()


def test_a_driver_without_the_parts_that_read_the_log_is_refused_by_name(orders: Binlog, monkeypatch):
    monkeypatch.setattr(session, "DRIVER_PARTS", (*session.DRIVER_PARTS, "_read_events"))
    (problem, _) = map(str, orders.source().validate())
    assert "have no `_read_events`" in problem and "`pymysql>=1.1,<2`" in problem


def test_a_window_is_read_to_its_end_also_if_the_server_sends_it_a_moment_later(orders: Binlog, monkeypatch):
    """This happens between the write of a transaction and its sync. The reader does not wait for ever."""
    windows = orders.windows()
    orders.execute("INSERT INTO orders VALUES (1, 'one')")
    end = LogCoordinates.parse(orders.end())
    bounds = {**windows.freeze().splits[0], "end": str(LogCoordinates(end.file, end.position + 1))}
    reader = windows.source.make_reader([bounds], None)
    assert not isinstance(reader, str)
    monkeypatch.setattr(session, "SENT_SECONDS", 0.2)
    with pytest.raises(SourceUnavailable, match=f"sent its log up to {end} only"):
        list(reader.read(0))
    monkeypatch.setattr(session, "SENT_SECONDS", 30)
    original = LogServer.read_events

    def events(server: Any, connection: Any, start: LogCoordinates) -> Any:
        yield from original(server, connection, start)
        if start != end:
            orders.execute("INSERT INTO orders VALUES (2, 'two')")

    monkeypatch.setattr(LogServer, "read_events", events)
    found = [json.loads(key)["id"] for batch in reader.read(0) for key in batch.column("key").to_pylist()]
    assert found == [1, 2]


def test_bytes_behind_are_those_of_the_log_behind_the_window(orders: Binlog):
    windows = orders.windows(max_binlog_bytes=1 << 16)
    for _ in range(20):
        orders.execute("INSERT INTO orders SELECT NULL, '' WHERE false", "DELETE FROM orders")
        orders.execute("INSERT INTO orders SELECT seq, repeat('x', 1000) FROM seq_1_to_20")
    behind = []
    while True:
        window = windows.freeze()
        windows.read(window)
        windows.close(window)
        behind.append(windows.position["bytes_behind"])
        if not behind[-1]:
            break
    assert behind == sorted(behind, reverse=True) and len(behind) > 4 and windows.position["place"] == orders.end()
