"""Everything around the data: fence, plan, close, a window without records, and reading an old pipeline's ledger."""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks import events
from benchmarks.bench import SCHEMA, Stand
from benchmarks.measure import Table, print_title


def run(stand: Stand) -> None:
    from airflow_kafka_spark.formats import Json
    from airflow_kafka_spark.hooks.spark import jars
    from airflow_kafka_spark.operators import KafkaToSinkOperator
    from airflow_kafka_spark.sinks import FilesSink
    from tests.support.runs import context

    options: dict[str, Any] = {
        "task_id": "around", "topics": events.TOPIC, "group_id": "around", "pipeline": "around", "value": Json(schema=SCHEMA),
        "sink": FilesSink(path=str(stand.directory / "around")), "starting_offsets": "latest",
    }  # fmt: skip
    steps: dict[str, list[float]] = {
        "fence": [],
        "plan": [],
        "close": [],
        "validate": [],
        "window without records, whole task": [],
    }
    for turn in range(11):
        operator = KafkaToSinkOperator(**options)
        begun = time.monotonic()
        report = operator.execute(context(f"run-{turn}"))
        whole = time.monotonic() - begun
        if turn:
            steps["fence"].append(report["timings"]["fence"])
            steps["plan"].append(report["timings"]["plan"])
            steps["close"].append(report["timings"]["total"] - report["timings"]["fence"] - report["timings"]["plan"])
            steps["validate"].append(whole - report["timings"]["total"])
            steps["window without records, whole task"].append(whole)
    begun = time.monotonic()
    jars.resolve_jars([jars.find_spark_kafka_connector()], exclude_bundled=True)
    resolved = time.monotonic() - begun
    print_title("Around the data")
    table = Table("what", "median s", "worst s")
    for name, seconds in steps.items():
        table.row(name, f"{statistics.median(seconds):.3f}", f"{max(seconds):.3f}")
    table.row("connector jars, cached", f"{resolved:.4f}", "")
