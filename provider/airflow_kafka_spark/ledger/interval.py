"""The ledger of one data interval: records under a name of its own, and records that all intervals of a pipeline share."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, NoReturn, TypeVar

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import Fenced, IntervalOverlaps, KafkaSparkError, PlannedMeanwhile, RightMissing
from airflow_kafka_spark.ledger.attempt import KEEP_WINDOWS, TRANSACTION_SECONDS, Ledger, wait_for_others
from airflow_kafka_spark.ledger.topic import TOPIC, WAIT_FOR_NONE, Hint, LedgerContent, make_transactional_id
from airflow_kafka_spark.windows.binding import Binding
from airflow_kafka_spark.windows.dead_letters import DeadLetters
from airflow_kafka_spark.windows.interval import (
    NUMBER,
    Interval,
    IntervalState,
    find_contiguous_offsets,
    find_epochs_at,
    find_overlapping,
    find_sharing_intervals,
)
from airflow_kafka_spark.windows.interval_archive import Intervals, group_into_archives
from airflow_kafka_spark.windows.memory import (
    BINDING,
    Attempt,
    LedgerRecord,
    Memory,
    WindowEntry,
    make_archive_record,
    make_binding_record,
    make_dead_letters_key,
    make_interval_key,
    make_interval_record,
    make_position_key,
    make_window_key,
)
from airflow_kafka_spark.windows.model import State, TopicPartition, Tries, Window, has_shared_offsets

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.hooks.kafka.requests import PartitionOffsets
    from airflow_kafka_spark.windows.plan import Log

log = logging.getLogger(__name__)

B = TypeVar("B", Binding, "Binding | None")

MAX_REMOVED = 20
"""Maximum number of old intervals whose windows one attempt removes. Usually there is one."""
MIN_DEAD_LETTER_BYTES = 100_000
"""Size in bytes up to which an interval's dead letters are always recorded."""
BIND_TRIES = 10
"""Maximum number of tries to write the binding. A try fails only if another attempt has written it concurrently."""


