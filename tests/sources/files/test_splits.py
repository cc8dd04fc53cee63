"""The splits of files: pure functions, and properties of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_kafka_spark.sources.files.splits import compute_open_cost, decode_split, encode_split, is_splittable, split_files
from airflow_kafka_spark.sources.files.store import ListedFile

SECOND = 1_000_000
SPLIT = 1024


def file(number: int, size: int = 10, mtime: int | None = None, etag: str = "") -> ListedFile:
    return ListedFile(f"f{number:06}", size, SECOND * (number if mtime is None else mtime), etag)


FILES = st.lists(st.tuples(st.integers(1, 5 * SPLIT), st.integers(0, 9), st.booleans()), max_size=40)


@settings(max_examples=100, deadline=None)
@given(FILES)
def test_splits_tile_the_files_and_none_is_too_large(drawn):
    files = [file(n, size, mtime) for n, (size, mtime, _) in enumerate(drawn)]
    whole = {f.name for f, (_, _, stays) in zip(files, drawn, strict=True) if stays}
    splits = split_files(files, SPLIT, whole)
    assert all(splits)
    slices = sorted((p.file.name, p.start, p.length) for split in splits for p in split)
    assert sum(length for *_, length in slices) == sum(f.size for f in files)
    for f in files:
        mine = [(start, length) for name, start, length in slices if name == f.name]
        assert [start for start, _ in mine] == [sum(length for _, length in mine[:n]) for n in range(len(mine))]
        assert len(mine) == 1 or f.name not in whole
    for split in splits:
        assert len(split) == 1 or sum(p.length + compute_open_cost(SPLIT) for p in split) <= SPLIT + compute_open_cost(SPLIT)


@settings(max_examples=50, deadline=None)
@given(FILES, st.randoms(use_true_random=False))
def test_the_splits_do_not_depend_on_the_order_of_the_listing(drawn, random):
    files = [file(n, size, mtime) for n, (size, mtime, _) in enumerate(drawn)]
    expected = split_files(files, SPLIT)
    random.shuffle(files)
    assert split_files(files, SPLIT) == expected
    assert [decode_split(json.loads(json.dumps(encode_split(split, SPLIT)))) for split in expected] == list(expected)


def test_an_etag_travels_in_the_plan():
    [split] = split_files([file(1, etag="abc")], SPLIT)
    assert encode_split(split, SPLIT) == {"files": [["f000001", 0, 10, 10, SECOND, "abc"]], "split_bytes": SPLIT}
    assert decode_split(encode_split(split, SPLIT)) == split


@pytest.mark.parametrize(
    ("name", "format", "options", "expected"),
    [
        ("a.parquet", "parquet", {}, True),
        ("a.gz.parquet", "parquet", {}, True),
        ("a.json", "json", {}, True),
        ("a.json.gz", "json", {}, False),
        ("a.json.zst", "json", {}, False),
        ("a.JSON.GZ", "json", {}, False),
        ("a.json.bz2", "json", {}, True),
        ("a.json", "json", {"multiline": "true"}, False),
        ("a.csv", "csv", {"multiline": "false"}, True),
        ("a.txt", "text", {"wholetext": "true"}, False),
    ],
)
def test_what_can_be_read_from_its_middle(name, format, options, expected):
    assert is_splittable(name, format, options) is expected
