"""Snapshots: rows that are there, then the log, without a gap and without a double."""

from __future__ import annotations

import random
import threading
from contextlib import closing
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from airflow_kafka_spark.errors import LogLost, SourceRejected, SourceUnavailable
from airflow_kafka_spark.sources.postgres_cdc import windows as planner
from airflow_kafka_spark.sources.postgres_cdc.tasks.session import make_session_name, parse_lsn
from airflow_kafka_spark.sources.postgres_cdc.tasks.snapshot import KeyColumn, VisibleTransactions, _compute_end
from airflow_kafka_spark.windows.report import parse_position_progress
from tests.sources.postgres_cdc.kit import Copy, Log, Windows, changes, create_citext, log_of, take_transactions
from tests.support.distribution import extended
from tests.support.documents import list_commands
from tests.support.waiting import eventually


class Traffic:
    """Random transactions on tables with keys of several types, some of which stay open for a while."""

    KEYS = {
        "num": ("id int PRIMARY KEY", lambda n: str(n)),
        "txt": ('id text COLLATE "POSIX" PRIMARY KEY', lambda n: "'" + "aBcÄ-_z"[n % 7] + "'||" + str(n)),
        "two": ("a text, b numeric, PRIMARY KEY (b, a)", lambda n: f"('k%,{n % 3}', {n / 4})"),
    }

    def __init__(self, place: Any, seed: int) -> None:
        self.place, self.random = place, random.Random(seed)
        self.open: list[Any] = []
        for name, (key, _) in self.KEYS.items():
            place.execute(f"CREATE TABLE {name} ({key}, note text)")
            for n in range(0, 200, 3):
                self.statement(name, f"INSERT INTO {{}} VALUES ({self.value(name, n)}, 'first')")
        place.execute("CREATE TABLE loose (id int UNIQUE, note text); ALTER TABLE loose REPLICA IDENTITY FULL")
        place.execute("INSERT INTO loose SELECT n, 'first' FROM generate_series(1, 20) n")
        place.execute("CREATE TABLE named (id int PRIMARY KEY, code text NOT NULL, note text)")
        place.execute("ALTER TABLE named REPLICA IDENTITY FULL")
        place.execute("INSERT INTO named SELECT n * 3, 'first' || n, 'first' FROM generate_series(1, 40) n")

    def value(self, name: str, n: int) -> str:
        return self.KEYS[name][1](n).strip("()") if name == "two" else self.KEYS[name][1](n)

    def where(self, name: str, n: int) -> str:
        return f"(a, b) = ({self.value(name, n)})" if name == "two" else f"id = {self.value(name, n)}"

    def statement(self, name: str, text: str, connection: Any = None) -> None:
        full = f'{self.place.quoted}."{name}"'
        (connection or self.place.connection).execute(text.replace("{}", full).encode())

    def compare(self, copy: Copy) -> None:
        """Compare the copies with the tables."""
        for name in (*self.KEYS, "loose", "named"):
            columns = ("a", "b", "note") if name == "two" else ("id", "note")
            rows = self.place.rows(f'SELECT {"::text, ".join(columns)} FROM {self.place.quoted}."{name}"')
            found = [tuple(str(after[column]) for column in columns) for after in copy.tables.get(name, {}).values()]
            assert sorted(tuple(map(str, row)) for row in rows) == sorted(found), name

    def change(self, count: int, truncates: bool) -> None:
        for _ in range(count):
            pick = self.random.random()
            if pick < 0.03 and truncates:
                self.close()  # it waits for them
                self.statement(self.random.choice(list(self.KEYS)), "TRUNCATE {}")
            elif pick < 0.2 and len(self.open) < 5:
                self.open.append(self.place.server.connect())
                self.open[-1].execute("SELECT 1")  # begins: blocks of transactions are savepoints from here on
                self.some(self.open[-1])
            elif pick < 0.35 and self.open:
                self.end(self.open.pop(self.random.randrange(len(self.open))))
            else:
                self.some(None)

    def end(self, session: Any) -> None:
        session.rollback() if self.random.random() < 0.2 else session.commit()
        session.close()

    def close(self) -> None:
        while self.open:
            self.end(self.open.pop())

    def some(self, session: Any) -> None:
        connection = session or self.place.connection
        with connection.transaction():
            connection.execute("SET LOCAL lock_timeout = '20ms'")
            for _ in range(self.random.randint(1, 6)):
                try:
                    with connection.transaction():
                        self.one(connection)
                except (psycopg.errors.LockNotAvailable, psycopg.errors.UniqueViolation):
                    pass

    def one(self, connection: Any) -> None:
        pick, n, note = self.random.random(), self.random.randrange(220), f"'{self.random.random()}'"
        name = self.random.choice([*self.KEYS, "loose", "named"])
        if name == "named":
            n %= 150
            if pick < 0.2:
                values = f"({n}, '{self.random.random()}', {note})"
                self.statement(name, f"INSERT INTO {{}} VALUES {values} ON CONFLICT DO NOTHING", connection)
            elif pick < 0.8:
                change = f"id = {self.random.randrange(150)}" if pick < 0.6 else f"note = {note}"
                self.statement(name, f"UPDATE {{}} SET {change} WHERE id = {n}", connection)
            else:
                self.statement(name, f"DELETE FROM {{}} WHERE id = {n}", connection)
            return
        if name == "loose":
            n %= 30
            if pick < 0.3:
                self.statement(
                    name, f"INSERT INTO {{}} SELECT {n}, {note} WHERE NOT EXISTS (SELECT FROM {{}} WHERE id = {n})", connection
                )
            elif pick < 0.7:
                self.statement(name, f"UPDATE {{}} SET note = {note} WHERE id = {n}", connection)
            else:
                self.statement(name, f"DELETE FROM {{}} WHERE id = {n}", connection)
            return
        where = self.where(name, n)
        if pick < 0.35:
            self.statement(name, f"INSERT INTO {{}} VALUES ({self.value(name, n)}, {note}) ON CONFLICT DO NOTHING", connection)
        elif pick < 0.6:
            self.statement(name, f"UPDATE {{}} SET note = {note} WHERE {where}", connection)
        elif pick < 0.8:
            to = self.random.randrange(220)
            key = "(a, b)" if name == "two" else "id"
            self.statement(name, f"UPDATE {{}} SET {key} = ({self.value(name, to)}) WHERE {where}", connection)
        else:
            self.statement(name, f"DELETE FROM {{}} WHERE {where}", connection)


