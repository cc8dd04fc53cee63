"""A paused attempt (SIGSTOP, like a machine that hangs or a lost network) continues after its retry has finished: it changes
nothing.
"""

from __future__ import annotations

import pytest

from tests.support.distribution import extended

# tests/sinks/test_contract.py pauses each sink at each of its points.
CASES = [
    *(("files", point) for point in ("split.mid", "close.in_transaction")),
    *(extended("files", point) for point in ("fenced", "planned")),
    ("postgres", "sink.in_transaction"),
    ("postgres-split", "split.mid"),
]
# Here the attempt has its own JVM; elsewhere an engine is stopped and continued with it (tests/support/engine.py).
WITH_JVM = [("files", "split.mid")]


@pytest.mark.faults
@pytest.mark.parametrize("kind, point", CASES)
def test_a_zombie_that_resumes_after_the_retry_changes_nothing(flow, kind, point):
    flow.produce(1200)
    zombie = flow.victim("run1", fault=f"{point}:stop", jvm=(kind, point) in WITH_JVM, alone=True)
    zombie.wait_stopped()
    zombie.freeze()

    flow.run("run1")
    assert flow.check() == 1200
    flow.produce(300)
    flow.run("run2")
    assert flow.check() == 1500
    rows, committed = sorted(flow.rows()), flow.committed()

    zombie.wake()
    zombie.wait()
    assert "a newer attempt took over" in zombie.tail(), "its last error says why it ended, whatever was ended of it"
    assert sorted(flow.rows()) == rows
    assert flow.committed() == committed
    flow.produce(100)
    flow.run("run3")
    assert flow.check() == 1600


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["postgres"])
def test_an_attempt_whose_sessions_an_administrator_ends_may_be_retried_unless_another_took_over(flow, kind):
    """PostgreSQL's message is equal for both attempts; only the ledger tells them apart."""
    flow.produce(900)
    alone = flow.victim("run1", fault="sink.in_transaction:stop")
    alone.wait_stopped()
    assert end_sessions(flow)
    alone.wake()
    alone.wait()
    assert "SinkUnavailable" in alone.tail() and "may simply be retried" in alone.tail()
    assert "took over" not in alone.tail() and "Correct the connection" not in alone.tail()

    zombie = flow.victim("run1", fault="sink.in_transaction:stop")
    zombie.wait_stopped()
    # The retry claims the window, and is killed before it looks at the database.
    retry = flow.victim("run1", fault="planned")
    assert retry.wait() == -9 and retry.fired, retry.tail()
    assert end_sessions(flow)
    zombie.wake()
    zombie.wait()
    assert "a newer attempt took over" in zombie.tail()
    assert "Correct the connection" not in zombie.tail().rpartition("Fenced")[2]
    flow.run("run1")
    assert flow.check() == 900


def end_sessions(flow):
    """End all sessions of attempts, as an administrator does. Return how many there were."""
    with flow.postgres.connect(autocommit=True) as connection:
        found = connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name LIKE 'airflow-kafka-spark%'"
        )
        return len(found.fetchall())


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["postgres"])
def test_two_attempts_that_run_side_by_side_write_every_record_once(flow, kind):
    flow.produce(3000)
    victims = [flow.victim("run1", fault=None) for _ in range(2)]
    codes = [victim.wait() for victim in victims]
    flow.run("run1")
    assert flow.check() == 3000
    assert codes.count(0) >= 1 or all("Fenced" in v.tail() or "refuses" in v.tail() for v in victims), [v.tail() for v in victims]
