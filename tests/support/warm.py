"""Task attempts in warm Spark processes (``keep_alive`` in the extra of the ``spark`` connection).

``TEST_KEEP_ALIVE=60s`` lets all attempts of the pipelines under test use one instead of an engine or a JVM of their own:
``TEST_KEEP_ALIVE=60s make test ARGS="tests/faults"``.
"""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from airflow_kafka_spark.hooks.spark.warm import client
from airflow_kafka_spark.hooks.spark.warm.process import read_peer_credentials
from airflow_kafka_spark.testing._processes import wait_until

EVERYWHERE = os.environ.get("TEST_KEEP_ALIVE", "")
"""``keep_alive`` of all pipelines under test; empty: only the tests of warm processes set it."""


def extra(keep_alive: str) -> dict[str, Any]:
    """Return the extra of a ``spark`` connection whose tasks get faults; for a warm process unless ``keep_alive`` is empty."""
    return {"spark.python.daemon.module": "tests.support.spark_daemon", **({"keep_alive": keep_alive} if keep_alive else {})}


def is_on() -> bool:
    """Return True if an attempt over the default connection uses a warm process."""
    connection = json.loads(os.environ.get("AIRFLOW_CONN_SPARK_DEFAULT") or "{}")
    return "keep_alive" in (connection.get("extra") or {})


def used_here() -> int | None:
    """Return the warm Spark process that this process is attached to; None if it is attached to none."""
    attached = client._attached
    return None if attached is None else read_peer_credentials(attached.connection)[0]


def jvm_of(log: Path) -> int | None:
    """Return the JVM that an attempt has used, by its log; None if the attempt has not started one."""
    found = re.findall(r"(?:Started|Reusing) the warm Spark process (\d+)", log.read_text() if log.exists() else "")
    return int(found[-1]) if found else None


def server_log(log: Path) -> str:
    """Return the log of the warm process that an attempt has used."""
    found = re.findall(r"its log is (\S+)", log.read_text())
    return Path(found[-1]).read_text() if found else ""


def is_running(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def server_of(jvm: int) -> int:
    """Return the process that has started a JVM."""
    return int(Path(f"/proc/{jvm}/stat").read_text().rpartition(")")[2].split()[1])


def end(jvm: int) -> None:
    """End the warm process of a JVM, and wait until the JVM is gone."""
    with suppress(OSError):
        server = server_of(jvm)
        if server > 1:
            os.kill(server, signal.SIGTERM)
    assert wait_until(lambda: not is_running(jvm), 180)
