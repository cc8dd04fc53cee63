"""Spark's classes as the JVM has them once they are loaded, in a file: a start with it takes little more than half the CPU time.

The file is a class data sharing archive of Java's own, kept in the cache of jars; where it does not fit, Java does without.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
from pathlib import Path

from airflow_kafka_spark.errors import KafkaSparkError
from airflow_kafka_spark.hooks import jars

# Short lives: what a better compiler would gain, they do not see.
_SHORT = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_TRAINING = """
from pyspark.sql import SparkSession
builder = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false")
session = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.driver.host", "127.0.0.1").getOrCreate()
rows = session.range(0, 100, 1, 2).selectExpr("id", "from_json('{\\"n\\": 1}', 'n int').n AS n", "cast(id AS string) AS text")
rows.filter("id > 2").mapInArrow(lambda batches: batches, "id long, n int, text string").collect()
"""


def use(*, make: bool) -> None:
    """Let all Sparks that are started from here on be quick to start.

    :param make: make the archive where there is none yet, which takes some twenty seconds.
    """
    if "SPARK_SUBMIT_OPTS" in os.environ:  # a test process has it from the one that started it
        return
    options = _SHORT
    with contextlib.suppress(KafkaSparkError, OSError):  # without Java: the tests that need it say so
        archive = _path()
        if make and not archive.exists():
            _make(archive)
        if archive.exists():
            options += f" -XX:SharedArchiveFile={archive} -Xlog:cds=off -Xlog:cds+dynamic=off"
    os.environ |= {"SPARK_SUBMIT_OPTS": options, "SPARK_LAUNCHER_OPTS": _SHORT}


def _path() -> Path:
    """Its place, named by all that it depends on."""
    java = jars.find_java().resolve()
    facts = [java, (java.parents[1] / "release").read_text(), _TRAINING]
    for jar in sorted(jars.pyspark_jars().iterdir()):
        facts += [jar, jar.stat().st_size, jar.stat().st_mtime_ns]
    name = hashlib.sha256("\n".join(map(str, facts)).encode()).hexdigest()[:16]
    return jars.cache_directory() / "archives" / f"spark-{name}.jsa"


def _make(archive: Path) -> None:
    archive.parent.mkdir(parents=True, exist_ok=True)
    mine = archive.with_suffix(f".{os.getpid()}")
    options = f"{_SHORT} -XX:ArchiveClassesAtExit={mine} -Xlog:disable"
    # Java writes it when it ends, which is after Python has; it holds the other end of this pipe until then.
    subprocess.run(
        [sys.executable, "-c", _TRAINING], env={**os.environ, "SPARK_SUBMIT_OPTS": options}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300, check=False,
    )  # fmt: skip
    if mine.exists():
        mine.rename(archive)
