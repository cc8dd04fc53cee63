"""Measure the cost of a verification: CPU seconds of databases and task per million rows, for 1 and 10 million rows."""

from __future__ import annotations

import os
import resource
import time
from typing import Any

from airflow_kafka_spark.testing import EmbeddedPostgres

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
        head = "rows | what | seconds | CPU s per million rows: server | task | task's peak, MB"
        print(f"\n## A table of 5 narrow columns against its copy, one PostgreSQL, 2 chunks at a time\n\n| {head} |")
        print("| ---: | --- |" + " ---: |" * 4, flush=True)
        for rows in sizes:
            _measure(postgres, rows)


def _measure(postgres: EmbeddedPostgres, rows: int) -> None:
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
    _line(postgres, rows, "count(*) of both", count)
    _line(postgres, rows, "equal, by ranges", lambda: _verify(0))
    with postgres.connect(autocommit=True) as connection:
        connection.execute(f"UPDATE copy SET amount = -1 WHERE id % 1000000 = {rows % 1000000 + 7}".encode())
    _line(postgres, rows, "1 row in a million differs, by ranges", lambda: _verify(rows // 1_000_000))
    with postgres.connect(autocommit=True) as connection:
        connection.execute("ALTER TABLE copy DROP CONSTRAINT copy_pkey")
    _line(postgres, rows, "the same, by buckets", lambda: _verify(rows // 1_000_000))


def _verify(different: int) -> None:
    from airflow_kafka_spark.operators import VerifyOperator
    from airflow_kafka_spark.sources import JdbcSource

    operator = VerifyOperator(
        task_id="verify", source=JdbcSource("verified", "source", key=["id"]), sink=JdbcSource("verified", "copy"), parallel=2,
        on_difference="warn",
    )  # fmt: skip
    found = operator.execute({})
    assert (found["different"], found["missing"], found["extra"]) == (different, 0, 0), found


def _line(postgres: EmbeddedPostgres, rows: int, name: str, work: Any) -> None:
    begun, server, task = time.monotonic(), _server_seconds(postgres), time.process_time()
    work()
    seconds = time.monotonic() - begun
    millions = rows / 1_000_000
    used = [_server_seconds(postgres) - server, time.process_time() - task]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1_000
    shown = " | ".join(f"{value / millions:.2f}" for value in used)
    print(f"| {rows:,} | {name} | {seconds:.1f} | {shown} | {peak:.0f} |", flush=True)


def _server_seconds(postgres: EmbeddedPostgres) -> float:
    """Return the CPU seconds of the server's processes, also of those that have ended."""
    import psutil

    server = psutil.Process(postgres.pid)
    times = [one.cpu_times() for one in (server, *server.children(recursive=True))]
    return float(sum(one.user + one.system + one.children_user + one.children_system for one in times))
