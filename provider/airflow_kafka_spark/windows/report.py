"""The report of a complete window, for the ledger, XCom, the asset event and the log."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from airflow_kafka_spark.windows.dead_letters import Captured, DeadLetters
from airflow_kafka_spark.windows.model import (
    Applied,
    Followed,
    Gap,
    Landed,
    Marker,
    OffsetRange,
    SplitResult,
    Window,
    merge_landed,
)
from airflow_kafka_spark.windows.times import (
    WORK,
    Consumption,
    Latency,
    format_instant,
    sum_histograms,
    summarize_consumption,
    summarize_latency,
)


@dataclass(frozen=True)
class PassProgress:
    """The progress of a pass over whole tables, up to the end of the window whose position holds it.

    :param began: the time at which the pass was begun, seconds since 1970.
    :param all_rows: number of rows of the tables, estimated by their database when the pass began; None without an estimate.
    :param all_chunks: number of chunks that these rows make; None if unknown.
    :param chunks: number of chunks that are planned until now.
    :param rows: upper bound of the number of rows in these chunks.
    """

    began: float
    all_rows: int | None = None
    all_chunks: int | None = None
    chunks: int = 0
    rows: int = 0

    @classmethod
    def begin(cls, now: float, estimates: Collection[int], chunk_rows: int) -> PassProgress:
        """Return the progress of a pass that begins.

        :param estimates: estimated number of rows of each table.
        :param chunk_rows: number of rows of a chunk.
        """
        chunks = sum(max(1, math.ceil(rows / chunk_rows)) for rows in estimates)
        return cls(now, sum(estimates), chunks) if all(rows > 0 for rows in estimates) else cls(now)

    def add(self, chunks: int, rows: int, *, is_bound: bool = False, is_complete: bool = False) -> PassProgress:
        """Return the progress up to the end of the next window.

        :param chunks: number of chunks of the window.
        :param rows: number of rows in these chunks.
        :param is_bound: True if ``rows`` is an upper bound. Then not more rows than the estimate count as done.
        :param is_complete: True if no chunk is left. Otherwise the totals leave at least one chunk, even if the estimate was
            lower.
        """
        total = self.rows + rows
        if is_bound and self.all_rows is not None:
            total = min(total, self.all_rows)
        done = replace(self, chunks=self.chunks + chunks, rows=total)
        if is_complete:
            return replace(done, all_chunks=done.chunks, all_rows=done.rows)
        if done.all_chunks is None or done.all_rows is None:
            return done
        all_rows = done.all_rows if is_bound else max(done.all_rows, done.rows + 1)
        return replace(done, all_chunks=max(done.all_chunks, done.chunks + 1), all_rows=all_rows)

    def to_json(self) -> dict[str, Any]:
        """Return the value for a position."""
        return {name: value for name, value in vars(self).items() if value is not None}

    @classmethod
    def from_json(cls, value: Mapping[str, Any] | None) -> PassProgress | None:
        """Return the progress from the value that :meth:`to_json` has returned; None for None."""
        return cls(**value) if value else None

    def make_facts(self, now: float) -> dict[str, Any]:
        """Return the facts for a report: chunks and rows that are done, estimated totals, seconds that have passed and that
        remain.

        :param now: seconds since 1970.
        """
        found: dict[str, Any] = {"chunks": self.chunks, "rows": self.rows, "seconds": round(max(0.0, now - self.began), 1)}
        if self.all_chunks is not None:
            left = found["seconds"] * (self.all_chunks - self.chunks) / self.chunks if self.chunks else None
            more = {} if left is None else {"seconds_left": round(left, 1)}
            found |= {"all_chunks": self.all_chunks, "all_rows": self.all_rows, **more}
        return found


def parse_position_progress(position: Mapping[str, Any]) -> PassProgress | None:
    """Return the progress that the position of a source holds; None without a pass."""
    return PassProgress.from_json(position.get("progress") or (position.get("snapshot") or {}).get("progress"))


def format_pass_progress(found: Mapping[str, Any]) -> str:
    """Return the facts of :meth:`PassProgress.make_facts` as a text for a log."""
    if "all_chunks" not in found:
        return f"{found['chunks']:,} chunks, at most {found['rows']:,} rows, in {_format_duration(found['seconds'])}"
    of = f"{found['chunks']:,} of about {found['all_chunks']:,} chunks ({found['rows']:,} of about {found['all_rows']:,} rows)"
    left = f", about {_format_duration(found['seconds_left'])} to go" if found.get("seconds_left") else ""
    return f"{of} in {_format_duration(found['seconds'])}{left}"


def _format_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


@dataclass(frozen=True)
class Report:
    """The report of one complete window.

    :param window: the window.
    :param records_read: number of records in its ranges (tombstones, ignored and rejected ones included).
    :param records_written: number of rows that the sink wrote; fewer than read if an upsert kept the last of several.
    :param records_deleted: number of rows that the sink deleted because of tombstones.
    :param records_ignored: number of tombstones that were ignored, as the user has configured.
    :param records_rejected: number of bad records that were tolerated. They are not in the sink.
    :param records_filtered: number of records that transforms left out.
    :param bytes: size of the values, and of the keys if those are read.
    :param records: number of records that were read, by ``topic-partition``.
    :param gaps: offsets that were deleted before they could be read.
    :param min_timestamp: smallest record timestamp, milliseconds since the epoch; None without records.
    :param max_timestamp: largest record timestamp.
    :param latency: seconds from the timestamps of its records to the sink's commit; None without records, or if an earlier
        attempt has committed them.
    :param consumption: number of records by time, beside the counts of an upstream system; None in the same cases.
    :param timings: seconds of each step: ``fence``, ``plan``, ``move``; ``total`` from the fence to the end of ``move``, without
        the validation before it and the close after it; and of the parts of ``move`` (:func:`.compute_move_seconds`).
    :param committed: offsets that the consumer group was set to, by ``topic-partition``.
    :param group_id: the consumer group.
    :param sink: the sink's asset URI.
    :param guarantee: delivery guarantee of the sink.
    :param attempts: number of attempts that worked on this window.
    :param completed_at: UTC instant, ISO 8601.
    :param source: URI of the source of rows; empty for a window that was read from Kafka.
    :param published: offsets of its records in the target topics, for a window that was published to Kafka.
    :param dead_letters: offsets of the records that were sent to a dead letter topic.
    :param records_routed: number of records that a transform sent to another topic or sink instead of the sink.
    :param routed: offsets of the records that were routed to topics.
    :param captured: number of records that were routed to other sinks, by sink.
    :param records_out_of_interval: number of records whose timestamps lie outside of the window's data interval.
    :param out_of_interval_seconds: the largest distance of such a timestamp from the interval.
    :param work: seconds that tasks took for reading, decoding, writing and waiting, added up over all splits.
    :param work_began: start of the first task, seconds since the epoch; 0 if unknown.
    :param records_removed: number of records in ``records_read`` from splits that an earlier attempt has committed, and which
        compaction or retention has removed from the topic since.
    """

    window: Window
    records_read: int = 0
    records_written: int = 0
    records_deleted: int = 0
    records_ignored: int = 0
    records_rejected: int = 0
    bytes: int = 0
    records: Mapping[str, int] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    min_timestamp: int | None = None
    max_timestamp: int | None = None
    latency: Latency | None = None
    consumption: Consumption | None = None
    timings: Mapping[str, float] = field(default_factory=dict)
    committed: Mapping[str, int] = field(default_factory=dict)
    group_id: str = ""
    sink: str = ""
    guarantee: str = ""
    attempts: int = 1
    completed_at: str = ""
    source: str = ""
    published: tuple[Landed, ...] = ()
    dead_letters: tuple[Landed, ...] = ()
    records_filtered: int = 0
    records_routed: int = 0
    routed: tuple[Landed, ...] = ()
    captured: tuple[Captured, ...] = ()
    records_removed: int = 0
    records_out_of_interval: int = 0
    out_of_interval_seconds: float = 0.0
    work: Mapping[str, float] = field(default_factory=dict)
    work_began: float = 0.0

    @property
    def _is_published(self) -> bool:
        return bool(self.window.source or self.window.target)

    @property
    def rate(self) -> float:
        """Records per second over the total time of the window."""
        total = self.timings.get("total", 0.0)
        return self.records_read / total if total else 0.0

    @property
    def records_captured(self) -> int:
        """Number of records that were routed to other sinks."""
        return sum(found.records for found in self.captured)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON, for XCom, the ledger and the asset event."""
        return {
            "pipeline": self.window.pipeline,
            "window": self.window.id,
            "run": self.window.run,
            "ranges": [
                {
                    "topic": r.topic,
                    "partition": r.partition,
                    "start": r.start,
                    "end": r.end,
                    "records": self.records.get(str(r.topic_partition), 0),
                }
                for r in self.window.ranges
            ],
            "records_read": self.records_read,
            "records_written": self.records_written,
            "records_deleted": self.records_deleted,
            "records_ignored": self.records_ignored,
            "records_rejected": self.records_rejected,
            **({"records_filtered": self.records_filtered} if self.records_filtered else {}),
            **({"records_routed": self.records_routed} if self.records_routed else {}),
            **({"records_removed": self.records_removed} if self.records_removed else {}),
            "bytes": self.bytes,
            "rate": round(self.rate, 1),
            "gaps": [{"topic": g.topic, "partition": g.partition, "start": g.start, "end": g.end} for g in self.gaps],
            "min_timestamp": self.min_timestamp,
            "max_timestamp": self.max_timestamp,
            "latency": {name: round(s, 3) for name, s in vars(self.latency).items()} if self.latency else None,
            "consumption": self.consumption.to_dict() if self.consumption else None,
            "held_back": self.window.held_back,
            "timings": {step: round(seconds, 3) for step, seconds in self.timings.items()},
            "committed": dict(self.committed),
            "group_id": self.group_id,
            "sink": self.sink,
            "guarantee": self.guarantee,
            "attempts": self.attempts,
            "planned_at": self.window.planned_at,
            "completed_at": self.completed_at,
            **({"interval": list(map(format_instant, self.window.interval))} if self.window.interval else {}),
            **(self._summarize_out_of_interval() if self.records_out_of_interval else {}),
            **({"replay": self.window.replay} if self.window.replay else {}),
            **({"follows": _convert_followed(self.window.follows)} if self.window.follows else {}),
            **({"source": self.source} if self.window.source else {}),
            **self._bytes_behind,
            **self._progress,
            **({"source_remaining": True} if self.window.source and self.window.source.remaining else {}),
            **({"source_ahead": dict(vars(self.window.source.ahead))} if self.window.source and self.window.source.ahead else {}),
            **({"dead_letters": [vars(part) for part in self.dead_letters]} if self.dead_letters else {}),
            **({"routed": [vars(part) for part in self.routed]} if self.routed else {}),
            **({"captured": [{"sink": c.sink, "records": c.records} for c in self.captured]} if self.captured else {}),
            **({"published": [vars(part) for part in self.published]} if self._is_published else {}),
        }

    @property
    def _bytes_behind(self) -> dict[str, int]:
        """The bytes of a database's log that were still unread after the window when it was planned; empty for other
        sources.
        """
        behind = self.window.source.position.get("bytes_behind") if self.window.source else None
        return {} if behind is None else {"source_bytes_behind": behind}

    @property
    def _progress(self) -> dict[str, Any]:
        """The progress of the pass over whole tables; empty for other windows."""
        found = parse_position_progress(self.window.source.position) if self.window.source else None
        if found is None:
            return {}
        return {
            "source_progress": found.make_facts(datetime.fromisoformat(self.completed_at or self.window.planned_at).timestamp())
        }

    def _summarize_out_of_interval(self) -> dict[str, Any]:
        return {
            "records_out_of_interval": self.records_out_of_interval,
            "out_of_interval_seconds": self.out_of_interval_seconds,
        }

    @property
    def line(self) -> str:
        """The report as one line for a log."""
        dead = sum(p.records for p in self.dead_letters)
        extra = [
            f"{count:,} {what}"
            for count, what in (
                (self.records_deleted, "deleted"),
                (self.records_ignored, "ignored"),
                (self.records_filtered, "filtered"),
                (self.records_routed - self.records_captured, "routed to other topics"),
                (self.records_captured, "routed to other sinks"),
                (max(0, self.records_rejected - dead), "rejected"),
                (dead, "dead letter" if dead == 1 else "dead letters"),
                (sum(g.end - g.start for g in self.gaps), "offsets lost to retention"),
                (self.records_removed, "removed from the topic since they were committed"),
                (self.window.held_back, "offsets held back by an open transaction"),
                (self.window.replay, "times replayed"),
            )
            if count
        ]
        if self.records_out_of_interval:
            distance = timedelta(seconds=self.out_of_interval_seconds)
            extra.append(f"{self.records_out_of_interval:,} with timestamps outside of the interval, by up to {distance}")
        if self.latency:
            extra.append(f"latency {self.latency.p50:,.1f} s (p95 {self.latency.p95:,.1f} s)")
        seconds = self.timings.get("total", 0.0)
        return (
            f"Window {self.window}: {_count(self.records_read, 'record')} read, {_count(self.records_written, 'row')} written"
            f"{''.join(', ' + e for e in extra)}, {format_size(self.bytes)} in {seconds:.1f} s ({self.rate:,.0f} records/s); "
            f"{describe_landed(self.published) if self._is_published else describe_ranges(self.window.ranges)}"
        )


