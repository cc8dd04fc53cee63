"""The files source and Spark: names, types, cuts, damage, and how long it takes."""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import pytest

from airflow_kafka_spark.errors import SourceRejected
from airflow_kafka_spark.formats.base import ERROR
from airflow_kafka_spark.sources.base import MAX_SPLITS
from airflow_kafka_spark.sources.files.source import FilesSource
from tests.sources.contract import applied, by_partition, read, rows_of, windows

NAMES = ["a b", "p%20c", "100%", "ü☃", "x[1]{a,b}*?", "h#q?r", "back\\slash", "'\"$&;=+,", "~tilde"]
COLONS = ["a b", "col:on", "2026-01-01T00:00:00", "b%3A", "#:"]


def table(ids: range) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


def ids_of(partitions: list[list[Any]]) -> list[list[int]]:
    return [[row["id"] for row in rows] for rows in partitions]


def flat(partitions: list[list[int]]) -> list[int]:
    return sorted(n for ids in partitions for n in ids)


# --- names --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["dir with 100% of ü", "dir [x]", "dir:x"])
def test_files_of_any_name_are_read(spark, path, place):
    names = COLONS if ":" in place else NAMES
    for format in ("parquet", "text") if place != "dir [x]" else ("parquet", "json", "csv", "orc", "text"):
        directory = path / format / place
        directory.mkdir(parents=True)
        for n, name in enumerate(names):
            if format == "parquet":
                pa.parquet.write_table(table(range(n, n + 1)), directory / name)
            elif format == "orc":
                pa.orc.write_table(table(range(n, n + 1)), str(directory / name))
            else:
                (directory / name).write_text({"json": f'{{"id": {n}}}\n'}.get(format, f"{n}\n"))
        options = {"schema": "id bigint"} if format in ("json", "csv") else {}
        for named in (directory, directory.as_uri()) if format == "parquet" else (directory.as_uri(),):
            source = FilesSource(str(named), format=format, split_bytes=1024, **options)
            found = read(spark, source, source.freeze(None).splits)
            assert sorted(int(row[0]) for rows in found for row in rows) == list(range(len(names))), (format, named)
    recursive = FilesSource(str(path / "text"), format="text", recursive=True)
    assert sum(map(len, read(spark, recursive, recursive.freeze(None).splits))) == len(names)


def test_files_that_spark_cannot_open_are_refused_and_named(path):
    (path / "a:b[1]").write_text("1\n")
    with pytest.raises(SourceRejected, match=r"the file 'a:b\[1\]' has both a `:` and one of .* Rename it"):
        FilesSource(str(path), format="text").freeze(None)
    os.rename(path / "a:b[1]", os.fsencode(path) + b"/\xff")
    with pytest.raises(SourceRejected, match="is not UTF-8"):
        FilesSource(str(path), format="text").freeze(None)


# --- cuts ---------------------------------------------------------------------------------------------------------------


def large(path: Path) -> None:
    """Two files of several splits, of equal size, and small ones of which one has the size of a large one's last piece."""
    for name, first in (("big-1", 0), ("big-2", 100_000)):
        (path / name).write_text("".join(f"{n:07}\n" for n in range(first, first + 1_030)))
    for n in range(70):
        (path / f"small-{n:02}").write_text(f"{200_000 + n:07}\n" * (6 if n == 3 else 1))
    for n, name in enumerate(sorted(os.listdir(path))):
        os.utime(path / name, (1000 - n, 1000 - n))


