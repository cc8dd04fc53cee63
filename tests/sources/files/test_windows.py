"""The files that a files source takes into a window, and those that it refuses, without Spark."""

from __future__ import annotations

import datetime as dt
import json
import os
import pickle
import re
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.orc
import pyarrow.parquet
import pytest

from airflow_kafka_spark.errors import SourceRejected, SourceUnavailable
from airflow_kafka_spark.sources.files import seen
from airflow_kafka_spark.sources.files import windows as files_windows
from airflow_kafka_spark.sources.files.source import FilesSource
from airflow_kafka_spark.sources.files.store import FileSelection, ObjectStore, open_store


def text(path: Path, **options: Any) -> FilesSource:
    return FilesSource(str(path), format="text", **options)


def put(path: Path, name: str, content: str = "a\n", mtime: float | None = None) -> Path:
    file = path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    if mtime is not None:
        os.utime(file, (mtime, mtime))
    return file


def names(window: Any) -> list[str]:
    return sorted({piece[0] for split in window.splits for piece in split["files"]})


# --- which files --------------------------------------------------------------------------------------------------------


def test_hidden_and_empty_and_temporary_files_are_passed_over(path):
    for name in ("_SUCCESS", ".crc", "_temporary/0/a", ".hidden/a", "a._COPYING_", "sub/_b", "x/_c/d"):
        put(path, name)
    put(path, "empty", "")
    for name in ("a", "sub/b", "_k=1/c", "k=2/d"):
        put(path, name)
    assert names(text(path).freeze(None)) == ["a"]
    assert names(text(path, recursive=True).freeze(None)) == ["_k=1/c", "a", "k=2/d", "sub/b"]


def test_an_empty_file_is_read_once_there_is_something_in_it(path):
    put(path, "a")
    put(path, "later", "")
    window = text(path).freeze(None)
    assert names(window) == ["a"]
    put(path, "later", "now\n")
    assert names(text(path).freeze(window.position)) == ["later"]


def test_the_glob_is_for_names(path):
    for name in ("a.txt", "b.csv", "sub/c.txt", "[x].txt"):
        put(path, name)
    assert names(text(path, glob="*.txt").freeze(None)) == ["[x].txt", "a.txt"]
    assert names(text(path, glob="*.txt", recursive=True).freeze(None)) == ["[x].txt", "a.txt", "sub/c.txt"]


def test_another_glob_finds_old_files_as_long_as_all_are_remembered(path):
    put(path, "a.txt")
    put(path, "b.csv")
    window = text(path, glob="*.txt").freeze(None)
    assert names(text(path).freeze(window.position)) == ["b.csv"]
    forgotten = {**window.position, "horizon": [1, "x"]}
    with pytest.raises(SourceRejected, match=r"read with `glob='\*.txt'`"):
        text(path).freeze(forgotten)


@pytest.mark.parametrize("other", [{"glob": "*.csv"}, {"recursive": False}], ids=["glob", "recursive"])
def test_files_that_were_read_with_other_options_are_not_read_again_when_the_options_return(path, monkeypatch, other):
    monkeypatch.setattr(seen, "KEEP_REMOVED", 2)
    monkeypatch.setattr(seen, "DAYS_REMEMBERED", 0)
    options = {"glob": "*.txt", "recursive": True}
    old = time.time() - 86_400
    for name in ("sub/a.txt", "sub/b.txt", "sub/c.txt"):
        put(path, name, mtime=old)
    window = text(path, **options).freeze(None)
    for name in ("d.csv", "e.csv", "f.csv", "g.txt"):
        put(path, name, mtime=old)
        window = text(path, **{**options, **other}, max_files=1).freeze(window.position)
    (path / "sub/c.txt").unlink()
    window = text(path, **{**options, **other}).freeze(window.position)
    put(path, "h.txt")
    window = text(path, **options).freeze(window.position)
    assert names(window) == (["g.txt", "h.txt"] if "glob" in other else ["h.txt"])
    put(path, "sub/c.txt", mtime=old)
    assert names(text(path, **options).freeze(window.position)) == ["sub/c.txt"], "a file that was gone is forgotten"


def test_links_to_files_are_files_and_links_to_directories_are_not_followed(path, tmp_path):
    put(tmp_path, "elsewhere/a")
    (path / "link").symlink_to(tmp_path / "elsewhere" / "a")
    (path / "loop").symlink_to(path)
    (path / "dangling").symlink_to(tmp_path / "nothing")
    assert names(text(path, recursive=True).freeze(None)) == ["link"]


