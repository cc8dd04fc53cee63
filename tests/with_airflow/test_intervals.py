"""Intervals through a real Airflow: an hourly DAG that catches up, backfills side by side and backwards, replays; each with tasks
killed at random, by SIGKILL. ``INTERVALS=48`` runs it over two days; as it stands it is shorter."""

from __future__ import annotations

import random
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta

import psutil
import pytest
from confluent_kafka import Producer

from airflow_kafka_spark.testing._processes import wait_until
from airflow_kafka_spark.ui.airflow_metadata import CatalogReader, DagSchedule
from airflow_kafka_spark.windows.lag import Unscheduled
from tests.support.oracle import committed_records, same_multiset
from tests.support.pipelines import COLUMNS, order, row_of
from tests.support.waiting import eventually
from tests.with_airflow.site import BEGIN, HOURS, LAST, NOW, find_tasks

KILLS = max(1, HOURS // 6)
TOPIC = "hours"
SECONDS = 600 + HOURS * 60


def produce(config: dict) -> int:
    """Produce some records in every hour, out of order, some of them hours late, some early."""
    chance, producer, number = random.Random(7), Producer(config), 0
    for hour in range(HOURS):
        for _ in range(40):
            minute = hour * 60 + chance.uniform(0, 60) + chance.choice([0] * 8 + [-90, 45])
            at = BEGIN + timedelta(minutes=min(max(minute, 0), HOURS * 60 - 0.1))
            producer.produce(TOPIC, order(number), b"%d" % number, number % 3, timestamp=round(at.timestamp() * 1000))
            number += 1
    for partition in range(3):
        producer.produce(TOPIC, order(number), b"%d" % number, partition, timestamp=round(NOW.timestamp() * 1000))
        number += 1
    producer.flush(60)
    return number


@pytest.fixture(scope="module")
def airflow(site, kafka, postgres):
    kafka.create_topic(TOPIC, 3)
    produce(kafka.connection_extra())
    with postgres.connect(autocommit=True) as connection:
        for name in ("catchup", "aside"):
            connection.execute(f'CREATE TABLE {name} ({COLUMNS}, "window" text)')
    return site.airflow


@contextmanager
def killing(airflow, *dag_ids: str):
    """SIGKILL ``KILLS`` task processes of each DAG, each some random time after it was first seen.

    Yields the DAG ids of those killed, one for each. The later a task comes, the sooner it is killed: the last one at once.
    """
    killed: list[str] = []
    done = threading.Event()
    thread = threading.Thread(target=_kill, args=(airflow, dag_ids, killed, done))
    thread.start()
    try:
        yield killed
    finally:
        done.set()
        thread.join()


def _kill(airflow, dag_ids: tuple[str, ...], killed: list[str], done: threading.Event) -> None:
    chance, scheduler = random.Random(11), psutil.Process(airflow.pid("scheduler"))
    dag_of: dict[str, str] = {}
    due: dict[str, dict[str, float]] = {dag_id: {} for dag_id in dag_ids}
    while len(killed) < KILLS * len(dag_ids) and not done.wait(0.2):
        alive = find_tasks(scheduler)
        if alive.keys() - dag_of.keys():
            found = airflow.api("GET", "/dags/~/dagRuns/~/taskInstances?state=running&limit=100")["task_instances"]
            dag_of |= {task["id"]: task["dag_id"] for task in found}
        for task, process in alive.items():
            dag_id = dag_of.get(task)
            if dag_id not in due or killed.count(dag_id) == KILLS:
                continue
            wait = chance.uniform(0, 2) * max(0.0, 1 - (len(due[dag_id]) + 1) / HOURS)
            if time.monotonic() >= due[dag_id].setdefault(task, time.monotonic() + wait):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
                    killed.append(dag_id)


def schedules_of(airflow) -> dict[str, DagSchedule]:
    """Return the times at which Airflow runs the DAGs itself, as the pages read them from its database."""
    from sqlalchemy import create_engine
    from sqlalchemy.orm import Session

    engine = create_engine(airflow.env["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"])
    try:
        with Session(engine) as session:
            return dict(CatalogReader().read(session).schedules)
    finally:
        engine.dispose()


def status_of(site, pipeline: str) -> str:
    """Return the pages' text about a pipeline; "" before they show it."""
    answer = site.login("admin").get("pipeline", ledger="kafka_default/ledger-hours", pipeline=pipeline)
    status = answer.json["row"]["status"] if answer.status == 200 else "UNKNOWN"
    return "" if status == "UNKNOWN" else str(status)


def runs_of(airflow, dag_id: str, kind: str) -> list[dict]:
    runs = airflow.api("GET", f"/dags/{dag_id}/dagRuns?limit=100&order_by=logical_date")["dag_runs"]
    return [run for run in runs if run["run_type"] == kind]


def wait_for(airflow, dag_id: str, kind: str, count: int = HOURS) -> list[dict]:
    """Wait until this many runs of a kind have ended, all successfully."""
    runs: list[dict] = []

    def ended() -> bool:
        runs[:] = runs_of(airflow, dag_id, kind)
        return len(runs) >= count and all(run["state"] in ("success", "failed") for run in runs)

    assert wait_until(ended, SECONDS, every=0.5), [
        (run["state"], airflow.account(dag_id, run["dag_run_id"])) for run in runs if run["state"] not in ("success", "failed")
    ]
    failed = [run["dag_run_id"] for run in runs if run["state"] != "success"]
    assert not failed, airflow.account(dag_id, failed[0])
    return runs


def rows_of(site, postgres, dag_id: str) -> list[tuple]:
    """Return (window, row) of a sink."""
    if dag_id != "backwards":
        with postgres.connect(autocommit=True) as connection:
            query = f'SELECT "window", id, customer, amount::text, extract(epoch FROM placed_at)::bigint FROM {dag_id}'
            return [(row[0].partition("#")[0], tuple(row[1:])) for row in connection.execute(query).fetchall()]
    import pyarrow.dataset as ds

    table = ds.dataset(site.files / "backwards", format="parquet", partitioning="hive").to_table()
    columns = [table[name].to_pylist() for name in ("window", "id", "customer", "amount", "placed_at")]
    return [(w[: w.rindex("-")], (i, c, str(a), int(p.timestamp()))) for w, i, c, a, p in zip(*columns, strict=True)]


def check(site, postgres, dag_id: str, runs: list[dict]) -> list[dict]:
    """Each interval's rows are the topic's records between its boundaries, and the intervals tile the log; their reports."""
    events = {(p, o): row_of(v) for p, o, _, v in committed_records(site.kafka.connection_extra(), TOPIC) if v is not None}
    reports = sorted((site.value(dag_id, run["dag_run_id"], "task") for run in runs), key=lambda report: report["interval"])
    by_window: dict[str, list] = {}
    for name, row in rows_of(site, postgres, dag_id):
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
    assert compared >= HOURS * 30
    return reports


def backfill(airflow, dag_id: str, at_once: int, *, backwards: bool = False, again: str = "none") -> None:
    """Start Airflow's backfill of all hours, and wait until the scheduler begins it."""
    body = {
        "dag_id": dag_id, "from_date": BEGIN.isoformat(), "to_date": LAST.isoformat(), "max_active_runs": at_once,
        "run_backwards": backwards, "reprocess_behavior": again, "dag_run_conf": {},
    }  # fmt: skip
    airflow.api("POST", "/backfills", body)
    airflow.api("PATCH", f"/dags/{dag_id}", {"is_paused": False})


@pytest.mark.airflow
@pytest.mark.timeout(5400)
def test_intervals_caught_up_backfilled_aside_and_backwards_and_replayed_under_sigkill_hold_their_records_once(
    site, airflow, postgres
):
    dag_ids = ("catchup", "aside", "backwards")
    first = schedules_of(airflow)["catchup"]
    assert (first.is_paused, first.next_run) == (True, (BEGIN + timedelta(hours=1)).timestamp())
    assert first.next_interval == (BEGIN.timestamp(), first.next_run)
    assert replace(first, is_paused=False).cadence.find_due_after(LAST.timestamp() + 60) == NOW.timestamp()
    with killing(airflow, *dag_ids) as killed:
        airflow.api("PATCH", "/dags/catchup", {"is_paused": False})
        backfill(airflow, "aside", 8)
        backfill(airflow, "backwards", 2, backwards=True)
        runs = {dag_id: wait_for(airflow, dag_id, "scheduled" if dag_id == "catchup" else "backfill") for dag_id in dag_ids}
    assert sorted(killed) == sorted(dag_ids * KILLS), "a kill of each"
    # However fast the hours were caught up: no further run is planned, so that none is missed.
    assert schedules_of(airflow)["catchup"].cadence == Unscheduled()
    assert eventually(lambda: status_of(site, "catchup")) == "OK"
    ranges = []
    for dag_id in dag_ids:
        reports = check(site, postgres, dag_id, runs[dag_id])
        ranges.append([report["ranges"] for report in reports])
    assert ranges[0] == ranges[1] == ranges[2], "boundaries are shared"

    # Once more, and other rows than before: what was there is replaced.
    with postgres.connect(autocommit=True) as connection:
        assert connection.execute("UPDATE catchup SET customer = 'spoilt'").rowcount > 0
    with killing(airflow, "catchup") as killed:
        backfill(airflow, "catchup", 8, again="completed")
        runs_again = wait_for(airflow, "catchup", "backfill")
    assert killed == ["catchup"] * KILLS
    reports = check(site, postgres, "catchup", runs_again)
    assert all(report["replay"] >= 1 for report in reports if report["records_read"])
