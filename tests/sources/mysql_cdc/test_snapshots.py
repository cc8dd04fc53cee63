"""Snapshots: rows that are there, then the log, without a gap and without a double."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pymysql
import pytest

from airflow_kafka_spark.errors import LogLost, SourceRejected
from airflow_kafka_spark.sources.mysql_cdc.tasks.session import LogCoordinates
from tests.sources.mysql_cdc.kit import Binlog
from tests.sources.postgres_cdc.kit import Copy, Windows, changes, take_transactions
from tests.support.mariadb import is_mysql
from tests.support.waiting import eventually

BUSY = (1205, 1213)


def shop_session(shop: Binlog) -> Any:
    """Return a session whose transactions are open until they are ended."""
    settings = "SET innodb_lock_wait_timeout = 0, lock_wait_timeout = 1"
    return shop.server.connect(autocommit=False, ssl_disabled=True, init_command=settings)


class Traffic:
    """Random transactions on tables with keys of several types, some of which stay open for a while."""

    KEYS = {
        "num": ("id int unsigned PRIMARY KEY", lambda n: {"id": n}),
        "txt": (
            "id varchar(30) COLLATE utf8mb4_general_ci PRIMARY KEY",
            lambda n: {"id": "'" + ["a", "B", "ä", "-", "_", "z", "Z", "ß "][n % 8] + "%'" + f" '{n}'"},
        ),
        "two": (
            "a varchar(9) CHARACTER SET latin1, b decimal(6,2), at datetime(1), PRIMARY KEY (b, a, at)",
            lambda n: {"b": n % 5 / 4 - 1, "a": f"'k{n % 3}\\\\'", "at": f"'2026-01-01' + INTERVAL {n} DAY"},
        ),
        "raw": ("id binary(3) PRIMARY KEY, UNIQUE (note)", lambda n: {"id": f"X'{n % 7:02x}00{n:02x}'"}),
        "ord": ("id enum('z', 'a', 'm', 'q'), n int, PRIMARY KEY (id, n)", lambda n: {"id": n % 4 + 1, "n": n}),
    }

    def __init__(self, shop: Binlog, seed: int, truncates: bool) -> None:
        self.shop, self.random, self.truncates = shop, random.Random(seed), truncates
        self.open: list[Any] = []
        self.added = 0
        shop.execute("SET innodb_lock_wait_timeout = 0")
        for name, (key, _) in self.KEYS.items():
            columns, _, rest = key.partition(", UNIQUE")
            shop.execute(f"CREATE TABLE {name} (note varchar(40), {columns}{', UNIQUE' + rest if rest else ''})")
            for n in range(0, 200, 3):
                shop.execute(self._insert(name, n))
        shop.execute("CREATE TABLE loose (id int UNIQUE, note text)")
        shop.execute("INSERT INTO loose SELECT seq, 'first' FROM seq_1_to_20")
        shop.execute("CREATE TABLE hot (id int PRIMARY KEY, count int)", "INSERT INTO hot SELECT seq, 0 FROM seq_1_to_60")

    def _insert(self, name: str, n: int) -> str:
        key = self.KEYS[name][1](n)
        note = f"'{self.random.random()}'"
        return f"INSERT IGNORE INTO {name} ({', '.join(key)}, note) VALUES ({', '.join(map(str, key.values()))}, {note})"

    def _where(self, name: str, n: int) -> str:
        return " AND ".join(f"{column} = {value}" for column, value in self.KEYS[name][1](n).items())

    def change(self, count: int) -> None:
        for _ in range(count):
            pick = self.random.random()
            if pick < 0.06 and not self.open:
                self._define(self.random.choice(list(self.KEYS)))
            elif pick < 0.2 and len(self.open) < 4:
                self.open.append(shop_session(self.shop))
                self._some(self.open[-1])
            elif pick < 0.4 and self.open:
                self._end(self.open.pop(self.random.randrange(len(self.open))))
            else:
                self.shop.execute("START TRANSACTION")
                self._some(self.shop.connection)
                self.shop.execute("COMMIT")

    def _define(self, name: str) -> None:
        """Truncate, rebuild, or change a table."""
        self.added += 1
        statements = [f"ALTER TABLE {name} ADD COLUMN more{self.added} int DEFAULT 5 FIRST", f"ALTER TABLE {name} FORCE"]
        statements += [f"CREATE TABLE new_{name} LIKE {name}; INSERT INTO new_{name} SELECT * FROM {name}; "
                       f"RENAME TABLE {name} TO old_{name}, new_{name} TO {name}; DROP TABLE old_{name}"]  # fmt: skip
        if self.truncates:
            statements.append(f"TRUNCATE {name}")
        self.shop.execute(*self.random.choice(statements).split("; "))

    def _end(self, session: Any) -> None:
        session.rollback() if self.random.random() < 0.2 else session.commit()
        session.close()

    def close(self) -> None:
        while self.open:
            self._end(self.open.pop())

    def _some(self, session: Any) -> None:
        for _ in range(self.random.randint(1, 6)):
            try:
                with session.cursor() as cursor:
                    cursor.execute(self._one())
            except pymysql.Error as error:
                if error.args[0] not in BUSY:
                    raise

    def _one(self) -> str:
        pick, n, note = self.random.random(), self.random.randrange(220), f"'{self.random.random()}'"
        name = self.random.choice([*self.KEYS, "loose"])
        if name == "loose":
            n %= 30
            if pick < 0.3:
                return f"INSERT IGNORE INTO loose VALUES ({n}, {note})"
            return f"UPDATE loose SET note = {note} WHERE id = {n}" if pick < 0.7 else f"DELETE FROM loose WHERE id = {n}"
        where = self._where(name, n)
        if pick < 0.35:
            return self._insert(name, n)
        if pick < 0.6:
            return f"UPDATE {name} SET note = {note} WHERE {where}"
        if pick < 0.8:
            key = self.KEYS[name][1](self.random.randrange(220)).items()
            if name == "txt" and pick < 0.7:  # the same key for the server, and another one for Kafka
                key = {"id": "IF(BINARY id = UPPER(id), LOWER(id), UPPER(id))"}.items()
            return f"UPDATE IGNORE {name} SET {', '.join(f'{c} = {v}' for c, v in key)} WHERE {where}"
        return f"DELETE FROM {name} WHERE {where}"

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Two sessions change rows of the table ``hot`` all the time."""
        done, errors = threading.Event(), list[BaseException]()

        def count(seed: int) -> None:
            own = random.Random(seed)
            try:
                with self.shop.server.connect(ssl_disabled=True) as session, session.cursor() as cursor:
                    while not done.wait(0.001):
                        id = own.randrange(60)
                        cursor.execute(f"UPDATE hot SET count = count + 1 WHERE id = {id}")
                        if own.random() < 0.2:
                            cursor.execute(f"DELETE FROM hot WHERE id = {own.randrange(60)}")
                        cursor.execute(f"INSERT IGNORE INTO hot VALUES ({own.randrange(60)}, 0)")
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=count, args=[number]) for number in range(2)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            done.set()
            for thread in threads:
                thread.join()
        assert errors == []

    def compare(self, copy: Copy) -> None:
        """Compare the copies with the tables."""
        for name in (*self.KEYS, "loose", "hot"):
            note = "count" if name == "hot" else "note"
            found = sorted(str(after[note]) for after in copy.tables.get(name, {}).values())
            assert sorted(str(row[0]) for row in self.shop.rows(f"SELECT {note} FROM {name}")) == found, name


