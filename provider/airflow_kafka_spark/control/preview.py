"""Preview the next window of a pipeline: its ranges, their size and their age. Nothing is written or fenced."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from airflow_kafka_spark.control.pipelines import find_group, has_source, list_open_entries, read_pipeline
from airflow_kafka_spark.errors import ChangeRefused, GroupOwned, KafkaUnavailable, LedgerBehind, PipelineUnknown
from airflow_kafka_spark.errors.base import format_command
from airflow_kafka_spark.hooks.kafka.client import ClientEvents, ConsumedMessage, consume_messages
from airflow_kafka_spark.hooks.kafka.log import PROMPT, compare_epochs, read_log, resolve_start, resolve_stop
from airflow_kafka_spark.ledger.beginning import Beginning, LastApplied, decide_beginning
from airflow_kafka_spark.ledger.group import find_group_owner
from airflow_kafka_spark.ledger.topic import TOPIC
from airflow_kafka_spark.windows.memory import Memory
from airflow_kafka_spark.windows.model import Gap, OffsetRange, TopicPartition, Window
from airflow_kafka_spark.windows.offset_specs import Start, Stop, Written, parse_start, parse_stop
from airflow_kafka_spark.windows.plan import DataLossPolicy, Log, Ranges, find_lost_topics, plan_ranges

if TYPE_CHECKING:
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

SAMPLES = 200
"""Number of records that are read at the start of each partition."""
SAMPLE_SECONDS = 10.0

BEHIND_TRIES = 3
BEHIND_SECONDS = 0.5
"""Number of further reads of the ledger, and seconds between them, if it does not show a window yet that the group names."""

Begins = Literal["open window", "ledger", "sink", "group", "starting_offsets"]


@dataclass(frozen=True)
class PreviewRange:
    """The part of the next window in one partition.

    :param offsets: number of offsets: an upper bound of the number of records.
    :param bytes: estimated size of keys and values before compression, from the first records; None if none could be read in
        time.
    :param oldest: timestamp of the first record, in milliseconds since the epoch; None without one.
    """

    topic: str
    partition: int
    start: int
    end: int
    offsets: int
    bytes: int | None
    oldest: int | None


@dataclass(frozen=True)
class Preview:
    """A pipeline's next window, if it were planned now.

    :param number: the number that it would get, or has, if it is open already.
    :param begins: the record or option that decides where it begins.
    :param run: the run that planned a window that is open; None otherwise.
    :param offsets: offsets covered: an upper bound of the records.
    :param bytes: estimated, of keys and values before compression.
    :param age: seconds since the oldest record of it was written; None without records.
    :param held_back: offsets from an open transaction on, left to a later window.
    :param warnings: sentences about differences of the run that are possible because the record of a sink was not read.
    """

    pipeline: str
    number: int
    begins: Begins
    run: str | None
    ranges: tuple[PreviewRange, ...]
    gaps: tuple[Gap, ...]
    offsets: int
    bytes: int
    age: float | None
    held_back: int
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanOptions:
    """The options of a pipeline's operator that decide its next window.

    :param topics: the topics that it subscribes to; empty (default): those that the pipeline has read so far.
    :param group_id: its consumer group; None (default) is that of the pipeline's newest window.
    :param starting_offsets: as for the operator.
    :param ending_offsets: as for the operator.
    :param max_records: as for the operator.
    :param data_loss: as for the operator.
    :raises ValueError: ``starting_offsets`` or ``ending_offsets`` is not valid.
    """

    topics: Sequence[str] = ()
    group_id: str | None = None
    starting_offsets: Written = None
    ending_offsets: Written = None
    max_records: int | None = None
    data_loss: DataLossPolicy = "fail"

    def __post_init__(self) -> None:
        parse_start(self.starting_offsets)
        parse_stop(self.ending_offsets)

    @property
    def start(self) -> Start:
        """The beginning of a pipeline without a position."""
        return parse_start(self.starting_offsets)

    @property
    def stop(self) -> Stop:
        """The end of a window."""
        return parse_stop(self.ending_offsets)


def preview_window(
    hook: KafkaHook,
    pipeline: str,
    options: PlanOptions = PlanOptions(),  # noqa: B008 - a frozen value
    *,
    ledger_topic: str = TOPIC,
    last_applied: LastApplied | None = None,
) -> Preview:
    """Return the window that the next run of a pipeline would plan.

    Guarantee: it begins where the run would begin it, because both call
    :func:`~airflow_kafka_spark.ledger.beginning.decide_beginning`. If the sink's record would decide and ``last_applied`` is not
    given, ``warnings`` has a sentence about it. Nothing is written or fenced.

    :param hook: the cluster.
    :param pipeline: its name.
    :param options: the options of its operator. A pipeline that has not run yet needs topics and a group.
    :param ledger_topic: the ledger that knows it.
    :param last_applied: returns the last window in the record of the pipeline's sink; None (default): no sink is asked.
    :raises PipelineUnknown: the ledger has no record of it, and ``topics`` or ``group_id`` is missing.
    :raises PlanError: one of its subclasses: planning would fail, too.
    """
    try:
        memory = read_pipeline(hook, pipeline, ledger_topic).memory
    except PipelineUnknown:
        if not options.topics or not options.group_id:
            raise
        memory = Memory(pipeline)
    if has_source(memory):
        raise ChangeRefused(f"Pipeline `{pipeline}` reads rows from a source, which decides its next window")
    if memory.intervals and not list_open_entries(memory):
        raise ChangeRefused(f"Pipeline `{pipeline}` moves data intervals: its next window is that of the next DAG run")
    for entry in list_open_entries(memory):
        window = entry.window
        log = read_log(hook, {r.topic for r in window.ranges})
        lost = {*find_lost_topics(window, log), *({r.topic for r in window.ranges} - log.topic_ids.keys())}
        found = _make_preview(hook, memory, "open window", window, window.number, window.run, without=lost)
        gone = (f"Topic `{topic}` was deleted since this window was planned: the run is refused" for topic in sorted(lost))
        return replace(found, warnings=(*gone, *found.warnings))

    subscribed = sorted(set(options.topics)) or sorted({tp.topic for tp in memory.position.offsets})
    group = options.group_id or find_group(memory)
    known = replace(options, topics=subscribed, group_id=group)
    log, beginning = _find_beginning(hook, memory, known, ledger_topic, last_applied)
    position, starts = beginning.position, {}
    if not position.offsets:
        if not group:
            raise ChangeRefused(f"It is not known which group mirrors pipeline `{pipeline}`", action="Say its `group_id`")
        starts = resolve_start(hook, options.start, log, group)
    planned = plan_ranges(
        compare_epochs(hook, log, position.offsets, position.epochs, position.topic_ids),
        position,
        subscribed,
        starts=starts,
        stops=resolve_stop(hook, options.stop, log, position.offsets),
        data_loss=options.data_loss,
        max_records=options.max_records,
    )
    number = max(beginning.last_number, memory.last_used) + 1
    found = _make_preview(hook, memory, beginning.decided_by, planned, number)
    return replace(found, warnings=(*found.warnings, *_find_warnings(pipeline, beginning)))


def _find_beginning(
    hook: KafkaHook, memory: Memory, options: PlanOptions, ledger_topic: str, last_applied: LastApplied | None
) -> tuple[Log, Beginning]:
    """Return the present log of the topics, and the start of the next window in it.

    :param options: with the topics, and with the group if it is known.
    :raises GroupOwned: the group mirrors another pipeline.
    """
    group = options.group_id or ""
    for left in reversed(range(BEHIND_TRIES)):
        log = read_log(hook, options.topics)
        committed = hook.read_committed_offsets(group, log.partitions, stable=False) if group else {}
        if owner := find_group_owner(memory.pipeline, committed):
            raise GroupOwned(memory.pipeline, group, owner)
        try:
            return log, decide_beginning(
                memory,
                log,
                committed,
                group_id=group,
                ledger_topic=ledger_topic,
                last_applied=last_applied,
                data_loss=options.data_loss,
            )
        except LedgerBehind:
            # The ledger was read first, and without waiting, so a window that was closed meanwhile may be missing in it.
            if not left:
                raise
            time.sleep(BEHIND_SECONDS)
            memory = read_pipeline(hook, memory.pipeline, ledger_topic).memory
    raise AssertionError("unreachable")


def _find_warnings(pipeline: str, beginning: Beginning) -> tuple[str, ...]:
    """Return sentences about the changes of the window that are possible because the sink's record was not read."""
    asks = f"{format_command('plan', pipeline, '--dag-file', 'FILE')} asks the sink of the task in that DAG file"
    if beginning.sink_may_change == "offsets":
        return (
            "The ledger holds no position of this pipeline, and its sink was not asked. If its record has a window, the run "
            "begins after the last one instead",
            asks,
        )
    if beginning.sink_may_change == "number":
        return (
            "The pipeline was moved by hand, and its sink was not asked. If its record has a later window, the run counts"
            " from that number",
            asks,
        )
    return ()


