"""The requests of the Kafka hook, and the values that they return. Requests are batched, and repeated after temporary errors."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import KafkaRefused, KafkaSparkError, KafkaUnavailable, RightMissing
from airflow_kafka_spark.hooks.kafka.client import ClientEvents, KafkaCalls, Right, describe_temporary_error
from airflow_kafka_spark.hooks.kafka.config import ALL_BROKERS, make_consumer_config
from airflow_kafka_spark.hooks.kafka.transactions import make_abort_command
from airflow_kafka_spark.windows.model import TopicPartition

if TYPE_CHECKING:
    from confluent_kafka import Consumer, KafkaError, KafkaException, TopicCollection
    from confluent_kafka import TopicPartition as KafkaTopicPartition
    from confluent_kafka.admin import AdminClient, OffsetSpec
    from confluent_kafka.admin import TopicDescription as KafkaTopicDescription

OFFSETS_TOPIC = "__consumer_offsets"
"""The topic with the committed offsets of groups."""
SPREAD_SECONDS = 1.0
"""Seconds for which a topic has to be unknown until that counts, because brokers learn of a new topic at different times. It
never counts if the topic is known to exist."""
_UNKNOWN = ("UNKNOWN_TOPIC_OR_PART", "UNKNOWN_TOPIC_ID")
_TOPIC_REFUSED = "TOPIC_AUTHORIZATION_FAILED"
_NOT_YET = (*_UNKNOWN, "_NOENT")
"""Errors of a topic that some brokers do not know yet. If no leader is known, librdkafka reports "no entry"."""

_STATES = {
    "STABLE": "Stable",
    "EMPTY": "Empty",
    "PREPARING_REBALANCING": "PreparingRebalance",
    "COMPLETING_REBALANCING": "CompletingRebalance",
    "ASSIGNING": "Assigning",
    "RECONCILING": "Reconciling",
    "DEAD": "Dead",
}


# --- answers ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TopicDescription:
    """A topic as the cluster describes it.

    :param name: its name.
    :param topic_id: its id in the form of Kafka's tools; a recreated topic has another one. "" from brokers without ids.
    :param partitions: the numbers of its partitions, ascending, at least one.
    :param replication_factor: number of replicas of the partition that has the fewest.
    :param internal: True if it is one of Kafka's own topics.
    :param rights: Kafka's names of the user's rights, as ``DescribeConfigs``; empty if they were not requested, or if the brokers
        do not return them.
    """

    name: str
    topic_id: str
    partitions: tuple[int, ...]
    replication_factor: int
    internal: bool
    rights: frozenset[str] = field(default=frozenset(), compare=False)

    @classmethod
    def of(cls, topic: KafkaTopicDescription) -> TopicDescription:
        """Return the description from that of confluent-kafka."""
        topic_id: Any = topic.topic_id  # the stub of Uuid has no methods
        known = topic_id is not None and (topic_id.get_most_significant_bits(), topic_id.get_least_significant_bits()) != (0, 0)
        return cls(
            name=topic.name,
            topic_id=_format_topic_id(topic_id) if known else "",
            partitions=tuple(sorted(p.id for p in topic.partitions)),
            replication_factor=min(len(p.replicas) for p in topic.partitions),
            internal=bool(topic.is_internal),
            rights=_name_rights(topic.authorized_operations),
        )

    @property
    def topic_partitions(self) -> tuple[TopicPartition, ...]:
        """The partitions of the topic."""
        return tuple(TopicPartition(self.name, partition) for partition in self.partitions)


def _name_rights(operations: Collection[Enum] | None) -> frozenset[str]:
    return frozenset(operation.name.title().replace("_", "") for operation in operations or ())


def _format_topic_id(topic_id: object) -> str:
    # librdkafka writes ids in standard base64, Kafka and its tools in the URL-safe variant.
    return str(topic_id).translate(str.maketrans("+/", "-_"))


@dataclass(frozen=True)
class RecordAt:
    """The place of a record in its partition, and its timestamp.

    :param timestamp: its timestamp, milliseconds since the epoch.
    :param epoch: its leader epoch; -1 if the broker returns none.
    """

    offset: int
    timestamp: int
    epoch: int = field(default=-1, compare=False)


@dataclass(frozen=True)
class PartitionOffsets:
    """The bounds of a partition's log; ``low <= lso <= high``.

    :param low: low watermark: the first offset that is left in the log.
    :param lso: last stable offset: the first offset of the oldest open transaction, or else ``high``. Readers of committed
        records, and so windows, stop here.
    :param high: high watermark: the offset after the last replicated record.
    :param epoch: epoch of the leader that has returned the offsets; -1 from brokers that return none.
    """

    low: int
    lso: int
    high: int
    epoch: int = field(default=-1, compare=False)

    @property
    def held_back(self) -> int:
        """Number of offsets after the start of an open transaction, which read_committed readers do not get yet."""
        return self.high - self.lso


@dataclass(frozen=True)
class CommittedOffset:
    """The offset that a consumer group has committed for a partition.

    :param offset: the next offset to read.
    :param metadata: the text committed along with it.
    :param epoch: the leader epoch committed along with it; -1 if it is unknown. It is not compared.
    """

    offset: int
    metadata: str = ""
    epoch: int = field(default=-1, compare=False)


@dataclass(frozen=True)
class GroupMember:
    """A live member of a consumer group.

    :param client_id: its ``client.id``.
    :param host: its address, as the broker sees it.
    :param topics: the topics that are assigned to it, sorted.
    """

    client_id: str
    host: str
    topics: tuple[str, ...]

    def __str__(self) -> str:
        reading = f" reading {', '.join(self.topics)}" if self.topics else ""
        return f"{self.client_id} at {self.host.lstrip('/')}{reading}"


@dataclass(frozen=True)
class GroupState:
    """A consumer group and its live members.

    :param group_id: the group.
    :param state: Kafka's name: ``Stable``, ``Empty``, ``PreparingRebalance``, ``CompletingRebalance``, ``Assigning``,
        ``Reconciling``, ``Dead`` (there is no such group) or ``Unknown``.
    :param members: the live members; Kafka refuses to set the offsets of a group that has any.
    :param rights: as those of :class:`TopicDescription`.
    """

    group_id: str
    state: str
    members: tuple[GroupMember, ...] = ()
    rights: frozenset[str] = field(default=frozenset(), compare=False)


# --- requests ----------------------------------------------------------------------------------------------------------


def describe_topics(calls: KafkaCalls, names: Collection[str]) -> dict[str, TopicDescription]:
    """Return the topics that exist, by name."""
    found, _ = _describe_topics(calls, names)
    return found


def _describe_topics(
    calls: KafkaCalls, names: Collection[str], *, with_rights: bool = False, optional: Collection[str] = ()
) -> tuple[dict[str, TopicDescription], dict[str, KafkaError]]:
    """Return the topics that exist, by name, and the errors of those that the user may not describe.

    :param with_rights: True to request the user's rights, too, and to return these errors instead of raising the first.
    :param optional: topics that count as missing at the first answer.
    """
    found: dict[str, Any] = {}
    refused: dict[str, KafkaError] = {}
    absent = sorted(set(names))
    deadline = time.monotonic() + SPREAD_SECONDS

    def submit(client: AdminClient, keys: list[str], timeout: float) -> dict[str, Future]:
        futures: dict[str, Future] = client.describe_topics(
            _make_collection(keys), include_authorized_operations=with_rights, request_timeout=timeout
        )
        return futures

    while absent:
        some, errors = calls.request_each(
            "describing topics",
            absent,
            submit,
            tolerate=(*_UNKNOWN, *((_TOPIC_REFUSED,) if with_rights else ())),
            check=lambda topic: "" if topic.partitions else "the brokers describe this topic without partitions",
            rights=[Right("topic", "Describe")],
        )
        found |= some
        refused |= {name: error for name, error in errors.items() if error.name() == _TOPIC_REFUSED}
        absent = [name for name in errors if name not in refused and name not in optional]
        if time.monotonic() > deadline:
            break
        if absent:
            calls.client.poll(SPREAD_SECONDS / 5)
    return {name: TopicDescription.of(found[name]) for name in sorted(found)}, refused


def check_topics(
    calls: KafkaCalls, needed: Mapping[str, Sequence[str]], optional: Collection[str] = ()
) -> tuple[dict[str, TopicDescription], dict[str, RightMissing]]:
    """Return the topics that exist, and the errors of those on which the user lacks a right (KIP-430). A topic may be in both.

    :param needed: the needed rights by topic. ``Create`` is not missing on a topic that exists.
    :param optional: topics that count as missing at the first answer.
    """
    found, refused = _describe_topics(calls, list(needed), with_rights=True, optional=optional)
    lacking = {name: calls.make_right_error("topic", name, ["Describe"], needed[name]) for name in refused}
    for name, topic in found.items():
        if missing := find_lacking(topic.rights, needed[name]):
            lacking[name] = calls.make_right_error("topic", name, missing, needed[name])
    return found, lacking


def find_lacking(rights: Collection[str], needed: Sequence[str]) -> list[str]:
    """Return the needed rights that a user lacks on a resource that exists.

    :param rights: the rights that the brokers have returned. A resource that was described without the right Describe is one of
        brokers that return no rights: nothing is missing.
    """
    return [right for right in needed if right not in rights and right != "Create"] if "Describe" in rights else []


def read_topic_configs(calls: KafkaCalls, names: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the settings of topics that exist."""
    return _read_configs(calls, "topic", names)


