"""Publishing one split in one Kafka transaction.

The order of three steps makes it exactly-once:

1. **fence**: ``init_transactions()`` on the split's own transactional id. An earlier task that publishes this split has finished,
   or is refused from here on.
2. **read** the ledger for the split's marker. If it exists, the records are published. :class:`ClaimedWindow` keeps the records
   that a process has read, so that the next split reads only newer ones.
3. **write**: one transaction with all records, the dead letters, the consumed offsets if the split was read from Kafka, and the
   marker as its last record.
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
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
    RowsCutOff,
    SparkJobFailed,
    TransactionTimedOut,
)
from airflow_kafka_spark.formats.base import END
from airflow_kafka_spark.hooks.kafka.client import (
    ClientEvents,
    KafkaCalls,
    KafkaUser,
    Right,
    find_missing_right,
    make_admin_client,
    name_missing_rights,
)
from airflow_kafka_spark.hooks.kafka.config import describe_identity
from airflow_kafka_spark.hooks.kafka.log import PROMPT
from airflow_kafka_spark.hooks.kafka.requests import describe_topics
from airflow_kafka_spark.hooks.kafka.transactions import (
    abort,
    describe_producer_error,
    find_fatal_error,
    find_timeout_refusal,
    is_fatal,
    is_fenced,
    make_fencing_producer,
    send_offsets,
)
from airflow_kafka_spark.hooks.spark.tasks.worker import require_end_of_stream
from airflow_kafka_spark.ledger.topic import (
    AwaitedRecords,
    LedgerClaim,
    LedgerSpan,
    OpenTransaction,
    abort_transaction,
    read_span,
)
from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import Envelope, read_letters
from airflow_kafka_spark.sinks.kafka.tasks.send import Sender, find_refusal, name_quota
from airflow_kafka_spark.windows.codec import decode_result, encode_error, marker_to_json, result_to_json
from airflow_kafka_spark.windows.memory import (
    LedgerRecord,
    Memory,
    fold_records,
    make_marker_key,
    make_marker_record,
    make_split_prefix,
    make_window_key,
)
from airflow_kafka_spark.windows.model import Landed, Marker, SplitResult, TopicPartition
from airflow_kafka_spark.windows.times import Timed, compute_split_seconds

KEPT = 4
"""Maximum number of claims whose records a process keeps: several pipelines may share Spark's workers."""

ReadFrom = Callable[[int], Iterator[LedgerRecord]]
"""Returns the committed records of the ledger's partition from an offset on."""


class ClaimedWindow:
    """The newest records of one claimed window: its own and the markers of its splits.

    :param claim: the claim of the window.
    """

    def __init__(self, claim: LedgerClaim) -> None:
        self._claim = claim
        self._mine = (make_window_key(claim.pipeline, claim.number), make_split_prefix(claim.pipeline, claim.number))
        self._newest: dict[bytes, LedgerRecord] = {}
        self._last: LedgerRecord | None = None

    def read_on(self, read: ReadFrom, end: int) -> None:
        """Read the records since the last call. Begin again at the claim if the log has changed.

        Reading continues at the last known record of this window, which has to be unchanged, leader epoch included. It differs,
        or is missing,

        - in a log that has lost its end, even if it has grown again, and in a ledger that was created again;
        - after the window was closed or given up, if compaction has removed a record of that transaction: it has the tombstones
          of all markers, and compaction removes the markers before it removes their tombstones.

        All transactions before a record that a read_committed reader has seen are decided; hidden records come after it.

        :param end: the partition's high watermark.
        """
        last = self._last
        if last is not None:
            records = read(last.offset) if last.offset < end else iter(())
            if next(records, None) == last:
                self._take(records)
                return
            self._newest, self._last = {}, None
        self._take(read(self._claim.offset))

    def _take(self, records: Iterator[LedgerRecord]) -> None:
        for record in records:
            if record.key.startswith(self._mine):
                self._newest[record.key] = self._last = record

    def fold_memory(self, split: int) -> Memory:
        """Return the state of the window and of one of its splits, folded from these records."""
        claim = self._claim
        keys = (make_window_key(claim.pipeline, claim.number), make_marker_key(claim.pipeline, claim.number, split))
        return fold_records(claim.pipeline, [self._newest[key] for key in keys if key in self._newest])


