"""Whose open transaction holds up everybody else's records in a partition of the ledger, and ending it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from airflow_kafka_spark.hooks.kafka_client import ClientEvents
from airflow_kafka_spark.hooks.kafka_transactions import describe, fencing_producer
from airflow_kafka_spark.windows.interval import family_of
from airflow_kafka_spark.windows.memory import LedgerRecord

END_SECONDS = 30.0
OWN_KINDS = {"split": "split.{1}", "dead": "dead", "control": "control", "binding": "binding"}
"""Kinds of records with a transactional id of their own, by what comes behind the pipeline in it."""


@dataclass(frozen=True)
class Holder:
    """An open transaction, as its first record in a partition of the ledger tells.

    :param pipeline: whose it is; empty where the record is none of ours.
    :param what: what was being written, in words.
    :param purposes: what its transactional id may end with, behind ledger topic and pipeline.
    :param partition: of the ledger.
    :param offset: of that record.
    """

    pipeline: str
    what: str
    purposes: tuple[tuple[str, str], ...]
    partition: int
    offset: int

    def ids(self, topic: str) -> tuple[str, ...]:
        """The transactional ids that it may be of."""
        return tuple(transactional_id_of(topic, name, purpose) for name, purpose in self.purposes)

    def __str__(self) -> str:
        whose = (
            f"of pipeline `{self.pipeline}` ({self.what})" if self.pipeline else "of a producer that is none of this package's"
        )
        return f"a transaction {whose}, open since offset {self.offset}"


def transactional_id_of(topic: str, pipeline: str, purpose: str) -> str:
    """Stable over attempts and unique among pipelines, so that an attempt fences the ones before it and nobody else.

    :param purpose: ``plan``, ``close``, ``control``, ``binding`` or ``split.<index>``.
    """
    return f"{topic}.{pipeline}.{purpose}"


def holder_of(record: LedgerRecord, partition: int) -> Holder:
    """Who has written a record."""
    try:
        pipeline, kind, *numbers = json.loads(record.key)
        value: dict[str, Any] | None = json.loads(record.value) if record.value is not None else None
        if pipeline is None and value is not None:
            # Which pipeline a group belongs to is written with the plan of a first window.
            planner = str(value["by"])
            return Holder(planner, f"its first window for group {numbers[0]}", ((planner, "plan"),), partition, record.offset)
        family, lane = family_of(str(pipeline))
        what = f"split {numbers[1]} of window {numbers[0]}" if kind == "split" else " ".join(map(str, [kind, *numbers]))
        return Holder(str(pipeline), what, _purposes(str(pipeline), family, lane, kind, numbers, value), partition, record.offset)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return Holder("", "", (), partition, record.offset)


def _purposes(
    pipeline: str, family: str, lane: str | None, kind: str, numbers: list[Any], value: dict[str, Any] | None
) -> tuple[tuple[str, str], ...]:
    group = (family, "group")
    if value is None:
        # Where something is closed, given up or forgotten; of an interval also where old ones are.
        return ((pipeline, "close"), *([group] if lane else []))
    if kind in OWN_KINDS:
        return ((pipeline, OWN_KINDS[kind].format(*numbers)),)
    state = value.get("state")
    if kind == "interval":
        own = f"{pipeline}.{numbers[0]}"
        return (group,) if value.get("forgotten") else ((own, "plan" if state == "PLANNED" else "close"),)
    if state == "PLANNED":
        return ((pipeline, "plan"),)
    return ((pipeline, "close"),)


def end_held(config: Mapping[str, Any], topic: str, holder: Holder) -> str:
    """Have the brokers abort it, by fencing its transactional id: whoever has left it open is shut out, as by any newer attempt.
    One that is being committed is waited for instead.

    :param config: a producer's configuration.
    :param topic: the ledger topic.
    :return: why not, empty if it was done; that the log has moved on is for the caller to see.
    """
    from confluent_kafka import KafkaException

    for name in holder.ids(topic):
        timeouts = {"transaction.timeout.ms": round(END_SECONDS * 1000), "message.timeout.ms": round(END_SECONDS * 1000)}
        try:
            fencing_producer({**config, **timeouts}, name, topic, END_SECONDS, ClientEvents())
        except KafkaException as error:
            return f"`{name}` could not be fenced: {describe(error)}"
    return "" if holder.purposes else "it is not known which transactional id it has"
