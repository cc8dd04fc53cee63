"""The basic values: topic partitions, offset ranges, windows, splits and their results.

A *window* is a frozen set of half-open offset ranges ``[start, end)``, one per topic partition. It is planned once: every retry,
cleared task and zombie process works on equal ranges. This module imports neither Kafka nor Spark nor Airflow.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

from airflow_kafka_spark.windows.binding import Binding
from airflow_kafka_spark.windows.times import TimestampHistogram

ArrowStream: TypeAlias = bytes

TOPIC_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,249}")
"""Pattern of the topic names that Kafka accepts."""


class TopicPartition(NamedTuple):
    """One partition of one topic."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


@dataclass(frozen=True, order=True, slots=True)
class OffsetRange:
    """A half-open range of offsets of one partition: ``start`` is read, ``end`` is not.

    Offsets are positions in the log, not counts: compaction, transaction markers and aborted records leave gaps, so a range
    may hold fewer records than ``end - start``, even none.

    :param topic: the topic's name.
    :param partition: the partition's number, from 0.
    :param start: the first offset of the range.
    :param end: the first offset after the range, which a consumer group commits once the range is done.
    :raises ValueError: ``start`` is negative, or greater than ``end``.
    """

    topic: str
    partition: int
    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ValueError(
                f"Not an offset range: [{self.start}, {self.end}) of {self.topic}-{self.partition}. Expected 0 <= start <= end."
            )

    @property
    def topic_partition(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)

    @property
    def span(self) -> int:
        """Number of offsets in the range: an upper bound of its records."""
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}[{self.start},{self.end})"


def has_shared_offsets(one: Iterable[OffsetRange], other: Iterable[OffsetRange]) -> bool:
    """Return True if some ranges of both overlap. Topics are compared by name."""
    known: dict[TopicPartition, list[OffsetRange]] = {}
    for r in one:
        known.setdefault(r.topic_partition, []).append(r)
    return any(max(r.start, k.start) < min(r.end, k.end) for r in other for k in known.get(r.topic_partition, ()))


@dataclass(frozen=True)
class Gap:
    """Offsets that a window skipped because retention had deleted them (data loss policy ``skip``)."""

    topic: str
    partition: int
    start: int
    end: int


class State(str, Enum):
    """The state of a window. PLANNED is written before any work; COMPLETE together with the group's offsets, after the sink has
    committed.
    """

    PLANNED = "PLANNED"
    COMPLETE = "COMPLETE"


GIVEN_UP = "given_up"
"""Key in the position of a source after a window that was given up. It holds the ``splits`` of that window, and the note on each
of them (``tokens``)."""
PUBLISHED_IN_PART = "published_in_part"
"""Key in the position of a source if the ledger has lost all records of the next window: any part of it may be published."""
IF_GIVEN_UP = "if_given_up"
"""Key in the description of a split: the note to keep if its window is given up before the split is published."""


@dataclass(frozen=True)
class RowsAhead:
    """Rows of a source whose timestamps are far ahead of its clock. No window takes them before that time.

    :param rows: their number.
    :param largest: the largest timestamp, as the source writes it.
    """

    rows: int
    largest: str


@dataclass(frozen=True)
class SourcePlan:
    """The part of a source of rows that a window takes, frozen with the window (source -> Kafka).

    :param splits: description of each split, in a form that the source defines (JSON).
    :param position: position of the source after the window (JSON).
    :param rows: number of rows; None if they were not counted.
    :param remaining: True if the source held more rows than this window takes.
    :param partitions: number of partitions of each target topic, from which the partition of a key follows.
    :param ahead: the rows that wait because of their timestamps; None without any.
    """

    splits: tuple[Mapping[str, Any], ...]
    position: Mapping[str, Any] = field(default_factory=dict)
    rows: int | None = None
    remaining: bool = False
    partitions: Mapping[str, int] = field(default_factory=dict)
    ahead: RowsAhead | None = None


@dataclass(frozen=True)
class TargetTopic:
    """The topic that a window is published to, as it was when the window was planned.

    :param topic: its name.
    :param topic_id: its id; "" from brokers without ids.
    :param partitions: number of its partitions, from which the partition of a key follows.
    """

    topic: str
    topic_id: str
    partitions: int


