"""Share between benchmarks: servers, four million order events, one warm Spark session, and fair turns."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from airflow_kafka_spark.hooks import jars
from airflow_kafka_spark.testing import EmbeddedKafka, EmbeddedPostgres
from benchmarks import events

SCHEMA = "id bigint, customer string, amount decimal(12,2), placed_at timestamp"
COLUMNS = "id bigint, customer text, amount numeric(12,2), placed_at timestamptz"
AVRO = "org.apache.spark:spark-avro_2.13:4.0.0"
JDBC_DRIVER = "org.postgresql:postgresql:42.7.8"


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
    aside: float = 0.0
    """Seconds spent on preparing and on checking: nobody's time."""

    @contextmanager
    def put_aside(self) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self.aside += time.monotonic() - begun

    def table(self, name: str, *, primary_key: bool = True) -> str:
        """A new, empty table; the server's buffers are written out first, so that nobody pays for another's rows."""
        with self.put_aside(), self.postgres.connect(autocommit=True) as connection:
            connection.execute(f"DROP TABLE IF EXISTS {name}")
            connection.execute(f"CREATE TABLE {name} ({COLUMNS}{', PRIMARY KEY (id)' if primary_key else ''})")
            connection.execute("CHECKPOINT")
        return name

    def count(self, name: str) -> None:
        """Not only how many: sums of what the rows hold, so that a wrong value shows."""
        with self.put_aside(), self.postgres.connect(autocommit=True) as connection:
            found = connection.execute(f"SELECT count(*), count(DISTINCT id), sum(id) FROM {name}").fetchone()
        n = self.records
        assert found == (n, n, n * (n - 1) // 2), f"{name} holds {found}"


def compare(stand: Stand, title: str, contestants: dict[str, Callable[[int], None]], *, base: str) -> None:
    """Let each run once to warm up, then in turns; print medians and ratios to ``base``."""
    print(f"\n## {title}\n", flush=True)
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(stand.rounds + 1):
        for name, run in contestants.items():
            begun, stand.aside = time.monotonic(), 0.0
            run(turn)
            seconds = time.monotonic() - begun - stand.aside
            if turn:
                times[name].append(seconds)
            print(f"   {name}: {seconds:.2f} s{'' if turn else ' (warming up)'}", flush=True)
    medians = {name: statistics.median(t) for name, t in times.items()}
    print(f"\n| what | k records/s | ratio to {base} |\n| --- | ---: | ---: |")
    for name, seconds in medians.items():
        ratio = medians[base] / seconds
        stand.results.append((title, name, stand.records / seconds, ratio))
        print(f"| {name} | {stand.records / seconds / 1000:,.0f} | {ratio:.2f} |", flush=True)


@contextmanager
def stand(records: int, rounds: int, directory: Path) -> Iterator[Stand]:
    """Everything started and filled."""
    from pyspark.sql import SparkSession

    from airflow_kafka_spark.hooks.spark import SparkHook

    spark_jars = [
        *jars.resolve([jars.spark_kafka_connector()], exclude_bundled=True),
        *jars.resolve([JDBC_DRIVER], exclude_bundled=True),
        *jars.resolve([AVRO], exclude_bundled=True),
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
        # As operators make one.
        settings = {
            **SparkHook().settings(),
            "spark.master": "local[2]",
            "spark.jars": ",".join(map(str, spark_jars)),
            "spark.driver.memory": "2g",
        }
        builder: Any = SparkSession.builder
        for key, value in settings.items():
            builder = builder.config(key, value)
        spark = builder.getOrCreate()
        spark.sparkContext.setLogLevel("ERROR")
        try:
            yield Stand(kafka, postgres, spark, records, rounds, directory)
        finally:
            spark.stop()


def offsets(stand: Stand) -> tuple[str, str]:
    """The whole topic, as Spark's Kafka source wants it."""
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook

    with KafkaHook() as hook:
        found = hook.offsets([events.TOPIC])
    start = {str(tp.partition): o.low for tp, o in found.items()}
    end = {str(tp.partition): o.lso for tp, o in found.items()}
    return json.dumps({events.TOPIC: start}), json.dumps({events.TOPIC: end})


def plain_spark(stand: Stand) -> Any:
    """``spark.read.format("kafka")`` -> ``from_json``, as everybody writes it."""
    from pyspark.sql import functions as F

    start, end = offsets(stand)
    frame = (
        stand.spark.read.format("kafka")
        .option("kafka.bootstrap.servers", stand.kafka.bootstrap_servers)
        .option("subscribe", events.TOPIC)
        .option("startingOffsets", start)
        .option("endingOffsets", end)
        .load()
    )
    return frame.select(F.from_json(F.col("value").cast("string"), SCHEMA).alias("v")).select("v.*")


def operate(stand: Stand, name: str, turn: int, sink: Any, **options: Any) -> dict[str, Any]:
    """One whole window through the operator: validate, fence, plan, move, commit, close."""
    from airflow_kafka_spark.formats import Json
    from airflow_kafka_spark.operators import KafkaToSinkOperator
    from tests.support.runs import context

    pipeline = f"{name}-{turn}"
    operator = KafkaToSinkOperator(
        task_id="bench",
        topics=events.TOPIC,
        group_id=pipeline,
        pipeline=pipeline,
        value=Json(schema=SCHEMA),
        sink=sink,
        **options,
    )
    report = operator.execute(context(f"run-{turn}"))
    assert report["records_read"] == stand.records, report
    return report
