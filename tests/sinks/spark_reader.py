"""Reads tables with a Spark of its own: ``python -m tests.sinks.spark_reader <file with requests> <file for answers>``.

In a process of its own, since a JVM has one time zone for life.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
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


def read(requests: Sequence[Request | Partitions], scratch: Path, zone: str = "UTC") -> list[Any]:
    """The result of reading with Spark: the rows of each table, or the error's text.

    :param zone: the time zone of the JVM and its sessions.
    """
    (scratch / "requests").write_bytes(pickle.dumps(list(requests)))
    command = [sys.executable, "-m", "tests.sinks.spark_reader", str(scratch / "requests"), str(scratch / "answers")]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path, "TZ": zone, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return pickle.loads((scratch / "answers").read_bytes())


def main() -> None:
    from pyspark.sql import SparkSession

    requests = pickle.loads(Path(sys.argv[1]).read_bytes())
    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.driver.extraJavaOptions", f"-Duser.timezone={os.environ['TZ']}").getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    answers: list[Any] = []
    for request in requests:
        if isinstance(request, Partitions):
            rows = [(n, value) for n, value in enumerate(request.values)]
            frame = spark.createDataFrame(rows, f"n int, `{request.column}` {request.type}")
            frame.write.partitionBy(request.column).parquet(request.path)
            answers.append(sorted(name for name in os.listdir(request.path) if "=" in name))
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
