"""Latency, consumption, and the parts of the time that moving a window takes, computed from timestamps."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_kafka_spark.windows.times import (
    DAY,
    MAX_BUCKETS,
    MINUTE,
    WIDTHS,
    Latency,
    Timed,
    TimestampHistogram,
    compute_move_seconds,
    compute_split_seconds,
    parse_counts,
    sum_histograms,
    summarize_consumption,
    summarize_latency,
)

STAMPS = st.lists(st.integers(0, 40 * DAY), min_size=1, max_size=200)


def times(stamps, width=WIDTHS[0]):
    return TimestampHistogram(width, Counter(stamp // width for stamp in stamps))


@given(st.lists(STAMPS, min_size=1, max_size=6))
def test_no_record_of_a_task_is_lost_and_the_histogram_stays_small(parts):
    together = sum_histograms(map(times, parts))
    assert together.records == sum(map(len, parts)) > 0
    assert len(together.counts) <= MAX_BUCKETS
    stamps = sorted(stamp for part in parts for stamp in part)
    assert together.change_width(DAY).counts == Counter(stamp // together.width * together.width // DAY for stamp in stamps)


@given(STAMPS, st.sampled_from([0.05, 0.5, 0.95]))
def test_a_percentile_is_right_to_the_width_of_a_bucket(stamps, share):
    counted, found = sum_histograms([times(stamps)]), sorted(stamps)
    exact = found[max(-(-int(share * 100) * len(found) // 100) - 1, 0)]
    assert abs(counted.compute_percentile(share) - exact) <= counted.width


def test_latency_is_from_the_timestamp_of_a_record_to_the_flush():
    stamps = [1000 * n for n in range(100)]
    found = summarize_latency(times(stamps), min(stamps), max(stamps), 100_000)
    assert found == Latency(min=1.0, p50=pytest.approx(51, abs=1), p95=pytest.approx(96, abs=1), max=100.0)
    assert summarize_latency(TimestampHistogram(), None, None, 5) is None


def test_one_record_has_one_latency():
    assert summarize_latency(times([5050]), 5050, 5050, 6050) == Latency(1.0, 1.0, 1.0, 1.0)


def test_under_and_over_consumption_are_reported_by_bucket():
    read = times([0, 1, 2, MINUTE, MINUTE + 1, 5 * MINUTE])
    found = summarize_consumption(read, upstream={0: 3, MINUTE: 4, 2 * MINUTE: 1})
    assert (found.under, found.over) == (3, 1)
    assert found.to_dict() == {
        "bucket_seconds": 60.0,
        "buckets": [[0, 3, 3], [MINUTE, 2, 4], [2 * MINUTE, 0, 1], [5 * MINUTE, 1, 0]],
        "over": 1,
        "under": 3,
    }
    assert summarize_consumption(read).to_dict()["buckets"] == [[0, 3], [MINUTE, 2], [5 * MINUTE, 1]]


@given(STAMPS)
def test_the_same_records_are_neither_over_nor_under_consumed(stamps):
    upstream = Counter(stamp // MINUTE * MINUTE for stamp in stamps)
    found = summarize_consumption(sum_histograms([times(stamps)]), upstream=upstream)
    assert (found.over, found.under) == (0, 0)
    assert sum(found.read.values()) == len(stamps)


@given(STAMPS, st.data())
def test_a_record_that_is_missing_or_too_much_shows(stamps, data):
    upstream = Counter(stamp // MINUTE * MINUTE for stamp in stamps)
    dropped = list(stamps)
    dropped.pop(data.draw(st.integers(0, len(stamps) - 1)))
    assert summarize_consumption(sum_histograms([times(dropped)]), upstream=upstream).under == 1
    assert (
        summarize_consumption(sum_histograms([times([*stamps, data.draw(st.sampled_from(stamps))])]), upstream=upstream).over == 1
    )


def test_upstream_counts_are_taken_as_users_have_them():
    assert parse_counts({"2026-01-01T00:00:00Z": 5, 1767225660000: 2, "1767225720000": 1}) == {
        1767225600000: 5, 1767225660000: 2, 1767225720000: 1,
    }  # fmt: skip
    for bad in ({"2026-01-01T00:00:00": 1}, {"yesterday": 1}, {0: -1}, {0: "5"}):
        with pytest.raises(ValueError):
            parse_counts(bad)


WORK = {"read": 6.0, "decode": 3.0, "write": 3.0, "wait": 0.0}


PARTS = ("session", "workers", "read", "decode", "write", "wait")


@pytest.mark.parametrize(
    ("move", "jobs", "work", "began", "parts"),
    [
        # A session takes 2 s, workers 1 s, and the rest of the job is divided as its tasks divide their time.
        (10.0, [(102.0, 109.0)], WORK, 103.0, (2, 1, 3, 1.5, 1.5, 1)),
        # Two jobs; what lies between them is waiting.
        (10.0, [(101.0, 102.0), (104.0, 107.0)], WORK, 101.0, (1, 0, 2, 1, 1, 5)),
        # Tasks that wait for Spark's SQL.
        (5.0, [(101.0, 105.0)], dict.fromkeys(WORK, 1.0), 0.0, (1, 0, 1, 1, 1, 1)),
        # Tasks that tell nothing, or only how long they have read.
        (5.0, [(101.0, 105.0)], {}, 0.0, (1, 0, 0, 0, 4, 0)),
        (5.0, [(101.0, 105.0)], {"read": 9.0}, 102.0, (1, 1, 0, 0, 3, 0)),
        # The clock of an executor that is ahead or behind.
        (5.0, [(101.0, 105.0)], WORK, 999.0, (1, 4, 0, 0, 0, 0)),
        (5.0, [(101.0, 105.0)], WORK, 5.0, (1, 0, 2, 1, 1, 0)),
    ],
)
def test_the_parts_of_a_move_add_up_to_it(move, jobs, work, began, parts):
    found = compute_move_seconds(move, jobs, 100.0, work, began)
    assert found == pytest.approx(dict(zip(PARTS, parts, strict=True)))
    assert sum(found.values()) == pytest.approx(move)


def test_without_a_job_there_are_no_parts():
    assert compute_move_seconds(0.0, [], 0.0, {}, 0.0) == {}


def test_a_task_that_reads_decodes_all_that_it_neither_reads_nor_writes():
    found = compute_split_seconds(10.0, 7.0, 2.0, {"read": 4.0, "decode": 1.0}, is_one_stage=True)
    assert found == {"read": 4.0, "decode": 4.0, "write": 2.0, "wait": 0.0}


def test_a_task_behind_sparks_sql_waits_for_what_is_computed_there():
    found = compute_split_seconds(10.0, 7.0, 2.0, {"read": 4.0, "decode": 1.0}, is_one_stage=False)
    assert found == {"read": 4.0, "decode": 2.0, "write": 2.0, "wait": 2.0}


def test_iterating_is_timed_and_ends_as_it_would():
    items = Timed(iter([1, 2]))
    assert list(items) == [1, 2] and items.seconds >= 0
    with pytest.raises(ZeroDivisionError):
        next(Timed(1 // zero for zero in [0]))
