"""The process dies by SIGKILL between dead letters and sink, after both, and during the close; then the window is retried.

After each: every good record is in the sink, every bad one in the dead letter topic, each exactly once, and nothing is left open.
"""

from __future__ import annotations

import pytest

from airflow_kafka_spark import faults
from tests.support.dead_letters import check_sorted_out, produce_mixed

POINTS = (*faults.BURYING, "sink.committed", "close.in_transaction")
CASES = [*(("postgres", point) for point in POINTS), ("files", "dead.committed"), ("postgres-split", "dead.in_transaction")]


@pytest.mark.faults
@pytest.mark.parametrize("kind, point", CASES)
def test_killed_then_retried_and_cleared_each_record_is_in_the_sink_or_a_dead_letter_exactly_once(flow, kind, point):
    dead = f"dead-{flow.topic}"
    flow.options |= {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    flow.kafka.create_topic(dead, 2)
    bad = produce_mixed(flow, 600, 20)
    victim = flow.victim("run1", fault=point)
    code = victim.wait()
    assert victim.fired and code == -9, victim.tail()
    if kind == "postgres":
        there = 600 if POINTS.index(point) >= POINTS.index("sink.committed") else 0
        assert len(flow.rows()) == there, "a reader saw a part of the window"
    report = flow.run("run1")
    assert check_sorted_out(flow, dead) == (600, bad)
    assert report["records_rejected"] == bad == sum(part["records"] for part in report["dead_letters"])
    assert flow.run("run1") == report, "a cleared task does nothing and returns the same report"
    bad += produce_mixed(flow, 60, 20, first=600)
    flow.run("run2")
    assert check_sorted_out(flow, dead) == (660, bad)
    assert flow.committed() == {r["partition"]: r["end"] for r in flow.reports[-1]["ranges"]}


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["postgres"])
def test_a_zombie_that_wakes_after_the_retry_sends_no_dead_letter(flow, kind):
    dead = f"dead-{flow.topic}"
    flow.options |= {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    bad = produce_mixed(flow, 200, 10)
    for point in ("job.done", "dead.in_transaction"):
        run = f"run-{point}"
        zombie = flow.victim(run, fault=f"{point}:stop")
        zombie.wait_stopped()
        zombie.freeze()
        flow.run(run)
        assert check_sorted_out(flow, dead)[1] == bad
        zombie.wake()
        assert zombie.wait() == 1, zombie.tail()
        good = check_sorted_out(flow, dead)
        assert good[1] == bad
        bad += produce_mixed(flow, 30, 10, first=good[0])
    flow.run("last")
    assert check_sorted_out(flow, dead) == (260, bad)
