"""Named points at which a process can be made to die or to stop, so that crash tests hit exactly the moment they mean.

Nothing happens unless the environment says so; then the signal is real. Set before the process starts:

``AIRFLOW_KAFKA_SPARK_FAULT``
    ``<point>`` or ``<point>:<action>``; action ``kill`` (default, SIGKILL to this process), ``stop`` (SIGSTOP: a zombie that
    wakes when somebody sends SIGCONT) or ``raise`` (a RuntimeError). Several of them, separated by commas, fire each by itself.
``AIRFLOW_KAFKA_SPARK_FAULT_ONCE``
    A file. The fault fires only for whoever creates it, so that the retry in the same environment gets through; when the file
    exists the fault has really fired, which the test asserts. Of several faults each has a file: ``<file>.<point>``.

The points, in the order in which a window passes them, are :data:`POINTS`, :data:`PUBLISHING` on the way to Kafka,
:data:`CLAIMING` and :data:`FOLLOWING` for data intervals, :data:`BURYING` for dead letters, and :data:`CHANGING` for offset
control.
"""

from __future__ import annotations

import os
import signal

FAULT = "AIRFLOW_KAFKA_SPARK_FAULT"
ONCE = "AIRFLOW_KAFKA_SPARK_FAULT_ONCE"

POINTS = (
    "fenced",  # the ledger is fenced and read; nothing is planned
    "planned",  # the plan is in the ledger; no work was done
    "split.mid",  # in a task: the first batch of a split was handed to the sink
    "split.flushed",  # in a task: a split is durable, not visible
    "job.done",  # Spark's job is over, every split is durable
    "sink.staged",  # the sink begins to commit
    "sink.in_transaction",  # all of the window is in the sink's transaction, before its commit
    "sink.committed",  # the sink's commit returned
    "close.begin",  # before the closing transaction
    "close.in_transaction",  # COMPLETE and the offsets are sent, not committed
    "close.committed",  # the ledger says COMPLETE, the task has not returned
)


PUBLISHING = (
    "fenced",
    "planned",
    "publish.begin",  # in a task: a split is fenced and looked for, its transaction not begun
    "publish.mid",  # in a task: some records of a split are sent
    "publish.flushed",  # in a task: all records of a split are at the brokers, its marker is not
    "publish.marked",  # in a task: the marker too, the transaction is open
    "publish.committed",  # in a task: the split is published, Spark does not know
    "job.done",
    "close.begin",
    "close.in_transaction",
    "close.committed",
)
"""The same for a window that is published to Kafka."""

CLAIMING = ("plan.written",)
"""Between ``fenced`` and ``planned``: the plan is in the ledger, and it was not looked up whether another one came first."""

FOLLOWING = (
    "group.fenced",  # an interval is complete, whoever moved the group before is shut out
    "group.in_transaction",  # the group's offsets are sent, not committed
)
"""After ``close.committed``, for a window of a data interval."""

DECIDING = ("boundaries.archived",)
"""Before a window of a data interval is planned: old boundaries are in archives, and still have records of their own."""

BURYING = (
    "dead.in_transaction",  # dead letters and the ledger's memory of them are sent, not committed
    "dead.committed",  # they are there; the sink has not taken the rest
)
"""After ``job.done``, for a window with dead letters."""

CHANGING = (
    "amend.in_transaction",  # a pipeline's offsets are changed by hand: the change is sent, not committed
    "control.in_transaction",  # the same for a pause, its end, or a replay that is asked for
)
"""Where a pipeline is changed by hand."""


def reached(point: str) -> None:
    """Tell that the process has come to ``point``: returns at once unless the environment asks for a fault here."""
    wanted = os.environ.get(FAULT)
    if not wanted:
        return
    faults = dict((name, action) for name, _, action in (item.partition(":") for item in wanted.split(",")))
    if point not in faults or not _first(f".{point}" if len(faults) > 1 else ""):
        return
    action = faults[point]
    if action == "raise":
        raise RuntimeError(f"fault injected at {point}")
    os.kill(os.getpid(), signal.SIGSTOP if action == "stop" else signal.SIGKILL)


def _first(suffix: str) -> bool:
    """True for the one process that gets to fire."""
    once = os.environ.get(ONCE)
    if not once:
        return True
    try:
        os.close(os.open(once + suffix, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
