"""Windows that pipelines have moved, written into a real ledger as the operators write them; no Spark takes part."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from functools import cached_property
from typing import Any

from confluent_kafka import Producer

from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.ledger.attempt import Ledger
from airflow_kafka_spark.ledger.topic import TOPIC, LedgerTopic
from airflow_kafka_spark.testing import EmbeddedKafka
from airflow_kafka_spark.windows.dead_letters import Batch, DeadLetters
from airflow_kafka_spark.windows.memory import make_dead_letters_record
from airflow_kafka_spark.windows.model import Gap, Landed, OffsetRange, SourcePlan, TopicPartition, Window
from airflow_kafka_spark.windows.report import Report
from airflow_kafka_spark.windows.times import Latency

AWKWARD = ["a/b/c", "dots.and..dots", "späße-日本", 'it\'s "quoted"', "<script>alert(1)</script>", "50% & more?=#"]
"""Names that pages and addresses have to bear."""

LEDGER = "kafka_default/airflow-windows"


class StaticHook(KafkaHook):
    """A hook of the cluster that needs no Airflow connection."""

    def __init__(self, config: dict[str, Any], timeout: float = 30.0) -> None:
        super().__init__("kafka_default", timeout)
        self.__dict__["config"] = config


@dataclass
class Past:
    """:param kafka: the cluster. Leaving the context releases the clients."""

    kafka: EmbeddedKafka

    @cached_property
    def hook(self) -> KafkaHook:
        return StaticHook(self.kafka.connection_extra())

    def __enter__(self) -> Past:
        return self

    def __exit__(self, *exc: object) -> None:
        self.hook.close()

    def write(self) -> None:
        """Write the state that tests of the UI find."""
        for topic in ("ui-orders", "ui-odd", "ui-copied"):
            self.kafka.create_topic(topic, 3)
        self.produce("ui-orders", 300)
        self.produce("ui-odd", 60)
        self.move("billing/copy", 3, ["ui-orders"], 10, run="billing/manual__{n}/copy", group="ui-copy")
        for number, name in enumerate(AWKWARD):
            self.move(name, 2, ["ui-odd"], 5, run=f"odd/manual__{{n}}/odd_{number}", group=f"ui-odd-{number}")

    def produce(self, topic: str, count: int, *, hours_ago: float = 0.0) -> None:
        producer = Producer(self.kafka.connection_extra())
        written = int((time.time() - hours_ago * 3600) * 1000)
        for number in range(count):
            producer.produce(topic, json.dumps({"id": number}).encode(), partition=number % 3, timestamp=written)
        assert producer.flush(60) == 0

    def move(
        self,
        pipeline: str,
        count: int,
        topics: Sequence[str],
        each: int,
        *,
        run: str,
        group: str,
        leave_open: bool = False,
        ledger_topic: str = TOPIC,
        lost: int = 0,
    ) -> None:
        """Move windows of ``each`` offsets a partition, an hour apart, the last one now.

        :param run: with ``{n}`` for the number of the window.
        :param leave_open: plan one more and leave it.
        :param lost: the first offsets of each partition of the last window, which were deleted before they could be read.
        """
        for turn in range(1, count + leave_open + 1):
            with Ledger(self.hook, pipeline, "", group_id=group, topic=ledger_topic, hint_topics=topics) as ledger:
                number = ledger.memory.last_number + 1
                ledger.run = run.format(n=number)
                described = self.hook.describe_topics(topics)
                position = ledger.memory.position.offsets
                tps = [tp for topic in described.values() for tp in topic.topic_partitions]
                skipped = lost if turn == count else 0
                starts = {tp: position.get(tp, 0) + skipped for tp in tps}
                ranges = tuple(OffsetRange(*tp, starts[tp], position.get(tp, 0) + each) for tp in tps)
                gaps = tuple(Gap(*tp, starts[tp] - skipped, starts[tp]) for tp in tps if skipped)
                ago = timedelta(hours=max(0, count - turn))
                planned_at = datetime.now(timezone.utc) - ago
                window = Window(
                    pipeline, number, ranges, ledger.run, _iso(planned_at), self.hook.read_cluster_id(),
                    {name: topic.topic_id for name, topic in described.items()}, gaps=gaps,
                )  # fmt: skip
                entry = ledger.plan(window)
                if turn > count:
                    return
                report = self._report(entry.window, each - skipped, group, _iso(planned_at + timedelta(seconds=4)))
                ledger.close(report.to_dict(), window.ends)

    def publish(self, pipeline: str, count: int, topic: str, *, run: str, source: str) -> None:
        """Publish windows of rows of a source, an hour apart, the last one now.

        :param run: with ``{n}`` for the number of the window.
        """
        for turn in range(1, count + 1):
            with Ledger(self.hook, pipeline, run.format(n=turn), group_id=f"{TOPIC}.{pipeline}", topic=TOPIC) as ledger:
                planned_at = datetime.now(timezone.utc) - timedelta(hours=count - turn)
                plan = SourcePlan(({"from": turn}, {"from": turn + 1}), {"id": turn}, 1000 * turn)
                entry = ledger.plan(
                    Window(pipeline, turn, (), ledger.run, _iso(planned_at), self.hook.read_cluster_id(), source=plan)
                )
                published = Landed(topic, 0, 1000 * (turn - 1), 1000 * turn, 1000 * turn)
                report = Report(
                    entry.window, records_read=1000 * turn, records_written=1000 * turn - turn, records_rejected=turn,
                    bytes=80_000 * turn, published=(published,), sink=f"kafka://kafka_default/{topic}", source=source,
                    timings={
                        "fence": 0.1, "plan": 0.3, "move": 4.0 + turn, "session": 2.0, "workers": 0.5, "read": 0.2 * turn,
                        "decode": 0.1 * turn, "write": 0.4 * turn, "wait": 1.5 + 0.3 * turn, "close": 0.2, "total": 4.6 + turn,
                    },
                    guarantee="exactly-once, split by split", completed_at=_iso(planned_at + timedelta(seconds=5)),
                )  # fmt: skip
                ledger.close(report.to_dict(), {})

    def bury(self, pipeline: str, window: int, topic: str, letters: Sequence[tuple[bytes | None, bytes | None]]) -> None:
        """Send dead letters, with one of another pipeline between them, and record in the ledger that a window has sent them."""
        self.kafka.create_topic(topic, 1, config={"max.message.bytes": "2000000"})
        producer = Producer({**self.kafka.connection_extra(), "message.max.bytes": 2_000_000})
        for number, (key, value) in enumerate(letters):
            producer.produce(topic, value, key, headers=_context(pipeline, number))
            if not number:
                producer.produce(topic, b"somebody else's", headers=_context("another", 0))
        assert producer.flush(60) == 0
        landed = Landed(topic, 0, 0, len(letters), len(letters))
        offsets = {TopicPartition("ui-orders", 0): ((7, 7 + len(letters)),)}
        record = make_dead_letters_record(pipeline, DeadLetters(window, topic, (Batch(0, "t", offsets, (landed,)),)))
        self.write_record(pipeline, record.key, record.value)

    def write_record(self, pipeline: str, key: bytes, value: bytes | None, topic: str = "airflow-windows") -> None:
        """Write a record unchanged, to the partition of this pipeline's records."""
        ledger = LedgerTopic(self.hook, topic)
        ledger.ensure()
        producer = Producer(self.kafka.connection_extra())
        producer.produce(topic, value, key, partition=ledger.find_partition(pipeline))
        assert producer.flush(60) == 0

    def _report(self, window: Window, each: int, group: str, completed_at: str) -> Report:
        read = each * len(window.ranges)
        report = Report(
            window, records_read=read, records_written=read, records={str(tp): each for tp in window.ends}, bytes=read * 10,
            gaps=window.gaps, latency=Latency(0.5, 1.5, 2.0, 2.5),
            timings={"fence": 0.1, "move": 3.0, "total": 4.0}, group_id=group, sink="file:///tmp/table",
            guarantee="exactly-once", completed_at=completed_at,
        )  # fmt: skip
        return replace(report, committed={str(tp): end for tp, end in window.ends.items()})


def _context(pipeline: str, number: int) -> list[tuple[str, bytes]]:
    facts = {
        "topic": "ui-orders",
        "partition": 0,
        "offset": 7 + number,
        "connector.name": pipeline,
        "stage": "VALUE_CONVERTER",
        "exception.class.name": "airflow_kafka_spark.errors.BadRecords",
        "exception.message": "no number: <b>",
    }
    return [("<script>", b"<img>"), *((f"__connect.errors.{name}", str(fact).encode()) for name, fact in facts.items())]


def _iso(instant: datetime) -> str:
    return instant.isoformat(timespec="milliseconds").replace("+00:00", "Z")
