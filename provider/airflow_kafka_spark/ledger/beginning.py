"""The start of the next window of a pipeline, for the run that plans the window and for previews."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from airflow_kafka_spark.errors import LedgerBehind
from airflow_kafka_spark.ledger.group import find_followed_intervals, find_group_position, list_window_numbers
from airflow_kafka_spark.windows.continuity import refuse_elsewhere, refuse_foreign
from airflow_kafka_spark.windows.interval import Interval
from airflow_kafka_spark.windows.memory import Memory
from airflow_kafka_spark.windows.model import Applied, TopicPartition
from airflow_kafka_spark.windows.plan import DataLossPolicy, Log, Position, is_recreated, merge_positions

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.requests import CommittedOffset

LastApplied = Callable[[str], Applied | None]
"""Type of a function that returns the last window in the sink's record of a pipeline; None without one."""


@dataclass(frozen=True)
class Beginning:
    """The start of the next window of a pipeline.

    :param position: the offsets at which it begins; empty if ``starting_offsets`` decide.
    :param last_number: number of the last window in ledger, sink or group; 0 without one.
    :param decided_by: origin of the position.
    :param sink_may_change: what the sink's record might change, if it was not read: the ``offsets`` (and the number), only the
        ``number``, or ``nothing``.
    :param is_beyond_sink: True if the position lies behind the end of the last window in the sink's record, because the sink has
        data intervals under names of their own, or does not have the last windows.
    """

    position: Position
    last_number: int
    decided_by: Literal["ledger", "sink", "group", "starting_offsets"]
    sink_may_change: Literal["nothing", "number", "offsets"] = "nothing"
    is_beyond_sink: bool = False


def decide_beginning(
    memory: Memory,
    log: Log,
    committed: Mapping[TopicPartition, CommittedOffset | None],
    *,
    group_id: str,
    ledger_topic: str,
    last_applied: LastApplied | None,
    data_loss: DataLossPolicy = "fail",
    after_intervals: Callable[[Position], Position] | None = None,
) -> Beginning:
    """Return the start of the next window of a pipeline.

    The first of these that has a position decides: the ledger; the sink's record of its last window, if the ledger has no records
    of the pipeline, with the data intervals that it has moved before it was forgotten; the offsets that the pipeline itself has
    committed for its group. Otherwise ``starting_offsets`` decide.

    :param memory: state of the pipeline in the ledger, without an open window.
    :param log: the log of the subscribed topics.
    :param committed: committed offsets of the group.
    :param group_id: the group that mirrors the pipeline.
    :param ledger_topic: the ledger topic, for messages.
    :param last_applied: reads the sink's record; None without access to the sink. ``sink_may_change`` then names what is
        uncertain.
    :param data_loss: with ``skip``, a recreated topic begins at its first record; ``fail`` (default) refuses it.
    :param after_intervals: returns the position after the data intervals that the pipeline has moved, from its position without
        them; called if there are any.
    :raises LedgerBehind: the group's metadata name a window of this pipeline that the ledger does not hold.
    :raises ForeignOffsets: the sink's record holds offsets of another cluster, or of another topic of the same name.
    :raises RecordElsewhere: the sink's record is of another table.
    """
    position, number = memory.position, memory.last_number
    decided_by: Literal["ledger", "sink", "group", "starting_offsets"] = "ledger"
    sink_may_change: Literal["nothing", "number", "offsets"] = "nothing"
    ends: dict[TopicPartition, int] = {}
    if memory.is_blank or position.moved:
        # A manual change has set this position. If the ledger had been lost before, the window numbers still continue those of
        # the sink.
        last = last_applied(memory.pipeline) if last_applied is not None else None
        if last_applied is None:
            sink_may_change = "offsets" if memory.is_blank else "number"
        elif last is not None:
            number = max(number, last.number)
        moved = _find_forgotten_intervals(memory, log, last, last_applied, data_loss)
        if memory.is_blank and (last is not None or moved.offsets):
            position, committed_number = find_group_position(memory.pipeline, committed)
            if last is not None:
                refuse_elsewhere(last)
                refuse_foreign(last, log.cluster_id, {} if data_loss == "skip" else log.topic_ids)
                ends = {r.topic_partition: r.end for r in last.ranges}
                followed = find_followed_intervals(memory.pipeline, committed, log.topic_ids)
                numbers, intervals = list_window_numbers(memory.pipeline, committed), followed.offsets if followed else {}
                position = _make_position_behind(last, position, numbers, intervals)
            position = _add_forgotten(position, moved, memory, log)
            number, decided_by = max(number, committed_number), "sink"
    else:
        _refuse_behind(memory, committed, log, group_id, ledger_topic, last_applied)
    if memory.intervals and after_intervals is not None:
        position = after_intervals(position)
    if not position.offsets:
        # Offsets that this pipeline has committed itself: another start would duplicate or lose records.
        position, of_group = find_group_position(memory.pipeline, committed)
        number = max(number, of_group)
        decided_by = "group" if position.offsets else "starting_offsets"
    is_beyond = any(position.offsets.get(tp, end) > end for tp, end in ends.items())
    return Beginning(position, number, decided_by, sink_may_change, is_beyond)


