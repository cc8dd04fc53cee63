"""A window is published to Kafka, or written to a table, by separate executors, and Spark runs a split again by itself: after an
executor or a worker was killed or decommissioned, or at the same time on both executors (speculation).

After each test, without a retry of the task: every row is there exactly once, both for a read_committed background reader and for
a reader at the end, none of the pipeline's transactions is open, and a further attempt writes nothing.

Executors without any package of this environment are tested here, too: the error that names them, and how they get the packages.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from unittest.mock import patch

import pytest

from airflow_kafka_spark.cli import pack
from airflow_kafka_spark.cli.definition import main as cli
from airflow_kafka_spark.errors import Fenced
from airflow_kafka_spark.sinks.kafka.tasks.publish import RecordBatches
from airflow_kafka_spark.testing._processes import find_free_ports, read_tail, wait_until
from tests.support import pipelines
from tests.support.cluster import OURS, Driver, connection, quick_jvm, standalone
from tests.support.connect import spark_connect
from tests.support.shop import make, shop
from tests.support.splits import ROWS, rows, splits
from tests.support.workers import ancestors, executor_of, listening, session, wait_stopped, wake

ORDERS = 400
SMALL = {"spark.executor.memory": "512m"}
NEXT_PORTS = 4
"""Ports behind the one of its setting that Spark tries if another process has that."""


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The directory of a standalone cluster."""
    return tmp_path_factory.mktemp("standalone")


@pytest.fixture(scope="module")
def master(places):
    """The master of a standalone cluster, whose two workers share no Python environment with this process."""
    with standalone(places) as url:
        yield url


@pytest.fixture(scope="module")
def driver(master, places):
    """The driver of all applications on that cluster, one after the other: the session of a cluster ends with its window."""
    with Driver(connection(master), places / "driver") as driver:
        yield driver


@pytest.fixture(scope="module")
def bare(places):
    """Return a Python without any package, as executors may have it."""
    subprocess.run([sys._base_executable, "-m", "venv", "--without-pip", str(places / "bare")], check=True)
    return str(places / "bare" / "bin" / "python")


@pytest.fixture(scope="module")
def packed(places, bare):
    """Return settings by which such executors have the packages of an archive. Their daemon is Spark's own, because the tests'
    daemon is not in the archive.
    """
    archive = places / "env.tar.gz"
    with patch.object(pack, "_LEVEL", 0):
        assert cli(["pack", "--source", "kafka", "jdbc", "--sink", "kafka", "postgres", "-o", str(archive)]) == 0
    return {
        **SMALL,
        "spark.python.daemon.module": "pyspark.daemon",
        "spark.cores.max": "1",
        "spark.executor.extraJavaOptions": quick_jvm(),
        "spark.archives": f"{archive}#environment",
        "spark.pyspark.python": "./environment/bin/python",
        "spark.executorEnv.AIRFLOW_KAFKA_SPARK_PYTHON": bare,
    }


@pytest.fixture
def orders(kafka, postgres, unique, tmp_path):
    with shop(kafka, postgres, unique, tmp_path) as made, made.watched():
        made.sell(ORDERS)
        yield made


def check(orders, report):
    assert (report["records_written"], report["attempts"]) == (ORDERS, 1), "Spark ran the split again, nobody the task"
    assert orders.check() == ORDERS
    assert orders.run("run1") == report
    assert orders.check() == ORDERS


@pytest.fixture
def table(request, kafka, postgres, unique, tmp_path):
    """A pipeline from a topic into a table, of the kind of the test's parameter."""
    with pipelines.pipeline(request.param, kafka, lambda: postgres, unique, tmp_path) as made:
        made.produce(ORDERS)
        yield made


def check_table(table, report, *, attempts=1):
    assert (report["records_written"], report["attempts"]) == (ORDERS, attempts), "Spark ran the split again, nobody the task"
    table.reports.append(report)
    assert table.check() == ORDERS
    assert table.run("run1") == report
    assert table.check() == ORDERS


