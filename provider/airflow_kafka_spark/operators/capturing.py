"""Records that a ``Filter(to=<sink>)`` takes out: the window of another sink beside the operator's own, in the same attempt.

The other sink's rows are a Spark job of their own over the same frozen offsets: the transforms before the filter, and its
opposite. What that job hands to its sink is noted record by record, and left out by all jobs that come after it, the operator's
own last. So a record is in one place, whatever a condition says when it is computed again.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.errors import CountMismatch, Problem, SinkRejected, ValidationError
from airflow_kafka_spark.sinks.base import Guarantee, Shape, Sink, SplitWriter, WindowWriter
from airflow_kafka_spark.transforms.base import Transform
from airflow_kafka_spark.transforms.chaining import as_transform
from airflow_kafka_spark.transforms.routing import Filter
from airflow_kafka_spark.windows.continuity import without_recreated
from airflow_kafka_spark.windows.dead_letters import Captured, DeadLetters
from airflow_kafka_spark.windows.model import TASK_PUT, Applied, BadRecord, Gap, Split, SplitResult, TopicPartition, Window
from airflow_kafka_spark.windows.offset_set import OffsetSet, digest_of

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.road.columns import NullValues
    from airflow_kafka_spark.windows.report import Report

SHOWN = 5

Offsets = Mapping[TopicPartition, Set[int]]
CompactedTopics = Callable[[Set[str]], Set[str]]


@dataclass(frozen=True)
class Capture:
    """A ``Filter(to=<sink>)`` of a chain.

    :param index: where in the chain it is.
    :param filter: the transform.
    :param sink: where what it takes out goes.
    :param name: by which ledger and sink know that part of a window.
    """

    index: int
    filter: Filter
    sink: Sink
    name: str

    @property
    def where(self) -> str:
        """What names it in messages."""
        return f"transforms[{self.index}] {self.filter.name}.to"

    @property
    def null_values(self) -> NullValues:
        """A record without a value that meets the filter is captured like any other: as a delete, or a row of nulls."""
        return "delete" if self.sink.takes_tombstones else "write"

    def pipeline(self, pipeline: str) -> str:
        """The name under which its sink remembers the windows of a pipeline."""
        return f"{pipeline}.to.{self.name}"

    def window(self, window: Window) -> Window:
        """The window as its sink sees it. What was moved while no filter routed there is a gap to it."""
        name = self.pipeline(window.pipeline)
        last, starts = self.sink.last_applied(name), {r.topic_partition: r.start for r in window.ranges}
        # What it has of a topic that was created anew since says nothing of this one.
        before = without_recreated(last, window).ranges if last and last.number < window.number else ()
        ends = {r.topic_partition: r.end for r in before}
        holes = [Gap(*tp, end, starts[tp]) for tp, end in ends.items() if starts.get(tp, 0) > end]
        return replace(window, pipeline=name, gaps=(*window.gaps, *holes))

    def chain(self, before: Sequence[Transform]) -> tuple[Transform, ...]:
        """What makes its rows of records.

        :param before: the transforms before it.
        """
        # A record that goes to a topic is not for this sink: whether it goes there is the operator's own job to say.
        kept = [replace(t, to=None, reason="") if isinstance(t, Filter) and t.routes_to else t for t in before]
        if self.filter.predicate is None:
            return tuple(kept)
        return (*kept, replace(self.filter, to=None, reason="", negate=not self.filter.negate))

    def problems(self, shape: Shape) -> list[Problem]:
        """What keeps its sink from taking windows."""
        return self.told(self.sink.validate(shape))

    def told(self, problems: Sequence[Problem]) -> list[Problem]:
        """The sink's problems, as this one's."""
        found = [
            replace(p, where=self.where + (p.where.removeprefix("sink") if p.where.startswith("sink") else "")) for p in problems
        ]
        return [replace(p, what=f"{self.sink.asset_uri}: {p.what}") for p in found]


def captures_of(transforms: Any) -> tuple[Capture, ...]:
    """Those of an operator's ``transforms``; none where that is no list."""
    if isinstance(transforms, str) or not isinstance(transforms, Sequence):
        return ()
    found: list[Capture] = []
    for index, transform in enumerate(map(as_transform, transforms)):
        if isinstance(transform, Filter) and isinstance(sink := transform.captured_by, Sink):
            name = urllib.parse.unquote(sink.asset_uri.rstrip("/").rpartition("/")[2])
            same = sum(c.name == name or c.name.startswith(f"{name}.") for c in found)
            found.append(Capture(index, transform, sink, f"{name}.{same + 1}" if same else name))
    return tuple(found)


