"""A files sink's directory, read by Spark, DuckDB, pandas and Arrow without special options: exactly the written values."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.dataset
import pytest
from pyspark.sql import SparkSession

from airflow_kafka_spark.sinks.files.sink import FilesSink
from airflow_kafka_spark.sinks.storage.store import make_partition_directory
from airflow_kafka_spark.sinks.storage.tasks.write import format_partition_values
from tests.sinks import spark_reader
from tests.sinks.attempt import apply
from tests.sinks.cases import read_arrow
from tests.sinks.feed import SCHEMA, Feed, row
from tests.sinks.oracle import same_multiset
from tests.sources.contract import spark_session

PARTITIONED = ("flag", "day_of_week", "day")
WITH_WEEKDAY = SCHEMA.append(pa.field("day_of_week", pa.string()))
FLAT = pa.schema([f for f in SCHEMA if f.name not in ("raw", "tags", "place", "counts")])
TABLES: dict[str, dict[str, Any]] = {
    "parquet": {},
    "parquet-partitioned": {"partition_by": PARTITIONED, "options": {"max_open_files": 3}},
    **{f"parquet-{codec}": {"compression": codec} for codec in ("none", "gzip", "zstd", "lz4")},
    "orc": {},
    "orc-partitioned": {"partition_by": PARTITIONED},
    **{f"orc-{codec}": {"compression": codec} for codec in ("none", "zlib", "snappy", "lz4")},
    "orc-instant": {"options": {"timestamps": "instant"}},
    "json": {},
    "json-gzip": {"compression": "gzip"},
    "json-partitioned": {"partition_by": PARTITIONED},
    "csv": {},
    "csv-gzip": {"compression": "gzip", "options": {"delimiter": ";"}},
    "csv-partitioned": {"partition_by": PARTITIONED},
}
DDL = {
    "id": "bigint", "name": "string", "amount": "decimal(12,2)", "wide": "decimal(38,10)", "placed_at": "timestamp",
    "wall_clock": "timestamp_ntz", "day": "date", "flag": "boolean", "tiny": "tinyint", "small": "smallint", "medium": "int",
    "ratio": "double", "share": "float", "raw": "binary", "tags": "array<string>", "place": "struct<city:string,zip:int>",
    "counts": "map<string,bigint>", "day_of_week": "string", "window": "string",
}  # fmt: skip
# The options of CSV that Spark needs (docs/sinks.md): quotes are doubled, a text may continue in the next line, and an empty text
# is not null: only a missing one is.
SPARK_CSV = {"header": "true", "escape": '"', "multiLine": "true", "nullValue": "\0"}


@dataclass(frozen=True)
class Table:
    """A table of four windows, one of them empty and one with empty splits."""

    sink: FilesSink
    schema: pa.Schema
    expected: list[dict[str, Any]]

    @property
    def path(self) -> Path:
        return self.sink.directory

    def rows(self, table: pa.Table) -> list[dict[str, Any]]:
        """Return an Arrow table's rows in the expected types."""
        return table.select(self.schema.names).cast(self.schema).to_pylist()


def of_few_days(i: int) -> dict[str, Any]:
    """Return a row whose day is one of two, or none: a table that is partitioned by all days has a file for each row."""
    return {**row(i), "day": (dt.date(1900, 1, 1), dt.date(2173, 10, 14), None)[i % 3]}


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Table]:
    here = tmp_path_factory.mktemp("lake")
    made = {}
    for name, options in TABLES.items():
        format = name.split("-")[0]
        schema = FLAT if format == "csv" else SCHEMA
        schema = schema.append(pa.field("day_of_week", pa.string())) if "partitioned" in name else schema
        sink, feed = FilesSink(str(here / name), format=format, **options), Feed(schema)
        assert sink.validate(feed.shape) == []
        values = of_few_days if "partitioned" in name else row
        counts = ((40, 25, 33), None, (0, 5, 0), (100, 1, 20))
        jobs = [feed.empty() if count is None else feed.next(*count, values=values) for count in counts]
        for job in jobs:
            apply(sink, job)
        expected = [{**line, "day_of_week": line.get("day_of_week") or None} for job in jobs for line in job.expected]
        made[name] = Table(sink, schema, [{n: line[n] for n in schema.names} for line in expected])
    return made


ODD = [
    *("plain", "", None, "a/b", "a=b", "100%", "%2F", "ü ö", "日本", "x y", "a:b*c?d", "[{^}]", "q'\"q", "back\\slash", "#tag"),
    *("\x01\x1f\x7f", "~.-_", ".", "..", "_x"),
]
PARTITIONS = {
    "string": (pa.string(), ODD),
    "boolean": (pa.bool_(), [True, False, None]),
    "int": (pa.int32(), [0, -5, 2147483647, None]),
    "date": (pa.date32(), [dt.date(2026, 11, 20), dt.date(1, 1, 1), None]),
    "decimal(12,2)": (pa.decimal128(12, 2), [Decimal("0.00"), Decimal("-1.50"), Decimal("1234567890.12"), None]),
}
ELSEWHERE = "America/New_York"


