from __future__ import annotations

import json
import random
from base64 import urlsafe_b64encode
from dataclasses import replace
from datetime import datetime, timezone

import pytest

from airflow_kafka_spark.windows.changes import Change
from airflow_kafka_spark.windows.interval import Interval, IntervalState
from airflow_kafka_spark.windows.interval_archive import Intervals
from airflow_kafka_spark.windows.memory import (
    ARCHIVE,
    BINDING,
    CONTROL,
    PAUSE_VERSION,
    VERSION,
    Attempt,
    LedgerRecord,
    Memory,
    NewerVersion,
    WindowCriteria,
    WindowEntry,
    find_completed,
    fold_records,
    is_same_run,
    list_known_topic_ids,
    make_change_key,
    make_change_record,
    make_control_record,
    make_group_record,
    make_interval_record,
    make_marker_record,
    make_position_record,
    make_window_key,
    make_window_record,
    parse_group_owner,
)
from airflow_kafka_spark.windows.model import Landed, Marker, OffsetRange, State, TopicPartition, Window
from airflow_kafka_spark.windows.plan import Position


def entry(number: int, state: State, pipeline: str = "p", token: str = "a") -> WindowEntry:
    window = Window(pipeline, number, (OffsetRange("t", 0, number, number + 1),), f"run{number}", "")
    return WindowEntry(window, state, Attempt(1, token, "run", ""), {"n": number} if state is State.COMPLETE else None)


def log(*records: LedgerRecord) -> list[LedgerRecord]:
    return [record._replace(offset=offset) for offset, record in enumerate(records)]


def test_the_newest_record_of_a_window_counts():
    memory = fold_records(
        "p",
        log(
            make_window_record(entry(1, State.PLANNED)),
            make_window_record(entry(1, State.COMPLETE)),
            make_window_record(entry(2, State.PLANNED)),
        ),
    )
    assert memory.open_entry.window.number == 2
    assert memory.find_completed_by("run1").report == {"n": 1}
    assert memory.find_completed_by("run2") is None
    assert memory.oldest_offset == 1


def test_other_pipelines_are_not_mine_even_when_their_name_begins_like_mine():
    memory = fold_records(
        "p",
        log(
            make_window_record(entry(1, State.PLANNED, "p2")),
            make_window_record(entry(1, State.PLANNED, 'p","window')),
            make_position_record("p2", Position(), 9),
        ),
    )
    assert not memory.exists and not memory.entries


def test_a_tombstone_forgets_a_window():
    memory = fold_records("p", log(make_window_record(entry(1, State.COMPLETE)), LedgerRecord(make_window_key("p", 1), None)))
    assert memory.exists and not memory.entries


def test_the_position_is_remembered():
    position = Position({TopicPartition("t", 3): 8}, {"t": "id"}, "c")
    memory = fold_records("p", log(make_position_record("p", Position(), 1), make_position_record("p", position, 2)))
    assert (memory.position, memory.last_number) == (position, 2)


def test_a_record_of_a_newer_version_is_refused_not_guessed_at():
    record = make_window_record(entry(1, State.COMPLETE))
    newer = record._replace(value=json.dumps({**json.loads(record.value), "v": 2}).encode())
    with pytest.raises(NewerVersion, match="version 2"):
        fold_records("p", log(newer))


KINDS = ("position", BINDING, "window", "interval", ARCHIVE, "split", "dead", "change", CONTROL, "a kind of a later release")


@pytest.mark.parametrize("kind", KINDS)
def test_a_newer_record_of_any_kind_is_refused_before_its_content_is_read(kind):
    version = max(VERSION, PAUSE_VERSION) + 1
    key = json.dumps(["p", kind, 1], separators=(",", ":")).encode()
    newer = LedgerRecord(key, json.dumps({"v": version, "what": "this release does not know"}).encode())
    with pytest.raises(NewerVersion, match=f"version {version} at offset 1"):
        fold_records("p", log(make_window_record(entry(1, State.COMPLETE)), newer))


