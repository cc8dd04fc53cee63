"""Memory: what the driver and the Python workers hold while windows of growing size go through."""

from __future__ import annotations

import shutil
from typing import Any

from benchmarks.bench import SCHEMA, Stand
from benchmarks.measure import MemorySampler, Table, print_title


def run(stand: Stand) -> None:
    from airflow_kafka_spark.formats import Json
    from airflow_kafka_spark.operators import KafkaToSinkOperator
    from airflow_kafka_spark.sinks import FilesSink, PostgresSink
    from benchmarks import events
    from tests.support.runs import context

    print_title("Memory")
    table = Table("sink", "window", "driver (Python), MB", "a task's worker at most, MB")
    place = stand.directory / "memory"
    for share in (16, 4, 1):
        count = stand.records // share
        sinks: dict[str, Any] = {
            "files": FilesSink(path=str(place)),
            "postgres": PostgresSink(conn_id="warehouse", table="memory"),
        }
        for name, sink in sinks.items():
            shutil.rmtree(place, ignore_errors=True)
            stand.table("memory")
            pipeline = f"memory-{name}-{share}"
            operator = KafkaToSinkOperator(
                task_id="bench", topics=events.TOPIC, group_id=pipeline, pipeline=pipeline, value=Json(schema=SCHEMA), sink=sink,
                max_records=count,
            )  # fmt: skip
            with MemorySampler() as sampler:
                report = operator.execute(context("run"))
            assert report["records_read"] >= count * 0.99, report
            table.row(name, f"{count:,}", f"{sampler.driver:,.0f}", f"{sampler.worker:,.0f}")
