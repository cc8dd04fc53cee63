"""Start servers that end with the process that started them."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_kafka_spark.errors import ServerFailed

if TYPE_CHECKING:
    from typing_extensions import Self

LOOPBACK = "127.0.0.1"
_SHARES = 61
"""Number of shares of the ports. Each process begins with the ports of one of them."""
_ATTEMPTS = 5
"""Maximum number of times that a server is started, if another process takes its ports first."""
_given: deque[int] = deque(maxlen=100)
"""The last ports that this process has chosen."""


class SupervisorClient:
    """Client of ``_supervisor.py``, a helper process that owns the servers of one embedded cluster.

    :param server: name of the server, for messages.
    """

    def __init__(self, server: str) -> None:
        self.server = server
        self.owner = os.getpid()
        self._lock = threading.Lock()
        self._directories: list[Path] = []
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(__file__).with_name("_supervisor.py")), str(self.owner)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd="/",
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process id of the supervisor."""
        return self._process.pid

    def own(self, directory: Path) -> None:
        """Let the supervisor remove this directory when it ends."""
        self._directories.append(directory)
        self._ask("own", directory=str(directory))

    def spawn(
        self,
        argv: Sequence[str | Path],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        exit_signal: int = signal.SIGKILL,
        user: tuple[int, int] | None = None,
    ) -> ServerProcess:
        """Start a server.

        :param log: file to which its output is appended.
        :param env: its whole environment; default: this process's.
        :param exit_signal: signal that ends it when this process has ended; SIGKILL follows after 5 s.
        :param user: uid and gid of the server's process; default: this process's.
        """
        command = [str(arg) for arg in argv]
        environment = dict(os.environ if env is None else env)
        pid = self._ask("spawn", argv=command, env=environment, log=str(log), exit_signal=int(exit_signal), user=user)
        return ServerProcess(self, pid)

    def close(self) -> None:
        """End all servers, remove the directories, and wait until both is done."""
        with self._lock:
            if self._process.stdin:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._process.stdout:
                self._process.stdout.close()
        # The directories exist only if the supervisor was killed.
        for directory in self._directories:
            shutil.rmtree(directory, ignore_errors=True)

    def _ask(self, do: str, **arguments: object) -> Any:
        with self._lock:
            stdin, stdout = self._process.stdin, self._process.stdout
            assert stdin is not None and stdout is not None
            try:
                stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
                stdin.flush()
                answer = stdout.readline()
            except (OSError, ValueError):
                answer = b""
        if not answer:
            raise ServerFailed(self.server, "it was stopped, or the process that keeps it was killed")
        reply = json.loads(answer)
        if "error" in reply:
            raise ServerFailed(self.server, reply["error"])
        return reply["result"]


class ServerProcess:
    """One process of a `SupervisorClient`."""

    def __init__(self, supervisor: SupervisorClient, pid: int) -> None:
        self._supervisor = supervisor
        self.pid = pid

    @property
    def exit_code(self) -> int | None:
        """The exit code; None while it runs, a negative number for the signal that ended it."""
        return self._supervisor._ask("poll", pid=self.pid)

    @property
    def running(self) -> bool:
        return self.exit_code is None

    def signal(self, number: int) -> bool:
        """Send a signal to this process, and never to a later one with its id. Return False if the process has ended."""
        return self._supervisor._ask("signal", pid=self.pid, number=int(number))

    def pause(self, seconds: float = 30.0) -> bool:
        """Send SIGSTOP, and wait until every thread has stopped. Return False if the process had ended before."""
        return self.signal(signal.SIGSTOP) and wait_until(lambda: _is_all_stopped(self.pid), seconds)

    def wait(self, seconds: float) -> int | None:
        """Wait for the process to end. Return its exit code, or None if it still runs after so many seconds."""
        wait_until(lambda: not self.running, seconds)
        return self.exit_code

    def end(self, *, stop_signal: int, seconds: float) -> None:
        """End the process by a signal, and by SIGKILL if it still runs after so many seconds."""
        if not self.running:
            return
        self.signal(stop_signal)
        self.signal(signal.SIGCONT)
        if self.wait(seconds) is None:
            self.signal(signal.SIGKILL)
            self.wait(30)


