"""Windows that are read from Kafka: what is subscribed, where the next window begins and ends, and what the group commits."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from airflow_kafka_spark.errors import FollowedMismatch, Problem, ResetRefused, ValidationError
from airflow_kafka_spark.hooks.kafka.log import read_log
from airflow_kafka_spark.operators.base import WindowOperator
from airflow_kafka_spark.operators.bounds import refuse_owned, starts
from airflow_kafka_spark.operators.from_kafka_check import argument_problems, kafka_problems, max_records, upstream_counts
from airflow_kafka_spark.operators.intervals import IntervalPlan, after_intervals, interval_of
from airflow_kafka_spark.operators.run import Run
from airflow_kafka_spark.sources.kafka import Subscription
from airflow_kafka_spark.windows.binding import Endpoint
from airflow_kafka_spark.windows.model import Applied, Followed, Split, TopicPartition, Window
from airflow_kafka_spark.windows.offset_specs import CommittedOffsets, Written, parse_stop
from airflow_kafka_spark.windows.plan import (
    DataLossPolicy,
    Log,
    Position,
    check_readable,
    epochs_of,
    is_recreated,
    lost_topics,
    make_splits,
    plan_ranges,
)
from airflow_kafka_spark.windows.report import Report

if TYPE_CHECKING:
    from airflow_kafka_spark.control.preview import Preview
    from airflow_kafka_spark.ledger.attempt import Ledger
    from airflow_kafka_spark.road.job import ReadWith
    from airflow_kafka_spark.sinks.base import Sink
    from airflow_kafka_spark.windows.memory import Entry


class FromKafkaOperator(WindowOperator):
    """The Kafka side of an operator: steps 2, 3 and 6 of a window's life.

    :param topics: a topic, or several; or give ``topics_pattern``.
    :param topics_pattern: a regular expression for whole topic names.
    :param group_id: the consumer group that mirrors the position. Nobody else may consume with it.
    :param starting_offsets: where a pipeline begins that neither its ledger nor its sink knows, and whose group holds no offsets
        that it has committed itself: ``CommittedOffsets(fallback="earliest")`` (default), ``"earliest"``, ``"latest"``,
        ``"none"`` (committed offsets, or it refuses), a time, or an offset per partition; see
        :func:`~airflow_kafka_spark.windows.offset_specs.parse_start`. Templated.
    :param ending_offsets: where a window ends at the latest: ``"latest"`` (default; the last stable offsets), a time, an offset
        per partition, or another group's committed offsets; see :func:`~airflow_kafka_spark.windows.offset_specs.parse_stop`.
        Templated.
    :param max_records: at most so many offsets per window, shared among the partitions; None (default) is everything there is.
    :param data_loss: ``fail`` (default) when records were deleted before they were read, or ``skip``: a gap in ledger and report.
    :param read_with: ``task`` (default by ``auto``): Spark's tasks read their ranges with confluent-kafka; ``spark``: Spark's own
        Kafka source reads, for executors without confluent-kafka. The result is the same.
    :param split_records: offsets per Spark task, about; at least 1, default what suits the sink. With ``read_with="spark"`` it is
        one task a partition instead.
    :param follows: another pipeline (:class:`~airflow_kafka_spark.operators.SourceToKafkaOperator`) of the same ledger topic: the
        window ends with what that has published completely, and its count of records has to be the same. A window that begins
        elsewhere than where one of its windows ended (the pipeline was moved by hand, or is new) is not compared where the count
        cannot be known.
    :param on_mismatch: ``fail`` (default) or ``warn`` where it is not: somebody else writes to the topic, or records are gone.
    :param upstream_counts: how many records were written, counted upstream, by instant (ISO 8601 or milliseconds since the
        epoch): the report then tells over- and under-consumption per time bucket. Nothing fails because of it. Templated.
    :param read_timeout: seconds without any progress after which a task gives the broker up; default 300.
    :param window: ``progress`` (default): from where the pipeline stands to what there is now; or ``interval``: the records of
        the DAG run's data interval, ``[start, end)`` by broker timestamp, in any order and side by side.
    :param grace: seconds (or a timedelta) after the end of an interval at which it is decided though no later record has come;
        default 60. The task waits for it.
    :param on_missing_interval: what a run without a data interval does: ``fail`` (default), or ``progress``: move what is new.
    :param on_rerun: what clearing a task means whose window is complete: ``replay`` moves the same offsets again, and the sink
        replaces that window's rows (default for intervals); ``skip`` does nothing (default otherwise).
    """

    sink: Sink

    def __init__(
        self,
        *,
        topics: str | Sequence[str] | None = None,
        topics_pattern: str | None = None,
        group_id: str,
        starting_offsets: Written = CommittedOffsets(),  # noqa: B008 - a frozen value
        ending_offsets: Written = "latest",
        max_records: int | None = None,
        data_loss: DataLossPolicy = "fail",
        read_with: ReadWith = "auto",
        split_records: int | None = None,
        read_timeout: float = 300.0,
        follows: str | None = None,
        on_mismatch: Literal["fail", "warn"] = "fail",
        upstream_counts: Mapping[Any, int] | str | None = None,
        window: Literal["progress", "interval"] = "progress",
        grace: float | timedelta = 60.0,
        on_missing_interval: Literal["fail", "progress"] = "fail",
        on_rerun: Literal["skip", "replay"] | None = None,
        **kwargs: Any,
    ) -> None:
        if window == "interval":
            # Intervals do not wait for each other: each has a place of its own in ledger and sink.
            kwargs.setdefault("max_active_tis_per_dag", None)
        super().__init__(**kwargs)
        self.window = window
        self.grace = grace.total_seconds() if isinstance(grace, timedelta) else grace
        self.on_missing_interval = on_missing_interval
        self.on_rerun = on_rerun
        self.topics = topics
        self.topics_pattern = topics_pattern
        self.group_id = group_id
        self.starting_offsets = starting_offsets
        self.ending_offsets = ending_offsets
        self.max_records = max_records
        self.data_loss = data_loss
        self.read_with = read_with
        self.split_records = split_records
        self.read_timeout = read_timeout
        self.follows = follows
        self.on_mismatch = on_mismatch
        self.upstream_counts = upstream_counts

    # --- 1. validate ---

    def reading_problems(self, run: Run) -> list[Problem]:
        """What is wrong with the arguments, without asking anybody."""
        return [*self.pipeline_problems(run), *argument_problems(self, run)]

    def server_problems(self) -> list[Problem]:
        """What Kafka and Spark say."""
        return [*kafka_problems(self), *self.spark_problems()]

    def is_rerun(self, done: Entry, run: Run) -> bool:
        if self.on_rerun is not None or self.window == "progress":
            return super().is_rerun(done, run)
        cleared = self.was_cleared(done, run)
        if cleared and (problems := self.replay_problems()):
            raise ValidationError(problems)
        return cleared

    # --- 2. fence and look ---

    def open_ledger(self, run: Run) -> Ledger:
        from airflow_kafka_spark.ledger.attempt import Ledger
        from airflow_kafka_spark.ledger.interval import IntervalLedger

        name = self.pipeline_name(run)
        options: dict[str, Any] = {
            "topic": self.ledger_topic,
            "keep_windows": self.keep_windows,
            "tries": run.tries,
        }
        interval = interval_of(run) if self.window == "interval" else None
        if interval is not None:
            return IntervalLedger(self.kafka, name, run.id, interval, group_id=self.group_id, **options)
        # An interval moves the group by itself, and leaves no short cut there.
        hints = self.resolve() if self.window == "progress" else ()
        beside = self.window == "interval"
        return Ledger(self.kafka, name, run.id, group_id=self.group_id, hint_topics=hints, beside_intervals=beside, **options)

    # --- 3. plan ---

    def origin(self) -> Endpoint:
        """The group that an open window is closed with. Its topics are in the window's ranges."""
        return Endpoint(details={"group": self.group_id})

    def plan(self, ledger: Ledger, run: Run) -> Window:
        from airflow_kafka_spark.hooks.kafka.log import compare_epochs
        from airflow_kafka_spark.hooks.kafka.resolve_offsets import resolve_stop
        from airflow_kafka_spark.ledger.attempt import utc_now
        from airflow_kafka_spark.ledger.beginning import decide_beginning
        from airflow_kafka_spark.ledger.interval import IntervalLedger

        if isinstance(ledger, IntervalLedger):
            return self._intervals.window(ledger, run)
        topics = self.resolve()
        log = read_log(self.kafka, topics)
        of_group = self.kafka.committed(self.group_id, log.partitions)
        refuse_owned(ledger, self.group_id, of_group)
        committed = {tp: c.offset for tp, c in of_group.items() if c}
        found = decide_beginning(
            ledger.memory,
            log,
            of_group,
            group_id=self.group_id,
            ledger_topic=self.ledger_topic,
            last_applied=self.record_of_sink,
            data_loss=self.data_loss,
            after_intervals=lambda: after_intervals(ledger.memory, log, committed, self._first),
        )
        position = found.position
        if found.decided_by == "sink":
            self.log.warning(
                "The ledger knows nothing of pipeline %s, but its sink does: going on after window %d",
                ledger.pipeline,
                found.last_number,
            )
        beginning = {} if position.offsets else starts(self.kafka, self.starting_offsets, log, self.group_id, of_group)
        log = compare_epochs(self.kafka, log, position.offsets, position.epochs, position.topic_ids)
        followed, log = self._follow(log, position, beginning, topics)
        planned = plan_ranges(
            log,
            position,
            topics,
            starts=beginning,
            stops=resolve_stop(self.kafka, parse_stop(self.ending_offsets), log, position.offsets),
            data_loss=self.data_loss,
            max_records=max_records(self.max_records),
        )
        self._compare_group(committed, position)
        window = Window(
            pipeline=ledger.pipeline,
            number=max(found.last_number, ledger.memory.last_used) + 1,
            ranges=planned.ranges,
            run=run.id,
            planned_at=utc_now(),
            cluster_id=log.cluster_id,
            topic_ids={t: log.topic_ids[t] for t in topics if log.topic_ids.get(t)},
            gaps=planned.gaps,
            held_back=planned.held_back,
            follows=followed,
            moved=position.moved,
            epochs=epochs_of(log, planned.ranges),
        )
        if followed is not None and followed.records is not None and window.span < followed.records:
            # Fewer offsets than records: that will not get better by reading.
            self.check_followed(window, window.span)
        return window

    def preview(self) -> Preview:
        """Return what the next window of this task would be if it were planned now. The sink is asked; nothing is changed.

        Arguments that are templates have to be rendered.

        :raises ResetRefused: the task moves data intervals.
        :raises KafkaSparkError: planning would fail, too.
        """
        from airflow_kafka_spark.control.preview import preview

        pipeline = self.pipeline or f"{self.dag_id}.{self.task_id}"
        if self.window == "interval":
            raise ResetRefused(f"Pipeline `{pipeline}` moves data intervals: its next window is that of the next DAG run")
        found = preview(
            self.kafka,
            pipeline,
            ledger_topic=self.ledger_topic,
            topics=self.resolve(),
            group_id=self.group_id,
            starting_offsets=self.starting_offsets,
            ending_offsets=self.ending_offsets,
            max_records=max_records(self.max_records),
            data_loss=self.data_loss,
            last_applied=self.record_of_sink,
        )
        if not self.follows or found.run:
            return found
        follows = f"The run ends with what pipeline `{self.follows}` has published until then"
        return replace(found, warnings=(*found.warnings, follows))

    def _follow(
        self, log: Log, position: Position, starts: dict[TopicPartition, int], topics: Sequence[str]
    ) -> tuple[Followed | None, Log]:
        """Where another pipeline is followed: what that has published, and the log up to there."""
        if not self.follows:
            return None, log
        from airflow_kafka_spark.ledger.topic import LedgerTopic
        from airflow_kafka_spark.windows.follow import beginnings, follow, log_up_to, reached_of

        ledgers = LedgerTopic(self.kafka, self.ledger_topic)
        ledgers.ensure()
        upstream = ledgers.look(self.follows).memory
        recreated = {t for t in topics if is_recreated(t, log, position)}
        begins = beginnings(log, position, starts, expects_all=self.data_loss == "fail")
        followed, ends = follow(upstream, reached_of(upstream, position), topics, begins, recreated)
        self.log.info(
            "Following pipeline %s: windows %d to %d, %s",
            followed.pipeline,
            followed.first,
            followed.last,
            "of records that are not compared: this window begins where none of its windows does, or where the ledger holds none"
            if followed.records is None
            else f"{followed.records:,} records",
        )
        return followed, log_up_to(ends, log, position, starts, recreated)

    def check_followed(self, window: Window, read: int) -> None:
        """Published = read, where another pipeline is followed.

        :raises FollowedMismatch: it is not, and ``on_mismatch`` is ``fail``.
        """
        followed = window.follows
        if followed is None or followed.records is None or followed.records == read:
            return
        if window.moved:
            self.log.info("Window %s begins where it was put by hand: its records are not compared", window)
            return
        error = FollowedMismatch(str(window), followed.pipeline, followed.records, read)
        if self.on_mismatch == "fail":
            raise error
        self.log.warning("%s", error)

    def record_of_sink(self, pipeline: str) -> Applied | None:
        """The last window that the sink remembers of a pipeline; None where it remembers none."""
        return self.sink.last_applied(pipeline)

    def _compare_group(self, committed: Mapping[TopicPartition, int], position: Position) -> None:
        """The group's offsets are a mirror: say so when somebody has moved them."""
        moved = [
            f"{tp} at {committed[tp]}, not {known}"
            for tp, known in sorted(position.offsets.items())
            if committed.get(tp, known) != known
        ]
        if moved:
            self.log.warning(
                "Group %s was moved by somebody else (%s): the ledger decides where windows begin",
                self.group_id,
                ", ".join(moved[:5]),
            )

    def check(self, window: Window) -> None:
        check_readable(window, self.compared_log(window), self.data_loss)

    def compared_log(self, window: Window) -> Log:
        """The same as :meth:`log_of`, and whether it still is the log that the window was planned with."""
        from airflow_kafka_spark.hooks.kafka.log import compare_epochs

        # An empty range says where the pipeline stands: nothing of it is read.
        ends = {r.topic_partition: r.end for r in window.ranges if r.span}
        return compare_epochs(self.kafka, self.log_of(window), ends, window.epochs, window.topic_ids)

    def log_of(self, window: Window) -> Log:
        """What Kafka holds of the window's topics now."""
        return read_log(self.kafka, sorted({r.topic for r in window.ranges}))

    def splits(self, window: Window) -> tuple[Split, ...]:
        """What single tasks read."""
        return self.splits_for(window, self.sink)

    def splits_for(self, window: Window, sink: Sink) -> tuple[Split, ...]:
        """The same on the way to a sink."""
        whole = self.read_with == "spark" or sink.whole_partitions
        span = max(window.span, 1) if whole else self.split_records or sink.split_records
        return make_splits(window, span, without=self.lost_topics(window))

    def lost_topics(self, window: Window) -> tuple[str, ...]:
        """Topics of the window that can no longer be read."""
        return lost_topics(window, self.log_of(window))

    # --- 4. move, 5. commit ---

    def applied(self, window: Window) -> Applied | None:
        return self.sink.applied(window)

    # --- 6. close ---

    def close(self, ledger: Ledger, window: Window, report: Report) -> Report:
        from airflow_kafka_spark.ledger.attempt import utc_now

        # The group has been there when the window was moved first, and follows intervals by itself.
        offsets = {} if window.replay or window.interval else self.offsets_to_commit(window)
        report = replace(
            report, committed={str(tp): offset for tp, offset in offsets.items()}, group_id=self.group_id, completed_at=utc_now()
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

    def offsets_to_commit(self, window: Window) -> dict[TopicPartition, int]:
        """The frozen ends, but never lower than what is committed, and nothing for a topic that is another one now."""
        log = self.log_of(window)
        lost = set(lost_topics(window, log))
        ends = {tp: end for tp, end in window.ends.items() if tp.topic not in lost and tp in log.partitions}
        committed = self.kafka.committed(self.group_id, ends)
        ahead = {tp: c.offset for tp, c in committed.items() if c and c.offset > ends[tp]}
        for tp, offset in ahead.items():
            self.log.warning(
                "Group %s is at %d of %s already, past this window's end %d: left there", self.group_id, offset, tp, ends[tp]
            )
        return {tp: end for tp, end in ends.items() if tp not in ahead}

    # --- what the parts are made of ---

    def pause(self, seconds: float) -> None:
        """Wait, unless the task is being killed.

        :raises RuntimeError: it is.
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
            self.kafka, self.resolve(), self.group_id, self.sink, self.data_loss, self.grace, self._first, self.pause
        )

    @property
    def _first(self) -> datetime | None:
        """Where the schedule begins."""
        dag = self.get_dag()
        return self.start_date or (dag.start_date if dag is not None else None)

    def upstream(self) -> dict[int, int] | None:
        """``upstream_counts`` by milliseconds since the epoch."""
        return upstream_counts(self.upstream_counts)

    @property
    def topic_uris(self) -> list[str]:
        """The assets that are read; a pattern names none."""
        return [f"kafka://{self.kafka_conn_id}/{topic}" for topic in self.subscription.topics]

    @property
    def subscription(self) -> Subscription:
        return Subscription.of(self.topics, self.topics_pattern)

    def resolve(self) -> tuple[str, ...]:
        """The topics that are subscribed now."""
        return self.subscription.resolve(self.kafka, without=(self.ledger_topic,))
