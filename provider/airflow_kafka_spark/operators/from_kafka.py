"""Windows that are read from Kafka: their topics and formats, the start and end of the next window, and the group's offsets."""

from __future__ import annotations

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from datetime import datetime, timezone
from functools import cached_property, partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.arguments import unwrap_literals
from airflow_kafka_spark.bad_records.options import find_route_problems
from airflow_kafka_spark.errors import (
    ChangeRefused,
    FollowedMismatch,
    KafkaSparkError,
    OldOffsetsInRows,
    PlanError,
    Problem,
    RightMissing,
    TopicMissing,
    Unchecked,
    ValidationError,
)
from airflow_kafka_spark.errors.base import find_similar_name, quote_names
from airflow_kafka_spark.formats.base import Format, NullValues
from airflow_kafka_spark.hooks.kafka.log import read_log
from airflow_kafka_spark.operators.base import WindowOperator, find_first_cause
from airflow_kafka_spark.operators.binding import Run, refuse_other_group
from airflow_kafka_spark.operators.clock_changes import warn_of_clock_changes
from airflow_kafka_spark.operators.intervals import (
    IntervalPlan,
    find_interval,
    find_position_after_intervals,
    make_interval_problem,
)
from airflow_kafka_spark.operators.options import (
    LEDGER_RIGHTS,
    READ_RIGHTS,
    FollowOptions,
    ReadOptions,
    RecordOptions,
    WindowOptions,
    option,
)
from airflow_kafka_spark.operators.visibility.lineage import Dataflow
from airflow_kafka_spark.sinks.base import OFFSET_COLUMNS, Sink
from airflow_kafka_spark.sources.kafka.topics import Subscription
from airflow_kafka_spark.windows.binding import Endpoint
from airflow_kafka_spark.windows.continuity import find_foreign_topics
from airflow_kafka_spark.windows.memory import list_known_topic_ids
from airflow_kafka_spark.windows.model import (
    ELSEWHERE,
    KEY_CONVERTER,
    TOPIC_NAME,
    TRANSFORMATION,
    VALUE_CONVERTER,
    Applied,
    Followed,
    Gap,
    OffsetRange,
    Split,
    TopicPartition,
    Window,
)
from airflow_kafka_spark.windows.offset_specs import CommittedOffsets, SpecificOffsets, Written, parse_start, parse_stop
from airflow_kafka_spark.windows.plan import (
    KEPT_ROWS,
    Log,
    Position,
    check_readable,
    find_epochs,
    find_lost_topics,
    find_unread_gaps,
    is_recreated,
    plan_ranges,
)
from airflow_kafka_spark.windows.report import Report
from airflow_kafka_spark.windows.times import UpstreamCounts

if TYPE_CHECKING:
    from airflow_kafka_spark.control.preview import Preview
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.hooks.kafka.requests import CommittedOffset, TopicDescription
    from airflow_kafka_spark.jobs.tasks.account import Tolerance
    from airflow_kafka_spark.jobs.tasks.layout import RowLayout
    from airflow_kafka_spark.jobs.tasks.read import Reading
    from airflow_kafka_spark.ledger.attempt import Ledger
    from airflow_kafka_spark.ledger.beginning import Beginning
    from airflow_kafka_spark.windows.memory import WindowEntry

log = logging.getLogger(__name__)


