"""Windows through a real Spark Connect server: the task's process starts no JVM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from airflow_kafka_spark import faults
from airflow_kafka_spark.operators import SourceToKafkaOperator
from airflow_kafka_spark.sources import FilesSource
from tests.support.connect import spark_connect
from tests.support.kafka_sinks import with_sink
from tests.support.oracle import committed_records, same_multiset
from tests.support.runs import ROOT, Victim
from tests.support.shop import SPLIT, Shop, shop
from tests.support.waiting import fence_tasks, settled

pytestmark = pytest.mark.servers


@dataclass(frozen=True)
class Server:
    """A Spark Connect server.

    :param fired: while this file is missing, the next task of the server that publishes a split dies.
    """

    port: int
    fired: Path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests, which ends with this process. It has the drivers that Spark's JDBC reader uses."""
    directory = tmp_path_factory.mktemp("connect")
    fired = directory / "fired"
    fired.touch()
    jars = os.environ["PYSPARK_SUBMIT_ARGS"].split()[:2]
    with spark_connect(directory, jars=jars, env={faults.FAULT: "publish.committed", faults.ONCE: str(fired)}) as port:
        yield Server(port, fired)


@pytest.fixture
def connection(server: Server) -> str:
    """Taken into the environment once the pipeline has put its own there."""
    return json.dumps({"conn_type": "spark_connect", "host": "127.0.0.1", "port": server.port})


def through(attempt: Victim, connection: str) -> dict[str, Any]:
    """Return the report of an attempt that has succeeded over the server."""
    assert attempt.wait() == 0, attempt.tail()
    assert f"sc://127.0.0.1:{json.loads(connection)['port']}" in attempt.log.read_text()
    return attempt.result()


def output_of(program: str, server: Server) -> str:
    """Return the output of a program of the tests, which connects to the server."""
    path = os.pathsep.join([str(ROOT / "provider"), str(ROOT)])
    command = [sys.executable, "-m", program, str(server.port)]
    environment = {k: v for k, v in os.environ.items() if k != "PYSPARK_SUBMIT_ARGS"} | {"PYTHONPATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_a_window_through_spark_connect(files, connection, monkeypatch):
    """The window runs in a separate process, because a process has either a classic or a Connect session."""
    files.produce(800)
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", connection)
    files.reports.append(through(files.victim("run1", fault=None), connection))
    assert files.check() == 800


# --- sources ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def orders(kafka, postgres, unique, tmp_path, connection, monkeypatch) -> Iterator[Shop]:
    with shop(kafka, postgres, unique, tmp_path) as made:
        monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", connection)
        yield made


@pytest.mark.extended
def test_rows_of_a_table_are_published_once_over_connect_also_after_a_kill(orders, server, connection):
    """Read by tasks, then by Spark. A worker of the server dies when one split of the window is published; over Connect that is
    the end of the attempt."""
    orders.sell(300)
    first = through(orders.victim("run1", fault=None, read_with="auto"), connection)
    assert first["records_written"] == 300 and orders.check() == 300
    orders.sell(1_000)
    server.fired.unlink()
    victim = orders.victim("run2", fault=None, read_with="spark")
    assert victim.wait() == 1 and server.fired.exists(), victim.tail()
    fence_tasks(orders.name, orders.arguments["ledger_topic"], 1_000 // SPLIT + 1)
    orders.wait_settled()
    # On a slow machine all splits may be published before Spark notices that a worker is dead.
    assert 300 < len(orders.records()) <= 1_300
    retried = through(orders.victim("run2", fault=None, read_with="spark"), connection)
    assert (retried["window"], retried["records_written"]) == ("0000000002", 1_000)
    assert orders.check() == 1_300


def make_files(path: str, **options: Any) -> SourceToKafkaOperator:
    source = FilesSource(path, split_bytes=2_000)
    return SourceToKafkaOperator(task_id="task", source=source, **with_sink(options, key="id"))


@pytest.mark.extended
def test_rows_of_files_are_published_once_over_connect(kafka, unique, tmp_path, connection, monkeypatch):
    topic, name, place = unique("topic"), unique("lake"), tmp_path / "in"
    kafka.create_topic(topic, 3)
    place.mkdir()
    monkeypatch.setenv("AIRFLOW_CONN_KAFKA_DEFAULT", kafka.connection_json())
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", connection)
    options = {"path": str(place), "topic": topic, "pipeline": name, "ledger_topic": f"ledger-{name}"}
    expected: list[tuple[int, str]] = []
    # One file of several splits, and small ones of which several make one.
    for part, count in enumerate((200, 7, 8, 9)):
        rows = [(1_000 * part + n, f"näme {n}") for n in range(count)]
        ids, names = zip(*rows, strict=True)
        table = pa.table({"id": pa.array(ids, pa.int64()), "name": names})
        pa.parquet.write_table(table, place / f"{part}", row_group_size=50)
        expected += rows
    attempt = Victim(make_files, options, "run1", fault=None, once=tmp_path / "attempt")
    assert through(attempt, connection)["records_written"] == 224
    settled(topic)
    values = [json.loads(value) for *_, value in committed_records(kafka.connection_extra(), topic)]
    assert same_multiset(expected, ((value["id"], value["name"]) for value in values)) == 224


# --- transforms ---------------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_chains_are_over_connect_what_they_are_in_one_process_and_are_refused_at_the_same_time(server):
    said = output_of("tests.transforms.over_connect", server)
    for word in ("transforms[0] Cast.spec", "transforms[0] Filter: ", "PARSE_SYNTAX_ERROR", "`more` is new"):
        assert word in said


# --- the end of a server ------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_a_server_that_ends_or_drops_the_session_in_the_middle_of_a_job_is_one_clear_error_that_comes_soon(server):
    said = output_of("tests.support.connect_ends", server).splitlines()
    dropped, silent, stopped, gone = (line for line in said if line.startswith("Spark at "))
    reason = "(connection `spark_default`) cannot be used: the server has ended"
    assert f"{reason} the session, most likely because it was restarted. " in dropped and dropped.endswith("(in time)")
    for line in (silent, gone):
        assert f"{reason}, or does not answer any more. " in line and line.endswith("(in time)")
    assert "is a server that accepts connections and does not answer, for 6 s" in stopped
