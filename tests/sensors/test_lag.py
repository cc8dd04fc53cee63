"""The lag sensor: poking, rescheduled and deferred, against real groups."""

from __future__ import annotations

import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

import pytest
from airflow.sdk.exceptions import (
    AirflowRescheduleException,
    AirflowSensorTimeout,
    AirflowSkipException,
    TaskDeferred,
)

from airflow_kafka_spark.errors import ConsumerUnhealthy, KafkaUnavailable, TopicMissing, ValidationError
from airflow_kafka_spark.sensors import KafkaLagSensor
from tests.support.lag import commit, consuming, delete_group, produce
from tests.support.triggers import fire

NOBODY = '{"conn_type": "kafka", "extra": {"bootstrap.servers": "127.0.0.1:1"}}'


def sensor(topic, **options):
    return KafkaLagSensor(
        **{"task_id": "wait", "group_id": topic, "topics": topic, "at_most_records": 0, "poke_interval": 0.2, **options}
    )


def run(sensor, context):
    """Run a sensor to its end: execute it, and resume it after its trigger has fired."""
    try:
        return sensor.execute(context)
    except TaskDeferred as deferred:
        event = fire(deferred.trigger)
        return sensor.resume_execution(deferred.method_name, {"event": event}, context)


both = pytest.mark.parametrize("deferrable", [False, True], ids=["poke", "deferred"])


@both
def test_it_waits_until_a_live_group_has_caught_up(kafka, topic, context, deferrable):
    produce(kafka, topic, 40)
    with consuming(kafka, topic, topic, pause=0.05) as read:
        value = run(sensor(topic, deferrable=deferrable), context())
        assert len(read) == 40
    assert (value["records"], value["seconds"], value["status"], value["group_id"]) == (0, 0.0, "OK", topic)


def test_the_log_of_a_sensor_says_that_it_waits_only_while_it_waits(kafka, topic, context, capsys):
    produce(kafka, topic, 3)
    with pytest.raises(AirflowSensorTimeout):
        run(sensor(topic, at_most_records=2, timeout=0.1), context())
    run(sensor(topic, at_most_records=3), context())
    *first, last = [line for line in capsys.readouterr().out.splitlines() if "records behind" in line]
    assert "; this is at most 3 records" in last
    assert first and all("; waiting for at most 2 records" in line for line in first)


@both
def test_it_waits_until_a_batch_is_worth_starting(kafka, topic, context, deferrable):
    produce(kafka, topic, 2)
    later = threading.Timer(2, lambda: produce(kafka, topic, 8, 1))
    began = time.monotonic()
    later.start()
    value = run(sensor(topic, at_most_records=None, at_least_records=10, deferrable=deferrable), context())
    later.join()
    assert time.monotonic() - began > 1.5
    assert value["records"] == 10


@both
def test_it_waits_until_the_oldest_record_has_waited_long_enough(kafka, topic, context, deferrable):
    stamp = produce(kafka, topic, 1, age=1)
    options = {"at_most_records": None, "at_least_records": 100, "at_least_seconds": 3}
    value = run(sensor(topic, deferrable=deferrable, **options), context())
    assert time.time() - stamp / 1000 >= 3
    assert 3 <= value["seconds"] < 300


@both
def test_what_is_so_already_is_not_waited_for(kafka, topic, context, deferrable):
    produce(kafka, topic, 3)
    commit(kafka, topic, topic, 3)
    assert sensor(topic, deferrable=deferrable, poke_interval=600).execute(context())["records"] == 0


@both
def test_an_expired_group_is_behind_by_everything_and_its_status_says_so(kafka, topic, context, deferrable):
    produce(kafka, topic, 7)
    commit(kafka, topic, topic, 7)
    assert run(sensor(topic, deferrable=deferrable), context())["records"] == 0
    delete_group(kafka, topic)
    value = run(sensor(topic, at_most_records=None, at_least_records=1, deferrable=deferrable), context())
    assert (value["records"], value["status"]) == (7, "STOP")
    with pytest.raises(ConsumerUnhealthy, match="no committed offset"):
        run(sensor(topic, fail_on="STOP", deferrable=deferrable), context())


@both
def test_a_missing_topic_is_an_error_at_once(unique, context, deferrable):
    with pytest.raises(TopicMissing, match="nowhere"):
        sensor(unique("nowhere"), deferrable=deferrable, poke_interval=600).execute(context())


