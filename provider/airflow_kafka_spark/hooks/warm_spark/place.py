"""Where warm Spark processes are found: a private directory of each user with a socket, a lock and a log for each process."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import socket
import stat
import struct
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO


class WarmUnavailable(Exception):
    """Raised when the warm process cannot be used; the message says why. The task starts a Spark of its own instead."""


@dataclass(frozen=True)
class Place:
    """The files of one warm process.

    :param directory: the user's private directory.
    :param key: of :class:`~airflow_kafka_spark.hooks.warm_spark.settings.WarmSettings`.
    """

    directory: Path
    key: str

    @property
    def socket(self) -> Path:
        """The Unix socket on which the process listens. It holds no secret: only the user's own processes are let in."""
        return self.directory / f"{self.key}.socket"

    @property
    def log(self) -> Path:
        """The output of the process, its JVM and its Python workers."""
        return self.directory / f"{self.key}.log"

    @contextlib.contextmanager
    def locked(self, *, wait: bool = True) -> Iterator[bool]:
        """Let one process at a time start or end the warm process.

        :param wait: wait while another process holds the lock.
        :return: False if another process holds the lock.
        """
        with open(self.directory / f"{self.key}.lock", "a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True


def private_directory() -> Path:
    """Return the user's directory, which no other user can enter; it is created where it does not exist.

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


def open_sockets(directory: Path, but: Path) -> int:
    """Return how many other processes listen in a directory, and remove what processes that died have left."""
    listening = 0
    for path in directory.glob("*.socket"):
        place = Place(directory, path.stem)
        if path == but:
            continue
        with contextlib.suppress(FileNotFoundError), place.locked(wait=False) as locked:
            if not locked:
                listening += 1  # it is just starting or ending
            elif (connection := connect(path)) is not None:
                connection.close()
                listening += 1
            else:
                path.unlink(missing_ok=True)
                place.log.unlink(missing_ok=True)
    return listening


def connect(path: Path) -> socket.socket | None:
    """Return a connection to the process that listens at a socket; None where none does.

    :raises WarmUnavailable: it is another user's.
    """
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        return None
    if peer(connection)[1] != os.getuid():
        connection.close()
        raise WarmUnavailable(f"{path} is another user's")
    return connection


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the ids of the process and of the user at the other end."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return pid, uid


def is_readable(file: socket.socket | BinaryIO, seconds: float = 0.0) -> bool:
    """Return True once something can be read, the end included; False after so many seconds."""
    poll = select.poll()
    poll.register(file, select.POLLIN)
    return bool(poll.poll(int(seconds * 1000)))


def send(connection: socket.socket, message: dict[str, Any]) -> None:
    """Send one message, a JSON object in a line."""
    connection.sendall(json.dumps(message).encode() + b"\n")


def receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next message; None where the other end is gone."""
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
