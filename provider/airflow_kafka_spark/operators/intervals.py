"""Windows that belong to the DAG run's data interval: which one that is, what its offsets are, and how the group follows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import IntervalNotOver, IntervalsOpen, Problem
from airflow_kafka_spark.operators.bounds import refuse_owned
from airflow_kafka_spark.sinks.base import Sink
from airflow_kafka_spark.windows.boundaries import interval_ranges
from airflow_kafka_spark.windows.interval import Interval, contiguous
from airflow_kafka_spark.windows.model import State, TopicPartition, Window
from airflow_kafka_spark.windows.plan import DataLossPolicy, Log, Position, Ranges

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.interval_ledger import IntervalLedger
    from airflow_kafka_spark.hooks.kafka import KafkaHook
    from airflow_kafka_spark.operators.run import Run
    from airflow_kafka_spark.windows.memory import Memory

log = logging.getLogger(__name__)

TIMETABLES = (
    'Give the DAG `schedule=CronDataIntervalTimetable("0 * * * *", timezone="UTC")`, or '
    "`CronTriggerTimetable(..., interval=timedelta(hours=1))`: in Airflow 3 a cron text alone makes intervals without width. "
    "A run that is triggered by hand gets one from `data_interval_start` and `data_interval_end`, or set "
    '`on_missing_interval="progress"` to let such a run move whatever is new'
)


def interval_of(run: Run) -> Interval | None:
    """The data interval of a run, None when it has none or one without width."""
    start, end = run.interval
    if start is None or end is None or start >= end:
        return None
    return Interval(start, end)


def interval_problem(run: Run) -> Problem:
    """Why ``window="interval"`` cannot be of this run."""
    start, end = run.interval
    found = (
        "the DAG run has no data interval (it was triggered by hand, or by an asset)"
        if start is None or end is None
        else f"the DAG run's data interval is [{start}, {end}), which holds no instant"
    )
    return Problem("window", found, TIMETABLES)


@dataclass(frozen=True)
class IntervalPlan:
    """What a window of an interval is made from.

    :param grace: seconds after an instant at which it is decided though nothing later has been written.
    :param first: where the schedule begins.
    :param pause: waits so many seconds.
    """

    kafka: KafkaHook
    topics: Sequence[str]
    group_id: str
    sink: Sink
    data_loss: DataLossPolicy
    grace: float
    first: datetime | None
    pause: Callable[[float], object]

    def window(self, ledger: IntervalLedger, run: Run) -> Window:
        """Freeze the offsets between the two boundaries of the interval.

        :raises IntervalOverlaps: it shares instants with another one of the pipeline.
        :raises IntervalNotOver: it ends later than ``grace`` (at least a minute) from now.
        """
        from airflow_kafka_spark.hooks.boundaries import Boundaries
        from airflow_kafka_spark.hooks.ledger import utc_now

        interval, bounds = ledger.interval, (ledger.interval.start_ms, ledger.interval.end_ms)
        ledger.refuse_overlaps()
        if interval.end_ms / 1000 > time.time() + max(self.grace, 60):
            raise IntervalNotOver(ledger.family_name, interval)
        refuse_owned(ledger, self.group_id, self.kafka.committed(self.group_id, self._log().partitions))
        boundaries = Boundaries(self.kafka, ledger.topic, run.id).decide(
            self.topics, bounds, self._log, grace=self.grace, pause=self.pause
        )
        current = self._log()
        there = self.sink.last_applied(ledger.pipeline)
        if there is not None:
            # The ledger has forgotten this interval and the sink has not: it is what it was.
            log.warning("The ledger knows nothing of interval %s, but the sink does: its offsets are the sink's", interval)
            planned = Ranges(there.ranges, (), 0)
        else:
            starts, ends = ({topic: boundaries[topic][bound] for topic in self.topics} for bound in bounds)
            # What progress windows of this pipeline have moved is not moved again.
            moved = ledger.family.position
            planned = interval_ranges(self.topics, starts, ends, current, moved, self.data_loss)
        return Window(
            pipeline=ledger.pipeline,
            number=1,
            ranges=planned.ranges,
            run=run.id,
            planned_at=utc_now(),
            cluster_id=current.cluster_id,
            topic_ids={t: current.topic_ids[t] for t in self.topics if current.topic_ids.get(t)},
            gaps=planned.gaps,
            interval=bounds,
            replay=there.replay if there else 0,
        )

    def _log(self) -> Log:
        from airflow_kafka_spark.sources.kafka import read_log

        return read_log(self.kafka, self.topics)

    def follow(self, ledger: IntervalLedger) -> dict[TopicPartition, int]:
        """Let the group follow what is complete."""
        return ledger.follow(self.group_id, self._where, self.first)

    def _where(self) -> tuple[Mapping[TopicPartition, int], Mapping[TopicPartition, int]]:
        partitions = self._log().partitions
        committed = self.kafka.committed(self.group_id, partitions)
        return {tp: c.offset for tp, c in committed.items() if c}, {tp: p.low for tp, p in partitions.items()}


def after_intervals(memory: Memory, current: Log, committed: Mapping[TopicPartition, int], first: datetime | None) -> Position:
    """Where a progress window begins in a pipeline that has moved intervals: where they end, if they leave no hole.

    :raises IntervalsOpen: they do, or one of them is not complete.
    """
    position = memory.position
    known = {tp: position.offsets.get(tp, committed.get(tp, p.low)) for tp, p in current.partitions.items()}
    reached = contiguous(memory.intervals.values(), known, first)
    for name in sorted(memory.intervals):
        state = memory.intervals[name]
        beyond = any(r.end > reached.get(r.topic_partition, 0) for r in state.ranges if r.span)
        if beyond or (state.state is State.PLANNED and any(r.span for r in state.ranges)):
            raise IntervalsOpen(memory.pipeline, state.interval, state.state.value)
    return Position(
        {**position.offsets, **reached},
        {**current.topic_ids, **position.topic_ids},
        position.cluster_id or current.cluster_id,
        position.source,
        position.followed,
    )


def option_problems(operator: Any) -> list[Problem]:
    """What is wrong with the options that are about intervals and replays."""
    choices = (
        ("window", operator.window, ("progress", "interval")),
        ("on_rerun", operator.on_rerun, (None, "skip", "replay")),
        ("on_missing_interval", operator.on_missing_interval, ("fail", "progress")),
    )
    problems = [
        Problem(where, f"`{value}` is not one of {', '.join(map(str, known))}")
        for where, value, known in choices
        if value not in known
    ]
    if not operator.grace >= 0:
        problems.append(Problem("grace", f"it is {operator.grace!r}; expected seconds or a timedelta, not negative"))
    if operator.window == "interval":
        given = (("max_records", operator.max_records), ("follows", operator.follows))
        found = "an interval is as large as it is"
        problems += [Problem(where, found, 'Leave it out, or use `window="progress"`') for where, value in given if value]
    if (operator.window, operator.on_rerun) == ("progress", None) or problems:
        return problems
    if not isinstance(operator.sink, Sink):
        return [Problem("window", "what is published to Kafka cannot be replaced", "Leave `window` and `on_rerun` as they are")]
    if operator.window == "interval":
        problems += operator.sink.unordered_problems()
    return problems + (operator.replay_problems() if operator.on_rerun == "replay" else [])
