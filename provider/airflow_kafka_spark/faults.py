"""Fault injection for crash tests: named points at which a process can be killed or stopped.

Without the environment variables nothing happens. With them the process receives a real signal. They are set before the process
starts:

``AIRFLOW_KAFKA_SPARK_FAULT``
    ``<point>`` or ``<point>:<action>``. The action is ``kill`` (default, SIGKILL to this process), ``stop`` (SIGSTOP, the process
    continues on SIGCONT) or ``raise`` (a RuntimeError). Several faults are separated by commas; each fires separately.
``AIRFLOW_KAFKA_SPARK_FAULT_ONCE``
    Path of a file. The fault fires only for the process that creates the file, so a retry with the same environment passes. The
    file proves to a test that the fault has fired. With several faults the file of each is ``<file>.<point>``.

The constants list the points in the order in which a window passes them.
"""

from __future__ import annotations

import os
import signal

FAULT = "AIRFLOW_KAFKA_SPARK_FAULT"
ONCE = "AIRFLOW_KAFKA_SPARK_FAULT_ONCE"

POINTS = (
    "fenced",  # the ledger is fenced and read, nothing is planned
    "planned",  # the plan is in the ledger, no data was read
    "split.mid",  # in a task: the first batch of a split was passed to the sink
    "split.flushed",  # in a task: a split is durable, not visible
    "job.done",  # Spark's job has ended, every split is durable
    "sink.staged",  # the sink begins to commit
    "sink.in_transaction",  # the whole window is in the sink's transaction, before its commit
    "sink.committed",  # the sink's commit has returned
    "close.begin",  # before the closing transaction
    "close.in_transaction",  # COMPLETE and the offsets are sent, not committed
    "close.committed",  # the ledger has COMPLETE, the task has not returned
)
"""Points of a window from Kafka to a sink."""

PUBLISHING = (
    "fenced",
    "planned",
    "publish.fence",  # in a task: a split is not fenced yet
    "publish.begin",  # in a task: a split is fenced and its marker was looked up, its transaction has not begun
    "publish.mid",  # in a task: some records of a split are sent
    "publish.flushed",  # in a task: all records of a split are on the brokers, its marker is not
    "publish.marked",  # in a task: its marker is, too; the transaction is open
    "publish.committed",  # in a task: the split is published, Spark does not know yet
    "job.done",
    "close.begin",
    "close.in_transaction",
    "close.committed",
)
"""Points of a window that is published to Kafka."""

CAPTURING = ("cdc.advance",)
"""Point of a window of a database's log: the ledger has COMPLETE, and the slot was not advanced."""

PLANNING = ("plan.written",)
"""Point between ``fenced`` and ``planned``: the plan is in the ledger, and it is not yet known whether another plan was first."""

GROUP = (
    "group.fenced",  # an interval is complete, earlier attempts to move the group are fenced
    "group.in_transaction",  # the group's offsets are sent, not committed
)
"""Points after ``close.committed`` of a window of a data interval, which moves the consumer group."""

OLD_INTERVALS = ("old.fenced",)
"""Point after ``group.fenced``: attempts at old intervals are fenced, and the records of their windows are removed next."""

BOUNDARIES = ("boundaries.archived",)
"""Point before a data interval is planned: old boundaries are archived, and their own records still exist."""

DEAD_LETTERS = (
    "dead.in_transaction",  # dead letters and the ledger's record of them are sent, not committed
    "dead.committed",  # they are committed, the other records are not in the sink
)
"""Points after ``job.done`` of a window with dead letters."""

CONTROL = (
    "change.in_transaction",  # a change of a pipeline's position by hand is sent, not committed
    "control.in_transaction",  # a request to pause, resume or replay is sent, not committed
)
"""Points of changes by hand."""

COMPACTING = (
    "sink.compacting",  # the window is committed, and the version of the table that is going to be compacted was read
    "sink.compacted",  # the compaction is committed
)
"""Points of a compaction after a window, with ``optimize=`` of ``DeltaSink`` and ``IcebergSink``."""


def reached(point: str) -> None:
    """Inject the fault that the environment asks for at ``point``; return at once if it asks for none.

    :param point: name of the point.
    :raises RuntimeError: the action of the fault is ``raise``.
    """
    wanted = os.environ.get(FAULT)
    if not wanted:
        return
    faults = dict((name, action) for name, _, action in (item.partition(":") for item in wanted.split(",")))
    if point not in faults or not _is_first(f".{point}" if len(faults) > 1 else ""):
        return
    action = faults[point]
    if action == "raise":
        raise RuntimeError(f"fault injected at {point}")
    os.kill(os.getpid(), signal.SIGSTOP if action == "stop" else signal.SIGKILL)


def _is_first(suffix: str) -> bool:
    """Return True in the only process that may fire this fault."""
    once = os.environ.get(ONCE)
    if not once:
        return True
    try:
        os.close(os.open(once + suffix, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
