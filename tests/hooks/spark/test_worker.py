"""Spark's Python workers: the end of a task's rows, and the reuse of freed memory."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Iterator

import pyarrow as pa
import pytest

from airflow_kafka_spark.errors import RowsCutOff
from airflow_kafka_spark.hooks.spark.hook import SparkHook
from airflow_kafka_spark.hooks.spark.tasks.worker import require_end_of_stream
from airflow_kafka_spark.jobs.watch import run_per_split
from tests.support.pipelines import SPARK

ROWS = 100_000


def count(directory: str):
    """A task that notes how its rows ended, like a task that commits itself."""

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = 0
        try:
            for batch in require_end_of_stream(batches):
                rows += batch.num_rows
            end = "whole"
        except Exception as error:
            end = type(error).__name__
        with open(os.path.join(directory, f"{end}-{rows}-{os.urandom(4).hex()}"), "w"):
            pass
        yield pa.RecordBatch.from_pydict({"rows": [rows]})

    return task


@pytest.fixture
def session(monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", SPARK)
    with SparkHook("spark_default", conf={}, app_name="handover").open_session() as made:
        yield made


def ends(directory) -> list[tuple[str, int]]:
    return sorted((name, int(rows)) for name, rows, _ in (path.name.split("-") for path in directory.iterdir()))


def test_rows_that_end_are_whole(session, tmp_path):
    for partitions in (1, 3):
        session.range(0, ROWS, 1, partitions).mapInArrow(count(str(tmp_path)), "rows long").collect()
    assert [end for end, _ in ends(tmp_path)] == ["whole"] * 4
    assert sum(rows for _, rows in ends(tmp_path)) == 2 * ROWS
    session.range(0, ROWS, 1, 1).where("id < 0").mapInArrow(count(str(tmp_path)), "rows long").collect()
    assert ("whole", 0) in ends(tmp_path)


@pytest.mark.parametrize("at", [1, 25_000, 60_000, ROWS - 1])
def test_rows_that_are_cut_off_by_a_failure_in_the_jvm_are_never_whole(session, tmp_path, at):
    failing = session.range(0, ROWS, 1, 1).selectExpr(f"if(id = {at}, raise_error('broken'), id) AS id")
    with pytest.raises(Exception, match="broken"):
        failing.mapInArrow(count(str(tmp_path)), "rows long").collect()
    # Spark may have ended the worker before it could note anything.
    assert all(end != "whole" and rows < ROWS for end, rows in ends(tmp_path)), ends(tmp_path)


@pytest.mark.skipif(importlib.metadata.version("pyspark").startswith("3."), reason="with Spark 3, no worker of tests is reused")
def test_a_worker_reads_one_split_after_the_other(session):
    """A new worker imports drivers of databases again, and gets new memory: 0.3 seconds of a core for a chunk of a snapshot."""

    class NameWorker:
        """A task that returns the number of its split, and the id of the process in which it runs. Workers do not import it."""

        needs = ()

        def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                found = [f"{number} {os.getpid()}" for number in batch.column(0).to_pylist()]
                yield pa.RecordBatch.from_arrays([pa.array(found, pa.string())], ["result"])

    cores = session.sparkContext.defaultParallelism
    rows = [row.split() for row in run_per_split(session.sparkContext, NameWorker(), 3 * cores).collect()]
    assert sorted(int(number) for number, _ in rows) == list(range(3 * cores))
    assert len({process for _, process in rows}) <= cores


def test_workers_search_no_modules_in_the_jar_of_sparks_core(session):
    (found,) = session.sparkContext.parallelize([0], 1).mapPartitions(lambda _: [list(sys.path)]).collect()
    assert "pyspark.zip" in {os.path.basename(path) for path in found}
    assert not [path for path in found if path.endswith(".jar")]


def test_outside_of_spark_the_end_of_rows_is_unknown():
    with pytest.raises(RowsCutOff, match="cannot be determined") as error:
        list(require_end_of_stream(iter([1, 2])))
    assert not error.value.known


# A thread allocates megabytes, as with each fetch, and another one frees them; the page faults of that are printed.
COUNT_FAULTS = """
import resource
from concurrent.futures import ThreadPoolExecutor
from airflow_kafka_spark.hooks.spark.tasks.worker import keep_freed_memory
print(keep_freed_memory())
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def allocate():
    return [bytes(100_000) for _ in range(200)]
with ThreadPoolExecutor(1) as pool:
    for _ in range(5):
        before = faults()
        kept = pool.submit(allocate).result()
        del kept
        last = faults() - before
print(last)
"""


@pytest.mark.skipif(not hasattr(os, "confstr") or "glibc" not in (os.confstr("CS_GNU_LIBC_VERSION") or ""), reason="no glibc")
@pytest.mark.parametrize(
    "more, is_set, keeps",
    [
        ({}, "True", True),
        ({"MALLOC_TRIM_THRESHOLD_": "65536"}, "True", False),
        ({"GLIBC_TUNABLES": "glibc.malloc.x=1"}, "False", False),
    ],
    ids=["default", "a setting of the user", "tunables of the user"],
)
def test_freed_memory_is_used_again_unless_the_user_has_settings(more: dict[str, str], is_set: str, keeps: bool):
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"}
    done = subprocess.run([sys.executable, "-c", COUNT_FAULTS], env={**env, **more}, capture_output=True, text=True, check=True)
    said, faults = done.stdout.split()
    assert said == is_set
    assert (int(faults) < 200) is keeps, faults
