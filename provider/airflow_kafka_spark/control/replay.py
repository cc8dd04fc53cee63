"""Request a replay of a complete window. Its own task replays it once it is cleared, since only an operator has a sink."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from airflow_kafka_spark.control.base import (
    ChangeRequest,
    ChangeResult,
    ReplayedWindow,
    find_window,
    refuse_open_window,
    request_change,
)
from airflow_kafka_spark.control.pipelines import has_source
from airflow_kafka_spark.errors import ReplayRefused
from airflow_kafka_spark.hooks.kafka.log import compare_epochs, read_log
from airflow_kafka_spark.ledger.attempt import utc_now
from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.memory import Memory
from airflow_kafka_spark.windows.model import Window
from airflow_kafka_spark.windows.plan import check_readable, lost_topics

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

IN_PIECES = "exactly-once, split by split"
"""The guarantee of sinks that commit split by split, and would replace rows split by split."""


def replay(hook: KafkaHook, request: ChangeRequest, *, window: int | None = None, name: str | None = None) -> ChangeResult:
    """Request that a complete window is moved again: with equal offsets, and with the sink replacing its rows.

    Guarantee: a running attempt is not disturbed. When the task of the run is cleared and runs, it moves the window again,
    regardless of its ``on_rerun``, and exactly once: after a second clear ``on_rerun`` applies. Neither position nor group move.
    If the sink cannot replace the rows of a window, the task fails before anything is changed.

    :param hook: the cluster.
    :param request: the pipeline, the author and the reason.
    :param window: the window's number; or give ``name``.
    :param name: a data interval's name, ``20260101T000000Z-20260101T010000Z``, with or without the pipeline's before it.
    :raises PipelineUnknown: the ledger holds nothing of it.
    :raises WindowOpen: the window is not complete.
    :raises ReplayRefused: there is no such window any more, or its destination cannot replace it.
    :raises PlanError: (a subclass) its records were deleted.
    :raises ValueError: neither or both of ``window`` and ``name``.
    """
    memory, number, interval = find_window(hook, request, window, name)

    def found(memory: Memory) -> Window:
        return _of_interval(memory, interval) if interval else _of_progress(memory, number)

    def decide(memory: Memory) -> Change | None:
        there = found(memory)
        if memory.replay_asked(there):
            return None
        asked = (there.number, interval, there.replay)
        return Change(memory.next_change, "replay", request.who, request.why, utc_now(), {}, {}, (), *asked)

    there = found(memory)
    log = read_log(hook, {r.topic for r in there.ranges})
    if gone := [topic for topic in lost_topics(there, log) if topic not in log.topic_ids]:
        raise ReplayRefused(f"Topic `{gone[0]}` is gone", expected="the records that the window was made of")
    ends = {r.topic_partition: r.end for r in there.ranges if r.span}
    check_readable(there, compare_epochs(hook, log, ends, there.epochs, there.topic_ids), "fail")
    before = memory.replay_asked(there)
    change, _ = request_change(hook, memory, request, decide)
    asked = change or before
    return replace(
        ChangeResult.of("replay", request, asked),
        changed=change is not None,
        window=ReplayedWindow(there.number, interval or None, there.replay, there.ranges, there.run, *_parts(there.run)),
        warnings=_warnings(memory, change, there),
    )


def _of_progress(memory: Memory, number: int) -> Window:
    entry = memory.entries.get(number)
    if entry is None:
        known = sorted(memory.entries)
        known_windows = f"windows {known[0]} to {known[-1]}" if known else "none"
        raise ReplayRefused(
            f"The ledger remembers no window {number} of pipeline `{memory.pipeline}`",
            expected=f"one that it remembers: {known_windows}",
            action="To move older records once more, `reset` the pipeline: they then come twice to a sink that appends",
        )
    refuse_open_window(entry.state, str(entry.window), entry.window.run, entry.window.planned_at)
    pieces = (entry.report or {}).get("guarantee") == IN_PIECES
    if has_source(memory) or entry.window.source or entry.window.target or pieces:
        raise ReplayRefused(
            f"What pipeline `{memory.pipeline}` has written it cannot replace: a window of it is seen in pieces",
            expected="a sink that takes a window whole, and that knows which rows are of which window",
        )
    return entry.window


def _of_interval(memory: Memory, name: str) -> Window:
    state = memory.intervals.get(name)
    if state is None:
        raise ReplayRefused(
            f"Pipeline `{memory.pipeline}` has moved no data interval `{name}`",
            expected="a name like `20260101T000000Z-20260101T010000Z`",
            action="See its intervals",
        )
    ledger_name = state.interval.ledger_name(memory.pipeline)
    refuse_open_window(state.state, ledger_name, state.run, "an earlier time")
    bounds = (state.interval.start_ms, state.interval.end_ms)
    return Window(ledger_name, 1, state.ranges, state.run, "", topic_ids=state.topic_ids, interval=bounds, replay=state.replay)


def _parts(run: str) -> tuple[str | None, str | None, str | None, int]:
    parts = run.split("/")
    if len(parts) == 3:
        return parts[0], parts[1], parts[2], -1
    if len(parts) == 4 and parts[3].isdecimal():
        return parts[0], parts[1], parts[2], int(parts[3])
    return None, None, None, -1


def _warnings(memory: Memory, change: Change | None, window: Window) -> tuple[str, ...]:
    return (
        *([] if change else ["It was requested already, and waits until its task is cleared"]),
        f"Clear the task of run {window.run}, also though it succeeded: then it is moved once more",
        "A sink that cannot replace the window's rows makes that task fail, and leaves them as they are",
        *(["The pipeline is paused: it is moved once it is resumed"] if memory.is_paused else []),
    )
