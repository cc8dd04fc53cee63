"""Old data intervals of a pipeline, many in one record of the ledger.

An hourly pipeline has 17,520 intervals after two years. All of them are checked: an interval must not overlap one that was moved,
and must not move offsets that another one has. For these checks, intervals that are contiguous in time and in offsets are one
span. So the ledger keeps old ones in archives: a record with their span, which every reader parses, and with the compressed
intervals, which are decompressed only for a reader that needs one of them.

Intervals of a schedule with holes (an hour a day, working days only) are not contiguous. Their archive has the span from the
first to the last of them, and a flag for the holes: a check that overlaps the span is repeated with the intervals.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property

from airflow_kafka_spark.windows.codec import interval_from_json, interval_to_json, pack_values, unpack_values
from airflow_kafka_spark.windows.interval import Interval, IntervalState
from airflow_kafka_spark.windows.model import OffsetRange, State, TopicPartition

ARCHIVE_AFTER = 100
"""Number of old intervals with records of their own above which they are archived."""
MIN_INTERVALS = 4
"""Minimum number of intervals in an archive."""
MAX_BYTES = 1_500_000
"""Maximum size of an archive's intervals in bytes, before compression. Brokers accept records of up to 1 MiB by default."""


@dataclass(frozen=True)
class IntervalArchive:
    """Complete intervals with equal topics, stored as one record of the ledger.

    :param span: the intervals merged into one, from the first to the last.
    :param count: number of intervals.
    :param packed: the intervals, compressed.
    :param offset: offset of the record in the ledger partition; -1 if it was not read from there.
    :param has_holes: True if the intervals are not contiguous in time or in offsets.
    :param only_in_time: True if they are contiguous in offsets, but not in time.
    """

    span: IntervalState
    count: int
    packed: str = field(repr=False)
    offset: int = field(default=-1, compare=False)
    has_holes: bool = False
    only_in_time: bool = False

    @classmethod
    def of(cls, chain: Sequence[IntervalState]) -> IntervalArchive:
        """Return the archive of some intervals.

        :param chain: intervals with equal topics, in ascending order.
        """
        has_holes = len(_group_without_holes(chain)) > 1
        only_in_time = has_holes and len(_group_without_holes(chain, in_time=False)) == 1
        members = pack_values([interval_to_json(state) for state in chain])
        return cls(_merge_intervals(chain), len(chain), members, has_holes=has_holes, only_in_time=only_in_time)

    @cached_property
    def as_one(self) -> IntervalState:
        """The intervals merged into one span. If they have holes, the ``parts`` of the span return them without holes."""
        return replace(self.span, parts=self._get_parts, only_in_time=self.only_in_time) if self.has_holes else self.span

    def _get_parts(self) -> tuple[IntervalState, ...]:
        return self._found

    @cached_property
    def _found(self) -> tuple[IntervalState, ...]:
        return tuple(map(_merge_intervals, _group_without_holes(list(self.intervals.values()))))

    @cached_property
    def intervals(self) -> Mapping[str, IntervalState]:
        """The intervals by name, in ascending order."""
        states = map(interval_from_json, unpack_values(self.packed))
        return {state.interval.name: state for state in states}

    def may_hold(self, interval: Interval) -> bool:
        """Return False if the interval lies outside of the archive's span. The archive is not decompressed."""
        return self.span.interval.start <= interval.start and interval.end <= self.span.interval.end


