"""Reset the position of a pipeline, as KIP-875 has it for connectors.

It is one Kafka transaction. It is refused while a window is open, and it records its author and its reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from airflow_kafka_spark.control.base import ChangeRequest, ChangeResult, OpenWindow, refuse_blank
from airflow_kafka_spark.control.pipelines import has_source, open_entries, read_pipeline
from airflow_kafka_spark.control.position_change import (
    PositionChange,
    fence_splits,
    plan_move,
    refuse_open,
    resolve_group,
    topics_of,
    write_position_change,
)
from airflow_kafka_spark.errors import ChangeRefused, PipelineUnknown
from airflow_kafka_spark.ledger.attempt import ChangeLedger
from airflow_kafka_spark.ledger.group import source_window_of
from airflow_kafka_spark.windows.memory import Memory
from airflow_kafka_spark.windows.model import PUBLISHED_IN_PART
from airflow_kafka_spark.windows.offset_specs import CommittedOffsets, ShiftBy, Written, parse_target
from airflow_kafka_spark.windows.plan import Log

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


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
        Named together with ``group_id``, they also move a pipeline that the ledger knows nothing of, because Kafka was created
        anew or a `forget` removed it, and whose sink still remembers windows: its next window begins there. A pipeline that
        reads a source is moved only to "committed:" its own group, behind the window that the group names; ``only`` then names
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

    def planned(memory: Memory) -> tuple[PositionChange, str]:
        if isinstance(target, CommittedOffsets) and target.group_id == group_of_source(request):
            return _behind_lost_window(hook, memory, request, topics_of(only), discard_open), target.group_id
        group = _check(hook, memory, request.ledger_topic, group_id, discard_open, is_said=bool(topics_of(only)))
        return plan_move(hook, memory, target, only, group), group

    # Checked before fencing, so that a refused command does not disturb an open window.
    is_said = bool(group_id and (topics_of(only) or group_id == group_of_source(request)))
    move, group = planned(_read_memory(hook, request, is_said=is_said))
    if not request.dry_run:
        run = f"reset by {request.who}"
        with ChangeLedger(hook, request.pipeline, run, group_id=group, topic=request.ledger_topic) as ledger:
            move, group = planned(ledger.memory)
            fence_splits(ledger, move.given_up)
            write_position_change(ledger, ledger.topic.read(request.pipeline), move, "reset", request)
    given_up = tuple(map(OpenWindow.of, move.given_up))
    return replace(
        ChangeResult.of("reset", request, move.number),
        group_id=group,
        given_up=given_up,
        moves=move.moves,
    )


def group_of_source(request: ChangeRequest) -> str:
    """Return the group of a pipeline that reads a source."""
    return f"{request.ledger_topic}.{request.pipeline}"


def _behind_lost_window(
    hook: KafkaHook, memory: Memory, request: ChangeRequest, topics: set[str], discard_open: bool
) -> PositionChange:
    """Return the change that moves a source's pipeline after the window that its group names and its ledger has lost.

    :param topics: the topics that it publishes to.
    :raises ChangeRefused: the group names no such window, or not the source's position.
    :raises WindowOpen: it has an open window.
    """
    if not discard_open:
        refuse_open(memory)
    group = group_of_source(request)
    described = hook.describe_topics({*topics, request.ledger_topic}, missing="omit")
    places = [tp for found in described.values() for tp in found.topic_partitions]
    ids = {name: found.topic_id for name, found in described.items() if name != request.ledger_topic}
    named = source_window_of(request.pipeline, hook.committed(group, places), ids)
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
    return PositionChange(memory.next_change, position, {}, (), open_entries(memory), log, last_number=named.number)


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


def _check(
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
            expected="a pipeline that stands at offsets",
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
