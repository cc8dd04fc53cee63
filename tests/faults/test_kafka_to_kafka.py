"""The task's process, or a worker of it, dies or hangs while a window goes from topic to topic; then it is retried and cleared.

After each test: a read_committed reader sees the result of every record exactly once, in the output or as a dead letter, the
group's offsets agree with it, none of the pipeline's transactions is open, and a further attempt writes nothing.
"""

from __future__ import annotations

import pytest

from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.transforms import Condition, Filter, Sql
from tests.faults.test_publish import IN_A_TASK
from tests.support.distribution import extended
from tests.support.oracle import same_multiset
from tests.support.pipelines import SCHEMA
from tests.support.relay import decoded, relay
from tests.support.waiting import eventually, settled

FILTER = {"value": Json(schema=SCHEMA), "filter": "id % 2 = 0"}
# Arrow has no rand(), so Spark's SQL stands between reading and writing. The other changes here are made in Arrow.
SHAPE = {"value": Json(schema=SCHEMA), "transforms": [Sql(filter="id % 2 = 0 AND rand() >= 0")]}


def even(record):
    return record.content if decoded(record)["id"] % 2 == 0 else None


@pytest.fixture
def orders(kafka, unique, tmp_path):
    with relay(kafka, unique, tmp_path) as made:
        yield made


@pytest.mark.faults
@pytest.mark.parametrize("point", ["publish.marked", extended("publish.committed"), "close.in_transaction"])
def test_killed_then_retried_and_cleared_every_record_is_published_exactly_once(orders, point):
    orders.send(300)
    orders.run("run0")
    orders.send(900)
    victim = orders.victim("run1", fault=point)
    code = victim.wait()
    assert victim.fired, victim.tail()
    assert code == (1 if point in IN_A_TASK else -9), victim.tail()
    retried = orders.run("run1")
    assert (retried["window"], retried["records_read"], retried["records_written"]) == ("0000000002", 900, 900)
    assert orders.check() == 1200
    assert orders.run("run1") == retried, "a cleared task does nothing and returns the same report"
    assert orders.check() == 1200
    orders.send(10)
    assert orders.run("run2")["records_written"] == 10
    assert orders.check() == 1210


@pytest.mark.faults
def test_killed_then_retried_and_cleared_each_record_is_in_the_output_or_a_dead_letter_exactly_once(orders):
    """The zombie below has its letters in an open transaction."""
    dead = f"dead-{orders.output}"
    options = {**SHAPE, "errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    orders.kafka.create_topic(dead, 2)
    bad = orders.send_mixed(600, 20)
    victim = orders.victim("run1", fault="publish.committed", **options)
    assert victim.wait() == 1 and victim.fired, victim.tail()
    retried = orders.run("run1", **options)
    assert orders.check_sorted_out(dead, even) == (300, bad)
    assert (retried["records_read"], retried["records_written"], retried["records_filtered"]) == (600 + bad, 300, 300)
    assert retried["records_rejected"] == bad == sum(part["records"] for part in retried["dead_letters"])
    assert orders.run("run1", **options) == retried, "a cleared task does nothing and returns the same report"
    assert orders.check_sorted_out(dead, even) == (300, bad)


@pytest.mark.extended
@pytest.mark.faults
def test_killed_then_retried_and_cleared_each_record_is_in_the_output_or_in_the_topic_of_a_filter_exactly_once(orders, unique):
    odd = unique("odd")
    options = {"value": Json(schema=SCHEMA), "transforms": [Filter(predicate=Condition("id % 2 = 1"), to=odd)]}
    orders.send(600)
    victim = orders.victim("run1", fault="publish.committed", **options)
    assert victim.wait() == 1 and victim.fired, victim.tail()
    retried = orders.run("run1", **options)
    for _ in range(2):
        settled(odd)
        there = [r.content[:3] for r in orders.read(odd)]
        sent = [r.content[:3] for r in orders.read(orders.topic) if not even(r)]
        assert (orders.check(even), same_multiset(sent, there)) == (300, 300)
        assert orders.run("run1", **options) == retried, "a cleared task does nothing and returns the same report"
    assert [retried[f"records_{name}"] for name in ("read", "written", "routed")] == [600, 300, 300]
    assert sum(part["records"] for part in retried["routed"]) == 300


@pytest.mark.extended
@pytest.mark.faults
def test_a_zombie_that_resumes_after_the_retry_sends_no_dead_letter(orders):
    """The zombie sleeps after it has sent its letters and its marker, with an open transaction."""
    dead = f"dead-{orders.output}"
    options = {**FILTER, "errors_tolerance": "all", "errors_deadletterqueue_topic_name": dead}
    bad = orders.send_mixed(300, 10)
    zombie = orders.victim("run1", fault="publish.marked:stop", alone=True, **options)
    zombie.wait_stopped()
    zombie.freeze()
    report = orders.run("run1", **options)
    assert (report["records_rejected"], report["attempts"]) == (bad, 2)
    assert orders.check_sorted_out(dead, even) == (150, bad)
    zombie.wake()
    zombie.wait()
    assert orders.run("run2", **options)["records_read"] == 0
    assert orders.check_sorted_out(dead, even) == (150, bad)


@pytest.mark.faults
def test_a_zombie_that_resumes_after_the_retry_has_finished_publishes_nothing(orders):
    orders.send(900)
    zombie = orders.victim("run1", fault="publish.mid:stop", alone=True)
    zombie.wait_stopped()
    zombie.freeze()
    report = orders.run("run1")
    assert (report["records_written"], report["attempts"]) == (900, 2)
    orders.send(10)
    orders.run("run2")
    zombie.wake()
    zombie.wait()
    assert "a newer attempt took over" in zombie.tail(), "whatever was ended of it"
    assert orders.check() == 910
    assert orders.run("run3")["records_written"] == 0
    assert orders.check() == 910


@pytest.mark.faults
def test_output_and_consumed_offset_of_a_partition_move_together(orders):
    """Killed while some partitions are published and others are not: the group's offsets say exactly which."""
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.windows.model import TopicPartition

    orders.send(900)
    victim = orders.victim("run1", fault="publish.committed")
    assert victim.wait() == 1 and victim.fired, victim.tail()
    sent = orders.read(orders.topic)
    places = [TopicPartition(orders.topic, p) for p in range(3)]

    def together():
        # Kafka answers a commit before every partition, of the output and of the group, has its marker.
        there = {r.content for r in orders.read(orders.output, stable=False)}
        with KafkaHook() as hook:
            committed = hook.read_committed_offsets(orders.name, places, stable=False)
        moved = {tp.partition for tp, offset in committed.items() if offset}
        return committed if there and there == {r.content for r in sent if r.partition in moved} else None

    committed = eventually(together)
    # What is published may be deleted before the window is complete.
    with KafkaHook() as hook:
        hook.delete_records({tp: offset.offset for tp, offset in committed.items() if offset})
    report = orders.run("run1")
    assert (report["records_read"], report["records_written"]) == (900, 900)
    assert same_multiset((r.content for r in sent), (r.content for r in orders.read(orders.output))) == 900
