"""A whole table of narrow rows: PostgreSQL -> topic -> another table, with kills, and its cost per row at growing sizes.

The table has no column that grows: its key is a UUID. Each step runs in processes of its own, which are killed every few minutes.
Afterwards a VerifyOperator compares both tables. ``BULK_SPLIT_BY=pages`` reads the table by its pages.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from airflow_kafka_spark.testing import EmbeddedKafka, EmbeddedPostgres

SIZES = (1_000_000, 5_000_000, 25_000_000)
"""Rows; ``BULK_ROWS`` has other sizes, separated by commas."""
KILL_SECONDS = 180
"""Seconds after which a process is killed; ``BULK_KILL_SECONDS`` has another number."""
WINDOW = 2_000_000
"""Rows of a window at most."""
COLUMNS = "event uuid, customer integer, amount numeric(10,2), placed_at timestamptz"
ROWS = "md5(n::text)::uuid, n % 100000, (n % 1000000) / 100.0, timestamptz '2026-01-01+00' + n * interval '1 second'"
SCHEMA = "event string, customer int, amount decimal(10,2), placed_at timestamp"
STEPS = {"capture": "table to topic", "apply": "topic to table"}


def run() -> None:
    """Move a table of each size, and print what a row costs."""
    sizes = [int(size) for size in os.environ.get("BULK_ROWS", "").split(",") if size] or SIZES
    every = float(os.environ.get("BULK_KILL_SECONDS", KILL_SECONDS))
    print(f"\n## A table of 4 narrow columns by a UUID, killed every {every:g} s\n", flush=True)
    head = "rows | step | seconds | kills | CPU, µs per row: tasks and driver | database | broker | peak of all processes, MB"
    print(f"| {head} |\n| ---: | --- |{' ---: |' * 6}", flush=True)
    for rows in sizes:
        # Servers of their own, so that disks and logs of one size do not slow down the next.
        with (
            EmbeddedKafka(jvm_options=("-Xmx1g",)) as kafka,
            EmbeddedPostgres(settings={"max_parallel_workers_per_gather": 0, "max_wal_size": "2GB"}) as postgres,
        ):
            os.environ["AIRFLOW_CONN_KAFKA_DEFAULT"] = kafka.connection_json()
            os.environ["AIRFLOW_CONN_SPARK_DEFAULT"] = json.dumps({"conn_type": "spark", "host": "local[2]"})
            os.environ["AIRFLOW_CONN_SHOP"] = postgres.connection_uri()
            kafka.create_topic("narrow", 4)
            with postgres.connect(autocommit=True) as connection:
                connection.execute(f"CREATE TABLE narrow ({COLUMNS})".encode())
                connection.execute(f"INSERT INTO narrow SELECT {ROWS} FROM generate_series(1, {rows}) n".encode())
                connection.execute(b"ALTER TABLE narrow ADD PRIMARY KEY (event)")
                connection.execute(b"VACUUM ANALYZE narrow")
                connection.execute(f"CREATE TABLE copy ({COLUMNS})".encode())
            for step, shown in STEPS.items():
                _measure(kafka, postgres, rows, step, shown, every)
            kafka.delete_topic("narrow")  # its disk is needed for the key of the copy
            with postgres.connect(autocommit=True) as connection:
                connection.execute(b"ALTER TABLE copy ADD PRIMARY KEY (event)")  # fails if a row is there twice
            _verify(postgres.pid)


def _measure(kafka: EmbeddedKafka, postgres: EmbeddedPostgres, rows: int, step: str, shown: str, every: float) -> None:
    pids = (postgres.pid, kafka._get_brokers()[0].pid)
    begun, servers = time.monotonic(), [_cpu(pid) for pid in pids]
    watched, kills = Tree(), 0
    while not watched.attempt(step, every):
        kills += 1
    seconds = time.monotonic() - begun
    of_servers = [_cpu(pid) - before for pid, before in zip(pids, servers, strict=True)]
    costs = " | ".join(f"{cpu / rows * 1e6:.2f}" for cpu in (watched.seconds, *of_servers))
    print(f"| {rows:,} | {shown} | {seconds:.0f} | {kills} | {costs} | {watched.peak:,.0f} |", flush=True)


@dataclass
class Tree:
    """The processes of attempts: their CPU seconds, also of those that were killed, and the most memory that they had at once.

    :ivar peak: megabytes; memory that processes share is counted once.
    """

    peak: float = 0.0
    _seconds: dict[tuple[int, float], float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """CPU seconds of all attempts."""
        return sum(self._seconds.values())

    def attempt(self, step: str, every: float) -> bool:
        """Run an attempt, and return False if it was killed."""
        with tempfile.TemporaryDirectory(prefix="airflow-kafka-spark-bulk-") as home:
            environment = {**os.environ, "AIRFLOW_HOME": home, "SPARK_LOCAL_DIRS": home}
            log = Path(home) / "log"
            with log.open("w") as out:
                command = [sys.executable, "-m", "benchmarks.bulk", step]
                process = subprocess.Popen(command, stdout=out, stderr=out, env=environment, start_new_session=True)
            done = threading.Event()
            watcher = threading.Thread(target=self._watch, args=(process.pid, done), daemon=True)
            watcher.start()
            try:
                process.wait(every)
            except subprocess.TimeoutExpired:
                pass
            finally:
                done.set()
                watcher.join()
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if process.returncode not in (0, -signal.SIGKILL):
                raise AssertionError(log.read_text()[-5000:])
            if os.environ.get("BULK_LOG"):
                shutil.copyfile(log, f"{os.environ['BULK_LOG']}-{step}")
            return process.returncode == 0

    def _watch(self, pid: int, done: threading.Event) -> None:
        import psutil

        while not done.wait(0.5):
            memory = 0
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(pid)
                for process in (root, *root.children(recursive=True)):
                    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                        times = process.cpu_times()
                        self._seconds[process.pid, process.create_time()] = times.user + times.system
                        memory += process.memory_full_info().pss
            self.peak = max(self.peak, memory / 1e6)


def _cpu(pid: int | None) -> float:
    """Return the CPU seconds of a server, also of those of its processes that have ended."""
    import psutil

    assert pid is not None
    server = psutil.Process(pid)
    total = 0.0
    for process in (server, *server.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _verify(pid: int) -> None:
    from airflow_kafka_spark.operators import VerifyOperator
    from airflow_kafka_spark.sources import JdbcSource

    begun, before = time.monotonic(), _cpu(pid)
    source, copy = JdbcSource("shop", "narrow"), JdbcSource("shop", "copy")
    found = VerifyOperator(task_id="verify", source=source, sink=copy, parallel=2).execute({})
    assert (found["different"], found["missing"], found["extra"]) == (0, 0, 0), found
    cpu = (_cpu(pid) - before) / found["source_rows"] * 1e6
    print(f"   verified: no difference, {time.monotonic() - begun:.0f} s, {cpu:.2f} µs of the database per row", flush=True)


# --- in the processes that are killed ---------------------------------------------------------------------------------------


def _capture() -> None:
    """Publish the table, window by window, until the pass is complete."""
    from airflow_kafka_spark.formats import Json, String
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.ledger.topic import LedgerTopic
    from airflow_kafka_spark.operators import SourceToKafkaOperator
    from airflow_kafka_spark.sinks import KafkaSink
    from airflow_kafka_spark.sources import JdbcSource
    from tests.support.runs import context

    def is_complete() -> bool:
        with KafkaHook() as hook:
            ledger = LedgerTopic(hook, "ledger")
            # A transaction of a task that was killed may hide the last records: its end is awaited.
            found = ledger.read_without_waiting("capture", (b"",)) if ledger.find_existing() else None
            position = found.memory.position.source if found is not None else None
        return bool(position and position.get("complete"))

    split_by: Literal["key", "pages"] = "pages" if os.environ.get("BULK_SPLIT_BY") == "pages" else "key"
    source = JdbcSource("shop", "narrow", max_records=WINDOW, mode="bulk", split_by=split_by)
    while not is_complete():
        SourceToKafkaOperator(
            task_id="capture", source=source, pipeline="capture",
            sink=KafkaSink("narrow", value=Json(), key="event", key_format=String()), ledger_topic="ledger",
        ).execute(context(f"run-{time.time_ns()}"))  # fmt: skip


def _apply() -> None:
    """Copy the topic into the other table, window by window, until nothing is left."""
    from airflow_kafka_spark.formats import Json
    from airflow_kafka_spark.operators import KafkaToSinkOperator
    from airflow_kafka_spark.sinks import PostgresSink
    from tests.support.runs import context

    while True:
        report = KafkaToSinkOperator(
            task_id="apply", topics=["narrow"], group_id="apply", pipeline="apply", value=Json(schema=SCHEMA),
            sink=PostgresSink("shop", "copy"), ledger_topic="ledger", max_records=WINDOW, split_records=250_000,
        ).execute(context(f"run-{time.time_ns()}"))  # fmt: skip
        if not report or not report.get("records_read"):
            return


if __name__ == "__main__":
    {"capture": _capture, "apply": _apply}[sys.argv[1]]()
