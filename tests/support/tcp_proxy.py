"""A proxy in front of a server of any protocol. Subclasses read what a client and the server send, and may lose a part of it."""

from __future__ import annotations

import contextlib
import socket
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, TypeVar

CONNECT_SECONDS = 10.0
"""Maximum seconds for a connection to the server, because other clients wait meanwhile."""

ProxyT = TypeVar("ProxyT", bound="TcpProxy")
Loss = Literal["the request", "the answer"]


class TcpProxy(ABC):
    """Accepts connections of clients on a free port. A context manager: leaving closes the port."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self: ProxyT) -> ProxyT:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    @abstractmethod
    def connect(self) -> socket.socket:
        """Return a new connection to the server. If that raises OSError, the client's connection is closed."""

    @abstractmethod
    def link(self, client: socket.socket, server: socket.socket) -> Link:
        """Return the forwarding between a client and the server."""

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                continue  # a client that has gone meanwhile; the next ones would never be answered
            try:
                server = self.connect()
            except OSError:
                client.close()
                continue
            self.link(client, server).start()


class Link(ABC):
    """Forwards one connection, with a thread in each direction. When one of them ends, both ends of the connection are closed."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server

    def start(self) -> None:
        for forward in (self.forward_requests, self.forward_answers):
            threading.Thread(target=self._run, args=(forward,), daemon=True).start()

    @abstractmethod
    def forward_requests(self) -> None:
        """Forward what the client sends. Returning, or an OSError or EOFError, cuts the connection."""

    @abstractmethod
    def forward_answers(self) -> None:
        """Forward what the server sends, as :meth:`forward_requests`."""

    def _run(self, forward: Callable[[], None]) -> None:
        try:
            with contextlib.suppress(OSError, EOFError):
                forward()
        finally:
            # Also after something that a subclass cannot read: the client would wait for an answer until it gives up.
            for end in (self.client, self.server):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()


def read_exactly(source: socket.socket, size: int) -> bytes:
    """Return so many bytes.

    :raises EOFError: the connection ends before.
    """
    parts = bytearray()
    while len(parts) < size:
        part = source.recv(size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return bytes(parts)