_kept: OrderedDict[LedgerClaim, ClaimedWindow] = OrderedDict()
"""The claimed windows that this process has read."""
_named_topics: OrderedDict[LedgerClaim, dict[str, str]] = OrderedDict()
"""By the claim of an attempt, the topics that records have named, with their ids before the attempt has sent records to them."""


def read_claimed_window(claim: LedgerClaim, split: int, read: ReadFrom, end: int) -> Memory:
    """Return the state of a claimed window and of one of its splits in the ledger.

    :param claim: the claim of the window. Its token is unique.
    :param end: the partition's high watermark. All records that are committed before it are read.
    """
    # Removed from the cache while it reads, so that another thread, or the next task after an error, begins at the claim.
    window = _kept.pop(claim, None) or ClaimedWindow(claim)
    window.read_on(read, end)
    _kept[claim] = window
    while len(_kept) > KEPT:
        _kept.popitem(last=False)
    return window.fold_memory(split)


def read_topic_ids(config: Mapping[str, Any], topics: Sequence[str], conn_id: str) -> dict[str, str]:
    """Return the present ids of topics; "" if the brokers have no ids, or do not know a topic.

    :param config: the configuration of a client.
    :param topics: their names.
    :param conn_id: the connection, for messages.
    :raises KafkaSparkError: the brokers refuse, or do not answer.
    """
    make = partial(make_admin_client, config)
    calls = KafkaCalls(make, ClientEvents(), conn_id=conn_id, identity=describe_identity(config), timeout=FENCE_SECONDS)
    try:
        found = describe_topics(calls, topics)
        return {topic: found[topic].topic_id if topic in found else "" for topic in topics}
    finally:
        calls.discard_client()


class Rejected(Exception):
    """Raised when a split has bad records and must not be published. It travels as a result, so that the driver counts the bad
    records of all splits.

    :param result: the account of the split, with samples of its bad records.
    """

    def __init__(self, result: SplitResult) -> None:
        super().__init__(f"{result.rejected} bad records")
        self.result = result


@dataclass
class RecordBatches:
    """The batches of records that a task is to publish.

    :param batches: the records; with the column :data:`END` if they were read from Kafka.
    :param from_spark: True if Spark passes them. Then all of them have to be taken, and their end is checked.
    :param result: the account of the split after the last batch; None if no account is kept.
    """

    batches: Iterator[pa.RecordBatch]
    from_spark: bool = False
    result: SplitResult | None = None

    def __post_init__(self) -> None:
        self._arriving = Timed(self.batches)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        """Yield the records, without the row that carries the account.

        :raises RowsCutOff: the task that reads the records has failed before their end.
        :raises KafkaSparkError: the error that ended the reading.
        """
        ends_itself = False
        for batch in require_end_of_stream(self._arriving) if self.from_spark else self._arriving:
            if END not in batch.schema.names:
                yield batch
                continue
            ends_itself = True
            ends = batch.column(batch.schema.get_field_index(END))
            accounts = ends.drop_null().to_pylist()
            rows = batch.drop_columns([END])
            if accounts:
                self.result = decode_result(accounts[-1])
                rows = rows.filter(ends.is_null())
            if rows.num_rows:
                yield rows
        if ends_itself and self.result is None:
            raise RowsCutOff

    def make_timed_result(self, seconds: float, sending: float) -> SplitResult | None:
        """Return the account of the split, with the seconds that the task took; None if no account is kept.

        :param seconds: seconds of the task until now.
        :param sending: seconds of these that were spent on sending.
        """
        if self.result is None:
            return None
        one_stage = not self.from_spark
        parts = compute_split_seconds(seconds, self._arriving.seconds, sending, self.result.seconds, is_one_stage=one_stage)
        return replace(self.result, seconds=parts)

    def drain(self) -> None:
        """Take the remaining batches and drop them, because Spark requires a task to take all of its input."""
        if self.from_spark:
            for _ in self.batches:
                pass


