"""Boundaries as they are kept: read from the ledger topic, looked up in Kafka where they are missing, and written down."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import KafkaUnavailable, LedgerUnreadable
from airflow_kafka_spark.hooks.kafka_client import ClientEvents
from airflow_kafka_spark.hooks.kafka_transactions import describe, produce_all
from airflow_kafka_spark.hooks.ledger_topic import LedgerTopic
from airflow_kafka_spark.windows.boundaries import (
    Boundary,
    boundary_from_record,
    boundary_prefix,
    boundary_to_record,
    settle,
)
from airflow_kafka_spark.windows.instants import iso
from airflow_kafka_spark.windows.memory import LedgerRecord
from airflow_kafka_spark.windows.model import TopicPartition

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka import KafkaHook
    from airflow_kafka_spark.windows.plan import Log

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
WRITE_SECONDS = 30.0


class Boundaries:
    """The boundaries of topics, shared by all pipelines of a ledger topic.

    Guarantee: an instant stands for the same offsets for ever and for everybody, and the offsets of a later instant are never
    below those of an earlier one.

    :param hook: the cluster.
    :param ledger: the ledger topic, which exists.
    :param by: who asks.
    """

    def __init__(self, hook: KafkaHook, ledger: LedgerTopic, by: str) -> None:
        self.hook = hook
        self.ledger = ledger
        self.by = by

    def settled(self, topic: str, topic_id: str) -> dict[int, Boundary]:
        """What is decided of a topic, by instant."""
        return self._read(topic, topic_id)[0]

    def decide(
        self,
        topics: Sequence[str],
        instants: Iterable[int],
        read_log: Callable[[], Log],
        *,
        grace: float,
        pause: Callable[[float], object] = time.sleep,
    ) -> dict[str, dict[int, Boundary]]:
        """The boundaries of some instants in each topic: those that are known, and the others looked up and written down.

        An instant that lies beyond a partition's newest record is decided once ``grace`` has passed since it: a record may be on
        its way. Then it stands for the last stable offset.

        :param topics: the topics.
        :param instants: milliseconds since the epoch.
        :param read_log: asks what Kafka holds of the topics now.
        :param grace: seconds.
        :param pause: waits so many seconds; what it raises ends the waiting.
        :raises KafkaUnavailable: the brokers do not answer.
        """
        wanted = sorted(set(instants))
        told = False
        while True:
            found, partitions = {}, {}
            current = read_log()
            for topic in topics:
                known, partitions[topic] = self._read(topic, current.topic_ids.get(topic, ""))
                found[topic] = {instant: known[instant] for instant in wanted if instant in known}
            missing = {topic: [i for i in wanted if i not in found[topic]] for topic in topics}
            if not any(missing.values()):
                return found
            proposals, open_until = self._propose(missing, current, grace)
            if proposals:
                self._write(proposals, partitions)
            elif open_until is not None:
                if not told:
                    told = True
                    log.info(
                        "No record is as late as %s yet: waiting for one, or until %s s after it", iso(wanted[-1]), f"{grace:g}"
                    )
                pause(min(POLL_SECONDS, max(open_until - time.time(), 0.05)))

    def _propose(self, missing: Mapping[str, Sequence[int]], current: Log, grace: float) -> tuple[list[Boundary], float | None]:
        """What can be decided now; and until when the rest has to wait."""
        proposals, open_until = [], None
        for topic, instants in missing.items():
            ends = {tp: p.lso for tp, p in current.partitions.items() if tp.topic == topic}
            for instant in instants:
                # After the log was read: a record that arrives in between and is later than the instant then lies behind the
                # end that was read, not before it.
                offsets = self.hook.offsets_for_times(list(ends), instant)
                decided_at = instant / 1000 + grace
                if None in offsets.values() and time.time() < decided_at:
                    open_until = decided_at
                    continue
                at = {tp.partition: ends[tp] if offset is None else offset for tp, offset in offsets.items()}
                proposals.append(Boundary(topic, current.topic_ids.get(topic, ""), instant, at, self.by))
        return proposals, open_until

    def _read(self, topic: str, topic_id: str) -> tuple[dict[int, Boundary], int]:
        prefix = boundary_prefix(topic)

        def look(partition: int) -> tuple[list[Boundary], int]:
            records = self.ledger.read(partition, 0, (prefix,))
            try:
                found = [boundary_from_record(r.key, r.value) for r in records if r.value and r.key.startswith(prefix)]
            except ValueError as error:
                raise LedgerUnreadable(
                    self.ledger.name, f"topic `{topic}` has {error}", "boundaries of this version or older",
                    "Upgrade airflow-provider-kafka-spark to the release that wrote it",
                ) from None  # fmt: skip
            return found, partition

        found, partition = self.ledger.find(f"boundaries of {topic}", look, lambda there: bool(there[0]))
        return settle(b for b in found if b.topic_id == topic_id), partition

    def _write(self, proposals: Sequence[Boundary], partitions: Mapping[str, int]) -> None:
        """Outside of any transaction: what counts is the order in the log, and whoever comes second changes nothing."""
        from confluent_kafka import KafkaException, Producer

        config = self.hook.producer_config(**{"message.timeout.ms": round(WRITE_SECONDS * 1000), "linger.ms": 0})
        config = {key: value for key, value in config.items() if not key.startswith("transaction")}
        producer = Producer(config, logger=ClientEvents())
        for boundary in proposals:
            record = LedgerRecord(*boundary_to_record(boundary, secrets.token_hex(8)))
            try:
                produce_all(producer, self.ledger.name, partitions[boundary.topic], [record], WRITE_SECONDS)
            except KafkaException as error:
                raise KafkaUnavailable(self.hook.conn_id, "writing boundaries", describe(error)) from None
            at = ", ".join(f"{TopicPartition(boundary.topic, p)} at {o}" for p, o in sorted(boundary.offsets.items())[:8])
            log.info("%s is %s", iso(boundary.instant), at)
