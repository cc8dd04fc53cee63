"""Read tables with a separate Spark: ``python -m tests.sinks.spark_reader <file with requests> <file for answers>``.

Spark runs in a separate process, because a JVM has one time zone for its lifetime.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Request:
    """A table to read.

    :param path: its directory.
    :param format: as Spark calls it.
    :param schema: DDL; None lets Spark find out.
    :param options: of the reader.
    """

    path: str
    format: str
    schema: str | None = None
    options: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Partitions:
    """A table to write, partitioned by one column: answered by the names of its directories.

    :param column: the column's name.
    :param type: its type as DDL.
    :param values: one row each.
    """

    path: str
    column: str
    type: str
    values: tuple[Any, ...]


@dataclass(frozen=True)
class Statement:
    """A statement of SQL: answered by its rows.

    :param sql: the statement.
    """

    sql: str


@dataclass(frozen=True)
class Meeting:
    """A point at which Spark creates one file and waits for another. Its answer is None.

    :param here: the file that is created.
    :param there: the file that is waited for.
    """

    here: Path
    there: Path

    def wait(self) -> None:
        """Wait for the other side."""
        self.here.touch()
        deadline = time.monotonic() + 200
        while not self.there.exists():
            assert time.monotonic() < deadline, f"nobody came to {self.there}"
            time.sleep(0.02)


def read(
    requests: Sequence[Request | Partitions | Statement | Meeting],
    scratch: Path,
    zone: str = "UTC",
    settings: Mapping[str, str] | None = None,
) -> list[Any]:
    """The result of reading with Spark: the rows of each table, or the error's text.

    :param zone: the time zone of the JVM and its sessions.
    :param settings: of Spark's session.
    """
    (scratch / "requests").write_bytes(pickle.dumps((list(requests), dict(settings or {}))))
    command = [sys.executable, "-m", "tests.sinks.spark_reader", str(scratch / "requests"), str(scratch / "answers")]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path, "TZ": zone, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    if "spark.jars" in (settings or {}):
        # Its jars would replace these.
        env.pop("PYSPARK_SUBMIT_ARGS", None)
    done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-30000:]
    return pickle.loads((scratch / "answers").read_bytes())


def main() -> None:
    from pyspark.sql import SparkSession

    requests, settings = pickle.loads(Path(sys.argv[1]).read_bytes())
    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.extraJavaOptions", f"-Duser.timezone={os.environ['TZ']}")
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    answers: list[Any] = []
    for request in requests:
        if isinstance(request, Partitions):
            rows = [(n, value) for n, value in enumerate(request.values)]
            frame = spark.createDataFrame(rows, f"n int, `{request.column}` {request.type}")
            frame.write.partitionBy(request.column).parquet(request.path)
            answers.append(sorted(name for name in os.listdir(request.path) if "=" in name))
            continue
        if isinstance(request, Meeting):
            request.wait()
            answers.append(None)
            continue
        if isinstance(request, Statement):
            answers.append([row.asDict(recursive=True) for row in spark.sql(request.sql).collect()])
            continue
        reader = spark.read.format(request.format).options(**request.options)
        try:
            frame = (reader.schema(request.schema) if request.schema else reader).load(request.path)
            answers.append([row.asDict(recursive=True) for row in frame.collect()])
        except Exception as error:
            answers.append(str(error))
    Path(sys.argv[2]).write_bytes(pickle.dumps(answers))
    spark.stop()


if __name__ == "__main__":
    # Under the name it is imported by, so that its values can be read.
    from tests.sinks import spark_reader

    spark_reader.main()
