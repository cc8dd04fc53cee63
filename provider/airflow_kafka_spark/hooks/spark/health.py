"""Check that a master answers, that a job runs there, and that the session of this process still works.

``python -m airflow_kafka_spark.hooks.spark.health`` runs a job in a process of its own, so that the JVM ends with it.

PySpark keeps the JVM and the context of a process in class attributes, and returns them even after the JVM was killed, or after
the context was stopped because the master had ended. :func:`discard_ended` removes them, so that the next window starts another
session.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from subprocess import TimeoutExpired
from typing import TYPE_CHECKING, Any

from airflow_kafka_spark.hooks.connections import ServerKind, identify_server

if TYPE_CHECKING:
    from py4j.java_gateway import JavaClass, JavaGateway, JVMView
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

REACH_SECONDS = 5.0
"""Seconds to wait for a connection to a master."""

PROBE_SECONDS = 90.0
"""Seconds to wait for the job of a connection test."""

_REAPED_SECONDS = 2.0
"""Maximum seconds to wait for the exit code of a JVM that does not answer."""

_PORTS = {"spark": 7077, "sc": 15002}
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Names of the environment variables with which gRPC uses a proxy."""
_HADOOP = ("HADOOP_CONF_DIR", "YARN_CONF_DIR")
"""Names of the environment variables by which Spark finds YARN."""
_LOCAL_MASTER = re.compile(r"local|local\[(\*|[1-9][0-9]*)(\s*,\s*[0-9]+)?\]|local-cluster\[(\s*[0-9]+\s*,){2}\s*[0-9]+\s*\]")
_MASTERS = "`local[*]`, `local[4]`, `yarn`, `spark://host:7077` or `k8s://https://host`"
_ADDRESS = re.compile(r"([^\[\]:/]+|\[[0-9A-Fa-f:.]+\])(:[0-9]+)?(/.*)?")
"""A host, perhaps with a port."""
_RESULT = "airflow-kafka-spark: "
_CONNECT_ENDED = re.compile(
    r"INVALID_HANDLE\.(SESSION_|OPERATION_(NOT_FOUND|ABANDONED))|RESPONSE_ALREADY_RECEIVED|server side session id"
)
"""Pattern of the errors of a Connect client whose session the server does not know any more."""
_GRPC_ANSWER = re.compile(r'\bstatus = StatusCode\.(\w+)\s+details = "(.*)"')
_CONNECT_SILENT = re.compile(r"\[RETRIES_EXCEEDED\]|StatusCode\.UNAVAILABLE")


def discard_ended() -> str:
    """Discard the context of this process, and its JVM, if they no longer work.

    :return: the reason, as the end of a sentence; "" if they work, or if this process has none.
    """
    reason = _describe_end()
    if reason:
        discard()
    return reason


