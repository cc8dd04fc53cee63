"""Kafka -> Parquet, Delta and Iceberg: the operator's whole life against plain Spark, which is at-least-once at best."""

from __future__ import annotations

import json
import os
import shutil
from typing import Any

from benchmarks.bench import Stand, compare, operate, plain_spark


def run(stand: Stand) -> None:
    from airflow_kafka_spark.sinks import DeltaSink, FilesSink, IcebergSink

    def plain(turn: int) -> None:
        place = stand.directory / "plain"
        shutil.rmtree(place, ignore_errors=True)
        plain_spark(stand).write.parquet(str(place))

    def ours(turn: int, **options: Any) -> None:
        place = stand.directory / "ours"
        shutil.rmtree(place, ignore_errors=True)
        operate(stand, f"files{''.join(options.values())}", turn, FilesSink(path=str(place)), **options)

    def delta(turn: int) -> None:
        place = stand.directory / "delta"
        shutil.rmtree(place, ignore_errors=True)
        operate(stand, "delta", turn, DeltaSink(str(place)))

    def iceberg(turn: int) -> None:
        place = stand.directory / "iceberg"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        extra = {"type": "sql", "uri": f"sqlite:///{place}/catalog.db", "warehouse": f"file://{place}"}
        os.environ["AIRFLOW_CONN_LAKE"] = json.dumps({"conn_type": "iceberg", "extra": extra})
        operate(stand, "iceberg", turn, IcebergSink("shop.orders", "lake", compression="snappy"))

    compare(
        stand,
        "Kafka -> Parquet",
        {
            "plain Spark: from_json, write.parquet": plain,
            "KafkaToSinkOperator, FilesSink": ours,
            'KafkaToSinkOperator, FilesSink, read_with="spark"': lambda turn: ours(turn, read_with="spark"),
            "KafkaToSinkOperator, DeltaSink": delta,
            "KafkaToSinkOperator, IcebergSink": iceberg,
        },
        base="plain Spark: from_json, write.parquet",
    )
    import pyarrow.dataset as ds

    ids = ds.dataset(str(stand.directory / "ours"), partitioning="hive").to_table(columns=["id"])["id"]
    assert len(ids) == len(ids.unique()) == stand.records
    from deltalake import DeltaTable
    from pyiceberg.catalog import load_catalog

    with load_catalog("lake", **json.loads(os.environ["AIRFLOW_CONN_LAKE"])["extra"]) as catalog:
        tables = [catalog.load_table("shop.orders").scan().to_arrow(), DeltaTable(stand.directory / "delta").to_pyarrow_table()]
    for table in tables:
        assert len(table) == len(table["id"].unique()) == stand.records