@both
def test_a_missing_topic_is_waited_for_if_that_is_wanted(kafka, unique, context, deferrable):
    topic = unique("later")
    later = threading.Timer(3, lambda: (kafka.create_topic(topic), produce(kafka, topic)))
    later.start()
    options = {"wait_for_topic": True, "at_most_records": None, "at_least_records": 1, "deferrable": deferrable}
    assert run(sensor(topic, **options), context())["records"] == 1
    later.join()


@both
def test_time_is_over_is_a_failure_or_a_skip(kafka, topic, context, deferrable):
    produce(kafka, topic, 1)
    with pytest.raises(AirflowSensorTimeout):
        run(sensor(topic, timeout=1, deferrable=deferrable), context())
    with pytest.raises(AirflowSkipException):
        run(sensor(topic, timeout=1, soft_fail=True, deferrable=deferrable), context())


def test_airflow_ends_a_deferred_sensor_that_its_trigger_did_not_end(kafka, topic, context):
    """Airflow sends a signal some time after the trigger should have ended the sensor."""
    produce(kafka, topic, 1)
    waiting = sensor(topic, timeout=30, deferrable=True)
    with pytest.raises(TaskDeferred) as deferred:
        waiting.execute(context())
    assert deferred.value.timeout.total_seconds() > 30
    with pytest.raises(AirflowSensorTimeout):
        waiting.resume_execution("__fail__", {"error": "Trigger timeout"}, context())
    with pytest.raises(AirflowSkipException):
        sensor(topic, soft_fail=True).resume_execution("__fail__", {"error": "Trigger timeout"}, context())


def test_a_rescheduled_sensor_gives_its_worker_back_between_two_looks(kafka, topic, context):
    produce(kafka, topic, 1)
    made = sensor(topic, mode="reschedule", poke_interval=600)
    task = context()
    task["ti"].get_first_reschedule_date = lambda context: None
    with pytest.raises(AirflowRescheduleException):
        made.execute(task)
    commit(kafka, topic, topic, 1)
    assert made.execute(task)["records"] == 0


@both
def test_brokers_that_are_down_for_good_are_a_clear_failure(topic, context, monkeypatch, deferrable):
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", NOBODY)
    began = time.monotonic()
    with pytest.raises(KafkaUnavailable, match="kafka_default"):
        run(sensor(topic, retry_timeout=3, deferrable=deferrable), context())
    assert 3 < time.monotonic() - began < 300
    with pytest.raises(AirflowSkipException):
        run(sensor(topic, retry_timeout=0, never_fail=True, deferrable=deferrable), context())


@both
def test_a_silent_sensor_waits_through_failures_until_its_time_is_over(topic, context, monkeypatch, deferrable):
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", NOBODY)
    with pytest.raises(AirflowSensorTimeout):
        run(sensor(topic, retry_timeout=0, silent_fail=True, timeout=6, deferrable=deferrable), context())


@pytest.mark.extended
@pytest.mark.faults
def test_a_broker_that_is_down_and_comes_back_is_waited_for(kafka, topic, context):
    """A sensor that pokes and one that defers wait during the same outage."""
    produce(kafka, topic, 3)
    options = {"at_most_records": None, "at_least_records": 1, "retry_timeout": 500}
    with ThreadPoolExecutor(2) as pool:
        kafka.kill()
        try:
            waiting = [pool.submit(run, sensor(topic, deferrable=each, **options), context()) for each in (False, True)]
            assert not wait(waiting, 8, FIRST_COMPLETED).done, "it gave up, or saw something"
        finally:
            kafka.restart()
        assert [each.result(600)["records"] for each in waiting] == [3, 3]


@both
def test_all_problems_are_reported_at_once_and_only_when_it_runs(topic, context, deferrable):
    wrong = sensor(topic, group_id=None, at_most_records="few", per="broker", schedule="nightly", deferrable=deferrable)
    with pytest.raises(ValidationError) as caught:
        wrong.execute(context())
    assert {problem.where for problem in caught.value.problems} == {"group_id", "at_most_records", "per", "schedule"}


def test_templates_are_cast_when_it_runs(kafka, topic, context):
    produce(kafka, topic, 5)
    templated = sensor(
        "{{ params.topic }}", at_most_records=None, at_least_records="{{ 2 + 3 }}", at_least_seconds="", schedule="None"
    )
    templated.render_template_fields({**context(), "params": {"topic": topic}})
    assert templated.execute(context())["records"] == 5