def discard() -> None:
    """Remove the session and the context of this process, whether stopped or not, and the JVM if it has ended."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession
    from pyspark.sql.context import SQLContext

    gateway, context, jvm = SparkContext._gateway, SparkContext._active_spark_context, SparkContext._jvm
    has_ended = gateway is not None and _describe_jvm_end(gateway) != ""
    if context is not None:
        with warnings.catch_warnings(), suppress(Exception):
            warnings.simplefilter("ignore")
            context.stop()
    if jvm is not None and not has_ended:
        with suppress(Exception):
            jvm.SparkSession.clearDefaultSession()
            jvm.SparkSession.clearActiveSession()
    SparkSession._instantiatedSession = SparkSession._activeSession = None
    SQLContext._instantiatedContext = None
    SparkContext._active_spark_context = None
    if gateway is not None and has_ended:
        with suppress(Exception):
            gateway.shutdown()
        SparkContext._gateway = SparkContext._jvm = None


def call_driver(function: Callable[[], object], seconds: float) -> bool:
    """Call a function that needs an answer of Spark's driver. A driver that was stopped never answers.

    :param function: the function; its errors are raised.
    :param seconds: maximum time to wait for it.
    :return: False if it has not returned by then. It then goes on in its thread.
    """
    outcome: Future[object] = Future()

    def call() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:  # raised again by result()
            outcome.set_exception(error)

    threading.Thread(target=call, name="spark driver", daemon=True).start()
    if not wait([outcome], seconds).done:
        return False
    outcome.result()
    return True


def get_context(spark: SparkContext | SparkSession) -> SparkContext | None:
    """Return the context of a session, or the context itself; None for a client of a Spark Connect server."""
    # The package of a client only has no contexts that could be compared with.
    if type(spark).__module__.startswith("pyspark.sql.connect."):
        return None
    found: Any = spark
    context: SparkContext = getattr(found, "sparkContext", found)
    return context


def get_java_session_class(jvm: JVMView) -> JavaClass:
    """Return the Java class of sessions that run in the JVM. Spark 4 has another one, for Spark Connect."""
    from pyspark.sql import SparkSession

    find = getattr(SparkSession, "_get_j_spark_session_class", None)
    return jvm.SparkSession if find is None else find(jvm)


def _describe_end() -> str:
    from pyspark import SparkContext

    gateway = SparkContext._gateway
    if gateway is None:
        return ""
    if reason := _describe_jvm_end(gateway):
        return reason
    # A context is active before it is made. Its maker, perhaps the early start of another task, holds the lock until then.
    with SparkContext._lock:
        context = SparkContext._active_spark_context
    if context is not None and (context._jsc is None or context._jsc.sc().isStopped()):
        causes = "the master went away, gave the application up or is of another release of Spark than pyspark here"
        return f"its Spark context was stopped, most likely because {causes}"
    return ""


def _describe_jvm_end(gateway: JavaGateway) -> str:
    process = getattr(gateway, "proc", None)
    if process is None or process.poll() is None:
        try:
            # By the full name: Java would look for each package of a path as a class, in each of some 250 jars.
            getattr(gateway.jvm, "java.lang.System").nanoTime()
            return ""
        except Exception:
            if process is None:
                return "its JVM does not answer"
            # The connection is closed a moment before the exit code is available.
            with suppress(TimeoutExpired):
                process.wait(_REAPED_SECONDS)
    code = process.returncode
    if code is None:
        return "its JVM does not answer"
    if code < 0:
        killed = f"its JVM was killed by {signal.Signals(-code).name}"
        return f"{killed}, perhaps because the machine ran out of memory" if code == -signal.SIGKILL else killed
    return f"its JVM ended with exit code {code}"


def find_connect_end(error: BaseException) -> str:
    """Return the reason why a Connect server ended the session of a job, as the end of a sentence; "" for any other error.

    :param error: the error of the job, or one that it has caused.
    """
    cause: BaseException | None = error
    while cause is not None:
        if _CONNECT_ENDED.search(str(cause)):
            return "the server has ended the session, most likely because it was restarted"
        if _CONNECT_SILENT.search(str(cause)):
            return "the server has ended, or does not answer any more"
        cause = cause.__cause__
    return ""


def is_local_master(master: str) -> bool:
    """Return True for ``local``, ``local[4]``, ``local-cluster[...]`` and misspelt forms of them; False for hosts, as
    ``localhost``."""
    return re.match(r"local(?![\w.-])|local-cluster\[", master) is not None


def find_master_problem(master: str) -> str:
    """Return the reason why Spark would accept no master of this name; "" if it may accept it.

    Only names of known masters are checked. Spark itself starts a JVM before it reads the name.
    """
    is_yarn = master.startswith("yarn")
    # A host without a known scheme is taken for that of a standalone master, or of a Connect server.
    scheme, _, host = master.partition("://")
    if scheme in _PORTS and ("://" in host or not all(map(_ADDRESS.fullmatch, host.split(",")))):
        name = re.sub(":[0-9]+$", "", host) or master
        expected = "the host of a Spark Connect server" if scheme == "sc" and "://" not in host else _MASTERS
        return f"`{name}` is no master of Spark; expected {expected}"
    if scheme == "mesos" and _has_no_mesos():
        return f"`{master}` is a master of Mesos, which Spark 4 does not support; expected {_MASTERS}"
    if scheme in ("k8s", "mesos") and not all(map(_ADDRESS.fullmatch, re.sub("^(https?|zk)://", "", host).split(","))):
        return f"`{master}` names no host; expected {_MASTERS}"
    if (is_yarn and master != "yarn") or (is_local_master(master) and not _LOCAL_MASTER.fullmatch(master)):
        return f"`{master}` is no master of Spark; expected {_MASTERS}"
    return ""


def _has_no_mesos() -> bool:
    try:
        return int(version("pyspark").partition(".")[0]) >= 4
    except PackageNotFoundError:  # the client of Connect servers only
        return True


def find_unreachable_reason(master: str, *, uses_tls: bool = False, refuse_silent: bool = False) -> str:
    """Return the reason why a master or a Connect server cannot be reached. Return an empty text if it can, or if the address
    cannot be checked (``k8s://``, ``local``, a Connect server behind a proxy).

    The address of YARN is in Hadoop's configuration. Without it, Spark's JVM ends with a message on its standard error only. A
    server of another protocol would be found by Spark only after a minute or more.

    :param uses_tls: True if the client connects to the Connect server with TLS.
    :param refuse_silent: True to return a reason for a server that answers nothing within two seconds, too.
    """
    if master.startswith("yarn"):
        has_configuration = any(map(os.environ.get, _HADOOP))
        return "" if has_configuration else f"Neither {' nor '.join(_HADOOP)} is set in the environment of this process"
    scheme, _, rest = master.partition("://")
    if scheme not in _PORTS or not rest or (scheme == "sc" and any(map(os.environ.get, _PROXIES))):
        return ""
    reasons, others = [], []
    for place in rest.partition("/")[0].split(","):
        host, _, port = place.rpartition(":") if place.rpartition(":")[2].isdecimal() else (place, "", str(_PORTS[scheme]))
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS):
                pass
            if not (other := _find_other_server(scheme, host.strip("[]"), int(port), uses_tls, refuse_silent)):
                return ""
            others.append(f"{host}:{port} {other}")
        except OSError as error:
            reasons.append(f"{host}:{port}: {error.strerror or error}")
    if others:
        expected = "Spark Connect server" if scheme == "sc" else "Spark master"
        return f"There is no {expected}: {'; '.join([*others, *reasons])}"
    return f"Nothing answers at {'; '.join(reasons)}"


def _find_other_server(scheme: str, host: str, port: int, uses_tls: bool, refuse_silent: bool) -> str:
    """Return the server that answers instead of a master or a Connect server, as the end of a sentence; "" for the right one, and
    for one that is not known.

    :raises OSError: no connection can be made.
    """
    own: ServerKind = "http2" if scheme == "sc" else "spark"
    found = identify_server(host, port, own)
    if scheme == "sc" and found.kind == "http2" and uses_tls:
        return "expects no TLS, which `use_ssl` and, but for `localhost`, a password (a token) ask for"
    if scheme == "sc" and found.kind == "tls" and not uses_tls:
        return "expects TLS; set `use_ssl` in the extra"
    known = ("spark", "http2", "http", "postgres", "mysql", "kafka", *(["silent"] if refuse_silent else []))
    return f"is {found.what}" if found.kind != own and found.kind in known else ""


def probe_spark(
    address: str, settings: Mapping[str, str], *, is_connect: bool, seconds: float = PROBE_SECONDS
) -> tuple[bool, str]:
    """Start a session and count one row with it.

    :param address: a master, or a Connect server's address with its credentials.
    :param settings: settings of the session.
    :param is_connect: True for the address of a Connect server.
    :param seconds: timeout; default 90.
    :return: True and the version of Spark; or False and the reason.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYSPARK_PYTHON": sys.executable,
    }
    if address.startswith("local"):
        environment.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    given = json.dumps({"address": address, "settings": dict(settings), "is_connect": is_connect})
    # Passed through standard input, because every user of the machine can read a command line.
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return False, f"no answer within {seconds:g} s; perhaps it has no executors that are free"
    answers = [line[len(_RESULT) :] for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if answers:
        answer = json.loads(answers[-1])
        return bool(answer["done"]), str(answer["outcome"])
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return False, lines[-1][:500] if lines else f"the test ended with {done.returncode}"


def find_first_line(error: Exception) -> str:
    """Return the most specific line of a Spark error: a Connect server's answer, or the Java exception. At most 500 letters."""
    if answer := _GRPC_ANSWER.search(str(error)):
        status, details = answer.groups()
        if status == "UNAUTHENTICATED":
            return f"the server does not accept the token, the password of the connection ({details[:400]})"
        return f"{details[:480]} ({status})"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    java = [line.lstrip(": ") for line in lines if re.match(r":? ?[\w.$]+(Exception|Error)\b", line)]
    return (java or lines or [type(error).__name__])[0][:500]


def main() -> None:
    """Run a job on the Spark that standard input describes, and print the result as one line."""
    given = json.load(sys.stdin)
    try:
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.appName("airflow connection test")
        builder = builder.remote(given["address"]) if given["is_connect"] else builder.master(given["address"])
        for name, value in given["settings"].items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        session.range(1).count()
        answer = {"done": True, "outcome": session.version}
        session.stop()
    except Exception as error:
        answer = {"done": False, "outcome": find_first_line(error)}
    print(f"{_RESULT}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
