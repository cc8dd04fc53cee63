"""Instants, the latency of records, and the parts of the time that moving a window takes.

Instants are datetimes, texts in ISO 8601, or Kafka's timestamps: whole milliseconds since the epoch. Latency, and the numbers
of records by time, come from histograms of their timestamps. Each task counts its records in buckets of time, and the driver
adds the counts up. Buckets grow with the span of the timestamps, so a task's result stays small. Spark's tasks use this
module, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Any, Generic, TypeAlias, TypeVar

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def to_milliseconds(instant: datetime) -> int:
    """Return the first whole millisecond at or after an instant, which must have a time zone."""
    elapsed = instant - EPOCH
    return -(-((elapsed.days * 86_400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds) // 1000)


def get_current_milliseconds() -> int:
    """Return the current time, in milliseconds since the epoch."""
    return time.time_ns() // 1_000_000


def to_instant(milliseconds: int) -> datetime:
    """Return an instant as a datetime in UTC."""
    return EPOCH + timedelta(milliseconds=milliseconds)


def parse_iso(text: str) -> datetime:
    """Return the datetime of a text in ISO 8601, with ``Z`` for UTC, which Python 3.10 does not accept.

    :raises ValueError: the text has another form.
    """
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def format_instant(milliseconds: int) -> str:
    """Return an instant as ISO 8601 in UTC. An instant after the year 9999 (microseconds passed as milliseconds) is returned as a
    number of milliseconds.
    """
    try:
        instant = to_instant(milliseconds)
    except OverflowError:
        return f"{milliseconds} ms since 1970"
    return instant.isoformat(timespec="milliseconds" if milliseconds % 1000 else "seconds").replace("+00:00", "Z")


SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000
MICROSECONDS_OF_DAY = 1000 * DAY
WIDTHS = (100, SECOND, 10 * SECOND, MINUTE, 10 * MINUTE, HOUR, 6 * HOUR, DAY, 30 * DAY, 360 * DAY)
"""Widths of buckets in milliseconds. Each is a multiple of the ones before it."""
MAX_BUCKETS = 500
"""Maximum number of buckets. Percentiles are exact to about one five-hundredth of the span of the timestamps."""

UpstreamCounts: TypeAlias = Mapping[str, int] | Mapping[int, int] | Mapping[datetime, int]
"""Numbers of records by instant: an ISO 8601 text, milliseconds since the epoch, or a datetime."""


@dataclass(frozen=True)
class TimestampHistogram:
    """Numbers of records by timestamp, in buckets of equal width.

    :param width: width of a bucket in milliseconds; one of :data:`WIDTHS`.
    :param counts: number of records by bucket: bucket ``n`` is ``[n * width, (n + 1) * width)`` since the epoch.
    """

    width: int = WIDTHS[0]
    counts: Mapping[int, int] = field(default_factory=dict)

    @property
    def records(self) -> int:
        """The number of records."""
        return sum(self.counts.values())

    def change_width(self, width: int) -> TimestampHistogram:
        """Return these counts in buckets of another width, a multiple of the present one."""
        counts: dict[int, int] = {}
        for bucket, count in self.counts.items():
            counts[bucket * self.width // width] = counts.get(bucket * self.width // width, 0) + count
        return TimestampHistogram(width, counts)

    def add(self, other: TimestampHistogram) -> TimestampHistogram:
        """Return the sum of two counts, in at most :data:`MAX_BUCKETS` buckets."""
        width = max(self.width, other.width)
        one, two = (
            (self.change_width(width) if self.width < width else self),
            (other.change_width(width) if other.width < width else other),
        )
        counts = dict(one.counts)
        for bucket, count in two.counts.items():
            counts[bucket] = counts.get(bucket, 0) + count
        both = TimestampHistogram(width, counts)
        for wider in (w for w in WIDTHS if w > width):
            if len(both.counts) <= MAX_BUCKETS:
                break
            both = both.change_width(wider)
        return both

    def compute_percentile(self, share: float) -> int:
        """Return a percentile of the timestamps, as the middle of its bucket.

        :param share: the share of records that are not later, from 0 to 1.
        :raises ValueError: there are no records.
        """
        left = share * self.records
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0:
                return bucket * self.width + self.width // 2
        raise ValueError("no records, no percentile")


def choose_bucket_width(oldest: int, newest: int, width: int) -> int:
    """Return the smallest width, at least ``width``, with which at most :data:`MAX_BUCKETS` buckets span two instants."""
    return next((w for w in WIDTHS if w >= width and (newest - oldest) // w < MAX_BUCKETS), WIDTHS[-1])


def sum_histograms(parts: Iterable[TimestampHistogram]) -> TimestampHistogram:
    """Return the sum of several counts."""
    both = TimestampHistogram()
    for part in parts:
        both = both.add(part)
    return both


@dataclass(frozen=True)
class Latency:
    """Seconds from the timestamps of records to the commit of their window in the sink. Negative if clocks disagree.

    :param min: the smallest latency, exact.
    :param max: the largest latency, exact.
    :param p50: the median, to the width of a bucket.
    :param p95: the 95th percentile, to the width of a bucket.
    """

    min: float
    p50: float
    p95: float
    max: float


def summarize_latency(times: TimestampHistogram, oldest: int | None, newest: int | None, flushed: int) -> Latency | None:
    """Return the end-to-end latency of a window's records; None without records.

    :param oldest: smallest timestamp, in milliseconds since the epoch.
    :param newest: largest timestamp.
    :param flushed: time of the sink's commit, in milliseconds since the epoch.
    """
    if oldest is None or newest is None or not times.counts:
        return None
    low, high = (flushed - newest) / 1000, (flushed - oldest) / 1000
    # The latest records have the smallest latency. The middle of a bucket may lie outside of [oldest, newest].
    p50, p95 = (min(max((flushed - times.compute_percentile(share)) / 1000, low), high) for share in (0.5, 0.05))
    return Latency(low, p50, p95, high)


@dataclass(frozen=True)
class Consumption:
    """Numbers of records by time, as they were read, and as an upstream system has counted them.

    :param width: width of a bucket in milliseconds.
    :param read: number of records that were read, by the start of their bucket in milliseconds since the epoch.
    :param upstream: number of records that were counted upstream, by the start of their bucket; None if they were not counted.
    """

    width: int
    read: Mapping[int, int]
    upstream: Mapping[int, int] | None = None

    @property
    def under(self) -> int:
        """Number of records that were counted upstream and not read, summed over the buckets (under-consumption)."""
        return sum(max(count - self.read.get(start, 0), 0) for start, count in (self.upstream or {}).items())

    @property
    def over(self) -> int:
        """Number of records that were read and not counted upstream, summed over the buckets (over-consumption)."""
        if self.upstream is None:
            return 0
        return sum(max(count - self.upstream.get(start, 0), 0) for start, count in self.read.items())

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as JSON: ``buckets`` are ``[start, read]`` or ``[start, read, upstream]``, the oldest first."""
        starts = sorted({*self.read, *(self.upstream or {})})
        if self.upstream is None:
            return {"bucket_seconds": self.width / 1000, "buckets": [[s, self.read[s]] for s in starts]}
        buckets = [[s, self.read.get(s, 0), self.upstream.get(s, 0)] for s in starts]
        return {"bucket_seconds": self.width / 1000, "buckets": buckets, "over": self.over, "under": self.under}


