"""The Python daemon of a local Spark, from which all its Python workers are forked.

Spark starts this module instead of ``pyspark.daemon`` (setting ``spark.python.daemon.module``). It imports the modules that
windows need once, so that forked workers have them. It ends its own workers and no other process: Spark also asks for the end of
a worker that has died long ago, whose process id another process may have by then.

Its workers differ from Spark's in four points:

1. A worker whose task was cancelled ends at once. A worker of Spark detects this only when it next reads or writes.
2. Modules of users (from a DAG folder, for instance) are imported again for each task, so that changes take effect at once, as if
   each task had a Spark of its own.
3. Two steps of PySpark around each task, whose costs grow with the number of imported modules, are left out.
4. Modules are not searched in the jar of Spark's core, which holds none.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import select
import signal
import sys
import sysconfig
import threading
import time
import zipimport
from collections.abc import Callable, Iterable, Iterator
from io import BufferedReader, BufferedWriter

from airflow_kafka_spark.hooks.spark.tasks.worker import keep_freed_memory

_NEEDED = (
    "confluent_kafka",
    "pandas",  # pyarrow imports it for the first array, in each new worker
    "pyarrow.compute",
    "pyspark.sql.pandas.serializers",
    "airflow_kafka_spark.jobs.tasks.publish",
    "airflow_kafka_spark.jobs.tasks.write",
    "airflow_kafka_spark.sinks.kafka.tasks.publish",
    "airflow_kafka_spark.sources.kafka.tasks.read",
)
_GRACE_SECONDS = 0.05
# Not of this module's name, which is "__main__" where Spark starts it.
_OWN = keep_freed_memory.__module__.partition(".")[0]


def _do_nothing() -> None:
    pass


def run(*, begin: Callable[[], None] = _do_nothing, end: Callable[[], None] = _do_nothing) -> None:
    """Fork a worker for each connection of the JVM, until the JVM closes the standard input.

    :param begin: called in a worker when a task begins.
    :param end: called in a worker when a task has ended, also by an error.
    """
    # Before any library starts threads, which then have memory of their own. All workers inherit it.
    keep_freed_memory()
    # The JVM reads this process's standard output, so no output of imports may reach it.
    with contextlib.redirect_stdout(sys.stderr):
        import_what_windows_need()
    from pyspark import daemon, worker

    sys.path[:] = leave_core_jar_out(sys.path)
    _make_tasks_cheap()
    _spare_other_processes()
    known = frozenset(sys.modules)
    watch = _ConnectionWatch()
    main = worker.main

    def run_task(infile: BufferedReader, outfile: BufferedWriter) -> None:
        # A reused worker calls this as soon as its last task has ended: wait until the next one begins.
        infile.peek(1)
        _forget_modules_of_users(known)
        begin()
        try:
            with watch.watch_connection(infile):
                main(infile, outfile)
        finally:
            end()

    # Spark's daemon has the function up to 4.0. Later ones look it up in the worker's module after each fork.
    daemon.worker_main = worker.main = run_task
    daemon.manager()


def import_what_windows_need() -> None:
    """Import the modules that nearly every task of a window needs."""
    for name in _NEEDED:
        importlib.import_module(name)


def leave_core_jar_out(paths: Iterable[str]) -> list[str]:
    """Return a search path of modules without the jar of Spark's core.

    Spark adds this jar to the path of its Python workers. A library that looks its own version up (``importlib.metadata``), as
    psycopg does, would read the names of all its classes in each new worker, which takes longer than the rest of the import.
    """
    return [path for path in paths if not (os.path.basename(path).startswith("spark-core_") and path.endswith(".jar"))]


def _make_tasks_cheap() -> None:
    """Switch off two steps of PySpark around each task: they took 0.5 CPU seconds of a window of three splits."""
    # Before each task PySpark invalidates the import caches, which reads the directory of pyspark.zip once per package in it. The
    # archive does not change while the process lives: a changed one leads to another process.
    zipimport.zipimporter.invalidate_caches = lambda self: None  # type: ignore[method-assign]
    # After each task it collects garbage, which traverses all imported objects unless they are frozen.
    gc.collect()
    gc.freeze()


def _spare_other_processes() -> None:
    """Let this daemon send SIGKILL to its own children only.

    Spark 4 finds out that an idle worker is dead when it wants to use it, perhaps minutes later, and tells the daemon to kill its
    process id. The id of a process or of a thread that has got it since would end the process, for instance a broker or a JVM.
    """
    daemon, kill = os.getpid(), os.kill

    def kill_own(pid: int, number: int) -> None:
        if number == signal.SIGKILL and os.getpid() == daemon:  # not in a worker, which is a fork of this process
            # The daemon ignores SIGCHLD: the kernel removes its dead children at once, and this call fails for their ids.
            os.waitpid(pid, os.WNOHANG)
        kill(pid, number)

    os.kill = kill_own


def _forget_modules_of_users(known: frozenset[str]) -> None:
    """Remove modules that earlier tasks of this worker have imported, except those of Python and of installed packages.

    Packages with compiled modules stay, because many of them cannot be imported twice.
    """
    files = {name: getattr(module, "__file__", None) or "" for name, module in sys.modules.items() if name not in known}
    compiled = {name.partition(".")[0] for name, file in files.items() if file and not file.endswith((".py", ".pyc"))}
    kept = compiled | {_OWN}
    installed = _list_installed_directories()
    for name, file in files.items():
        if file and name.partition(".")[0] not in kept and not file.startswith(installed):
            del sys.modules[name]


@functools.cache
def _list_installed_directories() -> tuple[str, ...]:
    """Return the directories of installed modules, and of Spark's own."""
    paths = sysconfig.get_paths()
    names = {paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"], sys.prefix, sys.base_prefix}
    return tuple(f"{name}{os.sep}" for name in (*names, os.environ.get("SPARK_HOME", "")) if name)


class _ConnectionWatch:
    """Ends this worker when the JVM closes the connection while a task runs: the task was cancelled, or the JVM is dead."""

    def __init__(self) -> None:
        self._is_busy = False
        self._pid = 0

    @contextlib.contextmanager
    def watch_connection(self, infile: BufferedReader) -> Iterator[None]:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            # The thread needs a descriptor of its own, because pyspark reopens the connection for each task.
            connection = os.dup(infile.fileno())
            threading.Thread(target=self._wait, args=(connection,), name="cancelled", daemon=True).start()
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def _wait(self, connection: int) -> None:
        poll = select.poll()
        poll.register(connection, getattr(select, "POLLRDHUP", 0) | select.POLLHUP)
        poll.poll()
        # The JVM may also close the connection because the task has just ended.
        time.sleep(_GRACE_SECONDS)
        if self._is_busy:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    run()
