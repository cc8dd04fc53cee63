"""The run that asks for a window, and the binding of a pipeline: its task, its destination, its origin and its group.

The functions here refuse a run that would move a pipeline's window from another task, to another destination or from another
origin.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import conf

from airflow_kafka_spark.errors import DestinationChanged, GroupOwned, PipelineRenamed, PipelineTaken, SourceChanged
from airflow_kafka_spark.operators.visibility.links import SECTION
from airflow_kafka_spark.windows.binding import Binding, Endpoint, Writer, compare_endpoints, compare_locations, compare_writers
from airflow_kafka_spark.windows.memory import Memory, WindowEntry
from airflow_kafka_spark.windows.model import ELSEWHERE, State, TaskInstanceKey, TopicPartition, Tries

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.requests import CommittedOffset
    from airflow_kafka_spark.ledger.attempt import Ledger

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """One task of one DAG run, which asks for a window. Retries and clears of the task belong to one run.

    :param dag_id: the DAG.
    :param run_id: the DAG run.
    :param task_id: the task.
    :param map_index: index of a mapped task, -1 without mapping.
    :param interval: start and end of the DAG run's data interval, as far as it has one.
    :param tries: Airflow's counters of the task. They distinguish a retry from a clear.
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    interval: tuple[datetime | None, datetime | None] = (None, None)
    tries: Tries = Tries()

    @classmethod
    def of(cls, context: Mapping[str, Any]) -> Run:
        """Return the run of a task's context."""
        ti, dag_run = context["ti"], context.get("dag_run")
        interval = (getattr(dag_run, "data_interval_start", None), getattr(dag_run, "data_interval_end", None))
        number, allowed = (getattr(ti, name, None) or 0 for name in ("try_number", "max_tries"))
        clears = getattr(dag_run, "clear_number", None)
        tries = Tries(number, allowed, -1 if clears is None else clears)
        return cls(ti.dag_id, ti.run_id, ti.task_id, getattr(ti, "map_index", -1), interval, tries)

    @property
    def id(self) -> str:
        """``<dag_id>/<run_id>/<task_id>``, with ``/<map_index>`` behind it for a mapped task."""
        return TaskInstanceKey(self.dag_id, self.run_id, self.task_id, self.map_index).run


def get_deployment() -> str:
    """Return the name of this Airflow deployment, which distinguishes it from others that share a Kafka cluster.

    It is ``[kafka_spark] deployment``, by default ``[api] base_url``; empty if neither is set. Workers have both settings, and
    neither changes with a restart.
    """
    named = str(conf.get(SECTION, "deployment", fallback="") or "").strip()
    return named or str(conf.get("api", "base_url", fallback="") or "").strip().rstrip("/")


def make_writer(run: Run) -> Writer:
    """Return the writer of the windows that a run plans."""
    return Writer(run.dag_id, run.task_id, run.map_index, run.run_id, get_deployment())


def refuse_other_writer(pipeline: str, whole: Memory, entry: WindowEntry, run: Run) -> None:
    """Refuse a complete window of a run of this name that another writer has moved. Runs of two deployments may have one name.

    :param pipeline: the pipeline's name.
    :param whole: the ledger's content of the whole pipeline.
    :param entry: the window.
    :raises PipelineTaken: another writer has moved it.
    """
    known = entry.window.binding or whole.binding
    if known is not None and whole.find_rebind_after(known) is None:
        _refuse_writer(pipeline, f"window {entry.window}", known.writer, make_writer(run))


def refuse_other_task(ledger: Ledger, run: Run) -> None:
    """Refuse the next window of a pipeline that another task moves, before anything is fenced: that task may be running.

    Two attempts that begin at once do not see each other here. They are compared again when a window is planned.

    :param ledger: the ledger, as :meth:`~airflow_kafka_spark.ledger.attempt.Ledger.peek` has read it.
    :raises PipelineTaken: another task moves the pipeline, and no ``rebind`` allows this one to.
    """
    if _find_other_task(ledger, run) is None:
        return
    ledger.peek_controls()
    if (known := _find_other_task(ledger, run)) is not None:
        _refuse_writer(ledger.parent_pipeline, f"pipeline `{ledger.parent_pipeline}`", known, make_writer(run))


