"""Windows of the DAG run's data interval: the interval, its offsets, and the group's offsets."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from airflow_kafka_spark.errors import IntervalNotOver, IntervalsLost, IntervalsOpen, Problem, ProgressWindowOpen
from airflow_kafka_spark.hooks.kafka.log import compare_epochs, warn_of_lost_transactions
from airflow_kafka_spark.operators.binding import refuse_other_group
from airflow_kafka_spark.windows.continuity import refuse_elsewhere, refuse_foreign
from airflow_kafka_spark.windows.interval import (
    Interval,
    find_contiguous_offsets,
    find_epochs_at,
    find_missing_intervals,
    find_topic_start,
)
from airflow_kafka_spark.windows.interval_boundaries import Boundary, find_known_epochs, limit_start, plan_interval_ranges
from airflow_kafka_spark.windows.memory import Memory, list_known_topic_ids
from airflow_kafka_spark.windows.model import Applied, OffsetRange, State, TopicPartition, Window
from airflow_kafka_spark.windows.plan import DataLossPolicy, Log, Position, Ranges, find_epochs, refuse_recreated
from airflow_kafka_spark.windows.times import to_milliseconds

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.hooks.kafka.requests import CommittedOffset
    from airflow_kafka_spark.ledger.boundaries import Boundaries
    from airflow_kafka_spark.ledger.group import FollowedIntervals
    from airflow_kafka_spark.ledger.interval import IntervalLedger
    from airflow_kafka_spark.operators.binding import Run

log = logging.getLogger(__name__)

TIMETABLES = (
    'Give the DAG `schedule=CronDataIntervalTimetable("0 * * * *", timezone="UTC")`, or `CronTriggerTimetable(..., '
    'timezone="UTC", interval=timedelta(hours=1))`: in Airflow 3 a cron text alone makes intervals without width. '
    "A run that is triggered by hand gets one from `data_interval_start` and `data_interval_end`, or set "
    '`on_missing_interval="progress"` to let such a run move whatever is new'
)


def find_interval(run: Run) -> Interval | None:
    """Return the data interval of a run; None if it has none, or one without width."""
    start, end = run.interval
    if start is None or end is None or start >= end:
        return None
    return Interval(start, end)


def make_interval_problem(run: Run) -> Problem:
    """Return the problem of a run for which ``window="interval"`` is not possible."""
    start, end = run.interval
    found = (
        "the DAG run has no data interval (it was triggered by hand, or by an asset)"
        if start is None or end is None
        else f"the DAG run's data interval is [{start}, {end}), which holds no instant"
    )
    return Problem("window", found, TIMETABLES)


@dataclass(frozen=True)
class IntervalPlan:
    """Plans the window of an interval.

    :param kafka: the cluster.
    :param topics: the topics that are read.
    :param group_id: the group whose offsets follow the intervals.
    :param last_applied: returns the last window of a ledger name in the sink's record; None without one.
    :param data_loss: the treatment of records that were deleted before they were read.
    :param grace: seconds to wait after an instant for a later record.
    :param first: beginning of the schedule; None if it has none.
    :param pause: waits for a number of seconds.
    """

    kafka: KafkaHook
    topics: Sequence[str]
    group_id: str
    last_applied: Callable[[str], Applied | None]
    data_loss: DataLossPolicy
    grace: float
    first: datetime | None
    pause: Callable[[float], object]

    def make_window(self, ledger: IntervalLedger, run: Run) -> Window:
        """Return the window with the offsets between the two boundaries of the interval.

        :raises IntervalOverlaps: it shares instants with another one of the pipeline.
        :raises ProgressWindowOpen: the run has planned a progress window before, which is open.
        :raises IntervalNotOver: it ends later than ``grace`` (at least a minute) from now.
        :raises TopicRecreated: the pipeline has read another topic of this name, and ``data_loss`` is ``fail``.
        :raises ForeignOffsets: the sink has committed this interval of another cluster, or of another topic of this name.
        :raises RecordElsewhere: the sink has committed this interval to another table.
        :raises IntervalsLost: the ledger has lost intervals, and this may be one of them.
        """
        from airflow_kafka_spark.ledger.attempt import format_utc_now
        from airflow_kafka_spark.ledger.boundaries import Boundaries
        from airflow_kafka_spark.ledger.group import find_followed_intervals

        interval, bounds = ledger.interval, (ledger.interval.start_ms, ledger.interval.end_ms)
        ledger.refuse_overlaps()
        _refuse_own_progress_window(ledger, run)
        if interval.end_ms / 1000 > time.time() + max(self.grace, 60):
            raise IntervalNotOver(ledger.parent_pipeline, interval)
        # A dead attempt may have left a transaction open that has an offset of the group. The owner of the group does not depend
        # on it.
        of_group = self.kafka.read_committed_offsets(self.group_id, self._log().partitions, stable=False)
        refuse_other_group(ledger, self.group_id, of_group)
        deciding = Boundaries(self.kafka, ledger.topic, run.id)
        boundaries = deciding.decide(self.topics, bounds, self._log, grace=self.grace, pause=self.pause)
        # Waiting for the end of the interval may have taken long: other intervals may have been planned meanwhile.
        ledger.read()
        ledger.refuse_overlaps()
        current = self._log()
        warn_of_lost_transactions(self.kafka, current)
        refuse_recreated(list_known_topic_ids(ledger.parent_memory), current.topic_ids, self.topics, self.data_loss)
        there = self.last_applied(ledger.pipeline)
        if there is not None:
            planned = self._use_record_of_sink(ledger, there, current)
        else:
            followed = find_followed_intervals(ledger.parent_pipeline, of_group, current.topic_ids)
            ends = {topic: boundaries[topic][bounds[1]] for topic in self.topics}
            starts = {topic: self._start(ledger, topic, boundaries[topic][bounds[0]], current, deciding) for topic in self.topics}
            planned, current = self._plan_ranges(ledger, starts, ends, followed, current)
            self._refuse_lost_windows(ledger, planned.ranges, of_group)
        return Window(
            pipeline=ledger.pipeline,
            number=1,
            ranges=planned.ranges,
            run=run.id,
            planned_at=format_utc_now(),
            cluster_id=current.cluster_id,
            topic_ids={t: current.topic_ids[t] for t in self.topics if current.topic_ids.get(t)},
            gaps=planned.gaps,
            interval=bounds,
            replay=there.replay if there else 0,
            epochs=find_epochs(current, planned.ranges),
        )

    def _use_record_of_sink(self, ledger: IntervalLedger, there: Applied, current: Log) -> Ranges:
        """Return the offsets of an interval that the sink has, although the ledger no longer has it: those of the sink are right.

        :raises ForeignOffsets: the sink has committed this interval of another cluster, or of another topic of this name.
        :raises RecordElsewhere: the sink has committed this interval to another table.
        """
        refuse_elsewhere(there)
        refuse_foreign(there, current.cluster_id, current.topic_ids)
        log.warning("The ledger has no record of interval %s, but the sink has: its offsets are used", ledger.interval)
        ledger.sink_has_it = True
        return Ranges(there.ranges, (), 0)

    def _plan_ranges(
        self,
        ledger: IntervalLedger,
        starts: Mapping[str, Boundary],
        ends: Mapping[str, Boundary],
        followed: FollowedIntervals | None,
        current: Log,
    ) -> tuple[Ranges, Log]:
        """Return the offsets between two boundaries of each topic, and the log with the partitions that are truncated marked.

        :param followed: the intervals up to which the group's offsets have moved.
        :raises IntervalsLost: the ledger has lost intervals, and this may be one of them.
        """
        # The group was read before the ledger, so the ledger has to have the interval that the group names.
        is_lost = followed is not None and followed.interval.name not in ledger.parent_memory.intervals
        if followed is not None and followed.interval.end == ledger.interval.start:
            behind = followed.offsets if is_lost else followed.last
            starts = {topic: limit_start(start, behind) for topic, start in starts.items()}
        # Offsets that progress windows of this pipeline have moved, or are about to move, are left out.
        moved = self._find_moved(ledger)
        current = self._mark_truncated(current, starts, ends)
        others = [state for state in ledger.parent_memory.intervals.spans if not state.is_of(ledger.interval)]
        planned = plan_interval_ranges(self.topics, starts, ends, current, moved, self.data_loss, others)
        if followed is not None and is_lost:
            self._refuse_followed(ledger, planned, followed)
        return planned, current

    def _find_moved(self, ledger: IntervalLedger) -> Position:
        """Return the position of the pipeline's windows without an interval, its open window included."""
        from airflow_kafka_spark.ledger.beginning import find_forgotten_windows

        memory = ledger.parent_memory
        return find_forgotten_windows(memory, self.last_applied) if memory.is_blank else memory.claimed_position

    def _refuse_followed(self, ledger: IntervalLedger, planned: Ranges, followed: FollowedIntervals) -> None:
        """Refuse an interval before the group's offsets, if the ledger does not know the interval that the group names.

        :raises IntervalsLost: it begins before one of them, so that it may have been moved already.
        """
        for r in planned.ranges:
            offset = followed.offsets.get(r.topic_partition, 0)
            if r.span and r.start < offset:
                raise IntervalsLost(
                    ledger.parent_pipeline, self.group_id, followed.interval, ledger.interval, str(r.topic_partition), r.start,
                    offset, ledger.topic.name,
                )  # fmt: skip

    def _refuse_lost_windows(
        self, ledger: IntervalLedger, ranges: Sequence[OffsetRange], of_group: Mapping[TopicPartition, CommittedOffset | None]
    ) -> None:
        """Refuse an interval before the group's offsets, if the ledger does not know the window that the group names.

        :param of_group: the committed offsets of the group, which were read before the ledger.
        :raises IntervalsLost: it begins before one of them, so that it may have been moved already.
        """
        from airflow_kafka_spark.ledger.group import list_window_numbers

        numbers = list_window_numbers(ledger.parent_pipeline, of_group)
        for r in ranges:
            there, number = of_group.get(r.topic_partition), numbers.get(r.topic_partition, 0)
            if r.span and there and r.start < there.offset and number > ledger.parent_memory.last_number:
                raise IntervalsLost(
                    ledger.parent_pipeline, self.group_id, number, ledger.interval, str(r.topic_partition), r.start,
                    there.offset, ledger.topic.name, "window",
                )  # fmt: skip

    def _start(self, ledger: IntervalLedger, topic: str, usual: Boundary, current: Log, deciding: Boundaries) -> Boundary:
        """Return the beginning of the interval in a topic: its start, unless the topic was added to the pipeline later."""
        interval, topic_id = ledger.interval, current.topic_ids.get(topic, "")
        begin = find_topic_start(topic, topic_id, interval, ledger.parent_memory.intervals.spans)
        if begin is None:
            log.info("Topic %s is new to pipeline %s: it begins at its first record", topic, ledger.parent_pipeline)
            return Boundary(topic, topic_id, interval.start_ms, current.get_lows(topic))
        if begin == interval.start:
            return usual
        log.info("Intervals since %s were planned without topic %s: the topic begins there", begin, topic)
        instant = to_milliseconds(begin)
        return deciding.decide([topic], [instant], self._log, grace=self.grace, pause=self.pause)[topic][instant]

    def _mark_truncated(self, current: Log, *boundaries: Mapping[str, Boundary]) -> Log:
        """Return the log, with the partitions that were truncated below a boundary after it was decided."""
        for by_topic in boundaries:
            offsets, epochs = find_known_epochs(by_topic.values())
            current = compare_epochs(self.kafka, current, offsets, epochs, {t: b.topic_id for t, b in by_topic.items()})
        return current

    def _log(self) -> Log:
        from airflow_kafka_spark.hooks.kafka.log import read_log

        return read_log(self.kafka, self.topics)

    def follow(self, ledger: IntervalLedger) -> dict[TopicPartition, int]:
        """Move the group to the end of the intervals that are complete without a hole.

        The log names a hole directly before this interval: no run need ever come for it.
        """
        moved = ledger.follow(self.group_id, self._read_committed, self.first)
        for hole in find_missing_intervals(ledger.parent_memory.intervals.spans):
            if hole.end == ledger.interval.start:
                log.warning(
                    "No interval of pipeline %s has moved the records of %s: the offsets of group %s stay before them. If no run "
                    "of the schedule is still to come (`catchup=False`, local time), trigger one by hand with this data interval",
                    ledger.parent_pipeline, hole, self.group_id,
                )  # fmt: skip
        return moved

    def _read_committed(self) -> tuple[Mapping[TopicPartition, int], Log]:
        log = self._log()
        committed = self.kafka.read_committed_offsets(self.group_id, log.partitions)
        return {tp: c.offset for tp, c in committed.items() if c}, log


