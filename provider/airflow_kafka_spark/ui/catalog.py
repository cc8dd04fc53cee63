"""Which tasks of this package there are, and which ledgers they keep: read from the DAGs as Airflow has serialized them.

Beside :mod:`~airflow_kafka_spark.ui.tasks` the only module that knows Airflow's tables, which are no stable interface.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

log = logging.getLogger(__name__)

PACKAGE = "airflow_kafka_spark.operators."
NOT_PIPELINES = frozenset({PACKAGE + "control"})
DEFAULT_CONNECTION, DEFAULT_TOPIC = "kafka_default", "airflow-windows"
BATCH = 100
"""DAGs that are read from the database at once."""


@dataclass(frozen=True, order=True)
class LedgerName:
    """Where pipelines are remembered, written ``<connection>/<topic>``; a topic's name holds no slash."""

    connection: str
    topic: str

    def __str__(self) -> str:
        return f"{self.connection}/{self.topic}"

    @classmethod
    def parse(cls, text: str) -> LedgerName:
        """:raises ValueError: it is no such name."""
        connection, _, topic = text.strip().rpartition("/")
        if not connection or not topic:
            raise ValueError(f"`{text}` names no ledger. Expected `<kafka_conn_id>/<ledger_topic>`.")
        return cls(connection, topic)


@dataclass(frozen=True)
class Task:
    """A task that moves windows, as far as its DAG file says so.

    :param pipeline: None where that is decided when it runs: a template, or a mapped task.
    :param topics: empty where they are decided when it runs.
    :param source: URI of what it reads, empty where that is not known.
    :param dead_letters: its dead letter topic.
    """

    dag_id: str
    task_id: str
    ledger: LedgerName
    pipeline: str | None
    topics: tuple[str, ...] = ()
    group: str | None = None
    source: str = ""
    sink: str = ""
    dead_letters: str | None = None
    max_records: int | None = None


@dataclass(frozen=True)
class Catalog:
    """All of them, in the order of DAG and task."""

    tasks: tuple[Task, ...] = ()

    @property
    def ledgers(self) -> tuple[LedgerName, ...]:
        return tuple(sorted({task.ledger for task in self.tasks}))

    def by_pipeline(self) -> dict[tuple[LedgerName, str], tuple[Task, ...]]:
        """Tasks by the pipeline that they say they move; more than one is a mistake, and shown as it is."""
        found: dict[tuple[LedgerName, str], tuple[Task, ...]] = {}
        for task in self.tasks:
            if task.pipeline is not None:
                found[task.ledger, task.pipeline] = (*found.get((task.ledger, task.pipeline), ()), task)
        return found


@dataclass
class CatalogReader:
    """Reads the catalog again and again: of DAGs that have not changed only the hash is asked for."""

    _hashes: dict[str, str] = field(default_factory=dict)
    _tasks: dict[str, tuple[Task, ...]] = field(default_factory=dict)

    def read(self, session: Session) -> Catalog:
        """What there is now. A DAG that cannot be understood is left out, and logged."""
        hashes = latest_hashes(session)
        changed = sorted(dag_id for dag_id, found in hashes.items() if self._hashes.get(dag_id) != found)
        for begin in range(0, len(changed), BATCH):
            batch = changed[begin : begin + BATCH]
            for dag_id, data in latest_data(session, batch).items():
                self._tasks[dag_id] = _tasks_of(dag_id, data)
        self._tasks = {dag_id: tasks for dag_id, tasks in self._tasks.items() if dag_id in hashes}
        self._hashes = hashes
        return Catalog(tuple(task for dag_id in sorted(self._tasks) for task in self._tasks[dag_id]))


# --- Airflow's tables ---------------------------------------------------------------------------------------------------


def _newest() -> tuple[Any, Any]:
    """The table, and the condition for the newest version of each DAG that is not gone."""
    from airflow.models.dag import DagModel
    from airflow.models.dag_version import DagVersion
    from airflow.models.serialized_dag import SerializedDagModel
    from sqlalchemy import and_, func, select

    newest = (
        select(DagVersion.dag_id, func.max(DagVersion.version_number).label("number"))
        .join(SerializedDagModel, SerializedDagModel.dag_version_id == DagVersion.id)
        .group_by(DagVersion.dag_id)
        .subquery()
    )
    joined = (
        select(DagVersion.id)
        .join(newest, and_(DagVersion.dag_id == newest.c.dag_id, DagVersion.version_number == newest.c.number))
        .join(DagModel, and_(DagModel.dag_id == DagVersion.dag_id, DagModel.is_stale.is_(False)))
    )
    return SerializedDagModel, SerializedDagModel.dag_version_id.in_(joined)


