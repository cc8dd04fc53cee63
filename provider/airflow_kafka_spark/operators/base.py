"""The life of a window, on one page.

1. **Validate** everything at once, before anything is touched.
2. **Fence and look**: open the ledger, which shuts out every earlier attempt and tells what they left. A pipeline that is paused
   is looked at without fencing, and the task skipped.
3. **Plan**: an open window is finished first, whoever planned it; else freeze the next one and write it down.
4. **Move**: one Spark job reads, decodes and writes the window where nobody sees it yet.
5. **Commit**: the sink takes the window whole, together with its own record of it.
6. **Close**: one Kafka transaction says COMPLETE and moves the group's offsets. Never before 5.
7. **Report**.

Killed at any point, the next attempt, be it a retry, a clear or the next scheduled run, finds the same window and goes on from
there: what is planned is not planned again, what the sink has taken is not written again, what is closed is only reported.
"""

from __future__ import annotations

import re
import time
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import BadRecords, CountMismatch, KafkaSparkError, PlannedMeanwhile, Problem, ValidationError
from airflow_kafka_spark.operators import binding as bindings
from airflow_kafka_spark.operators.metrics import emit
from airflow_kafka_spark.operators.paused import skip_paused, skip_though_invalid
from airflow_kafka_spark.operators.run import Run
from airflow_kafka_spark.operators.visible import VisibleOperator
from airflow_kafka_spark.sinks.base import Sink
from airflow_kafka_spark.windows.binding import Binding, Endpoint, with_details
from airflow_kafka_spark.windows.model import Applied, SplitResult, Window, first_bad
from airflow_kafka_spark.windows.report import Report, describe, sum_up_applied

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.hooks.spark import SparkHook
    from airflow_kafka_spark.ledger.attempt import Ledger
    from airflow_kafka_spark.sinks.kafka import KafkaSink
    from airflow_kafka_spark.windows.memory import Entry


class Cancellable(Protocol):
    """A Spark job on its way."""

    def cancel(self) -> None: ...


J = TypeVar("J", bound=Cancellable)

PLAN_TRIES = 5
"""How often an attempt plans, where other windows of the pipeline are planned with the same offsets at the same moment."""


class Stopwatch:
    """Seconds per step of a window's life."""

    def __init__(self) -> None:
        self.timings: dict[str, float] = {}
        self._begun = time.monotonic()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.timings[name] = self.timings.get(name, 0.0) + time.monotonic() - begun

    def stop(self) -> dict[str, float]:
        return {**self.timings, "total": time.monotonic() - self._begun}


