"""What the Kafka hook answers with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from airflow_kafka_spark.windows.model import TopicPartition


@dataclass(frozen=True)
class TopicDescription:
    """A topic as the cluster describes it.

    :param name: its name.
    :param topic_id: Kafka's id as its tools write it, which a topic recreated under the same name does not share; "" from
        brokers without ids.
    :param partitions: the numbers of its partitions, ascending, at least one.
    :param replication_factor: replicas of the partition that has the fewest.
    :param internal: whether it belongs to Kafka itself.
    """

    name: str
    topic_id: str
    partitions: tuple[int, ...]
    replication_factor: int
    internal: bool

    @classmethod
    def of(cls, topic: Any) -> TopicDescription:
        """From confluent-kafka's ``TopicDescription``."""
        topic_id = topic.topic_id
        known = topic_id is not None and (topic_id.get_most_significant_bits(), topic_id.get_least_significant_bits()) != (0, 0)
        return cls(
            name=topic.name,
            topic_id=_kafkas_form(topic_id) if known else "",
            partitions=tuple(sorted(p.id for p in topic.partitions)),
            replication_factor=min(len(p.replicas) for p in topic.partitions),
            internal=bool(topic.is_internal),
        )

    @property
    def topic_partitions(self) -> tuple[TopicPartition, ...]:
        return tuple(TopicPartition(self.name, partition) for partition in self.partitions)


def _kafkas_form(topic_id: Any) -> str:
    # librdkafka writes ids in plain base64, Kafka and its tools in the URL-safe one.
    return str(topic_id).translate(str.maketrans("+/", "-_"))


@dataclass(frozen=True)
class RecordAt:
    """The place of a record in its partition, and its timestamp.

    :param timestamp: its timestamp, milliseconds since the epoch.
    :param epoch: the leader epoch that the broker names with it; -1 where it names none.
    """

    offset: int
    timestamp: int
    epoch: int = field(default=-1, compare=False)


@dataclass(frozen=True)
class PartitionOffsets:
    """The bounds of a partition's log; ``low <= lso <= high``.

    :param low: low watermark: the first offset that is still there.
    :param lso: last stable offset: the first offset of the oldest open transaction, else ``high``. A reader of committed
        records gets no further, so windows end here.
    :param high: high watermark: the offset that the next replicated record gets.
    :param epoch: the leader epoch under which they hold; -1 from brokers that do not tell.
    """

    low: int
    lso: int
    high: int
    epoch: int = field(default=-1, compare=False)

    @property
    def held_back(self) -> int:
        """Offsets behind an open transaction, which nobody can read in read_committed yet."""
        return self.high - self.lso


@dataclass(frozen=True)
class CommittedOffset:
    """What a consumer group committed for a partition.

    :param offset: the next offset to read.
    :param metadata: the text committed along with it.
    """

    offset: int
    metadata: str = ""


@dataclass(frozen=True)
class PartitionLag:
    """How far a consumer group is behind a partition's last stable offset.

    :param committed: the committed offset, or None without one.
    :param low: the partition's low watermark.
    :param end: the partition's last stable offset.
    """

    committed: int | None
    low: int
    end: int

    @property
    def lag(self) -> int:
        """Offsets still to read: an upper bound of the records, never negative.

        A group that commits "last record + 1" keeps a lag of 1 behind the marker of a last transaction.
        """
        return max(0, self.end - max(self.low, self.committed or 0))


@dataclass(frozen=True)
class GroupMember:
    """A live member of a consumer group.

    :param client_id: the ``client.id`` it gave.
    :param host: where it connects from, as the broker sees it.
    :param topics: the topics assigned to it, sorted.
    """

    client_id: str
    host: str
    topics: tuple[str, ...]

    def __str__(self) -> str:
        reading = f" reading {', '.join(self.topics)}" if self.topics else ""
        return f"{self.client_id} at {self.host.lstrip('/')}{reading}"


@dataclass(frozen=True)
class GroupState:
    """A consumer group and who is in it.

    :param group_id: the group.
    :param state: Kafka's name: ``Stable``, ``Empty``, ``PreparingRebalance``, ``CompletingRebalance``, ``Assigning``,
        ``Reconciling``, ``Dead`` (there is no such group) or ``Unknown``.
    :param members: the live members; Kafka refuses to set the offsets of a group that has any.
    """

    group_id: str
    state: str
    members: tuple[GroupMember, ...] = ()
