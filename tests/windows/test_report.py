"""Reports of windows: the progress of a pass over tables, and records whose timestamps lie outside of the data interval."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_kafka_spark.jobs.tasks.account import count_out_of_interval
from airflow_kafka_spark.windows.codec import decode_result, encode_result, result_from_json, result_to_json
from airflow_kafka_spark.windows.model import OffsetRange, PackedSplits, SplitResult, Window
from airflow_kafka_spark.windows.plan import make_splits
from airflow_kafka_spark.windows.report import PassProgress, format_pass_progress, parse_position_progress, sum_up


def test_chunks_and_rows_that_are_done_and_the_time_to_go_follow_from_the_estimate():
    begun = PassProgress.begin(1000.0, (950, 10), 100)
    assert begun.make_facts(1000.0) == {"chunks": 0, "rows": 0, "seconds": 0.0, "all_chunks": 11, "all_rows": 960}
    found = begun.add(4, 400).make_facts(1400.0)
    assert found == {"chunks": 4, "rows": 400, "seconds": 400.0, "all_chunks": 11, "all_rows": 960, "seconds_left": 700.0}
    assert format_pass_progress(found) == "4 of about 11 chunks (400 of about 960 rows) in 7 min, about 12 min to go"
    assert parse_position_progress({"snapshot": {"progress": begun.to_json()}}) == begun
    assert parse_position_progress({"progress": begun.add(1, 2).to_json()}) == begun.add(1, 2)
    assert parse_position_progress({"lsn": "0/1"}) is None


def test_an_estimate_that_was_too_small_is_corrected_and_a_complete_pass_is_exact():
    begun = PassProgress.begin(0.0, (200,), 100)
    later = begun.add(5, 500)
    assert later.make_facts(10.0)["all_chunks"] == 6 and later.make_facts(10.0)["all_rows"] == 501
    done = later.add(1, 7, is_complete=True).make_facts(12.0)
    assert (done["chunks"], done["all_chunks"], done["rows"], done["all_rows"], done["seconds_left"]) == (6, 6, 507, 507, 0.0)
    assert format_pass_progress(done) == "6 of about 6 chunks (507 of about 507 rows) in 12 s"


def test_rows_of_chunks_that_may_be_smaller_are_no_more_than_the_estimate():
    done = PassProgress.begin(0.0, (20,), 100).add(1, 100, is_bound=True).make_facts(1.0)
    assert (done["rows"], done["all_rows"]) == (20, 20)


def test_without_an_estimate_only_what_is_done_is_said():
    found = PassProgress.begin(0.0, (0,), 100).add(3, 300).make_facts(7300.0)
    assert found == {"chunks": 3, "rows": 300, "seconds": 7300.0}
    assert format_pass_progress(found) == "3 chunks, at most 300 rows, in 2.0 h"


INTERVAL = (1_000, 2_000)


@given(st.lists(st.integers(-1, 3_000), min_size=1))
def test_records_before_and_behind_the_interval_count_and_those_without_a_timestamp_do_not(stamps):
    outside = [stamp for stamp in stamps if stamp >= 0 and not INTERVAL[0] <= stamp < INTERVAL[1]]
    distance = max((max(INTERVAL[0] - stamp, stamp - INTERVAL[1]) for stamp in outside), default=0)
    found = count_out_of_interval(pa.array(stamps, pa.int64()), min(stamps), max(stamps), INTERVAL)
    assert found == (len(outside), distance)
    assert count_out_of_interval(pa.array(stamps, pa.int64()), min(stamps), max(stamps), None) == (0, 0)


def window(interval):
    return Window("p", 1, (OffsetRange("t", 0, 0, 10),), "d/r/t", "2026-01-01T00:00:00Z", interval=interval)


def test_each_split_knows_the_interval_on_its_way_to_a_task():
    for interval in (INTERVAL, None):
        splits = make_splits(window(interval), 3)
        assert {split.interval for split in splits} == {interval}
        assert tuple(PackedSplits.of(splits)) == splits


def test_the_report_holds_count_and_distance_only_if_there_are_any():
    results = [SplitResult(n, 5, interval=INTERVAL, out_of_interval=n, farthest=n * 1500) for n in (0, 1, 2)]
    ranges = {n: OffsetRange("t", 0, 0, 10) for n in (0, 1, 2)}
    report = sum_up(window(INTERVAL), results, None, ranges)
    assert (report.to_dict()["records_out_of_interval"], report.to_dict()["out_of_interval_seconds"]) == (3, 3.0)
    assert "3 with timestamps outside of the interval, by up to 0:00:03" in report.line
    assert "records_out_of_interval" not in sum_up(window(INTERVAL), results[:1], None, ranges).to_dict()


@pytest.mark.parametrize("result", [SplitResult(1, 5), SplitResult(1, 5, interval=INTERVAL, out_of_interval=2, farthest=7)])
def test_a_result_comes_back_as_it_was_and_those_of_older_releases_are_read(result):
    assert decode_result(encode_result(result)) == result
    value = result_to_json(replace(result, interval=None, out_of_interval=0, farthest=0))
    assert not {"interval", "out_of_interval", "farthest"} & value.keys()
    assert result_from_json(value) == SplitResult(1, 5)
