"""The pytest plugin of a mutant's test process: it checks which package is tested, and writes down how the tests ended.

The runner copies this file to a directory of its own, so that checkouts without it can be tested too. It therefore imports
nothing of ``tests``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

COPY = "MUTANT_PACKAGE"
"""The environment variable that names the directory of the package to be tested."""
RESULT = "MUTANT_RESULT"
"""The environment variable that names the file to write."""
WRONG_PACKAGE = 90
"""The exit status when another copy of the package was imported."""

_found: dict[str, Any] = {"passed": [], "skipped": [], "failed": []}


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse to test any other copy of the package than the mutated one."""
    import airflow_kafka_spark

    imported = Path(airflow_kafka_spark.__file__).parent
    if imported != Path(os.environ[COPY]):
        pytest.exit(f"{imported} was imported, not {os.environ[COPY]}", returncode=WRONG_PACKAGE)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how a test ended: it has passed or was skipped, or what failed first and in which phase."""
    if report.failed:
        _found["failed"].append([report.nodeid, report.when, _first_line(report)])
    elif report.skipped:
        _found["skipped"].append(report.nodeid)
    elif report.when == "call":
        _found["passed"].append(report.nodeid)


def pytest_sessionfinish() -> None:
    """Write the result, and where processes that the tests started keep their bytecode."""
    _found["bytecode"] = os.environ.get("PYTHONPYCACHEPREFIX", "")
    Path(os.environ[RESULT]).write_text(json.dumps(_found), encoding="utf-8")


def _first_line(report: pytest.TestReport) -> str:
    """Return the first line of a failure, with the place where it was raised."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else str(report.longrepr)
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return f"{line} ({Path(crash.path).name}:{crash.lineno})" if crash is not None else line
