"""Splits of Parquet files that tasks read by themselves: the records of Spark, or a reason why only Spark can read them."""

from __future__ import annotations

import datetime as dt
import json
import os
import random
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_kafka_spark.errors import SourceRejected, SparkReadRequired
from airflow_kafka_spark.formats import Csv, Json
from airflow_kafka_spark.jobs.chain import SETTINGS
from airflow_kafka_spark.sinks import KafkaSink
from airflow_kafka_spark.sources import FilesSource
from tests.sources.contract import applied

UTC = dt.timezone.utc
MOMENT = dt.datetime(2026, 2, 28, 23, 59, 59, 123456)
COLUMNS: Mapping[str, tuple[pa.DataType, list[Any]]] = {
    "big": (pa.int64(), [2**63 - 1, -(2**63), 0]),
    "medium": (pa.int32(), [-(2**31), 2**31 - 1, 7]),
    "small": (pa.int16(), [-(2**15), 5, 6]),
    "tiny": (pa.int8(), [127, -128, 0]),
    "u8": (pa.uint8(), [255, 0, 1]),
    "u16": (pa.uint16(), [65_535, 0, 1]),
    "u32": (pa.uint32(), [2**32 - 1, 0, 1]),
    "flag": (pa.bool_(), [True, False, True]),
    "ratio": (pa.float64(), [0.5, -1e20, float("nan")]),
    "share": (pa.float32(), [0.5, float("inf"), -0.0]),
    "amount": (pa.decimal128(12, 2), [Decimal("-0.01"), Decimal("9999999999.99"), Decimal("0.00")]),
    "fine": (pa.decimal128(38, 10), [Decimal("1234567890123456789012345678.0123456789"), Decimal("1E-10"), Decimal(0)]),
    "name": (pa.string(), ["ä\"',\\ ☃\x01", "", "x\ny"]),
    "word": (pa.dictionary(pa.int32(), pa.string()), ["a", "b", "a"]),
    "large": (pa.large_string(), ["l", "", "m"]),
    "day": (pa.date32(), [dt.date(1582, 10, 15), dt.date(9999, 12, 31), dt.date(1970, 1, 1)]),
    "wall": (pa.timestamp("us"), [MOMENT, dt.datetime(1900, 1, 1), dt.datetime(9999, 12, 31, 23, 59, 59, 999999)]),
    "wall_ms": (pa.timestamp("ms"), [MOMENT.replace(microsecond=7000), dt.datetime(1900, 1, 1), dt.datetime(2000, 1, 1)]),
    "at": (pa.timestamp("us", "UTC"), [MOMENT.replace(tzinfo=UTC), *(dt.datetime(y, 1, 1, tzinfo=UTC) for y in (1900, 1970))]),
    "at_ms": (pa.timestamp("ms", "Europe/Berlin"), [dt.datetime(2026, 7, 1, tzinfo=UTC)] * 3),
}
"""Types that tasks read, with values at their limits."""


def write(path: Path, rows: int, **options: Any) -> None:
    """Write the values, with a null in every fourth row, and an ``id``."""
    arrays = [pa.array([values[n % 4] if n % 4 < 3 else None for n in range(rows)], kind) for kind, values in COLUMNS.values()]
    table = pa.table([pa.array(range(rows), pa.int64()), *arrays], ["id", *COLUMNS])
    pq.write_table(table, path, version="2.6", **options)


def read_by_tasks(source: FilesSource, splits: Any, sink: KafkaSink) -> list[list[tuple[bytes | None, bytes | None]]]:
    """Return keys and values of the records of each split, as tasks make them."""
    reader = source.make_reader(json.loads(json.dumps(splits)), sink.columns)
    assert not isinstance(reader, str), reader
    encoder = sink.make_encoder(reader.columns)
    assert not isinstance(encoder, str), encoder
    batches = [[encoder.encode(batch) for batch in reader.read(at)] for at in range(len(splits))]
    columns = [[(b.column("key").to_pylist(), b.column("value").to_pylist()) for b in split] for split in batches]
    return [[pair for keys, values in split for pair in zip(keys, values, strict=True)] for split in columns]


def read_by_spark(spark: Any, source: FilesSource, splits: Any, sink: KafkaSink) -> list[list[tuple[bytes | None, bytes | None]]]:
    with applied(spark, {**SETTINGS, **source.settings}):
        frame = sink.make_records(source.read_frame(spark, splits))
        return [
            [tuple(None if part is None else bytes(part) for part in row[:2]) for row in rows]
            for rows in frame.rdd.glom().collect()
        ]


