"""The dead letter topic: bad records of a window are sent there in one Kafka transaction, before the sink takes the rest. What
transforms route elsewhere goes to its topics in the same one.

The ledger remembers in the same transaction which records they were. So an attempt that comes after a crash neither sends them
again nor takes one of them for good: what became of a record is decided once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import (
    Fenced,
    KafkaRefused,
    KafkaSparkError,
    KafkaUnavailable,
    RowRejected,
    TooManyDeadLetters,
    TooManyRouted,
)
from airflow_kafka_spark.hooks.kafka.transactions import abort
from airflow_kafka_spark.windows.dead_letters import Batch, Captured, DeadLetters
from airflow_kafka_spark.windows.memory import LedgerRecord, dead_record
from airflow_kafka_spark.windows.model import SplitResult, TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.ledger.attempt import Ledger
    from airflow_kafka_spark.sinks.tasks.dead_letters import Envelope

log = logging.getLogger(__name__)

TRIES = 3
SECONDS = 60.0
MOST_REMEMBERED = 900_000
"""Bytes of the ledger's record of a window's dead letters: a topic takes records of 1 MiB by default."""


@dataclass(frozen=True)
class DeadLetterTopic:
    """Where the bad records of a pipeline go.

    Guarantee: a ``read_committed`` reader sees each of a window's dead letters exactly once, whatever is killed on the way.

    :param hook: the cluster, the one the ledger is in.
    :param name: the topic; created with one partition when the first letter comes and it is not there.
    :param replication_factor: of a topic that is created; -1 is the brokers' default.
    :param envelope: what is written on them.
    """

    hook: KafkaHook
    name: str
    replication_factor: int
    envelope: Envelope

    def sent(self, ledger: Ledger) -> dict[TopicPartition, frozenset[int]]:
        """The records of the claimed window that earlier attempts at it have sent: they stay dead, whatever they look like now.

        Nobody can add to them once this has returned.

        :raises Fenced: a newer attempt has taken over.
        """
        known = known_dead_letters(ledger)
        return known.sent(ledger.claimed.window.replay) if known else {}

    def send(self, results: Iterable[SplitResult], ledger: Ledger) -> DeadLetters | None:
        """Send what was not sent before; all of it or nothing.

        :param results: of the claimed window, with their letters.
        :return: all dead letters of the window, None without any.
        :raises Fenced: a newer attempt has taken over.
        :raises TooManyDeadLetters: they are more than may pass through the driver, or than the ledger can remember.
        :raises KafkaRefused: the topic does not take one: it is too large, or too old, or a permission is missing.
        :raises KafkaUnavailable: the brokers do not answer; nothing was sent.
        """
        return SideOutputs(self.hook, ledger.parent_pipeline, self).send(results, ledger)


@dataclass(frozen=True)
class SideOutputs:
    """All records of a window that do not go to the sink but to topics: dead letters, and what transforms route elsewhere.

    Guarantee: one Kafka transaction takes all of them there, and the ledger remembers in it which they were. So what became of a
    record is decided once, and a ``read_committed`` reader of such a topic sees each of its records exactly once.

    :param hook: the cluster, the one the ledger is in.
    :param pipeline: the pipeline's name, which routed records tell.
    :param dead: where bad records go; None where they do not.
    """

    hook: KafkaHook
    pipeline: str
    dead: DeadLetterTopic | None = None

    def send(self, results: Iterable[SplitResult], ledger: Ledger, captured: Sequence[Captured] = ()) -> DeadLetters | None:
        """Send what was not sent before; all of it or nothing.

        :param results: of the claimed window, with their letters and routes.
        :param captured: what other sinks will take: the ledger remembers that in the same transaction.
        :return: what was ever sent of the window, None without any.
        :raises Fenced: a newer attempt has taken over.
        :raises TooManyDeadLetters: they are more than may pass through the driver, or than the ledger can remember; TooManyRouted
            likewise.
        :raises KafkaRefused: a topic does not take one: it is too large, or too old, or a permission is missing.
        :raises KafkaUnavailable: the brokers do not answer; nothing was sent.
        """
        from airflow_kafka_spark.hooks.kafka.hook import DEFAULT_LARGEST
        from airflow_kafka_spark.sinks.tasks.dead_letters import LIMIT_BYTES, ROUTED, from_bytes, without

        results, window = list(results), ledger.claimed.window
        number, before = window.number, ledger.memory.dead.get(window.number)
        letters = from_bytes(result.letters for result in results)
        routes = from_bytes((result.routes for result in results), ROUTED)
        wanted = {self.dead.name: self.dead.replication_factor} if self.dead and letters.num_rows else {}
        wanted = {**dict.fromkeys(routes["to"].unique().to_pylist(), -1), **wanted}
        if self.dead and letters.nbytes > LIMIT_BYTES:
            raise TooManyDeadLetters(self.dead.name, LIMIT_BYTES)
        if routes.nbytes > LIMIT_BYTES:
            raise TooManyRouted(routes["to"][0].as_py(), LIMIT_BYTES)
        # Nothing else knows, once the sink has the window, of what gets no letter: without a topic, or in an earlier replay.
        skipped = sum(result.rejected for result in results)
        if self.dead:
            skipped = letters.num_rows - without(letters, before.sent() if before else {}).num_rows
        if not (wanted or captured or skipped != (before.skips(window.replay) if before else 0)):
            return before
        for topic, factor in wanted.items():
            self.hook.create_topic(topic, 1, factor)
        for tries in range(1, TRIES + 1):
            # The topics' own limits, so that it is known which record is too large; the ledger's record goes the same way.
            largest = max([DEFAULT_LARGEST, *map(self.hook.largest_record, wanted)])
            producer = ledger.fence_dead_letters(**{"message.max.bytes": largest})
            known = ledger.look_as_owner().dead.get(number)
            try:
                return self._send_once(producer, self._parcels(letters, routes, known), ledger, known, captured, skipped)
            except Fenced:
                raise
            except KafkaUnavailable as error:
                # The outcome is unknown: fence, and look again.
                if tries == TRIES:
                    raise
                log.warning("Sending dead letters failed (try %d of %d): %s", tries, TRIES, error)
        raise AssertionError("the last try returns or raises")

    def _parcels(self, letters: pa.Table, routes: pa.Table, known: DeadLetters | None) -> list[_Parcel]:
        """What was not sent before, by topic."""
        import pyarrow.compute as pc

        from airflow_kafka_spark.sinks.tasks.dead_letters import routed_records, without

        parcels = []
        if self.dead is not None:
            left = without(letters, known.sent() if known else {})
            parcels.append(_Parcel(self.dead.name, left, self.dead.envelope.records))
        for topic in routes["to"].unique().to_pylist():
            left = without(routes.filter(pc.equal(routes["to"], topic)), known.routed(topic=topic) if known else {})
            parcels.append(_Parcel(topic, left, lambda found: routed_records(found, self.pipeline), routed=True))
        return [parcel for parcel in parcels if parcel.letters.num_rows]

    def _send_once(
        self,
        producer: Any,
        parcels: Sequence[_Parcel],
        ledger: Ledger,
        known: DeadLetters | None,
        captured: Sequence[Captured],
        skipped: int,
    ) -> DeadLetters:
        from airflow_kafka_spark.sinks.kafka.tasks.send import Sender
        from airflow_kafka_spark.sinks.tasks.dead_letters import offsets_of

        replay = ledger.claimed.window.replay
        if not parcels and known is not None and known.with_captured(captured).with_skipped(replay, skipped) == known:
            return known
        entry, described = ledger.claimed, self.hook.describe_topics([parcel.topic for parcel in parcels]) if parcels else {}
        batches = []
        try:
            producer.begin_transaction()
            for parcel in parcels:
                partitions = {parcel.topic: len(described[parcel.topic].partitions)}
                sender = Sender(producer, parcel.topic, partitions, patience=SECONDS)
                try:
                    sender.send(parcel.records(parcel.letters))
                    landed = sender.flush()
                except Exception as error:
                    raise parcel.refused(error, self.hook.conn_id) or error from None
                routed = parcel.topic if parcel.routed else ""
                batches.append(Batch(replay, entry.attempt.token, offsets_of(parcel.letters), landed, routed))
            name = self.dead.name if self.dead is not None else ""
            dead = known or DeadLetters(entry.window.number, name)
            dead = replace(dead, topic=name or dead.topic, batches=(*dead.batches, *batches)).with_captured(captured)
            dead = dead.with_skipped(replay, skipped)
            record = self._record(dead, ledger, parcels)
            # Last: until the transaction ends, nobody can read the ledger's partition past this record.
            (offset,) = ledger.send(producer, [record])
            faults.reached("dead.in_transaction")
            producer.commit_transaction(SECONDS)
        except KafkaSparkError:
            abort(producer)
            raise
        except Exception as error:
            raise ledger.translated(error, "sending dead letters") from None
        faults.reached("dead.committed")
        ledger.remember_dead_letters(replace(dead, offset=offset))
        return dead

    def _record(self, dead: DeadLetters, ledger: Ledger, parcels: Sequence[_Parcel]) -> LedgerRecord:
        record = dead_record(ledger.pipeline, dead)
        if len(record.value or b"") > MOST_REMEMBERED:
            largest = max(parcels, key=lambda parcel: parcel.letters.num_rows)
            refused = TooManyRouted if largest.routed else TooManyDeadLetters
            raise refused(largest.topic, MOST_REMEMBERED, remembered=True)
        return record


@dataclass(frozen=True)
class _Parcel:
    """What goes to one topic.

    :param letters: the records as they were read.
    :param records: makes of them those that are sent.
    :param routed: whether a transform sends them there, else they are dead letters.
    """

    topic: str
    letters: pa.Table
    records: Callable[[pa.Table], pa.RecordBatch]
    routed: bool = False

    def refused(self, error: Exception, conn_id: str) -> KafkaRefused | None:
        """What the brokers do not take of it, and what helps; None where it is not about the records."""
        from airflow_kafka_spark.sinks.kafka.tasks.send import AFTERWARDS, HELP

        if isinstance(error, RowRejected):
            code, detail = "MSG_SIZE_TOO_LARGE", error.detail
        elif isinstance(error, KafkaRefused):
            code, detail = error.code, error.detail
        else:
            return None
        what = "records that a Filter takes out" if self.routed else "dead letters"
        action = HELP[code].format(topic=f"`{self.topic}`")
        if code == "MSG_SIZE_TOO_LARGE":
            detail = f"{detail}; the largest is {self._largest()}"
            action += ". What is sent has some headers more than the record"
            if not self.routed:
                action += ", which `errors_deadletterqueue_context_headers_enable=False` leaves out"
        return KafkaRefused(conn_id, f"sending {what} to topic `{self.topic}`", code, detail, f"{action}. {AFTERWARDS}")

    def _largest(self) -> str:
        sizes = [len(key or b"") + len(value or b"") for key, value in zip(*map(self._column, ("key", "value")), strict=True)]
        at = sizes.index(max(sizes))
        topic, partition, offset = (self._column(name)[at] for name in ("topic", "partition", "offset"))
        return f"{topic}-{partition}@{offset}, of {sizes[at]:,} bytes without headers"

    def _column(self, name: str) -> list[Any]:
        return self.letters[name].to_pylist()


def known_dead_letters(ledger: Ledger) -> DeadLetters | None:
    """What earlier attempts at the claimed window have sent. Nobody can add to it once this has returned.

    :raises Fenced: a newer attempt has taken over.
    """
    if ledger.attempts > 1:
        ledger.fence_dead_letters()
        ledger.look_as_owner()
    return ledger.memory.dead.get(ledger.claimed.window.number)
