"""Spark's Python daemon for a Spark Connect server, forked from one process that has imported the modules that tasks need.

Spark Connect starts a daemon for each session, ``python -m tests.support.connect_daemon``. If the daemon imported pyarrow, pandas
and the provider itself, this would take more CPU time than a small task. Instead, it connects to the process of ``python -m
tests.support.connect_daemon --serve`` and passes its standard input and output to it. That process forks the daemon.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys

SOCKET = "TEST_CONNECT_DAEMON"
"""The environment variable that names the server's socket."""


def serve() -> None:
    """Fork a daemon for each process that connects."""
    import gc

    from airflow_kafka_spark.hooks.spark import python_daemon

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(f"{os.environ[SOCKET]}.new")
        listening.listen(100)
        os.rename(f"{os.environ[SOCKET]}.new", os.environ[SOCKET])
        # Who connects before the imports are done waits.
        python_daemon.import_what_windows_need()
        gc.freeze()
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        while True:
            client, _ = listening.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listening.close()
                _become_daemon(client)
            client.close()


def _become_daemon(client: socket.socket) -> None:
    _, files, _, _ = socket.recv_fds(client, 1, 3)
    environment = json.loads(client.makefile().readline())
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    client.sendall(b"%d\n" % os.getpid())
    from tests.support import spark_daemon

    code = 1
    try:
        spark_daemon.main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    finally:
        os._exit(code)


def main() -> None:
    """Ask the server to fork a daemon, and exit when the daemon ends."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(os.environ[SOCKET])
        socket.send_fds(server, [b" "], [0, 1, 2])
        server.sendall(json.dumps(dict(os.environ)).encode() + b"\n")
        pid = int(server.makefile().readline())
        # Spark ends a daemon by closing its standard input, or by a signal.
        for file in (0, 1):
            os.close(file)

        def pass_on(number: int, frame: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

        signal.signal(signal.SIGTERM, pass_on)
        while server.recv(1):  # until the daemon and its workers have ended
            pass


if __name__ == "__main__":
    serve() if sys.argv[1:] == ["--serve"] else main()