@pytest.mark.parametrize("count", [2, 20_000])
def test_the_marker_of_a_split_fits_into_a_record_whatever_the_number_of_partitions(count):
    rng = random.Random(3)
    starts = [rng.randrange(10**10) for _ in range(count)]
    landed = tuple(Landed("warehouse.public.orders_by_region_and_day" * 3, p, at, at + 9, 10) for p, at in enumerate(starts))
    marker = Marker(1, 0, landed=landed, bytes=5, routed=landed)
    record = make_marker_record("shop.publish", marker)
    assert len(record.value or b"") < 1_000_000, "the default of `message.max.bytes` of a producer"
    assert fold_records("shop.publish", [record]).markers == {(1, 0): marker}


def test_the_marker_of_a_split_whose_records_name_thousands_of_topics_fits_into_a_record():
    rng = random.Random(3)
    landed = tuple(Landed(f"orders-of-customer-{n}", 0, at := rng.randrange(10**10), at + 9, 10) for n in range(15_000))
    ids = {part.topic: urlsafe_b64encode(rng.randbytes(16)).decode().rstrip("=") for part in landed}
    marker = Marker(1, 0, landed=landed, bytes=5, topic_ids=ids)
    record = make_marker_record("shop.publish", marker)
    assert len(record.value or b"") < 1_000_000
    assert fold_records("shop.publish", [record]).markers == {(1, 0): marker}


def test_a_newer_record_of_another_pipeline_refuses_nothing():
    newer = LedgerRecord(make_window_key("other", 1), json.dumps({"v": VERSION + 1}).encode())
    assert fold_records("p", log(make_window_record(entry(1, State.COMPLETE)), newer)).find_completed_by("run1")


def test_the_owner_of_a_group_is_read_and_refused_if_a_later_release_wrote_it():
    record = make_group_record("g", "p")
    assert parse_group_owner(record) == "p"
    assert parse_group_owner(record._replace(value=None)) is None
    newer = record._replace(value=json.dumps({**json.loads(record.value), "v": VERSION + 1}).encode())
    with pytest.raises(NewerVersion):
        parse_group_owner(newer)


CHANGE = Change(
    3, "reset", "ann", "a bad deploy", "2026-01-01T00:00:00.000Z", {TopicPartition("t", 0): 9}, {TopicPartition("t", 0): 4}, (7,)
)


def test_what_was_changed_by_hand_is_remembered():
    memory = fold_records("p", log(make_change_record("p", CHANGE), make_change_record("p", replace(CHANGE, number=4))))
    assert memory.changes == {3: CHANGE, 4: replace(CHANGE, number=4)}
    assert memory.exists and memory.is_blank
    assert not fold_records("p", log(make_change_record("p", CHANGE), LedgerRecord(make_change_key("p", 3), None))).changes


def test_a_pause_counts_until_it_is_ended_and_history_is_in_the_order_of_numbers():
    paused, resumed = replace(CHANGE, action="pause", number=4), replace(CHANGE, action="resume", number=5)
    memory = fold_records("p", log(make_change_record("p", CHANGE), make_control_record("p", paused, PAUSE_VERSION)))
    assert memory.is_paused and memory.pause == paused and memory.next_change == 5
    ended = log(make_change_record("p", CHANGE), make_control_record("p", paused), make_control_record("p", resumed))
    memory = fold_records("p", ended)
    assert not memory.is_paused and [c.number for c in memory.history] == [5, 4, 3]


def test_a_release_that_knows_no_pauses_does_not_pass_over_one_and_reads_everything_else():
    pause = json.loads(make_control_record("p", CHANGE, PAUSE_VERSION).value)
    assert pause["v"] > VERSION, "such a release refuses it"
    skip = json.loads(make_change_record("p", replace(CHANGE, action="skip")).value)
    assert (
        set(skip["change"]) == {"number", "action", "who", "why", "at", "before", "after", "discarded"} and skip["v"] == VERSION
    )
    newer = {**skip, "change": {**skip["change"], "mood": "good"}}
    record = make_change_record("p", CHANGE)._replace(value=json.dumps(newer).encode())
    assert fold_records("p", log(record)).changes[3].action == "skip"


