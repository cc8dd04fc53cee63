"""Spark's Python workers as processes: stop or kill one at a named point, and find it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from airflow_kafka_spark import faults
from airflow_kafka_spark.testing._processes import wait_until
from tests.support import spark_daemon, warm


@contextmanager
def fault_in_tasks(point: str, once: Path) -> Iterator[None]:
    """Jobs that this process starts in the block reach a fault in the first task that comes to ``point``; the driver does not.

    :param point: as in :data:`airflow_kafka_spark.faults.FAULT`.
    :param once: the file that notes that the fault has fired.
    """
    path = os.environ[spark_daemon.FILE]
    spark_daemon.set_variables(path, {faults.FAULT: point, faults.ONCE: str(once)})
    try:
        yield
    finally:
        spark_daemon.set_variables(path, {})


def wait_stopped(once: Path, above: int | None = None, seconds: float = 120) -> int:
    """Wait until a worker has stopped itself at its fault, and return its process id.

    :param above: an ancestor of the worker; default: this process, or the warm Spark process that this process uses.
    """
    found: list[int] = []
    root = above or warm.used_here() or os.getpid()

    def there() -> bool:
        if once.exists():
            found[:] = [pid for pid in _all() if state(pid) in "Tt" and root in ancestors(pid)]
        return bool(found)

    assert wait_until(there, seconds), f"no worker stopped; its fault fired: {once.exists()}"
    return found[0]


def wake(pid: int) -> None:
    """Continue the process, if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def executor_of(worker: int) -> int:
    """Return the executor of a Python worker."""
    above = [pid for pid in ancestors(worker) if b"CoarseGrainedExecutorBackend" in _command(pid)]
    assert above, f"{worker} is no worker of an executor"
    return above[0]


def executors(leader: int) -> set[int]:
    """Return all executors in the session that a driver leads."""
    return {pid for pid in session(leader) if b"CoarseGrainedExecutorBackend" in _command(pid)}


def listening(pid: int) -> set[int]:
    """Return the TCP ports on which a process listens; none for one that has just ended."""
    sockets, lines = set(), list[list[str]]()
    with suppress(FileNotFoundError, ProcessLookupError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(entry))
        for name in ("tcp", "tcp6"):
            lines += map(str.split, Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:])
    return {int(line[1].rpartition(":")[2], 16) for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


def daemons(jvm: int) -> set[int]:
    """Return Spark's Python daemons below a JVM. They fork the workers, and run no tasks themselves."""
    return {pid for pid in _all() if _parent(pid) == jvm and b"spark_daemon" in _command(pid)}


def ancestors(pid: int) -> list[int]:
    """Return the parent of a process, and all further ancestors."""
    found = []
    while (pid := _parent(pid)) > 1:
        found.append(pid)
    return found


def session(leader: int) -> set[int]:
    """Return all processes of the session that this process leads, itself included."""
    return {pid for pid in _all() if _session(pid) == leader}


def _all() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def state(pid: int) -> str:
    """Return the state of a process, as ``ps`` shows it: ``T`` is stopped."""
    return (_stat(pid) or ["?"])[0]


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return -1


def _parent(pid: int) -> int:
    return int((_stat(pid) or ["?", "0"])[1])


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
