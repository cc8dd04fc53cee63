"""Orders on one topic, their copies on another, and the check that each order has one copy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_kafka_spark.operators import KafkaToKafkaOperator
from airflow_kafka_spark.testing import EmbeddedKafka
from tests.support.clients import find_producer
from tests.support.dead_letters import BAD, PREFIX, decode_headers, is_bad
from tests.support.kafka_sinks import OF_RECORDS, with_sink
from tests.support.oracle import committed_messages, same_multiset
from tests.support.pipelines import SPARK, create_ledger, order
from tests.support.runs import Attempts
from tests.support.waiting import settled


def make(**options: Any) -> KafkaToKafkaOperator:
    """Build the operator, in this process or another."""
    return KafkaToKafkaOperator(**{"task_id": "task", **with_sink(options, OF_RECORDS)})


@dataclass(frozen=True)
class Record:
    """A record as a read_committed reader sees it."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp: int
    headers: tuple[tuple[str, bytes | None], ...]

    @property
    def content(self) -> tuple[Any, ...]:
        """Return everything that a copy keeps."""
        return self.key, self.value, self.timestamp, self.headers


@dataclass(kw_only=True)
class Relay(Attempts):
    """Two topics and the pipeline between them."""

    make = staticmethod(make)

    kafka: EmbeddedKafka
    name: str
    topic: str
    output: str
    partitions: int = 3
    _sent: int = 0

    # --- events ---

    def send(self, count: int) -> None:
        """Send more orders, keyed by customer. Every third order has headers."""
        self.records_in(
            (f"customer-{n % 97}".encode(), order(n), {"n": str(n).encode()} if n % 3 == 0 else None)
            for n in range(self._sent, self._sent + count)
        )
        self._sent += count

    def records_in(self, records: Any) -> None:
        producer = find_producer(self.kafka, self.topic)
        for at, (key, value, headers) in enumerate(records):
            producer.produce(self.topic, value, key, timestamp=1_750_000_000_000 + at, headers=headers)
            producer.poll(0)
        assert producer.flush(60) == 0

    def send_mixed(self, count: int, every: int) -> int:
        """Send more orders, and after each ``every`` orders a bad record with headers. Return the number of bad records."""
        records: list[tuple[bytes | None, bytes | None, Any]] = []
        for n in range(self._sent, self._sent + count):
            records.append((f"customer-{n % 97}".encode(), order(n), [("n", b"%d" % n), ("n", None)] if n % 3 == 0 else None))
            if n % every == every - 1:
                headers = [("trace", b"%d" % n), ("trace", None), ("bytes", b"\x00\xff")]
                records.append((b"bad-%d" % n if n % 2 else None, BAD[len(records) % len(BAD)], headers))
        self._sent += count
        self.records_in(records)
        return len(records) - count

    # --- runs ---

    @property
    def arguments(self) -> dict[str, Any]:
        own = {
            "topics": self.topic, "topic": self.output, "group_id": self.name, "pipeline": self.name,
            "ledger_topic": f"ledger-{self.name}",
        }  # fmt: skip
        return {**own, **self.options}

    # --- what is there now ---

    def read(self, topic: str, *, stable: bool = True) -> list[Record]:
        """Return every committed record, read without the provider's code.

        :param stable: False if a transaction is open on purpose and must not be awaited.
        """
        return [
            Record(m.partition(), m.offset(), m.key(), m.value(), m.timestamp()[1], tuple(m.headers() or ()))
            for m in committed_messages(self.kafka.connection_extra(), topic, stable=stable)
        ]

    def check(self, becomes: Callable[[Record], Any] = lambda r: r.content, found: Callable[[Record], Any] | None = None) -> int:
        """Assert that the result of every record exists once, that offsets and output agree, and that no transaction of ours is
        open.

        :param becomes: what is expected of a record, None where it is left out.
        :param found: what is compared of a record that is there.
        """
        from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

        settled(self.output, self.arguments["ledger_topic"])
        expected = [what for record in self.read(self.topic) if (what := becomes(record)) is not None]
        compared = same_multiset(expected, map(found or (lambda r: r.content), self.read(self.output)))
        with KafkaHook() as hook:
            offsets = hook.read_offsets([self.topic])
            committed = hook.read_committed_offsets(self.name, offsets)
            assert len(committed) == self.partitions
            assert {tp: there and there.offset for tp, there in committed.items()} == {tp: o.lso for tp, o in offsets.items()}
        return compared

    def check_sorted_out(
        self, dead: str, becomes: Callable[[Record], Any] = lambda r: r.content, bad: Callable[[Record], bool] | None = None
    ) -> tuple[int, int]:
        """Check that each record is in the output or a dead letter, exactly once, and that a dead letter equals the record.
        Return the numbers of both.

        :param becomes: the expected copy of a good record, None if it is left out.
        :param bad: which records are bad; default: those that are no orders.
        """
        wrong = bad or (lambda r: is_bad(r.value))
        good = self.check(lambda r: None if wrong(r) else becomes(r))
        settled(dead)
        there = []
        for letter in self.read(dead):
            facts = decode_headers(list(letter.headers))
            own = tuple(header for header in letter.headers if not header[0].startswith(PREFIX))
            there.append((facts["topic"], int(facts["partition"]), int(facts["offset"]), *letter.content[:3], own))
        expected = [(self.topic, r.partition, r.offset, *r.content) for r in self.read(self.topic) if wrong(r)]
        return good, same_multiset(expected, there)


@contextmanager
def relay(
    kafka: EmbeddedKafka, unique: Callable[[str], str], directory: Path, *, partitions: int = 3, **options: Any
) -> Iterator[Relay]:
    """Create a topic with so many partitions and another one with four, and set connections in the environment."""
    name, topic, output = unique("relay"), unique("in"), unique("out")
    kafka.create_topic(topic, partitions)
    kafka.create_topic(output, 4)
    create_ledger(kafka, name)
    os.environ["AIRFLOW_CONN_KAFKA_DEFAULT"] = kafka.connection_json()
    os.environ["AIRFLOW_CONN_SPARK_DEFAULT"] = SPARK
    made = Relay(
        kafka=kafka, name=name, topic=topic, output=output, partitions=partitions, directory=directory, options=dict(options)
    )
    try:
        yield made
    finally:
        made.end_victims()


def decoded(record: Record) -> dict[str, Any]:
    """Return a record's value, with decimals as text."""
    assert record.value is not None
    return json.loads(record.value, parse_float=str)
