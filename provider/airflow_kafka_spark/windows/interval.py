"""Data intervals of a pipeline: their names, their states, and the offsets up to which they are complete without a hole.

An interval is moved under a ledger name of its own, ``<pipeline>.<interval>``, with its own window number, transactional ids and
record in the sink. So intervals may be moved in any order and concurrently. All intervals are listed in the ledger of the
pipeline; the consumer group is set to the end of the contiguous prefix of that list.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import count

from airflow_kafka_spark.windows.binding import Binding
from airflow_kafka_spark.windows.dead_letters import DeadLetters, Runs
from airflow_kafka_spark.windows.model import Gap, OffsetRange, State, TopicPartition, Tries, Window
from airflow_kafka_spark.windows.times import format_instant, to_instant, to_milliseconds

_INSTANT = r"\d{8}T\d{6}(?:\.\d{3})?Z"
_NAME = re.compile(rf"^({_INSTANT})-({_INSTANT})$")
NUMBER = 1
"""Number of an interval's window. Each interval has one window, which keeps its number when it is replayed."""
ROUTED = ".to."
"""Separates a pipeline's name from the name of a sink that a filter routes to, in the records of that sink."""
LONGEST_NAME = 200
"""Maximum length of a pipeline's name, in characters."""
_INTERVAL_NAME = re.compile(
    rf"^(?P<pipeline>.+)\.(?P<interval>{_INSTANT}-{_INSTANT})(?P<route>{re.escape(ROUTED)}.+)?$", re.DOTALL
)


@dataclass(frozen=True, order=True)
class Interval:
    """A half-open span of time, ``[start, end)``, in UTC. Daylight saving time has no effect on it.

    Instants are whole milliseconds, like timestamps of records. Fractions of a millisecond are rounded up.

    :param start: the first instant of the interval.
    :param end: the first instant after it.
    :raises ValueError: the interval is empty, or an instant has no time zone.
    """

    start: datetime
    end: datetime

    def __post_init__(self) -> None:
        for name in ("start", "end"):
            instant = getattr(self, name)
            if instant.tzinfo is None:
                raise ValueError(f"Not an interval: `{name}` is {instant}, without a time zone.")
            object.__setattr__(self, name, to_instant(to_milliseconds(instant)))
        if self.start >= self.end:
            raise ValueError(f"Not an interval: [{self.start}, {self.end}). Expected start < end.")

    @classmethod
    def of_ms(cls, start: int, end: int) -> Interval:
        """Return the interval between two instants, in milliseconds since the epoch."""
        return cls(to_instant(start), to_instant(end))

    @classmethod
    def from_name(cls, name: str) -> Interval | None:
        """Return the interval with this :attr:`name`; None if the text is not the name of an interval."""
        found = _NAME.match(name)
        if found is None:
            return None
        try:
            start, end = (datetime.fromisoformat(_format_extended(instant)) for instant in found.groups())
            return cls(start, end)
        except ValueError:
            return None

    @property
    def start_ms(self) -> int:
        """The start, in milliseconds since the epoch."""
        return to_milliseconds(self.start)

    @property
    def end_ms(self) -> int:
        """The end, in milliseconds since the epoch."""
        return to_milliseconds(self.end)

    @property
    def name(self) -> str:
        """``20260101T000000Z-20260101T010000Z``. Names sort as the intervals do and are valid in every file system."""
        return f"{_format_basic(self.start)}-{_format_basic(self.end)}"

    def make_ledger_name(self, pipeline: str) -> str:
        """Return the name under which the ledger and the sink know this interval of a pipeline."""
        return f"{pipeline}.{self.name}"

    def overlaps(self, other: Interval) -> bool:
        """Return True if the intervals have an instant in common."""
        return self.start < other.end and other.start < self.end

    def __str__(self) -> str:
        return f"[{format_instant(self.start_ms)}, {format_instant(self.end_ms)})"