@pytest.mark.parametrize(("seed", "truncates"), [extended(1, False), (3, True)])
def test_snapshot_and_log_give_each_change_once_and_in_order_whatever_is_read_again(place, seed, truncates):
    """Changes go on before, between and within the chunks of a window; attempts die and read chunks again, in other snapshots."""
    traffic = Traffic(place, seed)
    with log_of(place, *Traffic.KEYS, "loose", "named") as log, closing(traffic):
        options: dict[str, Any] = {"skipped_operations": ()} if truncates else {}
        source = log.source(
            snapshot="initial",
            snapshot_chunk_rows=9,
            snapshot_chunks_per_window=3,
            message_key_columns={log.tables[-2]: ["id"], log.tables[-1]: ["code"]},
            max_wal_bytes=1 << 16,
            decimal_handling_mode="string",
            **options,
        )
        assert source.validate() == []
        counted = replace(source, provide_transaction_metadata=True)
        windows, copy, kinds, behind = Windows(source), Copy(moving={"named"}), [], 0
        windows.freeze()  # creates the slot, which waits for transactions that are open
        for _ in range(200):
            traffic.change(traffic.random.randint(0, 8), truncates)
            windows.source = counted if kinds.count("log") % 3 == 1 else source
            window = windows.freeze()
            kinds.append("none" if not window.splits else "chunks" if "table" in window.splits[0] else "log")
            published: dict[int, list[dict[str, Any]]] = {}
            while len(published) < len(window.splits):
                for index in set(range(len(window.splits))) - set(published):
                    traffic.change(traffic.random.randint(0, 6), truncates)
                    records = take_transactions(windows.read_split(window, index))
                    if traffic.random.random() < 0.7:  # else the attempt dies before its marker
                        published[index] = records
                        copy.apply(records)
            windows.close(window, advance=traffic.random.random() < 0.7)
            if kinds[-1] == "log" and windows.tokens[0].get("truncated"):
                behind = 0  # the chunks of these tables are read again, and perhaps no other ones are left
            if kinds[-1] == "chunks":
                assert parse_lsn(window.position["lsn"]) >= behind, "the log was not read up to the chunks before"
                snapshot = (windows.position or {}).get("snapshot")
                behind = parse_lsn(snapshot["behind"]) if snapshot else 0  # no change is behind the last chunks
            if not window.remaining and not (windows.position or {}).get("snapshot"):
                if traffic.open or kinds.count("log") < 20:
                    traffic.change(10, truncates)
                    continue
                break
        traffic.close()
        for _ in range(20):
            copy.apply(take_transactions(windows.next()))
        traffic.compare(copy)
    assert copy.count["r"] > 80 and copy.count["u"] > 20, copy.count
    assert kinds.count("chunks") > 5


