"""The offsets that a start or a stop resolves to, on a real broker."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.errors import BoundRefused, PlanError
from airflow_kafka_spark.hooks.kafka.log import read_log, resolve_start, resolve_stop
from airflow_kafka_spark.hooks.kafka.requests import CommittedOffset
from airflow_kafka_spark.ledger.group import find_group_position
from airflow_kafka_spark.windows.model import TopicPartition
from airflow_kafka_spark.windows.offset_specs import (
    EARLIEST,
    LATEST,
    CommittedOffsets,
    Earliest,
    Latest,
    SpecificOffsets,
    Timestamp,
)
from tests.support.clients import open_hook


@pytest.fixture(scope="module")
def hook(kafka):
    with open_hook(kafka, "kafka_bounds") as hook:
        yield hook


BASE = 1_750_000_000_000


@pytest.fixture(scope="module")
def topic(kafka, hook):
    """Partition 0 holds offsets 2 to 9 at BASE + offset. Partition 1 holds 0 to 4, and 5 to 7 in an open transaction. Partition 2
    is empty.
    """
    name = "bounds"
    kafka.create_topic(name, 3)
    producer = Producer(kafka.connection_extra())
    for partition, count in ((0, 10), (1, 5)):
        for offset in range(count):
            producer.produce(name, b"v", partition=partition, timestamp=BASE + offset)
    producer.flush(60)
    hook.delete_records({TopicPartition(name, 0): 2})
    # It stays open while all tests of this file run.
    settings = {"transactional.id": name, "transaction.timeout.ms": 900_000}
    transaction = Producer({**kafka.connection_extra(), **settings})
    transaction.init_transactions(60)
    transaction.begin_transaction()
    for offset in range(5, 8):
        transaction.produce(name, b"v", partition=1, timestamp=BASE + offset)
    transaction.flush(60)
    yield name
    transaction.abort_transaction(60)


@pytest.fixture
def start(hook, topic, unique):
    log = read_log(hook, [topic])
    group = unique("group")

    def resolved(bound, group_id=group):
        return offsets_of(resolve_start(hook, bound, log, group_id))

    return resolved


@pytest.fixture
def stop(hook, topic):
    return lambda bound: offsets_of(resolve_stop(hook, bound, read_log(hook, [topic])))


def offsets_of(found):
    return [found[tp] for tp in sorted(found)]


def specific(topic, *offsets):
    return SpecificOffsets({topic: dict(enumerate(offsets))})


def test_earliest_is_the_first_record_that_is_still_there(start):
    assert start(Earliest()) == [2, 0, 0]


def test_latest_is_the_last_stable_offset(start, stop):
    assert start(Latest()) == [10, 5, 0]
    assert stop(Latest()) == [], "at the last stable offsets, wherever those are"


@pytest.mark.parametrize(
    "ms, offsets",
    [(0, [2, 0, 0]), (BASE + 3, [3, 3, 0]), (BASE + 4, [4, 4, 0]), (BASE + 6, [6, 5, 0]), (BASE + 99, [10, 5, 0])],
    ids=["before all", "in both", "last of one", "behind the open transaction", "behind all"],
)
def test_a_time_is_the_first_record_at_or_after_it_else_the_end_for_start_and_stop_alike(start, stop, ms, offsets):
    assert start(Timestamp(ms)) == stop(Timestamp(ms)) == offsets


def test_committed_offsets_and_the_fallback_for_partitions_without(hook, topic, start, unique):
    group = unique("group")
    hook.alter_committed(group, {TopicPartition(topic, 0): 7})
    assert start(CommittedOffsets(), group) == [7, 0, 0]
    assert start(CommittedOffsets(fallback="latest"), group) == [7, 5, 0]
    with pytest.raises(PlanError, match=f"no committed offset to begin at for {topic}-1, {topic}-2"):
        start(CommittedOffsets(fallback="none"), group)


def test_the_committed_offsets_of_another_group_are_a_start_and_a_stop(hook, topic, start, stop, unique):
    connect = unique("connect-orders")
    hook.alter_committed(connect, {TopicPartition(topic, 0): 6, TopicPartition(topic, 1): 3})
    assert start(CommittedOffsets(connect)) == [6, 3, 0]
    assert stop(CommittedOffsets(connect)) == [6, 3, 0]


def test_of_a_partition_that_the_other_group_has_not_committed_nothing_is_read(stop, unique):
    assert stop(CommittedOffsets(unique("nobody"))) == [0, 0, 0]


def test_specific_offsets_with_the_ends_of_the_log(topic, start, stop):
    assert start(specific(topic, 10, EARLIEST, LATEST)) == [10, 0, 0]
    assert stop(specific(topic, 4, LATEST, 0)) == [4, 5, 0]
    assert stop(specific(topic, 400, 7, 0)) == [400, 7, 0], "what is not there yet comes in a later window"


def test_every_partition_has_to_be_named(topic, start, stop):
    partly = SpecificOffsets({topic: {1: 0}})
    for resolve in (start, stop):
        with pytest.raises(BoundRefused, match=f"{topic}-0, {topic}-2"):
            resolve(partly)


def test_a_partition_that_is_not_read_is_named(topic, start):
    with pytest.raises(BoundRefused, match="other-0"):
        start(SpecificOffsets({topic: {0: 5, 1: 0, 2: 0}, "other": {0: 1}}))


def test_offsets_outside_the_log_are_refused_with_the_numbers(topic, start):
    with pytest.raises(BoundRefused) as caught:
        start(specific(topic, 1, 6, 0))
    assert f"{topic}-0 at 1, not in [2, 10]" in str(caught.value)
    assert f"{topic}-1 at 6, not in [0, 5]" in str(caught.value)


def test_a_group_remembers_which_pipeline_moved_it():
    tps = [TopicPartition("t", p) for p in range(4)]

    def own(window, **facts):
        return json.dumps({"pipeline": "p", "window": f"{window:010d}", "topic_id": "id", **facts})

    committed = {
        tps[0]: CommittedOffset(5, own(3), epoch=4),
        tps[1]: CommittedOffset(7, own(2)),
        tps[2]: CommittedOffset(9, "somebody", epoch=8),
        tps[3]: None,
    }
    position, number = find_group_position("p", committed)
    assert position.offsets == {tps[0]: 5, tps[1]: 7, tps[2]: 9}
    assert (position.topic_ids, number) == ({"t": "id"}, 3)
    assert position.epochs == {tps[0]: 4}, "another client may have read another log"
    for foreign in ("", "[]", "text", own(3, pipeline="other")):
        assert find_group_position("p", {tps[0]: CommittedOffset(5, foreign)}) == find_group_position("p", {tps[0]: None})
