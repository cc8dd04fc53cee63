"""Control of a pipeline from a DAG: show, plan, reset, pause and the like; and the skip of tasks whose pipeline is paused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

from airflow.providers.common.compat.sdk import AirflowSkipException, BaseOperator

from airflow_kafka_spark.arguments import ChecksArguments, find_choice_problems, replace_wrong_arguments
from airflow_kafka_spark.errors import Problem, ValidationError
from airflow_kafka_spark.operators.binding import Run
from airflow_kafka_spark.operators.visibility.links import Links, WindowLink, make_pipeline_links
from airflow_kafka_spark.windows.offset_specs import MoveTarget, ShiftBy, Written, parse_start, parse_stop, parse_target
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
"""The values of ``action``. Each has a method ``_perform_<action>``."""
CHANGES = ("reset", "forget", "pause", "resume", "skip", "rename", "rebind", "replay", "resend")
"""The actions that write to the ledger, and need a reason."""


class PipelineOffsetsOperator(ChecksArguments, BaseOperator):
    """Show the position of a pipeline, its next window and its past ones; move, pause, rename or forget the pipeline.

    The operator does for pipelines what KIP-875 does for connectors. ``show``, ``plan``, ``windows``, ``pause``, ``resume``,
    ``replay`` and ``resend`` fence no attempt. ``reset`` and ``forget`` are refused while a window is open, ``skip`` while an
    attempt may be working on it. Each change is a record in the ledger, with its author and its reason. No Spark is started.

    :param action: ``show`` (default), ``plan`` (the next window), ``windows``, ``reset`` (moves the position), ``forget``,
        ``pause``, ``resume``, ``skip`` (gives up the open window; without one, skips the backlog), ``rename`` (continues the
        pipeline under another name), ``rebind`` (allows the next run another destination, source or task), ``replay`` (requests
        that a complete window is moved once more when its task is cleared) or ``resend`` (sends the dead letters of a complete
        window again to the topics that they came from, once). Templated.
    :param pipeline: name of the pipeline, by default ``<dag_id>.<task_id>`` of its task. Templated.
    :param to: for ``reset``, the new position: ``"earliest"``, ``"latest"``, a time, an offset per partition, or
        ``"committed:<group>"``; default None. Templated.
    :param new_name: for ``rename``, the new name; default empty. Templated.
    :param shift_by: for ``reset`` without ``to``, the number of offsets to move the position forward, or backward if it is
        negative. The position stays within the log. Default None. Templated.
    :param only: for ``reset``, the topics (``orders``) or partitions (``orders:0,2``) to move; default empty: all that the
        pipeline reads. Templated.
    :param why: reason of a change, which every change needs; default empty. Templated.
    :param who: author of a change; default: this task's run. Templated.
    :param group_id: consumer group of the pipeline; default: the group of its newest window. Templated.
    :param discard_open: for ``reset`` and ``forget``: True gives up an open window, whose records a sink may have committed
        already; default False.
    :param delete_group: for ``forget``: True deletes the consumer group with its committed offsets; default False.
    :param dry_run: for every change: True describes the change, and changes nothing; default False.
    :param not_running: for ``skip`` and ``rebind``: True confirms that no attempt is working on the open window. Without the
        confirmation, an open window is neither given up nor moved elsewhere. Default False.
    :param window: for ``replay`` and ``resend``: number of the window; either this or ``interval`` is required. Default None.
        Templated.
    :param interval: for ``replay`` and ``resend``: name of the window's data interval; default None. Templated.
    :param topics: for ``plan``: the topics of the pipeline's operator; default empty: the topics that the pipeline has read.
        Templated.
    :param starting_offsets: for ``plan``: ``starting_offsets`` of the pipeline's operator; default None, the committed offsets.
        Templated.
    :param ending_offsets: for ``plan``: ``ending_offsets`` of the pipeline's operator; default None, the last stable offsets.
        Templated.
    :param max_records: for ``plan``: ``max_records`` of the pipeline's operator, a number of offsets; default None, no maximum.
        Templated.
    :param data_loss: for ``plan``: ``data_loss`` of the pipeline's operator; default ``fail``.
    :param limit: for ``windows``: maximum number of windows; default 20.
    :param kafka_conn_id: Airflow connection of type ``kafka``; default ``kafka_default``.
    :param ledger_topic: topic that contains the ledger of the pipeline; default ``airflow-windows``. Templated.
    :param kwargs: arguments of Airflow's ``BaseOperator``.

    :return: the result as JSON.
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
    left_out_by_none = ("to", "shift_by", "starting_offsets", "ending_offsets", "max_records", "window", "interval")
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

    def execute(self, context: Mapping[str, Any]) -> object:
        """Run the command, and return its result as plain JSON values.

        :raises ValidationError: arguments are invalid; nothing was asked or changed.
        :raises KafkaSparkError: the command was refused, or Kafka did not answer; nothing was changed.
        """
        from airflow_kafka_spark.control.base import ChangeRepeated
        from airflow_kafka_spark.control.pipelines import name_similar_pipelines, to_json

        if problems := self._find_problems():
            raise ValidationError(problems)
        self.links = make_pipeline_links(context, self.kafka_conn_id, self.ledger_topic, self.pipeline)
        with self.kafka, name_similar_pipelines(self.kafka):
            try:
                found = getattr(self, f"_perform_{self.action}")(Run.of(context))
            except ChangeRepeated as repeated:
                found = self._log_warnings(repeated.result)
        return to_json(found)

    def _perform_show(self, run: Run) -> PipelineState:
        from airflow_kafka_spark.control.pipelines import show

        return show(self.kafka, self.pipeline, ledger_topic=self.ledger_topic, group_id=self.group_id or None)

    def _perform_windows(self, run: Run) -> tuple[WindowState, ...]:
        from airflow_kafka_spark.control.pipelines import list_windows

        return list_windows(self.kafka, self.pipeline, ledger_topic=self.ledger_topic, limit=self.limit)

    def _perform_plan(self, run: Run) -> Preview:
        from airflow_kafka_spark.control.preview import PlanOptions, preview_window

        options = PlanOptions(
            _as_list(self.topics),
            self.group_id or None,
            self.starting_offsets,
            self.ending_offsets,
            _parse_whole(self.max_records),
            self.data_loss,
        )
        return preview_window(self.kafka, self.pipeline, options, ledger_topic=self.ledger_topic)

    def _perform_reset(self, run: Run) -> ChangeResult:
        from airflow_kafka_spark.control.position import reset

        only, group = _as_list(self.only), self.group_id or None
        done = reset(
            self.kafka, self._request(run), self._parse_target(), only=only, group_id=group, discard_open=self.discard_open
        )
        for move in done.moves:
            self.log.info("%s-%d: %s -> %d", move.topic, move.partition, move.before, move.after)
        return self._log_warnings(done)

    def _perform_forget(self, run: Run) -> ChangeResult:
        from airflow_kafka_spark.control.lifecycle import forget

        group = self.group_id or None
        done = forget(
            self.kafka, self._request(run), group_id=group, delete_group=self.delete_group, discard_open=self.discard_open
        )
        return self._log_warnings(done)

    def _perform_pause(self, run: Run) -> ChangeResult:
        from airflow_kafka_spark.control.lifecycle import pause

        return self._log_warnings(pause(self.kafka, self._request(run)))

    def _perform_resume(self, run: Run) -> ChangeResult:
        from airflow_kafka_spark.control.lifecycle import resume

        return self._log_warnings(resume(self.kafka, self._request(run)))

    def _perform_skip(self, run: Run) -> ChangeResult:
        from airflow_kafka_spark.control.position import skip

        running = False if self.not_running else None
        group = self.group_id or None
        return self._log_warnings(skip(self.kafka, self._request(run), group_id=group, running=running))

    def _perform_rename(self, run: Run) -> ChangeResult:
        from airflow_kafka_spark.control.lifecycle import rename

        return self._log_warnings(rename(self.kafka, self._request(run), self.new_name, group_id=self.group_id or None))

    def _perform_rebind(self, run: Run) -> ChangeResult:
        from airflow_kafka_spark.control.lifecycle import rebind

        running = False if self.not_running else None
        return self._log_warnings(rebind(self.kafka, self._request(run), running=running))

    def _perform_replay(self, run: Run) -> ChangeResult:
        from airflow_kafka_spark.control.replay import replay

        window, name = _parse_whole(self.window), self.interval or None
        return self._log_warnings(replay(self.kafka, self._request(run), window=window, name=name))

    def _perform_resend(self, run: Run) -> ChangeResult:
        from airflow_kafka_spark.control.replay import resend_dead_letters

        window, name = _parse_whole(self.window), self.interval or None
        return self._log_warnings(resend_dead_letters(self.kafka, self._request(run), window=window, name=name))

    def _log_warnings(self, done: ChangeResult) -> ChangeResult:
        for warning in done.warnings:
            self.log.warning("%s", warning)
        return done

    def _request(self, run: Run) -> ChangeRequest:
        from airflow_kafka_spark.control.base import ChangeRequest, TaskTry

        task = TaskTry(run.id, run.tries, self.retries or 0)
        return ChangeRequest(self.pipeline, self.why, self.who or run.id, self.ledger_topic, self.preview_only, task)

    def _parse_target(self) -> MoveTarget:
        shift = _parse_whole(self.shift_by)
        return parse_target(self.to) if shift is None else ShiftBy(shift)

    def _find_problems(self) -> list[Problem]:
        if unknown := find_choice_problems("action", self.action, ACTIONS):
            return unknown
        sound, wrong = replace_wrong_arguments(self)
        wrong = [*self.rendered_none, *wrong]
        known = {problem.where for problem in wrong}
        return [*wrong, *(problem for problem in sound._find_value_problems() if problem.where not in known)]

    def _find_value_problems(self) -> list[Problem]:
        problems = []
        if not self.pipeline.strip():
            problems.append(Problem("pipeline", f"`{self.pipeline}` is not the name of a pipeline"))
        if self.action in CHANGES and not self.why.strip():
            problems.append(Problem("why", "the change has no reason", "Give a reason"))
        if self.action == "reset" and (self.to is None) == (self.shift_by in (None, "")):
            problems.append(Problem("to", "give either `to` or `shift_by`"))
        elif self.action == "reset":
            problems += _find_parse_problems("shift_by" if self.to is None else "to", self._parse_target)
        if self.action in ("replay", "resend") and (self.window in (None, "")) == (not self.interval):
            problems.append(Problem("window", "give either `window` or `interval`"))
        elif self.action in ("replay", "resend"):
            problems += _find_parse_problems("window", lambda: _parse_whole(self.window))
        if self.action == "windows" and self.limit < 1:
            problems.append(Problem("limit", f"it is {self.limit}; expected a number of windows, at least 1"))
        if self.action == "rename" and not self.new_name.strip():
            problems.append(Problem("new_name", "the new name is missing", "Give it"))
        if self.action == "plan":
            problems += _find_parse_problems("starting_offsets", lambda: parse_start(self.starting_offsets))
            problems += _find_parse_problems("ending_offsets", lambda: parse_stop(self.ending_offsets))
            problems += _find_parse_problems("max_records", lambda: _parse_whole(self.max_records))
        return problems

    @cached_property
    def kafka(self) -> KafkaHook:
        from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

        return KafkaHook(self.kafka_conn_id)


def _find_parse_problems(where: str, parse: Callable[[], object]) -> list[Problem]:
    try:
        parse()
    except ValueError as error:
        return [Problem(where, str(error))]
    return []


def _parse_whole(value: int | str | None) -> int | None:
    """Return a whole number, also from the text of a template."""
    if value is None or value == "":
        return None
    if isinstance(value, bool):
        raise ValueError(f"`{value}` is not a whole number")
    try:
        return int(value)
    except ValueError:
        raise ValueError(f"`{value}` is not a whole number") from None


def _as_list(value: str | Sequence[str]) -> list[str]:
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
