"""A window is published to Kafka by executors of their own, and Spark runs a split again by itself: after an executor or a worker
was killed, and at once on both executors (speculation).

After each, without a retry of the task: every row is there exactly once, both for a read_committed reader that read all the while
and for one that reads at the end, no transaction of ours is open, and a further attempt writes nothing.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import pytest

from airflow_kafka_spark.cli.definition import main as cli
from airflow_kafka_spark.errors import Fenced
from airflow_kafka_spark.sinks.kafka.tasks.publish import RecordBatches
from tests.support.cluster import OURS, Driver, connection, standalone
from tests.support.shop import make, shop
from tests.support.splits import ROWS, rows, splits
from tests.support.workers import executor_of, wait_stopped, wake

ORDERS = 400


@pytest.fixture(scope="module")
def local_cluster(tmp_path_factory):
    """The driver of two executors of one core."""
    with Driver(connection("local-cluster[2,1,1024]"), tmp_path_factory.mktemp("local-cluster")) as driver:
        yield driver


@pytest.fixture(scope="module")
def master(tmp_path_factory):
    """The master of a standalone cluster, whose two workers share no Python environment with this process."""
    with standalone(tmp_path_factory.mktemp("standalone")) as url:
        yield url


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


@pytest.mark.faults
def test_a_python_worker_killed_on_an_executor_costs_nothing(orders, local_cluster, tmp_path):
    once = tmp_path / "fired"
    local_cluster.start(make, orders.arguments, "run1", ("publish.committed", once))
    report = local_cluster.result()
    assert once.exists()
    check(orders, report)


@pytest.mark.faults
def test_an_executor_killed_in_the_middle_of_a_split_costs_nothing(orders, local_cluster, tmp_path):
    once = tmp_path / "fired"
    local_cluster.start(make, orders.arguments, "run1", ("publish.mid:stop", once))
    worker = wait_stopped(once)
    os.kill(executor_of(worker), signal.SIGKILL)
    report = local_cluster.result()
    # Its Python worker may outlive it: a zombie.
    wake(worker)
    check(orders, report)


@pytest.mark.faults
def test_a_split_that_spark_runs_twice_at_once_is_published_once(orders, master, tmp_path):
    once = tmp_path / "fired"
    eager = {
        **OURS,
        "spark.executor.memory": "512m",
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.minTaskRuntime": "200ms",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.efficiency.enabled": "false",
        # The copy that lost lives on.
        "spark.python.task.killTimeout": "600s",
    }
    with Driver(connection(master, **eager), tmp_path) as driver:
        driver.start(make, orders.arguments, "run1", ("publish.mid:stop", once))
        stopped = wait_stopped(once)
        # It sleeps in the middle of its split: that the window completes all the same is the other copy's doing.
        report = driver.result()
        wake(stopped)
    check(orders, report)


@pytest.mark.faults
def test_executors_without_packages_are_named_before_they_read_and_work_with_the_archive_of_pack(orders, master, tmp_path):
    bare, archive = tmp_path / "bare", tmp_path / "env.tar.gz"
    subprocess.run([sys._base_executable, "-m", "venv", "--without-pip", str(bare)], check=True)
    # Spark's own daemon: that of the tests is not on these executors.
    settings = {"spark.executor.memory": "512m", "spark.python.daemon.module": "pyspark.daemon", "spark.cores.max": "1"}
    python = str(bare / "bin" / "python")
    with Driver(connection(master, **settings, **{"spark.pyspark.python": python}), tmp_path) as driver:
        driver.start(make, orders.arguments, "run1")
        error = driver.error()
        assert error.startswith("ExecutorUnfit: Spark cannot run the tasks of window"), error
        for name in ("pyarrow", "pandas", "confluent-kafka", "adbc-driver-postgresql"):
            assert f"{name} is missing (driver: {metadata.version(name)})" in error
        assert f"at {python}" in error
        assert orders.records() == []

        assert cli(["pack", "--source", "jdbc", "--sink", "kafka", "-o", str(archive)]) == 0
        packed = {
            "spark.archives": f"{archive}#environment",
            "spark.pyspark.python": "./environment/bin/python",
            "spark.executorEnv.AIRFLOW_KAFKA_SPARK_PYTHON": python,
        }
        driver.start(make, orders.arguments, "run1", spark=connection(master, **settings, **packed))
        report = driver.result()
    assert report["attempts"] == 2
    assert orders.check() == ORDERS


COPIES, SPLITS = 3, 8


@pytest.mark.faults
def test_copies_of_a_split_that_run_side_by_side_publish_it_once(kafka, unique):
    """All begin at once, and meet again in the middle of their rows: whoever then goes on, one of them publishes."""

    def half_by_half(split, middle):
        yield rows(split).slice(0, ROWS // 2)
        # A copy that finds the split published, or is refused, does not come here: the others go on without it.
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
