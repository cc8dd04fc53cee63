"""The record of files that were read: pure functions, and properties of them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_kafka_spark.sources.files.seen import FORGET_ABOVE, KEEP_REMOVED, MAX_REMEMBERED, SeenFiles, TooManyFiles
from airflow_kafka_spark.sources.files.store import ListedFile

SECOND = 1_000_000


def file(number: int, size: int = 10, mtime: int | None = None, etag: str = "") -> ListedFile:
    return ListedFile(f"f{number:06}", size, SECOND * (number if mtime is None else mtime), etag)


def through_json(seen_files: SeenFiles) -> SeenFiles:
    return SeenFiles.load(json.loads(json.dumps(seen_files.dump())))


def take(
    seen_files: SeenFiles, listed: list[ListedFile], most: int, settled: int, today: int = 100
) -> tuple[SeenFiles, list[ListedFile]]:
    """One window."""
    listing = seen_files.classify(listed, None)
    taken = listing.new[:most]
    return through_json(seen_files.add_window(listing, taken, settled, today)), list(taken)


def test_a_directory_of_any_size_is_read_once_and_its_memory_is_bounded():
    files = [file(n) for n in range(40_000)]
    seen_files, seen = SeenFiles(), []
    while len(seen) < len(files):
        seen_files, taken = take(seen_files, files, 4_000, settled=10**9 * SECOND)
        assert taken
        seen += taken
        assert len(seen_files.entries) <= FORGET_ABOVE
        assert len(json.dumps(seen_files.dump())) < 230_000
    assert seen == files
    assert seen_files.classify(files, None).new == ()
    assert seen_files.horizon is not None
    assert seen_files.horizon < files[-1].key


def test_the_horizon_stays_before_what_was_listed_and_not_read():
    """This holds for an old file, too, that was found late and will be read in a later window."""
    files = [file(n) for n in range(14_000)]
    seen_files = SeenFiles()
    for _ in range(2):
        seen_files, _ = take(seen_files, files, 4_990, settled=10**9 * SECOND)
    late = [file(100_000 + n, mtime=5) for n in range(2_000)]
    listed = [*files, *late]
    seen = []
    for _ in range(10):
        seen_files, taken = take(seen_files, listed, 1_000, settled=10**9 * SECOND)
        seen += taken
    assert sorted(f.name for f in seen) == sorted(f.name for f in [*late, *files[9_980:]])


def test_nothing_younger_than_the_lateness_is_forgotten():
    files = [file(n, mtime=7) for n in range(MAX_REMEMBERED)]
    seen_files = SeenFiles()
    for _ in range(3):
        seen_files, taken = take(seen_files, files, 5_000, settled=7 * SECOND)
        assert len(taken) == 5_000
    assert seen_files.horizon is None
    assert len(json.dumps(seen_files.dump())) < 330_000
    with pytest.raises(TooManyFiles, match=f"at most {MAX_REMEMBERED}"):
        take(seen_files, [*files, file(MAX_REMEMBERED, mtime=7)], 1, settled=7 * SECOND)
    after, _ = take(seen_files, [*files, file(MAX_REMEMBERED, mtime=7)], 1, settled=8 * SECOND)
    assert len(after.entries) == FORGET_ABOVE


def test_files_that_appear_behind_the_horizon_are_counted():
    files = [file(n) for n in range(12_000)]
    seen_files = SeenFiles()
    for _ in range(3):
        seen_files, _ = take(seen_files, files, 4_000, settled=10**9 * SECOND)
    assert seen_files.classify(files, None).late == 0
    assert seen_files.classify([*files, file(50_000, mtime=3)], None).late == 1
    assert seen_files.classify(files[5:], None).late == 0
    # Old files are removed by then.
    late = file(50_000, mtime=-86_400)
    assert seen_files.classify([*files[5:], late], None).late == 1


def test_files_that_are_gone_are_forgotten_a_week_later_once_they_are_settled():
    files = [file(n) for n in range(3_000)]
    seen_files, _ = take(SeenFiles(), files, 3_000, settled=0)
    gone, _ = take(seen_files, [file(5_000)], 10, settled=4_000 * SECOND)
    assert len(gone.entries) == 3_001
    # Those that come back are known, and count anew.
    back, taken = take(gone, [*files[:5], file(5_001)], 10, settled=4_000 * SECOND, today=106)
    assert (taken, len(back.entries), back.gone) == ([file(5_001)], 3_002, {100: 2_995, 106: 1})
    again, _ = take(back, [file(5_002)], 10, settled=4_000 * SECOND, today=107)
    assert (len(again.entries), again.gone) == (KEEP_REMOVED, {100: KEEP_REMOVED - 8, 106: 1, 107: 6})
    assert again.classify(files[:6], None).new == (files[5],)
    young, _ = take(back, [file(5_002)], 10, settled=100 * SECOND, today=107)
    assert len(young.entries) == 3_003 - 95
    few, _ = take(SeenFiles(), files[: KEEP_REMOVED - 1], KEEP_REMOVED, settled=0)
    for today in (100, 200):
        few, _ = take(few, [file(5_000)], 10, settled=4_000 * SECOND, today=today)
    assert len(few.entries) == KEEP_REMOVED


def test_of_many_files_those_that_have_been_gone_for_the_longest_time_are_forgotten_first():
    files = [file(n) for n in range(FORGET_ABOVE + 1_000)]
    seen_files, _ = take(SeenFiles(), files[:500], 500, settled=0)
    seen_files, _ = take(seen_files, files[500:1_500], 1_000, settled=0, today=101)
    seen_files, _ = take(seen_files, files[1_500:], 20_000, settled=10**6 * SECOND, today=102)
    assert (len(seen_files.entries), seen_files.gone, seen_files.horizon) == (FORGET_ABOVE, {102: 500}, None)
    assert seen_files.classify(files[:1_500], None).new == tuple(files[:1_000])


def test_a_position_with_one_count_for_all_days_is_read():
    files = [file(n) for n in range(12_000)]
    seen_files = SeenFiles()
    for _ in range(3):
        seen_files, _ = take(seen_files, files, 4_000, settled=10**9 * SECOND)
    dumped = seen_files.dump()
    before = SeenFiles.load({**dumped, "below": sum(count for _, count in dumped["below"])})
    assert before.classify(files, None).late == 0
    assert before.classify([*files, file(50_000, mtime=3)], None).late == 1


@pytest.mark.parametrize("other", [file(1, size=11), file(1, mtime=2), file(1, etag="b")])
def test_a_file_is_another_by_size_time_or_etag(other):
    seen_files, _ = take(SeenFiles(), [file(1)], 1, settled=0)
    assert seen_files.classify([file(1)], None).read == (file(1),)
    assert seen_files.classify([other], None).changed == (other,)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_windows_of_a_growing_directory_give_each_file_once(data):
    """Files come in any order of modification times, windows take as many as they like, listed files may be removed."""
    seen_files, there, seen, number = SeenFiles(), [], [], 0
    everything = []
    for _ in range(data.draw(st.integers(1, 8))):
        for mtime in data.draw(st.lists(st.integers(0, 20), max_size=8)):
            there.append(file(number, mtime=mtime))
            everything.append(there[-1])
            number += 1
        seen_files, taken = take(seen_files, there, data.draw(st.integers(0, 6)), settled=data.draw(st.integers(0, 30)) * SECOND)
        seen += taken
        gone = data.draw(st.sets(st.sampled_from(seen))) if seen else set()
        there = [f for f in there if f not in gone]
    seen_files, taken = take(seen_files, there, len(everything), settled=0)
    assert sorted(f.name for f in [*seen, *taken]) == [f.name for f in everything]
