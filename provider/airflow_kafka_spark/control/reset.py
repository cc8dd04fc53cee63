"""Moving a pipeline by hand, as KIP-875 has it for connectors.

It happens whole, in one Kafka transaction, or not at all; never while a window is open, and never without saying who and why.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from airflow_kafka_spark.control.pipelines import find, group_of, has_source, open_entries
from airflow_kafka_spark.errors import BoundRefused, GroupHasMembers, PipelineUnknown, ResetRefused, WindowOpen
from airflow_kafka_spark.hooks.kafka.log import read_log
from airflow_kafka_spark.hooks.kafka.resolve_offsets import listed, resolve_start, within
from airflow_kafka_spark.ledger.attempt import Ledger, utc_now
from airflow_kafka_spark.ledger.group import offset_metadata
from airflow_kafka_spark.ledger.topic import TOPIC, Found, Hint
from airflow_kafka_spark.windows.changes import Action, Change
from airflow_kafka_spark.windows.memory import (
    Entry,
    LedgerRecord,
    Memory,
    binding_record,
    change_key,
    change_record,
    dead_key,
    marker_key,
    position_record,
    window_key,
    window_record,
)
from airflow_kafka_spark.windows.model import Landed, State, TopicPartition, Window, add_landed, merge_landed
from airflow_kafka_spark.windows.offset_specs import ShiftBy, SpecificOffsets, Target, Written, parse_target
from airflow_kafka_spark.windows.plan import Log, Position

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

KEEP_CHANGES = 100
"""How many changes of a pipeline are remembered."""


@dataclass(frozen=True)
class Move:
    """What a reset does to one partition.

    :param before: where the pipeline stood; None where it had read nothing.
    :param after: where it stands.
    :param wanted: where a shift would have led to, had the log not ended before; None elsewhere.
    """

    topic: str
    partition: int
    before: int | None
    after: int
    wanted: int | None = None


@dataclass(frozen=True)
class Reset:
    """What a reset has done, or would do.

    :param group_id: the group that was moved with it.
    :param change: the number of the change in the ledger; of a dry run, the one it would get.
    :param discarded: numbers of the open windows that were given up.
    :param dry_run: nothing was changed.
    """

    pipeline: str
    group_id: str
    change: int
    who: str
    why: str
    moves: tuple[Move, ...]
    discarded: tuple[int, ...]
    dry_run: bool


def reset(
    hook: KafkaHook,
    pipeline: str,
    to: Written | ShiftBy,
    *,
    why: str,
    who: str = "",
    only: Sequence[str] = (),
    ledger_topic: str = TOPIC,
    group_id: str | None = None,
    discard_open: bool = False,
    dry_run: bool = False,
) -> Reset:
    """Move a pipeline: its next window begins where ``to`` says, and so does its group.

    Guarantee: position, record of the change and the group's offsets change in one Kafka transaction. Earlier attempts of the
    pipeline are shut out. Its sink takes the next window though it does not continue the last one; moved back, records come
    twice to a sink that appends.

    :param hook: the cluster.
    :param pipeline: its name.
    :param to: "earliest", "latest", a time, an offset per partition, another group's committed offsets ("committed:<group>"), or
        a :class:`~airflow_kafka_spark.windows.offset_specs.ShiftBy`, which goes no further than the log does; see
        :func:`~airflow_kafka_spark.windows.offset_specs.parse_target`. Offsets that are named move these partitions alone.
    :param why: what for.
    :param who: who asks for it; default the user of this process.
    :param only: topics (``orders``) or partitions of them (``orders:0,2``) to be moved; empty is all that the pipeline reads.
        Named together with ``group_id``, they also move a pipeline that the ledger knows nothing of, because Kafka was created
        anew or it was told to forget it, and whose sink still remembers windows: its next window begins there.
    :param ledger_topic: the ledger that knows it.
    :param group_id: its group; None is the one that its last report names.
    :param discard_open: give up an open window, whose records a sink may have taken already.
    :param dry_run: change nothing, fence nobody, and say what would happen.
    :raises PipelineUnknown: the ledger holds nothing of it, and ``only`` or ``group_id`` is not said.
    :raises WindowOpen: it has an open window.
    :raises GroupHasMembers: somebody consumes with its group.
    :raises BoundRefused: offsets that the log does not hold.
    :raises ResetRefused: it cannot be moved by offsets.
    :raises ValueError: ``to`` is no place to move to.
    """
    target, who = parse_target(to), who_asks(who, why)

    def planned(memory: Memory) -> tuple[Moved, str]:
        group = _check(hook, memory, ledger_topic, group_id, discard_open, is_said=bool(_topics(only)))
        return moved_to(hook, memory, target, only, group), group

    # First without fencing: a window that is being worked on must not be disturbed by what is refused.
    move, group = planned(_look(hook, pipeline, ledger_topic, is_said=bool(_topics(only) and group_id)))
    if not dry_run:
        with Ledger(hook, pipeline, f"reset by {who}", group_id=group, topic=ledger_topic) as ledger:
            move, group = planned(ledger.memory)
            fence_splits(ledger, move.open_windows)
            write(ledger, ledger.topic.look(pipeline), move, "reset", who, why)
    discarded = tuple(entry.window.number for entry in move.open_windows)
    return Reset(pipeline, group, move.number, who, why, move.moves, discarded, dry_run)


# --- whether it may be done -----------------------------------------------------------------------------------------------


def who_asks(who: str, why: str) -> str:
    """Who asks for a change; by default the user of this process.

    :raises ResetRefused: it is not said why.
    """
    if not str(why or "").strip():
        raise ResetRefused("It is not said what this change is for", expected="a few words in `why`", action="Say why")
    return str(who or "").strip() or _user()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        return f"uid {os.getuid()}"


def _look(hook: KafkaHook, pipeline: str, ledger_topic: str, *, is_said: bool) -> Memory:
    """What the ledger holds of a pipeline; nothing, where it has never heard of it and everything is said that it would know."""
    try:
        return find(hook, pipeline, ledger_topic).memory
    except PipelineUnknown:
        if not is_said:
            raise
        return Memory(pipeline)


def _topics(only: Sequence[str]) -> set[str]:
    """The topics that ``only`` names."""
    return {str(item).partition(":")[0] for item in ([only] if isinstance(only, str) else only)}


def _check(
    hook: KafkaHook, memory: Memory, ledger_topic: str, group_id: str | None, discard_open: bool, *, is_said: bool = False
) -> str:
    """The group that is moved, too.

    :param is_said: whether the topics to be moved are named: then the ledger need not know the pipeline, if the group is, too.
    """
    if memory.is_blank and not memory.intervals and not (is_said and group_id):
        raise PipelineUnknown(memory.pipeline, ledger_topic)
    if has_source(memory):
        raise ResetRefused(
            f"Pipeline `{memory.pipeline}` reads rows from a source, not from Kafka",
            expected="a pipeline that stands at offsets",
            action="To publish rows again, give it a new `pipeline=` name, or have the ledger `forget` it",
        )
    if memory.intervals:
        raise ResetRefused(
            f"Pipeline `{memory.pipeline}` moves data intervals",
            expected="a pipeline whose windows follow each other",
            action="To move an interval again, clear its task",
        )
    if not discard_open:
        refuse_open(memory)
    return mirror_of(hook, memory, group_id)


def mirror_of(hook: KafkaHook, memory: Memory, group_id: str | None) -> str:
    """The group that mirrors a pipeline, and that nobody consumes with.

    :raises ResetRefused: it is not known.
    :raises GroupHasMembers: somebody consumes with it.
    """
    group = group_id or group_of(memory)
    if not group:
        raise ResetRefused(
            f"It is not known which group mirrors pipeline `{memory.pipeline}`: none of its windows is complete",
            action="Say its `group_id`",
        )
    refuse_members(hook, group)
    return group


def refuse_open(memory: Memory) -> None:
    """:raises WindowOpen: a window is planned and not complete."""
    for entry in open_entries(memory):
        raise WindowOpen(str(entry.window), entry.window.run, entry.window.planned_at)


def refuse_members(hook: KafkaHook, group: str) -> None:
    """:raises GroupHasMembers: somebody consumes with this group."""
    if members := hook.group_state(group).members:
        raise GroupHasMembers(group, [str(m) for m in members])


# --- what it does ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Moved:
    """A change of a position, ready to be written.

    :param number: of the change.
    :param position: where the pipeline stands then.
    :param before: where it stands now.
    :param open_windows: what is given up.
    :param log: what Kafka holds now.
    :param restored: what is given up in the middle of a replay, and is complete again.
    """

    number: int
    position: Position
    before: Mapping[TopicPartition, int]
    moves: tuple[Move, ...]
    open_windows: tuple[Entry, ...]
    log: Log
    restored: tuple[Entry, ...] = ()


def stands_at(memory: Memory) -> dict[TopicPartition, int]:
    """Where a pipeline stands; where its first window would have begun, if that is to be given up."""
    first = {r.topic_partition: r.start for entry in open_entries(memory) for r in entry.window.ranges}
    return {**first, **memory.position.offsets}


def moved_to(hook: KafkaHook, memory: Memory, target: Target, only: Sequence[str], group: str) -> Moved:
    """What it takes to move a pipeline there.

    :raises BoundRefused: offsets that the log does not hold.
    :raises ResetRefused: it cannot be moved there.
    """
    windows, position, number, before = open_entries(memory), memory.position, memory.next_change, stands_at(memory)
    # A pipeline that the ledger knows nothing of reads what is named.
    topics = {tp.topic for tp in before} or _topics(only)
    log = read_log(hook, topics)
    scope = _scope(only, target, log, topics)
    stale = {t for t in topics if is_another(position, log, t)}
    if isinstance(target, ShiftBy):
        wanted, after = _shifted(target, before, scope, log, stale)
    else:
        part = replace(log, partitions={tp: log.partitions[tp] for tp in scope})
        wanted, after = {}, within(resolve_start(hook, target, part, group), part)
    if not after:
        raise ResetRefused(
            f"There is nothing of pipeline `{memory.pipeline}` to move",
            expected="partitions that it reads, and that are still there",
            action="Correct what is to be moved",
        )
    left = {tp for tp in {*before, *log.partitions} if tp.topic in stale and tp not in after and tp in log.partitions}
    if left:
        raise ResetRefused(
            f"Topic `{min(left).topic}` was deleted and created again since the pipeline read it",
            expected="all of its partitions to be moved at once",
            action=f"Move {listed(left)}, too",
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
        # What is followed from here on, is asked of the offsets.
        followed={},
    )
    moves = tuple(Move(*tp, before.get(tp), after[tp], wanted.get(tp)) for tp in sorted(after))
    return Moved(number, moved, before, moves, windows, log)


def _scope(only: Sequence[str], target: Target, log: Log, topics: set[str]) -> set[TopicPartition]:
    """The partitions to move: all there are, or those that were named."""
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
            f"The pipeline reads no {listed(unknown)}",
            expected=f"partitions of {', '.join(sorted(topics))}",
            action="Correct the names",
        )
    return scope


def is_another(position: Position, log: Log, topic: str) -> bool:
    """Whether a topic is not the one of this name that the pipeline has read."""
    known, found = position.topic_ids.get(topic), log.topic_ids.get(topic)
    return bool((known and found and known != found) or (position.cluster_id and position.cluster_id != log.cluster_id))


def _shifted(
    target: ShiftBy, before: Mapping[TopicPartition, int], scope: set[TopicPartition], log: Log, stale: set[str]
) -> tuple[dict[TopicPartition, int], dict[TopicPartition, int]]:
    """Where a shift leads to if the log does not go so far, and where it leads."""
    if others := {tp for tp in scope if tp.topic in stale}:
        raise ResetRefused(
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


def fence_splits(ledger: Ledger, windows: Sequence[Entry]) -> None:
    """Tasks of a window that is given up may still publish: nobody does any more, once this returns."""
    for entry in windows:
        window = entry.window
        if window.source or window.target:
            ledger.fence_splits(max(1, len(window.source.splits) if window.source else len(window.ranges)))


def given_up_records(memory: Memory, numbers: Collection[int]) -> tuple[Landed, ...]:
    """Where records lie that windows have published which are given up. To be asked once nobody can publish any more."""
    return merge_landed(part for (window, _), marker in memory.markers.items() if window in numbers for part in marker.landed)


def write(ledger: Ledger, found: Found, move: Moved, action: Action, who: str, why: str) -> None:
    """Position, record of the change and the group's offsets, in one Kafka transaction; windows that are given up are removed.

    :raises Fenced: an attempt of the pipeline has taken over meanwhile; nothing was changed.
    """
    memory, pipeline = found.memory, ledger.pipeline
    given_up = tuple(entry.window.number for entry in move.open_windows)
    kept_as_complete = {e.window.number: replace(e, state=State.COMPLETE) for e in move.restored}
    discarded = tuple(number for number in given_up if number not in kept_as_complete)
    # The number of a window that is given up is not used again: a sink may have taken it.
    last_number = max((memory.last_number, *discarded))
    after = {TopicPartition(m.topic, m.partition): m.after for m in move.moves}
    before = {tp: move.before[tp] for tp in after if tp in move.before}
    landed = given_up_records(memory, discarded)
    change = Change(move.number, action, who, why, utc_now(), before, after, given_up, landed=landed)
    # They stay in their topics, so whoever follows the pipeline reads and counts them.
    published = add_landed(memory.published or {}, landed) if landed else memory.published
    records = [
        *(window_record(entry) for entry in kept_as_complete.values()),
        *(LedgerRecord(window_key(pipeline, number), None) for number in discarded),
        *(LedgerRecord(dead_key(pipeline, number), None) for number in discarded if number in memory.dead),
        *(LedgerRecord(marker_key(pipeline, *split), None) for split in sorted(memory.markers)),
        *(LedgerRecord(change_key(pipeline, n), None) for n in sorted(memory.changes) if n <= move.number - KEEP_CHANGES),
        position_record(pipeline, replace(move.position, published=published), last_number),
        *([binding_record(pipeline, memory.binding)] if memory.binding else []),
        change_record(pipeline, change),
    ]
    stands = Window(pipeline, last_number, (), "", "", topic_ids=move.position.topic_ids)
    kept = {number: entry for number, entry in memory.entries.items() if number not in discarded} | kept_as_complete
    dead = {number: letters for number, letters in memory.dead.items() if number not in discarded}
    hint = Hint(ledger.topic.topic_id, found.partition, replace(memory, entries=kept, dead=dead).oldest_offset)
    stale = {tp.topic for tp in move.log.partitions if is_another(move.position, move.log, tp.topic)}
    there = move.log.partitions.keys()
    offsets = {tp: o for tp, o in move.position.offsets.items() if tp in there and tp.topic not in stale}
    ledger.amend(
        records,
        offsets,
        lambda topic: offset_metadata(stands, topic, hint),
        lambda memory: memory.changes.get(move.number) == change,
    )
