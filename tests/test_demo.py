"""The demo, as `make demo` runs it, with fewer events: it is also the test of the example DAG."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.connect import AIRFLOW_PATH

ROOT = Path(__file__).parents[1]


@pytest.mark.airflow
@pytest.mark.slow
@pytest.mark.timeout(1600)
def test_the_demo_goes_the_whole_road_kills_in_each_direction_and_counts_every_order_once():
    # The demo starts Spark as it does for users.
    env = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "PYSPARK"))}
    env["PYTHONPATH"] = AIRFLOW_PATH
    done = subprocess.run(
        [sys.executable, "-m", "airflow_kafka_spark.demo", "--events", "20000"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("all 30,000 orders, each exactly once") == 3
    assert done.stdout.count("sales.orders differ: 0") == 2
    assert "publish needed 2 attempts" in done.stdout and done.stdout.count("needed 2 attempts") == 2
    assert "Nothing is left running" in done.stdout
