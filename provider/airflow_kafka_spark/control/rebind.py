"""Letting a pipeline go elsewhere, come from elsewhere, or be moved by somebody else: decided by hand, and once each time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_kafka_spark.control.pipelines import find, open_entries
from airflow_kafka_spark.control.requests import OpenWindow, controls, open_windows, refuse_lanes
from airflow_kafka_spark.control.reset import who_asks
from airflow_kafka_spark.errors import AttemptAtWork, PipelineUnknown
from airflow_kafka_spark.ledger.attempt import utc_now
from airflow_kafka_spark.ledger.topic import TOPIC
from airflow_kafka_spark.windows.binding import Binding
from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.memory import Memory

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


@dataclass(frozen=True)
class Rebind:
    """What was allowed, or would be.

    :param change: the number of the change in the ledger; of a dry run, the one it would get; where it was allowed already, that
        of the change that did.
    :param known: what the pipeline is bound to until then; None where that is not known.
    :param open_windows: what is planned and not complete, and may go elsewhere, too.
    :param changed: False where it was allowed already.
    :param warnings: what to know about it, in sentences.
    :param dry_run: nothing was changed.
    """

    pipeline: str
    change: int
    who: str
    why: str
    known: Binding | None
    open_windows: tuple[OpenWindow, ...]
    changed: bool
    warnings: tuple[str, ...]
    dry_run: bool


def rebind(
    hook: KafkaHook,
    pipeline: str,
    *,
    why: str,
    who: str = "",
    ledger_topic: str = TOPIC,
    running: bool | None = None,
    dry_run: bool = False,
) -> Rebind:
    """Let the next run of a pipeline have another destination, another source, or be another task or deployment.

    Guarantee: it counts once. The first run that plans a window after it binds the pipeline to what it has, and every other one
    is refused again. A window that is open goes elsewhere only if nobody was at work on it (``running=False``): what its old
    destination has taken of it stays there, and is moved once more. Complete windows are replayed where they are.

    :param hook: the cluster.
    :param pipeline: its name.
    :param why: what for.
    :param who: who asks for it; default the user of this process.
    :param ledger_topic: the ledger that knows it.
    :param running: whether somebody is at work on an open window, as Airflow says of its task; None where that is not known.
    :param dry_run: change nothing, and say what would happen.
    :raises PipelineUnknown: the ledger holds nothing of it.
    :raises AttemptAtWork: a window is open, and somebody is at work on it, or that is not known.
    :raises ResetRefused: it is not said why, or this is no pipeline.
    """
    who = who_asks(who, why)
    before = find(hook, pipeline, ledger_topic).memory
    refuse_lanes(before)

    def decide(memory: Memory) -> Change | None:
        nonlocal before
        before = memory
        if memory.is_blank and not memory.intervals:
            raise PipelineUnknown(pipeline, ledger_topic)
        going = open_windows(memory)
        if going and running is not False:
            attempts = {str(entry.window): entry.attempt for entry in open_entries(memory)}
            attempt = attempts.get(going[0].window)
            number, began = (attempt.number, attempt.started_at) if attempt else (1, "an earlier time")
            raise AttemptAtWork(going[0].window, going[0].run, number, began, running is True)
        window = going[0].number if going else 0
        asked = memory.rebound_after(memory.binding)
        if asked is not None and asked.window == window:
            return None
        return Change(memory.next_change, "rebind", who, why, utc_now(), window=window)

    # First without writing: what is refused leaves nothing behind.
    change = decide(before)
    if not dry_run and change is not None:
        change = controls(hook, pipeline, ledger_topic).tell(decide)
    asked = before.rebound_after(before.binding)
    number = change.number if change else asked.number if asked else 0
    going = open_windows(before)
    return Rebind(
        pipeline, number, who, why, before.binding, going, change is not None, _warnings(before, going, change), dry_run
    )  # fmt: skip


def _warnings(memory: Memory, going: tuple[OpenWindow, ...], change: Change | None) -> tuple[str, ...]:
    names = ", ".join(o.window for o in going[:5])
    return (
        *([] if change else ["It was allowed already, and no run has made use of it yet"]),
        "The next run of the pipeline binds it to what it has; every other one is refused again",
        *([f"Open now: {names}. What was taken of that where it was to go stays there, and is moved once more"] if going else []),
        *([] if memory.binding else ["It is not known what the pipeline is bound to: any run is accepted as it is"]),
    )