def _refuse_own_progress_window(ledger: IntervalLedger, run: Run) -> None:
    """Refuse an interval of a run that has planned a progress window, because ``window`` was changed before its retry. An open
    window of another run may be moved at this moment: it is only logged.

    :raises ProgressWindowOpen: the run's progress window is open.
    """
    entry = ledger.parent_memory.open_entry
    if entry is None:
        return
    if entry.window.run == run.id:
        raise ProgressWindowOpen(ledger.parent_pipeline, entry.window, run.id)
    log.warning(
        "Progress window %s of run %s is open. No interval moves its records: only a run without an interval finishes it",
        entry.window, entry.window.run,
    )  # fmt: skip


def find_position_after_intervals(
    memory: Memory,
    position: Position,
    current: Log,
    of_group: Mapping[TopicPartition, CommittedOffset | None],
    first: datetime | None,
) -> Position:
    """Return the start of a progress window in a pipeline that has moved intervals: their end, if they have no hole.

    Ranges of a topic that was recreated since are ignored. The position keeps the old id, so that planning refuses the topic,
    unless intervals have read the new one.

    :param position: the position of its windows without an interval.
    :param of_group: the committed offsets of the group. One that another client has committed counts as the position only where
        that client has read before the intervals: it may have moved the group since.
    :raises IntervalsOpen: they have a hole, or one of them is not complete.
    """
    from airflow_kafka_spark.ledger.group import is_committed_by

    read = list_known_topic_ids(memory)
    ids = {t: found if found in read.get(t, (found,)) else read[t][-1] for t, found in current.topic_ids.items()}
    offsets = {
        tp: offset
        for tp, offset in position.offsets.items()
        if position.topic_ids.get(tp.topic, "") in ("", ids.get(tp.topic, position.topic_ids.get(tp.topic)))
    }
    begins: dict[TopicPartition, int] = {}
    for state in memory.intervals.spans:
        for r in state.list_ranges_of(current.topic_ids):
            if r.span:
                begins[r.topic_partition] = min(r.start, begins.get(r.topic_partition, r.start))
    known = {}
    for tp, partition in current.partitions.items():
        there = of_group.get(tp)
        if there is None or tp in offsets:
            known[tp] = offsets.get(tp, partition.low)
        elif is_committed_by(memory.pipeline, there, current.topic_ids.get(tp.topic, "")):
            known[tp] = there.offset
        else:
            known[tp] = min(there.offset, begins.get(tp, there.offset))
    reached = find_contiguous_offsets(memory.intervals.spans, known, first, current.topic_ids)
    for state in sorted(memory.intervals.spans, key=lambda state: state.interval):
        ranges = state.list_ranges_of(current.topic_ids)
        beyond = any(r.end > reached.get(r.topic_partition, 0) for r in ranges if r.span)
        if beyond or (state.state is State.PLANNED and any(r.span for r in ranges)):
            raise IntervalsOpen(memory.pipeline, state.interval, state.state.value)
    kept = {tp: epoch for tp, epoch in position.epochs.items() if offsets.get(tp) == reached.get(tp)}
    return replace(
        position,
        offsets={**position.offsets, **reached},
        topic_ids={**position.topic_ids, **ids},
        cluster_id=position.cluster_id or current.cluster_id,
        epochs={**kept, **find_epochs_at(memory.intervals.spans, reached)},
    )
