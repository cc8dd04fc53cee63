"""The Delta sink on an object store: ``s3_cases.py``, run in a process that has the packages of one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import s3

ROOT = Path(__file__).parents[3]
CASES = Path(__file__).with_name("s3_cases.py")


@pytest.mark.slow
def test_all_cases_of_a_table_on_s3(tmp_path):
    """Everything that process writes is looked through for the secret that it worked with."""
    overlay, told = s3.packages(), tmp_path / "secret"
    path = [str(overlay), str(ROOT)] if overlay else [str(ROOT)]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*path, *filter(None, sys.path)]), "S3_SECRET_FILE": str(told)}
    command = [sys.executable, "-m", "pytest", str(CASES), "-p", "no:cacheprovider", "-v", "-s", "--log-cli-level=INFO"]
    with (tmp_path / "log").open("wb") as log:
        ended = subprocess.run(command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, timeout=400, check=False)
    said = (tmp_path / "log").read_text(errors="replace")
    assert ended.returncode == 0, said[-20_000:]
    passed = re.search(r"=+ (\d+) passed\b", said)
    assert passed and int(passed[1]) >= 8, said[-2_000:]
    secret = told.read_text()
    assert len(secret) > 20 and secret not in said
