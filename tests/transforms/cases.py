"""Cases of transforms, and how many of them run in one Spark job."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import reduce
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from airflow_kafka_spark.transforms import chain

HEADERS = "array<struct<key:string,value:binary>>"
MOMENT = datetime(1970, 1, 1, 0, 0, 0, 789000, tzinfo=timezone.utc)
SCHEMA = (
    "key {key}, value {value}, topic string, partition int, offset bigint, timestamp timestamp, "
    f"headers {HEADERS}, __kafka_mine string, __kafka_end string"
)


@dataclass(frozen=True)
class Row:
    """A row of a record frame; values of structs are tuples."""

    value: Any = None
    key: Any = None
    topic: str | None = "test"
    partition: int | None = 0
    offset: int | None = 7
    timestamp: datetime | None = MOMENT
    headers: list[tuple[str, bytes | None]] | None = None
    mine: str = "carried"
    end: str | None = None

    @property
    def cells(self) -> tuple:
        return (
            self.key,
            self.value,
            self.topic,
            self.partition,
            self.offset,
            self.timestamp,
            self.headers,
            self.mine,
            self.end,
        )


THE_END = Row(topic=None, partition=None, offset=None, timestamp=None, end="account")


@dataclass(frozen=True)
class Case:
    """What transforms make of rows.

    :param expect: for each row that is left, its columns and what they hold; columns that are not named are not looked at.
    :param types: types of parts afterwards.
    """

    name: str
    transforms: Sequence[Any]
    rows: Sequence[Row]
    expect: Sequence[dict[str, Any]]
    value: str = "string"
    key: str = "string"
    types: dict[str, str] = field(default_factory=dict)

    def frame(self, spark: SparkSession) -> DataFrame:
        schema = SCHEMA.format(key=self.key, value=self.value)
        return spark.createDataFrame([row.cells for row in self.rows], schema).coalesce(1)


@dataclass(frozen=True)
class Outcome:
    """What came of a case: rows as JSON has them, or why there are none."""

    rows: list[dict[str, Any]]
    types: dict[str, str]
    error: Exception | None = None


def run(spark: SparkSession, cases: Sequence[Case]) -> dict[str, Outcome]:
    """All cases in one job; every case on its own, should that fail."""
    assert len({case.name for case in cases}) == len(cases)
    planned: dict[str, DataFrame] = {}
    outcomes: dict[str, Outcome] = {}
    for case in cases:
        try:
            planned[case.name] = chain(case.frame(spark), case.transforms)
        except Exception as error:
            outcomes[case.name] = Outcome([], {}, error)
    try:
        found = _collected(list(planned.items()))
    except Exception:
        found = []
        for name, frame in planned.items():
            try:
                found += _collected([(name, frame)])
            except Exception as error:
                outcomes[name] = Outcome([], {}, error)
    for name, frame in planned.items():
        if name not in outcomes:
            types = {f.name: f.dataType.simpleString() for f in frame.schema}
            outcomes[name] = Outcome([json.loads(text) for case, text in found if case == name], types)
    return outcomes


def _collected(frames: Sequence[tuple[str, DataFrame]]) -> list[tuple[str, str]]:
    texts = [
        frame.select(F.lit(name).alias("case"), F.to_json(F.struct("*"), {"ignoreNullFields": "false"}).alias("row"))
        for name, frame in frames
    ]
    return [(row["case"], row["row"]) for row in reduce(DataFrame.unionAll, texts).collect()]


def check(case: Case, outcome: Outcome) -> None:
    """The rows are those expected, the carried columns came through, and nothing has an error that was not expected."""
    if outcome.error is not None:
        raise outcome.error
    assert len(outcome.rows) == len(case.expect)
    for found, wanted, row in zip(outcome.rows, case.expect, case.rows, strict=False):
        assert {name: found.get(name, "missing") for name in wanted} == wanted
        assert found["__kafka_mine"] == row.mine
        if "__kafka_error" not in wanted:
            assert found["__kafka_error"] is None
    assert {name: outcome.types[name] for name in case.types} == case.types
    assert list(outcome.types)[:7] == ["key", "value", "topic", "partition", "offset", "timestamp", "headers"]
    assert set(outcome.types) - set(list(outcome.types)[:7]) == {"__kafka_mine", "__kafka_end", "__kafka_error"}
