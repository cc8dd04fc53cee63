"""Sinks that a ``Filter(to=<sink>)`` routes records to. Each takes its part of the operator's window in the same attempt.

One Spark job writes to all sinks. The filter writes a row to a column of its sink, and later transforms ignore the record. A
condition is therefore computed once, and a record goes to one sink. The offsets of all records of a sink are collected; the
ledger keeps their count and digest for retries.
"""

from __future__ import annotations

import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from airflow_kafka_spark.arguments import replace_wrong_types
from airflow_kafka_spark.errors import (
    CountMismatch,
    KafkaSparkError,
    Problem,
    SinkRecordMissing,
    SinkRejected,
    Unchecked,
    ValidationError,
)
from airflow_kafka_spark.errors.base import format_command
from airflow_kafka_spark.sinks.base import Guarantee, Shape, Sink, WindowWriter
from airflow_kafka_spark.transforms.base import Transform
from airflow_kafka_spark.transforms.chain import as_transform
from airflow_kafka_spark.transforms.routing import Filter
from airflow_kafka_spark.windows.binding import Endpoint, is_same_place
from airflow_kafka_spark.windows.continuity import drop_recreated_topics
from airflow_kafka_spark.windows.dead_letters import Captured, DeadLetters, OffsetSet, compute_digest
from airflow_kafka_spark.windows.interval import ROUTED
from airflow_kafka_spark.windows.model import (
    ELSEWHERE,
    TASK_PUT,
    Applied,
    BadRecord,
    Gap,
    Split,
    SplitResult,
    TopicPartition,
    Window,
)

if TYPE_CHECKING:
    from airflow_kafka_spark.formats.base import NullValues
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.jobs.tasks.write import OtherSink
    from airflow_kafka_spark.windows.report import Report

SHOWN = 5
"""Maximum number of refused records that an error names."""

RoutedOffsets = Mapping[TopicPartition, Set[int]]
"""The offsets of records that were sent elsewhere, by partition."""
CompactedTopics = Callable[[Set[str]], Set[str]]
"""Returns the compacted ones of some topics."""


@dataclass(frozen=True)
class RoutedSink:
    """A ``Filter(to=<sink>)`` of an operator's transforms.

    :param index: the filter's index among the transforms.
    :param filter: the filter.
    :param sink: the sink of the records that the filter takes out.
    :param name: name of the sink's part of a window, in the ledger and in the sink.
    :param type_problems: the problems of its arguments that had wrong types, and have sound values in ``sink``; default none.
    """

    index: int
    filter: Filter
    sink: Sink
    name: str
    type_problems: tuple[Problem, ...] = ()

    @property
    def where(self) -> str:
        """The filter's argument, for messages."""
        return f"transforms[{self.index}] {self.filter.name}.to"

    @property
    def null_values(self) -> NullValues:
        """The treatment of a record without a value: a delete, or a row of nulls."""
        return "delete" if self.sink.takes_tombstones else "write"

    def make_pipeline_name(self, pipeline: str) -> str:
        """Return the name under which the sink records the windows of a pipeline."""
        return f"{pipeline}{ROUTED}{self.name}"

    def make_window(self, window: Window) -> Window:
        """Return the sink's window. Offsets that were moved while no filter routed to the sink are gaps in it.

        If the window before went to the same sinks, this sink has to have a record of it.
        """
        name = self.make_pipeline_name(window.pipeline)
        if window.after > 0:
            return replace(window, pipeline=name)
        last, starts = self.sink.find_last_applied(name), {r.topic_partition: r.start for r in window.ranges}
        # Offsets of a topic that was recreated since cannot be compared with those of the new topic.
        before = drop_recreated_topics(last, window).ranges if last and last.number < window.number else ()
        ends = {r.topic_partition: r.end for r in before}
        holes = [Gap(*tp, end, starts[tp]) for tp, end in ends.items() if starts.get(tp, 0) > end]
        # The filter may be newer than the windows before.
        return replace(window, pipeline=name, gaps=(*window.gaps, *holes))

    def make_chain(self, before: Sequence[Transform]) -> tuple[Transform, ...]:
        """Return the transforms that make the sink's rows of records.

        :param before: the transforms before the filter.
        """
        # A record that goes to a topic is not for this sink; the operator's own job sends it there.
        kept = [replace(t, to=None, reason="") if isinstance(t, Filter) and t.routes_to else t for t in before]
        if self.filter.predicate is None:
            return tuple(kept)
        return (*kept, replace(self.filter, to=None, reason="", negate=not self.filter.negate))

    def find_problems(self, shape: Shape | None) -> list[Problem]:
        """Return the problems that prevent the sink from writing windows.

        :param shape: the rows of the sink; None if they are not known.
        """
        return self.add_place(self.sink.find_target_problems() if shape is None else self.sink.validate(shape))

    def add_place(self, problems: Sequence[Problem]) -> list[Problem]:
        """Return problems of the sink, prefixed with the filter's argument and the sink's place."""
        return [
            replace(p, where=self._format_argument(p.where), what=self._format_argument(p.what))
            if isinstance(p, Unchecked)
            else replace(p, where=self._format_argument(p.where), what=f"{self.sink.asset_uri}: {p.what}")
            for p in problems
        ]

    def _format_argument(self, where: str) -> str:
        """Return the filter's name of an argument of the sink."""
        return self.where + (where.removeprefix("sink") if where.startswith("sink") else "")


