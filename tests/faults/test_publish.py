"""The task's process, or a worker of it, dies or hangs while a window is published to Kafka; then it is retried and cleared.

After each test: every row is there exactly once, for a read_committed background reader and for a reader at the end, none of the
pipeline's transactions is open, and a further attempt writes nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from datetime import datetime, timezone

import pytest

from airflow_kafka_spark.errors import SourceRejected, TooManyBadRecords
from airflow_kafka_spark.transforms import Condition, Filter, Sql, TimestampConverter
from tests.support.dead_letters import letters
from tests.support.distribution import extended
from tests.support.oracle import committed_records, same_multiset
from tests.support.shop import shop
from tests.support.unfit import KEY, VALUE, avro, check_sorted_out, plain, spoil
from tests.support.waiting import eventually

IN_A_TASK = ("publish.mid", "publish.flushed", "publish.marked", "publish.committed")
# Faults of the ledger alone are tested with a sink (test_kill.py).
POINTS = ("publish.mid", "publish.marked", extended("publish.committed"), extended("job.done"))


@pytest.fixture
def orders(kafka, postgres, unique, tmp_path):
    with shop(kafka, postgres, unique, tmp_path) as made, made.watched():
        yield made


@pytest.mark.faults
@pytest.mark.parametrize("point", POINTS)
def test_killed_then_retried_and_cleared_every_row_is_published_exactly_once(orders, point):
    orders.sell(300)
    orders.run("run0")
    orders.sell(900)
    victim = orders.victim("run1", fault=point)
    code = victim.wait()
    assert victim.fired, victim.tail()
    assert code == (1 if point in IN_A_TASK else -9), victim.tail()
    retried = orders.run("run1")
    assert (retried["window"], retried["records_written"]) == ("0000000002", 900)
    assert orders.check() == 1200
    assert orders.run("run1") == retried, "a cleared task does nothing and returns the same report"
    assert orders.check() == 1200
    if point == "publish.marked":  # the transactions that are left open differ; the close is the same
        orders.sell(10)
        assert orders.run("run2")["records_written"] == 10
        assert orders.check() == 1210


@pytest.mark.faults
def test_killed_then_retried_and_cleared_every_row_is_a_record_or_a_dead_letter_exactly_once(orders):
    """The splits that are published first all hold a row that does not fit, so it is one with a letter that is killed. Letters in
    a transaction that is still open: test_kafka_to_kafka.py."""
    dead = f"dead-{orders.topic}"
    options = {
        "value": avro(VALUE),
        "key_format": avro(KEY),
        "errors_tolerance": "all",
        "errors_deadletterqueue_topic_name": dead,
        "max_errors": 3,
    }
    orders.sell(900)
    bad = spoil(orders, null=17, large=250, key=899)
    victim = orders.victim("run1", fault="publish.committed", **options)
    assert victim.wait() == 1 and victim.fired, victim.tail()
    with pytest.raises(TooManyBadRecords, match="3 of the 900 records"):  # what is published counts along
        orders.run("run1", **{**options, "max_errors": 2})
    retried = orders.run("run1", **options)
    assert [retried[f"records_{name}"] for name in ("read", "written", "rejected")] == [900, 897, 3]
    assert sum(part["records"] for part in retried["dead_letters"]) == 3
    assert check_sorted_out(orders, dead, bad, plain(VALUE), plain(KEY)) == (897, 3)
    assert orders.run("run1", **options) == retried, "a cleared task does nothing and returns the same report"
    assert check_sorted_out(orders, dead, bad, plain(VALUE), plain(KEY)) == (897, 3)


@pytest.mark.extended
@pytest.mark.faults
def test_killed_then_retried_what_transforms_make_of_every_row_is_there_exactly_once(orders):
    """Some rows are left out, some cannot be transformed; the transforms of the retry count for the splits that are left."""
    dead = f"dead-{orders.topic}"

    def options(year: int) -> dict:
        day = Sql({"id": "id", "day": f"CASE WHEN id % 100 = 17 THEN 'never' ELSE '{year}-01-02' END"})
        transforms = [Filter(predicate=Condition("id % 10 = 3")), day, TimestampConverter("unix", "day", "yyyy-MM-dd")]
        return {"transforms": transforms, "errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}

    orders.sell(900)
    victim = orders.victim("run1", fault="publish.committed", **options(2024))
    assert victim.wait() == 1 and victim.fired, victim.tail()
    retried = orders.run("run1", **options(2025))
    assert [retried[f"records_{name}"] for name in ("read", "written", "filtered", "rejected")] == [900, 801, 90, 9]
    assert orders.run("run1", **options(2026)) == retried, "a cleared task does nothing and returns the same report"
    orders.wait_settled(also=(dead,))
    there = [json.loads(value) for _, _, _, value in committed_records(orders.kafka.connection_extra(), orders.topic)]
    assert {datetime.fromtimestamp(row["day"] / 1000, timezone.utc).year for row in there} == {2024, 2025}
    good = [id for id in range(900) if id % 10 != 3 and id % 100 != 17]
    assert same_multiset(good, [row["id"] for row in there]) == 801
    shown = [json.loads(value)["id"] for _, value, _, _ in letters(orders.kafka.connection_extra(), dead)]
    assert same_multiset(range(17, 900, 100), shown) == 9


@pytest.mark.faults
def test_killed_then_retried_every_row_of_a_table_read_by_pages_is_published_exactly_once_and_a_changed_table_is_refused(
    orders,
):
    options = {"source": {"cursor": None, "split_by": "pages"}}
    orders.sell(900)
    for number, change in enumerate(("VACUUM (FREEZE)", "UPDATE")):
        victim = orders.victim(f"run{number}", fault="publish.committed", **options)
        assert victim.wait() == 1 and victim.fired, victim.tail()
        with orders.postgres.connect(autocommit=True) as connection:
            moved = f"UPDATE \"{orders.table}\" SET customer = 'moved' WHERE id % 100 = 0"
            connection.execute(moved if change == "UPDATE" else f'{change} "{orders.table}"')
        if change != "UPDATE":
            assert orders.run(f"run{number}", **options)["records_written"] == orders.check() == 900
    for _ in range(2):
        with pytest.raises(SourceRejected, match="9 of its rows were inserted or updated since the pass by pages began"):
            orders.run("run1", **options)
    orders.wait_settled()
    times = Counter(record[0] for record in orders.records())
    assert set(times.values()) <= {1, 2} and sum(times.values()) > 1700


@pytest.mark.faults
def test_a_zombie_that_resumes_after_the_retry_has_finished_publishes_nothing(orders):
    orders.sell(900)
    zombie = orders.victim("run1", fault="publish.marked:stop", alone=True)
    zombie.wait_stopped()
    zombie.freeze()
    report = orders.run("run1")
    assert report["records_written"] == 900
    orders.sell(10)
    orders.run("run2")
    zombie.wake()
    zombie.wait()
    assert "a newer attempt took over" in zombie.tail(), "whatever was ended of it"
    assert orders.check() == 910
    orders.run("run3")
    assert orders.check() == 910
    assert report["attempts"] == 2


@pytest.mark.faults
def test_a_late_task_that_fences_a_split_of_the_newer_attempt_publishes_nothing_and_the_newer_attempt_does(orders):
    orders.sell(150)
    zombie = orders.victim("run1", fault="publish.fence:stop", alone=True)
    zombie.wait_stopped()
    retry = orders.victim("run1", fault="publish.mid:stop")
    retry.wait_stopped()
    zombie.wake()
    assert zombie.wait() == 1 and "a newer attempt took over" in zombie.tail()
    retry.wake()
    assert retry.wait() == 0, retry.tail()
    assert "A late task of an earlier attempt has stopped a split" in retry.log.read_text()
    assert (retry.result()["records_written"], retry.result()["attempts"]) == (150, 2)
    assert orders.check() == 150


@pytest.mark.faults
def test_rows_that_change_between_two_attempts_are_not_published_twice(orders):
    orders.sell(900)
    victim = orders.victim("run1", fault="publish.committed")
    assert victim.wait() == 1 and victim.fired, victim.tail()
    # Kafka answers a commit before every partition has its marker; transactions of other dead attempts may still be open.
    before = eventually(lambda: orders.records(stable=False), 400)
    with orders.postgres.connect(autocommit=True) as connection:
        connection.execute(f"UPDATE \"{orders.table}\" SET customer = 'somebody else'")
    orders.run("run1")
    after = orders.records()
    assert before and len(after) == len({record[0] for record in after}) == 900
    assert set(before) <= set(after), "what was published once stays as it is"
