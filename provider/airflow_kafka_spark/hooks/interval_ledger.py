"""The ledger of one data interval: a lane beside its pipeline, and what all lanes of the pipeline have in common."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.errors import Fenced, IntervalOverlaps
from airflow_kafka_spark.hooks.held_up import transactional_id_of
from airflow_kafka_spark.hooks.ledger import TRANSACTION_SECONDS, Ledger
from airflow_kafka_spark.windows.binding import Binding
from airflow_kafka_spark.windows.interval import Interval, IntervalState, contiguous, overlapping
from airflow_kafka_spark.windows.memory import (
    BINDING,
    Attempt,
    Entry,
    LedgerRecord,
    Memory,
    binding_record,
    dead_key,
    interval_key,
    interval_record,
    position_key,
    window_key,
)
from airflow_kafka_spark.windows.model import State, TopicPartition, Window

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka import KafkaHook

log = logging.getLogger(__name__)

BIND_TRIES = 10
"""Each of them loses only against somebody else who has just decided."""
NUMBER = 1
"""Of the window of an interval: a lane has one, however often it is replayed."""


class IntervalLedger(Ledger):
    """One attempt at one data interval of a pipeline.

    Guarantee: attempts at the same interval shut each other out, those at other intervals of the pipeline do not; no two
    intervals of a pipeline overlap; the group's offsets follow the intervals that are complete without a hole, and never go back.

    :param pipeline: the pipeline's name.
    :param interval: the interval.

    The others are those of :class:`Ledger`. ``group_id`` is only written down, with the first interval: :meth:`follow` moves it.
    """

    def __init__(self, hook: KafkaHook, pipeline: str, run: str, interval: Interval, **options: Any) -> None:
        super().__init__(hook, interval.lane(pipeline), run, **options)
        self.family_name = pipeline
        self.interval = interval
        self.family = Memory(pipeline)

    def peek(self) -> None:
        """See :meth:`Ledger.peek`; the lane lies beside its pipeline."""
        from airflow_kafka_spark.hooks.pipeline_offsets import existing_ledger, look_into

        if (topic := existing_ledger(self.hook, self.topic.name)) is None:
            return
        self.topic.topic_id, self.topic.partitions = topic.topic_id, topic.partitions
        found = topic.find(self.family_name, lambda p: look_into(topic, self.family_name, p), lambda found: found.exists)
        self.family, self.memory = found.memory, Memory(self.pipeline)
        if self.known is not None:
            self.memory = look_into(topic, self.pipeline, found.partition).memory

    @property
    def whole(self) -> Memory:
        """What the ledger holds of the pipeline that this interval is of."""
        return self.family

    def look(self) -> Memory:
        """Read what the ledger holds of this interval, and of all of the pipeline's."""
        found = self.topic.look(self.pipeline, None, self._end_hidden_splits, beside=self.family_name)
        self.memory, self._partition = found.memory, found.partition
        self.family = found.family or Memory(self.family_name)
        return self.memory

    def completed(self, run: str) -> Entry | None:
        """The interval's window, once it is complete: whichever run moved it, it is moved."""
        entry, known = self.memory.entries.get(NUMBER), self.known
        if entry is None and known is not None and known.state is State.COMPLETE:
            # Forgotten in detail, because there are so many newer ones.
            window = Window(
                self.pipeline, NUMBER, known.ranges, known.run, "", topic_ids=known.topic_ids, interval=self._bounds,
                replay=known.replay,
            )  # fmt: skip
            return Entry(window, State.COMPLETE, Attempt(1, "", known.run, ""))
        return entry if entry is not None and entry.state is State.COMPLETE else None

    @property
    def known(self) -> IntervalState | None:
        """What the pipeline knows of this interval."""
        return self.family.intervals.get(self.interval.name)

    @property
    def _bounds(self) -> tuple[int, int]:
        return self.interval.start_ms, self.interval.end_ms

    def refuse_overlaps(self) -> None:
        """:raises IntervalOverlaps: another interval of this pipeline has some of the same instants."""
        if others := overlapping(self.interval, self.family.intervals.values()):
            raise IntervalOverlaps(self.family_name, self.interval, others[0].interval)

    def bind(self, decide: Callable[[Memory], Binding]) -> Binding:
        """See :meth:`Ledger.bind`. Intervals are planned side by side, so what the pipeline is bound to is decided before, in a
        transaction of its own: of two who decide at once the later one shuts the earlier one out, which then sees what that has
        decided."""
        for _ in range(BIND_TRIES):
            binding = decide(self.family)
            known = self.family.binding
            if known is not None and replace(binding, writer=replace(binding.writer, run_id=known.writer.run_id)) == known:
                return binding
            producer = self._fence_as(transactional_id_of(self.topic.name, self.family_name, BINDING))
            seen = known
            self.look()
            if self.family.binding != seen:
                continue
            try:
                producer.begin_transaction()
                self.send(producer, [binding_record(self.family_name, binding)])
                producer.commit_transaction(TRANSACTION_SECONDS)
                self.family = replace(self.family, binding=binding)
                return binding
            except Exception as error:
                failure = self.translated(error, "writing what the pipeline is bound to")
                if not isinstance(failure, Fenced):
                    raise failure from error
                self.look()
        raise Fenced(self.family_name, "writing what the pipeline is bound to")

    def plan(self, window: Window) -> Entry:
        """See :meth:`Ledger.plan`.

        :raises IntervalOverlaps: another interval of this pipeline has some of the same instants.
        """
        self.refuse_overlaps()
        entry = super().plan(window)
        # Another one may have been planned at the same moment. Both are in the log now, and its order is the same for both.
        self.look()
        mine = self.known
        others = [o for o in overlapping(self.interval, self.family.intervals.values()) if mine and o.offset < mine.offset]
        if others:
            self._withdraw()
            raise IntervalOverlaps(self.family_name, self.interval, others[0].interval)
        return entry

    def _withdraw(self) -> None:
        producer, self._closer = self._closer, None
        assert producer is not None
        producer.begin_transaction()
        keys = (window_key(self.pipeline, NUMBER), interval_key(self.family_name, self.interval))
        self.send(producer, [LedgerRecord(key, None) for key in keys])
        producer.commit_transaction(TRANSACTION_SECONDS)

    def along(self, entry: Entry) -> list[LedgerRecord]:
        """The interval's record among those of the pipeline."""
        window = entry.window
        known = self.known
        first = known.offset if known else -1
        state = IntervalState(
            self.interval, entry.state, window.ranges, window.run, window.replay, window.topic_ids, offset=first
        )
        return [interval_record(self.family_name, state)]

    # --- the group ---

    def follow(
        self, group_id: str, where: Callable[[], tuple[Mapping[TopicPartition, int], Mapping[TopicPartition, int]]],
        first: datetime | None,
    ) -> dict[TopicPartition, int]:  # fmt: skip
        """Move the group to where everything is complete without a hole, and forget the details of old intervals.

        Whoever completes an interval does this afterwards. When two do it at once the later one shuts the earlier one out, and
        sees what that has completed.

        :param where: asks for the group's offsets and for the first offsets there are, of all partitions.
        :param first: where the schedule begins, see :func:`~airflow_kafka_spark.windows.interval.contiguous`.
        :return: what was committed; empty when there was nothing to move.
        """
        try:
            return self._follow(group_id, where, first)
        except Exception as error:
            failure = self.translated(error, "moving the group")
            if not isinstance(failure, Fenced):
                raise failure from error
            log.info("Another interval of pipeline %s has just been completed: that one moves the group", self.family_name)
            return {}

    def _follow(
        self, group_id: str, where: Callable[[], tuple[Mapping[TopicPartition, int], Mapping[TopicPartition, int]]],
        first: datetime | None,
    ) -> dict[TopicPartition, int]:  # fmt: skip
        producer = self._fence_as(transactional_id_of(self.topic.name, self.family_name, "group"))
        faults.reached("group.fenced")
        self.look()
        committed, lows = where()
        intervals = self.family.intervals.values()
        reached = contiguous(intervals, {**lows, **committed}, first)
        moved = {tp: offset for tp, offset in reached.items() if offset > committed.get(tp, lows.get(tp, 0))}
        forgotten = self._old()
        if not moved and not forgotten:
            return {}
        producer.begin_transaction()
        if forgotten:
            self.send(producer, forgotten)
        if moved:
            self._send_offsets(producer, group_id, moved, self._metadata)
        faults.reached("group.in_transaction")
        producer.commit_transaction(TRANSACTION_SECONDS)
        return moved

    def _old(self) -> list[LedgerRecord]:
        """Tombstones for the windows of intervals that are too old to be remembered in detail."""
        complete = sorted((k for k in self.family.intervals.values() if k.state is State.COMPLETE), key=lambda k: k.interval)
        records = []
        for state in complete[: -self.keep_windows]:
            if not state.forgotten:
                lane = state.interval.lane(self.family_name)
                keys = (window_key(lane, NUMBER), position_key(lane), dead_key(lane, NUMBER))
                records += [LedgerRecord(key, None) for key in keys]
                records.append(interval_record(self.family_name, replace(state, forgotten=True)))
        return records

    def _metadata(self, topic: str) -> str:
        ids = {t: i for k in self.family.intervals.values() for t, i in k.topic_ids.items()}
        facts = {"pipeline": self.family_name, "window": self.interval.name, "topic_id": ids.get(topic, "")}
        return json.dumps(facts, separators=(",", ":"), ensure_ascii=False)
