"""Run Spark's Python daemon for tests: its workers have imported what tasks need, and get their faults from a file.

Spark starts this module instead of ``pyspark.daemon`` (``spark.python.daemon.module``) and forks every Python worker from it.
A worker that had to import pyarrow, pandas and the provider by itself would spend most of a small task on that.

Before each task a worker resets the variables of the task before and sets those of the JSON object in :data:`FILE`'s file. So one
daemon serves attempts with different faults. In Spark's own way each of them would need a daemon of its own.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import zipimport
from io import BufferedReader, BufferedWriter

FILE = "TEST_WORKER_ENVIRONMENT"
"""The environment variable that names the file."""


def set_variables(path: str, variables: dict[str, str]) -> None:
    """Let the next tasks of the Spark whose workers read ``path`` have these environment variables; none where it is empty."""
    if not variables:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        return
    written = f"{path}.{os.getpid()}"
    with open(written, "w") as file:
        json.dump(variables, file)
    os.replace(written, path)


def main() -> None:
    # What an import prints must not reach the JVM, which reads this process's standard output.
    with contextlib.redirect_stdout(sys.stderr):
        _import_what_tasks_need()
    from pyspark import daemon, worker

    _make_tasks_cheap()

    def run_task(infile: BufferedReader, outfile: BufferedWriter) -> None:
        # A worker that is used again comes here as soon as its last task has ended: wait until the next one has begun.
        infile.peek(1)
        _apply_variables()
        try:
            worker.main(infile, outfile)
        finally:
            _save_coverage()

    daemon.worker_main = run_task
    daemon.manager()


def _import_what_tasks_need() -> None:
    import confluent_kafka  # noqa: F401
    import pandas  # noqa: F401
    import pyarrow.compute  # noqa: F401
    import pyspark.sql.pandas.serializers  # noqa: F401

    import airflow_kafka_spark.road.tasks.publish  # noqa: F401
    import airflow_kafka_spark.road.tasks.write  # noqa: F401
    import airflow_kafka_spark.sinks.kafka.tasks.publish  # noqa: F401
    import airflow_kafka_spark.sources.kafka.tasks.read  # noqa: F401


def _make_tasks_cheap() -> None:
    """Spare each task of PySpark two costs that grow with what is imported: 0.5 CPU seconds of a window of three splits."""
    # Before each task PySpark invalidates the caches of imports, which reads the directory of pyspark.zip once per package in it.
    # The archive does not change while tests run.
    zipimport.zipimporter.invalidate_caches = lambda self: None  # type: ignore[method-assign]
    # After each task it collects garbage, which would look at everything that was imported.
    gc.collect()
    gc.freeze()


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
    """Write what was measured so far: a worker may be killed between two tasks, and often is."""
    if "coverage" in sys.modules and (current := sys.modules["coverage"].Coverage.current()) is not None:
        current.save()


if __name__ == "__main__":
    main()
