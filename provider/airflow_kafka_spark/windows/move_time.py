"""The parts of the time that moving a window takes, as its tasks measure them and the driver adds them up.

This module is used in Spark's tasks, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

WORK = ("read", "decode", "write", "wait")
"""Names of the parts of a task's time."""


class Timed(Generic[T]):
    """Iterates over items, and measures the time spent waiting for them.

    :param items: the items.
    """

    def __init__(self, items: Iterable[T]) -> None:
        self._items = iter(items)
        self.seconds = 0.0

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        begun = time.monotonic()
        try:
            return next(self._items)
        finally:
            self.seconds += time.monotonic() - begun


def split_seconds(
    total: float, arriving: float, writing: float, read: Mapping[str, float], *, is_one_stage: bool
) -> dict[str, float]:
    """Return the seconds of the task that writes a split: ``read``, ``decode``, ``write`` and ``wait``.

    :param total: all seconds that the task took for the split.
    :param arriving: seconds spent waiting for its rows.
    :param writing: seconds spent in the sink's writer.
    :param read: ``read`` and ``decode``, as far as the reader of the split has measured them.
    :param is_one_stage: True if this task has read the split itself; False if Spark computes between reader and writer, so that
        this task waits.
    """
    reading, decoding = read.get("read", 0.0), read.get("decode", 0.0)
    own = max(0.0, total - arriving - writing)
    waiting = 0.0
    if is_one_stage:
        decoding = max(0.0, total - reading - writing)
    else:
        decoding, waiting = decoding + own, max(0.0, arriving - reading - decoding)
    return {"read": reading, "decode": decoding, "write": writing, "wait": waiting}


def parts_of_move(
    move: float, jobs: Sequence[tuple[float, float]], move_began: float, work: Mapping[str, float], work_began: float
) -> dict[str, float]:
    """Return the seconds of the parts of ``move``, which add up to it.

    ``session``: from the start to the first job, while Spark's session starts; ``workers``: from there to the start of the first
    task; ``read``, ``decode`` (transforms included) and ``write``: the time of the jobs, in the proportions that their tasks have
    measured; ``wait``: everything else, as waiting for Spark and the sink's commit. If tasks have measured nothing, like those of
    an earlier release, ``write`` is the whole time of the jobs.

    :param move: seconds of the step ``move``.
    :param jobs: start and end of each Spark job of the window, seconds since the epoch; empty if nothing was moved.
    :param move_began: start of the step, seconds since the epoch.
    :param work: seconds of all tasks together, by part.
    :param work_began: start of the first task, by the clock of its machine; 0 if unknown.
    """
    if not jobs:
        return {}
    first, running = jobs[0][0], sum(max(0.0, end - begin) for begin, end in jobs)
    session = min(max(0.0, first - move_began), move)
    left = min(running, move - session)
    workers = min(max(0.0, work_began - first), left) if work_began else 0.0
    left -= workers
    total = sum(work.values())
    is_measured = total > 0 and "write" in work
    shares = {part: left * seconds / total for part, seconds in work.items()} if is_measured else {"write": left}
    parts = {"session": session, "workers": workers, **{part: shares.get(part, 0.0) for part in ("read", "decode", "write")}}
    return {**parts, "wait": max(0.0, move - sum(parts.values()))}