def dropping(transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    """A chain of the same columns that sends nothing to other sinks: what is asked for columns, and for what is wrong with it."""
    return tuple(replace(t, to=None) if isinstance(t, Filter) and t.captured_by else t for t in transforms)


def remaining(transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    """A chain without the filters whose records are left out before it."""
    return tuple(t for t in transforms if not (isinstance(t, Filter) and t.captured_by))


def option_problems(captures: Sequence[Capture], own: Sink, *, unordered: bool) -> list[Problem]:
    """What is wrong with them, without asking anybody.

    :param own: the operator's sink.
    :param unordered: whether windows are taken in any order.
    """
    problems, taken = [], {own.asset_uri: "the operator's own sink"}
    if captures and own.guarantee is not Guarantee.EXACTLY_ONCE:
        found = f"{own.asset_uri} shows a window in pieces ({own.guarantee.value}), before another sink has its part of it"
        problems.append(Problem("sink", found, 'Use `atomic="window"`, or leave `to` out'))
    for capture in captures:
        sink, place = capture.sink, capture.sink.asset_uri
        if place in taken:
            action = "Name another one; or write one filter with both conditions"
            problems.append(Problem(capture.where, f"{place} is {taken[place]}, too", action))
        taken[place] = f"that of {capture.where.removesuffix('.to')}"
        if sink.guarantee is not Guarantee.EXACTLY_ONCE:
            found = f"{place} shows a window in pieces ({sink.guarantee.value}), before it is decided what goes there"
            problems.append(Problem(capture.where, found, 'Use `atomic="window"`'))
        if unordered:
            problems += capture.told(sink.unordered_problems())
    return problems


@dataclass
class Part:
    """What one of them takes of a window.

    :param applied: the sink's own record of it, where it has taken the window already.
    :param taken: the records that are for this sink, those that it refuses among them.
    :param results: of its job.
    :param pipeline: the operator's, of whose window this is a part.
    """

    capture: Capture
    pipeline: str
    window: Window
    splits: tuple[Split, ...]
    shape: Shape
    writer: WindowWriter
    applied: Applied | None
    known: Captured | None
    taken: dict[TopicPartition, OffsetSet] = field(default_factory=dict)
    results: list[SplitResult] = field(default_factory=list)
    decided: Captured | None = None

    @property
    def uri(self) -> str:
        return self.capture.sink.uri

    @property
    def count(self) -> int:
        return sum(map(len, self.taken.values()))

    def note(self, results: list[SplitResult]) -> None:
        """Its job is over.

        :raises CountMismatch: a row was handed over that was not noted.
        """
        from airflow_kafka_spark.sinks.capture_worker import REFUSED, TAKEN

        places = {split.index: split.range.topic_partition for split in self.splits}
        for result in results:
            here = self.taken.setdefault(places[result.index], OffsetSet())
            written = OffsetSet.from_text(result.token[TAKEN])
            if len(written) != result.handed_over:
                raise CountMismatch(str(self.window), result.handed_over, len(written))
            here.add(written)
            here.add(OffsetSet.from_text(result.token[REFUSED]))
        self.results = results

    def refused(self, hook: KafkaHook | None, compacted: CompactedTopics, *, tolerated: bool) -> SplitResult:
        """The account of what the sink refuses, and nothing else; after this it is decided what the sink takes.

        :param hook: as for :func:`~airflow_kafka_spark.road.refused.with_refused`.
        :param compacted: tells which topics are compacted.
        :raises SinkRejected: it refuses some, which is not tolerated.
        """
        from airflow_kafka_spark.road.refused import with_refused

        found = self.writer.refused(self.results) if self.applied is None else ()
        refuse(found, self.uri, str(self.window), tolerated=tolerated)
        self.results = with_refused(self.results, found, self.splits, hook)
        letters, where = _put_letters(self.results)
        left = {tp: OffsetSet() for tp in self.taken}
        for tp, offsets in self.taken.items():
            left[tp].add(offsets)
            # A letter is remembered one by one: the next attempt does not come across its record.
            left[tp].discard(where.get(tp, ()))
        records, digest = sum(r.handed_over for r in self.results), digest_of(left)
        if self.applied is not None:
            records = self._compared(records, digest, compacted)
        self.decided = Captured(self.window.replay, self.capture.name, self.uri, records, digest)
        samples = tuple(bad for result in self.results for bad in result.samples if bad.stage == TASK_PUT)
        return SplitResult(0, rejected=self.count - records, samples=samples, letters=letters)

    def _compared(self, records: int, digest: str, compacted: CompactedTopics) -> int:
        """How many records the sink has taken: the same ones as are for it now.

        :raises ValidationError: others.
        """
        known, applied = self.known, self.applied
        assert applied is not None
        there = known.records if known else applied.written + applied.deleted
        # Without the ledger's memory, as when that was lost, their number has to do.
        is_other = digest != known.digest if known else records != there
        if is_other:
            found = (
                f"an earlier attempt at window {self.window} has brought {there:,} records to {self.uri}, and by the transforms "
            )
            found += f"as they are now {records:,} are for it, not the same ones"
            action = "Set the transforms and formats back until this window is complete"
            if records < there and (topics := compacted({r.topic for r in self.window.ranges})):
                names = ", ".join(sorted(topics))
                action += f". If they are what they were, compaction of {names} has removed records since, and which ones of the "
                action += f"others are there is not known. {self._giving_up}"
            raise ValidationError([Problem(self.capture.where, found, action)])
        return there

    @property
    def _giving_up(self) -> str:
        """What to do about a window that no attempt can finish."""
        if self.window.interval:
            return "No other interval waits for this one"
        command = f"python -m airflow_kafka_spark skip {self.pipeline} --not-running --why ..."
        return f"To leave there what is there, and give up the rest of the window: `{command}`"

    def commit(self) -> None:
        """:raises WindowConflict: the sink's last window is not the one that this one follows."""
        if self.applied is None:
            self.applied = self.writer.commit(self.results)


@dataclass
class Capturing:
    """All that is captured of one window, in one attempt.

    Guarantee: each record that a job of this attempt has handed to a sink is in :attr:`left_out` of the jobs behind it.

    :param opened: closes the sinks' writers.
    :param known: what earlier attempts have decided.
    :param left_out: records that are somewhere else already.
    :param compacted: tells which topics are compacted.
    """

    opened: ExitStack
    known: DeadLetters | None
    left_out: Offsets
    compacted: CompactedTopics
    parts: list[Part] = field(default_factory=list)
    _before: int = field(init=False)

    def __post_init__(self) -> None:
        self._before = sum(map(len, self.left_out.values()))

    def begin(self, capture: Capture, window: Window, splits: tuple[Split, ...], shape: Shape) -> None:
        """Shut out earlier attempts at a sink's part of a window."""
        known = {found.name: found for found in self.known.captures(window.replay)} if self.known else {}
        pipeline, window = window.pipeline, capture.window(window)
        writer = self.opened.enter_context(capture.sink.begin(window, splits, shape))
        # Not before: from here on none of those can commit any more.
        applied = capture.sink.applied(window)
        self.parts.append(Part(capture, pipeline, window, splits, shape, writer, applied, known.get(capture.name)))

    def run(self, move: Callable[[Part, SplitWriter, Offsets], list[SplitResult]]) -> None:
        """Run their jobs, one after the other.

        :param move: runs one, and checks what it tells.
        """
        from airflow_kafka_spark.sinks.capture_worker import CapturingWriter

        for part in self.parts:
            writer = CapturingWriter(part.writer.split_writer() if part.applied is None else None)
            part.note(move(part, writer, self.left_out))
            self._leave_out(part.taken)

    def _leave_out(self, taken: Mapping[TopicPartition, OffsetSet]) -> None:
        found: dict[TopicPartition, Set[int]] = dict(self.left_out)
        for tp, offsets in taken.items():
            both = OffsetSet()
            both.add(found.get(tp, ()))
            both.add(offsets)
            found[tp] = both
        self.left_out = found

    @property
    def count(self) -> int:
        """Records that are for other sinks."""
        return sum(part.count for part in self.parts)

    @property
    def decided(self) -> tuple[Captured, ...]:
        """What they take, once :meth:`refused` has said what they do not."""
        return tuple(part.decided for part in self.parts if part.decided is not None)

    def check(self, window: Window, results: Sequence[SplitResult]) -> None:
        """The operator's own job has left out what went elsewhere, and nothing else.

        :param results: its own.
        :raises CountMismatch: it has not.
        """
        if not self.parts:
            return
        from airflow_kafka_spark.sinks.dead_letters_worker import ROUTED, from_bytes

        new = from_bytes((result.routes for result in results), ROUTED).num_rows
        left_out = sum(result.routed for result in results) - new
        # Of what earlier attempts have sent to topics, some may have been deleted since.
        if not self.count <= left_out <= self.count + self._before:
            raise CountMismatch(str(window), self.count, left_out)

    def refused(self, hook: KafkaHook | None, *, tolerated: bool) -> list[SplitResult]:
        """What their sinks refuse: one account for each."""
        return [part.refused(hook, self.compacted, tolerated=tolerated) for part in self.parts]

    def commit(self) -> None:
        """Make their parts of the window visible, each in one step."""
        for part in self.parts:
            part.commit()


def refuse(found: Sequence[BadRecord], sink: str, window: str, *, tolerated: bool) -> None:
    """:raises SinkRejected: a sink refuses some records, which is not tolerated."""
    if found and not tolerated:
        raise SinkRejected(sink, window, f"it does not take {len(found):,} of the rows", samples=found[:SHOWN])


def refuse_lost(captures: Sequence[Capture], known: DeadLetters | None, window: Window) -> None:
    """An earlier attempt may have brought records to sinks that are not among these any more.

    :raises ValidationError: it was to do so.
    """
    names = {capture.name for capture in captures}
    gone = [found for found in known.captures(window.replay) if found.name not in names] if known else []
    if gone:
        listed = ", ".join(found.sink for found in gone)
        what = f"an earlier attempt at window {window} was about to bring records to {listed} by a Filter with `to`, or has"
        raise ValidationError([Problem("transforms", what, "Keep such a Filter until this window is complete")])


def with_routed(report: Report, count: int, **facts: Any) -> Report:
    """A report of what the sink had taken before, and what went elsewhere."""
    return replace(report, records_read=report.records_read + count, records_routed=report.records_routed + count, **facts)


def _put_letters(results: Sequence[SplitResult]) -> tuple[bytes, dict[TopicPartition, list[int]]]:
    """The dead letters that a sink has refused, and which records those were; others are the operator's own job's to tell."""
    if not any(result.letters for result in results):
        return b"", {}
    import pyarrow.compute as pc

    from airflow_kafka_spark.sinks.dead_letters_worker import from_bytes, to_bytes

    letters = from_bytes(result.letters for result in results)
    letters = letters.filter(pc.equal(letters["stage"], TASK_PUT))
    where: dict[TopicPartition, list[int]] = {}
    for topic, partition, offset in zip(*(letters[name].to_pylist() for name in ("topic", "partition", "offset")), strict=True):
        where.setdefault(TopicPartition(topic, partition), []).append(offset)
    return (to_bytes(letters) if letters.num_rows else b""), where