def _find_other_task(ledger: Ledger, run: Run) -> Writer | None:
    """Return the task that moves a pipeline, if it is another one than this run's; otherwise None. A run whose own window is
    complete may have moved it before a ``rebind``."""
    whole, entry = ledger.parent_memory, ledger.memory.open_entry
    known = (entry.window.binding if entry else None) or whole.binding
    if known is None or whole.renamed_to is not None or whole.find_rebind_after(known) is not None:
        return None
    if not compare_writers(known.writer, make_writer(run)) or ledger.find_completed(run.id) is not None:
        return None
    return known.writer


def refuse_other_destination(pipeline: str, whole: Memory, entry: WindowEntry, found: Binding) -> None:
    """Refuse to report a complete window of a run of this name that was moved to another destination. It may belong to another
    deployment without a name.

    :param pipeline: the pipeline's name.
    :param whole: the ledger's content of the whole pipeline.
    :param entry: the window.
    :param found: the binding of this run.
    :raises DestinationChanged: it was moved to another destination, and no `rebind` has allowed the change.
    """
    known = entry.window.binding
    if known is None or whole.find_rebind_after(known) is not None:
        return
    if other := compare_locations(known.destination, found.destination):
        raise DestinationChanged(pipeline, f"pipeline `{pipeline}`", "", other)


def log_unnamed_deployment(pipeline: str, whole: Memory, found: Binding) -> None:
    """Log a line if the first window of a pipeline is planned by a deployment that has no name."""
    if whole.binding is None and not found.writer.deployment:
        # A single deployment needs no name, so this is no warning.
        log.info(
            "This Airflow deployment has no name, so pipeline %s cannot distinguish its runs from those of another deployment "
            "with the same DAG: set `[kafka_spark] deployment` (or `[api] base_url`) where several of them share a Kafka cluster",
            pipeline,
        )


def decide_binding(pipeline: str, whole: Memory, found: Binding, *, is_free: bool) -> Binding:
    """Return the binding of the pipeline's next window.

    :param pipeline: the pipeline's name.
    :param whole: the ledger's content of the whole pipeline.
    :param found: the binding of this run.
    :param is_free: True if the destination is a template, so that each window may have another one.
    :raises PipelineRenamed: the pipeline has another name now.
    :raises BindingChanged: the pipeline has another binding, and no ``rebind`` allows the change.
    """
    if (renamed := whole.renamed_to) is not None:
        raise PipelineRenamed(pipeline, renamed.name, renamed.who, renamed.at)
    known, subject = whole.binding, f"pipeline `{pipeline}`"
    kept = replace(found, destination=Endpoint() if is_free else found.destination, decided=whole.decided)
    if known is None or whole.find_rebind_after(known) is not None:
        return kept
    _refuse_writer(pipeline, subject, known.writer, found.writer)
    if not is_free and (other := compare_locations(known.destination, found.destination)):
        raise DestinationChanged(pipeline, subject, "", other)
    if other := compare_locations(known.origin, found.origin):
        raise SourceChanged(pipeline, subject, "", other)
    # A worker that does not know the name of its deployment belongs to the one that is known.
    return replace(kept, writer=replace(kept.writer, deployment=kept.writer.deployment or known.writer.deployment))


def is_same_flow(known: Binding | None, found: Binding | None) -> bool:
    """Return True if two bindings have equal sources and equal destinations, and neither is unknown."""
    if not known or not found:
        return False
    ends = ((known.destination, found.destination), (known.origin, found.origin))
    return all(one.place and not compare_locations(one, other) and not compare_locations(other, one) for one, other in ends)


def has_same_destination(one: Binding, other: Binding) -> bool:
    """Return True if the windows of two bindings go to equal destinations, with equal details."""
    known, now = one.destination, other.destination
    return not (compare_endpoints(known, now) or compare_endpoints(now, known))


