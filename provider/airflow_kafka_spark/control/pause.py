"""Pausing a pipeline, and having it go on, whatever it is doing meanwhile."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from airflow_kafka_spark.control.pipelines import find
from airflow_kafka_spark.control.requests import OpenWindow, controls, open_windows, refuse_lanes
from airflow_kafka_spark.control.reset import who_asks
from airflow_kafka_spark.ledger.attempt import utc_now
from airflow_kafka_spark.ledger.topic import TOPIC
from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.memory import Memory

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


@dataclass(frozen=True)
class Pause:
    """What was done, or would be.

    :param change: the number of the change in the ledger; of a dry run, the one it would get; where nothing was to be done, that
        of the pause in force, and 0 without one.
    :param changed: whether there was anything to do: False when the pipeline was paused, or not paused, already.
    :param since: the pause that was in force before; None without one.
    :param open_windows: what may be at work now.
    :param warnings: what to know about it, in sentences.
    :param dry_run: nothing was changed.
    """

    pipeline: str
    change: int
    who: str
    why: str
    action: Literal["pause", "resume"]
    changed: bool
    since: Change | None
    open_windows: tuple[OpenWindow, ...]
    warnings: tuple[str, ...]
    dry_run: bool


def pause(hook: KafkaHook, pipeline: str, *, why: str, who: str = "", ledger_topic: str = TOPIC, dry_run: bool = False) -> Pause:
    """Have a pipeline move no windows until it is resumed.

    Guarantee: it takes effect with the next attempt, which is skipped before it fences, plans or moves anything. An attempt that
    is at work is not disturbed, and goes on to its end; one that dies is not finished before the pipeline is resumed. Its window
    stays as it was planned. Pausing what is paused changes nothing.

    :param hook: the cluster.
    :param pipeline: its name; the intervals of a pipeline are all paused with it.
    :param why: what for.
    :param who: who asks for it; default the user of this process.
    :param ledger_topic: the ledger that knows it.
    :param dry_run: change nothing, and say what would happen.
    :raises PipelineUnknown: the ledger holds nothing of it.
    :raises ResetRefused: it is not said why, or this is no pipeline.
    :raises KafkaUnavailable: Kafka does not answer.
    """
    return _tell(hook, pipeline, "pause", why, who, ledger_topic, dry_run)


def resume(hook: KafkaHook, pipeline: str, *, why: str, who: str = "", ledger_topic: str = TOPIC, dry_run: bool = False) -> Pause:
    """Let a paused pipeline go on: first with the window that is open, as it was planned.

    The arguments and errors are those of :func:`pause`. Resuming what is not paused changes nothing.
    """
    return _tell(hook, pipeline, "resume", why, who, ledger_topic, dry_run)


def _tell(
    hook: KafkaHook, pipeline: str, action: Literal["pause", "resume"], why: str, who: str, ledger_topic: str, dry_run: bool
) -> Pause:
    who = who_asks(who, why)
    before = find(hook, pipeline, ledger_topic).memory
    refuse_lanes(before)

    def decide(memory: Memory) -> Change | None:
        nonlocal before
        before = memory
        if memory.is_paused == (action == "pause"):
            return None
        return Change(memory.next_change, action, who, why, utc_now())

    change = decide(before) if dry_run else controls(hook, pipeline, ledger_topic).tell(decide)
    since = before.pause if change is None or action == "resume" else None
    number = change.number if change else since.number if since else 0
    warnings = _warnings(before, action, change is not None)
    return Pause(
        pipeline, number, who, why, action, change is not None, since, open_windows(before), warnings, dry_run
    )  # fmt: skip


def _warnings(memory: Memory, action: str, changed: bool) -> tuple[str, ...]:
    if not changed and memory.pause is not None:
        return (f"The pipeline is paused already: {told(memory.pause)}",)
    if not changed:
        return ("The pipeline is not paused",)
    going, intervals = open_windows(memory), bool(memory.intervals)
    if action == "pause":
        names = ", ".join(o.window for o in going[:5])
        return (
            *([f"Open now: {names}. An attempt that is at work on it goes on to its end"] if going else []),
            "Tasks that begin while it is paused end as skipped, and so does what depends on them",
            *(["The intervals of such tasks are not moved by later ones: clear them after resuming"] if intervals else []),
        )
    return (
        *([f"Window {o.window} is finished first, as it was planned" for o in going[:5]]),
        "It goes on with the next run of its task",
        *(["Intervals whose tasks were skipped are moved once these are cleared"] if intervals else []),
    )


def told(change: Change) -> str:
    """Who did it, when and why, in one line."""
    return f"{change.who} did so at {change.at}: {change.why}"
