"""Request, result and writer of control records: the parts that all commands share.

Control records (pause, resume, replay, resend, rebind) are written to the ledger while an attempt may be running, and fence none.

Three rules make this safe. A control record has a kind of key that no attempt and no reset writes. Its writer fences a separate
transactional id, ``<ledger topic>.<pipeline>.control``, so of two concurrent writers the second one sees the record of the first
one. An attempt that stores a short cut into the ledger sets it before all records that its last read may have missed
(:attr:`~airflow_kafka_spark.windows.memory.Memory.oldest_offset`).
"""

from __future__ import annotations

import getpass
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.control.pipelines import find_ledger, list_open_entries, read_pipeline
from airflow_kafka_spark.errors import ChangeRefused, PipelineUnknown, WindowOpen
from airflow_kafka_spark.hooks.kafka.client import ClientEvents
from airflow_kafka_spark.ledger.attempt import Ledger, format_utc_now, wait_for_others
from airflow_kafka_spark.ledger.topic import TOPIC, LedgerContent, make_transactional_id, refuse_renamed
from airflow_kafka_spark.windows.binding import Binding
from airflow_kafka_spark.windows.changes import Action, Change
from airflow_kafka_spark.windows.memory import (
    CONTROL,
    PAUSE_VERSION,
    VERSION,
    LedgerRecord,
    Memory,
    WindowEntry,
    make_control_key,
    make_control_prefix,
    make_control_record,
)
from airflow_kafka_spark.windows.model import Gap, OffsetRange, State, TopicPartition, Tries

if TYPE_CHECKING:
    from confluent_kafka import Producer

    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

log = logging.getLogger(__name__)

KEEP_CONTROLS = 100
"""Maximum number of control records of a pipeline that the ledger keeps."""
SECONDS = 10
"""Default timeout in seconds of a transaction that writes a control record."""
TRIES = 10
"""Maximum number of tries. A try is lost to another writer that fences this one, which need not have succeeded itself."""


@dataclass(frozen=True)
class TaskTry:
    """The try of an Airflow task that requests a change.

    :param run: run of the task, ``<dag_id>/<run_id>/<task_id>``.
    :param tries: Airflow's counters of the task.
    :param retries: present ``retries`` of the task.
    """

    run: str
    tries: Tries
    retries: int = 0

    def has_made(self, change: Change) -> bool:
        """Return True if an earlier try of the task has made a change, and the task was not cleared since."""
        known = change.tries
        return known is not None and change.run == self.run and not self.tries.was_cleared_since(known, self.retries)


@dataclass(frozen=True)
class ChangeRequest:
    """The request to change a pipeline. The command line, the operator and the pages in Airflow's UI make one for each command.

    :param pipeline: name of the pipeline.
    :param why: reason of the change, which the ledger records.
    :param who: author of the change. Default: the user of this process.
    :param ledger_topic: the ledger that knows the pipeline.
    :param dry_run: True to change and fence nothing, and to return what would happen.
    :param task: the task that requests the change, whose retries do not make it again; None (default) if it is no task.
    :raises ChangeRefused: ``why`` is empty.
    """

    pipeline: str
    why: str
    who: str = ""
    ledger_topic: str = TOPIC
    dry_run: bool = False
    task: TaskTry | None = None

    def __post_init__(self) -> None:
        if not str(self.why or "").strip():
            raise ChangeRefused("The change has no reason", expected="a few words in `why`", action="Say why")
        object.__setattr__(self, "who", str(self.who or "").strip() or _find_user())

    def make_change(self, number: int, action: Action, **facts: Any) -> Change:
        """Return the record of the change that this request makes now.

        :param number: number of the change.
        :param action: the action.
        :param facts: further fields of the record.
        """
        task: dict[str, Any] = {"run": self.task.run, "tries": self.task.tries} if self.task is not None else {}
        return Change(number, action, self.who, self.why, format_utc_now(), **facts, **task)

    def refuse_repetition(self, memory: Memory, action: Action) -> None:
        """Refuse to make a change again that an earlier try of the requesting task has made.

        :param memory: the state of the pipeline.
        :param action: the action.
        :raises ChangeRepeated: an earlier try has made it.
        """
        if self.task is None or self.dry_run:
            return
        for change in memory.history:
            if change.action == action and self.task.has_made(change):
                raise ChangeRepeated(self, change)


def _find_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run as a user without a name
        return f"uid {os.getuid()}"


