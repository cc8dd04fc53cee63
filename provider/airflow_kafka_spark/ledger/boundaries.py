"""Read boundaries from the ledger topic, look up missing ones in Kafka, and write them to the ledger topic."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import KafkaUnavailable
from airflow_kafka_spark.hooks.kafka.client import ClientEvents, KafkaUser, Right, find_missing_right
from airflow_kafka_spark.hooks.kafka.log import find_first_offsets
from airflow_kafka_spark.hooks.kafka.transactions import describe_producer_error, produce_all
from airflow_kafka_spark.ledger.topic import LedgerTopic, make_unreadable_error
from airflow_kafka_spark.windows.interval_boundaries import (
    Boundary,
    BoundaryArchive,
    InstantInLog,
    archive_from_record,
    archive_to_record,
    boundary_from_record,
    boundary_to_record,
    find_last_expired_boundary,
    find_removable_boundaries,
    fit_proposal,
    make_archive_prefix,
    make_boundary_prefix,
    propose_boundary,
    resolve_proposals,
    select_near_boundaries,
    to_archive,
)
from airflow_kafka_spark.windows.memory import LedgerRecord
from airflow_kafka_spark.windows.model import TopicPartition
from airflow_kafka_spark.windows.times import format_instant, get_current_milliseconds

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.hooks.kafka.requests import PartitionOffsets
    from airflow_kafka_spark.windows.plan import Log

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Maximum seconds between two looks at the log, while a record at or after an instant is awaited."""
WRITE_SECONDS = 30.0
"""Seconds to wait until the brokers have acknowledged the records of a topic."""
IN_ORDER = {"enable.idempotence": False, "max.in.flight.requests.per.connection": 1, "acks": "all"}
"""Settings of the producer, see :meth:`Boundaries._make_producer`."""
MAX_PRUNED = 10_000
"""Maximum number of proposals that one attempt removes; the next one continues."""


@dataclass(frozen=True)
class TopicBoundaries:
    """The boundaries of one topic in the ledger.

    :param proposals: proposals with their keys, in the order of the log.
    :param archives: archives of older boundaries with their keys, in the order of the log.
    :param partition: the partition of the ledger topic that contains them.
    """

    proposals: tuple[tuple[bytes, Boundary], ...]
    archives: tuple[tuple[bytes, BoundaryArchive], ...]
    partition: int

    def select(self, topic_id: str) -> tuple[list[BoundaryArchive], list[Boundary]]:
        """Return the archives and the proposals of the topic with this id."""
        archives = [archive for _, archive in self.archives if archive.first.topic_id == topic_id]
        return archives, [boundary for _, boundary in self.proposals if boundary.topic_id == topic_id]

    def find_near(self, topic_id: str, instants: Iterable[int], lows: Mapping[int, int]) -> dict[int, Boundary]:
        """Return settled boundaries by instant: all that are not archived, and the archived ones that affect these instants."""
        archives, proposals = self.select(topic_id)
        return resolve_proposals(
            [*select_near_boundaries(archives, (*instants, *(p.instant for p in proposals)), lows), *proposals]
        )

    def list_settled(self, topic_id: str) -> dict[int, Boundary]:
        """Return all settled boundaries, by instant. Every archive is decompressed."""
        archives, proposals = self.select(topic_id)
        return resolve_proposals([*(boundary for archive in archives for boundary in archive.boundaries), *proposals])


@dataclass(frozen=True)
class _BoundarySearch:
    """A search for the offsets of boundaries, over several reads of the log.

    :param read_log: returns the present log of the topics.
    :param grace: seconds after an instant for which late records are awaited.
    :param pause: waits for a number of seconds; an exception that it raises ends the search.
    :param floors: lower bounds of the offsets to search, by topic and instant. They rise during the search.
    """

    read_log: Callable[[], Log]
    grace: float
    pause: Callable[[float], object]
    floors: dict[tuple[str, int], dict[TopicPartition, int]] = field(default_factory=dict)