# --- windows ------------------------------------------------------------------------------------------------------------


def test_the_oldest_files_come_first_and_the_rest_remains(path):
    for n in (3, 1, 2, 5, 4):
        put(path, f"f{n}", "x" * 10, mtime=1000 + n)
    position, seen = None, []
    for _ in range(3):
        window = text(path, max_files=2).freeze(position)
        seen.append((names(window), window.remaining))
        position = json.loads(json.dumps(window.position))
    assert seen == [(["f1", "f2"], True), (["f3", "f4"], True), (["f5"], False)]
    assert names(text(path, max_bytes=25).freeze(None)) == ["f1", "f2"]
    assert names(text(path, max_bytes=1).freeze(None)) == ["f1"]


def test_files_that_arrive_late_with_an_older_modification_time_are_read(path):
    put(path, "new", mtime=2000)
    window = text(path).freeze(None)
    put(path, "old", mtime=1000)
    put(path, "same", mtime=2000)
    put(path, "future", mtime=time.time() + 1e6)
    assert names(text(path).freeze(window.position)) == ["future", "old", "same"]


def test_young_files_wait(path):
    now = time.time()
    put(path, "old", mtime=now - 100)
    put(path, "young", mtime=now)
    window = text(path, min_age=50).freeze(None)
    assert names(window) == ["old"]
    assert text(path, min_age=50).freeze(window.position).splits == ()
    assert names(text(path).freeze(window.position)) == ["young"]
    put(path, "ahead", mtime=now + 200)
    assert text(path, min_age=50).freeze(window.position).splits == ()
    put(path, "future", mtime=now + 1e6)
    with pytest.raises(SourceRejected, match="`future` has a modification time in the future"):
        text(path, min_age=50).freeze(window.position)
    assert names(text(path).freeze(window.position)) == ["ahead", "future", "young"]


def test_a_removed_file_is_no_trouble_for_later_windows_and_is_known_when_put_back(path):
    file = put(path, "a", mtime=1000)
    window = text(path).freeze(None)
    file.unlink()
    put(path, "b")
    window = text(path).freeze(window.position)
    assert names(window) == ["b"]
    put(path, "a", mtime=1000)
    assert text(path).freeze(window.position).splits == ()


def test_a_subdirectory_that_is_not_mounted_for_a_while_is_not_read_again(path, monkeypatch):
    monkeypatch.setattr(seen, "KEEP_REMOVED", 2)
    for name in ("a", "share/b", "share/c", "share/d"):
        put(path, name, mtime=1000)
    window = text(path, recursive=True).freeze(None)
    (path / "share").rename(path / "_elsewhere")
    for name in ("e", "f"):
        put(path, name, mtime=1001)
        window = text(path, recursive=True).freeze(window.position)
        assert names(window) == [name]
    (path / "_elsewhere").rename(path / "share")
    put(path, "share/g", mtime=1000)
    assert names(text(path, recursive=True).freeze(window.position)) == ["share/g"]


@pytest.mark.parametrize("change", ["size", "mtime"])
def test_a_changed_file_fails_or_is_read_or_ignored(path, change):
    put(path, "a", mtime=1000)
    window = text(path).freeze(None)
    put(path, "a", "aa\n" if change == "size" else "a\n", mtime=1000 if change == "size" else 1001)
    put(path, "b")
    with pytest.raises(SourceRejected, match="`a` has changed after being read"):
        text(path).freeze(window.position)
    again = text(path, on_change="read").freeze(window.position)
    assert names(again) == ["a", "b"]
    assert text(path).freeze(again.position).splits == ()
    without = text(path, on_change="ignore").freeze(window.position)
    assert names(without) == ["b"]
    assert text(path, on_change="ignore").freeze(without.position).splits == ()