def test_a_snapshot_includes_what_was_committed_before_it_also_where_ids_wrap_around():
    seen = VisibleTransactions.parse("4294967290:4294967300:4294967295,4294967297")
    included = {xid: seen.include(xid) for xid in (4294967290, 4294967294, 4294967295, 0, 1, 3, 4, 1000)}
    assert included == {4294967290: True, 4294967294: True, 4294967295: False, 0: True, 1: False, 3: True, 4: False, 1000: False}
    assert VisibleTransactions.parse("10:10:").include(9) and not VisibleTransactions.parse("10:10:").include(10)


def test_the_place_behind_a_snapshot_is_one_that_the_log_reaches_without_another_record():
    page = 8192 * 70
    assert [_compute_end(page + into, 8192) - page for into in (0, 24, 40, 41, 8191)] == [0, 0, 0, 41, 8191]


def started(log: Log, **options: Any) -> Windows:
    made = Windows(log.source(**options))
    assert made.source.validate() == []
    return made


def test_rows_that_are_there_are_read_with_the_values_that_the_log_has(orders):
    place = orders.place
    place.execute("ALTER TABLE orders ADD COLUMN amount numeric(8,2), ADD COLUMN at timestamptz, ADD COLUMN raw bytea")
    place.execute("ALTER TABLE orders ADD COLUMN more int GENERATED ALWAYS AS (id + 1) STORED, ADD COLUMN flags boolean[]")
    values = "E'a\\\\b\\t\\n\\\\N', 3.5, '2026-01-01 00:00:00.000001+00', '\\x5c0a', '{t,NULL}'"
    place.execute(f"INSERT INTO orders (id, note, amount, at, raw, flags) VALUES (1, {values})")
    place.execute("INSERT INTO orders (id) VALUES (2)")
    windows = started(orders, snapshot="initial")
    found = {r["key"]["id"]: r for r in windows.drain()}
    place.execute("UPDATE orders SET id = id + 10")
    again = {r["key"]["id"] - 10: r for r in windows.next() if r["value"] and r["value"]["op"] == "c"}
    for id, record in found.items():
        assert {**record["value"]["after"], "id": 0} == {**again[id]["value"]["after"], "id": 0}
        assert (record["value"]["op"], record["value"]["source"]["snapshot"]) == ("r", "incremental")
        assert record["topic"] == again[id]["topic"] and record["value"]["source"]["txId"] is None
    assert set(found) == {1, 2}


def test_the_position_says_how_many_chunks_are_done_until_the_snapshot_is_complete(orders):
    orders.place.execute("INSERT INTO orders SELECT n, 'x' FROM generate_series(1, 50) n")
    orders.place.execute("ANALYZE orders")
    windows = Windows(orders.source(snapshot="initial", snapshot_chunk_rows=10, snapshot_chunks_per_window=3))
    found = []
    for _ in range(5):
        windows.next()
        progress = parse_position_progress(windows.position)
        found.append(progress and (progress.chunks, progress.all_chunks, progress.all_rows))
        orders.place.execute("UPDATE orders SET note = 'y'")
    # Three chunks, the log, the rest.
    assert found == [(3, 5, 50), (3, 5, 50), (5, 6, 50), None, None]


