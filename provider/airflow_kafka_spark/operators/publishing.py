"""Publish a window to Kafka split by split: fence earlier attempts, find published splits, publish the others.

Used by the operators that publish rows and by those that publish records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import Fenced, PartitionsChanged, Problem, SparkJobFailed, TopicRecreated
from airflow_kafka_spark.formats.base import Format
from airflow_kafka_spark.sinks.kafka.sink import KafkaSink, limit_batches
from airflow_kafka_spark.windows.model import KEY_CONVERTER, VALUE_CONVERTER, Marker, SplitResult, TargetTopic, Window

if TYPE_CHECKING:
    from airflow_kafka_spark.bad_records.dead_letters import DeadLetterTopic
    from airflow_kafka_spark.bad_records.options import ErrorOptions
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.jobs.publish import PublishJob
    from airflow_kafka_spark.ledger.attempt import Ledger
    from airflow_kafka_spark.sinks.kafka.tasks.publish import ConsumedOffsets, Publisher

log = logging.getLogger(__name__)

REDIRECT = (
    "The records that the open window had published are gone with it. To publish the rest of the window to the new one: "
    "`airflow kafka-spark rebind <pipeline> --not-running --why ...`, and run the task again. To give the window up: `skip` "
    "instead of `rebind`"
)
"""The action of the error if the topic of an open window was created again."""

PUBLISH_TRIES = 3
"""Number of times that an attempt publishes a split, if late tasks of earlier attempts stop it each time."""


def set_connection(sink: KafkaSink, kafka_conn_id: str) -> KafkaSink:
    """Return a sink with the connection of its operator, unless it names one itself."""
    # A sink of another kind is refused when the task runs, with all other problems.
    return replace(sink, conn_id=kafka_conn_id) if isinstance(sink, KafkaSink) and sink.conn_id is None else sink


def find_sink_problems(sink: KafkaSink) -> list[Problem]:
    """Return the problems of a sink of another class, and of arguments that are no formats."""
    if not isinstance(sink, KafkaSink):
        return [Problem("sink", f"`{sink!r}` is not a KafkaSink")]
    if sink.value is not None and not isinstance(sink.value, Format):
        return [Problem("sink.value", f"`{sink.value!r}` is not a Format")]
    if sink.key_format is not None and not isinstance(sink.key_format, Format):
        return [Problem("sink.key_format", f"`{sink.key_format!r}` is not a Format")]
    return []


def find_cluster_problems(sink: KafkaSink, kafka_conn_id: str) -> list[Problem]:
    """Return the problem of a sink of another cluster than that of the operator."""
    if sink.conn_id not in (None, kafka_conn_id):
        found = f"it is `{sink.conn_id}`, and the operator's `kafka_conn_id` is `{kafka_conn_id}`: exactly-once needs one cluster"
        return [Problem("sink.conn_id", found, "Leave it out")]
    return []


def find_ledger_problems(sink: KafkaSink, ledger_topic: str) -> list[Problem]:
    """Return the problem of a sink whose topic is the ledger, where pipelines would find records that are none of theirs."""
    if sink.topic != ledger_topic:
        return []
    return [Problem("sink.topic", f"`{ledger_topic}` is the ledger of pipelines (`ledger_topic`)", "Write to another topic")]


def list_topic_uris(sink: KafkaSink) -> list[str]:
    """Return the asset of the topic; none for a column of topics."""
    return [sink.uri] if isinstance(sink, KafkaSink) and sink.topic else []


def describe_target(kafka: KafkaHook, sink: KafkaSink) -> TargetTopic:
    """Return the sink's topic as it is now, for the window's plan."""
    assert sink.topic
    found = kafka.describe_topics([sink.topic])[sink.topic]
    return TargetTopic(sink.topic, found.topic_id, len(found.partitions))


def check_target(kafka: KafkaHook, sink: KafkaSink, planned: TargetTopic) -> None:
    """Make sure that the topic is the one that the window was planned for, with the same number of partitions.

    :raises TopicRecreated: the topic was deleted and created again: the records that were published to it are gone.
    :raises PartitionsChanged: the topic has more partitions now, so that keys would be placed elsewhere.
    """
    found = describe_target(kafka, sink)
    if planned.topic_id and found.topic_id and found.topic_id != planned.topic_id:
        raise TopicRecreated(planned.topic, planned.topic_id, found.topic_id, REDIRECT)
    if found.partitions != planned.partitions and not sink.allow_new_partitions:
        raise PartitionsChanged(planned.topic, planned.partitions, found.partitions)


def refuse_lost_topics(kafka: KafkaHook, window: Window, sent: Iterable[tuple[str, str]]) -> None:
    """Make sure that the topics to which an open window has sent records, beside its target, still have these records.

    :param sent: the topics, each with its id before the records were sent; "" if it is unknown.
    :raises TopicRecreated: a topic was deleted since, and no `rebind` was made after that.
    """
    for topic, known, found in _find_lost_topics(kafka, window, sent):
        raise TopicRecreated(topic, known, found, REDIRECT)


def accept_lost_topics(kafka: KafkaHook, ledger: Ledger, window: Window) -> Window:
    """Return an open window with the ids of topics that were deleted after it has sent records to them.

    It continues without these records, or sends them again.
    """
    markers = [marker for (number, _), marker in ledger.memory.markers.items() if number == window.number]
    dead = ledger.memory.dead.get(window.number)
    sent = [*list_sent_topics(markers), *(dead.list_topic_ids(window.replay) if dead else ())]
    lost = {known for _, known, _ in _find_lost_topics(kafka, window, sent)}
    return replace(window, lost_topic_ids=(*window.lost_topic_ids, *sorted(lost)))


def list_sent_topics(markers: Iterable[Marker]) -> list[tuple[str, str]]:
    """Return the topics to which splits have sent records, beside the window's target, each with its id at that time."""
    return [pair for marker in markers for pair in marker.topic_ids.items()]


