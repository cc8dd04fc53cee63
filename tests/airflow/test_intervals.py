"""Intervals through a real Airflow: an hourly DAG that catches up, backfills side by side and backwards, replays; tasks killed at
random all the while, by SIGKILL. ``INTERVALS=48`` runs it over two days; as it stands it is shorter."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.testing import EmbeddedAirflow
from airflow_kafka_spark.testing._processes import wait_until
from tests.support.connect import AIRFLOW_PATH, spark_connect
from tests.support.oracle import committed_records, same_multiset
from tests.support.pipelines import COLUMNS, order, row_of

COUNT = int(os.environ.get("INTERVALS", "4"))
KILLS = max(2, COUNT // 6)
TOPIC = "hours"
NOW = datetime.now(timezone.utc).replace(minute=0, second=0, microsecond=0)
BEGIN = NOW - timedelta(hours=COUNT)

DAG = """
from datetime import datetime, timedelta
from airflow.sdk import DAG
from airflow.timetables.interval import CronDataIntervalTimetable
from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.operators import KafkaToSinkOperator
from airflow_kafka_spark.sinks import FilesSink, PostgresSink
from tests.support.pipelines import SCHEMA

hourly = CronDataIntervalTimetable("0 * * * *", timezone="UTC")
table = lambda name: PostgresSink(conn_id="warehouse", table=name, window_column="window")
flows = {{"catchup": table("catchup"), "aside": table("aside"), "backwards": FilesSink(path={path!r})}}
for name, sink in flows.items():
    with DAG(
        name, schedule=hourly, start_date=datetime.fromisoformat({begin!r}), catchup=name == "catchup", max_active_runs=8,
        end_date=datetime.fromisoformat({last!r}),  # the full hour may strike meanwhile
        is_paused_upon_creation=True, default_args={{"retries": 6, "retry_delay": timedelta(seconds=1)}},
    ):
        KafkaToSinkOperator(
            task_id="task", topics="hours", group_id=name, pipeline=name, ledger_topic="ledger-hours", window="interval", grace=0,
            value=Json(schema=SCHEMA), sink=sink,
        )
