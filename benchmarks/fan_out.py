"""Kafka -> two Parquet tables: one window with ``Filter(to=<sink>)`` against two windows, each with a filter."""

from __future__ import annotations

import shutil
from typing import Any

from benchmarks.bench import Stand, compare, operate


def run(stand: Stand) -> None:
    from airflow_kafka_spark.sinks import FilesSink
    from airflow_kafka_spark.transforms import Condition, Filter

    even, odd = Condition("id % 2 = 0"), Condition("id % 2 = 1")
    half = stand.records // 2

    def place(name: str) -> FilesSink:
        directory = stand.directory / name
        shutil.rmtree(directory, ignore_errors=True)
        return FilesSink(path=str(directory))

    def ours(name: str, turn: int, *transforms: Any) -> dict[str, Any]:
        report = operate(stand, name, turn, place(name), transforms=transforms)
        assert report["records_written"] == stand.records - half, report
        return report

    def fan_out(turn: int) -> None:
        report = ours("fan-out", turn, Filter(predicate=odd, to=place("fan-out-odd")))
        assert report["records_routed"] == half, report

    def two(turn: int) -> None:
        ours("two-even", turn, Filter(predicate=odd))
        report = operate(stand, "two-odd", turn, place("two-odd"), transforms=(Filter(predicate=even),))
        assert report["records_written"] == half, report

    def one(turn: int) -> None:
        operate(stand, "one", turn, place("one"))

    base = "two windows, each with a filter"
    compare(
        stand,
        "Two sinks",
        {base: two, "one window, Filter(to=<sink>)": fan_out, "one window into one sink, no transform": one},
        base=base,
    )
