"""Data intervals of a pipeline: their names, their states, and the offsets up to which they are complete without a hole.

An interval is moved under a ledger name of its own, ``<pipeline>.<interval>``, with its own number, transactional ids and
record in the sink, so that intervals may be moved in any order and side by side. They share the pipeline's list of intervals;
the consumer group follows its contiguous prefix.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import count

from airflow_kafka_spark.windows.instants import instant_ms, instant_of, iso
from airflow_kafka_spark.windows.model import Gap, OffsetRange, State, TopicPartition, Tries

_INSTANT = r"\d{8}T\d{6}(?:\.\d{3})?Z"
_NAME = re.compile(rf"^({_INSTANT})-({_INSTANT})$")
_LEDGER_NAME = re.compile(rf"^(?P<pipeline>.+)\.(?P<interval>{_INSTANT}-{_INSTANT})$", re.DOTALL)


@dataclass(frozen=True, order=True)
class Interval:
    """A half-open span of time, ``[start, end)``, in UTC. Daylight saving time has no effect on it.

    Instants are whole milliseconds, as timestamps of records are; finer ones are moved to the next.

    :param start: the first instant that belongs to it.
    :param end: the first instant that does not.
    :raises ValueError: when it is empty, or an instant has no time zone.
    """

    start: datetime
    end: datetime

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            instant = getattr(self, name)
            if instant.tzinfo is None:
                raise ValueError(f"Not an interval: `{name}` is {instant}, without a time zone.")
            object.__setattr__(self, name, instant_of(instant_ms(instant)))
        if self.start >= self.end:
            raise ValueError(f"Not an interval: [{self.start}, {self.end}). Expected start < end.")

    @classmethod
    def of_ms(cls, start: int, end: int) -> Interval:
        """Return the interval between two instants, in milliseconds since the epoch."""
        return cls(instant_of(start), instant_of(end))

    @classmethod
    def named(cls, name: str) -> Interval | None:
        """Return the interval that has this :attr:`name`; None for any other text."""
        found = _NAME.match(name)
        if found is None:
            return None
        try:
            start, end = (datetime.fromisoformat(_extended(instant)) for instant in found.groups())
            return cls(start, end)
        except ValueError:
            return None

    @property
    def start_ms(self) -> int:
        """Milliseconds since the epoch."""
        return instant_ms(self.start)

    @property
    def end_ms(self) -> int:
        return instant_ms(self.end)

    @property
    def name(self) -> str:
        """Return ``20260101T000000Z-20260101T010000Z``. Names sort as the intervals do and are valid in every file system."""
        return f"{_basic(self.start)}-{_basic(self.end)}"

    def ledger_name(self, pipeline: str) -> str:
        """Return the name under which the ledger and the sink know this interval of a pipeline."""
        return f"{pipeline}.{self.name}"

    def overlaps(self, other: Interval) -> bool:
        """Return True if an instant belongs to both."""
        return self.start < other.end and other.start < self.end

    def __str__(self) -> str:
        return f"[{iso(self.start_ms)}, {iso(self.end_ms)})"


@dataclass(frozen=True)
class IntervalState:
    """The state of one data interval of a pipeline, as the ledger remembers it.

    :param state: PLANNED, or COMPLETE.
    :param ranges: the offsets it stands for.
    :param run: the run that planned it.
    :param replay: how often it was replayed.
    :param topic_ids: the ids of the topics.
    :param forgotten: whether its window is no longer remembered in detail.
    :param offset: where it was first written down in the ledger partition: of two that overlap, the earlier one counts.
    :param gaps: offsets that were deleted before they were read, and that it has passed over.
    :param leading: of several intervals as one, the length of the first.
    :param tries: Airflow's counters, see :class:`~airflow_kafka_spark.windows.memory.Entry`.
    :param parts: of several intervals as one that leave holes in time or in offsets: returns them in parts that leave none. The
        whole then covers more than its intervals have, and whatever touches it has to ask the parts. None (default): no holes.
    :param only_in_time: True if the holes of the parts are in time only: their offsets continue each other.
    """

    interval: Interval
    state: State
    ranges: tuple[OffsetRange, ...]
    run: str = ""
    replay: int = 0
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    forgotten: bool = False
    offset: int = -1
    gaps: tuple[Gap, ...] = ()
    leading: timedelta | None = None
    tries: Mapping[str, Tries] = field(default_factory=dict)
    parts: Callable[[], Sequence[IntervalState]] | None = field(default=None, compare=False, repr=False)
    only_in_time: bool = field(default=False, compare=False, repr=False)

    def is_of(self, interval: Interval) -> bool:
        """Return True if this is the state of that interval, not of several intervals that cover it as one."""
        return self.leading is None and self.interval == interval

    def has(self, topic: str, topic_id: str) -> bool:
        """Return True if it has a topic: the one with this id, as far as ids are known."""
        known = self.topic_ids.get(topic, "")
        return any(r.topic == topic for r in self.ranges) and not (known and topic_id and known != topic_id)

    def ranges_of(self, topic_ids: Mapping[str, str]) -> tuple[OffsetRange, ...]:
        """Return its ranges without those of topics that were deleted and created again since.

        :param topic_ids: the ids that the topics have now; a topic that is missing is not compared.
        """
        return tuple(r for r in self.ranges if self.counts(r.topic, topic_ids))

    def counts(self, topic: str, topic_ids: Mapping[str, str]) -> bool:
        """Return True if its offsets of a topic belong to the topic of today, as far as ids are known."""
        known, found = self.topic_ids.get(topic), topic_ids.get(topic)
        return not (known and found and known != found)


def parse_ledger_name(name: str) -> tuple[str, str | None]:
    """Return the pipeline that a name in the ledger or in a sink belongs to, and the data interval of that name; None for the
    pipeline itself.
    """
    found = _LEDGER_NAME.match(name)
    return (found["pipeline"], found["interval"]) if found else (name, None)


def overlapping(interval: Interval, known: Iterable[IntervalState]) -> list[IntervalState]:
    """Return the other intervals of the pipeline that share instants with this one. Their records would be moved twice."""
    found: list[IntervalState] = []
    for other in known:
        if other.interval.overlaps(interval) and not other.is_of(interval):
            found += [other] if other.parts is None else overlapping(interval, other.parts())
    return sorted(found, key=lambda o: o.interval)


def taken_up_at(topic: str, topic_id: str, interval: Interval, known: Iterable[IntervalState]) -> datetime | None:
    """Return the instant from which an interval reads a topic: its own start, or the start of the intervals directly before it
    that were planned without the topic, because no other interval will move the topic's records of that time. None means that
    no interval has the topic although there are others: the topic has joined the pipeline, and is read from its first record.

    :param known: the pipeline's intervals, planned and complete.
    """
    others: list[IntervalState] = []
    for state in known:
        is_within = state.parts is not None and state.interval.overlaps(interval)
        others += state.parts() if is_within and state.parts is not None else [state]
    others = [state for state in others if not state.is_of(interval)]
    without = {state.interval.end: state for state in others if not state.has(topic, topic_id)}
    if without and len(without) == len(others):
        return None
    begin = interval.start
    while (before := without.get(begin)) is not None:
        if before.parts is not None:
            without |= {part.interval.end: part for part in before.parts()}
        else:
            begin = before.interval.start
    return begin


def what_others_leave(
    ranges: Sequence[OffsetRange], topic_ids: Mapping[str, str], others: Iterable[IntervalState]
) -> tuple[OffsetRange, ...]:
    """Return the ranges of an interval without the offsets of other intervals of the pipeline. The interval that took up a topic
    owns the topic's offsets of all times before it.

    :param topic_ids: the ids of the topics.
    """
    taken: dict[TopicPartition, list[OffsetRange]] = {}
    for _, r in sharing_offsets(ranges, topic_ids, others):
        taken.setdefault(r.topic_partition, []).append(r)
    left = []
    for r in ranges:
        start, end, parts = r.start, r.end, sorted(taken.get(r.topic_partition, ()))
        for other in parts:
            if other.start <= start:
                start = max(start, min(other.end, end))
        for other in reversed(parts):
            if other.end >= end:
                end = max(start, min(other.start, end))
        left.append(OffsetRange(r.topic, r.partition, start, end))
    return tuple(left)


def sharing_offsets(
    ranges: Iterable[OffsetRange], topic_ids: Mapping[str, str], known: Iterable[IntervalState]
) -> Iterator[tuple[IntervalState, OffsetRange]]:
    """Yield the intervals that have some of these offsets, with their range.

    :param topic_ids: the ids of the topics that the ranges are of.
    """
    # Looked at for each range of each interval there ever was.
    wanted = {(r.topic, r.partition): r for r in ranges if r.span}
    for state in known:
        for r in state.ranges:
            mine = wanted.get((r.topic, r.partition))
            if mine is None or r.start >= mine.end or mine.start >= r.end or not r.span:
                continue
            if not state.has(r.topic, topic_ids.get(r.topic, "")):
                continue
            if state.parts is not None:
                yield from sharing_offsets(wanted.values(), topic_ids, state.parts())
                break
            yield state, r


def contiguous(
    known: Iterable[IntervalState],
    position: Mapping[TopicPartition, int],
    first: datetime | None = None,
    topic_ids: Mapping[str, str] | None = None,
) -> dict[TopicPartition, int]:
    """Return up to which offsets everything is complete, without a hole: the offsets that the consumer group may commit.

    Intervals count by their offsets, not by their times: one continues another if it begins at or before the offset at which
    that ends, in all its partitions.

    :param known: the pipeline's intervals.
    :param position: where the group stands, or the first record there is, for every partition.
    :param first: the instant at which the schedule begins: no run will move what lies before the interval that contains it, or
        that follows it directly.
    :param topic_ids: the ids that the topics have now: ranges of another topic of the same name do not count. None where that is
        not known.
    :return: the offsets, never below ``position``.
    """
    reached = dict(position)
    # The number only keeps two entries of the same interval from being compared.
    numbers = count()
    left = [(k.interval, next(numbers), k) for k in known if k.state is State.COMPLETE]
    heapq.heapify(left)
    while left:
        _, _, entry = heapq.heappop(left)
        ranges = entry.ranges_of(topic_ids or {})
        starts = {r.topic_partition: r.start for r in ranges}
        # Offsets that it has passed over will not be moved: they are no hole.
        gaps = [g for g in entry.gaps if entry.counts(g.topic, topic_ids or {})]
        starts.update({TopicPartition(g.topic, g.partition): g.start for g in gaps})
        length = entry.leading or entry.interval.end - entry.interval.start
        begins = first is not None and entry.interval.start - length < first <= entry.interval.end
        if entry.parts is not None and (begins or not entry.only_in_time):
            # Where none of its offsets comes next, none of its parts does.
            if begins or any(r.start <= reached.get(r.topic_partition, 0) < r.end for r in ranges):
                for part in entry.parts():
                    heapq.heappush(left, (part.interval, next(numbers), part))
            continue
        # An empty range is none: where it lies says nothing of what comes before.
        spans = {r.topic_partition for r in ranges if r.span} | {TopicPartition(g.topic, g.partition) for g in gaps}
        if begins or all(start <= reached.get(tp, 0) for tp, start in starts.items() if tp in spans):
            for r in ranges:
                if begins or r.topic_partition in spans:
                    reached[r.topic_partition] = max(reached.get(r.topic_partition, 0), r.end)
    return reached


def _extended(instant: str) -> str:
    """Return a name's instant as ISO 8601 with dashes, colons and an offset, which Python 3.10 reads, too."""
    fraction = instant[15:-1]
    return f"{instant[:4]}-{instant[4:6]}-{instant[6:11]}:{instant[11:13]}:{instant[13:15]}{fraction}+00:00"


def _basic(instant: datetime) -> str:
    fraction = f".{instant.microsecond // 1000:03d}" if instant.microsecond else ""
    return f"{instant:%Y%m%dT%H%M%S}{fraction}Z"