@pytest.mark.faults
def test_a_killed_worker_and_a_split_that_spark_runs_twice_at_once_cost_nothing_with_a_driver_of_two_ports(
    orders, driver, master, tmp_path
):
    """One split sleeps in its middle; the worker of the other one is killed when that split is published. Then speculation, and a
    firewall before the driver: executors and master connect to two ports that are known beforehand, or to one of the next few."""
    once = tmp_path / "fired"
    port, blocks = find_free_ports(2)
    eager = {
        **OURS,
        **SMALL,
        "spark.driver.port": str(port),
        "spark.driver.blockManager.port": str(blocks),
        "spark.port.maxRetries": str(NEXT_PORTS),
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.minTaskRuntime": "200ms",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.efficiency.enabled": "false",
        # The copy that lost lives on.
        "spark.python.task.killTimeout": "600s",
    }
    faults = "publish.mid:stop,publish.committed"
    driver.start(make, orders.arguments, "run1", (faults, once), spark=connection(master, **eager))
    stopped = wait_stopped(tmp_path / "fired.publish.mid", os.getpid())
    heard = set().union(*(listening(pid) for pid in session(driver.process.pid) if driver.process.pid in ancestors(pid)))
    # It sleeps in the middle of its split, so the other copy completes the window.
    report = driver.result()
    assert (tmp_path / "fired.publish.committed").exists()
    wake(stopped)
    # The third port is the JVM's port for the Python of its own task. Another process may have taken a port since it was chosen.
    assert all(heard & set(range(first, first + NEXT_PORTS + 1)) for first in (port, blocks)) and len(heard) == 3, heard
    check(orders, report)


@pytest.mark.faults
@pytest.mark.parametrize("table", ["postgres"], indirect=True)
def test_executors_without_packages_are_named_before_they_read_and_work_with_the_archive_of_pack(
    table, driver, master, bare, packed
):
    """This window goes from a topic into a table. The next test moves a table to a topic."""
    alone = {**SMALL, "spark.python.daemon.module": "pyspark.daemon", "spark.cores.max": "1", "spark.pyspark.python": bare}
    driver.start(pipelines.make, table.arguments, "run1", spark=connection(master, **alone))
    error = driver.error()
    assert error.startswith("ExecutorUnfit: Spark cannot run the tasks of window"), error
    for name in ("pyarrow", "pandas", "confluent-kafka", "adbc-driver-postgresql"):
        assert f"{name} is missing (driver: {metadata.version(name)})" in error
    assert f"at {bare}" in error
    assert table.rows() == []

    driver.start(pipelines.make, table.arguments, "run1", spark=connection(master, **packed))
    check_table(table, driver.result(), attempts=2)


@pytest.mark.extended
@pytest.mark.faults
def test_a_spark_connect_server_on_the_cluster_has_the_packages_of_the_archive_and_this_one(orders, master, packed, tmp_path):
    # Workers of a session of Spark Connect run in a folder of the session below that of the executor.
    env = {"PYSPARK_PYTHON": "../environment/bin/python"}
    with spark_connect(tmp_path, master=master, settings=packed, env=env) as port:
        os.environ["AIRFLOW_CONN_SPARK_DEFAULT"] = json.dumps({"conn_type": "spark_connect", "host": "127.0.0.1", "port": port})
        attempt = orders.victim("run1", fault=None)
        assert attempt.wait() == 0, attempt.tail()
        report = attempt.result()
    assert (report["records_written"], report["attempts"]) == (ORDERS, 1)
    assert orders.check() == ORDERS


