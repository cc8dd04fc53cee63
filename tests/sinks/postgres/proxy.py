"""A proxy in front of PostgreSQL that loses the answer to a COMMIT, or the COMMIT itself."""

from __future__ import annotations

import socket
import threading

from tests.support.tcp_proxy import Link, Loss, TcpProxy, read_exactly


class CommitLosingProxy(TcpProxy):
    """Forwards everything until it is armed; then the next COMMIT is lost together with its connection.

    :param host: the server's.
    :param port: the server's. Connections have to do without TLS (``sslmode=disable gssencmode=disable``).
    """

    def __init__(self, host: str, port: int) -> None:
        self._server = (host, port)
        self._loss: Loss | None = None
        self.lost = threading.Event()
        super().__init__()

    def arm(self, loss: Loss) -> None:
        self.lost.clear()
        self._loss = loss

    def connect(self) -> socket.socket:
        return socket.create_connection(self._server)

    def link(self, client: socket.socket, server: socket.socket) -> Link:
        return _Link(self, client, server)

    def take(self) -> Loss | None:
        """Return the loss that was asked for, once."""
        loss, self._loss = self._loss, None
        return loss


class _Link(Link):
    def __init__(self, proxy: CommitLosingProxy, client: socket.socket, server: socket.socket) -> None:
        super().__init__(client, server)
        self._proxy = proxy
        self._swallow = False

    def forward_requests(self) -> None:
        size = read_exactly(self.client, 4)
        self.server.sendall(size + read_exactly(self.client, int.from_bytes(size, "big") - 4))
        while True:
            head = read_exactly(self.client, 5)
            message = head + read_exactly(self.client, int.from_bytes(head[1:], "big") - 4)
            # A simple query, or the Parse message of the extended protocol.
            if head[:1] in b"QP" and b"COMMIT" in message and (loss := self._proxy.take()):
                if loss == "the request":
                    self._proxy.lost.set()
                    return
                self._swallow = True
            self.server.sendall(message)

    def forward_answers(self) -> None:
        swallowed = b""
        while data := self.server.recv(65536):
            if self._swallow:
                swallowed += data
                if b"COMMIT\x00" in swallowed and b"Z\x00\x00\x00\x05" in swallowed:
                    self._proxy.lost.set()
                    return
            else:
                self.client.sendall(data)
