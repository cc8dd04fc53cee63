"""The windows of a pipeline as CSV."""

from __future__ import annotations

import csv
import io

from airflow_kafka_spark.ui.export import windows_csv
from airflow_kafka_spark.ui.views import WindowView
from airflow_kafka_spark.windows.memory import Attempt, Entry
from airflow_kafka_spark.windows.model import OffsetRange, State, Window

REPORT = {
    "completed_at": "2026-01-01T01:00:00Z",
    "records_read": 10,
    "records_written": 9,
    "bytes": 100,
    "rate": 5.0,
    "latency": {"min": -0.5, "p50": 1.0, "p95": 2.0, "max": 3.0},
    "timings": {"plan": 0.5, "move": 1.5, "total": 2.0},
    "guarantee": "exactly-once",
    "dead_letters": [{"topic": "dead", "partition": 0, "first": 3, "last": 3, "records": 1}],
}


def view(number, state, report=None, **facts):
    window = Window(
        "p", number, (OffsetRange("t", 0, 5, 15), OffsetRange("t", 1, 0, 2)), "=d/run/t", "2026-01-01T00:00:00Z", **facts
    )
    return WindowView(Entry(window, state, Attempt(2, "x", "d/run/t", ""), report), None)


def test_windows_are_exported_with_a_column_for_each_fact():
    text = windows_csv([view(8, State.PLANNED), view(7, State.COMPLETE, REPORT, interval=(0, 3_600_000))])
    planned, complete = csv.DictReader(io.StringIO(text))
    assert (planned["window"], planned["state"], planned["records_read"], planned["total_seconds"]) == ("8", "PLANNED", "", "")
    assert (complete["state"], complete["interval_start"], complete["interval_end"]) == (
        "COMPLETE", "1970-01-01T00:00:00Z", "1970-01-01T01:00:00Z",
    )  # fmt: skip
    assert (complete["records_read"], complete["records_written"], complete["records_filtered"]) == ("10", "9", "0")
    assert (complete["move_seconds"], complete["total_seconds"], complete["latency_min_seconds"]) == ("1.5", "2.0", "-0.5")
    assert (complete["dead_letters"], complete["attempts"]) == ("1", "2")
    assert complete["offsets"] == "t-0 [5, 15); t-1 [0, 2)"
    # A spreadsheet would compute it.
    assert complete["run"] == "'=d/run/t"


def test_no_window_is_a_header():
    assert len(windows_csv([]).splitlines()) == 1
