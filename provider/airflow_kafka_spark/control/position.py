"""Move the position of a pipeline: reset it, or skip an open window that fails repeatedly, or records that wait.

A change is planned from the state of the ledger and of Kafka. It is written in one Kafka transaction, with its author and its
reason. Resets work as in KIP-875 for connectors, and are refused while a window is open.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from airflow_kafka_spark.control.base import ChangeRequest, ChangeResult, Move, OpenWindow, refuse_blank, refuse_intervals
from airflow_kafka_spark.control.pipelines import find_group, has_source, list_open_entries, read_pipeline
from airflow_kafka_spark.errors import (
    AttemptAtWork,
    BoundRefused,
    ChangeRefused,
    GroupHasMembers,
    GroupOwned,
    PipelineUnknown,
    WindowOpen,
)
from airflow_kafka_spark.hooks.kafka.log import check_in_log, format_partitions, read_log, resolve_start
from airflow_kafka_spark.ledger.attempt import ChangeLedger, Ledger
from airflow_kafka_spark.ledger.group import find_source_window, make_offset_metadata
from airflow_kafka_spark.ledger.topic import Hint, LedgerContent
from airflow_kafka_spark.windows.changes import Action
from airflow_kafka_spark.windows.memory import (
    LedgerRecord,
    Memory,
    WindowEntry,
    make_binding_record,
    make_change_key,
    make_change_record,
    make_dead_letters_key,
    make_marker_key,
    make_position_record,
    make_window_key,
    make_window_record,
)
from airflow_kafka_spark.windows.model import (
    GIVEN_UP,
    IF_GIVEN_UP,
    PUBLISHED_IN_PART,
    Gap,
    Landed,
    State,
    TopicPartition,
    Window,
    add_landed,
    merge_landed,
)
from airflow_kafka_spark.windows.offset_specs import (
    CommittedOffsets,
    MoveTarget,
    ShiftBy,
    SpecificOffsets,
    Start,
    Timestamp,
    Written,
    parse_target,
)
from airflow_kafka_spark.windows.plan import Log, Position, find_next_position, is_recreated
from airflow_kafka_spark.windows.times import format_instant

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


KEEP_CHANGES = 100
"""Maximum number of changes of a pipeline that the ledger keeps."""


def resolve_group(hook: KafkaHook, memory: Memory, ledger_topic: str, group_id: str | None) -> str:
    """Return the group that mirrors a pipeline, after a check that it has no members, and that no other pipeline uses it.

    :raises ChangeRefused: the group is not known, or another one than the given one is.
    :raises GroupHasMembers: the group has members.
    :raises GroupOwned: another pipeline uses the group.
    """
    known = find_group(memory)
    group = group_id or known
    if not group:
        raise ChangeRefused(
            f"It is not known which group mirrors pipeline `{memory.pipeline}`: none of its windows is complete",
            action="Say its `group_id`",
        )
    refuse_owned(hook, memory.pipeline, ledger_topic, group)
    if known and group != known:
        raise ChangeRefused(
            f"Pipeline `{memory.pipeline}` has group `{known}`, not `{group}`",
            expected="its own group: the offsets of another consumer are not changed",
            action=f"Leave out `group_id`. To move the pipeline to the offsets of `{group}`: `reset` to `committed:{group}`",
        )
    refuse_members(hook, group)
    return group


def refuse_owned(hook: KafkaHook, pipeline: str, ledger_topic: str, group: str) -> None:
    """Refuse a group that another pipeline uses, as the ledger has recorded.

    :raises GroupOwned: another pipeline uses the group.
    """
    ledger = Ledger(hook, pipeline, "", topic=ledger_topic)
    if ledger.topic.find_existing() and (owner := ledger.find_other_owner(group)) is not None:
        raise GroupOwned(pipeline, group, owner)


def refuse_open(memory: Memory) -> None:
    """Refuse a change of a pipeline that has an open window.

    :raises WindowOpen: a window is planned and not complete.
    """
    for entry in list_open_entries(memory):
        raise WindowOpen(str(entry.window), entry.window.run, entry.window.planned_at)


def refuse_members(hook: KafkaHook, group: str) -> None:
    """Refuse a change of a pipeline whose consumer group has members.

    :raises GroupHasMembers: the group has members.
    """
    if members := hook.read_group_state(group).members:
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


def find_current_offsets(memory: Memory) -> dict[TopicPartition, int]:
    """Return the offsets of a pipeline's position; those at which its first window begins if that window is given up."""
    first = {r.topic_partition: r.start for entry in list_open_entries(memory) for r in entry.window.ranges}
    return {**first, **memory.position.offsets}


