"""Pause and resume a pipeline, also while an attempt is running."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from airflow_kafka_spark.control.base import ChangeRequest, ChangeResult, open_windows, refuse_intervals, request_change
from airflow_kafka_spark.control.pipelines import read_pipeline
from airflow_kafka_spark.ledger.attempt import utc_now
from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.memory import Memory

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


def pause(hook: KafkaHook, request: ChangeRequest) -> ChangeResult:
    """Stop a pipeline from moving windows until it is resumed.

    Guarantee: the pause takes effect with the next attempt, which is skipped before it fences, plans or moves anything. A running
    attempt is not disturbed, and continues to its end. If it dies, its window stays planned and is finished after the pipeline is
    resumed. Pausing a paused pipeline changes nothing.

    :param hook: the cluster.
    :param request: the pipeline, the author and the reason. All data intervals of a pipeline are paused with it.
    :raises PipelineUnknown: the ledger holds nothing of it.
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
        if memory.is_paused == (action == "pause"):
            return None
        return Change(memory.next_change, action, request.who, request.why, utc_now())

    change, memory = request_change(hook, memory, request, decide)
    before = memory.pause if change is None or action == "resume" else None
    return replace(
        ChangeResult.of(action, request, change or before),
        changed=change is not None,
        open_windows=open_windows(memory),
        paused_by=before,
        warnings=_warnings(memory, action, change is not None),
    )


def _warnings(memory: Memory, action: str, changed: bool) -> tuple[str, ...]:
    if not changed and memory.pause is not None:
        return (f"The pipeline is paused already: {memory.pause.sentence}",)
    if not changed:
        return ("The pipeline is not paused",)
    going, intervals = open_windows(memory), bool(memory.intervals)
    if action == "pause":
        names = ", ".join(o.name for o in going[:5])
        return (
            *([f"Open now: {names}. A running attempt continues to its end"] if going else []),
            "Tasks that begin while it is paused end as skipped, and so does what depends on them",
            *(["The intervals of such tasks are not moved by later ones: clear them after resuming"] if intervals else []),
        )
    return (
        *([f"Window {o.name} is finished first, as it was planned" for o in going[:5]]),
        "It continues with the next run of its task",
        *(["Intervals whose tasks were skipped are moved once these are cleared"] if intervals else []),
    )
