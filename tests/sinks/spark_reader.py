"""Read tables with Spark: with this process's (:func:`read_here`), or with a separate one (:func:`read`).

``python -m tests.sinks.spark_reader <file with requests> <file for answers>`` is the separate process, whose JVM gets jars and
extensions that other tests must not have.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.sources.contract import INTERPRETED, applied

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = Path(__file__).parents[2]
ZONE = "spark.sql.session.timeZone"


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
class Zone:
    """The time zone of all later requests, of Spark's sessions, its JVM and its Python. Its answer is None.

    :param name: as IANA calls it.
    """

    name: str


@dataclass(frozen=True)
class EqualityDelete:
    """A commit to an Iceberg table of a file that deletes rows by their values, as Flink writes it. Its answer is None.

    :param table: the table, as Spark names it.
    :param path: the file, which exists.
    :param field: the id of the column whose values it holds.
    """

    table: str
    path: Path
    field: int

    def commit(self, spark: Any) -> None:
        """Commit it by Iceberg's Java library: Spark does not read such files of pyiceberg."""
        jvm = spark._jvm
        table = jvm.org.apache.iceberg.spark.Spark3Util.loadIcebergTable(spark._jsparkSession, self.table)
        ids = spark.sparkContext._gateway.new_array(jvm.int, 1)
        ids[0] = self.field
        file = jvm.org.apache.iceberg.FileMetadata.deleteFileBuilder(table.spec()).ofEqualityDeletes(ids)
        file = file.withPath(f"file://{self.path}").withFormat("PARQUET").withRecordCount(1)
        table.newRowDelta().addDeletes(file.withFileSizeInBytes(self.path.stat().st_size).build()).commit()


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


AnyRequest = Request | Partitions | Statement | EqualityDelete | Zone | Meeting


def read_here(spark: SparkSession, requests: Sequence[AnyRequest]) -> list[Any]:
    """Return the answers of this process's Spark: the rows of each table, or the error's text. The time zone is UTC at first."""
    with applied(spark, INTERPRETED), _kept_zones(spark):
        return [_answer(spark, request) for request in (Zone("UTC"), *requests)][1:]


@contextmanager
def _kept_zones(spark: SparkSession) -> Iterator[None]:
    """Give Spark's session, its JVM and this process the time zones back that they have now."""
    zones, own = spark.sparkContext._jvm.java.util.TimeZone, os.environ.get("TZ")  # type: ignore[union-attr]
    before = zones.getDefault()
    try:
        with applied(spark, {ZONE: "UTC"}):
            yield
    finally:
        zones.setDefault(before)
        os.environ.pop("TZ", None)
        os.environ |= {} if own is None else {"TZ": own}
        time.tzset()


def read(requests: Sequence[AnyRequest], scratch: Path, settings: Mapping[str, str]) -> list[Any]:
    """Return the answers of a separate Spark: the rows of each table, or the error's text. The time zone is UTC at first.

    :param settings: of Spark's session.
    """
    (scratch / "requests").write_bytes(pickle.dumps((list(requests), dict(settings))))
    command = [sys.executable, "-m", "tests.sinks.spark_reader", str(scratch / "requests"), str(scratch / "answers")]
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    env = {**os.environ, "PYTHONPATH": path, "TZ": "UTC", "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    # Its jars would replace those of the settings.
    env.pop("PYSPARK_SUBMIT_ARGS", None)
    done = subprocess.run(command, cwd=scratch, env=env, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-30000:]
    return pickle.loads((scratch / "answers").read_bytes())


def _answer(spark: SparkSession, request: AnyRequest) -> Any:
    if isinstance(request, Partitions):
        rows = [(n, value) for n, value in enumerate(request.values)]
        frame = spark.createDataFrame(rows, f"n int, `{request.column}` {request.type}")
        frame.write.partitionBy(request.column).parquet(request.path)
        return sorted(name for name in os.listdir(request.path) if "=" in name)
    if isinstance(request, Zone):
        zones = spark.sparkContext._jvm.java.util.TimeZone  # type: ignore[union-attr]
        zones.setDefault(zones.getTimeZone(request.name))
        spark.conf.set(ZONE, request.name)
        os.environ["TZ"] = request.name
        time.tzset()
        return None
    if isinstance(request, EqualityDelete):
        return request.commit(spark)
    if isinstance(request, Meeting):
        return request.wait()
    if isinstance(request, Statement):
        return [row.asDict(recursive=True) for row in spark.sql(request.sql).collect()]
    reader = spark.read.format(request.format).options(**request.options)
    try:
        frame = (reader.schema(request.schema) if request.schema else reader).load(request.path)
        return [row.asDict(recursive=True) for row in frame.collect()]
    except Exception as error:
        return str(error)


def main() -> None:
    from pyspark.sql import SparkSession

    requests, settings = pickle.loads(Path(sys.argv[1]).read_bytes())
    builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
    java = {"spark.driver.extraJavaOptions": f"-Duser.timezone={os.environ['TZ']}"}
    for name, value in {**INTERPRETED, **java, **settings}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    answers = [_answer(spark, request) for request in requests]
    Path(sys.argv[2]).write_bytes(pickle.dumps(answers))
    spark.stop()


if __name__ == "__main__":
    # Under the name it is imported by, so that its values can be read.
    from tests.sinks import spark_reader

    spark_reader.main()