def read_broker_config(calls: KafkaCalls) -> dict[str, str]:
    """Return the settings of the first broker; empty without the right to see them."""
    cluster = calls.request_one(
        "asking for the brokers", lambda client, timeout: client.describe_cluster(request_timeout=timeout)
    )
    first = str(min(node.id for node in cluster.nodes))
    return _read_configs(calls, "broker", [first]).get(first, {})


def _read_configs(calls: KafkaCalls, kind: str, names: Collection[str]) -> dict[str, dict[str, str]]:
    """Return the settings that have a value, by topic or broker. Those that may not be seen are left out."""
    from confluent_kafka.admin import ConfigResource

    def submit(client: AdminClient, keys: list[str], timeout: float) -> dict[str, Future]:
        resources = [ConfigResource(ConfigResource.Type[kind.upper()], key) for key in keys]
        futures = client.describe_configs(resources, request_timeout=timeout)
        return {resource.name: future for resource, future in futures.items()}

    refused = ("CLUSTER_AUTHORIZATION_FAILED",) if kind == "broker" else ()
    rights = [Right("topic", "DescribeConfigs"), Right("cluster", "DescribeConfigs")]
    found, _ = calls.request_each(f"reading {kind} settings", names, submit, tolerate=refused, wait_for=_NOT_YET, rights=rights)
    return {name: {key: e.value for key, e in entries.items() if e.value is not None} for name, entries in found.items()}


