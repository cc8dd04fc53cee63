"""The logs of PostgreSQL and MariaDB -> Kafka, exactly once: the operator against Debezium in Kafka Connect, which reads the same
changes and writes to the same broker."""

from __future__ import annotations

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
from airflow_kafka_spark.testing import EmbeddedKafka, EmbeddedPostgres
from benchmarks.measure import SparkCpuMeter, Stopwatch, print_title, print_turn, tree_cpu_seconds
from tests.support.mariadb import EmbeddedMariaDB, missing

ROWS = 500
"""Rows of a transaction."""
OURS, THEIRS = "ours", "theirs"
"""The prefixes of the topics of the operator and of Debezium."""


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


def start_mariadb() -> EmbeddedMariaDB:
    """Return a MariaDB that will write a binary log as soon as it is entered. Its commits do not wait for the disk."""
    from tests.sources.mysql_cdc.kit import LOG

    return EmbeddedMariaDB(*LOG, "--innodb-flush-log-at-trx-commit=0")


class _Database(ABC):
    """A database with the table ``orders``, whose log is read.

    :ivar name: its name in the output.
    :ivar table: the table, as topics name it.
    """

    name: str
    table: str

    @property
    def connector(self) -> str:
        """Return the name of its connector."""
        return f"orders-{self.name.lower()}"

    @abstractmethod
    def execute(self, statement: str) -> None:
        """Run a statement, as a transaction."""

    @abstractmethod
    def make_rows(self, first: int, last: int) -> str:
        """Return the query of the rows with these numbers."""

    @abstractmethod
    def make_source(self) -> Any:
        """Return the source that reads the log."""

    @abstractmethod
    def configure(self, kafka: EmbeddedKafka) -> Mapping[str, str]:
        """Return Debezium's settings."""

    @abstractmethod
    def is_followed(self) -> bool:
        """Return True if Debezium has begun to read the log."""

    def change(self, first: int, count: int) -> None:
        """Insert rows and update each, in transactions of :data:`ROWS`."""
        for at in range(first // 2, (first + count) // 2, ROWS):
            last = min(at + ROWS, (first + count) // 2) - 1
            self.execute(f"INSERT INTO orders {self.make_rows(at, last)}")
            self.execute(f"UPDATE orders SET amount = amount + 1 WHERE id BETWEEN {at} AND {last}")


class _Postgres(_Database):
    name, table = "PostgreSQL", "public.orders"

    def __init__(self, server: EmbeddedPostgres, connection: Any) -> None:
        self._server, self._connection = server, connection
        self.execute("CREATE TABLE orders (id bigint PRIMARY KEY, customer text, amount numeric(12,2), at timestamptz)")
        self.execute("CREATE PUBLICATION orders FOR TABLE orders")

    def execute(self, statement: str) -> None:
        self._connection.execute(statement.encode())

    def make_rows(self, first: int, last: int) -> str:
        return f"SELECT n, 'customer-' || n % 10000, n % 100000 / 100.0, now() FROM generate_series({first}, {last}) n"

    def make_source(self) -> Any:
        from airflow_kafka_spark.sources import PostgresCdcSource

        return PostgresCdcSource("shop", "orders", OURS, OURS, max_wal_bytes=4 << 30)

    def configure(self, kafka: EmbeddedKafka) -> Mapping[str, str]:
        return {
            "connector.class": "io.debezium.connector.postgresql.PostgresConnector",
            "plugin.name": "pgoutput",
            "publication.name": "orders",
            "slot.name": THEIRS,
            "database.hostname": self._server.host,
            "database.port": str(self._server.port),
            "database.user": self._server.user,
            "database.password": self._server.password,
            "database.dbname": self._server.database,
        }

    def is_followed(self) -> bool:
        found = self._connection.execute(b"SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", [THEIRS]).fetchone()
        return found is not None


class _MariaDB(_Database):
    name, table = "MariaDB", "shop.orders"

    def __init__(self, server: EmbeddedMariaDB, cursor: Any) -> None:
        self._server, self._cursor = server, cursor
        os.environ["AIRFLOW_CONN_MARIADB"] = server.connection_uri()
        self.execute("CREATE TABLE orders (id bigint PRIMARY KEY, customer text, amount decimal(12,2), at timestamp(6))")

    def execute(self, statement: str) -> None:
        self._cursor.execute(statement)

    def make_rows(self, first: int, last: int) -> str:
        columns = "seq, CONCAT('customer-', seq % 10000), seq % 100000 / 100.0, now(6)"
        return f"SELECT {columns} FROM seq_{first}_to_{last}"

    def make_source(self) -> Any:
        from airflow_kafka_spark.sources import MySqlCdcSource

        return MySqlCdcSource("mariadb", topic_prefix=OURS, tables=["shop.orders"], max_binlog_bytes=4 << 30)

    def configure(self, kafka: EmbeddedKafka) -> Mapping[str, str]:
        return {
            "connector.class": "io.debezium.connector.mariadb.MariaDbConnector",
            "schema.history.internal.kafka.bootstrap.servers": kafka.bootstrap_servers,
            "schema.history.internal.kafka.topic": "schema-history",
            "include.schema.changes": "false",
            "database.server.id": "99",
            "database.hostname": self._server.host,
            "database.port": str(self._server.port),
            "database.user": self._server.user,
            "database.password": self._server.password,
            "table.include.list": "shop.orders",
        }

    def is_followed(self) -> bool:
        return bool(self._cursor.execute("SELECT 1 FROM information_schema.processlist WHERE command LIKE 'Binlog Dump%'"))


def run(directory: Path, records: int, rounds: int) -> None:
    """Print seconds, CPU seconds and rates of both, in turns, for each database.

    :param records: changes of a turn: half of them inserts, half updates.
    """
    from tests.support.debezium.record import download

    download()
    with start_servers() as (kafka, postgres), _worker(directory, kafka) as worker, ExitStack() as stack:
        _compare(_Postgres(postgres, stack.enter_context(postgres.connect(autocommit=True))), kafka, worker, records, rounds)
        if missing():
            print(f"MariaDB is left out: {missing()}", flush=True)
            return
        mariadb = stack.enter_context(start_mariadb())
        cursor = stack.enter_context(stack.enter_context(mariadb.connect()).cursor())
        _compare(_MariaDB(mariadb, cursor), kafka, worker, records, rounds)


def _compare(database: _Database, kafka: EmbeddedKafka, worker: _Worker, records: int, rounds: int) -> None:
    print_title(f"Log of {database.name} -> Kafka")
    for prefix in (OURS, THEIRS):
        kafka.create_topic(f"{prefix}.{database.table}", 1)
    meter = SparkCpuMeter()
    _capture(database, "begin")
    _connect(worker, database, kafka)
    done = 0
    for turn in range(rounds + 1):
        size = records if turn else min(records, 20_000)
        # Its queue may hold some of the changes when its time begins: at most `max.queue.size`.
        worker.pause(database.connector)
        database.change(done, size)
        done += size
        with Stopwatch(meter.seconds) as ours:
            _capture(database, str(turn))
        assert _stable(f"{OURS}.{database.table}") >= done
        with Stopwatch(lambda: tree_cpu_seconds(worker.process.pid)) as theirs:
            worker.resume(database.connector)
            while _stable(f"{THEIRS}.{database.table}") < done:
                time.sleep(0.05)
        for name, watch in (("operator", ours), ("Debezium", theirs)):
            rate, core = size / watch.seconds / 1000, watch.cpu / size * 1e6
            used = f"{watch.seconds:.2f} s, {watch.cpu:.1f} s of a core"
            found = f"{used}, {rate:,.0f} k changes/s, {core:.1f} microseconds of a core a change"
            print_turn(f"{database.name}, {name}", found, warming_up=not turn)
    worker.pause(database.connector)


def _stable(topic: str) -> int:
    """Return the last stable offset: with each transaction, a record of the brokers is counted, too."""
    with KafkaHook() as hook:
        (found,) = hook.read_offsets([topic]).values()
    return found.lso


def _capture(database: _Database, run_id: str) -> None:
    from airflow_kafka_spark.formats import Raw
    from airflow_kafka_spark.operators import SourceToKafkaOperator
    from airflow_kafka_spark.sinks import KafkaSink
    from tests.support.runs import context

    sink = KafkaSink(topic_column="topic", key="key", key_format=Raw(), value_columns=["value"], value=Raw())
    operator = SourceToKafkaOperator(
        task_id="bench",
        source=database.make_source(),
        sink=sink,
        pipeline=f"capture-{database.name}",
        ledger_topic="ledger-capture",
    )
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

    def pause(self, connector: str) -> None:
        self.request("PUT", f"/connectors/{connector}/pause")
        self.wait(connector, "PAUSED")

    def resume(self, connector: str) -> None:
        self.request("PUT", f"/connectors/{connector}/resume")

    def wait(self, connector: str, state: str) -> None:
        while True:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            with suppress(urllib.error.URLError, OSError):
                found = self.request("GET", f"/connectors/{connector}/status")
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


def _connect(worker: _Worker, database: _Database, kafka: EmbeddedKafka) -> None:
    """Start the connector, and wait until it reads the log."""
    config = {
        "exactly.once.support": "required",
        "topic.prefix": THEIRS,
        "snapshot.mode": "no_data",
        "max.batch.size": "8192",
        "max.queue.size": "32768",
        **database.configure(kafka),
    }
    while True:
        assert worker.process.poll() is None, worker.log.read_text()[-3000:]
        try:
            worker.request("PUT", f"/connectors/{database.connector}/config", config)
            break
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    worker.wait(database.connector, "RUNNING")
    while not database.is_followed():
        time.sleep(0.2)
