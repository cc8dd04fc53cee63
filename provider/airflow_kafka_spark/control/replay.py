"""Move a complete window again (replay), or send its dead letters again to the topics that they came from (resend).

A replay is only requested here. The pipeline's own task replays the window once it is cleared, since only an operator has a sink.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.control.base import (
    AccompanyingRecords,
    ChangeRequest,
    ChangeResult,
    ReplayedWindow,
    SentAgain,
    find_window,
    refuse_open_window,
    request_change,
)
from airflow_kafka_spark.control.pipelines import find_ledger, has_source
from airflow_kafka_spark.errors import PipelineUnknown, ReplayRefused, ResendRefused
from airflow_kafka_spark.hooks.kafka.log import compare_epochs, read_log, read_records
from airflow_kafka_spark.ledger.topic import WAIT_FOR_NONE
from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.dead_letters import CONNECT_ERROR_PREFIX, find_dead_letters, group_into_runs, subtract_offsets
from airflow_kafka_spark.windows.interval import NUMBER
from airflow_kafka_spark.windows.memory import Memory, WindowEntry, make_dead_letters_key, make_key_prefix, make_window_key
from airflow_kafka_spark.windows.model import Landed, OffsetRange, TaskInstanceKey, TopicPartition, Window
from airflow_kafka_spark.windows.plan import check_readable, find_lost_topics

if TYPE_CHECKING:
    from confluent_kafka import Message, Producer

    from airflow_kafka_spark.hooks.kafka.client import ConsumedMessage
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook


IN_PIECES = "exactly-once, split by split"
"""The guarantee of sinks that commit split by split, and would replace rows split by split."""


def replay(hook: KafkaHook, request: ChangeRequest, *, window: int | None = None, name: str | None = None) -> ChangeResult:
    """Request that a complete window is moved again: with equal offsets, and with the sink replacing its rows.

    Guarantee: a running attempt is not disturbed. When the task of the run is cleared and runs, it moves the window again,
    regardless of its ``on_rerun``, and exactly once: after a second clear ``on_rerun`` applies. Neither position nor group move.
    If the sink cannot replace the rows of a window, the task fails before anything is changed.

    :param hook: the cluster.
    :param request: the pipeline, the author and the reason.
    :param window: the window's number; or give ``name``.
    :param name: a data interval's name, ``20260101T000000Z-20260101T010000Z``, with or without the pipeline's before it.
    :raises PipelineUnknown: the ledger has no record of it.
    :raises WindowOpen: the window is not complete.
    :raises ReplayRefused: there is no such window any more, or its destination cannot replace it.
    :raises PlanError: (a subclass) its records were deleted.
    :raises ValueError: neither or both of ``window`` and ``name``.
    """
    memory, number, interval = find_window(hook, request, window, name)
    request.refuse_repetition(memory, "replay")

    def find_asked(memory: Memory) -> Window:
        return _find_interval_window(memory, interval) if interval else _find_progress_window(memory, number)

    def decide(memory: Memory) -> Change | None:
        request.refuse_repetition(memory, "replay")
        there = find_asked(memory)
        if memory.replay_asked(there):
            return None
        return request.make_change(memory.next_change, "replay", window=there.number, name=interval, replay=there.replay)

    there = find_asked(memory)
    log = read_log(hook, {r.topic for r in there.ranges})
    if gone := [topic for topic in find_lost_topics(there, log) if topic not in log.topic_ids]:
        raise ReplayRefused(f"Topic `{gone[0]}` is gone", expected="the records of the window")
    ends = {r.topic_partition: r.end for r in there.ranges if r.span}
    check_readable(there, compare_epochs(hook, log, ends, there.epochs, there.topic_ids), "fail")
    before = memory.replay_asked(there)
    change, _ = request_change(hook, memory, request, decide)
    asked = change or before
    task = TaskInstanceKey.parse(there.run) or (None, None, None, -1)
    return replace(
        ChangeResult.of("replay", request, asked),
        changed=change is not None,
        window=ReplayedWindow(there.number, interval or None, there.replay, there.ranges, there.run, *task),
        warnings=_replay_warnings(memory, change, there),
    )


def _find_progress_window(memory: Memory, number: int) -> Window:
    entry = memory.entries.get(number)
    if entry is None:
        known = sorted(memory.entries)
        known_windows = f"windows {known[0]} to {known[-1]}" if known else "none"
        raise ReplayRefused(
            f"The ledger remembers no window {number} of pipeline `{memory.pipeline}`",
            expected=f"one that it remembers: {known_windows}",
            action="To move older records again, `reset` the pipeline: a sink that appends then has them twice",
        )
    refuse_open_window(entry.state, str(entry.window), entry.window.run, entry.window.planned_at)
    pieces = (entry.report or {}).get("guarantee") == IN_PIECES
    if has_source(memory) or entry.window.source or entry.window.target or pieces:
        raise ReplayRefused(
            f"Pipeline `{memory.pipeline}` cannot replace what it has written: readers see parts of its windows",
            expected="a sink that commits windows as a whole, and records the window of each row",
        )
    return entry.window


def _find_interval_window(memory: Memory, name: str) -> Window:
    state = memory.intervals.get(name)
    if state is None:
        raise ReplayRefused(
            f"Pipeline `{memory.pipeline}` has moved no data interval `{name}`",
            expected="a name like `20260101T000000Z-20260101T010000Z`",
            action="See its intervals",
        )
    ledger_name = state.interval.make_ledger_name(memory.pipeline)
    refuse_open_window(state.state, ledger_name, state.run, "an earlier time")
    return state.make_window(memory.pipeline)


def _replay_warnings(memory: Memory, change: Change | None, window: Window) -> tuple[str, ...]:
    return (
        *([] if change else ["The replay was requested already, and begins when its task is cleared"]),
        f"Clear the task of run {window.run}, even if it succeeded: it then moves the window again",
        "If the sink cannot replace the window's rows, the task fails, and the rows stay unchanged",
        *(["The pipeline is paused: the window is moved after it is resumed"] if memory.is_paused else []),
    )


MAX_LETTERS = 10_000
"""Maximum number of dead letters of a window that are sent in one transaction."""
MAX_BYTES = 64 << 20
"""Maximum size of these dead letters in bytes, because they pass through this process."""
SECONDS = 60
ORIGIN = (f"{CONNECT_ERROR_PREFIX}topic", f"{CONNECT_ERROR_PREFIX}partition", f"{CONNECT_ERROR_PREFIX}offset")
"""The headers that the context of a dead letter begins with, in this order."""


@dataclass(frozen=True)
class DeadLetter:
    """The original record of a dead letter.

    :param origin: the partition from which the record was read.
    :param offset: its offset there.
    :param timestamp: milliseconds since the epoch; None without one.
    :param headers: its headers, without those of the dead letter.
    """

    origin: TopicPartition
    offset: int
    key: bytes | None
    value: bytes | None
    timestamp: int | None
    headers: tuple[tuple[str, bytes | None], ...]

    @property
    def size(self) -> int:
        return len(self.key or b"") + len(self.value or b"") + sum(len(n) + len(v or b"") for n, v in self.headers)


def resend_dead_letters(
    hook: KafkaHook, request: ChangeRequest, *, window: int | None = None, name: str | None = None
) -> ChangeResult:
    """Send the dead letters of a complete window again, to the topics that they came from, where the pipeline reads them again.

    Each record is sent as it was read (key, value, timestamp and headers), to the partition that it came from. The records of a
    partition keep their order.

    Guarantee: one Kafka transaction sends them and records this in the ledger. A ``read_committed`` reader of the topic therefore
    sees each of them exactly once more, even if processes are killed or the command is repeated. A running attempt is not
    disturbed. Other readers of the topic get the records a second time, too.

    :param hook: the cluster.
    :param request: the pipeline, the author and the reason.
    :param window: the window's number; or give ``name``.
    :param name: a data interval's name, ``20260101T000000Z-20260101T010000Z``, with or without the pipeline's before it.
    :raises PipelineUnknown: the ledger has no record of it.
    :raises WindowOpen: the window is not complete.
    :raises ResendRefused: there is no such window any more, it has no dead letters, or they have no headers with their origin.
    :raises RightMissing: the user may not read the dead letters, or not write to the topic that they came from.
    :raises ValueError: neither or both of ``window`` and ``name``.
    """
    memory, number, interval = find_window(hook, request, window, name)
    request.refuse_repetition(memory, "resend")
    entry, left = _find_window(hook, memory, request.ledger_topic, interval, number)
    number = entry.window.number

    def decide(memory: Memory) -> Change | None:
        # Another command may have sent them since they were read, or a replay of the window may have begun.
        if _find_window(hook, memory, request.ledger_topic, interval, number, waits=True)[1] != left:
            return None
        offsets = {tp: group_into_runs(found) for tp, found in sent.items()}
        return request.make_change(memory.next_change, "resend", window=number, name=interval, landed=left.landed, resent=offsets)

    def make_result(change: Change | None, warnings: tuple[str, ...]) -> ChangeResult:
        made = ChangeResult.of("resend", request, change)
        return replace(made, changed=False, sent_again=(), sent_of=interval or str(number), warnings=warnings)

    before = memory.list_resends(number, interval)
    if not left.count:
        already = (f"They were sent again already: {before[-1].sentence}",)
        return make_result(before[-1], warnings=already)
    letters = _read_letters(hook, request.pipeline, entry, left)
    parts = _count_sent(letters)
    _check_partitions(hook, parts)
    sent: dict[TopicPartition, set[int]] = {}
    for letter in letters:
        sent.setdefault(letter.origin, set()).add(letter.offset)

    def produce(producer: Producer) -> None:
        _send_letters(producer, letters)

    topics = {part.topic for part in parts}
    beside = AccompanyingRecords("sending dead letters again", topics, produce, SECONDS, hook.read_size_settings(topics))
    own = (make_window_key(request.pipeline, number), make_dead_letters_key(request.pipeline, number))
    change, memory = request_change(hook, memory, request, decide, beside, () if interval else own)
    if change is None:
        done = memory.list_resends(number, interval)
        said = (f"They were sent again meanwhile: {done[-1].sentence}",) if done else ()
        return make_result(done[-1] if done else None, warnings=said)
    result = make_result(change, warnings=_find_resend_warnings(left, letters))
    return replace(result, changed=True, sent_again=tuple(parts))


@dataclass(frozen=True)
class UnsentLetters:
    """The dead letters of a window that can be sent again.

    :param landed: their offsets in the dead letter topic, by partition. Other letters may lie between them.
    :param count: their number.
    :param offsets: offsets of their records in the topics that they came from; None if the ledger does not have them.
    """

    landed: tuple[Landed, ...]
    count: int
    offsets: Mapping[TopicPartition, frozenset[int]] | None = None

    def has(self, letter: DeadLetter) -> bool:
        return self.offsets is None or letter.offset in self.offsets.get(letter.origin, ())


def _find_window(
    hook: KafkaHook, memory: Memory, ledger_topic: str, interval: str, number: int, *, waits: bool = False
) -> tuple[WindowEntry, UnsentLetters]:
    """Return a complete window, and its dead letters that were not sent again yet.

    :param memory: the state of the pipeline.
    :param waits: True to wait for the end of open transactions that may contain records of a data interval.
    """
    pipeline, whole = memory.pipeline, memory
    if interval:
        state = memory.intervals.recent.get(interval)
        if state is None:
            raise ResendRefused(
                f"The ledger remembers no data interval `{interval}` of pipeline `{pipeline}`",
                expected="a name like `20260101T000000Z-20260101T010000Z`, of an interval that is not archived",
                action="See its intervals; read the dead letter topic with a separate pipeline",
            )
        read = _read_interval(hook, state.interval.make_ledger_name(pipeline), ledger_topic, waits=waits)
        memory, number = read.restore_dead_letters(state), NUMBER
    entry = memory.entries.get(number)
    if entry is None:
        known = sorted(memory.entries)
        raise ResendRefused(
            f"The ledger remembers no window {number} of pipeline `{pipeline}`",
            expected=f"one that it remembers: {f'windows {known[0]} to {known[-1]}' if known else 'none'}",
            action="Read the dead letter topic with a separate pipeline",
        )
    refuse_open_window(entry.state, str(entry.window), entry.window.run, entry.window.planned_at)
    if entry.window.source:
        raise ResendRefused(
            f"Pipeline `{pipeline}` reads rows from a source: its dead letters are rows, which no topic has held",
            expected="a pipeline that reads topics",
            action="Publish the dead letters with `KafkaToKafkaOperator`, in the format that they fit now",
        )
    followed = entry.window.follows.pipeline if entry.window.follows else next(iter(whole.position.followed), "")
    if followed:
        raise ResendRefused(
            f"Pipeline `{pipeline}` follows `{followed}`, and its windows contain what that pipeline publishes, and nothing else",
            expected="a pipeline without `follows`",
            action="Read the dead letter topic with a separate pipeline",
        )
    dead = memory.dead.get(number)
    landed = find_dead_letters(dead, entry.report)
    if not landed:
        raise ResendRefused(
            f"Window {interval or number} of pipeline `{pipeline}` has no dead letters", expected="a window with some"
        )
    if dead is None or not dead.landed:
        landed = _find_unsent(landed, whole.list_resends(number, interval))
        return entry, UnsentLetters(landed, sum(part.records for part in landed))
    absent = dead.find_absent((entry.report or {}).get("replay", 0), entry.window.replay)
    if not absent:
        raise ResendRefused(
            f"No dead letter of window {interval or number} of pipeline `{pipeline}` is known to be missing in the sink: replay "
            f"{entry.window.replay} has left out none, or it was given up",
            expected="records that the newest replay has left out",
            action="Read the dead letter topic with a separate pipeline, if the sink does not have them",
        )
    left = subtract_offsets(absent, whole.find_resent(entry.window))
    return entry, UnsentLetters(dead.list_letters_of(left), sum(map(len, left.values())), left)


def _read_interval(hook: KafkaHook, name: str, ledger_topic: str, *, waits: bool) -> Memory:
    topic = find_ledger(hook, ledger_topic)
    if topic is None:
        raise PipelineUnknown(name, ledger_topic)
    return topic.read_without_waiting(name, (make_key_prefix(name),) if waits else WAIT_FOR_NONE).memory


def _find_unsent(landed: Sequence[Landed], before: Sequence[Change]) -> tuple[Landed, ...]:
    """Return the dead letters that were not sent again yet, of a window that cannot be replayed."""
    ends: dict[TopicPartition, int] = {}
    sent: Counter[TopicPartition] = Counter()
    for part in (part for change in before for part in change.landed or ()):
        ends[part.topic_partition] = max(ends.get(part.topic_partition, 0), part.last + 1)
        sent[part.topic_partition] += part.records
    found = []
    for part in landed:
        first = max(part.first, ends.get(part.topic_partition, 0))
        if first <= part.last:
            found.append(Landed(part.topic, part.partition, first, part.last, part.records - sent[part.topic_partition]))
    return tuple(found)


def _read_letters(hook: KafkaHook, pipeline: str, entry: WindowEntry, left: UnsentLetters) -> list[DeadLetter]:
    """Return the dead letters of a window. Those of other windows and pipelines may lie between them.

    :raises ResendRefused: a dead letter has no headers with its origin, all of them were deleted, or they are too many.
    """
    window, landed, count = entry.window, left.landed, left.count
    if count > MAX_LETTERS:
        raise _make_too_many_error(f"{count:,} dead letters", f"at most {MAX_LETTERS:,}")
    names = {pipeline, window.pipeline}
    ranges = {part.topic_partition: (part.first, part.last + 1) for part in landed}
    found, size = [], 0
    for message in read_records(hook, ranges, "reading dead letters", seconds=SECONDS, whole=True):
        letter = _parse_letter(message, names)
        if letter is None or not (_is_of(window.ranges, letter) and left.has(letter)):
            continue
        found.append(letter)
        size += letter.size
        if size > MAX_BYTES:
            raise _make_too_many_error(f"dead letters of more than {MAX_BYTES >> 20} MiB", "fewer")
    if not found:
        topics = ", ".join(sorted({f"`{part.topic}`" for part in landed}))
        raise ResendRefused(
            f"None of the {count:,} dead letters of window {window} was found in {topics}",
            expected="dead letters that the topic still holds, with the headers of their origin",
            action="See the retention of the topic, and `errors_deadletterqueue_context_headers_enable` of the operator",
        )
    # The dead letter topic may have several partitions. Records of a partition keep the order in which they were read.
    return sorted(found, key=lambda letter: (letter.origin, letter.offset))


def _make_too_many_error(found: str, expected: str) -> ResendRefused:
    return ResendRefused(
        f"The window has {found}, which are sent in one transaction",
        expected=expected,
        action="Read the dead letter topic with a separate pipeline",
    )


def _parse_letter(message: ConsumedMessage, names: set[str]) -> DeadLetter | None:
    """Return the record of a dead letter; None if it is another pipeline's, or has no headers with its origin."""
    headers = message.headers() or []
    starts = [at for at in range(len(headers)) if tuple(n for n, _ in headers[at : at + 3]) == ORIGIN]
    if not starts:
        return None
    # The last headers count, because the dead letter of a dead letter has the headers of both.
    at = starts[-1]
    context = {
        header: (value or b"").decode(errors="replace")
        for header, value in headers[at:]
        if header.startswith(CONNECT_ERROR_PREFIX)
    }
    topic, partition, offset = (context[header] for header in ORIGIN)
    if context.get(f"{CONNECT_ERROR_PREFIX}connector.name") not in names or not (partition.isdecimal() and offset.isdecimal()):
        return None
    kind, timestamp = message.timestamp()
    stamp = timestamp if kind == 1 and timestamp > 0 else None
    origin = TopicPartition(topic, int(partition))
    return DeadLetter(origin, int(offset), message.key(), message.value(), stamp, tuple(headers[:at]))


