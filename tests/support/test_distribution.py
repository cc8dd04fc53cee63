"""A run of pytest in which a test process crashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CONFTEST = """
import pytest

from tests.support import crashes, distribution

for name in ("SERVER_TESTS", "LONG", "TOGETHER", "TWO_ENGINES", "WITH_REGISTRY", "OTHER_ZONE", "WITHOUT_BROKER", "WAITING"):
    setattr(distribution, name, ())


def pytest_xdist_make_scheduler(config, log):
    return distribution.Together(config, log)


@pytest.hookimpl(trylast=True)
def pytest_configure():
    crashes.keep_crashes()


def pytest_terminal_summary(terminalreporter):
    for worker, text in crashes.read_crashes().items():
        terminalreporter.line(f"{worker}: {text}")
"""

TESTS = """
import os
import signal
from pathlib import Path

import pytest


@pytest.mark.parametrize("number", range(40))
def test_number(number):
    with Path("ran").open("a") as ran:
        print(number, file=ran)
    if number == 17:
        os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_after_the_crash_of_a_test_process_the_others_run_every_test_once_and_the_thread_is_named(tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_one_dies.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\npythonpath = {Path(__file__).parents[2]}\n")
    # The run must not take itself for a part of this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "--dist", "load", "-p", "no:cacheprovider", "-c", "pytest.ini"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "39 passed" in run.stdout and "1 failed" in run.stdout, run.stdout + run.stderr
    assert "crashed while running" in run.stdout and "test_number[17]" in run.stdout
    assert "Fatal Python error: Segmentation fault" in run.stdout and "in test_number" in run.stdout
    assert sorted(map(int, (tmp_path / "ran").read_text().split())) == list(range(40))
