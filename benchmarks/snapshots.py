"""The rows of a table -> Kafka, exactly once: snapshots of change data capture against a bulk JdbcSource.

An event is several times as large as the record of a row. So two more candidates have records of equal size: a JdbcSource whose
table has one more column, and a snapshot that publishes rows in place of events.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

from airflow_kafka_spark.testing import EmbeddedPostgres
from benchmarks.capture import start_mariadb, start_servers
from benchmarks.measure import SparkCpuMeter, Stopwatch, print_turn

NAMES = ("JdbcSource", "JdbcSource, large records", "snapshot", "snapshot, rows")
DATABASES = {"MariaDB": "shop", "PostgreSQL": "public"}
"""The databases, and what tables' names are preceded by in topics."""
PADDING = {"MariaDB": 412, "PostgreSQL": 413}
"""Characters of the further column with which a record is as large as an event. The sizes are printed."""

_COLUMNS = "n AS id, {customer} AS customer, CAST(n % 100000 / 100.0 AS decimal(12,2)) AS amount, now() AS at"


def run(records: int, rounds: int) -> None:
    """Print seconds, CPU seconds and rates of both, in turns, for each database.

    :param records: rows of the table.
    """
    sizes = {"few": min(records, 20_000), "orders": records, "large": records}
    with ExitStack() as stack:
        kafka, postgres = stack.enter_context(start_servers())
        kafka.create_topic("rows", 2)
        meter = SparkCpuMeter()
        for database in _fill(stack, postgres, sizes):
            for table in sizes:
                kafka.create_topic(f"log.{DATABASES[database]}.{table}", 2)
            for turn in range(rounds + 1):
                for name in NAMES:
                    table = "few" if not turn else "large" if name.endswith("large records") else "orders"
                    with Stopwatch(meter.seconds) as watch:
                        published = _publish(database, name, table, turn)
                    count = sizes[table]
                    assert published.rows == count
                    rate, core, size = count / watch.seconds / 1000, watch.cpu / count * 1e6, published.bytes / count
                    used = f"{watch.seconds:.2f} s, {rate:,.0f} k rows/s, {core:.1f} microseconds of a core a row"
                    print_turn(f"{database}, {name}", f"{used}, {size:.0f} bytes a record", warming_up=not turn)


def _fill(stack: ExitStack, postgres: EmbeddedPostgres, sizes: dict[str, int]) -> Iterator[str]:
    """Create the tables in each database, and yield its name. MariaDB is the first one: Spark starts with its driver."""
    from tests.support.mariadb import missing

    if not missing():
        server = stack.enter_context(start_mariadb())
        os.environ["AIRFLOW_CONN_MARIADB"] = server.connection_uri()
        columns = _COLUMNS.format(customer="CONCAT('customer-', n % 10000)")
        with server.connect() as connection, connection.cursor() as cursor:
            for table, size in sizes.items():
                more = f", REPEAT('x', {PADDING['MariaDB']}) AS padding" if table == "large" else ""
                cursor.execute(f"CREATE TABLE {table} AS SELECT {columns}{more} FROM (SELECT seq AS n FROM seq_1_to_{size}) AS s")
                cursor.execute(f"ALTER TABLE {table} ADD PRIMARY KEY (id)")
                cursor.execute(f"ANALYZE TABLE {table}")
        yield "MariaDB"
    columns = _COLUMNS.format(customer="'customer-' || n % 10000")
    with postgres.connect(autocommit=True) as connection:
        for table, size in sizes.items():
            more = f", repeat('x', {PADDING['PostgreSQL']}) AS padding" if table == "large" else ""
            rows = f"SELECT {columns}{more} FROM generate_series(1, {size}::bigint) n"
            connection.execute(f"CREATE TABLE {table} AS {rows}".encode())
            connection.execute(f"ALTER TABLE {table} ADD PRIMARY KEY (id)".encode())
            connection.execute(f"VACUUM ANALYZE {table}".encode())
        connection.execute("CREATE PUBLICATION orders FOR TABLE orders, few")
    yield "PostgreSQL"


class Published(NamedTuple):
    """The records that a pipeline has published: the number of rows, and the bytes of their keys and values."""

    rows: int
    bytes: int


def _publish(database: str, name: str, table: str, turn: int) -> Published:
    """Publish all rows of a table by a new pipeline."""
    from airflow_kafka_spark.formats import Json, Raw, String
    from airflow_kafka_spark.operators import SourceToKafkaOperator
    from airflow_kafka_spark.sinks import KafkaSink
    from airflow_kafka_spark.sources import ExtractNewRecordState, JdbcSource, MySqlCdcSource, PostgresCdcSource
    from tests.support.runs import context

    is_postgres, options = database == "PostgreSQL", dict[str, Any]()
    if name.startswith("snapshot"):
        form: dict[str, Any] = {"snapshot": "only", "unwrap": ExtractNewRecordState() if name.endswith("rows") else None}
        events = KafkaSink(topic_column="topic", key="key", key_format=Raw(), value_columns=["value"], value=Raw())
        log: Any = (
            PostgresCdcSource("shop", "orders", f"slot_{'rows_' if form['unwrap'] else ''}{turn}", "log", tables=[table], **form)
            if is_postgres
            else MySqlCdcSource("mariadb", topic_prefix="log", tables=[f"shop.{table}"], **form)
        )
        options = {"source": log, "sink": events}
    else:
        rows = KafkaSink("rows", value=Json(), key="id", key_format=String())
        options = {"source": JdbcSource("shop" if is_postgres else "mariadb", table, mode="bulk"), "sink": rows}
    pipeline = f"{database}-{name}-{turn}".replace(", ", "-").replace(" ", "-")
    count = size = 0
    for number in range(100):
        operator = SourceToKafkaOperator(task_id="bench", pipeline=pipeline, ledger_topic="ledger-snapshots", **options)
        report = operator.execute(context(f"run-{number}"))
        count += report["records_written"]
        size += report["bytes"]
        if not report.get("source_remaining"):
            return Published(count, size)
    raise AssertionError("windows remain")