class Embedded(ABC):
    """A server that is used as a context manager, or by `start` and `stop`. Its processes end with this one, however that ends.

    :cvar software: name of the software, for messages.
    :param directory: directory of its files, which is kept. Default: a temporary directory, removed by `stop`.
    """

    software: ClassVar[str]

    def __init__(self, directory: Path | str | None) -> None:
        self._given_directory = Path(directory).absolute() if directory else None
        self._directory: Path | None = None
        self._supervisor: SupervisorClient | None = None
        self._starting = False

    def start(self) -> Self:
        """Start the server, and return when it answers. Do nothing if it was started before."""
        if self._supervisor is not None:
            return self
        own = self._given_directory is None
        self._directory = make_own_directory(self.software.lower()) if own else self._given_directory
        assert self._directory is not None
        self._directory.mkdir(parents=True, exist_ok=True)
        self._supervisor = SupervisorClient(self.software)
        atexit.register(self.stop)
        if own:
            self._supervisor.own(self._directory)
        self._starting = True
        try:
            self._prepare()
            for attempt in range(1, _ATTEMPTS + 1):
                if self._begin(last_attempt=attempt == _ATTEMPTS):
                    return self
            raise AssertionError("unreachable")
        except BaseException:
            self.stop()
            raise
        finally:
            self._starting = False

    def stop(self) -> None:
        """End the server. A temporary directory is removed, a given one is kept. It may be called again."""
        supervisor, self._supervisor = self._supervisor, None
        # A fork of the process that started the server has a copy of this object and of its exit handler.
        if supervisor is None or supervisor.owner != os.getpid():
            return
        atexit.unregister(self.stop)
        self._shut_down()
        supervisor.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    @property
    def _files(self) -> Path:
        assert self._directory is not None, "it was not started"
        return self._directory

    @abstractmethod
    def _prepare(self) -> None:
        """Check the installed software, and make the files that every attempt at starting needs."""

    @abstractmethod
    def _begin(self, *, last_attempt: bool) -> bool:
        """Start the processes on ports that are free now. Return False if another process took a port first; never at the last
        attempt.
        """

    @abstractmethod
    def _shut_down(self) -> None:
        """End the processes that should not be killed. All others get SIGKILL afterwards."""


def wait_until(condition: Callable[[], bool], seconds: float, *, every: float = 0.02) -> bool:
    """Poll a condition until it holds (True) or the time is over (False)."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(every)
    return True


def _is_all_stopped(pid: int) -> bool:
    tasks = Path(f"/proc/{pid}/task")
    if not tasks.exists():
        return True  # not Linux, so the state is unknown; or the process has ended
    try:
        return all((task / "stat").read_text().rpartition(")")[2].split()[0] in "TtZX" for task in tasks.iterdir())
    except OSError:
        return False


def find_free_ports(count: int) -> list[int]:
    """Return ports on the loopback interface that no process uses.

    If possible, they are below the range of the system's outgoing connections, so that a server that is down for a while finds
    its port free again. Another process may take a port before the server listens. So concurrent processes begin with different
    ports and do not reuse one soon, and callers retry.
    """
    lowest = 32768
    with contextlib.suppress(OSError, ValueError):
        lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    # Not the global `random`, which a test may have seeded: two test processes would choose equal ports.
    chance, room = random.SystemRandom(), list({*range(15000, lowest)} - {*_given})
    own = [port for port in room if port % _SHARES == os.getpid() % _SHARES]
    candidates = [*chance.sample(own, len(own)), *chance.sample(room, 500)] if lowest > 16000 else [0] * 500
    held: list[socket.socket] = []
    try:
        for port in candidates:
            if len(held) == count:
                break
            bound = socket.socket()
            try:
                bound.bind((LOOPBACK, port))
            except OSError:
                bound.close()
                continue
            held.append(bound)
        ports = [bound.getsockname()[1] for bound in held]
        _given.extend(ports)
        return ports
    finally:
        for bound in held:
            bound.close()


def make_own_directory(prefix: str) -> Path:
    """Create a temporary directory for this user only, and return it."""
    return Path(tempfile.mkdtemp(prefix=f"airflow-kafka-spark-{prefix}-"))


def keep_log(log: Path, server: str) -> Path:
    """Copy the log of a server that did not start out of a directory that is about to be removed."""
    handle, name = tempfile.mkstemp(prefix=f"airflow-kafka-spark-{server}-", suffix=".log")
    os.close(handle)
    shutil.copyfile(log, name)
    return Path(name)


def read_tail(log: Path, lines: int = 8) -> str:
    """Return the last lines of a log, for an error message."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, log.stat().st_size - 16384))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return "(no log)"
    return "\n".join(text.splitlines()[-lines:])
