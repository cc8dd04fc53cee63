"""The rows of a PostgreSQL table -> Kafka, exactly once: the snapshot of a PostgresCdcSource against a bulk JdbcSource."""

from __future__ import annotations

from typing import Any

from benchmarks.capture import start_servers
from benchmarks.measure import SparkCpuMeter, Stopwatch, print_turn

NAMES = ("JdbcSource", "snapshot")


def run(records: int, rounds: int) -> None:
    """Print seconds, CPU seconds and rates of both, in turns.

    :param records: rows of the table.
    """
    with start_servers() as (kafka, postgres):
        for topic in ("rows", "log.public.orders", "log.public.few"):
            kafka.create_topic(topic, 2)
        columns = "n AS id, 'customer-' || n % 10000 AS customer, (n % 100000 / 100.0)::numeric(12,2) AS amount, now() AS at"
        with postgres.connect(autocommit=True) as connection:
            for table, size in (("few", min(records, 20_000)), ("orders", records)):
                connection.execute(f"CREATE TABLE {table} AS SELECT {columns} FROM generate_series(1, {size}::bigint) n".encode())
                connection.execute(f"ALTER TABLE {table} ADD PRIMARY KEY (id)".encode())
                connection.execute(f"VACUUM ANALYZE {table}".encode())
            connection.execute("CREATE PUBLICATION orders FOR TABLE orders, few")
        meter = SparkCpuMeter()
        for turn in range(rounds + 1):
            for name in NAMES:
                table, size = ("orders", records) if turn else ("few", min(records, 20_000))
                with Stopwatch(meter.seconds) as watch:
                    assert _publish(name, table, turn) == size
                rate, core = size / watch.seconds / 1000, watch.cpu / size * 1e6
                found = f"{watch.seconds:.2f} s, {rate:,.0f} k rows/s, {core:.1f} microseconds of a core a row"
                print_turn(name, found, warming_up=not turn)


def _publish(name: str, table: str, turn: int) -> int:
    """Publish all rows of a table by a new pipeline, and return their number."""
    from airflow_kafka_spark.formats import Json, Raw, String
    from airflow_kafka_spark.operators import SourceToKafkaOperator
    from airflow_kafka_spark.sinks import KafkaSink
    from airflow_kafka_spark.sources import JdbcSource, PostgresCdcSource
    from tests.support.runs import context

    options: dict[str, Any]
    if name == "snapshot":
        events = KafkaSink(topic_column="topic", key="key", key_format=Raw(), value_columns=["value"], value=Raw())
        log = PostgresCdcSource("shop", "orders", f"slot_{turn}", "log", tables=[table], snapshot="only")
        options = {"source": log, "sink": events}
    else:
        rows = KafkaSink("rows", value=Json(), key="id", key_format=String())
        options = {"source": JdbcSource("shop", table, mode="bulk"), "sink": rows}
    count = 0
    for number in range(100):
        operator = SourceToKafkaOperator(task_id="bench", pipeline=f"{name}-{turn}", ledger_topic="ledger-snapshots", **options)
        report = operator.execute(context(f"run-{number}"))
        count += report["records_written"]
        if not report.get("source_remaining"):
            return count
    raise AssertionError("windows remain")
