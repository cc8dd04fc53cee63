"""Where the next window of an operator that reads from Kafka begins and stops, apart from what its ledger says."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import GroupOwned, Problem
from airflow_kafka_spark.windows.model import TopicPartition
from airflow_kafka_spark.windows.offset_specs import CommittedOffsets, Latest, parse_start, parse_stop
from airflow_kafka_spark.windows.plan import Log

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.hooks.kafka.requests import CommittedOffset
    from airflow_kafka_spark.ledger.attempt import Ledger

log = logging.getLogger(__name__)


def bound_problems(operator: Any) -> list[Problem]:
    """What is wrong with ``starting_offsets`` and ``ending_offsets``, without asking anybody."""
    problems = []
    try:
        parse_start(operator.starting_offsets)
    except ValueError as error:
        problems.append(Problem("starting_offsets", str(error)))
    try:
        stop = parse_stop(operator.ending_offsets)
    except ValueError as error:
        return [*problems, Problem("ending_offsets", str(error))]
    if stop == Latest():
        return problems
    if operator.follows:
        found = "a window that follows another pipeline ends where that has published to"
        problems.append(Problem("ending_offsets", found, "Leave it out, or `follows`"))
    if operator.window == "interval":
        problems.append(Problem("ending_offsets", "a window of a data interval ends with that", "Leave it out"))
    if isinstance(stop, CommittedOffsets) and stop.group_id == operator.group_id:
        found = f"`{stop.group_id}` is this pipeline's own group: no window would ever get past it"
        problems.append(Problem("ending_offsets", found, "Name another group"))
    return problems


def refuse_owned(ledger: Ledger, group_id: str, committed: Mapping[TopicPartition, CommittedOffset | None]) -> None:
    """A group mirrors one pipeline: another one that begins where the group stands leaves out what it has not moved itself, and
    one whose pipeline was renamed moves once more what its sink has taken of an open window.

    :param ledger: of the pipeline that wants the group.
    :param committed: what the group has committed.
    :raises GroupOwned: it mirrors another pipeline.
    """
    from airflow_kafka_spark.ledger.group import owner_of

    pipeline, whole = ledger.parent_pipeline, ledger.parent_memory
    owner = owner_of(pipeline, committed)
    if owner is None and whole.is_blank and not whole.intervals:
        owner = ledger.group_owner()
    if owner is not None:
        raise GroupOwned(pipeline, group_id, owner)


def starts(
    hook: KafkaHook, value: Any, current: Log, group_id: str, committed: Mapping[TopicPartition, CommittedOffset | None]
) -> dict[TopicPartition, int]:
    """Where a pipeline begins that nobody knows: neither its ledger, nor its sink, nor its group.

    :param value: ``starting_offsets``.
    :param committed: what its group has committed, by somebody else.
    :raises PlanError: one of its subclasses, when the log does not hold what was asked for.
    """
    from airflow_kafka_spark.hooks.kafka.resolve_offsets import resolve_start

    start = parse_start(value)
    if isinstance(start, CommittedOffsets):
        other = start.group_id or group_id
        if other != group_id and (members := hook.group_state(other).members):
            log.warning(
                "Group %s still has live members (%s): what they read from now on is read here as well",
                other,
                ", ".join(map(str, members)),
            )
    elif any(committed.values()):
        log.warning("Group %s has committed offsets: `starting_offsets` says %s, so they do not count", group_id, start)
    found = resolve_start(hook, start, current, group_id)
    log.info("A new pipeline: it begins at %s", ", ".join(f"{tp}@{offset}" for tp, offset in sorted(found.items())[:20]))
    return found
