"""Spark ends during a task: one error reports this, and the next window of the process starts a new Spark."""

from __future__ import annotations

import os
import signal

import pytest

from tests.support import warm, workers
from tests.support.again import Again
from tests.support.runs import Victim


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["files"])
def test_a_killed_jvm_is_one_clear_error_and_the_same_process_moves_the_window_and_the_next_one(flow, kind):
    flow.produce(600)
    once = flow.directory / "fault"
    victim = Victim(Again, {**flow.arguments, "max_records": 300}, "run1", fault="split.mid:stop", once=once, jvm=True)
    try:
        victim.wait_stopped()
        worker = workers.wait_stopped(once, above=warm.jvm_of(victim.log) if warm.is_on() else victim.process.pid)
        jvm = next(pid for pid in workers.ancestors(worker) if "java" in os.path.basename(os.readlink(f"/proc/{pid}/exe")))
        os.kill(jvm, signal.SIGKILL)
        assert victim.wait() == 0, victim.tail()
    finally:
        victim.end()
    found = victim.result()
    # The JVM of a warm process is no child of the task, which cannot learn its exit code.
    reason = "its JVM does not answer" if warm.is_on() else "its JVM was killed by SIGKILL"
    assert f"cannot be used: {reason}" in found["said"] and "py4j" not in found["said"].lower()
    first, second = found["reports"]
    assert (first["window"], first["attempts"], second["window"]) == ("0000000001", 2, "0000000002")
    assert first["records_read"] and second["records_read"]
    assert len(flow.rows()) == first["records_read"] + second["records_read"]
