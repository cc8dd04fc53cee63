"""A real Spark Connect server, so that tasks start without a JVM, and a path for their Airflow."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyspark

from airflow_kafka_spark.testing._processes import SupervisorClient, find_free_ports, read_tail, wait_until
from tests.support import connect_daemon

_PATHS = [os.getcwd(), str(Path(__file__).with_name("in_scheduler")), os.environ.get("PYTHONPATH", "")]
AIRFLOW_PATH = os.pathsep.join(filter(None, _PATHS))
"""A ``PYTHONPATH``: of the tests, of what the scheduler imports for all of its tasks, and what this process has."""


@contextmanager
def spark_connect(
    directory: Path,
    *,
    master: str = "local[2]",
    settings: Mapping[str, str] | None = None,
    jars: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[int]:
    """Start the server and return its port. The server ends with this process.

    :param directory: the directory of its log.
    :param master: the master of its executors.
    :param settings: further settings of Spark.
    :param jars: the options of spark-submit that name further jars.
    :param env: further environment variables of the server and its workers.
    """
    home, (port,) = Path(pyspark.__file__).parent, find_free_ports(1)
    conf = {
        "spark.connect.grpc.binding.port": port,
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.memory": "512m",
        "spark.ui.enabled": "false",
        "spark.python.daemon.module": connect_daemon.__name__,
        **(settings or {}),
    }
    submit = [home / "bin" / "spark-submit", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    options = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    environment = {**os.environ, "SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable, **(env or {})}
    # Where its Python finds tests.support.connect_daemon.
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), os.getcwd()]))
    socket = directory / "connect.socket"
    environment[connect_daemon.SOCKET] = str(socket)
    supervisor, log = SupervisorClient("Spark Connect"), directory / "connect.log"
    forks = conf["spark.python.daemon.module"] == connect_daemon.__name__
    try:
        if forks:
            daemon = [sys.executable, "-m", connect_daemon.__name__, "--serve"]
            supervisor.spawn(daemon, log=directory / "connect-daemon.log", env=environment)
        supervisor.spawn([*submit, "--master", master, *jars, *options, "spark-internal"], log=log, env=environment)

        def is_started() -> bool:
            return (socket.exists() or not forks) and "Spark Connect server started" in log.read_text()

        assert wait_until(is_started, 300), read_tail(log)
        yield port
    finally:
        supervisor.close()