class FromKafkaOperator(WindowOperator):
    """The Kafka side of an operator: the conversion of records to rows, and steps 2, 3 and 6 of a window's life.

    The concrete operators take the options one by one; here they are in groups.

    :param read_options: topics, start, end, and the way in which records are read.
    :param record_options: the conversion of records to rows.
    :param window_options: the range of a window, and the effect of clearing the task.
    :param follow_options: the pipeline with whose published records each window ends.
    :param kwargs: the other groups (:class:`~airflow_kafka_spark.operators.base.WindowOperator`), and arguments of Airflow's
        ``BaseOperator``.
    """

    topics = option[str | Sequence[str] | None]("read_options")
    topics_pattern = option[str | None]("read_options")
    group_id = option[str]("read_options")
    starting_offsets = option[Written]("read_options")
    ending_offsets = option[Written]("read_options")
    max_records = option[int | str | None]("read_options")
    upstream_counts = option[UpstreamCounts | str | None]("read_options")
    follows = option[str | None]("follow_options")
    value = option[Format]("record_options")
    key = option[Format | None]("record_options")

    template_fields: Sequence[str] = (
        "topics",
        "topics_pattern",
        "group_id",
        "pipeline",
        "kafka_conn_id",
        "ledger_topic",
        "spark_conn_id",
        "max_records",
        "starting_offsets",
        "ending_offsets",
        "follows",
        "upstream_counts",
        "errors_deadletterqueue_topic_name",
    )
    rendered_parts = ("sink", "value", "key")
    typed_parts = {
        **WindowOperator.typed_parts,
        "read_options": "",
        "record_options": "",
        "window_options": "",
        "follow_options": "",
    }
    routes_to_sinks = False
    """True if ``Filter(to=...)`` may send records to another sink."""

    def __init__(
        self,
        *,
        read_options: ReadOptions,
        record_options: RecordOptions,
        window_options: WindowOptions,
        follow_options: FollowOptions,
        **kwargs: Any,
    ) -> None:
        if window_options.by_interval:
            # Intervals may run concurrently: each has its own place in ledger and sink.
            kwargs.setdefault("max_active_tis_per_dag", None)
        super().__init__(**kwargs)
        self.read_options = read_options
        self.record_options = unwrap_literals(record_options)
        self.window_options = window_options
        self.follow_options = follow_options

    # --- for concrete operators ---

    @property
    @abstractmethod
    def null_values(self) -> NullValues:
        """The treatment of a record without a value. Its default depends on the operator."""

    @abstractmethod
    def find_null_value_problems(self) -> list[Problem]:
        """Return the problems of ``behavior_on_null_values``."""

    # --- 1. validate ---

    def find_reading_problems(self, run: Run) -> list[Problem]:
        """Return the problems of the arguments, without asking a server."""
        window, read = self.window_options, self.read_options
        problems = [
            *self.find_pipeline_problems(run),
            *read.find_problems(),
            *self.follow_options.find_problems(read),
            *window.find_problems(read, self.follow_options),
        ]
        if self.follow_options.follows == self.get_pipeline_name(run):
            problems.append(Problem("follows", "a pipeline cannot follow itself", "Name the pipeline that publishes the records"))
        if self.ledger_topic in self.subscription.topics:
            what = "the pipeline reads this topic, and its records would be read as the state of pipelines"
            problems.append(Problem("ledger_topic", what, "Name a topic of its own, or leave it out (default `airflow-windows`)"))
        if window.by_interval:
            warn_of_clock_changes(self.get_dag(), datetime.now(timezone.utc))
            if window.on_missing_interval == "fail" and find_interval(run) is None:
                problems.append(make_interval_problem(run))
        return problems

    @property
    def on_rerun(self) -> str | None:
        return self.window_options.on_rerun

    def find_decoding_problems(self, wrong_types: Sequence[Problem]) -> list[Problem]:
        """Return the problems of formats and columns, without asking a server.

        :param wrong_types: problems of formats and sinks of a wrong type.
        """
        if {problem.where for problem in wrong_types} & {"value", "key"}:
            return list(wrong_types)
        value, key = self.formats
        wrong = [*value.validate("value"), *(key.validate("key") if key else ())]
        if not wrong:
            of_columns = self.record_options.find_column_problems(value, key)
            return [*wrong_types, *of_columns, *([] if wrong_types else self.find_null_value_problems())]
        given = {
            "metadata_columns": self.record_options.metadata_columns,
            "behavior_on_null_values": self.record_options.behavior_on_null_values,
        }
        return [*wrong_types, *wrong, *(Unchecked(name, find_first_cause(wrong)) for name, value in given.items() if value)]

    def find_transform_problems(self) -> list[Problem]:
        """Return the problems of the transforms' options, without Spark."""
        if not self.transforms:
            return []
        from airflow_kafka_spark.transforms import find_chain_problems

        found = find_chain_problems(self.transforms, capturing=self.routes_to_sinks)
        if self.read_options.read_with == "spark":
            found.append(Problem("read_with", "with `transforms`, Spark's tasks read the topics themselves", "Leave it out"))
        return found

    def find_error_problems(self) -> list[Problem]:
        """Return the problems of the options for bad records, and of the topics of dead letters and routed records."""
        problems = self.errors.find_problems() or self.errors.find_server_problems(
            self.kafka, self.list_reserved_topics(self.errors.topic)
        )
        return [*problems, *find_route_problems(self.kafka, self.list_routes(), self.errors, self.list_reserved_topics)]

    def list_reserved_topics(self, topic: str | None) -> tuple[str, ...]:
        """Return the topics to which bad and routed records must not be sent: the topics that are read, and the ledger.

        :param topic: a topic that may match the pattern of the topics that are read.
        """
        subscription = self.subscription
        read = subscription.topics or ((topic,) if topic and subscription.matches(topic) else ())
        return (*read, self.ledger_topic)

    def find_server_problems(self, run: Run) -> list[Problem]:
        """Return the problems that Kafka and Spark report: missing topics, a group with members, offsets that do not fit the
        topics, a Spark that cannot start."""
        name = "topics" if self.subscription.topics else "topics_pattern"
        checks = {name: self._find_missing_topics, "group_id": self._find_group_problems, **self._make_bound_checks(run)}
        of_kafka: list[Problem] = []
        for where, check in checks.items():
            if any(problem.where == "kafka_conn_id" for problem in of_kafka):
                of_kafka.append(Unchecked(where, "kafka_conn_id"))
                continue
            try:
                of_kafka += check()
            except RightMissing as error:
                of_kafka.append(Problem.of(where, error))
            except KafkaSparkError as error:
                of_kafka += [Problem.of("kafka_conn_id", error), Unchecked(where, "kafka_conn_id")]
        return [*of_kafka, *self.find_spark_problems()]

    def _find_missing_topics(self) -> Iterator[Problem]:
        subscription = self.subscription
        if subscription.topics:
            # Brokers refuse the whole request for a name that no topic can have.
            names = set(filter(TOPIC_NAME.fullmatch, subscription.topics))
            there, lacking = self._check_topics(names)
            yield from self._list_right_problems(lacking)
            missing = sorted(names - there.keys() - lacking.keys())
            if missing:
                found = Problem.of("topics", TopicMissing(self.kafka.conn_id, missing))
                known = self.kafka.list_topics()
                similar = [name for topic in missing if (name := find_similar_name(topic, known))]
                yield replace(found, what=f"{found.what}; there is {quote_names(similar)}") if similar else found
        elif subscription.pattern and not subscription.validate():
            names = set(self.resolve())
            yield from self._list_right_problems(self._check_topics(names)[1])
            if not names:
                action = (
                    "Create one, or correct the regular expression: the whole name has to match, and `.*` stands for any text"
                )
                yield Problem("topics_pattern", f"no topic matches `{subscription.pattern}`", action)

    def _check_topics(self, names: Collection[str]) -> tuple[dict[str, TopicDescription], dict[str, RightMissing]]:
        """Return the topics to read that exist, and the errors of those, and of the ledger, on which the user lacks a right."""
        ledger = {self.ledger_topic: LEDGER_RIGHTS} if TOPIC_NAME.fullmatch(self.ledger_topic) else {}
        return self.kafka.check_topics({**dict.fromkeys(names, READ_RIGHTS), **ledger}, optional=ledger)

    def _list_right_problems(self, lacking: Mapping[str, RightMissing]) -> Iterator[Problem]:
        of_topics = "topics" if self.subscription.topics else "topics_pattern"
        for topic, error in lacking.items():
            yield Problem.of("ledger_topic" if topic == self.ledger_topic else of_topics, error)

    def _find_group_problems(self) -> Iterator[Problem]:
        group = self.group_id
        if not isinstance(group, str) or not group.strip():
            return
        state, lacking = self.kafka.check_group(group, READ_RIGHTS)
        if lacking:
            yield Problem.of("group_id", lacking)
        if state.members:
            listed = ", ".join(map(str, state.members))
            action = "Stop them, or use a group of this pipeline's own"
            yield Problem("group_id", f"group `{group}` has live members: {listed}", action)

    def _make_bound_checks(self, run: Run) -> dict[str, Callable[[], Iterator[Problem]]]:
        """Return the checks of start and end that need the topics, by argument. Other starts and ends than offsets and a group
        without a fallback always fit."""
        found: dict[str, Callable[[], Iterator[Problem]]] = {}
        if self.window_options.by_interval:
            return found
        for where, parse in (("starting_offsets", parse_start), ("ending_offsets", parse_stop)):
            try:
                bound = parse(getattr(self, where))
            except ValueError:
                continue
            if isinstance(bound, SpecificOffsets) or bound == CommittedOffsets(getattr(bound, "group_id", None), "none"):
                found[where] = partial(self._find_bound_problems, where, run)
        return found

    def _find_bound_problems(self, where: str, run: Run) -> Iterator[Problem]:
        """Return the reasons why a start or an end does not fit the topics, if the next window of the pipeline depends on it.

        :param where: ``starting_offsets`` or ``ending_offsets``.
        """
        from airflow_kafka_spark.hooks.kafka.log import resolve_start, resolve_stop

        subscription = self.subscription
        name = "topics" if subscription.topics else "topics_pattern"
        if subscription.validate() or (of_topics := list(self._find_missing_topics())):
            yield Unchecked(where, of_topics[0].where if of_topics else name)
            return
        log = read_log(self.kafka, self.resolve())
        try:
            if where == "ending_offsets":
                resolve_stop(self.kafka, parse_stop(self.ending_offsets), log)
            else:
                resolve_start(self.kafka, parse_start(self.starting_offsets), log, self.group_id)
        except PlanError as error:
            try:
                is_needed = self._plans_with(where, run, log)
            except Exception as unknown:
                self.log.debug("The beginning of the pipeline is unknown: %s", unknown)
                yield Unchecked(where, "sink")
                return
            if is_needed:
                yield Problem.of(where, error)

    def _plans_with(self, where: str, run: Run, log: Log) -> bool:
        """Return True if this run plans a window with an argument: it has no open or complete window, and a start is used by a
        new pipeline only."""
        ledger = self.open_ledger(run)
        ledger.peek()
        if ledger.memory.open_entry is not None or ledger.find_completed(run.id) is not None:
            return False
        if where == "ending_offsets":
            return True
        if ledger.memory.position.offsets:
            return False
        of_group = self.kafka.read_committed_offsets(self.group_id, log.partitions)
        return self._find_beginning(ledger, log, of_group).decided_by == "starting_offsets"

    def is_rerun(self, done: WindowEntry, run: Run) -> bool:
        if self.on_rerun is not None or not self.window_options.by_interval:
            return super().is_rerun(done, run)
        cleared = self.was_cleared(done, run)
        if cleared and (problems := self.find_replay_problems()):
            raise ValidationError(problems)
        return cleared

    # --- 2. fence and read ---

    def open_ledger(self, run: Run) -> Ledger:
        from airflow_kafka_spark.ledger.attempt import Ledger
        from airflow_kafka_spark.ledger.interval import IntervalLedger

        name = self.get_pipeline_name(run)
        options: dict[str, Any] = {
            "topic": self.ledger_topic,
            "keep_windows": self.ledger_options.keep_windows,
            "tries": run.tries,
        }
        by_interval = self.window_options.by_interval
        interval = find_interval(run) if by_interval else None
        if interval is not None:
            return IntervalLedger(self.kafka, name, run.id, interval, group_id=self.group_id, **options)
        # The ledger of an interval moves the group in its own transaction, and writes no short cut to its metadata.
        hints = () if by_interval else self.resolve()
        return Ledger(
            self.kafka, name, run.id, group_id=self.group_id, hint_topics=hints, beside_intervals=by_interval, **options
        )

    def make_records_check(self, run: Run) -> Callable[[], bool] | None:
        from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
        from airflow_kafka_spark.ledger.attempt import Ledger

        subscription, ledger_topic = self.subscription, self.ledger_topic
        # Spark's own reader needs jars, which a session gets when it is started.
        if self.window_options.by_interval or self.read_options.read_with == "spark" or subscription.validate():
            return None
        pipeline, group = self.get_pipeline_name(run), self.group_id
        # Airflow serves one thread at a time, so the connection is looked up here.
        config = self.kafka.config

        def foresee() -> bool:
            with KafkaHook(self.kafka_conn_id, reading_group=self.own_group) as kafka:
                kafka.__dict__["config"] = config
                topics = subscription.resolve(kafka, without=(ledger_topic,))
                ledger = Ledger(kafka, pipeline, run.id, topic=ledger_topic, group_id=group, hint_topics=topics)
                ledger.peek()
                memory = ledger.memory
                if memory.is_paused or ledger.find_completed(run.id) is not None:
                    return False
                if memory.open_entry is not None:
                    return not memory.open_entry.window.is_empty
                known = memory.position.offsets
                return any(tp in known and found.lso > known[tp] for tp, found in kafka.read_offsets(topics).items())

        return foresee

    # --- 3. plan ---

    def find_origin(self) -> Endpoint:
        """Return the group of the pipeline. The topics are in the window's ranges."""
        return Endpoint(details={"group": self.group_id})

    @staticmethod
    def needs_analysis(window: Window) -> bool:
        """Return True if Spark checks SQL and transforms before a new window is planned: the window has records, or it is the
        first one of a pipeline, so that mistakes show early. The window of a data interval counts only if it has records.
        """
        return not window.is_empty or (window.number == 1 and window.interval is None)

    def plan(self, ledger: Ledger, run: Run) -> Window:
        from airflow_kafka_spark.ledger.interval import IntervalLedger

        if isinstance(ledger, IntervalLedger):
            window, known = self._intervals.make_window(ledger, run), list_known_topic_ids(ledger.parent_memory)
            recreated = {t for t, found in window.topic_ids.items() if found not in known.get(t, (found,))}
            return self._refuse_old_offsets(window, recreated, window.topic_ids.keys() - known.keys())
        return self._plan_progress_window(ledger, run)

    def _plan_progress_window(self, ledger: Ledger, run: Run) -> Window:
        """Return the window of all records after the position of the pipeline, as far as the options allow."""
        from airflow_kafka_spark.hooks.kafka.log import compare_epochs, resolve_stop
        from airflow_kafka_spark.ledger.attempt import format_utc_now

        topics = self.resolve()
        log = read_log(self.kafka, topics)
        of_group = self.kafka.read_committed_offsets(self.group_id, log.partitions)
        refuse_other_group(ledger, self.group_id, of_group)
        committed = {tp: c.offset for tp, c in of_group.items() if c}
        found = self._find_confirmed_beginning(ledger, log, of_group)
        position = found.position
        beginning = (
            {} if position.offsets else resolve_starting_offsets(self.kafka, self.starting_offsets, log, self.group_id, of_group)
        )
        log = compare_epochs(self.kafka, log, position.offsets, position.epochs, position.topic_ids)
        followed, log = self._follow(log, position, beginning, topics)
        planned = plan_ranges(
            log,
            position,
            topics,
            starts=beginning,
            stops=resolve_stop(self.kafka, parse_stop(self.ending_offsets), log, position.offsets),
            data_loss=self.read_options.data_loss,
            max_records=self.read_options.record_limit,
        )
        self._compare_group(committed, position)
        began: dict[TopicPartition, int] = {}
        # The windows of a ledger that was lost have begun somewhere before this one.
        if not ledger.memory.position.offsets and found.decided_by in ("ledger", "starting_offsets"):
            read_before = self._find_committed_start(of_group) if found.decided_by == "starting_offsets" else frozenset()
            began = {tp: r.start for r in planned.ranges if r.start and (tp := r.topic_partition) not in read_before}
        elif found.decided_by == "sink":
            began = {
                r.topic_partition: position.began[r.topic_partition]
                for r in planned.ranges
                if r.topic_partition in position.began
            }
        window = Window(
            pipeline=ledger.pipeline,
            number=max(found.last_number, ledger.memory.last_used) + 1,
            ranges=planned.ranges,
            run=run.id,
            planned_at=format_utc_now(),
            cluster_id=log.cluster_id,
            topic_ids={t: log.topic_ids[t] for t in topics if log.topic_ids.get(t)},
            gaps=planned.gaps,
            held_back=planned.held_back,
            follows=followed,
            moved=position.moved,
            passed=position.passed,
            epochs=find_epochs(log, planned.ranges),
            after=ELSEWHERE if found.is_beyond_sink else 0,
            began=began,
        )
        if followed is not None and followed.records is not None and window.span < followed.records:
            # There are fewer offsets than the limit of records, so reading cannot find more.
            self.check_followed(window, window.span)
        recreated = {t for t in topics if is_recreated(t, log, position)}
        if position.moved and (last := self.read_record_of_sink(ledger.pipeline)) is not None:
            recreated |= find_foreign_topics(last, log.cluster_id, window.topic_ids)
        return self._refuse_old_offsets(window, recreated, window.topic_ids.keys() - position.topic_ids.keys())

    def _find_confirmed_beginning(
        self,
        ledger: Ledger,
        log: Log,
        of_group: Mapping[TopicPartition, CommittedOffset | None],
    ) -> Beginning:
        """Return the beginning of the next window. The ledger is read again if it has no position, but the group has."""
        from airflow_kafka_spark.hooks.kafka.log import warn_of_lost_transactions

        found = self._find_beginning(ledger, log, of_group)
        if found.decided_by == "group":
            # Either the ledger is lost, or the pipeline got this name after the ledger was read.
            ledger.read()
            found = self._find_beginning(ledger, log, of_group)
        warn_of_lost_transactions(self.kafka, log, found.position.offsets)
        if found.decided_by == "sink":
            what = "The ledger has no record of pipeline %s, but its sink has: continuing after window %d"
            self.log.warning(what, ledger.pipeline, found.last_number)
        return found

    def _find_committed_start(self, of_group: Mapping[TopicPartition, CommittedOffset | None]) -> frozenset[TopicPartition]:
        """Return the partitions in which the first window begins where another client has left off. That client has read the
        records before.

        :param of_group: the committed offsets of the pipeline's group.
        """
        start = parse_start(self.starting_offsets)
        if not isinstance(start, CommittedOffsets):
            return frozenset()
        is_own = start.group_id in (None, self.group_id)
        committed = of_group if is_own else self.kafka.read_committed_offsets(str(start.group_id), of_group)
        return frozenset(tp for tp, there in committed.items() if there is not None)

    def _refuse_old_offsets(self, window: Window, recreated: Collection[str], unread: Collection[str]) -> Window:
        """Return a window that is going to be planned, unless an upsert would take its records for older ones.

        :param recreated: the topics that have other records under their offsets than those that the pipeline has read.
        :param unread: the topics that are new to the pipeline. Another pipeline may have read earlier ones of these names.
        :raises OldOffsetsInRows: rows of a sink have offsets of earlier topics.
        """
        for sink in self.sinks if recreated or unread else ():
            if not isinstance(sink, Sink):
                continue
            last = sink.find_last_windows(unread)
            foreign = {t for t in last if find_foreign_topics(last[t], window.cluster_id, {t: window.topic_ids[t]})}
            earlier = foreign.union(recreated)
            if earlier and (topics := sink.find_topics_in_rows(window, earlier)):
                raise OldOffsetsInRows(sink.uri, topics, OFFSET_COLUMNS)
        return window

    def _find_beginning(
        self,
        ledger: Ledger,
        log: Log,
        of_group: Mapping[TopicPartition, CommittedOffset | None],
    ) -> Beginning:
        """Return the beginning of the next window."""
        from airflow_kafka_spark.ledger.beginning import decide_beginning

        return decide_beginning(
            ledger.memory,
            log,
            of_group,
            group_id=self.group_id,
            ledger_topic=self.ledger_topic,
            last_applied=self.read_record_of_sink,
            data_loss=self.read_options.data_loss,
            after_intervals=lambda position: find_position_after_intervals(ledger.memory, position, log, of_group, self._first),
        )

    def preview(self) -> Preview:
        """Return the next window of this task, as it would be planned now. Asks the sink, and changes nothing.

        Arguments that are templates have to be rendered.

        :raises ChangeRefused: the task moves data intervals.
        :raises KafkaSparkError: planning would fail, too.
        """
        from airflow_kafka_spark.control.preview import PlanOptions, preview_window

        pipeline = self.pipeline or f"{self.dag_id}.{self.task_id}"
        if self.window_options.by_interval:
            raise ChangeRefused(f"Pipeline `{pipeline}` moves data intervals: its next window is that of the next DAG run")
        options = PlanOptions(
            self.resolve(),
            self.group_id,
            self.starting_offsets,
            self.ending_offsets,
            self.read_options.record_limit,
            self.read_options.data_loss,
        )
        found = preview_window(
            self.kafka, pipeline, options, ledger_topic=self.ledger_topic, last_applied=self.read_record_of_sink
        )
        if not self.follows or found.run:
            return found
        follows = f"The run ends with what pipeline `{self.follows}` has published until then"
        return replace(found, warnings=(*found.warnings, follows))

    def _follow(
        self, log: Log, position: Position, starts: dict[TopicPartition, int], topics: Sequence[str]
    ) -> tuple[Followed | None, Log]:
        """Return the windows that a followed pipeline has published, if there is one, and the log up to their end."""
        if not self.follows:
            return None, log
        from airflow_kafka_spark.ledger.topic import LedgerTopic
        from airflow_kafka_spark.windows.follow import find_followed_window, follow, limit_log, resolve_starts

        ledgers = LedgerTopic(self.kafka, self.ledger_topic)
        ledgers.ensure()
        upstream = ledgers.read(self.follows).memory
        recreated = {t for t in topics if is_recreated(t, log, position)}
        begins = resolve_starts(log, position, starts, expects_all=self.read_options.data_loss == "fail")
        followed, ends = follow(upstream, find_followed_window(upstream, position), topics, begins, recreated)
        if nothing := [topic for topic, total in followed.totals.items() if not total]:
            self.log.warning(
                "Pipeline %s has not published to %s so far: nothing is read there", followed.pipeline, ", ".join(nothing)
            )
        self.log.info(
            "Following pipeline %s: windows %d to %d, %s",
            followed.pipeline,
            followed.first,
            followed.last,
            "of records that are not compared: no window of it that the ledger holds begins where this one does"
            if followed.records is None
            else f"{followed.records:,} records",
        )
        return followed, limit_log(ends, log, position, starts, recreated)

    def check_followed(self, window: Window, read: int) -> None:
        """Compare the number of records that were read with that of the followed pipeline, if there is one.

        :raises FollowedMismatch: they differ, and ``on_mismatch`` is ``fail``.
        """
        followed = window.follows
        if followed is None or followed.records is None or followed.records == read:
            return
        if window.moved:
            self.log.info("Window %s begins at a position that was set by hand: its records are not compared", window)
            return
        error = FollowedMismatch(str(window), followed.pipeline, followed.records, read)
        if self.follow_options.on_mismatch == "fail":
            raise error
        self.log.warning("%s", error)

    @abstractmethod
    def read_record_of_sink(self, pipeline: str) -> Applied | None:
        """Return the last window of a pipeline in the sink's record; None without one."""

    def _compare_group(self, committed: Mapping[TopicPartition, int], position: Position) -> None:
        """Log a warning if the group's offsets were moved by another client: the ledger decides where windows begin."""
        moved = [
            f"{tp} at {committed[tp]}, not {known}"
            for tp, known in sorted(position.offsets.items())
            if committed.get(tp, known) != known
        ]
        if moved:
            self.log.warning(
                "Group %s was moved by another client (%s): the ledger decides where windows begin",
                self.group_id,
                ", ".join(moved[:5]),
            )

    def check(self, window: Window) -> None:
        check_readable(window, self.read_compared_log(window), self.read_options.data_loss)

    def read_compared_log(self, window: Window) -> Log:
        """Return the log of a window's topics, compared with the log that the window was planned with."""
        from airflow_kafka_spark.hooks.kafka.log import compare_epochs

        # An empty range only holds the pipeline's position. No record of it is read.
        ends = {r.topic_partition: r.end for r in window.ranges if r.span}
        return compare_epochs(self.kafka, self.read_window_log(window), ends, window.epochs, window.topic_ids)

    def read_window_log(self, window: Window) -> Log:
        """Return the log of the window's topics as it is now."""
        return read_log(self.kafka, sorted({r.topic for r in window.ranges}))

    @abstractmethod
    def make_splits(self, window: Window) -> tuple[Split, ...]:
        """Return the splits of a window, one for each Spark task."""

    def find_lost_topics(self, window: Window) -> tuple[str, ...]:
        """Return the topics of the window that can no longer be read."""
        return find_lost_topics(window, self.read_window_log(window))

    def report_unread_gaps(self, window: Window, read: Iterable[OffsetRange]) -> tuple[Gap, ...]:
        """Return the offsets of a window that no task has read, for its report: those of topics that were deleted after the plan.

        :param read: the ranges that were read.
        """
        gaps = find_unread_gaps(window, read)
        for topic in sorted({gap.topic for gap in gaps}):
            self.log.warning("Topic %s was deleted before window %s was read: its offsets are gaps in the report", topic, window)
        return gaps

    # --- 6. close ---

    def close(self, ledger: Ledger, window: Window, report: Report) -> Report:
        from airflow_kafka_spark.ledger.attempt import format_utc_now

        # A replay moves no group, and the group follows intervals in a transaction of its own.
        offsets = {} if window.replay or window.interval else self.list_offsets_to_commit(window)
        report = replace(
            report,
            committed={str(tp): offset for tp, offset in offsets.items()},
            group_id=self.group_id,
            completed_at=format_utc_now(),
        )
        ledger.close(report.to_dict(), offsets)
        return report

    def follow(self, ledger: Ledger) -> None:
        from airflow_kafka_spark.ledger.interval import IntervalLedger

        if not isinstance(ledger, IntervalLedger):
            return
        moved = self._intervals.follow(ledger)
        if moved:
            self.log.info("Group %s moves to %s", self.group_id, ", ".join(f"{tp}@{o}" for tp, o in sorted(moved.items())[:8]))

    def list_offsets_to_commit(self, window: Window) -> dict[TopicPartition, int]:
        """Return the window's ends by partition, without ends below the committed offsets and without recreated topics."""
        log = self.read_window_log(window)
        lost = set(find_lost_topics(window, log))
        ends = {tp: end for tp, end in window.ends.items() if tp.topic not in lost and tp in log.partitions}
        committed = self.kafka.read_committed_offsets(self.group_id, ends)
        ahead = {tp: c.offset for tp, c in committed.items() if c and c.offset > ends[tp]}
        for tp, offset in ahead.items():
            self.log.warning(
                "Group %s is at %d of %s already, past this window's end %d: it is not moved", self.group_id, offset, tp, ends[tp]
            )
        return {tp: end for tp, end in ends.items() if tp not in ahead}

    # --- for the steps ---

    def pause(self, seconds: float) -> None:
        """Wait for some seconds.

        :raises RuntimeError: the task is being killed.
        """
        if self._killed.wait(seconds):
            raise RuntimeError(f"Task {self.task_id} was killed while it waited for records")

    @cached_property
    def _killed(self) -> threading.Event:
        return threading.Event()

    def on_kill(self) -> None:
        self._killed.set()
        super().on_kill()

    @property
    def _intervals(self) -> IntervalPlan:
        return IntervalPlan(
            self.kafka,
            self.resolve(),
            self.group_id,
            self.read_record_of_sink,
            self.read_options.data_loss,
            self.window_options.grace_seconds,
            self._first,
            self.pause,
        )

    @property
    def _first(self) -> datetime | None:
        """The beginning of the schedule."""
        dag = self.get_dag()
        return self.start_date or (dag.start_date if dag is not None else None)

    def describe_dataflow(self) -> Dataflow:
        return Dataflow(self.sinks, self.subscription.topics, dead_letter_topic=self.errors.topic)

    @property
    def topic_uris(self) -> list[str]:
        """The assets of the topics; empty for a pattern."""
        return [f"kafka://{self.kafka_conn_id}/{topic}" for topic in self.subscription.topics]

    @property
    def own_group(self) -> str:
        return str(self.group_id)

    @property
    def subscription(self) -> Subscription:
        return self.read_options.subscription

    def resolve(self) -> tuple[str, ...]:
        """Return the topics that are subscribed now."""
        return self.subscription.resolve(self.kafka, without=(self.ledger_topic,))

    @cached_property
    def formats(self) -> tuple[Format, Format | None]:
        """The formats of the values and the keys of the topics that are read."""
        given = [f for f in (self.value, self.key) if f is not None]
        if all(type(f).of_topics is Format.of_topics for f in given):
            return self.value, self.key
        topics = self.subscription.topics or self.resolve()
        return self.value.of_topics(topics, "value"), self.key.of_topics(topics, "key") if self.key else None

    def make_layout(self) -> RowLayout:
        """Return the conversion of records to rows."""
        from airflow_kafka_spark.jobs.tasks.layout import RowLayout

        return RowLayout.of(*self.formats, self.record_options.metadata, self.null_values)

    def make_reading(
        self, window: Window, tolerance: Tolerance | None, sent: Mapping[TopicPartition, Set[int]] = MappingProxyType({})
    ) -> Reading:
        """Return the options with which tasks read the records of a window. A replay never leaves out lost records, because it
        would remove their rows.

        :param tolerance: the tasks' handling of bad records; None if these fail the window.
        :param sent: offsets of records that earlier attempts at the window have sent elsewhere. Default: none.
        """
        from airflow_kafka_spark.jobs.tasks.read import Reading

        options = self.read_options
        skips, remedy = (False, KEPT_ROWS) if window.replay else (options.skips_lost, "")
        return Reading(self.kafka.make_consumer_config(), skips, options.read_timeout, tolerance, dict(sent), remedy)

    def list_error_classes(self) -> dict[str, str]:
        """Return the class of the format or transform that refuses a bad record, by stage."""
        formats = {VALUE_CONVERTER: self.value, KEY_CONVERTER: self.key}
        classes = {TRANSFORMATION: "airflow_kafka_spark.transforms"} if self.transforms else {}
        return classes | {stage: f"{type(f).__module__}.{type(f).__name__}" for stage, f in formats.items() if f is not None}