@dataclass(frozen=True)
class TopicRequest:
    """A topic that is going to be created.

    :param name: its name.
    :param partitions: the number of its partitions.
    :param replication_factor: the number of replicas of each partition.
    :param config: its settings.
    """

    name: str
    partitions: int
    replication_factor: int
    config: Mapping[str, str]


def create_topic(calls: KafkaCalls, topic: TopicRequest, *, exist_ok: bool) -> bool:
    """Create a topic, and wait until the leaders of its partitions serve it. Return True if it was created by this call."""
    from confluent_kafka.admin import OffsetSpec

    exists, asked = _request_topic(calls, "creating a topic", topic)
    # If the topic exists after an attempt whose answer was lost, this call has most likely created it.
    created = exists is None or asked > 1
    if exists is not None and not (created or exist_ok):
        raise calls.translate("creating a topic", exists, topic.name)
    described = calls.request_each(
        "waiting for a new topic",
        [topic.name],
        lambda client, keys, timeout: client.describe_topics(_make_collection(keys), request_timeout=timeout),
        wait_for=_NOT_YET,
        check=lambda found: "" if found.partitions else "the brokers describe this topic without partitions",
        rights=[Right("topic", "Describe")],
    )[0][topic.name]
    list_offsets(calls, TopicDescription.of(described).topic_partitions, OffsetSpec.latest(), "read_uncommitted")
    return created


def check_new_topic(calls: KafkaCalls, topic: TopicRequest) -> KafkaSparkError | None:
    """Return the error with which the brokers would refuse to create a topic; None if they would, or if it exists. Creates
    nothing.
    """
    try:
        _request_topic(calls, "checking a new topic", topic, validate_only=True)
    except (KafkaRefused, RightMissing) as error:
        return error
    return None


