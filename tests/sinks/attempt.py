"""One attempt at a window, as the operator and its tasks make it; in this process or in a separate process that may be killed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from airflow_kafka_spark import faults
from airflow_kafka_spark.sinks.base import Rows, Sink, SplitWriter, WindowWriter
from airflow_kafka_spark.windows.model import Applied, Split, SplitResult
from tests.sinks.feed import Feed, Job
from tests.support.zygote import Forked


def apply(sink: Sink, job: Job) -> Applied:
    """Run the sink's part of a window's life."""
    if (done := sink.find_applied(job.window)) is not None:
        return done
    with sink.begin(job.window, job.splits, job.shape) as writer:
        results = write_all(writer, job)
        faults.reached("job.done")
        return writer.commit(results)


def write_all(writer: WindowWriter, job: Job) -> list[SplitResult]:
    """Do the work of Spark's tasks, one after the other."""
    return [write_split(travelled(writer.make_split_writer()), split, job.rows[split.index]) for split in job.splits]


def travelled(writer: SplitWriter) -> SplitWriter:
    """Return the writer as a task gets it, pickled and unpickled."""
    return pickle.loads(pickle.dumps(writer))


def write_split(writer: SplitWriter, split: Split, batches: Iterable[Rows]) -> SplitResult:
    """Do the work of one task."""
    writer.open(split)
    count = 0
    try:
        for rows in batches:
            writer.write(rows)
            count += rows.batch.num_rows
            faults.reached("split.mid")
        token = writer.close()
    except BaseException:
        writer.abort()
        raise
    faults.reached("split.flushed")
    return result_of(split, count, token)


def result_of(split: Split, records: int, token: Any) -> SplitResult:
    """Return the result as the driver gets it, with the token as JSON."""
    return SplitResult(split.index, records=records, token=json.loads(json.dumps(token)))


class Victim:
    """An attempt in a separate process, which dies or stops at a named point.

    :param fault: ``<point>`` or ``<point>:stop``; None runs to the end.
    :param scratch: a directory for the files of this class.
    """

    def __init__(self, sink: Sink, job: Job, fault: str | None, scratch: Path) -> None:
        scratch.mkdir(parents=True, exist_ok=True)
        payload, self.once, self.log = scratch / "attempt.pickle", scratch / "fired", scratch / "log"
        payload.write_bytes(pickle.dumps((sink, job)))
        env = dict(os.environ)
        if fault:
            env |= {faults.FAULT: fault, faults.ONCE: str(self.once)}
        self.process = Forked(str(payload), env, self.log, "sink")

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(120)

    @property
    def fired(self) -> bool:
        return self.once.exists()

    def died(self) -> bool:
        """Wait until the process is gone; return True if the fault has killed it."""
        code = self.process.wait(120)
        assert code == -signal.SIGKILL or not self.fired, self.log.read_text()[-3000:]
        return code == -signal.SIGKILL

    def stopped(self) -> bool:
        """Return True once the process has stopped itself; False if it has ended before."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                return False
            if Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return True
            time.sleep(0.01)
        raise AssertionError(f"it neither stopped nor ended:\n{self.log.read_text()[-3000:]}")

    def wake(self) -> int:
        """Let a stopped process run to its end; return its return code."""
        os.kill(self.process.pid, signal.SIGCONT)
        return self.process.wait(120)


def main(payload: str) -> None:
    """:param payload: the file with the pickled (sink, job)."""
    print("APPLIED", apply(*pickle.loads(Path(payload).read_bytes())), flush=True)


class TableIds(Protocol):
    """A table under test, whose rows have ids."""

    @property
    def sink(self) -> Sink: ...
    def ids(self) -> Iterable[int]: ...


def repeat_killed_attempt(
    table: TableIds, feed: Feed, point: str, directory: Path, of_others: Callable[[int], None] | None = None
) -> None:
    """Kill an attempt at the second of three windows, and repeat it. Assert that each record is in the table once.

    :param point: the point at which it is killed.
    :param of_others: lets another writer add a row of this id after the kill.
    """
    first, job, third = feed.next(3, 2, 1), feed.next(), feed.next(1, 1, 1)
    apply(table.sink, first)
    with Victim(table.sink, job, point, directory) as victim:
        assert victim.died()
    assert Counter(table.ids()) == Counter(first.ids + (job.ids if point == "sink.committed" else []))
    others = [-1] if of_others is not None else []
    if of_others is not None:
        of_others(-1)
    for one in (job, third):
        apply(table.sink, one)
    assert Counter(table.ids()) == Counter([*first.ids, *job.ids, *third.ids, *others])
