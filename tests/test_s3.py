"""Sources and sinks on an object store: their cases run in one process that has the packages of one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import s3

ROOT = Path(__file__).parents[1]
CASES = {
    "tests/sources/files/s3_cases.py": 14,
    "tests/sinks/delta/s3_cases.py": 9,
    "tests/sinks/iceberg/s3_cases.py": 2,
    "tests/sinks/files/s3_cases.py": 11,
    "tests/sinks/s3_fault_cases.py": 3,
    "tests/verification/s3_cases.py": 2,
}
"""The files with the cases, and how many there are at least, without extended ones."""


@pytest.mark.slow
def test_all_cases_of_an_object_store(kafka, tmp_path, pytestconfig):
    """Everything that process writes, Spark's log among it, is looked through for the secret that it worked with."""
    overlay, secret_file = s3.packages(), tmp_path / "secret"
    path = [str(overlay), str(ROOT)] if overlay else [str(ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, *filter(None, sys.path)]), "S3_SECRET_FILE": str(secret_file)}
    env["S3_KAFKA"] = kafka.bootstrap_servers
    options = ["-p", s3.__name__, "-p", "no:cacheprovider", "-v", "-s", "--log-cli-level=INFO"]
    if pytestconfig.option.extended:
        options.append("--extended")
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", "pytest", *CASES, *options]
        ended = subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=1100, check=False)
    said = (tmp_path / "log").read_text(errors="replace")
    assert ended.returncode == 0, said[-20_000:]
    for file, count in CASES.items():
        assert len(set(re.findall(rf"^{file}::(\S+)", said, re.MULTILINE))) >= count, said[-2_000:]
    passed = re.search(r"=+ (\d+) passed\b", said)
    assert passed and int(passed[1]) >= sum(CASES.values()), said[-2_000:]
    secret = secret_file.read_text()
    assert len(secret) > 20 and secret not in said
