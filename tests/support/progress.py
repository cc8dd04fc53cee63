"""Names the tests of a run that take long, while they run."""

from __future__ import annotations

import sys
import threading
import time

import pytest

LONG_SECONDS = 300


class LongTests:
    """Print each test that has been running for five minutes, and again after each further five.

    A run that stops at a test, or is ended from outside, then says which test it was.
    """

    def __init__(self) -> None:
        self._started: dict[str, float] = {}
        self._named: dict[str, int] = {}
        self._finished = threading.Event()

    def pytest_sessionstart(self) -> None:
        threading.Thread(target=self._watch, name="long-tests", daemon=True).start()

    def pytest_sessionfinish(self) -> None:
        self._finished.set()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._started[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._started.pop(nodeid, None)
        self._named.pop(nodeid, None)

    @pytest.hookimpl(optionalhook=True)
    def pytest_handlecrashitem(self, crashitem: str) -> None:
        self.pytest_runtest_logfinish(crashitem)

    def _watch(self) -> None:
        while not self._finished.wait(LONG_SECONDS / 10):
            for line in self.name_long(time.monotonic()):
                print(f"\n{line}", file=sys.__stdout__, flush=True)

    def name_long(self, now: float) -> list[str]:
        """Return a line for each test that has been running for five minutes longer than when it was last named."""
        lines = []
        for nodeid, started in list(self._started.items()):
            if (periods := int((now - started) / LONG_SECONDS)) > self._named.get(nodeid, 0):
                self._named[nodeid] = periods
                lines.append(f"{nodeid} has been running for {(now - started) / 60:.0f} minutes")
        return lines
