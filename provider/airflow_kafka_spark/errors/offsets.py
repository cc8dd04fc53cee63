"""Where windows begin and stop, offset control, and sensors."""

from __future__ import annotations

from airflow_kafka_spark.errors.base import KafkaSparkError
from airflow_kafka_spark.errors.planning import PlanError


class BoundRefused(PlanError):
    """Offsets to begin or to stop at that do not fit the topics."""


class ResetRefused(KafkaSparkError):
    """A pipeline's offsets cannot be changed as asked; nothing was changed."""


class PipelineUnknown(ResetRefused):
    """The ledger holds nothing of a pipeline of this name."""

    def __init__(self, pipeline: str, ledger_topic: str) -> None:
        self.pipeline, self.ledger_topic = pipeline, ledger_topic
        super().__init__(
            f"Ledger topic `{ledger_topic}` holds nothing of a pipeline `{pipeline}`",
            expected="the name of a pipeline that has run, by default `<dag_id>.<task_id>`",
            action="Correct the name, or the ledger topic. Where a new pipeline begins is said by its `starting_offsets`",
        )


class WindowOpen(ResetRefused):
    """A window of the pipeline is planned and not complete: somebody may be working on it.

    :param run: the run that planned it.
    """

    def __init__(self, window: str, run: str, planned_at: str) -> None:
        self.window, self.run, self.planned_at = window, run, planned_at
        super().__init__(
            f"Window {window} is open: run `{run}` planned it at {planned_at}, and it is not complete",
            expected="a pipeline that has no open window",
            action="Run the task again, which finishes the window, and then repeat this. Or give it up with `discard_open`: if "
            "its sink has taken it already, its records stay there",
        )


class AttemptAtWork(ResetRefused):
    """A window is to be given up on which somebody is at work, as far as is known.

    :param run: the run that planned it.
    :param attempt: how many attempts have worked on it.
    :param began: when the last of them began, UTC.
    :param is_known: whether it is known that it is at work; False when nobody has said that it is not.
    """

    def __init__(self, window: str, run: str, attempt: int, began: str, is_known: bool) -> None:
        self.window, self.run, self.attempt, self.began, self.is_known = window, run, attempt, began, is_known
        told = "is at work on it" if is_known else "may be at work on it"
        super().__init__(
            f"Window {window} of run `{run}` is open, and attempt {attempt}, which began at {began}, {told}",
            expected="a window on which nobody is at work",
            action="Wait until its task has ended, or end it"
            if is_known
            else "See in Airflow whether its task is running; if it is not, say so (`running=False`, `--not-running`)",
        )


class ReplayRefused(ResetRefused):
    """A window cannot be moved once more."""


class ConsumerUnwell(KafkaSparkError):
    """A consumer that is waited for has a status that the user does not want to wait through.

    :param status: as ``STOP``.
    """

    def __init__(self, consumer: str, status: str, reason: str, lag: str) -> None:
        self.consumer, self.status, self.reason = consumer, status, reason
        super().__init__(
            f"{consumer[:1].upper()}{consumer[1:]} has the status {status}: {reason}. {lag[:1].upper()}{lag[1:]}",
            expected="a consumer that works the backlog off",
            action="See why it does not, or take the status out of `fail_on`",
        )
