"""When an interval is complete in Kafka."""

from __future__ import annotations

import time
from datetime import datetime, timedelta, timezone

import pytest

from airflow_kafka_spark.triggers import IntervalProbe, KafkaIntervalTrigger
from tests.support.lag import produce, transaction
from tests.support.triggers import again, fire
from tests.support.waiting import eventually


def ago(seconds):
    return datetime.now(timezone.utc) - timedelta(seconds=seconds)


def probe(topic, end, grace=10**6):
    made = IntervalProbe(topics=topic, end=end.isoformat(), grace=grace)
    assert not made.find_problems()
    return made


def test_it_is_complete_once_every_partition_has_passed_the_end(kafka, hook, topic):
    end = ago(1000)
    # An age counts from when it is sent, a while after `end` was set.
    produce(kafka, topic, 3, 0, age=2000)
    produce(kafka, topic, 1, 0, age=999)
    produce(kafka, topic, 5, 1, age=2000)
    checked = probe(topic, end)
    observed = checked.check(hook)
    assert not observed.done
    assert observed.value["offsets"] == {f"{topic}-0": 3}
    assert observed.value["waiting"] == [f"{topic}-1"]
    produce(kafka, topic, 1, 1, age=999)
    observed = checked.check(hook)
    assert observed.done
    assert observed.value["offsets"] == {f"{topic}-0": 3, f"{topic}-1": 5}
    kafka.delete_topic(topic)
    kafka.create_topic(topic, 2)
    assert checked.check(hook).value["waiting"] == [f"{topic}-0", f"{topic}-1"], "the records were those of another topic"


def test_a_record_at_the_very_end_belongs_to_the_next_interval(kafka, hook, topic):
    stamp = produce(kafka, topic, 1, 0, age=50)
    produce(kafka, topic, 1, 1, age=50)
    at = datetime.fromtimestamp(stamp / 1000, timezone.utc)
    assert probe(topic, at).check(hook).value["offsets"][f"{topic}-0"] == 0
    assert not probe(topic, at + timedelta(seconds=5)).check(hook).done


def test_a_partition_without_such_a_record_is_idle_once_the_grace_is_over(kafka, hook, topic):
    end = ago(5)
    produce(kafka, topic, 1, 0)
    assert not probe(topic, end, grace=3600).check(hook).done
    observed = probe(topic, end, grace=4).check(hook)
    assert observed.done
    assert observed.value["idle"] == [f"{topic}-1"]


def test_an_open_transaction_may_still_bring_records_into_the_interval(kafka, hook, topic):
    produce(kafka, topic, 1, 1)
    with transaction(kafka, topic, 2) as producer:
        checked = probe(topic, ago(3000), grace=0)
        observed = checked.check(hook)
        assert not observed.done
        assert "an open transaction keeps them back" in observed.line
        producer.commit_transaction(60)
        eventually(lambda: checked.check(hook).done)


def test_it_fires_when_the_grace_ends(kafka, topic):
    end = datetime.now(timezone.utc)
    event = fire(again(KafkaIntervalTrigger(topics=topic, end=end, grace=timedelta(seconds=2), poll_interval=0.2)))
    assert event["status"] == "success"
    assert len(event["value"]["idle"]) == 2
    assert time.time() >= end.timestamp() + 2


@pytest.mark.parametrize(
    ("options", "fragment"),
    [
        ({"topics": []}, "no topic is given"),
        ({"topics": "a,a"}, "named twice"),
        ({"end": "tomorrow"}, "`tomorrow` is not a moment"),
        ({"end": None}, "no end to wait for"),
        ({"grace": "-1"}, "not a number of seconds"),
    ],
)
def test_what_is_wrong_is_named(options, fragment):
    problems = IntervalProbe(**{"topics": "t", "end": "2026-01-01", **options}).find_problems()
    assert [fragment in str(problem) for problem in problems] == [True]


@pytest.mark.parametrize("end", ["2026-01-01T00:00:00Z", "2026-01-01", 1767225600, "1767225600", datetime(2026, 1, 1)])
def test_a_moment_may_be_written_in_many_ways(end):
    assert IntervalProbe(topics="t", end=end).end == datetime(2026, 1, 1, tzinfo=timezone.utc)
