"""Errors of the commands that control a pipeline: reset, skip, replay, pause, rename and others."""

from __future__ import annotations

from airflow_kafka_spark.errors.base import KafkaSparkError


class ChangeRefused(KafkaSparkError):
    """Raised when a pipeline cannot be changed as requested. Nothing was changed."""


class PipelineUnknown(ChangeRefused):
    """Raised when the ledger does not know the pipeline.

    :param pipeline: name of the pipeline.
    :param ledger_topic: the ledger topic.
    """

    def __init__(self, pipeline: str, ledger_topic: str) -> None:
        self.pipeline, self.ledger_topic = pipeline, ledger_topic
        super().__init__(
            f"Ledger topic `{ledger_topic}` holds nothing of a pipeline `{pipeline}`",
            expected="the name of a pipeline that has run, by default `<dag_id>.<task_id>`",
            action="Correct the name, or the ledger topic. A new pipeline begins at its `starting_offsets`",
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
        state = "is at work on it" if is_known else "may be at work on it"
        super().__init__(
            f"Window {window} of run `{run}` is open, and attempt {attempt}, which began at {began}, {state}",
            expected="a window on which no attempt is at work",
            action="Wait until its task has ended, or end it"
            if is_known
            else "Look in Airflow whether its task is running. If it is not, confirm it with `running=False` or `--not-running`",
        )


class ReplayRefused(ChangeRefused):
    """Raised when a window cannot be replayed."""


class ResendRefused(ChangeRefused):
    """Raised when the dead letters of a window cannot be sent again. None of them was sent."""