def _find_lost_topics(kafka: KafkaHook, window: Window, sent: Iterable[tuple[str, str]]) -> list[tuple[str, str, str]]:
    """Return the topics that were deleted after records of a window were sent to them: name, known id, and present id ("" if the
    topic does not exist)."""
    compared = sorted({(topic, known) for topic, known in sent if known and known not in window.lost_topic_ids})
    if not compared:
        return []
    there = kafka.describe_topics({topic for topic, _ in compared}, missing="omit")
    # Brokers that do not return ids cannot be compared.
    found = {topic: there[topic].topic_id if topic in there else None for topic, _ in compared}
    return [(topic, known, found[topic] or "") for topic, known in compared if found[topic] not in (known, "")]


def make_publisher(kafka: KafkaHook, sink: KafkaSink, ledger: Ledger, consumed: ConsumedOffsets | None = None) -> Publisher:
    """Return the publisher of the splits of the window that the ledger has claimed.

    :param consumed: the offsets that the group commits with each split; None commits none.
    """
    from airflow_kafka_spark.sinks.kafka.tasks.publish import Publisher

    return Publisher(
        config=sink.make_producer_config(kafka),
        reading=kafka.make_consumer_config(),
        ledger=ledger.ledger_claim,
        prefix=ledger.split_prefix,
        topic=sink.topic,
        partitions={sink.topic: describe_target(kafka, sink).partitions} if sink.topic else {},
        transaction_timeout=sink.transaction_timeout,
        consumed=consumed,
        conn_id=kafka.conn_id,
    )


def list_writer_classes(sink: KafkaSink, behind: str = "") -> dict[str, str]:
    """Return the classes of the formats that are written, by stage.

    :param behind: a suffix of the stages' names.
    """
    formats = {VALUE_CONVERTER: sink.value_format, KEY_CONVERTER: sink.key_writer}
    return {stage + behind: f"{type(f).__module__}.{type(f).__name__}" for stage, f in formats.items()}


def add_dead_letters(made: Publisher, kafka: KafkaHook, letters: DeadLetterTopic | None) -> Publisher:
    """Return a publisher that tolerates bad records.

    :param made: the publisher of the good records.
    :param letters: the topic of bad records, which are sent in the transactions of their splits. It is created if it is missing.
        None: bad records are only counted.
    """
    from airflow_kafka_spark.sinks.kafka.tasks.publish import BadRecordPolicy

    if letters is None:
        return replace(made, bad_record_policy=BadRecordPolicy())
    made, partitions = _add_topic(made, kafka, letters.name, letters.replication_factor)
    return replace(made, bad_record_policy=BadRecordPolicy(letters.name, partitions, letters.envelope))