def test_a_late_file_behind_what_was_forgotten_fails_and_touching_it_helps(path, monkeypatch):
    monkeypatch.setattr(seen, "FORGET_ABOVE", 5)
    for n in range(20):
        put(path, f"f{n:02}", mtime=1000 + n)
    window = text(path).freeze(None)
    assert window.position["horizon"] == [1014 * 1_000_000, "f14"]
    late = put(path, "late", mtime=1003)
    with pytest.raises(SourceRejected, match=r"1 files have appeared .* 1970-01-01 00:16:54 UTC.*touch"):
        text(path).freeze(window.position)
    late.touch()
    assert names(text(path).freeze(window.position)) == ["late"]
    # Neither do old files that were removed hide it, of another day, or before the last listing.
    late.unlink()
    (path / "f01").unlink()
    another_day = put(path, "another day", mtime=-86_400)
    with pytest.raises(SourceRejected, match="1 files have appeared"):
        text(path).freeze(window.position)
    another_day.unlink()
    empty = text(path).freeze(window.position)
    assert empty.splits == ()
    put(path, "late", mtime=1003)
    with pytest.raises(SourceRejected, match="1 files have appeared"):
        text(path).freeze(empty.position)


def test_more_files_than_can_be_remembered_are_refused_with_advice(path, monkeypatch):
    monkeypatch.setattr(seen, "FORGET_ABOVE", 5)
    monkeypatch.setattr(seen, "MAX_REMEMBERED", 8)
    for n in range(9):
        put(path, f"f{n:02}")
    with pytest.raises(SourceRejected, match="9 files arrived within the allowed lateness of 21,600 s.*Lower `allowed_lateness`"):
        text(path).freeze(None)
    assert len(names(text(path, allowed_lateness=0).freeze(None))) == 9


def test_a_position_belongs_to_its_directory(path, tmp_path):
    put(path, "a")
    window = text(path).freeze(None)
    (tmp_path / "other").mkdir()
    with pytest.raises(SourceRejected, match=r"has read file://.*/in so far.*pipeline="):
        text(tmp_path / "other").freeze(window.position)
    with pytest.raises(SourceRejected, match="version 2, not 1"):
        text(path).freeze({**window.position, "version": 2})
    with pytest.raises(SourceRejected, match="cannot be understood"):
        text(path).freeze({**window.position, "files": "AAAA"})


# --- sizes --------------------------------------------------------------------------------------------------------------


def test_a_window_takes_what_its_plan_can_hold(path, monkeypatch):
    monkeypatch.setattr(files_windows, "MAX_PLAN_BYTES", 3_000)
    for n in range(100):
        put(path, f"f{n:03}", mtime=1000 + n)
    position, seen = None, []
    while (window := text(path).freeze(position)).splits:
        assert len(json.dumps(window.splits)) <= 3_000
        seen += names(window)
        position = window.position
    assert seen == [f"f{n:03}" for n in range(100)]


def test_a_window_has_no_more_splits_than_a_plan_may(path):
    for n in range(5):
        put(path, f"f{n}", "x" * (600 << 10), mtime=1000 + n)
    window = text(path, split_bytes=1024).freeze(None)
    assert names(window) == ["f0", "f1", "f2"]
    assert (len(window.splits), window.remaining) == (1800, True)
    put(path, "huge", "x" * (2001 << 10), mtime=1)
    with pytest.raises(
        SourceRejected, match="`huge` of 2,049,024 bytes makes more than 2,000 splits of 1,024 bytes.*split_bytes"
    ):
        text(path, split_bytes=1024).freeze(None)


def test_a_wide_directory_is_frozen_within_seconds(path):
    for n in range(5_000):
        put(path, f"part-{n:05}.txt")
    started = time.process_time()
    source = text(path)
    window = source.freeze(None)
    second = source.freeze(window.position)
    assert time.process_time() - started < 10
    assert not second.remaining
    assert len(names(window)) + len(names(second)) == 5_000
    for one in (window, second):
        assert len(json.dumps(one.splits)) < 410_000
        assert len(json.dumps(one.position)) < 120_000


# --- footers ------------------------------------------------------------------------------------------------------------


def parquet(path: Path, name: str, table: pa.Table, mtime: float | None = None) -> None:
    pa.parquet.write_table(table, path / name)
    if mtime:
        os.utime(path / name, (mtime, mtime))


