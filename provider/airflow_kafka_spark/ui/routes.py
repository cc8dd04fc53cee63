"""What the pages ask for. Every route knows who asks, and gives only what that user may see."""

# No `from __future__ import annotations`: FastAPI has to resolve what routes are annotated with.

import json
import math
from typing import Annotated, Any, cast

from airflow.api_fastapi.common.db.common import SessionDep
from airflow.api_fastapi.core_api.security import GetUserDep
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import JSONResponse

from airflow_kafka_spark.ui.actions import Name, Order, perform, understood
from airflow_kafka_spark.ui.answers import Refused
from airflow_kafka_spark.ui.details import windows_of
from airflow_kafka_spark.ui.live import Live
from airflow_kafka_spark.ui.previews import MOST_LETTERS, Letters, in_time, next_window
from airflow_kafka_spark.ui.tasks import RUNNING, TaskAtWork, clear
from airflow_kafka_spark.ui.views import Question
from airflow_kafka_spark.ui.watcher import make_hook, the_watcher

router = APIRouter(prefix="/api")

ACTION_SECONDS = 120.0
MOST_BODY = 100_000


def _live(user: GetUserDep, session: SessionDep) -> Live:
    return Live.of(user, session, the_watcher())


LiveDep = Annotated[Live, Depends(_live)]


class Answer(JSONResponse):
    """JSON of plain values: nothing has to be looked through once more. Names need not be valid Unicode: they are escaped."""

    def render(self, content: Any) -> bytes:
        try:
            return json.dumps(content, separators=(",", ":"), allow_nan=False, default=str).encode()
        except ValueError:
            return json.dumps(_finite(content), separators=(",", ":"), default=str).encode()


def _finite(value: Any) -> Any:
    """What somebody has written into a ledger as NaN, which is no JSON, is not known."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


@router.get("/pipelines")
def pipelines(
    live: LiveDep,
    q: str = "",
    status: str = "",
    dag_id: str = "",
    run_id: str = "",
    task_id: str = "",
    sort: str = "pipeline",
    limit: int = 50,
    offset: int = 0,
) -> Answer:
    """The list."""
    return Answer(live.listing(Question(q, status, dag_id, task_id, sort, limit, offset), run_id))


@router.get("/pipeline")
def pipeline(live: LiveDep, ledger: str, name: Annotated[str, Query(alias="pipeline")]) -> Answer:
    """One of them."""
    return Answer(live.detail(ledger, name))


@router.get("/windows")
def windows(
    live: LiveDep,
    ledger: str,
    name: Annotated[str, Query(alias="pipeline")],
    limit: int = 50,
    before: str = "",
    run_id: str = "",
    task_id: str = "",
    map_index: int | None = None,
) -> Answer:
    """Older windows, or those of one run."""
    return Answer(live.windows(ledger, name, before, limit, (run_id, task_id, map_index)))


@router.get("/next")
def next_of(live: LiveDep, ledger: str, name: Annotated[str, Query(alias="pipeline")]) -> Answer:
    """What the next window would be."""
    from airflow_kafka_spark.control.preview import Preview, preview

    item, watch = live.find(ledger, name)
    task = item.tasks[0] if item.tasks else None
    report = item.summary.report if item.summary else lambda *_: None

    def work() -> Preview:
        with make_hook(watch.name.connection) as hook:
            return preview(
                hook,
                name,
                ledger_topic=watch.name.topic,
                topics=task.topics if task else (),
                group_id=report("group_id") or (task.group if task else None),
                starting_offsets=task.starting_offsets if task else None,
                ending_offsets=task.ending_offsets if task else None,
                max_records=task.max_records if task else None,
            )

    live.release()
    return Answer(next_window(work, task.unread if task else ()))


@router.get("/dead-letters")
def dead_letters(
    live: LiveDep, ledger: str, name: Annotated[str, Query(alias="pipeline")], window: str = "", limit: int = 20
) -> Answer:
    """A look at the records that a pipeline could not use."""
    _, watch = live.find(ledger, name)
    with watch.lock:
        shelf = watch.shelves.pipelines.get(name)
        told = windows_of(shelf) if shelf else []
    mine = [t for t in told if t.landed and (not window or window in (t.name, str(t.entry.window.number)))]
    landed = [part for t in mine for part in t.landed]
    names = frozenset({name, *(t.entry.window.pipeline for t in mine)})
    letters = Letters(names, landed, min(max(limit, 1), MOST_LETTERS))

    def work() -> list[dict[str, Any]]:
        with make_hook(watch.name.connection) as hook:
            return letters.read(hook)

    live.release()
    records = in_time(work, "Reading dead letters") if landed else []
    return Answer({"records": records, "total": sum(part.records for part in landed)})


async def _body(request: Request) -> Any:
    """A form of another site can send neither this content type nor JSON with it."""
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise Refused(400, "The content type is not `application/json`", action="Send JSON")
    raw = await request.body()
    if len(raw) > MOST_BODY:
        raise Refused(400, f"The body has {len(raw):,} bytes", expected=f"at most {MOST_BODY:,}")
    try:
        return json.loads(raw)
    except ValueError:
        raise Refused(400, "The body is no JSON", action="Correct the request") from None


@router.post("/actions/{action}")
def act(live: LiveDep, user: GetUserDep, body: Annotated[Any, Depends(_body)], action: str) -> Answer:
    """Change a pipeline, or say what that would do."""
    facts = understood(action, body)
    item, watch = live.find(str(facts.pop("ledger")), str(facts["pipeline"]))
    if not live.access.may_edit(item.dag_ids):
        dags = ", ".join(item.dag_ids) or "all DAGs"
        raise Refused(403, f"You may not edit {dags}", action="Ask for the right to edit the pipeline's DAG")
    states = live.tasks(item.running_tasks).states
    running = any(found.state in RUNNING for found in states.values())
    reported = item.summary.report("group_id") if item.summary else None
    group = None if reported or not item.tasks else item.tasks[0].group
    if running and action == "reset" and not facts["dry_run"]:
        raise Refused(409, "A task is at work on the open window of this pipeline", action="Wait until it has ended, or end it")
    order = Order(cast(Name, action), ledger_topic=watch.name.topic, who=user.get_name(), group=group, running=running, **facts)

    def work() -> Any:
        with make_hook(watch.name.connection) as hook:
            return perform(hook, order)

    live.release()
    try:
        told = in_time(work, f"The action `{action}`", ACTION_SECONDS)
    except ValueError as error:
        raise Refused(400, str(error), action="Correct the request") from None
    watch.nudge()
    more = _cleared(live, told.clear) if told.clear and told.done else ()
    return Answer(told.to_dict(*more))


def _cleared(live: Live, task: Any) -> tuple[str, ...]:
    """What is to be moved once more is moved by its task, once that is cleared."""
    if not live.access.may_edit([task.dag_id]) or task.dag_id not in live.paused:
        return (f"Its task was not cleared: you may not edit DAG {task.dag_id}",)
    try:
        found = clear(live.session, task)
    except TaskAtWork as error:
        return (f"Its task is {error}: clear it once it has ended",)
    told = f"Task {task.task_id} of run {task.run_id} "
    return (told + "was cleared, and runs again",) if found else (told + "is not there any more: nothing will move the window",)
