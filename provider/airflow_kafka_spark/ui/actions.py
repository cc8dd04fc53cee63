"""What may be done with a pipeline from its page. Each action is a function of :mod:`airflow_kafka_spark.control`, which records
who did it and why, and refuses what must not be done; here it is only understood, called and told."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from airflow_kafka_spark.ui.answers import Refused
from airflow_kafka_spark.ui.tasks import TaskId

if TYPE_CHECKING:
    from airflow_kafka_spark.control.result import Move
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

Name = Literal["reset", "skip", "replay", "pause", "resume"]
NAMES: tuple[Name, ...] = ("reset", "skip", "replay", "pause", "resume")
MOST_WHY = 1_000


@dataclass(frozen=True)
class Order:
    """What somebody wants.

    :param who: the name of Airflow's user.
    :param group: the group that the pipeline's DAG file names; None to take that of its last report.
    :param running: whether a task is at work on its open window; None where that is not known.
    """

    action: Name
    pipeline: str
    ledger_topic: str
    who: str
    why: str
    dry_run: bool
    to: Any = None
    only: tuple[str, ...] = ()
    window: int | None = None
    name: str | None = None
    group: str | None = None
    running: bool | None = None


@dataclass(frozen=True)
class Told:
    """What was done, or would be, for people.

    :param clear: the task that has to be cleared for it.
    """

    done: bool
    title: str
    lines: tuple[str, ...]
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    clear: TaskId | None = None

    def to_dict(self, *more: str) -> dict[str, Any]:
        """As the pages read it.

        :param more: further lines.
        """
        table = {"header": list(self.header), "rows": [list(r) for r in self.rows]} if self.rows else None
        return {"done": self.done, "title": self.title, "lines": [*self.lines, *more], "table": table}


def understood(action: str, body: Any) -> dict[str, Any]:
    """The facts of a request's body.

    :raises Refused: 400 for what cannot be understood, 404 for an action that there is not.
    """
    if action not in NAMES:
        raise Refused(404, f"There is no action `{action}`", expected=f"one of {', '.join(NAMES)}")
    if not isinstance(body, Mapping):
        raise _bad("The body is no JSON object")
    return {**_who_and_why(body), **_places(action, body)}


def _who_and_why(body: Mapping[str, Any]) -> dict[str, Any]:
    facts = {name: body.get(name) for name in ("ledger", "pipeline", "why")}
    for name, value in facts.items():
        if not isinstance(value, str) or not value.strip():
            raise _bad(f"`{name}` is missing", "a text that is not empty")
    if len(str(facts["why"])) > MOST_WHY:
        raise _bad(f"`why` has {len(str(facts['why'])):,} characters", f"at most {MOST_WHY:,}")
    dry_run = body.get("dry_run", False)
    if not isinstance(dry_run, bool):
        raise _bad("`dry_run` is neither true nor false")
    return {**facts, "dry_run": dry_run}


def _places(action: str, body: Mapping[str, Any]) -> dict[str, Any]:
    only, window, interval, to = (body.get(name) for name in ("only", "window", "name", "to"))
    only = only or []
    if not isinstance(only, list) or not all(isinstance(item, str) for item in only):
        raise _bad("`only` is no list of texts", "topics, or partitions of them as `orders:0,2`")
    if only and action != "reset":
        raise _bad(f"`only` is nothing that `{action}` knows of", "all partitions; a reset may move single ones")
    if interval is not None and not isinstance(interval, str):
        raise _bad("`name` is no text")
    if action == "replay" and (not isinstance(window, int) or isinstance(window, bool)) and not interval:
        raise _bad("`window` is no number", "the number of a window, or the `name` of a data interval")
    if action == "reset" and not isinstance(to, (str, Mapping)):
        raise _bad("`to` is missing", '"earliest", "latest", a time in ISO 8601, or offsets as {"orders": {"0": 500}}')
    return {"only": tuple(only), "window": window, "name": interval, "to": to}


def _bad(found: str, expected: str = "") -> Refused:
    return Refused(400, found, expected=expected, action="Correct the request")


def perform(hook: KafkaHook, order: Order) -> Told:
    """Do it, or say what would be done.

    :raises KafkaSparkError: it is refused, or Kafka does not answer.
    :raises ValueError: it cannot be understood.
    """
    return {"reset": _reset, "skip": _skip, "replay": _replay, "pause": _pause, "resume": _pause}[order.action](hook, order)


def _common(order: Order) -> dict[str, Any]:
    return {"why": order.why, "who": order.who, "ledger_topic": order.ledger_topic, "dry_run": order.dry_run}


def _reset(hook: KafkaHook, order: Order) -> Told:
    from airflow_kafka_spark.control.reset import reset

    found = reset(hook, order.pipeline, order.to, only=order.only, group_id=order.group, **_common(order))
    title = f"Pipeline {order.pipeline} " + ("would be moved" if order.dry_run else f"was moved (change {found.change})")
    return Told(not order.dry_run, title, (f"With it its group {found.group_id}",), *_moves(found.moves))


def _skip(hook: KafkaHook, order: Order) -> Told:
    from airflow_kafka_spark.control.skip import skip

    # With a group that is not its last report's, a dry run and the real thing might differ: it only helps where none is known.
    found = skip(hook, order.pipeline, running=order.running, group_id=order.group, **_common(order))
    what = f"window {found.given_up[0].number}" if found.given_up else "what waits"
    title = f"{what.capitalize()} of pipeline {order.pipeline} " + ("would be skipped" if order.dry_run else "was skipped")
    lines = (f"{found.skipped_offsets:,} offsets in all: an upper bound of the records", *found.warnings)
    return Told(not order.dry_run, title, lines, *_moves(found.moves))


def _moves(moves: Sequence[Move]) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    rows = tuple((f"{m.topic}-{m.partition}", "-" if m.before is None else str(m.before), str(m.after)) for m in moves)
    return ("partition", "from", "to"), rows


def _replay(hook: KafkaHook, order: Order) -> Told:
    from airflow_kafka_spark.control.replay import replay

    found = replay(hook, order.pipeline, window=order.window if not order.name else None, name=order.name, **_common(order))
    window = found.window
    assert window is not None, "a replay names its window"
    title = f"Window {window.interval or window.number} of pipeline {order.pipeline} " + (
        "would be moved once more" if order.dry_run else "is moved once more"
    )
    rows = tuple((f"{r.topic}-{r.partition}", str(r.start), str(r.end)) for r in window.ranges)
    known = window.dag_id and window.run_id and window.task_id
    clear = TaskId(str(window.dag_id), str(window.run_id), str(window.task_id), window.map_index) if known else None
    return Told(not order.dry_run, title, found.warnings, ("partition", "start", "end"), rows, clear)


def _pause(hook: KafkaHook, order: Order) -> Told:
    from airflow_kafka_spark.control.pause import pause, resume

    found = (pause if order.action == "pause" else resume)(hook, order.pipeline, **_common(order))
    verb = "paused" if order.action == "pause" else "resumed"
    title = f"Pipeline {order.pipeline} " + (f"would be {verb}" if order.dry_run else f"is {verb}")
    return Told(not order.dry_run, title, found.warnings)