def test_tasks_make_byte_for_byte_the_records_of_spark_in_the_same_splits(spark, path):
    """Row groups of many sizes are cut by splits at many places, and one file has others before and after it."""
    seed = random.Random(7)
    write(path / "a.parquet", 4_000, row_group_size=130, compression="none")
    write(path / "b.parquet", 900, row_group_size=900, compression="zstd", use_dictionary=False)
    for n in range(5):
        write(path / f"c{n}.parquet", seed.randrange(1, 40), compression="snappy", data_page_version="2.0")
    write(path / "d.parquet", 0)
    source = FilesSource(str(path), split_bytes=23_000)
    splits = source.freeze(None).splits
    assert len(splits) > 8
    for sink in (KafkaSink("t", key="id"), KafkaSink("t", value=Json(), value_columns=("name", "id", "amount"))):
        ours = read_by_tasks(source, splits, sink)
        assert ours == read_by_spark(spark, source, splits, sink)
        assert sum(map(len, ours)) > 4_900
    # As Spark 4.0 and Impala write timestamps.
    (path / "int96").mkdir()
    write(path / "int96" / "a.parquet", 12, use_deprecated_int96_timestamps=True)
    old, sink = FilesSource(str(path / "int96")), KafkaSink("t", key="at")
    old_splits = old.freeze(None).splits
    assert read_by_tasks(old, old_splits, sink) == read_by_spark(spark, old, old_splits, sink)
    lines = KafkaSink("t", value=Csv(), value_columns=("id", "name", "amount", "day"))
    assert read_by_tasks(source, splits[:1], lines) == read_by_spark(spark, source, splits[:1], lines)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (pa.array([[1]]), r"column `x.list.element` is INT64"),
        (pa.array([{"y": 1}]), r"column `x.y` is INT64"),
        (pa.array([b"x"]), "column `x` is BYTE_ARRAY"),
        (pa.array([1], pa.uint64()), r"column `x` is Int\(bitWidth=64, isSigned=false\)"),
        (pa.array([1], pa.time64("us")), r"column `x` is Time\("),
        (pa.array([1], pa.timestamp("ns")), r"column `x` is Timestamp\(.*nanoseconds"),
    ],
    ids=["list", "struct", "binary", "uint64", "time", "nanoseconds"],
)
def test_columns_that_only_spark_reads_are_named_if_they_are_needed(path, values, said):
    pq.write_table(pa.table({"id": [1], "x": values}), path / "a.parquet")
    source = FilesSource(str(path))
    # Some of these are no types of Spark's either, and refused when a window is frozen with them.
    splits = FilesSource(str(path), schema="id bigint").freeze(None).splits
    found = source.make_reader(splits, None)
    assert isinstance(found, str)
    assert re.match(said, found), found
    needed = source.make_reader(splits, ("id",))
    assert not isinstance(needed, str)
    assert [batch.to_pylist() for batch in needed.read(0)] == [[{"id": 1}]]


def test_directories_give_columns_to_tasks_and_to_spark(spark, path):
    directories = ["day=2026-11-01/re%20gion=a%2Fb+c%25/n=07", "day=0999-01-31/re gion=\u00fc%C3%A9 100%/n=-3"]
    directories += ["day=%s/re gion=%s/n=%s" % (("__HIVE_DEFAULT_PARTITION__",) * 3), "day=2026-11-02/sub/re gion=/n=1"]
    above = path / "n=9"
    for at, directory in enumerate(directories):
        for format in ("parquet", "json", "text"):
            (above / format / directory).mkdir(parents=True)
        pq.write_table(pa.table({"id": [at]}), above / "parquet" / directory / "a")
        (above / "json" / directory / "a").write_text(f'{{"id": {at}}}\n')
        (above / "text" / directory / "a").write_text(f"{at}\n")
    options = {"recursive": True, "partition_columns": "day date, `re gion` string, n int"}
    found = []
    for format, given in (("parquet", {}), ("json", {"schema": "id bigint"}), ("text", {})):
        source = FilesSource(str(above / format), format, **options, **given)
        assert source.validate() == []
        splits = source.freeze(None).splits
        columns = ("n", "day", "re gion", "value" if format == "text" else "id")
        assert set(source.find_columns() or ()) == set(columns)
        sink = KafkaSink("t", key="id" if format != "text" else "value", value=Json(), value_columns=columns)
        found.append(read_by_spark(spark, source, splits, sink))
        if format == "parquet":
            assert read_by_tasks(source, splits, sink) == found[0]
    records = sorted((int(key or b""), json.loads(value or b"")) for split in found[0] for key, value in split)
    assert [tuple(value.values())[:3] for _, value in records] == [
        (7, "2026-11-01", "a/b+c%"), (-3, "0999-01-31", "\u00fc\u00e9 100%"), (None, None, None), (1, "2026-11-02", ""),
    ]  # fmt: skip
    assert [sorted(split) for split in found[1]] == [sorted(split) for split in found[0]]
    texts = sorted(json.loads(value or b"")["value"] for split in found[2] for _, value in split)
    assert texts == ["0", "1", "2", "3"]
    unread = FilesSource(str(above / "text"), "text", recursive=True)
    found.append(read_by_spark(spark, unread, unread.freeze(None).splits, KafkaSink("t", value=Json())))
    assert sorted(value for split in found[3] for _, value in split) == [b'{"value":"%d"}' % n for n in range(4)]


