"""Measure the pages of many pipelines: the time from the first request to the first whole list, and each request afterwards.

Needs neither Spark nor a database beside Airflow's own.
"""

from __future__ import annotations

import json
import statistics
import time
import urllib.parse
import urllib.request
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from benchmarks.measure import Table, print_title

PIPELINES, WINDOWS, TOPICS, PARTITIONS = 500, 20, 10, 3
DAGS = 10
REQUESTS = 100
LEDGER = "airflow-windows"

FLOWS = """
from airflow.sdk import DAG
from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToSinkOperator
from airflow_kafka_spark.sinks import FilesSink

value = Json(schema="id bigint")
for dag in range({dags}):
    with DAG(f"flow_{{dag}}", schedule=None):
        for task in range({tasks}):
            topic = f"bench-{{task % {topics}}}"
            sink = FilesSink(path="/tmp/x")
            KafkaToSinkOperator(task_id=f"task_{{task}}", topics=[topic], group_id=f"g{{dag}}-{{task}}", value=value, sink=sink)
"""


def run(directory: Path) -> None:
    """Print a table.

    :param directory: for temporary files.
    """
    import psutil

    from airflow_kafka_spark.testing import EmbeddedAirflow, EmbeddedKafka

    (directory / "dags").mkdir()
    flows = FLOWS.format(dags=DAGS, tasks=PIPELINES // DAGS, topics=TOPICS)
    (directory / "dags" / "flows.py").write_text(flows)
    with EmbeddedKafka() as kafka:
        records = _write(kafka)
        with EmbeddedAirflow(directory / "dags", connections={"kafka_default": kafka.connection_json()}) as airflow:
            server = psutil.Process(airflow.pid("api-server"))
            _get(airflow.url, "/api/v2/monitor/health")
            before = _memory(server)
            began = time.monotonic()
            first = loaded = measured = 0.0
            while not measured:
                asked = time.monotonic()
                answer = _get(airflow.url, "/kafka-spark/api/pipelines", limit=50, sort="-lag")
                first = first or time.monotonic() - asked
                ledger = next((found for found in answer["ledgers"] if found["state"] == "ok"), None)
                if ledger and answer["total"] == PIPELINES and not loaded:
                    loaded = time.monotonic() - began
                if loaded and answer["pipelines"][-1]["lag_records"] is not None:
                    measured = time.monotonic() - began
            after = _memory(server)
            name = answer["pipelines"][0]["pipeline"]
            place = {"ledger": f"kafka_default/{LEDGER}", "pipeline": name}
            print_title("The pages")
            print(f"{PIPELINES} pipelines, {PIPELINES * WINDOWS:,} windows, {records:,} records in the ledger\n")
            table = Table("what", "p50, ms", "p95, ms")
            for what, path, query in (
                ("a page of 50 pipelines", "pipelines", {"limit": 50}),
                ("the same, searched and sorted by lag", "pipelines", {"limit": 50, "q": "flow_3", "sort": "-lag"}),
                ("one pipeline with its windows", "pipeline", place),
                ("20 older windows", "windows", {**place, "limit": 20, "before": 15}),
            ):
                times = _times(airflow.url, path, query)
                table.row(what, f"{statistics.median(times):.0f}", f"{statistics.quantiles(times, n=20)[-1]:.0f}")
            print(f"\nFirst answer after {first:.1f} s, all windows there after {loaded:.1f} s, all lags after {measured:.1f} s.")
            print(f"The api-server took {after - before:.0f} MB for it.", flush=True)


def _write(kafka: Any) -> int:
    """Write a ledger as operators leave it, and return the number of its records."""
    from confluent_kafka import Producer

    from airflow_kafka_spark.hooks.kafka.partitioner import choose_partition
    from airflow_kafka_spark.ledger.topic import CONFIG
    from airflow_kafka_spark.ledger.topic import PARTITIONS as LEDGER_PARTITIONS
    from airflow_kafka_spark.windows.memory import Attempt, WindowEntry, make_position_record, make_window_record
    from airflow_kafka_spark.windows.model import OffsetRange, State, Window
    from airflow_kafka_spark.windows.plan import Position, find_next_position
    from airflow_kafka_spark.windows.report import Report

    producer, count = Producer({**kafka.connection_extra(), "queue.buffering.max.messages": 1_000_000}), 0
    kafka.create_topic(LEDGER, LEDGER_PARTITIONS, CONFIG)
    for topic in range(TOPICS):
        kafka.create_topic(f"bench-{topic}", PARTITIONS)
        for number in range(3_000):
            producer.produce(f"bench-{topic}", b"x" * 100, partition=number % PARTITIONS)
    began = datetime.now(timezone.utc) - timedelta(hours=WINDOWS)
    for index in range(PIPELINES):
        dag, task = index // (PIPELINES // DAGS), index % (PIPELINES // DAGS)
        name, position = f"flow_{dag}.task_{task}", Position()
        home = choose_partition(name.encode(), LEDGER_PARTITIONS)
        for number in range(1, WINDOWS + 1):
            at = (began + timedelta(hours=number)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            ranges = tuple(
                OffsetRange(f"bench-{task % TOPICS}", partition, 40 * number - 40, 40 * number) for partition in range(PARTITIONS)
            )
            window = Window(name, number, ranges, f"flow_{dag}/scheduled__{at}/task_{task}", at)
            position = find_next_position(position, window)
            report = Report(
                window, records_read=120, records_written=120, timings={"total": 3.0}, completed_at=at, group_id=f"g{dag}-{task}"
            )
            entry = WindowEntry(window, State.COMPLETE, Attempt(1, "0" * 16, window.run, at), report.to_dict())
            for record in (make_window_record(entry), make_position_record(name, position, number)):
                producer.produce(LEDGER, record.value, record.key, partition=home)
                count += 1
        producer.poll(0)
    assert producer.flush(60) == 0
    return count


def _get(url: str, path: str, **query: Any) -> Any:
    with urllib.request.urlopen(f"{url}{path}?{urllib.parse.urlencode(query)}", timeout=60) as answer:
        return json.loads(answer.read())


def _times(url: str, path: str, query: dict[str, Any]) -> list[float]:
    """Return the milliseconds of each request."""
    times = []
    for _ in range(REQUESTS):
        began = time.monotonic()
        _get(url, f"/kafka-spark/api/{path}", **query)
        times.append((time.monotonic() - began) * 1000)
    return times


def _memory(server: Any) -> float:
    """Return the megabytes of a process and of those that it has started."""
    return sum(process.memory_info().rss for process in (server, *server.children(recursive=True))) / 1e6
