"""A proxy in front of PostgreSQL that loses the answer to a COMMIT, or the COMMIT itself."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Literal

Loss = Literal["the answer", "the request"]


class CommitLosingProxy:
    """Forwards everything until it is armed; then the next COMMIT is lost together with its connection.

    :param host: the server's.
    :param port: the server's. Connections have to do without TLS (``sslmode=disable gssencmode=disable``).
    """

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._loss: Loss | None = None
        self.lost = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def arm(self, loss: Loss) -> None:
        self.lost.clear()
        self._loss = loss

    def __enter__(self) -> CommitLosingProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._server)
                _Link(self, client, server)

    def _take(self) -> Loss | None:
        loss, self._loss = self._loss, None
        return loss


class _Link:
    """One connection, with a thread in each direction."""

    def __init__(self, proxy: CommitLosingProxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._upstream = proxy, client, server
        self._swallow = False
        for target in (self._requests, self._answers):
            threading.Thread(target=self._guarded, args=(target,), daemon=True).start()

    def _guarded(self, target: object) -> None:
        with contextlib.suppress(OSError, EOFError):
            target()  # type: ignore[operator]
        self._cut()

    def _cut(self) -> None:
        for end in (self._client, self._upstream):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _requests(self) -> None:
        size = self._read(4)
        self._upstream.sendall(size + self._read(int.from_bytes(size, "big") - 4))
        while True:
            head = self._read(5)
            message = head + self._read(int.from_bytes(head[1:], "big") - 4)
            # A simple query, or the Parse message of the extended protocol.
            if head[:1] in b"QP" and b"COMMIT" in message and (loss := self._proxy._take()):
                if loss == "the request":
                    self._proxy.lost.set()
                    return
                self._swallow = True
            self._upstream.sendall(message)

    def _answers(self) -> None:
        swallowed = b""
        while data := self._upstream.recv(65536):
            if self._swallow:
                swallowed += data
                if b"COMMIT\x00" in swallowed and b"Z\x00\x00\x00\x05" in swallowed:
                    self._proxy.lost.set()
                    return
            else:
                self._client.sendall(data)

    def _read(self, size: int) -> bytes:
        parts = b""
        while len(parts) < size:
            part = self._client.recv(size - len(parts))
            if not part:
                raise EOFError
            parts += part
        return parts
