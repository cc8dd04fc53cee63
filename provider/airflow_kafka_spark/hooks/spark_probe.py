"""A test whether Spark can be used, in a process of its own, so that the JVM ends with it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping

REACH_SECONDS = 5.0
PROBE_SECONDS = 90.0

_PORTS = {"spark": 7077, "sc": 15002}
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""Environment variables by which gRPC connects through a proxy."""
_RESULT = "airflow-kafka-spark: "


def unreachable(master: str) -> str:
    """Return why nothing can be reached at the address of a master or a Connect server. Return an empty text if something
    answers, or if the address names no host (``yarn``, ``k8s://``, ``local``, a Connect server behind a proxy).
    """
    scheme, _, rest = master.partition("://")
    if scheme not in _PORTS or not rest or (scheme == "sc" and any(map(os.environ.get, _PROXIES))):
        return ""
    reasons = []
    for place in rest.partition("/")[0].split(","):
        host, _, port = place.rpartition(":") if place.rpartition(":")[2].isdecimal() else (place, "", str(_PORTS[scheme]))
        try:
            with socket.create_connection((host.strip("[]"), int(port)), timeout=REACH_SECONDS):
                return ""
        except OSError as error:
            reasons.append(f"{host}:{port}: {error.strerror or error}")
    return f"Nothing answers at {'; '.join(reasons)}"


def probe(address: str, settings: Mapping[str, str], *, is_connect: bool, seconds: float = PROBE_SECONDS) -> tuple[bool, str]:
    """Start a session and count one row with it.

    :param address: a master, or a Connect server's address with its credentials.
    :param settings: of the session.
    :param is_connect: whether it is a Connect server's.
    :param seconds: after which it is given up.
    :return: whether it worked; and Spark's version, or why it did not.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYSPARK_PYTHON": sys.executable,
    }
    if address.startswith("local"):
        environment.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    given = json.dumps({"address": address, "settings": dict(settings), "is_connect": is_connect})
    # By its input: what is in a command line, anybody can read.
    command = [sys.executable, "-m", __name__]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=seconds, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return False, f"no answer within {seconds:g} s; perhaps it has no executors that are free"
    answers = [line[len(_RESULT) :] for line in done.stdout.splitlines() if line.startswith(_RESULT)]
    if answers:
        answer = json.loads(answers[-1])
        return bool(answer["done"]), str(answer["told"])
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return False, lines[-1][:500] if lines else f"the test ended with {done.returncode}"


def first_line(error: Exception) -> str:
    """Return the line of a Spark error that says what happened: the Java exception if there is one. At most 500 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    java = [line.lstrip(": ") for line in lines if re.match(r":? ?[\w.$]+(Exception|Error)\b", line)]
    return (java or lines or [type(error).__name__])[0][:500]


def main() -> None:
    """Run a job on the Spark that standard input names, and print the result as one line."""
    given = json.load(sys.stdin)
    try:
        from pyspark.sql import SparkSession

        builder = SparkSession.builder.appName("airflow connection test")
        builder = builder.remote(given["address"]) if given["is_connect"] else builder.master(given["address"])
        for name, value in given["settings"].items():
            builder = builder.config(name, value)
        session = builder.getOrCreate()
        session.range(1).count()
        answer = {"done": True, "told": session.version}
        session.stop()
    except Exception as error:
        answer = {"done": False, "told": first_line(error)}
    print(f"{_RESULT}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main()
