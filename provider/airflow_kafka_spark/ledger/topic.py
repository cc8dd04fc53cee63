"""The ledger topic as a log: where a pipeline's records lie, and how they are read to the end."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from airflow_kafka_spark.errors import KafkaUnavailable, LedgerUnreadable, RightMissing
from airflow_kafka_spark.hooks.kafka.events import ClientEvents
from airflow_kafka_spark.hooks.kafka.rights import consume
from airflow_kafka_spark.ledger.open_transactions import OpenTransaction, abort_transaction, transaction_of_record
from airflow_kafka_spark.windows.interval_archive import IntervalArchive
from airflow_kafka_spark.windows.memory import LedgerRecord, Memory, NewerVersion, key_prefix, remember
from airflow_kafka_spark.windows.model import TopicPartition

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.hooks.kafka.requests import PartitionOffsets

log = logging.getLogger(__name__)

TOPIC = "airflow-windows"
PARTITIONS = 8

CONFIG = {
    "cleanup.policy": "compact",
    # Small segments and an eager cleaner: the cleaner never touches the active segment, which every reader pays for.
    "segment.bytes": str(8 << 20),
    "min.cleanable.dirty.ratio": "0.1",
    "compression.type": "producer",
}

ABORT_AFTER_SECONDS = 45.0
"""Seconds for which another pipeline's open transaction is waited for before it is ended: longer than the brokers let those of
the ledger stay open. A split's has its marker for moments only; one that has it for longer is that of a dead task, or of a paused
one."""
WAIT_FOR_NONE = (b"\x00",)
"""A prefix of no key: records that an open transaction hides are not waited for."""
READ_AGAIN_SECONDS = 3600.0
"""After which a reader starts anew. Compaction keeps tombstones for a day (``delete.retention.ms``)."""
READ_SECONDS = 120.0
"""Seconds of waiting in all, for that and for brokers that do not answer."""


T = TypeVar("T")
OnHidden = Callable[[frozenset[bytes]], None]
AbortTransaction = Callable[[OpenTransaction], str]
"""Aborts an open transaction. Returns why that failed; empty if it was done."""


@dataclass(frozen=True)
class Hint:
    """The offset at which reading the ledger may begin, carried by the metadata of the group's committed offsets. It is only a
    short cut.

    :param topic_id: of the ledger topic; a recreated ledger makes the hint void.
    :param partition: where the pipeline's records lie.
    :param offset: no record of the pipeline that still counts lies below it.
    """

    topic_id: str
    partition: int
    offset: int

    def __str__(self) -> str:
        return f"{self.topic_id}:{self.partition}:{self.offset}"

    @classmethod
    def from_metadata(cls, metadata: str, pipeline: str) -> Hint | None:
        """Return the hint in a committed offset's metadata; None for other metadata, which any client may commit. The hint of
        another pipeline may lie behind this pipeline's records.

        :param pipeline: whose hint it has to be.
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
class LedgerPlace:
    """All that a task needs to know of the ledger.

    :param topic: the ledger topic.
    :param partition: where the pipeline's records lie.
    :param offset: of the claim; whatever is written to the window by others lies behind it.
    :param pipeline: the pipeline.
    :param number: the window's.
    :param token: the attempt's: whose token is in the window's newest record owns it.
    """

    topic: str
    partition: int
    offset: int
    pipeline: str
    number: int
    token: str


@dataclass(frozen=True)
class Found:
    """The result of reading the ledger: a pipeline's memory, and the partition that its records belong to.

    :param parent: what the ledger holds of the pipeline that it lies beside.
    """

    memory: Memory
    partition: int
    parent: Memory | None = None

    @property
    def exists(self) -> bool:
        return self.memory.exists or bool(self.parent and self.parent.exists)


@dataclass
class _Read:
    """The records that were read of a partition so far: the newest of each key that was asked for.

    :param epoch: of the partition's leader, when it was read first.
    :param past: the offset behind the last committed record that was read.
    :param at: when it was read first, as :func:`time.monotonic` tells it.
    :param removed: the newest tombstone, by what its key begins with.
    """

    epoch: int
    past: int
    at: float
    records: dict[bytes, LedgerRecord] = field(default_factory=dict)
    removed: dict[bytes, LedgerRecord] = field(default_factory=dict)

    def add(self, record: LedgerRecord, prefixes: tuple[bytes, ...]) -> None:
        """Add a record. Of removed records only the newest tombstone per prefix is kept: it shows that there was a record."""
        if record.value is not None:
            self.records[record.key] = record
            return
        self.records.pop(record.key, None)
        self.removed[next(filter(record.key.startswith, prefixes))] = record


