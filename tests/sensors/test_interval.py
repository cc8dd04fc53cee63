"""The interval sensor."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest
from airflow.sdk.exceptions import TaskDeferred

from airflow_kafka_spark.errors import TopicMissing, ValidationError
from airflow_kafka_spark.sensors import KafkaIntervalSensor
from tests.support.lag import produce
from tests.support.triggers import fire

both = pytest.mark.parametrize("deferrable", [False, True], ids=["poke", "deferred"])


def interval(end, width=3600.0):
    return {"data_interval_start": end - timedelta(seconds=width), "data_interval_end": end}


def run(context, **options):
    sensor = KafkaIntervalSensor(task_id="wait", poke_interval=0.2, **options)
    try:
        return sensor.execute(context)
    except TaskDeferred as deferred:
        return sensor.resume_execution(deferred.method_name, {"event": fire(deferred.trigger)}, context)


@both
def test_it_waits_for_the_end_of_the_run_s_data_interval(kafka, topic, context, deferrable):
    end = datetime.now(timezone.utc) + timedelta(seconds=2)
    produce(kafka, topic, 1, 0, age=-200)
    value = run(context(**interval(end)), topics=[topic], grace=1, deferrable=deferrable)
    assert datetime.now(timezone.utc) >= end + timedelta(seconds=1)
    assert value["end"] == end.isoformat()
    assert (value["offsets"], value["idle"]) == ({f"{topic}-0": 0}, [f"{topic}-1"])


@both
def test_an_end_may_be_given(kafka, topic, context, deferrable):
    for partition in (0, 1):
        produce(kafka, topic, 1, partition)
    value = run(context(), topics=topic, end="2026-01-01T00:00:00+00:00", deferrable=deferrable)
    assert value["offsets"] == {f"{topic}-0": 0, f"{topic}-1": 0}


@pytest.mark.parametrize("dag_run", [{}, {"data_interval_start": None, "data_interval_end": None}])
def test_the_error_of_a_run_without_an_interval_names_the_timetable_to_use(topic, context, dag_run):
    with pytest.raises(ValidationError, match=r"CronDataIntervalTimetable.*CronTriggerTimetable\(\.\.\., timezone=.*interval="):
        run(context(**dag_run), topics=topic)


def test_the_error_of_an_interval_without_width_names_the_timetable_to_use_and_all_other_problems(topic, context):
    moment = datetime(2026, 1, 1, tzinfo=timezone.utc)
    with pytest.raises(ValidationError, match="(?s)has no width.*CronDataIntervalTimetable") as caught:
        run(context(**interval(moment, 0)), topics="a b", grace="soon")
    assert {problem.where for problem in caught.value.problems} == {"end", "topics", "grace"}


def test_a_template_that_found_no_end_is_an_error(topic, context):
    with pytest.raises(ValidationError, match="no end to wait for"):
        run(context(), topics=topic, end="None")


@both
def test_a_missing_topic_is_an_error_at_once(unique, context, deferrable):
    with pytest.raises(TopicMissing):
        run(context(), topics=unique("nowhere"), end=0, deferrable=deferrable)
