"""A small window, in a new process each time as a task is: plain Spark, the operator with its own Spark, and in a warm one."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from airflow_kafka_spark.testing import EmbeddedKafka
from benchmarks import events
from benchmarks.bench import SCHEMA

RECORDS = 1_000
CONTESTANTS = ("plain Spark", "operator, cold", "operator, warm", "operator, no records")
_SECONDS = "seconds: "


def run(directory: Path, rounds: int) -> None:
    """Measure in turns, after one turn in which the class archive is made, the pipelines begin and the warm process starts."""
    print(f"\n## A window of {RECORDS:,} records, in a new process\n", flush=True)
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    subprocess.run([sys.executable, "-m", "airflow_kafka_spark.hooks.class_archive"], check=False, stdout=subprocess.DEVNULL)
    with EmbeddedKafka() as kafka:
        kafka.create_topic(events.TOPIC, 4)
        for turn in range(rounds + 1):
            events.produce(kafka.connection_extra(), turn * RECORDS, RECORDS)
            for name, measured in times.items():
                seconds = _measure(kafka, name, turn, directory)
                if turn:
                    measured.append(seconds)
                load = os.getloadavg()[0]
                print(f"   {name}: {seconds:.2f} s, load {load:.1f}{'' if turn else ' (warming up)'}", flush=True)
    medians = {name: statistics.median(measured) for name, measured in times.items()}
    print("\n| what | s | ratio to plain Spark |\n| --- | ---: | ---: |")
    for name, seconds in medians.items():
        print(f"| {name} | {seconds:.2f} | {seconds / medians['plain Spark']:.2f} |", flush=True)


def _measure(kafka: EmbeddedKafka, name: str, turn: int, directory: Path) -> float:
    connection = {"conn_type": "spark", "host": "local[2]", "extra": {"keep_alive": "2m"} if name.endswith("warm") else {}}
    environment = {
        **os.environ,
        "AIRFLOW_CONN_KAFKA_DEFAULT": kafka.connection_json(),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps(connection),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }
    command = [sys.executable, "-m", "benchmarks.small", name, str(turn), str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(_SECONDS)]
    print("".join(f"      {line}\n" for line in done.stdout.splitlines() if line.startswith("{")), end="")
    assert lines, f"{done.stdout}\n{done.stderr}"
    return float(lines[-1][len(_SECONDS) :])


def _plain() -> None:
    """A session and a first job, which reads and writes nothing."""
    from pyspark.sql import SparkSession

    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    session.range(0, 2, 1, 2).mapInArrow(lambda batches: batches, "id long").collect()


def _operate(name: str, turn: str, directory: str) -> None:
    """A whole window: validate, fence, plan, move, commit, close. One without records is the next one of the cold pipeline."""
    from airflow_kafka_spark.formats import Json
    from airflow_kafka_spark.operators import KafkaToSinkOperator
    from airflow_kafka_spark.sinks import FilesSink
    from tests.support.runs import context

    pipeline = "warm" if name.endswith("warm") else "cold"
    operator = KafkaToSinkOperator(
        task_id="bench",
        topics=events.TOPIC,
        group_id=pipeline,
        pipeline=pipeline,
        value=Json(schema=SCHEMA),
        sink=FilesSink(path=f"{directory}/{pipeline}"),
    )
    begun = time.monotonic()
    report = operator.execute(context(f"{name} {turn}"))
    print(f"{report['timings']}\n{_SECONDS}{time.monotonic() - begun}", flush=True)
    assert report["records_read"] == (0 if name.endswith("no records") else RECORDS), report


def main() -> None:
    name, turn, directory = sys.argv[1:]
    if name == "plain Spark":
        begun = time.monotonic()
        _plain()
        print(f"{_SECONDS}{time.monotonic() - begun}", flush=True)
    else:
        _operate(name, turn, directory)


if __name__ == "__main__":
    main()
