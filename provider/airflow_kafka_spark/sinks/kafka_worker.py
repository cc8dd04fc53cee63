"""Publishing one split in one Kafka transaction. Runs in Spark's tasks: imports neither Airflow nor pyspark.

Fence, look, write, and in no other order:

1. **fence**: ``init_transactions()`` on the split's own transactional id. Whoever published this split before is done, or
   refused.
2. **look** for the split's marker in the ledger. If it is there, so are the records.
3. **write**: one transaction of all records, of the dead letters, of the consumed offsets where they were read from Kafka, and,
   last, the marker.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
from confluent_kafka import Consumer, KafkaException, Producer
from confluent_kafka import TopicPartition as KafkaTopicPartition

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import (
    CountMismatch,
    Fenced,
    KafkaSparkError,
    KafkaUnavailable,
    SparkJobFailed,
    TransactionTimedOut,
)
from airflow_kafka_spark.hooks.kafka.client import ClientEvents
from airflow_kafka_spark.hooks.kafka.transactions import abort, describe, fencing_producer, is_fatal, is_fenced, send_offsets
from airflow_kafka_spark.ledger.open_transactions import OpenTransaction, abort_transaction
from airflow_kafka_spark.ledger.topic import PROMPT, LedgerPlace, read_to
from airflow_kafka_spark.sinks.dead_letters_worker import Envelope, from_bytes
from airflow_kafka_spark.sinks.kafka_fitting_worker import Fitting, Rows
from airflow_kafka_spark.sinks.kafka_incoming_worker import Incoming, Rejected
from airflow_kafka_spark.sinks.kafka_look_worker import look
from airflow_kafka_spark.sinks.kafka_refused_worker import refused
from airflow_kafka_spark.sinks.kafka_send_worker import Sender
from airflow_kafka_spark.windows.codec import encode_error, marker_to_json, result_to_json
from airflow_kafka_spark.windows.memory import LedgerRecord, Memory, marker_key, marker_record, window_key
from airflow_kafka_spark.windows.model import Landed, Marker, SplitResult, TopicPartition

PRODUCER: Mapping[str, Any] = {
    "compression.type": "lz4",
    "linger.ms": 5,
    "batch.size": 1 << 20,
    "batch.num.messages": 10_000,
    "queue.buffering.max.messages": 500_000,
    "queue.buffering.max.kbytes": 131_072,
    "allow.auto.create.topics": False,
    # As the Java client places keys, so that other producers' records of a key lie in the same partition.
    "partitioner": "murmur2_random",
}
"""Producer settings under the connection's own: measured in benchmarks/."""

FENCE_SECONDS = 60.0
YIELD_SECONDS = 30.0
"""How long a task waits for the marker of the one that has fenced it: usually its own copy, started by speculation."""


@dataclass(frozen=True)
class Consumed:
    """What the consumer group commits in the transactions of splits.

    :param group_id: the group.
    :param offsets: per split its input partition, the next offset to read, and the metadata that goes with it.
    """

    group_id: str
    offsets: Mapping[int, tuple[TopicPartition, int, str]]


@dataclass(frozen=True)
class Burial:
    """What becomes of bad records that are tolerated: they go along in the transaction of their split.

    :param topic: where they go, each as it was read, or shown where it was never a record; None: they are only counted.
    :param partitions: how many that topic has.
    :param envelope: what is written on them.
    :param counted: how many each split holds, where they were counted beforehand: a split with more is not published.
    """

    topic: str | None = None
    partitions: int = 1
    envelope: Envelope | None = None
    counted: Mapping[int, int] | None = None