def summarize_consumption(
    times: TimestampHistogram, bucket: int = MINUTE, upstream: Mapping[int, int] | None = None
) -> Consumption:
    """Return the records that were read beside an upstream count, in buckets of at least the wider of both widths.

    :param bucket: width of the upstream's buckets in milliseconds.
    :param upstream: number of records by any instant of their bucket, in milliseconds since the epoch.
    """
    wide = times.change_width(next(w for w in WIDTHS if w >= max(times.width, bucket)))
    counted: dict[int, int] | None = None
    if upstream is not None:
        counted = {}
        for instant, count in upstream.items():
            start = instant // wide.width * wide.width
            counted[start] = counted.get(start, 0) + count
    return Consumption(wide.width, {b * wide.width: count for b, count in wide.counts.items()}, counted)


def parse_counts(given: Mapping[Any, object]) -> dict[int, int]:
    """Return an upstream count by milliseconds since the epoch.

    :param given: counts by ISO 8601 instants with a zone, by datetimes, or by milliseconds since the epoch.
    :raises ValueError: a key or a count is of another form; the message names it.
    """
    counts = {}
    for instant, count in given.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"{instant}: {count!r} is no number of records")
        counts[_parse_instant(instant)] = count
    return counts


def _parse_instant(given: object) -> int:
    text = str(given).strip()
    if isinstance(given, int) or text.isdecimal():
        return int(text)
    try:
        instant = given if isinstance(given, datetime) else parse_iso(text)
    except ValueError:
        raise ValueError(f"`{given}` is neither an ISO 8601 instant nor milliseconds since the epoch") from None
    if instant.tzinfo is None:
        raise ValueError(f"`{given}` has no time zone")
    return to_milliseconds(instant)


