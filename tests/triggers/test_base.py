"""Rules for all triggers: the event loop, brokers that are down, missing topics, and the path of failures to the task."""

from __future__ import annotations

import asyncio
import inspect
import time
from dataclasses import fields

import pytest

from airflow_kafka_spark import errors
from airflow_kafka_spark.errors import ConnectionInvalid, KafkaRefused, KafkaSparkError, KafkaUnavailable, TopicMissing
from airflow_kafka_spark.sensors import KafkaLagSensor
from airflow_kafka_spark.triggers import (
    KafkaIntervalTrigger,
    KafkaLagTrigger,
    KafkaWindowTrigger,
    Polling,
    RetryBudget,
    describe_failure,
    raise_failure,
)
from tests.support.lag import produce
from tests.support.triggers import again, fire, first, longest_pause

NOBODY = '{"conn_type": "kafka", "extra": {"bootstrap.servers": "127.0.0.1:1"}}'


def lag_trigger(topic, **options):
    return KafkaLagTrigger(
        **{"group_id": topic, "topics": topic, "at_least_records": 1, "once": True, "poll_interval": 0.2, **options}
    )


@pytest.mark.faults
def test_the_event_loop_continues_while_a_broker_does_not_answer(kafka, unique):
    topic = unique("lag")
    kafka.create_topic(topic)
    triggers = [
        lag_trigger(topic, retry_timeout=0),
        KafkaIntervalTrigger(topics=topic, end="2026-01-01T00:00:00Z", retry_timeout=0),
        KafkaWindowTrigger(pipeline="p", after=0, retry_timeout=0),
    ]

    async def all_of_them():
        stop = asyncio.Event()
        ticker = asyncio.create_task(longest_pause(stop))
        began = time.monotonic()
        events = await asyncio.gather(*(first(again(trigger)) for trigger in triggers))
        stop.set()
        return events, time.monotonic() - began, await ticker

    # The client is imported before: that takes its time, in whichever thread.
    asyncio.run(first(again(lag_trigger(topic, at_least_records=None, at_most_records=10))))
    kafka.pause()
    try:
        events, lasted, pause = asyncio.run(all_of_them())
    finally:
        kafka.resume()
    assert [event["kind"] for event in events] == ["KafkaUnavailable"] * 3
    assert lasted > 4
    # A request on the event loop would block it until its timeout.
    assert pause < 3, f"the event loop stood still for {pause:.2f} s of {lasted:.1f} s"


@pytest.mark.faults
def test_a_broker_that_comes_back_is_no_failure(kafka, unique):
    topic = unique("lag")
    kafka.create_topic(topic)

    async def down_and_back():
        waiting = asyncio.create_task(first(again(lag_trigger(topic, retry_timeout=500))))
        await asyncio.sleep(0.5)
        await asyncio.to_thread(kafka.kill)
        await asyncio.sleep(6)
        assert not waiting.done()
        await asyncio.to_thread(kafka.restart)
        await asyncio.to_thread(produce, kafka, topic)
        return await waiting

    event = asyncio.run(down_and_back())
    assert (event["status"], event["value"]["records"]) == ("success", 1)


def test_brokers_that_are_down_for_good_are_a_clear_failure(monkeypatch, topic):
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", NOBODY)
    began = time.monotonic()
    event = fire(lag_trigger(topic, retry_timeout=3))
    assert 3 < time.monotonic() - began < 300
    assert event["status"] == "error"
    with pytest.raises(KafkaUnavailable, match="kafka_default.*run the task again"):
        raise_failure(event)


def test_a_connection_that_was_corrected_while_brokers_did_not_answer_is_used(monkeypatch, kafka, topic):
    produce(kafka, topic)

    async def corrected_later(*triggers):
        monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", NOBODY)
        waiting = [asyncio.create_task(first(again(trigger))) for trigger in triggers]
        sensor = KafkaLagSensor(
            task_id="wait", group_id=topic, topics=topic, at_least_records=1, poke_interval=0.2, retry_timeout=600
        )
        waiting.append(asyncio.create_task(asyncio.to_thread(sensor.execute, {})))
        await asyncio.sleep(2)
        monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", kafka.connection_json())
        return await asyncio.wait_for(asyncio.gather(*waiting), 300)

    waited, watched, poked = asyncio.run(corrected_later(lag_trigger(topic), lag_trigger(topic, once=False)))
    assert (waited["value"]["records"], watched["records"], poked["records"]) == (1, 1, 1)