# --- the result --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OpenWindow:
    """A window that is planned and not complete. An attempt may be working on it.

    :param name: its name, ``<pipeline>#<number>``, or that of the ledger of a data interval.
    :param number: its number.
    :param run: the run that planned it.
    :param planned_at: UTC instant of the plan, ISO 8601; empty if it is not known.
    :param attempts: number of attempts that have worked on it; 0 if it is not known.
    :param attempt_began: UTC instant at which the last of them began, ISO 8601; empty if it is not known.
    """

    name: str
    number: int
    run: str
    planned_at: str
    attempts: int = 0
    attempt_began: str = ""

    @classmethod
    def of(cls, entry: WindowEntry) -> OpenWindow:
        """Return the window of an entry of the ledger."""
        window, attempt = entry.window, entry.attempt
        return cls(str(window), window.number, window.run, window.planned_at, attempt.number, attempt.started_at)


@dataclass(frozen=True)
class Move:
    """The move of a pipeline's position in one partition.

    :param before: its offset before the change; None in a partition of which it had read nothing.
    :param after: its offset after the change.
    :param wanted: the offset to which a shift would have led if the log did not end before it; None for other changes.
    """

    topic: str
    partition: int
    before: int | None
    after: int
    wanted: int | None = None


@dataclass(frozen=True)
class ReplayedWindow:
    """A complete window that is to be moved once more, and the task that moves it.

    :param number: the window's number.
    :param interval: the data interval's name; None for a window of progress.
    :param replay: number of replays before this one.
    :param ranges: the offsets that are moved again.
    :param run: the run whose task has to be cleared, as the ledger has it. ``dag_id``, ``run_id``, ``task_id`` and ``map_index``
        (-1 for a task that is not mapped) are its parts, None where it has another form.
    """

    number: int
    interval: str | None
    replay: int
    ranges: tuple[OffsetRange, ...]
    run: str
    dag_id: str | None
    run_id: str | None
    task_id: str | None
    map_index: int


@dataclass(frozen=True)
class SentAgain:
    """Dead letters that were sent again to the partition that they came from.

    :param topic: the topic.
    :param partition: the partition.
    :param records: number of records.
    """

    topic: str
    partition: int
    records: int


@dataclass(frozen=True)
class ChangeResult:
    """The result of a change; of a dry run, what the change would do.

    The command line, the operator and the pages in Airflow's UI show this value. Fields that do not apply to an action stay
    empty.

    :param action: the command.
    :param change: the number of the change in the ledger; of a dry run, the number that it would get. If nothing had to be done:
        the number of the change that is in force; 0 without one.
    :param who: the author of the request.
    :param why: the reason.
    :param dry_run: True if nothing was changed because only a preview was requested.
    :param changed: False if nothing had to be done: the pipeline was paused already, or the same request is pending.
    :param group_id: the consumer group that was moved or deleted with it; None if the pipeline has no group, or the group stays.
    :param open_windows: windows that are planned and not complete, and that stay as they are.
    :param given_up: windows that were open, and are given up.
    :param moves: the position before and after the change, by partition.
    :param skipped: offsets that are never moved to the sink.
    :param records: of ``forget``: number of records of the ledger that were tombstoned.
    :param renamed_to: of ``rename``: the new name.
    :param position: of ``rename``: the offsets at which the pipeline continues.
    :param last_window: of ``rename``: the number of the last complete window, after which the numbers continue.
    :param window: of ``replay``: the window that is moved once more.
    :param sent_again: of ``resend``: the dead letters that were sent again, by the partition that they came from.
    :param sent_of: of ``resend``: the window, by its number or the name of its data interval.
    :param binding: of ``rebind``: the binding until this change; None if it is not known.
    :param paused_by: of ``pause`` and ``resume``: the pause that was in force before; None without one.
    :param warnings: remarks on the change, in sentences.
    """

    action: Action
    pipeline: str
    change: int
    who: str
    why: str
    dry_run: bool
    changed: bool = True
    group_id: str | None = None
    open_windows: tuple[OpenWindow, ...] = ()
    given_up: tuple[OpenWindow, ...] = ()
    moves: tuple[Move, ...] = ()
    skipped: tuple[Gap, ...] = ()
    records: int | None = None
    renamed_to: str | None = None
    position: Mapping[TopicPartition, int] = field(default_factory=dict)
    last_window: int | None = None
    window: ReplayedWindow | None = None
    sent_again: tuple[SentAgain, ...] = ()
    sent_of: str = ""
    binding: Binding | None = None
    paused_by: Change | None = None
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, action: Action, request: ChangeRequest, change: Change | int | None) -> ChangeResult:
        """Return the result of a request, without the fields that only some actions have.

        :param action: the action.
        :param request: the request.
        :param change: the change or its number; None if nothing was changed.
        """
        number = change.number if isinstance(change, Change) else change or 0
        return cls(action, request.pipeline, number, request.who, request.why, request.dry_run)

    @property
    def skipped_offsets(self) -> int:
        """The number of offsets that are skipped: an upper bound of the records."""
        return sum(gap.end - gap.start for gap in self.skipped)