PRODUCER: Mapping[str, Any] = {
    "compression.type": "lz4",
    "linger.ms": 5,
    "batch.size": 1 << 20,
    "batch.num.messages": 10_000,
    "queue.buffering.max.messages": 500_000,
    "queue.buffering.max.kbytes": 131_072,
    "allow.auto.create.topics": False,
    # The Java client's partitioner, so that records of a key from other producers are in the same partition.
    "partitioner": "murmur2_random",
}
"""Defaults of the producer, measured in benchmarks/. The settings of the connection take precedence."""

_LATE = frozenset({"_MSG_TIMED_OUT", "_TIMED_OUT"})
"""Names of the errors of records, and of a transaction, that the brokers have not acknowledged in time."""

FENCE_SECONDS = 60.0
"""Seconds to wait for the brokers, to fence earlier tasks and to read the end of the ledger."""
YIELD_SECONDS = 30.0
"""Seconds that a task that was fenced waits for the marker of the other task: usually its own copy, started by speculation."""


@dataclass(frozen=True)
class ConsumedOffsets:
    """Offsets of a consumer group that are committed in the transactions of splits.

    :param group_id: the group.
    :param offsets: split index -> its input partition, the next offset to read, and the metadata of the commit.
    """

    group_id: str
    offsets: Mapping[int, tuple[TopicPartition, int, str]]


@dataclass(frozen=True)
class BadRecordPolicy:
    """Handling of bad records that are tolerated. Their dead letters are sent in the transaction of their split.

    :param topic: the dead letter topic; None: bad records are only counted. A letter is the record as it was read, or JSON for a
        row that never became a record.
    :param partitions: the number of partitions of that topic.
    :param envelope: adds the headers of the letters.
    :param counted: split index -> number of its bad records, if they were counted before; a split with more of them is not
        published.
    """

    topic: str | None = None
    partitions: int = 1
    envelope: Envelope | None = None
    counted: Mapping[int, int] | None = None


