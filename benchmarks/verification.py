"""Measure the cost of a verification: CPU seconds of databases and task per million rows, for 1 and 10 million rows."""

from __future__ import annotations

import os
from collections.abc import Callable

from airflow_kafka_spark.testing import EmbeddedPostgres
from benchmarks.measure import Stopwatch, Table, peak_memory, print_title, tree_cpu_seconds

SIZES = (1_000_000, 10_000_000)
"""Rows of the tables; ``VERIFIED_ROWS`` has other sizes, separated by commas."""
COLUMNS = "id bigint, customer integer, amount numeric(12,2), placed_at timestamptz, status text"
ROWS = (
    "n, n % 100000, (n % 1000000) / 100.0, timestamptz '2026-01-01+00' + n * interval '1 second', "
    "(ARRAY['new', 'paid', 'sent', 'back'])[n % 4 + 1]"
)


def run() -> None:
    """Compare tables of each size with a count of both, and with copies in which one row in a million differs."""
    sizes = [int(size) for size in os.environ.get("VERIFIED_ROWS", "").split(",") if size] or SIZES
    with EmbeddedPostgres(settings={"max_parallel_workers_per_gather": 0}) as postgres:
        os.environ["AIRFLOW_CONN_VERIFIED"] = postgres.connection_uri()
        print_title("A table of 5 narrow columns against its copy, one PostgreSQL, 2 chunks at a time")
        table = Table("what", "rows", "seconds", "CPU s per million rows: server", "task", "task's peak, MB")
        for rows in sizes:
            _measure(postgres, rows, table)


def _measure(postgres: EmbeddedPostgres, rows: int, results: Table) -> None:
    with postgres.connect(autocommit=True) as connection:
        for table in ("source", "copy"):
            connection.execute(f"DROP TABLE IF EXISTS {table}".encode())
            connection.execute(f"CREATE TABLE {table} ({COLUMNS})".encode())
            connection.execute(f"INSERT INTO {table} SELECT {ROWS} FROM generate_series(1, {rows}) n".encode())
            connection.execute(f"ALTER TABLE {table} ADD PRIMARY KEY (id)".encode())
            connection.execute(f"VACUUM ANALYZE {table}".encode())

    def count() -> None:
        with postgres.connect() as connection:
            for table in ("source", "copy"):
                connection.execute(f"SELECT count(*) FROM {table}".encode())

    _verify(0)  # imports
    _line(postgres, rows, results, "count(*) of both", count)
    _line(postgres, rows, results, "equal, by ranges", lambda: _verify(0))
    with postgres.connect(autocommit=True) as connection:
        connection.execute(f"UPDATE copy SET amount = -1 WHERE id % 1000000 = {rows % 1000000 + 7}".encode())
    _line(postgres, rows, results, "1 row in a million differs, by ranges", lambda: _verify(rows // 1_000_000))
    with postgres.connect(autocommit=True) as connection:
        connection.execute("ALTER TABLE copy DROP CONSTRAINT copy_pkey")
    _line(postgres, rows, results, "the same, by buckets", lambda: _verify(rows // 1_000_000))


def _verify(different: int) -> None:
    from airflow_kafka_spark.operators import VerifyOperator
    from airflow_kafka_spark.sources import JdbcSource

    operator = VerifyOperator(
        task_id="verify", source=JdbcSource("verified", "source", key=["id"]), sink=JdbcSource("verified", "copy"), parallel=2,
        on_difference="warn",
    )  # fmt: skip
    found = operator.execute({})
    assert (found["different"], found["missing"], found["extra"]) == (different, 0, 0), found


def _line(postgres: EmbeddedPostgres, rows: int, results: Table, name: str, work: Callable[[], None]) -> None:
    with Stopwatch(lambda: tree_cpu_seconds(postgres.pid)) as server, Stopwatch() as task:
        work()
    used = [f"{watch.cpu / rows * 1_000_000:.2f}" for watch in (server, task)]
    results.row(name, f"{rows:,}", f"{task.seconds:.1f}", *used, f"{peak_memory():.0f}")
