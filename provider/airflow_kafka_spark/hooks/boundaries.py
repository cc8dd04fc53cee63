"""Boundaries as they are kept: read from the ledger topic, looked up in Kafka where they are missing, and written down."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import KafkaUnavailable, LedgerUnreadable
from airflow_kafka_spark.hooks.first_records import first_offsets
from airflow_kafka_spark.hooks.kafka_client import ClientEvents
from airflow_kafka_spark.hooks.kafka_transactions import describe, produce_all
from airflow_kafka_spark.hooks.ledger_topic import LedgerTopic
from airflow_kafka_spark.windows.boundaries import (
    Boundary,
    beyond_retention,
    boundary_from_record,
    boundary_prefix,
    boundary_to_record,
    place,
    propose,
    prunable,
    settle,
)
from airflow_kafka_spark.windows.instants import iso, now_ms
from airflow_kafka_spark.windows.memory import LedgerRecord
from airflow_kafka_spark.windows.model import TopicPartition

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from airflow_kafka_spark.hooks.kafka import KafkaHook
    from airflow_kafka_spark.windows.plan import Log

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
WRITE_SECONDS = 30.0
PRUNE_MOST = 10_000
"""Proposals that one attempt removes at most; the next one goes on."""


@dataclass(frozen=True)
class Kept:
    """What the ledger topic holds of one topic's boundaries.

    :param proposals: in the order of the log, with their keys.
    :param partition: where they lie.
    """

    proposals: tuple[tuple[bytes, Boundary], ...]
    partition: int

    def settled(self, topic_id: str) -> dict[int, Boundary]:
        """What is decided, by instant."""
        return settle(boundary for _, boundary in self.proposals if boundary.topic_id == topic_id)


class Boundaries:
    """The boundaries of topics, shared by all pipelines of a ledger topic.

    Guarantee: an instant stands for the same offsets for everybody, as long as anything of what lies before them is left in the
    topic, and the offsets of a later instant are never below those of an earlier one.

    Whoever decides something also removes what nobody needs any more, so that their number follows what the topic retains, not
    how long its pipelines have been running.

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
        return self._read(topic).settled(topic_id)

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
        :raises TimestampsInFuture: too much lies behind a record from the future to find the boundary there.
        """
        wanted = sorted(set(instants))
        told = False
        written: set[str] = set()
        floors: dict[tuple[str, int], dict[TopicPartition, int]] = {}
        while True:
            current = read_log()
            kept = {topic: self._read(topic) for topic in topics}
            known = {topic: kept[topic].settled(current.topic_ids.get(topic, "")) for topic in topics}
            for topic in topics:
                known[topic].update(self._removed(topic, wanted, known[topic], current))
            missing = {topic: [i for i in wanted if i not in known[topic]] for topic in topics}
            if not any(missing.values()):
                for topic in sorted(written):
                    self._prune(topic, kept[topic], current)
                return {topic: {instant: known[topic][instant] for instant in wanted} for topic in topics}
            proposals, open_until = self._propose(missing, known, read_log, current, grace, floors, pause)
            if proposals:
                self._write(proposals, kept)
                written.update(proposal.topic for proposal in proposals)
            elif open_until is not None:
                if not told:
                    told = True
                    log.info(
                        "No record is as late as %s yet: waiting for one, or until %s s after it", iso(wanted[-1]), f"{grace:g}"
                    )
                pause(min(POLL_SECONDS, max(open_until - time.time(), 0.05)))

    def _propose(
        self,
        missing: Mapping[str, Sequence[int]],
        known: Mapping[str, Mapping[int, Boundary]],
        read_log: Callable[[], Log],
        current: Log,
        grace: float,
        floors: dict[tuple[str, int], dict[TopicPartition, int]],
        pause: Callable[[float], object],
    ) -> tuple[list[Boundary], float | None]:
        """What can be decided now; and until when the rest has to wait.

        :param floors: per topic and instant, where to look at the earliest; kept from one time to the next.
        """
        proposals, open_until = [], None
        for topic, instants in missing.items():
            ends = {tp: p.lso for tp, p in current.partitions.items() if tp.topic == topic}
            for instant in instants:
                # After the log was read: a record that arrives in between and is later than the instant then lies behind the
                # end that was read, not before it.
                below = known[topic].get(max((i for i in known[topic] if i < instant), default=-1))
                least = floors.setdefault(
                    (topic, instant), {TopicPartition(topic, p): o for p, o in (below.offsets if below else {}).items()}
                )
                offsets = first_offsets(self.hook, list(ends), instant, floors=least, pause=pause)
                decided_at = instant / 1000 + grace
                if None in offsets.values() and time.time() < decided_at:
                    open_until = decided_at
                    continue
                at = {tp.partition: ends[tp] if offset is None else offset for tp, offset in offsets.items()}
                # Read again: what was deleted before the answer must not pass for what is older than the instant.
                lows = _lows(topic, read_log())
                topic_id = current.topic_ids.get(topic, "")
                proposals.append(propose(topic, topic_id, instant, at, lows, known[topic], by=self.by, now=now_ms()))
        return proposals, open_until

    def _removed(self, topic: str, wanted: Iterable[int], known: Mapping[int, Boundary], current: Log) -> dict[int, Boundary]:
        """Instants before all that is left of a topic, and that nobody remembers. They are not decided, let alone written down:
        all there is to know is that they lie below what is left."""
        lows = _lows(topic, current)
        horizon = beyond_retention(known, lows)
        if horizon is None:
            return {}
        topic_id, now = current.topic_ids.get(topic, ""), now_ms()
        return {
            instant: place(propose(topic, topic_id, instant, lows, lows, known, by=self.by, now=now), known)
            for instant in wanted
            if instant < horizon.instant and instant not in known
        }

    def _read(self, topic: str) -> Kept:
        prefix = boundary_prefix(topic)

        def look(partition: int) -> Kept:
            live: dict[bytes, Boundary] = {}
            try:
                for record in self.ledger.read(partition, 0, (prefix,)):
                    if not record.key.startswith(prefix):
                        continue
                    if record.value:
                        live[record.key] = boundary_from_record(record.key, record.value)
                    else:
                        live.pop(record.key, None)
            except ValueError as error:
                raise LedgerUnreadable(
                    self.ledger.name, f"topic `{topic}` has {error}", "boundaries of this version or older",
                    "Upgrade airflow-provider-kafka-spark to the release that wrote it",
                ) from None  # fmt: skip
            return Kept(tuple(live.items()), partition)

        return self.ledger.find(f"boundaries of {topic}", look, lambda there: bool(there.proposals))

    def _write(self, proposals: Sequence[Boundary], kept: Mapping[str, Kept]) -> None:
        """Outside of any transaction: what counts is the order in the log, and whoever comes second changes nothing."""
        producer = self._producer()
        for boundary in proposals:
            record = LedgerRecord(*boundary_to_record(boundary, secrets.token_hex(8)))
            self._produce(producer, kept[boundary.topic].partition, [record], "writing boundaries")
            at = ", ".join(f"{TopicPartition(boundary.topic, p)} at {o}" for p, o in sorted(boundary.offsets.items())[:8])
            log.info("%s is %s", iso(boundary.instant), at)

    def _prune(self, topic: str, kept: Kept, current: Log) -> None:
        """Remove proposals that nobody needs any more; see :func:`~airflow_kafka_spark.windows.boundaries.prunable`.

        Tombstones in the order of removal, each of them safe by itself: whoever reads or proposes meanwhile, or dies here, finds
        the same boundaries.
        """
        topic_id, lows = current.topic_ids.get(topic, ""), _lows(topic, current)
        removed = prunable([b for _, b in kept.proposals], topic_id, lows)[:PRUNE_MOST]
        if not removed:
            return
        tombstones = [LedgerRecord(kept.proposals[index][0], None) for index in removed]
        try:
            self._produce(self._producer(), kept.partition, tombstones, "removing old boundaries")
        except KafkaUnavailable as error:
            # What is left is removed by whoever decides something next.
            log.warning("%s", error)
        else:
            log.info("%s boundaries of %s are not needed any more and were removed", f"{len(removed):,}", topic)

    def _producer(self) -> Producer:
        """One that keeps the order of its records, whatever it has to send twice."""
        from confluent_kafka import Producer

        timeout = round(WRITE_SECONDS * 1000)
        config = self.hook.producer_config(**{"message.timeout.ms": timeout, "linger.ms": 5, "enable.idempotence": True})
        config = {key: value for key, value in config.items() if not key.startswith("transaction")}
        return Producer(config, logger=ClientEvents())

    def _produce(self, producer: Producer, partition: int, records: Sequence[LedgerRecord], doing: str) -> None:
        from confluent_kafka import KafkaException

        try:
            produce_all(producer, self.ledger.name, partition, records, WRITE_SECONDS)
        except KafkaException as error:
            raise KafkaUnavailable(self.hook.conn_id, doing, describe(error)) from None


def _lows(topic: str, current: Log) -> dict[int, int]:
    """The first offset that is left in each partition of a topic."""
    return {tp.partition: there.low for tp, there in current.partitions.items() if tp.topic == topic}