def _is_of(ranges: Sequence[OffsetRange], letter: DeadLetter) -> bool:
    return any(r.topic_partition == letter.origin and r.start <= letter.offset < r.end for r in ranges)


def _count_sent(letters: Sequence[DeadLetter]) -> tuple[SentAgain, ...]:
    counts = Counter(letter.origin for letter in letters)
    return tuple(SentAgain(*tp, counts[tp]) for tp in sorted(counts))


def _check_partitions(hook: KafkaHook, parts: Sequence[SentAgain]) -> None:
    described = hook.describe_topics({part.topic for part in parts}, missing="omit")
    for part in parts:
        if part.topic not in described or part.partition not in described[part.topic].partitions:
            raise ResendRefused(
                f"There is no {part.topic}-{part.partition} any more, where {part.records:,} of the dead letters came from",
                expected="the topics that the pipeline has read",
                action="Read the dead letter topic with a separate pipeline",
            )


def _send_letters(producer: Producer, letters: Sequence[DeadLetter]) -> None:
    """Produce and flush.

    :raises confluent_kafka.KafkaException: one was refused, or was not acknowledged in time.
    """
    from confluent_kafka import KafkaError, KafkaException

    failures: list[KafkaError] = []
    acknowledged = 0

    def on_delivery(error: KafkaError | None, message: Message) -> None:
        nonlocal acknowledged
        if error is not None:
            failures.append(error)
        else:
            acknowledged += 1

    for letter in letters:
        # A record without a timestamp gets the time of sending.
        options: dict[str, Any] = {} if letter.timestamp is None else {"timestamp": letter.timestamp}
        options |= {"headers": list(letter.headers), "on_delivery": on_delivery}
        producer.produce(letter.origin.topic, letter.value, letter.key, letter.origin.partition, **options)
        producer.poll(0)
    producer.flush(SECONDS)
    if failures or acknowledged != len(letters):
        raise KafkaException(failures[0] if failures else KafkaError(KafkaError._TIMED_OUT, "records were not acknowledged"))


def _find_resend_warnings(left: UnsentLetters, letters: Sequence[DeadLetter]) -> tuple[str, ...]:
    gone = left.count - len(letters)
    return (
        *(
            [f"{gone:,} of them are not in the dead letter topic any more, or have no headers with their origin"]
            if gone > 0
            else []
        ),
        "The next window of the pipeline reads them: correct the format or the transform first, or they are dead letters again",
        "Other readers of these topics read the records again, too",
    )