def test_a_replay_that_is_asked_for_counts_until_the_window_is_moved_again():
    done = entry(1, State.COMPLETE)
    asked = replace(CHANGE, action="replay", window=1)
    memory = fold_records("p", log(make_control_record("p", asked), make_window_record(done)))
    assert memory.replay_asked(done.window) == asked and memory.oldest_offset == 0
    assert memory.replay_asked(replace(done.window, replay=1)) is None


def test_a_window_and_a_position_say_that_they_were_moved_by_hand():
    moved = replace(entry(1, State.PLANNED), window=replace(entry(1, State.PLANNED).window, moved=3))
    memory = fold_records(
        "p", log(make_position_record("p", Position({TopicPartition("t", 0): 4}, moved=3), 0), make_window_record(moved))
    )
    assert (memory.position.moved, memory.entries[1].window.moved) == (3, 3)


def test_a_forgotten_pipeline_is_blank_though_its_tombstones_are_there():
    records = [make_position_record("p", Position({TopicPartition("t", 0): 4}), 1), make_window_record(entry(1, State.COMPLETE))]
    assert not fold_records("p", log(*records)).is_blank
    memory = fold_records("p", log(*records, *(record._replace(value=None) for record in records)))
    assert memory.is_blank and not memory.position.offsets


def test_a_topic_is_known_by_every_id_under_which_it_was_read_the_last_one_last():
    def moved(hour: int, **ids: str) -> LedgerRecord:
        interval = Interval.of_ms(hour * 3_600_000, (hour + 1) * 3_600_000)
        return make_interval_record("p", IntervalState(interval, State.COMPLETE, (), topic_ids=ids))

    memory = fold_records("p", log(moved(5, t="a", u="x"), moved(3, t="b"), moved(4, t=""), moved(6, t="a")))
    assert list_known_topic_ids(memory) == {"t": ("a", "b"), "u": ("x",)}
    position = Position({TopicPartition("t", 0): 4}, {"t": "first"})
    assert list_known_topic_ids(replace(memory, position=position))["t"] == ("first", "a", "b")
    assert list_known_topic_ids(fold_records("p", ())) == {}


def test_kinds_of_records_that_a_later_release_may_add_are_passed_over():
    memory = fold_records("p", log(LedgerRecord(b'["p","mood",1]', b'{"v":1}'), LedgerRecord(b'["p","mood",1]', None)))
    assert memory.is_blank


@pytest.mark.parametrize("name", ["a/b", "ü", 'quote"d', "with space", "a.b-c_d"])
def test_any_name_is_found_again(name):
    assert fold_records(name, log(make_window_record(entry(1, State.PLANNED, name)))).open_entry is not None


def test_a_window_keeps_where_it_was_planned_however_often_it_was_taken_over():
    planned = entry(1, State.PLANNED)
    first = fold_records("p", log(make_window_record(planned))).entries[1]
    assert first.first == 0
    again = replace(first, attempt=replace(first.attempt, number=2))
    assert fold_records("p", log(make_window_record(planned), make_window_record(again))).entries[1].first == 0
    unknown = replace(planned, attempt=replace(planned.attempt, number=2))
    assert fold_records("p", log(make_window_record(unknown))).entries[1].first == -1, "written by an earlier release"


def test_the_offsets_of_an_open_window_are_moved_by_no_other_window():
    memory = fold_records("p", log(make_position_record("p", Position({TopicPartition("t", 0): 5}), 6)))
    assert memory.claimed_position.offsets == {TopicPartition("t", 0): 5}
    records = log(
        make_position_record("p", Position({TopicPartition("t", 0): 5}), 6), make_window_record(entry(7, State.PLANNED))
    )
    assert fold_records("p", records).claimed_position.offsets == {TopicPartition("t", 0): 8}
    replayed = replace(entry(3, State.PLANNED), window=replace(entry(3, State.PLANNED).window, replay=1))
    records = log(make_position_record("p", Position({TopicPartition("t", 0): 5}), 6), make_window_record(replayed))
    assert fold_records("p", records).claimed_position.offsets == {TopicPartition("t", 0): 5}