def list_routed_sinks(transforms: object) -> tuple[RoutedSink, ...]:
    """Return the routed sinks of an operator's ``transforms``; none if they are not a sequence."""
    if isinstance(transforms, str) or not isinstance(transforms, Sequence):
        return ()
    found: list[RoutedSink] = []
    for index, transform in enumerate(map(as_transform, transforms)):
        if isinstance(transform, Filter) and isinstance(transform.captured_by, Sink):
            sink, wrong = replace_wrong_types(transform.captured_by, f"transforms[{index}] {transform.name}.to.")
            name = urllib.parse.unquote(sink.asset_uri.rstrip("/").rpartition("/")[2])
            same = sum(c.name == name or c.name.startswith(f"{name}.") for c in found)
            found.append(RoutedSink(index, transform, sink, f"{name}.{same + 1}" if same else name, tuple(wrong)))
    return tuple(found)


def remove_routed_sinks(transforms: Sequence[Transform]) -> tuple[Transform, ...]:
    """Return the transforms with filters that only remove records, to find columns and problems."""
    return tuple(replace(t, to=None) if isinstance(t, Filter) and t.captured_by else t for t in transforms)


def find_routed_sink_problems(sinks: Sequence[RoutedSink], own: Sink, *, unordered: bool) -> list[Problem]:
    """Return the problems of routed sinks, without asking a server.

    :param own: the operator's sink.
    :param unordered: True if windows are taken in any order.
    """
    problems, taken = [], {own.asset_uri: "the operator's own sink"}
    if sinks and own.guarantee is not Guarantee.EXACTLY_ONCE:
        found = f"{own.asset_uri} shows parts of a window ({own.guarantee.value}) before another sink has committed its part"
        problems.append(Problem("sink", found, 'Use `atomic="window"`, or leave `to` out'))
    for routed in sinks:
        sink, place = routed.sink, routed.sink.asset_uri
        if place in taken:
            action = "Name another one; or write one filter with both conditions"
            problems.append(Problem(routed.where, f"{place} is {taken[place]}, too", action))
        taken[place] = f"that of {routed.where.removesuffix('.to')}"
        if sink.guarantee is not Guarantee.EXACTLY_ONCE:
            found = f"{place} shows parts of a window ({sink.guarantee.value}) before its records are final"
            problems.append(Problem(routed.where, found, 'Use `atomic="window"`'))
        if unordered:
            problems += routed.add_place(sink.find_unordered_problems())
    return problems


