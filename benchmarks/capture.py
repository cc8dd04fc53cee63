"""PostgreSQL's log -> Kafka, exactly once: the operator against Debezium in Kafka Connect, same changes and same broker."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.testing import EmbeddedKafka, EmbeddedPostgres
from benchmarks.measure import SparkCpuMeter, Stopwatch, print_turn, tree_cpu_seconds

ROWS = 500
"""Rows of a transaction."""
PREFIXES = {"operator": "ours", "Debezium": "theirs"}


@contextmanager
def start_servers() -> Iterator[tuple[EmbeddedKafka, EmbeddedPostgres]]:
    """Start a broker and a PostgreSQL that writes a logical log, and set the connections to them and to Spark."""
    with (
        EmbeddedKafka(jvm_options=("-Xmx1g",)) as kafka,
        EmbeddedPostgres(settings={"wal_level": "logical", "max_wal_size": "4GB"}) as postgres,
    ):
        os.environ["AIRFLOW_CONN_KAFKA_DEFAULT"] = kafka.connection_json()
        os.environ["AIRFLOW_CONN_SPARK_DEFAULT"] = json.dumps({"conn_type": "spark", "host": "local[2]"})
        os.environ["AIRFLOW_CONN_SHOP"] = postgres.connection_uri()
        yield kafka, postgres


def run(directory: Path, records: int, rounds: int) -> None:
    """Print seconds, CPU seconds and rates of both, in turns.

    :param records: changes of a turn: half of them inserts, half updates.
    """
    from tests.support.debezium.record import download

    download()
    with start_servers() as (kafka, postgres):
        for prefix in PREFIXES.values():
            kafka.create_topic(f"{prefix}.public.orders", 1)
        with postgres.connect(autocommit=True) as connection, _worker(directory, kafka) as worker:
            connection.execute("CREATE TABLE orders (id bigint PRIMARY KEY, customer text, amount numeric(12,2), at timestamptz)")
            connection.execute("CREATE PUBLICATION orders FOR TABLE orders")
            meter = SparkCpuMeter()
            _capture("begin")
            _connect(worker, postgres)
            done = 0
            for turn in range(rounds + 1):
                size = records if turn else min(records, 20_000)
                worker.pause()
                _change(connection, done, size)
                done += size
                with Stopwatch(meter.seconds) as ours:
                    _capture(str(turn))
                assert _stable("ours.public.orders") >= done
                with Stopwatch(lambda: tree_cpu_seconds(worker.process.pid)) as theirs:
                    worker.resume()
                    while _stable("theirs.public.orders") < done:
                        time.sleep(0.05)
                for name, watch in zip(PREFIXES, (ours, theirs), strict=True):
                    rate, core = size / watch.seconds / 1000, watch.cpu / size * 1e6
                    used = f"{watch.seconds:.2f} s, {watch.cpu:.1f} s of a core"
                    found = f"{used}, {rate:,.0f} k changes/s, {core:.1f} microseconds of a core a change"
                    print_turn(name, found, warming_up=not turn)


def _change(connection: Any, first: int, count: int) -> None:
    """Insert rows and update each, in transactions of :data:`ROWS`."""
    for at in range(first // 2, (first + count) // 2, ROWS):
        last = min(at + ROWS, (first + count) // 2) - 1
        rows = f"SELECT n, 'customer-' || n % 10000, n % 100000 / 100.0, now() FROM generate_series({at}, {last}) n"
        connection.execute(f"INSERT INTO orders {rows}".encode())
        connection.execute(f"UPDATE orders SET amount = amount + 1 WHERE id BETWEEN {at} AND {last}".encode())


def _stable(topic: str) -> int:
    """Return the last stable offset: with each transaction, a record of the brokers is counted, too."""
    with KafkaHook() as hook:
        (found,) = hook.read_offsets([topic]).values()
    return found.lso


def _capture(run_id: str) -> None:
    from airflow_kafka_spark.formats import Raw
    from airflow_kafka_spark.operators import SourceToKafkaOperator
    from airflow_kafka_spark.sinks import KafkaSink
    from airflow_kafka_spark.sources import PostgresCdcSource
    from tests.support.runs import context

    source = PostgresCdcSource("shop", "orders", "ours", "ours", max_wal_bytes=4 << 30)
    sink = KafkaSink(topic_column="topic", key="key", key_format=Raw(), value_columns=["value"], value=Raw())
    operator = SourceToKafkaOperator(task_id="bench", source=source, sink=sink, pipeline="capture", ledger_topic="ledger-capture")
    operator.execute(context(f"run-{run_id}"))


class _Worker:
    """A worker of Kafka Connect."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log

    def request(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def pause(self) -> None:
        self.request("PUT", "/connectors/orders/pause")
        self.wait("PAUSED")

    def resume(self) -> None:
        self.request("PUT", "/connectors/orders/resume")

    def wait(self, state: str) -> None:
        while True:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with suppress(urllib.error.URLError, OSError):
                found = self.request("GET", "/connectors/orders/status")
                states = {found["connector"]["state"], *(task["state"] for task in found["tasks"])}
                assert "FAILED" not in states, found
                if states == {state} and found["tasks"]:
                    return
            time.sleep(0.2)


@contextmanager
def _worker(directory: Path, kafka: EmbeddedKafka) -> Iterator[_Worker]:
    from airflow_kafka_spark.testing import _processes as processes
    from tests.support.debezium.record import JARS

    (port,) = processes.find_free_ports(1)
    plugins, settings, log = directory / "plugins", directory / "worker.properties", directory / "worker.log"
    plugins.mkdir()
    (plugins / "debezium").symlink_to(JARS)
    given = {
        "bootstrap.servers": kafka.bootstrap_servers,
        "group.id": "connect",
        "exactly.once.source.support": "enabled",
        "key.converter": "org.apache.kafka.connect.json.JsonConverter",
        "value.converter": "org.apache.kafka.connect.json.JsonConverter",
        "key.converter.schemas.enable": "false",
        "value.converter.schemas.enable": "false",
        "offset.storage.topic": "connect-offsets",
        "config.storage.topic": "connect-configs",
        "status.storage.topic": "connect-status",
        "offset.storage.replication.factor": "1",
        "config.storage.replication.factor": "1",
        "status.storage.replication.factor": "1",
        "offset.storage.partitions": "1",
        "status.storage.partitions": "1",
        "listeners": f"http://127.0.0.1:{port}",
        "plugin.path": str(plugins),
        "producer.compression.type": "lz4",
        "producer.linger.ms": "5",
        "producer.batch.size": "262144",
    }
    settings.write_text("".join(f"{name}={value}\n" for name, value in given.items()))
    command = ["java", "-Xmx1g", "-Dfile.encoding=UTF-8", "-cp", f"{JARS}/*"]
    command += ["org.apache.kafka.connect.cli.ConnectDistributed", str(settings)]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    worker = _Worker(process, f"http://127.0.0.1:{port}", log)
    try:
        yield worker
    finally:
        process.kill()
        process.wait()


def _connect(worker: _Worker, postgres: EmbeddedPostgres) -> None:
    """Start the connector, and wait until it has a slot."""
    config = {
        "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
        "exactly.once.support": "required",
        "plugin.name": "pgoutput",
        "publication.name": "orders",
        "slot.name": "theirs",
        "topic.prefix": "theirs",
        "snapshot.mode": "no_data",
        "database.hostname": postgres.host,
        "database.port": str(postgres.port),
        "database.user": postgres.user,
        "database.password": postgres.password,
        "database.dbname": postgres.database,
        "max.batch.size": "8192",
        "max.queue.size": "32768",
    }
    while True:
        assert worker.process.poll() is None, worker.log.read_text()[-3000:]
        try:
            worker.request("PUT", "/connectors/orders/config", config)
            break
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    worker.wait("RUNNING")
    with postgres.connect(autocommit=True) as connection:
        while not connection.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = 'theirs'").fetchone():
            time.sleep(0.2)
