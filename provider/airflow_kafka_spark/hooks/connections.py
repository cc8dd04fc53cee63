"""Look up Airflow connections, and find out which kind of server answers at their address.

A connection that is missing or of another type is one clear error. A client that talks to a server of another protocol often
waits until its timeout, and its error does not name the protocol. So the errors of connections name the kind of server that
answers.
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from airflow_kafka_spark.errors import ConnectionInvalid

if TYPE_CHECKING:
    from airflow.sdk import Connection


GENERIC = "generic"
"""The type with which Airflow's command line stores a connection of a type that no installed provider declares."""
_SYNONYMS = {"postgresql": "postgres", "mariadb": "mysql"}


def look_up(
    conn_id: str, *types: str, option: str = "conn_id", hint: str = "", get: Callable[[str], Connection] | None = None
) -> Connection:
    """Return an Airflow connection of one of these types.

    :param conn_id: its name.
    :param types: the accepted types, the usual one first. Messages do not name :data:`GENERIC`.
    :param option: the option in which the user gave the name; default ``conn_id``.
    :param hint: text for the error if the connection is not defined: the fields that one of the first type needs; default none.
    :param get: returns a connection by its name; default: the ``get_connection`` of Airflow's hooks.
    :raises ConnectionInvalid: it is not defined, or of another type.
    """
    from airflow.providers.common.compat.sdk import BaseHook

    named = " or ".join(f"`{kind}`" for kind in types if kind != GENERIC)
    with require_connection(conn_id, f"`{types[0]}` ({hint})" if hint else named, option=option):
        connection = (get or BaseHook.get_connection)(conn_id)
    if get_connection_type(connection) not in types:
        raise ConnectionInvalid(conn_id, f"it is of type `{connection.conn_type}`", f"Use a connection of type {named}")
    require_extra(connection)
    return connection


def require_extra(connection: Connection) -> dict[str, Any]:
    """Return the extra of a connection.

    :raises ConnectionInvalid: it is no JSON, or a list, or another value of JSON without names.
    """
    try:
        # Airflow would log an error, and return an empty one.
        json.loads(connection.extra or "{}")
    except ValueError as error:
        found = f"its extra is no JSON: {str(error).partition(':')[0]}"
        raise ConnectionInvalid(connection.conn_id, found, 'Write `{"name": "value"}`') from None
    extra: object = connection.extra_dejson
    if not isinstance(extra, dict):
        found = f"its extra is a {type(extra).__name__}; expected a JSON object"
        raise ConnectionInvalid(connection.conn_id, found, 'Write `{"name": "value"}`')
    return extra


@contextmanager
def require_connection(conn_id: str, kind: str, *, option: str) -> Iterator[None]:
    """Raise one clear error if Airflow's code in this block does not find the connection.

    :param kind: the type of connection to add, as the error names it.
    :raises ConnectionInvalid: it is not defined.
    """
    from airflow.exceptions import AirflowNotFoundException

    try:
        yield
    except AirflowNotFoundException:
        if not str(conn_id).strip():
            raise ConnectionInvalid(conn_id, f"its name in `{option}` is empty", f"Name a connection of type {kind}") from None
        variable = f"AIRFLOW_CONN_{conn_id}".upper()
        if os.environ.get(variable):
            # Airflow logs the reason. It may be a part of the password.
            what = f"the environment variable `{variable}` is neither the JSON nor the URI of a connection"
            action = 'Write `{"conn_type": ..., "host": ..., "port": 1234}`, or a URI with `%2F` for a `/` in a password'
            raise ConnectionInvalid(conn_id, what, action) from None
        action = f"Add a connection `{conn_id}` of type {kind}, or correct `{option}`"
        raise ConnectionInvalid(conn_id, "it is not defined", action) from None


def get_connection_type(connection: Connection) -> str:
    """Return the type of a connection. Synonyms (``postgresql``, ``mariadb``) are replaced by the usual name."""
    kind = connection.conn_type or ""
    return _SYNONYMS.get(kind, kind)


