"""The process dies by SIGKILL between dead letters and sink, after both, and during the close; then the window is retried.

After each test: every good record is in the sink, every bad record in the dead letter topic, each exactly once, and no
transaction is open.
"""

from __future__ import annotations

import pytest

from airflow_kafka_spark import faults
from airflow_kafka_spark.transforms import Condition, Filter
from tests.support.dead_letters import check_sorted_out, is_bad, letters, produce_mixed
from tests.support.distribution import extended
from tests.support.oracle import same_multiset
from tests.support.pipelines import row_of

POINTS = (*faults.DEAD_LETTERS, "sink.committed", "close.in_transaction")
FURTHER = ("dead.committed", "close.in_transaction")
CASES = [
    *(("postgres", point) for point in POINTS if point not in FURTHER),
    *(extended("postgres", point) for point in FURTHER),
    ("postgres-split", "dead.in_transaction"),
]


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
    if point in ("dead.in_transaction", "close.in_transaction"):
        bad += produce_mixed(flow, 60, 20, first=600)
        flow.run("run2")
        assert check_sorted_out(flow, dead) == (660, bad)
    assert flow.committed() == {r["partition"]: r["end"] for r in flow.reports[-1]["ranges"]}


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["postgres"])
def test_a_zombie_that_resumes_after_the_retry_sends_no_dead_letter(flow, kind):
    dead = f"dead-{flow.topic}"
    flow.options |= {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    bad = produce_mixed(flow, 200, 10)
    for point in ("job.done", "dead.in_transaction"):
        run = f"run-{point}"
        zombie = flow.victim(run, fault=f"{point}:stop", alone=True)
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


@pytest.mark.faults
@pytest.mark.parametrize("kind, point", [extended("files", "dead.in_transaction"), ("files", "dead.committed")])
def test_killed_then_retried_each_record_is_in_the_sink_or_routed_or_a_dead_letter_exactly_once(flow, kind, point):
    dead, away = f"dead-{flow.topic}", f"away-{flow.topic}"
    flow.options |= {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    flow.options["transforms"] = [Filter(predicate=Condition("id % 10 <> 0"), negate=True, to=away)]
    bad = produce_mixed(flow, 300, 20)
    victim = flow.victim("run1", fault=point)
    assert victim.wait() == -9 and victim.fired, victim.tail()
    assert flow.rows() == [], "the sink took something before it was decided what it does not get"
    # Records of the other sink stay there: the filter of the retry would keep half of them.
    flow.options["transforms"] = [Filter(predicate=Condition("id % 20 <> 0"), negate=True, to=away)]
    report = flow.run("run1")
    routed = [row_of(value) for _, value, *_ in letters(flow.kafka.connection_extra(), away)]
    step = 10 if point == "dead.committed" else 20
    assert sorted(row[0] for row in routed) == list(range(0, 300, step)) and report["records_routed"] == len(routed)
    events = [(p, o, k, v) for p, o, k, v in flow.events() if v is not None]
    good = [row_of(v) for *_, v in events if not is_bad(v)]
    assert same_multiset(good, [*flow.rows(), *routed]) == 300
    there = [value for _, value, *_ in letters(flow.kafka.connection_extra(), dead)]
    assert same_multiset([v for *_, v in events if is_bad(v)], there) == bad == report["records_rejected"]
    assert flow.run("run1") == report


@pytest.mark.faults
@pytest.mark.parametrize(
    "kind, point",
    [
        ("postgres-upsert", "dead.committed"),
        extended("postgres-split", "job.done"),
        ("postgres-split", "sink.in_transaction"),
    ],
)
def test_killed_with_rows_that_the_table_refuses_each_record_is_in_the_table_or_a_dead_letter_exactly_once(flow, kind, point):
    dead = f"dead-{flow.topic}"
    flow.options |= {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    with flow.postgres.connect(autocommit=True) as connection:
        connection.execute(f'ALTER TABLE "{flow.place}" ADD CONSTRAINT few CHECK (id % 75 <> 7)')
    bad = produce_mixed(flow, 300, 30)
    victim = flow.victim("run1", fault=point)
    assert victim.wait() == -9 and victim.fired, victim.tail()
    # All refused rows are in partition 1, all other bad records in partition 2.
    others = {number for number in range(300) if number % 3 == 0} if kind == "postgres-split" else set()
    assert {row[0] for row in flow.rows()} == others, "the table took something before it was decided what it does not get"
    # A sent record stays a dead letter, although the table would take it now. A record that was not sent is not left out.
    with flow.postgres.connect(autocommit=True) as connection:
        connection.execute(f'ALTER TABLE "{flow.place}" DROP CONSTRAINT few')
    report = flow.run("run1")
    there = [(key, value) for key, value, *_ in letters(flow.kafka.connection_extra(), dead)]
    events = [(k, v) for _, _, k, v in flow.events() if v is not None]
    refused = [(k, v) for k, v in events if is_bad(v) or (point != "job.done" and row_of(v)[0] % 75 == 7)]
    assert same_multiset(refused, there) == len(refused) == report["records_rejected"]
    assert len(refused) - bad == (0 if point == "job.done" else 4)
    kept = [row_of(v) for k, v in events if (k, v) not in refused]
    assert same_multiset(kept, flow.rows()) == 300 + bad - len(refused) == report["records_written"]
    assert flow.run("run1") == report