"""


def produce(config: dict) -> int:
    """Some records in every hour, out of order, a few of them hours late, a few early."""
    chance, producer, number = random.Random(7), Producer(config), 0
    for hour in range(COUNT):
        for _ in range(40):
            minute = hour * 60 + chance.uniform(0, 60) + chance.choice([0] * 8 + [-90, 45])
            at = BEGIN + timedelta(minutes=min(max(minute, 0), COUNT * 60 - 0.1))
            producer.produce(TOPIC, order(number), b"%d" % number, number % 3, timestamp=round(at.timestamp() * 1000))
            number += 1
    for partition in range(3):
        producer.produce(TOPIC, order(number), b"%d" % number, partition, timestamp=round(NOW.timestamp() * 1000))
        number += 1
    producer.flush(30)
    return number


@pytest.fixture(scope="module")
def airflow(kafka, postgres, tmp_path_factory):
    directory = tmp_path_factory.mktemp("intervals")
    kafka.create_topic(TOPIC, 3)
    produce(kafka.connection_extra())
    with postgres.connect(autocommit=True) as connection:
        for name in ("catchup", "aside"):
            connection.execute(f'CREATE TABLE {name} ({COLUMNS}, "window" text)')
        connection.execute("CREATE DATABASE airflow")
    (directory / "dags").mkdir()
    last = NOW - timedelta(hours=1)
    dag = DAG.format(path=str(directory / "backwards"), begin=BEGIN.isoformat(), last=last.isoformat())
    (directory / "dags" / "hours.py").write_text(dag)
    with spark_connect(directory) as port:
        spark = {"conn_type": "spark_connect", "host": "127.0.0.1", "port": port}
        connections = {
            "kafka_default": kafka.connection_json(), "spark_default": json.dumps(spark), "warehouse": postgres.connection_uri(),
        }  # fmt: skip
        # Airflow on PostgreSQL: on SQLite it refuses a backfill while anybody else writes.
        database = postgres.connection_uri().replace("postgres:", "postgresql+psycopg:", 1).rpartition("/")[0] + "/airflow"
        setting = "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"
        env = {"PYTHONPATH": AIRFLOW_PATH, setting: database, f"{setting}_ASYNC": database}
        with EmbeddedAirflow(directory / "dags", connections=connections, env=env, parallelism=4) as server:
            server.directory = directory
            yield server


@contextmanager
def killing(airflow, count: int):
    """SIGKILL ``count`` task processes meanwhile, each a moment after it was first seen; yields the list of those killed."""
    killed, done, chance = [], threading.Event(), random.Random(11)
    seen: set[int] = set()

    def kill() -> None:
        while len(killed) < count and not done.wait(chance.uniform(0.2, 2.5)):
            running = [pid for pid in tasks(airflow.pid("scheduler")) if pid not in seen]
            if running and (not killed or chance.random() < 0.7):
                pid = chance.choice(running)
                seen.add(pid)
                try:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)
                except ProcessLookupError:
                    continue

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        done.set()
        thread.join()


def tasks(scheduler: int) -> list[int]:
    """The processes of tasks, by the title that Airflow gives them, below this scheduler."""
    parents, titles = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with suppress(OSError, IndexError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                titles[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ")

    def below(pid: int) -> bool:
        while pid > 1:
            if pid == scheduler:
                return True
            pid = parents.get(pid, 0)
        return False

    return [p for p, t in titles.items() if t.startswith(b"airflow worker -- ") and b"LocalExecutor" not in t and below(p)]


def runs_of(airflow, dag_id: str, kind: str) -> list[dict]:
    runs = airflow.api("GET", f"/dags/{dag_id}/dagRuns?limit=100&order_by=logical_date")["dag_runs"]
    return [run for run in runs if run["run_type"] == kind]


def wait_for(airflow, dag_id: str, kind: str, count: int, seconds: float) -> list[dict]:
    """Until so many runs of a kind have ended, all of them well."""
    runs: list[dict] = []

    def ended() -> bool:
        runs[:] = runs_of(airflow, dag_id, kind)
        return len(runs) >= count and all(run["state"] in ("success", "failed") for run in runs)

    assert wait_until(ended, seconds, every=0.5), [
        (run["state"], airflow.account(dag_id, run["dag_run_id"])) for run in runs if run["state"] not in ("success", "failed")
    ]
    failed = [run["dag_run_id"] for run in runs if run["state"] != "success"]
    assert not failed, airflow.account(dag_id, failed[0])
    return runs


def report_of(airflow, dag_id: str, run: dict) -> dict:
    value = airflow.xcom(dag_id, run["dag_run_id"], "task")
    return json.loads(value) if isinstance(value, str) else value


def rows_of(airflow, postgres, dag_id: str) -> list[tuple]:
    """(window, row) of a sink."""
    if dag_id != "backwards":
        with postgres.connect(autocommit=True) as connection:
            query = f'SELECT "window", id, customer, amount::text, extract(epoch FROM placed_at)::bigint FROM {dag_id}'
            return [(row[0].partition("#")[0], tuple(row[1:])) for row in connection.execute(query).fetchall()]
    import pyarrow.dataset as ds

    table = ds.dataset(airflow.directory / "backwards", format="parquet", partitioning="hive").to_table()
    columns = [table[name].to_pylist() for name in ("window", "id", "customer", "amount", "placed_at")]
    return [(w[: w.rindex("-")], (i, c, str(a), int(p.timestamp()))) for w, i, c, a, p in zip(*columns, strict=True)]


def check(airflow, kafka, postgres, dag_id: str, runs: list[dict]) -> list[dict]:
    """Each interval's rows are the topic's records between its boundaries, and the intervals tile the log."""
    events = {(p, o): row_of(v) for p, o, _, v in committed_records(kafka.connection_extra(), TOPIC) if v is not None}
    reports = sorted((report_of(airflow, dag_id, run) for run in runs), key=lambda report: report["interval"])
    by_window: dict[str, list] = {}
    for name, row in rows_of(airflow, postgres, dag_id):
        by_window.setdefault(name, []).append(row)
    compared, ends = 0, {}
    for report in reports:
        start, end = (datetime.fromisoformat(text.replace("Z", "+00:00")) for text in report["interval"])
        expected = []
        for r in report["ranges"]:
            assert r["start"] == ends.get(r["partition"], r["start"])
            ends[r["partition"]] = r["end"]
            expected += [
                events[r["partition"], offset] for offset in range(r["start"], r["end"]) if (r["partition"], offset) in events
            ]
        found = by_window.pop(f"{dag_id}.{start:%Y%m%dT%H%M%SZ}-{end:%Y%m%dT%H%M%SZ}", [])
        if expected or found:
            compared += same_multiset(expected, found)
    assert not by_window, sorted(by_window)
    assert compared >= COUNT * 30
    return reports


@pytest.mark.airflow
@pytest.mark.timeout(5400)
def test_intervals_caught_up_backfilled_aside_and_backwards_and_replayed_under_sigkill_hold_their_records_once(
    airflow, kafka, postgres
):
    seconds = 600 + COUNT * 60
    dates = ("--from-date", BEGIN.isoformat(), "--to-date", (NOW - timedelta(hours=1)).isoformat())
    with killing(airflow, KILLS) as killed:
        airflow.api("PATCH", "/dags/catchup", {"is_paused": False})
        runs = wait_for(airflow, "catchup", "scheduled", COUNT, seconds)
    assert killed, "nothing was killed"
    first = check(airflow, kafka, postgres, "catchup", runs)

    for dag_id, how in (("aside", ["--max-active-runs", "8"]), ("backwards", ["--max-active-runs", "2", "--run-backwards"])):
        with killing(airflow, KILLS) as killed:
            command = ["backfill", "create", "--dag-id", dag_id, *dates, *how]
            assert wait_until(lambda: _starts(lambda: airflow.cli(*command)), 300, every=2)  # noqa: B023
            airflow.api("PATCH", f"/dags/{dag_id}", {"is_paused": False})
            runs = wait_for(airflow, dag_id, "backfill", COUNT, seconds)
        assert killed, "nothing was killed"
        reports = check(airflow, kafka, postgres, dag_id, [*runs, *runs_of(airflow, dag_id, "scheduled")])
        shared = [r["ranges"] for r in first if r["interval"] in [x["interval"] for x in reports]]
        assert [r["ranges"] for r in reports][: len(shared)] == shared, "boundaries are shared"

    # Once more, and other rows than before: what was there is replaced.
    with postgres.connect(autocommit=True) as connection:
        assert connection.execute("UPDATE aside SET customer = 'spoilt'").rowcount > 0
    backfill = {
        "dag_id": "aside", "from_date": dates[1], "to_date": dates[3], "max_active_runs": 8, "run_backwards": False,
        "reprocess_behavior": "completed", "dag_run_conf": {},
    }  # fmt: skip
    with killing(airflow, KILLS) as killed:
        assert wait_until(lambda: _starts(lambda: airflow.api("POST", "/backfills", backfill)), 300, every=2)
        runs = wait_for(airflow, "aside", "backfill", COUNT, seconds)
    assert killed, "nothing was killed"
    reports = check(airflow, kafka, postgres, "aside", [*runs, *runs_of(airflow, "aside", "scheduled")])
    assert all(report["replay"] >= 1 for report in reports[:COUNT] if report["records_read"])


def _starts(backfill: Callable[[], object]) -> bool:
    """Whether Airflow takes it: it notices only now and then that the backfill before has ended, and SQLite has one writer."""
    from airflow_kafka_spark.errors import ServerFailed

    try:
        backfill()
        return True
    except ServerFailed as error:
        assert any(word in str(error) for word in ("409", "500", "AlreadyRunningBackfill", "database is locked")), error
        return False
