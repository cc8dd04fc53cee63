"""Identify the pipeline that has left a transaction open in a partition of the ledger, and abort the transaction.

Readers of committed records stop at the first open transaction of a partition: all pipelines of the partition wait for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from airflow_kafka_spark.errors import RightMissing
from airflow_kafka_spark.hooks.kafka.client_errors import ClientEvents
from airflow_kafka_spark.hooks.kafka.transactions import describe_producer_error, make_fencing_producer
from airflow_kafka_spark.windows.interval import parse_ledger_name
from airflow_kafka_spark.windows.memory import ARCHIVE, BINDING, LedgerRecord

END_SECONDS = 30.0
OWNER = "owner"
"""The purpose of the transactional id under which pipelines record that they use a group or a slot."""
OWN_KINDS = {"split": "split.{1}", "dead": "dead", "control": "control", BINDING: "binding"}
"""Kinds of records that are written under a transactional id of their own, with the suffix of that id."""


@dataclass(frozen=True)
class OpenTransaction:
    """An open transaction, as its first record in a partition of the ledger describes it.

    :param pipeline: the pipeline that has opened it; empty if the record was not written by this package.
    :param what: description of the transaction's records, for a message.
    :param purposes: the ids that the transaction may have, as pairs of a pipeline and the suffix of a transactional id.
    :param partition: the partition of the ledger.
    :param offset: the offset of that record.
    """

    pipeline: str
    what: str
    purposes: tuple[tuple[str, str], ...]
    partition: int
    offset: int

    def ids(self, topic: str) -> tuple[str, ...]:
        """Return the transactional ids that the transaction may have.

        :param topic: the ledger topic.
        """
        return tuple(make_transactional_id(topic, name, purpose) for name, purpose in self.purposes)

    def __str__(self) -> str:
        whose = f"of pipeline `{self.pipeline}` ({self.what})" if self.pipeline else "of a producer of another program"
        return f"a transaction {whose}, open since offset {self.offset}"


def make_transactional_id(topic: str, pipeline: str, purpose: str) -> str:
    """Return the transactional id under which a pipeline writes for one purpose.

    All attempts of the pipeline share the id, and no other pipeline uses it: an attempt fences its predecessors and nothing else.

    :param pipeline: the pipeline; for ``owner``, the group or the slot that pipelines take.
    :param purpose: ``plan``, ``close``, ``control``, ``binding``, ``owner`` or ``split.<index>``.
    """
    return f"{topic}.{pipeline}.{purpose}"


def identify_transaction(record: LedgerRecord, partition: int) -> OpenTransaction:
    """Return the transaction that a record belongs to, if it is still open.

    :param partition: the partition of the ledger that it was read from.
    """
    try:
        pipeline, kind, *numbers = json.loads(record.key)
        value: dict[str, Any] | None = json.loads(record.value) if record.value is not None else None
        if pipeline is None and value is not None:
            # Earlier releases wrote it together with the plan of a pipeline's first window.
            name, what = str(numbers[0]), f"its first window for group {numbers[0]}"
            written = ((str(value["by"]), "plan"),) if "by" in value else ((name, OWNER),)
            return OpenTransaction(str(value["pipeline"]), what, written, partition, record.offset)
        parent, interval = parse_ledger_name(str(pipeline))
        what = f"split {numbers[1]} of window {numbers[0]}" if kind == "split" else " ".join(map(str, [kind, *numbers]))
        return OpenTransaction(
            str(pipeline), what, _list_purposes(str(pipeline), parent, interval, kind, numbers, value), partition, record.offset
        )
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return OpenTransaction("", "", (), partition, record.offset)


def _list_purposes(
    pipeline: str, parent: str, interval: str | None, kind: str, numbers: list[Any], value: dict[str, Any] | None
) -> tuple[tuple[str, str], ...]:
    group = (parent, "group")
    if kind == ARCHIVE or (kind == "interval" and value is not None and value.get("forgotten")):
        return (group,)
    if kind in OWN_KINDS and value is not None:
        return ((pipeline, OWN_KINDS[kind].format(*numbers)),)
    # Attempts and commands write under both ids: a command changes a position under that of plans, and claims under the other.
    own = f"{pipeline}.{numbers[0]}" if kind == "interval" else pipeline
    found = [(own, "plan"), (own, "close")]
    if value is None:
        # Tombstones are also written by `forget`, those of intervals with the group, and that of a binding by an interval.
        found += [(parent, "plan"), (parent, "close")] if kind == "interval" else []
        found += [group] if interval or kind == "interval" else []
        found += [(parent, "plan")] if interval else []
        found += [(pipeline, BINDING)] if kind == BINDING else []
    elif kind == "change" and (name := value["change"].get("name")):
        # The old name of a pipeline that was renamed, in the partition of the new one.
        found.append((name, "plan"))
    return tuple(found)


def abort_transaction(config: Mapping[str, Any], topic: str, transaction: OpenTransaction) -> str:
    """Abort an open transaction by fencing its transactional id.

    The brokers abort it, and its producer is fenced, as by a newer attempt. If the transaction is being committed, its end is
    awaited instead. The caller has to check that the transaction has ended.

    :param config: a producer's configuration.
    :param topic: the ledger topic.
    :return: the reason why it could not be aborted; empty if it was.
    """
    from confluent_kafka import KafkaException

    for name in transaction.ids(topic):
        timeouts = {"transaction.timeout.ms": round(END_SECONDS * 1000), "message.timeout.ms": round(END_SECONDS * 1000)}
        try:
            make_fencing_producer({**config, **timeouts}, name, END_SECONDS, ClientEvents())
        except (KafkaException, RightMissing) as error:
            reason = error.found if isinstance(error, RightMissing) else describe_producer_error(error)
            return f"`{name}` could not be fenced: {reason}"
    return "" if transaction.purposes else "it is not known which transactional id it has"