def test_large_files_are_cut_small_ones_packed_and_splits_stay_what_they_were_whatever_is_set_later(spark, path):
    large(path)
    source = FilesSource(str(path), format="text", split_bytes=1024)
    splits = source.freeze(None).splits
    assert len(splits) >= 18
    assert max(len(split["files"]) for split in splits) > 20
    there = read(spark, source, splits)
    found = [[int(row[0]) for row in rows] for rows in there]
    expected = [*range(1_030), *range(100_000, 101_030), *range(200_000, 200_070), *[200_003] * 5]
    assert flat(found) == sorted(expected)
    for index, split in enumerate(splits):
        inside = {name for name, *_ in split["files"]}
        for n in found[index]:
            assert (f"small-{n - 200_000:02}" if n >= 200_000 else "big-1" if n < 100_000 else "big-2") in inside
    # Some of them alone: parts of a cut file, and splits of which the rest of the window would change the packing.
    for some in ([3], [len(splits) - 1, 5, 0], range(len(splits) - 3, len(splits))):
        again = [[int(row[0]) for row in rows] for rows in read(spark, source, [splits[i] for i in some])]
        assert [sorted(rows) for rows in again] == [sorted(found[i]) for i in some], some
    # A window keeps the split_bytes it was frozen with, and no setting of the session changes the cut.
    edited = FilesSource(str(path), format="text", split_bytes=4096)
    others = {
        "spark.sql.files.maxPartitionBytes": "77",
        "spark.sql.files.minPartitionNum": "50",
        "spark.sql.shuffle.partitions": "3",
    }
    with applied(spark, others):
        before = {key: spark.conf.get(key, None) for key in edited.settings}
        try:
            assert by_partition(rows_of(edited.read_frame(spark, splits))) == there
        finally:
            for key, value in before.items():
                spark.conf.unset(key) if value is None else spark.conf.set(key, value)


def test_compressed_text_is_not_cut(spark, path):
    import bz2
    import gzip

    lines = "".join(json.dumps({"id": n}) + "\n" for n in range(3000)).encode()
    (path / "a.json.GZ").write_bytes(gzip.compress(lines, compresslevel=0))
    source = FilesSource(str(path), format="json", schema="id bigint", split_bytes=4096)
    [split] = source.freeze(None).splits
    assert flat(ids_of(read(spark, source, [split]))) == list(range(3000))
    (path / "b.json.bz2").write_bytes(bz2.compress(lines))
    window = FilesSource(str(path), format="json", schema="id bigint", split_bytes=1024, glob="*.bz2").freeze(None)
    assert len(window.splits) > 1
    assert flat(ids_of(read(spark, source, window.splits))) == list(range(3000))


def test_multiline_records_are_not_cut(spark, path):
    (path / "a.json").write_text(json.dumps([{"id": n, "text": "x\ny"} for n in range(500)], indent=1))
    source = FilesSource(str(path), format="json", schema="id bigint", options={"multiLine": True}, split_bytes=1024)
    [split] = source.freeze(None).splits
    assert flat(ids_of(read(spark, source, [split]))) == list(range(500))


def test_a_parquet_file_of_many_row_groups_is_cut_and_each_row_is_in_one_split(spark, path):
    pa.parquet.write_table(table(range(5_000)), path / "a.parquet", row_group_size=100, compression="none")
    source = FilesSource(str(path), split_bytes=5_000)
    window = source.freeze(None)
    assert (len(window.splits) > 8, window.rows) == (True, 5_000)
    assert flat(ids_of(read(spark, source, window.splits))) == list(range(5_000))


# --- changes ------------------------------------------------------------------------------------------------------------


def test_a_file_that_changed_or_vanished_after_freezing_is_refused_and_named(spark, path):
    for name in ("a", "b"):
        (path / name).write_text(f"{name}\n")
        os.utime(path / name, (1000, 1000))
    source = FilesSource(str(path), format="text")
    splits = source.freeze(None).splits
    assert sum(map(len, read(spark, source, splits))) == 2
    os.utime(path / "b", (1001, 1001))
    with pytest.raises(
        SourceRejected, match=r"`b` has changed .* had 2 bytes of 1970-01-01 00:16:40.000000 UTC, and has 2 bytes of"
    ):
        source.read_frame(spark, splits)
    (path / "b").write_text("bb\n")
    os.utime(path / "b", (1000, 1000))
    with pytest.raises(SourceRejected, match="`b` has changed since the window was frozen"):
        source.read_frame(spark, splits)
    (path / "b").unlink()
    with pytest.raises(SourceRejected, match="`b` has vanished since the window was frozen"):
        source.read_frame(spark, splits)
    (path / "b").write_text("b\n")
    os.utime(path / "b", (1000, 1000))
    assert sum(map(len, read(spark, source, splits))) == 2


def test_nothing_is_read_without_splits(spark, path):
    with pytest.raises(ValueError, match="nothing to read"):
        FilesSource(str(path)).read_frame(spark, ())


