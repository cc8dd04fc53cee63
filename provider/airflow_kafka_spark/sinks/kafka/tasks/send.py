"""Sending Arrow batches in a producer's open transaction.

A batch has the columns ``key`` and ``value`` (binary) and, optionally, ``topic``, ``partition``, ``timestamp``
(milliseconds) and ``headers``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from operator import length_hint
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from confluent_kafka import KafkaError, KafkaException, Message, Producer

from airflow_kafka_spark.errors import KafkaRefused, KafkaUnavailable, RowRejected, TopicMissing
from airflow_kafka_spark.hooks.kafka.client import ClientEvents, KafkaUser, Right, find_missing_right
from airflow_kafka_spark.hooks.kafka.partitioner import choose_partitions
from airflow_kafka_spark.hooks.kafka.transactions import find_abort_cause, find_transaction_error
from airflow_kafka_spark.librdkafka.tasks.produce import RecordArray, find_obstacle
from airflow_kafka_spark.sinks.kafka.tasks.encode import list_pairs
from airflow_kafka_spark.windows.model import Landed, TopicPartition

BATCH = 20_000
"""Maximum number of records that are queued in one step."""
_SENT = ("key", "value", "timestamp", "headers")
_ROOM_SECONDS = 0.05
"""Seconds to wait for room in the producer's queue, before the next look."""
_LOOK_SECONDS = 10.0
"""Timeout in seconds of a look at the partitions of a topic."""
_FAILURE_SECONDS = 1.0
"""Seconds between two looks for a failure of the transaction, while records are awaited."""
_DELAYED = ("_MSG_TIMED_OUT", "_UNKNOWN_TOPIC", "_UNKNOWN_PARTITION")
_TIMES_WITH_A_MEANING = (0, -1)
_OnDelivery = Callable[..., None]


@dataclass
class _SentRecords:
    """The records that were sent to one partition."""

    partition: int
    records: int = 0
    first: int = -1
    last: int = -1


@dataclass(frozen=True)
class _OrderedRows:
    """Rows of one topic in the order of their partitions.

    :param columns: the columns, in the order of the batch.
    :param partitions: the partition of each row, in ascending order.
    :param order: the position of each of these rows in the columns.
    :param rows: the number of each row of the columns, for messages.
    """

    topic: str
    columns: Mapping[str, pa.Array]
    partitions: np.ndarray
    order: np.ndarray
    rows: Sequence[int]

    def get_row(self, at: int) -> int:
        """Return the number of the row at a position of the order."""
        return self.rows[self.order[at]]

    def take(self, positions: Sequence[int] | np.ndarray) -> _OrderedRows:
        """Return the rows at some positions of the order."""
        return replace(self, partitions=self.partitions[positions], order=self.order[positions])

    def sort(self) -> dict[str, pa.Array]:
        """Return the columns in this order."""
        columns = {name: self.columns[name] for name in _SENT if name in self.columns}
        if len(self.order) == len(self.rows) and not (np.diff(self.order) < 0).any():
            return columns
        return {name: column.take(pa.array(self.order)) for name, column in columns.items()}

    def can_be_sent_as_columns(self) -> bool:
        """Return True if all rows have the time of sending and no headers, and librdkafka can be called."""
        times = self.columns.get("timestamp")
        return (times is None or times.null_count == len(times)) and not self.has_headers() and not find_obstacle()

    def has_headers(self) -> bool:
        """Return True if a row has headers."""
        headers = self.columns.get("headers")
        return headers is not None and len(headers.flatten()) > 0