def find_committed_before(whole: Memory, found: Binding) -> int:
    """Return the number of the last window with records that was committed to the destination of a run; 0 if that is not known.
    ``ELSEWHERE`` if the last one went to another destination, or if the pipeline has data intervals, which a sink has under names
    of their own.

    :param whole: the ledger's content of the whole pipeline.
    :param found: the binding of the run's window.
    """
    done = [e.window for e in whole.entries.values() if e.state is State.COMPLETE and not e.window.is_empty]
    last = max(done, key=lambda window: window.number, default=None)
    if whole.intervals:
        return ELSEWHERE
    # The ledger may keep only windows without records.
    before = whole.binding if last is None else last.binding
    if before is None:
        return 0
    if not has_same_destination(before, found):
        return ELSEWHERE
    return last.number if last is not None and before.decided == found.decided else 0


def refuse_other_binding(pipeline: str, whole: Memory, entry: WindowEntry, found: Binding) -> bool:
    """Return True if an open window gets the binding of this run, because its own is unknown or a ``rebind`` allows it.

    :param pipeline: the pipeline's name.
    :param whole: the ledger's content of the whole pipeline.
    :param entry: the window.
    :param found: the binding of this run.
    :raises BindingChanged: the window was planned with another binding, and no ``rebind`` allows the change.
    """
    window, known = entry.window, entry.window.binding
    if known is None:
        return True
    if whole.find_rebind_after(known, window.number) is not None:
        return True
    if whole.find_rebind_after(known) is None:
        _refuse_writer(pipeline, f"window {window}", known.writer, found.writer)
    _refuse_ends(pipeline, entry, known, found)
    return False


def refuse_replay_elsewhere(pipeline: str, whole: Memory, done: WindowEntry, found: Binding) -> None:
    """Refuse to replay a complete window with another binding, because a replay replaces rows in their place.

    :param pipeline: the pipeline's name.
    :param whole: the ledger's content of the whole pipeline.
    :param done: the window.
    :param found: the binding of this run.
    :raises BindingChanged: the window was moved with another binding.
    """
    known = done.window.binding
    if known is None:
        return
    if whole.find_rebind_after(known) is None:
        _refuse_writer(pipeline, f"window {done.window}", known.writer, found.writer)
    _refuse_ends(pipeline, done, known, found)


def _refuse_writer(pipeline: str, subject: str, known: Writer, found: Writer) -> None:
    if other := compare_writers(known, found):
        raise PipelineTaken(pipeline, subject, str(known), str(found), other)


def _refuse_ends(pipeline: str, entry: WindowEntry, known: Binding, found: Binding) -> None:
    window = entry.window
    if other := compare_endpoints(known.destination, found.destination):
        raise DestinationChanged(pipeline, f"window {window}", window.run, other)
    if other := compare_endpoints(known.origin, found.origin):
        raise SourceChanged(pipeline, f"window {window}", window.run, other)


def refuse_other_group(ledger: Ledger, group_id: str, committed: Mapping[TopicPartition, CommittedOffset | None]) -> None:
    """Refuse a group that mirrors another pipeline. A pipeline of the same name in another ledger topic is another one if another
    task moves it, or if it has another destination.

    A pipeline that began at the offsets of another one would leave out records that it has not moved itself. A renamed pipeline
    would move records of an open window again that its sink has committed.

    :param ledger: the ledger of the pipeline that wants the group.
    :param committed: the offsets that the group has committed.
    :raises GroupOwned: the group mirrors another pipeline, or this one has an open window in another ledger topic.
    """
    from airflow_kafka_spark.ledger.group import find_group_owner, list_ledger_ids

    pipeline = ledger.parent_pipeline
    owner = find_group_owner(pipeline, committed)
    if owner is not None:
        raise GroupOwned(pipeline, group_id, owner)
    # The metadata of a group name a pipeline only once a window is complete.
    ledger.refuse_taken()
    for name, there in ledger.topic.read_other_ledgers(pipeline, list_ledger_ids(pipeline, committed)):
        known, mine = there.binding, ledger.bound
        # Only the ledger of the task has changed, not its destination: it continues at the group's offsets.
        if (
            known
            and mine
            and (compare_writers(known.writer, mine.writer) or compare_locations(known.destination, mine.destination))
        ):
            raise GroupOwned(pipeline, group_id, pipeline, name)
        # Some of its records may be published, or dead letters, without an offset of the group.
        if (entry := there.open_entry) is not None:
            raise GroupOwned(pipeline, group_id, pipeline, name, str(entry.window))
