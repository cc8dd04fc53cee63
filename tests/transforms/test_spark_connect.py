"""Chains over Spark Connect are what they are in one process, and are refused at the same time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.connect import spark_connect

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.servers
def test_chains_run_and_are_refused_over_spark_connect(tmp_path) -> None:
    path = os.pathsep.join([str(ROOT / "provider"), str(ROOT)])
    with spark_connect(tmp_path, env={"PYTHONPATH": path}) as port:
        command = [sys.executable, "-m", "tests.transforms.over_connect", str(port)]
        environment = {k: v for k, v in os.environ.items() if k != "PYSPARK_SUBMIT_ARGS"} | {"PYTHONPATH": path}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for word in ("transforms[0] Cast.spec", "transforms[0] Filter: ", "PARSE_SYNTAX_ERROR", "`more` is new"):
        assert word in done.stdout
