"""Kafka -> Parquet: the operator's whole life against plain Spark, which is at-least-once at best."""

from __future__ import annotations

import shutil
from typing import Any

from benchmarks.bench import Stand, compare, operate, plain_spark


def run(stand: Stand) -> None:
    from airflow_kafka_spark.sinks import FilesSink

    def plain(turn: int) -> None:
        place = stand.directory / "plain"
        shutil.rmtree(place, ignore_errors=True)
        plain_spark(stand).write.parquet(str(place))

    def ours(turn: int, **options: Any) -> None:
        place = stand.directory / "ours"
        shutil.rmtree(place, ignore_errors=True)
        operate(stand, f"files{''.join(options.values())}", turn, FilesSink(path=str(place)), **options)

    compare(
        stand,
        "Kafka -> Parquet",
        {
            "plain Spark: from_json, write.parquet": plain,
            "KafkaToSinkOperator, FilesSink": ours,
            'KafkaToSinkOperator, FilesSink, read_with="spark"': lambda turn: ours(turn, read_with="spark"),
        },
        base="plain Spark: from_json, write.parquet",
    )
    import pyarrow.dataset as ds

    ids = ds.dataset(str(stand.directory / "ours"), partitioning="hive").to_table(columns=["id"])["id"]
    assert len(ids) == len(ids.unique()) == stand.records
