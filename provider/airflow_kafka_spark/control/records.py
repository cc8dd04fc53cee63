"""Read ranges of a topic's records by offset, without a consumer group: dead letters, and records that a page shows."""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import KafkaUnavailable
from airflow_kafka_spark.hooks.kafka.events import ClientEvents
from airflow_kafka_spark.hooks.kafka.rights import consume
from airflow_kafka_spark.ledger.topic import PROMPT
from airflow_kafka_spark.windows.model import TopicPartition

if TYPE_CHECKING:
    from confluent_kafka import Message

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

FETCH_BYTES = 4 << 20
BATCH = 200


def read_records(
    hook: KafkaHook, ranges: Mapping[TopicPartition, tuple[int, int]], doing: str, *, seconds: float, whole: bool = False
) -> Generator[Message, None, None]:
    """Yield the committed records of ranges of offsets, in the order of each partition.

    A range of a topic that does not exist, and offsets that are not there (any more, or yet), are left out.

    :param hook: the cluster.
    :param ranges: the first offset and the end of each partition.
    :param doing: the action, for errors.
    :param seconds: how long reading may take.
    :param whole: True to raise an error after ``seconds``; False to end.
    :raises KafkaUnavailable: Kafka does not answer.
    :raises RightMissing: the user may not read a topic.
    """
    import confluent_kafka

    described = hook.describe_topics({tp.topic for tp in ranges}, missing="omit")
    existing = [tp for tp in ranges if tp.topic in described and tp.partition in described[tp.topic].partitions]
    bounds = hook.offsets(existing) if existing else {}
    starts = {tp: max(ranges[tp][0], bounds[tp].low) for tp in existing}
    left = {tp: end for tp in existing if starts[tp] < (end := min(ranges[tp][1], bounds[tp].lso))}
    if not left:
        return
    events = ClientEvents(hook.config.get("error_cb"))
    settings: dict[str, Any] = {
        "queued.max.messages.kbytes": 8192, "fetch.max.bytes": FETCH_BYTES, "error_cb": events.on_error
    }  # fmt: skip
    consumer = confluent_kafka.Consumer(hook.consumer_config(**PROMPT, **settings), logger=events)
    deadline = time.monotonic() + seconds
    try:
        consumer.assign([confluent_kafka.TopicPartition(*tp, starts[tp]) for tp in left])
        while left:
            if time.monotonic() > deadline:
                if whole:
                    raise KafkaUnavailable(hook.conn_id, doing, f"it takes longer than {seconds:.0f} s")
                return
            for message in consume(consumer, BATCH, 0.1, hook.config, doing, conn_id=hook.conn_id):
                error = message.error()
                topic, partition, offset = message.topic(), message.partition(), message.offset()
                if error is not None and error.code() != confluent_kafka.KafkaError._PARTITION_EOF:
                    raise KafkaUnavailable(hook.conn_id, doing, error.str())
                assert topic is not None and partition is not None and offset is not None
                tp = TopicPartition(topic, partition)
                if error is None and offset < left.get(tp, 0):
                    yield message
                if offset + (error is None) >= left.get(tp, 0):
                    left.pop(tp, None)
    finally:
        consumer.close()