def test_rows_of_parquet_and_orc_are_counted(path):
    for n in range(3):
        parquet(path, f"{n}.parquet", pa.table({"a": pa.array(range(n), pa.int64())}))
        pa.orc.write_table(pa.table({"a": pa.array(range(10 * n), pa.int64())}), path / f"{n}.orc")
    assert FilesSource(str(path), glob="*.parquet").freeze(None).rows == 3
    assert FilesSource(str(path), format="orc", glob="*.orc").freeze(None).rows == 30
    assert FilesSource(str(path), glob="*.parquet").find_columns() == ("a",)
    assert FilesSource(str(path), glob="nothing").find_columns() is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (pa.array([uuid.UUID(int=7)], pa.uuid()), "is UUID"),
        (pa.array([dt.time(1)], pa.time64("us")), "is TIME in microseconds"),
        (pa.array([dt.datetime(2026, 1, 1)], pa.timestamp("ns")), "is TIMESTAMP in nanoseconds"),
        (pa.array([1.5], pa.float16()), "is FLOAT16"),
        (pa.array([10**40], pa.decimal256(60, 0)), "is DECIMAL of 60 digits"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_columns_that_spark_cannot_read_are_named_before_a_window_is_planned(path, values, said):
    pa.parquet.write_table(pa.table({"id": [1], "c": pa.StructArray.from_arrays([values], ["inner"])}), path / "a")
    with pytest.raises(SourceRejected, match=f"cannot read column `c` of `a`, which {said}"):
        FilesSource(str(path)).freeze(None)
    assert FilesSource(str(path), schema="id bigint").freeze(None).rows == 1
    (path / "a").unlink()
    old = {"use_deprecated_int96_timestamps": True}
    pa.parquet.write_table(
        pa.table({"id": [1], "at": pa.array([dt.datetime(2026, 1, 1)], pa.timestamp("ns"))}), path / "b", **old
    )
    assert FilesSource(str(path)).freeze(None).rows == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (pa.array([dt.datetime(2026, 1, 1)], pa.timestamp("us", "UTC")), "is TIMESTAMP_INSTANT"),
        (pa.UnionArray.from_sparse(pa.array([0], pa.int8()), [pa.array([1])]), "is UNIONTYPE"),
    ],
    ids=["instant", "union"],
)
def test_columns_of_orc_that_spark_cannot_read_are_named_before_a_window_is_planned(path, values, said):
    pa.orc.write_table(pa.table({"id": [1], "c": pa.StructArray.from_arrays([values], ["inner"])}), path / "a")
    with pytest.raises(SourceRejected, match=f"cannot read column `c` of `a`, which {said}"):
        FilesSource(str(path), "orc").freeze(None)
    assert FilesSource(str(path), "orc", schema="id bigint").freeze(None).rows == 1


def test_files_that_spark_would_take_for_empty_or_fail_at_are_refused(path):
    for name, table, said in (
        ("none", pa.table({}), "`none` has no columns"),
        (
            "case",
            pa.table({"x": [1], "X": [1]}),
            "cannot read `case`, whose column `X` has the name of another one, apart from case",
        ),
    ):
        pa.parquet.write_table(table, path / name)
        with pytest.raises(SourceRejected, match=said):
            FilesSource(str(path), glob=name).freeze(None)
    for name, said in (
        ("a.bz2", "`a.bz2` is not a bzip2 file"),
        ("a.LZ4", "such as `a.LZ4`"),
        ("a.snappy", "such as `a.snappy`"),
    ):
        put(path, name, '{"id": 1}')
        with pytest.raises(SourceRejected, match=said):
            FilesSource(str(path), "json", glob=name, schema="id int").freeze(None)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("day=2026-11-01/a", "its directories are day=, and `partition_columns` expect day=/n="),
        ("n=1/day=2026-11-01/a", "its directories are n=/day=, and"),
        ("a", "its directories are none of the form `column=value`"),
        ("Day=2026-11-01/n=1/a", "its directories are Day=/n=, and"),
        ("day=2026-02-30/n=1/a", "day is out of range"),
        ("day=2026-11-01/n=128/a", "its directory `n=128` has no tinyint"),
        ("day=2026-11-01/n=1.0/a", "its directory `n=1.0` has no tinyint"),
        ("day=2026-11-01/n=%FF/a", "can't decode byte 0xff"),
    ],
)
def test_files_in_directories_of_other_columns_are_refused_and_named(path, name, said):
    put(path, "day=2026-11-01/n=1/good")
    source = text(path, recursive=True, partition_columns="day date, n tinyint")
    window = source.freeze(None)
    put(path, name)
    with pytest.raises(SourceRejected, match=re.escape(f"`{name}`: ") + ".*" + re.escape(said)):
        source.freeze(window.position)


def test_directories_that_give_no_columns_are_logged_and_columns_that_are_in_the_files_too_are_refused(path, caplog):
    (path / "x=1").mkdir()
    pa.parquet.write_table(pa.table({"X": [1]}), path / "x=1" / "a")
    with caplog.at_level("WARNING"):
        assert FilesSource(str(path), recursive=True).freeze(None).rows == 1
    assert "that of `x=1/a` give no columns: `partition_columns` is not set" in caplog.text
    with pytest.raises(SourceRejected, match="`x=1/a` has the column `X`, which its directory gives, too"):
        FilesSource(str(path), recursive=True, partition_columns="x int").freeze(None)


