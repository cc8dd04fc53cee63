"""Latency of a window's records in the report and in Airflow's metrics."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.errors import ValidationError
from airflow_kafka_spark.operators.visibility.progress import collect_metrics, emit
from tests.support.pipelines import make, order

MINUTE = datetime.now(timezone.utc).replace(second=0, microsecond=0) - timedelta(minutes=30)


def produce(pipeline, counts: dict[int, int]) -> dict[str, int]:
    """Produce this many records in each minute. Return the numbers as an upstream count."""
    producer, number, upstream = Producer(pipeline.kafka.connection_extra()), 0, {}
    for minute, count in counts.items():
        instant = MINUTE + timedelta(minutes=minute)
        upstream[instant.isoformat()] = count
        for n in range(count):
            at = round(instant.timestamp() * 1000) + n * 500
            producer.produce(pipeline.topic, order(number), b"k%d" % number, timestamp=at)
            number += 1
    producer.flush(60)
    return upstream


@contextmanager
def statsd(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A StatsD server that gets Airflow's metrics of this process."""
    from airflow.sdk.observability import stats
    from airflow.sdk.observability.metrics import stats_utils

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(60)
        port = str(server.getsockname()[1])
        settings = {"ON": "True", "HOST": "127.0.0.1", "PORT": port, "PREFIX": "airflow", "INFLUXDB_ENABLED": "True"}
        with monkeypatch.context() as changed:
            for name, value in settings.items():
                changed.setenv(f"AIRFLOW__METRICS__STATSD_{name}", value)
            # Airflow does this where a task begins.
            stats.initialize(factory=stats_utils.get_stats_factory(), export_legacy_names=False)
            try:
                yield server
            finally:
                changed.undo()
                stats.initialize(factory=stats_utils.get_stats_factory(), export_legacy_names=False)


def test_latency_up_to_the_flush_and_over_and_under_consumption_per_bucket_are_reported_with_the_upstream_count(
    files, monkeypatch
):
    upstream = produce(files, {0: 50, 1: 60, 10: 70})
    first, *_, last = upstream
    upstream[first] -= 5
    upstream[last] += 7
    before = datetime.now(timezone.utc)
    report = files.run(upstream_counts=str(upstream))
    after = datetime.now(timezone.utc)
    latency, consumption, metrics = report["latency"], report["consumption"], collect_metrics(report)
    oldest, newest = MINUTE, MINUTE + timedelta(minutes=10, seconds=34.5)
    assert (before - oldest).total_seconds() < latency["max"] < (after - oldest).total_seconds()
    assert (before - newest).total_seconds() < latency["min"] < (after - newest).total_seconds()
    assert latency["min"] <= latency["p50"] <= latency["p95"] <= latency["max"]
    assert 590 < latency["p95"] - latency["min"] < 660
    assert metrics["latency_p95_seconds"] == latency["p95"]
    assert (consumption["bucket_seconds"], consumption["over"], consumption["under"]) == (60, 5, 7)
    assert [bucket[1:] for bucket in consumption["buckets"]] == [[50, 45], [60, 60], [70, 77]]
    assert sum(read for _, read, _ in consumption["buckets"]) == report["records_read"] == 180
    assert (metrics["over_consumption"], metrics["under_consumption"], metrics["records_read"]) == (5, 7, 180)
    with statsd(monkeypatch) as server:
        emit(report)
        received = set()
        while not any(line.startswith("airflow.kafka_spark.window.completed,") for line in received):
            received.add(server.recv(65_536).decode())
    tags = f"pipeline={files.name}"
    assert {f"airflow.kafka_spark.window.{name},{tags}:{value}|g" for name, value in metrics.items()} < received
    assert f"airflow.kafka_spark.window.completed,{tags}:1|c" in received


def test_an_upstream_count_is_a_mapping_or_a_text_of_one_and_anything_else_is_refused_before_anything_is_read(files):
    counts = {MINUTE.isoformat(): 45}
    found = [
        make(**{**files.arguments, "upstream_counts": written(counts)}).read_options.counts for written in (dict, json.dumps, str)
    ]
    assert found[0] and found.count(found[0]) == 3
    with pytest.raises(ValidationError, match="upstream_counts"):
        files.run(upstream_counts={"yesterday": 5})
    # A window without records has no latency.
    report = files.run()
    assert report["latency"] is None
    assert "latency_p50_seconds" not in collect_metrics(report)
