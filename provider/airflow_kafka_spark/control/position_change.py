"""A change of a pipeline's position, planned from the state of the ledger and of Kafka, and written in one Kafka transaction."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from airflow_kafka_spark.control.base import ChangeRequest, Move
from airflow_kafka_spark.control.pipelines import group_of, open_entries
from airflow_kafka_spark.errors import BoundRefused, ChangeRefused, GroupHasMembers, GroupOwned, WindowOpen
from airflow_kafka_spark.hooks.kafka.log import read_log
from airflow_kafka_spark.hooks.kafka.resolve_offsets import check_in_log, describe_partitions, resolve_start
from airflow_kafka_spark.ledger.attempt import ChangeLedger, Ledger, utc_now
from airflow_kafka_spark.ledger.group import offset_metadata
from airflow_kafka_spark.ledger.topic import Hint, LedgerContent
from airflow_kafka_spark.windows.changes import Action, Change
from airflow_kafka_spark.windows.memory import (
    LedgerRecord,
    Memory,
    WindowEntry,
    binding_record,
    change_key,
    change_record,
    dead_key,
    marker_key,
    position_record,
    window_key,
    window_record,
)
from airflow_kafka_spark.windows.model import (
    GIVEN_UP,
    IF_GIVEN_UP,
    Landed,
    State,
    TopicPartition,
    Window,
    add_landed,
    merge_landed,
)
from airflow_kafka_spark.windows.offset_specs import MoveTarget, ShiftBy, SpecificOffsets
from airflow_kafka_spark.windows.plan import Log, Position, is_recreated

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

KEEP_CHANGES = 100
"""Maximum number of changes of a pipeline that the ledger keeps."""


def resolve_group(hook: KafkaHook, memory: Memory, ledger_topic: str, group_id: str | None) -> str:
    """Return the group that mirrors a pipeline, after a check that it has no members, and that no other pipeline uses it.

    :raises ChangeRefused: the group is not known.
    :raises GroupHasMembers: the group has members.
    :raises GroupOwned: another pipeline uses the group.
    """
    group = group_id or group_of(memory)
    if not group:
        raise ChangeRefused(
            f"It is not known which group mirrors pipeline `{memory.pipeline}`: none of its windows is complete",
            action="Say its `group_id`",
        )
    ledger = Ledger(hook, memory.pipeline, "", topic=ledger_topic)
    if ledger.topic.find_existing() and (owner := ledger.other_owner(group)) is not None:
        raise GroupOwned(memory.pipeline, group, owner)
    refuse_members(hook, group)
    return group


def refuse_open(memory: Memory) -> None:
    """Refuse a change of a pipeline that has an open window.

    :raises WindowOpen: a window is planned and not complete.
    """
    for entry in open_entries(memory):
        raise WindowOpen(str(entry.window), entry.window.run, entry.window.planned_at)


def refuse_members(hook: KafkaHook, group: str) -> None:
    """Refuse a change of a pipeline whose consumer group has members.

    :raises GroupHasMembers: the group has members.
    """
    if members := hook.group_state(group).members:
        raise GroupHasMembers(group, [str(m) for m in members])


@dataclass(frozen=True)
class PositionChange:
    """A planned change of a position.

    :param number: the number of the change.
    :param position: the position after the change.
    :param before: the position before the change.
    :param given_up: the open windows that are given up.
    :param log: the present state of the topics in Kafka.
    :param restored: windows that are given up in the middle of a replay, and are complete again.
    :param last_number: the number of a window that the ledger has lost; default 0. Numbers up to it are not used again.
    """

    number: int
    position: Position
    before: Mapping[TopicPartition, int]
    moves: tuple[Move, ...]
    given_up: tuple[WindowEntry, ...]
    log: Log
    restored: tuple[WindowEntry, ...] = ()
    last_number: int = 0


def current_offsets(memory: Memory) -> dict[TopicPartition, int]:
    """Return the offsets of a pipeline's position; those at which its first window begins if that window is given up."""
    first = {r.topic_partition: r.start for entry in open_entries(memory) for r in entry.window.ranges}
    return {**first, **memory.position.offsets}


def topics_of(only: Sequence[str]) -> set[str]:
    """Return the topics of the names in ``only``."""
    return {str(item).partition(":")[0] for item in ([only] if isinstance(only, str) else only)}


