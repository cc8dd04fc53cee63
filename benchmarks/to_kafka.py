"""PostgreSQL -> Kafka: exactly-once through the operator's whole life, against Spark's own at-least-once write and the limit."""

from __future__ import annotations

import os
import re
import subprocess
import time
from typing import Any

from airflow_kafka_spark.hooks import jars
from benchmarks import events
from benchmarks.bench import COLUMNS, Stand, compare

TOOLS = "org.apache.kafka:kafka-tools:4.2.0"
SPARK = "Spark JDBC -> to_json -> Kafka (at-least-once)"
LIMIT = "limit: ProducerPerformance, one transaction a second"


def run(stand: Stand) -> None:
    _fill(stand)
    payload = stand.directory / "payload.jsonl"
    payload.write_bytes(b"\n".join(events.order(n) for n in range(100_000)))
    class_path = ":".join(map(str, jars.resolve([TOOLS])))

    def topic(stand: Stand, name: str, turn: int) -> str:
        with stand.put_aside():
            stand.kafka.create_topic(f"{name}-{turn}", 4)
        return f"{name}-{turn}"

    def plain(turn: int) -> None:
        from pyspark.sql import functions as F

        postgres, quarter = stand.postgres, stand.records // 4
        frame = stand.spark.read.jdbc(
            f"jdbc:postgresql://{postgres.host}:{postgres.port}/{postgres.database}",
            "shop",
            predicates=[f"id >= {quarter * n} AND id < {quarter * (n + 1)}" for n in range(4)],
            properties={
                "user": postgres.user, "password": postgres.password, "fetchsize": "10000", "driver": "org.postgresql.Driver"
            },
        )  # fmt: skip
        frame.select(F.col("id").cast("string").alias("key"), F.to_json(F.struct("*")).alias("value")).write.format(
            "kafka"
        ).options(
            **{
                "kafka.bootstrap.servers": stand.kafka.bootstrap_servers,
                "topic": topic(stand, "plain", turn),
                "kafka.compression.type": "lz4",
                "kafka.linger.ms": "5",
                "kafka.batch.size": str(1 << 18),
            }
        ).save()

    def ours(turn: int, read_with: Any = "auto") -> None:
        from airflow_kafka_spark.formats import Json
        from airflow_kafka_spark.operators import SourceToKafkaOperator
        from airflow_kafka_spark.sources import JdbcSource
        from tests.support.runs import context

        operator = SourceToKafkaOperator(
            task_id="bench", topic=topic(stand, f"ours-{read_with}", turn), key="id", value=Json(), read_with=read_with,
            pipeline=f"publish-{read_with}-{turn}",
            source=JdbcSource(conn_id="warehouse", table="shop", cursor="id", split_records=1_000_000),
        )  # fmt: skip
        report = operator.execute(context(f"run-{read_with}-{turn}"))
        assert report["records_written"] == stand.records, report
        print(f"      {report['timings']}", flush=True)

    def limit(turn: int) -> None:
        arguments = [
            str(jars.find_java()), "-Xmx512m", "-cp", class_path, "org.apache.kafka.tools.ProducerPerformance", "--topic",
            topic(stand, "limit", turn), "--num-records", str(stand.records), "--payload-file", str(payload),
            "--throughput", "-1", "--transactional-id", f"limit-{turn}", "--transaction-duration-ms", "1000", "--producer-props",
            f"bootstrap.servers={stand.kafka.bootstrap_servers}", "compression.type=lz4", "linger.ms=5", "batch.size=262144",
        ]  # fmt: skip
        begun = time.monotonic()
        said = subprocess.run(arguments, capture_output=True, text=True, check=True, env={**os.environ}).stdout
        rate = float(re.findall(r"([\d.]+) records/sec", said)[-1])
        # Its own count: the start of its JVM is not what the broker can take.
        stand.aside += time.monotonic() - begun - stand.records / rate

    contestants: dict[str, Any] = {
        LIMIT: limit,
        SPARK: plain,
        "SourceToKafkaOperator, JdbcSource (exactly-once)": ours,
        'the same, `read_with="spark"`': lambda turn: ours(turn, "spark"),
    }
    compare(stand, "PostgreSQL -> Kafka, 4 partitions", contestants, base=LIMIT)


def _fill(stand: Stand) -> None:
    with stand.postgres.connect(autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS shop")
        connection.execute(f"CREATE TABLE shop ({COLUMNS}, PRIMARY KEY (id))")
        connection.execute(
            "INSERT INTO shop SELECT n, 'customer-' || n % 10000, (n % 100000) / 100.0, to_timestamp(1750000000 + n) "
            f"FROM generate_series(0, {stand.records - 1}) AS n"
        )
        connection.execute("VACUUM ANALYZE shop")
