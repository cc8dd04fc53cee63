"""Read boundaries from the ledger topic, look up in Kafka those that are missing, and write them down."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import KafkaUnavailable
from airflow_kafka_spark.hooks.kafka.config import identity
from airflow_kafka_spark.hooks.kafka.events import ClientEvents
from airflow_kafka_spark.hooks.kafka.resolve_offsets import first_offsets
from airflow_kafka_spark.hooks.kafka.rights import Right, right_missing
from airflow_kafka_spark.hooks.kafka.transactions import describe, produce_all
from airflow_kafka_spark.ledger.topic import LedgerTopic, unreadable_version
from airflow_kafka_spark.windows.instants import iso, now_ms
from airflow_kafka_spark.windows.interval_boundaries import (
    Boundary,
    BoundaryArchive,
    archive_from_record,
    archive_prefix,
    archive_to_record,
    beyond_retention,
    boundary_from_record,
    boundary_prefix,
    boundary_to_record,
    near_boundaries,
    place,
    propose,
    settle,
    to_archive,
    unneeded,
)
from airflow_kafka_spark.windows.memory import LedgerRecord
from airflow_kafka_spark.windows.model import TopicPartition

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.windows.plan import Log

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
WRITE_SECONDS = 30.0
IN_ORDER = {"enable.idempotence": False, "max.in.flight.requests.per.connection": 1, "acks": "all"}
PRUNE_MOST = 10_000
"""Proposals that one attempt removes at most; the next one goes on."""


@dataclass(frozen=True)
class TopicBoundaries:
    """The boundaries of one topic in the ledger.

    :param proposals: in the order of the log, with their keys.
    :param archives: older ones, many in each, in the order of the log, with their keys.
    :param partition: where they lie.
    """

    proposals: tuple[tuple[bytes, Boundary], ...]
    archives: tuple[tuple[bytes, BoundaryArchive], ...]
    partition: int

    def of(self, topic_id: str) -> tuple[list[BoundaryArchive], list[Boundary]]:
        """Return the archives, and the proposals, of the topic with this id."""
        archives = [archive for _, archive in self.archives if archive.first.topic_id == topic_id]
        return archives, [boundary for _, boundary in self.proposals if boundary.topic_id == topic_id]

    def near(self, topic_id: str, instants: Iterable[int], lows: Mapping[int, int]) -> dict[int, Boundary]:
        """Return what is decided, by instant: all that is not archived, and of the archives what counts for these instants."""
        archives, proposals = self.of(topic_id)
        return settle([*near_boundaries(archives, (*instants, *(p.instant for p in proposals)), lows), *proposals])

    def settled(self, topic_id: str) -> dict[int, Boundary]:
        """Return all that is decided, by instant. This takes every archive apart."""
        archives, proposals = self.of(topic_id)
        return settle([*(boundary for archive in archives for boundary in archive.boundaries), *proposals])


class Boundaries:
    """The boundaries of topics, shared by all pipelines of a ledger topic.

    Guarantee: an instant stands for the same offsets in all pipelines, as long as the topic holds a record before these offsets;
    and the offsets of a later instant are never below those of an earlier one.

    A call that decides a boundary also removes those that are not needed any more, so that their number follows what the topic
    retains, not the age of its pipelines.

    :param hook: the cluster.
    :param ledger: the ledger topic, which exists.
    :param by: the run that asks, for the records.
    """

    def __init__(self, hook: KafkaHook, ledger: LedgerTopic, by: str) -> None:
        self.hook = hook
        self.ledger = ledger
        self.by = by
        self._archives: dict[bytes, BoundaryArchive] = {}

    def settled(self, topic: str, topic_id: str) -> dict[int, Boundary]:
        """Return all boundaries of a topic that are decided, by instant."""
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
        """Return the boundaries of some instants in each topic. Those that are not known are looked up and written down.

        If a partition has no record at or after an instant, one may still be on its way: the call waits until ``grace`` has
        passed since the instant. Then the instant stands for the last stable offset of that partition.

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
            known = {t: kept[t].near(current.topic_ids.get(t, ""), wanted, current.lows(t)) for t in topics}
            for topic in topics:
                known[topic].update(self._removed(topic, wanted, known[topic], current))
            missing = {topic: [i for i in wanted if i not in known[topic]] for topic in topics}
            if not any(missing.values()):
                for topic in sorted(written):
                    self._tidy(topic, kept[topic], current)
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
        """Return the boundaries that can be decided now, and until when the others have to wait (seconds since the epoch).

        :param floors: per topic and instant, the offsets at which a search begins at the earliest; kept between calls.
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
                lows = read_log().lows(topic)
                topic_id = current.topic_ids.get(topic, "")
                epochs = {tp.partition: epoch for tp in ends if (epoch := current.partitions[tp].epoch) >= 0}
                proposals.append(
                    propose(topic, topic_id, instant, at, lows, known[topic], by=self.by, now=now_ms(), epochs=epochs)
                )
        return proposals, open_until

    def _removed(self, topic: str, wanted: Iterable[int], known: Mapping[int, Boundary], current: Log) -> dict[int, Boundary]:
        """Return boundaries for instants that lie before everything that is left of a topic and that the ledger does not hold.

        They are not written down: all that is known is that they lie below what is left.
        """
        lows = current.lows(topic)
        horizon = beyond_retention(known, lows)
        if horizon is None:
            return {}
        topic_id, now = current.topic_ids.get(topic, ""), now_ms()
        return {
            instant: place(propose(topic, topic_id, instant, lows, lows, known, by=self.by, now=now), known)
            for instant in wanted
            if instant < horizon.instant and instant not in known
        }

    def _read(self, topic: str) -> TopicBoundaries:
        single, archived = prefixes = boundary_prefix(topic), archive_prefix(topic)

        def look(partition: int) -> TopicBoundaries:
            proposals: list[tuple[bytes, Boundary]] = []
            archives: list[tuple[bytes, BoundaryArchive]] = []
            try:
                for key, value, offset, _ in self.ledger.newest(partition, 0, prefixes, prefixes):
                    if value and key.startswith(single):
                        proposals.append((key, boundary_from_record(key, value)))
                    elif value and key.startswith(archived):
                        # Taken apart once, however often it is read.
                        if key not in self._archives:
                            self._archives[key] = archive_from_record(key, value, offset)
                        archives.append((key, self._archives[key]))
            except ValueError as error:
                raise unreadable_version(self.ledger.name, f"topic `{topic}` has {error}", "boundaries") from None
            return TopicBoundaries(tuple(proposals), tuple(archives), partition)

        return self.ledger.find(f"boundaries of {topic}", look, lambda there: bool(there.proposals or there.archives))

    def _write(self, proposals: Sequence[Boundary], kept: Mapping[str, TopicBoundaries]) -> None:
        """Write proposals, outside of any transaction: the first one in the log counts, and a second one changes nothing."""
        producer = self._producer()
        for boundary in proposals:
            record = LedgerRecord(*boundary_to_record(boundary, secrets.token_hex(8)))
            self._produce(producer, kept[boundary.topic].partition, [record], "writing boundaries")
            at = ", ".join(f"{TopicPartition(boundary.topic, p)} at {o}" for p, o in sorted(boundary.offsets.items())[:8])
            log.info("%s is %s", iso(boundary.instant), at)

    def _tidy(self, topic: str, kept: TopicBoundaries, current: Log) -> None:
        """Remove boundaries that are not needed any more, and archive old ones.

        Every record that is written here is safe by itself: a reader or a proposal meanwhile, or a death at any moment,
        finds the same boundaries. An archive is in the log before the first record that it replaces is removed.
        """
        topic_id, lows = current.topic_ids.get(topic, ""), current.lows(topic)
        singles = [boundary for _, boundary in kept.proposals]
        found = unneeded([archive for _, archive in kept.archives], singles, topic_id, lows)
        removed, gone = found.proposals[:PRUNE_MOST], found.archives
        needed = {index for index, boundary in enumerate(singles) if boundary.topic_id == topic_id} - set(removed)
        archives = to_archive(found.near, [singles[index] for index in sorted(needed)])
        archived = {boundary.instant for archive in archives for boundary in archive.boundaries}
        records = [LedgerRecord(*archive_to_record(archive, secrets.token_hex(8))) for archive in archives]
        keys = [kept.proposals[index][0] for index in removed] + [kept.archives[index][0] for index in gone]
        keys += [kept.proposals[index][0] for index in sorted(needed) if singles[index].instant in archived]
        if not keys:
            return
        try:
            producer = self._producer()
            if records:
                self._produce(producer, kept.partition, records, "archiving old boundaries")
                faults.reached("boundaries.archived")
            self._produce(producer, kept.partition, [LedgerRecord(key, None) for key in keys], "removing old boundaries")
        except KafkaUnavailable as error:
            # What is left is removed the next time that something is decided.
            log.warning("%s", error)
            return
        count = len(removed) + sum(kept.archives[index][1].count for index in gone)
        if count:
            log.info("%s boundaries of %s are not needed any more and were removed", f"{count:,}", topic)
        if archived:
            log.info("%s old boundaries of %s went into archives", f"{len(archived):,}", topic)

    def _producer(self) -> Producer:
        """Return a producer that keeps the order of its records. One that arrives twice changes nothing; an idempotent producer
        would need half a second to begin."""
        from confluent_kafka import Producer

        timeout = round(WRITE_SECONDS * 1000)
        config = self.hook.producer_config(**{"message.timeout.ms": timeout, "linger.ms": 5, **IN_ORDER})
        config = {key: value for key, value in config.items() if not key.startswith("transaction")}
        return Producer(config, logger=ClientEvents())

    def _produce(self, producer: Producer, partition: int, records: Sequence[LedgerRecord], doing: str) -> None:
        from confluent_kafka import KafkaException

        try:
            produce_all(producer, self.ledger.name, partition, records, WRITE_SECONDS)
        except KafkaException as error:
            rights = [Right("topic", "Write", self.ledger.name)]
            missing = right_missing(error.args[0], self.hook.conn_id, identity(self.hook.config), doing, rights)
            raise missing or KafkaUnavailable(self.hook.conn_id, doing, describe(error)) from None