class Intervals(Mapping[str, IntervalState]):
    """All data intervals of a pipeline, by name: those with a record of their own, and those in archives.

    A record of its own takes precedence over an archive: an archived interval gets one when it is moved again.

    :param recent: the intervals with a record of their own.
    :param archives: the archives that contain the others.
    """

    def __init__(self, recent: Mapping[str, IntervalState] | None = None, archives: Iterable[IntervalArchive] = ()) -> None:
        self.recent: Mapping[str, IntervalState] = recent or {}
        self.archives = tuple(sorted(archives, key=lambda archive: archive.span.interval))

    def __getitem__(self, name: str) -> IntervalState:
        if name in self.recent:
            return self.recent[name]
        interval = Interval.from_name(name)
        for archive in self.archives:
            if interval is not None and archive.may_hold(interval) and name in archive.intervals:
                return archive.intervals[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names. Every archive is decompressed."""
        yield from self.recent
        for archive in self.archives:
            yield from (name for name in archive.intervals if name not in self.recent)

    def __len__(self) -> int:
        return len(self.recent) + sum(archive.count for archive in self.archives) - self._moved_again

    def __bool__(self) -> bool:
        return bool(self.recent or self.archives)

    @property
    def _moved_again(self) -> int:
        """Number of intervals that have a record of their own and are in an archive, too."""
        return sum(
            1
            for name, state in self.recent.items()
            for archive in self.archives
            if archive.may_hold(state.interval) and name in archive.intervals
        )

    @property
    def complete(self) -> int:
        """Number of intervals that are complete, or were complete before they were replayed."""
        open_ones = sum(1 for state in self.recent.values() if state.state is not State.COMPLETE and not state.replay)
        return len(self) - open_ones

    @property
    def spans(self) -> tuple[IntervalState, ...]:
        """All intervals, with each archive merged into one span, so that the number of values stays small.

        Overlaps and offsets can be checked against spans as against single intervals. If a span has holes
        (:attr:`~airflow_kafka_spark.windows.interval.IntervalState.parts`), checks that overlap it decompress its archive.
        """
        return (*self.recent.values(), *(archive.as_one for archive in self.archives))

    @property
    def newest_first(self) -> Iterator[tuple[str, IntervalState]]:
        """Iterator over names and intervals, the newest first, archived ones last. Archives are decompressed on demand."""
        yield from sorted(self.recent.items(), reverse=True)
        for archive in reversed(self.archives):
            yield from (item for item in sorted(archive.intervals.items(), reverse=True) if item[0] not in self.recent)


def group_into_archives(
    old: Iterable[IntervalState], archives: Iterable[IntervalArchive] = ()
) -> list[tuple[IntervalArchive, list[IntervalState]]]:
    """Return the archives that can be made of old intervals, each with its intervals.

    :param old: complete intervals with a record of their own.
    :param archives: the existing archives. Spans of new archives do not overlap theirs.
    :return: an empty list for at most :data:`ARCHIVE_AFTER` intervals. Intervals within the span of an archive are left out, and
        groups of fewer than :data:`MIN_INTERVALS` that differ in topics from their neighbours or lie between two archives.
    """
    candidates = sorted(old, key=lambda state: state.interval)
    if len(candidates) <= ARCHIVE_AFTER:
        return []
    made: list[tuple[IntervalArchive, list[IntervalState]]] = []
    chain: list[IntervalState] = []
    ends: dict[TopicPartition, int] = {}
    size = 0
    spans = [archive.span.interval for archive in archives]

    def close() -> None:
        if len(chain) >= MIN_INTERVALS:
            made.append((IntervalArchive.of(chain), list(chain)))
        chain.clear()
        ends.clear()

    for state in candidates:
        if any(state.interval.overlaps(span) for span in spans):
            close()
            continue
        own = len(json.dumps(interval_to_json(state)))
        if chain:
            whole = Interval(chain[0].interval.start, state.interval.end)
            is_around = any(whole.overlaps(span) for span in spans)
            if is_around or size + own > MAX_BYTES or not _follows(chain[-1], state, ends):
                close()
        size = own if not chain else size + own
        chain.append(state)
        ends.update({tp: end for tp, (_, end) in _find_outer_offsets(state).items()})
    close()
    return made


def _follows(before: IntervalState, state: IntervalState, ends: Mapping[TopicPartition, int]) -> bool:
    """Return True if an interval comes after another one, in time and in offsets, and has equal topics.

    :param ends: the offsets at which earlier intervals end.
    """
    return (
        before.interval.end <= state.interval.start
        and dict(before.topic_ids) == dict(state.topic_ids)
        and {r.topic for r in before.ranges} == {r.topic for r in state.ranges}
        and all(ends.get(tp, 0) <= start for tp, (start, _) in _find_outer_offsets(state).items())
    )


def _find_outer_offsets(state: IntervalState) -> dict[TopicPartition, tuple[int, int]]:
    """Return the start and the end of the offsets that an interval has moved or skipped, by partition."""
    found: dict[TopicPartition, tuple[int, int]] = {}
    for r in (*(OffsetRange(g.topic, g.partition, g.start, g.end) for g in state.gaps), *state.ranges):
        start, end = found.get(r.topic_partition, (r.start, r.end))
        found[r.topic_partition] = min(start, r.start), max(end, r.end)
    return found


def _is_in_one_piece(state: IntervalState) -> bool:
    """Return True if the offsets that an interval has moved or skipped form one range in each partition.

    A partition without records has an empty range, whose offset counts: if it is not the end of the previous interval, there is
    a hole between them.
    """
    reached: dict[TopicPartition, int] = {}
    for r in sorted((*(OffsetRange(g.topic, g.partition, g.start, g.end) for g in state.gaps), *state.ranges)):
        if reached.setdefault(r.topic_partition, r.start) != r.start:
            return False
        reached[r.topic_partition] = r.end
    return True


def _group_without_holes(chain: Sequence[IntervalState], *, in_time: bool = True) -> list[list[IntervalState]]:
    """Return successive intervals in groups that have no holes, neither in time nor in offsets.

    A new partition does not make a hole if its range begins at offset 0.

    :param in_time: False to ignore holes in time.
    """
    groups: list[list[IntervalState]] = []
    ends: dict[TopicPartition, int] = {}
    for state in chain:
        outer = _find_outer_offsets(state)
        goes_on = (
            bool(groups)
            and (not in_time or groups[-1][-1].interval.end == state.interval.start)
            and _is_in_one_piece(state)
            and _is_in_one_piece(groups[-1][-1])
            and all(ends.get(tp, 0) == start for tp, (start, _) in outer.items())
        )
        if goes_on:
            groups[-1].append(state)
        else:
            groups.append([state])
            ends = {}
        ends.update({tp: end for tp, (_, end) in outer.items()})
    return groups


def _merge_intervals(chain: Sequence[IntervalState]) -> IntervalState:
    """Return successive intervals merged into one."""
    if len(chain) == 1:
        return chain[0]
    starts: dict[TopicPartition, int] = {}
    ends: dict[TopicPartition, int] = {}
    epochs: dict[TopicPartition, int] = {}
    for state in chain:
        for tp, (start, end) in _find_outer_offsets(state).items():
            starts.setdefault(tp, start)
            ends[tp] = end
        read = {r.topic_partition for r in state.ranges if r.span}
        epochs = {tp: epoch for tp, epoch in epochs.items() if tp not in read}
        epochs |= {tp: epoch for tp, epoch in state.epochs.items() if tp in read}
    first, last = chain[0].interval, chain[-1].interval
    return IntervalState(
        Interval(first.start, last.end),
        State.COMPLETE,
        tuple(OffsetRange(*tp, starts[tp], end) for tp, end in sorted(ends.items())),
        topic_ids=chain[-1].topic_ids,
        forgotten=True,
        offset=min(state.offset for state in chain),
        leading=first.end - first.start,
        epochs=epochs,
    )


def archive_to_json(archive: IntervalArchive) -> dict[str, object]:
    """Return an archive as JSON; ``span`` has the form of an interval's record."""
    leading = archive.span.leading or timedelta()
    return {
        "count": archive.count,
        "span": interval_to_json(archive.span),
        "leading": round(leading / timedelta(milliseconds=1)),
        **({"holes": "time" if archive.only_in_time else "offsets"} if archive.has_holes else {}),
        "intervals": archive.packed,
    }


def archive_from_json(value: Mapping[str, object], offset: int) -> IntervalArchive:
    """Return the archive that a record contains.

    :param offset: offset of the record.
    """
    span, count, leading, intervals = (value[name] for name in ("span", "count", "leading", "intervals"))
    assert isinstance(span, dict) and isinstance(count, int) and isinstance(leading, int) and isinstance(intervals, str)
    holes, state = value.get("holes"), interval_from_json(span, leading=timedelta(milliseconds=leading))
    return IntervalArchive(state, count, intervals, offset, has_holes=holes is not None, only_in_time=holes == "time")
