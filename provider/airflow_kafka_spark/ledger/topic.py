"""The ledger topic as a log: find the records of a pipeline, and read them to the end.

Readers of committed records stop at the first open transaction of a partition: all pipelines of the partition wait for it. So a
reader identifies the pipeline that has left a transaction open, and aborts the transaction.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_kafka_spark.errors import KafkaUnavailable, LedgerUnreadable, PipelineRenamed, RightMissing
from airflow_kafka_spark.errors.base import format_command
from airflow_kafka_spark.hooks.kafka.client import ClientEvents, ConsumedMessage, KeptConsumers, LentConsumer, consume_messages
from airflow_kafka_spark.hooks.kafka.log import PROMPT
from airflow_kafka_spark.hooks.kafka.transactions import describe_producer_error, make_abort_command, make_fencing_producer
from airflow_kafka_spark.windows.interval import parse_ledger_name
from airflow_kafka_spark.windows.memory import (
    ARCHIVE,
    BINDING,
    LedgerRecord,
    Memory,
    NewerVersion,
    ParsedRecords,
    fold_records,
    is_archive_key,
    make_key_prefix,
    parse_archive_record,
)
from airflow_kafka_spark.windows.model import TopicPartition

if TYPE_CHECKING:
    from confluent_kafka import Consumer

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.hooks.kafka.requests import PartitionOffsets


END_SECONDS = 30.0
OWNER = "owner"
"""The purpose of the transactional id under which pipelines record that they use a group or a slot."""
OWN_KINDS = {"split": "split.{1}", "dead": "dead", "control": "control", BINDING: "binding"}
"""Kinds of records that are written under a transactional id of their own, with the suffix of that id."""


@dataclass(frozen=True)
class OpenTransaction:
    """An open transaction, as its first record in a partition of the ledger describes it.

    :param pipeline: the pipeline that has opened it; empty if the record was not written by this package.
    :param what: description of the transaction's records, for a message.
    :param purposes: the ids that the transaction may have, as pairs of a pipeline and the suffix of a transactional id.
    :param partition: the partition of the ledger.
    :param offset: the offset of that record.
    """

    pipeline: str
    what: str
    purposes: tuple[tuple[str, str], ...]
    partition: int
    offset: int

    def list_ids(self, topic: str) -> tuple[str, ...]:
        """Return the transactional ids that the transaction may have.

        :param topic: the ledger topic.
        """
        return tuple(make_transactional_id(topic, name, purpose) for name, purpose in self.purposes)

    def __str__(self) -> str:
        whose = f"of pipeline `{self.pipeline}` ({self.what})" if self.pipeline else "of a producer of another program"
        return f"a transaction {whose}, open since offset {self.offset}"


def make_transactional_id(topic: str, pipeline: str, purpose: str) -> str:
    """Return the transactional id under which a pipeline writes for one purpose.

    All attempts of the pipeline share the id, and no other pipeline uses it: an attempt fences its predecessors and nothing else.
    Both names may have dots, so those of the topic are written as colons, which no topic has: the topic ends with the first dot.
    Otherwise pipeline `c` of topic `a.b` and pipeline `b.c` of topic `a` would fence each other for ever.

    :param pipeline: the pipeline; for ``owner``, the group or the slot that pipelines take.
    :param purpose: ``plan``, ``close``, ``control``, ``binding``, ``owner`` or ``split.<index>``.
    """
    return f"{topic.replace('.', ':')}.{pipeline}.{purpose}"


def identify_transaction(record: LedgerRecord, partition: int) -> OpenTransaction:
    """Return the transaction that a record belongs to, if it is still open.

    :param partition: the partition of the ledger that it was read from.
    """
    try:
        pipeline, kind, *numbers = json.loads(record.key)
        value: dict[str, Any] | None = json.loads(record.value) if record.value is not None else None
        if pipeline is None and value is not None:
            # Earlier releases wrote it together with the plan of a pipeline's first window.
            name, what = str(numbers[0]), f"its first window for group {numbers[0]}"
            written = ((str(value["by"]), "plan"),) if "by" in value else ((name, OWNER),)
            return OpenTransaction(str(value["pipeline"]), what, written, partition, record.offset)
        parent, interval = parse_ledger_name(str(pipeline))
        what = f"split {numbers[1]} of window {numbers[0]}" if kind == "split" else " ".join(map(str, [kind, *numbers]))
        return OpenTransaction(
            str(pipeline), what, _list_purposes(str(pipeline), parent, interval, kind, numbers, value), partition, record.offset
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return OpenTransaction("", "", (), partition, record.offset)


def _list_purposes(
    pipeline: str, parent: str, interval: str | None, kind: str, numbers: list[Any], value: dict[str, Any] | None
) -> tuple[tuple[str, str], ...]:
    group = (parent, "group")
    if kind == ARCHIVE or (kind == "interval" and value is not None and value.get("forgotten")):
        return (group,)
    if kind in OWN_KINDS and value is not None:
        return ((pipeline, OWN_KINDS[kind].format(*numbers)),)
    # Attempts and commands write under both ids: a command changes a position under that of plans, and claims under the other.
    own = f"{pipeline}.{numbers[0]}" if kind == "interval" else pipeline
    found = [(own, "plan"), (own, "close")]
    if value is None:
        # Tombstones are also written by `forget`, those of intervals with the group, and that of a binding by an interval.
        found += [(parent, "plan"), (parent, "close")] if kind == "interval" else []
        found += [group] if interval or kind == "interval" else []
        found += [(parent, "plan")] if interval else []
        found += [(pipeline, BINDING)] if kind == BINDING else []
    elif kind == "change" and (name := value["change"].get("name")):
        # The old name of a pipeline that was renamed, in the partition of the new one.
        found.append((name, "plan"))
    return tuple(found)


def abort_transaction(config: Mapping[str, Any], topic: str, transaction: OpenTransaction) -> str:
    """Abort an open transaction by fencing its transactional id.

    The brokers abort it, and its producer is fenced, as by a newer attempt. If the transaction is being committed, its end is
    awaited instead. The caller has to check that the transaction has ended.

    :param config: a producer's configuration.
    :param topic: the ledger topic.
    :return: the reason why it could not be aborted; empty if it was.
    """
    from confluent_kafka import KafkaException

    for name in transaction.list_ids(topic):
        timeouts = {"transaction.timeout.ms": round(END_SECONDS * 1000), "message.timeout.ms": round(END_SECONDS * 1000)}
        try:
            make_fencing_producer({**config, **timeouts}, name, END_SECONDS, ClientEvents())
        except (KafkaException, RightMissing) as error:
            reason = error.found if isinstance(error, RightMissing) else describe_producer_error(error)
            return f"`{name}` could not be fenced: {reason}"
    return "" if transaction.purposes else "it is not known which transactional id it has"


log = logging.getLogger(__name__)

TOPIC = "airflow-windows"
PARTITIONS = 8

CONFIG = {
    "cleanup.policy": "compact",
    # Small segments and an eager cleaner: the active segment, which is never compacted, is read by every reader.
    "segment.bytes": str(8 << 20),
    "min.cleanable.dirty.ratio": "0.1",
    "compression.type": "producer",
}

SMALL_RECORD_BYTES = 16 << 10
"""Size in bytes up to which a record fits into any topic, so that its compressed size is not computed."""

ABORT_AFTER_SECONDS = 45.0
"""Seconds after which an open transaction of another pipeline is aborted: longer than the timeout of the ledger's own
transactions. That of a split writes its marker last, so that it hides records for a moment only, unless its task is dead or
paused."""
WAIT_FOR_NONE = (b"\x00",)
"""A prefix that no key has, with which no open transaction is awaited."""
READ_AGAIN_SECONDS = 3600.0
"""Seconds after which a reader reads the partition from the start again. Compaction keeps tombstones for a day
(``delete.retention.ms``)."""
READ_SECONDS = 120.0
"""Maximum seconds that a read waits in all, for open transactions and for brokers that do not answer."""


DROPPED = b""
"""The value of a record in the cache whose parsed form is kept instead."""


T = TypeVar("T")
OnHidden = Callable[[frozenset[bytes]], None]
AbortTransaction = Callable[[OpenTransaction], str]
"""Type of a function that aborts an open transaction. It returns the reason for a failure, or an empty text."""


@dataclass(frozen=True)
class Hint:
    """The offset at which reading the ledger may begin, stored in the metadata of the group's committed offsets. It only saves
    time: without it the partition is read from its beginning.

    :param topic_id: id of the ledger topic. The hint is invalid for a recreated ledger.
    :param partition: the partition of the pipeline's records.
    :param offset: a lower bound of the offsets of all records of the pipeline that are still needed.
    """

    topic_id: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic_id}:{self.partition}:{self.offset}"

    @classmethod
    def from_metadata(cls, metadata: str, pipeline: str) -> Hint | None:
        """Return the hint in a committed offset's metadata; None for metadata of other clients, and for a hint of another
        pipeline, which may skip records of this one.

        :param pipeline: the pipeline of the hint.
        """
        try:
            facts = json.loads(metadata)
            text = str(facts["ledger"]) if facts["pipeline"] == pipeline else ""
        except (ValueError, KeyError, TypeError):
            return None
        topic_id, _, rest = text.partition(":")
        partition, _, offset = rest.partition(":")
        return cls(topic_id, int(partition), int(offset)) if topic_id and partition.isdecimal() and offset.isdecimal() else None


@dataclass(frozen=True)
class LedgerClaim:
    """The facts of a claimed window that a task needs to read and write the ledger.

    :param topic: the ledger topic.
    :param partition: the partition of the pipeline's records.
    :param offset: offset of the claim. Later records of other attempts follow it.
    :param pipeline: the pipeline.
    :param number: number of the window.
    :param token: token of the attempt. The attempt whose token is in the window's newest record owns the window.
    """

    topic: str
    partition: int
    offset: int
    pipeline: str
    number: int
    token: str


@dataclass(frozen=True)
class LedgerContent:
    """The result of reading the ledger: the state of a pipeline, and the partition of its records.

    :param parent: the state of the parent pipeline, whose records are in that partition, too.
    """

    memory: Memory
    partition: int
    parent: Memory | None = None

    @property
    def exists(self) -> bool:
        return self.memory.exists or bool(self.parent and self.parent.exists)


@dataclass
class _Read:
    """Cache of the records that were read from a partition: the newest one of each key with one of the wanted prefixes.

    :param epoch: epoch of the partition's leader at the first read.
    :param past: the offset after the last committed record that was read.
    :param at: time of the first read (:func:`time.monotonic`).
    :param removed: the newest tombstone, by prefix of its key.
    :param parsed: the data intervals and archives among the records.
    """

    epoch: int
    past: int
    at: float
    records: dict[bytes, LedgerRecord] = field(default_factory=dict)
    removed: dict[bytes, LedgerRecord] = field(default_factory=dict)
    parsed: ParsedRecords = field(default_factory=dict)

    def add(self, record: LedgerRecord, prefixes: tuple[bytes, ...]) -> None:
        """Add a record. For each prefix, only the newest tombstone is kept, which shows that there was a record.

        Archives are kept in their parsed form only. Offset and epoch identify them: if these may have another meaning, everything
        is read again.
        """
        if (before := self.records.get(record.key)) is not None:
            self.parsed.pop(before, None)
        if record.value is not None:
            # A record of a newer release cannot be parsed, which the reader of the state reports.
            if is_archive_key(record.key, prefixes) and (found := parse_archive_record(record)) is not None:
                record = record._replace(value=DROPPED)
                self.parsed[record] = found
            self.records[record.key] = record
            return
        self.records.pop(record.key, None)
        self.removed[next(filter(record.key.startswith, prefixes))] = record


def make_unreadable_error(topic: str, found: str, what: str) -> LedgerUnreadable:
    """Return the error for a record that a newer release wrote.

    :param topic: the ledger topic.
    :param found: the owner of the record, its version and its offset.
    :param what: noun for records of this kind.
    """
    action = "Upgrade airflow-provider-kafka-spark to the release that wrote it"
    return LedgerUnreadable(topic, found, f"{what} of this version or older", action)


class LedgerTopic:
    """The compacted topic in which all pipelines of a cluster keep their ledgers.

    Records are cached, so that a second read of a partition fetches only new records. After :data:`READ_AGAIN_SECONDS`, and after
    the election of another leader, everything is read again: otherwise a tombstone that compaction has removed in between, or a
    truncated log, would go unnoticed.

    :param hook: the cluster.
    :param name: name of the topic.
    :param replication_factor: replication factor for creating the topic; -1 is the brokers' default.
    """

    def __init__(self, hook: KafkaHook, name: str = TOPIC, replication_factor: int = -1) -> None:
        self.hook = hook
        self.name = name
        self.replication_factor = replication_factor
        self.topic_id = ""
        self.partitions: tuple[int, ...] = ()
        self._read_before: dict[tuple[int, int, tuple[bytes, ...]], _Read] = {}
        self._was_missing = False

    def find_existing(self) -> bool:
        """Return True if the topic exists, without creating it."""
        described = self.hook.describe_topics([self.name], missing="omit").get(self.name)
        self._was_missing = described is None
        if described is None:
            return False
        self._set_identity(described.topic_id, described.partitions)
        return True

    def _set_identity(self, topic_id: str, partitions: tuple[int, ...]) -> None:
        if topic_id != self.topic_id:
            self._read_before.clear()
        self.topic_id, self.partitions = topic_id, partitions

    def ensure(self) -> None:
        """Find the topic, or create it on first use.

        :raises LedgerUnreadable: the topic exists and is not compacted, so that retention would delete the state of pipelines; or
            it takes small records only.
        """
        # A topic that was just found missing is not searched for again, which would take a second.
        found = {} if self._was_missing else self.hook.describe_topics([self.name], missing="omit")
        is_new = not found and self.hook.create_topic(self.name, PARTITIONS, self.replication_factor, CONFIG)
        found = found or self.hook.describe_topics([self.name])
        if not is_new:
            self._check_settings(found[self.name].replication_factor)
        self._was_missing = False
        self._set_identity(found[self.name].topic_id, found[self.name].partitions)

    def _check_settings(self, replicas: int) -> None:
        settings = self.hook.read_topic_config([self.name])[self.name]
        policy = settings.get("cleanup.policy", "")
        if policy != "compact":
            raise LedgerUnreadable(
                self.name,
                f"its cleanup.policy is `{policy}`",
                "`compact`, because any other policy deletes the state of pipelines",
                f"Set `cleanup.policy=compact` on topic `{self.name}`, or name another topic with `ledger_topic`",
                retryable=False,
            )
        largest = int(settings.get("max.message.bytes") or SMALL_RECORD_BYTES)
        if largest < SMALL_RECORD_BYTES:
            raise LedgerUnreadable(
                self.name,
                f"its max.message.bytes is {largest:,}",
                f"at least {SMALL_RECORD_BYTES:,}: smaller records of windows are written without a look at it",
                f"Leave that setting out for topic `{self.name}`, so that it is the brokers' default, or name another topic with "
                "`ledger_topic`",
                retryable=False,
            )
        in_sync = int(settings.get("min.insync.replicas") or 1)
        if min(replicas, in_sync) < 2 and (warning := may_lose_records(self.name, replicas, in_sync, self.hook.count_brokers())):
            log.warning("%s", warning)

    def read(
        self, pipeline: str, hint: Hint | None = None, on_hidden: OnHidden | None = None, *, parent: str | None = None
    ) -> LedgerContent:
        """Return the state of a pipeline from all of its committed records up to the present high watermark.

        The last stable offset is not enough: an open transaction of another pipeline may hide a committed record of this one, so
        its end is awaited.

        :param hint: start of the read; without a valid hint the partition is read from its beginning.
        :param on_hidden: called with the keys of the pipeline's records in open transactions, before their end is awaited.
        :param parent: parent pipeline, whose partition contains this one's records, and which is read, too.
        :raises LedgerUnreadable: the end cannot be reached, or a record has a newer version.
        """
        if hint and hint.topic_id == self.topic_id and hint.partition in self.partitions:
            found = self.read_partition(pipeline, hint.partition, hint.offset, on_hidden=on_hidden)
            if found.exists:
                return found

        def read_state(partition: int, bounds: PartitionOffsets) -> LedgerContent:
            return self.read_partition(pipeline, partition, on_hidden=on_hidden, parent=parent, bounds=bounds)

        return self.find(parent or pipeline, read_state, lambda found: found.exists)

    def read_without_waiting(self, pipeline: str, wait_for: tuple[bytes, ...] = WAIT_FOR_NONE) -> LedgerContent:
        """Return the state of a pipeline without waiting for open transactions, whose records are then missing.

        :param wait_for: prefixes of keys. The end of open transactions that may contain such keys is awaited. Default: none.
        """

        def read_state(partition: int, bounds: PartitionOffsets) -> LedgerContent:
            return self.read_partition(pipeline, partition, wait_for=wait_for, bounds=bounds)

        return self.find(pipeline, read_state, lambda found: found.exists)

    def read_other_ledgers(self, pipeline: str, topic_ids: Collection[str]) -> Iterator[tuple[str, Memory]]:
        """Yield the names of other ledger topics that hold a pipeline of this name, with its state there.

        :param topic_ids: ids of ledger topics. Those of topics that do not exist any more are ignored.
        """
        if not (ids := set(topic_ids) - {self.topic_id}):
            return
        for name, found in self.hook.describe_topics(self.hook.list_topics(), missing="omit").items():
            if found.topic_id in ids:
                other = LedgerTopic(self.hook, name)
                there = other.read_without_waiting(pipeline).memory if other.find_existing() else Memory(pipeline)
                if not there.is_blank or there.intervals:
                    yield name, there

    def find(self, name: str, read: Callable[[int, PartitionOffsets], T], is_there: Callable[[T], bool]) -> T:
        """Return the result of reading the partition that contains the records of a name: that of new records, or else any other.
        Records of a name stay in the partition of the first one, even if partitions were added since.

        :param read: reads one partition within its present bounds.
        :param is_there: returns True if the partition contains records of the name.
        """
        home = self.find_partition(name)
        found = read(home, self._read_bounds([home])[home])
        others = [p for p in self.partitions if p != home]
        if is_there(found) or not others:
            return found
        # One request for all of them: most are as they were at the last read, and need no other request.
        bounds = self._read_bounds(others)
        with ThreadPoolExecutor(len(others)) as pool:
            return next((there for there in pool.map(lambda p: read(p, bounds[p]), others) if is_there(there)), found)

    def _read_bounds(self, partitions: Collection[int]) -> dict[int, PartitionOffsets]:
        found = self.hook.read_offsets([TopicPartition(self.name, partition) for partition in partitions])
        return {tp.partition: offsets for tp, offsets in found.items()}

    def find_partition(self, name: str) -> int:
        """Return the partition for the first record of a name."""
        from airflow_kafka_spark.hooks.kafka.partitioner import choose_partition

        return choose_partition(name.encode(), len(self.partitions))

    def read_partition(
        self,
        pipeline: str,
        partition: int,
        start: int = 0,
        *,
        wait_for: tuple[bytes, ...] | None = None,
        on_hidden: OnHidden | None = None,
        parent: str | None = None,
        bounds: PartitionOffsets | None = None,
    ) -> LedgerContent:
        """Return the state of a pipeline from the records of one partition.

        :param start: offset at which to begin.
        :param wait_for: prefixes of keys. The end of open transactions that may contain such keys is awaited. Default: all keys
            of the pipeline.
        :param parent: as for :meth:`read`.
        :param bounds: as for :meth:`read_newest`.
        """
        names = (pipeline, parent) if parent else (pipeline,)
        mine = tuple(map(make_key_prefix, names))
        records = self.read_newest(partition, start, mine, mine if wait_for is None else wait_for, on_hidden, bounds)
        parsed = self._read_before[partition, start, mine].parsed
        try:
            memory = fold_records(pipeline, records, parsed)
            return LedgerContent(memory, partition, fold_records(parent, records, parsed) if parent else None)
        except NewerVersion as error:
            raise make_unreadable_error(self.name, f"pipeline `{pipeline}` has {error}", "records") from None

    def read_newest(
        self,
        partition: int,
        start: int,
        prefixes: tuple[bytes, ...],
        wait_for: tuple[bytes, ...],
        on_hidden: OnHidden | None = None,
        bounds: PartitionOffsets | None = None,
    ) -> list[LedgerRecord]:
        """Return the newest committed record of each key with one of these prefixes, up to the present high watermark, in the
        order in which the keys were first read. They are preceded by the newest tombstone for each prefix.

        :param start: offset at which to begin.
        :param prefixes: prefixes of the keys to return.
        :param wait_for: prefixes of keys. The end of open transactions that may contain such keys is awaited.
        :param on_hidden: as for :class:`AwaitedRecords`.
        :param bounds: the present bounds of the partition; None (default): they are looked up.
        """
        tp = TopicPartition(self.name, partition)
        bounds = bounds or self._read_bounds([partition])[partition]
        key, now = (partition, start, prefixes), time.monotonic()
        read = self._read_before.get(key)
        if read is None or read.past > bounds.high or read.epoch != bounds.epoch or now - read.at > READ_AGAIN_SECONDS:
            read = self._read_before[key] = _Read(bounds.epoch, start if bounds.low <= start <= bounds.high else bounds.low, now)
        begin = max(read.past, bounds.low)
        if begin < bounds.high:
            span = LedgerSpan(self.hook.make_consumer_config(**PROMPT, **FETCH_SETTINGS), tp, begin, bounds.high)
            awaited = AwaitedRecords(wait_for, on_hidden, self.abort)
            try:
                for record in read_span(span, awaited, self.hook.consumers):
                    read.past = record.offset + 1
                    if record.key.startswith(prefixes):
                        read.add(record, prefixes)
            except RightMissing as error:
                raise error.name_connection(self.hook.conn_id) from None
        return [*read.removed.values(), *read.records.values()]

    def forget_reads(self) -> None:
        """Drop the cache, so that the next read begins at the start of the partition."""
        self._read_before.clear()

    def abort(self, transaction: OpenTransaction) -> str:
        """Abort a transaction. See :func:`~airflow_kafka_spark.ledger.topic.abort_transaction`."""
        return abort_transaction(self.hook.make_producer_config(), self.name, transaction)


@dataclass
class LedgerReader:
    """Reads the ledger of one pipeline repeatedly, without fencing or creating anything.

    :param pipeline: the pipeline.
    :param ledger_topic: the ledger topic, which need not exist.
    """

    pipeline: str
    ledger_topic: str = TOPIC
    _seen: tuple[str, dict[TopicPartition, PartitionOffsets]] | None = None
    _memory: Memory | None = None
    _topic: LedgerTopic | None = None

    def read(self, hook: KafkaHook) -> Memory:
        """Return the state of the pipeline; its ``exists`` is False if the ledger holds no record of the pipeline.

        The ledger is read again only if something was written to it since.
        """
        described = hook.describe_topics([self.ledger_topic], missing="omit")
        if not described:
            return Memory(self.pipeline)
        # Taken before the read, so that records which are written meanwhile cause the next call to read again.
        seen = (described[self.ledger_topic].topic_id, hook.read_offsets([self.ledger_topic]))
        if self._memory is None or seen != self._seen:
            if self._topic is None or self._topic.hook is not hook:
                self._topic = LedgerTopic(hook, self.ledger_topic)
            # Not `ensure`: a reader needs no right but to read.
            if not self._topic.find_existing():
                return Memory(self.pipeline)
            self._memory, self._seen = self._topic.read(self.pipeline).memory, seen
        return self._memory


def refuse_renamed(memory: Memory) -> None:
    """Refuse to wait for a pipeline that was renamed, or to change it: nothing happens under its old name any more.

    :param memory: its state in the ledger.
    :raises PipelineRenamed: it was renamed.
    """
    if (renamed := memory.renamed_to) is not None:
        error = PipelineRenamed(memory.pipeline, renamed.name, renamed.who, renamed.at)
        error.expected, error.action = "its present name", f"Name `{renamed.name}` here, too"
        raise error


def may_lose_records(topic: str, replicas: int, in_sync: int, brokers: int) -> str:
    """Return a warning if the loss of one broker may lose records of the ledger topic; empty if it cannot, or with a single
    broker.

    :param replicas: its replication factor.
    :param in_sync: its ``min.insync.replicas``.
    :param brokers: number of brokers of the cluster.
    """
    if brokers < 2 or min(replicas, in_sync) >= 2:
        return ""
    found = f"replication factor {replicas}" if replicas < 2 else f"`min.insync.replicas={in_sync}`"
    return (
        f"Ledger topic `{topic}` has {found} on a cluster of {brokers} brokers: the state of pipelines may be lost with one of "
        f"them. Expected {min(brokers, 3)} replicas and `min.insync.replicas=2`: raise them with `kafka-reassign-partitions.sh` "
        "and `kafka-configs.sh`"
    )


FETCH_SETTINGS: Mapping[str, Any] = {
    "queued.max.messages.kbytes": 1024,
    "queued.min.messages": 200,
    "fetch.queue.backoff.ms": 5,
    "fetch.message.max.bytes": 256 << 10,
}
"""Settings of consumers of the ledger: 4 MB are fetched ahead instead of 64, and 256 kB at once instead of 1 MB. Records may be
large, most of them belong to other pipelines, and a compressed megabyte takes ten. A larger batch is still fetched whole."""
RECORDS_PER_CALL = 50
"""Maximum number of records that one call takes from the client."""


@dataclass(frozen=True)
class LedgerSpan:
    """The offsets ``[start, end)`` of a partition of the ledger, and the consumers that read them.

    :param config: the configuration of these consumers.
    :param partition: the partition.
    :param start: the first offset.
    :param end: the offset after the last one.
    """

    config: Mapping[str, Any] = field(repr=False)
    partition: TopicPartition
    start: int
    end: int

    def make_uncommitted(self, start: int) -> LedgerSpan:
        """Return the span from an offset on, for consumers that also read records of open and of aborted transactions."""
        return replace(self, config={**self.config, "isolation.level": "read_uncommitted"}, start=start)


@dataclass(frozen=True)
class AwaitedRecords:
    """The records that a reader awaits if open transactions hide them, and the handling of these transactions.

    :param keys: prefixes of the records' keys; empty (default) for all records.
    :param on_hidden: called once with the keys of such records in open transactions, so that these can be aborted.
    :param abort: aborts the first open transaction, after :data:`ABORT_AFTER_SECONDS`.
    """

    keys: tuple[bytes, ...] = ()
    on_hidden: OnHidden | None = None
    abort: AbortTransaction | None = None


ALL_RECORDS = AwaitedRecords()


def read_span(
    span: LedgerSpan, awaited: AwaitedRecords = ALL_RECORDS, kept: KeptConsumers | None = None
) -> Iterator[LedgerRecord]:
    """Yield the committed records of a span, until the consumer has passed every record, control records included.

    A read_committed reader stops at the last stable offset. If the records between it and the end may include awaited ones, their
    end is awaited; an open transaction that hides none of them delays no reader. A transaction that hides some is aborted after a
    while.

    :param kept: the consumers of a hook with this configuration, for reading again soon. Default: a consumer of its own.
    :raises LedgerUnreadable: records are still hidden after :data:`READ_SECONDS`; the message names the open transaction.
    :raises RightMissing: the user may not read the ledger.
    :raises KafkaUnavailable: the brokers refuse the login, or the partition cannot be read.
    """
    import confluent_kafka

    def make(events: ClientEvents) -> Consumer:
        return confluent_kafka.Consumer({**config, "error_cb": events.on_error}, logger=events)

    config, tp, end = span.config, span.partition, span.end
    consumers = KeptConsumers() if kept is None else kept
    waiting, looked_ahead, begun = _StallTimer(span, awaited.abort), False, time.monotonic()
    try:
        with consumers.lend((tp, config.get("isolation.level")), make, span.start, config.get("error_cb")) as lent:
            lent.consumer.assign([confluent_kafka.TopicPartition(tp.topic, tp.partition, span.start)])
            while True:
                messages = consume_messages(lent.consumer, RECORDS_PER_CALL, 0.02, config, f"reading {tp}")
                _raise_failure(span, lent, messages, begun)
                for message in messages:
                    at_end = message.error() is not None
                    if not at_end and message.offset() < end:
                        lent.past = message.offset() + 1
                        epoch = message.leader_epoch()
                        yield LedgerRecord(
                            message.key() or b"", message.value(), message.offset(), -1 if epoch is None else epoch
                        )
                    # A read_committed reader is at the last stable offset, which may be before `end`.
                    if message.offset() + (not at_end) >= end:
                        return
                    waiting.record(message.offset(), hidden=at_end and bool(awaited.keys))
                    if at_end and awaited.keys and not looked_ahead:
                        looked_ahead = True
                        if not _has_hidden_records(span.make_uncommitted(message.offset()), awaited):
                            return
                waiting.check()
    finally:
        if kept is None:
            consumers.close()


def _raise_failure(span: LedgerSpan, lent: LentConsumer, messages: Sequence[ConsumedMessage], begun: float) -> None:
    """Raise an error if one is among the messages, or if the brokers have refused the login since a time.

    :param begun: seconds of the monotonic clock.
    """
    from confluent_kafka import KafkaError

    errors = [
        error for message in messages if (error := message.error()) is not None and error.code() != KafkaError._PARTITION_EOF
    ]
    # The client tries again and again to log in. A password that was changed meanwhile stays wrong.
    failure = errors[0].str() if errors else "" if messages else lent.events.find_refused_login(begun)
    if failure:
        raise KafkaUnavailable(span.config["bootstrap.servers"], f"reading {span.partition}", failure)


class _StallTimer:
    """Measures the time for which a reader makes no progress, and aborts the transaction that holds it back.

    Every transaction that hides records before the first end has been open since the reader began to wait. So the time is counted
    from the first such transaction, and one that follows an aborted transaction is aborted at once.
    """

    def __init__(self, span: LedgerSpan, abort: AbortTransaction | None) -> None:
        self._span, self._tp, self._end, self._abort = span, span.partition, span.end, abort
        self._since, self._stable = time.monotonic(), -1
        self._held: OpenTransaction | None = None
        self._why_not = ""

    def record(self, offset: int, *, hidden: bool) -> None:
        """Record the offset that the reader has reached.

        :param hidden: True if the next record is not committed, or does not exist yet.
        """
        if not hidden and self._stable < 0:
            self._since = time.monotonic()
        if hidden and offset != self._stable:
            self._stable, self._held, self._why_not = offset, None, ""

    def check(self) -> None:
        """Abort the open transaction after :data:`ABORT_AFTER_SECONDS`, and stop waiting after :data:`READ_SECONDS`.

        :raises LedgerUnreadable: the reader has waited for :data:`READ_SECONDS`.
        """
        waited = time.monotonic() - self._since
        if self._stable >= 0 and self._held is None and waited > min(ABORT_AFTER_SECONDS, READ_SECONDS / 2):
            self._held = held = find_first_open_transaction(self._span, self._stable)
            log.warning("Records of this pipeline are held up in %s by %s", self._tp, held)
            self._why_not = self._abort(held) if self._abort and held.purposes else ""
        if waited > READ_SECONDS:
            raise self._make_error()

    def _make_error(self) -> LedgerUnreadable:
        tp, name = self._tp, self._held.pipeline if self._held else ""
        unblock = f"{format_command('unblock', name, '--ledger-topic', tp.topic)} ends it, if its producer is known. "
        return LedgerUnreadable(
            tp.topic,
            f"partition {tp.partition} could not be read up to offset {self._end} within {READ_SECONDS:.0f} s"
            + (f", because of {self._held}" if self._held else "")
            + (f"; ending it failed: {self._why_not}" if self._why_not else ""),
            "its last stable offset to move on",
            f"Retry. {unblock if name else ''}If it stays, the brokers have lost it (see `kafka-transactions.sh find-hanging`): "
            f"{make_abort_command(tp, self._stable)}",
        )


def find_first_open_transaction(span: LedgerSpan, stable: int) -> OpenTransaction:
    """Return the transaction that is open at the last stable offset of a partition."""
    first = next(read_span(span.make_uncommitted(stable)), None)
    return identify_transaction(first or LedgerRecord(b"", None, stable), span.partition.partition)


def _has_hidden_records(span: LedgerSpan, awaited: AwaitedRecords) -> bool:
    """Return True if an uncommitted span contains awaited records, in open, committed or aborted transactions."""
    hidden = frozenset(record.key for record in read_span(span) if record.key.startswith(awaited.keys))
    if hidden:
        log.info("Records of this pipeline lie behind an open transaction in %s: waiting until it has ended", span.partition)
        if awaited.on_hidden:
            awaited.on_hidden(hidden)
    return bool(hidden)
