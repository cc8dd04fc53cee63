"""moto's server with connections that stay open (werkzeug's server closes each connection after one answer), and with a cache of
values that moto computes for each request: the names of its directories, the service of a host, and the dates of objects that it
has listed before. Writes are carried out one after the other: moto checks the condition of a write and then writes, so that two
writers at the same moment could both succeed, which they cannot in S3.
"""

from __future__ import annotations

import io
import os
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

# moto reads these when it is imported. Clients name the bucket in the path, and none is a browser.
os.environ |= {"S3_IGNORE_SUBDOMAIN_BUCKETNAME": "true", "MOTO_DISABLE_GLOBAL_CORS": "true"}

from flask import Flask
from moto import backends
from moto.core import responses, serialize
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import run_simple

WRITES = ("PUT", "POST", "DELETE")
_writing = threading.Lock()


class Handler(MotoRequestHandler):
    """Reads each request to its end before it is handled, so that the next one of the connection begins behind it."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def run_wsgi(self) -> None:
        self.environ = environ = self.make_environ()
        chunked = environ.get("wsgi.input_terminated")
        length = int(self.headers.get("Content-Length") or 0)
        environ["wsgi.input"] = io.BytesIO(environ["wsgi.input"].read() if chunked else self.rfile.read(length))
        try:
            with _writing if self.command in WRITES else nullcontext():
                status, headers, content = self._ask(environ)
        except Exception:  # of moto
            traceback.print_exc()
            status, headers, content = "500 Internal Server Error", [], b""
        names = {name.lower() for name, _ in headers}
        lines = [f"HTTP/1.1 {status}", f"Date: {self.date_time_string()}", *(f"{name}: {value}" for name, value in headers)]
        if self.command == "HEAD" or status.startswith(("204", "304")):
            content = b""
        elif "content-length" not in names:
            lines.append(f"Content-Length: {len(content)}")
        self.wfile.write("\r\n".join([*lines, "", ""]).encode("latin-1") + content)

    def _ask(self, environ: dict[str, Any]) -> tuple[str, list[tuple[str, str]], bytes]:
        begun: list[Any] = []

        def start(status: str, headers: list[tuple[str, str]], error: Any = None) -> Callable[[bytes], None]:
            begun[:] = [status, [(name, value) for name, value in headers if name.lower() != "date"]]
            return lambda data: None

        answer = self.server.app(environ, start)
        try:
            content = b"".join(answer)
        finally:
            answer.close()
        return begun[0], begun[1], content


def create(service: Any) -> Flask:
    """Return moto's application for a service. In debug mode, Flask would look for mistakes of its callers in each request."""
    app = create_backend_app(service)
    app.debug = False
    return app


if __name__ == "__main__":
    names = tuple(backends.list_of_moto_modules())
    backends.list_of_moto_modules = lambda: names
    DomainDispatcherApplication.get_backend_for_host = lru_cache(DomainDispatcherApplication.get_backend_for_host)
    serialize.parse_to_aware_datetime = lru_cache(10_000)(serialize.parse_to_aware_datetime)
    responses.method_names_from_class = lru_cache(responses.method_names_from_class)
    os.environ["MOTO_PORT"] = sys.argv[2]
    run_simple(sys.argv[1], int(sys.argv[2]), DomainDispatcherApplication(create), threaded=True, request_handler=Handler)