@dataclass(frozen=True)
class Publisher:
    """Publishes splits of one window.

    :param config: the producer's configuration. Travels to the executors inside the pickled task only.
    :param reading: a consumer's, for the look into the ledger.
    :param ledger: where markers go, and whose window this is.
    :param prefix: what the splits' transactional ids begin with.
    :param topic: where records go that name no topic of their own.
    :param partitions: partitions per known topic: what places keys.
    :param transaction_timeout: seconds after which the broker aborts a transaction that nobody ends.
    :param consumed: where splits were read from Kafka, what they consume.
    :param burial: what becomes of bad records; None: a split that holds one is not published.
    :param conn_id: the connection, for messages.
    :param routes: topics that only transforms send records to, instead of where the others go: these are counted by themselves.
    """

    config: Mapping[str, Any] = field(repr=False)
    reading: Mapping[str, Any] = field(repr=False)
    ledger: LedgerPlace
    prefix: str
    topic: str | None
    partitions: Mapping[str, int]
    transaction_timeout: float
    consumed: Consumed | None = None
    burial: Burial | None = None
    conn_id: str = ""
    routes: frozenset[str] = frozenset()

    def publish(self, split: int, incoming: Incoming) -> Marker:
        """Publish a split, or find that it is published.

        :raises Rejected: there are bad records among it; nothing is published.
        :raises Fenced: a newer attempt owns the window, or another task works on this very split.
        :raises TransactionTimedOut: it took longer than ``transaction_timeout``.
        :raises KafkaRefused: they do not take a record; nothing is published.
        :raises KafkaUnavailable: the brokers do not answer; the split is not published, or its marker says that it is.
        """
        events, began = ClientEvents(), time.monotonic()
        try:
            producer = self._fence(split, events)
            if (there := self.look(split)) is None:
                faults.reached("publish.begin")
                began = time.monotonic()
                return self._write(producer, split, incoming)
        except (KafkaException, SystemError) as error:
            # A fatal error that is raised while callbacks run comes out of the client as a SystemError.
            there = self._resolve(error, events, split, time.monotonic() - began)
        incoming.drain()
        return there

    def _fence(self, split: int, events: ClientEvents) -> Producer:
        milliseconds = round(self.transaction_timeout * 1000)
        timeouts = {"transaction.timeout.ms": milliseconds, "message.timeout.ms": milliseconds}
        config = {**PRODUCER, **self.config, **timeouts}
        return fencing_producer(config, f"{self.prefix}{split}", self.ledger.topic, FENCE_SECONDS, events)

    def look(self, split: int) -> Marker | None:
        """The split's marker, if it is published.

        :raises Fenced: a newer attempt has claimed the window, or it is complete: whoever runs here is a zombie.
        """
        memory = self._memory(split)
        mine = memory.owned(self.ledger.number, self.ledger.token)
        if mine is None or mine.state.value != "PLANNED":
            raise Fenced(self.ledger.pipeline, self._doing(split))
        return memory.markers.get((self.ledger.number, split))

    def _memory(self, split: int) -> Memory:
        tp = TopicPartition(self.ledger.topic, self.ledger.partition)
        config = {**self.reading, **PROMPT}
        consumer = Consumer({**config, "isolation.level": "read_uncommitted"}, logger=ClientEvents())
        try:
            _, high = consumer.get_watermark_offsets(KafkaTopicPartition(*tp), timeout=FENCE_SECONDS)
        except KafkaException as error:
            raise self._unavailable(error, f"looking into {tp}") from None
        finally:
            consumer.close()
        # Not what other splits are about to write: a task that died with its marker sent would hold up all the others.
        mine = (
            window_key(self.ledger.pipeline, self.ledger.number),
            marker_key(self.ledger.pipeline, self.ledger.number, split),
        )

        def read(start: int) -> Iterator[LedgerRecord]:
            return read_to(config, tp, start, high, mine, on_open_transaction=self._end)

        return look(self.ledger, split, read, high)

    def _end(self, transaction: OpenTransaction) -> str:
        return abort_transaction({**PRODUCER, **self.config}, self.ledger.topic, transaction)

    def _write(self, producer: Producer, split: int, incoming: Incoming) -> Marker:
        producer.begin_transaction()
        sender = self._sender(producer, self.topic, self.partitions, split)
        try:
            for batch in incoming:
                sender.send(batch)
                faults.reached("publish.mid")
            dead = self._bury(producer, incoming.result) if incoming.result is not None else ()
            landed = sender.flush()
            faults.reached("publish.flushed")
            self._consume(producer, split)
            there = tuple(part for part in landed if part.topic not in self.routes)
            away = tuple(part for part in landed if part.topic in self.routes)
            marker = Marker(self.ledger.number, split, there, sender.bytes, incoming.result, dead, away)
            self._mark(producer, marker)
            faults.reached("publish.marked")
            producer.commit_transaction(self.transaction_timeout)
        except (KafkaSparkError, Rejected):
            abort(producer)
            raise
        faults.reached("publish.committed")
        return marker

    def _bury(self, producer: Producer, result: SplitResult) -> tuple[Landed, ...]:
        """Send a split's dead letters in its own transaction: they are there exactly when its other records are."""
        burial = self.burial
        if not result.rejected:
            return ()
        if burial is None:
            raise Rejected(result)
        counted = result.rejected if burial.counted is None else burial.counted.get(result.index, 0)
        if result.rejected > counted:
            found = f"split {result.index} holds {result.rejected} bad records, but held {counted} when they were counted"
            raise SparkJobFailed(f"{self.ledger.pipeline}#{self.ledger.number}", found)
        if burial.topic is None or burial.envelope is None:
            return ()
        letters = from_bytes([result.letters])
        if letters.num_rows != result.rejected:
            raise CountMismatch(f"{self.ledger.pipeline}#{self.ledger.number}", result.rejected, letters.num_rows)
        sender = self._sender(producer, burial.topic, {burial.topic: burial.partitions}, result.index, "dead letter")
        sender.send(burial.envelope.records(letters))
        return sender.flush()

    def _sender(
        self, producer: Producer, topic: str | None, partitions: Mapping[str, int], split: int, called: str = "row"
    ) -> Sender:
        return Sender(producer, topic, dict(partitions), split, self.transaction_timeout, called, self.conn_id)

    def _consume(self, producer: Producer, split: int) -> None:
        if self.consumed is None or split not in self.consumed.offsets:
            return
        offsets = [self.consumed.offsets[split]]
        send_offsets(producer, self.reading, self.consumed.group_id, offsets, self.transaction_timeout)

    def _mark(self, producer: Producer, marker: Marker) -> None:
        # Last: until the transaction ends, nobody can read the ledger's partition past this record.
        record = marker_record(self.ledger.pipeline, marker)
        producer.produce(self.ledger.topic, record.value, record.key, self.ledger.partition)
        if producer.flush(self.transaction_timeout):
            raise KafkaUnavailable(
                str(self.config.get("bootstrap.servers")), f"publishing split {marker.split}", "its marker was not acknowledged"
            )

    def _resolve(self, error: Exception, events: ClientEvents, split: int, seconds: float) -> Marker:
        """The outcome is unknown, or another task has taken over. The ledger says what happened, never the exception."""
        fenced = is_fenced(error, events)
        if (fenced or is_fatal(error)) and seconds > self.transaction_timeout:
            # The brokers refuse who took too long just as they refuse who was replaced.
            there = self.look(split)
            failure: KafkaSparkError = TransactionTimedOut(
                self.ledger.pipeline, self._doing(split), seconds, self.transaction_timeout
            )
        elif fenced:
            there = self._wait_for_other(split)
            failure = Fenced(self.ledger.pipeline, self._doing(split))
        elif is_fatal(error):
            # Most likely a fence whose own name has not come through. Fencing in return would end whoever has taken over.
            there = self._wait_for_other(split)
            failure = self._unavailable(error, self._doing(split))
        else:
            failure = self._failure(error, self._doing(split))
            # Fencing oneself ends a transaction in doubt: after that it is published, or never will be.
            try:
                self._fence(split, ClientEvents())
            except KafkaException:
                raise failure from None
            there = self.look(split)
        if there is None:
            raise failure from None
        return there

    def _wait_for_other(self, split: int) -> Marker | None:
        deadline = time.monotonic() + YIELD_SECONDS
        while (there := self.look(split)) is None and time.monotonic() < deadline:
            time.sleep(0.5)
        return there

    def _doing(self, split: int) -> str:
        return f"publishing split {split} of window {self.ledger.number}"

    def _failure(self, error: Exception, doing: str) -> KafkaSparkError:
        """A batch between two that are looked after is refused as well: then the transaction says so."""
        said = error.args[0] if isinstance(error, KafkaException) else None
        return (said and refused(said, self.conn_id, "rows")) or self._unavailable(error, doing)

    def _unavailable(self, error: BaseException, doing: str) -> KafkaUnavailable:
        return KafkaUnavailable(str(self.config.get("bootstrap.servers")), doing, describe(error))


