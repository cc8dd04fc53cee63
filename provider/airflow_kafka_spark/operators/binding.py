"""Whether a run may move a pipeline's window: who planned it, and where it goes and comes from, have to be the same."""

from __future__ import annotations

from dataclasses import replace

from airflow.providers.common.compat.sdk import conf

from airflow_kafka_spark.errors import DestinationChanged, PipelineRenamed, PipelineTaken, SourceChanged
from airflow_kafka_spark.operators.links import SECTION
from airflow_kafka_spark.operators.run import Run
from airflow_kafka_spark.windows.binding import Binding, Endpoint, Writer, other_endpoint, other_place, other_writer
from airflow_kafka_spark.windows.memory import Entry, Memory


def deployment() -> str:
    """The name of this Airflow deployment among those that share a Kafka cluster: ``[kafka_spark] deployment``, by default
    ``[api] base_url``; empty where neither is set. Workers have both, and neither changes with a restart."""
    named = str(conf.get(SECTION, "deployment", fallback="") or "").strip()
    return named or str(conf.get("api", "base_url", fallback="") or "").strip().rstrip("/")


def writer_of(run: Run) -> Writer:
    """Who moves a window that this run plans."""
    return Writer(run.dag_id, run.task_id, run.map_index, run.run_id, deployment())


def refuse_other_writer(pipeline: str, whole: Memory, entry: Entry, run: Run) -> None:
    """Before a window is believed to be this run's own because it has the same name: in another deployment it has that too.

    :param whole: what the ledger holds of the pipeline as a whole.
    :param entry: the window.
    :raises PipelineTaken: somebody else moved it.
    """
    known = entry.window.binding or whole.binding
    if known is not None and whole.rebound_after(known) is None:
        _refuse_writer(pipeline, f"window {entry.window}", known.writer, writer_of(run))


def bound(pipeline: str, whole: Memory, found: Binding, *, is_free: bool) -> Binding:
    """What the pipeline is bound to with its next window.

    :param found: what this run has.
    :param is_free: the destination is a template: each window may go to another one, and none is kept from window to window.
    :raises PipelineRenamed: it has another name.
    :raises BindingChanged: another binding is in force, and nobody has decided that it may change.
    """
    if (renamed := whole.renamed_to) is not None:
        raise PipelineRenamed(pipeline, renamed.name, renamed.who, renamed.at)
    known, subject = whole.binding, f"pipeline `{pipeline}`"
    kept = replace(found, destination=Endpoint() if is_free else found.destination, decided=whole.decided)
    if known is None or whole.rebound_after(known) is not None:
        return kept
    _refuse_writer(pipeline, subject, known.writer, found.writer)
    if not is_free and (other := other_place(known.destination, found.destination)):
        raise DestinationChanged(pipeline, subject, "", other)
    if other := other_place(known.origin, found.origin):
        raise SourceChanged(pipeline, subject, "", other)
    # A worker that was not told its deployment's name is one of the same.
    return replace(kept, writer=replace(kept.writer, deployment=kept.writer.deployment or known.writer.deployment))


def refuse_elsewhere(pipeline: str, whole: Memory, entry: Entry, found: Binding) -> bool:
    """Whether an open window is bound anew, since that was decided, or its binding is not known.

    :param found: what this run has.
    :raises BindingChanged: it was planned for something else, and nobody has decided that it may change.
    """
    window, known = entry.window, entry.window.binding
    if known is None:
        return True
    if whole.rebound_after(known, window.number) is not None:
        return True
    if whole.rebound_after(known) is None:
        _refuse_writer(pipeline, f"window {window}", known.writer, found.writer)
    _refuse_ends(pipeline, entry, known, found)
    return False


def refuse_replay_elsewhere(pipeline: str, whole: Memory, done: Entry, found: Binding) -> None:
    """A replay replaces rows where they are.

    :raises BindingChanged: this run goes elsewhere.
    """
    refuse = done.window.binding
    if refuse is None:
        return
    if whole.rebound_after(refuse) is None:
        _refuse_writer(pipeline, f"window {done.window}", refuse.writer, found.writer)
    _refuse_ends(pipeline, done, refuse, found)


def _refuse_writer(pipeline: str, subject: str, known: Writer, found: Writer) -> None:
    if other := other_writer(known, found):
        raise PipelineTaken(pipeline, subject, str(known), str(found), other)


def _refuse_ends(pipeline: str, entry: Entry, known: Binding, found: Binding) -> None:
    window = entry.window
    if other := other_endpoint(known.destination, found.destination):
        raise DestinationChanged(pipeline, f"window {window}", window.run, other)
    if other := other_endpoint(known.origin, found.origin):
        raise SourceChanged(pipeline, f"window {window}", window.run, other)