def format_setting(value: object) -> str:
    """Return a value of a connection's extra as Java and librdkafka write it: ``true``, not ``True``."""
    return str(value).lower() if isinstance(value, bool) else str(value)


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


class ServerAnswer(NamedTuple):
    """A server that was recognized by its answers.

    :param kind: the protocol; ``silent``: the port accepts connections and answers nothing; ``closed``: it ends them.
    :param what: the server, as the end of a sentence.
    """

    kind: ServerKind
    what: str


def identify_server(host: str, port: int, *expected: ServerKind) -> ServerAnswer:
    """Return what answers at an address. It takes milliseconds, or some seconds if nothing answers.

    :param expected: the protocols to try first, so that a server of these gets no request that it does not know. ``spark`` and
        ``http2`` are possible.
    :raises OSError: no connection can be made.
    """
    tries: list[tuple[bytes, Callable[[bytes], ServerAnswer | None]]] = [(_HTTP, _recognize_text)]
    tries += [(_POSTGRES, _recognize_postgres), (_KAFKA, _recognize_kafka)]
    others: dict[ServerKind, tuple[bytes, Callable[[bytes], ServerAnswer | None]]] = {
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
            return ServerAnswer("silent", "a server that accepts connections and does not answer")
    if any(answers):
        return ServerAnswer("other", "a server of another protocol")
    return ServerAnswer("closed", "a server that closes the connection")


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


def _recognize_text(answer: bytes) -> ServerAnswer | None:
    if answer.startswith(b"HTTP/"):
        if b" 400 " in answer[:16] and (b"HTTPS" in answer or b"SSL" in answer):
            return ServerAnswer("tls", "a server that expects TLS (HTTPS)")
        name = re.search(rb"(?im)^server: *([\x21-\x7e]{1,40})", answer)
        return ServerAnswer("http", f"an HTTP server ({name[1].decode()})" if name else "an HTTP server")
    if answer[:2] == b"\x15\x03":  # an alert
        return ServerAnswer("tls", "a server that expects TLS")
    if len(answer) > 5 and answer[3] == 0 and answer[4] in (10, 255):
        version = re.match(rb"[\x20-\x7e]{1,60}", answer[5:]) if answer[4] == 10 else None
        product = "MariaDB" if b"MariaDB" in answer else "MySQL"
        return ServerAnswer("mysql", f"{product} ({version[0].decode()})" if version else "MariaDB or MySQL")
    if re.match(rb"[A-Z0-9]{3}[A-Z0-9.-]*[ -]", answer):
        line = answer.splitlines()[0][:60].decode("ascii", "replace")
        return ServerAnswer("other", f"a server of another protocol (`{line}`)")
    return _recognize_http2(answer)


def _recognize_http2(answer: bytes) -> ServerAnswer | None:
    # A frame of settings, or the end of the connection.
    is_frame = len(answer) >= 9 and answer[3] in (4, 7) and answer[5:9] == bytes(4)
    return ServerAnswer("http2", "a server of gRPC or HTTP/2, as Spark Connect") if is_frame else None


def _recognize_postgres(answer: bytes) -> ServerAnswer | None:
    return ServerAnswer("postgres", "PostgreSQL") if answer in (b"S", b"N", b"G") else None


def _recognize_kafka(answer: bytes) -> ServerAnswer | None:
    is_ours = len(answer) >= 8 and answer[4:8] == _KAFKA[8:12]
    return ServerAnswer("kafka", "a Kafka broker") if is_ours else None


def _recognize_spark(answer: bytes) -> ServerAnswer | None:
    # The length of the frame, and that there is no such file.
    is_ours = len(answer) >= 9 and answer[:4] == bytes(4) and answer[8] == 8
    return ServerAnswer("spark", "a master or worker of Spark") if is_ours else None
