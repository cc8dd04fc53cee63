"""The ledger of data intervals on a real broker."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from airflow_kafka_spark.errors import IntervalOverlaps
from airflow_kafka_spark.hooks.interval_ledger import NUMBER, IntervalLedger
from airflow_kafka_spark.hooks.kafka import KafkaHook
from airflow_kafka_spark.windows.interval import Interval
from airflow_kafka_spark.windows.model import OffsetRange, Window

NEW_YEAR = datetime(2026, 1, 1, tzinfo=timezone.utc)


@pytest.fixture
def hook(kafka, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_LEDGER", kafka.connection_json())
    with KafkaHook("kafka_ledger") as made:
        yield made


def window(ledger: IntervalLedger) -> Window:
    bounds = (ledger.interval.start_ms, ledger.interval.end_ms)
    return Window(ledger.pipeline, NUMBER, (OffsetRange("t", 0, 0, 10),), ledger.run, "", "c", {"t": "id"}, interval=bounds)


def test_of_two_overlapping_intervals_that_are_planned_at_once_the_later_one_is_withdrawn(hook, unique):
    name, topic = unique("pipeline"), unique("ledger")
    hour, day = (Interval(NEW_YEAR, NEW_YEAR + timedelta(hours=hours)) for hours in (1, 24))
    with (
        IntervalLedger(hook, name, "hourly", hour, topic=topic) as first,
        IntervalLedger(hook, name, "daily", day, topic=topic) as second,
    ):
        # Both have read the ledger by now, and neither has seen the other one's plan.
        first.plan(window(first))
        with pytest.raises(IntervalOverlaps):
            second.plan(window(second))
    with IntervalLedger(hook, name, "daily", day, topic=topic) as later:
        assert later.memory.entries == {}
        assert [state.interval for state in later.family.intervals.values()] == [hour]
