"""A window through a real Spark Connect server: the task's process starts no JVM."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pyspark
import pytest

from airflow_kafka_spark.testing._processes import Keeper, free_ports, tail, wait_until


@pytest.fixture
def connect_server(tmp_path):
    """A server that ends with this process; its port."""
    home, (port,) = Path(pyspark.__file__).parent, free_ports(1)
    conf = {
        "spark.connect.grpc.binding.port": port,
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    submit = [home / "bin" / "spark-submit", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer"]
    settings = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    env = {**os.environ, "SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable}
    keeper, log = Keeper("Spark Connect"), tmp_path / "connect.log"
    try:
        keeper.spawn([*submit, "--master", "local[2]", *settings, "spark-internal"], log=log, env=env)
        assert wait_until(lambda: "Spark Connect server started" in log.read_text(), 90), tail(log)
        yield port
    finally:
        keeper.close()


def test_a_window_through_spark_connect(files, connect_server, monkeypatch):
    """In a process of its own: one process has either a classic or a Connect session."""
    files.produce(800)
    connection = {"conn_type": "spark_connect", "host": "127.0.0.1", "port": connect_server}
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps(connection))
    attempt = files.victim("run1", fault=None)
    assert attempt.wait() == 0, attempt.tail()
    files.reports.append(attempt.result())
    assert files.check() == 800
    assert f"sc://127.0.0.1:{connect_server}" in attempt.log.read_text()
