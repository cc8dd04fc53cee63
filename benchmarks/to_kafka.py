"""PostgreSQL and Parquet -> Kafka: exactly-once through the operator's whole life, against Spark's own at-least-once write and
the limit; and what looking for a split's marker costs."""

from __future__ import annotations

import statistics
import time
from typing import Any

from benchmarks.bench import COLUMNS, Stand, compare, produce_at_the_limit

SPARK = "Spark JDBC -> to_json -> Kafka (at-least-once)"
LIMIT = "limit: ProducerPerformance, one transaction a second"


def run(stand: Stand) -> None:
    _fill(stand)

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

    def publish(turn: int, name: str, **options: Any) -> None:
        from airflow_kafka_spark.formats import Json
        from airflow_kafka_spark.operators import SourceToKafkaOperator
        from airflow_kafka_spark.sinks import KafkaSink
        from tests.support.runs import context

        operator = SourceToKafkaOperator(
            task_id="bench",
            sink=KafkaSink(topic=topic(stand, name, turn), key="id", value=Json()),
            pipeline=f"publish-{name}-{turn}",
            **options,
        )
        report = operator.execute(context(f"run-{name}-{turn}"))
        assert report["records_written"] == stand.records, report
        print(f"      {report['timings']}", flush=True)

    def jdbc(turn: int, read_with: Any = "auto") -> None:
        from airflow_kafka_spark.sources import JdbcSource

        source = JdbcSource(conn_id="warehouse", table="shop", cursor="id", split_records=1_000_000)
        publish(turn, f"jdbc-{read_with}", source=source, read_with=read_with)

    def parquet(turn: int, read_with: Any = "auto") -> None:
        from airflow_kafka_spark.sources import FilesSource

        publish(turn, f"parquet-{read_with}", source=FilesSource(path=str(stand.directory / "shop")), read_with=read_with)

    def limit(turn: int) -> None:
        produce_at_the_limit(stand, topic(stand, "limit", turn))

    contestants: dict[str, Any] = {
        LIMIT: limit,
        SPARK: plain,
        "SourceToKafkaOperator, JdbcSource (exactly-once)": jdbc,
        'the same, `read_with="spark"`': lambda turn: jdbc(turn, "spark"),
        "SourceToKafkaOperator, FilesSource of Parquet (exactly-once)": parquet,
        'the same files, `read_with="spark"`': lambda turn: parquet(turn, "spark"),
    }
    compare(stand, "PostgreSQL and Parquet -> Kafka, 4 partitions", contestants, base=LIMIT)
    _find_markers(stand)


def _find_markers(stand: Stand, splits: int = 64) -> None:
    """Each split of a window looks for its marker before it writes: here after all of them have written theirs."""
    from airflow_kafka_spark.formats import Json
    from airflow_kafka_spark.hooks.kafka.hook import KafkaHook
    from airflow_kafka_spark.ledger.attempt import Ledger
    from airflow_kafka_spark.operators.publishing import make_publisher
    from airflow_kafka_spark.sinks.kafka.sink import KafkaSink
    from airflow_kafka_spark.sinks.kafka.tasks.publish import RecordBatches
    from airflow_kafka_spark.windows.model import SourcePlan, Window

    stand.kafka.create_topic("markers", 4)
    with KafkaHook() as hook, Ledger(hook, "markers", "run") as ledger:
        ledger.plan(Window("markers", 1, (), "run", "", source=SourcePlan(tuple({"n": n} for n in range(splits)))))
        worker = make_publisher(hook, KafkaSink("markers", Json()), ledger)
        for split in range(splits):
            worker.publish(split, RecordBatches(iter(())))
        seconds = []
        for split in range(splits):
            begun = time.monotonic()
            assert worker.find_marker(split) is not None
            seconds.append(time.monotonic() - begun)
    print(f"\nLook for a split's marker among {splits}: median {statistics.median(seconds) * 1000:.0f} ms, "
          f"worst {max(seconds) * 1000:.0f} ms", flush=True)  # fmt: skip


def _fill(stand: Stand) -> None:
    with stand.postgres.connect(autocommit=True) as connection:
        connection.execute("DROP TABLE IF EXISTS shop")
        connection.execute(f"CREATE TABLE shop ({COLUMNS}, PRIMARY KEY (id))")
        connection.execute(
            "INSERT INTO shop SELECT n, 'customer-' || n % 10000, (n % 100000) / 100.0, to_timestamp(1750000000 + n) "
            f"FROM generate_series(0, {stand.records - 1}) AS n"
        )
        connection.execute("VACUUM ANALYZE shop")
    # As a warehouse would export it: four files, the same rows.
    stand.spark.range(0, stand.records, 1, 4).selectExpr(
        "id", "'customer-' || id % 10000 AS customer", "CAST((id % 100000) / 100.0 AS decimal(12,2)) AS amount",
        "timestamp_seconds(1750000000 + id) AS placed_at",
    ).write.parquet(str(stand.directory / "shop"))  # fmt: skip
