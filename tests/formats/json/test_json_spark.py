"""Json follows Spark's from_json, and differs where its docstring says so; DDL is read as Spark reads it."""

from __future__ import annotations

import random
from datetime import date, datetime, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from airflow_kafka_spark.errors import SchemaInvalid
from airflow_kafka_spark.formats import Json
from airflow_kafka_spark.formats.types import _parse_json_value, parse_ddl
from tests.formats.json.test_json_meaning import GOOD

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DIFFERENT = {
    # Spark writes JSON text anew where a string was asked for.
    ("string", "1.10"): "1.1",
    ("string", "1E5"): "100000.0",
    ("string", '{ "x" : 1.10, "y": [null ] }'): '{"x":1.1,"y":[null]}',
    ("string", r'["\u0041", {}]'): '["A",{}]',
    # The same number; Spark reads it as an integer first.
    ("double", "-0"): 0.0,
}
"""Spark's results for cases in which Json differs on purpose."""

SILENT = [
    ("decimal(5,2)", "1.235", "1.24"),
    ("double", "1e400", "inf"),
    ("float", "1e39", "inf"),
    ("date", '"2026-11-05T07:08:09Z"', "2026-11-05"),
    ("timestamp", '"2026-11-05T07:08:09.1234567Z"', "2026-11-05 07:08:09.123456+00:00"),
    ("int NOT NULL", "null", "None"),
    ("decimal(38,10)", '"1,5"', "15.0000000000"),
]
"""Cases in which Spark silently changes a value, and Json refuses it."""

SCHEMAS = [
    "id bigint NOT NULL COMMENT 'x', customer STRING, amount Decimal(12,2)",
    "a int, b integer, c long, d short, e byte, f real, g dec, h numeric(3)",
    "i timestamp_ltz, j timestamp_ntz, k smallint, l tinyint, m string, n double, o boolean",
    "a: int, b: struct<c: array<map<string, double>>, `d e`: date NOT NULL>",
    "struct<a:int,b:binary>",
    "`a``b` int, `1` boolean, date date, struct int, not_null float",
    "a decimal( 5 , 5 ), b char(3), c varchar(7)",
    "a int COMMENT \"two words\" , b int not null comment ''",
    "a map<string,struct<x:int COMMENT 'c'>>",
    "a",
    "a int,",
    "a foo",
    "a array<int",
    "a decimal(39,0)",
    "a decimal(3,4)",
    "a struct<b>",
    "a-b int",
    "a varchar",
    "a bigint(20)",
    "12 int",
    "a int b int",
    "a map<string>",
]


Said = dict[tuple[str, str], Any]


@pytest.fixture(scope="module")
def said(spark: SparkSession) -> Said:
    """Return the results of Spark's ``from_json`` for all values of this module, by type and text, from one job."""
    from pyspark.sql import functions as F

    values = [*((t, v) for t, v, _ in GOOD if t != "varchar(3)"), *((t, v) for t, v, _ in SILENT)]
    kinds = {t: f"c{n}" for n, t in enumerate(sorted({t for t, _ in values}))}
    frame = spark.createDataFrame([(f'{{"{kinds[t]}":{v}}}'.encode(),) for t, v in values], "v binary").coalesce(1)
    read = F.from_json(F.col("v").cast("string"), ", ".join(f"{c} {t}" for t, c in kinds.items()))
    rows = frame.select(read.alias("j")).toArrow().column("j").to_pylist()
    return {(t, v): row[kinds[t]] for (t, v), row in zip(values, rows, strict=True)}


def test_follows_spark_for_every_good_value_but_the_documented_ones(said: Said) -> None:
    differences = {}
    for data_type, text, _ in (case for case in GOOD if case[0] != "varchar(3)"):
        decoded = Json(f"a {data_type}").make_decoder().decode([f'{{"a":{text}}}'.encode()])
        ours = decoded.batch.to_pylist()[0]["a"]
        if repr(ours) != repr(said[data_type, text]):
            differences[data_type, text] = said[data_type, text]
    assert differences == DIFFERENT


@pytest.mark.parametrize(("data_type", "text", "spark_says"), SILENT, ids=[f"{t}={v}" for t, v, _ in SILENT])
def test_refuses_what_spark_changes_silently(said: Said, data_type: str, text: str, spark_says: str) -> None:
    assert str(said[data_type, text]) == spark_says
    decoded = Json(f"a {data_type}").make_decoder().decode([f'{{"a":{text}}}'.encode()])
    assert [at for at, _ in decoded.bad] == [0]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_ddl_is_read_as_spark_reads_it(spark: SparkSession, schema: str) -> None:
    from pyspark.errors import PySparkException
    from pyspark.sql.types import StructType

    try:
        wanted = StructType.fromDDL(schema).jsonValue()
    except PySparkException:
        with pytest.raises(SchemaInvalid):
            parse_ddl(schema)
    else:
        assert parse_ddl(schema) == _parse_json_value(wanted).fields


def test_floats_and_nested_values_are_written_in_arrow_as_spark_writes_them(spark: SparkSession) -> None:
    """With Java 17, the digits of some floats differ: another text of the same number."""
    chance = random.Random(20261125)
    floats = [0.0, -0.0, 1e-3, 1e7, 9_999_999.0, 0.00099, 1e22, -123456789.0, float("nan"), float("inf"), -float("inf"), None]
    texts = ["", 'a"\\\x01\x1fé', None]

    def some() -> dict[str, Any]:
        return {
            "f": chance.choice([*floats, round(chance.uniform(-1000, 1000), 3), chance.random()]),
            "small": chance.choice([*floats[:6], 0.1, -2.5, None]),
            "s": chance.choice(
                [None, {"a": chance.choice(texts), "d": chance.choice([None, Decimal("0.0000001000"), Decimal("-1.5")])}]
            ),
            "l": chance.choice([None, [], [chance.choice(floats), None]]),
            "m": chance.choice([None, [], [("k", datetime(2026, 1, 2, tzinfo=timezone.utc)), ('"', None)]]),
            "structs": chance.choice(
                [
                    None,
                    [None, {"day": date(1, 1, 1), "raw": b"\xff", "at": datetime(999, 1, 2, tzinfo=timezone.utc)}],
                    [{"day": None}],
                ]
            ),
        }

    of_struct = pa.struct([("day", pa.date32()), ("raw", pa.binary()), ("at", pa.timestamp("us", "UTC"))])
    schema = pa.schema(
        [
            ("f", pa.float64()), ("small", pa.float32()), ("s", pa.struct([("a", pa.string()), ("d", pa.decimal128(20, 10))])),
            ("l", pa.list_(pa.float64())), ("m", pa.map_(pa.string(), pa.timestamp("us", "UTC"))),
            ("structs", pa.list_(of_struct)),
        ]
    )  # fmt: skip
    rows = pa.Table.from_pylist([some() for _ in range(500)], schema)
    wanted = [bytes(row[0]) for row in spark.createDataFrame(rows).select(Json().encode(schema.names)).collect()]
    encoder = Json().make_encoder([(name, "other") for name in schema.names])
    assert encoder is not None
    (batch,) = rows.combine_chunks().to_batches()
    found = encoder.encode(dict(zip(schema.names, batch.columns, strict=True))).to_pylist()
    different = [pair for pair in zip(found, wanted, strict=True) if pair[0] != pair[1]]
    assert not different, different[0]