def unreadable_version(topic: str, found: str, what: str) -> LedgerUnreadable:
    """Return the error for a record that a newer release wrote.

    :param topic: the ledger topic.
    :param found: whose record it is, its version and its offset.
    :param what: what such records are, as a noun.
    """
    action = "Upgrade airflow-provider-kafka-spark to the release that wrote it"
    return LedgerUnreadable(topic, found, f"{what} of this version or older", action)


class LedgerTopic:
    """The compacted topic in which all pipelines of a cluster keep their ledgers.

    A second read of the same records, as an attempt makes it, gets from Kafka only what came since. After
    :data:`READ_AGAIN_SECONDS`, and after an election of another leader, all of it is read again: a tombstone that compaction has
    removed in between, or a log that was cut, would go unnoticed.

    :param hook: the cluster.
    :param name: the topic's name.
    :param replication_factor: used when the topic is created; -1 is the brokers' default.
    """

    def __init__(self, hook: KafkaHook, name: str = TOPIC, replication_factor: int = -1) -> None:
        self.hook = hook
        self.name = name
        self.replication_factor = replication_factor
        self.topic_id = ""
        self.partitions: tuple[int, ...] = ()
        self._read_before: dict[tuple[int, int, tuple[bytes, ...]], _Read] = {}
        self._archives: dict[LedgerRecord, IntervalArchive] = {}

    def find_existing(self) -> bool:
        """Return True if the topic exists. Nothing is created."""
        described = self.hook.describe_topics([self.name], missing="omit").get(self.name)
        if described is None:
            return False
        self._is(described.topic_id, described.partitions)
        return True

    def _is(self, topic_id: str, partitions: tuple[int, ...]) -> None:
        if topic_id != self.topic_id:
            self._read_before.clear()
        self.topic_id, self.partitions = topic_id, partitions

    def ensure(self) -> None:
        """Find the topic, creating it on first use.

        :raises LedgerUnreadable: when it exists and is not compacted: retention would delete what pipelines remember.
        """
        found = self.hook.describe_topics([self.name], missing="omit")
        if found:
            self._check_settings(found[self.name].replication_factor)
        else:
            self.hook.create_topic(self.name, PARTITIONS, self.replication_factor, CONFIG)
            found = self.hook.describe_topics([self.name])
        self._is(found[self.name].topic_id, found[self.name].partitions)

    def _check_settings(self, replicas: int) -> None:
        settings = self.hook.topic_config([self.name])[self.name]
        policy = settings.get("cleanup.policy", "")
        if policy != "compact":
            raise LedgerUnreadable(
                self.name,
                f"its cleanup.policy is `{policy}`",
                "`compact`: anything else deletes what pipelines remember",
                f"Set `cleanup.policy=compact` on topic `{self.name}`, or name another topic with `ledger_topic`",
            )
        in_sync = int(settings.get("min.insync.replicas") or 1)
        if min(replicas, in_sync) < 2 and (warning := may_lose_records(self.name, replicas, in_sync, self.hook.broker_count())):
            log.warning("%s", warning)

    def look(
        self, pipeline: str, hint: Hint | None = None, on_hidden: OnHidden | None = None, *, parent: str | None = None
    ) -> Found:
        """Read everything the ledger holds of a pipeline, up to the high watermark seen now, in read_committed.

        Not only to the last stable offset: another pipeline's open transaction may hide one of our records, so it is waited for.

        :param hint: where to begin; without a valid one the partition is read from its beginning.
        :param on_hidden: called with the keys of the pipeline's records that an open transaction hides; they are then waited for.
        :param parent: another pipeline, in whose partition this one's records lie, and which is looked at too.
        :raises LedgerUnreadable: when the end cannot be reached, or a record is of a newer version.
        """
        if hint and hint.topic_id == self.topic_id and hint.partition in self.partitions:
            found = self.look_into(pipeline, hint.partition, hint.offset, on_hidden=on_hidden)
            if found.exists:
                return found

        def there(partition: int) -> Found:
            return self.look_into(pipeline, partition, on_hidden=on_hidden, parent=parent)

        return self.find(parent or pipeline, there, lambda found: found.exists)

    def glance(self, pipeline: str, wait_for: tuple[bytes, ...] = WAIT_FOR_NONE) -> Found:
        """Return what the ledger holds of a pipeline now, without waiting for what an open transaction hides.

        :param wait_for: what the keys of records begin with that are waited for nevertheless.
        """
        return self.find(pipeline, lambda p: self.look_into(pipeline, p, wait_for=wait_for), lambda found: found.exists)

    def find(self, name: str, look: Callable[[int], T], is_there: Callable[[T], bool]) -> T:
        """Look in the partition of new records of this name, and if there are none, in all others. Records of a name stay in
        the partition of the first one, even if partitions were added since.

        :param look: looks into one partition.
        """
        home = self.partition_of(name)
        found = look(home)
        others = [p for p in self.partitions if p != home]
        if is_there(found) or not others:
            return found
        with ThreadPoolExecutor(len(others)) as pool:
            return next((there for there in pool.map(look, others) if is_there(there)), found)

    def partition_of(self, name: str) -> int:
        """Return the partition to which new records of this name go."""
        from airflow_kafka_spark.hooks.partitioner import partition_of

        return partition_of(name.encode(), len(self.partitions))

    def look_into(
        self,
        pipeline: str,
        partition: int,
        start: int = 0,
        *,
        wait_for: tuple[bytes, ...] | None = None,
        on_hidden: OnHidden | None = None,
        parent: str | None = None,
    ) -> Found:
        """Return what one partition holds of a pipeline.

        :param start: where to begin.
        :param wait_for: what the keys of records begin with that are waited for behind an open transaction; default all of the
            pipeline's.
        :param parent: see :meth:`look`.
        """
        names = (pipeline, parent) if parent else (pipeline,)
        mine = tuple(map(key_prefix, names))
        records = self.newest(partition, start, mine, mine if wait_for is None else wait_for, on_hidden)
        try:
            memory = remember(pipeline, records, self._archives)
            return Found(memory, partition, remember(parent, records, self._archives) if parent else None)
        except NewerVersion as error:
            raise unreadable_version(self.name, f"pipeline `{pipeline}` has {error}", "records") from None

    def newest(
        self,
        partition: int,
        start: int,
        prefixes: tuple[bytes, ...],
        wait_for: tuple[bytes, ...],
        on_hidden: OnHidden | None = None,
    ) -> list[LedgerRecord]:
        """Return the newest committed record of each key that begins with one of these, up to the high watermark seen now, in the
        order in which the keys were met. Before them comes the newest tombstone for each of these beginnings.

        :param start: where to begin.
        :param wait_for: what keys begin with that must not be missed: behind an open transaction they are waited for.
        :param on_hidden: see :func:`read_to`.
        """
        tp = TopicPartition(self.name, partition)
        bounds = self.hook.offsets([tp])[tp]
        key, now = (partition, start, prefixes), time.monotonic()
        read = self._read_before.get(key)
        if read is None or read.past > bounds.high or read.epoch != bounds.epoch or now - read.at > READ_AGAIN_SECONDS:
            self._archives.clear()
            read = self._read_before[key] = _Read(bounds.epoch, start if bounds.low <= start <= bounds.high else bounds.low, now)
        begin = max(read.past, bounds.low)
        if begin < bounds.high:
            config = self.hook.consumer_config(**PROMPT, **FEW_AHEAD)
            try:
                for record in read_to(config, tp, begin, bounds.high, wait_for, on_hidden, self.abort):
                    read.past = record.offset + 1
                    if record.key.startswith(prefixes):
                        read.add(record, prefixes)
            except RightMissing as error:
                raise error.at(self.hook.conn_id) from None
        return [*read.removed.values(), *read.records.values()]

    def abort(self, transaction: OpenTransaction) -> str:
        """Abort a transaction. See :func:`~airflow_kafka_spark.ledger.open_transactions.abort_transaction`."""
        return abort_transaction(self.hook.producer_config(), self.name, transaction)


