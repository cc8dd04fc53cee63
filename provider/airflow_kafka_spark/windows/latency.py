"""Latency of a window's records, and their counts by time, from histograms of their timestamps.

Each task counts its records into buckets of time, and the driver adds the counts up. Buckets become wider the more time the
records span, so that a task's result stays small.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from airflow_kafka_spark.windows.instants import instant_ms

SECOND, MINUTE, HOUR, DAY = 1000, 60_000, 3_600_000, 86_400_000
WIDTHS = (100, SECOND, 10 * SECOND, MINUTE, 10 * MINUTE, HOUR, 6 * HOUR, DAY, 30 * DAY, 360 * DAY)
"""Milliseconds; each a multiple of those before it."""
MOST = 500
"""Buckets: so percentiles are as exact as a five hundredth of the span of the window's timestamps, or better."""


@dataclass(frozen=True)
class Times:
    """Counts of records by the time of their timestamps, in buckets of equal width.

    :param width: of a bucket, in milliseconds; one of :data:`WIDTHS`.
    :param counts: records by bucket: bucket ``n`` is ``[n * width, (n + 1) * width)`` since the epoch.
    """

    width: int = WIDTHS[0]
    counts: Mapping[int, int] = field(default_factory=dict)

    @property
    def records(self) -> int:
        return sum(self.counts.values())

    def at(self, width: int) -> Times:
        """Return the same counts in wider buckets."""
        counts: dict[int, int] = {}
        for bucket, count in self.counts.items():
            counts[bucket * self.width // width] = counts.get(bucket * self.width // width, 0) + count
        return Times(width, counts)

    def plus(self, other: Times) -> Times:
        """Return the sum of two counts, in at most :data:`MOST` buckets."""
        width = max(self.width, other.width)
        one, two = (self.at(width) if self.width < width else self), (other.at(width) if other.width < width else other)
        counts = dict(one.counts)
        for bucket, count in two.counts.items():
            counts[bucket] = counts.get(bucket, 0) + count
        both = Times(width, counts)
        for wider in (w for w in WIDTHS if w > width):
            if len(both.counts) <= MOST:
                break
            both = both.at(wider)
        return both

    def percentile(self, share: float) -> int:
        """Return the timestamp that the given share of the records is not later than: the middle of its bucket."""
        left = share * self.records
        for bucket in sorted(self.counts):
            left -= self.counts[bucket]
            if left <= 0:
                return bucket * self.width + self.width // 2
        raise ValueError("no records, no percentile")


def fitting_width(oldest: int, newest: int, width: int) -> int:
    """Return the smallest width, at least the one given, with which at most :data:`MOST` buckets reach from one instant to the
    other.
    """
    return next((w for w in WIDTHS if w >= width and (newest - oldest) // w < MOST), WIDTHS[-1])


def total(parts: Iterable[Times]) -> Times:
    """Return the sum of several counts."""
    both = Times()
    for part in parts:
        both = both.plus(part)
    return both


@dataclass(frozen=True)
class Latency:
    """Seconds from the timestamp of a record to the flush of its window. Negative if clocks disagree.

    :param min: exact.
    :param max: exact.
    :param p50: to the width of a bucket, as ``p95``.
    """

    min: float
    p50: float
    p95: float
    max: float


def latency(times: Times, oldest: int | None, newest: int | None, flushed: int) -> Latency | None:
    """Return the end-to-end latency of a window's records, or None without any.

    :param oldest: smallest timestamp, in milliseconds since the epoch.
    :param newest: largest.
    :param flushed: when the sink had committed the window.
    """
    if oldest is None or newest is None or not times.counts:
        return None
    low, high = (flushed - newest) / 1000, (flushed - oldest) / 1000
    # The latest records have the smallest latency. A bucket's middle may lie outside of what there is.
    p50, p95 = (min(max((flushed - times.percentile(share)) / 1000, low), high) for share in (0.5, 0.05))
    return Latency(low, p50, p95, high)


@dataclass(frozen=True)
class Consumption:
    """Records read by time, beside the counts of an upstream system.

    :param width: of a bucket, in milliseconds.
    :param read: records by the beginning of their bucket, in milliseconds since the epoch.
    :param upstream: the same as counted upstream; None if they were not counted.
    """

    width: int
    read: Mapping[int, int]
    upstream: Mapping[int, int] | None = None

    @property
    def under(self) -> int:
        """Records that were counted upstream and not read, bucket by bucket (under-consumption)."""
        return sum(max(count - self.read.get(start, 0), 0) for start, count in (self.upstream or {}).items())

    @property
    def over(self) -> int:
        """Records that were read and not counted upstream, bucket by bucket (over-consumption)."""
        if self.upstream is None:
            return 0
        return sum(max(count - self.upstream.get(start, 0), 0) for start, count in self.read.items())

    def to_dict(self) -> dict[str, Any]:
        """Return JSON: ``buckets`` are ``[start, read]`` or ``[start, read, upstream]``, oldest first."""
        starts = sorted({*self.read, *(self.upstream or {})})
        if self.upstream is None:
            return {"bucket_seconds": self.width / 1000, "buckets": [[s, self.read[s]] for s in starts]}
        buckets = [[s, self.read.get(s, 0), self.upstream.get(s, 0)] for s in starts]
        return {"bucket_seconds": self.width / 1000, "buckets": buckets, "over": self.over, "under": self.under}


def consumption(times: Times, bucket: int = MINUTE, upstream: Mapping[int, int] | None = None) -> Consumption:
    """Put what was read beside an upstream count, in buckets of the wider of both.

    :param bucket: milliseconds.
    :param upstream: records by an instant of their bucket, in milliseconds since the epoch.
    """
    wide = times.at(next(w for w in WIDTHS if w >= max(times.width, bucket)))
    counted: dict[int, int] | None = None
    if upstream is not None:
        counted = {}
        for instant, count in upstream.items():
            start = instant // wide.width * wide.width
            counted[start] = counted.get(start, 0) + count
    return Consumption(wide.width, {b * wide.width: count for b, count in wide.counts.items()}, counted)


def parse_counts(given: Mapping[Any, Any]) -> dict[int, int]:
    """Return an upstream count by milliseconds. Users give it by ISO 8601 instants with a zone, datetimes, or milliseconds since
    the epoch.

    :raises ValueError: naming what cannot be understood.
    """
    counts = {}
    for instant, count in given.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise ValueError(f"{instant}: {count!r} is no number of records")
        counts[_instant(instant)] = count
    return counts


def _instant(given: Any) -> int:
    text = str(given).strip()
    if isinstance(given, int) or text.isdecimal():
        return int(text)
    try:
        instant = given if isinstance(given, datetime) else datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        raise ValueError(f"`{given}` is neither an ISO 8601 instant nor milliseconds since the epoch") from None
    if instant.tzinfo is None:
        raise ValueError(f"`{given}` has no time zone")
    return instant_ms(instant)
