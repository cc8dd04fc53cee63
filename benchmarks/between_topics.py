"""Kafka -> Kafka: copies and SQL, exactly-once through the operator's whole life, against the limit and Spark's own write."""

from __future__ import annotations

from typing import Any

from benchmarks import events
from benchmarks.bench import SCHEMA, Stand, compare, produce_at_the_limit, read_plainly

LIMIT = "limit: ProducerPerformance, one transaction a second"
SPARK_SQL = "plain Spark: from_json, filter, to_json, Kafka (at-least-once)"
SQL = "KafkaToKafkaOperator, filter and columns (exactly-once)"
TIMELESS_SQL = f"{SQL}, preserve_timestamps=False"
FILTER, COLUMNS = "amount >= 100", {"id": "id", "buyer": "upper(customer)", "cents": "cast(amount * 100 as bigint)"}


def run(stand: Stand) -> None:
    from airflow_kafka_spark.formats import Json
    from airflow_kafka_spark.operators import KafkaToKafkaOperator
    from airflow_kafka_spark.sinks import KafkaSink
    from tests.support.runs import context

    def topic(name: str, turn: int) -> str:
        with stand.put_aside():
            stand.kafka.create_topic(f"between-{name}-{turn}", events.PARTITIONS)
        return f"between-{name}-{turn}"

    def read() -> Any:
        # Operators read committed records, and copy their headers.
        return read_plainly(stand, options={"includeHeaders": "true", "kafka.isolation.level": "read_committed"})

    def write(frame: Any, target: str) -> None:
        options = {
            "kafka.bootstrap.servers": stand.kafka.bootstrap_servers, "topic": target, "kafka.compression.type": "lz4",
            "kafka.linger.ms": "5", "kafka.batch.size": str(1 << 18), "kafka.acks": "all", "includeHeaders": "true",
        }  # fmt: skip
        frame.write.format("kafka").options(**options).save()

    def plain_copy(turn: int) -> None:
        write(read().select("key", "value", "headers"), topic("plain-copy", turn))

    def plain_sql(turn: int) -> None:
        from pyspark.sql import functions as F

        value = F.from_json(F.col("value").cast("string"), SCHEMA).alias("v")
        rows = read().select("key", "headers", value).select("key", "headers", "v.*").where(FILTER)
        made = F.to_json(F.struct(*(F.expr(sql).alias(name) for name, sql in COLUMNS.items()))).alias("value")
        write(rows.select("key", made, "headers"), topic("plain-sql", turn))

    def ours(name: str, turn: int, **options: Any) -> dict[str, Any]:
        target = topic(name, turn)
        operator = KafkaToKafkaOperator(
            task_id="bench", topics=events.TOPIC, group_id=target, pipeline=target, sink=KafkaSink(target), **options
        )
        report = operator.execute(context(f"run-{name}-{turn}"))
        assert report["records_read"] == stand.records, report
        return report

    def copy(turn: int, name: str = "copy", **options: Any) -> None:
        assert ours(name, turn, preserve_partitions=True, **options)["records_written"] == stand.records

    def sql(turn: int, name: str = "sql", **options: Any) -> None:
        ours(name, turn, value=Json(schema=SCHEMA), filter=FILTER, columns=COLUMNS, **options)
        with stand.put_aside():
            found, wanted = (digest(f"between-{kind}-{turn}") for kind in (name, "plain-sql"))
        assert found == wanted, f"the topics differ: {found} and {wanted}"

    def digest(name: str) -> tuple[Any, ...]:
        """Return the number of records of a topic, and sums of their hashes."""
        return tuple(read_plainly(stand, name).selectExpr("count(*)", "bit_xor(xxhash64(key, value, partition))").first())

    compare(
        stand,
        "Kafka -> Kafka, copies",
        {
            LIMIT: lambda turn: produce_at_the_limit(stand, topic("limit", turn)),
            "plain Spark: Kafka to Kafka (at-least-once)": plain_copy,
            "KafkaToKafkaOperator, copy (exactly-once)": copy,
            "KafkaToKafkaOperator, copy, keys placed anew": lambda turn: None if ours("place", turn) else None,
            "KafkaToKafkaOperator, copy, preserve_timestamps=False": lambda turn: copy(
                turn, "timeless", preserve_timestamps=False
            ),
        },
        base=LIMIT,
    )
    compare(
        stand,
        "Kafka -> Kafka, SQL",
        {
            SPARK_SQL: plain_sql,
            SQL: sql,
            # Spark's sink cannot keep timestamps either.
            TIMELESS_SQL: lambda turn: sql(turn, "timeless-sql", preserve_timestamps=False),
        },
        base=SPARK_SQL,
    )
