"""Copies of captured tables in lakes, and their changes in Parquet files.

After random changes of rows and columns, each drain leaves the rows of the table in each copy. In the files they are the last
rows of their keys.

Events are read from the logs of real servers and upserted into real lakes, without Kafka and Spark, so that a turn takes a
fraction of a second. ``make test`` runs a few turns of one seed; ``make soak MINUTES=10 SEED=7`` runs turns for the minutes.
"""

from __future__ import annotations

import base64
import json
import os
import random
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timezone
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from airflow_kafka_spark.formats import Debezium, Json
from airflow_kafka_spark.sinks.base import Rows, Shape
from airflow_kafka_spark.sources.base import FrozenWindow
from airflow_kafka_spark.windows.model import OffsetRange, Split, Window
from tests.sinks.attempt import apply
from tests.sinks.cases import FilesCase
from tests.sinks.delta.cases import DeltaCase
from tests.sinks.feed import Job
from tests.sinks.iceberg.cases import IcebergCase
from tests.sinks.postgres.kit import Place
from tests.sources.mysql_cdc.kit import Binlog
from tests.sources.postgres_cdc.kit import Windows
from tests.support.oracle import same_multiset

MINUTES = float(os.environ.get("SOAK_MINUTES") or 0)
SEED = int(os.environ.get("SOAK_SEED") or (secrets.randbelow(10**6) if MINUTES else 19))
TURNS, PARTITIONS = 6, 2

SNAPSHOT: Mapping[str, Any] = {"snapshot": "initial", "snapshot_chunk_rows": 4, "snapshot_chunks_per_window": 2}


TEXTS = ("plain", "", "it''s", "ü😀", "a\tb", "NULL", "%41/=?", "x" * 300)
DECIMALS = ("9999999999.99", "-9999999999.99", "0", "-0.01", "1.5")
DAYS = ("0001-01-01", "9999-12-31", "1582-10-10", "1970-01-01", "2024-02-29")
INSTANTS = ("0001-01-03 00:00:00.000001", "9999-12-30 23:59:59.999999", "1582-10-10 12:00:00", "1969-12-31 23:59:59.999999")
RATIOS = ("0", "0.1", "-1e300", "5e-324", "1.7976931348623157e308")
BYTES = ("", "00", "00ff0a5c", "20")


@dataclass(frozen=True)
class Kind:
    """A type of columns.

    :param read_as: the type of the copy.
    :param literals: values, as the database takes them.
    """

    read_as: str
    literals: Sequence[str]


def quoted(values: Sequence[str]) -> list[str]:
    return [f"'{value}'" for value in values]


POSTGRES: Mapping[str, Kind] = {
    "text": Kind("string", quoted(TEXTS)),
    "numeric(12,2)": Kind("decimal(12,2)", DECIMALS),
    "timestamptz": Kind("timestamp", [f"'{at}+05:45'" for at in INSTANTS]),
    "timestamp": Kind("timestamp_ntz", quoted(INSTANTS)),
    "date": Kind("date", quoted(DAYS)),
    "boolean": Kind("boolean", ("true", "false")),
    "float8": Kind("double", (*RATIOS, "'Infinity'", "'-Infinity'")),
    "bytea": Kind("binary", [f"'\\x{value}'" for value in BYTES]),
    "int[]": Kind("array<int>", ("'{}'", "'{1,NULL,-3}'")),
}
MARIADB: Mapping[str, Kind] = {
    "varchar(400)": Kind("string", quoted(TEXTS)),
    "decimal(12,2)": Kind("decimal(12,2)", DECIMALS),
    "timestamp(6) null": Kind("timestamp", ("'1970-01-01 00:00:01.000001'", "'2038-01-19 03:14:07.999999'")),
    "datetime(6)": Kind("timestamp_ntz", quoted(INSTANTS)),
    "date": Kind("date", quoted(DAYS)),
    "bit(1)": Kind("boolean", ("b'0'", "b'1'")),
    "double": Kind("double", RATIOS),
    "varbinary(20)": Kind("binary", [f"X'{value}'" for value in BYTES]),
    "int unsigned": Kind("bigint", ("0", "4294967295")),
}