def _request_topic(
    calls: KafkaCalls, doing: str, topic: TopicRequest, *, validate_only: bool = False
) -> tuple[KafkaError | None, int]:
    """Ask the brokers to create a topic, or only to check that they would. Return the error that says that it exists, or None,
    and the number of requests."""
    from confluent_kafka.admin import NewTopic

    wanted = NewTopic(
        topic.name,
        num_partitions=topic.partitions,
        replication_factor=topic.replication_factor,
        config=dict(topic.config),
    )
    asked = 0

    def submit(client: AdminClient, keys: list[str], timeout: float) -> dict[str, Future]:
        nonlocal asked
        asked += 1
        return client.create_topics([wanted], request_timeout=timeout, operation_timeout=timeout, validate_only=validate_only)

    rights = [Right("topic", "Create")]
    _, exists = calls.request_each(doing, [topic.name], submit, tolerate=("TOPIC_ALREADY_EXISTS",), rights=rights)
    return exists.get(topic.name), asked


def _make_collection(names: list[str]) -> TopicCollection:
    from confluent_kafka import TopicCollection

    return TopicCollection(names)


def list_offsets(
    calls: KafkaCalls, partitions: Collection[TopicPartition], spec: OffsetSpec, isolation_level: str
) -> dict[TopicPartition, int]:
    """Return one offset of every partition. All partitions exist."""
    return {partition: there.offset for partition, there in list_records(calls, partitions, spec, isolation_level).items()}


def list_records(
    calls: KafkaCalls, partitions: Collection[TopicPartition], spec: OffsetSpec, isolation_level: str
) -> dict[TopicPartition, RecordAt]:
    """Return one offset of every partition, with timestamp and leader epoch of its record; -1 for values that do not exist."""
    import confluent_kafka

    level = confluent_kafka.IsolationLevel[isolation_level.upper()]

    def submit(client: AdminClient, keys: list[TopicPartition], timeout: float) -> dict[TopicPartition, Future]:
        request = {confluent_kafka.TopicPartition(*key): spec for key in keys}
        futures = client.list_offsets(request, isolation_level=level, request_timeout=timeout)
        return {TopicPartition(p.topic, p.partition): future for p, future in futures.items()}

    found, _ = calls.request_each("reading offsets", partitions, submit, wait_for=_NOT_YET, rights=[Right("topic", "Describe")])
    return {p: RecordAt(found[p].offset, found[p].timestamp, _get_epoch(found[p].leader_epoch)) for p in partitions}


def _get_epoch(value: int | None) -> int:
    return -1 if value is None else value


