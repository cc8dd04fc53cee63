"""The web application of the pages: its routes, security headers, error handlers and the script. Only the API server imports it.

Every route of the API identifies the user, and returns only what that user may see.
"""

# No `from __future__ import annotations` in modules with routes, because FastAPI has to resolve their annotations.

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from airflow.api_fastapi.common.db.common import SessionDep
from airflow.api_fastapi.core_api.security import GetUserDep
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException as StarletteException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.ui.actions import ActionContext, ActionResult, parse_request, perform_action
from airflow_kafka_spark.ui.airflow_metadata import RUNNING, TaskRunning, clear_task
from airflow_kafka_spark.ui.previews import (
    MAX_DEAD_LETTERS,
    MAX_RECORDS,
    DeadLetterReader,
    RecordReader,
    make_window_preview,
    run_with_timeout,
)
from airflow_kafka_spark.ui.responses import PlainJSONResponse, RequestRefused, make_error_response, make_response
from airflow_kafka_spark.ui.views import ListQuery, UserView, find_browsable_topics, format_windows_as_csv, list_stored_windows
from airflow_kafka_spark.ui.watcher import get_watcher, make_hook
from airflow_kafka_spark.windows.model import TaskInstanceKey, TopicPartition

log = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "same-origin",
    # Responses are data and one script, never a document of their own.
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'self'",
}

E = TypeVar("E", bound=Exception)


class SecurityHeaders:
    """Middleware that adds security headers to every response, and ``no-store`` to those without a ``cache-control``."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = {name.lower() for name, _ in message.get("headers", [])}
                added = {**SECURITY_HEADERS, "Cache-Control": "no-store"}
                missing = [(k.lower().encode(), v.encode()) for k, v in added.items() if k.lower().encode() not in given]
                message["headers"] = [*message.get("headers", []), *missing]
            await send(message)

        await self.app(scope, receive, send_with_headers if scope["type"] == "http" else send)


def make_app() -> ASGIApp:
    """Return the application, to be mounted below Airflow's.

    Guarantee: every route except the script's requires an authenticated user; every response is JSON, errors included.
    """
    from airflow.api_fastapi.app import get_auth_manager

    # FastAPI's documentation pages are off, because they would need no login.
    app = FastAPI(title="Kafka pipelines", openapi_url=None, docs_url=None, redoc_url=None)
    # Airflow's own dependencies expect the auth manager on the app in which they run.
    app.state.auth_manager = get_auth_manager()
    app.include_router(router)

    @app.get("/static/bundle.js")
    def script(request: Request) -> Response:
        """Return the script of the pages. It contains no data, so it needs no login."""
        found = read_bundle()
        # `no-cache` lets the browser keep the script, and revalidate it with one small request.
        headers = {"ETag": found.etag, "Cache-Control": "no-cache"}
        known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
        if found.etag in known:
            return Response(status_code=304, headers=headers)
        return Response(found.body, media_type="text/javascript; charset=utf-8", headers=headers)

    _handle_errors(app)
    return SecurityHeaders(app)


def _handle_errors(app: FastAPI) -> None:
    def add_handler(kind: type[E], respond: Callable[[E], JSONResponse]) -> None:
        async def handle(request: Request, error: Exception) -> JSONResponse:
            assert isinstance(error, kind)
            return respond(error)

        app.add_exception_handler(kind, handle)

    add_handler(RequestRefused, make_response)
    add_handler(KafkaSparkError, make_response)
    add_handler(RequestValidationError, _respond_to_invalid)
    add_handler(StarletteException, lambda error: make_error_response(error.status_code, str(error.detail)))
    add_handler(Exception, _respond_to_failure)


def _respond_to_invalid(error: RequestValidationError) -> JSONResponse:
    wrong = "; ".join(f"`{'.'.join(map(str, found['loc'][1:]))}`: {found['msg']}" for found in error.errors())
    return make_error_response(400, f"The request is invalid: {wrong}", action="Correct the request")


def _respond_to_failure(error: Exception) -> JSONResponse:
    # The text of an unexpected error goes to the log only: it may contain what the user may not see.
    log.exception("A page of Kafka pipelines failed", exc_info=error)
    return make_error_response(500, "An unexpected error occurred", action="See the log of the API server")


# --- the script ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScriptBundle:
    """The script of all pages.

    :param body: its bytes.
    :param etag: its entity tag, quoted as in HTTP.
    """

    body: bytes
    etag: str


_bundles: dict[tuple[tuple[str, int, int], ...], ScriptBundle] = {}


def read_bundle(directory: Path = STATIC) -> ScriptBundle:
    """Return the files of ``directory`` as one script, in the order of their names. They are read again when one has changed.

    All files share one function scope, so that none of their names is visible to the page that embeds the script. Nothing is
    minified.
    """
    files = sorted(directory.glob("*.js"), key=lambda file: file.name)
    stats = [(file, file.stat()) for file in files]
    state = tuple((str(file), stat.st_mtime_ns, stat.st_size) for file, stat in stats)
    if state not in _bundles:
        parts = [b"(() => {\n'use strict';\n", *(_read_part(file) for file in files), b"})();\n"]
        body = b"".join(parts)
        _bundles.clear()
        _bundles[state] = ScriptBundle(body, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return _bundles[state]


def _read_part(file: Path) -> bytes:
    return f"// {file.name}\n".encode() + file.read_bytes().rstrip() + b"\n\n"


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
    return PlainJSONResponse(view.make_listing(ListQuery(q, status, dag_id, task_id, sort, limit, offset), run_id))


@router.get("/pipeline")
def get_pipeline(view: UserViewDep, ledger: str, name: Annotated[str, Query(alias="pipeline")]) -> PlainJSONResponse:
    """Return one pipeline."""
    return PlainJSONResponse(view.make_detail(ledger, name))


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
    return PlainJSONResponse(view.list_windows(ledger, name, before, limit, (run_id, task_id, map_index)))


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
    reported_group = item.summary.get_report_value("group_id") if item.summary else None

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
    running = any(state.state in RUNNING for state in view.read_airflow_state(item.running_tasks).states.values())
    # The group of the DAG file is used only if no report names one. Otherwise the preview and the change might differ.
    reported_group = item.summary.get_report_value("group_id") if item.summary else None
    group = None if reported_group or not item.tasks else item.tasks[0].group
    if running and action == "reset" and not order.dry_run:
        raise RequestRefused(
            409,
            "A task works on the open window of this pipeline",
            action="Wait until the task has ended, or end it. Then run it again to complete the window, or give the window up "
            'with the button "Skip"',
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
