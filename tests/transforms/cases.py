"""Cases of transforms, and their results in Spark and in Arrow."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timezone
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import _parse_datatype_string

from airflow_kafka_spark.jobs.arrow import Unknown, make_arrow_schema, make_program
from airflow_kafka_spark.jobs.tasks.arrow import Program
from airflow_kafka_spark.transforms import apply_chain

SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "2",
    # Rows that are made here are computed by a job, as rows that are read are, in one partition.
    "spark.sql.optimizer.excludedRules": "org.apache.spark.sql.catalyst.optimizer.ConvertToLocalRelation",
    "spark.sql.leafNodeDefaultParallelism": "1",
}
"""A session's settings for these cases."""

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
    """Rows before and after transforms.

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

    def table(self) -> pa.Table:
        """Return the rows in Arrow."""
        return table_of([row.cells for row in self.rows], SCHEMA.format(key=self.key, value=self.value))

    def frame(self, spark: SparkSession) -> DataFrame:
        """Return the rows in Spark."""
        return spark.createDataFrame(self.table())


def table_of(rows: Sequence[tuple], ddl: str) -> pa.Table:
    """Return rows in Arrow; values of structs are tuples, and those of maps are dicts."""
    schema = make_arrow_schema(_parse_datatype_string(ddl))
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    arrays = [pa.array([_for_arrow(cell, f.type) for cell in cells], f.type) for f, cells in zip(schema, columns, strict=True)]
    return pa.Table.from_arrays(arrays, schema=schema)


def _for_arrow(value: Any, kind: pa.DataType) -> Any:
    """Return a value with a struct's fields by name, as pyarrow wants them."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {kind.field(n).name: _for_arrow(cell, kind.field(n).type) for n, cell in enumerate(value)}
    if pa.types.is_list(kind):
        return [_for_arrow(item, kind.value_type) for item in value]
    return list(value.items()) if pa.types.is_map(kind) else value


@dataclass(frozen=True)
class Outcome:
    """The result or the error of a case in Spark, and Arrow's program for it.

    :ivar given: the rows that the transforms were applied to.
    :ivar made: Spark's result.
    :ivar types: Spark's names of the columns' types.
    :ivar program: the program that computes the result in Arrow; None if a part of the case is possible in Spark only.
    """

    given: pa.Table
    made: pa.Table | None = None
    types: dict[str, str] = field(default_factory=dict)
    program: Program | None = None
    error: Exception | None = None

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return Spark's result, as JSON."""
        assert self.made is not None
        kinds = {f.name: f.type for f in self.made.schema}
        return [{name: as_json(cell, kinds[name]) for name, cell in row.items()} for row in self.made.to_pylist()]


def as_json(value: Any, kind: pa.DataType) -> Any:
    """Return a value as its JSON has it; a decimal is not changed."""
    if pa.types.is_map(kind) and value is not None:
        return {key: as_json(item, kind.item_type) for key, item in value}
    if isinstance(value, dict):
        return {f.name: as_json(value[f.name], f.type) for f in kind}
    if isinstance(value, list):
        return [as_json(item, kind.value_type) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime):
        precision = "microseconds" if value.microsecond % 1000 else "milliseconds"
        return value.isoformat(timespec=precision).replace("+00:00", "Z")
    return value.isoformat() if isinstance(value, date) else value


def run(spark: SparkSession, cases: Sequence[Case]) -> dict[str, Outcome]:
    """Return the outcome of each case; its chain is analysed once."""
    assert len({case.name for case in cases}) == len(cases)
    return {case.name: _outcome(spark, case) for case in cases}


def _outcome(spark: SparkSession, case: Case) -> Outcome:
    given = case.table()
    try:
        frame = apply_chain(spark.createDataFrame(given), case.transforms)
        made, types = frame.toArrow(), {f.name: f.dataType.simpleString() for f in frame.schema}
    except Exception as error:
        return Outcome(given, error=error)
    try:
        program = make_program(frame, given.schema)
    except Unknown:
        program = None
    return Outcome(given, made, types, program)


def check(case: Case, outcome: Outcome) -> None:
    """Check that the rows are those expected, that the carried columns came through, and that nothing has an error that was not
    expected."""
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