@pytest.mark.parametrize(("seed", "truncates"), [(1, False), (2, True)])
def test_snapshot_and_log_give_each_change_once_and_in_order_whatever_is_read_again(shop: Binlog, seed, truncates):
    """Changes go on before, between and within the chunks of a window; attempts die and read chunks again, in other snapshots."""
    traffic = Traffic(shop, seed, truncates)
    source = shop.source(
        snapshot="initial",
        snapshot_chunk_rows=9,
        snapshot_chunks_per_window=3,
        message_key_columns={"shop.loose": ["id"]},
        tables=[*Traffic.KEYS, "loose", "hot"],
        max_binlog_bytes=1 << 16,
        **({"skipped_operations": ()} if truncates else {}),
    )
    assert source.validate() == []
    counted = replace(source, provide_transaction_metadata=True)
    windows, copy, kinds, behind = Windows(source), Copy(), list[str](), (0, 0)
    for _ in range(100):
        traffic.change(traffic.random.randint(0, 8))
        windows.source = counted if kinds.count("log") % 3 == 1 else source
        window = windows.freeze()
        kinds.append("none" if not window.splits else "chunks" if "table" in window.splits[0] else "log")
        published: set[int] = set()
        with traffic.counting() if kinds[-1] == "chunks" else nullcontext():
            while len(published) < len(window.splits):
                for index in set(range(len(window.splits))) - published:
                    traffic.change(traffic.random.randint(0, 6))
                    if is_mysql() and kinds[-1] == "chunks":  # the table is locked for a moment
                        traffic.close()
                    records = take_transactions(windows.read_split(window, index))
                    if traffic.random.random() < 0.7:  # else the attempt dies before its marker
                        published.add(index)
                        copy.apply(records)
        windows.close(window)
        position = windows.position or {}
        if kinds[-1] == "log" and windows.tokens[0].get("truncated"):
            behind = (0, 0)  # the chunks of these tables are read again, and perhaps no other ones are left
        if kinds[-1] == "chunks":
            assert LogCoordinates.parse(position["place"]).order >= behind, "the log was not read up to the chunks before"
            # Without a snapshot, no change is behind the last chunks.
            behind = LogCoordinates.parse(position["snapshot"]["behind"]).order if "snapshot" in position else (0, 0)
        if not position.get("snapshot") and kinds.count("log") > 20:
            break
    traffic.close()
    windows.source = source
    copy.apply(windows.drain())
    traffic.compare(copy)
    assert copy.count["r"] > 80 and copy.count["u"] > 20, copy.count
    assert kinds.count("chunks") > 8 and "snapshot" not in (windows.position or {})