def _make_preview(
    hook: KafkaHook,
    memory: Memory,
    begins: Begins,
    plan: Window | Ranges,
    number: int,
    run: str | None = None,
    *,
    without: Collection[str] = (),
) -> Preview:
    """Return the preview of a window.

    :param without: topics that are not read, because they were deleted.
    """
    samples = read_range_samples(hook, [r for r in plan.ranges if r.topic not in without])
    parts = []
    for r in plan.ranges:
        found = samples.get(r.topic_partition)
        size = None if found is None or found.is_gone else round(found.bytes * r.span / found.offsets) if found.offsets else 0
        parts.append(PreviewRange(r.topic, r.partition, r.start, r.end, r.span, size, found.oldest if found else None))
    known = [p for p in parts if p.bytes is not None and p.offsets]
    per_offset = sum(p.bytes or 0 for p in known) / sum(p.offsets for p in known) if known else 0.0
    total = sum(p.bytes if p.bytes is not None else round(per_offset * p.offsets) for p in parts)
    oldest = min((p.oldest for p in parts if p.oldest is not None), default=None)
    age = None if oldest is None else round(max(0.0, time.time() - oldest / 1000), 1)
    return Preview(
        pipeline=memory.pipeline,
        number=number,
        begins=begins,
        run=run,
        ranges=tuple(parts),
        gaps=plan.gaps,
        offsets=sum(p.offsets for p in parts),
        bytes=total,
        age=age,
        held_back=plan.held_back,
        warnings=_find_gone(samples),
    )


