"""Metadata and offsets of a Kafka cluster, on the official ``kafka`` connection."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from airflow.providers.apache.kafka.hooks.base import KafkaBaseHook
from airflow.providers.common.compat.sdk import AirflowOptionalProviderFeatureException

from airflow_kafka_spark.errors import (
    ConnectionInvalid,
    GroupHasMembers,
    KafkaRefused,
    KafkaSparkError,
    KafkaUnavailable,
    RightMissing,
    TopicMissing,
)
from airflow_kafka_spark.hooks.connections import TEST_SECONDS, name_other_server, require_connection, require_extra
from airflow_kafka_spark.hooks.kafka import config as kafka_config
from airflow_kafka_spark.hooks.kafka import requests as kafka_requests
from airflow_kafka_spark.hooks.kafka.client import ClientEvents, KafkaCalls, KeptConsumers, make_admin_client
from airflow_kafka_spark.hooks.kafka.config_problems import find_setting_problems
from airflow_kafka_spark.hooks.kafka.requests import (
    CommittedOffset,
    GroupState,
    PartitionOffsets,
    RecordAt,
    TopicDescription,
)
from airflow_kafka_spark.windows.model import TopicPartition

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient

log = logging.getLogger(__name__)

IsolationLevel = Literal["read_committed", "read_uncommitted"]

INTERNAL_TOPICS = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state", "__cluster_metadata"})

# Errors of a broker that refuses offsets because the group has members.
_MEMBERS_ARE_LIVE = (
    "NON_EMPTY_GROUP",
    "UNKNOWN_MEMBER_ID",
    "ILLEGAL_GENERATION",
    "GROUP_SUBSCRIBED_TO_TOPIC",
    "STALE_MEMBER_EPOCH",
)


DEFAULT_LARGEST = 1_048_588
"""Default of the brokers' ``max.message.bytes``."""


