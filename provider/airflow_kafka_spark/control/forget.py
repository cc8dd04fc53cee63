"""Remove all records of a pipeline from the ledger but one of this change, in one Kafka transaction."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from airflow_kafka_spark.control.base import ChangeRequest, ChangeResult, OpenWindow
from airflow_kafka_spark.control.pipelines import existing_ledger, group_of, has_source, open_entries, read_pipeline
from airflow_kafka_spark.control.position_change import fence_splits, published_by, refuse_members, refuse_open
from airflow_kafka_spark.errors import ChangeRefused, PipelineUnknown, WindowOpen
from airflow_kafka_spark.ledger.attempt import ChangeLedger, utc_now
from airflow_kafka_spark.ledger.topic import WAIT_FOR_NONE, LedgerContent, LedgerTopic
from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.memory import ARCHIVE, LedgerRecord, Memory, change_record, key_prefix
from airflow_kafka_spark.windows.model import State, add_landed

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


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
    offsets of its group, else at its ``starting_offsets``. Use :func:`~airflow_kafka_spark.control.reset.reset` to move records
    again.

    :param hook: the cluster.
    :param request: the pipeline, the author and the reason.
    :param group_id: its consumer group. Default: that of its newest window.
    :param delete_group: True to delete its group with the offsets that it has committed.
    :param discard_open: True to give up an open window, even if its sink may have committed it already.
    :raises PipelineUnknown: the ledger holds nothing of it.
    :raises WindowOpen: it has an open window.
    :raises GroupHasMembers: its group is to be deleted, and the group has members.
    """
    pipeline, ledger_topic = request.pipeline, request.ledger_topic
    found = _find(hook, pipeline, ledger_topic, is_said=bool(delete_group and group_id))
    group = _check_forget(hook, found.memory, ledger_topic, group_id, delete_group, discard_open)
    change = found.memory.next_change
    if request.dry_run:
        topic = existing_ledger(hook, ledger_topic)
        count = len(live_keys(topic, found, wait=False)) if topic else 0
        return _result(found.memory, change, request, count, group)
    with ExitStack() as opened:
        run = f"forget by {request.who}"
        ledger = opened.enter_context(ChangeLedger(hook, pipeline, run, topic=ledger_topic))
        fence_splits(ledger, open_entries(ledger.memory))
        fenced: set[str] = set()
        while True:
            found = ledger.topic.read(pipeline)
            memory, change = found.memory, found.memory.next_change
            _check_forget(hook, memory, ledger_topic, group_id, delete_group, discard_open)
            planned = {s.interval.ledger_name(pipeline) for s in memory.intervals.recent.values() if s.state is State.PLANNED}
            for name in sorted(planned - fenced):
                opened.enter_context(ChangeLedger(hook, name, run, topic=ledger_topic))
            keys = live_keys(ledger.topic, found)
            # An interval whose attempt is not fenced keeps its records, because that attempt may be writing to its sink. An
            # interval that is planned from here on counts as planned after the change.
            if planned <= fenced and not _came_later(memory, keys):
                break
            fenced |= planned
        # The group is deleted first: if the command ends here, the ledger still has the pipeline's position.
        if group:
            hook.delete_group(group)
        done = _change(memory, change, request)
        records = [*(LedgerRecord(key, None) for key in keys), change_record(pipeline, done)]
        ledger.commit_change(records, {}, lambda topic: "", lambda memory: memory.changes.get(change) == done)
    return _result(memory, change, request, len(keys), group)


def _find(hook: KafkaHook, pipeline: str, ledger_topic: str, *, is_said: bool) -> LedgerContent:
    """Return the state of a pipeline in the ledger.

    :param is_said: True if a group to delete is named, which may exist without any record of the ledger.
    :raises PipelineUnknown: the ledger holds nothing of it, and no group is named.
    """
    try:
        return read_pipeline(hook, pipeline, ledger_topic)
    except PipelineUnknown:
        if not is_said:
            raise
        return LedgerContent(Memory(pipeline), 0)


def _came_later(memory: Memory, keys: Iterable[bytes]) -> bool:
    """Return True if a key belongs to a data interval, or an archive of intervals, that the given state does not have."""
    archives = {archive.span.interval.name for archive in memory.intervals.archives}
    known = {"interval": memory.intervals.recent.keys(), ARCHIVE: archives}
    parts = [json.loads(key) for key in keys]
    return any(kind in known and rest[0] not in known[kind] for name, kind, *rest in parts if name == memory.pipeline)


def _result(memory: Memory, change: int, request: ChangeRequest, records: int, group: str | None) -> ChangeResult:
    given_up = tuple(map(OpenWindow.of, open_entries(memory)))
    return replace(ChangeResult.of("forget", request, change), group_id=group, given_up=given_up, records=records)


def _change(memory: Memory, number: int, request: ChangeRequest) -> Change:
    """Return the record of the change. The published records and used numbers in it let other pipelines still follow this one."""
    given_up = _numbers(memory)
    landed = published_by(memory, given_up)
    last = max((memory.last_used, *memory.entries))
    published = add_landed(memory.published or {}, landed)
    before = dict(memory.position.offsets)
    return Change(
        number,
        "forget",
        request.who,
        request.why,
        utc_now(),
        before,
        {},
        given_up,
        window=last,
        landed=landed,
        published=published,
    )


def _check_forget(
    hook: KafkaHook, memory: Memory, ledger_topic: str, group_id: str | None, delete_group: bool, discard_open: bool
) -> str | None:
    """Return the group that is to be deleted, if any."""
    # A former name is forgotten, too, and a group may exist without its pipeline.
    left = memory.renamed_to is not None or (delete_group and group_id)
    if memory.is_unknown and not left:
        raise PipelineUnknown(memory.pipeline, ledger_topic)
    if not discard_open:
        refuse_open(memory)
        for state in memory.intervals.recent.values():
            if state.state is State.PLANNED:
                raise WindowOpen(state.interval.ledger_name(memory.pipeline), state.run, "an earlier time")
    if not delete_group:
        return None
    group = group_id or (f"{ledger_topic}.{memory.pipeline}" if has_source(memory) else group_of(memory))
    if not group:
        raise ChangeRefused(f"It is not known which group mirrors pipeline `{memory.pipeline}`", action="Say its `group_id`")
    refuse_members(hook, group)
    return group


def live_keys(topic: LedgerTopic, found: LedgerContent, *, wait: bool = True) -> list[bytes]:
    """Return every key of the pipeline, and of its intervals, that has a value."""
    names = [
        found.memory.pipeline,
        *(s.interval.ledger_name(found.memory.pipeline) for s in found.memory.intervals.recent.values()),
    ]
    prefixes = tuple(map(key_prefix, names))
    records = topic.newest(found.partition, 0, prefixes, prefixes if wait else WAIT_FOR_NONE)
    return sorted(record.key for record in records if record.value is not None)


def _numbers(memory: Memory) -> tuple[int, ...]:
    return tuple(entry.window.number for entry in open_entries(memory))