# --- what the files hold --------------------------------------------------------------------------------------------------


MOMENT = dt.datetime(2026, 2, 28, 23, 59, 59, 123456)
COLUMNS: dict[str, tuple[pa.DataType, Any]] = {
    "big": (pa.int64(), 2**63 - 1),
    "medium": (pa.int32(), -(2**31)),
    "small": (pa.int16(), -(2**15)),
    "tiny": (pa.int8(), 127),
    "flag": (pa.bool_(), True),
    "ratio": (pa.float64(), 0.1),
    "share": (pa.float32(), 0.5),
    "amount": (pa.decimal128(38, 10), Decimal("1234567890123456789012345678.0123456789")),
    "name": (pa.string(), "ä\"',\\ ☃"),
    "day": (pa.date32(), dt.date(1582, 10, 15)),
    "wall": (pa.timestamp("us"), MOMENT),
    "at": (pa.timestamp("us", "UTC"), MOMENT.replace(tzinfo=dt.timezone.utc)),
    "raw": (pa.binary(), b"\x00\xff"),
    "tags": (pa.list_(pa.string()), ["a", None]),
    "place": (pa.struct([("city", pa.string()), ("zip", pa.int32())]), {"city": "x", "zip": 1}),
}
DDL = (
    "big bigint, medium int, small smallint, tiny tinyint, flag boolean, ratio double, share float, amount decimal(38,10), "
    "name string, day date, wall timestamp_ntz, at timestamp, raw binary, tags array<string>, place struct<city:string,zip:int>"
)


def whole(row: Any) -> dict[str, Any]:
    found = row.asDict(recursive=True)
    found.pop("__partition")
    return {name: bytes(value) if isinstance(value, bytearray) else value for name, value in found.items()}


@pytest.mark.parametrize("format", ["parquet", "parquet-schema"])
def test_types_of_parquet_survive(spark, path, format):
    schema = pa.schema([(name, kind) for name, (kind, _) in COLUMNS.items()])
    rows = [{name: value for name, (_, value) in COLUMNS.items()}, dict.fromkeys(COLUMNS)]
    pa.parquet.write_table(pa.Table.from_pylist(rows, schema), path / "a")
    source = FilesSource(str(path), schema=DDL if format == "parquet-schema" else None)
    [found] = read(spark, source, source.freeze(None).splits)
    # Spark gives instants to Python in the zone of this machine, without saying so.
    rows[0]["at"] = MOMENT.replace(tzinfo=dt.timezone.utc).astimezone().replace(tzinfo=None)
    assert [whole(row) for row in found] == rows
    assert source.find_columns() == tuple(COLUMNS)


def test_types_of_orc_survive(spark, path):
    spark.createDataFrame([tuple(value for _, value in COLUMNS.values()), (None,) * len(COLUMNS)], DDL).coalesce(1).write.orc(
        str(path / "made")
    )
    source = FilesSource(str(path), format="orc", recursive=True)
    [found] = read(spark, source, source.freeze(None).splits)
    expected = {name: value for name, (_, value) in COLUMNS.items()}
    expected["at"] = MOMENT.replace(tzinfo=dt.timezone.utc).astimezone().replace(tzinfo=None)
    assert [whole(row) for row in found] == [expected, dict.fromkeys(COLUMNS)]
    assert source.find_columns() == tuple(COLUMNS)


@pytest.mark.parametrize("format", ["json", "csv"])
def test_types_of_json_and_csv_survive(spark, path, format):
    left_out = ("raw", "tags", "place") if format == "csv" else ("raw",)
    columns = [c for c in DDL.split(", ") if c.split()[0] not in left_out]
    kept = {name: value for name, (_, value) in COLUMNS.items() if name not in left_out}
    frame = spark.createDataFrame([tuple(kept.values())], ", ".join(columns)).coalesce(1)
    moments = {"timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX", "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS"}
    options = {**moments, **({"header": True, "escape": '"'} if format == "csv" else {})}
    frame.write.format(format).options(**options).save(str(path / "made"))
    source = FilesSource(str(path), format=format, recursive=True, schema=", ".join(columns), options=options)
    assert source.validate() == []
    [[row]] = read(spark, source, source.freeze(None).splits)
    kept["at"] = MOMENT.replace(tzinfo=dt.timezone.utc).astimezone().replace(tzinfo=None)
    assert whole(row) == kept


