"""What Airflow knows of the tasks behind windows: their states, how far they are, and whether their DAG is paused."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

PROGRESS_KEY = "kafka_spark.progress"
BATCH = 200
MOST_PROGRESS_BYTES = 10_000

RUNNING = frozenset({"running", "queued", "scheduled", "restarting", "deferred", "up_for_reschedule"})
FAILED = frozenset({"failed", "up_for_retry", "upstream_failed"})


class TaskId(NamedTuple):
    """A task instance, as a window's run names it."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1

    @property
    def url(self) -> str:
        """Where Airflow shows it, relative to its base URL."""
        dag, run, task = (quote(part, safe="") for part in self[:3])
        mapped = f"/mapped/{self.map_index}" if self.map_index >= 0 else ""
        return f"dags/{dag}/runs/{run}/tasks/{task}{mapped}"


def task_of(run: str) -> TaskId | None:
    """Whose a run is, ``<dag_id>/<run_id>/<task_id>[/<map_index>]``; None for one that no task has planned.

    A run's id may hold slashes, the others may not.
    """
    dag_id, _, rest = run.partition("/")
    run_id, _, task_id = rest.rpartition("/")
    map_index = -1
    if task_id.isdecimal() and "/" in run_id:
        map_index = int(task_id)
        run_id, _, task_id = run_id.rpartition("/")
    return TaskId(dag_id, run_id, task_id, map_index) if dag_id and run_id and task_id else None


@dataclass(frozen=True)
class TaskState:
    """A task instance now.

    :param progress: what it has said of its work, None without.
    """

    state: str | None
    try_number: int = 0
    progress: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Tasks:
    """What was asked for.

    :param paused: by DAG that there is, whether it is paused.
    """

    states: Mapping[TaskId, TaskState] = field(default_factory=dict)
    paused: Mapping[str, bool] = field(default_factory=dict)


def read_states(session: Session, wanted: Collection[TaskId]) -> dict[TaskId, TaskState]:
    """The states of task instances; those that are gone are missing. One query for each :data:`BATCH` of them."""
    from airflow.models.dagrun import DagRun
    from airflow.models.task_state_store import TaskStateStoreModel as Store
    from airflow.models.taskinstance import TaskInstance as Instance
    from sqlalchemy import and_, select, tuple_

    found: dict[TaskId, TaskState] = {}
    for batch in _batches(sorted(set(wanted))):
        keys = tuple_(Instance.dag_id, Instance.run_id, Instance.task_id, Instance.map_index)
        stored = and_(
            Store.dag_run_id == DagRun.id,
            Store.task_id == Instance.task_id,
            Store.map_index == Instance.map_index,
            Store.key == PROGRESS_KEY,
        )
        query = (
            select(Instance.dag_id, Instance.run_id, Instance.task_id, Instance.map_index, Instance.state, Instance.try_number)
            .add_columns(Store.value)
            .join(DagRun, and_(DagRun.dag_id == Instance.dag_id, DagRun.run_id == Instance.run_id))
            .outerjoin(Store, stored)
            .where(keys.in_([tuple(task) for task in batch]))
        )
        for *key, state, tries, value in session.execute(query):
            found[TaskId(*key)] = TaskState(None if state is None else str(state), tries or 0, _progress(value))
    return found


def read_paused(session: Session) -> dict[str, bool]:
    """Every DAG there is, and whether it is paused."""
    from airflow.models.dag import DagModel
    from sqlalchemy import select

    return {dag_id: bool(paused) for dag_id, paused in session.execute(select(DagModel.dag_id, DagModel.is_paused))}


def _progress(value: Any) -> dict[str, Any] | None:
    """Users may edit a task's state: only what is of the right shape counts."""
    try:
        found = json.loads(value) if value and len(value) <= MOST_PROGRESS_BYTES else None
        found = json.loads(found) if isinstance(found, str) else found
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _batches(items: Sequence[TaskId]) -> Iterator[list[TaskId]]:
    left = iter(items)
    while batch := list(islice(left, BATCH)):
        yield batch


def clear(session: Session, task: TaskId) -> bool:
    """Have this one task instance run again, also though it succeeded; nothing beside it.

    :return: False when Airflow has no such task instance any more.
    :raises TaskAtWork: it is running.
    """
    from airflow.models.taskinstance import TaskInstance, clear_task_instances
    from sqlalchemy import select

    wanted = (
        TaskInstance.dag_id == task.dag_id,
        TaskInstance.run_id == task.run_id,
        TaskInstance.task_id == task.task_id,
        TaskInstance.map_index == task.map_index,
    )
    found = session.scalar(select(TaskInstance).where(*wanted))
    if found is None:
        return False
    if str(found.state) in RUNNING:
        raise TaskAtWork(str(found.state))
    clear_task_instances([found], session)
    return True


class TaskAtWork(Exception):
    """A task instance that is to be cleared is at work. Its state is the argument."""
