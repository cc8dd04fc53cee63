"""The state of a ledger that the UI keeps, and windows as the pages show them, without a server."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from airflow_kafka_spark.ui.airflow_metadata import AirflowState
from airflow_kafka_spark.ui.ledger_snapshot import (
    MAX_OTHER_RECORDS,
    MAX_WINDOWS,
    LedgerSnapshot,
    PipelineSnapshot,
    summarize_pipeline,
)
from airflow_kafka_spark.ui.views import count_dead_letters, list_stored_windows, list_windows_before, make_window_json
from airflow_kafka_spark.windows.interval import Interval, IntervalState, parse_ledger_name
from airflow_kafka_spark.windows.memory import (
    ARCHIVE,
    Attempt,
    LedgerRecord,
    WindowEntry,
    make_interval_record,
    make_marker_key,
    make_position_record,
    make_window_key,
    make_window_record,
)
from airflow_kafka_spark.windows.model import OffsetRange, State, TopicPartition, Window
from airflow_kafka_spark.windows.plan import Position


def entry(pipeline, number, state=State.COMPLETE, interval=None):
    window = Window(
        pipeline, number, (OffsetRange("t", 0, number, number + 1),), "d/r/t", "2026-01-01T00:00:00Z", interval=interval
    )
    report = {"completed_at": f"2026-01-01T00:{number // 60 % 60:02d}:{number % 60:02d}Z"} if state is State.COMPLETE else None
    return WindowEntry(window, state, Attempt(1, "x", "d/r/t", "2026-01-01T00:00:00Z"), report)


def put(snapshot, record, offset):
    return snapshot.add(0, replace_offset(record, offset))


def replace_offset(record, offset):
    return LedgerRecord(record.key, record.value, offset)


def test_an_attempt_at_an_open_window_is_a_sign_of_life_without_a_position():
    snapshot = LedgerSnapshot()
    put(snapshot, make_window_record(entry("p", 1)), 1)
    put(snapshot, make_window_record(entry("p", 2, State.PLANNED)), 2)
    done, begun = summarize_pipeline(snapshot.pipelines["p"]).past[TopicPartition("t", 0)]
    assert (done.committed, done.has_offset) == (2, True)
    assert (begun.active, begun.has_offset, begun.time) == (True, False, datetime(2026, 1, 1, tzinfo=timezone.utc).timestamp())


def test_intervals_that_end_in_any_order_and_replays_do_not_go_back():
    snapshot = LedgerSnapshot()
    put(snapshot, make_window_record(entry("p", 1)), 1)
    put(snapshot, make_window_record(entry("p", 2)), 2)
    again = entry("p", 1)
    report = {"completed_at": "2026-01-01T01:00:00Z"}
    put(snapshot, make_window_record(replace(again, report=report, window=replace(again.window, replay=1))), 3)
    seen = summarize_pipeline(snapshot.pipelines["p"]).past[TopicPartition("t", 0)]
    assert [s.committed for s in seen] == [3, None]


def test_of_many_windows_the_newest_are_kept_and_all_are_counted():
    snapshot = LedgerSnapshot()
    put(snapshot, make_window_record(entry("p", 3, State.PLANNED)), 0)
    for number in range(4, 1004):
        put(snapshot, make_window_record(entry("p", number)), number)
    pipeline = snapshot.pipelines["p"]
    assert pipeline.windows_total == 1001
    stored = list_stored_windows(pipeline)
    assert len(stored) == MAX_WINDOWS
    # An open window is kept, no matter how old it is.
    assert [t.entry.window.number for t in stored] == [*range(1003, 1003 - MAX_WINDOWS + 1, -1), 3]
    assert [t.entry.window.number for t in list_windows_before(stored, "990")][:2] == [989, 988]
    for number in range(3, 1004):
        snapshot.add(0, LedgerRecord(make_window_key("p", number), None, number + 2000))
    assert snapshot.pipelines == {}


def test_dead_letters_and_what_went_elsewhere_of_a_window_that_was_published_are_known_by_its_report():
    """They were sent in the transactions of the other records, so the ledger has no separate record of them."""
    snapshot, done = LedgerSnapshot(), entry("p", 1)
    reported = {
        **done.report,
        "dead_letters": [{"topic": "dead", "partition": n, "first": 5, "last": 9, "records": 2} for n in range(2)],
        "routed": [{"topic": "small", "partition": n, "first": 0, "last": 9, "records": 5} for n in range(2)],
        "captured": [{"sink": "file:///gone", "records": 3}],
        "records_routed": 13,
    }
    put(snapshot, make_window_record(replace(done, report=reported)), 1)
    put(snapshot, make_window_record(entry("p", 2)), 2)
    second, first = list_stored_windows(snapshot.pipelines["p"])
    assert (second.landed, second.elsewhere) == ((), [])
    assert [(part.topic_partition, part.records) for part in first.landed] == [(("dead", 0), 2), (("dead", 1), 2)]
    assert count_dead_letters([second, first]) == {
        "total": 4,
        "windows": [{"number": 1, "name": "1", "records": 4, "topic": "dead"}],
    }
    shown = make_window_json(first, AirflowState({}, {}))
    assert shown["records_routed"] == 13
    assert shown["routed"] == [{"to": "file:///gone", "records": 3}, {"to": "small", "records": 10}]
    assert [part["records"] for part in shown["dead_letters"]] == [2, 2]


def test_windows_of_data_intervals_are_windows_of_their_pipeline():
    snapshot = LedgerSnapshot()
    for hour in range(3):
        interval = Interval(datetime(2026, 1, 1, hour, tzinfo=timezone.utc), datetime(2026, 1, 1, hour + 1, tzinfo=timezone.utc))
        state = State.PLANNED if hour == 2 else State.COMPLETE
        ledger_name, reported = interval.make_ledger_name("a.b"), {"completed_at": "2026-01-01T05:00:00Z"}
        assert parse_ledger_name(ledger_name) == ("a.b", interval.name)
        bounds = (interval.start_ms, interval.end_ms)
        moved = entry(ledger_name, 1, state, bounds)
        put(snapshot, make_window_record(replace(moved, report=reported if moved.report else None)), 2 * hour)
        put(snapshot, make_interval_record("a.b", IntervalState(interval, state, ())), 2 * hour + 1)
    assert list(snapshot.pipelines) == ["a.b"]
    pipeline = snapshot.pipelines["a.b"]
    assert pipeline.intervals == (3, 2)
    assert [t.name for t in list_stored_windows(pipeline)] == [
        "20260101T020000Z-20260101T030000Z", "20260101T010000Z-20260101T020000Z", "20260101T000000Z-20260101T010000Z",
    ]  # fmt: skip
    assert [t.name for t in list_windows_before(list_stored_windows(pipeline), "20260101T010000Z-20260101T020000Z")] == [
        "20260101T000000Z-20260101T010000Z"
    ]
    found = summarize_pipeline(pipeline)
    assert found.has_intervals
    assert found.open.window.interval is not None
    assert found.problem == ""


def test_names_that_only_resemble_those_of_intervals_are_pipelines():
    for name in ("a.b", "20260101T000000Z-20260101T010000Z", "a.20260101T000000Z", "x.20260101T000000Z-20260101T010000Z.y"):
        assert parse_ledger_name(name) == (name, None)


def test_a_snapshot_decodes_again_when_a_record_was_added():
    snapshot = LedgerSnapshot()
    put(snapshot, make_window_record(entry("p", 1)), 1)
    pipeline: PipelineSnapshot = snapshot.pipelines["p"]
    first = pipeline.decode_memory()
    assert pipeline.decode_memory() is first
    put(snapshot, make_window_record(entry("p", 2)), 2)
    assert sorted(pipeline.decode_memory().entries) == [1, 2]


def test_a_pipeline_has_a_position_from_its_first_planned_window_on():
    snapshot = LedgerSnapshot()
    put(snapshot, make_window_record(entry("p", 1, State.PLANNED)), 1)
    found = summarize_pipeline(snapshot.pipelines["p"])
    assert (found.last, found.open.window.number) == (None, 1)
    assert found.read_position.offsets == {TopicPartition("t", 0): 1}
    # The last complete window gives the position, not the open window.
    put(snapshot, make_position_record("p", Position({TopicPartition("t", 0): 7}), 0), 2)
    assert summarize_pipeline(snapshot.pipelines["p"]).read_position.offsets == {TopicPartition("t", 0): 7}


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        (b"\xff", b"{}", "its key is not a JSON list"),
        (b'["p"]', b"{}", "its key is of an unknown kind"),
        (b'["p","window",-1]', b"{}", "its key is of an unknown kind"),
        (b'["p","window",true]', b"{}", "its key is of an unknown kind"),
        (b'["p","interval",1]', b"{}", "its key is of an unknown kind"),
        (b'["p","window",1]', b"text", "of pipeline `p`, its value is no record of a ledger"),
        (b'["p","window",1]', b'{"v":"1"}', "of pipeline `p`, its value is no record of a ledger"),
        (b'["p","window",1]', b'{"v":9999,"state":"COMPLETE"}', "of pipeline `p`, it is of version 9999, newer than"),
        (b'["p","window",1]', b'{ "v": 1 }', None),
        (b'[null,"boundary"]', b"{}", None),
        (b'["p","window",1]', None, None),
    ],
)
def test_a_record_that_cannot_be_read_is_listed_with_its_place_and_stops_nothing(key, value, problem):
    snapshot = LedgerSnapshot()
    snapshot.add(3, LedgerRecord(key, value, 42))
    put(snapshot, make_window_record(entry("other", 1)), 43)
    assert summarize_pipeline(snapshot.pipelines["other"]).problem == ""
    if problem is None:
        assert snapshot.problems == []
    else:
        (found,) = snapshot.problems
        assert found.startswith(f"partition 3, offset 42: {problem}")


def test_data_intervals_that_are_archived_are_counted_and_those_that_are_deleted_are_not():
    snapshot = LedgerSnapshot()
    interval = Interval(datetime(2026, 1, 1, tzinfo=timezone.utc), datetime(2026, 1, 2, tzinfo=timezone.utc))
    record = make_interval_record("p", IntervalState(interval, State.COMPLETE, ()))
    key = json.dumps(["p", ARCHIVE, interval.name]).encode()
    put(snapshot, record, 1)
    snapshot.add(0, LedgerRecord(key, b'{"v":1,"count":24}', 2))
    snapshot.add(0, LedgerRecord(record.key, None, 3))
    assert (snapshot.pipelines["p"].intervals, snapshot.pipelines["p"].windows_total) == ((24, 24), 24)
    snapshot.add(0, LedgerRecord(key, None, 4))
    assert snapshot.pipelines == {}


def test_of_many_intervals_and_splits_the_newest_are_stored_and_those_with_an_open_window():
    snapshot, first = LedgerSnapshot(), datetime(2026, 1, 1, tzinfo=timezone.utc)
    for hour in range(MAX_WINDOWS + 3):
        interval = Interval(first + timedelta(hours=hour), first + timedelta(hours=hour + 1))
        state = State.PLANNED if hour == 1 else State.COMPLETE
        put(snapshot, make_window_record(entry(interval.make_ledger_name("p"), 1, state)), hour)
    stored = snapshot.pipelines["p"].interval_names
    assert len(stored) == MAX_WINDOWS and stored[-2:] == (
        "20260101T040000Z-20260101T050000Z",
        "20260101T010000Z-20260101T020000Z",
    )
    put(snapshot, make_position_record("q", Position({TopicPartition("t", 0): 7}), 0), 0)
    for split in range(MAX_OTHER_RECORDS + 5):
        snapshot.add(0, LedgerRecord(make_marker_key("q", 1, split), b'{"v":1}', split + 1))
    put(snapshot, make_window_record(entry("q", 2)), 0)
    assert summarize_pipeline(snapshot.pipelines["q"]).read_position.offsets == {TopicPartition("t", 0): 7}
    assert len(snapshot.pipelines["q"]._other_records) == MAX_OTHER_RECORDS