def add_routes(made: Publisher, kafka: KafkaHook, topics: Iterable[str]) -> Publisher:
    """Return a publisher that also sends records to topics that a ``Filter`` names, in the transactions of their splits.

    Topics that are missing are created.
    """
    known = dict(made.partitions)
    for topic in dict.fromkeys(topics):
        made, known[topic] = _add_topic(made, kafka, topic, -1)
    return replace(made, partitions=known, routes=frozenset(topics))


def _add_topic(made: Publisher, kafka: KafkaHook, topic: str, replication_factor: int) -> tuple[Publisher, int]:
    """Return a publisher whose batches are no larger than a topic takes, and the number of the topic's partitions.

    The topic is created if it is missing.
    """
    kafka.create_topic(topic, 1, replication_factor)
    found = kafka.describe_topics([topic])[topic]
    config = limit_batches(made.config, kafka, topic)
    return replace(made, config=config, topic_ids={**made.topic_ids, topic: found.topic_id}), len(found.partitions)


def refuse_too_many(job: PublishJob, errors: ErrorOptions, window: Window, ledger: Ledger, can_be_bad: bool = True) -> None:
    """Count the bad records of a window before anything is published, if ``max_errors`` is given.

    Splits are published one by one, and no task knows how many bad records the others have. Afterwards no split may have more bad
    records than were counted in it.

    :param can_be_bad: False if no record can be bad, so that counting is not needed.
    :raises TooManyBadRecords: the window has more, including those that an earlier attempt has accepted.
    """
    if errors.most is None:
        return
    counted = job.count() if can_be_bad else []
    errors.accept(window, [*list_accounts(ledger.read_published().values()), *counted])
    assert job.publisher.bad_record_policy is not None
    policy = replace(job.publisher.bad_record_policy, counted={result.index: result.rejected for result in counted})
    job.publisher = replace(job.publisher, bad_record_policy=policy)


def list_accounts(markers: Iterable[Marker]) -> list[SplitResult]:
    """Return the accounts of splits that are published."""
    return [marker.result or SplitResult(marker.split, marker.records) for marker in markers]


def publish_splits(
    ledger: Ledger,
    window: Window,
    splits: Sequence[int],
    publish: Callable[[tuple[int, ...]], None],
    unreadable: Sequence[int] = (),
) -> list[Marker]:
    """Publish the splits that are not published yet.

    :param splits: the indexes of all splits that can be read, ascending.
    :param publish: publishes the splits with some indexes.
    :param unreadable: the indexes of splits that can no longer be read. An earlier attempt may have published some of them.
    :return: the markers of all published splits, in the order of their indexes.
    :raises Fenced: a newer attempt has taken over.
    :raises SparkJobFailed: a split that can be read has no marker afterwards.
    :raises TopicRecreated: a topic that splits have sent records to, beside the target, was deleted since.
    """
    every = sorted([*splits, *unreadable])
    if ledger.attempts > 1 and every:
        # Earlier attempts cannot publish from now on, so that the markers that are read next stay complete.
        ledger.fence_splits(every[-1] + 1)
    there = ledger.read_published()
    if there:
        log.info("%d of %d splits of window %s are published already", len(there), len(every), window)
        # Before missing topics are created.
        refuse_lost_topics(ledger.hook, window, list_sent_topics(there.values()))
    for tries in range(1, PUBLISH_TRIES + 1):
        left = tuple(index for index in splits if index not in there)
        if not left:
            break
        try:
            publish(left)
        except Fenced:
            # A late task of an earlier attempt may fence a split before it finds that it must not publish. The splits still
            # belong to this attempt, unless a newer one has taken over.
            ledger.verify()
            if tries == PUBLISH_TRIES:
                found = f"late tasks of an earlier attempt have stopped its splits {tries} times"
                raise SparkJobFailed(str(window), found) from None
            log.warning("A late task of an earlier attempt has stopped a split of window %s; publishing what is left", window)
            there = ledger.read_published()
        else:
            break
    faults.reached("job.done")
    there = ledger.read_published()
    if missing := [index for index in splits if index not in there]:
        raise SparkJobFailed(str(window), f"split {missing[0]} (of {len(missing)}) has no marker in the ledger")
    refuse_lost_topics(ledger.hook, window, list_sent_topics(there.values()))
    return [there[index] for index in every if index in there]