def filled(shop: Binlog, count: int = 30) -> Binlog:
    """Return the log of a table of orders that has rows."""
    shop.execute("CREATE TABLE orders (id int PRIMARY KEY, note text)")
    shop.execute(f"INSERT INTO orders SELECT seq, 'first' FROM seq_1_to_{count}")
    return shop


def test_with_only_nothing_follows_the_rows_and_the_changes_up_to_them(shop: Binlog):
    windows = filled(shop).windows(snapshot="only", snapshot_chunk_rows=7, snapshot_chunks_per_window=2)
    found = windows.next()
    shop.execute("UPDATE orders SET note = 'second' WHERE id = 3", "INSERT INTO orders VALUES (0, 'early'), (31, 'late')")
    found += windows.drain()
    assert sorted(r["key"]["id"] for r in found if r["value"]["op"] == "r") == list(range(1, 32))
    assert [(op, after["id"]) for op, _, after in changes(found) if op != "r"] == [("u", 3), ("c", 0)]
    shop.execute("INSERT INTO orders VALUES (99, 'later')")
    for _ in range(2):
        assert windows.next() == []
    assert windows.source.count_bytes_behind(windows.position or {}) == 0


@pytest.mark.parametrize("changed", [False, True])
def test_the_window_of_the_last_chunks_ends_the_snapshot_unless_the_log_has_a_change_behind_them(shop: Binlog, changed):
    windows = filled(shop).windows(snapshot="initial")
    window = windows.freeze()
    found = windows.read(window)
    if changed:
        shop.execute("UPDATE orders SET note = 'second' WHERE id = 3")
    assert windows.close(window) == changed
    assert sorted(r["key"]["id"] for r in found) == list(range(1, 31))
    assert [op for op, _, _ in changes(windows.drain())] == ["u"] * changed


