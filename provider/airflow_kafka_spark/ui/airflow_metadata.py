"""Queries of Airflow's database: the tasks that move windows, from the serialized DAGs, and the states of task instances.

This is the only module that uses Airflow's tables, which are not a stable interface.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from airflow_kafka_spark.windows.lag import Cadence, Timetabled, Unscheduled
from airflow_kafka_spark.windows.model import TaskInstanceKey
from airflow_kafka_spark.windows.offset_specs import CommittedOffsets, parse_start, parse_stop

if TYPE_CHECKING:
    from airflow.timetables.base import DagRunInfo, Timetable
    from sqlalchemy import Select
    from sqlalchemy.orm import Session


log = logging.getLogger(__name__)

MAX_STEPS = 3
"""Maximum number of runs that are computed to find the first one after an instant. Timetables that do not align need one more."""


@dataclass(frozen=True)
class DagSchedule:
    """The schedule of a DAG, from Airflow's database.

    :param is_paused: True if the DAG is paused.
    :param next_run: time of the next run; None if none is planned, as for a DAG that only assets or users trigger.
    :param next_interval: start and end of the data interval of that run; None if it has none.
    :param timetable: its timetable; None if this process cannot load it.
    :param end: its ``end_date``; None if it has none.
    """

    is_paused: bool = False
    next_run: float | None = None
    next_interval: tuple[float, float] | None = None
    timetable: Timetable | None = None
    end: float | None = None

    @property
    def cadence(self) -> Cadence | None:
        """The times at which runs are due; None if unknown, or if the DAG runs all the time."""
        if self.is_paused or self.next_run is None:
            return Unscheduled()
        if self.timetable is None or not self.timetable.periodic:
            return None
        return Timetabled(self.run_after)

    def run_after(self, instant: float) -> float | None:
        """Return the time at which the first run after an instant is due; None if no further run is planned."""
        info = self._find_next_run(instant)
        found = [] if info is None else [info.run_after.timestamp()]
        if self.next_run is not None and self.next_run > instant:
            found.append(self.next_run)
        return min(found, default=None)

    def find_due_end(self, now: float) -> float | None:
        """Return the end of the last data interval whose run is due; None if the runs have no data intervals.

        After the DAG's end no interval is due.
        """
        if self.next_run is not None and self.next_run > now:
            interval = _check_length(self.next_interval)
        else:
            interval = _get_data_interval(self._find_next_run(now))
        if interval is None:
            return None
        last = self._end_of_last_interval()
        return interval[0] if last is None else min(interval[0], last)

    def _end_of_last_interval(self) -> float | None:
        """Return the end of the last data interval that begins before the DAG's end; None if no end limits them."""
        behind = None if self.end is None else _get_data_interval(self._find_next_run(self.end))
        if behind is None:
            return None
        start, last = behind[0] - 2 * (behind[1] - behind[0]), None
        for _ in range(2 * MAX_STEPS):
            info = self._find_next_run(start, latest=self.end)
            if info is None or (found := _get_data_interval(info)) is None:
                break
            start, last = info.run_after.timestamp(), found[1]
        return last

    def _find_next_run(self, instant: float, latest: float | None = None) -> DagRunInfo | None:
        """Return the first run after an instant, according to the timetable; None if no run follows, or if the timetable fails.

        :param latest: the end of the DAG, which Airflow passes to the timetable; None for no end.
        """
        if self.timetable is None:
            return None
        import pendulum
        from airflow.timetables.base import DagRunInfo, TimeRestriction

        at = pendulum.from_timestamp(instant)
        end = None if latest is None else pendulum.from_timestamp(latest)
        restriction = TimeRestriction(earliest=None, latest=end, catchup=True)
        try:
            interval = self.timetable.infer_manual_data_interval(run_after=at)
            last = DagRunInfo(run_after=at, data_interval=interval, partition_date=None, partition_key=None)
            for _ in range(MAX_STEPS):
                info = self.timetable.next_dagrun_info_v2(last_dagrun_info=last, restriction=restriction)
                if info is None or info.run_after.timestamp() > instant:
                    return info
                last = info
        except Exception:
            # A timetable may be the user's own code, so any error is possible.
            log.debug("Timetable %s does not return its next run", type(self.timetable).__name__, exc_info=True)
        return None


