"""The lag trigger: for a sensor, and as a watcher that starts DAGs."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

import pytest

from airflow_kafka_spark.errors import ConsumerUnhealthy
from airflow_kafka_spark.triggers import KafkaLagTrigger, raise_failure, should_fire
from tests.support.lag import commit, consuming, produce
from tests.support.triggers import Store, again, fire

EVERY = 0.2


def backlog(topic, **options):
    return KafkaLagTrigger(**{"group_id": topic, "topics": topic, "at_least_records": 3, "poll_interval": EVERY, **options})


def test_it_fires_once_a_live_group_has_caught_up(kafka, topic):
    produce(kafka, topic, 30)
    with consuming(kafka, topic, topic, pause=0.02) as read:
        event = fire(backlog(topic, at_least_records=None, at_most_records=0, once=True))
        assert len(read) == 30
    assert (event["status"], event["value"]["records"], event["value"]["seconds"]) == ("success", 0, 0.0)


def test_the_event_holds_the_lag_of_every_partition(kafka, topic):
    produce(kafka, topic, 2, 0, age=60)
    produce(kafka, topic, 5, 1, age=30)
    commit(kafka, topic, topic, 1, 1)
    value = fire(backlog(topic, once=True))["value"]
    assert (value["records"], value["records_in_one_partition"], value["status"]) == (6, 4, "STOP")
    assert 60 <= value["seconds"] < 360
    assert value["partitions"][f"{topic}-1"].items() >= {"committed": 1, "end": 5, "records": 4, "status": "OK"}.items()
    assert value["partitions"][f"{topic}-0"]["status"] == "STOP"


def test_a_consumer_in_a_bad_way_is_a_failure_where_that_is_wanted(kafka, topic):
    produce(kafka, topic, 3)
    event = fire(backlog(topic, at_least_records=None, at_most_records=0, fail_on=["STOP"], once=True))
    with pytest.raises(ConsumerUnhealthy, match="no committed offset"):
        raise_failure(event)


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"at_least_records": None}, "nothing to wait for"),
        ({"at_most_seconds": 5}, "are given together"),
        ({"group_id": None}, "neither `group_id` nor `pipeline`"),
        ({"topics": None}, "a group's lag is that in certain topics"),
        ({"topics": "a b"}, "cannot be a topic's name"),
        ({"per": "broker"}, "`broker` is not one of total, partition"),
        ({"fail_on": "DEAD"}, "`DEAD` is not one of WARN, STALL, STOP, REWIND"),
        ({"at_least_records": -1}, "not a whole number"),
        ({"at_least_seconds": "soon"}, "not a number of seconds"),
        ({"schedule": "nightly"}, "not a number of seconds"),
    ],
)
def test_what_is_wrong_is_named(topic, options, fragment):
    assert any(fragment in str(problem) for problem in backlog(topic, **options).probe().find_problems())


def test_right_options_are_no_problem(topic):
    for options in ({}, {"at_least_seconds": "1.5"}, {"schedule": timedelta(days=1)}, {"topics": None, "pipeline": "p"},
                    {"at_least_records": "3", "per": "partition"}):  # fmt: skip
        trigger = backlog(topic, **options)
        assert not trigger.probe().find_problems()
        again(trigger)


# --- as a watcher ---


async def events_of(trigger, steps, store=None):
    """Return the number of events of a watcher after each step, and the events. It checks several times after each step."""
    trigger = again(trigger)
    trigger.asset_state_store = store
    counts, events, looks = [], [], []
    make = trigger.make_probe

    def counted():
        probe = make()
        check = probe.check

        def counting(hook):
            try:
                return check(hook)
            finally:
                looks.append(time.monotonic())

        probe.check = counting
        return probe

    trigger.make_probe = counted

    async def collect():
        async for event in trigger.run():
            events.append(event.payload)

    task = asyncio.create_task(collect())
    try:
        for action, expected in steps:
            before = len(events)
            await asyncio.to_thread(action)
            seen, deadline = len(looks), time.monotonic() + 240
            while len(looks) < seen + 4 or len(events) < before + expected:
                assert not task.done(), task.exception()
                assert time.monotonic() < deadline, f"{len(events) - before} events, not {expected}"
                await asyncio.sleep(0.02)
            counts.append(len(events) - before)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    return counts, events


def watched(trigger, *steps, store=None):
    """Yield the events of a watcher; each step gives as many as it names.

    :param steps: an action, and the number of events that follow.
    """
    counts, events = asyncio.run(events_of(trigger, steps, store))
    assert counts == [expected for _, expected in steps]
    return events


def nothing():
    pass


def test_one_backlog_fires_once_until_it_was_gone_or_the_consumer_has_moved(kafka, topic):
    events = watched(
        backlog(topic, cooldown=0),
        (lambda: produce(kafka, topic, 2), 0),
        (lambda: produce(kafka, topic, 1), 1),
        (lambda: produce(kafka, topic, 4), 0),
        (lambda: commit(kafka, topic, topic, 7), 0),
        (lambda: produce(kafka, topic, 5), 1),
        (lambda: commit(kafka, topic, topic, 8), 1),
        (lambda: produce(kafka, topic, 9), 0),
    )
    assert len(events) == 3
    assert all(3 <= event["records"] <= 5 for event in events)


def test_a_restarted_watcher_does_not_fire_again_for_the_same_backlog(kafka, topic):
    store = Store()
    watched(backlog(topic), (lambda: produce(kafka, topic, 3), 1), (nothing, 0), store=store)
    assert store.values
    steps = (nothing, 0), (lambda: commit(kafka, topic, topic, 3), 0), (lambda: produce(kafka, topic, 3), 1)
    watched(backlog(topic), *steps, store=store)
    # Another trigger has its own state.
    watched(backlog(topic, at_least_records=2), (nothing, 1), store=store)


def test_a_broken_state_store_keeps_no_watcher_from_firing(kafka, topic):
    class Broken:
        async def aget(self, key, default=None):
            raise ValueError("watched by several assets")

        aset = aget

    watched(backlog(topic), (lambda: produce(kafka, topic, 3), 1), (nothing, 0), store=Broken())


def test_a_watcher_outlives_a_topic_that_is_not_there_yet(kafka, unique):
    topic = unique("later")
    created = lambda: (kafka.create_topic(topic), produce(kafka, topic, 3))  # noqa: E731
    watched(backlog(topic, retry_timeout=0), (nothing, 0), (created, 1))


@pytest.mark.parametrize(
    ("fired", "committed", "now", "expected"),
    [
        ({}, {"t-0": 5}, 0, True),
        ({"committed": {"t-0": 5}, "at": 0}, {"t-0": 5}, 1e9, False),
        ({"committed": {"t-0": 5}, "at": 0}, {"t-0": 6}, 59, False),
        ({"committed": {"t-0": 5}, "at": 0}, {"t-0": 6}, 60, True),
        ({"committed": {"t-0": 5}, "at": 0}, {"t-0": None}, 60, True),
    ],
)
def test_when_a_backlog_is_reported_again(fired, committed, now, expected):
    assert should_fire(fired, committed, now, 60.0, None) is expected


def test_a_reminder_comes_although_the_group_has_not_moved():
    fired = {"committed": {"t-0": 5}, "at": 0}
    assert not should_fire(fired, {"t-0": 5}, 99, 60.0, 100.0)
    assert should_fire(fired, {"t-0": 5}, 100, 60.0, 100.0)
