"""The identity of a warm Spark process, its files, and the messages that tasks exchange with it.

Tasks share a process if all settings that affect Spark or its Python workers are equal (:class:`WarmSettings`). The files are in
a private directory of the user: a socket, a lock and a log for each process (:class:`ProcessFiles`).
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import select
import socket
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import airflow_kafka_spark
from airflow_kafka_spark import __version__
from airflow_kafka_spark.hooks.spark.class_archive import SparkClassArchive
from airflow_kafka_spark.hooks.spark.jars import find_java, find_pyspark_jars, lock_file

_JAVA = "spark.driver.extraJavaOptions"

_LOG_SECONDS = 7 * 24 * 3600.0
"""Seconds for which the log of a process is kept."""

LONGEST_SECONDS = 24 * 3600.0
"""Largest value of ``keep_alive``."""

STOPPED_SECONDS = 15.0
"""A warm process or JVM that does not answer is killed after this time if it was stopped (SIGSTOP)."""

# Environment variables that are not part of the settings: connections and the context of a task; variables that libraries set
# when they are imported (`_RJEM_MALLOC_CONF`); variables that connect pyspark to a running session, or that it has set for one;
# faults for tests; and variables that differ between processes without an effect on them.
_LEFT_OUT = re.compile(
    "AIRFLOW_CONN_|AIRFLOW_CTX_|AIRFLOW_VAR_|AIRFLOW_KAFKA_SPARK_FAULT|_"
    "|PYSPARK_GATEWAY_|SPARK_CONNECT_|SPARK_LOCAL_REMOTE|SPARK_REMOTE|SPARK_AUTH_SOCKET_TIMEOUT$|SPARK_BUFFER_SIZE$"
    "|PYTEST_|OLDPWD$|PWD$|SHLVL$|TERM$|COLUMNS$|LINES$|INVOCATION_ID$|JOURNAL_STREAM$|TRACEPARENT$|TRACESTATE$"
)
# Settings that name files, which may be replaced by others of the same name.
_FILES = ("spark.jars", "spark.files", "spark.archives", "spark.submit.pyFiles", "spark.driver.extraClassPath")
_UNITS = {"s": 1, "m": 60, "h": 3600}


class WarmUnavailable(Exception):
    """Raised when the warm process cannot be used; the message says why. The task starts a Spark of its own instead."""


@dataclass(frozen=True)
class ProcessFiles:
    """The files of one warm process.

    :param directory: the user's private directory.
    :param key: key of the :class:`WarmSettings`.
    """

    directory: Path
    key: str

    @property
    def socket(self) -> Path:
        """The Unix socket on which the process listens. It accepts only processes of its user."""
        return self.directory / f"{self.key}.socket"

    @property
    def log(self) -> Path:
        """The output of the process, its JVM and its Python workers."""
        return self.directory / f"{self.key}.log"

    @contextlib.contextmanager
    def hold_lock(self, *, wait: bool = True) -> Iterator[bool]:
        """Hold the lock under which the warm process is started and ended.

        :param wait: True (default) to wait while another process holds the lock.
        :return: False if another process holds the lock.
        """
        with lock_file(self.directory / f"{self.key}.lock", wait=wait) as lock:
            yield lock is not None


def make_private_directory() -> Path:
    """Return the user's directory, which no other user can enter. It is created if it does not exist.

    :raises WarmUnavailable: it belongs to another user, or others can enter it.
    """
    directory = Path(tempfile.gettempdir()) / f"airflow-kafka-spark-{os.getuid()}"
    try:
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        found = directory.lstat()
    except OSError as error:
        raise WarmUnavailable(f"{directory} cannot be created: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise WarmUnavailable(f"{directory} is not a directory that only this user can enter (mode 0700)")
    return directory


def count_open_sockets(directory: Path, but: Path) -> int:
    """Return the number of other processes that listen in a directory, and remove the sockets of dead ones."""
    listening = 0
    for path in directory.glob("*.socket"):
        files = ProcessFiles(directory, path.stem)
        if path == but:
            continue
        with contextlib.suppress(FileNotFoundError), files.hold_lock(wait=False) as locked:
            if not locked:
                listening += 1  # the process is starting or ending
            elif (connection := connect(path)) is not None:
                connection.close()
                listening += 1
            else:
                path.unlink(missing_ok=True)
                files.log.unlink(missing_ok=True)
    return listening


def remove_old_logs(directory: Path) -> None:
    """Remove the logs of processes that ended a week ago, and their locks: other settings have other files."""
    for log in directory.glob("*.log"):
        files = ProcessFiles(directory, log.stem)
        with contextlib.suppress(FileNotFoundError):
            if files.socket.exists() or time.time() - log.stat().st_mtime < _LOG_SECONDS:
                continue
            with files.hold_lock(wait=False) as locked:
                if locked:
                    log.unlink()
                    log.with_suffix(".lock").unlink()


def connect(path: Path) -> socket.socket | None:
    """Return a connection to the process that listens at a socket; None if no process listens.

    :raises WarmUnavailable: the process belongs to another user.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        return None
    if read_peer_credentials(connection)[1] != os.getuid():
        connection.close()
        raise WarmUnavailable(f"{path} is another user's")
    return connection