def find_forgotten_windows(memory: Memory, last_applied: LastApplied) -> Position:
    """Return the position of the windows without a data interval that a pipeline has moved before it was forgotten; empty if it
    has moved others since, or if its sink has no record of them.

    :param memory: the state of the pipeline in the ledger.
    :param last_applied: reads the sink's record.
    :raises RecordElsewhere: the sink's record is of another table.
    """
    change = memory.forgotten
    if change is None or not change.window or not memory.is_blank:
        return Position()
    last = last_applied(memory.pipeline)
    if last is None:
        return Position()
    refuse_elsewhere(last)
    of_sink = Position({r.topic_partition: r.end for r in last.ranges}, last.topic_ids)
    return merge_positions(change.forgotten.windows if change.forgotten else Position(), of_sink)


def _find_forgotten_intervals(
    memory: Memory, log: Log, last: Applied | None, last_applied: LastApplied | None, data_loss: DataLossPolicy
) -> Position:
    """Return the ends of the data intervals that a pipeline has moved before it was forgotten; empty if its sink has neither a
    window of it nor the last of these intervals.

    :param last: the last window without an interval in the sink's record.
    :raises ForeignOffsets: the sink's record holds offsets of another cluster, or of another topic of the same name.
    :raises RecordElsewhere: the sink's record is of another table.
    """
    left = memory.forgotten_offsets
    interval = Interval.from_name(left.last_interval) if left else None
    if left is None or interval is None or last_applied is None or not memory.is_blank:
        return Position()
    there = last or last_applied(interval.make_ledger_name(memory.pipeline))
    if there is None:
        return Position()
    refuse_elsewhere(there)
    refuse_foreign(there, log.cluster_id, {} if data_loss == "skip" else log.topic_ids)
    return replace(left.intervals, cluster_id=there.cluster_id)


def _add_forgotten(position: Position, moved: Position, memory: Memory, log: Log) -> Position:
    """Return the position behind the windows of both kinds that a pipeline has moved before it was forgotten.

    :param position: the position behind its windows without a data interval.
    :param moved: the ends of its data intervals.
    """
    # A topic that was created again is known by its newest id, which the log has.
    older = {tp.topic for tp in moved.offsets if is_recreated(tp.topic, log, moved) and tp.topic in position.topic_ids}
    moved = replace(
        moved,
        offsets={tp: offset for tp, offset in moved.offsets.items() if tp.topic not in older},
        topic_ids={topic: known for topic, known in moved.topic_ids.items() if topic not in older},
    )
    position = merge_positions(position, moved)
    left = memory.forgotten_offsets
    if left is None:
        return position
    known = {t for t, found in left.windows.topic_ids.items() if position.topic_ids.get(t) == found}
    began = {tp: offset for tp, offset in left.windows.began.items() if tp in position.offsets and tp.topic in known}
    # The sink's record has no leader epochs.
    reached = {tp for tp, offset in left.windows.offsets.items() if position.offsets.get(tp) == offset and tp.topic in known}
    epochs = {tp: epoch for tp, epoch in left.windows.epochs.items() if tp in reached}
    return replace(position, began=began, epochs={**epochs, **position.epochs})


def _make_position_behind(
    last: Applied, of_group: Position, windows: Mapping[TopicPartition, int], intervals: Mapping[TopicPartition, int]
) -> Position:
    """Return the position after the last window in a sink's record. A topic that this window does not have was left out of it;
    the group knows where the pipeline has left off in it. The group also knows of later windows that have gone elsewhere, or had
    no records.

    :param of_group: the position that the pipeline itself has committed for its group.
    :param windows: number of the window with which it has committed each offset.
    :param intervals: the offsets that it has committed with data intervals, which the sink has under names of their own.
    """
    ends = {r.topic_partition: r.end for r in last.ranges}
    later = {tp for tp, number in windows.items() if number > last.number and tp in ends} | (intervals.keys() & ends)
    ends |= {tp: max(ends[tp], of_group.offsets[tp]) for tp in later}
    topics = {tp.topic for tp in ends}
    others = {tp: offset for tp, offset in of_group.offsets.items() if tp.topic not in topics}
    ids = {topic: found for topic, found in of_group.topic_ids.items() if topic not in topics}
    # The sink's record has no leader epochs. Those of the group are known where both are at one offset.
    offsets = {**others, **ends}
    epochs = {tp: epoch for tp, epoch in of_group.epochs.items() if offsets.get(tp) == of_group.offsets[tp]}
    return Position(offsets, {**ids, **last.topic_ids}, last.cluster_id, epochs=epochs)


def _refuse_behind(
    memory: Memory,
    committed: Mapping[TopicPartition, CommittedOffset | None],
    log: Log,
    group_id: str,
    ledger_topic: str,
    last_applied: LastApplied | None,
) -> None:
    """Refuse a ledger that lacks a window which the group's metadata name. Both are written in one transaction.

    :raises LedgerBehind: a window is missing.
    """
    newest, known = max(list_window_numbers(memory.pipeline, committed).values(), default=0), memory.last_number
    if newest <= known:
        return
    last = last_applied(memory.pipeline) if last_applied is not None else None
    to = f"committed:{group_id}"
    if last is not None and last.number >= newest:
        # Windows that the sink has committed after the group's last window are not moved again.
        refuse_foreign(last, log.cluster_id, log.topic_ids)
        ends: dict[str, dict[str, int]] = {}
        for r in last.ranges:
            ends.setdefault(r.topic, {})[str(r.partition)] = r.end
        to = json.dumps(ends)
    error = LedgerBehind(memory.pipeline, group_id, newest, known, ledger_topic, to)
    if last_applied is None:
        error.action = "Run its task: the task reads the sink's record, and its error names the position to continue from"
    raise error