def test_a_reader_that_begins_at_the_oldest_needed_record_sees_all_intervals():
    state = IntervalState(
        Interval(datetime(2026, 1, 1, tzinfo=timezone.utc), datetime(2026, 1, 2, tzinfo=timezone.utc)), State.COMPLETE, ()
    )
    memory = fold_records("p", log(make_interval_record("p", state), make_window_record(entry(1, State.COMPLETE))))
    assert memory.oldest_offset == 0


def run_entry(number, run="dag/run1/task", state=State.COMPLETE, at="2026-01-01T00:00:00+00:00"):
    report = {"completed_at": at, "records_read": number} if state is State.COMPLETE else None
    return WindowEntry(Window("p", number, (), run, at), state, Attempt(1, "x", run, at), report)


def memory(*entries):
    return Memory("p", entries={e.window.number: e for e in entries}, exists=True)


def test_nothing_is_complete_in_an_empty_ledger():
    assert find_completed(Memory("p"), WindowCriteria(after=0)) is None


def test_the_window_of_a_run_is_found_by_who_planned_it_not_by_who_finished_it():
    found = find_completed(memory(run_entry(1, "dag/run1/task"), run_entry(2, "dag/run2/task"), run_entry(3, "dag/run3/task")),
                      WindowCriteria(run="dag/run2/task"))  # fmt: skip
    assert (found.window, found.run, found.report["records_read"]) == ("0000000002", "dag/run2/task", 2)


def test_an_open_window_is_not_complete():
    assert find_completed(memory(run_entry(1), run_entry(2, state=State.PLANNED)), WindowCriteria(after=1)) is None


def test_after_a_number_the_newest_window_counts():
    assert find_completed(memory(run_entry(4), run_entry(5), run_entry(6)), WindowCriteria(after=4)).window == "0000000006"
    assert find_completed(memory(run_entry(4)), WindowCriteria(after=4)) is None


def test_since_a_moment_counts_when_it_was_completed():
    entries = memory(run_entry(1, at="2026-01-01T00:00:00+00:00"), run_entry(2, at="2026-01-02T00:00:00+00:00"))
    moment = 1767312000.0
    assert find_completed(entries, WindowCriteria(since=moment)).window == "0000000002"
    assert find_completed(entries, WindowCriteria(since=moment + 1)) is None


def test_all_that_is_given_has_to_hold():
    entries = memory(run_entry(1, "dag/a/task"), run_entry(2, "dag/b/task"))
    assert find_completed(entries, WindowCriteria(run="dag/a/task", after=1)) is None
    assert find_completed(entries, WindowCriteria(run="dag/b/task", after=1)).window == "0000000002"


def test_a_data_interval_is_found_by_its_run():
    interval = Interval(datetime(2026, 1, 1, tzinfo=timezone.utc), datetime(2026, 1, 2, tzinfo=timezone.utc))
    for state in (State.PLANNED, State.COMPLETE):
        known = IntervalState(interval, state, (), run="dag/run1/task")
        found = find_completed(
            Memory("p", exists=True, intervals=Intervals({interval.name: known})), WindowCriteria(run="dag/run1/task")
        )
        assert (found is not None) == (state is State.COMPLETE)
    assert (found.window, found.run) == (interval.name, "dag/run1/task")


@pytest.mark.parametrize(
    ("known", "wanted", "same"),
    [
        ("d/r/t", "d/r/t", True),
        ("d/r/t", "d/r/u", False),
        ("d/r/t", "e/r/t", False),
        ("d/scheduled__2026-01-01T00:00:00+00:00/t", "d/manual__2026-01-01T00:00:00+00:00_x7Qa/t", True),
        ("d/scheduled__2026-01-01T00:00:00+00:00/t", "d/scheduled__2026-01-01T01:00:00+01:00/t", True),
        ("d/scheduled__2026-01-01T00:00:00+00:00/t", "d/scheduled__2026-01-01T01:00:00+00:00/t", False),
        ("d/by hand/t", "d/also by hand/t", False),
        ("d/r/t/3", "d/r/t/3", True),
        ("d/r/t/3", "d/r/t/4", False),
    ],
)
def test_runs_of_the_same_moment_are_the_same(known, wanted, same):
    assert is_same_run(known, wanted) is same