class Boundaries:
    """The boundaries of topics, shared by all pipelines of a ledger topic.

    Guarantee: an instant corresponds to equal offsets in all pipelines, as long as the topic holds a record before these offsets.
    The offsets of a later instant are never below those of an earlier one.

    A call that decides a boundary also removes those that are no longer needed, so that their number depends on the retention of
    the topic, not on the age of its pipelines.

    :param hook: the cluster.
    :param ledger: the ledger topic, which exists.
    :param by: the run that decides, for the records.
    """

    def __init__(self, hook: KafkaHook, ledger: LedgerTopic, by: str) -> None:
        self.hook = hook
        self.ledger = ledger
        self.by = by
        self._proposals: dict[bytes, Boundary] = {}
        self._archives: dict[bytes, BoundaryArchive] = {}

    def list_settled(self, topic: str, topic_id: str) -> dict[int, Boundary]:
        """Return all settled boundaries of a topic, by instant."""
        return self._read(topic).list_settled(topic_id)

    def decide(
        self,
        topics: Sequence[str],
        instants: Iterable[int],
        read_log: Callable[[], Log],
        *,
        grace: float,
        pause: Callable[[float], object] = time.sleep,
    ) -> dict[str, dict[int, Boundary]]:
        """Return the boundaries of some instants in each topic. Missing ones are looked up in Kafka and written to the ledger.

        If a partition has no record at or after an instant, one may still arrive: the call waits until ``grace`` has passed since
        the instant. Then the boundary is the last stable offset of that partition.

        :param topics: the topics.
        :param instants: milliseconds since the epoch.
        :param read_log: returns the present log of the topics.
        :param grace: seconds after an instant for which late records are awaited.
        :param pause: waits for a number of seconds; an exception that it raises ends the call.
        :raises KafkaUnavailable: the brokers do not answer.
        :raises TimestampsInFuture: the records after one with a timestamp in the future could not be read in time.
        """
        wanted = sorted(set(instants))
        is_logged = False
        written: set[str] = set()
        search = _BoundarySearch(read_log, grace, pause)
        while True:
            current = read_log()
            kept = {topic: self._read(topic) for topic in topics}
            known = {t: kept[t].find_near(current.topic_ids.get(t, ""), wanted, current.get_lows(t)) for t in topics}
            for topic in topics:
                known[topic].update(self._find_removed(topic, wanted, known[topic], current))
            missing = {topic: [i for i in wanted if i not in known[topic]] for topic in topics}
            if not any(missing.values()):
                for topic in sorted(written):
                    self._tidy(topic, kept[topic], current)
                return {topic: {instant: known[topic][instant] for instant in wanted} for topic in topics}
            proposals, open_until = self._propose(search, current, missing, known)
            if proposals:
                self._write(proposals, kept)
                written.update(proposal.topic for proposal in proposals)
            elif open_until is not None:
                if not is_logged:
                    is_logged = True
                    log.info(
                        "No record has a timestamp at or after %s yet: waiting for one, or until %s s after that instant",
                        format_instant(wanted[-1]),
                        f"{grace:g}",
                    )
                pause(min(POLL_SECONDS, max(open_until - time.time(), 0.05)))

    def _propose(
        self,
        search: _BoundarySearch,
        current: Log,
        missing: Mapping[str, Sequence[int]],
        known: Mapping[str, Mapping[int, Boundary]],
    ) -> tuple[list[Boundary], float | None]:
        """Return the boundaries that can be decided now, and the time at which the others can be, in seconds since the epoch.

        :param current: the log, read before this call.
        :param missing: the instants without a boundary, by topic.
        :param known: the boundaries of the ledger, by topic and instant.
        """
        proposals, open_until = [], None
        for topic, instants in missing.items():
            ends = {tp: p.lso for tp, p in current.partitions.items() if tp.topic == topic}
            for instant in instants:
                # Looked up after the log was read: a record that arrives in between and is later than the instant then lies
                # after the end that was read, not before it.
                below = known[topic].get(max((i for i in known[topic] if i < instant), default=-1))
                least = search.floors.setdefault(
                    (topic, instant), {TopicPartition(topic, p): o for p, o in (below.offsets if below else {}).items()}
                )
                offsets = find_first_offsets(self.hook, list(ends), instant, floors=least, pause=search.pause)
                decided_at = instant / 1000 + search.grace
                if None in offsets.values() and time.time() < decided_at:
                    open_until = decided_at
                    continue
                at = {tp.partition: ends[tp] if offset is None else offset for tp, offset in offsets.items()}
                # Read again, so that records which were deleted before the answer are not taken for older than the instant.
                lows = search.read_log().get_lows(topic)
                topic_id = current.topic_ids.get(topic, "")
                epochs = {tp.partition: epoch for tp in ends if (epoch := current.partitions[tp].epoch) >= 0}
                found = InstantInLog(topic, topic_id, instant, at, lows, epochs)
                proposals.append(propose_boundary(found, known[topic], by=self.by, now=get_current_milliseconds()))
        return proposals, open_until

    def _find_removed(
        self, topic: str, wanted: Iterable[int], known: Mapping[int, Boundary], current: Log
    ) -> dict[int, Boundary]:
        """Return boundaries for instants before the oldest record of a topic that the ledger does not hold.

        They are not written to the ledger: all that is known is that they lie below the first offset that is left.
        """
        lows = current.get_lows(topic)
        horizon = find_last_expired_boundary(known, lows)
        if horizon is None:
            return {}
        topic_id, now = current.topic_ids.get(topic, ""), get_current_milliseconds()
        return {
            instant: fit_proposal(
                propose_boundary(InstantInLog(topic, topic_id, instant, lows, lows), known, by=self.by, now=now), known
            )
            for instant in wanted
            if instant < horizon.instant and instant not in known
        }

    def _read(self, topic: str) -> TopicBoundaries:
        single, archived = prefixes = make_boundary_prefix(topic), make_archive_prefix(topic)

        def read(partition: int, bounds: PartitionOffsets) -> TopicBoundaries:
            proposals: list[tuple[bytes, Boundary]] = []
            archives: list[tuple[bytes, BoundaryArchive]] = []
            try:
                for key, value, offset, _ in self.ledger.read_newest(partition, 0, prefixes, prefixes, bounds=bounds):
                    # Each record has a key of its own, and may have been parsed by an earlier read.
                    if value and key.startswith(single):
                        if key not in self._proposals:
                            self._proposals[key] = boundary_from_record(key, value)
                        proposals.append((key, self._proposals[key]))
                    elif value and key.startswith(archived):
                        if key not in self._archives:
                            self._archives[key] = archive_from_record(key, value, offset)
                        archives.append((key, self._archives[key]))
            except ValueError as error:
                raise make_unreadable_error(self.ledger.name, f"topic `{topic}` has {error}", "boundaries") from None
            return TopicBoundaries(tuple(proposals), tuple(archives), partition)

        return self.ledger.find(f"boundaries of {topic}", read, lambda there: bool(there.proposals or there.archives))

    def _write(self, proposals: Sequence[Boundary], kept: Mapping[str, TopicBoundaries]) -> None:
        """Write proposals without a transaction: the first one in the log is valid, and a second one changes nothing."""
        producer = self._make_producer()
        for boundary in proposals:
            record = LedgerRecord(*boundary_to_record(boundary, secrets.token_hex(8)))
            self._produce(producer, kept[boundary.topic].partition, [record], "writing boundaries")
            at = ", ".join(f"{TopicPartition(boundary.topic, p)} at {o}" for p, o in sorted(boundary.offsets.items())[:8])
            log.info("%s is %s", format_instant(boundary.instant), at)

    def _tidy(self, topic: str, kept: TopicBoundaries, current: Log) -> None:
        """Remove boundaries that are no longer needed, and archive old ones.

        Every record that is written here is safe by itself: concurrent readers, and readers after a crash at any moment, find
        equal boundaries. An archive is in the log before the first record that it replaces is removed.
        """
        topic_id, lows = current.topic_ids.get(topic, ""), current.get_lows(topic)
        singles = [boundary for _, boundary in kept.proposals]
        found = find_removable_boundaries([archive for _, archive in kept.archives], singles, topic_id, lows)
        removed, gone = found.proposals[:MAX_PRUNED], found.archives
        needed = {index for index, boundary in enumerate(singles) if boundary.topic_id == topic_id} - set(removed)
        archives = to_archive(found.near, [singles[index] for index in sorted(needed)])
        archived = {boundary.instant for archive in archives for boundary in archive.boundaries}
        records = [LedgerRecord(*archive_to_record(archive, secrets.token_hex(8))) for archive in archives]
        keys = [kept.proposals[index][0] for index in removed] + [kept.archives[index][0] for index in gone]
        keys += [kept.proposals[index][0] for index in sorted(needed) if singles[index].instant in archived]
        if not keys:
            return
        try:
            producer = self._make_producer()
            if records:
                self._produce(producer, kept.partition, records, "archiving old boundaries")
                faults.reached("boundaries.archived")
            self._produce(producer, kept.partition, [LedgerRecord(key, None) for key in keys], "removing old boundaries")
        except KafkaUnavailable as error:
            # The rest is removed with the next decision.
            log.warning("%s", error)
            return
        count = len(removed) + sum(kept.archives[index][1].count for index in gone)
        if count:
            log.info("%s boundaries of %s are not needed any more and were removed", f"{count:,}", topic)
        if archived:
            log.info("%s old boundaries of %s went into archives", f"{len(archived):,}", topic)

    def _make_producer(self) -> Producer:
        """Return a producer that keeps the order of its records. Duplicates change nothing, and an idempotent producer would take
        half a second to start."""
        from confluent_kafka import Producer

        timeout = round(WRITE_SECONDS * 1000)
        config = self.hook.make_producer_config(**{"message.timeout.ms": timeout, "linger.ms": 5, **IN_ORDER})
        config = {key: value for key, value in config.items() if not key.startswith("transaction")}
        return Producer(config, logger=ClientEvents())

    def _produce(self, producer: Producer, partition: int, records: Sequence[LedgerRecord], doing: str) -> None:
        from confluent_kafka import KafkaException

        try:
            produce_all(producer, self.ledger.name, partition, records, WRITE_SECONDS)
        except KafkaException as error:
            rights = [Right("topic", "Write", self.ledger.name)]
            missing = find_missing_right(error.args[0], KafkaUser.of(self.hook.config, self.hook.conn_id), doing, rights)
            raise missing or KafkaUnavailable(self.hook.conn_id, doing, describe_producer_error(error)) from None
