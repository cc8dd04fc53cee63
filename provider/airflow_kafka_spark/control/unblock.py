"""Abort the open transaction that hides later records of a partition of the ledger from all readers."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_kafka_spark.control.pipelines import existing_ledger
from airflow_kafka_spark.errors import PipelineUnknown
from airflow_kafka_spark.hooks.kafka.transactions import abort_command
from airflow_kafka_spark.ledger.open_transactions import OpenTransaction
from airflow_kafka_spark.ledger.topic import TOPIC, first_open_transaction
from airflow_kafka_spark.windows.model import TopicPartition

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

MOVES_WITHIN = 15.0
"""Seconds within which the brokers end an aborted transaction. If it is still open then, the brokers have lost it."""


@dataclass(frozen=True)
class Unblocked:
    """The result of :func:`unblock`.

    :param partition: the ledger's partition with the pipeline's records.
    :param transaction: the first open transaction there; None if no transaction is open.
    :param ended: True if the transaction has ended.
    :param warnings: remarks on the result, in sentences.
    :param dry_run: True if nothing was changed because only a preview was requested.
    """

    pipeline: str
    ledger_topic: str
    partition: int
    transaction: OpenTransaction | None
    ended: bool
    warnings: tuple[str, ...]
    dry_run: bool


def unblock(hook: KafkaHook, pipeline: str, *, ledger_topic: str = TOPIC, dry_run: bool = False) -> Unblocked:
    """End the first open transaction in a pipeline's partition of the ledger. It may belong to another pipeline.

    Guarantee: its producer is fenced, as by a newer attempt. The transaction is aborted, or committed if its commit has begun; a
    task that is still running in it fails and is retried. Nothing else is changed.

    :param hook: the cluster.
    :param pipeline: the name of any pipeline in that partition.
    :param ledger_topic: the ledger.
    :param dry_run: True to return the transaction without ending it.
    :raises PipelineUnknown: there is no such ledger.
    """
    topic = existing_ledger(hook, ledger_topic)
    if topic is None:
        raise PipelineUnknown(pipeline, ledger_topic)
    partition = topic.read_without_waiting(pipeline).partition
    tp = TopicPartition(ledger_topic, partition)
    bounds = hook.offsets([tp])[tp]
    if bounds.lso >= bounds.high:
        return Unblocked(pipeline, ledger_topic, partition, None, False, ("No transaction is open there",), dry_run)
    transaction = first_open_transaction(hook.consumer_config(), tp, bounds.lso, bounds.high)
    if dry_run:
        return Unblocked(pipeline, ledger_topic, partition, transaction, False, (), dry_run)
    why = topic.abort(transaction)
    deadline = time.monotonic() + MOVES_WITHIN
    while not (ended := hook.offsets([tp])[tp].lso > bounds.lso) and not why and time.monotonic() < deadline:
        time.sleep(0.1)
    by_hand = f"{abort_command(tp, bounds.lso)} does"
    warnings = () if ended else (why or "The brokers have lost it: fencing its producer does not end it", by_hand)
    return Unblocked(pipeline, ledger_topic, partition, transaction, ended, warnings, dry_run)
