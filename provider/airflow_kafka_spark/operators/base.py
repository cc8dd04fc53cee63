"""The life of a window, on one page.

1. **Validate** everything at once, before anything is changed.
2. **Fence and read**: open the ledger, which fences every earlier attempt and holds what they have done. The ledger of a paused
   pipeline is read without fencing, and the task is skipped.
3. **Plan**: an open window is finished first, also that of another run; else freeze the next one and write it to the ledger.
4. **Move**: one Spark job reads, decodes and writes the window to a place that no reader sees yet.
5. **Commit**: the sink makes the whole window visible, together with its own record of it.
6. **Close**: one Kafka transaction writes COMPLETE and moves the group's offsets. Never before 5.
7. **Report**.

If an attempt is killed at any point, the next one (a retry, a clear or the next scheduled run) finds the same window and
continues from there: a planned window is not planned again, a window that the sink has committed is not written again, and a
closed window is only reported.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from airflow_kafka_spark import faults
from airflow_kafka_spark.arguments import (
    ChecksArguments,
    find_template_problems,
    find_type_problems,
    replace_wrong_arguments,
    replace_wrong_types,
    unwrap_literals,
)
from airflow_kafka_spark.bad_records.options import ErrorOptions, make_resent_problem
from airflow_kafka_spark.errors import (
    BadRecords,
    CountMismatch,
    DataLoss,
    Fenced,
    KafkaSparkError,
    LogTruncated,
    PlannedMeanwhile,
    Problem,
    RightMissing,
    SparkJobFailed,
    TopicMissing,
    TopicRecreated,
    Unchecked,
    ValidationError,
)
from airflow_kafka_spark.errors.base import format_command
from airflow_kafka_spark.operators import binding as bindings
from airflow_kafka_spark.operators.binding import Run
from airflow_kafka_spark.operators.control import skip_paused, skip_though_invalid
from airflow_kafka_spark.operators.options import LedgerOptions, SparkOptions, option
from airflow_kafka_spark.operators.publishing import accept_lost_topics
from airflow_kafka_spark.operators.visibility.operator import VisibleOperator
from airflow_kafka_spark.operators.visibility.progress import emit
from airflow_kafka_spark.sinks.base import Sink, find_unknown_window_problems
from airflow_kafka_spark.windows.binding import Binding, Endpoint, add_details
from airflow_kafka_spark.windows.interval import find_name_problem
from airflow_kafka_spark.windows.model import ELSEWHERE, Applied, SplitResult, Window, select_first_bad_records
from airflow_kafka_spark.windows.report import Report, describe_window, sum_up_applied

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context
    from airflow.sdk import Asset
    from jinja2 import Environment

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.hooks.spark.hook import SparkHook
    from airflow_kafka_spark.ledger.attempt import Ledger
    from airflow_kafka_spark.sinks.kafka.sink import KafkaSink
    from airflow_kafka_spark.sources.base import RowSource
    from airflow_kafka_spark.transforms.chain import TransformLike
    from airflow_kafka_spark.windows.memory import WindowEntry


class Cancellable(Protocol):
    """A running Spark job that can be cancelled."""

    def cancel(self) -> None:
        """Make the job fail."""


J = TypeVar("J", bound=Cancellable)
T = TypeVar("T")

PLAN_TRIES = 5
"""Maximum number of times that an attempt plans if other windows of the pipeline take the same offsets at the same moment."""


class Stopwatch:
    """Measures the seconds that each step of a window's life takes.

    :ivar timings: the seconds of the steps so far, by their names.
    """

    def __init__(self) -> None:
        self.timings: dict[str, float] = {}
        self._begun = time.monotonic()

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time that is spent in this context to a step."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.monotonic() - begun

    def stop(self) -> dict[str, float]:
        """Return the seconds of the steps, and the ``total`` since the watch was made."""
        return {**self.timings, "total": time.monotonic() - self._begun}


class WindowOperator(ChecksArguments, VisibleOperator):
    """An operator that moves one window per run, with the guarantee of its sink.

    Guarantee: the offsets of a window are written to the ledger before any work. The windows of a pipeline are applied in order,
    each once, and the consumer group's offsets move only after the sink has committed, also if attempts are killed, retried,
    cleared or paused.

    The concrete operators take the options one by one; here they are in groups.

    :param sink: destination of the window.
    :param ledger_options: the name of the pipeline, and its ledger.
    :param spark_options: the Spark session.
    :param errors: handling of bad records.
    :param transforms: the transforms that each record passes, in order.
    :param kwargs: arguments of Airflow's ``BaseOperator``.
    """

    pipeline = option[str | None]("ledger_options")
    kafka_conn_id = option[str]("ledger_options")
    ledger_topic = option[str]("ledger_options")
    spark_conn_id = option[str]("spark_options", "conn_id")
    errors_deadletterqueue_topic_name = option[str | None]("errors", "topic")

    rendered_parts: ClassVar[Sequence[str]] = ("sink",)
    typed_parts: ClassVar[Mapping[str, str]] = {"ledger_options": "", "spark_options": "", "errors": "", "sink": "sink."}
    """Attributes that are dataclasses, whose values are compared with their types; and the prefix of their fields in messages."""

    def __init__(
        self,
        *,
        sink: Sink | KafkaSink,
        ledger_options: LedgerOptions,
        spark_options: SparkOptions,
        errors: ErrorOptions,
        transforms: Sequence[TransformLike],
        **kwargs: Any,
    ) -> None:
        # One run of a pipeline at a time: concurrent runs would be correct, too, but would fence each other repeatedly.
        kwargs.setdefault("max_active_tis_per_dag", 1)
        super().__init__(**kwargs)
        self.sink = unwrap_literals(sink)
        self.ledger_options = ledger_options
        self.spark_options = spark_options
        self.errors = errors
        self.transforms = unwrap_literals(transforms or ())
        self._job: Cancellable | None = None
        self._destination_is_free = False

    # --- for concrete operators ---

    @property
    def on_rerun(self) -> str | None:
        """The effect of clearing the task of a complete window: ``skip`` reports it again, ``replay`` moves it again."""
        return "skip"

    @abstractmethod
    def find_problems(self, run: Run) -> list[Problem]:
        """Return all problems that prevent this task from working (step 1). Changes nothing. Arguments with a default have their
        declared types."""

    @abstractmethod
    def open_ledger(self, run: Run) -> Ledger:
        """Return the pipeline's ledger (step 2). Entering it fences earlier attempts and reads it."""

    def list_destinations(self) -> Endpoint:
        """Return the destinations of rows: the sink with its records of windows, the dead letter topic, and topics of routed
        records."""
        aside = {"dead_letters": self.errors.topic or "", "routes": ", ".join(sorted(set(self.list_routes().values())))}
        return self.sink.find_destination() | Endpoint(details=aside)

    def list_routes(self) -> dict[str, str]:
        """Return the topics that transforms send records to, by the argument that names each."""
        if not self.transforms:
            return {}
        from airflow_kafka_spark.transforms.chain import list_chain_routes

        return list_chain_routes(self.transforms)

    def find_origin(self) -> Endpoint:
        """Return the origin of rows, apart from the offsets that a window contains."""
        return Endpoint()

    @abstractmethod
    def plan(self, ledger: Ledger, run: Run) -> Window:
        """Return the next window, which begins at the position of the pipeline (step 3)."""

    def refuse_lost_records(self, ledger: Ledger, found: Binding) -> None:
        """Refuse a window if the sink has lost the record of one that this window does not have to follow.

        :param found: the binding of this run.
        """

    def redirect_window(self, window: Window, ledger: Ledger) -> Window:
        """Return an open window that goes to the destination of this run from now on, whose records in topics that were deleted
        since are known to be lost."""
        return accept_lost_topics(self.kafka, ledger, window)

    @abstractmethod
    def check(self, window: Window) -> None:
        """Make sure that a planned window can still be read. Called before it is read, and again before the sink commits."""

    @abstractmethod
    def find_applied(self, window: Window) -> Applied | None:
        """Return the sink's own record of a window that it has committed in an earlier attempt; None without one."""

    @abstractmethod
    def move(self, window: Window, ledger: Ledger) -> Report:
        """Bring the window into the sink, and return its report (steps 4 and 5)."""

    @abstractmethod
    def close(self, ledger: Ledger, window: Window, report: Report) -> Report:
        """Complete the window in the ledger and move the group's offsets (step 6)."""

    def follow(self, ledger: Ledger) -> None:
        """Finish the steps that follow a close. An attempt that was killed may have left them undone."""

    # --- the life of a window ---

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """Finish the open window, if there is one, then move this run's own window.

        :return: the report of this run's window (:class:`~airflow_kafka_spark.windows.report.Report`), as JSON.
        :raises ValidationError: all problems at once; nothing was changed.
        :raises BindingChanged: the pipeline, or its open window, belongs to another task, or has another destination; nothing was
            moved.
        :raises KafkaSparkError: one of its subclasses; the window stays as it was planned, and a retry continues with it.
        :raises AirflowSkipException: the pipeline is paused; nothing was planned or moved.
        """
        run = Run.of(context)
        self.show(context, run)
        try:
            with self.show_failures():
                return self._execute(context, run)
        finally:
            self.kafka.close()

    def _execute(self, context: Mapping[str, Any], run: Run) -> dict[str, Any]:
        with self._start_early(run):
            self.validate(run)
        overtaken = 0
        while True:
            watch = Stopwatch()
            with ExitStack() as opened:
                with watch.measure("fence"):
                    ledger = self.open_ledger(run)
                    ledger.peek()
                    if not (is_paused := ledger.parent_memory.is_paused):
                        bindings.refuse_other_task(ledger, run)
                        opened.enter_context(ledger)
                # An attempt that is running while the pipeline is paused is not fenced.
                if not is_paused:
                    faults.reached("fenced")
                done = ledger.find_completed(run.id)
                if done is not None:
                    bindings.refuse_other_writer(ledger.parent_pipeline, ledger.parent_memory, done, run)
                if done is not None and not self._moves_again(ledger, done, run):
                    return self.publish(self._report_completed(ledger, done, run, is_paused=is_paused), context)
                skip_paused(ledger)
                try:
                    with watch.measure("plan"):
                        entry = self._choose_next_window(ledger, run, done)
                except PlannedMeanwhile as error:
                    overtaken += 1
                    if overtaken == PLAN_TRIES:
                        raise
                    self.log.info("Planning again: %s", error)
                    continue
                faults.reached("planned")
                with self.publish_progress(entry.window):
                    report = self._complete(ledger, entry, watch)
            if entry.window.run == run.id:
                return self.publish(report.to_dict(), context)
            self.log.info("That was the open window of run %s; this run's own window comes next", entry.window.run)

    def find_all_problems(self, run: Run) -> list[Problem]:
        """Return all problems that prevent this task from working (step 1), each problem once. Changes nothing.

        An argument of a wrong type is one problem. All others are checked with a sound value in its place.
        """
        sound, wrong = self._with_sound_types()
        # A template is a text, and may be of a wrong type, too.
        templates = [*self.rendered_none, *self._find_template_problems()]
        named = {problem.where for problem in templates}
        wrong = [*templates, *(problem for problem in wrong if problem.where not in named)]
        if not wrong:
            found = list(dict.fromkeys(self.find_problems(run)))
            # Without a problem, the checks that were put off are made when the window is planned.
            return found if find_first_cause(found) else []
        try:
            found = sound.find_problems(run)
        except Exception as error:
            # There is no sound value for some arguments, such as a text for a required mapping.
            self.log.debug("Not all arguments could be checked", exc_info=error)
            found = [Unchecked("all other arguments", wrong[0].where)]
        known = {problem.where for problem in wrong}
        return list(dict.fromkeys([*wrong, *(problem for problem in found if problem.where not in known)]))

    def _with_sound_types(self) -> tuple[WindowOperator, list[Problem]]:
        """Return this operator, or a copy that has sound values where arguments have wrong types, and the problems of these."""
        sound, problems = replace_wrong_arguments(self)
        made: dict[str, Any] = {}
        for name, prefix in self.typed_parts.items():
            made[name], wrong = replace_wrong_types(getattr(self, name), prefix)
            problems += wrong
        problems += self.find_routed_type_problems()
        if not problems:
            return self, []
        sound = copy(self) if sound is self else sound
        for name in ("kafka", "spark", "formats"):
            # They were made of the original arguments.
            sound.__dict__.pop(name, None)
        for name, part in made.items():
            setattr(sound, name, part)
        return sound, problems

    def _find_template_problems(self) -> list[Problem]:
        """Return the problems of templates in arguments, and in parts of the operator, that are not rendered."""
        found: list[Problem] = []
        for name, prefix in self.typed_parts.items():
            found += find_template_problems(getattr(self, name), prefix, None if prefix else self.template_fields)
        transforms = self.transforms if isinstance(self.transforms, Sequence) else ()
        for number, transform in enumerate(transforms):
            found += find_template_problems(transform, f"transforms[{number}] {type(transform).__name__}.")
        return found

    def find_routed_type_problems(self) -> list[Problem]:
        """Return the problems of the types of sinks that transforms send records to."""
        return []

    def validate(self, run: Run) -> None:
        """Make sure that the task can work.

        :raises ValidationError: it cannot; names every problem.
        :raises AirflowSkipException: it cannot, and the pipeline is paused, perhaps because of that.
        """
        problems = self.find_all_problems(run)
        if problems:
            if not {"kafka_conn_id", "pipeline"} & {problem.where for problem in problems}:
                skip_though_invalid(lambda: self.open_ledger(run))
            raise ValidationError(problems)

    @contextmanager
    def _start_early(self, run: Run) -> Iterator[None]:
        """Start Spark while the task is validated, if the window will have records. A failed validation cancels a start that has
        not begun."""
        spark: SparkHook | None = None
        try:
            if (is_needed := self.make_records_check(run)) is not None:
                spark = self.spark
                spark.start_early(is_needed)
        except Exception as error:
            # The validation names what is wrong.
            self.log.debug("Spark is not started before the validation: %s", error)
        try:
            yield
        except BaseException:
            if spark is not None:
                spark.give_up_early_start()
            raise

    def make_records_check(self, run: Run) -> Callable[[], bool] | None:
        """Return a function that returns True if this run's window will have records; None if only the plan shows it. The
        function changes nothing. It is called in a thread, during the validation."""
        return None

    def is_rerun(self, done: WindowEntry, run: Run) -> bool:
        """Return True if this run has moved its window before and its task was cleared to move it again.

        :raises ValidationError: it has, but the sink cannot replace rows.
        """
        return self.on_rerun == "replay" and self.was_cleared(done, run)

    def _report_completed(self, ledger: Ledger, done: WindowEntry, run: Run, *, is_paused: bool) -> dict[str, Any]:
        """Return the report of this run's window, which is complete already.

        :raises DestinationChanged: it was moved to another place than this run's.
        """
        if not self._destination_is_free:
            bindings.refuse_other_destination(ledger.parent_pipeline, ledger.parent_memory, done, self.make_binding(run))
        self.log.info("Window %s of this run is complete already: nothing to do", done.window)
        if not is_paused:
            self.follow(ledger)
        return dict(done.report or Report(done.window, gaps=done.window.gaps).to_dict())

    def _moves_again(self, ledger: Ledger, done: WindowEntry, run: Run) -> bool:
        """Return True if a complete window is moved again: its task was cleared and ``on_rerun`` is ``replay``, or a user has
        requested a replay.

        :raises ValidationError: it has to be moved again, but the sink cannot replace rows, or not those of this window.
        :raises BindingChanged: it has to be moved again, but it was moved with another binding.
        :raises PlanError: it has to be moved again, but its records no longer exist.
        """
        asked = ledger.parent_memory.replay_asked(done.window)
        if asked is None:
            if not self.is_rerun(done, run):
                return False
        else:
            self.log.info("%s has asked for window %s to be moved once more: %s", asked.who, done.window, asked.why)
            if problems := self.find_replay_problems():
                raise ValidationError(problems)
        # The destination is checked first, because another sink has no record of the window.
        bindings.refuse_replay_elsewhere(ledger.parent_pipeline, ledger.parent_memory, done, self.make_binding(run))
        again = replace(done.window, replay=done.window.replay + 1)
        if problems := self._find_replay_problems(ledger, again):
            raise ValidationError(problems)
        if not again.is_empty:
            # A planned replay is finished first, because deleted records would block all later windows.
            self.check(again)
        return True

    def _find_replay_problems(self, ledger: Ledger, replay: Window) -> list[Problem]:
        """Return the problems of replaying one window, although the sink can replace rows."""
        resent = {} if self.errors.tolerates else ledger.parent_memory.find_resent(replay)
        return [
            *self._find_destination_problems(replay),
            *self.find_window_replay_problems(replay),
            *([make_resent_problem(replay, resent)] if resent else []),
        ]

    def _find_destination_problems(self, replay: Window) -> list[Problem]:
        """Return the problem of a complete window whose rows may be in another destination than this run's, because a ``rebind``
        has changed it while a replay was open.
        """
        return self.find_unknown_window_problems(replay) if replay.after == ELSEWHERE else []

    def find_unknown_window_problems(self, replay: Window) -> list[Problem]:
        """Return a problem for each sink of this run that has no record of a window that is replayed."""
        return find_unknown_window_problems(self.sink, replay) if isinstance(self.sink, Sink) else []

    def _refuse_replay(self, ledger: Ledger, unfinished: WindowEntry) -> None:
        """Make sure that the sink can replace rows before an open replay continues: the replay may have been planned for another
        sink, or another file system.

        :raises ValidationError: the sink cannot; names the command that gives the replay up.
        """
        window = unfinished.window
        if not window.replay:
            return
        problems = self.find_replay_problems() or self._find_replay_problems(ledger, window)
        if not problems:
            return
        found = f"a replay of window {window} is open"
        give_up = f"To give the replay up, and leave the rows as they are: {format_command('skip', window.pipeline)}"
        action = "No other interval waits for it: its rows stay as they are" if window.interval else give_up
        raise ValidationError([*problems, Problem("on_rerun", found, action)])

    def find_replay_problems(self) -> list[Problem]:
        """Return the reasons why the sink cannot replace the rows of a window that it has committed."""
        if isinstance(self.sink, Sink):
            return self.sink.find_replay_problems()
        return [Problem("sink", "records that are published to Kafka cannot be replaced")]

    def find_window_replay_problems(self, replay: Window) -> list[Problem]:
        """Return the reasons why the sink cannot replace the rows of one window, although it can replace rows.

        :param replay: the replay, with its number.
        """
        return self.sink.find_window_replay_problems(replay) if isinstance(self.sink, Sink) and not replay.is_empty else []

    def was_cleared(self, done: WindowEntry, run: Run) -> bool:
        """Return True if the task was cleared after its last attempt at this window, which it has planned or moved. Another run
        may have finished the window. A task that is only retried, because it died after the close, was not cleared."""
        known = done.tries.get(run.id)
        return known is not None and run.tries.was_cleared_since(known, self.retries or 0)

    def _choose_next_window(self, ledger: Ledger, run: Run, done: WindowEntry | None) -> WindowEntry:
        """Return the open window, also that of another run; without one, the window that is moved again; else a new window, which
        is written to the ledger."""
        unfinished, found = ledger.memory.open_entry, self.make_binding(run)
        if unfinished is None and done is not None:
            self.log.info("Window %s is complete, and its task runs again: moving it once more", done.window)
            entry = ledger.replay(done)
        elif unfinished is None:
            found = self._bind(ledger, found)
            window = replace(self.plan(ledger, run), binding=found)
            if isinstance(self.sink, Sink) and not window.moved and not window.after:
                window = replace(window, after=bindings.find_committed_before(ledger.memory, found))
            self.refuse_lost_records(ledger, found)
            entry = ledger.plan(window)
        else:
            if bindings.refuse_other_binding(ledger.parent_pipeline, ledger.parent_memory, unfinished, found):
                found = self._bind(ledger, found)
                if unfinished.window.binding is not None:
                    # The new destination need not have a record of earlier windows.
                    unfinished = replace(
                        unfinished, window=self.redirect_window(replace(unfinished.window, after=ELSEWHERE), ledger)
                    )
                self.log.warning("Window %s goes from now on %s", unfinished.window, describe_binding(found))
            elif unfinished.window.binding is not None:
                found = add_details(unfinished.window.binding, found)
            unfinished = replace(unfinished, window=replace(unfinished.window, binding=found))
            self._refuse_replay(ledger, unfinished)
            self.refuse_lost_records(ledger, found)
            self.log.info(
                "Window %s was planned by run %s and is not complete: finishing it first",
                unfinished.window,
                unfinished.window.run,
            )
            entry = ledger.reopen(unfinished)
        window = entry.window
        self.log.info("Window %s: %s", window, describe_window(window))
        if window.held_back:
            self.log.info("%s offsets, from the first open transaction on, are left to a later window", f"{window.held_back:,}")
        for gap in window.gaps:
            self.log.warning(
                "Offsets [%d, %d) of %s-%d are not read: they were deleted, or this window cannot have them",
                gap.start,
                gap.end,
                gap.topic,
                gap.partition,
            )
        return entry

    def make_binding(self, run: Run) -> Binding:
        """Return the task, the destination and the origin of this run's windows."""
        return Binding(bindings.make_writer(run), self.list_destinations(), self.find_origin())

    def _bind(self, ledger: Ledger, found: Binding) -> Binding:
        """Bind the pipeline to the task, the destination and the origin of this run.

        :return: the binding of the window.
        :raises BindingChanged: the pipeline is bound to others.
        """
        bindings.log_unnamed_deployment(ledger.parent_pipeline, ledger.parent_memory, found)
        kept = ledger.bind(
            lambda whole: bindings.decide_binding(ledger.parent_pipeline, whole, found, is_free=self._destination_is_free)
        )
        return replace(found, writer=replace(found.writer, deployment=kept.writer.deployment), decided=kept.decided)

    def _complete(self, ledger: Ledger, entry: WindowEntry, watch: Stopwatch) -> Report:
        window = entry.window
        with self._explain_errors(ledger, window):
            if window.is_empty:
                report = Report(window, gaps=window.gaps)
            elif (applied := self.find_applied(window)) is not None:
                self.log.info("The sink has committed window %s already: only the close is left", window)
                report = sum_up_applied(window, applied, ledger.memory.dead.get(window.number))
            else:
                self.check(window)
                self.progress.begin_step("move")
                with watch.measure("move"):
                    report = self.move(window, ledger)
        report = replace(report, sink=self.sink.uri, guarantee=self.sink.guarantee.value, attempts=entry.attempt.number)
        faults.reached("close.begin")
        self.progress.begin_step("close")
        timings = watch.stop()
        timings |= self.progress.measure_parts_of_move(timings.get("move", 0.0), report)
        report = self.close(ledger, window, replace(report, timings=timings))
        faults.reached("close.committed")
        self.follow(ledger)
        self.log.info("%s", report.line)
        emit(report.to_dict())
        return report

    @contextmanager
    def _explain_errors(self, ledger: Ledger, window: Window) -> Iterator[None]:
        """Raise errors of a move with facts that only the operator has: the connection, whether splits are committed one by one,
        how many of them are published, and whether a newer attempt has taken over.

        A newer attempt ends the database sessions and the transactions of this one, and removes its stages. Any error of this
        attempt may therefore be misleading.
        """
        try:
            yield
        except RightMissing as error:
            raise error.name_connection(self.kafka_conn_id) from error
        except Fenced:
            raise
        except KafkaSparkError as error:
            try:
                ledger.verify()
            except Fenced as fenced:
                raise fenced from error
            except KafkaSparkError as unknown:
                self.log.warning("It is unknown if a newer attempt has taken over: %s", unknown)
            if (
                isinstance(error, (DataLoss, LogTruncated, TopicRecreated))
                and window.publishes
                and (there := ledger.read_published())
            ):
                every, kept = sum(1 for r in window.ranges if r.span), "they stay in their topic, and are not published again"
                error.action += f". {len(there)} of {every} partitions of window {window} are published already: {kept}"
            if isinstance(error, TopicMissing) and not error.conn_id:
                # A task does not know the name of its connection.
                raise TopicMissing(self.kafka_conn_id, self._add_missing_topics(error.topics)) from error.__cause__
            if isinstance(error, SparkJobFailed) and self.sink.guarantee.by_split:
                outcome = {"retryable": error.retryable, "cancelled": error.cancelled}
                raise SparkJobFailed(error.window, error.detail, True, **outcome) from error.__cause__
            raise

    def _add_missing_topics(self, found: Sequence[str]) -> Sequence[str]:
        """Return the topics that do not exist. An operator that knows more topics than the one that a task has not found adds
        those that are missing, too.

        :param found: the topics that a task has not found.
        """
        return found

    def check_results(self, window: Window, results: Sequence[SplitResult]) -> None:
        """Fail the window if there are bad records.

        :raises BadRecords: there are; names the first few, in the order of topic, partition and offset.
        """
        rejected = sum(result.rejected for result in results)
        if rejected:
            raise BadRecords(str(window), rejected, select_first_bad_records(results, 10), self.sink.guarantee.by_split)

    def check_counts(self, window: Window, results: Sequence[SplitResult]) -> None:
        """Compare the number of rows that the reader has passed on with the number that the sink has written.

        :raises CountMismatch: they differ.
        """
        read = sum(result.handed_over for result in results)
        flushed = sum(int(result.token["rows"]) for result in results if "rows" in result.token)
        if read != flushed:
            raise CountMismatch(str(window), read, flushed, self.sink.guarantee.by_split)

    def publish(self, report: dict[str, Any], context: Mapping[str, Any]) -> dict[str, Any]:
        """Return the report, which goes to XCom, and add it to the events of this task's outlets (step 7)."""
        self.reported = report
        for outlet in self.outlets:
            context["outlet_events"][outlet].extra = report
        return report

    @contextmanager
    def register_job(self, job: J) -> Iterator[J]:
        """Register a Spark job while it runs in this context, so that :meth:`on_kill` can cancel it."""
        self._job = job
        try:
            yield job
        finally:
            self._job = None

    def on_kill(self) -> None:
        """Cancel Spark's job, because SIGTERM alone raises no error in a task."""
        if self._job is not None:
            self._job.cancel()

    # --- for the steps ---

    @cached_property
    def kafka(self) -> KafkaHook:
        """The cluster of ``kafka_conn_id``."""
        from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

        return KafkaHook(self.kafka_conn_id, reading_group=self.own_group)

    @property
    @abstractmethod
    def own_group(self) -> str:
        """The consumer group whose offsets mirror the pipeline's position."""

    @cached_property
    def spark(self) -> SparkHook:
        """The Spark of ``spark_conn_id``. It is not started."""
        from airflow_kafka_spark.hooks.spark.hook import SparkHook

        return SparkHook(
            self.spark_options.conn_id, conf=self.spark_options.conf, app_name=f"airflow {self.dag_id}.{self.task_id}"
        )

    def get_bootstrap_servers(self) -> str:
        return str(self.kafka.config["bootstrap.servers"])

    def find_spark_problems(self) -> list[Problem]:
        """Return the problems that prevent Spark from starting: no pyspark, no Java, a master that Spark does not know, no answer
        at the address of the master or Connect server, or settings that are none."""
        return [*self.spark_options.find_problems(), *self._find_spark_connection_problems()]

    def _find_spark_connection_problems(self) -> list[Problem]:
        from airflow_kafka_spark.hooks.spark.health import find_master_problem
        from airflow_kafka_spark.hooks.spark.jars import find_java, find_spark_home_problem

        try:
            _ = self.spark.keep_alive
            if find_spec("pyspark") is None:
                action = "Install it, in the release of the cluster"
                return [Problem("spark_conn_id", "pyspark is not installed here", action)]
            if not self.spark.is_connect:
                find_java()
                if reason := find_spark_home_problem():
                    action = "Unset it, as pyspark brings a Spark, or install the release of pyspark that fits"
                    return [Problem("spark_conn_id", reason, action)]
            elif find_spec("grpc_status") is None:
                action = "Install `airflow-provider-kafka-spark[spark-connect]`"
                return [Problem("spark_conn_id", "Spark Connect needs grpcio-status, which is not installed", action)]
            if reason := find_master_problem(self.spark.master):
                action = f"Correct the host of the connection `{self.spark.spark_conn_id}`"
                return [Problem("spark_conn_id", reason, action)]
            if reason := self.spark.find_unreachable_reason():
                found = f"{reason} (connection `{self.spark.spark_conn_id}`, master `{self.spark.master}`)"
                action = "Set one of them" if self.spark.master.startswith("yarn") else "Start Spark there"
                return [Problem("spark_conn_id", found, f"{action}, or correct the connection")]
            return []
        except KafkaSparkError as error:
            return [Problem.of("spark_conn_id", error)]

    def add_assets(self, inlets: Iterable[str], outlets: Iterable[str]) -> None:
        """Add URIs to this task's inlets and outlets, beside those that the user gave.

        URIs with templates are left out: their values are not known yet."""
        for assets, uris in ((self.inlets, inlets), (self.outlets, outlets)):
            known = {getattr(asset, "uri", None) for asset in assets}
            for uri in uris:
                if uri not in known and "{{" not in uri:
                    assets.extend(_make_assets(uri))

    # --- helpers ---

    def get_pipeline_name(self, run: Run) -> str:
        return self.pipeline or f"{run.dag_id}.{run.task_id}"

    def find_pipeline_problems(self, run: Run) -> list[Problem]:
        """Return the problems of the pipeline's name and of the options of its ledger."""
        name, problems = self.get_pipeline_name(run), self.ledger_options.find_problems()
        if run.map_index >= 0 and not self.pipeline:
            what, action = "a mapped task has no name of its own for each index", "Give each one a `pipeline=`, in `expand`"
            problems.append(Problem("pipeline", what, action))
        elif self.pipeline is not None and not self.pipeline.strip():
            action = "Give it a name, or leave it out (default: DAG and task). A template has to render to a name"
            problems.append(Problem("pipeline", "it is empty", action))
        elif wrong := find_name_problem(name):
            what, action = wrong
            other = "" if self.pipeline is not None else ". It is made of DAG and task; `pipeline=` gives it another one"
            problems.append(Problem("pipeline", what, action + other))
        return problems

    def render_parts(self, context: Context, jinja_env: Environment) -> list[Problem]:
        """Render the templates of the sink and of other parts, and return the problems of those that render to ``None``."""
        self._destination_is_free = self._destination_is_free or any(map(is_template, self.sinks))
        return super().render_parts(context, jinja_env)

    @property
    def sinks(self) -> tuple[Sink | KafkaSink, ...]:
        """The sinks of the window, the operator's own sink first."""
        return (self.sink,)