@dataclass(frozen=True)
class IntervalState:
    """The state of one data interval of a pipeline, as the ledger stores it; or of several intervals, merged into one span.

    :param state: PLANNED, or COMPLETE.
    :param ranges: the offsets of the interval.
    :param run: the run that planned it.
    :param replay: number of its replays.
    :param topic_ids: the ids of the topics.
    :param forgotten: True if the ledger no longer holds the record of its window.
    :param offset: offset of its first record in the ledger partition. Of two intervals that overlap, the earlier one is valid.
    :param gaps: offsets that were deleted before they were read, and that it has skipped.
    :param leading: for a span, the length of its first interval.
    :param tries: Airflow's counters, see :class:`~airflow_kafka_spark.windows.memory.WindowEntry`.
    :param binding: the binding of its window: a replay has to replace the rows in their place. None if unknown.
    :param dead: the dead letters and routed records of its window, which a replay does not send again; None without any.
    :param resent: offsets of its dead letters that were sent again, as far as the records of those changes may be removed.
    :param resends: number of the newest change that ``resent`` includes; 0 without one.
    :param epochs: leader epochs of the ends of its ranges, see :class:`~airflow_kafka_spark.windows.model.Window`: a replay has
        to notice that the log was truncated since. A missing partition is unknown.
    :param parts: for a span with holes in time or in offsets: returns parts without holes. The span then covers more than its
        intervals, so callers that find an overlap with it have to check the parts. None (default): there are no holes.
    :param only_in_time: True if the holes are in time only, so that the offsets of the intervals are contiguous.
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
    binding: Binding | None = None
    dead: DeadLetters | None = None
    resent: Mapping[TopicPartition, Runs] = field(default_factory=dict)
    resends: int = 0
    epochs: Mapping[TopicPartition, int] = field(default_factory=dict)
    parts: Callable[[], Sequence[IntervalState]] | None = field(default=None, compare=False, repr=False)
    only_in_time: bool = field(default=False, compare=False, repr=False)

    def is_of(self, interval: Interval) -> bool:
        """Return True if this is the state of that single interval, not of a span that covers it."""
        return self.leading is None and self.interval == interval

    def has(self, topic: str, topic_id: str) -> bool:
        """Return True if it has ranges of the topic with this name and this id. An unknown id matches any."""
        known = self.topic_ids.get(topic, "")
        return any(r.topic == topic for r in self.ranges) and not (known and topic_id and known != topic_id)

    def list_ranges_of(self, topic_ids: Mapping[str, str]) -> tuple[OffsetRange, ...]:
        """Return its ranges without those of topics that were deleted and recreated since.

        :param topic_ids: the present ids of the topics; a topic that is missing is not compared.
        """
        return tuple(r for r in self.ranges if self.is_of_topic(r.topic, topic_ids))

    def make_window(self, pipeline: str) -> Window:
        """Return its window, as the ledger had it, but for the time of its plan.

        :param pipeline: name of the pipeline that the interval belongs to.
        """
        return Window(
            self.interval.make_ledger_name(pipeline), NUMBER, self.ranges, self.run, "", topic_ids=self.topic_ids,
            interval=(self.interval.start_ms, self.interval.end_ms), gaps=self.gaps, replay=self.replay, binding=self.binding,
            epochs=self.epochs,
        )  # fmt: skip

    def is_of_topic(self, topic: str, topic_ids: Mapping[str, str]) -> bool:
        """Return True if its offsets of a topic refer to the present topic of this name. An unknown id matches any."""
        known, found = self.topic_ids.get(topic), topic_ids.get(topic)
        return not (known and found and known != found)


def find_epochs_at(known: Iterable[IntervalState], offsets: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
    """Return the leader epochs under which intervals have ended at some offsets, if known.

    :param known: the pipeline's intervals.
    """
    found: dict[TopicPartition, int] = {}
    for state in known:
        ends = {r.topic_partition for r in state.ranges if r.span and r.end == offsets.get(r.topic_partition)}
        found.update({tp: epoch for tp, epoch in state.epochs.items() if tp in ends})
    return found


def find_name_problem(name: str) -> tuple[str, str] | None:
    """Return what is wrong with the name of a pipeline, and what to do; None if it is a valid name."""
    if len(name) > LONGEST_NAME or not name.strip() or re.search(r"[\x00-\x1f]", name):
        return f"`{name[:60]}` cannot be a pipeline's name", f"Use 1 to {LONGEST_NAME} printable characters"
    parent, interval = parse_ledger_name(name)
    if interval is not None:
        found = f"`{name}` is the name of a data interval of pipeline `{parent}` in the ledger"
        return found, "Use a name that does not end with two instants"
    return None


def parse_ledger_name(name: str) -> tuple[str, str | None]:
    """Return the pipeline and the data interval that a name in the ledger or in a sink refers to. The interval is None for the
    name of the pipeline itself.
    """
    found = _INTERVAL_NAME.match(name)
    return (found["pipeline"], found["interval"]) if found and not found["route"] else (name, None)


def remove_interval(name: str) -> str:
    """Return the name that all data intervals of a pipeline have in common in a sink.

    :param name: the name of the pipeline, or of one of its intervals, as the sink's records have it.
    """
    found = _INTERVAL_NAME.match(name)
    return f"{found['pipeline']}{found['route'] or ''}" if found else name


def find_overlapping(interval: Interval, known: Iterable[IntervalState]) -> list[IntervalState]:
    """Return the other intervals of the pipeline that overlap this one. Records of the overlap would be moved twice."""
    found: list[IntervalState] = []
    for other in known:
        if other.interval.overlaps(interval) and not other.is_of(interval):
            found += [other] if other.parts is None else find_overlapping(interval, other.parts())
    return sorted(found, key=lambda o: o.interval)


def find_missing_intervals(known: Iterable[IntervalState]) -> tuple[Interval, ...]:
    """Return the times between intervals whose records no interval has, the oldest first.

    A time without records is not missing, so that a schedule with holes (working days only) is whole.

    :param known: intervals, and spans of several ones, which count as whole.
    """
    found = []
    before: IntervalState | None = None
    for after in sorted(known, key=lambda state: state.interval):
        if before is not None and after.interval.start > before.interval.end:
            ends = {r.topic_partition: r.end for r in before.list_ranges_of(after.topic_ids)}
            if any(r.start > ends.get(r.topic_partition, r.start) for r in after.ranges):
                found.append(Interval(before.interval.end, after.interval.start))
        # An interval within a span was moved again: it ends before the span does.
        if before is None or after.interval.end > before.interval.end:
            before = after
    return tuple(found)


def find_topic_start(topic: str, topic_id: str, interval: Interval, known: Iterable[IntervalState]) -> datetime | None:
    """Return the instant from which an interval reads a topic; None to read it from its first record.

    This is the start of the interval. If the intervals directly before it were planned without the topic, it is their start,
    because no other interval will move the topic's records of that time. It is None if there are other intervals and none of
    them has the topic: the topic was added to the pipeline.

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


