"""The task's process, or a worker of it, dies by SIGKILL at every named point of a window's life; then it is retried and cleared.

After each: the sink holds every committed record exactly once, the group's offsets never passed what was flushed, and a further
attempt writes nothing.
"""

from __future__ import annotations

import pytest

from airflow_kafka_spark import faults
from tests.support.distribution import extended

IN_A_TASK = ("split.mid", "split.flushed")
# The next window is moved, too, if brokers or a table have something of the dead attempt. tests/windows/test_ledger_model.py
# shows that it follows a kill after any step of the ledger.
IN_A_TRANSACTION = ("split.flushed", "sink.in_transaction", "close.in_transaction")
# If only the ledger decides, one sink represents all. tests/sinks/test_contract.py kills each sink at each of its points;
# here each sink is killed once, at the point where its own commit decides.
CASES = [
    *(("files", point) for point in ("planned", "split.mid", "job.done", "sink.committed", "close.in_transaction")),
    *(extended("files", point) for point in ("fenced", "close.begin", "close.committed")),
    ("postgres", "sink.in_transaction"),
    ("postgres-split", "split.flushed"),
]
# Here the JVM dies along with the process; elsewhere an engine is used again (tests/support/engine.py).
WITH_JVM = [("files", "split.mid"), ("postgres", "sink.in_transaction")]


def flushed(point: str) -> bool:
    """Return True if the sink has committed the window when the process dies at this point."""
    return faults.POINTS.index(point) >= faults.POINTS.index("sink.committed")


@pytest.mark.faults
@pytest.mark.parametrize("kind, point", CASES)
def test_killed_then_retried_and_cleared_every_record_is_there_exactly_once(flow, kind, point):
    flow.produce(400)
    flow.run("run0")
    before = flow.committed()
    flow.produce(1100)
    victim = flow.victim("run1", fault=point, jvm=(kind, point) in WITH_JVM)
    code = victim.wait()
    assert victim.fired, victim.tail()
    assert code == (1 if point in IN_A_TASK else -9), victim.tail()
    if point in IN_A_TASK:
        assert "a Python worker of Spark was killed or crashed" in victim.tail()
        said = "Splits that are committed stay" if kind == "postgres-split" else "Nothing was committed"
        assert said in victim.tail()

    seen = len(flow.rows())
    if kind != "postgres-split":
        assert seen == (1500 if flushed(point) else 400), "a reader saw a part of the window"
    if point != "close.committed":
        stable = point != "close.in_transaction"  # there the dead attempt's transaction is still open over the offsets
        assert flow.committed(stable=stable) == before, "the group's offsets moved before the window was closed"

    retried = flow.run("run1")
    assert flow.check() == 1500
    assert flow.run("run1") == retried, "a cleared task does nothing and returns the same report"
    assert flow.check() == 1500
    if point in IN_A_TRANSACTION:
        flow.produce(50)
        flow.run("run2")
        assert flow.check() == 1550


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["postgres"])
def test_killed_again_and_again_the_last_attempt_still_finishes_the_same_window(flow, kind):
    flow.produce(900)
    for point in ("planned", "sink.staged", "sink.in_transaction", "close.begin"):
        victim = flow.victim("run1", fault=point)
        assert victim.wait() == -9 and victim.fired, victim.tail()
        flow.produce(10)
    report = flow.run("run1")
    assert (report["window"], report["records_read"], report["attempts"]) == ("0000000001", 900, 5)
    flow.run("run2")
    assert flow.check() == 940
