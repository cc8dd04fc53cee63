"""Arrow columns -> Kafka, in one transaction: confluent-kafka's calls and those of the package ``librdkafka``, in one process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from itertools import repeat
from statistics import median

import numpy as np
import pyarrow as pa
from confluent_kafka import Producer

from airflow_kafka_spark.testing import EmbeddedKafka
from benchmarks.measure import Stopwatch, Table, print_title

PARTITIONS, ROWS = 4, 20_000

Send = Callable[[Producer, str, list[pa.RecordBatch]], None]


def _produce_each(producer: Producer, topic: str, parts: list[pa.RecordBatch]) -> None:
    for partition, part in enumerate(parts):
        keys, values = (column.to_pylist() for column in part.columns)
        deque(map(producer.produce, repeat(topic), values, keys, repeat(partition)), maxlen=0)


def _produce_dictionaries(producer: Producer, topic: str, parts: list[pa.RecordBatch]) -> None:
    for partition, part in enumerate(parts):
        count = producer.produce_batch(topic, part.to_pylist(), partition)
        assert count == part.num_rows, count


def _produce_columns(producer: Producer, topic: str, parts: list[pa.RecordBatch]) -> None:
    from airflow_kafka_spark.librdkafka.tasks.produce import RecordArray

    for partition, part in enumerate(parts):
        order, where = np.arange(part.num_rows), np.full(part.num_rows, partition)
        queued = RecordArray(part["key"], part["value"], order, where).produce(producer, topic)
        assert queued.error is None, queued


CANDIDATES: dict[str, Send] = {
    "confluent-kafka, `Producer.produce`": _produce_each,
    "confluent-kafka, `Producer.produce_batch`": _produce_dictionaries,
    "the package `librdkafka`": _produce_columns,
}


def run(records: int, rounds: int) -> None:
    """Print microseconds of a core per record, in turns, of this process and of its main thread.

    :param records: of about 95 bytes.
    """
    numbers = range(records)
    keys = pa.array([str(n) for n in numbers]).cast(pa.binary())
    values = pa.array(
        [f'{{"id":{n},"customer":"customer-{n % 10_000}","amount":{n % 1000}.50,"at":"2026-06-15T12:00:00Z"}}' for n in numbers]
    )
    rows = pa.record_batch([keys, values.cast(pa.binary())], ["key", "value"])
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in CANDIDATES}
    with EmbeddedKafka(jvm_options=("-Xmx1g",)) as kafka:
        kafka.create_topic("sent", PARTITIONS)
        for turn in range(rounds + 1):
            for name, send in CANDIDATES.items():
                used = _send_all(kafka, f"{name}-{turn}", rows, send)
                if turn:
                    found[name].append(used)
    print_title("Arrow columns -> Kafka, microseconds of a core per record")
    table = Table("", "process", "its main thread")
    for name, turns in found.items():
        table.row(name, *(f"{median(of) / records * 1e6:.2f}" for of in zip(*turns, strict=True)))


def _send_all(kafka: EmbeddedKafka, name: str, rows: pa.RecordBatch, send: Send) -> tuple[float, float]:
    """Send rows in one transaction, and return the CPU seconds of this process and of this thread."""
    producer = Producer({
        "bootstrap.servers": kafka.bootstrap_servers, "transactional.id": name, "compression.type": "lz4", "linger.ms": 50,
        "batch.size": 1 << 20, "queue.buffering.max.messages": 10_000_000, "queue.buffering.max.kbytes": 2 << 20,
    })  # fmt: skip
    producer.init_transactions(60)
    producer.begin_transaction()
    # The partitions are known to the client then.
    for partition in range(PARTITIONS):
        producer.produce("sent", b"first", b"first", partition)
    producer.flush(60)
    step = ROWS // PARTITIONS
    with Stopwatch() as process, Stopwatch(time.thread_time) as thread:
        for start in range(0, rows.num_rows, ROWS):
            send(producer, "sent", [rows.slice(start + step * n, step) for n in range(PARTITIONS)])
            producer.poll(0)
        assert producer.flush(60) == 0
    producer.commit_transaction(60)
    return process.cpu, thread.cpu
