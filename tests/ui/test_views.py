"""Rows of the list as the pages show them, and windows as CSV, without a server."""

from __future__ import annotations

import csv
import io
from dataclasses import replace

import pytest

from airflow_kafka_spark.ui.access import Access
from airflow_kafka_spark.ui.airflow_metadata import (
    AirflowState,
    FailedTask,
    LedgerName,
    PipelineTask,
    TaskError,
    TaskInstanceState,
)
from airflow_kafka_spark.ui.ledger_snapshot import PipelineSummary
from airflow_kafka_spark.ui.views import (
    ListQuery,
    PipelineItem,
    WindowView,
    format_endpoint,
    format_windows_as_csv,
    list_page,
    make_pipeline_row,
)
from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.interval import Interval
from airflow_kafka_spark.windows.lag import Status, Verdict
from airflow_kafka_spark.windows.memory import Attempt, WindowEntry
from airflow_kafka_spark.windows.model import OffsetRange, State, TaskInstanceKey, Window

LEDGER = LedgerName("kafka_default", "airflow-windows")
ACCESS = Access(frozenset("d"), frozenset("d"), frozenset("d"), sees_pages=True, edits_all=False)
TASK = TaskInstanceKey("d", "run2", "t")
PAUSE = Change(1, "pause", "ann", "night", "2026-01-01T00:00:00Z")


def summary(name="p", *, state=State.COMPLETE, **facts):
    window = Window(name, 2, (OffsetRange("t", 0, 1, 2),), "d/run1/t", "2026-01-01T00:00:00Z")
    entry = WindowEntry(window, state, Attempt(3, "x", "d/run2/t", "2026-01-01T01:00:00Z"))
    held = {"last": entry} if state is State.COMPLETE else {"open": entry, "running_tasks": (TASK,)}
    return PipelineSummary(name, **held, **facts)


def row(found, state="failed", tasks=(), error=None, failed=None):
    airflow = AirflowState({TASK: TaskInstanceState(state, error=error)}, {"d": False}, {("d", "t"): failed} if failed else {})
    return make_pipeline_row(PipelineItem(LEDGER, "p", found, tasks=tasks), airflow, ACCESS, now=0.0)


def test_a_failed_pipeline_shows_its_last_attempt_with_the_log_of_that():
    shown = row(summary(state=State.PLANNED))
    assert shown["activity"] == "failed"
    assert shown["failure"] == {
        "name": "2", "number": 2, "attempt": 3, "started_at": "2026-01-01T01:00:00Z", "run": "d/run2/t", "task_state": "failed",
        "error": None, "url": TASK.url,
    }  # fmt: skip
    assert row(summary(state=State.PLANNED), "running")["failure"] is None
    # The page of a run that was deleted from Airflow does not exist.
    item = PipelineItem(LEDGER, "p", summary(state=State.PLANNED))
    gone = make_pipeline_row(item, AirflowState({}, {"d": False}, {}), ACCESS, now=0.0)
    assert (gone["failure"]["url"], gone["reason"]) == (None, "window 2 is open, and Airflow no longer has its task instance")
    assert row(summary())["failure"] is None


ATTEMPT_BEGAN = 1767229200.0  # 2026-01-01T01:00:00Z


def test_a_failed_pipeline_shows_the_error_of_its_last_attempt_without_secrets():
    error = TaskError("SinkRejected", "the table is gone\npassword=abc", ATTEMPT_BEGAN + 5)
    shown = row(summary(state=State.PLANNED), error=error)["failure"]
    assert shown["error"] == {"class": "SinkRejected", "message": "the table is gone\npassword=***", "at": error.at}
    # That of an attempt before it explains nothing: this one was killed.
    earlier = TaskError("SinkRejected", "the table is gone", ATTEMPT_BEGAN - 5)
    assert row(summary(state=State.PLANNED), error=earlier)["failure"]["error"] is None


@pytest.mark.parametrize("found", [None, PipelineSummary("p"), summary()], ids=["unknown", "no window", "moved"])
def test_a_task_that_fails_before_it_plans_a_window_is_a_failed_pipeline_with_its_error(found):
    error = TaskError("ValidationError", "2 problems", 2e9)
    failed = FailedTask(TASK, "up_for_retry", 2e9 - 1, 2e9 + 1, error)
    tasks = (PipelineTask("d", "t", LEDGER, "p", ("t",)),)
    shown = row(found, tasks=tasks, failed=failed)
    assert (shown["activity"], shown["failure"]["error"]["class"]) == ("failed", "ValidationError")
    assert shown["reason"] == "its task failed before it planned a window, and waits for its retry"
    assert (shown["failure"]["run"], shown["failure"]["url"]) == ("d/run2/t", TASK.url)
    # A window that was completed since says that it works again.
    since = WindowEntry(
        summary().last.window, State.COMPLETE, Attempt(1, "x", "d/run3/t", ""), {"completed_at": "2040-01-01T00:00:00Z"}
    )
    assert row(PipelineSummary("p", last=since), tasks=tasks, failed=failed)["activity"] == "idle"


