"""Allow a pipeline another destination, another source, or another task or deployment: once per request."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from airflow_kafka_spark.control.base import (
    ChangeRequest,
    ChangeResult,
    OpenWindow,
    open_windows,
    refuse_blank,
    refuse_intervals,
    request_change,
)
from airflow_kafka_spark.control.pipelines import read_pipeline
from airflow_kafka_spark.errors import AttemptAtWork
from airflow_kafka_spark.ledger.attempt import utc_now
from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.memory import Memory

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


def rebind(hook: KafkaHook, request: ChangeRequest, *, running: bool | None = None) -> ChangeResult:
    """Let the next run of a pipeline have another destination, another source, or be another task or deployment.

    Guarantee: it applies once. The first run that plans a window afterwards binds the pipeline to its own task, destination and
    source, and all others are refused again. An open window is moved to another destination only if no attempt was running
    (``running=False``). Its records in the old destination stay there, and are moved again. Complete windows are replayed to
    their old destination. The consumer group or the replication slot of that run is the pipeline's own as soon as its window is
    planned; one that another pipeline uses is refused then.

    :param hook: the cluster.
    :param request: the pipeline, the author and the reason.
    :param running: True if an attempt works on an open window, as Airflow says of its task; None if that is unknown.
    :raises PipelineUnknown: the ledger holds nothing of it.
    :raises AttemptAtWork: a window is open, and an attempt is at work on it, or that is not known.
    :raises ChangeRefused: the name is that of a data interval.
    """
    memory = read_pipeline(hook, request.pipeline, request.ledger_topic).memory
    refuse_intervals(memory)

    def decide(memory: Memory) -> Change | None:
        refuse_blank(memory, request.ledger_topic)
        going = open_windows(memory)
        if going and running is not False:
            first = going[0]
            began = first.attempt_began or "an earlier time"
            raise AttemptAtWork(first.name, first.run, first.attempts or 1, began, running is True)
        window = going[0].number if going else 0
        asked = memory.rebound_after(memory.binding)
        if asked is not None and asked.window == window:
            return None
        return Change(memory.next_change, "rebind", request.who, request.why, utc_now(), window=window)

    change, memory = request_change(hook, memory, request, decide)
    asked = change or memory.rebound_after(memory.binding)
    going = open_windows(memory)
    return replace(
        ChangeResult.of("rebind", request, asked),
        changed=change is not None,
        open_windows=going,
        binding=memory.binding,
        warnings=_warnings(memory, going, change),
    )


def _warnings(memory: Memory, going: tuple[OpenWindow, ...], change: Change | None) -> tuple[str, ...]:
    names = ", ".join(o.name for o in going[:5])
    return (
        *([] if change else ["It was allowed already, and no run has made use of it yet"]),
        "The next run of the pipeline binds it to what it has; every other one is refused again",
        *([f"Open now: {names}. Records in its destination stay there, and are moved once more"] if going else []),
        *([] if memory.binding else ["It is not known what the pipeline is bound to: any run is accepted as it is"]),
    )
