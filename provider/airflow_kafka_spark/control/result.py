"""The result of every change of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from airflow_kafka_spark.control.pipelines import open_entries
from airflow_kafka_spark.windows.binding import Binding
from airflow_kafka_spark.windows.changes import Action, Change
from airflow_kafka_spark.windows.memory import Entry, Memory
from airflow_kafka_spark.windows.model import Gap, OffsetRange, State, TopicPartition


@dataclass(frozen=True)
class OpenWindow:
    """A window that is planned and not complete. An attempt may be working on it.

    :param name: its name, ``<pipeline>#<number>``, or that of the ledger of a data interval.
    :param number: its number.
    :param run: the run that planned it.
    :param planned_at: UTC instant, ISO 8601; empty where it is not known.
    :param attempts: how many attempts have worked on it; 0 where it is not known.
    :param attempt_began: when the last of them began, UTC, ISO 8601; empty where it is not known.
    """

    name: str
    number: int
    run: str
    planned_at: str
    attempts: int = 0
    attempt_began: str = ""

    @classmethod
    def of(cls, entry: Entry) -> OpenWindow:
        window, attempt = entry.window, entry.attempt
        return cls(str(window), window.number, window.run, window.planned_at, attempt.number, attempt.started_at)


@dataclass(frozen=True)
class Move:
    """The move of a pipeline's position in one partition.

    :param before: its offset before; None in a partition of which it had read nothing.
    :param after: its offset after the change.
    :param wanted: the offset that a shift would have led to, had the log not ended before; None elsewhere.
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
    :param replay: how often it was replayed before.
    :param ranges: the offsets that are moved once more.
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

    The command line, the operator and the pages in Airflow's UI show this value. What an action does not concern stays empty.

    :param action: what was asked for.
    :param change: the number of the change in the ledger; of a dry run, the number that it would get. Where nothing had to be
        done: the number of the change that is in force, 0 without one.
    :param who: who asked for it.
    :param why: what for.
    :param dry_run: True if nothing was changed because only a preview was asked for.
    :param changed: False if nothing had to be done: the pipeline was paused already, or the same request is pending.
    :param group_id: the consumer group that was moved or deleted with it; None if there is none, or it stays.
    :param open_windows: windows that are planned and not complete, and that stay as they are.
    :param given_up: windows that were open, and are given up.
    :param moves: where the pipeline stood and stands, by partition.
    :param skipped: offsets that are never moved to the sink.
    :param records: of ``forget``: how many records of the ledger were tombstoned.
    :param renamed_to: of ``rename``: the new name.
    :param position: of ``rename``: the offsets at which the pipeline goes on.
    :param last_window: of ``rename``: the number of the last complete window, from which the numbers go on.
    :param window: of ``replay``: the window that is moved once more.
    :param sent_again: of ``resend``: the dead letters that were sent again, by the partition that they came from.
    :param sent_of: of ``resend``: the window, by its number or the name of its data interval.
    :param binding: of ``rebind``: what the pipeline is bound to until then; None where that is not known.
    :param paused_by: of ``pause`` and ``resume``: the pause that was in force before; None without one.
    :param warnings: what to know about it, in sentences.
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

    @property
    def skipped_offsets(self) -> int:
        """The number of offsets that are skipped: an upper bound of the records."""
        return sum(gap.end - gap.start for gap in self.skipped)


def open_windows(memory: Memory) -> tuple[OpenWindow, ...]:
    """Return the windows and data intervals that are planned and not complete."""
    intervals = [s for _, s in sorted(memory.intervals.recent.items()) if s.state is State.PLANNED]
    return (
        *(OpenWindow.of(entry) for entry in open_entries(memory)),
        *(OpenWindow(s.interval.ledger_name(memory.pipeline), 1, s.run, "") for s in intervals),
    )