def plan_move(hook: KafkaHook, memory: Memory, target: MoveTarget, only: Sequence[str], group: str) -> PositionChange:
    """Return the change that moves a pipeline to a target.

    :raises BoundRefused: the log does not have the offsets.
    :raises ChangeRefused: it cannot be moved there.
    """
    windows, position, number, before = open_entries(memory), memory.position, memory.next_change, current_offsets(memory)
    # A pipeline without a record in the ledger reads the topics that are named.
    topics = {tp.topic for tp in before} or topics_of(only)
    log = read_log(hook, topics)
    scope = _scope(only, target, log, topics)
    stale = {t for t in topics if is_other_topic(position, log, t)}
    if isinstance(target, ShiftBy):
        wanted, after = _shifted(target, before, scope, log, stale)
    else:
        part = replace(log, partitions={tp: log.partitions[tp] for tp in scope})
        wanted, after = {}, check_in_log(resolve_start(hook, target, part, group), part)
    if not after:
        raise ChangeRefused(
            f"There is nothing of pipeline `{memory.pipeline}` to move",
            expected="partitions that it reads, and that are still there",
            action="Correct what is to be moved",
        )
    left = {tp for tp in {*before, *log.partitions} if tp.topic in stale and tp not in after and tp in log.partitions}
    if left:
        raise ChangeRefused(
            f"Topic `{min(left).topic}` was deleted and created again since the pipeline read it",
            expected="all of its partitions to be moved at once",
            action=f"Move {describe_partitions(left)}, too",
        )
    kept = {tp: offset for tp, offset in before.items() if tp.topic not in stale}
    ids = {t: log.topic_ids[t] for t in topics if log.topic_ids.get(t)}
    epochs = {tp: log.partitions[tp].epoch for tp in after if log.partitions[tp].epoch >= 0}
    moved = replace(
        position,
        offsets={**kept, **after},
        epochs={**{tp: epoch for tp, epoch in position.epochs.items() if tp in kept and tp not in after}, **epochs},
        topic_ids={**{t: i for t, i in position.topic_ids.items() if t not in stale}, **ids},
        cluster_id=log.cluster_id,
        moved=number,
        # From here on, offsets decide which windows are followed.
        followed={},
    )
    moves = tuple(Move(*tp, before.get(tp), after[tp], wanted.get(tp)) for tp in sorted(after))
    return PositionChange(number, moved, before, moves, windows, log)


def _scope(only: Sequence[str], target: MoveTarget, log: Log, topics: set[str]) -> set[TopicPartition]:
    """Return the partitions to move: all of them, or those that are named."""
    named: set[TopicPartition] = set()
    for item in [only] if isinstance(only, str) else only:
        topic, _, numbers = str(item).partition(":")
        if numbers and not all(number.strip().isdecimal() for number in numbers.split(",")):
            raise ValueError(f"`{item}` names no partitions. Expected `topic`, or `topic:0,2`")
        of_topic = {TopicPartition(topic, int(number)) for number in numbers.split(",")} if numbers else set()
        found = of_topic or {tp for tp in log.partitions if tp.topic == topic} or {TopicPartition(topic, 0)}
        named |= found
    scope = named or set(log.partitions)
    if isinstance(target, SpecificOffsets) and not named:
        named = set(target.offsets)
        scope = named & set(log.partitions)
    if unknown := named - set(log.partitions):
        raise BoundRefused(
            f"The pipeline reads no {describe_partitions(unknown)}",
            expected=f"partitions of {', '.join(sorted(topics))}",
            action="Correct the names",
        )
    return scope


def is_other_topic(position: Position, log: Log, topic: str) -> bool:
    """Return True if a topic is not the one of this name that the pipeline has read."""
    return is_recreated(topic, log, position) or bool(position.cluster_id and position.cluster_id != log.cluster_id)


