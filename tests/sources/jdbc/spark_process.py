"""Read splits with a separate Spark, whose JVM has another time zone than its session.

Run as ``python -m tests.sources.jdbc.spark_process``: requests and answers are pickles, one after the other, until the input
ends.
"""

from __future__ import annotations

import os
import pickle
import struct
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from airflow_kafka_spark.hooks.spark import jars
from airflow_kafka_spark.sources.jdbc.source import JdbcSource

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Answer:
    """The result of a read.

    :param types: name and type of each column.
    :param parts: the rows of each partition.
    :param plan: as Spark explains it.
    :param error: the whole text of what was raised.
    """

    types: dict[str, str] = field(default_factory=dict)
    parts: tuple[list[dict[str, Any]], ...] = ()
    plan: str = ""
    error: str = ""


class JdbcSpark:
    """A Spark in a separate process. Its output and its event log are in ``scratch``.

    :param packages: coordinates of the drivers that it needs.
    """

    def __init__(self, scratch: Path, packages: Sequence[str], zone: str = "Europe/Berlin") -> None:
        self.scratch = scratch
        (scratch / "events").mkdir()
        classpath = ",".join(map(str, jars.resolve_jars(packages, exclude_bundled=True)))
        command = [sys.executable, "-m", "tests.sources.jdbc.spark_process", classpath, zone, str(scratch / "events")]
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        env = {**os.environ, "PYTHONPATH": path, "TZ": "UTC", "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
        env.pop("PYSPARK_SUBMIT_ARGS", None)
        self._log = (scratch / "log").open("wb")
        self._process = subprocess.Popen(
            command, cwd=scratch, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log
        )

    def __enter__(self) -> JdbcSpark:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the process; its files are complete afterwards."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(60)
        self._log.close()

    def read(self, source: JdbcSource, splits: Sequence[Mapping[str, Any]]) -> Answer:
        """Return the rows of these splits."""
        assert self._process.stdin and self._process.stdout
        environment = {name: value for name, value in os.environ.items() if name.startswith("AIRFLOW_CONN_")}
        message = pickle.dumps((environment, source, [dict(split) for split in splits]))
        self._process.stdin.write(struct.pack(">I", len(message)) + message)
        self._process.stdin.flush()
        head = self._process.stdout.read(4)
        assert head, (self.scratch / "log").read_text(errors="replace")[-3000:]
        answer: Answer = pickle.loads(self._process.stdout.read(struct.unpack(">I", head)[0]))
        return answer

    @property
    def traces(self) -> str:
        """Return everything that the process has written."""
        files = [self.scratch / "log", *(path for path in (self.scratch / "events").rglob("*") if path.is_file())]
        return "\n".join(path.read_text(errors="replace") for path in files)


def main() -> None:
    from pyspark.sql import SparkSession

    # Nothing but answers on the output.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    builder = SparkSession.builder.master("local[2]").appName("jdbc")
    conf = {
        "spark.jars": sys.argv[1],
        "spark.driver.extraJavaOptions": f"-Duser.timezone={sys.argv[2]}",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.dir": f"file://{sys.argv[3]}",
        "spark.eventLog.compress": "false",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "2",
    }
    spark = builder.config(map=conf).getOrCreate()
    spark.sparkContext.setLogLevel("INFO")
    while head := sys.stdin.buffer.read(4):
        environment, source, splits = pickle.loads(sys.stdin.buffer.read(struct.unpack(">I", head)[0]))
        os.environ.update(environment)
        message = pickle.dumps(_answer(spark, source, splits))
        answers.write(struct.pack(">I", len(message)) + message)
        answers.flush()
    spark.stop()


def _answer(spark: Any, source: JdbcSource, splits: Sequence[Mapping[str, Any]]) -> Answer:
    from pyspark.sql import functions as f

    for name, value in source.settings.items():
        spark.conf.set(name, value)
    try:
        frame = source.read_frame(spark, splits)
        parts: list[list[dict[str, Any]]] = [[] for _ in range(frame.rdd.getNumPartitions())]
        for row in frame.withColumn("__part", f.spark_partition_id()).toArrow().to_pylist():
            parts[row.pop("__part")].append(row)
        plan = frame._jdf.queryExecution().toString()
        return Answer(dict(frame.dtypes), tuple(parts), plan)
    except Exception as error:
        return Answer(error=str(error))


if __name__ == "__main__":
    # Under the name it is imported by, so that its values can be read.
    from tests.sources.jdbc import spark_process

    spark_process.main()