def find_shared_place_problems(sinks: Sequence[RoutedSink], own: Sink) -> list[Problem]:
    """Return routed sinks that write to the place of another sink under another name: through another connection or a symbolic
    link. Each of them has a transaction of its own, and one may wait for the other for ever.

    Servers are asked. A sink whose place cannot be found is left out, because its validation names the reason.

    :param own: the operator's sink.
    """
    problems, taken = [], [(own, "the operator's own sink", _find_destination(own))] if sinks else []
    for routed in sinks:
        place = _find_destination(routed.sink)
        for sink, whose, known in taken:
            if place and known and sink.asset_uri != routed.sink.asset_uri and is_same_place(place, known):
                what = f"{routed.sink.asset_uri} is the same place as {sink.asset_uri}, {whose}"
                problems.append(Problem(routed.where, what, "Name another one; or write one filter with both conditions"))
                break
        taken.append((routed.sink, f"that of {routed.where.removesuffix('.to')}", place))
    return problems


def _find_destination(sink: Sink) -> Endpoint | None:
    try:
        return sink.find_destination()
    except (KafkaSparkError, ValueError):
        return None


@dataclass
class RoutedPart:
    """The part of a window that a routed sink takes.

    :param routed: the filter and its sink.
    :param pipeline: the operator's pipeline.
    :param window: the sink's window.
    :param splits: its splits.
    :param shape: its rows.
    :param writer: writes them.
    :param applied: the sink's own record of the window, if it has committed it already.
    :param known: the count and digest that an earlier attempt has recorded for this part; None without one.
    :param taken: the offsets of the records for this sink, including those that it refuses.
    :param results: the accounts of the splits, of the rows for this sink only.
    :param decided: count and digest of the records for the sink, once they are final.
    """

    routed: RoutedSink
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
        """The sink's URI."""
        return self.routed.sink.uri

    @property
    def count(self) -> int:
        """The number of records for this sink."""
        return sum(map(len, self.taken.values()))

    def keep(self, results: list[SplitResult]) -> None:
        """Store the results of the job for this sink, and the offsets of its rows.

        :raises CountMismatch: there is a row without an offset.
        """
        from airflow_kafka_spark.jobs.tasks.write import REFUSED, TAKEN

        places = {split.index: split.range.topic_partition for split in self.splits}
        for result in results:
            here = self.taken.setdefault(places[result.index], OffsetSet())
            written = OffsetSet.from_text(result.token[TAKEN])
            if len(written) != result.handed_over:
                raise CountMismatch(str(self.window), result.handed_over, len(written))
            here.add(written)
            here.add(OffsetSet.from_text(result.token[REFUSED]))
        self.results = results

    def find_refused(self, hook: KafkaHook | None, compacted: CompactedTopics, *, tolerated: bool) -> SplitResult:
        """Return the account of the records that the sink refuses. Afterwards, the records of the sink are final.

        :param hook: as for :func:`~airflow_kafka_spark.bad_records.dead_letters.add_refused`.
        :param compacted: returns the compacted ones of some topics.
        :raises SinkRejected: the sink refuses records, and bad records are not tolerated.
        """
        from airflow_kafka_spark.bad_records.dead_letters import add_refused

        found = self.writer.find_refused_records(self.results) if self.applied is None else ()
        refuse_rejected(found, self.uri, str(self.window), tolerated=tolerated)
        self.results = add_refused(self.results, found, self.splits, hook)
        letters, where = _collect_refused_letters(self.results)
        left = {tp: OffsetSet() for tp in self.taken}
        for tp, offsets in self.taken.items():
            left[tp].add(offsets)
            # The ledger remembers each dead letter: the next attempt does not read its record.
            left[tp].discard(where.get(tp, ()))
        records, digest = sum(r.handed_over for r in self.results), compute_digest(left)
        if self.applied is not None:
            records = self._count_committed(records, digest, compacted)
        self.decided = Captured(self.window.replay, self.routed.name, self.uri, records, digest)
        samples = tuple(bad for result in self.results for bad in result.samples if bad.stage == TASK_PUT)
        return SplitResult(0, rejected=self.count - records, samples=samples, letters=letters)

    def _count_committed(self, records: int, digest: str, compacted: CompactedTopics) -> int:
        """Return the number of records that the sink has committed in an earlier attempt.

        :raises ValidationError: they differ from the records that it would get now.
        """
        known, applied = self.known, self.applied
        assert applied is not None
        there = known.records if known else applied.written + applied.deleted
        # If the ledger was lost, only the numbers can be compared.
        is_other = digest != known.digest if known else records != there
        if is_other:
            written = f"an earlier attempt at window {self.window} has written {there:,} records to {self.uri}"
            found = f"{written}, and the transforms as they are now select {records:,} others for it"
            action = "Set the transforms and formats back until this window is complete"
            if records < there and (topics := compacted({r.topic for r in self.window.ranges})):
                names = ", ".join(sorted(topics))
                action += (
                    f". If they have not changed, compaction of {names} has removed records since, and it is not known which"
                )
                action += f" of the others were written. {self._giving_up}"
            raise ValidationError([Problem(self.routed.where, found, action)])
        return there

    @property
    def _giving_up(self) -> str:
        """The action for a window that no attempt can finish."""
        if self.window.interval:
            return "No other interval waits for this one"
        command = format_command("skip", self.pipeline, "--not-running", "--why", "...")
        return f"To keep the rows that were written, and give up the rest of the window: {command}"

    def commit(self) -> None:
        """Make this part visible in its sink, in one step.

        :raises WindowConflict: this window does not follow the sink's last window.
        """
        if self.applied is None:
            with _name_pipeline_in_errors(self.pipeline):
                self.applied = self.writer.commit(self.results)