@dataclass(kw_only=True)
class Captured(ABC):
    """A table whose columns come and go.

    :ivar columns: those that it has now, with their types; ``id`` is its key.
    :ivar known: those that it ever had, in the types of the copy.
    """

    kinds: Mapping[str, Kind]
    windows: Windows = field(init=False)
    chance: random.Random = field(default_factory=lambda: random.Random(SEED))
    columns: dict[str, str] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=lambda: {"id": "bigint"})

    @abstractmethod
    def execute(self, *statements: str) -> None:
        """Run statements, one after the other."""

    @abstractmethod
    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Return the rows of a query."""

    @abstractmethod
    def upsert(self, row: str) -> str:
        """Return the statement that writes a row over the one with its key."""

    def shown(self, name: str) -> str:
        """Return the expression of a column in a query."""
        return f"CAST({name} AS UNSIGNED)" if self.columns.get(name) == "bit(1)" else name

    def create(self) -> None:
        for kind in self.kinds:
            self._named(kind)
        columns = ", ".join(f"{name} {kind}" for name, kind in self.columns.items())
        self.execute(f"CREATE TABLE t (id bigint PRIMARY KEY, {columns})")
        for _ in range(12):
            self.change()

    def _named(self, kind: str) -> str:
        name = f"c{len(self.known)}"
        self.columns[name] = kind
        self.known[name] = self.kinds[kind].read_as
        return name

    def change_some(self) -> None:
        """Make some transactions, and now and then another column, or one less."""
        for _ in range(self.chance.randint(1, 6)):
            self.change()
        if self.chance.random() < 0.6:
            self.alter()
            self.change()

    def alter(self) -> None:
        """Add a column, or drop one."""
        if self.chance.random() < 0.5 and len(self.columns) > 3:
            name = self.chance.choice(list(self.columns))
            del self.columns[name]
            self.execute(f"ALTER TABLE t DROP COLUMN {name}")
        else:
            kind = self.chance.choice(list(self.kinds))
            name = self._named(kind)
            self.execute(f"ALTER TABLE t ADD COLUMN {name} {kind}")

    def change(self) -> None:
        """Make a transaction of a few changes; one of ten is rolled back."""
        statements = [self._one() for _ in range(self.chance.randint(1, 4))]
        self.execute("BEGIN", *statements, "ROLLBACK" if self.chance.random() < 0.1 else "COMMIT")

    def _one(self) -> str:
        pick, id, other = self.chance.random(), self.chance.randint(1, 40), self.chance.randint(1, 40)
        if pick < 0.6:
            values = [self._literal(kind) for kind in self.columns.values()]
            return self.upsert(", ".join([str(id), *values]))
        if pick < 0.7:
            name, kind = self.chance.choice(list(self.columns.items()))
            return f"UPDATE t SET {name} = {self._literal(kind)} WHERE id BETWEEN {id} AND {id + 5}"
        if pick < 0.8:
            return (
                f"UPDATE t SET id = {other + 100} WHERE id = {id} AND {other + 100} NOT IN (SELECT id FROM (SELECT id FROM t) s)"
            )
        return f"DELETE FROM t WHERE id BETWEEN {id} AND {id + 2} OR id = {other + 100}"

    def _literal(self, kind: str) -> str:
        return self.chance.choice(("NULL", *self.kinds[kind].literals, *self.kinds[kind].literals))

    def schema(self) -> str:
        return ", ".join(f"{name} {kind}" for name, kind in self.known.items())


@dataclass(kw_only=True)
class InPostgres(Captured):
    place: Place
    kinds: Mapping[str, Kind] = field(default_factory=lambda: POSTGRES)

    def execute(self, *statements: str) -> None:
        self.place.execute("; ".join(statements))

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.place.rows(query)

    def upsert(self, row: str) -> str:
        update = ", ".join(f"{name} = excluded.{name}" for name in self.columns)
        return f"INSERT INTO t (id, {', '.join(self.columns)}) VALUES ({row}) ON CONFLICT (id) DO UPDATE SET {update}"


@dataclass(kw_only=True)
class InMariaDB(Captured):
    log: Binlog
    kinds: Mapping[str, Kind] = field(default_factory=lambda: MARIADB)

    def execute(self, *statements: str) -> None:
        self.log.execute("SET time_zone = '+00:00'", *statements)

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return self.log.rows(query)

    def upsert(self, row: str) -> str:
        return f"REPLACE INTO t (id, {', '.join(self.columns)}) VALUES ({row})"


@dataclass
class Topic:
    """The records of the events, in partitions by key, and the windows that a pipeline makes of them."""

    number: int = 0
    ends: list[int] = field(default_factory=lambda: [0] * PARTITIONS)

    def job(self, events: Sequence[tuple[bytes, bytes | None]], schema: str) -> Job:
        self.number += 1
        form = Debezium(Json(schema=schema), timestamps="micros", decimals="unscaled")
        columns = form.get_arrow_schema()
        splits, data = [], {}
        for partition in range(PARTITIONS):
            mine = [(key, value) for key, value in events if json.loads(key)["id"] % PARTITIONS == partition]
            start = self.ends[partition]
            self.ends[partition] += len(mine)
            splits.append(Split(partition, OffsetRange("t", partition, start, self.ends[partition])))
            data[partition] = [self._rows(form, columns, mine, start)] if mine else []
        ranges = tuple(split.range for split in splits)
        window = Window("dag.copy", self.number, ranges, run="dag/run/task", planned_at="2026-11-20T00:00:00+00:00")
        return Job(window, tuple(splits), Shape("dag.copy", columns, has_tombstones=True), data)

    def _rows(self, form: Debezium, columns: pa.Schema, events: Sequence[tuple[bytes, bytes | None]], start: int) -> Rows:
        """Return the rows of events, and a tombstone for each delete."""
        decoded = form.make_decoder().decode([value for _, value in events])
        assert decoded.bad == (), [(events[at][1], problem) for at, problem in decoded.bad]
        deleted = decoded.deleted.to_pylist() if decoded.deleted is not None else [False] * len(events)
        dead = [gone or value is None for gone, (_, value) in zip(deleted, events, strict=True)]
        lines = [
            {**row, "id": json.loads(key)["id"]} if gone else row
            for row, gone, (key, _) in zip(decoded.batch.to_pylist(), dead, events, strict=True)
        ]
        offsets = pa.array(range(start, start + len(events)), pa.int64())
        return Rows(pa.RecordBatch.from_pylist(lines, columns), offsets, pa.array(dead) if any(dead) else None)


def read(windows: Windows, window: FrozenWindow) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield keys and values of the records of a window."""
    for record in windows.read(window):
        value = record["value"]
        yield json.dumps(record["key"]).encode(), None if value is None else json.dumps(value).encode()


