"""Errors of the ledger, and of the commands that control a pipeline.

An attempt was fenced, the ledger cannot be read, the pipeline belongs to another task, or a command is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

from airflow_kafka_spark.errors.base import KafkaSparkError, format_command, quote_names
from airflow_kafka_spark.errors.planning import PlanError


class Fenced(KafkaSparkError):
    """Raised when a newer attempt of the same pipeline has fenced this one, which may no longer write.

    Nothing is lost: the newer attempt completes the window.

    :param pipeline: name of the pipeline.
    :param doing: what this attempt was doing.
    """

    retryable = True

    def __init__(self, pipeline: str, doing: str) -> None:
        self.pipeline, self.doing = pipeline, doing
        super().__init__(
            f"Pipeline `{pipeline}`: a newer attempt took over while this one was {doing}",
            expected="to be the only attempt",
            action="Nothing needs to be done: the newer attempt finishes the window. If several runs of this DAG overlap all the "
            "time, set `max_active_runs=1`",
        )


class LedgerUnreadable(KafkaSparkError):
    """Raised when the ledger topic cannot be read to its end, or contains a record that this release does not understand.

    :param topic: the ledger topic.
    :param found: what was found there.
    :param expected: what was expected instead.
    :param action: what the user can do.
    :param retryable: False if only a change by the user helps; default True.
    """

    retryable = True

    def __init__(self, topic: str, found: str, expected: str, action: str, *, retryable: bool = True) -> None:
        self.topic, self.retryable = topic, retryable
        super().__init__(f"Ledger topic `{topic}`: {found}", expected=expected, action=action)


class BindingChanged(PlanError):
    """Raised when a run has another task, destination or source than the earlier windows of its pipeline. Nothing was moved.

    :param pipeline: name of the pipeline.
    :param subject: the pipeline, or one of its windows, in words.
    :param differences: for each fact its name, its value in the ledger, and its value in this run.
    """

    def __init__(
        self, pipeline: str, subject: str, differences: Sequence[tuple[str, str, str]], found: str, expected: str, action: str
    ) -> None:
        self.pipeline, self.subject, self.differences = pipeline, subject, tuple(map(tuple, differences))
        super().__init__(found, expected=expected, action=action)


class PipelineTaken(BindingChanged):
    """Raised when another task, or the same task of another Airflow deployment, moves this pipeline.

    Two tasks would take windows from each other.

    :param known: the task that moves the pipeline, in words.
    :param found: this task, in words.
    """

    def __init__(self, pipeline: str, subject: str, known: str, found: str, differences: Sequence[tuple[str, str, str]]) -> None:
        self.known, self.found_writer = known, found
        deployments = [was for what, was, _ in differences if what == "deployment"]
        same = (
            f"If that is the same deployment under another name, give it the name it had: `[kafka_spark] deployment = "
            f"{deployments[0]}`. "
            if deployments
            else ""
        )
        super().__init__(
            pipeline,
            subject,
            differences,
            f"{subject[:1].upper()}{subject[1:]} is moved by {known}, and this is {found}",
            "a pipeline that only one task moves",
            f"{same}Give each task a `pipeline=` of its own, and a `group_id` where it has one. If this task is to move the "
            f"pipeline from now on, allow it: {format_command('rebind', pipeline, '--why', '...')}, with "
            "`--not-running` while a window is open",
        )


class GroupOwned(PlanError):
    """Raised when the consumer group of a pipeline mirrors the position of another pipeline.

    :param pipeline: name of this pipeline.
    :param group_id: the consumer group.
    :param owner: the other pipeline, from the metadata of the group's offsets or, before they are committed, from the ledger.
    :param ledger_topic: the ledger topic that holds the owner, if that is another one. Default none.
    :param window: the window or the data interval that is open there. Default none.
    """

    def __init__(self, pipeline: str, group_id: str, owner: str, ledger_topic: str = "", window: str = "") -> None:
        self.pipeline, self.group_id, self.owner, self.ledger_topic = pipeline, group_id, owner, ledger_topic
        self.window = window
        if window:
            super().__init__(
                f"Window {window} of this pipeline is open in another ledger topic, `{ledger_topic}`, and only that one shows "
                "which of its records are moved already",
                expected="a change of `ledger_topic` without an open window",
                action=f"Set `ledger_topic` to `{ledger_topic}`, and run the task again, which finishes the window; then change "
                "it. To give the window up: "
                + format_command("skip", owner, "--ledger-topic", ledger_topic, "--not-running", "--why", "..."),
            )
            return
        if ledger_topic:
            super().__init__(
                f"Group `{group_id}` mirrors pipeline `{owner}` of another ledger topic, `{ledger_topic}`",
                expected="a group of this pipeline alone: two pipelines of one name in two ledgers do not know of each other",
                action=f"Give this one a `group_id` of its own. If it is the same pipeline, set `ledger_topic` to "
                f"`{ledger_topic}`; or, to continue at the group's offsets with this ledger, remove it from the other one: "
                + format_command("forget", owner, "--ledger-topic", ledger_topic, "--why", "..."),
            )
            return
        super().__init__(
            f"Group `{group_id}` mirrors pipeline `{owner}`",
            expected=f"a group of pipeline `{pipeline}` alone",
            action=f"Give this one a `group_id` of its own. If it is `{owner}` under another name, keep that: "
            f'`pipeline="{owner}"`; or move its records in the ledger: '
            f"{format_command('rename', owner, '--to', pipeline, '--why', '...')}. "
            f"If `{owner}` will not run again: "
            + format_command("forget", owner, "--delete-group", "--group-id", group_id, "--why", "..."),
        )


class SourceOwned(PlanError):
    """Raised when a pipeline would begin to read a replication slot that another pipeline reads.

    Each of them would miss the changes that the other one reads. Nothing was moved.

    :param pipeline: name of this pipeline.
    :param source: the source's URI.
    :param owner: the other pipeline.
    :param ledger_topic: the ledger topic that holds both.
    """

    def __init__(self, pipeline: str, source: str, owner: str, ledger_topic: str) -> None:
        self.pipeline, self.source, self.owner, self.ledger_topic = pipeline, source, owner, ledger_topic
        super().__init__(
            f"{source} serves pipeline `{owner}`",
            expected=f"a slot of pipeline `{pipeline}` alone",
            action=f"Give this one a slot of its own. If it is `{owner}` under another name, keep that name with `pipeline=`. If "
            f"`{owner}` will not run again: {format_command('forget', owner, '--ledger-topic', ledger_topic, '--why', '...')}; "
            "this one then continues at the slot's position",
        )


class PipelineInOtherLedger(PlanError):
    """Raised when a new pipeline publishes rows that a pipeline of its name has published with another ledger topic.

    All rows would be published again. Nothing was planned.

    :param pipeline: name of both.
    :param ledger_topic: the ledger topic of this run.
    :param other: the other ledger topic, which may be gone.
    """

    def __init__(self, pipeline: str, ledger_topic: str, other: str) -> None:
        self.pipeline, self.ledger_topic, self.other = pipeline, ledger_topic, other
        super().__init__(
            f"Pipeline `{pipeline}` has published rows of this source with another ledger topic, `{other}`",
            expected=f"a pipeline that is new to its source and topic, because ledger topic `{ledger_topic}` has no record of it",
            action=f"Set `ledger_topic` to `{other}`, also if that topic is lost: the error then names the next step. To publish "
            "all rows again: "
            + format_command(
                "forget", pipeline, "--ledger-topic", other, "--delete-group", "--group-id", f"{other}.{pipeline}", "--why", "..."
            ),
        )


class PipelineRenamed(PlanError):
    """Raised when the pipeline was renamed. Under its old name it would move all records again.

    :param pipeline: the old name.
    :param to: the new name.
    :param who: the user who renamed it.
    :param at: when it was renamed, UTC, ISO 8601.
    """

    def __init__(self, pipeline: str, to: str, who: str, at: str) -> None:
        self.pipeline, self.to, self.who, self.at = pipeline, to, who, at
        super().__init__(
            f"Pipeline `{pipeline}` is called `{to}` since {at}, by {who}",
            expected="no task that moves it under its old name",
            action=f'Give the operator `pipeline="{to}"`, or remove this task. To start over under the old name, let the ledger '
            f"`forget` it: {format_command('forget', pipeline, '--why', '...')}",
        )


class _EndChanged(BindingChanged):
    """Raised when the source or the destination of a pipeline changed. ``ENDS`` is the preposition of its message."""

    ENDS: str

    def __init__(
        self, pipeline: str, subject: str, run: str, differences: Sequence[tuple[str, str, str]], *, is_fixed: bool = False
    ) -> None:
        """Build the message from the differences.

        :param run: the run that planned the window, where that is open; empty for the next window of the pipeline.
        :param is_fixed: True if not even a ``rebind`` allows the change while the window is open; default False.
        """
        self.run = run
        before = _format_facts([(what, known) for what, known, _ in differences])
        now = _format_facts([(what, found) for what, _, found in differences])
        is_open, asks = bool(run), ["--not-running"] if run else []
        finish = f"Run the task of run `{run}` again with its earlier options, which finishes the window. " if is_open else ""
        allowed = f"Or let it change: {format_command('rebind', pipeline, *asks, '--why', '...')}"
        stays = "; if the window was committed there already, its records stay there, and are moved once more" if is_open else ""
        if is_fixed:
            skip = format_command("skip", pipeline, "--not-running", "--why", "...")
            allowed = f"Or give up the rows that are not published: {skip}"
            stays = ". Its splits are parts of the old source, so `rebind` allows another one only for the window after it"
        super().__init__(
            pipeline,
            subject,
            differences,
            f"{subject[:1].upper()}{subject[1:]} {'was planned' if is_open else 'has moved its windows'} {self.ENDS} {before}; "
            f"this run has {now}",
            before,
            f"{finish or 'Put it back. '}{allowed}{stays}"
            + ("" if is_open else ". A new `pipeline=` with its own `group_id` starts over"),
        )


class DestinationChanged(_EndChanged):
    """Raised when an open window was planned into another destination, which may have its rows, or when earlier windows were."""

    ENDS = "into"


class SourceChanged(_EndChanged):
    """Raised when an open window was planned from another table, directory or group, or when earlier windows were."""

    ENDS = "from"


def _format_facts(facts: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{what} `{value}`" for what, value in facts)


class ChangeRefused(KafkaSparkError):
    """Raised when a pipeline cannot be changed as requested. Nothing was changed."""


class PipelineUnknown(ChangeRefused):
    """Raised when the ledger has no record of the pipeline.

    :param pipeline: name of the pipeline.
    :param ledger_topic: the ledger topic.
    :param similar: pipelines of similar names, if they were looked up.
    """

    def __init__(self, pipeline: str, ledger_topic: str, similar: Sequence[str] = ()) -> None:
        self.pipeline, self.ledger_topic, self.similar = pipeline, ledger_topic, tuple(similar)
        super().__init__(
            f"Ledger topic `{ledger_topic}` has no record of a pipeline `{pipeline}`"
            + (f"; there is {quote_names(similar)}" if similar else ""),
            expected="the name of a pipeline that has run, by default `<dag_id>.<task_id>`",
            action="Correct the name (`airflow kafka-spark list` and the page *Kafka pipelines* of Airflow's UI show all), or "
            "the ledger topic. A new pipeline begins at its `starting_offsets`",
        )


class WindowOpen(ChangeRefused):
    """Raised when a change needs a pipeline without an open window. An attempt may be working on the window.

    :param window: name of the window.
    :param run: the run that planned it.
    :param planned_at: when it was planned, UTC, ISO 8601.
    """

    def __init__(self, window: str, run: str, planned_at: str) -> None:
        self.window, self.run, self.planned_at = window, run, planned_at
        super().__init__(
            f"Window {window} is open: run `{run}` planned it at {planned_at}, and it is not complete",
            expected="a pipeline that has no open window",
            action="Run the task again, which finishes the window, and then repeat this. Or give it up with `discard_open`: if "
            "its sink has committed it already, its records stay there",
        )


class AttemptAtWork(ChangeRefused):
    """Raised when an open window cannot be given up because an attempt works on it, or may be working on it.

    :param window: name of the window.
    :param run: the run that planned it.
    :param attempt: number of the last attempt.
    :param began: when the last attempt began, UTC, ISO 8601.
    :param is_known: True if the attempt is known to be running; False if that is unknown.
    """

    def __init__(self, window: str, run: str, attempt: int, began: str, is_known: bool) -> None:
        self.window, self.run, self.attempt, self.began, self.is_known = window, run, attempt, began, is_known
        state = "is working on it" if is_known else "may be working on it"
        super().__init__(
            f"Window {window} of run `{run}` is open, and attempt {attempt}, which began at {began}, {state}",
            expected="a window on which no attempt is working",
            action="Wait until its task has ended, or end it"
            if is_known
            else "Check in Airflow whether its task is running. If it is not, confirm it with `running=False` or `--not-running`",
        )


class ReplayRefused(ChangeRefused):
    """Raised when a window cannot be replayed."""


class ResendRefused(ChangeRefused):
    """Raised when the dead letters of a window cannot be sent again. None of them was sent."""
