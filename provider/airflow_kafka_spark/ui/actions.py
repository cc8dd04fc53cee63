"""Actions that change a pipeline from its page: reset, skip, replay, resend, pause and resume.

This module validates requests and describes results. The changes themselves, their checks and the record of who made them are in
:mod:`airflow_kafka_spark.control`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from airflow_kafka_spark.errors import KafkaSparkError, WindowOpen
from airflow_kafka_spark.ui.responses import RequestRefused
from airflow_kafka_spark.windows.model import TaskInstanceKey

if TYPE_CHECKING:
    from airflow_kafka_spark.control.base import ChangeRequest, Move
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

ActionName: TypeAlias = Literal["reset", "skip", "replay", "resend", "pause", "resume"]
ACTIONS: tuple[ActionName, ...] = ("reset", "skip", "replay", "resend", "pause", "resume")
MAX_WHY = 1_000
"""Maximum length of the reason of a change, in characters."""

ActionTable: TypeAlias = "tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]"
"""Header and rows of a table."""


@dataclass(frozen=True)
class ActionRequest:
    """Arguments of an action, as the page sent them. They are valid in form.

    :param action: name of the action.
    :param ledger: ledger of the pipeline, ``<connection>/<topic>``.
    :param pipeline: name of the pipeline.
    :param why: reason of the change, which the ledger records.
    :param dry_run: True to describe the change without making it.
    :param to: for a reset, the new position: a word, an instant in ISO 8601, or offsets by topic and partition.
    :param only: for a reset, the topics or partitions to move. Default: all.
    :param window: for a replay and for dead letters that are sent again, the number of the window.
    :param interval: the name of the data interval instead of ``window``; None to use ``window``.
    """

    action: ActionName
    ledger: str
    pipeline: str
    why: str
    dry_run: bool
    to: str | Mapping[str, Any] | None = None
    only: tuple[str, ...] = ()
    window: int | None = None
    interval: str | None = None


@dataclass(frozen=True)
class ActionContext:
    """The server's knowledge of the pipeline of a request.

    :param ledger_topic: topic of the ledger.
    :param who: name of the user in Airflow.
    :param group: consumer group that the DAG file names; None to use that of its newest window.
    :param running: True if a task works on the open window; None if that is unknown.
    """

    ledger_topic: str
    who: str
    group: str | None = None
    running: bool | None = None


@dataclass(frozen=True)
class ActionResult:
    """Description of what an action has done, or would do.

    :param done: False for a dry run.
    :param title: one sentence.
    :param lines: further sentences.
    :param header: header of the table.
    :param rows: rows of the table; empty for no table.
    :param clear: task instance that has to be cleared, so that it carries out the action; None if no task has to be.
    """

    done: bool
    title: str
    lines: tuple[str, ...]
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    clear: TaskInstanceKey | None = None

    def to_dict(self, *more: str) -> dict[str, Any]:
        """Return the result as JSON.

        :param more: lines to add.
        """
        table = {"header": list(self.header), "rows": [list(r) for r in self.rows]} if self.rows else None
        return {"done": self.done, "title": self.title, "lines": [*self.lines, *more], "table": table}


# --- requests -----------------------------------------------------------------------------------------------------------


def parse_request(action: str, body: object) -> ActionRequest:
    """Return the arguments of an action.

    :param action: name of the action, from the path.
    :param body: decoded body of the request.
    :raises RequestRefused: 400 if the body is invalid, 404 if there is no such action.
    """
    if action not in ACTIONS:
        raise RequestRefused(404, f"There is no action `{action}`", expected=f"one of {', '.join(ACTIONS)}")
    if not isinstance(body, Mapping):
        raise _make_invalid_error("The body is not a JSON object")
    ledger, pipeline, why = (_get_required_text(body, name) for name in ("ledger", "pipeline", "why"))
    if len(why) > MAX_WHY:
        raise _make_invalid_error(f"`why` has {len(why):,} characters", f"at most {MAX_WHY:,}")
    dry_run = body.get("dry_run", False)
    if not isinstance(dry_run, bool):
        raise _make_invalid_error("`dry_run` is neither true nor false")
    window, interval, to = (body.get(name) for name in ("window", "name", "to"))
    if interval is not None and not isinstance(interval, str):
        raise _make_invalid_error("`name` is not a string")
    if action in ("replay", "resend") and (not isinstance(window, int) or isinstance(window, bool)) and not interval:
        raise _make_invalid_error("`window` is not a number", "the number of a window, or the `name` of a data interval")
    if action == "reset" and not isinstance(to, (str, Mapping)):
        raise _make_invalid_error(
            "`to` is missing", '"earliest", "latest", a time in ISO 8601, or offsets as {"orders": {"0": 500}}'
        )
    return ActionRequest(action, ledger, pipeline, why, dry_run, to, _list_chosen_topics(action, body), window, interval)


def _get_required_text(body: Mapping[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value.strip():
        raise _make_invalid_error(f"`{name}` is missing", "a string that is not empty")
    return value


def _list_chosen_topics(action: str, body: Mapping[str, Any]) -> tuple[str, ...]:
    only = body.get("only") or []
    if not isinstance(only, list) or not all(isinstance(item, str) for item in only):
        raise _make_invalid_error("`only` is not a list of strings", "topics, or partitions of them as `orders:0,2`")
    if only and action != "reset":
        raise _make_invalid_error(f"`{action}` takes no `only`", "`only` with the action `reset` alone")
    return tuple(only)


def _make_invalid_error(found: str, expected: str = "") -> RequestRefused:
    return RequestRefused(400, found, expected=expected, action="Correct the request")


# --- actions ------------------------------------------------------------------------------------------------------------


def perform_action(hook: KafkaHook, request: ActionRequest, context: ActionContext) -> ActionResult:
    """Carry out an action, or describe what it would do.

    :raises KafkaSparkError: the action is refused, or Kafka does not answer.
    :raises ValueError: an argument is invalid.
    """
    return _ACTIONS[request.action](hook, request, context)


def _make_change_request(request: ActionRequest, context: ActionContext) -> ChangeRequest:
    from airflow_kafka_spark.control.base import ChangeRequest

    return ChangeRequest(request.pipeline, request.why, context.who, context.ledger_topic, request.dry_run)


def _find_unknown_group(hook: KafkaHook, request: ActionRequest, context: ActionContext) -> str | None:
    """Return the group of the DAG file, if the ledger does not know the group of the pipeline; otherwise None."""
    from airflow_kafka_spark.control.pipelines import find_group, read_pipeline

    if not context.group:
        return None
    memory = read_pipeline(hook, request.pipeline, context.ledger_topic).memory
    return None if find_group(memory) else context.group


def _reset(hook: KafkaHook, request: ActionRequest, context: ActionContext) -> ActionResult:
    from airflow_kafka_spark.control.position import reset

    try:
        group = _find_unknown_group(hook, request, context)
        found = reset(hook, _make_change_request(request, context), request.to, only=request.only, group_id=group)
    except WindowOpen as error:
        raise _add_skip_remedy(error) from None
    did = "would be moved" if request.dry_run else f"was moved (change {found.change})"
    lines = (f"Its group {found.group_id} moves with it", *found.warnings)
    return ActionResult(not request.dry_run, f"Pipeline {request.pipeline} {did}", lines, *_make_moves_table(found.moves))


def _add_skip_remedy(error: WindowOpen) -> KafkaSparkError:
    """Return the error with the remedy that a page offers, instead of an argument that a page does not have."""
    return KafkaSparkError(
        error.found,
        expected=error.expected,
        action="Run the task again, which completes the window, and then repeat this. Or give the window up with the button "
        '"Skip": if its sink has committed it already, its records stay there',
    )


def _skip(hook: KafkaHook, request: ActionRequest, context: ActionContext) -> ActionResult:
    from airflow_kafka_spark.control.position import skip

    group = _find_unknown_group(hook, request, context)
    found = skip(hook, _make_change_request(request, context), group_id=group, running=context.running)
    what = f"Window {found.given_up[0].number}" if found.given_up else "The backlog"
    title = f"{what} of pipeline {request.pipeline} " + ("would be skipped" if request.dry_run else "was skipped")
    lines = (f"{found.skipped_offsets:,} offsets in all: an upper bound of the records", *found.warnings)
    return ActionResult(not request.dry_run, title, lines, *_make_moves_table(found.moves))


def _make_moves_table(moves: Sequence[Move]) -> ActionTable:
    rows = tuple((f"{m.topic}-{m.partition}", "-" if m.before is None else str(m.before), str(m.after)) for m in moves)
    return ("partition", "from", "to"), rows


def _replay(hook: KafkaHook, request: ActionRequest, context: ActionContext) -> ActionResult:
    from airflow_kafka_spark.control.replay import replay

    window_number = None if request.interval else request.window
    found = replay(hook, _make_change_request(request, context), window=window_number, name=request.interval)
    did = "would be moved once more" if request.dry_run else "is moved once more"
    window = found.window
    assert window is not None, "a replay names its window"
    title = f"Window {window.interval or window.number} of pipeline {request.pipeline} {did}"
    rows = tuple((f"{r.topic}-{r.partition}", str(r.start), str(r.end)) for r in window.ranges)
    clear = TaskInstanceKey.parse(window.run)
    return ActionResult(not request.dry_run, title, found.warnings, ("partition", "start", "end"), rows, clear)


def _resend_dead_letters(hook: KafkaHook, request: ActionRequest, context: ActionContext) -> ActionResult:
    from airflow_kafka_spark.control.replay import resend_dead_letters

    window_number = None if request.interval else request.window
    found = resend_dead_letters(hook, _make_change_request(request, context), window=window_number, name=request.interval)
    total = sum(part.records for part in found.sent_again)
    what = f"{total:,} dead letter{'' if total == 1 else 's'} of window {found.sent_of} of pipeline {request.pipeline}"
    did = ("would be" if request.dry_run else "were" if total != 1 else "was") + " sent again"
    title = f"{what} {did}" if found.changed else f"No dead letters are left to send again of window {found.sent_of}"
    rows = tuple((f"{part.topic}-{part.partition}", f"{part.records:,}") for part in found.sent_again)
    return ActionResult(not request.dry_run, title, found.warnings, ("to partition", "records"), rows)


def _pause_or_resume(hook: KafkaHook, request: ActionRequest, context: ActionContext) -> ActionResult:
    from airflow_kafka_spark.control.lifecycle import pause, resume

    change = pause if request.action == "pause" else resume
    found = change(hook, _make_change_request(request, context))
    verb = "paused" if request.action == "pause" else "resumed"
    title = f"Pipeline {request.pipeline} " + (f"would be {verb}" if request.dry_run else f"is {verb}")
    return ActionResult(not request.dry_run, title, found.warnings)


_ACTIONS: Mapping[ActionName, Callable[[KafkaHook, ActionRequest, ActionContext], ActionResult]] = {
    "reset": _reset,
    "skip": _skip,
    "replay": _replay,
    "resend": _resend_dead_letters,
    "pause": _pause_or_resume,
    "resume": _pause_or_resume,
}
