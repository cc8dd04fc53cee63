"""Read the state of pipelines from the ledger: position, lag, windows, changes.

These functions fence, create and change nothing, so an attempt of the pipeline may run meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import KafkaSparkError, PipelineUnknown
from airflow_kafka_spark.hooks.kafka.log import read_log
from airflow_kafka_spark.ledger.topic import TOPIC, WAIT_FOR_NONE, LedgerContent, LedgerTopic
from airflow_kafka_spark.windows.binding import Binding
from airflow_kafka_spark.windows.changes import Change, change_to_json
from airflow_kafka_spark.windows.interval import parse_ledger_name
from airflow_kafka_spark.windows.memory import Memory, WindowEntry
from airflow_kafka_spark.windows.model import Gap, OffsetRange, State, TopicPartition
from airflow_kafka_spark.windows.plan import PartitionLog

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


@dataclass(frozen=True)
class PartitionPosition:
    """The position of a pipeline in one partition.

    :param offset: the next offset it reads; None in a partition that it has not read yet.
    :param low: the first offset that is left in the log; None if the topic or the partition does not exist any more.
    :param lso: the last stable offset.
    :param high: the high watermark.
    :param committed: the committed offset of its group; None without a group, or without a commit.
    :param lag: offsets still to read: an upper bound of the records.
    """

    topic: str
    partition: int
    offset: int | None
    low: int | None
    lso: int | None
    high: int | None
    committed: int | None
    lag: int | None


@dataclass(frozen=True)
class WindowState:
    """One window, as the ledger has it.

    :param state: PLANNED, or COMPLETE.
    :param run: the run that planned it.
    :param attempts: number of attempts that have worked on it.
    :param completed_at: None while it is open.
    :param moved: the number of the manual change that has set its start; 0 for none.
    :param gaps: the offsets that were deleted before they were read, and left out.
    :param records_read: from the report; this and all following fields are None while the window is open.
    """

    number: int
    state: str
    run: str
    attempts: int
    planned_at: str
    completed_at: str | None
    moved: int
    ranges: tuple[OffsetRange, ...]
    gaps: tuple[Gap, ...]
    records_read: int | None
    records_written: int | None
    bytes: int | None
    seconds: float | None


@dataclass(frozen=True)
class PipelineState:
    """The state of a pipeline.

    :param group_id: the group that mirrors it, that of its newest window; None if it is not known.
    :param last_window: number of its last complete window, 0 for none.
    :param source: the position in its source of rows, in the source's own form; None for a pipeline that reads from Kafka.
    :param intervals: data intervals that it knows, and how many of them are complete.
    :param open_windows: windows that are planned and not complete.
    :param changes: its manual changes, the newest first.
    :param paused: the pause that is in force; None while it is not paused.
    :param binding: task, destination and origin of its newest window; None if they are not known.
    """

    pipeline: str
    ledger_topic: str
    group_id: str | None
    last_window: int
    source: Mapping[str, Any] | None
    intervals: tuple[int, int]
    partitions: tuple[PartitionPosition, ...]
    open_windows: tuple[WindowState, ...]
    changes: tuple[Change, ...]
    paused: Change | None = None
    binding: Binding | None = None


def show(hook: KafkaHook, pipeline: str, *, ledger_topic: str = TOPIC, group_id: str | None = None) -> PipelineState:
    """Return the position and the lag of a pipeline.

    :param hook: the cluster.
    :param pipeline: its name.
    :param ledger_topic: the ledger that knows it.
    :param group_id: its group; None is that of its newest window.
    :raises PipelineUnknown: the ledger has no record of it.
    """
    memory = read_pipeline(hook, pipeline, ledger_topic).memory
    offsets = memory.read_offsets
    group = group_id or find_group(memory)
    log = read_log(hook, {tp.topic for tp in offsets})
    committed = hook.read_committed_offsets(group, log.partitions, stable=False) if group else {}
    partitions = []
    for tp in sorted({*offsets, *log.partitions}):
        there, mirror = log.partitions.get(tp), committed.get(tp)
        partitions.append(_make_partition_position(tp, offsets.get(tp), there, mirror.offset if mirror else None))
    return PipelineState(
        pipeline,
        ledger_topic,
        group,
        memory.last_number,
        memory.position.source,
        (len(memory.intervals), memory.intervals.complete),
        tuple(partitions),
        tuple(map(_make_window_state, list_open_entries(memory))),
        memory.history,
        memory.pause,
        memory.binding,
    )


def list_windows(hook: KafkaHook, pipeline: str, *, ledger_topic: str = TOPIC, limit: int = 20) -> tuple[WindowState, ...]:
    """Return the windows of a pipeline that the ledger has, the newest first.

    :param limit: maximum number of windows.
    :raises PipelineUnknown: the ledger has no record of it.
    """
    entries = read_pipeline(hook, pipeline, ledger_topic).memory.entries
    return tuple(_make_window_state(entries[number]) for number in sorted(entries, reverse=True)[: max(limit, 0)])


# --- shared with the commands --------------------------------------------------------------------------------------------


def read_pipeline(hook: KafkaHook, pipeline: str, ledger_topic: str = TOPIC) -> LedgerContent:
    """Read the ledger without fencing, creating or waiting: records that an open transaction hides are not seen. A command that
    writes reads again after it has fenced.

    :raises PipelineUnknown: there is no such ledger, or it has no record of this pipeline.
    """
    topic = find_ledger(hook, ledger_topic)
    if topic is None:
        raise PipelineUnknown(pipeline, ledger_topic)
    found = topic.read_without_waiting(pipeline)
    if found.memory.is_unknown and not found.memory.history:
        raise PipelineUnknown(pipeline, ledger_topic)
    return found


@contextmanager
def name_similar_pipelines(hook: KafkaHook) -> Iterator[None]:
    """Add the pipelines of similar names to the error of a command whose pipeline the ledger does not know."""
    try:
        yield
    except PipelineUnknown as error:
        with suppress(KafkaSparkError, ValueError):
            similar = find_similar_pipelines(hook, error.pipeline, error.ledger_topic)
            error = PipelineUnknown(error.pipeline, error.ledger_topic, similar)
        raise error from None


def find_similar_pipelines(hook: KafkaHook, pipeline: str, ledger_topic: str = TOPIC) -> list[str]:
    """Return up to three pipelines of a ledger whose names are like another name, or end with it. The whole ledger is read.

    :return: their names; empty if no name is similar, or if the ledger topic does not exist.
    """
    from difflib import get_close_matches

    topic = find_ledger(hook, ledger_topic)
    if topic is None:
        return []
    keys = (
        record.key
        for number in topic.partitions
        for record in topic.read_newest(number, 0, (b"",), WAIT_FOR_NONE)
        if record.value
    )
    names = {parse_ledger_name(name)[0] for key in keys if isinstance(name := json.loads(key)[0], str)}
    names.discard(pipeline)  # one that was forgotten
    within = sorted(name for name in names if name.endswith(f".{pipeline}"))
    return list(dict.fromkeys([*within, *get_close_matches(pipeline, sorted(names), 3, 0.75)]))[:3]


def find_ledger(hook: KafkaHook, ledger_topic: str = TOPIC) -> LedgerTopic | None:
    """Return the ledger topic; None if no topic of this name exists."""
    topic = LedgerTopic(hook, ledger_topic)
    return topic if topic.find_existing() else None


def list_open_entries(memory: Memory) -> tuple[WindowEntry, ...]:
    """Return the windows that are planned and not complete; data intervals are not among them."""
    return tuple(e for _, e in sorted(memory.entries.items()) if e.state is State.PLANNED)


def find_group(memory: Memory) -> str | None:
    """Return the group that mirrors the pipeline, from its binding or else from its newest report."""
    if memory.binding is not None and (bound := memory.binding.origin.details.get("group")):
        return bound
    reports = (memory.entries[number].report for number in sorted(memory.entries, reverse=True))
    return next((str(report["group_id"]) for report in reports if report and report.get("group_id")), None)


def has_source(memory: Memory) -> bool:
    """Return True if the pipeline reads rows from a source instead of records from Kafka."""
    return memory.position.source is not None or any(entry.window.source for entry in memory.entries.values())


def to_json(value: object) -> object:
    """Return results of commands as JSON values, for XCom and ``--json``."""
    if isinstance(value, Change):
        offsets = {name: {str(tp): offset for tp, offset in getattr(value, name).items()} for name in ("before", "after")}
        return {**change_to_json(value), **offsets}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    return value


def _make_partition_position(
    tp: TopicPartition, offset: int | None, there: PartitionLog | None, committed: int | None
) -> PartitionPosition:
    if there is None:
        return PartitionPosition(*tp, offset, None, None, None, committed, None)
    lag = max(0, there.lso - max(there.low, offset or 0))
    return PartitionPosition(*tp, offset, there.low, there.lso, there.high, committed, lag)


def _make_window_state(entry: WindowEntry) -> WindowState:
    window, report = entry.window, entry.report if entry.state is State.COMPLETE else None
    facts: Mapping[str, Any] = report or {}
    return WindowState(
        window.number,
        entry.state.value,
        window.run,
        entry.attempt.number,
        window.planned_at,
        facts.get("completed_at"),
        window.moved,
        window.ranges,
        # Tasks may find more gaps than the plan had.
        tuple(Gap(**gap) for gap in facts["gaps"]) if "gaps" in facts else window.gaps,
        facts.get("records_read"),
        facts.get("records_written"),
        facts.get("bytes"),
        facts.get("timings", {}).get("total"),
    )
