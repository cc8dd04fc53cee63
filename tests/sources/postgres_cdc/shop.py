"""Tables whose changes are captured into topics and applied to a copy: the pipelines, and the check that table and copy are
equal.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deltalake import DeltaTable
from psycopg.errors import LockNotAvailable

from airflow_kafka_spark.formats import Debezium, Json, Raw
from airflow_kafka_spark.operators import KafkaToSinkOperator, SourceToKafkaOperator
from airflow_kafka_spark.sinks import DeltaSink, IcebergSink, KafkaSink, PostgresSink
from airflow_kafka_spark.sinks.base import Sink
from airflow_kafka_spark.sources import PostgresCdcSource
from airflow_kafka_spark.testing import EmbeddedKafka, EmbeddedPostgres
from tests.support.oracle import committed_records, same_multiset
from tests.support.pipelines import SPARK, create_ledger
from tests.support.runs import Attempts

COLUMNS = "note text, amount numeric(12,2), at timestamptz, local timestamp, day date, flag boolean, ratio float8, raw bytea"
COLUMN_NAMES = "id, note, amount, at, local, day, flag, ratio, raw"
SCHEMA = (
    "id bigint, note string, amount decimal(12,2), at timestamp, local timestamp_ntz, day date, flag boolean, ratio double, "
    "raw binary"
)


def capture(source: dict[str, Any], **options: Any) -> SourceToKafkaOperator:
    """Build the operator that captures changes, in this process or another."""
    sink = KafkaSink(topic_column="topic", key="key", key_format=Raw(), value_columns=["value"], value=Raw())
    return SourceToKafkaOperator(task_id="task", source=PostgresCdcSource("shop", **source), sink=sink, **options)


UPSERT: dict[str, Any] = {"mode": "upsert", "key": ["id"], "delete_enabled": True}


def apply_changes(topic: str, sink: Sink, **options: Any) -> KafkaToSinkOperator:
    """Build the operator that applies the changes."""
    return KafkaToSinkOperator(
        task_id="apply",
        group_id=f"{options['pipeline']}-apply",
        topics=[topic],
        value=Debezium(Json(schema=SCHEMA), timestamps="micros", decimals="unscaled"),
        key=Json(schema="id bigint"),
        sink=sink,
        **options,
    )


@dataclass(kw_only=True)
class Captured(Attempts):
    """Tables ``kept`` (upserted into ``kept_copy``) and ``cut`` (which is truncated, too), and the pipelines.

    :ivar shapes: decides which columns come and go.
    :ivar extra: the columns that have come, per table.
    """

    make = staticmethod(capture)

    kafka: EmbeddedKafka
    postgres: EmbeddedPostgres
    name: str
    random: random.Random
    snapshot: dict[str, Any] = field(default_factory=dict)
    connection: Any = field(default=None, repr=False)
    shapes: random.Random = field(default_factory=lambda: random.Random(19), repr=False)
    extra: dict[str, list[str]] = field(default_factory=lambda: {"kept": [], "cut": []}, repr=False)

    @property
    def slot(self) -> str:
        return self.name.replace("-", "_")

    def table(self, kind: str) -> str:
        return f"{kind}_{self.slot}"

    def topic(self, kind: str) -> str:
        return f"{self.name}.public.{self.table(kind)}"

    @property
    def arguments(self) -> dict[str, Any]:
        source = {
            "publication": self.slot,
            "slot": self.slot,
            "topic_prefix": self.name,
            "skipped_operations": (),
            "max_wal_bytes": 1 << 16,
            **self.snapshot,
        }
        own = {"source": source, "pipeline": self.name, "ledger_topic": f"ledger-{self.name}"}
        return {**own, **self.options}

    # --- changes ---

    def change(self, count: int, connection: Any = None) -> None:
        """Make random changes, in transactions of a few, and now and then another column, one less, or another type of one."""
        session = connection or self.connection
        for _ in range(count):
            if self.shapes.random() < 0.05:
                self._alter(session)
            with session.transaction():
                for _ in range(self.random.randint(1, 4)):
                    self._one(session, "kept" if self.random.random() < 0.7 else "cut")

    def _alter(self, session: Any) -> None:
        """Change the columns of a table, unless a transaction or a chunk that is read has it."""
        kind = self.shapes.choice(("kept", "cut"))
        extra, pick = self.extra[kind], self.shapes.random()
        after = list(extra)
        if pick < 0.5 or not extra:
            after.append(f"extra{self.shapes.randrange(10**9)}")
            change = f"ADD COLUMN {after[-1]} {self.shapes.choice(('int', 'text', 'numeric(8,2)'))} DEFAULT '7'"
        elif pick < 0.8:
            change = f"DROP COLUMN {after.pop(self.shapes.randrange(len(extra)))}"
        else:
            change = f"ALTER COLUMN {self.shapes.choice(extra)} TYPE text"
        try:
            with session.transaction():
                session.execute("SET LOCAL lock_timeout = '20ms'")
                session.execute(f"ALTER TABLE {self.table(kind)} {change}".encode())
        except LockNotAvailable:
            return
        self.extra[kind] = after

    def _one(self, session: Any, kind: str) -> None:
        pick, table = self.random.random(), self.table(kind)
        id, other = self.random.randint(1, 60), self.random.randint(1, 60)
        values = (
            f"'nö\"te {self.random.randint(0, 999)}', {self.random.randint(-(10**9), 10**9)} / 100.0, "
            f"timestamptz '1960-01-01 00:00:00.000001+00' + {self.random.randint(0, 10**9)} * interval '2 s', "
            f"timestamp '0099-12-31 23:59:59.5' + {self.random.randint(0, 10**6)} * interval '1 day', "
            f"date '1900-01-01' + {self.random.randint(0, 90000)}, {self.random.choice(('true', 'false', 'NULL'))}, "
            f"{self.random.random()} / 3, '\\x{self.random.randint(0, 2**32):010x}'"
        )
        if kind == "cut" and pick < 0.05:
            session.execute(f"TRUNCATE {table}".encode())
        elif pick < 0.5:
            names = COLUMNS.split(", ")
            update = ", ".join(f"{name} = excluded.{name}" for name in (part.split()[0] for part in names))
            insert = f"INSERT INTO {table} VALUES ({id}, {values}) ON CONFLICT (id) DO UPDATE SET {update}"
            session.execute(insert.encode())
        elif pick < 0.65:
            session.execute(f"UPDATE {table} SET note = NULL, amount = -amount WHERE id BETWEEN {id} AND {id + 5}".encode())
        elif pick < 0.8:
            change = f"UPDATE {table} SET id = {other} WHERE id = {id} AND NOT EXISTS (SELECT FROM {table} WHERE id = {other})"
            session.execute(change.encode())
        else:
            session.execute(f"DELETE FROM {table} WHERE id BETWEEN {id} AND {id + 2}".encode())

    # --- drain and compare ---

    def drain(self, name: str) -> None:
        """Capture and apply until no change is left."""
        for number in range(100):
            report = self.run(f"{name}-{number}")
            if not report["source_bytes_behind"] and "source_remaining" not in report:
                break
        self._apply(name, "apply", PostgresSink("shop", self.table("kept_copy"), **UPSERT))

    def _apply(self, run: str, pipeline: str, sink: Sink) -> None:
        options = {"pipeline": f"{self.name}-{pipeline}", "ledger_topic": f"ledger-{self.name}"}
        apply_changes(self.topic("kept"), sink, **options).execute(_context(run))

    def compare_lakes(self, name: str) -> None:
        """Apply the changes to a Delta and an Iceberg table, too, and compare these with the table."""
        warehouse = self.directory / "lake"
        options = {"type": "sql", "uri": f"sqlite:///{warehouse}.db", "warehouse": f"file://{warehouse}"}
        os.environ["AIRFLOW_CONN_LAKE"] = json.dumps({"conn_type": "iceberg", "extra": {"name": "lake", **options}})
        self._apply(name, "delta", DeltaSink(f"{warehouse}/delta", **UPSERT))
        self._apply(name, "iceberg", IcebergSink("shop.kept", "lake", **UPSERT))
        with IcebergSink("shop.kept", "lake").open() as lake:
            iceberg = lake.load_newest("reading").scan().to_arrow()
        columns = COLUMN_NAMES.split(", ")
        kept = self.connection.execute(f"SELECT {COLUMN_NAMES} FROM {self.table('kept')}").fetchall()
        for found in (DeltaTable(f"{warehouse}/delta").to_pyarrow_table(), iceberg):
            rows = zip(*(found.column(column).to_pylist() for column in columns), strict=True)
            same_multiset(kept, rows)

    def events(self, kind: str) -> list[tuple[str, Any, Any]]:
        """Return operation, key and new row of each event of a table, without tombstones; those of a key are in order."""
        found = []
        for _, _, key, value in committed_records(self.kafka.connection_extra(), self.topic(kind)):
            if value is not None:
                event = json.loads(value)
                found.append((event["op"], json.loads(key)["id"] if key is not None else None, event["after"]))
        return found

    def compare(self) -> int:
        """Compare the copy with its table, and the changes of the table that was truncated with that."""
        kept, copy = (
            self.connection.execute(f"SELECT {COLUMN_NAMES} FROM {self.table(kind)}").fetchall() for kind in ("kept", "kept_copy")
        )
        assert len({row[0] for row in copy}) == len(copy)
        compared = same_multiset(kept, copy)
        cut: dict[int, Any] = {}
        missing = object()
        for op, id, after in self.events("cut"):
            if op == "t":
                cut.clear()
            elif op == "d":
                assert cut.pop(id, missing) is not missing, "an event is missing, or there twice"
            else:
                assert (op == "u") == (id in cut), "an event is missing, or there twice"
                cut[id] = after["note"]
        found = self.connection.execute(f"SELECT id, note FROM {self.table('cut')}").fetchall()
        assert dict(found) == cut
        return compared


def _context(run_id: str) -> dict[str, Any]:
    from tests.support.runs import context

    return context(run_id, task_id="apply")


@contextmanager
def captured(
    kafka: EmbeddedKafka, postgres: EmbeddedPostgres, unique: Callable[[str], str], directory: Path, seed: int, **snapshot: Any
) -> Iterator[Captured]:
    """New tables, topics, ledger and slot.

    :param snapshot: the source's options of a snapshot; the tables have rows then.
    """
    name = unique("cdc")
    made = Captured(kafka=kafka, postgres=postgres, name=name, directory=directory, random=random.Random(seed), snapshot=snapshot)
    for kind, partitions in (("kept", 3), ("cut", 1)):
        kafka.create_topic(made.topic(kind), partitions)
    create_ledger(kafka, made.name)
    os.environ["AIRFLOW_CONN_KAFKA_DEFAULT"] = kafka.connection_json()
    os.environ["AIRFLOW_CONN_SPARK_DEFAULT"] = SPARK
    os.environ["AIRFLOW_CONN_SHOP"] = postgres.connection_uri()
    with postgres.connect(autocommit=True) as connection:
        made.connection = connection
        connection.execute("SET TimeZone = 'UTC'")
        for kind in ("kept", "cut", "kept_copy"):
            connection.execute(f"CREATE TABLE {made.table(kind)} (id bigint PRIMARY KEY, {COLUMNS})")
        if snapshot:
            made.change(60)
        connection.execute(f"CREATE PUBLICATION {made.slot} FOR TABLE {made.table('kept')}, {made.table('cut')}")
        try:
            yield made
        finally:
            made.end_victims()
            of_slot = f"FROM pg_replication_slots WHERE slot_name = '{made.slot}'"
            connection.execute(f"SELECT pg_terminate_backend(active_pid, 10000) {of_slot} AND active_pid > 0")
            connection.execute(f"SELECT pg_drop_replication_slot(slot_name) {of_slot}")
            connection.execute(f"DROP PUBLICATION {made.slot}")
            connection.execute(f"DROP TABLE {', '.join(made.table(kind) for kind in ('kept', 'cut', 'kept_copy'))}")