@dataclass(frozen=True)
class Followed:
    """The windows of another pipeline that a window reads.

    :param pipeline: the pipeline that published them.
    :param first: number of the first one.
    :param last: number of the last one; below ``first`` if there was no new window.
    :param records: number of records that they published to the topics that are read; None if unknown, because the window does
        not begin where a window of that pipeline does. An unknown number is not compared.
    :param totals: for each topic that is read, the number of all records that that pipeline has published up to ``last``.
    """

    pipeline: str
    first: int
    last: int
    records: int | None
    totals: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class FollowedWindow:
    """The window up to which another pipeline was followed.

    :param number: number of the last window that was read.
    :param totals: as in :class:`Followed`; empty if unknown.
    """

    number: int
    totals: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Published:
    """The total of what a pipeline has published to one partition, by windows that are complete or were given up.

    :param end: the offset after the last record.
    :param records: number of all records. Followers compare differences of this number, so that windows which the ledger no
        longer holds count as well.
    """

    end: int
    records: int


ELSEWHERE = -1
"""Value of :attr:`Window.after` if the sink's record may end before the window, because other offsets went elsewhere."""


@dataclass(frozen=True)
class Window:
    """The frozen work of one run. It is written to the ledger as PLANNED before any work, and never planned again.

    :param pipeline: the pipeline's name.
    :param number: number of the window within its pipeline, from 1, without holes, in the order in which windows apply.
    :param ranges: one half-open range per topic partition, ordered. Empty ranges are kept, since they show the position.
    :param run: the run that planned it, ``<dag_id>/<run_id>/<task_id>``; another run may finish it.
    :param planned_at: UTC instant, ISO 8601.
    :param cluster_id: id of the Kafka cluster that the offsets refer to.
    :param topic_ids: id of each topic, so that a recreated topic is recognised.
    :param gaps: offsets that retention deleted before they could be read, and that the data loss policy skipped.
    :param held_back: number of offsets between the last stable offset and the high watermark when the end was frozen. They belong
        to open transactions.
    :param source: the splits of a source of rows; None for a window that is read from Kafka.
    :param follows: the windows of another pipeline that it reads; None if it follows no pipeline.
    :param target: the topic that a window read from Kafka is published to; None for every other sink.
    :param interval: start and end of the data interval whose records it moves, in milliseconds since the epoch; None without one.
    :param replay: number of the replay, whose rows replace those of the previous one; 0 for the first move of the window.
    :param moved: number of the manual change that set the position at which the window begins; 0 if it begins at the end of the
        previous window.
    :param after: number of an earlier window that was committed to this destination, so that the sink has to have a record of it
        or of a later one; :data:`ELSEWHERE` if the offsets before this window were moved under another name or to another
        destination; 0 if none of this is known.
    :param passed: offsets that windows without records have skipped since the last window with records. Such windows reach no
        sink, so that its record ends before these offsets.
    :param binding: the task that planned it, its destination and its origin; None if unknown.
    :param epochs: leader epoch of each partition when its end was frozen. The log below the end was that leader's. A missing
        partition is unknown.
    :param began: for the first window of a pipeline: the offsets at which it begins, without those that are 0.
    :param lost_topic_ids: ids of topics that were deleted with records of this window, if a ``rebind`` was made since: dead
        letter topics, and topics that filters, transforms or rows name. A window that goes to a sink sends them again.
    """

    pipeline: str
    number: int
    ranges: tuple[OffsetRange, ...]
    run: str
    planned_at: str
    cluster_id: str = ""
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    gaps: tuple[Gap, ...] = ()
    held_back: int = 0
    source: SourcePlan | None = None
    follows: Followed | None = None
    target: TargetTopic | None = None
    interval: tuple[int, int] | None = None
    replay: int = 0
    moved: int = 0
    after: int = 0
    passed: tuple[Gap, ...] = ()
    binding: Binding | None = None
    epochs: Mapping[TopicPartition, int] = field(default_factory=dict)
    lost_topic_ids: tuple[str, ...] = ()
    began: Mapping[TopicPartition, int] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """The window's number as text that sorts as the numbers do."""
        return f"{self.number:010d}"

    @property
    def is_empty(self) -> bool:
        """True if the window has no offsets and no rows to read."""
        return all(r.span == 0 for r in self.ranges) and not (self.source and self.source.splits)

    @property
    def publishes(self) -> bool:
        """True if its records go to Kafka."""
        return self.source is not None or self.target is not None

    @property
    def span(self) -> int:
        """Number of offsets in all ranges: an upper bound of the records."""
        return sum(r.span for r in self.ranges)

    @property
    def ends(self) -> dict[TopicPartition, int]:
        """The offsets that the consumer group commits once the window is complete: the frozen ``end`` of each partition."""
        return {r.topic_partition: r.end for r in self.ranges}

    def __str__(self) -> str:
        """Return the name of the window, equal for all of its replays. Rows carry it as their origin."""
        return f"{self.pipeline}#{self.number}"


