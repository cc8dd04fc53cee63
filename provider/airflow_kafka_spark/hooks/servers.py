"""Find out which kind of server answers at an address, for the errors of connections that lead to another one.

A client of one protocol that meets a server of another one often waits until its timeout, and then names none of both.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

ServerKind = Literal["spark", "http2", "http", "tls", "postgres", "mysql", "kafka", "other", "silent", "closed"]

TEST_SECONDS = 10.0
"""Maximum seconds of the test of a connection, before the server is identified."""
ANSWER_SECONDS = 2.0
"""Maximum seconds to wait for each answer."""

_HTTP = b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n"
_HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""The preface of HTTP/2 and an empty frame of settings."""
_POSTGRES = struct.pack(">ii", 8, 80877103)
"""PostgreSQL's question whether the server has TLS."""
_KAFKA = struct.pack(">ihhih", 10, 18, 0, 0x616B73, -1)
"""A request for the versions of Kafka's API."""
_STREAM = b"/files/airflow-kafka-spark"
_SPARK = struct.pack(">qbi", 8 + 1 + 4 + len(_STREAM), 6, len(_STREAM)) + _STREAM
"""A request of Spark's RPC for a file that no master has."""


class Server(NamedTuple):
    """A server that was recognized by its answers.

    :param kind: the protocol; ``silent``: the port accepts connections and answers nothing; ``closed``: it ends them.
    :param what: the server, as the end of a sentence.
    """

    kind: ServerKind
    what: str


def identify_server(host: str, port: int, *expected: ServerKind) -> Server:
    """Return what answers at an address. It takes milliseconds, or some seconds if nothing answers.

    :param expected: the protocols to try first, so that a server of these gets no request that it does not know. ``spark`` and
        ``http2`` are possible.
    :raises OSError: no connection can be made.
    """
    tries: list[tuple[bytes, Callable[[bytes], Server | None]]] = [(_HTTP, _recognize_text)]
    tries += [(_POSTGRES, _recognize_postgres), (_KAFKA, _recognize_kafka)]
    others: dict[ServerKind, tuple[bytes, Callable[[bytes], Server | None]]] = {
        "http2": (_HTTP2, _recognize_http2), "spark": (_SPARK, _recognize_spark),
    }  # fmt: skip
    tries = [*(others.pop(kind) for kind in expected), *tries, *others.values()]
    answers = []
    for request, recognize in tries:
        answer = _exchange(host, port, request, ANSWER_SECONDS)
        if answer and (found := recognize(answer)) is not None:
            return found
        answers.append(answer)
        if request == _HTTP and all(given is None for given in answers):
            return Server("silent", "a server that accepts connections and does not answer")
    if any(answers):
        return Server("other", "a server of another protocol")
    return Server("closed", "a server that closes the connection")


def name_other_server(found: str, host: str, port: int, *own: ServerKind) -> str:
    """Return the error of a connection with what answers at its address, unless that is a server of the right kind.

    :param found: the error.
    :param own: the kinds of the right server.
    """
    try:
        server = identify_server(host, port)
    except OSError:
        return found
    if server.kind in (*own, "closed"):
        return found
    return f"{found.rstrip('. ')}. At {host}:{port} there is {server.what}."


_URLS: Mapping[str, tuple[int, tuple[ServerKind, ...]]] = {
    "http": (80, ("http",)),
    "https": (443, ("http", "tls")),
    **dict.fromkeys(("postgresql", "postgresql+psycopg", "postgresql+psycopg2"), (5432, ("postgres",))),
    "mysql+pymysql": (3306, ("mysql",)),
}
"""Schemes of URLs, with their default ports and the servers that they lead to."""


def name_other_server_at(found: str, url: str) -> str:
    """Return the error of a connection with what answers at the address in a URL; see :func:`name_other_server`."""
    try:
        address = urllib.parse.urlsplit(url)
        port, own = _URLS[address.scheme]
        return name_other_server(found, address.hostname, address.port or port, *own) if address.hostname else found
    except (ValueError, KeyError):
        return found


def run_within(seconds: float, where: str, test: Callable[[], tuple[bool, str]]) -> tuple[bool, str]:
    """Return the result of a test of a connection; False and a sentence if it takes longer. Its thread is then not waited for.

    Some clients have no timeout for a server that accepts a connection and does not answer.

    :param where: the server, as the beginning of a sentence.
    :raises BaseException: what the test raises.
    """
    results: list[tuple[bool, str]] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(test())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="connection test", daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    return results[0] if results else (False, f"{where} gave no answer within {seconds:g} s.")


def _exchange(host: str, port: int, request: bytes, seconds: float) -> bytes | None:
    """Return the beginning of the answer to a request; "" if the server closes the connection, None if it does not answer.

    :raises OSError: no connection can be made.
    """
    with socket.create_connection((host, port), timeout=seconds) as connection:
        until = time.monotonic() + seconds
        try:
            connection.sendall(request)
            connection.settimeout(max(0.01, until - time.monotonic()))
            return connection.recv(4096)
        except TimeoutError:
            return None
        except OSError:
            return b""


def _recognize_text(answer: bytes) -> Server | None:
    if answer.startswith(b"HTTP/"):
        if b" 400 " in answer[:16] and (b"HTTPS" in answer or b"SSL" in answer):
            return Server("tls", "a server that expects TLS (HTTPS)")
        name = re.search(rb"(?im)^server: *([\x21-\x7e]{1,40})", answer)
        return Server("http", f"an HTTP server ({name[1].decode()})" if name else "an HTTP server")
    if answer[:2] == b"\x15\x03":  # an alert
        return Server("tls", "a server that expects TLS")
    if len(answer) > 5 and answer[3] == 0 and answer[4] in (10, 255):
        version = re.match(rb"[\x20-\x7e]{1,60}", answer[5:]) if answer[4] == 10 else None
        product = "MariaDB" if b"MariaDB" in answer else "MySQL"
        return Server("mysql", f"{product} ({version[0].decode()})" if version else "MariaDB or MySQL")
    if re.match(rb"[A-Z0-9]{3}[A-Z0-9.-]*[ -]", answer):
        line = answer.splitlines()[0][:60].decode("ascii", "replace")
        return Server("other", f"a server of another protocol (`{line}`)")
    return _recognize_http2(answer)


def _recognize_http2(answer: bytes) -> Server | None:
    # A frame of settings, or the end of the connection.
    is_frame = len(answer) >= 9 and answer[3] in (4, 7) and answer[5:9] == bytes(4)
    return Server("http2", "a server of gRPC or HTTP/2, as Spark Connect") if is_frame else None


def _recognize_postgres(answer: bytes) -> Server | None:
    return Server("postgres", "PostgreSQL") if answer in (b"S", b"N", b"G") else None


def _recognize_kafka(answer: bytes) -> Server | None:
    is_ours = len(answer) >= 8 and answer[4:8] == _KAFKA[8:12]
    return Server("kafka", "a Kafka broker") if is_ours else None


def _recognize_spark(answer: bytes) -> Server | None:
    # The length of the frame, and that there is no such file.
    is_ours = len(answer) >= 9 and answer[:4] == bytes(4) and answer[8] == 8
    return Server("spark", "a master or worker of Spark") if is_ours else None
