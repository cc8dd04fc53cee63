"""Who asks for a window."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from airflow_kafka_spark.windows.tries import Tries


@dataclass(frozen=True)
class Run:
    """Who asks for a window: one task of one DAG run. Retries and clears of it are the same run.

    :param dag_id: the DAG.
    :param run_id: the DAG run.
    :param task_id: the task.
    :param map_index: index of a mapped task, -1 without mapping.
    :param interval: start and end of the DAG run's data interval, as far as it has one.
    :param tries: Airflow's counters of the task, by which a retry of it is told from a clear.
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    interval: tuple[datetime | None, datetime | None] = (None, None)
    tries: Tries = Tries()

    @classmethod
    def of(cls, context: Mapping[str, Any]) -> Run:
        ti, dag_run = context["ti"], context.get("dag_run")
        interval = (getattr(dag_run, "data_interval_start", None), getattr(dag_run, "data_interval_end", None))
        number, allowed = (getattr(ti, name, None) or 0 for name in ("try_number", "max_tries"))
        clears = getattr(dag_run, "clear_number", None)
        tries = Tries(number, allowed, -1 if clears is None else clears)
        return cls(ti.dag_id, ti.run_id, ti.task_id, getattr(ti, "map_index", -1), interval, tries)

    @property
    def id(self) -> str:
        mapped = f"/{self.map_index}" if self.map_index >= 0 else ""
        return f"{self.dag_id}/{self.run_id}/{self.task_id}{mapped}"