@dataclass
class Sender:
    """Sends batches and counts the records of each partition.

    It computes the partition of every record as the Java client does. Records can therefore be counted without a callback for
    each of them. The callbacks of the first and the last record of a partition are enough to know the offsets, because a producer
    keeps the order.

    :param producer: a producer whose transaction has begun.
    :param topic: the topic of records that do not name their own.
    :param partitions: partitions per topic; those of other topics are looked up.
    :param turn: the partition of the first records without a key.
    :param patience: seconds without room in the producer's queue after which sending fails.
    :param called: the word for a row in messages.
    :param conn_id: the connection, for messages.
    :param ledger: the ledger topic, to which no row may be sent; "" (default) if none can name it.
    :param exact_times: True: a timestamp that cannot be sent is refused. False (default): 0 becomes the time of sending.
    :param events: what the producer reports besides its answers, for messages; default: nothing is known.
    :param on_new_topics: called with the names of topics that are not in ``partitions``, before records are sent to them.
    """

    producer: Producer
    topic: str | None
    partitions: dict[str, int]
    turn: int = 0
    patience: float = 300.0
    called: str = "row"
    conn_id: str = ""
    ledger: str = ""
    on_new_topics: Callable[[Sequence[str]], object] | None = None
    exact_times: bool = False
    events: ClientEvents = field(default_factory=ClientEvents, repr=False)
    total_bytes: int = 0
    rows: int = 0
    _keyless: dict[str, str] = field(default_factory=dict)
    _largest: dict[str, tuple[int, str]] = field(default_factory=dict)
    _sent: dict[TopicPartition, _SentRecords] = field(default_factory=dict)
    _errors: list[tuple[str, KafkaError]] = field(default_factory=list)

    def send(self, batch: pa.RecordBatch) -> None:
        """Queue a batch. Waits while the producer's queue is full.

        :raises RowRejected: a row cannot become a record: it is too large, or its partition or topic does not exist.
        :raises KafkaRefused: the brokers refused a record that was sent; RightMissing where the user may not write the topic.
        :raises KafkaUnavailable: the brokers do not accept records.
        """
        for start in range(0, batch.num_rows, BATCH):
            self._send(batch.slice(start, BATCH))

    def flush(self) -> tuple[Landed, ...]:
        """Wait until the brokers have acknowledged everything.

        :return: per partition the number of records and the first and last offset.
        :raises KafkaRefused: the brokers refused a record.
        :raises KafkaUnavailable: the brokers have not acknowledged all records in time.
        """
        deadline = time.monotonic() + self.patience
        while (left := self.producer.flush(_FAILURE_SECONDS)) and time.monotonic() < deadline:
            self._raise()
            # If a record is refused, those behind it may wait in the client until they time out, and nothing reports it.
            if cause := find_transaction_error(self.producer):
                raise self._find_refusal("", cause) or KafkaException(cause)
        self._raise()
        if left:
            raise self._make_late_error(f"{left} of {self.rows} were not acknowledged in {self.patience:.0f} s")
        return tuple(Landed(*tp, sent.first, sent.last, sent.records) for tp, sent in sorted(self._sent.items()))

    def _send(self, batch: pa.RecordBatch) -> None:
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        if (names := columns.get("topic")) is None:
            assert self.topic is not None
            self._send_to(self.topic, columns, range(batch.num_rows))
        else:
            named = names.unique().to_pylist()
            new = [topic for topic in named if topic and topic not in self.partitions]
            if new and self.on_new_topics is not None:
                self.on_new_topics(new)
            if len(named) == 1:
                self._send_to(named[0], columns, range(batch.num_rows))
            else:
                topics = names.to_pylist()
                for topic in named:
                    rows = [at for at, name in enumerate(topics) if name == topic]
                    self._send_to(topic, {name: column.take(pa.array(rows)) for name, column in columns.items()}, rows)
        self.rows += batch.num_rows

    def _send_to(self, topic: str | None, columns: Mapping[str, pa.Array], rows: Sequence[int]) -> None:
        if not topic:
            raise RowRejected(self._describe_row(rows[0]), "its topic is null or empty", "Give every row the name of a topic")
        if topic == self.ledger:
            raise RowRejected(
                self._describe_row(rows[0]), f"its topic `{topic}` is the ledger of pipelines", "Give the row another topic"
            )
        if self.exact_times and (stamps := columns.get("timestamp")) is not None:
            self._refuse_times(stamps, rows)
        count = self._count(topic)
        self._note_largest(topic, columns, rows)
        if columns["key"].null_count and topic not in self._keyless:
            self._keyless[topic] = self._describe_row(rows[pc.index(columns["key"].is_null(), True).as_py()])
        partitions = self._choose_partitions(topic, columns, count, rows)
        self.turn += 1
        # Sorted by partition, because the client has a queue for each partition: the memory of a request is then contiguous.
        # NumPy sorts numbers of 16 bits by their digits, which takes a fifth to a fifteenth of the time.
        order = np.argsort(partitions.astype(np.int16) if count <= 1 << 15 else partitions, kind="stable")
        ordered = _OrderedRows(topic, columns, partitions[order], order, rows)
        if ordered.can_be_sent_as_columns():
            self._produce_columns(ordered)
        else:
            notes: list[_OnDelivery | None] = [None] * len(order)
            for of_rows in self._count_rows(ordered):
                for at, note in of_rows.items():
                    notes[at] = note
            self._produce(ordered, notes)
        self.producer.poll(0)
        self._raise()

    def _count_rows(self, ordered: _OrderedRows) -> tuple[dict[int, _OnDelivery], dict[int, _OnDelivery]]:
        """Count rows as sent. Return two kinds of callbacks, by position: of the first row of each partition to which nothing was
        sent before, and of the last row of each partition, unless it has the first kind."""
        firsts, lasts, stop = dict[int, _OnDelivery](), dict[int, _OnDelivery](), 0
        for partition, count in enumerate(np.bincount(ordered.partitions).tolist()):
            if count:
                start, stop = stop, stop + count
                sent = self._sent.setdefault(TopicPartition(ordered.topic, partition), _SentRecords(partition))
                note = self._make_delivery_callback(ordered.topic, sent)
                if not sent.records:
                    firsts[start] = note
                if stop - 1 not in firsts:
                    lasts[stop - 1] = note
                sent.records += count
        return firsts, lasts

    def _produce_columns(self, ordered: _OrderedRows) -> None:
        """Queue rows without timestamps and headers. Only the first and the last one of each partition have a callback."""
        firsts, lasts = self._count_rows(ordered)
        is_other = np.ones(len(ordered.order), bool)
        is_other[[*firsts, *lasts]] = False
        # A partition keeps the order of its records: the first one is queued before all others, and the last one behind them.
        self._produce_some(ordered, firsts)
        if is_other.any():
            self._produce_others(ordered.take(np.flatnonzero(is_other)))
        self._produce_some(ordered, lasts)

    def _produce_others(self, ordered: _OrderedRows) -> None:
        """Queue rows without a callback."""
        records = RecordArray(ordered.columns["key"], ordered.columns["value"], ordered.order, ordered.partitions)
        deadline, start = time.monotonic() + self.patience, 0
        while True:
            queued = records.produce(self.producer, ordered.topic, start)
            start += queued.count
            if queued.error is None:
                return
            if queued.error.code() != KafkaError._QUEUE_FULL:
                self._reject(queued.error, ordered.get_row(start))
            self._make_room(deadline)

    def _produce_some(self, ordered: _OrderedRows, notes: Mapping[int, _OnDelivery]) -> None:
        """Queue the rows at some positions of the order, each with its callback."""
        if notes:
            self._produce(ordered.take(list(notes)), list(notes.values()))

    def _produce(self, ordered: _OrderedRows, notes: Sequence[_OnDelivery | None]) -> None:
        """Queue rows one by one, each with its callback."""
        sent = ordered.sort()
        values: list = sent["value"].to_pylist()
        others: list[list | repeat] = [sent["key"].to_pylist(), ordered.partitions.tolist(), list(notes)]
        stamps, headers = sent.get("timestamp"), sent.get("headers")
        if not ordered.has_headers():
            headers = None
        if stamps is not None or headers is not None:
            # 0 is the time of writing.
            others += [repeat(None), _list_stamps(stamps.fill_null(0)) if stamps is not None else repeat(0)]
        if headers is not None:
            others += [[pairs or None for pairs in list_pairs(headers)]]
        deadline, first = time.monotonic() + self.patience, 0
        while values:
            left = iter(values)
            try:
                # map() runs no Python code per record except the call, whose arguments have these positions: topic, value, key,
                # partition, callback, on_delivery, timestamp, headers. produce_batch() is slower, because it needs a dictionary
                # per record.
                deque(map(self.producer.produce, repeat(ordered.topic), left, *others), maxlen=0)
                return
            except (BufferError, KafkaException) as error:
                at = len(values) - length_hint(left) - 1
                if isinstance(error, KafkaException):
                    self._reject(error.args[0], ordered.get_row(first + at))
                self._make_room(deadline)
                # Continue with the record for which the queue had no room.
                values, first = values[at:], first + at
                others = [column[at:] if isinstance(column, list) else column for column in others]

    def _reject(self, error: KafkaError, row: int) -> NoReturn:
        """Raise the exception for a record that the client does not queue."""
        # The reason why the transaction was refused is in the client's log, which poll() reads.
        self.producer.poll(_ROOM_SECONDS)
        raise self._make_rejection(error, row) from None

    def _make_room(self, deadline: float) -> None:
        self.producer.poll(_ROOM_SECONDS)
        self._raise()
        if time.monotonic() > deadline:
            raise self._make_late_error(f"the queue has been full for {self.patience:.0f} s")

    # --- partitions ---

    def _count(self, topic: str) -> int:
        if topic not in self.partitions:
            found = self.producer.list_topics(topic, timeout=30).topics.get(topic)
            rights = [Right("topic", "Describe", topic)]
            if found and (missing := find_missing_right(found.error, KafkaUser(self.conn_id), f"sending {self.called}s", rights)):
                raise missing
            if found is None or found.error is not None or not found.partitions:
                raise TopicMissing("", [topic])
            self.partitions[topic] = len(found.partitions)
        return self.partitions[topic]

    def _choose_partitions(self, topic: str, columns: Mapping[str, pa.Array], count: int, rows: Sequence[int]) -> np.ndarray:
        """Return the partitions that the rows name, or those of their keys for rows that name none."""
        column = columns.get("partition")
        if column is None:
            return choose_partitions(columns["key"], count, self.turn)
        wrong = pc.indices_nonzero(pc.fill_null(pc.or_(pc.less(column, 0), pc.greater_equal(column, count)), False))
        if len(wrong):
            at = wrong[0].as_py()
            found = f"it asks for partition {column[at].as_py()}, and topic `{topic}` has partitions 0 to {count - 1}"
            raise RowRejected(self._describe_row(rows[at]), found, "Correct its partition, or add partitions to the topic")
        asked = np.asarray(pc.fill_null(column, -1)).astype(np.int32)
        # All records of a copy name a partition, so that their keys need no hash.
        return np.where(asked < 0, choose_partitions(columns["key"], count, self.turn), asked) if column.null_count else asked

    def _refuse_times(self, stamps: pa.Array, rows: Sequence[int]) -> None:
        """Refuse times that would become others: librdkafka takes 0 for the time of sending, and Kafka -1 for none."""
        wrong = pc.indices_nonzero(pc.fill_null(pc.is_in(stamps, pa.array(_TIMES_WITH_A_MEANING, stamps.type)), False))
        if len(wrong):
            at = wrong[0].as_py()
            moment = "the first millisecond of 1970" if stamps[at].as_py() == 0 else "the last millisecond of 1969"
            found = f"its timestamp is {moment} ({stamps[at].as_py()}), which Kafka's client cannot write"
            action = "Give it another time, or NULL for the time of writing; or leave `timestamp` of the sink out"
            raise RowRejected(self._describe_row(rows[at]), found, action)

    def _make_delivery_callback(self, topic: str, sent: _SentRecords) -> _OnDelivery:
        def on_delivery(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._errors.append((topic, error))
                return
            offset = message.offset()
            assert offset is not None, "it was delivered"
            sent.first = offset if sent.first < 0 else min(sent.first, offset)
            sent.last = max(sent.last, offset)

        return on_delivery

    # --- errors ---

    def _note_largest(self, topic: str, columns: Mapping[str, pa.Array], rows: Sequence[int]) -> None:
        """Add up the bytes of keys and values, and remember the largest row of the topic for the error of one that is refused."""
        key, value = (pc.binary_length(columns[name]).fill_null(0) for name in ("key", "value"))
        sizes = np.asarray(key) + np.asarray(value)
        self.total_bytes += int(sizes.sum())
        at = int(sizes.argmax())
        if sizes[at] > self._largest.get(topic, (-1, ""))[0]:
            self._largest[topic] = int(sizes[at]), self._describe_row(rows[at])

    def _describe_row(self, at: int) -> str:
        return f"{self.called} {self.rows + at + 1}"

    def _make_rejection(self, error: KafkaError, row: int) -> Exception:
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            action = "Set this option in the sink's `producer_config`, or leave out what makes the row large"
            return RowRejected(self._describe_row(row), "it is larger than the producer's `message.max.bytes`", action)
        if error.code() in (KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC):
            return RowRejected(self._describe_row(row), error.str(), "Correct the row's topic or partition")
        return self._find_refusal("", error) or KafkaException(error)

    def _raise(self) -> None:
        if self._errors:
            topic, error = self._errors[0]
            if refused := self._find_refusal(topic, error):
                raise refused
            delay = self._describe_delay() if error.name() in _DELAYED else ""
            raise KafkaException(KafkaError(error.code(), error.str() + delay) if delay else error)

    def _find_refusal(self, topic: str, error: KafkaError) -> KafkaRefused | None:
        """Return the exception for an error of a record, if a record was refused: this one, or another one of the transaction."""
        cause = find_abort_cause(self.producer, error)
        # Its message names the topic.
        topic = next((tp.topic for tp in self._sent if f" {tp.topic} [" in cause.str()), topic)
        facts = self._keyless.get(topic, ""), self._largest.get(topic, (0, ""))
        return find_refusal(cause, self.conn_id, f"{self.called}s", topic, *facts)

    def _make_late_error(self, found: str) -> KafkaUnavailable:
        """Return the error for records that the brokers do not take in time."""
        failure = KafkaUnavailable(self.conn_id, f"sending {self.called}s", f"{found}{self._describe_delay()}")
        return name_quota(failure, self.events)

    def _describe_delay(self) -> str:
        """Return what may keep brokers from acknowledging records, as the end of a message; "" if nothing is found.

        The client sends such records again and again, and reports no reason.
        """
        for topic in sorted({tp.topic for tp in self._sent}):
            try:
                found = self.producer.list_topics(topic, timeout=_LOOK_SECONDS).topics[topic]
            except KafkaException:
                return ""
            if found.error is not None:
                return f"; topic `{topic}`: {found.error.str()}"
            for number, partition in sorted(found.partitions.items()):
                if partition.leader < 0:
                    return f"; partition {number} of topic `{topic}` has no leader"
                if len(partition.isrs) < len(partition.replicas):
                    in_sync = f"{len(partition.isrs)} of {len(partition.replicas)} replicas in sync"
                    return f"; partition {number} of topic `{topic}` has {in_sync}, see its `min.insync.replicas`"
        return ""


def _list_stamps(stamps: pa.Array) -> list[int] | repeat[int]:
    """Return timestamps as objects: one object if all are equal, as those of a snapshot's rows are."""
    ends = pc.min_max(stamps).as_py()
    return repeat(ends["min"]) if ends["min"] == ends["max"] else stamps.to_pylist()


# --- records that the brokers take slowly ---------------------------------------------------------------------------------


def name_quota(failure: KafkaUnavailable, events: ClientEvents) -> KafkaUnavailable:
    """Return the error of records that were not acknowledged in time, with a quota as its cause if brokers throttle the producer.

    :param events: what the producer has reported.
    """
    if throttling := events.describe_throttling():
        failure.found += throttling
        failure.expected = "that the quota lets the producer send a split within `transaction_timeout`"
        failure.action = (
            "Raise `producer_byte_rate` (`kafka-configs.sh --describe --entity-type users`, and `clients`) or the sink's "
            "`transaction_timeout`, and then run the task again: it publishes the splits that are left"
        )
    return failure


# --- records that the brokers refuse -------------------------------------------------------------------------------------


_VALIDATES = (
    "See what {topic} validates, and let it take such records: timestamps as old, or as new, as theirs "
    "(`message.timestamp.before.max.ms`, `.after.max.ms`; or `message.timestamp.type=LogAppendTime`), keys where "
    "it is compacted{keyless}"
)

_REMEDIES = {
    "MSG_SIZE_TOO_LARGE": "Raise `max.message.bytes` of {topic}{largest}",
    "INVALID_TIMESTAMP": _VALIDATES,
    "INVALID_RECORD": _VALIDATES,
    # The other records of a batch that has such a record.
    "_INVALID_DIFFERENT_RECORD": _VALIDATES,
    "POLICY_VIOLATION": _VALIDATES,
}
"""Kafka's name of an error -> the action."""

RETRY_HINT = "The task may then be retried: it continues with the same window"


def describe_remedy(code: str, topic: str, keyless: str = "", largest: tuple[int, str] = (0, "")) -> str:
    """Return the action for records that the brokers refuse.

    :param code: Kafka's name of the error.
    :param topic: the topic, as a noun.
    :param keyless: the first row that was sent without a key; "" if every row has a key, or if it is unknown.
    :param largest: the bytes of the largest row, and the row; "" if it is unknown.
    """
    first = f" ({keyless} is the first without one)" if keyless else ""
    size, row = largest
    # The batches of topics that only tasks know are not limited to what these topics take.
    most = f" ({row} is the largest: {size:,} bytes). If it takes that, lower the producer's `batch.size`" if row else ""
    return _REMEDIES[code].format(topic=topic, keyless=first, largest=most)


def find_refusal(
    error: KafkaError,
    conn_id: str,
    called: str,
    topic: str | None = None,
    keyless: str = "",
    largest: tuple[int, str] = (0, ""),
) -> KafkaRefused | None:
    """Return the exception for an error that refuses a record, or None if the error is not about records and a retry may help.

    :param error: the client's ``KafkaError``.
    :param called: the word for the rows in messages, in the plural.
    :param topic: their topic; None if unknown.
    :param keyless: the first row that was sent without a key; "" if every row has one.
    :param largest: the bytes of the largest row that was sent, and the row; "" if it is unknown.
    """
    rights = [Right("topic", "Write", topic or "")]
    if missing := find_missing_right(error, KafkaUser(conn_id), f"sending {called}", rights):
        return missing
    if error.name() not in _REMEDIES:
        return None
    where = f"topic `{topic}`" if topic else "the topic"
    action = f"{describe_remedy(error.name(), where, keyless, largest)}. {RETRY_HINT}"
    return KafkaRefused(conn_id, f"sending {called} to {where}", error.name(), error.str(), action)
