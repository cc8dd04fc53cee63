"""Spark's Python daemon for tests: its workers have imported the modules that tasks need, and read their faults from a file.

Spark starts this module instead of ``pyspark.daemon`` (``spark.python.daemon.module``) and forks every Python worker from it.
Warm Spark processes use it, because a worker that imported pyarrow, pandas and the provider itself would spend most of a small
task on that.

Before each task, a worker removes the variables of the previous task and sets those of the JSON object in :data:`FILE`'s file.
One daemon can therefore serve attempts with different faults. Spark itself would need a daemon for each of them.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys

from airflow_kafka_spark.hooks.spark import python_daemon

FILE = "TEST_WORKER_ENVIRONMENT"
"""The environment variable that names the file."""


def set_variables(path: str, variables: dict[str, str]) -> None:
    """Set these environment variables in the next tasks of the Spark whose workers read ``path``. An empty mapping sets none."""
    if not variables:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    written = f"{path}.{os.getpid()}"
    with open(written, "w") as file:
        json.dump(variables, file)
    os.replace(written, path)


def main() -> None:
    # Spark's workers end with each task attempt that dies, and those of the next one would import these again.
    for name in ("adbc_driver_postgresql.dbapi", "psycopg"):
        with contextlib.suppress(ImportError), contextlib.redirect_stdout(sys.stderr):
            importlib.import_module(name)
    python_daemon.run(begin=_apply_variables, end=_save_coverage)


_changed: dict[str, str | None] = {}
"""The variables that the last task had, with what they were before."""


def _apply_variables() -> None:
    for name, before in _changed.items():
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
    _changed.clear()
    try:
        with open(os.environ[FILE]) as file:
            variables = json.load(file)
    except (KeyError, FileNotFoundError):
        return
    _changed.update({name: os.environ.get(name) for name in variables})
    os.environ.update(variables)


def _save_coverage() -> None:
    """Write the coverage measured so far, because a worker is often killed between two tasks."""
    if "coverage" in sys.modules and (current := sys.modules["coverage"].Coverage.current()) is not None:
        current.save()


if __name__ == "__main__":
    main()