def test_tables_that_are_no_longer_captured_are_left_out_of_a_snapshot(shop: Binlog):
    filled(shop, 6)
    shop.execute("CREATE TABLE other (id int PRIMARY KEY)", "INSERT INTO other SELECT seq FROM seq_1_to_6")
    options = {"snapshot": "initial", "snapshot_chunk_rows": 2, "snapshot_chunks_per_window": 1}
    windows = shop.windows(**options)
    assert keys_of(windows.next()) == [("orders", 1), ("orders", 2)]
    windows.source = shop.source(tables=["other"], **options)
    assert keys_of(windows.drain()) == [("other", id) for id in range(1, 7)]


@pytest.mark.parametrize(
    ("statement", "is_in_window"),
    [("RENAME TABLE `orders` TO moved", False), ("ALTER TABLE shop.orders ADD COLUMN more int, RENAME AS moved", True)],
)
def test_a_table_that_is_renamed_within_its_snapshot_is_refused_until_it_has_its_name_back(shop: Binlog, statement, is_in_window):
    """The statement is in a window of the log that is read before the next chunks, or behind it."""
    filled(shop, 6)
    windows = shop.windows(snapshot="initial", snapshot_chunk_rows=2, snapshot_chunks_per_window=1)
    window = windows.freeze()
    if is_in_window:  # the log has to be read up to the chunk
        shop.execute("UPDATE orders SET note = 'changed' WHERE id = 1")
    found = keys_of(windows.read(window))
    windows.close(window)
    shop.execute(statement)
    with pytest.raises(SourceRejected, match="orders.*it was renamed, and its snapshot is not complete") as refused:
        windows.drain()
    assert "Give it its name back" in refused.value.action
    assert [t.get("renamed") for t in (windows.position or {})["snapshot"]["tables"]] == [True if is_in_window else None]
    shop.execute("ALTER TABLE moved RENAME COLUMN note TO text", "RENAME TABLE moved TO orders")
    assert found + keys_of(windows.drain()) == [("orders", id) for id in range(1, 7)]


TRIGGERS = (
    "CREATE TRIGGER del AFTER DELETE ON orders FOR EACH ROW DELETE IGNORE FROM _orders_new WHERE id <=> OLD.id",
    "CREATE TRIGGER ins AFTER INSERT ON orders FOR EACH ROW REPLACE INTO _orders_new (id, note) VALUES (NEW.id, NEW.note)",
    "CREATE TRIGGER upd AFTER UPDATE ON orders FOR EACH ROW BEGIN "
    "DELETE IGNORE FROM _orders_new WHERE NOT (OLD.id <=> NEW.id) AND id <=> OLD.id; "
    "REPLACE INTO _orders_new (id, note) VALUES (NEW.id, NEW.note); END",
)
"""The triggers with which pt-online-schema-change keeps its copy of a table."""