class KafkaHook(KafkaBaseHook):
    """Reads and changes metadata and offsets of a Kafka cluster. It neither reads nor writes records.

    Every call sends requests to the brokers; nothing is cached. Only ``create_topic``, ``alter_committed``, ``delete_group`` and
    ``delete_records`` create or change anything. All calls raise :class:`KafkaUnavailable` if no answer comes in time,
    :class:`ConnectionInvalid` if the connection does not exist or the brokers do not accept it, :class:`RightMissing` if the user
    lacks a right, and :class:`KafkaRefused` for all other refusals. No call returns a partial answer. On a first contact a wrong
    password is reported after about a second, unreachable brokers after about five.

    Use it as a context manager, or call :meth:`close`.

    :param kafka_conn_id: the Airflow connection of type ``kafka``, whose extra is a librdkafka configuration; default
        ``kafka_default``.
    :param timeout: maximum seconds of a request, including retries of temporary errors; default 30.
    :param reading_group: the group whose coordinator librdkafka looks up for consumers of :meth:`make_consumer_config`. They
        neither join it nor commit to it, and need no right on it; with the right Describe the brokers log no refused look-ups.
        Default ``airflow-kafka-spark``.
    """

    # Name of the constructor's argument for the connection, by which Airflow makes hooks.
    conn_name_attr = "kafka_conn_id"

    def __init__(
        self,
        kafka_conn_id: str = KafkaBaseHook.default_conn_name,
        timeout: float = 30.0,
        *,
        reading_group: str = kafka_config.DEFAULT_GROUP_ID,
    ) -> None:
        super().__init__(kafka_config_id=kafka_conn_id)
        self.timeout = timeout
        self.reading_group = reading_group

    # --- the connection ---

    @property
    def conn_id(self) -> str:
        """The Airflow connection."""
        return self.kafka_config_id

    @cached_property
    def config(self) -> dict[str, Any]:
        """The librdkafka configuration of the connection with its callbacks resolved. It contains secrets.

        :raises ConnectionInvalid: there is no such connection, or it names no brokers, or no address of a broker.
        """
        with require_connection(self.conn_id, "`kafka`", option="kafka_conn_id"):
            given = self.get_connection(self.conn_id)
        servers = require_extra(given).get("bootstrap.servers")
        if servers is not None and not isinstance(servers, str):
            found = f"`bootstrap.servers` in its extra is of type {type(servers).__name__}; expected a text"
            raise ConnectionInvalid(self.conn_id, found, 'Write "broker1:9092,broker2:9092"')
        try:
            config = self._build_config()
        except (ImportError, AirflowOptionalProviderFeatureException) as error:
            # A callback of the connection, or the signer of tokens for brokers of a cloud.
            action = "Install it where the task runs, and on Spark's executors"
            raise ConnectionInvalid(self.conn_id, f"it needs a module that cannot be imported: {error}", action) from error
        except ValueError as error:
            if given.conn_type != "kafka" and "bootstrap.servers" not in given.extra_dejson:
                found = f"it is of type `{given.conn_type}`, and its extra names no brokers"
                raise ConnectionInvalid(self.conn_id, found, "Use a connection of type `kafka`") from error
            if "bootstrap.servers" in str(error):
                action = 'Set its extra to `{"bootstrap.servers": "host:9092"}`. Its fields for host and port are not used'
                raise ConnectionInvalid(self.conn_id, "its extra names no brokers", action) from error
            allow = "Add it to `callback_allowlist` of the section `[apache_kafka]` in Airflow's configuration"
            raise ConnectionInvalid(self.conn_id, str(error), allow if "callback_allowlist" in str(error) else "") from error
        if problem := kafka_config.find_bootstrap_problem(config):
            action = "Write each broker as `host:port`, as in `broker1:9092,broker2:9092`, its protocol as `security.protocol`"
            raise ConnectionInvalid(self.conn_id, problem, action)
        return config

    def make_java_config(self, *, inline_files: bool = False) -> kafka_config.JavaConfig:
        """Return the connection in the Java client's settings, for Spark's Kafka source
        (:func:`.kafka.config.make_java_config`).
        """
        java = kafka_config.make_java_config(self.config, conn_id=self.conn_id, inline_files=inline_files)
        if java.ignored:
            log.info(
                "Spark's Kafka client has no counterpart for these settings of connection %s: %s",
                self.conn_id,
                ", ".join(java.ignored),
            )
        return java

    def make_consumer_config(self, **overrides: object) -> dict[str, Any]:
        """Return the settings for a reader of frozen ranges; see :func:`.kafka.config.make_consumer_config`."""
        return kafka_config.make_consumer_config(self.config, **{"group.id": self.reading_group, **overrides})

    def make_producer_config(self, **overrides: object) -> dict[str, Any]:
        """Return the settings for a producer; see :func:`.kafka.config.make_producer_config`."""
        return kafka_config.make_producer_config(self.config, **overrides)

    @property
    def get_conn(self) -> AdminClient:  # type: ignore[override]
        """The client of confluent-kafka. It is kept until :meth:`close`, or until it has to be discarded."""
        return self._calls.client

    @property
    def consumers(self) -> KeptConsumers:
        """The consumers that are kept for the next reader, until :meth:`close`."""
        return self._calls.consumers

    @cached_property
    def _calls(self) -> KafkaCalls:
        config = self.config
        events = ClientEvents(config.get("error_cb"))
        return KafkaCalls(
            self._make_client, events, conn_id=self.conn_id, identity=kafka_config.describe_identity(config), timeout=self.timeout
        )

    @cached_property
    def _setting_problems(self) -> list[str]:
        # Once for a hook, because clients are made for it. A hook makes a client anew after each failure.
        return find_setting_problems(self.config)

    def _make_client(self, events: ClientEvents) -> AdminClient:
        from confluent_kafka import KafkaException

        if problems := self._setting_problems:
            found = f"librdkafka does not accept its extra: {'; '.join(problems)}"
            raise ConnectionInvalid(self.conn_id, found, "Correct the extra; what it leaves out has a default")
        try:
            return make_admin_client(self.config, events)
        except (KafkaException, TypeError, ValueError) as error:
            if missing := kafka_config.find_unreadable_file(self.config):
                # librdkafka names OpenSSL's routine instead of the file.
                raise ConnectionInvalid(self.conn_id, missing) from None
            reason = error.args[0].str() if isinstance(error, KafkaException) else str(error)
            action = ""
            if "GSSAPI" in reason and not self.config.keys() & {"sasl.mechanism", "sasl.mechanisms"}:
                action = "Set `sasl.mechanism` in its extra; without it, librdkafka uses GSSAPI (Kerberos)"
            raise ConnectionInvalid(self.conn_id, f"librdkafka does not accept its extra: {reason}", action) from None

    def close(self) -> None:
        """Release the clients; the next call makes new ones."""
        if "_calls" in self.__dict__:
            self._calls.discard_client()
            self._calls.consumers.close()
        for name in ("_calls", "config"):
            self.__dict__.pop(name, None)

    def __enter__(self) -> KafkaHook:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def test_connection(self) -> tuple[bool, str]:
        """Return True and the brokers if the cluster answers, otherwise False and the reason, for Airflow's UI. It takes ten
        seconds at most.

        A wrong password, a certificate that is not trusted, a listener of another protocol and unreachable brokers each have a
        message of their own.
        """
        try:
            with KafkaHook(self.conn_id, min(self.timeout, TEST_SECONDS)) as hook:
                found = hook._calls.request_one(
                    "connecting", lambda client, timeout: client.describe_cluster(request_timeout=timeout)
                )
        except KafkaUnavailable as error:
            return False, self._name_other_server(str(error))
        except KafkaSparkError as error:
            return False, str(error)
        brokers = [f"{node.host}:{node.port}" for node in sorted(found.nodes, key=lambda node: node.id)]
        named = ", ".join(brokers[:10]) + (f" and {len(brokers) - 10} more" if len(brokers) > 10 else "")
        return True, f"Connected to Kafka cluster {found.cluster_id}, brokers: {named}."

    def _name_other_server(self, found: str) -> str:
        """Return an error with what answers at the first address, if that is no broker."""
        host, _, port = str(self.config.get("bootstrap.servers", "")).split(",")[0].rpartition("://")[2].strip().rpartition(":")
        return name_other_server(found, host.strip("[]"), int(port), "kafka") if host and port.isdecimal() else found

    # --- the cluster and its topics ---

    def read_cluster_id(self) -> str:
        """Return the cluster's id. Offsets are valid for one cluster only."""
        return self._calls.connect()

    def count_brokers(self) -> int:
        """Return the number of brokers that the cluster has now."""
        found = self._calls.request_one(
            "asking for the brokers", lambda client, timeout: client.describe_cluster(request_timeout=timeout)
        )
        return len(found.nodes)

    def list_topics(self, *, internal: bool = False) -> frozenset[str]:
        """Return the names of all topics that this connection may see.

        :param internal: True to include Kafka's own topics.
        """
        from confluent_kafka import KafkaException

        calls = self._calls
        calls.ensure_connected()
        try:
            names = frozenset(calls.client.list_topics(timeout=self.timeout).topics)
        except KafkaException as error:
            raise calls.translate("listing topics", error.args[0]) from None
        return names if internal else names - INTERNAL_TOPICS

    def describe_topics(
        self, names: Iterable[str], *, missing: Literal["raise", "omit"] = "raise"
    ) -> dict[str, TopicDescription]:
        """Return ids and partitions of topics.

        A topic has at least one partition: an answer without any is requested again. A topic counts as missing only if it is
        still unknown after a second, because brokers learn of a new topic at different times.

        :param names: the topics.
        :param missing: ``raise`` names all topics that do not exist in one error; ``omit`` leaves them out of the answer.
        :raises TopicMissing: with ``missing="raise"``.
        """
        wanted = set(names)
        found = kafka_requests.describe_topics(self._calls, wanted)
        if missing == "raise" and wanted - found.keys():
            raise TopicMissing(self.conn_id, sorted(wanted - found.keys()))
        return found

    def check_topics(
        self, needed: Mapping[str, Sequence[str]], *, optional: Collection[str] = ()
    ) -> tuple[dict[str, TopicDescription], dict[str, RightMissing]]:
        """Return the topics that exist, by name, and the errors of topics on which the user lacks a right, also by name.

        Of brokers that do not return rights, only a topic that may not be described has an error.

        :param needed: Kafka's names of the needed rights, as ``DescribeConfigs``, by topic. ``Create`` is needed only for topics
            that do not exist, and is not checked.
        :param optional: topics that need not exist, and that are not searched for during a second.
        """
        return kafka_requests.check_topics(self._calls, needed, optional)

    def read_topic_config(self, names: Iterable[str]) -> dict[str, dict[str, str]]:
        """Return the settings of topics, defaults included (``cleanup.policy``, ``retention.ms``, ``max.message.bytes`` ...).

        :param names: the topics.
        :raises TopicMissing: a topic does not exist.
        """
        return kafka_requests.read_topic_configs(self._calls, self.describe_topics(names))

    def read_largest_record(self, topic: str) -> int:
        """Return the maximum size of a topic's batches in bytes (``max.message.bytes``); the brokers' default if the user may not
        see the topic's settings."""
        try:
            return int(self.read_topic_config([topic])[topic].get("max.message.bytes") or DEFAULT_LARGEST)
        except KafkaRefused:
            return DEFAULT_LARGEST

    def read_size_settings(self, topics: Iterable[str]) -> dict[str, int]:
        """Return the settings by which a producer accepts each record that fits one of some topics, and makes no batch of several
        records that is larger than one of them takes. A record of the ledger fits, too."""
        limits = [DEFAULT_LARGEST, *map(self.read_largest_record, topics)]
        return {"message.max.bytes": max(limits), "batch.size": min(limits)}

    def read_cleanup_policy(self, topic: str) -> str:
        """Return the ``cleanup.policy`` of a topic; "" if the user may not see the topic's settings."""
        try:
            return self.read_topic_config([topic])[topic].get("cleanup.policy", "")
        except KafkaRefused:
            return ""

    def read_broker_config(self) -> dict[str, str]:
        """Return the settings of one broker (``transaction.max.timeout.ms`` ...); empty if the user may not see them."""
        return kafka_requests.read_broker_config(self._calls)

    def create_topic(
        self,
        name: str,
        partitions: int = -1,
        replication_factor: int = -1,
        config: Mapping[str, str] | None = None,
        *,
        exist_ok: bool = True,
    ) -> bool:
        """Create a topic and wait until it can be used. An existing topic is not changed.

        :param name: the topic.
        :param partitions: number of partitions; -1 is the brokers' default.
        :param replication_factor: number of replicas; -1 is the brokers' default.
        :param config: its settings.
        :param exist_ok: False to refuse a topic that exists already.
        :return: True if it was created by this call.
        :raises KafkaRefused: the brokers do not accept it, or it exists and ``exist_ok`` is false.
        """
        topic = kafka_requests.TopicRequest(name, partitions, replication_factor, config or {})
        return kafka_requests.create_topic(self._calls, topic, exist_ok=exist_ok)

    def check_new_topic(
        self, name: str, partitions: int = -1, replication_factor: int = -1, config: Mapping[str, str] | None = None
    ) -> KafkaSparkError | None:
        """Return the error with which the brokers would refuse to create a topic: :class:`KafkaRefused` or :class:`RightMissing`.
        None if they would create it, or if it exists. The parameters are those of :meth:`create_topic`."""
        topic = kafka_requests.TopicRequest(name, partitions, replication_factor, config or {})
        return kafka_requests.check_new_topic(self._calls, topic)

    # --- offsets of the log ---

    def read_offsets(self, topics: Iterable[str | TopicPartition]) -> dict[TopicPartition, PartitionOffsets]:
        """Return low watermark, last stable offset and high watermark. One request covers all partitions of a broker.

        A broker confirms a producer's commit before it has written the markers. So the last stable offset may lie before a
        transaction that has just ended, for some milliseconds.

        :param topics: topics, for all their partitions, or single partitions.
        :raises TopicMissing: when a topic or a partition does not exist.
        """
        return self.read_offsets_of_existing(self._list_partitions(topics))

    def read_offsets_of_existing(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, PartitionOffsets]:
        """Return what :meth:`read_offsets` returns, without asking again whether the partitions exist.

        :param partitions: partitions that :meth:`describe_topics` has just returned.
        """
        from confluent_kafka.admin import OffsetSpec

        # All three only grow. Read in this order, low <= lso <= high holds while others write, delete and commit.
        low = kafka_requests.list_offsets(self._calls, partitions, OffsetSpec.earliest(), "read_uncommitted")
        stable = kafka_requests.list_records(self._calls, partitions, OffsetSpec.latest(), "read_committed")
        high = kafka_requests.list_offsets(self._calls, partitions, OffsetSpec.latest(), "read_uncommitted")
        return {p: PartitionOffsets(low[p], stable[p].offset, high[p], stable[p].epoch) for p in partitions}

    def find_offsets_for_times(
        self,
        partitions: Iterable[str | TopicPartition],
        timestamp_ms: int,
        *,
        isolation_level: IsolationLevel = "read_committed",
    ) -> dict[TopicPartition, int | None]:
        """Return the first offset whose record's timestamp is at or after an instant; None if there is no such record.

        Later records may have older timestamps, because timestamps need not ascend.

        :param partitions: topics, for all their partitions, or single partitions.
        :param timestamp_ms: the instant, in milliseconds since 1970-01-01 UTC.
        :param isolation_level: ``read_committed`` looks only at offsets below the last stable offset.
        :raises TopicMissing: when a topic or a partition does not exist.
        """
        found = self.find_records_for_times(partitions, timestamp_ms, isolation_level=isolation_level)
        return {partition: there.offset if there else None for partition, there in found.items()}

    def find_records_for_times(
        self,
        partitions: Iterable[str | TopicPartition],
        timestamp_ms: int,
        *,
        isolation_level: IsolationLevel = "read_committed",
    ) -> dict[TopicPartition, RecordAt | None]:
        """Return the offset, timestamp and leader epoch of the records whose offsets :meth:`find_offsets_for_times` returns.

        Arguments and errors are those of :meth:`find_offsets_for_times`.
        """
        from confluent_kafka.admin import OffsetSpec

        if timestamp_ms < 0:
            raise ValueError(f"`timestamp_ms` is {timestamp_ms}. Expected milliseconds since 1970-01-01 UTC, not negative.")
        spec = OffsetSpec.for_timestamp(timestamp_ms)
        found = kafka_requests.list_records(self._calls, self._list_partitions(partitions), spec, isolation_level)
        return {partition: there if there.offset >= 0 else None for partition, there in found.items()}

    def _list_partitions(self, topics: Iterable[str | TopicPartition]) -> list[TopicPartition]:
        """Return all partitions in order, after a check that they exist: brokers may report unknown partitions as leaderless."""
        wanted = list(topics)
        whole = {topic for topic in wanted if isinstance(topic, str)}
        single = {TopicPartition(*topic) for topic in wanted if not isinstance(topic, str)}
        existing = self.describe_topics(whole | {p.topic for p in single})
        absent = sorted(p for p in single if p.partition not in existing[p.topic].partitions)
        if absent:
            raise TopicMissing(self.conn_id, [str(p) for p in absent])
        return sorted(single.union(*(existing[name].topic_partitions for name in whole)))

    def delete_records(self, before: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Delete the records below an offset of each partition. This cannot be undone.

        :param before: the new low watermark of each partition; -1 is its high watermark.
        :return: the new low watermarks.
        :raises TopicMissing: when a topic or a partition does not exist.
        """
        return kafka_requests.delete_records(self._calls, {p: before[p] for p in self._list_partitions(before)})

    # --- consumer groups ---

    def read_committed_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition], *, stable: bool = True
    ) -> dict[TopicPartition, CommittedOffset | None]:
        """Return the committed offsets of a group; None for partitions without one, or with an expired one.

        :param group_id: the group; it need not exist.
        :param partitions: the partitions.
        :param stable: True to wait for the end of open transactions with offsets of the group, up to the timeout (KIP-447); False
            to return the offsets from before these transactions.
        """
        wanted = sorted({TopicPartition(*p) for p in partitions})
        return kafka_requests.read_committed_offsets(self._calls, self.config, group_id, wanted, stable=stable) if wanted else {}

    def list_groups(self) -> frozenset[str]:
        """Return the ids of all consumer groups that this connection may see."""
        return kafka_requests.list_group_ids(self._calls)

    def read_group_state(self, group_id: str) -> GroupState:
        """Return a group's state and its live members.

        :param group_id: the group; one that does not exist is ``Dead`` and has no members.
        """
        return kafka_requests.read_group_state(self._calls, group_id)

    def check_group(self, group_id: str, needed: Sequence[str]) -> tuple[GroupState, RightMissing | None]:
        """Return a group's state and its live members, and the error if the user lacks a right on it.

        :param needed: Kafka's names of the needed rights.
        """
        return kafka_requests.check_group(self._calls, group_id, needed)

    def alter_committed(self, group_id: str, offsets: Mapping[TopicPartition, int | CommittedOffset]) -> None:
        """Set a group's committed offsets, forwards or backwards. A missing group is created.

        This is a plain commit: two callers may overwrite each other's offsets.

        :param group_id: the group, without live members.
        :param offsets: the next offset to read of each partition, with or without metadata.
        :raises GroupHasMembers: the group has members.
        :raises TopicMissing: a topic or a partition does not exist.
        """
        commits = {p: c if isinstance(c, CommittedOffset) else CommittedOffset(c) for p, c in offsets.items()}
        partitions = self._list_partitions(commits)
        try:
            if partitions:
                kafka_requests.alter_committed(self._calls, group_id, {p: commits[p] for p in partitions})
        except KafkaRefused as error:
            raise self._explain_members(error, group_id) from None

    def delete_group(self, group_id: str) -> bool:
        """Delete a group with its committed offsets.

        :param group_id: the group, without live members.
        :return: True if the group existed.
        :raises GroupHasMembers: the group has members.
        """
        try:
            return kafka_requests.delete_group(self._calls, group_id)
        except KafkaRefused as error:
            raise self._explain_members(error, group_id) from None

    def _explain_members(self, error: KafkaRefused, group_id: str) -> KafkaSparkError:
        """Return :class:`GroupHasMembers` if the group has live members, otherwise the given error."""
        if error.code not in _MEMBERS_ARE_LIVE:
            return error
        return GroupHasMembers(group_id, [str(m) for m in self.read_group_state(group_id).members])
