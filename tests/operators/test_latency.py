"""What the report and Airflow's metrics tell of when a window's records were written."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.errors import ValidationError
from airflow_kafka_spark.operators.metrics import emit, values
from tests.support.pipelines import order

MINUTE = datetime.now(timezone.utc).replace(second=0, microsecond=0) - timedelta(minutes=30)


def produce(pipeline, counts: dict[int, int]) -> dict[str, int]:
    """So many records in each minute; the same as an upstream count."""
    producer, number, upstream = Producer(pipeline.kafka.connection_extra()), 0, {}
    for minute, count in counts.items():
        instant = MINUTE + timedelta(minutes=minute)
        upstream[instant.isoformat()] = count
        for n in range(count):
            at = round(instant.timestamp() * 1000) + n * 500
            producer.produce(pipeline.topic, order(number), b"k%d" % number, timestamp=at)
            number += 1
    producer.flush(30)
    return upstream


def test_latency_is_told_from_the_oldest_and_the_newest_record_to_the_flush(files):
    produce(files, {0: 100, 10: 100})
    before = datetime.now(timezone.utc)
    report = files.run()
    after = datetime.now(timezone.utc)
    latency = report["latency"]
    oldest, newest = MINUTE, MINUTE + timedelta(minutes=10, seconds=49.5)
    assert (before - oldest).total_seconds() < latency["max"] < (after - oldest).total_seconds()
    assert (before - newest).total_seconds() < latency["min"] < (after - newest).total_seconds()
    assert latency["min"] <= latency["p50"] <= latency["p95"] <= latency["max"]
    assert 590 < latency["p95"] - latency["min"] < 660
    assert values(report)["latency_p95_seconds"] == latency["p95"]


@pytest.mark.parametrize("written", [dict, json.dumps, str])
def test_over_and_under_consumption_are_told_per_bucket_beside_the_upstream_count(files, written):
    upstream = produce(files, {0: 50, 1: 60, 5: 70})
    first, *_, last = upstream
    upstream[first] -= 5
    upstream[last] += 7
    report = files.run(upstream_counts=written(upstream))
    consumption = report["consumption"]
    assert (consumption["bucket_seconds"], consumption["over"], consumption["under"]) == (60, 5, 7)
    assert [bucket[1:] for bucket in consumption["buckets"]] == [[50, 45], [60, 60], [70, 77]]
    assert sum(read for _, read, _ in consumption["buckets"]) == report["records_read"] == 180
    told = values(report)
    assert (told["over_consumption"], told["under_consumption"], told["records_read"]) == (5, 7, 180)
    emit(report)


def test_an_upstream_count_that_cannot_be_understood_is_refused_before_anything_is_read(files):
    with pytest.raises(ValidationError, match="upstream_counts"):
        files.run(upstream_counts={"yesterday": 5})


def test_a_window_without_records_has_no_latency(files):
    report = files.run()
    assert report["latency"] is None
    assert "latency_p50_seconds" not in values(report)