@pytest.mark.extended
@pytest.mark.faults
@pytest.mark.parametrize("table", ["postgres-split"], indirect=True)
def test_an_executor_without_packages_beside_one_that_has_them_gets_no_further_split(table, driver, master, places, bare):
    """Two executors differ. A setting of Spark has a task that failed on one executor tried on another."""
    for number, python in (("1", bare), ("2", sys.executable)):
        link = places / number / "bin" / "some-python"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.write_text(f'#!/bin/sh\nexec {python} "$@"\n')
        link.chmod(0o755)
    mixed = {
        **SMALL,
        "spark.python.daemon.module": "pyspark.daemon",
        "spark.pyspark.python": "some-python",
        "spark.excludeOnFailure.enabled": "true",
    }
    driver.start(pipelines.make, table.arguments, "run1", spark=connection(master, **mixed))
    check_table(table, driver.result())


@pytest.mark.extended
@pytest.mark.faults
def test_dynamic_allocation_that_begins_without_executors_and_loses_one_in_the_middle_of_a_split_costs_nothing(
    orders, driver, master, tmp_path
):
    once = tmp_path / "fired"
    elastic = {
        **OURS,
        **SMALL,
        "spark.dynamicAllocation.enabled": "true",
        "spark.dynamicAllocation.shuffleTracking.enabled": "true",
        "spark.dynamicAllocation.initialExecutors": "0",
        "spark.dynamicAllocation.maxExecutors": "2",
        "spark.executor.cores": "1",
        # The other executor is released while one sleeps.
        "spark.dynamicAllocation.executorIdleTimeout": "1s",
    }
    driver.start(make, orders.arguments, "run1", ("publish.mid:stop", once), spark=connection(master, **elastic))
    stopped = wait_stopped(once, os.getpid())
    os.kill(executor_of(stopped), signal.SIGKILL)
    report = driver.result()
    # The Python worker outlives its executor: a zombie.
    wake(stopped)
    check(orders, report)


@pytest.mark.extended
@pytest.mark.faults
def test_a_worker_decommissioned_in_the_middle_of_a_split_that_then_dies_costs_nothing(orders, driver, master, places, tmp_path):
    """The worker's machine is taken away before its split has ended. This is the last test of the cluster, which then has one
    worker.
    """
    once = tmp_path / "fired"
    leaving = {**OURS, **SMALL, "spark.decommission.enabled": "true"}
    driver.start(make, orders.arguments, "run1", ("publish.mid:stop", once), spark=connection(master, **leaving))
    stopped = wait_stopped(once, os.getpid())
    executor = executor_of(stopped)
    worker = ancestors(executor)[0]
    os.kill(worker, signal.SIGPWR)
    log = places / "cluster.log"
    assert wait_until(lambda: "Telling app of decommission executors" in log.read_text(), 180), read_tail(log)
    for process in (worker, executor):
        os.kill(process, signal.SIGKILL)
    report = driver.result()
    # The Python worker outlives its executor: a zombie.
    wake(stopped)
    check(orders, report)


COPIES, SPLITS = 3, 8


@pytest.mark.faults
def test_copies_of_a_split_that_run_side_by_side_publish_it_once(kafka, unique):
    """All copies begin at the same time and meet again in the middle of their rows. One of them publishes, in any order of their
    next steps.
    """

    def half_by_half(split, middle):
        yield rows(split).slice(0, ROWS // 2)
        # A copy that finds the split published, or is refused, does not come here: the others continue without it.
        with contextlib.suppress(threading.BrokenBarrierError):
            middle.wait(1)
        yield rows(split).slice(ROWS // 2)

    with splits(kafka, unique, SPLITS) as made, ThreadPoolExecutor(COPIES) as pool:
        for split in range(SPLITS):
            middle = threading.Barrier(COPIES)
            copies = [
                pool.submit(made.publisher.publish, split, RecordBatches(half_by_half(split, middle))) for _ in range(COPIES)
            ]
            errors = [copy.exception(120) for copy in copies]
            assert all(error is None or isinstance(error, Fenced) for error in errors), errors
            markers = [copy.result() for copy, error in zip(copies, errors, strict=True) if error is None]
            assert markers and all(marker == markers[0] for marker in markers)
        assert made.check() == SPLITS * ROWS
