"""How files are cut and what is remembered of them: pure functions, and properties of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_kafka_spark.sources.files.memory import GONE, MOST, REMEMBERED, Memory, TooMany
from airflow_kafka_spark.sources.files.splits import File, cut, decode, encode, is_splittable, open_cost

SECOND = 1_000_000
SPLIT = 1024


def file(number: int, size: int = 10, mtime: int | None = None, etag: str = "") -> File:
    return File(f"f{number:06}", size, SECOND * (number if mtime is None else mtime), etag)


FILES = st.lists(st.tuples(st.integers(1, 5 * SPLIT), st.integers(0, 9), st.booleans()), max_size=40)


@settings(max_examples=100, deadline=None)
@given(FILES)
def test_splits_tile_the_files_and_none_is_too_large(drawn):
    files = [file(n, size, mtime) for n, (size, mtime, _) in enumerate(drawn)]
    whole = {f.name for f, (_, _, stays) in zip(files, drawn, strict=True) if stays}
    packs = cut(files, SPLIT, whole)
    assert all(packs)
    pieces = sorted((p.file.name, p.start, p.length) for pack in packs for p in pack)
    assert sum(length for *_, length in pieces) == sum(f.size for f in files)
    for f in files:
        mine = [(start, length) for name, start, length in pieces if name == f.name]
        assert [start for start, _ in mine] == [sum(length for _, length in mine[:n]) for n in range(len(mine))]
        assert len(mine) == 1 or f.name not in whole
    for pack in packs:
        assert len(pack) == 1 or sum(p.length + open_cost(SPLIT) for p in pack) <= SPLIT + open_cost(SPLIT)


@settings(max_examples=50, deadline=None)
@given(FILES, st.randoms(use_true_random=False))
def test_the_cut_does_not_depend_on_the_order_of_the_listing(drawn, random):
    files = [file(n, size, mtime) for n, (size, mtime, _) in enumerate(drawn)]
    expected = cut(files, SPLIT)
    random.shuffle(files)
    assert cut(files, SPLIT) == expected
    assert [decode(json.loads(json.dumps(encode(pack, SPLIT)))) for pack in expected] == list(expected)


def test_an_etag_travels_in_the_plan():
    [pack] = cut([file(1, etag="abc")], SPLIT)
    assert encode(pack, SPLIT) == {"files": [["f000001", 0, 10, 10, SECOND, "abc"]], "split_bytes": SPLIT}
    assert decode(encode(pack, SPLIT)) == pack


@pytest.mark.parametrize(
    ("name", "format", "options", "expected"),
    [
        ("a.parquet", "parquet", {}, True),
        ("a.gz.parquet", "parquet", {}, True),
        ("a.json", "json", {}, True),
        ("a.json.gz", "json", {}, False),
        ("a.json.zst", "json", {}, False),
        ("a.json.bz2", "json", {}, True),
        ("a.json", "json", {"multiline": "true"}, False),
        ("a.csv", "csv", {"multiline": "false"}, True),
        ("a.txt", "text", {"wholetext": "true"}, False),
    ],
)
def test_what_can_be_read_from_its_middle(name, format, options, expected):
    assert is_splittable(name, format, options) is expected


# --- memory -------------------------------------------------------------------------------------------------------------


def through_json(memory: Memory) -> Memory:
    return Memory.load(json.loads(json.dumps(memory.dump())))


def take(memory: Memory, listed: list[File], most: int, settled: int) -> tuple[Memory, list[File]]:
    """One window."""
    listing = memory.sort(listed, None)
    taken = listing.new[:most]
    return through_json(memory.after(listing, taken, settled)), list(taken)


def test_a_directory_of_any_size_is_read_once_and_its_memory_is_bounded():
    files = [file(n) for n in range(40_000)]
    memory, seen = Memory(), []
    while len(seen) < len(files):
        memory, taken = take(memory, files, 4_000, settled=10**9 * SECOND)
        assert taken
        seen += taken
        assert len(memory.entries) <= REMEMBERED
        assert len(json.dumps(memory.dump())) < 230_000
    assert seen == files
    assert memory.sort(files, None).new == ()
    assert memory.horizon is not None
    assert memory.horizon < files[-1].key


def test_the_horizon_stays_before_what_was_listed_and_not_read():
    """Also when an unread file is old: it came late, and its turn is in a later window."""
    files = [file(n) for n in range(14_000)]
    memory = Memory()
    for _ in range(2):
        memory, _ = take(memory, files, 4_990, settled=10**9 * SECOND)
    late = [file(100_000 + n, mtime=5) for n in range(2_000)]
    listed = [*files, *late]
    seen = []
    for _ in range(10):
        memory, taken = take(memory, listed, 1_000, settled=10**9 * SECOND)
        seen += taken
    assert sorted(f.name for f in seen) == sorted(f.name for f in [*late, *files[9_980:]])


def test_nothing_younger_than_the_lateness_is_forgotten():
    files = [file(n, mtime=7) for n in range(MOST)]
    memory = Memory()
    for _ in range(3):
        memory, taken = take(memory, files, 5_000, settled=7 * SECOND)
        assert len(taken) == 5_000
    assert memory.horizon is None
    assert len(json.dumps(memory.dump())) < 330_000
    with pytest.raises(TooMany, match=f"at most {MOST}"):
        take(memory, [*files, file(MOST, mtime=7)], 1, settled=7 * SECOND)
    after, _ = take(memory, [*files, file(MOST, mtime=7)], 1, settled=8 * SECOND)
    assert len(after.entries) == REMEMBERED


def test_files_that_appear_behind_the_horizon_are_counted():
    files = [file(n) for n in range(12_000)]
    memory = Memory()
    for _ in range(3):
        memory, _ = take(memory, files, 4_000, settled=10**9 * SECOND)
    assert memory.sort(files, None).late == 0
    assert memory.sort([*files, file(50_000, mtime=3)], None).late == 1
    assert memory.sort(files[5:], None).late == 0


def test_files_that_are_gone_are_forgotten_once_they_are_settled():
    files = [file(n) for n in range(3_000)]
    memory, _ = take(Memory(), files, 3_000, settled=0)
    young, _ = take(memory, [file(5_000)], 10, settled=100 * SECOND)
    assert len(young.entries) == 3_001 - 100
    old, _ = take(memory, [file(5_000)], 10, settled=4_000 * SECOND)
    assert len(old.entries) == 1
    few, _ = take(Memory(), files[: GONE - 1], GONE, settled=0)
    few, _ = take(few, [file(5_000)], 10, settled=4_000 * SECOND)
    assert len(few.entries) == GONE


@pytest.mark.parametrize("other", [file(1, size=11), file(1, mtime=2), file(1, etag="b")])
def test_a_file_is_another_by_size_time_or_etag(other):
    memory, _ = take(Memory(), [file(1)], 1, settled=0)
    assert memory.sort([file(1)], None).read == (file(1),)
    assert memory.sort([other], None).changed == (other,)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_windows_of_a_growing_directory_give_each_file_once(data):
    """Files come in any order of modification times, windows take as many as they like, listed files may be removed."""
    memory, there, seen, number = Memory(), [], [], 0
    everything = []
    for _ in range(data.draw(st.integers(1, 8))):
        for mtime in data.draw(st.lists(st.integers(0, 20), max_size=8)):
            there.append(file(number, mtime=mtime))
            everything.append(there[-1])
            number += 1
        memory, taken = take(memory, there, data.draw(st.integers(0, 6)), settled=data.draw(st.integers(0, 30)) * SECOND)
        seen += taken
        gone = data.draw(st.sets(st.sampled_from(seen))) if seen else set()
        there = [f for f in there if f not in gone]
    memory, taken = take(memory, there, len(everything), settled=0)
    assert sorted(f.name for f in [*seen, *taken]) == [f.name for f in everything]
