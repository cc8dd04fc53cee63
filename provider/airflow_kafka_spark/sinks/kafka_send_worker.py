"""From Arrow batches into a producer's open transaction. Runs in Spark's tasks.

A batch has the columns ``key`` and ``value`` (binary) and, where asked for, ``topic``, ``partition``, ``timestamp``
(milliseconds) and ``headers``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaError, KafkaException, Producer

from airflow_kafka_spark.errors import KafkaUnavailable, RowRejected, TopicMissing
from airflow_kafka_spark.sinks.kafka_partition_worker import partitions_of
from airflow_kafka_spark.windows.model import Landed, TopicPartition

BATCH = 10_000
_ROOM_SECONDS = 0.05


@dataclass
class _Place:
    """What is known of one partition."""

    partition: int
    records: int = 0
    first: int = -1
    last: int = -1


@dataclass
class Sender:
    """Sends batches, and counts where their records land.

    Every record is given its partition here, placed as the Java client places keys: so each is counted without a call per record,
    and the first and last of a partition tell the offsets, since a producer keeps a partition's order.

    :param producer: with a transaction begun.
    :param topic: for records that name none.
    :param partitions: partitions per topic; others are looked up.
    :param turn: where records without a key begin.
    :param patience: seconds without room in the producer's queue after which the brokers are given up.
    """

    producer: Producer
    topic: str | None
    partitions: dict[str, int]
    turn: int = 0
    patience: float = 300.0
    bytes: int = 0
    rows: int = 0
    _places: dict[TopicPartition, _Place] = field(default_factory=dict)
    _errors: list[KafkaError] = field(default_factory=list)

    def send(self, batch: pa.RecordBatch) -> None:
        """Queue a batch. Waits while the producer's queue is full.

        :raises RowRejected: a row cannot be a record: too large, a partition or a topic that is not there.
        :raises KafkaUnavailable: the brokers take nothing.
        """
        for start in range(0, batch.num_rows, BATCH):
            self._send(batch.slice(start, BATCH))

    def flush(self) -> tuple[Landed, ...]:
        """Wait until the brokers have everything.

        :return: where it lies.
        """
        left = self.producer.flush(self.patience)
        self._raise()
        if left:
            raise KafkaUnavailable("", "sending records", f"{left} of {self.rows} were not acknowledged in {self.patience:.0f} s")
        return tuple(Landed(*tp, place.first, place.last, place.records) for tp, place in sorted(self._places.items()))

    def _send(self, batch: pa.RecordBatch) -> None:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        keys, values = columns["key"], columns["value"]
        self.bytes += (pc.sum(pc.binary_length(keys)).as_py() or 0) + (pc.sum(pc.binary_length(values)).as_py() or 0)
        if (names := columns.get("topic")) is None:
            assert self.topic is not None
            self._send_to(self.topic, columns, range(batch.num_rows))
        else:
            topics = names.to_pylist()
            for topic in dict.fromkeys(topics):
                rows = [at for at, name in enumerate(topics) if name == topic]
                self._send_to(topic, {name: column.take(pa.array(rows)) for name, column in columns.items()}, rows)
        self.rows += batch.num_rows

    def _send_to(self, topic: str | None, columns: dict[str, Any], rows: Sequence[int]) -> None:
        if not topic:
            raise RowRejected(self._row(rows[0]), "its topic is null or empty", "Give every row the name of a topic")
        count = self._count(topic)
        keys = columns["key"]
        places = partitions_of(keys, count, self.turn)
        self.turn += 1
        # The client's own partitioner places keys alike; what has none, or an empty one, is told where to go.
        as_keys_say = "partition" not in columns and not keys.null_count and pc.min(pc.binary_length(keys)).as_py() > 0
        if "partition" in columns:
            places = self._own_partitions(topic, columns["partition"], places, count, rows)
        if "headers" in columns or "timestamp" in columns:
            self._one_by_one(topic, columns, places.tolist(), rows)
        else:
            self._in_batches(topic, columns, places, rows, as_keys_say=as_keys_say)
        self.producer.poll(0)
        self._raise()

    def _in_batches(
        self, topic: str, columns: Mapping[str, Any], places: np.ndarray, rows: Sequence[int], *, as_keys_say: bool
    ) -> None:
        pairs = zip(columns["key"].to_pylist(), columns["value"].to_pylist(), strict=True)
        messages: list[dict[str, Any]] = [{"key": key, "value": value} for key, value in pairs]
        for partition in np.unique(places).tolist():
            chosen = np.flatnonzero(places == partition)
            place = self._place(topic, partition)
            if not place.records:
                messages[chosen[0]]["callback"] = self._noting(place)
            messages[chosen[-1]]["callback"] = self._noting(place)
            place.records += len(chosen)
            if not as_keys_say:
                # One call per partition: a partition that a message names by itself is not heeded.
                at = chosen.tolist()
                self._produce(topic, partition, [messages[i] for i in at], [rows[i] for i in at])
        if as_keys_say:
            self._produce(topic, -1, messages, rows)

    def _produce(self, topic: str, partition: int, messages: list[dict[str, Any]], rows: Sequence[int]) -> None:
        deadline = time.monotonic() + self.patience
        while self.producer.produce_batch(topic, messages, partition=partition) < len(messages):
            # The queue takes what fits, in order, and says so at those it did not take.
            failed = [at for at, message in enumerate(messages) if "_error" in message]
            refused = next((at for at in failed if messages[at]["_error"].code() != KafkaError._QUEUE_FULL), None)
            if refused is not None:
                raise self._refused(messages[refused]["_error"], rows[refused])
            if failed != list(range(failed[0], len(messages))):
                raise KafkaException(messages[failed[0]]["_error"])
            messages, rows = messages[failed[0] :], rows[failed[0] :]
            for message in messages:
                del message["_error"]
            self._make_room(deadline)

    def _one_by_one(self, topic: str, columns: Mapping[str, Any], places: list[int], rows: Sequence[int]) -> None:
        """For what batches cannot carry: headers and timestamps."""
        deadline = time.monotonic() + self.patience
        headers = columns["headers"].to_pylist() if "headers" in columns else [None] * len(places)
        stamps = columns["timestamp"].to_pylist() if "timestamp" in columns else [None] * len(places)
        keys, values = columns["key"].to_pylist(), columns["value"].to_pylist()
        for at, partition in enumerate(places):
            place = self._place(topic, partition)
            place.records += 1
            pairs = [(pair["key"], pair["value"]) for pair in headers[at] or ()]
            while True:
                try:
                    self.producer.produce(
                        topic,
                        values[at],
                        keys[at],
                        partition,
                        self._noting(place),
                        timestamp=stamps[at] or 0,
                        headers=pairs or None,
                    )
                    break
                except BufferError:
                    self._make_room(deadline)
                except KafkaException as error:
                    raise self._refused(error.args[0], rows[at]) from None

    def _place(self, topic: str, partition: int) -> _Place:
        return self._places.setdefault(TopicPartition(topic, partition), _Place(partition))

    def _make_room(self, deadline: float) -> None:
        self.producer.poll(_ROOM_SECONDS)
        self._raise()
        if time.monotonic() > deadline:
            raise KafkaUnavailable("", "sending records", f"the queue has been full for {self.patience:.0f} s")

    # --- where records go ---

    def _count(self, topic: str) -> int:
        if topic not in self.partitions:
            found = self.producer.list_topics(topic, timeout=30).topics.get(topic)
            if found is None or found.error is not None or not found.partitions:
                raise TopicMissing("", [topic])
            self.partitions[topic] = len(found.partitions)
        return self.partitions[topic]

    def _own_partitions(self, topic: str, column: Any, places: Any, count: int, rows: Sequence[int]) -> Any:
        """What the rows ask for; null leaves it to the key."""
        wrong = pc.indices_nonzero(pc.fill_null(pc.or_(pc.less(column, 0), pc.greater_equal(column, count)), False))
        if len(wrong):
            at = wrong[0].as_py()
            found = f"it asks for partition {column[at].as_py()}, and topic `{topic}` has partitions 0 to {count - 1}"
            raise RowRejected(self._row(rows[at]), found, "Correct the partition column")
        asked = np.asarray(pc.fill_null(column, -1)).astype(np.int32)
        return np.where(asked < 0, places, asked)

    def _noting(self, place: _Place) -> Callable[..., None]:
        def on_delivery(error: KafkaError | None, message: Any) -> None:
            if error is not None:
                self._errors.append(error)
                return
            if message.partition() != place.partition:
                self._errors.append(_misplaced(place.partition, message.partition()))
                return
            offset = message.offset()
            place.first = offset if place.first < 0 else min(place.first, offset)
            place.last = max(place.last, offset)

        return on_delivery

    # --- errors ---

    def _row(self, at: int) -> str:
        return f"row {self.rows + at + 1}"

    def _refused(self, error: KafkaError, row: int) -> Exception:
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            action = "Raise `max.message.bytes` of the topic, or leave out what makes the row large"
            return RowRejected(self._row(row), "it is larger than a record of the topic may be (`max.message.bytes`)", action)
        if error.code() in (KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC):
            return RowRejected(self._row(row), error.str(), "Correct the row's topic or partition")
        return KafkaException(error)

    def _raise(self) -> None:
        if self._errors:
            raise KafkaException(self._errors[0])


def _misplaced(expected: int, found: int) -> KafkaError:
    """The client sees another number of partitions than the window was planned with."""
    return KafkaError(
        KafkaError._UNKNOWN_PARTITION, f"a record went to partition {found} instead of {expected}: the topic changed"
    )