def list_asset_uris(spec: object, kind: type[Sink] | type[RowSource]) -> list[str]:
    """Return the asset of a source or a sink; none if a template decides which one it is, or if an argument has a wrong type."""
    return [spec.asset_uri] if isinstance(spec, kind) and not is_template(spec) and not find_type_problems(spec) else []


def _make_assets(uri: str) -> list[Asset]:
    """Return the asset of a URI; none if Airflow refuses it, as that of an empty path, which the validation names."""
    from airflow.sdk import Asset

    try:
        return [Asset(uri=uri)]
    except ValueError:
        return []


def is_template(spec: object) -> bool:
    """Return True if a template decides which source or sink it is."""
    return any(mark in str(getattr(spec, name, "")) for name in getattr(spec, "template_fields", ()) for mark in ("{{", "{%"))


def describe_binding(binding: Binding) -> str:
    """Return the destination of a window, in one line."""
    facts = binding.destination.facts
    return f"to {', '.join(f'{what} {value}' for what, value in facts.items())}, moved by {binding.writer}"


def find_analysis_problems(
    where: str,
    check: Callable[[], Sequence[Problem]],
    cause: str,
    others: Sequence[Problem],
    instead: Callable[[], Sequence[Problem]] = tuple,
) -> list[Problem]:
    """Return the problems of a check that needs Spark, and that other problems may prevent.

    :param where: name of the check for users.
    :param check: makes the check; raises ValidationError if transforms do not fit.
    :param cause: the argument whose problem prevents the check; "" if none does.
    :param others: all problems that were found so far.
    :param instead: a smaller check, without Spark, for the case that this one is prevented.
    :raises KafkaSparkError: Spark does not answer, and there are no other problems.
    """
    found: list[Problem] = []
    if not cause:
        try:
            return list(check())
        except ValidationError as error:
            found, cause = list(error.problems), error.problems[0].where
        except Exception as error:
            others = [*others, *instead()]
            if not others:
                raise
            # It must not hide the other problems.
            found = [Problem.of("spark_conn_id", error)] if isinstance(error, KafkaSparkError) else []
            cause = find_first_cause((*found, *others))
    return [*found, *instead(), *([Unchecked(where, cause)] if where != cause else [])]


def find_first_cause(problems: Iterable[Problem]) -> str:
    """Return the argument of the first problem, for an :class:`~airflow_kafka_spark.errors.Unchecked`; "" without one."""
    return next((problem.where for problem in problems if not isinstance(problem, Unchecked)), "")
