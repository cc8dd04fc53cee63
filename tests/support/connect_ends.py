"""Run jobs over Spark Connect whose session ends in the middle. A separate program: a process has sessions of one kind only."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from airflow_kafka_spark.errors import SparkUnavailable
from airflow_kafka_spark.hooks.spark import hook
from airflow_kafka_spark.testing._processes import wait_until
from tests.support.tcp_proxy import Link, TcpProxy


class Cable(TcpProxy):
    """A connection to a server that can be cut for good.

    :param port: the server's port.
    """

    def __init__(self, port: int) -> None:
        self._server_port, self._links = port, list[Wire]()
        self.is_silent = threading.Event()
        super().__init__()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._server_port))

    def link(self, client: socket.socket, server: socket.socket) -> Wire:
        self._links.append(Wire(client, server, self.is_silent))
        return self._links[-1]

    def cut(self) -> None:
        """Close all connections and the port: for a client, its server has ended."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in self._links:
            with contextlib.suppress(OSError):  # the connection of a session that has ended
                link.client.shutdown(socket.SHUT_RDWR)


class Wire(Link):
    """Forwards a connection as it is, or takes what is sent and forwards nothing, as a server that was stopped."""

    def __init__(self, client: socket.socket, server: socket.socket, is_silent: threading.Event) -> None:
        super().__init__(client, server)
        self._is_silent = is_silent

    def forward_requests(self) -> None:
        while data := self.client.recv(1 << 16):
            if not self._is_silent.is_set():
                self.server.sendall(data)

    def forward_answers(self) -> None:
        while data := self.server.recv(1 << 16):
            if not self._is_silent.is_set():
                self.client.sendall(data)


def end_in_the_middle(end: Callable[[Any], None]) -> None:
    """Run a job, end its session while a task works, and print the error and the seconds that it took."""
    working, ended = Path(tempfile.mkdtemp()) / "working", threading.Event()
    path = str(working)

    def work(batches: Iterator[Any]) -> Iterator[Any]:
        Path(path).touch()
        # The server does not always end the task, which has one of its two cores.
        while Path(path).exists():
            time.sleep(0.1)
        yield from batches

    def end_when_working(session: Any) -> None:
        assert wait_until(working.exists, 120)
        end(session)
        ended.set()

    begun = 0.0
    try:
        with hook.SparkHook().open_without_sql() as session:
            threading.Thread(target=end_when_working, args=(session,), daemon=True).start()
            begun = time.monotonic()
            session.range(1).mapInArrow(work, "id long").collect()  # type: ignore[union-attr]
    except SparkUnavailable as error:
        print(f"{error} ({'in time' if ended.is_set() and time.monotonic() - begun < 120 else 'late'})", flush=True)
    finally:
        working.unlink(missing_ok=True)


def lay_cable(port: int) -> Cable:
    """Return a new connection to the server, which the sessions use that are made next."""
    cable = Cable(port)
    os.environ["AIRFLOW_CONN_SPARK_DEFAULT"] = json.dumps({"conn_type": "spark_connect", "host": "127.0.0.1", "port": cable.port})
    return cable


def main() -> None:
    port = int(sys.argv[1])
    hook.CONNECT_RETRIES, hook.CONNECT_SILENT_SECONDS, hook.STOP_SECONDS = 3, 6.0, 5.0
    lay_cable(port)
    end_in_the_middle(lambda session: session.client.release_session())
    silent = lay_cable(port)
    end_in_the_middle(lambda _: silent.is_silent.set())
    # The same server, before a session.
    end_in_the_middle(lambda _: None)
    gone = lay_cable(port)
    end_in_the_middle(lambda _: gone.cut())


if __name__ == "__main__":
    main()
