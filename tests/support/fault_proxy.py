"""A proxy in front of a store that counts requests and lets some of them fail."""

from __future__ import annotations

import http.client
import itertools
import re
import socket
import threading
import urllib.parse
from collections.abc import Callable, Collection
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Literal

Fault = Literal["unavailable", "slow down", "too many", "lost", "expired", "skewed", "conflict"]

_REFUSALS = {
    "unavailable": (503, "ServiceUnavailable"),
    "slow down": (503, "SlowDown"),
    "too many": (429, "TooManyRequests"),
    "expired": (400, "ExpiredToken"),
    "skewed": (403, "RequestTimeTooSkewed"),
    "conflict": (409, "ConditionalRequestConflict"),
}
"""The answers of stores to requests that they have not carried out: those of S3, and ``too many`` of others. ``lost``: it has
been carried out, and its answer does not arrive. ``conflict``: another conditional write of the object is under way."""


class FaultProxy:
    """Forwards requests unchanged, so that their signatures stay valid. A context manager.

    :param url: the store.
    """

    def __init__(self, url: str) -> None:
        self.upstream = urllib.parse.urlsplit(url).netloc
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._hits: Callable[[int, str], bool] = lambda number, request: False
        self.requests: list[str] = []
        self.failed: list[str] = []

    def __enter__(self) -> FaultProxy:
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    def arm(self, fault: Fault | None, first: int = 1, last: int | None = None, every: int = 1) -> None:
        """Count from 1 again, and let requests fail from now on.

        :param fault: how they fail; None: none of them fails.
        :param first: the number of the first one that fails.
        :param last: the number of the last one; default the first one alone.
        :param every: only each request of this many fails.
        """
        end = first if last is None else last
        self._arm(fault, lambda number, request: first <= number <= end and (number - first) % every == 0)

    def arm_at(self, wanted: Callable[[str], bool], fault: Fault) -> None:
        """Let the first request fail for which ``wanted`` returns True. It gets requests as ``GET /path``."""
        self._arm(fault, lambda number, request: not self.failed and wanted(request))

    def failures(self, faults: Collection[Fault], every: bool) -> list[tuple[int, list[Fault]]]:
        """Return which of the requests that were counted shall fail: their numbers, and how.

        :param every: True: all of them in all ways. False: the first one of each kind, in one way. Requests of one kind differ in
            numbers and ids only.
        """
        if every:
            return [(number, list(faults)) for number in range(1, len(self.requests) + 1)]
        first: dict[str, int] = {}
        for number, request in enumerate(self.requests, 1):
            first.setdefault(re.sub(r"[0-9a-f]{8,}|\d+", "", request), number)
        return [(number, [fault]) for number, fault in zip(first.values(), itertools.cycle(faults), strict=False)]

    def _arm(self, fault: Fault | None, hits: Callable[[int, str], bool]) -> None:
        with self._lock:
            self.requests, self.failed = [], []
            self._fault, self._hits = fault, hits

    def take(self, request: str) -> Fault | None:
        """Count a request, and return its fault; None lets it pass."""
        with self._lock:
            self.requests.append(request)
            if self._fault is None or not self._hits(len(self.requests), request):
                return None
            self.failed.append(request)
            return self._fault


class _Handler(BaseHTTPRequestHandler):
    owner: FaultProxy
    protocol_version = "HTTP/1.1"
    timeout = 120

    def setup(self) -> None:
        """Take one connection to the store for all requests of a client's connection."""
        super().setup()
        self.upstream = http.client.HTTPConnection(self.owner.upstream, timeout=120)

    def finish(self) -> None:
        """Close it."""
        super().finish()
        self.upstream.close()

    def log_message(self, format: str, *args: object) -> None:
        """Write nothing: paths of tests are of no interest."""

    def _forward(self) -> None:
        body, fault = self._body(), self.owner.take(f"{self.command} {self.path}")
        if fault in _REFUSALS:
            self._refuse(*_REFUSALS[fault])
            return
        connection = self.upstream
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "expect"):
                connection.putheader(name, value)
        if self.headers.get("Transfer-Encoding"):
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        content = answer.read()
        if fault == "lost":
            self.close_connection = True
            with suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        if length is not None:
            self.send_header("Content-Length", length)
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _forward  # noqa: N815

    def _refuse(self, status: int, code: str) -> None:
        content = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(chunks)
