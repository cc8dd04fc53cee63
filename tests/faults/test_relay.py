"""The task's process, or a worker of it, dies or sleeps while a window goes from topic to topic; then it is retried and cleared.

After each: a read_committed reader sees what became of every record exactly once, the group's offsets agree with it, no
transaction of ours is open, and a further attempt writes nothing.
"""

from __future__ import annotations

import pytest

from airflow_kafka_spark.formats import Json
from tests.faults.test_publish import IN_A_TASK
from tests.support.oracle import same_multiset
from tests.support.pipelines import SCHEMA
from tests.support.relay import decoded, relay

FILTER = {"value": Json(schema=SCHEMA), "filter": "id % 2 = 0"}


@pytest.fixture
def orders(kafka, unique, tmp_path):
    with relay(kafka, unique, tmp_path) as made:
        yield made


@pytest.mark.faults
@pytest.mark.parametrize("point", ["publish.mid", "publish.marked", "publish.committed", "close.in_transaction"])
def test_killed_then_retried_and_cleared_every_record_is_relayed_exactly_once(orders, point):
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
def test_killed_with_a_filter_in_between_the_filtered_records_are_there_once(orders):
    orders.send(900)
    victim = orders.victim("run1", fault="publish.marked", **FILTER)
    assert victim.wait() == 1 and victim.fired, victim.tail()
    retried = orders.run("run1", **FILTER)
    assert (retried["records_read"], retried["records_written"]) == (900, 450)
    assert orders.check(lambda r: r.content if decoded(r)["id"] % 2 == 0 else None) == 450


@pytest.mark.faults
@pytest.mark.parametrize("point", ["publish.mid", "publish.marked"])
def test_a_zombie_that_wakes_after_the_retry_has_finished_relays_nothing(orders, point):
    orders.send(900)
    zombie = orders.victim("run1", fault=f"{point}:stop")
    zombie.wait_stopped()
    zombie.freeze()
    report = orders.run("run1")
    assert (report["records_written"], report["attempts"]) == (900, 2)
    orders.send(10)
    orders.run("run2")
    zombie.wake()
    zombie.wait()
    assert orders.check() == 910
    assert orders.run("run3")["records_written"] == 0
    assert orders.check() == 910


@pytest.mark.faults
def test_output_and_consumed_offset_of_a_partition_move_together(orders):
    """Killed while some partitions are published and others are not: the group's offsets say exactly which."""
    from airflow_kafka_spark.hooks.kafka import KafkaHook
    from airflow_kafka_spark.windows.model import TopicPartition

    orders.send(900)
    victim = orders.victim("run1", fault="publish.committed")
    assert victim.wait() == 1 and victim.fired, victim.tail()
    there = {r.content for r in orders.read(orders.output)}
    places = [TopicPartition(orders.topic, p) for p in range(3)]
    with KafkaHook() as hook:
        committed = hook.committed(orders.name, places, stable=False)
    moved = {tp.partition for tp, offset in committed.items() if offset}
    sent = orders.read(orders.topic)
    assert there and there == {r.content for r in sent if r.partition in moved}
    # What is published may be deleted before the window is complete.
    with KafkaHook() as hook:
        hook.delete_records({tp: offset.offset for tp, offset in committed.items() if offset})
    report = orders.run("run1")
    assert (report["records_read"], report["records_written"]) == (900, 900)
    assert same_multiset((r.content for r in sent), (r.content for r in orders.read(orders.output))) == 900