def resolve_starting_offsets(
    hook: KafkaHook, value: Written, current: Log, group_id: str, committed: Mapping[TopicPartition, CommittedOffset | None]
) -> dict[TopicPartition, int]:
    """Return the first offsets of a pipeline that is unknown to its ledger, its sink and its group.

    :param value: ``starting_offsets``.
    :param committed: the offsets that another client has committed for its group.
    :raises PlanError: one of its subclasses: the log does not hold the wanted offsets.
    """
    from airflow_kafka_spark.hooks.kafka.log import resolve_start

    start = parse_start(value)
    if isinstance(start, CommittedOffsets):
        other = start.group_id or group_id
        if other != group_id and not any(hook.read_committed_offsets(other, current.partitions).values()):
            log.warning(
                "Group %s has no committed offsets of these topics (is its name right?): the fallback `%s` of `starting_offsets` "
                "decides where the pipeline begins",
                other,
                start.fallback,
            )
        if other != group_id and (members := hook.read_group_state(other).members):
            log.warning(
                "Group %s still has live members (%s): what they read from now on is read here as well",
                other,
                ", ".join(map(str, members)),
            )
    elif any(committed.values()):
        log.warning("Group %s has committed offsets: `starting_offsets` says %s, so they do not count", group_id, start)
    found = resolve_start(hook, start, current, group_id)
    log.info("A new pipeline: it begins at %s", ", ".join(f"{tp}@{offset}" for tp, offset in sorted(found.items())[:20]))
    return found