@dataclass
class LedgerReader:
    """Reads the ledger of one pipeline again and again for a viewer. Nothing is fenced or created.

    :param pipeline: the pipeline.
    :param ledger_topic: the ledger topic, which need not exist.
    """

    pipeline: str
    ledger_topic: str = TOPIC
    _seen: tuple[str, dict[TopicPartition, PartitionOffsets]] | None = None
    _memory: Memory | None = None
    _topic: LedgerTopic | None = None

    def look(self, hook: KafkaHook) -> Memory:
        """Return all that the ledger holds of the pipeline now; a memory that does not exist where the ledger does not know the
        pipeline.

        It is read again only when something was written to the ledger since.
        """
        described = hook.describe_topics([self.ledger_topic], missing="omit")
        if not described:
            return Memory(self.pipeline)
        # Before it is read: what is written meanwhile makes the next look read again.
        seen = (described[self.ledger_topic].topic_id, hook.offsets([self.ledger_topic]))
        if self._memory is None or seen != self._seen:
            if self._topic is None or self._topic.hook is not hook:
                self._topic = LedgerTopic(hook, self.ledger_topic)
            # Nothing is checked or created: a reader needs no more rights than to read.
            if not self._topic.find_existing():
                return Memory(self.pipeline)
            self._memory, self._seen = self._topic.look(self.pipeline).memory, seen
        return self._memory


