"""Skip an open window that fails repeatedly, or waiting records: the pipeline continues after them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from airflow_kafka_spark.control.base import ChangeRequest, ChangeResult, Move, OpenWindow, refuse_blank, refuse_intervals
from airflow_kafka_spark.control.pipelines import has_source, open_entries, read_pipeline
from airflow_kafka_spark.control.position_change import (
    PositionChange,
    current_offsets,
    fence_splits,
    plan_move,
    resolve_group,
    write_position_change,
)
from airflow_kafka_spark.errors import AttemptAtWork, ChangeRefused
from airflow_kafka_spark.hooks.kafka.log import read_log
from airflow_kafka_spark.ledger.attempt import ChangeLedger
from airflow_kafka_spark.windows.memory import Memory, WindowEntry
from airflow_kafka_spark.windows.model import Gap, TopicPartition
from airflow_kafka_spark.windows.offset_specs import parse_target
from airflow_kafka_spark.windows.plan import next_position

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


def skip(hook: KafkaHook, request: ChangeRequest, *, group_id: str | None = None, running: bool | None = None) -> ChangeResult:
    """Give up a pipeline's open window; the next window begins at its frozen ends. Without an open window, skip all waiting
    records.

    Guarantee: position, record of the change, the group's offsets and the end of the window change in one Kafka transaction. Its
    attempts and their publishing tasks are fenced. Its number is not used again. Records that its sink has committed already stay
    there; the rest is never moved.

    :param hook: the cluster.
    :param request: the pipeline, the author and the reason.
    :param group_id: its consumer group. Default: that of its newest window.
    :param running: True if an attempt works on the open window, as Airflow says of its task; None if that is unknown. A window is
        given up only with False.
    :raises PipelineUnknown: the ledger holds nothing of it.
    :raises AttemptAtWork: an attempt is working on the window, or this is not known.
    :raises GroupHasMembers: its group has members.
    :raises GroupOwned: another pipeline uses the group.
    :raises ChangeRefused: no records wait, or the pipeline moves data intervals, or it reads rows and has no open window.
    """

    def planned(memory: Memory) -> tuple[PositionChange, str | None]:
        group = _check(hook, memory, request.ledger_topic, group_id)
        for entry in open_entries(memory):
            if not request.dry_run and running is not False:
                attempt = entry.attempt
                raise AttemptAtWork(str(entry.window), entry.window.run, attempt.number, attempt.started_at, running is True)
            return _past(hook, memory, entry), group
        return _to_the_end(hook, memory, group or ""), group

    # Checked before fencing, so that a refused command does not disturb an open window.
    memory = read_pipeline(hook, request.pipeline, request.ledger_topic).memory
    move, group = planned(memory)
    if not request.dry_run:
        run = f"skip by {request.who}"
        with ChangeLedger(hook, request.pipeline, run, group_id=group, topic=request.ledger_topic) as ledger:
            seen, memory = _tokens(memory), ledger.memory
            if _tokens(memory) != seen:
                raise ChangeRefused(
                    f"Pipeline `{request.pipeline}` has moved on meanwhile",
                    expected="the open window that was shown, or still no open window",
                    action="Look again; if its task was running, it was fenced, and a retry finishes its window",
                )
            move, group = planned(memory)
            fence_splits(ledger, move.given_up)
            write_position_change(ledger, ledger.topic.read(request.pipeline), move, "skip", request)
    return replace(
        ChangeResult.of("skip", request, move.number),
        group_id=group,
        given_up=tuple(map(OpenWindow.of, move.given_up)),
        moves=move.moves,
        skipped=_skipped(move),
        warnings=_warnings(memory, next(iter(move.given_up), None)),
    )


def _check(hook: KafkaHook, memory: Memory, ledger_topic: str, group_id: str | None) -> str | None:
    """Return the group whose offsets are moved, too; None for a pipeline that reads rows."""
    refuse_intervals(memory)
    refuse_blank(memory, ledger_topic)
    if memory.intervals:
        raise ChangeRefused(
            f"Pipeline `{memory.pipeline}` moves data intervals, which do not wait for each other",
            expected="a pipeline whose windows follow each other",
            action="Mark the interval's task as you like. Its records are not moved, and the group stays before them",
        )
    if not has_source(memory):
        return resolve_group(hook, memory, ledger_topic, group_id)
    if not open_entries(memory):
        raise ChangeRefused(
            f"Pipeline `{memory.pipeline}` reads rows from a source and has no open window: only its source knows what waits",
            expected="an open window to give up",
        )
    return None


def _past(hook: KafkaHook, memory: Memory, entry: WindowEntry) -> PositionChange:
    """Return the change to the position that the pipeline would have after its open window. For a window that is being replayed,
    this is the present position."""
    if entry.window.replay:
        log = read_log(hook, {tp.topic for tp in memory.position.offsets})
        given_up = open_entries(memory)
        return PositionChange(memory.next_change, memory.position, memory.position.offsets, (), given_up, log, restored=(entry,))
    position = next_position(memory.position, entry.window)
    number = memory.next_change
    log = read_log(hook, {tp.topic for tp in position.offsets})
    ends = sorted(entry.window.ends.items())
    before = current_offsets(memory)
    moves = tuple(Move(*tp, before.get(tp), end) for tp, end in ends)
    return PositionChange(number, replace(position, moved=number), before, moves, open_entries(memory), log)


def _to_the_end(hook: KafkaHook, memory: Memory, group: str) -> PositionChange:
    move = plan_move(hook, memory, parse_target("latest"), (), group)
    if back := [m for m in move.moves if m.before is not None and m.after < m.before]:
        raise ChangeRefused(
            f"{back[0].topic}-{back[0].partition} ends at {back[0].after}, before {back[0].before}, where the pipeline stands",
            expected="a log that goes on from there",
            action="Check the state of the topic; `reset` moves the pipeline back",
        )
    on = tuple(m for m in move.moves if m.after != m.before)
    if not on:
        raise ChangeRefused(
            f"Pipeline `{memory.pipeline}` has no open window, and nothing waits for it",
            expected="an open window to give up, or records to skip",
        )
    return replace(move, moves=on)


def _tokens(memory: Memory) -> list[str]:
    """Return the token of the newest attempt at each open window."""
    return [entry.attempt.token for entry in open_entries(memory)]


def _skipped(move: PositionChange) -> tuple[Gap, ...]:
    """Return the offsets that the change skips. In a partition of which nothing was read, they begin at the first record."""
    gaps = []
    for m in move.moves:
        there = move.log.partitions.get(TopicPartition(m.topic, m.partition))
        start = m.before if m.before is not None else there.low if there else 0
        gaps.append(Gap(m.topic, m.partition, start, m.after))
    return tuple(gap for gap in gaps if gap.start < gap.end)


def _warnings(memory: Memory, entry: WindowEntry | None) -> tuple[str, ...]:
    if entry is None:
        return ("What is skipped is not moved to the sink, unless the pipeline is reset to before it",)
    published = sorted({split for window, split in memory.markers if window == entry.window.number})
    replayed = entry.window.replay > 0
    sentences = [
        "This window was complete, and was being replayed: the sink holds its rows as they were before or as they are now"
        if replayed
        else "What is skipped is not in the sink, unless an attempt had brought it there before it died: then it stays"
    ]
    if published:
        sentences.append(f"{len(published):,} of its splits were published already, and stay in the topic")
    dead = memory.dead.get(entry.window.number)
    if dead is not None and dead.batches:
        sentences.append("Its dead letters and routed records were sent already, and stay in their topics")
    if dead is not None and (captured := dead.captures(entry.window.replay)):
        sentences.append(f"What is routed to {', '.join(found.sink for found in captured)} may be there already: then it stays")
    return (
        *sentences,
        f"If attempt {entry.attempt.number}, which began at {entry.attempt.started_at}, is still running, it is fenced",
    )