def test_a_run_that_fails_before_it_takes_an_open_window_over_shows_its_own_error():
    tasks = (PipelineTask("d", "t", LEDGER, "p", ("t",)),)
    first, later = (
        TaskError("SinkRejected", "gone", ATTEMPT_BEGAN + 5),
        TaskError("PlanError", "another place", ATTEMPT_BEGAN + 60),
    )
    other = FailedTask(TaskInstanceKey("d", "run3", "t"), "failed", ATTEMPT_BEGAN + 50, ATTEMPT_BEGAN + 61, later)
    shown = row(summary(state=State.PLANNED), tasks=tasks, error=first, failed=other)["failure"]
    assert (shown["name"], shown["attempt"], shown["run"]) == ("2", None, "d/run3/t")
    assert (shown["error"]["class"], shown["url"]) == ("PlanError", other.key.url)
    # One that began before the window's last attempt was overtaken by it.
    overtaken = replace(other, started_at=ATTEMPT_BEGAN - 5)
    shown = row(summary(state=State.PLANNED), tasks=tasks, error=first, failed=overtaken)["failure"]
    assert (shown["attempt"], shown["error"]["class"]) == (3, "SinkRejected")


def test_the_status_of_data_intervals_names_what_was_left_out():
    hole = Interval.of_ms(1767225600000, 1767229200000)
    found = summary(has_intervals=True, missing=(hole,))
    for verdict, reason in (
        (
            Verdict(Status.STALL, "it stays"),
            f"records between complete intervals were not moved: {hole}; the lag counts from there",
        ),
        (Verdict(Status.OK), ""),
    ):
        item = PipelineItem(LEDGER, "p", found, verdict=verdict)
        shown = make_pipeline_row(item, AirflowState({}, {"d": False}), ACCESS, now=0.0)
        assert (shown["status"], shown["reason"]) == (verdict.status.value, reason)


def test_failed_pipelines_come_first_by_status():
    rows = [
        {**row(summary(state=State.PLANNED)), "pipeline": "failed"},
        {**row(summary()), "pipeline": "stopped", "status": "STOP"},
    ]
    assert [r["pipeline"] for r in list_page(rows, ListQuery(sort="status"))["pipelines"]] == ["failed", "stopped"]


@pytest.mark.parametrize(
    ("found", "actions"),
    [
        (None, []),
        (summary(), ["pause", "replay", "resend", "skip", "reset"]),
        (summary(pause=PAUSE), ["resume", "replay", "resend", "skip", "reset"]),
        (summary(has_source=True), ["pause"]),
        (summary(has_source=True, state=State.PLANNED), ["pause", "skip"]),
        (summary(has_intervals=True), ["pause", "replay", "resend"]),
        (PipelineSummary("p", "a record that cannot be read"), []),
    ],
)
def test_only_actions_that_a_pipeline_allows_are_offered(found, actions):
    assert row(found)["actions"] == actions


def test_the_first_window_has_a_status_before_it_is_complete_and_before_its_lag_is_measured():
    first = summary(state=State.PLANNED)
    assert row(first, "running")["status"] == "OK" and "window 2 is open" in row(first, "running")["reason"]
    for state in ("running", "failed"):
        assert row(summary(state=State.PLANNED, has_source=True), state)["status"] == "OK"
    assert row(PipelineSummary("p"))["status"] == "UNKNOWN"


def test_before_its_first_window_the_task_says_whether_a_pipeline_reads_rows():
    rows = PipelineTask("d", "t", LEDGER, "p", source="x-postgres://shop/public/orders", sink="kafka://k/orders")
    assert row(None, tasks=(rows,))["reads_rows"]
    assert not row(None, tasks=(replace(rows, source="kafka://k/a", topics=("a",)),))["reads_rows"]
    assert not row(None, tasks=(replace(rows, source=""),))["reads_rows"]


def test_a_sink_whose_rows_name_their_topics_is_shown_with_those_of_the_last_window():
    report = {"sink": "kafka://k/*", "published": [{"topic": topic, "records": 1} for topic in ("b", "a", "b")]}
    last = replace(summary().last, report=report)
    assert row(PipelineSummary("p", last=last, has_source=True))["sink_name"] == "k: b, a"
    none = replace(last, report={**report, "published": []})
    assert row(PipelineSummary("p", last=none, has_source=True))["sink_name"] == "k: *"


