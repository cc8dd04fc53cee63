"""Rename a pipeline: its ledger and its group go on under the new name."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from airflow_kafka_spark.control.base import ChangeRequest, ChangeResult, refuse_intervals
from airflow_kafka_spark.control.forget import live_keys
from airflow_kafka_spark.control.pipelines import existing_ledger, has_source, read_pipeline
from airflow_kafka_spark.control.position_change import is_other_topic, refuse_open, resolve_group
from airflow_kafka_spark.errors import ChangeRefused
from airflow_kafka_spark.hooks.kafka.log import read_log
from airflow_kafka_spark.ledger.attempt import ChangeLedger, utc_now
from airflow_kafka_spark.ledger.group import offset_metadata
from airflow_kafka_spark.ledger.topic import Hint, LedgerContent
from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.memory import LedgerRecord, Memory, change_record, position_record
from airflow_kafka_spark.windows.model import Window

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


def rename(hook: KafkaHook, request: ChangeRequest, to: str, *, group_id: str | None = None) -> ChangeResult:
    """Rename a pipeline. It continues at its position.

    Guarantee: position, group and the end of the old name change in one Kafka transaction. Attempts under the old name are
    fenced, and later ones are refused. No window may be open, because the sink has it under the old name only.

    :param hook: the cluster.
    :param request: the pipeline under its old name, the author and the reason.
    :param to: its new name, which no pipeline of the ledger has.
    :param group_id: its consumer group. Default: that of its newest window.
    :raises PipelineUnknown: the ledger holds nothing of it.
    :raises WindowOpen: it has an open window, which has to be finished, or given up, under the old name.
    :raises GroupHasMembers: its group has members.
    :raises GroupOwned: another pipeline uses the group.
    :raises ChangeRefused: the new name is taken; or the pipeline moves data intervals or reads rows, or is paused.
    """
    pipeline = request.pipeline
    if not to.strip() or to == pipeline:
        raise ChangeRefused(f"`{to}` is no new name for pipeline `{pipeline}`", expected="another name", action="Give one")

    def planned(memory: Memory, other: Memory) -> tuple[str, Change]:
        group = _check(hook, memory, other, to, request.ledger_topic, group_id)
        offsets = dict(memory.position.offsets)
        return group, Change(memory.next_change, "rename", request.who, request.why, utc_now(), offsets, {}, name=to)

    # Checked before fencing, so that a refused command disturbs no attempt.
    memory = read_pipeline(hook, pipeline, request.ledger_topic).memory
    topic = existing_ledger(hook, request.ledger_topic)
    assert topic is not None, "the pipeline was found in it"
    there = topic.read_without_waiting(to)
    group, change = planned(memory, there.memory)
    if not request.dry_run:
        run = f"rename by {request.who}"
        with ChangeLedger(hook, pipeline, run, group_id=group, topic=request.ledger_topic) as ledger:
            found, other = ledger.topic.read(pipeline), ledger.topic.read(to)
            memory = found.memory
            group, change = planned(memory, other.memory)
            _write(hook, ledger, found, other, to, change)
    warnings = (
        f'Give the operator `pipeline="{to}"`, or the DAG and task that make this name; under the old one it is refused',
        "Its sink remembers earlier windows under the old name: they can no longer be replayed",
    )
    return replace(
        ChangeResult.of("rename", request, change),
        group_id=group,
        renamed_to=to,
        position=dict(memory.position.offsets),
        last_window=memory.last_number,
        warnings=warnings,
    )


def _check(hook: KafkaHook, memory: Memory, other: Memory, to: str, ledger_topic: str, group_id: str | None) -> str:
    """Return the group whose metadata gets the new name."""
    refuse_intervals(memory)
    refuse_intervals(other)
    kept = f'Keep the old name: give the operator `pipeline="{memory.pipeline}"`'
    if not (memory.intervals or has_source(memory)):
        # An open first window counts, too, though the pipeline has no position yet.
        refuse_open(memory)
    if memory.intervals or has_source(memory) or not memory.position.offsets:
        what = "moves data intervals" if memory.intervals else "stands at no offsets of Kafka"
        raise ChangeRefused(
            f"Pipeline `{memory.pipeline}` {what}", expected="a pipeline whose windows of Kafka follow each other", action=kept
        )
    if not other.is_blank or other.intervals:
        raise ChangeRefused(
            f"The ledger knows a pipeline `{to}` already, which has moved windows of its own",
            expected="a name under which it knows none",
            action=f"{kept}; or `forget` the other one, if it was a mistake",
        )
    if memory.pause is not None:
        action = "Resume it, and pause it again under its new name"
        raise ChangeRefused(f"Pipeline `{memory.pipeline}` is paused", expected="one that is not", action=action)
    return resolve_group(hook, memory, ledger_topic, group_id)


def _write(hook: KafkaHook, ledger: ChangeLedger, found: LedgerContent, other: LedgerContent, to: str, change: Change) -> None:
    """Write the records under both names and the group's offsets in one Kafka transaction.

    :raises Fenced: an attempt under the old name has taken over meanwhile; nothing was changed.
    """
    memory, topic = found.memory, ledger.topic
    came = Change(other.memory.next_change, "rename", change.who, change.why, change.at, {}, change.before, name=memory.pipeline)
    # A sink may have older windows under the new name, which the next window does not continue.
    moved = came.number if other.memory.exists else memory.position.moved
    position = replace(memory.position, published=memory.published, moved=moved)
    old = [LedgerRecord(key, None) for key in live_keys(topic, found)]
    # The first record names the pipeline that has written it.
    new = [change_record(to, came), position_record(to, position, memory.last_number)]
    log = read_log(hook, {tp.topic for tp in position.offsets})
    stale = {t for t in log.topic_ids if is_other_topic(position, log, t)}
    offsets = {tp: o for tp, o in position.offsets.items() if tp in log.partitions and tp.topic not in stale}
    stands = Window(to, memory.last_number, (), "", "", topic_ids=position.topic_ids)
    # No short cut: the pipeline's next close leaves one.
    hint = Hint(topic.topic_id, other.partition, 0)
    ledger.commit_change(
        [*old, change_record(memory.pipeline, change)],
        offsets,
        lambda name: offset_metadata(stands, name, hint),
        lambda memory: memory.changes.get(change.number) == change,
        beside={other.partition: new},
    )