def _count(number: int, noun: str) -> str:
    """Return a number with its noun, such as ``1 record`` or ``2,000 records``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_size(count: int | None) -> str:
    """Return a number of bytes with a unit, such as ``1.5 MB``; ``?`` if it is unknown."""
    if count is None:
        return "?"
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def _convert_followed(followed: Followed) -> dict[str, Any]:
    """Return the followed windows as JSON; ``records`` is None if counts are not compared."""
    return {"pipeline": followed.pipeline, "first": followed.first, "last": followed.last, "records": followed.records}


def make_widest_report(window: Window, group_id: str = "") -> Report:
    """Return a report of the largest size that the window's report may have, without bad records and gaps, which are not known
    yet. It is used to check, before anything is moved, that the report will fit into a record.
    """
    records = {str(r.topic_partition): r.span for r in window.ranges}
    committed = {str(tp): end for tp, end in window.ends.items()}
    topics = dict(window.source.partitions) if window.source else {}
    if window.target:
        topics[window.target.topic] = window.target.partitions
    partitions = [(topic, partition) for topic, count in topics.items() for partition in range(count)]
    # Numbers that do not compress, as offsets of real reports.
    numbers = [n * 2_654_435_761 % 10**10 for n in range(1, len(partitions) + 1)]
    landed = tuple(Landed(*partition, at, at, at % 10**6) for partition, at in zip(partitions, numbers, strict=True))
    return Report(window, records=records, committed=committed, group_id=group_id, gaps=window.gaps, published=landed)


def describe_window(window: Window) -> str:
    """Return the ranges of a window for a log line."""
    if window.source is None:
        interval = f"[{format_instant(window.interval[0])}, {format_instant(window.interval[1])}): " if window.interval else ""
        return f"{interval}{describe_ranges(window.ranges)} (at most {_count(window.span, 'record')})"
    splits, rows = len(window.source.splits), window.source.rows
    more = "; the source holds more, for the next window" if window.source.remaining else ""
    return f"{splits} split{'s' if splits != 1 else ''} of the source{f', {rows:,} rows' if rows is not None else ''}{more}"


def describe_landed(landed: Sequence[Landed], limit: int = 8) -> str:
    """Return offsets of records for a log line; for more than ``limit`` partitions only their number."""
    if len(landed) > limit:
        return f"in {len(landed)} partitions"
    return ", ".join(f"{p.topic}-{p.partition}[{p.first},{p.last}]: {p.records:,}" for p in landed) or "no records"


def describe_ranges(ranges: Sequence[OffsetRange], limit: int = 8) -> str:
    """Return ranges for a log line; for more than ``limit`` partitions only their number and the sum of offsets."""
    if len(ranges) > limit:
        return f"{len(ranges)} partitions, {sum(r.span for r in ranges):,} offsets"
    return ", ".join(map(str, ranges)) or "no partitions"


def sum_up(
    window: Window,
    results: Sequence[SplitResult],
    applied: Applied | None,
    splits: Mapping[int, OffsetRange],
    *,
    flushed: int = 0,
    upstream: Mapping[int, int] | None = None,
) -> Report:
    """Return the report of a window from the results of its tasks and the record of its sink.

    :param results: one result for each split; empty if the sink had committed the window before this attempt.
    :param applied: the sink's record of the window; None for a window without offsets, which no sink sees.
    :param splits: offsets of each split, by its index.
    :param flushed: time of the sink's commit, in milliseconds since the epoch.
    :param upstream: number of records that were counted upstream, by instant in milliseconds since the epoch.
    :return: the report, without what was sent elsewhere: dead letters, routed and captured records.
    """
    records: dict[str, int] = {}
    for result in results:
        partition = str(splits[result.index].topic_partition)
        records[partition] = records.get(partition, 0) + result.records
    oldest = min((r.min_timestamp for r in results if r.min_timestamp is not None), default=None)
    newest = max((r.max_timestamp for r in results if r.max_timestamp is not None), default=None)
    times = sum_histograms(r.times for r in results)
    written, deleted = (applied.written, applied.deleted) if applied else (0, 0)
    return Report(
        window=window,
        records_read=sum(r.records for r in results) if results else written + deleted,
        records_written=written,
        records_deleted=deleted,
        records_ignored=sum(r.ignored for r in results),
        records_rejected=sum(r.rejected for r in results),
        records_filtered=sum(r.filtered for r in results),
        records_routed=sum(r.routed for r in results),
        bytes=sum(r.bytes for r in results),
        records=records,
        gaps=window.gaps + tuple(g for r in results for g in r.gaps),
        min_timestamp=oldest,
        max_timestamp=newest,
        records_out_of_interval=sum(r.out_of_interval for r in results),
        out_of_interval_seconds=max((r.farthest for r in results), default=0) / 1000,
        **_list_work(results),
        latency=summarize_latency(times, oldest, newest, flushed),
        consumption=summarize_consumption(times, upstream=upstream) if times.counts or (results and upstream) else None,
    )


def _list_work(results: Sequence[SplitResult]) -> dict[str, Any]:
    """Return the fields of a report that hold the times of its tasks."""
    work = {name: sum(r.seconds.get(name, 0.0) for r in results) for name in WORK if any(name in r.seconds for r in results)}
    return {"work": work, "work_began": min((r.began for r in results if r.began), default=0.0)}


def sum_up_applied(window: Window, applied: Applied, dead: DeadLetters | None) -> Report:
    """Return the report of a window that an earlier attempt has committed to the sink, with the facts that are known.

    :param dead: the ledger's record of its bad records.
    """
    rejected = dead.count_rejected(window.replay) if dead else 0
    report = sum_up(window, (), applied, {})
    return replace(
        report,
        records_read=report.records_read + rejected,
        records_rejected=rejected,
        dead_letters=dead.landed if dead else (),
    )


def sum_up_published(window: Window, markers: Sequence[Marker]) -> Report:
    """Return the report of a window of rows from the markers of its splits."""
    count = sum(marker.records for marker in markers)
    results = [marker.result for marker in markers if marker.result]
    rejected, filtered = sum(result.rejected for result in results), sum(result.filtered for result in results)
    routed = sum(result.routed for result in results)
    published = merge_landed(part for marker in markers for part in marker.landed)
    return Report(
        window=window,
        records_read=count + rejected + filtered + routed,
        records_written=count,
        records_rejected=rejected,
        records_filtered=filtered,
        records_routed=routed,
        bytes=sum(marker.bytes for marker in markers),
        records={str(part.topic_partition): part.records for part in published},
        published=published,
        dead_letters=merge_landed(part for marker in markers for part in marker.dead_letters),
        routed=merge_landed(part for marker in markers for part in marker.routed),
        **_list_work(results),
    )


def sum_up_kafka_to_kafka(
    window: Window,
    markers: Sequence[Marker],
    splits: Mapping[int, OffsetRange],
    *,
    flushed: int,
    upstream: Mapping[int, int] | None,
    dead_letters: tuple[Landed, ...],
) -> Report:
    """Return the report of a window from Kafka to Kafka from the markers of its splits: records read as counted by the tasks, and
    records written as counted in the target topics. The parameters are those of :func:`sum_up` and :class:`Report`.
    """
    results = [marker.result for marker in markers if marker.result]
    report = sum_up(window, results, None, splits, flushed=flushed, upstream=upstream)
    published = merge_landed(part for marker in markers for part in marker.landed)
    routed = merge_landed(part for marker in markers for part in marker.routed)
    return replace(
        report,
        records_written=sum(marker.records for marker in markers),
        published=published,
        dead_letters=dead_letters,
        routed=routed,
    )