def list_named_topics(only: Sequence[str]) -> set[str]:
    """Return the topics of the names in ``only``."""
    return {str(item).partition(":")[0] for item in ([only] if isinstance(only, str) else only)}


def plan_move(hook: KafkaHook, memory: Memory, target: MoveTarget, only: Sequence[str], group: str) -> PositionChange:
    """Return the change that moves a pipeline to a target.

    :raises BoundRefused: the log does not have the offsets.
    :raises ChangeRefused: it cannot be moved there.
    """
    windows, position, number, before = (
        list_open_entries(memory),
        memory.position,
        memory.next_change,
        find_current_offsets(memory),
    )
    # A pipeline without a record in the ledger reads the topics that are named.
    topics = {tp.topic for tp in before} or list_named_topics(only)
    log = read_log(hook, topics)
    scope = _select_partitions(only, target, log, topics)
    stale = {t for t in topics if is_other_topic(position, log, t)}
    if isinstance(target, ShiftBy):
        wanted, after = _shift_offsets(target, before, scope, log, stale)
    else:
        part = replace(log, partitions={tp: log.partitions[tp] for tp in scope})
        wanted, after = {}, check_in_log(_resolve_target(hook, target, part, group, before), part)
    if gone := sorted(topics - log.topic_ids.keys()) if not after else []:
        raise ChangeRefused(
            f"Topic `{gone[0]}` of pipeline `{memory.pipeline}` does not exist any more",
            expected="a topic to move in",
            action="Create the topic again, or let the ledger `forget` the pipeline",
        )
    if not after:
        raise ChangeRefused(
            f"Pipeline `{memory.pipeline}` has no such partitions to move",
            expected="partitions that it reads, and that are still there",
            action="Correct the topics and partitions to move",
        )
    left = {tp for tp in {*before, *log.partitions} if tp.topic in stale and tp not in after and tp in log.partitions}
    if left:
        raise ChangeRefused(
            f"Topic `{min(left).topic}` was deleted and created again since the pipeline read it",
            expected="all of its partitions to be moved at once",
            action=f"Move {format_partitions(left)}, too",
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
        began={tp: min(b, after.get(tp, b)) for tp, b in position.began.items() if tp.topic not in stale},
        # From here on, offsets decide which windows are followed.
        followed={},
        passed=(),
    )
    moves = tuple(Move(*tp, before.get(tp), after[tp], wanted.get(tp)) for tp in sorted(after))
    return PositionChange(number, moved, before, moves, windows, log)


def _resolve_target(
    hook: KafkaHook, target: Start, log: Log, group: str, before: Mapping[TopicPartition, int]
) -> Mapping[TopicPartition, int]:
    """Return the offsets of a target. The pipeline's own group has committed nothing of partitions that only an open window has:
    they stay where this one begins.

    :param before: the offsets of the position, or those at which the open window begins.
    :raises BoundRefused: the target is another group, which has committed no offset of these partitions.
    """
    if not isinstance(target, CommittedOffsets):
        return resolve_start(hook, target, log, group)
    source = target.group_id or group
    committed = hook.read_committed_offsets(source, log.partitions)
    if source != group:
        # The name may be misspelt: the fallback would move everything once more.
        if log.partitions and target.fallback != "none" and not any(committed.values()):
            raise BoundRefused(
                f"Group `{source}` has no committed offset in {format_partitions(log.partitions)}",
                expected="a group that has read these partitions",
                action='Correct its name, or move the pipeline to "earliest" or "latest"',
            )
        return resolve_start(hook, target, log, group)
    kept = {tp: before[tp] for tp, there in committed.items() if there is None and tp in before}
    others = {tp: there for tp, there in log.partitions.items() if tp not in kept}
    return {**kept, **(resolve_start(hook, target, replace(log, partitions=others), group) if others else {})}


