"""The task's process dies by SIGKILL while a window goes to two sinks; then it is retried, also with another condition.

After each: both sinks together hold every committed record exactly once, each where its condition says.
"""

from __future__ import annotations

import pytest

from airflow_kafka_spark.errors import DestinationChanged, ValidationError
from airflow_kafka_spark.sinks import FilesSink, PostgresSink
from airflow_kafka_spark.transforms import Condition, Filter
from tests.support.dead_letters import is_bad, letters, produce_mixed
from tests.support.oracle import same_multiset
from tests.support.pipelines import COLUMNS, Pipeline, files_rows, row_of

COUNT = 300


class Other:
    """The other sink, and its rows.

    :param kind: ``table``: in the database of the pipeline's own table; or ``files``.
    """

    def __init__(self, flow: Pipeline, kind: str) -> None:
        self.flow, self.sink = flow, FilesSink(path=str(flow.directory / "other"))
        if kind == "table":
            self.sink = PostgresSink(conn_id="warehouse", table=f"other_{flow.place}")
            with flow.postgres.connect(autocommit=True) as connection:
                connection.execute(f'CREATE TABLE "{self.sink.table}" ({COLUMNS}, CONSTRAINT few CHECK (id % 50 <> 12))')

    def take(self, every: int) -> None:
        """Let the sink take all orders whose number is divisible by this divisor."""
        self.flow.options["transforms"] = [Filter(predicate=Condition(f"id % {every} <> 0"), negate=True, to=self.sink)]

    def rows(self) -> list[tuple]:
        if isinstance(self.sink, FilesSink):
            return files_rows(self.sink.path)
        query = f'SELECT id, customer, amount::text, extract(epoch FROM placed_at)::bigint FROM "{self.sink.table}"'
        with self.flow.postgres.connect(autocommit=True) as connection:
            return [tuple(row) for row in connection.execute(query).fetchall()]

    def check(self, every: int) -> None:
        """Check that each record is in one of the sinks, the one that the condition names, exactly once."""
        rows = [row_of(value) for *_, value in self.flow.events() if value is not None]
        assert same_multiset([row for row in rows if row[0] % every == 0], self.rows()) >= COUNT // every
        assert same_multiset([row for row in rows if row[0] % every], self.flow.rows()) > COUNT // 2


@pytest.mark.faults
@pytest.mark.parametrize("kind, other", [("postgres", "table")])
def test_killed_between_the_commits_of_the_two_sinks_the_retry_finishes_and_nothing_else_would_do(flow, kind, other):
    there, every = Other(flow, other), 25
    flow.produce(COUNT)
    there.take(every)
    # The other sink's commit is the first one.
    victim = flow.victim("run1", fault="sink.committed")
    assert victim.wait() == -9 and victim.fired, victim.tail()
    taken = there.rows()
    assert len(taken) == COUNT // every and flow.rows() == [], "the operator's own sink took the window first"
    # Another condition, or no condition, would lose records or move them twice.
    there.take(every * 2)
    with pytest.raises(ValidationError, match="Set the transforms and formats back"):
        flow.run("run1")
    with pytest.raises(DestinationChanged, match="filter 1"):
        flow.run("run1", transforms=[])
    assert flow.rows() == [] and same_multiset(taken, there.rows())
    there.take(every)
    report = flow.run("run1")
    there.check(every)
    assert (report["records_read"], report["records_routed"]) == (COUNT, COUNT // every)
    assert report["captured"] == [{"sink": there.sink.uri, "records": COUNT // every}]
    assert flow.run("run1") == report
    flow.produce(COUNT)
    flow.run("run2")
    there.check(every)


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["postgres"])
def test_killed_after_staging_or_after_the_commit_the_retry_decides_anew_or_reports_the_first_decision(flow, kind):
    there = Other(flow, "files")
    flow.produce(COUNT)
    there.take(3)
    victim = flow.victim("run1", fault="dead.committed")
    assert victim.wait() == -9 and victim.fired, victim.tail()
    assert flow.rows() == there.rows() == []
    there.take(7)
    victim = flow.victim("run1", fault="close.begin")
    assert victim.wait() == -9 and victim.fired, victim.tail()
    there.check(7)
    report = flow.run("run1")
    there.check(7)
    assert (report["records_read"], report["records_routed"], report["attempts"]) == (COUNT, 43, 3)
    assert report["captured"] == [{"sink": there.sink.uri, "records": 43}]


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["postgres"])
def test_killed_between_the_commits_what_the_other_table_refused_stays_a_dead_letter(flow, kind):
    there, dead = Other(flow, "table"), f"dead-{flow.topic}"
    flow.options |= {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    there.take(6)
    bad = produce_mixed(flow, COUNT, 20)
    victim = flow.victim("run1", fault="sink.committed")
    assert victim.wait() == -9 and victim.fired, victim.tail()
    assert flow.rows() == [] and there.rows()
    with flow.postgres.connect(autocommit=True) as connection:
        connection.execute(f'ALTER TABLE "{there.sink.table}" DROP CONSTRAINT few')
    report = flow.run("run1")
    rows = [row_of(value) for *_, value in flow.events() if value is not None and not is_bad(value)]
    refused = [row for row in rows if row[0] % 6 == 0 and row[0] % 50 == 12]
    took = [row for row in rows if row[0] % 6 == 0 and row not in refused]
    assert same_multiset(took, there.rows()) == report["records_routed"] == 50 - len(refused)
    assert same_multiset([row for row in rows if row[0] % 6], flow.rows()) == 250
    values = [value for _, value, *_ in letters(flow.kafka.connection_extra(), dead)]
    assert same_multiset(refused, [row_of(value) for value in values if not is_bad(value)]) == len(values) - bad > 0
    assert report["records_rejected"] == len(values)
    assert flow.run("run1") == report


@pytest.mark.extended
@pytest.mark.faults
@pytest.mark.parametrize("kind", ["postgres"])
def test_a_zombie_that_resumes_between_the_commits_changes_nothing(flow, kind):
    there = Other(flow, "table")
    flow.produce(COUNT)
    there.take(25)
    victim = flow.victim("run1", fault="sink.committed:stop")
    victim.wait_stopped()
    report = flow.run("run1")
    victim.wake()
    assert victim.wait() != 0, "the zombie thinks that it has moved the window"
    there.check(25)
    assert (report["records_routed"], report["attempts"]) == (12, 2) and flow.run("run1") == report