def may_lose_records(topic: str, replicas: int, in_sync: int, brokers: int) -> str:
    """Return why a ledger topic may lose records with one broker although there are others; empty if it does not.

    :param replicas: its replication factor.
    :param in_sync: its ``min.insync.replicas``.
    :param brokers: how many the cluster has.
    """
    if brokers < 2 or min(replicas, in_sync) >= 2:
        return ""
    found = f"replication factor {replicas}" if replicas < 2 else f"`min.insync.replicas={in_sync}`"
    return (
        f"Ledger topic `{topic}` has {found} on a cluster of {brokers} brokers: what pipelines remember may be lost with one of "
        f"them. Expected {min(brokers, 3)} replicas and `min.insync.replicas=2`: raise them with `kafka-reassign-partitions.sh` "
        "and `kafka-configs.sh`"
    )


PROMPT: Mapping[str, Any] = {"fetch.wait.max.ms": 20, "fetch.error.backoff.ms": 50}
FEW_AHEAD: Mapping[str, Any] = {
    "queued.max.messages.kbytes": 4096,
    "queued.min.messages": 1000,
    "fetch.queue.backoff.ms": 5,
    "fetch.message.max.bytes": 256 << 10,
}
"""The client fetches 4 MB ahead in place of 64, and 256 kB at once in place of 1 MB: records of a ledger may be large, most of
them are other pipelines', and a compressed megabyte takes ten. A larger batch still comes whole."""
AT_ONCE = 50
"""Records that are taken from the client at once."""


def read_to(
    config: Mapping[str, Any],
    tp: TopicPartition,
    start: int,
    end: int,
    mine: tuple[bytes, ...] = (),
    on_hidden: OnHidden | None = None,
    on_open_transaction: AbortTransaction | None = None,
) -> Iterator[LedgerRecord]:
    """Yield the committed records of ``[start, end)``. Ends once the consumer is past every record, control records included.

    A read_committed reader gets no further than the last stable offset. What lies between it and ``end`` is waited for if any
    of it may be ours; an open transaction of another pipeline alone delays no reader. One that hides ours is ended if it stays.

    :param mine: what the keys of records begin with that must not be missed; empty means all.
    :param on_hidden: called once with the keys of ours that are waited for, so that their transaction can be aborted.
    :param on_open_transaction: ends the transaction that is open first, after :data:`ABORT_AFTER_SECONDS`.
    :raises LedgerUnreadable: records are still hidden after :data:`READ_SECONDS`; names the transaction that hides them.
    :raises RightMissing: the user may not read the ledger.
    """
    import confluent_kafka

    consumer = confluent_kafka.Consumer(dict(config), logger=ClientEvents())
    waiting, looked_ahead = _Waiting(config, tp, end, on_open_transaction), False
    try:
        consumer.assign([confluent_kafka.TopicPartition(tp.topic, tp.partition, start)])
        while True:
            # A short timeout: consume() waits for all it was asked for, even at the end of the partition.
            messages: list[Any] = consume(consumer, AT_ONCE, 0.02, config, f"reading {tp}")
            for message in messages:
                at_end = message.error() is not None
                if at_end and message.error().code() != confluent_kafka.KafkaError._PARTITION_EOF:
                    raise KafkaUnavailable(config["bootstrap.servers"], f"reading {tp}", message.error().str())
                if not at_end and message.offset() < end:
                    epoch = message.leader_epoch()
                    yield LedgerRecord(message.key() or b"", message.value(), message.offset(), -1 if epoch is None else epoch)
                # The end of the partition, for a read_committed reader, is the last stable offset: at `end` or still before it.
                if message.offset() + (not at_end) >= end:
                    return
                waiting.at(message.offset(), hidden=at_end and bool(mine))
                if at_end and mine and not looked_ahead:
                    looked_ahead = True
                    if not _ours_are_hidden(config, tp, message.offset(), end, mine, on_hidden):
                        return
            waiting.check()
    finally:
        consumer.close()