def plain(value: Any) -> Any:
    """Return a value of the server, or of the copy, in a form that compares."""
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value)
    if isinstance(value, list):
        return tuple(value)
    return value.astimezone(timezone.utc).replace(tzinfo=None) if getattr(value, "tzinfo", None) is not None else value


def compare_copies(table: Captured, directory: Path) -> int:
    """Copy a table into lakes, while its rows and columns change. Return the number of rows that were compared."""
    options: dict[str, Any] = {"mode": "upsert", "key": "id", "delete_enabled": True, "auto_evolve": True}
    lakes = [DeltaCase(directory / "delta" / "t", **options), IcebergCase(directory / "iceberg" / "t", **options)]
    print(f"copies of {type(table).__name__}: seed {SEED}")
    files = FilesCase(directory / "files" / "t", "parquet", auto_evolve=True)
    topic, compared, turn = Topic(), 0, 0
    deadline = time.monotonic() + MINUTES * 30  # for each of two databases
    while turn < TURNS or time.monotonic() < deadline:
        turn += 1
        table.change_some()
        while True:
            window = table.windows.freeze()
            # Before its chunks are read, or behind them. The first turn reads the snapshot.
            if table.chance.random() < (0.7 if turn == 1 else 0.3):
                table.change_some()
            events = list(read(table.windows, window))
            if table.chance.random() < (0.7 if turn == 1 else 0.3):
                table.change_some()
            is_left = table.windows.close(window)
            copy(lakes, files, topic.job(events, table.schema()))
            if not is_left:
                break
        # The last window may lie before changes that were made meanwhile.
        copy(lakes, files, topic.job(list(read_rest(table.windows)), table.schema()))
        names = ["id", *table.columns]
        expected = [tuple(map(plain, row)) for row in table.rows(f"SELECT {', '.join(map(table.shown, names))} FROM t")]
        for rows in (*(lake.read(*names) for lake in lakes), last_rows(files)):
            compared += same_multiset(expected, [tuple(plain(row.get(name)) for name in names) for row in rows])
    print(f"{turn} turns, {compared} rows compared")
    return compared


def copy(lakes: Sequence[DeltaCase | IcebergCase], files: FilesCase, job: Job) -> None:
    for lake in lakes:
        lake.schema = job.shape.schema
        apply(lake.sink, job)
    apply(files.sink, as_changes(job))


def as_changes(job: Job) -> Job:
    """Return the rows of a job with their offsets and a mark of those that are deleted: files know no deletes."""
    data = {}
    for partition, batches in job.rows.items():
        data[partition] = []
        for rows in batches:
            gone = rows.tombstones if rows.tombstones is not None else pa.array([False] * len(rows.offsets))
            batch = rows.batch.append_column("gone", gone).append_column("at", rows.offsets)
            data[partition].append(Rows(batch, rows.offsets))
    columns = job.shape.schema.append(pa.field("gone", pa.bool_())).append(pa.field("at", pa.int64()))
    return Job(job.window, job.splits, Shape(job.shape.pipeline, columns), data)


def last_rows(files: FilesCase) -> list[dict[str, Any]]:
    """Return the last row of each key, without those that are deleted. All rows of a key are in one partition."""
    found = [row for file in files.files() for row in pq.read_table(file, partitioning=None).to_pylist()]
    last = {row["id"]: row for row in sorted(found, key=itemgetter("at"))}
    return [row for row in last.values() if not row["gone"]]


def read_rest(windows: Windows) -> Iterator[tuple[bytes, bytes | None]]:
    """Yield the records of the windows until nothing remains."""
    while True:
        window = windows.freeze()
        yield from read(windows, window)
        if not windows.close(window):
            return