class ChangeRepeated(Exception):
    """Raised if a task requests a change that an earlier try of it has made. Nothing was changed.

    :param request: the request.
    :param change: the change that the earlier try has made.
    """

    def __init__(self, request: ChangeRequest, change: Change) -> None:
        super().__init__(f"change {change.number} of pipeline {request.pipeline} was made by an earlier try of its task")
        self.request, self.change = request, change

    @property
    def result(self) -> ChangeResult:
        """The result of the earlier try, as far as the record of the change shows it."""
        change = self.change
        return replace(
            ChangeResult.of(change.action, self.request, change),
            changed=False,
            moves=tuple(Move(*tp, change.before.get(tp), after) for tp, after in sorted(change.after.items())),
            renamed_to=change.name if change.action == "rename" else None,
            warnings=(f"An earlier try of this task has made change {change.number} already, at {change.at}",),
        )


def list_open_windows(memory: Memory) -> tuple[OpenWindow, ...]:
    """Return the windows and data intervals that are planned and not complete."""
    intervals = [s for _, s in sorted(memory.intervals.recent.items()) if s.state is State.PLANNED]
    return (
        *(OpenWindow.of(entry) for entry in list_open_entries(memory)),
        *(OpenWindow(s.interval.make_ledger_name(memory.pipeline), 1, s.run, "") for s in intervals),
    )


# --- writing a control record ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AccompanyingRecords:
    """Records that become visible together with the record of a change.

    :param doing: the action, for errors.
    :param topics: the topics that they go to, for errors.
    :param produce: produces and flushes them.
    :param seconds: the timeout of the transaction.
    :param settings: further settings of the producer.
    """

    doing: str
    topics: Collection[str]
    produce: Callable[[Producer], None]
    seconds: int = SECONDS
    settings: Mapping[str, Any] = field(default_factory=dict)


class ControlLedger(Ledger):
    """Writes the control requests of a pipeline. Do not enter it as a context: that would fence the pipeline's attempts."""

    def write(
        self,
        decide: Callable[[Memory], Change | None],
        beside: AccompanyingRecords | None = None,
        wait_for: tuple[bytes, ...] = (),
    ) -> Change | None:
        """Write the change that ``decide`` returns for the present state of the ledger, in one Kafka transaction.

        Guarantee: all or nothing is written. No other writer writes a control record of this pipeline between the read and the
        commit. Attempts, resets and their transactions are not fenced.

        :param decide: returns the change, or None for nothing to do. Called again if another writer was faster.
        :param beside: produces further records of the change in the same transaction.
        :param wait_for: prefixes of further keys that ``decide`` depends on. If an open transaction may contain such records, its
            end is awaited.
        :return: the change that was written; None if there was nothing to do.
        :raises KafkaUnavailable: the change cannot be written. The outcome is unknown only if the brokers do not report it.
        """
        failure: Exception | None = None
        sent: Change | None = None
        for again in range(TRIES):
            wait_for_others(again)
            self._events = ClientEvents(self.hook.config.get("error_cb"))
            seconds = beside.seconds if beside is not None else SECONDS
            settings: dict[str, Any] = {"transaction.timeout.ms": seconds * 1000, "message.timeout.ms": seconds * 1000}
            settings |= beside.settings if beside is not None else {}
            producer = self._fence_as(make_transactional_id(self.topic.name, self.pipeline, CONTROL), **settings)
            memory = self._find(wait_for).memory
            if sent is not None and memory.controls.get(sent.number) == sent:
                return sent
            if failure is not None and not _is_lost(failure):
                raise failure
            if (change := decide(memory)) is None:
                return None
            try:
                producer.begin_transaction()
                if beside is not None:
                    self._produce(producer, beside)
                # The record is written last, because no reader passes it in the ledger's partition before the transaction ends.
                self.send(producer, _build_records(memory, change))
                faults.reached("control.in_transaction")
                producer.commit_transaction(seconds)
                return change
            except Exception as error:
                # The outcome is known once the next producer has fenced this one and has read the ledger.
                doing = f"writing the control request ({change.action})"
                failure, sent = self.translate(error, doing, producer=producer), change
                log.warning("Writing change %d of pipeline %s failed: %s", change.number, self.pipeline, failure)
        assert failure is not None
        raise failure

    def _produce(self, producer: Producer, beside: AccompanyingRecords) -> None:
        try:
            beside.produce(producer)
        except Exception as error:
            raise self.translate(error, beside.doing, "`, `".join(sorted(beside.topics)), producer=producer) from error

    def _find(self, wait_for: tuple[bytes, ...]) -> LedgerContent:
        """Read the ledger. Wait only for control records that an open transaction hides, not for those of a running attempt.

        :param wait_for: prefixes of further keys to wait for.
        """
        topic = find_ledger(self.hook, self.topic.name)
        if topic is None:
            raise PipelineUnknown(self.pipeline, self.topic.name)
        self.topic = topic
        mine = (make_control_prefix(self.pipeline),)
        found = topic.read_without_waiting(self.pipeline, (*mine, *wait_for))
        self._partition = found.partition
        return found


