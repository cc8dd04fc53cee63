"""Snapshots: rows that are there, then the log, without a gap and without a double."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pymysql
import pytest

from airflow_kafka_spark.sources.mysql_cdc.tasks.session import Place
from tests.sources.mysql_cdc.kit import Binlog
from tests.sources.postgres_cdc.kit import Copy, Windows

BUSY = (1205, 1213)
TRUNCATED = ("t",)


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
                self.open.append(self.shop.server.connect(autocommit=False))
                with self.open[-1].cursor() as cursor:
                    cursor.execute("SET innodb_lock_wait_timeout = 0")
                self._some(self.open[-1])
            elif pick < 0.4 and self.open:
                self._end(self.open.pop(self.random.randrange(len(self.open))))
            else:
                with self.shop.server.connect(autocommit=False) as session:
                    with session.cursor() as cursor:
                        cursor.execute("SET innodb_lock_wait_timeout = 0")
                    self._some(session)
                    session.commit()

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
                with self.shop.server.connect() as session, session.cursor() as cursor:
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
    windows, copy, kinds, behind = Windows(source), Copy(), list[str](), (0, 0)
    for _ in range(100):
        traffic.change(traffic.random.randint(0, 8))
        window = windows.freeze()
        kinds.append("none" if not window.splits else "chunks" if "table" in window.splits[0] else "log")
        published: set[int] = set()
        with traffic.counting() if kinds[-1] == "chunks" else nullcontext():
            while len(published) < len(window.splits):
                for index in set(range(len(window.splits))) - published:
                    traffic.change(traffic.random.randint(0, 6))
                    records = windows.read_split(window, index)
                    if traffic.random.random() < 0.7:  # else the attempt dies before its marker
                        published.add(index)
                        copy.apply(records)
        windows.close(window)
        position = windows.position or {}
        if kinds[-1] == "chunks":
            assert Place.parse(position["place"]).order >= behind, "the log was not read up to the chunks before"
            behind = Place.parse(position["snapshot"]["behind"]).order
        if not position.get("snapshot") and kinds.count("log") > 20:
            break
    traffic.close()
    copy.apply(windows.drain())
    traffic.compare(copy)
    assert copy.count["r"] > 300 and copy.count["u"] > 20, copy.count
    assert kinds.count("chunks") > 8 and "snapshot" not in (windows.position or {})
