"""Pause, resume, rebind, rename, forget and unblock a pipeline."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from airflow_kafka_spark.control.base import (
    ChangeRequest,
    ChangeResult,
    OpenWindow,
    list_open_windows,
    refuse_blank,
    refuse_intervals,
    request_change,
)
from airflow_kafka_spark.control.pipelines import find_group, find_ledger, has_source, list_open_entries, read_pipeline
from airflow_kafka_spark.control.position import (
    fence_splits,
    find_published,
    is_other_topic,
    refuse_members,
    refuse_open,
    refuse_owned,
    resolve_group,
)
from airflow_kafka_spark.errors import AttemptAtWork, ChangeRefused, PipelineUnknown, WindowOpen
from airflow_kafka_spark.hooks.kafka.log import read_log
from airflow_kafka_spark.hooks.kafka.transactions import make_abort_command
from airflow_kafka_spark.ledger.attempt import ChangeLedger
from airflow_kafka_spark.ledger.group import is_committed_by, make_offset_metadata
from airflow_kafka_spark.ledger.topic import (
    TOPIC,
    WAIT_FOR_NONE,
    Hint,
    LedgerContent,
    LedgerSpan,
    LedgerTopic,
    OpenTransaction,
    find_first_open_transaction,
    refuse_renamed,
)
from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.interval import find_name_problem
from airflow_kafka_spark.windows.memory import (
    ARCHIVE,
    INTERVAL,
    LedgerRecord,
    Memory,
    make_change_record,
    make_key_prefix,
    make_position_record,
)
from airflow_kafka_spark.windows.model import State, TopicPartition, Window, add_landed

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


def pause(hook: KafkaHook, request: ChangeRequest) -> ChangeResult:
    """Stop a pipeline from moving windows until it is resumed.

    Guarantee: the pause takes effect with the next attempt, which is skipped before it fences, plans or moves anything. A running
    attempt is not disturbed, and continues to its end. If it dies, its window stays planned and is finished after the pipeline is
    resumed. Pausing a paused pipeline changes nothing.

    :param hook: the cluster.
    :param request: the pipeline, the author and the reason. All data intervals of a pipeline are paused with it.
    :raises PipelineUnknown: the ledger has no record of it.
    :raises PipelineRenamed: it has another name now.
    :raises ChangeRefused: the name is that of a data interval.
    :raises KafkaUnavailable: Kafka does not answer.
    """
    return _set_paused(hook, request, "pause")


def resume(hook: KafkaHook, request: ChangeRequest) -> ChangeResult:
    """Resume a paused pipeline. Its next run finishes an open window first, as it was planned.

    The arguments and errors are those of :func:`pause`. Resuming a pipeline that is not paused changes nothing.
    """
    return _set_paused(hook, request, "resume")


def _set_paused(hook: KafkaHook, request: ChangeRequest, action: Literal["pause", "resume"]) -> ChangeResult:
    memory = read_pipeline(hook, request.pipeline, request.ledger_topic).memory
    refuse_intervals(memory)

    def decide(memory: Memory) -> Change | None:
        request.refuse_repetition(memory, action)
        refuse_renamed(memory)
        if memory.is_paused == (action == "pause"):
            return None
        return request.make_change(memory.next_change, action)

    change, memory = request_change(hook, memory, request, decide)
    before = memory.pause if change is None or action == "resume" else None
    return replace(
        ChangeResult.of(action, request, change or before),
        changed=change is not None,
        open_windows=list_open_windows(memory),
        paused_by=before,
        warnings=_pause_warnings(memory, action, change is not None),
    )


def _pause_warnings(memory: Memory, action: str, changed: bool) -> tuple[str, ...]:
    if not changed and memory.pause is not None:
        return (f"The pipeline is paused already: {memory.pause.sentence}",)
    if not changed:
        return ("The pipeline is not paused",)
    going, intervals = list_open_windows(memory), bool(memory.intervals)
    if action == "pause":
        names = ", ".join(o.name for o in going[:5])
        return (
            *([f"Open now: {names}. A running attempt continues to its end"] if going else []),
            "Tasks that begin while it is paused are skipped, with all tasks that depend on them",
            *(["The intervals of such tasks are not moved by later ones: clear them after resuming"] if intervals else []),
        )
    return (
        *([f"Window {o.name} is finished first, as it was planned" for o in going[:5]]),
        "It continues with the next run of its task",
        *(["Intervals whose tasks were skipped are moved once these are cleared"] if intervals else []),
    )


def rebind(hook: KafkaHook, request: ChangeRequest, *, running: bool | None = None) -> ChangeResult:
    """Let the next run of a pipeline have another destination, another source, or be another task or deployment.

    Guarantee: it applies once. The first run that plans a window afterwards binds the pipeline to its own task, destination and
    source, and all others are refused again. An open window is moved to another destination only if no attempt was running
    (``running=False``). Its records in the old destination stay there, and are moved again. Complete windows are replayed to
    their old destination. The consumer group or the replication slot of that run is the pipeline's own as soon as its window is
    planned; one that another pipeline uses is refused then.

    :param hook: the cluster.
    :param request: the pipeline, the author and the reason.
    :param running: True if an attempt works on an open window, by the state of its task in Airflow; None if unknown.
    :raises PipelineUnknown: the ledger has no record of it.
    :raises AttemptAtWork: a window is open, and an attempt is working on it, or that is not known.
    :raises ChangeRefused: the name is that of a data interval.
    """
    memory = read_pipeline(hook, request.pipeline, request.ledger_topic).memory
    refuse_intervals(memory)

    def decide(memory: Memory) -> Change | None:
        request.refuse_repetition(memory, "rebind")
        refuse_blank(memory, request.ledger_topic)
        going = list_open_windows(memory)
        if going and running is not False:
            first = going[0]
            began = first.attempt_began or "an earlier time"
            raise AttemptAtWork(first.name, first.run, first.attempts or 1, began, running is True)
        window = going[0].number if going else 0
        asked = memory.find_rebind_after(memory.binding)
        if asked is not None and asked.window == window:
            return None
        return request.make_change(memory.next_change, "rebind", window=window)

    change, memory = request_change(hook, memory, request, decide)
    asked = change or memory.find_rebind_after(memory.binding)
    going = list_open_windows(memory)
    return replace(
        ChangeResult.of("rebind", request, asked),
        changed=change is not None,
        open_windows=going,
        binding=memory.binding,
        warnings=_list_rebind_warnings(memory, going, change),
    )


def _list_rebind_warnings(memory: Memory, going: tuple[OpenWindow, ...], change: Change | None) -> tuple[str, ...]:
    names = ", ".join(o.name for o in going[:5])
    of_topics = any(entry.window.publishes for entry in list_open_entries(memory))
    moved = (
        "Its published records stay in the old topic; the rest goes to the new one"
        if of_topics
        else ("Records in its destination stay there, and are moved again")
    )
    return (
        *([] if change else ["The change was allowed already, and no run has used it yet"]),
        "The next run of the pipeline binds it to that run's task, destination and source; all others are refused again",
        *([f"Open now: {names}. {moved}"] if going else []),
        *([] if memory.binding else ["The binding of the pipeline is unknown: any run is accepted"]),
    )


def forget(
    hook: KafkaHook,
    request: ChangeRequest,
    *,
    group_id: str | None = None,
    delete_group: bool = False,
    discard_open: bool = False,
) -> ChangeResult:
    """Remove all records of a pipeline from the ledger, except one of this change.

    A sink keeps its own record of windows. If the pipeline runs again, it continues after the sink's last window, else at the
    offsets of its group, else at its ``starting_offsets``. To move records again, use
    :func:`~airflow_kafka_spark.control.position.reset`.

    :param hook: the cluster.
    :param request: the pipeline, the author and the reason.
    :param group_id: its consumer group. Default: that of its newest window.
    :param delete_group: True to delete its group with the offsets that it has committed.
    :param discard_open: True to give up an open window, even if its sink may have committed it already.
    :raises PipelineUnknown: the ledger has no record of it.
    :raises WindowOpen: it has an open window.
    :raises GroupHasMembers: its group is to be deleted, and the group has members.
    :raises GroupOwned: the group that is to be deleted belongs to another pipeline.
    :raises ChangeRefused: the group that is to be deleted is not known, or has the offsets of another consumer.
    """
    pipeline, ledger_topic = request.pipeline, request.ledger_topic
    found = _find_forgettable(hook, pipeline, ledger_topic, is_said=bool(delete_group and group_id))
    request.refuse_repetition(found.memory, "forget")
    group = _check_forget(hook, found.memory, ledger_topic, group_id, delete_group, discard_open)
    change = found.memory.next_change
    if request.dry_run:
        topic = find_ledger(hook, ledger_topic)
        count = len(list_live_keys(topic, found, wait=False)) if topic else 0
        return _forget_result(found.memory, change, request, count, group)
    with ExitStack() as opened:
        run = f"forget by {request.who}"
        ledger = opened.enter_context(ChangeLedger(hook, pipeline, run, topic=ledger_topic))
        fence_splits(ledger, list_open_entries(ledger.memory))
        fenced: set[str] = set()
        while True:
            found = ledger.topic.read(pipeline)
            memory, change = found.memory, found.memory.next_change
            request.refuse_repetition(memory, "forget")
            _check_forget(hook, memory, ledger_topic, group_id, delete_group, discard_open)
            planned = {
                s.interval.make_ledger_name(pipeline) for s in memory.intervals.recent.values() if s.state is State.PLANNED
            }
            for name in sorted(planned - fenced):
                opened.enter_context(ChangeLedger(hook, name, run, topic=ledger_topic))
            keys = list_live_keys(ledger.topic, found)
            # An interval whose attempt is not fenced keeps its records, because that attempt may be writing to its sink. An
            # interval that is planned from here on counts as planned after the change.
            if planned <= fenced and not _is_newer_key(memory, keys):
                break
            fenced |= planned
        # The group is deleted first: if the command ends here, the ledger still has the pipeline's position.
        if group:
            hook.delete_group(group)
        done = _forget_change(memory, change, request)
        records = [*(LedgerRecord(key, None) for key in keys), make_change_record(pipeline, done)]
        ledger.commit_change(records, {}, lambda topic: "", lambda memory: memory.changes.get(change) == done)
    return _forget_result(memory, change, request, len(keys), group)


def _find_forgettable(hook: KafkaHook, pipeline: str, ledger_topic: str, *, is_said: bool) -> LedgerContent:
    """Return the state of a pipeline in the ledger.

    :param is_said: True if a group to delete is named, which may exist without any record of the ledger.
    :raises PipelineUnknown: the ledger has no record of it, and no group is named.
    """
    try:
        return read_pipeline(hook, pipeline, ledger_topic)
    except PipelineUnknown:
        if not is_said:
            raise
        return LedgerContent(Memory(pipeline), 0)


def _is_newer_key(memory: Memory, keys: Iterable[bytes]) -> bool:
    """Return True if a key belongs to a data interval, or an archive of intervals, that the given state does not have."""
    archives = {archive.span.interval.name for archive in memory.intervals.archives}
    known = {INTERVAL: memory.intervals.recent.keys(), ARCHIVE: archives}
    parts = [json.loads(key) for key in keys]
    return any(kind in known and rest[0] not in known[kind] for name, kind, *rest in parts if name == memory.pipeline)


def _forget_result(memory: Memory, change: int, request: ChangeRequest, records: int, group: str | None) -> ChangeResult:
    given_up = tuple(map(OpenWindow.of, list_open_entries(memory)))
    sent = [number for number in _list_numbers(memory) if number in memory.dead and memory.dead[number].batches]
    warnings = tuple(
        f"Dead letters and routed records of window {number} were sent already: a later run that moves these records again sends "
        "them once more"
        for number in sent
    )
    done = ChangeResult.of("forget", request, change)
    return replace(done, group_id=group, given_up=given_up, records=records, warnings=warnings)


def _forget_change(memory: Memory, number: int, request: ChangeRequest) -> Change:
    """Return the record of the change. The published records and used numbers in it let other pipelines still follow this one,
    and a later run finds in it which offsets were moved."""
    given_up = _list_numbers(memory)
    landed = find_published(memory, given_up)
    last = max((memory.last_used, *memory.entries))
    published = add_landed(memory.published or {}, landed)
    before = dict(memory.position.offsets)
    return request.make_change(
        number,
        "forget",
        before=before,
        discarded=given_up,
        window=last,
        landed=landed,
        published=published,
        forgotten=memory.merge_moved_offsets(),
    )


def _check_forget(
    hook: KafkaHook, memory: Memory, ledger_topic: str, group_id: str | None, delete_group: bool, discard_open: bool
) -> str | None:
    """Return the group to delete; None without one."""
    # A former name is forgotten, too, and a group may exist without its pipeline.
    left = memory.renamed_to is not None or (delete_group and group_id)
    if memory.is_unknown and not left:
        raise PipelineUnknown(memory.pipeline, ledger_topic)
    if not discard_open:
        refuse_open(memory)
        for state in memory.intervals.recent.values():
            if state.state is State.PLANNED:
                raise WindowOpen(state.interval.make_ledger_name(memory.pipeline), state.run, "an earlier time")
    if not delete_group:
        return None
    of_source = f"{ledger_topic}.{memory.pipeline}"
    known = of_source if has_source(memory) else find_group(memory)
    group = group_id or known
    if not group:
        raise ChangeRefused(f"It is not known which group mirrors pipeline `{memory.pipeline}`", action="Say its `group_id`")
    if group not in (known, of_source):
        _refuse_foreign_group(hook, memory, ledger_topic, group)
    refuse_members(hook, group)
    return group


def _refuse_foreign_group(hook: KafkaHook, memory: Memory, ledger_topic: str, group: str) -> None:
    """Refuse to delete a group with committed offsets, none of which the pipeline has committed.

    :param group: another group than the one that the ledger knows.
    :raises GroupOwned: another pipeline uses it.
    :raises ChangeRefused: another consumer uses it.
    """
    refuse_owned(hook, memory.pipeline, ledger_topic, group)
    moved = memory.merge_moved_offsets()
    topics = {tp.topic for tp in (*moved.windows.offsets, *moved.intervals.offsets)}
    # Without a record of the pipeline, the metadata of its group may be all that is left of it.
    described = hook.describe_topics(topics or hook.list_topics(), missing="omit")
    partitions = [tp for topic in described.values() for tp in topic.topic_partitions]
    committed = [there for there in hook.read_committed_offsets(group, partitions, stable=False).values() if there]
    if committed and not any(is_committed_by(memory.pipeline, there, "") for there in committed):
        raise ChangeRefused(
            f"Pipeline `{memory.pipeline}` has committed none of the offsets of group `{group}`",
            expected="its own group: that of another consumer is not deleted",
            action="Correct the name, or delete the group with `kafka-consumer-groups.sh --delete --group`",
        )


def list_live_keys(topic: LedgerTopic, found: LedgerContent, *, wait: bool = True) -> list[bytes]:
    """Return every key of the pipeline, and of its intervals, that has a value."""
    names = [
        found.memory.pipeline,
        *(s.interval.make_ledger_name(found.memory.pipeline) for s in found.memory.intervals.recent.values()),
    ]
    prefixes = tuple(map(make_key_prefix, names))
    records = topic.read_newest(found.partition, 0, prefixes, prefixes if wait else WAIT_FOR_NONE)
    return sorted(record.key for record in records if record.value is not None)


def _list_numbers(memory: Memory) -> tuple[int, ...]:
    return tuple(entry.window.number for entry in list_open_entries(memory))


def rename(hook: KafkaHook, request: ChangeRequest, to: str, *, group_id: str | None = None) -> ChangeResult:
    """Rename a pipeline. It continues at its position.

    Guarantee: position, group and the end of the old name change in one Kafka transaction. Attempts under the old name are
    fenced, and later ones are refused. No window may be open, because the sink has it under the old name only.

    :param hook: the cluster.
    :param request: the pipeline under its old name, the author and the reason.
    :param to: its new name, which no pipeline of the ledger has.
    :param group_id: its consumer group. Default: that of its newest window.
    :raises PipelineUnknown: the ledger has no record of it.
    :raises WindowOpen: it has an open window, which has to be finished, or given up, under the old name.
    :raises GroupHasMembers: its group has members.
    :raises GroupOwned: another pipeline uses the group.
    :raises ChangeRefused: the new name is taken; or the pipeline moves data intervals or reads rows, or is paused.
    """
    pipeline = request.pipeline
    if to == pipeline:
        raise ChangeRefused(f"Pipeline `{pipeline}` has this name already", expected="another name", action="Give one")
    if wrong := find_name_problem(to):
        raise ChangeRefused(wrong[0], expected="a name for a pipeline", action=wrong[1])

    def plan_rename(memory: Memory, other: Memory) -> tuple[str, Change]:
        request.refuse_repetition(memory, "rename")
        group = _check_rename(hook, memory, other, to, request.ledger_topic, group_id)
        return group, request.make_change(memory.next_change, "rename", before=dict(memory.position.offsets), name=to)

    # Checked before fencing, so that a refused command disturbs no attempt.
    memory = read_pipeline(hook, pipeline, request.ledger_topic).memory
    topic = find_ledger(hook, request.ledger_topic)
    assert topic is not None, "the pipeline was found in it"
    there = topic.read_without_waiting(to)
    group, change = plan_rename(memory, there.memory)
    if not request.dry_run:
        run = f"rename by {request.who}"
        with ChangeLedger(hook, pipeline, run, group_id=group, topic=request.ledger_topic) as ledger:
            found, other = ledger.topic.read(pipeline), ledger.topic.read(to)
            memory = found.memory
            group, change = plan_rename(memory, other.memory)
            _write_rename(hook, ledger, found, other, to, change)
    warnings = (
        f'Give the operator `pipeline="{to}"`, or the DAG and task that make this name; under the old one it is refused',
        "Its sink has recorded earlier windows under the old name: they can no longer be replayed",
    )
    return replace(
        ChangeResult.of("rename", request, change),
        group_id=group,
        renamed_to=to,
        position=dict(memory.position.offsets),
        last_window=memory.last_number,
        warnings=warnings,
    )


def _check_rename(hook: KafkaHook, memory: Memory, other: Memory, to: str, ledger_topic: str, group_id: str | None) -> str:
    """Return the group whose metadata gets the new name."""
    refuse_renamed(memory)
    refuse_intervals(memory)
    refuse_intervals(other)
    kept = f'Keep the old name: give the operator `pipeline="{memory.pipeline}"`'
    if not (memory.intervals or has_source(memory)):
        # An open first window counts, too, though the pipeline has no position yet.
        refuse_open(memory)
    if memory.intervals or has_source(memory) or not memory.position.offsets:
        what = "moves data intervals" if memory.intervals else "has no position in Kafka"
        raise ChangeRefused(
            f"Pipeline `{memory.pipeline}` {what}", expected="a pipeline whose windows of Kafka follow each other", action=kept
        )
    if not other.is_blank or other.intervals:
        raise ChangeRefused(
            f"The ledger already has a pipeline `{to}` that has moved windows",
            expected="a name under which it knows none",
            action=f"{kept}; or `forget` the other one, if it was a mistake",
        )
    if memory.pause is not None:
        action = "Resume it, and pause it again under its new name"
        raise ChangeRefused(f"Pipeline `{memory.pipeline}` is paused", expected="one that is not", action=action)
    return resolve_group(hook, memory, ledger_topic, group_id)


def _write_rename(
    hook: KafkaHook, ledger: ChangeLedger, found: LedgerContent, other: LedgerContent, to: str, change: Change
) -> None:
    """Write the records under both names and the group's offsets in one Kafka transaction.

    :raises Fenced: an attempt under the old name has taken over meanwhile; nothing was changed.
    """
    memory, topic = found.memory, ledger.topic
    came = Change(other.memory.next_change, "rename", change.who, change.why, change.at, {}, change.before, name=memory.pipeline)
    # A sink may have older windows under the new name, which the next window does not continue.
    moved = came.number if other.memory.exists else memory.position.moved
    position = replace(memory.position, published=memory.published, moved=moved)
    old = [LedgerRecord(key, None) for key in list_live_keys(topic, found)]
    # The first record names the pipeline that has written the others.
    new = [make_change_record(to, came), make_position_record(to, position, memory.last_number)]
    log = read_log(hook, {tp.topic for tp in position.offsets})
    stale = {t for t in log.topic_ids if is_other_topic(position, log, t)}
    offsets = {tp: o for tp, o in position.offsets.items() if tp in log.partitions and tp.topic not in stale}
    window = Window(to, memory.last_number, (), "", "", topic_ids=position.topic_ids)
    # No hint at the ledger's offset: the pipeline's next close writes one.
    hint = Hint(topic.topic_id, other.partition, 0)
    ledger.commit_change(
        [*old, make_change_record(memory.pipeline, change)],
        offsets,
        lambda name: make_offset_metadata(window, name, hint),
        lambda memory: memory.changes.get(change.number) == change,
        beside={other.partition: new},
    )


MOVES_WITHIN = 15.0
"""Seconds within which the brokers end an aborted transaction. If it is still open then, the brokers have lost it."""


@dataclass(frozen=True)
class Unblocked:
    """The result of :func:`unblock`.

    :param partition: the ledger's partition with the pipeline's records.
    :param transaction: the first open transaction there; None if no transaction is open.
    :param ended: True if the transaction has ended.
    :param warnings: remarks on the result, in sentences.
    :param dry_run: True if nothing was changed because only a preview was requested.
    """

    pipeline: str
    ledger_topic: str
    partition: int
    transaction: OpenTransaction | None
    ended: bool
    warnings: tuple[str, ...]
    dry_run: bool


def unblock(hook: KafkaHook, pipeline: str, *, ledger_topic: str = TOPIC, dry_run: bool = False) -> Unblocked:
    """End the first open transaction in a pipeline's partition of the ledger. It may belong to another pipeline.

    Guarantee: its producer is fenced, as by a newer attempt. The transaction is aborted, or committed if its commit has begun; a
    task that is still running in it fails and is retried. Nothing else is changed.

    :param hook: the cluster.
    :param pipeline: the name of any pipeline in that partition.
    :param ledger_topic: the ledger.
    :param dry_run: True to return the transaction without ending it.
    :raises PipelineUnknown: there is no such ledger.
    """
    topic = find_ledger(hook, ledger_topic)
    if topic is None:
        raise PipelineUnknown(pipeline, ledger_topic)
    partition = topic.read_without_waiting(pipeline).partition
    tp = TopicPartition(ledger_topic, partition)
    bounds = hook.read_offsets([tp])[tp]
    if bounds.lso >= bounds.high:
        return Unblocked(pipeline, ledger_topic, partition, None, False, ("No transaction is open there",), dry_run)
    transaction = find_first_open_transaction(LedgerSpan(hook.make_consumer_config(), tp, bounds.lso, bounds.high), bounds.lso)
    if dry_run:
        return Unblocked(pipeline, ledger_topic, partition, transaction, False, (), dry_run)
    why = topic.abort(transaction)
    deadline = time.monotonic() + MOVES_WITHIN
    while not (ended := hook.read_offsets([tp])[tp].lso > bounds.lso) and not why and time.monotonic() < deadline:
        time.sleep(0.1)
    by_hand = f"{make_abort_command(tp, bounds.lso)} does"
    warnings = () if ended else (why or "The brokers have lost it: fencing its producer does not end it", by_hand)
    return Unblocked(pipeline, ledger_topic, partition, transaction, ended, warnings, dry_run)