@dataclass(frozen=True)
class PublishTask:
    """The function that Spark maps over the partitions of a source (``mapInArrow``): partition ``i`` is split ``splits[i]``.

    :param publisher: publishes them; None: they are only counted.
    :param splits: the indexes of the splits that are left to publish.
    :param fitting: makes records of what arrives as rows.
    """

    publisher: Publisher | None
    splits: tuple[int, ...]
    fitting: Fitting

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        split = self.splits[partition_id()]
        burial = self.publisher.burial if self.publisher is not None else None
        keep = burial is not None and burial.topic is not None
        yield told(self.publisher, split, self.rows(batches, split, keep, burial is not None))

    def rows(self, batches: Iterator[pa.RecordBatch], split: int, keep: bool, tolerant: bool) -> Rows:
        """What arrives, on its way in."""
        return Rows(batches, from_spark=True, split=split, fitting=self.fitting, keep=keep, tolerant=tolerant)


def told(publisher: Publisher | None, split: int, incoming: Incoming) -> pa.RecordBatch:
    """Publish a split, or only count it, and what the driver is told of it: its marker, its bad records, or the error that ended
    it.

    :param publisher: None: it is only counted.
    """
    try:
        if publisher is None:
            for _ in incoming:
                pass
            assert incoming.result is not None
            result = json.dumps({"counted": result_to_json(incoming.result)})
        else:
            result = json.dumps({"marker": marker_to_json(publisher.publish(split, incoming))})
    except Rejected as rejected:
        result = json.dumps({"rejected": result_to_json(rejected.result)})
    except KafkaSparkError as error:
        result = encode_error(error)
    return pa.RecordBatch.from_arrays([pa.array([result], pa.string())], ["result"])


def partition_id() -> int:
    """The number of the partition that this Spark task works on."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None
    return context.partitionId()
