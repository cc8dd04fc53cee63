"""A pipeline with a real broker, but without Spark and sink: it has only its ledger."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from airflow_kafka_spark.control.pipelines import read_pipeline
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.hooks.kafka.log import read_log
from airflow_kafka_spark.ledger.attempt import Ledger, format_utc_now
from airflow_kafka_spark.windows.memory import Memory
from airflow_kafka_spark.windows.model import OffsetRange, TopicPartition, Window
from tests.support.clients import find_producer
from tests.support.control import reset
from tests.support.oracle import wait_stable

BASE = 1_750_000_000_000


@dataclass
class Piped:
    """A pipeline without Spark and sink: windows are planned and closed in its ledger alone."""

    kafka: Any
    hook: KafkaHook
    name: str
    topic: str
    ledger_topic: str
    run: int = 0
    opened: list[Any] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        return {"ledger_topic": self.ledger_topic}

    def tp(self, partition: int) -> TopicPartition:
        return TopicPartition(self.topic, partition)

    def ledger(self, run: str = "", **options: Any) -> Ledger:
        given = {"group_id": self.name, "topic": self.ledger_topic, "hint_topics": (self.topic,), **options}
        return Ledger(self.hook, self.name, run or f"run{self.run}", **given)

    def window(self, ledger: Ledger, *ends: int, **facts: Any) -> Window:
        self.run += 1
        position, log = ledger.memory.position, read_log(self.hook, [self.topic])
        ranges = tuple(OffsetRange(self.topic, p, position.offsets.get(self.tp(p), 0), end) for p, end in enumerate(ends))
        number = ledger.memory.last_number + 1
        given = {"cluster_id": log.cluster_id, "topic_ids": log.topic_ids, "moved": position.moved, **facts}
        return Window(self.name, number, ranges, f"run{self.run}", format_utc_now(), **given)

    def settle(self) -> None:
        """Wait until readers that do not fence see the records whose commit was acknowledged."""
        assert wait_stable(self.kafka.connection_extra(), self.ledger_topic), (
            "a transaction is open: nothing shall wait for its end"
        )

    def move(self, *ends: int) -> None:
        """Plan and close one window up to these offsets."""
        with self.ledger() as ledger:
            entry = ledger.plan(self.window(ledger, *ends))
            report = {
                "group_id": self.name,
                "completed_at": format_utc_now(),
                "records_read": entry.window.span,
                "timings": {"total": 1.5},
            }
            ledger.close(report, entry.window.ends)
        self.settle()

    def open_window(self, *ends: int, **facts: Any) -> Window:
        """Plan a window whose task then dies."""
        with self.ledger() as ledger:
            window = ledger.plan(self.window(ledger, *ends, **facts)).window
        self.settle()
        return window

    def committed(self) -> list[int | None]:
        found = self.hook.read_committed_offsets(self.name, [self.tp(p) for p in range(2)])
        return [there.offset if (there := found[self.tp(p)]) else None for p in range(2)]

    @property
    def memory(self) -> Memory:
        """Return the present state of the pipeline in the ledger."""
        self.settle()
        return read_pipeline(self.hook, self.name, self.ledger_topic).memory

    def stands(self) -> list[int]:
        offsets = self.memory.position.offsets
        return [offsets[tp] for tp in sorted(offsets)]

    def reset(self, to: Any, why: str = "a test", **options: Any):
        self.settle()
        done = reset(self.hook, self.name, to, why=why, **{**self.place, **options})
        self.settle()
        return done

    def everything(self) -> tuple[int, list[int | None]]:
        """Return everything that a refusal must not change: the end of the ledger's partition, and the group."""
        self.settle()
        partition = read_pipeline(self.hook, self.name, self.ledger_topic).partition
        end = self.hook.read_offsets([TopicPartition(self.ledger_topic, partition)])
        return sum(o.high for o in end.values()), self.committed()


def fill(piped: Piped) -> Piped:
    """Create the topic with two partitions of 20 records, a second apart, and delete the first two records of partition 0."""
    piped.kafka.create_topic(piped.topic, 2)
    producer = find_producer(piped.kafka, piped.topic)
    for offset in range(20):
        for partition in range(2):
            producer.produce(piped.topic, b"v" * 90, b"k" * 10, partition, timestamp=BASE + 1000 * offset)
    assert producer.flush(60) == 0
    piped.hook.delete_records({piped.tp(0): 2})
    return piped