@dataclass(frozen=True)
class Split:
    """The share of one Spark task in a window: a part of one partition's range, read in offset order.

    :param index: index among the window's splits, from 0; equal at every attempt.
    :param range: the offsets to read.
    :param epoch: leader epoch of the partition when the window's end was frozen; -1 if unknown. A record of the range with a
        later epoch was written after the log had been truncated.
    :param interval: the window's data interval, in milliseconds since the epoch; None without one.
    """

    index: int
    range: OffsetRange
    epoch: int = -1
    interval: tuple[int, int] | None = None


_PACKED = struct.Struct("<iiiqqi")


@dataclass(frozen=True)
class PackedSplits:
    """The splits of a window in the form in which they are pickled for the tasks of a Spark job.

    Every task unpickles all splits and works on one. So they are stored as bytes (32 for each split), and only that one becomes
    an object.

    :param topics: names of the topics.
    :param packed: for each split its index, the index of its topic in ``topics``, the partition, start, end and epoch.
    :param interval: the window's data interval; None without one.
    """

    topics: tuple[str, ...]
    packed: bytes = field(repr=False)
    interval: tuple[int, int] | None = None

    @classmethod
    def of(cls, splits: Iterable[Split]) -> PackedSplits:
        topics: dict[str, int] = {}
        packed, interval = bytearray(), None
        for split in splits:
            r, interval = split.range, split.interval
            topic = topics.setdefault(r.topic, len(topics))
            packed += _PACKED.pack(split.index, topic, r.partition, r.start, r.end, split.epoch)
        return cls(tuple(topics), bytes(packed), interval)

    def __len__(self) -> int:
        return len(self.packed) // _PACKED.size

    def __getitem__(self, at: int) -> Split:
        """Return the split at a position of the sequence.

        :raises IndexError: there are not so many splits.
        """
        if not 0 <= at < len(self):
            raise IndexError(at)
        index, topic, partition, start, end, epoch = _PACKED.unpack_from(self.packed, at * _PACKED.size)
        return Split(index, OffsetRange(self.topics[topic], partition, start, end), epoch, self.interval)

    def __iter__(self) -> Iterator[Split]:
        return map(self.__getitem__, range(len(self)))


@dataclass(frozen=True)
class Landed:
    """The range of offsets of one transaction's records in one partition, from ``first`` to ``last``, both included."""

    topic: str
    partition: int
    first: int
    last: int
    records: int

    @property
    def topic_partition(self) -> TopicPartition:
        return TopicPartition(self.topic, self.partition)


def merge_landed(parts: Iterable[Landed]) -> tuple[Landed, ...]:
    """Return the ranges merged into one for each partition."""
    by_place: dict[TopicPartition, list[Landed]] = {}
    for part in parts:
        by_place.setdefault(part.topic_partition, []).append(part)
    return tuple(
        Landed(*tp, min(p.first for p in found), max(p.last for p in found), sum(p.records for p in found))
        for tp, found in sorted(by_place.items())
    )


def add_landed(known: Mapping[TopicPartition, Published], parts: Iterable[Landed]) -> dict[TopicPartition, Published]:
    """Return the totals of a pipeline after its next window has published these records."""
    found = dict(known)
    for part in merge_landed(parts):
        before = found.get(part.topic_partition)
        found[part.topic_partition] = Published(part.last + 1, part.records + (before.records if before else 0))
    return found


@dataclass(frozen=True)
class Marker:
    """The ledger's record of a published split. It is written last in the split's own transaction, so that it exists only if the
    records do.

    :param window: the window's number.
    :param split: the split's index.
    :param landed: offsets of its records, ordered by topic and partition; empty for a split without rows.
    :param bytes: size of its keys and values.
    :param result: counts and times of the task; None in markers of earlier releases.
    :param dead_letters: offsets of the records that were sent to a dead letter topic.
    :param routed: offsets of the records that a transform sent to another topic.
    :param topic_ids: ids of the topics that it was sent to, apart from the window's target, whose id the plan has. Topics without
        a known id are missing.
    """

    window: int
    split: int
    landed: tuple[Landed, ...] = ()
    bytes: int = 0
    result: SplitResult | None = None
    dead_letters: tuple[Landed, ...] = ()
    routed: tuple[Landed, ...] = ()
    topic_ids: Mapping[str, str] = field(default_factory=dict)

    @property
    def records(self) -> int:
        """The number of records that were published to the window's target."""
        return sum(part.records for part in self.landed)