class IntervalLedger(Ledger):
    """One attempt at one data interval of a pipeline.

    Guarantee: attempts at one interval fence each other, attempts at different intervals do not; no two intervals of a pipeline
    overlap; the group's offsets follow the intervals that are complete without a hole, and never go back.

    :param hook: the cluster.
    :param pipeline: the pipeline's name.
    :param run: the run that this attempt belongs to.
    :param interval: the interval.
    :param group_id: the consumer group, recorded with the first interval; :meth:`follow` moves it. None without one.
    :param topic: name of the ledger topic.
    :param keep_windows: number of intervals that have records of their own; older ones are archived.
    :param tries: Airflow's counters of the run's task, stored with the window.
    :ivar sink_has_it: True if the sink holds the interval, but the ledger has no record of it.
    """

    def __init__(
        self,
        hook: KafkaHook,
        pipeline: str,
        run: str,
        interval: Interval,
        *,
        group_id: str | None = None,
        topic: str = TOPIC,
        keep_windows: int = KEEP_WINDOWS,
        tries: Tries = Tries(),  # noqa: B008 - a frozen value
    ) -> None:
        name = interval.make_ledger_name(pipeline)
        super().__init__(hook, name, run, group_id=group_id, topic=topic, keep_windows=keep_windows, tries=tries)
        self.parent_pipeline = pipeline
        self.interval = interval
        self._parent = Memory(pipeline)
        self.sink_has_it = False

    def _peek(self, wait_for: tuple[bytes, ...] = WAIT_FOR_NONE) -> None:
        """Read the ledger of the interval and that of its pipeline without fencing; both are in one partition."""

        def read(partition: int, bounds: PartitionOffsets) -> LedgerContent:
            topic, parent = self.topic, self.parent_pipeline
            return topic.read_partition(self.pipeline, partition, wait_for=wait_for, parent=parent, bounds=bounds)

        found = self.topic.find(self.parent_pipeline, read, lambda found: found.exists)
        self._parent = found.parent or Memory(self.parent_pipeline)
        self.memory = found.memory.restore_dead_letters(self.known) if self.known is not None else Memory(self.pipeline)

    @property
    def parent_memory(self) -> Memory:
        """The state of the pipeline that this interval belongs to."""
        return self._parent

    def read(self) -> Memory:
        """Read the ledger of this interval and that of its pipeline, and return the state of this interval."""
        found = self.topic.read(self.pipeline, None, self._end_hidden_splits, parent=self.parent_pipeline)
        self._partition = found.partition
        self._parent = found.parent or Memory(self.parent_pipeline)
        self.memory = found.memory.restore_dead_letters(self.known)
        return self.memory

    def find_completed(self, run: str) -> WindowEntry | None:
        """Return the window of the interval if it is complete, by whatever run; otherwise None."""
        entry, known = self.memory.entries.get(NUMBER), self.known
        if entry is None and known is not None and known.state is State.COMPLETE:
            # The record of the window was removed, because there are many newer ones.
            window = known.make_window(self.parent_pipeline)
            return WindowEntry(window, State.COMPLETE, Attempt(1, "", known.run, ""), tries=known.tries)
        return entry if entry is not None and entry.state is State.COMPLETE else None

    @property
    def known(self) -> IntervalState | None:
        """The state of this interval in the pipeline's ledger; None if it is new."""
        return self._parent.intervals.get(self.interval.name)

    def find_last_complete(self) -> WindowEntry | None:
        """Return the window of the latest data interval that is complete and had offsets; None without one, or if the ledger no
        longer has it. The interval of this attempt is left out."""
        recent = self._parent.intervals.recent.values()
        done = [s for s in recent if s.state is State.COMPLETE and not s.is_of(self.interval) and any(r.span for r in s.ranges)]
        last = max(done, key=lambda state: state.interval, default=None)
        if last is None or last.forgotten:
            return None
        name = last.interval.make_ledger_name(self.parent_pipeline)
        # The window was completed after the first record of its interval.
        there = self.topic.read_partition(name, self._partition, max(last.offset, 0), wait_for=WAIT_FOR_NONE)
        found = there.memory.entries.get(NUMBER)
        return found if found is not None and found.state is State.COMPLETE else None

    @property
    def _bounds(self) -> tuple[int, int]:
        return self.interval.start_ms, self.interval.end_ms

    def refuse_overlaps(self) -> None:
        """Refuse an interval that overlaps another one.

        :raises IntervalOverlaps: another interval of this pipeline has some of these instants.
        """
        if others := find_overlapping(self.interval, self._parent.intervals.spans):
            raise IntervalOverlaps(self.parent_pipeline, self.interval, others[0].interval)

    def bind(self, decide: Callable[[Memory], Binding]) -> Binding:
        """Return the binding like :meth:`Ledger.bind`, and write it in a transaction of its own before the plan.

        Intervals are planned concurrently. If two attempts write a binding at once, the later one fences the earlier one, which
        then reads the binding of the later one.

        :raises GroupOwned: another pipeline uses the group; nothing was written.
        """
        self._bound_before = self._parent.binding

        def decide_for_group(whole: Memory) -> Binding:
            binding, known = self._with_ownership(decide(whole)), whole.binding
            if known is not None and replace(binding, writer=replace(binding.writer, run_id=known.writer.run_id)) == known:
                self._bound = known
                return known
            self._bound = binding
            self.refuse_taken()
            return binding

        return self._write_binding(decide_for_group)

    def _remember_ownership(self, name: str) -> None:
        binding = self._bound or self._parent.binding
        if binding is not None and self._get_exclusive_object(binding) == name:
            self._replace_binding(binding, replace(binding, owns=True))

    def _replace_binding(self, seen: Binding, new: Binding | None) -> None:
        """Replace the binding of the pipeline, unless it was changed after this attempt has read the binding."""
        self._write_binding(lambda whole: new if whole.binding == seen else whole.binding)

    def _write_binding(self, decide: Callable[[Memory], B]) -> B:
        """Write the binding that ``decide`` returns for the present state of the pipeline, unless it has that already. Return it.

        :raises Fenced: other attempts have written one at each try.
        """
        failure: KafkaSparkError = Fenced(self.parent_pipeline, "writing what the pipeline is bound to")
        for again in range(BIND_TRIES):
            wait_for_others(again)
            binding, known = decide(self._parent), self._parent.binding
            if binding == known:
                return binding
            producer = self._fence_as(make_transactional_id(self.topic.name, self.parent_pipeline, BINDING))
            self.read()
            if self._parent.binding != known:
                continue
            try:
                producer.begin_transaction()
                self.send(producer, [make_binding_record(self.parent_pipeline, binding)])
                producer.commit_transaction(TRANSACTION_SECONDS)
                self._parent = replace(self._parent, binding=binding)
                return binding
            except Exception as error:
                failure = self.translate(error, "writing what the pipeline is bound to", producer=producer)
                if isinstance(failure, RightMissing):
                    raise failure from error
                # The transaction may have been committed all the same.
                log.info("Writing the binding of pipeline %s failed, and is tried again: %s", self.parent_pipeline, failure.found)
                self.read()
        raise failure

    def plan(self, window: Window) -> WindowEntry:
        """Write the plan of the interval, as :meth:`Ledger.plan`.

        :raises IntervalOverlaps: another interval of this pipeline has some of these instants.
        :raises PlannedMeanwhile: a window or an interval that was planned first has some of these offsets; this one is withdrawn.
        :raises GroupOwned: another pipeline has begun to use the group at the same moment; the interval is withdrawn.
        """
        self.refuse_overlaps()
        self.refuse_too_wide(window)
        entry = self._claim(WindowEntry(window, State.PLANNED, self._make_attempt(1)))
        faults.reached("plan.written")
        # Others may have been planned concurrently. All are in the log now, and all readers see them in the order of the log.
        self.read()
        self._withdraw_if_overlapping(entry)
        name = self._get_exclusive_object(self._bound)
        if (owner := self._take(name)) is not None:
            self._withdraw()
            if self._bound is not None:
                self._replace_binding(self._bound, self._find_binding_before())
            raise self.owned(name, owner)
        return entry

    def _withdraw_if_overlapping(self, entry: WindowEntry) -> None:
        """Withdraw an interval if a window or an interval that was planned earlier has some of its instants or offsets. None of
        its records was moved, because moving starts after this check, at every attempt."""
        mine, window = self.known, entry.window
        if mine is None or window.replay:
            return
        before = [state for state in self._parent.intervals.spans if state.offset < mine.offset]
        if others := find_overlapping(self.interval, before):
            self._withdraw()
            raise IntervalOverlaps(self.parent_pipeline, self.interval, others[0].interval)
        if self.sink_has_it:
            return
        for state, _ in find_sharing_intervals(window.ranges, window.topic_ids, before):
            self._withdraw_for(f"interval {state.interval}")
        progress = self._parent.open_entry
        is_before = progress is not None and not progress.window.replay and progress.first < mine.offset
        if progress is not None and is_before and has_shared_offsets(window.ranges, progress.window.ranges):
            self._withdraw_for(f"window {progress.window.number}")
        position = self._parent.position
        for r in window.ranges:
            same_topic = position.topic_ids.get(r.topic) in (None, "", window.topic_ids.get(r.topic))
            began, passed = position.began.get(r.topic_partition, 0), position.offsets.get(r.topic_partition, 0)
            if r.span and same_topic and r.start < passed and began < r.end:
                self._withdraw_for(f"window {self._parent.last_number}")

    def _withdraw_for(self, other: str) -> NoReturn:
        self._withdraw()
        raise PlannedMeanwhile(self.parent_pipeline, f"Interval {self.interval}", other)

    def _withdraw(self) -> None:
        keys = (make_window_key(self.pipeline, NUMBER), make_interval_key(self.parent_pipeline, self.interval))
        self.withdraw(*(LedgerRecord(key, None) for key in keys))

    def make_companion_records(self, entry: WindowEntry) -> list[LedgerRecord]:
        """Return the record of the interval in the pipeline's ledger. It has the binding and the dead letters, too, because the
        records of the window are removed some day."""
        dead = self.memory.dead.get(NUMBER)
        kept = dead.exclude_topics(entry.window.lost_topic_ids).for_replays if dead is not None else None
        return [self._make_state_record(entry, kept)]

    def _make_state_record(self, entry: WindowEntry, dead: DeadLetters | None) -> LedgerRecord:
        window, known = entry.window, self.known
        state = IntervalState(
            self.interval, entry.state, window.ranges, window.run, window.replay, window.topic_ids,
            offset=known.offset if known else -1, gaps=window.gaps, tries=entry.tries, dead=dead,
            binding=window.binding or (known.binding if known else None),
            resent=known.resent if known else {}, resends=known.resends if known else 0, epochs=window.epochs,
        )  # fmt: skip
        return make_interval_record(self.parent_pipeline, state)

    @property
    def largest_dead_letters(self) -> int:
        """The record of the interval has them, too, beside its offsets."""
        beside = len(self._make_state_record(self.claimed, None).value or b"")
        return max(MIN_DEAD_LETTER_BYTES, super().largest_dead_letters - beside)

    # --- the group ---

    def follow(
        self, group_id: str, where: Callable[[], tuple[Mapping[TopicPartition, int], Log]], first: datetime | None
    ) -> dict[TopicPartition, int]:
        """Move the group to the offsets up to which all intervals are complete without a hole, and archive old intervals.

        Each attempt that completes an interval calls this afterwards. Of two concurrent calls the later one fences the earlier
        one, and reads the interval that it has completed.

        :param where: returns the group's offsets and the present log.
        :param first: start of the schedule, see :func:`~airflow_kafka_spark.windows.interval.find_contiguous_offsets`.
        :return: the committed offsets; empty if there was nothing to move.
        """
        try:
            return self._follow(group_id, where, first)
        except Exception as error:
            failure = self.translate(error, "moving the group")
            if not isinstance(failure, Fenced):
                raise failure from error
            log.info("Another interval of pipeline %s has just been completed: its attempt moves the group", self.parent_pipeline)
            return {}

    def _follow(
        self, group_id: str, where: Callable[[], tuple[Mapping[TopicPartition, int], Log]], first: datetime | None
    ) -> dict[TopicPartition, int]:
        producer = self._fence_as(make_transactional_id(self.topic.name, self.parent_pipeline, "group"))
        faults.reached("group.fenced")
        removers = self._fence_old_intervals()
        self.read()
        if self._get_exclusive_object(self._parent.binding) not in ("", group_id):
            log.info("Pipeline %s has another group by now: group %s is not moved", self.parent_pipeline, group_id)
            return {}
        committed, current = where()
        lows = {tp: partition.low for tp, partition in current.partitions.items()}
        intervals = self._parent.intervals.spans
        # Ranges of a topic that was deleted or recreated since do not apply to the present partitions.
        reached = find_contiguous_offsets(intervals, {**lows, **committed}, first, current.topic_ids)
        moved = {tp: offset for tp, offset in reached.items() if tp in lows and offset > committed.get(tp, lows[tp])}
        self._remove_old_windows(removers)
        forgotten = self._make_archive_records()
        if not moved and not forgotten:
            return {}
        try:
            producer.begin_transaction()
            if forgotten:
                self.send(producer, forgotten)
            if moved:
                self._send_offsets(producer, group_id, moved, self._make_metadata, find_epochs_at(intervals, moved))
            faults.reached("group.in_transaction")
            producer.commit_transaction(TRANSACTION_SECONDS)
        except Exception as error:
            raise self.translate(error, "moving the group", producer=producer) from error
        return moved

    def _list_old_intervals(self) -> list[IntervalState]:
        """Return the complete intervals before the newest ``keep_windows``, among those with records of their own.

        The interval of this attempt counts as complete: it is, once the ledger is read again.
        """
        recent = self._parent.intervals.recent.values()
        complete = (state for state in recent if state.state is State.COMPLETE or state.is_of(self.interval))
        return sorted(complete, key=lambda state: state.interval)[: -self.keep_windows]

    def _fence_old_intervals(self) -> list[tuple[IntervalState, Producer]]:
        """Return the old intervals whose windows can be removed, at most :data:`MAX_REMOVED`. Each has a producer that has fenced
        the plans of the interval. Read the ledger afterwards."""
        old = [state for state in self._list_old_intervals() if not state.forgotten][:MAX_REMOVED]
        names = [state.interval.make_ledger_name(self.parent_pipeline) for state in old]
        producers = [self._fence_as(make_transactional_id(self.topic.name, name, "plan")) for name in names]
        if old:
            faults.reached("old.fenced")
        return list(zip(old, producers, strict=True))

    def _remove_old_windows(self, removers: Sequence[tuple[IntervalState, Producer]]) -> None:
        """Remove the records of old intervals' windows.

        Each is removed under the transactional id of the interval's own plans, which an attempt that replays the interval fences:
        either it reads that the records are gone, or they stay. Otherwise its claim and the record of its dead letters could be
        removed after it has written them, and the next attempt would send the letters again.

        :param removers: the intervals as they were before the ledger was read, with the producers of
            :meth:`_fence_old_intervals`. Those that have changed since stay.
        """
        old = self._list_old_intervals()
        for state, producer in removers:
            if state in old and state.state is State.COMPLETE:
                self._remove_old_window(state, producer)

    def _remove_old_window(self, state: IntervalState, producer: Producer) -> None:
        name = state.interval.make_ledger_name(self.parent_pipeline)
        keys = (make_window_key(name, NUMBER), make_position_key(name), make_dead_letters_key(name, NUMBER))
        kept = replace(self._parent.include_resends(state), forgotten=True)
        records = [*(LedgerRecord(key, None) for key in keys), make_interval_record(self.parent_pipeline, kept)]
        try:
            producer.begin_transaction()
            self.send(producer, records)
            producer.commit_transaction(TRANSACTION_SECONDS)
        except Exception as error:
            failure = self.translate(error, "removing the records of an old interval", producer=producer)
            if not isinstance(failure, Fenced):
                raise failure from error
            log.info("Interval %s is being moved again: its records stay", state.interval)
            return
        intervals = self._parent.intervals
        recent = {**intervals.recent, state.interval.name: kept}
        self._parent = replace(self._parent, intervals=Intervals(recent, intervals.archives))

    def _make_archive_records(self) -> list[LedgerRecord]:
        """Return the records that archive old intervals whose windows were removed."""
        old = [state for state in self._list_old_intervals() if state.forgotten and not self._is_asked_for(state)]
        candidates, records = [self._parent.include_resends(state) for state in old], []
        for archive, states in group_into_archives(candidates, self._parent.intervals.archives):
            records.append(make_archive_record(self.parent_pipeline, archive))
            records += [LedgerRecord(make_interval_key(self.parent_pipeline, state.interval), None) for state in states]
        return records

    def _is_asked_for(self, state: IntervalState) -> bool:
        """Return True if a replay of the interval is requested, so that an attempt may be running."""
        window = Window(
            self.parent_pipeline, NUMBER, (), state.run, "", interval=(state.interval.start_ms, state.interval.end_ms)
        )
        return self._parent.replay_asked(replace(window, replay=state.replay)) is not None

    def _make_metadata(self, topic: str) -> str:
        by_age = sorted(self._parent.intervals.spans, key=lambda k: k.offset)
        ids = {t: i for k in by_age for t, i in k.topic_ids.items()}
        # Intervals are read from the beginning of their partition.
        hint = Hint(self.topic.topic_id, self._partition, 0)
        facts = {
            "pipeline": self.parent_pipeline,
            "window": self.interval.name,
            "topic_id": ids.get(topic, ""),
            "ledger": str(hint),
        }
        return json.dumps(facts, separators=(",", ":"), ensure_ascii=False)
