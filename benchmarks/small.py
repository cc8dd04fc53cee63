"""A window of 1,000 records, in a new process each time as a task is: plain Spark, the operator with a Spark of its own, and
in a warm one; and a window whose records are changed by SQL, with and without a plan of an earlier task.

Seconds and CPU seconds are those of ``execute``, with all processes that it starts; of plain Spark those of a session and a first
job. The CPU seconds of a warm Spark process are not counted. CPU seconds change less than seconds on a busy machine.

Python's bytecode is kept between the processes, as it is in an installation: without it each process compiles what it imports,
which takes two seconds.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from airflow_kafka_spark.hooks.spark.jars import find_cache_directory
from airflow_kafka_spark.testing import EmbeddedKafka
from benchmarks import events
from benchmarks.bench import SCHEMA
from benchmarks.measure import Stopwatch, Table, print_title, print_turn, tree_cpu_seconds

RECORDS = 1_000
PLAIN = "plain Spark: session and first job"
COLD, WARM, EMPTY = "operator, cold", "operator, warm", "operator, no records"
SQL_COLD, SQL_WARM = "operator with SQL, cold", "operator with SQL, warm"
FIRST = ", analyzed by Spark"
CONTESTANTS = (PLAIN, COLD, WARM, EMPTY, SQL_COLD + FIRST, SQL_COLD, SQL_WARM + FIRST, SQL_WARM)
_RESULT = "result: "


def run(directory: Path, rounds: int) -> None:
    """Measure in turns, after one turn that makes the class archive, begins the pipelines and starts the warm process."""
    print_title(f"A window of {RECORDS:,} records, in a new process")
    results: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    subprocess.run([sys.executable, "-m", "airflow_kafka_spark.hooks.spark.class_archive"], check=True, stdout=subprocess.DEVNULL)
    with EmbeddedKafka() as kafka:
        kafka.create_topic(events.TOPIC, 4)
        for turn in range(rounds + 1):
            events.produce(kafka.connection_extra(), turn * RECORDS, RECORDS)
            for name, measured in results.items():
                result = _measure(kafka, name, turn, directory)
                if turn:
                    measured.append(result)
                shown = ", ".join(f"{key} {value:.2f}" for key, value in result.items())
                print_turn(name, f"{shown}, load {os.getloadavg()[0]:.1f}", warming_up=not turn)
    medians = {
        name: {key: statistics.median(result[key] for result in measured) for key in ("seconds", "CPU seconds")}
        for name, measured in results.items()
    }
    print()
    table = Table("what", "s", "ratio", "CPU s", "ratio")
    for name, found in medians.items():
        table.row(name, *(f"{cell:.2f}" for key, value in found.items() for cell in (value, value / medians[PLAIN][key])))


def _measure(kafka: EmbeddedKafka, name: str, turn: int, directory: Path) -> dict[str, float]:
    extra = {**({"keep_alive": "5m"} if "warm" in name else {}), **({"plan_cache": False} if name.endswith(FIRST) else {})}
    connection = {"conn_type": "spark", "host": "local[2]", "extra": extra}
    environment = {
        **{key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"},
        "PYTHONPYCACHEPREFIX": str(find_cache_directory() / "bytecode"),
        "AIRFLOW_CONN_KAFKA_DEFAULT": kafka.connection_json(),
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps(connection),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }
    command = [sys.executable, "-m", "benchmarks.small", name, str(turn), str(directory)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    assert done.returncode == 0 and lines, f"{done.stdout}\n{done.stderr}"
    result: dict[str, float] = json.loads(lines[-1][len(_RESULT) :])
    return result


def _plain() -> dict[str, float]:
    """Start a session, and run a first job, which reads and writes nothing."""
    from pyspark.sql import SparkSession

    session = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
    session.range(0, 2, 1, 2).mapInArrow(lambda batches: batches, "id long").collect()
    return {}


def _operate(name: str, turn: str, directory: str) -> Callable[[], dict[str, float]]:
    """Return a function that moves a window: validate, fence, plan, move, commit, close.

    A window without records is the next one of the cold pipeline.
    """
    from airflow_kafka_spark.formats import Json
    from airflow_kafka_spark.operators import KafkaToSinkOperator
    from airflow_kafka_spark.sinks import FilesSink
    from airflow_kafka_spark.transforms import Sql
    from benchmarks.between_topics import COLUMNS, FILTER
    from tests.support.runs import context

    pipeline = re.sub(r"\W+", "-", COLD if name == EMPTY else name)
    operator = KafkaToSinkOperator(
        task_id="bench",
        topics=events.TOPIC,
        group_id=pipeline,
        pipeline=pipeline,
        value=Json(schema=SCHEMA),
        sink=FilesSink(path=f"{directory}/{pipeline}"),
        transforms=[Sql(COLUMNS, filter=FILTER)] if "SQL" in name else [],
    )

    def operate() -> dict[str, float]:
        report = operator.execute(context(f"{name} {turn}"))
        assert report["records_read"] == (0 if name == EMPTY else RECORDS), report
        timings: dict[str, float] = report["timings"]
        return timings

    return operate


def main() -> None:
    name, turn, directory = sys.argv[1:]
    work = _plain if name == PLAIN else _operate(name, turn, directory)
    with Stopwatch(tree_cpu_seconds) as watch:
        timings = work()
    result = {"seconds": watch.seconds, "CPU seconds": watch.cpu, **timings}
    print(_RESULT + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