def test_legacy_calendars_and_names_with_dots_are_read_by_spark(path):
    found = []
    for name, table in (
        ("legacy", pa.table({"x": [1]}).replace_schema_metadata({"org.apache.spark.legacyDateTime": ""})),
        ("spark2", pa.table({"x": [1]}).replace_schema_metadata({"org.apache.spark.version": "2.4.8"})),
        ("dot", pa.table({"x.y": [1]})),
    ):
        (path / name).mkdir()
        pq.write_table(table, path / name / "a.parquet")
        source = FilesSource(str(path / name))
        found.append(source.make_reader(source.freeze(None).splits, None))
    old = "its files have dates of an old calendar"
    assert found == [old, old, "column `x.y` is INT64"]


def test_options_schemas_other_formats_and_stores_are_read_by_spark(path):
    pq.write_table(pa.table({"id": [1]}), path / "a.parquet")
    for options, said in (
        ({"options": {"mergeSchema": "false"}}, "`schema` and `options` are those of Spark's reader"),
        ({"schema": "id bigint"}, "`schema` and `options` are those of Spark's reader"),
        ({"format": "text"}, "its files are text"),
    ):
        source = FilesSource(str(path), **options)
        assert source.make_reader(source.freeze(None).splits, None) == said


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (pa.array([b"Zo\xeb"]).view(pa.string()), "column `x` of `a.parquet`: .*UTF8"),
        (pa.array([dt.date(1582, 10, 14)]), "column `x` of `a.parquet` has dates of an old calendar"),
        (pa.array([dt.datetime(1899, 12, 31)], pa.timestamp("us")), "column `x` of `a.parquet` has dates of an old calendar"),
        (pa.array([2**62], pa.timestamp("ms", "UTC")), "column `x` of `a.parquet`: .*out of bounds"),
    ],
    ids=["text", "date", "timestamp", "milliseconds"],
)
def test_values_that_only_spark_reads_end_the_reading(path, values, said):
    pq.write_table(pa.table({"x": values}), path / "a.parquet")
    source = FilesSource(str(path))
    reader = source.make_reader(source.freeze(None).splits, None)
    assert not isinstance(reader, str)
    with pytest.raises(SparkReadRequired, match=f'only Spark reads this as it was written: {said}.*Use `read_with="auto"`'):
        list(reader.read(0))


def test_files_that_change_or_go_while_they_are_read_or_are_damaged_are_named(path):
    for name in ("gone", "changed", "damaged", "other"):
        pq.write_table(pa.table({"x": list(range(5_000))}), path / name, compression="snappy")
        os.utime(path / name, (1000, 1000))
    content = bytearray((path / "damaged").read_bytes())
    content[4 : len(content) // 2] = bytes(len(content) // 2 - 4)
    (path / "damaged").write_bytes(content)
    os.utime(path / "damaged", (1000, 1000))
    source = FilesSource(str(path), split_bytes=1024)
    reader = source.make_reader(source.freeze(None).splits, None)
    assert not isinstance(reader, str)
    (path / "gone").unlink()
    os.utime(path / "changed", (1001, 1001))
    for name, said in (
        ("gone", "`gone` is gone, or Spark's machine .* has not mounted the directory"),
        ("changed", "`changed` changed while the window was read"),
        ("damaged", "(?s)`damaged` cannot be read: .*Replace the damaged file"),
    ):
        with pytest.raises(SourceRejected, match=said):
            for at in range(len(reader.splits)):
                if any(part.file.name == name for part in reader.splits[at]):
                    list(reader.read(at))
