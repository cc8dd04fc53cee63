"""Functions that replace Arrow's. With a release of Arrow that has no error, these tests also pass without them: ``make matrix``
runs them with the oldest one."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pytest

import airflow_kafka_spark
from airflow_kafka_spark.formats.tasks.kernels import if_else


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.int64()], ids=str)
def test_a_null_beside_a_slice_changes_no_value(kind):
    chance = random.Random(7)
    values = [None, 1, 2, 3] if kind == pa.int64() else [None, *(pa.scalar(t).cast(kind).as_py() for t in ("", " ", "1", "long"))]
    for _ in range(300):
        size = chance.randint(1, 40)
        start = chance.randint(0, size - 1)
        column = pa.array(chance.choices(values, k=size), kind).slice(start)
        mask = pa.array(chance.choices([True, False, None], k=size), pa.bool_()).slice(start)
        for null in (None, pa.scalar(None, kind)):
            left, right = if_else(mask, column, null), if_else(mask, null, column)
            for made, wanted in ((left, True), (right, False)):
                made.validate(full=True)
                pairs = zip(mask.to_pylist(), column.to_pylist(), strict=True)
                assert made.to_pylist() == [value if holds is wanted else None for holds, value in pairs]


def test_no_module_calls_a_function_of_arrow_that_is_replaced():
    root = Path(airflow_kafka_spark.__file__).parent
    found = [path.name for path in root.rglob("*.py") if "pc.if_else(" in path.read_text(encoding="utf-8")]
    assert found == ["kernels.py"]
