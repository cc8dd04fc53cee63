"""A pipeline, or an open window of it, that is another task's, or goes elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from airflow_kafka_spark.errors.planning import PlanError

COMMAND = "python -m airflow_kafka_spark"


class BindingChanged(PlanError):
    """Raised when a run has another task, destination or source than the windows of its pipeline. Nothing was moved.

    :param subject: the pipeline, or one of its windows, in words.
    :param differences: per fact its name, what the ledger has and what this run has.
    """

    def __init__(
        self, pipeline: str, subject: str, differences: Sequence[tuple[str, str, str]], found: str, expected: str, action: str
    ) -> None:
        self.pipeline, self.subject, self.differences = pipeline, subject, tuple(map(tuple, differences))
        super().__init__(found, expected=expected, action=action)


class PipelineTaken(BindingChanged):
    """Another task, or the same task of another Airflow deployment, moves this pipeline: they would take windows from each other.

    :param known: who moves it, in words.
    :param found: who this is.
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
            "a pipeline that one task moves",
            f"{same}Give each task a `pipeline=` of its own, and a `group_id` where it has one. If this one is to move the "
            f"pipeline from now on, say so: `{COMMAND} rebind {pipeline} --why ...`, with `--not-running` while a window is open",
        )


class GroupOwned(PlanError):
    """A consumer group mirrors another pipeline.

    :param owner: that pipeline, as the metadata of the group's offsets says; before those are committed, the ledger.
    """

    def __init__(self, pipeline: str, group_id: str, owner: str) -> None:
        self.pipeline, self.group_id, self.owner = pipeline, group_id, owner
        super().__init__(
            f"Group `{group_id}` mirrors pipeline `{owner}`",
            expected=f"a group of pipeline `{pipeline}` alone",
            action=f"Give this one a `group_id` of its own. If it is `{owner}` under another name, keep that: "
            f'`pipeline="{owner}"`; or move what the ledger knows: `{COMMAND} rename {owner} --to {pipeline} --why ...`. If '
            f"`{owner}` is gone for good: `{COMMAND} forget {owner} --delete-group --group-id {group_id} --why ...`",
        )


class PipelineRenamed(PlanError):
    """Somebody has given the pipeline another name: under this one it would move everything again."""

    def __init__(self, pipeline: str, to: str, who: str, at: str) -> None:
        self.pipeline, self.to, self.who, self.at = pipeline, to, who, at
        super().__init__(
            f"Pipeline `{pipeline}` is called `{to}` since {at}, by {who}",
            expected="no task that moves it under its old name",
            action=f'Give the operator `pipeline="{to}"`, or remove this task. To begin anew under the old name, have the ledger '
            f"`forget` it: `{COMMAND} forget {pipeline} --why ...`",
        )


class _EndChanged(BindingChanged):
    ENDS: str

    def __init__(self, pipeline: str, subject: str, run: str, differences: Sequence[tuple[str, str, str]]) -> None:
        """:param run: the run that planned the window, where that is open; empty for the next window of the pipeline."""
        self.run = run
        before = _listed([(what, known) for what, known, _ in differences])
        now = _listed([(what, found) for what, _, found in differences])
        is_open, asks = bool(run), " --not-running" if run else ""
        finish = f"Run the task of run `{run}` again with what it had, which finishes the window. " if is_open else ""
        stays = "; if the window was taken there already, its records stay there, and are moved once more" if is_open else ""
        super().__init__(
            pipeline,
            subject,
            differences,
            f"{subject[:1].upper()}{subject[1:]} {'was planned' if is_open else 'has moved its windows'} {self.ENDS} {before}; "
            f"this run has {now}",
            before,
            f"{finish or 'Put it back. '}Or let it change: `{COMMAND} rebind {pipeline}{asks} --why ...`{stays}"
            + ("" if is_open else ". A new `pipeline=` with a `group_id` of its own begins anew"),
        )


class DestinationChanged(_EndChanged):
    """The rows of an open window were to go elsewhere, and may be there already; or those of earlier windows went elsewhere."""

    ENDS = "into"


class SourceChanged(_EndChanged):
    """An open window was frozen in another table, directory or group; or all windows before were."""

    ENDS = "from"


def _listed(facts: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"{what} `{value}`" for what, value in facts)
