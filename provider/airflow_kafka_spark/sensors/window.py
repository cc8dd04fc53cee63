"""Wait until an upstream pipeline has completed a window."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import Problem
from airflow_kafka_spark.sensors.base import DEFAULT_DEFERRABLE, KafkaSensor

if TYPE_CHECKING:
    from airflow_kafka_spark.triggers.base import Polling
    from airflow_kafka_spark.triggers.window import KafkaWindowTrigger


class KafkaWindowSensor(KafkaSensor):
    """Waits until another pipeline has completed a window, according to its ledger.

    The window has to meet all of ``run`` (or ``external_task_id``), ``after`` and ``since`` that are given. If none is given, it
    is any window that was completed since this DAG run was due (``run_after``). A window belongs to the run that planned it, even
    if another run has finished it. The ledger keeps the last ``keep_windows`` windows.

    Returns ``pipeline``, ``window`` (its number as text, or the name of its data interval), ``run`` and its ``report``.

    :param pipeline: name of the upstream pipeline. Default None: with ``external_task_id``, it is ``<dag_id>.<task_id>``.
    :param run: run that planned the window, as ``<dag_id>/<run_id>/<task_id>``; default None, any run.
    :param external_task_id: task that planned the window, in the run of this DAG, or in the run of ``external_dag_id`` that has
        the same run id; default None.
    :param external_dag_id: DAG of ``external_task_id``; default: this DAG.
    :param after: lower bound of the window's number, exclusive, for example from a report; default None.
    :param since: earliest time of completion, a ``datetime`` or text in ISO 8601; default None.
    :param ledger_topic: topic that contains the ledger of the pipeline; default ``airflow-windows``.
    :param kafka_conn_id: Airflow connection of type ``kafka``; default ``kafka_default``.
    :param deferrable: True waits in the triggerer, False in a worker; default: Airflow's ``[operators] default_deferrable``.
    :param retry_timeout: seconds (or a ``timedelta``) for which brokers may be down before the sensor fails; default 300. At most
        ``timeout``.
    :param wait_for_topic: True waits for a topic that does not exist; default False: such a topic fails the sensor at once.
    :param kwargs: arguments of Airflow's ``BaseSensorOperator``: ``poke_interval``, ``timeout``, ``mode``, ``soft_fail`` and
        others.
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
        kafka_conn_id: str = "kafka_default",
        deferrable: bool = DEFAULT_DEFERRABLE,
        retry_timeout: float | timedelta = 300.0,
        wait_for_topic: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            kafka_conn_id=kafka_conn_id,
            deferrable=deferrable,
            retry_timeout=retry_timeout,
            wait_for_topic=wait_for_topic,
            **kwargs,
        )
        self.pipeline = pipeline
        self.run = run
        self.external_task_id = external_task_id
        self.external_dag_id = external_dag_id
        self.after = after
        self.since = since
        self.ledger_topic = ledger_topic

    def make_trigger(self, context: Mapping[str, Any], polling: Polling) -> KafkaWindowTrigger:
        from airflow_kafka_spark.triggers.base import raise_problems
        from airflow_kafka_spark.triggers.window import KafkaWindowTrigger, WindowProbe

        ti, run, pipeline, since = context["ti"], self.run, self.pipeline, self.since
        problems = self._argument_problems()
        if self.external_task_id:
            dag_id = self.external_dag_id or ti.dag_id
            run = run or f"{dag_id}/{ti.run_id}/{self.external_task_id}"
            pipeline = pipeline or f"{dag_id}.{self.external_task_id}"
        if not run and self.after is None and since is None:
            since = getattr(context.get("dag_run"), "run_after", None)
        if problems:
            named = {problem.where for problem in problems}
            after = 0 if "after" in named else self.after
            probe = WindowProbe(pipeline=pipeline or "", run=run, after=after, since=since, ledger_topic=self.ledger_topic)
            raise_problems([*problems, *(problem for problem in probe.problems() if problem.where not in named)])
        return KafkaWindowTrigger(
            pipeline=pipeline or "",
            run=run,
            after=self.after,
            since=since,
            ledger_topic=self.ledger_topic,
            **asdict(polling),
        )

    def _argument_problems(self) -> list[Problem]:
        problems = []
        if self.run and (self.external_task_id or self.external_dag_id):
            problems.append(Problem("run", "`run` and `external_task_id` are given together", "Give one of them"))
        if self.external_dag_id and not self.external_task_id:
            problems.append(Problem("external_dag_id", "it is given without a task", "Give `external_task_id` as well"))
        if isinstance(self.after, str) and not self.after.strip().isdecimal():
            # A template has rendered nothing. Without this check, any window would match.
            problems.append(Problem("after", f"`{self.after}` is not a window's number"))
        return problems