def exclude_other_intervals(
    ranges: Sequence[OffsetRange], topic_ids: Mapping[str, str], others: Iterable[IntervalState]
) -> tuple[OffsetRange, ...]:
    """Return the ranges of an interval without the offsets of other intervals of the pipeline. The first interval that reads a
    topic owns all earlier offsets of that topic.

    :param topic_ids: the ids of the topics.
    """
    taken: dict[TopicPartition, list[OffsetRange]] = {}
    for _, r in find_sharing_intervals(ranges, topic_ids, others):
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


def find_sharing_intervals(
    ranges: Iterable[OffsetRange], topic_ids: Mapping[str, str], known: Iterable[IntervalState]
) -> Iterator[tuple[IntervalState, OffsetRange]]:
    """Yield the intervals that have some of these offsets, each with the range that overlaps.

    :param topic_ids: the ids of the topics of ``ranges``.
    """
    # Indexed by topic and partition, because the loop below runs over each range of every interval of the pipeline.
    wanted = {(r.topic, r.partition): r for r in ranges if r.span}
    for state in known:
        for r in state.ranges:
            mine = wanted.get((r.topic, r.partition))
            if mine is None or r.start >= mine.end or mine.start >= r.end or not r.span:
                continue
            if not state.has(r.topic, topic_ids.get(r.topic, "")):
                continue
            if state.parts is not None:
                yield from find_sharing_intervals(wanted.values(), topic_ids, state.parts())
                break
            yield state, r


def find_contiguous_offsets(
    known: Iterable[IntervalState],
    position: Mapping[TopicPartition, int],
    first: datetime | None = None,
    topic_ids: Mapping[str, str] | None = None,
) -> dict[TopicPartition, int]:
    """Return the offsets up to which all intervals are complete without a hole: those that the consumer group may commit.

    Intervals are ordered by offsets, not by time: one continues another if it begins at or before the other's end, in each of its
    partitions.

    :param known: the pipeline's intervals.
    :param position: the group's offset, or else the first offset of the log, for every partition.
    :param first: start of the schedule. No run will move records before the first interval that contains this instant or comes
        directly after it.
    :param topic_ids: the present ids of the topics; ranges of earlier topics of the same name are ignored. None if unknown.
    :return: the offsets, never below ``position``.
    """
    reached = dict(position)
    # The number breaks ties, since the states themselves cannot be compared.
    numbers = count()
    left = [(k.interval, next(numbers), k) for k in known if k.state is State.COMPLETE]
    heapq.heapify(left)
    while left:
        _, _, entry = heapq.heappop(left)
        ranges = entry.list_ranges_of(topic_ids or {})
        starts = {r.topic_partition: r.start for r in ranges}
        # Offsets that the interval has skipped will never be moved, so they do not count as a hole.
        gaps = [g for g in entry.gaps if entry.is_of_topic(g.topic, topic_ids or {})]
        starts.update({TopicPartition(g.topic, g.partition): g.start for g in gaps})
        length = entry.leading or entry.interval.end - entry.interval.start
        begins = first is not None and entry.interval.start - length < first <= entry.interval.end
        if entry.parts is not None and (begins or not entry.only_in_time):
            # If the span does not continue the position in any partition, neither does one of its parts.
            if begins or any(r.start <= reached.get(r.topic_partition, 0) < r.end for r in ranges):
                for part in entry.parts():
                    heapq.heappush(left, (part.interval, next(numbers), part))
            continue
        # An empty range is ignored: its offset does not show that earlier records were moved.
        spans = {r.topic_partition for r in ranges if r.span} | {TopicPartition(g.topic, g.partition) for g in gaps}
        if begins or all(start <= reached.get(tp, 0) for tp, start in starts.items() if tp in spans):
            for r in ranges:
                if begins or r.topic_partition in spans:
                    reached[r.topic_partition] = max(reached.get(r.topic_partition, 0), r.end)
    return reached


def _format_extended(instant: str) -> str:
    """Return an instant of a name in the extended form of ISO 8601, which Python 3.10 can parse."""
    fraction = instant[15:-1]
    return f"{instant[:4]}-{instant[4:6]}-{instant[6:11]}:{instant[11:13]}:{instant[13:15]}{fraction}+00:00"


def _format_basic(instant: datetime) -> str:
    fraction = f".{instant.microsecond // 1000:03d}" if instant.microsecond else ""
    return f"{instant:%Y%m%dT%H%M%S}{fraction}Z"