@dataclass(frozen=True)
class BySpark:
    """The answers of Spark.

    :param rows: of each table.
    :param directories: that Spark has made of :data:`PARTITIONS`.
    :param elsewhere: ids and instants that it reads from a table of each format in another time zone.
    """

    rows: dict[str, Any]
    directories: dict[str, list[str]]
    elsewhere: dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def spark() -> SparkSession:
    return spark_session()


@pytest.fixture(scope="module")
def by_spark(tables: dict[str, Table], spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> BySpark:
    """Let Spark read all tables, and write rows of its own."""

    def request(name: str, table: Table) -> spark_reader.Request:
        format = table.sink.format
        ddl = ", ".join(f"{n} {DDL[n]}" for n in [*table.schema.names, "window"])
        # ORC's own schema is used: Spark reads its timestamps as nothing but `timestamp`.
        ddl = ddl.replace("timestamp_ntz", "timestamp") if format == "orc" else ddl
        given = None if name in ("parquet", "orc", "orc-instant") else ddl
        options = {**SPARK_CSV, "sep": table.sink.options.get("delimiter", ",")} if format == "csv" else {}
        return spark_reader.Request(str(table.path), format, given, options)

    here, formats = tmp_path_factory.mktemp("spark"), ("parquet", "json", "csv", "orc")
    partitions = [spark_reader.Partitions(str(here / t), "a col/1", t, tuple(v)) for t, (_, v) in PARTITIONS.items()]
    ddl = {name: "id bigint, placed_at timestamp" for name in formats}
    ddl["csv"] = ", ".join(f"{n} {DDL[n]}" for n in tables["csv"].schema.names)
    elsewhere = [spark_reader.Request(str(tables[n].path), n, ddl[n], SPARK_CSV if n == "csv" else {}) for n in formats]
    first = [request(*item) for item in tables.items()]
    answers = iter(spark_reader.read_here(spark, [*first, *partitions, spark_reader.Zone(ELSEWHERE), *elsewhere]))
    rows, directories = dict(zip(tables, answers, strict=False)), dict(zip(PARTITIONS, answers, strict=False))
    assert next(answers) is None
    return BySpark(rows, directories, dict(zip(formats, answers, strict=True)))


def from_spark(line: dict[str, Any], schema: pa.Schema) -> dict[str, Any]:
    """Return a row of Spark in Arrow's Python values. Its process was in UTC."""
    found = dict(line)
    for name in schema.names:
        value = found[name]
        if isinstance(value, bytearray):
            found[name] = bytes(value)
        elif name == "counts" and value is not None:
            found[name] = sorted(value.items())
        elif name == "placed_at" and value is not None:
            found[name] = value.replace(tzinfo=dt.timezone.utc)
    return found


@pytest.mark.parametrize("name", [n for n in TABLES if n != "orc-instant"])
def test_spark_reads_the_same_values_back(tables, by_spark, name):
    table, answer = tables[name], by_spark.rows[name]
    assert isinstance(answer, list), answer
    windows = Counter(line.pop("window") for line in answer)
    assert windows == {f"shop.orders_to_warehouse-000000000{n}": count for n, count in ((1, 98), (3, 5), (4, 121))}
    assert same_multiset(table.expected, [from_spark(line, table.schema) for line in answer]) == 224


def test_partition_directories_are_named_as_spark_names_them(by_spark):
    for name, (kind, values) in PARTITIONS.items():
        ours = {make_partition_directory("a col/1", v) for v in format_partition_values(pa.array(values, kind))}
        assert sorted(ours) == by_spark.directories[name], name


@pytest.mark.parametrize("name", ["parquet", "json", "csv"])
def test_instants_do_not_depend_on_the_time_zone_of_spark(tables, by_spark, name):
    zone = ZoneInfo(ELSEWHERE)
    found = [(r["id"], r["placed_at"] and r["placed_at"].replace(tzinfo=zone)) for r in by_spark.elsewhere[name]]
    assert Counter(found) == Counter((line["id"], line["placed_at"]) for line in tables[name].expected)
    assert len(found) == 224


def test_orc_instants_are_read_as_wall_clocks_of_the_time_zone_of_spark(tables, by_spark):
    """Spark reads its own ORC files of another time zone like this, so docs/sinks.md asks for UTC in Spark."""
    found = [(r["id"], r["placed_at"]) for r in by_spark.elsewhere["orc"]]
    expected = [(line["id"], line["placed_at"] and line["placed_at"].replace(tzinfo=None)) for line in tables["orc"].expected]
    assert Counter(found) == Counter(expected)


def test_orc_instants_are_right_for_arrow_and_unreadable_for_spark(tables, by_spark):
    """Spark reads only one of ORC's two types of timestamps. The other one is therefore not the default."""
    assert "timestamp with local time zone" in by_spark.rows["orc-instant"] or "Syntax error" in by_spark.rows["orc-instant"]
    table = pa.dataset.dataset(tables["orc-instant"].path, format="orc", partitioning="hive").to_table()
    assert table.schema.field("placed_at").type.tz == "UTC"
    same_multiset(tables["orc-instant"].expected, tables["orc-instant"].rows(table))


@pytest.mark.parametrize("name", [n for n in TABLES if not n.startswith("json") and n != "csv-gzip"])
def test_arrow_reads_the_same_values_back(tables, name):
    table = tables[name]
    assert same_multiset(table.expected, read_arrow(table.path, table.sink, table.schema)) == 224


@pytest.mark.parametrize("name", [n for n in TABLES if n.startswith("parquet")])
def test_duckdb_reads_the_same_values_back_from_parquet(tables, name):
    table = tables[name]
    types = "hive_types={'flag': boolean, 'day_of_week': varchar, 'day': date}, " if "partitioned" in name else ""
    found = duckdb.sql(
        f"SELECT * FROM read_parquet('{table.path}/**/*.parquet', {types} hive_partitioning=true)"
    ).to_arrow_table()
    assert set(found["window"].to_pylist()) == {f"shop.orders_to_warehouse-000000000{n}" for n in (1, 3, 4)}
    assert same_multiset(table.expected, table.rows(found)) == 224


DUCKDB = {
    "string": "varchar",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
    "binary": "varchar",
    "array<string>": "varchar[]",
    "struct<city:string,zip:int>": "struct(city varchar, zip int)",
    "map<string,bigint>": "map(varchar, bigint)",
}


def duckdb_columns(schema: pa.Schema) -> str:
    return "{" + ", ".join(f"'{n}': '{DUCKDB.get(DDL[n], DDL[n])}'" for n in schema.names) + "}"


@pytest.mark.parametrize("name", ["json", "json-gzip"])
def test_duckdb_reads_the_same_values_back_from_json(tables, name):
    """All but decimals of more digits than a double has, which are DuckDB's affair: in the file they are exact."""
    table = tables[name]
    suffix = "json.gz" if name == "json-gzip" else "json"
    source = f"read_json('{table.path}/**/*.{suffix}', columns={duckdb_columns(table.schema)})"
    found = duckdb.sql(f"SELECT * REPLACE (from_base64(raw) AS raw, 0::decimal(38,10) AS wide) FROM {source}").to_arrow_table()
    expected = [line | {"wide": found["wide"][0].as_py()} for line in table.expected]
    assert same_multiset(expected, table.rows(found)) == 224


def test_duckdb_finds_only_rows_without_a_given_schema(tables):
    """The sink's own record has no name that ``**/*.json`` finds."""
    counts = duckdb.sql(f"SELECT count(*), count(id) FROM read_json('{tables['json'].path}/**/*.json')").fetchall()
    assert counts == [(224, 224)]


@pytest.mark.parametrize("name", ["csv", "csv-gzip"])
def test_duckdb_reads_the_same_values_back_from_csv(tables, name):
    table = tables[name]
    suffix, delimiter = ("csv.gz", ";") if name == "csv-gzip" else ("csv", ",")
    options = f"header=true, delim='{delimiter}', quote='\"', escape='\"', allow_quoted_nulls=false"
    source = f"read_csv('{table.path}/**/*.{suffix}', columns={duckdb_columns(table.schema)}, {options})"
    found = duckdb.sql(f"SELECT * FROM {source}").to_arrow_table()
    assert same_multiset(table.expected, table.rows(found)) == 224


@pytest.mark.parametrize("name", [n for n in TABLES if n.startswith("parquet") and "partitioned" not in n])
def test_pandas_reads_the_same_values_back_from_parquet(tables, name):
    table = tables[name]
    frame = pd.read_parquet(table.path, dtype_backend="pyarrow")
    assert same_multiset(table.expected, table.rows(pa.Table.from_pandas(frame, preserve_index=False))) == 224


def test_pandas_reads_the_same_values_back_from_orc(tables):
    table = tables["orc"]
    frame = pd.concat([pd.read_orc(path, dtype_backend="pyarrow") for path in sorted(table.path.rglob("*.orc"))])
    assert same_multiset(table.expected, table.rows(pa.Table.from_pandas(frame, preserve_index=False))) == 224


def test_pandas_reads_the_same_values_back_from_csv(tables):
    table = tables["csv"]
    texts = {n: str for n in table.schema.names}
    frames = [pd.read_csv(p, dtype=texts, keep_default_na=False, na_values=[]) for p in sorted(table.path.rglob("*.csv"))]
    found = pd.concat(frames)
    # pandas does not tell an empty text from none; every other value is there, as text.
    expected = Counter((line["id"], line["name"] or "") for line in table.expected)
    assert Counter((int(i), name) for i, name in zip(found["id"], found["name"], strict=True)) == expected
    assert len(found) == 224


def test_a_table_of_empty_windows_only_is_an_empty_table(tmp_path):
    sink, feed = FilesSink(str(tmp_path / "quiet")), Feed()
    for _ in range(3):
        apply(sink, feed.empty())
    assert pa.dataset.dataset(sink.directory, format="parquet", partitioning="hive").to_table().num_rows == 0
    assert pa.dataset.dataset(sink.directory, schema=SCHEMA, partitioning="hive").to_table().to_pylist() == []