@dataclass
class RoutedSinks:
    """The parts of one window that routed sinks take, in one attempt.

    :param opened: closes the sinks' writers.
    :param known: the counts and digests that earlier attempts have recorded.
    :param left_out: offsets of records that were sent to a topic already.
    :param compacted: returns the compacted ones of some topics.
    """

    opened: ExitStack
    known: DeadLetters | None
    left_out: RoutedOffsets
    compacted: CompactedTopics
    parts: list[RoutedPart] = field(default_factory=list)
    _before: int = field(init=False)

    def __post_init__(self) -> None:
        self._before = sum(map(len, self.left_out.values()))

    def begin(self, routed: RoutedSink, window: Window, splits: tuple[Split, ...], shape: Shape) -> None:
        """Begin a sink's part of a window, which fences earlier attempts at it."""
        known = {found.name: found for found in self.known.list_captured(window.replay)} if self.known else {}
        pipeline, window = window.pipeline, routed.make_window(window)
        with _name_pipeline_in_errors(pipeline):
            writer = self.opened.enter_context(routed.sink.begin(window, splits, shape))
        # Looked up only now: from here on, no earlier attempt can commit.
        applied = routed.sink.find_applied(window)
        self.parts.append(RoutedPart(routed, pipeline, window, splits, shape, writer, applied, known.get(routed.name)))

    def make_outputs(self) -> tuple[OtherSink, ...]:
        """Return the parts of the sinks that the tasks of the window's job need."""
        from airflow_kafka_spark.formats.base import CAPTURED
        from airflow_kafka_spark.jobs.tasks.write import CapturingWriter, OtherSink

        made = []
        for number, part in enumerate(self.parts):
            writer = CapturingWriter(part.writer.make_split_writer() if part.applied is None else None)
            made.append(OtherSink(f"{CAPTURED}{number}", part.shape.schema, writer, part.routed.null_values))
        return tuple(made)

    def keep(self, results: Sequence[SplitResult]) -> list[SplitResult]:
        """Store the results of the job for these sinks, and return the other results.

        :raises CountMismatch: there is a row without an offset.
        """
        if not self.parts:
            return list(results)
        from airflow_kafka_spark.jobs.tasks.write import OTHERS
        from airflow_kafka_spark.windows.codec import decode_result

        found = [[decode_result(text) for text in result.token[OTHERS]] for result in results]
        for number, part in enumerate(self.parts):
            part.keep([of_split[number] for of_split in found])
        return [replace(r, token={name: value for name, value in r.token.items() if name != OTHERS}) for r in results]

    @property
    def count(self) -> int:
        """The number of records for routed sinks."""
        return sum(part.count for part in self.parts)

    @property
    def decided(self) -> tuple[Captured, ...]:
        """The counts and digests of the records for each sink, as :meth:`find_refused` has decided them."""
        return tuple(part.decided for part in self.parts if part.decided is not None)

    def check(self, window: Window, results: Sequence[SplitResult]) -> None:
        """Make sure that the records of the operator's own sink are all records without those of the other sinks.

        :param results: the accounts of the splits.
        :raises CountMismatch: further records are missing.
        """
        if not self.parts:
            return
        from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import ROUTED, read_letters

        new = read_letters((result.routes for result in results), ROUTED).num_rows
        left_out = sum(result.routed for result in results) - new
        # Records that earlier attempts have sent to topics may have been deleted since.
        if not self.count <= left_out <= self.count + self._before:
            raise CountMismatch(str(window), self.count, left_out)

    def find_refused(self, hook: KafkaHook | None, *, tolerated: bool) -> list[SplitResult]:
        """Return the records that the sinks refuse: one account for each sink."""
        return [part.find_refused(hook, self.compacted, tolerated=tolerated) for part in self.parts]

    def commit(self) -> None:
        """Make all parts visible, each in one step."""
        for part in self.parts:
            part.commit()


