"""Wait until an upstream pipeline has completed a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.sensors.base import KafkaSensor

if TYPE_CHECKING:
    from airflow_kafka_spark.triggers.window import KafkaWindowTrigger


class KafkaWindowSensor(KafkaSensor):
    """Waits until another pipeline has completed a window, as its ledger says.

    Which one: of ``run`` (or ``external_task_id``), ``after`` and ``since`` all that are given have to hold. If none is, it is
    any window that was completed since this DAG run was due (``run_after``). Who finishes a window does not matter: a window
    belongs to the run that planned it. The ledger remembers ``keep_windows`` of them.

    Returns ``pipeline``, ``window`` (its number as text, or the name of its data interval), ``run`` and its ``report``.

    :param pipeline: the upstream pipeline; with ``external_task_id`` it may be left out: ``<dag_id>.<task_id>``.
    :param run: the task that planned the window, as ``<dag_id>/<run_id>/<task_id>``.
    :param external_task_id: the same, of the run of this moment: of this DAG run, or of that run of another DAG whose id
        carries the same moment (two scheduled DAGs of one schedule).
    :param external_dag_id: the DAG of ``external_task_id``; default this one.
    :param after: a window's number, as from another window's report: any window behind it.
    :param since: any window that was completed at or after this moment.
    :param ledger_topic: where the upstream pipeline has its ledger.
    :param kwargs: of :class:`~airflow_kafka_spark.sensors.base.KafkaSensor`.
    """

    template_fields: Sequence[str] = (
        "kafka_conn_id",
        "pipeline",
        "run",
        "external_task_id",
        "external_dag_id",
        "after",
        "since",
        "ledger_topic",
    )

    def __init__(
        self,
        *,
        pipeline: str | None = None,
        run: str | None = None,
        external_task_id: str | None = None,
        external_dag_id: str | None = None,
        after: int | str | None = None,
        since: datetime | str | None = None,
        ledger_topic: str = "airflow-windows",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.pipeline = pipeline
        self.run = run
        self.external_task_id = external_task_id
        self.external_dag_id = external_dag_id
        self.after = after
        self.since = since
        self.ledger_topic = ledger_topic

    def make_trigger(self, context: Mapping[str, Any], **options: Any) -> KafkaWindowTrigger:
        from airflow_kafka_spark.triggers.base import raise_for
        from airflow_kafka_spark.triggers.window import KafkaWindowTrigger, WindowWatch

        ti, run, pipeline, since = context["ti"], self.run, self.pipeline, self.since
        problems = self._problems()
        if self.external_task_id:
            dag_id = self.external_dag_id or ti.dag_id
            run = run or f"{dag_id}/{ti.run_id}/{self.external_task_id}"
            pipeline = pipeline or f"{dag_id}.{self.external_task_id}"
        if not run and self.after is None and since is None:
            since = getattr(context.get("dag_run"), "run_after", None)
        watched: dict[str, Any] = {
            "pipeline": pipeline or "",
            "run": run,
            "after": self.after,
            "since": since,
            "ledger_topic": self.ledger_topic,
        }
        if problems:
            named = {problem.where for problem in problems}
            more = WindowWatch(**{**watched, **({"after": 0} if "after" in named else {})}).problems()
            raise_for([*problems, *(problem for problem in more if problem.where not in named)])
        return KafkaWindowTrigger(**watched, **options)

    def _problems(self) -> list[Problem]:
        problems = []
        if self.run and (self.external_task_id or self.external_dag_id):
            problems.append(Problem("run", "`run` and `external_task_id` are given together", "Give one of them"))
        if self.external_dag_id and not self.external_task_id:
            problems.append(Problem("external_dag_id", "it is given without a task", "Give `external_task_id` as well"))
        if isinstance(self.after, str) and not self.after.strip().isdecimal():
            # A template that found nothing: every window there is would do.
            problems.append(Problem("after", f"`{self.after}` is not a window's number"))
        return problems
