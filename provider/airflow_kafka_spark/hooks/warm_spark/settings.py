"""Settings that tasks must have in common to share a warm Spark process: all that lead to another Spark or other workers."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from airflow_kafka_spark import __version__
from airflow_kafka_spark.hooks.class_archive import SparkClassArchive
from airflow_kafka_spark.hooks.jars import find_java, pyspark_jars

_JAVA = "spark.driver.extraJavaOptions"

LONGEST_SECONDS = 24 * 3600.0

# Connections and the context of one task; what libraries set when they are imported (`_RJEM_MALLOC_CONF`); what leads a pyspark
# to a session that runs; faults, which are one process's; what pyspark itself has set when a session is there; what differs
# between processes and concerns none of them.
_LEFT_OUT = re.compile(
    "AIRFLOW_CONN_|AIRFLOW_CTX_|AIRFLOW_VAR_|AIRFLOW_KAFKA_SPARK_FAULT|_"
    "|PYSPARK_GATEWAY_|SPARK_CONNECT_|SPARK_LOCAL_REMOTE|SPARK_REMOTE|SPARK_AUTH_SOCKET_TIMEOUT$|SPARK_BUFFER_SIZE$"
    "|PYTEST_|OLDPWD$|PWD$|SHLVL$|TERM$|COLUMNS$|LINES$|INVOCATION_ID$|JOURNAL_STREAM$|TRACEPARENT$|TRACESTATE$"
)
_UNITS = {"s": 1, "m": 60, "h": 3600}


def parse_duration(value: object) -> float | None:
    """Return the seconds of a duration such as ``90s``, ``10m`` or ``2h``; None for other texts, and outside of 1 s to 24 h."""
    match = re.fullmatch(r"(\d{1,6})([smh])", value.strip()) if isinstance(value, str) else None
    seconds = float(int(match[1]) * _UNITS[match[2]]) if match else 0.0
    return seconds if 1 <= seconds <= LONGEST_SECONDS else None


def environment() -> dict[str, str]:
    """Return the environment variables of a warm process: this process's, without those of one task alone."""
    kept = {name: value for name, value in os.environ.items() if not _LEFT_OUT.match(name)}
    return kept | {"PYTHONPATH": os.pathsep.join(_search_path())}


def _search_path() -> list[str]:
    # pyspark adds a directory of each session's own.
    return [path for path in sys.path if path and "/userFiles-" not in path]


@dataclass(frozen=True)
class WarmSettings:
    """The settings of a warm Spark process.

    :param master: a local master.
    :param spark: Spark's settings, jars among them. They may hold secrets.
    :param keep_alive: seconds without a task after which the process ends.
    :param java_options: further options of the JVM, which change nothing that Spark computes: two tasks may differ in them.
    """

    master: str
    spark: Mapping[str, str]
    keep_alive: float
    java_options: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"WarmSettings({self.master!r}, keep_alive={self.keep_alive:g})"

    @property
    def started(self) -> dict[str, str]:
        """The settings that the process is started with."""
        # Before the others: a later option of the same name wins. A JVM without memory left would fail one task after the other.
        options = [*self.java_options, "-XX:+ExitOnOutOfMemoryError", self.spark.get(_JAVA, "")]
        return {**self.spark, _JAVA: " ".join(options).strip()}

    @functools.cached_property
    def key(self) -> str:
        """A digest of all that has to be the same for two tasks to share a process; ``keep_alive`` is no part of it.

        :raises JavaMissing: there is no Java.
        """
        archive = SparkClassArchive.find(self.spark.get("spark.driver.extraClassPath", ""))
        facts = {
            "master": self.master,
            "spark": dict(self.spark),
            "java": str(find_java().resolve()),
            "jvm": archive.file.name if archive else _changes(pyspark_jars()),
            "python": [sys.executable, sys.version],
            "provider": [__version__, *_changes(Path(__file__).parents[2], "**/*.py")],
            "installed": [_change(Path(path)) for path in _search_path() if "site-packages" in path or "dist-packages" in path],
            "environment": environment(),
            "user": [os.getuid(), os.getgid(), sorted(os.getgroups())],
            "directory": os.getcwd(),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def _changes(directory: Path, pattern: str = "*") -> list[str]:
    return sorted(map(_change, directory.glob(pattern)))


def _change(path: Path) -> str:
    """Return what changes when a file does, or when something is installed into a directory."""
    try:
        found = path.stat()
    except OSError:
        return str(path)
    return f"{path} {found.st_mtime_ns} {0 if path.is_dir() else found.st_size}"
