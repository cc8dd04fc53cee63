"""The parts of the time that moving a window takes: what its tasks measure, and how the driver adds it up.

Used in Spark's tasks, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

WORK = ("read", "decode", "write", "wait")
"""Parts of the work of tasks."""


class Timed(Generic[T]):
    """Iterates over items, and measures how long they were waited for.

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

    :param total: seconds that it took for the split.
    :param arriving: those until its rows had arrived.
    :param writing: those of the sink's writer.
    :param read: ``read`` and ``decode``, as far as they were measured where the split was read.
    :param is_one_stage: True if the same task has read the split; False if Spark computes in between, which is waited for.
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

    ``session``: until Spark's session was there and its first job began; ``workers``: until the first task of that job worked;
    ``read``, ``decode`` (transforms included) and ``write``: the time of the jobs, divided as their tasks divide theirs;
    ``wait``: everything else, as waiting for Spark and the sink's commit. Where tasks do not tell,
    as those of an earlier release, ``write`` is the whole time of the jobs.

    :param move: seconds of the step.
    :param jobs: beginning and end of each Spark job of the window, seconds since the epoch. Empty: nothing was moved.
    :param move_began: when the step began, seconds since the epoch.
    :param work: seconds of all tasks together, by part.
    :param work_began: when the first task began; 0 where that is not known. Its clock may be another machine's.
    """
    if not jobs:
        return {}
    first, running = jobs[0][0], sum(max(0.0, end - begin) for begin, end in jobs)
    session = min(max(0.0, first - move_began), move)
    left = min(running, move - session)
    workers = min(max(0.0, work_began - first), left) if work_began else 0.0
    left -= workers
    told = sum(work.values())
    shares = {part: left * seconds / told for part, seconds in work.items()} if told > 0 and "write" in work else {"write": left}
    parts = {"session": session, "workers": workers, **{part: shares.get(part, 0.0) for part in ("read", "decode", "write")}}
    return {**parts, "wait": max(0.0, move - sum(parts.values()))}