def test_a_connection_that_does_not_exist_is_a_failure_at_once(topic):
    event = fire(lag_trigger(topic, kafka_conn_id="nowhere", retry_timeout=600))
    with pytest.raises(ConnectionInvalid, match="`nowhere`: it is not defined"):
        raise_failure(event)


def test_a_missing_topic_is_a_failure_at_once(unique):
    event = fire(lag_trigger(unique("nowhere"), retry_timeout=600))
    with pytest.raises(TopicMissing, match="nowhere"):
        raise_failure(event)


def test_a_missing_topic_is_waited_for_if_that_is_wanted(kafka, unique):
    topic = unique("later")

    async def created_later():
        waiting = asyncio.create_task(first(again(lag_trigger(topic, wait_for_topic=True, retry_timeout=0))))
        await asyncio.sleep(2.5)
        assert not waiting.done()
        await asyncio.to_thread(kafka.create_topic, topic)
        await asyncio.to_thread(produce, kafka, topic)
        return await waiting

    assert asyncio.run(created_later())["value"]["records"] == 1


def test_waiting_ends_at_the_timeout_and_reports_the_last_state(topic):
    event = fire(lag_trigger(topic, give_up_at=time.time() + 1))
    assert event["status"] == "timeout"
    assert "0 records behind" in event["line"]


def test_wrong_options_are_a_failure_that_names_them_all(topic):
    event = fire(lag_trigger(topic, at_most_records="many", per="broker"))
    assert event["kind"] == "ValidationError"
    assert "at_most_records: `many`" in event["message"]
    assert "per: `broker`" in event["message"]


def test_nothing_is_left_running_when_a_trigger_is_cancelled(topic):
    async def cancelled():
        waiting = asyncio.create_task(first(again(lag_trigger(topic, poll_interval=600))))
        await asyncio.sleep(1.5)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(waiting, 120)

    asyncio.run(cancelled())


def test_the_retry_budget_begins_anew_after_an_answer():
    down = KafkaUnavailable("c", "looking", "no")
    budget = RetryBudget(0.05)
    assert budget.allows(down)
    time.sleep(0.06)
    assert not budget.allows(down)
    budget.reset()
    assert budget.allows(down)
    assert not budget.allows(KafkaRefused("c", "looking", "NO", "no"))
    assert RetryBudget(0, silent=True).allows(KafkaRefused("c", "looking", "NO", "no"))


def test_every_error_comes_through_as_what_it_was():
    known = [TopicMissing("c", ["t"]), KafkaUnavailable("c", "looking", "no"), KafkaRefused("c", "looking", "CODE", "no")]
    for error in known:
        with pytest.raises(type(error)) as caught:
            raise_failure(describe_failure(error))
        assert str(caught.value) == str(error)
        assert caught.value.retryable == error.retryable
        assert caught.value.conn_id == "c"
    with pytest.raises(KafkaSparkError):
        raise_failure({"kind": "nothing we know", "message": "m"})
    classes = [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, KafkaSparkError)]
    assert len(classes) > 20


@pytest.mark.parametrize("trigger", [KafkaLagTrigger, KafkaIntervalTrigger, KafkaWindowTrigger])
def test_constructors_show_every_parameter(trigger):
    parameters = inspect.signature(trigger).parameters.values()
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in parameters)
    assert {field.name for field in fields(Polling)} < {parameter.name for parameter in parameters}


def test_a_negative_poll_interval_is_a_failure_that_names_it(topic):
    event = fire(lag_trigger(topic, poll_interval=-1))
    assert "poll_interval: `-1` is not a number of seconds" in event["message"]