def _find_gone(samples: Mapping[TopicPartition, RangeSample]) -> tuple[str, ...]:
    """Return a sentence about the partitions of an open window whose first records are not in the log any more."""
    if not (gone := sorted(tp for tp, sample in samples.items() if sample.is_gone)):
        return ()
    listed = ", ".join(map(str, gone[:8])) + (f" and {len(gone) - 8} others" if len(gone) > 8 else "")
    lost = "records were deleted, or the log was truncated. The run fails or continues as its `data_loss` says"
    return (f"The log does not have the first offsets of this window in {listed}: {lost}",)


@dataclass(frozen=True)
class RangeSample:
    """The first records of a range.

    :param offsets: number of offsets that they cover.
    :param is_gone: True if the log does not have the first offset of the range.
    """

    records: int = 0
    bytes: int = 0
    offsets: int = 0
    oldest: int | None = None
    is_gone: bool = False


def read_range_samples(
    hook: KafkaHook, ranges: Sequence[OffsetRange], *, records: int = SAMPLES
) -> dict[TopicPartition, RangeSample]:
    """Read the first records of each range, to estimate its size and its age.

    :param records: maximum number of records of each partition.
    :return: the first records by partition, without partitions that did not answer in time.
    """
    import confluent_kafka

    open_ranges = {r.topic_partition: r for r in ranges if r.span}
    samples = {r.topic_partition: RangeSample() for r in ranges if not r.span}
    if not open_ranges:
        return samples
    consumer = confluent_kafka.Consumer(hook.make_consumer_config(**PROMPT), logger=ClientEvents())
    deadline = time.monotonic() + SAMPLE_SECONDS
    try:
        consumer.assign([confluent_kafka.TopicPartition(*tp, r.start) for tp, r in open_ranges.items()])
        while open_ranges and time.monotonic() < deadline:
            for message in consume_messages(
                consumer, 500, 0.05, hook.config, "reading a sample of records", conn_id=hook.conn_id
            ):
                tp = TopicPartition(message.topic() or "", message.partition() or 0)
                if (r := open_ranges.get(tp)) is None:
                    continue
                error = message.error()
                if error is not None and error.name() in ("_AUTO_OFFSET_RESET", "OFFSET_OUT_OF_RANGE"):
                    samples[tp] = RangeSample(is_gone=True)
                    del open_ranges[tp]
                    consumer.incremental_unassign([confluent_kafka.TopicPartition(*tp)])
                    continue
                if error is not None and error.code() != confluent_kafka.KafkaError._PARTITION_EOF:
                    raise KafkaUnavailable(hook.conn_id, f"reading {tp}", error.str())
                found = samples.get(tp, RangeSample())
                inside = error is None and (message.offset() or 0) < r.end
                if inside:
                    found = samples[tp] = _add(found, message, r)
                if not inside or found.records >= records:
                    # The range was read to its end: offsets without a record are gaps or control records.
                    samples[tp] = found if inside else replace(found, offsets=r.span)
                    del open_ranges[tp]
                    consumer.incremental_unassign([confluent_kafka.TopicPartition(*tp)])
    finally:
        consumer.close()
    return samples


def _add(found: RangeSample, message: ConsumedMessage, r: OffsetRange) -> RangeSample:
    kind, timestamp = message.timestamp()
    known = timestamp if kind else None
    return RangeSample(
        found.records + 1,
        found.bytes + len(message.key() or b"") + len(message.value() or b""),
        (message.offset() or 0) - r.start + 1,
        min((t for t in (found.oldest, known) if t is not None), default=None),
    )
