"""A proxy in front of a Kafka broker that knows transactions. At a chosen request, it loses the request or the answer, or first
calls a function of the test.

A broker tells its clients where to connect, so it has to advertise the proxy::

    with KafkaProxy() as proxy, EmbeddedKafka(properties=proxy.properties) as kafka:
        proxy.serve(kafka)
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from airflow_kafka_spark.errors import ServerFailed
from airflow_kafka_spark.testing import EmbeddedKafka
from tests.support.tcp_proxy import CONNECT_SECONDS, Link, Loss, TcpProxy, read_exactly

PRODUCE, END_TXN, TXN_OFFSET_COMMIT = 0, 26, 28
_FLEXIBLE_FROM = {PRODUCE: 9, END_TXN: 3, TXN_OFFSET_COMMIT: 3}
"""The version from which a request is written in the compact way."""


@dataclass(frozen=True)
class Request:
    """The part of a request that the proxy reads.

    :param api: its api key: :data:`PRODUCE`, :data:`END_TXN` or :data:`TXN_OFFSET_COMMIT`.
    :param correlation: by which the client knows the answer.
    :param transactional_id: whose it is.
    :param commit: of an EndTxn: whether it is to commit.
    :param body: all of it.
    """

    api: int
    correlation: int
    transactional_id: str
    commit: bool
    body: bytes

    @classmethod
    def read(cls, frame: bytes) -> Request | None:
        """Return the parts of a request; None if it is another request."""
        api, version, correlation, client = struct.unpack_from(">hhih", frame)
        if api not in _FLEXIBLE_FROM:
            return None
        flexible = version >= _FLEXIBLE_FROM[api]
        # The header ends with the client's name, and with tagged fields, of which there are none.
        body = frame[10 + max(client, 0) + flexible :]
        size, at = (body[0] - 1, 1) if flexible else (struct.unpack_from(">h", body)[0], 2)
        assert size < 127, "a longer name has a longer size in the compact way"
        name, rest = body[at : at + max(size, 0)].decode(), body[at + max(size, 0) :]
        # After an EndTxn's name: the producer's id and its epoch.
        return cls(api, correlation, name, api == END_TXN and bool(rest[10]), body)


@dataclass(frozen=True)
class Trap:
    """The action of the proxy for some requests.

    :param matches: the request.
    :param loss: what is lost; None loses nothing.
    :param silently: True keeps the connection, so that the client waits; False cuts it.
    :param first: called before anything is sent on or lost.
    """

    matches: Callable[[Request], bool]
    loss: Loss | None = None
    silently: bool = False
    first: Callable[[], Any] | None = None


def commit_of(part: str) -> Callable[[Request], bool]:
    """Return a trap for the commit of a transaction whose transactional id contains ``part``."""
    return lambda request: request.api == END_TXN and request.commit and part in request.transactional_id


def records_of(part: str, topic: str) -> Callable[[Request], bool]:
    """Return a trap for the records that such a transaction sends to ``topic``."""
    return lambda request: request.api == PRODUCE and part in request.transactional_id and topic.encode() in request.body


def offsets_of(part: str) -> Callable[[Request], bool]:
    """Return a trap for the offsets that such a transaction commits."""
    return lambda request: request.api == TXN_OFFSET_COMMIT and part in request.transactional_id


class KafkaProxy(TcpProxy):
    """Forwards everything to one broker until a trap is set."""

    def __init__(self) -> None:
        self._upstream: Callable[[], int] | None = None
        self._traps: dict[Trap, int] = {}
        self._lock = threading.Lock()
        self.sprung = 0
        """Return the number of requests that the present traps have caught."""
        self.failed: BaseException | None = None
        """The error that the test's own function has raised."""
        super().__init__()

    @property
    def properties(self) -> dict[str, str]:
        """Return properties of the broker: the addresses to which clients, and the broker's coordinators, are sent."""
        return {"advertised.listeners": f"CLIENT://127.0.0.1:{self.port}"}

    def serve(self, kafka: EmbeddedKafka) -> None:
        """Begin to forward. Called after the broker's start, because its port is known only then."""
        self._upstream = lambda: kafka.broker().port

    def set(self, *traps: Trap, times: int = 1) -> None:
        """Set traps, and the number of requests that each of them catches."""
        with self._lock:
            self._traps, self.sprung, self.failed = dict.fromkeys(traps, times), 0, None

    def clear(self) -> None:
        with self._lock:
            self._traps = {}

    def connect(self) -> socket.socket:
        if self._upstream is None:
            raise ConnectionRefusedError("the broker has not started")
        try:
            port = self._upstream()
        except ServerFailed as error:  # it would end the thread that accepts connections
            raise ConnectionRefusedError("the broker was stopped") from error
        server = socket.create_connection(("127.0.0.1", port), CONNECT_SECONDS)
        server.settimeout(None)
        return server

    def link(self, client: socket.socket, server: socket.socket) -> Link:
        return _Link(self, client, server)

    def take(self, request: Request) -> Trap | None:
        """Return the trap that catches a request; None without one."""
        with self._lock:
            trap = next((trap for trap, left in self._traps.items() if left and trap.matches(request)), None)
            if trap is None:
                return None
            self._traps[trap] -= 1
            self.sprung += 1
        if trap.first is not None:
            try:
                trap.first()
            except BaseException as error:
                self.failed = error
        return trap


class _Link(Link):
    def __init__(self, proxy: KafkaProxy, client: socket.socket, server: socket.socket) -> None:
        super().__init__(client, server)
        self._proxy = proxy
        self._swallow: dict[int, Trap] = {}

    def forward_requests(self) -> None:
        while True:
            frame = _read_frame(self.client)
            request = Request.read(frame)
            trap = self._proxy.take(request) if request else None
            if trap is not None and trap.loss == "the request":
                if not trap.silently:
                    return
                continue
            if request is not None and trap is not None and trap.loss == "the answer":
                self._swallow[request.correlation] = trap
            self.server.sendall(len(frame).to_bytes(4, "big") + frame)

    def forward_answers(self) -> None:
        while True:
            frame = _read_frame(self.server)
            trap = self._swallow.pop(struct.unpack_from(">i", frame)[0], None)
            if trap is None:
                self.client.sendall(len(frame).to_bytes(4, "big") + frame)
            elif not trap.silently:
                return


def _read_frame(source: socket.socket) -> bytes:
    return read_exactly(source, int.from_bytes(read_exactly(source, 4), "big"))
