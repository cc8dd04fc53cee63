"""Routes of the API. Every route identifies the user, and returns only what that user may see."""

# No `from __future__ import annotations`: FastAPI has to resolve the annotations of the routes.

import json
from typing import Annotated, Any

from airflow.api_fastapi.common.db.common import SessionDep
from airflow.api_fastapi.core_api.security import GetUserDep
from fastapi import APIRouter, Depends, Query, Request, Response

from airflow_kafka_spark.ui.actions import ActionContext, ActionResult, parse_request, perform_action
from airflow_kafka_spark.ui.airflow_metadata import RUNNING, TaskInstanceKey, TaskRunning, clear_task
from airflow_kafka_spark.ui.previews import (
    MAX_DEAD_LETTERS,
    MAX_RECORDS,
    DeadLetterReader,
    RecordReader,
    make_window_preview,
    run_with_timeout,
)
from airflow_kafka_spark.ui.responses import PlainJSONResponse, RequestRefused
from airflow_kafka_spark.ui.views import ListQuery, UserView, find_browsable_topics, format_windows_as_csv, list_stored_windows
from airflow_kafka_spark.ui.watcher import get_watcher, make_hook
from airflow_kafka_spark.windows.model import TopicPartition

router = APIRouter(prefix="/api")

ACTION_SECONDS = 120.0
"""Maximum seconds that a request waits for an action."""
MAX_BODY = 100_000
"""Maximum size of a request's body, in bytes."""


def _make_user_view(user: GetUserDep, session: SessionDep) -> UserView:
    return UserView.of(user, session, get_watcher())


UserViewDep = Annotated[UserView, Depends(_make_user_view)]


@router.get("/pipelines")
def list_pipelines(
    view: UserViewDep,
    q: str = "",
    status: str = "",
    dag_id: str = "",
    run_id: str = "",
    task_id: str = "",
    sort: str = "pipeline",
    limit: int = 50,
    offset: int = 0,
) -> PlainJSONResponse:
    """Return the list of pipelines."""
    return PlainJSONResponse(view.listing(ListQuery(q, status, dag_id, task_id, sort, limit, offset), run_id))


@router.get("/pipeline")
def get_pipeline(view: UserViewDep, ledger: str, name: Annotated[str, Query(alias="pipeline")]) -> PlainJSONResponse:
    """Return one pipeline."""
    return PlainJSONResponse(view.detail(ledger, name))


@router.get("/windows")
def list_windows(
    view: UserViewDep,
    ledger: str,
    name: Annotated[str, Query(alias="pipeline")],
    limit: int = 50,
    before: str = "",
    run_id: str = "",
    task_id: str = "",
    map_index: int | None = None,
) -> PlainJSONResponse:
    """Return older windows of a pipeline, or the windows of one run."""
    return PlainJSONResponse(view.windows(ledger, name, before, limit, (run_id, task_id, map_index)))


@router.get("/windows.csv")
def download_windows(view: UserViewDep, ledger: str, name: Annotated[str, Query(alias="pipeline")]) -> Response:
    """Return all windows of a pipeline that the ledger holds, as a CSV file."""
    headers = {"Content-Disposition": 'attachment; filename="windows.csv"'}
    body = format_windows_as_csv(view.list_all_windows(ledger, name)).encode(errors="backslashreplace")
    return Response(body, media_type="text/csv; charset=utf-8", headers=headers)


@router.get("/records")
def read_records(
    view: UserViewDep,
    ledger: str,
    name: Annotated[str, Query(alias="pipeline")],
    topic: str,
    partition: int = 0,
    offset: int | None = None,
    limit: int = 20,
) -> PlainJSONResponse:
    """Return records of one of the pipeline's topics around an offset, by default the last ones."""
    item, watch = view.find(ledger, name)
    formats = find_browsable_topics(item).get(topic)
    if formats is None:
        raise RequestRefused(404, f"Pipeline `{name}` has no topic `{topic}`", action="Choose one of its topics")
    reader = RecordReader(TopicPartition(topic, partition), offset, min(max(limit, 1), MAX_RECORDS), formats)

    def read_records() -> dict[str, Any]:
        with make_hook(watch.name.connection) as hook:
            return reader.read(hook)

    view.release()
    return PlainJSONResponse(run_with_timeout(read_records, f"Reading {topic}-{partition}"))