@dataclass(frozen=True)
class Publisher:
    """Publishes splits of one window.

    :param config: the producer's configuration. It is sent to the executors within the pickled task only.
    :param reading: the configuration of a consumer, to read the ledger with.
    :param ledger: the claimed window in the ledger, to which the markers are written.
    :param prefix: the beginning of the splits' transactional ids; the split's index follows.
    :param topic: the topic of records that do not name their own.
    :param partitions: the number of partitions of each known topic, which decides where keys go.
    :param transaction_timeout: seconds after which the broker aborts a transaction.
    :param consumed: the offsets to commit, if splits were read from Kafka.
    :param bad_record_policy: handling of bad records; None: a split with a bad record is not published.
    :param conn_id: the connection, for messages.
    :param routes: topics that only transforms route records to. Their records are counted apart.
    :param topic_ids: ids of the dead letter topic and of ``routes``, as they were before the attempt has sent records to them.
    """

    config: Mapping[str, Any] = field(repr=False)
    reading: Mapping[str, Any] = field(repr=False)
    ledger: LedgerClaim
    prefix: str
    topic: str | None
    partitions: Mapping[str, int]
    transaction_timeout: float
    consumed: ConsumedOffsets | None = None
    bad_record_policy: BadRecordPolicy | None = None
    conn_id: str = ""
    routes: frozenset[str] = frozenset()
    topic_ids: Mapping[str, str] = field(default_factory=dict)

    def publish(self, split: int, records: RecordBatches) -> Marker:
        """Publish a split, or find that it is published, and return its marker.

        :raises Rejected: the split holds bad records; nothing is published.
        :raises Fenced: a newer attempt owns the window, or another task works on this split.
        :raises TransactionTimedOut: the split took longer than ``transaction_timeout``.
        :raises KafkaRefused: the brokers refuse a record; nothing is published.
        :raises KafkaUnavailable: the brokers do not answer; the marker shows whether the split is published.
        """
        events, began = ClientEvents(), time.monotonic()
        producer: Producer | None = None
        faults.reached("publish.fence")
        try:
            producer = self._fence(split, events)
            if (marker := self.find_marker(split)) is None:
                faults.reached("publish.begin")
                began = time.monotonic()
                return self._write(producer, split, records, events)
        except (KafkaException, SystemError) as error:
            # A fatal error that is raised while callbacks run comes out of the client as a SystemError.
            seconds = time.monotonic() - began
            named = error if producer is None else find_fatal_error(producer, error)
            marker = self._resolve(named, events, split, seconds)
        records.drain()
        return marker

    def _fence(self, split: int, events: ClientEvents) -> Producer:
        milliseconds = round(self.transaction_timeout * 1000)
        timeouts = {"transaction.timeout.ms": milliseconds, "message.timeout.ms": milliseconds}
        config = {**PRODUCER, **self.config, **timeouts}
        try:
            return make_fencing_producer(config, f"{self.prefix}{split}", FENCE_SECONDS, events)
        except KafkaException as error:
            # Validation compares both only if the user may see the brokers' settings.
            facts = self.conn_id, self._format_step(split), self.transaction_timeout
            raise find_timeout_refusal(error, *facts, ", or lower the sink's `transaction_timeout`") or error from None

    def find_marker(self, split: int) -> Marker | None:
        """Return the split's marker, or None if the split is not published.

        :raises Fenced: a newer attempt has claimed the window, or the window is complete: this task belongs to an older attempt.
        """
        memory = self._read_memory(split)
        mine = memory.find_owned(self.ledger.number, self.ledger.token)
        if mine is None or mine.state.value != "PLANNED":
            raise Fenced(self.ledger.pipeline, self._format_step(split))
        return memory.markers.get((self.ledger.number, split))

    def _read_memory(self, split: int) -> Memory:
        tp = TopicPartition(self.ledger.topic, self.ledger.partition)
        config = {**self.reading, **PROMPT}
        consumer = Consumer({**config, "isolation.level": "read_uncommitted"}, logger=ClientEvents())
        right = Right("topic", "Read", tp.topic)
        try:
            with name_missing_rights(config, "reading the ledger", right, conn_id=self.conn_id):
                _, high = consumer.get_watermark_offsets(KafkaTopicPartition(*tp), timeout=FENCE_SECONDS)
        except KafkaException as error:
            raise self._make_unavailable_error(error, f"looking into {tp}") from None
        finally:
            consumer.close()
        # Wait for these keys only: the marker of a dead task, in its open transaction, would otherwise delay all other splits.
        mine = (
            make_window_key(self.ledger.pipeline, self.ledger.number),
            make_marker_key(self.ledger.pipeline, self.ledger.number, split),
        )

        def read(start: int) -> Iterator[LedgerRecord]:
            return read_span(LedgerSpan(config, tp, start, high), AwaitedRecords(mine, abort=self._end))

        return read_claimed_window(self.ledger, split, read, high)

    def _end(self, holder: OpenTransaction) -> str:
        return abort_transaction({**PRODUCER, **self.config}, self.ledger.topic, holder)

    def _write(self, producer: Producer, split: int, records: RecordBatches, events: ClientEvents) -> Marker:
        arriving, begun = Timed(records), time.monotonic()
        producer.begin_transaction()
        # A record that was read from Kafka may have a time that cannot be sent.
        sender = self._make_sender(producer, self.topic, self.partitions, split, events, exact_times=self.consumed is None)
        policy = self.bad_record_policy
        try:
            with self._name_topics_in_errors(split, sorted({*self.partitions, *filter(None, [self.topic])}), events):
                for batch in arriving:
                    sender.send(batch)
                    faults.reached("publish.mid")
                landed = sender.flush()
            with self._name_topics_in_errors(split, [policy.topic or ""] if policy else [], events):
                dead = self._send_dead_letters(producer, records.result, events) if records.result is not None else ()
            faults.reached("publish.flushed")
            self._consume(producer, split)
            published = tuple(part for part in landed if part.topic not in self.routes)
            routed = tuple(part for part in landed if part.topic in self.routes)
            seconds = time.monotonic() - begun
            result = records.make_timed_result(seconds, seconds - arriving.seconds)
            ids = self._list_topic_ids({part.topic for part in (*landed, *dead)})
            marker = Marker(self.ledger.number, split, published, sender.total_bytes, result, dead, routed, ids)
            with self._name_topics_in_errors(split, [self.ledger.topic], events):
                self._mark(producer, marker)
            faults.reached("publish.marked")
            producer.commit_transaction(self.transaction_timeout)
        except (KafkaSparkError, Rejected):
            abort(producer)
            raise
        faults.reached("publish.committed")
        return marker

    def _name_topics_in_errors(self, split: int, topics: Sequence[str], events: ClientEvents) -> AbstractContextManager[None]:
        """Add the topics that are written in this block to an error by which the brokers refuse records."""
        right = Right("topic", "Write", "`, `".join(topics))
        return name_missing_rights(self.config, self._format_step(split), right, conn_id=self.conn_id, events=events)

    def _send_dead_letters(self, producer: Producer, result: SplitResult, events: ClientEvents) -> tuple[Landed, ...]:
        """Send the dead letters of a split in its transaction, so that they are visible exactly when its records are.

        :raises Rejected: bad records are not tolerated.
        :raises SparkJobFailed: the split holds more of them than were counted.
        """
        policy = self.bad_record_policy
        if not result.rejected:
            return ()
        if policy is None:
            raise Rejected(result)
        counted = result.rejected if policy.counted is None else policy.counted.get(result.index, 0)
        if result.rejected > counted:
            found = f"split {result.index} holds {result.rejected} bad records, but held {counted} when they were counted"
            raise SparkJobFailed(f"{self.ledger.pipeline}#{self.ledger.number}", found)
        if policy.topic is None or policy.envelope is None:
            return ()
        letters = read_letters([result.letters])
        if letters.num_rows != result.rejected:
            raise CountMismatch(f"{self.ledger.pipeline}#{self.ledger.number}", result.rejected, letters.num_rows)
        sender = self._make_sender(
            producer,
            policy.topic,
            {policy.topic: policy.partitions},
            result.index,
            events,
            "dead letter",
        )
        sender.send(policy.envelope.make_records(letters))
        return sender.flush()

    def _make_sender(
        self,
        producer: Producer,
        topic: str | None,
        partitions: Mapping[str, int],
        split: int,
        events: ClientEvents,
        called: str = "row",
        exact_times: bool = False,
    ) -> Sender:
        return Sender(
            producer,
            topic,
            dict(partitions),
            split,
            self.transaction_timeout,
            called,
            self.conn_id,
            self.ledger.topic,
            self._find_topic_ids,
            exact_times,
            events,
        )

    def _find_topic_ids(self, topics: Sequence[str]) -> dict[str, str]:
        """Return the ids that topics had before this attempt has sent records to them, as far as this process knows; "" for an
        unknown id. If a topic is created again meanwhile, records of the attempt's earlier splits are gone."""
        named = _named_topics.setdefault(self.ledger, {})
        while len(_named_topics) > KEPT:
            _named_topics.popitem(last=False)
        if new := [topic for topic in topics if topic not in self.topic_ids and topic not in named]:
            named |= read_topic_ids(self.reading, new, self.conn_id)
        return {topic: self.topic_ids[topic] if topic in self.topic_ids else named[topic] for topic in topics}

    def _list_topic_ids(self, topics: Set[str]) -> dict[str, str]:
        """Return the known ids of topics that records were sent to, without that of the window's target."""
        ids = self._find_topic_ids(sorted(topics - {self.topic}))
        return {topic: topic_id for topic, topic_id in ids.items() if topic_id}

    def _consume(self, producer: Producer, split: int) -> None:
        if self.consumed is None or split not in self.consumed.offsets:
            return
        offsets = [self.consumed.offsets[split]]
        send_offsets(producer, self.reading, self.consumed.group_id, offsets, self.transaction_timeout)

    def _mark(self, producer: Producer, marker: Marker) -> None:
        # The marker is written last, because no reader passes it in the ledger's partition before its transaction ends.
        record = make_marker_record(self.ledger.pipeline, marker)
        producer.produce(self.ledger.topic, record.value, record.key, self.ledger.partition)
        if producer.flush(self.transaction_timeout):
            raise KafkaUnavailable(self.conn_id, f"publishing split {marker.split}", "its marker was not acknowledged")

    def _resolve(self, error: BaseException, events: ClientEvents, split: int, seconds: float) -> Marker:
        """Return the outcome of the split from the ledger, because the client's exception does not contain it. Either the outcome
        is unknown, or another task has taken over.

        :return: its marker, if it is published.
        """
        fenced = is_fenced(error, events)
        if (fenced or is_fatal(error)) and seconds > self.transaction_timeout:
            # The brokers use one error for a producer that took too long and for one that was replaced.
            marker = self.find_marker(split)
            failure: KafkaSparkError = TransactionTimedOut(
                self.ledger.pipeline, self._format_step(split), seconds, self.transaction_timeout
            )
            failure.found += events.describe_throttling()
        elif fenced:
            marker = self._wait_for_other(split)
            failure = Fenced(self.ledger.pipeline, self._format_step(split))
        elif is_fatal(error):
            # Probably a fence that the client reports as another error. Fencing again would end the task that has taken over.
            marker = self._wait_for_other(split)
            failure = self._make_unavailable_error(error, self._format_step(split))
        else:
            failure = self._make_failure(error, self._format_step(split), events)
            # Fencing this task's own id ends the uncertain transaction: afterwards it is either committed or aborted.
            try:
                self._fence(split, ClientEvents())
            except KafkaException:
                raise failure from None
            marker = self.find_marker(split)
        if marker is None:
            raise failure from None
        return marker

    def _wait_for_other(self, split: int) -> Marker | None:
        deadline = time.monotonic() + YIELD_SECONDS
        while (marker := self.find_marker(split)) is None and time.monotonic() < deadline:
            time.sleep(0.5)
        return marker

    def _format_step(self, split: int) -> str:
        return f"publishing split {split} of window {self.ledger.number}"

    def _make_failure(self, error: BaseException, doing: str, events: ClientEvents) -> KafkaSparkError:
        """Return the error to raise: :class:`.KafkaRefused` if the brokers refused a record. Only the transaction reports this if
        no callback watched the batch."""
        said = error.args[0] if isinstance(error, KafkaException) else None
        # Records that are sent are watched; the marker is not.
        marker = [Right("topic", "Write", self.ledger.topic)]
        if missing := find_missing_right(said, KafkaUser.of(self.config, self.conn_id), doing, marker):
            return missing
        if refused := said and find_refusal(said, self.conn_id, "rows"):
            return refused
        failure = self._make_unavailable_error(error, doing)
        return name_quota(failure, events) if said is not None and said.name() in _LATE else failure

    def _make_unavailable_error(self, error: BaseException, doing: str) -> KafkaUnavailable:
        return KafkaUnavailable(self.conn_id, doing, describe_producer_error(error))


def publish_split(publisher: Publisher | None, split: int, records: RecordBatches) -> pa.RecordBatch:
    """Publish a split, or only count its rows, and return the result for the driver.

    :param publisher: None: the rows are only counted.
    :return: one row of JSON with the split's marker, its count, its bad records, or the error that ended it.
    """
    try:
        if publisher is None:
            for _ in records:
                pass
            assert records.result is not None
            result = json.dumps({"counted": result_to_json(records.result)})
        else:
            result = json.dumps({"marker": marker_to_json(publisher.publish(split, records))})
    except Rejected as rejected:
        result = json.dumps({"rejected": result_to_json(rejected.result)})
    except KafkaSparkError as error:
        result = encode_error(error)
    return pa.RecordBatch.from_arrays([pa.array([result], pa.string())], ["result"])