def change_online(shop: Binlog, tool: str, publish: Callable[[], object]) -> None:
    """Add a column to the table of orders as a tool does it: by a copy that takes the table's place, while the table changes.

    :param tool: ``pt-osc``: triggers keep the copy; ``gh-ost``: a reader of the log does.
    :param publish: called between the steps.
    """

    def change(id: int, *statements: str) -> None:
        for statement in statements:
            shop.execute(statement)
        publish()
        if tool == "gh-ost":
            shop.execute(
                f"DELETE FROM _orders_new WHERE id BETWEEN {id} AND {id + 1}",
                f"REPLACE INTO _orders_new (id, note) SELECT id, note FROM orders WHERE id BETWEEN {id} AND {id + 1}",
            )

    shop.execute("CREATE TABLE _orders_new LIKE orders", "ALTER TABLE _orders_new ADD COLUMN more int DEFAULT 5")
    shop.execute(*(TRIGGERS if tool == "pt-osc" else ()))
    for first in (1, 11, 21):
        shop.execute(
            "INSERT LOW_PRIORITY IGNORE INTO _orders_new (id, note) SELECT id, note FROM orders FORCE INDEX (PRIMARY) "
            f"WHERE id >= {first} AND (id < {first + 10} OR {first} = 21) LOCK IN SHARE MODE"
        )
        change(first, f"UPDATE orders SET note = CONCAT(note, '+') WHERE id = {first}")
        change(first + 4, f"DELETE FROM orders WHERE id = {first + 4}")
        change(first + 6, f"UPDATE orders SET id = {first + 100} WHERE id = {first + 6}")
        change(first + 100)
        change(first + 8, f"REPLACE INTO orders VALUES ({first + 8}, 'new')")
    if tool == "pt-osc":
        shop.execute("RENAME TABLE shop.orders TO shop._orders_old, shop._orders_new TO shop.orders")
        publish()
        shop.execute(*(f"DROP TRIGGER IF EXISTS shop.{name}" for name in ("del", "upd", "ins")))
    else:
        rename = "RENAME /* gh-ost */ TABLE shop.orders TO shop._orders_old, shop._orders_new TO shop.orders"
        shop.execute("CREATE TABLE _orders_old (id int PRIMARY KEY) COMMENT='ghost-cut-over-sentry'")
        with shop.server.connect() as session, session.cursor() as cursor, ThreadPoolExecutor(1) as pool:
            cursor.execute("LOCK TABLES orders WRITE, _orders_old WRITE")
            renaming = pool.submit(shop.execute, rename)
            with shop.server.connect() as other, other.cursor() as looking:
                waiting = "SELECT 1 FROM information_schema.processlist WHERE state LIKE 'Waiting for table metadata lock'"
                eventually(lambda: looking.execute(waiting) > 0)
            cursor.execute("DROP TABLE _orders_old")
            cursor.execute("UNLOCK TABLES")
            renaming.result()
    publish()
    shop.execute("DROP TABLE IF EXISTS _orders_old")


@pytest.mark.parametrize("tool", ["pt-osc", "gh-ost"])
def test_a_table_that_a_tool_swaps_for_a_changed_copy_loses_and_doubles_no_event(shop: Binlog, tool):
    """First while its rows are read, then once they are. Only without ``tables`` the copy is a table of its own, too."""
    filled(shop)
    windows = shop.windows(tables=["orders"], snapshot="initial", snapshot_chunk_rows=2, snapshot_chunks_per_window=1)
    every, copy = shop.windows(starting_position=shop.place), Copy()
    change_online(shop, tool, lambda: copy.apply(windows.next()))
    assert (windows.position or {}).get("snapshot"), "the rows were read before the tables were swapped"
    copy.apply(windows.drain())
    shop.execute("ALTER TABLE orders DROP COLUMN more")
    change_online(shop, tool, lambda: copy.apply(windows.next()))
    shop.execute("INSERT INTO orders VALUES (200, 'last', 6)", "DELETE FROM orders WHERE id = 2")
    copy.apply(windows.drain())
    found = sorted((after["id"], after["note"]) for after in copy.tables["orders"].values())
    assert found == sorted(shop.rows("SELECT id, note FROM orders"))
    assert {after.get("more") for after in copy.tables["orders"].values()} == {None, 5, 6}, "no event has the rows of a copy"
    assert {record["topic"] for record in every.drain()} == {"p.shop.orders", "p.shop._orders_new"}


def test_the_rows_of_a_table_that_is_added_are_read_and_behind_them_its_changes(shop: Binlog):
    filled(shop, 2)
    shop.execute("CREATE TABLE other (id int PRIMARY KEY, note text)", "INSERT INTO other SELECT seq, 'first' FROM seq_1_to_6")
    windows, copy = shop.windows(tables=["orders"], snapshot="initial"), Copy()
    copy.apply(windows.drain())
    shop.execute("INSERT INTO orders VALUES (3, 'new')", "UPDATE other SET note = 'second' WHERE id < 3")
    windows.source = shop.source(tables=["orders", "other"], snapshot="initial", snapshot_chunk_rows=2)
    window = windows.freeze()
    shop.execute("UPDATE other SET note = 'third' WHERE id IN (2, 3)")
    copy.apply(windows.read(window))
    shop.execute("UPDATE other SET note = 'fourth' WHERE id IN (1, 3)", "DELETE FROM other WHERE id = 4")
    windows.close(window)
    copy.apply(windows.drain())
    for table in ("orders", "other"):
        found = sorted((after["id"], after["note"]) for after in copy.tables[table].values())
        assert found == sorted(shop.rows(f"SELECT id, note FROM {table}"))
    assert copy.count == {"r": 8, "c": 1, "u": 2, "d": 1}