def test_a_pipeline_of_a_databases_log_shows_the_bytes_behind_its_last_window():
    last = replace(summary().last, report={"source_bytes_behind": 1_000_000})
    assert row(PipelineSummary("p", last=last, has_source=True))["log_bytes_behind"] == 1_000_000
    assert row(summary(has_source=True))["log_bytes_behind"] is None
    progress = {"chunks": 4, "rows": 400, "seconds": 400.0, "all_chunks": 11, "all_rows": 960, "seconds_left": 700.0}
    begun = replace(summary().last, report={"source_progress": progress})
    assert row(PipelineSummary("p", last=begun, has_source=True))["source_progress"] == progress
    assert "bytes after" in row(PipelineSummary("p", last=last, has_source=True))["reason"]


@pytest.mark.parametrize(
    ("uri", "asset", "name"),
    [
        ("", "", None),
        ("kafka://kafka_eu/orders%2Feu", "", "kafka_eu: orders/eu"),
        ("kafka://k/a, kafka://k/b", "", "k: a, b"),
        ("kafka://k/a, kafka://other/b", "", "k: a, other: b"),
        ("kafka://k/a, file:///b", "", "k: a, /b"),
        ("x-postgres://warehouse/public/orders", "", "warehouse: public.orders"),
        ("postgres://db.example.org:5432/shop/public/orders", "", "db.example.org/shop: public.orders"),
        ("postgres://db:5432/shop/public/orders", "x-postgres://warehouse/public/orders", "warehouse: public.orders"),
        ("postgres://db:5432/shop/public/orders", "x-postgres://warehouse/public/other", "db/shop: public.orders"),
        ("mysql://db:3306/shop/orders", "x-jdbc://shop_db/orders", "shop_db: orders"),
        ("x-postgres-cdc://shop_db/airflow_shop", "", "shop_db: airflow_shop"),
        ("mysql://db:3306/shop", "x-mysql-cdc://shop_db/prefix", "shop_db: prefix"),
        ("x-mysql-cdc://shop_db/prefix", "", "shop_db: prefix"),
        ("mysql://db:3306/shop", "", "db/shop"),
        ("mysql://db:3306", "", "db"),
        ("iceberg://lake/shop/orders", "", "lake: shop.orders"),
        ("file:///data/my%20lake", "", "/data/my lake"),
        ("s3a://bucket/path", "", "s3a://bucket/path"),
        ("nothing known", "", "nothing known"),
    ],
)
def test_sources_and_sinks_are_named_by_connection_and_table(uri, asset, name):
    assert format_endpoint(uri, asset) == name


def test_a_row_names_the_sink_by_the_connection_of_its_task():
    tasks = (PipelineTask("d", "t", LEDGER, "p", ("t",), sink="x-postgres://warehouse/public/orders"),)
    shown = row(None, tasks=tasks)
    assert (shown["sink"], shown["sink_name"]) == ("x-postgres://warehouse/public/orders", "warehouse: public.orders")


def test_a_pipeline_whose_ledger_was_not_read_is_not_said_to_be_new():
    tasks = (PipelineTask("d", "t", LEDGER, "p", ("t",)),)
    states = AirflowState({}, {"d": False}, {})
    unread, new = (
        make_pipeline_row(PipelineItem(LEDGER, "p", tasks=tasks, is_read=is_read), states, ACCESS, now=0.0)
        for is_read in (False, True)
    )
    assert (unread["status"], unread["activity"], unread["reason"]) == ("UNKNOWN", "unknown", "its ledger has not been read")
    assert (new["status"], new["activity"], new["reason"]) == ("UNKNOWN", "new", "it has not moved a window yet")


def test_without_its_ledger_the_last_status_of_a_pipeline_holds_for_a_minute():
    item = PipelineItem(LEDGER, "p", summary(), verdict=Verdict(Status.WARN, "the lag grows"))
    states = AirflowState({}, {"d": False}, {})
    shown = [make_pipeline_row(replace(item, outage=outage), states, ACCESS, now=0.0) for outage in (None, 59.0, 61.0)]
    assert [row["status"] for row in shown] == ["WARN", "WARN", "UNKNOWN"]
    assert shown[2]["reason"] == "its ledger cannot be reached; when it was last read, the status was WARN (the lag grows)"


# --- windows as CSV ---------------------------------------------------------------------------------------------------

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


def window_view(number, state, report=None, **facts):
    window = Window(
        "p", number, (OffsetRange("t", 0, 5, 15), OffsetRange("t", 1, 0, 2)), "=d/run/t", "2026-01-01T00:00:00Z", **facts
    )
    return WindowView(WindowEntry(window, state, Attempt(2, "x", "d/run/t", ""), report), None)


def test_windows_are_exported_with_a_column_for_each_fact():
    text = format_windows_as_csv([window_view(8, State.PLANNED), window_view(7, State.COMPLETE, REPORT, interval=(0, 3_600_000))])
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
    assert len(format_windows_as_csv([]).splitlines()) == 1