@router.get("/next")
def preview_next_window(view: UserViewDep, ledger: str, name: Annotated[str, Query(alias="pipeline")]) -> PlainJSONResponse:
    """Return the window that a run would plan now."""
    from airflow_kafka_spark.control.preview import PlanOptions, Preview, preview_window

    item, watch = view.find(ledger, name)
    task = item.tasks[0] if item.tasks else None
    reported_group = item.summary.report("group_id") if item.summary else None

    def plan_next() -> Preview:
        options = PlanOptions(group_id=reported_group)
        if task:
            options = PlanOptions(
                task.topics, reported_group or task.group, task.starting_offsets, task.ending_offsets, task.max_records
            )
        with make_hook(watch.name.connection) as hook:
            return preview_window(hook, name, options, ledger_topic=watch.name.topic)

    view.release()
    return PlainJSONResponse(make_window_preview(plan_next, task.unread if task else ()))


@router.get("/dead-letters")
def read_dead_letters(
    view: UserViewDep, ledger: str, name: Annotated[str, Query(alias="pipeline")], window: str = "", limit: int = 20
) -> PlainJSONResponse:
    """Return the first dead letters of a pipeline, or of one of its windows."""
    _, watch = view.find(ledger, name)
    with watch.lock:
        snapshot = watch.snapshot.pipelines.get(name)
        found = list_stored_windows(snapshot) if snapshot else []
    chosen = [w for w in found if w.landed and (not window or window in (w.name, str(w.entry.window.number)))]
    landed = [part for w in chosen for part in w.landed]
    names = frozenset({name, *(w.entry.window.pipeline for w in chosen)})
    reader = DeadLetterReader(names, landed, min(max(limit, 1), MAX_DEAD_LETTERS))

    def read_letters() -> list[dict[str, Any]]:
        with make_hook(watch.name.connection) as hook:
            return reader.read(hook)

    view.release()
    records = run_with_timeout(read_letters, "Reading dead letters") if landed else []
    return PlainJSONResponse({"records": records, "total": sum(part.records for part in landed)})


async def _read_json_body(request: Request) -> object:
    # A form of another site can send neither this content type nor a JSON body.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise RequestRefused(400, "The content type is not `application/json`", action="Send JSON")
    raw = await request.body()
    if len(raw) > MAX_BODY:
        raise RequestRefused(400, f"The body has {len(raw):,} bytes", expected=f"at most {MAX_BODY:,}")
    try:
        return json.loads(raw)
    except ValueError:
        raise RequestRefused(400, "The body is not JSON", action="Correct the request") from None


@router.post("/actions/{action}")
def handle_action(
    view: UserViewDep, user: GetUserDep, body: Annotated[object, Depends(_read_json_body)], action: str
) -> PlainJSONResponse:
    """Change a pipeline, or describe what the change would do."""
    order = parse_request(action, body)
    item, watch = view.find(order.ledger, order.pipeline)
    if not view.access.may_edit(item.dag_ids):
        dags = ", ".join(item.dag_ids) or "all DAGs"
        raise RequestRefused(403, f"You may not edit {dags}", action="Ask for the permission to edit the pipeline's DAG")
    running = any(state.state in RUNNING for state in view.airflow(item.running_tasks).states.values())
    # The group of the DAG file is used only if no report names one. Otherwise the preview and the change might differ.
    reported_group = item.summary.report("group_id") if item.summary else None
    group = None if reported_group or not item.tasks else item.tasks[0].group
    if running and action == "reset" and not order.dry_run:
        raise RequestRefused(
            409,
            "A task works on the open window of this pipeline",
            action="Wait until the task has ended, or end it. Then run it again to complete the window, or give the window up "
            "with *Skip*",
        )
    context = ActionContext(watch.name.topic, user.get_name(), group, running)

    def carry_out() -> ActionResult:
        with make_hook(watch.name.connection) as hook:
            return perform_action(hook, order, context)

    view.release()
    try:
        result = run_with_timeout(carry_out, f"The action `{action}`", ACTION_SECONDS)
    except ValueError as error:
        raise RequestRefused(400, str(error), action="Correct the request") from None
    watch.refresh()
    more = (_clear_task(view, result.clear),) if result.clear and result.done else ()
    return PlainJSONResponse(result.to_dict(*more))


def _clear_task(view: UserView, task: TaskInstanceKey) -> str:
    """Clear the task that carries out the action when it runs again, and return what was done."""
    if not view.access.may_edit([task.dag_id]) or task.dag_id not in view.paused:
        return f"Its task was not cleared: you may not edit DAG {task.dag_id}"
    try:
        was_cleared = clear_task(view.session, task)
    except TaskRunning as error:
        return f"Its task is {error.state}: clear it once it has ended"
    if was_cleared:
        return f"Task {task.task_id} of run {task.run_id} was cleared, and runs again"
    return f"Task {task.task_id} of run {task.run_id} no longer exists: the window will not be moved"