@contextmanager
def _name_pipeline_in_errors(pipeline: str) -> Iterator[None]:
    """Let an error name the pipeline itself, which commands accept, not its part."""
    try:
        yield
    except SinkRecordMissing as error:
        raise SinkRecordMissing(pipeline, error.number, error.after, error.place) from error


def refuse_rejected(found: Sequence[BadRecord], sink: str, window: str, *, tolerated: bool) -> None:
    """Fail the window if its sink refuses records and bad records are not tolerated.

    :raises SinkRejected: the sink refuses records.
    """
    if found and not tolerated:
        raise SinkRejected(sink, window, f"it refuses {len(found):,} of the rows", samples=found[:SHOWN])


def refuse_removed_sinks(sinks: Sequence[RoutedSink], known: DeadLetters | None, window: Window) -> None:
    """Refuse a window if an earlier attempt may have written records to a sink that no filter names any more. If a ``rebind`` has
    sent the window elsewhere since, these records stay there, and are moved again.

    :raises ValidationError: there is such a sink.
    """
    if known is None or window.after == ELSEWHERE:
        return
    names = {routed.name for routed in sinks}
    gone = [found for found in known.list_captured(window.replay) if found.name not in names]
    if gone:
        listed = ", ".join(found.sink for found in gone)
        what = f"an earlier attempt at window {window} has sent records to {listed} by a Filter with `to`, or was about to"
        raise ValidationError([Problem("transforms", what, "Keep such a Filter until this window is complete")])


def add_routed_counts(report: Report, count: int) -> Report:
    """Return the report of a window that the operator's sink had committed before, with the counts of records that went to other
    sinks and topics."""
    return replace(report, records_read=report.records_read + count, records_routed=report.records_routed + count)


def _collect_refused_letters(results: Sequence[SplitResult]) -> tuple[bytes, dict[TopicPartition, list[int]]]:
    """Return the dead letters of records that a sink has refused, and their offsets. The operator's own job counts the others."""
    if not any(result.letters for result in results):
        return b"", {}
    import pyarrow.compute as pc

    from airflow_kafka_spark.sinks.kafka.tasks.dead_letters import read_letters, to_bytes

    letters = read_letters(result.letters for result in results)
    letters = letters.filter(pc.equal(letters["stage"], TASK_PUT))
    where: dict[TopicPartition, list[int]] = {}
    for topic, partition, offset in zip(*(letters[name].to_pylist() for name in ("topic", "partition", "offset")), strict=True):
        where.setdefault(TopicPartition(topic, partition), []).append(offset)
    return (to_bytes(letters) if letters.num_rows else b""), where
