"""Lag of a consumer, the times at which it is expected to run, and the status that follows from its history.

The functions are pure: offsets that were read from Kafka are arguments. Instants of a cadence are seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise
from typing import Any, Literal, Protocol

from airflow_kafka_spark.windows.model import TopicPartition
from airflow_kafka_spark.windows.times import parse_iso

PERIODS = 1.5
"""Number of periods of the schedule for which a consumer may be silent: one, and half of one because a run may start late or
take long."""
LATE_SECONDS = 60.0
"""Minimum delay in seconds after which a run of a timetable counts as late, however short its period is."""
MIN_GAPS = 2
"""Minimum number of gaps between windows from which the period of a pipeline is estimated."""

_SCHEDULED = "scheduled__"
_UNSCHEDULED = ("manual__", "asset_triggered__", "dataset_triggered__", "operator_triggered__", "backfill__")


class Cadence(Protocol):
    """The schedule of a consumer: the times at which its runs are due."""

    def find_due_after(self, since: float) -> float | None:
        """Return the time at which the first run after ``since`` is due; None if no run is planned."""
        ...

    def compute_deadline(self, since: float) -> float | None:
        """Return the time until which a consumer that was last active at ``since`` may be silent; None for no limit."""
        ...


@dataclass(frozen=True)
class Periodic:
    """Runs that come once per period, at an unknown instant within it.

    :param period: seconds from one run to the next.
    """

    period: float

    def find_due_after(self, since: float) -> float | None:
        return since + self.period

    def compute_deadline(self, since: float) -> float | None:
        return since + PERIODS * self.period


@dataclass(frozen=True)
class Timetabled:
    """Runs at the instants of a timetable. A run is late once half of the time to the next run is over.

    :param next_run: returns the first run after an instant, or None.
    """

    next_run: Callable[[float], float | None]

    def find_due_after(self, since: float) -> float | None:
        return self.next_run(since)

    def compute_deadline(self, since: float) -> float | None:
        due = self.next_run(since)
        if due is None:
            return None
        following = self.next_run(due)
        gap = (due - since) if following is None else (following - due)
        return due + max(LATE_SECONDS, (PERIODS - 1) * gap)


@dataclass(frozen=True)
class Unscheduled:
    """Runs without a schedule, which start when they are triggered. None of them can be missed."""

    def find_due_after(self, since: float) -> float | None:
        return None

    def compute_deadline(self, since: float) -> float | None:
        return None


@dataclass(frozen=True)
class CompletedWindow:
    """The facts of a window's ledger record from which a schedule is derived.

    :param completed_at: time at which the window was completed.
    :param run: the run that planned it, ``<dag_id>/<run_id>/<task_id>``.
    :param interval: its data interval in milliseconds since the epoch; None without one.
    """

    completed_at: float
    run: str = ""
    interval: tuple[int, int] | None = None


def derive_cadence(windows: Iterable[CompletedWindow]) -> Cadence | None:
    """Return the cadence that can be derived from the windows of a ledger; None if there are too few.

    Windows that catch up follow each other faster than the schedule, so the time between completions is used last. The first
    value that is known counts: the length of the data intervals; the time between the instants in the ids of scheduled runs; the
    time between completions. Runs that were all triggered by hand or by assets have no cadence.

    :param windows: complete windows, in any order.
    """
    known = sorted(windows, key=lambda window: window.completed_at)
    lengths = [(window.interval[1] - window.interval[0]) / 1000 for window in known if window.interval]
    if lengths:
        return Periodic(max(lengths))
    named = [_run_id(window.run) for window in known]
    scheduled = sorted({at for run_id in named if (at := _parse_scheduled_time(run_id)) is not None})
    if len(scheduled) > 1:
        return Periodic(max(after - before for before, after in pairwise(scheduled)))
    if scheduled:
        return None
    if named and all(run_id.startswith(_UNSCHEDULED) for run_id in named):
        return Unscheduled()
    period = find_usual_period([window.completed_at for window in known])
    return None if period is None else Periodic(period)


def find_usual_period(times: Sequence[float]) -> float | None:
    """Return the longest time between two successive windows of a pipeline, in seconds; None if there are fewer than
    :data:`MIN_GAPS` such times.

    :param times: completion times of its windows, ascending.
    """
    gaps = [after - before for before, after in pairwise(times)]
    return max(gaps) if len(gaps) >= MIN_GAPS else None


def _run_id(run: str) -> str:
    """Return the run id in the name of a run. Only the run id may contain slashes."""
    return run.partition("/")[2]


def _parse_scheduled_time(run_id: str) -> float | None:
    """Return the instant in the id of a scheduled run; None for any other run."""
    if not run_id.startswith(_SCHEDULED):
        return None
    text = run_id.removeprefix(_SCHEDULED).partition("/")[0]
    try:
        found = parse_iso(text)
    except ValueError:
        return None
    return found.timestamp() if found.tzinfo else None


Per = Literal["total", "partition"]

OBSERVATIONS = 10
"""Number of newest observations that a verdict is based on, as in Burrow."""
MIN_OBSERVATIONS = 3
"""Minimum number of observations that show a pattern."""


class Status(str, Enum):
    """The state of a consumer, in ascending order of severity."""

    OK = "OK"
    WARN = "WARN"
    STALL = "STALL"
    STOP = "STOP"
    REWIND = "REWIND"

    @property
    def rank(self) -> int:
        return list(Status).index(self)


@dataclass(frozen=True)
class BacklogHead:
    """The first record of a backlog, as a read_committed reader sees it.

    :param offset: its offset.
    :param timestamp: its timestamp, milliseconds since the epoch; None if the record has none.
    """

    offset: int
    timestamp: int | None


@dataclass(frozen=True)
class PartitionLag:
    """The offsets of a consumer and of the log in one partition.

    :param committed: the next offset that the consumer reads; None if it has never committed, or if its offset has expired.
    :param low: the first offset that is left in the log.
    :param end: the last stable offset, at which a reader of committed records has to stop.
    :param head: the first record from the committed offset up to ``end``; None if there are only transaction markers, aborted
        records and compacted ones.
    :param held_back: number of offsets after ``end``, which belong to open transactions.
    :param seconds: age of ``head``, at least 0; 0 without one, None if it has no timestamp.
    """

    committed: int | None
    low: int
    end: int
    head: BacklogHead | None = None
    held_back: int = 0
    seconds: float | None = 0.0

    @property
    def start(self) -> int:
        """The offset at which the reader continues: the committed offset, or the first offset that is left in the log."""
        return max(self.low, self.committed or 0)

    @property
    def behind(self) -> bool:
        """True if there is a record to read."""
        return self.head is not None

    @property
    def records(self) -> int:
        """Number of offsets from the first unread record to the end: an upper bound of the records, and 0 only without any."""
        return max(self.end - self.head.offset, 1) if self.head else 0

    @property
    def lost(self) -> int:
        """The number of offsets that retention has deleted before they were read."""
        return max(0, self.low - self.committed) if self.committed is not None else 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "committed": self.committed,
            "end": self.end,
            "records": self.records,
            "seconds": self.seconds,
            "lost": self.lost,
            "held_back": self.held_back,
        }


@dataclass(frozen=True)
class Lag:
    """The lag of a consumer in all of its partitions.

    :param of: name of the group or the pipeline.
    :param partitions: state of each partition.
    :param now: time of the measurement, seconds since the epoch.
    :param active: True if the consumer's group has members.
    """

    of: str
    partitions: Mapping[TopicPartition, PartitionLag]
    now: float
    active: bool = False

    def count_records(self, per: Per = "total") -> int:
        """Return the sum over the partitions, or the largest number of one partition."""
        every = [state.records for state in self.partitions.values()]
        return sum(every) if per == "total" else max(every, default=0)

    @property
    def seconds(self) -> float | None:
        """Age of the oldest unread record in seconds; None if an unread record has no timestamp."""
        ages = [state.seconds for state in self.partitions.values()]
        known = [age for age in ages if age is not None]
        return max(known, default=0.0) if len(known) == len(ages) else None

    @property
    def committed(self) -> dict[str, int | None]:
        """The committed offsets, by ``topic-partition``."""
        return {str(tp): state.committed for tp, state in sorted(self.partitions.items())}

    @property
    def line(self) -> str:
        """The lag as one line for a log."""
        seconds = self.seconds
        age = (
            "" if not self.count_records() else f", the oldest {'of unknown age' if seconds is None else f'{seconds:,.1f} s old'}"
        )
        lost = sum(state.lost for state in self.partitions.values())
        deleted = f", {lost:,} offsets were deleted before they were read" if lost else ""
        return f"{self.of} is {self.count_records():,} records behind{age}{deleted} ({len(self.partitions)} partitions)"


@dataclass(frozen=True)
class Threshold:
    """The condition of a lag sensor: a lag that is small enough, or a backlog that is large enough.

    :param at_most_records: maximum number of unread records.
    :param at_most_seconds: maximum age of the oldest unread record. If both maxima are given, both have to hold.
    :param at_least_records: minimum number of unread records.
    :param at_least_seconds: minimum age of the oldest unread record. If both minima are given, one is enough.
    :param per: ``total`` compares the sum of all partitions; ``partition`` compares each one: none of them may exceed a maximum,
        and one that reaches a minimum is enough.
    """

    at_most_records: int | None = None
    at_most_seconds: float | None = None
    at_least_records: int | None = None
    at_least_seconds: float | None = None
    per: Per = "total"

    def is_reached(self, lag: Lag) -> bool:
        """Return True if the lag meets the threshold. A record without a timestamp meets no limit of age."""
        records, seconds = lag.count_records(self.per), lag.seconds
        at_most = [
            limit is None or (value is not None and value <= limit)
            for limit, value in ((self.at_most_records, records), (self.at_most_seconds, seconds))
        ]
        at_least = [
            limit is not None and value is not None and value >= limit
            for limit, value in ((self.at_least_records, records), (self.at_least_seconds, seconds))
        ]
        if self.at_most_records is None and self.at_most_seconds is None:
            return any(at_least)
        return all(at_most)

    def __str__(self) -> str:
        where = " in every partition" if self.per == "partition" and self.at_most_records is not None else ""
        where = where or (" in one partition" if self.per == "partition" and self.at_least_records is not None else "")
        parts = (
            (self.at_most_records, "at most {:,} records" + where, " and "),
            (self.at_most_seconds, "at most {:,g} s", " and "),
            (self.at_least_records, "at least {:,} records" + where, " or "),
            (self.at_least_seconds, "at least {:,g} s", " or "),
        )
        given = [(text.format(limit), joint) for limit, text, joint in parts if limit is not None]
        return given[0][1].join(text for text, _ in given) if given else "nothing"


# --- status of a consumer --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Observation:
    """A consumer's offset and lag in one partition at one moment.

    :param time: seconds since the epoch.
    :param committed: committed offset of the consumer; None without one.
    :param records: its lag in records; None if unknown.
    :param seconds: age of the first unread record at that time; None if unknown.
    :param active: True for a sign of life other than a moved offset: a window was completed, or the group had members.
    :param has_offset: False if ``committed`` is unknown, so that the observation is only a sign of life.
    """

    time: float
    committed: int | None
    records: int | None = None
    seconds: float | None = None
    active: bool = False
    has_offset: bool = True


@dataclass(frozen=True)
class Verdict:
    """A status with its reason."""

    status: Status
    reason: str = ""


def judge_partition(history: Sequence[Observation], cadence: Cadence | None = None) -> Verdict:
    """Return a partition's status by Burrow's rules, adapted to consumers that run by a schedule.

    The first rule that applies decides:

    - no lag now, or in one of the last :data:`OBSERVATIONS` observations, and no run is late since then: ``OK``;
    - unread records, but no committed offset, as after a group has expired or was deleted: ``STOP``;
    - the committed offset went back: ``REWIND``;
    - no sign of life for longer than the schedule allows: ``STOP``;
    - signs of life, but the offset does not move although a record is waiting: ``STALL``;
    - the lag never decreases: ``WARN``;
    - otherwise ``OK``.

    With a ``cadence`` a consumer may be silent until the first run after its last sign of life is late. A growing lag is no
    warning in that time, since lags are compared at commits only. Silence is counted from the arrival of the first unread record
    at the earliest. Without a cadence, Burrow's rule applies: ``STOP`` if the silence is longer than the time that all observed
    commits took.

    :param history: at least one observation, the oldest first; the last one is the present state.
    :param cadence: the schedule of the consumer; None if it runs all the time, or if the schedule is unknown.
    """
    now = history[-1]
    if now.records == 0:
        return Verdict(Status.OK, "caught up")
    if now.committed is None:
        return Verdict(Status.STOP, "no committed offset: nothing was ever committed, or it has expired")
    recent = history[-OBSERVATIONS:]
    if any(seen.records == 0 and not _is_late(cadence, seen.time, now.time) for seen in recent):
        return Verdict(Status.OK, "was caught up a short while ago")
    back = _find_step_back(recent)
    if back is not None:
        return Verdict(Status.REWIND, f"the committed offset went back from {back[0]} to {back[1]}")
    return _find_silence(history, cadence) or _find_stall(history) or _find_growth(recent, cadence) or Verdict(Status.OK)


def _is_late(cadence: Cadence | None, since: float, now: float) -> bool:
    """Return True if the first run that was due after ``since`` is late."""
    deadline = cadence.compute_deadline(since) if cadence is not None else None
    return deadline is not None and now > deadline


def _find_step_back(recent: Sequence[Observation]) -> tuple[int, int] | None:
    known = [seen.committed for seen in recent if seen.committed is not None]
    return next(((before, after) for before, after in pairwise(known) if after < before), None)


def _list_signs(history: Sequence[Observation]) -> list[float]:
    """Return the times at which the consumer was active."""
    moved = [after.time for before, after in _pair_known_offsets(history) if after.committed != before.committed]
    return sorted({*moved, *(seen.time for seen in history if seen.active)})


def _pair_known_offsets(history: Sequence[Observation]) -> pairwise[tuple[Observation, Observation]]:
    """Return pairs of successive observations whose offsets are known."""
    return pairwise(seen for seen in history if seen.has_offset)


def _find_silence(history: Sequence[Observation], cadence: Cadence | None) -> Verdict | None:
    now, signs = history[-1], _list_signs(history)
    waiting = [now.seconds] if now.seconds is not None else []
    # Without any sign of life the consumer is silent at least since the first unread record has arrived.
    silence = min([now.time - signs[-1], *waiting]) if signs else max([now.time - history[0].time, *waiting])
    if cadence is not None:
        since = now.time - silence
        if not _is_late(cadence, since, now.time):
            return None
        due = cadence.find_due_after(since) or now.time
        return Verdict(Status.STOP, f"no sign of life for {silence:,.0f} s; a run was due {now.time - due:,.0f} s ago")
    if len(signs) < MIN_OBSERVATIONS or silence <= (usual := signs[-1] - signs[0]):
        return None
    return Verdict(Status.STOP, f"no sign of life for {silence:,.0f} s, {usual:,.0f} s are usual")


def _find_stall(history: Sequence[Observation]) -> Verdict | None:
    now = history[-1]
    since = now.time - now.seconds if now.seconds is not None else history[0].time
    waiting = [seen for seen in history if seen.time >= since]
    moved = any(seen.has_offset and seen.committed != now.committed for seen in waiting)
    if moved or sum(seen.active for seen in waiting) < MIN_OBSERVATIONS:
        return None
    return Verdict(Status.STALL, f"the consumer is active, but its offset stays at {now.committed}")


def _find_growth(recent: Sequence[Observation], cadence: Cadence | None) -> Verdict | None:
    if cadence is None:
        lags = [seen.records for seen in recent if seen.records is not None]
    else:
        commits = [after for before, after in _pair_known_offsets(recent) if after.committed != before.committed]
        lags = [seen.records for seen in commits if seen.records is not None]
    # Lags from before the consumer was last caught up do not count.
    lags = lags[max((n + 1 for n, lag in enumerate(lags) if lag == 0), default=0) :]
    if len(lags) < MIN_OBSERVATIONS or any(after < before for before, after in pairwise(lags)):
        return None
    return Verdict(Status.WARN, f"the lag never decreases: {lags[0]:,} to {lags[-1]:,} records")


@dataclass
class History:
    """The observations of a consumer, at most :data:`OBSERVATIONS` for each partition.

    :param cadence: the schedule of the consumer; None if unknown.
    """

    cadence: Cadence | None = None
    _seen: dict[TopicPartition, list[Observation]] = field(default_factory=dict)

    def add(self, tp: TopicPartition, observation: Observation) -> None:
        seen = self._seen.setdefault(tp, [])
        seen.append(observation)
        del seen[:-OBSERVATIONS]

    def judge(self, lag: Lag, past: Mapping[TopicPartition, Sequence[Observation]]) -> dict[TopicPartition, Verdict]:
        """Add a lag that was just measured, and return the status of every partition.

        :param past: earlier observations from another source, such as a ledger.
        """
        verdicts = {}
        for tp, state in lag.partitions.items():
            self.add(tp, Observation(lag.now, state.committed, state.records, state.seconds, lag.active))
            known = sorted([*past.get(tp, ()), *self._seen[tp]], key=lambda seen: seen.time)
            verdicts[tp] = judge_partition(known, self.cadence)
        return verdicts


def find_worst_verdict(verdicts: Mapping[TopicPartition, Verdict]) -> Verdict:
    """Return the most severe of several verdicts, with the partition in its reason; ``OK`` without any."""
    tp, verdict = max(verdicts.items(), key=lambda item: item[1].status.rank, default=(None, Verdict(Status.OK)))
    if tp is None or verdict.status is Status.OK:
        return Verdict(verdict.status)
    return Verdict(verdict.status, f"{tp}: {verdict.reason}")
