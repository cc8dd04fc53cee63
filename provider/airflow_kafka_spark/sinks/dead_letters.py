"""The dead letter topic: bad records of a window are sent there in one Kafka transaction, before the sink takes the rest.

The ledger remembers in the same transaction which records they were. So an attempt that comes after a crash neither sends them
again nor takes one of them for good: what became of a record is decided once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import Fenced, KafkaSparkError, KafkaUnavailable, TooManyDeadLetters
from airflow_kafka_spark.windows.dead_letters import Batch, DeadLetters
from airflow_kafka_spark.windows.memory import LedgerRecord, dead_record
from airflow_kafka_spark.windows.model import SplitResult, TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa

    from airflow_kafka_spark.hooks.kafka import KafkaHook
    from airflow_kafka_spark.hooks.ledger import Ledger
    from airflow_kafka_spark.sinks.dead_letters_worker import Envelope

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
        if ledger.attempts > 1:
            ledger.fence_dead_letters()
            ledger.look_as_owner()
        known = ledger.memory.dead.get(ledger.claimed.window.number)
        return known.sent(ledger.claimed.window.replay) if known else {}

    def send(self, results: Iterable[SplitResult], ledger: Ledger) -> DeadLetters | None:
        """Send what was not sent before; all of it or nothing.

        :param results: of the claimed window, with their letters.
        :return: all dead letters of the window, None without any.
        :raises Fenced: a newer attempt has taken over.
        :raises TooManyDeadLetters: they are more than the ledger can remember.
        :raises RowRejected: one is larger than a record of the topic may be.
        :raises KafkaUnavailable: the brokers do not answer; nothing was sent.
        """
        from airflow_kafka_spark.sinks.dead_letters_worker import from_bytes

        number, letters = ledger.claimed.window.number, from_bytes(result.letters for result in results)
        if not letters.num_rows:
            return ledger.memory.dead.get(number)
        self.hook.create_topic(self.name, 1, self.replication_factor)
        for tries in range(1, TRIES + 1):
            producer = ledger.fence_dead_letters(**{"message.max.bytes": self._largest()})
            known = ledger.look_as_owner().dead.get(number)
            try:
                return self._send_once(producer, letters, ledger, known)
            except Fenced:
                raise
            except KafkaUnavailable as error:
                # The outcome is unknown: fence, and look again.
                if tries == TRIES:
                    raise
                log.warning("Sending dead letters failed (try %d of %d): %s", tries, TRIES, error)
        raise AssertionError("the last try returns or raises")

    def _send_once(self, producer: Any, letters: pa.Table, ledger: Ledger, known: DeadLetters | None) -> DeadLetters:
        from airflow_kafka_spark.sinks.dead_letters_worker import offsets_of, without
        from airflow_kafka_spark.sinks.kafka_send_worker import Sender

        entry = ledger.claimed
        letters = without(letters, known.sent() if known else {})
        if not letters.num_rows:
            assert known is not None
            return known
        partitions = {self.name: len(self.hook.describe_topics([self.name])[self.name].partitions)}
        sender = Sender(producer, self.name, partitions, patience=SECONDS)
        try:
            producer.begin_transaction()
            sender.send(self.envelope.records(letters))
            batch = Batch(entry.window.replay, entry.attempt.token, offsets_of(letters), sender.flush())
            dead = replace(known or DeadLetters(entry.window.number, self.name), topic=self.name)
            dead = replace(dead, batches=(*dead.batches, batch))
            record = self._record(dead, ledger)
            # Last: until the transaction ends, nobody can read the ledger's partition past this record.
            (offset,) = ledger.send(producer, [record])
            faults.reached("dead.in_transaction")
            producer.commit_transaction(SECONDS)
        except KafkaSparkError:
            _abort(producer)
            raise
        except Exception as error:
            raise ledger.translated(error, "sending dead letters") from None
        faults.reached("dead.committed")
        ledger.remember_dead_letters(replace(dead, offset=offset))
        return dead

    def _largest(self) -> int:
        """The brokers' own limit, so that it is they who say what is too large."""
        found = self.hook.topic_config([self.name])[self.name].get("max.message.bytes")
        return max(int(found or 0), 1_048_588)

    def _record(self, dead: DeadLetters, ledger: Ledger) -> LedgerRecord:
        record = dead_record(ledger.pipeline, dead)
        if len(record.value or b"") > MOST_REMEMBERED:
            raise TooManyDeadLetters(self.name, MOST_REMEMBERED, remembered=True)
        return record


def _abort(producer: Any) -> None:
    """So that readers need not wait for the timeout. What cannot be aborted now, the next attempt's fence aborts."""
    from confluent_kafka import KafkaException

    with suppress(KafkaException, SystemError):
        producer.purge()
        producer.abort_transaction(10)
