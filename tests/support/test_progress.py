"""The lines about tests that run long."""

from __future__ import annotations

import time

from tests.support.progress import LONG_SECONDS, LongTests


def test_a_test_is_named_once_in_each_period_until_it_ends():
    tests = LongTests()
    tests.pytest_runtest_logstart("tests/test_a.py::test_long")
    begun = time.monotonic()
    assert tests.name_long(begun) == []
    assert tests.name_long(begun + LONG_SECONDS) == ["tests/test_a.py::test_long has been running for 5 minutes"]
    assert tests.name_long(begun + LONG_SECONDS + 30) == []
    assert tests.name_long(begun + 2 * LONG_SECONDS) == ["tests/test_a.py::test_long has been running for 10 minutes"]
    tests.pytest_handlecrashitem("tests/test_a.py::test_long")
    assert tests.name_long(begun + 3 * LONG_SECONDS) == []
