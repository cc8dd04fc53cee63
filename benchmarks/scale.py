"""Windows of up to 5,000 partitions and of up to 10,000 splits: times of their steps, and what driver and ledger hold."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from airflow_kafka_spark.testing import EmbeddedKafka
from benchmarks import events
from benchmarks.bench import SCHEMA
from benchmarks.measure import MemorySampler, Table, print_title, print_turn

PARTITIONS = (50, 500, 5_000)
"""Partitions of the topics; one split each."""
SPLITS = (100, 1_000, 10_000)
"""Splits of windows of four partitions."""
RECORDS = 20
"""Records of each split, on average."""


def run(directory: Path) -> None:
    os.environ["AIRFLOW_CONN_SPARK_DEFAULT"] = json.dumps({"conn_type": "spark", "host": "local[2]"})
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with EmbeddedKafka(jvm_options=("-Xmx1g",)) as kafka:
        os.environ["AIRFLOW_CONN_KAFKA_DEFAULT"] = kafka.connection_json()
        print_title(f"Windows of many partitions and many splits into files, {RECORDS} records a split")
        rows = []
        for name, partitions, splits in (
            ("warming up", 4, 4),
            *((f"{count:,} partitions", count, count) for count in PARTITIONS),
            *((f"4 partitions, {count:,} splits", 4, count) for count in SPLITS),
        ):
            topic = f"scale-{partitions}-{splits}"
            begun = time.monotonic()
            kafka.create_topic(topic, partitions)
            events.produce(kafka.connection_extra(), 0, splits * RECORDS, topic)
            print_turn(name, f"prepared in {time.monotonic() - begun:.1f} s", warming_up=splits == 4)
            rows.append(_window(kafka, directory, name, topic, splits, None if partitions == splits else RECORDS))
            print_turn(name, ", ".join(rows[-1][2:]), warming_up=splits == 4)
        print()
        steps = ("fence, s", "plan, s", "move, s", "rest, s", "move, ms per split")
        table = Table("window", "splits", *steps, "driver grows by, MB", "ledger, kB")
        for row in rows[1:]:
            table.row(*row)


def _window(kafka: EmbeddedKafka, directory: Path, name: str, topic: str, splits: int, split_records: int | None) -> list[str]:
    """Move all of a topic into files, and return the row of the table."""
    from airflow_kafka_spark.formats import Json
    from airflow_kafka_spark.operators import KafkaToSinkOperator
    from airflow_kafka_spark.sinks import FilesSink
    from tests.support.oracle import committed_records
    from tests.support.runs import context

    options: dict[str, Any] = {} if split_records is None else {"split_records": split_records}
    operator = KafkaToSinkOperator(
        task_id="bench", topics=topic, group_id=topic, pipeline=topic, ledger_topic=f"ledger-{topic}",
        value=Json(schema=SCHEMA), sink=FilesSink(path=str(directory / topic)), **options,
    )  # fmt: skip
    begun = time.monotonic()
    with MemorySampler() as sampler:
        report = operator.execute(context(f"run-{topic}"))
    seconds, timings = time.monotonic() - begun, report["timings"]
    assert report["records_written"] == splits * RECORDS, report
    ledger = committed_records(kafka.connection_extra(), f"ledger-{topic}")
    kilobytes = sum(len(key or b"") + len(value or b"") for _, _, key, value in ledger) / 1_000
    steps = [timings["fence"], timings["plan"], timings["move"]]
    shown = [*steps, seconds - sum(steps)]
    each = timings["move"] / splits * 1_000
    times = [f"{value:.2f}" for value in shown]
    return [name, f"{splits:,}", *times, f"{each:.1f}", f"{sampler.driver_growth:,.0f}", f"{kilobytes:,.0f}"]
