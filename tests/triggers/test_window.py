"""The trigger that waits for an upstream pipeline's window, with a real ledger."""

from __future__ import annotations

import asyncio
import time
from datetime import datetime, timezone

import pytest

from airflow_kafka_spark.errors import ValidationError
from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.ledger.attempt import Ledger, format_utc_now
from airflow_kafka_spark.ledger.interval import IntervalLedger
from airflow_kafka_spark.triggers import KafkaWindowTrigger, WindowProbe
from airflow_kafka_spark.windows.interval import Interval
from airflow_kafka_spark.windows.model import OffsetRange, Window
from tests.support.control import forget, pause
from tests.support.triggers import again, fire, first
from tests.support.waiting import eventually


class Upstream:
    """A pipeline whose windows are completed by the test."""

    def __init__(self, name, topic):
        self.name, self.ledger_topic, self.topic, self.number = name, f"ledger-{name}", topic, 0

    def plan(self, hook, run):
        ledger = Ledger(hook, self.name, run, topic=self.ledger_topic)
        ledger.__enter__()
        self.number += 1
        ledger.plan(
            Window(self.name, self.number, (OffsetRange(self.topic, 0, 0, 0),), run, format_utc_now(), hook.read_cluster_id())
        )
        return ledger

    def complete(self, run):
        with KafkaHook(timeout=20) as hook:
            self.plan(hook, run).close({"completed_at": format_utc_now(), "records_read": self.number}, {})


@pytest.fixture
def upstream(unique, topic):
    return Upstream(unique("pipe"), topic)


def trigger(upstream, **options):
    return KafkaWindowTrigger(pipeline=upstream.name, ledger_topic=upstream.ledger_topic, poll_interval=0.2, **options)


def test_it_fires_once_the_run_s_window_is_complete_and_brings_its_report(hook, upstream):
    run = "dag/run2/task"

    async def completed_later():
        waiting = asyncio.create_task(first(again(trigger(upstream, run=run))))
        await asyncio.to_thread(upstream.complete, "dag/run1/task")
        ledger = await asyncio.to_thread(upstream.plan, hook, run)
        await asyncio.sleep(1)
        assert not waiting.done(), "the window is planned, not complete"
        await asyncio.to_thread(ledger.close, {"completed_at": format_utc_now(), "records_read": 42}, {})
        return await waiting

    value = asyncio.run(completed_later())["value"]
    assert (value["window"], value["run"], value["report"]["records_read"]) == ("0000000002", run, 42)


def test_a_window_that_is_complete_already_is_found_at_once(upstream):
    upstream.complete("dag/run1/task")
    assert fire(trigger(upstream, after=0))["value"]["window"] == "0000000001"
    assert fire(trigger(upstream, run="dag/run1/task"))["value"]["pipeline"] == upstream.name


def test_while_it_waits_it_says_if_the_pipeline_is_paused_or_was_forgotten(hook, upstream):
    upstream.complete("dag/run1/task")
    change = {"why": "a test", "who": "ann", "ledger_topic": upstream.ledger_topic}
    pause(hook, upstream.name, **change)
    waiting = WindowProbe(pipeline=upstream.name, after=1, ledger_topic=upstream.ledger_topic)
    eventually(lambda: "its last complete window is 1. It is paused since" in waiting.check(hook).line)
    forget(hook, upstream.name, **change)
    eventually(lambda: "it was forgotten at" in waiting.check(hook).line)
    assert waiting.check(hook).line.endswith(", by ann")


def test_a_pipeline_that_has_never_run_is_waited_for_and_no_ledger_is_made(hook, upstream):
    event = fire(trigger(upstream, after=0, give_up_at=time.time() + 1))
    assert event["status"] == "timeout"
    assert "the ledger does not know it yet" in event["line"]
    assert upstream.ledger_topic not in hook.list_topics()


def test_only_windows_completed_since_count(upstream):
    upstream.complete("dag/run1/task")
    since = format_utc_now()
    event = fire(trigger(upstream, since=since, give_up_at=time.time() + 1))
    assert "its last complete window is 1" in event["line"]
    upstream.complete("dag/run2/task")
    assert fire(trigger(upstream, since=since))["value"]["window"] == "0000000002"


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"pipeline": ""}, "is not the name of a pipeline"),
        ({"after": None}, "nothing to wait for"),
        ({"after": "many"}, "not a whole number"),
        ({"run": "run1"}, "<dag_id>/<run_id>/<task_id>"),
        ({"since": "then"}, "not a moment"),
    ],
)
def test_what_is_wrong_is_named(options, fragment):
    problems = WindowProbe(**{"pipeline": "p", "after": 1, **options}).find_problems()
    assert [fragment in str(problem) for problem in problems] == [True]


def test_a_number_or_a_time_is_refused_for_a_pipeline_that_moves_data_intervals_only(hook, upstream):
    """Its windows have neither, so that nothing would ever be found."""
    hour = Interval(datetime(2026, 1, 1, tzinfo=timezone.utc), datetime(2026, 1, 1, 1, tzinfo=timezone.utc))
    with IntervalLedger(hook, upstream.name, "dag/run1/task", hour, topic=upstream.ledger_topic) as ledger:
        ledger.plan(Window(ledger.pipeline, 1, (), "dag/run1/task", format_utc_now(), interval=(hour.start_ms, hour.end_ms)))
        ledger.close({"completed_at": format_utc_now()}, {})
    place = {"pipeline": upstream.name, "ledger_topic": upstream.ledger_topic}
    assert WindowProbe(**place, run="dag/run1/task").check(hook).done
    assert not WindowProbe(**place, run="dag/run2/task").check(hook).done
    for criteria in ({"after": 0}, {"since": 0.0}, {"run": "dag/run1/task", "after": 0}):
        with pytest.raises(ValidationError, match="moves data intervals"):
            WindowProbe(**place, **criteria).check(hook)
