"""The process that owns the embedded servers. It is run as a script, with the standard library only.

The supervisor starts the servers as its own children, forwards signals, and ends them when its parent ends for any reason,
SIGKILL included, and even if forks of the parent live on and hold the other end of the pipe. On Linux the servers also end when
the supervisor itself is killed, and processes that a killed server has left behind end with the supervisor. Only it reaps
its children, so a process id in a request cannot belong to another process.

Requests and answers are JSON lines on standard input and output.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

POLL_PARENT = 0.5
FAREWELL = 5.0

_PR_SET_PDEATHSIG, _PR_SET_SECUREBITS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 1, 28, 47, 2
_PR_SET_CHILD_SUBREAPER = 36
_SECBIT_NO_SETUID_FIXUP = 4
_CAP_DAC_OVERRIDE = 1
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}


class Supervisor:
    def __init__(self) -> None:
        self.children: dict[int, subprocess.Popen[bytes]] = {}
        self.exit_signals: dict[int, int] = {}
        self.directories: list[str] = []

    def spawn(self, argv: list[str], env: dict[str, str], log: str, exit_signal: int, user: list[int] | None) -> int:
        with open(log, "ab") as output:
            child = subprocess.Popen(
                argv,
                env=env,
                cwd=os.path.dirname(log),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_make_preexec(user),
            )
        self.children[child.pid] = child
        self.exit_signals[child.pid] = exit_signal
        return child.pid

    def poll(self, pid: int) -> int | None:
        return self.children[pid].poll()

    def signal(self, pid: int, number: int) -> bool:
        child = self.children[pid]
        if child.poll() is not None:
            return False
        os.kill(pid, number)
        return True

    def own(self, directory: str) -> None:
        self.directories.append(directory)

    def reap(self) -> None:
        """Reap adopted processes that have ended, so that their process ids disappear."""
        for pid in _list_own_children():
            if pid not in self.children:
                os.waitpid(pid, os.WNOHANG)

    def end(self) -> None:
        """End every child with its exit signal, and remove the directories."""
        alive = [child for child in self.children.values() if child.poll() is None]
        for child in alive:
            child.send_signal(self.exit_signals[child.pid])
            child.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + FAREWELL
        for child in alive:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
            if child.poll() is None:
                child.kill()
                child.wait()
        _end_orphans()
        for directory in self.directories:
            shutil.rmtree(directory, ignore_errors=True)

    def answer(self, request: dict) -> dict:
        try:
            return {"result": getattr(self, request.pop("do"))(**request)}
        except (OSError, KeyError, subprocess.SubprocessError) as error:
            return {"error": f"{type(error).__name__}: {error}"}


def _adopt_orphans() -> None:
    """Let processes that a server has started become children of this one when the server dies. This works on Linux only."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _list_own_children() -> list[int]:
    """Return the ids of this process's children, which have ended or not; empty where the system does not tell."""
    with contextlib.suppress(OSError):
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def _end_orphans() -> None:
    """Kill the processes that killed servers have left behind, and the children of these."""
    while orphans := _list_own_children():
        for pid in orphans:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _make_preexec(user: list[int] | None) -> Callable[[], None] | None:
    """Return the function that a child runs between fork and exec. All imports and lookups are done before the fork."""
    if not sys.platform.startswith("linux"):
        return (lambda: _become(user)) if user else None
    libc = ctypes.CDLL(None)
    capset = _SYS_CAPSET.get(os.uname().machine)
    header = struct.pack("Ii", 0x20080522, 0)
    mask = 1 << _CAP_DAC_OVERRIDE
    enter_all, nothing = struct.pack("6I", mask, mask, mask, 0, 0, 0), bytes(24)

    def prepare() -> None:
        if user:
            # An ordinary user that may read root's directories, because the server's binaries or its data may be there. If the
            # system does not allow that, an ordinary user.
            kept = capset and libc.prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP, 0, 0, 0) == 0
            _become(user)
            if kept and libc.syscall(capset, header, enter_all) == 0:
                libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_OVERRIDE, 0, 0)
            elif kept and libc.syscall(capset, header, nothing) != 0:
                os._exit(126)
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    return prepare


def _become(user: list[int] | None) -> None:
    if user:
        uid, gid = user
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)


def main(parent: int) -> None:
    supervisor = Supervisor()
    pending = b""
    # The parent decides when to stop. Ctrl-C in its terminal does not reach this process session, but other signals may.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    _adopt_orphans()
    try:
        # Forks of the parent may hold the pipe open, so its end is not a sufficient sign.
        while os.getppid() == parent:
            supervisor.reap()
            if not select.select([0], [], [], POLL_PARENT)[0]:
                continue
            chunk = os.read(0, 65536)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                os.write(1, json.dumps(supervisor.answer(json.loads(line))).encode() + b"\n")
    except BrokenPipeError:
        return
    finally:
        supervisor.end()


if __name__ == "__main__":
    main(int(sys.argv[1]))
