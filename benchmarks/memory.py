"""Memory: what the driver and the Python workers hold while windows of growing size go through."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

from benchmarks.bench import SCHEMA, Stand


def run(stand: Stand) -> None:
    from airflow_kafka_spark.formats import Json
    from airflow_kafka_spark.operators import KafkaToSinkOperator
    from airflow_kafka_spark.sinks import FilesSink, PostgresSink
    from benchmarks import events
    from tests.support.runs import context

    print(
        "\n## Memory\n\n| window | sink | driver (Python), MB | a task's worker at most, MB |\n| ---: | --- | ---: | ---: |",
        flush=True,
    )
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
            with Watched() as watched:
                report = operator.execute(context("run"))
            assert report["records_read"] >= count * 0.99, report
            print(f"| {count:,} | {name} | {watched.driver:,.0f} | {watched.worker:,.0f} |", flush=True)


class Watched:
    """Samples resident memory of this process and of Spark's Python workers."""

    def __init__(self) -> None:
        self.driver = self.worker = 0.0
        self._begun = _resident(os.getpid())
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def driver_growth(self) -> float:
        """Megabytes of this process at most, beyond those at the beginning."""
        return max(0.0, self.driver - self._begun)

    def _sample(self) -> None:
        while not self._done.wait(0.05):
            self.driver = max(self.driver, _resident(os.getpid()))
            workers = (int(p.name) for p in Path("/proc").iterdir() if p.name.isdecimal() and _is_worker(p))
            self.worker = max([self.worker, *(_resident(pid) for pid in workers)])


def _is_worker(process: Path) -> bool:
    try:
        return b"pyspark.daemon" in (process / "cmdline").read_bytes()
    except OSError:
        return False


def _resident(pid: int) -> float:
    """Megabytes."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    except (OSError, IndexError):
        return 0.0
