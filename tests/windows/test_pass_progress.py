"""The progress of a snapshot or a bulk read that takes many windows."""

from __future__ import annotations

from airflow_kafka_spark.windows.pass_progress import PassProgress, format_progress, parse_position_progress


def test_chunks_and_rows_that_are_done_and_the_time_to_go_follow_from_the_estimate():
    begun = PassProgress.begin(1000.0, {"a": 950, "b": 10}, 100)
    assert begun.at(1000.0) == {"chunks": 0, "rows": 0, "seconds": 0.0, "all_chunks": 11, "all_rows": 960}
    found = begun.add(4, 400).at(1400.0)
    assert found == {"chunks": 4, "rows": 400, "seconds": 400.0, "all_chunks": 11, "all_rows": 960, "seconds_left": 700.0}
    assert format_progress(found) == "4 of about 11 chunks (400 of about 960 rows) in 7 min, about 12 min to go"
    assert parse_position_progress({"snapshot": {"progress": begun.to_json()}}) == begun
    assert parse_position_progress({"progress": begun.add(1, 2).to_json()}) == begun.add(1, 2)
    assert parse_position_progress({"lsn": "0/1"}) is None


def test_an_estimate_that_was_too_small_is_corrected_and_a_complete_pass_is_exact():
    begun = PassProgress.begin(0.0, {"a": 200}, 100)
    later = begun.add(5, 500)
    assert later.at(10.0)["all_chunks"] == 6 and later.at(10.0)["all_rows"] == 501
    done = later.add(1, 7, is_complete=True).at(12.0)
    assert (done["chunks"], done["all_chunks"], done["rows"], done["all_rows"], done["seconds_left"]) == (6, 6, 507, 507, 0.0)
    assert format_progress(done) == "6 of about 6 chunks (507 of about 507 rows) in 12 s"


def test_without_an_estimate_only_what_is_done_is_said():
    found = PassProgress.begin(0.0, {"a query": 0}, 100).add(3, 300).at(7300.0)
    assert found == {"chunks": 3, "rows": 300, "seconds": 7300.0}
    assert format_progress(found) == "3 chunks, at most 300 rows, in 2.0 h"