def test_text_survives(spark, path):
    (path / "a").write_bytes("eins ä\r\n\n ☃ \nlast".encode())
    source = FilesSource(str(path), format="text")
    [found] = read(spark, source, source.freeze(None).splits)
    assert [row["value"] for row in found] == ["eins ä", "", " ☃ ", "last"]
    with_separator = FilesSource(str(path), format="text", options={"lineSep": "\n"})
    assert read(spark, with_separator, with_separator.freeze(None).splits)[0][0]["value"] == "eins ä\r"


def test_files_of_several_schemas_are_read_with_the_schema_given(spark, path):
    pa.parquet.write_table(pa.table({"id": [1], "name": ["a"]}), path / "a")
    pa.parquet.write_table(pa.table({"note": ["x"], "id": [2]}), path / "b")
    source = FilesSource(str(path), schema="name string, id bigint")
    found = [tuple(row)[:2] for rows in read(spark, source, source.freeze(None).splits) for row in rows]
    assert sorted(found, key=str) == [("a", 1), (None, 2)]


def test_old_dates_are_those_that_were_written_except_those_of_orc_files_of_other_writers_than_java(spark, path):
    day = dt.date(1500, 3, 1)
    spark.createDataFrame([(day,)], "x date").coalesce(1).write.orc(str(path / "java"))
    for name, write in (("arrow", pa.orc.write_table), ("parquet", pa.parquet.write_table)):
        (path / name).mkdir()
        write(pa.table({"x": [day]}), path / name / "a")
    found = {}
    for name in ("java", "arrow", "parquet"):
        source = FilesSource(str(path / name), "parquet" if name == "parquet" else "orc")
        [[row]] = read(spark, source, source.freeze(None).splits)
        found[name] = row["x"]
    assert found == {"java": day, "arrow": dt.date(1500, 2, 20), "parquet": day}, "as the documentation says"


OF_ORC: dict[str, tuple[pa.DataType, Any]] = {
    "tinyint": (pa.int8(), 127),
    "smallint": (pa.int16(), -(2**15)),
    "int": (pa.int32(), 2**31 - 1),
    "bigint": (pa.int64(), 2**63 - 1),
    "float": (pa.float32(), 0.5),
    "double": (pa.float64(), 0.1),
    "decimal(6,2)": (pa.decimal128(6, 2), Decimal("1234.56")),
    "string": (pa.string(), "x"),
}


def test_columns_of_orc_are_read_in_the_types_of_schema_only_if_no_value_changes(spark, path):
    wanted = (*OF_ORC, "decimal(10,0)", "decimal(10,2)", "decimal(10,5)", "decimal(21,2)", "timestamp", "timestamp_ntz", "date")
    taken = []
    for name, (kind, value) in OF_ORC.items():
        pa.orc.write_table(pa.table({"x": pa.array([value], kind)}), path / name)
        for other in wanted:
            source = FilesSource(str(path), "orc", glob=name, schema=f"X {other}")
            try:
                splits = source.freeze(None).splits
            except SourceRejected as error:
                assert name != other and f"column `x` of `{name}` is {kind}, and `schema` has {other}: Spark" in str(error)
                continue
            taken.append((name, other))
            if other == "timestamp_ntz":
                assert name == "bigint", "which is how Spark writes it"
                continue
            [[row]] = read(spark, source, splits)
            assert row["X"] == (str(value) if other == "string" else value)
    assert [other for name, other in taken if name == "int"] == [
        "int", "bigint", "double", "string", "decimal(10,0)", "decimal(21,2)"
    ]  # fmt: skip
    assert [other for name, other in taken if name == "decimal(6,2)"] == [
        "decimal(6,2)", "string", "decimal(10,2)", "decimal(10,5)", "decimal(21,2)"
    ]  # fmt: skip
    assert [other for name, other in taken if name == "string"] == ["string"]
    nested = FilesSource(str(path), "orc", glob="nested", schema="x struct<a:array<int>,b:map<string,int>>")
    inner = pa.StructArray.from_arrays([pa.array([["x"]], pa.list_(pa.string()))], ["a"])
    pa.orc.write_table(pa.table({"x": inner}), path / "nested")
    with pytest.raises(SourceRejected, match="`x` of `nested`"):
        nested.freeze(None)