def _shifted(
    target: ShiftBy, before: Mapping[TopicPartition, int], scope: set[TopicPartition], log: Log, stale: set[str]
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Return the offsets to which a shift would lead without the ends of the log, and those to which it leads."""
    if others := {tp for tp in scope if tp.topic in stale}:
        raise ChangeRefused(
            f"Topic `{min(others).topic}` was deleted and created again since the pipeline read it",
            expected="a place in the new one",
            action="Say where in it; there is nothing to shift from",
        )
    after, wanted = {}, {}
    for tp in scope & set(before):
        there, goal = log.partitions[tp], before[tp] + target.offsets
        after[tp] = min(max(goal, there.low), there.lso)
        if after[tp] != goal:
            wanted[tp] = goal
    return wanted, after


def fence_splits(ledger: ChangeLedger, windows: Sequence[WindowEntry]) -> None:
    """Take over windows that are given up, and fence the tasks that may still publish their splits. No marker of these windows is
    added to the ledger afterwards, so it has to be read again."""
    published = [entry for entry in windows if entry.window.source or entry.window.target]
    ledger.take_over(published)
    for entry in published:
        ledger.fence_splits(max(1, split_count(entry.window)))


def split_count(window: Window) -> int:
    """Return the number of splits of a window that is published: those of its source, or one for each partition."""
    return len(window.source.splits) if window.source else len(window.ranges)


def published_by(memory: Memory, numbers: Collection[int]) -> tuple[Landed, ...]:
    """Return the offsets of records that were published by windows that are given up. Call it when no task can publish any
    more."""
    return merge_landed(part for (window, _), marker in memory.markers.items() if window in numbers for part in marker.landed)


def source_behind(given_up: Sequence[WindowEntry], memory: Memory, position: Position) -> Position:
    """Return the position behind windows that are given up, with what is noted of the splits of a source: those that are
    published stay so.

    :param memory: the state of the pipeline, read when no task could publish any more.
    """
    for entry in given_up:
        if (plan := entry.window.source) is None:
            continue
        markers = (memory.markers.get((entry.window.number, index)) for index in range(len(plan.splits)))
        results = [marker.result if marker else None for marker in markers]
        tokens = [
            dict(result.token) if result else split.get(IF_GIVEN_UP, {})
            for split, result in zip(plan.splits, results, strict=True)
        ]
        if any(tokens):
            noted = {"splits": [dict(split) for split in plan.splits], "tokens": tokens}
            position = replace(position, source={**plan.position, GIVEN_UP: noted})
    return position


def write_position_change(
    ledger: ChangeLedger, found: LedgerContent, move: PositionChange, action: Action, request: ChangeRequest
) -> None:
    """Write position, record of the change and the group's offsets in one Kafka transaction; remove the windows that are given
    up.

    :raises Fenced: an attempt of the pipeline has taken over meanwhile; nothing was changed.
    """
    memory, pipeline = found.memory, ledger.pipeline
    given_up = tuple(entry.window.number for entry in move.given_up)
    kept_as_complete = {e.window.number: replace(e, state=State.COMPLETE) for e in move.restored}
    discarded = tuple(number for number in given_up if number not in kept_as_complete)
    # The number of a window that is given up is not used again: a sink may have taken it.
    last_number = max((memory.last_number, move.last_number, *discarded))
    after = {TopicPartition(m.topic, m.partition): m.after for m in move.moves}
    before = {tp: move.before[tp] for tp in after if tp in move.before}
    landed = published_by(memory, discarded)
    change = Change(move.number, action, request.who, request.why, utc_now(), before, after, given_up, landed=landed)
    # The published records stay in their topics, so a pipeline that follows this one reads and counts them.
    published = add_landed(memory.published or {}, landed) if landed else memory.published
    position = source_behind(move.given_up, memory, move.position)
    records = [
        *(window_record(entry) for entry in kept_as_complete.values()),
        *(LedgerRecord(window_key(pipeline, number), None) for number in discarded),
        *(LedgerRecord(dead_key(pipeline, number), None) for number in discarded if number in memory.dead),
        *(LedgerRecord(marker_key(pipeline, *split), None) for split in sorted(memory.markers)),
        *(LedgerRecord(change_key(pipeline, n), None) for n in sorted(memory.changes) if n <= move.number - KEEP_CHANGES),
        position_record(pipeline, replace(position, published=published), last_number),
        *([binding_record(pipeline, memory.binding)] if memory.binding else []),
        change_record(pipeline, change),
    ]
    stands = Window(pipeline, last_number, (), "", "", topic_ids=move.position.topic_ids)
    kept = {number: entry for number, entry in memory.entries.items() if number not in discarded} | kept_as_complete
    dead = {number: letters for number, letters in memory.dead.items() if number not in discarded}
    hint = Hint(ledger.topic.topic_id, found.partition, replace(memory, entries=kept, dead=dead).oldest_offset)
    stale = {tp.topic for tp in move.log.partitions if is_other_topic(move.position, move.log, tp.topic)}
    there = move.log.partitions.keys()
    offsets = {tp: o for tp, o in move.position.offsets.items() if tp in there and tp.topic not in stale}
    ledger.commit_change(
        records,
        offsets,
        lambda topic: offset_metadata(stands, topic, hint),
        lambda memory: memory.changes.get(move.number) == change,
    )
