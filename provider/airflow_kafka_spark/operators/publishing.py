"""Publishing a window to Kafka, whatever it is made of: fence whoever did it before, look what is there, publish the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import PartitionsChanged, SparkJobFailed, TopicRecreated
from airflow_kafka_spark.windows.model import KEY_CONVERTER, VALUE_CONVERTER, Marker, SplitResult, Target, Window

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.ledger.attempt import Ledger
    from airflow_kafka_spark.operators.tolerance import ErrorOptions
    from airflow_kafka_spark.road.publish import PublishJob
    from airflow_kafka_spark.road.relay import RelayJob
    from airflow_kafka_spark.sinks.dead_letters import DeadLetterTopic
    from airflow_kafka_spark.sinks.kafka import KafkaSink
    from airflow_kafka_spark.sinks.kafka_worker import Consumed, Publisher

log = logging.getLogger(__name__)


def topic_uris(kafka_conn_id: str, sink: KafkaSink) -> list[str]:
    """The asset of the topic; a column of topics names none."""
    return [f"kafka://{kafka_conn_id}/{sink.topic}"] if sink.topic else []


def target(kafka: KafkaHook, sink: KafkaSink) -> Target:
    """The sink's topic as it is now, to be frozen with the window."""
    assert sink.topic
    found = kafka.describe_topics([sink.topic])[sink.topic]
    return Target(sink.topic, found.topic_id, len(found.partitions))


def check_target(kafka: KafkaHook, sink: KafkaSink, planned: Target) -> None:
    """The topic is the one the window was planned for, with the partitions it had.

    :raises TopicRecreated: it is another one of this name: what was published to it is gone.
    :raises PartitionsChanged: it has more partitions now, so that keys would be placed elsewhere.
    """
    found = target(kafka, sink)
    if planned.topic_id and found.topic_id and found.topic_id != planned.topic_id:
        raise TopicRecreated(planned.topic, planned.topic_id, found.topic_id)
    if found.partitions != planned.partitions and not sink.allow_new_partitions:
        raise PartitionsChanged(planned.topic, planned.partitions, found.partitions)


def publisher(kafka: KafkaHook, sink: KafkaSink, ledger: Ledger, consumed: Consumed | None = None) -> Publisher:
    """What publishes the splits of the window that the ledger has claimed."""
    from airflow_kafka_spark.sinks.kafka_worker import Publisher

    return Publisher(
        config=sink.producer(kafka),
        reading=kafka.consumer_config(),
        ledger=ledger.place,
        prefix=ledger.split_prefix,
        topic=sink.topic,
        partitions={sink.topic: target(kafka, sink).partitions} if sink.topic else {},
        transaction_timeout=sink.transaction_timeout,
        consumed=consumed,
        conn_id=kafka.conn_id,
    )


def writer_classes(sink: KafkaSink, behind: str = "") -> dict[str, str]:
    """The classes of the formats that are written, by stage.

    :param behind: what stands behind the stages' names.
    """
    formats = {VALUE_CONVERTER: sink.value, KEY_CONVERTER: sink.key_writer}
    return {stage + behind: f"{type(f).__module__}.{type(f).__name__}" for stage, f in formats.items()}


def burying(made: Publisher, kafka: KafkaHook, sink: KafkaSink, letters: DeadLetterTopic | None) -> Publisher:
    """The same, tolerating bad records.

    :param letters: where they go, in the transactions of their splits; the topic is created if it is missing. None: they are only
        counted.
    """
    from airflow_kafka_spark.sinks.kafka_worker import Burial

    if letters is None:
        return replace(made, burial=Burial())
    made, partitions = _reaching(made, kafka, sink, letters.name, letters.replication_factor)
    return replace(made, burial=Burial(letters.name, partitions, letters.envelope))


def routing(made: Publisher, kafka: KafkaHook, sink: KafkaSink, topics: Iterable[str]) -> Publisher:
    """The same, also sending records to topics that a ``Filter`` names, in the transactions of their splits; the topics are
    created if they are missing.
    """
    known = dict(made.partitions)
    for topic in dict.fromkeys(topics):
        made, known[topic] = _reaching(made, kafka, sink, topic, -1)
    return replace(made, partitions=known, routes=frozenset(topics))


def _reaching(made: Publisher, kafka: KafkaHook, sink: KafkaSink, topic: str, replication_factor: int) -> tuple[Publisher, int]:
    """The same, with room for the records that a topic may hold, and the number of its partitions; it is there from now on."""
    kafka.create_topic(topic, 1, replication_factor)
    config = dict(made.config)
    if "message.max.bytes" not in sink.producer_config:
        config["message.max.bytes"] = max(int(config.get("message.max.bytes", 0)), kafka.largest_record(topic))
    return replace(made, config=config), len(kafka.describe_topics([topic])[topic].partitions)


def hold_to_limit(
    job: PublishJob | RelayJob, errors: ErrorOptions, window: Window, ledger: Ledger, can_be_bad: bool = True
) -> None:
    """With ``max_errors``, count before anything is published: splits are published one by one, and none knows of the others.
    Afterwards each may hold as many bad records as were counted, and no more.

    :param can_be_bad: False: there is nothing to count.
    :raises TooManyBadRecords: there are more in the window, those that an earlier attempt has accepted among them.
    """
    if errors.most is None:
        return
    counted = job.count() if can_be_bad else []
    errors.accept(window, [*accounts(ledger.published().values()), *counted])
    assert job.publisher.burial is not None
    burial = replace(job.publisher.burial, counted={result.index: result.rejected for result in counted})
    job.publisher = replace(job.publisher, burial=burial)


def accounts(markers: Iterable[Marker]) -> list[SplitResult]:
    """What was read for splits that are published."""
    return [marker.result or SplitResult(marker.split, marker.records) for marker in markers]


def publish_splits(
    ledger: Ledger, window: Window, splits: Sequence[int], publish: Callable[[tuple[int, ...]], None]
) -> list[Marker]:
    """Publish the splits that are not published yet.

    :param splits: the indexes of all of them, ascending.
    :param publish: publishes those it is given.
    :return: the markers of all, in that order.
    :raises SparkJobFailed: one has no marker afterwards.
    """
    if ledger.attempts > 1 and splits:
        # Whoever published before is refused from now on, so that what the ledger says next stays true.
        ledger.fence_splits(splits[-1] + 1)
    there = ledger.published()
    if there:
        log.info("%d of %d splits of window %s are published already", len(there), len(splits), window)
    left = tuple(index for index in splits if index not in there)
    if left:
        publish(left)
    faults.reached("job.done")
    there = ledger.published()
    if missing := [index for index in splits if index not in there]:
        raise SparkJobFailed(str(window), f"split {missing[0]} (of {len(missing)}) has no marker in the ledger")
    return [there[index] for index in splits]