def test_a_decimal_of_parquet_is_not_read_as_an_integer_without_its_point(path):
    pa.parquet.write_table(pa.table({"x": pa.array([Decimal("1.25")])}), path / "a")
    with pytest.raises(SourceRejected, match=r"column `x` of `a` is decimal128\(3, 2\), and `schema` has bigint"):
        FilesSource(str(path), schema="x bigint").freeze(None)
    assert FilesSource(str(path), schema="x decimal(5,3)").freeze(None).rows == 1


# --- damage -------------------------------------------------------------------------------------------------------------


BAD = {
    "json-type": ("json", '{"id": 1}\n{"id": "x"}\n', {}, "Malformed record of JSON"),
    "json-encoding": ("json", '{"id": 1, "name": "Zo\udceb"}\n', {}, "Malformed record of JSON"),
    "json-encoding-given": ("json", '{"id": 1, "name": "Zo\udceb"}\n', {"encoding": "UTF-8"}, "Malformed record of JSON"),
    "json-torn": ("json", '{"id": 1}\n{"id": ', {}, 'Malformed record of JSON: {"id": . If the file is right, correct `schema`'),
    "json-second": ("json", '{"id": 1} {"id": 2}\n', {}, 'Malformed record of JSON: {"id": 1} {"id": 2}'),
    "json-rest": ("json", '{"id": 1}\n{"id": 2},\n', {}, 'Malformed record of JSON: {"id": 2},'),
    "json-null": (
        "json",
        '[{"id": 1}, null]\n',
        {},
        'Malformed record of JSON: [{"id": 1}, null]. If the file is right, correct',
    ),
    "json-lines": ("json", '{"id": 1}\n{"id": 2}\n', {"multiLine": True}, "Malformed record of JSON"),
    "csv-type": ("csv", "1,a\nx,b\n", {}, "Malformed records"),
    "csv-short": ("csv", "1,a\n2\n", {}, "Malformed records"),
    "csv-long": ("csv", "1,a\n2,b,c\n", {}, "Malformed records"),
    "csv-quote": ("csv", '1,"a ""b"" c"\n', {}, "a quoted value holds a quote that is not escaped. Set the option `escape`"),
    "csv-header": ("csv", "name,id\na,1\n", {"header": True}, "header is not the schema's"),
    "csv-columns": ("csv", "id;name\n1;a\n", {"header": True}, "another number of columns than the schema: Header length: 1"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_malformed_record_fails_and_file_and_cause_are_named(spark, path, kind):
    format, content, options, message = BAD[kind]
    (path / "good x").write_text(
        "1,a\n" if format == "csv" and not options else '{"id": 1}\n' if format == "json" else "id,name\n1,a\n"
    )
    (path / "bad x").write_text(content, errors="surrogateescape")
    source = FilesSource(str(path), format=format, schema="id bigint, name string", options=options)
    with pytest.raises(Exception) as caught:
        read(spark, source, source.freeze(None).splits)
    explained = source.explain(caught.value)
    assert explained is not None, str(caught.value)[:2000]
    assert "in/bad x` cannot be read" in str(explained)
    assert message in str(explained)
    if kind not in ("json-torn", "csv-short", "csv-long"):
        return
    # Also when only another column is needed.
    with applied(spark, source.settings):
        frame = source.read_frame(spark, source.freeze(None).splits)
        with pytest.raises(Exception, match="FAILED_READ_FILE|Malformed record"):
            frame.select("id" if kind == "json-torn" else "name").collect()


def test_malformed_records_are_kept_where_the_schema_has_a_column_for_them(spark, path):
    (path / "a").write_text('{"id": 1}\n{"id": \n{"id": 2}{"id": 3}\n\n[{"id": 4}, {"id": 5}]\n')
    source = FilesSource(str(path), format="json", schema="id bigint, _corrupt_record string", options={"mode": "PERMISSIVE"})
    assert source.validate() == []
    [found] = read(spark, source, source.freeze(None).splits)
    kept = [(1, None), (None, '{"id": '), (None, '{"id": 2}{"id": 3}'), (4, None), (5, None)]
    assert [(row["id"], row["_corrupt_record"]) for row in found] == kept


@pytest.mark.parametrize("format", ["json", "csv"])
def test_a_number_that_a_decimal_cannot_hold_makes_the_row_bad_and_none_is_rounded(spark, path, format):
    numbers = ["1.239", "-1.2", "12345678.900", "0.0000000001"]
    lines = {
        "json": [f'{{"n": {number}, "größe": {{"n": 1.5}}}}' for number in numbers],
        "csv": [f"{number},1" for number in numbers],
    }
    (path / "a x").write_text("\n".join(lines[format]))
    schema = "n decimal(10,2), `größe` struct<n: decimal(3,1)>" if format == "json" else "n decimal(10,2), s int"
    source = FilesSource(str(path), format=format, schema=schema)
    with applied(spark, source.settings):
        frame = source.read_frame(spark, source.freeze(None).splits)
        rows = frame.collect()
    assert [None if row[ERROR] else row["n"] for row in rows] == [None, Decimal("-1.20"), Decimal("12345678.90"), None]
    assert re.fullmatch("cannot be read: column `n` of file `a(%20| )x`: found 1.239, expected decimal\\(10,2\\)", rows[0][ERROR])
    assert frame.schema["n"].dataType.simpleString() == "decimal(10,2)"


TEXTS: dict[str, tuple[dict[str, Any], bytes, list[str | bytes | None]]] = {
    "csv": (
        {"format": "csv", "schema": "text string, raw binary", "options": {"header": True}},
        "text,raw\nZoë,ë\n\ufffd,☃\n".encode() + b"Zo\xeb,x\nx,\xeb\n\xc3(,\n",
        ["Zoë", "\ufffd", None, "x", None],
    ),
    "csv-multiline": (
        {"format": "csv", "schema": "text string, n int", "options": {"multiLine": True}},
        '"Zo\në",1\n'.encode() + b"Zo\xeb,1\n",
        ["Zo\në", None],
    ),
    "csv-beyond-ascii": (
        {"format": "csv", "schema": "text string, n int", "options": {"sep": "§"}},
        "Zoë§1\n".encode() + b"Zo\xeb\xc2\xa71\n",
        ["Zoë", None],
    ),
    "csv-latin": (
        {"format": "csv", "schema": "text string, n int", "options": {"encoding": "ISO-8859-1"}},
        b"Zo\xeb,1\n\x81,1\n",
        ["Zoë", "\x81"],
    ),
    "csv-windows": (
        {"format": "csv", "schema": "text string, n int", "options": {"charset": "windows-1252"}},
        b"Zo\xeb \x80,1\n\x81,1\n",
        ["Zoë €", None],
    ),
    "text": ({"format": "text"}, "Zoë\n\ufffd\n".encode() + b"Zo\xeb\n", ["Zoë", "\ufffd", None]),
    "text-latin": ({"format": "text", "options": {"encoding": "latin1"}}, b"Zo\xeb\n", ["Zoë"]),
}
"""Options, the content of a file, and the texts that it holds; None for a row with bytes that are not in the encoding."""


@pytest.mark.parametrize("kind", TEXTS)
def test_a_row_with_bytes_that_are_not_in_the_encoding_is_bad_and_no_text_is_changed(spark, path, kind):
    options, content, expected = TEXTS[kind]
    (path / "bad x").write_bytes(content)
    source = FilesSource(str(path), **options)
    assert source.validate() == []
    with applied(spark, source.settings):
        rows = source.read_frame(spark, source.freeze(None).splits).collect()
    assert [None if row[ERROR] else row[0] for row in rows] == expected
    reasons = {row[ERROR] for row in rows} - {None}
    named = re.compile("cannot be read: column `(value|text|raw|more)` of file `bad(%20| )x`: ")
    assert all(map(named.match, reasons)), reasons
    assert all("`encoding` in the source's `options`" in why for why in reasons)
    if kind == "csv":
        raws = [bytes(row["raw"] or b"") for row in rows]
        assert raws == ["ë".encode(), "☃".encode(), b"x", b"\xeb", b""]


def test_texts_of_parquet_that_are_not_utf_8_are_bad(spark, path):
    texts = pa.array([b"Zo\xeb", "Zoë".encode(), None, b"\xc3("], pa.binary()).view(pa.string())
    tags = pa.ListArray.from_arrays([0, 0, 1, 2, 2], texts.take(pa.array([1, 0])))
    marks = pa.MapArray.from_arrays([0, 0, 0, 1, 2], texts.take(pa.array([1, 3])), pa.array([1, 2]))
    more = pa.StructArray.from_arrays([tags, marks], ["tags", "marks"])
    pa.parquet.write_table(pa.table({"id": [1, 2, 3, 4], "name": texts.take(pa.array([0, 1, 2, 1])), "more": more}), path / "a")
    source = FilesSource(str(path))
    with applied(spark, source.settings):
        rows = source.read_frame(spark, source.freeze(None).splits).collect()
    bad = {1: "name", 3: "more", 4: "more"}
    expected = [f"cannot be read: column `{bad[n]}` of file `a`: not UTF-8" if n in bad else None for n in range(1, 5)]
    assert [row[ERROR] for row in sorted(rows)] == expected


def test_a_parquet_file_with_damaged_pages_is_named(spark, path):
    pa.parquet.write_table(table(range(10_000)), path / "dam aged.parquet", compression="snappy")
    content = bytearray((path / "dam aged.parquet").read_bytes())
    content[4 : len(content) // 2] = bytes(len(content) // 2 - 4)
    (path / "dam aged.parquet").write_bytes(content)
    source = FilesSource(str(path))
    with pytest.raises(Exception) as caught:
        read(spark, source, source.freeze(None).splits)
    explained = source.explain(caught.value)
    assert explained is not None
    assert "in/dam aged.parquet` cannot be read" in str(explained)


def test_types_that_a_given_schema_cannot_have_are_reported(spark, path):
    pa.parquet.write_table(pa.table({"id": ["x"]}), path / "a.parquet")
    source = FilesSource(str(path), schema="id bigint")
    with pytest.raises(Exception) as caught:
        read(spark, source, source.freeze(None).splits)
    explained = source.explain(caught.value)
    assert explained is not None
    assert "in/a.parquet` cannot be read" in str(explained)
    assert source.explain(ValueError("something else")) is None


# --- size ---------------------------------------------------------------------------------------------------------------


@pytest.mark.extended
def test_a_wide_directory_is_read_within_seconds(spark, path):
    for n in range(1_000):
        pa.parquet.write_table(table(range(n, n + 1)), path / f"part-{n:05}.parquet")
    source = FilesSource(str(path))
    started = time.monotonic()
    frozen = list(windows(source, None))
    listed = time.monotonic() - started
    with applied(spark, source.settings):
        frames = [source.read_frame(spark, window.splits) for window in frozen]
    planned = time.monotonic() - started - listed
    assert (listed < 60, planned < 60) == (True, True), (listed, planned)
    print(f"1 000 files: {len(frozen)} windows frozen in {listed:.1f} s, planned in {planned:.1f} s")
    assert sum(window.rows or 0 for window in frozen) == 1_000
    with applied(spark, source.settings):
        found = [row["id"] for frame in frames for row in frame.collect()]
    assert sorted(found) == list(range(1_000))


def test_a_window_of_the_most_splits_is_planned_within_seconds(spark, path):
    (path / "big").write_text("".join(f"{n:07}\n" for n in range(128 * (MAX_SPLITS - 100))))
    for n in range(100):
        (path / f"small-{n}").write_text("y" * 1022 + "\n")
    source = FilesSource(str(path), format="text", split_bytes=1024)
    window = source.freeze(None)
    assert len(window.splits) == MAX_SPLITS
    started = time.monotonic()
    with applied(spark, source.settings):
        frame = source.read_frame(spark, window.splits)
        planned = time.monotonic() - started
        assert frame.rdd.getNumPartitions() == MAX_SPLITS
    print(f"{MAX_SPLITS} splits: planned in {planned:.1f} s")
    assert planned < 120
