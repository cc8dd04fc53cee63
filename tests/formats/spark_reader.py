"""Asks Spark: run as a program, so that its session is nobody else's. Questions come and answers go as pickles."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any


def ask(schema: str, records: list[bytes], ddl: list[str]) -> tuple[list[dict[str, Any]], list[Any]]:
    """What Spark's ``from_json`` makes of records, and what its parser makes of schemas.

    :param schema: how to read the records.
    :param records: the records.
    :param ddl: schemas in DDL.
    :return: for each record its row, and for each DDL its ``jsonValue``, or None when Spark refuses it.
    """
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {
        "PYTHONPATH": str(root / "provider"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYSPARK_PYTHON": sys.executable,
    }
    done = subprocess.run(
        [sys.executable, __file__],
        input=pickle.dumps((schema, records, ddl)),
        capture_output=True,
        env=environment,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return pickle.loads(done.stdout)


def main() -> None:
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as f
    from pyspark.sql.types import StructType

    schema, records, ddl = pickle.load(sys.stdin.buffer)
    settings = {"spark.ui.enabled": "false", "spark.sql.session.timeZone": "UTC", "spark.sql.shuffle.partitions": "1"}
    session = SparkSession.builder.master("local[1]").config(map=settings).getOrCreate()
    frame = session.createDataFrame([(bytearray(r),) for r in records], "v binary").coalesce(1)
    rows = [row["j"] for row in frame.select(f.from_json(f.col("v").cast("string"), schema).alias("j")).toArrow().to_pylist()]
    parsed = []
    for text in ddl:
        try:
            parsed.append(StructType.fromDDL(text).jsonValue())
        except Exception:
            parsed.append(None)
    session.stop()
    sys.stdout.buffer.write(pickle.dumps((rows, parsed)))


if __name__ == "__main__":
    main()
