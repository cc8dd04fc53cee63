"""A shop's database whose orders are published to a topic, and the check that each order is there once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import SourceToKafkaOperator
from airflow_kafka_spark.sources import JdbcSource
from airflow_kafka_spark.testing import EmbeddedKafka, EmbeddedPostgres
from tests.support.kafka_sinks import with_sink
from tests.support.oracle import committed_records, same_multiset
from tests.support.pipelines import SPARK, create_ledger
from tests.support.reader import Reader, same_log
from tests.support.runs import Attempts
from tests.support.waiting import settled

SPLIT = 200


def make(table: str, source: dict[str, Any] | None = None, **options: Any) -> SourceToKafkaOperator:
    """Build the operator, in this process or another."""
    given = {"conn_id": "shop", "table": table, "cursor": "id", "split_records": SPLIT, **(source or {})}
    rest = with_sink(options, value=Json(), key="id")
    return SourceToKafkaOperator(**{"task_id": "task", "source": JdbcSource(**given), **rest})


@dataclass(kw_only=True)
class Shop(Attempts):
    """A table of orders, its pipeline, and the topic."""

    make = staticmethod(make)

    kafka: EmbeddedKafka
    postgres: EmbeddedPostgres
    name: str
    table: str
    topic: str
    reader: Reader | None = None
    _sold: int = 0

    def sell(self, count: int) -> None:
        """Insert more orders."""
        with self.postgres.connect(autocommit=True) as connection:
            connection.execute(
                f"INSERT INTO \"{self.table}\" SELECT n, 'customer ' || n % 97, n % 1000 + n % 100 / 100.0, "
                f"to_timestamp(1750000000 + n) FROM generate_series({self._sold}, {self._sold + count - 1}) AS n"
            )
        self._sold += count

    @property
    def arguments(self) -> dict[str, Any]:
        own = {"table": self.table, "topic": self.topic, "pipeline": self.name, "ledger_topic": f"ledger-{self.name}"}
        return {**own, **self.options}

    # --- what is there now ---

    def rows(self) -> list[tuple[int, str, str, str]]:
        with self.postgres.connect(autocommit=True) as connection:
            found = connection.execute(
                f'SELECT id, customer, amount::text, to_char(placed_at, \'YYYY-MM-DD"T"HH24:MI:SS.US"Z"\') FROM "{self.table}"'
            ).fetchall()
        return [tuple(row) for row in found]

    def records(self, *, stable: bool = True) -> list[tuple[int, str, str, str]]:
        """Return the records that a read_committed reader of the topic sees now.

        :param stable: False if a transaction is open on purpose and must not be awaited.
        """
        found = []
        for _, _, key, value in committed_records(self.kafka.connection_extra(), self.topic, stable=stable):
            assert key is not None and value is not None
            event = json.loads(value, parse_float=str)
            assert key == str(event["id"]).encode()
            found.append((event["id"], event["customer"], str(event["amount"]), event["placed_at"]))
        return found

    @contextmanager
    def watched(self) -> Iterator[Reader]:
        """Read the topic in the background while this context is open. Afterwards, :meth:`check` compares the records that were
        read.
        """
        with Reader(self.kafka.connection_extra(), self.topic) as self.reader:
            yield self.reader

    def wait_settled(self, seconds: float = 45, also: tuple[str, ...] = ()) -> None:
        """Wait until no transaction is open in the topic, the ledger and others."""
        settled(self.topic, self.arguments["ledger_topic"], *also, seconds=seconds)

    def check(self) -> int:
        """Check that every row of the table is on the topic exactly once, for a reader who starts now and for the background
        reader, and that none of the pipeline's transactions is open.
        """
        self.wait_settled()
        compared = same_multiset(self.rows(), self.records())
        if self.reader is not None:
            there = committed_records(self.kafka.connection_extra(), self.topic)
            assert same_log(there, self.reader.caught_up()) == compared
        return compared


@contextmanager
def shop(
    kafka: EmbeddedKafka, postgres: EmbeddedPostgres, unique: Callable[[str], str], directory: Path, **options: Any
) -> Iterator[Shop]:
    """Create a table, a topic with three partitions, and connections to both in the environment."""
    name, topic, table = unique("publish"), unique("sold"), unique("shop")
    kafka.create_topic(topic, 3)
    create_ledger(kafka, name)
    os.environ["AIRFLOW_CONN_KAFKA_DEFAULT"] = kafka.connection_json()
    os.environ["AIRFLOW_CONN_SPARK_DEFAULT"] = SPARK
    os.environ["AIRFLOW_CONN_SHOP"] = postgres.connection_uri()
    with postgres.connect(autocommit=True) as connection:
        connection.execute(
            f'CREATE TABLE "{table}" (id bigint PRIMARY KEY, customer text, amount numeric(12,2), placed_at timestamptz)'
        )
    made = Shop(kafka=kafka, postgres=postgres, name=name, table=table, topic=topic, directory=directory, options=options)
    try:
        yield made
    finally:
        made.end_victims()
