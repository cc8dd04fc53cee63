"""A table whose changes are captured into a topic: the pipeline, and the check that the events rebuild the table."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pymysql

from airflow_kafka_spark.formats import Debezium, Json, Raw
from airflow_kafka_spark.operators import KafkaToSinkOperator, SourceToKafkaOperator
from airflow_kafka_spark.sinks import KafkaSink, PostgresSink
from airflow_kafka_spark.sources import MySqlCdcSource
from airflow_kafka_spark.testing import EmbeddedKafka
from tests.sources.mysql_cdc.kit import CONN, Binlog
from tests.support.mariadb import is_mysql
from tests.support.oracle import committed_records
from tests.support.pipelines import SPARK, create_ledger
from tests.support.runs import Attempts

COLUMNS = "note varchar(40), amount decimal(12,2), at datetime(6), span time(3), kind enum('a', 'b', 'ü'), raw varbinary(20)"
SHOWN = "id, note, CAST(amount AS CHAR), CAST(at AS CHAR), TIME_TO_SEC(span) * 1000000, kind, TO_BASE64(raw)"


def capture(source: dict[str, Any], **options: Any) -> SourceToKafkaOperator:
    """Build the operator that captures changes, in this process or another."""
    sink = KafkaSink(topic_column="topic", key="key", key_format=Raw(), value_columns=["value"], value=Raw())
    return SourceToKafkaOperator(task_id="task", source=MySqlCdcSource(CONN, **source), sink=sink, **options)


def apply_changes(made: CapturedTable, table: str) -> KafkaToSinkOperator:
    """Return the operator that applies the changes to a copy of some columns in PostgreSQL."""
    schema = "id bigint, note string, amount decimal(12,2), at timestamp_ntz, raw binary"
    return KafkaToSinkOperator(
        task_id="apply",
        pipeline=f"{made.name}-apply",
        ledger_topic=f"ledger-{made.name}",
        group_id=f"{made.name}-apply",
        topics=[made.topic],
        value=Debezium(Json(schema=schema), timestamps="micros"),
        key=Json(schema="id bigint"),
        sink=PostgresSink("warehouse", table, mode="upsert", key=["id"], delete_enabled=True),
    )


@dataclass(kw_only=True)
class CapturedTable(Attempts):
    """The table ``kept``, the table ``apart`` that is not captured, and the pipeline.

    :ivar shapes: decides which columns come and go.
    :ivar extra: the columns that have come.
    """

    make = staticmethod(capture)

    kafka: EmbeddedKafka
    log: Binlog
    name: str
    random: random.Random
    snapshot: dict[str, Any] = field(default_factory=dict)
    shapes: random.Random = field(default_factory=lambda: random.Random(19), repr=False)
    extra: list[str] = field(default_factory=list, repr=False)

    @property
    def topic(self) -> str:
        return f"{self.name}.shop.kept"

    @property
    def arguments(self) -> dict[str, Any]:
        source = {
            "topic_prefix": self.name,
            "tables": ["kept"],
            "skipped_operations": (),
            "decimal_handling_mode": "string",
            "max_binlog_bytes": 1 << 16,
            **self.snapshot,
        }
        return {"source": source, "pipeline": self.name, "ledger_topic": f"ledger-{self.name}", **self.options}

    def begin(self, name: str) -> None:
        """Begin another pipeline on the table, with a new topic and a new ledger."""
        self.name = name
        self.kafka.create_topic(self.topic, 1)  # truncates have no key: in one partition they stand where they happened
        create_ledger(self.kafka, name)

    def change(self, count: int, *, truncates: bool = True) -> None:
        """Make random changes, in transactions of a few; one of ten is rolled back. Columns come, go and change now and then.

        :param truncates: False: the table is not truncated, which waits for open transactions.
        """
        for _ in range(count):
            if self.shapes.random() < 0.05:
                self._alter()
            changes = [self._change() for _ in range(self.random.randint(1, 4))]
            self.log.execute("START TRANSACTION", *changes, "ROLLBACK" if self.random.random() < 0.1 else "COMMIT")
        if self.random.random() < 0.3:
            self.log.execute("FLUSH BINARY LOGS")
        if truncates and self.random.random() < 0.3:
            self.log.execute("TRUNCATE TABLE kept")

    def _alter(self) -> None:
        """Change the columns of the table, unless a transaction or a chunk that is read has it."""
        after, pick = list(self.extra), self.shapes.random()
        if pick < 0.5 or not after:
            after.append(f"extra{self.shapes.randrange(10**9)}")
            kind, place = self.shapes.choice(("int", "text", "decimal(8,2)")), self.shapes.choice(("FIRST", "AFTER id"))
            change = f"ADD COLUMN {after[-1]} {kind} {place}"
        elif pick < 0.8:
            change = f"DROP COLUMN {after.pop(self.shapes.randrange(len(after)))}"
        else:
            change = self.shapes.choice((f"MODIFY {self.shapes.choice(after)} varchar(40) CHARACTER SET latin1", "FORCE"))
        try:
            # MySQL has no NOWAIT.
            self.log.execute(*(["SET SESSION lock_wait_timeout = 1"] if is_mysql() else []), f"ALTER TABLE kept NOWAIT {change}")
        except pymysql.err.OperationalError as error:
            if error.args[0] not in (1205, 1213):
                raise
        else:
            self.extra = after

    def _change(self) -> str:
        table = "kept" if self.random.random() < 0.8 else "apart"
        pick, id, other = self.random.random(), self.random.randint(1, 60), self.random.randint(1, 60)
        if pick < 0.5:
            number = self.random.randint(0, 10**9)
            values = (
                f"'nö\"te {number}', {self.random.randint(-(10**9), 10**9)} / 100, "
                f"'1000-01-01 00:00:00.5' + INTERVAL {number} MINUTE, SEC_TO_TIME({number % 10**6 - 500_000}), "
                f"{self.random.randint(1, 3)}, X'{number:010x}'"
            )
            return f"REPLACE INTO {table} (id, note, amount, at, span, kind, raw) VALUES ({id}, {values})"
        if pick < 0.65:
            return f"UPDATE {table} SET note = NULL, amount = -amount WHERE id BETWEEN {id} AND {id + 5}"
        if pick < 0.8:
            return f"UPDATE IGNORE {table} SET id = {other} WHERE id = {id}"
        return f"DELETE FROM {table} WHERE id BETWEEN {id} AND {id + 2}"

    def drain(self, name: str) -> None:
        """Capture until no change is left."""
        for number in range(100):
            report = self.run(f"{name}-{number}")
            if not report["source_bytes_behind"] and not report.get("source_remaining"):
                return
        raise AssertionError("the log has no end")

    def compare(self, changed: Callable[[list[Any]], list[Any]] = list) -> int:
        """Apply all events, each of which has to fit the row that is there, and compare the result with the table. Return the
        number of events.

        :param changed: returns the records that are compared in place of those of the topic.
        """
        kept: dict[int, tuple[Any, ...]] = {}
        count, missing = 0, object()
        for _, _, key, value in changed(list(committed_records(self.kafka.connection_extra(), self.topic))):
            if value is None:
                continue
            event, id = json.loads(value), json.loads(key)["id"] if key is not None else None
            count += 1
            if event["op"] == "t":
                kept.clear()
            elif event["op"] == "d":
                assert kept.pop(id, missing) == shown(event["before"]), "an event is missing, or there twice"
            else:
                assert (event["op"] == "u") == (id in kept), "an event is missing, or there twice"
                assert event["op"] != "u" or kept[id] == shown(event["before"]), "an event is missing"
                kept[id] = shown(event["after"])
        found = {row[0]: row for row in self.log.rows(f"SELECT {SHOWN} FROM kept")}
        assert kept == {id: (*row[:4], None if row[4] is None else int(row[4]), *row[5:]) for id, row in found.items()}
        return count


def shown(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values of an event as the server writes them."""
    from datetime import datetime, timedelta

    at = row["at"] if row["at"] is None else datetime(1970, 1, 1) + timedelta(microseconds=row["at"])
    text = None if at is None else at.isoformat(" ", "microseconds")
    return row["id"], row["note"], row["amount"], text, row["span"], row["kind"], row["raw"]


@contextmanager
def captured(
    kafka: EmbeddedKafka, log: Binlog, unique: Callable[[str], str], directory: Path, seed: int, **snapshot: Any
) -> Iterator[CapturedTable]:
    """New tables, topic and ledger.

    :param snapshot: the source's options of a snapshot; the tables have rows then.
    """
    name = unique("binlog")
    made = CapturedTable(kafka=kafka, log=log, name=name, directory=directory, random=random.Random(seed), snapshot=snapshot)
    made.begin(name)
    os.environ["AIRFLOW_CONN_KAFKA_DEFAULT"] = kafka.connection_json()
    os.environ["AIRFLOW_CONN_SPARK_DEFAULT"] = SPARK
    for table in ("kept", "apart"):
        log.execute(f"CREATE TABLE {table} (id bigint PRIMARY KEY, {COLUMNS})")
    if snapshot:
        made.change(60, truncates=False)
    try:
        yield made
    finally:
        made.end_victims()