def _is_lost(failure: Exception) -> bool:
    from airflow_kafka_spark.errors import Fenced

    return isinstance(failure, Fenced)


def _build_records(memory: Memory, change: Change) -> list[LedgerRecord]:
    pipeline, pause = memory.pipeline, memory.pause
    # The pause that ends here is history, which older releases may ignore. It is sent first, so that a reader that sees it
    # also sees its end.
    ended = [make_control_record(pipeline, pause)] if change.action == "resume" and pause is not None else []
    kept = {control.number for control in (*memory.pending_controls, *memory.counted_resends)}
    old = [n for n in sorted(memory.controls) if n <= change.number - KEEP_CONTROLS and n not in kept]
    return [
        *ended,
        make_control_record(pipeline, change, PAUSE_VERSION if change.action == "pause" else VERSION),
        *(LedgerRecord(make_control_key(pipeline, number), None) for number in old),
    ]


# --- the pipeline and the window that are named ------------------------------------------------------------------------


def refuse_intervals(memory: Memory) -> None:
    """Refuse a command that names a data interval instead of its pipeline.

    :raises ChangeRefused: the name is that of a data interval.
    """
    for entry in memory.entries.values():
        if entry.window.interval is not None:
            raise ChangeRefused(
                f"`{memory.pipeline}` is a data interval of a pipeline",
                expected="the name of the pipeline",
                action="Leave out the last dot and the text after it",
            )


def find_window(hook: KafkaHook, request: ChangeRequest, number: int | None, name: str | None) -> tuple[Memory, int, str]:
    """Return the state of a pipeline in the ledger, and the window that a command names.

    :param hook: the cluster.
    :param request: the pipeline.
    :param number: the window's number; or give ``name``.
    :param name: a data interval's name, with or without the pipeline's before it.
    :return: the memory, the number (0 for a data interval), and the name of the data interval (empty for a number).
    :raises PipelineUnknown: the ledger has no record of the pipeline.
    :raises ChangeRefused: the pipeline's name is that of a data interval.
    :raises ValueError: neither or both of ``number`` and ``name`` are given.
    """
    if (number is None) == (not name):
        raise ValueError("Expected either a window's number, or the name of a data interval")
    memory = read_pipeline(hook, request.pipeline, request.ledger_topic).memory
    refuse_intervals(memory)
    refuse_blank(memory, request.ledger_topic)
    return memory, number or 0, (name or "").removeprefix(f"{request.pipeline}.")


def refuse_blank(memory: Memory, ledger_topic: str) -> None:
    """Refuse a pipeline that was renamed or forgotten, of which the ledger has only the record of that change.

    :raises PipelineUnknown: it holds no position, no window, no data interval and no binding.
    :raises PipelineRenamed: it has another name now.
    """
    refuse_renamed(memory)
    if memory.is_unknown:
        raise PipelineUnknown(memory.pipeline, ledger_topic)


def refuse_open_window(state: State, window: str, run: str, planned_at: str) -> None:
    """Refuse a command on a window that is not complete.

    :param state: its state.
    :param window: its name.
    :param run: the run that planned it.
    :param planned_at: when it was planned.
    :raises WindowOpen: it is not complete.
    """
    if state is not State.COMPLETE:
        error = WindowOpen(window, run, planned_at)
        error.expected, error.action = "a window that is complete", "Run the task again, which finishes the window"
        raise error


def request_change(
    hook: KafkaHook,
    memory: Memory,
    request: ChangeRequest,
    decide: Callable[[Memory], Change | None],
    beside: AccompanyingRecords | None = None,
    wait_for: tuple[bytes, ...] = (),
) -> tuple[Change | None, Memory]:
    """Write a control request, unless it has been made already or this is a dry run.

    :param memory: the state of the ledger, read without fencing. If ``decide`` refuses it, nothing is written.
    :param request: the request; a dry run writes nothing.
    :param decide: returns the change to write for a state of the ledger; None if there is nothing to do.
    :param beside: further records, which become visible together with the change.
    :param wait_for: prefixes of further keys that ``decide`` depends on, see :meth:`ControlLedger.write`.
    :return: the change, None if there was nothing to do; and the state of the ledger for which it was decided.
    :raises KafkaUnavailable: it cannot be written.
    """
    seen = memory

    def remember(found: Memory) -> Change | None:
        nonlocal seen
        seen = found
        return decide(found)

    change = remember(memory)
    if not request.dry_run:
        change = ControlLedger(hook, memory.pipeline, "", topic=request.ledger_topic).write(remember, beside, wait_for)
    return change, seen