def test_files_of_different_schemas_are_refused_and_the_difference_is_shown(path):
    parquet(path, "a.parquet", pa.table({"id": [1], "name": ["a"]}), 1000)
    parquet(path, "b.parquet", pa.table({"id": [1], "name": ["a"]}), 1001)
    parquet(path, "c.parquet", pa.table({"id": ["1"], "note": ["a"]}), 1002)
    with pytest.raises(SourceRejected) as caught:
        FilesSource(str(path)).freeze(None)
    for part in (
        "`c.parquet` (1 of 3 files)",
        "its `id` is string, not int64",
        "it lacks `name` string",
        "it adds `note` string",
    ):
        assert part in str(caught.value)
    assert FilesSource(str(path), schema="id string, name string").freeze(None).rows == 3
    assert names(FilesSource(str(path), max_files=2).freeze(None)) == ["a.parquet", "b.parquet"]


def test_what_spark_reads_alike_is_no_difference(path):
    nested = pa.struct([("x", pa.list_(pa.field("element", pa.int32(), nullable=False)))])
    other = pa.struct([("x", pa.large_list(pa.field("item", pa.int32())))])
    moment = [1_000_000]
    parquet(
        path,
        "a.parquet",
        pa.table({"s": pa.array([{"x": [1]}], nested), "t": pa.array(moment, pa.timestamp("us")), "c": pa.array(["a"])}),
    )
    parquet(
        path,
        "b.parquet",
        pa.table(
            {
                "c": pa.array(["a"]).dictionary_encode(),
                "t": pa.array([1000], pa.timestamp("ms")),
                "s": pa.array([{"x": [1]}], other),
            }
        ),
    )
    assert FilesSource(str(path)).freeze(None).rows == 2


@pytest.mark.parametrize("format", ["parquet", "orc"])
def test_a_damaged_file_is_named_when_the_window_is_frozen(path, format):
    put(path, "ok", "no footer here")
    with pytest.raises(SourceRejected, match=rf"`ok` \(14 bytes\) is not a readable {format} file"):
        FilesSource(str(path), format=format).freeze(None)


# --- validate -----------------------------------------------------------------------------------------------------------


def test_everything_is_found_at_once(path):
    source = FilesSource(
        str(path / "missing"),
        format="csv",
        glob="a/*",
        options={"heeder": True, "inferSchema": True, "mode": "PERMISSIVE", "sep": ",", "delimiter": ";"},
        split_bytes=10,
        max_files=0,
        max_bytes=True,
        min_age=-1,
        on_change="panic",
    )
    found = [str(problem) for problem in source.validate()]
    for part in (
        "source.path: ", "does not exist", "source.split_bytes: it is 10; expected a whole number from 1,024", "source.max_files",
        "source.max_bytes", "source.min_age", "source.on_change: `panic`", "source.glob", "source.schema: csv files have no",
        "has no option `heeder`", "`inferSchema` cannot be set here", "`mode` is `PERMISSIVE`", "`delimiter` and `sep`",
    ):  # fmt: skip
        assert any(part in problem for problem in found), (part, found)
    assert all(problem.startswith("source.") for problem in found)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"format": "xml"}, ["`xml` is not known; expected one of parquet, json, csv, orc, text"]),
        ({"format": "json"}, ["json files have no types"]),
        ({"format": "json", "schema": "a bigint,, b"}, ["The schema has"]),
        ({"format": "json", "schema": "a varchar(3)"}, ["Use string"]),
        ({"format": "csv", "schema": "a array<int>"}, ["csv cannot hold"]),
        ({"format": "text", "schema": "value string"}, ["Leave `schema` out"]),
        ({"format": "text", "options": {"wholetext": True, "lineSep": ";"}}, ["contradict"]),
        ({"format": "parquet", "options": {"mergeSchema": True}}, ["Give `schema`"]),
        ({"format": "parquet", "options": {"header": True}}, ["Spark's parquet reader has no option `header`"]),
        ({"format": "csv", "schema": "a int", "options": {"header": "yes"}}, ["expected true or false"]),
        ({"format": "csv", "schema": "a int", "options": {"header": 1, "HEADER": 1}}, ["given twice", "expected true"]),
        ({"schema": ["a int"]}, ["source.schema: it is ['a int']; expected columns as Spark DDL"]),
        ({"partition_columns": ["day"]}, ["source.partition_columns: it is ['day']; expected columns as Spark DDL"]),
        ({"partition_columns": "day date"}, ["Set `recursive=True`"]),
        ({"partition_columns": "day datum", "recursive": True}, ["source.partition_columns: The schema has"]),
        ({"partition_columns": "day timestamp", "recursive": True}, ["`day` is timestamp; expected string, an integer"]),
        ({"partition_columns": "Value int", "recursive": True, "format": "text"}, ["`Value` is a column of the files, too"]),
        ({"format": "text", "options": {"basePath": "/"}}, ["name the columns that directories give in `partition_columns`"]),
        ({"conn_id": "aws"}, ["needs no connection"]),
        ({"path": "in"}, ["`in` is not an absolute path"]),
        ({"path": "s3a:bucket"}, ["neither an absolute path nor a URI"]),
        ({"path": "file://host/x"}, ["names the host host"]),
        ({"path": "nosuchscheme://bucket/x"}, ["cannot be listed"]),
        ({"path": "/nowhere/in/*.json"}, ["/nowhere/in/*.json does not exist. Name the directory in `path`, and the files"]),
        ({"format": "json", "schema": "a int, _corrupt_record string", "options": {"mode": "PERMISSIVE"}}, []),
        ({"format": "csv", "schema": "a int", "options": {"header": True, "Delimiter": ";", "multiLine": "true"}}, []),
        ({}, []),
    ],
)
def test_problems(path, options, expected):
    found = [str(problem) for problem in FilesSource(**{"path": str(path), **options}).validate()]
    assert len(found) == len(expected), found
    for part, problem in zip(expected, found, strict=True):
        assert part in problem