def keys_of(records: list[dict[str, Any]]) -> list[tuple[str, int]]:
    return [(record["value"]["source"]["table"], record["key"]["id"]) for record in records]


def test_a_lost_log_is_followed_by_another_snapshot_where_it_is_when_needed(shop: Binlog):
    filled(shop, 1)
    strict, lenient = shop.windows(snapshot="initial"), shop.windows(snapshot="when_needed")
    for windows in (strict, lenient):
        assert [change[0] for change in changes(windows.drain())] == ["r"]
        position: Any = windows.position
        windows.position = {**position, "log": {**position["log"], "created": 1}}
    shop.execute("INSERT INTO orders VALUES (2, 'unseen')")
    with pytest.raises(LogLost, match="was begun at another time"):
        strict.freeze()
    assert sorted(record["key"]["id"] for record in lenient.drain()) == [1, 2]
    shop.execute("INSERT INTO orders VALUES (3, 'three')")
    assert [change[0] for change in changes(lenient.drain())] == ["c"]


def test_a_key_that_changes_within_a_snapshot_is_refused_and_so_is_its_collation(shop: Binlog):
    shop.execute("CREATE TABLE a (id varchar(9) CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci PRIMARY KEY, n int)")
    shop.execute("INSERT INTO a SELECT seq, seq FROM seq_1_to_30")
    windows = shop.windows(snapshot="initial", snapshot_chunk_rows=5, snapshot_chunks_per_window=1)
    window = windows.freeze()
    shop.execute("UPDATE a SET n = 0 WHERE id = '1'")
    windows.read(window)
    windows.close(window)
    in_between = windows.position
    windows.next()
    kept = windows.position
    for changed, found in (
        ("MODIFY id varchar(9) COLLATE utf8mb4_bin", "utf8mb4_bin.*was begun by id"),
        ("DROP PRIMARY KEY, ADD PRIMARY KEY (id, n)", r"its key is id \(.*\), n \(number\), and its snapshot was begun by id"),
        ("MODIFY id bigint, DROP PRIMARY KEY, ADD PRIMARY KEY (id)", r"its key is id \(number\)"),
    ):
        windows.position = kept
        shop.execute(f"ALTER TABLE a {changed}")
        with pytest.raises(SourceRejected, match=found):
            windows.freeze()
    windows.position = in_between
    shop.execute("UPDATE a SET n = 0 WHERE id = 2")
    with pytest.raises(SourceRejected, match="column `id` is not as it was"):
        windows.next()


def test_rows_whose_key_was_null_for_a_while_have_all_their_events(shop: Binlog):
    """They are in no chunk. The log holds nothing in the place of the null, which the server could not compare."""
    shop.execute("CREATE TABLE a (at datetime(6) NOT NULL UNIQUE, n int)")
    shop.execute("INSERT INTO a SELECT '2024-01-01' + INTERVAL seq DAY, seq FROM seq_1_to_6")
    windows = shop.windows(
        snapshot="initial", snapshot_chunk_rows=2, snapshot_chunks_per_window=1, message_key_columns={"shop.a": ["at"]}
    )
    copy = Copy()
    copy.apply(windows.next())
    shop.execute("ALTER TABLE a MODIFY at datetime(6) NULL", "INSERT INTO a VALUES (NULL, 7), ('2024-01-02 12:00:00', 8)")
    shop.execute("UPDATE a SET at = '2024-02-01' WHERE n = 7", "ALTER TABLE a MODIFY at datetime(6) NOT NULL")
    copy.apply(windows.drain())
    assert sorted(after["n"] for after in copy.tables["a"].values()) == list(range(1, 9))
    assert copy.count == {"r": 7, "c": 2, "d": 1}


