"""Keeps what a test process writes when it crashes in native code, for the end of the run's output."""

from __future__ import annotations

import faulthandler
import os
import tempfile
from pathlib import Path

DIRECTORY = "TESTS_CRASHES"
"""The environment variable with the directory of the files, one for each test process."""
MOST_LINES = 60


def keep_crashes() -> None:
    """Let a crash of this test process be written into a file. Call it after pytest has enabled its own handler."""
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and (directory := os.environ.get(DIRECTORY)):
        faulthandler.enable((Path(directory) / worker).open("w", encoding="utf-8"))
    elif not worker:
        os.environ[DIRECTORY] = tempfile.mkdtemp(prefix="tests-crashes-")


def read_crashes() -> dict[str, str]:
    """Return the first lines that each crashed test process has written, by its name.

    The first ones name the signal and the thread that got it.
    """
    files = sorted(Path(os.environ[DIRECTORY]).iterdir())
    texts = {file.name: file.read_text(encoding="utf-8", errors="replace") for file in files}
    return {name: "\n".join(text.splitlines()[:MOST_LINES]) for name, text in texts.items() if text}