def _select_partitions(only: Sequence[str], target: MoveTarget, log: Log, topics: set[str]) -> set[TopicPartition]:
    """Return the partitions to move: all of them, or those that are named."""
    named: set[TopicPartition] = set()
    for item in [only] if isinstance(only, str) else only:
        topic, colon, numbers = str(item).partition(":")
        if colon and not all(number.strip().isdecimal() for number in numbers.split(",")):
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
            f"The pipeline reads no {format_partitions(unknown)}",
            expected=f"partitions of {', '.join(sorted(topics))}",
            action="Correct the names",
        )
    return scope


def is_other_topic(position: Position, log: Log, topic: str) -> bool:
    """Return True if a topic is not the one of this name that the pipeline has read."""
    return is_recreated(topic, log, position) or bool(position.cluster_id and position.cluster_id != log.cluster_id)


def _shift_offsets(
    target: ShiftBy, before: Mapping[TopicPartition, int], scope: set[TopicPartition], log: Log, stale: set[str]
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Return the offsets to which a shift would lead without the ends of the log, and those to which it leads."""
    if others := {tp for tp in scope if tp.topic in stale}:
        raise ChangeRefused(
            f"Topic `{min(others).topic}` was deleted and created again since the pipeline read it",
            expected="a position in the new topic",
            action="Give the position itself; the new topic has no position to shift from",
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
        ledger.fence_splits(max(1, count_splits(entry.window)))


def count_splits(window: Window) -> int:
    """Return the number of splits of a window that is published: those of its source, or one for each partition."""
    return len(window.source.splits) if window.source else len(window.ranges)


def find_published(memory: Memory, numbers: Collection[int]) -> tuple[Landed, ...]:
    """Return the offsets of records that were published by windows that are given up. Call it when no task can publish any
    more."""
    return merge_landed(part for (window, _), marker in memory.markers.items() if window in numbers for part in marker.landed)


def advance_source(given_up: Sequence[WindowEntry], memory: Memory, position: Position) -> Position:
    """Return the position after windows that are given up, with the tokens of a source's published splits, which
    stay published.

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
    landed = find_published(memory, discarded)
    change = request.make_change(move.number, action, before=before, after=after, discarded=given_up, landed=landed)
    # The published records stay in their topics, so a pipeline that follows this one reads and counts them.
    published = add_landed(memory.published or {}, landed) if landed else memory.published
    position = advance_source(move.given_up, memory, move.position)
    records = [
        *(make_window_record(entry) for entry in kept_as_complete.values()),
        *(LedgerRecord(make_window_key(pipeline, number), None) for number in discarded),
        *(LedgerRecord(make_dead_letters_key(pipeline, number), None) for number in discarded if number in memory.dead),
        *(LedgerRecord(make_marker_key(pipeline, *split), None) for split in sorted(memory.markers)),
        *(LedgerRecord(make_change_key(pipeline, n), None) for n in sorted(memory.changes) if n <= move.number - KEEP_CHANGES),
        make_position_record(pipeline, replace(position, published=published), last_number),
        *([make_binding_record(pipeline, memory.binding)] if memory.binding else []),
        make_change_record(pipeline, change),
    ]
    window = Window(pipeline, last_number, (), "", "", topic_ids=move.position.topic_ids)
    kept = {number: entry for number, entry in memory.entries.items() if number not in discarded} | kept_as_complete
    dead = {number: letters for number, letters in memory.dead.items() if number not in discarded}
    hint = Hint(ledger.topic.topic_id, found.partition, replace(memory, entries=kept, dead=dead).oldest_offset)
    stale = {tp.topic for tp in move.log.partitions if is_other_topic(move.position, move.log, tp.topic)}
    there = move.log.partitions.keys()
    offsets = {tp: o for tp, o in move.position.offsets.items() if tp in there and tp.topic not in stale}
    ledger.commit_change(
        records,
        offsets,
        lambda topic: make_offset_metadata(window, topic, hint),
        lambda memory: memory.changes.get(move.number) == change,
    )


def reset(
    hook: KafkaHook,
    request: ChangeRequest,
    to: Written | ShiftBy,
    *,
    only: Sequence[str] = (),
    group_id: str | None = None,
    discard_open: bool = False,
) -> ChangeResult:
    """Move the position of a pipeline and the offsets of its group to ``to``, where its next window begins.

    Guarantee: position, record of the change and the group's offsets change in one Kafka transaction. Earlier attempts of the
    pipeline are fenced. Its sink accepts the next window although it does not continue the last one. If the pipeline is moved
    back, a sink that appends gets records twice.

    :param hook: the cluster.
    :param request: the pipeline, the author and the reason.
    :param to: "earliest", "latest", a time, an offset per partition, another group's committed offsets ("committed:<group>"), or
        a :class:`~airflow_kafka_spark.windows.offset_specs.ShiftBy`, which stops at the ends of the log; see
        :func:`~airflow_kafka_spark.windows.offset_specs.parse_target`. Offsets per partition move only these partitions.
    :param only: topics (``orders``) or partitions of them (``orders:0,2``) to be moved; empty is all that the pipeline reads.
        Named together with ``group_id``, they also move a pipeline of which the ledger has no record, because Kafka was created
        again or a `forget` removed it, and whose sink still remembers windows: its next window begins there. A pipeline that
        reads a source is moved only to "committed:" its own group, after the window that the group names; ``only`` then names
        the topic that it publishes to.
    :param group_id: its consumer group. Default: that of its newest window.
    :param discard_open: True to give up an open window, even if its sink may have committed it already.
    :raises PipelineUnknown: the ledger has no record of it, and ``only`` or ``group_id`` is not given.
    :raises WindowOpen: it has an open window.
    :raises GroupHasMembers: its group has members.
    :raises GroupOwned: another pipeline uses the group.
    :raises BoundRefused: the log does not have the offsets.
    :raises ChangeRefused: the pipeline cannot be moved by offsets.
    :raises ValueError: ``to`` is not valid.
    """
    target = parse_target(to)

    def plan_reset(memory: Memory) -> tuple[PositionChange, str]:
        request.refuse_repetition(memory, "reset")
        if isinstance(target, CommittedOffsets) and target.group_id == find_source_group(request):
            return _move_behind_lost_window(hook, memory, request, list_named_topics(only), discard_open), target.group_id
        group = _check_reset(hook, memory, request.ledger_topic, group_id, discard_open, is_said=bool(list_named_topics(only)))
        return plan_move(hook, memory, target, only, group), group

    # Checked before fencing, so that a refused command does not disturb an open window.
    is_said = bool(group_id and (list_named_topics(only) or group_id == find_source_group(request)))
    move, group = plan_reset(_read_memory(hook, request, is_said=is_said))
    if not request.dry_run:
        run = f"reset by {request.who}"
        with ChangeLedger(hook, request.pipeline, run, group_id=group, topic=request.ledger_topic) as ledger:
            move, group = plan_reset(ledger.memory)
            fence_splits(ledger, move.given_up)
            found = ledger.topic.read(request.pipeline)
            if any(entry.window.publishes for entry in move.given_up):
                # Until the fences, tasks may have published splits, and committed offsets of the group with them.
                move, group = plan_reset(found.memory)
            write_position_change(ledger, found, move, "reset", request)
    given_up = tuple(map(OpenWindow.of, move.given_up))
    return replace(
        ChangeResult.of("reset", request, move.number),
        group_id=group,
        given_up=given_up,
        moves=move.moves,
        warnings=_reset_warnings(target, move),
    )


def _reset_warnings(target: MoveTarget, move: PositionChange) -> tuple[str, ...]:
    """Return a sentence about partitions that are moved to their end, because no record is as new as the time that was given."""
    at_end = [TopicPartition(m.topic, m.partition) for m in move.moves]
    at_end = [tp for tp in at_end if move.position.offsets[tp] == move.log.partitions[tp].lso]
    if not isinstance(target, Timestamp) or not at_end:
        return ()
    return (
        f"No record of {format_partitions(at_end)} is at or after {format_instant(target.ms)}: the pipeline is moved to the end",
    )


def find_source_group(request: ChangeRequest) -> str:
    """Return the group of a pipeline that reads a source."""
    return f"{request.ledger_topic}.{request.pipeline}"


def _move_behind_lost_window(
    hook: KafkaHook, memory: Memory, request: ChangeRequest, topics: set[str], discard_open: bool
) -> PositionChange:
    """Return the change that moves a source's pipeline after the window that its group names and its ledger has lost.

    :param topics: the topics that it publishes to.
    :raises ChangeRefused: the group names no such window, or not the source's position.
    :raises WindowOpen: it has an open window.
    """
    if not discard_open:
        refuse_open(memory)
    group = find_source_group(request)
    described = hook.describe_topics({*topics, request.ledger_topic}, missing="omit")
    partitions = [tp for found in described.values() for tp in found.topic_partitions]
    ids = {name: found.topic_id for name, found in described.items() if name != request.ledger_topic}
    named = find_source_window(request.pipeline, hook.read_committed_offsets(group, partitions), ids)
    if named is None or named.number <= max((memory.last_used, *memory.entries)) or not named.knows_position:
        what = "names no window that the ledger does not know" if named is None or named.knows_position else "holds no position"
        raise ChangeRefused(
            f"Group `{group}` {what} of pipeline `{request.pipeline}`",
            expected="a window that the ledger has lost, with the position of the source",
            action="Name the topic that the pipeline publishes to with `only`. To publish rows again, `forget` the pipeline",
        )
    source = named.position
    if named.is_planned and source is not None:
        source = {**source, PUBLISHED_IN_PART: True}
    position = replace(memory.position, source=source)
    log = Log("", {}, {})
    return PositionChange(memory.next_change, position, {}, (), list_open_entries(memory), log, last_number=named.number)


# --- conditions ---------------------------------------------------------------------------------------------------------


def _read_memory(hook: KafkaHook, request: ChangeRequest, *, is_said: bool) -> Memory:
    """Return the state of a pipeline in the ledger; an empty state if the ledger has no record of it, and topics and group are
    given."""
    try:
        return read_pipeline(hook, request.pipeline, request.ledger_topic).memory
    except PipelineUnknown:
        if not is_said:
            raise
        return Memory(request.pipeline)


def _check_reset(
    hook: KafkaHook, memory: Memory, ledger_topic: str, group_id: str | None, discard_open: bool, *, is_said: bool = False
) -> str:
    """Return the group whose offsets are moved, too.

    :param is_said: True if the topics to move are named. If the group is named, too, the ledger need not have a record of the
        pipeline.
    """
    if not (is_said and group_id):
        refuse_blank(memory, ledger_topic)
    if has_source(memory):
        raise ChangeRefused(
            f"Pipeline `{memory.pipeline}` reads rows from a source, not from Kafka",
            expected="a pipeline with a position in offsets",
            action="To publish rows again, give it a new `pipeline=` name, or have the ledger `forget` it",
        )
    if memory.intervals:
        raise ChangeRefused(
            f"Pipeline `{memory.pipeline}` moves data intervals",
            expected="a pipeline whose windows follow each other",
            action="To move an interval again, clear its task",
        )
    if not discard_open:
        refuse_open(memory)
    return resolve_group(hook, memory, ledger_topic, group_id)


def skip(hook: KafkaHook, request: ChangeRequest, *, group_id: str | None = None, running: bool | None = None) -> ChangeResult:
    """Give up a pipeline's open window; the next window begins at its frozen ends. Without an open window, skip all waiting
    records.

    Guarantee: position, record of the change, the group's offsets and the end of the window change in one Kafka transaction. Its
    attempts and their publishing tasks are fenced. Its number is not used again. Records that its sink has committed already stay
    there; the rest is never moved.

    :param hook: the cluster.
    :param request: the pipeline, the author and the reason.
    :param group_id: its consumer group. Default: that of its newest window.
    :param running: True if an attempt works on the open window, by the state of its task in Airflow; None if unknown. A window is
        given up only with False.
    :raises PipelineUnknown: the ledger has no record of it.
    :raises AttemptAtWork: an attempt is working on the window, or this is not known.
    :raises GroupHasMembers: its group has members.
    :raises GroupOwned: another pipeline uses the group.
    :raises ChangeRefused: no records wait, or the pipeline moves data intervals, or it reads rows and has no open window.
    """

    def plan_skip(memory: Memory) -> tuple[PositionChange, str | None]:
        request.refuse_repetition(memory, "skip")
        group = _check_skip(hook, memory, request.ledger_topic, group_id)
        for entry in list_open_entries(memory):
            if not request.dry_run and running is not False:
                attempt = entry.attempt
                raise AttemptAtWork(str(entry.window), entry.window.run, attempt.number, attempt.started_at, running is True)
            return _move_past_window(hook, memory, entry), group
        return _move_to_the_end(hook, memory, group or ""), group

    # Checked before fencing, so that a refused command does not disturb an open window.
    memory = read_pipeline(hook, request.pipeline, request.ledger_topic).memory
    move, group = plan_skip(memory)
    if not request.dry_run:
        run = f"skip by {request.who}"
        with ChangeLedger(hook, request.pipeline, run, group_id=group, topic=request.ledger_topic) as ledger:
            seen, memory = _list_tokens(memory), ledger.memory
            if _list_tokens(memory) != seen:
                raise ChangeRefused(
                    f"Pipeline `{request.pipeline}` has moved on meanwhile",
                    expected="the open window that was shown, or still no open window",
                    action="Check its state again; if its task was running, it was fenced, and a retry finishes its window",
                )
            move, group = plan_skip(memory)
            fence_splits(ledger, move.given_up)
            write_position_change(ledger, ledger.topic.read(request.pipeline), move, "skip", request)
    return replace(
        ChangeResult.of("skip", request, move.number),
        group_id=group,
        given_up=tuple(map(OpenWindow.of, move.given_up)),
        moves=move.moves,
        skipped=_find_skipped_gaps(move),
        warnings=_skip_warnings(memory, next(iter(move.given_up), None)),
    )


def _check_skip(hook: KafkaHook, memory: Memory, ledger_topic: str, group_id: str | None) -> str | None:
    """Return the group whose offsets are moved, too; None for a pipeline that reads rows."""
    refuse_intervals(memory)
    refuse_blank(memory, ledger_topic)
    if memory.intervals and not list_open_entries(memory):
        raise ChangeRefused(
            f"Pipeline `{memory.pipeline}` moves data intervals, which do not wait for each other",
            expected="a pipeline whose windows follow each other",
            action="Set the state of the interval's task in Airflow. Its records are not moved, and the group stays before them",
        )
    if not has_source(memory):
        return resolve_group(hook, memory, ledger_topic, group_id)
    if not list_open_entries(memory):
        raise ChangeRefused(
            f"Pipeline `{memory.pipeline}` reads rows from a source and has no open window: only the source knows what is new",
            expected="an open window to give up",
        )
    return None


def _move_past_window(hook: KafkaHook, memory: Memory, entry: WindowEntry) -> PositionChange:
    """Return the change to the position that the pipeline would have after its open window. For a window that is being replayed,
    this is the present position."""
    if entry.window.replay:
        log = read_log(hook, {tp.topic for tp in memory.position.offsets})
        given_up = list_open_entries(memory)
        return PositionChange(memory.next_change, memory.position, memory.position.offsets, (), given_up, log, restored=(entry,))
    position = find_next_position(memory.position, entry.window)
    number = memory.next_change
    log = read_log(hook, {tp.topic for tp in position.offsets})
    ends = sorted(entry.window.ends.items())
    before = find_current_offsets(memory)
    if memory.intervals:
        # Between the position and the window, there are offsets of data intervals.
        before |= {r.topic_partition: r.start for r in entry.window.ranges}
    moves = tuple(Move(*tp, before.get(tp), end) for tp, end in ends)
    return PositionChange(number, replace(position, moved=number), before, moves, list_open_entries(memory), log)


def _move_to_the_end(hook: KafkaHook, memory: Memory, group: str) -> PositionChange:
    move = plan_move(hook, memory, parse_target("latest"), (), group)
    if back := [m for m in move.moves if m.before is not None and m.after < m.before]:
        raise ChangeRefused(
            f"{back[0].topic}-{back[0].partition} ends at {back[0].after}, before {back[0].before}, the position of the pipeline",
            expected="a log that continues from there",
            action="Check the state of the topic; `reset` moves the pipeline back",
        )
    on = tuple(m for m in move.moves if m.after != m.before)
    if not on:
        raise ChangeRefused(
            f"Pipeline `{memory.pipeline}` has no open window, and no records are waiting",
            expected="an open window to give up, or records to skip",
        )
    return replace(move, moves=on)


def _list_tokens(memory: Memory) -> list[str]:
    """Return the token of the newest attempt at each open window."""
    return [entry.attempt.token for entry in list_open_entries(memory)]


def _find_skipped_gaps(move: PositionChange) -> tuple[Gap, ...]:
    """Return the offsets that the change skips. In a partition of which nothing was read, they begin at the first record."""
    gaps = []
    for m in move.moves:
        there = move.log.partitions.get(TopicPartition(m.topic, m.partition))
        start = m.before if m.before is not None else there.low if there else 0
        gaps.append(Gap(m.topic, m.partition, start, m.after))
    return tuple(gap for gap in gaps if gap.start < gap.end)


def _skip_warnings(memory: Memory, entry: WindowEntry | None) -> tuple[str, ...]:
    if entry is None:
        return ("Skipped records are not moved to the sink, unless the pipeline is reset to offsets before them",)
    published = sorted({split for window, split in memory.markers if window == entry.window.number})
    replayed = entry.window.replay > 0
    sentences = [
        "This window was complete, and was being replayed: the sink holds its rows as they were before or as they are now"
        if replayed
        else "Skipped records are not in the sink, unless an attempt has committed them before it died: then they stay"
    ]
    if published:
        sentences.append(f"{len(published):,} of its splits were published already, and stay in the topic")
    dead = memory.dead.get(entry.window.number)
    if dead is not None and dead.batches:
        sentences.append("Its dead letters and routed records were sent already, and stay in their topics")
    if dead is not None and (captured := dead.list_captured(entry.window.replay)):
        sentences.append(f"Records routed to {', '.join(found.sink for found in captured)} may be there already: then they stay")
    return (
        *sentences,
        f"If attempt {entry.attempt.number}, which began at {entry.attempt.started_at}, is still running, it is fenced",
    )