def test_a_table_that_is_truncated_before_its_snapshot_is_used_is_read_in_another_one(shop: Binlog, monkeypatch):
    """A table that is swapped for another one is read again, too: its rows would not be those of that place in the log."""
    from airflow_kafka_spark.sources.mysql_cdc.tasks import snapshot

    filled(shop)
    shop.execute("CREATE TABLE swapped (id int PRIMARY KEY, note text)", "INSERT INTO swapped VALUES (50, 'other')")
    original, statements = snapshot.take_snapshot, ["TRUNCATE orders", "INSERT INTO orders VALUES (7, 'new')",
        "RENAME TABLE orders TO gone, swapped TO orders", "INSERT INTO orders VALUES (8, 'newer')"]  # fmt: skip
    windows = shop.windows(snapshot="initial", tables=["orders"])
    window = windows.freeze()

    def take(*args: Any) -> LogCoordinates | None:
        place = original(*args)
        shop.execute(*statements[:2])
        del statements[:2]
        return place

    monkeypatch.setattr(snapshot, "take_snapshot", take)
    assert [record["key"]["id"] for record in windows.read(window)] == [8, 50]
    windows.close(window)
    assert windows.drain() == []


def test_rows_that_a_new_snapshot_would_not_have_are_waited_for(shop: Binlog, monkeypatch):
    """A chunk includes all that windows of the log have left to it."""
    from airflow_kafka_spark.sources.mysql_cdc.tasks import snapshot

    early = LogCoordinates.parse(filled(shop, 2).end())
    shop.execute("UPDATE orders SET note = 'second'", "FLUSH BINARY LOGS")
    late = LogCoordinates.parse(shop.end())
    shop.execute("FLUSH BINARY LOGS")
    windows = shop.windows(snapshot="initial")
    window = windows.freeze()
    original, taken = snapshot.take_snapshot, list[LogCoordinates | None]()

    def take(*args: Any) -> LogCoordinates:
        taken.append(original(*args))
        return [early, early, late][len(taken) - 1]

    monkeypatch.setattr(snapshot, "take_snapshot", take)
    assert len(windows.read(window)) == 2 and len(taken) == 3, "behind the last one are events of the server's own only"


def test_a_truncate_waits_for_the_chunk_that_is_being_read(shop: Binlog, monkeypatch):
    windows = filled(shop, 9).windows(snapshot="initial")
    monkeypatch.setattr("airflow_kafka_spark.sources.mysql_cdc.tasks.read.PIECE_ROWS", 1)
    reader = windows.source.make_reader(windows.freeze().splits, None)
    assert not isinstance(reader, str)
    batches = reader.read(0)
    assert next(batches).num_rows == 1
    shop.execute("SET lock_wait_timeout = 0")
    with pytest.raises(pymysql.Error, match="Lock wait timeout"):
        shop.execute("TRUNCATE orders")
    assert sum(batch.num_rows for batch in batches) == 8
    shop.execute("SET lock_wait_timeout = 30", "TRUNCATE orders")


def test_a_chunk_that_is_given_up_leaves_out_its_rows_as_they_were(shop: Binlog):
    windows = filled(shop, 20).windows(snapshot="initial", snapshot_chunk_rows=10, snapshot_chunks_per_window=2)
    window = windows.freeze()
    assert len(windows.read_split(window, 0)) == 10
    windows.tokens[1] = window.splits[1]["if_given_up"]
    windows.close(window)
    shop.execute("UPDATE orders SET note = 'second' WHERE id IN (5, 15)")
    found = windows.drain()
    assert [(op, after["id"]) for op, _, after in changes(found)] == [("u", 5), ("u", 15)]


def test_what_cannot_be_read_in_a_snapshot_is_named_before_it_begins(shop: Binlog):
    shop.execute("CREATE TABLE a (id int PRIMARY KEY) ENGINE=Aria", "CREATE TABLE `empty` (id int PRIMARY KEY)")
    [problem] = shop.source(snapshot="initial").validate()
    assert "the engine of shop.a is " in problem.what and "InnoDB" in problem.action
    [problem] = shop.source(snapshot="initial", tables=["empty"], starting_position="earliest").validate()
    assert problem.where == "source.starting_position"
    assert shop.windows(snapshot="initial", tables=["empty"]).drain() == []
