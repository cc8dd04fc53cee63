"""Spark's end of rows: told from an end that is none."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pyarrow as pa
import pytest

from airflow_kafka_spark.errors import RowsCutOff
from airflow_kafka_spark.hooks.kafka.tasks.end_of_stream import require_end_of_stream
from airflow_kafka_spark.hooks.spark.hook import SparkHook
from tests.support.pipelines import SPARK

ROWS = 100_000


def count(directory: str):
    """A task that notes how its rows ended, as one that commits by itself would do."""

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
    with SparkHook("spark_default", conf={}, app_name="handover").session() as made:
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


def test_outside_of_spark_nobody_can_tell():
    with pytest.raises(RowsCutOff, match="cannot be determined") as error:
        list(require_end_of_stream(iter([1, 2])))
    assert not error.value.known
