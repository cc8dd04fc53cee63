"""Share between benchmarks: servers, four million order events, one warm Spark session, and fair turns."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airflow_kafka_spark.hooks.spark import jars
from airflow_kafka_spark.testing import EmbeddedKafka, EmbeddedPostgres
from benchmarks import events
from benchmarks.measure import SERVERS, SparkCpuMeter, Stopwatch, Table, print_title, print_turn

SCHEMA = "id bigint, customer string, amount decimal(12,2), placed_at timestamp"
COLUMNS = "id bigint, customer text, amount numeric(12,2), placed_at timestamptz"
AVRO = "org.apache.spark:spark-avro_2.13:4.0.0"
JDBC_DRIVER = "org.postgresql:postgresql:42.7.8"
TOOLS = "org.apache.kafka:kafka-tools:4.2.0"


@dataclass
class Stand:
    """Servers and a session, shared by all contestants."""

    kafka: EmbeddedKafka
    postgres: EmbeddedPostgres
    spark: Any
    records: int
    rounds: int
    directory: Path
    results: list[tuple[str, str, float, float]] = field(default_factory=list)
    cpu: SparkCpuMeter = field(default_factory=SparkCpuMeter)
    watch: Stopwatch = field(default_factory=Stopwatch)
    """Measures the contestant that runs now."""
    aside: Counter[str] = field(default_factory=Counter)
    """CPU seconds by role that do not count as the contestant's."""

    def ratio(self, name: str) -> float:
        """Return the newest ratio of a contestant to its base."""
        return next(ratio for _, contestant, _, ratio in reversed(self.results) if contestant == name)

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        """Do not count what is prepared or checked within as time of the contestant."""
        with self.watch.paused():
            before = self.cpu.seconds_by_role()
            try:
                yield
            finally:
                self.aside.update({role: seconds - before[role] for role, seconds in self.cpu.seconds_by_role().items()})

    def table(self, name: str, *, primary_key: bool = True) -> str:
        """Return a new, empty table. The server's buffers are written first, so that no contestant pays for another's rows."""
        with self.put_aside(), self.postgres.connect(autocommit=True) as connection:
            connection.execute(f"DROP TABLE IF EXISTS {name}")
            connection.execute(f"CREATE TABLE {name} ({COLUMNS}{', PRIMARY KEY (id)' if primary_key else ''})")
            connection.execute("CHECKPOINT")
        return name

    def count(self, name: str) -> None:
        """Check the number of rows, and sums of their ids, so that a wrong value shows."""
        with self.put_aside(), self.postgres.connect(autocommit=True) as connection:
            found = connection.execute(f"SELECT count(*), count(DISTINCT id), sum(id) FROM {name}").fetchone()
        n = self.records
        assert found == (n, n, n * (n - 1) // 2), f"{name} holds {found}"


def compare(
    stand: Stand, title: str, contestants: dict[str, Callable[[int], None]], *, base: str, records: int | None = None
) -> None:
    """Let each run once to warm up, then in turns; print medians, ratios to ``base``, and a core's microseconds per record.

    :param records: how many records each contestant moves; default the stand's.
    """
    print_title(title)
    records = records or stand.records
    times: dict[str, list[float]] = {name: [] for name in contestants}
    used: dict[str, list[float]] = {name: [] for name in contestants}
    served: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(stand.rounds + 1):
        for name, run in contestants.items():
            stand.watch, stand.aside, before = Stopwatch(stand.cpu.seconds), Counter(), stand.cpu.seconds_by_role()
            with stand.watch as watch:
                run(turn)
            after = stand.cpu.seconds_by_role()
            roles = {role: seconds - before[role] - stand.aside[role] for role, seconds in after.items()}
            if turn:
                times[name].append(watch.seconds)
                used[name].append(watch.cpu)
                served[name].append(roles[SERVERS])
            parts = ", ".join(f"{role} {seconds:.1f}" for role, seconds in roles.items())
            print_turn(name, f"{watch.seconds:.2f} s, {watch.cpu:.1f} s of a core ({parts})", warming_up=not turn)
    medians = {name: statistics.median(t) for name, t in times.items()}
    print()
    headings = f"ratio to {base}", "microseconds of a core per record, servers left out", "those of the servers"
    table = Table("what", "k records/s", *headings)
    for name, seconds in medians.items():
        ratio = medians[base] / seconds
        stand.results.append((title, name, records / seconds, ratio))
        cores = (f"{statistics.median(turns[name]) / records * 1e6:.2f}" for turns in (used, served))
        table.row(name, f"{records / seconds / 1000:,.0f}", f"{ratio:.2f}", *cores)


def produce_at_the_limit(stand: Stand, topic: str) -> None:
    """Let Kafka's own ProducerPerformance write the orders, one transaction a second: what a broker takes exactly once."""
    payload = stand.directory / "payload.jsonl"
    if not payload.exists():
        payload.write_bytes(b"\n".join(events.order(n) for n in range(100_000)))
    arguments = [
        str(jars.find_java()), "-Xmx512m", "-cp", ":".join(map(str, jars.resolve_jars([TOOLS]))),
        "org.apache.kafka.tools.ProducerPerformance", "--topic", topic, "--num-records", str(stand.records),
        "--payload-file", str(payload), "--throughput", "-1", "--transactional-id", topic, "--transaction-duration-ms", "1000",
        "--producer-props", f"bootstrap.servers={stand.kafka.bootstrap_servers}", "compression.type=lz4", "linger.ms=5",
        "batch.size=262144",
    ]  # fmt: skip
    begun = time.monotonic()
    said = subprocess.run(arguments, capture_output=True, text=True, check=True, env={**os.environ}).stdout
    rate = float(re.findall(r"([\d.]+) records/sec", said)[-1])
    # Its own count: the start of its JVM is not what the broker can take.
    stand.watch.seconds -= time.monotonic() - begun - stand.records / rate


@contextmanager
def stand(
    records: int, rounds: int, directory: Path, packages: Sequence[str] = (), settings: Mapping[str, str] | None = None
) -> Iterator[Stand]:
    """Start the servers and a session, and fill the topic.

    :param packages: Maven coordinates of further jars.
    :param settings: further settings of Spark's session.
    """
    from airflow_kafka_spark.hooks.spark.hook import SparkHook

    spark_jars = [
        *jars.resolve_jars([jars.find_spark_kafka_connector()], exclude_bundled=True),
        *jars.resolve_jars([JDBC_DRIVER], exclude_bundled=True),
        *jars.resolve_jars([AVRO], exclude_bundled=True),
        *(path for package in packages for path in jars.resolve_jars([package], exclude_bundled=True)),
    ]
    with (
        EmbeddedKafka(jvm_options=("-Xmx1g",)) as kafka,
        EmbeddedPostgres(settings={"max_wal_size": "4GB", "max_prepared_transactions": 16}) as postgres,
    ):
        kafka.create_topic(events.TOPIC, 4)
        print(f"Filling topic {events.TOPIC} with {records:,} events", flush=True)
        events.produce(kafka.connection_extra(), 0, records)
        os.environ["AIRFLOW_CONN_KAFKA_DEFAULT"] = kafka.connection_json()
        os.environ["AIRFLOW_CONN_SPARK_DEFAULT"] = json.dumps({"conn_type": "spark", "host": "local[2]"})
        os.environ["AIRFLOW_CONN_WAREHOUSE"] = postgres.connection_uri()
        os.environ["PYSPARK_PYTHON"] = sys.executable
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
        conf = {"spark.jars": ",".join(map(str, spark_jars)), "spark.driver.memory": "2g", **(settings or {})}
        with SparkHook(conf=conf).open_session() as spark:
            spark.sparkContext.setLogLevel("ERROR")
            try:
                yield Stand(kafka, postgres, spark, records, rounds, directory)
            finally:
                spark.stop()


def offsets(stand: Stand, topic: str = events.TOPIC) -> tuple[str, str]:
    """Return the offsets of a whole topic, as options of Spark's Kafka source."""
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

    with KafkaHook() as hook:
        found = hook.read_offsets([topic])
    start = {str(tp.partition): o.low for tp, o in found.items()}
    end = {str(tp.partition): o.lso for tp, o in found.items()}
    return json.dumps({topic: start}), json.dumps({topic: end})


def read_plainly(stand: Stand, topic: str = events.TOPIC, options: Mapping[str, str] | None = None) -> Any:
    """Return ``spark.read.format("kafka")`` of a whole topic.

    :param options: further options of Spark's Kafka source.
    """
    start, end = offsets(stand, topic)
    return (
        stand.spark.read.format("kafka")
        .option("kafka.bootstrap.servers", stand.kafka.bootstrap_servers)
        .option("subscribe", topic)
        .option("startingOffsets", start)
        .option("endingOffsets", end)
        .options(**(options or {}))
        .load()
    )


def plain_spark(stand: Stand, topic: str = events.TOPIC, schema: str = SCHEMA) -> Any:
    """Return ``spark.read.format("kafka")`` with ``from_json``, as it is usually written."""
    from pyspark.sql import functions as F

    frame = read_plainly(stand, topic)
    return frame.select(F.from_json(F.col("value").cast("string"), schema).alias("v")).select("v.*")


def operate(
    stand: Stand, name: str, turn: int, sink: Any, *, topic: str = events.TOPIC, records: int | None = None, **options: Any
) -> dict[str, Any]:
    """Move one window with the operator: validate, fence, plan, move, commit, close. Return its report."""
    from airflow_kafka_spark.formats import Json
    from airflow_kafka_spark.operators import KafkaToSinkOperator
    from tests.support.runs import context

    pipeline = f"{name}-{turn}"
    operator = KafkaToSinkOperator(
        task_id="bench",
        topics=topic,
        group_id=pipeline,
        pipeline=pipeline,
        value=Json(schema=SCHEMA),
        sink=sink,
        **options,
    )
    report = operator.execute(context(f"run-{turn}"))
    assert report["records_read"] == (records or stand.records), report
    return report