def _get_data_interval(info: DagRunInfo | None) -> tuple[float, float] | None:
    """Return start and end of the data interval of a run; None if it has none, or one without a length."""
    data = info.data_interval if info else None
    return _check_length((data.start.timestamp(), data.end.timestamp()) if data else None)


def _check_length(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return an interval; None if it has no length, as that of a timetable without data intervals."""
    return interval if interval and interval[0] < interval[1] else None


def find_end_date(data: Mapping[str, Any]) -> float | None:
    """Return the ``end_date`` of a serialized DAG; None if it has none."""
    end = data.get("dag", {}).get("end_date")
    return float(end) if isinstance(end, (int, float)) else None


def load_timetable(data: Mapping[str, Any]) -> Timetable | None:
    """Return the timetable of a serialized DAG; None if this process cannot load it, as one of a plugin that is missing here."""
    from airflow.serialization.decoders import decode_timetable

    try:
        return decode_timetable(data["dag"]["timetable"])
    except Exception:
        log.debug("The timetable of a DAG cannot be loaded", exc_info=True)
        return None


PACKAGE = "airflow_kafka_spark.operators."
PIPELINE_MODULES = frozenset(PACKAGE + name for name in ("kafka_to_kafka", "kafka_to_sink", "source_to_kafka"))
"""Modules of the operators that move windows."""
DEFAULT_CONNECTION, DEFAULT_TOPIC = "kafka_default", "airflow-windows"
DAG_BATCH = 100
"""Maximum number of DAGs that one query reads."""


@dataclass(frozen=True, order=True)
class LedgerName:
    """Connection and topic of a ledger, written ``<connection>/<topic>``. The name of a topic contains no slash."""

    connection: str
    topic: str

    def __str__(self) -> str:
        return f"{self.connection}/{self.topic}"

    @classmethod
    def parse(cls, text: str) -> LedgerName:
        """Return the ledger that ``text`` names.

        :raises ValueError: ``text`` is not ``<connection>/<topic>``.
        """
        connection, _, topic = text.strip().rpartition("/")
        if not connection or not topic:
            raise ValueError(f"`{text}` names no ledger. Expected `<kafka_conn_id>/<ledger_topic>`.")
        return cls(connection, topic)


@dataclass(frozen=True)
class PipelineTask:
    """A task that moves windows, as described by its DAG file.

    :param pipeline: name of the pipeline; None if it is known only at run time (a template, or a mapped task).
    :param topics: topics that it reads; empty if they are known only at run time.
    :param group: consumer group of the pipeline; None if it is known only at run time.
    :param source: URIs of its inputs, separated by ``", "``; empty if they are unknown.
    :param sink: URIs of its outputs, separated by ``", "``; empty if they are unknown.
    :param dead_letters: dead letter topic.
    :param max_records: limit of records per window; None for no limit.
    :param starting_offsets: starting offsets of the operator; None for its default.
    :param ending_offsets: ending offsets of the operator; None for its default.
    :param unread: arguments that are known only at run time: templates, and values that are not text.
    :param configuration: its configuration, as the text of a JSON object
        (:func:`~airflow_kafka_spark.operators.visibility.operator.describe_configuration`); empty for a mapped task, whose
        runs store it (:func:`read_configuration`).
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
    starting_offsets: str | None = None
    ending_offsets: str | None = None
    unread: tuple[str, ...] = ()
    configuration: str = ""


@dataclass(frozen=True)
class TaskError:
    """The error that ended an attempt, as its task has stored it.

    :param name: name of the error's class.
    :param message: first lines of its message.
    :param at: end of the attempt, seconds since the epoch.
    """

    name: str
    message: str
    at: float


@dataclass(frozen=True)
class FailedTask:
    """The last task instance of a task that failed, or that waits for its retry.

    :param key: the task instance.
    :param state: Airflow's name of its state.
    :param started_at: start of its last attempt, seconds since the epoch; None if it never began.
    :param ended_at: end of its last attempt, seconds since the epoch.
    :param error: the error that ended it; None if none was stored, as by a task that was killed.
    """

    key: TaskInstanceKey
    state: str
    started_at: float | None
    ended_at: float
    error: TaskError | None = None


@dataclass(frozen=True)
class Catalog:
    """All tasks that move windows, ordered by DAG and task.

    :param schedules: schedules of their DAGs, by DAG.
    :param failed: the last failed task instance of each task, by DAG and task.
    """

    tasks: tuple[PipelineTask, ...] = ()
    schedules: Mapping[str, DagSchedule] = field(default_factory=dict)
    failed: Mapping[tuple[str, str], FailedTask] = field(default_factory=dict)

    @property
    def ledgers(self) -> tuple[LedgerName, ...]:
        """The ledgers of these tasks, by name."""
        return tuple(sorted({task.ledger for task in self.tasks}))

    def group_by_pipeline(self) -> dict[tuple[LedgerName, str], tuple[PipelineTask, ...]]:
        """Return the tasks of each pipeline. More than one task of a pipeline is a mistake of the user, which the pages show."""
        found: dict[tuple[LedgerName, str], tuple[PipelineTask, ...]] = {}
        for task in self.tasks:
            if task.pipeline is not None:
                found[task.ledger, task.pipeline] = (*found.get((task.ledger, task.pipeline), ()), task)
        return found


@dataclass
class CatalogReader:
    """Reads the catalog repeatedly. Of a DAG that has not changed, only the hash is queried."""

    _hashes: dict[str, str] = field(default_factory=dict)
    _tasks: dict[str, tuple[PipelineTask, ...]] = field(default_factory=dict)
    _schedules: dict[str, DagSchedule] = field(default_factory=dict)

    def read(self, session: Session) -> Catalog:
        """Return the current catalog. A DAG whose serialized form is not understood is logged and left out."""
        hashes = read_latest_hashes(session)
        changed = sorted(dag_id for dag_id, found in hashes.items() if self._hashes.get(dag_id) != found)
        for begin in range(0, len(changed), DAG_BATCH):
            batch = changed[begin : begin + DAG_BATCH]
            for dag_id, data in read_latest_data(session, batch).items():
                self._tasks[dag_id] = _list_tasks(dag_id, data)
                if self._tasks[dag_id]:
                    self._schedules[dag_id] = DagSchedule(timetable=load_timetable(data), end=find_end_date(data))
        self._tasks = {dag_id: tasks for dag_id, tasks in self._tasks.items() if dag_id in hashes}
        self._schedules = {dag_id: found for dag_id, found in self._schedules.items() if self._tasks.get(dag_id)}
        self._hashes = hashes
        tasks = tuple(task for dag_id in sorted(self._tasks) for task in self._tasks[dag_id])
        return Catalog(tasks, read_schedules(session, self._schedules), read_failed_tasks(session, tasks))


# --- Airflow's tables ---------------------------------------------------------------------------------------------------


def _select_newest() -> tuple[Any, Any]:
    """Return the table, and the condition that selects the newest version of each DAG that is not stale."""
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


def read_latest_hashes(session: Session) -> dict[str, str]:
    """Return the hash of the newest version of each DAG."""
    from sqlalchemy import select

    table, newest = _select_newest()
    return {dag_id: found for dag_id, found in session.execute(select(table.dag_id, table.dag_hash).where(newest))}


def read_latest_data(session: Session, dag_ids: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return the serialized form of the newest version of these DAGs."""
    from sqlalchemy import select

    table, newest = _select_newest()
    rows = session.scalars(select(table).where(newest, table.dag_id.in_(dag_ids)))
    found = {row.dag_id: row.data or {} for row in rows}
    session.expunge_all()
    return found


# --- serialized tasks ---------------------------------------------------------------------------------------------------


def _list_tasks(dag_id: str, data: Mapping[str, Any]) -> tuple[PipelineTask, ...]:
    try:
        tasks = [_decode_value(task) for task in data["dag"]["tasks"]]
        return tuple(found for task in tasks if (found := parse_task(dag_id, task)))
    except (KeyError, TypeError, ValueError, AttributeError):
        log.warning("The serialized form of DAG %s is not understood: its pipelines show once they have run", dag_id)
        return ()


def parse_task(dag_id: str, task: Mapping[str, Any]) -> PipelineTask | None:
    """Return the task, or None if its operator is not one of this package that moves windows, or a subclass of one.

    Airflow serializes the template fields and the assets of a task. For other arguments the operator's defaults are assumed.

    :param task: the serialized task, decoded.
    """
    # Only operators of this package, and subclasses of them, have a configuration; a mapped task has none.
    if task.get("_task_module") not in PIPELINE_MODULES and not task.get("configuration"):
        return None
    expanded = task.get("expand_input")
    mapped = set((expanded or {}).get("value") or ()) if isinstance(expanded, Mapping) else set()
    args = {**dict(task.get("partial_kwargs") or {}), **{k: v for k, v in task.items() if k != "partial_kwargs"}}

    def find_text(name: str) -> str | None:
        value = args.get(name)
        return value if isinstance(value, str) and value and "{{" not in value and name not in mapped else None

    offsets = {name: _parse_offsets(args.get(name), parse) for name, parse in _OFFSETS.items()}
    unread = {name for name, (_, is_read) in offsets.items() if not is_read or name in mapped}
    limit = args.get("max_records")
    if "max_records" in mapped or not isinstance(limit, (int, type(None))):
        unread.add("max_records")
    inlets, outlets = _list_uris(args.get("inlets")), _list_uris(args.get("outlets"))
    task_id = str(task["task_id"])
    templated = bool(args.get("pipeline")) or bool(expanded) or bool(task.get("_is_mapped"))
    pipeline = find_text("pipeline") or (None if templated else f"{dag_id}.{task_id}")
    connection = find_text("kafka_conn_id") or _find_connection([*inlets, *outlets]) or DEFAULT_CONNECTION
    # A task that follows another pipeline has that pipeline's assets as inlets, too, after those that it reads.
    return PipelineTask(
        dag_id,
        task_id,
        LedgerName(connection, find_text("ledger_topic") or DEFAULT_TOPIC),
        pipeline,
        () if "topics" in mapped else _parse_topics(args.get("topics")),
        find_text("group_id"),
        ", ".join(inlets),
        ", ".join(outlets),
        find_text("errors_deadletterqueue_topic_name"),
        limit if isinstance(limit, int) and "max_records" not in mapped else None,
        starting_offsets=None if "starting_offsets" in mapped else offsets["starting_offsets"][0],
        ending_offsets=None if "ending_offsets" in mapped else offsets["ending_offsets"][0],
        unread=tuple(sorted(unread)),
        configuration=str(task.get("configuration") or ""),
    )


_OFFSETS: Mapping[str, Callable[[object], object]] = {"starting_offsets": parse_start, "ending_offsets": parse_stop}


def _parse_offsets(value: object, parse: Callable[[object], object]) -> tuple[str | None, bool]:
    """Return starting or ending offsets in the form of the preview, None for the default; False if only the run knows them."""
    if value == repr(CommittedOffsets()):
        return None, True
    try:
        parse(value)
    except ValueError:
        return None, False
    return (value if value is None or isinstance(value, str) else json.dumps(value)), True


def _parse_topics(value: object) -> tuple[str, ...]:
    names = [value] if isinstance(value, str) else list(value) if isinstance(value, (list, tuple)) else []
    return tuple(n for n in names if isinstance(n, str)) if all(isinstance(n, str) and "{{" not in n for n in names) else ()


def _list_uris(assets: object) -> list[str]:
    found = assets if isinstance(assets, (list, tuple)) else ()
    return [str(a["uri"]) for a in found if isinstance(a, Mapping) and a.get("uri")]


def _find_connection(uris: Iterable[str]) -> str | None:
    """Return the connection of the first URI of a topic, ``kafka://<connection>/<topic>``; None if no URI names a topic."""
    found = (uri.removeprefix("kafka://").partition("/")[0] for uri in uris if uri.startswith("kafka://"))
    return next((unquote(name) for name in found if name), None)


def _decode_value(value: object) -> Any:
    """Return ``value`` without Airflow's wrapping, ``{"__type": .., "__var": ..}``."""
    if isinstance(value, Mapping):
        if "__var" in value and "__type" in value:
            return _decode_value(value["__var"])
        return {str(key): _decode_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_decode_value(item) for item in value]
    return value


# --- task instances ----------------------------------------------------------------------------------------------------

PROGRESS_KEY, ERROR_KEY, CONFIGURATION_KEY = "kafka_spark.progress", "kafka_spark.error", "kafka_spark.configuration"
TASK_BATCH = 200
"""Maximum number of task instances that one query reads."""
MAX_STORED_BYTES = 10_000
"""Maximum size of a progress or an error in the task state store; a larger one is ignored."""
MAX_CONFIGURATION_BYTES = 100_000
"""Maximum size of a configuration there."""
MAX_FAILED = 1_000
"""Maximum number of failed task instances that one query reads."""

RUNNING = frozenset({"running", "queued", "scheduled", "restarting", "deferred", "up_for_reschedule"})
FAILED = frozenset({"failed", "up_for_retry", "upstream_failed"})


@dataclass(frozen=True)
class TaskInstanceState:
    """State of a task instance.

    :param state: Airflow's name of the state.
    :param try_number: number of the current try.
    :param progress: the progress that the task has reported; None if it has reported none.
    :param error: the error that ended its last failed attempt; None if it has stored none.
    """

    state: str | None
    try_number: int = 0
    progress: Mapping[str, Any] | None = None
    error: TaskError | None = None


@dataclass(frozen=True)
class AirflowState:
    """States that a response is made of.

    :param states: states of the task instances that still exist.
    :param paused: for every DAG, True if it is paused.
    :param failed: the last failed task instance of each task, by DAG and task.
    """

    states: Mapping[TaskInstanceKey, TaskInstanceState] = field(default_factory=dict)
    paused: Mapping[str, bool] = field(default_factory=dict)
    failed: Mapping[tuple[str, str], FailedTask] = field(default_factory=dict)


def read_task_states(session: Session, wanted: Collection[TaskInstanceKey]) -> dict[TaskInstanceKey, TaskInstanceState]:
    """Return the states of task instances, without those that no longer exist. One query reads :data:`TASK_BATCH` of them."""
    from airflow.models.dagrun import DagRun
    from airflow.models.taskinstance import TaskInstance as Instance
    from sqlalchemy import and_, select, tuple_

    found: dict[TaskInstanceKey, TaskInstanceState] = {}
    for batch in _yield_batches(sorted(set(wanted))):
        keys = tuple_(Instance.dag_id, Instance.run_id, Instance.task_id, Instance.map_index)
        query = (
            select(Instance.dag_id, Instance.run_id, Instance.task_id, Instance.map_index, Instance.state, Instance.try_number)
            .join(DagRun, and_(DagRun.dag_id == Instance.dag_id, DagRun.run_id == Instance.run_id))
            .where(keys.in_([tuple(task) for task in batch]))
        )
        for *key, state, tries, progress, failure in session.execute(_add_stored_columns(query, PROGRESS_KEY, ERROR_KEY)):
            name = None if state is None else str(state)
            found[TaskInstanceKey(*key)] = TaskInstanceState(
                name, tries or 0, _parse_json_object(progress), _parse_error(failure)
            )
    return found


def _add_stored_columns(query: Select, *keys: str) -> Select:
    """Return a query with a further column for each key of the task state store. It is NULL if the task instance has stored
    nothing, and before Airflow 3.3, which introduced the store.

    :param query: a query of task instances joined with their runs.
    """
    from airflow.models.dagrun import DagRun
    from airflow.models.taskinstance import TaskInstance as Instance
    from sqlalchemy import and_, null
    from sqlalchemy.orm import aliased

    try:
        from airflow.models.task_state_store import TaskStateStoreModel
    except ImportError:
        return query.add_columns(*(null() for _ in keys))
    for key in keys:
        store = aliased(TaskStateStoreModel)
        of_task = and_(store.task_id == Instance.task_id, store.map_index == Instance.map_index)
        is_stored = and_(store.dag_run_id == DagRun.id, of_task, store.key == key)
        query = query.add_columns(store.value).outerjoin(store, is_stored)
    return query


def read_configuration(session: Session, task: TaskInstanceKey) -> str:
    """Return the configuration that a task instance has stored, as the text of a JSON object; empty if it has stored none."""
    from airflow.models.dagrun import DagRun
    from airflow.models.taskinstance import TaskInstance as Instance
    from sqlalchemy import and_, select

    query = (
        select(Instance.state)
        .join(DagRun, and_(DagRun.dag_id == Instance.dag_id, DagRun.run_id == Instance.run_id))
        .where(Instance.dag_id == task.dag_id, Instance.run_id == task.run_id)
        .where(Instance.task_id == task.task_id, Instance.map_index == task.map_index)
    )
    found = session.execute(_add_stored_columns(query, CONFIGURATION_KEY)).first()
    configuration = _parse_json_object(found[1], MAX_CONFIGURATION_BYTES) if found else None
    return json.dumps(configuration) if configuration else ""


def read_failed_tasks(session: Session, tasks: Collection[PipelineTask]) -> dict[tuple[str, str], FailedTask]:
    """Return the last failed task instance of each task, by DAG and task, among the newest :data:`MAX_FAILED`."""
    from airflow.models.dagrun import DagRun
    from airflow.models.taskinstance import TaskInstance as Instance
    from sqlalchemy import and_, select

    names = {(task.dag_id, task.task_id) for task in tasks}
    if not names:
        return {}
    query = (
        select(Instance.dag_id, Instance.run_id, Instance.task_id, Instance.map_index, Instance.state)
        .add_columns(Instance.start_date, Instance.end_date)
        .join(DagRun, and_(DagRun.dag_id == Instance.dag_id, DagRun.run_id == Instance.run_id))
        .where(Instance.state.in_(sorted(FAILED - {"upstream_failed"})), Instance.end_date.is_not(None))
        .where(Instance.dag_id.in_(sorted({dag_id for dag_id, _ in names})))
        .where(Instance.task_id.in_(sorted({task_id for _, task_id in names})))
        .order_by(Instance.end_date.desc())
        .limit(MAX_FAILED)
    )
    found: dict[tuple[str, str], FailedTask] = {}
    for *key, state, start, end, failure in session.execute(_add_stored_columns(query, ERROR_KEY)):
        task = TaskInstanceKey(*key)
        name = (task.dag_id, task.task_id)
        if name in names and name not in found:
            began = start.timestamp() if start else None
            found[name] = FailedTask(task, str(state), began, end.timestamp(), _parse_error(failure))
    return found


def read_paused_dags(session: Session) -> dict[str, bool]:
    """Return, for every DAG, True if it is paused."""
    from airflow.models.dag import DagModel
    from sqlalchemy import select

    return {dag_id: bool(paused) for dag_id, paused in session.execute(select(DagModel.dag_id, DagModel.is_paused))}


def read_schedules(session: Session, known: Mapping[str, DagSchedule]) -> dict[str, DagSchedule]:
    """Return the schedules of DAGs.

    :param known: for each DAG, timetable and end from its serialized form.
    """
    from airflow.models.dag import DagModel
    from sqlalchemy import select

    columns = (
        DagModel.dag_id,
        DagModel.is_paused,
        DagModel.next_dagrun_create_after,
        DagModel.next_dagrun_data_interval_start,
        DagModel.next_dagrun_data_interval_end,
    )
    found = {}
    for dag_id, paused, due, start, end in session.execute(select(*columns)):
        if dag_id in known:
            found[dag_id] = replace(
                known[dag_id],
                is_paused=bool(paused),
                next_run=due.timestamp() if due else None,
                next_interval=(start.timestamp(), end.timestamp()) if start and end else None,
            )
    return found


def _parse_json_object(value: object, limit: int = MAX_STORED_BYTES) -> dict[str, Any] | None:
    """Return a JSON object that a task has stored; None if the value has another form, because users may edit the store.

    :param limit: maximum size of the value in bytes; larger ones are ignored.
    """
    try:
        found = json.loads(value) if isinstance(value, (str, bytes)) and 0 < len(value) <= limit else None
        found = json.loads(found) if isinstance(found, str) else found
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _parse_error(value: object) -> TaskError | None:
    found = _parse_json_object(value) or {}
    name, message, at = (found.get(key) for key in ("class", "message", "at"))
    if not (isinstance(name, str) and isinstance(message, str) and isinstance(at, (int, float))):
        return None
    return TaskError(name, message, float(at))


def _yield_batches(items: Sequence[TaskInstanceKey]) -> Iterator[list[TaskInstanceKey]]:
    left = iter(items)
    while batch := list(islice(left, TASK_BATCH)):
        yield batch


def clear_task(session: Session, task: TaskInstanceKey) -> bool:
    """Clear one task instance in any state, so that it runs again. Other task instances are not cleared.

    :return: False if the task instance no longer exists.
    :raises TaskRunning: the task instance has not ended yet.
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
        raise TaskRunning(str(found.state))
    clear_task_instances([found], session)
    return True


class TaskRunning(Exception):
    """Raised when a task instance that is to be cleared has not ended yet.

    :param state: Airflow's name of its state.
    """

    def __init__(self, state: str) -> None:
        super().__init__(state)
        self.state = state
