"""Send the side outputs of a window: dead letters, and records that transforms route to other topics.

One Kafka transaction sends them before the sink commits the other records. In the same transaction the ledger records their
offsets. An attempt after a crash therefore neither sends one of them again nor writes it to the sink.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import (
    Fenced,
    KafkaRefused,
    KafkaSparkError,
    KafkaUnavailable,
    RightMissing,
    RowRejected,
    TooManyDeadLetters,
    TooManyRouted,
)
from airflow_kafka_spark.hooks.kafka.transactions import abort
from airflow_kafka_spark.windows.dead_letters import (
    Batch,
    Captured,
    DeadLetters,
    Runs,
    group_into_runs,
    list_run_offsets,
    subtract_offsets,
    unite_offsets,
)
from airflow_kafka_spark.windows.memory import LedgerRecord, make_dead_letters_record
from airflow_kafka_spark.windows.model import SAMPLES, BadRecord, OffsetRange, Split, SplitResult, TopicPartition

if TYPE_CHECKING:
    import pyarrow as pa
    from confluent_kafka import Producer

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.ledger.attempt import Ledger
    from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import Envelope

log = logging.getLogger(__name__)

TRIES = 3
"""Maximum number of tries of a transaction of dead letters."""
SECONDS = 60.0
"""Timeout in seconds of such a transaction."""


@dataclass(frozen=True)
class DeadLetterTopic:
    """The dead letter topic of a pipeline.

    Guarantee: a ``read_committed`` reader sees each of a window's dead letters exactly once, also if attempts are killed.

    :param hook: the cluster, which is that of the ledger.
    :param name: the topic. It is created with one partition before the first letter if it does not exist.
    :param replication_factor: replicas of a topic that is created; -1 is the brokers' default.
    :param envelope: adds the headers of the letters.
    """

    hook: KafkaHook
    name: str
    replication_factor: int
    envelope: Envelope

    def send(self, results: Iterable[SplitResult], ledger: Ledger) -> DeadLetters | None:
        """Send the letters that were not sent before; all of them or none.

        :param results: the results of the claimed window, with their letters.
        :return: all dead letters of the window, or None without any.
        :raises Fenced: a newer attempt has taken over.
        :raises TooManyDeadLetters: they are more than may pass through the driver, or than the ledger can record.
        :raises KafkaRefused: the topic refuses a letter: it is too large or too old, or a permission is missing.
        :raises KafkaUnavailable: the brokers do not answer; nothing was sent.
        """
        return SideOutputs(self.hook, ledger.parent_pipeline, self).send(results, ledger)


@dataclass(frozen=True)
class SideOutputs:
    """The records of a window that go to topics instead of the sink: dead letters, and records that transforms route.

    Guarantee: one Kafka transaction sends all of them and writes their offsets to the ledger. A ``read_committed`` reader of such
    a topic therefore sees each of its records exactly once, and no attempt handles one of them differently.

    :param hook: the cluster, which is that of the ledger.
    :param pipeline: the pipeline's name, for a header of routed records.
    :param dead: the dead letter topic; None if bad records are not sent.
    """

    hook: KafkaHook
    pipeline: str
    dead: DeadLetterTopic | None = None

    def send(self, results: Iterable[SplitResult], ledger: Ledger, captured: Sequence[Captured] = ()) -> DeadLetters | None:
        """Send the records that were not sent before; all of them or none.

        :param results: the results of the claimed window, with their letters and routed records.
        :param captured: the records that other sinks will take, whose counts the ledger stores in the same transaction.
        :return: all records of the window that this and earlier attempts have sent; None without any.
        :raises Fenced: a newer attempt has taken over.
        :raises TooManyDeadLetters: the dead letters are more than may pass through the driver, or than the ledger can record.
        :raises TooManyRouted: the routed records are.
        :raises KafkaRefused: a topic refuses a record: it is too large or too old, or a permission is missing.
        :raises KafkaUnavailable: the brokers do not answer; nothing was sent.
        """
        from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import LIMIT_BYTES, ROUTED, read_letters

        results, window = list(results), ledger.claimed.window
        before = find_kept_dead_letters(ledger)
        letters = read_letters(result.letters for result in results)
        routes = read_letters((result.routes for result in results), ROUTED)
        wanted = {self.dead.name: self.dead.replication_factor} if self.dead and letters.num_rows else {}
        wanted = {**dict.fromkeys(routes["to"].unique().to_pylist(), -1), **wanted}
        if self.dead and letters.nbytes > LIMIT_BYTES:
            raise TooManyDeadLetters(self.dead.name, LIMIT_BYTES)
        if routes.nbytes > LIMIT_BYTES:
            raise TooManyRouted(routes["to"][0].as_py(), LIMIT_BYTES)
        # The ledger also records how many bad records get no letter, because no other place has this number after the sink has
        # applied the window.
        skipped = 0 if self.dead else sum(result.rejected for result in results)
        earlier = self._find_earlier(letters, before, ledger)
        if not (wanted or captured or earlier or skipped != (before.count_skipped(window.replay) if before else 0)):
            return before
        for topic, factor in wanted.items():
            self.hook.create_topic(topic, 1, factor)
        for tries in range(1, TRIES + 1):
            producer = ledger.fence_dead_letters(**self.hook.read_size_settings(wanted))
            ledger.read_as_owner()
            known = find_kept_dead_letters(ledger)
            try:
                outputs, earlier = self._collect_outputs(letters, routes, known), self._find_earlier(letters, known, ledger)
                return self._send_once(producer, outputs, earlier, ledger, known, captured, skipped)
            except Fenced:
                raise
            except KafkaUnavailable as error:
                # The outcome is unknown: fence this attempt's own producer and read the ledger again.
                if tries == TRIES:
                    raise
                log.warning("Sending dead letters failed (try %d of %d): %s", tries, TRIES, error)
        raise AssertionError("the last try returns or raises")

    def _find_earlier(self, letters: pa.Table, known: DeadLetters | None, ledger: Ledger) -> dict[TopicPartition, Runs]:
        """Return the records that a replay leaves out without a new dead letter, and that the ledger does not know as such: an
        earlier replay has sent their letters, or they were sent again to the topics that they came from."""
        from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import collect_offsets

        if self.dead is None or not ledger.claimed.window.replay:
            return {}
        sent, mine = (known.list_sent(), known.list_sent(ledger.claimed.window.replay)) if known else ({}, {})
        bad = {tp: list_run_offsets(runs) for tp, runs in collect_offsets(letters).items()}
        found = {tp: offsets & sent.get(tp, frozenset()) for tp, offsets in bad.items()}
        left = subtract_offsets(unite_offsets(found, find_resent(ledger)), mine)
        return {tp: group_into_runs(offsets) for tp, offsets in left.items()}

    def _collect_outputs(self, letters: pa.Table, routes: pa.Table, known: DeadLetters | None) -> list[_SideOutput]:
        """Return the records that were not sent before, by topic."""
        import pyarrow.compute as pc

        from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import drop_sent, make_routed_records

        outputs = []
        if self.dead is not None:
            left = drop_sent(letters, known.list_sent() if known else {})
            outputs.append(_SideOutput(self.dead.name, left, self.dead.envelope.make_records))
        for topic in routes["to"].unique().to_pylist():
            left = drop_sent(routes.filter(pc.equal(routes["to"], topic)), known.list_routed(topic=topic) if known else {})
            outputs.append(_SideOutput(topic, left, lambda found: make_routed_records(found, self.pipeline), routed=True))
        return [output for output in outputs if output.letters.num_rows]

    def _send_once(
        self,
        producer: Producer,
        outputs: Sequence[_SideOutput],
        earlier: Mapping[TopicPartition, Runs],
        ledger: Ledger,
        known: DeadLetters | None,
        captured: Sequence[Captured],
        skipped: int,
    ) -> DeadLetters:
        from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import collect_offsets
        from airflow_kafka_spark.sinks.kafka.tasks.send import Sender

        replay = ledger.claimed.window.replay
        is_known = known is not None and known.add_captured(captured).add_skipped(replay, skipped) == known
        if known is not None and is_known and not (outputs or earlier):
            return known
        entry, described = ledger.claimed, self.hook.describe_topics([output.topic for output in outputs]) if outputs else {}
        batches = []
        try:
            producer.begin_transaction()
            for output in outputs:
                partitions = {output.topic: len(described[output.topic].partitions)}
                sender = Sender(producer, output.topic, partitions, patience=SECONDS)
                try:
                    sender.send(output.records(output.letters))
                    landed = sender.flush()
                except Exception as error:
                    known_as = ledger.translate(error, "sending", output.topic)
                    refused = output.find_refusal(known_as if isinstance(known_as, RightMissing) else error, self.hook.conn_id)
                    raise refused or error from None
                routed = output.topic if output.routed else ""
                topic_id = described[output.topic].topic_id
                batches.append(Batch(replay, entry.attempt.token, collect_offsets(output.letters), landed, routed, topic_id))
            if earlier:
                batches.append(Batch(replay, entry.attempt.token, earlier))
            name = self.dead.name if self.dead is not None else ""
            dead = known or DeadLetters(entry.window.number, name)
            dead = replace(dead, topic=name or dead.topic, batches=(*dead.batches, *batches)).add_captured(captured)
            dead = dead.add_skipped(replay, skipped)
            record = self._make_record(dead, ledger, outputs)
            # The record is written last, because no reader passes it in the ledger's partition before its transaction ends.
            (offset,) = ledger.send(producer, [record])
            faults.reached("dead.in_transaction")
            producer.commit_transaction(SECONDS)
        except KafkaSparkError:
            abort(producer)
            raise
        except Exception as error:
            raise ledger.translate(error, "sending dead letters", producer=producer) from None
        faults.reached("dead.committed")
        ledger.remember_dead_letters(replace(dead, offset=offset))
        return dead

    def _make_record(self, dead: DeadLetters, ledger: Ledger, outputs: Sequence[_SideOutput]) -> LedgerRecord:
        record = make_dead_letters_record(ledger.pipeline, dead)
        if len(record.value or b"") > ledger.largest_dead_letters:
            largest = max(outputs, key=lambda output: output.letters.num_rows, default=None)
            refused = TooManyRouted if largest and largest.routed else TooManyDeadLetters
            raise refused(largest.topic if largest else dead.topic, ledger.largest_dead_letters, remembered=True)
        return record


@dataclass(frozen=True)
class _SideOutput:
    """The records of a window that go to one topic.

    :param topic: the topic.
    :param letters: the records as they were read.
    :param records: returns the records to send.
    :param routed: True if a transform routes them there; False for dead letters.
    """

    topic: str
    letters: pa.Table
    records: Callable[[pa.Table], pa.RecordBatch]
    routed: bool = False

    def find_refusal(self, error: Exception, conn_id: str) -> KafkaRefused | None:
        """Return the exception for an error that refuses one of the records, or None if the error is not about records."""
        from airflow_kafka_spark.sinks.kafka.tasks.send import RETRY_HINT, describe_remedy

        what = "records that a Filter takes out" if self.routed else "dead letters"
        doing = f"sending {what} to topic `{self.topic}`"
        if isinstance(error, RowRejected):
            code, detail = "MSG_SIZE_TOO_LARGE", error.detail
        elif isinstance(error, KafkaRefused):
            code, detail = error.code, error.detail
        else:
            return None
        if isinstance(error, RightMissing):
            return error.describe_as(conn_id, doing)
        action = describe_remedy(code, f"`{self.topic}`")
        if code == "MSG_SIZE_TOO_LARGE":
            detail = f"{detail}; the largest is {self._describe_largest()}"
            action += ". A dead letter has some headers more than the record"
            if not self.routed:
                action += ", which `errors_deadletterqueue_context_headers_enable=False` leaves out"
        return KafkaRefused(conn_id, doing, code, detail, f"{action}. {RETRY_HINT}")

    def _describe_largest(self) -> str:
        sizes = [
            len(key or b"") + len(value or b"") for key, value in zip(*map(self._read_column, ("key", "value")), strict=True)
        ]
        at = sizes.index(max(sizes))
        topic, partition, offset = (self._read_column(name)[at] for name in ("topic", "partition", "offset"))
        return f"{topic}-{partition}@{offset}, of {sizes[at]:,} bytes without headers"

    def _read_column(self, name: str) -> list[Any]:
        return self.letters[name].to_pylist()


def find_known_dead_letters(ledger: Ledger) -> DeadLetters | None:
    """Return the records that earlier attempts at the claimed window have sent, and fence these attempts, so that none can send
    more. For a replay, also fence commands that send dead letters again.

    :raises Fenced: a newer attempt has taken over.
    """
    window, is_new = ledger.claimed.window, ledger.attempts == 1
    if window.replay and (window.number in ledger.memory.dead or find_resent(ledger)):
        # A command that has read the window as complete may be sending its dead letters again.
        ledger.fence_controls()
        if is_new:
            ledger.read_as_owner()
    if not is_new:
        ledger.fence_dead_letters()
        ledger.read_as_owner()
    return find_kept_dead_letters(ledger)


def find_resent(ledger: Ledger) -> dict[TopicPartition, frozenset[int]]:
    """Return the dead letters of the claimed window that were sent again to the topics that they came from."""
    return ledger.parent_memory.find_resent(ledger.claimed.window)


def find_kept_dead_letters(ledger: Ledger) -> DeadLetters | None:
    """Return the records of the claimed window that were sent, without those that are gone with a topic that was deleted before a
    ``rebind``. These are sent again."""
    window = ledger.claimed.window
    dead = ledger.memory.dead.get(window.number)
    return dead.exclude_topics(window.lost_topic_ids) if dead is not None else None


def replace_results(results: Sequence[SplitResult], again: Sequence[SplitResult]) -> list[SplitResult]:
    """Return the results of a window's splits, with the first results of some splits replaced by newer ones."""
    new = {result.index: result for result in again}
    return [new.get(result.index, result) for result in results]


