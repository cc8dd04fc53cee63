"""The Python daemon of a local Spark, spoken to as Spark's JVM does."""

from __future__ import annotations

import importlib
import os
import runpy
import socket
import struct
import subprocess
import sys

from airflow_kafka_spark.hooks.spark import python_daemon
from airflow_kafka_spark.hooks.spark.python_daemon import leave_core_jar_out
from airflow_kafka_spark.testing._processes import wait_until
from tests.support import workers


def test_the_daemon_ends_its_own_workers_and_no_process_that_has_the_id_of_a_dead_one():
    module = "airflow_kafka_spark.hooks.spark.python_daemon"
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHON_WORKER_FACTORY_SECRET": "secret",
        "SPARK_REUSE_WORKER": "1",
    }
    daemon = subprocess.Popen(
        [sys.executable, "-m", module], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    other = subprocess.Popen(["sleep", "600"])
    try:
        assert daemon.stdin is not None and daemon.stdout is not None
        (port,) = struct.unpack("!i", daemon.stdout.read(4))

        def fork() -> tuple[socket.socket, int]:
            connection = socket.create_connection(("127.0.0.1", port))
            return connection, struct.unpack("!i", connection.recv(4, socket.MSG_WAITALL))[0]

        def kill(pid: int) -> None:
            daemon.stdin.write(struct.pack("!i", pid))
            daemon.stdin.flush()

        (_kept, first), (_lost, second) = fork(), fork()
        kill(other.pid)
        kill(second)
        assert wait_until(lambda: workers.state(second) == "?", 60)
        kill(second)  # as Spark does when it finds it dead
        third = fork()[1]
        assert [workers.state(pid) in "RS" for pid in (first, third, other.pid)] == [True, True, True]
    finally:
        for process in (daemon, other):
            process.kill()
            process.wait()


def test_modules_of_users_are_imported_again_for_each_task_and_those_of_the_package_are_not(tmp_path, monkeypatch):
    own, users = "airflow_kafka_spark.sources.jdbc.tasks.read", "functions_of_a_user"
    (tmp_path / f"{users}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    # Spark starts the daemon as a main module, whose name is not that of its file.
    daemon = runpy.run_path(python_daemon.__file__, run_name="started_by_spark")
    known = frozenset(sys.modules) - {own}
    importlib.import_module(own)
    importlib.import_module(users)
    daemon["_forget_modules_of_users"](known)
    assert own in sys.modules
    assert users not in sys.modules


def test_other_jars_stay_on_the_search_path():
    paths = ["", "/dags/udfs.jar", "/spark/jars/spark-core_2.13-4.0.0.jar", "/lib/pyspark.zip", "/spark-core_2.13.jar/src"]
    assert leave_core_jar_out(paths) == [*paths[:2], *paths[3:]]