def test_with_only_the_slot_is_dropped_behind_the_snapshot_and_nothing_follows(orders):
    place = orders.place
    place.execute("INSERT INTO orders SELECT n, 'first' FROM generate_series(1, 30) n")
    windows = started(orders, snapshot="only", snapshot_chunk_rows=7, snapshot_chunks_per_window=2)
    assert sorted(r["key"]["id"] for r in windows.drain()) == list(range(1, 31))
    place.execute("INSERT INTO orders VALUES (99, 'later')")
    for _ in range(2):
        assert windows.next() == []
        assert place.one(f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{orders.name}'") == 0


@pytest.mark.parametrize("changed", [False, True])
def test_the_window_of_the_last_chunks_ends_the_snapshot_unless_the_log_has_a_change_behind_them(orders, changed):
    place = orders.place
    place.execute("INSERT INTO orders SELECT n, 'first' FROM generate_series(1, 30) n")
    windows = started(orders, snapshot="only")
    window = windows.freeze()
    found = windows.read(window)
    if changed:
        place.execute("UPDATE orders SET note = 'second' WHERE id = 3")
    assert windows.close(window) == changed
    assert sorted(r["key"]["id"] for r in found) == list(range(1, 31))
    assert place.one(f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{orders.name}'") == changed
    assert changes(windows.drain()) == [("u", None, {"id": 3, "note": "second"})] * changed


def test_an_open_window_of_chunks_does_not_begin_the_snapshot_again_if_the_slot_is_lost(orders):
    place = orders.place
    place.execute("INSERT INTO orders VALUES (1, 'one')")
    windows = started(orders, snapshot="when_needed")
    window = windows.freeze()
    windows.read(window)
    place.execute(f"SELECT pg_drop_replication_slot('{orders.name}')")
    position = windows.source.compute_position_after(window.splits, window.position, [windows.tokens[0]])
    with pytest.raises(LogLost, match="is gone"):
        windows.source.find_final_position(position)
    assert place.one(f"SELECT count(*) FROM pg_replication_slots WHERE slot_name = '{orders.name}'") == 0


def test_a_lost_log_is_followed_by_another_snapshot_where_it_is_when_needed(orders):
    place = orders.place
    place.execute("INSERT INTO orders VALUES (1, 'one')")
    windows = started(orders, snapshot="when_needed")
    assert [c[0] for c in changes(windows.drain())] == ["r"]
    place.execute(f"SELECT pg_drop_replication_slot('{orders.name}')")
    place.execute("INSERT INTO orders VALUES (2, 'unseen')")
    assert sorted(r["key"]["id"] for r in windows.drain()) == [1, 2]
    place.execute("INSERT INTO orders VALUES (3, 'three')")
    assert [c[0] for c in changes(windows.drain())] == ["c"]


def test_an_attempt_that_resumes_late_does_not_drop_the_slot_that_a_newer_one_has_created(orders, monkeypatch):
    place = orders.place
    windows = started(orders, snapshot="when_needed")
    windows.drain()
    place.execute("INSERT INTO orders VALUES (1, 'unseen')")
    place.execute(f"SELECT pg_replication_slot_advance('{orders.name}', pg_current_wal_lsn())")
    slot = f"SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = '{orders.name}'"
    seen = []

    def freeze_newer(*_):
        if not seen:
            seen.append(place.one(slot))
            orders.source(snapshot="when_needed").freeze(windows.position)
            seen.append(place.one(slot))

    monkeypatch.setattr(planner.log, "warning", freeze_newer)
    windows.freeze()
    assert seen[1] != seen[0] and place.one(slot) == seen[1]


def test_rows_and_columns_that_the_publication_leaves_out_are_not_read(place):
    place.execute("CREATE TABLE a (id int PRIMARY KEY, note text, secret text)")
    place.execute("INSERT INTO a VALUES (1, 'n', 's'), (50, 'n', 's')")
    with log_of(place, "a") as log:
        place.execute(f"ALTER PUBLICATION {log.name} SET TABLE {log.tables[0]} (id, note) WHERE (id > 9)")
        windows = started(log, snapshot="initial")
        window = windows.freeze()
        place.execute(f"ALTER PUBLICATION {log.name} DROP TABLE {log.tables[0]}")
        with pytest.raises(SourceRejected, match="is no table of the publication"):
            windows.read(window)
        place.execute(f"ALTER PUBLICATION {log.name} SET TABLE {log.tables[0]} (id, note) WHERE (id > 9)")
        found = windows.drain()
    assert [c[2] for c in changes(found)] == [{"id": 50, "note": "n"}]


def test_a_key_that_changes_within_a_snapshot_is_refused(orders):
    place = orders.place
    place.execute("INSERT INTO orders SELECT n, n::text FROM generate_series(1, 30) n")
    windows = started(orders, snapshot="initial", snapshot_chunk_rows=5, snapshot_chunks_per_window=1)
    windows.next()
    place.execute("ALTER TABLE orders ALTER COLUMN id TYPE bigint")
    windows.next()
    kept = windows.position
    for change, found in (
        ("ALTER COLUMN id TYPE text", r"its key is id \(text\), and its snapshot was begun by id \(number\)"),
        ("DROP CONSTRAINT orders_pkey, ADD PRIMARY KEY (note)", r"its key is note \(text\), and its snapshot was begun by id"),
    ):
        windows.position = kept
        place.execute(f"ALTER TABLE orders {change}")
        with pytest.raises(SourceRejected, match=found):
            windows.drain()
    assert KeyColumn("id", "text", "").order != KeyColumn("id", "text", ' COLLATE "C"').order


def test_a_key_whose_operators_are_in_another_schema_is_cut_and_compared_in_its_own_order(place):
    """Without their schema, `citext` would be compared as `text`: upper case before lower case."""
    place.execute(f'CREATE DOMAIN code AS {create_citext(place)}.citext COLLATE "C"')
    place.execute(
        "CREATE TABLE one (id code PRIMARY KEY, note text); CREATE TABLE two (a code, b int, note text, PRIMARY KEY (a, b))"
    )
    names = [chr(ord("aA"[n % 2]) + n) for n in range(14)]  # a B c D
    for n, name in enumerate(names):
        place.execute(f"INSERT INTO one VALUES ('{name}', 'first'); INSERT INTO two VALUES ('{name}', {n}, 'first')")
    with log_of(place, "one", "two") as log:
        windows, copy = started(log, snapshot="initial", snapshot_chunk_rows=3, snapshot_chunks_per_window=2), Copy()
        for n in range(0, 14, 2):
            window = windows.freeze()
            place.execute(f"UPDATE one SET note = note || {n}; UPDATE two SET note = 'second' WHERE b < {n}")
            records = windows.read(window)
            assert n or len(records) == 6, "two chunks of three rows, which another order would distribute unevenly"
            copy.apply(records)
            place.execute(f"DELETE FROM two WHERE b = {13 - n}; UPDATE one SET id = 'x{n}' WHERE id = '{names[n]}'")
            windows.close(window)
        copy.apply(windows.drain())
        for table, key in (("one", "id"), ("two", "a || b")):
            found = sorted(
                (after.get("id") or f"{after['a']}{after['b']}", after["note"]) for after in copy.tables[table].values()
            )
            assert found == sorted(place.rows(f"SELECT ({key})::text, note FROM {table}")), table


def test_tables_that_are_no_longer_captured_are_left_out_of_a_snapshot_and_renamed_ones_are_refused(place):
    place.execute("CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY); CREATE TABLE c (id int PRIMARY KEY)")
    for name in "abc":
        place.execute(f"INSERT INTO {name} SELECT generate_series(1, 6)")
    with log_of(place, *"abc") as log:
        windows = started(log, tables=None, snapshot="initial", snapshot_chunk_rows=2, snapshot_chunks_per_window=1)
        assert {record["value"]["source"]["table"] for record in windows.next()} == {"a"}
        place.execute("ALTER TABLE b RENAME TO d; DROP TABLE c")
        with pytest.raises(SourceRejected, match=r"it is .*\.d now, and its snapshot is not complete"):
            windows.freeze()
        place.execute("ALTER TABLE d RENAME TO b")
        windows.source = log.source(tables=[log.tables[1]], snapshot="initial", snapshot_chunk_rows=2)
        assert [record["value"]["source"]["table"] for record in windows.drain()] == ["b"] * 6


def test_a_table_whose_name_another_one_gets_is_read_from_its_beginning(place):
    """Rows before the last chunk would be missing. No event of the first table is left out, because its rows are published. All
    these events come before the rows of the other table."""
    place.execute("CREATE TABLE a (id int PRIMARY KEY, note text); CREATE TABLE b (id int PRIMARY KEY, note text)")
    place.execute(
        "INSERT INTO a SELECT n, 'a' FROM generate_series(1, 6) n; "
        "INSERT INTO b SELECT n, 'b' FROM generate_series(1, 8) n WHERE n <> 2"
    )
    exchange = "BEGIN; ALTER TABLE a RENAME TO c; ALTER TABLE b RENAME TO a; ALTER TABLE c RENAME TO b; COMMIT"
    with log_of(place, *"ab") as log:
        options = {"snapshot": "initial", "snapshot_chunk_rows": 2, "snapshot_chunks_per_window": 1}
        windows, copy = started(log, tables=log.tables[:1], **options), Copy(moving={"a"})
        window = windows.freeze()
        place.execute(exchange)
        with pytest.raises(SourceRejected, match="another table has its name since the window was planned"):
            windows.read(window)
        place.execute(exchange)
        copy.apply(windows.read(window))
        windows.close(window)
        place.execute("DELETE FROM a WHERE id = 1")
        place.execute(exchange)
        copy.apply(windows.drain())
        place.execute("UPDATE a SET note = 'c' WHERE id = 3")
        copy.apply(windows.drain())
    rows = sorted((after["id"], after["note"]) for after in copy.tables["a"].values())
    assert rows == [(1, "b"), (2, "a"), (3, "c"), *[(id, "b") for id in range(4, 9)]], "only the first table has the row 2"


def test_a_table_that_is_dropped_before_a_window_of_the_log_is_read_keeps_no_other_table_waiting(place):
    place.execute("CREATE TABLE a (id int PRIMARY KEY, n int); CREATE TABLE b (id int PRIMARY KEY, n int)")
    place.execute(
        "INSERT INTO a SELECT n, 0 FROM generate_series(1, 6) n; INSERT INTO b SELECT n, 0 FROM generate_series(1, 4) n"
    )
    with log_of(place, *"ab") as log:
        windows, copy = started(log, tables=None, snapshot="initial", snapshot_chunk_rows=2, snapshot_chunks_per_window=1), Copy()
        copy.apply(windows.next())
        place.execute("UPDATE a SET n = 1; UPDATE b SET n = 1")
        window = windows.freeze()
        place.execute("ALTER TABLE a RENAME TO c")
        with pytest.raises(SourceRejected, match=r"it is .*\.c now, and its snapshot is not complete"):
            windows.read(window)
        place.execute("DROP TABLE c")
        seen = windows.read(window)
        assert [record["key"]["id"] for record in seen if record["value"]["source"]["table"] == "a"] == list(range(1, 7))
        windows.close(window)
        copy.apply([record for record in [*seen, *windows.drain()] if record["value"]["source"]["table"] == "b"])
        assert sorted(row["n"] for row in copy.tables["b"].values()) == [1] * 4


def test_a_slot_that_waits_for_an_open_transaction_names_it(orders, monkeypatch):
    monkeypatch.setattr(planner, "CREATE_SECONDS", 0.2)
    with orders.place.server.connect() as other:
        other.execute(f"INSERT INTO {orders.tables[0]} VALUES (1, '')".encode())
        with pytest.raises(
            SourceUnavailable, match=f"creating the slot: .* and session {other.info.backend_pid} of role .* is open"
        ):
            Windows(orders.source()).freeze()
    Windows(orders.source()).freeze()


def test_the_rows_of_a_table_that_is_added_are_read_behind_the_transactions_that_changed_it_before(place, monkeypatch):
    """The log does not have what such a transaction did before the publication had the table."""
    place.execute("CREATE TABLE a (id int PRIMARY KEY, note text); CREATE TABLE b (id int PRIMARY KEY, note text)")
    place.execute("INSERT INTO a VALUES (1, 'first'); INSERT INTO b SELECT n, 'first' FROM generate_series(1, 6) n")
    with log_of(place, "a") as log, place.server.connect() as other:
        windows, copy = started(log, snapshot="initial", snapshot_chunk_rows=2), Copy()
        copy.apply(windows.drain())
        added = f'{place.quoted}."b"'
        other.execute(f"INSERT INTO {added} VALUES (7, 'unseen')".encode())
        place.execute(f"ALTER PUBLICATION {log.name} ADD TABLE {added}; INSERT INTO a VALUES (2, 'second')")
        windows.source = log.source(tables=[*log.tables, added], snapshot="initial", snapshot_chunk_rows=2)
        monkeypatch.setattr(planner, "CREATE_SECONDS", 0.1)
        with pytest.raises(SourceUnavailable, match="transactions that may have changed a new table"):
            windows.freeze()
        other.commit()
        window = windows.freeze()
        place.execute("UPDATE b SET note = 'second' WHERE id < 3")
        copy.apply(windows.read(window))
        place.execute(
            "UPDATE b SET note = 'third' WHERE id IN (2, 7); DELETE FROM b WHERE id = 4; INSERT INTO b VALUES (8, 'new')"
        )
        windows.close(window)
        copy.apply(windows.drain())
        for table in "ab":
            found = sorted((after["id"], after["note"]) for after in copy.tables[table].values())
            assert found == place.rows(f"SELECT id, note FROM {table} ORDER BY id")
        assert copy.count == {"r": 8, "c": 2, "u": 2, "d": 1}
        assert windows.next() == []


def test_a_prepared_transaction_is_seen_by_chunks_and_comes_in_the_log_when_it_is_committed(orders):
    """Changes that were rolled back to a savepoint are left out. Messages that programs write to the log are no changes."""
    place, name = orders.place, orders.name
    place.execute("INSERT INTO orders VALUES (1, 'first')")
    windows = Windows(orders.source(snapshot="initial"))
    window = windows.freeze()
    place.execute(
        "BEGIN; INSERT INTO orders VALUES (2, 'kept'); SAVEPOINT s; INSERT INTO orders VALUES (3, 'undone'); ROLLBACK TO s; "
        f"SAVEPOINT t; UPDATE orders SET note = 'second' WHERE id = 1; RELEASE t; PREPARE TRANSACTION '{name}'"
    )
    try:
        place.execute("SELECT pg_logical_emit_message(true, 'p', 'text'), pg_logical_emit_message(false, 'p', 'text')")
        assert [(op, after) for op, _, after in changes(windows.read(window))] == [("r", {"id": 1, "note": "first"})]
        windows.close(window)
        assert windows.next() == []
    finally:
        place.execute(f"COMMIT PREPARED '{name}'")
    assert [(op, after["id"]) for op, _, after in changes(windows.next())] == [("c", 2), ("u", 1)]


@pytest.mark.timeout(120)
def test_a_chunk_that_is_not_read_to_its_end_ends_its_session(orders):
    """A value that cannot be written, and a task that ends early, leave no COPY for which the session would wait."""
    place = orders.place
    place.execute("ALTER TABLE orders ADD COLUMN amount numeric(8,2)")
    place.execute("INSERT INTO orders SELECT n, repeat('x', 4000), 1 FROM generate_series(1, 2000) n")
    place.execute("INSERT INTO orders VALUES (0, 'n', 'NaN')")
    source = orders.source(snapshot="initial")
    window = source.freeze(None)
    with pytest.raises(SourceRejected, match=r"column `amount`.*NaN"):
        Windows(source).read(window)
    place.execute("DELETE FROM orders WHERE id = 0")
    rows = source.make_reader(window.splits, None).read(0)
    assert next(rows).num_rows > 0
    rows.close()
    # The server removes a session from its list a moment after the client has closed it.
    # Sessions of other tests may be in it, too: of attempts that they have stopped, for instance.
    left = f"SELECT count(*) FROM pg_stat_activity WHERE application_name = '{make_session_name(orders.name)}'"
    eventually(lambda: place.rows(left) == [(0,)], 60)


def test_a_snapshot_without_the_right_to_read_is_refused(orders):
    """Each problem has the command that grants the right, whatever the names are."""
    place, role = orders.place, f"Reader-{orders.name}"
    place.execute(f"CREATE ROLE \"{role}\" LOGIN PASSWORD 'p'")
    try:
        parts = place.server
        place.connect_with(f"postgres://{role}:p@{parts.host}:{parts.port}/{parts.database}")
        [problem] = orders.source().validate()
        assert "may not use replication slots" in problem.what
        place.execute(*list_commands(problem))
        assert orders.source().validate() == []
        source = orders.source(snapshot="initial")
        schema, table = source.validate()
        assert "may not use schema" in schema.what and "may not read" in table.what
        place.execute(*list_commands(table))
        assert source.validate() == [schema]
        place.execute(*list_commands(schema))
        assert source.validate() == []
        # Rows that row security hides are in the log, and would be missing.
        place.execute("ALTER TABLE orders ENABLE ROW LEVEL SECURITY; CREATE POLICY few ON orders USING (id > 1)")
        [problem] = source.validate()
        assert "row security of" in problem.what
        with pytest.raises(SourceRejected, match="row-level security"):
            Windows(source).next()
        place.execute(*list_commands(problem))
        place.execute("INSERT INTO orders VALUES (1, 'hidden')")
        assert source.validate() == [] and len(Windows(source).next()) == 1
    finally:
        place.execute(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')


def test_a_partitioned_table_that_is_published_as_its_root_is_cut_and_read_as_one(place):
    place.execute("CREATE TABLE p (id int PRIMARY KEY, note text) PARTITION BY RANGE (id)")
    place.execute("CREATE TABLE p1 PARTITION OF p FOR VALUES FROM (0) TO (10)")
    place.execute("CREATE TABLE p2 PARTITION OF p FOR VALUES FROM (10) TO (20)")
    place.execute("INSERT INTO p SELECT n, 'first' FROM generate_series(1, 18) n")
    with log_of(place, "p", root=True) as log:
        windows = started(log, snapshot="initial", snapshot_chunk_rows=4, snapshot_chunks_per_window=2)
        copy = Copy()
        copy.apply(windows.next())
        place.execute("UPDATE p SET id = 19 WHERE id = 1; UPDATE p SET id = 1 WHERE id = 18; DELETE FROM p WHERE id = 9")
        copy.apply(windows.drain())
    assert sorted(key for (key,) in copy.tables["p"]) == [n for n in range(1, 20) if n not in (9, 18)]


def test_a_truncate_waits_for_the_chunk_that_is_being_read(orders, monkeypatch):
    """A truncate would be visible in the older snapshot of the chunk."""
    place = orders.place
    place.execute("INSERT INTO orders SELECT n, 'first' FROM generate_series(1, 9) n")
    windows = started(orders, snapshot="initial")
    window = windows.freeze()
    monkeypatch.setattr("airflow_kafka_spark.sources.postgres_cdc.tasks.read.PIECE_ROWS", 1)
    reader = windows.source.make_reader(window.splits, None)
    assert not isinstance(reader, str)
    batches = reader.read(0)
    assert next(batches).num_rows == 1
    place.execute("SET lock_timeout = '50ms'")
    with pytest.raises(psycopg.errors.LockNotAvailable):
        place.execute("TRUNCATE orders")
    assert sum(batch.num_rows for batch in batches) == 8
    place.execute("TRUNCATE orders")


def test_a_transaction_that_waits_for_a_standby_is_neither_lost_nor_doubled(orders, monkeypatch):
    """Its commit is in the log while no session sees its rows, so that chunks that are read meanwhile do not include them."""
    place = orders.place
    place.execute("INSERT INTO orders SELECT n, 'first' FROM generate_series(1, 9) n")
    windows = started(orders, snapshot="initial", snapshot_chunk_rows=3, snapshot_chunks_per_window=1)
    assert [r["key"]["id"] for r in windows.next()] == [1, 2, 3]
    monkeypatch.setattr("airflow_kafka_spark.sources.postgres_cdc.tasks.snapshot.VISIBLE_SECONDS", 0.1)
    place.execute("SET synchronous_commit = local")
    place.execute("ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
    place.execute("SELECT pg_reload_conf()")
    try:
        with place.server.connect(autocommit=True) as waiting:
            eventually(lambda: waiting.execute("SHOW synchronous_standby_names").fetchone() == ("nobody",))
            insert = f"INSERT INTO {orders.tables[0]} VALUES (100, 'waits')".encode()
            committing = threading.Thread(target=waiting.execute, args=[insert])
            committing.start()
            of_session = f"pid = {waiting.info.backend_pid} AND wait_event = 'SyncRep'"
            eventually(lambda: place.one(f"SELECT count(*) FROM pg_stat_activity WHERE {of_session}") == 1)
            window = windows.freeze()
            with pytest.raises(SourceUnavailable, match="waits for a synchronous standby"):
                windows.read(window)
            place.execute("ALTER SYSTEM RESET synchronous_standby_names")
            place.execute("SELECT pg_reload_conf()")
            committing.join(60)
    finally:
        place.execute("ALTER SYSTEM RESET synchronous_standby_names")
        place.execute("SELECT pg_reload_conf()")
    assert windows.read(window) == []
    windows.close(window)
    assert sorted(r["key"]["id"] for r in windows.drain()) == [4, 5, 6, 7, 8, 9, 100]
