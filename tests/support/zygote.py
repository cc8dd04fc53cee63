"""A process that has imported everything and forks itself for each task attempt, because imports take longer than most attempts.

``python -m tests.support.zygote`` takes one JSON request a line, ``{"run": <payload>, "what": "task" or "sink", "env": {...},
"log": <path>}`` or ``{"poll": <pid>}``. It answers with the new process's id, or with the return code, null while the process
runs.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import threading
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("formats", "hooks", "jobs", "ledger", "sinks", "sources", "transforms")
"""The packages of which operators import modules while they work."""


class Zygote:
    """The server as the tests see it; it ends with them."""

    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.zygote"], env=env, cwd=ROOT, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )  # fmt: skip
        self._lock = threading.Lock()

    def ask(self, **request: Any) -> Any:
        with self._lock:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())


@cache
def zygote() -> Zygote:
    """Return the zygote of this test process."""
    return Zygote()


class Forked:
    """A process forked for one attempt, in its own session, with the used part of the interface of ``subprocess.Popen``."""

    def __init__(self, payload: str, env: dict[str, str], log: Path, what: str = "task") -> None:
        self.pid: int = zygote().ask(run=payload, what=what, env=env, log=str(log))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = zygote().ask(poll=self.pid)
        return self.returncode

    def wait(self, seconds: float) -> int:
        deadline = time.monotonic() + seconds
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", seconds)
            time.sleep(0.02)
        return code


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an import says is no answer
    # Imports take a quarter less time, and no fork looks through what was imported, which would copy it.
    gc.disable()
    # All that an attempt imports, with nothing started: half of the CPU time of an attempt that imports it itself.
    import confluent_kafka.admin  # noqa: F401
    import psycopg  # noqa: F401
    import pyarrow.dataset  # noqa: F401
    import pyspark.sql  # noqa: F401

    for name in ("adbc_driver_postgresql.dbapi", "pyiceberg.catalog.sql", "pyiceberg.io.pyarrow"):
        with contextlib.suppress(ImportError):  # the extras of sinks
            importlib.import_module(name)
    import airflow.models
    import airflow.sdk.execution_time.supervisor  # noqa: F401
    from sqlalchemy.orm import configure_mappers

    import airflow_kafka_spark.operators  # noqa: F401
    from tests.sinks import attempt
    from tests.support import pipelines, relay, shop, victim  # noqa: F401

    for name in PACKAGES:
        package = importlib.import_module(f"{airflow_kafka_spark.__name__}.{name}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.", onerror=lambda name: None):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)

    # Iceberg's catalog does this with its first query, which imports all models of Airflow: a second of each attempt.
    configure_mappers()
    mains = {"task": victim.main, "sink": attempt.main}
    assert threading.active_count() == 1, "a thread would be lost in every fork"
    gc.freeze()
    gc.enable()
    ended: dict[int, int] = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid = request["poll"]
            if pid not in ended:
                found, status = os.waitpid(pid, os.WNOHANG)
                if found:
                    ended[pid] = os.waitstatus_to_exitcode(status)
            answer = ended.get(pid)
        else:
            answer = os.fork()
            if answer == 0:
                _become(request, mains[request["what"]])
            # The system gives ids again: an earlier process may have had this one.
            ended.pop(answer, None)
        print(json.dumps(answer), file=answers, flush=True)


def _become(request: dict[str, Any], attempt: Any) -> None:
    os.setsid()
    # As in forks of Airflow: exit functions of the libraries imported above may wait for threads that a fork loses (polars 2.0).
    atexit._clear()
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, opened in enumerate((nothing, log, log)):
        os.dup2(opened, number)
    os.environ.clear()
    os.environ.update(request["env"])
    code = 1
    try:
        attempt(request["run"])
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        _end_spark()
        os._exit(code)


def _end_spark() -> None:
    """End the JVM by closing its standard input, as Python does at exit."""
    atexit._run_exitfuncs()


if __name__ == "__main__":
    main()