def add_refused(
    results: Sequence[SplitResult], refused: Sequence[BadRecord], splits: Sequence[Split], hook: KafkaHook | None
) -> list[SplitResult]:
    """Return the results of a window's splits, with the records that the sink has refused counted as bad.

    :param refused: these records; few enough to be read again by the driver.
    :param hook: the cluster from which the records are read again, to become dead letters; None if they are only counted.
    :raises KafkaSparkError: the records cannot be read any more.
    """
    if not refused:
        return list(results)
    from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import join_streams

    by_split: dict[int, dict[int, BadRecord]] = {}
    epochs: dict[int, int] = {}
    for bad in refused:
        split = _find_split(bad, splits)
        by_split.setdefault(split.index, {})[bad.offset] = bad
        epochs[split.index] = split.epoch
    made = []
    for result in results:
        found = by_split.get(result.index)
        if not found:
            made.append(result)
            continue
        rows = int(result.token.get("rows", 0)) - len(found)
        made.append(
            replace(
                result,
                rejected=result.rejected + len(found),
                samples=tuple(sorted([*result.samples, *found.values()], key=lambda bad: bad.offset))[:SAMPLES],
                letters=join_streams(result.letters, _encode_letters(found, hook, epochs[result.index]))
                if hook is not None
                else result.letters,
                token={**result.token, "rows": rows},
            )
        )
    return made


def _find_split(bad: BadRecord, splits: Sequence[Split]) -> Split:
    partition = (bad.topic, bad.partition)
    return next(s for s in splits if s.range.topic_partition == partition and s.range.start <= bad.offset < s.range.end)


def _encode_letters(found: Mapping[int, BadRecord], hook: KafkaHook, epoch: int) -> bytes:
    """Return the dead letters of one split's refused records. The records are read again, because tasks do not keep them."""
    import pyarrow as pa
    import pyarrow.compute as pc

    from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import DeadLetterBuffer, make_dead_letters
    from airflow_kafka_spark.sources.kafka.tasks.read import KafkaSplitReader

    first, letters = next(iter(found.values())), DeadLetterBuffer()
    wanted = OffsetRange(first.topic, first.partition, min(found), max(found) + 1)
    offsets = pa.array(sorted(found), pa.int64())
    for records in KafkaSplitReader(hook.make_consumer_config(), wanted, with_headers=True, epoch=epoch):
        at = pc.indices_nonzero(pc.is_in(records.offsets, offsets)).to_pylist()
        if at:
            letters.add(make_dead_letters([found[records.offsets[index].as_py()] for index in at], records.get_originals(at)))
    return letters.to_bytes()