class _Waiting:
    """Measures for how long a reader does not progress, and which transaction holds it back.

    A transaction that hides records before the first known end has been open since then. So the time counts from the first such
    transaction, and one that follows an aborted transaction is aborted at once.
    """

    def __init__(self, config: Mapping[str, Any], tp: TopicPartition, end: int, abort: AbortTransaction | None) -> None:
        self._config, self._tp, self._end, self._abort = config, tp, end, abort
        self._since, self._stable = time.monotonic(), -1
        self._held: OpenTransaction | None = None
        self._why_not = ""

    def at(self, offset: int, *, hidden: bool) -> None:
        """Note the offset that the reader has reached.

        :param hidden: what comes next is not committed, or not there yet.
        """
        if not hidden and self._stable < 0:
            self._since = time.monotonic()
        if hidden and offset != self._stable:
            self._stable, self._held, self._why_not = offset, None, ""

    def check(self) -> None:
        """Abort the transaction that hides records if it is open for too long, and stop waiting after :data:`READ_SECONDS`.

        :raises LedgerUnreadable: it takes too long.
        """
        waited = time.monotonic() - self._since
        if self._stable >= 0 and self._held is None and waited > min(ABORT_AFTER_SECONDS, READ_SECONDS / 2):
            self._held = held = first_open_transaction(self._config, self._tp, self._stable, self._end)
            log.warning("Records of this pipeline are held up in %s by %s", self._tp, held)
            self._why_not = self._abort(held) if self._abort and held.purposes else ""
        if waited > READ_SECONDS:
            raise self._error()

    def _error(self) -> LedgerUnreadable:
        tp, name = self._tp, self._held.pipeline if self._held else ""
        unblock = f"`airflow kafka-spark unblock {name} --ledger-topic {tp.topic}` ends it, if its producer is known. "
        abort = f"`kafka-transactions.sh abort --topic {tp.topic} --partition {tp.partition} --start-offset {self._stable}`"
        return LedgerUnreadable(
            tp.topic,
            f"partition {tp.partition} could not be read up to offset {self._end} within {READ_SECONDS:.0f} s"
            + (f", because of {self._held}" if self._held else "")
            + (f"; ending it failed: {self._why_not}" if self._why_not else ""),
            "its last stable offset to move on",
            f"Retry. {unblock if name else ''}If it stays, the brokers have lost it (see `kafka-transactions.sh find-hanging`): "
            f"{abort}",
        )


def first_open_transaction(config: Mapping[str, Any], tp: TopicPartition, stable: int, end: int) -> OpenTransaction:
    """Return the transaction that is open at the last stable offset of a partition."""
    first = next(read_to({**config, "isolation.level": "read_uncommitted"}, tp, stable, end), None)
    return transaction_of_record(first or LedgerRecord(b"", None, stable), tp.partition)


def _ours_are_hidden(
    config: Mapping[str, Any], tp: TopicPartition, start: int, end: int, mine: tuple[bytes, ...], on_hidden: OnHidden | None
) -> bool:
    """Return True if records of this pipeline lie in ``[start, end)``, whether their transactions are decided or not."""
    uncommitted = {**config, "isolation.level": "read_uncommitted"}
    hidden = frozenset(record.key for record in read_to(uncommitted, tp, start, end) if record.key.startswith(mine))
    if hidden:
        log.info("Records of this pipeline lie behind an open transaction in %s: waiting until it has ended", tp)
        if on_hidden:
            on_hidden(hidden)
    return bool(hidden)