VALUE_CONVERTER, KEY_CONVERTER, TRANSFORMATION = "VALUE_CONVERTER", "KEY_CONVERTER", "TRANSFORMATION"
"""Names of the stages at which a record may turn out to be bad, as in Kafka Connect."""
TASK_PUT = "TASK_PUT"
"""Name of the stage of a record that the sink refuses."""
OUTPUT = "/output"
"""Suffix of a converter's stage for a record between two topics that could be read, but does not fit the output format."""
SAMPLES = 10
"""Maximum number of bad records that a report shows."""


@dataclass(frozen=True)
class BadRecord:
    """A record that could not be decoded or transformed, or that the sink refused.

    :param topic: topic of the record; empty for a row of a source that does not fit its format. ``partition`` is then the index
        of its split, and ``offset`` the number of the row in that split, from 1.
    :param stage: the stage at which it failed.
    """

    topic: str
    partition: int
    offset: int
    reason: str
    stage: str = VALUE_CONVERTER

    def __str__(self) -> str:
        place = f"{self.topic}-{self.partition}@{self.offset}" if self.topic else f"row {self.offset} of split {self.partition}"
        return f"{place}: {self.reason}"


@dataclass(frozen=True)
class SplitResult:
    """The result of a task that has read a split and handed it to the sink.

    :param index: index of the split.
    :param records: number of records that were read, tombstones and bad ones included.
    :param bytes: size of their values, and of their keys if those are read.
    :param ignored: number of tombstones that were ignored, as the user has configured.
    :param rejected: number of bad records; ``samples`` holds the first few of them.
    :param filtered: number of records that a transform left out.
    :param gaps: offsets that were found deleted while reading (data loss policy ``skip``).
    :param min_timestamp: smallest record timestamp, milliseconds since the epoch; None without records.
    :param max_timestamp: largest record timestamp.
    :param times: number of records by time.
    :param token: facts that the sink's writer passes to the sink (a file, a stage); JSON.
    :param letters: the bad records that are to be sent as dead letters, as an Arrow stream.
    :param routed: number of records that go to another topic instead of the sink.
    :param routes: those of them that were not sent yet, as an Arrow stream.
    :param interval: the data interval in which its records are expected, in milliseconds since the epoch; None without one.
    :param out_of_interval: number of records whose timestamps lie outside of the interval.
    :param farthest: the largest distance of such a timestamp from the interval, in milliseconds.
    :param began: time at which the task began, seconds since the epoch; 0 if unknown.
    :param seconds: seconds that the task took for reading (``read``), for decoding and transforming (``decode``), for writing
        (``write``), and for waiting for Spark (``wait``), as far as they are known.
    """

    index: int
    records: int = 0
    bytes: int = 0
    ignored: int = 0
    rejected: int = 0
    samples: tuple[BadRecord, ...] = ()
    gaps: tuple[Gap, ...] = ()
    min_timestamp: int | None = None
    max_timestamp: int | None = None
    times: TimestampHistogram = TimestampHistogram()
    token: Mapping[str, Any] = field(default_factory=dict)
    filtered: int = 0
    letters: ArrowStream = field(default=b"", repr=False)
    routed: int = 0
    routes: ArrowStream = field(default=b"", repr=False)
    interval: tuple[int, int] | None = None
    out_of_interval: int = 0
    farthest: int = 0
    began: float = field(default=0.0, compare=False)
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def handed_over(self) -> int:
        """Number of records that were handed to the sink."""
        return self.records - self.ignored - self.rejected - self.filtered - self.routed


def select_first_bad_records(results: Iterable[SplitResult], most: int) -> list[BadRecord]:
    """Return the first bad records, in the order of topic, partition and offset.

    :param most: maximum number of records.
    """
    return sorted((s for r in results for s in r.samples), key=lambda s: (s.topic, s.partition, s.offset))[:most]


@dataclass(frozen=True)
class Applied:
    """A sink's own record of a window that it has committed.

    :param pipeline: the pipeline's name.
    :param number: the window's number.
    :param ranges: the window's ranges.
    :param written: number of rows written (inserted or updated).
    :param deleted: number of rows deleted by tombstones.
    :param replay: number of the replay; 0 for the first move of the window.
    :param cluster_id: id of the Kafka cluster that the offsets refer to; "" if unknown.
    :param topic_ids: id of each topic; unknown if missing or "". Offsets can be compared only if the ids of cluster and topic are
        equal (:func:`~airflow_kafka_spark.windows.continuity.refuse_foreign`).
    :param elsewhere: the other target that has the rows, if several targets have one record of windows; "" (default): this one.
    """

    pipeline: str
    number: int
    ranges: tuple[OffsetRange, ...]
    written: int = 0
    deleted: int = 0
    replay: int = 0
    cluster_id: str = ""
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    elsewhere: str = ""

    @classmethod
    def of(cls, window: Window, written: int, deleted: int = 0) -> Applied:
        """Return the record of a window whose rows the sink has.

        :param window: the window.
        :param written: number of rows written.
        :param deleted: number of rows deleted; default 0.
        """
        ids = (window.cluster_id, window.topic_ids)
        return cls(window.pipeline, window.number, window.ranges, written, deleted, window.replay, *ids)