def latest_hashes(session: Session) -> dict[str, str]:
    """The hash of each DAG as it is now."""
    from sqlalchemy import select

    table, newest = _newest()
    return {dag_id: found for dag_id, found in session.execute(select(table.dag_id, table.dag_hash).where(newest))}


def latest_data(session: Session, dag_ids: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """The serialized form of these DAGs as they are now."""
    from sqlalchemy import select

    table, newest = _newest()
    rows = session.scalars(select(table).where(newest, table.dag_id.in_(dag_ids)))
    found = {row.dag_id: row.data or {} for row in rows}
    session.expunge_all()
    return found


# --- what a serialized task says ----------------------------------------------------------------------------------------


def _tasks_of(dag_id: str, data: Mapping[str, Any]) -> tuple[Task, ...]:
    try:
        tasks = [_decoded(task) for task in data["dag"]["tasks"]]
        return tuple(found for task in tasks if (found := task_from(dag_id, task)))
    except (KeyError, TypeError, ValueError, AttributeError):
        log.warning("The serialized form of DAG %s is not understood: its pipelines show once they have run", dag_id)
        return ()


def task_from(dag_id: str, task: Mapping[str, Any]) -> Task | None:
    """The task, None when it is none of ours.

    :param task: as Airflow serializes it, decoded. What is a template field there or says so in its assets is known; for the
        rest the operator's defaults are taken.
    """
    module = str(task.get("_task_module", ""))
    if not module.startswith(PACKAGE) or module in NOT_PIPELINES:
        return None
    expanded = task.get("expand_input")
    mapped = set((expanded or {}).get("value") or ()) if isinstance(expanded, Mapping) else set()
    said = {**dict(task.get("partial_kwargs") or {}), **{k: v for k, v in task.items() if k != "partial_kwargs"}}

    def text(name: str) -> str | None:
        value = said.get(name)
        return value if isinstance(value, str) and value and "{{" not in value and name not in mapped else None

    inlets, outlets = _uris(said.get("inlets")), _uris(said.get("outlets"))
    task_id = str(task["task_id"])
    templated = bool(said.get("pipeline")) or bool(expanded) or bool(task.get("_is_mapped"))
    pipeline = text("pipeline") or (None if templated else f"{dag_id}.{task_id}")
    connection = text("kafka_conn_id") or _connection([*inlets, *outlets]) or DEFAULT_CONNECTION
    # What follows another pipeline names that one's assets, too; what it reads comes first.
    return Task(
        dag_id,
        task_id,
        LedgerName(connection, text("ledger_topic") or DEFAULT_TOPIC),
        pipeline,
        () if "topics" in mapped else _topics(said.get("topics")),
        text("group_id"),
        ", ".join(inlets),
        ", ".join(outlets),
        text("errors_deadletterqueue_topic_name"),
        said["max_records"] if isinstance(said.get("max_records"), int) else None,
    )


def _topics(value: Any) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else []
    return tuple(n for n in names if isinstance(n, str)) if all(isinstance(n, str) and "{{" not in n for n in names) else ()


def _uris(assets: Any) -> list[str]:
    return [str(a["uri"]) for a in assets or () if isinstance(a, Mapping) and a.get("uri")]


def _connection(uris: Iterable[str]) -> str | None:
    """Topics' assets are called ``kafka://<connection>/<topic>``."""
    found = (uri.removeprefix("kafka://").partition("/")[0] for uri in uris if uri.startswith("kafka://"))
    return next((unquote(name) for name in found if name), None)


def _decoded(value: Any) -> Any:
    """Airflow's ``{"__type": .., "__var": ..}`` without its wrapping."""
    if isinstance(value, Mapping):
        if "__var" in value and "__type" in value:
            return _decoded(value["__var"])
        return {str(key): _decoded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_decoded(item) for item in value]
    return value
