"""Control of a pipeline from a DAG: show, plan, reset, pause and the like; and the skip of tasks whose pipeline is paused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from airflow.providers.common.compat.sdk import AirflowSkipException, BaseOperator

from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.errors.arguments import with_sound_arguments
from airflow_kafka_spark.operators.binding import Run
from airflow_kafka_spark.operators.visibility.links import Links, WindowLink, of_pipeline
from airflow_kafka_spark.windows.offset_specs import ShiftBy, Written, parse_start, parse_stop, parse_target
from airflow_kafka_spark.windows.plan import DataLossPolicy

if TYPE_CHECKING:
    from airflow_kafka_spark.control.base import ChangeRequest, ChangeResult
    from airflow_kafka_spark.control.pipelines import PipelineState, WindowState
    from airflow_kafka_spark.control.preview import Preview
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.ledger.attempt import Ledger

log = logging.getLogger(__name__)

ControlAction = Literal[
    "show", "plan", "reset", "windows", "forget", "pause", "resume", "skip", "rename", "rebind", "replay", "resend"
]
ACTIONS = get_args(ControlAction)
CHANGES = ("reset", "forget", "pause", "resume", "skip", "rename", "rebind", "replay", "resend")


class PipelineOffsetsOperator(BaseOperator):
    """Show the position of a pipeline, its next window and its past ones; move, pause, rename or forget the pipeline.

    It is for pipelines what KIP-875 is for connectors. ``show``, ``plan``, ``windows``, ``pause``, ``resume``, ``replay`` and
    ``resend`` fence no attempt. ``reset`` and ``forget`` are refused while a window is open, ``skip`` while an attempt may be at
    work on it. Each change is a record in the ledger with who and why. No Spark is started.

    :param action: ``show`` (default), ``plan``, ``windows``, ``reset``, ``forget``, ``pause``, ``resume``, ``skip`` (gives up the
        open window, or else what waits), ``rename`` (lets it go on under another name), ``rebind`` (lets the next run go
        elsewhere, or be another task's), ``replay`` (asks for a complete window to be moved once more, when its task is
        cleared) or ``resend`` (sends the dead letters of a complete window again to the topics that they came from, once).
    :param pipeline: the pipeline's name, by default ``<dag_id>.<task_id>``.
    :param to: of ``reset``, where to: ``"earliest"``, ``"latest"``, a time, an offset per partition, ``"committed:<group>"``;
        default None.
    :param new_name: of ``rename``; default empty.
    :param shift_by: of ``reset``, in place of ``to``: so many offsets on, or back if negative; no further than the log. Default
        None.
    :param only: of ``reset``: topics (``orders``) or partitions (``orders:0,2``); empty (default) is all that it reads.
    :param why: of every change: what for; default empty; every change needs it.
    :param who: who asks; default this task's run.
    :param group_id: the pipeline's group; default what its last report names.
    :param discard_open: of ``reset`` and ``forget``: give up an open window, whose records a sink may have committed already;
        default False.
    :param delete_group: of ``forget``: delete its group with the offsets it has committed; default False.
    :param dry_run: of every change: say what would happen, and change nothing; default False.
    :param not_running: of ``skip`` and ``rebind``: no attempt is working on the open window; without that it is not given up, or
        sent elsewhere. Default False.
    :param window: of ``replay`` and ``resend``: the window's number; or give ``interval``. Default None.
    :param interval: of ``replay`` and ``resend``: the name of the window's data interval; default None.
    :param topics: of ``plan``: what it subscribes to; empty (default) is what it has read.
    :param starting_offsets: of ``plan``: as the pipeline's operator has it; default None, committed offsets.
    :param ending_offsets: of ``plan``: as the pipeline's operator has it; default None, the last stable offsets.
    :param max_records: of ``plan``: as the pipeline's operator has it; default None, no limit.
    :param data_loss: of ``plan``: as the pipeline's operator has it; default ``fail``.
    :param limit: of ``windows``: at most so many, default 20.
    :param kafka_conn_id: connection of type ``kafka``; default ``kafka_default``.
    :param ledger_topic: the topic that holds its ledger; default ``airflow-windows``.
    :param kwargs: arguments of Airflow's ``BaseOperator``.

    :return: what was found or done, as JSON.
    """

    template_fields: Sequence[str] = (
        "action",
        "pipeline",
        "to",
        "shift_by",
        "only",
        "why",
        "who",
        "group_id",
        "topics",
        "starting_offsets",
        "ending_offsets",
        "max_records",
        "window",
        "interval",
        "new_name",
        "ledger_topic",
    )
    ui_color = "#f3e8ff"
    ARGUMENTS: ClassVar[Mapping[str, str]] = {"preview_only": "dry_run"}
    CHECKED: ClassVar[frozenset[str]] = frozenset({"to", "starting_offsets", "ending_offsets"})

    operator_extra_links = (WindowLink(),)
    links: Links | None = None

    def __init__(
        self,
        *,
        action: ControlAction = "show",
        pipeline: str,
        to: Written | ShiftBy = None,
        shift_by: int | str | None = None,
        only: str | Sequence[str] = (),
        why: str = "",
        who: str = "",
        group_id: str | None = None,
        discard_open: bool = False,
        delete_group: bool = False,
        dry_run: bool = False,
        topics: str | Sequence[str] = (),
        starting_offsets: Written = None,
        ending_offsets: Written = None,
        max_records: int | str | None = None,
        data_loss: DataLossPolicy = "fail",
        limit: int = 20,
        not_running: bool = False,
        window: int | str | None = None,
        interval: str | None = None,
        new_name: str = "",
        kafka_conn_id: str = "kafka_default",
        ledger_topic: str = "airflow-windows",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.action = action
        self.pipeline = pipeline
        self.to = to
        self.shift_by = shift_by
        self.only = only
        self.why = why
        self.who = who
        self.group_id = group_id
        self.discard_open = discard_open
        self.delete_group = delete_group
        # `dry_run` is a method of every operator.
        self.preview_only = dry_run
        self.topics = topics
        self.starting_offsets = starting_offsets
        self.ending_offsets = ending_offsets
        self.max_records = max_records
        self.data_loss = data_loss
        self.limit = limit
        self.not_running = not_running
        self.window = window
        self.interval = interval
        self.new_name = new_name
        self.kafka_conn_id = kafka_conn_id
        self.ledger_topic = ledger_topic

    def execute(self, context: Mapping[str, Any]) -> Any:
        """Run the command, and return its result as plain JSON values.

        :raises ValidationError: arguments that cannot be; nothing was asked or changed.
        :raises KafkaSparkError: it was refused, or Kafka did not answer; nothing was changed.
        """
        from airflow_kafka_spark.control.pipelines import to_json

        if problems := self._problems():
            raise ValidationError(problems)
        self.links = of_pipeline(context, self.kafka_conn_id, self.ledger_topic, self.pipeline)
        with self.kafka:
            found = getattr(self, f"_{self.action}")(Run.of(context))
        return to_json(found)

    def _show(self, run: Run) -> PipelineState:
        from airflow_kafka_spark.control.pipelines import show

        return show(self.kafka, self.pipeline, ledger_topic=self.ledger_topic, group_id=self.group_id or None)

    def _windows(self, run: Run) -> tuple[WindowState, ...]:
        from airflow_kafka_spark.control.pipelines import list_windows

        return list_windows(self.kafka, self.pipeline, ledger_topic=self.ledger_topic, limit=self.limit)

    def _plan(self, run: Run) -> Preview:
        from airflow_kafka_spark.control.preview import preview

        return preview(
            self.kafka,
            self.pipeline,
            ledger_topic=self.ledger_topic,
            topics=_several(self.topics),
            group_id=self.group_id or None,
            starting_offsets=self.starting_offsets,
            ending_offsets=self.ending_offsets,
            max_records=_whole(self.max_records),
            data_loss=self.data_loss,
        )

    def _reset(self, run: Run) -> ChangeResult:
        from airflow_kafka_spark.control.reset import reset

        only, group = _several(self.only), self.group_id or None
        done = reset(self.kafka, self._request(run), self._target(), only=only, group_id=group, discard_open=self.discard_open)
        for move in done.moves:
            self.log.info("%s-%d: %s -> %d", move.topic, move.partition, move.before, move.after)
        return done

    def _forget(self, run: Run) -> ChangeResult:
        from airflow_kafka_spark.control.forget import forget

        group = self.group_id or None
        return forget(
            self.kafka, self._request(run), group_id=group, delete_group=self.delete_group, discard_open=self.discard_open
        )

    def _pause(self, run: Run) -> ChangeResult:
        from airflow_kafka_spark.control.pause import pause

        return self._warned(pause(self.kafka, self._request(run)))

    def _resume(self, run: Run) -> ChangeResult:
        from airflow_kafka_spark.control.pause import resume

        return self._warned(resume(self.kafka, self._request(run)))

    def _skip(self, run: Run) -> ChangeResult:
        from airflow_kafka_spark.control.skip import skip

        running = False if self.not_running else None
        group = self.group_id or None
        return self._warned(skip(self.kafka, self._request(run), group_id=group, running=running))

    def _rename(self, run: Run) -> ChangeResult:
        from airflow_kafka_spark.control.rename import rename

        return self._warned(rename(self.kafka, self._request(run), self.new_name, group_id=self.group_id or None))

    def _rebind(self, run: Run) -> ChangeResult:
        from airflow_kafka_spark.control.rebind import rebind

        running = False if self.not_running else None
        return self._warned(rebind(self.kafka, self._request(run), running=running))

    def _replay(self, run: Run) -> ChangeResult:
        from airflow_kafka_spark.control.replay import replay

        window, name = _whole(self.window), self.interval or None
        return self._warned(replay(self.kafka, self._request(run), window=window, name=name))

    def _resend(self, run: Run) -> ChangeResult:
        from airflow_kafka_spark.control.resend import resend

        window, name = _whole(self.window), self.interval or None
        return self._warned(resend(self.kafka, self._request(run), window=window, name=name))

    def _warned(self, done: ChangeResult) -> ChangeResult:
        for warning in done.warnings:
            self.log.warning("%s", warning)
        return done

    def _request(self, run: Run) -> ChangeRequest:
        from airflow_kafka_spark.control.base import ChangeRequest

        return ChangeRequest(self.pipeline, self.why, self.who or run.id, self.ledger_topic, self.preview_only)

    def _target(self) -> Any:
        shift = _whole(self.shift_by)
        return parse_target(self.to) if shift is None else ShiftBy(shift)

    def _problems(self) -> list[Problem]:
        if self.action not in ACTIONS:
            return [Problem("action", f"`{self.action}` is not one of {', '.join(ACTIONS)}")]
        sound, wrong = with_sound_arguments(self)
        known = {problem.where for problem in wrong}
        return [*wrong, *(problem for problem in sound._value_problems() if problem.where not in known)]

    def _value_problems(self) -> list[Problem]:
        problems = []
        if not self.pipeline.strip():
            problems.append(Problem("pipeline", f"`{self.pipeline}` is not the name of a pipeline"))
        if self.action in CHANGES and not self.why.strip():
            problems.append(Problem("why", "the change has no reason", "Say why"))
        if self.action == "reset" and (self.to is None) == (self.shift_by in (None, "")):
            problems.append(Problem("to", "give either `to` or `shift_by`"))
        elif self.action == "reset":
            problems += _tried("shift_by" if self.to is None else "to", self._target)
        if self.action in ("replay", "resend") and (self.window in (None, "")) == (not self.interval):
            problems.append(Problem("window", "give either `window` or `interval`"))
        elif self.action in ("replay", "resend"):
            problems += _tried("window", lambda: _whole(self.window))
        if self.action == "rename" and not self.new_name.strip():
            problems.append(Problem("new_name", "the new name is missing", "Give it"))
        if self.action == "plan":
            problems += _tried("starting_offsets", lambda: parse_start(self.starting_offsets))
            problems += _tried("ending_offsets", lambda: parse_stop(self.ending_offsets))
            problems += _tried("max_records", lambda: _whole(self.max_records))
        return problems

    @cached_property
    def kafka(self) -> KafkaHook:
        from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

        return KafkaHook(self.kafka_conn_id)


def _tried(where: str, parse: Callable[[], object]) -> list[Problem]:
    try:
        parse()
    except ValueError as error:
        return [Problem(where, str(error))]
    return []


def _whole(value: int | str | None) -> int | None:
    """Return a number; a template renders to text."""
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        raise ValueError(f"`{value}` is not a whole number")
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"`{value}` is not a whole number") from None


def _several(value: str | Sequence[str]) -> list[str]:
    return [value] if isinstance(value, str) and value else list(value)


def skip_paused(ledger: Ledger) -> None:
    """Skip the task of a pipeline that is paused.

    :raises AirflowSkipException: the pipeline is paused, as far as this ledger was read.
    """
    pause = ledger.parent_memory.pause
    if pause is None:
        return
    left = ledger.memory.open_entry
    raise AirflowSkipException(
        f"Pipeline `{ledger.parent_pipeline}` is paused since {pause.at}, by {pause.who}: {pause.why}. Nothing was moved. "
        + (f"Window {left.window} stays as it was planned. " if left else "")
        + "Resume it, in the UI or with `airflow kafka-spark resume`, and it continues with the next run"
        + ("; clear this task then: no other run moves its interval." if ledger.parent_pipeline != ledger.pipeline else ".")
    )


def skip_though_invalid(open_ledger: Callable[[], Ledger]) -> None:
    """Skip the task of a paused pipeline whose validation has failed: the pipeline may have been paused for that reason.

    :param open_ledger: returns the ledger, which is read without fencing.
    :raises AirflowSkipException: the pipeline is paused.
    """
    try:
        ledger = open_ledger()
        ledger.peek()
    except Exception:
        # The validation error is raised in any case; an error here would only hide it.
        log.debug("The ledger was not asked whether the pipeline is paused", exc_info=True)
    else:
        skip_paused(ledger)
