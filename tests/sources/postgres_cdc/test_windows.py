"""Windows of the log: their events and the order of these, equal at every attempt; the slot; refused tables and logs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from pyspark.sql import Row

from airflow_kafka_spark.errors import LogLost, SourceRejected, SourceUnavailable
from airflow_kafka_spark.hooks.databases import SESSION_ENDED
from airflow_kafka_spark.sources.postgres_cdc.tasks.session import SlotServer, format_lsn, make_session_name, parse_lsn
from tests.sources.contract import RowSourceCase, WindowsContract
from tests.sources.postgres_cdc.kit import Windows, changes, drop_slot, log_of
from tests.support.waiting import eventually


class CdcCase(RowSourceCase):
    """A table whose rows are inserted in transactions of 20."""

    def __init__(self, log: Any) -> None:
        self.log = log
        self.source, self.limited = log.source(), log.source(max_wal_bytes=1 << 16)
        self.source.freeze(None)  # from here on the slot keeps the log
        self.next = 0

    def add(self, rows: int) -> list[Any]:
        first, self.next = self.next, self.next + rows
        for at in range(first, self.next, 20):
            last = min(at + 20, self.next) - 1
            self.log.place.execute(f"INSERT INTO orders SELECT n, repeat('x', 300) FROM generate_series({at}, {last}) n")
        return list(range(first, self.next))

    def identity(self, row: Row) -> Any:
        event = json.loads(row["value"])
        assert event["op"] == "c" and json.loads(row["key"]) == {"id": event["after"]["id"]}
        return event["after"]["id"]


class TestPostgresCdcSource(WindowsContract):
    @pytest.fixture
    def case(self, orders):
        return CdcCase(orders)


def row(id: int, note: str | None) -> dict[str, Any]:
    return {"id": id, "note": note}


def topic_part(name: str) -> str:
    """Return a name as it is written in a topic's name, where not all characters are allowed."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in name)


def started(log: Any, **options: Any) -> Windows:
    """Return windows that begin here."""
    made = Windows(log.source(**options))
    assert made.source.validate() == []
    assert made.next() == []
    return made


def test_every_change_is_an_event_in_the_order_of_the_log_and_every_attempt_reads_the_same(orders):
    windows, place = started(orders), orders.place
    place.execute("INSERT INTO orders VALUES (1, 'one'), (2, NULL)")
    place.execute("UPDATE orders SET note = 'zwei' WHERE id = 2")
    place.execute("UPDATE orders SET id = 3 WHERE id = 2")
    place.execute("DELETE FROM orders WHERE id = 1")
    window = windows.freeze()
    first, again = windows.read(window), windows.read(window)
    assert changes(first) == [
        ("c", None, row(1, "one")),
        ("c", None, row(2, None)),
        ("u", None, row(2, "zwei")),
        ("d", row(2, None), None),
        ("tombstone", {"id": 2}),
        ("c", None, row(3, "zwei")),
        ("d", row(1, None), None),
        ("tombstone", {"id": 1}),
    ]
    assert changes(again) == changes(first)
    assert [r["key"]["id"] for r in first] == [1, 2, 2, 2, 2, 3, 1, 1]
    assert {r["topic"] for r in first} == {f"shop.{topic_part(place.schema)}.orders"}
    source = first[0]["value"]["source"]
    assert (source["connector"], source["schema"], source["table"]) == ("postgresql", place.schema, "orders")
    assert source["ts_ms"] == first[0]["timestamp"] and source["lsn"] > 0 and source["txId"] > 0
    windows.close(window)
    assert windows.next() == []


def test_a_transaction_that_is_open_at_the_end_of_a_window_comes_later_and_complete(orders):
    windows, place = started(orders), orders.place
    with place.server.connect() as other:
        other.execute(f"INSERT INTO {orders.tables[0]} VALUES (1, 'begun before')")
        place.execute("INSERT INTO orders VALUES (2, 'committed')")
        assert [r["key"]["id"] for r in windows.next()] == [2]
        place.execute("INSERT INTO orders VALUES (3, 'committed')")
        assert [r["key"]["id"] for r in windows.next()] == [3]
        other.execute(f"INSERT INTO {orders.tables[0]} VALUES (4, 'after')")
        other.commit()
    assert [r["key"]["id"] for r in windows.next()] == [1, 4]


