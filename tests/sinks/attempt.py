"""One attempt at a window, as the operator and its tasks make it; here, or in a process of its own which may be killed."""

from __future__ import annotations

import json
import os
import pickle
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from airflow_kafka_spark import faults
from airflow_kafka_spark.sinks.base import Rows, Sink, SplitWriter, WindowWriter
from airflow_kafka_spark.windows.model import Applied, Split, SplitResult
from tests.sinks.feed import Job
from tests.support.zygote import Forked


def apply(sink: Sink, job: Job) -> Applied:
    """The life of a window, as far as the sink is concerned."""
    if (done := sink.applied(job.window)) is not None:
        return done
    with sink.begin(job.window, job.splits, job.shape) as writer:
        results = write_all(writer, job)
        faults.reached("job.done")
        return writer.commit(results)


def write_all(writer: WindowWriter, job: Job) -> list[SplitResult]:
    """Do the work of Spark's tasks, one after the other."""
    return [write_split(travelled(writer.split_writer()), split, job.rows[split.index]) for split in job.splits]


def travelled(writer: SplitWriter) -> SplitWriter:
    """The writer as a task gets it."""
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
    """The result as the driver gets it: the token is JSON."""
    return SplitResult(split.index, records=records, token=json.loads(json.dumps(token)))


class Victim:
    """An attempt in a process of its own, which dies or stops at a named point.

    :param fault: ``<point>`` or ``<point>:stop``; None runs through.
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
        """True when the fault has killed it, once it is gone."""
        code = self.process.wait(120)
        assert code == -signal.SIGKILL or not self.fired, self.log.read_text()[-3000:]
        return code == -signal.SIGKILL

    def stopped(self) -> bool:
        """True once it has stopped itself; False when it ended before."""
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                return False
            if Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                return True
            time.sleep(0.01)
        raise AssertionError(f"it neither stopped nor ended:\n{self.log.read_text()[-3000:]}")

    def wake(self) -> int:
        """Let a stopped one go on to its end; its return code."""
        os.kill(self.process.pid, signal.SIGCONT)
        return self.process.wait(120)


def main(payload: str) -> None:
    """:param payload: the file with the pickled (sink, job)."""
    print("APPLIED", apply(*pickle.loads(Path(payload).read_bytes())), flush=True)
