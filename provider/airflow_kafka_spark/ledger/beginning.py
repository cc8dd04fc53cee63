"""The start of the next window of a pipeline. The run that plans the window and every preview of it ask this module."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from airflow_kafka_spark.errors import LedgerBehind
from airflow_kafka_spark.ledger.group import position_of_group, windows_of
from airflow_kafka_spark.windows.continuity import refuse_foreign
from airflow_kafka_spark.windows.memory import Memory
from airflow_kafka_spark.windows.model import Applied, TopicPartition
from airflow_kafka_spark.windows.plan import DataLossPolicy, Log, Position

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.requests import CommittedOffset

LastApplied = Callable[[str], Applied | None]
"""Returns the last window that a pipeline's sink remembers; None where the sink remembers none."""


@dataclass(frozen=True)
class Beginning:
    """The start of the next window of a pipeline.

    :param position: the offsets at which it begins; empty where ``starting_offsets`` decide.
    :param last_number: the number of the last window that ledger, sink or group know; 0 without one.
    :param decided_by: who knows the position.
    :param sink_may_change: what the record of the sink may change, if the sink was not asked: the ``offsets`` (and the number),
        only the ``number``, or ``nothing``.
    """

    position: Position
    last_number: int
    decided_by: Literal["ledger", "sink", "group", "starting_offsets"]
    sink_may_change: Literal["nothing", "number", "offsets"] = "nothing"


def decide_beginning(
    memory: Memory,
    log: Log,
    committed: Mapping[TopicPartition, CommittedOffset | None],
    *,
    group_id: str,
    ledger_topic: str,
    last_applied: LastApplied | None,
    data_loss: DataLossPolicy = "fail",
    after_intervals: Callable[[], Position] | None = None,
) -> Beginning:
    """Decide where the next window of a pipeline begins.

    The first that knows a position decides: the ledger; the sink's record of its last window, where the ledger knows nothing of
    the pipeline; the offsets that the pipeline itself has committed for its group. Otherwise ``starting_offsets`` decide.

    :param memory: what the ledger holds of the pipeline. No window is open.
    :param log: what Kafka holds of the subscribed topics.
    :param committed: what the group has committed.
    :param group_id: the group that mirrors the pipeline.
    :param ledger_topic: the ledger topic, for messages.
    :param last_applied: asks the sink; None where no sink is at hand. ``sink_may_change`` then says what is uncertain.
    :param data_loss: with ``skip``, a topic that was created anew begins at its first record; ``fail`` (default) refuses it.
    :param after_intervals: returns the position behind the data intervals that the pipeline has moved; called if there are any.
    :raises LedgerBehind: the group names a window of this pipeline that the ledger does not know.
    :raises ForeignOffsets: the sink's record holds offsets of another cluster, or of another topic of the same name.
    """
    position, number = memory.position, memory.last_number
    decided_by: Literal["ledger", "sink", "group", "starting_offsets"] = "ledger"
    sink_may_change: Literal["nothing", "number", "offsets"] = "nothing"
    if memory.is_blank or position.moved:
        # A pipeline that was moved by hand stands where it was put. If its ledger was lost before, the sink counts from its own
        # last window.
        last = last_applied(memory.pipeline) if last_applied is not None else None
        if last_applied is None:
            sink_may_change = "offsets" if memory.is_blank else "number"
        elif last is not None:
            number = max(number, last.number)
        if last is not None and memory.is_blank:
            refuse_foreign(last, log.cluster_id, {} if data_loss == "skip" else log.topic_ids)
            position = Position({r.topic_partition: r.end for r in last.ranges}, last.topic_ids, last.cluster_id)
            decided_by = "sink"
    else:
        _refuse_behind(memory, committed, log, group_id, ledger_topic, last_applied)
    if memory.intervals and after_intervals is not None:
        position = after_intervals()
    if not position.offsets:
        # Offsets that this pipeline has committed itself: to begin elsewhere would double or lose what it has moved.
        position, of_group = position_of_group(memory.pipeline, committed)
        number = max(number, of_group)
        decided_by = "group" if position.offsets else "starting_offsets"
    return Beginning(position, number, decided_by, sink_may_change)


def _refuse_behind(
    memory: Memory,
    committed: Mapping[TopicPartition, CommittedOffset | None],
    log: Log,
    group_id: str,
    ledger_topic: str,
    last_applied: LastApplied | None,
) -> None:
    """Make sure that the ledger knows every window that the group knows. Both change in one transaction.

    :raises LedgerBehind: it does not.
    """
    newest, known = max(windows_of(memory.pipeline, committed).values(), default=0), memory.last_number
    if newest <= known:
        return
    last = last_applied(memory.pipeline) if last_applied is not None else None
    to = f"committed:{group_id}"
    if last is not None and last.number >= newest:
        # What the sink has taken after the group's window is not moved again.
        refuse_foreign(last, log.cluster_id, log.topic_ids)
        ends: dict[str, dict[str, int]] = {}
        for r in last.ranges:
            ends.setdefault(r.topic, {})[str(r.partition)] = r.end
        to = json.dumps(ends)
    error = LedgerBehind(memory.pipeline, group_id, newest, known, ledger_topic, to)
    if last_applied is None:
        error.action = "Run its task: the task asks the sink, and its error says where to go on"
    raise error