def test_every_byte_of_the_log_is_a_clean_cut(orders):
    """At each end of a window, a transaction is wholly in this window or in the next one."""
    windows, place = started(orders), orders.place
    for id in range(4):
        place.execute(f"INSERT INTO orders VALUES ({10 * id}, 'a'), ({10 * id + 1}, 'b')")
    window = windows.freeze()
    whole = [r["key"]["id"] for r in windows.read(window)]
    (bounds,) = window.splits
    from airflow_kafka_spark.sources.postgres_cdc.tasks.session import format_lsn, parse_lsn

    start, end = parse_lsn(bounds["start"]), parse_lsn(bounds["end"])
    cuts = {start + (end - start) * n // 40 for n in range(1, 40)}
    splits = [{**bounds, **part} for cut in sorted(cuts) for part in ({"end": format_lsn(cut)}, {"start": format_lsn(cut)})]
    reader = windows.source.make_reader(splits, None)
    parts = [[json.loads(k)["id"] for b in reader.read(n) for k in b.column("key").to_pylist()] for n in range(len(splits))]
    for before, after in zip(parts[::2], parts[1::2], strict=True):
        assert before + after == whole
        assert len(before) % 2 == 0
    assert len({len(before) for before in parts[::2]}) > 3


def test_bytes_behind_are_those_of_the_log_behind_the_last_window(orders):
    windows, place = started(orders), orders.place
    before = windows.source.count_bytes_behind(windows.position)
    place.execute("INSERT INTO orders SELECT n, repeat('x', 500) FROM generate_series(1, 200) n")
    assert windows.source.count_bytes_behind(windows.position) >= before + 100_000
    windows.next()
    assert windows.source.count_bytes_behind(windows.position) < 100_000
    windows.position = {**windows.position, "lsn": "0/1"}
    with pytest.raises(SourceRejected, match="was advanced"):
        windows.source.count_bytes_behind(windows.position)


def test_the_slot_is_advanced_behind_a_complete_window_only_and_never_backwards(orders):
    windows, place = started(orders), orders.place

    def confirmed() -> str:
        return place.one(f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{orders.name}'")

    place.execute("INSERT INTO orders VALUES (1, 'one')")
    before, window = confirmed(), windows.freeze()
    windows.read(window)
    assert confirmed() == before
    windows.close(window, advance=False)
    assert confirmed() == before
    place.execute("INSERT INTO orders VALUES (2, 'two')")
    following = windows.freeze()
    assert confirmed() == window.position["lsn"], "what a dead attempt has left is done before the next window"
    assert [r["key"]["id"] for r in windows.read(following)] == [2]
    windows.close(following)
    assert confirmed() == following.position["lsn"]
    windows.source.finish_window(window.position)  # a zombie: only logged
    assert confirmed() == following.position["lsn"]
    with pytest.raises(SourceRejected, match="was advanced to .* can no longer be read"):
        windows.read(window)


def test_windows_without_changes_move_the_slot_over_the_log_of_others(orders):
    windows, place = started(orders), orders.place
    place.execute("CREATE TABLE other (note text)")
    place.execute("INSERT INTO other SELECT repeat('x', 1000) FROM generate_series(1, 300)")
    window = windows.freeze()
    assert (window.splits, window.remaining, window.position["bytes_behind"]) == ((), False, 0)
    windows.close(window)
    kept = place.one(
        "SELECT pg_wal_lsn_diff(pg_current_wal_flush_lsn(), confirmed_flush_lsn) FROM pg_replication_slots "
        f"WHERE slot_name = '{orders.name}'"
    )
    assert kept < 100_000


def test_a_transaction_larger_than_a_window_is_one_window_and_read_in_pieces(orders, monkeypatch):
    windows, place = started(orders, max_wal_bytes=1 << 16), orders.place
    place.execute("INSERT INTO orders SELECT n, repeat('y', 500) FROM generate_series(1, 3000) n")
    place.execute("INSERT INTO orders VALUES (0, 'behind')")
    window = windows.freeze()
    assert window.remaining and window.position["bytes_behind"] > 0
    reader = windows.source.make_reader(window.splits, None)
    monkeypatch.setattr("airflow_kafka_spark.sources.postgres_cdc.tasks.batches.BATCH_BYTES", 100_000)
    batches = [batch.num_rows for batch in reader.read(0)]
    assert sum(batches) == 3000 and max(batches) < 200
    windows.close(window)
    assert [r["key"]["id"] for r in windows.next()] == [0]


# --- tables -------------------------------------------------------------------------------------------------------------


def test_changes_of_the_table_between_windows_and_within_one_show_in_the_rows_from_then_on(orders):
    windows, place = started(orders), orders.place
    place.execute("INSERT INTO orders VALUES (1, 'one')")
    place.execute("ALTER TABLE orders ADD COLUMN amount numeric(8,2)")
    place.execute("INSERT INTO orders VALUES (2, 'two', 3.5)")
    place.execute("ALTER TABLE orders DROP COLUMN note")
    place.execute("ALTER TABLE orders ALTER COLUMN amount TYPE text")
    place.execute("INSERT INTO orders VALUES (3, 'much')")
    rows = [after for _, _, after in changes(windows.next())]
    assert rows == [{"id": 1, "note": "one"}, {"id": 2, "note": "two", "amount": "AV4="}, {"id": 3, "amount": "much"}]


def test_an_unchanged_toast_value_is_debeziums_placeholder_or_with_full_identity_the_value(orders):
    windows, place = started(orders), orders.place
    place.execute("ALTER TABLE orders ADD COLUMN large text")
    place.execute("ALTER TABLE orders ALTER COLUMN large SET STORAGE EXTERNAL")
    place.execute("INSERT INTO orders VALUES (1, 'a', repeat('L', 9000))")
    place.execute("UPDATE orders SET note = 'b'")
    place.execute("ALTER TABLE orders REPLICA IDENTITY FULL")
    place.execute("UPDATE orders SET note = 'c'")
    _, second, third = (r["value"] for r in windows.next())
    assert second["after"] == {"id": 1, "note": "b", "large": "__debezium_unavailable_value"} and second["before"] is None
    assert third["after"] == {"id": 1, "note": "c", "large": "L" * 9000}
    assert third["before"] == {"id": 1, "note": "b", "large": "L" * 9000}


def test_a_key_that_is_stored_out_of_line_keeps_its_value(place):
    place.execute("CREATE TABLE t (id text PRIMARY KEY, n int); ALTER TABLE t ALTER COLUMN id SET STORAGE EXTERNAL")
    with log_of(place, "t") as log:
        windows = started(log)
        place.execute("INSERT INTO t VALUES (repeat('k', 2500), 1); UPDATE t SET n = 2; DELETE FROM t")
        found = windows.next()
    assert {record["key"]["id"] for record in found} == {"k" * 2500}
    assert [record["value"]["after"] for record in found[:2]] == [{"id": "k" * 2500, "n": n} for n in (1, 2)]


def test_with_full_identity_the_key_is_the_primary_key_or_the_columns_that_are_named(place):
    place.execute("CREATE TABLE a (id int, note text, PRIMARY KEY (id) INCLUDE (note)); CREATE TABLE b (x int, y int UNIQUE)")
    place.execute("ALTER TABLE a REPLICA IDENTITY FULL; ALTER TABLE b REPLICA IDENTITY FULL")
    with log_of(place, "a", "b") as log:
        [problem] = log.source().validate()
        assert "b has no primary key" in problem.what
        options = {"message_key_columns": {log.tables[1]: ["y"]}, "tombstones_on_delete": False}
        windows = started(log, **options)
        place.execute("INSERT INTO a VALUES (1, 'n'); INSERT INTO b VALUES (5, 6); UPDATE b SET x = 7; UPDATE b SET y = 8")
        place.execute("INSERT INTO b VALUES (1, NULL); DELETE FROM b WHERE y IS NULL")
        window = windows.freeze()
        with_schemas = Windows(log.source(schemas_enable=True, **options)).read(window)
        place.execute("ALTER TABLE a REPLICA IDENTITY DEFAULT")  # the key of its row is that of before
        place.execute("ALTER TABLE b ADD PRIMARY KEY (y)")  # which held a null before
        found = windows.read(window)
        windows.close(window)
        place.execute("ALTER TABLE a REPLICA IDENTITY FULL; INSERT INTO a VALUES (2, 'n')")
        place.execute("ALTER TABLE b DROP CONSTRAINT b_pkey, REPLICA IDENTITY DEFAULT; INSERT INTO b VALUES (9, 9)")
        windows.source = log.source(tombstones_on_delete=False)
        place.execute(f"ALTER PUBLICATION {log.name} DROP TABLE a")
        with pytest.raises(SourceRejected, match="a: its key is not known: the publication does not have the table any more"):
            windows.next()
        place.execute(f"ALTER PUBLICATION {log.name} ADD TABLE a")
        with pytest.raises(SourceRejected, match="b: it had no key when a row was changed"):
            windows.next()
    keys = [{"id": 1}, *[{"y": y} for y in (6, 6, 6, 8, None, None)]]
    assert [r["key"] for r in found] == [r["key"]["payload"] for r in with_schemas] == keys
    assert [r["key"]["schema"]["fields"][0]["optional"] for r in with_schemas[:2]] == [False, True]
    assert [c[0] for c in changes(found)] == ["c", "c", "u", "d", "c", "c", "d"]


def test_truncates_are_left_out_as_by_debezium_or_events_of_their_own(orders):
    quiet, place = started(orders), orders.place
    loud = Windows(orders.source(skipped_operations=()))
    place.execute("INSERT INTO orders VALUES (1, 'one')")
    place.execute("TRUNCATE orders")
    window = quiet.freeze()
    assert [c[0] for c in changes(quiet.read(window))] == ["c"]
    found = loud.read(window)
    assert [c for c in changes(found)][1:] == [("t", None, None)]
    assert found[1]["key"] is None


def test_partitions_publish_as_their_root_if_the_publication_says_so(place):
    place.execute("CREATE TABLE p (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)")
    place.execute("CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)")
    place.execute("CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20)")
    with log_of(place, "p") as log:
        [problem] = log.source().validate()
        assert "is partitioned" in problem.what and "publish_via_partition_root" in problem.action
        place.execute(f"ALTER PUBLICATION {log.name} SET (publish_via_partition_root = true)")
        windows = started(log)
        place.execute("INSERT INTO p VALUES (1, 'a'), (11, 'b')")
        place.execute("UPDATE p SET id = 12 WHERE id = 1")
        found = windows.next()
    assert {r["topic"] for r in found} == {f"shop.{topic_part(place.schema)}.p"}
    assert [(c[0], r["key"]["id"]) for c, r in zip(changes(found), found, strict=True)] == [
        ("c", 1), ("c", 11), ("d", 1), ("tombstone", 1), ("c", 12)
    ]  # fmt: skip


def test_a_partition_whose_log_does_not_hold_the_key_of_its_root_is_refused(place):
    """Each partition has a replica identity of its own, whatever that of the root is, which the log names."""
    place.execute("CREATE TABLE p (id int PRIMARY KEY, code text, large text) PARTITION BY RANGE (id)")
    place.execute("CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)")
    place.execute("ALTER TABLE p REPLICA IDENTITY FULL; ALTER TABLE p1 ALTER COLUMN large SET STORAGE EXTERNAL")
    with log_of(place, "p", root=True) as log:
        source = log.source(message_key_columns={log.tables[0]: ["code"]})
        [problem] = source.validate()
        assert "column `code` of rows of" in problem.what and ".p1, a partition of" in problem.what
        by_id, by_code = started(log), Windows(source)
        place.execute("INSERT INTO p VALUES (1, 'a', repeat('L', 9000)); UPDATE p SET id = 2")
        window = by_id.freeze()
        found = by_id.read(window)
        assert [r["key"] for r in found] == [{"id": 1}, {"id": 1}, {"id": 1}, {"id": 2}]
        # It is neither in the new row nor in the old one, of which the log has the key only.
        assert found[-1]["value"]["after"] == {"id": 2, "code": "a", "large": "__debezium_unavailable_value"}
        by_id.close(window)
        place.execute("UPDATE p SET code = 'b'")
        window = by_id.freeze()
        with pytest.raises(SourceRejected, match="does not hold column `code` of the key of a row"):
            by_code.read(window)
        by_id.close(window)
        place.execute("DELETE FROM p; ALTER TABLE p1 REPLICA IDENTITY FULL; INSERT INTO p VALUES (3, 'c', ''), (4, NULL, '')")
        assert source.validate() == []
        window = by_id.freeze()
        with pytest.raises(SourceRejected, match="does not hold column `code` of the key of a row"):
            by_code.read(window)
        by_id.close(window)
        place.execute("UPDATE p SET large = 'x' WHERE code = 'c'; UPDATE p SET large = 'x' WHERE id = 4; DELETE FROM p")
        assert [r["key"]["code"] for r in by_code.read(by_id.freeze()) if r["value"]][2:] == ["c", None]


def test_a_change_of_a_named_key_that_the_log_does_not_hold_is_refused(place):
    """The replica identity was changed behind it."""
    place.execute("CREATE TABLE t (id int PRIMARY KEY, code text); INSERT INTO t VALUES (1, 'a')")
    with log_of(place, "t") as log:
        windows = Windows(log.source(message_key_columns={log.tables[0]: ["code"]}))
        windows.next()
        place.execute("UPDATE t SET code = 'b'; ALTER TABLE t REPLICA IDENTITY FULL")
        assert windows.source.validate() == []
        with pytest.raises(SourceRejected, match="does not hold column `code` of the key of a row"):
            windows.next()


def test_changes_that_were_made_while_there_was_no_publication_are_refused(orders):
    windows, place = started(orders), orders.place
    place.execute(f"DROP PUBLICATION {orders.name}; INSERT INTO orders VALUES (1, 'one')")
    place.execute(f"CREATE PUBLICATION {orders.name} FOR TABLE orders")
    assert windows.source.validate() == []
    with pytest.raises(SourceRejected, match="when changes after the last window were made") as refused:
        windows.freeze()
    assert "dropped and created again" in refused.value.action
    # Some releases warn, and leave the changes out.
    server = SlotServer(orders.source().find_server(), orders.name)
    with server.open_session("reading") as session:
        refuse = server.watch_publication(session, orders.name)
        refuse()
        session.execute("DO $$ BEGIN RAISE WARNING USING ERRCODE = '55000', MESSAGE = 'skipped loading publication'; END $$")
        with pytest.raises(SourceRejected, match="did not exist when changes"):
            refuse()


# --- the slot -----------------------------------------------------------------------------------------------------------


@contextmanager
def held(log: Any, application: str) -> Iterator[psycopg.pq.PGconn]:
    """Let a session use the slot, like a consumer that hangs."""
    conninfo = psycopg.conninfo.make_conninfo(log.place.server.dsn, application_name=application, replication="database")
    session = psycopg.pq.PGconn.connect(conninfo.encode())
    start = f"START_REPLICATION SLOT {log.name} LOGICAL 0/0 (proto_version '1', publication_names '{log.name}')"
    session.exec_(start.encode())
    query = f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{log.name}'"
    eventually(lambda: log.place.one(query) is not None)
    yield session
    session.finish()


def test_a_dead_attempt_that_holds_the_slot_is_ended(orders):
    windows = started(orders)
    orders.place.execute("INSERT INTO orders VALUES (1, 'one')")
    with held(orders, make_session_name(orders.name)) as session:
        assert windows.source.validate() == []
        assert [r["key"]["id"] for r in windows.next()] == [1]
        query = f"SELECT count(*) FROM pg_stat_activity WHERE pid = {session.backend_pid}"
        assert orders.place.one(query) == 0


def test_a_session_that_is_ended_is_one_sentence_and_worth_another_try(orders):
    server, message = (
        SlotServer(orders.source().find_server(), orders.name),
        f"while reading: {SESSION_ENDED}. The task may simply be retried",
    )
    with pytest.raises(SourceUnavailable, match=message), server.open_session("reading") as session:
        session.execute("SELECT pg_terminate_backend(pg_backend_pid())")
    removed = "RAISE EXCEPTION USING ERRCODE = '58P01', MESSAGE = 'requested WAL segment 01 has already been removed'"
    with pytest.raises(LogLost, match="has already been removed.*its log was reset"), server.open_session("reading") as session:
        session.execute(f"DO $$ BEGIN {removed}; END $$".encode())  # as after `pg_resetwal`


def test_a_slot_that_another_program_uses_is_left_to_it(orders):
    windows = started(orders)
    orders.place.execute("INSERT INTO orders VALUES (1, 'one')")
    window = windows.freeze()
    with held(orders, "somebody else"):
        [problem] = windows.source.validate()
        assert problem.where == "source.slot" and "somebody else" in problem.what
        for refused in (windows.freeze, lambda: windows.read(window)):
            with pytest.raises(SourceUnavailable, match="somebody else"):
                refused()


def test_a_slot_that_is_gone_or_was_advanced_by_others_and_another_server_are_refused(orders):
    windows, place = started(orders), orders.place
    position = dict(windows.position or {})
    for name, value, found in (("system", "17", "system identifier"), ("timeline", 99, "a standby was promoted")):
        other = Windows(windows.source)
        other.position = {**position, "log": {**position["log"], name: value}}
        with pytest.raises(SourceRejected, match=found):
            other.freeze()
    place.execute("INSERT INTO orders VALUES (1, 'one')")
    place.execute(f"SELECT pg_replication_slot_advance('{orders.name}', pg_current_wal_flush_lsn())")
    with pytest.raises(SourceRejected, match="another program has"):
        windows.freeze()
    drop_slot(place, orders.name)
    with pytest.raises(SourceRejected, match="is gone"):
        windows.freeze()


def test_the_log_of_a_backup_is_refused_before_the_slot_is_advanced(orders):
    windows, place = started(orders), orders.place
    place.execute("INSERT INTO orders VALUES (1, 'one')")
    window = windows.freeze()
    windows.read(window)
    windows.close(window, advance=False)  # the slot stays before it, as that of a backup
    position = dict(windows.position or {})
    lsn, xid = position["log"]["last"]
    slot = f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = '{orders.name}'"
    before = place.rows(slot)
    ahead = format_lsn(parse_lsn(place.rows("SELECT pg_current_wal_insert_lsn()::text")[0][0]) + (1 << 40))
    for other, found in (
        ({"lsn": ahead}, "its log ends at .*, before .*, where the last window ended: a backup was restored"),
        ({"snapshot": {"behind": ahead, "tables": []}}, "its log ends at .*, before .*, where rows were read: a backup was"),
        (
            {"log": {**position["log"], "last": [lsn, xid + 1]}},
            rf"the log ends with transaction {xid} at {lsn}, and transaction {xid + 1}",
        ),
        (
            {"log": {**position["log"], "last": ["0/1", xid]}},
            rf"the log ends with transaction {xid} at {lsn}, and no transaction was",
        ),
    ):
        windows.position = {**position, **other}
        with pytest.raises(LogLost, match=found):
            windows.freeze()
    windows.position = {**position, "lsn": format_lsn(parse_lsn(lsn) - 1)}
    with pytest.raises(LogLost, match=rf"the log ends with no transaction, and transaction {xid} at {lsn} was published"):
        windows.freeze()
    assert place.rows(slot) == before
    windows.position = position
    place.execute("INSERT INTO orders VALUES (2, 'two')")
    window = windows.freeze()
    planned = replace(window, splits=({**window.splits[0], "end": ahead},))  # before the backup was restored
    with pytest.raises(LogLost, match=f"its log ends at .*, before {ahead}, where the window ends: a backup was restored"):
        windows.read(planned)
    assert [after["id"] for _, _, after in changes(windows.next())] == [2]
    windows.next()  # without changes
    assert (windows.position or {})["log"]["last"][1] > xid