def test_a_file_is_no_directory_and_a_closed_one_cannot_be_listed(path):
    file = put(path, "a")
    assert "is not a directory" in str(text(file).validate()[0])
    if os.geteuid():
        path.chmod(0)
        try:
            assert "cannot be listed by user" in str(text(path).validate()[0])
        finally:
            path.chmod(0o755)


def test_a_directory_that_has_gone_may_come_back(path):
    with pytest.raises(SourceUnavailable, match="listing files"):
        text(path / "gone").freeze(None)


# --- places -------------------------------------------------------------------------------------------------------------


def test_uris():
    assert FilesSource("/data/in/").uri == "file:///data/in"
    assert FilesSource("file:///data/a%20b").uri == "file:///data/a%20b"
    assert FilesSource("/data/{{ ds }}").uri == "/data/{{ ds }}"
    assert FilesSource("s3://key@bucket/prefix/").uri == "s3://bucket/prefix"
    assert open_store("s3://key@bucket/prefix/", None).root == "s3a://bucket/prefix"
    assert open_store("abfss://container@account.dfs.core.windows.net/x", None).root.startswith("abfss://container@account")
    source = FilesSource("/data", options={"a": 1})
    assert pickle.loads(pickle.dumps(source)) == source
    assert hash(source) == hash(replace(source))


def test_an_object_store_is_listed_by_fsspec():
    memory = fsspec.filesystem("memory")
    for name, content in {"a": b"1\n", "_b": b"1\n", "empty": b"", "sub/c": b"22\n"}.items():
        with memory.open(f"/files-source/in/{name}", "wb") as file:
            file.write(content)
    try:
        store = ObjectStore("memory://files-source/in")
        assert {f.name: f.size for f in store.list_files(FileSelection())} == {"a": 2, "empty": 0}
        assert {f.name: f.size for f in store.list_files(FileSelection(recursive=True))} == {"a": 2, "empty": 0, "sub/c": 3}
        source = FilesSource("memory://files-source/in", format="text", recursive=True)
        assert source.validate() == []
        window = source.freeze(None)
        assert names(window) == ["a", "sub/c"]
        assert source.freeze(window.position).splits == ()
        there = store.stat(["a", "sub/c", "gone"])
        assert sorted(there) == ["a", "sub/c"]
        with store.open("sub/c") as opened:
            assert opened.read() == b"22\n"
        with pytest.raises(SourceUnavailable):
            FilesSource("memory://files-source/none", format="text").freeze(None)
    finally:
        memory.rm("/files-source", recursive=True)
