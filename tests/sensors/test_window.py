"""The window sensor, with a real ledger."""

from __future__ import annotations

import threading
from datetime import datetime, timedelta, timezone

import pytest
from airflow.sdk.exceptions import AirflowSensorTimeout, TaskDeferred

from airflow_kafka_spark.errors import ValidationError
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.ledger.attempt import Ledger, format_utc_now
from airflow_kafka_spark.sensors import KafkaWindowSensor
from airflow_kafka_spark.triggers import Polling
from airflow_kafka_spark.windows.model import OffsetRange, Window
from tests.support.triggers import fire

both = pytest.mark.parametrize("deferrable", [False, True], ids=["poke", "deferred"])


@pytest.fixture
def upstream(unique, topic):
    """Return a function that completes a window of the pipeline ``pipeline`` for a run: ``upstream(number, run)``."""
    name = unique("pipe")

    def complete(number, run):
        with KafkaHook(timeout=20) as hook, Ledger(hook, name, run, topic=f"ledger-{name}") as ledger:
            ledger.plan(Window(name, number, (OffsetRange(topic, 0, 0, 0),), run, format_utc_now(), hook.read_cluster_id()))
            ledger.close({"completed_at": format_utc_now(), "records_read": number}, {})

    complete.pipeline = name
    return complete


def sensor(upstream, **options):
    name = upstream.pipeline
    return KafkaWindowSensor(
        **{"task_id": "wait", "pipeline": name, "ledger_topic": f"ledger-{name}", "poke_interval": 0.2, "timeout": 300, **options}
    )


def run(sensor, context):
    try:
        return sensor.execute(context)
    except TaskDeferred as deferred:
        return sensor.resume_execution(deferred.method_name, {"event": fire(deferred.trigger)}, context)


@both
def test_it_waits_for_the_window_that_this_run_s_upstream_task_has_planned(upstream, context, deferrable):
    upstream(1, "dag/run0/load")
    later = threading.Timer(1.5, lambda: upstream(2, "dag/run1/load"))
    later.start()
    value = run(sensor(upstream, external_task_id="load", deferrable=deferrable), context("run1"))
    later.join()
    assert (value["window"], value["run"], value["report"]["records_read"]) == ("0000000002", "dag/run1/load", 2)


def test_another_dag_s_run_of_the_same_moment_is_the_one(upstream, context):
    upstream(1, "other/scheduled__2026-01-01T00:00:00+00:00/load")
    which = {"external_dag_id": "other", "external_task_id": "load"}
    assert run(sensor(upstream, **which), context("manual__2026-01-01T00:00:00+00:00_a1"))["window"] == "0000000001"
    with pytest.raises(AirflowSensorTimeout):
        run(sensor(upstream, **which, timeout=1), context("scheduled__2026-01-01T01:00:00+00:00"))


def test_a_pipeline_is_named_after_its_task_if_it_is_not_named(context):
    waiting = KafkaWindowSensor(task_id="wait", external_task_id="load", external_dag_id="other")
    assert waiting.make_trigger(context(), Polling()).get_arguments() == {
        "pipeline": "other.load", "run": "other/run1/load", "after": None, "since": None, "ledger_topic": "airflow-windows",
    }  # fmt: skip


@both
def test_any_window_behind_a_number_will_do(upstream, context, deferrable):
    upstream(1, "dag/run0/load")
    assert run(sensor(upstream, after="0000000000", deferrable=deferrable), context())["window"] == "0000000001"
    with pytest.raises(AirflowSensorTimeout):
        run(sensor(upstream, after=1, timeout=1, deferrable=deferrable), context())


def test_without_more_it_is_what_was_completed_since_this_run_was_due(upstream, context):
    upstream(1, "dag/run0/load")
    now = datetime.now(timezone.utc)
    assert run(sensor(upstream), context(run_after=now - timedelta(minutes=5)))["window"] == "0000000001"
    with pytest.raises(AirflowSensorTimeout):
        run(sensor(upstream, timeout=1), context(run_after=now + timedelta(minutes=5)))


@pytest.mark.parametrize(
    ("options", "where"),
    [
        ({"run": "d/r/t", "external_task_id": "t"}, {"run"}),
        ({"external_dag_id": "d", "after": 1}, {"external_dag_id"}),
        ({"after": "None"}, {"after"}),
        ({"pipeline": None, "after": "x", "run": "r"}, {"pipeline", "after", "run"}),
    ],
)
def test_all_problems_are_reported_at_once(upstream, context, options, where):
    with pytest.raises(ValidationError) as caught:
        run(sensor(upstream, **options), context())
    assert {problem.where for problem in caught.value.problems} == where
