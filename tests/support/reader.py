"""A read_committed reader that reads during faults, and the check that it saw the records that a later reader sees."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from airflow_kafka_spark.testing._processes import wait_until
from tests.support.oracle import same_multiset

Record = tuple[int, int, bytes | None, bytes | None]
"""Partition, offset, key, value."""


def same_log(expected: Iterable[Record], found: Iterable[Record]) -> int:
    """Assert that two readers got the same records in the same places, each once and in order.

    :return: the number of records that were compared.
    :raises AssertionError: also if there was nothing to compare.
    """
    found = list(found)
    last: dict[int, int] = {}
    for partition, offset, *_ in found:
        assert offset > last.get(partition, -1), f"offset {offset} of partition {partition} came after {last[partition]}"
        last[partition] = offset
    return same_multiset(expected, found)


class Reader:
    """Read a topic in a thread, from its beginning on. A context manager: entering returns when the reader has a position in
    every partition.

    It has no group, keeps its position itself, and never seeks: if it gets a record twice, the broker has sent it twice.

    :param config: of a client.
    :param topic: the topic, with all its partitions.
    """

    def __init__(self, config: Mapping[str, Any], topic: str) -> None:
        self.topic = topic
        self._config = {
            **config,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,  # the broker tells of the end only after it has waited this long for more
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "reconnect.backoff.max.ms": 500,
            "log_level": 0,
        }
        self._records: list[Record] = []
        self._at: dict[int, int] = {}
        self._broken: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._guarded, daemon=True)

    def __enter__(self) -> Reader:
        # With no error_cb of its own a client raises what concerns no request.
        self._consumer = Consumer({**self._config, "error_cb": lambda error: None})
        self._partitions = list(self._consumer.list_topics(self.topic, timeout=60).topics[self.topic].partitions)
        self._consumer.assign([TopicPartition(self.topic, partition, 0) for partition in self._partitions])
        self._thread.start()
        self._wait(lambda: len(self._at) == len(self._partitions), 180, "to stand in every partition")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        self._thread.join(30)
        self._consumer.close()

    @property
    def count(self) -> int:
        """The number of records that it has read until now."""
        return len(self._records)

    def caught_up(self, seconds: float = 180) -> list[Record]:
        """Return all records that were read, once the reader has come to the present high watermark of every partition.

        :raises AssertionError: it does not get there: a transaction is open, or brokers do not answer.
        """
        ends = self._ends()
        self._wait(lambda: all(self._at[partition] >= end for partition, end in ends.items()), seconds, f"to come to {ends}")
        return list(self._records)

    def _ends(self) -> dict[int, int]:
        """Return high watermarks, not last stable offsets: Kafka returns these to readers that are not ``read_committed``."""
        fresh = Consumer({**self._config, "isolation.level": "read_uncommitted", "error_cb": lambda error: None})
        try:
            return {p: fresh.get_watermark_offsets(TopicPartition(self.topic, p), timeout=60)[1] for p in self._partitions}
        finally:
            fresh.close()

    def _wait(self, condition: Any, seconds: float, what: str) -> None:
        done = wait_until(lambda: self._broken is not None or condition(), seconds)
        if self._broken is not None:
            raise self._broken
        assert done, f"the reader of {self.topic} was waited for {what}, it is at {self._at}"

    def _guarded(self) -> None:
        try:
            while not self._over.is_set():
                self._take(self._consumer.consume(500, 0.1))
        except BaseException as error:
            self._broken = error

    def _take(self, messages: list[Any]) -> None:
        for message in messages:
            if (error := message.error()) is None:
                self._records.append((message.partition(), message.offset(), message.key(), message.value()))
                self._at[message.partition()] = message.offset() + 1
            elif error.code() == KafkaError._PARTITION_EOF:
                self._at[message.partition()] = message.offset()
            elif error.code() == KafkaError._AUTO_OFFSET_RESET or error.fatal():
                raise KafkaException(error)
            # Other errors report a broker that does not answer: the client retries by itself.