def read_peer_credentials(connection: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the other end of a connection."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid


def is_stopped(pid: int) -> bool:
    """Return True if a process is stopped by a signal."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def is_readable(file: socket.socket | BinaryIO, seconds: float = 0.0) -> bool:
    """Return True once data or the end of the file can be read; False after so many seconds."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(int(seconds * 1000)))


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send a message, as a line of JSON."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive_message(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next message; None if the other end has closed the connection."""
    received = b""
    try:
        while not received.endswith(b"\n"):
            if not (part := connection.recv(65536)):
                return None
            received += part
    except ConnectionError:
        return None
    found: dict[str, Any] = json.loads(received)
    return found


def parse_duration(value: object) -> float | None:
    """Return the seconds of a duration such as ``90s``, ``10m`` or ``2h``; None for other texts, and outside of 1 s to 24 h."""
    match = re.fullmatch(r"(\d{1,6})([smh])", value.strip()) if isinstance(value, str) else None
    seconds = float(int(match[1]) * _UNITS[match[2]]) if match else 0.0
    return seconds if 1 <= seconds <= LONGEST_SECONDS else None


def list_process_environment() -> dict[str, str]:
    """Return the environment variables of a warm process: this process's, without those that concern one task only."""
    kept = {name: value for name, value in os.environ.items() if not _LEFT_OUT.match(name)}
    return kept | {"PYTHONPATH": os.pathsep.join(_list_search_path())}


def _list_search_path() -> list[str]:
    # Without the directory that pyspark adds for each session.
    return [path for path in sys.path if path and "/userFiles-" not in path]


@dataclass(frozen=True)
class WarmSettings:
    """The settings of a warm Spark process.

    :param master: a local master.
    :param spark: Spark's settings, including jars. They may contain secrets.
    :param keep_alive: seconds without a task after which the process ends.
    :param java_options: further options of the JVM that do not affect results, so that tasks with different ones share a process.
    """

    master: str
    spark: Mapping[str, str]
    keep_alive: float
    java_options: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"WarmSettings({self.master!r}, keep_alive={self.keep_alive:g})"

    @property
    def started(self) -> dict[str, str]:
        """The settings that the process is started with."""
        # Before the other options, because the last one of equal names takes effect. The JVM exits when its memory is exhausted;
        # otherwise it would fail every later task.
        options = [*self.java_options, "-XX:+ExitOnOutOfMemoryError", self.spark.get(_JAVA, "")]
        return {**self.spark, _JAVA: " ".join(options).strip()}

    @functools.cached_property
    def key(self) -> str:
        """A digest of everything that has to be equal for tasks that share a process; ``keep_alive`` is not part of it.

        :raises JavaMissing: there is no Java.
        """
        archive = SparkClassArchive.find(self.spark.get("spark.driver.extraClassPath", ""))
        facts = {
            "master": self.master,
            "spark": dict(self.spark),
            "files": list_file_changes(self.spark.get(name, "") for name in _FILES),
            "java": str(find_java().resolve()),
            "jvm": archive.file.name if archive else list_changes(find_pyspark_jars()),
            "python": [sys.executable, sys.version],
            "provider": [__version__, *list_changes(Path(airflow_kafka_spark.__file__).parent, "**/*.py")],
            "installed": [
                _describe_change(Path(path)) for path in _list_search_path() if "site-packages" in path or "dist-packages" in path
            ],
            "environment": list_process_environment(),
            "user": [os.getuid(), os.getgid(), sorted(os.getgroups())],
            "directory": os.getcwd(),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def list_file_changes(values: Iterable[str]) -> list[str]:
    """Return a text for each local file or directory that settings name.

    :param values: the values of the settings: paths and addresses, separated by commas or colons.
    """
    named = re.split("[,:]", ",".join(values))
    return [_describe_change(Path(name.partition("#")[0].rstrip("*"))) for name in named if name.startswith("/")]


def list_changes(directory: Path, pattern: str = "*") -> list[str]:
    """Return a text for each file of a directory; an empty list if it does not exist."""
    return sorted(map(_describe_change, directory.glob(pattern)))


def _describe_change(path: Path) -> str:
    """Return a text that changes when a file is modified, or when something is installed into a directory."""
    try:
        found = path.stat()
    except OSError:
        return str(path)
    return f"{path} {found.st_mtime_ns} {0 if path.is_dir() else found.st_size}"