T = TypeVar("T")

WORK = ("read", "decode", "write", "wait")
"""Names of the parts of a task's time."""


class Timed(Generic[T]):
    """Iterates over items, and measures the time spent waiting for them.

    :param items: the items.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self.seconds = 0.0

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        begun = time.monotonic()
        try:
            return next(self._items)
        finally:
            self.seconds += time.monotonic() - begun


def compute_split_seconds(
    total: float, arriving: float, writing: float, read: Mapping[str, float], *, is_one_stage: bool
) -> dict[str, float]:
    """Return the seconds of the task that writes a split: ``read``, ``decode``, ``write`` and ``wait``.

    :param total: all seconds that the task took for the split.
    :param arriving: seconds spent waiting for its rows.
    :param writing: seconds spent in the sink's writer.
    :param read: ``read`` and ``decode``, as far as the reader of the split has measured them.
    :param is_one_stage: True if this task has read the split itself; False if Spark computes between reader and writer, so that
        this task waits.
    """
    reading, decoding = read.get("read", 0.0), read.get("decode", 0.0)
    own = max(0.0, total - arriving - writing)
    waiting = 0.0
    if is_one_stage:
        decoding = max(0.0, total - reading - writing)
    else:
        decoding, waiting = decoding + own, max(0.0, arriving - reading - decoding)
    return {"read": reading, "decode": decoding, "write": writing, "wait": waiting}


def compute_move_seconds(
    move: float, jobs: Sequence[tuple[float, float]], move_began: float, work: Mapping[str, float], work_began: float
) -> dict[str, float]:
    """Return the seconds of the parts of ``move``, which add up to it.

    ``session``: from the start to the first job, while Spark's session starts; ``workers``: from there to the start of the first
    task; ``read``, ``decode`` (transforms included) and ``write``: the time of the jobs, in the proportions that their tasks have
    measured; ``wait``: everything else, as waiting for Spark and the sink's commit. If tasks have measured nothing, like those of
    an earlier release, ``write`` is the whole time of the jobs.

    :param move: seconds of the step ``move``.
    :param jobs: start and end of each Spark job of the window, seconds since the epoch; empty if nothing was moved.
    :param move_began: start of the step, seconds since the epoch.
    :param work: seconds of all tasks together, by part.
    :param work_began: start of the first task, by the clock of its machine; 0 if unknown.
    """
    if not jobs:
        return {}
    first, running = jobs[0][0], sum(max(0.0, end - begin) for begin, end in jobs)
    session = min(max(0.0, first - move_began), move)
    left = min(running, move - session)
    workers = min(max(0.0, work_began - first), left) if work_began else 0.0
    left -= workers
    total = sum(work.values())
    is_measured = total > 0 and "write" in work
    shares = {part: left * seconds / total for part, seconds in work.items()} if is_measured else {"write": left}
    parts = {"session": session, "workers": workers, **{part: shares.get(part, 0.0) for part in ("read", "decode", "write")}}
    return {**parts, "wait": max(0.0, move - sum(parts.values()))}