class WindowOperator(VisibleOperator):
    """An operator that moves one window per run, exactly once as far as its sink can promise.

    Guarantee: windows of a pipeline are frozen before any work, applied in order, each once, and the consumer group's offsets
    move only after the sink has flushed, whatever is killed, retried, cleared or paused on the way.

    :param sink: where the window goes.
    :param pipeline: the name under which ledger and sink remember this flow; default ``<dag_id>.<task_id>``. Two flows never
        share a name, nor do two Airflow deployments: the ledger knows which task moves a pipeline, and where its windows go, and
        refuses another one. A mapped task has to be given one per index.
    :param kafka_conn_id: connection of type ``kafka``.
    :param spark_conn_id: connection of type ``spark`` or ``spark_connect``.
    :param spark_conf: Spark settings that win over the connection's.
    :param ledger_topic: the compacted topic that holds the ledgers; created on first use.
    :param keep_windows: windows remembered in the ledger, at least 1; older ones are tombstoned.
    """

    def __init__(
        self,
        *,
        sink: Sink | KafkaSink,
        pipeline: str | None = None,
        kafka_conn_id: str = "kafka_default",
        spark_conn_id: str = "spark_default",
        spark_conf: Mapping[str, str] | None = None,
        ledger_topic: str = "airflow-windows",
        keep_windows: int = 100,
        **kwargs: Any,
    ) -> None:
        # Runs of one pipeline follow each other. Side by side they would be right too, but fence each other out again and again.
        kwargs.setdefault("max_active_tis_per_dag", 1)
        super().__init__(**kwargs)
        self.sink = sink
        self.pipeline = pipeline
        self.kafka_conn_id = kafka_conn_id
        self.spark_conn_id = spark_conn_id
        self.spark_conf = spark_conf
        self.ledger_topic = ledger_topic
        self.keep_windows = keep_windows
        self._job: Cancellable | None = None
        self._destination_is_free = False

    # --- what a concrete operator says ---

    on_rerun: str | None = "skip"
    """What clearing a task means whose window is complete: ``skip`` reports it once more, ``replay`` moves it once more."""

    @abstractmethod
    def problems(self, run: Run) -> list[Problem]:
        """1. Everything that keeps this task from working. Changes nothing."""

    @abstractmethod
    def open_ledger(self, run: Run) -> Ledger:
        """2. The pipeline's ledger: entering it fences and looks."""

    def destinations(self) -> Endpoint:
        """Where rows go, and the sinks' own records of them."""
        return self.sink.destination()

    def origin(self) -> Endpoint:
        """Where they come from, beside the offsets that a window holds."""
        return Endpoint()

    @abstractmethod
    def plan(self, ledger: Ledger, run: Run) -> Window:
        """3. Freeze the next window, from where the pipeline stands."""

    @abstractmethod
    def check(self, window: Window) -> None:
        """Whether a planned window can still be read: asked before it is read, and again before the sink commits."""

    @abstractmethod
    def applied(self, window: Window) -> Applied | None:
        """The sink's own record of a window that an earlier attempt has brought there whole, or None."""

    @abstractmethod
    def move(self, window: Window, ledger: Ledger) -> Report:
        """4 and 5. Bring the window into the sink. Returns the account of it."""

    @abstractmethod
    def close(self, ledger: Ledger, window: Window, report: Report) -> Report:
        """6. Complete the window in the ledger and move the group's offsets."""

    def follow(self, ledger: Ledger) -> None:
        """What is left to do after a close, which an attempt that was killed may not have done."""

    # --- the life ---

    def execute(self, context: Mapping[str, Any]) -> dict[str, Any]:
        """Finish what is open, then move this run's own window.

        :return: the report of this run's window (:class:`~airflow_kafka_spark.windows.report.Report`), as JSON.
        :raises ValidationError: all problems at once; nothing was changed.
        :raises BindingChanged: the pipeline, or its open window, is another task's, or goes elsewhere; nothing was moved.
        :raises KafkaSparkError: one of its subclasses; the window stays as it was planned, and a retry goes on with it.
        :raises AirflowSkipException: the pipeline is paused; nothing was planned or moved.
        """
        run = Run.of(context)
        self.show(context, run)
        self.validate(run)
        overtaken = 0
        while True:
            watch = Stopwatch()
            with ExitStack() as opened:
                with watch.step("fence"):
                    ledger = self.open_ledger(run)
                    ledger.peek()
                    if not (is_paused := ledger.parent_memory.is_paused):
                        opened.enter_context(ledger)
                # Who is at work while the pipeline is paused is not fenced.
                if not is_paused:
                    faults.reached("fenced")
                done = ledger.completed(run.id)
                if done is not None:
                    bindings.refuse_other_writer(ledger.parent_pipeline, ledger.parent_memory, done, run)
                if done is not None and not self._moves_again(ledger, done, run):
                    self.log.info("Window %s of this run is complete already: nothing to do", done.window)
                    if not is_paused:
                        self.follow(ledger)
                    return self.publish(dict(done.report or Report(done.window, gaps=done.window.gaps).to_dict()), context)
                skip_paused(ledger)
                try:
                    with watch.step("plan"):
                        entry = self._next_window(ledger, run, done)
                except PlannedMeanwhile as error:
                    overtaken += 1
                    if overtaken == PLAN_TRIES:
                        raise
                    self.log.info("Planning again: %s", error)
                    continue
                faults.reached("planned")
                with self.seen(entry.window):
                    report = self._complete(ledger, entry, watch)
            if entry.window.run == run.id:
                return self.publish(report.to_dict(), context)
            self.log.info("That was the open window of run %s; this run's own window comes next", entry.window.run)

    def validate(self, run: Run) -> None:
        """:raises ValidationError: naming every problem.
        :raises AirflowSkipException: there are some, and the pipeline is paused: perhaps because of them.
        """
        problems = self.problems(run)
        if problems:
            if not {"kafka_conn_id", "pipeline"} & {problem.where for problem in problems}:
                skip_though_invalid(lambda: self.open_ledger(run))
            raise ValidationError(problems)

    def is_rerun(self, done: Entry, run: Run) -> bool:
        """Whether this run has moved its window before and is to move it again.

        :raises ValidationError: it is, and the sink cannot replace what it has taken.
        """
        return self.on_rerun == "replay" and self.was_cleared(done, run)

    def _moves_again(self, ledger: Ledger, done: Entry, run: Run) -> bool:
        """Whether a complete window is moved once more: its task was cleared and that means so, or somebody has asked for it.

        :raises ValidationError: it is to be, and the sink cannot replace what it has taken.
        """
        asked = ledger.parent_memory.replay_asked(done.window)
        if asked is None:
            return self.is_rerun(done, run)
        self.log.info("%s has asked for window %s to be moved once more: %s", asked.who, done.window, asked.why)
        if problems := self.replay_problems():
            raise ValidationError(problems)
        return True

    def _refuse_replay(self, unfinished: Entry) -> None:
        """Look, before a replay that is open is taken up again, whether the sink can still replace rows: it may have been planned
        for another sink, or another file system.

        :raises ValidationError: the sink cannot, with the command that gives the replay up.
        """
        if not unfinished.window.replay or not (problems := self.replay_problems()):
            return
        window = unfinished.window
        found = f"window {window} is being moved once more"
        give_up = f"To give that up, and leave its rows as they are: `python -m airflow_kafka_spark skip {window.pipeline}`"
        action = "No other interval waits for it: its rows stay as they are" if window.interval else give_up
        raise ValidationError([*problems, Problem("on_rerun", found, action)])

    def replay_problems(self) -> list[Problem]:
        """Why the sink cannot replace the rows of a window that it has taken."""
        if isinstance(self.sink, Sink):
            return self.sink.replay_problems()
        return [Problem("sink", "what is published to Kafka cannot be replaced")]

    def was_cleared(self, done: Entry, run: Run) -> bool:
        """Return True if the task was cleared after its last attempt at this window, which it has planned or moved. Another run
        may have finished the window. A task that is only retried, because it died after the close, was not cleared."""
        known = done.tries.get(run.id)
        return known is not None and run.tries.cleared_since(known, self.retries or 0)

    def _next_window(self, ledger: Ledger, run: Run, done: Entry | None) -> Entry:
        """The open window if there is one, whoever planned it; else the one that is to be moved again; else a new one, frozen and
        written down."""
        unfinished, found = ledger.memory.open_entry, self.binding(run)
        if unfinished is None and done is not None:
            bindings.refuse_replay_elsewhere(ledger.parent_pipeline, ledger.parent_memory, done, found)
            self.log.info("Window %s is complete, and its task runs again: moving it once more", done.window)
            entry = ledger.replay(done)
        elif unfinished is None:
            found = self._bind(ledger, found)
            entry = ledger.plan(replace(self.plan(ledger, run), binding=found))
        else:
            if bindings.refuse_elsewhere(ledger.parent_pipeline, ledger.parent_memory, unfinished, found):
                found = self._bind(ledger, found)
                self.log.warning("Window %s goes from now on %s", unfinished.window, told(found))
            elif unfinished.window.binding is not None:
                found = with_details(unfinished.window.binding, found)
            unfinished = replace(unfinished, window=replace(unfinished.window, binding=found))
            self._refuse_replay(unfinished)
            self.log.info(
                "Window %s was planned by run %s and is not complete: finishing it first",
                unfinished.window,
                unfinished.window.run,
            )
            entry = ledger.reopen(unfinished)
        window = entry.window
        self.log.info("Window %s: %s", window, describe(window))
        if window.held_back:
            self.log.info("%s offsets behind an open transaction are left to a later window", f"{window.held_back:,}")
        for gap in window.gaps:
            self.log.warning(
                "Offsets [%d, %d) of %s-%d were deleted before they were read", gap.start, gap.end, gap.topic, gap.partition
            )
        return entry

    def binding(self, run: Run) -> Binding:
        """Who this is, where it goes and where it comes from."""
        return Binding(bindings.writer_of(run), self.destinations(), self.origin())

    def _bind(self, ledger: Ledger, found: Binding) -> Binding:
        """Bind the pipeline to what this run has.

        :return: what the window is bound to.
        :raises BindingChanged: it is bound to something else.
        """
        kept = ledger.bind(lambda whole: bindings.bound(ledger.parent_pipeline, whole, found, is_free=self._destination_is_free))
        return replace(found, writer=replace(found.writer, deployment=kept.writer.deployment), decided=kept.decided)

    def _complete(self, ledger: Ledger, entry: Entry, watch: Stopwatch) -> Report:
        window = entry.window
        if window.is_empty:
            report = Report(window, gaps=window.gaps)
        elif (applied := self.applied(window)) is not None:
            self.log.info("The sink has taken window %s already: only the close is left", window)
            report = sum_up_applied(window, applied, ledger.memory.dead.get(window.number))
        else:
            self.check(window)
            self.progress.step("move")
            with watch.step("move"):
                report = self.move(window, ledger)
        report = replace(report, sink=self.sink.uri, guarantee=self.sink.guarantee.value, attempts=entry.attempt.number)
        faults.reached("close.begin")
        self.progress.step("close")
        report = self.close(ledger, window, replace(report, timings=watch.stop()))
        faults.reached("close.committed")
        self.follow(ledger)
        self.log.info("%s", report.line)
        emit(report.to_dict())
        return report

    def check_results(self, window: Window, results: Sequence[SplitResult]) -> None:
        """Nothing bad among the records, or nothing is committed.

        :raises BadRecords: naming the first few, in the order of topic, partition and offset.
        """
        rejected = sum(result.rejected for result in results)
        if rejected:
            raise BadRecords(str(window), rejected, first_bad(results, 10), self.sink.guarantee.by_split)

    def check_counts(self, window: Window, results: Sequence[SplitResult]) -> None:
        """Counted twice: by the reader and by the sink.

        :raises CountMismatch: when they disagree.
        """
        read = sum(result.handed_over for result in results)
        flushed = sum(int(result.token["rows"]) for result in results if "rows" in result.token)
        if read != flushed:
            raise CountMismatch(str(window), read, flushed, self.sink.guarantee.by_split)

    def publish(self, report: dict[str, Any], context: Mapping[str, Any]) -> dict[str, Any]:
        """7. The report goes to XCom and onto the events of this task's outlets."""
        self.reported = report
        for outlet in self.outlets:
            context["outlet_events"][outlet].extra = report
        return report

    @contextmanager
    def running(self, job: J) -> Iterator[J]:
        """While a Spark job runs in here, :meth:`on_kill` reaches it."""
        self._job = job
        try:
            yield job
        finally:
            self._job = None

    def on_kill(self) -> None:
        """Makes Spark's job fail: SIGTERM alone raises nothing in a task."""
        if self._job is not None:
            self._job.cancel()

    # --- what the parts are made of ---

    @cached_property
    def kafka(self) -> KafkaHook:
        from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

        return KafkaHook(self.kafka_conn_id)

    @cached_property
    def spark(self) -> SparkHook:
        from airflow_kafka_spark.hooks.spark import SparkHook

        return SparkHook(self.spark_conn_id, conf=self.spark_conf, app_name=f"airflow {self.dag_id}.{self.task_id}")

    def spark_problems(self) -> list[Problem]:
        """What keeps Spark from starting."""
        from airflow_kafka_spark.hooks.jars import find_java

        try:
            if not self.spark.is_connect:
                find_java()
            elif find_spec("grpc_status") is None:
                action = "Install `airflow-provider-kafka-spark[spark-connect]`"
                return [Problem("spark_conn_id", "Spark Connect needs grpcio-status, which is not installed", action)]
            return []
        except KafkaSparkError as error:
            return [problem_from("spark_conn_id", error)]

    def add_assets(self, inlets: Iterable[str], outlets: Iterable[str]) -> None:
        """Make URIs this task's inlets and outlets, beside those the user gave. What a template makes of one is not known yet:
        such a topic, source or sink has no asset by itself."""
        from airflow.sdk import Asset

        for assets, uris in ((self.inlets, inlets), (self.outlets, outlets)):
            known = {getattr(asset, "uri", None) for asset in assets}
            assets.extend(Asset(uri=uri) for uri in uris if uri not in known and "{{" not in uri)

    # --- small things ---

    def pipeline_name(self, run: Run) -> str:
        return self.pipeline or f"{run.dag_id}.{run.task_id}"

    def pipeline_problems(self, run: Run) -> list[Problem]:
        name = self.pipeline_name(run)
        if run.map_index >= 0 and not self.pipeline:
            return [
                Problem(
                    "pipeline", "a mapped task has no name of its own for each index", "Give each one a `pipeline=`, in `expand`"
                )
            ]
        if len(name) > 200 or not name.strip() or re.search(r"[\x00-\x1f]", name):
            return [Problem("pipeline", f"`{name[:60]}` cannot be a pipeline's name", "Use 1 to 200 printable characters")]
        return []

    def render_template_fields(self, context: Any, jinja_env: Any = None) -> None:
        """Renders what Airflow renders, and the fields that sinks and formats declare as templates: those are frozen."""
        super().render_template_fields(context, jinja_env)
        env = jinja_env or self.get_template_env()
        self._destination_is_free = self._destination_is_free or any(map(is_template, self.sinks))
        for name in ("sink", "source", "value", "key"):
            spec = getattr(self, name, None)
            if (made := self.rendered(spec, context, env)) is not spec:
                setattr(self, name, made)

    @property
    def sinks(self) -> tuple[Any, ...]:
        """All sinks that rows go to."""
        return (self.sink,)

    def rendered(self, spec: Any, context: Any, env: Any) -> Any:
        """A sink or a format with its templates rendered; anything else as it is."""
        templated = getattr(spec, "template_fields", ())
        if not (is_dataclass(spec) and not isinstance(spec, type) and templated):
            return spec
        known = {f.name for f in fields(spec)}
        return replace(spec, **{f: self.render_template(getattr(spec, f), context, env) for f in templated if f in known})


def asset_uris(spec: Any, kind: type) -> list[str]:
    """The asset of a source or a sink: none while a template leaves open which one it is."""
    known: Any = spec if isinstance(spec, kind) and not is_template(spec) else None
    return [known.asset_uri] if known is not None else []


def is_template(spec: Any) -> bool:
    """Whether it depends on the run which source or sink it is."""
    return any(mark in str(getattr(spec, name, "")) for name in getattr(spec, "template_fields", ()) for mark in ("{{", "{%"))


def told(binding: Binding) -> str:
    """Where a window goes, in one line."""
    facts = binding.destination.facts
    return f"to {', '.join(f'{what} {value}' for what, value in facts.items())}, moved by {binding.writer}"


def problem_from(where: str, error: KafkaSparkError) -> Problem:
    """An error as one of several problems."""
    return Problem(where, error.found + (f" (expected {error.expected})" if error.expected else ""), error.action)
