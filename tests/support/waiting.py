"""Functions that wait until a condition is true."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from airflow_kafka_spark.testing._processes import wait_until

T = TypeVar("T")


def eventually(look: Callable[[], T], seconds: float = 180.0, what: str = "it did not happen in time") -> T:
    """Call ``look`` until its result is true, and return the result.

    :param what: the message of the failure.
    """
    found: list[T] = []

    def is_there() -> bool:
        found[:] = [look()]
        return bool(found[0])

    assert wait_until(is_there, seconds, every=0.1), what
    return found[0]


def settled(*topics: str, seconds: float = 45.0) -> None:
    """Wait until no transaction is open in the topics. Kafka acknowledges a commit before every partition has its marker.

    :param seconds: less than the time after which the brokers end an abandoned transaction, which has to be found.
    """
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

    with KafkaHook() as hook:

        def open_in() -> list[Any]:
            found = hook.read_offsets(topics)
            assert found
            return [tp for tp, offsets in found.items() if offsets.lso != offsets.high]

        assert wait_until(lambda: not open_in(), seconds, every=0.1), f"a transaction is open in {open_in()}"


def fence_tasks(pipeline: str, ledger_topic: str, splits: int) -> None:
    """End the transactions of the tasks of a dead attempt, as the next attempt does first.

    A fault kills one task. Another task may die in its transaction, and hide later records from read_committed readers.

    :param splits: the number of splits of the window; a larger number does no harm.
    """
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.ledger.attempt import Ledger

    with KafkaHook() as hook, Ledger(hook, pipeline, "test", topic=ledger_topic) as ledger:
        ledger.fence_splits(splits)