# --- the task of a run --------------------------------------------------------------------------------------------------


class TaskInstanceKey(NamedTuple):
    """Identity of a task instance, as the run of a window names it.

    :param dag_id: the DAG.
    :param run_id: the DAG run.
    :param task_id: the task.
    :param map_index: index of a mapped task, -1 without mapping.
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1

    @classmethod
    def parse(cls, run: str) -> TaskInstanceKey | None:
        """Return the task instance that a run names; None if no task planned the window.

        :param run: ``<dag_id>/<run_id>/<task_id>[/<map_index>]``. The run id may contain slashes, the other ids may not.
        """
        dag_id, _, rest = run.partition("/")
        run_id, _, task_id = rest.rpartition("/")
        map_index = -1
        if task_id.isdecimal() and "/" in run_id:
            map_index = int(task_id)
            run_id, _, task_id = run_id.rpartition("/")
        return cls(dag_id, run_id, task_id, map_index) if dag_id and run_id and task_id else None

    @property
    def run(self) -> str:
        """``<dag_id>/<run_id>/<task_id>``, with ``/<map_index>`` behind it for a mapped task."""
        mapped = f"/{self.map_index}" if self.map_index >= 0 else ""
        return f"{self.dag_id}/{self.run_id}/{self.task_id}{mapped}"

    @property
    def url(self) -> str:
        """The address of its page in Airflow, relative to the base URL."""
        dag, run, task = (quote(part, safe="") for part in self[:3])
        mapped = f"/mapped/{self.map_index}" if self.map_index >= 0 else ""
        return f"dags/{dag}/runs/{run}/tasks/{task}{mapped}"


# --- tries of a task ----------------------------------------------------------------------------------------------------

MAX_RUNS = 8
"""Maximum number of runs of one window whose counters are kept."""


@dataclass(frozen=True)
class Tries:
    """Airflow's counters of a task instance, as they were during one of its tries.

    :param number: number of the try (``try_number``), from 1; 0 if unknown.
    :param allowed: number of the last try that is followed by a retry if it fails (``max_tries``). A retry leaves it unchanged;
        clearing the task sets it to the number of the last try plus the task's ``retries``.
    :param clears: number of times that tasks of the DAG run were cleared (``clear_number``); -1 if unknown.
    """

    number: int = 0
    allowed: int = 0
    clears: int = -1

    def was_cleared_since(self, known: Tries, retries: int) -> bool:
        """Return True if the task was cleared after an earlier try of it.

        A changed ``max_tries`` means that it was. An unchanged one means a retry, with one exception: ``retries`` was lowered
        before the clear, by as much as the clear added. Then the DAG run has counted a clear, and the tries that are allowed now
        began after the earlier try. A task that is cleared while it runs keeps its ``max_tries``: that counts as a retry.

        :param known: the earlier try.
        :param retries: the present ``retries`` of the task.
        """
        if self.allowed != known.allowed:
            return True
        run_was_cleared = self.clears > known.clears or -1 in (self.clears, known.clears)
        return run_was_cleared and 0 < known.number <= self.allowed - retries < self.number

    def to_json(self) -> list[int]:
        """Return the counters as JSON."""
        return [self.number, self.allowed, self.clears]


def record_tries(known: Mapping[str, Tries], run: str, tries: Tries, *, keep: str) -> dict[str, Tries]:
    """Return the counters of the last :data:`MAX_RUNS` runs that have worked on a window, the newest last.

    :param known: the counters from earlier attempts.
    :param run: the run that works on the window now.
    :param tries: Airflow's counters of that run's task.
    :param keep: the run that planned the window, whose counters are always kept.
    """
    others = {name: seen for name, seen in known.items() if name != run}
    newest = list(others)[1 - MAX_RUNS :]
    return {**{name: seen for name, seen in others.items() if name == keep or name in newest}, run: tries}


def tries_to_json(tries: Mapping[str, Tries]) -> dict[str, list[int]]:
    """Return the counters by run, as JSON."""
    return {run: seen.to_json() for run, seen in tries.items()}


def tries_from_json(value: Mapping[str, list[int]]) -> dict[str, Tries]:
    return {run: Tries(*counters) for run, counters in value.items()}