def delete_records(calls: KafkaCalls, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Delete records and return the new low watermarks. The partitions exist."""
    import confluent_kafka

    def submit(client: AdminClient, keys: list[TopicPartition], timeout: float) -> dict[TopicPartition, Future]:
        request = [confluent_kafka.TopicPartition(*key, before[key]) for key in keys]
        futures = client.delete_records(request, request_timeout=timeout)
        return {TopicPartition(p.topic, p.partition): future for p, future in futures.items()}

    found, _ = calls.request_each("deleting records", list(before), submit, wait_for=_NOT_YET, rights=[Right("topic", "Delete")])
    return {partition: deleted.low_watermark for partition, deleted in found.items()}


def read_committed_offsets(
    calls: KafkaCalls, config: Mapping[str, Any], group_id: str, partitions: Collection[TopicPartition], *, stable: bool
) -> dict[TopicPartition, CommittedOffset | None]:
    """Return the committed offsets of a group, without those of open transactions.

    The request is sent by a consumer that joins no group: ``AdminClient.list_consumer_group_offsets`` ends the process with a
    segmentation fault if the coordinator has moved (librdkafka 2.16: the handler of the answer assumes a client with a group).

    :param config: the connection's librdkafka configuration.
    :param stable: True to wait for the end of open transactions with offsets of the group.
    """
    import confluent_kafka

    doing = f"reading the committed offsets of group {group_id}"
    rights = [Right("group", "Describe", group_id), Right("topic", "Describe")]
    # This call reports a wrong password at once; the consumer would only time out.
    calls.ensure_connected()
    settings = {**ALL_BROKERS, **make_consumer_config(config, **{"group.id": group_id, "error_cb": calls.events.on_error})}
    if not stable:
        settings["isolation.level"] = "read_uncommitted"

    begun = time.monotonic()
    # Short calls, because a signal or an error of the consumer is handled only between them.
    pieces = chain((1.0, 2.0, 4.0), repeat(8.0))

    def check(answer: list[KafkaTopicPartition]) -> str:
        shortfall = f"the brokers answered for {len(answer)} of {len(partitions)} partitions"
        return _find_temporary_error(answer) if len(answer) == len(partitions) else shortfall

    def make(_: ClientEvents) -> Consumer:
        return confluent_kafka.Consumer(settings, logger=calls.events)

    with calls.consumers.lend(("committed", group_id, stable), make) as lent:

        def submit(client: AdminClient, timeout: float) -> Future[list[KafkaTopicPartition]]:
            answer: Future[list[KafkaTopicPartition]] = Future()
            try:
                answer.set_result(_read_committed_once(lent.consumer, partitions, min(timeout, next(pieces))))
            except confluent_kafka.KafkaException as error:
                answer.set_exception(_find_cause(lent.consumer, error, calls, begun))
            return answer

        try:
            answer = calls.request_one(doing, submit, check=check, rights=rights)
        except KafkaUnavailable:
            if _is_held_by_transaction(settings, partitions, calls):
                detail = (
                    "a transaction with offsets of this group is open; it ends after its `transaction.timeout.ms` at the latest"
                )
                raise calls.make_unavailable_error(doing, detail + _find_advice_if_lost(calls, group_id)) from None
            raise
    _raise_first(calls, doing, answer, rights)
    found: dict[TopicPartition, CommittedOffset | None] = dict.fromkeys(partitions)
    for p in answer:
        if p.offset >= 0:
            found[TopicPartition(p.topic, p.partition)] = CommittedOffset(p.offset, p.metadata or "", _get_epoch(p.leader_epoch))
    return found


def _read_committed_once(consumer: Consumer, partitions: Collection[TopicPartition], timeout: float) -> list[KafkaTopicPartition]:
    import confluent_kafka

    return consumer.committed([confluent_kafka.TopicPartition(*p) for p in partitions], timeout=timeout)


def _find_cause(consumer: Consumer, error: KafkaException, calls: KafkaCalls, begun: float) -> KafkaException:
    """Return the error with which committed offsets cannot be read.

    :param error: the error of the request, which has only timed out for some causes.
    :param begun: when the first request began, in seconds of the monotonic clock.
    :raises ConnectionInvalid: the brokers refuse the login.
    """
    # Errors of the group, as a missing right, are returned instead of a record.
    message = consumer.poll(0)
    if refused := calls.events.find_refused_login(begun):
        raise calls.make_login_error(refused)
    reason = message.error() if message is not None else None
    return type(error)(reason) if reason else error


def _is_held_by_transaction(settings: Mapping[str, Any], partitions: Collection[TopicPartition], calls: KafkaCalls) -> bool:
    """Return True if the group's offsets can be read without waiting for open transactions, so that only these hold them back."""
    import confluent_kafka

    consumer = confluent_kafka.Consumer({**settings, "isolation.level": "read_uncommitted"}, logger=calls.events)
    try:
        _read_committed_once(consumer, partitions, 2)
        return True
    except confluent_kafka.KafkaException:
        return False
    finally:
        consumer.close()


def _find_advice_if_lost(calls: KafkaCalls, group_id: str) -> str:
    """Return the command that ends the open transaction of a group's offsets if the brokers have lost it; empty if the place of
    the transaction is not known."""
    from confluent_kafka.admin import OffsetSpec

    try:
        found = describe_topics(calls, [OFFSETS_TOPIC])
        tp = TopicPartition(OFFSETS_TOPIC, find_offsets_partition(group_id, len(found[OFFSETS_TOPIC].partitions)))
        lso = list_offsets(calls, [tp], OffsetSpec.latest(), "read_committed")[tp]
    except (KafkaSparkError, KeyError):
        return ""
    command = make_abort_command(tp, lso)
    return f". If it does not end, the brokers have lost it (see `kafka-transactions.sh find-hanging`): {command}"


def find_offsets_partition(group_id: str, partitions: int) -> int:
    """Return the partition of ``__consumer_offsets`` with the offsets of a group, which its coordinator leads.

    :param partitions: number of partitions of that topic.
    """
    number, units = 0, group_id.encode("utf-16-be")
    for high, low in zip(units[::2], units[1::2], strict=True):
        number = (31 * number + (high << 8) + low) & 0xFFFFFFFF
    # Java's hash is a signed number, of which Kafka takes the absolute value, and 0 for the smallest.
    return (number if number < 1 << 31 else (1 << 32) - number) % (1 << 31) % partitions


def list_group_ids(calls: KafkaCalls) -> frozenset[str]:
    """Return the ids of the consumer groups. Groups of brokers that do not answer are missing."""
    found = calls.request_one("listing groups", lambda client, timeout: client.list_consumer_groups(request_timeout=timeout))
    return frozenset(group.group_id for group in found.valid)


def alter_committed(calls: KafkaCalls, group_id: str, commits: Mapping[TopicPartition, CommittedOffset]) -> None:
    """Set the group's offsets. All partitions exist."""
    import confluent_kafka

    doing = f"setting the committed offsets of group {group_id}"
    rights = [Right("group", "Read", group_id), Right("topic", "Read")]
    request = confluent_kafka.ConsumerGroupTopicPartitions(
        group_id, [confluent_kafka.TopicPartition(*p, c.offset, metadata=c.metadata) for p, c in commits.items()]
    )
    answer = calls.request_one(
        doing,
        lambda client, timeout: client.alter_consumer_group_offsets([request], request_timeout=timeout)[group_id],
        check=lambda answer: _find_temporary_error(answer.topic_partitions or [], _NOT_YET),
        coordinator=True,
        rights=rights,
    )
    _raise_first(calls, doing, answer.topic_partitions or [], rights)


def delete_group(calls: KafkaCalls, group_id: str) -> bool:
    """Delete a group. Return True if it existed."""
    _, absent = calls.request_each(
        f"deleting group {group_id}",
        [group_id],
        lambda client, keys, timeout: client.delete_consumer_groups(keys, request_timeout=timeout),
        tolerate=("GROUP_ID_NOT_FOUND",),
        coordinator=True,
        rights=[Right("group", "Delete")],
    )
    return not absent


def read_group_state(calls: KafkaCalls, group_id: str, *, with_rights: bool = False) -> GroupState:
    """Return the state of a group with its members.

    :param with_rights: True to request the user's rights, too.
    """
    found, absent = calls.request_each(
        f"describing group {group_id}",
        [group_id],
        lambda client, keys, timeout: client.describe_consumer_groups(
            keys, include_authorized_operations=with_rights, request_timeout=timeout
        ),
        tolerate=("GROUP_ID_NOT_FOUND",),
        coordinator=True,
        rights=[Right("group", "Describe")],
    )
    if absent:
        return GroupState(group_id, "Dead")
    members = tuple(
        GroupMember(m.client_id, m.host, tuple(sorted({p.topic for p in m.assignment.topic_partitions} if m.assignment else ())))
        for m in found[group_id].members
    )
    state = _STATES.get(found[group_id].state.name, "Unknown")
    return GroupState(group_id, state, members, _name_rights(found[group_id].authorized_operations))


def check_group(calls: KafkaCalls, group_id: str, needed: Sequence[str]) -> tuple[GroupState, RightMissing | None]:
    """Return the state of a group with its members, and the error if the user lacks a right (KIP-430). A group that may not be
    described is ``Unknown``.

    :param needed: the needed rights.
    """
    try:
        state = read_group_state(calls, group_id, with_rights=True)
        missing = find_lacking(state.rights, needed)
    except RightMissing:
        state, missing = GroupState(group_id, "Unknown"), ["Describe"]
    return state, calls.make_right_error("group", group_id, missing, needed) if missing else None


def _find_temporary_error(answer: list[KafkaTopicPartition], wait_for: Collection[str] = ()) -> str:
    texts = ((p, describe_temporary_error(p.error, wait_for)) for p in answer)
    return next((f"{TopicPartition(p.topic, p.partition)}: {text}" for p, text in texts if text), "")


def _raise_first(calls: KafkaCalls, doing: str, answer: list[KafkaTopicPartition], rights: Sequence[Right]) -> None:
    for p in answer:
        if p.error:
            raise calls.translate(doing, p.error, TopicPartition(p.topic, p.partition), rights=rights)
